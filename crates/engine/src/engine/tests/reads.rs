//! Reads: completely from flash or completely from the backing.

use super::*;

/// SYSTEMS §1: "Look the request up. If *all* of it is cached: hit, served from flash."
#[test]
fn a_read_that_is_all_cached_is_served_from_flash() {
    let mut bench = Bench::cached(16, 4 * KIB);
    assert_eq!(bench.read_alone(0, 12 * KIB), Outcome::MissFilled);
    let read = bench.read(4 * KIB, 8 * KIB);
    let io = bench.only_io();
    assert_eq!((io.target, io.op, io.offset, io.len), (Target::Flash(DeviceId(0)), IoOp::Read, 4096, 8192));
    assert_eq!(bench.reply(read), None);
    bench.end(io);
    assert_eq!(bench.reply(read).map(|r| (r.result, r.outcome)), Some((Ok(()), Outcome::Hit)));
    assert_eq!(bench.ios.len(), 0);
}

/// SYSTEMS §1: "If any part is missing: miss; the *whole* request is read from the backing disk,
/// returned, and written into the cache at the same time."
#[test]
fn a_read_that_is_partly_cached_is_read_whole_from_the_backing() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(4 * KIB, 4 * KIB);
    let read = bench.read(0, 12 * KIB);
    let io = bench.only_io();
    assert_eq!((io.target, io.op, io.offset, io.len), (Target::Backing(DISK), IoOp::Read, 0, 12 * KIB));
    bench.end(io);
    assert_eq!(bench.outcome(read), Outcome::PartialMiss, "answered while flash is being written");
    let written: Vec<u32> = bench.ios.iter().map(|io| io.slice.unwrap().offset).collect();
    assert!(bench.ios.iter().all(|io| is_flash(io) && io.op == IoOp::Write(Durability::Volatile)));
    assert_eq!(written, [0, 8192], "only what flash has not");
    bench.settle();
    assert_eq!(bench.read_alone(0, 12 * KIB), Outcome::Hit);
}

/// SYSTEMS §1: "… returned, and written into the cache at the same time": the reply does not wait
/// for flash, and the buffer comes back only after both.
#[test]
fn the_reply_does_not_wait_for_the_fill() {
    let mut bench = Bench::cached(16, 4 * KIB);
    let read = bench.read(0, 4 * KIB);
    let io = bench.only_io();
    bench.end(io);
    assert_eq!(bench.outcome(read), Outcome::MissFilled);
    assert_eq!(bench.released, []);
    assert_eq!(bench.engine.in_flight(), 1);
    bench.settle();
    assert_eq!(bench.released.len(), 1);
    assert_eq!(bench.engine.in_flight(), 0);
}

/// A sector becomes valid when its write to flash has completed.
#[test]
fn a_read_during_the_fill_waits_and_then_hits() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read(0, 4 * KIB);
    let io = bench.only_io();
    bench.end(io);
    let again = bench.read(0, 4 * KIB);
    let fill = bench.only_io();
    bench.end(fill);
    let hit = bench.only_io();
    assert!(is_flash(&hit) && hit.op == IoOp::Read);
    bench.end(hit);
    assert_eq!(bench.outcome(again), Outcome::Hit);
}

/// Issue: "misses to one block are fetched once".
#[test]
fn concurrent_misses_to_the_same_data_are_fetched_once() {
    let mut bench = Bench::cached(16, 16 * KIB);
    let reads: Vec<_> = (0..4).map(|i| bench.read(i * 4096, 16 * KIB - i * 4096)).collect();
    let fetch = bench.only_io();
    assert_eq!(fetch.target, Target::Backing(DISK));
    bench.end(fetch);
    bench.settle();
    let outcomes: Vec<_> = reads.iter().map(|id| bench.outcome(*id)).collect();
    assert_eq!(outcomes, [Outcome::MissFilled, Outcome::Hit, Outcome::Hit, Outcome::Hit]);
    assert_eq!(bench.stats().backing.ios, 1);
}

/// Hits do not wait for each other, and not for a miss on neighbouring data.
#[test]
fn hits_do_not_wait() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 8 * KIB);
    bench.read(4 * KIB, 8 * KIB);
    for _ in 0..3 {
        bench.read(0, 8 * KIB);
    }
    assert_eq!(bench.ios.len(), 4);
}

/// Requests of 512 bytes are served through whole sectors. The payload begins inside the buffer.
#[test]
fn an_unaligned_read_moves_whole_sectors() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read(3 * 512, 6 * KIB);
    let io = bench.only_io();
    assert_eq!((io.offset, io.len, io.slice.unwrap().offset), (0, 8 * KIB, 0));
    bench.end(io);
    bench.settle();
    bench.read(512, 512);
    let io = bench.only_io();
    assert!(is_flash(&io));
    assert_eq!(io.len, 4 * KIB);
}

/// A disk may end inside a sector: the read of the backing is shortened, and the sector is cached
/// as a whole.
#[test]
fn a_disk_may_end_inside_a_sector() {
    let mut bench = Bench::with_disk(Limits::default(), 10 * KIB + 512, Access::ReadWrite);
    bench.enable(64 * KIB, 16 * KIB);
    let read = bench.read(8 * KIB, 2 * KIB + 512);
    let io = bench.only_io();
    assert_eq!((io.offset, io.len), (8 * KIB, 2 * KIB + 512));
    bench.end(io);
    let fill = bench.only_io();
    assert_eq!(fill.len, 4 * KIB);
    bench.end(fill);
    assert_eq!(bench.outcome(read), Outcome::MissFilled);
    assert_eq!(bench.read_alone(10 * KIB, 512), Outcome::Hit);
    let beyond = bench.read(10 * KIB, KIB);
    assert_eq!(bench.reply(beyond).unwrap().result, Err(IoError::Invalid));
    // A write to the last, short sector cannot be copied as a whole sector, because the rest is not
    // in its buffer.
    assert_eq!(bench.write_alone(8 * KIB, 2 * KIB + 512), Outcome::WriteNotCopied);
    assert_eq!(bench.read_alone(8 * KIB, 512), Outcome::MissFilled);
}

/// NBD_CMD_CACHE fills flash; data that is already there costs no I/O.
#[test]
fn a_prefetch_fills_and_a_second_one_does_nothing() {
    let mut bench = Bench::cached(16, 4 * KIB);
    let first = bench.request(Op::Prefetch, 0, 8 * KIB);
    bench.settle();
    assert_eq!(bench.outcome(first), Outcome::MissFilled);
    let second = bench.request(Op::Prefetch, 0, 8 * KIB);
    assert_eq!(bench.ios.len(), 0);
    assert_eq!(bench.outcome(second), Outcome::Hit);
    assert_eq!(bench.released.len(), 2);
    assert_eq!(bench.read_alone(0, 8 * KIB), Outcome::Hit);
    let stats = bench.stats();
    assert_eq!((stats.reads, stats.read_hits), (1, 1), "prefetches are no reads");
}

/// Without a cache every read uses the backing, and reads do not wait for each other.
#[test]
fn without_a_cache_the_backing_serves() {
    let mut bench = Bench::bare(Limits::default());
    let reads = [bench.read(0, 4 * KIB), bench.read(0, 4 * KIB)];
    assert_eq!(bench.ios.len(), 2);
    bench.settle();
    assert_eq!(reads.map(|id| bench.outcome(id)), [Outcome::CacheOff; 2]);
}

/// A backup, which reads everything once, is served from the cache where possible, and does not
/// change the cache.
#[test]
fn a_read_that_promotes_nothing_leaves_no_trace() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    let before = (bench.stats(), bench.engine.sizing(bench.now, DISK).unwrap());
    bench.promote = Promote::Never;
    for (offset, len, outcome) in [
        (0, 4 * KIB, Outcome::Hit),
        (0, 8 * KIB, Outcome::BypassNoPromote),
        (64 * KIB, 16 * KIB, Outcome::BypassNoPromote),
    ] {
        assert_eq!(bench.read_alone(offset, len), outcome);
    }
    let hint = bench.request(Op::Prefetch, MIB, 4 * KIB);
    assert_eq!((bench.outcome(hint), bench.ios.len()), (Outcome::BypassNoPromote, 0), "not even on demand");
    let after = (bench.stats(), bench.engine.sizing(bench.now, DISK).unwrap());
    assert_eq!(after.0.blocks_cached, before.0.blocks_cached);
    assert_eq!(
        (after.0.reads, after.0.read_hits),
        (before.0.reads, before.0.read_hits),
        "nor in the hit ratio"
    );
    assert_eq!(after.1.seen, before.1.seen);
    assert_eq!(after.0.requests(), before.0.requests() + 4, "but each of them has its outcome");
}

/// A hit of a client with `Promote::Never` does not count as a use of a block, so it does not delay
/// the block's eviction.
#[test]
fn a_hit_that_promotes_nothing_keeps_no_block() {
    for (promote, stays) in [(Promote::Usual, true), (Promote::Never, false)] {
        let lru = CacheConfig { policy: PolicyKind::from_name("lru").unwrap(), ..config(64 * KIB, 4 * KIB) };
        let mut bench = Bench::bare(Limits::default());
        bench.change(CacheChange::enable_volatile(lru, vec![segment(0, 0)])).expect("no cache yet");
        for block in 0..16 {
            bench.read_alone(block * 4 * KIB, 4 * KIB);
        }
        bench.promote = promote;
        assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
        bench.promote = Promote::Usual;
        bench.read_alone(16 * 4 * KIB, 4 * KIB);
        bench.promote = Promote::Never;
        let outcome = if stays { Outcome::Hit } else { Outcome::BypassNoPromote };
        assert_eq!(bench.read_alone(0, 4 * KIB), outcome, "{promote:?}");
    }
}

/// A write by a client with `Promote::Never` is a normal write: cached data of the range is
/// updated.
#[test]
fn a_write_through_such_an_export_is_a_write() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.promote = Promote::Never;
    assert_eq!(bench.write_alone(0, 4 * KIB), Outcome::WriteCopied);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
}
