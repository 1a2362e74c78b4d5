//! A write-back cache shrinks: no request bypasses it meanwhile.

use super::write_back::{VOLATILE, backing, flash, lazy, ring};
use super::*;
use crate::command::{Copies, Enable, Mode, Vacate};

const SEGMENT: u64 = 64 * KIB;

/// Returns a write-back cache with `segments` segments of 16 blocks on device 0.
fn cached(segments: u32) -> Bench {
    let mut bench = Bench::bare(Limits { scrub_frames_per_s: 0, ..Limits::default() });
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    bench.engine.lend(BufferId(2 << 20), 1 << 20);
    let config = CacheConfig { mode: Mode::WriteBack, destage: lazy(), ..config(SEGMENT, 4 * KIB) };
    let data =
        |i: u32| DataSegment { place: segment(0, u64::from(i) * SEGMENT), ordinal: i, seconds_only: false };
    let segments = (0..segments).map(data).collect();
    let ring = Some(wide_ring(1));
    let enable = Enable { config, segments, journal: ring, recovered: None };
    let command = bench.start_change(CacheChange::Enable(Box::new(enable)));
    bench.settle();
    assert_eq!(bench.result(command), Some(Ok(vec![])));
    bench
}

/// Returns a ring for segments of 64 KiB.
fn wide_ring(number: u32) -> crate::command::NewRing {
    let first = u64::from(number) * 64;
    let segments = (first..first + 64).map(|i| segment(9, i * SEGMENT)).collect();
    crate::command::NewRing { copies: vec![segments], ..ring(number) }
}

fn shrink(count: u32) -> CacheChange {
    CacheChange::Shrink(count, Some(wide_ring(2)))
}

fn vacate(bench: &mut Bench, count: u32) -> CommandId {
    bench.start_change(CacheChange::Vacate(Vacate::Emptiest(count)))
}

/// Completes the I/O of flash, and leaves the I/O of the backing in flight.
fn settle_flash(bench: &mut Bench) {
    while let Some(at) = bench.ios.iter().position(is_flash) {
        let io = bench.ios.remove(at).expect("it is there");
        bench.end(io);
    }
}

/// Returns the first sectors of the flash ranges that were written.
fn written_segments(bench: &Bench) -> Vec<u64> {
    let writes = bench.ios.iter().filter(|io| io.target == flash(0) && io.op == VOLATILE);
    writes.map(|io| io.offset / SEGMENT).collect()
}

#[test]
fn only_the_segments_that_leave_are_destaged_and_writes_stay_on_flash() {
    let mut bench = cached(4);
    // 16 blocks in the first segment, 4 in the second: the third and fourth are empty, and the last
    // of equal segments leaves first.
    bench.write_alone(0, 64 * KIB);
    bench.write_alone(64 * KIB, 16 * KIB);
    bench.flush();
    let command = vacate(&mut bench, 3);
    let write = bench.write(16 * MIB, 4 * KIB);
    assert_eq!(written_segments(&bench), [], "the first segment is full of dirty data");
    bench.settle();
    assert_eq!(bench.outcome(write), Outcome::WriteNotCopied);
    assert_eq!(bench.result(command), Some(Ok(vec![])));
    assert_eq!(bench.dirty(), 16, "what stays is as dirty as it was");
    let released = bench.start_change(shrink(3));
    bench.settle();
    let released = bench.result(released).expect("it ends").expect("nothing is in the way");
    let data: Vec<u64> =
        released.iter().filter(|s| s.device == DeviceId(0)).map(|s| s.offset / SEGMENT).collect();
    assert_eq!(data, [1, 2, 3]);
    assert_eq!((bench.dirty(), bench.stats().blocks), (16, 16));
}

#[test]
fn while_the_backing_is_away_a_shrink_waits_and_guests_notice_nothing() {
    let mut bench = cached(4);
    // Clean, dirty, half dirty, empty: the last two leave.
    bench.read_alone(16 * MIB, 64 * KIB);
    bench.write_alone(0, 64 * KIB);
    bench.write_alone(280 * KIB, 32 * KIB);
    bench.flush();
    let command = vacate(&mut bench, 2);
    settle_flash(&mut bench);
    assert!(!bench.ios.is_empty() && bench.ios.iter().all(|io| io.target == backing()), "{:?}", bench.ios);
    for round in 0..5 {
        // The backing accepts no writes.
        while let Some(io) = bench.ios.pop_front() {
            if is_flash(&io) { bench.end(io) } else { bench.fail(io) }
        }
        // A new block, a dirty block in a segment that leaves, and a dirty block in a segment that
        // stays.
        for offset in [32 * MIB + round * 4 * KIB, 280 * KIB, 0] {
            let write = bench.write(offset, 4 * KIB);
            settle_flash(&mut bench);
            assert_eq!(bench.outcome(write), Outcome::WriteBack, "round {round}, offset {offset}");
        }
        let flush = bench.request(Op::Flush, 0, 0);
        settle_flash(&mut bench);
        assert_eq!(bench.outcome(flush), Outcome::FlushCommitted);
        bench.wait_ms(20_000);
    }
    assert_eq!(bench.result(command), None, "it waits");
    while let Some(io) = bench.ios.pop_front() {
        if is_flash(&io) { bench.end(io) } else { bench.fail(io) }
    }
    let refused = bench.start_change(shrink(2));
    assert_eq!(bench.result(refused), Some(Err(CommandError::Dirty)));
    bench.settle();
    bench.wait_ms(20_000);
    bench.settle();
    assert_eq!(bench.result(command), Some(Ok(vec![])));
    let released = bench.start_change(shrink(2));
    bench.settle();
    assert!(bench.result(released).expect("it ends").is_ok());
    assert_eq!(bench.stats().blocks, 32);
}

#[test]
fn a_clean_block_that_is_written_moves_to_a_segment_that_stays() {
    let mut bench = cached(2);
    // Both segments have clean blocks; the second segment has fewer.
    bench.read_alone(0, 64 * KIB);
    bench.read_alone(64 * KIB, 48 * KIB);
    bench.flush();
    let command = vacate(&mut bench, 1);
    let write = bench.write(68 * KIB, 4 * KIB);
    assert_eq!(written_segments(&bench), [0]);
    bench.settle();
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
    assert_eq!(bench.read_alone(68 * KIB, 4 * KIB), Outcome::Hit);
    assert_eq!(bench.read_alone(64 * KIB, 4 * KIB), Outcome::Hit, "what is clean there serves on");
    // A newly cached block is placed in a segment that stays, too.
    let write = bench.write(8 * MIB, 4 * KIB);
    assert_eq!(written_segments(&bench), [0]);
    bench.settle();
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
    assert_eq!(bench.result(command), Some(Ok(vec![])));
    let released = bench.start_change(shrink(1));
    bench.settle();
    assert!(bench.result(released).expect("it ends").is_ok());
    assert_eq!(bench.dirty(), 2);
    assert_eq!(bench.read_alone(68 * KIB, 4 * KIB), Outcome::Hit);
}

/// A block that was destaged, and that the durable journal may still record as dirty, moves after a
/// commit.
#[test]
fn a_block_that_has_just_become_clean_moves_after_a_commit() {
    let mut bench = cached(2);
    bench.write_alone(0, 60 * KIB);
    bench.read_alone(60 * KIB, 4 * KIB);
    bench.write_alone(64 * KIB, 8 * KIB);
    bench.flush();
    vacate(&mut bench, 1);
    while let Some(at) = bench.ios.iter().position(|io| io.op != IoOp::WriteJournal && io.op != IoOp::Flush) {
        let io = bench.ios.remove(at).expect("it is there");
        bench.end(io);
    }
    bench.next(backing(), IoOp::Flush);
    assert_eq!(bench.dirty(), 15);
    let write = bench.write(64 * KIB, 4 * KIB);
    bench.settle();
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
    let released = bench.start_change(shrink(1));
    bench.settle();
    assert!(bench.result(released).expect("it ends").is_ok(), "nothing is dirty there");
}

#[test]
fn a_shrink_that_is_stopped_gives_the_segments_back_to_the_cache() {
    let mut bench = cached(2);
    bench.write_alone(0, 64 * KIB);
    bench.write_alone(64 * KIB, 8 * KIB);
    bench.flush();
    let command = vacate(&mut bench, 1);
    assert_eq!(bench.change(CacheChange::StopDrain), Ok(vec![]));
    assert_eq!(bench.result(command), Some(Err(CommandError::Stopped)));
    bench.settle();
    let write = bench.write(8 * MIB, 4 * KIB);
    assert_eq!(written_segments(&bench), [1]);
    bench.settle();
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
}

/// A shrink of clean segments does not begin before a flush of the backing has succeeded, because
/// during the shrink guests wait for the backing.
#[test]
fn a_shrink_waits_for_a_flush_of_the_backing() {
    let mut bench = cached(2);
    bench.write_alone(0, 8 * KIB);
    bench.flush();
    let command = vacate(&mut bench, 1);
    let probe = bench.only_io();
    assert_eq!((probe.target, probe.op), (backing(), IoOp::Flush));
    bench.fail(probe);
    assert_eq!(bench.result(command), None);
    bench.wait_ms(1_000);
    let probe = bench.only_io();
    bench.end(probe);
    assert_eq!(bench.result(command), Some(Ok(vec![])));
}

/// A write waits for the next flush of the backing when few blocks are left. Otherwise, a block
/// that is written again before each flush would keep its segment for ever.
#[test]
fn a_block_that_is_written_continuously_still_moves() {
    let mut bench = cached(2);
    bench.write_alone(0, 32 * KIB);
    bench.write_alone(64 * KIB, 64 * KIB);
    bench.flush();
    let command = vacate(&mut bench, 1);
    let mut writes = vec![];
    for _ in 0..400 {
        if bench.result(command).is_some() {
            break;
        }
        if writes.last().is_none_or(|write| bench.answered(*write)) {
            writes.push(bench.write(124 * KIB, 4 * KIB));
        }
        let next = bench.ios.iter().position(is_flash).unwrap_or(0);
        if let Some(io) = bench.ios.remove(next) {
            bench.end(io);
        } else {
            bench.wait_ms(100);
        }
    }
    assert_eq!(bench.result(command), Some(Ok(vec![])), "{} writes", writes.len());
    bench.settle();
    assert!(writes.iter().all(|write| bench.outcome(*write) == Outcome::WriteBack));
}

/// A write waits at most a second for the flush of the backing, also if the backing fails.
#[test]
fn a_write_does_not_wait_longer_than_a_second_for_a_segment_to_leave() {
    let mut bench = cached(2);
    bench.write_alone(0, 32 * KIB);
    bench.write_alone(64 * KIB, 64 * KIB);
    bench.flush();
    vacate(&mut bench, 1);
    // All dirty data is written to the backing; one block is written again before the flush.
    while let Some(at) = bench.ios.iter().position(|io| io.op != IoOp::Flush) {
        let io = bench.ios.remove(at).expect("it is there");
        bench.end(io);
    }
    let first = bench.write(124 * KIB, 4 * KIB);
    settle_flash(&mut bench);
    assert!(bench.answered(first), "{:?}", bench.ios);
    bench.next(backing(), IoOp::Flush);
    settle_flash(&mut bench);
    // The backing has failed.
    let fail_backing = |bench: &mut Bench| {
        while let Some(io) = bench.ios.pop_front() {
            if is_flash(&io) { bench.end(io) } else { bench.fail(io) }
        }
    };
    fail_backing(&mut bench);
    let second = bench.write(124 * KIB, 4 * KIB);
    let since = bench.now;
    for _ in 0..11 {
        fail_backing(&mut bench);
        if bench.answered(second) {
            break;
        }
        bench.wait_ms(100);
    }
    assert_eq!(bench.outcome(second), Outcome::WriteBack);
    assert!(bench.now - since > 500_000_000, "it waited for the backing");
}

/// The dirty limit counts only the segments that stay.
#[test]
fn the_dirty_limit_follows_the_segments_that_stay() {
    let mut bench = cached(4);
    let destage = crate::command::Destage { full_permille: 500, ..lazy() };
    bench.change(CacheChange::Tune(Mode::WriteBack, destage, Copies::One)).unwrap();
    vacate(&mut bench, 2);
    bench.settle();
    let mut on_flash = 0;
    while bench.write_alone(on_flash * 8 * KIB, 4 * KIB) == Outcome::WriteBack {
        on_flash += 1;
    }
    assert_eq!(on_flash, 16, "half of two segments");
}

#[test]
fn all_segments_of_a_device_are_emptied() {
    let mut bench = cached(2);
    bench.write_alone(0, 32 * KIB);
    let command = bench.start_change(CacheChange::Vacate(Vacate::Device(DeviceId(0))));
    bench.settle();
    bench.wait_ms(2_000);
    bench.settle();
    assert_eq!(bench.result(command), Some(Ok(vec![])));
    assert_eq!(bench.dirty(), 0);
}
