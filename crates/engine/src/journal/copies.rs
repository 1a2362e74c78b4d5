//! Reconciles the two copies of each block, sector by sector, when a cache is recovered. If only
//! one copy is correct, recovery uses that copy. If the journal does not show which copy is
//! correct, `proof.rs` decides by reading both.

use super::Replay;
use super::proof::Proof;
use crate::index::restore::Copy;
use crate::units::{BlockNo, FrameNo};

impl Replay {
    /// Drops the wrong copy of a dirty sector if the other copy is correct. If the second copy is
    /// the correct one, the copies are exchanged first.
    pub(super) fn prefer_what_is_there(&mut self, proof: &Proof<'_>) {
        for (sector, sum) in proof.all() {
            let index = self.restoring.index();
            if !index.is_valid(sector) || !index.is_dirty(sector) || sum == Some(index.sum(sector)) {
                continue;
            }
            let Some((other, twin)) = self.restoring.twin(sector).filter(|_| !index.is_unproven(sector))
            else {
                continue;
            };
            let (expected, frame) = (index.sum(sector), FrameNo((sector >> self.plan.block_shift) as u32));
            let has_it = index.is_dirty(twin)
                && index.sum(twin) == expected
                && proof.sum(twin).is_none_or(|found| found == expected);
            let is_second = self.restoring.copy(frame) == Copy::Second;
            if has_it && (is_second || self.restoring.swap(frame, other)) {
                self.restoring.clear(sector, 1);
            }
        }
    }

    /// Makes the copies of each block agree, and empties frames on missing devices. Returns the
    /// number of sectors that were dirty only in these frames.
    pub(super) fn reconcile(&mut self, proof: &Proof<'_>) -> u64 {
        let all = self.restoring.index().frames();
        for second in (0..all).map(FrameNo) {
            let Some(block) = self.restoring.block(second) else { continue };
            if self.restoring.copy(second) == Copy::First {
                continue;
            }
            match self.restoring.find(block, Copy::First) {
                Some(first) if first.0 < self.frames && second.0 < self.frames => {
                    self.agree(block, first, second, proof)
                }
                Some(first) if first.0 >= self.frames => {
                    // The second copy, present or missing, has all dirty data of the first.
                    self.forget_common(first, second);
                }
                Some(first) => self.forget_common(second, first),
                None => {}
            }
        }
        let mut missing = 0;
        for frame in (self.frames..all).map(FrameNo) {
            let first = self.restoring.index().first_sector(frame);
            missing += self.restoring.index().count_dirty(first, 1 << self.plan.block_shift);
            self.restoring.vacate(frame);
        }
        missing
    }

    /// Drops sectors of the second copy that differ from the first. If the checksum of only one
    /// copy of a dirty sector is known, it is used for both copies. That checksum is correct for
    /// both copies: scrubbing records the checksums of the copies one by one, and neither copy is
    /// overwritten before the journal records both as unproven. If neither copy has a checksum,
    /// recovery chooses a copy by the content of flash (`proof.rs`).
    fn agree(&mut self, block: BlockNo, first: FrameNo, second: FrameNo, proof: &Proof<'_>) {
        for i in 0..1 << self.plan.block_shift {
            let index = self.restoring.index();
            let (one, two) = (index.first_sector(first) + i, index.first_sector(second) + i);
            if !index.is_valid(one) || !index.is_valid(two) {
                continue;
            }
            let (dirty, sum) = (index.is_dirty(one), index.sum(one));
            match (index.is_unproven(one), index.is_unproven(two)) {
                (false, false) if sum == index.sum(two) => self.restoring.set(two, sum, dirty),
                (true, false) if index.is_dirty(two) => self.restoring.set(one, index.sum(two), true),
                (false, true) if dirty => self.restoring.set(two, sum, true),
                (true, true) => {
                    if proof.sum(one).is_none() || proof.sum(one) != proof.sum(two) {
                        self.parted.push((u64::from(block.0) << self.plan.block_shift) + i);
                    }
                    let at = (u64::from(block.0) << self.plan.block_shift) + i;
                    let is_superseded = |sum| self.superseded.contains(&(at, sum));
                    match proof.choose(one, two, sum, is_superseded) {
                        Some(right) => {
                            [one, two].into_iter().for_each(|at| self.restoring.set(at, right, true))
                        }
                        None => self.restoring.clear(two, 1),
                    }
                }
                _ => self.restoring.clear(two, 1),
            }
        }
    }

    /// Drops the sectors of the copy in frame `gone`, which is on a missing device, if frame
    /// `other` also has these sectors.
    fn forget_common(&mut self, gone: FrameNo, other: FrameNo) {
        for i in 0..1 << self.plan.block_shift {
            let index = self.restoring.index();
            if index.is_valid(index.first_sector(other) + i) {
                self.restoring.clear(index.first_sector(gone) + i, 1);
            }
        }
    }
}
