//! Progress of a migration, for the API and for the migration's own limits.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hob_control::{CarryMode, Migration, MigrationState, Side, Size};
use hob_engine::migration::{Session, View};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Weight of the newest sample in the transfer rate, which is an exponential moving average.
const NEWEST: f64 = 0.3;

/// Minimum time between two samples of the transfer rate.
const LOOK_MIN: Duration = Duration::from_millis(400);

/// Time without progress after which no remaining time is reported.
const STILL_AFTER: Duration = Duration::from_secs(5);

/// State shared by a migration's task and its helper tasks.
#[derive(Debug)]
pub(super) struct Shared {
    facts: Mutex<Facts>,
    /// Bytes sent to the other host on data connections.
    pub(super) sent: AtomicU64,
    /// Signals that the other host requests the list from its first page.
    pub(super) list_wanted: Notify,
    /// Signals that the source's record was saved, or that the save failed.
    pub(super) recorded: Notify,
}

/// Progress and settings of a migration.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) side: Side,
    pub(super) peer: String,
    pub(super) cache: CarryMode,
    pub(super) state: MigrationState,
    pub(super) warm: bool,
    /// At the source: true if the disk has no dirty data, the state file says so, and no new data
    /// becomes dirty.
    pub(super) drained: bool,
    pub(super) wanted: bool,
    pub(super) session: Session,
    pub(super) why: Option<String>,
    pub(super) valid: u64,
    pub(super) resent: u64,
    pub(super) pulled: u64,
    pub(super) left: u64,
    pub(super) drain_ms: Option<u64>,
    pub(super) pause_ms: Option<f64>,
    pub(super) waited_ms: Option<f64>,
    began: Instant,
    total: Option<Duration>,
    rate: f64,
    looked: Option<(Instant, u64)>,
    /// Time at which data was pulled last.
    moved: Option<Instant>,
}

impl Shared {
    pub(super) fn new(side: Side, peer: String, cache: CarryMode, session: Session) -> Shared {
        let facts = Facts {
            side,
            peer,
            cache,
            state: MigrationState::Preparing,
            warm: false,
            drained: false,
            wanted: false,
            session,
            why: None,
            valid: 0,
            resent: 0,
            pulled: 0,
            left: 0,
            drain_ms: None,
            pause_ms: None,
            waited_ms: None,
            began: Instant::now(),
            total: None,
            rate: 0.0,
            looked: None,
            moved: None,
        };
        let (list_wanted, recorded) = (Notify::new(), Notify::new());
        Shared { facts: Mutex::new(facts), sent: AtomicU64::new(0), list_wanted, recorded }
    }

    pub(super) fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the reason of a failure.
    pub(super) fn trouble(&self, why: impl Into<String>) {
        self.facts().why = Some(why.into());
    }

    pub(super) fn view(&self, disk: &str) -> Migration {
        let facts = self.facts().clone();
        let all = facts.valid.max(facts.pulled + facts.left);
        let is_carried = matches!(facts.cache, CarryMode::Copy) || facts.state == MigrationState::Filling;
        let left = if is_carried { facts.left } else { 0 };
        let percent = match all {
            _ if facts.warm && left == 0 => 100,
            0 => 0,
            all => (all.saturating_sub(left) * 100 / all).min(100) as u8,
        };
        let moves = facts.moved.is_some_and(|at| at.elapsed() < STILL_AFTER);
        let eta = (left > 0 && moves && facts.rate > 1.0).then(|| (left as f64 / facts.rate).ceil() as u64);
        Migration {
            disk: disk.to_owned(),
            side: facts.side,
            peer: facts.peer,
            cache: facts.cache,
            state: facts.state,
            warm: facts.warm,
            wanted: facts.wanted,
            generation: facts.session.generation,
            attempt: facts.session.attempt,
            why: facts.why,
            valid: Size(facts.valid),
            sent: Size(self.sent.load(Ordering::Relaxed)),
            resent: Size(facts.resent),
            pulled: Size(facts.pulled),
            left: Size(facts.left),
            rate: Size(facts.rate as u64),
            percent,
            eta_seconds: eta,
            drain_ms: facts.drain_ms,
            pause_ms: facts.pause_ms,
            waited_ms: facts.waited_ms,
            total_ms: facts.total.unwrap_or_else(|| facts.began.elapsed()).as_millis() as u64,
        }
    }
}

impl Facts {
    /// Records the progress that the destination reports.
    pub(super) fn note_view(&mut self, view: &View) {
        self.wanted = view.wants;
        self.note_pulled(view.pulled_bytes, view.left_bytes);
    }

    /// Records the progress of the pull and updates the transfer rate.
    pub(super) fn note_pulled(&mut self, pulled: u64, left: u64) {
        let now = Instant::now();
        if pulled > self.pulled {
            self.moved = Some(now);
        }
        (self.pulled, self.left) = (pulled, left);
        let Some((at, before)) = self.looked.filter(|(_, before)| *before <= pulled) else {
            self.looked = Some((now, pulled));
            return;
        };
        let seconds = now - at;
        if seconds >= LOOK_MIN {
            let newest = (pulled - before) as f64 / seconds.as_secs_f64();
            self.rate = if self.rate == 0.0 { newest } else { NEWEST * newest + (1.0 - NEWEST) * self.rate };
            self.looked = Some((now, pulled));
        }
    }

    /// Records the end of the migration.
    pub(super) fn end(&mut self, state: MigrationState) {
        self.state = state;
        self.rate = 0.0;
        self.total.get_or_insert(self.began.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_time_is_estimated_while_nothing_is_pulled() {
        crate::background::run_in_virtual_time(async {
            let session = Session { generation: 1, attempt: 1 };
            let shared = Shared::new(Side::Destination, "b".to_owned(), CarryMode::Copy, session);
            let eta = || shared.view("vm").eta_seconds;
            shared.facts().note_pulled(0, 100 << 20);
            assert_eq!(eta(), None);
            tokio::time::advance(Duration::from_secs(1)).await;
            shared.facts().note_pulled(10 << 20, 90 << 20);
            assert_eq!(eta(), Some(9));
            // The other host does not answer.
            tokio::time::advance(Duration::from_secs(60)).await;
            assert_eq!(eta(), None);
            shared.facts().note_pulled(20 << 20, 80 << 20);
            assert!(eta().is_some(), "it moves again");
        });
    }
}
