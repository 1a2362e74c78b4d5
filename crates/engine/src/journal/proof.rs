//! Decides which copy of a sector is correct if the journal does not show that, from the content of
//! flash.
//!
//! A dirty sector that is overwritten in place has no checksum until the next commit. If such a
//! sector has two copies, they may differ after a crash, and the journal does not show which one is
//! correct. Recovery then reads both copies:
//!
//! | what recovery finds | chosen content |
//! |---|---|
//! | the copies are equal | the content of both |
//! | one copy cannot be read | the content of the other copy |
//! | the copies differ, and one matches the last commit | the content of this copy |
//! | the copies differ, and one copy's device failed a flush | the content of the other copy |
//! | the copies differ, and one copy's device has more wrong dirty sectors | the content of the other copy |
//! | the copies differ, and one copy has an earlier committed checksum | the content of the other copy |
//! | the copies differ, and one copy's device has more wrong clean sectors | the content of the other copy |
//! | the copies differ, and none of these conditions holds | the content of the first copy |
//!
//! If one copy matches the last commit, the later write was never acknowledged as durable, or is
//! lost with the other device. If neither copy matches the last commit, neither content was ever
//! acknowledged as durable, but one of the two may be damaged. Clean sectors count less, because a
//! power cut can leave wrong checksums of them on a device without defects.

use std::collections::{BTreeMap, BTreeSet};

use crate::index::Index;
use crate::units::DeviceId;

/// Number of dirty sectors with known checksums that recovery reads per segment, to estimate the
/// reliability of the segment's device. Recovery also reads this number of clean sectors.
const PROBES: usize = 32;

/// Comparison of some sectors of a device with their checksums.
#[derive(Clone, Copy, Debug, Default)]
struct Compared {
    wrong: u64,
    all: u64,
}

impl Compared {
    fn add(&mut self, is_wrong: bool) {
        self.wrong += u64::from(is_wrong);
        self.all += 1;
    }

    /// Compares the fractions of wrong sectors. A device without compared sectors counts as correct.
    fn cmp(&self, other: &Compared) -> std::cmp::Ordering {
        (self.wrong * other.all.max(1)).cmp(&(other.wrong * self.all.max(1)))
    }
}

/// Sectors that were read from flash, and their content.
pub(super) struct Proof<'a> {
    /// Cache sectors, in order.
    sectors: Vec<u64>,
    /// The checksum of each sector; `None` if it is unreadable.
    sums: &'a [Option<u32>],
    sectors_in_segment: u64,
    /// The device of each segment.
    devices: &'a [DeviceId],
    /// Devices that failed a flush.
    failed: &'a BTreeSet<DeviceId>,
    /// For each device, the comparison of its dirty sectors, and that of its clean sectors.
    compared: BTreeMap<DeviceId, [Compared; 2]>,
}

impl<'a> Proof<'a> {
    pub(super) fn new(
        sectors: Vec<u64>,
        sums: &'a [Option<u32>],
        sectors_in_segment: u64,
        devices: &'a [DeviceId],
        failed: &'a BTreeSet<DeviceId>,
    ) -> Proof<'a> {
        assert_eq!(sectors.len(), sums.len(), "a checksum for each sector to be proved");
        Proof { sectors, sums, sectors_in_segment, devices, failed, compared: BTreeMap::new() }
    }

    fn device(&self, sector: u64) -> DeviceId {
        self.devices[(sector / self.sectors_in_segment) as usize]
    }

    /// Returns true if the device of a sector failed a flush.
    fn is_on_failed(&self, sector: u64) -> bool {
        self.failed.contains(&self.device(sector))
    }

    /// Returns the checksum of a sector; `None` if it was not read or is unreadable.
    pub(super) fn sum(&self, sector: u64) -> Option<u32> {
        self.sums[self.sectors.binary_search(&sector).ok()?]
    }

    /// Returns all sectors that were read.
    pub(super) fn all(&self) -> impl Iterator<Item = (u64, Option<u32>)> + '_ {
        self.sectors.iter().copied().zip(self.sums.iter().copied())
    }

    /// Compares the sectors that were read with the checksums in an index.
    pub(super) fn judge(&mut self, index: &Index) {
        for (sector, sum) in self.sectors.iter().zip(self.sums) {
            if !index.is_valid(*sector) || index.is_unproven(*sector) {
                continue;
            }
            let is_wrong = *sum != Some(index.sum(*sector));
            let compared = self.compared.entry(self.device(*sector)).or_default();
            compared[usize::from(!index.is_dirty(*sector))].add(is_wrong);
        }
    }

    /// Chooses between the two copies of a sector whose last committed checksum is `last`.
    /// Checksums for which `is_superseded` returns true were committed before `last`. Returns the
    /// checksum of the chosen copy; `None` if neither copy can be read.
    pub(super) fn choose(
        &self,
        first: u64,
        second: u64,
        last: u32,
        is_superseded: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let (one, two) = match (self.sum(first), self.sum(second)) {
            (Some(one), Some(two)) => (one, two),
            (one, two) => return one.or(two),
        };
        let of = |sector| self.compared.get(&self.device(sector)).copied().unwrap_or_default();
        let ([dirty_one, clean_one], [dirty_two, clean_two]) = (of(first), of(second));
        let is_last = (two == last).cmp(&(one == last));
        let prefers_second = is_last
            .then_with(|| self.is_on_failed(first).cmp(&self.is_on_failed(second)))
            .then_with(|| dirty_one.cmp(&dirty_two))
            .then_with(|| is_superseded(one).cmp(&is_superseded(two)))
            .then_with(|| clean_one.cmp(&clean_two));
        Some(if prefers_second.is_gt() { two } else { one })
    }
}

/// Returns, for each segment with one of the `doubtful` sectors, some sectors whose checksums are
/// known.
pub(super) fn probes(index: &Index, doubtful: &[u64], sectors_in_segment: u64) -> Vec<u64> {
    let mut segments: Vec<u64> = doubtful.iter().map(|sector| sector / sectors_in_segment).collect();
    segments.sort_unstable();
    segments.dedup();
    let mut found = Vec::new();
    for segment in segments {
        let sectors = segment * sectors_in_segment..(segment + 1) * sectors_in_segment;
        let known = sectors.filter(|sector| index.is_valid(*sector) && !index.is_unproven(*sector));
        let (dirty, clean): (Vec<u64>, Vec<u64>) = known.partition(|sector| index.is_dirty(*sector));
        found.extend(dirty.into_iter().take(PROBES).chain(clean.into_iter().take(PROBES)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::restore::Restoring;
    use crate::units::{BlockNo, FrameNo};

    const DEVICES: [DeviceId; 2] = [DeviceId(0), DeviceId(1)];
    static NONE: BTreeSet<DeviceId> = BTreeSet::new();

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
        let mut proof = Proof::new(vec![0, 1, 2, 3, 4, 7], &sums, 4, &DEVICES, &NONE);
        proof.judge(&index());
        proof.choose(3, 7, 33, |sum| sum == 5)
    }

    #[test]
    fn the_table_of_two_copies_that_may_differ() {
        let sound = |one, two| chosen([10, 11, 12, 14], one, two);
        assert_eq!(sound(Some(1), Some(1)), Some(1));
        assert_eq!((sound(Some(1), None), sound(None, Some(2)), sound(None, None)), (Some(1), Some(2), None));
        assert_eq!((sound(Some(33), Some(2)), sound(Some(1), Some(33))), (Some(33), Some(33)));
        assert_eq!(sound(Some(1), Some(2)), Some(1));
        assert_eq!((sound(Some(5), Some(2)), sound(Some(33), Some(5))), (Some(2), Some(33)));
        // A third of the first segment is wrong, or all of the second.
        let first = |one, two| chosen([10, 9, 12, 14], Some(one), Some(two));
        assert_eq!((first(1, 2), first(33, 2)), (Some(2), Some(33)));
        let second = |one, two| chosen([10, 9, 12, 9], Some(one), Some(two));
        assert_eq!((second(1, 2), second(1, 33)), (Some(1), Some(33)));
    }

    #[test]
    fn the_copy_on_a_device_without_a_failed_flush_is_chosen() {
        let chosen = |failed: u16, two| {
            let (sums, failed) = ([1, two].map(Some), BTreeSet::from([DeviceId(failed)]));
            Proof::new(vec![3, 7], &sums, 4, &DEVICES, &failed).choose(3, 7, 33, |_| false)
        };
        assert_eq!((chosen(0, 2), chosen(1, 2), chosen(1, 33)), (Some(2), Some(1), Some(33)));
    }

    /// A power cut can leave wrong checksums of clean sectors on a device without defects, but not
    /// of dirty sectors.
    #[test]
    fn clean_sectors_count_less_than_dirty_ones() {
        let mut restoring = Restoring::new(8, 0);
        for (frame, dirty) in [(0, false), (1, false), (4, true), (5, true)] {
            restoring.place(FrameNo(frame), BlockNo(frame), crate::index::restore::Copy::First);
            restoring.set(u64::from(frame), 10, dirty);
        }
        let index = restoring.finish(8);
        assert_eq!(probes(&index, &[3, 7], 4), [0, 1, 4, 5]);
        let chosen = |clean, dirty| {
            let sums = [clean, clean, 1, dirty, 10, 2].map(Some);
            let mut proof = Proof::new(vec![0, 1, 3, 4, 5, 7], &sums, 4, &DEVICES, &NONE);
            proof.judge(&index);
            proof.choose(3, 7, 33, |sum| sum == 5)
        };
        assert_eq!((chosen(10, 10), chosen(9, 10), chosen(9, 9)), (Some(1), Some(2), Some(1)));
    }

    /// A segment without known checksums is judged by the other segments of its device.
    #[test]
    fn devices_are_compared_and_not_segments() {
        let mut restoring = Restoring::new(12, 0);
        for frame in [4, 8] {
            restoring.place(FrameNo(frame), BlockNo(frame), crate::index::restore::Copy::First);
            restoring.set(u64::from(frame), 10, true);
        }
        let index = restoring.finish(12);
        let (sums, devices) = ([1, 9, 2, 10].map(Some), [0, 0, 1].map(DeviceId));
        let mut proof = Proof::new(vec![0, 4, 7, 8], &sums, 4, &devices, &NONE);
        proof.judge(&index);
        assert_eq!(proof.choose(0, 8, 33, |_| false), Some(10));
    }

    /// A device with few sectors counts as much as one with many. Sectors without a committed
    /// checksum do not count.
    #[test]
    fn the_fraction_of_wrong_sectors_counts() {
        let chosen = |unproven: Option<u64>| {
            let mut restoring = Restoring::new(16, 0);
            for frame in [0, 1].into_iter().chain(8..14) {
                restoring.place(FrameNo(frame), BlockNo(frame), crate::index::restore::Copy::First);
                restoring.set(u64::from(frame), 10, true);
            }
            unproven.into_iter().for_each(|sector| restoring.set_unproven(sector));
            let index = restoring.finish(16);
            let sums = [9, 10, 1, 9, 9, 10, 10, 10, 10, 2].map(Some);
            let mut proof = Proof::new(vec![0, 1, 7, 8, 9, 10, 11, 12, 13, 15], &sums, 8, &DEVICES, &NONE);
            proof.judge(&index);
            proof.choose(7, 15, 33, |_| false)
        };
        assert_eq!(chosen(None), Some(2), "one of two, and two of six");
        assert_eq!(chosen(Some(0)), Some(1), "none of one, and two of six");
    }

    #[test]
    fn a_segment_has_a_limited_number_of_probes_with_committed_checksums() {
        let mut restoring = Restoring::new(128, 0);
        for frame in 0..100 {
            restoring.place(FrameNo(frame), BlockNo(frame), crate::index::restore::Copy::First);
            restoring.set(u64::from(frame), 10, frame % 2 == 0);
        }
        [0, 4].into_iter().for_each(|sector| restoring.set_unproven(sector));
        let found = probes(&restoring.finish(128), &[127], 128);
        let (dirty, clean): (Vec<u64>, Vec<u64>) = found.iter().partition(|sector| *sector % 2 == 0);
        assert_eq!((dirty.len(), clean.len()), (PROBES, PROBES));
        assert_eq!((&dirty[..3], &clean[..3]), (&[2, 6, 8][..], &[1, 3, 5][..]));
    }

    #[test]
    fn probes_are_in_segments_with_unknown_checksums() {
        assert_eq!(probes(&index(), &[3], 4), [0, 1, 2]);
        assert_eq!(probes(&index(), &[7, 6], 4), [4]);
        assert_eq!(probes(&index(), &[], 4), [0; 0]);
    }
}
