//! Encodes NBD replies into the caller's buffer.
//!
//! Each encoding function writes a fixed array and allocates only if the caller's `Vec` must grow.
//! The `*_header` functions return the array, for callers that use `writev`. Payload does not pass
//! through these functions. Offsets and lengths are in bytes.
//!
//! The caller is trusted: the functions assert that lengths fit their fields.

use crate::bytes::clip;
use crate::wire::{
    CHUNK_HEADER_BYTES, ChunkHeader, ErrorCode, Extent, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC,
    STRING_BYTES_MAX, chunk,
};

/// Length of an OFFSET_DATA chunk's header, before its data, bytes.
pub const DATA_HEADER_BYTES: usize = CHUNK_HEADER_BYTES + 8;
/// Maximum number of extents in a BLOCK_STATUS reply. Clients may disconnect if there are more.
pub const EXTENTS_MAX: usize = 1 << 20;

/// Position of a chunk in its reply, which says whether more chunks follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    /// Another chunk with the same cookie follows.
    More,
    /// The reply is complete.
    Last,
}

impl Position {
    #[inline]
    const fn flags(self) -> u16 {
        match self {
            Self::More => 0,
            Self::Last => chunk::FLAG_DONE,
        }
    }
}

/// Returns a simple reply header. `error` is zero for success. The data of a READ follows the
/// header.
#[inline]
fn simple_header(cookie: u64, error: u32) -> [u8; SIMPLE_REPLY_BYTES] {
    let mut out = [0; SIMPLE_REPLY_BYTES];
    out[0..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    out[4..8].copy_from_slice(&error.to_be_bytes());
    out[8..16].copy_from_slice(&cookie.to_be_bytes());
    out
}

/// Returns the header of a simple, successful reply. The data of a READ follows it directly.
#[inline]
pub fn simple_ok_header(cookie: u64) -> [u8; SIMPLE_REPLY_BYTES] {
    simple_header(cookie, 0)
}

/// Appends a simple, successful reply. The data of a READ follows it directly.
#[inline]
pub fn push_simple_ok(out: &mut Vec<u8>, cookie: u64) {
    out.extend_from_slice(&simple_header(cookie, 0));
}

/// Appends a simple error reply without data. If structured replies were negotiated, a simple error
/// reply is allowed for all commands except READ and BLOCK_STATUS.
#[inline]
pub fn push_simple_error(out: &mut Vec<u8>, cookie: u64, error: ErrorCode) {
    out.extend_from_slice(&simple_header(cookie, error.to_wire()));
}

/// Returns the header of an OFFSET_DATA chunk. `length` bytes of data, at least one, follow it.
#[inline]
pub fn data_header(cookie: u64, offset: u64, length: u32, position: Position) -> [u8; DATA_HEADER_BYTES] {
    assert!(length > 0, "a data chunk carries at least one byte");
    let length = length.checked_add(8).expect("a data chunk fits its length field");
    let header = ChunkHeader { flags: position.flags(), kind: chunk::OFFSET_DATA, cookie, length };
    let mut out = [0; DATA_HEADER_BYTES];
    out[..CHUNK_HEADER_BYTES].copy_from_slice(&header.encode());
    out[CHUNK_HEADER_BYTES..].copy_from_slice(&offset.to_be_bytes());
    out
}

/// Appends the header of an OFFSET_DATA chunk. `length` bytes of data, at least one, follow it.
#[inline]
pub fn push_data_header(out: &mut Vec<u8>, cookie: u64, offset: u64, length: u32, position: Position) {
    out.extend_from_slice(&data_header(cookie, offset, length, position));
}

/// Appends an OFFSET_HOLE chunk for `length` bytes, at least one, that read as zeroes.
#[inline]
pub fn push_hole(out: &mut Vec<u8>, cookie: u64, offset: u64, length: u32, position: Position) {
    assert!(length > 0, "a hole covers at least one byte");
    let header = ChunkHeader { flags: position.flags(), kind: chunk::OFFSET_HOLE, cookie, length: 12 };
    let mut piece = [0; CHUNK_HEADER_BYTES + 12];
    piece[..CHUNK_HEADER_BYTES].copy_from_slice(&header.encode());
    piece[CHUNK_HEADER_BYTES..CHUNK_HEADER_BYTES + 8].copy_from_slice(&offset.to_be_bytes());
    piece[CHUNK_HEADER_BYTES + 8..].copy_from_slice(&length.to_be_bytes());
    out.extend_from_slice(&piece);
}

/// Appends a NONE chunk, which ends a reply. A NONE chunk means success unless an error chunk
/// preceded it.
#[inline]
pub fn push_done(out: &mut Vec<u8>, cookie: u64) {
    let header = ChunkHeader { flags: chunk::FLAG_DONE, kind: chunk::NONE, cookie, length: 0 };
    out.extend_from_slice(&header.encode());
}

/// Appends an ERROR chunk. The message is for the user, may be empty, and is clipped to 4096 bytes.
pub fn push_error(out: &mut Vec<u8>, cookie: u64, error: ErrorCode, message: &str, position: Position) {
    error_chunk(out, cookie, error, message, None, position);
}

/// Appends an ERROR_OFFSET chunk, which also contains the first byte of the disk that failed.
pub fn push_error_offset(
    out: &mut Vec<u8>,
    cookie: u64,
    error: ErrorCode,
    message: &str,
    offset: u64,
    position: Position,
) {
    error_chunk(out, cookie, error, message, Some(offset), position);
}

fn error_chunk(
    out: &mut Vec<u8>,
    cookie: u64,
    error: ErrorCode,
    message: &str,
    offset: Option<u64>,
    position: Position,
) {
    let message = clip(message, STRING_BYTES_MAX);
    let (kind, tail) = match offset {
        None => (chunk::ERROR, 0),
        Some(_) => (chunk::ERROR_OFFSET, 8),
    };
    let length = (6 + message.len() + tail) as u32;
    let header = ChunkHeader { flags: position.flags(), kind, cookie, length };
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(&error.to_wire().to_be_bytes());
    out.extend_from_slice(&(message.len() as u16).to_be_bytes());
    out.extend_from_slice(message.as_bytes());
    if let Some(offset) = offset {
        out.extend_from_slice(&offset.to_be_bytes());
    }
}

/// Appends a BLOCK_STATUS chunk: 1 to [`EXTENTS_MAX`] extents of one context, the first starting at
/// the request's offset.
pub fn push_block_status(
    out: &mut Vec<u8>,
    cookie: u64,
    context_id: u32,
    extents: &[Extent],
    position: Position,
) {
    assert!((1..=EXTENTS_MAX).contains(&extents.len()), "a block status reply has 1 to 2^20 extents");
    let length = 4 + 8 * extents.len();
    let header =
        ChunkHeader { flags: position.flags(), kind: chunk::BLOCK_STATUS, cookie, length: length as u32 };
    out.reserve(CHUNK_HEADER_BYTES + length);
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(&context_id.to_be_bytes());
    for extent in extents {
        out.extend_from_slice(&extent.length.to_be_bytes());
        out.extend_from_slice(&extent.state.to_be_bytes());
    }
}
