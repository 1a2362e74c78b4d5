//! Error injection in OCF's manner: the first, second, third … write or flush of flash of every operation on a persistent
//! cache fails, until there is none left; after each, the cache serves on, crashes, is recovered and compared with the
//! model. `HOB_INJECT="Grow Dirty One Device 0 12"` (operation, content, copies, failure, seed, which) runs that one only and
//! tells what crosses the engine's boundary.

use hob_engine::command::Copies;
use hob_world::sim::{Case, Content, Failure, Injected, OPERATIONS, Options, Trace, inject};

/// No operation has more writes and flushes, guests' included.
const CHANGES_MAX: u32 = 400;

/// Runs one, unless another one is asked for.
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

fn sweep(failure: Failure) -> (u32, u32) {
    let (mut runs, mut lost, mut wrong) = (0, 0, vec![]);
    for operation in OPERATIONS {
        for content in [Content::Dirty, Content::Clean] {
            for copies in [Copies::One, Copies::TwoOfDirty] {
                for seed in 0..2 {
                    let case = Case { operation, content, copies, failure, seed };
                    for nth in 1.. {
                        assert!(nth < CHANGES_MAX, "{case:?} never ends");
                        runs += 1;
                        match run(&case, nth) {
                            Ok(injected) if !injected.struck => break,
                            Ok(injected) => lost += injected.journals_lost,
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
    println!("{failure:?}: {runs} runs, {lost} journals lost");
    assert!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
    (runs, lost)
}

#[test]
fn one_failed_change_of_flash_costs_nothing() {
    let (runs, lost) = sweep(Failure::Once);
    assert_eq!(lost, 0);
    assert!(runs > 1000, "{runs}");
}

#[test]
fn a_device_that_refuses_changes_loses_nothing() {
    sweep(Failure::Device);
}

#[test]
fn flash_that_refuses_all_changes_loses_nothing() {
    sweep(Failure::Everywhere);
}

#[test]
fn a_power_cut_at_any_change_of_flash_loses_nothing_that_was_flushed() {
    sweep(Failure::PowerCut);
}
