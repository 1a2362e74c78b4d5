//! Tests of the engine: a test passes requests and commands to the engine, and completes each I/O
//! in the order and with the result that the test chooses. Each sentence of SYSTEMS §1 (the
//! project's description of other systems, outside this repository) about the engine has a test
//! that cites it.

mod awaiting_journal;
mod backed;
mod bitmaps;
mod blocks;
mod bulk;
mod change;
mod crashes;
mod destage_limits;
mod direct;
mod early_discard;
mod ends;
mod errors;
mod fill_granularity;
mod flash_budget;
mod growth;
mod health;
mod incomplete;
mod limits;
mod memory;
mod mended;
mod merge;
mod overwrite;
mod overwrite_while_destaged;
mod ownership;
mod partial;
mod peer;
mod reads;
mod recovering;
mod shared;
mod statistics;
mod vacate;
mod verify;
mod write_back;
mod writes;
mod zeroes;

use std::collections::VecDeque;

use super::{Engine, Limits};
use crate::admission::Admission;
use crate::command::{
    Access, CacheChange, CacheConfig, Command, CommandError, DataSegment, DiskConfig, Event, Segment,
};
use crate::io::{
    BufferCopy, Durability, Io, IoError, IoOp, Op, PayloadMemory, Promote, Reply, Request, Target,
};
use crate::outcome::Outcome;
use crate::policy::PolicyKind;
use crate::stats::DiskStats;
use crate::units::{BufferId, CommandId, DatastoreId, DeviceId, DiskId, Instant, RequestId, SECTOR_BYTES};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const DISK: DiskId = DiskId(0);
/// The checksum of all data except corrupted data.
const SUM: u32 = 7;
const WRITE: Op = Op::Write(Durability::Volatile);

/// An engine with one disk, and all of the engine's output.
struct Bench {
    engine: Engine,
    now: Instant,
    made: u64,
    /// Session that sends later requests.
    session: u32,
    /// Promotion rule of later requests.
    promote: Promote,
    memory: PayloadMemory,
    /// Copies that the engine requested.
    copies: Vec<BufferCopy>,
    /// I/O that the engine requested and that the test has not completed yet.
    ios: VecDeque<Io>,
    replies: Vec<Reply>,
    declined: Vec<RequestId>,
    released: Vec<BufferId>,
    events: Vec<Event>,
}

impl Bench {
    /// Creates a disk of 64 MiB without a cache.
    fn bare(limits: Limits) -> Self {
        Self::with_disk(limits, 64 * MIB, Access::ReadWrite)
    }

    fn with_disk(limits: Limits, size_bytes: u64, access: Access) -> Self {
        let mut bench = Bench {
            engine: Engine::new(limits),
            now: Instant(0),
            made: 0,
            session: 0,
            promote: Promote::Usual,
            memory: PayloadMemory::Daemon,
            copies: vec![],
            ios: VecDeque::new(),
            replies: vec![],
            declined: vec![],
            released: vec![],
            events: vec![],
        };
        bench
            .command(Command::AddDisk(DiskConfig { size_bytes, access, datastore: DatastoreId(0) }))
            .expect("a new disk");
        bench
    }

    /// Creates a disk of 64 MiB with a cache of `blocks` blocks of `block_bytes` bytes.
    fn cached(blocks: u64, block_bytes: u64) -> Self {
        let mut bench = Self::bare(Limits::default());
        bench.enable(blocks * block_bytes, block_bytes);
        bench
    }

    /// Gives the disk a cache in one segment on device 0.
    fn enable(&mut self, bytes: u64, block_bytes: u64) {
        self.change(CacheChange::enable_volatile(config(bytes, block_bytes), vec![segment(0, 0)]))
            .expect("no cache yet");
    }

    /// Runs a command that ends at once.
    fn command(&mut self, command: Command) -> Result<Vec<Segment>, CommandError> {
        let id = self.start_command(command);
        self.result(id).expect("done at once")
    }

    fn start_command(&mut self, command: Command) -> CommandId {
        self.made += 1;
        let id = CommandId(self.made);
        self.engine.handle_command(self.now, id, DISK, command);
        self.drain();
        id
    }

    fn change(&mut self, change: CacheChange) -> Result<Vec<Segment>, CommandError> {
        self.command(Command::Cache(change))
    }

    fn start_change(&mut self, change: CacheChange) -> CommandId {
        self.start_command(Command::Cache(change))
    }

    /// Returns the result of a command, if it has ended.
    fn result(&self, id: CommandId) -> Option<Result<Vec<Segment>, CommandError>> {
        self.events.iter().find_map(|event| match event {
            Event::Done { command, result, .. } if *command == id => Some(result.clone()),
            _ => None,
        })
    }

    fn try_request(&mut self, op: Op, offset: u64, len: u64) -> Result<RequestId, Request> {
        self.made += 1;
        let id = RequestId(u64::from(self.session) << 32 | self.made);
        let buffer = op.has_buffer().then_some(BufferId(self.made as u32));
        let result = self.engine.handle_request(
            self.now,
            Request { id, disk: DISK, op, offset, len, buffer, promote: self.promote, memory: self.memory },
        );
        self.drain();
        result.map(|()| id)
    }

    fn request(&mut self, op: Op, offset: u64, len: u64) -> RequestId {
        self.try_request(op, offset, len).expect("room for a request")
    }

    fn read(&mut self, offset: u64, len: u64) -> RequestId {
        self.request(Op::Read, offset, len)
    }

    fn write(&mut self, offset: u64, len: u64) -> RequestId {
        self.request(WRITE, offset, len)
    }

    fn drain(&mut self) {
        self.copies.extend(std::iter::from_fn(|| self.engine.poll_copy()));
        self.ios.extend(std::iter::from_fn(|| self.engine.poll_io()));
        self.replies.extend(std::iter::from_fn(|| self.engine.poll_reply()));
        self.declined.extend(std::iter::from_fn(|| self.engine.poll_declined()));
        self.released.extend(std::iter::from_fn(|| self.engine.poll_release()));
        self.events.extend(std::iter::from_fn(|| self.engine.poll_event()));
    }

    /// Returns the only outstanding I/O.
    fn only_io(&mut self) -> Io {
        assert_eq!(self.ios.len(), 1, "{:?}", self.ios);
        self.ios.pop_front().expect("one")
    }

    fn end_with(&mut self, io: Io, result: Result<(), IoError>, sums: &[u32]) {
        self.now = self.now + 1000;
        self.engine.handle_completion(self.now, io.id, result, sums);
        self.drain();
    }

    /// Completes an I/O successfully.
    fn end(&mut self, io: Io) {
        self.end_with(io, Ok(()), &right_sums(&io));
    }

    /// Completes an I/O with an error, and with invalid checksums that the engine must not use.
    fn fail(&mut self, io: Io) {
        self.end_with(io, Err(IoError::Failed), &right_sums(&io));
    }

    /// Completes I/O until none is outstanding.
    fn settle(&mut self) {
        while let Some(io) = self.ios.pop_front() {
            self.end(io);
        }
    }

    fn reply(&self, id: RequestId) -> Option<Reply> {
        self.replies.iter().find(|reply| reply.id == id).copied()
    }

    fn outcome(&self, id: RequestId) -> Outcome {
        self.reply(id).expect("answered").outcome
    }

    /// Sends a read, and completes all I/O. Returns the outcome of the read.
    fn read_alone(&mut self, offset: u64, len: u64) -> Outcome {
        let id = self.read(offset, len);
        self.settle();
        self.outcome(id)
    }

    fn write_alone(&mut self, offset: u64, len: u64) -> Outcome {
        let id = self.write(offset, len);
        self.settle();
        self.outcome(id)
    }

    fn stats(&self) -> DiskStats {
        self.engine.stats(self.now, DISK).expect("the disk exists")
    }

    /// Lets time pass, and calls the engine at the times that the engine requested.
    fn wait_ms(&mut self, ms: u64) {
        let end = self.now + ms * 1_000_000;
        while let Some(due) = self.engine.poll_timeout().filter(|due| *due <= end) {
            self.now = due;
            self.engine.handle_timeout(self.now);
            self.drain();
        }
        self.now = end;
    }
}

fn config(segment_bytes: u64, block_bytes: u64) -> CacheConfig {
    CacheConfig::write_through(
        block_bytes as u32,
        segment_bytes,
        PolicyKind::from_name("lru").expect("known"),
        Admission::default(),
    )
}

fn segment(device: u16, offset: u64) -> Segment {
    Segment { device: DeviceId(device), offset }
}

fn right_sums(io: &Io) -> Vec<u32> {
    match io.target {
        Target::Flash(_) => vec![SUM; (io.len / SECTOR_BYTES) as usize],
        Target::Backing(_) => vec![],
    }
}

fn is_flash(io: &Io) -> bool {
    matches!(io.target, Target::Flash(_))
}
