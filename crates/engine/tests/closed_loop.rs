//! Measures the fill granularities in virtual time: a guest keeps a number of 4 KiB reads in flight
//! on a slow backing. Each I/O takes a fixed time, so the results are exact and repeatable. `cargo
//! test -p hob-engine --test closed_loop -- --nocapture` prints the results.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hob_engine::command::{Access, CacheChange, CacheConfig, Command, DiskConfig, Segment};
use hob_engine::granularity::Fill;
use hob_engine::io::{Op, PayloadMemory, Promote, Request, Target};
use hob_engine::policy::PolicyKind;
use hob_engine::units::{
    BufferId, CommandId, DatastoreId, DeviceId, DiskId, Instant, IoId, RequestId, SECTOR_BYTES,
};
use hob_engine::{Engine, Limits};

const DISK: DiskId = DiskId(0);
const DISK_BYTES: u64 = 512 << 20;
const CACHE_BYTES: u64 = 64 << 20;
const BACKING_NS: u64 = 4_000_000;
const FLASH_NS: u64 = 100_000;
/// Time from the reply to a request until the guest sends its next request, nanoseconds.
const GUEST_NS: u64 = 10_000;
const REQUESTS: u64 = 10_000;

/// Positions of the guest's reads.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Load {
    /// Sequential runs at random positions: each read is at a new position with 15 % probability.
    Runs,
    /// Every read is at a random position.
    Uniform,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Guest,
    Io(IoId, u64),
}

struct Guest {
    engine: Engine,
    load: Load,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    serial: u64,
    backing_reads: u64,
    position: u64,
    random: u64,
    sent: u64,
    answered: u64,
}

/// Requests per second, and reads of the backing per 100 requests.
#[derive(Debug)]
struct Speed {
    iops: f64,
    backing_reads: f64,
}

impl Guest {
    fn new(load: Load, fill: Fill) -> Guest {
        let mut engine = Engine::new(Limits::default());
        engine.lend(BufferId(0), 4 << 20);
        let disk =
            DiskConfig { size_bytes: DISK_BYTES, access: Access::ReadWrite, datastore: DatastoreId(0) };
        let admission = "auto".parse().expect("an admission");
        let cache = CacheConfig::write_through(4096, CACHE_BYTES, PolicyKind::default(), admission);
        let segments = vec![Segment { device: DeviceId(0), offset: 0 }];
        let enable = Command::Cache(CacheChange::enable_volatile(CacheConfig { fill, ..cache }, segments));
        for (id, command) in [(1, Command::AddDisk(disk)), (2, enable)] {
            engine.handle_command(Instant(0), CommandId(id), DISK, command);
        }
        Guest {
            engine,
            load,
            now: 0,
            events: BinaryHeap::new(),
            serial: 0,
            backing_reads: 0,
            position: 0,
            random: 0x9e37_79b9_7f4a_7c15,
            sent: 0,
            answered: 0,
        }
    }

    fn after(&mut self, ns: u64, event: Event) {
        self.serial += 1;
        self.events.push(Reverse((self.now + ns, self.serial, event)));
    }

    /// Returns a random number below `limit` (xorshift).
    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    fn send(&mut self) {
        let sectors = DISK_BYTES / SECTOR_BYTES;
        let continues = self.load == Load::Runs && self.below(100) >= 15 && self.position + 1 < sectors;
        self.position = if continues { self.position + 1 } else { self.below(sectors) };
        self.sent += 1;
        let request = Request {
            id: RequestId(self.sent),
            disk: DISK,
            op: Op::Read,
            offset: self.position * SECTOR_BYTES,
            len: SECTOR_BYTES,
            buffer: Some(BufferId(1 + self.sent as u32)),
            promote: Promote::Usual,
            memory: PayloadMemory::Daemon,
        };
        self.engine.handle_request(Instant(self.now), request).expect("room for a request");
    }

    /// Handles the engine's output.
    fn drain(&mut self) {
        while self.engine.poll_copy().is_some() {}
        while let Some(io) = self.engine.poll_io() {
            let is_backing = matches!(io.target, Target::Backing(_));
            self.backing_reads += u64::from(is_backing);
            let sums = if is_backing { 0 } else { io.len / SECTOR_BYTES };
            self.after(if is_backing { BACKING_NS } else { FLASH_NS }, Event::Io(io.id, sums));
        }
        while let Some(reply) = self.engine.poll_reply() {
            assert_eq!(reply.result, Ok(()));
            self.answered += 1;
            self.after(GUEST_NS, Event::Guest);
        }
        while self.engine.poll_release().is_some() {}
        while self.engine.poll_event().is_some() {}
    }

    /// Runs the load at a queue depth. The first half of the requests is not measured.
    fn run(mut self, depth: u64) -> Speed {
        (0..depth).for_each(|_| self.after(GUEST_NS, Event::Guest));
        let (mut from, mut reads_before) = (0, 0);
        while self.answered < REQUESTS {
            let Some(Reverse((at, _, event))) = self.events.peek().copied() else {
                panic!("nothing happens")
            };
            match self.engine.poll_timeout().filter(|due| due.0 < at) {
                Some(due) => {
                    self.now = due.0;
                    self.engine.handle_timeout(due);
                }
                None => {
                    self.events.pop();
                    self.now = at;
                    match event {
                        Event::Guest => self.send(),
                        Event::Io(id, sums) => {
                            let sums = vec![0; sums as usize];
                            self.engine.handle_completion(Instant(at), id, Ok(()), &sums);
                        }
                    }
                }
            }
            self.drain();
            if from == 0 && self.answered >= REQUESTS / 2 {
                (from, reads_before) = (self.now, self.backing_reads);
            }
        }
        let measured = (REQUESTS / 2) as f64;
        Speed {
            iops: measured * 1e9 / (self.now - from) as f64,
            backing_reads: (self.backing_reads - reads_before) as f64 * 100.0 / measured,
        }
    }
}

/// Returns the speeds with `sectors` and with `auto`.
fn compare(load: Load, depth: u64) -> (Speed, Speed) {
    let speed = |fill| Guest::new(load, fill).run(depth);
    let (sectors, auto) = (speed(Fill::Sectors), speed(Fill::Auto));
    println!("{load:?} depth {depth}: sectors {sectors:?}, auto {auto:?}");
    (sectors, auto)
}

#[test]
fn short_runs_gain_at_every_queue_depth() {
    for (depth, gain_min) in [(1, 2.0), (2, 1.5), (8, 1.2), (32, 1.0)] {
        let (sectors, auto) = compare(Load::Runs, depth);
        assert!(auto.iops > gain_min * sectors.iops, "depth {depth}: {auto:?}, {sectors:?}");
        assert!(auto.backing_reads < 0.6 * sectors.backing_reads, "depth {depth}: {auto:?}, {sectors:?}");
    }
}

#[test]
fn random_reads_lose_nothing() {
    for depth in [1, 8, 32] {
        let (sectors, auto) = compare(Load::Uniform, depth);
        assert!(auto.iops > 0.99 * sectors.iops, "depth {depth}: {auto:?}, {sectors:?}");
    }
}
