//! The memory of recoveries. At the start, hob recovers all persistent caches at the same time, and
//! each recovery takes its memory only little by little. So a recovery reserves its memory before
//! it begins.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hob_control::Size;

use crate::api_error::{Result, conflict};
use crate::host_memory::HostMemory;
use crate::services::pools::CacheMemory;

/// The memory that is reserved for recoveries in progress.
#[derive(Debug, Default)]
pub(super) struct RecoveryMemory {
    reserved: Mutex<Reserved>,
}

/// Number of recoveries in progress, and their memory in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Reserved {
    /// Number of recoveries in progress.
    recoveries: usize,
    /// Available memory before the first of these recoveries began.
    available: u64,
    /// The part of `available` that is reserved for these recoveries, and for the indexes of the
    /// caches that were recovered since then.
    bytes: u64,
}

impl RecoveryMemory {
    fn lock(&self) -> MutexGuard<'_, Reserved> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves the memory of a cache until its recovery ends. Returns an error if the memory of
    /// the host is too small for this recovery in addition to the other recoveries in progress.
    pub(super) fn reserve(
        self: &Arc<RecoveryMemory>,
        host: HostMemory,
        memory: CacheMemory,
    ) -> Result<Reservation> {
        let mut reserved = self.lock();
        if reserved.recoveries == 0 {
            *reserved = Reserved { available: host.available, ..Reserved::default() };
        }
        // The reserved memory is partly in use already, so the host has less available memory now.
        let free = host.available.min(reserved.available.saturating_sub(reserved.bytes));
        if memory.total() > free {
            let human = |bytes| Size(bytes).human();
            let besides = match reserved.bytes {
                0 => String::new(),
                others => format!(" besides {} for the recovery of other caches", human(others)),
            };
            return Err(conflict!(
                "its index and recovery need {} of memory, and this host allows {}{besides}",
                human(memory.total()),
                human(free)
            ));
        }
        reserved.recoveries += 1;
        reserved.bytes = reserved.bytes.saturating_add(memory.total());
        Ok(Reservation { of: self.clone(), memory, kept: 0 })
    }
}

/// The reserved memory of one recovery. Dropping this value ends the reservation.
#[derive(Debug)]
pub(super) struct Reservation {
    of: Arc<RecoveryMemory>,
    memory: CacheMemory,
    /// Memory that the recovered cache keeps, bytes.
    kept: u64,
}

impl Reservation {
    /// Ends the reservation of a cache that was recovered: its index keeps its memory.
    pub(super) fn keep_index(mut self) {
        self.kept = self.memory.index;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut reserved = self.of.lock();
        reserved.recoveries = reserved.recoveries.saturating_sub(1);
        reserved.bytes = reserved.bytes.saturating_sub(self.memory.total().saturating_sub(self.kept));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CACHE: CacheMemory = CacheMemory { index: 24, recovery: 17 };

    fn host(available: u64) -> HostMemory {
        HostMemory { total: 1000, available }
    }

    #[test]
    fn the_memory_of_all_recoveries_must_fit() {
        let memory = Arc::new(RecoveryMemory::default());
        assert!(memory.reserve(host(40), CACHE).is_err());
        let first = memory.reserve(host(82), CACHE).unwrap();
        // The first recovery has not used its memory yet.
        let second = memory.reserve(host(82), CACHE).unwrap();
        let error = memory.reserve(host(82), CACHE).unwrap_err().to_string();
        assert!(error.contains("need 41 B of memory, and this host allows 0 B"), "{error}");
        assert!(error.contains("the recovery of other caches"), "{error}");
        drop(first);
        let third = memory.reserve(host(82), CACHE).unwrap();
        drop((second, third));
        assert!(memory.reserve(host(41), CACHE).is_ok(), "all reservations have ended");
    }

    #[test]
    fn memory_of_running_recoveries_is_not_counted_twice() {
        let memory = Arc::new(RecoveryMemory::default());
        let _first = memory.reserve(host(82), CACHE).unwrap();
        assert!(memory.reserve(host(41), CACHE).is_ok(), "the first one has taken its memory");
        assert!(memory.reserve(host(40), CACHE).is_err(), "another program has taken memory");
    }

    #[test]
    fn the_index_of_a_recovered_cache_keeps_its_memory() {
        let memory = Arc::new(RecoveryMemory::default());
        let first = memory.reserve(host(106), CACHE).unwrap();
        let second = memory.reserve(host(106), CACHE).unwrap();
        assert!(memory.reserve(host(106), CACHE).is_err());
        first.keep_index();
        let third = memory.reserve(host(82), CACHE).unwrap();
        assert!(memory.reserve(host(82), CACHE).is_err(), "24 + 41 + 41 are reserved");
        drop((second, third));
        assert!(memory.reserve(host(41), CACHE).is_ok(), "no recovery is in progress");
    }
}
