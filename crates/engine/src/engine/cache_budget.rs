//! Counts the flash writes of each disk's cache, and limits them according to the pool's flash
//! write budget ([`crate::flash_budget`]).
//!
//! All writes to flash count: copies of clean data, dirty data, second copies, and the journal. hob
//! refuses only writes of copies of clean data. The limit is checked when data is about to be
//! filled, and never for a hit.

use super::Engine;
use super::disk::Disk;
use crate::flash_budget::limit::Limit;
use crate::flash_budget::{Allowance, Counts};
use crate::units::{DiskId, SECTOR_BYTES};

/// Flash writes of a disk's cache, and the cache's part of the pool's flash write budget.
#[derive(Debug, Default)]
pub(super) struct CacheBudget {
    counts: Counts,
    allowance: Option<Box<Allowance>>,
}

impl CacheBudget {
    /// Returns the limit that the flash write budget sets for copies of clean data now; `None`
    /// without a budget.
    pub(super) fn limit(&self) -> Option<Limit> {
        self.allowance.as_ref().map(|allowance| Limit::new(allowance, self.counts))
    }

    /// Counts a write to flash of `bytes` bytes.
    #[inline]
    pub(super) fn wrote(&mut self, bytes: u64) {
        self.counts.written += bytes;
    }

    /// Adds the counts of one request: its copies of clean data, those of them on loan, and the
    /// refused copies. `dropped` is the number of sectors in `charged.clean` that are not written.
    pub(super) fn add(&mut self, charged: Counts, dropped: u64) {
        let clean = charged.clean.saturating_sub(dropped * SECTOR_BYTES);
        self.counts.clean += clean;
        self.counts.borrowed += charged.borrowed.min(clean);
        self.counts.refused += charged.refused;
    }
}

impl Disk {
    /// Returns the flash writes of the cache. The second value is the cache's part of the flash
    /// write budget, and [`Limit::pressure`]; `None` without a budget.
    pub(super) fn flash_counts(&self) -> (Counts, Option<(Allowance, u32)>) {
        let CacheBudget { counts, allowance } = &self.flash_budget;
        let pressure = self.flash_budget.limit().map(|limit| limit.pressure());
        (*counts, allowance.as_deref().copied().zip(pressure))
    }
}

impl Engine {
    /// Returns the flash writes of a disk's cache since the disk was added.
    pub fn flash_counts(&self, disk: DiskId) -> Option<Counts> {
        self.disks.get(disk.0 as usize)?.as_ref().map(|disk| disk.flash_budget.counts)
    }

    /// Sets the part of a flash write budget that a disk's cache has from now on; `None` ends the
    /// limit. Does nothing if the disk does not exist.
    pub fn allow_flash_writes(&mut self, disk: DiskId, allowance: Option<Allowance>) {
        let Some(disk) = self.disks.get_mut(disk.0 as usize).and_then(Option::as_mut) else { return };
        disk.flash_budget.allowance = allowance.map(Box::new);
        let limit = disk.flash_budget.limit();
        if let Some(cache) = &mut disk.cache {
            cache.note_allowance(allowance.as_ref());
            cache.set_limit(limit);
        }
    }
}
