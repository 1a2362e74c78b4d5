//! Checks that every byte of a part of a file has its final position on the device. Later writes
//! then need neither space nor memory for metadata.
//!
//! Why `unsafe`: the ioctl takes an address. The address is that of a local variable of the type
//! that the kernel's `linux/fiemap.h` defines, with space for the stated number of extents.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::Range;

const FS_IOC_FIEMAP: libc::c_ulong = 0xC020_660B;

/// Number of extents per request.
const EXTENTS: usize = 64;

const LAST: u32 = 1;
const SHARED: u32 = 0x2000;

/// Flags of extents without a final position: not on the device yet, compressed, encrypted, inside
/// metadata, packed with the ends of other files, or reserved and never written.
const ELSEWHERE: u32 = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800;

/// The kernel's `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// The kernel's `struct fiemap`, followed by space for [`EXTENTS`] extents.
#[repr(C)]
struct Map {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [Extent; EXTENTS],
}

/// Why the kernel cannot swap to a part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// A part of the range is a hole, or was never written.
    Hole,
    /// A part of the range is shared with another file.
    Shared,
}

/// Returns the first reason why the kernel cannot swap to this range of a file; `None` if there is
/// none.
pub(super) fn lack(file: BorrowedFd<'_>, range: Range) -> io::Result<Option<Lack>> {
    let (mut at, end) = (range.offset, range.offset + range.bytes);
    while at < end {
        let extent =
            Extent { logical: 0, physical: 0, length: 0, reserved64: [0; 2], flags: 0, reserved: [0; 3] };
        let mut map = Map {
            start: at,
            length: end - at,
            flags: 0,
            mapped_extents: 0,
            extent_count: EXTENTS as u32,
            reserved: 0,
            extents: [extent; EXTENTS],
        };
        // SAFETY: `map` is what the request reads and fills, and has room for as many extents as it
        // says.
        if unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP as _, &raw mut map) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let extents = map.extents.get(..map.mapped_extents as usize).unwrap_or_default();
        match walk(&mut at, end, extents) {
            None => {}
            lack => return Ok(lack),
        }
        let is_last = extents.last().is_none_or(|extent| extent.flags & LAST != 0);
        if is_last && at < end {
            return Ok(Some(Lack::Hole));
        }
    }
    Ok(None)
}

/// Moves `at` past the extents that follow each other without a gap. Returns the first problem
/// before `end`.
fn walk(at: &mut u64, end: u64, extents: &[Extent]) -> Option<Lack> {
    for extent in extents.iter().filter(|extent| extent.logical < end) {
        if extent.logical > *at || extent.flags & ELSEWHERE != 0 {
            return Some(Lack::Hole);
        }
        if extent.flags & SHARED != 0 {
            return Some(Lack::Shared);
        }
        *at = (*at).max(extent.logical.saturating_add(extent.length));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(logical: u64, length: u64, flags: u32) -> Extent {
        Extent { logical, physical: 0, length, reserved64: [0; 2], flags, reserved: [0; 3] }
    }

    #[test]
    fn holes_and_shared_extents_are_found() {
        assert_eq!((size_of::<Extent>(), size_of::<Map>()), (56, 32 + 56 * EXTENTS));
        let cases: [(&[Extent], Option<Lack>, u64); 6] = [
            (&[extent(0, 50, 0), extent(50, 60, LAST)], None, 110),
            (&[extent(0, 50, 0), extent(60, 60, LAST)], Some(Lack::Hole), 50),
            (&[extent(0, 50, 0), extent(50, 60, LAST | 0x800)], Some(Lack::Hole), 50),
            (&[extent(0, 50, SHARED)], Some(Lack::Shared), 10),
            (&[extent(200, 50, SHARED)], None, 10),
            (&[], None, 10),
        ];
        for (extents, lack, then) in cases {
            let mut at = 10;
            assert_eq!((walk(&mut at, 100, extents), at), (lack, then));
        }
    }
}
