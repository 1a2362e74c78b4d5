//! Random histories of hosts that hand a disk over. `HOB_SEED=n` replays the history of seed n, and
//! `HOB_SEEDS=n` runs n histories.

use hob_world::hosts::{Crash, Options, Report, Sabotage, run};

/// Number of histories per run of this test.
const HISTORIES: u64 = 3000;

fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

/// Prints the seed if an engine or a state machine panics.
struct Named(u64);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with HOB_SEED={}", self.0);
        }
    }
}

fn live(seed: u64, options: &Options) -> Report {
    let _named = Named(seed);
    run(seed, options).unwrap_or_else(|violation| panic!("{}", violation.0))
}

#[test]
fn random_histories_of_hosts_keep_every_promise() {
    let seeds = match from_env("HOB_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..from_env("HOB_SEEDS").unwrap_or(HISTORIES),
    };
    let mut total = Report::default();
    for seed in seeds.clone() {
        total.add(&live(seed, &Options::default()));
    }
    println!("{} histories: {total:?}", seeds.end - seeds.start);
    if seeds.end - seeds.start >= HISTORIES {
        for (name, count) in total.counts() {
            assert!(count >= 20, "{name} only {count} times");
        }
        assert!(total.handed_over > 1000 && total.crashes > 1000 && total.from_former > 100);
    }
}

#[test]
fn one_seed_is_one_history() {
    for seed in 0..20 {
        let options = Options { requests: 200, ..Options::default() };
        assert_eq!(run(seed, &options), run(seed, &options));
    }
}

/// A crash at each step of each host, in separate runs. Steps are the start and end of an action,
/// the write of a record, and the sending and receipt of a call or reply.
#[test]
fn a_crash_at_any_step_breaks_no_promise() {
    let mut crashes = 0;
    for seed in 0..16 {
        for host in 0..2 {
            for step in 1.. {
                let crash = Crash { host, step };
                let report = live(seed, &Options { requests: 40, crash: Some(crash), ..Options::default() });
                crashes += report.crashes;
                if report.crashes == 0 {
                    break;
                }
            }
        }
    }
    assert!(crashes > 500, "only {crashes}");
}

/// A process pauses after each of its steps, in separate runs: for less than the timeout of a call,
/// and for much longer.
#[test]
fn a_stop_at_any_step_breaks_no_promise() {
    let mut stops = 0;
    for seed in 100..106 {
        for (host, ns) in [(0, 2_000_000_000), (0, 60_000_000_000), (1, 2_000_000_000), (1, 60_000_000_000)] {
            for step in 1.. {
                let stop = Some((Crash { host, step }, ns));
                let report = live(seed, &Options { requests: 40, stop, ..Options::default() });
                stops += report.process_stops;
                if report.process_stops == 0 {
                    break;
                }
            }
        }
    }
    assert!(stops > 500, "only {stops}");
}

/// Runs the seeds that once found errors. The list has a description of each error.
#[test]
fn seeds_that_found_errors_pass() {
    for (seed, _what) in [
        (26, "abandoned at the destination between its last answer and `yours`, the disk had no owner"),
        (
            66,
            "a restarted owner never said that it pulls nothing more, and the former owner kept its cache for ever",
        ),
        (270, "reads in standby waited for an attempt that began again, which waited for the reads"),
        (3205, "a record was replaced by one of an earlier session"),
        (10_249, "a source that had heard no answer asked for ever after its disk had been handed on"),
        (35_999, "a source that waited for an order called without a pause"),
        (41_016, "a destination that pulls nothing never said so"),
        (42_498, "a repeated `changed` waited for a read, that for the hand-over, and the hand-over for it"),
        (43_110, "a destination that was being prepared could not be abandoned"),
        (268_993, "a record that may have been written was replaced by one of an earlier session"),
        (317_835, "an attempt was given the answer to a call of the one before"),
        (486, "the model: a stopped process continued and had no room for the requests of its peer"),
        (70_000_124, "the model: a stopped process was not waited for at the end"),
        (
            137_617,
            "a destination that served, crashed, gave the disk up and got it after all read of the former owner",
        ),
    ] {
        live(seed, &Options::default());
    }
    // Reads of other hosts took all slots of a disk while a process was stopped.
    live(9_697, &Options { requests: 1500, ..Options::default() });
}

/// The violation occurs only if two conditions hold. The destination crashes after its first change
/// of the disk and before it records that it owns the disk. The guest then flushes before the disk
/// is served again.
#[test]
fn a_missing_standby_flush_of_earlier_writes_is_noticed() {
    let options = Options { sabotage: Some(Sabotage::UnflushedStandby), ..Options::default() };
    let what = run(8116, &options).expect_err("the violation was not noticed").0;
    assert!(what.contains("not durable"), "{what}");
    live(8116, &Options::default());
}

/// Runs histories with the sabotage until one fails, and returns why.
fn caught(sabotage: Sabotage, seeds: std::ops::Range<u64>) -> String {
    let options = Options { sabotage: Some(sabotage), ..Options::default() };
    let found = seeds.clone().find_map(|seed| Some((seed, run(seed, &options).err()?)));
    let (seed, violation) =
        found.unwrap_or_else(|| panic!("{sabotage:?} was not noticed in histories {seeds:?}"));
    println!("{sabotage:?}: seed {seed}: {}", violation.0);
    violation.0
}

fn expect(sabotage: Sabotage, seeds: u64, reasons: &[&str]) {
    expect_in(sabotage, 0..seeds, reasons);
}

fn expect_in(sabotage: Sabotage, seeds: std::ops::Range<u64>, reasons: &[&str]) {
    let what = caught(sabotage, seeds);
    assert!(reasons.iter().any(|reason| what.contains(reason)), "{sabotage:?} was noticed as: {what}");
}

/// Messages about stale data.
const OLD: &[&str] = &["stale", "backing holds", "but not at unit"];

/// Messages about two owners.
const TWO: &[&str] = &["serve the disk at once", "all own the disk", "does not own", "departs with"];

#[test]
fn a_destination_that_reports_an_invalidation_too_early_is_noticed() {
    // About one history in a thousand detects it.
    expect_in(Sabotage::EarlyForgotten, 5000..8000, OLD);
}

#[test]
fn a_destination_that_invalidates_nothing_is_noticed() {
    expect(Sabotage::NothingForgotten, 3000, OLD);
}

#[test]
fn unrecorded_changes_during_the_copy_are_noticed() {
    expect(Sabotage::Unwatched, 3000, OLD);
}

#[test]
fn a_hand_over_before_the_record_is_noticed() {
    expect(Sabotage::EarlyRecord, 3000, TWO);
}

#[test]
fn a_thaw_after_the_record_is_noticed() {
    expect(Sabotage::LateThaw, 3000, TWO);
}

#[test]
fn a_freeze_that_waits_for_nothing_is_noticed() {
    expect(Sabotage::HastyFreeze, 3000, &[OLD, TWO].concat());
}

#[test]
fn reads_of_a_standby_from_its_own_cache_are_noticed() {
    expect(Sabotage::StandbyFromCache, 3000, OLD);
}

#[test]
fn a_restarted_destination_that_trusts_pulled_data_is_noticed() {
    expect(Sabotage::BelievedAwaited, 3000, OLD);
}

#[test]
fn a_former_owner_that_answers_standby_reads_is_noticed() {
    // About one history in five thousand detects it.
    expect_in(Sabotage::AwayServesStandby, 5000..8000, OLD);
}

#[test]
fn reads_of_changed_data_from_the_former_owner_are_noticed() {
    expect(Sabotage::FormerOwnerForAll, 3000, OLD);
}

#[test]
fn a_late_list_page_that_names_changed_data_is_noticed() {
    expect(Sabotage::LatePages, 3000, OLD);
}
