//! Measures the engine's time for a read or a write of cached data under write-through, nanoseconds,
//! without and with shares and limits.
//!
//! Run it with `cargo run -p hob-lab --example hit_cost`. The engine is optimized in the
//! development profile too. The program runs the settings in turn, and each result is the median of
//! many short runs, to exclude other load of the host.

use std::time::Instant as Clock;

use hob_engine::admission::Admission;
use hob_engine::command::{Access, CacheChange, CacheConfig, Command, DiskConfig, Segment};
use hob_engine::io::{Durability, Op, PayloadMemory, Promote, Request, Target};
use hob_engine::policy::PolicyKind;
use hob_engine::qos::{Control, DiskQos, Entitlement, Late, Resource};
use hob_engine::units::{
    BufferId, CommandId, DatastoreId, DeviceId, DiskId, Instant, RequestId, SECTOR_BYTES,
};
use hob_engine::{Engine, Limits};
use hob_lab::prng::Prng;

const DISK: DiskId = DiskId(0);
const CACHE_BYTES: u64 = 64 << 20;
const DEPTH: u64 = 16;
const BATCHES: u64 = 64;
const RUNS: usize = 1500;

/// Name of a setting, a disk's shares and limits, and the control of its datastore.
type Setting = (&'static str, DiskQos, Control);

struct Bench {
    engine: Engine,
    now: Instant,
    made: u64,
    dice: Prng,
}

/// Returns the engine's next I/O. Copies between buffers, which the engine requests first, are
/// dropped, because the program does not use the data.
fn next_io(engine: &mut Engine) -> Option<hob_engine::io::Io> {
    while engine.poll_copy().is_some() {}
    engine.poll_io()
}

impl Bench {
    fn new(qos: DiskQos, control: Control) -> Bench {
        let mut engine = Engine::new(Limits::default());
        let mut command = |id, command| engine.handle_command(Instant(0), CommandId(id), DISK, command);
        let datastore = DatastoreId(0);
        command(
            1,
            Command::AddDisk(DiskConfig { size_bytes: 1 << 30, access: Access::ReadWrite, datastore }),
        );
        let config = CacheConfig::write_through(4096, 1 << 20, PolicyKind::default(), Admission::default());
        let segments =
            (0..CACHE_BYTES >> 20).map(|i| Segment { device: DeviceId(0), offset: i << 20 }).collect();
        command(2, Command::Cache(CacheChange::enable_volatile(config, segments)));
        let mut bench = Bench { engine, now: Instant(0), made: 0, dice: Prng::new(7) };
        (0..CACHE_BYTES / 4096 / DEPTH)
            .for_each(|batch| bench.batch(Op::Read, |i| (batch * DEPTH + i) * 4096));
        let engine = &mut bench.engine;
        engine.handle_command(bench.now, CommandId(3), DISK, Command::Qos(qos));
        engine.control(bench.now, Resource::Datastore(datastore), control);
        while engine.poll_event().is_some() {}
        bench
    }

    /// Runs some requests at once.
    fn batch(&mut self, op: Op, mut offset: impl FnMut(u64) -> u64) {
        for i in 0..DEPTH {
            self.made += 1;
            let request = Request {
                id: RequestId(self.made),
                disk: DISK,
                op,
                offset: offset(i),
                len: 4096,
                buffer: Some(BufferId(i as u32)),
                promote: Promote::Usual,
                memory: PayloadMemory::Daemon,
            };
            self.engine.handle_request(self.now, request).expect("there is room");
        }
        while let Some(io) = next_io(&mut self.engine) {
            self.now = self.now + 1000;
            let sectors = match io.target {
                Target::Flash(_) => (io.len / SECTOR_BYTES) as usize,
                Target::Backing(_) => 0,
            };
            self.engine.handle_completion(self.now, io.id, Ok(()), &[7; 16][..sectors]);
        }
        while self.engine.poll_reply().is_some() {}
        while self.engine.poll_release().is_some() {}
    }

    /// Returns nanoseconds per request.
    fn run(&mut self, op: Op) -> f64 {
        let offsets: Vec<u64> =
            (0..BATCHES * DEPTH).map(|_| self.dice.below(CACHE_BYTES / 4096) * 4096).collect();
        let began = Clock::now();
        for batch in offsets.chunks(DEPTH as usize) {
            self.batch(op, |i| batch[i as usize]);
        }
        began.elapsed().as_nanos() as f64 / offsets.len() as f64
    }
}

fn main() {
    let due = |limit| Entitlement { shares: 2000, reservation: 10, limit, bytes_limit: None };
    let usual = Control::Latency { late: Late::Above(30_000_000), weight_milli: 1000 };
    let settings: [Setting; 3] = [
        ("nothing set", DiskQos::default(), Control::Off),
        (
            "shares, a reservation and a limit on the datastore, throttled by latency",
            { DiskQos { backing: due(Some(100_000)), flash: Entitlement::default() } },
            usual,
        ),
        (
            "the same, and a limit on flash that it does not reach",
            { DiskQos { backing: due(Some(100_000)), flash: due(Some(50_000_000)) } },
            usual,
        ),
    ];
    let mut benches = settings.map(|(_, qos, control)| (Bench::new(qos, control), Vec::new()));
    // The limits of the other settings would delay writes.
    let (mut writer, mut writes) = (Bench::new(DiskQos::default(), Control::Off), Vec::new());
    for _ in 0..RUNS {
        for (bench, figures) in &mut benches {
            figures.push(bench.run(Op::Read));
        }
        writes.push(writer.run(Op::Write(Durability::Volatile)));
    }
    let median = |mut figures: Vec<f64>| {
        figures.sort_by(f64::total_cmp);
        figures[RUNS / 2]
    };
    for ((name, ..), (bench, figures)) in settings.into_iter().zip(benches) {
        let stats = bench.engine.stats(bench.now, DISK).expect("it is there");
        assert_eq!(stats.read_hits, (RUNS as u64) * BATCHES * DEPTH, "hits only");
        println!("{name:<75} {:>7.1} ns", median(figures));
    }
    println!("{:<75} {:>7.1} ns", "nothing set, a write", median(writes));
}
