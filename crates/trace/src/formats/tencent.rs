//! Parses traces of Tencent's cloud block storage: `Timestamp,Offset,Size,IOType,VolumeID` without
//! a header line.
//!
//! The timestamp is Unix time in whole seconds. Offset and size are in sectors of 512 bytes. The
//! type is 0 for a read and 1 for a write. Source: the collection's README (SNIA IOTTA 27917);
//! Zhang et al., OSCA, ATC 2020.

use super::super::Op;
use super::super::disks::Disks;
use super::super::fields::{More, Reason, bytes, choice, columns, number, time_ns};
use super::{Entry, FormatInfo, Lines, ParseLine, Raw, lines_like};

pub(super) const FORMAT: FormatInfo = FormatInfo {
    name: "tencent",
    summary: "Tencent CBS: seconds, sector, sectors, 0 read|1 write, volume",
    source: "SNIA IOTTA, Tencent CBS README; Zhang et al., ATC 2020",
    hints: &["tencent", "cloud_storage"],
    detect: |head| lines_like(head, Tencent),
    parser: |_, _| Ok(Box::new(Lines(Tencent))),
};

struct Tencent;

impl ParseLine for Tencent {
    fn line(&mut self, line: &str, disks: &mut Disks) -> Result<Entry, Reason> {
        let [time, sector, sectors, op, volume] = columns(line, ',', More::Refused)?;
        if time.eq_ignore_ascii_case("timestamp") {
            return Ok(Entry::Text);
        }
        Ok(Entry::Request(Raw {
            at_ns: time_ns(time, 1_000_000_000)?,
            offset: bytes(sector, 512, "the offset")?,
            len: bytes(sectors, 512, "the size")?,
            op: choice(op, "the type", &[("0", Op::Read), ("1", Op::Write)])?,
            disk: disks.numbered(number(volume, "the volume")?)?,
        }))
    }
}
