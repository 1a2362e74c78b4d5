//! Generates fio's random writes: every block of a range once in random order, as fio does with its
//! default random map.

use super::common::{CLIENTS, FOOTPRINT, REQUEST, THINK_US, check_sectors, scaled};
use super::parameters::{Bytes, parameters};
use super::seq_write::Writers;
use super::{Experiment, Generate};
use crate::workload::Scatter;

parameters! {
    RandWrite {
        span: Bytes = Bytes(300 << 30), in FOOTPRINT, "bytes written (the second published run has 500GiB)";
        io: Bytes = Bytes(4096), in REQUEST, "size of a write";
        depth: u64 = 128, in CLIENTS, "writes in flight at a time (chosen)";
        think_us: u64 = 0, in THINK_US, "pause of a writer between its writes, microseconds";
        cache: Bytes = Bytes(894 << 30), "cache of the set-up: one group's flash device";
    }
}

impl Generate for RandWrite {
    const NAME: &'static str = "rand-write";
    const SUMMARY: &'static str = "fio-like random writes of 4 KiB";
    const SOURCE: &'static str = "SmartX ZBS and vSAN comparison";

    fn experiment(&self) -> Result<Experiment, String> {
        check_sectors("io", self.io)?;
        let blocks = scaled(self.span, self.scale, self.io.0) / self.io.0;
        let order = Scatter::new(blocks, self.seed);
        let place = move |n| order.place(n);
        let writers = Writers {
            depth: self.depth as u32,
            io: self.io.0 as u32,
            blocks,
            done: 0,
            place,
            think_ns: self.think_us * 1000,
        };
        Ok(writers.experiment(self.cache.0 / self.scale))
    }
}
