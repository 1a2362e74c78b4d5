//! Parses fio's I/O logs (`write_iolog`), versions 2 and 3. The first line has the version.
//!
//! Version 2 has lines `filename action [offset length]`. The only times in version 2 are those of
//! `wait`, whose offset is the number of µs since the previous wait. Version 3 has lines `timestamp
//! filename action [offset length]`, with the timestamp in µs since the start. The parser uses the
//! actions read, write, trim, sync, datasync and sync_file_range, and ignores add, open and close.
//! Offsets and lengths are in bytes, and each file is a disk. Source: fio's HOWTO, "Trace file
//! format v2" and "v3". The unit of version 3's times is from `log_io_u` in `iolog.c`.

use super::super::Op;
use super::super::disks::Disks;
use super::super::fields::{Reason, number, time_ns};
use super::{Entry, FormatInfo, Head, Likeness, Lines, ParseLine, Raw};

const SOURCE: &str = "fio HOWTO, trace file format; iolog.c";

pub(super) const V2: FormatInfo = FormatInfo {
    name: "fio2",
    summary: "fio iolog version 2: file, action, offset, length; waits in µs",
    source: SOURCE,
    hints: &[".iolog"],
    detect: |head| likeness(head, Version::Two),
    parser: |_, _| Ok(Box::new(Lines(Fio::new(Version::Two)))),
};

pub(super) const V3: FormatInfo = FormatInfo {
    name: "fio3",
    summary: "fio iolog version 3: µs, file, action, offset, length",
    source: SOURCE,
    hints: &[".iolog"],
    detect: |head| likeness(head, Version::Three),
    parser: |_, _| Ok(Box::new(Lines(Fio::new(Version::Three)))),
};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    Two,
    Three,
}

impl Version {
    fn title(self) -> &'static str {
        match self {
            Version::Two => "fio version 2 iolog",
            Version::Three => "fio version 3 iolog",
        }
    }
}

fn likeness(head: &Head<'_>, version: Version) -> Likeness {
    match head.lines().next().is_some_and(|line| line.trim() == version.title()) {
        true => Likeness::Surely,
        false => Likeness::No,
    }
}

struct Fio {
    version: Version,
    /// Sum of the waits in version 2, nanoseconds.
    waited_ns: u64,
}

impl Fio {
    fn new(version: Version) -> Fio {
        Fio { version, waited_ns: 0 }
    }
}

impl ParseLine for Fio {
    fn line(&mut self, line: &str, disks: &mut Disks) -> Result<Entry, Reason> {
        if line.trim() == self.version.title() {
            return Ok(Entry::Text);
        }
        let mut words = line.split_whitespace();
        let at_ns = match self.version {
            Version::Two => self.waited_ns,
            Version::Three => time_ns(words.next().unwrap_or_default(), 1_000)?,
        };
        let file = words.next().unwrap_or_default();
        let action = words.next().ok_or("the action is missing")?;
        let op = match action {
            "add" | "open" | "close" => return Ok(Entry::Event),
            "wait" if self.version == Version::Two => {
                let wait = time_ns(words.next().unwrap_or_default(), 1_000)?;
                self.waited_ns = at_ns.checked_add(wait).ok_or("the waits are too long")?;
                return Ok(Entry::Event);
            }
            "read" => Op::Read,
            "write" => Op::Write,
            "trim" => Op::Discard,
            "sync" | "datasync" | "sync_file_range" => Op::Flush,
            _ => return Err("the action is unknown".into()),
        };
        let (offset, len) = match op {
            // Text after a sync has no meaning.
            Op::Flush => (0, 0),
            _ => {
                let offset = number(words.next().unwrap_or_default(), "the offset")?;
                (offset, number(words.next().unwrap_or_default(), "the length")?)
            }
        };
        Ok(Entry::Request(Raw { at_ns, offset, len, op, disk: disks.named(file)? }))
    }
}
