//! Parses libCacheSim's oracleGeneral format: little-endian records of 24 bytes without a header.
//!
//! A record has the time (u32, seconds), the object (u64), the size (u32, bytes) and the number of
//! the object's next request (i64, or −1). The parser does not use the number of the next request.
//! The format has no writes. In a block trace, the object is the number of a 512-byte block, as in
//! the CloudPhysics sample of libCacheSim. An option sets another block size. Source: libCacheSim,
//! `oracleGeneralBin.h`.

use std::io;

use super::super::Op;
use super::super::disks::Disks;
use super::super::fields::scaled;
use super::super::input::Input;
use super::{FormatInfo, Head, Likeness, Parse, Raw, Step, read_record};

pub(super) const FORMAT: FormatInfo = FormatInfo {
    name: "oracle-general",
    summary: "libCacheSim oracleGeneral: seconds, object, size; objects are blocks of 512 bytes unless told otherwise",
    source: "libCacheSim, oracleGeneralBin.h",
    hints: &["oraclegeneral"],
    detect,
    parser: |_, settings| Ok(Box::new(OracleGeneral { block_bytes: settings.page_bytes })),
};

const RECORD_BYTES: usize = 24;

struct OracleGeneral {
    block_bytes: u64,
}

/// Detects the format. The format has no magic bytes, so times must not decrease, sizes must be
/// plausible, and next requests must be later in the trace.
fn detect(head: &Head<'_>) -> Likeness {
    let (records, _) = head.bytes.as_chunks::<RECORD_BYTES>();
    let mut last = 0;
    let fits = |(n, record): (usize, &[u8; RECORD_BYTES])| {
        let time = u32::from_le_bytes(record[0..4].try_into().expect("four bytes"));
        let size = u32::from_le_bytes(record[12..16].try_into().expect("four bytes"));
        let next = i64::from_le_bytes(record[16..24].try_into().expect("eight bytes"));
        let fits = time >= last && (1..=1 << 28).contains(&size) && (next == -1 || next > n as i64);
        last = time;
        fits
    };
    if records.len() < 2 || !records.iter().enumerate().take(1000).all(fits) {
        Likeness::No
    } else if head.name_has("oraclegeneral") {
        Likeness::Surely
    } else {
        Likeness::Perhaps
    }
}

impl Parse for OracleGeneral {
    fn next(&mut self, input: &mut Input, _: &mut Disks) -> io::Result<Step> {
        let mut record = [0; RECORD_BYTES];
        if let Some(step) = read_record(input, &mut record)? {
            return Ok(step);
        }
        let time = u32::from_le_bytes(record[0..4].try_into().expect("four bytes"));
        let object = u64::from_le_bytes(record[4..12].try_into().expect("eight bytes"));
        let size = u32::from_le_bytes(record[12..16].try_into().expect("four bytes"));
        Ok(match scaled(object, self.block_bytes, "the object's number") {
            Ok(offset) => Step::Request(Raw {
                at_ns: u64::from(time) * 1_000_000_000,
                offset,
                len: u64::from(size),
                op: Op::Read,
                disk: 0,
            }),
            Err(reason) => Step::Bad(reason),
        })
    }
}
