//! Decides which copy of a sector is correct if the journal does not show that, from the content of
//! flash.
//!
//! A dirty sector that is overwritten in place has no checksum until the next commit. If such a
//! sector has two copies, they may differ after a crash, and the journal does not show which one is
//! correct. Recovery then reads both copies:
//!
//! | the copies | chosen content |
//! |---|---|
//! | are equal | that of both |
//! | one cannot be read | that of the other copy |
//! | differ, and one copy's segment has more wrong checksums | that of the other copy |
//! | differ, and one copy matches the last commit | that of this copy |
//! | differ otherwise | that of the first copy |
//!
//! If one copy matches the last commit, the later write was never acknowledged as durable, or is
//! lost with the other device. If none does, neither content was ever acknowledged as durable.

use crate::index::Index;

/// Number of sectors with known checksums that recovery reads per segment, to estimate the
/// segment's reliability.
const PROBES: usize = 32;

/// Sectors that were read from flash, and their content.
pub(super) struct Proof<'a> {
    /// Cache sectors, in order.
    sectors: Vec<u64>,
    /// The checksum of each sector; `None` if it is unreadable.
    sums: &'a [Option<u32>],
    sectors_in_segment: u64,
    /// For each segment, the number of wrong sectors and the number of compared sectors.
    wrong: Vec<(u64, u64)>,
}

impl<'a> Proof<'a> {
    pub(super) fn new(sectors: Vec<u64>, sums: &'a [Option<u32>], sectors_in_segment: u64) -> Proof<'a> {
        assert_eq!(sectors.len(), sums.len(), "a checksum for each sector to be proved");
        Proof { sectors, sums, sectors_in_segment, wrong: Vec::new() }
    }

    /// Returns the checksum of a sector; `None` if it was not read or is unreadable.
    pub(super) fn sum(&self, sector: u64) -> Option<u32> {
        self.sums[self.sectors.binary_search(&sector).ok()?]
    }

    /// Returns all sectors that were read.
    pub(super) fn all(&self) -> impl Iterator<Item = (u64, Option<u32>)> + '_ {
        self.sectors.iter().copied().zip(self.sums.iter().copied())
    }

    /// Compares the sectors that were read with the checksums in an index, and counts the wrong
    /// ones of each segment.
    pub(super) fn judge(&mut self, index: &Index) {
        for (sector, sum) in self.sectors.iter().zip(self.sums) {
            if !index.is_valid(*sector) || index.is_unproven(*sector) {
                continue;
            }
            let segment = (sector / self.sectors_in_segment) as usize;
            if segment >= self.wrong.len() {
                self.wrong.resize(segment + 1, (0, 0));
            }
            self.wrong[segment].0 += u64::from(*sum != Some(index.sum(*sector)));
            self.wrong[segment].1 += 1;
        }
    }

    /// Chooses between the two copies of a sector whose committed checksum is `last`. Returns the
    /// checksum of the chosen copy; `None` if neither copy can be read.
    pub(super) fn choose(&self, first: u64, second: u64, last: u32) -> Option<u32> {
        let (one, two) = match (self.sum(first), self.sum(second)) {
            (Some(one), Some(two)) => (one, two),
            (one, two) => return one.or(two),
        };
        let wrong = |sector: u64| {
            let segment = (sector / self.sectors_in_segment) as usize;
            self.wrong.get(segment).copied().unwrap_or((0, 0))
        };
        let ((wrong_one, all_one), (wrong_two, all_two)) = (wrong(first), wrong(second));
        // The fractions are compared without division. A segment without compared sectors counts as
        // correct.
        let badness = (wrong_one * all_two.max(1)).cmp(&(wrong_two * all_one.max(1)));
        let is_second = badness.then_with(|| (two == last).cmp(&(one == last))).is_gt();
        Some(if is_second { two } else { one })
    }
}

/// Returns, for each segment with one of the `doubtful` sectors, some sectors whose checksums are
/// known.
pub(super) fn probes(index: &Index, doubtful: &[u64], sectors_in_segment: u64) -> Vec<u64> {
    let mut segments: Vec<u64> = doubtful.iter().map(|sector| sector / sectors_in_segment).collect();
    segments.sort_unstable();
    segments.dedup();
    let sectors = |segment: u64| segment * sectors_in_segment..(segment + 1) * sectors_in_segment;
    let is_known = |sector: &u64| index.is_valid(*sector) && !index.is_unproven(*sector);
    segments.into_iter().flat_map(|segment| sectors(segment).filter(is_known).take(PROBES)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::restore::Restoring;
    use crate::units::{BlockNo, FrameNo};

    /// Two segments of four sectors; three of the first and one of the second have a checksum.
    fn index() -> Index {
        let mut restoring = Restoring::new(8, 0);
        for (frame, sum) in [(0, 10), (1, 11), (2, 12), (4, 14)] {
            restoring.place(FrameNo(frame), BlockNo(frame), crate::index::restore::Copy::First);
            restoring.set(u64::from(frame), sum, true);
        }
        restoring.finish(8)
    }

    /// Returns the decision if flash has `known` in sectors 0, 1, 2 and 4, and `one` and `two` in
    /// the copies 3 and 7.
    fn chosen(known: [u32; 4], one: Option<u32>, two: Option<u32>) -> Option<u32> {
        let [a, b, c, d] = known.map(Some);
        let sums = [a, b, c, one, d, two];
        let mut proof = Proof::new(vec![0, 1, 2, 3, 4, 7], &sums, 4);
        proof.judge(&index());
        proof.choose(3, 7, 33)
    }

    #[test]
    fn the_table_of_two_copies_that_may_differ() {
        let sound = |one, two| chosen([10, 11, 12, 14], one, two);
        assert_eq!(sound(Some(1), Some(1)), Some(1));
        assert_eq!((sound(Some(1), None), sound(None, Some(2)), sound(None, None)), (Some(1), Some(2), None));
        assert_eq!((sound(Some(33), Some(2)), sound(Some(1), Some(33))), (Some(33), Some(33)));
        assert_eq!(sound(Some(1), Some(2)), Some(1));
        // A third of the first segment is wrong, or all of the second.
        let first = |one, two| chosen([10, 9, 12, 14], Some(one), Some(two));
        assert_eq!((first(1, 2), first(33, 2)), (Some(2), Some(2)));
        let second = |one, two| chosen([10, 9, 12, 9], Some(one), Some(two));
        assert_eq!((second(1, 2), second(1, 33)), (Some(1), Some(1)));
    }

    #[test]
    fn probes_are_in_segments_with_unknown_checksums() {
        assert_eq!(probes(&index(), &[3], 4), [0, 1, 2]);
        assert_eq!(probes(&index(), &[7, 6], 4), [4]);
        assert_eq!(probes(&index(), &[], 4), [0; 0]);
    }
}
