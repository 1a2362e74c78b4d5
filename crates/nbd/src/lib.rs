//! The NBD protocol, both ends, as pure state machines.
//!
//! Nothing here opens a socket, reads a clock, rolls dice or starts a thread. Bytes and lookups come in through
//! `handle_*`, bytes and decisions go out through `poll_*`, and the caller owns everything in between. The same code
//! therefore runs in the daemon, in the simulator and under the fuzzer.
//!
//! * [`server`]: negotiation, request decoding and checking, reply encoding.
//! * [`client`]: negotiation, request encoding, reply decoding.
//! * [`wire`]: the numbers of the protocol; [`request`]: the request header that both ends share; [`export`]: what
//!   an export is and can do; [`uri`]: how users name an export.
//!
//! What is spoken: fixed newstyle negotiation, simple and structured replies, the metadata context
//! `base:allocation` and, as a server, others that the export names, block size constraints. What is refused, politely and by name: oldstyle negotiation, TLS,
//! extended headers, RESIZE. The reference is `doc/proto.md` of the NetworkBlockDevice project.
//!
//! Every byte from the peer is untrusted: no input panics, allocates without a bound or is used in arithmetic before
//! it was checked. All lengths and offsets are bytes; all integers on the wire are big-endian.

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
