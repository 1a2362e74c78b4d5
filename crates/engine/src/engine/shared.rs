//! Shared parents: reads of a clone's backing that the cache of its parent's disk serves
//! (docs/decisions/0020).
//!
//! The code that performs I/O knows which parts of a backing belong to its parent. It sends reads
//! of these parts to the parent's disk, as separate requests. The clone promotes none of that data,
//! so data that clones share is in flash once. If only a part of a read was served this way, the
//! clone promotes the rest.

use super::{Active, Engine, Owner};
use crate::io::Promote;
use crate::units::{Instant, IoId};

impl Engine {
    /// This read of a backing, or a part of it, is with another disk. What bounds its datastore counts it no more: the other disk's own
    /// I/O would wait for it there, and it for that.
    pub fn pass_on(&mut self, now: Instant, id: IoId) {
        self.leave_gate(now, id);
    }

    /// What a request to the parent's disk on behalf of this read may promote there.
    pub fn promote_of(&self, id: IoId) -> Promote {
        match self.ios[id.0].owner {
            Owner::Request(slot) if self.requests[slot].request.passes_by() => Promote::Never,
            _ => Promote::Usual,
        }
    }

    /// Like [`handle_completion`](Self::handle_completion), for a successful read of which another
    /// disk served these sectors: ranges `first..end` of the disk, inside the read and without
    /// overlaps.
    pub fn handle_shared(&mut self, now: Instant, id: IoId, shared: &[(u64, u64)], sums: &[u32]) {
        let io = &mut self.ios[id.0];
        assert!(!io.is_write, "only reads are shared");
        let sectors: u64 = shared.iter().map(|(first, end)| end - first).sum();
        let bytes = (sectors * crate::units::SECTOR_BYTES).min(io.bytes);
        // The rest is the backing's work.
        io.bytes -= bytes;
        let (disk, owner) = (io.disk, io.owner);
        self.disk_mut(disk).stats.shared_read_bytes += bytes;
        if let Owner::Request(slot) = owner {
            let Active { shared: of_request, range, .. } = &mut self.requests[slot];
            assert!(
                shared.iter().all(|(first, end)| range.first <= *first && first < end && *end <= range.end),
                "{shared:?} of {range:?}"
            );
            of_request.clear();
            of_request.extend_from_slice(shared);
        }
        self.handle_completion(now, id, Ok(()), sums);
    }

    /// Returns true if another disk served all of a request.
    pub(super) fn is_all_shared(&self, slot: u32) -> bool {
        let Active { shared, range, .. } = &self.requests[slot];
        let sectors: u64 = shared.iter().map(|(first, end)| end - first).sum();
        !shared.is_empty() && sectors == range.end - range.first
    }
}

/// Returns true if another disk caches all of these sectors.
pub(super) fn is_shared(shared: &[(u64, u64)], first: u64, end: u64) -> bool {
    shared.iter().any(|(from, to)| *from <= first && end <= *to)
}
