//! The NBD protocol, client and server, as pure state machines.
//!
//! This crate uses no socket, clock, random numbers or threads. Bytes and lookups come in through
//! `handle_*`, bytes and decisions go out through `poll_*`, and the caller does the rest. So the same code
//! runs in the daemon, in the simulator and under the fuzzer.
//!
//! * [`server`]: negotiation, request decoding and checking, reply encoding.
//! * [`client`]: negotiation, request encoding, reply decoding.
//! * [`wire`]: the numbers of the protocol; [`request`]: the request header that both ends share; [`export`]: an
//!   export's properties and features; [`uri`]: how users name an export.
//!
//! Supported: fixed newstyle negotiation, simple and structured replies, block size constraints, and the
//! metadata context `base:allocation`; as a server also other contexts that the export names. Refused with
//! an error reply: oldstyle negotiation, TLS, extended headers, RESIZE. The reference is `doc/proto.md` of
//! the NetworkBlockDevice project.
//!
//! Every byte from the peer is untrusted: no input panics, allocates without a bound, or is used in
//! arithmetic before it was checked. All lengths and offsets are bytes; all integers on the wire are
//! big-endian.

pub mod client;
pub mod export;
pub mod request;
pub mod server;
pub mod uri;
pub mod wire;

mod bytes;

pub use export::{ExportDirectory, ExportInfo};
pub use request::{Command, CommandFlags, Request};
pub use uri::NbdUri;
pub use wire::{ErrorCode, Extent, TransmissionFlags};
