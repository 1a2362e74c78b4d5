//! Error injection in OCF's manner: the first, second, third … write or flush of flash of every operation on a persistent
//! cache fails, until there is none left; after each, the cache serves on, crashes, is recovered and compared with the
//! model. `HOB_TRACE=1` tells what crosses the engine's boundary, with `HOB_INJECT=OPERATION/NTH` of that one only.

use hob_engine::command::Copies;
use hob_world::sim::{Case, Content, Failure, OPERATIONS, Options, inject};

/// No operation has more writes and flushes, guests' included.
const CHANGES_MAX: u32 = 400;

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
                        match inject(&case, nth, &Options::default()) {
                            Ok(injected) if !injected.struck => break,
                            Ok(injected) => lost += injected.journals_lost,
                            Err(violation) => {
                                wrong.push(violation.0);
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
