//! `hob lab generate NAME key=value… --out FILE`: generates a trace of a workload that was
//! published without one.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use anyhow::ensure;
use clap::Args;
use hob_lab::generate::{GENERATORS, GeneratorInfo, Load, Parameter};
use serde::Serialize;

use super::feed::bar;
use super::interruption;
use super::out::{Columns, Out, To};
use crate::Global;
use crate::output::{print, table, tell};

/// Assumed time between two requests of clients that wait for each reply, nanoseconds. The real
/// time depends on the replies, which only a replay has.
const TURN_NS: u64 = 1_000_000;
/// Number of records between two checks for Ctrl-C.
const RECORDS_A_LOOK: u64 = 8192;

/// Generate a trace of a published workload; without a name, list the workloads and their parameters
#[derive(Debug, Args)]
pub(crate) struct Generate {
    /// Name of the workload; 'hob lab generate' lists them
    #[arg(requires = "out")]
    name: Option<String>,
    /// Parameters that replace the published ones, like requests=100000
    #[arg(value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// List the workloads with their parameters
    #[arg(long, conflicts_with_all = ["name", "out"])]
    list: bool,
    /// File to write; - is standard output
    #[arg(long, value_name = "FILE", requires = "name")]
    out: Option<PathBuf>,
    /// Format of the trace
    #[arg(long, value_enum, default_value_t)]
    to: To,
    /// Maximum number of requests to write, including those that warm the cache
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    requests: Option<u64>,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
}

/// A generator in the list.
#[derive(Debug, Serialize)]
struct Listed {
    name: &'static str,
    summary: &'static str,
    source: &'static str,
    parameters: Vec<Parameter>,
}

impl From<&GeneratorInfo> for Listed {
    fn from(info: &GeneratorInfo) -> Listed {
        let parameters = (info.parameters)();
        Listed { name: info.name, summary: info.summary, source: info.source, parameters }
    }
}

pub(super) fn run(args: &Generate, global: &Global) -> anyhow::Result<()> {
    let (Some(name), Some(out)) = (&args.name, &args.out) else {
        let all: Vec<Listed> = GENERATORS.iter().map(Listed::from).collect();
        return print(global.output, &all, |all| all.iter().map(show).collect::<Vec<_>>().join("\n\n"));
    };
    let experiment = GeneratorInfo::find(name)?.experiment(&args.settings)?;
    let stop = interruption()?;
    let columns = if experiment.disks.len() > 1 { Columns::Disks } else { Columns::OneDisk };
    let (disks, warmup, is_closed) =
        (experiment.disks.len(), experiment.warmup, matches!(experiment.load, Load::Closed(_)));
    let mut writer = Out::create(out, args.to, args.force, columns)?;
    let bar = bar(args.requests)?;
    let mut count = 0;
    for record in experiment.into_records(TURN_NS) {
        if args.requests.is_some_and(|most| count == most) {
            break;
        }
        writer.push(&record)?;
        count += 1;
        if count.is_multiple_of(RECORDS_A_LOOK) {
            bar.set_position(count);
            ensure!(!stop.load(Ordering::Relaxed), "interrupted after {count} requests");
        }
    }
    writer.finish()?;
    bar.finish_and_clear();
    tell(&format!("{count} requests of {name} to {disks} disk{}", if disks == 1 { "" } else { "s" }));
    if warmup > 0 {
        tell(&format!(
            "the first {} warm the cache and are not part of the published figures",
            warmup.min(count)
        ));
    }
    if is_closed {
        tell(
            "the order of the requests assumes that clients take turns; the times are placeholders \
            in steps of one millisecond",
        );
    }
    Ok(())
}

fn show(generator: &Listed) -> String {
    let rows = generator
        .parameters
        .iter()
        .map(|row| vec![format!("  {}", row.name), row.default.clone(), row.about.to_owned()]);
    let parameters = table("  PARAMETER|DEFAULT|WHAT", rows);
    format!("{}: {}\nsource: {}\n{parameters}", generator.name, generator.summary, generator.source)
}
