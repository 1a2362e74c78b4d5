//! The socket to an NBD server before the I/O ring uses it: TCP or Unix, blocking or not.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::gate::ReplaceableGate;
use crate::ring::Gate;

/// A connected stream socket. It sends nothing while its gate is closed: a write fails with
/// [`WouldBlock`](io::ErrorKind::WouldBlock).
#[derive(Debug)]
pub struct Socket {
    stream: Stream,
    gate: Arc<ReplaceableGate>,
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl From<TcpStream> for Socket {
    fn from(stream: TcpStream) -> Socket {
        Socket { stream: Stream::Tcp(stream), gate: Arc::default() }
    }
}

impl From<UnixStream> for Socket {
    fn from(stream: UnixStream) -> Socket {
        Socket { stream: Stream::Unix(stream), gate: Arc::default() }
    }
}

impl Socket {
    pub(super) fn gate(&self) -> &Arc<ReplaceableGate> {
        &self.gate
    }

    /// Sets the timeout of reads and writes to the time until `deadline`.
    ///
    /// # Errors
    /// Returns a sentence for users if `deadline` has passed or the socket is unusable.
    pub fn wait_until(&self, deadline: Instant) -> Result<(), String> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(LATE.to_owned());
        }
        self.set_timeout(Some(left)).map_err(|error| error.to_string())
    }

    /// Makes reads and writes wait without limit.
    pub(super) fn wait_forever(&self) -> Result<(), String> {
        self.set_timeout(None).map_err(|error| error.to_string())
    }

    fn set_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        match &self.stream {
            Stream::Tcp(stream) => {
                stream.set_read_timeout(limit).and_then(|()| stream.set_write_timeout(limit))
            }
            Stream::Unix(stream) => {
                stream.set_read_timeout(limit).and_then(|()| stream.set_write_timeout(limit))
            }
        }
    }

    pub(super) fn set_nonblocking(&self) -> io::Result<()> {
        match &self.stream {
            Stream::Tcp(stream) => stream.set_nonblocking(true),
            Stream::Unix(stream) => stream.set_nonblocking(true),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.stream {
            Stream::Tcp(stream) => stream.read(into),
            Stream::Unix(stream) => stream.read(into),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.gate.is_open() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        match &mut self.stream {
            Stream::Tcp(stream) => stream.write(bytes),
            Stream::Unix(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.stream {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream) => stream.as_fd(),
        }
    }
}

impl From<Socket> for OwnedFd {
    fn from(socket: Socket) -> OwnedFd {
        match socket.stream {
            Stream::Tcp(stream) => stream.into(),
            Stream::Unix(stream) => stream.into(),
        }
    }
}

/// Message for a server that does not answer before the deadline.
pub(super) const LATE: &str = "the server does not answer in time";

/// Returns the message for a read or write that failed.
pub fn in_time(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => LATE.to_owned(),
        _ => error.to_string(),
    }
}
