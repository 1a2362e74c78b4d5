//! VMs of Proxmox VE: their files, and the persistent configuration of a disk.
//!
//! A storage of hob's storage plugin (`packaging/proxmox`) has the volumes of another storage, its
//! base. If such a storage exists, the VM's configuration gets the disk's volume on that storage,
//! and the plugin serves the volume from the VM's next start on.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use super::plan::Definition;
use super::threads::in_thread;

/// Name of an environment variable for tests: a directory that replaces `/` in the paths of Proxmox
/// VE's files.
const ROOT: &str = "HOB_PVE_ROOT";

/// Perl script that changes a volume in a VM's configuration, with the lock of Proxmox VE.
/// Arguments: VMID, key, old volume, new volume. The command `qm set` would unplug the disk of a
/// running VM.
const SCRIPT: &str = r#"
use strict; use warnings; use PVE::QemuConfig; use PVE::QemuServer;
my ($vmid, $key, $from, $to) = @ARGV;
PVE::QemuConfig->lock_config($vmid, sub {
    my $conf = PVE::QemuConfig->load_config($vmid);
    PVE::QemuConfig->check_lock($conf);
    my $value = $conf->{$key} // '';
    $value =~ s/^(file=)?\Q$from\E(?=,|$)/($1 \/\/ '') . $to/e
        or die "$key of VM $vmid is no longer on $from\n";
    $conf->{$key} = $value;
    PVE::QemuConfig->write_config($vmid, $conf);
});
"#;

/// The volumes of an attached disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Volumes {
    /// Key in the VM's configuration, for example `scsi0`.
    pub(super) key: String,
    /// The volume on its own storage, for example `local-lvm:vm-100-disk-0`.
    pub(super) image: String,
    /// The same volume on a storage of the type `hob`.
    pub(super) hob: String,
}

impl Volumes {
    /// Returns the name that the storage plugin gives to hob's disk (`disk_name` in HobPlugin.pm).
    pub(super) fn disk(&self) -> String {
        let (storage, volume) = self.hob.split_once(':').unwrap_or(("", self.hob.as_str()));
        let directory = volume.split_once('/').filter(|(vmid, _)| is_number(vmid));
        let (directory, mut rest) = match directory {
            Some((vmid, rest)) => (format!("{vmid}-"), rest.as_bytes()),
            None => (String::new(), volume.as_bytes()),
        };
        let mut name = format!("{storage}-{directory}");
        while let Some((&byte, after)) = rest.split_first() {
            if is_plain(byte) && !(byte == b'.' && is_code(after)) {
                name.push(char::from(byte));
            } else {
                name.push_str(&format!(".x{byte:02x}."));
            }
            rest = after;
        }
        name
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns true if the names of hob's disks may have this character.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"._-".contains(&byte)
}

/// Returns true if the text after a dot looks like the code of a character, `xHH.`.
fn is_code(rest: &[u8]) -> bool {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    matches!(rest, [b'x', high, low, b'.', ..] if is_hex(*high) && is_hex(*low))
}

/// The configuration of a VM and of the storages.
#[derive(Debug)]
pub(super) struct Settings {
    vm: String,
    storages: String,
    /// Name of this node.
    node: String,
}

impl Settings {
    /// Reads the configuration of a VM of this node.
    ///
    /// # Errors
    /// Returns an error if the VM is not on this node.
    pub(super) fn read(vmid: u32) -> anyhow::Result<Settings> {
        let read = |path: String| {
            let path = file(&path);
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
        Ok(Settings {
            vm: read(format!("etc/pve/qemu-server/{vmid}.conf"))?,
            storages: read("etc/pve/storage.cfg".to_owned())?,
            node: host.trim().split('.').next().unwrap_or_default().to_owned(),
        })
    }

    /// Returns the volumes of a disk by the label of its device. Before Proxmox VE 9, the label is the
    /// name of a drive, such as `drive-scsi0`.
    ///
    /// # Errors
    /// Returns the reason why the VM's next start cannot use hob.
    pub(super) fn volumes(&self, label: &str) -> Result<Volumes, String> {
        let key = label.strip_prefix("drive-").unwrap_or(label);
        let image = self.volume(key).ok_or_else(|| format!("the VM's configuration has no disk {key}"))?;
        let (storage, name) =
            image.split_once(':').ok_or_else(|| format!("{image} is not a volume of a storage"))?;
        if !is_raw(name) {
            return Err(format!("hob's storage plugin does not support the volume {image}"));
        }
        let hob = self
            .layer_over(storage)
            .ok_or_else(|| format!("no storage of the type 'hob' has {storage} as its base"))?;
        Ok(Volumes { key: key.to_owned(), image: image.to_owned(), hob: format!("{hob}:{name}") })
    }

    /// Refuses a VM that an operation of Proxmox VE has locked, for example a backup.
    pub(super) fn check_lock(&self, vmid: u32) -> anyhow::Result<()> {
        let Some(lock) = self.value("lock") else { return Ok(()) };
        let when = match lock {
            "suspended" | "suspending" => "the VM has been resumed ('qm resume') and stopped",
            _ => "this operation has ended",
        };
        bail!("VM {vmid} has the lock '{lock}'; repeat the command when {when}")
    }

    /// Returns which volume the VM's configuration has.
    pub(super) fn definition(&self, volumes: &Volumes) -> Definition {
        match self.volume(&volumes.key) {
            Some(volume) if volume == volumes.image => Definition::Image,
            Some(volume) if volume == volumes.hob => Definition::Hob,
            _ => Definition::None,
        }
    }

    fn volume(&self, key: &str) -> Option<&str> {
        let volume = self.value(key)?.split(',').next()?;
        Some(volume.strip_prefix("file=").unwrap_or(volume))
    }

    /// Returns a value of the VM's configuration. Sections of snapshots and pending changes follow
    /// the configuration.
    fn value(&self, key: &str) -> Option<&str> {
        let lines = self.vm.lines().take_while(|line| !line.starts_with('['));
        lines.filter_map(|line| line.split_once(':')).find(|(name, _)| *name == key).map(|it| it.1.trim())
    }

    /// Returns the storage of the type `hob` that has the storage `base` below it, on this node.
    fn layer_over(&self, base: &str) -> Option<&str> {
        let mut found = None;
        let mut section = Section::default();
        for line in self.storages.lines().chain(["end:"]) {
            let Some((key, value)) = line.split_once([' ', ':', '\t']).filter(|_| !is_indented(line)) else {
                let (key, value) = line.trim().split_once([' ', '\t']).unwrap_or((line.trim(), ""));
                section.set(key, value.trim(), &self.node);
                continue;
            };
            if section.base == Some(base) && section.is_usable {
                found = found.or(section.name);
            }
            let name = value.trim_start_matches(':').trim();
            section = Section { name: (key == "hob").then_some(name), base: None, is_usable: key == "hob" };
        }
        found
    }
}

/// A section of `storage.cfg`.
#[derive(Default)]
struct Section<'a> {
    /// Name of the storage, if its type is `hob`.
    name: Option<&'a str>,
    base: Option<&'a str>,
    is_usable: bool,
}

impl<'a> Section<'a> {
    fn set(&mut self, key: &str, value: &'a str, node: &str) {
        match key {
            "hob-base" => self.base = Some(value),
            "disable" => self.is_usable &= value == "0",
            "nodes" => self.is_usable &= value.split(',').any(|name| name.trim() == node),
            _ => {}
        }
    }
}

fn is_indented(line: &str) -> bool {
    line.is_empty() || line.starts_with([' ', '\t', '#'])
}

/// Returns true if hob's storage plugin accepts a volume of this name.
fn is_raw(name: &str) -> bool {
    let parts: Vec<&str> = name.split('/').collect();
    let ([file] | [_, file]) = parts[..] else { return false };
    let other = [".qcow2", ".vmdk", ".subvol"].iter().any(|end| file.trim_end_matches(".raw").ends_with(end));
    let is_directory = parts.len() == 1 || parts[0].bytes().all(|byte| byte.is_ascii_digit());
    file.starts_with("vm-") && is_directory && !other
}

/// Changes the volume of a disk in a VM's configuration.
///
/// # Errors
/// Returns an error if Proxmox VE refuses the change, for example during a backup.
pub(super) async fn replace(vmid: u32, key: &str, from: &str, to: &str) -> anyhow::Result<()> {
    let mut command = Command::new("perl");
    // Ctrl-C must not end perl: hob handles the signal and undoes its steps.
    command.args(["-e", SCRIPT, &vmid.to_string(), key, from, to]).process_group(0);
    let output = in_thread(move || command.output()).await?.context("cannot run perl")?;
    if !output.status.success() {
        bail!("Proxmox VE: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Returns the path of a VM's QMP socket.
pub(super) fn qmp(vmid: u32) -> PathBuf {
    file(&format!("var/run/qemu-server/{vmid}.qmp"))
}

/// Returns true if this node has no VM of this number: the VM was deleted, or is on another node.
pub(super) fn is_gone(vmid: u32) -> bool {
    is_missing(&file("etc/pve/qemu-server"), vmid)
}

/// Returns true if the directory of the VMs' configurations has none of this VM. Without the
/// cluster's file system, the directory is missing, and the VM may exist.
fn is_missing(directory: &Path, vmid: u32) -> bool {
    directory.is_dir() && !directory.join(format!("{vmid}.conf")).exists()
}

/// Returns the numbers of the VMs that run on this node.
pub(super) fn running() -> Vec<u32> {
    let sockets = std::fs::read_dir(file("var/run/qemu-server")).into_iter().flatten().flatten();
    sockets.filter_map(|socket| socket.file_name().to_str()?.strip_suffix(".qmp")?.parse().ok()).collect()
}

/// Returns the process id of a VM.
pub(super) fn pid(vmid: u32) -> Option<i32> {
    let text = std::fs::read_to_string(file(&format!("var/run/qemu-server/{vmid}.pid"))).ok()?;
    text.trim().parse().ok()
}

fn file(path: &str) -> PathBuf {
    PathBuf::from(std::env::var_os(ROOT).unwrap_or_else(|| "/".into())).join(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VM: &str = "boot: order=scsi0
name: web
scsi0: local-lvm:vm-100-disk-0,iothread=1,size=32G
scsi1: file=dir:100/vm-100-disk-1.raw,size=8G
scsi2: dir:100/vm-100-disk-2.qcow2
scsi3: local-lvm:base-9-disk-0/vm-100-disk-3
virtio0: /dev/sdx,size=1G

[before]
scsi0: local-lvm:vm-100-disk-9,size=32G
scsi9: local-lvm:vm-100-disk-9
";

    const STORAGES: &str = "dir: local
\tpath /var/lib/vz

hob: off
\thob-base local-lvm
\tdisable

hob: elsewhere
\thob-base local-lvm
\tnodes pve7,pve8

hob: cached
\thob-base local-lvm
\thob-pool flash
\tnodes pve1,pve2

hob: files
\thob-base dir
";

    fn settings() -> Settings {
        Settings { vm: VM.into(), storages: STORAGES.into(), node: "pve2".into() }
    }

    #[test]
    fn a_disk_has_a_volume_on_the_storage_of_hob() {
        let volumes = settings().volumes("scsi0").unwrap();
        assert_eq!(
            (volumes.image.as_str(), volumes.hob.as_str(), volumes.disk().as_str()),
            ("local-lvm:vm-100-disk-0", "cached:vm-100-disk-0", "cached-vm-100-disk-0")
        );
        let volumes = settings().volumes("scsi1").unwrap();
        assert_eq!(
            (volumes.hob.as_str(), volumes.disk().as_str()),
            ("files:100/vm-100-disk-1.raw", "files-100-vm-100-disk-1.raw")
        );
        assert_eq!(settings().volumes("drive-scsi1").as_ref(), Ok(&volumes));
        assert_eq!(settings().definition(&volumes), Definition::Image);
        let hob = Settings { vm: format!("scsi1: {}\n", volumes.hob), ..settings() };
        assert_eq!(hob.definition(&volumes), Definition::Hob);
        let other = Settings { vm: "scsi1: none,media=cdrom\n".into(), ..settings() };
        assert_eq!(other.definition(&volumes), Definition::None);
    }

    #[test]
    fn a_vm_with_a_lock_is_refused() {
        settings().check_lock(100).unwrap();
        for (lock, advice) in [("backup", "operation has ended"), ("suspended", "has been resumed")] {
            let error = Settings { vm: format!("lock: {lock}\n{VM}"), ..settings() }.check_lock(100);
            let error = error.unwrap_err().to_string();
            assert!(error.contains(&format!("the lock '{lock}'")) && error.contains(advice), "{error}");
        }
    }

    #[test]
    fn a_vm_is_gone_only_if_the_node_has_the_configurations_of_vms() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("100.conf"), VM).unwrap();
        assert!(!is_missing(dir.path(), 100));
        assert!(is_missing(dir.path(), 101));
        assert!(!is_missing(&dir.path().join("not-mounted"), 100));
    }

    /// `packaging/proxmox/test/plugin.t` tests the same names.
    #[test]
    fn different_volumes_have_different_disks() {
        let name = |volume: &str| {
            let (image, hob) = (format!("local:{volume}"), format!("cached:{volume}"));
            Volumes { key: "scsi0".into(), image, hob }.disk()
        };
        assert_eq!(name("vm-100-a-b"), "cached-vm-100-a-b");
        assert_eq!(name("vm-100-a+b"), "cached-vm-100-a.x2b.b");
        assert_eq!(name("vm-100-a.x2b.b"), "cached-vm-100-a.x2e.x2b.b");
        assert_eq!(name("100/vm-100-disk-1.raw"), "cached-100-vm-100-disk-1.raw");
    }

    #[test]
    fn a_disk_that_the_plugin_cannot_serve_has_a_reason() {
        for (key, reason) in [
            ("scsi2", "does not support"),
            ("scsi3", "does not support"),
            ("scsi9", "has no disk scsi9"),
            ("virtio0", "not a volume"),
        ] {
            let said = settings().volumes(key).unwrap_err();
            assert!(said.contains(reason), "{key}: {said}");
        }
        let elsewhere = Settings { node: "pve3".into(), ..settings() };
        assert!(elsewhere.volumes("scsi0").unwrap_err().contains("no storage of the type 'hob'"));
    }
}
