//! Checksums of hob's trace format: a *seal* follows each group of records (`docs/TRACE.md`).
//!
//! [`Groups`] reads the groups of version 2 and checks their seals. Version 1 has no seals, and its
//! groups are read unchecked.

use std::io;

use super::binary::{RECORD_BYTES, VERSION_UNSEALED};

/// Number of records of a group. Only the last group may be smaller.
pub(super) const GROUP_RECORDS: usize = 1023;
/// Size of a whole group with its seal in bytes.
pub(super) const GROUP_BYTES: usize = (GROUP_RECORDS + 1) * RECORD_BYTES;
/// Byte that distinguishes a seal from a record, at the position of the operation.
const SEAL: u8 = 0xff;

/// A group whose checksum does not match.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Damage(String);

/// Returns the seal of a group. `total` is the number of records up to the seal.
pub(super) fn seal(group: &[u8], total: u64, is_last: bool) -> [u8; RECORD_BYTES] {
    let mut bytes = [0; RECORD_BYTES];
    bytes[0x00..0x08].copy_from_slice(&total.to_le_bytes());
    bytes[0x14] = SEAL;
    bytes[0x15] = u8::from(is_last);
    let crc = crc32c::crc32c_append(crc32c::crc32c(group), &bytes);
    bytes[0x08..0x0c].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// Reads a trace group by group.
#[derive(Debug)]
pub(super) struct Groups {
    version: u32,
    bytes: Vec<u8>,
    /// Number of records so far.
    total: u64,
    /// Number of records after the last seal; only a truncated trace has any.
    unsealed: u64,
    torn_bytes: usize,
    is_sealed: bool,
    ended: bool,
}

impl Groups {
    /// Creates a reader that begins after the header of a trace of this version.
    pub(super) fn new(version: u32) -> Groups {
        let bytes = vec![0; GROUP_BYTES];
        Groups { version, bytes, total: 0, unsealed: 0, torn_bytes: 0, is_sealed: false, ended: false }
    }

    /// Returns the records of the next group, or an empty slice at the end. `read` fills its
    /// argument unless the trace ends, and returns the number of bytes.
    ///
    /// # Errors
    /// Returns the errors of `read`, and [`Damage`] as `InvalidData`.
    pub(super) fn next(
        &mut self,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<&[[u8; RECORD_BYTES]]> {
        if self.ended {
            return Ok(&[]);
        }
        let got = read(&mut self.bytes)?;
        self.ended = got < GROUP_BYTES;
        let (units, torn) = self.bytes[..got].as_chunks::<RECORD_BYTES>();
        self.torn_bytes = torn.len();
        if self.version == VERSION_UNSEALED {
            self.total += units.len() as u64;
            return Ok(units);
        }
        let Some((last, records)) = units.split_last().filter(|(last, _)| last[0x14] == SEAL) else {
            if self.ended {
                // A truncated trace: its last records have no seal.
                self.unsealed = units.len() as u64;
                self.total += self.unsealed;
                return Ok(units);
            }
            self.ended = true;
            return Err(damage(self.total, GROUP_RECORDS));
        };
        let is_last = last[0x15] == 1;
        let expected = seal(records.as_flattened(), self.total + records.len() as u64, is_last);
        // Data follows the last seal only if this seal is damaged, or if another file was appended.
        if *last != expected || is_last != self.ended || !torn.is_empty() {
            self.ended = true;
            return Err(damage(self.total, records.len()));
        }
        self.total += records.len() as u64;
        self.is_sealed = is_last;
        Ok(records)
    }

    /// Returns true if the trace has ended.
    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    /// Returns the number of bytes after the last whole record or seal.
    pub(super) fn torn_bytes(&self) -> usize {
        self.torn_bytes
    }

    /// Returns a sentence about what is missing at the end of the trace, or `None` if the trace is
    /// complete. `stated` is the number of records in the header, or 0 if unknown.
    pub(super) fn missing(&self, stated: u64) -> Option<String> {
        if stated > self.total {
            return Some(format!("the trace ends after {} records; its header says {stated}", self.total));
        }
        (self.version != VERSION_UNSEALED && !self.is_sealed).then(|| {
            let unsealed = self.unsealed;
            format!("the trace was cut off: no checksum covers its last {unsealed} records")
        })
    }
}

fn damage(total: u64, records: usize) -> io::Error {
    let (first, last) = (total + 1, total + records as u64);
    let said = match records {
        0 => format!("the checksum after record {total} is wrong"),
        _ => format!("the checksum of records {first} to {last} is wrong"),
    };
    io::Error::new(
        io::ErrorKind::InvalidData,
        Damage(format!("{said}: the file is damaged; record or copy the trace again")),
    )
}
