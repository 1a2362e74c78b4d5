//! The flash write budget of a cache with two copies of all data: each block is refused or charged
//! with both copies, before hob decides about the next block.

use super::write_back::{VOLATILE, backing, lazy, ring};
use super::*;
use crate::command::{Copies, Enable, Mode};
use crate::flash_budget::{Allowance, Counts};

const BLOCK: u64 = 32 * KIB;

/// Returns a disk with a persistent cache of blocks of 32 KiB on two devices, without maintenance.
fn bench(copies: Copies) -> Bench {
    let mut bench = Bench::bare(Limits { scrub_frames_per_s: 0, ..Limits::default() });
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    let config = CacheConfig { destage: lazy(), copies, ..config(MIB, BLOCK) };
    let data = |device, ordinal| DataSegment { place: segment(device, 0), ordinal, seconds_only: false };
    let segments = vec![data(0, 0), data(1, 1)];
    let enable = Enable { config, segments, journal: Some(ring(1)), recovered: None };
    bench.start_change(CacheChange::Enable(Box::new(enable)));
    bench.settle();
    bench
}

fn counts(bench: &Bench) -> Counts {
    bench.engine.flash_counts(DISK).expect("the disk exists")
}

/// Gives the cache a flash write budget with a credit of `bytes` bytes and no loan.
fn save(bench: &mut Bench, bytes: u64) {
    // Journal writes would use the budget.
    bench.settle();
    let (credit, as_of) = (bytes as i64, counts(bench));
    let allowance = Allowance { credit, credit_max: credit, loan: 0, earned: 0, as_of };
    bench.engine.allow_flash_writes(DISK, Some(allowance));
}

/// Reads the first `blocks` blocks of the disk. Returns the outcome, and the number of bytes that
/// the read wrote to flash.
fn read_blocks(bench: &mut Bench, blocks: u64) -> (Outcome, u64) {
    bench.settle();
    let before = counts(bench).clean;
    let read = bench.read(0, blocks * BLOCK);
    bench.next(backing(), IoOp::Read);
    let is_fill = |io: &&Io| is_flash(io) && io.op == VOLATILE;
    let written: u64 = bench.ios.iter().filter(is_fill).map(|io| io.len).sum();
    assert_eq!(counts(bench).clean - before, written);
    bench.settle();
    (bench.outcome(read), written)
}

#[test]
fn new_blocks_are_charged_with_both_copies_before_the_next_block() {
    let mut bench = bench(Copies::TwoOfAll);
    save(&mut bench, 8 * BLOCK);
    // Half of the budget is left before the third block. Then blocks need more accesses.
    assert_eq!(read_blocks(&mut bench, 16), (Outcome::MissFlashBudget, 6 * BLOCK));
}

#[test]
fn a_block_needs_budget_for_both_copies() {
    let mut bench = bench(Copies::TwoOfAll);
    save(&mut bench, 2 * BLOCK - 1);
    assert_eq!(read_blocks(&mut bench, 1), (Outcome::MissFlashBudget, 0));
    save(&mut bench, 2 * BLOCK);
    assert_eq!(read_blocks(&mut bench, 1), (Outcome::MissFilled, 2 * BLOCK));
}

#[test]
fn missing_second_copies_of_cached_blocks_are_limited() {
    let mut bench = bench(Copies::One);
    assert_eq!(read_blocks(&mut bench, 8), (Outcome::MissFilled, 8 * BLOCK));
    let tune = CacheChange::Tune(Mode::WriteThrough, lazy(), Copies::TwoOfAll);
    bench.change(tune).expect("at once");
    save(&mut bench, 2 * BLOCK);
    assert_eq!(read_blocks(&mut bench, 9), (Outcome::MissFlashBudget, 2 * BLOCK));
    // Six second copies, and both copies of the ninth block.
    assert_eq!(counts(&bench).refused, 8 * BLOCK);
    bench.engine.allow_flash_writes(DISK, None);
    assert_eq!(read_blocks(&mut bench, 9), (Outcome::PartialMiss, 8 * BLOCK));
}

#[test]
fn a_budget_that_is_used_up_refuses_no_write() {
    let mut bench = bench(Copies::TwoOfAll);
    save(&mut bench, 0);
    assert_eq!(bench.write_alone(0, BLOCK), Outcome::WriteNotCopied);
    bench.change(CacheChange::Tune(Mode::WriteBack, lazy(), Copies::TwoOfAll)).expect("at once");
    assert_eq!(bench.write_alone(0, BLOCK), Outcome::WriteBack);
}
