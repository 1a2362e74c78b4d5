//! Server side of fixed newstyle negotiation.
//!
//! Supported options: EXPORT_NAME, GO, INFO, LIST, STRUCTURED_REPLY, LIST_META_CONTEXT,
//! SET_META_CONTEXT, STARTTLS if [`Tls`] allows it, and ABORT. Metadata contexts are
//! `base:allocation` and the export's other contexts. The server replies ERR_UNSUP to any other
//! option and continues. The server closes the connection for unknown client flags, a wrong magic
//! number, an EXPORT_NAME that it cannot serve, an option over the drain limit, and too many
//! options. Lengths are in bytes.
//!
//! Memory: at most one option payload ([`HandshakeLimits::option_bytes_max`]) and the reply to one
//! option.

use std::borrow::Cow;

use super::option::{self, MetaQuery, Refusal};
use crate::bytes::{Intake, clip};
use crate::export::{CONTEXTS_MAX, EXPORT_NAME_BYTES_MAX, ExportDirectory, ExportInfo};
use crate::wire::{
    BASE_ALLOCATION, EXPORT_NAME_ZEROES, GREETING_BYTES, INIT_MAGIC, OPTION_HEADER_BYTES, OPTION_MAGIC,
    OptionHeader, OptionReplyHeader, STRING_BYTES_MAX, TransmissionFlags, handshake_flags, info, opt, rep,
};

/// Id of `base:allocation` in BLOCK_STATUS replies.
pub const BASE_ALLOCATION_ID: u32 = 1;

/// Id of the first of [`Negotiated::contexts`] in BLOCK_STATUS replies. The other contexts have the
/// following ids.
pub const CONTEXTS_ID: u32 = 2;

/// Limits on a client that has not chosen an export yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandshakeLimits {
    /// Maximum length of an option payload that the server handles, bytes.
    pub option_bytes_max: u32,
    /// Maximum length of an option payload that the server discards and refuses with ERR_TOO_BIG,
    /// bytes. A longer payload ends the connection.
    pub drain_bytes_max: u32,
    /// Maximum number of options per connection.
    pub options_max: u32,
}

impl Default for HandshakeLimits {
    fn default() -> Self {
        Self { option_bytes_max: 64 << 10, drain_bytes_max: 1 << 20, options_max: 256 }
    }
}

/// Result of the negotiation, with everything that the transmission phase needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Negotiated {
    /// Name of the export as the client gave it; empty for the default export.
    pub export: String,
    /// Properties of the export as announced to the client.
    pub info: ExportInfo,
    /// True if the server must reply to READ and BLOCK_STATUS in chunks.
    pub structured_replies: bool,
    /// True if the client chose `base:allocation`, so that BLOCK_STATUS reports it with
    /// [`BASE_ALLOCATION_ID`].
    pub base_allocation: bool,
    /// Contexts of [`ExportInfo::contexts`] that the client chose; their ids start at
    /// [`CONTEXTS_ID`].
    pub contexts: Vec<String>,
}

impl Negotiated {
    /// Returns the flags that were announced to the client.
    pub fn transmission_flags(&self) -> TransmissionFlags {
        self.info.transmission_flags(self.structured_replies)
    }

    /// Returns true if BLOCK_STATUS is allowed, because the client chose a metadata context.
    #[inline]
    pub fn has_contexts(&self) -> bool {
        self.base_allocation || !self.contexts.is_empty()
    }
}

/// The metadata contexts that the client chose. The choice is valid for one export only.
#[derive(Clone, Debug)]
struct Choice {
    export: String,
    base_allocation: bool,
    contexts: Vec<String>,
}

/// State of TLS on a connection (section "TLS support" of the NBD protocol).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tls {
    /// TLS is not available.
    #[default]
    Absent,
    /// The client may start TLS (SELECTIVETLS). Every export is also served without TLS.
    Offered,
    /// The client must start TLS first (FORCEDTLS). Without TLS, the client learns nothing, not
    /// even whether an export exists.
    Required,
    /// TLS was started, and all further messages are inside TLS.
    Started,
}

/// How negotiation ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandshakeOutcome {
    /// Negotiation is complete. Requests start with the first byte that `handle_input` did not
    /// consume.
    Done(Negotiated),
    /// The client starts TLS now. Continue with [`Handshake::inside_tls`] inside TLS. If received
    /// bytes were not consumed, close the connection: an attacker may have injected them outside
    /// TLS.
    StartTls,
    /// The client sent ABORT: close the connection.
    Aborted,
    /// The negotiation failed. The caller logs the reason and closes the connection.
    Failed(HandshakeError),
}

/// Why the server closes a connection during negotiation. The client gets an error reply if the
/// protocol allows it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The client sent unknown flags: the client is newer than hob, or is not an NBD client.
    #[error("client flags {0:#010x} contain unknown bits; is this an NBD client?")]
    ClientFlags(u32),
    /// An option did not start with its magic number, so the stream cannot be parsed.
    #[error("an option does not start with its magic number; the client breaks the protocol")]
    OptionMagic,
    /// The client did not announce fixed newstyle, so it cannot understand a reply to this option.
    #[error("client sent option {0} without having announced fixed newstyle negotiation")]
    NotFixedNewstyle(u32),
    /// The option's payload is longer than the drain limit.
    #[error("option {option} announces {length} bytes, more than this server accepts")]
    OptionTooBig {
        /// Number of the option.
        option: u32,
        /// Announced payload, bytes.
        length: u32,
    },
    /// The client sent too many options without choosing an export.
    #[error("client sent more than {0} options without choosing an export")]
    TooManyOptions(u32),
    /// The client sent EXPORT_NAME outside TLS. The protocol has no error reply to this option.
    #[error("client asked for an export without TLS, which this server requires")]
    NoTls,
    /// The server cannot serve the export of an EXPORT_NAME, to which the protocol has no error
    /// reply.
    #[error("cannot serve export {name:?} chosen by EXPORT_NAME: {reason}")]
    ExportName {
        /// The readable part of the export's name.
        name: String,
        /// Why the server cannot serve the export.
        reason: Cow<'static, str>,
    },
}

#[derive(Debug, Clone, Copy)]
enum State {
    ClientFlags,
    OptionHeader,
    OptionPayload(OptionHeader),
    Drain { option: u32, left: u32 },
    Ended,
}

/// The negotiation with one client.
///
/// Call order: pass received bytes to [`handle_input`](Self::handle_input). Then send the result of
/// [`poll_output`](Self::poll_output), and check [`poll_outcome`](Self::poll_outcome). Pass the
/// unconsumed bytes again, until nothing changes. The greeting is the first output. While output
/// waits, no input is consumed, so a client that does not read replies cannot fill memory.
#[derive(Clone, Debug)]
pub struct Handshake {
    limits: HandshakeLimits,
    tls: Tls,
    state: State,
    intake: Intake,
    output: Vec<u8>,
    outcome: Option<HandshakeOutcome>,
    options: u32,
    fixed_newstyle: bool,
    no_zeroes: bool,
    structured_replies: bool,
    choice: Option<Choice>,
}

impl Handshake {
    /// Creates a negotiation without TLS. The negotiation's first output is the greeting.
    pub fn new(limits: HandshakeLimits) -> Self {
        Self::with_tls(limits, Tls::Absent)
    }

    /// Creates a negotiation whose first output is the greeting.
    pub fn with_tls(limits: HandshakeLimits, tls: Tls) -> Self {
        let mut greeting = Vec::with_capacity(GREETING_BYTES);
        greeting.extend_from_slice(&INIT_MAGIC.to_be_bytes());
        greeting.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
        let flags = handshake_flags::FIXED_NEWSTYLE | handshake_flags::NO_ZEROES;
        greeting.extend_from_slice(&flags.to_be_bytes());
        Self {
            limits,
            tls,
            state: State::ClientFlags,
            intake: Intake::new(4),
            output: greeting,
            outcome: None,
            options: 0,
            fixed_newstyle: false,
            no_zeroes: false,
            structured_replies: false,
            choice: None,
        }
    }

    /// Creates the negotiation inside TLS, after [`HandshakeOutcome::StartTls`]. The new
    /// negotiation keeps only the client's flags, because an attacker may have sent the unencrypted
    /// messages.
    ///
    /// # Panics
    /// Panics if this negotiation did not end with `StartTls`.
    #[must_use]
    pub fn inside_tls(self) -> Self {
        assert!(self.tls == Tls::Started, "TLS was not started");
        let mut inside = Self::with_tls(self.limits, Tls::Started);
        inside.output.clear();
        inside.fixed_newstyle = self.fixed_newstyle;
        inside.no_zeroes = self.no_zeroes;
        // The limit on options holds for the whole connection, so options outside TLS count too.
        inside.options = self.options;
        inside.await_option();
        inside
    }

    /// Handles bytes from the client and returns how many were consumed. The function consumes
    /// nothing after the option that ends the negotiation, and after an option whose reply waits in
    /// [`poll_output`](Self::poll_output).
    pub fn handle_input(&mut self, bytes: &[u8], directory: &dyn ExportDirectory) -> usize {
        let mut rest = bytes;
        while self.output.is_empty() && self.step(&mut rest, directory) {}
        bytes.len() - rest.len()
    }

    /// Returns bytes to send to the client, in order; `None` if there are none at present.
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

    /// Handles one message. Returns false if more bytes are needed or the negotiation has ended.
    fn step(&mut self, rest: &mut &[u8], directory: &dyn ExportDirectory) -> bool {
        match self.state {
            State::Ended => return false,
            State::Drain { option, left } => return self.drain(option, left, rest),
            _ if !self.intake.fill(rest) => return false,
            State::ClientFlags => self.on_client_flags(),
            State::OptionHeader => self.on_option_header(),
            State::OptionPayload(header) => {
                let payload = self.intake.take();
                self.on_option(header.option, &payload, directory);
                self.intake.restore(payload);
                if !matches!(self.state, State::Ended) {
                    self.await_option();
                }
            }
        }
        true
    }

    fn await_option(&mut self) {
        self.state = State::OptionHeader;
        self.intake.expect(OPTION_HEADER_BYTES);
    }

    fn end(&mut self, outcome: HandshakeOutcome) {
        self.state = State::Ended;
        self.outcome = Some(outcome);
    }

    fn fail(&mut self, error: HandshakeError) {
        self.end(HandshakeOutcome::Failed(error));
    }

    fn on_client_flags(&mut self) {
        let mut reader = crate::bytes::Reader::new(self.intake.held());
        let flags = reader.u32().expect("four bytes were collected");
        let fixed = u32::from(handshake_flags::FIXED_NEWSTYLE);
        let no_zeroes = u32::from(handshake_flags::NO_ZEROES);
        if flags & !(fixed | no_zeroes) != 0 {
            return self.fail(HandshakeError::ClientFlags(flags));
        }
        self.fixed_newstyle = flags & fixed != 0;
        self.no_zeroes = flags & no_zeroes != 0;
        self.await_option();
    }

    fn on_option_header(&mut self) {
        let Some(header) = OptionHeader::decode(self.intake.held()) else {
            return self.fail(HandshakeError::OptionMagic);
        };
        let OptionHeader { option, length } = header;
        self.options += 1;
        if self.options > self.limits.options_max {
            return self.fail(HandshakeError::TooManyOptions(self.limits.options_max));
        }
        if !self.fixed_newstyle && option != opt::EXPORT_NAME {
            return self.fail(HandshakeError::NotFixedNewstyle(option));
        }
        if length <= self.limits.option_bytes_max {
            self.state = State::OptionPayload(header);
            self.intake.expect(length as usize);
        } else if length <= self.limits.drain_bytes_max && option != opt::EXPORT_NAME {
            self.state = State::Drain { option, left: length };
        } else {
            if option != opt::EXPORT_NAME {
                self.refuse(option, &TOO_BIG);
            }
            self.fail(HandshakeError::OptionTooBig { option, length });
        }
    }

    fn drain(&mut self, option: u32, left: u32, rest: &mut &[u8]) -> bool {
        let skipped = rest.len().min(left as usize);
        *rest = &rest[skipped..];
        let left = left - skipped as u32;
        self.state = State::Drain { option, left };
        if left == 0 {
            self.refuse(option, &TOO_BIG);
            self.await_option();
        }
        skipped > 0
    }

    fn on_option(&mut self, option: u32, payload: &[u8], directory: &dyn ExportDirectory) {
        let result = match option {
            opt::ABORT => {
                self.reply(option, rep::ACK, &[]);
                self.end(HandshakeOutcome::Aborted);
                Ok(())
            }
            opt::STARTTLS => self.on_start_tls(payload),
            _ if self.tls == Tls::Required => self.on_missing_tls(option),
            opt::EXPORT_NAME => {
                self.on_export_name(payload, directory);
                Ok(())
            }
            opt::LIST => self.on_list(payload, directory),
            opt::INFO | opt::GO => self.on_info(option, payload, directory),
            opt::STRUCTURED_REPLY => self.on_structured_reply(payload),
            opt::LIST_META_CONTEXT => self.on_list_meta(payload, directory),
            opt::SET_META_CONTEXT => self.on_set_meta(payload, directory),
            _ => Err(UNKNOWN),
        };
        if let Err(refusal) = result {
            self.refuse(option, &refusal);
        }
    }

    fn on_start_tls(&mut self, payload: &[u8]) -> Result<(), Refusal> {
        match self.tls {
            Tls::Absent => return Err(UNKNOWN),
            Tls::Started => {
                return Err(Refusal { reply: rep::ERR_INVALID, message: "TLS was already started".into() });
            }
            Tls::Offered | Tls::Required => must_be_empty(payload)?,
        }
        self.reply(opt::STARTTLS, rep::ACK, &[]);
        self.tls = Tls::Started;
        self.end(HandshakeOutcome::StartTls);
        Ok(())
    }

    fn on_missing_tls(&mut self, option: u32) -> Result<(), Refusal> {
        if option == opt::EXPORT_NAME {
            self.fail(HandshakeError::NoTls);
            return Ok(());
        }
        Err(Refusal { reply: rep::ERR_TLS_REQD, message: "this server requires TLS first".into() })
    }

    fn on_export_name(&mut self, payload: &[u8], directory: &dyn ExportDirectory) {
        let found = option::export_name(payload).and_then(|name| Ok((name, lookup(directory, name)?)));
        let (name, info) = match found {
            Ok(found) => found,
            Err(refusal) => {
                let name =
                    String::from_utf8_lossy(&payload[..payload.len().min(EXPORT_NAME_BYTES_MAX)]).into();
                return self.fail(HandshakeError::ExportName { name, reason: refusal.message });
            }
        };
        self.output.extend_from_slice(&info.size_bytes.to_be_bytes());
        self.output.extend_from_slice(&info.transmission_flags(self.structured_replies).0.to_be_bytes());
        if !self.no_zeroes {
            self.output.extend_from_slice(&[0; EXPORT_NAME_ZEROES]);
        }
        self.start(name, info);
    }

    fn on_list(&mut self, payload: &[u8], directory: &dyn ExportDirectory) -> Result<(), Refusal> {
        must_be_empty(payload)?;
        for (name, description) in directory.list() {
            if name.len() > EXPORT_NAME_BYTES_MAX {
                continue;
            }
            let length = name.len() as u32;
            let description = clip(&description, STRING_BYTES_MAX);
            self.reply(
                opt::LIST,
                rep::SERVER,
                &[&length.to_be_bytes(), name.as_bytes(), description.as_bytes()],
            );
        }
        self.reply(opt::LIST, rep::ACK, &[]);
        Ok(())
    }

    fn on_info(
        &mut self,
        option: u32,
        payload: &[u8],
        directory: &dyn ExportDirectory,
    ) -> Result<(), Refusal> {
        let query = option::parse_info(payload)?;
        let export = lookup(directory, query.name)?;
        let flags = export.transmission_flags(self.structured_replies);
        self.info(option, info::EXPORT, &[&export.size_bytes.to_be_bytes(), &flags.0.to_be_bytes()]);
        // The server sends this information item even if the client did not request it. A client
        // that does not know the item ignores the item.
        self.info(
            option,
            info::BLOCK_SIZE,
            &[
                &export.block_size_min.to_be_bytes(),
                &export.block_size_preferred.to_be_bytes(),
                &export.block_size_max.to_be_bytes(),
            ],
        );
        if query.wants_name {
            self.info(option, info::NAME, &[query.name.as_bytes()]);
        }
        if query.wants_description && !export.description.is_empty() {
            let description = clip(&export.description, STRING_BYTES_MAX);
            self.info(option, info::DESCRIPTION, &[description.as_bytes()]);
        }
        self.reply(option, rep::ACK, &[]);
        if option == opt::GO {
            self.start(query.name, export);
        }
        Ok(())
    }

    fn on_structured_reply(&mut self, payload: &[u8]) -> Result<(), Refusal> {
        must_be_empty(payload)?;
        self.structured_replies = true;
        self.reply(opt::STRUCTURED_REPLY, rep::ACK, &[]);
        Ok(())
    }

    fn on_list_meta(&mut self, payload: &[u8], directory: &dyn ExportDirectory) -> Result<(), Refusal> {
        let (query, export) = self.meta_query(payload, directory)?;
        for context in contexts_of(&export).filter(|context| query.lists(context)) {
            self.reply(opt::LIST_META_CONTEXT, rep::META_CONTEXT, &[&0u32.to_be_bytes(), context.as_bytes()]);
        }
        self.reply(opt::LIST_META_CONTEXT, rep::ACK, &[]);
        Ok(())
    }

    fn on_set_meta(&mut self, payload: &[u8], directory: &dyn ExportDirectory) -> Result<(), Refusal> {
        // This option cancels the client's earlier choice of contexts, even if the option fails.
        self.choice = None;
        let (query, export) = self.meta_query(payload, directory)?;
        let mut choice =
            Choice { export: query.name.to_owned(), base_allocation: false, contexts: Vec::new() };
        for context in contexts_of(&export).filter(|context| query.chooses(context)) {
            let id = if context == BASE_ALLOCATION {
                choice.base_allocation = true;
                BASE_ALLOCATION_ID
            } else {
                choice.contexts.push(context.to_owned());
                CONTEXTS_ID + choice.contexts.len() as u32 - 1
            };
            self.reply(opt::SET_META_CONTEXT, rep::META_CONTEXT, &[&id.to_be_bytes(), context.as_bytes()]);
        }
        self.choice = Some(choice);
        self.reply(opt::SET_META_CONTEXT, rep::ACK, &[]);
        Ok(())
    }

    fn meta_query<'a>(
        &self,
        payload: &'a [u8],
        directory: &dyn ExportDirectory,
    ) -> Result<(MetaQuery<'a>, ExportInfo), Refusal> {
        if !self.structured_replies {
            let message = "negotiate structured replies before metadata contexts".into();
            return Err(Refusal { reply: rep::ERR_INVALID, message });
        }
        let query = option::parse_meta(payload)?;
        let export = lookup(directory, query.name)?;
        Ok((query, export))
    }

    fn start(&mut self, name: &str, info: ExportInfo) {
        let choice = self.choice.take().filter(|choice| choice.export == name);
        let (base_allocation, contexts) =
            choice.map_or((false, Vec::new()), |choice| (choice.base_allocation, choice.contexts));
        self.end(HandshakeOutcome::Done(Negotiated {
            export: name.to_owned(),
            info,
            structured_replies: self.structured_replies,
            base_allocation,
            contexts,
        }));
    }

    fn refuse(&mut self, option: u32, refusal: &Refusal) {
        let message = clip(&refusal.message, STRING_BYTES_MAX);
        self.reply(option, refusal.reply, &[message.as_bytes()]);
    }

    fn info(&mut self, option: u32, item: u16, parts: &[&[u8]]) {
        let length = parts.iter().map(|part| part.len()).sum::<usize>() + 2;
        let header = OptionReplyHeader { option, reply: rep::INFO, length: length as u32 };
        self.output.extend_from_slice(&header.encode());
        self.output.extend_from_slice(&item.to_be_bytes());
        parts.iter().for_each(|part| self.output.extend_from_slice(part));
    }

    fn reply(&mut self, option: u32, reply: u32, parts: &[&[u8]]) {
        let length = parts.iter().map(|part| part.len()).sum::<usize>();
        let header = OptionReplyHeader { option, reply, length: length as u32 };
        self.output.extend_from_slice(&header.encode());
        parts.iter().for_each(|part| self.output.extend_from_slice(part));
    }
}

const UNKNOWN: Refusal =
    Refusal { reply: rep::ERR_UNSUP, message: Cow::Borrowed("this server does not know the option") };

const TOO_BIG: Refusal =
    Refusal { reply: rep::ERR_TOO_BIG, message: Cow::Borrowed("the option's payload is too long") };

/// Maximum number of export names in a refusal.
const NAMES_MAX: usize = 3;

/// Maximum length of an export name in a refusal, bytes.
const SHOWN_NAME_BYTES_MAX: usize = 256;

fn must_be_empty(payload: &[u8]) -> Result<(), Refusal> {
    if payload.is_empty() {
        return Ok(());
    }
    Err(Refusal { reply: rep::ERR_INVALID, message: "the option takes no payload".into() })
}

/// Returns the names of all metadata contexts of an export.
fn contexts_of(export: &ExportInfo) -> impl Iterator<Item = &str> {
    std::iter::once(BASE_ALLOCATION).chain(export.contexts.iter().take(CONTEXTS_MAX).map(String::as_str))
}

fn lookup(directory: &dyn ExportDirectory, name: &str) -> Result<ExportInfo, Refusal> {
    let info = directory.find(name).ok_or_else(|| no_export(directory, name))?;
    let broken = Refusal {
        reply: rep::ERR_PLATFORM,
        message:
            "the export's size or block sizes cannot be expressed in NBD; see the server's configuration"
                .into(),
    };
    info.check().map_err(|_| broken)?;
    Ok(info)
}

/// Refuses an export that does not exist, and names some exports that the client may list.
fn no_export(directory: &dyn ExportDirectory, name: &str) -> Refusal {
    let mut message = match name {
        "" => "there is no default export".to_owned(),
        _ => format!("there is no export {:?}", clip(name, SHOWN_NAME_BYTES_MAX)),
    };
    let names = directory.list().into_iter().map(|(name, _)| name);
    let names: Vec<String> = names.filter(|name| (1..=SHOWN_NAME_BYTES_MAX).contains(&name.len())).collect();
    let shown: Vec<String> = names.iter().take(NAMES_MAX).map(|name| format!("{name:?}")).collect();
    if !shown.is_empty() {
        message.push_str("; this server has ");
        message.push_str(&shown.join(", "));
    }
    if names.len() > NAMES_MAX {
        message.push_str(&format!(" and {} more", names.len() - NAMES_MAX));
    }
    Refusal { reply: rep::ERR_UNKNOWN, message: message.into() }
}
