//! Search for the bucket of a value without branches that depend on the value. Such branches are
//! often mispredicted: a binary search would take longer than the rest of a record.
//!
//! A table gives the first bucket for each sign and bit length of a value. Then the value is
//! compared with the next [`NEAR`] bounds.

/// Maximum number of bounds between two powers of two.
const NEAR: usize = 4;

/// Number of bit lengths of a 64-bit number, 0 included.
const LENGTHS: usize = 65;

/// The bounds of a histogram's buckets, for up to `BUCKETS` buckets.
pub(super) struct BucketSearch<const BUCKETS: usize> {
    /// Number of bounds below every value of a sign (0: not negative) and bit length.
    first: [[u8; LENGTHS]; 2],
    /// The bounds, and then the largest integer, which is not below any value.
    bounds: [[i64; NEAR]; BUCKETS],
}

impl<const BUCKETS: usize> BucketSearch<BUCKETS> {
    /// Prepares the search among `bounds`: the largest value of each bucket except the last, in
    /// ascending order.
    pub(super) const fn new(bounds: &[i64]) -> Self {
        let mut search = BucketSearch { first: [[0; LENGTHS]; 2], bounds: [[i64::MAX; NEAR]; BUCKETS] };
        let mut length = 0;
        while length < LENGTHS {
            let (least, most) = magnitudes(length);
            let ranges = [(least, most), (most.saturating_neg(), least.saturating_neg())];
            let mut sign = 0;
            while sign < 2 {
                let (lowest, highest) = ranges[sign];
                let first = number_below(bounds, lowest);
                assert!(number_below(bounds, highest) - first <= NEAR, "too many bounds are near");
                search.first[sign][length] = first as u8;
                sign += 1;
            }
            length += 1;
        }
        let mut at = 0;
        while at < BUCKETS {
            let mut near = 0;
            while near < NEAR && at + near < bounds.len() {
                search.bounds[at][near] = bounds[at + near];
                near += 1;
            }
            at += 1;
        }
        search
    }

    /// Returns the number of bounds below `value`, which is the index of its bucket.
    #[inline]
    pub(super) fn bucket_of(&self, value: i64) -> usize {
        let length = i64::BITS - value.unsigned_abs().leading_zeros();
        let first = usize::from(self.first[usize::from(value < 0)][length as usize]);
        first + self.bounds[first].iter().map(|bound| usize::from(*bound < value)).sum::<usize>()
    }
}

/// Returns the least and the largest number of this bit length, at most `i64::MAX`.
const fn magnitudes(length: usize) -> (i64, i64) {
    match length {
        0 => (0, 0),
        64 => (i64::MAX, i64::MAX),
        _ => (1 << (length - 1), (u64::MAX >> (64 - length)) as i64),
    }
}

const fn number_below(bounds: &[i64], value: i64) -> usize {
    let mut number = 0;
    while number < bounds.len() && bounds[number] < value {
        number += 1;
    }
    number
}
