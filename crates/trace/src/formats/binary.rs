//! Parses hob's binary format. An invalid record and a truncated end are reported as invalid
//! entries, and the parser continues after an invalid record. A wrong checksum ends the trace with
//! an error.

use std::io;

use super::super::binary::{HEADER_BYTES, Header, MAGIC, RECORD_BYTES, decode};
use super::super::disks::Disks;
use super::super::fields::Reason;
use super::super::input::Input;
use super::super::seal::Groups;
use super::{FormatInfo, Head, Likeness, Parse, Raw, Settings, Step};

pub(super) const FORMAT: FormatInfo = FormatInfo {
    name: "hob",
    summary: "hob's own binary format",
    source: "docs/TRACE.md",
    hints: &[".hobtrace"],
    detect: |head| if head.bytes.starts_with(&MAGIC) { Likeness::Surely } else { Likeness::No },
    parser,
};

struct Hob {
    header: Header,
    begun: bool,
    groups: Groups,
    /// Records of the current group, last first.
    group: Vec<[u8; RECORD_BYTES]>,
    has_told_torn: bool,
    has_told_end: bool,
}

fn parser(head: &Head<'_>, _: &Settings) -> Result<Box<dyn Parse>, Reason> {
    let Some(bytes) = head.bytes.first_chunk::<HEADER_BYTES>() else {
        return Err(
            format!("it ends within its header, after {} bytes of {HEADER_BYTES}", head.bytes.len()).into()
        );
    };
    let header = Header::decode(bytes).map_err(|error| Reason::from(error.to_string()))?;
    let (groups, group) = (Groups::new(header.version), Vec::new());
    Ok(Box::new(Hob { header, begun: false, groups, group, has_told_torn: false, has_told_end: false }))
}

impl Parse for Hob {
    fn next(&mut self, input: &mut Input, disks: &mut Disks) -> io::Result<Step> {
        if !self.begun {
            self.begun = true;
            input.skip(HEADER_BYTES as u64)?;
        }
        while self.group.is_empty() {
            if self.groups.ended() {
                return Ok(self.finish());
            }
            self.group.extend(self.groups.next(|bytes| input.bytes(bytes))?.iter().rev());
        }
        let bytes = self.group.pop().expect("the group is not empty");
        input.next_record();
        Ok(match decode(&bytes) {
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
        let torn = self.groups.torn_bytes();
        if torn > 0 && !std::mem::replace(&mut self.has_told_torn, true) {
            let said = format!("the trace was cut off within the next record, after {torn} bytes of it");
            return Step::Bad(said.into());
        }
        if std::mem::replace(&mut self.has_told_end, true) {
            return Step::End;
        }
        self.groups.missing(self.header.records).map_or(Step::End, |said| Step::Bad(said.into()))
    }
}
