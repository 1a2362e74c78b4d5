//! The names of VMs: `qmp:PATH`, `libvirt:NAME` and `pve:VMID`. One VM may have several names.

use std::path::PathBuf;
use std::str::FromStr;

use super::proxmox;
use super::qmp::Monitor;
use super::virsh::{Info, is_unknown_domain};
use crate::pool::absolute;

/// The VM whose disks are attached or detached.
#[derive(Clone, Debug)]
pub(super) struct Target {
    /// The VM's name in records and messages.
    pub(super) text: String,
    pub(super) kind: Kind,
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    Qmp(PathBuf),
    Libvirt(String),
    Proxmox(u32),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Target, String> {
        let kind = match text.split_once(':') {
            Some(("qmp", path)) if !path.is_empty() => Kind::Qmp(plain(absolute(path.to_owned()).into())),
            Some(("libvirt", name)) if !name.is_empty() => Kind::Libvirt(name.to_owned()),
            Some(("pve", id)) if id.parse::<u32>().is_ok() => Kind::Proxmox(id.parse().unwrap_or_default()),
            _ => {
                return Err("a VM is qmp:PATH (the QMP socket of QEMU), libvirt:NAME or pve:VMID".to_owned());
            }
        };
        let text = match &kind {
            Kind::Qmp(path) => format!("qmp:{}", path.display()),
            Kind::Libvirt(name) => format!("libvirt:{name}"),
            Kind::Proxmox(vmid) => format!("pve:{vmid}"),
        };
        Ok(Target { text, kind })
    }
}

impl Target {
    /// Returns all names that records may have for the VM: a domain of libvirt has a name and a
    /// UUID.
    pub(super) async fn names(&self) -> anyhow::Result<Vec<String>> {
        let Kind::Libvirt(domain) = &self.kind else { return Ok(vec![self.text.clone()]) };
        match Info::read(domain).await {
            Ok(info) => Ok(names_of_domain(&self.text, info)),
            // The domain was deleted from libvirt.
            Err(error) if is_unknown_domain(&error) => Ok(vec![self.text.clone()]),
            Err(error) => Err(error),
        }
    }

    /// Returns the names by which commands lock the VM with these names.
    pub(super) fn locked(&self, names: &[String]) -> Vec<String> {
        match self.kind {
            // The user may also name the QMP socket of a VM of Proxmox VE.
            Kind::Proxmox(vmid) => vec![format!("qmp:{}", plain(proxmox::qmp(vmid)).display())],
            _ => names.to_owned(),
        }
    }

    /// Connects to the QEMU of the VM.
    pub(super) async fn connect(&self) -> anyhow::Result<Monitor> {
        match &self.kind {
            Kind::Qmp(path) => Monitor::connect(path).await,
            Kind::Libvirt(domain) => Monitor::of_domain(domain).await,
            Kind::Proxmox(vmid) => Monitor::of_proxmox(*vmid).await,
        }
    }

    /// Returns the VM's name for the names of hob's disks, if QEMU has no name of the VM.
    pub(super) fn default_name(&self) -> String {
        match &self.kind {
            Kind::Qmp(path) => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
            Kind::Libvirt(domain) => domain.clone(),
            Kind::Proxmox(vmid) => format!("vm-{vmid}"),
        }
    }
}

/// Returns the names of a domain of libvirt in a fixed order. `text` is the user's name of it.
fn names_of_domain(text: &str, info: Info) -> Vec<String> {
    let mut names = vec![text.to_owned()];
    names.extend([info.name, info.uuid].map(|name| format!("libvirt:{name}")));
    names.sort();
    names.dedup();
    names
}

/// Returns the path of a socket without links and `..` in its directory, so that one socket has one
/// name in the records. The socket itself may be gone.
fn plain(socket: PathBuf) -> PathBuf {
    let directory = socket.parent().and_then(|directory| directory.canonicalize().ok());
    let plain = directory.zip(socket.file_name()).map(|(directory, name)| directory.join(name));
    plain.unwrap_or(socket)
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    #[test]
    fn a_domain_is_the_same_vm_by_its_name_and_by_its_uuid() {
        let info = || Info {
            name: "web".to_owned(),
            uuid: "0b1c".to_owned(),
            state: "running".to_owned(),
            is_persistent: true,
            is_saved: false,
        };
        for text in ["libvirt:web", "libvirt:0b1c"] {
            let names = names_of_domain(text, info());
            assert_eq!(names, ["libvirt:0b1c", "libvirt:web"], "{text}");
        }
    }

    #[test]
    fn a_vm_of_proxmox_ve_has_the_lock_of_its_socket() {
        let target: Target = "pve:100".parse().unwrap();
        let socket: Target = format!("qmp:{}", proxmox::qmp(100).display()).parse().unwrap();
        assert_eq!(
            target.locked(slice::from_ref(&target.text)),
            socket.locked(slice::from_ref(&socket.text))
        );
    }

    #[test]
    fn a_socket_has_one_name() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap();
        std::fs::create_dir(real.join("run")).unwrap();
        std::os::unix::fs::symlink("run", real.join("link")).unwrap();
        let expected = format!("qmp:{}/run/web.qmp", real.display());
        for name in ["run/web.qmp", "link/web.qmp", "run/../link/web.qmp", "run/./web.qmp"] {
            let target: Target = format!("qmp:{}/{name}", real.display()).parse().unwrap();
            assert_eq!(target.text, expected, "{name}");
        }
        let missing: Target = "qmp:/nowhere/web.qmp".parse().unwrap();
        assert_eq!(missing.text, "qmp:/nowhere/web.qmp");
    }
}
