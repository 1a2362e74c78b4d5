//! Parses Alibaba's block traces of 2020: `device_id,opcode,offset,length,timestamp` without a
//! header line.
//!
//! The opcode is R or W, offset and length are in bytes, and the timestamp is Unix time in µs.
//! Source: the README of github.com/alibaba/block-traces; Li et al., IISWC 2020.

use super::super::disks::Disks;
use super::super::fields::{More, Reason, columns, number, operation, time_ns};
use super::{Entry, FormatInfo, Lines, ParseLine, Raw, lines_like};

pub(super) const FORMAT: FormatInfo = FormatInfo {
    name: "alibaba",
    summary: "Alibaba block traces: device, R|W, offset, length, µs",
    source: "github.com/alibaba/block-traces",
    hints: &["alibaba", "io_traces"],
    detect: |head| lines_like(head, Alibaba),
    parser: |_, _| Ok(Box::new(Lines(Alibaba))),
};

struct Alibaba;

impl ParseLine for Alibaba {
    fn line(&mut self, line: &str, disks: &mut Disks) -> Result<Entry, Reason> {
        let [device, op, offset, len, time] = columns(line, ',', More::Refused)?;
        if device == "device_id" {
            return Ok(Entry::Text);
        }
        Ok(Entry::Request(Raw {
            at_ns: time_ns(time, 1_000)?,
            offset: number(offset, "the offset")?,
            len: number(len, "the length")?,
            op: operation(op)?,
            disk: disks.numbered(number(device, "the device")?)?,
        }))
    }
}
