//! The clock for leases, and the expiry time that shards compare with it.

use std::sync::atomic::{AtomicU64, Ordering};

use hob_engine::units::Instant;
use hob_storage::ring::Gate;

/// Returns the time of the lease clock. The lease clock also advances while the host is suspended,
/// and no program can set it.
pub fn now() -> Instant {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Instant(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// Expiry time of a lease, which the services set and shards read. A lease that has ended stays
/// ended.
#[derive(Debug)]
pub struct LeaseClock {
    /// Time at which the lease expires; 0 after its end.
    until: AtomicU64,
    /// Time after the expiry at which unfinished backing requests are cancelled, in nanoseconds.
    patience_ns: u64,
}

impl LeaseClock {
    /// Creates a lease that is valid until `until`. After the end of the lease, other hosts wait
    /// `settle_ns` before they acquire the disks of this host.
    ///
    /// During the first half of `settle_ns`, this host still waits for the replies to writes that
    /// it sent to a backing. Then it cancels the writes. The second half is left for writes that
    /// the backing executes in spite of the cancellation.
    pub fn new(until: Instant, settle_ns: u64) -> LeaseClock {
        LeaseClock { until: AtomicU64::new(until.0), patience_ns: settle_ns / 2 }
    }

    /// Extends the lease, unless it has ended.
    pub fn extend(&self, until: Instant) {
        let _ = self.until.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |known| {
            (known != 0).then_some(until.0.max(known))
        });
    }

    /// Ends the lease.
    pub fn end(&self) {
        self.until.store(0, Ordering::SeqCst);
    }

    /// Returns true if requests may be acknowledged.
    pub fn is_valid(&self, now: Instant) -> bool {
        now.0 < self.until.load(Ordering::SeqCst)
    }

    /// Returns the time after which requests that are in flight now must not change a backing any
    /// more, because another host may own the disk.
    pub fn calls_back_at(&self) -> Instant {
        match self.until.load(Ordering::SeqCst) {
            0 => Instant(0),
            until => Instant(until + self.patience_ns),
        }
    }

    /// Returns the time from `now` to the expiry of the lease, in nanoseconds; 0 after the expiry.
    pub fn left_ns(&self, now: Instant) -> u64 {
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
    fn the_clock_never_goes_back() {
        let before = now();
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(now() - before >= 2_000_000);
    }
}
