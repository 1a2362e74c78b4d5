//! `hob record DISK`: records the requests of a disk, as its guest sends them, in a trace file.
//!
//! The trace is complete and valid however the recording ends: after a time, after a number of
//! requests, with Ctrl-C, or because the disk or the daemon ends.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use hob_control::client::Trace;
use hob_control::{TraceFrame, TraceOp, TraceRecord};
use hob_trace::{Op, Record as LabRecord, binary, csv};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::Global;
use super::output::{duration, pairs, print, word};
use super::remote::{converse, explain};

/// Number of trace frames to receive after a signal, so that the trace ends at the signal. The
/// daemon may have sent the first of these frames before the signal.
const FRAMES_AFTER_SIGNAL: u32 = 2;

/// Record the requests of a disk until Ctrl-C
#[derive(Debug, Args)]
pub(crate) struct Record {
    /// The disk
    disk: String,
    /// File for the trace; must not exist
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Stop recording after this number of seconds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    seconds: Option<u64>,
    /// Stop recording after this number of requests
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    requests: Option<u64>,
    /// Format of the trace: hob's own format, or a line of text for each request
    #[arg(long, value_enum, default_value_t)]
    format: TraceFormat,
}

/// Format of the trace file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum TraceFormat {
    /// hob's own format
    #[default]
    Binary,
    /// Lines of ts_us,op,offset,size
    Csv,
}

/// The result of `hob record`, as `-o json` prints it.
#[derive(Debug, Serialize)]
struct Recorded {
    disk: String,
    file: PathBuf,
    format: TraceFormat,
    requests: u64,
    dropped: u64,
    elapsed_ns: u64,
    ended: Ended,
}

/// Reason why a recording ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Ended {
    /// The time is over.
    Seconds,
    /// The requested number of requests was recorded.
    Requests,
    /// A signal interrupted the recording.
    Interrupted,
    /// The disk is not served any more.
    DiskRemoved,
    /// The daemon closed the connection.
    DaemonGone,
}

pub(super) fn run(args: &Record, global: &Global) -> anyhow::Result<()> {
    let recorded = converse(global, async |client| {
        let mut signals = Signals::new()?;
        let trace = client.trace(&args.disk).await.map_err(explain)?;
        let sink = Sink::create(args).with_context(|| format!("cannot write {}", args.out.display()))?;
        let (recording, broke) = Recording::new(args, sink).follow(trace, &mut signals).await?;
        Ok((recording.finish(args)?, broke))
    });
    let (recorded, broke) = recorded?;
    print(global.output, &recorded, show)?;
    match broke {
        None => Ok(()),
        Some(error) => bail!("{error}; the trace is complete up to then"),
    }
}

fn show(recorded: &Recorded) -> String {
    let seconds = recorded.elapsed_ns as f64 / 1e9;
    let rate = recorded.requests as f64 / seconds.max(1e-9);
    pairs([
        ("disk", recorded.disk.clone()),
        ("trace", format!("{} ({})", recorded.file.display(), word(&recorded.format))),
        ("requests", format!("{} ({rate:.0} a second)", recorded.requests)),
        ("dropped", recorded.dropped.to_string()),
        ("recorded for", duration(recorded.elapsed_ns)),
        ("ended by", word(&recorded.ended).replace('-', " ")),
    ])
}

/// A recording that is written to the file.
struct Recording {
    sink: Sink,
    bar: ProgressBar,
    requests_max: u64,
    ns_max: u64,
    requests: u64,
    dropped: u64,
    elapsed_ns: u64,
    ended: Option<Ended>,
}

impl Recording {
    fn new(args: &Record, sink: Sink) -> Recording {
        let style = ProgressStyle::with_template("{spinner} {prefix}: {msg}").expect("a valid template");
        Recording {
            sink,
            bar: ProgressBar::new_spinner().with_style(style).with_prefix(args.disk.clone()),
            requests_max: args.requests.unwrap_or(u64::MAX),
            ns_max: args.seconds.map_or(u64::MAX, |seconds| seconds * 1_000_000_000),
            requests: 0,
            dropped: 0,
            elapsed_ns: 0,
            ended: None,
        }
    }

    /// Records until the end. Also returns the error if the daemon's stream ended early.
    async fn follow(
        mut self,
        mut trace: Trace,
        signals: &mut Signals,
    ) -> anyhow::Result<(Recording, Option<anyhow::Error>)> {
        let mut frames_left = None;
        while self.ended.is_none() {
            tokio::select! {
                frame = trace.next() => match frame {
                    Ok(Some(frame)) => self.take(&frame)?,
                    Ok(None) => self.ended = Some(Ended::DiskRemoved),
                    Err(error) => {
                        self.ended = Some(Ended::DaemonGone);
                        return Ok((self, Some(explain(error))));
                    }
                },
                // After a second signal the command ends immediately.
                () = signals.next() => if frames_left.replace(FRAMES_AFTER_SIGNAL + 1).is_some() {
                    frames_left = Some(1);
                },
            }
            if let Some(left) = &mut frames_left {
                *left -= 1;
                if *left == 0 && self.ended.is_none() {
                    self.ended = Some(Ended::Interrupted);
                }
            }
        }
        Ok((self, None))
    }

    fn take(&mut self, frame: &TraceFrame) -> anyhow::Result<()> {
        for record in &frame.records {
            if record.at_ns >= self.ns_max {
                self.ended = Some(Ended::Seconds);
                break;
            }
            self.sink.push(record)?;
            self.requests += 1;
            self.elapsed_ns = record.at_ns;
            if self.requests == self.requests_max {
                self.ended = Some(Ended::Requests);
                break;
            }
        }
        self.dropped = frame.dropped;
        if self.ended.is_none() && frame.elapsed_ns >= self.ns_max {
            self.ended = Some(Ended::Seconds);
        }
        match self.ended {
            Some(Ended::Seconds) => self.elapsed_ns = self.ns_max,
            Some(_) => {}
            None => self.elapsed_ns = frame.elapsed_ns,
        }
        self.bar.set_message(format!("{} requests, {} dropped", self.requests, self.dropped));
        self.bar.tick();
        Ok(())
    }

    fn finish(self, args: &Record) -> anyhow::Result<Recorded> {
        self.bar.finish_and_clear();
        self.sink
            .finish(self.dropped)
            .with_context(|| format!("cannot finish the trace {}", args.out.display()))?;
        Ok(Recorded {
            disk: args.disk.clone(),
            file: args.out.clone(),
            format: args.format,
            requests: self.requests,
            dropped: self.dropped,
            elapsed_ns: self.elapsed_ns,
            ended: self.ended.expect("it has ended"),
        })
    }
}

/// Destination of the records.
enum Sink {
    Binary {
        writer: binary::Writer<File>,
        /// True for a regular file, whose header can be written again with the final counts.
        is_file: bool,
    },
    Csv(csv::Writer<File>),
}

/// Creates a file, or opens a pipe or terminal. Existing data is never overwritten.
fn create(path: &Path) -> io::Result<File> {
    match File::create_new(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let kind = std::fs::metadata(path)?.file_type();
            if kind.is_fifo() || kind.is_char_device() {
                return File::options().write(true).open(path);
            }
            Err(io::Error::new(error.kind(), "it exists; name a new file, or delete this one"))
        }
        file => file,
    }
}

impl Sink {
    fn create(args: &Record) -> io::Result<Sink> {
        let file = create(&args.out)?;
        Ok(match args.format {
            TraceFormat::Csv => Sink::Csv(csv::Writer::new(file)?),
            TraceFormat::Binary => {
                let is_file = file.metadata()?.is_file();
                let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
                let started_unix_ns = u64::try_from(since_1970.as_nanos()).unwrap_or(0);
                let header = binary::Header { started_unix_ns, disks: 1, ..binary::Header::default() };
                Sink::Binary { writer: binary::Writer::with_header(file, header)?, is_file }
            }
        })
    }

    fn push(&mut self, record: &TraceRecord) -> anyhow::Result<()> {
        let op = match record.op {
            TraceOp::Read => Op::Read,
            TraceOp::Write => Op::Write,
            TraceOp::Discard => Op::Discard,
            TraceOp::Flush => Op::Flush,
        };
        let record = LabRecord { at_ns: record.at_ns, offset: record.offset, len: record.len, op, disk: 0 };
        match self {
            Sink::Binary { writer, .. } => writer.push(&record),
            Sink::Csv(writer) => writer.push(&record),
        }
        .context("cannot write the trace")
    }

    fn finish(self, dropped: u64) -> io::Result<()> {
        match self {
            Sink::Binary { writer, is_file: true } => writer.finish_counted(dropped).map(drop),
            Sink::Binary { writer, is_file: false } => writer.finish().map(drop),
            Sink::Csv(writer) => writer.finish().map(drop),
        }
    }
}

/// SIGINT and SIGTERM.
struct Signals {
    int: Signal,
    term: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Signals> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Signals { int: listen(SignalKind::interrupt())?, term: listen(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.int.recv() => {}
            _ = self.term.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recording(
        dir: &tempfile::TempDir,
        seconds: Option<u64>,
        requests: Option<u64>,
    ) -> (Record, Recording) {
        let out = dir.path().join("t.hob");
        let args = Record { disk: "vm".into(), out, seconds, requests, format: TraceFormat::Binary };
        let sink = Sink::create(&args).unwrap();
        let recording = Recording::new(&args, sink);
        (args, recording)
    }

    fn frame(from: u64, to: u64) -> TraceFrame {
        let records = (from..to).map(|i| TraceRecord {
            at_ns: i * 100_000_000,
            offset: i * 4096,
            len: 4096,
            op: TraceOp::Read,
        });
        TraceFrame { elapsed_ns: to * 100_000_000, dropped: from, is_last: false, records: records.collect() }
    }

    fn read(path: &std::path::Path) -> (binary::Header, Vec<u64>) {
        let reader = binary::Reader::new(File::open(path).unwrap()).unwrap();
        (*reader.header(), reader.map(|record| record.unwrap().offset / 4096).collect())
    }

    #[test]
    fn it_ends_at_the_request_that_was_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let (args, mut recording) = recording(&dir, None, Some(7));
        recording.take(&frame(0, 5)).unwrap();
        assert_eq!(recording.ended, None);
        recording.take(&frame(5, 12)).unwrap();
        let recorded = recording.finish(&args).unwrap();
        assert_eq!((recorded.ended, recorded.requests, recorded.dropped), (Ended::Requests, 7, 5));
        let (header, places) = read(&args.out);
        assert_eq!((header.records, header.dropped, header.disks), (7, 5, 1));
        assert!(header.started_unix_ns > 0);
        assert_eq!(places, (0..7).collect::<Vec<_>>());
    }

    #[test]
    fn it_ends_at_the_second_that_was_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let (args, mut first) = recording(&dir, Some(1), None);
        first.take(&frame(0, 9)).unwrap();
        assert_eq!(first.ended, None);
        first.take(&frame(9, 13)).unwrap();
        let recorded = first.finish(&args).unwrap();
        assert_eq!((recorded.ended, recorded.elapsed_ns), (Ended::Seconds, 1_000_000_000));
        assert_eq!(read(&args.out).1, (0..10).collect::<Vec<_>>());
        // If there is nothing to record, the command ends too.
        let another = tempfile::tempdir().unwrap();
        let (_, mut idle) = recording(&another, Some(1), None);
        idle.take(&TraceFrame { elapsed_ns: 1_000_000_000, ..TraceFrame::default() }).unwrap();
        assert_eq!(idle.ended, Some(Ended::Seconds));
    }
}
