//! An anonymous memory mapping: the bytes of an [`Arena`](crate::buffers::Arena) or an
//! [`Area`](crate::area::Area).
//!
//! Why `unsafe`: the kernel accesses the mapping's pages through raw addresses while Rust code
//! borrows other parts of the mapping, so a `Vec<u8>` is not possible. Every access is
//! bounds-checked in this file. The arena ensures that no two accesses overlap.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Alignment of the mapping that allows huge pages, bytes.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A mapping of readable and writable pages, zeroed at first.
#[derive(Debug)]
pub(crate) struct Memory {
    map: NonNull<u8>,
    map_len: usize,
    base: NonNull<u8>,
    len: usize,
}

impl Memory {
    /// Maps `len` bytes, a multiple of the page size.
    pub(crate) fn map(len: usize) -> std::io::Result<Memory> {
        let map_len = len + HUGE_PAGE_BYTES;
        // SAFETY: this is a new private mapping at an address that the kernel chooses, so it
        // overlaps no existing memory.
        let map = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                map_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let map = NonNull::new(map.cast::<u8>()).expect("mmap never returns address 0");
        let skip = map.as_ptr().align_offset(HUGE_PAGE_BYTES);
        // SAFETY: `skip` is less than HUGE_PAGE_BYTES, by which the mapping is longer than `len`.
        let base = unsafe { map.add(skip) };
        // Huge pages save TLB misses; without them hob works the same. Forked child processes (such
        // as qemu-nbd) must not make the kernel copy pages to which a device writes. SAFETY: this
        // is advice on our own mapping, and neither kind of advice changes its contents.
        unsafe {
            let _ = madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage);
            let _ = madvise(base.as_ptr().cast(), len, Advice::LinuxDontFork);
        }
        Ok(Memory { map, map_len, base, len })
    }

    /// Returns the mapping's size in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of byte `offset`, after checking that `len` bytes are inside the
    /// mapping. The caller is responsible for the address's use.
    pub(crate) fn address(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset <= self.len && len <= self.len - offset, "outside the mapping");
        // SAFETY: the range is inside the mapping, as just checked.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Returns these bytes of the mapped memory.
    ///
    /// # Safety
    /// While the result exists, nothing may write to the range, including the kernel.
    pub(crate) unsafe fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        // SAFETY: the bytes are initialised (zero pages) and in bounds. The caller promises that
        // there is no writer.
        unsafe { std::slice::from_raw_parts(self.address(offset, len), len) }
    }

    /// Returns a range of the mapping for writing.
    ///
    /// # Safety
    /// While the result exists, nothing else may read or write the range, except that the kernel
    /// may read it.
    // The caller's promise makes the access exclusive, not a borrow of the mapping.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn bytes_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        // SAFETY: as in `bytes`. The caller promises that the access is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.address(offset, len), len) }
    }
}

// SAFETY: the mapping belongs to no thread, and its bytes are accessed only through `unsafe`
// functions whose callers prevent races.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this is our own mapping. The borrow checker has ended all slices of it, and the
        // ring does not drop an arena that the kernel still uses.
        unsafe {
            let _ = munmap(self.map.as_ptr().cast(), self.map_len);
        }
    }
}
