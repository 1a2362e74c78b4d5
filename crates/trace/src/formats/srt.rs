//! Parses HP Labs' SRT traces (1992 and later): big-endian records after a text header.
//!
//! The header begins with `$$TR_IOREC`, describes the disks and ends with a form feed. A record has
//! 32-bit words: size in bytes, version and type, seconds, µs, start, stop, bytes, block, device,
//! driver, cylinder, flags, and information. From version 4 on, a record also has the queue length.
//! Blocks are sectors of the disk. The header has the sector size (`sectorsize`, 512 by default).
//! Bits 8 to 15 of the device are the disk number, and bit 0 of the flags is set for a read.
//! Records of types other than 1 are ignored. Source: Ruemmler and Wilkes, UNIX disk access
//! patterns, USENIX Winter 1993; DiskSim, `disksim_iotrace.c` ("hpl"). The sections in the header
//! show that block numbers are absolute and count sectors.

use std::collections::BTreeMap;
use std::io;

use super::super::Op;
use super::super::disks::Disks;
use super::super::fields::{Reason, scaled};
use super::super::input::Input;
use super::{FormatInfo, Head, Likeness, Parse, Raw, Settings, Step};

pub(super) const FORMAT: FormatInfo = FormatInfo {
    name: "srt",
    summary: "HP SRT: text header, big-endian records",
    source: "Ruemmler and Wilkes, USENIX Winter 1993; DiskSim, disksim_iotrace.c",
    hints: &[".srt"],
    detect: |head| if head.bytes.starts_with(MAGIC) { Likeness::Surely } else { Likeness::No },
    parser,
};

const MAGIC: &[u8] = b"$$TR_IOREC";
const FORM_FEED: u8 = 0x0c;
const RECORD_BYTES_MIN: usize = 52;
const RECORD_BYTES_MAX: usize = 1024;
/// Record type of a plain request.
const TYPE_IO: u32 = 1;

struct Srt {
    /// Size of the header with its form feed, bytes; 0 when the parser has passed the header.
    header_bytes: u64,
    sector_bytes: BTreeMap<u64, u64>,
    lost: bool,
}

fn parser(head: &Head<'_>, _: &Settings) -> Result<Box<dyn Parse>, Reason> {
    if !head.bytes.starts_with(MAGIC) {
        return Err("it does not begin with $$TR_IOREC".into());
    }
    let end = head.bytes.iter().position(|byte| *byte == FORM_FEED);
    let end = end
        .ok_or_else(|| Reason::from(format!("its header does not end within {} bytes", head.bytes.len())))?;
    let sector_bytes = sector_bytes(&String::from_utf8_lossy(&head.bytes[..end]));
    Ok(Box::new(Srt { header_bytes: end as u64 + 1, sector_bytes, lost: false }))
}

/// Returns the sector size of each disk. The header describes a disk as `0 -> { disktype = …,
/// sectorsize = 256, … }`. The sections of a disk also begin with a number and an arrow, but have
/// no `disktype`.
fn sector_bytes(header: &str) -> BTreeMap<u64, u64> {
    let mut sizes = BTreeMap::new();
    let (mut number, mut disk) = (None, None);
    for line in header.lines() {
        if let Some((left, _)) = line.split_once("->") {
            number = left.split_whitespace().last().and_then(|word| word.parse().ok());
        }
        let Some((name, value)) = line.split_once('=') else { continue };
        match name.trim() {
            "disktype" => disk = number,
            "sectorsize" => {
                let size = value.trim().trim_end_matches([',', ';']).trim().parse::<u64>().ok();
                if let (Some(disk), Some(size @ 1..=65_536)) = (disk, size) {
                    sizes.insert(disk, size);
                }
            }
            _ => {}
        }
    }
    sizes
}

impl Parse for Srt {
    fn next(&mut self, input: &mut Input, disks: &mut Disks) -> io::Result<Step> {
        input.skip(std::mem::take(&mut self.header_bytes))?;
        let mut record = [0; RECORD_BYTES_MAX];
        let got = if self.lost { 0 } else { input.bytes(&mut record[..4])? };
        if got == 0 {
            return Ok(Step::End);
        }
        input.next_record();
        let size = u32::from_be_bytes(record[..4].try_into().expect("four bytes")) as usize;
        if got == 4 && !(RECORD_BYTES_MIN..=RECORD_BYTES_MAX).contains(&size) {
            self.lost = true;
            return Ok(Step::Bad(
                format!("its size of {size} bytes is invalid; the rest of the trace is not read").into(),
            ));
        }
        if got < 4 || 4 + input.bytes(&mut record[4..size])? < size {
            return Ok(Step::Bad("the trace was cut off within the record".into()));
        }
        Ok(match self.request(&record[..size], disks) {
            Ok(Some(raw)) => Step::Request(raw),
            Ok(None) => Step::Event,
            Err(reason) => Step::Bad(reason),
        })
    }
}

impl Srt {
    fn request(&self, record: &[u8], disks: &mut Disks) -> Result<Option<Raw>, Reason> {
        let word = |n: usize| u32::from_be_bytes(record[4 * n..4 * n + 4].try_into().expect("four bytes"));
        if word(1) & 0xffff != TYPE_IO {
            return Ok(None);
        }
        let disk = u64::from(word(8) >> 8 & 0xff);
        let sector_bytes = *self.sector_bytes.get(&disk).unwrap_or(&512);
        Ok(Some(Raw {
            at_ns: u64::from(word(2)) * 1_000_000_000 + u64::from(word(3)) * 1_000,
            offset: scaled(u64::from(word(7)), sector_bytes, "the block")?,
            len: u64::from(word(6)),
            op: if word(11) & 1 == 1 { Op::Read } else { Op::Write },
            disk: disks.dense(disk)?,
        }))
    }
}
