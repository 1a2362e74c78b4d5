//! A connection for one thread that checks every answer: it sends and receives on request.
//!
//! For load that is checked byte by byte, while [`Connection::run`] only measures latencies. The caller
//! limits the data in flight, so that neither end waits for the other to take what it sends: a mebibyte
//! each way is fine.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io::{self, Read, Write};
use std::time::Duration;

use hob_nbd::client::handshake::Negotiated;
use hob_nbd::client::reply::{Expected, ReplyDecoder, ReplyEvent, ReplyLimits};
use hob_nbd::client::request;
use hob_nbd::{Command, CommandFlags, ErrorCode};

use super::connection::{Connection, Stream};

const RECEIVE_BYTES: usize = 256 << 10;

/// A request. Offsets and lengths are bytes, and must suit the negotiated export.
#[derive(Clone, Copy, Debug)]
pub enum Ask<'a> {
    /// Read.
    Read {
        /// From here.
        offset: u64,
        /// So much.
        len: u32,
    },
    /// Write.
    Write {
        /// To here.
        offset: u64,
        /// These bytes.
        data: &'a [u8],
        /// True to answer only when they are durable.
        fua: bool,
    },
    /// Write zeroes, which may become a hole.
    WriteZeroes {
        /// To here.
        offset: u64,
        /// So many.
        len: u32,
        /// True to answer only when they are durable.
        fua: bool,
    },
    /// Make everything durable that was answered before.
    Flush,
}

/// The server's answer to a request.
#[derive(Debug)]
pub struct Answer {
    /// The value that [`Dialogue::send`] returned.
    pub cookie: u64,
    /// The error, if the request failed.
    pub error: Option<ErrorCode>,
    /// What was read.
    pub data: Vec<u8>,
}

/// Why there will be no more answers.
#[derive(Debug)]
pub enum Lost {
    /// The server closed the connection.
    Closed,
    /// The server sent nothing for the timeout of [`Dialogue::open`].
    Silent(Duration),
    /// The server's data is not valid NBD.
    Broken(String),
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lost::Closed => f.write_str("the server closed the connection"),
            Lost::Silent(time) => write!(f, "the server has not answered for {} s", time.as_secs()),
            Lost::Broken(what) => write!(f, "the server broke the protocol: {what}"),
        }
    }
}

impl std::error::Error for Lost {}

/// A request in flight.
struct Asked {
    expected: Expected,
    data: Vec<u8>,
}

/// A connection; see the module documentation.
pub struct Dialogue {
    stream: Stream,
    negotiated: Negotiated,
    decoder: ReplyDecoder,
    silence_max: Duration,
    flight: BTreeMap<u64, Asked>,
    next_cookie: u64,
    /// Received bytes that were not parsed yet.
    arrived: Vec<u8>,
    /// Destination of the next payload: a request, and the offset in its data.
    filling: Option<(u64, usize)>,
    answers: VecDeque<Answer>,
}

impl Dialogue {
    /// Takes over a connection without earlier requests. `silence_max` is the timeout of an awaited answer.
    ///
    /// # Errors
    /// The socket's.
    pub fn open(connection: Connection, silence_max: Duration) -> io::Result<Dialogue> {
        let Connection { stream, negotiated, early } = connection;
        stream.set_read_timeout(Some(silence_max))?;
        let decoder = ReplyDecoder::new(&negotiated, ReplyLimits::default());
        Ok(Dialogue {
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

    /// Returns the number of requests without a received answer.
    pub fn in_flight(&self) -> usize {
        self.flight.len() + self.answers.len()
    }

    /// Sends a request and returns its cookie.
    ///
    /// # Errors
    /// [`Lost::Closed`] for any error of the socket.
    pub fn send(&mut self, ask: Ask<'_>) -> Result<u64, Lost> {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let flags = |fua| if fua { CommandFlags::FUA } else { CommandFlags::NONE };
        let (command, offset, length) = match ask {
            Ask::Read { offset, len } => (Command::Read, offset, len),
            Ask::Write { offset, data, .. } => (Command::Write, offset, data.len() as u32),
            Ask::WriteZeroes { offset, len, .. } => (Command::WriteZeroes, offset, len),
            Ask::Flush => (Command::Flush, 0, 0),
        };
        let mut bytes = match ask {
            Ask::Read { .. } => request::read(cookie, offset, length, CommandFlags::NONE),
            Ask::Write { fua, .. } => request::write_header(cookie, offset, length, flags(fua)),
            Ask::WriteZeroes { fua, .. } => request::write_zeroes(cookie, offset, length, flags(fua)),
            Ask::Flush => request::flush(cookie),
        }
        .to_vec();
        if let Ask::Write { data, .. } = ask {
            bytes.extend_from_slice(data);
        }
        let data = if command == Command::Read { vec![0; length as usize] } else { Vec::new() };
        self.flight.insert(cookie, Asked { expected: Expected { command, offset, length }, data });
        (&self.stream).write_all(&bytes).map_err(|_| Lost::Closed)?;
        Ok(cookie)
    }

    /// Returns the next answer, in the server's order.
    ///
    /// # Errors
    /// [`Lost`].
    ///
    /// # Panics
    /// If no request is in flight.
    pub fn receive(&mut self) -> Result<Answer, Lost> {
        assert!(self.in_flight() > 0, "no answer without a question");
        let mut bytes = vec![0; RECEIVE_BYTES];
        loop {
            self.digest()?;
            if let Some(answer) = self.answers.pop_front() {
                return Ok(answer);
            }
            match (&self.stream).read(&mut bytes) {
                Ok(0) => return Err(Lost::Closed),
                Ok(count) => self.arrived.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Err(Lost::Silent(self.silence_max));
                }
                Err(_) => return Err(Lost::Closed),
            }
        }
    }

    /// Parses the received bytes as far as possible.
    fn digest(&mut self) -> Result<(), Lost> {
        let arrived = std::mem::take(&mut self.arrived);
        let mut rest = &arrived[..];
        loop {
            let flight = &self.flight;
            let in_flight = |cookie| flight.get(&cookie).map(|asked| asked.expected);
            let used = self
                .decoder
                .handle_input(rest, &in_flight)
                .map_err(|error| Lost::Broken(error.to_string()))?;
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
            // The data buffer is zeroed at the start.
            ReplyEvent::Hole { .. } | ReplyEvent::BlockStatus { .. } | ReplyEvent::Error { .. } => {}
            ReplyEvent::Done { cookie, error } => {
                let Asked { data, .. } =
                    self.flight.remove(&cookie).expect("the decoder answers only what is in flight");
                self.answers.push_back(Answer { cookie, error, data });
            }
        }
    }

    /// Sends DISC; nothing may be in flight.
    pub fn close(self) {
        // Optional: the connection ends whether or not the server receives it.
        let _ = (&self.stream).write_all(&request::disconnect());
    }
}
