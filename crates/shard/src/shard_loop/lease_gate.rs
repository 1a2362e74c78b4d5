//! The lease gate of a shard: replies and writes wait here while the host does not know whether its
//! lease in etcd is still valid (docs/decisions/0019).
//!
//! A disk of a cluster is served under a lease. When the lease has expired by this host's clock,
//! the shard sends no reply, and sends no write to the backing. The shard queues both replies and
//! writes in order. The engine only sees a slow backing and slow guests. The queued operations
//! continue when the lease is renewed or acquired again. Queued operations fail when another host
//! owns the disk. The shard cancels writes that the backing received in time but did not complete,
//! before another host may acquire the disk.

use std::sync::Arc;
use std::time::Duration;

use hob_engine::io::{Io, IoError, IoOp, Reply, Target};
use hob_engine::units::{DiskId, Instant};
use hob_nbd::Extent;

use super::Shard;
use crate::lease_clock::{self, LeaseClock};

/// Interval at which the etcd lease is checked while operations wait for it.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The etcd lease under which each disk of a cluster is served, by disk id.
#[derive(Default)]
pub(super) struct Leases {
    disks: Vec<Option<Lease>>,
    /// Number of disks that are served under an etcd lease.
    count: usize,
}

struct Lease {
    clock: Arc<LeaseClock>,
    /// True if another host owns the disk.
    is_lost: bool,
    /// True if writes to the backing were cancelled.
    is_held_back: bool,
    /// True while the disk is being removed from this shard. Then no operation may wait for the
    /// renewal of the etcd lease.
    is_leaving: bool,
    replies: Vec<Reply>,
    /// Replies to block status queries, by query id.
    statuses: Vec<(u64, Allocation)>,
    changes: Vec<Io>,
}

/// Result of a query for allocated extents.
pub(super) type Allocation = Result<Vec<Extent>, IoError>;

impl Lease {
    fn new(clock: Arc<LeaseClock>) -> Lease {
        Lease {
            clock,
            is_lost: false,
            is_held_back: false,
            is_leaving: false,
            replies: Vec::new(),
            statuses: Vec::new(),
            changes: Vec::new(),
        }
    }

    fn holds_anything(&self) -> bool {
        !self.replies.is_empty() || !self.statuses.is_empty() || !self.changes.is_empty()
    }

    /// Returns the time at which this disk's lease must be checked again; `None` if no check is
    /// needed.
    fn due(&self, now: Instant) -> Option<Instant> {
        match self.is_held_back {
            _ if self.holds_anything() => Some(now + LOOK_EVERY.as_nanos() as u64),
            // The lease may still be renewed, so it is checked again soon.
            true => (!self.is_lost).then(|| now + LOOK_EVERY.as_nanos() as u64),
            false => Some(self.clock.calls_back_at().max(now)),
        }
    }

    /// Returns true if all operations of the disk must fail.
    fn refuses(&self, now: Instant) -> bool {
        self.is_lost || (self.is_leaving && !self.clock.is_valid(now))
    }
}

impl Leases {
    fn get_mut(&mut self, disk: DiskId) -> Option<&mut Lease> {
        self.disks.get_mut(disk.0 as usize)?.as_mut()
    }

    /// Returns the current time of the lease clock; `None` if no disk is served under an etcd
    /// lease.
    #[inline]
    pub(super) fn look(&self) -> Option<Instant> {
        (self.count > 0).then(lease_clock::now)
    }

    /// Returns the reply if it may be sent now, as an error if the disk is lost. Returns `None` if
    /// the reply must wait for the renewal of the etcd lease.
    #[inline]
    pub(super) fn pass(&mut self, look: Option<Instant>, mut reply: Reply) -> Option<Reply> {
        // Hosts outside a cluster have no leases.
        let Some(now) = look else { return Some(reply) };
        let Some(lease) = self.get_mut(reply.disk) else { return Some(reply) };
        if lease.refuses(now) {
            reply.result = reply.result.and(Err(IoError::ShuttingDown));
            return Some(reply);
        }
        if lease.replies.is_empty() && lease.clock.is_valid(now) {
            return Some(reply);
        }
        lease.replies.push(reply);
        None
    }

    /// Does the same as `pass` for the reply to a block status query. These replies may be sent in
    /// any order.
    pub(super) fn pass_status(
        &mut self,
        look: Option<Instant>,
        disk: DiskId,
        id: u64,
        allocation: Allocation,
    ) -> Option<Allocation> {
        let Some(now) = look else { return Some(allocation) };
        let Some(lease) = self.get_mut(disk) else { return Some(allocation) };
        if lease.refuses(now) {
            return Some(Err(IoError::ShuttingDown));
        }
        if lease.clock.is_valid(now) {
            return Some(allocation);
        }
        lease.statuses.push((id, allocation));
        None
    }

    /// Returns the time of the next check of the etcd leases. `now` and the result are times of the
    /// shard's own clock.
    pub(super) fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        let look = self.look()?;
        let due = self.disks.iter().flatten().filter_map(|lease| lease.due(look)).min()?;
        Some(now + due.nanos_since(look))
    }

    /// Records that a disk stays in this shard, because it could not be removed.
    pub(super) fn stay(&mut self, disk: DiskId) {
        if let Some(lease) = self.get_mut(disk) {
            lease.is_leaving = false;
        }
    }

    pub(super) fn forget(&mut self, disk: DiskId) {
        if let Some(lease) = self.disks.get_mut(disk.0 as usize) {
            self.count -= usize::from(lease.take().is_some());
        }
    }
}

impl Shard {
    /// Serves a disk under this etcd lease from now on, and releases the operations that waited for
    /// the previous lease.
    pub(super) fn set_lease(&mut self, id: DiskId, clock: Arc<LeaseClock>) {
        let index = id.0 as usize;
        let leases = &mut self.leases;
        if leases.disks.len() <= index {
            leases.disks.resize_with(index + 1, || None);
        }
        match &mut leases.disks[index] {
            Some(lease) => lease.clock = clock,
            none => {
                *none = Some(Lease::new(clock));
                leases.count += 1;
            }
        }
        self.gate_backing(id);
    }

    /// Makes a disk's backing check the etcd lease just before each write.
    pub(super) fn gate_backing(&mut self, id: DiskId) {
        let backing = self.backings.get_mut(id);
        if let (Some(lease), Some(backing)) = (self.leases.get_mut(id), backing) {
            backing.set_gate(&mut self.ring, lease.clock.clone());
        }
    }

    /// Stops serving a disk because another host owns it.
    pub(super) fn lose_disk(&mut self, now: Instant, id: DiskId) {
        self.engine.revoke(now, id);
        let Some(lease) = self.leases.get_mut(id) else { return };
        (lease.is_lost, lease.is_held_back) = (true, true);
        for io in std::mem::take(&mut lease.changes) {
            self.fail(now, io.id);
        }
        if let Some(backing) = self.backings.get_mut(id) {
            backing.revoke(&mut self.ring, now);
            self.collect(now, id);
        }
    }

    /// Prepares the removal of a disk from this shard. Waiting replies are sent now, because the
    /// removal would lose them.
    pub(super) fn leave_lease(&mut self, now: Instant, id: DiskId) {
        if let Some(lease) = self.leases.get_mut(id) {
            lease.is_leaving = true;
            self.release_held(now);
        }
    }

    /// Answers a block status query with the allocated extents. The answer waits for the renewal of
    /// the etcd lease, because another host may have written to the disk.
    pub(super) fn answer_status(&mut self, disk: DiskId, id: u64, allocation: Allocation) {
        let look = self.leases.look();
        if let Some(allocation) = self.leases.pass_status(look, disk, id, allocation) {
            let allocation = allocation.as_deref().map_err(|error| *error);
            self.clients.handle_status(id, allocation, &self.engine);
        }
    }

    /// Returns true if an I/O may be submitted now. Otherwise the I/O waits for the renewal of the
    /// etcd lease, or fails.
    pub(super) fn may_submit(&mut self, now: Instant, io: &Io) -> bool {
        let is_change = matches!(io.op, IoOp::Write(_) | IoOp::Discard | IoOp::WriteZeroes(_));
        let (Target::Backing(disk), true) = (io.target, is_change) else { return true };
        let Some(lease) = self.leases.get_mut(disk) else { return true };
        let look = lease_clock::now();
        if lease.refuses(look) {
            self.fail(now, io.id);
            return false;
        }
        if lease.changes.is_empty() && lease.clock.is_valid(look) {
            return true;
        }
        lease.changes.push(*io);
        false
    }

    /// Releases operations whose etcd lease was renewed or lost, and cancels writes whose etcd
    /// lease expired too long ago.
    pub(super) fn release_held(&mut self, now: Instant) -> bool {
        let Some(look) = self.leases.look() else { return false };
        let mut progress = false;
        for index in 0..self.leases.disks.len() {
            progress |= self.hold_back(now, look, index);
            let Some(lease) = self.leases.disks[index].as_mut() else { continue };
            let refuses = lease.refuses(look);
            if !lease.holds_anything() || !(refuses || lease.clock.is_valid(look)) {
                continue;
            }
            progress = true;
            let (replies, changes) = (std::mem::take(&mut lease.replies), std::mem::take(&mut lease.changes));
            let statuses = std::mem::take(&mut lease.statuses);
            for mut reply in replies {
                if refuses {
                    reply.result = reply.result.and(Err(IoError::ShuttingDown));
                }
                self.deliver(now, &reply);
            }
            for (id, allocation) in statuses {
                self.answer_status(DiskId(index as u32), id, allocation);
            }
            for io in changes {
                self.submit(now, &io);
            }
        }
        progress
    }

    /// Cancels the backing's writes when the time [`LeaseClock::calls_back_at`] has passed without
    /// a renewal of the etcd lease, and allows writes again after a renewal.
    fn hold_back(&mut self, now: Instant, look: Instant, index: usize) -> bool {
        let Some(lease) = self.leases.disks[index].as_mut().filter(|lease| !lease.is_lost) else {
            return false;
        };
        let holds_back = lease.clock.calls_back_at() <= look;
        if holds_back == lease.is_held_back || !holds_back && !lease.clock.is_valid(look) {
            return false;
        }
        lease.is_held_back = holds_back;
        let disk = DiskId(index as u32);
        let Some(backing) = self.backings.get_mut(disk) else { return true };
        if holds_back {
            backing.suspend(&mut self.ring, now);
        } else {
            backing.resume();
        }
        self.collect(now, disk);
        true
    }
}

#[cfg(test)]
mod tests {
    use hob_engine::outcome::Outcome;
    use hob_engine::units::RequestId;

    use super::*;

    const DISK: DiskId = DiskId(1);

    fn reply(id: u64) -> Reply {
        Reply { id: RequestId(id), disk: DISK, result: Ok(()), outcome: Outcome::BypassStandby }
    }

    fn leases(until: Instant) -> Leases {
        let clock = Arc::new(LeaseClock::new(until, 50));
        Leases { disks: vec![None, Some(Lease::new(clock))], count: 1 }
    }

    #[test]
    fn without_a_cluster_nothing_is_looked_at() {
        let mut leases = Leases::default();
        assert_eq!(leases.look(), None);
        assert_eq!(leases.pass(None, reply(1)), Some(reply(1)));
    }

    #[test]
    fn answers_are_held_from_the_moment_on_and_do_not_overtake_each_other() {
        let mut leases = leases(Instant(100));
        assert_eq!(leases.pass(Some(Instant(99)), reply(1)), Some(reply(1)));
        assert_eq!(leases.pass(Some(Instant(100)), reply(2)), None);
        let other = Reply { disk: DiskId(0), ..reply(3) };
        assert_eq!(leases.pass(Some(Instant(100)), other), Some(other), "a disk without a lease");
        // The lease is still valid after all. The waiting operations are sent in order of arrival.
        leases.get_mut(DISK).unwrap().clock = Arc::new(LeaseClock::new(Instant(200), 50));
        assert_eq!(leases.pass(Some(Instant(101)), reply(4)), None);
        assert_eq!(leases.get_mut(DISK).unwrap().replies, [reply(2), reply(4)]);
        leases.forget(DISK);
        assert_eq!(leases.look(), None);
    }

    #[test]
    fn a_disk_that_could_not_be_removed_waits_for_its_lease_again() {
        let mut leases = leases(Instant(100));
        leases.get_mut(DISK).unwrap().is_leaving = true;
        let refused = leases.pass(Some(Instant(100)), reply(1)).unwrap();
        assert_eq!(refused.result, Err(IoError::ShuttingDown));
        leases.stay(DISK);
        assert_eq!(leases.pass(Some(Instant(100)), reply(2)), None);
        assert_eq!(leases.get_mut(DISK).unwrap().replies, [reply(2)]);
    }

    #[test]
    fn allocation_queries_wait_like_other_replies() {
        let extents = || Ok(vec![Extent { length: 4096, state: 0 }]);
        let mut leases = leases(Instant(100));
        assert_eq!(leases.pass_status(None, DISK, 1, extents()), Some(extents()), "no cluster");
        assert_eq!(leases.pass_status(Some(Instant(99)), DISK, 1, extents()), Some(extents()));
        assert_eq!(leases.pass_status(Some(Instant(100)), DiskId(0), 2, extents()), Some(extents()));
        assert_eq!(leases.pass_status(Some(Instant(100)), DISK, 3, extents()), None);
        let lease = leases.get_mut(DISK).unwrap();
        assert!(lease.holds_anything() && lease.statuses == [(3, extents())]);
        lease.is_lost = true;
        let refused = leases.pass_status(Some(Instant(99)), DISK, 4, extents());
        assert_eq!(refused, Some(Err(IoError::ShuttingDown)));
    }

    #[test]
    fn changes_are_cancelled_some_time_after_the_lease_and_checked_often() {
        let mut leases = leases(Instant(100));
        let lease = leases.get_mut(DISK).unwrap();
        let often = LOOK_EVERY.as_nanos() as u64;
        assert_eq!(lease.due(Instant(7)), Some(Instant(125)));
        assert_eq!(lease.due(Instant(130)), Some(Instant(130)), "at once");
        lease.replies.push(reply(1));
        assert_eq!(lease.due(Instant(110)), Some(Instant(110 + often)));
        lease.replies.clear();
        lease.is_held_back = true;
        assert_eq!(lease.due(Instant(130)), Some(Instant(130 + often)), "the lease may prove to hold");
        lease.is_lost = true;
        assert_eq!(lease.due(Instant(130)), None);
    }

    #[test]
    fn a_lost_disk_answers_with_errors() {
        let mut leases = leases(Instant(100));
        leases.get_mut(DISK).unwrap().is_lost = true;
        let refused = Reply { result: Err(IoError::ShuttingDown), ..reply(1) };
        assert_eq!(leases.pass(Some(Instant(1)), reply(1)), Some(refused));
        let failed = Reply { result: Err(IoError::NoSpace), ..reply(2) };
        assert_eq!(leases.pass(Some(Instant(1)), failed), Some(failed));
    }

    #[test]
    fn a_disk_that_is_taken_away_waits_for_no_lease() {
        let mut leases = leases(Instant(100));
        leases.get_mut(DISK).unwrap().is_leaving = true;
        assert_eq!(leases.pass(Some(Instant(99)), reply(1)), Some(reply(1)));
        let refused = Reply { result: Err(IoError::ShuttingDown), ..reply(2) };
        assert_eq!(leases.pass(Some(Instant(100)), reply(2)), Some(refused));
    }
}
