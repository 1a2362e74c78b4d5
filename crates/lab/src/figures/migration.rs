//! Measures how the time to copy a cache to another host depends on the size of the cache and on
//! the amount of data in the cache.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use anyhow::Result;
use hob_engine::migration::{Pulled, Puller};
use hob_engine::units::SECTOR_BYTES;
use hob_world::disk_model::Access;
use hob_world::flash_model::{FlashConfig, FlashModel};

use super::case::{Backing, Case, CaseCache, Measured};
use super::line::Line;
use super::{FigureInfo, Findings, HM_FITTED, Size, Work};
use crate::picture::{Axis, Curve, CurveChart, Unit, curves};

/// Reason why a larger cache does not take longer, as printed on the page.
const DATA_REASON: &str = "hob copies only the valid data, whatever the reserved size is. Both \
    caches have the same data, which fits into 16 GB, so both copies take the same time. A copy \
    of all blocks of the same caches takes the published time.";

const GIB: f64 = 1_073_741_824.0;
/// Maximum length of one pull, and number of pulls in flight, as in the daemon.
const PULL_BYTES_MAX: u64 = 512 << 10;
const PULLS: usize = 8;
/// Bandwidth of the network between the hosts: 10 Gbit/s.
const LINK_BYTES_PER_S: u64 = 1_250_000_000;
/// Reserved sizes of the cache, as settings of the generator and in GiB.
const SIZES: [(&str, f64); 5] = [
    ("cache=2GiB", 2.0),
    ("cache=4GiB", 4.0),
    ("cache=8GiB", 8.0),
    ("cache=16GiB", 16.0),
    ("cache=32GiB", 32.0),
];

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "migration",
    title: "Migration with the cache: time by reserved size",
    source: "the vSphere Flash Read Cache study",
    published: "A live migration with the cache costs time and network in proportion to the whole reserved size, used or \
                not.",
    method: "The generator hm replaces the original VM. It runs on caches of 2 to 32 GB; the \
             larger caches have free space. Then the engine's list of valid data, hottest first, \
             and its puller copy the cache. There are 8 pulls of at most 512 KB in flight, SATA \
             SSDs on both hosts, and a network of 10 Gbit/s.",
    fitted: &[HM_FITTED],
    work: Work::Play { cases, judge },
};

fn cases(size: Size) -> Vec<Case> {
    let settings = match size {
        Size::Full => ["scale=16", "requests=20000"],
        Size::Quick => ["scale=1024", "requests=3000"],
    };
    let case = |cache: &str| {
        let flash = CaseCache::Planned(FlashConfig::sata_ssd());
        let case = Case::new("hm", &settings, flash, Backing::FixedNs(1_230_000)).set(cache);
        Case { lists_extents: true, ..case }
    };
    SIZES.iter().map(|(cache, _)| case(cache)).collect()
}

/// Simulates the copy of these extents to another host. Returns the number of bytes and the time in
/// seconds.
fn copied(extents: &[(u64, u64)]) -> (u64, f64) {
    let flash = || FlashModel::new(FlashConfig::sata_ssd());
    let (mut from, mut to, mut link_free) = (flash(), flash(), 0);
    let mut puller = Puller::new(PULL_BYTES_MAX);
    puller.add(extents.iter().copied());
    let (mut now, mut in_flight) = (0, BinaryHeap::new());
    while let Some(pull) = puller.next() {
        if in_flight.len() == PULLS {
            let Reverse(done) = in_flight.pop().expect("a full window is not empty");
            now = done;
        }
        let (offset, len) = (pull.first * SECTOR_BYTES, (pull.end - pull.first) * SECTOR_BYTES);
        let read = from.submit(now, Access::Read, offset, len);
        link_free = read.max(link_free) + len * 1_000_000_000 / LINK_BYTES_PER_S;
        in_flight.push(Reverse(to.submit(link_free, Access::Write, offset, len)));
        puller.ended(pull, Pulled::Done);
    }
    let end = in_flight.into_iter().map(|Reverse(done)| done).fold(now, u64::max);
    (puller.pulled_bytes(), end as f64 / 1e9)
}

fn judge(runs: &[Measured]) -> Result<Findings> {
    let scale = 2.0 * GIB / (runs[0].stats.blocks * 4096) as f64;
    let mut lines = Vec::new();
    let (mut points, mut valid) = (Vec::new(), Vec::new());
    for ((_, reserved), run) in SIZES.iter().zip(runs) {
        let (bytes, seconds) = copied(&run.extents);
        let share = bytes as f64 * scale / (reserved * GIB);
        lines.push(Line::new(format!("time of the copy, {reserved} GB"), Unit::Seconds, seconds * scale));
        lines.push(Line::new(
            format!("copied share of the reserved size, {reserved} GB"),
            Unit::Percent,
            share,
        ));
        points.push((reserved * GIB, seconds * scale));
        valid.push((bytes, run.stats.sectors_valid * SECTOR_BYTES));
    }
    let (largest, half) = (points[SIZES.len() - 1].1, points[SIZES.len() - 2].1);
    let [more, less] = [1, 2].map(|index| &runs[SIZES.len() - index]);
    let whole = |run: &Measured| copied(&[(0, run.stats.blocks * 4096 / SECTOR_BYTES)]).1;
    let whole_times = whole(more) / whole(less);
    let is_same_data = more.stats.sectors_valid == less.stats.sectors_valid;
    let is_double = |times: f64| (2.0 - times).abs() <= 0.2;
    let is_all = valid.iter().all(|(copied, valid)| copied == valid && *valid > 0);
    lines.extend([
        Line::new("copied data", Unit::Count, if is_all { "the valid data" } else { "other data" })
            .check("the valid data, in each cache", is_all),
        Line::new("time of the copy, 32 GB against 16 GB", Unit::Times, largest / half)
            .published(2.0)
            .near(0.1)
            .explained(
                is_all && is_same_data && largest <= 1.05 * half && is_double(whole_times),
                DATA_REASON,
            ),
        Line::new("time of a copy of all blocks, 32 GB against 16 GB", Unit::Times, whole_times),
        Line::new("time of the copy, 4 GB against 2 GB", Unit::Times, points[1].1 / points[0].1)
            .published(2.0)
            .near(0.1),
    ]);
    let proportional = points.iter().map(|(bytes, _)| (*bytes, bytes / (2.0 * GIB) * points[0].1)).collect();
    let (x, y) = (Axis::new("reserved size", Unit::Bytes), Axis::new("time of the copy", Unit::Seconds));
    let chart = CurveChart::new("Time of a migration with the cache, by reserved size", x, y)
        .subtitle("the same disk and load with each size; sizes are those before scaling")
        .curve(Curve::new("measured", points).dots())
        .curve(Curve::new("published: in proportion", proportional));
    Ok(Findings { lines, notes: vec![], picture: curves(&chart) })
}
