//! Tests of the statistics of a disk and its cache. The quoted sentences are from the part
//! "Statistics, live, per cache" of SYSTEMS §1 (see `engine/tests.rs`).

use super::*;
use crate::io::Zeroing;
use crate::outcome::OUTCOMES;

/// Issue: "Every request is classified once … counted with a latency histogram per class per disk."
#[test]
fn every_request_is_counted_once() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    bench.read_alone(0, 8 * KIB);
    bench.read_alone(0, 8 * KIB);
    bench.write_alone(0, 4 * KIB);
    bench.write_alone(0, 512);
    bench.request(Op::Flush, 0, 0);
    bench.request(Op::Discard(Durability::Volatile), 0, 4 * KIB);
    bench.settle();
    bench.read(u64::MAX, 1);
    let stats = bench.stats();
    let counts: Vec<_> = OUTCOMES
        .iter()
        .zip(&stats.outcomes)
        .filter(|(_, row)| row.count > 0)
        .map(|(info, row)| (info.outcome, row.count, row.bytes))
        .collect();
    assert_eq!(
        counts,
        [
            (Outcome::Hit, 1, 8192),
            (Outcome::PartialMiss, 1, 8192),
            (Outcome::MissFilled, 1, 4096),
            (Outcome::WriteCopied, 1, 4096),
            (Outcome::WriteNotCopied, 1, 512),
            (Outcome::BypassZeroing, 1, 4096),
            (Outcome::BypassFlush, 1, 0),
            (Outcome::Refused, 1, 0),
        ]
    );
    assert_eq!(stats.requests(), 8);
    assert!(stats.outcomes.iter().all(|row| row.latency.count() == row.count));
    assert_eq!(stats.latency().count(), 8);
}

/// SYSTEMS §1: "read hit %, total cache I/Os, mean cache I/O latency (µs), mean disk I/O latency
/// (µs), total I/Os, mean and max IOPS, mean and max KB per I/O, mean and max I/O latency (µs)".
#[test]
fn the_figures_of_a_known_load() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    for _ in 0..3 {
        bench.read_alone(0, 4 * KIB);
    }
    bench.write_alone(8 * KIB, 16 * KIB);
    let stats = bench.stats();
    assert_eq!((stats.reads, stats.writes, stats.read_hits), (4, 1, 3));
    assert_eq!(stats.read_hit_ratio(), 0.75);
    assert_eq!((stats.flash.ios, stats.flash.mean_ns()), (5, 1000), "1 fill, 3 reads, 1 copy");
    assert_eq!((stats.backing.ios, stats.backing.mean_ns()), (2, 1000));
    assert_eq!((stats.flash.read_bytes, stats.flash.write_bytes), (12 * KIB, 20 * KIB));
    assert_eq!((stats.backing.read_bytes, stats.backing.write_bytes), (4 * KIB, 16 * KIB));
    assert_eq!(stats.request_bytes_mean(), (4.0 * 4096.0 + 16384.0) / 5.0);
    assert_eq!(stats.request_bytes_max, 16 * KIB);
    assert_eq!((stats.latency().mean_ns(), stats.latency().max_ns()), (1000, 1000));
    assert_eq!(stats.elapsed_ns, 7000);
    assert_eq!(stats.iops_mean(), 5.0 / 7e-6);
}

/// SYSTEMS §1: "mean and max IOPS": the maximum is over one second.
#[test]
fn the_busiest_second_is_remembered() {
    let mut bench = Bench::bare(Limits::default());
    for requests in [3, 10, 2, 0, 1] {
        (0..requests).for_each(|_| _ = bench.read_alone(0, 4 * KIB));
        bench.now = Instant((bench.now.0 / 1_000_000_000 + 1) * 1_000_000_000);
    }
    assert_eq!(bench.stats().iops_max, 10);
    assert_eq!(bench.stats().iops_mean(), 16.0 / 5.0);
}

/// SYSTEMS §1: "evictions: last operation's time and number of blocks, mean blocks per operation
/// (`Evict:avgNumBlocksPerOp`)", "`numBlocks`", "`numBlocksCurrentlyCached`".
#[test]
fn evictions_and_occupancy() {
    let mut bench = Bench::cached(4, 4 * KIB);
    bench.read_alone(0, 12 * KIB);
    assert_eq!((bench.stats().blocks, bench.stats().blocks_cached), (4, 3), "over-provisioned so far");
    bench.read_alone(MIB, 8 * KIB);
    bench.read_alone(2 * MIB, 16 * KIB);
    let stats = bench.stats();
    assert_eq!(stats.blocks_cached, 4);
    let evictions = stats.evictions;
    assert_eq!((evictions.operations, evictions.blocks, evictions.last_blocks), (2, 5, 4));
    assert_eq!(evictions.last_operation_ns, 6000, "when the third read came from the backing");
}

/// SYSTEMS §1: "failed flash I/Os, failed disk I/Os".
#[test]
fn failed_ios_are_counted_by_side() {
    let mut bench = Bench::cached(4, 4 * KIB);
    bench.read(0, 4 * KIB);
    let io = bench.only_io();
    bench.end(io);
    let fill = bench.only_io();
    bench.fail(fill);
    bench.read(0, 4 * KIB);
    let io = bench.only_io();
    bench.fail(io);
    let stats = bench.stats();
    assert_eq!((stats.flash.errors, stats.backing.errors), (1, 1));
}

/// Statistics are reset while requests are in flight.
#[test]
fn a_reset_restarts_the_counts() {
    let mut bench = Bench::cached(4, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    let read = bench.read(0, 4 * KIB);
    bench.command(Command::ResetStats).unwrap();
    assert_eq!((bench.stats().requests(), bench.stats().in_flight), (0, 1));
    bench.settle();
    assert_eq!(bench.outcome(read), Outcome::Hit);
    let stats = bench.stats();
    assert_eq!((stats.requests(), stats.read_hits, stats.blocks_cached), (1, 1, 1));
    assert_eq!(stats.elapsed_ns, 1000);
}

/// Each disk has its own counts, and a request is counted when it is answered.
#[test]
fn disks_do_not_mix() {
    let mut bench = Bench::bare(Limits::default());
    let other = DiskId(5);
    let add = Command::AddDisk(DiskConfig {
        size_bytes: MIB,
        access: Access::ReadWrite,
        datastore: DatastoreId(0),
    });
    bench.engine.handle_command(bench.now, CommandId(99), other, add);
    let request = Request {
        id: RequestId(1000),
        disk: other,
        op: Op::Read,
        offset: 0,
        len: 512,
        buffer: Some(BufferId(1000)),
        promote: Promote::Usual,
        memory: PayloadMemory::Daemon,
    };
    bench.engine.handle_request(bench.now, request).unwrap();
    bench.drain();
    bench.write(0, 4 * KIB);
    assert_eq!(bench.ios.len(), 2, "the same sectors of two disks");
    bench.settle();
    let stats = bench.engine.stats(bench.now, other).unwrap();
    assert_eq!((stats.reads, stats.writes), (1, 0));
    assert_eq!((bench.stats().reads, bench.stats().writes), (0, 1));
    assert!(bench.engine.stats(bench.now, DiskId(4)).is_none());
}

/// Reads, flushes, prefetches and refused requests change nothing. The number of changes is not a
/// statistic, so that a reset does not change it.
#[test]
fn answered_changes_are_counted_and_survive_a_reset() {
    let mut bench = Bench::bare(Limits::default());
    let changes = |bench: &Bench| bench.engine.changes(DISK);
    bench.read_alone(0, 4 * KIB);
    bench.request(Op::Flush, 0, 0);
    bench.request(Op::Prefetch, 0, 4 * KIB);
    bench.write(u64::MAX, 1);
    bench.settle();
    assert_eq!(changes(&bench), Some(0));
    let write = bench.write(0, 4 * KIB);
    assert_eq!(changes(&bench), Some(0), "the write is not answered");
    bench.settle();
    assert_eq!((bench.reply(write).map(|reply| reply.result), changes(&bench)), (Some(Ok(())), Some(1)));
    bench.request(Op::Discard(Durability::Volatile), 0, 4 * KIB);
    bench.settle();
    bench.request(Op::WriteZeroes(Durability::Volatile, Zeroing::MayUnmap), 0, 4 * KIB);
    bench.settle();
    assert_eq!(changes(&bench), Some(3));
    bench.write(0, 4 * KIB);
    let io = bench.only_io();
    bench.fail(io);
    assert_eq!(changes(&bench), Some(4), "a failed write may have changed the content");
    bench.command(Command::ResetStats).unwrap();
    assert_eq!(changes(&bench), Some(4));
    assert_eq!(bench.engine.changes(DiskId(4)), None);
}
