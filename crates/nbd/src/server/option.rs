//! Parses option payloads of NBD negotiation.
//!
//! Every refusal has a reply type and a message for the client's log. Strings must be UTF-8 without
//! NUL. A payload with extra bytes is malformed.

use std::borrow::Cow;

use crate::bytes::Reader;
use crate::export::EXPORT_NAME_BYTES_MAX;
use crate::wire::{STRING_BYTES_MAX, info, rep};

/// An error reply to an option. The client may send another option afterwards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) reply: u32,
    pub(super) message: Cow<'static, str>,
}

const fn invalid(message: &'static str) -> Refusal {
    Refusal { reply: rep::ERR_INVALID, message: Cow::Borrowed(message) }
}

const SHORT: Refusal = invalid("the option's payload is shorter than its length fields");
const LONG: Refusal = invalid("the option's payload is longer than its length fields");

/// Payload of INFO and GO.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InfoQuery<'a> {
    pub(super) name: &'a str,
    pub(super) wants_name: bool,
    pub(super) wants_description: bool,
}

pub(super) fn parse_info(payload: &[u8]) -> Result<InfoQuery<'_>, Refusal> {
    let mut reader = Reader::new(payload);
    let name = export_name(reader.counted().ok_or(SHORT)?)?;
    let count = reader.u16().ok_or(SHORT)?;
    let mut query = InfoQuery { name, wants_name: false, wants_description: false };
    for _ in 0..count {
        match reader.u16().ok_or(SHORT)? {
            info::NAME => query.wants_name = true,
            info::DESCRIPTION => query.wants_description = true,
            // The reply always has the size and the block sizes, so a client need not request them.
            // The protocol requires servers to ignore requests for unknown items.
            _ => {}
        }
    }
    if reader.is_empty() { Ok(query) } else { Err(LONG) }
}

/// Payload of LIST_META_CONTEXT and SET_META_CONTEXT. Repeated queries for one context get one
/// reply.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MetaQuery<'a> {
    pub(super) name: &'a str,
    queries: Vec<&'a [u8]>,
}

impl MetaQuery<'_> {
    /// Returns true if LIST_META_CONTEXT lists the context. An empty query list matches all
    /// contexts. A query that ends with a colon matches all contexts with this prefix.
    pub(super) fn lists(&self, context: &str) -> bool {
        let begins = |query: &&[u8]| query.ends_with(b":") && context.as_bytes().starts_with(query);
        self.queries.is_empty() || self.chooses(context) || self.queries.iter().any(begins)
    }

    /// Returns true if a query names the context exactly.
    pub(super) fn chooses(&self, context: &str) -> bool {
        self.queries.contains(&context.as_bytes())
    }
}

pub(super) fn parse_meta(payload: &[u8]) -> Result<MetaQuery<'_>, Refusal> {
    let mut reader = Reader::new(payload);
    let name = export_name(reader.counted().ok_or(SHORT)?)?;
    let count = reader.u32().ok_or(SHORT)?;
    let mut query = MetaQuery { name, queries: Vec::new() };
    // A count that exceeds the payload ends the loop at the first missing query, so the loop's
    // length is limited by the payload.
    for _ in 0..count {
        let text = reader.counted().ok_or(SHORT)?;
        if text.len() > STRING_BYTES_MAX {
            return Err(invalid("a metadata context query may have 4096 bytes at most"));
        }
        query.queries.push(text);
    }
    if reader.is_empty() { Ok(query) } else { Err(LONG) }
}

pub(super) fn export_name(bytes: &[u8]) -> Result<&str, Refusal> {
    if bytes.len() > EXPORT_NAME_BYTES_MAX {
        return Err(Refusal {
            reply: rep::ERR_TOO_BIG,
            message: "an export name may have 4096 bytes at most".into(),
        });
    }
    match std::str::from_utf8(bytes) {
        Ok(name) if !name.contains('\0') => Ok(name),
        _ => Err(invalid("an export name must be UTF-8 without NUL")),
    }
}
