//! Decodes a request header and checks it against the negotiation's result.
//!
//! An error reply refuses unknown commands and flags, ranges outside the export, misaligned or
//! empty ranges, writes to a read-only export, and reads over the maximum. The server closes the
//! connection after a wrong magic number, and after a WRITE whose payload exceeds the maximum:
//! discarding so much payload would let a client waste the server's time. Offsets and lengths are
//! in bytes.

use super::handshake::Negotiated;
use crate::request::{Command, CommandFlags, Request};
use crate::wire::{ErrorCode, REQUEST_BYTES};

/// Decodes a request header.
///
/// # Errors
/// Returns [`RequestError::BadMagic`] if the header has a wrong magic number. The caller must then
/// close the connection.
#[inline]
pub fn decode_request(bytes: &[u8; REQUEST_BYTES]) -> Result<Request, RequestError> {
    Request::decode(bytes).ok_or(RequestError::BadMagic)
}

/// Why the server must close the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The received bytes do not start with a request's magic number.
    #[error("a request does not start with its magic number; the client breaks the protocol")]
    BadMagic,
    /// The payload of a WRITE exceeds the export's maximum.
    #[error("a write of {length} bytes exceeds the announced maximum of {max}")]
    PayloadTooLong {
        /// Announced payload, bytes.
        length: u32,
        /// Largest payload of the export, bytes.
        max: u32,
    },
}

/// How the server refuses a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Discard [`Request::payload_len`] bytes, then reply with this error.
    Reply(ErrorCode),
    /// Close the connection.
    Close(RequestError),
}

/// Checks a request against the export and the negotiation. [`Command::Disconnect`] always passes.
///
/// The range of a valid request is inside the export, aligned and not empty; FLUSH and DISC have no
/// range. The request has only flags that the server announced for its command; FUA, once
/// announced, is allowed on every command, and flags of DISC are not checked. If the request moves
/// data, it moves at most `block_size_max` bytes. TRIM, WRITE_ZEROES, CACHE and BLOCK_STATUS may be
/// as long as the export.
///
/// # Errors
/// Returns the error code with which the server refuses the request. The error codes follow the
/// section "Error values" of the specification and existing servers: EPERM first on a read-only
/// export, ENOSPC for writes past the end, EOVERFLOW for an unfragmented READ that is too long,
/// EINVAL otherwise.
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

/// Returns true if the server announced the command and each of its flags to this client. FUA, once
/// announced, is allowed on every command, and flags of DISC are not checked. Equivalent to
/// [`ExportInfo::transmission_flags`](crate::ExportInfo::transmission_flags), without building the
/// flags per request. A test compares the two. Write commands on read-only exports were refused
/// before.
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
        // FUA is allowed on every command once announced, because existing clients set it on reads
        // too.
        flags = flags | CommandFlags::FUA;
    }
    command_offered && request.flags.without(flags) == CommandFlags::NONE
}

#[inline]
fn check_range(request: &Request, negotiated: &Negotiated) -> Result<(), ErrorCode> {
    let info = &negotiated.info;
    // Negotiation refuses a minimum that is not a power of two. If the caller changed the minimum
    // afterwards, no request counts as aligned: a mask computed from an invalid minimum would
    // accept misaligned requests.
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
