//! Generates the load of DVD Store, an online shop: orders read and write 8 KB at random in the
//! whole database.
//!
//! Published: a database of 15 GB with random accesses to the whole database, 60 % of them reads. A
//! RAID 5 of ten 10K disks does 8802 orders per minute, 8937 with a cache of 10 GB, and 12 319 with
//! a cache of 15 GB. The request size is not published; 8 KB is common for such databases. The
//! numbers of shoppers and of requests per order are fitted to the baseline. The cache block size
//! is not published either. With blocks of 8 KB, a cache of two thirds of the database would have
//! two thirds hits. But the published gain at 10 GB is almost zero. This is the result if blocks
//! are much larger than the requests. The generator therefore uses blocks of 512 KB.

use super::common::{CLIENTS, FOOTPRINT, PERCENT, REQUEST, WARMUP, check_sectors, draw_op, scaled};
use super::parameters::{Bytes, parameters};
use super::{Clients, Experiment, Generate, Load, Turn};
use crate::prng::Prng;

parameters! {
    DvdStore {
        transactions: u64 = 20_000, in 0..=1 << 30, "number of measured orders of all shoppers together";
        clients: u64 = 64, in CLIENTS, "shoppers, without think time (fitted)";
        database: Bytes = Bytes(15 << 30), in FOOTPRINT, "size of the database";
        io: Bytes = Bytes(8192), in REQUEST, "size of a request (usual)";
        read_percent: f64 = 60.0, in PERCENT, "share of reads";
        cache: Bytes = Bytes(15 << 30), "cache of the set-up; the second published cache has 10GiB";
        block: Bytes = Bytes(512 << 10), in Bytes(4096)..=Bytes(1 << 20), "cache block of the set-up (fitted)";
        ios: u64 = 8, in 1..=1 << 32, "requests of an order (fitted)";
        warmup_per_block: f64 = 6.0, in WARMUP, "warm-up requests for each block of the database (fitted)";
    }
}

impl Generate for DvdStore {
    const NAME: &'static str = "dvdstore";
    const SUMMARY: &'static str = "DVD Store orders: random over the whole database, 60 % reads";
    const SOURCE: &'static str = "vSphere Flash Read Cache study, DVD Store";

    fn experiment(&self) -> Result<Experiment, String> {
        check_sectors("io", self.io)?;
        let bytes = scaled(self.database, self.scale, self.io.0);
        let warmup = (self.warmup_per_block * (bytes / self.io.0) as f64) as u64;
        let shoppers = Shoppers {
            config: self.clone(),
            blocks: bytes / self.io.0,
            left: warmup.saturating_add(self.transactions * self.ios),
            in_order: vec![0; self.clients as usize],
            dice: Prng::new(self.seed),
        };
        Ok(Experiment {
            disks: vec![bytes],
            cache_bytes: self.cache.0 / self.scale,
            block_bytes: self.block.0 as u32,
            warmup,
            load: Load::Closed(Box::new(shoppers)),
        })
    }
}

struct Shoppers {
    config: DvdStore,
    blocks: u64,
    left: u64,
    /// Number of requests so far in each shopper's current order.
    in_order: Vec<u64>,
    dice: Prng,
}

impl Clients for Shoppers {
    fn count(&self) -> u32 {
        self.in_order.len() as u32
    }

    fn next(&mut self, client: u32) -> Option<Turn> {
        self.left = self.left.checked_sub(1)?;
        let done = &mut self.in_order[client as usize];
        *done = (*done + 1) % self.config.ios;
        Some(Turn {
            think_ns: 0,
            op: draw_op(self.config.read_percent, &mut self.dice),
            offset: self.dice.below(self.blocks) * self.config.io.0,
            len: self.config.io.0 as u32,
            disk: 0,
            tag: u32::from(*done == 0),
        })
    }
}
