//! Generates the load of disks that compete for one array. Each disk has the same random load,
//! except that the last disk may have another request size and another share of writes. Each client
//! waits for the reply to its request.

use super::common::{CLIENTS, FOOTPRINT, PERCENT, REQUEST, THETA, THINK_US, check_sectors, draw_op, scaled};
use super::parameters::{Bytes, parameters};
use super::{Clients, Experiment, Generate, Load, Turn};
use crate::prng::Prng;
use crate::workload::{Scatter, Zipf};
use hob_trace::Op;

parameters! {
    Contenders {
        requests: u64 = 100_000, in 0..=1 << 40, "number of requests of all disks together, after the sweeps";
        disks: u64 = 3, in 1..=1000, "disks";
        depth: u64 = 32, in CLIENTS, "clients of each disk, each with one request at a time";
        think_us: u64 = 0, in THINK_US, "pause of a client between its requests, microseconds";
        footprint: Bytes = Bytes(4 << 30), in FOOTPRINT, "bytes of each disk";
        theta: f64 = 0.0, in THETA, "skew over the locations of a disk; 0 is uniform";
        io: Bytes = Bytes(8192), in REQUEST, "size of a request";
        last_io: Bytes = Bytes(8192), in REQUEST, "size of a request of the last disk";
        read_percent: f64 = 100.0, in PERCENT, "share of reads";
        last_read_percent: f64 = 100.0, in PERCENT, "share of reads of the last disk";
        sweeps: u64 = 0, in 0..=100, "number of times that all data is read in order before the measured requests";
        cache: Bytes = Bytes(4 << 30), "cache of all disks together";
    }
}

impl Generate for Contenders {
    const NAME: &'static str = "contenders";
    const SUMMARY: &'static str = "disks that compete for one array, each with the same random load";
    const SOURCE: &'static str = "Storage I/O Control and similar systems; no load is published";

    fn experiment(&self) -> Result<Experiment, String> {
        check_sectors("io", self.io)?;
        check_sectors("last-io", self.last_io)?;
        let bytes = scaled(self.footprint, self.scale, self.io.0.max(self.last_io.0));
        let swept = self.sweeps.saturating_mul(bytes / self.io.0).saturating_mul(self.disks);
        let disk = |index: u64| {
            let io = if index + 1 == self.disks { self.last_io.0 } else { self.io.0 };
            let places = bytes / io;
            Contender {
                io,
                popularity: Zipf::new(places, self.theta),
                order: Scatter::new(places, self.seed.wrapping_add(index)),
            }
        };
        let clients = Contest {
            config: self.clone(),
            disks: (0..self.disks).map(disk).collect(),
            disk_bytes: bytes,
            swept,
            sent: 0,
            dice: Prng::new(self.seed),
        };
        Ok(Experiment {
            disks: vec![bytes; self.disks as usize],
            cache_bytes: self.cache.0 / self.scale,
            block_bytes: 4096,
            warmup: swept,
            load: Load::Closed(Box::new(clients)),
        })
    }
}

/// Locations on one disk, from the most popular one to the least popular one.
struct Contender {
    io: u64,
    popularity: Zipf,
    order: Scatter,
}

struct Contest {
    config: Contenders,
    disks: Vec<Contender>,
    disk_bytes: u64,
    /// Number of requests of all sweeps.
    swept: u64,
    sent: u64,
    dice: Prng,
}

impl Contest {
    /// Returns the n-th request of the sweeps. A sweep reads all data of the first disk, then of
    /// the second disk, and so on.
    fn sweep(&self, n: u64) -> Turn {
        let places = self.disk_bytes / self.config.io.0;
        Turn {
            think_ns: 0,
            op: Op::Read,
            offset: n % places * self.config.io.0,
            len: self.config.io.0 as u32,
            disk: (n / places % self.config.disks) as u16,
            tag: 0,
        }
    }
}

impl Clients for Contest {
    fn count(&self) -> u32 {
        (self.config.disks * self.config.depth) as u32
    }

    fn next(&mut self, client: u32) -> Option<Turn> {
        let n = self.sent;
        self.sent += 1;
        if n < self.swept {
            return Some(self.sweep(n));
        }
        if n - self.swept >= self.config.requests {
            return None;
        }
        let config = &self.config;
        let index = u64::from(client) % config.disks;
        let is_last = index + 1 == config.disks;
        let disk = &self.disks[index as usize];
        let place = disk.order.place(disk.popularity.rank(&mut self.dice));
        let reads = if is_last { config.last_read_percent } else { config.read_percent };
        Some(Turn {
            think_ns: config.think_us * 1000,
            op: draw_op(reads, &mut self.dice),
            offset: place * disk.io,
            len: disk.io as u32,
            disk: index as u16,
            tag: 0,
        })
    }
}
