//! Measures Oracle's I/O calibration: reads per second of successive passes, the first on an empty
//! cache.

use anyhow::Result;
use hob_world::disk_model::ArrayConfig;
use hob_world::flash_model::FlashConfig;

use super::case::{Backing, Case, CaseCache, Measured};
use super::line::Line;
use super::{FigureInfo, Findings, Size, Work, fitted};
use crate::picture::{Axis, Curve, CurveChart, Unit, curves};

/// Published reads per second without a cache, as a range.
const BASELINE: (f64, f64) = (576.0, 608.0);
const COLD: f64 = 268.0;
/// Number of passes with the cache.
const PASSES: usize = 6;

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "calibration",
    title: "Oracle I/O calibration: reads a second, cold and then warmer",
    source: "the vSphere Flash Read Cache study",
    published: "A disk of 200 GB on RAID 5 of four 7.2K disks, a cache of 50 GB with 8 KB blocks: 576–608 reads a \
                second without the cache; with it 268 in the first pass, then rising, at 29 % read hits.",
    method: "The generator calibration, with the published characteristics, replaces the \
             original tool. It runs on models of the source's array and of a SATA SSD with the \
             rating that the source states. The source does not say which flash device it used \
             for this result.",
    fitted: &[
        fitted("queue gain of the disk model", "576–608 reads a second"),
        fitted("files", "29 % hits"),
        fitted("pass-percent", "several passes"),
    ],
    work: Work::Play { cases, judge },
};

/// Reason why the first pass is faster in hob than in the publication.
const COLD_REASON: &str = "The source did only half as many reads a second while its cache was \
    empty. With hob, the disks do as many reads a second in the first pass as without a cache. \
    hob answers a miss as soon as the disks have answered, and copies the data to flash \
    afterwards. The other reads of the pass are hits.";

fn cases(size: Size) -> Vec<Case> {
    let scale = match size {
        Size::Full => "scale=1",
        Size::Quick => "scale=1024",
    };
    let array = Backing::Array(ArrayConfig::raid5_of_four_7200);
    let case =
        |cache, passes: usize| Case::new("calibration", &[scale, &format!("passes={passes}")], cache, array);
    vec![case(CaseCache::Off, 1), case(CaseCache::Planned(FlashConfig::sata_ssd()), PASSES)]
}

fn judge(runs: &[Measured]) -> Result<Findings> {
    let without = runs[0].passes();
    let with = runs[1].passes();
    let (baseline, (cold, _)) = (without[0].0, with[0]);
    let (warm, hits) = with[with.len() - 1];
    let mut lines = vec![
        Line::new("reads a second, no cache", Unit::Count, baseline)
            .published(BASELINE)
            .by_construction("the queue gain of the modelled disks"),
    ];
    let middle = (BASELINE.0 + BASELINE.1) / 2.0;
    // The reads of a pass that the disks do, each second.
    let on_disks = |(rate, hits): (f64, f64)| rate * (1.0 - hits);
    let is_near = |rate: f64| (0.95..=1.05).contains(&(rate / baseline));
    for (number, pass) in (1..).zip(&with) {
        let line = Line::new(format!("reads a second, pass {number}"), Unit::Count, pass.0);
        lines.push(match number {
            1 => line.published(COLD).near(0.2).explained(is_near(on_disks(*pass)), COLD_REASON),
            _ => line,
        });
    }
    let against = |what: &str, rate: f64| Line::new(what, Unit::Times, rate / baseline);
    lines.push(
        against("reads of the disks, first pass against no cache", on_disks(with[0])).within(0.95, 1.05),
    );
    lines.push(
        against("reads of the disks, last pass against no cache", on_disks((warm, hits))).within(0.95, 1.05),
    );
    lines.push(
        Line::new("last pass against first pass", Unit::Times, warm / cold)
            .published("rising")
            .check("at least 1.2 ×", warm >= 1.2 * cold),
    );
    lines.push(
        Line::new("read hits, last pass", Unit::Percent, hits).published(0.29).by_construction("files"),
    );
    let points = (1..).zip(&with).map(|(number, (rate, _))| (f64::from(number), *rate)).collect();
    let flat = |rate: f64| vec![(1.0, rate), (with.len() as f64, rate)];
    let (x, y) = (Axis::new("pass", Unit::Count), Axis::new("reads a second", Unit::Count));
    let chart = CurveChart::new("Reads a second, pass by pass", x, y)
        .subtitle(format!("{} reads of the generator calibration", Unit::Count.text(runs[1].requests as f64)))
        .curve(Curve::new("measured, with the cache", points).dots())
        .curve(Curve::new("published, first pass", vec![(1.0, COLD)]).dots())
        .curve(Curve::new("measured, no cache", flat(baseline)))
        .curve(Curve::new("published, no cache", flat(middle)));
    Ok(Findings { lines, notes: vec![], picture: curves(&chart) })
}
