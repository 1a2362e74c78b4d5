//! Reports outages of an object store to the [`Monitor`] of the disk's backing.
//!
//! An object store refuses single calls even while it works, and the retries of these calls
//! succeed. So an outage begins when calls have failed for [`OUTAGE_AFTER`] and the store has
//! answered no call of the same kind meanwhile. The outage ends with an answer to such a call.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::backing::Monitor;

/// Time for which calls must fail before hob reports an outage.
const OUTAGE_AFTER: Duration = Duration::from_secs(2);

/// Kind of a call to the object store. A store may refuse one kind of calls and answer the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallKind {
    /// The call reads or lists objects.
    Read,
    /// The call creates or replaces an object.
    Write,
    /// The call removes objects that no manifest names. No request waits for it, so its errors are
    /// no outage.
    Cleanup,
}

/// The outage of one disk's object store.
pub(super) struct StoreOutage {
    /// Address of the disk, for the log.
    spec: String,
    monitor: Arc<Monitor>,
    calls: Mutex<Calls>,
}

#[derive(Default)]
struct Calls {
    reads: Series,
    writes: Series,
    /// Whether an outage was reported to the monitor, and its end was not.
    is_reported: bool,
}

/// The results of the calls of one kind.
#[derive(Clone, Copy, Default)]
struct Series {
    /// Time of the last answer of the object store.
    answered: Option<Instant>,
    /// Start of the first call that failed after the last answer, or the time of this answer if
    /// that is later.
    failing_since: Option<Instant>,
}

impl Series {
    fn is_outage(self, now: Instant) -> bool {
        self.failing_since.is_some_and(|since| now.saturating_duration_since(since) >= OUTAGE_AFTER)
    }
}

impl Calls {
    fn series(&mut self, kind: CallKind) -> Option<&mut Series> {
        match kind {
            CallKind::Read => Some(&mut self.reads),
            CallKind::Write => Some(&mut self.writes),
            CallKind::Cleanup => None,
        }
    }
}

impl StoreOutage {
    pub(super) fn new(spec: &str, monitor: Arc<Monitor>) -> StoreOutage {
        StoreOutage { spec: spec.to_owned(), monitor, calls: Mutex::default() }
    }

    /// Records that the object store answered a call. An answer that refuses the call for good
    /// counts too.
    pub(super) fn note_answer(&self, kind: CallKind) {
        let (now, mut calls) = (Instant::now(), self.calls());
        let Some(series) = calls.series(kind) else { return };
        *series = Series { answered: Some(now), failing_since: None };
        if calls.is_reported && !calls.reads.is_outage(now) && !calls.writes.is_outage(now) {
            calls.is_reported = false;
            self.monitor.note_connected();
            tracing::info!("{}: the object store answers again", self.spec);
        }
    }

    /// Records that an attempt of a call failed. `began` is the start of the call.
    pub(super) fn note_failure(&self, kind: CallKind, began: Instant, error: &str) {
        let (now, mut calls) = (Instant::now(), self.calls());
        let Some(series) = calls.series(kind) else { return };
        let start = series.answered.map_or(began, |answered| answered.max(began));
        let since = *series.failing_since.get_or_insert(start);
        if !series.is_outage(now) {
            return;
        }
        self.monitor.note_outage(now.saturating_duration_since(since), error);
        if !std::mem::replace(&mut calls.is_reported, true) {
            tracing::warn!(
                "{}: the object store fails all calls; hob retries them (see 'hob health'): {error}",
                self.spec
            );
        }
    }

    /// Returns true if an outage is reported.
    pub(super) fn is_reported(&self) -> bool {
        self.calls().is_reported
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;
    use crate::backing::Condition;

    fn outage() -> (StoreOutage, Arc<Monitor>) {
        let monitor = Arc::new(Monitor::default());
        (StoreOutage::new("s3://bucket/disk", monitor.clone()), monitor)
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_begins_when_all_calls_have_failed_for_a_while() {
        let (outage, monitor) = outage();
        let began = Instant::now();
        advance(Duration::from_secs(1)).await;
        outage.note_failure(CallKind::Read, began, "503 SlowDown");
        assert_eq!(monitor.condition(), Condition::Connected, "retries may succeed");
        advance(OUTAGE_AFTER).await;
        outage.note_failure(CallKind::Read, Instant::now(), "503 SlowDown");
        let Condition::Reconnecting { outage: length, error, .. } = monitor.condition() else {
            panic!("no outage is reported")
        };
        assert_eq!((length.as_secs(), error.as_str()), (3, "503 SlowDown"), "since the first call");
        outage.note_failure(CallKind::Read, began, "400 ExpiredToken");
        assert!(
            matches!(monitor.condition(), Condition::Reconnecting { error, .. } if error == "400 ExpiredToken")
        );
        outage.note_answer(CallKind::Read);
        assert_eq!(monitor.condition(), Condition::Connected);
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_answers_other_calls_of_the_kind_has_no_outage() {
        let (outage, monitor) = outage();
        let began = Instant::now();
        for _ in 0..5 {
            advance(Duration::from_secs(1)).await;
            outage.note_answer(CallKind::Read);
            advance(Duration::from_secs(1)).await;
            outage.note_failure(CallKind::Read, began, "503 SlowDown");
            assert_eq!(monitor.condition(), Condition::Connected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_answers_reads_and_refuses_writes_has_an_outage() {
        let (outage, monitor) = outage();
        let began = Instant::now();
        advance(OUTAGE_AFTER).await;
        outage.note_failure(CallKind::Cleanup, began, "403 AccessDenied");
        assert_eq!(monitor.condition(), Condition::Connected, "no request waits for a cleanup");
        outage.note_failure(CallKind::Write, began, "403 AccessDenied");
        outage.note_answer(CallKind::Read);
        assert!(matches!(monitor.condition(), Condition::Reconnecting { .. }) && outage.is_reported());
        outage.note_answer(CallKind::Write);
        assert!(monitor.condition() == Condition::Connected && !outage.is_reported());
    }
}
