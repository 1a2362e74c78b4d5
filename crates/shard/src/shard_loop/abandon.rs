//! Removal of disks whose backing may never answer a request.
//!
//! A request that cannot be cancelled stays in the kernel or in a library, together with its
//! memory. The backing stays open until that request ends. The daemon continues without waiting for
//! the end of the request.

use hob_engine::units::{DiskId, Instant};
use hob_frontends::nbd::Connection;
use hob_storage::backing::{Backing, WaitMax};

use super::Shard;

impl Shard {
    /// Fails immediately all requests that are waiting for a disk's backing. Later requests may
    /// wait as long as before.
    pub(super) fn expire_requests(&mut self, now: Instant, id: DiskId) {
        if let Some(backing) = self.backings.get_mut(id) {
            backing.set_wait_max(now, WaitMax::Expired);
        }
    }

    /// Disconnects a disk from its clients and from its backing.
    pub(super) fn abandon_disk(&mut self, now: Instant, id: DiskId) {
        let is_of = |connection: &Connection| connection.disk() == id;
        self.clients.close("the disk is removed", &mut self.ring, is_of);
        self.files.close(&mut self.ring, id);
        self.vhost_user.close_all(id, &mut self.ring);
        self.lose_disk(now, id);
        if let Some(backing) = self.backings.get_mut(id) {
            backing.abandon(&mut self.ring, now);
            self.collect(now, id);
        }
        // If the removal of the disk has already begun, it is completed without waiting for the
        // backing.
        self.commands.leave_behind(id);
    }

    /// Abandons the backing of a disk that is being removed, if this loses no data. Dirty data
    /// stays in the cache. Acknowledged changes that only the backing has are lost if the backing
    /// never flushes them. So the removal waits for a flush of these changes. If this flush fails,
    /// the failure is reported to guests, and the removal does not wait any more.
    pub(super) fn stop_waiting(&mut self, now: Instant, id: DiskId) {
        let at_risk = self.engine.guests_at_risk(id).unwrap_or(0);
        if self.is_abandoned(id) || at_risk > self.engine.failures_owed(id) {
            return;
        }
        self.abandon_disk(now, id);
        // The removal skips the last flush, which the engine handles like a failed flush.
        self.engine.handle_loss(now, id);
    }

    /// Returns true if a disk's backing is open only because a request cannot be cancelled.
    pub(super) fn is_abandoned(&self, id: DiskId) -> bool {
        let backing = self.backings.get(id);
        backing.is_some_and(Backing::is_abandoned)
    }
}
