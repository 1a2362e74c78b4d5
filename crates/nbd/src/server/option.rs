//! Parses option payloads: pure functions from bytes to the client's request.
//!
//! Every refusal carries the reply type and a sentence for the client's log. Strings must be UTF-8 without
//! NUL. Lengths must add up exactly: a payload with spare bytes is malformed.

use crate::bytes::Reader;
use crate::export::EXPORT_NAME_BYTES_MAX;
use crate::wire::{STRING_BYTES_MAX, info, rep};

/// Refusal of an option by an error reply, after which the client may send another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) reply: u32,
    pub(super) message: &'static str,
}

const fn invalid(message: &'static str) -> Refusal {
    Refusal { reply: rep::ERR_INVALID, message }
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
            // Size and block sizes are always sent, and unknown items must be ignored.
            _ => {}
        }
    }
    if reader.is_empty() { Ok(query) } else { Err(LONG) }
}

/// Payload of LIST_META_CONTEXT and SET_META_CONTEXT. A context that is asked for several times gets one
/// answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MetaQuery<'a> {
    pub(super) name: &'a str,
    queries: Vec<&'a [u8]>,
}

impl MetaQuery<'_> {
    /// Returns true if a context is to be listed. Without queries all are; a query that ends with a colon
    /// matches all contexts that start with it.
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
    // A count beyond the payload ends the loop at the first missing query, so it cannot cost more than the
    // payload.
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
            message: "an export name may have 4096 bytes at most",
        });
    }
    match std::str::from_utf8(bytes) {
        Ok(name) if !name.contains('\0') => Ok(name),
        _ => Err(invalid("an export name must be UTF-8 without NUL")),
    }
}
