//! What another disk of this engine keeps already: reads of a clone's backing that its parent's cache serves (docs/decisions/0020).
//!
//! Whoever performs I/O knows what of a backing is its parent's and hands such reads to the parent's disk, as requests of its own. The
//! clone promotes nothing of what comes back that way: the bytes that clones have in common are in flash once. A read of which only a part
//! came from there promotes the rest.

use super::{Active, Engine, Owner};
use crate::io::Promote;
use crate::units::{Instant, IoId};

impl Engine {
    /// This read of a backing, or a part of it, is with another disk. What bounds its datastore counts it no more: the other disk's own
    /// I/O would wait for it there, and it for that.
    pub fn pass_on(&mut self, now: Instant, id: IoId) {
        self.leave_gate(now, id);
    }

    /// What a request to another disk on behalf of this read of a backing may leave behind there.
    pub fn promote_of(&self, id: IoId) -> Promote {
        match self.ios[id.0].owner {
            Owner::Request(slot) if self.requests[slot].request.passes_by() => Promote::Never,
            _ => Promote::Usual,
        }
    }

    /// As [`handle_completion`](Self::handle_completion), of a read that went well and of which another disk served these sectors,
    /// `first..end` on the disk, inside the read's own and not overlapping.
    pub fn handle_shared(&mut self, now: Instant, id: IoId, shared: &[(u64, u64)], sums: &[u32]) {
        let io = &mut self.ios[id.0];
        assert!(!io.is_write, "only reads are shared");
        let sectors: u64 = shared.iter().map(|(first, end)| end - first).sum();
        let bytes = (sectors * crate::units::SECTOR_BYTES).min(io.bytes);
        // What is left is what the backing had to do.
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

    /// Did another disk serve all of a request?
    pub(super) fn is_all_shared(&self, slot: u32) -> bool {
        let Active { shared, range, .. } = &self.requests[slot];
        let sectors: u64 = shared.iter().map(|(first, end)| end - first).sum();
        !shared.is_empty() && sectors == range.end - range.first
    }
}

/// Does another disk keep all of these sectors?
pub(super) fn is_shared(shared: &[(u64, u64)], first: u64, end: u64) -> bool {
    shared.iter().any(|(from, to)| *from <= first && end <= *to)
}
