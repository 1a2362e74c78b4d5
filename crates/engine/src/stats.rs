//! Statistics of one disk: a count and a latency histogram per outcome. They include the statistics
//! that vSphere shows for a flash read cache.

use crate::chooser::Choice;
use crate::command::Mode;
use crate::flash_budget::{Allowance, Counts};
use crate::histogram::Histogram;
use crate::io::{Op, Request};
use crate::outcome::Outcome;
use crate::units::Instant;

const SECOND_NS: u64 = 1_000_000_000;

/// Counts of the requests of one outcome.
#[derive(Clone, Debug, Default)]
pub struct OutcomeStats {
    /// Number of requests.
    pub count: u64,
    /// Bytes of these requests.
    pub bytes: u64,
    /// Latency from arrival to reply, nanoseconds.
    pub latency: Histogram,
}

/// Evictions of one cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EvictionStats {
    /// Number of requests that evicted at least one block.
    pub operations: u64,
    /// Number of evicted blocks.
    pub blocks: u64,
    /// Time of the last eviction, as nanoseconds after the counts were last 0.
    pub last_operation_ns: u64,
    /// Number of blocks evicted by the last request that evicted any.
    pub last_blocks: u64,
}

/// Counts of the I/O of one disk to flash, or to its backing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceIoStats {
    /// Number of completed I/Os.
    pub ios: u64,
    /// Number of completed I/Os that failed.
    pub errors: u64,
    /// Number of I/O units, as counted for scheduling; at least one for each I/O.
    pub units: u64,
    /// Total time that I/Os waited in the scheduler, nanoseconds.
    pub waited_ns: u64,
    /// Number of bytes read from the device.
    pub read_bytes: u64,
    /// Number of bytes written to the device.
    pub write_bytes: u64,
    /// Sum of the I/O latencies, nanoseconds.
    pub total_ns: u64,
}

impl DeviceIoStats {
    /// Returns the mean latency, nanoseconds; 0 without I/Os.
    pub fn mean_ns(&self) -> u64 {
        self.total_ns.checked_div(self.ios).unwrap_or(0)
    }
}

/// State of a disk's cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheState {
    /// The disk has no cache.
    #[default]
    None,
    /// The cache is in use.
    Active,
    /// The cache is being changed. Requests bypass a volatile cache, and wait for a persistent one.
    Changing,
    /// The cache is being recovered. Requests bypass the cache, or wait for it.
    Recovering,
    /// A device of the cache exceeds the time limit, and requests bypass the cache.
    Stalled,
    /// All devices of the cache failed and are fenced.
    Fenced,
}

/// Counters of one disk at one time.
#[derive(Clone, Debug)]
pub struct DiskStats {
    /// Statistics of each outcome, indexed by `Outcome as usize`.
    pub outcomes: [OutcomeStats; Outcome::COUNT],
    /// Number of read requests of guests. Prefetch requests (`Op::Prefetch`) and reads with
    /// `Promote::Never` do not count.
    pub reads: u64,
    /// Number of write requests.
    pub writes: u64,
    /// Number of reads served completely from flash.
    pub read_hits: u64,
    /// Number of reads served completely from the memory tier.
    pub memory_hits: u64,
    /// Total bytes of all read requests.
    pub read_bytes: u64,
    /// Total bytes of all write requests.
    pub write_bytes: u64,
    /// Maximum number of requests answered within one second.
    pub iops_max: u64,
    /// Size of the largest request in bytes.
    pub request_bytes_max: u64,
    /// I/O of the disk's cache to flash.
    pub flash: DeviceIoStats,
    /// I/O to the disk's backing.
    pub backing: DeviceIoStats,
    /// Number of sectors whose checksum was wrong when read from flash.
    pub checksum_mismatches: u64,
    /// Evictions of the disk's cache.
    pub evictions: EvictionStats,
    /// Time since the disk was opened, or its statistics were last reset, nanoseconds.
    pub elapsed_ns: u64,
    /// Size of the cache: the number of blocks for which it has room.
    pub blocks: u64,
    /// Number of blocks that have data in the cache.
    pub blocks_cached: u64,
    /// Number of valid sectors.
    pub sectors_valid: u64,
    /// Number of dirty sectors.
    pub sectors_dirty: u64,
    /// Number of clean sectors that were not compared with the backing since the cache was
    /// recovered. The number stays at least 1 until the durable journal records all dropped
    /// sectors.
    pub sectors_unverified: u64,
    /// Number of unverified sectors when the cache was recovered; 0 when none is left.
    pub sectors_to_verify: u64,
    /// Number of sectors that equalled the backing's data in a comparison after a recovery.
    pub sectors_verified: u64,
    /// Number of sectors that were dropped after a recovery because they differed from the
    /// backing's data.
    pub sectors_stale: u64,
    /// Number of dirty sectors that flash cannot deliver.
    pub sectors_lost: u64,
    /// True if the cache has replicas at a peer, and all dirty data has two copies.
    pub doubled: bool,
    /// Number of guests' writes that were merged with others into one I/O to the backing.
    pub writes_merged: u64,
    /// Number of writes of long runs that bypassed a write-back cache because too much data was
    /// dirty.
    pub bulk_writes: u64,
    /// Bytes read ahead into memory.
    pub read_ahead_bytes: u64,
    /// Bytes that extra fills read from the backing, beside those that guests read.
    pub extra_read_bytes: u64,
    /// Number of uses of blocks that only an extra fill had brought into the cache.
    pub extra_blocks_used: u64,
    /// Bytes served from the parent's disk instead of the backing.
    pub shared_read_bytes: u64,
    /// Bytes written from flash to the backing.
    pub destaged_bytes: u64,
    /// Number of failed destage writes and failed flushes of the backing. The engine retries failed
    /// destage writes and failed flushes.
    pub destage_errors: u64,
    /// True if dirty data waits to be destaged and the last attempt failed.
    pub destage_failing: bool,
    /// Bytes of journal pages written, in all copies of the journal ring.
    pub journal_bytes: u64,
    /// All flash writes of the disk's cache since the disk was added.
    pub flash_counts: Counts,
    /// The cache's part of a flash write budget, and the pressure ([`crate::flash_budget::limit`]).
    pub flash_allowance: Option<(Allowance, u32)>,
    /// Bytes written to flash as second copies.
    pub second_copy_bytes: u64,
    /// Bytes that the background scrub has read from flash and compared with their checksums.
    pub scrubbed_bytes: u64,
    /// True while a drain is in progress.
    pub draining: bool,
    /// The write mode in effect, which may differ from the configured one.
    pub mode: Mode,
    /// Memory for the cache's index, policy, list of dirty blocks and journal, bytes.
    pub index_bytes: u64,
    /// Size of the memory tier in bytes.
    pub memory_bytes: u64,
    /// Bytes of the memory tier that hold data.
    pub memory_held_bytes: u64,
    /// Memory for the index and policy of the memory tier, bytes.
    pub memory_index_bytes: u64,
    /// Whether requests use the disk's cache, and if not, why.
    pub cache: CacheState,
    /// Number of requests in flight.
    pub in_flight: u64,
    /// Policy and admission that an automatic cache has chosen; `None` if both are fixed.
    pub choice: Option<Choice>,
    second: u64,
    in_second: u64,
}

impl DiskStats {
    pub(crate) fn new() -> Self {
        DiskStats {
            outcomes: std::array::from_fn(|_| OutcomeStats::default()),
            reads: 0,
            writes: 0,
            read_hits: 0,
            memory_hits: 0,
            read_bytes: 0,
            write_bytes: 0,
            iops_max: 0,
            request_bytes_max: 0,
            flash: DeviceIoStats::default(),
            backing: DeviceIoStats::default(),
            checksum_mismatches: 0,
            evictions: EvictionStats::default(),
            elapsed_ns: 0,
            blocks: 0,
            blocks_cached: 0,
            sectors_valid: 0,
            sectors_dirty: 0,
            sectors_unverified: 0,
            sectors_to_verify: 0,
            sectors_verified: 0,
            sectors_stale: 0,
            sectors_lost: 0,
            doubled: false,
            writes_merged: 0,
            bulk_writes: 0,
            read_ahead_bytes: 0,
            extra_read_bytes: 0,
            extra_blocks_used: 0,
            shared_read_bytes: 0,
            destaged_bytes: 0,
            destage_errors: 0,
            destage_failing: false,
            journal_bytes: 0,
            flash_counts: Counts::default(),
            flash_allowance: None,
            second_copy_bytes: 0,
            scrubbed_bytes: 0,
            draining: false,
            mode: Mode::default(),
            index_bytes: 0,
            memory_bytes: 0,
            memory_held_bytes: 0,
            memory_index_bytes: 0,
            cache: CacheState::None,
            in_flight: 0,
            choice: None,
            second: 0,
            in_second: 0,
        }
    }

    /// Counts one answered request. `at` is the time since the counts were 0.
    #[inline]
    pub(crate) fn record(&mut self, at: Instant, request: &Request, outcome: Outcome, latency_ns: u64) {
        let bytes = request.len;
        let row = &mut self.outcomes[outcome as usize];
        row.count += 1;
        row.latency.record(latency_ns);
        if outcome == Outcome::Refused {
            // A refused request moved no data, and its length may be any number.
            return;
        }
        row.bytes += bytes;
        match request.op {
            // Reads that bypass the cache are no evidence about its hit ratio.
            Op::Read if request.passes_by() => {
                self.read_bytes += bytes;
                self.memory_hits += u64::from(outcome.is_from_memory());
            }
            Op::Read => {
                self.reads += 1;
                self.read_bytes += bytes;
                self.read_hits += u64::from(outcome == Outcome::Hit);
                self.memory_hits += u64::from(outcome.is_from_memory());
            }
            Op::Write(_) => {
                self.writes += 1;
                self.write_bytes += bytes;
            }
            _ => {}
        }
        self.request_bytes_max = self.request_bytes_max.max(bytes);
        let second = at.0 / SECOND_NS;
        if second != self.second {
            self.second = second;
            self.in_second = 0;
        }
        self.in_second += 1;
        self.iops_max = self.iops_max.max(self.in_second);
    }

    /// Returns the number of requests answered.
    pub fn requests(&self) -> u64 {
        self.outcomes.iter().map(|row| row.count).sum()
    }

    /// Returns the share of reads that flash served completely, from 0 to 1; 0 without reads.
    pub fn read_hit_ratio(&self) -> f64 {
        if self.reads == 0 { 0.0 } else { self.read_hits as f64 / self.reads as f64 }
    }

    /// Returns the latency histogram of all requests.
    pub fn latency(&self) -> Histogram {
        let mut all = Histogram::default();
        for row in &self.outcomes {
            all.merge(&row.latency);
        }
        all
    }

    /// Returns the mean number of requests per second of [`elapsed_ns`](Self::elapsed_ns).
    pub fn iops_mean(&self) -> f64 {
        if self.elapsed_ns == 0 {
            0.0
        } else {
            self.requests() as f64 * SECOND_NS as f64 / self.elapsed_ns as f64
        }
    }

    /// Returns the mean size of reads and writes, bytes.
    pub fn request_bytes_mean(&self) -> f64 {
        let ios = self.reads + self.writes;
        if ios == 0 { 0.0 } else { (self.read_bytes + self.write_bytes) as f64 / ios as f64 }
    }
}
