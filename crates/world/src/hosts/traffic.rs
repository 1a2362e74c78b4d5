//! Traffic of a host: requests and replies, I/O and completions, actions and calls.

use hob_engine::command::{Event as EngineEvent, Role};
use hob_engine::io::{
    Durability, Io, IoError, IoOp, Op, PayloadMemory, Promote, Reply, Request, Target, Zeroing,
};
use hob_engine::migration::{Phase, Pulled};
use hob_engine::outcome::Outcome;
use hob_engine::units::{BufferId, IoId, RequestId, SECTOR_BYTES, sector_ceil, sector_floor};

use super::actions::Act;
use super::host::{Buffer, DISK, InFlight, Token, Who};
use super::{Event, Owned, Sabotage, Simulation, trace};
use crate::content::{self, SECTOR_UNITS, Tag, UNIT_BYTES, ZERO};
use crate::media::{Done, HOST_SHIFT};
use crate::model::Kind;
use crate::{Violation, ensure};

/// Minimum number of requests in flight at which a host's engine may refuse a guest's request: one
/// disk may use 5/8 of the slots for guests.
const SLOTS_MIN: u32 = 157;

impl Simulation<'_> {
    /// Performs what a host's engine and state machines request, until they request nothing more.
    pub(super) fn drain(&mut self, host: usize) -> Result<(), Violation> {
        while let Some(ram) = &mut self.hosts[host].ram {
            if let Some(io) = ram.engine.poll_io() {
                self.submit(host, io)?;
            } else if let Some(reply) = ram.engine.poll_reply() {
                self.reply(host, reply)?;
            } else if let Some(event) = ram.engine.poll_event() {
                self.event(host, event)?;
            } else if let Some(buffer) = ram.engine.poll_release() {
                self.release(host, buffer)?;
            } else if let Some((ticket, act)) = ram.source.as_mut().and_then(|source| source.poll_act()) {
                self.queue_act(host, Act::Source(ticket, act));
            } else if let Some((ticket, message)) = ram.source.as_mut().and_then(|source| source.poll_call())
            {
                self.call(host, ticket, message)?;
            } else if let Some((ticket, act)) = ram.destination.poll_act() {
                self.queue_act(host, Act::Destination(ticket, act));
            } else if let Some((ticket, answer)) = ram.destination.poll_answer() {
                self.answer(host, ticket, answer)?;
            } else if ram.source.as_ref().is_some_and(|source| source.is_over()) {
                self.end_source(host);
            } else {
                break;
            }
        }
        self.check_roles_unless_sabotaged()
    }

    fn check_roles_unless_sabotaged(&self) -> Result<(), Violation> {
        // Other checkers must detect this sabotage; this check would report it too early.
        if self.strikes(Sabotage::LateThaw) { Ok(()) } else { self.check_roles() }
    }

    /// Ends a migration attempt. The next attempt starts from the host's durable record.
    fn end_source(&mut self, host: usize) {
        let record = self.hosts[host].record;
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let source = ram.source.take().expect("the attempt has ended");
        // The host must not take late answers on the old connection for answers to calls of the
        // next attempt.
        ram.calls.clear();
        trace!(self, "host {host}: {:?} is over: {:?}", source.session(), source.phase());
        self.report.kept += u64::from(source.phase() == Phase::Kept);
        ram.destination = hob_engine::migration::Destination::new(record);
    }

    fn event(&mut self, host: usize, event: EngineEvent) -> Result<(), Violation> {
        trace!(self, "host {host}: {event:?}");
        match event {
            EngineEvent::Done { command, result, .. } => self.commanded(host, command, result.map(|_| ())),
            // Devices and backings lose no acknowledged data in histories of several hosts.
            EngineEvent::WritesInDoubt(_) | EngineEvent::FailuresOwed { .. } => Ok(()),
            EngineEvent::ChangeWaits(_) => {
                let ram = self.hosts[host].ram.as_mut().expect("the host is up");
                self.report.changes_waited += 1;
                ram.wanted = true;
                ram.destination.handle_wanted();
                Ok(())
            }
            // A pause of the process delays completions, so the engine may have reported a stalled
            // device.
            EngineEvent::Stalled(_) | EngineEvent::Resumed(_) if self.hosts[host].stopped_until.0 > 0 => {
                Ok(())
            }
            EngineEvent::Bitmaps { .. } => Ok(()),
            other => Err(Violation(format!("host {host}: {other:?}"))),
        }
    }

    /// Sends a request to the host's engine. Returns false if the engine has no room.
    pub(super) fn request(
        &mut self,
        host: usize,
        who: Who,
        op: Op,
        offset: u64,
        len: u64,
    ) -> Result<bool, Violation> {
        let Some(ram) = &mut self.hosts[host].ram else { return Ok(false) };
        let is_guest = matches!(who, Who::Guest | Who::Rogue);
        if is_guest && !ram.engine.has_room(DISK) {
            // Reads that other hosts send use the engine's slots for guests too. When a paused
            // process continues, many of these reads arrive at once.
            let in_flight = ram.engine.in_flight();
            ensure!(
                in_flight >= SLOTS_MIN,
                "the engine refuses a request with only {in_flight} requests in flight"
            );
            return Ok(false);
        }
        if ram.engine.in_flight() >= 250 {
            return Ok(false);
        }
        ram.made += 1;
        let id = RequestId(ram.made);
        let (first, count) = ((offset / UNIT_BYTES) as u32, (len / UNIT_BYTES) as u32);
        let token = match op {
            Op::Read if matches!(who, Who::Guest | Who::Rogue | Who::Last) => {
                Token::Read(self.model.begin_read(first, count))
            }
            Op::Flush if who == Who::Guest || who == Who::Last => Token::Flush(self.model.begin_flush()),
            Op::Write(_) => Token::Change(self.model.begin_change(Kind::Data, first, count)),
            Op::Discard(_) => Token::Change(self.model.begin_change(Kind::Discard, first, count)),
            Op::WriteZeroes(..) => Token::Change(self.model.begin_change(Kind::Zero, first, count)),
            _ => Token::None,
        };
        if let Token::Change(serial) = token {
            self.changed_on.insert(serial, host);
        }
        let buffer = op.has_buffer().then(|| {
            let buffer = ram.spare.pop().unwrap_or(BufferId(ram.buffers.len() as u32));
            let bytes = sector_ceil(offset + len) - sector_floor(offset);
            let mut tags = vec![content::garbage(ram.made); (bytes / UNIT_BYTES) as usize];
            if let Token::Change(serial) = token {
                let start = (offset % SECTOR_BYTES / UNIT_BYTES) as usize;
                for (unit, tag) in (first..first + count).zip(&mut tags[start..]) {
                    *tag = content::tag(serial, 0, unit);
                }
            }
            let old = ram.buffers.insert(buffer, Buffer { tags, replied: false, ios: 0 });
            assert!(old.is_none(), "spare buffers are free");
            buffer
        });
        let request = Request {
            id,
            disk: DISK,
            op,
            offset,
            len,
            buffer,
            promote: Promote::Usual,
            memory: PayloadMemory::Daemon,
        };
        trace!(self, "host {host} is asked by {who:?}: {request:?}");
        ram.requests.insert(id, InFlight { request, who, token });
        if ram.engine.handle_request(self.now, request).is_err() {
            // After a paused process continues, the delayed requests of other hosts arrive at once.
            let in_flight = ram.engine.in_flight();
            ensure!(
                !is_guest && op.is_own(),
                "the engine refuses {request:?} with only {in_flight} requests in flight"
            );
            ram.requests.remove(&id);
            if let Some(buffer) = buffer {
                ram.buffers.remove(&buffer);
                ram.spare.push(buffer);
            }
            return Ok(false);
        }
        self.drain(host)?;
        Ok(true)
    }

    fn submit(&mut self, host: usize, io: Io) -> Result<(), Violation> {
        trace!(self, "host {host} submits {io:?}");
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let mut payload = vec![];
        if let Some(slice) = io.slice {
            let buffer = ram.buffers.get_mut(&slice.id);
            let buffer = buffer.ok_or_else(|| Violation(format!("{io:?} uses a released buffer")))?;
            buffer.ios += 1;
            let start = (u64::from(slice.offset) / UNIT_BYTES) as usize;
            if io.op != IoOp::Read {
                payload = buffer.tags[start..start + (io.len / UNIT_BYTES) as usize].to_vec();
            }
        }
        let life = self.hosts[host].life;
        if let Target::Flash(_) = io.target {
            let it = &mut self.hosts[host];
            if io.op == IoOp::WriteJournal {
                let ram = it.ram.as_ref().expect("the host is up");
                payload = it.written.tags(ram.engine.journal_pages(io.id));
            }
            it.flash.submit(io, payload, &mut self.rng)?;
            let takes = self.rng.latency(self.plan.flash_ns);
            self.queue.push(self.now + takes, Event::Flash(host, life, io.id));
            return Ok(());
        }
        if io.op == IoOp::Read && self.is_read_elsewhere(host, &io)? {
            return Ok(());
        }
        if !matches!(io.op, IoOp::Read | IoOp::Flush) {
            self.note_changed(host, &io);
        }
        self.submit_to_backing(host, io, payload)
    }

    /// Sends an I/O to the backing, and checks that only the owner writes.
    pub(super) fn submit_to_backing(
        &mut self,
        host: usize,
        mut io: Io,
        payload: Vec<Tag>,
    ) -> Result<(), Violation> {
        let changes = !matches!(io.op, IoOp::Read | IoOp::Flush);
        ensure!(
            !changes || self.is_entitled(host),
            "host {host}, which does not own the disk, sends {io:?} to the backing: {}",
            self.state()
        );
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let role = ram.engine.role(DISK);
        // A flush changes no data; the engine sends one when it opens a cache with a journal.
        let may = io.op == IoOp::Flush || role != Some(Role::Standby);
        ensure!(may, "host {host} in standby sends {io:?} to the backing");
        let name = self.name_io(host);
        self.backing_ios.insert(name, Owned { host, id: io.id, changes });
        io.id = name;
        self.backing.submit(io, payload, &mut self.rng)?;
        let takes = self.rng.latency(self.plan.backing_ns);
        self.queue.push(self.now + takes, Event::Backing(name));
        Ok(())
    }

    /// Returns a new id for a backing I/O of the host.
    pub(super) fn name_io(&mut self, host: usize) -> IoId {
        self.submitted += 1;
        IoId((host as u32) << HOST_SHIFT | self.submitted)
    }

    pub(super) fn flash_done(&mut self, host: usize, id: IoId) -> Result<(), Violation> {
        let done = self.hosts[host].flash.complete(id, &mut self.rng);
        self.completed(host, id, done)
    }

    pub(super) fn backing_done(&mut self, name: IoId) -> Result<(), Violation> {
        let Some(Owned { host, id, .. }) = self.backing_ios.remove(&name) else { return Ok(()) };
        let done = self.backing.complete(name, &mut self.rng);
        self.completed(host, id, done)
    }

    /// Handles the completion of a host's I/O.
    pub(super) fn completed(&mut self, host: usize, id: IoId, done: Done) -> Result<(), Violation> {
        let now = self.now;
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        trace!(self, "host {host}: {id} has ended: {:?}", done.result);
        if let Some(slice) = done.io.slice {
            let buffer = ram.buffers.get_mut(&slice.id).expect("checked at submission");
            let start = (u64::from(slice.offset) / UNIT_BYTES) as usize;
            let end = start + done.tags.len();
            buffer.ios -= 1;
            if done.io.op == IoOp::Read {
                ensure!(!buffer.replied, "{:?} uses its buffer after the reply", done.io);
                buffer.tags[start..end].copy_from_slice(&done.tags);
                // The storage crate zeroes the part of the last sector beyond the disk's end.
                buffer.tags[end..end.next_multiple_of(SECTOR_UNITS)].fill(ZERO);
            }
        }
        ram.engine.handle_completion(now, id, done.result, &done.sums);
        self.drain(host)
    }

    fn reply(&mut self, host: usize, reply: Reply) -> Result<(), Violation> {
        trace!(self, "host {host}: {reply:?}");
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let Reply { id, result, outcome, .. } = reply;
        let in_flight = ram.requests.remove(&id);
        let InFlight { request, who, token } =
            in_flight.ok_or_else(|| Violation(format!("{reply:?} to no request, or a second one")))?;
        let mut seen = vec![];
        if let Some(id) = request.buffer {
            let buffer = ram.buffers.get_mut(&id).expect("held until released");
            buffer.replied = true;
            let start = (request.offset % SECTOR_BYTES / UNIT_BYTES) as usize;
            seen = buffer.tags[start..start + (request.len / UNIT_BYTES) as usize].to_vec();
        }
        self.check_error(host, &request, who, &reply)?;
        self.count(who, &request, outcome, result);
        let promises = outcome != Outcome::BypassStandby || self.promises_in_standby(host, &token);
        self.check_answer(&request, token, &seen, result.is_ok() && promises)?;
        match who {
            Who::Guest => self.guest_answered(request.op),
            Who::Rogue | Who::Last => Ok(()),
            Who::Act(doer, ticket) => self.part_done(host, doer, ticket, result.is_ok()),
            Who::Puller(pull) => {
                let how = if result.is_ok() { Pulled::Done } else { Pulled::Again };
                self.pulled(host, pull, how, &seen);
                Ok(())
            }
            Who::Peer(to, life, number) => {
                self.give(host, to, life, number, result.is_ok().then_some(seen));
                Ok(())
            }
        }
    }

    /// Returns false for a flush in standby if another host has sent unflushed writes: the flush
    /// does not make them durable. The missing durability breaks no promise, because the guest
    /// flushed the disk before the guest moved. Writes of an earlier process of this host were
    /// flushed before this process accepted flushes.
    fn promises_in_standby(&self, host: usize, token: &Token) -> bool {
        let Token::Flush(began) = token else { return true };
        self.model.unflushed(*began).all(|serial| self.changed_on[&serial] == host)
    }

    /// Checks that an error reply has a valid reason.
    fn check_error(&self, host: usize, request: &Request, who: Who, reply: &Reply) -> Result<(), Violation> {
        let role = self.hosts[host].role();
        let faults = &self.plan.backing_faults;
        let fast =
            matches!(request.op, Op::WriteZeroes(_, Zeroing::FastMayUnmap | Zeroing::FastKeepAllocated));
        let reason = match reply.result {
            Ok(()) => true,
            Err(IoError::Unsupported) => fast,
            Err(IoError::ShuttingDown) => {
                let leaves = self.hosts[host].ram.as_ref().is_some_and(|ram| ram.hangs_up);
                leaves
                    || role.is_none()
                    || matches!(role, Some(Role::Away))
                    || !matches!(who, Who::Guest | Who::Last)
            }
            Err(IoError::NotCached) => matches!(who, Who::Peer(..)),
            Err(_) => {
                let reads = matches!(request.op, Op::Read | Op::Prefetch);
                let of_backing = if reads { faults.read_error } else { faults.write_error };
                let of_flush =
                    if request.op == Op::Flush || request.op == Op::Settle { faults.flush_error } else { 0 };
                let of_peer = reads && (self.plan.gives_up || self.has_hung_up(host));
                // If a flush that overlaps a change fails, the engine does not trust the success of
                // the change and sends the change again. After a few attempts the change fails.
                let flushes = if request.op.modifies() { faults.flush_error } else { 0 };
                of_backing + of_flush + flushes > 0
                    || of_peer
                    || !matches!(who, Who::Guest | Who::Rogue | Who::Last)
            }
        };
        ensure!(reason, "host {host}, {role:?}, answers {request:?} of {who:?} with {reply:?}");
        Ok(())
    }

    fn has_hung_up(&self, host: usize) -> bool {
        self.hosts[host].ram.as_ref().is_some_and(|ram| ram.hangs_up)
    }

    fn count(&mut self, who: Who, request: &Request, outcome: Outcome, result: Result<(), IoError>) {
        let report = &mut self.report;
        if matches!(who, Who::Guest | Who::Rogue) {
            report.refused += u64::from(result == Err(IoError::ShuttingDown));
            report.hits += u64::from(outcome == Outcome::Hit);
            let in_standby = outcome == Outcome::BypassStandby && request.op == Op::Read;
            report.standby_reads += u64::from(in_standby && result.is_ok());
        }
    }

    fn check_answer(
        &mut self,
        request: &Request,
        token: Token,
        seen: &[Tag],
        ok: bool,
    ) -> Result<(), Violation> {
        let (model, backing) = (&mut self.model, &self.backing);
        let fua = matches!(
            request.op,
            Op::Write(Durability::Durable)
                | Op::Discard(Durability::Durable)
                | Op::WriteZeroes(Durability::Durable, _)
        );
        match token {
            Token::Read(reading) if ok => model.end_read(&reading, seen, backing.now()),
            Token::Change(serial) => model.end_change(serial, ok, fua, backing.now(), backing.durable()),
            Token::Flush(began) if ok => model.end_flush(0, began, backing.now(), backing.durable()),
            Token::Read(_) | Token::Flush(_) | Token::None => Ok(()),
        }
    }

    /// Records that a request of a crashed host is never answered.
    pub(super) fn lose(&mut self, in_flight: &InFlight) -> Result<(), Violation> {
        if let Token::Change(serial) = in_flight.token {
            self.model.end_change(serial, false, false, self.backing.now(), self.backing.durable())?;
        }
        if in_flight.who == Who::Guest { self.guest_answered(in_flight.request.op) } else { Ok(()) }
    }

    fn release(&mut self, host: usize, id: BufferId) -> Result<(), Violation> {
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let buffer = ram.buffers.remove(&id);
        let buffer = buffer.ok_or_else(|| Violation(format!("buffer {id} is given back twice")))?;
        ensure!(
            buffer.replied && buffer.ios == 0,
            "buffer {id} is released before the reply, or with I/O in flight"
        );
        ram.spare.push(id);
        Ok(())
    }
}
