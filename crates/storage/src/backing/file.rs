//! A raw file or a block device as backing.
//!
//! # Two descriptors, one disk
//! Most I/O uses an O_DIRECT descriptor. The partial first and last sectors (4 KiB) of unaligned
//! I/O use a buffered descriptor. Direct and buffered I/O see the same data for two reasons. First,
//! the kernel writes dirty pages of the range to the file before direct I/O, and drops the range's
//! pages from the page cache before a direct write. Second, no two I/Os in flight touch the same
//! page of the page cache. The engine ensures this for different requests. Within a request, the
//! parts meet at sector boundaries, so they have no page in common. If two I/Os in flight used one
//! page, the kernel could fail to drop the page, and the next fdatasync would report EIO.
//! Read-ahead is off on the buffered descriptor, so that pages are not read in larger folios. On
//! filesystems with blocks above 4 KiB, direct and buffered I/O of one file may see different data,
//! so hob uses only buffered I/O there.
//!
//! # Durability
//! A durable write uses RWF_DSYNC. A flush uses fdatasync, which covers writes of both descriptors.
//!
//! # Lease
//! A disk that several hosts may write has a [`Gate`], which is open while this host's lease is
//! valid. The gate is checked just before each change. A blocked change is retried every
//! [`RETRY_NS`]. A blocked change fails after `wait_max`, or when another host owns the disk. If a
//! disk has a gate, the buffered parts of its unaligned writes are durable writes. Otherwise the
//! kernel could write a dirty page after the lease has ended.
//!
//! # Locks
//! The lock of the file is exclusive for a writable disk, and shared for a read-only disk; see
//! [`crate::lock`]. The file below a loop device is also locked; see [`super::below`].
//!
//! # Files that shrink
//! A write past the end of a file would enlarge it again, with a hole of zeroes. So the file's size
//! is read before the first change of each iteration of the shard's loop. Changes past the end
//! fail. Reading the size does not wait for the file's filesystem.
//!
//! # Stale file handles
//! On a network filesystem, requests wait while the file is opened again after ESTALE; see `stale`.

mod end;
mod holes;
mod parts;
mod probe;
mod revocation;
mod stale;
mod steps;

use std::collections::{BTreeSet, VecDeque};
use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hob_engine::command::Access;
use hob_engine::io::{Durability, Io, IoError, IoOp};
use hob_engine::units::{Instant, IoId, SECTOR_BYTES};

use self::end::FileEnd;
use self::revocation::RevocableGate;
use super::below::{self, BelowLocks};
use super::evidence::{self, ChangeDetector};
use super::helper::{Ended, Helper, Job};
use super::identity::{self, ChangeMark};
use super::{
    BackingInfo, BackingOptions, Driver, Format, Lock, OpenError, Reader, SizeProbe, Status, StatusExtent,
    WaitMax, image_state, io_result, stripe,
};
use crate::direct::open_direct;
use crate::filesystem::{file_number, is_memory, may_block};
use crate::lock::{LockError, lock_image};
use crate::ring::{Completion, Fd, FdClass, FileNumber, Gate, Ring, RingKind, read_now};
use crate::token::TokenSpace;
use crate::volatile::{self, VolatileFile};
use probe::{direct_block_bytes, mark_of, status};
use stale::Stale;
use steps::{PUNCH, Several, Step, first_step};

/// Flag in the token index of an I/O with several operations. The other bits of such an index are
/// the slot of the I/O. Without the flag, the index is the id of an I/O with one operation.
const SEVERAL: u32 = 1 << 31;

/// Token index of the helper's eventfd. Slots never reach this number.
const HELPER: u32 = u32::MAX;

/// Pause before the I/Os that the lease gate or a stale file handle stopped are retried,
/// nanoseconds.
const RETRY_NS: u64 = 20_000_000;

/// Descriptors of the file in the I/O ring.
#[derive(Clone, Copy, Debug)]
struct Attached {
    direct: Option<Fd>,
    buffered: Fd,
    tokens: TokenSpace,
}

struct FileBacking {
    info: BackingInfo,
    direct: Option<Arc<OwnedFd>>,
    /// Buffered descriptor of the file; `None` once it is being closed.
    buffered: Option<Arc<OwnedFd>>,
    class: FdClass,
    /// In a power-cut test: the object that holds unflushed writes.
    volatile: Option<Arc<VolatileFile>>,
    is_block_device: bool,
    /// Device number of the file's filesystem, or of the block device.
    device: u64,
    /// Number of the file on its I/O ring; `None` once the backing starts no more operations.
    number: Option<FileNumber>,
    /// Whether the file's timestamps are evidence that it is unchanged.
    has_timestamps: bool,
    /// Name of the content of a file that is locked against writers.
    constant: Option<String>,
    access: Access,
    /// Locks of the files below a block device.
    below: Option<Arc<BelowLocks>>,
    end: FileEnd,
    attached: Option<Attached>,
    several: Vec<Several>,
    free: Vec<u32>,
    in_flight: usize,
    /// Lease gate; `None` unless other hosts may also write the disk.
    gate: Option<Arc<RevocableGate>>,
    /// Slots of I/Os that the lease gate or a stale file handle stopped. `retry_at` is the time of
    /// their retry.
    stopped: Vec<u32>,
    retry_at: Instant,
    stale: Stale,
    /// True after `revoke`: another host owns the disk, or this host abandoned the backing.
    is_lost: bool,
    wait_ns: u64,
    /// I/Os in flight that may occupy a worker thread.
    working: BTreeSet<IoId>,
    /// Durable writes in flight.
    durable: BTreeSet<IoId>,
    /// True if a durable write failed and no flush has reported the failure yet. Other unflushed
    /// writes may be lost with it.
    has_lost: bool,
    /// I/Os that wait until fewer I/Os occupy worker threads.
    to_work: VecDeque<Io>,
    done: VecDeque<(IoId, Result<(), IoError>)>,
    statuses: VecDeque<(u64, Status)>,
    /// Thread that queries and closes the file.
    helper: Helper,
    /// Queries that the helper thread has not answered.
    asked: BTreeSet<u64>,
    /// The helper's eventfd in the I/O ring, and whether a read of it is in flight.
    event: Option<(Fd, bool)>,
    life: Life,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Open,
    /// The backing waits for I/O in the kernel before its files can be closed.
    Ending,
    /// The helper thread closes the files.
    Closing,
    /// The files are closed. The value is the time of the last change of the file.
    Closed(Option<ChangeMark>),
}

/// Reads the file synchronously, without the I/O ring.
struct FileReader {
    file: Arc<OwnedFd>,
    volatile: Option<Arc<VolatileFile>>,
}

impl Reader for FileReader {
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        let read = match &self.volatile {
            None => read_now(&self.file, offset, bytes),
            Some(volatile) => volatile.read(offset, bytes).map_err(volatile::errno),
        };
        read.map_err(|errno| io_result(-errno.raw_os_error()).expect_err("an errno is an error"))
    }
}

/// Opens a raw file or block device.
pub(super) fn open(
    spec: &str,
    access: Access,
    options: &BackingOptions,
) -> Result<Box<dyn Driver>, OpenError> {
    Ok(Box::new(open_file(spec, access, options)?))
}

fn open_file(spec: &str, access: Access, options: &BackingOptions) -> Result<FileBacking, OpenError> {
    let path = Path::new(spec);
    let system = |source| OpenError::System { path: path.into(), source };
    let unfit = |reason: String| OpenError::Unfit { what: spec.to_owned(), reason };
    let write = access == Access::ReadWrite;
    let file_type = super::path::check(path)?;
    let is_block_device = file_type.is_block_device();
    // For a block device, exclusive means that it is not mounted.
    let exclusive = if is_block_device && write && options.locked { libc::O_EXCL } else { 0 };
    let open = |flags| OpenOptions::new().read(true).write(write).custom_flags(flags).open(path);
    // If the file is replaced while it is being opened, its state before and after the opening
    // differs.
    let is_constant = !write && options.locked && !is_block_device;
    let state = || if is_constant { image_state(path, Format::Raw, &[]).ok() } else { None };
    let before = state();
    let mut buffered = match open(exclusive) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            return Err(OpenError::InUse { path: path.into() });
        }
        other => other.map_err(system)?,
    };
    let locked = if options.locked { lock_image(&buffered, access) } else { Ok(()) };
    locked.map_err(|error| match error {
        LockError::InUse => OpenError::InUse { path: path.into() },
        LockError::Qemu(permission) => OpenError::InUseByQemu { path: path.into(), permission },
        LockError::System(errno) => system(errno.into()),
    })?;
    let below = if is_block_device {
        let number = buffered.metadata().map_err(system)?.rdev();
        Some(Arc::new(BelowLocks::of(number)))
    } else {
        None
    };
    if let Some(below) = below.as_ref().filter(|_| options.locked) {
        below.take(access).map_err(|(path, error)| below::open_error(path, error))?;
    }
    let size_bytes = buffered.seek(SeekFrom::End(0)).map_err(system)?;
    if size_bytes == 0 || !size_bytes.is_multiple_of(512) {
        return Err(unfit(format!(
            "{size_bytes} bytes are not a positive multiple of 512; `truncate -s %512 {spec}` pads the file"
        )));
    }
    let metadata = buffered.metadata().map_err(system)?;
    // The state is read here, before hob's own tests of the file change its timestamps.
    let evidence = if is_block_device { None } else { evidence::at_opening(&buffered) };
    let times = if is_block_device { None } else { evidence::times_at_opening(&buffered) };
    let has_timestamps = !is_block_device && evidence::has_timestamps(&buffered);
    let constant = state().filter(|state| before.as_ref() == Some(state));
    let memory = file_type.is_file() && is_memory(&buffered);
    let small_blocks = is_block_device || metadata.blksize() <= SECTOR_BYTES;
    let direct =
        if options.direct && !memory && small_blocks { open_direct(open).map_err(system)? } else { None };
    let direct = match direct {
        Some(file) => direct_block_bytes(&file).map_err(system)?.map(|bytes| (file, bytes)),
        None => None,
    };
    let how = match (&direct, memory) {
        (Some(_), _) => "O_DIRECT",
        (None, true) => "in memory",
        (None, false) => {
            if options.direct {
                tracing::warn!(
                    path = spec,
                    "the filesystem does not support O_DIRECT; I/O of the disk goes through the page cache"
                );
            }
            "buffered"
        }
    };
    if direct.is_some() {
        let _ = rustix::fs::fadvise(&buffered, 0, None, rustix::fs::Advice::Random);
    }
    let can_punch =
        write && (is_block_device || holes::can_punch(&buffered, path, &metadata, options.locked));
    let kind = if is_block_device { "block device" } else { "file" };
    let identity_text = match is_block_device {
        true => identity::of_block_device(Path::new(identity::SYS_BLOCK), metadata.rdev(), size_bytes),
        false => identity::of_file("file", &metadata, size_bytes),
    };
    // A file that hob does not write loses nothing.
    let volatile = if write { volatile::volatile(&buffered).map_err(system)? } else { None };
    let class = match memory {
        _ if volatile.is_some() => FdClass::Volatile,
        true => FdClass::Memory,
        false if !is_block_device && may_block(&buffered) => FdClass::Foreign,
        false => FdClass::File,
    };
    let sys = Path::new(identity::SYS_BLOCK);
    let stripe_bytes = match is_block_device {
        true => stripe::of_device(sys, metadata.rdev()),
        false => stripe::of_file(sys, &buffered, &metadata),
    };
    let info = BackingInfo {
        size_bytes,
        block_bytes: direct.as_ref().map_or(1, |(_, bytes)| *bytes),
        stripe_bytes,
        block_bytes_min: 1,
        can_flush: true,
        can_discard: can_punch,
        can_fast_zero: can_punch,
        read_only: !write,
        description: format!("{kind} {spec} ({how})"),
        changed: (!is_block_device).then(|| ChangeMark::of(&metadata)),
        evidence,
        // hob writes the data of a volatile file to the real file later, so the file's times are no
        // evidence.
        times: times.filter(|_| volatile.is_none()),
        file: file_number(&metadata),
        ..BackingInfo::identified(identity_text)
    };
    Ok(FileBacking {
        info,
        direct: direct.map(|(file, _)| Arc::new(file.into())),
        buffered: Some(Arc::new(buffered.into())),
        class,
        volatile,
        is_block_device,
        device: if is_block_device { metadata.rdev() } else { metadata.dev() },
        number: None,
        has_timestamps,
        constant,
        access,
        below,
        end: FileEnd::default(),
        attached: None,
        several: Vec::new(),
        free: Vec::new(),
        in_flight: 0,
        gate: None,
        stopped: Vec::new(),
        retry_at: Instant(0),
        stale: Stale::new(path, options),
        is_lost: false,
        wait_ns: options.wait_max.as_nanos() as u64,
        working: BTreeSet::new(),
        durable: BTreeSet::new(),
        has_lost: false,
        to_work: VecDeque::new(),
        done: VecDeque::new(),
        statuses: VecDeque::new(),
        helper: Helper::new().map_err(system)?,
        asked: BTreeSet::new(),
        event: None,
        life: Life::Open,
    })
}

impl FileBacking {
    fn buffered(&self) -> &Arc<OwnedFd> {
        self.buffered.as_ref().expect("a backing is not used after it is closed")
    }

    fn file_reader(&self) -> FileReader {
        FileReader { file: self.buffered().clone(), volatile: self.volatile.clone() }
    }

    /// Starts a job on the helper thread. A completion in the I/O ring reports the end of the job.
    fn ask_helper(&mut self, ring: &mut Ring, job: Job) {
        self.helper.start(job);
        let event = match self.event {
            Some((_, true)) => return,
            Some((event, false)) => event,
            None => ring.attach(self.helper.event(), FdClass::Event),
        };
        self.event = Some((event, true));
        ring.await_event(self.attached().tokens.token(HELPER), event);
    }

    /// Handles the end of a job of the helper thread.
    fn helper_ended(&mut self, ring: &mut Ring, now: Instant) {
        let (event, _) = self.event.expect("what completes was awaited");
        self.event = Some((event, false));
        while let Some(ended) = self.helper.poll() {
            match ended {
                Ended::Status(id, status) if self.asked.remove(&id) => self.statuses.push_back((id, status)),
                // The query was answered when the backing was closed.
                Ended::Status(..) => {}
                Ended::Reopened(result) => self.reopened(ring, now, result),
                Ended::Closed(mark) => {
                    self.life = Life::Closed(mark);
                    self.attached = None;
                    return ring.detach_event(event);
                }
            }
        }
        if !self.asked.is_empty() || self.life == Life::Closing || self.stale.is_opening() {
            self.event = Some((event, true));
            ring.await_event(self.attached().tokens.token(HELPER), event);
        }
    }

    /// When the kernel has no I/O of the files any more, makes the helper thread close them,
    /// because closing may block.
    fn end_if_idle(&mut self, ring: &mut Ring) {
        if self.life != Life::Ending || self.in_flight > 0 {
            return;
        }
        self.life = Life::Closing;
        if let Some(number) = self.number.take() {
            ring.worker_shares().leave(number);
        }
        let (direct, volatile, is_block_device) =
            (self.direct.take(), self.volatile.clone(), self.is_block_device);
        let below = self.below.take();
        let buffered = self.buffered.take().expect("it is closed once");
        let close = move || {
            let mark = if is_block_device { None } else { mark_of(&buffered, volatile.as_deref()) };
            drop((direct, buffered, below));
            mark
        };
        self.ask_helper(ring, Job::Close(Box::new(close)));
    }

    fn attached(&self) -> Attached {
        self.attached.expect("a backing is attached before it is used")
    }

    /// Sets the lease gate of the attached descriptors, if there is one and the file is open.
    fn gate_descriptors(&self, ring: &mut Ring) {
        let Some(gate) = self.gate.as_ref().filter(|_| self.life == Life::Open) else { return };
        let number = self.number.expect("a backing is attached before it is used");
        let Attached { direct, buffered, .. } = self.attached();
        direct.into_iter().chain([buffered]).for_each(|fd| ring.set_gate(fd, number, gate.clone()));
    }

    /// Returns true if each operation on the file may occupy a worker thread: of the kernel, or of
    /// this process if there is no io_uring.
    fn all_occupy_workers(&self, ring: &Ring) -> bool {
        match self.class {
            FdClass::Foreign => true,
            FdClass::File => ring.kind() == RingKind::Threads,
            _ => false,
        }
    }

    /// Returns true if an operation may occupy a worker thread.
    fn occupies_worker(&self, ring: &Ring, op: IoOp) -> bool {
        let is_transfer = matches!(op, IoOp::Read | IoOp::Write(_));
        (self.class == FdClass::File && !is_transfer) || self.all_occupy_workers(ring)
    }

    /// Returns the number of worker threads that I/Os may occupy now. An unaligned transfer has up
    /// to three operations.
    fn occupied_workers(&self, ring: &Ring) -> usize {
        let Attached { direct, buffered, .. } = self.attached();
        let operations: usize = match self.all_occupy_workers(ring) {
            true => direct.into_iter().chain([buffered]).map(|fd| ring.in_flight_of(fd)).sum(),
            false => 0,
        };
        self.working.len().max(operations)
    }

    /// Starts I/Os that wait for a worker thread, until the file occupies as many workers as it
    /// may. Call this when I/Os have ended.
    fn resume(&mut self, ring: &mut Ring, now: Instant) {
        let Some(number) = self.number else { return };
        loop {
            let occupied = self.occupied_workers(ring);
            let shares = ring.worker_shares();
            shares.set_occupied(number, occupied);
            if self.to_work.is_empty() || !shares.may_occupy(number) {
                return;
            }
            let io = self.to_work.pop_front().expect("an I/O waits");
            self.working.insert(io.id);
            self.begin(ring, now, &io);
        }
    }

    fn finish(&mut self, io: IoId, result: Result<(), IoError>) {
        self.in_flight -= 1;
        if !self.working.is_empty() {
            self.working.remove(&io);
        }
        // The kernel reports a failed writeback, or a failed flush of the device, only once for the
        // file. The next flush succeeds, although data may be lost.
        if !self.durable.is_empty() && self.durable.remove(&io) {
            self.has_lost |= matches!(result, Err(IoError::Failed | IoError::NoSpace));
        }
        self.done.push_back((io, result));
    }

    /// Submits an I/O to the I/O ring.
    fn begin(&mut self, ring: &mut Ring, now: Instant, io: &Io) {
        let Attached { direct, buffered, tokens } = self.attached();
        if self.info.read_only && !matches!(io.op, IoOp::Read | IoOp::Flush) {
            return self.finish(io.id, Err(IoError::ReadOnly));
        }
        if !matches!(io.op, IoOp::Read | IoOp::Flush) && self.is_past_the_end(now, io.offset + io.len) {
            return self.finish(io.id, Err(IoError::Failed));
        }
        match (io.op, io.slice) {
            (IoOp::Read | IoOp::Write(_), None) => unreachable!("a transfer has a slice"),
            (IoOp::WriteJournal, _) => unreachable!("journals are on flash"),
            // A stale file handle may stop any I/O, which is then repeated.
            _ if self.class == FdClass::Foreign => self.start_several(ring, now, io, first_step(io.op)),
            (IoOp::Flush, _) => ring.fsync(tokens.token(io.id.0), buffered),
            // The lease gate may stop the write, which is then repeated.
            (IoOp::Write(_), _) if self.gate.is_some() => self.start_several(ring, now, io, Step::Parts),
            (IoOp::Read | IoOp::Write(_), Some(slice)) => match direct {
                None => self.transfer(ring, io.id.0, io.op, buffered, io.offset, slice),
                Some(fd) if self.is_direct(io.offset, slice) => {
                    self.transfer(ring, io.id.0, io.op, fd, io.offset, slice);
                }
                Some(_) => self.start_several(ring, now, io, Step::Parts),
            },
            (IoOp::Discard | IoOp::WriteZeroes(_), _) => {
                self.start_several(ring, now, io, first_step(io.op));
            }
        }
    }

    /// Handles the end of an operation of an I/O.
    fn io_ended(&mut self, ring: &mut Ring, now: Instant, completion: &Completion) {
        let index = completion.token.index();
        let result = io_result(completion.result);
        if index & SEVERAL == 0 {
            return self.finish(IoId(index), result);
        }
        let slot = index & !SEVERAL;
        let is_stale = completion.result == -libc::ESTALE && self.class == FdClass::Foreign;
        if is_stale {
            self.reopen(ring, now);
        }
        let several = &mut self.several[slot as usize];
        several.stopped |= is_stale || completion.result == -libc::ECANCELED && self.gate.is_some();
        // A block device refuses to discard or zero ranges that are not whole blocks. hob treats
        // that like an operation that the device does not support.
        let refused = completion.result == -libc::EINVAL
            && matches!(several.step, Step::Discard | Step::Punch | Step::ZeroRange);
        let result = if refused { Err(IoError::Unsupported) } else { result };
        several.result = several.result.and(result);
        several.in_flight -= 1;
        if several.in_flight == 0 {
            self.end_step(ring, now, slot);
        }
    }
}

impl Driver for FileBacking {
    fn info(&self) -> &BackingInfo {
        &self.info
    }

    fn attach(&mut self, ring: &mut Ring, _now: Instant, tokens: TokenSpace) {
        let direct = self.direct.clone().map(|file| ring.attach(file, self.class));
        let buffered = ring.attach(self.buffered().clone(), self.class);
        self.attached = Some(Attached { direct, buffered, tokens });
        self.number = Some(ring.worker_shares().join(self.device));
    }

    fn set_gate(&mut self, ring: &mut Ring, gate: Arc<dyn Gate>) {
        self.gate = Some(Arc::new(RevocableGate::new(gate)));
        self.gate_descriptors(ring);
    }

    fn submit(&mut self, ring: &mut Ring, now: Instant, io: &Io) {
        assert!(io.id.0 < SEVERAL, "an engine has fewer than 2^31 I/Os in flight");
        self.in_flight += 1;
        if io.op == IoOp::Write(Durability::Durable) {
            self.durable.insert(io.id);
        }
        if self.occupies_worker(ring, io.op) {
            self.to_work.push_back(*io);
            return self.resume(ring, now);
        }
        self.begin(ring, now, io);
    }

    fn handle_completion(&mut self, ring: &mut Ring, now: Instant, completion: Completion) {
        if completion.token.index() == HELPER {
            return self.helper_ended(ring, now);
        }
        self.io_ended(ring, now, &completion);
        self.resume(ring, now);
        self.end_if_idle(ring);
    }

    fn take_loss(&mut self) -> bool {
        std::mem::take(&mut self.has_lost)
    }

    fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        self.done.pop_front()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let retry = (!self.stopped.is_empty()).then_some(self.retry_at);
        retry.into_iter().chain(self.stale.poll_timeout()).min()
    }

    fn handle_timeout(&mut self, ring: &mut Ring, now: Instant) {
        if self.stale.poll_timeout().is_some_and(|at| at <= now) {
            self.reopen(ring, now);
        }
        if now >= self.retry_at {
            self.retry_stopped(ring, now);
        }
    }

    fn revoke(&mut self, ring: &mut Ring, now: Instant) {
        self.is_lost = true;
        if let Some(gate) = &self.gate {
            gate.revoke();
        }
        for slot in std::mem::take(&mut self.stopped) {
            self.stop(now, slot);
        }
        for io in std::mem::take(&mut self.to_work) {
            self.finish(io.id, Err(IoError::ShuttingDown));
        }
        self.resume(ring, now);
    }

    fn set_wait_max(&mut self, now: Instant, change: WaitMax) {
        let before = self.wait_ns;
        self.wait_ns = change.after(Duration::from_nanos(before)).as_nanos() as u64;
        for several in &mut self.several {
            let moved = match change {
                WaitMax::Expired => 0,
                _ => several.deadline.0.saturating_sub(before).saturating_add(self.wait_ns),
            };
            several.deadline = Instant(moved).max(now);
        }
    }

    fn submit_status(&mut self, ring: &mut Ring, _now: Instant, id: u64, offset: u64, len: u64) {
        let end = (offset + len).min(self.info.size_bytes);
        // A volatile file may have unflushed data in memory where the real file has holes.
        if self.is_block_device || self.class == FdClass::Volatile || self.life != Life::Open {
            let all = StatusExtent { len: end - offset, hole: false, zero: false };
            return self.statuses.push_back((id, Ok(vec![all])));
        }
        let file = self.buffered().clone();
        self.asked.insert(id);
        self.ask_helper(ring, Job::Status(id, Box::new(move || status(&file, offset, end))));
    }

    fn poll_status(&mut self) -> Option<(u64, Status)> {
        self.statuses.pop_front()
    }

    fn close(&mut self, ring: &mut Ring) {
        if self.life != Life::Open {
            return;
        }
        let Some(Attached { direct, buffered, .. }) = self.attached else {
            self.life = Life::Closed(None);
            return;
        };
        direct.into_iter().chain([buffered]).for_each(|fd| ring.detach(fd));
        // The caller does not wait for a filesystem that hangs.
        let unanswered = std::mem::take(&mut self.asked);
        self.statuses.extend(unanswered.into_iter().map(|id| (id, Err(IoError::ShuttingDown))));
        for io in std::mem::take(&mut self.to_work) {
            self.finish(io.id, Err(IoError::ShuttingDown));
        }
        for slot in std::mem::take(&mut self.stopped) {
            self.free.push(slot);
            self.finish(self.several[slot as usize].io.id, Err(IoError::ShuttingDown));
        }
        self.life = Life::Ending;
        self.end_if_idle(ring);
    }

    fn is_closed(&self) -> bool {
        matches!(self.life, Life::Closed(_))
    }

    fn read_before_attach(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        self.file_reader().read(offset, bytes)
    }

    fn reader(&self) -> Option<Box<dyn Reader>> {
        Some(Box::new(self.file_reader()))
    }

    fn lock(&self) -> Option<Lock> {
        let below = self.below.as_ref().map(Arc::downgrade);
        Some(Lock::of_file(Arc::downgrade(self.buffered()), self.access, below))
    }

    fn size_probe(&self) -> Option<SizeProbe> {
        Some(SizeProbe::of_file(self.buffered()))
    }

    fn grow(&mut self, size_bytes: u64) {
        self.info.grow(size_bytes);
    }

    fn constant(&self) -> Option<&str> {
        self.constant.as_deref()
    }

    fn witness(&self) -> Option<ChangeDetector> {
        // Writes to a volatile file reach the file later, without a request.
        let has_evidence = self.has_timestamps && self.volatile.is_none();
        has_evidence.then(|| ChangeDetector::of_file(self.buffered()))
    }

    fn change_mark(&self) -> Option<ChangeMark> {
        match self.life {
            Life::Closed(mark) => mark,
            // A query of the file may block its shard, so it is made before the backing is
            // attached, and when it is closed.
            _ if self.is_block_device || self.attached.is_some() => None,
            _ => mark_of(self.buffered(), self.volatile.as_deref()),
        }
    }
}

#[cfg(test)]
mod tests;
