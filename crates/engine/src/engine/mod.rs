//! The engine of one shard: its disks, their caches, and everything in flight.
//!
//! The caller calls `handle_request`, `handle_completion`, `handle_command` or `handle_timeout`
//! with the current time. Then the caller drains `poll_copy`, `poll_io`, `poll_reply`,
//! `poll_declined`, `poll_release` and `poll_event`. The caller drains `poll_copy` first and makes
//! all copies. Then the caller sleeps until a completion or until the time of `poll_timeout`. No
//! call blocks, and there are no callbacks.
//!
//! Each request locks its sectors and is answered after I/O to flash or to the backing. After the
//! answer, a request may fill flash before it releases its range lock and its buffer:
//!
//! ```text
//! read    waiting → copy from memory → reply                   all sectors in memory
//!         waiting → flash read → reply                         all sectors valid
//!                   └ error or wrong checksum ┐
//!         waiting ─────────────────────→ backing read → reply → fill
//!         waiting → copy from a job's buffer → reply           another read's extra data
//! write   waiting → backing write → reply → fill
//! zeroes, discard   waiting → backing change → (backing flush) → reply
//! flush   (commit) → (backing flush) → reply
//! ```
//! A read into guest memory takes only the path "flash read → reply", or is declined (`direct.rs`).
//! A persistent cache adds steps to these paths (`commit.rs`, `write_back.rs`, `destage.rs`,
//! `structure.rs`):
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
mod cache_budget;
mod change;
mod commit;
mod destage;
mod destage_buffers;
mod destager;
mod direct;
mod disk;
mod early_discard;
mod extra_fill;
mod fill;
mod flash_written;
mod gate;
mod growth;
mod incomplete;
mod issue;
mod jobs;
mod maintenance;
mod merge;
mod overwrite;
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
mod zones;

use std::collections::{BTreeMap, VecDeque};

use crate::admission::Run;
use crate::cache::FlashRun;
use crate::command::Event;
use crate::device::{Devices, Health};
use crate::index::parts::PARTS_MAX;
use crate::io::{BufferCopy, BufferSlice, Io, IoError, Op, Reply, Request, Target};
use crate::memory::Seen;
use crate::outcome::Outcome;
use crate::partition::DiskCounts;
use crate::qos;
use crate::range_locks::{Range, RangeLocks};
use crate::shares::Shares;
use crate::sizing::Sizing;
use crate::slab::Slab;
use crate::stats::DiskStats;
use crate::units::{BufferId, DiskId, Instant, IoId, RequestId, SECTOR_BYTES};
use crate::vscsi::Histograms;
use bulk::Bulk;
use commit::JournalIo;
use destage_buffers::{DestageBuffer, DestageBuffers};
use disk::Disk;
use extra_fill::ExtraRead;
use gate::Gates;
use jobs::Job;
use partial::Edges;
use recent_edges::RecentEdges;

/// Maximum length of a request, bytes. Front ends split longer requests without payload.
pub const REQUEST_BYTES_MAX: u64 = 32 << 20;

/// Maximum number of disks of one engine. Disk ids are below this number.
pub const DISKS_MAX: u32 = 1 << 16;

/// Maximum number of background jobs in progress in one engine. One disk has at most 5/8 of them.
const JOBS_MAX: u32 = 256;

/// One request slot in 64 is reserved for the daemon's own requests.
const OWN_SHARE: u32 = 64;

/// Maximum number of the daemon's own requests that one disk may have in flight beyond the disk's
/// share.
const OWN_EACH: u32 = 16;

/// Limits of one engine. The limits and the payload buffers bound the I/Os in flight: a request has
/// at most one I/O for each sector of its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of requests in flight. The engine returns further requests to the caller.
    /// Some slots are [reserved](Limits::guests_max) for the daemon's own requests.
    pub requests_max: u32,
    /// Maximum number of buffer bytes that answered requests may hold while they fill flash. At
    /// this limit, misses are not filled, so that slow flash never delays guests. Misses are also
    /// not filled while answered requests that fill flash use half of all `requests_max` slots.
    pub fill_bytes_max: u64,
    /// Number of failed flash I/Os after which the engine stops using a flash device.
    pub flash_errors_max: u32,
    /// Time without an error after which the earlier errors of a flash device no longer count,
    /// milliseconds.
    pub flash_errors_forgive_ms: u64,
    /// Time limit of a flash I/O, milliseconds. While an I/O exceeds the limit, requests bypass the
    /// caches on its device.
    pub flash_stall_ms_max: u64,
    /// Number of frames of each persistent cache that the background scrub compares with their
    /// checksums, per second. 0 disables the scrub and the creation of missing second copies.
    pub scrub_frames_per_s: u32,
    /// Bytes of each disk's recovered cache that the background verification compares with the
    /// backing, per second. While guests wait for the backing, a quarter of this rate applies. 0
    /// disables the verification.
    pub verify_bytes_per_s: u64,
    /// Minimum length of a sequential run whose writes may bypass a write-back cache that has too
    /// much dirty data, bytes. 0 disables this bypass.
    pub bulk_run_bytes_min: u64,
    /// Size of one I/O unit, bytes. The rates of shares and reservations are counted in these units
    /// per second, and so are limits that are not in bytes per second.
    pub qos_unit_bytes: u32,
    /// Maximum number of dirty sectors per cache of which flash has only some 512-byte units
    /// (`incomplete.rs`), at most 24.
    pub incomplete_sectors_max: u32,
}

impl Limits {
    /// Returns the number of requests in flight up to which the engine accepts requests of guests.
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
            incomplete_sectors_max: PARTS_MAX as u32,
        }
    }
}

/// The cache engine of one shard. The comment at the start of this module gives the order of calls.
pub struct Engine {
    limits: Limits,
    health: Health,
    disks: Vec<Option<Box<Disk>>>,
    devices: Devices,
    range_locks: RangeLocks,
    requests: Slab<Active>,
    ios: Slab<Pending>,
    gates: Gates,
    /// Serial number of the last I/O. The serial number distinguishes I/Os that had the same id.
    serial: u64,
    /// Buffer bytes of answered requests that still fill flash.
    fill_bytes: u64,
    /// Number of answered requests that still fill flash.
    filling: u32,
    /// Number of requests that wait until this host owns their disk.
    owner_waits: u32,
    /// Number of requests in flight, by disk.
    slots: Shares,
    /// Requests and jobs that can continue, because their range lock was granted or the event for
    /// which they waited has occurred. A job is identified by its number plus `requests_max`.
    runnable: VecDeque<u32>,
    jobs: Slab<Job>,
    /// Number of background jobs, by disk.
    job_slots: Shares,
    /// Buffers for background jobs.
    destage_buffers: DestageBuffers,
    recent_edges: RecentEdges,
    /// Total length of the zero writes that have a buffer of zeroes, bytes.
    zeroing_bytes: u64,
    /// Number of read-ahead transfers in flight.
    aheads: u32,
    /// Number of extra fills in progress.
    extra_fills: u32,
    /// Extra fills that are reading the backing under their range lock, and extra fills whose data
    /// is being copied to waiting reads.
    extra_reads: Vec<ExtraRead>,
    /// Content of the journal writes in flight.
    pages: BTreeMap<IoId, Vec<u8>>,
    /// Disks whose journal or destager may have work.
    awake: Vec<DiskId>,
    /// Disks whose pending changes are checked at the end of the current call, because an I/O that
    /// they waited for may have ended.
    unsettled: Vec<DiskId>,
    /// Flash locations of a read's or a fill's data. The memory is reused from call to call to save
    /// allocations.
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
    /// Sectors that the request locks; empty for a flush, which has no range lock.
    range: Range,
    phase: Phase,
    /// Number of the request's I/Os in flight.
    pending: u32,
    /// Whether admission found the request to be part of a sequential run.
    run: Run,
    /// The memory tier's result for the request: whether a read is sequential, and the data to read
    /// ahead.
    seen: Seen,
    /// Present outcome of the request. The outcome can change until the reply.
    outcome: Outcome,
    /// Buffer bytes of this request that `Engine::fill_bytes` includes.
    fill_bytes: u64,
    /// True for a write, discard or zeroing that goes to the backing and will replace dirty data on
    /// flash.
    over_dirty: bool,
    /// State of the partly covered sectors of a write.
    edges: Edges,
    bulk: Bulk,
    /// Buffer of zeroes to write to flash.
    zeroes: Option<DestageBuffer>,
    /// True if flash did not take all of a write, or did not deliver all of a read into guest
    /// memory.
    failed: bool,
    /// Sectors of a read that the cache of a parent's disk served (`shared.rs`), as `first..end`.
    shared: Vec<(u64, u64)>,
    /// Cache sectors that completed flash writes of the request have written, with their checksums.
    /// Kept until all flash writes of the request have ended.
    written: Vec<(u64, u32)>,
    /// True if admission refused the request's blocks. Admission is not asked again.
    not_admitted: bool,
    /// True for a discard that was acknowledged before the backing has it.
    is_answered: bool,
    /// True if the zones of the request count the request as a write in flight to the backing
    /// (`zones.rs`).
    zoned: bool,
    /// Number of writes to the backing that were complete when the request's flush of the backing
    /// began. The flush covers these writes.
    flush_mark: u64,
    /// Value of the disk's [`Backed::bypassed`](backed::Backed::bypassed) when the request began.
    bypassed: u64,
    /// Value of the disk's [`Backed::doubts`](backed::Backed::doubts) when the request's flush,
    /// read or write of the backing began.
    doubts: u64,
    /// Number of times that the request's change was sent again because the backing may have lost
    /// it.
    resends: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Waiting,
    FlashRead,
    BackingRead,
    /// A read waits for a range lock that excludes the destager, and then reads the backing.
    LockThenBacking,
    /// Incomplete sectors, starting at this sector number, are read from flash and replace older
    /// data from the backing.
    Units(u64),
    /// Dirty data is read from flash into the request's buffer, where it replaces older data from
    /// the backing.
    Overlay,
    BackingChange,
    BackingFlush,
    Fill,
    FlashWrite,
    /// The partly covered sectors of a write are read, or destaged, or wait for a buffer.
    Edges,
    /// The request waits for a commit of the journal, and then starts again.
    CommitThenChange,
    CommitThenThrough,
    CommitThenReply,
    CommitThenFlush,
}

/// The request, job or journal operation that an I/O belongs to.
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
    /// True if the I/O makes data of the backing durable (`sync_order.rs`).
    is_sync: bool,
    /// Time at which the I/O was created. The I/O may wait in a gate until `issued`.
    wanted: Instant,
    issued: Instant,
    /// True if the I/O counts in the window of its flash device or datastore.
    is_counted: bool,
    /// Length of the I/O in bytes, or 0 for a read of the backing that another disk served.
    bytes: u64,
    slice: Option<BufferSlice>,
    /// First cache sector of a flash I/O; `sectors` is their number.
    sector: u64,
    sectors: u64,
}

impl Engine {
    /// Creates an engine without disks.
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
            zeroing_bytes: 0,
            aheads: 0,
            extra_fills: 0,
            extra_reads: Vec::new(),
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

    /// Accepts a request. Returns the request if all request slots are in use, or if a guest's
    /// request finds no free slot of its disk ([`Engine::has_room`]). Also returns a guest's
    /// request if too many requests wait until this host owns their disk. Answers an invalid
    /// request with an error.
    pub fn handle_request(&mut self, now: Instant, request: Request) -> Result<(), Request> {
        assert_eq!(request.buffer.is_some(), request.op.has_buffer(), "payload buffer of {:?}", request.op);
        assert!(direct::may_have(&request), "{request:?} must not use guest memory");
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
    /// reserved slots, because guests' requests may depend on them. Requests that wait for a change
    /// of ownership may use only half of all slots, so that other disks have the rest. The first
    /// waiting request of each disk is always accepted, so that the engine can report to the daemon
    /// that a request for the disk waits.
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

    /// Handles the end of an I/O. `sums` are the CRC-32C of the sectors that flash I/O moved, in
    /// order, or of the sectors that a backing read returned if the engine
    /// [needs](Self::wants_sums) them. `sums` is ignored for other I/O and for failed I/O.
    pub fn handle_completion(&mut self, now: Instant, id: IoId, result: Result<(), IoError>, sums: &[u32]) {
        assert!(self.ios.contains(id.0), "I/O {id} completed twice");
        let io = self.ios.remove(id.0);
        self.account(now, &io, result);
        self.gate_passed(now, &io);
        match io.is_sync {
            true => self.sync_done(now, id, io, result),
            false => self.io_done(now, id, &io, result, sums),
        }
        self.run(now);
    }

    fn io_done(&mut self, now: Instant, id: IoId, io: &Pending, result: Result<(), IoError>, sums: &[u32]) {
        if matches!((io.owner, io.target), (Owner::Request(_), Target::Backing(_))) {
            self.disk_mut(io.disk).backing_in_flight -= 1;
        }
        match io.owner {
            Owner::Request(slot) => self.request_io_done(now, slot, io, result, sums),
            Owner::Job(job) => self.job_io_done(now, job, io, result, sums),
            Owner::Journal(what) => {
                let bytes = self.pages.remove(&id);
                self.journal_io_done(now, io.disk, what, io.target, bytes, result);
            }
        }
    }

    /// Handles an I/O that storage abandoned. The I/O counts as failed, but storage may still use
    /// its memory until [`handle_returned`](Self::handle_returned). Until then, that memory must
    /// not be reused. The caller must not reuse buffers of requests, and the engine does not reuse
    /// its own buffers.
    pub fn handle_abandoned(&mut self, now: Instant, id: IoId) {
        assert!(self.ios.contains(id.0), "I/O {id} completed twice");
        let Pending { disk, slice, .. } = self.ios[id.0];
        if let Some(slice) = slice {
            self.destage_buffers.withhold(disk, slice);
        }
        self.handle_completion(now, id, Err(IoError::ShuttingDown), &[]);
    }

    /// Handles a report that storage no longer uses the memory of an abandoned I/O.
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
            Phase::BackingRead => {
                if result.is_ok() {
                    self.disk_mut(io.disk).backing_read_time.note(now - io.issued);
                }
                self.backing_read_done(now, slot, result, sums)
            }
            Phase::Overlay => self.overlay_done(now, slot, io, result, sums),
            Phase::BackingChange => self.backing_change_done(now, slot, result),
            Phase::BackingFlush => self.backing_flush_done(now, slot, result),
            Phase::Fill => self.fill_done(now, slot, io, result, sums),
            Phase::FlashWrite => self.flash_write_done(now, slot, io, result, sums),
            phase => panic!("I/O of a request in {phase:?}"),
        }
    }

    /// Does all work that was scheduled for `now` or earlier.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.check_devices(now);
        self.pump_gates(now);
        self.end_late_extra_reads(now);
        for index in 0..self.disks.len() {
            if self.disks[index].as_ref().and_then(|disk| disk.deadline()).is_some_and(|at| at <= now) {
                self.wake(DiskId(index as u32));
            }
        }
        self.run(now);
    }

    /// Returns the time at which the caller has to call `handle_timeout` at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let devices = self.devices.iter().filter_map(|device| device.deadline(&self.health));
        let disks = self.disks.iter().flatten().filter_map(|disk| disk.deadline());
        devices.chain(disks).chain(self.gates.deadline()).chain(self.extra_reads_deadline()).min()
    }

    /// Returns the next memory copy to make. Make all copies before polling anything else, because
    /// later results rely on the copied data.
    #[inline]
    pub fn poll_copy(&mut self) -> Option<BufferCopy> {
        self.copy_out.pop_front()
    }

    /// Returns the next I/O for storage.
    #[inline]
    pub fn poll_io(&mut self) -> Option<Io> {
        assert!(self.copy_out.is_empty(), "all copies are polled before other output");
        self.io_out.pop_front()
    }

    /// Returns the next reply for a front end.
    #[inline]
    pub fn poll_reply(&mut self) -> Option<Reply> {
        assert!(self.copy_out.is_empty(), "all copies are polled before other output");
        self.reply_out.pop_front()
    }

    /// Returns the next declined read into guest memory. The front end repeats a declined read with
    /// a buffer of the daemon and [`PayloadMemory::DaemonAfterGuest`]. A declined read gets no
    /// other reply.
    #[inline]
    pub fn poll_declined(&mut self) -> Option<RequestId> {
        self.declined_out.pop_front()
    }

    /// Returns the next payload buffer that the engine no longer needs.
    #[inline]
    pub fn poll_release(&mut self) -> Option<BufferId> {
        assert!(self.copy_out.is_empty(), "all copies are polled before other output");
        self.release_out.pop_front()
    }

    /// Returns the next event for the daemon.
    pub fn poll_event(&mut self) -> Option<Event> {
        assert!(self.copy_out.is_empty(), "all copies are polled before other output");
        self.event_out.pop_front()
    }

    /// Gives the engine a buffer of `bytes` bytes for destaging and other background jobs. No cache
    /// can write back without such a buffer. `bytes` is a multiple of the largest block.
    pub fn lend(&mut self, buffer: BufferId, bytes: u32) {
        self.destage_buffers.add(buffer, bytes);
    }

    /// Returns the pages that an I/O with [`IoOp::WriteJournal`] writes: `Io::len` bytes.
    pub fn journal_pages(&self, io: IoId) -> &[u8] {
        self.pages.get(&io).map_or(&[], Vec::as_slice)
    }

    /// Returns the counters of a disk.
    pub fn stats(&self, now: Instant, disk: DiskId) -> Option<DiskStats> {
        self.disks.get(disk.0 as usize)?.as_ref().map(|disk| disk.snapshot(now))
    }

    /// Returns the number of answered requests that may have changed a disk's content, including
    /// those that failed. Refused requests do not count. The number never decreases while the
    /// engine has the disk. A reset of the statistics does not change it.
    pub fn changes(&self, disk: DiskId) -> Option<u64> {
        self.disks.get(disk.0 as usize)?.as_ref().map(|disk| disk.content_changes)
    }

    /// Returns true if a disk's backing has all acknowledged data. If the backing lacks some data,
    /// a hole of the backing is not necessarily a hole of the disk.
    pub fn backing_has_all(&self, disk: DiskId) -> bool {
        self.disks.get(disk.0 as usize).and_then(Option::as_ref).is_some_and(|disk| disk.backing_has_all())
    }

    /// Returns the histograms of a disk's requests.
    pub fn histograms(&self, disk: DiskId) -> Option<&Histograms> {
        self.disks.get(disk.0 as usize)?.as_ref().map(|disk| &*disk.histograms)
    }

    /// Returns the hit ratios that a disk is predicted to have with other cache sizes.
    pub fn sizing(&self, now: Instant, disk: DiskId) -> Option<Sizing> {
        self.disks.get(disk.0 as usize)?.as_ref().map(|disk| disk.sizing.report(now))
    }

    /// Returns the counts of a disk that are used to divide a pool among its caches. `known_reads`
    /// is the number of reads at the previous repartitioning. Computing a miss-ratio curve takes
    /// several tens of thousands of steps. So the result has no curve if the number of reads has
    /// not changed.
    pub fn disk_counts(
        &self,
        disk: DiskId,
        known_reads: Option<u64>,
        block_bytes: u64,
    ) -> Option<DiskCounts> {
        let disk = self.disks.get(disk.0 as usize)?.as_ref()?;
        let reads = disk.sizing.seen().reads;
        Some(DiskCounts {
            reads,
            dirty_bytes: disk.cache.as_ref().map_or(0, |cache| cache.index.dirty_sectors() * SECTOR_BYTES),
            backing: disk.stats.backing,
            flash: disk.stats.flash,
            curve: (known_reads != Some(reads)).then(|| disk.sizing.report_of(block_bytes)),
        })
    }

    /// Returns true if the engine accepts a guest's request to a disk now. Each disk has a share of
    /// the request slots ([`Shares`]). So requests that wait for a hung backing leave slots for
    /// other disks.
    #[inline]
    pub fn has_room(&self, disk: DiskId) -> bool {
        self.slots.may_take(disk, 1) || self.disks.get(disk.0 as usize).is_none_or(Option::is_none)
    }

    /// Returns true if a disk may have another of the daemon's own requests in flight.
    fn has_own_room(&self, disk: DiskId) -> bool {
        let disk = self.disk(disk);
        disk.in_flight - disk.ownership.guests < OWN_EACH
    }

    /// Returns the number of requests in flight, including those that still fill flash.
    pub fn in_flight(&self) -> u32 {
        self.requests.len() + self.owner_waits
    }

    /// Starts all requests, jobs and I/Os that can start now.
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

    /// Resumes a request or a job after its range lock was granted or the event that it waited for
    /// has occurred.
    fn resume(&mut self, now: Instant, slot: u32) {
        let Some(slot) = slot.checked_sub(self.limits.requests_max).map_or(Some(slot), |job| {
            self.start_job(now, job);
            None
        }) else {
            return;
        };
        match self.requests[slot].request.op {
            Op::Read | Op::Prefetch | Op::Pull | Op::ReadForPeer => self.start_read(now, slot),
            Op::Flush | Op::DaemonFlush => self.start_flush(now, slot),
            Op::Settle => self.start_settle(now, slot),
            Op::Forget => self.start_forget(now, slot),
            _ => self.start_change(now, slot),
        }
    }

    /// Queues a disk, so that its journal and destager check for work at the end of the current
    /// call.
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
