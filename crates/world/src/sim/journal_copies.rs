//! Simulates journals that lose one of their two copies. The daemon then gives the cache a new
//! journal.
//!
//! Without a new journal, the lost copy stays on flash and becomes older than the other one. If the
//! other copy is missing at a later start, recovery uses the old copy as if it were up to date. So
//! some histories have one device that refuses journal pages or flushes for a short time, and
//! another device that fails later. Until the new journal is complete, a failure of the second
//! device may lose data. After a failed flush of the first device, a failure of the second may lose
//! data until a new journal records that no data is dirty. Later failures of the second device must
//! not lose data.

use hob_engine::command::{CacheChange, Command, Copies};
use hob_engine::units::{DiskId, Instant};

use super::scenario::Scenario;
use super::{Event, Options, Sabotage, Simulation, trace};
use crate::media::{DeviceFailure, FlashFaults};
use crate::rng::SimRng;

/// Number that is combined with the seed of a history, to seed separate random numbers for
/// histories in which journals lose copies.
const SALT: u64 = 0x636f_7069_6573;

/// Pause between two attempts to replace a journal that lost a copy, nanoseconds.
const REPLACE_NS: u64 = 2_000_000_000;

/// A time at which a device begins to refuse journal pages or flushes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal {
    at: Instant,
    device: usize,
    /// Number of the device's next journal page writes that fail. The engine abandons a copy of a
    /// journal after three refused writes.
    pages: u32,
    /// Number of the device's next flushes that fail.
    flushes: u32,
}

/// Plans the faults of a history in which journals lose copies. One device refuses journal pages
/// from time to time, another device fails later, and flash has no other faults.
pub(super) fn draw(scenario: &mut Scenario, seed: u64, options: &Options) {
    let mut rng = SimRng::new(seed ^ SALT);
    let may = options.faults || options.copy_loss_permille == 1000;
    let is_possible = scenario.lives.is_some() && scenario.devices.len() > 1 && !options.peer;
    if !may || !is_possible || !rng.chance(options.copy_loss_permille) {
        return;
    }
    let devices = scenario.devices.len() as u64;
    let span = u64::from(options.requests) * scenario.backing_ns / 4;
    let failing = rng.below(devices) as usize;
    let refusing = (failing + 1 + rng.below(devices - 1) as usize) % devices as usize;
    for plan in &mut scenario.devices {
        (plan.faults, plan.failure) = (FlashFaults::default(), None);
    }
    let failure = rng.pick(&[DeviceFailure::Dead, DeviceFailure::Dead, DeviceFailure::Scrambled]);
    scenario.devices[failing].failure = Some((Instant(rng.between(span / 8, span)), failure));
    // The engine must not fence the device because of the refused pages.
    scenario.limits.flash_errors_max = scenario.limits.flash_errors_max.max(1000);
    scenario.refusals = (0..rng.between(1, 6))
        .map(|_| Refusal {
            at: Instant(rng.below(span)),
            device: refusing,
            pages: rng.pick(&[0, 3, 4, 8]),
            flushes: rng.pick(&[0, 0, 1, 2]),
        })
        .collect();
}

impl Simulation<'_> {
    /// Schedules the refusals of journal pages.
    pub(super) fn schedule_refusals(&mut self) {
        for (i, refusal) in self.scenario.refusals.iter().enumerate() {
            self.queue.push(refusal.at, Event::Refusal(i));
        }
    }

    /// Makes a device refuse the next journal pages, unless another device has failed already.
    pub(super) fn refuse_pages(&mut self, which: usize) {
        let Refusal { device, pages, flushes, .. } = self.scenario.refusals[which];
        let has_failed =
            self.scenario.devices.iter().any(|plan| plan.failure.is_some_and(|(at, _)| at <= self.now));
        if !has_failed {
            trace!(self, "device {device} refuses {pages} journal pages and {flushes} flushes");
            self.flash[device].refuse_pages(pages);
            self.flash[device].refuse_flushes(flushes);
        }
    }

    /// Makes a device fail. A cache may lose data with this device if its journal had already lost
    /// the copy on another device. The function records these caches.
    pub(super) fn device_fails(&mut self, device: usize) {
        let (_, failure) = self.scenario.devices[device].failure.expect("scheduled");
        self.flash[device].suffer(failure, &mut self.rng);
        for flash in &mut self.flash {
            flash.refuse_pages(0);
            flash.refuse_flushes(0);
        }
        self.disks
            .iter_mut()
            .filter_map(|disk| disk.owner.as_mut())
            .for_each(|owner| owner.lose_durable_copies());
        let owners = self.disks.iter_mut().filter_map(|disk| disk.owner.as_mut());
        self.report.journal_copies_lost_both +=
            owners.filter_map(|owner| owner.lose_other_copy().then_some(1)).sum::<u64>();
    }

    /// Handles a failed flush of a flash device. Copies of data on this device may never become
    /// durable.
    pub(super) fn flash_flush_failed(&mut self, device: usize) {
        let is_refusal = self.scenario.refusals.iter().any(|refusal| refusal.device == device);
        let owners = self.disks.iter_mut().filter_map(|disk| disk.owner.as_mut());
        owners.filter(|_| is_refusal).for_each(|owner| owner.has_volatile_copies = true);
    }

    /// Returns true if the disk has no dirty data. If this is true when a new journal ring is
    /// complete, a crash cannot bring old dirty data back, and flushes make the copies of later
    /// dirty data durable.
    pub(super) fn is_destaged(&self, disk: usize) -> bool {
        let stats = self.engine.stats(self.now, DiskId(disk as u32));
        stats.is_some_and(|stats| stats.sectors_dirty == 0)
    }

    /// Handles the report that a cache's journal lost one of its two copies: schedules the creation
    /// of a new journal. If the second copy is on a peer, this function only counts the report. The
    /// daemon creates a new copy on a peer together with new replicas of the dirty data.
    pub(super) fn journal_copy_is_lost(&mut self, DiskId(disk): DiskId) {
        self.report.journal_copies_lost += 1;
        let state = &mut self.disks[disk as usize];
        let Some(owner) = state.owner.as_mut().filter(|owner| owner.config.copies != Copies::Peer) else {
            return;
        };
        owner.note_lost_copy();
        if !std::mem::replace(&mut state.replaces_copy, true) {
            self.queue.push(self.now, Event::ReplaceCopy(disk as usize));
        }
    }

    /// Replaces a cache's journal that lost a copy by a new journal. Tries again until a
    /// replacement succeeds, or until the guests have made their last request of the present life.
    pub(super) fn replace_journal_copy(&mut self, disk: usize) {
        let state = &mut self.disks[disk];
        let lacks_copy = state.owner.as_ref().is_some_and(|owner| owner.lacks_copy());
        state.replaces_copy = lacks_copy && state.present && self.left > 0;
        if !lacks_copy || !state.present {
            return;
        }
        if self.options.sabotage == Some(Sabotage::IgnoredCopyLoss) {
            state.owner.iter_mut().for_each(|owner| owner.forget_lost_copies());
            return;
        }
        if state.replaces_copy {
            self.queue.push(self.now + REPLACE_NS, Event::ReplaceCopy(disk));
        }
        let state = &self.disks[disk];
        let Some(config) = state.config.filter(|_| state.recovering.is_none() && !state.lost_ring) else {
            return;
        };
        if self.stopping || self.brings_ring(disk) {
            return;
        }
        if let Some(ring) = self.make_ring(disk, &config) {
            self.report.journal_copies_replaced += 1;
            self.command(disk, Command::Cache(CacheChange::Shrink(0, Some(ring))));
        }
    }
}
