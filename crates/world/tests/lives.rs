//! Random histories with crashes, restarts and recovery of persistent and write-back caches.
//! `HOB_SEED=n` replays the history of seed n, and `HOB_SEEDS=n` runs n histories. `cargo xtask
//! simulate` runs many more.

use hob_engine::outcome::Outcome;
use hob_world::sim::{Options, Report, run};

/// Number of histories per run of this test.
const HISTORIES: u64 = 2_000;

/// Histories that found errors, which are corrected. For each history: true if devices may fail,
/// the seed, the number of requests, and a description of the error.
const MENDED: [(bool, u64, u32, &str); 29] = [
    (true, 2145, 200, "a new ring that could not be written was told as the loss of the old one"),
    (true, 2546, 200, "a discard met dirty data that was not there when it began"),
    (true, 11_987, 200, "the same, and a read saw half of what it uncovered"),
    (true, 13_285, 200, "a history that waited for flash to be looked after no more"),
    (
        true,
        51_364,
        200,
        "what was made clean in a ring that failed stayed dirty in the old one, and was never destaged",
    ),
    (false, 6850, 200, "a discard met dirty data that was not there when it began"),
    (false, 10_084, 200, "a write waited for older data of a cache that was taken away"),
    (
        false,
        22_991,
        200,
        "a second copy that a read made of dirty data was clean, and all that was left when a device left",
    ),
    (false, 90_381, 200, "epochs of one length were taken for those of another, and dirty data for young"),
    (false, 226_390, 200, "a pool was full of the rings that one crash after the other left"),
    (
        false,
        243_148,
        200,
        "a commit that had nothing to write ended, and the change that waited for it did not hear",
    ),
    (false, 183_825, 200, "a crash after a drain brought dirty data back over what had been written past it"),
    (true, 2_757, 200, "the model: two copies of what was not flushed that differ"),
    (true, 8_502, 200, "a drain ended before the journal durably said so"),
    (true, 186_236, 200, "a change that was to replace dirty data began again when the cache was gone"),
    (
        true,
        13_299,
        200,
        "the model: copies that nothing proves, of which a bad device may have the one that counts",
    ),
    (true, 1_142_335, 200, "the model: a read that began before dirty data was discarded had seen it"),
    (true, 3_064_141, 200, "a disk that could not be removed held its requests for ever"),
    (true, 3_181_292, 200, "scrubbing that had waited found another cache, without a journal"),
    (true, 9_711, 200, "the model: a sector without a checksum, scrambled before it was read"),
    (true, 270_011, 200, "one copy of a sector recorded before the other was written"),
    (true, 10_042, 200, "segments that hold a dirty sector's good copy left their cache"),
    (true, 13_906, 200, "segments that hold a dirty sector's good copy left their cache"),
    (true, 4_359_608, 200, "the model: a recovery in another mode that found less than a crash showed later"),
    (
        true,
        20_051_462,
        200,
        "a write that flash took in part was held, and the change that waited for it did not hear",
    ),
    (true, 20_069_509, 200, "a read that had waited to go past its cache fetched what another was fetching"),
    (
        true,
        20_482_018,
        200,
        "the model: segments on their way to a volatile cache that took the place of another",
    ),
    (
        true,
        20_569_979,
        200,
        "the model: guests of a disk whose recovered cache was not in service, and never was",
    ),
    (true, 30_482_522, 200, "the model: a disk had no room for its new ring before another one was opened"),
];

fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

/// Prints the seed if the engine panics.
struct Named(u64);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with HOB_SEED={}", self.0);
        }
    }
}

fn live(seeds: std::ops::Range<u64>, options: &Options) -> Report {
    let mut total = Report::default();
    for seed in seeds {
        let _named = Named(seed);
        total.add(&run(seed, options).unwrap_or_else(|violation| panic!("{}", violation.0)));
    }
    total
}

#[test]
fn random_histories_with_restarts_violate_no_guarantee() {
    let seeds = match from_env("HOB_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..from_env("HOB_SEEDS").unwrap_or(HISTORIES),
    };
    let total = live(seeds.clone(), &Options::lives());
    println!("{total:?}");
    if seeds.end - seeds.start >= HISTORIES {
        check_coverage(&total);
    }
}

/// Checks that every outcome and event occurred often enough.
fn check_coverage(total: &Report) {
    for (outcome, least) in [
        (Outcome::Hit, 1000),
        (Outcome::WriteBack, 1000),
        (Outcome::FlushCommitted, 1000),
        (Outcome::BypassMode, 1000),
        (Outcome::BypassNoPromote, 1000),
        (Outcome::BypassRecovering, 1000),
        (Outcome::DirtyLost, 10),
    ] {
        let count = total.outcomes[outcome as usize];
        assert!(count >= least, "{outcome:?} only {count} times");
    }
    for (name, count) in total.counts() {
        let least = match name {
            "power_cuts" | "kills" | "stops" | "recoveries" | "drains" | "evictions" => 500,
            "recoveries_dirty" | "recoveries_clean" | "changed_behind" | "discards" | "early" | "voided"
            | "growths" | "shared" => 200,
            "recoveries_distrusting" | "dirty_lost" => 20,
            "journals_lost" | "journal_copies_replaced" => 10,
            "journal_copies_lost" => 100,
            "recoveries_undone" => 5,
            "devices_returned" => 3,
            "vacated" | "outages" => 200,
            "crashes_in_recovery" | "crashes_in_change" | "crashes_in_drain" | "recoveries_larger" => 20,
            "crashes_in_growth" => 5,
            "edges_merged" => 1000,
            "edges_recent" => 100,
            "bulk_writes" => 10,
            "zeroes_to_flash" | "extra_blocks_used" => 100,
            "extra_read_bytes" | "flash_writes_refused_bytes" => 1_000_000,
            "destaged_bytes" => 10_000_000,
            _ => 0,
        };
        assert!(count >= least, "{name} only {count}");
    }
}

#[test]
fn one_seed_is_one_history_with_restarts() {
    for seed in 0..20 {
        assert_eq!(run(seed, &Options::lives()), run(seed, &Options::lives()));
    }
}

/// Promise 1 alone: only power cuts, kills and the daemon's timeouts occur.
#[test]
fn sound_devices_lose_nothing_that_was_flushed() {
    let options = Options { faults: false, ..Options::lives() };
    let total = live(5_000_000..5_000_500, &options);
    assert_eq!((total.outcomes[Outcome::DirtyLost as usize], total.doubts), (0, 0));
    // Only guests whose dirty data a command discarded receive an error.
    assert!(total.outcomes[Outcome::BackingError as usize] <= total.discards);
    assert!(total.dirty_lost == 0 && total.journals_lost == 0);
    assert!(total.recoveries_dirty > 100);
}

/// Runs a few histories of many requests, to find errors that accumulate slowly.
#[test]
fn long_histories_with_restarts_violate_no_guarantee() {
    live(6_000_000..6_000_020, &Options { requests: 5000, ..Options::lives() });
    // A long search for cold dirty blocks has a timeout that is due at once.
    live(108_670..108_671, &Options { requests: 1500, copy_loss_permille: 0, ..Options::lives() });
}

#[test]
fn seeds_of_corrected_errors_pass() {
    for (faults, seed, requests, what) in MENDED {
        let ended = run(
            seed,
            &Options {
                faults,
                requests,
                early: false,
                hasty: true,
                memory_permille: 0,
                qos_permille: 0,
                passing_permille: 0,
                growth_permille: 0,
                fill_permille: 0,
                copy_loss_permille: 0,
                flash_budget_permille: 0,
                direct_permille: 0,
                clones_permille: 0,
                ..Options::lives()
            },
        );
        assert!(ended.is_ok(), "{what} (once): {ended:?}");
    }
}

/// Histories with all options that found errors, which are corrected. For each history: the kind,
/// the seed, and a description of the error.
const FOUND: [(&str, u64, &str); 34] = [
    (
        "flaky",
        1_333,
        "a page was in flight while another disk's flush of the device failed, and was believed",
    ),
    ("flaky", 1_412, "the same, with the page that names a ring"),
    ("flaky", 885, "data that a failed flush had left volatile was called durable after a restart"),
    ("flaky", 1_229, "newer data went to the backing from a cache whose lost journal described older data"),
    ("flaky", 630, "the same, before a power cut"),
    ("flaky", 70_000_190, "the model: the loss of a journal was recorded once, while the disk was removed"),
    ("growth", 1_002_259, "the model: the same, without a failed flush"),
    ("sound", 1_001_650, "the model: growth dropped the sector that would have shown a change"),
    ("lives", 2_005_135, "the failure of an earlier flush counted as the report of a later change's loss"),
    ("memory", 2_017_358, "the same, with a memory tier"),
    ("sound", 3_000_669, "the model: a later cache was taken for the one that a command had replaced"),
    ("memory", 80_012_328, "the model: a write was acknowledged in the step that gave dirty data up"),
    ("flaky", 57, "the model: guests waited for a cache that a later command had discarded"),
    ("flaky", 4_951, "the model: a journal that was lost before a drain cannot say that nothing is dirty"),
    ("memory", 20_001_295, "memory kept what a hit had read before the backing lost it"),
    ("lives", 22_010_660, "a change was abandoned with a page of its new journal in flight"),
    ("memory", 30_003_434, "an edge that was merged before a loss went to flash and not to the backing"),
    ("memory", 30_005_777, "a copy of what a discard uncovered stayed after the backing had lost it"),
    ("silent", 30_006_558, "the same, read by a guest"),
    ("memory", 30_007_140, "the model: a ring that a later command wrote was complete at a clean end"),
    ("sound", 7_001_207, "the model: what a recovery gave up came back, for its new ring was not complete"),
    ("lives", 5_001_873, "the model: a backing lost a part of durable data that was discarded"),
    ("lives", 22_012_855, "the model: the same, after a power cut"),
    ("lives", 20_004_027, "the model: a write that overlapped another was not the last"),
    ("qos", 5_001_913, "the model: guests waited for a cache that had been discarded"),
    ("qos", 30_003_954, "the model: a backing restarted again and again until nothing could become clean"),
    ("qos", 40_009_195, "the model: a change of the backing of an empty cache was not noticed"),
    ("growth", 20_006_086, "the model: a disk grew between two attempts to enable its recovered cache"),
    ("lives", 22_005_478, "the model: restarts of a backing kept a history from its end"),
    ("lives", 22_014_575, "the model: a backing restarted faster than anything could be written to it"),
    ("sound", 5_271, "the process was killed after a write past the cache, and old dirty data came back"),
    ("lives", 5_540, "the same, after the write had replaced dirty data"),
    ("lives", 20_012_817, "a damaged write of the tail was believed, because its checksum was unknown"),
    ("flaky", 600_014_985, "a removal waited for a write that waited for the record of a lost journal"),
];

/// The process was killed when only journal pages that were not durable recorded that a sector is
/// clean. Another program changed the sector, the sector was recovered as clean, and a power cut
/// made it dirty again: hob overwrote the other program's data.
#[test]
fn what_a_recovery_found_clean_stays_clean_after_a_power_cut() {
    let options = Options { fill_permille: 1000, copy_loss_permille: 0, requests: 80, ..Options::lives() };
    run(8_020_474, &options).unwrap();
}

/// Both devices with copies of dirty data failed a flush of one commit. The engine counted the copy
/// on each device as the durable copy for the other device, so a power cut lost flushed data.
#[test]
fn two_devices_whose_flushes_failed_are_no_copies_of_each_other() {
    run(2_009_831, &flaky()).unwrap();
}

/// A device failed a flush when it had a part of a durable write, and the rest of the write was in
/// flight. Later flushes succeeded, and the write was acknowledged, but a power cut lost that part.
#[test]
fn a_write_in_progress_during_a_failed_flush_is_not_lost() {
    run(3_002_881, &flaky()).unwrap();
}

/// Histories whose flash writes exceeded a budget. The simulation gave no part of the budget to a
/// disk that was removed and added again between two counts. The engine charged second copies of
/// clean data only after all blocks of a request were admitted.
#[test]
fn copies_of_clean_data_stay_within_a_flash_write_budget() {
    run(290_008_118, &Options { memory_permille: 1000, ..Options::lives() }).unwrap();
    run(225_014_541, &Options { copy_loss_permille: 1000, ..Options::lives() }).unwrap();
}

/// Options with working flash devices whose flushes fail.
fn flaky() -> Options {
    Options { faults: false, flash_flush_permille: 1000, ..Options::lives() }
}

#[test]
fn seeds_of_corrected_errors_with_all_options_pass() {
    for (kind, seed, what) in FOUND {
        let lives =
            Options { fill_permille: 0, flash_budget_permille: 0, copy_loss_permille: 0, ..Options::lives() };
        let options = match kind {
            "sound" => Options { faults: false, ..lives },
            "flaky" => Options { fill_permille: 0, flash_budget_permille: 0, ..flaky() },
            "memory" => Options { memory_permille: 1000, ..lives },
            "growth" => Options { growth_permille: 1000, ..lives },
            "silent" => Options { silent_permille: 1000, ..lives },
            "qos" => Options { qos_permille: 1000, ..lives },
            _ => lives,
        };
        let ended = run(seed, &options);
        assert!(ended.is_ok(), "{what} (once): {ended:?}");
    }
}

/// In these histories, a device failed a flush and lost a part of a sector, of which another device had
/// a copy. After a restart, hob overwrote both copies in place, the power failed, and recovery chose the
/// damaged copy.
#[test]
fn a_copy_on_a_device_with_a_failed_flush_is_not_used_after_a_restart() {
    for seed in [2_100_015_509, 2_100_021_750] {
        run(seed, &Options { requests: 200, ..flaky() }).unwrap();
    }
}

/// In these histories, a device that had failed a flush and worked again was excluded after a restart,
/// and a discard that a guest had seen was forgotten when the process was killed.
#[test]
fn a_restart_forgets_no_discard_and_excludes_no_sound_device() {
    let fill = Options { fill_permille: 1000, flash_budget_permille: 500, ..Options::lives() };
    run(2_300_000_149, &Options { requests: 200, ..fill }).unwrap();
    run(2_300_003_793, &Options { requests: 200, ..flaky() }).unwrap();
}

/// One of two devices failed the flush of a commit, and the power failed before a page named the
/// device. The commit had acknowledged a durable write.
#[test]
fn a_commit_waits_for_the_name_of_a_device_that_failed_its_flush() {
    run(2_800_125_818, &Options { requests: 200, ..flaky() }).unwrap();
}

/// A history that failed because of an error in the model: the end of one discard counted as the end
/// of another discard of the same range.
#[test]
fn two_discards_of_one_range_may_both_restore_older_data() {
    run(2_800_087_562, &Options { requests: 200, ..flaky() }).unwrap();
}

/// Promises 1 and 2 when disks grow, with crashes before, during and after the growth of their
/// caches: docs/decisions/0017.
#[test]
fn disks_that_grow_lose_nothing_and_read_nothing_old() {
    let options = Options { growth_permille: 1000, ..Options::lives() };
    let total = live(4_000_000..4_000_000 + HISTORIES, &options);
    assert!(total.growths > 500 && total.crashes_in_growth > 20, "{total:?}");
    assert!(total.recoveries_larger > 500, "{total:?}");
}

/// One device has only replicas of dirty data, like another host's flash. This device fails, is
/// fenced, removed and added like any other.
#[test]
fn a_peer_keeps_the_second_copy() {
    let options = Options { peer: true, ..Options::lives() };
    let total = live(7_000_000..7_000_000 + HISTORIES / 2, &options);
    assert!(total.outcomes[Outcome::WriteBack as usize] > 500, "{total:?}");
    assert!(total.recoveries_dirty > 100, "{total:?}");
}

/// With a device for replicas and only sound devices, flushed data is never lost.
#[test]
fn a_peer_and_sound_devices_lose_nothing() {
    let options = Options { peer: true, faults: false, ..Options::lives() };
    let total = live(8_000_000..8_000_300, &options);
    assert_eq!(total.outcomes[Outcome::DirtyLost as usize], 0);
    assert!(total.dirty_lost == 0 && total.recoveries_dirty > 50, "{total:?}");
}

/// A bitmap marks every acknowledged change since the bitmap began, even after crashes. It also
/// marks every range whose content differs for another reason.
#[test]
fn bitmaps_miss_nothing() {
    let options = Options { bitmap_permille: 1000, ..Options::lives() };
    let total = live(3_000_000..3_000_000 + HISTORIES / 2, &options);
    assert!(total.rotations > 500 && total.bitmaps > 5000, "{total:?}");
}
