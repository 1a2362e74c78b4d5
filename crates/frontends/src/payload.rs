//! The buffers that front ends move payload through: a shard's, as they see them.

use std::collections::BTreeMap;

use hob_engine::io::BufferSlice;
use hob_engine::units::{BufferId, DiskId, SECTOR_BYTES, sector_ceil, sector_floor};

use crate::vhost_user::memory::GuestRun;

/// The payload buffers of the shard.
pub trait Payload {
    /// A buffer of that many bytes with one reference, its content undefined; `None` while there is no room.
    fn alloc(&mut self, len: usize) -> Option<BufferId>;
    /// Is there room for a buffer of that many bytes? There may still be none in one piece.
    fn has_room(&mut self, len: usize) -> bool;
    /// One more reference.
    fn retain(&mut self, id: BufferId);
    /// One reference less.
    fn release(&mut self, id: BufferId);
    /// Part of a buffer.
    fn bytes(&self, slice: BufferSlice) -> &[u8];
    /// Part of a buffer, to be written.
    fn bytes_mut(&mut self, slice: BufferSlice) -> &mut [u8];
    /// A buffer, with one reference, that is a guest's own memory, if that is worth while for a read of a disk, from this offset on. It
    /// takes part in nothing but that read.
    fn adopt(&mut self, _disk: DiskId, _offset: u64, _run: &GuestRun<'_>) -> Option<BufferId> {
        None
    }
}

/// A buffer for the request of these bytes, and how many it has: whole sectors, as the engine wants it. Its bytes beyond the
/// disk's end must read as zeroes; those of a sector that the request touches in part are overwritten by a read and ignored
/// for a write, so zeroing the last sector is always right, and cheap. `None` while there is no room.
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

/// Bytes of the buffer for the request of these bytes.
#[inline]
pub(crate) fn buffer_bytes(offset: u64, len: u64) -> u64 {
    sector_ceil(offset + len) - sector_floor(offset)
}

/// Where the bytes of a request are in such a buffer.
#[inline]
pub(crate) fn slice_for(id: BufferId, offset: u64, len: u64) -> BufferSlice {
    BufferSlice { id, offset: (offset % SECTOR_BYTES) as u32, len: len as u32 }
}

/// Buffers that are plain vectors with their reference counts: for tests and fuzzers.
#[derive(Debug, Default)]
pub struct PlainBuffers {
    /// By id: what is in it, and its references.
    pub buffers: BTreeMap<u32, (Vec<u8>, u32)>,
    next: u32,
    /// There is no room for another.
    pub full: bool,
    /// Reads go into the guest's own memory: their buffers are empty.
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
