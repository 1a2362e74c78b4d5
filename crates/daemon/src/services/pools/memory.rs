//! The RAM tier of caches: limits on its size, and its allocation on the shards.

use hob_control::Size;
use hob_engine::command::{MEMORY_PAGE_BYTES_MAX, MemoryConfig};

use super::Pools;
use crate::api_error::ApiError;
use crate::hardware::Area;
use crate::services::flash::blocking;
use crate::services::registry::{DiskPhase, Inner};
use crate::state::CacheSpec;

/// Minimum size of a RAM tier in bytes.
const BYTES_MIN: u64 = 1 << 20;

/// Memory of this host in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::services) struct HostMemory {
    /// Total memory that hob may use.
    total: u64,
    /// Memory that is currently free.
    available: u64,
}

impl HostMemory {
    /// Reads the current memory sizes.
    fn look() -> HostMemory {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        // A container may have a lower limit.
        let limit = std::fs::read_to_string("/sys/fs/cgroup/memory.max").unwrap_or_default();
        HostMemory::parse(&meminfo, &limit)
    }

    fn parse(meminfo: &str, limit: &str) -> HostMemory {
        let kib = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
        };
        // An unknown size is not limited.
        let bytes = |name| kib(name).map_or(u64::MAX, |kib| kib.saturating_mul(1024));
        let limit = limit.trim().parse().unwrap_or(u64::MAX);
        HostMemory { total: bytes("MemTotal:").min(limit), available: bytes("MemAvailable:").min(limit) }
    }
}

/// Returns the configuration of a cache's RAM tier, if it has one.
fn config(spec: &CacheSpec) -> Option<MemoryConfig> {
    let page_bytes = spec.block_size.bytes().min(u64::from(MEMORY_PAGE_BYTES_MAX)) as u32;
    (spec.ram.bytes() > 0).then_some(MemoryConfig { bytes: spec.ram.bytes(), page_bytes })
}

impl Pools {
    /// Allocates or changes the RAM tier of a disk's cache on its shard. Returns a note if this
    /// fails.
    pub(in crate::services) async fn fit_memory(&self, name: &str) -> Result<Vec<String>, ApiError> {
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
    /// Checks whether this host has enough memory for a disk's cache.
    pub(in crate::services) fn check_memory(&self, name: &str, spec: &CacheSpec) -> Result<(), ApiError> {
        self.check_memory_of(HostMemory::look(), name, spec)
    }

    fn check_memory_of(&self, machine: HostMemory, name: &str, spec: &CacheSpec) -> Result<(), ApiError> {
        let wanted = spec.ram.bytes();
        let human = |bytes| Size(bytes).human();
        if wanted == 0 {
            return Ok(());
        }
        if wanted < BYTES_MIN {
            return Err(ApiError::invalid(format!(
                "the memory tier (ram) must be 0 or at least {}, not {}",
                human(BYTES_MIN),
                spec.ram
            )));
        }
        let of = |other: &&crate::services::registry::DiskEntry| other.wanted.name != name;
        let others: u64 =
            self.disks.values().filter(of).filter_map(|disk| disk.cache()).map(|c| c.ram.bytes()).sum();
        if others.saturating_add(wanted) > machine.total / 2 {
            return Err(ApiError::invalid(format!(
                "a memory tier of {} and other memory tiers of {} are more than half of this host's \
                memory of {}",
                human(wanted),
                human(others),
                human(machine.total)
            ))
            .hint("ask for less"));
        }
        let has = self.disks.get(name).and_then(|disk| disk.memory).map_or(0, |memory| memory.bytes);
        if wanted > has.saturating_add(machine.available) {
            return Err(ApiError::conflict(format!(
                "this host has {} of free memory, and the memory tier needs {}",
                human(machine.available),
                human(wanted)
            ))
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
    fn the_system_says_how_much_there_is() {
        let text = "MemTotal:       16777216 kB\nMemFree:   1 kB\nMemAvailable:    3145728 kB\n";
        assert_eq!(HostMemory::parse(text, "max\n"), MACHINE);
        let in_container = HostMemory { total: 1 << 30, available: 1 << 30 };
        assert_eq!(HostMemory::parse(text, "1073741824\n"), in_container);
        assert_eq!(HostMemory::parse("", ""), HostMemory { total: u64::MAX, available: u64::MAX });
    }

    #[test]
    fn pages_are_blocks_of_64_kib_at_most() {
        let of =
            |block: u64| config(&CacheSpec { block_size: Size(block), ..spec("1M") }).map(|c| c.page_bytes);
        assert_eq!((of(4096), of(1 << 20)), (Some(4096), Some(64 << 10)));
        assert_eq!(config(&spec("0")), None);
    }
}
