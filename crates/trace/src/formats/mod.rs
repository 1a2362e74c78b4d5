//! Trace formats. Each format is one file and is registered in [`FORMATS`].
//!
//! A format has a detector for the first bytes and a parser. The parser turns the next line or
//! record into a request, or into a reason why the entry is invalid. The reader does the checks
//! that all formats share: ranges, times, and unwanted disks.

mod alibaba;
mod arc;
mod binary;
mod blkparse;
mod blkreplay;
pub(super) mod blktrace;
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
    /// Name of the format for `--format`.
    pub name: &'static str,
    /// Description of the format in one line.
    pub summary: &'static str,
    /// Publication that defines the format.
    pub source: &'static str,
    /// Lower-case parts of file names. If the content fits several formats equally well, a file
    /// name with one of these parts selects this format.
    hints: &'static [&'static str],
    detect: fn(&Head<'_>) -> Likeness,
    parser: MakeParser,
}

/// Function that creates the parser of a trace from the trace's first bytes.
type MakeParser = fn(&Head<'_>, &Settings) -> Result<Box<dyn Parse>, Reason>;

impl FormatInfo {
    /// Returns the format with this name.
    ///
    /// # Errors
    /// Returns an error that lists all formats if no format has this name.
    pub fn named(name: &str) -> anyhow::Result<&'static FormatInfo> {
        match FORMATS.iter().find(|format| format.name == name) {
            Some(format) => Ok(format),
            None => bail!("'{name}' is not a trace format; the formats are {}", names()),
        }
    }

    pub(super) fn parser(&self, head: &Head<'_>, settings: &Settings) -> Result<Box<dyn Parse>, Reason> {
        (self.parser)(head, settings)
    }
}

/// All trace formats. If the content fits several formats equally well, the file name decides, and
/// then the order of this list.
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

/// Values that some formats leave undefined, so the user sets them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    /// Size of a page in bytes, if the format does not define the size.
    pub(super) page_bytes: u64,
}

/// A request from a parser, before the common checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Raw {
    /// Time on the trace's own clock, nanoseconds.
    pub(super) at_ns: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) op: Op,
    pub(super) disk: u16,
}

/// Next entry of a trace.
pub(super) enum Step {
    Request(Raw),
    /// An event that is not a request.
    Event,
    /// A header, a comment or an empty line.
    Text,
    /// An invalid entry.
    Bad(Reason),
    /// The end of the trace.
    End,
}

/// Reads the next record of a format whose records all have the length of `record`. Returns the step
/// to report if there is no complete record.
fn read_record(input: &mut Input, record: &mut [u8]) -> io::Result<Option<Step>> {
    let got = input.bytes(record)?;
    if got == 0 {
        return Ok(Some(Step::End));
    }
    input.next_record();
    let cut_off = || format!("the trace was cut off after {got} of {} bytes", record.len());
    Ok((got < record.len()).then(|| Step::Bad(cut_off().into())))
}

/// A parser of a trace format.
pub(super) trait Parse: Send {
    /// Returns the next entry. Returns an error if the input cannot be read.
    fn next(&mut self, input: &mut Input, disks: &mut Disks) -> io::Result<Step>;
}

/// Kind of a line in a text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    Request(Raw),
    Event,
    Text,
}

/// A line parser of a text format. The lines are never empty.
trait ParseLine: Send {
    fn line(&mut self, line: &str, disks: &mut Disks) -> Result<Entry, Reason>;
}

/// Parser of a text format, line by line.
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

/// Start of a trace, from which the format is detected.
pub(super) struct Head<'a> {
    pub(super) bytes: &'a [u8],
    name: String,
}

/// Maximum number of lines that the detection examines.
const HEAD_LINES: usize = 200;

impl<'a> Head<'a> {
    pub(super) fn new(bytes: &'a [u8], name: &str) -> Head<'a> {
        Head { bytes, name: name.to_ascii_lowercase() }
    }

    /// Returns the first non-empty lines. The last line may be truncated and is left out, unless it
    /// is the only line.
    fn lines(&self) -> impl Iterator<Item = &'a str> {
        let text = match std::str::from_utf8(self.bytes) {
            Ok(text) => text,
            Err(error) => std::str::from_utf8(&self.bytes[..error.valid_up_to()]).expect("valid up to there"),
        };
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let end = text.rfind(['\n', '\r']).unwrap_or(text.len());
        text[..end].split(['\n', '\r']).filter(|line| !line.trim().is_empty()).take(HEAD_LINES)
    }

    /// Returns true if the file is one line of text with names of columns, without a digit.
    pub(super) fn is_only_a_heading(&self) -> bool {
        let bytes = self.bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(self.bytes);
        let is_name = |byte: &u8| byte.is_ascii_graphic() && !byte.is_ascii_digit();
        let is_text = bytes.iter().all(|byte| is_name(byte) || byte.is_ascii_whitespace());
        let mut lines = self.lines();
        let heading = lines.next();
        is_text && heading.is_some_and(|line| line.contains([',', ';', '\t'])) && lines.next().is_none()
    }

    /// Returns true if nearly all lines have at least three semicolons and no comma.
    fn has_semicolons(&self) -> bool {
        let is_so = |line: &&str| line.matches(';').count() >= 3 && !line.contains(',');
        let (all, separated) = (self.lines().count(), self.lines().filter(is_so).count());
        all > 0 && separated * 10 >= all * 9
    }

    fn name_has(&self, part: &str) -> bool {
        self.name.contains(part)
    }
}

/// How well the start of a trace fits a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Likeness {
    No,
    Perhaps,
    Surely,
}

/// Returns how well the first lines fit a text format. The fit is certain if nearly all lines
/// parse.
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

/// Detects the format of a trace from its first bytes.
///
/// # Errors
/// Returns an error if no format fits, or if the file is an archive.
pub(super) fn detect(head: &Head<'_>) -> anyhow::Result<&'static FormatInfo> {
    let name = &head.name;
    if head.bytes.is_empty() {
        bail!("{name} is empty");
    }
    if let Some(what) = package(head.bytes) {
        bail!("{name} is a {what}: unpack it, and pass the trace in it");
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
        _ if head.has_semicolons() => bail!(
            "cannot detect the format of {name}, whose columns are separated by semicolons: replace them with \
             commas (tr ';' ',' < FILE > NEW), or pass one of {}",
            names()
        ),
        _ => bail!("cannot detect the format of {name}: pass one of {}", names()),
    }
}

/// Checks that the columns of a trace are not separated by semicolons if the format that the user
/// gave has other separators. In that case all lines would be invalid.
///
/// # Errors
/// Returns an error if nearly all first lines have semicolons, and the format reads none of them.
pub(super) fn check_separators(name: &str, head: &Head<'_>, format: &FormatInfo) -> anyhow::Result<()> {
    let has_semicolons = format.name == blkreplay::FORMAT.name;
    if has_semicolons || !head.has_semicolons() || (format.detect)(head) != Likeness::No {
        return Ok(());
    }
    bail!(
        "{name} is not a trace in the format {}: its columns are separated by semicolons; replace them with the \
         separator of the format, for example commas (tr ';' ',' < FILE > NEW)",
        format.name
    )
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
