//! The engine of one shard: the disks it owns, their caches, and everything in flight.
//!
//! Call order: any of `handle_request`, `handle_completion`, `handle_command`, `handle_timeout`, each
//! with the current time; then drain `poll_io`, `poll_reply`, `poll_release` and `poll_event`; then
//! sleep until something completes or `poll_timeout` says. Nothing blocks and nothing calls out.
//!
//! A request claims its sectors, is read from flash or from the backing, is answered, and may then
//! still fill flash before it gives claim and buffer back:
//!
//! ```text
//! read    waiting → flash read → reply                         all sectors valid
//!                   └ error or wrong checksum ┐
//!         waiting ─────────────────────→ backing read → reply → fill
//! write   waiting → backing write → reply → fill
//! zeroes, discard   waiting → backing change → (backing flush) → reply
//! flush   backing flush → reply
//! ```

mod change;
mod disk;
mod fill;
mod read;
#[cfg(test)]
mod tests;
mod write;

use std::collections::VecDeque;

use crate::admission::Run;
use crate::cache::FlashRun;
use crate::claims::{Claims, Kind, Range};
use crate::command::{Access, Event};
use crate::device::{self, Devices, Health};
use crate::io::{BufferSlice, Io, IoError, IoOp, Op, Reply, Request, Target};
use crate::outcome::Outcome;
use crate::slab::Slab;
use crate::stats::DiskStats;
use crate::units::{BufferId, DiskId, Instant, IoId, SECTOR_BYTES, sector_ceil, sector_floor};
use disk::Disk;

/// Longest request, bytes. Front ends split what has no payload and is longer.
pub const REQUEST_BYTES_MAX: u64 = 32 << 20;

/// Most disks of one engine; disk ids are below it.
pub const DISKS_MAX: u32 = 1 << 16;

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
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            requests_max: 4096,
            fill_bytes_max: 32 << 20,
            flash_errors_max: 16,
            flash_errors_forgive_ms: 60_000,
            flash_stall_ms_max: 1_000,
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
    /// Counts I/Os, to tell apart those that had the same id.
    serial: u64,
    /// Buffer bytes of answered requests that still fill.
    fill_bytes: u64,
    /// Answered requests that still fill.
    filling: u32,
    /// Requests whose claim was granted by another's leaving.
    runnable: VecDeque<u32>,
    /// Disks to bring to rest at the end of the current call.
    unsettled: Vec<DiskId>,
    /// Where a read's data lies, or where a fill's will; kept from call to call for its memory only.
    runs: Vec<FlashRun>,
    io_out: VecDeque<Io>,
    reply_out: VecDeque<Reply>,
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
    /// What it will be classified as, as far as known.
    outcome: Outcome,
    /// Buffer bytes counted in `Engine::fill_bytes`.
    fill_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Waiting,
    FlashRead,
    BackingRead,
    BackingChange,
    BackingFlush,
    Fill,
}

/// An I/O in flight.
struct Pending {
    request: u32,
    serial: u64,
    target: Target,
    is_write: bool,
    issued: Instant,
    bytes: u64,
    /// Flash I/O: first of the cache's sectors, and how many.
    sector: u64,
    sectors: u64,
}

impl Engine {
    /// An engine without disks.
    pub fn new(limits: Limits) -> Self {
        assert!(limits.requests_max > 0 && limits.flash_errors_max > 0);
        Engine {
            health: Health {
                errors_max: limits.flash_errors_max,
                forgive_ns: limits.flash_errors_forgive_ms * 1_000_000,
                stall_ns_max: limits.flash_stall_ms_max * 1_000_000,
            },
            disks: Vec::new(),
            devices: Devices::default(),
            claims: Claims::new(limits.requests_max),
            requests: Slab::new(limits.requests_max),
            ios: Slab::new(limits.requests_max),
            serial: 0,
            fill_bytes: 0,
            filling: 0,
            runnable: VecDeque::new(),
            unsettled: Vec::new(),
            runs: Vec::new(),
            io_out: VecDeque::new(),
            reply_out: VecDeque::new(),
            release_out: VecDeque::new(),
            event_out: VecDeque::new(),
            limits,
        }
    }

    /// Takes a request in. It is handed back when as many as `requests_max` are in flight; one that
    /// makes no sense for its disk is taken and answered with an error.
    pub fn handle_request(&mut self, now: Instant, request: Request) -> Result<(), Request> {
        assert_eq!(request.buffer.is_some(), request.op.has_buffer(), "payload buffer of {:?}", request.op);
        if self.requests.len() >= self.limits.requests_max {
            return Err(request);
        }
        if let Err(error) = self.check(&request) {
            self.refuse(now, &request, error);
            return Ok(());
        }
        self.disk_mut(request.disk).in_flight += 1;
        let range = Range {
            disk: request.disk,
            first: request.offset / SECTOR_BYTES,
            end: (request.offset + request.len).div_ceil(SECTOR_BYTES),
        };
        let run = self.observe(&request, range);
        let slot = self.requests.insert(Active {
            request,
            arrived: now,
            range,
            phase: Phase::Waiting,
            pending: 0,
            run,
            outcome: Outcome::CacheOff,
            fill_bytes: 0,
        });
        match request.op {
            Op::Flush => self.start_flush(now, slot),
            Op::Read | Op::Prefetch => self.enter_read(now, slot),
            Op::Write(_) | Op::Discard(_) | Op::WriteZeroes(..) => {
                if self.claims.enter(slot, range, Kind::Change, Kind::Change) {
                    self.start_change(now, slot);
                }
            }
        }
        self.run(now);
        Ok(())
    }

    /// Takes the end of an I/O in. `sums` are the CRC-32C of each sector that flash I/O moved, in
    /// order; they are not looked at for other I/O, and for failed I/O.
    pub fn handle_completion(&mut self, now: Instant, id: IoId, result: Result<(), IoError>, sums: &[u32]) {
        assert!(self.ios.contains(id.0), "I/O {id} completes once");
        let io = self.ios.remove(id.0);
        self.account(now, &io, result);
        let slot = io.request;
        let active = &mut self.requests[slot];
        active.pending -= 1;
        match active.phase {
            Phase::FlashRead => self.flash_read_done(now, &io, result, sums),
            Phase::BackingRead => self.backing_read_done(now, slot, result),
            Phase::BackingChange => self.backing_change_done(now, slot, result),
            Phase::BackingFlush => self.backing_flush_done(now, slot, result),
            Phase::Fill => self.fill_done(&io, result, sums),
            Phase::Waiting => panic!("I/O of a request that waits"),
        }
        self.run(now);
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.check_devices(now);
        self.run(now);
    }

    /// When `handle_timeout` wants to be called, if nothing happens before.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.devices.iter().filter_map(|device| device.deadline(&self.health)).min()
    }

    /// The next I/O for storage.
    #[inline]
    pub fn poll_io(&mut self) -> Option<Io> {
        self.io_out.pop_front()
    }

    /// The next answer for a front end.
    #[inline]
    pub fn poll_reply(&mut self) -> Option<Reply> {
        self.reply_out.pop_front()
    }

    /// The next buffer that the engine no longer needs.
    #[inline]
    pub fn poll_release(&mut self) -> Option<BufferId> {
        self.release_out.pop_front()
    }

    /// The next thing the daemon should know.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.event_out.pop_front()
    }

    /// Gives the engine a buffer of its own, for destaging, scrubbing and the like. Without any, nothing is destaged.
    /// `bytes` is a multiple of the largest block.
    pub fn lend(&mut self, _buffer: BufferId, _bytes: u32) {
        unimplemented!()
    }

    /// The pages that an I/O with [`IoOp::WriteJournal`] writes: a multiple of 4096 bytes, `Io::len` of them.
    pub fn journal_pages(&self, _io: IoId) -> &[u8] {
        unimplemented!()
    }

    /// What a disk did until now.
    pub fn stats(&self, now: Instant, disk: DiskId) -> Option<DiskStats> {
        self.disks.get(disk.0 as usize)?.as_ref().map(|disk| disk.snapshot(now))
    }

    /// Requests in flight, fills included.
    pub fn in_flight(&self) -> u32 {
        self.requests.len()
    }

    fn check(&self, request: &Request) -> Result<(), IoError> {
        let Some(disk) = self.disks.get(request.disk.0 as usize).and_then(Option::as_ref) else {
            return Err(IoError::ShuttingDown);
        };
        let end = request.offset.checked_add(request.len);
        let fits = end.is_some_and(|end| end <= disk.config.size_bytes);
        let sized = match request.op {
            Op::Flush => request.len == 0,
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

    /// Shows a new read or write to the admission of its disk's cache.
    #[inline]
    fn observe(&mut self, request: &Request, range: Range) -> Run {
        match (request.op, &mut self.disk_mut(request.disk).cache) {
            (Op::Read | Op::Write(_), Some(cache)) => cache.observe(range.first, range.end),
            _ => Run::Other,
        }
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
        while let Some(slot) = self.runnable.pop_front() {
            if self.requests[slot].request.op.modifies() {
                self.start_change(now, slot);
            } else {
                self.start_read(now, slot);
            }
        }
        while let Some(disk) = self.unsettled.pop() {
            self.settle(disk);
        }
    }

    /// Answers a request. It stays in flight until `finish`.
    fn reply(&mut self, now: Instant, slot: u32, result: Result<(), IoError>) {
        let Active { request, arrived, outcome, .. } = &self.requests[slot];
        let reply = Reply { id: request.id, disk: request.disk, result, outcome: *outcome };
        self.disks[request.disk.0 as usize]
            .as_mut()
            .expect("disks outlive their requests")
            .record(now, *arrived, request, *outcome);
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
        self.disk_mut(active.request.disk).in_flight -= 1;
        self.settle(active.request.disk);
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
        self.issue(now, slot, Target::Backing(request.disk), op, offset, end - offset, slice, 0);
    }

    /// Sends an I/O to flash for each of `runs`.
    fn issue_runs(&mut self, now: Instant, slot: u32, op: IoOp) {
        let request = self.requests[slot].request;
        let id = request.buffer.expect("flash I/O moves payload");
        let runs = std::mem::take(&mut self.runs);
        for FlashRun { extent, buffer_sector } in &runs {
            let len = extent.count * SECTOR_BYTES;
            let slice = BufferSlice { id, offset: (buffer_sector * SECTOR_BYTES) as u32, len: len as u32 };
            let target = Target::Flash(extent.device);
            let io = self.issue(now, slot, target, op, extent.offset, len, Some(slice), extent.sector);
            let serial = self.serial;
            self.devices.get(extent.device).issued(io, serial, now);
        }
        self.disk_mut(request.disk).flash_in_flight += runs.len() as u32;
        self.runs = runs;
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of an I/O, spelled out at two places")]
    fn issue(
        &mut self,
        now: Instant,
        slot: u32,
        target: Target,
        op: IoOp,
        offset: u64,
        len: u64,
        slice: Option<BufferSlice>,
        sector: u64,
    ) -> IoId {
        self.serial += 1;
        self.requests[slot].pending += 1;
        let id = IoId(self.ios.insert(Pending {
            request: slot,
            serial: self.serial,
            target,
            is_write: op != IoOp::Read,
            issued: now,
            bytes: len,
            sector,
            sectors: len / SECTOR_BYTES,
        }));
        self.io_out.push_back(Io { id, target, op, offset, len, slice });
        id
    }

    /// Counts a completed I/O, for its disk and its device.
    fn account(&mut self, now: Instant, io: &Pending, result: Result<(), IoError>) {
        let disk = self.requests[io.request].request.disk;
        let stats = {
            let disk = self.disk_mut(disk);
            match io.target {
                Target::Backing(_) => &mut disk.stats.backing,
                Target::Flash(_) => {
                    disk.flash_in_flight -= 1;
                    &mut disk.stats.flash
                }
            }
        };
        stats.ios += 1;
        stats.total_ns += now - io.issued;
        stats.errors += u64::from(result.is_err());
        match io.is_write {
            true => stats.write_bytes += io.bytes,
            false => stats.read_bytes += io.bytes,
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
