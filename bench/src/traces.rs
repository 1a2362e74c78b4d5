//! Real traces for benchmarks, and simulations of caches on them.
//!
//! The environment variable `HOB_TRACES` names a directory with traces in any format that
//! `hob lab` reads. Without it, the traces in `shared/traces` beside the repository are used, if
//! there is such a directory. The traces are not part of the project.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::shell;

/// Directory of the traces if `HOB_TRACES` is not set, relative to the repository.
const TRACES_DEFAULT: &str = "../shared/traces";

/// Message of a benchmark that finds no directory of traces.
pub(crate) const NO_TRACES: &str =
    "skipped: HOB_TRACES names no directory with traces, and there is no ../shared/traces";

/// Endings of the names of trace files.
const ENDINGS: [&str; 3] = [".csv", ".csv.zst", ".csv.gz"];

/// Options that select traces and cache sizes.
#[derive(Debug, clap::Args)]
pub(crate) struct Selection {
    /// Directory of the traces [default: HOB_TRACES, or ../shared/traces beside the repository]
    #[arg(long, value_name = "DIR")]
    traces: Option<PathBuf>,
    /// Use only traces whose names contain one of these words
    #[arg(long, value_delimiter = ',', value_name = "WORD")]
    only: Vec<String>,
    /// Cache sizes, as shares of the bytes that a trace accesses
    #[arg(long, default_value = "1%,5%,10%,20%")]
    pub(crate) size: String,
}

/// A trace file.
#[derive(Debug)]
pub(crate) struct Trace {
    /// File name without its ending.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
}

impl Selection {
    /// Returns the selected traces by name; `None` if there is no directory of traces.
    pub(crate) fn find(&self) -> Result<Option<Vec<Trace>>> {
        let named = std::env::var_os("HOB_TRACES").map(PathBuf::from);
        let Some(directory) = self.traces.clone().or(named).or_else(|| traces_beside(&shell::root())) else {
            return Ok(None);
        };
        let mut found = Vec::new();
        let entries =
            std::fs::read_dir(&directory).with_context(|| format!("read {}", directory.display()))?;
        for entry in entries {
            let path = entry?.path();
            let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let Some(name) = ENDINGS.iter().find_map(|ending| file.strip_suffix(ending)) else { continue };
            if self.only.is_empty() || self.only.iter().any(|word| name.contains(word)) {
                found.push(Trace { name: name.to_owned(), path });
            }
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        ensure!(!found.is_empty(), "{} has no such trace (.csv, .csv.zst, .csv.gz)", directory.display());
        Ok(Some(found))
    }
}

/// Returns the directory [`TRACES_DEFAULT`] of a repository, if it exists.
fn traces_beside(repository: &Path) -> Option<PathBuf> {
    Some(repository.join(TRACES_DEFAULT)).filter(|directory| directory.is_dir())
}

/// Result of a simulated cache. The fields are those of `hob lab sim -o json`.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Cell {
    pub(crate) policy: String,
    pub(crate) admission: String,
    pub(crate) block_bytes: u64,
    pub(crate) cache_bytes: u64,
    pub(crate) reads: u64,
    pub(crate) read_hits: u64,
    pub(crate) flash_write_bytes: u64,
    pub(crate) memory_bytes_per_block: f64,
}

impl Cell {
    /// Returns the share of the reads that hit, percent.
    pub(crate) fn hits(&self) -> f64 {
        if self.reads == 0 { 0.0 } else { 100.0 * self.read_hits as f64 / self.reads as f64 }
    }
}

/// Caches to simulate: every combination of the values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caches<'a> {
    pub(crate) policies: &'a [&'a str],
    pub(crate) admissions: &'a [&'a str],
    pub(crate) block_sizes: &'a [&'a str],
    /// Fill granularity of all caches.
    pub(crate) fill: &'a str,
}

/// Simulates caches on a trace. Returns the results in any order.
pub(crate) fn simulate(hob: &Path, trace: &Path, size: &str, caches: Caches<'_>) -> Result<Vec<Cell>> {
    #[derive(Deserialize)]
    struct Answer {
        results: Vec<Cell>,
    }
    let output = Command::new(hob)
        .args(["lab", "sim", "-o", "json", "--size", size])
        .args(["--policy", &caches.policies.join(",")])
        .args(["--admission", &caches.admissions.join(",")])
        .args(["--block-size", &caches.block_sizes.join(",")])
        .args(["--fill", caches.fill])
        .arg(trace)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start {}", hob.display()))?;
    ensure!(output.status.success(), "hob lab sim: {}", String::from_utf8_lossy(&output.stderr));
    let answer: Answer = serde_json::from_slice(&output.stdout).context("read the results of hob lab sim")?;
    Ok(answer.results)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_beside_the_repository_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let repository = dir.path().join("hob");
        let traces = dir.path().join("shared/traces");
        std::fs::create_dir(&repository).unwrap();
        assert_eq!(traces_beside(&repository), None);
        std::fs::create_dir_all(&traces).unwrap();
        std::fs::write(traces.join("web.csv.zst"), "").unwrap();
        let found = traces_beside(&repository);
        assert!(found.is_some());
        let selection = Selection { traces: found, only: Vec::new(), size: String::new() };
        let names: Vec<String> =
            selection.find().unwrap().unwrap().into_iter().map(|trace| trace.name).collect();
        assert_eq!(names, ["web"]);
    }
}
