//! A raw file or a block device as backing.
//!
//! # Two descriptors, one disk
//! Most I/O goes through an O_DIRECT descriptor. Of an I/O that is not aligned to the device's logical
//! block, the first and the last sector (4 KiB) go through a buffered one, as far as they are partial; the
//! middle stays direct. Mixing the two is coherent because the kernel writes dirty
//! pages back before direct I/O and drops them, and because never two I/Os in flight touch the
//! same page of the page cache: the engine sees to that between requests, the cut at sectors
//! inside one. (If they did, the kernel could not drop the page and the next fdatasync would report EIO.)
//! Read-ahead is switched off on the buffered descriptor, so that pages do not come in larger folios.
//! Filesystems with blocks above 4 KiB break that reasoning and get buffered I/O only.
//!
//! # Durability
//! A durable write carries RWF_DSYNC; a flush is fdatasync, which concerns the file, not the
//! descriptor.
//!
//! # Locks
//! Exclusive for a disk that is written, shared for a read-only one; see [`crate::lock`].
//!
//! # Files that shrink
//! A write past the end of a file would make it larger again, with zeroes in between. So the file's size is asked for before the first change
//! of each turn of the shard's loop, without waiting for its filesystem, and changes past the end fail.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use hob_engine::command::Access;
use hob_engine::io::{BufferSlice, Durability, Io, IoError, IoOp, Zeroing};
use hob_engine::units::{Instant, IoId, SECTOR_BYTES, sector_ceil, sector_floor};
use rustix::fs::{AtFlags, FallocateFlags, StatxFlags};
use rustix::io::Errno;

use super::identity::{self, ChangeMark};
use super::{
    BackingInfo, BackingOptions, Driver, Gauge, Lock, OpenError, Reader, Status, StatusExtent, io_result,
};
use crate::lock::{LockError, lock_image};
use crate::pool::is_memory_filesystem;
use crate::ring::{Completion, Fd, FdClass, Ring, ZEROES_BYTES, read_now};
use crate::token::TokenSpace;
use crate::volatile::{self, VolatileFile};

/// Set in the token index of an I/O that takes several operations; the rest is its slot. Otherwise
/// the index is the I/O's id.
const SEVERAL: u32 = 1 << 31;

/// Most extents of one status answer; the asker comes back for more.
const EXTENTS_MAX: usize = 4096;

const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);
const ZERO: FallocateFlags = FallocateFlags::ZERO_RANGE.union(FallocateFlags::KEEP_SIZE);

/// An I/O of several operations.
#[derive(Clone, Copy, Debug)]
struct Several {
    io: Io,
    step: Step,
    /// Operations in the ring.
    in_flight: u32,
    result: Result<(), IoError>,
}

/// What a multi-operation I/O is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Moving the parts of an unaligned transfer.
    Parts,
    /// Discarding.
    Discard,
    /// Trying to zero by punching a hole.
    Punch,
    /// Trying to zero a range that stays allocated.
    ZeroRange,
    /// Writing zeroes; up to this offset they are there or on their way.
    Zeroes(u64),
}

/// Descriptors in the ring.
#[derive(Clone, Copy, Debug)]
struct Attached {
    direct: Option<Fd>,
    buffered: Fd,
    tokens: TokenSpace,
}

/// What is known of a file's end.
#[derive(Clone, Copy, Debug, Default)]
struct FileEnd {
    /// When the size was asked for.
    asked: Option<Instant>,
    /// It is shorter than the disk: bytes.
    short: Option<u64>,
}

struct FileBacking {
    info: BackingInfo,
    direct: Option<Arc<OwnedFd>>,
    buffered: Arc<OwnedFd>,
    class: FdClass,
    /// In a power-cut test, what keeps un-flushed writes.
    volatile: Option<Arc<VolatileFile>>,
    is_block_device: bool,
    access: Access,
    end: FileEnd,
    attached: Option<Attached>,
    several: Vec<Several>,
    free: Vec<u32>,
    in_flight: usize,
    done: VecDeque<(IoId, Result<(), IoError>)>,
    statuses: VecDeque<(u64, Status)>,
}

/// Reads it past the ring.
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
    let path = Path::new(spec);
    let system = |source| OpenError::System { path: path.into(), source };
    let unfit = |reason: String| OpenError::Unfit { what: spec.to_owned(), reason };
    let write = access == Access::ReadWrite;
    let file_type = super::path::check(path)?;
    let is_block_device = file_type.is_block_device();
    // Exclusive on a block device means: not mounted.
    let exclusive = if is_block_device && write && options.locked { libc::O_EXCL } else { 0 };
    let open = |flags| OpenOptions::new().read(true).write(write).custom_flags(flags).open(path);
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
    let size_bytes = buffered.seek(SeekFrom::End(0)).map_err(system)?;
    if size_bytes == 0 || !size_bytes.is_multiple_of(512) {
        return Err(unfit(format!(
            "{size_bytes} bytes are not a whole, positive number of 512-byte sectors; `truncate -s %512 {spec}` pads the file"
        )));
    }
    let metadata = buffered.metadata().map_err(system)?;
    let memory = file_type.is_file() && is_memory_filesystem(&buffered);
    let small_blocks = is_block_device || metadata.blksize() <= SECTOR_BYTES;
    let direct = if options.direct && !memory && small_blocks { open(libc::O_DIRECT).ok() } else { None };
    let direct = direct.and_then(|file| direct_block_bytes(&file).map(|bytes| (file, bytes)));
    let how = match (&direct, memory) {
        (Some(_), _) => "O_DIRECT",
        (None, true) => "in memory",
        (None, false) => {
            if options.direct {
                tracing::warn!(path = spec, "no O_DIRECT here; the disk's data go through the page cache");
            }
            "buffered"
        }
    };
    if direct.is_some() {
        let _ = rustix::fs::fadvise(&buffered, 0, None, rustix::fs::Advice::Random);
    }
    // Behind the end nothing is lost, and the answer is the same.
    let beyond = size_bytes.next_multiple_of(SECTOR_BYTES);
    let can_punch =
        write && (is_block_device || rustix::fs::fallocate(&buffered, PUNCH, beyond, SECTOR_BYTES).is_ok());
    if let (true, false, true, Ok(modified)) = (write, is_block_device, options.locked, metadata.modified()) {
        // Trying it counts as a change, and it must not be taken for somebody else's when hob ends before it
        // has kept a mark. Where the time cannot be set back, it is: clean data are given up for nothing. Without the lock,
        // others may change it at this moment.
        let _ = buffered.set_modified(modified);
    }
    let kind = if is_block_device { "block device" } else { "file" };
    let identity_text = match is_block_device {
        true => identity::of_block_device(Path::new(identity::SYS_BLOCK), metadata.rdev(), size_bytes),
        false => identity::of_file("file", &metadata, size_bytes),
    };
    // What is not written loses nothing.
    let volatile = if write { volatile::volatile(&buffered).map_err(system)? } else { None };
    let class = match memory {
        _ if volatile.is_some() => FdClass::Volatile,
        true => FdClass::Memory,
        false => FdClass::File,
    };
    let info = BackingInfo {
        size_bytes,
        block_bytes: direct.as_ref().map_or(1, |(_, bytes)| *bytes),
        block_bytes_min: 1,
        can_flush: true,
        can_discard: can_punch,
        can_fast_zero: can_punch,
        read_only: !write,
        description: format!("{kind} {spec} ({how})"),
        identity: identity::hash(&identity_text),
        identity_text,
        changed: (!is_block_device).then(|| ChangeMark::of(&metadata)),
    };
    Ok(Box::new(FileBacking {
        info,
        direct: direct.map(|(file, _)| Arc::new(file.into())),
        buffered: Arc::new(buffered.into()),
        class,
        volatile,
        is_block_device,
        access,
        end: FileEnd::default(),
        attached: None,
        several: Vec::new(),
        free: Vec::new(),
        in_flight: 0,
        done: VecDeque::new(),
        statuses: VecDeque::new(),
    }))
}

/// The alignment that O_DIRECT wants, found by trying; `None` when it does not work at all.
fn direct_block_bytes(file: &File) -> Option<u32> {
    let mut memory = vec![0u8; 2 * SECTOR_BYTES as usize];
    let skip = memory.as_ptr().align_offset(SECTOR_BYTES as usize);
    let works = |bytes: &u32| {
        let buffer = &mut memory[skip..skip + *bytes as usize];
        rustix::io::pread(file, buffer, 0).is_ok()
    };
    [512, 4096].into_iter().find(works)
}

impl FileBacking {
    fn attached(&self) -> Attached {
        self.attached.expect("a backing is attached before it is used")
    }

    /// Is all of a transfer aligned for the direct descriptor? The slice's place in its
    /// page follows the offset's in its sector, except in buffers somebody built differently.
    fn is_direct(&self, offset: u64, slice: BufferSlice) -> bool {
        let mask = u64::from(self.info.block_bytes) - 1;
        (offset | u64::from(slice.len) | u64::from(slice.offset)) & mask == 0
    }

    fn transfer(&self, ring: &mut Ring, index: u32, op: IoOp, fd: Fd, offset: u64, slice: BufferSlice) {
        let token = self.attached().tokens.token(index);
        match op {
            IoOp::Read => ring.read(token, fd, offset, slice),
            IoOp::Write(durability) => ring.write(token, fd, offset, slice, durability),
            _ => ring.write(token, fd, offset, slice, Durability::Volatile),
        }
    }

    /// Cuts a transfer so that what can be direct is; returns the number of operations.
    fn transfer_parts(&self, ring: &mut Ring, index: u32, op: IoOp, offset: u64, slice: BufferSlice) -> u32 {
        let Attached { direct, buffered, .. } = self.attached();
        let end = offset + u64::from(slice.len);
        let (from, to) = (sector_ceil(offset), sector_floor(end));
        let same_phase = offset % SECTOR_BYTES == u64::from(slice.offset) % SECTOR_BYTES;
        let Some(direct) = direct.filter(|_| same_phase && from < to) else {
            self.transfer(ring, index, op, buffered, offset, slice);
            return 1;
        };
        let mut count = 0;
        for (fd, first, last) in [(buffered, offset, from), (direct, from, to), (buffered, to, end)] {
            if first < last {
                let start = slice.offset + (first - offset) as u32;
                let part = BufferSlice { id: slice.id, offset: start, len: (last - first) as u32 };
                self.transfer(ring, index, op, fd, first, part);
                count += 1;
            }
        }
        count
    }

    /// Would a change that ends there make the file larger?
    fn is_past_the_end(&mut self, now: Instant, end: u64) -> bool {
        if self.is_block_device {
            return false;
        }
        if self.end.asked != Some(now) {
            self.end.asked = Some(now);
            // What the kernel knows already: a filesystem that hangs is not waited for.
            let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
            if let Ok(found) = rustix::fs::statx(&self.buffered, "", flags, StatxFlags::SIZE) {
                self.note_end(found.stx_size);
            }
        }
        self.end.short.is_some_and(|size_bytes| end > size_bytes)
    }

    fn note_end(&mut self, size_bytes: u64) {
        let full = self.info.size_bytes;
        let short = (size_bytes < full).then_some(size_bytes);
        if short.is_some() && self.end.short.is_none() {
            tracing::error!(
                "{}: the file has shrunk from {full} to {size_bytes} bytes. What was past its end is lost; I/O there fails until \
                 'truncate --size={full}' makes it as large as it was",
                self.info.description
            );
        }
        self.end.short = short;
    }

    fn start_several(&mut self, ring: &mut Ring, io: &Io, step: Step) {
        let several = Several { io: *io, step, in_flight: 0, result: Ok(()) };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.several[slot as usize] = several;
                slot
            }
            None => {
                self.several.push(several);
                self.several.len() as u32 - 1
            }
        };
        self.run_step(ring, slot);
    }

    /// Starts the operations of a slot's step.
    fn run_step(&mut self, ring: &mut Ring, slot: u32) {
        let Several { io, step, .. } = self.several[slot as usize];
        let index = SEVERAL | slot;
        let Attached { buffered, tokens, .. } = self.attached();
        let fallocate = |ring: &mut Ring, mode: FallocateFlags| {
            ring.fallocate(tokens.token(index), buffered, mode.bits() as i32, io.offset, io.len);
            1
        };
        let count = match step {
            Step::Parts => {
                let slice = io.slice.expect("a transfer has a slice");
                self.transfer_parts(ring, index, io.op, io.offset, slice)
            }
            Step::Discard | Step::Punch => fallocate(ring, PUNCH),
            Step::ZeroRange => fallocate(ring, ZERO),
            Step::Zeroes(from) => {
                // A piece starts in the zero buffer where it starts in its page.
                let lead = (from % SECTOR_BYTES) as u32;
                let len = (io.offset + io.len - from).min(u64::from(ZEROES_BYTES - lead)) as u32;
                let slice = BufferSlice { offset: lead, len, ..ring.zeroes(ZEROES_BYTES) };
                self.several[slot as usize].step = Step::Zeroes(from + u64::from(len));
                self.transfer_parts(ring, index, io.op, from, slice)
            }
        };
        self.several[slot as usize].in_flight = count;
    }

    /// All operations of a slot's step have ended: the next one, or the end.
    fn end_step(&mut self, ring: &mut Ring, slot: u32) {
        let Several { io, step, result, .. } = self.several[slot as usize];
        let end = io.offset + io.len;
        let next = match (step, result) {
            (Step::Zeroes(to), Ok(())) if to < end => Some(Step::Zeroes(to)),
            (Step::Punch, Err(IoError::Unsupported)) => Some(Step::ZeroRange),
            (Step::ZeroRange, Err(IoError::Unsupported)) if !is_fast(io.op) => Some(Step::Zeroes(io.offset)),
            _ => None,
        };
        if let Some(step) = next {
            let several = &mut self.several[slot as usize];
            (several.step, several.result) = (step, Ok(()));
            return self.run_step(ring, slot);
        }
        // A discard is a wish; not being able to is no failure.
        let granted = step == Step::Discard && result == Err(IoError::Unsupported);
        self.free.push(slot);
        self.finish(io.id, if granted { Ok(()) } else { result });
    }

    fn finish(&mut self, io: IoId, result: Result<(), IoError>) {
        self.in_flight -= 1;
        self.done.push_back((io, result));
    }

    fn status(&self, offset: u64, len: u64) -> Status {
        let end = (offset + len).min(self.info.size_bytes);
        let mut extents = Vec::new();
        let mut at = offset;
        while at < end && extents.len() < EXTENTS_MAX {
            let data = match rustix::fs::seek(&self.buffered, rustix::fs::SeekFrom::Data(at)) {
                // A volatile file's holes may have been written in its cache.
                Ok(data) if !self.is_block_device && self.class != FdClass::Volatile => data.min(end),
                Err(Errno::NXIO) if self.class != FdClass::Volatile => end,
                // Not known: data everywhere is never wrong.
                _ => {
                    extents.push(StatusExtent { len: end - at, hole: false, zero: false });
                    break;
                }
            };
            if data > at {
                extents.push(StatusExtent { len: data - at, hole: true, zero: true });
                at = data;
                continue;
            }
            let hole = rustix::fs::seek(&self.buffered, rustix::fs::SeekFrom::Hole(at));
            let hole = hole.map_or(end, |hole| hole.min(end)).max(at + 1);
            extents.push(StatusExtent { len: hole - at, hole: false, zero: false });
            at = hole;
        }
        Ok(extents)
    }
}

/// Must zeroing be faster than writing, or not happen?
fn is_fast(op: IoOp) -> bool {
    matches!(op, IoOp::WriteZeroes(Zeroing::FastMayUnmap | Zeroing::FastKeepAllocated))
}

impl Driver for FileBacking {
    fn info(&self) -> &BackingInfo {
        &self.info
    }

    fn attach(&mut self, ring: &mut Ring, _now: Instant, tokens: TokenSpace) {
        let direct = self.direct.clone().map(|file| ring.attach(file, self.class));
        let buffered = ring.attach(self.buffered.clone(), self.class);
        self.attached = Some(Attached { direct, buffered, tokens });
    }

    fn submit(&mut self, ring: &mut Ring, now: Instant, io: &Io) {
        assert!(io.id.0 < SEVERAL, "an engine has fewer than 2^31 I/Os in flight");
        self.in_flight += 1;
        let Attached { direct, buffered, tokens } = self.attached();
        if self.info.read_only && !matches!(io.op, IoOp::Read | IoOp::Flush) {
            return self.finish(io.id, Err(IoError::ReadOnly));
        }
        if !matches!(io.op, IoOp::Read | IoOp::Flush) && self.is_past_the_end(now, io.offset + io.len) {
            return self.finish(io.id, Err(IoError::Failed));
        }
        match (io.op, io.slice) {
            (IoOp::Read | IoOp::Write(_), Some(slice)) => match direct {
                None => self.transfer(ring, io.id.0, io.op, buffered, io.offset, slice),
                Some(fd) if self.is_direct(io.offset, slice) => {
                    self.transfer(ring, io.id.0, io.op, fd, io.offset, slice);
                }
                Some(_) => self.start_several(ring, io, Step::Parts),
            },
            (IoOp::Read | IoOp::Write(_), None) => unreachable!("a transfer has a slice"),
            (IoOp::WriteJournal, _) => unreachable!("journals are on flash"),
            (IoOp::Flush, _) => ring.fsync(tokens.token(io.id.0), buffered),
            (IoOp::Discard, _) => self.start_several(ring, io, Step::Discard),
            (IoOp::WriteZeroes(Zeroing::MayUnmap | Zeroing::FastMayUnmap), _) => {
                self.start_several(ring, io, Step::Punch);
            }
            (IoOp::WriteZeroes(_), _) => self.start_several(ring, io, Step::ZeroRange),
        }
    }

    fn handle_completion(&mut self, ring: &mut Ring, _now: Instant, completion: Completion) {
        let index = completion.token.index();
        let result = io_result(completion.result);
        if index & SEVERAL == 0 {
            return self.finish(IoId(index), result);
        }
        let slot = index & !SEVERAL;
        let several = &mut self.several[slot as usize];
        // A block device refuses ranges that are not whole blocks; the way out is the same.
        let refused = completion.result == -libc::EINVAL
            && matches!(several.step, Step::Discard | Step::Punch | Step::ZeroRange);
        let result = if refused { Err(IoError::Unsupported) } else { result };
        several.result = several.result.and(result);
        several.in_flight -= 1;
        if several.in_flight == 0 {
            self.end_step(ring, slot);
        }
    }

    fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        self.done.pop_front()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        None
    }

    fn handle_timeout(&mut self, _ring: &mut Ring, _now: Instant) {}

    fn submit_status(&mut self, _ring: &mut Ring, _now: Instant, id: u64, offset: u64, len: u64) {
        let status = self.status(offset, len);
        self.statuses.push_back((id, status));
    }

    fn poll_status(&mut self) -> Option<(u64, Status)> {
        self.statuses.pop_front()
    }

    fn close(&mut self, ring: &mut Ring) {
        if let Some(Attached { direct, buffered, .. }) = self.attached.take() {
            direct.into_iter().chain([buffered]).for_each(|fd| ring.detach(fd));
        }
    }

    fn is_closed(&self) -> bool {
        self.attached.is_none() && self.in_flight == 0
    }

    fn read_before_attach(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        FileReader { file: self.buffered.clone(), volatile: self.volatile.clone() }.read(offset, bytes)
    }

    fn reader(&self) -> Option<Box<dyn Reader>> {
        Some(Box::new(FileReader { file: self.buffered.clone(), volatile: self.volatile.clone() }))
    }

    fn lock(&self) -> Option<Lock> {
        Some(Lock::of_file(Arc::downgrade(&self.buffered), self.access))
    }

    fn gauge(&self) -> Option<Gauge> {
        Some(Gauge::of_file(&self.buffered))
    }

    fn grow(&mut self, size_bytes: u64) {
        self.info.grow(size_bytes);
    }

    fn change_mark(&self) -> Option<ChangeMark> {
        if self.is_block_device {
            return None;
        }
        if let Some(volatile) = &self.volatile {
            // What would get there later by itself would be taken for somebody else's change.
            volatile.settle().ok()?;
        }
        let file = File::from(self.buffered.try_clone().ok()?);
        file.metadata().ok().map(|metadata| ChangeMark::of(&metadata))
    }
}
