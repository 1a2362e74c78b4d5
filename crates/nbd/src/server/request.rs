//! Decodes a request header, checks it against the negotiation, and returns what to do with it.
//!
//! Refused with an error reply: unknown commands and flags, ranges outside the export, misaligned or empty
//! ranges, writes to a read-only export, reads over the maximum. Refused by closing the connection: a wrong
//! magic, and a WRITE whose payload is over the maximum, since discarding it would let a client keep the
//! server busy for nothing. Offsets and lengths are bytes.

use super::handshake::Negotiated;
use crate::request::{Command, CommandFlags, Request};
use crate::wire::{ErrorCode, REQUEST_BYTES};

/// Reads a request header.
///
/// # Errors
/// [`RequestError::BadMagic`]: close the connection.
#[inline]
pub fn decode_request(bytes: &[u8; REQUEST_BYTES]) -> Result<Request, RequestError> {
    Request::decode(bytes).ok_or(RequestError::BadMagic)
}

/// Why the connection must be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The stream is not at a request header.
    #[error("a request does not start with its magic number; the client is out of step")]
    BadMagic,
    /// The payload of a WRITE is over the export's maximum.
    #[error("a write of {length} bytes exceeds the announced maximum of {max}")]
    PayloadTooLong {
        /// Announced payload, bytes.
        length: u32,
        /// The export's maximum, bytes.
        max: u32,
    },
}

/// How to refuse a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Discard [`Request::payload_len`] bytes, then answer with this error.
    Reply(ErrorCode),
    /// Close the connection.
    Close(RequestError),
}

/// Checks a request against the export and the negotiation. [`Command::Disconnect`] always passes.
///
/// A request that passes has a range inside the export, aligned and not empty (FLUSH and DISC have none).
/// It carries only flags that apply to its command. If it moves data, it moves at most `block_size_max`
/// bytes. TRIM, WRITE_ZEROES, CACHE and BLOCK_STATUS may be as long as the export.
///
/// # Errors
/// How to refuse the request. The error codes follow "Error values" and the behaviour of existing servers:
/// EPERM before anything else on a read-only export, ENOSPC for writes past the end, EOVERFLOW for an
/// unfragmented READ that is too long, EINVAL for the rest.
#[inline]
pub fn validate(request: &Request, negotiated: &Negotiated) -> Result<(), Refusal> {
    let info = &negotiated.info;
    let payload = request.payload_len();
    if payload > info.block_size_max {
        return Err(Refusal::Close(RequestError::PayloadTooLong {
            length: payload,
            max: info.block_size_max,
        }));
    }
    let writes = matches!(request.command, Command::Write | Command::Trim | Command::WriteZeroes);
    if writes && info.read_only {
        return Err(Refusal::Reply(ErrorCode::Perm));
    }
    if !is_offered(request, negotiated) {
        return Err(Refusal::Reply(ErrorCode::Inval));
    }
    match request.command {
        Command::Disconnect => Ok(()),
        Command::Flush if request.offset == 0 && request.length == 0 => Ok(()),
        Command::Flush => Err(Refusal::Reply(ErrorCode::Inval)),
        _ => check_range(request, negotiated).map_err(Refusal::Reply),
    }
}

/// Returns true if the command and each of its flags were announced to this client. Equivalent to
/// [`ExportInfo::transmission_flags`](crate::ExportInfo::transmission_flags), without building the flags
/// per request; a test compares the two. Write commands on read-only exports were refused before.
#[inline]
fn is_offered(request: &Request, negotiated: &Negotiated) -> bool {
    let info = &negotiated.info;
    let (command_offered, mut flags) = match request.command {
        Command::Read if negotiated.structured_replies => (true, CommandFlags::DF),
        Command::Read | Command::Write => (true, CommandFlags::NONE),
        // DISC has no reply, so its flags are not checked.
        Command::Disconnect => return true,
        Command::Flush => (info.can_flush, CommandFlags::NONE),
        Command::Trim => (info.can_trim, CommandFlags::NONE),
        Command::Cache => (info.can_cache, CommandFlags::NONE),
        Command::WriteZeroes if info.can_fast_zero => {
            (info.can_write_zeroes, CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO)
        }
        Command::WriteZeroes => (info.can_write_zeroes, CommandFlags::NO_HOLE),
        Command::BlockStatus => (negotiated.has_contexts(), CommandFlags::REQ_ONE),
        Command::Unknown(_) => (false, CommandFlags::NONE),
    };
    if info.can_fua && !info.read_only {
        // FUA is allowed on any command once announced; existing clients set it on reads too.
        flags = flags | CommandFlags::FUA;
    }
    command_offered && request.flags.without(flags) == CommandFlags::NONE
}

#[inline]
fn check_range(request: &Request, negotiated: &Negotiated) -> Result<(), ErrorCode> {
    let info = &negotiated.info;
    // Negotiation refuses a minimum that is no power of two. If the caller changed it since, nothing counts
    // as aligned: a mask made of such a minimum would let misaligned requests through.
    let unaligned = match info.block_size_min {
        min if min.is_power_of_two() => u64::from(min) - 1,
        _ => u64::MAX,
    };
    if request.length == 0 || (request.offset | u64::from(request.length)) & unaligned != 0 {
        return Err(ErrorCode::Inval);
    }
    if request.end().is_none_or(|end| end > info.size_bytes) {
        let stores = matches!(request.command, Command::Write | Command::WriteZeroes);
        return Err(if stores { ErrorCode::NoSpc } else { ErrorCode::Inval });
    }
    if request.command == Command::Read && request.length > info.block_size_max {
        let whole = request.flags.contains(CommandFlags::DF);
        return Err(if whole { ErrorCode::Overflow } else { ErrorCode::Inval });
    }
    Ok(())
}
