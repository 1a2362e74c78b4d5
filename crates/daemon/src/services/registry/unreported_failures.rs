//! The number of guests that have not received a report of a failed flush. The state file has the
//! number, so that it survives a crash.
//!
//! If the number increases, hob saves it immediately, because each of these guests must get a
//! report even after a crash. If the number decreases, hob also saves it immediately, but only
//! [`LOWERED_MAX`] times and then once a second. hob saves all other decreases after
//! [`LOWER_AFTER`]. If hob crashes before a decrease is saved, a guest gets the same report twice,
//! which is safe. The limit prevents a save for every failed flush of a broken backing.

use std::sync::Arc;
use std::time::Duration;

use hob_engine::units::DiskId;
use hob_storage::unflushed_mark;
use tokio::time::Instant;

use super::{DiskEntry, Registry};
use crate::api_error::Result;
use crate::background::spawn;
use crate::state::BootId;

/// Delay before a decreased number is saved, if the limit for immediate saves is exceeded.
const LOWER_AFTER: Duration = Duration::from_secs(5);

/// Number of decreases that are saved immediately. After that, one decrease a second is saved
/// immediately.
const LOWERED_MAX: u32 = 8;

/// The number of guests that have not yet received the error of a failed flush, as the engine last
/// stated it. The number in the state file is a field of the disk's state.
#[derive(Debug, Default)]
pub(in crate::services) struct UnreportedFailures {
    now: u32,
    /// True if a save of a decreased number is scheduled.
    is_lowered_soon: bool,
    /// Count of immediate saves of decreases, reduced by one for each second since `counted`.
    lowered: u32,
    counted: Option<Instant>,
}

impl UnreportedFailures {
    /// Returns true if hob may save a decreased number immediately, and then counts the save.
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
    /// Records the guests whose changes were lost because hob was killed, for a backing that keeps
    /// unflushed changes in the memory of hob or of its `qemu-nbd`
    /// ([`Driver::memory_id`](hob_storage::backing::Driver::memory_id)). Call this function before
    /// the disk is served. Returns a note for the operator.
    pub(in crate::services) async fn note_killed(
        self: &Arc<Self>,
        name: &str,
        backing: &[u8; 16],
    ) -> Result<Option<String>> {
        let (known, writers, was_served) = {
            let inner = self.inner();
            let wanted = &inner.disk(name)?.wanted;
            let was_served = wanted.in_memory.is_some() && wanted.in_memory == BootId::current();
            (wanted.flush_failures_owed, wanted.writers_max(), was_served)
        };
        let (owed, note) = match unflushed_mark::guests_with_losses(backing) {
            Ok(0) if was_served && unflushed_mark::is_missing(backing) => {
                let note = "hob was killed, and the file that records unflushed writes is missing, so \
                            acknowledged writes may be lost; the next flush of each guest fails once";
                (known.saturating_add(writers), note.to_owned())
            }
            Ok(0) => return Ok(None),
            Ok(guests) => {
                let note = "hob or its qemu-nbd ended before acknowledged writes were stored, so they may be \
                            lost; the next flush of each guest that wrote them fails";
                // The number from the file includes the guests that had not received an earlier
                // report.
                (known.max(guests), note.to_owned())
            }
            Err(error) => {
                let unknown = "hob does not know whether it was killed with unflushed writes in memory";
                (known.saturating_add(1), format!("{unknown}, so the next flush of a guest fails: {error}"))
            }
        };
        {
            let mut inner = self.inner();
            inner.disk_mut(name)?.wanted.flush_failures_owed = owed;
        }
        self.save_owed().await;
        Ok(Some(note))
    }

    /// Records that hob serves a disk whose unflushed changes are in the memory of hob or of its
    /// `qemu-nbd`. Call this function before the first client connects.
    pub(in crate::services) async fn note_in_memory(self: &Arc<Self>, name: &str) -> Result<()> {
        let boot = BootId::current();
        let before = std::mem::replace(&mut self.inner().disk_mut(name)?.wanted.in_memory, boot);
        if before != boot
            && let Err(error) = self.save().await
        {
            tracing::error!("{name}: {error}");
        }
        Ok(())
    }

    /// Handles the engine's report that the number of guests without a report has changed.
    pub(in crate::services) fn note_owed(self: &Arc<Self>, disk: DiskId, count: u32) {
        let mut inner = self.inner();
        let Some(entry) = inner.disks.values_mut().find(|entry| entry.id == disk) else { return };
        entry.owed.now = count;
        let kept = &mut entry.wanted.flush_failures_owed;
        if count > *kept || count < *kept && entry.owed.may_lower(Instant::now()) {
            *kept = count;
            if !std::mem::replace(&mut inner.saves_owed, true) {
                let registry = self.clone();
                spawn(async move { registry.save_owed().await });
            }
        } else if count < *kept && !std::mem::replace(&mut entry.owed.is_lowered_soon, true) {
            let registry = self.clone();
            spawn(async move {
                tokio::time::sleep(LOWER_AFTER).await;
                if registry.lower_owed(disk) {
                    registry.save_owed().await;
                }
            });
        }
    }

    /// Replaces the saved number of a disk by the current one, if a save of a decreased number is
    /// scheduled. Returns true if the state must be saved.
    fn lower_owed(&self, disk: DiskId) -> bool {
        let mut inner = self.inner();
        let Some(entry) = inner.disks.values_mut().find(|entry| entry.id == disk) else { return false };
        let now = entry.owed.now;
        std::mem::take(&mut entry.owed.is_lowered_soon)
            && std::mem::replace(&mut entry.wanted.flush_failures_owed, now) != now
    }

    async fn save_owed(self: &Arc<Self>) {
        self.inner().saves_owed = false;
        if let Err(error) = self.save().await {
            tracing::error!("{error}");
        }
    }
}

impl DiskEntry {
    /// Sets the final number of guests without a report, for a disk that has left its shard.
    pub(in crate::services) fn set_owed(&mut self, count: u32) {
        self.owed = UnreportedFailures { now: count, ..UnreportedFailures::default() };
        self.wanted.flush_failures_owed = count;
        self.wanted.in_memory = None;
    }
}
