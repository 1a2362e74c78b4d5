//! Simulates guest requests and replies, I/O and completions, and payload buffers.

use hob_engine::io::{
    Durability, Io, IoError, IoOp, Op, PayloadMemory, Promote, Reply, Request, Target, Zeroing,
};
use hob_engine::outcome::Outcome;
use hob_engine::units::{
    BufferId, DiskId, Instant, IoId, RequestId, SECTOR_BYTES, sector_ceil, sector_floor,
};

use super::audit::Fetch;
use super::direct::Scribbles;
use super::{Event, Sabotage, Side, Simulation, trace};
use crate::content::{self, SECTOR_UNITS, Tag, UNIT_BYTES, ZERO};
use crate::media::Done;
use crate::model::{Kind, Reading};
use crate::rng::SimRng;
use crate::{Violation, ensure};

/// A request that the engine has accepted and not answered yet.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) request: Request,
    /// Index of the guest that made the request; `None` for requests at the end of a history.
    guest: Option<usize>,
    token: Token,
    /// Error with which the engine must refuse the request, if any.
    pub(super) refusal: Option<IoError>,
    /// Value of `Simulation::clock` when the request was submitted.
    arrived: u64,
    /// Value of `Simulation::backing_losses` when the request was submitted.
    losses_before: u64,
}

/// Maximum number of times that the engine sends a change again because the backing lost data
/// meanwhile.
const LOSSES_MAX: u64 = 3;

/// Token that the disk model returned when the request began. The model needs the token at the end
/// of the request.
#[derive(Debug)]
enum Token {
    Read(Reading),
    Change(u32),
    Flush(u32),
    None,
}

/// A payload buffer that the engine uses.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) request: RequestId,
    disk: usize,
    pub(super) tags: Vec<Tag>,
    pub(super) replied: bool,
    /// Guest writes to the buffer, if the buffer is guest memory.
    pub(super) scribbles: Scribbles,
    /// Number of I/Os in flight on the buffer.
    pub(super) ios: u32,
}

impl Simulation<'_> {
    /// Sends some requests of a guest to the engine, at most as many as the guest's queue depth
    /// permits.
    pub(super) fn guest_turn(&mut self, index: usize) -> Result<(), Violation> {
        let guest = &mut self.scenario.guests[index];
        guest.is_due = false;
        if self.disks[guest.disk].gated {
            return Ok(());
        }
        let room = guest.depth - guest.in_flight;
        for _ in 0..self.rng.between(1, 8).min(u64::from(room)) {
            if self.left == 0 {
                return Ok(());
            }
            let guest = &mut self.scenario.guests[index];
            let full = !self.engine.has_room(DiskId(guest.disk as u32));
            let (op, offset, len) = guest.ask(&mut self.rng);
            let disk = guest.disk;
            self.session = index as u32 + 1;
            let request = self.make_request(disk, op, offset, len);
            self.session = 0;
            if full {
                let back = self.engine.handle_request(self.now, request);
                ensure!(
                    back == Err(request),
                    "the engine has no room and accepts {request:?} with {} requests in flight",
                    self.engine.in_flight()
                );
                self.report.handed_back += 1;
                self.give_back(request.buffer);
                let guest = &mut self.scenario.guests[index];
                guest.handed_back = (guest.handed_back + 1).min(16);
                let later = self.now + self.rng.latency(self.scenario.backing_ns << guest.handed_back);
                self.schedule_guest(index, later);
                return Ok(());
            }
            self.left -= 1;
            self.hand_in(Some(index), request)?;
            if self.strikes(Sabotage::WriteBehind, 100) {
                self.write_behind()?;
            }
        }
        Ok(())
    }

    pub(super) fn schedule_guest(&mut self, index: usize, at: Instant) {
        let guest = &mut self.scenario.guests[index];
        if !std::mem::replace(&mut guest.is_due, true) {
            self.queue.push(at, Event::Guest(index));
        }
    }

    pub(super) fn make_request(&mut self, disk: usize, op: Op, offset: u64, len: u64) -> Request {
        self.made += 1;
        let session = if self.options.sabotage == Some(Sabotage::OneSession) { 0 } else { self.session };
        let id = RequestId(u64::from(session) << 32 | self.made);
        let mut memory = self.memory_for(disk, op, offset, len);
        let buffer = op.has_buffer().then(|| self.make_buffer(id, disk, offset, len));
        if let (PayloadMemory::Guest, Some(id)) = (memory, &buffer) {
            self.buffers.get_mut(id).expect("just made").scribbles = Scribbles::Nothing;
            if self.options.sabotage == Some(Sabotage::SecretScribbles) {
                memory = PayloadMemory::Daemon;
            }
        }
        let promote =
            if self.passing && self.made.is_multiple_of(4) { Promote::Never } else { Promote::Usual };
        Request { id, disk: DiskId(disk as u32), op, offset, len, buffer, promote, memory }
    }

    pub(super) fn make_buffer(&mut self, request: RequestId, disk: usize, offset: u64, len: u64) -> BufferId {
        let spare = self.spare.pop();
        let buffer = spare.unwrap_or(BufferId(self.buffers.len() as u32));
        let bytes = match offset.checked_add(len) {
            Some(end) if len <= 32 << 20 => sector_ceil(end) - sector_floor(offset),
            _ => 0,
        };
        let tags = vec![content::garbage(self.made); (bytes / UNIT_BYTES) as usize];
        let scribbles = Scribbles::NotIts;
        let made = Buffer { request, disk, tags, replied: false, scribbles, ios: 0 };
        let old = self.buffers.insert(buffer, made);
        assert!(old.is_none(), "spare buffers are free");
        buffer
    }

    fn give_back(&mut self, buffer: Option<BufferId>) {
        if let Some(id) = buffer {
            self.buffers.remove(&id);
            self.spare.push(id);
        }
    }

    /// Submits a request for which the engine has room.
    pub(super) fn hand_in(&mut self, guest: Option<usize>, request: Request) -> Result<(), Violation> {
        let disk = &mut self.disks[request.disk.0 as usize];
        let refusal = if !disk.present || disk.leaving {
            Some(IoError::ShuttingDown)
        } else if request.op != Op::Flush && request.len == 0
            || request.offset.checked_add(request.len).is_none_or(|end| end > disk.size * UNIT_BYTES)
        {
            Some(IoError::Invalid)
        } else if request.op.modifies() && disk.access == hob_engine::command::Access::ReadOnly {
            Some(IoError::ReadOnly)
        } else {
            None
        };
        if refusal.is_none() {
            disk.tally.comes(&request);
        }
        if let Some(clones) = self.clones.as_mut().filter(|_| refusal.is_none() && request.op.modifies()) {
            clones.may_cache(request.disk.0 as usize, request.offset, request.len);
        }
        let (first, count) = Self::units(request.offset, request.len);
        let token = match request.op {
            _ if refusal.is_some() => Token::None,
            Op::Read => Token::Read(disk.model.begin_read(first, count)),
            Op::Prefetch | Op::Pull | Op::Forget | Op::Settle | Op::DaemonFlush | Op::ReadForPeer => {
                Token::None
            }
            Op::Flush => Token::Flush(disk.model.begin_flush()),
            Op::Write(_) => Token::Change(disk.model.begin_change(Kind::Data, first, count)),
            Op::Discard(_) => Token::Change(disk.model.begin_change(Kind::Discard, first, count)),
            Op::WriteZeroes(..) => Token::Change(disk.model.begin_change(Kind::Zero, first, count)),
        };
        if let (Op::Write(_), Token::Change(serial), Some(id)) = (request.op, &token, request.buffer) {
            let start = (request.offset % SECTOR_BYTES / UNIT_BYTES) as usize;
            let payload = &mut self.buffers.get_mut(&id).expect("just made").tags[start..];
            for (unit, tag) in (first..first + count).zip(payload) {
                *tag = content::tag(*serial, request.disk.0 as u8, unit);
            }
        }
        if let Some(guest) = guest {
            self.scenario.guests[guest].in_flight += 1;
            self.scenario.guests[guest].handed_back = 0;
        }
        let arrived = self.clock;
        trace!(self, "{request:?}");
        let losses_before = self.backing_losses();
        let in_flight = InFlight { request, guest, token, refusal, arrived, losses_before };
        self.requests.insert(request.id, in_flight);
        let taken = self.engine.handle_request(self.now, request);
        ensure!(
            taken.is_ok(),
            "the engine refuses {request:?} with {} requests in flight",
            self.engine.in_flight()
        );
        self.drain()
    }

    /// Performs the copies, I/Os and other outputs that the engine requests.
    pub(super) fn drain(&mut self) -> Result<(), Violation> {
        self.count_flash_writes();
        self.perform_copies()?;
        while let Some(event) = self.engine.poll_event() {
            self.event(event)?;
            // An event can lead to a command, which can request copies.
            self.perform_copies()?;
        }
        while let Some(io) = self.engine.poll_io() {
            self.submit(io)?;
        }
        while let Some(reply) = self.engine.poll_reply() {
            self.reply(reply)?;
            if self.strikes(Sabotage::RepeatedReply, 50) {
                self.reply(reply)?;
            }
        }
        while let Some(id) = self.engine.poll_declined() {
            self.decline(id)?;
        }
        while let Some(buffer) = self.engine.poll_release() {
            self.release(buffer)?;
            if self.strikes(Sabotage::RepeatedRelease, 50) {
                self.release(buffer)?;
            }
        }
        self.ask_again()
    }

    fn perform_copies(&mut self) -> Result<(), Violation> {
        while let Some(copy) = self.engine.poll_copy() {
            self.copy(copy)?;
        }
        Ok(())
    }

    fn submit(&mut self, mut io: Io) -> Result<(), Violation> {
        ensure!(self.ios.insert(io.id), "{io:?} has the id of another I/O in flight");
        let payload = self.payload(&io)?;
        trace!(self, "submitted {io:?} {:x?}", payload.iter().step_by(8).collect::<Vec<_>>());
        let (side, mean) = match io.target {
            Target::Flash(device) => {
                if io.op != IoOp::Read {
                    self.note_flash_write(io.len);
                }
                if self.strikes(Sabotage::MisroutedIo, 20) {
                    io.offset = io.offset.wrapping_sub(self.scenario.segment_bytes);
                }
                self.check_inside(&io)?;
                let device = usize::from(device.0);
                self.flash[device].submit(io, payload, &mut self.rng)?;
                if io.op != IoOp::Read {
                    self.count_change(device, io.id, io.op);
                }
                (Side::Flash(device), self.scenario.flash_ns)
            }
            Target::Backing(id) => {
                self.count_backing_io();
                let disk = &mut self.disks[id.0 as usize];
                disk.backing.submit(io, payload, &mut self.rng)?;
                if io.op == IoOp::Read
                    && let Some(buffer) = io.slice.and_then(|slice| self.buffers.get(&slice.id))
                {
                    disk.fetches.push(Fetch::new(buffer.request, &io, self.clock));
                }
                let clones = self.clones.as_mut();
                if clones.is_some_and(|clones| clones.submit(id.0 as usize, &io)) {
                    self.engine.pass_on(self.now, io.id);
                }
                (Side::Backing(id.0 as usize), self.scenario.backing_ns)
            }
        };
        let stuck = matches!(side, Side::Flash(device) if self.flash[device].is_stuck(&mut self.rng));
        let hang = self.scenario.limits.flash_stall_ms_max * 1_000_000;
        let takes = if stuck { self.rng.between(hang / 2, 4 * hang) } else { self.rng.latency(mean) };
        let takes = match side {
            Side::Backing(disk) => takes + self.hangs_for(disk),
            Side::Flash(_) => takes,
        };
        if !self.strikes(Sabotage::LostCompletion, 20) {
            self.queue.push(self.now + takes, Event::Complete(side, io.id));
        }
        Ok(())
    }

    /// Returns the data that an I/O writes, and records that the I/O uses its buffer.
    fn payload(&mut self, io: &Io) -> Result<Vec<Tag>, Violation> {
        match (io.op, io.slice) {
            (IoOp::Read | IoOp::Write(_), Some(slice)) => {
                ensure!(u64::from(slice.len) == io.len, "{io:?}: slice and I/O differ in length");
                let start = (u64::from(slice.offset) / UNIT_BYTES) as usize;
                let end = start + (io.len / UNIT_BYTES) as usize;
                if let Some(lent) = self.lent.get_mut(&slice.id) {
                    ensure!(end <= lent.tags.len(), "{io:?} is outside its buffer");
                    let reads = io.op == IoOp::Read;
                    let clash = lent.ios.iter().find(|(_, units, other_reads)| {
                        units.start < end && start < units.end && (reads || *other_reads)
                    });
                    ensure!(clash.is_none(), "{io:?} and {clash:?} use the same part of an engine buffer");
                    lent.ios.push((io.id, start..end, reads));
                    return Ok(if reads { vec![] } else { lent.tags[start..end].to_vec() });
                }
                let buffer = self.buffers.get_mut(&slice.id);
                let buffer = buffer.ok_or_else(|| Violation(format!("{io:?} uses a released buffer")))?;
                buffer.ios += 1;
                ensure!(end <= buffer.tags.len(), "{io:?} is outside its buffer");
                ensure!(!(buffer.replied && io.op == IoOp::Read), "{io:?} uses its buffer after the reply");
                let from_flash = io.op == IoOp::Read && matches!(io.target, Target::Flash(_));
                ensure!(
                    buffer.scribbles == Scribbles::NotIts || from_flash || self.options.sabotage.is_some(),
                    "{io:?} must not use guest memory"
                );
                Ok(if io.op == IoOp::Read { vec![] } else { buffer.tags[start..end].to_vec() })
            }
            (IoOp::Flush | IoOp::Discard | IoOp::WriteZeroes(_), None) => Ok(vec![]),
            (IoOp::WriteJournal, None) => {
                let pages = self.engine.journal_pages(io.id);
                let whole = io.len > 0 && io.len.is_multiple_of(4096) && io.len <= 64 << 10;
                ensure!(
                    whole && pages.len() as u64 == io.len,
                    "{io:?} writes journal pages of {} bytes",
                    pages.len()
                );
                Ok(self.written.tags(pages))
            }
            _ => Err(Violation(format!("{io:?} with the wrong kind of payload"))),
        }
    }

    /// Checks that flash I/O stays inside the segments of the disk's cache, and that no guest I/O
    /// begins while a command waits for the I/O of that cache to end.
    fn check_inside(&self, io: &Io) -> Result<(), Violation> {
        let Target::Flash(device) = io.target else { return Ok(()) };
        if io.op == IoOp::Flush {
            return Ok(());
        }
        let disk = io.slice.and_then(|slice| self.buffers.get(&slice.id)).map(|buffer| buffer.disk);
        if let Some(disk) = disk
            && self.disks[disk].owner.is_none()
            && self.scenario.lives.is_none()
            // With QoS, the engine may have started the I/O before the command and delayed it until
            // now.
            && self.qos.is_none()
        {
            let waits = self.asked.values().find(|asked| asked.changes_cache_of(disk));
            ensure!(waits.is_none(), "{io:?} begins while {waits:?} waits for flash I/O to end");
        }
        let len = self.scenario.segment_bytes;
        let mut at = io.offset;
        while at < io.offset.saturating_add(io.len) {
            let inside = at.wrapping_sub(super::pool::SEGMENTS_START) % len;
            let segment = hob_engine::command::Segment { device, offset: at - inside.min(at) };
            let is_there = match (io.op, disk) {
                (IoOp::WriteJournal, _) => {
                    let owners = self.disks.iter().filter_map(|disk| disk.owner.as_ref());
                    owners.into_iter().any(|owner| owner.has_in_ring(&segment))
                }
                (_, Some(disk)) => self.disks[disk].segments.contains(&segment),
                // The tail of a recovered cache is written again before the cache is used.
                (_, None) => {
                    let mut recovered = self.asked.values().filter(|asked| asked.recovers());
                    self.disks.iter().any(|disk| disk.segments.contains(&segment))
                        || recovered.any(|asked| asked.segments().contains(&segment))
                }
            };
            ensure!(is_there, "{io:?} outside the cache of disk {disk:?}");
            at += len - inside;
        }
        Ok(())
    }

    /// Records the present time as the disk's `quiet_at`, if the disk has no request in flight.
    pub(super) fn note_quiet(&mut self, disk: usize) {
        if self.scenario.lives.is_some()
            && !self.requests.values().any(|other| other.request.disk.0 as usize == disk)
        {
            self.disks[disk].quiet_at = self.clock;
        }
    }

    /// Performs an I/O on its device. Returns `None` for a failed flush whose reply arrives later.
    /// Successful flushes that were sent later may overtake this reply.
    fn perform(&mut self, side: Side, id: IoId) -> Option<Done> {
        let mut done = match side {
            Side::Flash(device) => self.flash[device].complete(id, &mut self.rng),
            Side::Backing(disk) => self.disks[disk].backing.complete(id, &mut self.rng),
        };
        if done.io.op != IoOp::Flush || done.result.is_ok() {
            return Some(done);
        }
        self.flush_failed(side, &mut done);
        let Side::Backing(disk) = side else { return Some(done) };
        let state = &mut self.disks[disk];
        let mut rng = SimRng::new(self.now.0 ^ u64::from(id.0));
        if done.result.is_ok() || !state.backing.loses() || rng.chance(500) {
            return Some(done);
        }
        state.model.hide_loss();
        let late = rng.between(1, 4 * self.scenario.backing_ns);
        self.queue.push(self.now + late, Event::Complete(side, id));
        self.late_failures.insert(id, done);
        None
    }

    pub(super) fn complete(&mut self, side: Side, id: IoId) -> Result<(), Violation> {
        let mut done = match self.late_failures.remove(&id) {
            Some(done) => {
                if let Side::Backing(disk) = side {
                    self.disks[disk].model.report_loss();
                }
                done
            }
            None => match self.perform(side, id) {
                Some(done) => done,
                None => return Ok(()),
            },
        };
        self.ios.remove(&id);
        self.make_extra_stale(&mut done);
        let mut failed = done.result.is_err();
        trace!(self, "completed {} on {:?}: {:?}", id, done.io.target, done.result);
        if let Some(slice) = done.io.slice
            && let Some(lent) = self.lent.get_mut(&slice.id)
        {
            let start = (u64::from(slice.offset) / UNIT_BYTES) as usize;
            lent.ios.retain(|(other, ..)| *other != id);
            if done.io.op == IoOp::Read {
                lent.tags[start..start + done.tags.len()].copy_from_slice(&done.tags);
            }
            self.tally_lent(&done.io, failed);
        } else if let Some(slice) = done.io.slice {
            let buffer = self.buffers.get_mut(&slice.id).expect("checked at submission");
            let start = (u64::from(slice.offset) / UNIT_BYTES) as usize;
            let end = start + done.tags.len();
            buffer.ios -= 1;
            if done.io.op == IoOp::Read {
                buffer.tags[start..end].copy_from_slice(&done.tags);
                // The storage crate zeroes the part of the last sector beyond the disk's end.
                buffer.tags[end..end.next_multiple_of(SECTOR_UNITS)].fill(ZERO);
            }
            if let (Side::Flash(_), Some(direct), false) =
                (side, &mut self.direct, buffer.scribbles == Scribbles::NotIts)
            {
                direct.scribble(buffer, start..end, &mut done);
                failed = false;
            }
            if matches!(side, Side::Flash(_)) {
                self.disks[buffer.disk].tally.flash_io(failed);
            }
        }
        if let Side::Backing(disk) = side {
            let disk = &mut self.disks[disk];
            if failed && matches!(done.io.op, IoOp::Write(_) | IoOp::WriteZeroes(_) | IoOp::Discard) {
                let units = |bytes: u64| (bytes / UNIT_BYTES) as u32;
                disk.model.note_failed_io(units(done.io.offset), units(done.io.len));
            }
            let slice = done.io.slice.filter(|_| done.io.op == IoOp::Read);
            if let Some(request) = slice.and_then(|slice| self.buffers.get(&slice.id)).map(|b| b.request) {
                disk.fetches.iter_mut().filter(|f| f.request == request).for_each(|f| f.ended = self.clock);
            }
        }
        match side {
            Side::Backing(disk) => {
                let sums = self.backing_sums(disk, &done.io, &done.tags);
                if self.end_of_clone(&done.io, done.result, &sums) {
                    self.disks[disk].tally.backing_io(failed);
                }
            }
            Side::Flash(_) => {
                self.engine.handle_completion(self.now, id, done.result, &done.sums);
                self.maybe_kill_after_page(&done.io);
            }
        }
        Ok(())
    }

    /// Returns the number of times that a backing may have lost unflushed data.
    fn backing_losses(&self) -> u64 {
        self.report.restarts + self.report.lossy_flushes
    }

    fn reply(&mut self, reply: Reply) -> Result<(), Violation> {
        let Reply { id, result, outcome, .. } = reply;
        trace!(self, "{reply:?}");
        if self.strikes(Sabotage::LostReply, 20) {
            return Ok(());
        }
        let in_flight = self.requests.remove(&id);
        let InFlight { request, guest, token, refusal, arrived, losses_before } =
            in_flight.ok_or_else(|| Violation(format!("{reply:?} to no request, or a second one")))?;
        ensure!(reply.disk == request.disk, "{reply:?} from another disk than {request:?}");
        if let Some(guest) = guest {
            self.scenario.guests[guest].in_flight -= 1;
            let think = self.now + self.rng.below(self.scenario.backing_ns);
            self.schedule_guest(guest, think);
        }
        self.note_quiet(request.disk.0 as usize);
        self.report.outcomes[outcome as usize] += 1;
        if !self.strikes(Sabotage::Uncounted, 20) {
            self.disks[request.disk.0 as usize].tally.request(&request, outcome);
        }
        if refusal.is_none() {
            self.disks[request.disk.0 as usize].tally.answered(&request);
        }
        if let Some(id) = request.buffer {
            self.buffers.get_mut(&id).expect("held until released").replied = true;
        }
        let cannot =
            matches!(request.op, Op::WriteZeroes(_, Zeroing::FastMayUnmap | Zeroing::FastKeepAllocated));
        match (refusal, result) {
            (Some(expected), result) => {
                ensure!(result == Err(expected) && outcome == Outcome::Refused, "{request:?} got {reply:?}");
                return Ok(());
            }
            (None, Ok(())) => ensure!(outcome != Outcome::BackingError, "{reply:?} is no error"),
            (None, Err(IoError::Unsupported)) => ensure!(cannot, "{request:?} got {reply:?}"),
            (None, Err(IoError::ShuttingDown)) => {
                let disk = &self.disks[request.disk.0 as usize];
                let waited = disk.refuses_waiting && outcome == Outcome::Refused;
                ensure!(waited, "{request:?} got {reply:?}");
            }
            (None, Err(_)) => {
                let lost = outcome == Outcome::DirtyLost
                    && (self.may_lose(request.disk.0 as usize) || self.has_discarded());
                // Without a journal, writes and flushes fail after half a minute.
                let waited = outcome == Outcome::DirtyLost && request.op != Op::Read && self.any_refuses();
                ensure!(lost || waited || outcome == Outcome::BackingError, "{request:?} got {reply:?}");
            }
        }
        self.check_fetched_once(&request, outcome, arrived)?;
        let ok = result.is_ok();
        let is_given_up = !ok && request.op.modifies() && self.backing_losses() - losses_before > LOSSES_MAX;
        self.report.changes_given_up += u64::from(is_given_up);
        let token = if self.check_direct(&request, ok)? { token } else { Token::None };
        self.check_answer(&request, token, (guest, ok, outcome))?;
        request.buffer.iter().for_each(|id| self.buffers.get_mut(id).expect("just looked at").end());
        let (first, count) = Self::units(request.offset, request.len);
        match request.op {
            _ if !ok => Ok(()),
            Op::Read => self.track_read(request.disk.0 as usize, first, count),
            op if op.modifies() => self.track_change(request.disk.0 as usize, first, count),
            _ => Ok(()),
        }
    }

    fn check_answer(
        &mut self,
        request: &Request,
        token: Token,
        (guest, ok, outcome): (Option<usize>, bool, Outcome),
    ) -> Result<(), Violation> {
        let session = guest.map_or(0, |guest| guest as u32 + 1);
        let disk = &mut self.disks[request.disk.0 as usize];
        let (model, backing) = (&mut disk.model, &disk.backing);
        let fua = matches!(
            request.op,
            Op::Write(Durability::Durable)
                | Op::Discard(Durability::Durable)
                | Op::WriteZeroes(Durability::Durable, _)
        );
        match token {
            Token::Read(reading) if ok => {
                let tags = &self.buffers[&request.buffer.expect("reads have one")].tags;
                let start = (request.offset % SECTOR_BYTES / UNIT_BYTES) as usize;
                let seen = &tags[start..start + (request.len / UNIT_BYTES) as usize];
                model.end_read(&reading, seen, backing.now())
            }
            Token::Change(serial) => {
                if outcome == Outcome::WriteBack {
                    model.note_in_flash(serial);
                }
                model.end_change(serial, ok, fua, backing.now(), backing.durable())
            }
            Token::Flush(began) if ok => model.end_flush(session, began, backing.now(), backing.durable()),
            Token::Flush(began) => {
                self.report.flushes_failed_early += u64::from(!model.flush_failed(session, began));
                Ok(())
            }
            Token::Read(_) | Token::None => Ok(()),
        }
    }

    fn release(&mut self, id: BufferId) -> Result<(), Violation> {
        let buffer = self.buffers.get(&id);
        let buffer = buffer.ok_or_else(|| Violation(format!("buffer {id} is given back twice")))?;
        ensure!(buffer.replied, "buffer {id} of {:?} is given back before the reply", buffer.request);
        ensure!(buffer.ios == 0, "buffer {id} is given back with I/O in flight");
        self.give_back(Some(id));
        Ok(())
    }
}
