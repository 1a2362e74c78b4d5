//! Warnings before an attachment: after the VM's next start, QEMU may not wait for a restarted hob. The
//! running VM always waits, because `hob attach` itself gives QEMU the option `reconnect-delay`.

use super::definition::Persistent;
use super::execution::tell;
use super::record::Record;
use super::virsh::virsh;

/// First version of libvirt that keeps `<reconnect>` in the XML of an NBD disk.
const LIBVIRT_MIN: (u32, u32) = (9, 2);
/// Start of the names of disks that Proxmox VE gives to QEMU by `-drive`: all disks of Proxmox VE 8,
/// and those of VMs with a machine version before 10.0.
const DRIVE: &str = "drive-";

/// Ways to avoid I/O errors, for the end of a warning.
pub(super) const ADVICE: &str = "An upgrade ('systemctl reload hob') does not. Detach the disk before the VM stops, or give \
                                 the VM a block device instead, which waits for hob ('hob disk add --device', \
                                 docs/DEVICE.md)";

/// Warns if QEMU will not wait for a restarted hob after the VM's next start.
pub(super) async fn warn(persistent: &Persistent, record: &Record) {
    let libvirt = match persistent {
        Persistent::Libvirt(_) => virsh(&["--version"]).await.unwrap_or_default(),
        Persistent::None | Persistent::Proxmox(_) => String::new(),
    };
    if let Some(warning) = warning(record, &libvirt) {
        tell(&warning);
    }
}

/// Returns the warning about a disk. `libvirt` is the version of libvirt, or empty.
fn warning(record: &Record, libvirt: &str) -> Option<String> {
    let Record { label, definition, volumes, .. } = record;
    let is_old = version(libvirt).is_some_and(|version| version < LIBVIRT_MIN);
    let reason = match (definition, volumes) {
        (Some(_), _) if is_old => format!("libvirt {} ignores <reconnect> for NBD disks", libvirt.trim()),
        (_, Some(_)) if label.starts_with(DRIVE) => {
            "Proxmox VE gives the disk to QEMU by '-drive', without a reconnect delay".to_owned()
        }
        _ => return None,
    };
    Some(format!(
        "{label}: warning: {reason}. After the VM's next start, a restart or crash of hob causes I/O errors in the guest. \
         {ADVICE}"
    ))
}

/// Returns the first two numbers of a version.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.trim().split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(label: &str, more: &serde_json::Value) -> Record {
        let mut record = serde_json::json!({
            "version": 1, "target": "libvirt:web", "disk": "web-vda", "label": label, "backend": label,
            "file": "/image", "format": "raw", "method": "reopen", "cache": { "pool": "fast" },
            "node": {}, "spare": [],
        });
        for (name, value) in more.as_object().unwrap() {
            record[name.as_str()] = value.clone();
        }
        serde_json::from_value(record).unwrap()
    }

    #[test]
    fn an_old_libvirt_is_warned_about() {
        let defined = record("virtio-disk0", &serde_json::json!({ "definition": "<disk/>" }));
        for (libvirt, expected) in [
            ("9.0.0\n", true),
            ("8.10.0", true),
            ("9.2.0", false),
            ("10.0.0", false),
            ("", false),
            ("unknown", false),
        ] {
            let found = warning(&defined, libvirt);
            assert_eq!(found.is_some(), expected, "{libvirt}");
            assert!(found.is_none_or(|text| text.contains("hob disk add --device") && !text.contains('\n')));
        }
        // The next start uses the image.
        assert_eq!(warning(&record("virtio-disk0", &serde_json::json!({})), "9.0.0"), None);
    }

    #[test]
    fn a_drive_of_proxmox_ve_is_warned_about() {
        let volumes = serde_json::json!({ "volumes": { "key": "scsi0", "image": "a:b", "hob": "c:b" } });
        for (label, expected) in [("drive-scsi0", true), ("scsi0", false)] {
            let found = warning(&record(label, &volumes), "");
            assert_eq!(found.is_some_and(|text| text.contains("Proxmox VE")), expected, "{label}");
        }
    }
}
