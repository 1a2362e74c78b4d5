//! Log of a test run, with one JSON object per line, and the violations of the run.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::lateness::{Lateness, TimeLimit};

/// Log of a test run; see the module documentation.
#[derive(Debug)]
pub struct Journal {
    start: Instant,
    /// Delays of the test's own threads: the watchdog and the guests.
    own: Arc<Lateness>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: Option<BufWriter<File>>,
    /// Faults of the current round, newest last: time in milliseconds since the start of the run,
    /// and description.
    faults: Vec<(u64, String)>,
    violations: Findings,
    /// Timing checks that are not judged, because the host was late.
    not_judged: Findings,
    /// Delays of the servers and files of the current round, by name.
    servers: Vec<(String, Arc<Lateness>)>,
    /// Largest delay in the past rounds.
    largest_delay: Duration,
    round: u64,
}

/// Failed checks of one sort.
#[derive(Debug, Default)]
struct Findings {
    reported: Vec<Violation>,
    /// Number of failed checks in the current round, by kind and by the guest that saw them, or
    /// `hob`.
    counts: BTreeMap<(&'static str, String), u64>,
    total: usize,
}

impl Findings {
    /// Counts a failed check. Returns true if the check is reported with its evidence.
    fn count(&mut self, kind: &'static str, subject: &str) -> bool {
        self.total += 1;
        let known = self.counts.entry((kind, subject.to_owned())).or_default();
        *known += 1;
        *known <= REPORTED_MAX
    }
}

/// A violated guarantee, or a timing check that is not judged.
#[derive(Debug, Clone)]
pub struct Violation {
    /// Number of the round.
    pub round: u64,
    /// Kind of the violated guarantee, in one word.
    pub kind: &'static str,
    /// Name of the guest that saw the violation, or hob.
    pub subject: String,
    /// Description of the violation.
    pub what: String,
    /// Events before the violation.
    pub evidence: Vec<String>,
}

/// Maximum number of violations with evidence per kind, subject and round. More violations are only
/// counted.
const REPORTED_MAX: u64 = 3;
/// Maximum number of faults in the evidence of a violation.
const FAULTS_SHOWN: usize = 8;

impl Journal {
    /// Creates a log with a file at `path`, or without a file.
    ///
    /// # Errors
    /// Returns errors of the operating system.
    pub fn new(path: Option<&Path>) -> std::io::Result<Self> {
        let file = path.map(File::create).transpose()?.map(BufWriter::new);
        let inner = Inner {
            file,
            faults: Vec::new(),
            violations: Findings::default(),
            not_judged: Findings::default(),
            servers: Vec::new(),
            largest_delay: Duration::ZERO,
            round: 0,
        };
        Ok(Self { start: Instant::now(), own: Arc::default(), inner: Mutex::new(inner) })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the milliseconds since the start of the run.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// Starts a round.
    pub fn begin_round(&self, round: u64) {
        let largest_delay = self.largest_delay();
        let mut inner = self.lock();
        inner.round = round;
        inner.faults.clear();
        inner.violations.counts.clear();
        inner.not_judged.counts.clear();
        inner.servers.clear();
        inner.largest_delay = largest_delay;
    }

    /// Returns the record of the delays of the test's own threads.
    #[must_use]
    pub fn own_lateness(&self) -> &Arc<Lateness> {
        &self.own
    }

    /// Considers the delays of a server or file in the timing checks of the current round.
    pub fn watch(&self, name: &str, lateness: &Arc<Lateness>) {
        self.lock().servers.push((name.to_owned(), Arc::clone(lateness)));
    }

    /// Returns the largest delay of the run so far.
    #[must_use]
    pub fn largest_delay(&self) -> Duration {
        let inner = self.lock();
        let largest = inner.servers.iter().map(|(_, lateness)| lateness.largest()).max();
        largest.unwrap_or_default().max(self.own.largest()).max(inner.largest_delay)
    }

    /// Adds an event to the log.
    pub fn line(&self, event: &str, mut fields: Value) {
        let now = self.now();
        let mut inner = self.lock();
        let round = inner.round;
        if let Some(object) = fields.as_object_mut() {
            object.insert("ms".to_owned(), json!(now));
            object.insert("event".to_owned(), json!(event));
            object.insert("round".to_owned(), json!(round));
        }
        if let Some(file) = &mut inner.file {
            // Errors of the log file are ignored.
            let _ = writeln!(file, "{fields}");
            let _ = file.flush();
        }
    }

    /// Logs an injected fault.
    pub fn fault(&self, what: &str) {
        let now = self.now();
        self.lock().faults.push((now, what.to_owned()));
        self.line("fault", json!({ "what": what }));
    }

    /// Logs a violation that `subject` has seen.
    pub fn violation(&self, kind: &'static str, subject: &str, what: &str, mut evidence: Vec<String>) {
        if !self.lock().violations.count(kind, subject) {
            return;
        }
        let fields = json!({ "kind": kind, "subject": subject, "what": what, "evidence": evidence });
        self.line("violation", fields);
        let mut inner = self.lock();
        let from = inner.faults.len().saturating_sub(FAULTS_SHOWN);
        evidence.extend(inner.faults[from..].iter().map(|(at, fault)| format!("{at} ms: fault: {fault}")));
        let (round, subject, what) = (inner.round, subject.to_owned(), what.to_owned());
        inner.violations.reported.push(Violation { round, kind, subject, what, evidence });
    }

    /// Logs that a time limit was exceeded, as `subject` has seen. This is a violation unless the
    /// host was late by more than a quarter of the limit ([`TimeLimit::tolerated`]).
    pub fn timeout(
        &self,
        kind: &'static str,
        subject: &str,
        what: &str,
        mut evidence: Vec<String>,
        checked: TimeLimit,
    ) {
        let (name, late) = self.late(checked.since, Instant::now());
        let late_s = late.as_secs_f64();
        if late <= checked.tolerated() {
            evidence.push(format!("the host was late by at most {late_s:.3} s ({name})"));
            return self.violation(kind, subject, what, evidence);
        }
        if !self.lock().not_judged.count(kind, subject) {
            return;
        }
        let what = format!("{what}; not judged, the host was late by {late_s:.1} s ({name})");
        let fields = json!({ "kind": kind, "subject": subject, "what": what, "evidence": evidence });
        self.line("not-judged", fields);
        let mut inner = self.lock();
        let (round, subject) = (inner.round, subject.to_owned());
        inner.not_judged.reported.push(Violation { round, kind, subject, what, evidence });
    }

    /// Returns the largest delay between two times, and the name of the thread or server that was
    /// late.
    fn late(&self, from: Instant, to: Instant) -> (String, Duration) {
        let mut largest = ("a thread of the test".to_owned(), self.own.within(from, to));
        for (name, lateness) in &self.lock().servers {
            let late = lateness.within(from, to);
            if late > largest.1 {
                largest = (name.clone(), late);
            }
        }
        largest
    }

    /// Returns the number of violations so far.
    #[must_use]
    pub fn violation_count(&self) -> usize {
        self.lock().violations.total
    }

    /// Returns the violations that have evidence.
    #[must_use]
    pub fn violations(&self) -> Vec<Violation> {
        self.lock().violations.reported.clone()
    }

    /// Returns the number of timing checks so far that are not judged.
    #[must_use]
    pub fn not_judged_count(&self) -> usize {
        self.lock().not_judged.total
    }

    /// Returns the timing checks that are not judged and have evidence.
    #[must_use]
    pub fn not_judged(&self) -> Vec<Violation> {
        self.lock().not_judged.reported.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(100);

    /// Reports an exceeded limit after a server was late by this time.
    fn exceed(late: Duration) -> Journal {
        let journal = Journal::new(None).unwrap();
        let server = Arc::new(Lateness::default());
        journal.watch("server of d0", &server);
        let now = Instant::now();
        let since = now.checked_sub(late).expect("the host has run for longer");
        let task = server.task(since);
        journal.timeout("hang", "d1.0", "no answer", Vec::new(), TimeLimit { since, limit: LIMIT });
        drop(task);
        assert!(journal.largest_delay() >= now - since);
        journal
    }

    #[test]
    fn a_limit_is_judged_unless_the_host_was_late() {
        // The host was late by a small part of the limit.
        let judged = exceed(Duration::from_secs(1));
        assert_eq!((judged.violation_count(), judged.not_judged_count()), (1, 0));
        let evidence = judged.violations().remove(0).evidence;
        assert!(evidence[0].contains("server of d0"), "{evidence:?}");

        let not_judged = exceed(Duration::from_secs(26));
        assert_eq!((not_judged.violation_count(), not_judged.not_judged_count()), (0, 1));
        let what = not_judged.not_judged().remove(0).what;
        assert!(what.contains("the host was late by 2"), "{what}");
    }

    #[test]
    fn delays_before_the_check_and_of_earlier_rounds_do_not_count() {
        let (journal, server) = (Journal::new(None).unwrap(), Arc::new(Lateness::default()));
        journal.watch("server", &server);
        drop(server.task(Instant::now().checked_sub(Duration::from_secs(30)).expect("the host has run")));
        let checked = TimeLimit { since: Instant::now(), limit: LIMIT };
        journal.timeout("hang", "d1.0", "no answer", Vec::new(), checked);
        assert_eq!(journal.violation_count(), 1);

        journal.begin_round(1);
        let checked = TimeLimit { since: checked.since - Duration::from_secs(30), limit: LIMIT };
        journal.timeout("hang", "d1.0", "no answer", Vec::new(), checked);
        assert_eq!((journal.violation_count(), journal.not_judged_count()), (2, 0));
        assert!(journal.largest_delay() >= Duration::from_secs(30));
    }

    #[test]
    fn other_checks_do_not_depend_on_the_host() {
        let journal = exceed(Duration::from_secs(26));
        journal.violation("contents", "d1.0", "a lost write", Vec::new());
        assert_eq!((journal.violation_count(), journal.not_judged_count()), (1, 1));
    }
}
