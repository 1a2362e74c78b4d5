//! NBD connection for a single thread. The thread decides when to send and when to receive.
//!
//! The client returns the data of every read, so that a caller can check it; [`Connection::run`]
//! only measures latencies. The caller must limit the data in flight to about 1 MiB in each
//! direction. With more data, client and server could deadlock, each waiting for the other to read.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};
use std::time::Duration;

use hob_nbd::client::handshake::Negotiated;
use hob_nbd::client::reply::{Expected, ReplyDecoder, ReplyEvent, ReplyLimits};
use hob_nbd::client::request;
use hob_nbd::{Command, CommandFlags, ErrorCode};

use super::connection::{Connection, Stream};

const RECEIVE_BYTES: usize = 256 << 10;

/// A request. Offsets and lengths are in bytes and must fit the negotiated export.
#[derive(Clone, Copy, Debug)]
pub enum ClientRequest<'a> {
    /// Reads data.
    Read {
        /// Offset of the read.
        offset: u64,
        /// Length of the read.
        len: u32,
    },
    /// Writes data.
    Write {
        /// Offset of the write.
        offset: u64,
        /// Data to write.
        data: &'a [u8],
        /// True for FUA: the server replies only when the data is durable.
        fua: bool,
    },
    /// Writes zeroes. The server may deallocate the range.
    WriteZeroes {
        /// Offset of the zeroes.
        offset: u64,
        /// Number of zeroes.
        len: u32,
        /// True for FUA: the server replies only when the zeroes are durable.
        fua: bool,
    },
    /// Flushes: makes all acknowledged writes durable.
    Flush,
}

/// The server's reply to a request.
#[derive(Debug)]
pub struct ClientReply {
    /// Cookie that [`NbdClient::send`] returned for the request.
    pub cookie: u64,
    /// Error of a failed request.
    pub error: Option<ErrorCode>,
    /// Data of a read.
    pub data: Vec<u8>,
}

/// Reason why the connection delivers no more replies.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The server sent no data for the timeout of [`NbdClient::open`].
    #[error("the server has not answered for {} s", .0.as_secs())]
    Silent(Duration),
    /// The server's data is not valid NBD.
    #[error("the server broke the protocol: {0}")]
    Broken(String),
}

struct Asked {
    expected: Expected,
    data: Vec<u8>,
}

/// NBD connection for a single thread; see the module documentation.
pub struct NbdClient {
    stream: Stream,
    negotiated: Negotiated,
    decoder: ReplyDecoder,
    silence_max: Duration,
    flight: BTreeMap<u64, Asked>,
    next_cookie: u64,
    /// Received bytes that are not parsed yet.
    arrived: Vec<u8>,
    /// Destination of the next received payload: the cookie of the request, and the offset in the
    /// request's data.
    filling: Option<(u64, usize)>,
    answers: VecDeque<ClientReply>,
}

impl NbdClient {
    /// Takes over a connection on which no request was sent yet. `silence_max` is the maximum time
    /// for which [`NbdClient::receive`] waits without receiving data.
    ///
    /// # Errors
    /// Returns errors of the socket.
    pub fn open(connection: Connection, silence_max: Duration) -> io::Result<NbdClient> {
        let Connection { stream, negotiated, early } = connection;
        stream.set_read_timeout(Some(silence_max))?;
        let decoder = ReplyDecoder::new(&negotiated, ReplyLimits::default());
        Ok(NbdClient {
            stream,
            negotiated,
            decoder,
            silence_max,
            flight: BTreeMap::new(),
            next_cookie: 0,
            arrived: early,
            filling: None,
            answers: VecDeque::new(),
        })
    }

    /// Returns the server's description of the export.
    pub fn negotiated(&self) -> &Negotiated {
        &self.negotiated
    }

    /// Returns the number of requests whose reply the caller has not received.
    pub fn in_flight(&self) -> usize {
        self.flight.len() + self.answers.len()
    }

    /// Sends a request and returns its cookie.
    ///
    /// # Errors
    /// Returns [`ConnectionError::Closed`] for any error of the socket.
    pub fn send(&mut self, wanted: ClientRequest<'_>) -> Result<u64, ConnectionError> {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let flags = |fua| if fua { CommandFlags::FUA } else { CommandFlags::NONE };
        let (command, offset, length) = match wanted {
            ClientRequest::Read { offset, len } => (Command::Read, offset, len),
            ClientRequest::Write { offset, data, .. } => (Command::Write, offset, data.len() as u32),
            ClientRequest::WriteZeroes { offset, len, .. } => (Command::WriteZeroes, offset, len),
            ClientRequest::Flush => (Command::Flush, 0, 0),
        };
        let mut bytes = match wanted {
            ClientRequest::Read { .. } => request::read(cookie, offset, length, CommandFlags::NONE),
            ClientRequest::Write { fua, .. } => request::write_header(cookie, offset, length, flags(fua)),
            ClientRequest::WriteZeroes { fua, .. } => {
                request::write_zeroes(cookie, offset, length, flags(fua))
            }
            ClientRequest::Flush => request::flush(cookie),
        }
        .to_vec();
        if let ClientRequest::Write { data, .. } = wanted {
            bytes.extend_from_slice(data);
        }
        let data = if command == Command::Read { vec![0; length as usize] } else { Vec::new() };
        self.flight.insert(cookie, Asked { expected: Expected { command, offset, length }, data });
        (&self.stream).write_all(&bytes).map_err(|_| ConnectionError::Closed)?;
        Ok(cookie)
    }

    /// Returns the next reply, in the server's order.
    ///
    /// # Errors
    /// Returns [`ConnectionError`] if the connection delivers no more replies.
    ///
    /// # Panics
    /// Panics if no request is in flight.
    pub fn receive(&mut self) -> Result<ClientReply, ConnectionError> {
        assert!(self.in_flight() > 0, "no answer without a question");
        let mut bytes = vec![0; RECEIVE_BYTES];
        loop {
            self.digest()?;
            if let Some(answer) = self.answers.pop_front() {
                return Ok(answer);
            }
            match (&self.stream).read(&mut bytes) {
                Ok(0) => return Err(ConnectionError::Closed),
                Ok(count) => self.arrived.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Err(ConnectionError::Silent(self.silence_max));
                }
                Err(_) => return Err(ConnectionError::Closed),
            }
        }
    }

    /// Parses as many received bytes as possible.
    fn digest(&mut self) -> Result<(), ConnectionError> {
        let arrived = std::mem::take(&mut self.arrived);
        let mut rest = &arrived[..];
        loop {
            let flight = &self.flight;
            let in_flight = |cookie| flight.get(&cookie).map(|asked| asked.expected);
            let used = self
                .decoder
                .handle_input(rest, &in_flight)
                .map_err(|error| ConnectionError::Broken(error.to_string()))?;
            rest = &rest[used..];
            let mut progressed = used > 0;
            while let Some(event) = self.decoder.poll_event() {
                progressed = true;
                self.take(event);
            }
            let payload = (self.decoder.payload_pending() as usize).min(rest.len());
            if let (Some((cookie, at)), 1..) = (&mut self.filling, payload) {
                let asked = self.flight.get_mut(cookie).expect("payload belongs to a request in flight");
                asked.data[*at..*at + payload].copy_from_slice(&rest[..payload]);
                *at += payload;
            }
            self.decoder.payload_received(payload as u32);
            rest = &rest[payload..];
            if !progressed && payload == 0 {
                self.arrived = rest.to_vec();
                return Ok(());
            }
        }
    }

    fn take(&mut self, event: ReplyEvent) {
        match event {
            ReplyEvent::Data { cookie, offset, .. } => {
                let asked = &self.flight[&cookie];
                self.filling = Some((cookie, (offset - asked.expected.offset) as usize));
            }
            // The data buffer starts with zeroes.
            ReplyEvent::Hole { .. } | ReplyEvent::BlockStatus { .. } | ReplyEvent::Error { .. } => {}
            ReplyEvent::Done { cookie, error } => {
                let Asked { data, .. } =
                    self.flight.remove(&cookie).expect("the decoder answers only what is in flight");
                self.answers.push_back(ClientReply { cookie, error, data });
            }
        }
    }

    /// Sends NBD_CMD_DISC. No request may be in flight.
    pub fn close(self) {
        // Sending is optional: the connection ends even if the server does not receive the command.
        let _ = (&self.stream).write_all(&request::disconnect());
    }
}
