//! Simulates guest requests, destaging, and the delay of replies and writes while a host does not
//! know whether its lease in etcd is valid.

use super::copies::{Copying, PeerOp};
use super::host::{Kind, Op, Phase};
use super::{Blocks, Event, Sabotage, Simulation, trace};
use crate::{Violation, ensure};

/// A simulated backing.
#[derive(Debug, Default)]
pub(super) struct Backing {
    blocks: Blocks,
    /// Number of times that the backing was opened. A fencing backing refuses writes that a host
    /// sent before the last time that any host opened the backing.
    epoch: u64,
}

/// A write in flight to a backing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    /// Generation of the disk when the host sent the write.
    pub(super) generation: u64,
    /// Value of the backing's `epoch` when the host opened the backing through which it sent the
    /// write.
    pub(super) epoch: u64,
    pub(super) block: u32,
    pub(super) value: u64,
}

impl Backing {
    pub(super) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Opens the backing and returns the backing's new `epoch`.
    pub(super) fn open(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch
    }

    fn read(&self, block: u32) -> u64 {
        self.blocks.get(&block).copied().unwrap_or(0)
    }
}

impl Simulation<'_> {
    /// Chooses a random disk. If the host serves this disk, the host's guest sends a random request
    /// to the disk.
    pub(super) fn think(&mut self, host: usize) -> Result<(), Violation> {
        let at = self.now + self.rng.latency(self.plan.think_ns);
        self.queue.push(at, Event::Think { host });
        let disk = self.rng.below(self.plan.disks as u64) as usize;
        let block = self.rng.below(u64::from(self.plan.blocks)) as u32;
        let is_write = self.rng.chance(500);
        let is_stopped = self.hosts[host].paused_until > self.now || self.hosts[host].is_hung;
        let local = &self.hosts[host].local[disk];
        let is_served = matches!(local.phase, Phase::Serving | Phase::Doubted);
        if !self.hosts[host].up || is_stopped || !is_served || local.busy.contains(&block) {
            return Ok(());
        }
        if !is_write {
            return self.begin_op(host, disk, Op { kind: Kind::Read, block });
        }
        let to_flash = self.hosts[host].kept[disk].writes_back && !local.draining;
        let value = self.next();
        self.checkers[disk].begin_write(block, value);
        let kind = if to_flash { Kind::WriteBack(value) } else { Kind::Write(value) };
        self.begin_op(host, disk, Op { kind, block })
    }

    fn begin_op(&mut self, host: usize, disk: usize, op: Op) -> Result<(), Violation> {
        let number = self.next();
        let kept = &self.hosts[host].kept[disk];
        let cached = kept.cache.get(&op.block).copied();
        let local = &mut self.hosts[host].local[disk];
        local.busy.insert(op.block);
        local.ops.insert(number, op);
        match (op.kind, cached) {
            (Kind::Read, Some((value, _))) => self.flash(host, disk, number, value),
            (Kind::Read, None) => {
                if self.hosts[host].no_backing_until > self.now {
                    return self.refuse(host, disk, number);
                }
                let at = self.now + self.rng.latency(self.plan.backing_ns);
                let (life, result) = (self.hosts[host].life, Some(self.backings[disk].read(op.block)));
                self.queue.push(at, Event::Done { host, life, disk, op: number, result });
            }
            (Kind::WriteBack(value), _) => {
                if !self.double(host, disk, number, PeerOp::Dirty(op.block, value)) {
                    self.hosts[host].local[disk].copy.alone.insert(number);
                }
                self.flash(host, disk, number, value);
            }
            (Kind::Double(_), _) => {}
            (Kind::Write(_) | Kind::Destage(_), _) => return self.change(host, disk, number),
        }
        Ok(())
    }

    fn flash(&mut self, host: usize, disk: usize, op: u64, value: u64) {
        let at = self.now + self.rng.latency(self.plan.flash_ns);
        let life = self.hosts[host].life;
        self.queue.push(at, Event::Done { host, life, disk, op, result: Some(value) });
    }

    /// Sends a write to the backing if the host's etcd lease is valid.
    fn change(&mut self, host: usize, disk: usize, number: u64) -> Result<(), Violation> {
        if !self.may_acknowledge(host, disk) && !self.is(Sabotage::UncheckedChanges) {
            self.report.changes_held += 1;
            self.hosts[host].local[disk].held_changes.push(number);
            return Ok(());
        }
        let local = &self.hosts[host].local[disk];
        let Some(Op { kind: Kind::Write(value) | Kind::Destage(value), block }) =
            local.ops.get(&number).copied()
        else {
            return Ok(());
        };
        let (epoch, generation) = (local.epoch, local.generation());
        if self.hosts[host].no_backing_until > self.now {
            return self.refuse(host, disk, number);
        }
        let change = Change { generation, epoch, block, value };
        if self.plan.queued > 0 && self.rng.chance(self.plan.queued) {
            // A thread makes a system call that would block, so this write starts later.
            let at = self.now + self.rng.below(self.plan.lease_ns);
            let life = self.hosts[host].life;
            self.queue.push(at, Event::Begin { host, life, disk, change, op: number });
            return Ok(());
        }
        self.send_change(host, disk, change, number);
        Ok(())
    }

    /// Sends a delayed write to the backing, if the host's etcd lease is still valid.
    pub(super) fn begin_change(
        &mut self,
        host: usize,
        disk: usize,
        change: Change,
        op: u64,
    ) -> Result<(), Violation> {
        let local = &self.hosts[host].local[disk];
        let is_open = self.may_acknowledge(host, disk) && local.generation() == change.generation;
        if is_open || self.is(Sabotage::UncheckedQueue) {
            self.send_change(host, disk, change, op);
            return Ok(());
        }
        self.report.changes_stopped += 1;
        // If the host has lost the disk meanwhile, the request does not exist any more.
        let local = &mut self.hosts[host].local[disk];
        if local.ops.contains_key(&op) {
            local.held_changes.push(op);
        }
        self.release(host, disk)
    }

    fn send_change(&mut self, host: usize, disk: usize, change: Change, op: u64) {
        let (after, way) = (self.hesitate(), self.way_to_backing());
        let life = self.hosts[host].life;
        self.queue.push(self.now + after + way, Event::Land { host, life, disk, change, op });
    }

    /// Returns a random time that the next write needs to reach the backing, nanoseconds.
    pub(super) fn way_to_backing(&mut self) -> u64 {
        let mut way = self.rng.latency(self.plan.backing_ns);
        if self.rng.chance(self.plan.very_late) {
            // A fencing backing may get writes arbitrarily late. Writes to other backings arrive
            // within the settling time.
            way += match self.plan.fences {
                true => self.rng.below(4 * self.plan.lease_ns),
                false => self.plan.settle_ns,
            };
        }
        if !self.plan.fences {
            way = way.min(self.plan.settle_ns * 9 / 10);
        }
        way
    }

    /// Returns a random delay, nanoseconds, between the host's check of its lease and the reply or
    /// write for which the host made the check.
    pub(super) fn hesitate(&mut self) -> u64 {
        let is_slow = self.rng.chance(self.plan.hesitates);
        if is_slow { self.rng.below(self.plan.hesitation_ns_max) } else { 0 }
    }

    pub(super) fn land(
        &mut self,
        host: usize,
        life: u32,
        disk: usize,
        change: Change,
        op: u64,
    ) -> Result<(), Violation> {
        let Change { generation, epoch, block, value } = change;
        let is_fenced = self.plan.fences && epoch < self.backings[disk].epoch;
        if is_fenced {
            self.report.fenced += 1;
        } else {
            self.checkers[disk].change(host, generation)?;
            self.backings[disk].blocks.insert(block, value);
        }
        trace!(self, "disk {disk} block {block} = {value} of host {host}, fenced {is_fenced}");
        let at = self.now + self.rng.latency(self.plan.backing_ns);
        let result = (!is_fenced).then_some(value);
        self.queue.push(at, Event::Done { host, life, disk, op, result });
        Ok(())
    }

    /// Delivers or drops the writes to backings that a dead process had in flight.
    pub(super) fn end_io(&mut self, host: usize) -> Result<(), Violation> {
        let mut kept = Vec::new();
        while let Some((at, event)) = self.queue.pop() {
            match event {
                Event::Land { host: of, life, disk, change, op } if of == host => {
                    if self.rng.chance(500) {
                        self.land(host, life, disk, change, op)?;
                    }
                }
                other => kept.push((at, other)),
            }
        }
        kept.into_iter().for_each(|(at, event)| self.queue.push(at, event));
        Ok(())
    }

    /// Handles the completion of a request's I/O.
    pub(super) fn done(
        &mut self,
        host: usize,
        disk: usize,
        number: u64,
        result: Option<u64>,
    ) -> Result<(), Violation> {
        let fills = self.rng.chance(500);
        if self.brought(host, disk, number, result) {
            return Ok(());
        }
        let Some(op) = self.hosts[host].local[disk].ops.get(&number).copied() else { return Ok(()) };
        let Some(value) = result else { return self.refuse(host, disk, number) };
        let kept = &mut self.hosts[host].kept[disk];
        match op.kind {
            Kind::Read if fills => drop(kept.cache.entry(op.block).or_insert((value, false))),
            Kind::Read => {}
            Kind::WriteBack(_) => drop(kept.cache.insert(op.block, (value, true))),
            Kind::Write(_) => drop(kept.cache.insert(op.block, (value, false))),
            Kind::Destage(_) => drop(kept.cache.insert(op.block, (value, false))),
            Kind::Double(_) => {}
        }
        let copy = &self.hosts[host].local[disk].copy;
        let is_clean_now = matches!(op.kind, Kind::Write(_) | Kind::Destage(_));
        let is_doubled = copy.state == Copying::Broken || copy.doubled.contains_key(&op.block);
        if is_clean_now && is_doubled {
            self.double(host, disk, number, PeerOp::Clean(op.block));
        }
        let copy = &mut self.hosts[host].local[disk].copy;
        if copy.pending.contains(&number) {
            copy.half_done.insert(number, value);
            return Ok(());
        }
        self.both_done(host, disk, number, value)
    }

    /// Handles a request that is complete at this host and, if the request was also sent to the
    /// replica, at the lending host.
    pub(super) fn both_done(
        &mut self,
        host: usize,
        disk: usize,
        number: u64,
        value: u64,
    ) -> Result<(), Violation> {
        match self.hosts[host].local[disk].ops.get(&number).map(|op| op.kind) {
            Some(Kind::Destage(_)) => {
                self.finish(host, disk, number);
                Ok(())
            }
            Some(_) => self.reply(host, disk, number, value),
            None => Ok(()),
        }
    }

    /// Sends a reply if the lease is valid. Otherwise the reply waits until the lease is confirmed.
    fn reply(&mut self, host: usize, disk: usize, number: u64, value: u64) -> Result<(), Violation> {
        if !self.may_acknowledge(host, disk) && !self.is(Sabotage::UncheckedAnswers) {
            self.report.answers_held += 1;
            self.hosts[host].local[disk].held_answers.push((number, value));
            return Ok(());
        }
        if self.options.sabotage.is_none() {
            for other in (0..self.plan.hosts).filter(|other| *other != host) {
                ensure!(
                    !self.may_acknowledge(other, disk),
                    "hosts {host} and {other} may both acknowledge requests"
                );
            }
        }
        let life = self.hosts[host].life;
        let generation = self.hosts[host].local[disk].generation();
        let Some(op) = self.hosts[host].local[disk].ops.get(&number).copied() else { return Ok(()) };
        let at = self.now + self.hesitate();
        self.queue.push(at, Event::Answer { host, life, disk, generation, number, op, value });
        Ok(())
    }

    /// Handles the arrival of a reply at the guest.
    pub(super) fn answer(
        &mut self,
        host: usize,
        disk: usize,
        generation: u64,
        number: u64,
        op: Op,
        value: u64,
    ) -> Result<(), Violation> {
        trace!(self, "host {host} disk {disk} generation {generation} answers {op:?}: {value}");
        if !self.hosts[host].local[disk].ops.contains_key(&number) {
            // The host has closed the disk since, and the guest has received an error.
            return self.checkers[disk].acknowledge(host, generation);
        }
        self.report.acknowledged += 1;
        match op.kind {
            Kind::Write(value) | Kind::WriteBack(value) => {
                self.checkers[disk].end_write(host, generation, op.block, value)?
            }
            _ => self.checkers[disk].end_read(host, generation, op.block, value)?,
        }
        self.finish(host, disk, number);
        Ok(())
    }

    fn refuse(&mut self, host: usize, disk: usize, number: u64) -> Result<(), Violation> {
        self.report.refused += 1;
        self.finish(host, disk, number);
        Ok(())
    }

    pub(super) fn finish(&mut self, host: usize, disk: usize, number: u64) {
        let local = &mut self.hosts[host].local[disk];
        local.copy.alone.remove(&number);
        if let Some(op) = local.ops.remove(&number) {
            local.busy.remove(&op.block);
        }
    }

    /// Sends the replies and writes that waited for the confirmation of the host's etcd lease.
    pub(super) fn release(&mut self, host: usize, disk: usize) -> Result<(), Violation> {
        if !self.may_acknowledge(host, disk) {
            return Ok(());
        }
        let local = &mut self.hosts[host].local[disk];
        let answers = std::mem::take(&mut local.held_answers);
        let changes = std::mem::take(&mut local.held_changes);
        self.report.released += (answers.len() + changes.len()) as u64;
        for (number, value) in answers {
            self.reply(host, disk, number, value)?;
        }
        for number in changes {
            self.change(host, disk, number)?;
        }
        Ok(())
    }

    /// Starts to destage one dirty block: always if the cache is draining, otherwise sometimes.
    pub(super) fn begin_destaging(&mut self, host: usize, disk: usize) -> Result<(), Violation> {
        let is_urgent = self.hosts[host].local[disk].draining;
        if !is_urgent && !self.rng.chance(300) {
            return Ok(());
        }
        let busy = &self.hosts[host].local[disk].busy;
        let kept = &self.hosts[host].kept[disk];
        let next = kept.cache.iter().find(|(block, (_, dirty))| *dirty && !busy.contains(*block));
        let Some((&block, &(value, _))) = next else { return Ok(()) };
        self.begin_op(host, disk, Op { kind: Kind::Destage(value), block })
    }
}
