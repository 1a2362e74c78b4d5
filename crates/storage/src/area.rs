//! Memory of one disk's memory tier. The shard copies payload between this memory and buffers when
//! the engine requests a copy.
//!
//! All pages of an area are allocated when the area is created, so that no copy waits for a page
//! fault. The kernel performs no I/O on the area. Only [`Area::copy`] accesses it.
#![allow(unsafe_code)]

use std::io;

use hob_engine::io::{BufferCopy, BufferSlice, CopyEnd};

use crate::buffers::{Arena, PAGE_BYTES};
use crate::memory::Memory;

/// Memory of one disk's memory tier.
#[derive(Debug)]
pub struct Area {
    memory: Memory,
}

impl Area {
    /// Allocates an area of `bytes`, rounded up to pages of 4 KiB. The allocation takes about one
    /// second for a few GiB, so do not call this function on a thread that serves requests.
    ///
    /// # Errors
    /// Returns the system's error if there is not enough memory.
    pub fn new(bytes: u64) -> io::Result<Area> {
        let too_large = || io::Error::new(io::ErrorKind::OutOfMemory, format!("{bytes} bytes of memory"));
        let len = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_next_multiple_of(PAGE_BYTES));
        let memory = Memory::map(len.filter(|len| *len <= isize::MAX as usize / 2).ok_or_else(too_large)?)?;
        let mut area = Area { memory };
        for offset in (0..area.memory.len()).step_by(PAGE_BYTES) {
            // The first write to a page allocates it.
            area.bytes_mut(offset, 1)[0] = 0;
        }
        Ok(area)
    }

    /// Returns the area's size in bytes.
    #[allow(clippy::len_without_is_empty)] // No area has zero bytes for long.
    pub fn len(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Copies between this area and a buffer. The caller has checked that the copy belongs to this
    /// disk.
    pub fn copy(&mut self, arena: &mut Arena, copy: &BufferCopy) {
        let len = copy.len as usize;
        match (copy.from, copy.to) {
            (CopyEnd::Memory { offset, .. }, CopyEnd::Buffer { id, offset: at }) => {
                let slice = BufferSlice { id, offset: at, len: copy.len };
                arena.slice_mut(slice).copy_from_slice(self.bytes(offset as usize, len));
            }
            (CopyEnd::Buffer { id, offset: at }, CopyEnd::Memory { offset, .. }) => {
                let slice = BufferSlice { id, offset: at, len: copy.len };
                self.bytes_mut(offset as usize, len).copy_from_slice(arena.slice(slice));
            }
            ends => panic!("a copy between {ends:?}"),
        }
    }

    fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        // SAFETY: this value owns the mapping, and changes need `&mut self`.
        unsafe { self.memory.bytes(offset, len) }
    }

    fn bytes_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        // SAFETY: this value owns the mapping, and `&mut self` makes the access exclusive.
        unsafe { self.memory.bytes_mut(offset, len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hob_engine::units::DiskId;

    fn memory(offset: u64) -> CopyEnd {
        CopyEnd::Memory { disk: DiskId(0), offset }
    }

    #[test]
    fn copied_data_is_read_back() {
        let mut arena = Arena::new(1 << 20).unwrap();
        let mut area = Area::new(40_000).unwrap();
        assert_eq!(area.len(), 40_960);
        let id = arena.alloc(8192).unwrap();
        arena.bytes_mut(id).fill(7);
        arena.bytes_mut(id)[4096..].fill(9);
        let into = BufferCopy { from: CopyEnd::Buffer { id, offset: 4096 }, to: memory(36_864), len: 4096 };
        area.copy(&mut arena, &into);
        let out = BufferCopy { from: memory(36_864), to: CopyEnd::Buffer { id, offset: 0 }, len: 4096 };
        area.copy(&mut arena, &out);
        assert!(arena.bytes(id).iter().all(|byte| *byte == 9));
        let zeroes = BufferCopy { from: memory(0), ..out };
        area.copy(&mut arena, &zeroes);
        assert!(arena.bytes(id)[..4096].iter().all(|byte| *byte == 0), "a fresh area is zeroed");
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn copies_stay_inside() {
        let mut arena = Arena::new(1 << 20).unwrap();
        let id = arena.alloc(8192).unwrap();
        let copy = BufferCopy { from: CopyEnd::Buffer { id, offset: 0 }, to: memory(4096), len: 4097 };
        Area::new(8192).unwrap().copy(&mut arena, &copy);
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert!(Area::new(1 << 62).is_err());
        assert!(Area::new(u64::MAX).is_err());
    }
}
