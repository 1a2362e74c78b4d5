//! Reaction to a crash log that is missing or damaged when the cache of a killed daemon is
//! recovered.
//!
//! The state file has the kernel's boot id of the time when the cache was used last. If the host
//! has not restarted since then, the crash log of a cache that was not closed must still exist. If
//! this crash log does not exist, unflushed writes that hob acknowledged may be lost, as after a
//! failed flush (docs/decisions/0032). So the next flush of each guest fails, and `hob health`
//! reports the loss until an operator acknowledges it.

use super::Disks;
use crate::api_error::Result;

/// Reason why writes may be lost, for the log and for `hob health`.
const LOST: &str = "hob was killed, and the crash log of its write-back cache is missing or damaged, \
    so writes that were acknowledged and not flushed may be lost; the next flush of each guest fails \
    once. Check the guest's filesystem";

impl Disks {
    /// Records that the next flush of each of the disk's guests must fail, to report the loss. Call
    /// this function before the disk is served. Returns a note for the operator.
    pub(super) async fn note_lost_records(&self, name: &str) -> Result<String> {
        {
            let mut inner = self.registry.inner();
            let wanted = &mut inner.disk_mut(name)?.wanted;
            wanted.flush_failures_owed = wanted.flush_failures_owed.saturating_add(wanted.writers_max());
            // Otherwise another start before the next journal ring would report the same loss
            // again.
            if let Some(journal) = wanted.cache.as_mut().and_then(|spec| spec.journal.as_mut()) {
                journal.used = None;
            }
        }
        self.tasks.begin("recover", name.to_owned()).end(Err(LOST.to_owned()));
        if let Err(error) = self.registry.save().await {
            tracing::error!("{error}");
        }
        Ok(LOST.to_owned())
    }
}
