//! The flash devices of one shard: the engine's flash I/O, with checksums.
//!
//! One operation of the ring per I/O and one slot of a table; the sums of a completed transfer go
//! into one vector that is used again. A flash device forgets nothing and zeroes nothing: discards
//! are acknowledged, because a thick pool keeps its room, and zeroing is not supported.
//!
//! Journal pages come from the engine's own memory. They are copied into room that the ring keeps for
//! them, so that they are aligned and registered and never wait for guests' buffers; when more of them are in flight
//! than that room holds, the later ones wait for the earlier.
//!
//! # Devices on other hosts
//! I/O to them goes over a connection (`backing/nbd`), which is made anew when it breaks. What cannot be finished is neither finished nor
//! failed: it is held, and when something has waited for [`Flash::set_remote_wait`], or failed there, [`Flash::poll_silent`] says so once. Only
//! [`Flash::give_up`] fails it, when its owner has seen to it that nobody believes what is there (docs/decisions/0022).

use std::collections::VecDeque;
use std::time::Duration;

use hob_engine::io::{BufferSlice, Durability, Io, IoError, IoOp, Target};
use hob_engine::units::{BufferId, DeviceId, Instant, IoId};

use crate::backing::Driver;
use crate::backing::nbd::NbdBacking;
use crate::pool::FlashFile;
use crate::ring::{Completion, Fd, JOURNAL_ROOM_BYTES, Ring};
use crate::token::{Token, TokenSpace};

/// Longest [`IoOp::WriteJournal`], bytes.
pub const JOURNAL_IO_BYTES_MAX: u32 = 64 << 10;

/// How long an I/O to a device on another host may take before that is said.
pub const REMOTE_WAIT_DEFAULT: Duration = Duration::from_secs(5);

/// The shard's end of the pool.
#[derive(Debug)]
pub struct Flash {
    tokens: TokenSpace,
    /// By device id.
    devices: Vec<Option<Way>>,
    /// Devices on other hosts, those that are being left among them.
    remotes: Vec<Remote>,
    /// An I/O to them that has waited for that long is said, nanoseconds.
    remote_wait_ns: u64,
    now: Instant,
    /// Likewise.
    counts: Vec<DeviceCounts>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    sums: Vec<u32>,
    journal: JournalRoom,
}

/// How a device is reached.
#[derive(Clone, Copy, Debug)]
enum Way {
    Here(Fd),
    Remote,
}

/// A device on another host.
struct Remote {
    device: DeviceId,
    driver: NbdBacking,
    /// It was said that something has waited for too long.
    told: bool,
    given_up: bool,
    /// I/Os that it failed before it was given up: held, as if it were silent.
    failed: Vec<u32>,
    /// It is not attached any more.
    left: bool,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").field("device", &self.device).finish_non_exhaustive()
    }
}

/// What one device has done since it was attached. Discards and zeroing, which reach no device, do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounts {
    /// Reads, writes and flushes that ended.
    pub ios: u64,
    /// Of these, failed.
    pub errors: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Reads, writes and flushes that have not ended.
    pub in_flight: u64,
}

/// An I/O in flight.
#[derive(Clone, Copy, Debug)]
struct Slot {
    io: Io,
    /// The part of the journals' room that its pages are in.
    part: Option<u32>,
}

/// Where journal pages are while they are written: parts of [`JOURNAL_IO_BYTES_MAX`] each.
#[derive(Debug, Default)]
struct JournalRoom {
    buffer: Option<BufferId>,
    free: Vec<u32>,
    /// I/Os that found no part free, by slot.
    waiting: VecDeque<(u32, Vec<u8>)>,
    /// Memory of I/Os that have waited.
    spare: Vec<Vec<u8>>,
}

/// A flash I/O that ended.
#[derive(Debug, PartialEq, Eq)]
pub struct FlashDone<'a> {
    /// Which.
    pub io: IoId,
    /// How.
    pub result: Result<(), IoError>,
    /// Checksums of the sectors that were read or written; empty after other operations and errors.
    pub sums: &'a [u32],
}

impl Flash {
    /// No devices yet. Completions will carry tokens of kind [`Token::FLASH`] and this owner.
    pub fn new(owner: u16) -> Flash {
        Flash {
            tokens: TokenSpace::new(Token::FLASH, owner),
            devices: Vec::new(),
            remotes: Vec::new(),
            remote_wait_ns: REMOTE_WAIT_DEFAULT.as_nanos() as u64,
            now: Instant::default(),
            counts: Vec::new(),
            slots: Vec::new(),
            free: Vec::new(),
            sums: Vec::new(),
            journal: JournalRoom::default(),
        }
    }

    /// Makes a device usable.
    pub fn attach(&mut self, ring: &mut Ring, device: DeviceId, file: FlashFile) {
        let index = usize::from(device.0);
        if self.devices.len() <= index {
            self.devices.resize(index + 1, None);
            self.counts.resize(index + 1, DeviceCounts::default());
        }
        assert!(self.devices[index].is_none(), "device {device} is attached already");
        self.devices[index] = Some(match file {
            FlashFile::Here(local) => Way::Here(ring.attach(local.file, local.class)),
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
                Way::Remote
            }
        });
        self.counts[index] = DeviceCounts::default();
    }

    /// What the devices that are attached have done.
    pub fn counts(&self) -> impl Iterator<Item = (DeviceId, DeviceCounts)> {
        let attached = self.devices.iter().zip(&self.counts).enumerate();
        attached
            .filter(|(_, (device, _))| device.is_some())
            .map(|(index, (_, counts))| (DeviceId(index as u16), *counts))
    }

    /// Gives a device up; I/O in flight still completes.
    pub fn detach(&mut self, ring: &mut Ring, device: DeviceId) {
        match self.devices.get_mut(usize::from(device.0)).and_then(Option::take) {
            Some(Way::Here(fd)) => ring.detach(fd),
            Some(Way::Remote) => {
                self.give_up(ring, device);
                self.remotes.iter_mut().filter(|it| it.device == device).for_each(|it| it.left = true);
            }
            None => {}
        }
    }

    /// Starts an I/O whose target is a flash device. On one that is not attached it fails. `journal` are the bytes of
    /// a [`IoOp::WriteJournal`], which are copied; others have none.
    pub fn submit(&mut self, ring: &mut Ring, io: &Io, journal: &[u8]) {
        assert_eq!(journal.len() as u64, if io.op == IoOp::WriteJournal { io.len } else { 0 }, "{io:?}");
        let number = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { io: *io, part: None });
            self.slots.len() as u32 - 1
        });
        self.slots[number as usize] = Slot { io: *io, part: None };
        let token = self.tokens.token(number);
        let Some(way) = self.device(io) else { return ring.post(token, -libc::ENODEV) };
        if reaches_device(io.op) {
            self.counts[device_of(io)].in_flight += 1;
        }
        match (io.op, io.slice) {
            (IoOp::Read | IoOp::Write(_) | IoOp::Flush, _) if matches!(way, Way::Remote) => {
                self.submit_remote(ring, number, io);
            }
            _ => self.submit_here(ring, number, io, way, journal),
        }
    }

    fn submit_here(&mut self, ring: &mut Ring, number: u32, io: &Io, way: Way, journal: &[u8]) {
        let token = self.tokens.token(number);
        let fd = || match way {
            Way::Here(fd) => fd,
            Way::Remote => unreachable!("it goes another way"),
        };
        match (io.op, io.slice) {
            (IoOp::Read, Some(slice)) => ring.read(token, fd(), io.offset, slice),
            (IoOp::Write(durability), Some(slice)) => ring.write(token, fd(), io.offset, slice, durability),
            (IoOp::Flush, _) => ring.fsync(token, fd()),
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

    fn device(&self, io: &Io) -> Option<Way> {
        self.devices.get(device_of(io)).copied().flatten()
    }

    fn count(&mut self, io: &Io, result: Result<(), IoError>) {
        let Some(counts) = self.counts.get_mut(device_of(io)).filter(|_| reaches_device(io.op)) else {
            return;
        };
        counts.ios += 1;
        // What was asked of a device that was not there any more was never in flight.
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

    /// Copies pages into a part of the room and writes them from there.
    fn write_journal(&mut self, ring: &mut Ring, number: u32, part: u32, pages: &[u8]) {
        let slot = &mut self.slots[number as usize];
        slot.part = Some(part);
        let io = slot.io;
        let token = self.tokens.token(number);
        let Some(way) = self.device(&io) else { return ring.post(token, -libc::ENODEV) };
        assert!(pages.len() as u64 <= u64::from(JOURNAL_IO_BYTES_MAX), "{io:?} is too long");
        let id = self.journal.buffer.expect("there is room, since a part of it is free");
        let slice = BufferSlice { id, offset: part * JOURNAL_IO_BYTES_MAX, len: pages.len() as u32 };
        ring.arena_mut().slice_mut(slice).copy_from_slice(pages);
        match way {
            Way::Here(fd) => ring.write(token, fd, io.offset, slice, Durability::Volatile),
            Way::Remote => {
                let op = IoOp::Write(Durability::Volatile);
                self.submit_remote(ring, number, &Io { op, slice: Some(slice), ..io });
            }
        }
    }

    /// Takes a completion whose token is of kind [`Token::FLASH`].
    pub fn handle_completion(&mut self, ring: &mut Ring, completion: &Completion) -> FlashDone<'_> {
        let result = match completion.result {
            0.. => Ok(()),
            error if error == -libc::EOPNOTSUPP => Err(IoError::Unsupported),
            _ => Err(IoError::Failed),
        };
        self.end(ring, completion.token.index(), result)
    }

    fn end(&mut self, ring: &mut Ring, number: u32, result: Result<(), IoError>) -> FlashDone<'_> {
        let Slot { io, part } = self.slots[number as usize];
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
        // An error of an operation on a guest's memory may be the guest's.
        let is_doubtful = io.slice.is_some_and(|slice| ring.arena().is_shared(slice.id));
        self.count(&io, if is_doubtful { Ok(()) } else { result });
        if let (Ok(()), Some(slice)) = (result, io.slice) {
            ring.arena().sector_sums(slice, &mut self.sums);
        }
        FlashDone { io: io.id, result, sums: &self.sums }
    }
}

impl Remote {
    /// An I/O that ended. One that failed is held until nobody believes the device any more.
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

    /// Since when it owes an answer.
    fn silent_since(&self) -> Option<Instant> {
        if self.failed.is_empty() { self.driver.waiting_since() } else { Some(Instant::default()) }
    }
}

/// Devices on other hosts.
impl Flash {
    /// The time: to be said before what happens at it.
    pub fn set_now(&mut self, now: Instant) {
        self.now = now;
    }

    /// An I/O that has waited for that long is said.
    pub fn set_remote_wait(&mut self, wait: Duration) {
        self.remote_wait_ns = wait.as_nanos() as u64;
    }

    /// Takes a completion whose token is of kind [`Token::FLASH_REMOTE`]. Then [`Flash::poll_remote`] may have something.
    pub fn handle_remote_completion(&mut self, ring: &mut Ring, completion: Completion) {
        let device = DeviceId(completion.token.owner());
        // A device's id is never given to another one.
        if let Some(remote) = self.remotes.iter_mut().find(|it| it.device == device) {
            remote.driver.handle_completion(ring, self.now, completion);
        }
    }

    /// Forgets drivers that have ended.
    fn tidy(&mut self) {
        let is_over = |it: &Remote| it.left && it.driver.is_closed() && it.failed.is_empty();
        self.remotes.retain(|it| !is_over(it));
    }

    /// An I/O to a device on another host that ended.
    pub fn poll_remote(&mut self, ring: &mut Ring) -> Option<FlashDone<'_>> {
        let (number, result) = self.remotes.iter_mut().find_map(Remote::poll_done)?;
        Some(self.end(ring, number, result))
    }

    /// A device on another host of which something has waited for too long. Each is told once. To be asked after
    /// [`Flash::poll_remote`] has nothing more.
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

    /// Fails everything that a device on another host has not finished, and whatever it is asked later. Nobody may believe what is
    /// there any more.
    pub fn give_up(&mut self, ring: &mut Ring, device: DeviceId) {
        if let Some(remote) = self.remotes.iter_mut().find(|it| it.device == device && !it.left) {
            remote.told = true;
            if !std::mem::replace(&mut remote.given_up, true) {
                remote.driver.close(ring);
            }
        }
    }

    /// When [`Flash::handle_timeout`] is to be called next.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let wait = self.remote_wait_ns;
        let silent = |it: &Remote| it.silent_since().filter(|_| !it.told).map(|since| since + wait);
        let remotes = self.remotes.iter();
        remotes.flat_map(|it| it.driver.poll_timeout().into_iter().chain(silent(it))).min()
    }

    /// Does what is due; [`Flash::poll_remote`] and [`Flash::poll_silent`] may have something then.
    pub fn handle_timeout(&mut self, ring: &mut Ring) {
        let now = self.now;
        for remote in &mut self.remotes {
            if remote.driver.poll_timeout().is_some_and(|at| at <= now) {
                remote.driver.handle_timeout(ring, now);
            }
        }
    }
}

/// Its index in the tables of devices.
fn device_of(io: &Io) -> usize {
    let Target::Flash(device) = io.target else { unreachable!("not for flash: {io:?}") };
    usize::from(device.0)
}

fn reaches_device(op: IoOp) -> bool {
    matches!(op, IoOp::Read | IoOp::Write(_) | IoOp::Flush | IoOp::WriteJournal)
}
