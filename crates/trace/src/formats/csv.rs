//! Parses hob's CSV format: `ts_us,op,offset,size` and optionally `disk`; see
//! [`crate::csv`]. The header line may be missing.

use super::super::csv::{HEADER, HEADER_DISKS};
use super::super::disks::Disks;
use super::super::fields::{More, Reason, columns, number, operation, time_ns};
use super::{Entry, FormatInfo, Head, Likeness, Lines, ParseLine, Raw, lines_like};

pub(super) const FORMAT: FormatInfo = FormatInfo {
    name: "csv",
    summary: "hob's CSV: ts_us,op,offset,size and perhaps disk; bytes",
    source: "docs/TRACE.md",
    hints: &[".csv"],
    detect: |head| if has_header(head) { Likeness::Surely } else { lines_like(head, Csv::default()) },
    parser: |_, _| Ok(Box::new(Lines(Csv::default()))),
};

/// Returns true if the trace has a header line. The header is sufficient to detect the format.
fn has_header(head: &Head<'_>) -> bool {
    head.lines().next().is_some_and(|line| [HEADER, HEADER_DISKS].contains(&line.trim()))
}

#[derive(Default)]
struct Csv {
    with_disks: bool,
}

impl ParseLine for Csv {
    fn line(&mut self, line: &str, disks: &mut Disks) -> Result<Entry, Reason> {
        if line.starts_with("ts_us") {
            let line = line.trim();
            if line != HEADER && line != HEADER_DISKS {
                return Err(format!("the first line is neither {HEADER} nor {HEADER_DISKS}").into());
            }
            self.with_disks = line == HEADER_DISKS;
            return Ok(Entry::Text);
        }
        let ([time, op, offset, size], disk) = if self.with_disks {
            let [time, op, offset, size, disk] = columns(line, ',', More::Refused)?;
            let disk = number(disk, "the disk")?;
            ([time, op, offset, size], disk)
        } else {
            (columns(line, ',', More::Refused)?, 0)
        };
        let raw = Raw {
            at_ns: time_ns(time, 1_000)?,
            op: operation(op)?,
            offset: number(offset, "the offset")?,
            len: number(size, "the size")?,
            disk: if self.with_disks { disks.dense(disk)? } else { 0 },
        };
        Ok(Entry::Request(raw))
    }
}
