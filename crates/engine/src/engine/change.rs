//! Commands to the engine, such as adding and removing disks, and changing caches under load.
//!
//! A change of a cache waits until none of the cache's flash I/O is in flight. During this wait,
//! requests of the disk bypass a volatile cache, which is safe because the backing has all data. If
//! the cache is persistent, requests wait for the change (`structure.rs`). Sectors that become
//! invalid during this wait are invalidated in the old index, from which the new index is made.

use super::disk::Disk;
use super::{DISKS_MAX, Engine};
use crate::cache::Cache;
use crate::command::{CacheChange, Command, CommandError, DataSegment, Event, Mode, Role, Segment};
use crate::device;
use crate::qos::DiskQos;
use crate::sizing::Live;
use crate::stats::DiskStats;
use crate::units::{CommandId, DeviceId, DiskId, Instant};

impl Engine {
    /// Accepts a command; [`Event::Done`] reports its end.
    pub fn handle_command(&mut self, now: Instant, id: CommandId, disk_id: DiskId, command: Command) {
        assert!(disk_id.0 < DISKS_MAX, "disk ids are below {DISKS_MAX}");
        let index = disk_id.0 as usize;
        if index >= self.disks.len() {
            self.disks.resize_with(index + 1, || None);
        }
        let result = match (command, &mut self.disks[index]) {
            (Command::AddDisk(_), Some(_)) => Err(CommandError::DiskExists),
            (Command::AddDisk(config), slot @ None) => {
                *slot = Some(Box::new(Disk::new(config, now)));
                self.slots.join(disk_id, config.datastore);
                self.destage_buffers.shares.join(disk_id, config.datastore);
                self.job_slots.join(disk_id, config.datastore);
                Ok(())
            }
            (_, None) => Err(CommandError::NoSuchDisk),
            (Command::Cache(CacheChange::DiscardRecorded(upto)), Some(disk)) => {
                disk.record_discard(upto);
                self.pump_structure(now, disk_id);
                self.done(id, disk_id, Ok(Vec::new()));
                return self.run(now);
            }
            (_, Some(disk)) if disk.removing.is_some() => Err(CommandError::Removing),
            (Command::RemoveDisk, Some(disk)) => {
                disk.removing = Some(id);
                let changes = std::mem::take(&mut disk.changes);
                let drain = disk.draining.take();
                for command in changes.into_iter().filter_map(|(command, _)| command).chain(drain) {
                    self.done(command, disk_id, Err(CommandError::Removing));
                }
                self.stop_vacating(disk_id, CommandError::Removing);
                self.release_recovering(disk_id);
                self.pass_waiting(now, disk_id);
                // Requests that wait for a QoS limit would delay the removal.
                self.set_qos(now, disk_id, DiskQos::default());
                self.settle(now, disk_id);
                return self.run(now);
            }
            (Command::Cache(CacheChange::Tune(mode, destage, copies)), Some(disk))
                if disk.changes.is_empty() && disk.opening.is_none() =>
            {
                match &disk.cache {
                    None => Err(CommandError::NoCache),
                    Some(_) if mode == Mode::WriteBack && disk.journal.is_none() => {
                        Err(CommandError::NoJournal)
                    }
                    Some(_) if mode == Mode::WriteBack && !self.destage_buffers.is_any() => {
                        Err(CommandError::Unworkable)
                    }
                    Some(cache) => {
                        disk.maintenance.look_for_missing(cache.index.frames());
                        disk.tune(mode, destage, copies);
                        self.wake(disk_id);
                        Ok(())
                    }
                }
            }
            (Command::Cache(CacheChange::Replace(policy, admission)), Some(disk))
                if disk.changes.is_empty() && disk.opening.is_none() =>
            {
                let cache = disk.cache.as_mut().ok_or(CommandError::NoCache);
                cache.map(|cache| cache.replace(policy, admission))
            }
            (Command::Cache(CacheChange::Fill(fill)), Some(disk))
                if disk.changes.is_empty() && disk.opening.is_none() =>
            {
                let cache = disk.cache.as_mut().ok_or(CommandError::NoCache);
                cache.map(|cache| cache.set_fill(fill))
            }
            (Command::Cache(CacheChange::Expect(expect)), Some(_)) => {
                let result = self.expect(disk_id, expect);
                self.done(id, disk_id, result.map(|()| Vec::new()));
                return self.run(now);
            }
            (Command::Cache(CacheChange::Drain), Some(disk)) => match (&disk.cache, disk.draining) {
                (None, _) => Err(CommandError::NoCache),
                (Some(_), Some(_)) => Err(CommandError::Stopped),
                (Some(_), None) if disk.journal.is_none() => Ok(()),
                (Some(_), None) => {
                    disk.draining = Some(id);
                    self.wake(disk_id);
                    return self.run(now);
                }
            },
            (Command::Cache(CacheChange::StopDrain), Some(disk)) => {
                if let Some(drain) = disk.draining.take() {
                    self.done(drain, disk_id, Err(CommandError::Stopped));
                }
                self.stop_vacating(disk_id, CommandError::Stopped);
                self.done(id, disk_id, Ok(Vec::new()));
                return self.run(now);
            }
            (Command::Cache(CacheChange::LossRecorded(upto)), Some(disk)) => {
                disk.record_loss(upto);
                self.wake(disk_id);
                self.done(id, disk_id, Ok(Vec::new()));
                return self.run(now);
            }
            (Command::Cache(CacheChange::Vacate(which)), Some(_)) => {
                if let Some(result) = self.vacate(disk_id, id, which) {
                    self.done(id, disk_id, result.map(|()| Vec::new()));
                }
                return self.run(now);
            }
            (Command::Cache(CacheChange::GrowDisk(size_bytes, ring)), Some(disk))
                if disk.grows_at_once() || disk.may_grow(size_bytes).is_err() =>
            {
                let result = match (disk.may_grow(size_bytes), ring) {
                    (Err(error), _) => Err(error),
                    (Ok(()), Some(_)) => Err(CommandError::NoCache),
                    (Ok(()), None) => {
                        disk.grow(size_bytes);
                        Ok(Vec::new())
                    }
                };
                return self.done(id, disk_id, result);
            }
            (Command::Cache(change), Some(disk)) => {
                disk.changes.push_back((Some(id), change));
                self.settle(now, disk_id);
                return self.run(now);
            }
            (Command::Qos(qos), Some(_)) => {
                self.set_qos(now, disk_id, qos);
                Ok(())
            }
            (Command::Own(role), Some(_)) => match self.set_role(now, id, disk_id, role) {
                Some(result) => {
                    self.done(id, disk_id, result.map(|()| Vec::new()));
                    return self.run(now);
                }
                None => return self.run(now),
            },
            (Command::Watch(watch), Some(_)) => {
                self.watch(disk_id, watch);
                Ok(())
            }
            (Command::Memory(config), Some(disk)) => disk.set_memory(config),
            (Command::Bitmap(change), Some(disk)) => disk.change_bitmaps(change),
            (Command::ResetHistograms, Some(disk)) => {
                disk.histograms.reset(now);
                Ok(())
            }
            (Command::ResetSizing, Some(disk)) => {
                *disk.sizing = Live::new(now);
                Ok(())
            }
            (Command::ResetStats, Some(disk)) => {
                disk.stats = DiskStats::new();
                disk.stats_since = now;
                Ok(())
            }
        };
        self.done(id, disk_id, result.map(|()| Vec::new()));
    }

    /// Flushes the backing once before a disk is removed, if guests' writes are not flushed or the
    /// disk has dirty bitmaps. After the removal, hob could not report a loss of these writes, and
    /// the disk would differ from its bitmaps. Returns true while the flush is in progress.
    fn flushes_before_removal(&mut self, now: Instant, id: DiskId) -> bool {
        let disk = self.disk_mut(id);
        let has_bitmaps = disk.bitmaps.is_some() && disk.backed.needs_flush();
        // If a persistent cache was closed, closing it has flushed the backing already.
        let is_written = disk.ownership.role == Role::Here && !disk.closed;
        let is_at_risk = is_written && disk.backed.guests_at_risk() > 0;
        if !has_bitmaps && !is_at_risk {
            return false;
        }
        if !std::mem::replace(&mut disk.flushed_before_removal, true) && self.flush_backing(now, id) {
            self.disk_mut(id).destager.begin_flush();
            return true;
        }
        self.disk_mut(id).note_everything();
        false
    }

    /// Carries out the disk's pending changes, if the I/O that they wait for has ended.
    pub(super) fn settle(&mut self, now: Instant, id: DiskId) {
        if self.disks[id.0 as usize].is_none() {
            return;
        }
        self.unhold(id);
        self.end_freezing(id);
        let disk = self.disk_mut(id);
        if let Some(command) = disk.removing.take_if(|_| !disk.awaiting_journal.is_empty()) {
            // Unanswered requests wait for a new journal, so the removal fails.
            self.done(command, id, Err(CommandError::JournalFailed));
        }
        let disk = self.disk_mut(id);
        let is_dead = disk.journal.as_ref().is_some_and(|journal| journal.dead);
        if is_dead && !disk.closed && disk.opening.is_none() {
            // A cache without a journal cannot be closed, so its disk stays. Requests in flight may
            // wait until the loss of the journal is recorded, which a removal would prevent.
            if let Some(command) = disk.removing.take() {
                disk.changes
                    .retain(|(command, change)| command.is_some() || !matches!(change, CacheChange::Close));
                self.unhold(id);
                return self.done(command, id, Err(CommandError::JournalFailed));
            }
        }
        let disk = self.disk_mut(id);
        if disk.removing.is_some() && disk.in_flight == 0 && disk.journal.is_some() && !disk.closed {
            // The disk's cache is closed first, and stays on flash. If the cache cannot be closed,
            // the disk stays too.
            if disk.changes.is_empty() && disk.opening.is_none() {
                disk.changes.push_back((None, CacheChange::Close));
            }
        } else if let Some(command) = disk.removing
            && disk.in_flight == 0
            && disk.is_at_rest()
            && disk.opening.is_none()
        {
            if self.flushes_before_removal(now, id) {
                return;
            }
            let disk = self.disk_mut(id);
            let volatile = disk.cache.take().filter(|_| disk.journal.is_none());
            let segments = volatile.map(|cache| places(&cache.segments)).unwrap_or_default();
            self.hand_out_bitmaps(id);
            self.report_owed(id);
            self.recent_edges.forget(id, 0, u64::MAX);
            self.disks[id.0 as usize] = None;
            self.slots.leave(id);
            self.destage_buffers.shares.leave(id);
            self.job_slots.leave(id);
            return self.done(command, id, Ok(segments));
        }
        if self.settle_persistent(now, id) {
            return;
        }
        while let Some(disk) = &mut self.disks[id.0 as usize]
            && disk.flash_in_flight == 0
            && !self.settle_persistent(now, id)
            && let Some(disk) = &mut self.disks[id.0 as usize]
            && let Some((command, change)) = disk.changes.pop_front()
        {
            let left = match &change {
                CacheChange::Leave(device, ..) if disk.cache.is_some() => Some(*device),
                _ => None,
            };
            // A volatile cache does not use a journal ring. The cache may have been persistent when
            // the change was requested.
            let ring: Vec<Segment> = change.ring().map(|ring| ring.copies.concat()).unwrap_or_default();
            if change.empties_memory() {
                disk.empty_memory();
            }
            let result = disk.apply(change).map(|released| [released, ring].concat());
            if let (Some(device), None) = (left, &disk.cache) {
                disk.fenced = self.devices.get(device).is_fenced();
            }
            self.recheck(id);
            match (command, result) {
                (Some(command), result) => self.done(command, id, result),
                (None, Ok(segments)) => self.event_out.push_back(Event::Lost { disk: id, segments }),
                // The segments were already released by an earlier command.
                (None, Err(_)) => {}
            }
        }
        if self.disks[id.0 as usize].is_some() {
            self.unhold(id);
        }
    }

    /// Fences a flash device that the daemon cannot use any more. I/O in flight on the device still
    /// ends with an ordinary completion.
    pub fn give_up_device(&mut self, device: DeviceId) {
        let change = self.devices.get(device).give_up();
        self.device_changed(device, change);
    }

    /// Handles a change of a device's health.
    pub(super) fn device_changed(&mut self, device: DeviceId, change: device::Change) {
        let event = match change {
            device::Change::None => return,
            device::Change::Fenced(errors) => Event::Fenced { device, errors },
            device::Change::Stalled => Event::Stalled(device),
            device::Change::Resumed => Event::Resumed(device),
        };
        self.event_out.push_back(event);
        for index in 0..self.disks.len() {
            self.recheck(DiskId(index as u32));
            self.unsettled.push(DiskId(index as u32));
        }
    }

    /// Bypasses a cache with a stalled device, and starts to remove fenced devices from a volatile
    /// cache. Call this function after the health of one of the cache's devices has changed.
    fn recheck(&mut self, id: DiskId) {
        let Some(disk) = &mut self.disks[id.0 as usize] else { return };
        let Some(cache) = &disk.cache else {
            disk.stalled = false;
            return;
        };
        let mut on: Vec<DeviceId> = cache.segments.iter().map(|segment| segment.place.device).collect();
        on.sort_unstable();
        on.dedup();
        // Segments for second copies only are not read. A write-back write must not be acknowledged
        // without its second copy.
        let bypasses = |segment: &&DataSegment| !segment.seconds_only;
        let devices = &mut self.devices;
        disk.stalled = cache
            .segments
            .iter()
            .filter(bypasses)
            .any(|segment| devices.get(segment.place.device).is_stalled());
        if disk.journal.is_some() {
            // Dirty data on the device may still be readable. The daemon decides when the cache
            // leaves the device.
            return self.retry_unneeded_commits(id);
        }
        for device in on.into_iter().filter(|device| self.devices.get(*device).is_fenced()) {
            let is_leaving = |(command, change): &(Option<CommandId>, CacheChange)| {
                command.is_none() && matches!(change, CacheChange::Leave(other, ..) if *other == device)
            };
            if !disk.changes.iter().any(is_leaving) {
                disk.changes.push_back((None, CacheChange::Leave(device, Vec::new(), None)));
            }
        }
    }

    pub(super) fn done(
        &mut self,
        command: CommandId,
        disk: DiskId,
        result: Result<Vec<Segment>, CommandError>,
    ) {
        self.event_out.push_back(Event::Done { command, disk, result });
    }
}

impl Disk {
    /// Changes the disk's cache, which has no flash I/O in flight. Returns the segments that the
    /// cache released.
    fn apply(&mut self, change: CacheChange) -> Result<Vec<Segment>, CommandError> {
        let size = self.config.size_bytes;
        let cache = match (&self.cache, change) {
            (Some(_), CacheChange::Enable(..)) => return Err(CommandError::CacheExists),
            // The ring was for a cache that has been removed.
            (_, CacheChange::GrowDisk(_, Some(_))) => return Err(CommandError::NoCache),
            (_, CacheChange::GrowDisk(size_bytes, None)) => {
                self.may_grow(size_bytes)?;
                self.grow(size_bytes);
                return Ok(Vec::new());
            }
            (None, CacheChange::Enable(_)) if self.recovering.is_some() => {
                return Err(CommandError::CacheExists);
            }
            (None, CacheChange::Enable(enable)) => {
                self.cache = Some(Cache::new(enable.config, enable.segments, size)?);
                self.fenced = false;
                return Ok(Vec::new());
            }
            (None, CacheChange::Disable) if self.fenced => {
                self.fenced = false;
                return Ok(Vec::new());
            }
            (None, _) => return Err(CommandError::NoCache),
            (Some(_), CacheChange::Disable) => {
                return Ok(places(&self.cache.take().expect("matched").segments));
            }
            (Some(_), CacheChange::Tune(Mode::WriteBack, ..)) => return Err(CommandError::NoJournal),
            (Some(_), CacheChange::Tune(mode, destage, copies)) => {
                self.tune(mode, destage, copies);
                return Ok(Vec::new());
            }
            (Some(_), CacheChange::Replace(policy, admission)) => {
                self.cache.as_mut().expect("matched").replace(policy, admission);
                return Ok(Vec::new());
            }
            (Some(_), CacheChange::Fill(fill)) => {
                self.cache.as_mut().expect("matched").set_fill(fill);
                return Ok(Vec::new());
            }
            (Some(cache), CacheChange::Clear(_)) => Cache::new(cache.config, cache.segments.clone(), size)?,
            (Some(cache), CacheChange::Configure(config, _)) => {
                if config.segment_bytes != cache.config.segment_bytes {
                    return Err(CommandError::Unworkable);
                }
                Cache::new(config, cache.segments.clone(), size)?
            }
            (Some(cache), CacheChange::Grow(more, _)) => {
                if more.is_empty() {
                    return Err(CommandError::TooSmall);
                }
                cache.relocated([cache.segments.clone(), more].concat(), size)?
            }
            (Some(cache), CacheChange::Shrink(count, _)) => {
                if count as usize >= cache.segments.len() {
                    return Err(CommandError::TooSmall);
                }
                let mut leaving = cache.segments_to_give(count as usize);
                leaving.sort_unstable();
                let stay = |segment: &&DataSegment| leaving.binary_search(segment).is_err();
                cache.relocated(cache.segments.iter().filter(stay).copied().collect(), size)?
            }
            (Some(cache), CacheChange::Leave(device, replacements, _)) => {
                if !cache.is_on(device) {
                    return Err(CommandError::NoCache);
                }
                let elsewhere = cache.segments.iter().filter(|segment| segment.place.device != device);
                let segments: Vec<DataSegment> = elsewhere.copied().chain(replacements).collect();
                if segments.is_empty() {
                    return Ok(places(&self.cache.take().expect("matched").segments));
                }
                cache.relocated(segments, size)?
            }
            (
                Some(_),
                CacheChange::Drain
                | CacheChange::StopDrain
                | CacheChange::Vacate(_)
                | CacheChange::LossRecorded(_)
                | CacheChange::DiscardRecorded(_)
                | CacheChange::DiscardDirty(_)
                | CacheChange::Expect(_)
                | CacheChange::Close,
            ) => return Ok(Vec::new()),
        };
        let old = self.cache.replace(cache).expect("matched");
        let mut kept = places(&self.cache.as_ref().expect("the cache was just set").segments);
        kept.sort_unstable();
        Ok(places(&old.segments).into_iter().filter(|segment| kept.binary_search(segment).is_err()).collect())
    }
}

fn places(segments: &[DataSegment]) -> Vec<Segment> {
    segments.iter().map(|segment| segment.place).collect()
}
