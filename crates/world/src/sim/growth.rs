//! Simulates disks that grow. The backing grows first, and then a command may tell the engine.
//! After a crash or a refused command, the disk gets its backing's size when the disk is opened
//! again.
//!
//! The new part of a backing has content that no guest wrote. So the checker can distinguish the
//! new part from the zeroes that pad the last partial sector.
//!
//! A separate random number generator chooses the histories in which disks grow, so that growth
//! does not change the random choices of other histories.

use hob_engine::command::{CacheChange, Command, NewRing};

use super::{Simulation, trace};
use crate::Violation;
use crate::content::{Tag, UNIT_BYTES, tag};
use crate::rng::SimRng;

/// Number that is combined with the seed of a history, to seed separate random numbers for
/// histories in which disks grow.
const SALT: u64 = 0x6772_6f77_7468;

/// Maximum size of a growing disk, units of 512 bytes.
const UNITS_MAX: u64 = 16 << 10;

#[derive(Debug)]
pub(super) struct Growth {
    rng: SimRng,
}

impl Growth {
    pub(super) fn draw(seed: u64, permille: u32) -> Option<Growth> {
        let mut rng = SimRng::new(seed ^ SALT);
        rng.chance(permille).then_some(Growth { rng })
    }
}

impl Simulation<'_> {
    /// Sometimes grows a disk or requests to shrink it. The engine must refuse to shrink a disk.
    pub(super) fn maybe_grow_disk(&mut self) -> Result<(), Violation> {
        let disks = self.disks.len() as u64;
        let Some(Growth { rng }) = &mut self.growth else { return Ok(()) };
        if !rng.chance(150) {
            return Ok(());
        }
        let disk = rng.below(disks) as usize;
        let more = rng.pick(&[0, 1, 3, 7, 8, 16, 100, 1000]);
        let (tells, shrinks, errs) = (rng.chance(850), rng.chance(50), rng.chance(30));
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
            // The daemon knows that the recovery of the cache needs a new journal ring.
            Some(config) if !errs || self.is_being_recovered(disk) => match self.make_ring(disk, &config) {
                Some(ring) => Some(ring),
                None => return Ok(()),
            },
            _ => None,
        };
        self.command(disk, Command::Cache(CacheChange::GrowDisk(units * UNIT_BYTES, ring)));
        self.drain()
    }

    /// Grows a backing by this number of 512-byte units.
    pub(super) fn grow_backing(&mut self, disk: usize, more: u64) {
        let state = &mut self.disks[disk];
        let units = state.units();
        let tags: Vec<Tag> = (units..units + more).map(|unit| tag(1, disk as u8, unit as u32)).collect();
        state.backing.grow(&tags);
        state.model.grow((units + more) as u32);
        self.grow_tracks(disk);
        trace!(self, "the backing of disk {disk} grows to {} units", units + more);
    }

    /// Records that the engine serves a disk with this size, in units of 512 bytes.
    pub(super) fn disk_has_size(&mut self, disk: usize, units: u64) {
        let before = std::mem::replace(&mut self.disks[disk].size, units);
        self.report.growths += u64::from(before < units);
        for guest in self.scenario.guests.iter_mut().filter(|guest| guest.disk == disk) {
            guest.units = units;
        }
    }
}
