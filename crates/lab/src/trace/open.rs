//! Opening a trace and reading it record by record, whatever its format and compression.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Cursor, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, anyhow, bail};

use super::binary::read_whole;
use super::decompress::Compression;
use super::disks::Disks;
use super::fields::Reason;
use super::formats::{self, FormatInfo, Head, Parse, Raw, Settings, Step};
use super::input::{Input, Place};
use super::window::{Waiting, Window};
use super::{Op, Record, check_range};

/// A format is told from this much of a trace.
const HEAD_BYTES: usize = 64 << 10;
const FILE_BUFFER_BYTES: usize = 256 << 10;
/// Times farther than this from the trace's own, some 36 years, are absurd.
const SPAN_NS_MAX: u64 = 1 << 60;

/// What to do with an entry that makes no sense.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnBad {
    /// Leave it out and count it.
    #[default]
    Skip,
    /// End with an error that says where it is and what is wrong.
    Fail,
}

/// What a reader may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a line; a longer one is bad.
    pub line_bytes_max: usize,
    /// Requests that are held back to put them into order of time; at least 1.
    pub window_records: usize,
    /// Bad entries that are kept to be shown.
    pub skipped_shown_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { line_bytes_max: 64 << 10, window_records: 4096, skipped_shown_max: 10 }
    }
}

/// How to read a trace.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    /// The format; otherwise the content tells, and the name where that leaves a doubt.
    pub format: Option<&'static FormatInfo>,
    /// What to do with bad entries.
    pub on_bad: OnBad,
    /// Only the requests to this disk. They keep its number.
    pub disk: Option<u16>,
    /// For formats that count in pages and do not say how large those are: arc, spc, oracle-general. 512 by default.
    pub page_bytes: Option<u32>,
    /// What the reader may use.
    pub limits: Limits,
}

/// A bad entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedEntry {
    /// Where it is.
    pub place: Place,
    /// What is wrong with it.
    pub reason: String,
}

impl fmt::Display for SkippedEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.reason)
    }
}

/// The bad entries so far.
#[derive(Clone, Debug, Default)]
pub struct Skipped {
    /// How many.
    pub count: u64,
    /// The first few.
    pub first: Vec<SkippedEntry>,
}

/// Opens the trace in a file; "-" is standard input.
///
/// # Errors
/// A file that cannot be read, is empty, or whose format cannot be told or begins with a header that makes no sense.
pub fn open(path: &Path, options: &OpenOptions) -> anyhow::Result<TraceReader> {
    if path.as_os_str() == "-" {
        return open_stream(io::stdin(), "standard input", None, options);
    }
    let name = path.display().to_string();
    let file = File::open(path).with_context(|| format!("cannot open the trace {name}"))?;
    let metadata = file.metadata().with_context(|| format!("cannot open the trace {name}"))?;
    if metadata.is_dir() {
        bail!("{name} is a directory, not a trace");
    }
    open_stream(file, &name, Some(metadata.len()).filter(|_| metadata.is_file()), options)
}

/// Opens the trace in a stream. `name` is for messages and, in doubt, tells the format; `bytes` is its length if that
/// is known.
///
/// # Errors
/// As [`open`].
pub fn open_stream(
    stream: impl Read + Send + 'static,
    name: &str,
    bytes: Option<u64>,
    options: &OpenOptions,
) -> anyhow::Result<TraceReader> {
    let consumed = Arc::new(AtomicU64::new(0));
    let mut stream = Counted { stream, consumed: consumed.clone() };
    let mut start = vec![0; 8];
    let got = read_whole(&mut stream, &mut start).with_context(|| format!("cannot read the trace {name}"))?;
    start.truncate(got);
    let compression = Compression::of(&start);
    let file = Cursor::new(start).chain(BufReader::with_capacity(FILE_BUFFER_BYTES, stream));
    let mut decoded = compression.decoder(file);

    let (head, failed) = read_head(&mut *decoded);
    if let (true, Some(error)) = (head.is_empty(), &failed) {
        bail!("cannot read the trace {name}: {}", explain(error, compression));
    }
    let head = Head::new(&head, name);
    let format = match options.format {
        Some(format) => format,
        None => formats::detect(&head)?,
    };
    let settings = Settings { page_bytes: u64::from(options.page_bytes.unwrap_or(512).max(1)) };
    let parser = format
        .parser(&head, &settings)
        .map_err(|reason| anyhow!("{name} is no trace in the format {}: {reason}", format.name))?;
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
        skipped: Skipped::default(),
        ignored: 0,
        late: 0,
    })
}

fn read_head(decoded: &mut (dyn Read + Send)) -> (Vec<u8>, Option<io::Error>) {
    let mut head = Vec::new();
    let failed = decoded.take(HEAD_BYTES as u64).read_to_end(&mut head).err();
    (head, failed)
}

/// Counts the bytes that were read, for progress.
struct Counted<R> {
    stream: R,
    consumed: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let got = self.stream.read(out)?;
        self.consumed.fetch_add(got as u64, Ordering::Relaxed);
        Ok(got)
    }
}

/// What follows the head: an error that ended it, or more.
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

fn explain(error: &io::Error, compression: Compression) -> String {
    let what = match compression {
        _ if error.raw_os_error().is_some() => return error.to_string(),
        Compression::None => return error.to_string(),
        Compression::Gzip => "gzip",
        Compression::Zstd => "zstd",
        Compression::Bzip2 => "bzip2",
        Compression::Xz => "xz",
    };
    format!("the {what} data is cut off or damaged here ({error})")
}

/// Reads a trace: an iterator of records.
///
/// **Time** counts from the first record handed over, which is at 0. Records come in order of time: those that a file
/// has in disorder are sorted within a window ([`Limits::window_records`]), records of equal time staying in the
/// file's order. One that comes later than the window can mend gets the time of the record before it and is counted
/// by [`late`](TraceReader::late). A time more than some 36 years away from the middle of the first window, and later
/// from the start, is absurd, and its record bad.
///
/// **Disks** that a trace names are numbered in the order of their appearance; those that it numbers from 0 without
/// gaps keep their numbers.
///
/// **Bad entries** are skipped and counted, or end the trace with an error, as [`OnBad`] says. Data that is
/// compressed and turns out to be damaged counts as one bad entry, after which there is nothing. After an error there is nothing either.
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
    skipped: Skipped,
    ignored: u64,
    late: u64,
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
    /// The format that is read.
    pub fn format(&self) -> &'static FormatInfo {
        self.format
    }

    /// How the file is compressed.
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// Bytes of the file, if that is known.
    pub fn bytes(&self) -> Option<u64> {
        self.bytes
    }

    /// Bytes of the file read so far, as they are on disk.
    pub fn bytes_read(&self) -> u64 {
        self.consumed.load(Ordering::Relaxed)
    }

    /// Bad entries so far.
    pub fn skipped(&self) -> &Skipped {
        &self.skipped
    }

    /// Entries so far that are no requests, and in order: completions, messages, operations on files.
    pub fn ignored(&self) -> u64 {
        self.ignored
    }

    /// Requests so far whose time was raised to that of the one before.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// The names of the disks met so far, by number. Empty for a format that knows one disk without a name.
    pub fn disks(&self) -> &[String] {
        self.disks.names()
    }

    /// Takes one entry from the file.
    fn take(&mut self) {
        match self.parser.next(&mut self.input, &mut self.disks) {
            Ok(Step::Request(raw)) => self.admit(raw),
            Ok(Step::Event) => self.ignored += 1,
            Ok(Step::Text) => {}
            Ok(Step::Bad(reason)) => self.bad(self.input.place(), reason),
            Ok(Step::End) => self.ended = true,
            // What a decoder finds wrong is a fault of the data; the rest of it is lost.
            Err(error) if error.raw_os_error().is_none() && self.compression != Compression::None => {
                self.bad(self.input.place(), explain(&error, self.compression).into());
                self.ended = true;
            }
            Err(error) => {
                self.ended = true;
                self.failure = Some(anyhow!("cannot read the trace {}: {error}", self.name));
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

    /// Decides where the trace's time begins. A first record with a time of its own must not decide that, so
    /// the middle of the first window says which times are absurd.
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
    format!("the time is absurd: {years} years {way} the others").into()
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
            // What is left of a first window that is not full yet stays within the span: see `begin`.
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
