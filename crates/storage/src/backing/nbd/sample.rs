//! Reading and writing an export by threads that may wait: with blocking sockets, one request at a time.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use hob_engine::io::IoError;
use hob_nbd::Command;
use hob_nbd::client::reply::{Expected, ReplyDecoder, ReplyEvent, ReplyLimits};
use hob_nbd::client::request;
use hob_nbd::{CommandFlags, ErrorCode};
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::connect::Link;
use super::exchange::io_error;

/// The only request in flight.
const COOKIE: u64 = 1;

/// How a read failed.
#[derive(Debug)]
pub(crate) enum SampleError {
    /// The server said so; the connection is good.
    Refused(IoError),
    /// The connection is over. A sentence.
    Broken(String),
}

/// Fills `bytes` from `offset` on, within `limit`. Range and alignment are the caller's; it is one request.
pub(crate) fn read(link: &Link, offset: u64, bytes: &mut [u8], limit: Duration) -> Result<(), SampleError> {
    let len = bytes.len() as u32;
    let request = request::read(COOKIE, offset, len, CommandFlags::NONE);
    ask(link, [&request, &[]], Expected { command: Command::Read, offset, length: len }, bytes, limit)
}

/// Writes `bytes` from `offset` on, within `limit`; durable with the next [`flush`].
pub(crate) fn write(link: &Link, offset: u64, bytes: &[u8], limit: Duration) -> Result<(), SampleError> {
    let len = bytes.len() as u32;
    let request = request::write_header(COOKIE, offset, len, CommandFlags::NONE);
    ask(link, [&request, bytes], Expected { command: Command::Write, offset, length: len }, &mut [], limit)
}

/// Flushes the server within `limit`.
pub(crate) fn flush(link: &Link, limit: Duration) -> Result<(), SampleError> {
    let expected = Expected { command: Command::Flush, offset: 0, length: 0 };
    ask(link, [&request::flush(COOKIE), &[]], expected, &mut [], limit)
}

fn ask(
    link: &Link,
    parts: [&[u8]; 2],
    expected: Expected,
    bytes: &mut [u8],
    limit: Duration,
) -> Result<(), SampleError> {
    let result = exchange(link, parts, expected, bytes, Instant::now() + limit);
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

/// One request, of a header and its payload, and its reply; the outer error ends the connection.
fn exchange(
    link: &Link,
    parts: [&[u8]; 2],
    expected: Expected,
    bytes: &mut [u8],
    deadline: Instant,
) -> Result<Result<(), IoError>, String> {
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
                return Err("it replied to an unknown request".into());
            }
            Some(ReplyEvent::Done { error: Some(ErrorCode::Shutdown), .. }) => {
                return Err("it shuts down".into());
            }
            Some(ReplyEvent::Done { error, .. }) => {
                return Ok(error.map_or(Ok(()), |code| Err(io_error(code))));
            }
            Some(ReplyEvent::BlockStatus { .. } | ReplyEvent::Error { .. }) => {}
            None if from == to => {
                set_timeout(&link.socket, Timeout::Recv, deadline)?;
                match rustix::io::read(&link.socket, &mut input[..]) {
                    Ok(0) => return Err("it closed the connection".into()),
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
        return Err("it does not answer in time".into());
    }
    set_socket_timeout(socket, side, Some(left)).map_err(|errno| errno.to_string())
}
