//! `hob lab …`: effects of a cache, computed from a trace without a daemon.

mod advise;
mod cluster;
mod feed;
mod figures;
mod formats;
mod generate;
mod import;
mod info;
mod latency;
mod mrc;
mod out;
mod scale;
mod share;
mod sim;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail, ensure};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand, ValueEnum};
use hob_control::Size;
use hob_lab::advise::Material;
use hob_lab::figures::Progress;
use hob_lab::picture::Unit;
use hob_trace::blocks::TraceBlocks;
use hob_trace::{self, FORMATS, FormatInfo, OnBad, OpenOptions, Record, TraceReader};
use indicatif::{ProgressBar, ProgressStyle};

use super::Global;
pub(super) use advise::percent as share_of_reads;

/// Analyse traces of block I/O, and compute the effects of caches on them
#[derive(Debug, Subcommand)]
pub(crate) enum Lab {
    Import(import::Import),
    Info(info::Info),
    Sim(sim::Sim),
    Share(share::ShareArgs),
    Figures(figures::Figures),
    Mrc(mrc::Mrc),
    Generate(generate::Generate),
    Formats(formats::Formats),
    Advise(advise::Advise),
    Latency(latency::Latency),
    Scale(scale::ScaleArgs),
    Cluster(cluster::ClusterArgs),
}

pub(super) fn run(command: Lab, global: &Global) -> anyhow::Result<()> {
    match command {
        Lab::Import(args) => import::run(&args),
        Lab::Info(args) => info::run(&args, global),
        Lab::Sim(args) => sim::run(&args, global),
        Lab::Share(args) => share::run(&args, global),
        Lab::Figures(args) => figures::run(&args, global),
        Lab::Mrc(args) => mrc::run(&args, global),
        Lab::Generate(args) => generate::run(&args, global),
        Lab::Formats(args) => formats::run(&args, global),
        Lab::Advise(args) => advise::run(&args, global),
        Lab::Latency(args) => latency::run(&args, global),
        Lab::Scale(args) => scale::run(&args, global),
        Lab::Cluster(args) => cluster::run(&args, global),
    }
}

/// A trace and how to read it.
#[derive(Clone, Debug, Args)]
struct Source {
    /// The trace, which may be compressed with gzip, zstd, bzip2 or xz; - is standard input. For the
    /// files NAME.blktrace.0, NAME.blktrace.1, … of blktrace, pass NAME or one of the files
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// Format of the trace [default: detected]; 'hob lab formats' describes the formats
    #[arg(long, value_parser = formats(), hide_possible_values = true)]
    format: Option<&'static FormatInfo>,
    /// Use only this disk of the trace, by the number that 'hob lab info' shows
    #[arg(long, value_name = "NUMBER")]
    disk: Option<u16>,
    /// Skip malformed entries of the trace, or fail at the first one
    #[arg(long, value_enum, default_value_t)]
    on_bad: Bad,
    /// Size of a page, for formats that count in pages of an unknown size (arc, oracle-general, spc) [default: 512]
    #[arg(long, value_name = "SIZE")]
    page_size: Option<Size>,
}

/// Treatment of malformed trace entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Bad {
    /// Skip the entry and count it.
    #[default]
    Skip,
    /// Fail at the first malformed entry.
    Fail,
}

fn formats() -> impl TypedValueParser<Value = &'static FormatInfo> {
    PossibleValuesParser::new(FORMATS.iter().map(|format| format.name))
        .try_map(|name| FormatInfo::named(&name).map_err(|error| error.to_string()))
}

impl Source {
    fn open(&self) -> anyhow::Result<TraceReader> {
        hob_trace::open(&self.trace, &self.options()?)
    }

    /// Opens the trace for reading in blocks of several thousand records.
    fn open_blocks(&self) -> anyhow::Result<TraceBlocks> {
        TraceBlocks::open(&self.trace, &self.options()?)
    }

    fn options(&self) -> anyhow::Result<OpenOptions> {
        let page_bytes = match self.page_size {
            None => None,
            Some(Size(bytes)) => match u32::try_from(bytes) {
                Ok(bytes @ 1..) => Some(bytes),
                _ => bail!("a page size of {bytes} bytes is not possible; pass 1 to 4294967295 bytes"),
            },
        };
        let on_bad = if self.on_bad == Bad::Fail { OnBad::Fail } else { OnBad::Skip };
        Ok(OpenOptions { format: self.format, on_bad, disk: self.disk, page_bytes, ..OpenOptions::default() })
    }
}

/// Number of records between two updates of the progress bar, which also check for Ctrl-C.
const RECORDS_A_LOOK: u64 = 8192;

/// Reads a whole trace with a progress bar, until Ctrl-C.
fn read_all(
    reader: &mut TraceReader,
    stop: &AtomicBool,
    mut each: impl FnMut(&Record) -> anyhow::Result<()>,
) -> anyhow::Result<u64> {
    let bar = match reader.bytes() {
        Some(bytes) => ProgressBar::new(bytes)
            .with_style(ProgressStyle::with_template("{bar:40} {percent:>3} %  {msg}  {eta} left")?),
        None => ProgressBar::no_length().with_style(ProgressStyle::with_template("{spinner} {msg}")?),
    };
    let mut records = 0_u64;
    while let Some(record) = reader.next() {
        each(&record?)?;
        records += 1;
        if records.is_multiple_of(RECORDS_A_LOOK) {
            bar.set_position(reader.bytes_read());
            bar.set_message(format!("{records} requests"));
            ensure!(!stop.load(Ordering::Relaxed), "interrupted after {records} requests");
        }
    }
    bar.finish_and_clear();
    let skipped = reader.skipped();
    match skipped.first.first() {
        Some(first) if records == 0 => {
            bail!("the trace has no request, and {} malformed entries; {first}", skipped.count)
        }
        _ => Ok(records),
    }
}

/// Reads at most `requests_max` requests of a trace, for a model. Also returns the remarks of the
/// reader, without the lists of malformed entries.
fn read_material(
    source: &Source,
    requests_max: u32,
    stop: &AtomicBool,
) -> anyhow::Result<(Material, Vec<String>)> {
    let mut reader = source.open()?;
    let mut material = Material::new(requests_max as usize);
    let requests = read_all(&mut reader, stop, |record| {
        material.add(record);
        Ok(())
    })?;
    ensure!(requests > 0, "{} has no requests", source.trace.display());
    Ok((material, without_lists(remarks(&reader))))
}

/// Removes the lists of malformed entries from remarks.
fn without_lists(remarks: Vec<String>) -> Vec<String> {
    let heads = remarks.into_iter().filter(|remark| !remark.starts_with(' '));
    heads.map(|remark| remark.trim_end_matches(':').to_owned()).collect()
}

/// Shows the progress of a model's work as a bar. Ctrl-C cancels the work.
fn with_progress<T>(
    bar: &str,
    stop: &AtomicBool,
    work: impl FnOnce(&mut dyn FnMut(&str, f64) -> bool) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let bar = ProgressBar::new(1000).with_style(ProgressStyle::with_template(bar)?);
    let result = work(&mut |stage, share| {
        bar.set_position((share * 1000.0) as u64);
        bar.set_message(stage.to_owned());
        !stop.load(Ordering::Relaxed)
    });
    bar.finish_and_clear();
    result
}

/// Creates a progress bar of simulations that run in parallel.
fn runs_bar() -> anyhow::Result<ProgressBar> {
    let style = "{bar:40} {pos} of {len} runs, {msg} requests, {elapsed}";
    Ok(ProgressBar::new(0).with_style(ProgressStyle::with_template(style)?))
}

fn show_runs(bar: &ProgressBar, progress: Progress) {
    bar.set_length(progress.runs_total as u64);
    bar.set_position(progress.runs as u64);
    bar.set_message(progress.requests.to_string());
}

/// Returns a flag that Ctrl-C sets. From now on Ctrl-C does not end the program.
fn interruption() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&stop);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let wait = move || {
        let _ = runtime.block_on(tokio::signal::ctrl_c());
        told.store(true, Ordering::Relaxed);
    };
    std::thread::Builder::new().name("ctrl-c".to_owned()).spawn(wait).context("cannot start a thread")?;
    Ok(stop)
}

/// Returns the remarks of the reader, one line each.
fn remarks(reader: &TraceReader) -> Vec<String> {
    let mut remarks = Vec::new();
    if reader.files() > 1 {
        remarks.push(format!("{} per-CPU files of blktrace were merged", reader.files()));
    }
    let skipped = reader.skipped();
    if skipped.count > 0 {
        remarks.push(match skipped.count {
            1 => "1 invalid entry was skipped:".to_owned(),
            more => format!("{more} invalid entries were skipped:"),
        });
        remarks.extend(skipped.first.iter().map(|entry| format!("  {entry}")));
        if skipped.count > skipped.first.len() as u64 {
            remarks.push("  …".to_owned());
        }
    }
    if reader.late() > 0 {
        remarks.push(format!(
            "{} requests were too far out of order in the trace; their times were changed",
            reader.late()
        ));
    }
    remarks
}

/// Formats a number of bytes in a suitable unit.
fn bytes(count: u64) -> String {
    Unit::Bytes.text(count as f64)
}

/// Formats a ratio as a percentage without the sign.
fn percent(ratio: f64) -> String {
    format!("{:.2}", ratio * 100.0)
}

/// Writes a text to the file that an option names, if the option is given.
fn write_if(path: Option<impl AsRef<Path>>, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let path = path.as_ref();
    std::fs::write(path, text()).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remarks_without_lists_do_not_announce_a_list() {
        let remarks = ["2 invalid entries were skipped:", "  line 4: the length is 0", "  …", "late"];
        let heads = without_lists(remarks.map(str::to_owned).into());
        assert_eq!(heads, ["2 invalid entries were skipped", "late"]);
    }
}
