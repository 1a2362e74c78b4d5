//! Log of a test run, with one JSON object per line, and the violations of the run.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde_json::{Value, json};

/// Log of a test run; see the module documentation.
#[derive(Debug)]
pub struct Journal {
    start: Instant,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: Option<BufWriter<File>>,
    /// Faults of the current round, newest last: time in milliseconds since the start of the run,
    /// and description.
    faults: Vec<(u64, String)>,
    violations: Vec<Violation>,
    /// Number of violations in the current round, by kind and by the guest that saw them, or `hob`.
    counts: BTreeMap<(&'static str, String), u64>,
    total: usize,
    round: u64,
}

/// A violated guarantee.
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
            violations: Vec::new(),
            counts: BTreeMap::new(),
            total: 0,
            round: 0,
        };
        Ok(Self { start: Instant::now(), inner: Mutex::new(inner) })
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
        let mut inner = self.lock();
        inner.round = round;
        inner.faults.clear();
        inner.counts.clear();
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
        let known = {
            let mut inner = self.lock();
            inner.total += 1;
            let known = inner.counts.entry((kind, subject.to_owned())).or_default();
            *known += 1;
            *known
        };
        if known > REPORTED_MAX {
            return;
        }
        let fields = json!({ "kind": kind, "subject": subject, "what": what, "evidence": evidence });
        self.line("violation", fields);
        let mut inner = self.lock();
        let from = inner.faults.len().saturating_sub(FAULTS_SHOWN);
        evidence.extend(inner.faults[from..].iter().map(|(at, fault)| format!("{at} ms: fault: {fault}")));
        let (round, subject, what) = (inner.round, subject.to_owned(), what.to_owned());
        inner.violations.push(Violation { round, kind, subject, what, evidence });
    }

    /// Returns the number of violations so far.
    #[must_use]
    pub fn violation_count(&self) -> usize {
        self.lock().total
    }

    /// Returns the violations that have evidence.
    #[must_use]
    pub fn violations(&self) -> Vec<Violation> {
        self.lock().violations.clone()
    }
}
