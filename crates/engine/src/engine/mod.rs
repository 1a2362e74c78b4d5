//! The engine of one shard: the disks it owns, their caches, and everything in flight.
//!
//! Call order: any of `handle_request`, `handle_completion`, `handle_command`, `handle_timeout`, each
//! with the current time; then drain `poll_copy`, and whenever that has nothing, `poll_io`, `poll_reply`,
//! `poll_release` and `poll_event`; then sleep until something completes or `poll_timeout` says. Nothing blocks and nothing calls out.
//!
//! A request claims its sectors, is read from flash or from the backing, is answered, and may then
//! still fill flash before it gives claim and buffer back:
//!
//! ```text
//! read    waiting → copy from memory → reply                   all sectors in memory
//!         waiting → flash read → reply                         all sectors valid
//!                   └ error or wrong checksum ┐
//!         waiting ─────────────────────→ backing read → reply → fill
//! write   waiting → backing write → reply → fill
//! zeroes, discard   waiting → backing change → (backing flush) → reply
//! flush   (commit) → (backing flush) → reply
//! ```
//! A read into a guest's own memory knows only the second of these ways, or is declined (`direct.rs`).
//! A persistent cache adds to this (`commit.rs`, `write_back.rs`, `destage.rs`, `structure.rs`):
//! ```text
//! read    … backing read → (flash read of what is dirty) → reply → fill
//! write   waiting → (commit) → flash write → (commit) → reply          write-back
//!         waiting → (commit of a zone's mark) → backing write …       past the cache
//! ```

mod ahead;
mod bitmaps;
mod care;
mod change;
mod coming;
mod commit;
mod destage;
mod destager;
mod direct;
mod disk;
mod fill;
mod gate;
mod growth;
mod jobs;
mod lent;
mod merge;
mod ownership;
mod read;
mod records;
mod shared;
mod stranded;
mod structure;
#[cfg(test)]
mod tests;
mod tier;
mod write;
mod write_back;

use std::collections::{BTreeMap, VecDeque};

use crate::admission::Run;
use crate::cache::FlashRun;
use crate::claims::{Claims, Kind, Range};
use crate::command::{Access, Event, Role};
use crate::device::{self, Devices, Health};
use crate::io::{BufferCopy, BufferSlice, Io, IoError, IoOp, Op, PayloadMemory, Reply, Request, Target};
use crate::memory::Seen;
use crate::outcome::Outcome;
use crate::qos;
use crate::sizing::Sizing;
use crate::slab::Slab;
use crate::stats::DiskStats;
use crate::units::{BufferId, DiskId, Instant, IoId, RequestId, SECTOR_BYTES, sector_ceil, sector_floor};
use crate::vscsi::Histograms;
use commit::JournalIo;
use disk::Disk;
use gate::Gates;
use jobs::Job;
use lent::Lent;

/// Longest request, bytes. Front ends split what has no payload and is longer.
pub const REQUEST_BYTES_MAX: u64 = 32 << 20;

/// Most disks of one engine; disk ids are below it.
pub const DISKS_MAX: u32 = 1 << 16;

/// Work of the engine's own under way at once, at most.
const JOBS_MAX: u32 = 128;

/// What one engine may use. The I/Os in flight are bounded by these and by the payload buffers: a
/// request has at most one I/O for each sector of its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests in flight; more are handed back.
    pub requests_max: u32,
    /// Bytes of buffers that answered requests may hold while they fill flash. Beyond, and when half
    /// of `requests_max` are such requests, misses are not filled, so slow flash never holds guests up.
    pub fill_bytes_max: u64,
    /// Failed flash I/Os that fence a device.
    pub flash_errors_max: u32,
    /// Errors are forgotten after that long without one, milliseconds.
    pub flash_errors_forgive_ms: u64,
    /// A flash I/O outstanding for longer makes its device's caches be bypassed, milliseconds.
    pub flash_stall_ms_max: u64,
    /// Frames of each persistent cache whose checksums are compared in the background, each second; 0: none, and
    /// missing second copies are not made either.
    pub scrub_frames_per_s: u32,
    /// One unit of I/O where disks compete, bytes.
    pub qos_unit_bytes: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            requests_max: 4096,
            fill_bytes_max: 32 << 20,
            flash_errors_max: 16,
            flash_errors_forgive_ms: 60_000,
            flash_stall_ms_max: 1_000,
            scrub_frames_per_s: 64,
            qos_unit_bytes: qos::UNIT_BYTES_DEFAULT,
        }
    }
}

/// See the module's text.
pub struct Engine {
    limits: Limits,
    health: Health,
    disks: Vec<Option<Box<Disk>>>,
    devices: Devices,
    claims: Claims,
    requests: Slab<Active>,
    ios: Slab<Pending>,
    gates: Gates,
    /// Counts I/Os, to tell apart those that had the same id.
    serial: u64,
    /// Buffer bytes of answered requests that still fill.
    fill_bytes: u64,
    /// Answered requests that still fill.
    filling: u32,
    /// Requests that wait for a disk to become this host's.
    owner_waits: u32,
    /// Requests, and jobs counted on from `requests_max`, that can go on: their claim was granted by another's
    /// leaving, or what they waited for has come.
    runnable: VecDeque<u32>,
    jobs: Slab<Job>,
    /// Buffers for jobs.
    lent: Lent,
    /// Transfers that read ahead.
    aheads: u32,
    /// What journal writes in flight write.
    pages: BTreeMap<IoId, Vec<u8>>,
    /// Disks whose journal or destager may have something to do.
    awake: Vec<DiskId>,
    /// Disks to bring to rest at the end of the current call.
    unsettled: Vec<DiskId>,
    /// Where a read's data lies, or where a fill's will; kept from call to call for its memory only.
    runs: Vec<FlashRun>,
    copy_out: VecDeque<BufferCopy>,
    io_out: VecDeque<Io>,
    reply_out: VecDeque<Reply>,
    declined_out: VecDeque<RequestId>,
    release_out: VecDeque<BufferId>,
    event_out: VecDeque<Event>,
}

/// A request in flight.
struct Active {
    request: Request,
    arrived: Instant,
    /// Its sectors; empty for a flush, which has no claim.
    range: Range,
    phase: Phase,
    /// I/Os outstanding.
    pending: u32,
    /// What kind of run it is part of.
    run: Run,
    /// What memory knows of the run it is part of.
    seen: Seen,
    /// What it will be classified as, as far as known.
    outcome: Outcome,
    /// Buffer bytes counted in `Engine::fill_bytes`.
    fill_bytes: u64,
    /// A change that goes to the backing over dirty data, which it is to replace.
    over_dirty: bool,
    /// Flash did not take all of a write, or did not deliver all of a read to a guest's memory.
    failed: bool,
    /// What of it another disk served: `first..end`.
    shared: Vec<(u64, u64)>,
    /// Cache sectors that flash has taken of it, with their checksums, until all of its writes have ended.
    written: Vec<(u64, u32)>,
    /// Its blocks were to come in and may not: admission has heard of it, and is not asked again.
    not_admitted: bool,
    /// Its zones count it as a write to the backing in flight.
    zoned: bool,
    /// Writes to the backing that had ended when its flush of the backing began.
    flush_mark: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Waiting,
    FlashRead,
    BackingRead,
    /// A read waits for a claim that the destager respects, and then reads the backing.
    ClaimThenBacking,
    /// What is dirty is read over what the backing delivered.
    Overlay,
    BackingChange,
    BackingFlush,
    Fill,
    FlashWrite,
    /// Its dirty edges are destaged.
    Edges,
    /// It waits for a commit, and then begins anew.
    CommitThenChange,
    CommitThenThrough,
    CommitThenReply,
    CommitThenFlush,
}

/// Whose I/O.
#[derive(Clone, Copy, Debug)]
enum Owner {
    Request(u32),
    Job(u32),
    Journal(JournalIo),
}

/// An I/O in flight.
struct Pending {
    owner: Owner,
    disk: DiskId,
    serial: u64,
    target: Target,
    is_write: bool,
    /// When the engine wanted it, and when storage got it.
    wanted: Instant,
    issued: Instant,
    /// The window of what it goes to counts it.
    is_counted: bool,
    /// Of these, a read's that another disk serves are taken off.
    bytes: u64,
    slice: Option<BufferSlice>,
    /// Flash I/O: first of the cache's sectors, and how many.
    sector: u64,
    sectors: u64,
}

impl Engine {
    /// An engine without disks.
    pub fn new(limits: Limits) -> Self {
        assert!(limits.requests_max > 0 && limits.flash_errors_max > 0 && limits.qos_unit_bytes > 0);
        Engine {
            health: Health {
                errors_max: limits.flash_errors_max,
                forgive_ns: limits.flash_errors_forgive_ms * 1_000_000,
                stall_ns_max: limits.flash_stall_ms_max * 1_000_000,
            },
            disks: Vec::new(),
            devices: Devices::default(),
            claims: Claims::new(limits.requests_max + JOBS_MAX),
            requests: Slab::new(limits.requests_max),
            ios: Slab::new(limits.requests_max),
            gates: Gates::default(),
            serial: 0,
            fill_bytes: 0,
            filling: 0,
            owner_waits: 0,
            runnable: VecDeque::new(),
            jobs: Slab::new(JOBS_MAX),
            lent: Lent::default(),
            aheads: 0,
            pages: BTreeMap::new(),
            awake: Vec::new(),
            unsettled: Vec::new(),
            runs: Vec::new(),
            copy_out: VecDeque::new(),
            io_out: VecDeque::new(),
            reply_out: VecDeque::new(),
            declined_out: VecDeque::new(),
            release_out: VecDeque::new(),
            event_out: VecDeque::new(),
            limits,
        }
    }

    /// Takes a request in. It is handed back when as many as `requests_max` are in flight; one that
    /// makes no sense for its disk is taken and answered with an error.
    pub fn handle_request(&mut self, now: Instant, request: Request) -> Result<(), Request> {
        assert_eq!(request.buffer.is_some(), request.op.has_buffer(), "payload buffer of {:?}", request.op);
        assert!(direct::may_have(&request), "{request:?} into a guest's memory");
        if self.requests.len() + self.owner_waits >= self.limits.requests_max {
            return Err(request);
        }
        if let Err(error) = self.check(&request) {
            self.refuse(now, &request, error);
            return Ok(());
        }
        self.pass_owner(now, now, request);
        self.run(now);
        Ok(())
    }

    /// Begins a request that came at `arrived`.
    #[inline]
    fn enter(&mut self, now: Instant, arrived: Instant, request: Request) {
        let disk = self.disk_mut(request.disk);
        disk.in_flight += 1;
        let was_declined = request.memory == PayloadMemory::DaemonAfterGuest;
        disk.ownership.guests += u32::from(!request.op.is_own());
        if was_declined {
            disk.histograms.come_back(request.op);
        } else if !request.op.is_own() {
            disk.histograms.arrive(arrived, &request);
            if !request.passes_by() {
                disk.sizing.note(&request);
            }
        }
        let range = Range {
            disk: request.disk,
            first: request.offset / SECTOR_BYTES,
            end: (request.offset + request.len).div_ceil(SECTOR_BYTES),
        };
        let (run, seen) =
            if was_declined { (Run::Other, Seen::default()) } else { self.observe(&request, range) };
        let slot = self.requests.insert(Active {
            request,
            arrived,
            range,
            phase: Phase::Waiting,
            pending: 0,
            run,
            seen,
            outcome: Outcome::CacheOff,
            fill_bytes: 0,
            over_dirty: false,
            failed: false,
            shared: Vec::new(),
            written: Vec::new(),
            not_admitted: false,
            zoned: false,
            flush_mark: 0,
        });
        match request.op {
            Op::Flush => self.start_flush(now, slot),
            Op::Settle => self.start_settle(now, slot),
            Op::Read | Op::Prefetch | Op::Pull | Op::ReadForPeer => self.enter_read(now, slot),
            Op::Write(_) | Op::Discard(_) | Op::WriteZeroes(..) | Op::Forget => {
                if self.claims.enter(slot, range, Kind::Change, Kind::Change) {
                    self.go_on(now, slot);
                }
            }
        }
        // The request has entered its own claim: it does not wait for what is read after it.
        if let Some(ahead) = seen.wanted {
            self.read_ahead(now, request.disk, ahead);
        }
    }

    /// Takes the end of an I/O in. `sums` are the CRC-32C of each sector that flash I/O moved, in
    /// order; they are not looked at for other I/O, and for failed I/O.
    pub fn handle_completion(&mut self, now: Instant, id: IoId, result: Result<(), IoError>, sums: &[u32]) {
        assert!(self.ios.contains(id.0), "I/O {id} completes once");
        let io = self.ios.remove(id.0);
        self.account(now, &io, result);
        self.gate_passed(now, &io);
        match io.owner {
            Owner::Request(slot) => self.request_io_done(now, slot, &io, result, sums),
            Owner::Job(job) => self.job_io_done(now, job, &io, result, sums),
            Owner::Journal(what) => {
                let bytes = self.pages.remove(&id);
                self.journal_io_done(now, io.disk, what, io.target, bytes, result);
            }
        }
        self.run(now);
    }

    fn request_io_done(
        &mut self,
        now: Instant,
        slot: u32,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        let active = &mut self.requests[slot];
        active.pending -= 1;
        match active.phase {
            Phase::FlashRead => self.flash_read_done(now, slot, io, result, sums),
            Phase::BackingRead => self.backing_read_done(now, slot, result),
            Phase::Overlay => self.overlay_done(now, slot, io, result, sums),
            Phase::BackingChange => self.backing_change_done(now, slot, result),
            Phase::BackingFlush => self.backing_flush_done(now, slot, result),
            Phase::Fill => self.fill_done(now, slot, io, result, sums),
            Phase::FlashWrite => self.flash_write_done(now, slot, io, result, sums),
            phase => panic!("I/O of a request in {phase:?}"),
        }
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.check_devices(now);
        self.pump_gates(now);
        for index in 0..self.disks.len() {
            if self.disks[index].as_ref().and_then(|disk| disk.deadline()).is_some_and(|at| at <= now) {
                self.wake(DiskId(index as u32));
            }
        }
        self.run(now);
    }

    /// When `handle_timeout` wants to be called, if nothing happens before.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let devices = self.devices.iter().filter_map(|device| device.deadline(&self.health));
        let disks = self.disks.iter().flatten().filter_map(|disk| disk.deadline());
        devices.chain(disks).chain(self.gates.deadline()).min()
    }

    /// The next copy to be made. All copies come before anything else that is polled: what is polled then counts on them.
    #[inline]
    pub fn poll_copy(&mut self) -> Option<BufferCopy> {
        self.copy_out.pop_front()
    }

    /// The next I/O for storage.
    #[inline]
    pub fn poll_io(&mut self) -> Option<Io> {
        assert!(self.copy_out.is_empty(), "copies come first");
        self.io_out.pop_front()
    }

    /// The next answer for a front end.
    #[inline]
    pub fn poll_reply(&mut self) -> Option<Reply> {
        assert!(self.copy_out.is_empty(), "copies come first");
        self.reply_out.pop_front()
    }

    /// The next read into a guest's memory that came to nothing: it is to be asked for again, with a buffer of the daemon and as
    /// [`PayloadMemory::DaemonAfterGuest`]. It has no other answer.
    #[inline]
    pub fn poll_declined(&mut self) -> Option<RequestId> {
        self.declined_out.pop_front()
    }

    /// The next buffer that the engine no longer needs.
    #[inline]
    pub fn poll_release(&mut self) -> Option<BufferId> {
        assert!(self.copy_out.is_empty(), "copies come first");
        self.release_out.pop_front()
    }

    /// The next thing the daemon should know.
    pub fn poll_event(&mut self) -> Option<Event> {
        assert!(self.copy_out.is_empty(), "copies come first");
        self.event_out.pop_front()
    }

    /// Gives the engine a buffer of its own, for destaging and the like; without any, no cache can write back. `bytes` is a
    /// multiple of the largest block.
    pub fn lend(&mut self, buffer: BufferId, bytes: u32) {
        self.lent.add(buffer, bytes);
    }

    /// The pages that an I/O with [`IoOp::WriteJournal`] writes: `Io::len` bytes.
    pub fn journal_pages(&self, io: IoId) -> &[u8] {
        self.pages.get(&io).map_or(&[], Vec::as_slice)
    }

    /// What a disk did until now.
    pub fn stats(&self, now: Instant, disk: DiskId) -> Option<DiskStats> {
        self.disks.get(disk.0 as usize)?.as_ref().map(|disk| disk.snapshot(now))
    }

    /// Does a disk's backing have everything that was acknowledged? Otherwise what it says of its holes does not hold for
    /// the disk.
    pub fn backing_has_all(&self, disk: DiskId) -> bool {
        self.disks.get(disk.0 as usize).and_then(Option::as_ref).is_some_and(|disk| disk.backing_has_all())
    }

    /// What a disk was asked for until now.
    pub fn histograms(&self, disk: DiskId) -> Option<&Histograms> {
        self.disks.get(disk.0 as usize)?.as_ref().map(|disk| &*disk.histograms)
    }

    /// What caches of other sizes would have done with a disk's requests until now.
    pub fn sizing(&self, now: Instant, disk: DiskId) -> Option<Sizing> {
        self.disks.get(disk.0 as usize)?.as_ref().map(|disk| disk.sizing.report(now))
    }

    /// Requests in flight, fills included.
    pub fn in_flight(&self) -> u32 {
        self.requests.len() + self.owner_waits
    }

    fn check(&self, request: &Request) -> Result<(), IoError> {
        let Some(disk) = self.disks.get(request.disk.0 as usize).and_then(Option::as_ref) else {
            return Err(IoError::ShuttingDown);
        };
        let end = request.offset.checked_add(request.len);
        let fits = end.is_some_and(|end| end <= disk.config.size_bytes);
        let sized = match request.op {
            Op::Flush | Op::Settle => request.len == 0,
            _ => (1..=REQUEST_BYTES_MAX).contains(&request.len),
        };
        if disk.removing.is_some() {
            Err(IoError::ShuttingDown)
        } else if !fits || !sized {
            Err(IoError::Invalid)
        } else if request.op.modifies() && disk.config.access == Access::ReadOnly {
            Err(IoError::ReadOnly)
        } else {
            Ok(())
        }
    }

    /// Shows a new read or write to the admission of its disk's cache, and to memory: what run is it part of for
    /// each?
    #[inline]
    fn observe(&mut self, request: &Request, range: Range) -> (Run, Seen) {
        let disk = self.disk_mut(request.disk);
        if request.passes_by() || request.op.is_own() || disk.ownership.role != Role::Here {
            return (Run::Other, Seen::default());
        }
        let run = match (request.op, &mut disk.cache) {
            (Op::Read | Op::Write(_), Some(cache)) => cache.observe(range.first, range.end),
            _ => Run::Other,
        };
        let seen = match (request.op, &mut disk.memory) {
            (Op::Read, Some(memory)) => memory.observe(range.first, range.end),
            _ => Seen::default(),
        };
        (run, seen)
    }

    fn refuse(&mut self, now: Instant, request: &Request, error: IoError) {
        if let Some(Some(disk)) = self.disks.get_mut(request.disk.0 as usize) {
            disk.record(now, now, request, Outcome::Refused);
        }
        let Request { id, disk, .. } = *request;
        self.reply_out.push_back(Reply { id, disk, result: Err(error), outcome: Outcome::Refused });
        self.release_out.extend(request.buffer);
    }

    /// Starts what became possible, until nothing more does.
    fn run(&mut self, now: Instant) {
        loop {
            if let Some(slot) = self.runnable.pop_front() {
                self.go_on(now, slot);
            } else if let Some(disk) = self.unsettled.pop() {
                self.settle(now, disk);
            } else if let Some(disk) = self.awake.pop() {
                if self.disks[disk.0 as usize].is_some() {
                    self.disk_mut(disk).awake = false;
                    self.pump_destage(now, disk);
                    self.pump_care(now, disk);
                    self.pump_structure(now, disk);
                    self.pump_journal(now, disk);
                }
            } else {
                return;
            }
        }
    }

    /// A request or a job has its claim, or what it waited for.
    fn go_on(&mut self, now: Instant, slot: u32) {
        let Some(slot) = slot.checked_sub(self.limits.requests_max).map_or(Some(slot), |job| {
            self.start_job(now, job);
            None
        }) else {
            return;
        };
        match self.requests[slot].request.op {
            Op::Read | Op::Prefetch | Op::Pull | Op::ReadForPeer => self.start_read(now, slot),
            Op::Flush => self.start_flush(now, slot),
            Op::Settle => self.start_settle(now, slot),
            Op::Forget => self.start_forget(now, slot),
            _ => self.start_change(now, slot),
        }
    }

    /// Lets the journal and the destager of a disk's cache have a look, at the end of the current call.
    fn wake(&mut self, disk: DiskId) {
        let it = self.disk_mut(disk);
        let may_work = it.journal.is_some() || it.opening.is_some();
        if may_work && !std::mem::replace(&mut it.awake, true) {
            self.awake.push(disk);
        }
    }

    /// Answers a request. It stays in flight until `finish`.
    fn reply(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        self.keep_in_memory(slot, result);
        let Active { request, arrived, outcome, .. } = &self.requests[slot];
        let reply = Reply { id: request.id, disk: request.disk, result, outcome: *outcome };
        let disk = self.disks[request.disk.0 as usize].as_mut().expect("disks outlive their requests");
        disk.note_change(request);
        disk.record(now, *arrived, request, *outcome);
        if !request.op.is_own() {
            disk.histograms.answer(now - *arrived, request.op);
        }
        let is_hit = *outcome == Outcome::Hit || outcome.is_from_memory();
        if request.op == Op::Read && is_hit && !request.passes_by() {
            disk.sizing.hit();
        }
        self.reply_out.push_back(reply);
    }

    /// Ends an answered request: claim and buffer are free.
    fn finish(&mut self, slot: u32) {
        let active = self.requests.remove(slot);
        assert_eq!(active.pending, 0, "a request ends with I/O in flight");
        if active.range.first < active.range.end {
            let runnable = &mut self.runnable;
            self.claims.leave(slot, |granted| runnable.push_back(granted));
        }
        self.fill_bytes -= active.fill_bytes;
        self.filling -= u32::from(active.phase == Phase::Fill);
        self.release_out.extend(active.request.buffer);
        let disk = self.disk_mut(active.request.disk);
        disk.in_flight -= 1;
        disk.ownership.guests -= u32::from(!active.request.op.is_own());
        self.unsettled.push(active.request.disk);
    }

    /// Sends an I/O to the backing of a request's disk.
    fn issue_backing(&mut self, now: Instant, slot: u32, op: IoOp) {
        let active = &self.requests[slot];
        let request = active.request;
        let (offset, end) = match op {
            IoOp::Flush => (0, 0),
            IoOp::Read => {
                let size = self.disk(request.disk).config.size_bytes;
                let end = sector_ceil(request.offset + request.len).min(size);
                (sector_floor(request.offset), end)
            }
            _ => (request.offset, request.offset + request.len),
        };
        let slice = match op {
            IoOp::Read | IoOp::Write(_) => request.buffer.map(|id| BufferSlice {
                id,
                offset: (offset - sector_floor(request.offset)) as u32,
                len: (end - offset) as u32,
            }),
            _ => None,
        };
        let target = Target::Backing(request.disk);
        self.issue(now, Owner::Request(slot), request.disk, target, op, (offset, end - offset), slice, 0);
    }

    /// Sends an I/O of a request to flash for each of `runs`.
    fn issue_runs(&mut self, now: Instant, slot: u32, op: IoOp) {
        let request = self.requests[slot].request;
        let buffer = request.buffer.expect("flash I/O moves payload");
        self.issue_runs_of(now, Owner::Request(slot), request.disk, buffer, op);
    }

    /// Sends an I/O to flash for each of `runs`, with a buffer whose start is the runs' sector 0.
    fn issue_runs_of(&mut self, now: Instant, owner: Owner, disk: DiskId, id: BufferId, op: IoOp) {
        let runs = std::mem::take(&mut self.runs);
        for FlashRun { extent, buffer_sector } in &runs {
            let len = extent.count * SECTOR_BYTES;
            let slice = BufferSlice { id, offset: (buffer_sector * SECTOR_BYTES) as u32, len: len as u32 };
            let target = Target::Flash(extent.device);
            self.issue(now, owner, disk, target, op, (extent.offset, len), Some(slice), extent.sector);
        }
        self.disk_mut(disk).flash_in_flight += runs.len() as u32;
        self.runs = runs;
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of an I/O, spelled out at few places")]
    fn issue(
        &mut self,
        now: Instant,
        owner: Owner,
        disk: DiskId,
        target: Target,
        op: IoOp,
        (offset, len): (u64, u64),
        slice: Option<BufferSlice>,
        sector: u64,
    ) -> IoId {
        self.serial += 1;
        match owner {
            Owner::Request(slot) => {
                self.requests[slot].pending += 1;
                self.disk_mut(disk).backing_in_flight += u32::from(matches!(target, Target::Backing(_)));
            }
            Owner::Job(job) => self.jobs[job].pending += 1,
            Owner::Journal(_) => self.disk_mut(disk).journal_in_flight += 1,
        }
        let id = IoId(self.ios.insert(Pending {
            owner,
            disk,
            serial: self.serial,
            target,
            is_write: op != IoOp::Read,
            wanted: now,
            issued: now,
            is_counted: false,
            bytes: len,
            slice,
            sector,
            sectors: len / SECTOR_BYTES,
        }));
        self.send_io(now, Io { id, target, op, offset, len, slice });
        id
    }

    /// Counts a completed I/O, for its disk and its device. The journal's count as its bytes only.
    fn account(&mut self, now: Instant, io: &Pending, result: Result<(), IoError>) {
        let result = if self.is_doubtful(io) { Ok(()) } else { result };
        let units = qos::units(io.bytes, self.limits.qos_unit_bytes);
        let disk = self.disk_mut(io.disk);
        let stats = match (io.owner, io.target) {
            (Owner::Journal(_), _) => {
                disk.journal_in_flight -= 1;
                None
            }
            (owner, Target::Backing(_)) => {
                disk.backing_in_flight -= u32::from(matches!(owner, Owner::Request(_)));
                // A read that another disk served is none of the backing.
                (io.is_write || io.bytes > 0).then_some(&mut disk.stats.backing)
            }
            (_, Target::Flash(_)) => {
                disk.flash_in_flight -= 1;
                Some(&mut disk.stats.flash)
            }
        };
        if let Some(stats) = stats {
            stats.ios += 1;
            stats.units += u64::from(units);
            stats.waited_ns += io.issued - io.wanted;
            stats.total_ns += now - io.issued;
            stats.errors += u64::from(result.is_err());
            match io.is_write {
                true => stats.write_bytes += io.bytes,
                false => stats.read_bytes += io.bytes,
            }
        }
        if let Target::Flash(device) = io.target {
            if result.is_err() {
                let change = self.devices.get(device).failed(now, &self.health);
                self.device_changed(device, change);
            }
            let ios = &self.ios;
            let is_outstanding = |id: IoId, serial| ios.contains(id.0) && ios[id.0].serial == serial;
            let change = self.devices.get(device).check(now, &self.health, is_outstanding);
            self.device_changed(device, change);
        }
    }

    fn check_devices(&mut self, now: Instant) {
        let (ios, health) = (&self.ios, &self.health);
        let is_outstanding = |id: IoId, serial| ios.contains(id.0) && ios[id.0].serial == serial;
        let changes: Vec<_> = self
            .devices
            .iter_mut()
            .map(|(id, device)| (id, device.check(now, health, is_outstanding)))
            .filter(|(_, change)| *change != device::Change::None)
            .collect();
        changes.into_iter().for_each(|(id, change)| self.device_changed(id, change));
    }

    fn disk(&self, id: DiskId) -> &Disk {
        self.disks[id.0 as usize].as_ref().expect("disks outlive their requests")
    }

    fn disk_mut(&mut self, id: DiskId) -> &mut Disk {
        self.disks[id.0 as usize].as_mut().expect("disks outlive their requests")
    }
}
