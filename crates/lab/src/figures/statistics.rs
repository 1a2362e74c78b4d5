//! Prints the statistics of a cache under the names of the source, such as `numBlocks`, and the
//! statistics for manual sizing.

use anyhow::Result;
use hob_world::flash_model::FlashConfig;

use super::case::{Backing, Case, CaseCache, Measured};
use super::line::Line;
use super::{FigureInfo, Findings, HM_FITTED, Size, Work};
use crate::picture::{Bar, BarChart, BarGroup, Unit, bars};

/// Number of 8 KiB blocks in 1 GiB.
const BLOCKS: f64 = 131_072.0;

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "statistics",
    title: "Statistics of a cache of 1 GB with 8 KB blocks",
    source: "the vSphere Flash Read Cache study",
    published: "A cache of 1 GB with 8 KB blocks has numBlocks = 131072. After a warm-up, numBlocksCurrentlyCached \
                is equal to numBlocks in a small cache, and below it in a cache larger than the data.",
    method: "With a scale of 4, the generator hm has a cache of 1 GB, as in the published \
             example. The statistics are read from the engine, as hob stats does. A second cache \
             of 16 GB is larger than the data.",
    fitted: &[HM_FITTED],
    work: Work::Play { cases, judge },
};

fn cases(size: Size) -> Vec<Case> {
    // With a scale of 4, the generator's cache of 4 GB becomes the 1 GB of the published example.
    let settings: &[&str] = match size {
        Size::Full => &["scale=4", "requests=300000"],
        Size::Quick => &["scale=4", "requests=6000", "warmup-per-spot=1"],
    };
    let cache = CaseCache::Blocks(FlashConfig::sata_ssd(), 8 << 10);
    let case = || Case::new("hm", settings, cache, Backing::FixedNs(1_230_000));
    vec![case(), case().set("cache=64GiB")]
}

fn judge(runs: &[Measured]) -> Result<Findings> {
    let (stats, large) = (&runs[0].stats, &runs[1].stats);
    let (blocks, cached) = (stats.blocks as f64, stats.blocks_cached as f64);
    let evictions = stats.evictions;
    let per_operation = evictions.blocks as f64 / evictions.operations.max(1) as f64;
    let latency = |ns: u64| ns as f64 / 1e9;
    let lines = vec![
        Line::new("numBlocks", Unit::Count, blocks)
            .published(BLOCKS)
            .by_construction("the sizes of cache and block"),
        Line::new("numBlocksCurrentlyCached, small cache", Unit::Count, cached)
            .published("equal to numBlocks")
            .check("equal to numBlocks", cached == blocks),
        Line::new("numBlocksCurrentlyCached, large cache", Unit::Count, large.blocks_cached as f64)
            .published("below numBlocks")
            .check("below numBlocks", large.blocks_cached < large.blocks),
        Line::new("evicted blocks, large cache", Unit::Count, large.evictions.blocks as f64)
            .check("none", large.evictions.blocks == 0),
        Line::new("vFlash:cacheHitPercentage", Unit::Percent, stats.read_hit_ratio()),
        Line::new("total I/Os", Unit::Count, stats.requests() as f64),
        Line::new("mean I/Os a second", Unit::Count, stats.iops_mean()),
        Line::new("mean size of an I/O", Unit::Bytes, stats.request_bytes_mean()),
        Line::new("mean cache I/O latency", Unit::Seconds, latency(stats.flash.mean_ns())),
        Line::new("mean disk I/O latency", Unit::Seconds, latency(stats.backing.mean_ns())),
        Line::new("Evict:avgNumBlocksPerOp", Unit::Count, per_operation),
        Line::new("failed flash I/Os", Unit::Count, stats.flash.errors as f64),
    ];
    let chart = BarChart::new("Blocks of the cache", "blocks", Unit::Count)
        .series("published")
        .series("measured")
        .group(BarGroup::new("numBlocks", [Bar::Value(BLOCKS), Bar::Value(blocks)]))
        .group(BarGroup::new("numBlocksCurrentlyCached", [Bar::Missing, Bar::Value(cached)]));
    Ok(Findings { lines, notes: vec![], picture: bars(&chart) })
}
