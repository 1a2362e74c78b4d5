//! Tests of rules about the sources and pages. Each rule lists all places that violate it. `cargo
//! xtask tidy --report` prints statistics.

#[cfg(test)]
mod blocking;
#[cfg(test)]
mod crates;
#[cfg(test)]
mod docs;
#[cfg(test)]
mod files;
#[cfg(test)]
mod links;
#[cfg(test)]
mod reconnect;
mod report;
#[cfg(test)]
mod services;
#[cfg(test)]
mod snippets;
pub(crate) mod source;
pub(crate) mod test_code;
mod vocabulary;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;

use crate::{shell, suite};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Print statistics instead: lines per crate, longest files, dependencies between crates, and
    /// old words that remain
    #[arg(long)]
    report: bool,
}

/// Runs the tidy tests, or prints the report.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if arguments.report {
        return report::print();
    }
    shell::run_tests(&mut suite::cargo_test(&["--bin", "xtask", "tidy"]))
}

/// Directories of generated or downloaded files.
const NOT_OURS: [&str; 6] = ["target", ".git", "corpus", "artifacts", "node_modules", "proptest-regressions"];

/// First characters of each generated page.
pub(crate) const GENERATED: &str = "<!-- Written by";

/// A text file of the repository.
#[derive(Debug)]
pub(crate) struct Text {
    /// Path relative to the repository's root, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

/// Returns all text files of the workspace, ordered by path.
pub(crate) fn texts() -> Vec<Text> {
    let root = shell::root();
    let mut paths = Vec::new();
    walk(&root, &mut paths);
    paths.sort();
    let read = |path: PathBuf| {
        let text = String::from_utf8(fs::read(&path).ok()?).ok()?;
        let path = path.strip_prefix(&root).ok()?.to_str()?.to_owned();
        Some(Text { path, text })
    };
    paths.into_iter().filter_map(read).collect()
}

/// Returns all Rust sources of the workspace.
pub(crate) fn sources() -> Vec<Text> {
    texts().into_iter().filter(|text| text.path.ends_with(".rs")).collect()
}

fn walk(dir: &Path, paths: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        if NOT_OURS.iter().any(|n| name == *n) {
            continue;
        }
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            walk(&path, paths);
        } else {
            paths.push(path);
        }
    }
}

/// Panics with all violations of a rule, if there are any.
#[cfg(test)]
#[track_caller]
fn none(rule: &str, broken: &[String]) {
    assert!(broken.is_empty(), "{rule}:\n  {}", broken.join("\n  "));
}
