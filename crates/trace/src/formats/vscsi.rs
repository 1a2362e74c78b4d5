//! Parses both record versions of vSCSI traces of VMware virtual disks, which CloudPhysics
//! collected.
//!
//! The records are little-endian, and the file has no header. Version 1 has 32 bytes: serial u32,
//! length u32, segments u32, command u16, version u16, block u64, time u64. Version 2 has 40:
//! command u16, version u16, serial u32, length u32, segments u32, block u64, time u64, response
//! time u64. The version number is in the upper byte of the version field. Lengths are in bytes,
//! blocks have 512 bytes, and times are in µs. The lower byte of the command is the SCSI operation
//! code. Commands that move no data of the disk are ignored. Source: Waldspurger et al., FAST 2015,
//! and the reader of libCacheSim (`vscsi.h`); codes: SBC-4.

use std::io;

use super::super::Op;
use super::super::disks::Disks;
use super::super::fields::{Reason, scaled};
use super::super::input::Input;
use super::{FormatInfo, Head, Likeness, Parse, Raw, Step, read_record};

const SOURCE: &str = "Waldspurger et al., FAST 2015; libCacheSim, vscsi.h";

pub(super) const V1: FormatInfo = FormatInfo {
    name: "vscsi1",
    summary: "VMware vSCSI records, version 1 (CloudPhysics)",
    source: SOURCE,
    hints: &["vscsi"],
    detect: |head| likeness(head, Version::One),
    parser: |_, _| Ok(Box::new(Vscsi(Version::One))),
};

pub(super) const V2: FormatInfo = FormatInfo {
    name: "vscsi2",
    summary: "VMware vSCSI records, version 2 (CloudPhysics)",
    source: SOURCE,
    hints: &["vscsi"],
    detect: |head| likeness(head, Version::Two),
    parser: |_, _| Ok(Box::new(Vscsi(Version::Two))),
};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Version {
    fn record_bytes(self) -> usize {
        match self {
            Version::One => 32,
            Version::Two => 40,
        }
    }
}

struct Fields {
    command: u16,
    version: u16,
    len: u32,
    block: u64,
    time_us: u64,
}

fn fields(record: &[u8], version: Version) -> Fields {
    let u16_at = |at: usize| u16::from_le_bytes([record[at], record[at + 1]]);
    let u32_at = |at: usize| u32::from_le_bytes(record[at..at + 4].try_into().expect("four bytes"));
    let u64_at = |at: usize| u64::from_le_bytes(record[at..at + 8].try_into().expect("eight bytes"));
    match version {
        Version::One => Fields {
            command: u16_at(12),
            version: u16_at(14),
            len: u32_at(4),
            block: u64_at(16),
            time_us: u64_at(24),
        },
        Version::Two => Fields {
            command: u16_at(0),
            version: u16_at(2),
            len: u32_at(8),
            block: u64_at(16),
            time_us: u64_at(24),
        },
    }
}

fn has_version(fields: &Fields, version: Version) -> bool {
    fields.version >> 8 == if version == Version::One { 1 } else { 2 }
}

/// Returns how well the start of a trace fits this version. The format has no magic bytes, so all
/// of the first records must have the version.
fn likeness(head: &Head<'_>, version: Version) -> Likeness {
    let mut records = head.bytes.chunks_exact(version.record_bytes()).take(16).peekable();
    let any = records.peek().is_some();
    match any && records.all(|record| has_version(&fields(record, version), version)) {
        true => Likeness::Surely,
        false => Likeness::No,
    }
}

/// Returns the operation of a SCSI command, or `None` for a command that is ignored.
fn operation(code: u8) -> Option<Op> {
    match code {
        0x08 | 0x28 | 0xa8 | 0x88 => Some(Op::Read),
        // SCSI commands WRITE, WRITE AND VERIFY and WRITE SAME.
        0x0a | 0x2a | 0xaa | 0x8a | 0x2e | 0xae | 0x8e | 0x41 | 0x93 => Some(Op::Write),
        0x42 => Some(Op::Discard),
        0x35 | 0x91 => Some(Op::Flush),
        _ => None,
    }
}

struct Vscsi(Version);

impl Parse for Vscsi {
    fn next(&mut self, input: &mut Input, _: &mut Disks) -> io::Result<Step> {
        let mut record = [0; 40];
        let record = &mut record[..self.0.record_bytes()];
        if let Some(step) = read_record(input, record)? {
            return Ok(step);
        }
        let fields = fields(record, self.0);
        Ok(match request(&fields, self.0) {
            Ok(Some(raw)) => Step::Request(raw),
            Ok(None) => Step::Event,
            Err(reason) => Step::Bad(reason),
        })
    }
}

fn request(fields: &Fields, version: Version) -> Result<Option<Raw>, Reason> {
    if !has_version(fields, version) {
        return Err(format!("the record's version is {:#06x}", fields.version).into());
    }
    let Some(op) = operation(fields.command as u8) else { return Ok(None) };
    // UNMAP has its ranges in its data, which is not recorded.
    if op == Op::Discard && fields.block == 0 {
        return Ok(None);
    }
    Ok(Some(Raw {
        at_ns: fields.time_us.checked_mul(1_000).ok_or("the time is too large")?,
        offset: if op == Op::Flush { 0 } else { scaled(fields.block, 512, "the offset")? },
        len: u64::from(fields.len),
        op,
        disk: 0,
    }))
}
