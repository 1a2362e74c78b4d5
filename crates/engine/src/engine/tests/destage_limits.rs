//! How much is destaged at once, when the destager pauses, when the backing is flushed, and whether
//! the backing is current.

use super::super::destage_buffers::Least;
use super::write_back::{VOLATILE, backing, flash, lazy, ring};
use super::*;
use crate::command::{Copies, Destage, Enable, Mode};

/// Returns settings with which hob destages from 10 % dirty data on until no data is dirty, without
/// an age limit and never urgently.
fn eager() -> Destage {
    Destage { start_permille: 100, stop_permille: 0, full_permille: 1000, ..lazy() }
}

/// Returns a cache with `blocks` dirty blocks that are not adjacent, all of them committed.
fn scattered(blocks: u64) -> Bench {
    let mut bench = Bench::write_back();
    for block in 0..blocks {
        bench.write_alone(block * 8 * KIB, 4 * KIB);
    }
    bench.flush();
    assert_eq!((bench.dirty(), bench.ios.len()), (blocks, 0));
    bench
}

/// Applies settings from the next write on.
fn tune(bench: &mut Bench, destage: Destage) {
    bench.change(CacheChange::Tune(Mode::WriteBack, destage, Copies::One)).expect("it can be");
    bench.write(63 * MIB, 4 * KIB);
    bench.next(flash(0), VOLATILE);
}

/// Returns the number of transfers in flight: each reads flash first.
fn transfers(bench: &Bench) -> usize {
    bench.ios.iter().filter(|io| (io.target, io.op) == (flash(0), IoOp::Read)).count()
}

#[test]
fn an_idle_disk_destages_eight_ranges_at_once() {
    let mut bench = scattered(40);
    tune(&mut bench, eager());
    assert_eq!(transfers(&bench), 8);
}

#[test]
fn a_disk_whose_guest_uses_flash_destages_two_ranges_at_once() {
    let mut bench = scattered(40);
    bench.read(0, 4 * KIB);
    let hit = bench.only_io();
    assert_eq!(hit.target, flash(0));
    tune(&mut bench, eager());
    assert_eq!(transfers(&bench), 2);
}

#[test]
fn a_disk_whose_guest_uses_the_backing_destages_one_range_at_once() {
    let mut bench = scattered(40);
    bench.read(32 * MIB, 4 * KIB);
    let miss = bench.only_io();
    assert_eq!(miss.target, backing());
    tune(&mut bench, eager());
    assert_eq!(transfers(&bench), 1);
}

#[test]
fn a_drain_and_a_cache_that_is_nearly_full_destage_sixty_four_ranges_at_once() {
    let mut bench = scattered(80);
    bench.start_change(CacheChange::Drain);
    bench.wait_ms(1);
    assert_eq!(transfers(&bench), 64);
    // 80 of 256 blocks are 312 per mille: above the middle of 100 and 500, and below the middle of
    // 300 and 600.
    let mut bench = scattered(80);
    tune(&mut bench, Destage { full_permille: 400, ..eager() });
    assert_eq!(transfers(&bench), 64);
    let mut bench = scattered(80);
    tune(&mut bench, Destage { full_permille: 600, ..eager() });
    assert_eq!(transfers(&bench), 8);
}

#[test]
fn after_a_failure_the_destager_rests_a_tenth_of_a_second() {
    let mut bench = scattered(1);
    let drain = bench.start_change(CacheChange::Drain);
    bench.next(flash(0), IoOp::Read);
    let write = bench.only_io();
    assert_eq!((write.target, write.op), (backing(), VOLATILE));
    bench.fail(write);
    assert!(bench.ios.is_empty(), "it rests: {:?}", bench.ios);
    bench.wait_ms(99);
    assert!(bench.ios.is_empty(), "it still rests: {:?}", bench.ios);
    bench.wait_ms(1);
    assert_eq!(transfers(&bench), 1, "it tries again");
    bench.settle();
    assert_eq!(bench.result(drain), Some(Ok(vec![])));
}

/// Destaging counts as failing while dirty data waits for another attempt, and not because it
/// failed once.
#[test]
fn destaging_fails_while_dirty_data_waits_for_another_attempt() {
    let mut bench = scattered(1);
    let failing = |bench: &Bench| bench.stats().destage_failing;
    assert!(!failing(&bench));
    let drain = bench.start_change(CacheChange::Drain);
    bench.next(flash(0), IoOp::Read);
    let write = bench.only_io();
    bench.fail(write);
    assert!(failing(&bench), "it rests");
    bench.wait_ms(101);
    assert!(failing(&bench), "it tries again");
    bench.settle();
    assert_eq!((bench.result(drain), failing(&bench)), (Some(Ok(vec![])), false));
    assert_eq!(bench.stats().destage_errors, 1);
    // The data need not be on the backing any more.
    bench.write_alone(0, 4 * KIB);
    bench.start_change(CacheChange::Drain);
    let write = bench.until_backing(VOLATILE);
    bench.fail(write);
    bench.start_change(CacheChange::StopDrain);
    bench.wait_ms(101);
    assert_eq!((bench.dirty(), failing(&bench)), (1, false));
}

#[test]
fn after_a_failure_destaged_data_is_flushed_first() {
    let mut bench = scattered(2);
    bench.start_change(CacheChange::Drain);
    let mut writes = vec![];
    while writes.len() < 2 {
        let io = bench.ios.pop_front().expect("two transfers");
        match (io.target, io.op) {
            (Target::Flash(_), IoOp::Read) => bench.end(io),
            (Target::Backing(_), VOLATILE) => writes.push(io),
            _ => panic!("{io:?}"),
        }
    }
    let (fails, succeeds) = (writes.pop().expect("two"), writes.pop().expect("two"));
    bench.end(succeeds);
    bench.fail(fails);
    assert!(bench.ios.is_empty(), "it rests: {:?}", bench.ios);
    bench.wait_ms(101);
    let first = bench.ios.pop_front().expect("the rest is over");
    assert_eq!((first.target, first.op), (backing(), IoOp::Flush));
}

/// When 16 sectors, a sixteenth of the cache, are destaged, the backing is flushed at once. Fewer
/// destaged sectors wait a second for the flush.
#[test]
fn a_backing_is_flushed_after_a_sixteenth_of_the_cache_or_a_second() {
    let mut bench = scattered(40);
    tune(&mut bench, Destage { stop_permille: 98, ..eager() });
    // 16 of 41 are destaged, which leaves 25 of 256.
    while let Some(at) = bench.ios.iter().position(|io| io.op != IoOp::Flush) {
        let io = bench.ios.remove(at).expect("it is there");
        bench.end(io);
    }
    let flush = bench.only_io();
    assert_eq!((flush.target, bench.stats().destaged_bytes), (backing(), 64 * KIB));
    bench.end(flush);
    bench.settle();
    assert_eq!(bench.dirty(), 25);

    let mut bench = scattered(26);
    tune(&mut bench, Destage { stop_permille: 99, ..eager() });
    bench.settle();
    assert_eq!((bench.stats().destaged_bytes, bench.dirty()), (8 * KIB, 27), "none of them is clean");
    let flushes = |bench: &Bench| bench.ios.iter().any(|io| (io.target, io.op) == (backing(), IoOp::Flush));
    bench.wait_ms(990);
    assert!(!flushes(&bench), "nobody waits for it: {:?}", bench.ios);
    bench.wait_ms(20);
    assert!(flushes(&bench));
    bench.settle();
    assert_eq!(bench.dirty(), 25);
}

#[test]
fn the_backing_has_all_only_where_that_is_certain() {
    let mut bench = Bench::bare(Limits::default());
    assert!(bench.engine.backing_has_all(DISK), "there is no cache");
    assert!(!bench.engine.backing_has_all(DiskId(7)), "there is no such disk");
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    bench.engine.lend(BufferId(2 << 20), 1 << 20);
    let config = CacheConfig { mode: Mode::WriteBack, destage: lazy(), ..config(MIB, 4 * KIB) };
    let segments = vec![DataSegment { place: segment(0, 0), ordinal: 0, seconds_only: false }];
    let enable = Enable { config, segments, journal: Some(ring(1)), recovered: None };
    bench.start_change(CacheChange::Enable(Box::new(enable)));
    assert!(!bench.engine.backing_has_all(DISK), "a cache is being made");
    bench.settle();
    assert!(bench.engine.backing_has_all(DISK), "the cache is empty");
    bench.write_alone(0, 4 * KIB);
    assert!(!bench.engine.backing_has_all(DISK), "a sector is dirty");
    bench.start_change(CacheChange::Drain);
    bench.settle();
    assert!(bench.engine.backing_has_all(DISK), "it was destaged");
    bench.start_change(CacheChange::Close);
    assert!(!bench.engine.backing_has_all(DISK), "the cache is being closed");
}

/// Adjacent dirty data is destaged in whole stripes of the backing, if its stripe size is known.
#[test]
fn destaged_data_is_written_in_whole_stripes() {
    for (stripe, written) in [(0, [256 * KIB, 128 * KIB]), (192 << 10, [192 * KIB, 192 * KIB])] {
        let destage = Destage { io_bytes_max: 256 << 10, ..lazy() };
        let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, destage);
        bench.engine.set_stripe(DISK, stripe);
        (0..96).rev().for_each(|block| _ = bench.write_alone(block * 4 * KIB, 4 * KIB));
        bench.flush();
        assert_eq!((bench.dirty(), bench.ios.len()), (96, 0));
        bench.start_change(CacheChange::Drain);
        bench.wait_ms(1);
        let mut writes = vec![];
        while let Some(io) = bench.ios.pop_front() {
            if (io.target, io.op) == (backing(), VOLATILE) {
                writes.push((io.offset, io.len));
            }
            bench.end(io);
        }
        writes.sort_unstable();
        assert_eq!(writes, [(0, written[0]), (written[0], written[1])]);
    }
}

/// Returns a cache with 768 KiB of adjacent dirty data, which is destaged in two transfers of two
/// stripes. After the first transfer has its buffer, the disk's share of the buffers has room for
/// 332 KiB: more than one stripe and less than two.
fn striped() -> Bench {
    let destage = Destage { io_bytes_max: 512 << 10, full_permille: 1000, ..lazy() };
    let mut bench = Bench::bare(Limits::default());
    bench.engine.lend(BufferId(1 << 20), 880 << 10);
    bench.make_persistent(4 * KIB, Mode::WriteBack, destage);
    bench.engine.set_stripe(DISK, 192 << 10);
    (0..192).for_each(|block| _ = bench.write_alone(block * 4 * KIB, 4 * KIB));
    bench.flush();
    assert_eq!((bench.dirty(), bench.ios.len()), (192, 0));
    bench
}

/// Completes all I/O. Returns the ranges that were written to the backing, in order of the disk.
fn destaged_ranges(bench: &mut Bench) -> Vec<(u64, u64)> {
    let mut writes = vec![];
    while let Some(io) = bench.ios.pop_front() {
        if (io.target, io.op) == (backing(), VOLATILE) {
            writes.push((io.offset, io.len));
        }
        bench.end(io);
    }
    writes.sort_unstable();
    writes
}

/// A transfer waits for a longer buffer, because a RAID reads old data for each part of a stripe.
#[test]
fn a_transfer_waits_for_a_buffer_of_whole_stripes() {
    let mut bench = striped();
    let drain = bench.start_change(CacheChange::Drain);
    bench.wait_ms(1);
    assert_eq!(bench.engine.disk(DISK).destager.transfers, 1, "the other one waits");
    assert_eq!(destaged_ranges(&mut bench), [(0, 384 * KIB), (384 * KIB, 384 * KIB)]);
    assert_eq!(bench.result(drain), Some(Ok(vec![])));
}

/// Another disk with a hung backing keeps its buffers. After a second, a transfer uses the
/// remaining buffer for as many whole stripes as fit.
#[test]
fn a_transfer_does_not_wait_for_whole_stripes_for_ever() {
    let mut bench = striped();
    let hung = bench.engine.destage_buffers.take(DiskId(7), 576 * KIB, Least::All);
    assert!(hung.is_some());
    let drain = bench.start_change(CacheChange::Drain);
    bench.wait_ms(990);
    assert_eq!(bench.ios.len(), 0, "it waits for the other disk");
    bench.wait_ms(20);
    let stripes = [0, 1, 2, 3].map(|stripe| (stripe * 192 * KIB, 192 * KIB));
    assert_eq!(destaged_ranges(&mut bench), stripes);
    assert_eq!(bench.result(drain), Some(Ok(vec![])));
}
