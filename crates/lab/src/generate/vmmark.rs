//! Generates VMmark-like tiles. Each tile is a set of servers with the same load.
//!
//! Published: four tiles, 24 % reads and 76 % writes, and 1.09 TB of data. DRAM and 92 GB of flash
//! (8 % of the data) serve 96.5 % of the I/O on 11 disks. Without flash, 20 disks support two tiles
//! and 11 disks none; with flash, both support four. The size of the hot data is fitted to the 96.5
//! %. The rate of a tile is fitted to the two tiles on 20 disks. Deployments and storage moves are
//! simulated as copies on one additional disk.

use super::common::{Arrivals, FOOTPRINT, PERCENT, RATE, SECONDS, SECTOR, check_sectors, draw_op, scaled};
use super::parameters::{Bytes, parameters};
use super::{Experiment, Generate, Load};
use crate::prng::Prng;
use crate::workload::Scatter;
use hob_trace::{Op, Record};

parameters! {
    VmMark {
        tiles: u64 = 4, in 1..=1000, "tiles, each on a disk of its own";
        tile_data: Bytes = Bytes(279 << 30), in FOOTPRINT, "data of a tile: a quarter of 1.09 TB";
        read_percent: f64 = 24.0, in PERCENT, "share of reads";
        io: Bytes = Bytes(8192), in Bytes(SECTOR)..=Bytes(EXTENT), "size of a request (chosen)";
        tile_iops: f64 = 1400.0, in RATE, "I/Os a second of a tile (fitted)";
        hot_percent: f64 = 8.4, in 0.001..=99.9, "part of the data that is hot, in extents of 64 KiB (fitted)";
        hot_share_percent: f64 = 99.5, in PERCENT, "share of requests that go to hot data (fitted)";
        deploy_mib_s: f64 = 0.0, in 0.0..=1e6, "copies in MiB a second for deployments and moves, on an additional disk; 0 is none (chosen)";
        seconds: f64 = 600.0, in SECONDS, "length of the load, seconds";
        cache: Bytes = Bytes(92 << 30), "cache of the set-up";
    }
}

const EXTENT: u64 = 64 << 10;

/// Size of an I/O of a deployment: four extents (chosen).
const COPY_EXTENTS: u64 = 4;

impl Generate for VmMark {
    const NAME: &'static str = "vmmark";
    const SUMMARY: &'static str = "tiles of mixed servers, 76 % writes";
    const SOURCE: &'static str = "EMC FAST Cache study, VMmark tiles";

    fn experiment(&self) -> Result<Experiment, String> {
        check_sectors("io", self.io)?;
        let tile = scaled(self.tile_data, self.scale, EXTENT);
        let extents = tile / EXTENT;
        let hot = ((extents as f64 * self.hot_percent / 100.0) as u64).max(1);
        if hot >= extents || (self.deploy_mib_s > 0.0 && extents < 2 * COPY_EXTENTS) {
            return Err(format!("scale={}: too little is left of a tile", self.scale));
        }
        let tiles = Tiles {
            config: self.clone(),
            places: (0..self.tiles).map(|tile| Scatter::new(extents, self.seed.wrapping_add(tile))).collect(),
            hot,
            extents,
            copied: 0,
            arrivals: Arrivals::new(),
            dice: Prng::new(self.seed),
        };
        let disks = self.tiles as usize + usize::from(self.deploy_mib_s > 0.0);
        Ok(Experiment {
            disks: vec![tile; disks],
            cache_bytes: self.cache.0 / self.scale,
            block_bytes: EXTENT as u32,
            warmup: 0,
            load: Load::Open(Box::new(tiles)),
        })
    }
}

struct Tiles {
    config: VmMark,
    /// Permutation of each tile's extents, hot extents first.
    places: Vec<Scatter>,
    hot: u64,
    extents: u64,
    /// Number of I/Os of deployments so far.
    copied: u64,
    arrivals: Arrivals,
    dice: Prng,
}

impl Tiles {
    /// Returns the I/Os per second of deployments: a read and a write for each copied piece.
    fn copy_iops(&self) -> f64 {
        2.0 * self.config.deploy_mib_s * f64::from(1 << 20) / (COPY_EXTENTS * EXTENT) as f64
    }

    /// Returns the next I/O of deployments. Deployments repeatedly copy the first half of their
    /// disk to the second half, in order.
    fn copy(&mut self, at_ns: u64) -> Record {
        let pieces = (self.extents / COPY_EXTENTS / 2).max(1);
        let (piece, is_write) = (self.copied / 2 % pieces, self.copied % 2);
        self.copied += 1;
        let extent = (piece + is_write * pieces) * COPY_EXTENTS;
        Record {
            at_ns,
            offset: extent.min(self.extents - COPY_EXTENTS) * EXTENT,
            len: (COPY_EXTENTS * EXTENT) as u32,
            op: if is_write == 1 { Op::Write } else { Op::Read },
            disk: self.config.tiles as u16,
        }
    }
}

impl Iterator for Tiles {
    type Item = Record;

    fn next(&mut self) -> Option<Record> {
        let (tiles_iops, copy_iops) = (self.config.tile_iops * self.config.tiles as f64, self.copy_iops());
        let at_ns = self.arrivals.next(tiles_iops + copy_iops, &mut self.dice);
        if self.arrivals.now_s() > self.config.seconds {
            return None;
        }
        // Without deployments, no random number is drawn here.
        if copy_iops > 0.0 && self.dice.unit() * (tiles_iops + copy_iops) >= tiles_iops {
            return Some(self.copy(at_ns));
        }
        let (config, dice) = (&self.config, &mut self.dice);
        let tile = dice.below(config.tiles);
        let extent = match dice.unit() * 100.0 < config.hot_share_percent {
            true => dice.below(self.hot),
            false => self.hot + dice.below(self.extents - self.hot),
        };
        let within_extent = dice.below(EXTENT / config.io.0) * config.io.0;
        Some(Record {
            at_ns,
            offset: self.places[tile as usize].place(extent) * EXTENT + within_extent,
            len: config.io.0 as u32,
            op: draw_op(config.read_percent, dice),
            disk: tile as u16,
        })
    }
}
