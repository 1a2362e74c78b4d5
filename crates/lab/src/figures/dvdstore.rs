//! Simulates the DVD Store benchmark on an array of ten disks with 10 000 rpm. One cache has room
//! for two thirds of the database, another one for all of it.

use anyhow::Result;
use hob_world::disk_model::ArrayConfig;
use hob_world::flash_model::FlashConfig;

use super::case::{Backing, Case, CaseCache, Measured};
use super::line::Line;
use super::{FigureInfo, Findings, Size, Work, fitted};
use crate::picture::{Bar, BarChart, BarGroup, Unit, bars};

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "dvdstore",
    title: "DVD Store: orders a minute with caches of 10 GB and 15 GB",
    source: "the vSphere Flash Read Cache study",
    published: "A database of 15 GB, random over all of it, 60 % reads, RAID 5 of ten 10K disks, a PCIe card: 8802 \
                orders a minute, 8937 with a cache of 10 GB, 12 319 with one of 15 GB.",
    method: "The generator dvdstore, with the published characteristics, replaces the original \
             benchmark. It runs on models of the source's array and of a card with the rating \
             that the source states. The cache blocks have 512 KB. The source does not state \
             their size, but with blocks as small as the requests, a cache of 10 GB would gain \
             far more than published.",
    fitted: &[
        fitted("clients, ios", "8802 orders a minute without a cache"),
        fitted("block", "8937 orders a minute with 10 GB"),
        fitted("warmup-per-block", "a warm cache"),
    ],
    work: Work::Play { cases, judge },
};

fn cases(size: Size) -> Vec<Case> {
    let settings = match size {
        Size::Full => ["scale=1", "transactions=40000"],
        Size::Quick => ["scale=512", "transactions=1000"],
    };
    let array = Backing::Array(ArrayConfig::raid5_of_ten_10k);
    let case = |cache| Case::new("dvdstore", &settings, cache, array);
    let card = FlashConfig::pcie_card();
    vec![
        case(CaseCache::Off).set("warmup-per-block=0"),
        case(CaseCache::Share(card, 10.0 / 15.0)),
        case(CaseCache::Planned(card)),
    ]
}

fn judge(runs: &[Measured]) -> Result<Findings> {
    let published = [8802.0, 8937.0, 12_319.0];
    let names = ["no cache", "cache of 10 GB", "cache of 15 GB"];
    let measured: Vec<f64> = runs.iter().map(Measured::per_minute).collect();
    let mut lines: Vec<Line> = (0..3)
        .map(|i| {
            let what = format!("orders a minute, {}", names[i]);
            let line = Line::new(what, Unit::Count, measured[i]).published(published[i]);
            match i {
                0 => line.by_construction("clients and ios"),
                1 => line.by_construction("block"),
                _ => line.near(0.1),
            }
        })
        .collect();
    let gain = |values: &[f64], index: usize| values[index] / values[0] - 1.0;
    let gained = |index: usize| {
        let what = format!("gain of the {}", names[index]);
        Line::new(what, Unit::Percent, gain(&measured, index)).published(gain(&published, index))
    };
    lines.push(gained(1).by_construction("block"));
    lines.push(gained(2).within(0.3, 0.5));
    let hits = |index: usize| {
        let what = format!("read hits, {}", names[index]);
        Line::new(what, Unit::Percent, runs[index].stats.read_hit_ratio())
    };
    lines.push(hits(1));
    let is_whole = runs[2].stats.read_hit_ratio() >= 0.99;
    lines.push(hits(2).check("at least 99 %: all of the database", is_whole));
    let mut chart = BarChart::new("Orders a minute", "orders a minute", Unit::Count)
        .subtitle(format!(
            "{} requests of the generator dvdstore on each",
            Unit::Count.text(runs[0].requests as f64)
        ))
        .series("published")
        .series("measured");
    for (index, name) in names.into_iter().enumerate() {
        chart = chart.group(BarGroup::new(name, [Bar::Value(published[index]), Bar::Value(measured[index])]));
    }
    Ok(Findings { lines, notes: vec![], picture: bars(&chart) })
}
