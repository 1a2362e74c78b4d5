//! The size of a full stripe of a backing, as far as the system knows it: the data of one stripe,
//! without parity. A RAID writes a full stripe without reading old data.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::device_number;
use crate::filesystem::type_of;

/// Smallest reported I/O size that is used as a stripe size, bytes. A smaller reported size is the
/// size of a block. If hob merged I/Os only up to the size of a block, the merged I/Os would be too
/// small.
const REPORTED_BYTES_MIN: u64 = 64 << 10;

/// Maximum size of a stripe, bytes.
pub const STRIPE_BYTES_MAX: u64 = 16 << 20;

/// A stripe size is a multiple of this number of bytes.
pub const STRIPE_BYTES_STEP: u64 = 4096;

/// `f_type` of filesystems that recommend the size of a request to their server: NFS, CIFS, SMB2
/// and 9P.
const REQUEST_FILESYSTEMS: [u32; 4] = [0x6969, 0xFF53_4D42, 0xFE53_4D42, 0x0102_1997];

/// Returns an I/O size that a server or the kernel recommends, if it can be the size of a stripe.
pub(super) fn reported(bytes: u64) -> Option<u32> {
    let is_usable = (REPORTED_BYTES_MIN..=STRIPE_BYTES_MAX).contains(&bytes);
    (is_usable && bytes.is_multiple_of(STRIPE_BYTES_STEP)).then_some(bytes as u32)
}

/// Returns the stripe size of a block device from the kernel's description in `sys`. Software and
/// hardware RAIDs report the stripe size as their optimal I/O size. Returns `None` for a partition
/// whose first byte is not the start of a stripe.
pub(super) fn of_device(sys: &Path, number: u64) -> Option<u32> {
    let directory = sys.join(device_number::text(number));
    let value = |file: &str| std::fs::read_to_string(directory.join(file)).ok()?.trim().parse::<u64>().ok();
    // In sysfs, the directory of a partition is inside the directory of its disk, which has the
    // queue.
    let (start, queue) = match value("partition") {
        Some(_) => (value("start")?.checked_mul(512)?, "../queue/optimal_io_size"),
        None => (0, "queue/optimal_io_size"),
    };
    reported(value(queue)?).filter(|bytes| start.is_multiple_of(u64::from(*bytes)))
}

/// Returns the stripe size of a file: that of its filesystem's block device, or else the I/O size
/// that the filesystem recommends, for example the record size of ZFS.
pub(super) fn of_file(sys: &Path, file: &File, metadata: &Metadata) -> Option<u32> {
    of_device(sys, metadata.dev()).or_else(|| recommended(type_of(file), metadata.blksize()))
}

/// Returns the I/O size that a filesystem recommends, if it can be the size of a stripe. The size
/// of a request to a server (`wsize` of NFS) says nothing about the server's storage.
fn recommended(filesystem: Option<u32>, bytes: u64) -> Option<u32> {
    let is_of_requests = filesystem.is_some_and(|filesystem| REQUEST_FILESYSTEMS.contains(&filesystem));
    if is_of_requests { None } else { reported(bytes) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_optimal_io_size_of_a_raid_is_its_stripe() {
        let sys = tempfile::tempdir().unwrap();
        let number = rustix::fs::makedev(9, 1);
        let queue = sys.path().join("9:1/queue");
        fs::create_dir_all(&queue).unwrap();
        assert_eq!(of_device(sys.path(), number), None);
        // A USB bridge reports 65,535 sectors.
        for (text, stripe) in [
            ("0\n", None),
            ("4096\n", None),
            ("65536\n", Some(65_536)),
            ("196608\n", Some(192 << 10)),
            ("33553920\n", None),
            ("33554432\n", None),
            ("100000\n", None),
        ] {
            fs::write(queue.join("optimal_io_size"), text).unwrap();
            assert_eq!(of_device(sys.path(), number), stripe, "{text}");
        }
    }

    #[test]
    fn the_size_of_a_request_to_a_file_server_is_no_stripe() {
        let (nfs, cifs, zfs) = (Some(0x6969), Some(0xFF53_4D42), Some(0x2FC1_2FC1));
        for (filesystem, bytes, stripe) in [
            (nfs, 1 << 20, None),
            (nfs, 256 << 10, None),
            (cifs, 1 << 20, None),
            (zfs, 128 << 10, Some(128 << 10)),
            (zfs, 4096, None),
            (None, 128 << 10, Some(128 << 10)),
        ] {
            assert_eq!(recommended(filesystem, bytes), stripe, "{filesystem:x?} {bytes}");
        }
        let file = tempfile::tempfile().unwrap();
        let sys = tempfile::tempdir().unwrap();
        let metadata = file.metadata().unwrap();
        assert_eq!(of_file(sys.path(), &file, &metadata), recommended(type_of(&file), metadata.blksize()));
    }

    #[test]
    fn a_partition_has_the_stripes_of_its_disk_if_it_begins_with_one() {
        let sys = tempfile::tempdir().unwrap();
        let (disk, number) = (sys.path().join("disk"), rustix::fs::makedev(9, 2));
        fs::create_dir_all(disk.join("queue")).unwrap();
        fs::create_dir_all(disk.join("part")).unwrap();
        fs::write(disk.join("queue/optimal_io_size"), "196608\n").unwrap();
        fs::write(disk.join("part/partition"), "1\n").unwrap();
        std::os::unix::fs::symlink("disk/part", sys.path().join("9:2")).unwrap();
        for (start, stripe) in [("2048\n", None), ("3072\n", Some(192 << 10))] {
            fs::write(disk.join("part/start"), start).unwrap();
            assert_eq!(of_device(sys.path(), number), stripe, "{start}");
        }
    }
}
