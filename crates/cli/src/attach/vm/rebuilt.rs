//! The record of an attachment, made again from QEMU's block nodes and hob's disk, because its file
//! is lost.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use hob_control::{CacheEnable, CacheSettings, Disk};
use serde_json::{Value, json};

use super::Vm;
use crate::attach::graph::Device;
use crate::attach::image::is_same_file;
use crate::attach::options::{given_image, node_name, of_hob};
use crate::attach::overlay::server;
use crate::attach::record::{Method, Record};

/// A disk of a VM that is connected to an NBD server by a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::attach) struct Connected {
    pub(in crate::attach) device: Device,
    /// Name of the NBD export. If the server is hob, it is the name of hob's disk.
    pub(in crate::attach) export: String,
    pub(in crate::attach) socket: String,
    /// True if the NBD node has the name that `hob attach` gives to its nodes. This is no evidence if
    /// the guest controls QEMU.
    pub(in crate::attach) is_attached: bool,
}

impl Vm {
    /// Returns the disks of the VM whose requests go to an NBD server by a Unix socket.
    pub(in crate::attach) fn connected(&self) -> Vec<Connected> {
        let connected = |device: &Device| {
            let name = self.graph.chain(&device.backend).ok()?.pop()?;
            let (export, socket) = server(self.graph.nodes.get(&name)?)?;
            let is_attached = name == node_name(&export, "");
            Some(Connected { device: device.clone(), export, socket, is_attached })
        };
        self.graph.devices.iter().filter_map(connected).collect()
    }

    /// Returns the record of an attachment whose file is lost. `disk` is hob's disk. `target` is
    /// the VM's name. The record does not have the VM's persistent definition.
    ///
    /// # Errors
    /// Returns the reason why hob cannot replace its disk while the VM runs.
    pub(in crate::attach) fn rebuilt(
        &self,
        found: &Connected,
        disk: &Disk,
        target: &str,
    ) -> anyhow::Result<Record> {
        let file = PathBuf::from(&disk.backing);
        let chain = self.graph.chain(&found.device.backend)?;
        let (image, parents) = chain.split_last().expect("a chain has a node");
        if let Some(other) = self.other_node(image, &file) {
            bail!("QEMU has its image open too, as the block node {other}");
        }
        let parent = parents.last().and_then(|parent| self.graph.nodes.get(parent));
        let options = self.opened(&file)?;
        let given = options["filename"].as_str().unwrap_or_default().to_owned();
        let own_name = options["node-name"].as_str().map(str::to_owned);
        let record = Record {
            version: Record::VERSION,
            target: target.to_owned(),
            disk: disk.name.clone(),
            label: found.device.label.clone(),
            backend: found.device.backend.clone(),
            file,
            format: parent.map_or("raw", |node| node.driver.as_str()).to_owned(),
            method: Method::Reopen,
            cache: cache_of(disk),
            node: of_hob(image, &found.socket, &disk.name, true),
            spare: vec![options],
            parent: None,
            definition: None,
            volumes: None,
        };
        let mut record = self.adapted(&record, image, parents)?;
        if record.method != Method::Mirror {
            // libvirt knows the image's node by the name that it had at the VM's start.
            if let Some(name) = own_name.filter(|name| !self.graph.has(name)) {
                record.spare[0]["node-name"] = json!(name);
            }
            return Ok(record);
        }
        if found.is_attached && parents.is_empty() {
            // The method `mirror` has replaced a raw node together with the file node.
            let file = record.image_options().context("the image's node has no options")?;
            record.spare = vec![self.raw(&record, image, file)];
        }
        let root = parents.last().unwrap_or(image);
        if self.discards(root, &given) && record.spare[0]["driver"] == "raw" {
            record.spare[0]["discard"] = json!("unmap");
            if let Some(zeroes) = self.zeroes(root, &given) {
                record.spare[0]["detect-zeroes"] = json!(zeroes);
            }
        }
        Ok(record)
    }

    /// Returns the options of a node that opens an image of hob's disk: those of the VM's start, if
    /// QEMU's command line shows them.
    fn opened(&self, file: &Path) -> anyhow::Result<Value> {
        let text = file.to_str().context("the image file has a name that is not UTF-8")?;
        let metadata = fs::metadata(file).with_context(|| format!("cannot find its image {text}"))?;
        let directory = self.directory.as_deref().unwrap_or(Path::new(""));
        let is_image = |name: &str| is_same_file(&directory.join(name), file);
        let given = given_image(&self.command_line, &is_image);
        let mut options = given.unwrap_or_else(|| json!({ "filename": text, "discard": "unmap" }));
        if options.get("driver").is_none() {
            let is_device = metadata.file_type().is_block_device();
            options["driver"] = json!(if is_device { "host_device" } else { "file" });
        }
        Ok(options)
    }
}

/// Returns the settings of a disk's cache, for a detachment that must be undone.
fn cache_of(disk: &Disk) -> CacheEnable {
    let Some(cache) = &disk.cache else {
        return CacheEnable { pool: String::new(), size: None, settings: CacheSettings::default() };
    };
    let settings = CacheSettings {
        preset: cache.preset.clone(),
        block_size: Some(cache.block_size),
        policy: Some(cache.policy.clone()),
        mode: Some(cache.mode.clone()),
        persistent: Some(cache.persistent),
        layout: Some(cache.layout.clone()),
        admission: Some(cache.admission.clone()),
        copies: Some(cache.copies.clone()),
        ram: Some(cache.ram),
        ..CacheSettings::default()
    };
    let size = cache.shared.is_none().then_some(cache.size);
    CacheEnable { pool: cache.pool.clone(), size, settings }
}

#[cfg(test)]
mod tests {
    use hob_control::{Cache, Size};

    use super::*;
    use crate::attach::vm::tests::vm_of_chain;

    const SOCKET: &str = "/run/hob/nbd.sock";

    /// Returns a VM with a device `vda` and these nodes below each other (name, driver). The NBD
    /// node is connected to hob's disk `web-vda`.
    fn vm(chain: &[(&str, &str)], command_line: &[&str]) -> Vm {
        let file = format!("nbd+unix:///web-vda?socket={SOCKET}");
        let chain: Vec<_> = chain.iter().map(|(name, driver)| (*name, *driver, file.as_str())).collect();
        vm_of_chain(&chain, command_line)
    }

    /// Returns hob's disk with an image file.
    fn disk(image: &tempfile::NamedTempFile) -> Disk {
        let cache = Cache {
            pool: "fast".to_owned(),
            size: Size(64 << 20),
            mode: "write-back".to_owned(),
            ..Cache::default()
        };
        let backing = image.path().display().to_string();
        Disk { name: "web-vda".to_owned(), backing, cache: Some(cache), ..Disk::default() }
    }

    fn rebuilt(vm: &Vm, disk: &Disk) -> Record {
        let found = vm.connected().swap_remove(0);
        vm.rebuilt(&found, disk, "qmp:/run/web.qmp").unwrap()
    }

    #[test]
    fn a_disk_that_hob_attached_is_known_by_the_name_of_its_node() {
        let own = node_name("web-vda", "");
        for (name, is_attached) in [(own.as_str(), true), ("started", false), ("hob-1", false)] {
            let found = vm(&[("image", "qcow2"), (name, "nbd")], &[]).connected();
            assert_eq!(found.len(), 1, "{name}");
            assert_eq!((found[0].export.as_str(), found[0].socket.as_str()), ("web-vda", SOCKET));
            assert_eq!(found[0].is_attached, is_attached, "{name}");
        }
        assert!(vm(&[("image", "raw"), ("image-file", "file")], &[]).connected().is_empty());
    }

    #[test]
    fn a_record_is_made_again_from_the_nodes_and_the_disk() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let own = node_name("web-vda", "");
        let given = format!(
            "driver=file,node-name=image-file,filename={},aio=threads,cache.direct=on",
            image.path().display()
        );
        let chain = [("image", "qcow2"), (own.as_str(), "nbd")];
        let record = rebuilt(&vm(&chain, &["qemu", "-blockdev", &given]), &disk(&image));
        assert_eq!((record.method, record.format.as_str()), (Method::Reopen, "qcow2"));
        assert_eq!((record.node_name(), record.socket()), (own.as_str(), SOCKET));
        assert_eq!((record.image_node(), record.file.as_path()), ("image-file", image.path()));
        assert_eq!(
            (&record.spare[0]["aio"], &record.spare[0]["cache"]["direct"]),
            (&json!("threads"), &json!(true))
        );
        assert_eq!(record.parent.as_ref().unwrap()["node-name"], "image");
        assert_eq!((record.cache.pool.as_str(), record.cache.size), ("fast", Some(Size(64 << 20))));
        assert_eq!(record.cache.settings.mode.as_deref(), Some("write-back"));
        assert!(record.has_own_node());
    }

    #[test]
    fn the_options_of_a_drive_are_kept() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let own = node_name("web-vda", "");
        let drive = |more: &str| format!("if=none,id=vda,file={}{more}", image.path().display());
        for (more, discard, zeroes, is_direct) in
            [(",cache=none,discard=unmap", json!("unmap"), "unmap", true), ("", Value::Null, "on", false)]
        {
            let record =
                rebuilt(&vm(&[(own.as_str(), "nbd")], &["qemu", "-drive", &drive(more)]), &disk(&image));
            assert_eq!((record.method, record.format.as_str()), (Method::Mirror, "raw"));
            let raw = &record.spare[0];
            assert_eq!((&raw["driver"], &raw["discard"]), (&json!("raw"), &discard), "{raw}");
            assert_eq!(
                (&raw["detect-zeroes"], &raw["file"]["cache"]["direct"]),
                (&json!(zeroes), &json!(is_direct))
            );
            assert_eq!(raw["file"]["filename"], image.path().display().to_string());
        }
        let qcow2 = vm(&[("#block1", "qcow2"), (own.as_str(), "nbd")], &["qemu", "-drive", &drive("")]);
        let record = rebuilt(&qcow2, &disk(&image));
        assert_eq!((record.method, &record.spare[0]["driver"]), (Method::Device, &json!("file")));
        assert!(record.image_node().starts_with("hob-"), "{}", record.image_node());
    }

    #[test]
    fn a_disk_without_its_image_is_refused() {
        let own = node_name("web-vda", "");
        let vm = vm(&[("image", "raw"), (own.as_str(), "nbd")], &[]);
        let found = vm.connected().swap_remove(0);
        let gone =
            Disk { name: "web-vda".to_owned(), backing: "/nowhere/image".to_owned(), ..Disk::default() };
        let error = format!("{:#}", vm.rebuilt(&found, &gone, "qmp:/run/web.qmp").unwrap_err());
        assert!(error.contains("cannot find its image /nowhere/image"), "{error}");
    }
}
