//! Caches that the daemon has ended, either by removing them, or by replacing them after a failure
//! of their device. If that device refused to free their segments, the ended caches are still on
//! flash after the next start. Their data is older than the data of the backing. So hob must not
//! use ended caches, and does not list them as orphans (docs/decisions/0064).

use std::collections::BTreeMap;

use hob_storage::pool::OwnerId;

use super::Inner;
use crate::state::{CacheOwner, CacheSpec, EndedCache, State};

/// Maximum number of ended caches that hob remembers.
const ENDED_MAX: usize = 1000;

/// The ended caches, with the names of their pools.
#[derive(Debug, Default)]
pub(in crate::services) struct EndedCaches {
    /// Owner id and pool of each ended cache, the oldest first.
    ended: Vec<(OwnerId, String)>,
    /// Caches that a saved state had, with their pools. When no disk has such a cache any more, hob
    /// moves the cache to `ended`.
    saved: BTreeMap<OwnerId, String>,
}

impl EndedCaches {
    /// Returns the ended caches of a saved state.
    pub(in crate::services) fn restore(kept: &State) -> EndedCaches {
        let ended = kept.ended_caches.iter().map(|cache| (OwnerId(cache.owner.0), cache.pool.clone()));
        let specs = kept.disks.iter().filter_map(|disk| disk.cache.as_ref());
        EndedCaches { ended: ended.collect(), saved: owners(specs) }
    }

    /// Returns the ended caches for the state file.
    pub(super) fn to_save(&self) -> Vec<EndedCache> {
        let saved =
            |(owner, pool): &(OwnerId, String)| EndedCache { pool: pool.clone(), owner: CacheOwner(owner.0) };
        self.ended.iter().map(saved).collect()
    }

    /// Records that a cache of no disk has ended.
    pub(in crate::services) fn add(&mut self, owner: OwnerId, pool: &str) {
        self.ended.push((owner, pool.to_owned()));
    }

    /// Forgets that the saved state has this cache, because the addition of the disk that should
    /// adopt the cache has failed.
    pub(in crate::services) fn forget(&mut self, owner: OwnerId) {
        self.saved.remove(&owner);
    }

    /// Returns the ended caches of a pool.
    pub(in crate::services) fn of_pool(&self, pool: &str) -> Vec<OwnerId> {
        self.ended.iter().filter(|(_, of)| *of == pool).map(|(owner, _)| *owner).collect()
    }

    /// Forgets those ended caches of a pool that have no segments any more. The caller calls this
    /// function only if all devices of the pool are present and `owners` was read from the devices
    /// after they were opened. Later, a device that refuses writes may still have segments that hob
    /// has freed in memory.
    pub(in crate::services) fn keep_those_of(&mut self, pool: &str, owners: &[(OwnerId, u64)]) {
        self.ended.retain(|(ended, of)| of != pool || owners.iter().any(|(owner, _)| owner == ended));
    }

    /// Records the caches that disks have now. `all` has the caches of all disks, and `saved` those
    /// of the disks in the state that is about to be saved. A cache that was in an earlier saved
    /// state, and that no disk has now, has ended. A disk that is being added is not saved yet: if
    /// the addition fails, the cache that the disk was to adopt is an orphan again.
    fn note(&mut self, all: &BTreeMap<OwnerId, String>, saved: BTreeMap<OwnerId, String>) {
        let before = std::mem::take(&mut self.saved);
        for (owner, pool) in before.into_iter().chain(saved) {
            match all.contains_key(&owner) {
                true => _ = self.saved.insert(owner, pool),
                false => self.ended.push((owner, pool)),
            }
        }
        self.ended.retain(|(owner, _)| !all.contains_key(owner));
        let beyond = self.ended.len().saturating_sub(ENDED_MAX);
        self.ended.drain(..beyond);
    }
}

impl Inner {
    /// Records the caches that have ended since the state was last saved.
    pub(super) fn note_ended_caches(&mut self) {
        let all = owners(self.disks.values().filter_map(|disk| disk.cache()));
        let saved = owners(self.saved_disks().filter_map(|disk| disk.cache()));
        self.ended.note(&all, saved);
    }

    /// Returns the owner ids of all configured and all ended caches. Every other persistent cache
    /// in a pool is an orphan.
    pub(in crate::services) fn settled_owners(&self) -> Vec<OwnerId> {
        let ended = self.ended.ended.iter().map(|(owner, _)| *owner);
        self.known_owners().into_iter().chain(ended).collect()
    }
}

fn owners<'a>(specs: impl Iterator<Item = &'a CacheSpec>) -> BTreeMap<OwnerId, String> {
    let persistent = specs.filter_map(|spec| Some((OwnerId(spec.journal?.owner.0), spec.pool.clone())));
    persistent.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caches(owners: &[u128]) -> BTreeMap<OwnerId, String> {
        owners.iter().map(|owner| (OwnerId(*owner), "pool".to_owned())).collect()
    }

    #[test]
    fn a_cache_ends_when_no_disk_has_it_any_more() {
        let mut of = EndedCaches::default();
        of.note(&caches(&[1, 2, 3]), caches(&[1, 2]));
        assert_eq!(of.of_pool("pool"), []);
        // The disk of cache 2 is being removed, and is not saved any more.
        of.note(&caches(&[1, 2, 3]), caches(&[1]));
        assert_eq!(of.of_pool("pool"), []);
        // The disk of cache 3 was being added, and that failed.
        of.note(&caches(&[1]), caches(&[1]));
        assert_eq!(of.of_pool("pool"), [OwnerId(2)]);
        assert_eq!(of.to_save().len(), 1);
        // A failed removal brings a cache back.
        of.note(&caches(&[1, 2]), caches(&[1, 2]));
        assert_eq!(of.of_pool("pool"), []);
        of.note(&caches(&[]), caches(&[]));
        of.keep_those_of("other", &[]);
        assert_eq!(of.of_pool("pool"), [OwnerId(1), OwnerId(2)]);
        of.keep_those_of("pool", &[(OwnerId(2), 5)]);
        assert_eq!(of.of_pool("pool"), [OwnerId(2)]);
    }

    #[test]
    fn a_cache_that_was_not_adopted_after_all_has_not_ended() {
        let mut of = EndedCaches::default();
        of.note(&caches(&[1, 2]), caches(&[1, 2]));
        of.forget(OwnerId(2));
        of.note(&caches(&[1]), caches(&[1]));
        assert_eq!(of.of_pool("pool"), []);
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let mut of = EndedCaches::default();
        for owner in 0..ENDED_MAX as u128 + 2 {
            of.note(&caches(&[ENDED_MAX as u128 * 2 - owner]), caches(&[ENDED_MAX as u128 * 2 - owner]));
        }
        let ended = of.of_pool("pool");
        assert_eq!((ended.len(), ended[0]), (ENDED_MAX, OwnerId(ENDED_MAX as u128 * 2 - 1)));
    }
}
