//! Report of a replay.
//!
//! Histograms of latencies and lateness have three significant digits, so percentiles and means
//! have an error of at most 0.1 %. Maxima are exact. Values above an hour count as an hour.

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::driver::Done;

/// Kinds of requests, in the order of [`Op`](hob_trace::Op).
const CLASSES: [&str; 4] = ["read", "write", "discard", "flush"];

/// Maximum time in histograms, nanoseconds.
const HOUR_NS: u64 = 3_600_000_000_000;

/// Lateness of requests: sending time minus due time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Lateness {
    /// Mean lateness, nanoseconds.
    pub mean_ns: u64,
    /// 99th percentile of the lateness, nanoseconds.
    pub p99_ns: u64,
    /// Maximum lateness, nanoseconds.
    pub max_ns: u64,
}

/// Results of one kind of requests. Latencies include only successful requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Class {
    /// Kind of the requests: `read`, `write`, `discard` or `flush`.
    pub class: &'static str,
    /// Number of answered requests.
    pub requests: u64,
    /// Number of answered requests with an error.
    pub errors: u64,
    /// Number of bytes of successful requests.
    pub bytes: u64,
    /// Mean latency, nanoseconds.
    pub mean_ns: u64,
    /// Median latency, nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile of the latencies, nanoseconds.
    pub p99_ns: u64,
    /// 99.9th percentile of the latencies, nanoseconds.
    pub p999_ns: u64,
    /// Maximum latency, nanoseconds.
    pub max_ns: u64,
}

/// Report of a replay.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Name of the target.
    pub target: String,
    /// Pace of the replay.
    pub pace: String,
    /// Maximum queue depth.
    pub depth: usize,
    /// Number of requests in the trace or in the selected part.
    pub requests: u64,
    /// Number of requests that were not sent: changes and flushes if the user excluded them, and
    /// operations that the target does not support.
    pub left_out: u64,
    /// Number of answered requests.
    pub answered: u64,
    /// Number of replies with an error.
    pub errors: u64,
    /// Description of the first error.
    pub first_error: Option<String>,
    /// True if a stop ended the replay early.
    pub interrupted: bool,
    /// Reason why the replay ended early: the target failed, or the trace became unreadable.
    pub failure: Option<String>,
    /// Time from the first request to the last reply, nanoseconds.
    pub elapsed_ns: u64,
    /// Number of replies per second.
    pub iops: f64,
    /// Lateness of requests; `None` for a pace without due times.
    pub lateness: Option<Lateness>,
    /// Results for each kind of request that was answered.
    pub classes: Vec<Class>,
}

/// Sums over all replies.
pub(super) struct Meter {
    classes: [ClassMeter; CLASSES.len()],
    lateness: Times,
    pub(super) answered: u64,
    errors: u64,
    first_error: Option<String>,
    elapsed_ns: u64,
}

struct ClassMeter {
    requests: u64,
    bytes: u64,
    latency: Times,
}

/// Histogram of times with the exact maximum.
struct Times {
    histogram: Histogram<u64>,
    max_ns: u64,
}

impl Times {
    fn new() -> Times {
        let histogram = Histogram::new_with_bounds(1, HOUR_NS, 3).expect("the bounds are valid");
        Times { histogram, max_ns: 0 }
    }

    fn record(&mut self, ns: u64) {
        self.histogram.saturating_record(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    fn mean_ns(&self) -> u64 {
        self.histogram.mean() as u64
    }

    /// Returns a quantile, limited to the maximum, because a bucket may extend beyond its largest
    /// value.
    fn quantile_ns(&self, share: f64) -> u64 {
        self.histogram.value_at_quantile(share).min(self.max_ns)
    }
}

impl Meter {
    pub(super) fn new() -> Meter {
        Meter {
            classes: std::array::from_fn(|_| ClassMeter { requests: 0, bytes: 0, latency: Times::new() }),
            lateness: Times::new(),
            answered: 0,
            errors: 0,
            first_error: None,
            elapsed_ns: 0,
        }
    }

    pub(super) fn note(&mut self, done: &Done) {
        let access = &done.timed.access;
        let class = &mut self.classes[access.op as usize];
        class.requests += 1;
        match &done.fault {
            None => {
                class.latency.record(done.latency_ns);
                class.bytes += u64::from(access.len);
            }
            Some(fault) => {
                self.errors += 1;
                self.first_error.get_or_insert_with(|| fault.to_string());
            }
        }
        self.lateness.record(done.sent_ns.saturating_sub(done.timed.due_ns));
        self.answered += 1;
        self.elapsed_ns = self.elapsed_ns.max(done.sent_ns + done.latency_ns);
    }

    /// Returns the results of the replies. The caller sets the other fields of the report.
    pub(super) fn report(&self) -> Report {
        let classes = CLASSES.iter().zip(&self.classes).filter(|(_, meter)| meter.requests > 0);
        Report {
            answered: self.answered,
            errors: self.errors,
            first_error: self.first_error.clone(),
            elapsed_ns: self.elapsed_ns,
            iops: self.answered as f64 * 1e9 / self.elapsed_ns.max(1) as f64,
            lateness: Some(Lateness {
                mean_ns: self.lateness.mean_ns(),
                p99_ns: self.lateness.quantile_ns(0.99),
                max_ns: self.lateness.max_ns,
            }),
            classes: classes.map(|(name, meter)| meter.report(name)).collect(),
            ..Report::default()
        }
    }
}

impl ClassMeter {
    fn report(&self, class: &'static str) -> Class {
        let latency = &self.latency;
        Class {
            class,
            requests: self.requests,
            errors: self.requests - latency.histogram.len(),
            bytes: self.bytes,
            mean_ns: latency.mean_ns(),
            p50_ns: latency.quantile_ns(0.5),
            p99_ns: latency.quantile_ns(0.99),
            p999_ns: latency.quantile_ns(0.999),
            max_ns: latency.max_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{Fault, Timed};
    use crate::workload::Access;
    use hob_trace::Op;

    fn done(op: Op, due_ns: u64, sent_ns: u64, latency_ns: u64, fault: Option<Fault>) -> Done {
        let access = Access { offset: 0, len: if op == Op::Flush { 0 } else { 4096 }, op };
        Done { number: 0, timed: Timed { due_ns, access }, sent_ns, latency_ns, fault }
    }

    #[test]
    fn figures_are_those_of_the_answers() {
        let mut meter = Meter::new();
        for i in 1..=1000 {
            meter.note(&done(Op::Read, i * 1_000_000, i * 1_000_000 + i * 10, i * 1_000, None));
        }
        meter.note(&done(Op::Flush, 0, 0, 5_000_000, None));
        let report = meter.report();
        assert_eq!((report.answered, report.errors, report.elapsed_ns), (1001, 0, 1_001_010_000));
        assert_eq!(report.classes.len(), 2);
        let (read, flush) = (&report.classes[0], &report.classes[1]);
        assert_eq!(
            (read.class, read.requests, read.bytes, read.max_ns),
            ("read", 1000, 4_096_000, 1_000_000)
        );
        for (got, exact) in [(read.p50_ns, 500_000), (read.p99_ns, 990_000), (read.p999_ns, 999_000)] {
            assert!(got.abs_diff(exact) <= exact / 1000, "{got} for {exact}");
        }
        assert_eq!((flush.class, flush.requests, flush.bytes), ("flush", 1, 0));
        let lateness = report.lateness.unwrap();
        assert!(
            lateness.mean_ns.abs_diff(5_000) < 10 && lateness.p99_ns.abs_diff(9_900) < 20,
            "{lateness:?}"
        );
    }

    #[test]
    fn errors_count_as_answers_but_not_as_latencies() {
        let mut meter = Meter::new();
        let fault = || Some(Fault::System(std::io::Error::from(std::io::ErrorKind::UnexpectedEof)));
        meter.note(&done(Op::Write, 0, 0, 10_000_000, fault()));
        meter.note(&done(Op::Write, 0, 10, 1_000, None));
        let report = meter.report();
        assert_eq!((report.answered, report.errors), (2, 1));
        assert!(report.first_error.is_some_and(|said| said.contains("end of file")));
        let class = &report.classes[0];
        assert_eq!((class.requests, class.errors, class.bytes), (2, 1, 4096));
        assert_eq!(class.max_ns, 1_000);
    }

    #[test]
    fn nothing_answered_is_a_report_too() {
        let report = Meter::new().report();
        assert_eq!((report.answered, report.iops, report.classes.len()), (0, 0.0, 0));
    }
}
