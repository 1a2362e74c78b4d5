//! Plays traces through the Open CAS Framework (OCF), the engine of Open CAS.
//!
//! OCF is compiled from its source, which the caller names, together with a program that plays a
//! trace through it ([`PLAYER`]). Requests are widened to whole sectors of 4 KiB, as hob fills
//! them; otherwise OCF fills parts of sectors.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use hob_trace::{Op, Record};
use serde::Deserialize;

use super::results::Played;
use crate::shell;

/// The program that plays a trace through OCF, in C.
const PLAYER: &str = include_str!("ocf.c");

const SECTOR_BYTES: u64 = 4096;

/// OCF's promotion policies, and the names that results have. The first one is the default and
/// admits every request.
const PROMOTIONS: [(&str, &str); 2] = [("always", OCF), ("nhit", OCF_NHIT)];

pub(super) const OCF: &str = "OCF";
pub(super) const OCF_NHIT: &str = "OCF nhit";

/// Result of a trace. The fields are those that the player prints.
#[derive(Clone, Debug, Deserialize)]
struct Answer {
    cache_bytes: u64,
    reads: u64,
    read_hits: u64,
    flash_write_bytes: u64,
    memory_bytes: u64,
    ns_per_request: f64,
}

/// Plays a trace, which [`write_requests`] wrote, with each promotion policy. A cache that OCF makes
/// larger than `cache_bytes` is left out.
pub(super) fn play(player: &Path, requests: &Path, cache_bytes: u64) -> Result<Vec<Played>> {
    let mut all = Vec::new();
    for (promotion, name) in PROMOTIONS {
        let output = Command::new(player)
            .args([&cache_bytes.to_string(), promotion])
            .stdin(File::open(requests)?)
            .stderr(Stdio::inherit())
            .output()
            .context("start the player")?;
        ensure!(output.status.success(), "the player of OCF failed: {}", output.status);
        let answer: Answer = serde_json::from_slice(&output.stdout).context("read the results of OCF")?;
        if answer.cache_bytes.abs_diff(cache_bytes) > SECTOR_BYTES {
            continue;
        }
        let blocks = (answer.cache_bytes / SECTOR_BYTES).max(1) as f64;
        all.push(Played {
            cache: name,
            cache_bytes: answer.cache_bytes,
            reads: answer.reads,
            read_hits: answer.read_hits,
            flash_write_bytes: answer.flash_write_bytes,
            metadata_write_bytes: None,
            memory_bytes_per_block: Some(answer.memory_bytes as f64 / blocks),
            ns_per_request: Some(answer.ns_per_request),
        });
    }
    Ok(all)
}

/// Returns the version of the source, if it is a Git repository.
pub(super) fn version(source: &Path) -> String {
    let mut git = Command::new("git");
    git.arg("--git-dir").arg(source.join(".git")).args(["describe", "--tags", "--always"]);
    let tag = shell::output(&mut git).unwrap_or_default();
    if tag.trim().is_empty() { "OCF of an unknown version".to_owned() } else { format!("OCF {}", tag.trim()) }
}

/// Compiles OCF and the player. Returns the path of the program.
pub(super) fn compile(source: &Path, scratch: &Path) -> Result<PathBuf> {
    ensure!(
        source.join("inc/ocf/ocf.h").exists() || source.join("inc/ocf.h").exists(),
        "{} is not the source of OCF: git clone --branch v26.03.1 https://github.com/Open-CAS/ocf",
        source.display()
    );
    let tree = scratch.join("ocf");
    std::fs::create_dir(&tree)?;
    for part in ["inc", "src", "env"] {
        let mut make = Command::new("make");
        make.args(["--silent", "-C"]).arg(source).arg(part).arg(format!("O={}", tree.display()));
        shell::run(make.arg("OCF_ENV=posix").stdout(Stdio::null()))?;
    }
    let mut files = Vec::new();
    find_c_files(&tree.join("src"), &mut files)?;
    let (player, program) = (scratch.join("player.c"), scratch.join("player"));
    std::fs::write(&player, PLAYER)?;
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-w", "-DNDEBUG"]);
    for directory in ["include", "src/ocf/env"] {
        cc.arg("-I").arg(tree.join(directory));
    }
    cc.arg("-o").arg(&program).arg(&player).args(&files).args(["-lz", "-lm", "-pthread"]);
    let output = cc.output().context("start cc")?;
    ensure!(
        output.status.success(),
        "cannot compile OCF (Debian: apt-get install gcc libc6-dev make zlib1g-dev): {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(program)
}

fn find_c_files(directory: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            find_c_files(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "c") {
            found.push(path);
        }
    }
    Ok(())
}

/// Writes the requests of a trace for the player, widened to whole sectors.
pub(super) fn write_requests(records: &[Record], to: &Path) -> Result<()> {
    let mut out = BufWriter::new(File::create(to)?);
    for record in records {
        let op = match record.op {
            Op::Read => 'R',
            Op::Write => 'W',
            Op::Discard | Op::Flush => continue,
        };
        let start = record.offset / SECTOR_BYTES * SECTOR_BYTES;
        let end = (record.offset + u64::from(record.len)).next_multiple_of(SECTOR_BYTES);
        writeln!(out, "{op} {start} {}", end - start)?;
    }
    Ok(out.flush()?)
}
