//! The engine's state of one disk.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::awaiting_journal::{AwaitingJournal, WAIT_NS_MAX};
use super::backed::Backed;
use super::bulk::BulkWrites;
use super::cache_budget::CacheBudget;
use super::destager::Destager;
use super::extra_fill::ReadTime;
use super::maintenance::Maintenance;
use super::merge::Merger;
use super::ownership::Ownership;
use super::records::Journal;
use super::recovering::RecoveringCache;
use super::structure::Opening;
use super::sync_order::SyncOrder;
use super::vacate::Vacating;
use super::verify::Verify;
use crate::cache::Cache;
use crate::command::{Bitmap, CacheChange, Copies, DiskConfig};
use crate::index::Index;
use crate::io::Request;
use crate::journal::SurvivingMemory;
use crate::memory::Memory;
use crate::outcome::Outcome;
use crate::qos::DiskQos;
use crate::sizing::Live;
use crate::stats::{CacheState, DiskStats};
use crate::units::{CommandId, Instant};
use crate::vscsi::Histograms;

pub(super) struct Disk {
    pub(super) config: DiskConfig,
    pub(super) ownership: Ownership,
    /// Shares, reservations and limits of the disk.
    pub(super) qos: DiskQos,
    pub(super) cache: Option<Cache>,
    /// Memory tier above the cache.
    pub(super) memory: Option<Box<Memory>>,
    /// Dirty bitmaps: records of changed parts of the disk, for incremental backups. `None` if the
    /// disk has none.
    #[expect(
        clippy::box_collection,
        reason = "nearly all disks have no bitmap, and every request reads this structure"
    )]
    pub(super) bitmaps: Option<Box<Vec<Bitmap>>>,
    /// True if hob has already tried to flush the backing before the removal of the disk.
    pub(super) flushed_before_removal: bool,
    pub(super) merger: Merger,
    /// Size of a full stripe of the backing, bytes; 0 if it is unknown.
    pub(super) stripe_bytes: u32,
    /// True if the disk has no cache any more because the last device of its cache was fenced.
    pub(super) fenced: bool,
    /// True while an I/O on a device of the cache exceeds its time limit.
    pub(super) stalled: bool,
    /// Changes of the cache that wait for the end of flash I/O, each with its command. A change
    /// caused by a fence has no command.
    pub(super) changes: VecDeque<(Option<CommandId>, CacheChange)>,
    /// The command in progress that removes the disk.
    pub(super) removing: Option<CommandId>,
    /// Number of the disk's requests in flight, including those that still fill flash.
    pub(super) in_flight: u32,
    pub(super) flash_in_flight: u32,
    /// Number of the requests' I/Os in flight on the backing.
    pub(super) backing_in_flight: u32,
    /// Number of jobs in progress, without those that wait for a range lock.
    pub(super) jobs: u32,
    /// Number of jobs in progress that need no range lock.
    pub(super) jobs_at_once: u32,
    /// Number of extra fills in progress.
    pub(super) extra_fills: u32,
    pub(super) backing_read_time: ReadTime,
    /// True if the cache of a parent's disk served some of the last read of the backing
    /// (`shared.rs`).
    pub(super) is_reading_shared: bool,
    /// The journal of a persistent cache.
    pub(super) journal: Option<Box<Journal>>,
    pub(super) journal_in_flight: u32,
    /// The structural change of the cache that is in progress. Its field `old` has the cache before
    /// the change.
    pub(super) opening: Option<Box<Opening>>,
    /// A cache that is being recovered.
    pub(super) recovering: Option<Box<RecoveringCache>>,
    pub(super) destager: Destager,
    pub(super) bulk: BulkWrites,
    pub(super) maintenance: Maintenance,
    pub(super) verify: Verify,
    /// The command in progress that drains the cache.
    pub(super) draining: Option<CommandId>,
    /// The command in progress that vacates segments of the cache.
    pub(super) vacating: Option<Vacating>,
    /// True if requests wait until the change of a persistent cache is complete. The waiting
    /// requests are in `held`.
    pub(super) holds: bool,
    pub(super) held: Vec<u32>,
    /// Requests that wait because the journal is lost.
    pub(super) awaiting_journal: AwaitingJournal,
    /// Dirty sectors of the cache that flash did not deliver.
    pub(super) lost: BTreeSet<u64>,
    /// Number of guests' writes in flight to flash.
    pub(super) flash_writes: u32,
    /// True if a guest's write in flight to flash may create only one copy, because the write began
    /// before the cache's setting changed to two copies.
    pub(super) has_old_single_writes: bool,
    /// Number of acknowledged discards that the backing does not have yet.
    pub(super) answered_discards: u32,
    /// Number of incomplete sectors that the flash writes in progress will create.
    pub(super) parts_in_flight: u32,
    pub(super) backed: Backed,
    pub(super) sync_order: SyncOrder,
    /// Zones with a write to the backing in flight, or with written data that is perhaps not
    /// durable on the backing. The fields are the number of I/Os in flight, the value of
    /// `Backed::writes` at the end of the zone's last I/O, and the time of that end.
    pub(super) zones: BTreeMap<usize, (u32, u64, Instant)>,
    pub(super) zones_due: Option<Instant>,
    /// Memory of the crash log, if the daemon has given any.
    pub(super) surviving: Option<Box<dyn SurvivingMemory>>,
    /// Requests that cover a dirty sector partly, and wait for a buffer to destage this sector.
    pub(super) edge_waiters: Vec<u32>,
    /// True if the cache was closed and accepts no more requests.
    pub(super) closed: bool,
    /// True if the disk is queued for a check by its journal and destager.
    pub(super) awake: bool,
    /// Counts of the cache's flash writes, and the cache's part of the pool's flash write budget.
    pub(super) flash_budget: CacheBudget,
    /// Number of answered requests that may have changed the disk's content.
    pub(super) content_changes: u64,
    pub(super) stats: DiskStats,
    pub(super) stats_since: Instant,
    pub(super) histograms: Box<Histograms>,
    pub(super) sizing: Box<Live>,
}

impl Disk {
    pub(super) fn new(config: DiskConfig, now: Instant) -> Self {
        Disk {
            config,
            ownership: Ownership::default(),
            qos: DiskQos::default(),
            cache: None,
            memory: None,
            bitmaps: None,
            flushed_before_removal: false,
            merger: Merger::default(),
            stripe_bytes: 0,
            fenced: false,
            stalled: false,
            changes: VecDeque::new(),
            removing: None,
            in_flight: 0,
            flash_in_flight: 0,
            backing_in_flight: 0,
            jobs: 0,
            jobs_at_once: 0,
            extra_fills: 0,
            backing_read_time: ReadTime::default(),
            is_reading_shared: false,
            journal: None,
            journal_in_flight: 0,
            opening: None,
            recovering: None,
            destager: Destager::default(),
            bulk: BulkWrites::default(),
            maintenance: Maintenance::default(),
            verify: Verify::default(),
            draining: None,
            vacating: None,
            holds: false,
            held: Vec::new(),
            awaiting_journal: AwaitingJournal::default(),
            lost: BTreeSet::new(),
            flash_writes: 0,
            has_old_single_writes: false,
            answered_discards: 0,
            parts_in_flight: 0,
            backed: Backed::new(config.size_bytes),
            sync_order: SyncOrder::default(),
            zones: BTreeMap::new(),
            surviving: None,
            zones_due: None,
            edge_waiters: Vec::new(),
            closed: false,
            awake: false,
            flash_budget: CacheBudget::default(),
            content_changes: 0,
            stats: DiskStats::new(),
            stats_since: now,
            histograms: Box::new(Histograms::new(now)),
            sizing: Box::new(Live::new(now)),
        }
    }

    /// Returns the journal and the index that its records describe.
    pub(super) fn journal_and_index(&mut self) -> Option<(&mut Journal, &mut Index)> {
        let index = &mut self.cache.as_mut()?.index;
        Some((self.journal.as_deref_mut()?, index))
    }

    /// Returns the time at which the engine must work next on the disk's persistent cache: its
    /// journal, destager or maintenance. Returns `None` if nothing is planned.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let journal = self.journal.as_ref()?;
        let lost_at = journal.lost_at().filter(|_| !self.awaiting_journal.is_empty());
        let given_up = lost_at.map(|at| at + WAIT_NS_MAX);
        if self.holds {
            let closes = self.removing.is_some() && self.opening.is_some();
            let flush_again = self.destager.rest_until.filter(|_| closes);
            let insists = self.vacating.as_ref().and_then(Vacating::deadline);
            let waits = given_up.into_iter().chain(flush_again).chain(insists);
            return journal.deadline().into_iter().chain(waits).min();
        }
        let maintenance = if journal.dead { None } else { self.maintenance.deadline() };
        let verify = if journal.dead { None } else { self.verify.deadline() };
        let journal = journal.deadline().into_iter();
        journal
            .chain(self.destage_deadline())
            .chain(self.zones_due)
            .chain(maintenance)
            .chain(verify)
            .chain(given_up)
            .min()
    }

    /// Returns the cache if flash I/O may be started now, or the reason why not.
    #[inline]
    pub(super) fn serving(&mut self) -> Result<&mut Cache, Outcome> {
        self.looked_up()?;
        Ok(self.cache.as_mut().expect("`looked_up` found the cache"))
    }

    /// Returns the cache for lookups if flash I/O may be started now, or the reason why not.
    #[inline]
    pub(super) fn looked_up(&self) -> Result<&Cache, Outcome> {
        match &self.cache {
            _ if self.recovering.is_some() => Err(Outcome::BypassRecovering),
            _ if self.opening.is_some() || !self.changes.is_empty() => Err(Outcome::BypassChanging),
            Some(_) if self.stalled => Err(Outcome::BypassStalled),
            Some(cache) => Ok(cache),
            None if self.fenced => Err(Outcome::BypassFenced),
            None => Err(Outcome::CacheOff),
        }
    }

    /// Returns true if the backing certainly has all acknowledged data.
    pub(super) fn backing_has_all(&self) -> bool {
        let is_settled = self.recovering.is_none() && self.opening.is_none() && self.changes.is_empty();
        let is_clean = self.cache.as_ref().is_none_or(|cache| cache.index.dirty_sectors() == 0);
        is_settled && is_clean && self.lost.is_empty()
    }

    /// Counts an answered request.
    pub(super) fn record(&mut self, now: Instant, arrived: Instant, request: &Request, outcome: Outcome) {
        if request.op.is_own() {
            return;
        }
        let at = Instant(now - self.stats_since);
        self.stats.record(at, request, outcome, now - arrived);
    }

    /// Counts the blocks that one request evicted.
    pub(super) fn record_eviction(&mut self, now: Instant, blocks: u64) {
        let evictions = &mut self.stats.evictions;
        evictions.operations += 1;
        evictions.blocks += blocks;
        evictions.last_blocks = blocks;
        evictions.last_operation_ns = now - self.stats_since;
    }

    /// Returns true if a peer has a second copy of all dirty data, and the journal that describes
    /// this data.
    fn is_doubled(&self, cache: &Cache) -> bool {
        let whole =
            |journal: &Journal| !journal.dead && journal.spared.is_empty() && !journal.lost.contains(&true);
        let mirrored = self.journal.as_deref().is_some_and(|it| it.ring.copies.len() > 1 && whole(it));
        let is_settled = self.recovering.is_none() && self.opening.is_none() && self.changes.is_empty();
        cache.config.copies == Copies::Peer
            && cache.second_sectors() > 0
            && mirrored
            && is_settled
            && self.lost.is_empty()
            && self.maintenance.is_doubled()
    }

    pub(super) fn snapshot(&self, now: Instant) -> DiskStats {
        let mut stats = self.stats.clone();
        stats.elapsed_ns = now - self.stats_since;
        stats.in_flight = u64::from(self.in_flight);
        stats.sectors_lost = self.lost.len() as u64;
        stats.draining = self.draining.is_some();
        (stats.flash_counts, stats.flash_allowance) = self.flash_counts();
        if let Some(cache) = &self.cache {
            stats.blocks = u64::from(cache.index.frames());
            stats.blocks_cached = cache.index.blocks_holding_data();
            stats.sectors_valid = cache.index.sectors_valid();
            stats.sectors_dirty = cache.index.dirty_sectors();
            stats.destage_failing = stats.sectors_dirty > 0 && self.destager.is_failing();
            let comes_back = self.journal.as_ref().is_some_and(|journal| self.verify.may_come_back(journal));
            stats.sectors_unverified = cache.index.unverified_sectors() + u64::from(comes_back);
            stats.sectors_to_verify = self.verify.total(stats.sectors_unverified);
            stats.doubled = self.is_doubled(cache);
            stats.mode = self.mode_in_effect().unwrap_or(cache.config.mode);
            let journal = self.journal.as_ref().map_or(0, |journal| journal.writer.bytes());
            stats.index_bytes = cache.bytes() + self.destager.bytes() + journal;
            stats.choice = cache.choice();
        }
        if let Some(memory) = &self.memory {
            stats.memory_bytes = memory.area_bytes();
            stats.memory_held_bytes = memory.held_bytes();
            stats.memory_index_bytes = memory.index_bytes();
        }
        stats.cache = match &self.cache {
            _ if self.recovering.is_some() => CacheState::Recovering,
            _ if self.holds || self.opening.is_some() || !self.changes.is_empty() => CacheState::Changing,
            Some(_) if self.stalled => CacheState::Stalled,
            Some(_) => CacheState::Active,
            None if self.fenced => CacheState::Fenced,
            None => CacheState::None,
        };
        stats
    }
}
