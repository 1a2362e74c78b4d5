//! Generates the I/O calibration of the Oracle database: small random reads at high queue depth, in
//! several passes over the same data files.
//!
//! Published: a disk of 200 GB on a RAID 5 of four 7.2K disks does 576–608 reads per second. With a
//! cache of 50 GB and 8 KB blocks, the first pass does 268 reads per second. Later passes do more
//! reads per second, with a hit ratio of 29 %. A cache of a quarter of the disk has only 25 % hits
//! under uniform reads. The generator therefore assumes that the data files have only 172 GB, in
//! extents all over the disk. The number of reads per pass is fitted to the phrase "several
//! passes".

use super::common::{CLIENTS, FOOTPRINT, REQUEST, check_sectors, scaled};
use super::parameters::{Bytes, parameters, within};
use super::{Clients, Experiment, Generate, Load, Turn};
use crate::prng::Prng;
use hob_trace::Op;

parameters! {
    Calibration {
        passes: u64 = 6, in 1..=1 << 20, "number of passes; the first one has an empty cache";
        pass_percent: f64 = 15.0, in 0.001..=10_000.0, "number of reads of a pass, per cent of the data files' blocks (fitted)";
        depth: u64 = 64, in CLIENTS, "reads in flight at a time";
        disk: Bytes = Bytes(200 << 30), in FOOTPRINT, "size of the disk";
        files: Bytes = Bytes(172 << 30), "total size of the data files on the disk (fitted)";
        io: Bytes = Bytes(8192), in REQUEST, "size of a read";
        cache: Bytes = Bytes(50 << 30), "cache of the set-up";
    }
}

/// Number of blocks in each contiguous extent of a data file.
const EXTENT_BLOCKS: u64 = 64;

impl Generate for Calibration {
    const NAME: &'static str = "calibration";
    const SUMMARY: &'static str = "Oracle I/O calibration: random 8 KB reads at depth, several passes";
    const SOURCE: &'static str = "vSphere Flash Read Cache study, Oracle I/O calibration";

    fn experiment(&self) -> Result<Experiment, String> {
        check_sectors("io", self.io)?;
        within("files", self.files, self.io..=self.disk)?;
        let blocks = scaled(self.files, self.scale, self.io.0) / self.io.0;
        let pass = ((blocks as f64 * self.pass_percent / 100.0) as u64).max(1);
        let disk = scaled(self.disk, self.scale, self.io.0).max(blocks * self.io.0);
        let readers = Readers {
            config: self.clone(),
            blocks,
            gap_blocks: (disk / self.io.0 - blocks) / blocks.div_ceil(EXTENT_BLOCKS),
            pass,
            done: 0,
            dice: Prng::new(self.seed),
        };
        Ok(Experiment {
            disks: vec![disk],
            cache_bytes: self.cache.0 / self.scale,
            block_bytes: 8192,
            warmup: 0,
            load: Load::Closed(Box::new(readers)),
        })
    }
}

struct Readers {
    config: Calibration,
    blocks: u64,
    /// Number of free blocks after each extent.
    gap_blocks: u64,
    /// Number of reads per pass.
    pass: u64,
    done: u64,
    dice: Prng,
}

impl Clients for Readers {
    fn count(&self) -> u32 {
        self.config.depth as u32
    }

    fn next(&mut self, _: u32) -> Option<Turn> {
        let pass = self.done / self.pass;
        if pass == self.config.passes {
            return None;
        }
        self.done += 1;
        let block = self.dice.below(self.blocks);
        let block = block + block / EXTENT_BLOCKS * self.gap_blocks;
        Some(Turn {
            think_ns: 0,
            op: Op::Read,
            offset: block * self.config.io.0,
            len: self.config.io.0 as u32,
            disk: 0,
            tag: pass as u32,
        })
    }
}
