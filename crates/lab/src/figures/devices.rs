//! Measures cache hits on the flash devices of the publications and on current flash devices: reads
//! per second at the rated queue depth, and latency.

use anyhow::Result;
use hob_world::flash_model::FlashConfig;

use super::case::{Backing, Case, CaseCache, Measured};
use super::line::Line;
use super::{FigureInfo, Findings, Size, Work};
use crate::picture::{Bar, BarChart, BarGroup, Unit, bars};

/// Name, model, queue depth of the rating, and rated random reads of 4 KiB per second, from the
/// slowest device to the fastest.
const DEVICES: [(&str, FlashConfig, &str, f64); 5] = [
    ("SATA SSD of the source", FlashConfig::sata_ssd(), "depth=32", 39_500.0),
    ("current SATA SSD", FlashConfig::sata_current(), "depth=32", 94_000.0),
    ("PCIe card of the source", FlashConfig::pcie_card(), "depth=256", 750_000.0),
    ("current NVMe SSD, PCIe 4", FlashConfig::nvme_pcie4(), "depth=256", 900_000.0),
    ("current NVMe SSD, PCIe 5", FlashConfig::nvme_pcie5(), "depth=512", 3_300_000.0),
];

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "devices",
    title: "Flash devices of the sources and of today",
    source: "the vSphere Flash Read Cache study, and data sheets",
    published: "A PCIe card reads 750 000 times a second at a queue depth of 256, a SATA SSD 39 500 times at 32. Of today: a \
                Kingston DC600M (SATA) 94 000 times, a Samsung PM9A3 (NVMe, PCIe 4) 900 000 times, a Micron 9550 MAX \
                (NVMe, PCIe 5) 3.3 million times.",
    method: "The generator contenders replaces the original load. It has one disk, whose data is \
             all cached with blocks of 4 KB, and reads 4 KB at random at the rated queue depth. \
             The device models reach the ratings by construction. The check is that hits reach \
             them too, because the engine adds no I/O and no waiting time. Processors are not \
             modelled.",
    fitted: &[],
    work: Work::Play { cases, judge },
};

fn cases(size: Size) -> Vec<Case> {
    let (requests, footprint, cache_size) = match size {
        Size::Full => ("requests=300000", "footprint=128MiB", "cache=192MiB"),
        Size::Quick => ("requests=20000", "footprint=16MiB", "cache=24MiB"),
    };
    let settings = ["scale=1", requests, "disks=1", "io=4KiB", "last-io=4KiB", "sweeps=3"];
    let case = |flash, depth| {
        let cache = CaseCache::Planned(flash);
        Case::new("contenders", &settings, cache, Backing::FixedNs(1_000_000))
            .set(footprint)
            .set(cache_size)
            .set(depth)
    };
    let deep = DEVICES.iter().map(|(_, flash, depth, _)| case(*flash, *depth));
    let one = DEVICES.iter().map(|(_, flash, ..)| case(*flash, "depth=1"));
    deep.chain(one).collect()
}

fn judge(runs: &[Measured]) -> Result<Findings> {
    let (deep, one) = runs.split_at(DEVICES.len());
    let mut lines = Vec::new();
    let mut chart = BarChart::new("Hits a second at the rated queue depth", "hits a second", Unit::Count)
        .subtitle("random reads of 4 KiB, all from flash")
        .series("rating")
        .series("measured");
    for ((name, _, _, rating), run) in DEVICES.iter().zip(deep) {
        let rate = run.rate(0);
        lines.push(
            Line::new(format!("hits a second, {name}"), Unit::Count, rate).published(*rating).near(0.05),
        );
        chart = chart.group(BarGroup::new(*name, [Bar::Value(*rating), Bar::Value(rate)]));
    }
    for ((name, ..), run) in DEVICES.iter().zip(one) {
        lines.push(Line::new(
            format!("mean latency of one hit at a time, {name}"),
            Unit::Seconds,
            run.mean_s(),
        ));
    }
    let is_rising = deep.windows(2).all(|pair| pair[0].rate(0) < pair[1].rate(0));
    let hits = deep.iter().map(|run| run.stats.read_hit_ratio()).fold(1.0, f64::min);
    lines.extend([
        Line::new("lowest share of hits", Unit::Percent, hits).by_construction("the size of the cache"),
        Line::new(
            "from device to faster device",
            Unit::Count,
            if is_rising { "rising" } else { "not in order" },
        )
        .check("rising", is_rising),
    ]);
    Ok(Findings { lines, notes: vec![], picture: bars(&chart) })
}
