//! Random histories of the engine. `HOB_SEED=n` replays the history of seed n, and `HOB_SEEDS=n`
//! runs n histories. SYSTEMS is the project's description of other systems, outside this
//! repository.

use hob_engine::outcome::{OUTCOMES, Outcome};
use hob_world::sim::{Options, Report, run};

/// Number of histories per run of this test.
const HISTORIES: u64 = 13_000;

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

#[test]
fn random_histories_keep_every_promise() {
    let options = Options::default();
    let seeds = match from_env("HOB_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..from_env("HOB_SEEDS").unwrap_or(HISTORIES),
    };
    let mut total = Report::default();
    for seed in seeds.clone() {
        let _named = Named(seed);
        match run(seed, &options) {
            Ok(report) => total.add(&report),
            Err(violation) => panic!("{}", violation.0),
        }
    }
    let histories = seeds.end - seeds.start;
    println!("{histories} histories: {total:?}");
    if histories >= HISTORIES {
        check_coverage(&total);
    }
}

/// Checks that every outcome and event occurred often enough.
fn check_coverage(total: &Report) {
    const OF_OTHER_HISTORIES: [Outcome; 7] = [
        // Only disks that move between hosts have this outcome.
        Outcome::BypassStandby,
        // Only persistent caches have these outcomes.
        Outcome::WriteBack,
        Outcome::FlushCommitted,
        Outcome::BypassMode,
        Outcome::BypassRecovering,
        Outcome::BypassUnverified,
        Outcome::DirtyLost,
    ];
    for (row, count) in OUTCOMES.iter().zip(total.outcomes) {
        if OF_OTHER_HISTORIES.contains(&row.outcome) {
            continue;
        }
        assert!(count >= 1000, "{:?} only {count} times", row.outcome);
    }
    for (name, count) in [
        ("handed back", total.handed_back),
        ("commands", total.commands),
        ("fences", total.fences),
        ("losses", total.losses),
        ("stalls", total.stalls),
        ("resumptions", total.resumptions),
        ("evictions", total.evictions),
        ("copies", total.copies),
        ("growths", total.growths),
        ("hits in guests' memory", total.direct),
        ("declined", total.declined),
        ("power cuts", total.power_cuts),
        ("reads served elsewhere", total.shared),
    ] {
        assert!(count >= 500, "{name} only {count} times");
    }
}

#[test]
fn one_seed_is_one_history() {
    let options = Options { requests: 300, ..Options::default() };
    for seed in 0..20 {
        assert_eq!(run(seed, &options), run(seed, &options));
    }
}

/// A few histories of many requests, for slowly accumulating errors.
#[test]
fn long_histories_keep_every_promise() {
    let options = Options { requests: 5000, ..Options::default() };
    for seed in 1_000_000..1_000_030 {
        let _named = Named(seed);
        if let Err(violation) = run(seed, &options) {
            panic!("{} with 5000 requests", violation.0);
        }
    }
}

/// SYSTEMS §1: "Reliability of the disk is therefore unchanged." With sound backings no guest ever gets an
/// error, whatever flash does.
#[test]
fn flash_faults_alone_never_reach_a_guest() {
    let options = Options { sound_backings: true, ..Options::default() };
    let mut total = Report::default();
    for seed in 2_000_000..2_001_000 {
        let _named = Named(seed);
        total.add(&run(seed, &options).unwrap_or_else(|violation| panic!("{}", violation.0)));
    }
    assert_eq!(total.outcomes[Outcome::BackingError as usize], 0);
    assert!(total.fences > 50 && total.losses > 50);
}
