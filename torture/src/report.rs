//! Report of a test run for users.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::guest::Counts;
use crate::journal::{Journal, Violation};
use crate::link::{Operation, Protocol};

/// Sums over all rounds of a run.
#[derive(Debug, Default)]
pub struct Totals {
    /// Number of completed rounds.
    pub rounds: u64,
    requests: u64,
    /// Number of answered requests of each protocol and operation.
    operations: [[u64; Operation::NAMES.len()]; Protocol::NAMES.len()],
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
        for (sums, of_guest) in self.operations.iter_mut().zip(&counts.operations) {
            sums.iter_mut().zip(of_guest).for_each(|(sum, counter)| *sum += get(counter));
        }
        self.bytes_checked += get(&counts.bytes_checked);
        self.flushes += get(&counts.flushes);
        self.errors += get(&counts.errors);
        self.flushes_failed += get(&counts.flushes_failed);
        self.connections += get(&counts.connections);
    }

    /// Returns a progress report in one line.
    #[must_use]
    pub fn line(&self, elapsed: Duration, journal: &Journal) -> String {
        let not_judged = match journal.not_judged_count() {
            0 => String::new(),
            count => format!(", {count} checks not judged"),
        };
        format!(
            "{:>5} s  round {}: {} requests, {} MiB compared, {} faults, {} violations{not_judged}",
            elapsed.as_secs(),
            self.rounds,
            self.requests,
            self.bytes_checked >> 20,
            self.faults.values().sum::<u64>(),
            journal.violation_count(),
        )
    }

    /// Returns one line for each operation, with the number of answered requests of each protocol.
    fn operations(&self) -> String {
        let line = |(at, name): (usize, &&str)| {
            let of =
                |(number, protocol): (usize, &&str)| format!("{} {protocol}", self.operations[number][at]);
            let counts: Vec<String> = Protocol::NAMES.iter().enumerate().map(of).collect();
            format!("  {name:<20}{}\n", counts.join(", "))
        };
        Operation::NAMES.iter().enumerate().map(line).collect()
    }

    /// Returns the report of a run for users. `journal` has the violations of the run.
    #[must_use]
    pub fn report(&self, journal: &Journal) -> String {
        let mut text = format!(
            "rounds                {}\nrequests answered     {}\n{}compared              {} MiB\n\
             successful flushes    {}\nrequests that failed  {} ({} flushes)\nconnections           {}\nfaults\n",
            self.rounds,
            self.requests,
            self.operations(),
            self.bytes_checked >> 20,
            self.flushes,
            self.errors,
            self.flushes_failed,
            self.connections,
        );
        for (name, count) in &self.faults {
            text += &format!("  {count:>6}  {name}\n");
        }
        text += &format!(
            "host late by at most  {:.3} s\ntiming not judged     {}\n",
            journal.largest_delay().as_secs_f64(),
            journal.not_judged_count(),
        );
        for Violation { round, kind, subject, what, .. } in &journal.not_judged() {
            text += &format!("  round {round}: {kind}: {subject}: {what}\n");
        }
        text += &format!("violations            {}\n", journal.violation_count());
        for Violation { round, kind, subject, what, evidence } in &journal.violations() {
            text += &format!("\nround {round}: {kind}: {subject}: {what}\n");
            for line in evidence {
                text += &format!("    {line}\n");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;
    use crate::lateness::{Lateness, TimeLimit};

    #[test]
    fn the_report_lists_each_operation_of_each_protocol() {
        let counts = Counts::default();
        for (protocol, operation, count) in [
            (Protocol::Nbd, Operation::Read, 7),
            (Protocol::Nbd, Operation::Discard, 2),
            (Protocol::VhostUser, Operation::Read, 3),
            (Protocol::VhostUser, Operation::Flush, 1),
        ] {
            counts.operations[protocol as usize][operation as usize].store(count, Ordering::Relaxed);
        }
        let mut totals = Totals::default();
        totals.add(&counts);
        totals.add(&counts);
        let report = totals.report(&Journal::new(None).unwrap());
        for line in [
            "  reads               14 NBD, 6 vhost-user",
            "  writes              0 NBD, 0 vhost-user",
            "  zeroes              0 NBD, 0 vhost-user",
            "  discards            4 NBD, 0 vhost-user",
            "  flushes             0 NBD, 2 vhost-user",
        ] {
            assert!(report.lines().any(|found| found == line), "{line}: {report}");
        }
    }

    #[test]
    fn the_report_counts_the_checks_that_are_not_judged() {
        let journal = Journal::new(None).unwrap();
        let lateness = Arc::new(Lateness::default());
        journal.watch("server of d0", &lateness);
        let now = Instant::now();
        let since = now.checked_sub(Duration::from_secs(40)).expect("the host has run for longer");
        let _task = lateness.task(since);
        let checked = TimeLimit { since, limit: Duration::from_secs(60) };
        journal.timeout("hang", "d1.0", "no answer for a minute", Vec::new(), checked);

        let line = Totals::default().line(Duration::ZERO, &journal);
        assert!(line.ends_with("0 violations, 1 checks not judged"), "{line}");
        let report = Totals::default().report(&journal);
        for line in ["timing not judged     1", "violations            0"] {
            assert!(report.lines().any(|found| found == line), "{line}: {report}");
        }
        assert!(report.contains("hang: d1.0: no answer for a minute; not judged"), "{report}");
    }
}
