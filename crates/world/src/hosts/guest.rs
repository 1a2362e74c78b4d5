//! The simulated guest, which uses the disk on one host at a time, and rogue clients.

use hob_engine::command::Role;
use hob_engine::io::{Durability, Op, Zeroing};

use super::host::Who;
use super::plan::{MS, Plan};
use super::{Event, Simulation, trace};
use crate::Violation;
use crate::content::UNIT_BYTES;
use crate::rng::SimRng;

/// State of the simulated guest: running, or one of the steps of moving to another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    Runs,
    /// The guest waits for its requests and then moves to this host.
    Stops(usize),
    /// The guest flushes the disk, as QEMU does before it hands a disk over, and then moves to this
    /// host.
    Flushes(usize),
    /// The guest is moving to another host.
    Moves,
}

/// The simulated guest.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) host: usize,
    pub(super) doing: Doing,
    pub(super) in_flight: u32,
    /// Number of requests that the guest may still make.
    pub(super) left: u32,
    depth: u32,
    /// True if the guest's next request is scheduled.
    pub(super) is_due: bool,
    /// Host from which the guest moved, while the guest may still move back. During this time, the
    /// guest does not write.
    came_from: Option<usize>,
    /// Number of consecutive turns of the guest in which it could not use the disk on its host.
    stuck: u32,
    /// First 512-byte units of the ranges to which most guest requests go.
    hot: Vec<u64>,
    /// Share of the guest's requests that change data, per mille.
    change: u32,
    align: u64,
    units_max: u64,
}

impl Guest {
    pub(super) fn draw(plan: &Plan, requests: u32, rng: &mut SimRng) -> Guest {
        let units = u64::from(plan.units);
        Guest {
            host: 0,
            doing: Doing::Runs,
            in_flight: 0,
            left: requests,
            depth: rng.pick(&[1, 4, 16]),
            is_due: true,
            came_from: None,
            stuck: 0,
            hot: (0..rng.between(1, 5)).map(|_| rng.below(units)).collect(),
            change: rng.pick(&[50, 300, 300, 700]),
            align: rng.pick(&[1, 8, 8]),
            units_max: rng.pick(&[8, 16, 64]),
        }
    }

    /// Returns the next guest request: operation, offset in bytes, length in bytes.
    fn ask(&self, units: u64, rng: &mut SimRng) -> (Op, u64, u64) {
        let op = self.op(rng);
        if op == Op::Flush {
            return (op, 0, 0);
        }
        let near = rng.pick(&self.hot) + rng.below(24);
        let start = if rng.chance(200) { rng.below(units) } else { near };
        let start = start.min(units - 1) / self.align * self.align;
        let count = rng.between(1, self.units_max).next_multiple_of(self.align).min(units - start);
        (op, start * UNIT_BYTES, count * UNIT_BYTES)
    }

    fn op(&self, rng: &mut SimRng) -> Op {
        let durability = if rng.chance(200) { Durability::Durable } else { Durability::Volatile };
        if rng.chance(40) {
            return Op::Flush;
        }
        if self.came_from.is_some() || !rng.chance(self.change) {
            return if rng.chance(50) { Op::Prefetch } else { Op::Read };
        }
        let zeroing =
            [Zeroing::MayUnmap, Zeroing::KeepAllocated, Zeroing::FastMayUnmap, Zeroing::FastKeepAllocated];
        match rng.below(20) {
            0 => Op::Discard(durability),
            1 => Op::WriteZeroes(durability, rng.pick(&zeroing)),
            _ => Op::Write(durability),
        }
    }
}

impl Simulation<'_> {
    /// Returns true if a guest can use the disk on this host.
    pub(super) fn is_usable(&self, host: usize) -> bool {
        let ram = self.hosts[host].ram.as_ref();
        !matches!(self.hosts[host].role(), None | Some(Role::Away)) && ram.is_some_and(|ram| !ram.hangs_up)
    }

    pub(super) fn guest_turn(&mut self) -> Result<(), Violation> {
        self.guest.is_due = false;
        let host = self.guest.host;
        if self.guest.doing != Doing::Runs || self.guest.left == 0 {
            return Ok(());
        }
        if !self.is_usable(host) {
            self.guest.stuck += 1;
            if self.guest.stuck > 8 && self.guest.in_flight == 0 {
                // The operator restarts the guest on the host that has the disk.
                self.guest.host = self.owner().unwrap_or(host);
                self.guest.came_from = None;
            }
            self.schedule_guest(300 * MS);
            return Ok(());
        }
        self.guest.stuck = 0;
        for _ in 0..self.rng.between(1, 6) {
            if self.guest.in_flight >= self.guest.depth || self.guest.left == 0 {
                break;
            }
            let (op, offset, len) = self.guest.ask(u64::from(self.plan.units), &mut self.rng);
            self.guest.in_flight += 1;
            self.guest.left -= 1;
            if !self.request(host, Who::Guest, op, offset, len)? {
                self.guest.in_flight -= 1;
                self.guest.left += 1;
                break;
            }
        }
        let think = self.rng.latency(self.plan.think_ns);
        self.schedule_guest(think);
        Ok(())
    }

    fn schedule_guest(&mut self, ns: u64) {
        if !std::mem::replace(&mut self.guest.is_due, true) {
            self.queue.push(self.now + ns, Event::Guest);
        }
    }

    /// Handles the reply to a guest request, or the loss of the request in a crash.
    pub(super) fn guest_answered(&mut self, op: Op) -> Result<(), Violation> {
        self.guest.in_flight -= 1;
        match self.guest.doing {
            Doing::Flushes(to) if op == Op::Flush && self.guest.in_flight == 0 => {
                self.guest.doing = Doing::Moves;
                let takes = self.rng.latency(20 * MS);
                self.queue.push(self.now + takes, Event::Resume(to));
                Ok(())
            }
            Doing::Stops(_) => self.go_on_stopping(),
            _ => Ok(()),
        }
    }

    /// Stops the guest on its host, to resume on another host.
    pub(super) fn move_guest(&mut self, to: usize) -> Result<(), Violation> {
        trace!(self, "the guest is to go to {to}");
        self.guest.doing = Doing::Stops(to);
        self.go_on_stopping()
    }

    fn go_on_stopping(&mut self) -> Result<(), Violation> {
        let (Doing::Stops(to), 0) = (self.guest.doing, self.guest.in_flight) else { return Ok(()) };
        let host = self.guest.host;
        self.guest.doing = Doing::Flushes(to);
        self.guest.in_flight = 1;
        if !self.is_usable(host) || !self.request(host, Who::Guest, Op::Flush, 0, 0)? {
            self.guest_answered(Op::Flush)?;
        }
        Ok(())
    }

    /// Resumes the guest on the given host, or on its old host if the given host cannot serve the
    /// disk.
    pub(super) fn resume(&mut self, to: usize) -> Result<(), Violation> {
        self.guest.doing = Doing::Runs;
        let from = self.guest.host;
        if self.is_usable(to) && to != from {
            trace!(self, "the guest goes on on host {to}");
            self.guest.host = to;
            self.report.moves += 1;
            self.report.moves_back += u64::from(self.guest.came_from == Some(to));
            let may_return = self.guest.came_from.is_none() && self.rng.chance(250);
            self.guest.came_from = may_return.then_some(from);
            if may_return {
                let after = self.rng.latency(300 * MS);
                self.queue.push(self.now + after, Event::Decide);
            }
        }
        self.schedule_guest(0);
        Ok(())
    }

    /// Decides at random whether the guest moves back, if the host from which it came owns the disk
    /// again. A guest that stays may write from now on.
    pub(super) fn decide(&mut self) -> Result<(), Violation> {
        let Some(from) = self.guest.came_from else { return Ok(()) };
        if self.guest.doing == Doing::Runs && self.owner() == Some(from) && self.rng.chance(600) {
            return self.move_guest(from);
        }
        self.guest.came_from = None;
        Ok(())
    }

    /// Sends a rogue client's request to a host on which the guest does not run.
    pub(super) fn rogue(&mut self) -> Result<(), Violation> {
        if self.ending {
            return Ok(());
        }
        let after = self.rng.latency(self.plan.operator_ns);
        self.queue.push(self.now + after, Event::Rogue);
        let host = self.rng.below(self.hosts.len() as u64) as usize;
        let writes = self.rng.chance(200);
        let reach = u64::from(self.plan.units);
        if host == self.guest.host || !self.is_usable(host) {
            return Ok(());
        }
        let start = self.rng.below(reach);
        let count = self.rng.between(1, 8.min(reach - start));
        let op = if writes { Op::Write(Durability::Volatile) } else { Op::Read };
        self.report.rogues += 1;
        self.request(host, Who::Rogue, op, start * UNIT_BYTES, count * UNIT_BYTES)?;
        Ok(())
    }
}
