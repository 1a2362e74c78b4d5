//! The memory tier of one disk: which sectors it has copies of, and their positions in the memory
//! area. All data of the memory tier is also on flash or on the backing. Decision 7
//! (docs/decisions/0007-memory-tier.md) defines when a copy is valid.
//!
//! The memory area is divided into pages, which have their own directory. Methods report copies to
//! the caller through closures, because the engine performs the copies. Sectors are sectors of the
//! disk, and offsets in the area are bytes.

mod readers;

use crate::admission::{Admission, AdmissionEffect, Run};
use crate::command::{CommandError, MEMORY_PAGE_BYTES_MAX, MEMORY_PAGES_MIN, MemoryConfig};
use crate::directory::Directory;
use crate::io::Promote;
use crate::policy::PolicyKind;
use crate::units::{BLOCK_BYTES_MIN, SECTOR_BYTES};
use readers::Readers;
pub(crate) use readers::{Ahead, Seen};

/// Replacement policy of the memory tier: sequential scans must not evict data that is read
/// repeatedly.
const POLICY: &str = "s3-fifo";

/// The memory tier keeps no data of reads that are longer than 1/`SHARE_MAX` of its memory.
const SHARE_MAX: u64 = 4;

/// Sectors that are contiguous in the memory of a disk's memory tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageRange {
    /// Offset of the first sector in the memory of the disk's memory tier, bytes.
    pub(crate) offset: u64,
    /// Index of the first sector in the request.
    pub(crate) at: u64,
    pub(crate) count: u64,
}

/// The memory tier of one disk.
pub(crate) struct Memory {
    config: MemoryConfig,
    directory: Directory,
    /// For each page, its sectors that were read ahead and have not been read since.
    ahead: Vec<u16>,
    readers: Readers,
}

impl Memory {
    /// Creates an empty memory tier for a disk of `disk_bytes`.
    pub(crate) fn new(config: MemoryConfig, disk_bytes: u64) -> Result<Memory, CommandError> {
        let page_bytes = u64::from(config.page_bytes);
        let workable = page_bytes.is_power_of_two()
            && (BLOCK_BYTES_MIN..=u64::from(MEMORY_PAGE_BYTES_MAX)).contains(&page_bytes)
            && disk_bytes.div_ceil(page_bytes) <= 1 << 32;
        let pages = config.bytes / page_bytes.max(1);
        if !workable || pages >= u64::from(u32::MAX) {
            return Err(CommandError::Unworkable);
        }
        if pages < MEMORY_PAGES_MIN {
            return Err(CommandError::TooSmall);
        }
        let sectors = pages * page_bytes / SECTOR_BYTES;
        Ok(Memory {
            directory: Self::directory(&config),
            ahead: vec![0; pages as usize],
            readers: Readers::new(sectors, page_bytes / SECTOR_BYTES),
            config,
        })
    }

    fn directory(config: &MemoryConfig) -> Directory {
        let policy = PolicyKind::from_name(POLICY).expect("it is one of the policies");
        let shift = (u64::from(config.page_bytes) / SECTOR_BYTES).ilog2();
        let pages = config.bytes / u64::from(config.page_bytes);
        Directory::new(pages as u32, shift, policy, Admission::default())
    }

    /// Drops all data of the memory tier.
    pub(crate) fn clear(&mut self) {
        self.directory = Self::directory(&self.config);
        self.ahead.fill(0);
    }

    /// Records a read of the disk's sectors `first..end`.
    pub(crate) fn observe(&mut self, first: u64, end: u64) -> Seen {
        self.readers.observe(first, end)
    }

    /// Records that sectors were not read ahead, or were dropped before a guest read them.
    pub(crate) fn missed_ahead(&mut self, what: Ahead) {
        self.readers.missed(what);
    }

    /// Returns true if the memory tier has all of these sectors.
    #[inline]
    pub(crate) fn holds(&self, first: u64, end: u64) -> bool {
        let directory = &self.directory;
        directory.spans(first, end).all(|span| {
            let found = directory.find(span);
            found.is_some_and(|sector| directory.index.count_valid(sector, span.count) == span.count)
        })
    }

    /// Serves a read of sectors that the memory tier has. Returns true if any of the sectors was
    /// read ahead and not read since. The first read of sectors that were read ahead does not count
    /// as a use of the page.
    pub(crate) fn read(
        &mut self,
        first: u64,
        end: u64,
        promote: Promote,
        mut copy: impl FnMut(PageRange),
    ) -> bool {
        let (mut was_ahead, mut at) = (false, 0);
        for span in self.directory.spans(first, end) {
            let sector = self.directory.find(span).expect("the caller checked `holds`");
            copy(PageRange { offset: sector * SECTOR_BYTES, at, count: span.count });
            at += span.count;
            let (page, bits) = self.bits(sector, span.count);
            if promote == Promote::Never {
                was_ahead |= self.ahead[page] & bits != 0;
            } else if self.ahead[page] & bits == 0 {
                self.directory.touch(sector, Run::Other);
            } else {
                self.ahead[page] &= !bits;
                was_ahead = true;
            }
        }
        was_ahead
    }

    /// Keeps the data of a read of the sectors `first..end` that the memory tier does not have yet.
    pub(crate) fn keep(&mut self, first: u64, end: u64, copy: impl FnMut(PageRange)) {
        let sectors = self.config.bytes / SECTOR_BYTES;
        if (end - first) * SHARE_MAX <= sectors {
            self.bring(first, end, false, copy);
        }
    }

    /// Keeps data that was read ahead.
    pub(crate) fn keep_ahead(&mut self, first: u64, end: u64, copy: impl FnMut(PageRange)) {
        self.bring(first, end, true, copy);
    }

    fn bring(&mut self, first: u64, end: u64, ahead: bool, mut copy: impl FnMut(PageRange)) {
        let mut at = 0;
        for span in self.directory.spans(first, end) {
            let piece_at = at;
            at += span.count;
            let found = self.directory.find(span);
            let index = &self.directory.index;
            if found.is_some_and(|sector| index.count_valid(sector, span.count) == span.count) {
                continue;
            }
            // Any page may be evicted, because copies are carried out in order, so that no copy is
            // in progress.
            let placed =
                self.directory.bring(span, found, (Run::Other, AdmissionEffect::Clean), |_, _| false);
            let Ok(placed) = placed else { continue };
            let (page, bits) = self.bits(placed.sector, span.count);
            if found.is_none() {
                self.ahead[page] = 0;
            }
            for sector in placed.sector..placed.sector + span.count {
                // Data in memory has no checksum.
                self.directory.index.set_valid(sector, 0);
            }
            match ahead {
                true => self.ahead[page] |= bits,
                false => self.ahead[page] &= !bits,
            }
            copy(PageRange { offset: placed.sector * SECTOR_BYTES, at: piece_at, count: span.count });
        }
    }

    /// Updates existing pages with data that was written to the sectors `first..end`.
    pub(crate) fn renew(&mut self, first: u64, end: u64, mut copy: impl FnMut(PageRange)) {
        let mut at = 0;
        for span in self.directory.spans(first, end) {
            if let Some(sector) = self.directory.find(span) {
                (sector..sector + span.count).for_each(|sector| self.directory.index.set_valid(sector, 0));
                copy(PageRange { offset: sector * SECTOR_BYTES, at, count: span.count });
            }
            at += span.count;
        }
    }

    /// Drops the sectors `first..end`.
    pub(crate) fn invalidate(&mut self, first: u64, end: u64) {
        let mut runs = self.directory.cached_runs(first, end);
        while let Some((sector, count)) = runs.next(&self.directory) {
            self.directory.index.clear_valid(sector, count);
            let (page, bits) = self.bits(sector, count);
            self.ahead[page] &= !bits;
        }
    }

    /// Returns the page size in bytes.
    pub(crate) fn page_bytes(&self) -> u32 {
        self.config.page_bytes
    }

    /// Returns the size of the memory area in bytes.
    pub(crate) fn area_bytes(&self) -> u64 {
        self.config.bytes
    }

    /// Returns the bytes of the memory area that hold data.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.directory.index.sectors_valid() * SECTOR_BYTES
    }

    /// Returns the memory use of the memory tier without the memory area itself, bytes.
    pub(crate) fn index_bytes(&self) -> u64 {
        self.directory.bytes() + 2 * self.ahead.capacity() as u64
    }

    /// Returns the page that holds `sector`, and a bit mask of `count` sectors of this page from
    /// `sector` on.
    fn bits(&self, sector: u64, count: u64) -> (usize, u16) {
        let shift = self.directory.block_shift();
        let inside = sector & ((1 << shift) - 1);
        ((sector >> shift) as usize, (((1u32 << count) - 1) << inside) as u16)
    }
}

#[cfg(test)]
mod tests;
