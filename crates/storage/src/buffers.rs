//! The arena: payload buffers of one shard, allocated from one mapping.
//!
//! # Purpose
//! All payload that passes through a shard is in the arena. The arena's buffers are page-aligned
//! for O_DIRECT and registered with io_uring once. Front end, engine and kernel share these buffers
//! without a copy. The exception is payload in guest memory ([`Arena::adopt`]).
//!
//! # Rules
//! * A buffer exists while it has references: [`Arena::alloc`] creates one, [`Arena::retain`] adds
//!   one, [`Arena::release`] drops one. Each operation in the I/O ring has a reference to its
//!   buffer.
//! * New buffers have undefined content. If a guest could see the end of a partly filled buffer,
//!   the caller fills it with zeroes.
//! * Borrowing bytes that the kernel may fill panics, because it is a bug of the caller. Bytes that
//!   the kernel only reads may be borrowed.
//!
//! # Units
//! The arena manages pages of 4 KiB; its interface uses bytes. A buddy system manages free pages,
//! so that freed neighbours are joined. A buffer takes exactly the pages that it needs. If no block
//! is large enough, a run of free pages is searched across blocks. A request of 32 MiB fits an
//! arena of 64 MiB whenever such a run exists. Some recently freed buffers of each size up to 33
//! pages are kept for reuse, because their memory is still in the CPU's cache.
#![allow(unsafe_code)]

mod buddy;
mod shared;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use hob_engine::io::BufferSlice;
use hob_engine::shares::Shares;
use hob_engine::units::{BufferId, DatastoreId, DiskId};

use crate::memory::Memory;
use buddy::Buddy;
pub(crate) use shared::Part;
pub use shared::Pieces;
use shared::Shared;

/// Page size of the arena in bytes.
pub const PAGE_BYTES: usize = 4096;

/// Maximum size of an arena in bytes: the limit of a registered buffer of io_uring.
pub const ARENA_BYTES_MAX: usize = 1 << 30;

/// Default size of an arena in bytes.
pub const ARENA_BYTES_DEFAULT: usize = 64 << 20;

/// Maximum size of freed buffers that the arena keeps for reuse, pages.
const RECENT_PAGES_MAX: usize = 33;

/// Maximum number of buffers per size that the arena keeps for reuse.
const RECENT_EACH_MAX: usize = 64;

/// A buffer of the arena. The buffer's slot is reused, together with the memory of `filling`.
#[derive(Debug, Default)]
struct Buffer {
    /// Number of the buffer's first page in the arena.
    page: u32,
    /// Requested length, bytes.
    len: u32,
    /// Number of references to the buffer; 0 means that the slot is free.
    refs: u32,
    /// The disk whose share of the arena contains the buffer; `None` if the buffer belongs to no
    /// disk.
    holder: Option<DiskId>,
    /// Parts of the buffer that the kernel is filling: first byte, end.
    filling: Vec<(u32, u32)>,
    /// The buffer's memory outside the arena, if any.
    shared: Shared,
}

/// The payload buffers of one shard.
#[derive(Debug)]
pub struct Arena {
    memory: Arc<Memory>,
    buddy: Buddy,
    buffers: Vec<Buffer>,
    free_ids: Vec<u32>,
    /// First pages of recently freed buffers, by length in pages.
    recent: Vec<Vec<u32>>,
    used_pages: usize,
    /// Number of pages that the buffers of each disk occupy.
    shares: Shares,
}

impl Arena {
    /// Allocates an arena of `bytes`, rounded up to pages.
    ///
    /// # Errors
    /// Returns the system's error if memory is lacking; `InvalidInput` above [`ARENA_BYTES_MAX`].
    pub(crate) fn new(bytes: usize) -> std::io::Result<Arena> {
        if bytes == 0 || bytes > ARENA_BYTES_MAX {
            return Err(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                format!("an arena has 1 to {ARENA_BYTES_MAX} bytes, not {bytes}"),
            ));
        }
        let pages = bytes.div_ceil(PAGE_BYTES);
        let recent = (0..=RECENT_PAGES_MAX).map(|_| Vec::with_capacity(RECENT_EACH_MAX)).collect();
        Ok(Arena {
            memory: Arc::new(Memory::map(pages * PAGE_BYTES)?),
            buddy: Buddy::new(pages as u32),
            buffers: Vec::new(),
            free_ids: Vec::new(),
            recent,
            used_pages: 0,
            shares: Shares::new(pages as u64),
        })
    }

    /// Allocates a buffer of `len` bytes, with one reference. Returns `None` while the arena is
    /// full.
    pub fn alloc(&mut self, len: usize) -> Option<BufferId> {
        if len == 0 || len > self.memory.len() {
            return None;
        }
        let id = self.take_buffer(len, None)?;
        self.shares.take_unowned(len.div_ceil(PAGE_BYTES) as u64);
        Some(id)
    }

    /// Adds a disk to those that share the arena. Buffers of [`Arena::alloc`] belong to no disk.
    pub fn join(&mut self, disk: DiskId, datastore: DatastoreId) {
        self.shares.join(disk, datastore);
    }

    /// Removes a disk from those that share the arena. The disk may still have buffers.
    pub fn leave(&mut self, disk: DiskId) {
        self.shares.leave(disk);
    }

    /// Returns true if a disk's share has room for a buffer of `len` bytes. The allocation can
    /// still fail if the free pages are not contiguous.
    pub fn may_alloc(&self, disk: DiskId, len: usize) -> bool {
        self.shares.may_take(disk, len.div_ceil(PAGE_BYTES) as u64)
    }

    /// Returns the free bytes in a disk's share of the arena.
    pub fn room(&self, disk: DiskId) -> usize {
        self.shares.allowance(disk, u64::from(u32::MAX)) as usize * PAGE_BYTES
    }

    /// Returns the size of the pages that a disk's buffers occupy, bytes.
    pub fn held(&self, disk: DiskId) -> usize {
        self.shares.held(disk) as usize * PAGE_BYTES
    }

    /// Allocates a buffer of `len` bytes from a disk's share, with one reference. Returns `None`
    /// while the share or the arena is full.
    pub fn alloc_for(&mut self, disk: DiskId, len: usize) -> Option<BufferId> {
        if len == 0 || len > self.memory.len() || !self.may_alloc(disk, len) {
            return None;
        }
        let id = self.take_buffer(len, Some(disk))?;
        self.shares.take(disk, len.div_ceil(PAGE_BYTES) as u64);
        Some(id)
    }

    fn take_buffer(&mut self, len: usize, holder: Option<DiskId>) -> Option<BufferId> {
        let pages = len.div_ceil(PAGE_BYTES);
        let page = self.take_pages(pages)?;
        self.used_pages += pages;
        let id = self.free_id();
        let buffer = &mut self.buffers[id as usize];
        (buffer.page, buffer.len, buffer.refs, buffer.holder) = (page, len as u32, 1, holder);
        Some(BufferId(id))
    }

    fn free_id(&mut self) -> u32 {
        let id = self.free_ids.pop().unwrap_or_else(|| {
            self.buffers.push(Buffer::default());
            self.buffers.len() as u32 - 1
        });
        let buffer = &self.buffers[id as usize];
        let is_unused = buffer.refs == 0 && buffer.filling.is_empty() && !buffer.shared.is_some();
        assert!(is_unused, "a free slot is unused");
        id
    }

    fn take_pages(&mut self, pages: usize) -> Option<u32> {
        if let Some(page) = self.recent.get_mut(pages).and_then(Vec::pop) {
            return Some(page);
        }
        if let Some(page) = self.buddy.alloc(pages as u32) {
            return Some(page);
        }
        if self.used_pages + pages > self.capacity() / PAGE_BYTES {
            return None;
        }
        self.give_recent_back();
        self.buddy.alloc(pages as u32).or_else(|| self.buddy.alloc_anywhere(pages as u32))
    }

    fn give_recent_back(&mut self) {
        for (pages, runs) in self.recent.iter_mut().enumerate() {
            for page in runs.drain(..) {
                self.buddy.free(page, pages as u32);
            }
        }
    }

    /// Frees a buffer that has only one reference. Use `release` for buffers that may have more.
    pub fn free(&mut self, id: BufferId) {
        assert_eq!(self.buffer(id).refs, 1, "buffer {id} is still shared");
        self.release(id);
    }

    /// Adds a reference to a buffer.
    pub fn retain(&mut self, id: BufferId) {
        let buffer = self.buffer_mut(id);
        buffer.refs += 1;
    }

    /// Drops a reference to a buffer. Dropping the last one frees the buffer.
    pub fn release(&mut self, id: BufferId) {
        let buffer = self.buffer_mut(id);
        buffer.refs -= 1;
        if buffer.refs > 0 {
            return;
        }
        assert!(buffer.filling.is_empty(), "the ring holds a reference while the kernel writes");
        let (page, pages) = (buffer.page, (buffer.len as usize).div_ceil(PAGE_BYTES));
        let (is_own, holder) = (!buffer.shared.is_some(), buffer.holder.take());
        buffer.shared.clear();
        self.free_ids.push(id.0);
        if !is_own {
            return;
        }
        self.used_pages -= pages;
        match holder {
            Some(disk) => self.shares.give_back(disk, pages as u64),
            None => self.shares.give_back_unowned(pages as u64),
        }
        match self.recent.get_mut(pages) {
            Some(runs) if runs.len() < RECENT_EACH_MAX => runs.push(page),
            _ => self.buddy.free(page, pages as u32),
        }
    }

    /// Returns the size of a buffer in bytes.
    #[allow(clippy::len_without_is_empty)] // No buffer has zero bytes.
    pub fn len(&self, id: BufferId) -> usize {
        self.buffer(id).len as usize
    }

    /// Returns the contents of a whole buffer.
    pub fn bytes(&self, id: BufferId) -> &[u8] {
        self.slice(self.whole(id))
    }

    /// Returns the bytes of a whole buffer for writing.
    pub fn bytes_mut(&mut self, id: BufferId) -> &mut [u8] {
        self.slice_mut(self.whole(id))
    }

    /// Returns the bytes of a part of a buffer for reading.
    pub fn slice(&self, slice: BufferSlice) -> &[u8] {
        let offset = self.locate(slice);
        self.assert_not_filling(slice);
        // SAFETY: the range is inside a live buffer. The kernel fills no byte of it, as just
        // checked, and Rust code changes bytes only through `&mut self`.
        unsafe { self.memory.bytes(offset, slice.len as usize) }
    }

    /// Returns the bytes of a part of a buffer for writing.
    pub fn slice_mut(&mut self, slice: BufferSlice) -> &mut [u8] {
        let offset = self.locate(slice);
        self.assert_not_filling(slice);
        // SAFETY: as in `slice`. `&mut self` ensures that this is the only slice of the arena.
        unsafe { self.memory.bytes_mut(offset, slice.len as usize) }
    }

    /// Copies bytes from one buffer to another, or to another place in the same buffer.
    pub fn copy(&mut self, from: BufferSlice, to: BufferSlice) {
        let is_apart = from.id != to.id || from.offset.abs_diff(to.offset) >= from.len;
        assert!(is_apart && from.len == to.len, "a copy from {from:?} to {to:?}");
        let (source, target) = (self.locate(from), self.locate(to));
        self.assert_not_filling(from);
        self.assert_not_filling(to);
        // SAFETY: as in `slice` and `slice_mut`. Two live buffers do not overlap, and
        // neither do the two slices.
        let (source, target) = unsafe {
            (self.memory.bytes(source, from.len as usize), self.memory.bytes_mut(target, to.len as usize))
        };
        target.copy_from_slice(source);
    }

    /// Returns the slice that covers the whole buffer.
    pub fn whole(&self, id: BufferId) -> BufferSlice {
        BufferSlice { id, offset: 0, len: self.buffer(id).len }
    }

    /// Returns the size of the arena in bytes.
    pub fn capacity(&self) -> usize {
        self.memory.len()
    }

    /// Returns the total size of all buffers, rounded up to pages, bytes.
    pub fn used(&self) -> usize {
        self.used_pages * PAGE_BYTES
    }

    /// Records that an operation in the I/O ring uses `slice`.
    pub(crate) fn pin(&mut self, slice: BufferSlice, traffic: Traffic) {
        let buffer = self.buffer_mut(slice.id);
        buffer.assert_holds(slice);
        buffer.refs += 1;
        if traffic == Traffic::KernelWrites {
            buffer.filling.push((slice.offset, slice.offset + slice.len));
        }
    }

    /// Records that an operation in the I/O ring no longer uses `slice`.
    pub(crate) fn unpin(&mut self, slice: BufferSlice, traffic: Traffic) {
        if traffic == Traffic::KernelWrites {
            let filling = &mut self.buffer_mut(slice.id).filling;
            let range = (slice.offset, slice.offset + slice.len);
            let at = filling.iter().position(|&part| part == range);
            filling.swap_remove(at.expect("what is unpinned was pinned"));
        }
        self.release(slice.id);
    }

    /// Returns the address of a slice that an operation uses.
    pub(crate) fn pinned_address(&self, slice: BufferSlice) -> *mut u8 {
        self.memory.address(self.locate(slice), slice.len as usize)
    }

    /// Returns the arena's mapping, for owners that keep it valid while the kernel uses it.
    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Returns the address and the size of the whole arena, for registering it with the kernel.
    pub(crate) fn region(&self) -> (*mut u8, usize) {
        (self.memory.address(0, self.memory.len()), self.memory.len())
    }

    fn locate(&self, slice: BufferSlice) -> usize {
        let buffer = self.buffer(slice.id);
        buffer.assert_holds(slice);
        assert!(!buffer.shared.is_some(), "memory outside the arena is not borrowed");
        buffer.page as usize * PAGE_BYTES + slice.offset as usize
    }

    fn assert_not_filling(&self, slice: BufferSlice) {
        let end = slice.offset + slice.len;
        for &(from, to) in &self.buffer(slice.id).filling {
            assert!(end <= from || to <= slice.offset, "{slice:?} is being filled");
        }
    }

    fn buffer(&self, id: BufferId) -> &Buffer {
        let buffer = &self.buffers[id.0 as usize];
        assert!(buffer.refs > 0, "buffer {id} was freed");
        buffer
    }

    fn buffer_mut(&mut self, id: BufferId) -> &mut Buffer {
        let buffer = &mut self.buffers[id.0 as usize];
        assert!(buffer.refs > 0, "buffer {id} was freed");
        buffer
    }
}

/// Direction of an operation's access to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Traffic {
    /// The kernel writes to memory: it reads a file or receives.
    KernelWrites,
    /// The kernel reads from memory: it writes a file or sends.
    KernelReads,
}
