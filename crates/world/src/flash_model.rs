//! A model of a flash device. The model computes when each I/O completes.
//!
//! Like [`disk_model`](crate::disk_model), the model stores no data, returns the completion time at
//! submission, and is deterministic. An I/O passes three stages, and each stage may be the
//! bottleneck:
//!
//! ```text
//!          at most queue_depth_max at a time
//! read     controller ─► lanes (dies, by page address) ─► link
//! write    controller ─► link ─► buffer: done            └► lanes (whichever is next), later
//! ```
//!
//! The controller processes one command at a time, which limits the device to its rated I/Os per
//! second. Lanes work in parallel, so the device reaches its rating only at a high queue depth.
//! Reads of a lane wait while the lane programs a page. The link transfers bytes serially, which
//! limits the device to its rated bytes per second. The model does not include wear, temperature,
//! trim, or garbage collection as a process. The sustained ratings include the cost of garbage
//! collection.
//!
//! Units: bytes and nanoseconds.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::disk_model::Access;
use crate::rng::scatter;

/// Configuration of a modelled flash device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashConfig {
    /// Maximum number of commands in progress on the device. Further commands wait.
    pub queue_depth_max: usize,
    /// Number of flash dies that work in parallel.
    pub lanes: usize,
    /// Number of contiguous bytes on one die.
    pub page_bytes: u64,
    /// Controller time per read command, nanoseconds.
    pub read_command_ns: u64,
    /// Controller time per write command, nanoseconds, including garbage collection.
    pub write_command_ns: u64,
    /// Time of a die to read a page, nanoseconds.
    pub read_page_ns: u64,
    /// Time of a die to program a page, nanoseconds.
    pub program_page_ns: u64,
    /// Rated bandwidth of sequential reads, bytes per second.
    pub read_bytes_per_s: u64,
    /// Rated bandwidth of sequential writes, bytes per second.
    pub write_bytes_per_s: u64,
    /// Maximum number of acknowledged bytes that are not programmed yet.
    pub write_buffer_bytes: u64,
}

impl FlashConfig {
    /// Returns a SATA SSD with 39 500 random 4 KiB reads per second at queue depth 32, the value in
    /// the Flash Read Cache study. The Intel SSD 320 (300 GB, 2011) has this rating, and 23 000
    /// random writes per second. The Intel SSD reads 270 MB/s and writes 205 MB/s, with ten
    /// channels and latencies below 0.1 ms. In the model, each die programs a page of 4 KiB in 0.15
    /// ms.
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

    /// Returns a PCIe card with 750 000 random 4 KiB reads per second at queue depth 256, the value
    /// in the Flash Read Cache study. The Micron P420m (1.4 TB, 2013) has this rating, and 95 000
    /// sustained random writes per second. The card reads 3.3 GB/s and writes 0.63 GB/s. The card's
    /// power-protected buffer acknowledges writes in 13 µs.
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

    /// Returns a current SATA SSD, the Kingston DC600M of 960 GB. The SSD does 94 000 random reads
    /// or 65 000 random writes per second, reads 560 MB/s and writes 530 MB/s (data sheet). A read
    /// of an idle device takes 0.1 ms, which is assumed.
    pub const fn sata_current() -> Self {
        FlashConfig {
            queue_depth_max: 32,
            lanes: 32,
            page_bytes: 4096,
            read_command_ns: 10_640,
            write_command_ns: 15_380,
            read_page_ns: 82_000,
            program_page_ns: 230_000,
            read_bytes_per_s: 560_000_000,
            write_bytes_per_s: 530_000_000,
            write_buffer_bytes: 32 << 20,
        }
    }

    /// Returns a current NVMe SSD with PCIe 4, the Samsung PM9A3. The SSD does 900 000 random reads
    /// or 200 000 random writes per second, reads 6.5 GB/s and writes 3.5 GB/s (data sheet, as
    /// reported by heise online, 2020). A read of an idle device takes 80 µs, which is assumed.
    pub const fn nvme_pcie4() -> Self {
        FlashConfig {
            queue_depth_max: 256,
            lanes: 256,
            page_bytes: 4096,
            read_command_ns: 1_110,
            write_command_ns: 5_000,
            read_page_ns: 78_000,
            program_page_ns: 250_000,
            read_bytes_per_s: 6_500_000_000,
            write_bytes_per_s: 3_500_000_000,
            write_buffer_bytes: 128 << 20,
        }
    }

    /// Returns a current NVMe SSD with PCIe 5, the Micron 9550 MAX of 6.4 TB. The SSD does 3.3
    /// million random reads or 640 000 random writes per second, reads 14 GB/s and writes 10 GB/s.
    /// Typical latencies are 60 µs for a read and 15 µs for a write (data sheet, as reported by
    /// StorageReview).
    pub const fn nvme_pcie5() -> Self {
        FlashConfig {
            queue_depth_max: 512,
            lanes: 768,
            page_bytes: 4096,
            read_command_ns: 303,
            write_command_ns: 1_560,
            read_page_ns: 59_000,
            program_page_ns: 300_000,
            read_bytes_per_s: 14_000_000_000,
            write_bytes_per_s: 10_000_000_000,
            write_buffer_bytes: 256 << 20,
        }
    }

    fn check(&self) {
        assert!(self.queue_depth_max > 0 && self.lanes > 0, "queue depth and number of lanes must not be 0");
        assert!(self.page_bytes > 0, "the page size must not be 0");
        assert!(self.read_bytes_per_s > 0 && self.write_bytes_per_s > 0, "the bandwidths must not be 0");
    }
}

/// Model of a flash device. Call [`FlashModel::submit`] for each I/O, in the order of arrival.
#[derive(Clone, Debug)]
pub struct FlashModel {
    config: FlashConfig,
    /// Completion times of commands that may still be in progress.
    under_way: BinaryHeap<Reverse<u64>>,
    controller_free: u64,
    link_free: u64,
    lanes_free: Vec<u64>,
    /// Lane that programs the next page. A flash device chooses the die of a write itself.
    next_lane: usize,
    /// Times at which the pages in the write buffer are programmed.
    buffered: BinaryHeap<Reverse<u64>>,
}

impl FlashModel {
    /// Creates an idle flash device.
    ///
    /// # Panics
    /// Panics if the configuration is invalid: a queue depth, lane count, page size or rate of
    /// zero.
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

    /// Returns the configuration of the device.
    pub fn config(&self) -> &FlashConfig {
        &self.config
    }

    /// Submits an I/O that arrives at `now_ns` and returns its completion time, both in nanoseconds
    /// of virtual time. A flush waits for no write, because the write buffer survives a power cut.
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

    /// Returns the time at which a command that arrives now enters the device queue.
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

    /// Performs a read. The link transfers pages while the dies read later pages, so the read ends
    /// when the last page and the link are ready.
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
