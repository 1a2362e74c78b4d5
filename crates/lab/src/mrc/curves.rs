//! Results of exact miss-ratio curves. For each cache size, the curves give all counts that a
//! simulation of that size would give.

use hob_engine::sizing::Curve;
use hob_engine::units::SECTOR_BYTES;

use super::Mode;
use super::steps::Values;

/// Totals of a trace's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Number of read requests.
    pub reads: u64,
    /// Total length of the read requests, bytes.
    pub read_bytes: u64,
    /// Number of sectors that reads touch, counted once per read.
    pub read_sectors: u64,
    /// Number of write requests.
    pub writes: u64,
    /// Total length of the write requests, bytes.
    pub write_bytes: u64,
    /// Number of sectors that writes cover completely.
    pub write_sectors: u64,
    /// Number of sectors that writes cover in part. In write-back, the data of each of these
    /// sectors goes to the backing as a separate write.
    pub write_parts: u64,
    /// Number of blocks that entered the cache at least once.
    pub blocks: u64,
}

/// Miss-ratio curves of a trace for one block size and write mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Curves {
    pub(super) block_bytes: u64,
    pub(super) mode: Mode,
    pub(super) totals: Totals,
    pub(super) read_hits: Values,
    pub(super) read_hit_bytes: Values,
    pub(super) read_valid_sectors: Values,
    pub(super) write_hits: Values,
    pub(super) absorbed_sectors: Values,
    pub(super) destages: Values,
}

/// Results of a cache of one size. Counts are numbers of requests unless their name ends in
/// `_bytes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct At {
    /// Size of the cache in blocks.
    pub blocks: u64,
    /// Number of reads whose sectors are all valid in the cache.
    pub read_hits: u64,
    /// Number of bytes of read hits.
    pub read_hit_bytes: u64,
    /// Number of writes whose blocks are all in the cache when the write arrives. Only blocks in
    /// which the write covers a whole sector count. A write that covers no whole sector is not a
    /// hit. Always 0 in write-around.
    pub write_hits: u64,
    /// Number of written bytes that never reach the backing, because they are overwritten or
    /// discarded while dirty. This happens only in write-back.
    pub absorbed_bytes: u64,
    /// Number of reads of the backing: all misses.
    pub backing_reads: u64,
    /// Number of bytes read from the backing.
    pub backing_read_bytes: u64,
    /// Number of writes to the backing. In write-back, each destage of a block and each partly
    /// covered sector is one write. Data that is dirty at the end is destaged.
    pub backing_writes: u64,
    /// Number of bytes written to the backing.
    pub backing_write_bytes: u64,
    /// Number of bytes written to flash: invalid sectors of read misses, and whole sectors of
    /// writes.
    pub flash_write_bytes: u64,
}

impl Curves {
    /// Returns the block size of the cache, bytes.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Returns the write mode of the cache.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the totals of the trace.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Returns the read miss ratio by number of requests.
    pub fn read_misses(&self) -> Curve {
        self.read_hits.miss_curve(self.totals.reads)
    }

    /// Returns the smallest cache size, at least 1 block, above which more blocks have no effect.
    pub fn blocks_max(&self) -> u64 {
        let values = [
            &self.read_hits,
            &self.read_hit_bytes,
            &self.read_valid_sectors,
            &self.write_hits,
            &self.absorbed_sectors,
            &self.destages,
        ];
        values.into_iter().map(Values::end).fold(1, u64::max)
    }

    /// Returns the results of a cache of `blocks` blocks. For 0 blocks, the results are those
    /// without a cache.
    pub fn at(&self, blocks: u64) -> At {
        let totals = &self.totals;
        let (read_hits, read_hit_bytes) = (self.read_hits.at(blocks), self.read_hit_bytes.at(blocks));
        let absorbed_bytes = self.absorbed_sectors.at(blocks) * SECTOR_BYTES;
        let backing_writes = match self.mode {
            Mode::WriteBack if blocks > 0 => self.destages.at(blocks) + totals.write_parts,
            _ => totals.writes,
        };
        let fills = totals.read_sectors - self.read_valid_sectors.at(blocks);
        let flash_write_sectors = match self.mode {
            _ if blocks == 0 => 0,
            Mode::WriteAround => fills,
            Mode::WriteThrough | Mode::WriteBack => fills + totals.write_sectors,
        };
        At {
            blocks,
            read_hits,
            read_hit_bytes,
            write_hits: self.write_hits.at(blocks),
            absorbed_bytes,
            backing_reads: totals.reads - read_hits,
            backing_read_bytes: totals.read_bytes - read_hit_bytes,
            backing_writes,
            backing_write_bytes: totals.write_bytes - absorbed_bytes,
            flash_write_bytes: flash_write_sectors * SECTOR_BYTES,
        }
    }
}
