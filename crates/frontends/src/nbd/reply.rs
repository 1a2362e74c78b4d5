//! Encodes the NBD replies to completed commands into the outbox.

use hob_engine::io::{BufferSlice, IoError};
use hob_engine::units::SECTOR_BYTES;
use hob_nbd::server::handshake::{BASE_ALLOCATION_ID, CONTEXTS_ID};
use hob_nbd::server::reply::{self, Position};
use hob_nbd::{Command, CommandFlags, ErrorCode, Extent};

use super::command::InFlight;
use super::{Connection, Payload, Status, error_code};

/// Encodes the reply to a command that the engine completed.
pub(super) fn push(
    connection: &mut Connection,
    command: &InFlight,
    result: Result<(), IoError>,
    payload: &mut impl Payload,
) {
    match (result, command.reply_buffer) {
        (Ok(()), Some(id)) => {
            push_data(connection, command, payload);
            connection.outbox_buffers.push(id);
            connection.outbox_bytes += command.buffer_bytes;
            connection.held_bytes += command.buffer_bytes;
        }
        (Ok(()), None) => {
            connection.outbox.push_head(|head| reply::push_simple_ok(head, command.header.cookie));
        }
        (Err(error), buffer) => {
            buffer.into_iter().for_each(|id| payload.release(id));
            push_error(connection, &command.header, error_code(error));
        }
    }
}

/// Adds the error reply to a request to the connection's outbox.
pub(super) fn push_error(connection: &mut Connection, request: &hob_nbd::Request, code: ErrorCode) {
    let chunked = connection.negotiated.structured_replies
        && matches!(request.command, Command::Read | Command::BlockStatus);
    connection.outbox.push_head(|head| {
        if chunked {
            reply::push_error(head, request.cookie, code, "", Position::Last);
        } else {
            reply::push_simple_error(head, request.cookie, code);
        }
    });
}

/// Adds the reply to a BLOCK_STATUS request to the connection's outbox.
pub(super) fn push_status(
    connection: &mut Connection,
    command: &InFlight,
    status: Result<Status<'_>, IoError>,
) {
    let header = &command.header;
    let Status { allocation, maps } = match status {
        Ok(status) => status,
        Err(error) => return push_error(connection, header, error_code(error)),
    };
    let Connection { negotiated, outbox, .. } = &mut *connection;
    let allocation = negotiated.base_allocation.then_some((BASE_ALLOCATION_ID, allocation));
    let maps = (CONTEXTS_ID..).zip(maps.iter().map(Vec::as_slice));
    let contexts: Vec<(u32, &[Extent])> = allocation.into_iter().chain(maps).collect();
    let wanted = usize::from(negotiated.base_allocation) + negotiated.contexts.len();
    if contexts.len() != wanted || contexts.iter().any(|(_, extents)| extents.is_empty()) {
        return push_error(connection, header, ErrorCode::Io);
    }
    for (nth, (id, extents)) in contexts.into_iter().enumerate() {
        let count = if header.flags.contains(CommandFlags::REQ_ONE) { 1 } else { extents.len() };
        let position = if nth + 1 == wanted { Position::Last } else { Position::More };
        outbox.push_head(|head| {
            reply::push_block_status(head, header.cookie, id, &extents[..count], position);
        });
    }
}

fn push_data(connection: &mut Connection, command: &InFlight, payload: &impl Payload) {
    let cookie = command.header.cookie;
    let data = command.payload_slice();
    let outbox = &mut connection.outbox;
    if !connection.negotiated.structured_replies {
        outbox.push_head(|head| reply::push_simple_ok(head, cookie));
        outbox.push_payload(data);
        return;
    }
    let whole = command.header.flags.contains(CommandFlags::DF);
    let offset = command.header.offset;
    for run in Runs::new(data, payload.bytes(data), whole) {
        let start = offset + u64::from(run.slice.offset - data.offset);
        let last = run.slice.offset + run.slice.len == data.offset + data.len;
        let position = if last { Position::Last } else { Position::More };
        if run.is_hole {
            outbox.push_head(|head| reply::push_hole(head, cookie, start, run.slice.len, position));
        } else {
            outbox.push_head(|head| reply::push_data_header(head, cookie, start, run.slice.len, position));
            outbox.push_payload(run.slice);
        }
    }
}

/// A part of a read's data that becomes one reply chunk.
struct Run {
    slice: BufferSlice,
    is_hole: bool,
}

/// Splits a read's data into runs of zero sectors and other sectors. Zero runs are sent as holes,
/// so that copies stay sparse and zeroes are not transferred.
struct Runs<'a> {
    rest: BufferSlice,
    bytes: &'a [u8],
    whole: bool,
}

impl<'a> Runs<'a> {
    fn new(rest: BufferSlice, bytes: &'a [u8], whole: bool) -> Self {
        Runs { rest, bytes, whole }
    }

    /// Returns the bytes up to the disk's next sector boundary, and whether they are zero.
    fn sector_at(&self, at: u32) -> (u32, bool) {
        let inside = u64::from(self.rest.offset + at) % SECTOR_BYTES;
        let len = ((SECTOR_BYTES - inside) as u32).min(self.rest.len - at);
        let sector = &self.bytes[at as usize..][..len as usize];
        (len, u64::from(len) == SECTOR_BYTES && is_zero(sector))
    }
}

impl Iterator for Runs<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        if self.rest.len == 0 {
            return None;
        }
        let (mut len, is_hole) = match self.whole {
            true => (self.rest.len, false),
            false => self.sector_at(0),
        };
        while len < self.rest.len {
            let (more, also_hole) = self.sector_at(len);
            if also_hole != is_hole {
                break;
            }
            len += more;
        }
        let run = Run { slice: BufferSlice { len, ..self.rest }, is_hole };
        self.rest.offset += len;
        self.rest.len -= len;
        self.bytes = &self.bytes[len as usize..];
        Some(run)
    }
}

/// Returns true if a sector has only zero bytes.
fn is_zero(sector: &[u8]) -> bool {
    // Non-zero data nearly always differs in its first bytes, so they are compared first. If they are
    // zero, the sector is zero if each byte equals the one 16 bytes before it. The library compares
    // slices fast, also in a debug build, where a loop over bytes takes much of the time of a read.
    sector[..16] == [0; 16] && sector[16..] == sector[..sector.len() - 16]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_of_a_sector_counts() {
        let mut sector = [0; SECTOR_BYTES as usize];
        assert!(is_zero(&sector));
        for at in 0..sector.len() {
            sector[at] = 1;
            assert!(!is_zero(&sector), "{at}");
            sector[at] = 0;
        }
        assert!(!is_zero(&[7; SECTOR_BYTES as usize]));
    }
}
