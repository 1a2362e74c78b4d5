//! Simulates failovers: the host that stores a disk's replica takes the disk over from a failed
//! owner and writes the replica's dirty data to the backing (docs/decisions/0023).

use hob_engine::cluster::{Found, LeaseId, OwnershipRecord};

use super::data::{Backing, Change};
use super::host::{Phase, Purpose};
use super::store::Request;
use super::{Event, Sabotage, Simulation, trace};
use crate::Violation;

/// Phase of a failover from a replica.
#[derive(Clone, Debug)]
pub(super) enum Stage {
    /// The host is about to write itself into the ownership record as the owner.
    Begins,
    /// The host writes the dirty data of its replica to the backing. The list has the blocks that
    /// the host has not sent yet, with their values.
    Brings(Vec<(u32, u64)>),
    /// The backing has all dirty data of the replica. The host is about to update the ownership
    /// record.
    Ends,
}

impl Simulation<'_> {
    /// Starts a failover after the host has locked the disk because of its replica.
    pub(super) fn begin_to_adopt(&mut self, host: usize, disk: usize, title: Found<OwnershipRecord>) {
        trace!(self, "host {host} adopts disk {disk}: {title:?}");
        let Some(copy) = title.value.copy.clone() else { return };
        let term = self.hosts[host].term;
        let lent = self.hosts[host].lent.values_mut().find(|lent| lent.loan.to_string() == copy.loan);
        if let Some(lent) = lent {
            lent.is_ended = true;
        }
        let local = &mut self.hosts[host].local[disk];
        (local.phase, local.term, local.title) = (Phase::Adopting, term, Some(title));
        local.stage = Stage::Begins;
        local.epoch = Backing::open(&mut self.backings[disk]);
    }

    /// Returns true if the host has the replica that the ownership record names. A host that
    /// replaced a destroyed lending host has no replica, but the record may still name one.
    fn has_loan(&self, host: usize, title: &Found<OwnershipRecord>) -> bool {
        let loan = title.value.copy.as_ref().map(|copy| copy.loan.as_str());
        self.hosts[host].lent.values().any(|lent| Some(lent.loan.to_string().as_str()) == loan)
    }

    /// Continues with the next phase of the failover.
    pub(super) fn go_on_adopting(&mut self, host: usize, disk: usize) -> Result<(), Violation> {
        let Some(term) = self.hosts[host].local[disk].term.filter(|it| it.is_valid(self.clock(host))) else {
            return Ok(());
        };
        let me = self.hosts[host].me.clone();
        let writes_back = self.hosts[host].kept[disk].writes_back;
        let local = &self.hosts[host].local[disk];
        let Some(title) = local.title.clone() else { return Ok(()) };
        match local.stage.clone() {
            // Writes of an earlier failover attempt must reach the backing first.
            Stage::Begins if !local.landing.is_empty() => {}
            // The failover stops, because this host replaced a destroyed host and has no replica,
            // or because it cannot read the replica. Then the former owner may acquire the disk
            // again.
            Stage::Begins
                if title.value.adopts.is_none() && (!self.has_loan(host, &title) || self.rng.chance(50)) =>
            {
                let local = &self.hosts[host].local[disk];
                let txn = local.seat.leave_alone(term.lease, &title);
                self.ask_about(host, disk, Purpose::LeaveAlone, Request::Txn(txn));
            }
            Stage::Begins => match local.seat.begin_adopting(&me, term.lease, &title) {
                Some((txn, title)) => {
                    self.ask_about(host, disk, Purpose::BeginAdopting(title), Request::Txn(txn));
                }
                None => self.adopting_begun(host, disk, title),
            },
            Stage::Brings(todo) if !todo.is_empty() => self.bring(host, disk, todo),
            Stage::Brings(_) if !local.landing.is_empty() && !self.is(Sabotage::EndsEarly) => {}
            Stage::Brings(_) => {
                self.hosts[host].local[disk].stage = Stage::Ends;
                return self.go_on_adopting(host, disk);
            }
            Stage::Ends => {
                let (txn, title) = local.seat.end_adopting(term.lease, &title, writes_back);
                self.ask_about(host, disk, Purpose::EndAdopting(title), Request::Txn(txn));
            }
        }
        Ok(())
    }

    /// Records that the failover has begun: from now on only the replica's dirty data is valid, and
    /// the dirty data in the former owner's flash is not.
    pub(super) fn adopting_begun(&mut self, host: usize, disk: usize, title: Found<OwnershipRecord>) {
        let loan = title.value.copy.as_ref().map(|copy| copy.loan.clone()).unwrap_or_default();
        let lent = self.hosts[host].lent.values().find(|lent| lent.loan.to_string() == loan);
        assert!(lent.is_some(), "a failover begins only with a replica");
        let todo = lent.map(|lent| lent.dirty.iter().map(|(block, value)| (*block, *value)).collect());
        let local = &mut self.hosts[host].local[disk];
        local.title = Some(title);
        local.stage = Stage::Brings(todo.unwrap_or_default());
    }

    fn bring(&mut self, host: usize, disk: usize, todo: Vec<(u32, u64)>) {
        if self.hosts[host].no_backing_until > self.now {
            return;
        }
        let (life, epoch) = (self.hosts[host].life, self.hosts[host].local[disk].epoch);
        let generation = self.hosts[host].local[disk].generation();
        for (block, value) in todo {
            let op = self.next();
            let at = self.now + self.hesitate() + self.way_to_backing();
            self.hosts[host].local[disk].landing.insert(op);
            let change = Change { generation, epoch, block, value };
            self.queue.push(at, Event::Land { host, life, disk, change, op });
        }
        self.hosts[host].local[disk].stage = Stage::Brings(Vec::new());
    }

    /// Handles the completion of a write to the backing. Returns false if the write is not part of
    /// a failover.
    pub(super) fn brought(&mut self, host: usize, disk: usize, op: u64, result: Option<u64>) -> bool {
        let local = &mut self.hosts[host].local[disk];
        let is_one = local.landing.remove(&op);
        if is_one && result.is_none() && local.phase == Phase::Adopting {
            // The backing refused the write, because another host has opened the backing since.
            self.stop_adopting(host, disk);
        }
        is_one
    }

    /// Stops the failover at this host. The next read of the ownership record shows which phases of
    /// the failover etcd has recorded.
    pub(super) fn stop_adopting(&mut self, host: usize, disk: usize) {
        let local = &mut self.hosts[host].local[disk];
        (local.phase, local.title, local.term) = (Phase::Closed, None, None);
    }

    /// Handles etcd's reply about a disk in failover: the revision of the new ownership record, or
    /// `None` if etcd refused the change or the result is unknown.
    pub(super) fn adopting_answered(
        &mut self,
        host: usize,
        disk: usize,
        title: OwnershipRecord,
        revision: Option<u64>,
    ) -> Result<(), Violation> {
        let Some(revision) = revision else {
            self.stop_adopting(host, disk);
            return Ok(());
        };
        let title = Found { value: title, revision, lease: LeaseId(0) };
        if title.value.adopts.is_some() {
            self.adopting_begun(host, disk, title);
            return self.go_on_adopting(host, disk);
        }
        trace!(self, "host {host} has adopted disk {disk}");
        self.report.adopted += 1;
        let local = &mut self.hosts[host].local[disk];
        (local.phase, local.title) = (Phase::Opening, Some(title));
        let at = self.now + self.rng.latency(self.plan.backing_ns);
        let life = self.hosts[host].life;
        self.queue.push(at, Event::Opened { host, life, disk });
        Ok(())
    }
}
