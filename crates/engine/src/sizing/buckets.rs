//! A histogram of accesses by stack distance: the number of different blocks used since the
//! previous access to the same block. The width of a bucket is at most 1/128 of its distances.

use std::num::NonZeroU16;

const SUB_BITS: u32 = 7;
const SUB: u64 = 1 << SUB_BITS;
/// Distances of at least 2 to this power share the last bucket: 4 PiB in blocks of 4 KiB.
const DISTANCE_BITS: u32 = 40;
const BUCKETS: usize = ((DISTANCE_BITS - SUB_BITS + 1) as u64 * SUB) as usize;

/// Sums over the accesses whose stack distances are in one range.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bucket {
    /// Total weight of the accesses.
    pub(super) weight: f64,
    /// Sum over the accesses of their weight times the weight of all accesses to the same block.
    pub(super) leverage: f64,
}

/// Number of a bucket: its index plus one, so that an `Option` of it needs no additional space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BucketNo(NonZeroU16);

impl BucketNo {
    /// Number of the bucket with the smallest distances.
    pub(super) const FIRST: BucketNo = BucketNo(NonZeroU16::MIN);
}

/// A histogram of stack distances.
#[derive(Clone, Debug)]
pub(super) struct Buckets(Box<[Bucket]>);

impl Buckets {
    pub(super) fn new() -> Self {
        Buckets(vec![Bucket::default(); BUCKETS].into_boxed_slice())
    }

    pub(super) fn bucket_of(distance: u64) -> BucketNo {
        BucketNo(NonZeroU16::MIN.saturating_add(bucket_of(distance) as u16))
    }

    #[inline]
    pub(super) fn add(&mut self, bucket: BucketNo, more: Bucket) {
        let bucket = &mut self.0[usize::from(bucket.0.get() - 1)];
        bucket.weight += more.weight;
        bucket.leverage += more.leverage;
    }

    /// Returns the buckets with any weight: the smallest and largest distance, and the sums.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64, Bucket)> + '_ {
        let used = self.0.iter().enumerate().filter(|(_, bucket)| bucket.weight + bucket.leverage > 0.0);
        used.map(|(i, bucket)| (lowest_of(i), lowest_of(i + 1) - 1, *bucket))
    }

    pub(super) fn bytes(&self) -> u64 {
        size_of_val(&*self.0) as u64
    }
}

#[inline]
fn bucket_of(distance: u64) -> usize {
    let distance = distance.min((1 << DISTANCE_BITS) - 1);
    if distance < SUB {
        return distance as usize;
    }
    let octave = distance.ilog2() - SUB_BITS;
    (u64::from(octave) * SUB + (distance >> octave)) as usize
}

fn lowest_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    match (bucket / SUB).saturating_sub(1) {
        0 => bucket,
        octave => (SUB + bucket % SUB) << octave,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_distance_lies_in_its_bucket() {
        let near = |d: u64| [d - 1, d, d + 1];
        for distance in (1..DISTANCE_BITS).flat_map(|bits| near(1 << bits)).chain([255, 511, 513, 12_345_678])
        {
            let distance = distance.min((1 << DISTANCE_BITS) - 1);
            let bucket = bucket_of(distance);
            assert!((lowest_of(bucket)..lowest_of(bucket + 1)).contains(&distance), "{distance}");
            let width = lowest_of(bucket + 1) - lowest_of(bucket);
            assert!(width == 1 || width * SUB <= distance, "{distance} in a bucket of {width}");
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert_eq!(lowest_of(BUCKETS), 1 << DISTANCE_BITS);
    }
}
