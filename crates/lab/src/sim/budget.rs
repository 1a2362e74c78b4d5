//! Simulates the flash write budget of a cache. The simulated time is the time of the trace's
//! requests.

use hob_engine::CacheSim;
use hob_engine::flash_budget::{FlashBudget, Member, ROUND_NS, Settings};
use hob_engine::units::{DiskId, Instant};

use super::Point;

/// The flash write budget of a simulated pool with one cache.
pub(super) struct Budget {
    settings: Settings,
    account: Option<FlashBudget>,
    /// Time at which the account divides its budget again.
    next_ns: u64,
}

impl Budget {
    /// Creates the account. For a simulation of a sample of the blocks, budget and cache size are
    /// multiplied by the sampling rate.
    pub(super) fn new(bytes_per_day: u64, point: &Point) -> Budget {
        let scaled = |bytes: u64| ((bytes as f64 * point.sample_rate) as u64).max(1);
        let settings =
            Settings { bytes_per_day: scaled(bytes_per_day), pool_bytes: scaled(point.cache_bytes) };
        Budget { settings, account: None, next_ns: 0 }
    }

    /// Charges the cache's flash writes to the account, and gives the cache a new allowance of
    /// flash writes. Does nothing if less than [`ROUND_NS`] has passed since the last charge.
    #[inline]
    pub(super) fn advance(&mut self, at_ns: u64, cache: &mut CacheSim) {
        if at_ns >= self.next_ns {
            self.round(at_ns, cache);
        }
    }

    #[cold]
    fn round(&mut self, at_ns: u64, cache: &mut CacheSim) {
        let now = Instant(at_ns);
        let settings = self.settings;
        let account = self.account.get_or_insert_with(|| FlashBudget::new(now, settings));
        let member = Member { disk: DiskId(0), weight: 1, counts: cache.flash_counts() };
        cache.allow_flash_writes(account.round(now, 0, &[member]).pop());
        self.next_ns = at_ns.saturating_add(ROUND_NS);
    }
}
