//! The buffers that front ends move payload through: a shard's, as they see them.

use hob_engine::io::BufferSlice;
use hob_engine::units::BufferId;

/// The payload buffers of the shard.
pub trait Payload {
    /// A buffer of that many bytes with one reference, its content undefined; `None` while there is no room.
    fn alloc(&mut self, len: usize) -> Option<BufferId>;
    /// One more reference.
    fn retain(&mut self, id: BufferId);
    /// One reference less.
    fn release(&mut self, id: BufferId);
    /// Part of a buffer.
    fn bytes(&self, slice: BufferSlice) -> &[u8];
    /// Part of a buffer, to be written.
    fn bytes_mut(&mut self, slice: BufferSlice) -> &mut [u8];
}
