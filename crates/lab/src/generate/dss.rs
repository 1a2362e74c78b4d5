//! Generates the load of a decision-support database. Queries scan ranges of large tables and look
//! up rows through indexes. Each of about twenty users runs one query at a time.
//!
//! Published: a database of 15 GB with 8 KB I/O. A cache of 8 GB with 8 KB blocks has 89 % hits.
//! Without the cache, there are 61.7 transactions per minute, which take 20.389 s each. With the
//! cache, there are 112.9 transactions per minute, which take 10.859 s each. Rate times response
//! time is the number of users: 21. With the cache, the response time is about half as long,
//! although the disk reads take much less than half of the time. So about half of the response time
//! without the cache is not I/O. The generator uses this part as think time. Layout, skew, I/Os per
//! query and think time are fitted.

use super::common::{CLIENTS, FOOTPRINT, PERCENT, REQUEST, THETA, THINK_US, WARMUP, check_sectors, scaled};
use super::parameters::{Bytes, parameters};
use super::{Clients, Experiment, Generate, Load, Turn};
use crate::prng::Prng;
use crate::workload::{Scatter, Zipf};
use hob_trace::Op;

parameters! {
    Dss {
        transactions: u64 = 420, in 0..=1 << 24, "number of measured queries of all users together";
        clients: u64 = 21, in CLIENTS, "users (published rate times published response time)";
        database: Bytes = Bytes(15 << 30), in FOOTPRINT, "size of the database";
        io: Bytes = Bytes(8192), in REQUEST, "size of a request";
        cache: Bytes = Bytes(8 << 30), "cache of the set-up";
        index_percent: f64 = 30.0, in PERCENT, "share of the database that is indexes and small tables (fitted)";
        lookup_percent: f64 = 25.0, in PERCENT, "share of requests that look rows up, the others scan (fitted)";
        spread_percent: f64 = 0.0, "difference in look-ups between the three types of query: first fewer, third more (chosen)";
        lookup_theta: f64 = 0.9, in THETA, "skew of look-ups over the indexes (fitted)";
        partitions: u64 = 32, in 1..=1 << 20, "parts of the large tables; a query scans within one (fitted)";
        partition_theta: f64 = 1.3, in THETA, "skew of queries over partitions: most queries read recent data (fitted)";
        ios: u64 = 1_080, in 1..=1 << 32, "requests of a query (fitted)";
        think_us: u64 = 9_750, in THINK_US, "processing between requests, microseconds (fitted)";
        warmup_per_block: f64 = 4.0, in WARMUP, "warm-up requests for each block of the database (fitted)";
    }
}

impl Generate for Dss {
    const NAME: &'static str = "dss";
    const SUMMARY: &'static str = "decision support: scans and index look-ups of 21 users";
    const SOURCE: &'static str = "vSphere Flash Read Cache study, decision-support database";

    fn experiment(&self) -> Result<Experiment, String> {
        check_sectors("io", self.io)?;
        let lookups = self.lookup_percent - self.spread_percent..=self.lookup_percent + self.spread_percent;
        if self.spread_percent < 0.0 || *lookups.start() < 0.0 || *lookups.end() > 100.0 {
            return Err(format!("spread-percent={}: expected look-ups of 0 to 100 %", self.spread_percent));
        }
        let bytes = scaled(self.database, self.scale, self.io.0);
        let blocks = bytes / self.io.0;
        let index_blocks = (blocks as f64 * self.index_percent / 100.0) as u64;
        let partition_blocks = (blocks - index_blocks) / self.partitions;
        if index_blocks == 0 || partition_blocks == 0 {
            return Err(format!("scale={}: too little is left of the database", self.scale));
        }
        let warmup = (self.warmup_per_block * blocks as f64) as u64;
        let users = Users {
            config: self.clone(),
            lookups: (Zipf::new(index_blocks, self.lookup_theta), Scatter::new(index_blocks, self.seed)),
            queries: (
                Zipf::new(self.partitions, self.partition_theta),
                Scatter::new(self.partitions, self.seed),
            ),
            index_blocks,
            partition_blocks,
            left: warmup.saturating_add(self.transactions * self.ios),
            scans: vec![Scan::default(); self.clients as usize],
            queries_begun: 0,
            dice: Prng::new(self.seed),
        };
        Ok(Experiment {
            disks: vec![bytes],
            cache_bytes: self.cache.0 / self.scale,
            block_bytes: 8192,
            warmup,
            load: Load::Closed(Box::new(users)),
        })
    }
}

struct Users {
    config: Dss,
    lookups: (Zipf, Scatter),
    queries: (Zipf, Scatter),
    /// Number of index blocks. Indexes come first, followed by the partitions.
    index_blocks: u64,
    partition_blocks: u64,
    left: u64,
    scans: Vec<Scan>,
    queries_begun: u32,
    dice: Prng,
}

/// Number of types of query.
const TYPES: u32 = 3;

/// The present query of one user: a scan, with index look-ups in between.
#[derive(Clone, Copy, Debug, Default)]
struct Scan {
    /// Number of the partition that the query scans.
    partition: u64,
    /// Block that the scan read last, counted from the start of the partition. Before the first
    /// read, a random block of the partition.
    block: u64,
    /// Number of requests that the query will still make, look-ups included.
    left: u64,
    /// Type of the query. Queries of all types begin in turn.
    of_type: u32,
}

impl Clients for Users {
    fn count(&self) -> u32 {
        self.scans.len() as u32
    }

    fn next(&mut self, client: u32) -> Option<Turn> {
        self.left = self.left.checked_sub(1)?;
        let scan = &mut self.scans[client as usize];
        if scan.left == 0 {
            scan.partition = self.queries.1.place(self.queries.0.rank(&mut self.dice));
            scan.block = self.dice.below(self.partition_blocks);
            scan.left = self.config.ios;
            scan.of_type = self.queries_begun % TYPES;
            self.queries_begun += 1;
        }
        scan.left -= 1;
        let lookups =
            self.config.lookup_percent + (f64::from(scan.of_type) - 1.0) * self.config.spread_percent;
        let block = if self.dice.unit() * 100.0 < lookups {
            self.lookups.1.place(self.lookups.0.rank(&mut self.dice))
        } else {
            scan.block = (scan.block + 1) % self.partition_blocks;
            self.index_blocks + scan.partition * self.partition_blocks + scan.block
        };
        Some(Turn {
            think_ns: self.config.think_us * 1000,
            op: Op::Read,
            offset: block * self.config.io.0,
            len: self.config.io.0 as u32,
            disk: 0,
            tag: 2 * scan.of_type + u32::from(scan.left == 0),
        })
    }
}
