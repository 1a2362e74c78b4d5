//! Measures index memory with a counting allocator: all memory that depends on the cache size, in
//! bytes per 4 KiB block. Promise 6: "at most 24 bytes per block all-in". For policies that only
//! the lab may use, the test only checks that they report their memory use correctly.
//!
//! This file has a single test, because the allocator counts for the whole process.

use std::alloc::System;

use hob_engine::admission::Admission;
use hob_engine::command::{
    Access, CacheChange, CacheConfig, Command, DataSegment, DiskConfig, Event, Segment,
};
use hob_engine::io::{Op, PayloadMemory, Promote, Request, Target};
use hob_engine::policy::PolicyKind;
use hob_engine::units::{
    BufferId, CommandId, DatastoreId, DeviceId, DiskId, Instant, RequestId, SECTOR_BYTES,
};
use hob_engine::{Engine, Limits};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const DISK: DiskId = DiskId(0);
const BLOCKS: u64 = 1 << 20;
const SEGMENT_BYTES: u64 = 64 << 20;
const REQUEST_BYTES: u64 = 256 << 10;
const BYTES_PER_BLOCK_MAX: f64 = 24.0;

struct Bench {
    engine: Engine,
    commands: u64,
}

/// Returns the next I/O, after copies between buffers. This test does not use the data.
fn next_io(engine: &mut Engine) -> Option<hob_engine::io::Io> {
    while engine.poll_copy().is_some() {}
    engine.poll_io()
}

impl Bench {
    fn new() -> Self {
        let mut bench = Bench { engine: Engine::new(Limits::default()), commands: 0 };
        let size_bytes = 4 * BLOCKS * SECTOR_BYTES;
        bench.command(Command::AddDisk(DiskConfig {
            size_bytes,
            access: Access::ReadWrite,
            datastore: DatastoreId(0),
        }));
        bench
    }

    fn command(&mut self, command: Command) {
        self.commands += 1;
        self.engine.handle_command(Instant(0), CommandId(self.commands), DISK, command);
        while let Some(event) = self.engine.poll_event() {
            assert!(matches!(event, Event::Done { result: Ok(_), .. }), "{event:?}");
        }
    }

    /// Reads a range of the disk once from its start; misses are filled.
    fn read(&mut self, bytes: u64) {
        let sums = [7; (REQUEST_BYTES / SECTOR_BYTES) as usize];
        for offset in (0..bytes).step_by(REQUEST_BYTES as usize) {
            let request = Request {
                id: RequestId(offset),
                disk: DISK,
                op: Op::Read,
                offset,
                len: REQUEST_BYTES,
                buffer: Some(BufferId(0)),
                promote: Promote::Usual,
                memory: PayloadMemory::Daemon,
            };
            self.engine.handle_request(Instant(0), request).expect("one at a time");
            while let Some(io) = next_io(&mut self.engine) {
                let sectors = match io.target {
                    Target::Flash(_) => (io.len / SECTOR_BYTES) as usize,
                    Target::Backing(_) => 0,
                };
                self.engine.handle_completion(Instant(0), io.id, Ok(()), &sums[..sectors]);
            }
            while self.engine.poll_reply().is_some() {}
            while self.engine.poll_release().is_some() {}
        }
        assert_eq!(self.engine.in_flight(), 0);
    }

    /// Returns the allocated bytes since `region` began, per block, and checks that the engine
    /// reports the same.
    fn measure(&self, region: &Region<'_, System>, policy: &str, when: &str) {
        let change = region.change();
        let live = (change.bytes_allocated - change.bytes_deallocated) as f64;
        let stats = self.engine.stats(Instant(0), DISK).expect("the disk exists");
        let per_block = live / stats.blocks as f64;
        println!("{policy:13} {when:22} {:7} blocks  {per_block:.2} bytes per block", stats.blocks);
        let serves = PolicyKind::from_name(policy).is_some_and(|kind| kind.info().serves);
        assert!(!serves || per_block <= BYTES_PER_BLOCK_MAX, "{policy} {when}: {per_block}");
        let told = stats.index_bytes as f64;
        assert!((told - live).abs() <= 0.02 * live, "{policy} {when}: says {told}, takes {live}");
    }
}

fn segments(range: std::ops::Range<u64>) -> Vec<Segment> {
    range.map(|i| Segment { device: DeviceId(0), offset: i * SEGMENT_BYTES }).collect()
}

/// Promise 6: at most 24 bytes per 4 KiB block, including everything that depends on the cache
/// size.
#[test]
fn the_index_takes_at_most_24_bytes_per_block() {
    let all = BLOCKS * SECTOR_BYTES / SEGMENT_BYTES;
    for policy in PolicyKind::all() {
        let name = policy.info().name;
        let mut bench = Bench::new();
        bench.read(16 << 20);
        let region = Region::new(ALLOCATOR);
        let config =
            CacheConfig::write_through(SECTOR_BYTES as u32, SEGMENT_BYTES, policy, Admission::default());
        bench.command(Command::Cache(CacheChange::enable_volatile(config, segments(0..all))));
        bench.measure(&region, name, "empty");
        bench.read(BLOCKS * SECTOR_BYTES * 5 / 4);
        let stats = bench.engine.stats(Instant(0), DISK).expect("the disk exists");
        // One pass does not fill a policy that refuses new blocks.
        if policy.info().serves {
            assert_eq!((stats.blocks_cached, stats.evictions.blocks), (BLOCKS, BLOCKS / 4));
        }
        drop(stats);
        bench.measure(&region, name, "full, after evictions");
        bench.command(Command::Cache(CacheChange::Shrink(all as u32 / 4, None)));
        bench.measure(&region, name, "after shrinking");
        bench.command(Command::Cache(CacheChange::Grow(
            DataSegment::without_order(segments(all..all + 5)),
            None,
        )));
        bench.measure(&region, name, "after growing");
        bench.command(Command::Cache(CacheChange::Disable));
        let change = region.change();
        let left = change.bytes_allocated - change.bytes_deallocated;
        assert!(left < 64 << 10, "{name}: {left} bytes left after the cache is gone");
    }
}
