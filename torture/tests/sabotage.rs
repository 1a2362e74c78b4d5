//! Tests of the harness: guests use its server directly, without hob. An honest server causes no violation;
//! each defect is detected.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use torture::behaviour::{Failing, Operation};
use torture::guest::{Guest, Habits, Shared};
use torture::journal::{Journal, Violation};
use torture::lateness::{Lateness, Task};
use torture::link::Endpoint;
use torture::medium::{Medium, Sabotage};
use torture::model::Model;
use torture::server::Server;
use torture::stamp::{Origin, UNIT};

const BYTES: u64 = 2 << 20;
const HABITS: Habits = Habits {
    flush_once_in: 20,
    fua_of_ten: 1,
    reads_of_ten: 3,
    pause_us_max: 100,
    headers: true,
    shares_disk: false,
    backing_timeout: None,
};

struct Bench {
    _dir: tempfile::TempDir,
    server: Server,
    shared: Arc<Shared>,
    journal: Arc<Journal>,
    thread: std::thread::JoinHandle<()>,
}

impl Bench {
    fn new(sabotage: Option<Sabotage>) -> Self {
        Self::with_timeout(sabotage, None)
    }

    fn with_timeout(sabotage: Option<Sabotage>, backing_timeout: Option<Duration>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut medium = Medium::new(BYTES, 3);
        medium.sabotage = sabotage;
        let socket = dir.path().join("server.sock");
        let server = Server::start(&socket, medium, true).unwrap();
        let journal = Arc::new(Journal::new(None::<&Path>).unwrap());
        let model = Model::new(Origin { run: 9, disk: 1 }, 0, BYTES / UNIT as u64);
        let shared = Shared::new("guest".to_owned(), model);
        let endpoint = Endpoint::Nbd { socket, export: "x".to_owned() };
        let life = Arc::new(AtomicU64::new(1));
        let habits = Habits { backing_timeout, ..HABITS };
        let guest = Guest::new(Arc::clone(&shared), endpoint, Arc::clone(&journal), life, 5, habits);
        let thread = std::thread::spawn(move || guest.live());
        Self { _dir: dir, server, shared, journal, thread }
    }

    /// Waits until `requests` more requests were answered.
    fn load(&self, requests: u64) {
        let answered = || self.shared.counts.requests.load(Ordering::Relaxed);
        let (before, start) = (answered(), Instant::now());
        while answered() < before + requests {
            assert!(start.elapsed() < Duration::from_secs(60), "the guest is not served");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Makes the server lose its cached data. The guest sees only that the connection ended.
    fn crash(&self) {
        self.shared.model().withdraw();
        self.server.crash(Duration::from_millis(5));
        self.shared.model().withdraw();
    }

    /// Makes the host late until the returned task is dropped.
    fn delay_host(&self) -> Task {
        let lateness = Arc::new(Lateness::default());
        self.journal.watch("a late server", &lateness);
        lateness.task(Instant::now())
    }

    fn finish(self) -> Vec<Violation> {
        self.server.heal();
        self.shared.finish();
        self.thread.join().unwrap();
        self.journal.violations()
    }
}

fn found(sabotage: Option<Sabotage>) -> Vec<Violation> {
    let bench = Bench::new(sabotage);
    for _ in 0..4 {
        bench.load(400);
        bench.crash();
    }
    bench.finish()
}

#[test]
fn a_correct_server_violates_no_guarantee() {
    let violations = found(None);
    assert!(violations.is_empty(), "{violations:#?}");
}

#[test]
fn every_defect_is_noticed() {
    use clap::ValueEnum;
    for sabotage in Sabotage::value_variants() {
        let violations = found(Some(*sabotage));
        assert!(
            violations.iter().any(|it| it.kind == "contents"),
            "{sabotage:?} is not noticed: {violations:#?}"
        );
    }
}

/// A server loses data without reporting an error. The checks must notice that the next flush did not
/// fail.
#[test]
fn a_loss_without_a_failed_flush_is_noticed() {
    let bench = Bench::new(None);
    for _ in 0..4 {
        bench.load(400);
        bench.shared.model().loss(Instant::now());
        bench.server.crash(Duration::from_millis(5));
        bench.shared.model().loss(Instant::now());
    }
    let violations = bench.finish();
    assert!(violations.iter().any(|it| it.kind == "contents"), "{violations:#?}");
}

/// A failed flush that loses data is permitted, because the guest gets the error.
#[test]
fn a_failed_flush_takes_the_promise_back() {
    let bench = Bench::new(None);
    let shared = Arc::clone(&bench.shared);
    bench.server.behaviour().on_loss(Box::new(move || shared.model().loss(Instant::now())));
    for _ in 0..4 {
        bench.load(300);
        bench.server.behaviour().lose_at_flush();
        bench.load(100);
    }
    assert!(bench.shared.counts.flushes_failed.load(Ordering::Relaxed) > 0);
    let violations = bench.finish();
    assert!(violations.is_empty(), "{violations:#?}");
}

#[test]
fn errors_without_a_cause_are_noticed_and_with_one_are_not() {
    let fail = |excused: bool| {
        let bench = Bench::new(None);
        bench.load(50);
        if excused {
            bench.shared.excuse(Duration::from_secs(3600));
        }
        // `finish` ends the fault.
        let until = Instant::now() + Duration::from_secs(3600);
        let failing = Failing { operation: Operation::Write, range: 0..BYTES, error: 5, until };
        bench.server.behaviour().fail(failing);
        bench.load(200);
        bench.finish()
    };
    assert!(fail(false).iter().any(|it| it.kind == "unexpected-error"));
    let violations = fail(true);
    assert!(violations.is_empty(), "{violations:#?}");
}

/// Fails requests after more than a second, as a daemon does after its backing timeout. Returns the
/// journal and the number of requests that failed.
fn time_out(backing_timeout: Duration, is_host_late: bool) -> (Arc<Journal>, u64) {
    let bench = Bench::with_timeout(None, Some(backing_timeout));
    bench.load(50);
    let late = is_host_late.then(|| bench.delay_host());
    let until = Instant::now() + Duration::from_secs(3600);
    bench.server.behaviour().slow(Duration::from_millis(1200), Duration::from_secs(3600));
    // Requests that the server has already begun succeed.
    std::thread::sleep(Duration::from_millis(300));
    for operation in [Operation::Read, Operation::Write, Operation::Flush, Operation::Trim] {
        bench.server.behaviour().fail(Failing { operation, range: 0..BYTES, error: 5, until });
    }
    bench.load(16);
    bench.server.behaviour().heal();
    let (journal, shared) = (Arc::clone(&bench.journal), Arc::clone(&bench.shared));
    bench.finish();
    drop(late);
    (journal, shared.counts.errors.load(Ordering::Relaxed))
}

#[test]
fn a_timeout_is_a_violation_if_the_host_was_not_late() {
    // The test's host would have to be late by a quarter of this time.
    let (journal, errors) = time_out(Duration::from_secs(3600), false);
    assert!(errors > 0);
    assert!(journal.violations().iter().any(|it| it.kind == "unexpected-error"), "{journal:?}");
    assert_eq!(journal.not_judged_count(), 0, "{journal:?}");
}

#[test]
fn a_timeout_is_not_judged_if_the_host_was_late() {
    let (journal, errors) = time_out(Duration::from_secs(2), true);
    assert!(errors > 0);
    assert!(journal.violations().is_empty(), "{journal:?}");
    assert_eq!(journal.not_judged_count() as u64, errors, "{journal:?}");
}

#[test]
fn wrong_content_is_a_violation_although_the_host_was_late() {
    let bench = Bench::new(Some(Sabotage::LostWrite));
    let late = bench.delay_host();
    bench.load(1000);
    let violations = bench.finish();
    drop(late);
    assert!(violations.iter().any(|it| it.kind == "contents"), "{violations:#?}");
}

/// A server that the host does not run in time is late. An injected delay does not make it late.
#[test]
fn a_server_measures_the_delays_of_the_host_only() {
    let bench = Bench::new(None);
    bench.load(50);
    let lateness = Arc::clone(bench.server.behaviour().lateness());
    bench.server.behaviour().hang(Duration::from_secs(4));
    bench.load(50);
    assert!(lateness.largest() < Duration::from_secs(2), "{lateness:?}");

    // The server's threads wait for its medium.
    let (medium, start) = (bench.server.medium(), Instant::now());
    while lateness.within(start, Instant::now()) < Duration::from_millis(200) {
        assert!(start.elapsed() < Duration::from_secs(60), "no request is late");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(medium);
    bench.load(50);
    assert!(lateness.largest() >= Duration::from_millis(200), "{lateness:?}");
    let violations = bench.finish();
    assert!(violations.is_empty(), "{violations:#?}");
}
