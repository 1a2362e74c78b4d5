//! Simulates the daemon's pool management, which assigns segments to caches and handles the results
//! of commands.

use std::collections::BTreeSet;

use hob_engine::command::{
    CacheChange, CacheConfig, Command, CommandError, Copies, Event, Layout, Mode, Segment,
};
use hob_engine::units::DeviceId;

use super::owner::Owner;
use super::{Simulation, trace};
use crate::content::UNIT_BYTES;
use crate::{Violation, ensure};

/// Offset of the first segment on a device, bytes. No cache uses the bytes before it.
pub(super) const SEGMENTS_START: u64 = 8192;

/// A command in progress.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) disk: usize,
    /// Value of `Simulation::clock` when the daemon sent the command.
    pub(super) given: u64,
    pub(super) command: Command,
}

impl Asked {
    /// Returns true if the command changes the cache of this disk.
    pub(super) fn changes_cache_of(&self, disk: usize) -> bool {
        self.disk == disk && matches!(self.command, Command::Cache(_))
    }

    /// Returns the segments that the requested command adds to the cache if it succeeds.
    pub(super) fn segments(&self) -> Vec<Segment> {
        let data = match &self.command {
            Command::Cache(CacheChange::Enable(enable)) => &enable.segments,
            Command::Cache(CacheChange::Grow(segments, _) | CacheChange::Leave(_, segments, _)) => segments,
            _ => return Vec::new(),
        };
        data.iter().map(|segment| segment.place).collect()
    }

    /// Returns the number of the command's new journal ring; `None` if the command has none.
    pub(super) fn ring(&self) -> Option<u32> {
        let Command::Cache(change) = &self.command else { return None };
        change.ring().map(|ring| ring.number)
    }

    /// Returns true if the command creates a volatile cache.
    fn is_volatile(&self) -> bool {
        matches!(&self.command, Command::Cache(CacheChange::Enable(enable)) if enable.journal.is_none())
    }

    /// Returns true if the command creates a journal ring or a cache with only one copy.
    fn has_one_copy(&self) -> bool {
        let Command::Cache(change) = &self.command else { return false };
        change.ring().is_some_and(|ring| ring.copies.len() < 2)
            || self.config().is_some_and(|config| config.copies == Copies::One)
    }

    /// Returns true if the command opens an existing cache.
    pub(super) fn recovers(&self) -> bool {
        matches!(&self.command, Command::Cache(CacheChange::Enable(enable)) if enable.recovered.is_some())
    }

    fn config(&self) -> Option<CacheConfig> {
        match &self.command {
            Command::Cache(CacheChange::Enable(enable)) => Some(enable.config),
            Command::Cache(CacheChange::Configure(config, _)) => Some(*config),
            _ => None,
        }
    }
}

impl Simulation<'_> {
    /// Handles an event of the engine.
    pub(super) fn event(&mut self, event: Event) -> Result<(), Violation> {
        trace!(self, "{event:?}");
        if matches!(event, Event::Stalled(_) | Event::Resumed(_)) {
            let clock = self.clock;
            self.disks.iter_mut().for_each(|disk| disk.changed = clock);
        }
        match event {
            Event::Done { command, disk, result } => {
                let asked = self.asked.remove(&command);
                let asked = asked.ok_or_else(|| Violation(format!("command {command} ended twice")))?;
                ensure!(asked.disk == disk.0 as usize, "command {command} ended for disk {disk}");
                self.report.commands += 1;
                if self.scenario.lives.is_some() {
                    self.ended.insert(command, result.as_ref().map(|_| ()).map_err(|error| *error));
                }
                self.done(&asked, result)
            }
            Event::Fenced { device, errors } => {
                ensure!(
                    errors >= self.scenario.limits.flash_errors_max,
                    "{device} was fenced after only {errors} errors"
                );
                ensure!(self.fenced.insert(device), "{device} fenced twice");
                self.report.fences += 1;
                Ok(())
            }
            Event::Lost { disk, segments } => {
                let fenced = segments.iter().all(|segment| self.fenced.contains(&segment.device));
                ensure!(
                    fenced && !segments.is_empty(),
                    "the cache lost {segments:?}, although their devices work"
                );
                self.report.losses += 1;
                self.released(disk.0 as usize, &segments)
            }
            // The modelled guests keep their sessions.
            Event::FailuresOwed { .. } => Ok(()),
            Event::Stalled(_) => {
                self.report.stalls += 1;
                Ok(())
            }
            Event::Resumed(_) => {
                self.report.resumptions += 1;
                Ok(())
            }
            Event::DirtyLost { disk, sectors } => {
                let index = disk.0 as usize;
                ensure!(self.may_lose(index) || sectors == 0, "disk {disk} lost {sectors} dirty sectors");
                self.disks[index].dirty_lost = true;
                self.report.dirty_lost += 1;
                Ok(())
            }
            Event::Bitmaps { disk, bitmaps } => self.bitmaps_are_left(disk.0 as usize, bitmaps),
            Event::WritesInDoubt(_) => {
                self.report.doubts += 1;
                Ok(())
            }
            Event::ChangeWaits(disk) => {
                self.change_waits(disk.0 as usize);
                Ok(())
            }
            Event::DiscardUnrecorded(disk, ring) => {
                self.discard_is_unrecorded(disk.0 as usize, ring);
                Ok(())
            }
            Event::JournalCopyLost(disk) => {
                self.journal_copy_is_lost(disk);
                Ok(())
            }
            Event::JournalLost(disk) => {
                let excused = self.may_lose(disk.0 as usize) || self.any_refuses();
                ensure!(excused, "disk {disk}: the journal was lost, although a device works");
                self.report.journals_lost += 1;
                if let Some(injection) = &mut self.injection {
                    injection.lost_journals += 1;
                    return Ok(());
                }
                self.journal_is_lost(disk.0 as usize);
                Ok(())
            }
        }
    }

    pub(super) fn any_bad(&self) -> bool {
        self.scenario.devices.iter().any(super::scenario::DevicePlan::is_bad)
    }

    /// Returns true if a device refuses writes, may fail flushes, or has failed a flush.
    pub(super) fn any_refuses(&self) -> bool {
        let refuses = |plan: &super::scenario::DevicePlan| plan.refuses || plan.faults.flush_error > 0;
        self.scenario.devices.iter().any(refuses) || self.failed_a_flush()
    }

    fn done(&mut self, asked: &Asked, result: Result<Vec<Segment>, CommandError>) -> Result<(), Violation> {
        let (index, clock) = (asked.disk, self.clock);
        self.disks[index].changed = clock;
        let released = match result {
            Ok(released) => released,
            Err(error) => {
                self.refusal(asked, error)?;
                return self.failed(asked);
            }
        };
        let disk = &mut self.disks[index];
        disk.segments.extend(asked.segments());
        disk.config = asked.config().or(disk.config);
        if let Some(owner) = &mut disk.owner {
            owner.config = asked.config().unwrap_or(owner.config);
            owner.doubled &= !asked.has_one_copy();
        }
        self.succeeded(asked)?;
        self.released(index, &released)?;
        let disk = &mut self.disks[index];
        if matches!(asked.command, Command::RemoveDisk) && disk.owner.is_some() {
            ensure!(released.is_empty(), "the removal of disk {index} releases {released:?} of its cache");
            (disk.segments, disk.config) = (BTreeSet::new(), None);
        }
        let ended = matches!(asked.command, Command::Cache(CacheChange::Disable) | Command::RemoveDisk);
        ensure!(!ended || disk.segments.is_empty(), "disk {index} keeps {:?}", disk.segments);
        if let Command::Cache(CacheChange::Shrink(count, _)) = asked.command {
            let data = released.len() - self.ring_segments_released;
            ensure!(data == count as usize, "the cache was shrunk by {data} segments, not by {count}");
        }
        self.new_ring_is_done(asked)
    }

    /// Updates the pool, the disk and the model after a successful command, as the daemon does.
    fn succeeded(&mut self, asked: &Asked) -> Result<(), Violation> {
        let has_outages = self.has_outages();
        let of_disk = self.asked.values().filter(|other| other.disk == asked.disk);
        let pending: Vec<u32> = of_disk.filter_map(Asked::ring).collect();
        let awaits_cache = self.awaits_cache(asked.disk);
        if let Command::Cache(CacheChange::Vacate(which)) = asked.command {
            self.is_vacated(asked.disk, which);
        }
        let backing_is_exact = {
            let disk = &mut self.disks[asked.disk];
            match &asked.command {
                Command::RemoveDisk => {
                    // The removal ended all sessions of the disk's guests.
                    disk.model.end_sessions();
                    disk.leaving = false;
                    disk.memory.clear();
                    if self.backings_in_memory {
                        // The daemon stores what is in its memory when it closes the backing.
                        disk.backing.shut_down();
                    }
                    if disk.config.is_some()
                        && let Some(owner) = &mut disk.owner
                    {
                        owner.close(&pending);
                        owner.left_unclean = disk.backing.may_refuse_flushes() || has_outages;
                        self.record_evidence_at_end(asked.disk);
                    }
                    false
                }
                Command::Cache(CacheChange::Tune(mode, destage, copies)) => {
                    let configs =
                        disk.config.iter_mut().chain(disk.owner.iter_mut().map(|owner| &mut owner.config));
                    for config in configs {
                        (config.mode, config.destage, config.copies) = (*mode, *destage, *copies);
                    }
                    disk.writes_through_since = (*mode != Mode::WriteBack).then_some(self.clock);
                    false
                }
                Command::Cache(CacheChange::Replace(policy, admission)) => {
                    let configs =
                        disk.config.iter_mut().chain(disk.owner.iter_mut().map(|owner| &mut owner.config));
                    for config in configs {
                        (config.policy, config.admission) = (*policy, *admission);
                    }
                    false
                }
                Command::Cache(CacheChange::Fill(fill)) => {
                    let configs =
                        disk.config.iter_mut().chain(disk.owner.iter_mut().map(|owner| &mut owner.config));
                    configs.for_each(|config| config.fill = *fill);
                    false
                }
                Command::Cache(CacheChange::Enable(_) | CacheChange::Configure(..)) => {
                    let config = asked.config().expect("the command has a configuration");
                    if let Some(owner) = disk.owner.as_mut().filter(|_| asked.is_volatile() && !awaits_cache)
                    {
                        // The command replaced a cache that was never completed.
                        owner.gone = true;
                    }
                    disk.writes_through_since = (config.mode != Mode::WriteBack).then_some(self.clock);
                    false
                }
                Command::Cache(CacheChange::Close) => {
                    disk.owner.iter_mut().for_each(|owner| owner.close(&pending));
                    self.record_evidence(asked.disk);
                    false
                }
                Command::Cache(CacheChange::Drain) => {
                    self.report.drains += 1;
                    // A drain waits for writes that were accepted before the mode changed.
                    disk.writes_through_since.is_some_and(|since| since < asked.given)
                }
                Command::Cache(CacheChange::Disable) => true,
                Command::Cache(CacheChange::GrowDisk(size_bytes, _)) => {
                    self.disk_has_size(asked.disk, size_bytes / UNIT_BYTES);
                    self.tracked_disk_has_grown(asked.disk)?;
                    false
                }
                _ => false,
            }
        };
        match &asked.command {
            Command::Cache(CacheChange::DiscardDirty(_)) => self.forget(asked.disk),
            Command::Memory(config) => self.memory_changed(asked.disk, *config),
            Command::Bitmap(change) => self.bitmaps_changed(asked.disk, change)?,
            _ => {}
        }
        if backing_is_exact {
            self.disks[asked.disk].model.set_lags(false);
        }
        if asked.recovers() {
            let disk = &mut self.disks[asked.disk];
            if std::mem::take(&mut disk.gives_up) {
                disk.model.pin(disk.backing.now());
            }
            self.open_gate(asked.disk);
        }
        Ok(())
    }

    /// Handles the end of a successful command. If the command gave the cache a new journal ring,
    /// the whole journal is in this ring on flash, so the segments of earlier rings become free.
    fn new_ring_is_done(&mut self, asked: &Asked) -> Result<(), Violation> {
        self.disown_gone(asked.disk);
        let Some(number) = asked.ring() else { return Ok(()) };
        let (keeps_old, is_destaged) = (self.keeps_old_rings(), self.is_destaged(asked.disk));
        let Some(owner) = self.disks[asked.disk].owner.as_mut().filter(|owner| !owner.gone) else {
            return Ok(());
        };
        (owner.exists, owner.closed) = (true, false);
        owner.note_new_ring(number);
        owner.has_volatile_copies &= !is_destaged;
        self.disks[asked.disk].changed_behind = None;
        self.disks[asked.disk].lost_ring = false;
        let Some(owner) = &mut self.disks[asked.disk].owner else { return Ok(()) };
        let older: Vec<u32> = owner.rings.keys().copied().filter(|other| *other < number).collect();
        let kept: usize = older.iter().flat_map(|other| &owner.rings[other]).map(Vec::len).sum();
        ensure!(
            asked.recovers() || kept == 0 || keeps_old,
            "ring {number} is complete, but {kept} segments of older rings {older:?} are not released"
        );
        if !keeps_old {
            let gone = owner.drop_rings(|other| other < number);
            self.free.extend(gone);
        }
        Ok(())
    }

    /// Handles a failed command. The segments that the command was to add to the cache become free.
    fn failed(&mut self, asked: &Asked) -> Result<(), Violation> {
        if asked.recovers() {
            return self.recovery_failed(asked);
        }
        let index = asked.disk;
        let brought = asked.segments();
        if let Some(owner) = &mut self.disks[index].owner {
            owner.data.retain(|_, place| !brought.contains(place));
            if let Some(number) = asked.ring() {
                self.free.extend(owner.drop_rings(|other| other == number));
            }
        }
        let pending = self.brings_ring(index);
        let disk = &mut self.disks[index];
        // The disk may have a volatile cache that an earlier command created meanwhile.
        let is_recovering = disk.recovering.is_some();
        // Later commands with a journal ring cannot create the cache that this command would have
        // created.
        let hopeless = !pending
            || matches!(asked.command, Command::Cache(CacheChange::Enable(_))) && asked.ring().is_some();
        let never_was = |owner: &&mut Owner| !owner.exists && !is_recovering && hopeless;
        if let Some(owner) = disk.owner.as_mut().filter(never_was) {
            owner.gone = true;
        }
        self.free.extend(brought);
        self.disown_gone(index);
        Ok(())
    }

    /// Returns true if a recovered cache is being enabled for this disk.
    pub(super) fn is_being_recovered(&self, index: usize) -> bool {
        self.asked.values().any(|asked| asked.disk == index && asked.recovers())
    }

    /// Returns true if a command with a new journal ring is in progress for this disk.
    pub(super) fn brings_ring(&self, index: usize) -> bool {
        self.asked.values().any(|asked| asked.disk == index && asked.ring().is_some())
    }

    /// Returns true if a command that enables a persistent cache is in progress. The recorded owner
    /// then belongs to this cache and not to an earlier one.
    fn awaits_cache(&self, index: usize) -> bool {
        let mut of_disk = self.asked.values().filter(|asked| asked.disk == index);
        of_disk.any(|asked| {
            matches!(asked.command, Command::Cache(CacheChange::Enable(_))) && asked.ring().is_some()
        })
    }

    /// Frees all segments of a removed cache when the last command with a journal ring for the
    /// cache has ended.
    fn disown_gone(&mut self, index: usize) {
        let pending = self.brings_ring(index);
        let under_way = self.asked.values().filter(|asked| asked.disk == index).flat_map(Asked::segments);
        let under_way: BTreeSet<Segment> = under_way.collect();
        let disk = &mut self.disks[index];
        if let Some(owner) = disk.owner.as_mut().filter(|owner| owner.gone && !pending) {
            // A volatile cache may use some segments of the removed cache.
            owner.data.retain(|_, place| !disk.segments.contains(place) && !under_way.contains(place));
            self.disown(index);
        }
    }

    /// Checks that the engine had a valid reason to fail the command with this error.
    fn refusal(&mut self, asked: &Asked, error: CommandError) -> Result<(), Violation> {
        let disk = &self.disks[asked.disk];
        let persistent = disk.owner.is_some();
        let just = match (error, &asked.command) {
            (CommandError::Removing, _) => disk.leaving,
            (CommandError::NoSuchDisk, _) => !disk.present && !disk.leaving,
            (CommandError::DiskExists, Command::AddDisk(_)) => disk.leaving,
            (CommandError::NoCache, Command::Cache(CacheChange::Leave(device, ..))) => {
                disk.segments.iter().all(|segment| segment.device != *device)
            }
            // Another cache, or no cache, has replaced the cache for which the journal ring was
            // made.
            (CommandError::NoCache, Command::Cache(CacheChange::GrowDisk(_, ring))) => ring.is_some(),
            (CommandError::NoCache, _) => disk.config.is_none(),
            (CommandError::CacheExists, Command::Cache(CacheChange::Enable(..))) => disk.config.is_some(),
            (CommandError::TooSmall, Command::Cache(CacheChange::Shrink(count, _))) => {
                *count as usize >= disk.segments.len()
            }
            (CommandError::TooSmall, Command::Cache(_)) => asked.segments().is_empty(),
            (CommandError::Unworkable, Command::Cache(_)) => {
                let Some(config) = asked.config() else {
                    return Err(Violation(format!("{asked:?} failed with {error:?}")));
                };
                !config.block_bytes.is_power_of_two()
                    || !(4096..=1 << 20).contains(&config.block_bytes)
                    || u64::from(config.block_bytes) > config.segment_bytes
                    || config.layout != Layout::Unified
                    || config.copies != Copies::One
            }
            (CommandError::TooSmall | CommandError::Unworkable, Command::Memory(config)) => {
                config.as_ref().is_some_and(Self::is_senseless)
            }
            (CommandError::Dirty, Command::Cache(_)) => persistent && disk.model.lags(),
            (CommandError::NoJournal, Command::Cache(CacheChange::Enable(enable))) => {
                enable.journal.is_none()
            }
            (CommandError::NoJournal, Command::Cache(_)) => asked.ring().is_none(),
            (CommandError::Shrinks, Command::Cache(CacheChange::GrowDisk(size_bytes, _))) => {
                *size_bytes < disk.size * UNIT_BYTES
            }
            (CommandError::Recovering, Command::Cache(CacheChange::GrowDisk(..))) => {
                disk.recovering.is_some()
            }
            (CommandError::Stopped, Command::Cache(CacheChange::Drain | CacheChange::Vacate(_))) => true,
            (CommandError::Lost, Command::Cache(CacheChange::Drain | CacheChange::Vacate(_))) => {
                self.may_lose(asked.disk)
            }
            (CommandError::BackingFailed, Command::Cache(_)) => {
                persistent && (self.scenario.disks[asked.disk].faults.flush_error > 0 || self.has_outages())
            }
            (CommandError::JournalFailed, Command::Cache(CacheChange::Disable)) => false,
            (CommandError::JournalFailed, _) => persistent && (self.any_bad() || self.any_refuses()),
            _ => false,
        };
        let (cache, segments) = (&disk.config, &disk.segments);
        ensure!(just, "{asked:?} failed with {error:?} on {cache:?} of {segments:?}");
        if matches!(asked.command, Command::AddDisk(_)) {
            self.disks[asked.disk].present = false;
        }
        if matches!(asked.command, Command::RemoveDisk) && error == CommandError::JournalFailed {
            let disk = &mut self.disks[asked.disk];
            (disk.present, disk.leaving) = (true, false);
        }
        Ok(())
    }

    /// Checks and frees released segments: no I/O may be in flight on them.
    fn released(&mut self, index: usize, segments: &[Segment]) -> Result<(), Violation> {
        let len = self.scenario.segment_bytes;
        self.disks[index].changed = self.clock;
        self.ring_segments_released = 0;
        for segment in segments {
            let disk = &mut self.disks[index];
            let is_data = disk.segments.remove(segment);
            let is_ring = disk.owner.as_mut().is_some_and(|owner| owner.take_from_ring(segment));
            ensure!(is_data || is_ring, "disk {index} releases {segment:?}, which its cache does not have");
            if let Some(owner) = &mut disk.owner {
                owner.data.retain(|_, place| place != segment);
            }
            self.ring_segments_released += usize::from(is_ring);
            let busy = self.flash[usize::from(segment.device.0)].is_busy(segment.offset, len);
            ensure!(!busy, "disk {index} releases {segment:?} with I/O in flight");
            ensure!(self.free.insert(*segment), "{segment:?} is free already");
        }
        let awaits_cache = self.awaits_cache(index);
        let disk = &mut self.disks[index];
        if disk.segments.is_empty()
            && disk.config.take().is_some()
            && disk.owner.is_some()
            && !disk.leaving
            && !awaits_cache
        {
            disk.owner.iter_mut().for_each(|owner| owner.gone = true);
            self.disown_gone(index);
        }
        Ok(())
    }

    /// Returns all segments of the pool.
    pub(super) fn all_segments(&self) -> BTreeSet<Segment> {
        let devices = self.scenario.devices.iter().enumerate();
        devices
            .flat_map(|(i, device)| {
                (0..device.segments).map(move |n| (DeviceId(i as u16), n)).collect::<Vec<_>>()
            })
            .map(|(device, n)| Segment { device, offset: SEGMENTS_START + n * self.scenario.segment_bytes })
            .collect()
    }
}
