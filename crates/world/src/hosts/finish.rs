//! Simulates the end of a history of several hosts. No more faults occur. Within a time limit, one
//! host must own the disk, and all work of all hosts must have ended.

use hob_engine::command::Role;
use hob_engine::io::Op;

use super::guest::Doing;
use super::host::{DISK, Who};
use super::plan::MS;
use super::{Event, Simulation, trace};
use crate::content::UNIT_BYTES;
use crate::{Violation, ensure};

/// Maximum time from the last fault until no host has work in progress, nanoseconds.
const REST_NS_MAX: u64 = 300_000 * MS;

/// Number of 512-byte units per read at the end of the history.
const READ_UNITS: u64 = 40;

impl Simulation<'_> {
    pub(super) fn finish(&mut self) -> Result<(), Violation> {
        trace!(self, "faults cease");
        self.ending = true;
        self.network.heal();
        self.queue.retain(|event| !matches!(event, Event::Crash(_) | Event::PowerCut | Event::Part(_)));
        self.backing.soothe();
        let mut calm = self.now;
        for host in &mut self.hosts {
            host.flash.soothe();
            // The pause of the host's process ends now. But events that were delayed until the
            // planned end of the pause stay in the queue until that time.
            calm = calm.max(host.stopped_until);
            host.stopped_until = self.now;
        }
        self.guest.left = self.guest.left.min(4);
        let limit = calm + REST_NS_MAX;
        let mut look = self.now;
        while !self.is_at_peace() {
            ensure!(
                self.now < limit,
                "work is still in progress long after the last fault: {}",
                self.state()
            );
            if self.now >= look {
                look = self.now + self.tidy_ns();
                self.tidy()?;
                self.queue.push(look, Event::Operator);
            }
            if !self.is_at_peace() {
                self.turn()?;
            }
        }
        self.check_rest()
    }

    /// Returns true if one host serves the disk and no work is in progress on any host.
    fn is_at_peace(&self) -> bool {
        let Some(owner) = self.owner() else { return false };
        let at_rest = (0..self.hosts.len()).all(|host| {
            let Some(ram) = &self.hosts[host].ram else { return false };
            let role = ram.engine.role(DISK);
            let as_it_should = if host == owner { role == Some(Role::Here) } else { role.is_none() };
            let is_owner = host != owner || self.owns(host);
            let idle = ram.source.is_none() && ram.acts.is_empty() && ram.writing.is_empty();
            as_it_should && is_owner && idle && ram.requests.is_empty() && ram.destination.awaits().is_none()
        });
        at_rest && self.guest.in_flight == 0 && self.guest.doing == Doing::Runs
    }

    /// Checks that the whole disk reads correctly twice, and that its data is durable.
    fn check_rest(&mut self) -> Result<(), Violation> {
        self.guest.left = 0;
        let owner = self.owner().expect("one host owns the disk");
        let units = u64::from(self.plan.units);
        for _ in 0..2 {
            for first in (0..units).step_by(READ_UNITS as usize) {
                let count = READ_UNITS.min(units - first);
                self.request(owner, Who::Last, Op::Read, first * UNIT_BYTES, count * UNIT_BYTES)?;
            }
            self.rest(owner)?;
        }
        self.request(owner, Who::Last, Op::Flush, 0, 0)?;
        self.rest(owner)?;
        ensure!(
            self.backing.now() == self.backing.durable(),
            "the disk was flushed, but its content is not durable"
        );
        Ok(())
    }

    fn rest(&mut self, owner: usize) -> Result<(), Violation> {
        while self.hosts[owner].ram.as_ref().is_some_and(|ram| !ram.requests.is_empty()) {
            self.turn()?;
        }
        Ok(())
    }
}
