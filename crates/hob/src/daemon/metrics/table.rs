//! The table of all metrics: name, meaning and source of the value. The metrics page, its
//! documentation, and the tests of dashboard and alerts use this table.
//!
//! Names follow Prometheus: base units (bytes, seconds), `_total` for counters. Counters of a disk
//! begin at 0 when the disk comes online, those of a device when it is opened.

use hob_control::{
    Admission, BackingState, Cache, CacheState, Cluster, ClusterState, Datastore, Device, DeviceState, Disk,
    DiskQos, DiskState, Pool,
};
use hob_engine::stats::{DiskStats, OutcomeStats};
use hob_engine::units::SECTOR_BYTES;

use super::Daemon;
use crate::daemon::hardware::DeviceCounts;

/// A row of [`METRICS`].
#[derive(Debug)]
pub(crate) struct Metric {
    /// Its name, without `_total`.
    pub(crate) name: &'static str,
    /// Its type.
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

/// Source of the values: one value for each of the named objects.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    /// The daemon.
    Daemon(fn(&Daemon) -> f64),
    /// The daemon, if it is in a cluster.
    Cluster(fn(&Cluster) -> f64),
    /// The daemon, with its version.
    Build,
    /// Each shard: whether it answers.
    Shards,
    /// Each kind of problem: how many there are.
    Problems,
    /// Each pool.
    Pool(fn(&Pool) -> f64),
    /// Each device.
    Device(fn(&Device) -> f64),
    /// Each device that is open.
    DeviceIo(fn(&DeviceCounts) -> f64),
    /// Each state of each device: 1 if it is in that state.
    DeviceStates,
    /// Each disk.
    Disk(fn(&Disk) -> f64),
    /// Each state of each disk: 1 if it is in that state.
    DiskStates,
    /// The backing of each online disk.
    Backing(fn(&BackingState) -> f64),
    /// Each state of the backing of each online disk: 1 if it is in that state.
    BackingStates,
    /// The entitlement of each disk that has one.
    Qos(fn(&DiskQos) -> Option<f64>),
    /// Each datastore whose value is known.
    Datastore(fn(&Datastore) -> Option<f64>),
    /// One value for each disk with a configured cache.
    Cache(fn(&Cache) -> f64),
    /// The settings of each configured cache, as labels.
    CacheInfo,
    /// Each state of each cache: 1 if it is in that state.
    CacheStates,
    /// Each online disk.
    Stats(fn(&DiskStats) -> f64),
    /// Each online disk with a cache.
    CacheStats(fn(&MetricContext<'_>) -> f64),
    /// Each outcome of each online disk.
    Outcome(fn(&OutcomeStats) -> f64),
    /// Each outcome that has occurred, of each online disk.
    Latency,
}

/// Values from which the metrics of a cache are computed.
#[derive(Debug)]
pub(crate) struct MetricContext<'a> {
    /// Statistics of the disk.
    pub(crate) stats: &'a DiskStats,
    /// Size of a cache block in bytes.
    pub(crate) block_bytes: u64,
}

impl Source {
    /// Returns the labels of the values.
    pub(crate) fn labels(self) -> &'static [&'static str] {
        match self {
            Source::Daemon(_) | Source::Cluster(_) => &[],
            Source::Build => &["version"],
            Source::Shards => &["shard"],
            Source::Problems => &["kind"],
            Source::Pool(_) => &["pool"],
            Source::Device(_) | Source::DeviceIo(_) => &["pool", "device"],
            Source::DeviceStates => &["pool", "device", "state"],
            Source::Disk(_)
            | Source::Backing(_)
            | Source::Qos(_)
            | Source::Cache(_)
            | Source::Stats(_)
            | Source::CacheStats(_) => &["disk"],
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
            Source::Device(_) => "flash device",
            Source::DeviceIo(_) => "flash device that is open",
            Source::DeviceStates => "flash device and state",
            Source::Disk(_) => "disk",
            Source::Backing(_) => "disk online",
            Source::BackingStates => "disk online and state",
            Source::Qos(_) => "disk with this entitlement",
            Source::Datastore(_) => "datastore where it is known",
            Source::DiskStates => "disk and state",
            Source::Cache(_) | Source::CacheInfo => "disk that is to have a cache",
            Source::CacheStates => "disk that is to have a cache, and state",
            Source::Stats(_) => "disk online",
            Source::CacheStats(_) => "disk online with a cache",
            Source::Outcome(_) => "disk online and outcome",
            Source::Latency => "disk online and outcome that has happened",
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

const fn row(name: &'static str, kind: Kind, source: Source, help: &'static str) -> Metric {
    Metric { name, kind, help, source }
}

use Kind::{Counter, Gauge, Histogram, Info};
use Source as From;

/// All metrics, in the order of the page.
#[rustfmt::skip]
pub(crate) const METRICS: &[Metric] = &[
    row("hob_build", Info, From::Build, "The daemon's version; always 1."),
    row("process_start_time_seconds", Gauge, From::Daemon(|d| d.process.started_seconds), "When the daemon began, seconds since 1970."),
    row("process_cpu_seconds", Counter, From::Daemon(|d| d.process.cpu_seconds), "CPU time of the daemon, user and system."),
    row("process_resident_memory_bytes", Gauge, From::Daemon(|d| d.process.resident_bytes as f64), "Memory that the daemon holds."),
    row("process_open_fds", Gauge, From::Daemon(|d| d.process.open_files as f64), "Files and sockets that the daemon has open."),
    row("hob_healthy", Gauge, From::Daemon(|d| yes(d.problems.is_empty())), "1 if there are no problems; /v1/health lists them."),
    row("hob_health_problems", Gauge, From::Problems, "Problems of each kind, as /v1/health lists them."),
    row("hob_shard_up", Gauge, From::Shards, "1 when the thread that serves these disks answers."),
    row("hob_scrape_seconds", Gauge, From::Daemon(|d| d.gathered_seconds), "How long it took to gather these values."),
    row("hob_scrape_disks_missing", Gauge, From::Daemon(|d| d.disks_missing as f64), "Online disks whose shard did not answer in time."),
    row("hob_cluster_member", Gauge, From::Cluster(|c| yes(c.state == ClusterState::Member)), "1 while this host has a lease of its cluster that holds: its disks answer."),
    row("hob_cluster_lease_left_seconds", Gauge, From::Cluster(|c| c.left_ms as f64 / 1e3), "How much longer its disks answer unless etcd is heard of."),
    row("hob_cluster_disks_held", Gauge, From::Cluster(|c| c.disks_held as f64), "Disks of the cluster that this host holds."),

    row("hob_pool_size_bytes", Gauge, From::Pool(|p| p.size.bytes() as f64), "Space for caches on online devices."),
    row("hob_pool_free_bytes", Gauge, From::Pool(|p| p.free.bytes() as f64), "Space that no cache uses, on devices that allow allocation."),
    row("hob_pool_orphan_bytes", Gauge, From::Pool(|p| p.orphans.iter().map(|o| o.size.bytes()).sum::<u64>() as f64), "Space of persistent caches that belong to no disk."),
    row("hob_pool_swap_bytes", Gauge, From::Pool(|p| p.swap.iter().map(|s| s.size.bytes()).sum::<u64>() as f64), "Space of swap areas of the host."),
    row("hob_device_state", Gauge, From::DeviceStates, "1 for the state that a flash device is in, 0 for the others."),
    row("hob_device_admits", Gauge, From::Device(|d| yes(d.admission == Admission::In)), "1 when a flash device gives new segments."),
    row("hob_device_size_bytes", Gauge, From::Device(|d| d.size.bytes() as f64), "Space for caches on a flash device."),
    row("hob_device_free_bytes", Gauge, From::Device(|d| d.free.bytes() as f64), "Space on a flash device that no cache uses."),
    row("hob_device_ios", Counter, From::DeviceIo(|c| c.ios as f64), "Reads, writes and flushes of a flash device that ended, failed ones included."),
    row("hob_device_io_errors", Counter, From::DeviceIo(|c| c.errors as f64), "Of these, failed."),
    row("hob_device_read_bytes", Counter, From::DeviceIo(|c| c.read_bytes as f64), "Bytes read from a flash device."),
    row("hob_device_written_bytes", Counter, From::DeviceIo(|c| c.written_bytes as f64), "Bytes written to a flash device, journals included: what wears it."),
    row("hob_device_stalls", Counter, From::Device(|d| d.stalls as f64), "Times that a flash device did not answer in time, so that its caches were bypassed."),
    row("hob_device_ios_in_flight", Gauge, From::DeviceIo(|c| c.in_flight as f64), "Reads, writes and flushes of a flash device that have not ended."),

    row("hob_disk_state", Gauge, From::DiskStates, "1 for the state that a disk is in, 0 for the others."),
    row("hob_disk_backing_state", Gauge, From::BackingStates, "1 for the state that the backing of a disk is in, 0 for the others."),
    row("hob_disk_backing_outage_seconds", Gauge, From::Backing(|b| b.outage_seconds() as f64), "Seconds since the connection to the backing was lost; 0 while it is connected."),
    row("hob_disk_backing_oldest_request_seconds", Gauge, From::Backing(|b| b.oldest_request_ms() as f64 / 1e3), "Age of the oldest request of a backing that answers slowly; 0 in other states."),
    row("hob_disk_backing_waiting_requests", Gauge, From::Backing(|b| b.waiting_requests() as f64), "Requests that wait for a backing that is slow or reconnecting; 0 in other states."),
    row("hob_disk_size_bytes", Gauge, From::Disk(|d| d.size.bytes() as f64), "Size of a disk; 0 while it has never been opened."),
    row("hob_disk_requests", Counter, From::Outcome(|o| o.count as f64), "Requests of guests, by what became of them."),
    row("hob_disk_request_bytes", Counter, From::Outcome(|o| o.bytes as f64), "Bytes that requests of guests asked for."),
    row("hob_disk_request_duration_seconds", Histogram, From::Latency, "From a request's arrival to its reply."),
    row("hob_disk_requests_in_flight", Gauge, From::Stats(|s| s.in_flight as f64), "Requests that are not answered yet."),
    row("hob_disk_reads", Counter, From::Stats(|s| s.reads as f64), "Reads of guests."),
    row("hob_disk_read_bytes", Counter, From::Stats(|s| s.read_bytes as f64), "Bytes of these."),
    row("hob_disk_writes", Counter, From::Stats(|s| s.writes as f64), "Writes of guests."),
    row("hob_disk_written_bytes", Counter, From::Stats(|s| s.write_bytes as f64), "Bytes of these."),
    row("hob_disk_read_hits", Counter, From::Stats(|s| s.read_hits as f64), "Reads that flash served whole; by hob_disk_reads_total, the hit ratio."),
    row("hob_disk_memory_hits", Counter, From::Stats(|s| s.memory_hits as f64), "Reads that memory above flash served whole."),

    row("hob_disk_flash_ios", Counter, From::Stats(|s| s.flash.ios as f64), "I/Os to flash that ended, failed ones included."),
    row("hob_disk_flash_io_errors", Counter, From::Stats(|s| s.flash.errors as f64), "I/Os to flash that failed."),
    row("hob_disk_flash_read_bytes", Counter, From::Stats(|s| s.flash.read_bytes as f64), "Bytes read from flash."),
    row("hob_disk_flash_written_bytes", Counter, From::Stats(|s| s.flash.write_bytes as f64), "Bytes written to flash."),
    row("hob_disk_flash_io_seconds", Counter, From::Stats(|s| s.flash.total_ns as f64 / NS), "Sum of the latencies of I/Os to flash."),
    row("hob_disk_flash_io_wait_seconds", Counter, From::Stats(|s| s.flash.waited_ns as f64 / NS), "Time that I/Os to flash waited for their turn, all together."),
    row("hob_disk_flash_io_units", Counter, From::Stats(|s| s.flash.units as f64), "I/Os to flash in units, as shares and limits count them: 32 KiB by default, at least one for each I/O."),
    row("hob_disk_flash_checksum_mismatches", Counter, From::Stats(|s| s.checksum_mismatches as f64), "Sectors (4 KiB) that flash returned changed."),
    row("hob_disk_backing_ios", Counter, From::Stats(|s| s.backing.ios as f64), "I/Os to the backing that ended, failed ones included."),
    row("hob_disk_backing_io_errors", Counter, From::Stats(|s| s.backing.errors as f64), "I/Os to the backing that failed."),
    row("hob_disk_backing_read_bytes", Counter, From::Stats(|s| s.backing.read_bytes as f64), "Bytes read from the backing."),
    row("hob_disk_backing_written_bytes", Counter, From::Stats(|s| s.backing.write_bytes as f64), "Bytes written to the backing."),
    row("hob_disk_backing_io_seconds", Counter, From::Stats(|s| s.backing.total_ns as f64 / NS), "Sum of the latencies of I/Os to the backing."),
    row("hob_disk_backing_io_wait_seconds", Counter, From::Stats(|s| s.backing.waited_ns as f64 / NS), "Time that I/Os to the backing waited for their turn, all together."),
    row("hob_disk_backing_io_units", Counter, From::Stats(|s| s.backing.units as f64), "I/Os to the backing in units, as shares and limits count them: 32 KiB by default, at least one for each I/O."),

    row("hob_disk_qos_shares", Gauge, From::Qos(|q| Some(f64::from(q.qos.shares))), "Shares of a disk where there is too little for all."),
    row("hob_disk_qos_reservation_units", Gauge, From::Qos(|q| (q.qos.reservation > 0).then(|| f64::from(q.qos.reservation))), "Units a second of its datastore that a disk gets whatever others want."),
    row("hob_disk_qos_limit_units", Gauge, From::Qos(|q| q.qos.limit.map(f64::from)), "Units a second of its datastore that a disk does not pass."),
    row("hob_disk_qos_limit_bytes", Gauge, From::Qos(|q| q.qos.bytes_limit.map(|limit| limit.bytes() as f64)), "Bytes a second of its datastore that a disk does not pass."),
    row("hob_disk_qos_flash_limit_units", Gauge, From::Qos(|q| q.qos.flash_limit.map(f64::from)), "Units a second of each flash device that a disk does not pass."),
    row("hob_datastore_window_ios", Gauge, From::Datastore(|s| s.window.map(f64::from)), "Maximum number of I/Os in flight to a datastore, while it is throttled."),
    row("hob_datastore_ios_in_flight", Gauge, From::Datastore(|s| (s.control != "off").then(|| f64::from(s.in_flight))), "I/Os in a datastore that is watched."),
    row("hob_datastore_ios_waiting", Gauge, From::Datastore(|s| Some(s.waiting as f64)), "I/Os that wait for their turn at a datastore."),
    row("hob_datastore_latency_seconds", Gauge, From::Datastore(|s| (s.latency_ns > 0).then(|| s.latency_ns as f64 / NS)), "Smoothed latency of a datastore that is watched."),
    row("hob_datastore_capacity_units", Gauge, From::Datastore(|s| s.capacity.or(Some(s.peak).filter(|peak| *peak > 0)).map(f64::from)), "Capacity of a datastore, configured or measured, units per second."),
    row("hob_datastore_reserved_units", Gauge, From::Datastore(|s| (s.reserved > 0).then(|| f64::from(s.reserved))), "Of these, reserved by its disks."),

    row("hob_cache", Info, From::CacheInfo, "How a cache works; always 1."),
    row("hob_cache_state", Gauge, From::CacheStates, "1 for the state that a cache is in, 0 for the others."),
    row("hob_cache_wanted_bytes", Gauge, From::Cache(|c| c.size.bytes() as f64), "Configured size of a cache."),
    row("hob_cache_room_bytes", Gauge, From::Cache(|c| c.room.bytes() as f64), "Present size of a cache: smaller than configured after the loss of a device."),
    row("hob_cache_journal_room_bytes", Gauge, From::Cache(|c| c.journal.bytes() as f64), "Additional space of a cache's journal."),
    row("hob_cache_used_bytes", Gauge, From::CacheStats(|c| (c.stats.blocks_cached * c.block_bytes) as f64), "Blocks with data."),
    row("hob_cache_capacity_bytes", Gauge, From::CacheStats(|c| (c.stats.blocks * c.block_bytes) as f64), "All blocks."),
    row("hob_cache_valid_bytes", Gauge, From::CacheStats(|c| sectors(c.stats.sectors_valid)), "Sectors with data."),
    row("hob_cache_dirty_bytes", Gauge, From::CacheStats(|c| sectors(c.stats.sectors_dirty)), "Sectors that are not on the backing yet."),
    row("hob_cache_dirty_lost_bytes", Gauge, From::CacheStats(|c| sectors(c.stats.sectors_lost)), "Of these, sectors that flash cannot deliver."),
    row("hob_cache_evictions", Counter, From::CacheStats(|c| c.stats.evictions.blocks as f64), "Blocks that gave way to others."),
    row("hob_cache_draining", Gauge, From::CacheStats(|c| yes(c.stats.draining)), "1 while a drain is under way."),
    row("hob_cache_destaged_bytes", Counter, From::CacheStats(|c| c.stats.destaged_bytes as f64), "Bytes written from flash to the backing."),
    row("hob_cache_destage_errors", Counter, From::CacheStats(|c| c.stats.destage_errors as f64), "Writes from flash to the backing that failed; they are tried again."),
    row("hob_cache_journal_written_bytes", Counter, From::CacheStats(|c| c.stats.journal_bytes as f64), "Bytes of journal written to flash, all copies."),
    row("hob_cache_second_copy_bytes", Counter, From::CacheStats(|c| c.stats.second_copy_bytes as f64), "Bytes written to flash a second time, as second copies."),
    row("hob_cache_scrubbed_bytes", Counter, From::CacheStats(|c| c.stats.scrubbed_bytes as f64), "Bytes whose checksums were compared in the background."),
    row("hob_cache_unverified_bytes", Gauge, From::CacheStats(|c| sectors(c.stats.sectors_unverified)), "Clean sectors that flash does not serve before they were compared with the backing."),
    row("hob_cache_to_verify_bytes", Gauge, From::CacheStats(|c| sectors(c.stats.sectors_to_verify)), "All that was to be compared with the backing after a restart; hob_cache_unverified_bytes of it are left."),
    row("hob_cache_verified_bytes", Counter, From::CacheStats(|c| sectors(c.stats.sectors_verified)), "Sectors that were compared with the backing after a restart, and equal."),
    row("hob_cache_stale_bytes", Counter, From::CacheStats(|c| sectors(c.stats.sectors_stale)), "Sectors that were compared with the backing after a restart, differed, and were dropped."),
    row("hob_cache_index_bytes", Gauge, From::CacheStats(|c| c.stats.index_bytes as f64), "Memory of everything that grows with the cache."),
    row("hob_memory_bytes", Gauge, From::Stats(|s| s.memory_bytes as f64), "Memory above the cache."),
    row("hob_memory_used_bytes", Gauge, From::Stats(|s| s.memory_held_bytes as f64), "Bytes of it with data."),
    row("hob_memory_index_bytes", Gauge, From::Stats(|s| s.memory_index_bytes as f64), "Memory of everything else that grows with it."),
    row("hob_shared_read_bytes", Counter, From::Stats(|s| s.shared_read_bytes as f64), "Bytes that the disk of a clone's parent served instead of its backing."),
    row("hob_memory_read_ahead_bytes", Counter, From::Stats(|s| s.read_ahead_bytes as f64), "Bytes read ahead into memory."),
    row("hob_memory_writes_merged", Counter, From::Stats(|s| s.writes_merged as f64), "Writes that went to the backing in one I/O with others."),
];

fn yes(is: bool) -> f64 {
    if is { 1.0 } else { 0.0 }
}

fn sectors(count: u64) -> f64 {
    (count * SECTOR_BYTES) as f64
}

/// The states of a device, with their labels.
pub(super) const DEVICE_STATES: [(DeviceState, &str); 4] = [
    (DeviceState::Online, "online"),
    (DeviceState::Stalled, "stalled"),
    (DeviceState::Fenced, "fenced"),
    (DeviceState::Offline, "offline"),
];

/// The states of a disk, with their labels.
pub(super) const DISK_STATES: [(DiskState, &str); 5] = [
    (DiskState::Online, "online"),
    (DiskState::Offline, "offline"),
    (DiskState::Removing, "removing"),
    (DiskState::Awaited, "awaited"),
    (DiskState::Away, "away"),
];

/// The states of a cache, with their labels.
pub(super) const CACHE_STATES: [(CacheState, &str); 6] = [
    (CacheState::None, "none"),
    (CacheState::Active, "active"),
    (CacheState::Changing, "changing"),
    (CacheState::Recovering, "recovering"),
    (CacheState::Stalled, "stalled"),
    (CacheState::Fenced, "fenced"),
];
