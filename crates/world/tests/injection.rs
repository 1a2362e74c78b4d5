//! Error injection as in the tests of OCF (Open CAS Framework). In separate runs, the first,
//! second, third … write or flush of flash fails during every operation on a persistent cache.
//! After each failure, the cache continues to serve, crashes, is recovered and is compared with the
//! model. For the removal of a disk, the I/O of its backing fails in the same way.
//! `HOB_INJECT="Grow Dirty One Device 0 12"` (operation, content, copies, failure, seed, number)
//! runs only this case and prints all inputs and outputs of the engine.

use hob_engine::command::Copies;
use hob_world::sim::{
    Case, Content, Failure, Injected, OPERATIONS, Operation, Options, Sabotage, Trace, inject,
    shrink_in_outage,
};

/// Maximum number of writes and flushes of an operation, including those of guests.
const CHANGES_MAX: u32 = 400;

/// Runs one case, unless `HOB_INJECT` selects another case.
fn run(case: &Case, nth: u32) -> Result<Injected, String> {
    let Case { operation, content, copies, failure, seed } = case;
    let mut options = Options::default();
    if let Ok(asked) = std::env::var("HOB_INJECT") {
        if asked != format!("{operation:?} {content:?} {copies:?} {failure:?} {seed} {nth}") {
            return Ok(Injected { struck: nth < CHANGES_MAX - 1, ..Injected::default() });
        }
        options.trace = Some((|line| eprintln!("{line}")) as Trace);
    }
    inject(case, nth, &options).map_err(|violation| violation.0)
}

/// Counts of the runs of all cases with one kind of failure.
#[derive(Debug, Default)]
struct Total {
    runs: u32,
    /// Number of operations that succeeded, and that failed.
    well: u32,
    refused: u32,
    journals_lost: u32,
}

/// Runs all cases with one kind of failure.
fn sweep(failure: Failure) -> Total {
    let (mut total, mut wrong) = (Total::default(), vec![]);
    for operation in OPERATIONS {
        for content in [Content::Dirty, Content::Clean] {
            for copies in [Copies::One, Copies::TwoOfDirty] {
                // The seeds differ in the written data and in the latencies.
                for seed in 0..if content == Content::Dirty { 2 } else { 1 } {
                    let case = Case { operation, content, copies, failure, seed };
                    for nth in 1.. {
                        assert!(nth < CHANGES_MAX, "{case:?} never ends");
                        total.runs += 1;
                        match run(&case, nth) {
                            Ok(injected) if !injected.struck => break,
                            Ok(injected) => {
                                total.journals_lost += injected.journals_lost;
                                total.well += u32::from(injected.ended == Some(Ok(())));
                                total.refused += u32::from(matches!(injected.ended, Some(Err(_))));
                            }
                            Err(violation) => {
                                wrong.push(violation);
                                break;
                            }
                        }
                    }
                }
            }
        }
    }
    println!("{failure:?}: {total:?}");
    assert!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
    total
}

#[test]
fn one_failed_change_of_flash_costs_nothing() {
    let total = sweep(Failure::Once);
    // After a failed flush of its only copy, the journal is lost. The engine must not repeat the
    // flush and then trust the journal.
    assert!(total.runs > 4000 && total.journals_lost > 10, "{total:?}");
}

#[test]
fn a_device_that_refuses_changes_loses_nothing() {
    let total = sweep(Failure::Device);
    assert!(total.runs > 4000 && total.journals_lost > 1000 && total.refused > 100, "{total:?}");
}

#[test]
fn flash_that_refuses_all_changes_loses_nothing() {
    let total = sweep(Failure::Everywhere);
    assert!(total.runs > 4000 && total.journals_lost > 1000 && total.refused > 100, "{total:?}");
}

/// If any I/O of the backing fails, the disk can still be removed, and flash has the acknowledged
/// data.
#[test]
fn a_disk_that_loses_its_backing_can_be_removed_and_loses_nothing() {
    for failure in [Failure::Backing, Failure::TakenOver] {
        let mut struck = 0;
        for content in [Content::Dirty, Content::Clean] {
            for copies in [Copies::One, Copies::TwoOfDirty] {
                for seed in 0..8 {
                    let case = Case { operation: Operation::RemoveDisk, content, copies, failure, seed };
                    for nth in 1.. {
                        let injected = run(&case, nth).unwrap_or_else(|violation| panic!("{violation}"));
                        if !injected.struck {
                            break;
                        }
                        assert_eq!(injected.ended, Some(Ok(())), "{case:?} at {nth}");
                        struck += 1;
                    }
                }
            }
        }
        assert!(struck >= 64, "{failure:?}: only {struck}");
    }
}

/// Dirty data can be discarded while the backing fails, and a cache without dirty data can be
/// disabled.
#[test]
fn dirty_data_is_discarded_and_a_clean_cache_disabled_while_the_backing_fails() {
    let mut struck = 0;
    for (operation, content) in [
        (Operation::DiscardDirty, Content::Dirty),
        (Operation::DiscardDirty, Content::Clean),
        (Operation::Disable, Content::Clean),
    ] {
        for copies in [Copies::One, Copies::TwoOfDirty] {
            for seed in 0..8 {
                let case = Case { operation, content, copies, failure: Failure::Backing, seed };
                for nth in 1.. {
                    let injected = run(&case, nth).unwrap_or_else(|violation| panic!("{violation}"));
                    if !injected.struck {
                        break;
                    }
                    assert_eq!(injected.ended, Some(Ok(())), "{case:?} at {nth}");
                    struck += 1;
                }
            }
        }
    }
    assert!(struck >= 96, "only {struck}");
}

#[test]
fn a_power_cut_at_any_change_of_flash_loses_nothing_that_was_flushed() {
    let total = sweep(Failure::PowerCut);
    assert!(total.runs > 4000 && total.journals_lost == 0, "{total:?}");
}

/// Runs every operation with two copies of dirty data. One write or flush of flash fails, and the
/// device loses data. Returns the number of runs, and the violations. `Double` is left out: it
/// starts with one copy, whose loss it can only report.
fn lose_one_of_two_copies(options: &Options) -> (u32, Vec<String>) {
    let (mut runs, mut violations) = (0, vec![]);
    for operation in OPERATIONS.into_iter().filter(|operation| *operation != Operation::Double) {
        let failure = Failure::OnceWithLoss;
        let case = Case { operation, content: Content::Dirty, copies: Copies::TwoOfDirty, failure, seed: 0 };
        for nth in 1..CHANGES_MAX {
            runs += 1;
            match inject(&case, nth, options) {
                Ok(injected) if !injected.struck => break,
                Ok(_) => {}
                Err(violation) => violations.push(violation.0),
            }
        }
    }
    (runs, violations)
}

#[test]
fn a_device_that_loses_data_at_a_failed_flush_costs_nothing_with_two_copies() {
    let (runs, violations) = lose_one_of_two_copies(&Options::default());
    assert!(runs > 500, "only {runs}");
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

#[test]
fn an_ignored_flush_error_of_flash_is_noticed() {
    let options = Options { sabotage: Some(Sabotage::TrustedFlashFlush), ..Options::default() };
    let (_, violations) = lose_one_of_two_copies(&options);
    println!("{} runs with a believed flush lost data, such as: {:?}", violations.len(), violations.first());
    assert!(!violations.is_empty(), "the checker does not see a flush of flash that failed and is believed");
}

#[test]
fn a_cache_that_shrinks_without_its_backing_accepts_every_write() {
    for seed in 0..40 {
        for copies in [Copies::One, Copies::TwoOfDirty] {
            for cut_after in (1..=8).map(Some).chain([None]) {
                let shrunk = shrink_in_outage(seed, copies, cut_after, &Options::default());
                shrunk.unwrap_or_else(|violation| panic!("{}", violation.0));
            }
        }
    }
}

#[test]
fn a_segment_that_is_given_back_while_it_holds_dirty_data_is_noticed() {
    let options = Options { sabotage: Some(Sabotage::EarlyGift), ..Options::default() };
    let tried = (0..40).map(|seed| shrink_in_outage(seed, Copies::One, Some(4), &options));
    let violations: Vec<String> = tried.filter_map(|tried| Some(tried.err()?.0)).collect();
    println!("{} of 40 noticed, such as: {:?}", violations.len(), violations.first());
    assert!(violations.len() > 10, "{violations:?}");
}
