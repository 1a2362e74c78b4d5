//! Parses SYSTOR '17 traces of virtual desktops: `Timestamp,Response,IOType,LUN,Offset,Size`, with
//! this header line.
//!
//! Times are in seconds, and the timestamp is Unix time with µs. The type is R or W; lines with an
//! empty type are ignored. Offset and size are in bytes. The lines are in order of completion.
//! Source: the collection's README (SNIA IOTTA 4964); Lee et al., Understanding Storage Traffic
//! Characteristics on Enterprise Virtual Desktop Infrastructure, SYSTOR 2017.

use super::super::disks::Disks;
use super::super::fields::{More, Reason, columns, number, operation, time_ns};
use super::{Entry, FormatInfo, Lines, ParseLine, Raw, lines_like};

pub(super) const FORMAT: FormatInfo = FormatInfo {
    name: "systor17",
    summary: "SYSTOR '17 CSV: seconds, response, R|W, LUN, offset, size",
    source: "SNIA IOTTA 4964, README; Lee et al., SYSTOR 2017",
    hints: &["systor", "lun"],
    detect: |head| lines_like(head, Systor),
    parser: |_, _| Ok(Box::new(Lines(Systor))),
};

struct Systor;

impl ParseLine for Systor {
    fn line(&mut self, line: &str, disks: &mut Disks) -> Result<Entry, Reason> {
        let [time, _response, op, lun, offset, size] = columns(line, ',', More::Refused)?;
        if time == "Timestamp" {
            return Ok(Entry::Text);
        }
        let raw = |op| {
            Ok(Raw {
                at_ns: time_ns(time, 1_000_000_000)?,
                offset: number(offset, "the offset")?,
                len: number(size, "the size")?,
                op,
                disk: disks.dense(number(lun, "the LUN")?)?,
            })
        };
        if op.is_empty() { Ok(Entry::Event) } else { operation(op).and_then(raw).map(Entry::Request) }
    }
}
