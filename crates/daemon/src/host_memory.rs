//! The memory of this host, in bytes.

/// Memory of this host in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostMemory {
    /// Total memory that hob may use.
    pub(crate) total: u64,
    /// Memory that hob can currently allocate without swapping.
    pub(crate) available: u64,
}

impl HostMemory {
    /// Reads the current memory sizes.
    pub(crate) fn look() -> HostMemory {
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
        // A size that the kernel does not report counts as unlimited.
        let bytes = |name| kib(name).map_or(u64::MAX, |kib| kib.saturating_mul(1024));
        let limit = limit.trim().parse().unwrap_or(u64::MAX);
        HostMemory { total: bytes("MemTotal:").min(limit), available: bytes("MemAvailable:").min(limit) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_says_how_much_there_is() {
        let text = "MemTotal:       16777216 kB\nMemFree:   1 kB\nMemAvailable:    3145728 kB\n";
        assert_eq!(HostMemory::parse(text, "max\n"), HostMemory { total: 16 << 30, available: 3 << 30 });
        let in_container = HostMemory { total: 1 << 30, available: 1 << 30 };
        assert_eq!(HostMemory::parse(text, "1073741824\n"), in_container);
        assert_eq!(HostMemory::parse("", ""), HostMemory { total: u64::MAX, available: u64::MAX });
    }
}
