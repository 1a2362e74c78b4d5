//! `hob lab figures TRACE…`: the read hits of each disk, for each way to divide one pool between the
//! disks of traces, as tables, pictures and a page.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use hob_control::Size;
use hob_lab::share::{Facts, Row, Share, write};

use super::Figures;
use crate::Global;
use crate::lab::share::{Compared, Comparison, Report, simulate};
use crate::lab::sim::CacheSize;
use crate::lab::{bytes, interruption, percent};
use crate::output::{print, table, with_notes};

/// Sizes of the pool, as shares of the bytes that all disks access.
const SIZES: [f64; 4] = [0.01, 0.05, 0.1, 0.2];
/// Maximum number of disks in the printed table. The written files have all disks.
const DISKS_SHOWN_MAX: usize = 40;

pub(super) fn run(args: &Figures, traces: &[PathBuf], threads: usize, global: &Global) -> anyhow::Result<()> {
    let stop = interruption()?;
    let report = write_page(args, traces, threads, &stop)?;
    print(global.output, &report, |report| with_notes(show(report), &report.notes))
}

/// Simulates the divisions and writes the page. After an interruption no file is written.
fn write_page(
    args: &Figures,
    traces: &[PathBuf],
    threads: usize,
    stop: &AtomicBool,
) -> anyhow::Result<Report> {
    // An unusable directory is reported now and not after minutes of work.
    std::fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot create the directory {}", args.out.display()))?;
    let defaults = SIZES.map(CacheSize::Share);
    let sizes = if args.size.is_empty() { &defaults[..] } else { &args.size[..] };
    let comparison = args.pool.comparison(traces, sizes, &with_optimum(&args.ways.share))?;
    let comparison = Comparison { threads: Some(threads), ..comparison };
    let Compared { mut report, duration_ns } = simulate(&comparison, stop)?;
    let facts = Facts {
        requests: report.requests,
        footprint_bytes: report.footprint_bytes,
        duration_ns,
        settings: settings(&comparison),
        made_by: format!("Made by hob {}: hob lab figures", env!("CARGO_PKG_VERSION")),
    };
    let files = write(&args.out, &report.results, &facts)?;
    report.page = files.last().map(|page| args.out.join(page));
    Ok(report)
}

/// Returns the ways of division to simulate. The returned ways always include the best fixed parts,
/// because the other ways are compared with the best fixed parts.
fn with_optimum(shares: &[Share]) -> Vec<Share> {
    let optimum = if shares.is_empty() { None } else { Some(Share::Optimum) };
    shares.iter().copied().chain(optimum).collect()
}

fn settings(comparison: &Comparison<'_>) -> String {
    format!(
        "policy {}, admission {}, blocks of {}, segments of {}; the one LRU has its own policy",
        comparison.policy.info().name,
        comparison.admission,
        Size(comparison.block_bytes),
        Size(comparison.segment_bytes)
    )
}

fn show(report: &Report) -> String {
    let disks = report.results.first().map_or(0, |row| row.disks.len());
    let mut text = format!("{}\n\n", totals(&report.results));
    if disks <= DISKS_SHOWN_MAX {
        text.push_str(&format!("{}\n\n", each_disk(&report.results)));
    }
    text.push_str(&format!(
        "{disks} disks, {} requests, which touch {}\n",
        report.requests,
        bytes(report.footprint_bytes)
    ));
    if let Some(page) = &report.page {
        text.push_str(&format!("the page is {}\n", page.display()));
    }
    text
}

fn totals(rows: &[Row]) -> String {
    let columns = "DIVISION|POOL:|SHARE %:|READ HITS %:|TO OPTIMUM:|FLASH WRITES:|MOVED:|DROPPED:";
    let row = |row: &Row| {
        vec![
            row.division.to_owned(),
            bytes(row.cache_bytes),
            percent(row.cache_share),
            percent(row.read_hit_ratio),
            row.points_to_optimum(),
            bytes(row.flash_write_bytes),
            bytes(row.moved_bytes),
            bytes(row.dropped_bytes),
        ]
    };
    table(columns, rows.iter().map(row))
}

/// Returns the table with a row for each pool and disk, and a column for each way of division.
fn each_disk(rows: &[Row]) -> String {
    let heading = |row: &Row| match row.division.parse::<Share>() {
        Ok(share) => format!("{} %", share.name().to_uppercase()),
        Err(_) => "HITS %".to_owned(),
    };
    let mut pools = rows.chunk_by(|a, b| a.cache_bytes == b.cache_bytes).peekable();
    let mut columns = String::from("POOL:|DISK|READS:");
    let ways = pools.peek().copied().unwrap_or_default();
    for way in ways {
        columns.push_str(&format!("|{}:", heading(way)));
    }
    let moves = ways.iter().any(|row| !row.history.is_empty());
    if moves {
        columns.push_str("|AUTO AT END:");
    }
    let dash = || "–".to_owned();
    let cells = |pool: &[Row], number: usize| {
        let disk = &pool[0].disks[number];
        let mut cells = vec![bytes(pool[0].cache_bytes), disk.disk.clone(), disk.reads.to_string()];
        cells.extend(pool.iter().map(|row| row.disks[number].read_hit_ratio.map_or_else(dash, percent)));
        let moving = pool.iter().find(|row| !row.history.is_empty());
        cells.extend(moving.map(|row| row.disks[number].cache_bytes.map_or_else(dash, bytes)));
        cells
    };
    let mut lines = Vec::new();
    for pool in pools {
        lines.extend((0..pool[0].disks.len()).map(|number| cells(pool, number)));
    }
    table(&columns, lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::figures::tests::parse;

    /// Two disks: one reads 40 blocks again and again, the other reads 400 blocks in turn.
    fn trace(directory: &tempfile::TempDir) -> String {
        let mut text = String::from("ts_us,op,offset,size,disk\n");
        for at in 0..4000_u64 {
            let (disk, blocks) = if at % 2 == 0 { (0, 40) } else { (1, 400) };
            text.push_str(&format!("{},R,{},4096,{disk}\n", at * 10_000, at / 2 % blocks * 4096));
        }
        let path = directory.path().join("t.csv");
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    fn compared(directory: &tempfile::TempDir, options: &str) -> (Report, PathBuf) {
        let out = directory.path().join("made/here");
        let args = parse(&format!("{} --out {} {options}", trace(directory), out.display())).unwrap();
        let (_, traces) = args.split();
        (write_page(&args, &traces, 2, &AtomicBool::default()).unwrap(), out)
    }

    #[test]
    fn tables_and_page_have_every_size_way_and_disk() {
        let directory = tempfile::tempdir().unwrap();
        let (report, out) = compared(&directory, "--size 128K,256K --segment-size 4K --policy lru");
        let rows: Vec<_> = report.results.iter().map(|row| (row.cache_bytes >> 10, row.division)).collect();
        let names = Share::ALL.map(Share::name);
        assert_eq!(rows, [names.map(|name| (128, name)), names.map(|name| (256, name))].concat());
        let best = &report.results[7];
        // 40 blocks of the first disk fit, and nothing of the other one.
        assert_eq!(best.disks.iter().map(|disk| disk.read_hits).collect::<Vec<_>>(), [1960, 0]);
        let text = show(&report);
        for part in ["TO OPTIMUM", "+0.00", "STATIC %", "ONE-LRU %", "AUTO AT END", "98.00", "2 disks"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(text.lines().filter(|line| line.contains(" KiB  ") && line.contains(" 2000 ")).count(), 4);
        for name in ["divisions.html", "divisions.svg", "divisions-auto-2.svg", "divisions-disks.csv"] {
            assert!(out.join(name).is_file(), "{name}");
        }
    }

    #[test]
    fn the_best_fixed_parts_are_always_simulated() {
        let directory = tempfile::tempdir().unwrap();
        let (report, _) = compared(&directory, "--share static --size 256K --segment-size 4K --policy lru");
        let [equal, best] = &report.results[..] else { panic!("{report:?}") };
        assert_eq!((equal.division, best.division), ("static", "optimum"));
        assert_eq!(equal.difference_to_optimum, Some(equal.read_hit_ratio - best.read_hit_ratio));
        assert!(equal.read_hit_ratio < best.read_hit_ratio && !show(&report).contains("AUTO"));
        assert!(with_optimum(&[]).is_empty(), "all");
    }
}
