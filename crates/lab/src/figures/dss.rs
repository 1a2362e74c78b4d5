//! Measures a decision-support database on five 15K disks: transactions per minute and their
//! response time.

use anyhow::Result;
use hob_world::disk_model::ArrayConfig;
use hob_world::flash_model::FlashConfig;

use super::case::{Backing, Case, CaseCache, Measured};
use super::line::Line;
use super::{FigureInfo, Findings, Fitted, Size, Work, fitted};
use crate::picture::{Bar, BarChart, BarGroup, Unit, bars};

/// Parameters of the generator dss from which rates and response times follow.
const RATE: &str = "ios, think-us and clients";
/// Number of requests of a query, by default of the generator. `THINK_NS` is the default processing
/// time between two of these requests.
const IOS: f64 = 1080.0;
const THINK_NS: f64 = 9_750_000.0;

/// Fitted parameters of the generator dss.
pub(super) const FITTED: &[Fitted] = &[
    fitted("ios, think-us", "20.389 s and 10.859 s"),
    fitted("clients", "61.7 transactions a minute"),
    fitted(
        "index-percent, lookup-percent, lookup-theta, partitions, partition-theta, warmup-per-block",
        "89 % hits",
    ),
];

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "dss",
    title: "Decision support: transactions a minute and response time",
    source: "the vSphere Flash Read Cache study",
    published: "A database of 15 GB on RAID 5 of five 15K disks, a cache of 8 GB with 8 KB blocks on a SATA SSD: 61.7 \
                transactions a minute become 112.9, 20.389 s become 10.859 s, at 89 % hits.",
    method: "The generator dss, with the published characteristics, replaces the original \
             benchmark. It runs on models of the source's array and of an SSD with the rating \
             that the source states.",
    fitted: FITTED,
    work: Work::Play { cases, judge },
};

fn cases(size: Size) -> Vec<Case> {
    let settings = match size {
        Size::Full => ["scale=1", "transactions=840"],
        Size::Quick => ["scale=512", "transactions=84"],
    };
    without_and_with_cache(&settings)
}

/// Returns two runs of the workload generator `dss` with these settings, on a model of the
/// published disk array. The first run has no cache, the second has the published cache.
pub(super) fn without_and_with_cache(settings: &[&str]) -> Vec<Case> {
    let array = Backing::Array(ArrayConfig::raid5_of_five_15k);
    let case = |cache| Case::new("dss", settings, cache, array);
    vec![case(CaseCache::Off).set("warmup-per-block=0"), case(CaseCache::Planned(FlashConfig::sata_ssd()))]
}

fn judge(runs: &[Measured]) -> Result<Findings> {
    let [without, with] = [&runs[0], &runs[1]];
    let disk = |run: &Measured| run.stats.backing.mean_ns() as f64;
    let hits = with.stats.read_hit_ratio();
    let io_ns = hits * with.stats.flash.mean_ns() as f64 + (1.0 - hits) * disk(with);
    let parts = IOS * (THINK_NS + io_ns) / 1e9;
    let speed_up = with.per_minute() / without.per_minute();
    let lines = vec![
        Line::new("transactions a minute, no cache", Unit::Count, without.per_minute())
            .published(61.7)
            .by_construction(RATE),
        Line::new("transactions a minute, cache", Unit::Count, with.per_minute())
            .published(112.9)
            .by_construction(RATE),
        Line::new("throughput", Unit::Times, speed_up).published(112.9 / 61.7).by_construction(RATE),
        Line::new("mean response time, no cache", Unit::Seconds, without.response_s())
            .published(20.389)
            .by_construction(RATE),
        Line::new("mean response time, cache", Unit::Seconds, with.response_s())
            .published(10.859)
            .by_construction(RATE),
        Line::new("read hits", Unit::Percent, with.stats.read_hit_ratio())
            .published(0.89)
            .by_construction("the layout and skew of the database"),
        // Not fitted: with the cache, the disks have fewer requests, so reads that miss the cache
        // are faster than without a cache.
        Line::new("mean disk read, cache against none", Unit::Percent, disk(with) / disk(without))
            .check("below 90 %", disk(with) < 0.9 * disk(without)),
        // This value is not fitted: the response time consists of think time, flash reads and disk
        // reads, and the cache itself adds no time.
        Line::new(
            "response time against think time, flash and disks",
            Unit::Percent,
            with.response_s() / parts,
        )
        .within(0.97, 1.03),
    ];
    let group = |name, published, run: &Measured| {
        BarGroup::new(name, [Bar::Value(published), Bar::Value(run.per_minute())])
    };
    let chart = BarChart::new("Transactions a minute", "transactions a minute", Unit::Count)
        .subtitle(format!("{} requests of the generator dss", Unit::Count.text(with.requests as f64)))
        .series("published")
        .series("measured")
        .group(group("no cache", 61.7, without))
        .group(group("cache", 112.9, with));
    Ok(Findings { lines, notes: vec![], picture: bars(&chart) })
}
