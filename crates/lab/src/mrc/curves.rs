//! What exact curves tell: of each size, every count that a simulation of that size would give.

use hob_engine::sizing::Curve;
use hob_engine::units::SECTOR_BYTES;

use super::Mode;
use super::steps::Values;

/// What a trace asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Read requests.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Sectors that they touch, each as often as it is touched.
    pub read_sectors: u64,
    /// Write requests.
    pub writes: u64,
    /// Their bytes.
    pub write_bytes: u64,
    /// Sectors that they cover whole.
    pub write_sectors: u64,
    /// Sectors that they cover in part: each is a write to the backing of its own in write-back.
    pub write_parts: u64,
    /// Bytes in those parts.
    pub write_part_bytes: u64,
    /// Blocks that came into the cache at least once.
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

/// What a cache of one size does with the trace. Counts are requests unless they say bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// The cache's size.
    pub blocks: u64,
    /// Reads whose sectors are all valid.
    pub read_hits: u64,
    /// Their bytes.
    pub read_hit_bytes: u64,
    /// Writes all of whose blocks are cached when they come; only blocks of which they cover a sector count, and
    /// writes that cover none are no hits. Always 0 in write-around.
    pub write_hits: u64,
    /// Written bytes that never reach the backing: overwritten or discarded while dirty. Write-back only.
    pub absorbed_bytes: u64,
    /// Reads of the backing: all misses.
    pub backing_reads: u64,
    /// Their bytes.
    pub backing_read_bytes: u64,
    /// Writes to the backing. In write-back one for each time that a block's dirty sectors are destaged, and one for
    /// each sector that a write covers in part; what is dirty in the end is destaged.
    pub backing_writes: u64,
    /// Their bytes.
    pub backing_write_bytes: u64,
    /// Bytes written to flash: what misses bring that was not valid yet, and whole sectors of writes.
    pub flash_write_bytes: u64,
}

impl Curves {
    /// The block size.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// What writes do.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// What the trace asked for.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// The read miss ratio by requests.
    pub fn read_misses(&self) -> Curve {
        self.read_hits.miss_curve(self.totals.reads)
    }

    /// The read miss ratio by bytes.
    pub fn read_miss_bytes(&self) -> Curve {
        self.read_hit_bytes.miss_curve(self.totals.read_bytes)
    }

    /// The share of the writes that find a block of theirs missing.
    pub fn write_misses(&self) -> Curve {
        self.write_hits.miss_curve(self.totals.writes)
    }

    /// The share of the written bytes that reach the backing.
    pub fn written_through(&self) -> Curve {
        self.absorbed_sectors.scaled(SECTOR_BYTES).miss_curve(self.totals.write_bytes)
    }

    /// The smallest cache (1 block or more) beyond which more blocks change nothing.
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

    /// What a cache of that many blocks does; of 0 blocks, what happens without a cache.
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
