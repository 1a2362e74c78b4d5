//! Compares ways to divide a pool between disks, for pools of several sizes. The results are rows,
//! one for each size and way.

use std::sync::atomic::AtomicBool;

use anyhow::{Result, bail};
use serde::Serialize;

use super::{Host, Pool, Reads, Share, Shared, Watch, play};
use crate::figures::{Progress, quoted};
use crate::jobs::run_all;

/// A comparison of ways to divide pools of several sizes.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// Requests of the disks.
    pub host: &'a Host,
    /// Number of bytes that the requests touch; see [`Host::footprint`].
    pub footprint_bytes: u64,
    /// Pools to simulate, of different sizes.
    pub pools: &'a [Pool],
    /// Ways to divide each pool, each once.
    pub shares: &'a [Share],
    /// Number of parallel simulations.
    pub threads: usize,
}

impl Plan<'_> {
    /// Simulates each way to divide each pool. Returns one row for each combination of way and
    /// pool, in the order of the pools. `progress` is called at intervals on the caller's thread.
    ///
    /// # Errors
    /// Returns the errors of [`play`], or an error if `stop` was set.
    pub fn run(&self, stop: &AtomicBool, mut progress: impl FnMut(Progress)) -> Result<Vec<Row>> {
        let of_pool = |pool: &Pool| self.shares.iter().map(|share| (*pool, *share)).collect::<Vec<_>>();
        let jobs: Vec<(Pool, Share)> = self.pools.iter().flat_map(of_pool).collect();
        let (watch, runs_total) = (Watch::new(stop), jobs.len());
        let results = run_all(
            &jobs,
            self.threads,
            stop,
            |(pool, share)| play(self.host, pool, *share, &watch),
            |runs| progress(Progress { runs, runs_total, requests: watch.requests() }),
        );
        let Some(results) = results else {
            bail!("interrupted after {} simulated requests", watch.requests());
        };
        let mut rows = Vec::with_capacity(runs_total);
        for ((pool, _), shared) in jobs.iter().zip(results) {
            rows.push(Row::new(&shared?, pool, self));
        }
        for rows in rows.chunks_mut(self.shares.len().max(1)) {
            let optimum = rows.iter().find(|row| row.division == Share::Optimum.name());
            let optimum = optimum.map(|row| row.read_hit_ratio);
            for row in rows {
                row.difference_to_optimum = optimum.map(|ratio| row.read_hit_ratio - ratio);
            }
        }
        Ok(rows)
    }
}

/// Result of one way to divide a pool.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Way to divide the capacity.
    pub division: &'static str,
    /// Capacity of the pool, bytes.
    pub cache_bytes: u64,
    /// Capacity as a fraction of the bytes that the disks access.
    pub cache_share: f64,
    /// Fraction of the reads of all disks that were served whole from flash.
    pub read_hit_ratio: f64,
    /// `read_hit_ratio` minus the hit ratio of the best fixed parts; `None` if the best fixed parts
    /// were not simulated.
    pub difference_to_optimum: Option<f64>,
    /// Bytes written to flash.
    pub flash_write_bytes: u64,
    /// Bytes that moved from one cache to another.
    pub moved_bytes: u64,
    /// Cached bytes that were dropped with moved segments.
    pub dropped_bytes: u64,
    /// Size of each cache at the end, bytes. One cache for all disks has one entry.
    pub sizes: Vec<u64>,
    /// Results of each disk.
    pub disks: Vec<DiskRow>,
    /// Sizes of each cache over time. Each entry has the time at which the size changed,
    /// nanoseconds, and the size from then on, bytes. Empty if the sizes are fixed.
    #[serde(skip)]
    pub history: Vec<Vec<(u64, u64)>>,
}

/// Result of one disk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiskRow {
    /// Name of the disk.
    pub disk: String,
    /// Number of read requests.
    pub reads: u64,
    /// Number of read requests that were served whole from flash.
    pub read_hits: u64,
    /// Fraction of the reads that hit; `None` for a disk without reads.
    pub read_hit_ratio: Option<f64>,
    /// Size of the disk's cache at the end, bytes; `None` if all disks use one cache.
    pub cache_bytes: Option<u64>,
}

impl Row {
    fn new(shared: &Shared, pool: &Pool, plan: &Plan<'_>) -> Row {
        let bytes = |segments: u32| u64::from(segments) * pool.segment_bytes;
        let cache_bytes = bytes(pool.segments);
        let sizes: Vec<u64> = shared.segments.iter().map(|count| bytes(*count)).collect();
        let own_sizes: &[u64] = if shared.share == Share::OneLru { &[] } else { &sizes };
        let disk = |(number, (name, reads)): (usize, (&String, &Reads))| DiskRow {
            disk: name.clone(),
            reads: reads.reads,
            read_hits: reads.hits,
            read_hit_ratio: ratio(reads.hits, reads.reads),
            cache_bytes: own_sizes.get(number).copied(),
        };
        let disks = plan.host.names().iter().zip(&shared.reads).enumerate().map(disk).collect();
        let over_time = |sizes: &Vec<(u64, u32)>| {
            sizes.iter().map(|(at_ns, count)| (*at_ns, bytes(*count))).collect::<Vec<_>>()
        };
        Row {
            division: shared.share.name(),
            cache_bytes,
            cache_share: cache_bytes as f64 / plan.footprint_bytes.max(1) as f64,
            read_hit_ratio: shared.read_hit_ratio(),
            difference_to_optimum: None,
            flash_write_bytes: shared.flash_write_bytes(),
            moved_bytes: shared.moved * pool.segment_bytes,
            dropped_bytes: shared.dropped * u64::from(pool.block_bytes),
            history: shared.history.iter().map(over_time).collect(),
            sizes,
            disks,
        }
    }

    /// Returns the difference between the hit ratio and that of the best fixed parts, in percentage
    /// points. Returns a dash if the best fixed parts were not simulated.
    pub fn points_to_optimum(&self) -> String {
        // Adding 0 changes a rounded −0 to 0.
        let points = |difference: f64| (difference * 1e4).round() / 1e2 + 0.0;
        self.difference_to_optimum
            .map_or("–".to_owned(), |difference| format!("{:+.2}", points(difference)))
    }
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    if whole == 0 { None } else { Some(part as f64 / whole as f64) }
}

fn cell(value: Option<impl ToString>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

/// Returns the results of all disks together as comma-separated lines.
pub fn csv(rows: &[Row]) -> String {
    let mut text = String::from(
        "division,cache_bytes,cache_share,read_hit_ratio,flash_write_bytes,moved_bytes,dropped_bytes,\
         difference_to_optimum\n",
    );
    for row in rows {
        let Row { division, cache_bytes, cache_share, read_hit_ratio, .. } = row;
        let Row { flash_write_bytes, moved_bytes, dropped_bytes, .. } = row;
        let difference = cell(row.difference_to_optimum);
        text.push_str(&format!(
            "{division},{cache_bytes},{cache_share},{read_hit_ratio},{flash_write_bytes},{moved_bytes},\
             {dropped_bytes},{difference}\n"
        ));
    }
    text
}

/// Returns the results of each disk as comma-separated lines.
pub(super) fn disks_csv(rows: &[Row]) -> String {
    let mut text = String::from("division,cache_bytes,disk,reads,read_hits,disk_cache_bytes\n");
    for row in rows {
        for DiskRow { disk, reads, read_hits, cache_bytes, .. } in &row.disks {
            let (disk, own) = (quoted(disk), cell(*cache_bytes));
            text.push_str(&format!(
                "{},{},{disk},{reads},{read_hits},{own}\n",
                row.division, row.cache_bytes
            ));
        }
    }
    text
}

/// Returns the sizes of each disk's cache over time as comma-separated lines.
pub(super) fn capacity_csv(rows: &[Row]) -> String {
    let mut text = String::from("division,cache_bytes,disk,time_ns,disk_cache_bytes\n");
    for row in rows {
        for (disk, sizes) in row.disks.iter().zip(&row.history) {
            let disk = quoted(&disk.disk);
            for (at_ns, bytes) in sizes {
                text.push_str(&format!("{},{},{disk},{at_ns},{bytes}\n", row.division, row.cache_bytes));
            }
        }
    }
    text
}
