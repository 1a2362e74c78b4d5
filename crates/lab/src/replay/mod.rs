//! Real-time replay: sends the requests of a trace to a real disk when they are due.
//!
//! First a [`Survey`] of the whole trace, then its [`replay`], streaming: memory does not grow with the
//! trace. Nothing is sent before it is known that the trace fits the target and its changes are permitted
//! ([`Changes`]). A request is due at its time in the trace, counted from the first request, divided by the
//! [`Pace`]'s factor. If `depth` requests are in flight, the next waits for an answer and is late. The
//! [`Report`] contains the lateness. On an idle machine it is some microseconds; on a busy machine the wait
//! for a processor is added.

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
use crate::trace::Record;
pub use pace::Pace;
pub(crate) use pace::Schedule;
use report::Meter;
pub use report::{Class, Lateness, Report};
use survey::Fit;
pub use survey::{Kind, Survey};
pub use target::{FileAccess, Target, TargetInfo};

/// Handling of writes and discards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Changes {
    /// A trace with changes is refused.
    #[default]
    Refuse,
    /// They are sent.
    Allow,
    /// They are left out, and flushes with them.
    LeaveOut,
}

/// Settings of a replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Pace.
    pub pace: Pace,
    /// Maximum queue depth, 1 or more.
    pub depth: usize,
    /// Handling of writes and discards.
    pub changes: Changes,
    /// Offsets beyond the target are taken modulo its size, instead of refused.
    pub wrap: bool,
}

/// A part of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Only requests from this time on, nanoseconds.
    pub from_ns: u64,
    /// Maximum number of requests.
    pub requests_max: u64,
}

impl Part {
    /// Returns the requests of the part. The trace is not read beyond it.
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
    /// Requests that were answered.
    pub answered: u64,
    /// Total number of requests to send.
    pub total: u64,
    /// Lateness of the last request, nanoseconds.
    pub late_ns: u64,
}

/// Replays `records`, of which `survey` was made, to the target.
///
/// `progress` is called on this thread for every answer. When `stop` becomes true nothing more is sent, and
/// requests in flight are awaited, for an NBD server at most a few seconds. If the target fails during the
/// replay, or the trace cannot be read any further, the report says so.
///
/// # Errors
/// Before anything is sent: the trace does not fit the target, contains changes that are not permitted, or
/// the depth is out of range.
pub fn replay(
    target: Target,
    records: impl Iterator<Item = Result<Record>> + Send,
    survey: &Survey,
    options: &Options,
    stop: &AtomicBool,
    mut progress: impl FnMut(&Progress),
) -> Result<Report> {
    let (depth, depth_max) = (options.depth, target.depth_max());
    ensure!((1..=depth_max).contains(&depth), "the depth must lie between 1 and {depth_max}, not {depth}");
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
    // The reader's work before its first request is done before the time starts.
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
