//! Generates VMmark-like tiles. Each tile is a set of servers with the same load.
//!
//! Published: four tiles, 24 % reads and 76 % writes, and 1.09 TB of data. DRAM and 92 GB of flash
//! (8 % of the data) serve at least 92 % of the I/O. Without flash, 20 disks support two tiles and
//! 11 disks none; with flash, both support four. The hot data of three tiles fits into 92 GB, and
//! that of four tiles does not: the size of the hot data is fitted to this knee and to the share
//! that flash serves. The rate of a tile is fitted to the number of tiles.

use super::common::{Arrivals, FOOTPRINT, PERCENT, RATE, SECONDS, SECTOR, check_sectors, draw_op, scaled};
use super::parameters::{Bytes, parameters};
use super::{Experiment, Generate, Load};
use crate::prng::Prng;
use crate::workload::Scatter;
use hob_trace::Record;

parameters! {
    VmMark {
        tiles: u64 = 4, in 1..=1000, "tiles, each on a disk of its own";
        tile_data: Bytes = Bytes(279 << 30), in FOOTPRINT, "data of a tile: a quarter of 1.09 TB";
        read_percent: f64 = 24.0, in PERCENT, "share of reads";
        io: Bytes = Bytes(8192), in Bytes(SECTOR)..=Bytes(EXTENT), "size of a request (chosen)";
        tile_iops: f64 = 1300.0, in RATE, "I/Os a second of a tile (fitted)";
        hot_percent: f64 = 8.7, in 0.001..=99.9, "part of the data that is hot, in extents of 64 KiB (fitted)";
        hot_share_percent: f64 = 99.5, in PERCENT, "share of requests that go there (fitted)";
        seconds: f64 = 600.0, in SECONDS, "length";
        cache: Bytes = Bytes(92 << 30), "cache of the set-up";
    }
}

const EXTENT: u64 = 64 << 10;

impl Generate for VmMark {
    const NAME: &'static str = "vmmark";
    const SUMMARY: &'static str = "tiles of mixed servers, 76 % writes";
    const SOURCE: &'static str = "EMC FAST Cache study, VMmark tiles";

    fn experiment(&self) -> Result<Experiment, String> {
        check_sectors("io", self.io)?;
        let tile = scaled(self.tile_data, self.scale, EXTENT);
        let extents = tile / EXTENT;
        let hot = ((extents as f64 * self.hot_percent / 100.0) as u64).max(1);
        if hot >= extents {
            return Err(format!("scale={}: too little is left of a tile", self.scale));
        }
        let tiles = Tiles {
            config: self.clone(),
            places: (0..self.tiles).map(|tile| Scatter::new(extents, self.seed.wrapping_add(tile))).collect(),
            hot,
            extents,
            arrivals: Arrivals::new(),
            dice: Prng::new(self.seed),
        };
        Ok(Experiment {
            disks: vec![tile; self.tiles as usize],
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
    arrivals: Arrivals,
    dice: Prng,
}

impl Iterator for Tiles {
    type Item = Record;

    fn next(&mut self) -> Option<Record> {
        let config = &self.config;
        let dice = &mut self.dice;
        let at_ns = self.arrivals.next(config.tile_iops * config.tiles as f64, dice);
        if self.arrivals.now_s() > config.seconds {
            return None;
        }
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
