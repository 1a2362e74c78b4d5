//! Limits of the memory of caches: the size of an index, and the size of a memory tier. Also
//! allocates memory tiers on the shards.

use hob_control::Size;
use hob_engine::command::{MEMORY_PAGE_BYTES_MAX, MemoryConfig};
use hob_engine::units::SECTOR_BYTES;

use super::Pools;
use crate::api_error::{Result, conflict, invalid};
use crate::hardware::Area;
use crate::host_memory::{HostMemory, TIER_BYTES_MIN};
use crate::services::flash::blocking;
use crate::services::registry::{DiskEntry, DiskPhase, Inner};
use crate::state::CacheSpec;

/// Memory of the index for each block of one sector, in bytes (docs/ARCHITECTURE.md, promise 6).
const INDEX_BYTES_PER_BLOCK: u64 = 24;

/// Memory of the index for each further sector of a block, in bytes: its checksum, and its flags
/// rounded up.
const INDEX_BYTES_PER_SECTOR: u64 = 5;

/// Memory that the recovery of a persistent cache needs for each block in addition to the index, in
/// bytes (docs/INSTALL.md, Memory).
const RECOVERY_BYTES_PER_BLOCK: u64 = 17;

/// Returns the memory of the index of a cache of `cache_bytes`, in bytes. Dirty data needs more.
fn index_bytes(cache_bytes: u64, block_bytes: u64) -> u64 {
    let sectors = cache_bytes / SECTOR_BYTES;
    let blocks = cache_bytes / block_bytes.max(SECTOR_BYTES);
    let of_blocks = blocks.saturating_mul(INDEX_BYTES_PER_BLOCK);
    of_blocks.saturating_add((sectors - blocks).saturating_mul(INDEX_BYTES_PER_SECTOR))
}

/// The memory of a cache without its memory tier, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::services) struct CacheMemory {
    /// Memory of the index.
    pub(in crate::services) index: u64,
    /// Memory that only the recovery of the cache needs, until it ends. 0 for a volatile cache.
    pub(in crate::services) recovery: u64,
}

impl CacheMemory {
    /// Returns the memory of a cache with this number of data segments.
    pub(in crate::services) fn new(spec: &CacheSpec, segments: u64, segment_bytes: u64) -> CacheMemory {
        let (bytes, block_bytes) = (segments.saturating_mul(segment_bytes), spec.block_size.bytes());
        let blocks = if spec.journal.is_some() { bytes / block_bytes.max(SECTOR_BYTES) } else { 0 };
        CacheMemory {
            index: index_bytes(bytes, block_bytes),
            recovery: blocks.saturating_mul(RECOVERY_BYTES_PER_BLOCK),
        }
    }

    /// Returns the most memory that the cache needs at any time.
    pub(in crate::services) fn total(self) -> u64 {
        self.index.saturating_add(self.recovery)
    }
}

/// A new cache, or a change of a cache, for which hob checks whether this host has enough memory.
struct IndexChange {
    /// Size of the cache after the change.
    bytes: u64,
    block_bytes: u64,
    needs: CacheMemory,
    /// The memory of the present cache.
    has: CacheMemory,
    /// Memory that the recovery of all other caches needs, bytes.
    others: u64,
}

/// Refuses a cache whose index does not fit in the available memory of this host. After a restart,
/// hob recovers all persistent caches at the same time, which must also fit. A change that needs no
/// more memory is allowed.
fn check_index_of(host: HostMemory, change: &IndexChange) -> Result<()> {
    let IndexChange { bytes, block_bytes, needs, has, others } = *change;
    let recovery = needs.recovery.saturating_add(others);
    let allowed = host.available.saturating_add(has.index);
    if needs.total() <= has.total() || needs.index.saturating_add(recovery) <= allowed {
        return Ok(());
    }
    let human = |bytes| Size(bytes).human();
    let and_recovery = match recovery {
        0 => String::new(),
        _ => format!(", the recovery of all persistent caches after a restart {} more", human(recovery)),
    };
    Err(conflict!(
        "the index of a cache of {} in blocks of {} needs {} of memory{and_recovery}, and this host allows {}",
        Size(bytes),
        Size(block_bytes),
        human(needs.index),
        human(allowed)
    )
    .hint("choose a smaller cache or larger blocks (--block-size), or free memory"))
}

/// Returns the configuration of a cache's memory tier, if it has one.
fn config(spec: &CacheSpec) -> Option<MemoryConfig> {
    let page_bytes = spec.block_size.bytes().min(u64::from(MEMORY_PAGE_BYTES_MAX)) as u32;
    (spec.ram.bytes() > 0).then_some(MemoryConfig { bytes: spec.ram.bytes(), page_bytes })
}

impl Pools {
    /// Allocates or changes the memory tier of a disk's cache on its shard. Returns a note if this
    /// fails.
    pub(in crate::services) async fn fit_memory(&self, name: &str) -> Result<Vec<String>> {
        let (shard, id, wanted, has) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let DiskPhase::Online(shard) = &disk.phase else { return Ok(Vec::new()) };
            let wanted = disk.cache().filter(|_| disk.has_cache).and_then(config);
            (shard.clone(), disk.id, wanted, disk.memory)
        };
        if wanted == has {
            return Ok(Vec::new());
        }
        // The old memory is released first, because both may not fit.
        if has.is_some() {
            let old = shard.set_memory(id, None).await?;
            self.registry.inner().disk_mut(name)?.memory = None;
            blocking(move || drop(old)).await?;
        }
        let Some(wanted) = wanted else { return Ok(Vec::new()) };
        let area = blocking(move || Area::new(wanted.bytes)).await?;
        let set = match area {
            Ok(area) => shard.set_memory(id, Some((wanted, area))).await.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        match set {
            Ok(_) => {
                self.registry.inner().disk_mut(name)?.memory = Some(wanted);
                Ok(Vec::new())
            }
            Err(why) => {
                tracing::warn!("disk {name}: its cache has no memory tier: {why}");
                Ok(vec![format!("the cache has no memory tier: {why}")])
            }
        }
    }
}

impl Inner {
    /// Refuses a cache of a disk if its index, and the recovery of all persistent caches after a
    /// restart, do not fit in the available memory of this host. `segments` is the number of data
    /// segments that the cache would have. `before` has the configuration and the number of
    /// segments of the present cache, if there is one.
    pub(in crate::services) fn check_index(
        &self,
        name: &str,
        spec: &CacheSpec,
        segments: u64,
        before: Option<(&CacheSpec, u64)>,
        segment_bytes: u64,
    ) -> Result<()> {
        let has = before.map(|(spec, held)| CacheMemory::new(spec, held, segment_bytes));
        let change = IndexChange {
            bytes: segments.saturating_mul(segment_bytes),
            block_bytes: spec.block_size.bytes(),
            needs: CacheMemory::new(spec, segments, segment_bytes),
            has: has.unwrap_or_default(),
            others: self.recovery_bytes_besides(name),
        };
        check_index_of(HostMemory::look(), &change)
    }

    /// Returns the memory that the recovery of all caches needs in addition to their indexes,
    /// except the cache of disk `name`, bytes.
    fn recovery_bytes_besides(&self, name: &str) -> u64 {
        let of = |disk: &DiskEntry| {
            let spec = disk.cache()?;
            let segment_bytes = self.pool(&spec.pool).ok()?.segment_bytes;
            Some(CacheMemory::new(spec, disk.held.len() as u64, segment_bytes).recovery)
        };
        let others = self.disks.values().filter(|disk| disk.wanted.name != name);
        others.filter_map(of).fold(0, u64::saturating_add)
    }

    /// Checks whether this host has enough memory for a disk's cache.
    pub(in crate::services) fn check_memory(&self, name: &str, spec: &CacheSpec) -> Result<()> {
        self.check_memory_of(HostMemory::look(), name, spec)
    }

    fn check_memory_of(&self, machine: HostMemory, name: &str, spec: &CacheSpec) -> Result<()> {
        let wanted = spec.ram.bytes();
        let human = |bytes| Size(bytes).human();
        if wanted == 0 {
            return Ok(());
        }
        if wanted < TIER_BYTES_MIN {
            return Err(invalid!(
                "the memory tier (ram) must be 0 or at least {}, not {}",
                human(TIER_BYTES_MIN),
                spec.ram
            ));
        }
        let of = |other: &&DiskEntry| other.wanted.name != name;
        let others: u64 =
            self.disks.values().filter(of).filter_map(|disk| disk.cache()).map(|c| c.ram.bytes()).sum();
        if others.saturating_add(wanted) > machine.total / 2 {
            return Err(invalid!(
                "a memory tier of {} and other memory tiers of {} are more than half of this host's \
                memory of {}",
                human(wanted),
                human(others),
                human(machine.total)
            )
            .hint("ask for less"));
        }
        let has = self.disks.get(name).and_then(|disk| disk.memory).map_or(0, |memory| memory.bytes);
        if wanted > has.saturating_add(machine.available) {
            return Err(conflict!(
                "this host has {} of free memory, and the memory tier needs {}",
                human(machine.available),
                human(wanted)
            )
            .hint("choose a smaller memory tier, or free memory"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hob_control::CacheSettings;

    use crate::cache_settings::{CacheContext, new_spec};
    use crate::state::JournalSpec;

    const MACHINE: HostMemory = HostMemory { total: 16 << 30, available: 3 << 30 };

    fn spec(ram: &str) -> CacheSpec {
        let settings = CacheSettings { ram: Some(ram.parse().unwrap()), ..CacheSettings::default() };
        let context = CacheContext { segment_bytes: 1 << 20, devices: 1, peers: 0 };
        new_spec("p".into(), Some(Size(1 << 20)), &settings, context).unwrap().0
    }

    #[test]
    fn senseless_sizes_are_refused_in_words() {
        let check =
            |ram| Inner::default().check_memory_of(MACHINE, "vm", &spec(ram)).map_err(|r| r.to_string());
        assert_eq!(check("0"), Ok(()));
        assert_eq!(check("1M"), Ok(()));
        assert_eq!(check("3G"), Ok(()));
        assert!(check("1023K").unwrap_err().contains("at least 1"), "{:?}", check("1023K"));
        assert!(check("9G").unwrap_err().contains("more than half"), "{:?}", check("9G"));
        assert!(check("4G").unwrap_err().contains("free"), "{:?}", check("4G"));
    }

    #[test]
    fn an_index_takes_24_bytes_per_block_and_less_for_large_blocks() {
        assert_eq!(index_bytes(1 << 30, 4096), 6 << 20);
        assert_eq!(index_bytes(7 << 40, 4096), 42 << 30);
        assert_eq!(index_bytes(1 << 30, 64 << 10), (24 + 15 * 5) << 14);
        assert_eq!(index_bytes(0, 4096), 0);
        // The largest cache that a command can ask for.
        assert!(index_bytes(1 << 60, 4096) > 1 << 52);
    }

    #[test]
    fn a_cache_whose_index_does_not_fit_is_refused_with_both_numbers() {
        let check = |bytes, block_bytes, has| {
            let needs = CacheMemory { index: index_bytes(bytes, block_bytes), recovery: 0 };
            let has = CacheMemory { index: has, recovery: 0 };
            let change = IndexChange { bytes, block_bytes, needs, has, others: 0 };
            check_index_of(MACHINE, &change).map_err(|error| error.to_string())
        };
        assert_eq!(check(512 << 30, 4096, 0), Ok(()), "exactly the available memory");
        let error = check(7 << 40, 4096, 0).unwrap_err();
        assert!(error.contains("7T") && error.contains("42 GiB") && error.contains("3 GiB"), "{error}");
        assert!(error.contains("smaller cache or larger blocks"), "{error}");
        assert!(!error.contains("recovery"), "{error}");
        assert_eq!(check(1 << 40, 1 << 20, 0), Ok(()), "larger blocks need less");
        assert_eq!(check(1 << 40, 4096, 3 << 30), Ok(()), "the present index is released");
    }

    #[test]
    fn the_recovery_of_all_persistent_caches_must_fit_too() {
        let memory = |gib: u64| CacheMemory { index: gib * (24 << 18), recovery: gib * (17 << 18) };
        let check = |available: u64, needs, has, others| {
            let change = IndexChange { bytes: 1 << 30, block_bytes: 4096, needs, has, others };
            check_index_of(HostMemory { total: 1 << 40, available }, &change).map_err(|it| it.to_string())
        };
        let none = CacheMemory::default();
        assert_eq!(check(41 << 18, memory(1), none, 0), Ok(()), "exactly index and recovery");
        let error = check((41 << 18) - 1, memory(1), none, 0).unwrap_err();
        assert!(error.contains("the recovery of all persistent caches"), "{error}");
        assert!(check(41 << 18, memory(1), none, 1).is_err(), "another cache recovers at the same time");
        assert_eq!(check((41 + 34) << 18, memory(1), none, memory(2).recovery), Ok(()));
        assert_eq!(check((2 * 41 - 24) << 18, memory(2), memory(1), 0), Ok(()), "the index is released");
        assert!(check((2 * 41 - 25) << 18, memory(2), memory(1), 0).is_err());
        assert_eq!(check(0, memory(1), memory(1), u64::MAX), Ok(()), "the cache does not grow");
        let volatile = CacheMemory { recovery: 0, ..memory(1) };
        assert!(check(0, memory(1), volatile, 0).is_err(), "the cache becomes persistent");
    }

    #[test]
    fn only_persistent_caches_are_recovered() {
        let volatile = spec("0");
        assert!(volatile.journal.is_none());
        let memory = CacheMemory::new(&volatile, 1024, 1 << 20);
        assert_eq!(memory, CacheMemory { index: 6 << 20, recovery: 0 });
        let persistent = CacheSpec { journal: Some(JournalSpec::new()), ..volatile };
        assert_eq!(CacheMemory::new(&persistent, 1024, 1 << 20).recovery, 17 << 18);
    }

    #[test]
    fn pages_are_blocks_of_64_kib_at_most() {
        let of =
            |block: u64| config(&CacheSpec { block_size: Size(block), ..spec("1M") }).map(|c| c.page_bytes);
        assert_eq!((of(4096), of(1 << 20)), (Some(4096), Some(64 << 10)));
        assert_eq!(config(&spec("0")), None);
    }
}
