//! Tests of admission policies with hand-written accesses. SYSTEMS is the project's description of
//! other systems, outside this repository.

use super::*;

const FREE: Room = Room { has_free: true, used: 50 };
const FULL: Room = Room { has_free: false, used: 100 };

fn gate(text: &str, frames: u32) -> Gate {
    Gate::new(text.parse().expect("an admission"), frames)
}

#[test]
fn text_goes_both_ways() {
    for text in [
        "always",
        "while-free",
        "nth-access:3",
        "ghost",
        "always+not-sequential:512K",
        "nth-access:3+not-sequential:1M",
        "nth-access:3+while-filling:80%",
        "ghost+not-sequential:512K+while-filling:100%",
        "always+reads-only",
        "ghost+not-sequential:512K+while-filling:100%+reads-only",
    ] {
        assert_eq!(text.parse::<Admission>().map(|a| a.to_string()), Ok(text.to_owned()));
    }
    for text in [
        "",
        "never",
        "nth-access",
        "nth-access:1",
        "nth-access:9",
        "always+ghost",
        "not-sequential:x",
        "not-sequential:1",
        "always+not-sequential:99999999999999999999M",
        "not-sequential:4K+not-sequential:4K",
        "ghost+while-filling:80",
        "reads-only",
        "always+reads-only+reads-only",
        "auto+reads-only",
        "ghost+while-filling:0%",
        "ghost+while-filling:101%",
    ] {
        let error = text.parse::<Admission>().expect_err(text);
        assert!(error.to_string().contains("nth-access:N"), "{error}");
    }
}

/// SYSTEMS §2, "Promotion: a page is promoted when it has been accessed three times".
#[test]
fn the_third_access_promotes() {
    let mut gate = gate("nth-access:3", 1000);
    let block = BlockNo(7);
    assert_eq!(
        [
            gate.admit(block, AdmissionEffect::Clean, FREE),
            gate.admit(block, AdmissionEffect::Clean, FREE),
            gate.admit(block, AdmissionEffect::Clean, FREE)
        ],
        [false, false, true]
    );
    // After an eviction, the block must reach the count again.
    gate.evicted(block);
    assert!(!gate.admit(block, AdmissionEffect::Clean, FREE));
}

#[test]
fn popularity_is_not_required_while_the_cache_fills() {
    let mut gate = gate("nth-access:3+while-filling:80%", 100);
    let room = |used| Room { has_free: used < 100, used };
    assert!(gate.admit(BlockNo(1), AdmissionEffect::Clean, room(79)));
    assert!(!gate.admit(BlockNo(2), AdmissionEffect::Clean, room(80)));
    assert!(gate.admit(BlockNo(3), AdmissionEffect::Clean, room(79)), "the cache is filling again");
}

#[test]
fn reads_only_refuses_clean_writes_and_does_not_count_them() {
    let mut filling = gate("always+while-filling:100%+reads-only", 100);
    assert!(!filling.admit(BlockNo(1), AdmissionEffect::CleanWrite, FREE));
    assert!(filling.admit(BlockNo(1), AdmissionEffect::Clean, FREE));
    assert!(filling.admit(BlockNo(2), AdmissionEffect::Dirty, FREE));
    let mut ghost = gate("ghost+reads-only", 100);
    (0..3).for_each(|_| assert!(!ghost.admit(BlockNo(1), AdmissionEffect::CleanWrite, FULL)));
    let reads = [1, 2].map(|_| ghost.admit(BlockNo(1), AdmissionEffect::Clean, FULL));
    assert_eq!(reads, [false, true]);
}

#[test]
fn accesses_too_long_ago_do_not_count() {
    let mut gate = gate("nth-access:2", 1000);
    assert!(!gate.admit(BlockNo(7), AdmissionEffect::Clean, FREE));
    (100..100_000).for_each(|block| _ = gate.admit(BlockNo(block), AdmissionEffect::Clean, FREE));
    assert!(!gate.admit(BlockNo(7), AdmissionEffect::Clean, FREE));
}

#[test]
fn a_ghost_comes_back_and_a_stranger_only_while_there_is_room() {
    let mut gate = gate("ghost", 100);
    assert!(gate.admit(BlockNo(1), AdmissionEffect::Clean, FREE));
    assert!(!gate.admit(BlockNo(2), AdmissionEffect::Clean, FULL));
    assert!(gate.admit(BlockNo(2), AdmissionEffect::Clean, FULL), "refused a moment ago");
    gate.evicted(BlockNo(1));
    assert!(gate.admit(BlockNo(1), AdmissionEffect::Clean, FULL), "left a moment ago");
}

/// SYSTEMS §4, "Read miss: load into the cache when there is room", and "Clean is reclaimed for new writes".
#[test]
fn while_free_only_dirty_data_evicts() {
    let mut gate = gate("while-free", 100);
    assert!(gate.admit(BlockNo(1), AdmissionEffect::Clean, FREE));
    assert!(
        !gate.admit(BlockNo(2), AdmissionEffect::Clean, FULL)
            && !gate.admit(BlockNo(2), AdmissionEffect::Clean, FULL)
    );
    assert!(gate.admit(BlockNo(2), AdmissionEffect::Dirty, FULL));
    assert_eq!(gate.bytes(), 0, "it remembers nothing");
}

/// SYSTEMS §2, "sequential streams and large I/O thus never populate it".
#[test]
fn sequential_runs_and_large_requests_pass_by() {
    let mut gate = gate("always+not-sequential:64K", 100);
    assert_eq!(gate.observe(1000, 1016), Run::Sequential, "one request of 64 KiB");
    let runs: Vec<Run> = (0..17).map(|i| gate.observe(i, i + 1)).collect();
    assert!(runs[..15].iter().all(|run| *run == Run::Other));
    assert_eq!(runs[15..], [Run::Sequential; 2]);
    assert_eq!(gate.observe(500, 501), Run::Other);
}

#[test]
fn interleaved_runs_are_distinguished() {
    let mut gate = gate("always+not-sequential:64K", 100);
    let mut last = [Run::Other; 10];
    for i in 0..16 {
        for stream in 0..10u64 {
            let at = stream * 100_000 + i;
            last[stream as usize] = gate.observe(at, at + 1);
        }
    }
    assert_eq!(last, [Run::Sequential; 10]);
}

#[test]
fn small_requests_within_sectors_make_runs_too() {
    let mut gate = gate("always+not-sequential:16K", 100);
    // 2 KiB requests: two for each sector.
    let runs: Vec<Run> = (0..8u64).map(|i| gate.observe(i / 2, i / 2 + 1)).collect();
    assert_eq!(runs[..6], [Run::Other; 6]);
    assert_eq!(runs[6..], [Run::Sequential; 2]);
}
