//! Sizing a cache by hand from its statistics, as the study of vSphere Flash Read Cache teaches it
//! (§1 of SYSTEMS, the project's description of other systems, outside this repository). The engine's
//! I/O completes at once.

use hob_engine::admission::Admission;
use hob_engine::command::{Access, CacheChange, CacheConfig, Command, DiskConfig, Segment};
use hob_engine::io::{Io, Op, PayloadMemory, Promote, Request, Target};
use hob_engine::policy::PolicyKind;
use hob_engine::stats::DiskStats;
use hob_engine::units::{
    BufferId, CommandId, DatastoreId, DeviceId, DiskId, Instant, RequestId, SECTOR_BYTES,
};
use hob_engine::{Engine, Limits};

const DISK: DiskId = DiskId(0);
/// Size of the disk in blocks of 4 KiB.
const DISK_BLOCKS: u64 = 1000;
/// Number of blocks of each read.
const READ_BLOCKS: u64 = 10;
/// Number of random reads of the warm-up, and of the measurement after it.
const READS: u64 = 2000;

/// A disk with an LRU cache.
struct Rig {
    engine: Engine,
    requests: u64,
}

/// Returns the next I/O, after copies between buffers. This test does not use the data.
fn next_io(engine: &mut Engine) -> Option<Io> {
    while engine.poll_copy().is_some() {}
    engine.poll_io()
}

impl Rig {
    fn new(cache_blocks: u64) -> Rig {
        let mut rig = Rig { engine: Engine::new(Limits::default()), requests: 0 };
        let size_bytes = DISK_BLOCKS * SECTOR_BYTES;
        let disk = DiskConfig { size_bytes, access: Access::ReadWrite, datastore: DatastoreId(0) };
        let lru = PolicyKind::from_name("lru").expect("hob has LRU");
        let cache = CacheConfig::write_through(4096, SECTOR_BYTES, lru, Admission::default());
        let segment = |block| Segment { device: DeviceId(0), offset: block * SECTOR_BYTES };
        let segments = (0..cache_blocks).map(segment).collect();
        let enable = Command::Cache(CacheChange::enable_volatile(cache, segments));
        for (id, command) in [(1, Command::AddDisk(disk)), (2, enable)] {
            rig.engine.handle_command(Instant(0), CommandId(id), DISK, command);
        }
        rig
    }

    fn read(&mut self, block: u64) {
        self.requests += 1;
        let request = Request {
            id: RequestId(self.requests),
            disk: DISK,
            op: Op::Read,
            offset: block * SECTOR_BYTES,
            len: READ_BLOCKS * SECTOR_BYTES,
            buffer: Some(BufferId(0)),
            promote: Promote::Usual,
            memory: PayloadMemory::Daemon,
        };
        self.engine.handle_request(Instant(0), request).expect("one at a time");
        while let Some(Io { id, target, len, .. }) = next_io(&mut self.engine) {
            let sums = match target {
                Target::Flash(_) => vec![0; (len / SECTOR_BYTES) as usize],
                Target::Backing(_) => vec![],
            };
            self.engine.handle_completion(Instant(0), id, Ok(()), &sums);
        }
        assert_eq!(self.engine.poll_reply().expect("answered").result, Ok(()));
    }

    fn stats(&self) -> DiskStats {
        self.engine.stats(Instant(0), DISK).expect("the disk exists")
    }
}

/// Statistics of a cache after its warm-up.
#[derive(Debug)]
struct Statistics {
    blocks: u64,
    blocks_cached: u64,
    read_hit_ratio: f64,
    /// Evicted blocks since the warm-up.
    evicted: u64,
    /// Operations that evicted blocks since the warm-up.
    evictions: u64,
}

/// Returns the statistics of a cache with this percentage of the disk's size, under random reads of
/// the first `used_percent` of the disk.
fn statistics(cache_percent: u64, used_percent: u64) -> Statistics {
    let mut rig = Rig::new(DISK_BLOCKS * cache_percent / 100);
    let places = DISK_BLOCKS / READ_BLOCKS * used_percent / 100;
    (0..places).for_each(|place| rig.read(place * READ_BLOCKS));
    let mut random = 1_u64;
    let mut read_some = |rig: &mut Rig| {
        for _ in 0..READS {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            rig.read((random >> 33) % places * READ_BLOCKS);
        }
    };
    read_some(&mut rig);
    let before = rig.stats();
    read_some(&mut rig);
    let after = rig.stats();
    Statistics {
        blocks: after.blocks,
        blocks_cached: after.blocks_cached,
        read_hit_ratio: (after.read_hits - before.read_hits) as f64 / READS as f64,
        evicted: after.evictions.blocks - before.evictions.blocks,
        evictions: after.evictions.operations - before.evictions.operations,
    }
}

/// SYSTEMS §1: "start at 20 % of the disk; numBlocksCurrentlyCached < numBlocks after warm-up →
/// over-provisioned; equal, with many blocks per eviction and a low hit rate → under-provisioned;
/// vary the size and watch."
#[test]
fn statistics_show_whether_a_cache_is_too_large_or_too_small() {
    let large = statistics(20, 10);
    assert!(large.blocks_cached < large.blocks && large.evicted == 0, "over-provisioned: {large:?}");
    let small = statistics(20, 100);
    assert_eq!(small.blocks_cached, small.blocks, "{small:?}");
    assert!(small.evicted >= small.evictions * READ_BLOCKS / 2, "many blocks per eviction: {small:?}");
    assert!(small.evictions > 0 && small.read_hit_ratio < 0.3, "under-provisioned: {small:?}");
    // Larger caches have more hits, until the cache has all data and evicts nothing.
    let varied = [20, 40, 80, 100].map(|cache_percent| statistics(cache_percent, 100));
    for pair in varied.windows(2) {
        assert!(pair[0].read_hit_ratio < pair[1].read_hit_ratio, "{varied:?}");
    }
    let whole = &varied[3];
    assert!(whole.read_hit_ratio == 1.0 && whole.evicted == 0, "{whole:?}");
}
