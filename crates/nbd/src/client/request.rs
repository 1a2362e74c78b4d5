//! Encodes requests: each function encodes one command and returns the 28 bytes to send.
//!
//! The functions check nothing. The caller knows from [`Negotiated`](super::handshake::Negotiated)
//! which commands the server supports. The caller chooses cookies that are unique among requests in
//! flight. Offsets and lengths are in bytes.

use crate::request::{Command, CommandFlags, Request};
use crate::wire::REQUEST_BYTES;

#[inline]
fn encode(
    command: Command,
    flags: CommandFlags,
    cookie: u64,
    offset: u64,
    length: u32,
) -> [u8; REQUEST_BYTES] {
    Request { command, flags, cookie, offset, length }.encode()
}

/// Encodes a READ; `flags` may contain DF if structured replies were negotiated.
#[inline]
pub fn read(cookie: u64, offset: u64, length: u32, flags: CommandFlags) -> [u8; REQUEST_BYTES] {
    encode(Command::Read, flags, cookie, offset, length)
}

/// Encodes the header of a WRITE; `length` bytes of data must follow it. `flags` may contain FUA.
#[inline]
pub fn write_header(cookie: u64, offset: u64, length: u32, flags: CommandFlags) -> [u8; REQUEST_BYTES] {
    encode(Command::Write, flags, cookie, offset, length)
}

/// Encodes a FLUSH. Writes completed before the FLUSH is sent are durable after its reply.
#[inline]
pub fn flush(cookie: u64) -> [u8; REQUEST_BYTES] {
    encode(Command::Flush, CommandFlags::NONE, cookie, 0, 0)
}

/// Encodes a TRIM; `flags` may contain FUA.
#[inline]
pub fn trim(cookie: u64, offset: u64, length: u32, flags: CommandFlags) -> [u8; REQUEST_BYTES] {
    encode(Command::Trim, flags, cookie, offset, length)
}

/// Encodes a WRITE_ZEROES; `flags` may contain FUA, NO_HOLE and FAST_ZERO.
#[inline]
pub fn write_zeroes(cookie: u64, offset: u64, length: u32, flags: CommandFlags) -> [u8; REQUEST_BYTES] {
    encode(Command::WriteZeroes, flags, cookie, offset, length)
}

/// Encodes a CACHE, which announces that the range will be read soon.
#[inline]
pub fn cache(cookie: u64, offset: u64, length: u32) -> [u8; REQUEST_BYTES] {
    encode(Command::Cache, CommandFlags::NONE, cookie, offset, length)
}

/// Encodes a BLOCK_STATUS; `flags` may contain REQ_ONE. A metadata context must have been
/// negotiated.
#[inline]
pub fn block_status(cookie: u64, offset: u64, length: u32, flags: CommandFlags) -> [u8; REQUEST_BYTES] {
    encode(Command::BlockStatus, flags, cookie, offset, length)
}

/// Encodes a DISC. The server completes requests in flight and closes the connection without a
/// reply. If written data must be durable, flush first.
#[inline]
pub fn disconnect() -> [u8; REQUEST_BYTES] {
    encode(Command::Disconnect, CommandFlags::NONE, 0, 0, 0)
}
