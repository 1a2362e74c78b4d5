//! Conversion of the engine's statistics into API types.

use hob_control::{
    Bucket, CacheCandidate, CacheChoice, CacheState, DiskStats, Evictions, Latency, OutcomeStats,
    RecentReads, Size, VsphereStats,
};
use hob_engine::chooser::{Alternative, Choice};
use hob_engine::histogram::Histogram;
use hob_engine::outcome::OUTCOMES;
use hob_engine::sizing::Recent;
use hob_engine::stats;
use hob_engine::units::SECTOR_BYTES;

use super::Observe;
use super::quality::Latest;
use crate::api_error::Result;

const KIB: f64 = 1024.0;

impl Observe {
    /// Returns a disk's statistics.
    pub(crate) async fn stats(&self, name: &str) -> Result<DiskStats> {
        let (shard, id, block_size) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            (disk.shard()?, disk.id, disk.cache().filter(|_| disk.has_cache).map(|spec| spec.block_size))
        };
        let stats = shard.stats(id).await?;
        let mut report = report(name, block_size.unwrap_or_default(), &stats);
        let sizing = shard.sizing(id).await?;
        let inner = self.registry.inner();
        let disk = inner.disk(name)?;
        report.recent = recent(&sizing.recent, disk.quality.latest());
        report.destage_rate_bytes = disk.watch.rate();
        Ok(report)
    }
}

/// Converts the statistics of the most recent reads.
pub(in crate::services) fn recent(recent: &Recent, latest: Latest) -> RecentReads {
    RecentReads {
        reads: recent.reads,
        hit_percent: percent(recent.read_hits, recent.reads),
        first_percent: 100.0 * recent.first_share,
        read_bytes: recent.read_bytes,
        write_bytes: recent.write_bytes,
        latest_reads: latest.reads,
        latest_hit_percent: percent(latest.hits, latest.reads),
    }
}

/// Converts the policy and admission that hob has chosen for a cache, and their alternatives.
fn choice(choice: &Choice) -> CacheChoice {
    let candidate = |alternative: &Alternative| CacheCandidate {
        policy: alternative.combination.policy.info().name.to_owned(),
        admission: alternative.combination.admission.to_string(),
        hit_percent: 100.0 * alternative.hit_ratio,
        flash_write_percent: 100.0 * alternative.flash_write_ratio,
    };
    CacheChoice {
        policy: choice.current.policy.info().name.to_owned(),
        admission: choice.current.admission.to_string(),
        phase: choice.phase.to_string(),
        changes: choice.changes,
        candidates: choice.alternatives.iter().map(candidate).collect(),
    }
}

/// Converts all statistics of a disk.
pub(in crate::services) fn report(disk: &str, block_size: Size, stats: &stats::DiskStats) -> DiskStats {
    let requests = stats.requests();
    let latency = stats.latency();
    let outcomes = OUTCOMES.iter().zip(&stats.outcomes).map(|(row, outcome)| OutcomeStats {
        class: row.class.to_owned(),
        reason: row.reason.to_owned(),
        count: outcome.count,
        bytes: outcome.bytes,
        percent: percent(outcome.count, requests),
        latency: summary(&outcome.latency),
    });
    DiskStats {
        disk: disk.to_owned(),
        elapsed_ns: stats.elapsed_ns,
        cache: cache_state(stats.cache),
        requests,
        reads: stats.reads,
        writes: stats.writes,
        read_bytes: stats.read_bytes,
        write_bytes: stats.write_bytes,
        hit_percent: percent(stats.read_hits, stats.reads),
        memory_hit_percent: percent(stats.memory_hits, stats.reads),
        recent: RecentReads::default(),
        iops_mean: stats.iops_mean(),
        iops_max: stats.iops_max as f64,
        kib_per_io_mean: stats.request_bytes_mean() / KIB,
        kib_per_io_max: stats.request_bytes_max as f64 / KIB,
        latency_mean_ns: latency.mean_ns(),
        latency_max_ns: latency.max_ns(),
        cache_io_latency_mean_ns: stats.flash.mean_ns(),
        disk_io_latency_mean_ns: stats.backing.mean_ns(),
        cache_ios: stats.flash.ios,
        evictions: Evictions {
            operations: stats.evictions.operations,
            blocks: stats.evictions.blocks,
            last_operation_at_ns: stats.evictions.last_operation_ns,
            last_blocks: stats.evictions.last_blocks,
        },
        flash_errors: stats.flash.errors,
        backing_errors: stats.backing.errors,
        checksum_mismatches: stats.checksum_mismatches,
        blocks: stats.blocks,
        blocks_cached: stats.blocks_cached,
        sectors_valid: stats.sectors_valid,
        mode: if stats.cache == stats::CacheState::None { String::new() } else { stats.mode.to_string() },
        dirty_bytes: stats.sectors_dirty * SECTOR_BYTES,
        dirty_lost_bytes: stats.sectors_lost * SECTOR_BYTES,
        backing_read_bytes: stats.backing.read_bytes,
        shared_read_bytes: stats.shared_read_bytes,
        destaged_bytes: stats.destaged_bytes,
        destage_rate_bytes: 0,
        destage_errors: stats.destage_errors,
        journal_bytes: stats.journal_bytes,
        second_copy_bytes: stats.second_copy_bytes,
        unverified_bytes: stats.sectors_unverified * SECTOR_BYTES,
        to_verify_bytes: stats.sectors_to_verify * SECTOR_BYTES,
        verified_bytes: stats.sectors_verified * SECTOR_BYTES,
        stale_bytes: stats.sectors_stale * SECTOR_BYTES,
        draining: stats.draining,
        block_size,
        choice: stats.choice.as_ref().map(choice),
        index_bytes: stats.index_bytes,
        memory_bytes: stats.memory_bytes,
        memory_held_bytes: stats.memory_held_bytes,
        read_ahead_bytes: stats.read_ahead_bytes,
        extra_read_bytes: stats.extra_read_bytes,
        extra_blocks_used: stats.extra_blocks_used,
        writes_merged: stats.writes_merged,
        memory_index_bytes: stats.memory_index_bytes,
        outcomes: outcomes.collect(),
        vsphere: vsphere(stats, &latency),
    }
}

fn vsphere(stats: &stats::DiskStats, latency: &Histogram) -> VsphereStats {
    let micros = |nanos: u64| nanos as f64 / 1e3;
    let evictions = &stats.evictions;
    VsphereStats {
        cache_hit_percentage: percent(stats.read_hits, stats.reads),
        total_cache_ios: stats.flash.ios,
        mean_cache_io_latency: micros(stats.flash.mean_ns()),
        mean_disk_io_latency: micros(stats.backing.mean_ns()),
        total_ios: stats.requests(),
        mean_iops: stats.iops_mean(),
        max_iops: stats.iops_max as f64,
        mean_kb_per_io: stats.request_bytes_mean() / KIB,
        max_kb_per_io: stats.request_bytes_max as f64 / KIB,
        mean_io_latency: micros(latency.mean_ns()),
        max_io_latency: micros(latency.max_ns()),
        evict_last_op_time: micros(evictions.last_operation_ns),
        evict_num_blocks_last_op: evictions.last_blocks,
        evict_avg_num_blocks_per_op: ratio(evictions.blocks, evictions.operations),
        cache_usage_percentage: percent(stats.blocks_cached, stats.blocks),
        failed_flash_ios: stats.flash.errors,
        failed_disk_ios: stats.backing.errors,
        num_blocks: stats.blocks,
        num_blocks_currently_cached: stats.blocks_cached,
    }
}

fn summary(histogram: &Histogram) -> Latency {
    // The last bucket has no upper bound.
    let longest = histogram.max_ns();
    let buckets = histogram.buckets().map(|(upper, count)| Bucket { up_to_ns: upper.min(longest), count });
    Latency {
        mean_ns: histogram.mean_ns(),
        p50_ns: histogram.quantile_ns(0.5),
        p99_ns: histogram.quantile_ns(0.99),
        p999_ns: histogram.quantile_ns(0.999),
        max_ns: longest,
        buckets: buckets.collect(),
    }
}

fn cache_state(state: stats::CacheState) -> CacheState {
    match state {
        stats::CacheState::None => CacheState::None,
        stats::CacheState::Active => CacheState::Active,
        stats::CacheState::Changing => CacheState::Changing,
        stats::CacheState::Recovering => CacheState::Recovering,
        stats::CacheState::Stalled => CacheState::Stalled,
        stats::CacheState::Fenced => CacheState::Fenced,
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Returns `part` as a percentage of `whole`; 0 of 0 is 0 %.
pub(in crate::services) fn percent(part: u64, whole: u64) -> f64 {
    100.0 * ratio(part, whole)
}
