//! Measures caches in front of volumes behind a network: a Ceph cluster, an NFS service, and cloud
//! volumes.

use anyhow::Result;
use hob_world::flash_model::FlashConfig;
use hob_world::remote_model::RemoteConfig;

use super::case::{Backing, Case, CaseCache, Measured};
use super::line::Line;
use super::{FigureInfo, Findings, Size, Work};
use crate::picture::{Bar, BarChart, BarGroup, Unit, bars};

/// Name and model of each volume.
const VOLUMES: [(&str, RemoteConfig); 4] = [
    ("Ceph", RemoteConfig::ceph()),
    ("NFS", RemoteConfig::nfs()),
    ("cloud, general", RemoteConfig::cloud_general()),
    ("cloud, provisioned", RemoteConfig::cloud_provisioned()),
];
/// Flash of the cache.
const FLASH: FlashConfig = FlashConfig::nvme_pcie4();
/// Latency of a hit on idle flash, seconds.
const HIT_S: f64 = (FLASH.read_command_ns + FLASH.read_page_ns) as f64 / 1e9;
/// Index of the volume that reaches its limit of I/Os per second.
const LIMITED: usize = 2;

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "backings",
    title: "Caches in front of Ceph, NFS and cloud volumes",
    source: "performance pages of the services, and a measurement of Ceph",
    published: "Ceph on SATA SSDs: a read in 0.57 ms, a write in 1 ms. Amazon EFS (NFS): 0.25 ms and 2.7 ms. Amazon EBS gp3: \
                3000 I/Os and 125 MiB a second, below 10 ms. Amazon EBS io2 Block Express: below 0.5 ms.",
    method: "The generator contenders replaces the original loads, none of which is published. \
             It has one disk of 2 GB with 4 clients, 70 % reads of 8 KB, and a skew of 0.6. The \
             runs have no cache, or a write-through cache of 512 MB on a current NVMe SSD. The \
             general volume has 64 clients, which request more than its limit of 3000 I/Os a \
             second.",
    fitted: &[],
    work: Work::Play { cases, judge },
};

fn cases(size: Size) -> Vec<Case> {
    let (requests, footprint, cache_size) = match size {
        Size::Full => ("requests=200000", "footprint=2GiB", "cache=512MiB"),
        Size::Quick => ("requests=4000", "footprint=64MiB", "cache=16MiB"),
    };
    let settings = ["scale=1", requests, "disks=1", "theta=0.6", "read-percent=70", "last-read-percent=70"];
    let case = |index: usize, cache| {
        let depth = if index == LIMITED { "depth=64" } else { "depth=4" };
        Case::new("contenders", &settings, cache, Backing::Remote(VOLUMES[index].1))
            .set(footprint)
            .set(cache_size)
            .set(depth)
    };
    let all = 0..VOLUMES.len();
    let without = all.clone().map(|index| case(index, CaseCache::Off));
    let cached = CaseCache::Planned(FLASH);
    let with = all.map(|index| case(index, cached).set("sweeps=1"));
    without.chain(with).collect()
}

fn judge(runs: &[Measured]) -> Result<Findings> {
    let (without, with) = runs.split_at(VOLUMES.len());
    let mut lines = Vec::new();
    let mut chart = BarChart::new("Mean latency of reads", "mean latency", Unit::Seconds)
        .subtitle("70 % reads of 8 KiB, a cache of a quarter of the data")
        .series("no cache")
        .series("cache");
    for (index, (name, config)) in VOLUMES.iter().enumerate() {
        let (before, after) = (&without[index], &with[index]);
        let [before_s, after_s] = [before, after].map(|run| run.by_op[0].mean_s());
        // The chart leaves out the limited volume, because requests wait in its queue for far
        // longer than the latencies of the other volumes.
        if index != LIMITED {
            chart = chart.group(BarGroup::new(*name, [Bar::Value(before_s), Bar::Value(after_s)]));
        }
        lines.push(if index == LIMITED {
            Line::new(format!("I/Os a second, {name}, no cache"), Unit::Count, before.rate(0))
                .published(config.reads_per_s as f64)
                .by_construction("the limit of the volume")
        } else {
            let published = config.read_ns as f64 / 1e9;
            Line::new(format!("mean read latency, {name}, no cache"), Unit::Seconds, before_s)
                .published(published)
                .by_construction("the model of the volume")
        });
        lines.push(Line::new(format!("mean read latency, {name}, cache"), Unit::Seconds, after_s));
        let hits = after.stats.read_hit_ratio();
        lines.push(Line::new(format!("read hits, {name}"), Unit::Percent, hits));
        lines.push(if index == LIMITED {
            // Hits do not count against the volume's limit.
            let to_volume = 0.7 * (1.0 - hits) + 0.3;
            let most = config.reads_per_s as f64 / to_volume;
            Line::new(
                format!("I/Os a second, {name}, cache against the limit over misses and writes"),
                Unit::Percent,
                after.rate(0) / most,
            )
            .within(0.95, 1.02)
        } else {
            let parts = hits * HIT_S + (1.0 - hits) * config.read_ns as f64 / 1e9;
            Line::new(
                format!("mean read latency, {name}, cache against flash and misses"),
                Unit::Percent,
                after_s / parts,
            )
            .within(0.9, 1.1)
        });
    }
    let writes = |index: usize| with[index].by_op[1].mean_s() / without[index].by_op[1].mean_s();
    let slowest = [0, 1, 3].map(writes).into_iter().fold(0.0, f64::max);
    lines.push(
        Line::new("mean write latency, cache against none, slowest of the unlimited", Unit::Percent, slowest)
            .check("at most 105 %: write-through adds nothing", slowest <= 1.05),
    );
    Ok(Findings { lines, notes: vec![], picture: bars(&chart) })
}
