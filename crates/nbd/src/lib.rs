//! The NBD protocol, client and server, as pure state machines.
//!
//! This crate uses no socket, clock, random numbers or threads. The caller passes bytes and lookups
//! to `handle_*`, and gets bytes and decisions from `poll_*`. The same code runs in the daemon, in
//! the simulator and under the fuzzer.
//!
//! * [`server`]: negotiation, request decoding and checking, reply encoding.
//! * [`client`]: negotiation, request encoding, reply decoding.
//! * [`wire`]: the numbers of the protocol; [`request`]: the request header that client and server
//!   share; [`export`]: an export's properties and features; [`uri`]: NBD URIs.
//!
//! Supported: fixed newstyle negotiation, simple and structured replies, block size constraints,
//! and the metadata context `base:allocation`. The client can request another context instead. The
//! server also supports other contexts that the export names. Client and server can negotiate TLS,
//! and the caller does the encryption. Not supported: oldstyle negotiation, extended headers,
//! RESIZE. The reference is `doc/proto.md` of the NetworkBlockDevice project.
//!
//! Every byte from the peer is untrusted. No input causes a panic or unbounded allocation, and
//! input is checked before it is used in arithmetic. All lengths and offsets are in bytes; all
//! integers on the wire are big-endian.

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
