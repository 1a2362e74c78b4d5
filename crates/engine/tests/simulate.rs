//! Compares the simulated cache with the full engine, on the same requests, one at a time: equal
//! outcomes and equal costs for each request and every policy.

use hob_engine::admission::Admission;
use hob_engine::command::{Access, CacheChange, CacheConfig, Command, DiskConfig, Segment};
use hob_engine::granularity::{FILLS, Fill};
use hob_engine::io::{Durability, Io, IoOp, Op, PayloadMemory, Promote, Request, Target, Zeroing};
use hob_engine::outcome::Outcome;
use hob_engine::policy::PolicyKind;
use hob_engine::units::{
    BufferId, CommandId, DatastoreId, DeviceId, DiskId, Instant, RequestId, SECTOR_BYTES,
};
use hob_engine::{CacheSim, Engine, Limits, SimConfig};
use proptest::prelude::*;

const DISK: DiskId = DiskId(0);
const DISK_BYTES: u64 = 4 << 20;
const ADMISSIONS: [&str; 6] = [
    "always",
    "while-free",
    "nth-access:3",
    "ghost",
    "always+not-sequential:64K",
    "nth-access:2+not-sequential:32K",
];

/// The engine with one disk, whose I/O completes at once.
struct Whole {
    engine: Engine,
    requests: u64,
    flash_write_bytes: u64,
}

/// Returns the next I/O, after copies between buffers. This test does not use the data.
fn next_io(engine: &mut Engine) -> Option<Io> {
    while engine.poll_copy().is_some() {}
    engine.poll_io()
}

impl Whole {
    fn new(config: &SimConfig) -> Whole {
        let mut whole = Whole { engine: Engine::new(Limits::default()), requests: 0, flash_write_bytes: 0 };
        // For the first and last sectors of partial writes, and for extra fills.
        whole.engine.lend(BufferId(1), 1 << 20);
        let disk =
            DiskConfig { size_bytes: DISK_BYTES, access: Access::ReadWrite, datastore: DatastoreId(0) };
        let SimConfig { blocks, block_bytes, policy, admission, fill } = *config;
        let segment_bytes = u64::from(block_bytes);
        let cache = CacheConfig::write_through(block_bytes, segment_bytes, policy, admission);
        let cache = CacheConfig { fill, ..cache };
        let segments =
            (0..u64::from(blocks)).map(|i| Segment { device: DeviceId(0), offset: i * segment_bytes });
        let enable = Command::Cache(CacheChange::enable_volatile(cache, segments.collect()));
        for (id, command) in [(1, Command::AddDisk(disk)), (2, enable)] {
            whole.engine.handle_command(Instant(0), CommandId(id), DISK, command);
        }
        whole
    }

    fn ask(&mut self, op: Op, offset: u64, len: u64) -> Outcome {
        self.requests += 1;
        let buffer = op.has_buffer().then_some(BufferId(0));
        let request = Request {
            id: RequestId(self.requests),
            disk: DISK,
            op,
            offset,
            len,
            buffer,
            promote: Promote::Usual,
            memory: PayloadMemory::Daemon,
        };
        self.engine.handle_request(Instant(0), request).expect("one at a time");
        while let Some(Io { id, target, op, len, .. }) = next_io(&mut self.engine) {
            let sums = match target {
                Target::Flash(_) => vec![0; (len / SECTOR_BYTES) as usize],
                Target::Backing(_) => vec![],
            };
            if matches!((target, op), (Target::Flash(_), IoOp::Write(_))) {
                self.flash_write_bytes += len;
            }
            self.engine.handle_completion(Instant(0), id, Ok(()), &sums);
        }
        let reply = self.engine.poll_reply().expect("answered");
        assert_eq!(reply.result, Ok(()));
        reply.outcome
    }
}

/// Returns a random kind of request, position and length.
fn request() -> impl Strategy<Value = (u8, u64, u64)> {
    let place = prop_oneof![
        4 => (0u64..64).prop_map(|i| i * i % 61 * 4096),
        2 => (0u64..1000).prop_map(|i| i * 4096),
        1 => 0u64..DISK_BYTES - (1 << 17),
    ];
    let len = prop_oneof![5 => Just(4096u64), 2 => (1u64..17).prop_map(|i| i * 4096), 1 => 1u64..100_000];
    (0u8..20, place, len)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_simulation_matches_the_engine(
        requests in prop::collection::vec(request(), 1..400),
        scans in prop::collection::vec((0usize..400, 0u64..512), 0..4),
        blocks in 1u32..40,
        block_shift in 0u32..5,
        admission in 0..ADMISSIONS.len(),
        fill in 0..FILLS.len(),
    ) {
        let mut list = requests;
        for (at, start) in scans {
            let at = at.min(list.len());
            list.splice(at..at, (0..40).map(|i| (0, (start + i) * 4096, 4096)));
        }
        for policy in PolicyKind::all() {
            let admission: Admission = ADMISSIONS[admission].parse().expect("an admission");
            let fill = FILLS[fill].fill;
            let config = SimConfig { blocks, block_bytes: 4096 << block_shift, policy, admission, fill };
            let mut whole = Whole::new(&config);
            let mut sim = CacheSim::new(&config).expect("workable");
            for (index, (kind, offset, len)) in list.iter().copied().enumerate() {
                let (from_sim, from_engine) = match kind {
                    0..13 => (sim.read(offset, len), whole.ask(Op::Read, offset, len)),
                    13..19 => {
                        (sim.write(offset, len), whole.ask(Op::Write(Durability::Volatile), offset, len))
                    }
                    _ => {
                        let zeroes = Op::WriteZeroes(Durability::Volatile, Zeroing::MayUnmap);
                        (sim.discard(offset, len), whole.ask(zeroes, offset, len))
                    }
                };
                let name = policy.info().name;
                prop_assert_eq!(from_sim, from_engine, "{} at request {}", name, index);
                prop_assert_eq!(
                    sim.stats().flash_write_bytes, whole.flash_write_bytes, "{} at request {}", name, index
                );
            }
            let stats = whole.engine.stats(Instant(0), DISK).expect("the disk exists");
            prop_assert_eq!(sim.stats().evictions, stats.evictions.blocks);
            prop_assert_eq!(sim.stats().extra_read_bytes, stats.extra_read_bytes);
            prop_assert_eq!(sim.stats().read_hits, stats.outcomes[Outcome::Hit as usize].count);
        }
    }
}

#[test]
fn impossible_caches_are_refused() {
    let config = SimConfig {
        blocks: 10,
        block_bytes: 4096,
        policy: PolicyKind::default(),
        admission: Admission::default(),
        fill: Fill::Sectors,
    };
    assert!(CacheSim::new(&config).is_ok());
    for bad in [
        SimConfig { blocks: 0, ..config },
        SimConfig { block_bytes: 5000, ..config },
        SimConfig { block_bytes: 2048, ..config },
        SimConfig { block_bytes: 2 << 20, ..config },
    ] {
        assert!(CacheSim::new(&bad).is_err(), "{bad:?}");
    }
}
