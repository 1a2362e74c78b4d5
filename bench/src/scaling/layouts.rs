//! The forms of the results of all parts: columns, printed tables and charts.

use hob_lab::picture::Unit;

use super::table::{Column, Layout, chart, column};

// Columns of several parts.
const IOPS: Column = column("iops", "IOPS", Unit::Count);
const CPU: Column = column("cpu_s", "CPU per I/O", Unit::Seconds);
const HITS: Column = column("hits", "hits", Unit::Percent);
const MEMORY: Column = column("resident_bytes", "memory", Unit::Bytes);
const BLOCK: Column = column("block_bytes", "block", Unit::Bytes);
const INDEX_PER_BLOCK: Column = column("index_per_block", "index per block", Unit::Bytes);

/// The forms of all parts.
#[cfg(test)]
pub(super) const ALL: [&Layout; 5] = [&CACHE_SIZE, &DISKS, &CONNECTIONS, &DIRTY_FRACTION, &BLOCK_SIZE];

pub(super) static CACHE_SIZE: Layout = Layout {
    part: "cache-size",
    title: "Size of the cache",
    columns: &[
        column("cache_bytes", "cache", Unit::Bytes),
        IOPS,
        CPU,
        HITS,
        BLOCK,
        MEMORY,
        INDEX_PER_BLOCK,
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
        chart("scaling-cache-size-iops.svg", "IOPS by cache size", "IOPS", &["iops"]),
        chart("scaling-cache-size-cpu.svg", "CPU time per I/O by cache size", "CPU time of hob", &["cpu_s"]),
        chart(
            "scaling-cache-size-memory.svg",
            "Memory by cache size",
            "memory",
            &["resident_bytes", "stopped_peak_bytes", "killed_peak_bytes"],
        ),
        chart(
            "scaling-cache-size-restart.svg",
            "Time of a restart by cache size",
            "time",
            &["stopped_reply_s", "stopped_recovered_s", "killed_reply_s", "killed_recovered_s"],
        ),
    ],
    is_log: true,
};

pub(super) static DISKS: Layout = Layout {
    part: "disks",
    title: "Number of disks that share a pool",
    columns: &[
        column("disks", "disks", Unit::Count),
        IOPS,
        CPU,
        HITS,
        MEMORY,
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
        chart("scaling-disks-iops.svg", "IOPS by number of disks", "IOPS", &["iops"]),
        chart("scaling-disks-memory.svg", "Memory by number of disks", "memory", &["resident_bytes"]),
        chart(
            "scaling-disks-idle.svg",
            "Idle CPU time by number of disks",
            "share of one CPU",
            &["idle_cpu"],
        ),
        chart("scaling-disks-metrics.svg", "Time of /metrics by number of disks", "time", &["metrics_s"]),
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
        IOPS,
        CPU,
        HITS,
    ],
    tables: &[&["iops", "cpu_s", "hits"], &["depth", "mean_s"]],
    charts: &[
        chart("scaling-connections-iops.svg", "IOPS by number of connections", "IOPS", &["iops"]),
        chart(
            "scaling-connections-cpu.svg",
            "CPU time per I/O by number of connections",
            "CPU time of hob",
            &["cpu_s"],
        ),
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
        chart("scaling-dirty-fraction-iops.svg", "IOPS by dirty data", "IOPS", &["read_iops", "write_iops"]),
        chart(
            "scaling-dirty-fraction-cpu.svg",
            "CPU time per I/O by dirty data",
            "CPU time of hob",
            &["read_cpu_s", "write_cpu_s"],
        ),
    ],
    is_log: false,
};

pub(super) static BLOCK_SIZE: Layout = Layout {
    part: "block-size",
    title: "Block size of the cache",
    columns: &[BLOCK, IOPS, CPU, HITS, column("index_bytes", "index", Unit::Bytes), INDEX_PER_BLOCK, MEMORY],
    tables: &[&["iops", "cpu_s", "hits"], &["index_bytes", "index_per_block", "resident_bytes"]],
    charts: &[
        chart("scaling-block-size-iops.svg", "IOPS by block size", "IOPS", &["iops"]),
        chart("scaling-block-size-cpu.svg", "CPU time per I/O by block size", "CPU time of hob", &["cpu_s"]),
    ],
    is_log: true,
};
