//! The parts of `cargo xtask bench scaling`: each varies one size or number, and measures a row of
//! its table for each value.

use std::time::Duration;

use anyhow::{Context, Result};
use hob_lab::picture::Unit;

use super::flash::{Kind, free_bytes, has_loops};
use super::host::{Area, End, Host, Setup};
use super::layouts::{BLOCK_SIZE, CACHE_SIZE, CONNECTIONS, DIRTY_FRACTION, DISKS};
use super::table::Table;
use super::{Bench, GIB, KIB, MIB};
use crate::fio::Workload;
use crate::median;

/// Queue depth of all connections of a load.
const DEPTH: u32 = 64;
/// Maximum number of disks that a load uses at the same time.
const LOADED_MAX: u32 = 16;
/// Flash for each disk of a pool that disks share, bytes.
const SHARE_BYTES: u64 = 8 * MIB;
/// Data that the loads of all disks use together, bytes.
const DISKS_WORKING_SET: u64 = 64 * MIB;
/// Number of requests for metrics.
const SCRAPES: usize = 5;

/// Remark about pools that are larger than the file system.
const LOOPS: &str = "The pools are loop devices on sparse files, because the largest one is larger than \
                     half of the free space.";

/// Maximum memory of a cache's index and of its recovery, bytes. A larger cache has larger blocks.
const INDEX_MAX: u64 = 8 * GIB;
/// Memory of index and recovery for each block of 4 KiB (docs/INSTALL.md, Memory), bytes.
const BYTES_PER_BLOCK: u64 = 24 + 17;

/// Cached part of the disk in the part about dirty data, and the part that random writes change,
/// percent of the cache.
const CACHED_PERCENT: u64 = 80;
const WRITTEN_PERCENT: u64 = 5;

/// Settings that keep dirty data in the cache.
const NO_DESTAGING: &str =
    "preset = \"auto\"\ndirty_start = 95\ndirty_stop = 95\ndirty_full = 100\ndirty_age_max = 0\n";

const fn reads(depth: u32) -> Workload {
    Workload { name: "4 KiB random read", rw: "randread", block: "4k", depth, flushes: false }
}

const fn writes(depth: u32) -> Workload {
    Workload { name: "4 KiB random write", rw: "randwrite", block: "4k", depth, flushes: false }
}

/// Returns the block size of a cache: 4 KiB, or 64 KiB if the index would need too much memory.
fn block_bytes(cache: u64) -> u64 {
    let memory = cache / (4 * KIB) * BYTES_PER_BLOCK;
    if memory <= INDEX_MAX { 4 * KIB } else { 64 * KIB }
}

/// Returns the size of the pool for a persistent cache with its journal, and a next journal for
/// changes of the cache.
fn pool_bytes(cache: u64) -> u64 {
    (cache + cache / 32 + 256 * MIB).next_multiple_of(16 * MIB)
}

/// Returns a disk with a cache of this size. `settings`: further lines of `[disk.cache]`.
fn one_disk(cache: u64, flash: Kind, settings: &str) -> Setup {
    Setup {
        disks: 1,
        disk_bytes: cache,
        pool_bytes: pool_bytes(cache),
        segment_bytes: if cache < GIB { MIB } else { 16 * MIB },
        flash,
        cache: format!("size = {cache}\n{settings}"),
    }
}

fn index_per_block(host: &Host<'_>) -> Result<f64> {
    Ok(host.number("index_bytes")? / host.number("blocks")?)
}

/// Measures caches of different sizes with the same load, and their restarts.
pub(super) fn cache_size(bench: &Bench) -> Result<Table> {
    let scale = &bench.scale;
    let mut table = Table::new(&CACHE_SIZE);
    std::fs::create_dir_all(&bench.dir).with_context(|| format!("create {}", bench.dir.display()))?;
    let free = free_bytes(&bench.dir)?;
    let largest = scale.caches.iter().copied().max().map_or(0, pool_bytes);
    let flash = Kind::new(largest, free, has_loops());
    if flash == Kind::Loop {
        table.note(LOOPS.to_owned());
    }
    for &cache in scale.caches {
        let size = Unit::Bytes.text(cache as f64);
        if !flash.allows(pool_bytes(cache), free) {
            table.note(format!(
                "A cache of {size} was left out: its pool needs more than half of the free space. Run the \
                 benchmark as root with loop devices, or pass another --dir."
            ));
            continue;
        }
        println!("cache of {size}");
        let block = block_bytes(cache);
        let settings = format!("preset = \"auto\"\nblock_size = {block}\ndirty_age_max = 0\n");
        let mut host = Host::new(bench, &one_disk(cache, flash, &settings))?;
        let area = Area::new(0, scale.working_set);
        host.warm(area, Duration::ZERO)?;
        let load = host.measure(area, &reads(DEPTH))?;
        let (resident, index) = (host.memory("VmRSS")?, index_per_block(&host)?);
        let dirty = Area::new(0, scale.dirty);
        let mut starts = Vec::new();
        for end in [End::Stop, End::Kill] {
            host.write(dirty)?;
            let start = host.restart(end)?;
            println!(
                "  {end:?}: first reply after {:?}, recovered after {:?}",
                start.first_reply, start.complete
            );
            let (reply, complete) = (start.first_reply.as_secs_f64(), start.complete.as_secs_f64());
            starts.extend([reply, complete, start.peak_bytes as f64]);
        }
        let first = [cache as f64, load.iops, load.cpu_s, load.hits, block as f64, resident as f64, index];
        table.row(first.into_iter().chain(starts).map(Some));
    }
    Ok(table)
}

/// Returns the number of disks that a load uses: a power of two, so that each has the same depth.
fn loaded(disks: u32) -> u32 {
    1 << disks.clamp(1, LOADED_MAX).ilog2()
}

/// Measures different numbers of disks with caches that share a pool, under the same total load.
pub(super) fn disks(bench: &Bench) -> Result<Table> {
    let scale = &bench.scale;
    let mut table = Table::new(&DISKS);
    let mut first_row: Option<(u32, u64)> = None;
    for &disks in scale.disks {
        println!("{disks} disks");
        let loaded = loaded(disks);
        let size = DISKS_WORKING_SET.min(scale.working_set) / u64::from(loaded);
        let setup = Setup {
            disks,
            disk_bytes: DISKS_WORKING_SET,
            pool_bytes: (u64::from(disks) * SHARE_BYTES).max(256 * MIB),
            segment_bytes: MIB,
            flash: Kind::File,
            cache: String::new(),
        };
        let mut host = Host::new(bench, &setup)?;
        bench.pause(scale.settle)?;
        let resident = host.memory("VmRSS")?;
        let idle = idle_cpu(bench, &host)?;
        println!("  idle: {:.2} % of a CPU, memory {}", idle * 100.0, Unit::Bytes.text(resident as f64));
        let area = Area { disks: loaded, connections: 1, offset: 0, size };
        // hob enlarges the caches of disks that miss in intervals of 2 s.
        host.warm(area, scale.share_pause)?;
        let load = host.measure(area, &reads(DEPTH / loaded))?;
        let (metrics_bytes, metrics_s) = metrics(&host)?;
        let restart = host.restart(End::Stop)?.complete;
        let per_disk =
            first_row.map(|(few, of_few)| resident.saturating_sub(of_few) as f64 / f64::from(disks - few));
        first_row = first_row.or(Some((disks, resident)));
        table.row([
            Some(f64::from(disks)),
            Some(load.iops),
            Some(load.cpu_s),
            Some(load.hits),
            Some(resident as f64),
            per_disk,
            Some(idle),
            Some(metrics_bytes),
            Some(metrics_s),
            Some(restart.as_secs_f64()),
        ]);
    }
    Ok(table)
}

/// Returns the CPU time of an idle daemon, as a share of one CPU.
fn idle_cpu(bench: &Bench, host: &Host<'_>) -> Result<f64> {
    let before = host.cpu()?;
    bench.pause(bench.scale.idle)?;
    Ok(host.cpu()?.saturating_sub(before).as_secs_f64() / bench.scale.idle.as_secs_f64())
}

/// Returns the size of the metrics in bytes, and the median time of a request for them in seconds.
fn metrics(host: &Host<'_>) -> Result<(f64, f64)> {
    let (mut bytes, mut times) = (0, Vec::new());
    for _ in 0..SCRAPES {
        let (text, time) = host.get("/metrics")?;
        bytes = text.len();
        times.push(time.as_secs_f64());
    }
    Ok((bytes as f64, median(times.into_iter()).context("no request for metrics")?))
}

/// Measures different numbers of connections to a disk.
pub(super) fn connections(bench: &Bench) -> Result<Table> {
    let scale = &bench.scale;
    let mut table = Table::new(&CONNECTIONS);
    let host = Host::new(bench, &one_disk(scale.cache, Kind::File, ""))?;
    let area = Area::new(0, scale.working_set);
    host.warm(area, Duration::ZERO)?;
    for &connections in scale.connections {
        println!("{connections} connections");
        let depth = DEPTH / connections;
        let load = host.measure(Area { connections, ..area }, &reads(depth))?;
        let sizes = [f64::from(connections), f64::from(depth)];
        table.row(sizes.into_iter().chain([load.mean_s, load.iops, load.cpu_s, load.hits]).map(Some));
    }
    Ok(table)
}

/// Measures reads and writes of a write-back cache with different amounts of dirty data.
pub(super) fn dirty_fraction(bench: &Bench) -> Result<Table> {
    let cache = bench.scale.cache;
    let mut table = Table::new(&DIRTY_FRACTION);
    let part = |percent: u64| cache * percent / 100 / MIB * MIB;
    for &percent in bench.scale.dirty_percents {
        println!("{percent} % dirty data");
        let host = Host::new(bench, &one_disk(cache, Kind::File, NO_DESTAGING))?;
        if percent > 0 {
            host.write(Area::new(0, part(percent)))?;
        }
        let cached = Area::new(0, part(CACHED_PERCENT));
        host.warm(cached, Duration::ZERO)?;
        let dirty = || -> Result<f64> { Ok(host.number("dirty_bytes")? / cache as f64) };
        let before = dirty()?;
        let read = host.measure(cached, &reads(DEPTH))?;
        // All rows write to the same area, of which no data is dirty at first.
        let written = Area::new(part(CACHED_PERCENT), part(WRITTEN_PERCENT));
        let write = host.measure(written, &writes(DEPTH))?;
        let row = [before, dirty()?, read.iops, write.iops, read.hits, read.cpu_s, write.cpu_s];
        table.row(row.map(Some));
    }
    Ok(table)
}

/// Measures caches with different block sizes.
pub(super) fn block_size(bench: &Bench) -> Result<Table> {
    let scale = &bench.scale;
    let mut table = Table::new(&BLOCK_SIZE);
    for &block in scale.blocks {
        println!("blocks of {}", Unit::Bytes.text(block as f64));
        let settings = format!("block_size = {block}\n");
        let host = Host::new(bench, &one_disk(scale.cache, Kind::File, &settings))?;
        let area = Area::new(0, scale.working_set);
        host.warm(area, Duration::ZERO)?;
        let load = host.measure(area, &reads(DEPTH))?;
        let index = [host.number("index_bytes")?, index_per_block(&host)?, host.memory("VmRSS")? as f64];
        table.row([block as f64, load.iops, load.cpu_s, load.hits].into_iter().chain(index).map(Some));
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_with_a_large_index_has_large_blocks() {
        assert_eq!(block_bytes(GIB), 4 * KIB);
        assert_eq!(block_bytes(256 * GIB), 4 * KIB);
        assert_eq!(block_bytes(1024 * GIB), 64 * KIB);
    }

    #[test]
    fn the_total_depth_does_not_depend_on_the_number_of_disks() {
        let loads = [1, 10, 100, 1000].map(|disks| (loaded(disks), DEPTH / loaded(disks)));
        assert_eq!(loads, [(1, 64), (8, 8), (16, 4), (16, 4)]);
    }

    #[test]
    fn dirty_data_and_written_area_fit_the_cache() {
        const { assert!(CACHED_PERCENT + WRITTEN_PERCENT < 95, "no destaging starts") };
        for scale in [super::super::Scale::quick(), super::super::Scale::full(1, 1)] {
            assert!(scale.dirty_percents.iter().all(|percent| *percent <= CACHED_PERCENT));
            assert!(scale.cache * WRITTEN_PERCENT / 100 >= MIB, "the written area is not empty");
            assert!(scale.caches.iter().all(|cache| scale.working_set <= cache / 2));
            // Destaging starts at 10 % dirty data.
            assert!(scale.caches.iter().all(|cache| scale.dirty < cache / 10));
            assert!(scale.connections.iter().all(|connections| DEPTH.is_multiple_of(*connections)));
        }
    }
}
