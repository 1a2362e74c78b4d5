//! Single reads, writes, flushes and status queries of an NBD export from threads that may block:
//! one request at a time, with blocking sockets. These calls are used for remote pool devices, and
//! for a backing that is being opened.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use hob_engine::io::IoError;
use hob_nbd::Command;
use hob_nbd::client::reply::{Expected, ReplyDecoder, ReplyEvent, ReplyLimits};
use hob_nbd::client::request;
use hob_nbd::{CommandFlags, ErrorCode, Extent};
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::connect::{Link, connect};
use super::exchange::io_error;
use super::{NbdBacking, State, silence_max};

/// Cookie of the only request in flight.
const COOKIE: u64 = 1;

/// Why a request of this module failed.
#[derive(Debug)]
pub(crate) enum SampleError {
    /// The server returned an error, and the connection is usable.
    Refused(IoError),
    /// The connection is broken and cannot be used any more. The text says why.
    Broken(String),
}

/// Reads from `offset` into `bytes` within `limit`, with one request. The caller has checked range
/// and alignment.
pub(crate) fn read(link: &Link, offset: u64, bytes: &mut [u8], limit: Duration) -> Result<(), SampleError> {
    let len = bytes.len() as u32;
    let request = request::read(COOKIE, offset, len, CommandFlags::NONE);
    let expected = Expected { command: Command::Read, offset, length: len };
    ask(link, [&request, &[]], expected, Destination { bytes, extents: None }, limit)
}

/// Writes `bytes` at `offset` within `limit`. The next [`flush`] makes them durable.
pub(crate) fn write(link: &Link, offset: u64, bytes: &[u8], limit: Duration) -> Result<(), SampleError> {
    let len = bytes.len() as u32;
    let request = request::write_header(COOKIE, offset, len, CommandFlags::NONE);
    let expected = Expected { command: Command::Write, offset, length: len };
    ask(link, [&request, bytes], expected, Destination::default(), limit)
}

/// Flushes the server within `limit`.
pub(crate) fn flush(link: &Link, limit: Duration) -> Result<(), SampleError> {
    let expected = Expected { command: Command::Flush, offset: 0, length: 0 };
    ask(link, [&request::flush(COOKIE), &[]], expected, Destination::default(), limit)
}

/// Returns the extents of the connection's metadata context from `offset` on, within `limit`. The
/// extents may end before or after the range of `len` bytes. The caller has checked that the server
/// has the context.
pub(super) fn block_status(
    link: &Link,
    offset: u64,
    len: u32,
    limit: Duration,
) -> Result<Vec<Extent>, SampleError> {
    let request = request::block_status(COOKIE, offset, len, CommandFlags::NONE);
    let expected = Expected { command: Command::BlockStatus, offset, length: len };
    let mut extents = Vec::new();
    let destination = Destination { bytes: &mut [], extents: Some(&mut extents) };
    ask(link, [&request, &[]], expected, destination, limit)?;
    Ok(extents)
}

/// Place for the content of a reply.
#[derive(Default)]
struct Destination<'a> {
    /// Place for the data of a read.
    bytes: &'a mut [u8],
    /// Place for the extents of a status query.
    extents: Option<&'a mut Vec<Extent>>,
}

fn ask(
    link: &Link,
    parts: [&[u8]; 2],
    expected: Expected,
    destination: Destination<'_>,
    limit: Duration,
) -> Result<(), SampleError> {
    let result = exchange(link, parts, expected, destination, Instant::now() + limit);
    let forever = [Timeout::Recv, Timeout::Send].map(|side| set_socket_timeout(&link.socket, side, None));
    match result {
        Ok(result) => {
            forever
                .into_iter()
                .collect::<Result<(), _>>()
                .map_err(|errno| SampleError::Broken(errno.to_string()))?;
            result.map_err(SampleError::Refused)
        }
        Err(why) => Err(SampleError::Broken(why)),
    }
}

/// Sends one request with its payload, and receives its reply. The outer error means that the
/// connection is broken.
fn exchange(
    link: &Link,
    parts: [&[u8]; 2],
    expected: Expected,
    destination: Destination<'_>,
    deadline: Instant,
) -> Result<Result<(), IoError>, String> {
    let Destination { bytes, mut extents } = destination;
    for mut part in parts {
        while !part.is_empty() {
            set_timeout(&link.socket, Timeout::Send, deadline)?;
            match rustix::net::send(&link.socket, part, rustix::net::SendFlags::NOSIGNAL) {
                Ok(count) => part = &part[count..],
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.to_string()),
            }
        }
    }
    let offset = expected.offset;
    let mut decoder = ReplyDecoder::new(&link.negotiated, ReplyLimits::default());
    let expected = |cookie| (cookie == COOKIE).then_some(expected);
    let mut input = vec![0; 64 << 10];
    let (mut from, mut to) = (0, 0);
    let mut place = 0;
    loop {
        match decoder.poll_event() {
            Some(ReplyEvent::Data { offset: at, .. }) => place = (at - offset) as usize,
            Some(ReplyEvent::Hole { offset: at, length, .. }) => {
                bytes[(at - offset) as usize..][..length as usize].fill(0);
            }
            Some(ReplyEvent::Done { .. }) if from < to => {
                return Err("the server replied to an unknown request".into());
            }
            Some(ReplyEvent::Done { error: Some(ErrorCode::Shutdown), .. }) => {
                return Err("the server shuts down".into());
            }
            Some(ReplyEvent::Done { error, .. }) => {
                return Ok(error.map_or(Ok(()), |code| Err(io_error(code))));
            }
            Some(ReplyEvent::BlockStatus { extents: received, .. }) => {
                if let Some(extents) = &mut extents {
                    **extents = received;
                }
            }
            Some(ReplyEvent::Error { .. }) => {}
            None if from == to => {
                set_timeout(&link.socket, Timeout::Recv, deadline)?;
                match rustix::io::read(&link.socket, &mut input[..]) {
                    Ok(0) => return Err("the server closed the connection".into()),
                    Ok(count) => (from, to) = (0, count),
                    Err(rustix::io::Errno::INTR) => {}
                    Err(errno) => return Err(errno.to_string()),
                }
            }
            None if decoder.payload_pending() > 0 => {
                let count = (decoder.payload_pending() as usize).min(to - from);
                bytes[place..place + count].copy_from_slice(&input[from..from + count]);
                decoder.payload_received(count as u32);
                (from, place) = (from + count, place + count);
            }
            None => {
                let consumed = decoder.handle_input(&input[from..to], &expected);
                from += consumed.map_err(|error| error.to_string())?;
            }
        }
    }
}

fn set_timeout(socket: &OwnedFd, side: Timeout, deadline: Instant) -> Result<(), String> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err("the server did not answer in time".into());
    }
    set_socket_timeout(socket, side, Some(left)).map_err(|errno| errno.to_string())
}

impl NbdBacking {
    /// Reads over the connection, which is not attached yet. If the read fails, opens a new
    /// connection and tries again.
    pub(super) fn read_sample(
        &mut self,
        offset: u64,
        bytes: &mut [u8],
        limit: Duration,
    ) -> Result<(), IoError> {
        let State::Detached(link) = &mut self.state else { return Err(IoError::Failed) };
        let mut result = read(link, offset, bytes, limit);
        if let Err(SampleError::Broken(why)) = &result {
            tracing::warn!(
                backing = self.info.description,
                why,
                "the connection to the backing was lost; connecting again"
            );
            // Shutting the old connection down ensures that it is not used again.
            let _ = rustix::net::shutdown(&link.socket, rustix::net::Shutdown::Both);
            let again = connect(&self.uri, limit, silence_max(&self.options));
            match again {
                Ok(again) if again.negotiated.size_bytes == self.info.size_bytes => *link = again,
                _ => return Err(IoError::Failed),
            }
            result = read(link, offset, bytes, limit);
        }
        result.map_err(|error| match error {
            SampleError::Refused(error) => error,
            SampleError::Broken(_) => {
                let _ = rustix::net::shutdown(&link.socket, rustix::net::Shutdown::Both);
                IoError::Failed
            }
        })
    }
}
