//! Generates fio's sequential writes: large consecutive requests, several in flight.

use super::common::{CLIENTS, FOOTPRINT, REQUEST, check_sectors, scaled};
use super::parameters::{Bytes, parameters};
use super::{Clients, Experiment, Generate, Load, Turn};
use hob_trace::Op;

parameters! {
    SeqWrite {
        span: Bytes = Bytes(300 << 30), in FOOTPRINT, "bytes written, once, from the start of the disk (the second published run has 500GiB)";
        io: Bytes = Bytes(256 << 10), in REQUEST, "size of a write";
        depth: u64 = 32, in CLIENTS, "writes in flight at a time (chosen)";
        think_us: u64 = 0, in 0..=1_000_000_000, "pause of a writer between its writes, microseconds";
        cache: Bytes = Bytes(894 << 30), "cache of the set-up: one group's flash device";
    }
}

impl Generate for SeqWrite {
    const NAME: &'static str = "seq-write";
    const SUMMARY: &'static str = "fio-like sequential writes of 256 KiB";
    const SOURCE: &'static str = "SmartX ZBS and vSAN comparison";

    fn experiment(&self) -> Result<Experiment, String> {
        check_sectors("io", self.io)?;
        let span = scaled(self.span, self.scale, self.io.0);
        let writers = Writers {
            depth: self.depth as u32,
            io: self.io.0 as u32,
            blocks: span / self.io.0,
            done: 0,
            think_ns: self.think_us * 1000,
            place: |n| n,
        };
        Ok(writers.experiment(self.cache.0 / self.scale))
    }
}

/// Clients that write every block of a range once, in an order that `place` determines.
pub(super) struct Writers<F> {
    pub(super) depth: u32,
    pub(super) io: u32,
    pub(super) blocks: u64,
    pub(super) done: u64,
    /// Pause of a writer between its writes, nanoseconds.
    pub(super) think_ns: u64,
    /// Returns the n-th block to write.
    pub(super) place: F,
}

impl<F: Fn(u64) -> u64 + Send + 'static> Writers<F> {
    pub(super) fn experiment(self, cache_bytes: u64) -> Experiment {
        Experiment {
            disks: vec![self.blocks * u64::from(self.io)],
            cache_bytes,
            block_bytes: 64 << 10,
            warmup: 0,
            load: Load::Closed(Box::new(self)),
        }
    }
}

impl<F: Fn(u64) -> u64> Clients for Writers<F> {
    fn count(&self) -> u32 {
        self.depth
    }

    fn next(&mut self, _: u32) -> Option<Turn> {
        if self.done == self.blocks {
            return None;
        }
        let block = (self.place)(self.done);
        self.done += 1;
        let offset = block * u64::from(self.io);
        Some(Turn { think_ns: self.think_ns, op: Op::Write, offset, len: self.io, disk: 0, tag: 0 })
    }
}
