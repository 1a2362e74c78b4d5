//! Tests of the directory: walks over large ranges, sequential blocks, and admission of dirty data.

use super::*;
use crate::granularity::Fill;

#[test]
fn a_large_range_is_walked_by_frame_with_the_same_result_as_by_address() {
    let mut directory =
        Directory::new(8, 2, PolicyKind::all().next().expect("there are policies"), Admission::default());
    // The directory has blocks 1, 500 and 2^30, of four sectors each, with some sectors valid.
    for (frame_block, valid) in [(1, 0..4), (500, 2..3), (1 << 30, 1..3)] {
        let frame = directory.index.insert(BlockNo(frame_block)).expect("a frame is free");
        let first = directory.index.first_sector(frame);
        valid.for_each(|i| directory.index.set_valid(first + i, 7));
    }
    let walk = |by_frame, (first, end)| {
        let mut runs = directory.cached_runs(first, end);
        (runs.by_frame, runs.at) = (by_frame, if by_frame { 0 } else { first });
        let mut found: Vec<_> = std::iter::from_fn(|| runs.next(&directory)).collect();
        found.sort_unstable();
        found
    };
    // These ranges begin or end inside the first and the second block.
    for range in [(5, 2002), (0, 4), (8, 8), (4, 2004)] {
        assert_eq!(walk(true, range), walk(false, range), "sectors {range:?}");
    }
    assert_eq!(walk(true, (5, 2002)).iter().map(|(_, count)| count).sum::<u64>(), 3 + 2);

    let disk_sectors = 1 << 34;
    assert!(directory.cached_runs(0, disk_sectors).by_frame, "2^32 steps would block the shard for seconds");
    directory.invalidate(0, disk_sectors);
    assert_eq!(directory.index.sectors_valid(), 0);
}

fn directory(frames: u32, admission: &str) -> Directory {
    let policy = PolicyKind::from_name("lru").expect("a policy");
    Directory::new(frames, 0, policy, admission.parse().expect("an admission"))
}

/// Stores a block. Returns false if it was not admitted.
fn store(directory: &mut Directory, block: u32, run: Run, effect: AdmissionEffect) -> bool {
    let span = Span { block: BlockNo(block), first: 0, count: 1 };
    let found = directory.find(span);
    let placed = directory.bring(span, found, (run, effect), |_, _| false);
    placed.map(|placed| directory.index.set_valid(placed.sector, 0)).is_ok()
}

fn cached(directory: &Directory, blocks: impl IntoIterator<Item = u32>) -> Vec<u32> {
    let is_cached =
        |block: &u32| directory.find(Span { block: BlockNo(*block), first: 0, count: 1 }).is_some();
    blocks.into_iter().filter(is_cached).collect()
}

const FILLING: &str = "ghost+not-sequential:128K+while-filling:100%";

#[test]
fn sequential_blocks_fill_free_frames_and_leave_before_all_others() {
    let clean = AdmissionEffect::Clean;
    let mut directory = directory(8, FILLING);
    (0..6).for_each(|block| assert!(store(&mut directory, block, Run::Sequential, clean)));
    (10..12).for_each(|block| assert!(store(&mut directory, block, Run::Other, clean)));
    assert!(!store(&mut directory, 7, Run::Sequential, clean), "no frame is free");
    // Another use in a sequential run changes nothing; any other use makes the block an ordinary one.
    assert!(store(&mut directory, 0, Run::Sequential, clean) && store(&mut directory, 1, Run::Other, clean));
    (12..17).for_each(|block| assert!(store(&mut directory, block, Run::Other, clean), "block {block}"));
    assert_eq!(cached(&directory, 0..17), [1, 10, 11, 12, 13, 14, 15, 16]);
    assert!(!store(&mut directory, 17, Run::Other, clean), "the cache is full of other blocks");
    let order: Vec<u32> = directory.order().map(|(frame, _)| directory.index.block(frame).0).collect();
    assert_eq!(order, [10, 11, 1, 12, 13, 14, 15, 16]);
}

#[test]
fn sequential_blocks_stay_first_to_leave_in_a_cache_that_grows() {
    let clean = AdmissionEffect::Clean;
    let mut small = directory(4, FILLING);
    (0..3).for_each(|block| assert!(store(&mut small, block, Run::Sequential, clean)));
    assert!(store(&mut small, 10, Run::Other, clean));
    let mut large = directory(6, FILLING);
    large.adopt(&small, small.order().map(|(frame, heat)| (frame, frame, heat)).collect(), Vec::new());
    (11..16).for_each(|block| assert!(store(&mut large, block, Run::Other, clean), "block {block}"));
    assert_eq!(cached(&large, 0..16), [10, 11, 12, 13, 14, 15]);
}

#[test]
fn automatic_admission_admits_all_dirty_data() {
    let (clean, dirty) = (AdmissionEffect::Clean, AdmissionEffect::Dirty);
    for (admission, admits) in [("auto", true), (FILLING, false)] {
        let mut directory = directory(4, admission);
        (0..4).for_each(|block| assert!(store(&mut directory, block, Run::Other, clean)));
        assert!(
            !store(&mut directory, 4, Run::Other, clean) && !store(&mut directory, 5, Run::Sequential, clean)
        );
        assert_eq!(store(&mut directory, 6, Run::Other, dirty), admits, "{admission}");
        assert_eq!(store(&mut directory, 7, Run::Sequential, dirty), admits, "{admission}");
    }
}

/// Brings the blocks around `block` into the cache, as after a read miss of this block.
fn add_around(directory: &mut Directory, block: u64, disk_blocks: u64) {
    for (from, to) in directory.extra_ranges(block, block + 1, Run::Other, disk_blocks) {
        for span in directory.spans(from, to) {
            let placed = directory.place_extra(span, directory.find(span), |_, _| false);
            placed.iter().for_each(|placed| directory.index.set_valid(placed.sector, 0));
        }
    }
}

#[test]
fn extra_blocks_are_the_uncached_ones_next_to_a_miss() {
    let mut directory = directory(100, "always");
    let ranges = |directory: &Directory, run| directory.extra_ranges(12, 13, run, 15);
    assert_eq!(ranges(&directory, Run::Other), [(12, 12), (13, 13)]);
    directory.set_fill(Fill::Block);
    assert_eq!(ranges(&directory, Run::Other), [(12, 12), (13, 15)]);
    assert_eq!(ranges(&directory, Run::Sequential), [(12, 12), (13, 13)]);
    let ranges = |directory: &Directory| directory.extra_ranges(19, 20, Run::Other, 23);
    assert_eq!(ranges(&directory), [(16, 19), (20, 23)]);
    for block in [17, 22] {
        assert!(store(&mut directory, block, Run::Other, AdmissionEffect::Clean));
    }
    assert_eq!(ranges(&directory), [(18, 19), (20, 22)]);
}

#[test]
fn extra_blocks_replace_only_their_own_share() {
    let mut directory = directory(100, "always");
    directory.set_fill(Fill::Block);
    (1000..1100).for_each(|block| assert!(store(&mut directory, block, Run::Other, AdmissionEffect::Clean)));
    (0..10).for_each(|unit| add_around(&mut directory, 16 * unit, 1 << 20));
    assert_eq!(cached(&directory, 0..160).len(), 15);
    assert_eq!(cached(&directory, 1000..1100).len(), 85);
    let extra = cached(&directory, 0..160);
    assert!(store(&mut directory, extra[0], Run::Other, AdmissionEffect::Clean));
    (10..20).for_each(|unit| add_around(&mut directory, 16 * unit, 1 << 20));
    assert_eq!(cached(&directory, 0..160), [extra[0]], "a used block is an ordinary one");
    directory.set_fill(Fill::Sectors);
    (2000..2015).for_each(|block| assert!(store(&mut directory, block, Run::Other, AdmissionEffect::Clean)));
    assert_eq!(cached(&directory, 0..320), [extra[0]], "without a share they are evicted first");
}

#[test]
fn extra_blocks_are_refused_if_the_saved_budget_does_not_cover_them() {
    let mut directory = directory(100, "always");
    directory.set_fill(Fill::Block);
    let allowance = Allowance { credit: 3 * 4096 + 1, credit_max: 4096, ..Allowance::default() };
    directory.set_limit(Some(Limit::new(&allowance, Counts::default())));
    let added = (0..6).filter(|block| {
        let span = Span { block: BlockNo(*block), first: 0, count: 1 };
        let is_added = directory.place_extra(span, None, |_, _| false).is_ok();
        directory.charge_extra(is_added.into());
        is_added
    });
    assert_eq!(added.count(), 3);
    assert_eq!(directory.charged().clean, 3 * 4096);
}

#[test]
fn admission_decides_when_an_extra_block_is_used() {
    let mut directory = directory(10, "ghost");
    directory.set_fill(Fill::Block);
    (1000..1010).for_each(|block| assert!(store(&mut directory, block, Run::Other, AdmissionEffect::Clean)));
    add_around(&mut directory, 0, 1 << 20);
    let extra = cached(&directory, 1..16);
    assert_eq!(extra.len(), 1);
    let sector = directory.find(Span { block: BlockNo(extra[0]), first: 0, count: 1 }).expect("cached");
    directory.touch(sector, Run::Other);
    assert_eq!(directory.extra.frames.count(), 1);
    directory.touch(sector, Run::Other);
    assert_eq!(directory.extra.frames.count(), 0);
}
