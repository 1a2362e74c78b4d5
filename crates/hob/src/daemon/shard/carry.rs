//! What the daemon itself asks of a disk that moves from one host to another: flushes, forgetting, and pulling its cache.
//!
//! Pulls fill the cache of a disk whose owner is another host, or was. They give way to guests: there are few at once, and they
//! take a buffer only while most of the arena is free.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;

use hob_engine::command::{Command, CommandError, Role};
use hob_engine::io::{IoError, Op, PayloadMemory, Promote, Reply, Request};
use hob_engine::migration::{Pull, Pulled, Puller};
use hob_engine::outcome::Outcome;
use hob_engine::regions::Regions;
use hob_engine::units::{BufferId, DiskId, Instant, RequestId, SECTOR_BYTES, SessionId};
use hob_engine::{Engine, REQUEST_BYTES_MAX};
use hob_nbd::server::handshake::Negotiated;
use hob_storage::backing::Backing;
use hob_storage::ring::Ring;

use super::Shard;
use super::clients::{ClientAttachment, Whose};
use super::commands::Waiting;
use crate::daemon::nbd_listener::{ConnectionPermit, Transport};
use crate::daemon::shard_api::{Answer, ShardError};

/// Bit of the upper half of the ids of these requests. Connections of clients have smaller numbers.
const OWN: u32 = SessionId::DAEMON_BIT;

/// Pulls at once, per disk.
const PULLS_MAX: u32 = 8;

/// Bytes of one, at most.
const PULL_BYTES_MAX: u64 = 512 << 10;

/// Requests of one forgetting under way at once.
const FORGETS_MAX: u32 = 64;

/// Pause after flash was busy, nanoseconds.
const BUSY_NS: u64 = 20_000_000;

/// Pause after the owner did not deliver, nanoseconds.
const FAILED_NS: u64 = 1_000_000_000;

/// A question or an instruction about a disk that moves. Each with an answer is answered once.
#[derive(Debug)]
pub(crate) enum CarryCall {
    /// Give it another role.
    Own(Role, Answer<()>),
    /// Note where it is changed, from now on or no more.
    Watch(bool, Answer<()>),
    /// Where it was changed since this was asked last; nothing if nowhere.
    TakeChanged(Answer<Option<Box<Regions>>>),
    /// The blocks of its cache, hottest first.
    Hottest(Answer<Vec<u64>>),
    /// What is valid in those blocks, as sectors.
    Extents(Vec<u64>, Answer<Vec<(u64, u64)>>),
    /// A flush: of a guest's kind, or [`Op::Settle`].
    Flush(Op, Answer<()>),
    /// Forget ranges of sectors, and pull again what was pulled of them.
    Forget(Vec<(u64, u64)>, Answer<()>),
    /// The peer has these sectors: to be pulled later.
    Listed(Vec<(u64, u64)>, Answer<()>),
    /// Pull what is listed from now on.
    Pull,
    /// How pulling gets on.
    Progress(Answer<Progress>),
    /// The disk is this host's. Nothing is pulled until it is said again.
    TakeOver(Answer<()>),
    /// Read it at another host: the owner, or who had it before it was taken over.
    SetPeer(Backing),
    /// The other host is asked no more.
    LeavePeer,
    /// Forget all of it, and what is to be pulled.
    Restart(Answer<()>),
    /// Another host reads it.
    AttachPeer(Box<PeerAttachment>),
}

/// A connection of another host.
#[derive(Debug)]
pub(crate) struct PeerAttachment {
    /// Its connection.
    pub(crate) socket: OwnedFd,
    /// What was agreed.
    pub(crate) negotiated: Negotiated,
    /// Bytes that came after the negotiation and have been read.
    pub(crate) leftover: Vec<u8>,
    /// Held for as long as the connection lasts.
    pub(crate) permit: ConnectionPermit,
}

/// How pulling gets on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Bytes pulled.
    pub(crate) pulled_bytes: u64,
    /// Of these, bytes that had been pulled before and were changed since.
    pub(crate) again_bytes: u64,
    /// Bytes to be pulled.
    pub(crate) left_bytes: u64,
    /// Ranges that wait to be pulled.
    pub(crate) ranges: u64,
    /// The host that had the disk is asked still.
    pub(crate) has_peer: bool,
}

/// A disk whose cache is pulled.
struct Carrier {
    puller: Puller,
    size_bytes: u64,
    pulls: bool,
    in_flight: u32,
    /// Nothing is asked for before.
    pause: Option<Instant>,
    /// Bytes that came and had been changed meanwhile, or could not be kept.
    again_bytes: u64,
}

/// Requests that are answered together.
struct Job {
    answer: Answer<()>,
    disk: DiskId,
    op: Op,
    /// Not asked yet: bytes.
    ranges: VecDeque<(u64, u64)>,
    in_flight: u32,
    result: Result<(), IoError>,
}

enum Asked {
    Pull(DiskId, Pull),
    Job(u64),
}

/// All of them.
#[derive(Default)]
pub(super) struct Carriers {
    carriers: BTreeMap<DiskId, Carrier>,
    jobs: BTreeMap<u64, Job>,
    asked: BTreeMap<u32, Asked>,
    last_job: u64,
    last_request: u32,
    /// Something may be pulled that could not be before.
    room: bool,
}

impl Carriers {
    /// Is it a request of these?
    pub(super) fn owns(id: RequestId) -> bool {
        (id.0 >> 32) as u32 & OWN != 0
    }

    /// The engine answers.
    pub(super) fn handle_reply(&mut self, now: Instant, reply: &Reply, is_standby: bool) {
        self.room = true;
        match self.asked.remove(&(reply.id.0 as u32)) {
            Some(Asked::Pull(disk, pull)) => self.pull_ended(now, disk, pull, reply, is_standby),
            Some(Asked::Job(number)) => {
                if let Some(job) = self.jobs.get_mut(&number) {
                    job.in_flight -= 1;
                    job.result = job.result.and(reply.result);
                }
                self.end_job(number);
            }
            None => unreachable!("requests are answered once"),
        }
    }

    fn pull_ended(&mut self, now: Instant, disk: DiskId, pull: Pull, reply: &Reply, is_standby: bool) {
        let Some(carrier) = self.carriers.get_mut(&disk) else { return };
        carrier.in_flight -= 1;
        let (how, pause_ns) = match (reply.result, reply.outcome) {
            (Ok(()), Outcome::MissFlashBusy) => (Pulled::Again, BUSY_NS),
            (Ok(()), _) => (Pulled::Done, 0),
            // The own backing fails: whoever reads it is told.
            (Err(_), _) if !is_standby => (Pulled::Done, 0),
            (Err(_), _) => (Pulled::Again, FAILED_NS),
        };
        if pause_ns > 0 {
            carrier.pause = Some(now + pause_ns);
        }
        let before = carrier.puller.pulled_bytes();
        carrier.puller.ended(pull, how);
        if how == Pulled::Done && carrier.puller.pulled_bytes() == before {
            carrier.again_bytes += (pull.end - pull.first) * SECTOR_BYTES;
        }
    }

    fn end_job(&mut self, number: u64) {
        if self.jobs.get(&number).is_some_and(|job| job.in_flight == 0 && job.ranges.is_empty())
            && let Some(job) = self.jobs.remove(&number)
        {
            let failed = |error| ShardError::Unusable(format!("the disk says {error:?}"));
            let _ = job.answer.send(job.result.map_err(failed));
        }
    }

    fn start_job(&mut self, disk: DiskId, op: Op, ranges: VecDeque<(u64, u64)>, answer: Answer<()>) {
        self.last_job += 1;
        let job = Job { answer, disk, op, ranges, in_flight: 0, result: Ok(()) };
        self.jobs.insert(self.last_job, job);
        self.end_job(self.last_job);
    }

    /// Asks for what waits to be asked for and needs no buffer. Clients may wait for just that, with all buffers. False if it asked for
    /// nothing.
    pub(super) fn pump_jobs(&mut self, now: Instant, engine: &mut Engine) -> bool {
        let mut progress = false;
        for (number, job) in &mut self.jobs {
            while job.in_flight < FORGETS_MAX
                && let Some((offset, len)) = job.ranges.pop_front()
            {
                let id = next_id(&mut self.last_request);
                let request = Request {
                    id,
                    disk: job.disk,
                    op: job.op,
                    offset,
                    len,
                    buffer: None,
                    promote: Promote::Usual,
                    memory: PayloadMemory::Daemon,
                };
                if engine.handle_request(now, request).is_err() {
                    job.ranges.push_front((offset, len));
                    break;
                }
                progress = true;
                job.in_flight += 1;
                self.asked.insert(id.0 as u32, Asked::Job(*number));
            }
        }
        progress
    }

    /// Pulls what there is room for, while no client waits for a buffer. False if that is nothing.
    pub(super) fn pump_pulls(&mut self, now: Instant, ring: &mut Ring, engine: &mut Engine) -> bool {
        let is_due = self.poll_timeout().is_some_and(|at| at <= now);
        if self.carriers.is_empty() || !(std::mem::take(&mut self.room) || is_due) {
            return false;
        }
        let mut progress = false;
        for (disk, carrier) in &mut self.carriers {
            if carrier.pause.is_some_and(|at| at > now) {
                continue;
            }
            carrier.pause = None;
            while carrier.pulls && carrier.in_flight < PULLS_MAX {
                let Some(pull) = carrier.puller.next() else { break };
                let Some((offset, len, buffer)) = permit(ring, *disk, pull, carrier.size_bytes) else {
                    carrier.puller.ended(pull, Pulled::Again);
                    break;
                };
                let id = next_id(&mut self.last_request);
                let request = Request {
                    id,
                    disk: *disk,
                    op: Op::Pull,
                    offset,
                    len,
                    buffer: Some(buffer),
                    promote: Promote::Usual,
                    memory: PayloadMemory::Daemon,
                };
                if engine.handle_request(now, request).is_err() {
                    ring.arena_mut().release(buffer);
                    carrier.puller.ended(pull, Pulled::Again);
                    break;
                }
                progress = true;
                carrier.in_flight += 1;
                self.asked.insert(id.0 as u32, Asked::Pull(*disk, pull));
            }
        }
        progress
    }

    /// There may be room for more.
    pub(super) fn retry(&mut self) {
        self.room = true;
    }

    /// When to look again at what paused.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.carriers.values().filter_map(|carrier| carrier.pause).min()
    }

    /// A disk leaves. What is under way ends as the engine says.
    pub(super) fn remove(&mut self, disk: DiskId) {
        self.carriers.remove(&disk);
        for job in self.jobs.values_mut().filter(|job| job.disk == disk) {
            job.ranges.clear();
            job.result = Err(IoError::ShuttingDown);
        }
        let numbers: Vec<u64> = self.jobs.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.end_job(number));
    }

    /// A disk has that many bytes now.
    pub(super) fn grow(&mut self, disk: DiskId, size_bytes: u64) {
        if let Some(carrier) = self.carriers.get_mut(&disk) {
            carrier.size_bytes = size_bytes;
        }
    }

    fn carrier(&mut self, disk: DiskId, size_bytes: u64) -> &mut Carrier {
        self.room = true;
        self.carriers.entry(disk).or_insert_with(|| Carrier {
            puller: Puller::new(PULL_BYTES_MAX),
            size_bytes,
            pulls: false,
            in_flight: 0,
            pause: None,
            again_bytes: 0,
        })
    }
}

fn next_id(last: &mut u32) -> RequestId {
    *last = last.wrapping_add(1);
    RequestId(u64::from(OWN) << 32 | u64::from(*last))
}

/// Bytes of a pull on the disk, and a buffer for them; nothing if there is none, or the disk ends before. Guests come first: as much
/// again stays free for them.
fn permit(ring: &mut Ring, disk: DiskId, pull: Pull, size_bytes: u64) -> Option<(u64, u64, BufferId)> {
    let offset = pull.first * SECTOR_BYTES;
    let end = (pull.end * SECTOR_BYTES).min(size_bytes);
    let len = end.checked_sub(offset).filter(|len| *len > 0)?;
    let room = len.next_multiple_of(SECTOR_BYTES) as usize;
    let arena = ring.arena_mut();
    let buffer = arena.may_alloc(disk, 2 * room).then(|| arena.alloc_for(disk, room))??;
    if !len.is_multiple_of(SECTOR_BYTES) {
        let tail = hob_engine::io::BufferSlice {
            id: buffer,
            offset: (room - SECTOR_BYTES as usize) as u32,
            len: SECTOR_BYTES as u32,
        };
        arena.slice_mut(tail).fill(0);
    }
    Some((offset, len, buffer))
}

/// The bytes of a disk that those sectors are, in pieces that the engine takes.
fn pieces(ranges: &[(u64, u64)], size_bytes: u64) -> VecDeque<(u64, u64)> {
    let bytes = ranges.iter().map(|(first, end)| {
        (first.saturating_mul(SECTOR_BYTES), end.saturating_mul(SECTOR_BYTES).min(size_bytes))
    });
    let cut = |(from, to): (u64, u64)| {
        (from..to.max(from))
            .step_by(REQUEST_BYTES_MAX as usize)
            .map(move |at| (at, (to - at).min(REQUEST_BYTES_MAX)))
    };
    bytes.flat_map(cut).collect()
}

impl Shard {
    /// Carries out a call about a disk that moves.
    pub(super) fn carry(&mut self, now: Instant, id: DiskId, call: CarryCall) {
        let size = self.size_of(id);
        match call {
            CarryCall::Own(role, answer) => {
                if role == Role::Away {
                    // What the other host reads from here on is not the owner's word.
                    self.clients.close_peers(id, &mut self.ring);
                }
                let command = self.commands.next(Waiting::Plain(answer));
                self.engine.handle_command(now, command, id, Command::Own(role));
            }
            CarryCall::Watch(watch, answer) => {
                let command = self.commands.next(Waiting::Plain(answer));
                self.engine.handle_command(now, command, id, Command::Watch(watch));
            }
            CarryCall::TakeChanged(answer) => {
                let _ = answer.send(Ok(self.engine.take_changed(id).map(Box::new)));
            }
            CarryCall::Hottest(answer) => drop(answer.send(Ok(self.engine.hottest_blocks(id)))),
            CarryCall::Extents(blocks, answer) => {
                let _ = answer.send(Ok(self.engine.valid_extents(id, &blocks)));
            }
            CarryCall::AttachPeer(attachment) => self.attach_peer(now, id, *attachment),
            CarryCall::Pull => {
                if let Some(size) = size {
                    self.carriers.carrier(id, size).pulls = true;
                }
            }
            CarryCall::SetPeer(peer) => {
                if let Some((backing, ring)) = self.backing(id) {
                    backing.set_peer(ring, now, peer);
                }
                self.collect(now, id);
            }
            CarryCall::LeavePeer => {
                if let Some((backing, ring)) = self.backing(id) {
                    backing.leave_peer(ring, now);
                }
                self.collect(now, id);
            }
            CarryCall::Progress(answer) => drop(answer.send(Ok(self.carry_progress(id)))),
            CarryCall::Flush(_, answer)
            | CarryCall::Forget(_, answer)
            | CarryCall::Listed(_, answer)
            | CarryCall::TakeOver(answer)
            | CarryCall::Restart(answer)
                if size.is_none() =>
            {
                let _ = answer.send(Err(ShardError::Command(CommandError::NoSuchDisk)));
            }
            CarryCall::Flush(op, answer) => {
                self.carriers.start_job(id, op, VecDeque::from([(0, 0)]), answer);
            }
            CarryCall::Forget(ranges, answer) => {
                let size = size.unwrap_or_default();
                let carrier = self.carriers.carrier(id, size);
                ranges.iter().for_each(|(first, end)| carrier.puller.changed(*first, *end));
                self.carriers.start_job(id, Op::Forget, pieces(&ranges, size), answer);
            }
            CarryCall::Restart(answer) => {
                let size = size.unwrap_or_default();
                let carrier = self.carriers.carrier(id, size);
                (carrier.puller, carrier.pulls) = (Puller::new(PULL_BYTES_MAX), false);
                let all = pieces(&[(0, size.div_ceil(SECTOR_BYTES))], size);
                self.carriers.start_job(id, Op::Forget, all, answer);
            }
            CarryCall::Listed(ranges, answer) => {
                for (first, end) in &ranges {
                    if let Some((backing, _)) = self.backing(id) {
                        backing.peer_has(*first, *end);
                    }
                }
                self.carriers.carrier(id, size.unwrap_or_default()).puller.add(ranges);
                let _ = answer.send(Ok(()));
            }
            CarryCall::TakeOver(answer) => {
                if let Some((backing, ring)) = self.backing(id) {
                    backing.take_over(ring, now);
                }
                if let Some(carrier) = self.carriers.carriers.get_mut(&id) {
                    // Until it is known from where.
                    carrier.pulls = false;
                }
                self.collect(now, id);
                let command = self.commands.next(Waiting::Plain(answer));
                self.engine.handle_command(now, command, id, Command::Own(Role::Here));
            }
        }
    }

    fn attach_peer(&mut self, now: Instant, id: DiskId, attachment: PeerAttachment) {
        if self.serves(id) {
            let PeerAttachment { socket, negotiated, leftover, permit } = attachment;
            let attachment = ClientAttachment {
                socket,
                promote: Promote::Never,
                transport: Transport::Relayed,
                permit,
                whose: Whose::Peer,
            };
            self.clients.attach(now, &mut self.ring, id, attachment, negotiated, &leftover);
        }
    }

    fn carry_progress(&mut self, id: DiskId) -> Progress {
        let has_peer = self.backing(id).is_some_and(|(backing, _)| backing.has_peer());
        let Some(carrier) = self.carriers.carriers.get(&id) else {
            return Progress { has_peer, ..Progress::default() };
        };
        let puller = &carrier.puller;
        Progress {
            pulled_bytes: puller.pulled_bytes() + carrier.again_bytes,
            again_bytes: puller.pulled_bytes().saturating_sub(puller.valid_bytes()) + carrier.again_bytes,
            left_bytes: puller.left_bytes(),
            ranges: puller.ranges() as u64,
            has_peer,
        }
    }

    fn backing(&mut self, id: DiskId) -> Option<(&mut Backing, &mut Ring)> {
        let backing = self.backings.get_mut(id.0 as usize)?.as_mut()?;
        Some((backing, &mut self.ring))
    }

    pub(super) fn size_of(&self, id: DiskId) -> Option<u64> {
        Some(self.backings.get(id.0 as usize)?.as_ref()?.info().size_bytes)
    }
}
