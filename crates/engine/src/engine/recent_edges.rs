//! Recently merged and written sectors, kept in memory. The next write into the same sector needs
//! no read of flash.
//!
//! A guest that appends to a log with writes below 4 KiB writes each sector several times in a row.
//! The newest [`SECTORS_MAX`] such sectors of all disks of an engine are kept in one buffer. A kept
//! sector is used only while flash holds it with the same checksum. So a change or invalidation of
//! the sector on flash also makes the kept copy unusable.

use std::collections::BTreeMap;

use super::Engine;
use super::partial::Edge;
use crate::io::{BufferCopy, CopyEnd};
use crate::range_locks::Range;
use crate::units::{BufferId, DiskId, SECTOR_BYTES};

/// Maximum number of sectors that are kept.
const SECTORS_MAX: u32 = 256;

/// Partly written sectors of all disks of an engine, in memory.
#[derive(Debug, Default)]
pub(super) struct RecentEdges {
    buffer: Option<BufferId>,
    /// Kept sectors by their position in the buffer.
    kept: Vec<Option<Kept>>,
    places: BTreeMap<(DiskId, u64), u32>,
    /// Position in the buffer for the next new sector.
    next: u32,
}

#[derive(Clone, Copy, Debug)]
struct Kept {
    disk: DiskId,
    sector: u64,
    sum: u32,
}

impl RecentEdges {
    fn find(&self, disk: DiskId, sector: u64) -> Option<(u32, u32)> {
        let place = *self.places.get(&(disk, sector))?;
        Some((place, self.kept[place as usize].expect("each position in the map is in use").sum))
    }

    /// Allocates a position in the buffer for a sector, in place of the oldest kept sector. Returns
    /// `None` if there is no buffer.
    fn keep(&mut self, disk: DiskId, sector: u64, sum: u32) -> Option<u32> {
        if self.kept.is_empty() {
            return None;
        }
        let place = self.places.get(&(disk, sector)).copied().unwrap_or_else(|| {
            let place = self.next;
            self.next = (self.next + 1) % self.kept.len() as u32;
            place
        });
        if let Some(gone) = self.kept[place as usize].replace(Kept { disk, sector, sum }) {
            self.places.remove(&(gone.disk, gone.sector));
        }
        self.places.insert((disk, sector), place);
        Some(place)
    }

    /// Drops the kept sectors `first..end` of a disk.
    pub(super) fn forget(&mut self, disk: DiskId, first: u64, end: u64) {
        while let Some((at, place)) = self.places.range((disk, first)..(disk, end)).next() {
            let (at, place) = (*at, *place);
            self.places.remove(&at);
            self.kept[place as usize] = None;
        }
    }

    fn end(&self, place: u32, inside: u64) -> CopyEnd {
        let id = self.buffer.expect("a position is in a buffer");
        CopyEnd::Buffer { id, offset: place * SECTOR_BYTES as u32 + inside as u32 }
    }
}

impl Engine {
    /// Gives the engine a buffer of `bytes` bytes for partly written sectors. Without this buffer,
    /// each partial write of a cached sector reads flash.
    pub fn lend_for_edges(&mut self, buffer: BufferId, bytes: u32) {
        let places = (bytes / SECTOR_BYTES as u32).min(SECTORS_MAX);
        self.recent_edges =
            RecentEdges { buffer: Some(buffer), kept: vec![None; places as usize], ..RecentEdges::default() };
    }

    /// Merges the edges of a write that are in memory, so that these edges need not be read from
    /// flash.
    pub(super) fn merge_recent_edges(&mut self, slot: u32) {
        let range = self.requests[slot].range;
        for (sector, edge) in self.requests[slot].edges_by_sector() {
            if edge != Edge::Unread {
                continue;
            }
            let Some((place, sum)) = self.recent_edges.find(range.disk, sector) else { continue };
            if self.flash_sum(range.disk, sector) != Some(sum) {
                self.recent_edges.forget(range.disk, sector, sector + 1);
                continue;
            }
            let part = Range { disk: range.disk, first: sector, end: sector + 1 };
            let (units, recent) = (self.units_on_flash(part), &self.recent_edges);
            let copies = self.requests[slot].merge_edge(part, units, |inside| recent.end(place, inside));
            self.copy_out.extend(copies);
        }
    }

    /// Keeps the sectors that a write covers partly, after flash has taken the write.
    pub(super) fn keep_recent_edges(&mut self, slot: u32) {
        let active = &self.requests[slot];
        let range = active.range;
        let Some((id, start)) = active.payload() else { return };
        for (sector, _) in active.edges_by_sector() {
            let Some(sum) = self.flash_sum(range.disk, sector) else { continue };
            let Some(place) = self.recent_edges.keep(range.disk, sector, sum) else { return };
            let from = CopyEnd::Buffer { id, offset: start + ((sector - range.first) * SECTOR_BYTES) as u32 };
            let to = self.recent_edges.end(place, 0);
            self.copy_out.push_back(BufferCopy { from, to, len: SECTOR_BYTES as u32 });
        }
    }

    /// Returns the checksum of a disk's sector if flash holds the sector and may serve it.
    fn flash_sum(&self, disk: DiskId, sector: u64) -> Option<u32> {
        let cache = self.disk(disk).looked_up().ok()?;
        let span = cache.spans(sector, sector + 1).next()?;
        let at = cache.find(span)?;
        let is_known = cache.index.count_servable(at, 1) == 1 && !cache.index.is_sum_unknown(at);
        is_known.then(|| cache.index.sum(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_sector_goes_and_one_that_is_kept_again_stays_where_it_is() {
        let mut recent = RecentEdges { kept: vec![None; 2], ..RecentEdges::default() };
        let disk = DiskId(3);
        assert_eq!((recent.keep(disk, 7, 1), recent.keep(disk, 8, 2)), (Some(0), Some(1)));
        assert_eq!((recent.keep(disk, 7, 3), recent.find(disk, 7)), (Some(0), Some((0, 3))));
        assert_eq!(recent.keep(DiskId(4), 7, 4), Some(0), "in the place of the oldest");
        assert_eq!((recent.find(disk, 7), recent.find(disk, 8)), (None, Some((1, 2))));
        recent.forget(disk, 8, 9);
        recent.forget(DiskId(4), 8, 100);
        assert_eq!((recent.find(disk, 8), recent.find(DiskId(4), 7)), (None, Some((0, 4))));
        assert_eq!(RecentEdges::default().keep(disk, 1, 1), None, "without a buffer");
    }
}
