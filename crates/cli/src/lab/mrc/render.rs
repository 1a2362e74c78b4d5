//! Output of the curves as a table, as CSV and as a picture.

use hob_control::Size;
use hob_lab::picture::{Axis, Curve, CurveChart, Marker, Unit, curves};
use serde::Serialize;

use super::{CurveReport, Report, Row, SizeReport};
use crate::lab::{bytes, percent};
use crate::output::{self, pairs, table};

pub(super) fn show(report: &Report) -> String {
    let mut parts = vec![rows(report)];
    for curve in &report.curves {
        let title = format!("blocks of {}", Size(curve.block_bytes));
        let size = |size: &SizeReport| {
            format!("{}, {} % of reads hit", bytes(size.cache_bytes), percent(size.read_hit_ratio))
        };
        let target = match &curve.target {
            Some(target) => size(target),
            None => format!("no cache reaches that; at most {} % hit", percent(curve.read_hit_ratio_max)),
        };
        let goal = format!("for {} % hits", percent(report.target_hit_ratio));
        let mut facts = vec![
            ("footprint", bytes(curve.footprint_bytes)),
            ("knee", curve.knee.as_ref().map_or("none, because no cache has a hit".to_owned(), size)),
            (goal.as_str(), target),
        ];
        if let Some(sampled) = curve.sampled {
            facts.push(("sample", format!("{} blocks, {} % of all", sampled.blocks, percent(sampled.rate))));
        }
        parts.push(format!("{title}\n{}", pairs(facts)));
    }
    parts.push(format!("{} requests in {:.2} s\n", report.requests, report.seconds));
    parts.join("\n\n")
}

fn rows(report: &Report) -> String {
    let is_exact = report.curves.iter().any(|curve| curve.rows.iter().any(|row| row.exact.is_some()));
    let (exact, count) = match is_exact {
        true => ("|BYTE HITS %:|WRITE HITS %:|ABSORBED:|FLASH WRITES:|BACKING I/O:", 9),
        false => ("", 4),
    };
    let columns = format!("BLOCK:|CACHE:|SHARE %:|READ HITS %:{exact}");
    let row = |curve: &CurveReport, row: &Row| {
        let mut cells = vec![
            Size(curve.block_bytes).to_string(),
            bytes(row.cache_bytes),
            percent(row.cache_share),
            percent(row.read_hit_ratio),
        ];
        if let Some(exact) = row.exact {
            cells.extend([
                percent(exact.byte_hit_ratio),
                percent(exact.write_hit_ratio),
                bytes(exact.absorbed_bytes),
                bytes(exact.flash_write_bytes),
                exact.backing_ios.to_string(),
            ]);
        }
        cells.resize(count, "-".to_owned());
        cells
    };
    table(&columns, report.curves.iter().flat_map(|curve| curve.rows.iter().map(move |r| row(curve, r))))
}

/// Returns every point of every curve as CSV. Columns of exact curves are empty if blocks were
/// sampled.
pub(super) fn csv(report: &Report) -> String {
    #[derive(Serialize)]
    struct Line<'a> {
        block_bytes: u64,
        #[serde(flatten)]
        row: &'a Row,
    }
    let lines = report
        .curves
        .iter()
        .flat_map(|curve| curve.points.iter().map(move |row| Line { block_bytes: curve.block_bytes, row }));
    output::csv(
        "block_bytes,cache_bytes,cache_share,read_hit_ratio,byte_hit_ratio,write_hit_ratio,absorbed_bytes,\
         flash_write_bytes,backing_ios",
        lines,
    )
}

/// Draws read hits against cache size, with one curve per block size.
pub(super) fn draw(report: &Report) -> String {
    let mut chart = CurveChart::new(
        "Reads served from flash, by cache size (LRU)",
        Axis::new("cache size", Unit::Bytes).log(),
        Axis::new("read hits", Unit::Percent),
    )
    .subtitle(format!("{}, {} requests", report.trace, report.requests))
    .marker(Marker::Y(
        report.target_hit_ratio,
        format!("target {}", Unit::Percent.text(report.target_hit_ratio)),
    ));
    for curve in &report.curves {
        let points = curve.points.iter().map(|row| (row.cache_bytes as f64, row.read_hit_ratio)).collect();
        let sampled = if curve.sampled.is_some() { ", sampled" } else { "" };
        chart = chart.curve(Curve::new(format!("blocks of {}{sampled}", Size(curve.block_bytes)), points));
    }
    if let [CurveReport { knee: Some(knee), .. }] = report.curves.as_slice() {
        chart = chart.marker(Marker::X(knee.cache_bytes as f64, format!("knee {}", bytes(knee.cache_bytes))));
    }
    curves(&chart)
}
