//! Measures a disk that mostly writes and shares an array with another disk. The cache of the other
//! disk serves reads, so the array has less load.

use anyhow::Result;
use hob_world::disk_model::ArrayConfig;
use hob_world::flash_model::FlashConfig;
use hob_world::replay::Setup;

use super::case::{Backing, Case, CaseCache, Measured};
use super::line::Line;
use super::{FigureInfo, Findings, Size, Work};
use crate::picture::{Bar, BarChart, BarGroup, Unit, bars};

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "write-neighbour",
    title: "A neighbour that only writes gains from the cache of a reader",
    source: "no study with a number; an effect that each cache on a shared array must have",
    published: "A write-heavy neighbour on the same array gains too, because the cache takes reads from the array.",
    method: "The generator contenders replaces the original load. It has two disks on RAID 5 of \
             five 15K disks. 16 clients read 8 KB on one disk, and 16 clients write 8 KB on the \
             other, each with a pause of 20 ms. Only the disk with the readers has a cache, \
             which is write-through and as large as the disk's data.",
    fitted: &[],
    work: Work::Play { cases, judge },
};

/// Removes the cache of the disk that writes.
fn reader_alone(setup: &mut Setup) {
    setup.disks[1].cache = None;
}

fn cases(size: Size) -> Vec<Case> {
    let (requests, footprint, cache_size) = match size {
        Size::Full => ("requests=30000", "footprint=256MiB", "cache=768MiB"),
        Size::Quick => ("requests=2000", "footprint=16MiB", "cache=48MiB"),
    };
    let settings =
        ["scale=1", requests, "disks=2", "depth=16", "think-us=20000", "last-read-percent=0", "sweeps=1"];
    let array = Backing::Array(ArrayConfig::raid5_of_five_15k);
    let case = |cache| Case::new("contenders", &settings, cache, array).set(footprint).set(cache_size);
    let cached = case(CaseCache::Planned(FlashConfig::sata_ssd()));
    vec![case(CaseCache::Off), Case { arrange: Some(reader_alone), ..cached }]
}

fn judge(runs: &[Measured]) -> Result<Findings> {
    let [without, with] = runs else { unreachable!("two cases") };
    let count = |text: &str, value: f64| Line::new(text, Unit::Count, value);
    let latency = |text: &str, run: &Measured| Line::new(text, Unit::Seconds, run.parts[1].mean_s());
    let gain = with.rate(1) / without.rate(1);
    let fall = with.parts[1].mean_s() / without.parts[1].mean_s();
    let lines = vec![
        Line::new("read hits of the reader", Unit::Percent, with.stats.read_hit_ratio()),
        count("writes a second, no cache", without.rate(1)),
        count("writes a second, cache of the reader", with.rate(1)),
        Line::new("writes a second, cache of the reader against none", Unit::Times, gain)
            .published("more")
            .check("at least 1.2 ×", gain >= 1.2),
        latency("mean latency of writes, no cache", without),
        latency("mean latency of writes, cache of the reader", with),
        Line::new("mean latency of writes, cache of the reader against none", Unit::Percent, fall)
            .published("lower")
            .check("below 85 %", fall < 0.85),
        count("reads a second, no cache", without.rate(0)),
        count("reads a second, cache of the reader", with.rate(0)),
    ];
    let group =
        |name, run: &Measured| BarGroup::new(name, [Bar::Value(run.rate(0)), Bar::Value(run.rate(1))]);
    let chart = BarChart::new("I/Os a second of two disks on one array", "I/Os a second", Unit::Count)
        .subtitle("only the reader has a cache")
        .series("the disk that reads")
        .series("the disk that writes")
        .group(group("no cache", without))
        .group(group("cache of the reader", with));
    Ok(Findings { lines, notes: vec![], picture: bars(&chart) })
}
