//! Parses the SPC format (Storage Performance Council) of the UMass traces:
//! `ASU,LBA,Size,Opcode,Timestamp`, with optional further columns.
//!
//! The ASU (application specific unit) is the disk. The size is in bytes, the opcode is R or W in
//! either case, and the timestamp is in seconds since the start. LBAs are in blocks of 512 bytes by
//! default. The description of a trace may give another size. Source: SPC Trace File Format
//! Specification, revision 1.0.1 (2002).

use super::super::disks::Disks;
use super::super::fields::{More, Reason, bytes, columns, number, operation, time_ns};
use super::{Entry, FormatInfo, Lines, ParseLine, Raw, lines_like};

pub(super) const FORMAT: FormatInfo = FormatInfo {
    name: "spc",
    summary: "SPC: unit, block, bytes, R|W, seconds (UMass); blocks of 512 bytes unless told otherwise",
    source: "SPC Trace File Format Specification 1.0.1",
    hints: &[".spc"],
    detect: |head| lines_like(head, Spc { block_bytes: 1 }),
    parser: |_, settings| Ok(Box::new(Lines(Spc { block_bytes: settings.page_bytes }))),
};

struct Spc {
    block_bytes: u64,
}

impl ParseLine for Spc {
    fn line(&mut self, line: &str, disks: &mut Disks) -> Result<Entry, Reason> {
        let [unit, block, size, op, time] = columns(line, ',', More::Allowed)?;
        Ok(Entry::Request(Raw {
            at_ns: time_ns(time, 1_000_000_000)?,
            offset: bytes(block, self.block_bytes, "the offset")?,
            len: number(size, "the size")?,
            op: operation(op)?,
            disk: disks.dense(number(unit, "the unit")?)?,
        }))
    }
}
