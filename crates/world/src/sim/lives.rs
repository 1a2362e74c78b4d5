//! Ends a simulated engine process ("life") and starts the next one.
//!
//! Devices, backings, the pool's segment table and the model survive a crash of the engine process.
//! Requests, commands and the engine's state are lost. A life ends at a random time, for example
//! during recovery, a command, a drain or destaging.

use hob_engine::Engine;
use hob_engine::command::{CacheChange, Command};
use hob_engine::io::{Io, IoOp};
use hob_engine::units::{BufferId, DiskId, IoId, SECTOR_BYTES};

use super::scenario::End;
use super::{Event, Sabotage, Simulation, trace};
use crate::Violation;
use crate::content::{self, Tag, UNIT_BYTES};
use crate::ensure;
use crate::media::Crash;
use crate::model::Loss;
use crate::rng::SimRng;

/// Maximum time that a stopping daemon waits for its caches to close, nanoseconds.
const STOP_NS_MAX: u64 = 120_000_000_000;

/// Number that is combined with the virtual time, to seed separate random numbers for flushes at
/// the start of a life.
const START_SALT: u64 = 0x7374_6172_7473;

/// A daemon buffer that the engine uses for its own I/O.
#[derive(Debug)]
pub(super) struct Lent {
    pub(super) tags: Vec<Tag>,
    /// I/Os in flight on the engine's buffer: id, range of 512-byte units, and true if the I/O
    /// fills the buffer.
    pub(super) ios: Vec<(IoId, std::ops::Range<usize>, bool)>,
}

impl Simulation<'_> {
    /// Gives the engine all of the daemon's buffers for destaging and metadata.
    pub(super) fn lend_buffers(&mut self) {
        let Some(lives) = &self.scenario.lives else { return };
        let lent = lives.lent.clone();
        // The engine keeps sectors that guests wrote in part in a separate buffer. If this buffer
        // has few sectors, the engine is likely to evict some. Some histories have no such buffer.
        let edge_sectors = [0, 3, 16][lent.len() / 2 % 3];
        for bytes in lent {
            self.lend(bytes);
        }
        self.edge_buffer = (edge_sectors > 0).then(|| {
            let bytes = edge_sectors * SECTOR_BYTES as u32;
            let id = self.make_lent(bytes);
            self.engine.lend_for_edges(id, bytes);
            id
        });
    }

    pub(super) fn lend(&mut self, bytes: u32) {
        let id = self.make_lent(bytes);
        self.engine.lend(id, bytes);
    }

    fn make_lent(&mut self, bytes: u32) -> BufferId {
        let id = BufferId(u32::MAX - self.lent.len() as u32);
        let tags = vec![content::garbage(u64::from(id.0)); (u64::from(bytes) / UNIT_BYTES) as usize];
        self.lent.insert(id, Lent { tags, ios: vec![] });
        id
    }

    /// Sets the number of guest requests for the present engine process, and the time at which the
    /// process ends.
    pub(super) fn begin_life(&mut self) {
        let Some(lives) = &mut self.scenario.lives else { return };
        self.left = lives.requests;
        if let Some((after, end)) = lives.ends.pop() {
            self.queue.push(self.now + after, Event::End(end));
        }
        (0..self.scenario.guests.len()).for_each(|guest| self.schedule_guest(guest, self.now));
        self.schedule_command();
        self.schedule_restart();
    }

    pub(super) fn end(&mut self, end: End) -> Result<(), Violation> {
        if end != End::Stop {
            return self.next_life(end);
        }
        self.stopping = true;
        self.queue.push(self.now + STOP_NS_MAX, Event::End(End::Kill));
        for disk in 0..self.disks.len() {
            let state = &self.disks[disk];
            if state.present && state.owner.is_some() {
                let remove = self.rng.chance(300);
                let close = Command::Cache(CacheChange::Close);
                self.command(disk, if remove { Command::RemoveDisk } else { close });
            }
        }
        Ok(())
    }

    /// In histories in which a power cut follows each kill, sometimes kills the process after it
    /// has written a journal page and before the page is flushed. If there is less dirty data than
    /// when the preceding page was written, the page probably records that destaged data is clean.
    pub(super) fn maybe_kill_after_page(&mut self, io: &Io) {
        if !self.options.cuts_in_recovery || io.op != IoOp::WriteJournal {
            return;
        }
        let stats = |disk: usize| self.engine.stats(self.now, DiskId(disk as u32));
        let dirty: u64 = (0..self.disks.len()).filter_map(stats).map(|stats| stats.sectors_dirty).sum();
        let has_clean_records = dirty < std::mem::replace(&mut self.dirty_at_page, dirty);
        let ended = self.report.kills + self.report.power_cuts;
        let is_cut_next = self.scenario.lives.as_ref().is_some_and(|lives| !lives.ends.is_empty());
        let chance = if has_clean_records { 300 } else { 10 };
        if is_cut_next && ended.is_multiple_of(2) && self.rng.chance(chance) {
            self.queue.push(self.now, Event::End(End::Kill));
        }
    }

    /// Returns true if the stopping daemon has closed all its disks and caches.
    pub(super) fn has_stopped(&self) -> bool {
        let closes =
            |command: &Command| matches!(command, Command::Cache(CacheChange::Close) | Command::RemoveDisk);
        self.stopping && !self.asked.values().any(|asked| closes(&asked.command))
    }

    /// Ends the engine process by a kill, power cut or stop (`end`), starts another process, and
    /// opens the disks.
    pub(super) fn next_life(&mut self, end: End) -> Result<(), Violation> {
        self.crash(end)?;
        if let Some(lives) = &mut self.scenario.lives {
            lives.power_fails = lives.ends.iter().any(|(_, end)| *end == End::PowerCut);
        }
        self.flush_flash_at_start();
        self.engine = Engine::new(self.scenario.limits);
        self.lend_buffers();
        self.begin_with_qos();
        for disk in 0..self.disks.len() {
            if self.rng.chance(950) {
                self.open_disk(disk)?;
            }
        }
        self.begin_life();
        self.begin_with_memory()
    }

    /// Flushes flash before its journals are read, as the daemon does: a power cut after the flush
    /// must not undo writes that a recovery has found. The daemon continues if a flush fails.
    fn flush_flash_at_start(&mut self) {
        if self.options.sabotage == Some(Sabotage::UnflushedRecovery) {
            return;
        }
        // These random numbers are separate, so other decisions of the history do not depend on them.
        let mut rng = SimRng::new(self.now.0 ^ START_SALT);
        self.is_flash_flushed = true;
        for flash in &mut self.flash {
            self.is_flash_flushed &= flash.flush_at_start(&mut rng);
        }
    }

    pub(super) fn crash(&mut self, end: End) -> Result<(), Violation> {
        self.settle_budget();
        let kind = if end == End::PowerCut { Crash::PowerCut } else { Crash::Kill };
        trace!(self, "the end of a life: {end:?}");
        // The daemon may have checked the backing just before the crash.
        self.maybe_record_evidence();
        self.count_crash(end);
        self.end_outages();
        for (flash, plan) in self.flash.iter_mut().zip(&self.scenario.devices) {
            flash.crash(kind, &mut self.rng);
            if plan.returns && flash.is_dead() {
                flash.return_as_it_was();
                self.report.devices_returned += 1;
            }
        }
        for disk in 0..self.disks.len() {
            self.crash_disk(disk, end, kind)?;
        }
        let asked = std::mem::take(&mut self.asked);
        for asked in asked.values().filter(|asked| asked.ring().is_none() && !asked.recovers()) {
            // Segments for a volatile cache become free. Segments of a persistent cache are in the
            // pool's table.
            let owner = &self.disks[asked.disk].owner;
            let owned: Vec<_> = owner.iter().flat_map(|owner| owner.data.values()).collect();
            let free: Vec<_> =
                asked.segments().into_iter().filter(|segment| !owned.contains(&segment)).collect();
            self.free.extend(free);
        }
        self.requests.clear();
        if let Some(direct) = &mut self.direct {
            direct.crash();
        }
        self.buffers.clear();
        self.spare.clear();
        self.lent.clear();
        self.ios.clear();
        self.late_failures.clear();
        if let Some(clones) = &mut self.clones {
            clones.crash();
        }
        self.fenced.clear();
        self.stopping = false;
        self.queue.retain(|event| matches!(event, Event::DeviceFailure(_) | Event::Refusal(_)));
        self.forget_restarts();
        for guest in &mut self.scenario.guests {
            (guest.in_flight, guest.is_due, guest.handed_back) = (0, false, 0);
        }
        Ok(())
    }

    fn count_crash(&mut self, end: End) {
        let report = &mut self.report;
        *match end {
            End::PowerCut => &mut report.power_cuts,
            End::Kill => &mut report.kills,
            End::Stop => &mut report.stops,
        } += 1;
        let changes = |asked: &&super::pool::Asked| asked.ring().is_some();
        report.crashes_in_recovery += self.asked.values().filter(|asked| asked.recovers()).count() as u64;
        report.crashes_in_change += self.asked.values().filter(changes).count() as u64;
        let grows =
            |asked: &&super::pool::Asked| matches!(asked.command, Command::Cache(CacheChange::GrowDisk(..)));
        report.crashes_in_growth += self.asked.values().filter(grows).count() as u64;
        let drains =
            |asked: &&super::pool::Asked| matches!(asked.command, Command::Cache(CacheChange::Drain));
        report.crashes_in_drain += self.asked.values().filter(drains).count() as u64;
        for (_, stats) in self.all_stats() {
            self.report.evictions += stats.evictions.blocks;
            self.report.destaged_bytes += stats.destaged_bytes;
            self.report.read_ahead_bytes += stats.read_ahead_bytes;
            self.report.extra_read_bytes += stats.extra_read_bytes;
            self.report.extra_blocks_used += stats.extra_blocks_used;
            self.report.writes_merged += stats.writes_merged;
            self.report.bulk_writes += stats.bulk_writes;
        }
    }

    fn crash_disk(&mut self, index: usize, end: End, kind: Crash) -> Result<(), Violation> {
        self.bitmaps_are_lost(index);
        self.forget_extra_reads(index);
        self.disks[index].backing.crash(kind, &mut self.rng);
        if self.backings_in_memory && kind == Crash::Kill {
            self.lose_memory(index, end);
        }
        let disk = &mut self.disks[index];
        let lags = disk.model.lags();
        if kind == Crash::PowerCut && !lags {
            disk.model.check_power_cut(disk.backing.now())?;
        }
        let closed = disk.owner.as_ref().is_some_and(|owner| owner.closed);
        let is_logged = disk.crash_log.as_mut().is_some_and(|log| log.crash(end));
        let loss = match end {
            End::PowerCut => Loss::Unflushed,
            End::Kill | End::Stop if lags && !closed && !is_logged => Loss::Unrecorded,
            End::Kill | End::Stop => Loss::Nothing,
        };
        disk.model.crash(loss);
        (disk.present, disk.leaving, disk.gated) = (false, false, false);
        disk.recovering = None;
        disk.lost_ring = false;
        disk.replaces_copy = false;
        disk.config = None;
        disk.writes_through_since = None;
        disk.fetches.clear();
        disk.memory.clear();
        let segments = std::mem::take(&mut disk.segments);
        if disk.owner.as_ref().is_some_and(|owner| owner.gone) {
            self.disown(index);
        }
        match &self.disks[index].owner {
            Some(owner) => {
                let known = segments.iter().all(|segment| owner.data.values().any(|place| place == segment));
                ensure!(known, "disk {index}: the pool's table does not have all its segments");
            }
            None => self.free.extend(segments),
        }
        Ok(())
    }

    /// Models the end of a process whose memory has unflushed data of a backing. A daemon that
    /// stops flushes this data. A kill loses a random part of this data. But if the engine reports
    /// that the data includes acknowledged writes, the data survives, because the simulation has no
    /// daemon that would report the loss to guests.
    fn lose_memory(&mut self, index: usize, end: End) {
        let disk = &mut self.disks[index];
        let at_risk = self.engine.guests_at_risk(DiskId(index as u32)).is_some_and(|guests| guests > 0);
        let is_killed = disk.present && end == End::Kill;
        if is_killed && (!at_risk || self.options.sabotage == Some(Sabotage::UnmarkedMemory)) {
            // These random numbers are separate, so other decisions of the history do not depend on them.
            disk.backing.lose(&mut SimRng::new(self.now.0 ^ index as u64));
        }
        disk.backing.shut_down();
    }

    /// Adds a disk to the engine, with its earlier cache if this cache is persistent.
    pub(super) fn open_disk(&mut self, disk: usize) -> Result<(), Violation> {
        self.add_disk(disk);
        self.drop_void_rings(disk);
        self.observe_opening(disk);
        if self.disks[disk].owner.is_none() {
            if self.disks[disk].gated {
                // A later command discarded the cache for whose recovery the guests waited.
                self.open_gate(disk);
            }
            return self.change_behind_bare(disk);
        }
        if self.expect_cache(disk) { Ok(()) } else { self.recover(disk, 0) }
    }
}
