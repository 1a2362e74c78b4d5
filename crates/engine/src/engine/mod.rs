//! The engine of one shard: the disks it owns, their caches, and everything in flight.
//!
//! Call order: any of `handle_request`, `handle_completion`, `handle_command`, `handle_timeout`,
//! each with the current time. Then drain `poll_copy`, and whenever it is empty, `poll_io`,
//! `poll_reply`, `poll_release` and `poll_event`. Then sleep until a completion or until the time
//! of `poll_timeout`. No call blocks, and there are no callbacks.
//!
//! A request locks its sectors, is read from flash or from the backing, and is answered. It may
//! then still fill flash before it releases its range lock and its buffer:
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
//! A read into guest memory takes only the second of these paths, or is declined (`direct.rs`).
//! A persistent cache adds to this (`commit.rs`, `write_back.rs`, `destage.rs`, `structure.rs`):
//! ```text
//! read    … backing read → (flash read of what is dirty) → reply → fill
//! write   waiting → (edges read) → (commit) → flash write → (commit) → reply    write-back
//!         waiting → (commit of a zone's mark) → backing write …       past the cache
//! ```

mod ahead;
mod awaiting_journal;
mod backed;
mod bitmaps;
mod bulk;
mod change;
mod commit;
mod destage;
mod destage_buffers;
mod destager;
mod direct;
mod disk;
mod fill;
mod gate;
mod growth;
mod issue;
mod jobs;
mod maintenance;
mod merge;
mod ownership;
mod partial;
mod read;
mod recent_edges;
mod records;
mod recovering;
mod request;
mod rewrite;
mod shared;
mod structure;
mod sync_order;
#[cfg(test)]
mod tests;
mod tier;
mod vacate;
mod verify;
mod write;
mod write_back;
mod zeroes;

use std::collections::{BTreeMap, VecDeque};

use crate::admission::Run;
use crate::cache::FlashRun;
use crate::command::Event;
use crate::device::{Devices, Health};
use crate::io::{BufferCopy, BufferSlice, Io, IoError, Op, Reply, Request, Target};
use crate::memory::Seen;
use crate::outcome::Outcome;
use crate::qos;
use crate::range_locks::{Range, RangeLocks};
use crate::shares::Shares;
use crate::sizing::Sizing;
use crate::slab::Slab;
use crate::stats::DiskStats;
use crate::units::{BufferId, DiskId, Instant, IoId, RequestId};
use crate::vscsi::Histograms;
use bulk::Bulk;
use commit::JournalIo;
use destage_buffers::{DestageBuffer, DestageBuffers};
use disk::Disk;
use gate::Gates;
use jobs::Job;
use partial::Edges;
use recent_edges::RecentEdges;

/// Longest request, bytes. Front ends split what has no payload and is longer.
pub const REQUEST_BYTES_MAX: u64 = 32 << 20;

/// Most disks of one engine; disk ids are below it.
pub const DISKS_MAX: u32 = 1 << 16;

/// Maximum number of jobs in progress. One disk has at most 5/8 of it.
const JOBS_MAX: u32 = 256;

/// One of this many requests is reserved for the daemon's own requests.
const OWN_SHARE: u32 = 64;

/// Requests of the daemon itself that one disk may have in flight beyond its share.
const OWN_EACH: u32 = 16;

/// Limits of one engine. They and the payload buffers limit the I/Os in flight: a request has at
/// most one I/O for each sector of its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests in flight; more are handed back. A few of them are [kept](Limits::guests_max) for the daemon's own.
    pub requests_max: u32,
    /// Bytes of buffers that answered requests may hold while they fill flash. Beyond that, and
    /// when half of `requests_max` are such requests, misses are not filled, so slow flash never
    /// delays guests.
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
    /// Bytes that each disk's recovered cache is compared with its backing in the background, each second; a quarter of that
    /// while guests wait for the backing. 0: none.
    pub verify_bytes_per_s: u64,
    /// Under write-back and too much dirty data, writes of sequential runs go past the cache from this length on, bytes;
    /// 0: never.
    pub bulk_run_bytes_min: u64,
    /// One unit of I/O where disks compete, bytes.
    pub qos_unit_bytes: u32,
}

impl Limits {
    /// Requests in flight up to which those of guests are taken.
    pub fn guests_max(&self) -> u32 {
        self.requests_max - self.requests_max / OWN_SHARE
    }
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
            verify_bytes_per_s: 128 << 20,
            bulk_run_bytes_min: 0,
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
    range_locks: RangeLocks,
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
    /// Requests in flight, by disk.
    slots: Shares,
    /// Requests, and jobs numbered from `requests_max`, that can continue: their range lock was
    /// granted when another was released, or the event that they waited for has occurred.
    runnable: VecDeque<u32>,
    jobs: Slab<Job>,
    /// Jobs, by disk.
    job_slots: Shares,
    /// Buffers for jobs.
    destage_buffers: DestageBuffers,
    recent_edges: RecentEdges,
    /// Transfers that read ahead.
    aheads: u32,
    /// Content of the journal writes in flight.
    pages: BTreeMap<IoId, Vec<u8>>,
    /// Disks whose journal or destager may have something to do.
    awake: Vec<DiskId>,
    /// Disks to bring to rest at the end of the current call.
    unsettled: Vec<DiskId>,
    /// Location of a read's or a fill's data; reused from call to call to save allocations.
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
    /// Its sectors; empty for a flush, which has no range lock.
    range: Range,
    phase: Phase,
    /// I/Os outstanding.
    pending: u32,
    /// Kind of run for admission that it belongs to.
    run: Run,
    /// What the memory tier found out about its run.
    seen: Seen,
    /// Its outcome so far.
    outcome: Outcome,
    /// Buffer bytes counted in `Engine::fill_bytes`.
    fill_bytes: u64,
    /// A change that goes to the backing over dirty data, which it is to replace.
    over_dirty: bool,
    /// State of the partly covered sectors of a write.
    edges: Edges,
    bulk: Bulk,
    /// The buffer from which flash gets zeroes.
    zeroes: Option<DestageBuffer>,
    /// Flash did not take all of a write, or did not deliver all of a read to a guest's memory.
    failed: bool,
    /// Sectors of it that another disk served: `first..end`.
    shared: Vec<(u64, u64)>,
    /// Cache sectors that flash has taken of it, with their checksums, until all of its writes have ended.
    written: Vec<(u64, u32)>,
    /// Admission refused its blocks and is not asked again.
    not_admitted: bool,
    /// Its zones count it as a write to the backing in flight.
    zoned: bool,
    /// Writes to the backing that had ended when its flush of the backing began.
    flush_mark: u64,
    /// The count of the disk's doubts when its flush, its read or its change began, see `backed.rs`.
    doubts: u64,
    /// Number of times that its change was sent again after a doubt.
    resends: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Waiting,
    FlashRead,
    BackingRead,
    /// A read waits for a range lock that the destager respects, and then reads the backing.
    ClaimThenBacking,
    /// Dirty data is read over the data from the backing.
    Overlay,
    BackingChange,
    BackingFlush,
    Fill,
    FlashWrite,
    /// Its edges are read, or destaged, or wait for a buffer.
    Edges,
    /// It waits for a commit, and then starts again.
    CommitThenChange,
    CommitThenThrough,
    CommitThenReply,
    CommitThenFlush,
}

/// The owner of an I/O.
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
    /// It makes data of the backing durable (`sync_order.rs`).
    is_sync: bool,
    /// When the engine wanted it, and when storage got it.
    wanted: Instant,
    issued: Instant,
    /// The window of its resource counts it.
    is_counted: bool,
    /// Bytes; without those of a read that another disk serves.
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
            range_locks: RangeLocks::new(limits.requests_max + JOBS_MAX),
            requests: Slab::new(limits.requests_max),
            ios: Slab::new(limits.requests_max),
            gates: Gates::default(),
            serial: 0,
            fill_bytes: 0,
            filling: 0,
            owner_waits: 0,
            slots: Shares::new(limits.guests_max().into()),
            runnable: VecDeque::new(),
            jobs: Slab::new(JOBS_MAX),
            job_slots: Shares::new(JOBS_MAX.into()),
            destage_buffers: DestageBuffers::default(),
            recent_edges: RecentEdges::default(),
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

    /// Takes a request in. It is handed back when as many as `requests_max` are in flight, a guest's when [`Engine::has_room`] says no or
    /// too many wait for another host already; one that makes no sense for its disk is taken and answered with an error.
    pub fn handle_request(&mut self, now: Instant, request: Request) -> Result<(), Request> {
        assert_eq!(request.buffer.is_some(), request.op.has_buffer(), "payload buffer of {:?}", request.op);
        assert!(direct::may_have(&request), "{request:?} into a guest's memory");
        if self.is_full_for(&request) {
            return Err(request);
        }
        if let Err(error) = self.check(&request) {
            self.refuse(now, &request, error);
            return Ok(());
        }
        self.check_ownership(now, now, request);
        self.run(now);
        Ok(())
    }

    /// Returns true if the request has to wait for a free slot. The daemon's own requests have
    /// reserved slots, because guests' requests may depend on them. Requests that wait for another
    /// role leave half of all slots to other disks; the first of each disk may always wait, so that
    /// it is reported.
    #[inline]
    fn is_full_for(&self, request: &Request) -> bool {
        let Limits { requests_max, .. } = self.limits;
        match request.op.is_own() {
            true => {
                self.in_flight() >= requests_max
                    || !(self.has_room(request.disk) || self.has_own_room(request.disk))
            }
            false => {
                !self.has_room(request.disk)
                    || self.owner_waits >= requests_max.div_ceil(2) && self.joins_waiting(request)
            }
        }
    }

    /// Takes the end of an I/O in. `sums` are the CRC-32C of each sector that flash I/O moved, in
    /// order, or a read of a backing if they are [wanted](Self::wants_sums); they are not looked at for other I/O, and for failed
    /// I/O.
    pub fn handle_completion(&mut self, now: Instant, id: IoId, result: Result<(), IoError>, sums: &[u32]) {
        assert!(self.ios.contains(id.0), "I/O {id} completes once");
        let io = self.ios.remove(id.0);
        match io.is_sync {
            true => self.sync_done(now, id, io, result),
            false => self.io_done(now, id, &io, result, sums),
        }
        self.run(now);
    }

    fn io_done(&mut self, now: Instant, id: IoId, io: &Pending, result: Result<(), IoError>, sums: &[u32]) {
        self.account(now, io, result);
        self.gate_passed(now, io);
        match io.owner {
            Owner::Request(slot) => self.request_io_done(now, slot, io, result, sums),
            Owner::Job(job) => self.job_io_done(now, job, io, result, sums),
            Owner::Journal(what) => {
                let bytes = self.pages.remove(&id);
                self.journal_io_done(now, io.disk, what, io.target, bytes, result);
            }
        }
    }

    /// Handles the abandonment of an I/O by storage: it failed, and storage may use its memory
    /// until [`handle_returned`](Self::handle_returned). The caller keeps the memory of requests;
    /// the engine keeps its own.
    pub fn handle_abandoned(&mut self, now: Instant, id: IoId) {
        assert!(self.ios.contains(id.0), "I/O {id} completes once");
        let Pending { disk, slice, .. } = self.ios[id.0];
        if let Some(slice) = slice {
            self.destage_buffers.withhold(disk, slice);
        }
        self.handle_completion(now, id, Err(IoError::ShuttingDown), &[]);
    }

    /// Storage does not use the memory of an abandoned I/O any more.
    pub fn handle_returned(&mut self, now: Instant, slice: BufferSlice) {
        self.destage_buffers.returned(slice);
        self.wake_all();
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
            Phase::BackingRead => self.backing_read_done(now, slot, result, sums),
            Phase::Overlay => self.overlay_done(now, slot, io, result, sums),
            Phase::BackingChange => self.backing_change_done(now, slot, result),
            Phase::BackingFlush => self.backing_flush_done(now, slot, result),
            Phase::Fill => self.fill_done(now, slot, io, result, sums),
            Phase::FlashWrite => self.flash_write_done(now, slot, io, result, sums),
            phase => panic!("I/O of a request in {phase:?}"),
        }
    }

    /// Does everything whose time has come.
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

    /// The time at which to call `handle_timeout` at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let devices = self.devices.iter().filter_map(|device| device.deadline(&self.health));
        let disks = self.disks.iter().flatten().filter_map(|disk| disk.deadline());
        devices.chain(disks).chain(self.gates.deadline()).min()
    }

    /// The next copy to make. Make all copies before polling anything else: later results rely on
    /// them.
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

    /// The next declined read into guest memory. The front end repeats it with a buffer of the
    /// daemon and [`PayloadMemory::DaemonAfterGuest`]. It gets no other reply.
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
        self.destage_buffers.add(buffer, bytes);
    }

    /// The pages that an I/O with [`IoOp::WriteJournal`] writes: `Io::len` bytes.
    pub fn journal_pages(&self, io: IoId) -> &[u8] {
        self.pages.get(&io).map_or(&[], Vec::as_slice)
    }

    /// Counters of a disk.
    pub fn stats(&self, now: Instant, disk: DiskId) -> Option<DiskStats> {
        self.disks.get(disk.0 as usize)?.as_ref().map(|disk| disk.snapshot(now))
    }

    /// Returns true if a disk's backing has everything that was acknowledged. Otherwise the holes
    /// of the backing are not the disk's.
    pub fn backing_has_all(&self, disk: DiskId) -> bool {
        self.disks.get(disk.0 as usize).and_then(Option::as_ref).is_some_and(|disk| disk.backing_has_all())
    }

    /// Histograms of a disk's requests.
    pub fn histograms(&self, disk: DiskId) -> Option<&Histograms> {
        self.disks.get(disk.0 as usize)?.as_ref().map(|disk| &*disk.histograms)
    }

    /// Predicted hit ratios of other cache sizes for a disk.
    pub fn sizing(&self, now: Instant, disk: DiskId) -> Option<Sizing> {
        self.disks.get(disk.0 as usize)?.as_ref().map(|disk| disk.sizing.report(now))
    }

    /// Returns whether a guest's request to a disk is taken now. Each disk has a share of the requests there may be
    /// ([`Shares`]), so requests that a hung backing holds back leave room for other disks.
    #[inline]
    pub fn has_room(&self, disk: DiskId) -> bool {
        // A request to a disk that does not exist is refused immediately.
        self.slots.may_take(disk, 1) || self.disks.get(disk.0 as usize).is_none_or(Option::is_none)
    }

    /// Returns true if a disk has few of the daemon's own requests in flight.
    fn has_own_room(&self, disk: DiskId) -> bool {
        let disk = self.disk(disk);
        disk.in_flight - disk.ownership.guests < OWN_EACH
    }

    /// Requests in flight, fills included.
    pub fn in_flight(&self) -> u32 {
        self.requests.len() + self.owner_waits
    }

    /// Starts what became possible, until nothing more does.
    fn run(&mut self, now: Instant) {
        loop {
            if let Some(slot) = self.runnable.pop_front() {
                self.resume(now, slot);
            } else if let Some(disk) = self.unsettled.pop() {
                self.settle(now, disk);
            } else if let Some(disk) = self.awake.pop() {
                if self.disks[disk.0 as usize].is_some() {
                    self.disk_mut(disk).awake = false;
                    self.pump_destage(now, disk);
                    self.pump_maintenance(now, disk);
                    self.pump_verify(now, disk);
                    self.pump_structure(now, disk);
                    self.pump_journal(now, disk);
                }
            } else {
                return;
            }
        }
    }

    /// Resumes a request or a job: its range lock was granted, or the event that it waited for has
    /// occurred.
    fn resume(&mut self, now: Instant, slot: u32) {
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

    fn disk(&self, id: DiskId) -> &Disk {
        self.disks[id.0 as usize].as_ref().expect("disks outlive their requests")
    }

    fn disk_mut(&mut self, id: DiskId) -> &mut Disk {
        self.disks[id.0 as usize].as_mut().expect("disks outlive their requests")
    }
}
