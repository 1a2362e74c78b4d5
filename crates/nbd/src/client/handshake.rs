//! Client side of NBD negotiation.
//!
//! To connect, the client requests structured replies, then one metadata context, then the export
//! with GO. The context is `base:allocation` unless the caller names another. The server may refuse
//! structured replies and the context. If the server does not support GO, the client sends
//! EXPORT_NAME. To list exports, the client sends LIST and then ABORT. Only one option is in flight
//! at a time, so every reply has one meaning.
//!
//! With TLS, the client first sends STARTTLS. After the TLS handshake, the client
//! negotiates from the start, and ignores everything that the server sent before.
//!
//! The client refuses oldstyle servers, export sizes over 2^63 - 1 bytes and invalid block sizes.
//! The client also refuses replies to options that are not in flight, replies longer than
//! [`REPLY_BYTES_MAX`], and lists of exports that exceed [`LIST_BYTES_MAX`]. Lengths are in bytes.

use crate::bytes::{Intake, Reader, readable};
use crate::export::{EXPORT_NAME_BYTES_MAX, check_block_sizes};
use crate::wire::{
    BASE_ALLOCATION, DEFAULT_PAYLOAD_BYTES_MAX, EXPORT_NAME_ZEROES, INIT_MAGIC, OLDSTYLE_MAGIC, OPTION_MAGIC,
    OPTION_REPLY_HEADER_BYTES, OptionHeader, OptionReplyHeader, TransmissionFlags, handshake_flags, info,
    opt, rep,
};

/// Maximum length of a reply to an option, in bytes.
pub const REPLY_BYTES_MAX: u32 = 64 << 10;
/// Maximum number of replies to one option other than LIST.
pub const REPLIES_MAX: u32 = 64;
/// Maximum memory for a server's list of exports in bytes. Each listed export counts as 64 bytes
/// plus its text.
pub const LIST_BYTES_MAX: usize = 4 << 20;
const MAGICS_BYTES: usize = 16;
const LIST_ENTRY_BYTES: usize = 64;

/// Purpose of an NBD client connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Goal {
    /// Use the export with this name. An empty name is the server's default export.
    Connect(String),
    /// List the exports.
    List,
}

/// Result of the negotiation, with everything that the transmission phase needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Negotiated {
    /// Size of the export, bytes; at most 2^63 - 1.
    pub size_bytes: u64,
    /// Features of the export that the server announced.
    pub flags: TransmissionFlags,
    /// Offsets and lengths of requests must be multiples of this number of bytes, a power of two.
    pub block_size_min: u32,
    /// Request size that the server prefers; a power of two, bytes.
    pub block_size_preferred: u32,
    /// Maximum length of a READ or WRITE, bytes.
    pub block_size_max: u32,
    /// True if the server replies to READ in chunks.
    pub structured_replies: bool,
    /// Id of the requested metadata context in BLOCK_STATUS replies; `None` if the client must not
    /// send BLOCK_STATUS.
    pub meta_context_id: Option<u32>,
}

/// One export of a server's list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedExport {
    /// Name of the listed export.
    pub name: String,
    /// Description of the export; may be empty.
    pub description: String,
}

/// How negotiation ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandshakeOutcome {
    /// The server awaits the TLS handshake. If the server sent more bytes after its reply to
    /// STARTTLS, they were not encrypted, and the caller must end the connection. Otherwise the
    /// caller performs the TLS handshake and continues with [`Handshake::inside_tls`].
    StartTls,
    /// The client may send requests. Replies start with the first byte that `handle_input` did not
    /// consume.
    Connected(Negotiated),
    /// The server listed its exports. The caller closes the connection.
    Listed(Vec<ListedExport>),
    /// The negotiation failed. The caller closes the connection.
    Failed(HandshakeError),
}

/// Why the negotiation with a server failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The peer is not an NBD server.
    #[error("this is not an NBD server; check the address and port")]
    NotNbd,
    /// The server speaks oldstyle NBD only, from before 2012.
    #[error("the server speaks oldstyle NBD only; upgrade it, or export the disk with qemu-nbd or nbdkit")]
    Oldstyle,
    /// The export's name is too long for the protocol.
    #[error("the export name has {0} bytes; NBD allows at most 4096")]
    NameTooLong(usize),
    /// The server cannot list exports, because it does not support fixed newstyle.
    #[error("the server does not support listing its exports; name the export instead")]
    CannotList,
    /// The export does not exist, or this client may not see it.
    #[error("the server has no export named {name:?}; list the names with `nbdinfo --list`: {message}")]
    UnknownExport {
        /// Name of the requested export.
        name: String,
        /// The server's error message; may be empty.
        message: String,
    },
    /// The server requires TLS.
    #[error("the server requires TLS; use nbds:// with the client's certificates or key")]
    TlsRequired,
    /// The server does not offer TLS.
    #[error("the server does not offer TLS: {0}")]
    NoTls(String),
    /// The server refused an option.
    #[error("the server refused option {option} with error {code:#x}: {message}")]
    Refused {
        /// Number of the refused option.
        option: u32,
        /// Type of the server's error reply.
        code: u32,
        /// The server's error message; may be empty.
        message: String,
    },
    /// The connection ended during negotiation.
    #[error("the server closed the connection during negotiation; see its log")]
    Closed,
    /// The server breaks the protocol.
    #[error("the server broke the NBD protocol: {0}")]
    Protocol(&'static str),
}

use HandshakeError::Protocol;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The client waits for the two magic numbers. The client reads the magic numbers before the
    /// flags, because an oldstyle server sends no flags.
    Magics,
    Flags,
    ReplyHeader,
    ReplyPayload(OptionReplyHeader),
    /// The client waits for the reply to EXPORT_NAME, which has no header.
    ExportName,
    Ended,
}

/// One negotiation with a server.
///
/// Call order: pass received bytes to [`handle_input`](Self::handle_input), send the result of
/// [`poll_output`](Self::poll_output), and check [`poll_outcome`](Self::poll_outcome). Repeat until
/// nothing changes. The server sends first.
/// [`server::handshake::Handshake`](crate::server::handshake::Handshake) has the same call order.
#[derive(Debug)]
pub struct Handshake {
    goal: Goal,
    /// Name of the metadata context to request.
    context: &'static str,
    /// True if the connection must be encrypted, but is not yet.
    needs_tls: bool,
    state: State,
    intake: Intake,
    output: Vec<u8>,
    outcome: Option<HandshakeOutcome>,
    /// Number of the option to which the client awaits the reply.
    option: u32,
    replies: u32,
    no_zeroes: bool,
    structured_replies: bool,
    meta_context_id: Option<u32>,
    export: Option<(u64, TransmissionFlags)>,
    block_sizes: Option<(u32, u32, u32)>,
    listed: Vec<ListedExport>,
    listed_bytes: usize,
}

impl Handshake {
    /// Creates a negotiation without TLS that waits for the server's greeting.
    pub fn new(goal: Goal) -> Self {
        Self::start(goal, false)
    }

    /// Creates a negotiation that waits for the server's greeting and demands TLS.
    pub fn with_tls(goal: Goal) -> Self {
        Self::start(goal, true)
    }

    /// Requests the metadata context with this name instead of `base:allocation`. Call this
    /// function before the first input.
    #[must_use]
    pub fn for_context(mut self, context: &'static str) -> Self {
        self.context = context;
        self
    }

    /// Creates the negotiation inside TLS, after [`HandshakeOutcome::StartTls`]. The first output
    /// of the new negotiation is the client's first option.
    ///
    /// # Panics
    /// Panics if this negotiation did not end with `StartTls`.
    #[must_use]
    pub fn inside_tls(self) -> Self {
        assert!(self.option == opt::STARTTLS && self.state == State::Ended, "TLS was not started");
        let mut inside = Self::start(self.goal, false).for_context(self.context);
        inside.no_zeroes = self.no_zeroes;
        inside.ask(inside.first_option());
        inside
    }

    fn start(goal: Goal, needs_tls: bool) -> Self {
        let mut new = Self {
            goal,
            context: BASE_ALLOCATION,
            needs_tls,
            state: State::Magics,
            intake: Intake::new(MAGICS_BYTES),
            output: Vec::new(),
            outcome: None,
            option: 0,
            replies: 0,
            no_zeroes: false,
            structured_replies: false,
            meta_context_id: None,
            export: None,
            block_sizes: None,
            listed: Vec::new(),
            listed_bytes: 0,
        };
        if let Some(length) = new.name().map(str::len).filter(|&length| length > EXPORT_NAME_BYTES_MAX) {
            new.end(HandshakeOutcome::Failed(HandshakeError::NameTooLong(length)));
        }
        new
    }

    /// Handles bytes from the server and returns how many were consumed. The function consumes no
    /// further bytes after the negotiation has ended, and while output waits in
    /// [`poll_output`](Self::poll_output).
    pub fn handle_input(&mut self, bytes: &[u8]) -> usize {
        let mut rest = bytes;
        while self.output.is_empty() && self.state != State::Ended && self.intake.fill(&mut rest) {
            if let Err(error) = self.advance() {
                self.output.clear();
                self.end(HandshakeOutcome::Failed(error));
            }
        }
        bytes.len() - rest.len()
    }

    /// Handles the end of the byte stream. A negotiation that is still running fails.
    pub fn handle_end_of_stream(&mut self) {
        let error = match (self.state, self.name()) {
            (State::Ended, _) => return,
            // A server can refuse EXPORT_NAME only by closing the connection.
            (State::ExportName, Some(name)) => HandshakeError::UnknownExport {
                name: name.to_owned(),
                message: "it closed the connection".to_owned(),
            },
            _ => HandshakeError::Closed,
        };
        self.output.clear();
        self.end(HandshakeOutcome::Failed(error));
    }

    /// Returns bytes to send to the server, in order; `None` if there are none at present.
    pub fn poll_output(&mut self) -> Option<Vec<u8>> {
        if self.output.is_empty() {
            return None;
        }
        Some(std::mem::take(&mut self.output))
    }

    /// Returns the outcome of the negotiation once, after all output was taken.
    pub fn poll_outcome(&mut self) -> Option<HandshakeOutcome> {
        if !self.output.is_empty() {
            return None;
        }
        self.outcome.take()
    }

    fn name(&self) -> Option<&str> {
        match &self.goal {
            Goal::Connect(name) => Some(name),
            Goal::List => None,
        }
    }

    fn end(&mut self, outcome: HandshakeOutcome) {
        self.state = State::Ended;
        self.outcome = Some(outcome);
    }

    /// Handles one complete message in the intake.
    fn advance(&mut self) -> Result<(), HandshakeError> {
        let bytes = self.intake.take();
        match self.state {
            State::Magics => self.on_magics(&bytes),
            State::Flags => self.on_flags(&bytes),
            State::ReplyHeader => self.on_reply_header(&bytes),
            State::ReplyPayload(header) => self.on_reply(header, &bytes),
            State::ExportName => self.on_export_name(&bytes),
            State::Ended => unreachable!("handle_input stops at the end"),
        }
    }

    fn await_bytes(&mut self, state: State, need: usize) {
        self.state = state;
        self.intake.expect(need);
    }

    fn on_magics(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        let mut reader = Reader::new(bytes);
        match (reader.u64(), reader.u64()) {
            (Some(INIT_MAGIC), Some(OPTION_MAGIC)) => {
                self.await_bytes(State::Flags, 2);
                Ok(())
            }
            (Some(INIT_MAGIC), Some(OLDSTYLE_MAGIC)) => Err(HandshakeError::Oldstyle),
            _ => Err(HandshakeError::NotNbd),
        }
    }

    fn on_flags(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        let flags = Reader::new(bytes).u16().ok_or(SHORT)?;
        let fixed = flags & handshake_flags::FIXED_NEWSTYLE != 0;
        let first = match self.goal {
            _ if self.needs_tls && !fixed => {
                return Err(HandshakeError::NoTls(
                    "it does not support fixed newstyle negotiation".to_owned(),
                ));
            }
            _ if self.needs_tls => opt::STARTTLS,
            Goal::List if !fixed => return Err(HandshakeError::CannotList),
            Goal::Connect(_) if !fixed => opt::EXPORT_NAME,
            _ => self.first_option(),
        };
        let known = handshake_flags::FIXED_NEWSTYLE | handshake_flags::NO_ZEROES;
        self.output.extend_from_slice(&u32::from(flags & known).to_be_bytes());
        self.no_zeroes = flags & handshake_flags::NO_ZEROES != 0;
        self.ask(first);
        Ok(())
    }

    /// Returns the option that the client sends first to a server with fixed newstyle negotiation.
    fn first_option(&self) -> u32 {
        match self.goal {
            Goal::List => opt::LIST,
            Goal::Connect(_) => opt::STRUCTURED_REPLY,
        }
    }

    fn ask(&mut self, option: u32) {
        let name = self.name().unwrap_or_default();
        let mut payload = Vec::new();
        match option {
            opt::EXPORT_NAME => payload.extend_from_slice(name.as_bytes()),
            opt::GO => {
                push_counted(&mut payload, name);
                payload.extend_from_slice(&1u16.to_be_bytes());
                payload.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
            }
            opt::SET_META_CONTEXT => {
                push_counted(&mut payload, name);
                payload.extend_from_slice(&1u32.to_be_bytes());
                push_counted(&mut payload, self.context);
            }
            _ => {}
        }
        let header = OptionHeader { option, length: payload.len() as u32 };
        self.output.extend_from_slice(&header.encode());
        self.output.append(&mut payload);
        self.option = option;
        self.replies = 0;
        if option == opt::EXPORT_NAME {
            let zeroes = if self.no_zeroes { 0 } else { EXPORT_NAME_ZEROES };
            self.await_bytes(State::ExportName, 10 + zeroes);
        } else {
            self.await_bytes(State::ReplyHeader, OPTION_REPLY_HEADER_BYTES);
        }
    }

    fn on_reply_header(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        let header = OptionReplyHeader::decode(bytes)
            .ok_or(Protocol("an option reply does not start with its magic number"))?;
        self.replies += 1;
        if header.option != self.option {
            return Err(Protocol("it answered an option that was not sent"));
        }
        if header.length > REPLY_BYTES_MAX {
            return Err(Protocol("an option reply is longer than 64 KiB"));
        }
        if self.option != opt::LIST && self.replies > REPLIES_MAX {
            return Err(Protocol("it sent more than 64 replies to one option"));
        }
        self.await_bytes(State::ReplyPayload(header), header.length as usize);
        Ok(())
    }

    fn on_reply(&mut self, header: OptionReplyHeader, payload: &[u8]) -> Result<(), HandshakeError> {
        if header.reply & rep::ERROR_BIT != 0 {
            return self.on_error(header.reply, payload);
        }
        match (self.option, header.reply) {
            (opt::STARTTLS, rep::ACK) => {
                self.end(HandshakeOutcome::StartTls);
                return Ok(());
            }
            (opt::STRUCTURED_REPLY, rep::ACK) => {
                self.structured_replies = true;
                self.ask(opt::SET_META_CONTEXT);
                return Ok(());
            }
            (opt::SET_META_CONTEXT, rep::ACK) => {
                self.ask(opt::GO);
                return Ok(());
            }
            (opt::GO, rep::ACK) => {
                let (size_bytes, flags) =
                    self.export.ok_or(Protocol("it started the export without sending its size"))?;
                return self.connect(size_bytes, flags);
            }
            (opt::LIST, rep::ACK) => {
                self.output.extend_from_slice(&OptionHeader { option: opt::ABORT, length: 0 }.encode());
                let listed = std::mem::take(&mut self.listed);
                self.end(HandshakeOutcome::Listed(listed));
                return Ok(());
            }
            (opt::SET_META_CONTEXT, rep::META_CONTEXT) => self.on_meta_context(payload)?,
            (opt::GO, rep::INFO) => self.on_info(payload)?,
            (opt::LIST, rep::SERVER) => self.on_listed(payload)?,
            _ => return Err(Protocol("its reply to an option has the wrong type")),
        }
        self.await_bytes(State::ReplyHeader, OPTION_REPLY_HEADER_BYTES);
        Ok(())
    }

    fn on_error(&mut self, code: u32, payload: &[u8]) -> Result<(), HandshakeError> {
        let message = readable(payload);
        let name = self.name().unwrap_or_default().to_owned();
        match (self.option, code) {
            (opt::STARTTLS, _) => return Err(HandshakeError::NoTls(message)),
            (_, rep::ERR_TLS_REQD) => return Err(HandshakeError::TlsRequired),
            // The server may refuse structured replies and metadata contexts. The reply to GO
            // reports other problems.
            (opt::STRUCTURED_REPLY, _) => self.ask(opt::GO),
            (opt::SET_META_CONTEXT, _) => {
                self.meta_context_id = None;
                self.ask(opt::GO);
            }
            (opt::GO, rep::ERR_UNSUP) => self.ask(opt::EXPORT_NAME),
            (opt::GO, rep::ERR_UNKNOWN) => return Err(HandshakeError::UnknownExport { name, message }),
            (opt::LIST, rep::ERR_UNSUP) => return Err(HandshakeError::CannotList),
            (option, _) => return Err(HandshakeError::Refused { option, code, message }),
        }
        Ok(())
    }

    fn on_meta_context(&mut self, payload: &[u8]) -> Result<(), HandshakeError> {
        let mut reader = Reader::new(payload);
        let id = reader.u32().ok_or(SHORT)?;
        if reader.rest() != self.context.as_bytes() || self.meta_context_id.is_some() {
            return Err(Protocol("it chose a metadata context that was not requested"));
        }
        self.meta_context_id = Some(id);
        Ok(())
    }

    fn on_info(&mut self, payload: &[u8]) -> Result<(), HandshakeError> {
        let mut reader = Reader::new(payload);
        match reader.u16().ok_or(SHORT)? {
            info::EXPORT => {
                let size_bytes = reader.u64().ok_or(SHORT)?;
                self.export = Some((size_bytes, TransmissionFlags(reader.u16().ok_or(SHORT)?)));
            }
            info::BLOCK_SIZE => {
                let min = reader.u32().ok_or(SHORT)?;
                let preferred = reader.u32().ok_or(SHORT)?;
                let max = reader.u32().ok_or(SHORT)?;
                check_block_sizes(min, preferred, max)
                    .map_err(|_| Protocol("its block sizes break the protocol's rules"))?;
                self.block_sizes = Some((min, preferred, max));
            }
            _ => {}
        }
        Ok(())
    }

    fn on_listed(&mut self, payload: &[u8]) -> Result<(), HandshakeError> {
        let mut reader = Reader::new(payload);
        let name = reader.counted().ok_or(SHORT)?;
        let name = std::str::from_utf8(name).map_err(|_| Protocol("it listed a name that is not UTF-8"))?;
        if name.len() > EXPORT_NAME_BYTES_MAX {
            return Err(Protocol("it listed a name of more than 4096 bytes"));
        }
        let entry = ListedExport { name: name.to_owned(), description: readable(reader.rest()) };
        self.listed_bytes += LIST_ENTRY_BYTES + entry.name.len() + entry.description.len();
        if self.listed_bytes > LIST_BYTES_MAX {
            return Err(Protocol("its list of exports takes more than 4 MiB"));
        }
        self.listed.push(entry);
        Ok(())
    }

    fn on_export_name(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        let mut reader = Reader::new(bytes);
        let size_bytes = reader.u64().ok_or(SHORT)?;
        let flags = TransmissionFlags(reader.u16().ok_or(SHORT)?);
        self.connect(size_bytes, flags)
    }

    fn connect(&mut self, size_bytes: u64, flags: TransmissionFlags) -> Result<(), HandshakeError> {
        if size_bytes > i64::MAX as u64 {
            return Err(Protocol("the export's size does not fit a file offset"));
        }
        if !flags.contains(TransmissionFlags::HAS_FLAGS) {
            // Without these flags the client would not know whether the server can flush.
            return Err(Protocol("it did not send the export's transmission flags"));
        }
        // If the server announces no block sizes, requests are multiples of 512 bytes. If the
        // export's size is odd, the minimum is 1, so that its last bytes can be read.
        let silent_min = if size_bytes.is_multiple_of(512) { 512 } else { 1 };
        let (block_size_min, block_size_preferred, block_size_max) =
            self.block_sizes.unwrap_or((silent_min, 4096, DEFAULT_PAYLOAD_BYTES_MAX));
        self.end(HandshakeOutcome::Connected(Negotiated {
            size_bytes,
            flags,
            block_size_min,
            block_size_preferred,
            block_size_max,
            structured_replies: self.structured_replies,
            meta_context_id: self.meta_context_id,
        }));
        Ok(())
    }
}

const SHORT: HandshakeError = Protocol("a message is too short for its type");

fn push_counted(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u32).to_be_bytes());
    out.extend_from_slice(text.as_bytes());
}
