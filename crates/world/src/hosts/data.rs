//! Simulates reads between hosts. A host in standby answers each read with the owner's data, even
//! if the host has pulled that data to its own flash. After the hand-over, the new owner reads from
//! the former owner's flash.
//!
//! Only the owner answers standby reads. A host that has handed the disk over refuses these reads,
//! because its data may be stale. An earlier process of the standby host may have served the disk,
//! written to it, and crashed before it recorded the hand-over. A former owner answers only the
//! reads of the process that took the disk over. That process reads only ranges that have not
//! changed since the hand-over.

use hob_engine::command::Role;
use hob_engine::io::{Io, IoError, Op};
use hob_engine::migration::{Phase, Pull, Pulled, Puller, RemainingRanges, Session, heat};
use hob_engine::units::SECTOR_BYTES;

use super::host::{Carry, DISK, PeerRead, Pulling, Who};
use super::network::{Kind, Packet, Sender};
use super::plan::MS;
use super::{Event, Sabotage, Simulation, trace};
use crate::Violation;
use crate::content::{Tag, UNIT_BYTES};
use crate::media::Done;

/// Maximum number of pulls in flight per host.
const PULLS_MAX: u32 = 4;

const PULL_BYTES_MAX: u64 = 32 << 10;

/// Number of ranges per page of the list of cached data.
const PAGE_RANGES: usize = 2;

/// Maximum number of requests for one page of the list after the hand-over.
const PAGE_TRIES_MAX: u32 = 5;

/// Retry interval of a read that the other host (source or former owner) does not answer,
/// nanoseconds.
const AGAIN_NS: u64 = 300 * MS;

impl Simulation<'_> {
    /// Sends a read of the engine to another host, if another host should answer it. Another host
    /// answers all reads in standby, and reads of data that the former owner may have. Returns
    /// false if the caller must read from the backing.
    pub(super) fn is_read_elsewhere(&mut self, host: usize, io: &Io) -> Result<bool, Violation> {
        let ram = self.hosts[host].ram.as_ref().expect("the host is up");
        if ram.engine.role(DISK) != Some(Role::Standby) && self.former_of(host, io).is_none() {
            return Ok(false);
        }
        let buffer = io.slice.map(|slice| slice.id);
        let mine = ram.requests.values().find(|it| it.request.buffer == buffer);
        let is_pull = mine.is_some_and(|it| matches!(it.who, Who::Puller(_)));
        self.ask(host, PeerRead { io: *io, tries: 0, is_pull })?;
        Ok(true)
    }

    /// Returns the former owner if it may have all data of this read.
    fn former_of(&self, host: usize, io: &Io) -> Option<(usize, Session)> {
        let ram = self.hosts[host].ram.as_ref()?;
        let former = ram.former.as_ref()?;
        let pulling = ram.pulling.as_ref().filter(|it| it.reads_former())?;
        let (first, end) = sectors_of(io);
        let has = pulling.left_behind.has_all(first, end) || self.strikes(Sabotage::FormerOwnerForAll);
        has.then_some((former.host, former.session))
    }

    /// Records a write that is about to be sent to the backing. From now on, the former owner's
    /// data of the written range is outdated.
    pub(super) fn note_changed(&mut self, host: usize, io: &Io) {
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        if let Some(pulling) = &mut ram.pulling {
            let (first, end) = sectors_of(io);
            pulling.left_behind.changed(first, end);
        }
    }

    /// Sends a read to the host that may have the data, or to the backing if this host serves the
    /// disk. In standby, the read fails if the host does not know which host to read from.
    fn ask(&mut self, host: usize, read: PeerRead) -> Result<(), Violation> {
        let former = self.former_of(host, &read.io);
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let awaits = ram.destination.awaits().or(ram.pulling.as_ref().map(|pulling| pulling.session));
        let (to, session, kind) = match (ram.engine.role(DISK), former, awaits) {
            (Some(Role::Standby), _, Some(session)) => {
                if let Some(tags) = self.shadowed(host, &read.io) {
                    return self.read_elsewhere(host, read.io, Ok(tags));
                }
                let kind = if read.is_pull { Kind::Teller } else { Kind::Owner };
                (self.attempts[&session], session, kind)
            }
            (Some(Role::Standby) | None, ..) => {
                return self.read_elsewhere(host, read.io, Err(IoError::Failed));
            }
            (_, Some((former, session)), _) if read.tries == 0 => (former, session, Kind::Former),
            _ => return self.read_from_backing(host, read.io),
        };
        let from = self.sender(host);
        let (offset, len) = (read.io.offset, read.io.len);
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        ram.peer_reads.insert(from.number, read);
        let at = self.now + self.rng.latency(AGAIN_NS);
        self.queue.push(at, Event::ReadAgain(host, from.life, from.number));
        self.send(host, to, Packet::Ask { from, session, kind, offset, len });
        Ok(())
    }

    /// Returns data that the host pulled earlier, if the sabotage of this history makes the host
    /// answer standby reads with pulled data.
    fn shadowed(&self, host: usize, io: &Io) -> Option<Vec<Tag>> {
        let believes = self.strikes(Sabotage::BelievedAwaited) && self.hosts[host].life > 1;
        if !self.strikes(Sabotage::StandbyFromCache) && !believes {
            return None;
        }
        let units = io.offset / UNIT_BYTES..(io.offset + io.len) / UNIT_BYTES;
        units.map(|unit| self.hosts[host].shadow.get(&unit).copied()).collect()
    }

    /// Ends the connection to the other host. Reads in flight fail, and this host pulls no more
    /// data.
    pub(super) fn hang_up(&mut self, host: usize) -> Result<(), Violation> {
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        ram.hangs_up = true;
        ram.pulling = None;
        for read in std::mem::take(&mut ram.peer_reads).into_values() {
            if self.hosts[host].ram.is_none() {
                // The host crashed at a step of an earlier read's result.
                break;
            }
            self.read_elsewhere(host, read.io, Err(IoError::Failed))?;
        }
        Ok(())
    }

    /// Cancels pulls in flight.
    pub(super) fn stop_pulls(&mut self, host: usize) -> Result<(), Violation> {
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let pulls = ram.peer_reads.iter().filter(|(_, read)| read.is_pull);
        let pulls: Vec<u64> = pulls.map(|(number, _)| *number).collect();
        for number in pulls {
            let Some(ram) = self.hosts[host].ram.as_mut() else { break };
            if let Some(read) = ram.peer_reads.remove(&number) {
                self.read_elsewhere(host, read.io, Err(IoError::Failed))?;
            }
        }
        Ok(())
    }

    pub(super) fn read_again(&mut self, host: usize, number: u64) -> Result<(), Violation> {
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        match ram.peer_reads.remove(&number) {
            Some(read) => self.unanswered_read(host, read),
            None => Ok(()),
        }
    }

    fn unanswered_read(&mut self, host: usize, mut read: PeerRead) -> Result<(), Violation> {
        read.tries += 1;
        let ram = self.hosts[host].ram.as_ref().expect("the host is up");
        // A pull is not retried. The owner answers pulls only in their migration attempt, and guest
        // requests that wait for the pull would wait forever.
        let gives_up = self.plan.gives_up && read.tries > 3 || ram.hangs_up || read.is_pull;
        if gives_up && ram.engine.role(DISK) == Some(Role::Standby) {
            return self.read_elsewhere(host, read.io, Err(IoError::Failed));
        }
        self.ask(host, read)
    }

    fn read_elsewhere(
        &mut self,
        host: usize,
        io: Io,
        result: Result<Vec<Tag>, IoError>,
    ) -> Result<(), Violation> {
        let (tags, result) = match result {
            Ok(tags) => (tags, Ok(())),
            Err(error) => (vec![], Err(error)),
        };
        self.completed(host, io.id, Done { io, result, tags, sums: vec![] })
    }

    /// Handles data from another host.
    pub(super) fn data(&mut self, host: usize, number: u64, data: Option<Vec<Tag>>) -> Result<(), Violation> {
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let Some(read) = ram.peer_reads.remove(&number) else { return Ok(()) };
        let from_former = ram.engine.role(DISK) == Some(Role::Here);
        match data {
            Some(tags) => {
                self.report.from_former += u64::from(from_former);
                self.read_elsewhere(host, read.io, Ok(tags))
            }
            None if from_former || read.is_pull => {
                self.report.former_lacks += u64::from(from_former);
                self.unanswered_read(host, read)
            }
            None => {
                // The other host has no answer now. The timeout retries the read.
                let ram = self.hosts[host].ram.as_mut().expect("the host is up");
                ram.peer_reads.insert(number, read);
                Ok(())
            }
        }
    }

    /// Returns true if this host is handing the disk over, or has handed it over and the attempt is
    /// not finished.
    pub(super) fn has_departed(&self, host: usize) -> bool {
        let phase = self.hosts[host].source().map(|source| source.phase());
        matches!(phase, Some(Phase::HandingOver | Phase::Serving | Phase::Over))
    }

    /// Handles another host's read.
    pub(super) fn asked(
        &mut self,
        host: usize,
        from: Sender,
        session: Session,
        kind: Kind,
        (offset, len): (u64, u64),
    ) -> Result<(), Violation> {
        let source = self.hosts[host].source();
        let is_its = source.is_some_and(|source| source.session() == session);
        let role = self.hosts[host].role();
        let phase = source.map(|source| source.phase());
        let (hands_over, always) = (phase.is_some(), self.strikes(Sabotage::AwayServesStandby));
        let serves = match (kind, role) {
            (Kind::Owner, Some(Role::Here | Role::Frozen)) => hands_over,
            (Kind::Teller, Some(Role::Here | Role::Frozen)) => is_its,
            (Kind::Owner | Kind::Teller, Some(Role::Away)) => is_its && always,
            (Kind::Former, Some(Role::Away)) => is_its && phase == Some(Phase::Serving),
            _ => false,
        };
        let who = Who::Peer(from.host, from.life, from.number);
        if !serves || !self.request(host, who, Op::ReadForPeer, offset, len)? {
            self.give(host, from.host, from.life, from.number, None);
        }
        Ok(())
    }

    /// Sends the requested data to another host.
    pub(super) fn give(&mut self, host: usize, to: usize, life: u32, number: u64, data: Option<Vec<Tag>>) {
        self.send(host, to, Packet::Data { life, number, data });
    }

    /// Starts to pull cached data when the disk is in standby.
    pub(super) fn begin_pulling(&mut self, host: usize, session: Session) -> Result<(), Violation> {
        let from = self.attempts[&session];
        let carry = self.hosts[from].order.map_or(Carry::Drop, |order| order.carry);
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        ram.pulling = Some(Pulling {
            session,
            carry,
            puller: Puller::new(PULL_BYTES_MAX),
            left_behind: RemainingRanges::new(u64::from(self.plan.units) * UNIT_BYTES),
            page: 0,
            page_tries: 0,
            has_list: carry == Carry::Drop,
            in_flight: 0,
            is_due: false,
            after: false,
        });
        self.ask_list(host, 0)
    }

    /// Requests this page of the list of cached data, if the page is still the next one that the
    /// host needs.
    pub(super) fn ask_list(&mut self, host: usize, page: usize) -> Result<(), Violation> {
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let Some(pulling) = ram.pulling.as_mut().filter(|it| !it.has_list && it.page == page) else {
            return Ok(());
        };
        pulling.page_tries += 1;
        if pulling.after && (!pulling.reads_former() || pulling.page_tries > PAGE_TRIES_MAX) {
            // The host stops asking: no host has the list any more, or the page was requested too
            // often.
            pulling.has_list = true;
            return self.pull(host);
        }
        let session = pulling.session;
        let to = self.attempts[&session];
        let from = self.sender(host);
        let at = self.now + self.rng.latency(AGAIN_NS);
        self.queue.push(at, Event::ListAgain(host, from.life, page));
        self.send(host, to, Packet::AskList { from, session, page });
        Ok(())
    }

    pub(super) fn asked_for_list(
        &mut self,
        host: usize,
        from: Sender,
        session: Session,
        page: usize,
    ) -> Result<(), Violation> {
        let is_its = self.hosts[host].source().is_some_and(|source| source.session() == session);
        let serves = is_its && self.hosts[host].role().is_some();
        let ranges = self.hosts[host].ram.as_ref().filter(|_| serves).map(|ram| {
            let blocks = ram.engine.hottest_blocks(DISK);
            let extents = ram.engine.valid_extents(DISK, &blocks);
            heat::encode(extents.chunks(PAGE_RANGES).nth(page).unwrap_or_default())
        });
        self.send(host, from.host, Packet::List { life: from.life, session, page, ranges });
        Ok(())
    }

    /// Handles a page of the list of cached data. An unexpected page is ignored, except that the
    /// first page restarts the list.
    pub(super) fn listed(
        &mut self,
        host: usize,
        session: Session,
        page: usize,
        ranges: Option<Vec<u8>>,
    ) -> Result<(), Violation> {
        let size = u64::from(self.plan.units) * UNIT_BYTES;
        let believes = self.strikes(Sabotage::LatePages);
        let ram = self.hosts[host].ram.as_mut().expect("the host is up");
        let Some(pulling) = &mut ram.pulling else { return Ok(()) };
        let is_expected = !pulling.has_list && (page == pulling.page || page == 0);
        let Some(ranges) = ranges.filter(|_| pulling.session == session && is_expected) else {
            return Ok(());
        };
        let ranges = heat::decode(&ranges, size.div_ceil(SECTOR_BYTES)).map_err(|_| {
            Violation(format!("host {host} receives an invalid page of the list: {ranges:?}"))
        })?;
        self.report.late_pages += u64::from(pulling.after);
        if pulling.after && believes {
            let old = std::mem::replace(&mut pulling.left_behind, RemainingRanges::new(size));
            let there = (0..size.div_ceil(SECTOR_BYTES)).filter(|sector| old.has_all(*sector, sector + 1));
            there.for_each(|sector| pulling.left_behind.listed(sector, sector + 1));
        }
        ranges.iter().for_each(|(first, end)| pulling.left_behind.listed(*first, *end));
        (pulling.page, pulling.page_tries) = (page + 1, 0);
        pulling.has_list = ranges.is_empty();
        pulling.puller.add(ranges);
        trace!(self, "host {host} has page {page} of a list, {} bytes are left", pulling.puller.left_bytes());
        let at = self.now + self.rng.latency(self.plan.page_ns);
        self.queue.push(at, Event::ListAgain(host, self.hosts[host].life, page + 1));
        self.pull(host)
    }

    /// Schedules the next pull.
    pub(super) fn pull_soon(&mut self, host: usize, ns: u64) {
        let life = self.hosts[host].life;
        let Some(pulling) = self.hosts[host].ram.as_mut().and_then(|ram| ram.pulling.as_mut()) else {
            return;
        };
        if !std::mem::replace(&mut pulling.is_due, true) {
            self.queue.push(self.now + ns, Event::Pull(host, life));
        }
    }

    pub(super) fn pull_due(&mut self, host: usize) -> Result<(), Violation> {
        if let Some(pulling) = self.hosts[host].ram.as_mut().and_then(|ram| ram.pulling.as_mut()) {
            pulling.is_due = false;
        }
        self.pull(host)
    }

    /// Starts all pulls that are possible now.
    pub(super) fn pull(&mut self, host: usize) -> Result<(), Violation> {
        loop {
            let ram = self.hosts[host].ram.as_mut().expect("the host is up");
            let Some(pulling) = &mut ram.pulling else { return Ok(()) };
            let (pulled, left) = (pulling.puller.pulled_bytes(), pulling.puller.left_bytes());
            let done = pulling.has_list && pulling.puller.is_done();
            ram.destination.handle_progress(pulled, left, done);
            if done && pulling.after && pulling.carry != Carry::Remote {
                // All data has arrived, so the former owner is not needed any more.
                ram.former = None;
            }
            let may = pulling.after && pulling.carry != Carry::Drop || pulling.carry == Carry::Copy;
            if !may || pulling.is_due || pulling.in_flight >= PULLS_MAX {
                return Ok(());
            }
            let Some(pull) = pulling.puller.next() else { return Ok(()) };
            pulling.in_flight += 1;
            let size = u64::from(self.plan.units) * UNIT_BYTES;
            let offset = pull.first * SECTOR_BYTES;
            let len = (pull.end * SECTOR_BYTES).min(size) - offset;
            if !self.request(host, Who::Puller(pull), Op::Pull, offset, len)? {
                self.pulled(host, pull, Pulled::Again, &[]);
                return Ok(());
            }
        }
    }

    /// Handles the end of a pull.
    pub(super) fn pulled(&mut self, host: usize, pull: Pull, how: Pulled, seen: &[Tag]) {
        let first = pull.first * SECTOR_BYTES / UNIT_BYTES;
        let it = &mut self.hosts[host];
        let Some(pulling) = it.ram.as_mut().and_then(|ram| ram.pulling.as_mut()) else { return };
        pulling.puller.ended(pull, how);
        pulling.in_flight = pulling.in_flight.saturating_sub(1);
        let done = u64::from(how == Pulled::Done);
        *if pulling.after { &mut self.report.pulled_after } else { &mut self.report.pulled_before } += done;
        if how == Pulled::Done && !pulling.after {
            let whole = seen.iter().filter(|tag| !crate::content::is_garbage(**tag));
            it.shadow.extend((first..).zip(whole.copied()));
        }
        self.pull_soon(host, if how == Pulled::Done { 0 } else { AGAIN_NS });
    }

    fn read_from_backing(&mut self, host: usize, io: Io) -> Result<(), Violation> {
        self.submit_to_backing(host, io, vec![])
    }
}

fn sectors_of(io: &Io) -> (u64, u64) {
    (io.offset / SECTOR_BYTES, (io.offset + io.len).div_ceil(SECTOR_BYTES))
}
