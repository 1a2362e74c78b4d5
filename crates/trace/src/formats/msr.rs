//! Parses MSR Cambridge traces: `Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime`
//! without a header line.
//!
//! Times are Windows file times in units of 100 ns. `Type` is Read or Write, and offset and size
//! are in bytes. The name of a disk is host_number, as in the file names of the collection. Source:
//! the collection's README (SNIA IOTTA, trace 388) and Narayanan et al., Write Off-Loading, FAST
//! 2008.

use std::fmt::Write;

use super::super::disks::Disks;
use super::super::fields::{More, Reason, columns, number, operation, time_ns};
use super::{Entry, FormatInfo, Lines, ParseLine, Raw, lines_like};

pub(super) const FORMAT: FormatInfo = FormatInfo {
    name: "msr",
    summary: "MSR Cambridge CSV: file time, host, disk, Read|Write, offset, size, response time",
    source: "SNIA IOTTA 388, README; Narayanan et al., FAST 2008",
    hints: &["msr"],
    detect: |head| lines_like(head, Msr::default()),
    parser: |_, _| Ok(Box::new(Lines(Msr::default()))),
};

#[derive(Default)]
struct Msr {
    disk: String,
}

impl ParseLine for Msr {
    fn line(&mut self, line: &str, disks: &mut Disks) -> Result<Entry, Reason> {
        let [time, host, disk, op, offset, size, _response] = columns(line, ',', More::Allowed)?;
        if time.eq_ignore_ascii_case("timestamp") {
            return Ok(Entry::Text);
        }
        let at_ns = time_ns(time, 100)?;
        let op = operation(op)?;
        let offset = number(offset, "the offset")?;
        let len = number(size, "the size")?;
        let disk = number(disk, "the disk")?;
        self.disk.clear();
        write!(self.disk, "{host}_{disk}").expect("a string takes everything");
        Ok(Entry::Request(Raw { at_ns, offset, len, op, disk: disks.named(&self.disk)? }))
    }
}
