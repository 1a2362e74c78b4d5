//! Report of a test run for users.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::guest::Counts;
use crate::journal::Violation;

/// Sums over all rounds of a run.
#[derive(Debug, Default)]
pub struct Totals {
    /// Number of completed rounds.
    pub rounds: u64,
    requests: u64,
    bytes_checked: u64,
    flushes: u64,
    errors: u64,
    flushes_failed: u64,
    connections: u64,
    faults: BTreeMap<&'static str, u64>,
}

impl Totals {
    /// Counts an injected fault.
    pub fn fault(&mut self, name: &'static str) {
        *self.faults.entry(name).or_default() += 1;
    }

    /// Adds a guest's counters.
    pub fn add(&mut self, counts: &Counts) {
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        self.requests += get(&counts.requests);
        self.bytes_checked += get(&counts.bytes_checked);
        self.flushes += get(&counts.flushes);
        self.errors += get(&counts.errors);
        self.flushes_failed += get(&counts.flushes_failed);
        self.connections += get(&counts.connections);
    }

    /// Returns a progress report in one line.
    #[must_use]
    pub fn line(&self, elapsed: Duration, violations: usize) -> String {
        format!(
            "{:>5} s  round {}: {} requests, {} MiB compared, {} faults, {violations} violations",
            elapsed.as_secs(),
            self.rounds,
            self.requests,
            self.bytes_checked >> 20,
            self.faults.values().sum::<u64>(),
        )
    }

    /// Returns the report of a run for users. `count` is the number of violations; `violations` has
    /// those with evidence.
    #[must_use]
    pub fn report(&self, count: usize, violations: &[Violation]) -> String {
        let mut text = format!(
            "rounds                {}\nrequests answered     {}\ncompared              {} MiB\n\
             successful flushes    {}\nrequests that failed  {} ({} flushes)\nconnections           {}\nfaults\n",
            self.rounds,
            self.requests,
            self.bytes_checked >> 20,
            self.flushes,
            self.errors,
            self.flushes_failed,
            self.connections,
        );
        for (name, count) in &self.faults {
            text += &format!("  {count:>6}  {name}\n");
        }
        text += &format!("violations            {count}\n");
        for Violation { round, kind, subject, what, evidence } in violations {
            text += &format!("\nround {round}: {kind}: {subject}: {what}\n");
            for line in evidence {
                text += &format!("    {line}\n");
            }
        }
        text
    }
}
