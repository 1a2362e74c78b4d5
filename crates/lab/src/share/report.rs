//! Writes the HTML page of a comparison of ways to divide a pool, and its pictures and tables as
//! separate files.
//!
//! Each file is first written under a temporary name, and the page is written last, so a partial
//! page never exists.

use std::cmp::Reverse;
use std::path::Path;

use anyhow::Result;

use super::compare::{DiskRow, Row, capacity_csv, csv, disks_csv};
use crate::figures::place;
use crate::page::{Cell, Figure, Page, Section, Table};
use crate::picture::{Axis, Bar, BarChart, BarGroup, Curve, CurveChart, Unit, bars, curves};

const PAGE: &str = "divisions.html";
const PICTURE: &str = "divisions.svg";
const CSV: &str = "divisions.csv";
const DISKS_CSV: &str = "divisions-disks.csv";
const CAPACITY_CSV: &str = "divisions-capacity.csv";

/// Maximum number of disks in a bar chart, so that the chart stays readable in the height of a
/// window.
const BARS_MAX: usize = 12;
/// Maximum number of disks in a line chart, so that the names of the disks fit beside the chart.
const CURVES_MAX: usize = 14;

/// Facts about the comparison that the page states.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Number of requests of all disks.
    pub requests: usize,
    /// Number of bytes that the requests touch.
    pub footprint_bytes: u64,
    /// Time from the first to the last request, nanoseconds.
    pub duration_ns: u64,
    /// Settings of the caches, as a part of a sentence.
    pub settings: String,
    /// Command and version that the page prints as its origin.
    pub made_by: String,
}

/// Writes page, pictures and tables into the directory, which must exist. Returns the names of the
/// files; the last one is the page.
///
/// # Errors
/// Returns an error if a file cannot be written.
pub fn write(out: &Path, rows: &[Row], facts: &Facts) -> Result<Vec<String>> {
    let hits = hits_picture(rows);
    let mut page = head(rows, facts).section(all_disks(rows, &hits));
    let mut files = vec![
        (PICTURE.to_owned(), hits),
        (CSV.to_owned(), csv(rows)),
        (DISKS_CSV.to_owned(), disks_csv(rows)),
    ];
    if rows.iter().any(|row| !row.history.is_empty()) {
        files.push((CAPACITY_CSV.to_owned(), capacity_csv(rows)));
    }
    for (number, pool) in (1..).zip(pools(rows)) {
        let disks = disks_picture(pool);
        let capacity = pool.iter().find_map(|row| capacity_picture(row, facts));
        page = page.section(pool_section(pool, &disks, capacity.as_deref()));
        files.push((format!("divisions-disks-{number}.svg"), disks));
        files.extend(capacity.map(|picture| (format!("divisions-auto-{number}.svg"), picture)));
    }
    files.push((PAGE.to_owned(), page.made_by(&facts.made_by).render()));
    for (name, text) in &files {
        place(out, name, text)?;
    }
    Ok(files.into_iter().map(|(name, _)| name).collect())
}

fn pools(rows: &[Row]) -> impl Iterator<Item = &[Row]> {
    rows.chunk_by(|a, b| a.cache_bytes == b.cache_bytes)
}

fn bytes(bytes: u64) -> String {
    Unit::Bytes.text(bytes as f64)
}

fn percent(ratio: f64) -> String {
    format!("{:.2} %", ratio * 100.0)
}

/// Returns the page with title and summary.
fn head(rows: &[Row], facts: &Facts) -> Page {
    let disks = rows.first().map_or(0, |row| row.disks.len());
    let touched = bytes(facts.footprint_bytes);
    let mut page = Page::new("hob: one pool for several disks").lead(format!(
        "Simulated on {disks} disks with {} requests, which touch {touched} of data; {}.",
        facts.requests, facts.settings
    ));
    for pool in pools(rows) {
        let ratio = |row: &Row| format!("{} {}", row.division, percent(row.read_hit_ratio));
        let ratios: Vec<String> = pool.iter().map(ratio).collect();
        page = page.lead(format!("Read hits with {}: {}.", size(&pool[0]), ratios.join(", ")));
    }
    page
}

/// Returns the size of a pool in words.
fn size(row: &Row) -> String {
    format!("{} ({} of the data)", bytes(row.cache_bytes), Unit::Percent.text(row.cache_share))
}

/// Returns a bar chart of read hits with one series for each way to divide the pool between the
/// disks.
fn chart(title: String, rows: &[Row]) -> BarChart {
    let chart = BarChart::new(title, "read hits", Unit::Percent);
    rows.iter().fold(chart, |chart, row| chart.series(row.division))
}

fn hits_picture(rows: &[Row]) -> String {
    let first = pools(rows).next().unwrap_or_default();
    let mut chart = chart("Read hits of all disks by division of the pool".to_owned(), first);
    for pool in pools(rows) {
        let hits: Vec<Bar> = pool.iter().map(|row| Bar::Value(row.read_hit_ratio)).collect();
        chart = chart.group(BarGroup::new(size(&pool[0]), hits));
    }
    bars(&chart.upright())
}

fn disks_picture(pool: &[Row]) -> String {
    let disks = &pool[0].disks;
    let reads: Vec<u64> = disks.iter().map(|disk| disk.reads).collect();
    let drawn = largest(&reads, BARS_MAX);
    let mut chart = chart(format!("Read hits by disk, pool of {}", bytes(pool[0].cache_bytes)), pool)
        .subtitle(drawn_of(drawn.len(), disks.len(), "with the most reads"));
    for number in drawn {
        let hits = |row: &Row| row.disks[number].read_hit_ratio.map_or(Bar::Missing, Bar::Value);
        let hits: Vec<Bar> = pool.iter().map(hits).collect();
        chart = chart.group(BarGroup::new(disks[number].disk.as_str(), hits));
    }
    bars(&chart)
}

/// Returns the picture of the sizes over time, or `None` if the sizes are fixed.
fn capacity_picture(row: &Row, facts: &Facts) -> Option<String> {
    if row.history.is_empty() {
        return None;
    }
    let most = |sizes: &Vec<(u64, u64)>| sizes.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
    let drawn = largest(&row.history.iter().map(most).collect::<Vec<u64>>(), CURVES_MAX);
    let title = format!("Capacity of each disk with '{}', pool of {}", row.division, bytes(row.cache_bytes));
    let (time, capacity) = (Axis::new("time", Unit::Seconds), Axis::new("capacity", Unit::Bytes));
    let mut chart = CurveChart::new(title, time, capacity).subtitle(drawn_of(
        drawn.len(),
        row.disks.len(),
        "with the largest caches",
    ));
    for number in drawn {
        let point = |(at_ns, bytes): &(u64, u64)| (*at_ns as f64 / 1e9, *bytes as f64);
        let mut points: Vec<(f64, f64)> = row.history[number].iter().map(point).collect();
        if let Some((_, last)) = points.last().copied() {
            points.push((facts.duration_ns as f64 / 1e9, last));
        }
        chart = chart.curve(Curve::new(row.disks[number].disk.as_str(), points).steps());
    }
    Some(curves(&chart))
}

/// Returns the numbers of the largest values in ascending order, at most `max`.
fn largest(values: &[u64], max: usize) -> Vec<usize> {
    let mut numbers: Vec<usize> = (0..values.len()).collect();
    numbers.sort_by_key(|number| Reverse(values[*number]));
    numbers.truncate(max);
    numbers.sort_unstable();
    numbers
}

/// Returns a text that says which disks a picture shows. The text is empty if the picture shows all
/// disks.
fn drawn_of(drawn: usize, disks: usize, which: &str) -> String {
    if drawn == disks { String::new() } else { format!("the {drawn} of {disks} disks {which}") }
}

fn all_disks(rows: &[Row], picture: &str) -> Section {
    let heads = [
        "division",
        "pool",
        "share of the data",
        "read hits",
        "points to optimum",
        "flash writes",
        "moved",
        "dropped",
    ];
    let table = rows.iter().fold(Table::new(heads), |table, row| {
        table.row([
            Cell::text(row.division),
            Cell::number(bytes(row.cache_bytes)),
            Cell::number(percent(row.cache_share)),
            Cell::number(percent(row.read_hit_ratio)),
            Cell::number(row.points_to_optimum()),
            Cell::number(bytes(row.flash_write_bytes)),
            Cell::number(bytes(row.moved_bytes)),
            Cell::number(bytes(row.dropped_bytes)),
        ])
    });
    Section::new("All disks")
        .paragraph(
            "static: equal parts. auto: the daemon's choice, which changes over time. one-lru: one LRU cache for all \
             disks. optimum: the fixed parts with the most hits of LRU, computed from the whole traces in advance, \
             or equal parts if these have more hits.",
        )
        .figure(Figure::new(picture, "Read hits by size of the pool"))
        .table(table.copyable().csv(CSV))
}

fn pool_section(pool: &[Row], disks: &str, capacity: Option<&str>) -> Section {
    let mut heads = vec!["disk".to_owned(), "reads".to_owned()];
    heads.extend(pool.iter().map(|row| format!("{}, read hits", row.division)));
    let has_sizes = |row: &&Row| row.disks.iter().any(|disk| disk.cache_bytes.is_some());
    let sized: Vec<&Row> = pool.iter().filter(has_sizes).collect();
    heads.extend(sized.iter().map(|row| format!("{}, capacity", row.division)));
    let mut table = Table::new(heads);
    for (number, DiskRow { disk, reads, .. }) in pool[0].disks.iter().enumerate() {
        let mut cells = vec![Cell::text(disk.as_str()), Cell::number(reads.to_string())];
        let cell = |text: Option<String>| text.map_or(Cell::Missing, Cell::number);
        cells.extend(pool.iter().map(|row| cell(row.disks[number].read_hit_ratio.map(percent))));
        cells.extend(sized.iter().map(|row| cell(row.disks[number].cache_bytes.map(bytes))));
        table = table.row(cells);
    }
    let mut section = Section::new(format!("Pool of {}", size(&pool[0])))
        .figure(Figure::new(disks, "Read hits of each disk"))
        .table(table.caption("Each disk, with its capacity at the end").copyable().csv(DISKS_CSV));
    if let Some(picture) = capacity {
        let figure = Figure::new(picture, "Capacity of each disk over time with auto");
        section = section.figure(figure.csv(CAPACITY_CSV));
    }
    section
}
