//! Overwrites of dirty data: which of them wait for a commit (docs/decisions/0066).

use super::write_back::{RING_DEVICE, VOLATILE, flash, lazy, mirrored};
use super::*;
use crate::command::{Copies, Mode};

/// Returns a bench with 64 dirty sectors that the durable journal records. Nothing is scrubbed,
/// because the scrub records checksums too.
fn dirty() -> Bench {
    dirty_in_blocks_of(4 * KIB)
}

/// Like [`dirty`], with this block size.
fn dirty_in_blocks_of(block_bytes: u64) -> Bench {
    let mut bench = Bench::bare(Limits { scrub_frames_per_s: 0, ..Limits::default() });
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    bench.make_persistent(block_bytes, Mode::WriteBack, lazy());
    bench.write_alone(0, 256 * KIB);
    bench.flush();
    bench
}

fn sector(number: u64) -> u64 {
    number * 4 * KIB
}

#[test]
fn one_commit_covers_later_overwrites_near_the_first() {
    let mut bench = dirty();
    bench.write(sector(10), 4 * KIB);
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    bench.next(flash(RING_DEVICE), IoOp::Flush);
    bench.next(flash(0), VOLATILE);
    for number in [11, 40, 60] {
        let again = bench.write(sector(number), 4 * KIB);
        bench.next(flash(0), VOLATILE);
        assert!(bench.answered(again));
    }
    // The page has no room for more sectors.
    bench.write(sector(5), 4 * KIB);
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    bench.settle();
    assert_eq!(bench.dirty(), 64);
}

/// A sector near an overwritten sector is not overwritten before its own record is durable.
#[test]
fn a_neighbour_is_not_overwritten_before_its_record_is_durable() {
    let mut bench = dirty();
    let first = bench.write(sector(10), 4 * KIB);
    let page = bench.ios.pop_front().expect("a page");
    assert_eq!((page.target, page.op), (flash(RING_DEVICE), IoOp::WriteJournal));
    let early = bench.write(sector(11), 4 * KIB);
    assert!(bench.ios.is_empty(), "{:?}", bench.ios);
    bench.end(page);
    let during = bench.write(sector(12), 4 * KIB);
    let flush = bench.only_io();
    assert_eq!((flush.target, flush.op), (flash(RING_DEVICE), IoOp::Flush));
    bench.end(flush);
    let writes = bench.ios.iter().filter(|io| (io.target, io.op) == (flash(0), VOLATILE)).count();
    assert!(writes >= 1);
    bench.settle();
    assert!([first, early, during].into_iter().all(|id| bench.answered(id)));
}

/// A sector that is not overwritten any more gets a recorded checksum again. Its next overwrite
/// needs a commit.
#[test]
fn sectors_that_rest_are_recorded_with_their_checksums() {
    let mut bench = dirty();
    bench.write(sector(10), 4 * KIB);
    bench.settle();
    for _ in 0..30 {
        bench.wait_ms(1000);
        bench.settle();
    }
    for number in [10, 11] {
        bench.write(sector(number), 4 * KIB);
        bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
        bench.settle();
        for _ in 0..30 {
            bench.wait_ms(1000);
            bench.settle();
        }
    }
}

/// If a sector is overwritten all the time, only its first overwrite needs a commit.
#[test]
fn a_busy_sector_needs_one_commit() {
    let mut bench = dirty();
    bench.write(sector(10), 4 * KIB);
    bench.settle();
    for _ in 0..60 {
        bench.wait_ms(1000);
        bench.settle();
        bench.write(sector(10), 4 * KIB);
        bench.next(flash(0), VOLATILE);
    }
}

/// With two copies, each flush records the checksum. The sector stays *unproven* all the same.
#[test]
fn overwrites_of_two_copies_need_one_commit() {
    let mut bench = mirrored(Copies::TwoOfDirty);
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    bench.write(0, 4 * KIB);
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    bench.settle();
    for _ in 0..3 {
        bench.flush();
        let again = bench.write(0, 4 * KIB);
        let targets: Vec<_> = bench.ios.iter().map(|io| (io.target, io.op)).collect();
        assert_eq!(targets, [(flash(0), VOLATILE), (flash(1), VOLATILE)]);
        bench.settle();
        assert!(bench.answered(again));
        let flush = bench.request(Op::Flush, 0, 0);
        assert!(bench.ios.iter().any(|io| io.op == IoOp::WriteJournal), "the new checksum is recorded");
        bench.settle();
        assert!(bench.answered(flush));
    }
}

/// Content that flash could not deliver stays known as damaged.
#[test]
fn a_lost_neighbour_keeps_its_checksum() {
    let mut bench = dirty();
    let read = bench.read(sector(11), 4 * KIB);
    let io = bench.only_io();
    bench.end_with(io, Ok(()), &[SUM + 1]);
    while let Some(io) = bench.ios.pop_front() {
        let wrong = io.op == IoOp::Read && io.target == flash(0);
        bench.end_with(io, Ok(()), &if wrong { vec![SUM + 1] } else { right_sums(&io) });
    }
    assert_eq!(bench.reply(read).expect("answered").result, Err(IoError::Failed));
    assert_eq!(bench.stats().sectors_lost, 1);
    bench.write(sector(10), 4 * KIB);
    bench.settle();
    bench.write(sector(12), 4 * KIB);
    bench.next(flash(0), VOLATILE);
    bench.write(sector(11), 4 * KIB);
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    bench.settle();
    assert_eq!(bench.stats().sectors_lost, 0);
}

/// The commit also records the neighbours behind a sector that keeps its checksum.
#[test]
fn neighbours_behind_a_lost_one_are_recorded() {
    let mut bench = dirty_in_blocks_of(16 * KIB);
    let read = bench.read(sector(13), 4 * KIB);
    while let Some(io) = bench.ios.pop_front() {
        let wrong = io.op == IoOp::Read && io.target == flash(0);
        bench.end_with(io, Ok(()), &if wrong { vec![SUM + 1] } else { right_sums(&io) });
    }
    assert_eq!(bench.reply(read).expect("answered").result, Err(IoError::Failed));
    bench.write(sector(11), 4 * KIB);
    bench.settle();
    for number in [12, 14, 15] {
        bench.write(sector(number), 4 * KIB);
        bench.next(flash(0), VOLATILE);
    }
}

/// A neighbour of an overwritten sector waits for the next commit, if the commit in progress does
/// not include its record.
#[test]
fn a_neighbour_waits_for_the_next_commit_if_one_is_in_progress() {
    let mut bench = dirty();
    bench.write_alone(sector(200), 4 * KIB);
    let flush = bench.request(Op::Flush, 0, 0);
    // The page was written ahead of the flush.
    let flushes: Vec<Io> = bench.ios.drain(..).collect();
    assert!(flushes.len() == 2 && flushes.iter().all(|io| io.op == IoOp::Flush), "{flushes:?}");
    let writes = [10, 11].map(|number| bench.write(sector(number), 4 * KIB));
    assert!(bench.ios.is_empty(), "{:?}", bench.ios);
    flushes.into_iter().for_each(|io| bench.end(io));
    assert!(bench.answered(flush));
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    bench.settle();
    assert!(writes.into_iter().all(|id| bench.answered(id)));
}

/// A neighbour whose checksum is not durable yet stays as it is: its *unproven* record could reach
/// flash without its *set* record.
#[test]
fn a_neighbour_that_is_not_committed_keeps_its_checksum() {
    let mut bench = dirty();
    bench.write_alone(sector(64), 4 * KIB);
    bench.write(sector(60), 4 * KIB);
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    bench.settle();
    bench.write(sector(63), 4 * KIB);
    bench.next(flash(0), VOLATILE);
    bench.write(sector(64), 4 * KIB);
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    bench.settle();
}

/// A sector is overwritten before any commit has recorded it: one commit records the checksum of
/// the sector, and the next commit records that this checksum is unknown.
#[test]
fn a_sector_that_is_not_committed_needs_two_commits() {
    let mut bench = dirty();
    bench.write_alone(sector(200), 4 * KIB);
    let again = bench.write(sector(200), 4 * KIB);
    let mut commits = 0;
    while let Some(io) = bench.ios.pop_front() {
        commits += u32::from((io.target, io.op) == (flash(RING_DEVICE), IoOp::Flush));
        assert!(commits == 2 || io.op != VOLATILE, "{io:?} after {commits} commits");
        bench.end(io);
    }
    assert!(bench.answered(again) && commits == 2);
}
