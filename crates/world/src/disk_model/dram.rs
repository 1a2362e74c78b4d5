//! The controller's read cache: pages of memory, least recently used first out, and reading ahead of streams.
//!
//! It remembers which pages it holds, never what is in them.

use std::collections::BTreeMap;

const PAGE_BYTES: u64 = 4096;

/// A read cache in the controller. Reads found in it whole cost no disk; what is read or written passes through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadCache {
    /// Its size.
    pub bytes: u64,
    /// Time for a read that finds everything there.
    pub latency_ns: u64,
    /// A read that follows data in the cache and misses is part of a stream: so much more is read with it. 0: nothing
    /// is read ahead.
    pub prefetch_bytes: u64,
}

/// Which pages are in memory.
#[derive(Clone, Debug)]
pub(super) struct Dram {
    config: ReadCache,
    /// Page to the moment of its last use, and back.
    used_at: BTreeMap<u64, u64>,
    by_age: BTreeMap<u64, u64>,
    clock: u64,
}

impl Dram {
    pub(super) fn new(config: ReadCache) -> Self {
        Dram { config, used_at: BTreeMap::new(), by_age: BTreeMap::new(), clock: 0 }
    }

    /// Is all of it there? If so, it is used now.
    pub(super) fn hit(&mut self, offset: u64, len: u64) -> bool {
        let all = pages(offset, len).all(|page| self.used_at.contains_key(&page));
        if all {
            self.take(offset, len);
        }
        all
    }

    /// How long a read that missed is to be: to its end, or beyond if it continues a stream.
    pub(super) fn read_len(&self, offset: u64, len: u64, capacity_bytes: u64) -> u64 {
        let before = (offset / PAGE_BYTES).checked_sub(1);
        let follows = before.is_some_and(|page| self.used_at.contains_key(&page));
        let ahead = if follows { self.config.prefetch_bytes } else { 0 };
        len.saturating_add(ahead).min(capacity_bytes - offset)
    }

    /// These bytes passed through the controller.
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

/// The pages that a range touches. One that it covers in part counts as read whole: disks read no less.
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
    fn only_what_follows_cached_data_is_read_ahead_of() {
        let mut dram = Dram::new(ReadCache { bytes: 1 << 20, latency_ns: 1, prefetch_bytes: 64 << 10 });
        assert_eq!(dram.read_len(0, 4096, 1 << 30), 4096);
        dram.take(0, 4096);
        assert_eq!(dram.read_len(4096, 4096, 1 << 30), 4096 + (64 << 10));
        assert_eq!(dram.read_len(12288, 4096, 1 << 30), 4096);
        assert_eq!(dram.read_len(4096, 4096, 20_480), 16_384, "not beyond the end");
    }
}
