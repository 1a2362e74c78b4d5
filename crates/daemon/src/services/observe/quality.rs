//! Detection of caches that do not work well: far fewer hits than the disk's miss-ratio curve
//! predicts, or flash that returns wrong data. hob compares hits once a minute, and counts checksum
//! mismatches every [`COUNT_EVERY`]. The hits of the latest minute also show that a warm-up has
//! ended.

use std::time::Duration;

use hob_engine::stats::DiskStats;
use hob_engine::units::DiskId;
use tokio::time::Instant;

use super::Observe;
use super::health::STATS_MAX;
use super::requests::expected;
use crate::background::spawn;
use crate::services::registry::{DiskEntry, DiskPhase};
use crate::shard_api::ShardHandle;

/// Interval between two comparisons of hits.
pub(in crate::services) const JUDGE_EVERY: Duration = Duration::from_secs(60);

/// Interval between two counts of checksum mismatches.
pub(in crate::services) const COUNT_EVERY: Duration = Duration::from_secs(3);

/// Minimum number of reads in a minute before the hits of the minute are compared.
const READS_TELLING: u64 = 1000;

/// A hit ratio below this fraction of the predicted hit ratio counts as low.
const SHARE_LOW: f64 = 0.5;

/// Minimum predicted hit ratio for a comparison.
const EXPECTED_MIN: f64 = 0.3;

/// Maximum read size in blocks for a comparison. One missing block makes the whole read a miss,
/// while the curve counts single blocks.
const READ_BLOCKS_MAX: u64 = 4;

/// A cache with data in this fraction of its blocks counts as full.
const FULL: f64 = 0.95;

/// Number of consecutive minutes with a low hit ratio that make a cache degraded.
const MINUTES: u32 = 3;

/// Maximum number of checksum mismatches that are repaired without a report.
const MISMATCHES_FEW: u64 = 10;

/// Maximum number of mismatches without a report for a cache that was recovered after a crash. The
/// journal of such a cache may describe frames that were filled again just before the crash.
const MISMATCHES_FEW_AFTER_CRASH: u64 = 1000;

/// Time after the latest mismatch during which `hob health` reports the mismatches.
const MISMATCHES_FOR: Duration = Duration::from_secs(3600);

/// Observations about one disk's cache.
#[derive(Debug, Default)]
pub(in crate::services) struct Quality {
    before: Option<Sample>,
    /// Counters at the start of the current interval of [`Latest`].
    began: Option<Sample>,
    latest: Latest,
    /// Number of consecutive minutes with a low hit ratio.
    low_minutes: u32,
    low: Option<String>,
    mismatches: u64,
    mismatched_at: Option<Instant>,
    /// True if the cache was recovered after a crash.
    has_crashed: bool,
    /// True while the shard's answer with the number of mismatches is outstanding.
    counting: bool,
    /// The cache's number of I/Os to flash, and a time at or before it was read. Only shared caches
    /// have this number.
    flash_ios: Option<(u64, Instant)>,
    /// `flash_ios` at the latest count of mismatches, and the time when hob last decided whether to
    /// count.
    counted: Option<(u64, Instant)>,
}

/// Reads of a disk in the latest complete interval of at least a minute and [`READS_TELLING`]
/// reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::services) struct Latest {
    /// Number of reads; 0 before the first interval has ended.
    pub(in crate::services) reads: u64,
    /// Number of these reads that flash or memory served completely.
    pub(in crate::services) hits: u64,
}

/// Counters of a disk's cache at one moment.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    reads: u64,
    read_hits: u64,
    read_bytes: u64,
    /// Number of block reads that the miss-ratio curve counts. The next field is the number of hits
    /// that the curve predicts for these reads.
    accesses: f64,
    expected_hits: f64,
    blocks: u64,
    blocks_cached: u64,
    block_bytes: u64,
}

impl Observe {
    /// Compares the hits of all disks with a cache.
    pub(in crate::services) fn judge(&self) {
        let inner = self.registry.inner();
        for (name, disk) in &inner.disks {
            let (DiskPhase::Online(shard), true, Some(spec)) = (&disk.phase, disk.has_cache, disk.cache())
            else {
                continue;
            };
            let segment_bytes = inner.pools.get(&spec.pool).map_or(0, |pool| pool.segment_bytes);
            let room = hob_control::Size(disk.held.len() as u64 * segment_bytes);
            let (block_size, id, shard) = (spec.block_size, disk.id, shard.clone());
            let before = disk.quality.before;
            let (service, name) = (self.clone(), name.clone());
            spawn(async move {
                let Ok(stats) = shard.stats(id).await else { return };
                let now = Sample { block_bytes: block_size.bytes(), ..Sample::of(&stats) };
                let sample = match before.filter(|before| before.has_same_reads(&now)) {
                    // The shard computes no curve for a disk without new reads.
                    Some(Sample { accesses, expected_hits, .. }) => Sample { accesses, expected_hits, ..now },
                    None => {
                        let Ok(sizing) = shard.sizing(id).await else { return };
                        let mut sizes = sizing.block_sizes.iter();
                        let size = sizes.rfind(|size| size.block_bytes <= block_size.bytes());
                        let accesses = size.map_or(0, |size| size.accesses) as f64;
                        Sample {
                            accesses,
                            expected_hits: accesses * expected(&sizing, room, block_size),
                            ..now
                        }
                    }
                };
                if let Ok(disk) = service.registry.inner().disk_mut(&name) {
                    disk.quality.note(&name, sample);
                }
            });
        }
    }

    /// Counts the checksum mismatches of all disks with a configured cache, including caches whose
    /// flash is fenced.
    pub(in crate::services) fn count_mismatches(&self) {
        let mut by_shard: Vec<(ShardHandle, Vec<(String, DiskId)>)> = Vec::new();
        for (name, disk) in &mut self.registry.inner().disks {
            let (DiskPhase::Online(shard), Some(_), false) =
                (&disk.phase, disk.cache(), disk.quality.counting)
            else {
                continue;
            };
            if !disk.quality.needs_count(Instant::now()) {
                continue;
            }
            let counted = (name.clone(), disk.id);
            match by_shard.iter_mut().find(|(other, _)| other.is_same(shard)) {
                Some((_, disks)) => disks.push(counted),
                None => by_shard.push((shard.clone(), vec![counted])),
            }
            disk.quality.counting = true;
        }
        for (shard, disks) in by_shard {
            let service = self.clone();
            spawn(async move { service.count_mismatches_of(&shard, &disks).await });
        }
    }

    /// Counts the checksum mismatches of these disks of a shard.
    async fn count_mismatches_of(&self, shard: &ShardHandle, disks: &[(String, DiskId)]) {
        for some in disks.chunks(STATS_MAX) {
            let ids = some.iter().map(|(_, id)| *id).collect();
            // A shard that does not answer is reported elsewhere.
            let counts = shard.checksum_mismatches(ids).await.unwrap_or_default();
            let mut inner = self.registry.inner();
            for (index, (name, id)) in some.iter().enumerate() {
                let Ok(disk) = inner.disk_mut(name) else { continue };
                disk.quality.counting = false;
                match counts.get(index).copied().flatten().filter(|_| disk.id == *id) {
                    Some(count) => disk.quality.count(count, Instant::now()),
                    None => disk.quality.counted = None,
                }
            }
        }
    }
}

impl Sample {
    fn of(stats: &DiskStats) -> Sample {
        Sample {
            reads: stats.reads,
            read_hits: stats.read_hits + stats.memory_hits,
            read_bytes: stats.read_bytes,
            blocks: stats.blocks,
            blocks_cached: stats.blocks_cached,
            ..Sample::default()
        }
    }

    /// Returns true if the disk was not read between the two samples, and its cache has the same
    /// size.
    fn has_same_reads(&self, other: &Sample) -> bool {
        self.reads == other.reads && self.blocks == other.blocks && self.block_bytes == other.block_bytes
    }

    /// Returns the actual and the predicted hit ratio since `before` in percent, if the actual hit
    /// ratio is low.
    fn low_since(&self, before: &Sample) -> Option<(f64, f64)> {
        let reads = self.reads.checked_sub(before.reads).filter(|reads| *reads >= READS_TELLING)?;
        let bytes = self.read_bytes.checked_sub(before.read_bytes)?;
        let accesses = self.accesses - before.accesses;
        if bytes / reads > READ_BLOCKS_MAX * self.block_bytes || accesses < READS_TELLING as f64 {
            return None;
        }
        // A cache that is still warming has fewer hits than predicted for its full size.
        let is_full = self.blocks_cached as f64 >= FULL * self.blocks as f64;
        let grows = self.blocks_cached > before.blocks_cached + self.blocks / 100;
        if grows && !is_full {
            return None;
        }
        let actual = self.read_hits.saturating_sub(before.read_hits) as f64 / reads as f64;
        let expected = (self.expected_hits - before.expected_hits) / accesses;
        (expected >= EXPECTED_MIN && actual < SHARE_LOW * expected)
            .then_some((100.0 * actual, 100.0 * expected))
    }
}

impl Quality {
    /// Records that the cache was recovered. `was_closed` is true if its journal was closed
    /// cleanly, and false after a crash.
    pub(in crate::services) fn recovered(&mut self, was_closed: bool) {
        self.has_crashed = !was_closed;
    }

    /// Records the number of I/Os of a shared cache to flash, which was read at `at` or later.
    pub(in crate::services) fn note_flash_ios(&mut self, ios: u64, at: Instant) {
        self.flash_ios = Some((ios, at));
    }

    /// Returns false if the cache has had no I/O to flash since the latest count, and so no new
    /// mismatch. If this function returns true, the caller counts the mismatches now.
    fn needs_count(&mut self, now: Instant) -> bool {
        let before = self.counted;
        self.counted = self.flash_ios.map(|(ios, _)| (ios, now));
        match (self.flash_ios, before) {
            (Some((ios, at)), Some((counted, decided))) => ios != counted || at <= decided,
            _ => true,
        }
    }

    pub(in crate::services) fn count(&mut self, mismatches: u64, at: Instant) {
        if mismatches > self.mismatches {
            self.mismatched_at = Some(at);
        }
        self.mismatches = mismatches;
    }

    fn note(&mut self, name: &str, now: Sample) {
        self.measure(now);
        let low = self.before.as_ref().and_then(|before| now.low_since(before));
        self.before = Some(now);
        self.low_minutes = if low.is_some() { self.low_minutes + 1 } else { 0 };
        let was_low = self.low.is_some();
        self.low = low.filter(|_| self.low_minutes >= MINUTES).map(|(actual, expected)| {
            format!(
                "{actual:.0} % of reads are hits, but the miss-ratio curve of this disk predicts {expected:.0} %; \
                 'hob explain {name}' shows why the other reads are not hits"
            )
        });
        if let Some(low) = self.low.as_ref().filter(|_| !was_low) {
            tracing::warn!("the cache of {name}: {low}");
        }
    }

    /// Ends the current interval if it has enough reads. A cache that has lost blocks was emptied
    /// or made smaller, so its earlier hits no longer count.
    fn measure(&mut self, now: Sample) {
        let Some(began) = self.began.replace(now) else { return };
        let has_lost_blocks = now.blocks_cached < began.blocks_cached / 2;
        let reads = now.reads.checked_sub(began.reads).filter(|_| !has_lost_blocks);
        match (reads, now.read_hits.checked_sub(began.read_hits)) {
            (Some(reads), Some(hits)) if reads >= READS_TELLING => self.latest = Latest { reads, hits },
            (Some(_), Some(_)) => self.began = Some(began),
            _ => self.latest = Latest::default(),
        }
    }

    /// Returns the reads of the latest complete interval.
    pub(in crate::services) fn latest(&self) -> Latest {
        self.latest
    }

    /// Returns the reason for a low hit ratio; `None` if the hit ratio is not low.
    pub(in crate::services) fn low(&self) -> Option<String> {
        self.low.clone()
    }
}

impl DiskEntry {
    /// Returns a description of the checksum mismatches, if there were more than a few.
    pub(in crate::services) fn mismatches(&self, now: Instant) -> Option<String> {
        let Quality { mismatches, mismatched_at, has_crashed, .. } = &self.quality;
        let few = if *has_crashed { MISMATCHES_FEW_AFTER_CRASH } else { MISMATCHES_FEW };
        let is_recent = mismatched_at.is_some_and(|at| now.duration_since(at) < MISMATCHES_FOR);
        let pool = &self.cache()?.pool;
        (is_recent && *mismatches > few).then(|| {
            format!(
                "{mismatches} checksum mismatches since the disk was opened: flash returned other \
                data than hob had written, so hob read another copy or the backing instead. Check the devices \
                of pool {pool} ('hob pool show {pool}', dmesg, smartctl) and replace a bad device"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the counters a minute after `before`, with these additional reads of one block,
    /// hits, expected hits and filled blocks.
    fn later(before: Sample, reads: u64, hits: u64, expected: u64, filled: u64) -> Sample {
        Sample {
            reads: before.reads + reads,
            read_hits: before.read_hits + hits,
            read_bytes: before.read_bytes + reads * 4096,
            accesses: before.accesses + reads as f64,
            expected_hits: before.expected_hits + expected as f64,
            blocks: 10_000,
            blocks_cached: before.blocks_cached + filled,
            block_bytes: 4096,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn mismatches_are_counted_only_after_new_flash_io() {
        let mut quality = Quality::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        // The number of I/Os of a cache with a fixed size is unknown.
        assert!(quality.needs_count(at(0)) && quality.needs_count(at(3)));
        quality.note_flash_ios(5, at(4));
        assert!(quality.needs_count(at(6)));
        quality.note_flash_ios(5, at(8));
        assert!(!quality.needs_count(at(9)));
        assert!(quality.needs_count(at(12)), "the number is as old as the latest decision");
        quality.note_flash_ios(6, at(14));
        assert!(quality.needs_count(at(15)));
        // The shard did not answer.
        quality.counted = None;
        quality.note_flash_ios(6, at(16));
        assert!(quality.needs_count(at(18)));
    }

    #[test]
    fn a_disk_without_reads_keeps_its_predicted_hits() {
        let before = later(Sample::default(), 5000, 100, 200, 10);
        assert!(before.has_same_reads(&later(before, 0, 0, 0, 10)));
        assert!(!before.has_same_reads(&later(before, 1, 0, 0, 0)));
        assert!(!before.has_same_reads(&Sample { blocks: 20_000, ..before }));
    }

    #[tokio::test(start_paused = true)]
    async fn the_count_of_mismatches_restarts_when_a_disk_is_opened_again() {
        let mut quality = Quality::default();
        let start = Instant::now();
        quality.count(50, start);
        tokio::time::advance(Duration::from_secs(60)).await;
        quality.count(0, Instant::now());
        assert_eq!((quality.mismatches, quality.mismatched_at), (0, Some(start)));
        quality.count(20, Instant::now());
        assert_eq!((quality.mismatches, quality.mismatched_at), (20, Some(start + Duration::from_secs(60))));
    }

    fn minutes(quality: &mut Quality, count: u32, reads: u64, hits: u64, expected: u64, filled: u64) {
        for _ in 0..count {
            let now = later(quality.before.unwrap_or_default(), reads, hits, expected, filled);
            quality.note("vm", now);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn hits_far_below_the_curve_are_said_after_three_minutes_and_until_they_are_there() {
        let mut quality = Quality::default();
        minutes(&mut quality, 3, 5000, 100, 4000, 0);
        assert_eq!(quality.low(), None, "the first look has nothing to compare with");
        minutes(&mut quality, 1, 5000, 100, 4000, 0);
        let low = quality.low().unwrap();
        assert!(
            low.contains("2 % of reads") && low.contains("predicts 80 %") && low.contains("hob explain vm"),
            "{low}"
        );
        minutes(&mut quality, 1, 5000, 3500, 4000, 0);
        assert_eq!(quality.low(), None);
    }

    #[test]
    fn the_latest_interval_has_enough_reads_and_none_of_the_warm_up() {
        let mut quality = Quality::default();
        minutes(&mut quality, 1, 0, 0, 0, 0);
        assert_eq!(quality.latest(), Latest::default());
        minutes(&mut quality, 1, 8000, 2000, 0, 6000);
        assert_eq!(quality.latest(), Latest { reads: 8000, hits: 2000 });
        minutes(&mut quality, 1, 2000, 1990, 0, 10);
        assert_eq!(quality.latest(), Latest { reads: 2000, hits: 1990 });
        // Few reads: the interval becomes longer.
        minutes(&mut quality, 1, 600, 0, 0, 0);
        assert_eq!(quality.latest(), Latest { reads: 2000, hits: 1990 });
        minutes(&mut quality, 1, 600, 600, 0, 0);
        assert_eq!(quality.latest(), Latest { reads: 1200, hits: 600 });
        let before = quality.before.unwrap();
        quality.note("vm", Sample { blocks_cached: 0, reads: before.reads + 5000, ..before });
        assert_eq!(quality.latest(), Latest::default(), "the cache was emptied");
        quality.note("vm", Sample::default());
        minutes(&mut quality, 1, 3000, 3000, 0, 0);
        assert_eq!(quality.latest(), Latest { reads: 3000, hits: 3000 }, "after a reset of the counters");
    }

    #[tokio::test(start_paused = true)]
    async fn caches_that_warm_up_idle_or_cannot_do_better_are_in_order() {
        for (reads, hits, expected, filled) in
            [(5000, 100, 4000, 500), (900, 0, 800, 0), (5000, 100, 1000, 0), (5000, 2500, 4000, 0)]
        {
            let mut quality = Quality::default();
            minutes(&mut quality, 10, reads, hits, expected, filled);
            assert_eq!(quality.low(), None, "{reads} {hits} {expected} {filled}");
        }
        let long = |before: Sample| Sample {
            read_bytes: before.read_bytes + 5000 * (1 << 20),
            ..later(before, 5000, 0, 4500, 0)
        };
        let mut quality = Quality::default();
        for _ in 0..10 {
            let now = long(quality.before.unwrap_or_default());
            quality.note("vm", now);
        }
        assert_eq!(quality.low(), None, "long reads are not comparable");
    }
}
