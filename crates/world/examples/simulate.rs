//! Runs many simulated histories on all cores until one violates a guarantee. A history is one
//! random run of the engine, determined by its seed. `cargo xtask simulate` starts this program.
//!
//! ```text
//! simulate KIND FROM SEEDS MINUTES REQUESTS
//! ```
//!
//! KIND is one of:
//!
//! - `lives`: histories with restarts of the engine;
//! - `sound`: histories with restarts and without device failures;
//! - `flaky`: histories with restarts in which flash devices fail only flushes;
//! - `copies`: histories with restarts in which journals lose one of two copies;
//! - `memory`: histories with restarts and memory tiers;
//! - `qos`: histories with restarts, shares, limits and throttles;
//! - `growth`: histories with restarts and growing disks;
//! - `silent`: histories with restarts and backings that change silently;
//! - `fill`: histories with restarts and caches that fill more than guests read;
//! - `single`: histories without restarts;
//! - `hosts`: several hosts that migrate a disk;
//! - `cluster`: several hosts that decide through etcd which host serves a disk.
//!
//! A value of 0 for MINUTES means no limit. Progress goes to standard error. At the first violation
//! or panic of the engine, the program stops and prints the seed and the command to replay it. If
//! `HOB_TRACE` is set in the environment, the program prints all events that enter or leave the
//! engine.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "it drives many worlds from outside: threads and a clock are its own"
)]

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hob_engine::outcome::OUTCOMES;
use hob_world::sim::{Options, Report, Trace, run};
use hob_world::{Violation, cluster, hosts};

/// Kind of history.
enum Kind {
    One(Options),
    Hosts(hosts::Options),
    Cluster(cluster::Options),
}

/// Total counts of the histories.
#[derive(Default)]
struct Total {
    one: Report,
    hosts: hosts::Report,
    cluster: cluster::Report,
}

impl Kind {
    /// Runs one history.
    fn live(&self, seed: u64, total: &mut Total) -> Result<(), Violation> {
        match self {
            Kind::One(options) => total.one.add(&run(seed, options)?),
            Kind::Hosts(options) => total.hosts.add(&hosts::run(seed, options)?),
            Kind::Cluster(options) => total.cluster.add(&cluster::run(seed, options)?),
        }
        Ok(())
    }

    fn requests(&self) -> u32 {
        match self {
            Kind::One(options) => options.requests,
            Kind::Hosts(options) => options.requests,
            Kind::Cluster(options) => options.requests,
        }
    }
}

/// State shared by all threads.
struct Shared {
    next: AtomicU64,
    end: u64,
    deadline: Option<Instant>,
    done: AtomicU64,
    /// The lowest seed whose history violated a guarantee or panicked, and the reason.
    failed: Mutex<Option<(u64, String)>>,
    total: Mutex<Total>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments.get(at).and_then(|word| word.parse::<u64>().ok());
    let kind = arguments.first().map(String::as_str);
    let (
        Some(
            kind @ ("lives" | "sound" | "flaky" | "copies" | "memory" | "qos" | "growth" | "silent" | "fill"
            | "single" | "hosts" | "cluster"),
        ),
        Some(from),
        Some(seeds),
        Some(minutes),
        Some(requests),
    ) = (kind, number(1), number(2), number(3), number(4))
    else {
        eprintln!(
            "usage: simulate lives|sound|flaky|copies|memory|qos|growth|silent|fill|single|hosts|cluster FROM SEEDS MINUTES REQUESTS"
        );
        return ExitCode::FAILURE;
    };
    let base = match kind {
        "lives" => Options::lives(),
        "sound" => Options { faults: false, ..Options::lives() },
        "flaky" => Options { faults: false, flash_flush_permille: 1000, ..Options::lives() },
        "copies" => Options { copy_loss_permille: 1000, ..Options::lives() },
        "qos" => Options { qos_permille: 1000, ..Options::lives() },
        "silent" => Options { silent_permille: 1000, ..Options::lives() },
        "fill" => Options { fill_permille: 1000, flash_budget_permille: 500, ..Options::lives() },
        "growth" => Options { growth_permille: 1000, ..Options::lives() },
        "memory" => Options { memory_permille: 1000, ..Options::lives() },
        _ => Options::default(),
    };
    let trace: Option<Trace> = std::env::var_os("HOB_TRACE").map(|_| (|line| eprintln!("{line}")) as Trace);
    let requests = u32::try_from(requests).unwrap_or(base.requests).max(1);
    let options = match kind {
        "hosts" => Kind::Hosts(hosts::Options { trace, requests, ..hosts::Options::default() }),
        "cluster" => Kind::Cluster(cluster::Options { trace, requests, ..cluster::Options::default() }),
        _ => Kind::One(Options { trace, requests, ..base }),
    };
    let began = Instant::now();
    let shared = Shared {
        next: AtomicU64::new(from),
        end: from.saturating_add(seeds),
        deadline: (minutes > 0).then(|| began + Duration::from_secs(60 * minutes)),
        done: AtomicU64::new(0),
        failed: Mutex::new(None),
        total: Mutex::new(Total::default()),
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| work(&shared, &options))).collect();
        while !workers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(200));
            progress(&shared, began, from, minutes);
        }
    });
    conclude(&shared, &options, kind, began)
}

/// Runs histories until all of them are done, the time limit is reached, or one of them failed.
fn work(shared: &Shared, options: &Kind) {
    let mut mine = Total::default();
    loop {
        let is_late = shared.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let seed = shared.next.fetch_add(1, Ordering::Relaxed);
        if is_late || seed >= shared.end || shared.failed.lock().expect("no panic inside").is_some() {
            break;
        }
        let lived = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| options.live(seed, &mut mine)));
        match lived {
            Ok(Ok(())) => {}
            Ok(Err(violation)) => fail(shared, seed, violation.0),
            Err(_) => fail(shared, seed, "the engine panicked (see above)".into()),
        }
        shared.done.fetch_add(1, Ordering::Relaxed);
    }
    let mut total = shared.total.lock().expect("no panic inside");
    total.one.add(&mine.one);
    total.hosts.add(&mine.hosts);
    total.cluster.add(&mine.cluster);
}

fn fail(shared: &Shared, seed: u64, what: String) {
    let mut failed = shared.failed.lock().expect("no panic inside");
    if failed.as_ref().is_none_or(|(other, _)| seed < *other) {
        *failed = Some((seed, what));
    }
}

fn progress(shared: &Shared, began: Instant, from: u64, minutes: u64) {
    let done = shared.done.load(Ordering::Relaxed);
    let elapsed = began.elapsed().as_secs_f64();
    let rate = done as f64 / elapsed.max(0.001);
    let by_seeds = (shared.end - from).saturating_sub(done) as f64 / rate.max(0.001);
    let by_time = if minutes > 0 { 60.0 * minutes as f64 - elapsed } else { f64::INFINITY };
    let left = by_seeds.min(by_time).max(0.0);
    if std::io::stderr().is_terminal() {
        eprint!("\r{done} histories, {rate:.0} a second, {left:.0} s left    ");
        let _ = std::io::stderr().flush();
    }
}

fn conclude(shared: &Shared, options: &Kind, kind: &str, began: Instant) -> ExitCode {
    let done = shared.done.load(Ordering::Relaxed);
    let total = shared.total.lock().expect("no panic inside");
    let seconds = began.elapsed().as_secs_f64();
    eprintln!();
    println!("{done} histories of {} requests in {seconds:.1} s", options.requests());
    match options {
        Kind::One(_) => {
            for (row, count) in OUTCOMES.iter().zip(total.one.outcomes) {
                println!("  {count:>12}  {:?}", row.outcome);
            }
            total.one.counts().iter().for_each(|(name, count)| println!("  {count:>12}  {name}"));
        }
        Kind::Hosts(_) => {
            total.hosts.counts().iter().for_each(|(name, count)| println!("  {count:>12}  {name}"));
        }
        Kind::Cluster(_) => {
            total.cluster.counts().iter().for_each(|(name, count)| println!("  {count:>12}  {name}"));
        }
    }
    match &*shared.failed.lock().expect("no panic inside") {
        None => ExitCode::SUCCESS,
        Some((seed, what)) => {
            println!("seed {seed}: {what}");
            println!(
                "again: cargo xtask simulate --kind {kind} --from {seed} --seeds 1 --requests {}",
                options.requests()
            );
            ExitCode::FAILURE
        }
    }
}
