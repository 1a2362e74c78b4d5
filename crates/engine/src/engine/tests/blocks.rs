//! Blocks: space is reserved at creation, blocks are partly valid, whole blocks are evicted, and
//! caches are volatile.

use super::*;

/// SYSTEMS §1: "A 1 GB cache with 8 KB blocks has numBlocks = 131072", "Space is reserved when the
/// cache is created ("thick")."
#[test]
fn blocks_are_size_divided_by_block_size() {
    for (segments, segment_bytes, block_bytes, blocks) in [
        (1, 1 << 30, 8 * KIB, 131_072),
        (1024, MIB, 8 * KIB, 131_072),
        (4, MIB, MIB, 4),
        (3, MIB, 4 * KIB, 768),
    ] {
        let mut bench = Bench::bare(Limits::default());
        let segments = (0..segments).map(|i| segment(0, i * segment_bytes)).collect();
        bench.change(CacheChange::enable_volatile(config(segment_bytes, block_bytes), segments)).unwrap();
        let stats = bench.stats();
        assert_eq!((stats.blocks, stats.blocks_cached), (blocks, 0));
    }
}

/// SYSTEMS §1: "its own cache block size (4 KB … 1 MB, power of two)".
#[test]
fn every_block_size_from_4_kib_to_1_mib_works() {
    for shift in 12..=20 {
        let mut bench = Bench::cached(4, 1 << shift);
        let len = 1u64 << shift;
        assert_eq!(bench.read_alone(len / 2, len), Outcome::MissFilled);
        assert_eq!(bench.read_alone(len / 2, len), Outcome::Hit);
        let touched = if len == 4 * KIB { 2 } else { len / 4096 };
        let stats = bench.stats();
        assert_eq!((stats.blocks_cached, stats.sectors_valid), (2, touched));
    }
}

/// SYSTEMS §1: "a 4 KB miss into a 64 KB cache block evicts one whole 64 KB block if none is free,
/// stores 4 KB and marks the other 60 KB invalid. A later read of an invalid part is a miss. The
/// unread 60 KB is *not* fetched."
#[test]
fn a_small_miss_evicts_a_whole_block_and_stores_only_itself() {
    let mut bench = Bench::cached(2, 64 * KIB);
    bench.read_alone(0, 128 * KIB);
    assert_eq!(bench.stats().sectors_valid, 32);
    let read = bench.read(MIB + 8 * KIB, 4 * KIB);
    let fetch = bench.only_io();
    assert_eq!((fetch.offset, fetch.len), (MIB + 8 * KIB, 4 * KIB), "the unread part is not fetched");
    bench.end(fetch);
    let fill = bench.only_io();
    assert_eq!((fill.offset, fill.len), (8 * KIB, 4 * KIB), "at its place in the block");
    bench.end(fill);
    assert_eq!(bench.outcome(read), Outcome::MissFilled);
    let stats = bench.stats();
    assert_eq!((stats.evictions.operations, stats.evictions.blocks), (1, 1));
    assert_eq!((stats.blocks_cached, stats.sectors_valid), (2, 17));
    assert_eq!(bench.read_alone(64 * KIB, 64 * KIB), Outcome::Hit, "the other block stayed");
    assert_eq!(bench.read_alone(MIB + 8 * KIB, 4 * KIB), Outcome::Hit);
    assert_eq!(bench.read_alone(MIB + 12 * KIB, 4 * KIB), Outcome::MissFilled, "an invalid part");
    assert_eq!(bench.read_alone(MIB + 4 * KIB, 12 * KIB), Outcome::PartialMiss);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled, "evicted whole");
}

/// SYSTEMS §1: "Fill and eviction happen in whole cache blocks, I/O does not": one request may
/// evict several blocks, in one operation.
#[test]
fn one_request_may_evict_several_blocks() {
    let mut bench = Bench::cached(4, 4 * KIB);
    bench.read_alone(0, 16 * KIB);
    bench.read_alone(MIB, 12 * KIB);
    let evictions = bench.stats().evictions;
    assert_eq!((evictions.operations, evictions.blocks, evictions.last_blocks), (1, 3, 3));
    assert!(evictions.last_operation_ns > 0);
    assert_eq!(bench.read_alone(12 * KIB, 4 * KIB), Outcome::Hit);
}

/// A block without valid sectors is replaced without counting as an eviction.
#[test]
fn a_block_without_data_is_no_eviction() {
    let mut bench = Bench::cached(1, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    let discard = bench.request(Op::Discard(Durability::Volatile), 0, 4 * KIB);
    bench.settle();
    assert_eq!(bench.outcome(discard), Outcome::BypassZeroing);
    assert_eq!(bench.stats().blocks_cached, 0);
    bench.read_alone(MIB, 4 * KIB);
    assert_eq!(bench.stats().evictions.operations, 0);
}

/// Blocks with I/O in flight are not evicted: if there are no others, a miss is not filled.
#[test]
fn blocks_in_use_stay() {
    let mut bench = Bench::cached(1, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    bench.read(0, 4 * KIB);
    let hit = bench.only_io();
    let miss = bench.read(MIB, 4 * KIB);
    let fetch = bench.only_io();
    bench.end(fetch);
    assert_eq!(bench.outcome(miss), Outcome::MissNoBlock);
    assert_eq!(bench.released.len(), 2, "nothing to wait for");
    bench.end(hit);
    assert_eq!(bench.read_alone(MIB, 4 * KIB), Outcome::MissFilled);
}

/// A request that is larger than the cache fills as much as fits, and is answered.
#[test]
fn a_request_larger_than_the_cache_is_served() {
    let mut bench = Bench::cached(4, 4 * KIB);
    let read = bench.read(0, MIB);
    bench.settle();
    assert_eq!(bench.outcome(read), Outcome::MissNoBlock);
    assert_eq!(bench.stats().blocks_cached, 4);
}

/// SYSTEMS §1: "The cache is emptied by a cold restart of the machine": a new engine has no data.
#[test]
fn a_new_engine_starts_empty() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 64 * KIB);
    let mut bench = Bench::cached(16, 4 * KIB);
    assert_eq!(bench.stats().blocks_cached, 0);
    assert_eq!(bench.read_alone(0, 64 * KIB), Outcome::MissFilled);
}

/// A run of adjacent blocks on flash is one I/O. A part in another segment is a second I/O.
#[test]
fn neighbours_in_flash_move_in_one_io() {
    let mut bench = Bench::bare(Limits::default());
    let segments = vec![segment(0, 0), segment(1, 0), segment(1, 16 * KIB)];
    bench.change(CacheChange::enable_volatile(config(16 * KIB, 4 * KIB), segments)).unwrap();
    bench.read_alone(0, 48 * KIB);
    bench.read(0, 48 * KIB);
    let ios: Vec<_> = bench.ios.iter().map(|io| (io.target, io.offset, io.len)).collect();
    let (a, b) = (Target::Flash(DeviceId(0)), Target::Flash(DeviceId(1)));
    assert_eq!(ios, [(a, 0, 16 * KIB), (b, 0, 32 * KIB)]);
}
