//! Disks whose backing may never answer: requests that wait for it fail, and the disk can be removed.
//!
//! What cannot be called back stays in the kernel or in a library, with its memory, and the backing stays open until that ends. Nobody waits for it.

use hob_engine::units::{DiskId, Instant};
use hob_frontends::nbd::Connection;
use hob_storage::backing::{Backing, WaitMax};

use super::Shard;

impl Shard {
    /// Fails what waits for a disk's backing at this moment. Later requests wait as long as ever.
    pub(super) fn expire_requests(&mut self, now: Instant, id: DiskId) {
        if let Some(backing) = self.backings.get_mut(id.0 as usize).and_then(Option::as_mut) {
            backing.set_wait_max(now, WaitMax::Expired);
        }
    }

    /// Disconnects a disk from its clients and from its backing.
    pub(super) fn abandon_disk(&mut self, now: Instant, id: DiskId) {
        let is_of = |connection: &Connection| connection.disk() == id;
        self.clients.close("the disk is removed", &mut self.ring, is_of);
        self.files.close(&mut self.ring, id);
        self.machines.close_all(id, &mut self.ring);
        self.lose_disk(now, id);
        if let Some(backing) = self.backings.get_mut(id.0 as usize).and_then(Option::as_mut) {
            backing.abandon(&mut self.ring, now);
            self.collect(now, id);
        }
        // It may have been removed before, and its backing does not close.
        self.commands.leave_behind(id);
    }

    /// Is a disk's backing only there because something cannot be called back?
    pub(super) fn is_abandoned(&self, id: DiskId) -> bool {
        let backing = self.backings.get(id.0 as usize).and_then(Option::as_ref);
        backing.is_some_and(Backing::is_abandoned)
    }
}
