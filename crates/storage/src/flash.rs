//! The flash devices of one shard: executes the engine's flash I/O, and computes checksums.
//!
//! Each flash I/O uses one operation of the I/O ring and one slot of a table. The checksums of a
//! completed transfer are in a vector that is reused. Discards are acknowledged without effect,
//! because all space of a pool stays reserved. Zeroing is not supported.
//!
//! Journal pages are in the engine's memory. Journal pages are copied to a buffer that the I/O ring
//! reserves for them, so that they are aligned, registered and never wait for guests' buffers. If
//! the buffer is full, later journal writes wait for earlier ones.
//!
//! # Remote flash
//! I/O to another host's flash uses a connection (`backing/nbd`), which is opened again after a
//! failure. An I/O that the other host cannot complete waits, and neither completes nor fails. If
//! an I/O fails on the other host, or waits longer than [`Flash::set_remote_wait`],
//! [`Flash::poll_silent`] reports the device once. Only [`Flash::give_up`] fails the I/O, after its
//! caller has ensured that the device's data is no longer used (docs/decisions/0022).

use std::collections::VecDeque;
use std::time::Duration;

use hob_engine::io::{BufferSlice, Durability, Io, IoError, IoOp, Target};
use hob_engine::units::{BufferId, DeviceId, Instant, IoId};

use crate::backing::Driver;
use crate::backing::nbd::NbdBacking;
use crate::pool::{DeviceFlushes, FlashFile};
use crate::ring::{Completion, Fd, JOURNAL_ROOM_BYTES, Ring};
use crate::token::{Token, TokenSpace};

/// Maximum length of an [`IoOp::WriteJournal`], bytes.
pub const JOURNAL_IO_BYTES_MAX: u32 = 64 << 10;

/// Default time after which a waiting I/O to remote flash is reported.
pub const REMOTE_WAIT_DEFAULT: Duration = Duration::from_secs(5);

/// The flash devices of one shard.
#[derive(Debug)]
pub struct Flash {
    tokens: TokenSpace,
    /// Location of each attached device, by device id.
    devices: Vec<Option<DeviceLocation>>,
    /// Remote devices, including those that are being detached.
    remotes: Vec<Remote>,
    /// Time after which a waiting I/O to remote flash is reported, nanoseconds.
    remote_wait_ns: u64,
    now: Instant,
    /// Counters of each device, by device id.
    counts: Vec<DeviceCounts>,
    /// Number of failed flushes of each device at this shard's last flush, by device id.
    failures: Vec<u64>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Slots of successful flushes that wait for earlier flushes of other shards.
    flushed: Vec<u32>,
    sums: Vec<u32>,
    journal: JournalRoom,
}

/// Location of a device: this host or another.
#[derive(Clone, Debug)]
enum DeviceLocation {
    Here(Fd, DeviceFlushes),
    Remote,
}

/// A flash device on another host.
struct Remote {
    device: DeviceId,
    driver: NbdBacking,
    /// Whether it was reported that the device does not answer.
    told: bool,
    given_up: bool,
    /// I/Os that the device failed. They are treated as unanswered until the device is abandoned.
    failed: Vec<u32>,
    /// Whether the device was detached.
    left: bool,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").field("device", &self.device).finish_non_exhaustive()
    }
}

/// Counters of one device since it was attached. Discards and zeroing do not count, because they
/// reach no device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounts {
    /// Number of completed reads, writes and flushes.
    pub ios: u64,
    /// Number of completed reads, writes and flushes that failed.
    pub errors: u64,
    /// Number of bytes read from the device.
    pub read_bytes: u64,
    /// Number of bytes written to the device.
    pub written_bytes: u64,
    /// Number of reads, writes and flushes in flight.
    pub in_flight: u64,
}

/// A flash I/O in flight.
#[derive(Debug)]
struct Slot {
    io: Io,
    /// Part of the journal buffer that contains the I/O's pages.
    part: Option<u32>,
    /// State of a flush of a device on this host.
    flush: Option<FlushInFlight>,
}

/// A flush of a device on this host.
#[derive(Debug)]
struct FlushInFlight {
    flushes: DeviceFlushes,
    serial: u64,
    /// Number of failed flushes of the device that the engine knew when this flush began.
    failures: u64,
}

/// Buffer for journal pages that are being written, in parts of [`JOURNAL_IO_BYTES_MAX`].
#[derive(Debug, Default)]
struct JournalRoom {
    buffer: Option<BufferId>,
    /// Numbers of the free parts.
    free: Vec<u32>,
    /// Journal writes that wait for a free part of the buffer, oldest first: slot of the I/O, and a
    /// copy of its journal pages.
    waiting: VecDeque<(u32, Vec<u8>)>,
    /// Emptied page copies of journal writes that have waited, for reuse.
    spare: Vec<Vec<u8>>,
}

/// A completed flash I/O.
#[derive(Debug, PartialEq, Eq)]
pub struct FlashDone<'a> {
    /// Id of the completed I/O.
    pub io: IoId,
    /// Result of the I/O.
    pub result: Result<(), IoError>,
    /// Checksums of the sectors that were read or written. Empty for other operations and errors.
    pub sums: &'a [u32],
}

impl Flash {
    /// Creates a shard's flash without devices. The tokens of its completions have kind
    /// [`Token::FLASH`] and this owner.
    pub fn new(owner: u16) -> Flash {
        Flash {
            tokens: TokenSpace::new(Token::FLASH, owner),
            devices: Vec::new(),
            remotes: Vec::new(),
            remote_wait_ns: REMOTE_WAIT_DEFAULT.as_nanos() as u64,
            now: Instant::default(),
            counts: Vec::new(),
            failures: Vec::new(),
            slots: Vec::new(),
            free: Vec::new(),
            flushed: Vec::new(),
            sums: Vec::new(),
            journal: JournalRoom::default(),
        }
    }

    /// Attaches a device, so that I/O can use it.
    pub fn attach(&mut self, ring: &mut Ring, device: DeviceId, file: FlashFile) {
        let index = usize::from(device.0);
        if self.devices.len() <= index {
            self.devices.resize(index + 1, None);
            self.counts.resize(index + 1, DeviceCounts::default());
            self.failures.resize(index + 1, 0);
        }
        assert!(self.devices[index].is_none(), "device {device} is attached already");
        self.devices[index] = Some(match file {
            FlashFile::Here(local) => {
                self.failures[index] = local.flushes.failures();
                DeviceLocation::Here(ring.attach(local.file, local.class), local.flushes)
            }
            FlashFile::Remote(remote) => {
                let mut driver = remote.driver;
                driver.attach(ring, self.now, TokenSpace::new(Token::FLASH_REMOTE, device.0));
                self.remotes.push(Remote {
                    device,
                    driver,
                    told: false,
                    given_up: false,
                    failed: Vec::new(),
                    left: false,
                });
                DeviceLocation::Remote
            }
        });
        self.counts[index] = DeviceCounts::default();
    }

    /// Returns the counters of the attached devices.
    pub fn counts(&self) -> impl Iterator<Item = (DeviceId, DeviceCounts)> {
        let attached = self.devices.iter().zip(&self.counts).enumerate();
        attached
            .filter(|(_, (device, _))| device.is_some())
            .map(|(index, (_, counts))| (DeviceId(index as u16), *counts))
    }

    /// Detaches a device. I/O in flight still completes.
    pub fn detach(&mut self, ring: &mut Ring, device: DeviceId) {
        match self.devices.get_mut(usize::from(device.0)).and_then(Option::take) {
            Some(DeviceLocation::Here(fd, _)) => ring.detach(fd),
            Some(DeviceLocation::Remote) => {
                self.give_up(ring, device);
                self.remotes.iter_mut().filter(|it| it.device == device).for_each(|it| it.left = true);
            }
            None => {}
        }
    }

    /// Submits an I/O to a flash device. The I/O fails if the device is not attached. `journal`
    /// contains the bytes of an [`IoOp::WriteJournal`], which are copied; it is empty for other
    /// operations.
    pub fn submit(&mut self, ring: &mut Ring, io: &Io, journal: &[u8]) {
        assert_eq!(journal.len() as u64, if io.op == IoOp::WriteJournal { io.len } else { 0 }, "{io:?}");
        let number = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { io: *io, part: None, flush: None });
            self.slots.len() as u32 - 1
        });
        self.slots[number as usize] = Slot { io: *io, part: None, flush: None };
        let token = self.tokens.token(number);
        let Some(location) = self.device(io) else { return ring.post(token, -libc::ENODEV) };
        let is_remote = matches!(location, DeviceLocation::Remote);
        if reaches_device(io.op) {
            self.counts[device_of(io)].in_flight += 1;
        }
        match io.op {
            IoOp::Read | IoOp::Write(_) | IoOp::Flush if is_remote => self.submit_remote(ring, number, io),
            _ => self.submit_here(ring, number, io, journal),
        }
    }

    fn submit_here(&mut self, ring: &mut Ring, number: u32, io: &Io, journal: &[u8]) {
        let token = self.tokens.token(number);
        let fd = || match &self.devices[device_of(io)] {
            Some(DeviceLocation::Here(fd, _)) => *fd,
            _ => unreachable!("remote I/O uses the connection"),
        };
        match (io.op, io.slice) {
            (IoOp::Read, Some(slice)) => ring.read(token, fd(), io.offset, slice),
            (IoOp::Write(durability), Some(slice)) => ring.write(token, fd(), io.offset, slice, durability),
            (IoOp::Flush, _) => {
                ring.fsync(token, fd());
                self.slots[number as usize].flush = self.begin_flush(device_of(io));
            }
            (IoOp::Discard, _) => ring.post(token, 0),
            (IoOp::WriteZeroes(_), _) => ring.post(token, -libc::EOPNOTSUPP),
            (IoOp::WriteJournal, _) => self.submit_journal(ring, number, journal),
            (IoOp::Read | IoOp::Write(_), None) => unreachable!("a transfer has a slice"),
        }
    }

    fn submit_remote(&mut self, ring: &mut Ring, number: u32, io: &Io) {
        let device = DeviceId(device_of(io) as u16);
        let remote = self.remotes.iter_mut().find(|it| it.device == device && !it.left);
        let remote = remote.expect("a device that is attached has a driver");
        remote.driver.submit(ring, self.now, &Io { id: IoId(number), ..*io });
    }

    fn device(&self, io: &Io) -> Option<&DeviceLocation> {
        self.devices.get(device_of(io))?.as_ref()
    }

    fn begin_flush(&self, device: usize) -> Option<FlushInFlight> {
        let Some(DeviceLocation::Here(_, flushes)) = &self.devices[device] else { return None };
        let (serial, failures) = (flushes.begin(), self.failures[device]);
        Some(FlushInFlight { flushes: flushes.clone(), serial, failures })
    }

    fn count(&mut self, io: &Io, result: Result<(), IoError>) {
        let Some(counts) = self.counts.get_mut(device_of(io)).filter(|_| reaches_device(io.op)) else {
            return;
        };
        counts.ios += 1;
        // An I/O that was submitted to a detached device was never counted as in flight.
        counts.in_flight = counts.in_flight.saturating_sub(1);
        match (result, io.op) {
            (Err(_), _) => counts.errors += 1,
            (Ok(()), IoOp::Read) => counts.read_bytes += io.len,
            (Ok(()), IoOp::Write(_) | IoOp::WriteJournal) => counts.written_bytes += io.len,
            (Ok(()), _) => {}
        }
    }

    fn submit_journal(&mut self, ring: &mut Ring, number: u32, pages: &[u8]) {
        let room = &mut self.journal;
        if room.buffer.is_none() {
            room.buffer = Some(ring.take_journal_room().expect("a ring has one user of its journal room"));
            room.free.extend(0..JOURNAL_ROOM_BYTES / JOURNAL_IO_BYTES_MAX);
        }
        match room.free.pop() {
            Some(part) => self.write_journal(ring, number, part, pages),
            None => {
                let mut copy = room.spare.pop().unwrap_or_default();
                copy.clear();
                copy.extend_from_slice(pages);
                room.waiting.push_back((number, copy));
            }
        }
    }

    /// Copies journal pages to a part of the journal buffer, and writes them from there.
    fn write_journal(&mut self, ring: &mut Ring, number: u32, part: u32, pages: &[u8]) {
        let slot = &mut self.slots[number as usize];
        slot.part = Some(part);
        let io = slot.io;
        let token = self.tokens.token(number);
        let Some(location) = self.device(&io) else { return ring.post(token, -libc::ENODEV) };
        assert!(pages.len() as u64 <= u64::from(JOURNAL_IO_BYTES_MAX), "{io:?} is too long");
        let id = self.journal.buffer.expect("there is room, since a part of it is free");
        let slice = BufferSlice { id, offset: part * JOURNAL_IO_BYTES_MAX, len: pages.len() as u32 };
        ring.arena_mut().slice_mut(slice).copy_from_slice(pages);
        match location {
            DeviceLocation::Here(fd, _) => ring.write(token, *fd, io.offset, slice, Durability::Volatile),
            DeviceLocation::Remote => {
                let op = IoOp::Write(Durability::Volatile);
                self.submit_remote(ring, number, &Io { op, slice: Some(slice), ..io });
            }
        }
    }

    /// Handles a completion whose token has kind [`Token::FLASH`]. Returns `None` for a flush that
    /// waits for other flushes; [`Flash::poll_flushed`] returns it later.
    pub fn handle_completion(&mut self, ring: &mut Ring, completion: &Completion) -> Option<FlashDone<'_>> {
        let result = match completion.result {
            0.. => Ok(()),
            error if error == -libc::EOPNOTSUPP => Err(IoError::Unsupported),
            _ => Err(IoError::Failed),
        };
        let number = completion.token.index();
        if let Some(FlushInFlight { flushes, serial, .. }) = &self.slots[number as usize].flush {
            if result.is_err() {
                flushes.end(*serial, result == Err(IoError::Failed));
            } else if flushes.end_or_hold(*serial, ring.waker()) {
                self.flushed.push(number);
                return None;
            }
        }
        Some(self.end(ring, number, result))
    }

    /// Returns a flush that has waited for other flushes.
    pub fn poll_flushed(&mut self, ring: &mut Ring) -> Option<FlashDone<'_>> {
        let is_over = |number: &u32| {
            let flush = self.slots[*number as usize].flush.as_ref();
            flush.is_some_and(|flush| !flush.flushes.is_held(flush.serial))
        };
        let at = self.flushed.iter().position(is_over)?;
        let number = self.flushed.swap_remove(at);
        Some(self.end(ring, number, Ok(())))
    }

    /// Returns the result of a flush. A successful flush counts as failed if another flush of the
    /// device, by any shard, has failed since this shard's previous flush.
    fn end_flush(
        &mut self,
        device: usize,
        flush: &FlushInFlight,
        result: Result<(), IoError>,
    ) -> Result<(), IoError> {
        let failures = flush.flushes.failures();
        self.failures[device] = failures;
        if failures == flush.failures { result } else { result.and(Err(IoError::Failed)) }
    }

    fn end(&mut self, ring: &mut Ring, number: u32, result: Result<(), IoError>) -> FlashDone<'_> {
        let Slot { io, part, ref mut flush } = self.slots[number as usize];
        let result = match flush.take() {
            Some(flush) => self.end_flush(device_of(&io), &flush, result),
            None => result,
        };
        self.free.push(number);
        if let Some(part) = part {
            match self.journal.waiting.pop_front() {
                Some((next, pages)) => {
                    self.write_journal(ring, next, part, &pages);
                    self.journal.spare.push(pages);
                }
                None => self.journal.free.push(part),
            }
        }
        self.sums.clear();
        // The guest may have caused an error of an operation on guest memory, so the error does not
        // count as one of the device.
        let is_doubtful = io.slice.is_some_and(|slice| ring.arena().is_shared(slice.id));
        self.count(&io, if is_doubtful { Ok(()) } else { result });
        if let (Ok(()), Some(slice)) = (result, io.slice) {
            ring.arena().sector_sums(slice, &mut self.sums);
        }
        FlashDone { io: io.id, result, sums: &self.sums }
    }
}

impl Remote {
    /// Returns the next completed I/O of this remote device. A failed I/O is returned only after
    /// the device is abandoned.
    fn poll_done(&mut self) -> Option<(u32, Result<(), IoError>)> {
        if self.given_up
            && let Some(number) = self.failed.pop()
        {
            return Some((number, Err(IoError::Failed)));
        }
        loop {
            match self.driver.poll_done()? {
                (id, Err(_)) if !self.given_up => self.failed.push(id.0),
                (id, result) => return Some((id.0, result)),
            }
        }
    }

    /// Returns the start time of the oldest I/O that the device has not answered; time 0 if an I/O
    /// has failed; `None` if no I/O waits.
    fn silent_since(&self) -> Option<Instant> {
        if self.failed.is_empty() { self.driver.waiting_since() } else { Some(Instant::default()) }
    }
}

/// I/O to flash devices on other hosts.
impl Flash {
    /// Sets the present time. Call this function before other calls at that time.
    pub fn set_now(&mut self, now: Instant) {
        self.now = now;
    }

    /// Sets how long an I/O to remote flash may wait before [`poll_silent`](Self::poll_silent)
    /// reports its device.
    pub fn set_remote_wait(&mut self, wait: Duration) {
        self.remote_wait_ns = wait.as_nanos() as u64;
    }

    /// Handles a completion whose token has kind [`Token::FLASH_REMOTE`]. Call
    /// [`Flash::poll_remote`] afterwards.
    pub fn handle_remote_completion(&mut self, ring: &mut Ring, completion: Completion) {
        let device = DeviceId(completion.token.owner());
        // The id of a device is never reused.
        if let Some(remote) = self.remotes.iter_mut().find(|it| it.device == device) {
            remote.driver.handle_completion(ring, self.now, completion);
        }
    }

    /// Drops detached remote devices whose drivers have closed their connections.
    fn tidy(&mut self) {
        let is_over = |it: &Remote| it.left && it.driver.is_closed() && it.failed.is_empty();
        self.remotes.retain(|it| !is_over(it));
    }

    /// Returns the next completed I/O of any remote device; `None` if there is none.
    pub fn poll_remote(&mut self, ring: &mut Ring) -> Option<FlashDone<'_>> {
        let (number, result) = self.remotes.iter_mut().find_map(Remote::poll_done)?;
        Some(self.end(ring, number, result))
    }

    /// Returns a remote device with an I/O that has waited too long. Each device is reported once.
    /// Call this method when [`Flash::poll_remote`] returns `None`.
    pub fn poll_silent(&mut self) -> Option<DeviceId> {
        self.tidy();
        let (now, wait) = (self.now, self.remote_wait_ns);
        let silent = |it: &&mut Remote| {
            let is_over = |since: Instant| since == Instant::default() || since + wait <= now;
            !it.told && !it.left && it.silent_since().is_some_and(is_over)
        };
        let remote = self.remotes.iter_mut().find(silent)?;
        remote.told = true;
        Some(remote.device)
    }

    /// Abandons a remote device: fails its unfinished I/Os and all later ones. The caller has
    /// ensured that the device's data is no longer used.
    pub fn give_up(&mut self, ring: &mut Ring, device: DeviceId) {
        if let Some(remote) = self.remotes.iter_mut().find(|it| it.device == device && !it.left) {
            remote.told = true;
            if !std::mem::replace(&mut remote.given_up, true) {
                remote.driver.close(ring);
            }
        }
    }

    /// Returns the time of the next [`Flash::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        let wait = self.remote_wait_ns;
        let silent = |it: &Remote| it.silent_since().filter(|_| !it.told).map(|since| since + wait);
        let remotes = self.remotes.iter();
        remotes.flat_map(|it| it.driver.poll_timeout().into_iter().chain(silent(it))).min()
    }

    /// Handles timeouts. Call [`Flash::poll_remote`] and [`Flash::poll_silent`] afterwards.
    pub fn handle_timeout(&mut self, ring: &mut Ring) {
        let now = self.now;
        for remote in &mut self.remotes {
            if remote.driver.poll_timeout().is_some_and(|at| at <= now) {
                remote.driver.handle_timeout(ring, now);
            }
        }
    }
}

/// Returns the index of the I/O's device in the tables of this shard's flash.
fn device_of(io: &Io) -> usize {
    let Target::Flash(device) = io.target else { unreachable!("not for flash: {io:?}") };
    usize::from(device.0)
}

fn reaches_device(op: IoOp) -> bool {
    matches!(op, IoOp::Read | IoOp::Write(_) | IoOp::Flush | IoOp::WriteJournal)
}
