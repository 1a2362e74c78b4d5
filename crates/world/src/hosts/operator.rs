//! The simulated operator. The operator starts, speeds up and cancels migrations, and moves the
//! guest. If a disk does not arrive, the operator orders its destination to stop waiting.

use hob_engine::command::Role;
use hob_engine::migration::{Order, Phase, Record, Session};

use super::guest::Doing;
use super::host::{Carry, DISK, MoveOrder};
use super::plan::MS;
use super::{Event, Simulation, trace};
use crate::Violation;

impl Simulation<'_> {
    /// Returns true if no host has a migration attempt in progress.
    pub(super) fn is_calm(&self) -> bool {
        self.hosts.iter().all(|host| host.source().is_none())
    }

    /// Performs a random action of the operator, or none.
    pub(super) fn operate(&mut self) -> Result<(), Violation> {
        if self.ending {
            return Ok(());
        }
        let after = self.rng.latency(self.plan.operator_ns);
        self.queue.push(self.now + after, Event::Operator);
        let source = (0..self.hosts.len()).find(|host| self.hosts[*host].source().is_some());
        match source {
            Some(host) => self.meddle(host),
            None if self.migrations > 0 && self.rng.chance(700) => self.begin_attempt(None),
            None => Ok(()),
        }
    }

    /// Orders the owner to migrate the disk to this host, or to a random host.
    pub(super) fn begin_attempt(&mut self, to: Option<usize>) -> Result<(), Violation> {
        let Some(host) = self.owner().filter(|host| self.is_at_rest(*host)) else { return Ok(()) };
        let others = self.hosts.len() as u64 - 1;
        let other = (host + 1 + self.rng.below(others) as usize) % self.hosts.len();
        let carry = self.rng.pick(&[Carry::Copy, Carry::Copy, Carry::Remote, Carry::HeatMap, Carry::Drop]);
        let order = MoveOrder { to: to.unwrap_or(other), carry, on_demand: self.rng.chance(800) };
        let (generation, attempt) = match self.hosts[host].record {
            Some(Record::Owner { generation, attempts }) => (generation, attempts + 1),
            Some(Record::Leaving(Session { generation, attempt })) => (generation, attempt + 1),
            _ => return Ok(()),
        };
        self.migrations = self.migrations.saturating_sub(1);
        self.report.attempts += 1;
        self.hosts[host].order = Some(order);
        self.start_source(host, Session { generation, attempt });
        self.drain(host)
    }

    /// Returns true if a host owns and serves the disk and has no work in progress for it.
    fn is_at_rest(&self, host: usize) -> bool {
        let Some(ram) = &self.hosts[host].ram else { return false };
        let idle = ram.source.is_none() && ram.acts.is_empty() && ram.writing.is_empty();
        idle && self.owns(host) && ram.destination.is_owner() && ram.engine.role(DISK) == Some(Role::Here)
    }

    /// Performs a random action during a migration attempt.
    fn meddle(&mut self, host: usize) -> Result<(), Violation> {
        let to = self.hosts[host].order.expect("the order has a destination").to;
        let now = self.now;
        let phase = self.hosts[host].source().expect("an attempt is in progress").phase();
        let runs_here = self.guest.doing == Doing::Runs && self.guest.host == host;
        match self.rng.below(10) {
            0..4 if runs_here && phase == Phase::Copying && self.is_usable(to) => self.move_guest(to),
            4 | 5 => {
                let order = if self.rng.chance(700) { Order::Finish } else { Order::Cancel };
                trace!(self, "the operator orders {order:?}");
                let source = self.hosts[host].ram.as_mut().and_then(|ram| ram.source.as_mut());
                source.expect("an attempt is in progress").handle_order(now, order);
                self.drain(host)
            }
            6 if self.rng.chance(100) => self.give_up(to),
            _ => Ok(()),
        }
    }

    /// Makes the destination stop waiting for a disk that has not arrived.
    pub(super) fn give_up(&mut self, host: usize) -> Result<(), Violation> {
        trace!(self, "host {host} is told that the disk does not come");
        if let Some(ram) = &mut self.hosts[host].ram
            && ram.destination.awaits().is_some()
        {
            ram.destination.handle_give_up();
            // The action in progress may wait for a read that no host answers.
            self.hang_up(host)?;
        }
        self.drain(host)
    }

    /// Starts hosts that are down, and orders hosts to end migration attempts that do not end by
    /// themselves. Makes destinations stop waiting for disks that do not arrive.
    pub(super) fn tidy(&mut self) -> Result<(), Violation> {
        let now = self.now;
        for host in 0..self.hosts.len() {
            if self.hosts[host].ram.is_none() {
                self.start(host)?;
            }
            let Some(phase) = self.hosts[host].source().map(|source| source.phase()) else { continue };
            if matches!(phase, Phase::Copying | Phase::Announcing) && self.rng.chance(100) {
                let is_there =
                    self.guest.host == self.hosts[host].order.expect("the order has a destination").to;
                let order = if is_there || self.rng.chance(500) { Order::Finish } else { Order::Cancel };
                let source = self.hosts[host].ram.as_mut().and_then(|ram| ram.source.as_mut());
                source.expect("an attempt is in progress").handle_order(now, order);
                self.drain(host)?;
            }
        }
        let Some(owner) = self.owner().filter(|_| self.is_calm()) else { return Ok(()) };
        for host in 0..self.hosts.len() {
            if self.hosts[host].awaits().is_none() || self.is_entitled(host) {
                continue;
            }
            let waits = self.hosts[host].ram.as_ref().is_some_and(|ram| !ram.requests.is_empty());
            if waits && self.guest.host == host && self.owns(owner) {
                return self.begin_attempt(Some(host));
            }
            self.give_up(host)?;
        }
        Ok(())
    }

    /// Returns the time until the operator cleans up again, nanoseconds.
    pub(super) fn tidy_ns(&self) -> u64 {
        500 * MS
    }
}
