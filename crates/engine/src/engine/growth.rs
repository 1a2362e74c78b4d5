//! Growing a disk while it is served (docs/decisions/0017).
//!
//! | the disk | it grows |
//! |---|---|
//! | has no persistent cache, and its size is a multiple of a sector | immediately |
//! | has no persistent cache, and another size | when none of its I/O is in flight |
//! | has a persistent cache | when a new journal ring with the new size is durable |
//!
//! Requests wait until the disk has grown. If the new journal ring cannot be written, the disk
//! keeps its size.
//!
//! The daemon has resized the backing before the disk grows. No data beyond the old end of the disk
//! was read before. Cached copies of the sector that contains the old end are invalidated, because
//! they lack the part beyond that end. This sector is never dirty, because a guest could not write
//! the whole sector.
//!
//! # Refused requests
//! Shrinking is refused. A disk whose cache is being recovered cannot grow, because it must have
//! its final size from the start. A disk that another host owns or will own cannot grow.

use super::disk::Disk;
use crate::cache::Cache;
use crate::command::{CacheChange, CommandError, Role};
use crate::units::SECTOR_BYTES;

/// Disk sizes are multiples of this number of bytes.
const UNIT_BYTES: u64 = 512;

/// Returns the sector that contains the disk's end, if the end is inside a sector.
fn partial_sector(disk_bytes: u64) -> Option<u64> {
    (!disk_bytes.is_multiple_of(SECTOR_BYTES)).then_some(disk_bytes / SECTOR_BYTES)
}

impl Disk {
    /// Returns an error if the disk cannot have this size.
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

    /// Returns true if the disk can grow immediately, even while its I/O is in flight.
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

    /// Sets a disk size that is at least the old one.
    pub(super) fn grow(&mut self, size_bytes: u64) {
        let before = std::mem::replace(&mut self.config.size_bytes, size_bytes);
        assert!(before <= size_bytes, "disks do not shrink");
        if before == size_bytes {
            return;
        }
        self.backed.disk_bytes = size_bytes;
        if let Some(cache) = &mut self.cache {
            cache.forget_end(before);
        }
        if let (Some(memory), Some(sector)) = (&mut self.memory, partial_sector(before)) {
            memory.invalidate(sector, sector + 1);
        }
        // Frozen bitmaps also grow, so that a backup that uses a frozen bitmap includes the new
        // part of the disk.
        for bitmap in self.bitmaps.iter_mut().flat_map(|bitmaps| bitmaps.iter_mut()) {
            bitmap.granules.grow(size_bytes);
        }
    }
}

impl Cache {
    /// Invalidates the sector that contains the end of the disk, if the end is inside a sector.
    pub(super) fn forget_end(&mut self, disk_bytes: u64) {
        let Some(end) = partial_sector(disk_bytes) else { return };
        let found: Vec<u64> = self.spans(end, end + 1).filter_map(|span| self.find(span)).collect();
        for sector in found {
            let second = self.index.second_sector(sector);
            for copy in [Some(sector), second].into_iter().flatten() {
                assert!(!self.index.is_dirty(copy), "a sector that no guest can write completely is dirty");
                self.index.clear_valid(copy, 1);
            }
        }
    }
}
