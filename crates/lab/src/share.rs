//! Compares ways to divide a pool's capacity between several disks of a host, by their effect on
//! hits.
//!
//! The requests of all disks are simulated in order of time on caches without I/O ([`CacheSim`]).
//! The division `auto` runs the daemon's partitioner with the daemon's samplers. It resizes caches
//! as the daemon does: a segment that moves to another cache loses its cached blocks. A resize
//! takes no time, and no data is dirty.

mod compare;
mod report;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use hob_engine::admission::Admission;
use hob_engine::granularity::Fill;
use hob_engine::io::{Durability, Op as EngineOp, PayloadMemory, Promote, Request};
use hob_engine::partition::{Change, Limits, Member, PERIOD_NS, Partitioner};
use hob_engine::policy::PolicyKind;
use hob_engine::sizing::{BlockSizing, Live};
use hob_engine::units::{BufferId, DiskId, Instant, RequestId};
use hob_engine::{CacheSim, SimConfig, SimStats};

use crate::mrc::{self, Mode};
use crate::sim::serve;
pub use compare::{DiskRow, Plan, Row, csv};
use hob_trace::{Op, Record};
pub use report::{Facts, write};

/// Way to divide a pool's capacity between disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Equal parts for all disks.
    Static,
    /// Parts chosen by the daemon's partitioner.
    Auto,
    /// One LRU cache for all disks.
    OneLru,
    /// Fixed parts with the most read hits under LRU, computed by dynamic programming over exact
    /// LRU curves of the whole trace. If equal parts have more hits with the policy of the caches,
    /// the result is that of equal parts.
    Optimum,
}

impl Share {
    /// All ways to divide a pool's capacity, in the order of reports.
    pub const ALL: [Share; 4] = [Share::Static, Share::Auto, Share::OneLru, Share::Optimum];

    /// Returns the name that users type.
    pub fn name(self) -> &'static str {
        match self {
            Share::Static => "static",
            Share::Auto => "auto",
            Share::OneLru => "one-lru",
            Share::Optimum => "optimum",
        }
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Share, String> {
        let found = Share::ALL.into_iter().find(|share| share.name() == text);
        found.ok_or_else(|| {
            format!(
                "'{text}' is not a division of a pool; there are {}",
                Share::ALL.map(Share::name).join(", ")
            )
        })
    }
}

/// Base-2 logarithm of the chunk size. Disks are laid out in chunks, so that all disks fit into the
/// addresses of one cache.
const CHUNK_BITS: u32 = 30;
/// Maximum number of chunks with blocks of 4 KiB, because a cache has 2³² block addresses.
const CHUNKS_MAX: usize = 1 << (32 + 12 - CHUNK_BITS);

/// Number of requests between two checks for an interruption.
const REQUESTS_A_CHECK: usize = 1 << 13;

/// Counts the simulated requests of all threads, and ends the simulations when its stop flag is
/// set.
#[derive(Debug)]
pub struct Watch<'a> {
    stop: &'a AtomicBool,
    requests: AtomicU64,
}

impl<'a> Watch<'a> {
    /// Creates the watch of simulations that end with an error when `stop` is set.
    pub fn new(stop: &'a AtomicBool) -> Watch<'a> {
        Watch { stop, requests: AtomicU64::new(0) }
    }

    /// Returns the number of simulated requests. A request counts once for each simulation.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Counts request `number` of one simulation. Returns an error if the simulations were stopped.
    fn note(&self, number: usize) -> Result<()> {
        if number.is_multiple_of(REQUESTS_A_CHECK) {
            ensure!(!self.is_stopped(), "interrupted");
            self.requests.fetch_add(REQUESTS_A_CHECK as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Requests of all disks of one host, in order of time after [`Host::sort`].
#[derive(Clone, Debug, Default)]
pub struct Host {
    records: Vec<Record>,
    /// Names of the disks, by number.
    names: Vec<String>,
    disks: u16,
    chunks: HashMap<(u16, u64), u64>,
}

impl Host {
    /// Adds a trace as a disk with this name. With `duration_ns`, the times of the trace are scaled to
    /// this duration.
    ///
    /// # Errors
    /// Returns an error if the disks do not fit into the addresses of one cache, 16 TiB.
    pub fn add(
        &mut self,
        name: impl Into<String>,
        records: &[Record],
        duration_ns: Option<u64>,
    ) -> Result<()> {
        let disk = self.disks;
        let next = disk.checked_add(1).context("more than 65,535 disks")?;
        let last = records.iter().map(|record| record.at_ns).max().unwrap_or(0).max(1);
        for record in records {
            let at_ns = match duration_ns {
                Some(duration) => (u128::from(record.at_ns) * u128::from(duration) / u128::from(last)) as u64,
                None => record.at_ns,
            };
            let chunks = self.chunks.len() as u64;
            let chunk = *self.chunks.entry((disk, record.offset >> CHUNK_BITS)).or_insert(chunks);
            let inside = record.offset & ((1 << CHUNK_BITS) - 1);
            // A request that crosses the end of a chunk is truncated.
            let len = record.len.min((1 << CHUNK_BITS) - inside as u32);
            self.records.push(Record { at_ns, offset: chunk << CHUNK_BITS | inside, len, disk, ..*record });
        }
        ensure!(self.chunks.len() <= CHUNKS_MAX, "the disks span more than 16 TiB");
        self.names.push(name.into());
        self.disks = next;
        Ok(())
    }

    /// Sorts the requests by time. The caller must call this function after it has added the last
    /// disk.
    pub fn sort(&mut self) {
        self.records.sort_by_key(|record| record.at_ns);
    }

    /// Returns the number of disks.
    pub fn disks(&self) -> u16 {
        self.disks
    }

    /// Returns the names of the disks, by number.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the requests of all disks.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Returns the number of bytes that requests touch, in blocks of `block_bytes`.
    pub fn footprint(&self, block_bytes: u64) -> u64 {
        let touched = self.records.iter().flat_map(|record| {
            record.offset / block_bytes..(record.offset + u64::from(record.len)).div_ceil(block_bytes)
        });
        touched.collect::<std::collections::HashSet<u64>>().len() as u64 * block_bytes
    }
}

/// Capacity and settings of the caches to simulate.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    /// Capacity in segments: at least one segment per disk.
    pub segments: u32,
    /// Size of a segment, bytes.
    pub segment_bytes: u64,
    /// Size of a cache block, bytes.
    pub block_bytes: u32,
    /// Replacement policy of the caches.
    pub policy: PolicyKind,
    /// Admission of the caches.
    pub admission: Admission,
}

/// Number of reads of one disk, and number of its read hits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// Number of read requests.
    pub reads: u64,
    /// Number of read requests that were served whole from flash.
    pub hits: u64,
}

/// Result of one way to divide the capacity.
#[derive(Clone, Debug)]
pub struct Shared {
    /// Way in which the capacity was divided.
    pub share: Share,
    /// Counts of each cache. One cache for all disks has one entry.
    pub caches: Vec<SimStats>,
    /// Numbers of reads and hits of each disk.
    pub reads: Vec<Reads>,
    /// Number of segments of each cache at the end.
    pub segments: Vec<u32>,
    /// Sizes of each cache over time. Each entry has the time at which the size changed,
    /// nanoseconds, and the number of segments from then on. Empty if the sizes are fixed.
    pub history: Vec<Vec<(u64, u32)>>,
    /// Number of segments that moved from one cache to another.
    pub moved: u64,
    /// Number of blocks dropped with moved segments.
    pub dropped: u64,
}

impl Shared {
    /// Returns the read hit ratio of all disks together, by number of requests.
    pub fn read_hit_ratio(&self) -> f64 {
        let sum = |of: fn(&Reads) -> u64| self.reads.iter().map(of).sum::<u64>() as f64;
        sum(|disk| disk.hits) / sum(|disk| disk.reads).max(1.0)
    }

    /// Returns the number of bytes written to flash.
    pub fn flash_write_bytes(&self) -> u64 {
        self.caches.iter().map(|stats| stats.flash_write_bytes).sum()
    }
}

/// Simulates the host's requests on a pool that its disks share according to `share`.
///
/// # Errors
/// Returns an error if the pool has fewer segments than the host has disks, if the cache settings
/// are invalid, or if `watch` was stopped.
pub fn play(host: &Host, pool: &Pool, share: Share, watch: &Watch<'_>) -> Result<Shared> {
    ensure!(pool.segments >= u32::from(host.disks), "a pool of {} segments is too small", pool.segments);
    match share {
        Share::OneLru => one_lru(host, pool, watch),
        Share::Static => fixed(host, pool, (share, &equal(pool.segments, host.disks)), watch),
        Share::Optimum => {
            let best = fixed(host, pool, (share, &optimum(host, pool, watch)?), watch)?;
            // The curves are those of LRU, so equal parts can be better with another policy.
            let even = fixed(host, pool, (share, &equal(pool.segments, host.disks)), watch)?;
            Ok(if even.read_hit_ratio() > best.read_hit_ratio() { even } else { best })
        }
        Share::Auto => auto(host, pool, watch),
    }
}

fn cache(pool: &Pool, segments: u32) -> Result<CacheSim> {
    let blocks = u64::from(segments) * (pool.segment_bytes / u64::from(pool.block_bytes));
    let blocks = u32::try_from(blocks).context("the cache has too many blocks")?;
    let Pool { block_bytes, policy, admission, .. } = *pool;
    CacheSim::new(&SimConfig { blocks, block_bytes, policy, admission, fill: Fill::Sectors })
        .ok()
        .context("a cache of no block, or of blocks that are no power of two from 4 KiB to 1 MiB")
}

fn one_lru(host: &Host, pool: &Pool, watch: &Watch<'_>) -> Result<Shared> {
    let policy = PolicyKind::from_name("lru").context("there is LRU")?;
    let mut cache = cache(&Pool { policy, ..*pool }, pool.segments)?;
    let mut reads = vec![Reads::default(); usize::from(host.disks)];
    for (number, record) in host.records.iter().enumerate() {
        watch.note(number)?;
        let is_hit = serve(&mut cache, record);
        let disk = &mut reads[usize::from(record.disk)];
        disk.reads += u64::from(record.op == Op::Read && record.len > 0);
        disk.hits += u64::from(is_hit);
    }
    let (caches, segments) = (vec![cache.stats()], vec![pool.segments]);
    Ok(Shared { share: Share::OneLru, caches, reads, segments, history: vec![], moved: 0, dropped: 0 })
}

fn equal(segments: u32, disks: u16) -> Vec<u32> {
    let disks = u32::from(disks);
    (0..disks).map(|i| segments / disks + u32::from(i < segments % disks)).collect()
}

fn fixed(host: &Host, pool: &Pool, (share, segments): (Share, &[u32]), watch: &Watch<'_>) -> Result<Shared> {
    let mut caches = segments.iter().map(|count| cache(pool, *count)).collect::<Result<Vec<_>>>()?;
    for (number, record) in host.records.iter().enumerate() {
        watch.note(number)?;
        serve(&mut caches[usize::from(record.disk)], record);
    }
    let (caches, reads) = counts(&caches);
    Ok(Shared { share, caches, reads, segments: segments.to_vec(), history: vec![], moved: 0, dropped: 0 })
}

/// Returns the counts of caches that have one disk each.
fn counts(caches: &[CacheSim]) -> (Vec<SimStats>, Vec<Reads>) {
    let stats: Vec<SimStats> = caches.iter().map(CacheSim::stats).collect();
    let reads = stats.iter().map(|stats| Reads { reads: stats.reads, hits: stats.read_hits }).collect();
    (stats, reads)
}

/// Returns the fixed cache sizes with the most read hits under LRU, at least one segment per disk.
fn optimum(host: &Host, pool: &Pool, watch: &Watch<'_>) -> Result<Vec<u32>> {
    let count = pool.segments as usize;
    let blocks = pool.segment_bytes / u64::from(pool.block_bytes);
    // `best[n]` is the maximum number of hits of the disks considered so far with n segments
    // together. `chosen` has the number of segments of each disk for this maximum.
    let mut best = vec![0.0; count + 1];
    let mut chosen: Vec<Vec<u32>> = Vec::new();
    for disk in 0..host.disks {
        let records = || {
            let records = host.records.iter().take_while(move |_| !watch.is_stopped());
            records.filter(move |record| record.disk == disk).copied()
        };
        let reads = records().filter(|record| record.op == Op::Read).count() as f64;
        let misses = mrc::exact(records(), pool.block_bytes.into(), Mode::WriteThrough)?.read_misses();
        let hits: Vec<f64> =
            (0..=count as u64).map(|size| reads * (1.0 - misses.miss_ratio_at(size * blocks))).collect();
        ensure!(!watch.is_stopped(), "interrupted");
        let mut next = vec![f64::NEG_INFINITY; count + 1];
        let mut sizes = vec![0; count + 1];
        for have in usize::from(disk) + 1..=count {
            for size in 1..=have - usize::from(disk) {
                let total = best[have - size] + hits[size];
                if total > next[have] {
                    (next[have], sizes[have]) = (total, size as u32);
                }
            }
        }
        best = next;
        chosen.push(sizes);
    }
    let mut have = count;
    let mut segments: Vec<u32> = Vec::new();
    for sizes in chosen.iter().rev() {
        segments.push(sizes[have]);
        have -= sizes[have] as usize;
    }
    segments.reverse();
    Ok(segments)
}

fn auto(host: &Host, pool: &Pool, watch: &Watch<'_>) -> Result<Shared> {
    let segment_blocks = (pool.segment_bytes / u64::from(pool.block_bytes)) as u32;
    let mut segments = vec![1; usize::from(host.disks)];
    let mut caches = segments.iter().map(|count| cache(pool, *count)).collect::<Result<Vec<_>>>()?;
    let mut samplers = vec![Live::new(Instant(0)); caches.len()];
    let mut partitioner = Partitioner::new(pool.segment_bytes);
    let mut history: Vec<Vec<(u64, u32)>> = segments.iter().map(|count| vec![(0, *count)]).collect();
    let (mut moved, mut dropped) = (0, 0);
    let mut next_round = 0;
    for (number, record) in host.records.iter().enumerate() {
        watch.note(number)?;
        if record.at_ns >= next_round {
            // Periods without requests are skipped, because the partitioner would decide nothing
            // new in them.
            let now = Instant(record.at_ns);
            next_round = record.at_ns + PERIOD_NS;
            for Change { disk, from, to } in round(&mut partitioner, now, pool, &segments, &samplers) {
                let disk = disk.0 as usize;
                moved += from.saturating_sub(to);
                segments[disk] = to as u32;
                history[disk].push((record.at_ns, segments[disk]));
                dropped += caches[disk].resize(segment_blocks, segments[disk]);
            }
        }
        let disk = usize::from(record.disk);
        if let Some(request) = request(record) {
            samplers[disk].note(&request);
        }
        serve(&mut caches[disk], record);
    }
    let (caches, reads) = counts(&caches);
    Ok(Shared { share: Share::Auto, caches, reads, segments, history, moved, dropped })
}

fn round(
    partitioner: &mut Partitioner,
    now: Instant,
    pool: &Pool,
    segments: &[u32],
    samplers: &[Live],
) -> Vec<Change> {
    let sizings: Vec<_> = samplers.iter().map(|sampler| sampler.report(now)).collect();
    let member = |(i, sizing): (u32, &hob_engine::sizing::Sizing)| -> Option<(u32, u64, BlockSizing)> {
        let not_larger = |size: &&BlockSizing| size.block_bytes <= pool.block_bytes.into();
        let size = sizing.block_sizes.iter().rfind(not_larger)?;
        Some((i, sizing.seen.reads, size.clone()))
    };
    let curves: Vec<_> = (0..).zip(&sizings).filter_map(member).collect();
    let members: Vec<Member<'_>> = curves
        .iter()
        .map(|(i, reads, size)| Member {
            disk: DiskId(*i),
            segments: segments[*i as usize].into(),
            dirty_segments: 0,
            limits: Limits::default(),
            miss_cost_ns: 0,
            reads: *reads,
            accesses: size.accesses,
            curve: &size.curve,
            block_bytes: size.block_bytes,
        })
        .collect();
    partitioner.round(now, pool.segments.into(), &members).changes
}

/// Returns the engine request of a trace record, or `None` for a flush.
fn request(record: &Record) -> Option<Request> {
    let op = match record.op {
        Op::Read => EngineOp::Read,
        Op::Write => EngineOp::Write(Durability::Volatile),
        Op::Discard => EngineOp::Discard(Durability::Volatile),
        Op::Flush => return None,
    };
    Some(Request {
        id: RequestId(0),
        disk: DiskId(record.disk.into()),
        op,
        offset: record.offset,
        len: record.len.into(),
        buffer: op.has_buffer().then_some(BufferId(0)),
        promote: Promote::Usual,
        memory: PayloadMemory::Daemon,
    })
}
