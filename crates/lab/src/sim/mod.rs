//! Simulates many caches on one trace, to compare hit ratios by size, block size, policy and
//! admission.
//!
//! The trace is read once. Batches of records go to worker threads, and each thread simulates some
//! of the caches. Memory is limited to the caches and a few batches of records. The engine's own
//! code decides about admission and eviction ([`CacheSim`]). Sizes are in bytes.
//!
//! A *miniature* simulates only a sample of the blocks in a cache that is smaller by the same
//! factor (Waldspurger, Saemundsson, Ahmad, Park: "Cache modeling and optimization using miniature
//! simulations", USENIX ATC 2017). A miniature treats each block of a request as a separate
//! request.
//!
//! A flash write budget is simulated at the times of the trace's requests, with the engine's
//! account ([`hob_engine::flash_budget`]). The simulated pool has only this cache.

mod budget;
mod mini;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use anyhow::{Context, Result, bail, ensure};
use hob_engine::admission::Admission;
use hob_engine::granularity::Fill;
use hob_engine::outcome::Outcome;
use hob_engine::policy::PolicyKind;
use hob_engine::{CacheSim, SimConfig, SimStats};

use budget::Budget;
use hob_trace::blocks::Blocks;
use hob_trace::{Op, Record};
use mini::Sample;

/// Maximum number of record blocks that wait for a slow worker thread.
const BLOCKS_WAITING_MAX: usize = 4;
/// Number of requests by which the prefetch of the cache's index precedes the simulation of a
/// request.
const LOOK_AHEAD: usize = 8;

/// Maximum number of blocks of a simulated cache.
const BLOCKS_MAX: f64 = (1u64 << 30) as f64;

/// Settings of a cache to simulate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Replacement policy of the cache.
    pub policy: PolicyKind,
    /// Admission of the cache.
    pub admission: Admission,
    /// Fill granularity of the cache.
    pub fill: Fill,
    /// Block size, bytes.
    pub block_bytes: u32,
    /// Size of the cache in bytes, rounded down to whole blocks.
    pub cache_bytes: u64,
    /// Flash write budget, bytes a day. Needs a trace with times.
    pub flash_writes: Option<u64>,
    /// Sampling rate of the blocks. 1 is an exact simulation, and less than 1 is a miniature.
    pub sample_rate: f64,
}

/// Counts from one simulation of a cache on a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Simulated {
    /// Settings of the simulated cache.
    pub point: Point,
    /// Counts of the simulation. The counts of a miniature are those of the sample, not scaled up.
    pub stats: SimStats,
    /// Memory for the cache's metadata, bytes.
    pub memory_bytes: u64,
    /// Number of requests beyond the addresses that a cache with this block size supports.
    pub out_of_reach: u64,
}

/// A cache during its simulation.
pub struct Simulation {
    point: Point,
    cache: CacheSim,
    sample: Option<Sample>,
    budget: Option<Budget>,
    /// First byte beyond the addresses that the cache supports.
    end: u64,
    out_of_reach: u64,
    /// Result of the prefetches. The use of this value prevents the compiler from removing the
    /// prefetches.
    looked_at: u32,
}

/// Passes a request to a cache. Returns true for a read that hit.
#[inline]
pub(crate) fn serve(cache: &mut CacheSim, record: &Record) -> bool {
    let Record { offset, len, op, .. } = *record;
    match op {
        Op::Flush => {}
        _ if len == 0 => {}
        Op::Read => return cache.read(offset, u64::from(len)) == Outcome::Hit,
        Op::Write => _ = cache.write(offset, u64::from(len)),
        Op::Discard => _ = cache.discard(offset, u64::from(len)),
    }
    false
}

impl Simulation {
    /// Creates an empty cache.
    ///
    /// # Errors
    /// Returns an error if the settings are invalid: an unsupported block size, or a size below one
    /// block.
    pub fn new(point: Point) -> Result<Simulation> {
        let Point { policy, admission, fill, block_bytes, cache_bytes, sample_rate, .. } = point;
        ensure!(
            sample_rate > 0.0 && sample_rate <= 1.0,
            "the sample rate must be above 0 and at most 1, not {sample_rate}"
        );
        ensure!(block_bytes > 0, "the block size must not be 0");
        let blocks = (cache_bytes / u64::from(block_bytes)) as f64 * sample_rate;
        ensure!(
            blocks <= BLOCKS_MAX,
            "a cache of {cache_bytes} bytes has more than 2^30 blocks of {block_bytes} bytes"
        );
        let config = SimConfig { blocks: blocks.round() as u32, block_bytes, policy, admission, fill };
        let Ok(cache) = CacheSim::new(&config) else {
            if config.blocks == 0 {
                bail!(
                    "a cache of {cache_bytes} bytes has no block of {block_bytes} bytes to simulate; make it larger"
                );
            }
            bail!("a block size is a power of two from 4 KiB to 1 MiB, not {block_bytes} bytes");
        };
        let sample = (sample_rate < 1.0).then(|| Sample::new(sample_rate, block_bytes));
        let end = u64::from(block_bytes) << 32;
        let budget = point.flash_writes.map(|bytes_per_day| Budget::new(bytes_per_day, &point));
        Ok(Simulation { point, cache, sample, budget, end, out_of_reach: 0, looked_at: 0 })
    }

    /// Simulates requests in order.
    pub fn feed(&mut self, records: &[Record]) {
        for (index, record) in records.iter().enumerate() {
            if record.offset.saturating_add(u64::from(record.len)) > self.end {
                self.out_of_reach += 1;
                continue;
            }
            if let Some(budget) = &mut self.budget {
                budget.advance(record.at_ns, &mut self.cache);
            }
            match self.sample {
                Some(sample) => sample.parts(record).for_each(|part| _ = serve(&mut self.cache, &part)),
                None => {
                    if let Some(coming) = records.get(index + LOOK_AHEAD) {
                        self.looked_at ^= self.cache.peek(coming.offset);
                    }
                    serve(&mut self.cache, record);
                }
            }
        }
    }

    /// Returns the result so far.
    pub fn result(&self) -> Simulated {
        std::hint::black_box(self.looked_at);
        Simulated {
            point: self.point,
            stats: self.cache.stats(),
            memory_bytes: self.cache.bytes(),
            out_of_reach: self.out_of_reach,
        }
    }
}

/// Simulates every cache on the same records. The caller's thread reads the records, and `threads`
/// worker threads simulate. If `threads` is 1, the caller's thread does all the work. `progress`
/// gets the number of records read so far, and returns false to end the run early.
///
/// # Errors
/// Returns an error if settings are invalid, if the records are of several disks, or if reading
/// them fails.
pub fn grid(
    records: &mut dyn Blocks,
    points: &[Point],
    threads: usize,
    mut progress: impl FnMut(u64) -> bool,
) -> Result<Vec<Simulated>> {
    let mut simulations = points.iter().map(|point| Simulation::new(*point)).collect::<Result<Vec<_>>>()?;
    if threads <= 1 {
        read_all(records, |block, count| {
            simulations.iter_mut().for_each(|simulation| simulation.feed(block));
            progress(count)
        })?;
        return Ok(simulations.iter().map(Simulation::result).collect());
    }
    let mut shares: Vec<Share> = (0..threads.min(points.len())).map(|_| vec![]).collect();
    // Adjacent settings usually have similar costs, so distributing them in turn balances the load.
    let count = shares.len();
    for (index, simulation) in simulations.into_iter().enumerate() {
        shares[index % count].push((index, simulation));
    }
    let mut results = std::thread::scope(|scope| {
        let (senders, workers): (Vec<_>, Vec<_>) = shares
            .into_iter()
            .map(|share| {
                let (sender, receiver) = sync_channel::<Arc<[Record]>>(BLOCKS_WAITING_MAX);
                (sender, scope.spawn(move || simulate(share, &receiver)))
            })
            .unzip();
        let read = read_all(records, |block, count| {
            let block: Arc<[Record]> = block.into();
            // A worker that has ended has panicked; joining the worker reports the panic.
            senders.iter().all(|sender| sender.send(Arc::clone(&block)).is_ok()) && progress(count)
        });
        drop(senders);
        let results: Vec<(usize, Simulated)> = workers
            .into_iter()
            .flat_map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect();
        read.map(|()| results)
    })?;
    results.sort_by_key(|(index, _)| *index);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

/// The simulations that one thread runs, with their indexes in the list of all simulations.
type Share = Vec<(usize, Simulation)>;

fn simulate(
    mut share: Vec<(usize, Simulation)>,
    blocks: &Receiver<Arc<[Record]>>,
) -> Vec<(usize, Simulated)> {
    for block in blocks {
        share.iter_mut().for_each(|(_, simulation)| simulation.feed(&block));
    }
    share.into_iter().map(|(index, simulation)| (index, simulation.result())).collect()
}

/// Passes blocks of records to `take`, with the number of records read, until `take` returns false.
fn read_all(records: &mut dyn Blocks, mut take: impl FnMut(&[Record], u64) -> bool) -> Result<()> {
    let (mut count, mut disk) = (0, None);
    loop {
        let block = records.next_block().context("cannot read the trace to its end")?;
        let first = disk.or(block.first().map(|record| record.disk));
        if let Some(other) = block.iter().find(|record| Some(record.disk) != first) {
            bail!(
                "the trace has several disks, such as {} and {}; choose one disk with --disk",
                first.unwrap_or(other.disk),
                other.disk,
            );
        }
        disk = first;
        count += block.len() as u64;
        if block.is_empty() || !take(block, count) {
            return Ok(());
        }
    }
}
