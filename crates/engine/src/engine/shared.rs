//! Shared parents: the cache of a parent's disk serves reads of its clones' backings
//! (docs/decisions/0020-shared-parents.md).
//!
//! The storage layer determines which parts of a backing belong to its parent. The storage layer
//! sends reads of these parts to the parent's disk, as separate requests. The clone does not
//! promote the data of the parent's disk. So data that several clones share is on flash only once.
//! If the parent's disk served only a part of a read, the clone promotes the rest.

use super::jobs::JobKind;
use super::{Active, Engine, Owner};
use crate::io::Promote;
use crate::units::{Instant, IoId};

impl Engine {
    /// Records that another disk serves all or part of a read of a backing. The read no longer
    /// counts in the datastore's limit of I/Os in flight. Otherwise this read and the other disk's
    /// own I/O could wait for each other.
    pub fn pass_on(&mut self, now: Instant, id: IoId) {
        self.leave_gate(now, id);
    }

    /// Returns the rule for promoting data into the parent's cache when the parent's disk serves
    /// this read.
    pub fn promote_of(&self, id: IoId) -> Promote {
        match self.ios[id.0].owner {
            Owner::Request(slot) if self.requests[slot].request.passes_by() => Promote::Never,
            Owner::Job(job) if matches!(self.jobs[job].kind, JobKind::ExtraFill(_)) => Promote::Never,
            _ => Promote::Usual,
        }
    }

    /// Handles the completion of a successful read. Another disk served the sectors `shared` of the
    /// read. `shared` has ranges `first..end` of the disk, which are inside the read and do not
    /// overlap. The effect is otherwise that of [`handle_completion`](Self::handle_completion).
    pub fn handle_shared(&mut self, now: Instant, id: IoId, shared: &[(u64, u64)], sums: &[u32]) {
        let io = &mut self.ios[id.0];
        assert!(!io.is_write, "another disk serves only reads");
        let sectors: u64 = shared.iter().map(|(first, end)| end - first).sum();
        let bytes = (sectors * crate::units::SECTOR_BYTES).min(io.bytes);
        // Only the bytes that the other disk did not serve count as I/O of the backing.
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
