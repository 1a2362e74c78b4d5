//! A disk gets larger while it is served (docs/decisions/0017).
//!
//! | the disk has | it is larger |
//! |---|---|
//! | no cache, or a volatile one, and ends with a whole sector | at once |
//! | the same, and ends within a sector | when nothing of it is in flight; requests wait |
//! | a persistent cache | when a new ring that says so is durable; requests wait, and if that fails all is as before |
//!
//! Its backing has the new size before. What is behind the old end was never read here: the sector that the old end lies in is
//! forgotten, since copies of it have nothing there. It is never dirty: nobody could write the whole of it.
//!
//! # Refuses
//! To shrink; a disk whose cache is being recovered, which is to be as large as it will be from the first; a disk that another
//! host has, or is about to have.

use super::disk::Disk;
use crate::cache::Cache;
use crate::command::{CacheChange, CommandError, Role};
use crate::units::SECTOR_BYTES;

/// Sizes of disks are multiples of this, bytes.
const UNIT_BYTES: u64 = 512;

/// The sector that a disk's end lies in, if it is not a whole one.
fn partial_sector(disk_bytes: u64) -> Option<u64> {
    (!disk_bytes.is_multiple_of(SECTOR_BYTES)).then_some(disk_bytes / SECTOR_BYTES)
}

impl Disk {
    /// May it have this size?
    pub(super) fn may_grow(&self, size_bytes: u64) -> Result<(), CommandError> {
        if size_bytes < self.config.size_bytes {
            return Err(CommandError::Shrinks);
        }
        if self.ownership.role != Role::Here || self.ownership.is_watched() {
            return Err(CommandError::WrongRole);
        }
        if self.recovering.is_some() {
            return Err(CommandError::Recovering);
        }
        let cache = self.cache.as_ref().map(|cache| cache.config.block_bytes);
        let memory = self.memory.as_ref().map(|memory| memory.page_bytes());
        let few_blocks = |block: u32| size_bytes.div_ceil(u64::from(block)) <= 1 << 32;
        let is_workable = cache.into_iter().chain(memory).all(few_blocks);
        if is_workable && size_bytes.is_multiple_of(UNIT_BYTES) {
            Ok(())
        } else {
            Err(CommandError::Unworkable)
        }
    }

    /// Can its size change between two requests?
    pub(super) fn grows_at_once(&self) -> bool {
        let brings_journal = |change: &CacheChange| match change {
            CacheChange::Enable(enable) => enable.journal.is_some(),
            _ => false,
        };
        self.journal.is_none()
            && self.opening.is_none()
            && partial_sector(self.config.size_bytes).is_none()
            && !self.changes.iter().any(|(_, change)| brings_journal(change))
    }

    /// It has this size from now on, no less than before.
    pub(super) fn grow(&mut self, size_bytes: u64) {
        let before = std::mem::replace(&mut self.config.size_bytes, size_bytes);
        assert!(before <= size_bytes, "disks do not shrink");
        if before == size_bytes {
            return;
        }
        if let Some(cache) = &mut self.cache {
            cache.forget_end(before);
        }
        if let (Some(memory), Some(sector)) = (&mut self.memory, partial_sector(before)) {
            memory.invalidate(sector, sector + 1);
        }
        // Frozen ones too: a backup made from one has the new part then, whatever the one after it says.
        for bitmap in self.bitmaps.iter_mut().flat_map(|bitmaps| bitmaps.iter_mut()) {
            bitmap.granules.grow(size_bytes);
        }
    }
}

impl Cache {
    /// Forgets the sector that the end of a disk of this size lies in, if it is not a whole one.
    pub(super) fn forget_end(&mut self, disk_bytes: u64) {
        let Some(end) = partial_sector(disk_bytes) else { return };
        let found: Vec<u64> = self.spans(end, end + 1).filter_map(|span| self.find(span)).collect();
        for sector in found {
            let second = self.index.second_sector(sector);
            for copy in [Some(sector), second].into_iter().flatten() {
                assert!(!self.index.is_dirty(copy), "a sector that nobody can write whole is dirty");
                self.index.clear_valid(copy, 1);
            }
        }
    }
}
