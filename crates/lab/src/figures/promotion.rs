//! Simulates promotion by hob's preset `fast-cache`: the third access promotes a page, and a
//! sequential stream is never promoted.

use anyhow::{Context, Result};
use hob_engine::io::{Durability, Op};
use hob_engine::outcome::Outcome;
use hob_engine::preset::preset;
use hob_world::disk_model::{ArrayConfig, ArrayModel};
use hob_world::flash_model::{FlashConfig, FlashModel};
use hob_world::replay::{Ask, CacheSetup, Replay, Setup};

use super::line::Line;
use super::{FigureInfo, Findings, Work};
use crate::picture::{Axis, Curve, CurveChart, Unit, curves};
use crate::workload::Scatter;

const PAGE: u64 = 64 << 10;
/// Number of accessed pages. Each pass has a different order, and the cache has room for four times
/// as many pages.
const PAGES: u64 = 2000;
const ACCESSES: u64 = 6;
/// Size of each request of the sequential stream, bytes.
const STREAM_IO: u64 = 256 << 10;

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "fast-cache-promotion",
    title: "FAST Cache: promotion at the third access",
    source: "the EMC FAST Cache study",
    published: "A page of 64 KB is promoted when it has been accessed three times; sequential streams thus never populate the \
                cache.",
    method: "The preset fast-cache runs three loads. 2000 pages are read six times each, every \
             time in another random order. 2000 pages are written in the same way. Then 125 MB \
             of other pages are read from end to end six times. Each access is a whole page, \
             because hob caches only the requested part of a page.",
    fitted: &[],
    work: Work::Play { cases: |_| vec![], judge: |_| judge(|_| {}) },
};

/// Returns the share of accesses that flash served, one value per pass. A served access is a read
/// hit or a write to flash.
fn served(replay: &mut Replay, asks: impl Fn(u64) -> Vec<Ask>) -> Vec<f64> {
    let pass = |time| {
        let mut asks = asks(time).into_iter();
        let (mut all, mut flash) = (0.0, 0.0);
        replay.closed(
            1,
            |_, _| asks.next().map(|ask| (0, ask)),
            |served| {
                all += 1.0;
                flash += f64::from(matches!(served.outcome, Outcome::Hit | Outcome::WriteBack));
            },
        );
        flash / all
    };
    (1..=ACCESSES).map(pass).collect()
}

/// Evaluates the cache of the preset, after `adjust` has changed the settings of the cache.
pub(super) fn judge(adjust: fn(&mut CacheSetup)) -> Result<Findings> {
    let preset = preset("fast-cache").context("the preset")?;
    let size = 8 * PAGES * PAGE;
    let mut cache = CacheSetup::preset(size, preset);
    adjust(&mut cache);
    let array = ArrayModel::new(ArrayConfig::raid5_of_five_15k(size));
    let setup = Setup::one_disk(size, Some(cache), FlashModel::new(FlashConfig::sata_ssd()), array);
    let mut replay = Replay::new(setup)?;
    let ask = |op, offset, len| Ask { disk: 0, op, offset, len, tag: 0 };
    let random = |op, start: u64| {
        move |time| {
            let order = Scatter::new(PAGES, time);
            (0..PAGES).map(|n| ask(op, (start + 2 * order.place(n)) * PAGE, PAGE)).collect()
        }
    };
    let reads = served(&mut replay, random(Op::Read, 0));
    let writes = served(&mut replay, random(Op::Write(Durability::Volatile), 1));
    let stream = |_| {
        let start = 6 * PAGES * PAGE;
        (0..PAGES * PAGE / STREAM_IO).map(|n| ask(Op::Read, start + n * STREAM_IO, STREAM_IO)).collect()
    };
    let streams = served(&mut replay, stream);
    let share = |text: String, value: f64| Line::new(text, Unit::Percent, value);
    let mut lines = Vec::new();
    for (time, value) in (1..).zip(&reads) {
        let line = share(format!("random reads served by flash, pass {time} of 6"), *value);
        lines.push(match time <= 3 {
            true if time == 1 => line.published("not promoted before").by_construction("an empty cache"),
            true => line.published("not promoted before").check("none", *value == 0.0),
            false => line.published("promoted at the third").check("at least 99 %", *value >= 0.99),
        });
    }
    for (time, value) in (1..).zip(&writes) {
        let line = share(format!("random writes taken by flash, pass {time} of 6"), *value);
        lines.push(match time <= 2 {
            true => line.published("not promoted before").check("none", *value == 0.0),
            false => line.published("promoted at the third").check("at least 99 %", *value >= 0.99),
        });
    }
    let most = streams.iter().copied().fold(0.0, f64::max);
    lines.push(
        share("sequential reads served by flash, highest of 6 passes".to_owned(), most)
            .published("none")
            .check("at most 1 %", most <= 0.01),
    );
    let points = |values: &[f64]| (1..).zip(values).map(|(time, value)| (f64::from(time), *value)).collect();
    let (x, y) =
        (Axis::new("access to the same page", Unit::Count), Axis::new("served by flash", Unit::Percent));
    let chart = CurveChart::new("Share of accesses that flash served", x, y)
        .subtitle(format!("{PAGES} pages, each in another order each time"))
        .curve(Curve::new("writes", points(&writes)).dots())
        .curve(Curve::new("reads", points(&reads)).dots())
        .curve(Curve::new("sequential stream", points(&streams)).dots());
    Ok(Findings { lines, notes: vec![], picture: curves(&chart) })
}
