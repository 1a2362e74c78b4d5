//! `cargo xtask bench peers` compares a cache of hob with Open CAS on real traces at equal
//! capacity: read hits and bytes written to flash.
//!
//! The engine of Open CAS is the Open CAS Framework (OCF). The benchmark compiles OCF from a source
//! directory that the user names, together with a program that plays a trace through OCF
//! ([`PLAYER`]). Requests to OCF are extended to whole sectors of 4 KiB, because hob fills whole
//! sectors and OCF would fill parts of sectors.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use hob_lab::trace::{self, Op, OpenOptions};
use serde::Deserialize;
use serde_json::json;

use super::hob;
use super::traces::{Caches, Cell, Selection, Trace, simulate};
use crate::shell;

/// The program that plays a trace through OCF, in C.
const PLAYER: &str = include_str!("peers/ocf.c");

const SECTOR_BYTES: u64 = 4096;

/// Maximum number of percentage points by which hob may have fewer hits than OCF.
const HITS_BEHIND_MAX: f64 = 0.5;
/// Minimum number of points by which hob must have more hits if hob writes more to flash than OCF
/// with its default settings.
const HITS_AHEAD_MIN: f64 = 5.0;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    selection: Selection,
    /// Directory with the source of OCF (<https://github.com/Open-CAS/ocf>, tag v26.03.1)
    #[arg(long, value_name = "DIR")]
    ocf: PathBuf,
    /// Policy of hob's cache
    #[arg(long, default_value = "auto")]
    policy: String,
    /// Admission of hob's cache
    #[arg(long, default_value = "auto")]
    admission: String,
    /// Write all results to this JSON file
    #[arg(long)]
    json: Option<PathBuf>,
    /// hob binary to measure [default: HOB_BIN, or a new release build]
    #[arg(long)]
    hob: Option<PathBuf>,
}

/// Results of OCF for one trace and cache size. The fields are those that the player prints.
#[derive(Clone, Debug, Deserialize)]
struct Played {
    cache_bytes: u64,
    reads: u64,
    read_hits: u64,
    flash_write_bytes: u64,
    memory_bytes: u64,
    ns_per_request: f64,
}

impl Played {
    fn hits(&self) -> f64 {
        if self.reads == 0 { 0.0 } else { 100.0 * self.read_hits as f64 / self.reads as f64 }
    }
}

/// Results of one trace and cache size.
struct Row {
    trace: String,
    hob: Cell,
    /// OCF with its default settings, which admit every request.
    always: Played,
    /// OCF with its promotion policy `nhit`, which admits data only after several requests.
    nhit: Played,
}

impl Row {
    /// Returns the requirements that hob's results miss, or an empty text.
    fn verdict(&self) -> &'static str {
        if self.always.cache_bytes.abs_diff(self.hob.cache_bytes) > SECTOR_BYTES {
            return "OCF has no cache this small";
        }
        let ahead = self.hob.hits() - self.always.hits().max(self.nhit.hits());
        let writes_more = self.hob.flash_write_bytes > self.always.flash_write_bytes;
        match (ahead < -HITS_BEHIND_MAX, writes_more && ahead < HITS_AHEAD_MIN) {
            (true, true) => "fewer hits, more writes",
            (true, false) => "fewer hits",
            (false, true) => "more writes",
            (false, false) => "",
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let Some(traces) = arguments.selection.find()? else {
        println!("skipped: HOB_TRACES names no directory with traces");
        return Ok(());
    };
    let hob = hob(arguments.hob.as_deref())?;
    let interrupt = shell::Interrupt::listen()?;
    let scratch = tempfile::Builder::new().prefix("hob-bench-").tempdir()?;
    eprintln!("compiling OCF");
    let player = compile(&arguments.ocf, scratch.path())?;
    let caches =
        Caches { policies: &[&arguments.policy], admissions: &[&arguments.admission], block_sizes: &["4K"] };
    let mut rows = Vec::new();
    for (number, trace) in traces.iter().enumerate() {
        eprintln!("{} of {}: {}", number + 1, traces.len(), trace.name);
        let requests = scratch.path().join("requests");
        write_requests(trace, &requests)?;
        for cell in simulate(&hob, &trace.path, &arguments.selection.size, caches)? {
            interrupt.check()?;
            let [always, nhit] =
                ["always", "nhit"].map(|promotion| play(&player, &requests, cell.cache_bytes, promotion));
            rows.push(Row { trace: trace.name.clone(), hob: cell, always: always?, nhit: nhit? });
        }
    }
    show(&rows);
    if let Some(path) = &arguments.json {
        let ocf = |played: &Played| {
            json!({
                "cache_bytes": played.cache_bytes, "read_hits_percent": played.hits(),
                "flash_write_bytes": played.flash_write_bytes, "memory_bytes": played.memory_bytes,
                "ns_per_request": played.ns_per_request,
            })
        };
        let row = |row: &Row| {
            json!({
                "trace": row.trace, "cache_bytes": row.hob.cache_bytes,
                "hob": {
                    "read_hits_percent": row.hob.hits(), "flash_write_bytes": row.hob.flash_write_bytes,
                    "memory_bytes_per_block": row.hob.memory_bytes_per_block,
                },
                "ocf": ocf(&row.always), "ocf_nhit": ocf(&row.nhit),
            })
        };
        let all: Vec<_> = rows.iter().map(row).collect();
        std::fs::write(path, serde_json::to_string_pretty(&all)? + "\n")
            .with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

/// Compiles OCF and the player. Returns the path of the program.
fn compile(source: &Path, scratch: &Path) -> Result<PathBuf> {
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

/// Writes the requests of a trace for the player, extended to whole sectors.
fn write_requests(trace: &Trace, to: &Path) -> Result<()> {
    let mut out = BufWriter::new(File::create(to)?);
    for record in trace::open(&trace.path, &OpenOptions::default())? {
        let record = record?;
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

fn play(player: &Path, requests: &Path, cache_bytes: u64, promotion: &str) -> Result<Played> {
    let output = Command::new(player)
        .args([&cache_bytes.to_string(), promotion])
        .stdin(File::open(requests)?)
        .stderr(Stdio::inherit())
        .output()
        .context("start the player")?;
    ensure!(output.status.success(), "the player of OCF failed: {}", output.status);
    serde_json::from_slice(&output.stdout).context("read the results of OCF")
}

fn show(rows: &[Row]) {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!("read hits in percent, and MiB written to flash\n");
    println!(
        "{:<34} {:>9}  {:>14}  {:>14}  {:>14}  {:>6} {:>6}",
        "trace", "cache MiB", "hob", "OCF", "OCF nhit", "hob B", "OCF B"
    );
    for row in rows {
        let pair = |hits: f64, written: u64| format!("{hits:.1} / {:.0}", mib(written));
        let of = |played: &Played| pair(played.hits(), played.flash_write_bytes);
        println!(
            "{:<34} {:>9.1}  {:>14}  {:>14}  {:>14}  {:>6.0} {:>6.0}  {}",
            row.trace,
            mib(row.hob.cache_bytes),
            pair(row.hob.hits(), row.hob.flash_write_bytes),
            of(&row.always),
            of(&row.nhit),
            row.hob.memory_bytes_per_block,
            row.always.memory_bytes as f64 / (row.always.cache_bytes / SECTOR_BYTES).max(1) as f64,
            row.verdict()
        );
    }
    let missed = rows.iter().filter(|row| !row.verdict().is_empty()).count();
    println!("\nhob B, OCF B: bytes of memory for each block of the cache");
    println!(
        "{} of {} rows are as required: hits at least those of OCF less {HITS_BEHIND_MAX} points, and no \
         more writes than OCF's default unless hits are {HITS_AHEAD_MIN} points higher",
        rows.len() - missed,
        rows.len()
    );
}
