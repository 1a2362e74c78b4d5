//! Encodes requests: one function per command, each returning the 28 bytes to send.
//!
//! Nothing is checked here; the caller knows from [`Negotiated`](super::handshake::Negotiated) what the
//! server supports. The caller chooses the cookies, which must be unique among requests in flight. Offsets
//! and lengths are bytes.

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

/// READ; `flags` may hold DF with structured replies.
#[inline]
pub fn read(cookie: u64, offset: u64, length: u32, flags: CommandFlags) -> [u8; REQUEST_BYTES] {
    encode(Command::Read, flags, cookie, offset, length)
}

/// Header of a WRITE; `length` bytes of data must follow it. `flags` may hold FUA.
#[inline]
pub fn write_header(cookie: u64, offset: u64, length: u32, flags: CommandFlags) -> [u8; REQUEST_BYTES] {
    encode(Command::Write, flags, cookie, offset, length)
}

/// FLUSH: writes completed before this is sent are durable once it is answered.
#[inline]
pub fn flush(cookie: u64) -> [u8; REQUEST_BYTES] {
    encode(Command::Flush, CommandFlags::NONE, cookie, 0, 0)
}

/// TRIM; `flags` may hold FUA.
#[inline]
pub fn trim(cookie: u64, offset: u64, length: u32, flags: CommandFlags) -> [u8; REQUEST_BYTES] {
    encode(Command::Trim, flags, cookie, offset, length)
}

/// WRITE_ZEROES; `flags` may hold FUA, NO_HOLE, FAST_ZERO.
#[inline]
pub fn write_zeroes(cookie: u64, offset: u64, length: u32, flags: CommandFlags) -> [u8; REQUEST_BYTES] {
    encode(Command::WriteZeroes, flags, cookie, offset, length)
}

/// CACHE: the range will be read soon.
#[inline]
pub fn cache(cookie: u64, offset: u64, length: u32) -> [u8; REQUEST_BYTES] {
    encode(Command::Cache, CommandFlags::NONE, cookie, offset, length)
}

/// BLOCK_STATUS; `flags` may hold REQ_ONE. Needs the `base:allocation` context.
#[inline]
pub fn block_status(cookie: u64, offset: u64, length: u32, flags: CommandFlags) -> [u8; REQUEST_BYTES] {
    encode(Command::BlockStatus, flags, cookie, offset, length)
}

/// DISC: the server finishes what is in flight and closes; there is no reply. Flush first.
#[inline]
pub fn disconnect() -> [u8; REQUEST_BYTES] {
    encode(Command::Disconnect, CommandFlags::NONE, 0, 0, 0)
}
