//! The request header of the transmission phase, shared by client and server.
//!
//! Decoding accepts any command and any flags, because an error reply needs the cookie. Only a
//! wrong magic number is an error, because the rest of the stream cannot be parsed. Offsets and
//! lengths are in bytes.

use crate::bytes::Reader;
use crate::wire::{REQUEST_BYTES, REQUEST_MAGIC};

/// Command of an NBD request ("Request types").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Read `length` bytes.
    Read,
    /// Write the `length` bytes that follow the header.
    Write,
    /// Complete the commands in flight and close the connection; there is no reply.
    Disconnect,
    /// Make completed writes durable.
    Flush,
    /// The range's contents are no longer needed.
    Trim,
    /// The range will be read soon.
    Cache,
    /// Make the range read as zeroes.
    WriteZeroes,
    /// Report the extents of the range.
    BlockStatus,
    /// A command that this crate does not know. The server replies EINVAL.
    Unknown(u16),
}

impl Command {
    /// Returns the command's number on the wire.
    #[inline]
    pub const fn to_wire(self) -> u16 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Disconnect => 2,
            Self::Flush => 3,
            Self::Trim => 4,
            Self::Cache => 5,
            Self::WriteZeroes => 6,
            Self::BlockStatus => 7,
            Self::Unknown(number) => number,
        }
    }

    /// Returns the command with this number on the wire.
    #[inline]
    pub const fn from_wire(number: u16) -> Self {
        match number {
            0 => Self::Read,
            1 => Self::Write,
            2 => Self::Disconnect,
            3 => Self::Flush,
            4 => Self::Trim,
            5 => Self::Cache,
            6 => Self::WriteZeroes,
            7 => Self::BlockStatus,
            other => Self::Unknown(other),
        }
    }
}

/// Flags of an NBD request ("Command flags").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CommandFlags(pub u16);

impl CommandFlags {
    /// No flag at all.
    pub const NONE: Self = Self(0);
    /// The write must be durable before the reply.
    pub const FUA: Self = Self(1 << 0);
    /// WRITE_ZEROES: keep the range allocated.
    pub const NO_HOLE: Self = Self(1 << 1);
    /// READ: send the reply in one chunk.
    pub const DF: Self = Self(1 << 2);
    /// BLOCK_STATUS: one extent in the reply is enough.
    pub const REQ_ONE: Self = Self(1 << 3);
    /// WRITE_ZEROES: be fast or fail with ENOTSUP.
    pub const FAST_ZERO: Self = Self(1 << 4);

    /// Returns true if every bit of `other` is set.
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns these flags without the bits of `other`.
    #[inline]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl std::ops::BitOr for CommandFlags {
    type Output = Self;
    #[inline]
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// One request header. Decoding has checked only the magic number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The command.
    pub command: Command,
    /// The command's flags.
    pub flags: CommandFlags,
    /// The client's id of the request. The reply repeats it.
    pub cookie: u64,
    /// Offset of the request, bytes; 0 for commands without a range.
    pub offset: u64,
    /// Length of the request, bytes.
    pub length: u32,
}

impl Request {
    /// Encodes the header for the wire.
    #[inline]
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut out = [0; REQUEST_BYTES];
        out[0..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        out[4..6].copy_from_slice(&self.flags.0.to_be_bytes());
        out[6..8].copy_from_slice(&self.command.to_wire().to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..24].copy_from_slice(&self.offset.to_be_bytes());
        out[24..28].copy_from_slice(&self.length.to_be_bytes());
        out
    }

    /// Decodes a header; `None` if the magic number is wrong.
    #[inline]
    pub fn decode(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        (reader.u32()? == REQUEST_MAGIC).then_some(())?;
        let flags = CommandFlags(reader.u16()?);
        let command = Command::from_wire(reader.u16()?);
        Some(Self { command, flags, cookie: reader.u64()?, offset: reader.u64()?, length: reader.u32()? })
    }

    /// Returns the bytes that follow the header on the wire. The payload of a refused WRITE must be
    /// read and discarded too.
    #[inline]
    pub const fn payload_len(&self) -> u32 {
        match self.command {
            Command::Write => self.length,
            _ => 0,
        }
    }

    /// Returns the first byte after the range, or `None` if it does not fit 64 bits.
    #[inline]
    pub const fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.length as u64)
    }
}
