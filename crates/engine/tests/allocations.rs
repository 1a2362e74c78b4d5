//! Hits allocate no memory. Other requests allocate none after the engine has processed a similar
//! load.
//!
//! This file has a single test, because the allocator counts for the whole process.

use std::alloc::System;

use hob_engine::admission::Admission;
use hob_engine::command::{Access, CacheChange, CacheConfig, Command, DiskConfig, Segment};
use hob_engine::io::{Durability, Io, Op, PayloadMemory, Promote, Request, Target};
use hob_engine::outcome::Outcome;
use hob_engine::policy::PolicyKind;
use hob_engine::sizing::Shards;
use hob_engine::units::{
    BufferId, CommandId, DatastoreId, DeviceId, DiskId, Instant, RequestId, SECTOR_BYTES,
};
use hob_engine::{Engine, Limits};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const DISK: DiskId = DiskId(0);
const DEPTH: u64 = 16;
const SUMS: [u32; 16] = [7; 16];

/// Runs batches of `DEPTH` requests until `count` requests are done; returns the number of hits.
fn run(engine: &mut Engine, count: u64, make: impl Fn(u64) -> (Op, u64, u64)) -> u64 {
    let mut ios: [Option<Io>; 4 * DEPTH as usize] = [None; 4 * DEPTH as usize];
    let (mut now, mut hits) = (Instant(0), 0);
    for batch in 0..count / DEPTH {
        for i in batch * DEPTH..(batch + 1) * DEPTH {
            let (op, offset, len) = make(i);
            let buffer = op.has_buffer().then_some(BufferId(i as u32));
            let request = Request {
                id: RequestId(i),
                disk: DISK,
                op,
                offset,
                len,
                buffer,
                promote: Promote::Usual,
                memory: PayloadMemory::Daemon,
            };
            engine.handle_request(now, request).expect("there is room");
        }
        loop {
            let mut issued = 0;
            while let Some(io) = engine.poll_io() {
                ios[issued] = Some(io);
                issued += 1;
            }
            if issued == 0 {
                break;
            }
            for io in ios[..issued].iter_mut().rev().filter_map(Option::take) {
                now = now + 1000;
                let sectors = match io.target {
                    Target::Flash(_) => (io.len / SECTOR_BYTES) as usize,
                    Target::Backing(_) => 0,
                };
                engine.handle_completion(now, io.id, Ok(()), &SUMS[..sectors]);
            }
        }
        while let Some(reply) = engine.poll_reply() {
            assert_eq!(reply.result, Ok(()));
            hits += u64::from(reply.outcome == Outcome::Hit);
        }
        while engine.poll_release().is_some() {}
        assert!(engine.poll_timeout().is_none());
    }
    hits
}

#[test]
fn nothing_is_allocated_in_steady_state() {
    for policy in PolicyKind::all() {
        let mut engine = Engine::new(Limits::default());
        let disk = DiskConfig { size_bytes: 1 << 30, access: Access::ReadWrite, datastore: DatastoreId(0) };
        engine.handle_command(Instant(0), CommandId(1), DISK, Command::AddDisk(disk));
        let config = CacheConfig::write_through(4096, 1 << 20, policy, Admission::default());
        let segments = (0..16).map(|i| Segment { device: DeviceId(i % 2), offset: u64::from(i) << 20 });
        let enable = CacheChange::enable_volatile(config, segments.collect());
        engine.handle_command(Instant(0), CommandId(2), DISK, Command::Cache(enable));
        while engine.poll_event().is_some() {}

        let hot = |i: u64| (Op::Read, i * 7919 % 256 * 4096, 4096 << (i % 3));
        run(&mut engine, 4096, |i| (Op::Read, i % 260 * 4096, 4096));
        run(&mut engine, 4096, hot);
        let region = Region::new(ALLOCATOR);
        let hits = run(&mut engine, 10_000, hot);
        let change = region.change();
        assert_eq!(hits, 10_000);
        assert_eq!((change.allocations, change.reallocations), (0, 0), "{} hits", policy.info().name);

        // Misses that evict, and writes, after the engine has processed some of them.
        let mixed = |i: u64| match i % 3 {
            0 => (Op::Write(Durability::Volatile), i * 104_729 % (1 << 14) * 4096, 8192),
            _ => (Op::Read, i * 104_729 % (1 << 17) * 4096, 8192),
        };
        run(&mut engine, 60_000, mixed);
        let region = Region::new(ALLOCATOR);
        run(&mut engine, 10_000, mixed);
        let change = region.change();
        // A queue may still receive a longer burst than before.
        assert_eq!(change.allocations, 0, "{} misses", policy.info().name);
        assert!(change.reallocations <= 2, "{} misses: {}", policy.info().name, change.reallocations);
    }

    // The sampled miss-ratio curve has a fixed size from the first access on, and a fixed rate
    // after it has its samples.
    let watch = |shards: &mut Shards| (0..300_000u64).for_each(|i| shards.access(i * i % 100_003, 1));
    let mut fixed_size = Shards::fixed_size(1000);
    let mut fixed_rate = Shards::fixed_rate(0.05, 200_000);
    watch(&mut fixed_rate);
    let region = Region::new(ALLOCATOR);
    watch(&mut fixed_size);
    watch(&mut fixed_rate);
    let change = region.change();
    assert_eq!((change.allocations, change.reallocations), (0, 0), "SHARDS");
    assert!(fixed_size.rate() < 0.1 && fixed_rate.samples() > 1000);
}
