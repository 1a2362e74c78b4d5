//! The memory of this host that hob may use, in bytes. Control groups (version 2) may limit it, for
//! example in a container, or by `MemoryMax=` of a systemd unit.

use std::path::{Component, Path};

/// Directory of the control groups.
const CONTROL_GROUPS: &str = "/sys/fs/cgroup";

/// Minimum size of the memory tier of a cache, in bytes.
pub(crate) const TIER_BYTES_MIN: u64 = 1 << 20;

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
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let host = HostMemory::parse(&read("/proc/meminfo"));
        host.within(Path::new(CONTROL_GROUPS), &read("/proc/self/cgroup"))
    }

    fn parse(meminfo: &str) -> HostMemory {
        // A size that the kernel does not report counts as unlimited.
        let bytes = |name| number_after(meminfo, name).map_or(u64::MAX, |kib| kib.saturating_mul(1024));
        HostMemory { total: bytes("MemTotal:"), available: bytes("MemAvailable:") }
    }

    /// Applies the limits of a process's control group and of its ancestors. `root` is the
    /// directory of the control groups, and `groups` the content of /proc/PID/cgroup.
    fn within(self, root: &Path, groups: &str) -> HostMemory {
        let group = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
        let mut directory = root.to_owned();
        // In a container, the root is the group of the container.
        let mut memory = self.limited(&directory);
        for part in Path::new(group).components() {
            // A group outside the visible tree begins with "..".
            let Component::Normal(name) = part else { break };
            directory.push(name);
            memory = memory.limited(&directory);
        }
        memory
    }

    /// Applies the limit of the control group with this directory, if it has one.
    fn limited(self, directory: &Path) -> HostMemory {
        let read = |name: &str| std::fs::read_to_string(directory.join(name)).unwrap_or_default();
        let Ok(limit) = read("memory.max").trim().parse::<u64>() else { return self };
        let used: u64 = read("memory.current").trim().parse().unwrap_or_default();
        // The kernel drops clean pages of files when the group needs memory.
        let stat = read("memory.stat");
        let of_files = |name| number_after(&stat, name).unwrap_or_default();
        let droppable = of_files("active_file ").saturating_add(of_files("inactive_file "));
        HostMemory {
            total: self.total.min(limit),
            available: self.available.min(limit.saturating_sub(used.saturating_sub(droppable))),
        }
    }
}

/// Returns the number after `name` at the start of a line.
fn number_after(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: HostMemory = HostMemory { total: 16 << 30, available: 3 << 30 };

    #[test]
    fn the_kernel_reports_the_memory_of_the_host() {
        let text = "MemTotal:       16777216 kB\nMemFree:   1 kB\nMemAvailable:    3145728 kB\n";
        assert_eq!(HostMemory::parse(text), HOST);
        assert_eq!(HostMemory::parse(""), HostMemory { total: u64::MAX, available: u64::MAX });
    }

    #[test]
    fn the_lowest_limit_of_the_control_group_and_its_ancestors_counts() {
        let root = tempfile::tempdir().unwrap();
        let group = |path: &str, files: &[(&str, &str)]| {
            let directory = root.path().join(path);
            std::fs::create_dir_all(&directory).unwrap();
            for (name, text) in files {
                std::fs::write(directory.join(name), text).unwrap();
            }
        };
        let within = |groups: &str| HOST.within(root.path(), groups);
        let memory = |total, available| HostMemory { total, available };
        let hob = "1:name=systemd:/other\n0::/system.slice/hob.service\n";
        assert_eq!(within(hob), HOST, "no control groups");
        group("system.slice", &[("memory.max", "8589934592\n"), ("memory.current", "1073741824\n")]);
        group("system.slice/hob.service", &[("memory.max", "max\n"), ("memory.current", "4096\n")]);
        assert_eq!(within(hob), memory(8 << 30, 3 << 30), "the limit of an ancestor");
        group(
            "system.slice/hob.service",
            &[("memory.max", "2147483648\n"), ("memory.current", "1073741824\n")],
        );
        assert_eq!(within(hob), memory(2 << 30, 1 << 30), "MemoryMax=2G, of which 1 GiB is used");
        let stat = "anon 1\ninactive_file 268435456\nactive_file 268435456\n";
        group("system.slice/hob.service", &[("memory.stat", stat)]);
        assert_eq!(within(hob), memory(2 << 30, 3 << 29), "clean pages of files can be dropped");
        assert_eq!(within("0::/user.slice\n"), HOST, "a limit of another group");
        assert_eq!(within("0::/../system.slice\n"), HOST, "a group outside the visible tree");
        group("", &[("memory.max", "1073741824\n")]);
        for groups in ["0::/\n", "0::/../other\n", hob, ""] {
            assert_eq!(within(groups), memory(1 << 30, 1 << 30), "the root is a container: {groups}");
        }
    }
}
