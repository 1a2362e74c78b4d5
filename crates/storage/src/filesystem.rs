//! Properties of a file's filesystem: whether its data is in memory, and whether operations on the
//! file may block. This module also returns the device and inode number of a file.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;

/// Device and inode number of a regular file. The two numbers distinguish the file from every other
/// existing file.
pub type FileNumber = (u64, u64);

/// Returns the device and inode number of a regular file; `None` for a file of another type.
pub fn file_number(metadata: &Metadata) -> Option<FileNumber> {
    metadata.is_file().then(|| (metadata.dev(), metadata.ino()))
}

/// `f_type` of tmpfs and of ramfs.
const MEMORY_FILESYSTEMS: [u32; 2] = [0x0102_1994, 0x8584_58F6];

/// `f_type` of filesystems on local devices: ext4, XFS, Btrfs, F2FS, bcachefs and ZFS.
const LOCAL_FILESYSTEMS: [u32; 6] = [0xEF53, 0x5846_5342, 0x9123_683E, 0xF2F5_2010, 0xCA45_1A4E, 0x2FC1_2FC1];

/// Returns the `f_type` of the file's filesystem.
pub(crate) fn type_of(file: &File) -> Option<u32> {
    rustix::fs::fstatfs(file).ok().map(|filesystem| filesystem.f_type as u32)
}

/// Returns true if the filesystem keeps its files in memory.
pub(crate) fn is_memory(file: &File) -> bool {
    type_of(file).is_some_and(|filesystem| MEMORY_FILESYSTEMS.contains(&filesystem))
}

/// Returns true if an operation on the file may block the thread that starts it, even with
/// io_uring. FUSE waits for its server even if the kernel asks it not to block. Unknown filesystems
/// count as blocking.
pub(crate) fn may_block(file: &File) -> bool {
    !type_of(file).is_some_and(|filesystem| LOCAL_FILESYSTEMS.contains(&filesystem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filesystems_that_are_not_known_may_block() {
        assert!(may_block(&File::open("/proc/self/stat").unwrap()));
        assert!(!is_memory(&File::open("/proc/self/stat").unwrap()));
    }
}
