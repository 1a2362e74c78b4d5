//! Errors of pool operations.

use std::io;
use std::path::PathBuf;

use hob_engine::units::DeviceId;

/// Reason why a pool operation failed. A failed operation is undone, unless a device cannot be
/// written.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The device has no superblock of a hob pool.
    #[error(
        "{path} is not a device of a hob pool; check the path. If a device of a pool was \
        replaced or lost its data: `hob pool remove-device`, then `hob pool add-device`. To create \
        a pool: `hob pool create`"
    )]
    NotAPool {
        /// Path of the device.
        path: PathBuf,
    },
    /// The device contains other data.
    #[error("{path} has {what}; hob does not overwrite it. Pass --force to overwrite it")]
    Foreign {
        /// Path of the device.
        path: PathBuf,
        /// Kind of the data that was found.
        what: String,
    },
    /// The devices belong to different pools.
    #[error(
        "{path} belongs to pool {found}, not to {expected}; open pools separately, or add it with --force to wipe it"
    )]
    OtherPool {
        /// Path of the device.
        path: PathBuf,
        /// Name and UUID of the pool that the device belongs to.
        found: String,
        /// Name and UUID of the pool that the operation concerns.
        expected: String,
    },
    /// Another process has the device open.
    #[error("another process uses {path}; a pool can have only one daemon. Stop the other process first")]
    InUse {
        /// Path of the device.
        path: PathBuf,
    },
    /// The device has no space for one segment, or is smaller than its superblock says.
    #[error("{path} has {}; at least {} are needed", in_units(*bytes), in_units(*needed))]
    TooSmall {
        /// Path of the device.
        path: PathBuf,
        /// Size of the device, bytes.
        bytes: u64,
        /// Required size, bytes.
        needed: u64,
    },
    /// The filesystem of the device's file is full.
    #[error(
        "the filesystem of {path} has no space for {}, which the pool reserves completely. \
         Choose a smaller size or another filesystem",
        in_units(*bytes)
    )]
    NoSpace {
        /// Path of the device.
        path: PathBuf,
        /// Size of the device's file, bytes.
        bytes: u64,
    },
    /// The pool has too few free segments.
    #[error(
        "the pool has only {free} of {wanted} necessary free segments; add a device or make a cache smaller"
    )]
    Full {
        /// Requested number of segments.
        wanted: u64,
        /// Number of free segments on devices with allocation on.
        free: u64,
    },
    /// No device has enough contiguous space for a swap area.
    #[error(
        "no device has {wanted} contiguous free segments: the best device has {free} free, at most \
        {longest} contiguous; choose a smaller size, make a cache smaller, or add a device"
    )]
    InPieces {
        /// Requested number of segments.
        wanted: u64,
        /// Free segments on the device with the longest contiguous free range.
        free: u64,
        /// Length of the longest contiguous free range in segments.
        longest: u64,
    },
    /// A loop device uses the pool's device.
    #[error(
        "{path} is on {device}, which is in use as swap or by a filesystem; end that use first \
        ('swapon' and 'losetup -l' show it)"
    )]
    UnderLoop {
        /// Path of the device.
        path: PathBuf,
        /// Path of the loop device.
        device: PathBuf,
    },
    /// The pool has too few devices for the journal's copies.
    #[error(
        "{copies} copies of a journal need as many devices with {segments} free segments each, and {devices} \
         devices of the pool have that; add a device, make a cache smaller, or keep fewer copies"
    )]
    TooFewDevices {
        /// Requested number of copies.
        copies: usize,
        /// Number of segments of each copy.
        segments: u64,
        /// Number of devices with allocation on and space for a copy.
        devices: usize,
    },
    /// Segments of the device are still in use.
    #[error("device {device} still has {segments} segments in use; move the caches to other devices first")]
    DeviceBusy {
        /// Id of the device.
        device: DeviceId,
        /// Number of segments in use.
        segments: u64,
    },
    /// The pool has no such device.
    #[error("the pool has no device {device}")]
    NoSuchDevice {
        /// Id of the requested device.
        device: DeviceId,
    },
    /// hob's superblock or segment table on the device is damaged. Cached data is not checked.
    #[error(
        "{path} is damaged: {what}. Caches lose their data on this device, and persistent caches \
        lose its dirty data too: remove the device from the pool, or format it with --force"
    )]
    Damaged {
        /// Path of the device.
        path: PathBuf,
        /// Description of the damage, for users.
        what: String,
    },
    /// A newer version of hob wrote the device.
    #[error("a later version of hob wrote {path} ({what}); use that version")]
    Newer {
        /// Path of the device.
        path: PathBuf,
        /// The feature or version that this hob does not know.
        what: String,
    },
    /// The requested operation is invalid.
    #[error("{reason}")]
    Unworkable {
        /// Why the operation is invalid, and a valid alternative.
        reason: String,
    },
    /// A system call failed.
    #[error("{path}: cannot {action}: {source}")]
    System {
        /// Path of the device.
        path: PathBuf,
        /// The attempted action.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// Returns a number of bytes in the largest unit of which it is a multiple: `3 MiB`.
pub(super) fn in_units(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, shift)| bytes > 0 && bytes.trailing_zeros() >= *shift) {
        Some((unit, shift)) => format!("{} {unit}", bytes >> shift),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        let path = PathBuf::from("/a");
        let error = PoolError::TooSmall { path: path.clone(), bytes: 1 << 10, needed: 3 << 20 };
        assert_eq!(error.to_string(), "/a has 1 KiB; at least 3 MiB are needed");
        let error = PoolError::NoSpace { path, bytes: (2 << 40) + (1 << 30) }.to_string();
        assert!(error.contains("/a has no space for 2049 GiB, which"), "{error}");
        assert_eq!((in_units(0), in_units(1025)), ("0 bytes".to_owned(), "1025 bytes".to_owned()));
    }
}
