//! Measures the mean latency of two MSR Cambridge disks, without and with a cache: a hardware
//! monitoring server and a web proxy.
//!
//! The source publishes only the mean latency of its array, so the modelled backing has this fixed
//! latency. The result shows the effect of hob's hits and misses.

use anyhow::Result;
use hob_world::flash_model::FlashConfig;

use super::case::{Backing, Case, CaseCache, Measured};
use super::line::Line;
use super::{FigureInfo, Findings, HM_FITTED, Size, Work, fitted};
use crate::picture::{Bar, BarChart, BarGroup, Unit, bars};

pub(super) const HM: FigureInfo = FigureInfo {
    name: "hm-latency",
    title: "Hardware monitoring: mean latency without and with a cache",
    source: "the vSphere Flash Read Cache study",
    published: "MSR Cambridge hm_1, some 600 000 requests, 95 % reads, mostly of 4 KB: a cache of 4 GB with 4 KB \
                blocks takes the mean latency from 1.23 ms to 0.321 ms at 85 % hits.",
    method: "The generator hm, with the published characteristics, replaces the original trace. \
             The model of the backing answers every request after the published 1.23 ms, so the \
             mean without a cache is an input and not a measurement. The flash is a model of a \
             SATA SSD with the rating that the source states. The source does not say which \
             flash device it used for this result.",
    fitted: &[HM_FITTED],
    work: Work::Play { cases: |size| cases(&HM_SOURCE, size), judge: |runs| judge(&HM_SOURCE, runs) },
};

pub(super) const PROXY: FigureInfo = FigureInfo {
    name: "proxy-latency",
    title: "Web proxy: mean latency without and with a cache",
    source: "the vSphere Flash Read Cache study",
    published: "MSR Cambridge prxy, about 5 million requests, 67 % reads, mostly of 4 KB: a cache of 16 GB with 4 KB \
                blocks takes the mean latency from 1.357 ms to 0.612 ms at 83 % hits.",
    method: "The generator proxy, with the published characteristics, replaces the original \
             trace. The model of the backing answers every request after the published 1.357 ms, \
             so the mean without a cache is an input and not a measurement. The flash is a model \
             of a SATA SSD with the rating that the source states. The source does not say which \
             flash device it used for this result.",
    fitted: &[fitted("spots, theta, disk, warmup-per-spot", "83 % hits")],
    work: Work::Play { cases: |size| cases(&PROXY_SOURCE, size), judge: |runs| judge(&PROXY_SOURCE, runs) },
};

/// Published values of a source, and the generator that represents its load.
struct Source {
    generator: &'static str,
    full: [&'static str; 2],
    quick: [&'static str; 2],
    baseline_ns: u64,
    with_s: f64,
    hits: f64,
    /// True if the generator was fitted to the hit ratio, false if to latencies.
    is_fitted_to_hits: bool,
}

const HM_SOURCE: Source = Source {
    generator: "hm",
    full: ["scale=1", "requests=600000"],
    quick: ["scale=256", "requests=6000"],
    baseline_ns: 1_230_000,
    with_s: 321e-6,
    hits: 0.85,
    is_fitted_to_hits: false,
};

const PROXY_SOURCE: Source = Source {
    generator: "proxy",
    full: ["scale=1", "requests=5000000"],
    quick: ["scale=1024", "requests=6000"],
    baseline_ns: 1_357_000,
    with_s: 612e-6,
    hits: 0.83,
    is_fitted_to_hits: true,
};

/// Maximum difference between published and measured hit ratio at which the two experiments count
/// as comparable.
const HITS_APART_MAX: f64 = 0.03;
/// Maximum difference between published and measured mean latency, as a share of the published one.
const LATENCY_APART_MAX: f64 = 0.1;

fn cases(source: &Source, size: Size) -> Vec<Case> {
    let settings = match size {
        Size::Full => source.full,
        Size::Quick => source.quick,
    };
    let case = |cache| Case::new(source.generator, &settings, cache, Backing::FixedNs(source.baseline_ns));
    vec![case(CaseCache::Off).set("warmup-per-spot=0"), case(CaseCache::Planned(FlashConfig::sata_ssd()))]
}

fn judge(source: &Source, runs: &[Measured]) -> Result<Findings> {
    let (without, with) = (runs[0].mean_s(), runs[1].mean_s());
    let baseline_s = source.baseline_ns as f64 / 1e9;
    let none = Line::new("mean latency, no cache", Unit::Seconds, without).published(baseline_s);
    let latency = Line::new("mean latency, cache", Unit::Seconds, with).published(source.with_s);
    let hits = Line::new("read hits", Unit::Percent, runs[1].stats.read_hit_ratio()).published(source.hits);
    // Each source has two results. One result was used to fit the parameters, so only the other
    // result is a check.
    let (latency, hits) = match source.is_fitted_to_hits {
        true => (latency.near(LATENCY_APART_MAX), hits.by_construction("spots and theta")),
        false => {
            let bounds = (source.hits - HITS_APART_MAX, source.hits + HITS_APART_MAX);
            (latency.by_construction("spots and theta"), hits.within(bounds.0, bounds.1))
        }
    };
    let lines = vec![none.by_construction("the modelled backing's fixed latency"), latency, hits];
    let requests = Unit::Count.text(runs[1].requests as f64);
    let group =
        |name, published, measured| BarGroup::new(name, [Bar::Value(published), Bar::Value(measured)]);
    let chart = BarChart::new("Mean latency", "mean latency", Unit::Seconds)
        .subtitle(format!("{requests} requests of the generator {}", source.generator))
        .series("published")
        .series("measured")
        .group(group("no cache", baseline_s, without))
        .group(group("cache", source.with_s, with));
    Ok(Findings { lines, notes: vec![], picture: bars(&chart) })
}
