//! What waits at the shard's boundary while it is not known whether this host may still serve a disk (docs/decisions/0019).
//!
//! A disk of a cluster is served under a lease. Once that has run out by this host's clock, nothing of the disk is answered and no change is
//! handed to its backing; both are kept, in order. The engine sees a slow backing and slow guests. They go on their way when the lease proves
//! to hold, or the disk was taken again under another one; and are refused when it is another host's. Changes that a backing was handed in time
//! and has not answered some time later are called back, before another host may have the disk.

use std::sync::Arc;
use std::time::Duration;

use hob_engine::io::{Io, IoError, IoOp, Reply, Target};
use hob_engine::units::{DiskId, Instant};
use hob_nbd::Extent;

use super::Shard;
use crate::daemon::cluster::{self, LeaseClock};

/// While something is held, the clock is looked at that often.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Disks of a cluster, by id.
#[derive(Default)]
pub(super) struct Leases {
    disks: Vec<Option<Lease>>,
    /// How many have one.
    count: usize,
}

struct Lease {
    clock: Arc<LeaseClock>,
    /// The disk is another host's.
    is_lost: bool,
    /// Changes were called back from its backing.
    is_held_back: bool,
    /// It is being taken from this shard: nothing can be waited for.
    is_leaving: bool,
    replies: Vec<Reply>,
    /// Answers to questions about ranges, by the question.
    statuses: Vec<(u64, Allocation)>,
    changes: Vec<Io>,
}

/// What is allocated in a range.
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

    /// When something is to be done that nothing else tells of.
    fn due(&self, now: Instant) -> Option<Instant> {
        match self.is_held_back {
            _ if self.holds_anything() => Some(now + LOOK_EVERY.as_nanos() as u64),
            // It may prove to hold.
            true => (!self.is_lost).then(|| now + LOOK_EVERY.as_nanos() as u64),
            false => Some(self.clock.calls_back_at().max(now)),
        }
    }

    /// Is nothing done for the disk any more?
    fn refuses(&self, now: Instant) -> bool {
        self.is_lost || (self.is_leaving && !self.clock.is_valid(now))
    }
}

impl Leases {
    fn get_mut(&mut self, disk: DiskId) -> Option<&mut Lease> {
        self.disks.get_mut(disk.0 as usize)?.as_mut()
    }

    /// The time, if any disk has a lease.
    #[inline]
    pub(super) fn look(&self) -> Option<Instant> {
        (self.count > 0).then(cluster::now)
    }

    /// A reply that may go out now, refused if the disk is lost; `None` if it is held.
    #[inline]
    pub(super) fn pass(&mut self, look: Option<Instant>, mut reply: Reply) -> Option<Reply> {
        // Without a cluster that is all there is to it.
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

    /// The same of an answer to a question about a range. These may overtake each other.
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

    /// `now` is the shard's own time, and so is what is returned.
    pub(super) fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        let look = self.look()?;
        let due = self.disks.iter().flatten().filter_map(|lease| lease.due(look)).min()?;
        Some(now + due.nanos_since(look))
    }

    /// A disk is gone, and nothing is in flight for it.
    pub(super) fn forget(&mut self, disk: DiskId) {
        if let Some(lease) = self.disks.get_mut(disk.0 as usize) {
            self.count -= usize::from(lease.take().is_some());
        }
    }
}

impl Shard {
    /// A disk is served under this lease from now on; what was held goes on.
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

    /// Lets a disk's backing look at the lease just before it makes a change.
    pub(super) fn gate_backing(&mut self, id: DiskId) {
        let backing = self.backings.get_mut(id.0 as usize).and_then(Option::as_mut);
        if let (Some(lease), Some(backing)) = (self.leases.get_mut(id), backing) {
            backing.set_gate(&mut self.ring, lease.clock.clone());
        }
    }

    /// A disk is another host's: nothing of it is served any more.
    pub(super) fn lose_disk(&mut self, now: Instant, id: DiskId) {
        self.engine.revoke(now, id);
        let Some(lease) = self.leases.get_mut(id) else { return };
        (lease.is_lost, lease.is_held_back) = (true, true);
        for io in std::mem::take(&mut lease.changes) {
            self.fail(now, io.id);
        }
        if let Some(backing) = self.backings[id.0 as usize].as_mut() {
            backing.revoke(&mut self.ring, now);
            self.collect(now, id);
        }
    }

    /// A disk is about to be taken from this shard. What is held is answered now: nobody would know of it any more.
    pub(super) fn leave_lease(&mut self, now: Instant, id: DiskId) {
        if let Some(lease) = self.leases.get_mut(id) {
            lease.is_leaving = true;
            self.release_held(now);
        }
    }

    /// What is allocated in a range is known. Another host may have the disk, and have written there.
    pub(super) fn answer_status(&mut self, disk: DiskId, id: u64, allocation: Allocation) {
        let look = self.leases.look();
        if let Some(allocation) = self.leases.pass_status(look, disk, id, allocation) {
            let allocation = allocation.as_deref().map_err(|error| *error);
            self.clients.handle_status(id, allocation, &self.engine);
        }
    }

    /// May this go to its target now? If not, it is kept, or refused.
    pub(super) fn may_submit(&mut self, now: Instant, io: &Io) -> bool {
        let is_change = matches!(io.op, IoOp::Write(_) | IoOp::Discard | IoOp::WriteZeroes(_));
        let (Target::Backing(disk), true) = (io.target, is_change) else { return true };
        let Some(lease) = self.leases.get_mut(disk) else { return true };
        let look = cluster::now();
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

    /// What was held goes on, where that is decided, and changes are called back, where it is time.
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

    /// Calls changes of a disk back from its backing when its lease has not held for some time, and lets them go on when it holds.
    fn hold_back(&mut self, now: Instant, look: Instant, index: usize) -> bool {
        let Some(lease) = self.leases.disks[index].as_mut().filter(|lease| !lease.is_lost) else {
            return false;
        };
        let holds_back = lease.clock.calls_back_at() <= look;
        if holds_back == lease.is_held_back || !holds_back && !lease.clock.is_valid(look) {
            return false;
        }
        lease.is_held_back = holds_back;
        let Some(backing) = self.backings[index].as_mut() else { return true };
        if holds_back {
            backing.suspend(&mut self.ring, now);
        } else {
            backing.resume();
        }
        self.collect(now, DiskId(index as u32));
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
        // It proves to hold; what came first goes first.
        leases.get_mut(DISK).unwrap().clock = Arc::new(LeaseClock::new(Instant(200), 50));
        assert_eq!(leases.pass(Some(Instant(101)), reply(4)), None);
        assert_eq!(leases.get_mut(DISK).unwrap().replies, [reply(2), reply(4)]);
        leases.forget(DISK);
        assert_eq!(leases.look(), None);
    }

    #[test]
    fn what_is_allocated_is_held_as_answers_are() {
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
    fn changes_are_called_back_some_time_after_the_lease_and_what_is_held_is_looked_at_often() {
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
    fn what_a_lost_disk_answers_is_an_error() {
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
