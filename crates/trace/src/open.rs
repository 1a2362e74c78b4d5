//! Opens a trace and reads its records, in any format and compression.

use std::fmt;
use std::fs::File;
use std::io::{self, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, anyhow, bail};

use super::decompress::{self, Compression, SUFFIXES};
use super::disks::Disks;
use super::fields::Reason;
use super::formats::{self, FormatInfo, Head, Parse, Raw, Settings, Step};
use super::input::{Input, Place};
use super::per_cpu;
use super::window::{Waiting, Window};
use super::{Op, Record, check_range};

/// Number of bytes from which the format is detected.
const HEAD_BYTES: usize = 64 << 10;
const FILE_BUFFER_BYTES: usize = 256 << 10;
/// Number of bytes that the reader decompresses to find damage, if the format of the compressed
/// data is unknown. bzip2 notices damage only at the end of a block, after up to 900 KB.
const DAMAGE_BYTES_MAX: u64 = 16 << 20;
/// Maximum difference of a valid time from the other times of the trace, nanoseconds: about 36
/// years.
const SPAN_NS_MAX: u64 = 1 << 60;

/// Treatment of invalid entries of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnBad {
    /// Invalid entries are skipped and counted.
    #[default]
    Skip,
    /// The first invalid entry ends the trace with an error that has the position and the reason.
    Fail,
}

/// Limits of a trace reader's memory.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum length of a line in bytes. A longer line is invalid.
    pub line_bytes_max: usize,
    /// Number of requests that are buffered to sort them by time; at least 1.
    pub window_records: usize,
    /// Maximum number of invalid entries that are stored to be shown.
    pub skipped_shown_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { line_bytes_max: 64 << 10, window_records: 4096, skipped_shown_max: 10 }
    }
}

/// Options of reading a trace.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    /// Format of the trace. By default, the format is detected from the content, and from the file
    /// name if the content fits several formats.
    pub format: Option<&'static FormatInfo>,
    /// Treatment of invalid entries.
    pub on_bad: OnBad,
    /// Number of the disk whose requests are returned; `None` returns the requests of all disks.
    /// The requests keep the disk number.
    pub disk: Option<u16>,
    /// Page size in bytes for formats with pages of undefined size: arc, spc and oracle-general.
    /// The default is 512.
    pub page_bytes: Option<u32>,
    /// Limits of the trace reader's memory.
    pub limits: Limits,
}

/// An invalid entry of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedEntry {
    /// Position of the invalid entry.
    pub place: Place,
    /// Reason why the entry is invalid.
    pub reason: String,
}

impl fmt::Display for SkippedEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.reason)
    }
}

/// Invalid entries of a trace so far.
#[derive(Clone, Debug, Default)]
pub struct Skipped {
    /// Number of invalid entries.
    pub count: u64,
    /// First invalid entries, up to the limit.
    pub first: Vec<SkippedEntry>,
}

/// Opens a trace file. The path "-" is standard input. If the path is one of blktrace's per-CPU
/// files, or the common part of their names, all of these files are opened as one trace.
///
/// # Errors
/// Returns an error if the file cannot be read or is empty, if its format is unknown, or if its
/// header is invalid.
pub fn open(path: &Path, options: &OpenOptions) -> anyhow::Result<TraceReader> {
    if path.as_os_str() == "-" {
        return open_stream(io::stdin(), "standard input", None, options);
    }
    let name = path.display().to_string();
    let files = per_cpu::files(path)?;
    if let [_, _, ..] = files[..] {
        return open_per_cpu(&files, &name, options);
    }
    let path = files.first().map_or(path, PathBuf::as_path);
    let file = File::open(path).with_context(|| format!("cannot open the trace {name}"))?;
    let metadata = file.metadata().with_context(|| format!("cannot open the trace {name}"))?;
    if metadata.is_dir() {
        bail!("{name} is a directory, not a trace");
    }
    open_stream(file, &name, Some(metadata.len()).filter(|_| metadata.is_file()), options)
}

/// Returns true if [`open`] has something to open: a file, standard input, or per-CPU files of
/// blktrace.
pub fn is_present(path: &Path) -> bool {
    path.as_os_str() == "-" || path.exists() || merged_files(path).is_ok_and(|files| !files.is_empty())
}

/// Returns the per-CPU files of blktrace that [`open`] merges for this path. The result is empty if
/// the path is a trace of its own.
///
/// # Errors
/// Returns an error if the directory of the path cannot be listed.
pub fn merged_files(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    per_cpu::files(path)
}

fn open_per_cpu(files: &[PathBuf], name: &str, options: &OpenOptions) -> anyhow::Result<TraceReader> {
    let bytes = files.iter().map(|path| path.metadata().map_or(0, |metadata| metadata.len())).sum();
    let consumed = Arc::new(AtomicU64::new(0));
    let merged = per_cpu::open(files, &consumed)
        .with_context(|| format!("cannot read the trace {name} after 0 requests"))?;
    let mut reader = open_counted(merged, consumed, name, Some(bytes), options)?;
    reader.files = files.len();
    Ok(reader)
}

/// Opens a trace from a stream. `name` appears in messages and helps to detect the format. `bytes`
/// is the length of the stream if known.
pub fn open_stream(
    stream: impl Read + Send + 'static,
    name: &str,
    bytes: Option<u64>,
    options: &OpenOptions,
) -> anyhow::Result<TraceReader> {
    let consumed = Arc::new(AtomicU64::new(0));
    let stream = Counted { stream, consumed: consumed.clone() };
    open_counted(stream, consumed, name, bytes, options)
}

/// Opens a trace from a stream that adds the number of bytes read to `consumed`.
fn open_counted(
    stream: impl Read + Send + 'static,
    consumed: Arc<AtomicU64>,
    name: &str,
    bytes: Option<u64>,
    options: &OpenOptions,
) -> anyhow::Result<TraceReader> {
    let (compression, mut decoded) = decompress::decoded(stream, FILE_BUFFER_BYTES)
        .with_context(|| format!("cannot read the trace {name}"))?;
    let (head, failed) = read_head(&mut *decoded);
    let unreadable = |error: &io::Error| anyhow!("cannot read the trace {name} after 0 requests: {error}");
    if let (true, Some(error)) = (head.is_empty(), &failed) {
        return Err(unreadable(error));
    }
    let head = Head::new(&head, name);
    if failed.is_none() && head.is_only_a_heading() {
        bail!("{name} has a header line and no requests");
    }
    let format = match options.format.map_or_else(|| formats::detect(&head), Ok) {
        Ok(format) => format,
        Err(error) if compression == Compression::None && failed.is_none() => {
            let is_damaged = !head.bytes.is_empty() && SUFFIXES.iter().any(|suffix| name.ends_with(*suffix));
            return Err(if is_damaged {
                anyhow!(
                    "cannot read the trace {name} after 0 requests: it does not begin like compressed data"
                )
            } else {
                error
            });
        }
        Err(error) => {
            // Damaged data has no known format.
            let failed =
                failed.or_else(|| io::copy(&mut decoded.take(DAMAGE_BYTES_MAX), &mut io::sink()).err());
            return Err(failed.as_ref().map_or(error, unreadable));
        }
    };
    if options.format.is_some() {
        formats::check_separators(name, &head, format)?;
    }
    let settings = Settings { page_bytes: u64::from(options.page_bytes.unwrap_or(512).max(1)) };
    let parser = format.parser(&head, &settings).map_err(|reason| match &failed {
        Some(error) => unreadable(error),
        None => anyhow!("{name} is not a trace in the format {}: {reason}", format.name),
    })?;
    let rest = Rest { decoded, failed };
    let whole = Box::new(Cursor::new(head.bytes.to_vec()).chain(rest));
    Ok(TraceReader {
        name: name.to_owned(),
        format,
        compression,
        bytes,
        consumed,
        input: Input::new(whole, options.limits.line_bytes_max.max(1)),
        parser,
        options: *options,
        disks: Disks::default(),
        window: Window::new(options.limits.window_records),
        start_ns: None,
        last_ns: 0,
        ended: false,
        failure: None,
        requests: 0,
        skipped: Skipped::default(),
        ignored: 0,
        late: 0,
        files: 1,
    })
}

fn read_head(decoded: &mut (dyn Read + Send)) -> (Vec<u8>, Option<io::Error>) {
    let mut head = Vec::new();
    let failed = decoded.take(HEAD_BYTES as u64).read_to_end(&mut head).err();
    (head, failed)
}

/// A stream that counts the bytes read from it, for progress reports.
pub(super) struct Counted<R> {
    pub(super) stream: R,
    pub(super) consumed: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let got = self.stream.read(out)?;
        self.consumed.fetch_add(got as u64, Ordering::Relaxed);
        Ok(got)
    }
}

/// The data of a stream after its head. The head is the first bytes, from which the format is
/// detected. If reading the head ended with an error, the first read returns the error.
struct Rest {
    decoded: Box<dyn Read + Send>,
    failed: Option<io::Error>,
}

impl Read for Rest {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self.failed.take() {
            Some(error) => Err(error),
            None => self.decoded.read(out),
        }
    }
}

/// Iterator that reads the records of a trace.
///
/// **Time** counts from the first returned record, which has the time 0. Records are returned in
/// order of time. The reader sorts records within a window ([`Limits::window_records`]), and
/// records with equal times keep the order of the file. A record that is too late for the window
/// gets the previous record's time, and [`late`](TraceReader::late) counts it. A record of the
/// first window is invalid if its time is more than 36 years away from the window's median time. A
/// later record is invalid if its time is more than 36 years away from the start of the trace.
///
/// **Disks** with names get numbers in the order in which they first appear. If the trace numbers
/// its disks from 0 without gaps, the disks keep their numbers.
///
/// **Invalid entries** are skipped and counted, or end the trace with an error, according to
/// [`OnBad`]. Damaged compressed data is always an error, which the iterator returns after the
/// intact records. After an error the iterator returns no more records.
pub struct TraceReader {
    name: String,
    format: &'static FormatInfo,
    compression: Compression,
    bytes: Option<u64>,
    consumed: Arc<AtomicU64>,
    input: Input,
    parser: Box<dyn Parse>,
    options: OpenOptions,
    disks: Disks,
    window: Window,
    start_ns: Option<u64>,
    last_ns: u64,
    ended: bool,
    failure: Option<anyhow::Error>,
    /// Number of requests that were read so far, including those in the window.
    requests: u64,
    skipped: Skipped,
    ignored: u64,
    late: u64,
    files: usize,
}

impl fmt::Debug for TraceReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceReader")
            .field("name", &self.name)
            .field("format", &self.format.name)
            .field("compression", &self.compression)
            .finish_non_exhaustive()
    }
}

impl TraceReader {
    /// Returns the format of the trace.
    pub fn format(&self) -> &'static FormatInfo {
        self.format
    }

    /// Returns the number of files: more than 1 for the per-CPU files of blktrace.
    pub fn files(&self) -> usize {
        self.files
    }

    /// Returns the compression of the file.
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// Returns the size of the file in bytes, if known.
    pub fn bytes(&self) -> Option<u64> {
        self.bytes
    }

    /// Returns the number of file bytes read so far, before decompression.
    pub fn bytes_read(&self) -> u64 {
        self.consumed.load(Ordering::Relaxed)
    }

    /// Returns the invalid entries so far.
    pub fn skipped(&self) -> &Skipped {
        &self.skipped
    }

    /// Returns the number of valid entries so far that are not requests, for example completions
    /// and messages.
    pub fn ignored(&self) -> u64 {
        self.ignored
    }

    /// Returns the number of requests so far whose time was raised to the previous request's time.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// Returns the names of the disks so far, by disk number. The slice is empty for a format with
    /// one unnamed disk.
    pub fn disks(&self) -> &[String] {
        self.disks.names()
    }

    /// Reads one entry of the trace.
    fn take(&mut self) {
        match self.parser.next(&mut self.input, &mut self.disks) {
            Ok(Step::Request(raw)) => self.admit(raw),
            Ok(Step::Event) => self.ignored += 1,
            Ok(Step::Text) => {}
            Ok(Step::Bad(reason)) => self.bad(self.input.place(), reason),
            Ok(Step::End) => self.ended = true,
            // A decoder error is a defect of the data, and the remaining data is lost.
            Err(error) => {
                let (name, requests) = (&self.name, self.requests);
                self.ended = true;
                self.failure = Some(anyhow!(
                    "cannot read the trace {name} after {requests} requests ({}): {error}",
                    self.input.place()
                ));
            }
        }
    }

    fn admit(&mut self, raw: Raw) {
        let Raw { at_ns, offset, len, op, disk } = raw;
        let place = self.input.place();
        let (offset, len) = if op == Op::Flush { (0, 0) } else { (offset, len) };
        if op != Op::Flush
            && let Err(reason) = check_range(offset, len)
        {
            return self.bad(place, reason.into());
        }
        if let Some(start) = self.start_ns
            && at_ns.abs_diff(start) > SPAN_NS_MAX
        {
            return self.bad(place, absurd(at_ns, start));
        }
        if self.options.disk.is_some_and(|wanted| wanted != disk) {
            return;
        }
        let len = u32::try_from(len).expect("a length that passed is below 4 GiB");
        self.requests += 1;
        self.window.push(Waiting { record: Record { at_ns, offset, len, op, disk }, place });
    }

    fn bad(&mut self, place: Place, reason: Reason) {
        match self.options.on_bad {
            OnBad::Fail => {
                self.ended = true;
                self.failure.get_or_insert_with(|| anyhow!("{}, {place}: {reason}", self.name));
            }
            OnBad::Skip => {
                self.skipped.count += 1;
                if self.skipped.first.len() < self.options.limits.skipped_shown_max {
                    self.skipped.first.push(SkippedEntry { place, reason: reason.into_owned() });
                }
            }
        }
    }

    /// Determines the start time of the trace. The first record's time may be invalid, so the
    /// median time of the first window decides which times are invalid.
    fn begin(&mut self) {
        let Some(middle) = self.window.median_ns() else { return };
        let mut absurd_ones = Vec::new();
        self.window.retain(|waiting| {
            let keep = waiting.record.at_ns.abs_diff(middle) <= SPAN_NS_MAX;
            if !keep {
                absurd_ones.push(*waiting);
            }
            keep
        });
        for Waiting { record, place } in absurd_ones {
            self.bad(place, absurd(record.at_ns, middle));
        }
    }
}

fn absurd(at_ns: u64, start: u64) -> Reason {
    let years = at_ns.abs_diff(start) / 1_000_000_000 / 31_557_600;
    let way = if at_ns < start { "before" } else { "after" };
    format!("the time is implausible: {years} years {way} the other times of the trace").into()
}

impl Iterator for TraceReader {
    type Item = anyhow::Result<Record>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            while !self.ended && !self.window.is_full() {
                self.take();
            }
            if self.start_ns.is_none() {
                self.begin();
                if !self.ended && !self.window.is_full() {
                    continue;
                }
            }
            let Some(Waiting { mut record, .. }) = self.window.pop() else {
                return self.failure.take().map(Err);
            };
            let start = *self.start_ns.get_or_insert(record.at_ns);
            // All times of an incomplete first window are valid; see `begin`.
            let at_ns = record.at_ns.saturating_sub(start);
            if at_ns < self.last_ns || record.at_ns < start {
                self.late += 1;
            }
            self.last_ns = self.last_ns.max(at_ns);
            record.at_ns = self.last_ns;
            return Some(Ok(record));
        }
    }
}
