//! Measures FAST Cache with VMmark's tiles: how many tiles pass on how many disks, and the share of
//! their I/O that flash serves.

use anyhow::Result;
use hob_engine::outcome::Outcome;
use hob_world::disk_model::ArrayConfig;
use hob_world::flash_model::FlashConfig;

use super::case::{Backing, Case, CaseCache, Measured};
use super::line::Line;
use super::{FigureInfo, Findings, Size, Work};
use crate::picture::{Bar, BarChart, BarGroup, Unit, bars};

/// The generator's limit for a tile's mean latency, seconds.
const QOS_S: f64 = 0.030;

pub(super) const TILES: FigureInfo = FigureInfo {
    name: "fast-cache-tiles",
    title: "FAST Cache: VMmark tiles before the quality of service fails",
    source: "the EMC FAST Cache study",
    published: "4 tiles instead of 2 on 20 disks, 4 instead of 0 on 11; the score rises by 26 % at one tile, 31 % at two.",
    method: "Stands in for the original benchmark: the generator vmmark, whose rate of a tile and limit of 30 ms are \
             fitted or chosen. The source says how many disks there are and not which, nor how they are joined: here they \
             are 15K disks in RAID 5. The preset fast-cache with 92 GB, usable, on a mirrored pair of SATA SSDs; all \
             tiles lie on one disk, as the array sees them, and are played once before they are measured. VMmark's score \
             cannot be told from disk I/O and is left out.",
    work: Work::Play { cases: tile_cases, judge: judge_tiles },
};

pub(super) const SHARE: FigureInfo = FigureInfo {
    name: "fast-cache-share",
    title: "FAST Cache: share of I/O served by flash",
    source: "the EMC FAST Cache study",
    published: "At least 92 % by DRAM and flash (96.5 % on 11 disks, 92.1 % on 20) with 92 GB, 8 % of the data, under four tiles \
                of 24 % reads and 76 % writes; nearly all with 366 GB.",
    method: "Stands in for the original benchmark: the generator vmmark, whose hot part of the data was fitted to the first \
             of these figures, so that the share comes near is no discovery; that it needs no more than 8 % of the room, \
             with pages that come in at their third access, is. Four tiles on 20 disks of 15K in RAID 5, which the source \
             does not say, all seen as one disk and played once before they are measured; the preset fast-cache on a \
             mirrored pair of SATA SSDs. There is no DRAM: all of it is flash.",
    work: Work::Play { cases: share_cases, judge: judge_share },
};

fn twenty(bytes: u64) -> ArrayConfig {
    ArrayConfig { disks: 20, ..ArrayConfig::raid5_of_five_15k(bytes) }
}

fn eleven(bytes: u64) -> ArrayConfig {
    ArrayConfig { disks: 11, ..ArrayConfig::raid5_of_five_15k(bytes) }
}

fn settings(size: Size) -> [&'static str; 2] {
    match size {
        Size::Full => ["scale=256", "seconds=150"],
        Size::Quick => ["scale=4096", "seconds=3"],
    }
}

const FAST_CACHE: CaseCache = CaseCache::Preset(FlashConfig::sata_ssd(), "fast-cache");

const TILES_NOTE: &str = "Without a cache the source's 11 disks carried no tile and 20 carried two. Which disks they were and what \
    failed on them is not known, so hob's numbers without a cache stand beside the published ones and are not checked.";

const SHARE_NOTE: &str = "What is left with 366 GB is data that the generator asks for so seldom that hardly a page of it is \
    accessed three times while this is played.";

/// Maximum number of tiles to try.
const TILES_MAX: usize = 4;

/// A disk array: name, configuration for a number of bytes, and number of tiles that pass without a
/// cache.
type Array = (&'static str, fn(u64) -> ArrayConfig, u32);

const ARRAYS: [Array; 2] = [("20 disks", twenty, 2), ("11 disks", eleven, 0)];

fn tile_cases(size: Size) -> Vec<Case> {
    let mut cases = Vec::new();
    for (_, array, _) in ARRAYS {
        for cache in [CaseCache::Off, FAST_CACHE] {
            for tiles in 1..=TILES_MAX {
                let case = Case::new("vmmark", &settings(size), cache, Backing::Array(array))
                    .set(&format!("tiles={tiles}"))
                    .on_one_disk();
                cases.push(if matches!(cache, CaseCache::Off) { case } else { case.twice() });
            }
        }
    }
    cases
}

/// Returns the maximum number of tiles that all pass. The second value is the slowest tile's mean
/// latency in seconds, by number of tiles.
fn passing(runs: &[Measured]) -> (f64, Vec<f64>) {
    let slowest = |run: &Measured| {
        let means = run.parts.iter().map(|part| part.latency_ns as f64 / part.requests.max(1) as f64 / 1e9);
        means.fold(0.0, f64::max)
    };
    let means: Vec<f64> = runs.iter().map(slowest).collect();
    (means.iter().take_while(|mean| **mean <= QOS_S).count() as f64, means)
}

fn judge_tiles(runs: &[Measured]) -> Result<Findings> {
    let mut lines = Vec::new();
    let mut chart =
        BarChart::new("Tiles that pass", "tiles", Unit::Count).series("published").series("measured");
    for ((name, _, published), runs) in ARRAYS.iter().zip(runs.chunks(2 * TILES_MAX)) {
        let published = f64::from(*published);
        let (without, means) = passing(&runs[..TILES_MAX]);
        let (with, cached) = passing(&runs[TILES_MAX..]);
        lines
            .push(Line::new(format!("tiles on {name}, no cache"), Unit::Count, without).published(published));
        let line = Line::new(format!("tiles on {name}, 92 GB"), Unit::Count, with).published(4.0);
        lines.push(line.check("4, and more than without", with == 4.0 && with > without));
        for (what, means) in [("no cache", means), ("92 GB", cached)] {
            for tiles in [1, TILES_MAX] {
                let what = format!("slowest tile's mean, {tiles} on {name}, {what}");
                lines.push(Line::new(what, Unit::Seconds, means[tiles - 1]));
            }
        }
        chart = chart
            .group(BarGroup::new(format!("{name}, no cache"), [Bar::Value(published), Bar::Value(without)]))
            .group(BarGroup::new(format!("{name}, 92 GB"), [Bar::Value(4.0), Bar::Value(with)]));
    }
    Ok(Findings { lines, notes: vec![TILES_NOTE.to_owned()], picture: bars(&chart) })
}

fn share_cases(size: Size) -> Vec<Case> {
    let case = |cache: &str| {
        Case::new("vmmark", &settings(size), FAST_CACHE, Backing::Array(twenty))
            .set(cache)
            .on_one_disk()
            .twice()
    };
    vec![case("cache=92GiB"), case("cache=366GiB")]
}

/// Returns the shares of all I/O, of reads, and of writes that flash served.
fn shares(run: &Measured) -> [f64; 3] {
    let count = |outcome: Outcome| run.stats.outcomes[outcome as usize].count as f64;
    let (hits, taken) = (count(Outcome::Hit), count(Outcome::WriteBack));
    let (reads, writes) = (run.stats.reads as f64, run.stats.writes as f64);
    [(hits + taken) / (reads + writes), hits / reads, taken / writes]
}

fn judge_share(runs: &[Measured]) -> Result<Findings> {
    let (small, large) = (shares(&runs[0]), shares(&runs[1]));
    let share = |text: &str, value: f64| Line::new(text, Unit::Percent, value);
    let mix = runs[0].stats.reads as f64 / (runs[0].stats.reads + runs[0].stats.writes) as f64;
    let lines = vec![
        share("share of reads", mix).published(0.24).within(0.23, 0.25),
        share("served by flash, 92 GB", small[0])
            .published((0.921, 0.965))
            .check("at least 92 %", small[0] >= 0.92),
        share("of reads", small[1]),
        share("of writes", small[2]),
        share("served by flash, 366 GB", large[0])
            .published("nearly all")
            .check("more than with 92 GB", large[0] > small[0]),
        share("of reads", large[1]),
        share("of writes", large[2]),
    ];
    let chart = BarChart::new("Share of I/O served by flash", "share", Unit::Percent)
        .subtitle(format!(
            "{} requests of the generator vmmark on each",
            Unit::Count.text(runs[0].requests as f64)
        ))
        .series("published")
        .series("measured")
        .group(BarGroup::new("92 GB, 8 % of the data", [Bar::Span(0.921, 0.965), Bar::Value(small[0])]))
        .group(BarGroup::new("366 GB", [Bar::Missing, Bar::Value(large[0])]));
    Ok(Findings { lines, notes: vec![SHARE_NOTE.to_owned()], picture: bars(&chart) })
}
