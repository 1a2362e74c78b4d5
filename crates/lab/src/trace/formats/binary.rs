//! Parses hob's binary format with tolerance: invalid records are skipped, and a truncated end is
//! reported.

use std::io;

use super::super::binary::{HEADER_BYTES, Header, MAGIC, RECORD_BYTES, decode};
use super::super::disks::Disks;
use super::super::fields::Reason;
use super::super::input::Input;
use super::{FormatInfo, Head, Likeness, Parse, Raw, Settings, Step};

pub(super) const FORMAT: FormatInfo = FormatInfo {
    name: "hob",
    summary: "hob's own binary format",
    source: "docs/TRACE.md",
    hints: &[".hobtrace"],
    detect: |head| if head.bytes.starts_with(&MAGIC) { Likeness::Surely } else { Likeness::No },
    parser,
};

const RECORDS_A_BLOCK: usize = 4096;

struct Hob {
    header: Header,
    begun: bool,
    block: Vec<u8>,
    next: usize,
    end: usize,
    records: u64,
    ended: bool,
}

fn parser(head: &Head<'_>, _: &Settings) -> Result<Box<dyn Parse>, Reason> {
    let Some(bytes) = head.bytes.first_chunk::<HEADER_BYTES>() else {
        return Err(
            format!("it ends within its header, after {} bytes of {HEADER_BYTES}", head.bytes.len()).into()
        );
    };
    let header = Header::decode(bytes).map_err(|error| Reason::from(error.to_string()))?;
    let block = vec![0; RECORDS_A_BLOCK * RECORD_BYTES];
    Ok(Box::new(Hob { header, begun: false, block, next: 0, end: 0, records: 0, ended: false }))
}

impl Parse for Hob {
    fn next(&mut self, input: &mut Input, disks: &mut Disks) -> io::Result<Step> {
        if !self.begun {
            self.begun = true;
            input.skip(HEADER_BYTES as u64)?;
        }
        if self.next + RECORD_BYTES > self.end {
            if self.ended {
                return Ok(self.finish());
            }
            let got = input.bytes(&mut self.block)?;
            (self.next, self.end) = (0, got);
            if got < self.block.len() {
                self.ended = true;
            }
            if got < RECORD_BYTES {
                return Ok(self.finish());
            }
        }
        let bytes = self.block[self.next..][..RECORD_BYTES].try_into().expect("a record's bytes");
        self.next += RECORD_BYTES;
        self.records += 1;
        input.next_record();
        Ok(match decode(bytes) {
            Ok(record) => {
                disks.own(record.disk);
                let (at_ns, offset, len) = (record.at_ns, record.offset, u64::from(record.len));
                Step::Request(Raw { at_ns, offset, len, op: record.op, disk: record.disk })
            }
            Err(reason) => Step::Bad(reason.into()),
        })
    }
}

impl Hob {
    /// Returns the messages at the end of the trace, one per call.
    fn finish(&mut self) -> Step {
        let torn = self.end - self.next;
        (self.next, self.end) = (0, 0);
        if torn > 0 {
            let said = format!("the trace was cut off within the next record, after {torn} bytes of it");
            return Step::Bad(said.into());
        }
        let said = std::mem::take(&mut self.header.records);
        if said > self.records {
            Step::Bad(format!("the trace ends after {} records; its header says {said}", self.records).into())
        } else {
            Step::End
        }
    }
}
