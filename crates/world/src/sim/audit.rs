//! Compares the engine's statistics with the simulation's own counts.

use hob_engine::io::{Io, Op, Request};
use hob_engine::outcome::Outcome;
use hob_engine::stats::CacheState;
use hob_engine::units::{DiskId, RequestId, SECTOR_BYTES};
use hob_engine::vscsi::{CLASSES, Class, METRICS, Metric};

use super::Simulation;
use crate::content::UNIT_BYTES;
use crate::{Violation, ensure};

/// The simulation's counts of one disk since its statistics were reset.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    outcomes: [u64; Outcome::COUNT],
    bytes: u64,
    reads: u64,
    writes: u64,
    flash_ios: u64,
    flash_errors: u64,
    backing_ios: u64,
    backing_errors: u64,
    /// Numbers of requests that the disk's histograms must have counted since the histograms were
    /// reset.
    moved: Moved,
}

/// Numbers of valid reads and writes, by [`Class`].
#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    came: [u64; CLASSES.len()],
    answered: [u64; CLASSES.len()],
}

impl Moved {
    fn add(counts: &mut [u64; CLASSES.len()], op: Op) {
        let class = match op {
            Op::Read => Class::Reads,
            Op::Write(_) => Class::Writes,
            _ => return,
        };
        counts[Class::All as usize] += 1;
        counts[class as usize] += 1;
    }
}

impl Tally {
    /// Counts a request of a guest that the engine must not refuse.
    pub(super) fn comes(&mut self, request: &Request) {
        Moved::add(&mut self.moved.came, request.op);
    }

    /// Counts a reply to an accepted request.
    pub(super) fn answered(&mut self, request: &Request) {
        Moved::add(&mut self.moved.answered, request.op);
    }

    pub(super) fn reset_stats(&mut self) {
        *self = Tally { moved: self.moved, ..Tally::default() };
    }

    pub(super) fn reset_histograms(&mut self) {
        self.moved = Moved::default();
    }

    pub(super) fn request(&mut self, request: &Request, outcome: Outcome) {
        self.outcomes[outcome as usize] += 1;
        if outcome == Outcome::Refused {
            return;
        }
        self.bytes += request.len;
        self.reads += u64::from(request.op == Op::Read && !request.passes_by());
        self.writes += u64::from(matches!(request.op, Op::Write(_)));
    }

    pub(super) fn flash_io(&mut self, failed: bool) {
        self.flash_ios += 1;
        self.flash_errors += u64::from(failed);
    }

    pub(super) fn backing_io(&mut self, failed: bool) {
        self.backing_ios += 1;
        self.backing_errors += u64::from(failed);
    }
}

/// One read of the backing by the engine. All times in this struct are values of
/// `Simulation::clock`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetch {
    pub(super) request: RequestId,
    offset: u64,
    len: u64,
    began: u64,
    pub(super) ended: u64,
    arrived: u64,
    missed: bool,
    answered: bool,
}

impl Fetch {
    pub(super) fn new(request: RequestId, io: &Io, now: u64) -> Self {
        let (offset, len) = (io.offset, io.len);
        Fetch {
            request,
            offset,
            len,
            began: now,
            ended: u64::MAX,
            arrived: 0,
            missed: false,
            answered: false,
        }
    }

    fn overlaps(&self, other: &Fetch) -> bool {
        self.offset < other.offset + other.len
            && other.offset < self.offset + self.len
            && self.began < other.ended
            && other.began < self.ended
    }
}

impl Simulation<'_> {
    /// Checks that concurrent misses of the same data read the backing only once, unless a command
    /// changes the cache meanwhile.
    pub(super) fn check_fetched_once(
        &mut self,
        request: &Request,
        outcome: Outcome,
        arrived: u64,
    ) -> Result<(), Violation> {
        let missed = matches!(
            outcome,
            Outcome::MissFilled | Outcome::PartialMiss | Outcome::MissFlashBusy | Outcome::MissNoBlock
        );
        let disk = &mut self.disks[request.disk.0 as usize];
        let Some(index) = disk.fetches.iter().position(|fetch| fetch.request == request.id) else {
            return Ok(());
        };
        disk.fetches[index].missed = missed;
        disk.fetches[index].arrived = arrived;
        disk.fetches[index].answered = true;
        let mine = disk.fetches[index];
        let twice = disk.fetches.iter().find(|other| {
            let changed = disk.changed >= other.arrived.min(arrived);
            missed && other.missed && other.request != request.id && other.overlaps(&mine) && !changed
        });
        ensure!(
            twice.is_none(),
            "{request:?} reads data from the backing that {twice:?} was already reading"
        );
        let open = disk.fetches.iter().filter(|fetch| !fetch.answered).map(|fetch| fetch.began);
        let oldest = open.min().unwrap_or(u64::MAX);
        disk.fetches.retain(|fetch| !fetch.answered || fetch.ended > oldest);
        Ok(())
    }

    /// Compares the engine's statistics of every disk with the simulation's counts.
    pub(super) fn audit(&mut self) -> Result<(), Violation> {
        let mut in_flight = 0;
        for (index, disk) in self.disks.iter().enumerate() {
            let Some(stats) = self.engine.stats(self.now, DiskId(index as u32)) else {
                ensure!(!disk.present && !disk.leaving, "the engine has no statistics of disk {index}");
                continue;
            };
            in_flight += stats.in_flight;
            let tally = &disk.tally;
            for (row, expected) in stats.outcomes.iter().zip(tally.outcomes) {
                let counts = (row.count, row.latency.count());
                ensure!(counts == (expected, expected), "disk {index} counts {counts:?}, not {expected}");
            }
            let bytes: u64 = stats.outcomes.iter().map(|row| row.bytes).sum();
            let hits = stats.outcomes[Outcome::Hit as usize].count;
            let counted = (bytes, stats.reads, stats.writes);
            let expected = (tally.bytes, tally.reads, tally.writes);
            ensure!(counted == expected, "disk {index} counts {counted:?}, not {expected:?}");
            ensure!(
                stats.read_hits <= hits && stats.read_hits <= stats.reads,
                "disk {index} counts too many read hits"
            );
            let from_memory: u64 = [Outcome::HitMemory, Outcome::HitPrefetched]
                .map(|outcome| stats.outcomes[outcome as usize].count)
                .into_iter()
                .sum();
            let may_mismatch =
                self.options.faults || self.options.sabotage.is_some() || self.scenario.lives.is_some();
            ensure!(
                may_mismatch || stats.checksum_mismatches == 0,
                "disk {index}: a checksum of memory that a guest changed was believed"
            );
            let area = disk.memory.len() as u64 * UNIT_BYTES;
            let memory = (stats.memory_hits, stats.memory_bytes);
            ensure!(
                memory == (from_memory, area),
                "disk {index}: hits and size of the memory tier are {memory:?}, not {from_memory} and {area}"
            );
            ensure!(
                stats.memory_held_bytes <= area,
                "disk {index}: the memory tier holds more than its size"
            );
            let ios = (stats.flash.ios, stats.flash.errors, stats.backing.ios, stats.backing.errors);
            let expected = (tally.flash_ios, tally.flash_errors, tally.backing_ios, tally.backing_errors);
            let (ios, expected) = match self.scenario.lives {
                None => (ios, expected),
                // In histories with journals, flash I/O is not compared: one flush of flash may
                // serve several disks, so the simulation does not know for which disk the engine
                // counts the flush.
                Some(_) => ((0, 0, ios.2, ios.3), (0, 0, expected.2, expected.3)),
            };
            ensure!(ios == expected, "disk {index} counts {ios:?} I/Os, not {expected:?}");
            let failed = stats.outcomes[Outcome::BackingError as usize].count;
            let by_flash = self.scenario.lives.is_some() && (self.any_bad() || self.any_refuses());
            // Each session gets at most one error for each event in which writes were lost or
            // discarded. Failed flushes that began before such an event do not count as a report of
            // the event, and are added to the limit.
            let told = (self.report.doubts + self.report.discards) * (self.scenario.guests.len() as u64 + 1);
            let told = told + self.report.flushes_failed_early + self.report.changes_given_up;
            ensure!(
                failed <= stats.backing.errors + told || by_flash,
                "disk {index}: {failed} requests failed without an error of a device"
            );
            let bytes = disk.segments.len() as u64 * self.scenario.segment_bytes;
            let blocks = disk.config.map_or(0, |config| bytes / u64::from(config.block_bytes));
            let is_between = matches!(stats.cache, CacheState::Changing | CacheState::Recovering);
            let changing = self.scenario.lives.is_some() && is_between;
            ensure!(
                stats.blocks == blocks || changing,
                "disk {index} has {} blocks, not {blocks}",
                stats.blocks
            );
            let sectors = disk.config.map_or(0, |config| u64::from(config.block_bytes) / SECTOR_BYTES);
            let (cached, valid) = (stats.blocks_cached, stats.sectors_valid);
            let fits =
                (cached <= blocks || changing) && cached <= valid && (valid <= cached * sectors || changing);
            ensure!(fits, "disk {index}: {valid} sectors in {cached} of {blocks} blocks");
            let none = matches!(stats.cache, CacheState::None | CacheState::Fenced);
            ensure!(is_between || none == disk.config.is_none(), "{stats:?}");
            ensure!(stats.evictions.operations <= stats.evictions.blocks, "disk {index}: {stats:?}");
        }
        ensure!(
            in_flight == u64::from(self.engine.in_flight()),
            "the engine's number of requests in flight is not the sum of its disks"
        );
        self.check_clones()?;
        self.check_budget()?;
        self.audit_histograms()
    }

    /// Checks that each histogram has one value per counted request.
    fn audit_histograms(&self) -> Result<(), Violation> {
        for (index, disk) in self.disks.iter().enumerate() {
            let Some(histograms) = self.engine.histograms(DiskId(index as u32)) else { continue };
            let moved = &disk.tally.moved;
            for (class, name) in CLASSES {
                let (came, answered) = (moved.came[class as usize], moved.answered[class as usize]);
                for row in METRICS {
                    let expected = match row.metric {
                        Metric::Length | Metric::Outstanding => came,
                        Metric::Latency => answered,
                        // The first request has no preceding request, so these histograms have one
                        // value less.
                        Metric::Seek | Metric::SeekNearest | Metric::Interarrival => came.saturating_sub(1),
                    };
                    let found = histograms.get(class, row.metric);
                    let sum: u64 = found.buckets().map(|(_, count)| count).sum();
                    ensure!(
                        (found.count(), sum) == (expected, expected),
                        "disk {index}: {} and {sum} in {} of {name}, not {expected}",
                        found.count(),
                        row.name
                    );
                }
            }
        }
        Ok(())
    }

    /// Returns the statistics of all disks that the engine has.
    pub(super) fn all_stats(&self) -> Vec<(usize, hob_engine::stats::DiskStats)> {
        let stats = |index| Some((index, self.engine.stats(self.now, DiskId(index as u32))?));
        (0..self.disks.len()).filter_map(stats).collect()
    }

    /// Checks that the engine has no work left at the end of a history.
    pub(super) fn check_rest(&mut self) -> Result<(), Violation> {
        ensure!(self.requests.is_empty(), "never answered: {:?}", self.requests);
        ensure!(self.asked.is_empty(), "never ended: {:?}", self.asked);
        ensure!(self.buffers.is_empty(), "never given back: {:?}", self.buffers);
        ensure!(
            self.engine.in_flight() == 0,
            "{} requests are in flight at the end",
            self.engine.in_flight()
        );
        ensure!(self.engine.poll_timeout().is_none(), "the engine has a timeout although it has no work");
        self.audit()?;
        for (_, stats) in self.all_stats() {
            self.report.evictions += stats.evictions.blocks;
            self.report.destaged_bytes += stats.destaged_bytes;
            self.report.read_ahead_bytes += stats.read_ahead_bytes;
            self.report.extra_read_bytes += stats.extra_read_bytes;
            self.report.extra_blocks_used += stats.extra_blocks_used;
            self.report.writes_merged += stats.writes_merged;
            self.report.bulk_writes += stats.bulk_writes;
        }
        Ok(())
    }

    /// Checks that all segments are free after all disks are removed.
    pub(super) fn check_empty(&mut self) -> Result<(), Violation> {
        ensure!(self.asked.is_empty(), "never ended: {:?}", self.asked);
        ensure!(
            self.free == self.all_segments(),
            "not all segments are free at the end, only {:?}",
            self.free
        );
        Ok(())
    }
}
