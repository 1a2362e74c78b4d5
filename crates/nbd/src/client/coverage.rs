//! Records which bytes of a READ have arrived if the reply has several chunks.
//!
//! Chunks may arrive in any order but never overlap. Servers usually send chunks in order, which
//! needs one interval. A reply with more than [`INTERVALS_MAX`] separate intervals is refused, to
//! limit memory. Units are bytes.

/// Maximum number of separate intervals in the chunks of a reply.
pub(super) const INTERVALS_MAX: usize = 1024;

/// The bytes of a READ that have arrived: half-open intervals, ascending and neither overlapping
/// nor adjacent.
#[derive(Debug, Default)]
pub(super) struct Coverage(Vec<(u64, u64)>);

/// Why a reply chunk contradicts the earlier chunks.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Misfit {
    Overlap,
    TooScattered,
}

impl Coverage {
    /// Adds the non-empty interval `start..end`.
    pub(super) fn add(&mut self, start: u64, end: u64) -> Result<(), Misfit> {
        assert!(start < end, "a chunk was checked to carry bytes");
        let at = self.0.partition_point(|&(_, other_end)| other_end <= start);
        if self.0.get(at).is_some_and(|&(next_start, _)| next_start < end) {
            return Err(Misfit::Overlap);
        }
        let joins_left = at > 0 && self.0[at - 1].1 == start;
        let joins_right = self.0.get(at).is_some_and(|&(next_start, _)| next_start == end);
        match (joins_left, joins_right) {
            (true, true) => self.0[at - 1].1 = self.0.remove(at).1,
            (true, false) => self.0[at - 1].1 = end,
            (false, true) => self.0[at].0 = start,
            (false, false) if self.0.len() == INTERVALS_MAX => return Err(Misfit::TooScattered),
            (false, false) => self.0.insert(at, (start, end)),
        }
        Ok(())
    }

    /// Returns true if the added intervals cover exactly `start..end`.
    pub(super) fn is_exactly(&self, start: u64, end: u64) -> bool {
        self.0 == [(start, end)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_order_merges_and_overlap_is_seen() {
        let mut coverage = Coverage::default();
        for (start, end) in [(8, 12), (0, 4), (12, 16), (4, 8)] {
            assert_eq!(coverage.add(start, end), Ok(()));
        }
        assert!(coverage.is_exactly(0, 16));
        for (start, end) in [(0, 1), (15, 17), (0, 100), (3, 5)] {
            assert_eq!(coverage.add(start, end), Err(Misfit::Overlap), "{start}..{end}");
        }
        assert_eq!(coverage.add(16, 17), Ok(()));
    }

    #[test]
    fn scatter_is_bounded() {
        let mut coverage = Coverage::default();
        for i in 0..INTERVALS_MAX as u64 {
            assert_eq!(coverage.add(i * 2, i * 2 + 1), Ok(()));
        }
        assert_eq!(coverage.add(1 << 20, (1 << 20) + 1), Err(Misfit::TooScattered));
        assert_eq!(coverage.add(1, 2), Ok(()), "filling a gap needs no memory");
    }
}
