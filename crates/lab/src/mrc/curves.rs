//! Results of exact curves: for each size, every count that a simulation of that size would give.

use hob_engine::sizing::Curve;
use hob_engine::units::SECTOR_BYTES;

use super::Mode;
use super::steps::Values;

/// Totals of a trace's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Read requests.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Number of sectors that they touch, counted each time.
    pub read_sectors: u64,
    /// Write requests.
    pub writes: u64,
    /// Their bytes.
    pub write_bytes: u64,
    /// Number of sectors that they cover completely.
    pub write_sectors: u64,
    /// Number of sectors that they cover in part: each is a separate write to the backing in write-back.
    pub write_parts: u64,
    /// Bytes in those parts.
    pub write_part_bytes: u64,
    /// Number of blocks that entered the cache at least once.
    pub blocks: u64,
}

/// A trace's curves for one block size and mode.
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

/// Results of a cache of one size for the trace. Counts are requests unless they say bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// The cache's size.
    pub blocks: u64,
    /// Number of reads whose sectors are all valid.
    pub read_hits: u64,
    /// Their bytes.
    pub read_hit_bytes: u64,
    /// Number of writes whose blocks are all cached when they arrive. Only blocks of which they cover a
    /// sector count, and writes that cover none are not hits. Always 0 in write-around.
    pub write_hits: u64,
    /// Written bytes that never reach the backing because they are overwritten or discarded while dirty.
    /// Write-back only.
    pub absorbed_bytes: u64,
    /// Reads of the backing: all misses.
    pub backing_reads: u64,
    /// Their bytes.
    pub backing_read_bytes: u64,
    /// Writes to the backing. In write-back: one for each destage of a block's dirty sectors, and one for
    /// each sector that a write covers in part. Data that is dirty at the end is destaged.
    pub backing_writes: u64,
    /// Their bytes.
    pub backing_write_bytes: u64,
    /// Bytes written to flash: sectors of misses that were not valid yet, and whole sectors of writes.
    pub flash_write_bytes: u64,
}

impl Curves {
    /// Returns the block size.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Returns the write mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the totals of the trace.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Returns the read miss ratio by requests.
    pub fn read_misses(&self) -> Curve {
        self.read_hits.miss_curve(self.totals.reads)
    }

    /// Returns the read miss ratio by bytes.
    pub fn read_miss_bytes(&self) -> Curve {
        self.read_hit_bytes.miss_curve(self.totals.read_bytes)
    }

    /// Returns the share of the writes with a missing block.
    pub fn write_misses(&self) -> Curve {
        self.write_hits.miss_curve(self.totals.writes)
    }

    /// Returns the share of the written bytes that reach the backing.
    pub fn written_through(&self) -> Curve {
        self.absorbed_sectors.scaled(SECTOR_BYTES).miss_curve(self.totals.write_bytes)
    }

    /// Returns the smallest cache (at least 1 block) beyond which more blocks change nothing.
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

    /// Returns the results of a cache of that many blocks; of 0 blocks, those without a cache.
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
