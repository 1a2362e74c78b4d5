//! Simulated clones: a parent disk serves the data that was never written to a clone.
//!
//! Some objects of each backing are shared with the parent until a guest changes them. The engine
//! must not promote data that the parent serves. Of a shared object, flash may have only the
//! sectors that a guest has written. If the parent is unavailable, the backing serves the shared
//! data, and the engine may promote this data.

use std::collections::{BTreeMap, BTreeSet};

use hob_engine::io::{Io, IoOp};
use hob_engine::units::{DiskId, IoId, SECTOR_BYTES};

use super::{Sabotage, Simulation};
use crate::content::UNIT_BYTES;
use crate::rng::SimRng;
use crate::{Violation, ensure};

/// Number that is combined with the seed of a history, to seed separate random numbers for
/// histories with clones.
const SALT: u64 = 0x636c_6f6e;

/// Simulated clones of a history.
pub(super) struct Clones {
    rng: SimRng,
    sectors: u64,
    /// For each disk, the sectors that the disk's backing shares with the parent.
    common: Vec<u64>,
    /// Objects that a clone has changed, as disk and object number.
    own: BTreeSet<(usize, u64)>,
    /// Sectors that the engine may have promoted to flash, as disk and sector number.
    may_be_cached: BTreeSet<(usize, u64)>,
    /// Sector ranges of each read in flight that the parent disk serves.
    reads: BTreeMap<IoId, Vec<(u64, u64)>>,
    /// Share of the reads for which the parent disk is unavailable, per mille.
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

    /// Records that flash may have these sectors of a disk, because a guest has written them.
    pub(super) fn may_cache(&mut self, disk: usize, offset: u64, len: u64) {
        let end = offset.saturating_add(len).div_ceil(SECTOR_BYTES);
        self.may_be_cached.extend((offset / SECTOR_BYTES..end).map(|sector| (disk, sector)));
    }

    /// Returns true if the parent disk serves all or part of this I/O.
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
                // The parent may return one range in several parts.
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

    /// Returns the sector ranges of a completed read that the parent disk served.
    pub(super) fn end(&mut self, id: IoId) -> Vec<(u64, u64)> {
        self.reads.remove(&id).unwrap_or_default()
    }

    /// Forgets which sectors of reads in flight the parent disk serves, because the engine process
    /// ended.
    pub(super) fn crash(&mut self) {
        self.reads.clear();
    }
}

impl Simulation<'_> {
    /// Tells the engine that an I/O of a clone has ended, and which ranges of a successful read the
    /// parent disk served. Returns false if the parent served the whole read.
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

    /// Checks that the engine promoted no data of a parent disk.
    pub(super) fn check_clones(&self) -> Result<(), Violation> {
        let Some(clones) = &self.clones else { return Ok(()) };
        for disk in 0..self.disks.len() {
            let id = DiskId(disk as u32);
            for (first, end) in self.engine.valid_extents(id, &self.engine.hottest_blocks(id)) {
                for sector in first..end {
                    let may_be = clones.may_be_cached.contains(&(disk, sector));
                    ensure!(
                        may_be || !clones.is_parents(disk, sector),
                        "disk {disk} sector {sector}: on flash, and another disk keeps it"
                    );
                }
            }
        }
        Ok(())
    }
}
