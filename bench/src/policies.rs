//! `cargo xtask bench policies` compares hob's caches with every combination of policy,
//! admission and block size on real traces, and the policies with each other.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use hob_engine::policy::POLICIES;
use serde_json::json;

use super::hob;
use super::traces::{Caches, Cell, NO_TRACES, Selection, Trace, simulate};
use crate::shell;

/// All admissions of the simulated caches, which have each policy of [`POLICIES`]. The best
/// combination is searched among these.
const ADMISSIONS: [&str; 6] = [
    "always",
    "always+not-sequential:512K",
    "while-free",
    "nth-access:3",
    "ghost",
    "ghost+not-sequential:512K",
];
const BLOCK_SIZES: [&str; 2] = ["4K", "16K"];

/// Configurations that are compared with the best combination: name, policy, admission and fill.
const COMPARED: [(&str, &str, &str, &str); 4] = [
    ("s3-fifo always", "s3-fifo", "always", "sectors"),
    ("without a chooser", "s3-fifo", "ghost+not-sequential:128K+while-filling:100%", "sectors"),
    ("auto", "auto", "auto", "sectors"),
    ("hob's default", "auto", "auto", "auto"),
];

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    selection: Selection,
    /// Write all results to this JSON file
    #[arg(long)]
    json: Option<PathBuf>,
    /// hob binary to measure [default: HOB_BIN, or a new release build]
    #[arg(long)]
    hob: Option<PathBuf>,
}

/// Results of one trace and cache size.
struct Row {
    trace: String,
    best: Cell,
    /// Results of the compared configurations, in the order of [`COMPARED`].
    compared: [Cell; COMPARED.len()],
    /// Read hits of each policy with its best admission and block size, percent, in the order of
    /// [`POLICIES`].
    policies: Vec<f64>,
}

impl Row {
    fn gap(&self, which: usize) -> f64 {
        self.best.hits() - self.compared[which].hits()
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let Some(traces) = arguments.selection.find()? else {
        println!("{NO_TRACES}");
        return Ok(());
    };
    let hob = hob(arguments.hob.as_deref())?;
    let interrupt = shell::Interrupt::listen()?;
    let mut rows = Vec::new();
    for (number, trace) in traces.iter().enumerate() {
        interrupt.check()?;
        eprintln!("{} of {}: {}", number + 1, traces.len(), trace.name);
        rows.extend(compare(&hob, trace, &arguments.selection.size)?);
    }
    show(&rows);
    if let Some(path) = &arguments.json {
        let cell = |cell: &Cell| {
            json!({
                "policy": cell.policy, "admission": cell.admission, "block_bytes": cell.block_bytes,
                "read_hits_percent": cell.hits(), "flash_write_bytes": cell.flash_write_bytes,
            })
        };
        let row = |row: &Row| {
            let named = COMPARED.iter().zip(&row.compared).map(|((name, ..), of)| (*name, cell(of)));
            let compared: BTreeMap<&str, serde_json::Value> = named.collect();
            let names = POLICIES.iter().map(|policy| policy.name);
            let policies: BTreeMap<&str, f64> = names.zip(row.policies.iter().copied()).collect();
            json!({
                "trace": row.trace, "cache_bytes": row.best.cache_bytes, "best": cell(&row.best),
                "compared": compared, "policies_read_hits_percent": policies,
            })
        };
        let all: Vec<_> = rows.iter().map(row).collect();
        std::fs::write(path, serde_json::to_string_pretty(&all)? + "\n")
            .with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

/// Simulates all caches on a trace. Returns one row for each size.
fn compare(hob: &std::path::Path, trace: &Trace, size: &str) -> Result<Vec<Row>> {
    let policies: Vec<&str> = POLICIES.iter().map(|policy| policy.name).collect();
    let all =
        Caches { policies: &policies, admissions: &ADMISSIONS, block_sizes: &BLOCK_SIZES, fill: "sectors" };
    let all = simulate(hob, &trace.path, size, all)?;
    let mut compared = Vec::new();
    for (_, policy, admission, fill) in COMPARED {
        let caches = Caches { policies: &[policy], admissions: &[admission], block_sizes: &["4K"], fill };
        compared.push(simulate(hob, &trace.path, size, caches)?);
    }
    let mut rows = Vec::new();
    for (at, first) in compared[0].iter().enumerate() {
        let cells: [Cell; COMPARED.len()] = std::array::from_fn(|which| compared[which][at].clone());
        // Cache sizes are rounded to whole blocks, so the size differs a little between block
        // sizes.
        let is_size = |cell: &&Cell| {
            let room = cell.block_bytes.max(4096);
            cell.cache_bytes.abs_diff(first.cache_bytes) < room
        };
        // No other combination reads data that no guest asked for.
        let fills_sectors = cells.iter().zip(COMPARED).filter(|(_, (.., fill))| *fill == "sectors");
        let comparable = all.iter().chain(fills_sectors.map(|(cell, _)| cell));
        let best = comparable.filter(is_size).max_by(|a, b| a.hits().total_cmp(&b.hits()));
        let hits = |policy: &&str| {
            let is_policy = |cell: &&Cell| cell.policy == *policy;
            all.iter().filter(is_size).filter(is_policy).map(Cell::hits).fold(0.0, f64::max)
        };
        rows.push(Row {
            trace: trace.name.clone(),
            best: best.context("no result has this size")?.clone(),
            policies: policies.iter().map(hits).collect(),
            compared: cells,
        });
    }
    Ok(rows)
}

fn show(rows: &[Row]) {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!("read hits in percent, and MiB written to flash\n");
    print!("{:<34} {:>9}  {:>14}", "trace", "cache MiB", "best");
    COMPARED.iter().for_each(|(name, ..)| print!("  {name:>20}"));
    println!("  best combination");
    for row in rows {
        let pair = |cell: &Cell| format!("{:.1} / {:.0}", cell.hits(), mib(cell.flash_write_bytes));
        print!("{:<34} {:>9.1}  {:>14}", row.trace, mib(row.best.cache_bytes), pair(&row.best));
        row.compared.iter().for_each(|cell| print!("  {:>20}", pair(cell)));
        let Cell { policy, admission, block_bytes, .. } = &row.best;
        println!("  {policy} {admission} {}K", block_bytes >> 10);
    }
    show_policies(rows);
    println!("\n{:<20} {:>9} {:>10} {:>14}", "configuration", "mean gap", "worst gap", "flash writes");
    let written =
        |which: usize| rows.iter().map(|row| row.compared[which].flash_write_bytes).sum::<u64>() as f64;
    for (which, (name, ..)) in COMPARED.iter().enumerate() {
        let mean = rows.iter().map(|row| row.gap(which)).sum::<f64>() / rows.len() as f64;
        let worst = rows.iter().map(|row| row.gap(which)).fold(0.0, f64::max);
        println!("{name:<20} {mean:>9.2} {worst:>10.1} {:>14.2}", written(which) / written(0));
    }
}

/// Shows the read hits of each policy with its best admission and block size, and the gap to the
/// best policy.
fn show_policies(rows: &[Row]) {
    println!(
        "\nread hits in percent of each policy with its best admission and block size, and gap to the best policy\n"
    );
    print!("{:<34} {:>9}", "trace", "cache MiB");
    POLICIES.iter().for_each(|policy| print!("  {:>13}", policy.name));
    println!();
    let gaps = |row: &Row| {
        let best = row.policies.iter().copied().fold(0.0, f64::max);
        row.policies.iter().map(|hits| best - hits).collect::<Vec<f64>>()
    };
    for row in rows {
        print!("{:<34} {:>9.1}", row.trace, row.best.cache_bytes as f64 / f64::from(1 << 20));
        for (hits, gap) in row.policies.iter().zip(gaps(row)) {
            print!("  {:>13}", format!("{hits:.1} -{gap:.1}"));
        }
        println!();
    }
    print!("{:<34} {:>9}", "mean gap", "");
    for policy in 0..POLICIES.len() {
        let mean = rows.iter().map(|row| gaps(row)[policy]).sum::<f64>() / rows.len() as f64;
        print!("  {:>13}", format!("-{mean:.2}"));
    }
    println!();
}
