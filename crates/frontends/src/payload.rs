//! The interface of front ends to a shard's payload buffers.

use std::collections::BTreeMap;

use hob_engine::io::BufferSlice;
use hob_engine::units::{BufferId, DiskId, SECTOR_BYTES, sector_ceil, sector_floor};

use crate::vhost_user::memory::GuestRun;

/// The payload buffers of the shard.
pub trait Payload {
    /// Allocates a buffer of `len` bytes with one reference and undefined content. Returns `None`
    /// if no buffer is free.
    fn alloc(&mut self, len: usize) -> Option<BufferId>;
    /// Returns true if `len` bytes of buffer memory are free. An allocation may still fail, because
    /// the free bytes are not contiguous.
    fn has_room(&mut self, len: usize) -> bool;
    /// Adds a reference to a buffer.
    fn retain(&mut self, id: BufferId);
    /// Drops a reference to a buffer. The buffer is freed with its last reference.
    fn release(&mut self, id: BufferId);
    /// Returns a part of a payload buffer for reading.
    fn bytes(&self, slice: BufferSlice) -> &[u8];
    /// Returns a part of a payload buffer for writing.
    fn bytes_mut(&mut self, slice: BufferSlice) -> &mut [u8];
    /// Returns guest memory as a buffer with one reference, for this read only. Returns `None` if a
    /// daemon buffer is better for this read.
    fn adopt(&mut self, _disk: DiskId, _offset: u64, _run: &GuestRun<'_>) -> Option<BufferId> {
        None
    }
}

/// Allocates the buffer for a request of `len` bytes at `offset`. Also returns the size of the
/// buffer, which is a multiple of a sector, in bytes. Bytes beyond the disk's end must read as
/// zeroes, so the last sector is zeroed. Zeroing it is safe: a read overwrites the sector, and a
/// write ignores its unused part. Returns `None` while no buffer is free.
#[inline]
pub(crate) fn alloc_for(payload: &mut impl Payload, offset: u64, len: u64) -> Option<(BufferId, usize)> {
    let bytes = buffer_bytes(offset, len);
    let id = payload.alloc(bytes as usize)?;
    if !(offset + len).is_multiple_of(SECTOR_BYTES) {
        let last = BufferSlice { id, offset: (bytes - SECTOR_BYTES) as u32, len: SECTOR_BYTES as u32 };
        payload.bytes_mut(last).fill(0);
    }
    Some((id, bytes as usize))
}

/// Returns the buffer size in bytes for a request of `len` bytes at `offset`.
#[inline]
pub(crate) fn buffer_bytes(offset: u64, len: u64) -> u64 {
    sector_ceil(offset + len) - sector_floor(offset)
}

/// Returns the part of the allocated buffer that holds the request's bytes.
#[inline]
pub(crate) fn slice_for(id: BufferId, offset: u64, len: u64) -> BufferSlice {
    BufferSlice { id, offset: (offset % SECTOR_BYTES) as u32, len: len as u32 }
}

/// Buffers that are plain vectors with reference counts, for tests and fuzzers.
#[derive(Debug, Default)]
pub struct PlainBuffers {
    /// Content and reference count of each buffer, by id.
    pub buffers: BTreeMap<u32, (Vec<u8>, u32)>,
    next: u32,
    /// True if allocations fail.
    pub full: bool,
    /// True if reads use guest memory. The buffers of such reads are empty.
    pub adopts: bool,
}

impl Payload for PlainBuffers {
    fn alloc(&mut self, len: usize) -> Option<BufferId> {
        if self.full {
            return None;
        }
        self.next += 1;
        self.buffers.insert(self.next, (vec![0xEE; len], 1));
        Some(BufferId(self.next))
    }
    fn has_room(&mut self, _len: usize) -> bool {
        !self.full
    }
    fn retain(&mut self, id: BufferId) {
        self.buffers.get_mut(&id.0).expect("alive").1 += 1;
    }
    fn release(&mut self, id: BufferId) {
        let refs = &mut self.buffers.get_mut(&id.0).expect("alive").1;
        *refs -= 1;
        if *refs == 0 {
            self.buffers.remove(&id.0);
        }
    }
    fn bytes(&self, slice: BufferSlice) -> &[u8] {
        &self.buffers[&slice.id.0].0[slice.offset as usize..][..slice.len as usize]
    }
    fn bytes_mut(&mut self, slice: BufferSlice) -> &mut [u8] {
        let buffer = self.buffers.get_mut(&slice.id.0).expect("alive");
        &mut buffer.0[slice.offset as usize..][..slice.len as usize]
    }
    fn adopt(&mut self, _disk: DiskId, _offset: u64, _run: &GuestRun<'_>) -> Option<BufferId> {
        if !self.adopts {
            return None;
        }
        self.next += 1;
        self.buffers.insert(self.next, (vec![], 1));
        Some(BufferId(self.next))
    }
}
