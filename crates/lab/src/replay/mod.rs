//! Replays a trace in real time: sends each request to a real disk at its time in the trace.
//!
//! A [`Survey`] first reads the whole trace. [`replay`] checks that the trace fits the target and
//! that its writes are permitted ([`Changes`]), reads the trace a second time, and sends the
//! requests. Memory does not grow with the trace. A request is due at its time since the first
//! request, divided by the factor of the [`Pace`]. If `depth` requests are in flight, the next
//! request waits for a reply and is then sent late. The [`Report`] has the lateness of requests. On
//! an idle host, requests are late by a few microseconds. On a busy host, they are later, because
//! the replay's threads wait for a processor.

mod file;
mod pace;
mod report;
mod survey;
mod target;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, ensure};

use crate::driver::Timed;
use hob_trace::Record;
pub use pace::Pace;
pub(crate) use pace::Schedule;
use report::Meter;
pub use report::{Class, Lateness, Report};
use survey::Fit;
pub use survey::{Kind, Survey};
pub use target::{FileAccess, Target, TargetInfo};

/// Defines what a replay does with the writes and discards of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Changes {
    /// A trace with writes or discards is refused.
    #[default]
    Refuse,
    /// Writes and discards are sent.
    Allow,
    /// Writes, discards and flushes are left out.
    LeaveOut,
}

/// Settings of a replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Speed at which the requests are sent.
    pub pace: Pace,
    /// Maximum number of requests in flight, at least 1.
    pub depth: usize,
    /// Treatment of writes and discards.
    pub changes: Changes,
    /// True to reduce offsets beyond the target modulo its size, instead of refusing the trace.
    pub wrap: bool,
}

/// Selects a part of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Start of the part, nanoseconds since the start of the trace. Earlier requests are skipped.
    pub from_ns: u64,
    /// Limit: the part ends after this number of requests.
    pub requests_max: u64,
}

impl Part {
    /// Returns the requests of the part. The trace is not read beyond the part.
    pub fn of<I: Iterator<Item = Result<Record>>>(
        self,
        records: I,
    ) -> impl Iterator<Item = Result<Record>> + use<I> {
        let from_ns = self.from_ns;
        let is_before = move |record: &Result<Record>| matches!(record, Ok(it) if it.at_ns < from_ns);
        records.skip_while(is_before).take(usize::try_from(self.requests_max).unwrap_or(usize::MAX))
    }
}

/// Progress of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of answered requests.
    pub answered: u64,
    /// Total number of requests to send.
    pub total: u64,
    /// Lateness of the last request, nanoseconds.
    pub late_ns: u64,
}

/// Replays `records` to the target. `survey` must be the survey of the same records.
///
/// `progress` is called on this thread for every reply. When `stop` becomes true, no more requests
/// are sent, and the replay waits for requests in flight, for an NBD server at most a few seconds.
/// If the target fails or the trace becomes unreadable during the replay, the report has the
/// reason.
///
/// # Errors
/// Returns an error before the first request if the trace does not fit the target or has changes
/// that are not permitted, or if the queue depth is out of range.
pub fn replay(
    target: Target,
    records: impl Iterator<Item = Result<Record>> + Send,
    survey: &Survey,
    options: &Options,
    stop: &AtomicBool,
    mut progress: impl FnMut(&Progress),
) -> Result<Report> {
    let (depth, depth_max) = (options.depth, target.depth_max());
    ensure!(
        (1..=depth_max).contains(&depth),
        "the queue depth must be between 1 and {depth_max}, not {depth}"
    );
    let fit = Fit::new(survey, target.info(), options)?;
    let (name, total) = (target.info().name.clone(), fit.count(survey));

    let mut schedule = Schedule::new(options.pace);
    let requests = records.filter_map(move |record| match record {
        Ok(record) => {
            let due_ns = schedule.due_ns(record.at_ns);
            fit.place(&record).map(|access| Ok(Timed { due_ns, access }))
        }
        Err(error) => Some(Err(error)),
    });
    // The reader prepares its first request before the clock starts.
    let mut requests = requests.peekable();
    requests.peek();
    let mut meter = Meter::new();
    let ended = target.run(requests, depth, stop, |done| {
        meter.note(done);
        let late_ns = done.sent_ns.saturating_sub(done.timed.due_ns);
        progress(&Progress { answered: meter.answered, total, late_ns });
    });
    let figures = meter.report();
    Ok(Report {
        target: name,
        pace: options.pace.to_string(),
        depth,
        requests: survey.requests(),
        left_out: survey.requests() - total,
        interrupted: stop.load(Ordering::Relaxed) && figures.answered < total,
        failure: ended.err().map(|error| format!("{error:#}")),
        lateness: figures.lateness.filter(|_| options.pace != Pace::Asap && figures.answered > 0),
        ..figures
    })
}
