//! Measures a decision-support database by the type of its queries.

use anyhow::Result;

use super::case::{Case, Measured};
use super::line::Line;
use super::{FigureInfo, Findings, Size, Work, dss};
use crate::picture::{Bar, BarChart, BarGroup, Unit, bars};

const TYPES: [&str; 3] = ["5 % look-ups", "25 % look-ups", "45 % look-ups"];

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "dss-types",
    title: "Decision support by type of query",
    source: "the vSphere Flash Read Cache study",
    published: "Each type of query is faster with the cache.",
    method: "The generator dss replaces the original queries, as in the figure dss. Here it has \
             three types of query of the same length, which differ in their share of look-ups: \
             5, 25 and 45 %. The types are chosen; their mean is that of the figure dss. Arrays \
             and devices are those of the figure dss.",
    fitted: dss::FITTED,
    work: Work::Play { cases, judge },
};

fn cases(size: Size) -> Vec<Case> {
    let settings = match size {
        Size::Full => ["scale=1", "transactions=840", "spread-percent=20"],
        Size::Quick => ["scale=512", "transactions=126", "spread-percent=20"],
    };
    dss::without_and_with_cache(&settings)
}

fn judge(runs: &[Measured]) -> Result<Findings> {
    let [without, with] = [&runs[0], &runs[1]].map(Measured::by_type);
    let mut lines = Vec::new();
    let mut speed_ups = Vec::new();
    let mut chart = BarChart::new("Mean response time by type of query", "response time", Unit::Seconds)
        .subtitle(format!("{} requests of the generator dss", Unit::Count.text(runs[1].requests as f64)))
        .series("no cache")
        .series("cache");
    for ((name, (before_s, _)), (after_s, hits)) in TYPES.iter().zip(&without).zip(&with) {
        let speed_up = before_s / after_s;
        speed_ups.push(speed_up);
        lines.push(Line::new(format!("mean response time, no cache, {name}"), Unit::Seconds, *before_s));
        lines.push(Line::new(format!("mean response time, cache, {name}"), Unit::Seconds, *after_s));
        lines.push(Line::new(format!("read hits, {name}"), Unit::Percent, *hits));
        lines.push(
            Line::new(format!("mean response time, no cache against cache, {name}"), Unit::Times, speed_up)
                .published("faster with the cache")
                .check("at least 1.2 ×", speed_up >= 1.2),
        );
        chart = chart.group(BarGroup::new(*name, [Bar::Value(*before_s), Bar::Value(*after_s)]));
    }
    let most = speed_ups.iter().copied().fold(0.0, f64::max);
    let least = speed_ups.iter().copied().fold(f64::INFINITY, f64::min);
    lines.push(Line::new("highest gain against lowest", Unit::Times, most / least));
    Ok(Findings { lines, notes: vec![], picture: bars(&chart) })
}
