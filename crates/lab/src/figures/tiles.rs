//! Simulates the tiles of VMmark on hob's preset `fast-cache`. A *tile* is a set of servers with a
//! common load. The figures are the number of tiles that pass on each disk array, and the share of
//! their I/O that flash serves.

use anyhow::Result;
use hob_world::disk_model::{ArrayConfig, Level, WriteCache};
use hob_world::flash_model::FlashConfig;

use super::case::{Backing, Case, CaseCache, Measured};
use super::line::Line;
use super::{FigureInfo, Findings, Fitted, Size, Work, fitted};
use crate::picture::{Bar, BarChart, BarGroup, Unit, bars};

/// Limit for the mean latency of a tile that passes, seconds.
const QOS_S: f64 = 0.030;

pub(super) const TILES: FigureInfo = FigureInfo {
    name: "fast-cache-tiles",
    title: "FAST Cache: VMmark tiles before the quality of service fails",
    source: "the EMC FAST Cache study",
    published: "4 tiles instead of 2 on 20 disks, 4 instead of 0 on 11; the score rises by 26 % at one tile, 31 % at two.",
    method: "The generator vmmark replaces the original benchmark. The source's array is \
             modelled: 10K disks in RAID 0, in LUNs of 8, 8 and 4 of 20 disks, or of 4, 4 and 3 \
             of 11 disks. Tiles 1 and 3 are on the first LUN, and tiles 2 and 4 on the second. \
             The third has the deployments: a copy of 10 MiB a second, whose rate is chosen. The \
             array has a write cache of 512 MB, as is usual for such arrays. The preset \
             fast-cache has 92 GB on a mirrored pair of SATA SSDs, as one cache for all LUNs. \
             With the cache, the load is played once before the measurement. Without a cache on \
             20 disks, two and three tiles also run at other rates than the fitted one. A tile \
             passes with a mean latency of at most 30 ms. This limit is chosen, because VMmark's \
             own limits are those of its applications.",
    fitted: &[fitted("tile-iops", "two tiles on 20 disks without a cache"), HOT],
    work: Work::Play { cases: tile_cases, judge: judge_tiles },
};

pub(super) const SHARE: FigureInfo = FigureInfo {
    name: "fast-cache-share",
    title: "FAST Cache: share of I/O served by flash",
    source: "the EMC FAST Cache study",
    published: "At least 92 % by DRAM and flash (96.5 % on 11 disks, 92.1 % on 20) with 92 GB, 8 % of the data, under four \
                tiles of 24 % reads and 76 % writes on 1.09 TB; nearly all with 366 GB. Reads are faster with more cache \
                and with more disks, and the latency of writes hardly changes.",
    method: "The generator vmmark replaces the original benchmark, with four tiles on the arrays \
             of the figure fast-cache-tiles and without deployments. The load is played once \
             before the measurement, except in one run with a cache that is empty at first. The \
             preset fast-cache is on a mirrored pair of SATA SSDs. Above it, 12 GB of DRAM cache \
             reads, as in the source's study of desktops. The 366 GB are on one pair too; the \
             source has eight devices for them.",
    fitted: &[HOT, fitted("tile-iops", "two tiles on 20 disks without a cache")],
    work: Work::Play { cases: share_cases, judge: judge_share },
};

/// Fitted inputs that determine which share of the I/O a cache of 92 GB serves.
const HOT: Fitted = fitted("hot-percent, hot-share-percent", "96.5 % served with 92 GB on 11 disks");

/// Note about the two arrays, as printed on the page.
const ARRAYS_NOTE: &str = "The source has 4.4 points between the two arrays. Here both have one cache of the same size and the \
    same load, and serve the same share. So the share on 20 disks, too, follows from the inputs that were fitted on 11. \
    The source repeated its runs only until the scores differed by less than 3 %, \
    so its caches need not have been equally warm. A cache that is empty at \
    first, and is filled while the share is measured, is the least warm one, and is checked.";

/// The published share of the I/O that DRAM and 92 GB of flash serve on 20 disks. The published
/// share on 11 disks is higher.
const LEAST_SERVED: f64 = 0.921;

/// The array's write cache: 512 MB, at the scale of the figures.
const WRITE_CACHE: WriteCache = WriteCache { bytes_max: (512 << 20) / 256, latency_ns: 300_000 };

/// Returns a LUN of eight 10K disks. In the array of 20 disks, the tiles use two of these LUNs.
fn eight(bytes: u64) -> ArrayConfig {
    let write_cache = Some(WRITE_CACHE);
    ArrayConfig { disks: 8, level: Level::Raid0, write_cache, ..ArrayConfig::raid5_of_ten_10k(bytes) }
}

/// Returns a LUN of four 10K disks. In the array of 11 disks, the tiles use two of these LUNs.
fn four(bytes: u64) -> ArrayConfig {
    ArrayConfig { disks: 4, ..eight(bytes) }
}

/// Returns the third LUN of the array of 11 disks. The third LUN of the array of 20 disks has four
/// disks.
fn three(bytes: u64) -> ArrayConfig {
    ArrayConfig { disks: 3, ..eight(bytes) }
}

/// Number of LUNs of each array that have tiles. A third LUN takes deployments.
const LUNS: usize = 2;

/// Setting of the generator for deployments on the third LUN.
const DEPLOYMENTS: &str = "deploy-mib-s=10";

fn settings(size: Size) -> [&'static str; 2] {
    match size {
        Size::Full => ["scale=256", "seconds=100"],
        Size::Quick => ["scale=4096", "seconds=3"],
    }
}

const FAST_CACHE: CaseCache = CaseCache::Preset(FlashConfig::sata_ssd(), "fast-cache");

/// Size of the memory tier (DRAM) above the flash cache, bytes.
const DRAM: u64 = 12 << 30;

/// Maximum ratio of the highest to the lowest mean write latency that counts as nearly constant.
const NEARLY_CONSTANT: f64 = 1.25;

/// Maximum number of tiles that the figure tries.
const TILES_MAX: usize = 4;

/// A disk array: name, configurations of a LUN of tiles and of the third LUN for a number of bytes,
/// and number of tiles that pass without a cache.
type Array = (&'static str, fn(u64) -> ArrayConfig, fn(u64) -> ArrayConfig, u32);

/// Names and settings of two rates of a tile: 10 % lower and 10 % higher than the fitted rate. With
/// these rates too, the number of tiles on 20 disks must be the published number.
const RATES: [(&str, &str); 2] =
    [("rate 10 % lower", "tile-iops=1260"), ("rate 10 % higher", "tile-iops=1540")];

/// Minimum difference between two losses of the served share: the loss from three to four tiles
/// minus the loss from two to three tiles.
const KNEE: f64 = 0.02;

const ARRAYS: [Array; 2] = [("20 disks", eight, four, 2), ("11 disks", four, three, 0)];

fn tile_cases(size: Size) -> Vec<Case> {
    let mut cases = Vec::new();
    for (_, array, third, _) in ARRAYS {
        for cache in [CaseCache::Off, FAST_CACHE] {
            for tiles in 1..=TILES_MAX {
                let backing = Backing::LunsAndOne(LUNS, array, third);
                let case = Case::new("vmmark", &settings(size), cache, backing)
                    .set(&format!("tiles={tiles}"))
                    .set(DEPLOYMENTS)
                    .on_one_disk();
                cases.push(if matches!(cache, CaseCache::Off) { case } else { case.twice() });
            }
        }
    }
    for (_, rate) in RATES {
        for tiles in [2, 3] {
            let backing = Backing::LunsAndOne(LUNS, eight, four);
            let uncached = Case::new("vmmark", &settings(size), CaseCache::Off, backing);
            cases.push(uncached.set(&format!("tiles={tiles}")).set(DEPLOYMENTS).set(rate).on_one_disk());
        }
    }
    cases
}

/// Returns the mean latency of a run's slowest tile, seconds. The last disk has the deployments.
fn slowest(run: &Measured) -> f64 {
    run.parts[..run.parts.len() - 1].iter().map(|part| part.mean_s()).fold(0.0, f64::max)
}

/// Returns the maximum number of tiles that all pass. The second value is the slowest tile's mean
/// latency in seconds, by number of tiles.
fn passing(runs: &[Measured]) -> (f64, Vec<f64>) {
    let means: Vec<f64> = runs.iter().map(slowest).collect();
    (means.iter().take_while(|mean| **mean <= QOS_S).count() as f64, means)
}

fn judge_tiles(runs: &[Measured]) -> Result<Findings> {
    let mut lines = Vec::new();
    let mut chart =
        BarChart::new("Tiles that pass", "tiles", Unit::Count).series("published").series("measured");
    for ((name, _, _, published), runs) in ARRAYS.iter().zip(runs.chunks(2 * TILES_MAX)) {
        let published = f64::from(*published);
        let (without, means) = passing(&runs[..TILES_MAX]);
        let (with, cached) = passing(&runs[TILES_MAX..]);
        let line = Line::new(format!("tiles on {name}, no cache"), Unit::Count, without).published(published);
        lines.push(match published as u32 {
            2 => line.by_construction("tile-iops"),
            _ => line.check("0", without == 0.0),
        });
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
    for ((name, _), runs) in RATES.iter().zip(runs[ARRAYS.len() * 2 * TILES_MAX..].chunks(2)) {
        // The first run has two tiles, the second one three.
        let tiles = 1.0 + runs.iter().take_while(|run| slowest(run) <= QOS_S).count() as f64;
        lines.push(
            Line::new(format!("tiles on 20 disks, no cache, {name}"), Unit::Count, tiles)
                .published(2.0)
                .check("2; 2 and 3 are tried", tiles == 2.0),
        );
    }
    let [twenty, eleven] = [0, 2 * TILES_MAX].map(|first| slowest(&runs[first]));
    for ((name, ..), runs) in ARRAYS.iter().zip(runs.chunks(2 * TILES_MAX)) {
        let copies = runs[2 * TILES_MAX - 1].parts[TILES_MAX].mean_s();
        let what = format!("mean of the deployments, {TILES_MAX} tiles on {name}, 92 GB");
        lines.push(Line::new(what, Unit::Seconds, copies));
    }
    lines.push(
        Line::new("mean latency of 1 tile, no cache, 11 disks against 20", Unit::Times, eleven / twenty)
            .published("lower with more disks")
            .check("above 1 ×", eleven > twenty),
    );
    Ok(Findings { lines, notes: vec![], picture: bars(&chart) })
}

fn share_cases(size: Size) -> Vec<Case> {
    let case = |array: fn(u64) -> ArrayConfig, cache: &str| {
        Case::new("vmmark", &settings(size), FAST_CACHE, Backing::Luns(LUNS, array))
            .set(cache)
            .on_one_disk()
            .memory(DRAM)
    };
    let warm = |array: fn(u64) -> ArrayConfig, cache: &str| case(array, cache).twice();
    vec![
        warm(eight, "cache=92GiB"),
        warm(four, "cache=92GiB"),
        warm(eight, "cache=366GiB"),
        warm(eight, "cache=92GiB").set("tiles=2"),
        warm(eight, "cache=92GiB").set("tiles=3"),
        case(eight, "cache=92GiB"),
    ]
}

fn judge_share(runs: &[Measured]) -> Result<Findings> {
    let [twenty, eleven, large, two_tiles, three_tiles, empty] = runs else { unreachable!("six cases") };
    let share = |text: &str, value: f64| Line::new(text, Unit::Percent, value);
    let both = |run: &Measured| run.served().both();
    let mix = twenty.stats.reads as f64 / (twenty.stats.reads + twenty.stats.writes) as f64;
    let read = |run: &Measured| run.by_op[0].mean_s();
    let writes = [twenty, eleven, large].map(|run| run.by_op[1].mean_s());
    let spread = writes.into_iter().fold(0.0, f64::max) / writes.into_iter().fold(f64::INFINITY, f64::min);
    let of_reads = |run: &Measured| run.served().memory / mix;
    let [before, after] = [both(two_tiles) - both(three_tiles), both(three_tiles) - both(twenty)];
    let lines = vec![
        share("share of reads", mix).published(0.24).by_construction("read-percent"),
        share("served by DRAM and flash, 92 GB, 20 disks", both(twenty))
            .published(LEAST_SERVED)
            .by_construction(HOT.input),
        share("served by DRAM and flash, 92 GB, 20 disks, cache empty at first", both(empty))
            .published(LEAST_SERVED)
            .check("at least 92.1 %", both(empty) >= LEAST_SERVED),
        share("served by DRAM and flash, 92 GB, 11 disks", both(eleven))
            .published(0.965)
            .by_construction(HOT.input),
        share("served by DRAM and flash, 366 GB", both(large))
            .published("nearly all")
            .check("at least 99 %", both(large) >= 0.99),
        share("served by DRAM, 92 GB", twenty.served().memory),
        share("served by flash, 92 GB", twenty.served().flash),
        share("reads that DRAM serves, 92 GB", of_reads(twenty)).check(
            "11 % – 20 %: 12 GB are 12 % of the hot data, and some of it is read more often",
            (0.11..=0.20).contains(&of_reads(twenty)),
        ),
        share("served by DRAM and flash, two tiles", both(two_tiles)),
        share("served by DRAM and flash, three tiles", both(three_tiles)),
        share("lost from two to three tiles", before),
        share("lost from three to four tiles", after)
            .published("the working set of four tiles no longer fits")
            .check("at least 2 points more than from two to three", after >= before + KNEE),
        Line::new("mean read latency, 366 GB against 92 GB", Unit::Percent, read(large) / read(twenty))
            .published("lower with more cache")
            .check("below 100 %", read(large) < read(twenty)),
        Line::new("mean read latency, 20 disks against 11", Unit::Percent, read(twenty) / read(eleven))
            .published("lower with more disks")
            .check("below 100 %", read(twenty) < read(eleven)),
        Line::new("mean write latency, slowest against fastest of the three", Unit::Times, spread)
            .published("nearly constant")
            .check(format!("at most {NEARLY_CONSTANT} ×"), spread <= NEARLY_CONSTANT),
    ];
    let chart = BarChart::new("Share of I/O served by DRAM and flash", "share", Unit::Percent)
        .subtitle(format!(
            "{} requests of the generator vmmark on each",
            Unit::Count.text(runs[0].requests as f64)
        ))
        .series("published")
        .series("measured")
        .group(BarGroup::new("92 GB, 20 disks", [Bar::Value(LEAST_SERVED), Bar::Value(both(twenty))]))
        .group(BarGroup::new("92 GB, 11 disks", [Bar::Value(0.965), Bar::Value(both(eleven))]))
        .group(BarGroup::new("366 GB", [Bar::Missing, Bar::Value(both(large))]));
    Ok(Findings { lines, notes: vec![ARRAYS_NOTE.to_owned()], picture: bars(&chart) })
}
