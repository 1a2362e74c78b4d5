//! Properties of an open file: its filesystem, alignment, holes and time of its last change.

use std::fs::File;
use std::os::fd::OwnedFd;

use hob_engine::units::SECTOR_BYTES;
use rustix::io::Errno;

use super::super::identity::ChangeMark;
use super::super::{Status, StatusExtent};
use crate::volatile::VolatileFile;

/// Returns the alignment that O_DIRECT needs on this file, found by trying; `None` if O_DIRECT does
/// not work.
pub(super) fn direct_block_bytes(file: &File) -> std::io::Result<Option<u32>> {
    let mut memory = vec![0u8; 2 * SECTOR_BYTES as usize];
    let skip = memory.as_ptr().align_offset(SECTOR_BYTES as usize);
    for bytes in [512, 4096] {
        match rustix::io::pread(file, &mut memory[skip..skip + bytes], 0) {
            Ok(_) => return Ok(Some(bytes as u32)),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(None)
}

/// Maximum number of extents in one reply to a status query. The caller asks again for more.
const EXTENTS_MAX: usize = 4096;

/// Returns the allocated parts of `offset..end` of a file. May block while the file's filesystem
/// hangs.
pub(super) fn status(file: &OwnedFd, offset: u64, end: u64) -> Status {
    let mut extents = Vec::new();
    let mut at = offset;
    while at < end && extents.len() < EXTENTS_MAX {
        let data = match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
            Ok(data) => data.min(end),
            Err(Errno::NXIO) => end,
            // The holes are unknown; reporting data everywhere is always correct.
            Err(_) => {
                extents.push(StatusExtent { len: end - at, hole: false, zero: false });
                break;
            }
        };
        if data > at {
            extents.push(StatusExtent { len: data - at, hole: true, zero: true });
            at = data;
            continue;
        }
        let hole = rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(at));
        let hole = hole.map_or(end, |hole| hole.min(end)).max(at + 1);
        extents.push(StatusExtent { len: hole - at, hole: false, zero: false });
        at = hole;
    }
    Ok(extents)
}

/// Returns the time of a file's last change. May block while the file's filesystem hangs.
pub(super) fn mark_of(file: &OwnedFd, volatile: Option<&VolatileFile>) -> Option<ChangeMark> {
    if let Some(volatile) = volatile {
        // If data is written back later, that looks like a change by another program.
        volatile.settle().ok()?;
    }
    let file = File::from(file.try_clone().ok()?);
    file.metadata().ok().map(|metadata| ChangeMark::of(&metadata))
}
