//! Checks whether the kernel can safely swap to a pool device. The check follows the device stack
//! through filesystems, loop devices, device mappings and arrays down to the disks.
//!
//! The kernel swaps out when it has no memory left. A device stack that needs memory, a process or
//! a network for a write can then hang the host. So the check accepts only filesystems that are
//! known to be safe, and refuses block devices that are known to be unsafe. Block devices of other
//! kinds are accepted. The check cannot see the storage below a virtual disk of this host, or
//! whether an LVM volume is thin.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::FsWord;

use super::SwapError;
use crate::device_number;

/// Maximum depth of device mappings. A deeper device stack is refused.
const DEPTH_MAX: usize = 16;

/// Filesystems that overwrite blocks in place, by `f_type`.
const GOOD: [FsWord; 2] = [0xEF53, 0x5846_5342];

/// Refused filesystems, by `f_type`, with the reason.
const BAD: &[(FsWord, &str)] = &[
    (0x0102_1994, MEMORY),
    (0x8584_58F6, MEMORY),
    (0x6573_5546, "is on a FUSE filesystem, served by a program that may itself be swapped out"),
    (0x6969, NETWORK),
    (0xFF53_4D42, NETWORK),
    (0xFE53_4D42, NETWORK),
    (0x517B, NETWORK),
    (0x00C3_6400, NETWORK),
    (0x0102_1997, NETWORK),
    (0x5346_414F, NETWORK),
    (0x6B41_4653, NETWORK),
    (0x0BD0_0BD0, NETWORK),
    (0x0116_1970, NETWORK),
    (0x7461_636F, NETWORK),
    (0x9123_683E, COPIES),
    (0x2FC1_2FC1, COPIES),
    (0xCA45_1A4E, COPIES),
    (0x794C_7630, "is on an overlay filesystem"),
    (0xF2F5_2010, COPIES),
    (0x3434, COPIES),
];

const MEMORY: &str = "is in memory, so swapping to it would free no memory";
const NETWORK: &str = "is on a network filesystem";
const COPIES: &str =
    "is on a filesystem that writes blocks elsewhere each time (copy-on-write), which needs memory";

/// Refused block devices, by the prefix of their names.
const BAD_DEVICES: &[(&str, &str)] = &[
    ("zram", MEMORY),
    ("ram", MEMORY),
    ("pmem", "is in memory; persistent memory is better used as memory"),
    ("nbd", "is on a network block device, perhaps one of hob's own"),
    ("rbd", "is on a network block device (RBD)"),
    ("drbd", "is on a replicated block device (DRBD)"),
    ("rnbd", "is on a network block device (RNBD)"),
    ("ublk", "is on a block device that a program serves (ublk)"),
    ("zd", "is on a ZFS volume, which needs memory to be written"),
    ("bcache", "is on a bcache device, which needs memory to be written"),
    ("etherd", "is on a network block device (AoE)"),
    ("dcssblk", MEMORY),
];

/// Checks that the kernel can safely swap to this file.
///
/// # Errors
/// Returns [`SwapError::Unsafe`] with the reason, or a system error.
pub(super) fn check(file: BorrowedFd<'_>) -> Result<(), SwapError> {
    check_file(file, 0)
}

fn check_file(file: BorrowedFd<'_>, depth: usize) -> Result<(), SwapError> {
    let looked =
        |source: io::Error| SwapError::System { action: "examine the device below the swap area", source };
    let metadata = File::from(file.try_clone_to_owned().map_err(looked)?).metadata().map_err(looked)?;
    if metadata.file_type().is_block_device() {
        return check_device(metadata.rdev(), depth);
    }
    let f_type = rustix::fs::fstatfs(file).map_err(|errno| looked(errno.into()))?.f_type;
    judge_filesystem(f_type).map_err(SwapError::Unsafe)?;
    check_device(metadata.dev(), depth)
}

fn judge_filesystem(f_type: FsWord) -> Result<(), String> {
    if GOOD.contains(&f_type) {
        return Ok(());
    }
    match BAD.iter().find(|(bad, _)| *bad == f_type) {
        Some((_, why)) => Err((*why).to_owned()),
        None => Err(format!(
            "is on a filesystem of unknown type {f_type:#x}, of which hob does not know whether it \
            supports swap"
        )),
    }
}

fn check_device(number: u64, depth: usize) -> Result<(), SwapError> {
    let number = device_number::text(number);
    let Ok(place) = fs::canonicalize(format!("/sys/dev/block/{number}")) else {
        return Err(SwapError::Unsafe(format!(
            "is on device {number}, whose type the kernel does not report"
        )));
    };
    // The properties of a whole disk apply to its partitions.
    let disk = match place.parent() {
        Some(parent) if place.join("partition").exists() => parent.to_owned(),
        _ => place,
    };
    if depth > DEPTH_MAX {
        return Err(SwapError::Unsafe("is on too many mappings".to_owned()));
    }
    judge_device(&disk).map_err(SwapError::Unsafe)?;
    if let Ok(backing) = fs::read_to_string(disk.join("loop/backing_file")) {
        let backing = backing.trim_end_matches('\n');
        let file = File::open(backing).map_err(|error| {
            SwapError::Unsafe(format!("is on a loop device over {backing}, which cannot be queried: {error}"))
        })?;
        return check_file(file.as_fd(), depth + 1);
    }
    for below in fs::read_dir(disk.join("slaves")).into_iter().flatten().flatten() {
        if let Some(number) =
            fs::read_to_string(below.path().join("dev")).ok().as_deref().and_then(device_number::parse)
        {
            check_device(number, depth + 1)?;
        }
    }
    Ok(())
}

/// Checks a whole disk, given its directory in /sys.
fn judge_device(disk: &Path) -> Result<(), String> {
    let name = disk.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let is =
        |prefix: &str| name.strip_prefix(prefix).is_some_and(|rest| !rest.starts_with(char::is_alphabetic));
    let is_bad = |prefix: &str| is(prefix) || (prefix == "ublk" && is("ublkb"));
    if let Some((_, why)) = BAD_DEVICES.iter().find(|(prefix, _)| is_bad(prefix)) {
        return Err((*why).to_owned());
    }
    // /sys/devices/platform/host2/session1/target2:0:0/2:0:0:1/block/sda
    if disk.components().any(|part| part.as_os_str().to_string_lossy().starts_with("session")) {
        return Err("is on an iSCSI disk, which needs the network".to_owned());
    }
    match transports(disk).into_iter().find(|transport| !matches!(transport.as_str(), "pcie" | "apple-nvme"))
    {
        Some(transport) => Err(format!("is on an NVMe disk that is reached over {transport}")),
        None => Ok(()),
    }
}

/// Returns the transport of each path of an NVMe disk; empty for other disks.
fn transports(disk: &Path) -> Vec<String> {
    let device = disk.join("device");
    let paths = fs::read_dir(&device).into_iter().flatten().flatten().map(|entry| entry.path());
    let controllers =
        paths.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("nvme")));
    std::iter::once(device.clone())
        .chain(controllers)
        .filter_map(|controller| fs::read_to_string(controller.join("transport")).ok())
        .map(|transport| transport.trim().to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filesystems_are_good_bad_or_unknown() {
        assert_eq!(judge_filesystem(0xEF53), Ok(()));
        for (f_type, why) in [
            (0x0102_1994, "memory"),
            (0x6573_5546, "FUSE"),
            (0x6969, "network"),
            (0x9123_683E, "copy-on-write"),
            (0x1234, "0x1234"),
        ] {
            let said = judge_filesystem(f_type).unwrap_err();
            assert!(said.contains(why), "{said}");
        }
    }

    #[test]
    fn devices_are_judged_by_name_and_by_how_they_are_reached() {
        let dir = tempfile::tempdir().unwrap();
        let virtual_disk = |name: &str| {
            let disk = dir.path().join(name);
            fs::create_dir_all(disk.join("device")).unwrap();
            disk
        };
        for (name, why) in [
            ("nbd3", "network"),
            ("zram0", "memory"),
            ("ram1", "memory"),
            ("ublkb0", "program"),
            ("zd16", "ZFS"),
        ] {
            let said = judge_device(&virtual_disk(name)).unwrap_err();
            assert!(said.contains(why), "{said}");
        }
        for name in ["sda", "vda", "nvme0n1", "dm-0", "md127", "mmcblk0", "rambo", "loop1"] {
            assert_eq!(judge_device(&virtual_disk(name)), Ok(()), "{name}");
        }
        assert!(judge_device(&virtual_disk("session1/block/sdb")).unwrap_err().contains("iSCSI"));
        let nvme = virtual_disk("nvme1n1");
        fs::write(nvme.join("device/transport"), "pcie\n").unwrap();
        assert_eq!(judge_device(&nvme), Ok(()));
        // With multipath, they are one directory further down.
        fs::create_dir(nvme.join("device/nvme2")).unwrap();
        fs::write(nvme.join("device/nvme2/transport"), "tcp\n").unwrap();
        assert!(judge_device(&nvme).unwrap_err().contains("tcp"));
    }

    #[test]
    fn a_file_in_memory_is_refused() {
        let Ok(file) = tempfile::tempfile_in("/dev/shm") else { return };
        let error = check(file.as_fd()).unwrap_err().to_string();
        assert!(error.contains("memory") || error.contains("overlay"), "{error}");
    }
}
