//! The forms of the results of all parts: columns, printed tables and charts.

use hob_lab::picture::Unit;

use super::table::{Chart, Layout, column};

/// The forms of all parts.
#[cfg(test)]
pub(super) const ALL: [&Layout; 5] = [&CACHE_SIZE, &DISKS, &CONNECTIONS, &DIRTY_FRACTION, &BLOCK_SIZE];

pub(super) static CACHE_SIZE: Layout = Layout {
    part: "cache-size",
    title: "Size of the cache",
    columns: &[
        column("cache_bytes", "cache", Unit::Bytes),
        column("iops", "IOPS", Unit::Count),
        column("cpu_s", "CPU per I/O", Unit::Seconds),
        column("hits", "hits", Unit::Percent),
        column("block_bytes", "block", Unit::Bytes),
        column("resident_bytes", "memory", Unit::Bytes),
        column("index_per_block", "index per block", Unit::Bytes),
        column("stopped_reply_s", "stop: first reply", Unit::Seconds),
        column("stopped_recovered_s", "stop: recovered", Unit::Seconds),
        column("stopped_peak_bytes", "stop: peak memory", Unit::Bytes),
        column("killed_reply_s", "kill: first reply", Unit::Seconds),
        column("killed_recovered_s", "kill: recovered", Unit::Seconds),
        column("killed_peak_bytes", "kill: peak memory", Unit::Bytes),
    ],
    tables: &[
        &["iops", "cpu_s", "hits"],
        &["block_bytes", "resident_bytes", "index_per_block"],
        &["stopped_reply_s", "stopped_recovered_s", "stopped_peak_bytes"],
        &["killed_reply_s", "killed_recovered_s", "killed_peak_bytes"],
    ],
    charts: &[
        Chart {
            file: "scaling-cache-size-iops.svg",
            title: "IOPS by cache size",
            axis: "IOPS",
            keys: &["iops"],
        },
        Chart {
            file: "scaling-cache-size-cpu.svg",
            title: "CPU time per I/O by cache size",
            axis: "CPU time of hob",
            keys: &["cpu_s"],
        },
        Chart {
            file: "scaling-cache-size-memory.svg",
            title: "Memory by cache size",
            axis: "memory",
            keys: &["resident_bytes", "stopped_peak_bytes", "killed_peak_bytes"],
        },
        Chart {
            file: "scaling-cache-size-restart.svg",
            title: "Time of a restart by cache size",
            axis: "time",
            keys: &["stopped_reply_s", "stopped_recovered_s", "killed_reply_s", "killed_recovered_s"],
        },
    ],
    is_log: true,
};

pub(super) static DISKS: Layout = Layout {
    part: "disks",
    title: "Number of disks that share a pool",
    columns: &[
        column("disks", "disks", Unit::Count),
        column("iops", "IOPS", Unit::Count),
        column("cpu_s", "CPU per I/O", Unit::Seconds),
        column("hits", "hits", Unit::Percent),
        column("resident_bytes", "memory", Unit::Bytes),
        column("bytes_per_disk", "memory per disk", Unit::Bytes),
        column("idle_cpu", "idle CPU", Unit::Percent),
        column("metrics_bytes", "metrics", Unit::Bytes),
        column("metrics_s", "time of metrics", Unit::Seconds),
        column("restart_s", "restart", Unit::Seconds),
    ],
    tables: &[
        &["iops", "cpu_s", "hits"],
        &["resident_bytes", "bytes_per_disk", "idle_cpu"],
        &["metrics_bytes", "metrics_s", "restart_s"],
    ],
    charts: &[
        Chart {
            file: "scaling-disks-iops.svg",
            title: "IOPS by number of disks",
            axis: "IOPS",
            keys: &["iops"],
        },
        Chart {
            file: "scaling-disks-memory.svg",
            title: "Memory by number of disks",
            axis: "memory",
            keys: &["resident_bytes"],
        },
        Chart {
            file: "scaling-disks-idle.svg",
            title: "Idle CPU time by number of disks",
            axis: "share of one CPU",
            keys: &["idle_cpu"],
        },
        Chart {
            file: "scaling-disks-metrics.svg",
            title: "Time of /metrics by number of disks",
            axis: "time",
            keys: &["metrics_s"],
        },
    ],
    is_log: true,
};

pub(super) static CONNECTIONS: Layout = Layout {
    part: "connections",
    title: "Number of connections, with the same total queue depth",
    columns: &[
        column("connections", "connections", Unit::Count),
        column("depth", "depth of each", Unit::Count),
        column("mean_s", "mean latency", Unit::Seconds),
        column("iops", "IOPS", Unit::Count),
        column("cpu_s", "CPU per I/O", Unit::Seconds),
        column("hits", "hits", Unit::Percent),
    ],
    tables: &[&["iops", "cpu_s", "hits"], &["depth", "mean_s"]],
    charts: &[
        Chart {
            file: "scaling-connections-iops.svg",
            title: "IOPS by number of connections",
            axis: "IOPS",
            keys: &["iops"],
        },
        Chart {
            file: "scaling-connections-cpu.svg",
            title: "CPU time per I/O by number of connections",
            axis: "CPU time of hob",
            keys: &["cpu_s"],
        },
    ],
    is_log: true,
};

pub(super) static DIRTY_FRACTION: Layout = Layout {
    part: "dirty-fraction",
    title: "Dirty data, as a share of the cache",
    columns: &[
        column("dirty", "dirty data", Unit::Percent),
        column("dirty_after", "after the writes", Unit::Percent),
        column("read_iops", "read IOPS", Unit::Count),
        column("write_iops", "write IOPS", Unit::Count),
        column("hits", "hits of reads", Unit::Percent),
        column("read_cpu_s", "CPU per read", Unit::Seconds),
        column("write_cpu_s", "CPU per write", Unit::Seconds),
    ],
    tables: &[&["read_iops", "write_iops", "hits"], &["read_cpu_s", "write_cpu_s", "dirty_after"]],
    charts: &[
        Chart {
            file: "scaling-dirty-fraction-iops.svg",
            title: "IOPS by dirty data",
            axis: "IOPS",
            keys: &["read_iops", "write_iops"],
        },
        Chart {
            file: "scaling-dirty-fraction-cpu.svg",
            title: "CPU time per I/O by dirty data",
            axis: "CPU time of hob",
            keys: &["read_cpu_s", "write_cpu_s"],
        },
    ],
    is_log: false,
};

pub(super) static BLOCK_SIZE: Layout = Layout {
    part: "block-size",
    title: "Block size of the cache",
    columns: &[
        column("block_bytes", "block", Unit::Bytes),
        column("iops", "IOPS", Unit::Count),
        column("cpu_s", "CPU per I/O", Unit::Seconds),
        column("hits", "hits", Unit::Percent),
        column("index_bytes", "index", Unit::Bytes),
        column("index_per_block", "index per block", Unit::Bytes),
        column("resident_bytes", "memory", Unit::Bytes),
    ],
    tables: &[&["iops", "cpu_s", "hits"], &["index_bytes", "index_per_block", "resident_bytes"]],
    charts: &[
        Chart {
            file: "scaling-block-size-iops.svg",
            title: "IOPS by block size",
            axis: "IOPS",
            keys: &["iops"],
        },
        Chart {
            file: "scaling-block-size-cpu.svg",
            title: "CPU time per I/O by block size",
            axis: "CPU time of hob",
            keys: &["cpu_s"],
        },
    ],
    is_log: true,
};
