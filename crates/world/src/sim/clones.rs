//! Disks that are clones: another disk serves the data that was never written on them.
//!
//! This applies to some objects of each backing, until they are changed. Data from the other disk must not
//! be promoted: flash may have only sectors of such an object that a guest has changed, which it has before
//! the backing has. Sometimes the other disk is unavailable, and the backing reads the data; then it may be
//! promoted.

use std::collections::{BTreeMap, BTreeSet};

use hob_engine::io::{Io, IoOp};
use hob_engine::units::{DiskId, IoId, SECTOR_BYTES};

use super::{Sabotage, Simulation};
use crate::content::UNIT_BYTES;
use crate::rng::SimRng;
use crate::{Violation, ensure};

/// Separates the random numbers for these histories from all others.
const SALT: u64 = 0x636c_6f6e;

/// State of a history with clones.
pub(super) struct Clones {
    rng: SimRng,
    /// Sectors per object.
    sectors: u64,
    /// Shared sectors of each disk.
    common: Vec<u64>,
    /// Objects that a clone has changed, by disk and number.
    own: BTreeSet<(usize, u64)>,
    /// Sectors that flash may have.
    may_be_cached: BTreeSet<(usize, u64)>,
    /// Parts of reads in flight that another disk serves.
    reads: BTreeMap<IoId, Vec<(u64, u64)>>,
    /// Per mille of the reads for which the other disk is unavailable.
    absent: u32,
}

impl Clones {
    pub(super) fn draw(seed: u64, permille: u32, units: impl Iterator<Item = u32>) -> Option<Clones> {
        let mut rng = SimRng::new(seed ^ SALT);
        if !rng.chance(permille) {
            return None;
        }
        let sectors = rng.pick(&[1, 4, 16, 64]);
        let absent = rng.pick(&[0, 0, 100]);
        let (mut common, mut own) = (vec![], BTreeSet::new());
        for (disk, units) in units.enumerate() {
            let all = u64::from(units) * UNIT_BYTES / SECTOR_BYTES;
            common.push(rng.pick(&[all, all, all / 2 + 1, 0]).min(all));
            let written = rng.pick(&[0, 100, 500]);
            own.extend((0..all / sectors + 1).filter(|_| rng.chance(written)).map(|object| (disk, object)));
        }
        let (may_be_cached, reads) = (BTreeSet::new(), BTreeMap::new());
        Some(Clones { rng, sectors, common, own, may_be_cached, reads, absent })
    }

    fn is_parents(&self, disk: usize, sector: u64) -> bool {
        sector < self.common[disk] && !self.own.contains(&(disk, sector / self.sectors))
    }

    /// Records the start of a guest's change.
    pub(super) fn may_cache(&mut self, disk: usize, offset: u64, len: u64) {
        let end = offset.saturating_add(len).div_ceil(SECTOR_BYTES);
        self.may_be_cached.extend((offset / SECTOR_BYTES..end).map(|sector| (disk, sector)));
    }

    /// Returns true if another disk serves this I/O, completely or in part.
    pub(super) fn submit(&mut self, disk: usize, io: &Io) -> bool {
        let (first, end) = (io.offset / SECTOR_BYTES, (io.offset + io.len).div_ceil(SECTOR_BYTES));
        match io.op {
            IoOp::Flush => return false,
            IoOp::Read => {}
            _ => {
                self.own.extend((first..end).map(|sector| (disk, sector / self.sectors)));
                return false;
            }
        }
        if self.rng.chance(self.absent) {
            self.may_cache(disk, io.offset, io.len);
            return false;
        }
        let mut shared: Vec<(u64, u64)> = vec![];
        for sector in first..end {
            if !self.is_parents(disk, sector) {
                continue;
            }
            match shared.last_mut() {
                // Parts may be split in any way.
                Some(last) if last.1 == sector && !self.rng.chance(50) => last.1 += 1,
                _ => shared.push((sector, sector + 1)),
            }
        }
        let is_shared = !shared.is_empty();
        if is_shared {
            self.reads.insert(io.id, shared);
        }
        is_shared
    }

    /// Returns the parts of a completed read that another disk served.
    pub(super) fn end(&mut self, id: IoId) -> Vec<(u64, u64)> {
        self.reads.remove(&id).unwrap_or_default()
    }

    /// The other disk's answers to reads in flight are lost.
    pub(super) fn crash(&mut self) {
        self.reads.clear();
    }
}

impl Simulation<'_> {
    /// Handles the success of an I/O: tells the engine which disk served it. Returns whether the backing
    /// was involved.
    pub(super) fn end_of_clone(
        &mut self,
        io: &Io,
        result: Result<(), hob_engine::io::IoError>,
        sums: &[u32],
    ) -> bool {
        let shared = self.clones.as_mut().map_or(vec![], |clones| clones.end(io.id));
        let is_told = self.options.sabotage != Some(Sabotage::UntoldSharing);
        if shared.is_empty() || result.is_err() || !is_told {
            self.engine.handle_completion(self.now, io.id, result, sums);
            return true;
        }
        self.report.shared += 1;
        let sectors: u64 = shared.iter().map(|(first, end)| end - first).sum();
        self.engine.handle_shared(self.now, io.id, &shared, sums);
        sectors * SECTOR_BYTES < io.len
    }

    /// Checks that no data of another disk was promoted.
    pub(super) fn check_clones(&self) -> Result<(), Violation> {
        let Some(clones) = &self.clones else { return Ok(()) };
        for disk in 0..self.disks.len() {
            let id = DiskId(disk as u32);
            for (first, end) in self.engine.valid_extents(id, &self.engine.hottest_blocks(id)) {
                for sector in first..end {
                    let may_be = clones.may_be_cached.contains(&(disk, sector));
                    ensure!(
                        may_be || !clones.is_parents(disk, sector),
                        "disk {disk} sector {sector}: in flash, and another disk keeps it"
                    );
                }
            }
        }
        Ok(())
    }
}
