//! Constants and fixed headers of the NBD protocol.
//!
//! [`server`](crate::server) and [`client`](crate::client) decide when a peer may use each value.
//! Numbers from a peer stay plain integers, because a peer may send any value. Integers are
//! big-endian and lengths are in bytes. Section names in the comments refer to the NBD project's
//! `doc/proto.md`.

use crate::bytes::Reader;

/// First eight bytes that every NBD server sends: `NBDMAGIC`.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second eight bytes that a newstyle server sends, and the start of every option: `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Second eight bytes that an oldstyle server sends. This crate refuses oldstyle servers.
pub const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Magic number of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Magic number of every request in the transmission phase.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Magic number at the start of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Magic number at the start of a structured reply chunk.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Length of the server's greeting: two magic numbers and the handshake flags.
pub const GREETING_BYTES: usize = 18;
/// Bytes of an option header.
pub const OPTION_HEADER_BYTES: usize = 16;
/// Bytes of an option reply header.
pub const OPTION_REPLY_HEADER_BYTES: usize = 20;
/// Bytes of a request header.
pub const REQUEST_BYTES: usize = 28;
/// Bytes of a simple reply header.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Bytes of a structured reply chunk header.
pub const CHUNK_HEADER_BYTES: usize = 20;
/// Number of zeroes after the reply to EXPORT_NAME, unless client and server agreed to leave them
/// out.
pub const EXPORT_NAME_ZEROES: usize = 124;
/// Longest string that the protocol allows, bytes.
pub const STRING_BYTES_MAX: usize = 4096;
/// Largest payload that every server accepts if it announced no maximum, bytes.
pub const DEFAULT_PAYLOAD_BYTES_MAX: u32 = 32 << 20;

/// Name of the metadata context that every export has.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// Prefix of the names of QEMU's dirty bitmap contexts, as in its documentation
/// (`docs/interop/nbd.rst`).
pub const QEMU_DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";
/// Name of QEMU's metadata context for the layers of an image, as in its documentation
/// (`docs/interop/nbd.rst`).
pub const QEMU_ALLOCATION_DEPTH: &str = "qemu:allocation-depth";

/// Handshake flags of the server. The client's flags use the same bits.
pub mod handshake_flags {
    /// The server replies to every option, and the client may send several options.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The zeroes after the reply to EXPORT_NAME may be left out.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Option types a client may send.
pub mod opt {
    /// Choose an export and start transmission. The protocol has no error reply to this option.
    pub const EXPORT_NAME: u32 = 1;
    /// End the negotiation.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Switch to TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export and start transmission.
    pub const GO: u32 = 7;
    /// Ask for structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts of an export.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts of an export.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Ask for 64-bit request headers.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of option replies. Replies with bit 31 set are errors, whose payload is a message for the
/// user.
pub mod rep {
    /// The server has processed the option.
    pub const ACK: u32 = 1;
    /// One export in the reply to LIST.
    pub const SERVER: u32 = 2;
    /// One information item in the reply to INFO or GO.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Bit that marks an error.
    pub const ERROR_BIT: u32 = 1 << 31;
    /// The option is unknown to the server.
    pub const ERR_UNSUP: u32 = ERROR_BIT | 1;
    /// The server's administrator forbids the option.
    pub const ERR_POLICY: u32 = ERROR_BIT | 2;
    /// The option is malformed or comes at the wrong moment.
    pub const ERR_INVALID: u32 = ERROR_BIT | 3;
    /// The server's platform does not support the option.
    pub const ERR_PLATFORM: u32 = ERROR_BIT | 4;
    /// The option needs TLS first.
    pub const ERR_TLS_REQD: u32 = ERROR_BIT | 5;
    /// The requested export does not exist.
    pub const ERR_UNKNOWN: u32 = ERROR_BIT | 6;
    /// The server is shutting down.
    pub const ERR_SHUTDOWN: u32 = ERROR_BIT | 7;
    /// The export needs a client that requests block sizes.
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR_BIT | 8;
    /// The option or its answer is too long.
    pub const ERR_TOO_BIG: u32 = ERROR_BIT | 9;
    /// The export needs extended headers.
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR_BIT | 10;
}

/// Information items of INFO and GO.
pub mod info {
    /// The export's size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The export's canonical name.
    pub const NAME: u16 = 1;
    /// A description of the export for people.
    pub const DESCRIPTION: u16 = 2;
    /// The export's minimum, preferred and maximum block size.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Types of structured reply chunks, and the bits that mark errors and the last chunk.
pub mod chunk {
    /// A chunk without data, which ends the reply.
    pub const NONE: u16 = 0;
    /// Data at an offset of the disk.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeroes at an offset of the disk.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents of a metadata context.
    pub const BLOCK_STATUS: u16 = 5;
    /// Bit that marks an error chunk.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// The request failed.
    pub const ERROR: u16 = ERROR_BIT | 1;
    /// The request failed at this offset of the disk.
    pub const ERROR_OFFSET: u16 = ERROR_BIT | 2;
    /// Chunk flag: this chunk is the last of the reply.
    pub const FLAG_DONE: u16 = 1 << 0;
}

/// Features of an export, announced when transmission starts ("Transmission flags").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TransmissionFlags(pub u16);

impl TransmissionFlags {
    /// Every export sets this flag; without it, the other flags have no meaning.
    pub const HAS_FLAGS: Self = Self(1 << 0);
    /// Writes are refused.
    pub const READ_ONLY: Self = Self(1 << 1);
    /// The server accepts FLUSH.
    pub const SEND_FLUSH: Self = Self(1 << 2);
    /// The server supports the FUA command flag.
    pub const SEND_FUA: Self = Self(1 << 3);
    /// The disk has seek times.
    pub const ROTATIONAL: Self = Self(1 << 4);
    /// The server accepts TRIM.
    pub const SEND_TRIM: Self = Self(1 << 5);
    /// The server supports WRITE_ZEROES and its NO_HOLE flag.
    pub const SEND_WRITE_ZEROES: Self = Self(1 << 6);
    /// The server supports the DF command flag; only with structured replies.
    pub const SEND_DF: Self = Self(1 << 7);
    /// A FLUSH on one connection makes the completed writes of all connections durable.
    pub const CAN_MULTI_CONN: Self = Self(1 << 8);
    /// The server accepts CACHE.
    pub const SEND_CACHE: Self = Self(1 << 10);
    /// The server supports the FAST_ZERO command flag.
    pub const SEND_FAST_ZERO: Self = Self(1 << 11);

    /// Returns true if every bit of `other` is set.
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl std::ops::BitOr for TransmissionFlags {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Error values of replies in the transmission phase ("Error values").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum ErrorCode {
    /// The export is read-only.
    Perm = 1,
    /// The medium failed.
    Io = 5,
    /// The server is out of memory. The same request may succeed if it is sent again later.
    NoMem = 12,
    /// The request is malformed, misaligned or out of range.
    Inval = 22,
    /// The written range does not fit the export or its medium.
    NoSpc = 28,
    /// The reply would be too long to send unfragmented.
    Overflow = 75,
    /// The request is valid but the server cannot execute it as requested, for example a fast zero.
    NotSup = 95,
    /// The server is shutting down.
    Shutdown = 108,
}

impl ErrorCode {
    /// Returns the error's number on the wire.
    #[inline]
    pub const fn to_wire(self) -> u32 {
        self as u32
    }

    /// Returns the error with this wire number; zero means success and gives `None`. An unknown
    /// number becomes [`ErrorCode::Inval`], as the NBD protocol requires.
    pub const fn from_wire(number: u32) -> Option<Self> {
        Some(match number {
            0 => return None,
            1 => Self::Perm,
            5 => Self::Io,
            12 => Self::NoMem,
            28 => Self::NoSpc,
            75 => Self::Overflow,
            95 => Self::NotSup,
            108 => Self::Shutdown,
            _ => Self::Inval,
        })
    }

    /// Returns the error's name in the NBD protocol, without its prefix.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Perm => "EPERM",
            Self::Io => "EIO",
            Self::NoMem => "ENOMEM",
            Self::Inval => "EINVAL",
            Self::NoSpc => "ENOSPC",
            Self::Overflow => "EOVERFLOW",
            Self::NotSup => "ENOTSUP",
            Self::Shutdown => "ESHUTDOWN",
        }
    }
}

impl std::fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A range of the disk with one state, in a BLOCK_STATUS reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Length of the range, bytes; never zero.
    pub length: u32,
    /// State of the range. For `base:allocation`: [`Extent::HOLE`] and [`Extent::ZERO`]. For
    /// `qemu:dirty-bitmap:…`: [`Extent::DIRTY`] or 0. For `qemu:allocation-depth`: 1 if the image
    /// has the range itself, more if a layer below has it, 0 if no layer has it.
    pub state: u32,
}

impl Extent {
    /// State bit: the range is not allocated.
    pub const HOLE: u32 = 1 << 0;
    /// State bit: the range reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
    /// State bit of dirty bitmaps: the range was changed.
    pub const DIRTY: u32 = 1 << 0;
}

/// Header of an option; `length` bytes of payload follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHeader {
    /// One of [`opt`], or an unknown number.
    pub option: u32,
    /// Length of the payload, bytes.
    pub length: u32,
}

impl OptionHeader {
    /// Encodes the header for the wire.
    pub fn encode(self) -> [u8; OPTION_HEADER_BYTES] {
        let mut out = [0; OPTION_HEADER_BYTES];
        out[0..8].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        out[8..12].copy_from_slice(&self.option.to_be_bytes());
        out[12..16].copy_from_slice(&self.length.to_be_bytes());
        out
    }

    /// Decodes a header; `None` if the magic number is wrong or the slice too short.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        (reader.u64()? == OPTION_MAGIC).then_some(())?;
        Some(Self { option: reader.u32()?, length: reader.u32()? })
    }
}

/// Header of an option reply; `length` bytes of payload follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The option that the server replies to.
    pub option: u32,
    /// One of [`rep`], or an unknown number.
    pub reply: u32,
    /// Length of the payload, bytes.
    pub length: u32,
}

impl OptionReplyHeader {
    /// Encodes the header for the wire.
    pub fn encode(self) -> [u8; OPTION_REPLY_HEADER_BYTES] {
        let mut out = [0; OPTION_REPLY_HEADER_BYTES];
        out[0..8].copy_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        out[8..12].copy_from_slice(&self.option.to_be_bytes());
        out[12..16].copy_from_slice(&self.reply.to_be_bytes());
        out[16..20].copy_from_slice(&self.length.to_be_bytes());
        out
    }

    /// Decodes a header; `None` if the magic number is wrong or the slice too short.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        (reader.u64()? == OPTION_REPLY_MAGIC).then_some(())?;
        Some(Self { option: reader.u32()?, reply: reader.u32()?, length: reader.u32()? })
    }
}

/// Header of a structured reply chunk, without its magic; `length` bytes of payload follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkHeader {
    /// [`chunk::FLAG_DONE`] or nothing.
    pub flags: u16,
    /// One of [`chunk`], or an unknown number.
    pub kind: u16,
    /// Cookie of the request that the server replies to.
    pub cookie: u64,
    /// Length of the payload, bytes.
    pub length: u32,
}

impl ChunkHeader {
    /// Encodes the header for the wire, including the magic number.
    #[inline]
    pub fn encode(self) -> [u8; CHUNK_HEADER_BYTES] {
        let mut out = [0; CHUNK_HEADER_BYTES];
        out[0..4].copy_from_slice(&CHUNK_MAGIC.to_be_bytes());
        out[4..6].copy_from_slice(&self.flags.to_be_bytes());
        out[6..8].copy_from_slice(&self.kind.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..20].copy_from_slice(&self.length.to_be_bytes());
        out
    }

    /// Decodes a header; `None` if the magic number is wrong or the slice too short.
    #[inline]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        (reader.u32()? == CHUNK_MAGIC).then_some(())?;
        Some(Self { flags: reader.u16()?, kind: reader.u16()?, cookie: reader.u64()?, length: reader.u32()? })
    }
}
