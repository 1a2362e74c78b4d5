//! Names of block devices that stay the same when the kernel numbers its devices differently.
//!
//! The kernel numbers block devices in the order in which it finds them. After a restart of the
//! host, `/dev/sda` or `/dev/dm-6` may be another device. udev and LVM keep links with stable
//! names.
//!
//! Links with names from the content of a device (`by-uuid`, `by-label`, `lvm-pv-uuid`) are not
//! used, because a guest may write this content.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::device_number;

const DEV: &str = "/dev";
const SYS_BLOCK: &str = "/sys/dev/block";

/// Names of devices that the kernel counts with letters, such as `sda` and `sda1`.
const LETTERED: [&str; 4] = ["sd", "vd", "xvd", "hd"];

/// Names of devices that the kernel counts with numbers, such as `dm-6` and `nvme0n1p2`.
const COUNTED: [&str; 9] = ["dm-", "loop", "nbd", "nvme", "md", "zd", "rbd", "drbd", "mmcblk"];

/// Directories with stable links below `/dev`, the best first, and the depth of the links.
const DIRECTORIES: [(&str, usize); 6] =
    [("disk/by-id", 1), ("mapper", 1), ("md", 1), ("zvol", 4), ("rbd", 3), ("drbd/by-res", 2)];

/// Maximum number of links that are read per directory.
const LINKS_MAX: usize = 4096;

/// Prefixes of the best links in `by-id`: their names identify the device worldwide.
const BEST: [&str; 5] = ["wwn-", "nvme-eui.", "nvme-uuid.", "dm-uuid-", "md-uuid-"];

/// How a path names a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// The path is not one of the kernel's numbered names, such as `/dev/sda`, or is no block
    /// device.
    Stable,
    /// The path is one of the kernel's numbered names. This link is a stable name of the device.
    Link(PathBuf),
    /// The path is one of the kernel's numbered names, and the device has no stable name.
    Numbered,
}

impl DeviceName {
    /// Returns how a path names a block device.
    pub fn of(path: &Path) -> DeviceName {
        if !is_numbered(path) {
            return DeviceName::Stable;
        }
        match fs::metadata(path) {
            Ok(found) if found.file_type().is_block_device() => {
                stable_link(Path::new(DEV), Path::new(SYS_BLOCK), &found)
                    .map_or(DeviceName::Numbered, DeviceName::Link)
            }
            _ => DeviceName::Stable,
        }
    }

    /// Returns a warning or a hint for the user of a disk at `path`; `None` for a stable name.
    pub fn note(&self, path: &Path) -> Option<String> {
        let path = path.display();
        match self {
            DeviceName::Stable => None,
            DeviceName::Link(link) => Some(format!(
                "{path} may be another device after a restart of the host; {} is a stable name of this device",
                link.display()
            )),
            DeviceName::Numbered => Some(format!(
                "{path} may be another device after a restart of the host, and hob found no stable name of \
                 it in /dev/disk/by-id and /dev/mapper"
            )),
        }
    }
}

/// Returns true if the kernel chose the name by the order in which it found the devices.
fn is_numbered(path: &Path) -> bool {
    let Some(name) = path.strip_prefix(DEV).ok().and_then(Path::to_str) else { return false };
    let is_lettered = |prefix: &str| {
        name.strip_prefix(prefix).is_some_and(|rest| {
            let number = rest.trim_start_matches(|c: char| c.is_ascii_lowercase());
            number.len() < rest.len() && number.bytes().all(|byte| byte.is_ascii_digit())
        })
    };
    let is_counted = |prefix: &str| {
        name.strip_prefix(prefix).is_some_and(|rest| {
            rest.starts_with(|c: char| c.is_ascii_digit())
                && rest.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'n' | b'p'))
        })
    };
    LETTERED.into_iter().any(is_lettered) || COUNTED.into_iter().any(is_counted)
}

/// Returns the best stable name of a device. `dev` and `sys` are the directories of the kernel's
/// devices and of their descriptions.
fn stable_link(dev: &Path, sys: &Path, device: &Metadata) -> Option<PathBuf> {
    let leads_to_it = |path: &PathBuf| {
        fs::metadata(path)
            .is_ok_and(|found| found.rdev() == device.rdev() && found.file_type() == device.file_type())
    };
    let described = sys.join(device_number::text(device.rdev())).join("dm");
    let line = |file: &str| fs::read_to_string(described.join(file)).ok().map(|text| text.trim().to_owned());
    if line("uuid").is_some_and(|uuid| uuid.starts_with("LVM-"))
        && let Some(volume) = line("name").and_then(|name| logical_volume(&name))
        && let Some(link) = Some(dev.join(volume)).filter(leads_to_it)
    {
        return Some(link);
    }
    DIRECTORIES.into_iter().find_map(|(directory, depth)| {
        let mut links = links(&dev.join(directory), depth);
        links.retain(leads_to_it);
        links.into_iter().min_by_key(|link| (rank(link), link.clone()))
    })
}

/// Returns the path of a logical volume below `/dev`, from its name in the device mapper. That name
/// consists of the volume group's name, a hyphen, and the volume's name. Hyphens within the two
/// names are doubled.
fn logical_volume(name: &str) -> Option<PathBuf> {
    let joined = name.replace("--", "\0");
    let (group, volume) = joined.split_once('-')?;
    // Internal devices of LVM have a third part.
    let is_internal = volume.contains('-') || group.is_empty() || volume.is_empty();
    (!is_internal).then(|| Path::new(&group.replace('\0', "-")).join(volume.replace('\0', "-")))
}

/// Returns the links in a directory and its subdirectories.
fn links(directory: &Path, depth: usize) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten().take(LINKS_MAX) {
        let Ok(kind) = entry.file_type() else { continue };
        let is_content = entry.file_name().to_string_lossy().starts_with("lvm-pv-uuid-");
        if kind.is_dir() && depth > 1 {
            found.extend(links(&entry.path(), depth - 1));
        } else if !kind.is_dir() && !is_content {
            found.push(entry.path());
        }
    }
    found
}

/// Returns the rank of a link; the lowest is the best.
fn rank(link: &Path) -> usize {
    let name = link.file_name().unwrap_or_default().to_string_lossy();
    BEST.iter().position(|best| name.starts_with(best)).unwrap_or(BEST.len())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn names_that_the_kernel_counts_are_known() {
        for name in [
            "sda",
            "sdab3",
            "vdb",
            "xvda1",
            "dm-6",
            "loop0",
            "loop0p1",
            "nbd12",
            "nvme0n1p2",
            "md127",
            "zd16",
        ] {
            assert!(is_numbered(&Path::new(DEV).join(name)), "{name}");
        }
        for path in [
            "/dev/mapper/vg-a",
            "/dev/vg/sda",
            "/dev/disk/by-id/wwn-0x5",
            "/dev/mdadm",
            "/dev/sd",
            "/srv/sda",
            "/dev/loop-control",
            "sda",
        ] {
            assert!(!is_numbered(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn the_parts_of_a_logical_volume_are_found_in_its_name() {
        let path = |name| logical_volume(name).map(|path| path.to_str().unwrap().to_owned());
        assert_eq!(path("pve-vm--100--disk--0").as_deref(), Some("pve/vm-100-disk-0"));
        assert_eq!(path("my--vg-data").as_deref(), Some("my-vg/data"));
        assert_eq!(path("a---b").as_deref(), Some("a-/b"));
        assert_eq!(path("pve-data-tpool"), None);
        assert_eq!(path("cryptswap"), None);
    }

    /// The test has links to /dev/null, because only root can create block devices.
    #[test]
    fn the_best_link_to_a_device_is_chosen() {
        let dir = tempfile::tempdir().unwrap();
        let (dev, sys) = (dir.path().join("dev"), dir.path().join("sys"));
        let device = fs::metadata("/dev/null").unwrap();
        let link = |name: &str, to: &str| {
            fs::create_dir_all(dev.join(name).parent().unwrap()).unwrap();
            symlink(to, dev.join(name)).unwrap();
        };
        let best =
            || stable_link(&dev, &sys, &device).map(|path| path.strip_prefix(&dev).unwrap().to_owned());
        assert_eq!(best(), None);
        link("disk/by-uuid/1234", "/dev/null");
        link("disk/by-id/lvm-pv-uuid-x", "/dev/null");
        link("disk/by-id/wwn-0x1", "/dev/zero");
        link("disk/by-id/ata-missing", "/dev/no-such-device");
        assert_eq!(best(), None);
        link("zvol/tank/vms/vm-1", "/dev/null");
        assert_eq!(best(), Some("zvol/tank/vms/vm-1".into()));
        link("mapper/vg-a", "/dev/null");
        assert_eq!(best(), Some("mapper/vg-a".into()));
        link("disk/by-id/ata-disk", "/dev/null");
        link("disk/by-id/wwn-0x2", "/dev/null");
        assert_eq!(best(), Some("disk/by-id/wwn-0x2".into()));
        let mapped = sys.join(device_number::text(device.rdev())).join("dm");
        fs::create_dir_all(&mapped).unwrap();
        fs::write(mapped.join("uuid"), "LVM-abc\n").unwrap();
        fs::write(mapped.join("name"), "vg-a\n").unwrap();
        assert_eq!(best(), Some("disk/by-id/wwn-0x2".into()));
        link("vg/a", "/dev/null");
        assert_eq!(best(), Some("vg/a".into()));
    }

    #[test]
    fn other_paths_are_stable_names() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(DeviceName::of(file.path()), DeviceName::Stable);
        assert_eq!(DeviceName::of(file.path()).note(file.path()), None);
        let note = DeviceName::Numbered.note(Path::new("/dev/sdz")).unwrap();
        assert!(note.contains("/dev/sdz") && note.contains("restart"), "{note}");
    }
}
