//! The recent cost of a miss of a disk: the time that a hit would have saved. hob uses this cost to
//! divide a pool among its shared caches ([`super::sharing`]).
//!
//! The cost follows the last few thousand I/Os. An I/O that waited during an outage of the backing
//! has the latency of the outage. The mean latencies here are limited, because a few such I/Os
//! would outweigh all others.

use hob_engine::stats::DeviceIoStats;

/// Minimum number of backing I/Os from which the cost is estimated.
const IOS_MIN: f64 = 64.0;

/// Number of recent I/Os that determine a mean latency. Earlier I/Os have little weight.
const IOS_KEPT: f64 = 4096.0;

/// The cost of a miss is at least the backing's latency divided by this number. A hit relieves the
/// backing even if flash is no faster than the backing.
const COST_MIN_PART: f64 = 4.0;

/// Maximum ratio of the mean latency of one period to the mean latency before. A higher mean
/// latency is reduced to this ratio.
const RISE_MAX: f64 = 4.0;

/// Maximum mean latency of one period, nanoseconds. A higher mean latency is reduced to this
/// maximum, because its I/Os waited for a device that did not answer.
const LATENCY_MAX_NS: f64 = 1e9;

/// Mean latency up to which [`RISE_MAX`] does not apply, nanoseconds.
const LATENCY_LOW_NS: f64 = 1e6;

/// The recent cost of a miss of one disk.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MissCost {
    backing: Latency,
    flash: Latency,
}

impl MissCost {
    /// Updates the latencies from the present counts of the disk's I/O. Returns the time that a hit
    /// saves: the recent latency of the backing minus that of flash, nanoseconds. Returns 0 if
    /// there were too few backing I/Os for an estimate.
    pub(super) fn update(&mut self, backing: &DeviceIoStats, flash: &DeviceIoStats) -> u64 {
        self.backing.update(backing);
        self.flash.update(flash);
        if self.backing.ios < IOS_MIN {
            return 0;
        }
        let (backing, flash) = (self.backing.mean_ns, self.flash.mean_ns);
        (backing - flash).max(backing / COST_MIN_PART).max(1.0) as u64
    }
}

/// The recent mean latency of one kind of I/O.
#[derive(Clone, Copy, Debug, Default)]
struct Latency {
    /// Number of I/Os at the previous update. The next field has the sum of their latencies.
    seen_ios: u64,
    seen_ns: u64,
    /// Number of I/Os that the mean is based on, at most [`IOS_KEPT`].
    ios: f64,
    mean_ns: f64,
}

impl Latency {
    fn update(&mut self, counts: &DeviceIoStats) {
        if counts.ios < self.seen_ios || counts.total_ns < self.seen_ns {
            // The counts were reset, or the disk was opened again.
            (self.seen_ios, self.seen_ns) = (0, 0);
        }
        let (new_ios, new_ns) = (counts.ios - self.seen_ios, counts.total_ns - self.seen_ns);
        (self.seen_ios, self.seen_ns) = (counts.ios, counts.total_ns);
        if new_ios == 0 {
            return;
        }
        let most = match self.ios < IOS_MIN {
            true => LATENCY_MAX_NS,
            false => (self.mean_ns * RISE_MAX).clamp(LATENCY_LOW_NS, LATENCY_MAX_NS),
        };
        let ios = new_ios as f64;
        let mean_ns = (new_ns as f64 / ios).min(most);
        self.mean_ns = (self.mean_ns * self.ios + mean_ns * ios) / (self.ios + ios);
        self.ios = (self.ios + ios).min(IOS_KEPT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds I/Os of this latency to the counts.
    fn add(counts: &mut DeviceIoStats, ios: u64, latency_ns: u64) {
        counts.ios += ios;
        counts.total_ns += ios * latency_ns;
    }

    #[test]
    fn few_ios_have_no_cost() {
        let (mut cost, mut backing) = (MissCost::default(), DeviceIoStats::default());
        add(&mut backing, 63, 2_000_000);
        assert_eq!(cost.update(&backing, &DeviceIoStats::default()), 0);
        add(&mut backing, 1, 2_000_000);
        assert_eq!(cost.update(&backing, &DeviceIoStats::default()), 2_000_000);
    }

    #[test]
    fn a_backing_as_fast_as_flash_costs_a_quarter() {
        let (mut cost, mut both) = (MissCost::default(), DeviceIoStats::default());
        add(&mut both, 1000, 80_000);
        assert_eq!(cost.update(&both, &both), 20_000);
    }

    #[test]
    fn requests_that_waited_for_an_outage_do_not_decide() {
        let (mut cost, mut backing) = (MissCost::default(), DeviceIoStats::default());
        let flash = DeviceIoStats::default();
        add(&mut backing, 10_000, 2_000_000);
        assert_eq!(cost.update(&backing, &flash), 2_000_000);
        // An outage of ten minutes, in which 32 requests wait.
        add(&mut backing, 32, 600_000_000_000);
        let after = cost.update(&backing, &flash);
        assert!((2_000_000..2_100_000).contains(&after), "{after}");
        // The mean since the disk was opened stays above 200 ms.
        add(&mut backing, 50_000, 2_000_000);
        let later = cost.update(&backing, &flash);
        assert!((2_000_000..2_010_000).contains(&later), "{later}");
        assert!(backing.mean_ns() > 200_000_000);
    }

    #[test]
    fn an_outage_at_the_start_is_forgotten() {
        let (mut cost, mut backing) = (MissCost::default(), DeviceIoStats::default());
        let flash = DeviceIoStats::default();
        add(&mut backing, 100, 600_000_000_000);
        assert_eq!(cost.update(&backing, &flash), 1_000_000_000);
        let mut last = 0;
        for _ in 0..30 {
            add(&mut backing, 2000, 2_000_000);
            last = cost.update(&backing, &flash);
        }
        assert!(last < 2_100_000, "{last}");
    }

    #[test]
    fn a_slower_backing_costs_more_within_some_periods() {
        let (mut cost, mut backing) = (MissCost::default(), DeviceIoStats::default());
        let flash = DeviceIoStats::default();
        add(&mut backing, 10_000, 200_000);
        assert_eq!(cost.update(&backing, &flash), 200_000);
        let mut last = 0;
        for _ in 0..15 {
            add(&mut backing, 2000, 20_000_000);
            last = cost.update(&backing, &flash);
        }
        assert!((19_000_000..=20_000_000).contains(&last), "{last}");
    }

    #[test]
    fn counts_that_were_reset_begin_at_zero() {
        let (mut cost, mut backing) = (MissCost::default(), DeviceIoStats::default());
        let flash = DeviceIoStats::default();
        add(&mut backing, 10_000, 2_000_000);
        cost.update(&backing, &flash);
        let mut backing = DeviceIoStats::default();
        add(&mut backing, 100, 2_000_000);
        assert_eq!(cost.update(&backing, &flash), 2_000_000);
    }
}
