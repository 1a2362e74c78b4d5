//! Requests of the daemon itself to a migrating disk: flushes, invalidations, and pulls of its
//! cache.
//!
//! A pull copies cached data of a disk from the other host of a migration. Guest requests have
//! priority: only a few pulls are in flight, and a pull takes a buffer only while most of the arena
//! is free.

use std::collections::{BTreeMap, VecDeque};

use hob_engine::command::{Command, Role};
use hob_engine::io::{IoError, Op, PayloadMemory, Promote, Reply, Request};
use hob_engine::migration::{Pull, Pulled, Puller};
use hob_engine::outcome::Outcome;
use hob_engine::units::{BufferId, DiskId, Instant, RequestId, SECTOR_BYTES, SessionId};
use hob_engine::{Engine, REQUEST_BYTES_MAX};
use hob_storage::backing::Backing;
use hob_storage::ring::Ring;

use super::Shard;
use super::clients::{ClientAttachment, ClientKind};
use super::commands::Waiting;
use crate::api::{
    Answer, NO_SUCH_DISK, PeerAttachment, Progress, ShardError, TransferCall, Transport, reply,
};

/// Bit in the upper half of a request id that marks requests of the daemon. Session numbers of
/// clients are smaller.
const OWN: u32 = SessionId::DAEMON_BIT;

/// Maximum number of pulls in flight per disk.
const PULLS_MAX: u32 = 8;

/// Duration of a pull, in nanoseconds, above which fewer pulls may be in flight. The other host's
/// bandwidth limit or the network is slow then, and guests' reads from the other host wait behind
/// the pulls in flight. So does an invalidation of data that is being pulled, for which the
/// hand-over waits.
const SLOW_NS: u64 = 500_000_000;

/// Duration of a pull, in nanoseconds, below which more pulls may be in flight.
const QUICK_NS: u64 = 250_000_000;

/// Maximum size of one pull, in bytes.
const PULL_BYTES_MAX: u64 = 512 << 10;

/// Maximum number of [`Op::Forget`] requests to the engine that are in flight for one invalidation.
/// Each request invalidates the cached data of one part of the disk.
const FORGETS_MAX: u32 = 64;

/// Pause of a disk's pulls after flash was busy, in nanoseconds.
const BUSY_NS: u64 = 20_000_000;

/// Pause of a disk's pulls after the other host failed to deliver data, in nanoseconds.
const FAILED_NS: u64 = 1_000_000_000;

/// State of pulling one disk's cached data from another host.
struct CacheTransfer {
    puller: Puller,
    size_bytes: u64,
    pulls: bool,
    in_flight: u32,
    limit: PullLimit,
    /// No pull starts before this time.
    pause: Option<Instant>,
    /// Bytes of pulls whose range changed during the pull, so that the range must be pulled again.
    again_bytes: u64,
}

/// Number of pulls that may be in flight for a disk: 1 to [`PULLS_MAX`], by the duration of the
/// latest pulls.
struct PullLimit(u32);

impl PullLimit {
    fn note(&mut self, duration_ns: u64) {
        if duration_ns > SLOW_NS {
            self.0 = self.0.saturating_sub(1).max(1);
        } else if duration_ns < QUICK_NS {
            self.0 = (self.0 + 1).min(PULLS_MAX);
        }
    }
}

/// A call of the daemon that needs several requests to one disk. The shard answers the call after
/// the last of these requests.
struct Job {
    answer: Answer<()>,
    disk: DiskId,
    op: Op,
    /// Byte ranges that are not submitted yet.
    ranges: VecDeque<(u64, u64)>,
    in_flight: u32,
    result: Result<(), IoError>,
}

enum Asked {
    /// A pull, and the time at which it was submitted.
    Pull(DiskId, Pull, Instant),
    Job(u64),
}

/// The cache transfers and invalidations of all disks of a shard.
#[derive(Default)]
pub(super) struct CacheTransfers {
    transfers: BTreeMap<DiskId, CacheTransfer>,
    jobs: BTreeMap<u64, Job>,
    asked: BTreeMap<u32, Asked>,
    last_job: u64,
    last_request: u32,
    /// True if pulls that found no room in the cache are to be tried again.
    room: bool,
}

impl CacheTransfers {
    pub(super) fn owns(id: RequestId) -> bool {
        (id.0 >> 32) as u32 & OWN != 0
    }

    /// Handles the engine's reply to a pull or to a job's request.
    pub(super) fn handle_reply(&mut self, now: Instant, reply: &Reply, is_standby: bool) {
        self.room = true;
        match self.asked.remove(&(reply.id.0 as u32)) {
            Some(Asked::Pull(disk, pull, since)) => {
                if let Some(transfer) = self.transfers.get_mut(&disk) {
                    transfer.limit.note(now.0.saturating_sub(since.0));
                }
                self.pull_ended(now, disk, pull, reply, is_standby);
            }
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
        let Some(transfer) = self.transfers.get_mut(&disk) else { return };
        transfer.in_flight -= 1;
        let (how, pause_ns) = match (reply.result, reply.outcome) {
            (Ok(()), Outcome::MissFlashBusy) => (Pulled::Again, BUSY_NS),
            (Ok(()), _) => (Pulled::Done, 0),
            // The pull failed because the disk's own backing fails. A guest that reads this data
            // receives the error.
            (Err(_), _) if !is_standby => (Pulled::Done, 0),
            (Err(_), _) => (Pulled::Again, FAILED_NS),
        };
        if pause_ns > 0 {
            transfer.pause = Some(now + pause_ns);
        }
        let before = transfer.puller.pulled_bytes();
        transfer.puller.ended(pull, how);
        if how == Pulled::Done && transfer.puller.pulled_bytes() == before {
            transfer.again_bytes += (pull.end - pull.first) * SECTOR_BYTES;
        }
    }

    fn end_job(&mut self, number: u64) {
        if self.jobs.get(&number).is_some_and(|job| job.in_flight == 0 && job.ranges.is_empty())
            && let Some(job) = self.jobs.remove(&number)
        {
            let failed =
                |error| ShardError::Unusable(format!("the engine refused the request with {error:?}"));
            reply(job.answer, job.result.map_err(failed));
        }
    }

    fn start_job(&mut self, disk: DiskId, op: Op, ranges: VecDeque<(u64, u64)>, answer: Answer<()>) {
        self.last_job += 1;
        let job = Job { answer, disk, op, ranges, in_flight: 0, result: Ok(()) };
        self.jobs.insert(self.last_job, job);
        self.end_job(self.last_job);
    }

    /// Submits job requests, which need no buffer. Clients that hold all buffers may be waiting for
    /// these requests. Returns false if it submitted none.
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

    /// Submits pulls while no client waits for a buffer. Returns false if it submitted none.
    pub(super) fn pump_pulls(&mut self, now: Instant, ring: &mut Ring, engine: &mut Engine) -> bool {
        let is_due = self.poll_timeout().is_some_and(|at| at <= now);
        if self.transfers.is_empty() || !(std::mem::take(&mut self.room) || is_due) {
            return false;
        }
        let mut progress = false;
        for (disk, transfer) in &mut self.transfers {
            if transfer.pause.is_some_and(|at| at > now) {
                continue;
            }
            transfer.pause = None;
            while transfer.pulls && transfer.in_flight < transfer.limit.0 {
                let Some(pull) = transfer.puller.next() else { break };
                let Some((offset, len, buffer)) = permit(ring, *disk, pull, transfer.size_bytes) else {
                    transfer.puller.ended(pull, Pulled::Again);
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
                    transfer.puller.ended(pull, Pulled::Again);
                    break;
                }
                progress = true;
                transfer.in_flight += 1;
                self.asked.insert(id.0 as u32, Asked::Pull(*disk, pull, now));
            }
        }
        progress
    }

    /// Records that pulls that found no room in the cache are to be tried again.
    pub(super) fn retry(&mut self) {
        self.room = true;
    }

    /// Returns the earliest time at which a paused pull continues; `None` if no pull is paused.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.transfers.values().filter_map(|transfer| transfer.pause).min()
    }

    /// Removes the transfers of a disk. Requests in flight still end normally.
    pub(super) fn remove(&mut self, disk: DiskId) {
        self.transfers.remove(&disk);
        for job in self.jobs.values_mut().filter(|job| job.disk == disk) {
            job.ranges.clear();
            job.result = Err(IoError::ShuttingDown);
        }
        let numbers: Vec<u64> = self.jobs.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.end_job(number));
    }

    /// Records the new size of a disk that grew.
    pub(super) fn grow(&mut self, disk: DiskId, size_bytes: u64) {
        if let Some(transfer) = self.transfers.get_mut(&disk) {
            transfer.size_bytes = size_bytes;
        }
    }

    fn transfer(&mut self, disk: DiskId, size_bytes: u64) -> &mut CacheTransfer {
        self.room = true;
        self.transfers.entry(disk).or_insert_with(|| CacheTransfer {
            puller: Puller::new(PULL_BYTES_MAX),
            size_bytes,
            pulls: false,
            in_flight: 0,
            limit: PullLimit(1),
            pause: None,
            again_bytes: 0,
        })
    }
}

fn next_id(last: &mut u32) -> RequestId {
    *last = last.wrapping_add(1);
    RequestId(u64::from(OWN) << 32 | u64::from(*last))
}

/// Returns the byte range of a pull and a buffer for it. Returns `None` if the range is beyond the
/// disk's end, or if the arena has no room for two such buffers. One more buffer of this size must
/// stay free for guests.
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

/// Converts sector ranges into byte ranges of at most the engine's maximum request size.
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
    /// Executes a call about a migrating disk.
    pub(super) fn transfer(&mut self, now: Instant, id: DiskId, call: TransferCall) {
        let size = self.size_of(id);
        match call {
            TransferCall::Own(role, answer) => {
                if role == Role::Away {
                    // This host stops being the owner, so another host must not read data from it
                    // any more, which could be stale.
                    self.clients.close_peers(id, &mut self.ring);
                }
                self.start_command(now, id, Waiting::Plain(answer), Command::Own(role));
            }
            TransferCall::Watch(watch, answer) => {
                self.start_command(now, id, Waiting::Plain(answer), Command::Watch(watch));
            }
            TransferCall::TakeChanged(answer) => {
                reply(answer, Ok(self.engine.take_changed(id).map(Box::new)))
            }
            TransferCall::Hottest(answer) => reply(answer, Ok(self.engine.hottest_blocks(id))),
            TransferCall::Extents(blocks, answer) => {
                reply(answer, Ok(self.engine.valid_extents(id, &blocks)))
            }
            TransferCall::AttachPeer(attachment) => self.attach_peer(now, id, *attachment),
            TransferCall::Pull => {
                if let Some(size) = size {
                    self.transfers.transfer(id, size).pulls = true;
                }
            }
            TransferCall::SetPeer(peer) => {
                if let Some((backing, ring)) = self.backing(id) {
                    backing.set_peer(ring, now, peer);
                }
                self.collect(now, id);
            }
            TransferCall::LeavePeer => {
                if let Some((backing, ring)) = self.backing(id) {
                    backing.leave_peer(ring, now);
                }
                self.collect(now, id);
            }
            TransferCall::Progress(answer) => reply(answer, Ok(self.transfer_progress(id))),
            TransferCall::Flush(_, answer)
            | TransferCall::Forget(_, answer)
            | TransferCall::Listed(_, answer)
            | TransferCall::TakeOver(answer)
            | TransferCall::Restart(answer)
                if size.is_none() =>
            {
                reply(answer, Err(NO_SUCH_DISK));
            }
            TransferCall::Flush(op, answer) => {
                self.transfers.start_job(id, op, VecDeque::from([(0, 0)]), answer);
            }
            TransferCall::Forget(ranges, answer) => {
                let size = size.unwrap_or_default();
                let transfer = self.transfers.transfer(id, size);
                ranges.iter().for_each(|(first, end)| transfer.puller.changed(*first, *end));
                self.transfers.start_job(id, Op::Forget, pieces(&ranges, size), answer);
            }
            TransferCall::Restart(answer) => {
                let size = size.unwrap_or_default();
                let transfer = self.transfers.transfer(id, size);
                (transfer.puller, transfer.pulls) = (Puller::new(PULL_BYTES_MAX), false);
                let all = pieces(&[(0, size.div_ceil(SECTOR_BYTES))], size);
                self.transfers.start_job(id, Op::Forget, all, answer);
            }
            TransferCall::Listed(ranges, answer) => {
                for (first, end) in &ranges {
                    if let Some((backing, _)) = self.backing(id) {
                        backing.peer_has(*first, *end);
                    }
                }
                self.transfers.transfer(id, size.unwrap_or_default()).puller.add(ranges);
                reply(answer, Ok(()));
            }
            TransferCall::TakeOver(answer) => {
                if let Some((backing, ring)) = self.backing(id) {
                    backing.take_over(ring, now);
                }
                if let Some(transfer) = self.transfers.transfers.get_mut(&id) {
                    // Pulls start again when this host knows from where to pull.
                    transfer.pulls = false;
                }
                self.collect(now, id);
                self.start_command(now, id, Waiting::Plain(answer), Command::Own(Role::Here));
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
                kind: ClientKind::Peer,
            };
            self.clients.attach(now, &mut self.ring, id, attachment, negotiated, &leftover);
        }
    }

    fn transfer_progress(&mut self, id: DiskId) -> Progress {
        let has_peer = self.backing(id).is_some_and(|(backing, _)| backing.has_peer());
        let Some(transfer) = self.transfers.transfers.get(&id) else {
            return Progress { has_peer, ..Progress::default() };
        };
        let puller = &transfer.puller;
        Progress {
            pulled_bytes: puller.pulled_bytes() + transfer.again_bytes,
            again_bytes: puller.pulled_bytes().saturating_sub(puller.valid_bytes()) + transfer.again_bytes,
            left_bytes: puller.left_bytes(),
            ranges: puller.ranges() as u64,
            has_peer,
        }
    }

    fn backing(&mut self, id: DiskId) -> Option<(&mut Backing, &mut Ring)> {
        let backing = self.backings.get_mut(id)?;
        Some((backing, &mut self.ring))
    }

    pub(super) fn size_of(&self, id: DiskId) -> Option<u64> {
        Some(self.backings.get(id)?.info().size_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_pulls_leave_one_in_flight_and_quick_pulls_all() {
        let mut limit = PullLimit(1);
        for _ in 0..2 * PULLS_MAX {
            limit.note(QUICK_NS - 1);
        }
        assert_eq!(limit.0, PULLS_MAX);
        limit.note(SLOW_NS);
        assert_eq!(limit.0, PULLS_MAX, "neither slow nor quick");
        for _ in 0..2 * PULLS_MAX {
            limit.note(SLOW_NS + 1);
        }
        assert_eq!(limit.0, 1);
    }
}
