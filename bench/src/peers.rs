//! `cargo xtask bench peers` compares a cache of hob with Open CAS, dm-cache, bcache and
//! dm-writecache on real traces at equal capacity: read hits and bytes written to flash.
//!
//! Open CAS runs if the caller names the source of its engine ([`ocf`]). The caches of Linux run in
//! a guest ([`linux`]). Caches whose programs are missing are left out, and the output says how to
//! get them.

mod linux;
mod ocf;
mod results;

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use hob_trace::{self, Op, OpenOptions, Record, csv};

use super::hob;
use super::traces::{Caches, Cell, NO_TRACES, Selection, Trace, simulate};
use crate::shell;
use linux::LinuxCaches;
use results::{HOB, Played, Results, Row, TracePlayed};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    selection: Selection,
    /// Maximum number of reads and writes of each trace to use, from its start
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Directory with the source of OCF, the engine of Open CAS
    /// (<https://github.com/Open-CAS/ocf>, tag v26.03.1)
    #[arg(long, value_name = "DIR")]
    ocf: Option<PathBuf>,
    #[command(flatten)]
    linux: linux::Options,
    /// Policy of hob's cache
    #[arg(long, default_value = "auto")]
    policy: String,
    /// Admission of hob's cache
    #[arg(long, default_value = "auto")]
    admission: String,
    /// Fill granularity of hob's cache
    #[arg(long, default_value = "auto")]
    fill: String,
    /// Write all results to this JSON file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write an HTML page with a chart of hits against flash writes for each trace
    #[arg(long, value_name = "FILE")]
    page: Option<PathBuf>,
    /// hob binary to measure [default: HOB_BIN, or a new release build]
    #[arg(long)]
    hob: Option<PathBuf>,
}

/// The caches that run.
struct Peers {
    hob: PathBuf,
    /// OCF's player.
    ocf: Option<PathBuf>,
    linux: Option<LinuxCaches>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let Some(traces) = arguments.selection.find()? else {
        println!("{NO_TRACES}");
        return Ok(());
    };
    let hob = hob(arguments.hob.as_deref())?;
    let interrupt = shell::Interrupt::listen()?;
    let scratch = tempfile::Builder::new().prefix("hob-bench-").tempdir()?;
    let mut results = Results::default();
    let peers = prepare(arguments, hob, scratch.path(), &mut results)?;
    for (number, trace) in traces.iter().enumerate() {
        interrupt.check()?;
        eprintln!("{} of {}: {}", number + 1, traces.len(), trace.name);
        compare(arguments, &peers, trace, scratch.path(), &interrupt, &mut results)
            .with_context(|| format!("trace {}", trace.name))?;
        // After each trace, because a run can take hours.
        if let Some(path) = &arguments.json {
            write(path, &(serde_json::to_string_pretty(&results.json())? + "\n"))?;
        }
        if let Some(path) = &arguments.page {
            write(path, &results.page("cargo xtask bench peers"))?;
        }
    }
    print!("{}", results.text());
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

/// Compiles and collects what the caches need. Records which caches are left out.
fn prepare(arguments: &Arguments, hob: PathBuf, scratch: &Path, results: &mut Results) -> Result<Peers> {
    let version = shell::output(std::process::Command::new(&hob).arg("--version"))?;
    let Arguments { policy, admission, fill, .. } = arguments;
    let settings = format!("policy {policy}, admission {admission} and fill {fill}");
    results.versions.push(format!("{} with {settings}", version.trim()));
    let ocf = match &arguments.ocf {
        Some(source) => {
            eprintln!("compiling OCF");
            results.versions.push(ocf::version(source));
            Some(ocf::compile(source, scratch)?)
        }
        None => {
            results.left_out.push(
                "OCF: git clone --branch v26.03.1 https://github.com/Open-CAS/ocf, then --ocf ocf".to_owned(),
            );
            None
        }
    };
    let linux = if arguments.linux.without_linux {
        None
    } else {
        match LinuxCaches::prepare(&arguments.linux, scratch) {
            Ok(linux) => {
                results.versions.push(linux.versions.clone());
                Some(linux)
            }
            Err(error) => {
                results.left_out.push(format!("caches of Linux: {error:#}"));
                None
            }
        }
    };
    results.left_out.iter().for_each(|text| eprintln!("left out: {text}"));
    Ok(Peers { hob, ocf, linux })
}

/// Plays a trace to all caches, and appends the results.
fn compare(
    arguments: &Arguments,
    peers: &Peers,
    trace: &Trace,
    scratch: &Path,
    interrupt: &shell::Interrupt,
    results: &mut Results,
) -> Result<()> {
    let records = read(trace, arguments.requests)?;
    let mut path = trace.path.clone();
    if arguments.requests.is_some() {
        path = scratch.join("trace.csv");
        let mut out = csv::Writer::new(File::create(&path)?)?;
        for record in &records {
            // The writer has only one disk.
            out.push(&Record { disk: 0, ..*record })?;
        }
        out.finish()?;
    }
    let caches = Caches {
        policies: &[&arguments.policy],
        admissions: &[&arguments.admission],
        block_sizes: &["4K"],
        fill: &arguments.fill,
    };
    let mut rows = Vec::new();
    for cell in simulate(&peers.hob, &path, &arguments.selection.size, caches)? {
        rows.push(Row {
            trace: trace.name.clone(),
            cache_bytes: cell.cache_bytes,
            played: vec![played_by_hob(&cell)],
        });
    }
    if let Some(player) = &peers.ocf {
        let requests = scratch.join("requests");
        ocf::write_requests(&records, &requests)?;
        for row in &mut rows {
            interrupt.check()?;
            row.played.extend(ocf::play(player, &requests, row.cache_bytes)?);
        }
    }
    let mut played = TracePlayed {
        trace: trace.name.clone(),
        requests: records.len() as u64,
        guest: None,
        late_ms: 0,
        troubles: Vec::new(),
    };
    if let Some(linux) = &peers.linux {
        let sizes: Vec<u64> = rows.iter().map(|row| row.cache_bytes).collect();
        match linux.play(&records, &sizes, scratch, interrupt) {
            Ok(guest) => {
                for (size, row) in rows.iter_mut().enumerate() {
                    let of_size = guest.played.iter().filter(|((_, of), _)| *of == size);
                    row.played.extend(of_size.map(|(_, played)| played.clone()));
                }
                played.guest = Some((guest.seconds, guest.speed_up));
                (played.late_ms, played.troubles) = (guest.late_ms, guest.troubles);
            }
            Err(error) => {
                interrupt.check()?;
                played.troubles.push(format!("no caches of Linux: {error:#}"));
            }
        }
    }
    results.rows.extend(rows);
    results.traces.push(played);
    Ok(())
}

/// Reads the first reads and writes of a trace.
fn read(trace: &Trace, requests: Option<usize>) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for record in hob_trace::open(&trace.path, &OpenOptions::default())? {
        let record = record?;
        if requests.is_some_and(|most| records.len() >= most) {
            break;
        }
        if matches!(record.op, Op::Read | Op::Write) {
            records.push(record);
        }
    }
    Ok(records)
}

fn played_by_hob(cell: &Cell) -> Played {
    Played {
        cache: HOB,
        cache_bytes: cell.cache_bytes,
        reads: cell.reads,
        read_hits: cell.read_hits,
        flash_write_bytes: cell.flash_write_bytes,
        metadata_write_bytes: None,
        memory_bytes_per_block: Some(cell.memory_bytes_per_block),
        ns_per_request: None,
    }
}
