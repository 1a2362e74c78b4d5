//! Finds the latency threshold of a datastore from its throughput.
//!
//! As the number of I/Os in a datastore grows, its throughput rises first, and then its latency.
//! The knee is the lowest latency at which nine tenths of the maximum throughput were reached. The
//! automatic threshold of Storage I/O Control is the same point. The knee is known only after the
//! datastore was measured at twice the knee's latency with hardly more throughput. Before that,
//! more load might still give more throughput. hob injects no load: the guests' own I/O is the
//! measurement. Arrays change, so the result is dropped after [`VALID_NS`] and measured again under
//! the initial threshold.

use crate::units::Instant;

/// Time for which a measured knee is valid, nanoseconds.
const VALID_NS: u64 = 600_000_000_000;

/// Part of the maximum throughput that the datastore reaches at the knee, per mille.
const REACHED_PERMILLE: u64 = 900;

/// Number of latency classes per doubling of the latency, starting at 2^[`SHORTEST_LOG2`]
/// nanoseconds (0.13 ms).
const CLASSES_A_DOUBLING: u32 = 4;
const SHORTEST_LOG2: u32 = 17;
const CLASSES: usize = 80;

/// Measurements of one datastore's throughput and latency.
#[derive(Clone, Debug)]
pub(super) struct Knee {
    /// For each latency class, the highest and second-highest rate of a measuring interval, units
    /// per second. The second-highest rate is used, since one interval may be an outlier.
    best: [[u32; 2]; CLASSES],
    since: Option<Instant>,
}

impl Default for Knee {
    fn default() -> Self {
        Knee { best: [[0; 2]; CLASSES], since: None }
    }
}

impl Knee {
    /// Records the rate (units per second) and mean latency of a measuring interval.
    pub(super) fn note(&mut self, now: Instant, rate: u32, latency_ns: u64) {
        if now - *self.since.get_or_insert(now) >= VALID_NS {
            *self = Knee { since: Some(now), ..Knee::default() };
        }
        let [most, second] = &mut self.best[class_of(latency_ns)];
        if rate > *most {
            (*most, *second) = (rate, *most);
        } else {
            *second = rate.max(*second);
        }
    }

    /// Returns the knee's latency in nanoseconds; `None` if the knee is not known.
    pub(super) fn latency_ns(&self) -> Option<u64> {
        let rates = || self.best.iter().map(|[_, second]| u64::from(*second));
        let most = rates().max().filter(|most| *most > 0)?;
        let knee = rates().position(|rate| rate * 1000 >= most * REACHED_PERMILLE)?;
        let is_beyond = rates().skip(knee + CLASSES_A_DOUBLING as usize).any(|rate| rate > 0);
        is_beyond.then(|| end_of(knee))
    }
}

fn class_of(latency_ns: u64) -> usize {
    let latency_ns = latency_ns.max(1 << SHORTEST_LOG2);
    let doublings = latency_ns.ilog2() - SHORTEST_LOG2;
    // Each doubling has four linear classes, which is accurate enough and needs no logarithm.
    let quarter = (latency_ns >> (latency_ns.ilog2() - 2)) as u32 & 3;
    ((doublings * CLASSES_A_DOUBLING + quarter) as usize).min(CLASSES - 1)
}

/// Returns the upper end of a latency class, nanoseconds.
fn end_of(class: usize) -> u64 {
    let (doublings, quarter) = (class as u32 / CLASSES_A_DOUBLING, class as u64 % 4);
    (5 + quarter) << (SHORTEST_LOG2 + doublings - 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Records two intervals of a datastore with a capacity of `capacity` units a second and a
    /// minimum latency of 5 ms, with `depth` I/Os in flight.
    fn show(knee: &mut Knee, now: &mut Instant, capacity: u64, depth: u64) {
        let rate = (depth * 200).min(capacity);
        let latency = depth * 1_000_000_000 / rate;
        for _ in 0..2 {
            *now = *now + 250 * MS;
            knee.note(*now, rate as u32, latency);
        }
    }

    #[test]
    fn classes_hold_their_latencies() {
        for latency in [0, 1 << 17, 200_000, MS, 5 * MS, 30 * MS, 500 * MS] {
            let end = end_of(class_of(latency));
            assert!(latency < end && (latency < 1 << 17 || end <= latency * 3 / 2), "{latency} {end}");
        }
        assert_eq!(class_of(u64::MAX), CLASSES - 1);
    }

    #[test]
    fn it_is_known_when_more_load_brings_no_more() {
        let (mut knee, mut now) = (Knee::default(), Instant(0));
        for depth in [1, 2, 5, 10] {
            show(&mut knee, &mut now, 2000, depth);
            assert_eq!(knee.latency_ns(), None, "depth {depth}: who knows what it can do");
        }
        for depth in [15, 20, 40] {
            show(&mut knee, &mut now, 2000, depth);
        }
        let latency = knee.latency_ns().expect("twenty milliseconds bring no more than five");
        assert!((5 * MS..7 * MS).contains(&latency), "{latency}");
        // Later low load does not change the result.
        (1..4).for_each(|depth| show(&mut knee, &mut now, 2000, depth));
        assert_eq!(knee.latency_ns(), Some(latency));
    }

    #[test]
    fn one_odd_epoch_says_nothing() {
        let (mut knee, mut now) = (Knee::default(), Instant(0));
        [5, 10, 20, 40].iter().for_each(|depth| show(&mut knee, &mut now, 2000, *depth));
        let before = knee.latency_ns();
        knee.note(now, 20_000, MS);
        assert_eq!(knee.latency_ns(), before);
    }

    #[test]
    fn it_is_found_out_again_now_and_then() {
        let (mut knee, mut now) = (Knee::default(), Instant(0));
        [5, 10, 20, 40].iter().for_each(|depth| show(&mut knee, &mut now, 2000, *depth));
        now = now + VALID_NS;
        show(&mut knee, &mut now, 8000, 10);
        assert_eq!(knee.latency_ns(), None);
        [20, 40, 80, 160].iter().for_each(|depth| show(&mut knee, &mut now, 8000, *depth));
        assert!(knee.latency_ns().is_some_and(|latency| latency < 7 * MS));
    }
}
