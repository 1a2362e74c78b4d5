//! The clock by which leases count, and the moment that shards compare it with.

use std::sync::atomic::{AtomicU64, Ordering};

use hob_engine::units::Instant;
use hob_storage::ring::Gate;

/// This host's clock for leases. It continues while the host sleeps, and nothing sets it.
pub(crate) fn now() -> Instant {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Instant(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// A lease, as shards see it. It only ends once.
#[derive(Debug)]
pub(crate) struct LeaseClock {
    /// Not at this moment any more; 0 when it is over.
    until: AtomicU64,
    /// Time after which unanswered requests to a backing are called back, nanoseconds.
    patience_ns: u64,
}

impl LeaseClock {
    /// A lease that is valid until then. Other hosts wait `settle_ns` after its end before they
    /// take its disks.
    ///
    /// Half of that time is for slow responses of backings; requests in flight have the other half.
    pub(crate) fn new(until: Instant, settle_ns: u64) -> LeaseClock {
        LeaseClock { until: AtomicU64::new(until.0), patience_ns: settle_ns / 2 }
    }

    /// It holds until then, unless it is over.
    pub(super) fn extend(&self, until: Instant) {
        let _ = self.until.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |known| {
            (known != 0).then_some(until.0.max(known))
        });
    }

    /// It is over.
    pub(super) fn end(&self) {
        self.until.store(0, Ordering::SeqCst);
    }

    /// Returns true if requests may be acknowledged.
    pub(crate) fn is_valid(&self, now: Instant) -> bool {
        now.0 < self.until.load(Ordering::SeqCst)
    }

    /// The time from which requests in flight must not change a backing any more.
    pub(crate) fn calls_back_at(&self) -> Instant {
        match self.until.load(Ordering::SeqCst) {
            0 => Instant(0),
            until => Instant(until + self.patience_ns),
        }
    }

    /// How much longer, nanoseconds.
    pub(crate) fn left_ns(&self, now: Instant) -> u64 {
        Instant(self.until.load(Ordering::SeqCst)).nanos_since(now)
    }
}

impl Gate for LeaseClock {
    fn is_open(&self) -> bool {
        self.is_valid(now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_that_is_over_stays_so() {
        let lease = LeaseClock::new(Instant(10), 8);
        assert_eq!(lease.calls_back_at(), Instant(14));
        assert!(lease.is_valid(Instant(9)) && !lease.is_valid(Instant(10)));
        lease.extend(Instant(20));
        lease.extend(Instant(15));
        assert!(lease.is_valid(Instant(19)) && !lease.is_valid(Instant(20)));
        assert_eq!(lease.left_ns(Instant(5)), 15);
        lease.end();
        lease.extend(Instant(30));
        assert!(!lease.is_valid(Instant(1)));
        assert_eq!((lease.left_ns(Instant(1)), lease.calls_back_at()), (0, Instant(0)));
    }

    #[test]
    fn the_clock_goes_on() {
        let before = now();
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(now() - before >= 2_000_000);
    }
}
