//! Parses blkreplay load files: `start ; sector; length ; op ;  replay_delay ; replay_duration`.
//!
//! The start is in seconds, and sector and length are in sectors of 512 bytes. The operation is R,
//! W or D. More letters, such as RA for read-ahead, are ignored. Any text may precede the line that
//! begins with `start`. Source: github.com/schoebel/blkreplay, its manual and example loads.

use super::super::disks::Disks;
use super::super::fields::{More, Reason, bytes, columns, operation, time_ns};
use super::{Entry, FormatInfo, Head, Likeness, Lines, ParseLine, Raw, lines_like};

pub(super) const FORMAT: FormatInfo = FormatInfo {
    name: "blkreplay",
    summary: "blkreplay load: seconds; sector; sectors; R|W; …",
    source: "github.com/schoebel/blkreplay",
    hints: &[".load"],
    detect,
    parser: |_, _| Ok(Box::new(Lines(Blkreplay::default()))),
};

#[derive(Default)]
struct Blkreplay {
    begun: bool,
}

fn is_title(line: &str) -> bool {
    line.split(';').map(str::trim).take(3).eq(["start", "sector", "length"])
}

fn detect(head: &Head<'_>) -> Likeness {
    lines_like(head, Blkreplay::default())
}

impl ParseLine for Blkreplay {
    fn line(&mut self, line: &str, _: &mut Disks) -> Result<Entry, Reason> {
        if is_title(line) {
            self.begun = true;
            return Ok(Entry::Text);
        }
        let request = columns(line, ';', More::Allowed).and_then(|[start, sector, sectors, op]| {
            Ok(Raw {
                at_ns: time_ns(start, 1_000_000_000)?,
                offset: bytes(sector, 512, "the sector")?,
                len: bytes(sectors, 512, "the length")?,
                op: operation(op.get(..1).unwrap_or(op))?,
                disk: 0,
            })
        });
        match request {
            Ok(raw) => {
                self.begun = true;
                Ok(Entry::Request(raw))
            }
            Err(_) if !self.begun => Ok(Entry::Text),
            Err(reason) => Err(reason),
        }
    }
}
