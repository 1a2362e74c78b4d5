//! End of a history with restarts. Every disk is read, drained, flushed and read again, and the
//! backings must match the model.

use hob_engine::command::{CacheChange, Command, CommandError, Discard};
use hob_engine::io::Op;
use hob_engine::units::{CommandId, DiskId};

use super::Simulation;
use super::scenario::End;
use crate::content::UNIT_BYTES;
use crate::{Violation, ensure};

/// Size of a read at the end of a history, bytes.
const READ_BYTES: u64 = 64 << 10;

/// Maximum number of attempts to open a disk. If all attempts fail, the disk counts as lost. In
/// twice as many attempts, the simulated operator also discards a clean cache for which the pool
/// has no room.
const OPENINGS_MAX: u32 = super::recovery::ATTEMPTS_MAX / 2 + 1;

impl Simulation<'_> {
    /// Runs the end of the history: reads, drains and flushes every disk.
    pub(super) fn finish(&mut self) -> Result<(), Violation> {
        self.losses = None;
        self.flash.iter_mut().for_each(crate::media::Flash::soothe);
        self.disks.iter_mut().for_each(|disk| disk.backing.soothe());
        if self.scenario.lives.is_some() && !self.any_bad() && !self.fenced.is_empty() {
            // A daemon uses a fenced device again after a restart.
            self.next_life(End::Kill)?;
            self.run_dry()?;
        }
        for disk in 0..self.disks.len() {
            self.bring_back(disk)?;
            self.read_all(disk)?;
        }
        for disk in 0..self.disks.len() {
            self.drain_cache(disk)?;
            // The first flush may fail because the backing lost data before it.
            self.request_and_wait(disk, Op::Flush, 0, 0)?;
            self.request_and_wait(disk, Op::Flush, 0, 0)?;
            self.read_all(disk)?;
        }
        self.run_dry()?;
        (0..self.disks.len()).try_for_each(|disk| self.check_verified(disk))?;
        self.audit()?;
        self.check_all_bitmaps()?;
        for disk in 0..self.disks.len() {
            if self.disks[disk].config.is_some() {
                let ended = self.command_and_wait(disk, Command::Cache(CacheChange::Disable))?;
                ensure!(ended.is_ok(), "disk {disk}: its cache cannot be disabled: {ended:?}");
            }
            let removed = self.command_and_wait(disk, Command::RemoveDisk)?;
            ensure!(removed.is_ok(), "disk {disk} cannot be removed: {removed:?}");
            ensure!(
                self.disks[disk].owner.is_none(),
                "disk {disk}: its cache was disabled, but still has an owner"
            );
        }
        self.check_rest()?;
        self.check_empty()
    }

    /// Opens a disk that is not present, with its cache if possible.
    fn bring_back(&mut self, disk: usize) -> Result<(), Violation> {
        self.open_again(disk)?;
        if !self.is_back(disk) {
            // Old journal rings of another disk may occupy the segments that the new journal ring
            // needs. They become free when that other disk is opened.
            for other in (0..self.disks.len()).filter(|other| *other != disk) {
                self.open_again(other)?;
            }
            self.open_again(disk)?;
        }
        if self.is_back(disk) {
            return Ok(());
        }
        ensure!(self.any_bad(), "disk {disk} cannot be opened");
        if self.disks[disk].present {
            // A failed removal is checked when its command ends.
            let removed = self.command_and_wait(disk, Command::RemoveDisk)?;
            if removed == Err(CommandError::JournalFailed) {
                // The removal lost the journal, and a disk whose cache has no journal cannot be
                // removed.
                for way_out in [CacheChange::DiscardDirty(Discard::Told), CacheChange::Disable] {
                    let _ = self.command_and_wait(disk, Command::Cache(way_out))?;
                }
                let removed = self.command_and_wait(disk, Command::RemoveDisk)?;
                ensure!(removed.is_ok(), "disk {disk} cannot be removed even without a cache: {removed:?}");
            }
        }
        self.disown(disk);
        self.distrust_bitmaps(disk);
        let state = &mut self.disks[disk];
        state.gated = false;
        state.model.set_lags(false);
        state.model.adopt(state.backing.now(), state.backing.durable())?;
        self.open_disk(disk)?;
        self.drain()?;
        self.run_dry()
    }

    fn open_again(&mut self, disk: usize) -> Result<(), Violation> {
        for _ in 0..OPENINGS_MAX {
            if self.is_back(disk) {
                break;
            }
            if !self.disks[disk].present {
                self.open_disk(disk)?;
            }
            self.drain()?;
            self.run_dry()?;
        }
        Ok(())
    }

    /// Returns true if a disk is present and its cache, if any, is in service.
    fn is_back(&self, disk: usize) -> bool {
        let state = &self.disks[disk];
        state.present && !state.gated && state.recovering.is_none()
    }

    /// Drains the disk's cache. If the drain fails because flash lost dirty data, discards that
    /// data and drains again.
    fn drain_cache(&mut self, disk: usize) -> Result<(), Violation> {
        if self.disks[disk].config.is_none() {
            return Ok(());
        }
        let drain = Command::Cache(CacheChange::Drain);
        let result = self.command_and_wait(disk, drain.clone())?;
        let stats = |world: &Self| world.all_stats().into_iter().find(|(index, _)| *index == disk);
        let lost = stats(self).map_or(0, |(_, stats)| stats.sectors_lost);
        if result.is_err() && result != Err(CommandError::NoJournal) || lost > 0 {
            ensure!(self.may_lose(disk), "disk {disk}: drain ended with {result:?}, {lost} sectors lost");
            let discarded =
                self.command_and_wait(disk, Command::Cache(CacheChange::DiscardDirty(Discard::Told)))?;
            ensure!(
                discarded.is_ok() || self.any_bad(),
                "disk {disk}: the discard of dirty data failed: {discarded:?}"
            );
            let again = self.command_and_wait(disk, drain)?;
            ensure!(again.is_ok(), "disk {disk}: drain after a discard ended with {again:?}");
        }
        if let Some((_, stats)) = stats(self) {
            let (dirty, lost) = (stats.sectors_dirty, stats.sectors_lost);
            ensure!(dirty + lost == 0, "disk {disk}: {dirty} sectors dirty and {lost} lost after a drain");
        }
        self.disks[disk].model.set_lags(false);
        Ok(())
    }

    pub(super) fn command_and_wait(
        &mut self,
        disk: usize,
        command: Command,
    ) -> Result<Result<(), CommandError>, Violation> {
        let id: CommandId = self.command(disk, command);
        self.drain()?;
        self.run_until(|world| world.ended.contains_key(&id))?;
        let ended = self.ended.remove(&id);
        ended.ok_or_else(|| Violation(format!("disk {disk}: a command never ended: {:?}", self.asked)))
    }

    fn request_and_wait(&mut self, disk: usize, op: Op, offset: u64, len: u64) -> Result<(), Violation> {
        // Answered requests may still fill the cache.
        self.run_until(|world| world.engine.has_room(DiskId(disk as u32)))?;
        let request = self.make_request(disk, op, offset, len);
        self.hand_in(None, request)?;
        self.run_until(|world| world.requests.is_empty())?;
        ensure!(self.requests.is_empty(), "never answered: {:?}", self.requests);
        Ok(())
    }

    /// Reads a whole disk through the engine.
    pub(super) fn read_all(&mut self, disk: usize) -> Result<(), Violation> {
        let size = self.disks[disk].size * UNIT_BYTES;
        for offset in (0..size).step_by(READ_BYTES as usize) {
            self.request_and_wait(disk, Op::Read, offset, READ_BYTES.min(size - offset))?;
        }
        Ok(())
    }
}
