//! Parses the `.lis` traces of the ARC paper: `starting_block number_of_blocks ignored
//! request_number`.
//!
//! Blocks are pages of 512 bytes by default. Some traces need another page size. The files contain
//! only reads without times. The parser gives the n-th read the time n ms. Source: the traces'
//! README; Megiddo and Modha, FAST 2003.

use super::super::Op;
use super::super::disks::Disks;
use super::super::fields::{More, Reason, bytes, number, words};
use super::{Entry, FormatInfo, Lines, ParseLine, Raw, lines_like};

pub(super) const FORMAT: FormatInfo = FormatInfo {
    name: "arc",
    summary: "ARC .lis: block, blocks, –, number; no time (1 ms each); blocks of 512 bytes unless told otherwise",
    source: "README of the ARC traces; Megiddo and Modha, FAST 2003",
    hints: &[".lis"],
    detect: |head| lines_like(head, Arc { block_bytes: 1, requests: 0 }),
    parser: |_, settings| Ok(Box::new(Lines(Arc { block_bytes: settings.page_bytes, requests: 0 }))),
};

struct Arc {
    block_bytes: u64,
    requests: u64,
}

impl ParseLine for Arc {
    fn line(&mut self, line: &str, _: &mut Disks) -> Result<Entry, Reason> {
        let [block, blocks, _ignored, request] = words(line, More::Refused)?;
        number(request, "the request's number")?;
        let offset = bytes(block, self.block_bytes, "the block")?;
        let len = bytes(blocks, self.block_bytes, "the number of blocks")?;
        let at_ns = self.requests * 1_000_000;
        self.requests += 1;
        Ok(Entry::Request(Raw { at_ns, offset, len, op: Op::Read, disk: 0 }))
    }
}
