//! A small shard: one ring, one backing, and blocking calls.
#![allow(dead_code, unreachable_pub)]

pub mod journal;
pub mod process;
pub mod s3;
pub mod server;

use std::time::{Duration, Instant as Clock};

use hob_engine::command::Access;
use hob_engine::io::{BufferSlice, Io, IoError, IoOp, Target};
use hob_engine::units::{BufferId, DiskId, Instant, IoId};
use hob_storage::backing::{Backing, BackingOptions, Format, Status};
use hob_storage::ring::{JOURNAL_ROOM_BYTES, Ring, RingConfig, RingKind, ZEROES_BYTES};
use hob_storage::token::Token;

pub const PATIENCE: Duration = Duration::from_secs(120);

pub struct Rig {
    pub ring: Ring,
    pub backing: Backing,
    start: Clock,
    next_io: u32,
    pub done: Vec<(IoId, Result<(), IoError>)>,
    pub statuses: Vec<(u64, Status)>,
    buffers: Vec<(IoId, BufferId)>,
}

/// Returns options for tests: connections are retried at once, and requests wait for a minute, so
/// that they also succeed on a busy host.
pub fn options() -> BackingOptions {
    BackingOptions {
        wait_max: Duration::from_secs(60),
        connect_max: Duration::from_secs(30),
        reconnect_min: Duration::from_millis(10),
        reconnect_max: Duration::from_millis(50),
        ..BackingOptions::default()
    }
}

/// Returns the same options for a test that waits for the end of `wait_max`.
pub fn impatient() -> BackingOptions {
    BackingOptions { wait_max: Duration::from_secs(2), ..options() }
}

/// Returns the same options for an image without other files.
pub fn image_options(format: &str) -> BackingOptions {
    BackingOptions { format: Some(Format::from_name(format).expect("a format")), ..options() }
}

pub fn both_kinds(body: impl Fn(RingKind)) {
    body(RingKind::IoUring);
    body(RingKind::Threads);
}

pub fn pattern(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32).map(|n| ((n ^ seed).wrapping_mul(0x9E37_79B1) >> 24) as u8).collect()
}

impl Rig {
    pub fn open(kind: RingKind, spec: &str, access: Access) -> Rig {
        Rig::of(kind, Backing::open(spec, access, &options()).unwrap_or_else(|error| panic!("{error}")))
    }

    pub fn open_impatient(kind: RingKind, spec: &str) -> Rig {
        Rig::of(kind, Backing::open(spec, Access::ReadWrite, &impatient()).unwrap())
    }

    pub fn open_image(kind: RingKind, path: &str, format: &str, access: Access) -> Rig {
        let opened = Backing::open(path, access, &image_options(format));
        Rig::of(kind, opened.unwrap_or_else(|error| panic!("{error}")))
    }

    pub fn of(kind: RingKind, backing: Backing) -> Rig {
        let config = RingConfig { kind, arena_bytes: 80 << 20, ..RingConfig::default() };
        let mut rig = Rig {
            ring: Ring::new(&config).unwrap(),
            backing,
            start: Clock::now(),
            next_io: 1,
            done: Vec::new(),
            statuses: Vec::new(),
            buffers: Vec::new(),
        };
        let now = rig.now();
        rig.backing.attach(&mut rig.ring, now, 5);
        rig
    }

    pub fn now(&self) -> Instant {
        Instant(self.start.elapsed().as_nanos() as u64)
    }

    /// Starts an I/O; a transfer's buffer begins at the sector boundary before `offset`.
    pub fn start(&mut self, op: IoOp, offset: u64, len: u64, data: Option<&[u8]>) -> IoId {
        let id = IoId(self.next_io);
        self.next_io += 1;
        let lead = (offset % 4096) as usize;
        let slice = matches!(op, IoOp::Read | IoOp::Write(_)).then(|| {
            let bytes = (lead + len as usize).next_multiple_of(4096);
            let buffer = self.ring.arena_mut().alloc(bytes).expect("room");
            self.ring.arena_mut().bytes_mut(buffer).fill(0xEE);
            self.buffers.push((id, buffer));
            BufferSlice { id: buffer, offset: lead as u32, len: len as u32 }
        });
        if let (Some(slice), Some(data)) = (slice, data) {
            self.ring.arena_mut().slice_mut(slice).copy_from_slice(data);
        }
        let io = Io { id, target: Target::Backing(DiskId(1)), op, offset, len, slice };
        let now = self.now();
        self.backing.submit(&mut self.ring, now, &io);
        self.drain();
        id
    }

    fn drain(&mut self) {
        while let Some(done) = self.backing.poll_done() {
            self.done.push(done);
        }
        while let Some(status) = self.backing.poll_status() {
            self.statuses.push(status);
        }
    }

    /// Runs one iteration of the shard loop.
    pub fn turn(&mut self) {
        let now = self.now();
        let limit = Duration::from_millis(100);
        let due = self.backing.poll_timeout().map(|due| Duration::from_nanos(due.nanos_since(now)));
        self.ring.submit_and_wait(Duration::ZERO, Some(due.unwrap_or(limit).min(limit))).unwrap();
        while let Some(completion) = self.ring.next_completion() {
            assert_eq!((completion.token.kind(), completion.token.owner()), (Token::BACKING, 5));
            let now = self.now();
            self.backing.handle_completion(&mut self.ring, now, completion);
        }
        let now = self.now();
        if self.backing.poll_timeout().is_some_and(|due| due <= now) {
            self.backing.handle_timeout(&mut self.ring, now);
        }
        self.drain();
    }

    pub fn wait(&mut self, id: IoId) -> Result<(), IoError> {
        let deadline = Clock::now() + PATIENCE;
        loop {
            if let Some(at) = self.done.iter().position(|(done, _)| *done == id) {
                return self.done.swap_remove(at).1;
            }
            assert!(Clock::now() < deadline, "{id:?} does not end");
            self.turn();
        }
    }

    /// Returns the data of a completed read, and frees its buffer.
    pub fn take(&mut self, id: IoId, offset: u64, len: usize) -> Vec<u8> {
        let at = self.buffers.iter().position(|(io, _)| *io == id).expect("it has a buffer");
        let (_, buffer) = self.buffers.swap_remove(at);
        let lead = (offset % 4096) as usize;
        let bytes = self.ring.arena().bytes(buffer)[lead..lead + len].to_vec();
        // The end of a send may be handled only after the reply.
        self.ring.arena_mut().release(buffer);
        bytes
    }

    pub fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, IoError> {
        let id = self.start(IoOp::Read, offset, len as u64, None);
        let result = self.wait(id);
        let bytes = self.take(id, offset, len);
        result.map(|()| bytes)
    }

    pub fn write(&mut self, op: IoOp, offset: u64, data: &[u8]) -> Result<(), IoError> {
        let id = self.start(op, offset, data.len() as u64, Some(data));
        let result = self.wait(id);
        self.take(id, offset, 0);
        result
    }

    pub fn run(&mut self, op: IoOp, offset: u64, len: u64) -> Result<(), IoError> {
        let id = self.start(op, offset, len, None);
        self.wait(id)
    }

    pub fn status(&mut self, offset: u64, len: u64) -> Status {
        let now = self.now();
        self.backing.submit_status(&mut self.ring, now, 77, offset, len);
        self.drain();
        while self.statuses.is_empty() {
            self.turn();
        }
        let (id, status) = self.statuses.remove(0);
        assert_eq!(id, 77);
        status
    }

    pub fn close(&mut self) {
        self.backing.close(&mut self.ring);
        self.drain();
        let deadline = Clock::now() + PATIENCE;
        while !self.backing.is_closed() {
            assert!(Clock::now() < deadline, "the backing does not close");
            self.turn();
        }
        assert_eq!(self.ring.in_flight(), 0);
    }

    /// Runs the common test of backings with all features, on a disk of at least 8 MiB with any
    /// content.
    pub fn exercise(&mut self) {
        use hob_engine::io::{Durability, Zeroing};
        let (volatile, durable) = (IoOp::Write(Durability::Volatile), IoOp::Write(Durability::Durable));
        let size = 8usize << 20;
        let block = self.backing.info().block_bytes_min as usize;
        let mut model = pattern(size, 9);
        self.write(volatile, 0, &model).unwrap();
        // As guests write: any alignment that the backing supports.
        for (number, (offset, len)) in [
            (512usize, 512usize),
            (4096, 4096),
            (5120, 7680),
            (1 << 20, 1 << 20),
            (123 * 512, 99 * 512),
            (3, 5),
            (4099, 9000),
        ]
        .into_iter()
        .enumerate()
        {
            if !(offset | len).is_multiple_of(block) {
                assert_eq!(self.write(volatile, offset as u64, &vec![0; len]), Err(IoError::Invalid));
                continue;
            }
            let data = pattern(len, 100 + number as u32);
            model[offset..offset + len].copy_from_slice(&data);
            let op = if number % 2 == 0 { volatile } else { durable };
            self.write(op, offset as u64, &data).unwrap();
        }
        assert!(self.read(0, size).unwrap() == model);
        self.run(IoOp::Flush, 0, 0).unwrap();
        for (number, zeroing) in
            [Zeroing::MayUnmap, Zeroing::KeepAllocated, Zeroing::FastMayUnmap, Zeroing::FastKeepAllocated]
                .into_iter()
                .enumerate()
        {
            let (offset, len) = ((number + 2) << 20, (200 << 10) + 4096 * number);
            match self.run(IoOp::WriteZeroes(zeroing), offset as u64, len as u64) {
                Ok(()) => model[offset..offset + len].fill(0),
                Err(error) => {
                    assert_eq!(error, IoError::Unsupported);
                    assert!(matches!(zeroing, Zeroing::FastMayUnmap | Zeroing::FastKeepAllocated));
                    // QEMU zeroes the range's partial clusters before it detects that the rest
                    // would be slow: a failed zeroing leaves the old data or zeroes.
                    let found = self.read(offset as u64, len).unwrap();
                    let old = &model[offset..offset + len];
                    let fits = |at: &usize| found[*at] == old[*at] || found[*at] == 0;
                    assert!((0..len).all(|at| fits(&at)));
                    let old = old.to_vec();
                    self.write(volatile, offset as u64, &old).unwrap();
                }
            }
        }
        assert!(self.read(0, size).unwrap() == model);
        self.run(IoOp::Discard, 7 << 20, 64 << 10).unwrap();
        let status = self.status(0, size as u64).unwrap();
        assert!(!status.is_empty());
        let mut at = 0;
        for extent in &status {
            let range = at as usize..(at + extent.len) as usize;
            if extent.zero && range.end <= 7 << 20 {
                assert!(model[range].iter().all(|byte| *byte == 0), "{extent:?} at {at}");
            }
            at += extent.len;
        }
        assert!(at <= size as u64);
        // Many requests at once.
        let ids: Vec<_> = (0..200u64).map(|n| self.start(IoOp::Read, n * 8192, 8192, None)).collect();
        for (n, id) in ids.into_iter().enumerate() {
            self.wait(id).unwrap();
            assert!(self.take(id, 0, 8192) == model[n * 8192..][..8192]);
        }
        let own = (ZEROES_BYTES + JOURNAL_ROOM_BYTES) as usize;
        assert_eq!(self.ring.arena().used(), own, "only what the ring keeps for itself is left");
    }
}
