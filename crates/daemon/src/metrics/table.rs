//! The table of all metrics: name, meaning and source of the value. The metrics page, its
//! documentation, and the tests of dashboard and alerts use this table.
//!
//! Names follow Prometheus: base units (bytes, seconds), `_total` for counters. Counters of a disk
//! begin at 0 when the disk comes online. Counters of a device begin at 0 when the device is
//! opened.

use hob_control::{
    Admission, BackingState, Cache, CacheFlashWrites, Cluster, ClusterState, Datastore, Device, Disk,
    DiskQos, FlashWritesUsage, Pool, SharedCapacity, Size,
};
use hob_engine::stats::{DiskStats, OutcomeStats};
use hob_engine::units::SECTOR_BYTES;

use super::Daemon;
use crate::hardware::DeviceCounts;

/// A row of [`METRICS`].
#[derive(Debug)]
pub(crate) struct Metric {
    /// Name of the metric, without `_total`.
    pub(crate) name: &'static str,
    /// Type of the metric.
    pub(crate) kind: Kind,
    /// Help text of the metric.
    pub(crate) help: &'static str,
    /// Source of its values.
    pub(crate) source: Source,
}

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A value that only grows, from which clients compute a rate.
    Counter,
    /// A current value.
    Gauge,
    /// The constant 1, with information in its labels.
    Info,
    /// Numbers of requests by their latency.
    Histogram,
}

/// Source of the values: the objects that have one value each, and the function that returns the
/// value.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    /// One value for the daemon.
    Daemon(fn(&Daemon) -> f64),
    /// One value for the daemon, if it is in a cluster.
    Cluster(fn(&Cluster) -> f64),
    /// The constant 1 for the daemon, with its version as a label.
    Build,
    /// One value for each shard: 1 if the shard answers, otherwise 0.
    Shards,
    /// One value for each kind of health problem: the number of problems.
    Problems,
    /// One value for each pool.
    Pool(fn(&Pool) -> f64),
    /// One value for each pool with shared caches, about the flash that these caches divide.
    SharedCapacity(fn(&SharedCapacity) -> f64),
    /// One value for each flash device.
    Device(fn(&Device) -> f64),
    /// One value for each open flash device.
    DeviceIo(fn(&DeviceCounts) -> f64),
    /// One value for each state of each flash device: 1 if the device is in that state, otherwise
    /// 0.
    DeviceStates,
    /// One value for each disk.
    Disk(fn(&Disk) -> f64),
    /// One value for each state of each disk: 1 if the disk is in that state, otherwise 0.
    DiskStates,
    /// One value for the backing of each online disk.
    Backing(fn(&BackingState) -> f64),
    /// One value for each state of the backing of each online disk: 1 if the backing is in that
    /// state, otherwise 0.
    BackingStates,
    /// One value for each disk with this part of an entitlement.
    Qos(fn(&DiskQos) -> Option<f64>),
    /// One value for each datastore whose value is known.
    Datastore(fn(&Datastore) -> Option<f64>),
    /// One value for each disk with a configured cache.
    Cache(fn(&Cache) -> f64),
    /// The constant 1 for each configured cache, with the cache's settings as labels.
    CacheInfo,
    /// One value for each state of each cache: 1 if the cache is in that state, otherwise 0.
    CacheStates,
    /// One value for each online disk.
    Stats(fn(&DiskStats) -> f64),
    /// One value for each online disk with a cache.
    CacheStats(fn(&MetricContext<'_>) -> f64),
    /// One value for each cache with a part of a flash write budget.
    FlashBudget(fn(&CacheFlashWrites) -> f64),
    /// One value for each online disk with a memory tier.
    Memory(fn(&DiskStats) -> f64),
    /// One value for each online clone whose parent's disk serves shared blocks.
    Clone(fn(&DiskStats) -> f64),
    /// One value for each online disk with a persistent cache. Only such a cache can have dirty
    /// data.
    Persistence(fn(&DiskStats) -> f64),
    /// One value for each outcome of each online disk. If there are many disks, only for failures
    /// and for outcomes that have occurred.
    Outcome(fn(&OutcomeStats) -> f64),
    /// A histogram for each outcome that has occurred, of each online disk.
    Latency,
}

/// Values from which the metrics of a cache are computed.
#[derive(Debug)]
pub(crate) struct MetricContext<'a> {
    /// Statistics of the disk whose metrics are written.
    pub(crate) stats: &'a DiskStats,
    /// Size of a cache block in bytes.
    pub(crate) block_bytes: u64,
}

impl Source {
    /// Returns the names of the labels of the values.
    pub(crate) fn labels(self) -> &'static [&'static str] {
        match self {
            Source::Daemon(_) | Source::Cluster(_) => &[],
            Source::Build => &["version"],
            Source::Shards => &["shard"],
            Source::Problems => &["kind"],
            Source::Pool(_) | Source::SharedCapacity(_) => &["pool"],
            Source::Device(_) | Source::DeviceIo(_) => &["pool", "device"],
            Source::DeviceStates => &["pool", "device", "state"],
            Source::Disk(_)
            | Source::Backing(_)
            | Source::Qos(_)
            | Source::Cache(_)
            | Source::Stats(_)
            | Source::CacheStats(_)
            | Source::FlashBudget(_)
            | Source::Memory(_)
            | Source::Clone(_)
            | Source::Persistence(_) => &["disk"],
            Source::Datastore(_) => &["datastore"],
            Source::DiskStates | Source::CacheStates | Source::BackingStates => &["disk", "state"],
            Source::CacheInfo => &["disk", "pool", "mode", "policy", "layout", "admission", "persistent"],
            Source::Outcome(_) => &["disk", "class", "reason"],
            Source::Latency => &["disk", "class", "reason", "le"],
        }
    }

    /// Returns the object that each value belongs to.
    pub(crate) fn of_each(self) -> &'static str {
        match self {
            Source::Daemon(_) | Source::Build => "the daemon",
            Source::Cluster(_) => "the daemon, in a cluster",
            Source::Shards => "shard",
            Source::Problems => "kind of problem",
            Source::Pool(_) => "pool",
            Source::SharedCapacity(_) => "pool with shared caches",
            Source::Device(_) => "flash device",
            Source::DeviceIo(_) => "open flash device",
            Source::DeviceStates => "flash device and state",
            Source::Disk(_) => "disk",
            Source::Backing(_) => "online disk",
            Source::BackingStates => "online disk and state",
            Source::Qos(_) => "disk with this setting",
            Source::Datastore(_) => "datastore, if the value is known",
            Source::DiskStates => "disk and state",
            Source::Cache(_) | Source::CacheInfo => "disk with a configured cache",
            Source::CacheStates => "disk with a configured cache, and state",
            Source::Stats(_) => "online disk",
            Source::CacheStats(_) => "online disk with a cache",
            Source::FlashBudget(_) => "disk with a cache and a flash write budget",
            Source::Memory(_) => "online disk with a memory tier",
            Source::Clone(_) => "online clone with a parent's disk",
            Source::Persistence(_) => "online disk with a persistent cache",
            Source::Outcome(_) => "online disk and outcome",
            Source::Latency => "online disk and outcome that occurred",
        }
    }
}

impl Metric {
    /// Returns the name of the samples, without the suffixes of a histogram.
    pub(crate) fn sample_name(&self) -> String {
        match self.kind {
            Kind::Counter => format!("{}_total", self.name),
            Kind::Info => format!("{}_info", self.name),
            Kind::Gauge | Kind::Histogram => self.name.to_owned(),
        }
    }
}

const NS: f64 = 1e9;

/// Returns one value from the API view of a pool's flash writes; 0 if the pool has no such view.
fn writes(pool: &Pool, number: fn(&FlashWritesUsage) -> Size) -> f64 {
    pool.flash_writes.as_ref().map_or(0.0, |writes| number(writes).bytes() as f64)
}

const fn row(name: &'static str, kind: Kind, source: Source, help: &'static str) -> Metric {
    Metric { name, kind, help, source }
}

use Kind::{Counter, Gauge, Histogram, Info};
use Source as From;

/// All metrics, in the order of the page.
#[rustfmt::skip]
pub(crate) const METRICS: &[Metric] = &[
    row("hob_build", Info, From::Build, "The daemon's version; always 1."),
    row("process_start_time_seconds", Gauge, From::Daemon(|d| d.process.started_seconds), "Start time of the daemon, seconds since 1970."),
    row("process_cpu_seconds", Counter, From::Daemon(|d| d.process.cpu_seconds), "CPU time that the daemon used, user and system, seconds."),
    row("process_resident_memory_bytes", Gauge, From::Daemon(|d| d.process.resident_bytes as f64), "Resident memory of the daemon."),
    row("process_open_fds", Gauge, From::Daemon(|d| d.process.open_files as f64), "Number of files and sockets that the daemon has open."),
    row("hob_healthy", Gauge, From::Daemon(|d| yes(d.problems.is_empty())), "1 if the daemon has no problems, otherwise 0; /v1/health lists the problems."),
    row("hob_health_problems", Gauge, From::Problems, "Number of problems of each kind in the list of /v1/health."),
    row("hob_shard_up", Gauge, From::Shards, "1 if the shard (a thread that serves disks) answers, otherwise 0."),
    row("hob_scrape_seconds", Gauge, From::Daemon(|d| d.gathered_seconds), "Time that the daemon needed to collect the values of this scrape, seconds."),
    row("hob_scrape_disks_missing", Gauge, From::Daemon(|d| d.disks_missing as f64), "Number of online disks without values in this scrape, because their shard did not answer in time."),
    row("hob_cluster_member", Gauge, From::Cluster(|c| yes(c.state == ClusterState::Member)), "1 while this host has a valid cluster lease, so that it may serve the disks of the cluster."),
    row("hob_cluster_lease_left_seconds", Gauge, From::Cluster(|c| c.left_ms as f64 / 1e3), "Time until this host stops serving the disks of the cluster if etcd does not answer, seconds."),
    row("hob_cluster_disks_held", Gauge, From::Cluster(|c| c.disks_held as f64), "Number of disks of the cluster that this host owns."),

    row("hob_pool_size_bytes", Gauge, From::Pool(|p| p.size.bytes() as f64), "Flash for caches on the online devices of a pool."),
    row("hob_pool_free_bytes", Gauge, From::Pool(|p| p.free.bytes() as f64), "Flash that no cache uses, on devices of a pool that allow allocation."),
    row("hob_pool_orphan_bytes", Gauge, From::Pool(|p| p.orphans.iter().map(|o| o.size.bytes()).sum::<u64>() as f64), "Flash of persistent caches that belong to no disk of this daemon (orphans)."),
    row("hob_pool_swap_bytes", Gauge, From::Pool(|p| p.swap.iter().map(|s| s.size.bytes()).sum::<u64>() as f64), "Flash of a pool that the host uses as swap."),
    row("hob_pool_shared_bytes", Gauge, From::SharedCapacity(|s| s.size.bytes() as f64), "Flash that the shared caches of a pool divide, including free flash."),
    row("hob_pool_shared_moved_bytes", Counter, From::SharedCapacity(|s| s.moved.bytes() as f64), "Flash that has moved from one shared cache to another."),
    row("hob_pool_shared_destaged_bytes", Counter, From::SharedCapacity(|s| s.destaged.bytes() as f64), "Dirty data that was written to backings while shared caches gave up flash."),
    row("hob_pool_shared_hits_gained_per_second", Gauge, From::SharedCapacity(|s| s.caches.iter().map(|c| c.gained_hits_per_second).sum::<i64>() as f64), "Estimated additional hits per second recently, compared with an equal division of the shared flash."),
    row("hob_pool_flash_written_bytes", Counter, From::Pool(|p| writes(p, |w| w.written)), "Bytes that the caches of a pool wrote to flash: data, both copies, and journals."),
    row("hob_pool_flash_written_day_bytes", Gauge, From::Pool(|p| writes(p, |w| w.written_day)), "Bytes that the caches of a pool wrote to flash in the last 24 hours."),
    row("hob_pool_flash_budget_bytes_per_day", Gauge, From::Pool(|p| writes(p, |w| w.bytes_per_day)), "Flash write budget of a pool, bytes a day; 0 without a budget."),
    row("hob_pool_flash_budget_saved_bytes", Gauge, From::Pool(|p| writes(p, |w| w.saved) - writes(p, |w| w.debt)), "Flash write budget of a pool that is not used yet; negative if the budget is exceeded."),
    row("hob_pool_flash_budget_loan_bytes", Gauge, From::Pool(|p| writes(p, |w| w.loan)), "Bytes with which free blocks were filled beyond the flash write budget of a pool, and that later budget has not repaid."),
    row("hob_pool_flash_budget_refused_bytes", Counter, From::Pool(|p| writes(p, |w| w.refused)), "Bytes that the flash write budget of a pool kept from flash."),
    row("hob_device_state", Gauge, From::DeviceStates, "1 for the state that a flash device is in, 0 for the others."),
    row("hob_device_admits", Gauge, From::Device(|d| yes(d.admission == Admission::In)), "1 if caches may allocate flash on a device, otherwise 0."),
    row("hob_device_size_bytes", Gauge, From::Device(|d| d.size.bytes() as f64), "Flash for caches on a device."),
    row("hob_device_free_bytes", Gauge, From::Device(|d| d.free.bytes() as f64), "Flash on a device that no cache uses."),
    row("hob_device_ios", Counter, From::DeviceIo(|c| c.ios as f64), "Completed reads, writes and flushes of a flash device, including failed ones."),
    row("hob_device_io_errors", Counter, From::DeviceIo(|c| c.errors as f64), "Failed reads, writes and flushes of a flash device."),
    row("hob_device_read_bytes", Counter, From::DeviceIo(|c| c.read_bytes as f64), "Bytes read from a flash device."),
    row("hob_device_written_bytes", Counter, From::DeviceIo(|c| c.written_bytes as f64), "Bytes written to a flash device, including journals; they wear the flash."),
    row("hob_device_stalls", Counter, From::Device(|d| d.stalls as f64), "Number of times that a flash device did not answer in time, so that hob bypassed the caches on it."),
    row("hob_device_ios_in_flight", Gauge, From::DeviceIo(|c| c.in_flight as f64), "Reads, writes and flushes in flight on a flash device."),

    row("hob_disk_state", Gauge, From::DiskStates, "1 for the state that a disk is in, 0 for the others."),
    row("hob_disk_backing_state", Gauge, From::BackingStates, "1 for the state that the backing of a disk is in, 0 for the others."),
    row("hob_disk_backing_outage_seconds", Gauge, From::Backing(|b| b.outage_seconds() as f64), "Seconds since the connection to the backing was lost; 0 while it is connected."),
    row("hob_disk_backing_oldest_request_seconds", Gauge, From::Backing(|b| b.oldest_request_ms() as f64 / 1e3), "Age of the oldest request to a backing in state slow; 0 in other states."),
    row("hob_disk_backing_waiting_requests", Gauge, From::Backing(|b| b.waiting_requests() as f64), "Number of requests that wait for a backing in state slow or reconnecting; 0 in other states."),
    row("hob_disk_size_bytes", Gauge, From::Disk(|d| d.size.bytes() as f64), "Size of a disk; 0 while it has never been opened."),
    row("hob_disk_requests", Counter, From::Outcome(|o| o.count as f64), "Requests of guests, by outcome."),
    row("hob_disk_request_bytes", Counter, From::Outcome(|o| o.bytes as f64), "Bytes that guests requested to read or write, by outcome."),
    row("hob_disk_request_duration_seconds", Histogram, From::Latency, "Time from the arrival of a request to its reply."),
    row("hob_disk_requests_in_flight", Gauge, From::Stats(|s| s.in_flight as f64), "Requests of guests that hob has not answered yet."),
    row("hob_disk_reads", Counter, From::Stats(|s| s.reads as f64), "Reads of guests."),
    row("hob_disk_read_bytes", Counter, From::Stats(|s| s.read_bytes as f64), "Bytes that guests read."),
    row("hob_disk_writes", Counter, From::Stats(|s| s.writes as f64), "Writes of guests."),
    row("hob_disk_written_bytes", Counter, From::Stats(|s| s.write_bytes as f64), "Bytes that guests wrote."),
    row("hob_disk_read_hits", Counter, From::Stats(|s| s.read_hits as f64), "Reads that flash served completely; divided by hob_disk_reads_total, this is the hit ratio."),
    row("hob_disk_memory_hits", Counter, From::Stats(|s| s.memory_hits as f64), "Reads that the memory tier served completely."),

    row("hob_disk_flash_ios", Counter, From::Stats(|s| s.flash.ios as f64), "Completed I/Os to flash, including failed ones."),
    row("hob_disk_flash_io_errors", Counter, From::Stats(|s| s.flash.errors as f64), "I/Os to flash that failed."),
    row("hob_disk_flash_read_bytes", Counter, From::Stats(|s| s.flash.read_bytes as f64), "Bytes read from flash."),
    row("hob_disk_flash_written_bytes", Counter, From::Stats(|s| s.flash.write_bytes as f64), "Bytes written to flash."),
    row("hob_disk_flash_io_seconds", Counter, From::Stats(|s| s.flash.total_ns as f64 / NS), "Sum of the latencies of I/Os to flash."),
    row("hob_disk_flash_io_wait_seconds", Counter, From::Stats(|s| s.flash.waited_ns as f64 / NS), "Sum of the times that I/Os to flash waited in hob's queue."),
    row("hob_disk_flash_io_units", Counter, From::Stats(|s| s.flash.units as f64), "I/Os to flash, in the units of shares and limits: 32 KiB by default, and at least one unit for each I/O."),
    row("hob_disk_flash_checksum_mismatches", Counter, From::Stats(|s| s.checksum_mismatches as f64), "Sectors (4 KiB) that flash returned with a wrong checksum."),
    row("hob_disk_backing_ios", Counter, From::Stats(|s| s.backing.ios as f64), "Completed I/Os to the backing, including failed ones."),
    row("hob_disk_backing_io_errors", Counter, From::Stats(|s| s.backing.errors as f64), "I/Os to the backing that failed."),
    row("hob_disk_backing_read_bytes", Counter, From::Stats(|s| s.backing.read_bytes as f64), "Bytes read from the backing."),
    row("hob_disk_backing_written_bytes", Counter, From::Stats(|s| s.backing.write_bytes as f64), "Bytes written to the backing."),
    row("hob_disk_backing_io_seconds", Counter, From::Stats(|s| s.backing.total_ns as f64 / NS), "Sum of the latencies of I/Os to the backing."),
    row("hob_disk_backing_io_wait_seconds", Counter, From::Stats(|s| s.backing.waited_ns as f64 / NS), "Sum of the times that I/Os to the backing waited in hob's queue."),
    row("hob_disk_backing_io_units", Counter, From::Stats(|s| s.backing.units as f64), "I/Os to the backing, in the units of shares and limits: 32 KiB by default, and at least one unit for each I/O."),

    row("hob_disk_qos_shares", Gauge, From::Qos(|q| Some(f64::from(q.qos.shares))), "Shares of a disk, its relative part of an overloaded datastore."),
    row("hob_disk_qos_reservation_units", Gauge, From::Qos(|q| (q.qos.reservation > 0).then(|| f64::from(q.qos.reservation))), "Reservation of a disk: units per second that its datastore guarantees to it."),
    row("hob_disk_qos_limit_units", Gauge, From::Qos(|q| q.qos.limit.map(f64::from)), "Limit of a disk: most units per second that it uses of its datastore."),
    row("hob_disk_qos_limit_bytes", Gauge, From::Qos(|q| q.qos.bytes_limit.map(|limit| limit.bytes() as f64)), "Limit of a disk: most bytes per second that it uses of its datastore."),
    row("hob_disk_qos_flash_limit_units", Gauge, From::Qos(|q| q.qos.flash_limit.map(f64::from)), "Limit of a disk: most units per second that it uses of each flash device."),
    row("hob_datastore_window_ios", Gauge, From::Datastore(|s| s.window.map(f64::from)), "Maximum number of I/Os in flight to a datastore, while it is throttled."),
    row("hob_datastore_ios_in_flight", Gauge, From::Datastore(|s| (s.control != "off").then(|| f64::from(s.in_flight))), "I/Os in flight to a datastore whose latency hob measures."),
    row("hob_datastore_ios_waiting", Gauge, From::Datastore(|s| Some(s.waiting as f64)), "I/Os that wait in hob's queue for a datastore."),
    row("hob_datastore_latency_seconds", Gauge, From::Datastore(|s| (s.latency_ns > 0).then(|| s.latency_ns as f64 / NS)), "Smoothed latency of a datastore whose latency hob measures."),
    row("hob_datastore_capacity_units", Gauge, From::Datastore(|s| s.capacity.or(Some(s.peak).filter(|peak| *peak > 0)).map(f64::from)), "Capacity of a datastore, configured or measured, units per second."),
    row("hob_datastore_reserved_units", Gauge, From::Datastore(|s| (s.reserved > 0).then(|| f64::from(s.reserved))), "Sum of the reservations of a datastore's disks, units per second."),

    row("hob_cache", Info, From::CacheInfo, "Configuration of a cache, in the labels; always 1."),
    row("hob_cache_state", Gauge, From::CacheStates, "1 for the state that a cache is in, 0 for the others."),
    row("hob_cache_wanted_bytes", Gauge, From::Cache(|c| c.size.bytes() as f64), "Configured size of a cache."),
    row("hob_cache_room_bytes", Gauge, From::Cache(|c| c.room.bytes() as f64), "Actual size of a cache; smaller than configured after the loss of a flash device."),
    row("hob_cache_flash_budget_pressure", Gauge, From::FlashBudget(|w| f64::from(w.pressure_percent) / 100.0), "How strict a flash write budget makes the admission of a cache: from 0 to 1, where no copy of clean data is written to flash."),
    row("hob_cache_journal_room_bytes", Gauge, From::Cache(|c| c.journal.bytes() as f64), "Flash that a cache's journal uses in addition."),
    row("hob_cache_used_bytes", Gauge, From::CacheStats(|c| (c.stats.blocks_cached * c.block_bytes) as f64), "Size of the blocks of a cache that have data."),
    row("hob_cache_capacity_bytes", Gauge, From::CacheStats(|c| (c.stats.blocks * c.block_bytes) as f64), "Size of all blocks of a cache."),
    row("hob_cache_valid_bytes", Gauge, From::CacheStats(|c| sectors(c.stats.sectors_valid)), "Size of the sectors of a cache that have data."),
    row("hob_cache_dirty_bytes", Gauge, From::CacheStats(|c| sectors(c.stats.sectors_dirty)), "Dirty data of a cache: sectors that are not on the backing yet."),
    row("hob_cache_dirty_lost_bytes", Gauge, From::Persistence(|s| sectors(s.sectors_lost)), "Dirty data of a cache that flash lost."),
    row("hob_cache_evictions", Counter, From::CacheStats(|c| c.stats.evictions.blocks as f64), "Blocks evicted from a cache."),
    row("hob_cache_draining", Gauge, From::Persistence(|s| yes(s.draining)), "1 while a drain is in progress, otherwise 0."),
    row("hob_cache_destaged_bytes", Counter, From::Persistence(|s| s.destaged_bytes as f64), "Bytes written from flash to the backing."),
    row("hob_cache_destage_errors", Counter, From::Persistence(|s| s.destage_errors as f64), "Failed writes from flash to the backing; hob retries them."),
    row("hob_cache_journal_written_bytes", Counter, From::Persistence(|s| s.journal_bytes as f64), "Bytes of a cache's journal written to flash, in all copies."),
    row("hob_cache_second_copy_bytes", Counter, From::CacheStats(|c| c.stats.second_copy_bytes as f64), "Bytes written to flash as second copies (replicas)."),
    row("hob_cache_scrubbed_bytes", Counter, From::CacheStats(|c| c.stats.scrubbed_bytes as f64), "Bytes whose checksums the scrub compared in the background."),
    row("hob_cache_unverified_bytes", Gauge, From::Persistence(|s| sectors(s.sectors_unverified)), "Clean cached data that hob has not compared with the backing since the restart, and does not serve yet."),
    row("hob_cache_to_verify_bytes", Gauge, From::Persistence(|s| sectors(s.sectors_to_verify)), "Cached data to compare with the backing after the last restart; hob_cache_unverified_bytes is the remaining part."),
    row("hob_cache_verified_bytes", Counter, From::Persistence(|s| sectors(s.sectors_verified)), "Cached data that was equal to the backing in the comparison after a restart."),
    row("hob_cache_stale_bytes", Counter, From::Persistence(|s| sectors(s.sectors_stale)), "Cached data that differed from the backing in the comparison after a restart; hob dropped it."),
    row("hob_cache_index_bytes", Gauge, From::CacheStats(|c| c.stats.index_bytes as f64), "Memory of the cache's index and of other tables that grow with the cache."),
    row("hob_memory_bytes", Gauge, From::Memory(|s| s.memory_bytes as f64), "Size of the memory tier above the cache (setting ram)."),
    row("hob_memory_used_bytes", Gauge, From::Memory(|s| s.memory_held_bytes as f64), "Bytes of the memory tier that have data."),
    row("hob_memory_index_bytes", Gauge, From::Memory(|s| s.memory_index_bytes as f64), "Memory of the index of the memory tier."),
    row("hob_shared_read_bytes", Counter, From::Clone(|s| s.shared_read_bytes as f64), "Bytes that the disk of a clone's parent served, instead of the clone's backing."),
    row("hob_memory_read_ahead_bytes", Counter, From::Memory(|s| s.read_ahead_bytes as f64), "Bytes read ahead into the memory tier."),
    row("hob_cache_extra_read_bytes", Counter, From::Stats(|s| s.extra_read_bytes as f64), "Bytes that read misses brought into the cache in addition to those that guests read (setting fill)."),
    row("hob_cache_extra_blocks_used", Counter, From::Stats(|s| s.extra_blocks_used as f64), "Uses of cache blocks whose data only additional reads (setting fill) had brought into the cache."),
    row("hob_memory_writes_merged", Counter, From::Stats(|s| s.writes_merged as f64), "Writes that hob merged with adjacent writes into one I/O to the backing."),
];

fn yes(is: bool) -> f64 {
    if is { 1.0 } else { 0.0 }
}

fn sectors(count: u64) -> f64 {
    (count * SECTOR_BYTES) as f64
}
