//! Decodes replies of an NBD server while they arrive.
//!
//! One [`ReplyDecoder`] per connection turns bytes into events, which are the same for simple and
//! structured replies. Payload does not pass through the decoder: [`ReplyEvent::Data`] says how
//! many of the next bytes are payload. The caller takes the payload from its receive buffer, or
//! receives the payload directly into its destination.
//!
//! Each of these errors of the server ends the connection: wrong magic numbers, unknown cookies,
//! chunks of the wrong type, data outside the request or sent twice, an incomplete READ, extents
//! beyond the request, and inconsistent lengths. Offsets and lengths are in bytes.
//!
//! Memory: 64 KiB for an error message; for BLOCK_STATUS, 8 bytes per extent up to
//! [`ReplyLimits::extents_max`]; and the received intervals of each READ whose reply is incomplete.

use std::collections::BTreeMap;

use super::coverage::{Coverage, Misfit};
use super::handshake::Negotiated;
use crate::bytes::{Intake, Reader, readable};
use crate::request::Command;
use crate::wire::{
    CHUNK_HEADER_BYTES, CHUNK_MAGIC, ChunkHeader, ErrorCode, Extent, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC,
    chunk,
};

/// Minimum payload of an error chunk in bytes: 4 for the code, 2 for the message length.
const ERROR_BYTES_MIN: u32 = 6;
/// Maximum payload of an error chunk in bytes: with the longest message, and the 8-byte offset that
/// ERROR_OFFSET has.
const ERROR_BYTES_MAX: u32 = ERROR_BYTES_MIN + u16::MAX as u32 + 8;
/// Length of the magic number at the start of every reply header, bytes.
const MAGIC_BYTES: usize = 4;
const EXTENT_BYTES: usize = 8;
const KEPT_BYTES_MAX: usize = 4096;

/// A request in flight, with the properties that the reply decoder needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// The command of the request.
    pub command: Command,
    /// First byte of the request on the disk.
    pub offset: u64,
    /// Length of the request, bytes.
    pub length: u32,
}

/// The caller's table of requests in flight. Closures that return an [`Expected`] for a cookie
/// implement this trait too.
pub trait InFlight {
    /// Returns the request with this cookie. `None` ends the connection.
    fn find(&self, cookie: u64) -> Option<Expected>;
}

impl<F: Fn(u64) -> Option<Expected>> InFlight for F {
    fn find(&self, cookie: u64) -> Option<Expected> {
        self(cookie)
    }
}

/// Limits on the memory of one reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplyLimits {
    /// Maximum number of extents in one BLOCK_STATUS reply.
    pub extents_max: usize,
}

impl Default for ReplyLimits {
    fn default() -> Self {
        // The NBD specification recommends this maximum for servers.
        Self { extents_max: 1 << 20 }
    }
}

/// One event of a server's reply. Every request ends with exactly one [`ReplyEvent::Done`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplyEvent {
    /// The next `length` bytes of the stream are the disk's bytes from `offset`. The caller takes
    /// these bytes and reports them with [`ReplyDecoder::payload_received`]. The range is inside
    /// the request and was not received before.
    Data {
        /// Cookie of the READ.
        cookie: u64,
        /// First byte of the data on the disk.
        offset: u64,
        /// Number of payload bytes that follow.
        length: u32,
    },
    /// This range of the disk reads as zeroes. The range is inside the request and was not received
    /// before.
    Hole {
        /// Cookie of the READ.
        cookie: u64,
        /// First byte of the hole on the disk.
        offset: u64,
        /// Length of the hole, bytes.
        length: u32,
    },
    /// Extents of the negotiated metadata context from the request's offset on. The list has at
    /// least one extent, and the last extent may reach past the request.
    BlockStatus {
        /// Cookie of the BLOCK_STATUS request.
        cookie: u64,
        /// Extents in order and without gaps.
        extents: Vec<Extent>,
    },
    /// The server reported an error. More events of the request may follow, and its `Done` carries
    /// the first error code.
    Error {
        /// Cookie of the request.
        cookie: u64,
        /// The error code.
        code: ErrorCode,
        /// The server's error message without control characters; often empty.
        message: String,
        /// First byte of the disk that the error concerns, if the server sent it.
        offset: Option<u64>,
    },
    /// The reply is complete and the cookie can be reused. After a READ without error, all data has
    /// arrived.
    Done {
        /// Cookie of the request.
        cookie: u64,
        /// `None` for success.
        error: Option<ErrorCode>,
    },
}

/// Why the connection must be closed. The outcomes of requests in flight are unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// The received bytes do not start with a reply's magic number.
    #[error("a reply starts with {0:#010x}, which is not an NBD magic number")]
    BadMagic(u32),
    /// No request in flight has this cookie.
    #[error("the server answered a request that is not in flight (cookie {0:#x})")]
    UnknownCookie(u64),
    /// The reply breaks the protocol.
    #[error("the server broke the NBD protocol in its reply to cookie {cookie:#x}: {what}")]
    Protocol {
        /// Cookie of the request.
        cookie: u64,
        /// Description of the error, for users.
        what: &'static str,
    },
}

/// State of a reply of which some chunks have arrived and some have not.
#[derive(Debug, Default)]
struct Progress {
    coverage: Coverage,
    error: Option<ErrorCode>,
    described: bool,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Magic,
    Simple,
    Header,
    Fixed(ChunkHeader, Expected),
    Extents { header: ChunkHeader, expected: Expected, left_bytes: u32 },
    Broken(ReplyError),
}

/// Decodes the replies of one connection.
///
/// Call order: [`handle_input`](Self::handle_input) with received bytes, then
/// [`poll_event`](Self::poll_event) until it returns `None`. While
/// [`payload_pending`](Self::payload_pending) is not zero, take that many bytes of the stream and
/// report them with [`payload_received`](Self::payload_received). Repeat. The decoder consumes
/// input only up to the next event. While the caller has not taken all events and payload, the
/// decoder consumes no input.
#[derive(Debug)]
pub struct ReplyDecoder {
    limits: ReplyLimits,
    structured_replies: bool,
    meta_context_id: Option<u32>,
    state: State,
    intake: Intake,
    extents: Vec<Extent>,
    progress: BTreeMap<u64, Progress>,
    event: Option<ReplyEvent>,
    done: Option<ReplyEvent>,
    payload_pending: u32,
}

impl ReplyDecoder {
    /// Creates a decoder for a connection with this negotiation result.
    pub fn new(negotiated: &Negotiated, limits: ReplyLimits) -> Self {
        Self {
            limits,
            structured_replies: negotiated.structured_replies,
            meta_context_id: negotiated.meta_context_id,
            state: State::Magic,
            intake: Intake::new(MAGIC_BYTES),
            extents: Vec::new(),
            progress: BTreeMap::new(),
            event: None,
            done: None,
            payload_pending: 0,
        }
    }

    /// Handles bytes from the server and returns how many were consumed.
    ///
    /// # Errors
    /// Returns an error if the server breaks the protocol. Every later call returns the same error.
    pub fn handle_input(&mut self, bytes: &[u8], in_flight: &dyn InFlight) -> Result<usize, ReplyError> {
        let mut rest = bytes;
        while self.is_idle() {
            if let State::Broken(error) = self.state {
                return Err(error);
            }
            if !self.intake.fill(&mut rest) {
                break;
            }
            if let Err(error) = self.advance(in_flight) {
                self.state = State::Broken(error);
                return Err(error);
            }
        }
        Ok(bytes.len() - rest.len())
    }

    /// Returns the next event, in the order of the stream. A request's `Done` event follows its
    /// payload.
    pub fn poll_event(&mut self) -> Option<ReplyEvent> {
        if self.event.is_some() {
            return self.event.take();
        }
        if self.payload_pending > 0 {
            return None;
        }
        self.done.take()
    }

    /// Returns how many of the next bytes of the stream are payload of the latest
    /// [`ReplyEvent::Data`].
    #[inline]
    pub const fn payload_pending(&self) -> u32 {
        self.payload_pending
    }

    /// Reports that the caller took `bytes` of payload from the stream.
    ///
    /// # Panics
    /// Panics if `bytes` exceeds the pending payload, because the caller would have consumed a
    /// header.
    #[inline]
    pub const fn payload_received(&mut self, bytes: u32) {
        assert!(bytes <= self.payload_pending, "more payload was taken than the reply has");
        self.payload_pending -= bytes;
    }

    fn is_idle(&self) -> bool {
        self.event.is_none() && self.done.is_none() && self.payload_pending == 0
    }

    fn await_reply(&mut self) {
        self.state = State::Magic;
        self.intake.expect(MAGIC_BYTES);
    }

    /// Handles one complete message in the intake.
    fn advance(&mut self, in_flight: &dyn InFlight) -> Result<(), ReplyError> {
        match self.state {
            State::Magic => self.on_magic(),
            State::Simple => self.on_simple(in_flight),
            State::Header => self.on_header(in_flight),
            State::Fixed(header, expected) => {
                let payload = self.intake.take();
                self.on_fixed(header, expected, &payload)?;
                // Headers are frequent and small, so a buffer that an error message enlarged is
                // dropped.
                if payload.capacity() <= KEPT_BYTES_MAX {
                    self.intake.restore(payload);
                }
                match self.state {
                    State::Extents { .. } => self.intake.expect(EXTENT_BYTES),
                    _ => self.await_reply(),
                }
                Ok(())
            }
            State::Extents { header, expected, left_bytes } => self.on_extent(header, expected, left_bytes),
            State::Broken(error) => Err(error),
        }
    }

    fn on_magic(&mut self) -> Result<(), ReplyError> {
        let magic = Reader::new(self.intake.held()).u32().unwrap_or_default();
        let (state, length) = match magic {
            SIMPLE_REPLY_MAGIC => (State::Simple, SIMPLE_REPLY_BYTES),
            CHUNK_MAGIC => (State::Header, CHUNK_HEADER_BYTES),
            other => return Err(ReplyError::BadMagic(other)),
        };
        self.state = state;
        self.intake.expect_more(length - MAGIC_BYTES);
        Ok(())
    }

    fn on_simple(&mut self, in_flight: &dyn InFlight) -> Result<(), ReplyError> {
        let mut reader = Reader::new(&self.intake.held()[MAGIC_BYTES..]);
        let code = ErrorCode::from_wire(reader.u32().unwrap_or_default());
        let cookie = reader.u64().unwrap_or_default();
        let Expected { command, offset, length } =
            in_flight.find(cookie).ok_or(ReplyError::UnknownCookie(cookie))?;
        if self.progress.contains_key(&cookie) {
            return Err(broken(cookie, "a structured reply continues as a simple one"));
        }
        match (code, command) {
            (Some(code), _) => {
                self.event = Some(ReplyEvent::Error { cookie, code, message: String::new(), offset: None });
            }
            (None, Command::Read) if self.structured_replies => {
                return Err(broken(
                    cookie,
                    "a READ has a simple reply although structured replies were negotiated",
                ));
            }
            (None, Command::BlockStatus) => {
                return Err(broken(cookie, "a BLOCK_STATUS has a simple reply without extents"));
            }
            (None, Command::Read) if length > 0 => {
                self.event = Some(ReplyEvent::Data { cookie, offset, length });
                self.payload_pending = length;
            }
            (None, _) => {}
        }
        self.done = Some(ReplyEvent::Done { cookie, error: code });
        self.await_reply();
        Ok(())
    }

    fn on_header(&mut self, in_flight: &dyn InFlight) -> Result<(), ReplyError> {
        let Some(header) = ChunkHeader::decode(self.intake.held()) else {
            return Err(ReplyError::BadMagic(CHUNK_MAGIC));
        };
        let ChunkHeader { kind, cookie, length, .. } = header;
        let expected = in_flight.find(cookie).ok_or(ReplyError::UnknownCookie(cookie))?;
        if !self.structured_replies {
            return Err(broken(
                cookie,
                "the reply is structured although structured replies were not negotiated",
            ));
        }
        let extents = u64::from(length.saturating_sub(4) / 8);
        // Number of payload bytes to read before the chunk is handled, and true if the chunk's
        // length and the request's command fit the chunk's type.
        let (fixed, sound) = match kind {
            chunk::NONE => (0, length == 0 && is_last(header)),
            chunk::OFFSET_DATA => (8, length > 8 && expected.command == Command::Read),
            chunk::OFFSET_HOLE => (12, length == 12 && expected.command == Command::Read),
            chunk::BLOCK_STATUS => (
                4,
                expected.command == Command::BlockStatus
                    && length % 8 == 4
                    && (1..=self.limits.extents_max as u64).contains(&extents),
            ),
            _ if kind & chunk::ERROR_BIT != 0 => {
                (length as usize, (ERROR_BYTES_MIN..=ERROR_BYTES_MAX).contains(&length))
            }
            _ => return Err(broken(cookie, "a chunk has a type that was not negotiated")),
        };
        if !sound {
            return Err(broken(cookie, "a chunk does not match its request, or has a wrong length or flag"));
        }
        self.state = State::Fixed(header, expected);
        self.intake.expect(fixed);
        Ok(())
    }

    fn on_fixed(&mut self, header: ChunkHeader, expected: Expected, fixed: &[u8]) -> Result<(), ReplyError> {
        let cookie = header.cookie;
        let short = || broken(cookie, "a chunk is too short for its type");
        let mut reader = Reader::new(fixed);
        match header.kind {
            chunk::NONE => self.finish(cookie, expected),
            chunk::OFFSET_DATA => {
                let offset = reader.u64().ok_or_else(short)?;
                let length = header.length - 8;
                self.content(header, expected, offset, length)?;
                self.event = Some(ReplyEvent::Data { cookie, offset, length });
                self.payload_pending = length;
                Ok(())
            }
            chunk::OFFSET_HOLE => {
                let offset = reader.u64().ok_or_else(short)?;
                let length = reader.u32().ok_or_else(short)?;
                self.content(header, expected, offset, length)?;
                self.event = Some(ReplyEvent::Hole { cookie, offset, length });
                Ok(())
            }
            chunk::BLOCK_STATUS => {
                if Some(reader.u32().ok_or_else(short)?) != self.meta_context_id {
                    return Err(broken(
                        cookie,
                        "extents belong to a metadata context that was not negotiated",
                    ));
                }
                let progress = self.progress.entry(cookie).or_default();
                if std::mem::replace(&mut progress.described, true) {
                    return Err(broken(cookie, "extents of one metadata context are in two chunks"));
                }
                self.extents.clear();
                self.state = State::Extents { header, expected, left_bytes: expected.length };
                Ok(())
            }
            _ => {
                let code = reader.u32().ok_or_else(short)?;
                let code =
                    ErrorCode::from_wire(code).ok_or(broken(cookie, "an error chunk means success"))?;
                let length = reader.u16().ok_or_else(short)?;
                let message = readable(reader.bytes(usize::from(length)).ok_or_else(short)?);
                // Unknown error chunks start with the same fields. The decoder ignores the rest of
                // such a chunk.
                let offset = match header.kind {
                    chunk::ERROR_OFFSET => Some(reader.u64().ok_or_else(short)?),
                    _ => None,
                };
                self.progress.entry(cookie).or_default().error.get_or_insert(code);
                self.event = Some(ReplyEvent::Error { cookie, code, message, offset });
                if is_last(header) { self.finish(cookie, expected) } else { Ok(()) }
            }
        }
    }

    /// Records that `length` bytes of data or zeroes for a READ have arrived.
    fn content(
        &mut self,
        header: ChunkHeader,
        expected: Expected,
        offset: u64,
        length: u32,
    ) -> Result<(), ReplyError> {
        let cookie = header.cookie;
        let range = offset..offset.saturating_add(u64::from(length));
        let asked = expected.offset..expected.offset.saturating_add(u64::from(expected.length));
        if range.is_empty() || range.start < asked.start || range.end > asked.end {
            return Err(broken(cookie, "data or a hole is empty or outside the request"));
        }
        // Nearly every reply has one chunk, which needs no bookkeeping.
        if range == asked && is_last(header) && !self.progress.contains_key(&cookie) {
            self.done = Some(ReplyEvent::Done { cookie, error: None });
            return Ok(());
        }
        let coverage = &mut self.progress.entry(cookie).or_default().coverage;
        coverage.add(range.start, range.end).map_err(|misfit| match misfit {
            Misfit::Overlap => broken(cookie, "the same bytes were sent twice"),
            Misfit::TooScattered => broken(cookie, "the reply's chunks form too many separate ranges"),
        })?;
        if is_last(header) { self.finish(cookie, expected) } else { Ok(()) }
    }

    fn on_extent(
        &mut self,
        header: ChunkHeader,
        expected: Expected,
        left_bytes: u32,
    ) -> Result<(), ReplyError> {
        let cookie = header.cookie;
        let mut reader = Reader::new(self.intake.held());
        let length = reader.u32().unwrap_or_default();
        let state = reader.u32().unwrap_or_default();
        // The last extent may reach past the request, but no extent may begin there.
        if length == 0 || left_bytes == 0 {
            return Err(broken(cookie, "an extent is empty or begins after the request"));
        }
        self.extents.push(Extent { length, state });
        if self.extents.len() < (header.length as usize - 4) / EXTENT_BYTES {
            let left_bytes = left_bytes.saturating_sub(length);
            self.state = State::Extents { header, expected, left_bytes };
            self.intake.expect(EXTENT_BYTES);
            return Ok(());
        }
        let extents = std::mem::take(&mut self.extents);
        self.event = Some(ReplyEvent::BlockStatus { cookie, extents });
        self.await_reply();
        if is_last(header) { self.finish(cookie, expected) } else { Ok(()) }
    }

    /// Handles the end of a reply's last chunk.
    fn finish(&mut self, cookie: u64, expected: Expected) -> Result<(), ReplyError> {
        let progress = self.progress.remove(&cookie).unwrap_or_default();
        let Expected { command, offset, length } = expected;
        let complete = match command {
            Command::Read if length > 0 => {
                progress.coverage.is_exactly(offset, offset.saturating_add(u64::from(length)))
            }
            Command::BlockStatus => progress.described,
            _ => true,
        };
        if progress.error.is_none() && !complete {
            return Err(broken(cookie, "the reply ended with success before all data was sent"));
        }
        self.done = Some(ReplyEvent::Done { cookie, error: progress.error });
        Ok(())
    }
}

const fn is_last(header: ChunkHeader) -> bool {
    header.flags & chunk::FLAG_DONE != 0
}

const fn broken(cookie: u64, what: &'static str) -> ReplyError {
    ReplyError::Protocol { cookie, what }
}
