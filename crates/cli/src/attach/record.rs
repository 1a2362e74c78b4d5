//! The record of an attachment: the changes in QEMU, and how to undo them. Each attached disk has
//! one record file. `hob attach` writes the file before the first change of the disk. The file is
//! deleted when all changes are undone.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use hob_control::CacheEnable;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::libvirt::is_same_path;
use super::options::{OWN, node_name};
use super::proxmox::Volumes;

/// Version of the file format.
const VERSION: u32 = 1;

/// Method by which QEMU redirects the VM's requests to another block node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Method {
    /// `blockdev-reopen` of a node with a name.
    Reopen,
    /// `blockdev-mirror` without copying, for raw images of `-drive`.
    Mirror,
    /// QEMU's `qemu-io … reopen`, for other images of `-drive`.
    Device,
}

/// One attached disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    pub(super) version: u32,
    /// The VM as named by the user: `qmp:PATH`, `libvirt:NAME` or `pve:VMID`.
    pub(super) target: String,
    /// hob's disk.
    pub(super) disk: String,
    /// Short name of the guest's device. `backend` is the name of its block backend.
    pub(super) label: String,
    pub(super) backend: String,
    /// The image file. `format` is its image format.
    pub(super) file: PathBuf,
    pub(super) format: String,
    pub(super) method: Method,
    /// Settings of the disk's cache.
    pub(super) cache: CacheEnable,
    /// Arguments of `blockdev-add` for the node that is connected to hob.
    pub(super) node: Value,
    /// Arguments of `blockdev-add` for the image's nodes, lowest first. The VM does not use these
    /// nodes while its requests go to hob.
    pub(super) spare: Vec<Value>,
    /// Arguments of `blockdev-reopen` without `file`, for the node whose `file` changes; only for
    /// [`Method::Reopen`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) parent: Option<Value>,
    /// The original XML element of the disk in the persistent definition of a libvirt domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) definition: Option<String>,
    /// The volumes of a disk of Proxmox VE, if the VM's next start can use hob's storage plugin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) volumes: Option<Volumes>,
}

impl Record {
    pub(super) const VERSION: u32 = VERSION;

    /// Returns the name of the node that is connected to hob.
    pub(super) fn node_name(&self) -> &str {
        name_of(&self.node)
    }

    /// Returns true if a user's name of a disk means this disk: the device, hob's disk, or the path
    /// of the image.
    pub(super) fn is_named(&self, name: &str) -> bool {
        [self.label.as_str(), &self.disk, &self.backend].contains(&name)
            || is_same_path(&self.file, Path::new(name))
    }

    /// Returns the libvirt domain of the VM.
    pub(super) fn domain(&self) -> Option<&str> {
        self.target.strip_prefix("libvirt:")
    }

    /// Returns the number of the VM in Proxmox VE.
    pub(super) fn vmid(&self) -> Option<u32> {
        self.target.strip_prefix("pve:")?.parse().ok()
    }

    /// Returns the path of hob's NBD socket.
    pub(super) fn socket(&self) -> &str {
        self.node["server"]["path"].as_str().unwrap_or_default()
    }

    /// Returns true if the node that is connected to hob has a name that hob chose. If the VM was
    /// started with hob's disk, the node has another name.
    pub(super) fn has_own_node(&self) -> bool {
        self.node_name().starts_with(OWN)
    }

    /// Returns the identifier of the block job.
    pub(super) fn job(&self) -> String {
        match self.has_own_node() {
            true => format!("{}-job", self.node_name()),
            false => node_name(&self.disk, "-job"),
        }
    }

    /// Returns the options of the image's file node, without a name.
    pub(super) fn image_options(&self) -> Option<Value> {
        let lowest = self.spare.first()?;
        let is_inline = lowest.get("filename").is_none();
        let mut options = if is_inline { lowest["file"].clone() } else { lowest.clone() };
        let names = options.as_object_mut()?;
        names.remove("node-name");
        if is_inline {
            // QEMU's default for a node inside the options of another node.
            names.entry("discard").or_insert_with(|| "unmap".into());
        }
        Some(options)
    }

    /// Returns the name of the node that the VM uses without hob: the parent's `file`, or the
    /// device's root.
    pub(super) fn image_node(&self) -> &str {
        self.spare.last().map(name_of).unwrap_or_default()
    }
}

/// Returns the node name in a node's options.
pub(super) fn name_of(options: &Value) -> &str {
    options["node-name"].as_str().unwrap_or_default()
}

/// The directory with all records. Several commands may have it open, for different VMs
/// (`locks.rs`). While this value exists, no earlier version of hob can open the directory: its
/// commands do not know the locks of VMs.
#[derive(Debug)]
pub(super) struct Records {
    directory: PathBuf,
    _lock: File,
}

impl Records {
    /// Opens the directory, and creates it if necessary.
    ///
    /// # Errors
    /// Returns an error if a command of an earlier version of hob runs.
    pub(super) fn open(directory: &Path) -> anyhow::Result<Records> {
        let at = || directory.display().to_string();
        fs::create_dir_all(directory).with_context(|| format!("cannot create {}", at()))?;
        let lock =
            File::create(directory.join("lock")).with_context(|| format!("cannot write to {}", at()))?;
        if flock(&lock, FlockOperation::NonBlockingLockShared).is_err() {
            bail!(
                "a 'hob attach' or 'hob detach' of an earlier version of hob is running; repeat the command when it \
                 has ended"
            );
        }
        Ok(Records { directory: directory.to_owned(), _lock: lock })
    }

    /// Reads the records of all VMs. Changes nothing.
    pub(super) fn list(directory: &Path) -> anyhow::Result<Vec<Record>> {
        let files = match fs::read_dir(directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            files => files.with_context(|| format!("cannot read {}", directory.display()))?,
        };
        let mut records = Vec::new();
        for file in files {
            let path = file?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                records.extend(read(&path)?);
            }
        }
        records.sort_by(|a, b| (&a.target, &a.disk).cmp(&(&b.target, &b.disk)));
        Ok(records)
    }

    pub(super) fn all(&self) -> anyhow::Result<Vec<Record>> {
        Records::list(&self.directory)
    }

    pub(super) fn path(&self, disk: &str) -> PathBuf {
        self.directory.join(format!("{disk}.json"))
    }

    pub(super) fn has(&self, disk: &str) -> bool {
        self.path(disk).exists()
    }

    /// Writes a record durably.
    pub(super) fn save(&self, record: &Record) -> anyhow::Result<()> {
        let (path, new) = (self.path(&record.disk), self.directory.join(format!("{}.new", record.disk)));
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&new)?;
            file.write_all(serde_json::to_string_pretty(record)?.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            File::open(&self.directory)?.sync_all()
        };
        let written = write();
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
        written.with_context(|| format!("cannot write {}", path.display()))
    }

    /// Deletes a record durably.
    pub(super) fn delete(&self, disk: &str) -> anyhow::Result<()> {
        let path = self.path(disk);
        let delete = || -> std::io::Result<()> {
            fs::remove_file(&path)?;
            File::open(&self.directory)?.sync_all()
        };
        delete().with_context(|| format!("cannot delete {}", path.display()))
    }
}

/// Reads a record. Returns `None` if another command has just deleted it.
fn read(path: &Path) -> anyhow::Result<Option<Record>> {
    let cannot = || format!("cannot read {}", path.display());
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        text => text.with_context(cannot)?,
    };
    // The version comes first: another version may have other fields.
    let version = serde_json::from_str::<Value>(&text).ok().and_then(|record| record["version"].as_u64());
    let advice = format!(
        "If no other version of hob can read this record, rename it to {}.bad. Then 'hob detach TARGET DISK' works without \
         the record while the VM runs",
        path.display()
    );
    match version {
        Some(version) if version != u64::from(VERSION) => {
            bail!("{} has version {version}; this hob knows version {VERSION}. {advice}", path.display())
        }
        _ => {
            serde_json::from_str(&text).map(Some).map_err(|error| anyhow!("{}: {error}. {advice}", cannot()))
        }
    }
}

/// Returns the record of the disk `vda` with a raw image, for tests.
#[cfg(test)]
pub(super) fn example() -> Record {
    serde_json::from_value(serde_json::json!({
        "version": 1, "target": "qmp:/run/web.qmp", "disk": "web-vda", "label": "vda", "backend": "vda",
        "file": "/image", "format": "raw", "method": "reopen", "cache": { "pool": "fast" },
        "node": { "node-name": "hob-1" }, "spare": [{ "node-name": "image-file" }],
    }))
    .unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_for_different_vms_run_in_parallel_but_not_with_those_of_an_earlier_version() {
        let dir = tempfile::tempdir().unwrap();
        let first = Records::open(dir.path()).unwrap();
        let second = Records::open(dir.path()).unwrap();
        let earlier = File::open(dir.path().join("lock")).unwrap();
        assert!(flock(&earlier, FlockOperation::NonBlockingLockExclusive).is_err());
        drop((first, second));
        flock(&earlier, FlockOperation::NonBlockingLockExclusive).unwrap();
        let error = Records::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("earlier version"), "{error}");
    }

    #[test]
    fn a_record_that_another_command_has_deleted_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(&dir.path().join("web-vda.json")).unwrap(), None);
        fs::write(dir.path().join("web-vda.json"), "{").unwrap();
        assert!(Records::list(dir.path()).is_err());
    }

    #[test]
    fn an_unreadable_record_has_advice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web-vda.json");
        let renamed = format!("rename it to {}.bad", path.display());
        for (text, reason) in [
            ("", "cannot read"),
            (r#"{"version":1}"#, "cannot read"),
            (r#"{"version":2,"other":"field"}"#, "has version 2; this hob knows version 1"),
        ] {
            fs::write(&path, text).unwrap();
            let error = format!("{:#}", Records::list(dir.path()).unwrap_err());
            assert!(error.contains(reason) && error.contains(&renamed), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
        // The renamed file is no record.
        fs::rename(&path, dir.path().join("web-vda.json.bad")).unwrap();
        assert!(Records::list(dir.path()).unwrap().is_empty());
    }
}
