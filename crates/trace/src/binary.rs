//! hob's own trace format: a 64-byte header and records of 24 bytes, little-endian, with checksums,
//! as specified in `docs/TRACE.md`.
//!
//! [`Reader`] works on blocks of about ten thousand records, so that reading keeps up with a
//! simulator. A truncated file is valid up to the last whole record. The reader reports the
//! truncation instead of failing. The reader refuses wrong checksums, unknown versions, unknown
//! required flags, and records that [`Record::check`] refuses. The reader also reads version 1,
//! which has no checksums.

use std::io::{self, Read, Seek, SeekFrom, Write};

use anyhow::{Context, bail, ensure};

use super::seal::{self, GROUP_BYTES, GROUP_RECORDS, Groups};
use super::{Op, Record};

/// Magic bytes at the start of a trace in hob's binary format.
pub const MAGIC: [u8; 8] = *b"hobtrace";
/// Format version of written traces.
pub const VERSION: u32 = 2;
/// Version without checksums. hob reads it and does not write it.
pub(super) const VERSION_UNSEALED: u32 = 1;
/// Size of the header in bytes.
pub const HEADER_BYTES: usize = 64;
/// Size of a record in bytes.
pub const RECORD_BYTES: usize = 24;

const GROUPS_A_BLOCK: usize = 10;
/// Mask of the required flags. A reader refuses a trace if a required flag is set that the reader
/// does not know.
const FLAGS_REQUIRED: u32 = 0xffff_0000;
/// Position of the checksum in the header. Version 1 has no checksum.
const HEADER_CRC: std::ops::Range<usize> = 0x2c..0x30;

/// Header of a binary trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Format version of a trace that was read. Written traces always have [`VERSION`].
    pub version: u32,
    /// Number of records; 0 if the writer could not return to the header, for example in a pipe. A
    /// reader then computes the number from the length of the trace.
    pub records: u64,
    /// Highest disk number plus one, or 0 if unknown.
    pub disks: u32,
    /// Number of requests that the recorder dropped because it was too slow.
    pub dropped: u64,
    /// Start of the trace, nanoseconds of Unix time; 0 if unknown.
    pub started_unix_ns: u64,
}

impl Default for Header {
    fn default() -> Header {
        Header { version: VERSION, records: 0, disks: 0, dropped: 0, started_unix_ns: 0 }
    }
}

impl Header {
    /// Returns the encoded header.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0x00..0x08].copy_from_slice(&MAGIC);
        bytes[0x08..0x0c].copy_from_slice(&VERSION.to_le_bytes());
        bytes[0x10..0x18].copy_from_slice(&self.records.to_le_bytes());
        bytes[0x18..0x20].copy_from_slice(&self.dropped.to_le_bytes());
        bytes[0x20..0x28].copy_from_slice(&self.started_unix_ns.to_le_bytes());
        bytes[0x28..0x2c].copy_from_slice(&self.disks.to_le_bytes());
        let crc = crc32c::crc32c(&bytes);
        bytes[HEADER_CRC].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes a header.
    ///
    /// # Errors
    /// Returns an error for other magic bytes, an unknown version, a wrong checksum, or an unknown
    /// required flag.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> anyhow::Result<Header> {
        ensure!(bytes[..8] == MAGIC, "the file is not a hob trace: it does not begin with 'hobtrace'");
        let version = u32_at(bytes, 0x08);
        ensure!(
            (VERSION_UNSEALED..=VERSION).contains(&version),
            "the trace has version {version}; this hob reads versions {VERSION_UNSEALED} to {VERSION}"
        );
        if version != VERSION_UNSEALED {
            let mut unsigned = *bytes;
            unsigned[HEADER_CRC].fill(0);
            ensure!(
                crc32c::crc32c(&unsigned) == u32_at(bytes, HEADER_CRC.start),
                "the checksum of the trace's header is wrong: the file is damaged"
            );
        }
        let flags = u32_at(bytes, 0x0c);
        ensure!(
            flags & FLAGS_REQUIRED == 0,
            "the trace needs features ({flags:#x}) that this hob does not know"
        );
        let disks = u32_at(bytes, 0x28);
        ensure!(disks <= 1 << 16, "the trace header has {disks} disks; the maximum is 65536");
        Ok(Header {
            version,
            records: u64_at(bytes, 0x10),
            dropped: u64_at(bytes, 0x18),
            started_unix_ns: u64_at(bytes, 0x20),
            disks,
        })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Returns the encoded record.
pub fn encode(record: &Record) -> [u8; RECORD_BYTES] {
    let mut bytes = [0; RECORD_BYTES];
    bytes[0..8].copy_from_slice(&record.at_ns.to_le_bytes());
    bytes[8..16].copy_from_slice(&record.offset.to_le_bytes());
    bytes[16..20].copy_from_slice(&record.len.to_le_bytes());
    bytes[20] = match record.op {
        Op::Read => 0,
        Op::Write => 1,
        Op::Discard => 2,
        Op::Flush => 3,
    };
    bytes[22..24].copy_from_slice(&record.disk.to_le_bytes());
    bytes
}

/// Decodes a record. Returns the reason if the record is invalid.
#[inline]
pub fn decode(bytes: &[u8; RECORD_BYTES]) -> Result<Record, &'static str> {
    let op = match bytes[20] {
        0 => Op::Read,
        1 => Op::Write,
        2 => Op::Discard,
        3 => Op::Flush,
        _ => return Err("this hob does not know the operation"),
    };
    let record = Record {
        at_ns: u64_at(bytes, 0),
        offset: u64_at(bytes, 8),
        len: u32_at(bytes, 16),
        op,
        disk: u16::from_le_bytes([bytes[22], bytes[23]]),
    };
    record.check().map(|()| record)
}

/// Writes a binary trace. The trace is complete only after [`finish`](Writer::finish) or
/// [`finish_counted`](Writer::finish_counted).
#[derive(Debug)]
pub struct Writer<W> {
    out: W,
    group: Vec<u8>,
    header: Header,
}

impl<W: Write> Writer<W> {
    /// Starts a trace and writes a header with an unknown number of records. `out` needs no
    /// buffering.
    pub fn new(out: W) -> io::Result<Writer<W>> {
        Self::with_header(out, Header::default())
    }

    /// Starts a trace and writes the given header, with an unknown number of records instead of
    /// `header.records`.
    pub fn with_header(mut out: W, header: Header) -> io::Result<Writer<W>> {
        let header = Header { version: VERSION, records: 0, ..header };
        out.write_all(&header.encode())?;
        Ok(Writer { out, group: Vec::with_capacity(GROUP_BYTES), header })
    }

    /// Appends a record.
    ///
    /// # Errors
    /// Returns `InvalidInput` for a record that [`Record::check`] refuses, or an error of the file.
    pub fn push(&mut self, record: &Record) -> io::Result<()> {
        record.check().map_err(|reason| io::Error::new(io::ErrorKind::InvalidInput, reason))?;
        self.group.extend_from_slice(&encode(record));
        self.header.records += 1;
        self.header.disks = self.header.disks.max(u32::from(record.disk) + 1);
        if self.group.len() == GROUP_RECORDS * RECORD_BYTES {
            self.flush_group(false)?;
        }
        Ok(())
    }

    /// Returns the number of records written so far.
    pub fn records(&self) -> u64 {
        self.header.records
    }

    /// Writes the remaining records and flushes. The header keeps the number of records as unknown,
    /// which suits pipes.
    pub fn finish(mut self) -> io::Result<W> {
        self.flush_group(true)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn flush_group(&mut self, is_last: bool) -> io::Result<()> {
        let seal = seal::seal(&self.group, self.header.records, is_last);
        self.group.extend_from_slice(&seal);
        self.out.write_all(&self.group)?;
        self.group.clear();
        Ok(())
    }
}

impl<W: Write + Seek> Writer<W> {
    /// Finishes the trace, and writes the numbers of records, disks and `dropped` requests into the
    /// header. The header must be at the start of `W`.
    pub fn finish_counted(mut self, dropped: u64) -> io::Result<W> {
        self.flush_group(true)?;
        self.header.dropped = dropped;
        self.out.seek(SeekFrom::Start(0))?;
        self.out.write_all(&self.header.encode())?;
        self.out.seek(SeekFrom::End(0))?;
        self.out.flush()?;
        Ok(self.out)
    }
}

/// Reads a binary trace, in blocks ([`read_block`](Reader::read_block)) or record by record (as an
/// iterator). The first invalid record ends the trace with an error that has the record's number.
/// [`super::open`] skips invalid records instead.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    header: Header,
    groups: Groups,
    block: Vec<Record>,
    next: usize,
    read: u64,
    failed: Option<anyhow::Error>,
    ended: bool,
}

impl<R: Read> Reader<R> {
    /// Opens a trace and reads its header. `input` needs no buffering.
    ///
    /// # Errors
    /// Returns the errors of [`Header::decode`], an error for a file that is shorter than a header,
    /// or an error of the file.
    pub fn new(mut input: R) -> anyhow::Result<Reader<R>> {
        let mut bytes = [0; HEADER_BYTES];
        let got = read_whole(&mut input, &mut bytes).context("cannot read the trace")?;
        ensure!(got == HEADER_BYTES, "the trace ends within its header, after {got} bytes of {HEADER_BYTES}");
        let header = Header::decode(&bytes)?;
        Ok(Reader {
            input,
            header,
            groups: Groups::new(header.version),
            block: Vec::with_capacity(GROUPS_A_BLOCK * (GROUP_RECORDS + 1)),
            next: 0,
            read: 0,
            failed: None,
            ended: false,
        })
    }

    /// Returns the header of the trace.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the number of bytes after the last whole record. More than 0 means that the file is
    /// truncated. The number is known only at the end of the trace.
    pub fn torn_bytes(&self) -> usize {
        self.groups.torn_bytes()
    }

    /// Returns the number of records that are missing in the file according to its header. The
    /// number is known only at the end of the trace.
    pub fn missing(&self) -> u64 {
        if self.ended { self.header.records.saturating_sub(self.read) } else { 0 }
    }

    /// Returns a sentence about what is missing at the end of a truncated trace. Returns `None` for
    /// a complete trace, and before the last record was read.
    pub fn truncation(&self) -> Option<String> {
        self.groups.missing(self.header.records).filter(|_| self.ended)
    }

    /// Returns the next block of about ten thousand records, or an empty slice at the end. A caller
    /// uses either this method or the iterator, not both.
    ///
    /// # Errors
    /// Returns an error for a wrong checksum, an invalid record, or an error of the file. All valid
    /// records before the error are returned first.
    pub fn read_block(&mut self) -> anyhow::Result<&[Record]> {
        self.block.clear();
        self.next = 0;
        for _ in 0..GROUPS_A_BLOCK {
            if self.ended {
                break;
            }
            if let Err(error) = self.read_group() {
                self.ended = true;
                self.failed = Some(error);
            }
        }
        match self.failed.take_if(|_| self.block.is_empty()) {
            Some(error) => Err(error),
            None => Ok(&self.block),
        }
    }

    /// Appends the records of the next group to the block. A group is the records that share a
    /// checksum.
    fn read_group(&mut self) -> anyhow::Result<()> {
        let input = &mut self.input;
        let group = self.groups.next(|bytes| read_whole(input, bytes)).context("cannot read the trace")?;
        for bytes in group {
            match decode(bytes) {
                Ok(record) => self.block.push(record),
                Err(reason) => bail!("record {} of the trace: {reason}", self.read + 1),
            }
            self.read += 1;
        }
        self.ended = self.groups.ended();
        Ok(())
    }
}

impl<R: Read> Iterator for Reader<R> {
    type Item = anyhow::Result<Record>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.next == self.block.len() {
            match self.read_block() {
                Ok([]) => return None,
                Ok(_) => {}
                Err(error) => return Some(Err(error)),
            }
        }
        self.next += 1;
        Some(Ok(self.block[self.next - 1]))
    }
}

/// Reads until `bytes` is full or the input ends. Returns the number of bytes read.
pub(super) fn read_whole(input: &mut (impl Read + ?Sized), bytes: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < bytes.len() {
        match input.read(&mut bytes[got..]) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

#[cfg(test)]
mod tests;
