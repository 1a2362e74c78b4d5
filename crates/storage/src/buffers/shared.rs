//! Buffers outside the arena: guest memory, into which reads go without a copy.
//!
//! # Rules
//! The guest and its vhost-user client may write to this memory at any time, and may truncate the
//! file behind the memory. So Rust code never has a reference to the bytes. The kernel fills the
//! memory when it reads a file. A checksum is computed by volatile reads, which read each byte
//! exactly once, so a concurrent write of the guest only makes the checksum wrong.
//! * The memory stays mapped while the buffer exists, because the buffer holds the memory's owner.
//!   Operations in the I/O ring hold the buffer.
//! * The memory consists of whole pages. So O_DIRECT accepts the memory like the arena's memory,
//!   and no sector is split.
#![allow(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

use hob_engine::io::BufferSlice;
use hob_engine::units::BufferId;
use vm_memory::VolatileSlice;

use super::{Arena, Buffer, PAGE_BYTES};
use crate::checksum::{sector_sums, shared_sector_sum};

/// A contiguous part of guest memory that a buffer covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) to: *mut u8,
    pub(crate) len: usize,
}

/// The parts of guest memory that form a buffer; see [`Arena::adopt`].
#[derive(Debug)]
pub struct Pieces<'a> {
    parts: Vec<Part>,
    len: usize,
    fits: bool,
    /// Marker: pushed slices must be valid for `'a`, the borrow of the guest memory's owner.
    _life: std::marker::PhantomData<std::cell::Cell<&'a ()>>,
}

impl<'a> Pieces<'a> {
    /// Appends the next part of guest memory to the buffer.
    pub fn push(&mut self, slice: &VolatileSlice<'a>) {
        let (to, len) = (slice.ptr_guard_mut().as_ptr(), slice.len());
        self.fits &= (to as usize | len).is_multiple_of(PAGE_BYTES);
        self.len = self.len.saturating_add(len);
        match self.parts.last_mut() {
            // Adjacent parts are joined, which saves the kernel an operation.
            Some(last) if last.to.wrapping_add(last.len) == to => last.len += len,
            _ => self.parts.push(Part { to, len }),
        }
    }
}

/// The guest memory of a buffer that is outside the arena. This value is empty for a buffer in the
/// arena.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// Parts of guest memory that form the buffer. The vector is reused.
    parts: Vec<Part>,
    /// Owner of the guest memory. The parts stay mapped while this field holds the owner.
    owner: Option<Owner>,
}

struct Owner(#[expect(dead_code, reason = "held for its drop alone")] Arc<dyn Any + Send + Sync>);

impl std::fmt::Debug for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Owner")
    }
}

impl Shared {
    pub(super) fn is_some(&self) -> bool {
        self.owner.is_some()
    }

    pub(super) fn clear(&mut self) {
        self.parts.clear();
        self.owner = None;
    }
}

impl Arena {
    /// Creates a buffer with one reference. The buffer consists of the parts of `owner`'s memory
    /// that `describe` adds. Returns `None` if there are no parts, or they are not whole pages. The
    /// buffer takes no space in the arena. File reads can fill it; other uses are not possible.
    pub fn adopt<M: Send + Sync + 'static>(
        &mut self,
        owner: &Arc<M>,
        describe: impl for<'a> FnOnce(&'a M, &mut Pieces<'a>),
    ) -> Option<BufferId> {
        let id = self.free_id();
        let shared = &mut self.buffers[id as usize].shared;
        let parts = std::mem::take(&mut shared.parts);
        let mut pieces = Pieces { parts, len: 0, fits: true, _life: std::marker::PhantomData };
        describe(owner, &mut pieces);
        let Pieces { parts, len, fits, .. } = pieces;
        shared.parts = parts;
        let len = u32::try_from(len).ok().filter(|len| fits && *len > 0);
        let Some(len) = len else {
            shared.clear();
            self.free_ids.push(id);
            return None;
        };
        shared.owner = Some(Owner(Arc::clone(owner) as Arc<dyn Any + Send + Sync>));
        let buffer = &mut self.buffers[id as usize];
        (buffer.page, buffer.len, buffer.refs) = (0, len, 1);
        Some(BufferId(id))
    }

    /// Returns true if a buffer is outside the arena.
    #[inline]
    pub(crate) fn is_shared(&self, id: BufferId) -> bool {
        self.buffer(id).shared.is_some()
    }

    /// Returns the addresses of the bytes of a buffer outside the arena.
    pub(crate) fn shared_parts(&self, slice: BufferSlice) -> impl Iterator<Item = Part> {
        let buffer = self.buffer(slice.id);
        buffer.assert_holds(slice);
        let (mut skip, mut left) = (slice.offset as usize, slice.len as usize);
        buffer.shared.parts.iter().filter_map(move |part| {
            let skipped = skip.min(part.len);
            skip -= skipped;
            let len = (part.len - skipped).min(left);
            left -= len;
            (len > 0).then(|| Part { to: part.to.wrapping_add(skipped), len })
        })
    }

    /// Copies bytes into a buffer outside the arena.
    pub(crate) fn put_shared(&mut self, slice: BufferSlice, mut bytes: &[u8]) {
        for Part { to, len } in self.shared_parts(slice) {
            let (here, rest) = bytes.split_at(len);
            // SAFETY: the part is mapped and writable while the buffer lives, and there is no
            // reference to its bytes.
            unsafe { std::ptr::copy_nonoverlapping(here.as_ptr(), to, len) };
            bytes = rest;
        }
    }

    /// Replaces the contents of `sums` with the checksums of a slice's whole sectors. The buffer
    /// may be inside or outside the arena.
    pub fn sector_sums(&self, slice: BufferSlice, sums: &mut Vec<u32>) {
        if !self.is_shared(slice.id) {
            return sector_sums(self.slice(slice), sums);
        }
        sums.clear();
        for Part { to, len } in self.shared_parts(slice) {
            assert!(len.is_multiple_of(PAGE_BYTES), "whole sectors only");
            for at in (0..len).step_by(PAGE_BYTES) {
                // SAFETY: the page is mapped while the buffer lives.
                sums.push(unsafe { shared_sector_sum(to.wrapping_add(at).cast()) });
            }
        }
    }

    /// Keeps all memory outside the arena mapped for ever, because the kernel may still write to
    /// it.
    pub(crate) fn leak_shared(&mut self) {
        for buffer in &mut self.buffers {
            std::mem::forget(buffer.shared.owner.take());
        }
    }
}

impl Buffer {
    pub(super) fn assert_holds(&self, slice: BufferSlice) {
        let end = slice.offset.checked_add(slice.len).expect("a slice ends inside its buffer");
        assert!(end <= self.len, "slice {slice:?} leaves its buffer of {} bytes", self.len);
    }
}
