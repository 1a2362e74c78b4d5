//! A modelled flash device: when would this I/O have completed?
//!
//! Like [`disk_model`](crate::disk_model), the model says *when*, never *what*, answers at submission, and gives the
//! same completions for the same calls. An I/O passes three stations, each of which may be the bottleneck:
//!
//! ```text
//!          at most queue_depth_max at a time
//! read     controller ─► lanes (dies, by page address) ─► link
//! write    controller ─► link ─► buffer: done            └► lanes (whichever is next), later
//! ```
//!
//! The controller takes one command after the other: that is the device's rating in I/Os a second. Lanes work side by
//! side: one I/O alone gets the latency of one lane, so the rating is met only at depth. A lane that programs a page
//! makes reads of that lane wait. The link carries bytes one after the other: that is the rating in bytes a second.
//! Not modelled: garbage collection as a process (its cost is in the sustained ratings), wear, heat, and trim.
//!
//! Units: bytes and nanoseconds.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::disk_model::Access;
use crate::rng::scatter;

/// Everything that is fixed when the device is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashConfig {
    /// Commands the device works on; more wait.
    pub queue_depth_max: usize,
    /// Dies that work side by side.
    pub lanes: usize,
    /// Bytes that lie together on one die.
    pub page_bytes: u64,
    /// The controller's time for one read command.
    pub read_command_ns: u64,
    /// The controller's time for one write command, garbage collection included.
    pub write_command_ns: u64,
    /// A die's time to read a page.
    pub read_page_ns: u64,
    /// A die's time to program a page.
    pub program_page_ns: u64,
    /// Rating of sequential reads.
    pub read_bytes_per_s: u64,
    /// Rating of sequential writes.
    pub write_bytes_per_s: u64,
    /// Bytes that may be acknowledged and not yet be programmed.
    pub write_buffer_bytes: u64,
}

impl FlashConfig {
    /// A SATA SSD of 39 500 random 4 KiB reads a second at queue depth 32, as the Flash Read Cache study quotes.
    /// That, 23 000 random writes, 270 and 205 MB/s, ten channels and latencies below 0.1 ms are the ratings of the
    /// Intel SSD 320 (300 GB, 2011). Pages are programmed four at a time in 1.2 ms.
    pub const fn sata_ssd() -> Self {
        FlashConfig {
            queue_depth_max: 32,
            lanes: 10,
            page_bytes: 4096,
            read_command_ns: 25_250,
            write_command_ns: 43_400,
            read_page_ns: 55_000,
            program_page_ns: 150_000,
            read_bytes_per_s: 270_000_000,
            write_bytes_per_s: 205_000_000,
            write_buffer_bytes: 16 << 20,
        }
    }

    /// A PCIe card of 750 000 random 4 KiB reads a second at queue depth 256, as the study quotes. That, 95 000
    /// sustained random writes, 3.3 and 0.63 GB/s, and writes acknowledged in 13 µs by a protected buffer are the
    /// ratings of the Micron P420m (1.4 TB, 2013).
    pub const fn pcie_card() -> Self {
        FlashConfig {
            queue_depth_max: 256,
            lanes: 128,
            page_bytes: 4096,
            read_command_ns: 1_325,
            write_command_ns: 10_500,
            read_page_ns: 70_000,
            program_page_ns: 300_000,
            read_bytes_per_s: 3_300_000_000,
            write_bytes_per_s: 630_000_000,
            write_buffer_bytes: 64 << 20,
        }
    }

    fn check(&self) {
        assert!(self.queue_depth_max > 0 && self.lanes > 0, "a device does one thing at a time at least");
        assert!(self.page_bytes > 0, "pages hold something");
        assert!(self.read_bytes_per_s > 0 && self.write_bytes_per_s > 0, "a device transfers something");
    }
}

/// The device. Call [`FlashModel::submit`] for each I/O, in the order they arrive.
#[derive(Clone, Debug)]
pub struct FlashModel {
    config: FlashConfig,
    /// Completion times of commands that may still be under way.
    under_way: BinaryHeap<Reverse<u64>>,
    controller_free: u64,
    link_free: u64,
    lanes_free: Vec<u64>,
    /// The lane the next page is programmed on: devices write where it suits them.
    next_lane: usize,
    /// Buffered pages, by the time they are programmed.
    buffered: BinaryHeap<Reverse<u64>>,
}

impl FlashModel {
    /// An idle device.
    ///
    /// # Panics
    /// When the configuration contradicts itself: a depth, lane count, page or rate of zero.
    pub fn new(config: FlashConfig) -> Self {
        config.check();
        FlashModel {
            under_way: BinaryHeap::new(),
            controller_free: 0,
            link_free: 0,
            lanes_free: vec![0; config.lanes],
            next_lane: 0,
            buffered: BinaryHeap::new(),
            config,
        }
    }

    /// What the device was built with.
    pub fn config(&self) -> &FlashConfig {
        &self.config
    }

    /// Takes an I/O that arrives at `now_ns` and returns when it completes, in nanoseconds of the same clock. A flush
    /// is a command that waits for nothing: the write buffer survives a power cut.
    pub fn submit(&mut self, now_ns: u64, op: Access, offset: u64, len: u64) -> u64 {
        let start = self.admit(now_ns);
        let command_ns = match op {
            Access::Read => self.config.read_command_ns,
            Access::Write | Access::Flush => self.config.write_command_ns,
        };
        self.controller_free = self.controller_free.max(start) + command_ns;
        let accepted = self.controller_free;
        let done = match op {
            Access::Read => self.read(accepted, offset, len),
            Access::Write => self.write(accepted, offset, len),
            Access::Flush => accepted,
        };
        self.under_way.push(Reverse(done));
        done
    }

    /// When a command that arrives now finds a place in the queue.
    fn admit(&mut self, now: u64) -> u64 {
        while self.under_way.peek().is_some_and(|&Reverse(done)| done <= now) {
            self.under_way.pop();
        }
        if self.under_way.len() < self.config.queue_depth_max {
            return now;
        }
        let Reverse(first_done) = self.under_way.pop().expect("a queue at its limit is not empty");
        first_done
    }

    /// The link sends pages while later ones are still being read, so it is occupied from the command on and the last
    /// page follows when both are ready.
    fn read(&mut self, accepted: u64, offset: u64, len: u64) -> u64 {
        let FlashConfig { read_page_ns, read_bytes_per_s, page_bytes, .. } = self.config;
        let mut read = accepted;
        for page in pages(offset, len, page_bytes) {
            let lane = (scatter(page) % self.lanes_free.len() as u64) as usize;
            self.lanes_free[lane] = self.lanes_free[lane].max(accepted) + read_page_ns;
            read = read.max(self.lanes_free[lane]);
        }
        self.link_free = self.link_free.max(accepted) + transfer_ns(len, read_bytes_per_s);
        read.max(self.link_free) + transfer_ns(len.min(page_bytes), read_bytes_per_s)
    }

    fn write(&mut self, accepted: u64, offset: u64, len: u64) -> u64 {
        let FlashConfig { program_page_ns, write_bytes_per_s, page_bytes, write_buffer_bytes, .. } =
            self.config;
        self.link_free = self.link_free.max(accepted) + transfer_ns(len, write_bytes_per_s);
        let room_for = (write_buffer_bytes / page_bytes) as usize;
        let mut done = self.link_free;
        for _ in pages(offset, len, page_bytes) {
            while let Some(&Reverse(programmed)) = self.buffered.peek()
                && (programmed <= done || self.buffered.len() >= room_for.max(1))
            {
                done = done.max(programmed);
                self.buffered.pop();
            }
            let lane = &mut self.lanes_free[self.next_lane];
            *lane = (*lane).max(done) + program_page_ns;
            self.buffered.push(Reverse(*lane));
            self.next_lane = (self.next_lane + 1) % self.lanes_free.len();
        }
        done
    }
}

fn pages(offset: u64, len: u64, page_bytes: u64) -> impl Iterator<Item = u64> {
    offset / page_bytes..offset.saturating_add(len).div_ceil(page_bytes)
}

fn transfer_ns(bytes: u64, bytes_per_s: u64) -> u64 {
    (u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s)) as u64
}
