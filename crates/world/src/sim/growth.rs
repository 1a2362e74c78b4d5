//! Disks that get larger: somebody grows a backing, and then perhaps tells the engine; or a crash comes first, or a refusal, and the
//! disk is as large as its backing when it is opened next.
//!
//! What a backing grows by holds something that no guest wrote, so that copies of a sector that was not whole before, which have
//! nothing there, are told from it.
//!
//! Some histories have it, chosen by dice of their own: the others are what they would be without.

use hob_engine::command::{CacheChange, Command, NewRing};

use super::{World, trace};
use crate::Violation;
use crate::content::{Tag, UNIT_BYTES, tag};
use crate::dice::Dice;

/// Tells the dice from those of everything else.
const SALT: u64 = 0x6772_6f77_7468;

/// No disk gets larger than this, units.
const UNITS_MAX: u64 = 16 << 10;

/// What a history with growing disks has.
#[derive(Debug)]
pub(super) struct Growth {
    dice: Dice,
}

impl Growth {
    /// For a history that has it.
    pub(super) fn draw(seed: u64, permille: u32) -> Option<Growth> {
        let mut dice = Dice::new(seed ^ SALT);
        dice.chance(permille).then_some(Growth { dice })
    }
}

impl World<'_> {
    /// Now and then a disk grows, or is to get smaller, which it refuses.
    pub(super) fn maybe_grow_disk(&mut self) -> Result<(), Violation> {
        let disks = self.disks.len() as u64;
        let Some(Growth { dice }) = &mut self.growth else { return Ok(()) };
        if !dice.chance(150) {
            return Ok(());
        }
        let disk = dice.below(disks) as usize;
        let more = dice.pick(&[0, 1, 3, 7, 8, 16, 100, 1000]);
        let (tells, shrinks, errs) = (dice.chance(850), dice.chance(50), dice.chance(30));
        if self.disks[disk].units() + more <= UNITS_MAX {
            self.grow_backing(disk, more);
        }
        let state = &self.disks[disk];
        if !state.present || state.leaving || !tells {
            return Ok(());
        }
        let units = if shrinks { state.size.saturating_sub(1) } else { state.units() };
        let config = state.owner.as_ref().map(|owner| owner.config);
        let ring: Option<NewRing> = match config {
            Some(config) if !errs => match self.make_ring(disk, &config) {
                Some(ring) => Some(ring),
                None => return Ok(()),
            },
            _ => None,
        };
        self.command(disk, Command::Cache(CacheChange::GrowDisk(units * UNIT_BYTES, ring)));
        self.drain()
    }

    /// Somebody makes a backing larger.
    pub(super) fn grow_backing(&mut self, disk: usize, more: u64) {
        let state = &mut self.disks[disk];
        let units = state.units();
        let tags: Vec<Tag> = (units..units + more).map(|unit| tag(1, disk as u8, unit as u32)).collect();
        state.backing.grow(&tags);
        state.model.grow((units + more) as u32);
        self.grow_tracks(disk);
        trace!(self, "the backing of disk {disk} grows to {} units", units + more);
    }

    /// The engine serves a disk of so many units now.
    pub(super) fn disk_has_size(&mut self, disk: usize, units: u64) {
        let before = std::mem::replace(&mut self.disks[disk].size, units);
        self.report.growths += u64::from(before < units);
        for guest in self.scenario.guests.iter_mut().filter(|guest| guest.disk == disk) {
            guest.units = units;
        }
    }
}
