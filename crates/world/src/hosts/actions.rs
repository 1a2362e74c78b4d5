//! Performs the actions that the migration state machines request of their host, in the order of
//! the requests.

use hob_engine::command::{Command, CommandError, Role};
use hob_engine::io::{Io, IoOp, Op, Target};
use hob_engine::migration::{DestinationAct, Record, SourceAct, Ticket};
use hob_engine::units::{CommandId, SECTOR_BYTES};

use super::host::{After, DISK, Former, Several, Who, Writing};
use super::{Event, Sabotage, Simulation, trace};
use crate::content::UNIT_BYTES;
use crate::{Violation, ensure};

/// The state machine of a host that requested an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Actor {
    Source,
    Destination,
}

/// An action that a migration state machine requested.
#[derive(Debug)]
pub(super) enum Act {
    Source(Ticket, SourceAct),
    Destination(Ticket, DestinationAct),
}

impl Simulation<'_> {
    /// Counts one step of a host. Crashes or pauses the host if the history has a crash or pause at
    /// this step. Returns true if the host is still up.
    pub(super) fn step(&mut self, host: usize) -> Result<bool, Violation> {
        if self.hosts[host].ram.is_none() {
            return Ok(false);
        }
        self.report.steps[host] += 1;
        let here = super::Crash { host, step: self.report.steps[host] };
        if !self.ending && self.plan.crash_step == Some(here) {
            self.crash(host)?;
            return Ok(false);
        }
        if let Some((at, ns)) = self.plan.stop.filter(|(at, _)| !self.ending && *at == here) {
            trace!(self, "host {} stops for {ns} ns", at.host);
            self.hosts[host].stopped_until = self.now + ns;
            self.report.process_stops += 1;
        }
        Ok(true)
    }

    /// Queues an action of a host.
    pub(super) fn queue_act(&mut self, host: usize, act: Act) {
        let takes = self.rng.latency(self.plan.act_ns);
        let life = self.hosts[host].life;
        let Some(ram) = &mut self.hosts[host].ram else { return };
        let at = (self.now + takes).max(ram.acts_at);
        ram.acts_at = at;
        ram.acts.push_back(act);
        self.queue.push(at, Event::Act(host, life));
    }

    pub(super) fn begin_act(&mut self, host: usize) -> Result<(), Violation> {
        if !self.step(host)? {
            return Ok(());
        }
        let act = self.hosts[host]
            .ram
            .as_mut()
            .and_then(|ram| ram.acts.pop_front())
            .expect("the action was queued");
        trace!(self, "host {host} begins {act:?}");
        let fails = !self.ending && self.rng.chance(self.plan.act_error);
        match act {
            Act::Source(ticket, act) => self.source_act(host, ticket, act, fails)?,
            Act::Destination(ticket, act) => self.destination_act(host, ticket, act, fails)?,
        }
        self.drain(host)
    }

    fn source_act(
        &mut self,
        host: usize,
        ticket: Ticket,
        act: SourceAct,
        fails: bool,
    ) -> Result<(), Violation> {
        let doer = Actor::Source;
        let may_fail = matches!(
            act,
            SourceAct::Prepare | SourceAct::TakeChanges | SourceAct::Freeze | SourceAct::Settle
        );
        if fails && may_fail {
            return self.acted(host, doer, ticket, false);
        }
        let (now, unwatched) = (self.now, self.strikes(Sabotage::Unwatched));
        let (hasty, late) = (self.strikes(Sabotage::HastyFreeze), self.strikes(Sabotage::LateThaw));
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let after = After::Act(doer, ticket);
        match act {
            SourceAct::Record(record) => return self.write_record(host, Writing { record, doer, ticket }),
            SourceAct::Prepare => ram.command(now, Command::Watch(!unwatched), after),
            SourceAct::TakeChanges => {
                let changes = ram.engine.take_changed(DISK);
                ram.source.as_mut().expect("the source requested the action").handle_changes(changes);
                return self.acted(host, doer, ticket, true);
            }
            SourceAct::Freeze => {
                let after = if hasty { After::Nothing } else { after };
                ram.command(now, Command::Own(Role::Frozen), after);
                if hasty {
                    return self.acted(host, doer, ticket, true);
                }
            }
            SourceAct::Settle => return self.ask_for(host, Op::Settle, &[(0, 0)], doer, ticket),
            SourceAct::Thaw => {
                self.report.thaws += 1;
                ram.command(now, Command::Own(Role::Here), after);
            }
            SourceAct::Leave if late => ram.command(now, Command::Own(Role::Here), after),
            SourceAct::Leave => ram.command(now, Command::Own(Role::Away), after),
            SourceAct::Restore => ram.command(now, Command::Watch(false), after),
            SourceAct::GiveUp if ram.engine.role(DISK).is_none() => {
                return self.acted(host, doer, ticket, true);
            }
            SourceAct::GiveUp => {
                ram.hangs_up = true;
                ram.command(now, Command::RemoveDisk, after);
            }
        }
        Ok(())
    }

    fn destination_act(
        &mut self,
        host: usize,
        ticket: Ticket,
        act: DestinationAct,
        fails: bool,
    ) -> Result<(), Violation> {
        let doer = Actor::Destination;
        if fails && !matches!(act, DestinationAct::Record(_) | DestinationAct::Settle) {
            return self.acted(host, doer, ticket, false);
        }
        let now = self.now;
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let after = After::Act(doer, ticket);
        match act {
            DestinationAct::Record(record) => self.write_record(host, Writing { record, doer, ticket }),
            DestinationAct::Prepare => self.prepare(host, ticket),
            DestinationAct::Forget(ranges) => self.forget(host, ticket, &ranges),
            DestinationAct::Activate => {
                self.take_over(host);
                let ram = self.hosts[host].ram.as_mut().expect("the host is up");
                ram.command(now, Command::Own(Role::Here), after);
                Ok(())
            }
            DestinationAct::Commit => self.ask_for(host, Op::DaemonFlush, &[(0, 0)], doer, ticket),
            DestinationAct::Settle => {
                self.pull_soon(host, 0);
                self.acted(host, doer, ticket, true)
            }
            DestinationAct::Remove if ram.engine.role(DISK).is_none() => self.acted(host, doer, ticket, true),
            DestinationAct::Remove => {
                ram.command(now, Command::RemoveDisk, after);
                self.hang_up(host)
            }
        }
    }

    /// Adds the disk to the destination in standby, with an empty cache. If the destination already
    /// has the disk in standby, this function empties the disk's cache, or removes the disk and
    /// adds it again.
    fn prepare(&mut self, host: usize, ticket: Ticket) -> Result<(), Violation> {
        if !self.flush_for_standby(host)? {
            return self.acted(host, Actor::Destination, ticket, false);
        }
        let (now, removes) = (self.now, self.plan.removes && self.guest.host != host);
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        ram.pulling = None;
        ram.former = None;
        ram.preparing = Some(ticket);
        match ram.engine.role(DISK) {
            None => {
                self.make_standby(host, ticket);
                Ok(())
            }
            Some(_) if removes => {
                ram.command(now, Command::RemoveDisk, After::Again(ticket));
                self.hang_up(host)
            }
            Some(role) => {
                ensure!(role == Role::Standby, "host {host} must prepare the disk, but its role is {role:?}");
                let sectors = (u64::from(self.plan.units) * UNIT_BYTES).div_ceil(SECTOR_BYTES);
                self.stop_pulls(host)?;
                self.ask_for(host, Op::Forget, &[(0, sectors)], Actor::Destination, ticket)
            }
        }
    }

    /// Flushes writes that an earlier process of the host acknowledged, before the guest can send a
    /// flush to this process. Returns false if the flush failed.
    fn flush_for_standby(&mut self, host: usize) -> Result<bool, Violation> {
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        if !ram.must_flush || self.strikes(Sabotage::UnflushedStandby) {
            return Ok(true);
        }
        let name = self.name_io(host);
        let target = Target::Backing(DISK);
        let io = Io { id: name, target, op: IoOp::Flush, offset: 0, len: 0, slice: None };
        self.backing.submit(io, vec![], &mut self.rng)?;
        let is_flushed = self.backing.complete(name, &mut self.rng).result.is_ok();
        self.hosts[host].ram.as_mut().expect("the host is up").must_flush = !is_flushed;
        Ok(is_flushed)
    }

    fn make_standby(&mut self, host: usize, ticket: Ticket) {
        let (now, plan) = (self.now, &self.plan);
        let it = &mut self.hosts[host];
        it.rings += 1;
        let ram = it.ram.as_mut().expect("the host is up");
        ram.add_disk(now, plan);
        ram.command(now, Command::Own(Role::Standby), After::Nothing);
        ram.add_cache(now, plan, it.rings, After::Act(Actor::Destination, ticket));
    }

    /// Invalidates these ranges in the destination's cache. The destination then pulls the ranges
    /// again.
    fn forget(&mut self, host: usize, ticket: Ticket, ranges: &[(u64, u64)]) -> Result<(), Violation> {
        let sectors = (u64::from(self.plan.units) * UNIT_BYTES).div_ceil(SECTOR_BYTES);
        // The list of ranges may extend past the disk's end.
        let ranges: Vec<(u64, u64)> = ranges.iter().map(|(first, end)| (*first, sectors.min(*end))).collect();
        self.report.forgotten += ranges.len() as u64;
        if self.strikes(Sabotage::NothingForgotten) {
            return self.acted(host, Actor::Destination, ticket, true);
        }
        if self.strikes(Sabotage::EarlyForgotten) {
            self.acted(host, Actor::Destination, ticket, true)?;
        }
        self.ask_for(host, Op::Forget, &ranges, Actor::Destination, ticket)
    }

    /// Prepares a host to serve the disk: from now on, pulls and cache misses may read from the
    /// former owner. The caller then makes the engine serve the disk.
    fn take_over(&mut self, host: usize) {
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        ram.hangs_up = false;
        let Some(pulling) = &mut ram.pulling else {
            // This migration pulls no data, so the host may tell the former owner at once that the
            // cache is complete.
            return ram.destination.handle_progress(0, 0, true);
        };
        pulling.after = true;
        if !ram.destination.knows_changes() {
            // An earlier process of this host may have served the disk and written to it, and may
            // have crashed before it recorded that.
            return;
        }
        let session = pulling.session;
        let host = self.attempts[&session];
        ram.former = Some(Former { host, session });
    }

    /// Sends a request to the engine for each of these sector ranges.
    fn ask_for(
        &mut self,
        host: usize,
        op: Op,
        ranges: &[(u64, u64)],
        doer: Actor,
        ticket: Ticket,
    ) -> Result<(), Violation> {
        let Some(ram) = &mut self.hosts[host].ram else { return Ok(()) };
        if ranges.is_empty() {
            return self.acted(host, doer, ticket, true);
        }
        let ranges = ranges.to_vec();
        let several = Several { left: ranges.len() as u32, failed: false, ranges: ranges.clone() };
        ram.several.insert((doer, ticket), several);
        let size = u64::from(self.plan.units) * UNIT_BYTES;
        for (first, end) in ranges {
            let offset = first * SECTOR_BYTES;
            let len = (end * SECTOR_BYTES).min(size) - offset;
            if !self.request(host, Who::Act(doer, ticket), op, offset, len)? {
                self.part_done(host, doer, ticket, false)?;
            }
        }
        Ok(())
    }

    /// Handles the end of one request of an action that consists of several requests. `ok` is false
    /// if the request failed. When the last of these requests ends, the action ends.
    pub(super) fn part_done(
        &mut self,
        host: usize,
        doer: Actor,
        ticket: Ticket,
        ok: bool,
    ) -> Result<(), Violation> {
        let Some(ram) = &mut self.hosts[host].ram else { return Ok(()) };
        let Some(several) = ram.several.get_mut(&(doer, ticket)) else { return Ok(()) };
        several.left -= 1;
        several.failed |= !ok;
        if several.left > 0 {
            return Ok(());
        }
        let several = ram.several.remove(&(doer, ticket)).expect("just seen");
        if doer == Actor::Destination
            && let Some(pulling) = &mut ram.pulling
        {
            several.ranges.iter().for_each(|(first, end)| pulling.puller.changed(*first, *end));
            self.pull_soon(host, 0);
        }
        self.acted(host, doer, ticket, !several.failed)
    }

    /// Reports the end of an action to the state machine.
    pub(super) fn acted(
        &mut self,
        host: usize,
        doer: Actor,
        ticket: Ticket,
        ok: bool,
    ) -> Result<(), Violation> {
        if !self.step(host)? {
            return Ok(());
        }
        let now = self.now;
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        trace!(self, "host {host}: {doer:?} {ticket:?} done: {ok}");
        let result = if ok { Ok(()) } else { Err(()) };
        match doer {
            Actor::Source => {
                if let Some(source) = &mut ram.source {
                    source.handle_done(now, ticket, result);
                }
            }
            Actor::Destination => {
                ram.destination.handle_done(now, ticket, result);
                let is_prepared = ok && ram.preparing.take_if(|preparing| *preparing == ticket).is_some();
                if let (true, Some(session)) = (is_prepared, ram.destination.awaits()) {
                    self.begin_pulling(host, session)?;
                }
            }
        }
        self.drain(host)
    }

    /// Handles the end of an engine command.
    pub(super) fn commanded(
        &mut self,
        host: usize,
        command: CommandId,
        result: Result<(), CommandError>,
    ) -> Result<(), Violation> {
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let after = ram.commands.remove(&command);
        let after =
            after.ok_or_else(|| Violation(format!("command {command} of host {host} ended twice")))?;
        match after {
            After::Nothing => Ok(()),
            After::Act(doer, ticket) => self.acted(host, doer, ticket, result.is_ok()),
            After::Again(ticket) => {
                ensure!(result.is_ok(), "host {host} cannot remove the disk: {result:?}");
                self.make_standby(host, ticket);
                self.drain(host)
            }
        }
    }

    /// Starts to write a durable record.
    fn write_record(&mut self, host: usize, writing: Writing) -> Result<(), Violation> {
        let takes = self.rng.latency(self.plan.record_ns);
        let life = self.hosts[host].life;
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        ram.writing.push_back(writing);
        if ram.writing.len() == 1 {
            self.queue.push(self.now + takes, Event::Recorded(host, life));
        }
        let departs = matches!(writing.record, Record::Away { taken: false, .. });
        if departs && self.strikes(Sabotage::EarlyRecord) {
            return self.acted(host, writing.doer, writing.ticket, true);
        }
        Ok(())
    }

    /// Completes the oldest record write, with success or failure.
    pub(super) fn recorded(&mut self, host: usize) -> Result<(), Violation> {
        if !self.step(host)? {
            return Ok(());
        }
        let fails = !self.ending && self.rng.chance(self.plan.record_error);
        let is_durable = !fails || self.rng.chance(500);
        let (takes, life) = (self.rng.latency(self.plan.record_ns), self.hosts[host].life);
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let Writing { record, doer, ticket } =
            ram.writing.pop_front().expect("a record write is in progress");
        if !ram.writing.is_empty() {
            self.queue.push(self.now + takes, Event::Recorded(host, life));
        }
        self.report.records_in_doubt += u64::from(fails);
        if is_durable {
            self.make_durable(host, record)?;
        }
        self.acted(host, doer, ticket, !fails)
    }
}
