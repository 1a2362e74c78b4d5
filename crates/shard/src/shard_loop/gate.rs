//! The request limit of each disk in a shard: how much of the buffer arena one connection may take.

use hob_engine::Engine;
use hob_engine::io::BufferSlice;
use hob_engine::units::{BufferId, DiskId};
use hob_frontends::Payload;
use hob_frontends::vhost_user::memory::GuestRun;
use hob_storage::buffers::Arena;
use hob_storage::ring::Ring;

/// Maximum size of a small request in bytes. Small requests do not queue behind large ones.
pub(super) const SMALL_BYTES_MAX: usize = 1 << 20;

/// Large requests of all connections together leave 1/`RESERVE_SHARE` of the arena free for small
/// requests.
pub(super) const RESERVE_SHARE: usize = 16;

/// The buffer arena as seen by one connection.
///
/// A disk has a share of the arena. A connection may hold at most as many bytes as its disk's share
/// still has free. Large requests leave a sixteenth of the share free. Therefore a greedy client of
/// a disk cannot keep small buffers from other clients of the disk.
pub(super) struct Gate<'a> {
    arena: &'a mut Arena,
    /// The disk from whose share the buffers are taken; `None` if no share applies.
    disk: Option<DiskId>,
    /// Size of the buffer that the disk's share had no room for.
    lacking: Option<usize>,
    /// True if this connection may take a large buffer, because no other connection waits for one.
    open: bool,
    held_bytes: usize,
    /// True if a buffer was refused because this connection already holds too many bytes.
    pub(super) greedy: bool,
    /// The engine, which knows whether flash can serve a read directly into guest memory; `None` if
    /// such reads are not allowed.
    engine: Option<&'a Engine>,
}

impl<'a> Gate<'a> {
    /// Creates the gate of a connection that already has buffers of `held_bytes` in total. `open`
    /// is true if the connection may have a large buffer.
    pub(super) fn new(ring: &mut Ring, disk: DiskId, held_bytes: usize, open: bool) -> Gate<'_> {
        Gate { disk: Some(disk), open, held_bytes, ..ungated(ring) }
    }

    /// Allows reads from flash directly into guest memory.
    pub(super) fn knowing(self, engine: &'a Engine) -> Gate<'a> {
        Gate { engine: Some(engine), ..self }
    }

    /// Returns the size of the buffer that the disk's share had no room for.
    pub(super) fn lacking(&self) -> Option<usize> {
        self.lacking
    }

    /// Creates a gate that can release buffers but not allocate them.
    pub(super) fn ungated(ring: &mut Ring) -> Gate<'_> {
        ungated(ring)
    }
}

/// Returns true if a request that lacked `bytes` before may get a buffer now. A large request may
/// use the whole share of a disk that holds no buffer.
pub(super) fn may_have_room(arena: &Arena, disk: DiskId, bytes: usize) -> bool {
    arena.held(disk) == 0 || arena.may_alloc(disk, bytes)
}

/// Creates a gate that can release buffers but not allocate them.
pub(super) fn ungated(ring: &mut Ring) -> Gate<'_> {
    let arena = ring.arena_mut();
    Gate { arena, disk: None, lacking: None, open: true, held_bytes: 0, greedy: false, engine: None }
}

impl Payload for Gate<'_> {
    fn has_room(&mut self, len: usize) -> bool {
        let Some(disk) = self.disk else { return false };
        let (held, room) = (self.arena.held(disk), self.arena.room(disk));
        let reserve = if len <= SMALL_BYTES_MAX || held == 0 { 0 } else { (held + room) / RESERVE_SHARE };
        if !self.arena.may_alloc(disk, len + reserve) {
            self.lacking = Some(len + reserve);
            return false;
        }
        let free = self.arena.capacity() - self.arena.used();
        self.greedy = self.held_bytes > 0 && self.held_bytes + len > room.min(free);
        let leaves_enough = free >= len + self.arena.capacity() / RESERVE_SHARE;
        let has_turn = len <= SMALL_BYTES_MAX || (self.open && leaves_enough);
        !self.greedy && has_turn
    }
    fn alloc(&mut self, len: usize) -> Option<BufferId> {
        if !self.has_room(len) {
            return None;
        }
        let id = self.arena.alloc_for(self.disk?, len)?;
        self.held_bytes += len;
        Some(id)
    }
    fn retain(&mut self, id: BufferId) {
        self.arena.retain(id);
    }
    fn release(&mut self, id: BufferId) {
        self.arena.release(id);
    }
    fn bytes(&self, slice: BufferSlice) -> &[u8] {
        self.arena.slice(slice)
    }
    fn bytes_mut(&mut self, slice: BufferSlice) -> &mut [u8] {
        self.arena.slice_mut(slice)
    }
    fn adopt(&mut self, disk: DiskId, offset: u64, run: &GuestRun<'_>) -> Option<BufferId> {
        self.engine.filter(|engine| engine.would_read_flash(disk, offset, run.len()))?;
        self.arena.adopt(run.map(), |map, pieces| run.for_each(map, |slice| pieces.push(&slice)))
    }
}
