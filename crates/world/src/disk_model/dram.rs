//! The controller's read cache of a modelled array: LRU pages of memory, and read-ahead of streams.
//!
//! The read cache stores page numbers but no page contents.

use std::collections::BTreeMap;

const PAGE_BYTES: u64 = 4096;

/// Configuration of a read cache in the array controller. A read needs no disk if the read cache
/// has all its data. All read and written data enters the read cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadCache {
    /// Size of the read cache, bytes.
    pub bytes: u64,
    /// Latency of a read that hits the read cache, nanoseconds.
    pub latency_ns: u64,
    /// Number of bytes to read ahead. A read that misses directly after cached data continues a
    /// stream and is extended by this number. 0 means no read-ahead.
    pub prefetch_bytes: u64,
}

/// Page numbers in the controller's read cache.
#[derive(Clone, Debug)]
pub(super) struct Dram {
    config: ReadCache,
    /// Time of the last use of each page.
    used_at: BTreeMap<u64, u64>,
    by_age: BTreeMap<u64, u64>,
    clock: u64,
}

impl Dram {
    pub(super) fn new(config: ReadCache) -> Self {
        Dram { config, used_at: BTreeMap::new(), by_age: BTreeMap::new(), clock: 0 }
    }

    /// Returns true if the whole range is in the read cache, and then marks the range's pages as
    /// used.
    pub(super) fn hit(&mut self, offset: u64, len: u64) -> bool {
        let all = pages(offset, len).all(|page| self.used_at.contains_key(&page));
        if all {
            self.take(offset, len);
        }
        all
    }

    /// Returns the length of a disk read after a miss. The read is longer than requested if it
    /// continues a stream.
    pub(super) fn read_len(&self, offset: u64, len: u64, capacity_bytes: u64) -> u64 {
        let before = (offset / PAGE_BYTES).checked_sub(1);
        let follows = before.is_some_and(|page| self.used_at.contains_key(&page));
        let ahead = if follows { self.config.prefetch_bytes } else { 0 };
        len.saturating_add(ahead).min(capacity_bytes - offset)
    }

    /// Records that this range is in the read cache now.
    pub(super) fn take(&mut self, offset: u64, len: u64) {
        for page in pages(offset, len) {
            self.clock += 1;
            if let Some(before) = self.used_at.insert(page, self.clock) {
                self.by_age.remove(&before);
            }
            self.by_age.insert(self.clock, page);
        }
        while self.used_at.len() as u64 > self.config.bytes / PAGE_BYTES
            && let Some((_, page)) = self.by_age.pop_first()
        {
            self.used_at.remove(&page);
        }
    }
}

/// Returns the pages that a range touches. A page that the range covers in part counts as read
/// completely.
fn pages(offset: u64, len: u64) -> impl Iterator<Item = u64> {
    offset / PAGE_BYTES..(offset + len).div_ceil(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_unused_for_longest_leaves() {
        let mut dram = Dram::new(ReadCache { bytes: 3 * 4096, latency_ns: 1, prefetch_bytes: 0 });
        dram.take(0, 3 * 4096);
        assert!(dram.hit(0, 4096));
        dram.take(8 << 20, 4096);
        assert!(!dram.hit(4096, 4096), "page 1 was the oldest");
        assert!(dram.hit(0, 4096) && dram.hit(8192, 4096) && dram.hit(8 << 20, 4096));
        assert!(!dram.hit(0, 8192), "half a hit is none");
        assert_eq!((dram.used_at.len(), dram.by_age.len()), (3, 3));
    }

    #[test]
    fn read_ahead_only_follows_cached_data() {
        let mut dram = Dram::new(ReadCache { bytes: 1 << 20, latency_ns: 1, prefetch_bytes: 64 << 10 });
        assert_eq!(dram.read_len(0, 4096, 1 << 30), 4096);
        dram.take(0, 4096);
        assert_eq!(dram.read_len(4096, 4096, 1 << 30), 4096 + (64 << 10));
        assert_eq!(dram.read_len(12288, 4096, 1 << 30), 4096);
        assert_eq!(dram.read_len(4096, 4096, 20_480), 16_384, "not beyond the end");
    }
}
