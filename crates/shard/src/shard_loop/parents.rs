//! Reads of clones that the disk of their parent serves (docs/decisions/0020).
//!
//! The backing of a clone passes reads of the parent's data to the shard. The shard turns each read
//! into a request to the parent's disk, which is on the same shard. The request has its own buffer,
//! because the parent's disk may fill its cache from that buffer after the clone's reply. The data
//! is then copied into the clone's buffer. If no buffer is free or the parent's disk fails, the
//! clone's own backing reads the data.

use std::collections::BTreeMap;

use hob_engine::Engine;
use hob_engine::io::{BufferCopy, BufferSlice, CopyEnd, IoError, Op, PayloadMemory, Promote, Reply, Request};
use hob_engine::units::{BufferId, DiskId, Instant, RequestId};
use hob_storage::backing::ParentRead;
use hob_storage::ring::Ring;

use super::Shard;

/// Bit in the upper half of a request id that marks reads for clones. Session numbers of clients
/// are smaller.
const OWN: u32 = 1 << 28;

/// A read that was sent to a parent's disk.
struct Asked {
    clone: DiskId,
    number: u32,
    slice: BufferSlice,
    buffer: BufferId,
}

/// Which disk is the parent of which clone, and the reads in flight to parents.
#[derive(Default)]
pub(super) struct Parents {
    /// The parent's disk of each clone.
    links: BTreeMap<DiskId, DiskId>,
    asked: BTreeMap<u32, Asked>,
    last: u32,
}

impl Parents {
    /// Returns true if the request id belongs to a read for a clone.
    pub(super) fn owns(id: RequestId) -> bool {
        (id.0 >> 32) as u32 & OWN != 0
    }

    /// Sends the read to the parent's disk. Returns `None` if this is not possible now.
    fn ask(
        &mut self,
        now: Instant,
        ring: &mut Ring,
        engine: &mut Engine,
        clone: DiskId,
        read: &ParentRead,
        promote: Promote,
    ) -> Option<()> {
        let parent = *self.links.get(&clone)?;
        let buffer = ring.arena_mut().alloc_for(parent, read.len as usize)?;
        self.last = self.last.wrapping_add(1);
        let id = RequestId(u64::from(OWN) << 32 | u64::from(self.last));
        let request = Request {
            id,
            disk: parent,
            op: Op::Read,
            offset: read.offset,
            len: read.len,
            buffer: Some(buffer),
            promote,
            memory: PayloadMemory::Daemon,
        };
        if engine.handle_request(now, request).is_err() {
            ring.arena_mut().release(buffer);
            return None;
        }
        let asked = Asked { clone, number: read.number, slice: read.slice, buffer };
        let before = self.asked.insert(self.last, asked);
        assert!(before.is_none(), "as many requests cannot be in flight");
        Some(())
    }
}

impl Shard {
    /// Sets or removes the disk that serves a clone's reads of its parent.
    pub(super) fn link_parent(&mut self, clone: DiskId, parent: Option<DiskId>) {
        let parent = parent.filter(|parent| *parent != clone && self.serves(*parent));
        match parent {
            Some(parent) => self.parents.links.insert(clone, parent),
            None => self.parents.links.remove(&clone),
        };
        let parent_bytes = parent.and_then(|parent| {
            let backing = self.backings.get(parent.0 as usize)?.as_ref()?;
            Some(backing.info().size_bytes)
        });
        if let Some(Some(backing)) = self.backings.get_mut(clone.0 as usize) {
            backing.link_parent(parent_bytes);
        }
    }

    /// Prepares the removal of a disk. Clones of the disk then read their parent's data through
    /// their own backings.
    pub(super) fn unlink_parent(&mut self, id: DiskId) {
        self.parents.links.remove(&id);
        let links = self.parents.links.iter().filter(|(_, parent)| **parent == id);
        let clones: Vec<DiskId> = links.map(|(clone, _)| *clone).collect();
        clones.into_iter().for_each(|clone| self.link_parent(clone, None));
    }

    /// Takes the reads of parent data from a clone's backing, and sends them to hob's disk of the
    /// parent snapshot. Returns false if there were none.
    pub(super) fn ask_parent(&mut self, now: Instant, clone: DiskId) -> bool {
        let mut progress = false;
        while let Some(backing) = self.backings[clone.0 as usize].as_mut()
            && let Some(read) = backing.poll_parent_read()
        {
            progress = true;
            let promote = self.engine.promote_of(read.io);
            let Shard { parents, ring, engine, .. } = self;
            match parents.ask(now, ring, engine, clone, &read, promote) {
                Some(()) => engine.pass_on(now, read.io),
                None => backing.handle_parent_read(ring, now, read.number, Err(IoError::ShuttingDown)),
            }
        }
        progress
    }

    /// Handles the reply of a parent's disk.
    pub(super) fn parent_replied(&mut self, now: Instant, reply: &Reply) {
        let asked = self.parents.asked.remove(&(reply.id.0 as u32));
        let Asked { clone, number, slice, buffer } = asked.expect("requests are answered once");
        if reply.result.is_ok() {
            let from = CopyEnd::Buffer { id: buffer, offset: 0 };
            let to = CopyEnd::Buffer { id: slice.id, offset: slice.offset };
            self.areas.copy(self.ring.arena_mut(), &BufferCopy { from, to, len: slice.len });
        }
        let backing =
            self.backings[clone.0 as usize].as_mut().expect("a clone's backing waits for its reads");
        backing.handle_parent_read(&mut self.ring, now, number, reply.result);
        self.collect(now, clone);
        self.make_copies();
    }
}
