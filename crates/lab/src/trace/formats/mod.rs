//! The formats: one file each, registered in [`FORMATS`].
//!
//! A format is a detector for the first bytes, and a parser that turns the next line or record into a
//! request or a reason why it is invalid. The reader does the checks that are common to all (ranges, times,
//! disks that are not wanted).

mod alibaba;
mod arc;
mod binary;
mod blkparse;
mod blkreplay;
mod blktrace;
mod csv;
mod disksim;
mod fio;
mod msr;
mod oracle_general;
mod spc;
mod srt;
mod systor;
mod tectonic;
mod tencent;
mod vscsi;

use std::io;

use anyhow::bail;

use super::Op;
use super::disks::Disks;
use super::fields::Reason;
use super::input::Input;

/// A trace format that can be read.
#[derive(Debug)]
pub struct FormatInfo {
    /// Name for `--format`.
    pub name: &'static str,
    /// Description in one line.
    pub summary: &'static str,
    /// Definition of the format.
    pub source: &'static str,
    /// Parts of file names that decide between formats, in lower case.
    hints: &'static [&'static str],
    detect: fn(&Head<'_>) -> Likeness,
    parser: MakeParser,
}

/// Creates the parser of a trace with this start.
type MakeParser = fn(&Head<'_>, &Settings) -> Result<Box<dyn Parse>, Reason>;

impl FormatInfo {
    /// Returns the format of that name.
    ///
    /// # Errors
    /// An unknown name; the message lists the known ones.
    pub fn named(name: &str) -> anyhow::Result<&'static FormatInfo> {
        match FORMATS.iter().find(|format| format.name == name) {
            Some(format) => Ok(format),
            None => bail!("'{name}' is no trace format; these are: {}", names()),
        }
    }

    pub(super) fn parser(&self, head: &Head<'_>, settings: &Settings) -> Result<Box<dyn Parse>, Reason> {
        (self.parser)(head, settings)
    }
}

/// Every format. If the content fits several equally well, the file name decides, then the order here.
pub const FORMATS: &[FormatInfo] = &[
    binary::FORMAT,
    csv::FORMAT,
    msr::FORMAT,
    vscsi::V1,
    vscsi::V2,
    spc::FORMAT,
    blkparse::FORMAT,
    blktrace::FORMAT,
    fio::V2,
    fio::V3,
    alibaba::FORMAT,
    tencent::FORMAT,
    systor::FORMAT,
    oracle_general::FORMAT,
    blkreplay::FORMAT,
    disksim::DISKSIM,
    disksim::MQSIM,
    disksim::REPLAYER,
    arc::FORMAT,
    srt::FORMAT,
    tectonic::FORMAT,
];

fn names() -> String {
    FORMATS.iter().map(|format| format.name).collect::<Vec<_>>().join(", ")
}

/// Settings for formats that do not contain them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    /// Bytes of a page, if the format does not define it.
    pub(super) page_bytes: u64,
}

/// An unchecked request of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Raw {
    /// Nanoseconds since the format's own start.
    pub(super) at_ns: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) op: Op,
    pub(super) disk: u16,
}

/// The next entry of a trace.
pub(super) enum Step {
    /// A request.
    Request(Raw),
    /// An event that is not a request.
    Event,
    /// A header, a comment, an empty line.
    Text,
    /// An invalid entry.
    Bad(Reason),
    /// Nothing more.
    End,
}

/// A parser of a format.
pub(super) trait Parse: Send {
    /// Returns the next entry. An error is the input's.
    fn next(&mut self, input: &mut Input, disks: &mut Disks) -> io::Result<Step>;
}

/// What a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    Request(Raw),
    Event,
    Text,
}

/// A parser of a text format. Lines are never empty.
trait ParseLine: Send {
    fn line(&mut self, line: &str, disks: &mut Disks) -> Result<Entry, Reason>;
}

/// A text format, line by line.
struct Lines<L>(L);

impl<L: ParseLine> Parse for Lines<L> {
    fn next(&mut self, input: &mut Input, disks: &mut Disks) -> io::Result<Step> {
        Ok(match input.line()? {
            None => Step::End,
            Some(Ok(line)) if line.trim().is_empty() => Step::Text,
            Some(line) => match line.and_then(|line| self.0.line(line, disks)) {
                Ok(Entry::Request(raw)) => Step::Request(raw),
                Ok(Entry::Event) => Step::Event,
                Ok(Entry::Text) => Step::Text,
                Err(reason) => Step::Bad(reason),
            },
        })
    }
}

/// The start of a trace, from which its format is detected.
pub(super) struct Head<'a> {
    pub(super) bytes: &'a [u8],
    name: String,
}

/// Maximum number of lines of a text that are examined.
const HEAD_LINES: usize = 200;

impl<'a> Head<'a> {
    pub(super) fn new(bytes: &'a [u8], name: &str) -> Head<'a> {
        Head { bytes, name: name.to_ascii_lowercase() }
    }

    /// Returns the first non-empty lines. The last one may be truncated, and is left out unless it is the
    /// only one.
    fn lines(&self) -> impl Iterator<Item = &'a str> {
        let text = match std::str::from_utf8(self.bytes) {
            Ok(text) => text,
            Err(error) => std::str::from_utf8(&self.bytes[..error.valid_up_to()]).expect("valid up to there"),
        };
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let end = text.rfind(['\n', '\r']).unwrap_or(text.len());
        text[..end].split(['\n', '\r']).filter(|line| !line.trim().is_empty()).take(HEAD_LINES)
    }

    fn name_has(&self, part: &str) -> bool {
        self.name.contains(part)
    }
}

/// How well a start fits a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Likeness {
    No,
    Perhaps,
    Surely,
}

/// Returns how well the first lines fit a text format: surely if nearly all do.
fn lines_like(head: &Head<'_>, mut parser: impl ParseLine) -> Likeness {
    let mut disks = Disks::default();
    let (mut requests, mut bad) = (0, 0);
    for line in head.lines() {
        match parser.line(line, &mut disks) {
            Ok(Entry::Request(_)) => requests += 1,
            Ok(_) => {}
            Err(_) => bad += 1,
        }
    }
    match () {
        () if requests == 0 => Likeness::No,
        () if bad * 10 <= requests => Likeness::Surely,
        () if bad <= requests => Likeness::Perhaps,
        () => Likeness::No,
    }
}

/// Returns the format of a trace with this start.
///
/// # Errors
/// None fits, or the file is an archive of files.
pub(super) fn detect(head: &Head<'_>) -> anyhow::Result<&'static FormatInfo> {
    let name = &head.name;
    if head.bytes.is_empty() {
        bail!("{name} is empty");
    }
    if let Some(what) = package(head.bytes) {
        bail!("{name} is a {what}: unpack it and name the trace in it");
    }
    let best = FORMATS
        .iter()
        .enumerate()
        .map(|(n, format)| {
            let named = format.hints.iter().any(|hint| head.name_has(hint));
            (((format.detect)(head), named, std::cmp::Reverse(n)), format)
        })
        .max_by_key(|(rank, _)| *rank);
    match best {
        Some(((likeness, ..), format)) if likeness > Likeness::No => Ok(format),
        _ => bail!("cannot tell the format of {name}: name it, one of {}", names()),
    }
}

fn package(bytes: &[u8]) -> Option<&'static str> {
    match bytes {
        [b'P', b'K', 3, 4, ..] => Some("zip archive"),
        [b'P', b'A', b'R', b'1', ..] => Some("Parquet file"),
        _ if bytes.get(257..262) == Some(b"ustar") => Some("tar archive"),
        _ => None,
    }
}

#[cfg(test)]
pub(super) use tests::binary_samples;

#[cfg(test)]
mod tests;
