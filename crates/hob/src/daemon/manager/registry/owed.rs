//! How many guests have not been told of a failed flush, kept in the state file over a crash.
//!
//! More of them are saved at once: after a crash each of these guests has to be told. Fewer are saved at once too, unless that happened
//! [`LOWERED_MAX`] times and once a second since: then [`LOWER_AFTER`] later. A crash until then tells a guest twice, which is safe, and a backing
//! that fails every flush does not make the daemon save its state all the time.

use std::sync::Arc;
use std::time::Duration;

use hob_engine::units::DiskId;
use tokio::time::Instant;

use super::{DiskEntry, Registry};

/// Time until a lower number is saved that is not saved at once.
const LOWER_AFTER: Duration = Duration::from_secs(5);

/// So many lower numbers are saved at once, and one more each second.
const LOWERED_MAX: u32 = 8;

/// The number as the engine last reported it; the one that is kept is in the disk's state.
#[derive(Debug, Default)]
pub(in crate::daemon::manager) struct Owed {
    now: u32,
    /// A lower number is saved soon.
    is_lowered_soon: bool,
    /// Lower numbers that were saved at once, less one for each second since `counted`.
    lowered: u32,
    counted: Option<Instant>,
}

impl Owed {
    /// May a lower number be saved at once? It is counted.
    fn may_lower(&mut self, now: Instant) -> bool {
        let counted = *self.counted.get_or_insert(now);
        let seconds = now.saturating_duration_since(counted).as_secs();
        self.counted = Some(counted + Duration::from_secs(seconds));
        self.lowered = self.lowered.saturating_sub(u32::try_from(seconds).unwrap_or(u32::MAX));
        let may = self.lowered < LOWERED_MAX;
        self.lowered += u32::from(may);
        may
    }
}

impl Registry {
    /// The engine reports a number.
    pub(in crate::daemon::manager) fn note_owed(self: &Arc<Self>, disk: DiskId, count: u32) {
        let mut inner = self.inner();
        let Some(entry) = inner.disks.values_mut().find(|entry| entry.id == disk) else { return };
        entry.owed.now = count;
        let kept = &mut entry.wanted.flush_failures_owed;
        if count > *kept || count < *kept && entry.owed.may_lower(Instant::now()) {
            *kept = count;
            if !std::mem::replace(&mut inner.saves_owed, true) {
                tokio::spawn(self.clone().save_owed());
            }
        } else if count < *kept && !std::mem::replace(&mut entry.owed.is_lowered_soon, true) {
            let manager = self.clone();
            tokio::spawn(async move {
                tokio::time::sleep(LOWER_AFTER).await;
                if manager.lower_owed(disk) {
                    manager.save_owed().await;
                }
            });
        }
    }

    /// Takes a lower number over, if there still is one.
    fn lower_owed(&self, disk: DiskId) -> bool {
        let mut inner = self.inner();
        let Some(entry) = inner.disks.values_mut().find(|entry| entry.id == disk) else { return false };
        let now = entry.owed.now;
        std::mem::take(&mut entry.owed.is_lowered_soon)
            && std::mem::replace(&mut entry.wanted.flush_failures_owed, now) != now
    }

    async fn save_owed(self: Arc<Self>) {
        self.inner().saves_owed = false;
        if let Err(error) = self.save().await {
            tracing::error!("{error}");
        }
    }
}

impl DiskEntry {
    /// The disk has left its shard, which reports no more numbers.
    pub(in crate::daemon::manager) fn set_owed(&mut self, count: u32) {
        self.owed = Owed { now: count, ..Owed::default() };
        self.wanted.flush_failures_owed = count;
    }
}
