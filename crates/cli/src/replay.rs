//! `hob replay TRACE`: sends the requests of a trace to a real disk in real time.
//!
//! The trace is read twice: first to check that it fits the target and that its writes are allowed,
//! then to replay it. The report is complete however the replay ends.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, bail, ensure};
use clap::Args;
use hob_engine::command::Access;
use hob_lab::replay::{Changes, Class, FileAccess, Options, Pace, Part, Report, Survey, Target, replay};
use hob_storage::PathLock;
use hob_trace::{self, OpenOptions, TraceReader};
use indicatif::{ProgressBar, ProgressStyle};
use tokio::signal::unix::{SignalKind, signal};

use super::Global;
use super::output::{duration, pairs, print, table};
use super::watch::STATUS_INTERRUPTED;

/// Default maximum number of requests in flight; the target may allow fewer.
const DEPTH_DEFAULT: usize = 128;

/// Send the requests of a trace to a disk in real time, and measure the latencies
///
/// Writes have random data. After Ctrl-C the command ends the replay and prints the report. A second
/// Ctrl-C ends the command without a report.
#[derive(Debug, Args)]
pub(crate) struct Replay {
    /// The trace, in any format that hob reads
    trace: PathBuf,
    /// Target of the requests: nbd://host/export, nbd+unix:///export?socket=PATH, a file or a block
    /// device
    #[arg(long, value_name = "SPEC")]
    target: String,
    /// Speed of the replay: original, asap, or a factor like x10 or x0.5
    #[arg(long, default_value_t)]
    pace: Pace,
    /// Maximum number of requests in flight; a request that waits counts as late [default: 128]
    #[arg(long, value_name = "N")]
    depth: Option<usize>,
    /// Send writes and discards too: the target loses its data
    #[arg(long)]
    allow_writes: bool,
    /// Send the reads only
    #[arg(long, conflicts_with = "allow_writes")]
    reads_only: bool,
    /// Map offsets beyond the target's end to offsets from its start
    #[arg(long)]
    wrap: bool,
    /// Bypass the page cache of a file or block device
    #[arg(long)]
    direct: bool,
    /// Skip this number of seconds at the start of the trace
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    from: u64,
    /// Maximum number of requests to send
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Send only the requests of this disk, by its number in the trace
    #[arg(long, value_name = "N")]
    disk: Option<u16>,
}

impl Replay {
    fn changes(&self) -> Changes {
        match (self.allow_writes, self.reads_only) {
            (true, _) => Changes::Allow,
            (_, true) => Changes::LeaveOut,
            (false, false) => Changes::Refuse,
        }
    }

    fn part(&self) -> Part {
        Part {
            from_ns: self.from.saturating_mul(1_000_000_000),
            requests_max: self.limit.unwrap_or(u64::MAX),
        }
    }

    fn open(&self) -> anyhow::Result<TraceReader> {
        hob_trace::open(&self.trace, &OpenOptions { disk: self.disk, ..OpenOptions::default() })
    }
}

pub(super) fn run(args: &Replay, global: &Global) -> anyhow::Result<()> {
    ensure!(args.trace.as_os_str() != "-", "a trace is read twice, so it cannot be standard input");
    let access = if args.direct { FileAccess::Direct } else { FileAccess::Buffered };
    let stop = stop_on_signals()?;
    let reader = args.open()?;
    let _lock = lock(args)?;
    let target = Target::open(&args.target, access, args.changes())?;
    let survey = look_at(args, reader, &stop)?;
    let options = Options {
        pace: args.pace,
        depth: args.depth.unwrap_or(DEPTH_DEFAULT.min(target.depth_max())),
        changes: args.changes(),
        wrap: args.wrap,
    };
    let style = "{bar:40} {percent:>3} %  {human_pos} of {human_len} requests, {per_sec}, {eta} left  {msg}";
    let bar = ProgressBar::new(0).with_style(ProgressStyle::with_template(style)?);
    let records = args.part().of(args.open()?);
    let report = replay(target, records, &survey, &options, &stop, |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.answered);
        if args.pace != Pace::Asap && progress.answered % 256 == 1 {
            bar.set_message(format!("{} late", duration(progress.late_ns)));
        }
    })?;
    bar.finish_and_clear();
    print(global.output, &report, show)?;
    match report.failure {
        Some(failure) => bail!("the replay stopped after {} requests: {failure}", report.answered),
        None => Ok(()),
    }
}

/// Locks a file or block device that the replay writes to, as hob and QEMU lock their disks.
fn lock(args: &Replay) -> anyhow::Result<Option<PathLock>> {
    if args.changes() != Changes::Allow || args.target.contains("://") {
        return Ok(None);
    }
    let path = Path::new(&args.target);
    let metadata = path.metadata().with_context(|| format!("cannot open {}", args.target))?;
    ensure!(!metadata.is_dir(), "{} is a directory, not a file or block device", args.target);
    let lock = PathLock::take(path, Access::ReadWrite).map_err(|error| {
        let is_in_use = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy);
        let error = anyhow::Error::from(error);
        match is_in_use {
            true => error.context(
                "the replay would overwrite a disk that another program uses; stop that program, or choose \
                 another target",
            ),
            false => error,
        }
    })?;
    Ok(Some(lock))
}

/// Reads the whole trace once.
fn look_at(args: &Replay, mut reader: TraceReader, stop: &AtomicBool) -> anyhow::Result<Survey> {
    let style = ProgressStyle::with_template("{spinner} reading the trace: {human_pos} requests")?;
    let spinner = ProgressBar::new_spinner().with_style(style);
    let (mut first_disk, mut many_disks) = (None, false);
    let records = args.part().of(&mut reader).inspect(|record| {
        if let Ok(record) = record {
            many_disks |= *first_disk.get_or_insert(record.disk) != record.disk;
        }
        spinner.inc(1);
    });
    let survey = Survey::of(records.take_while(|_| !stop.load(Ordering::Relaxed)))?;
    spinner.finish_and_clear();
    ensure!(!stop.load(Ordering::Relaxed), "interrupted before the first request was sent");
    ensure!(survey.requests() > 0, "{} has no requests, or its selected part has none", args.trace.display());
    if many_disks {
        tracing::warn!(
            "the trace has several disks, and all are sent to one target; --disk N sends those of one disk"
        );
    }
    let skipped = reader.skipped();
    if skipped.count > 0 {
        let first = skipped.first.first().map(ToString::to_string).unwrap_or_default();
        tracing::warn!("{} malformed entries of the trace were skipped, the first: {first}", skipped.count);
    }
    Ok(survey)
}

fn show(report: &Report) -> String {
    let mut facts = vec![
        ("target", report.target.clone()),
        ("pace", format!("{}, at most {} in flight", report.pace, report.depth)),
        (
            "requests",
            format!("{} of {} answered, {} left out", report.answered, report.requests, report.left_out),
        ),
        ("errors", report.errors.to_string()),
    ];
    facts.extend(report.first_error.clone().map(|error| ("first error", error)));
    facts.push(("time", duration(report.elapsed_ns)));
    facts.push(("IOPS", format!("{:.1}", report.iops)));
    if let Some(late) = &report.lateness {
        let [mean, p99, max] = [late.mean_ns, late.p99_ns, late.max_ns].map(duration);
        facts.push(("sent late by", format!("{mean} (mean), {p99} (p99), {max} (max)")));
    }
    match (&report.failure, report.interrupted) {
        (Some(failure), _) => facts.push(("broke off", failure.clone())),
        (None, true) => facts.push(("interrupted", "yes".to_owned())),
        (None, false) => {}
    }
    let columns = "CLASS|REQUESTS:|ERRORS:|BYTES:|MEAN:|P50:|P99:|P99.9:|MAX:";
    let row = |class: &Class| {
        let [requests, errors, bytes] = [class.requests, class.errors, class.bytes].map(|it| it.to_string());
        let times = [class.mean_ns, class.p50_ns, class.p99_ns, class.p999_ns, class.max_ns].map(duration);
        [vec![class.class.to_owned(), requests, errors, bytes], times.to_vec()].concat()
    };
    format!("{}\n\n{}", pairs(facts), table(columns, report.classes.iter().map(row)))
}

/// A flag that SIGINT and SIGTERM set. A second signal ends the process.
pub(super) fn stop_on_signals() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    let (mut int, mut term) = {
        let _inside = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    thread::spawn(move || {
        runtime.block_on(async {
            loop {
                tokio::select! {
                    _ = int.recv() => {}
                    _ = term.recv() => {}
                }
                if flag.swap(true, Ordering::Relaxed) {
                    std::process::exit(STATUS_INTERRUPTED);
                }
            }
        });
    });
    Ok(stop)
}
