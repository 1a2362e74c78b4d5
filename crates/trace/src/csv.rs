//! hob's text trace format, for spreadsheets and other programs. The format has the header
//! `ts_us,op,offset,size` and one line per request. [`super::open`] reads this format.
//!
//! `ts_us` is the time in microseconds since the start, rounded down. `op` is R, W, D (discard) or
//! F (flush). Offset and size are in bytes. A trace of several disks has a fifth column, `disk`.

use std::io::{self, BufWriter, Write};

use super::{Op, Record};

/// Header line of a trace of one disk.
pub const HEADER: &str = "ts_us,op,offset,size";
/// Header line of a trace of several disks.
pub const HEADER_DISKS: &str = "ts_us,op,offset,size,disk";

/// Returns the letter of an operation.
pub fn letter(op: Op) -> char {
    match op {
        Op::Read => 'R',
        Op::Write => 'W',
        Op::Discard => 'D',
        Op::Flush => 'F',
    }
}

/// Writes a CSV trace.
#[derive(Debug)]
pub struct Writer<W: Write> {
    out: BufWriter<W>,
    with_disks: bool,
}

impl<W: Write> Writer<W> {
    /// Starts a trace of one disk, number 0. `out` needs no buffering.
    pub fn new(out: W) -> io::Result<Writer<W>> {
        Self::start(out, false)
    }

    /// Starts a trace of several disks. `out` needs no buffering.
    pub fn with_disks(out: W) -> io::Result<Writer<W>> {
        Self::start(out, true)
    }

    fn start(out: W, with_disks: bool) -> io::Result<Writer<W>> {
        let mut out = BufWriter::with_capacity(256 << 10, out);
        writeln!(out, "{}", if with_disks { HEADER_DISKS } else { HEADER })?;
        Ok(Writer { out, with_disks })
    }

    /// Appends a record.
    ///
    /// # Errors
    /// Returns `InvalidInput` for a disk other than 0 in a trace of one disk and for records that
    /// [`Record::check`] refuses, or an error of the file.
    pub fn push(&mut self, record: &Record) -> io::Result<()> {
        let invalid = |reason| Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        if let Err(reason) = record.check() {
            return invalid(reason);
        }
        let Record { at_ns, offset, len, op, disk } = *record;
        let (at_us, op) = (at_ns / 1_000, letter(op));
        match (self.with_disks, disk) {
            (true, _) => writeln!(self.out, "{at_us},{op},{offset},{len},{disk}"),
            (false, 0) => writeln!(self.out, "{at_us},{op},{offset},{len}"),
            (false, _) => invalid("a record of a second disk in a trace of one disk"),
        }
    }

    /// Writes the remaining lines and flushes.
    pub fn finish(self) -> io::Result<W> {
        let mut out = self.out.into_inner().map_err(io::IntoInnerError::into_error)?;
        out.flush()?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_as_documented() {
        let records = [
            Record { at_ns: 1_999, offset: 512, len: 4096, op: Op::Read, disk: 0 },
            Record { at_ns: 2_000, offset: 0, len: 0, op: Op::Flush, disk: 0 },
        ];
        let mut one = Writer::new(Vec::new()).unwrap();
        let mut many = Writer::with_disks(Vec::new()).unwrap();
        for record in &records {
            one.push(record).unwrap();
            many.push(&Record { disk: 3, ..*record }).unwrap();
        }
        assert!(one.push(&Record { disk: 1, ..records[0] }).is_err());
        assert!(one.push(&Record { len: 0, ..records[0] }).is_err());
        assert_eq!(one.finish().unwrap(), b"ts_us,op,offset,size\n1,R,512,4096\n2,F,0,0\n");
        assert_eq!(many.finish().unwrap(), b"ts_us,op,offset,size,disk\n1,R,512,4096,3\n2,F,0,0,3\n");
    }
}
