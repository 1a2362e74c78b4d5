//! Client side of NBD: [`handshake`] negotiates, [`request`] encodes requests, [`reply`] decodes
//! replies.
//!
//! Input from the server is untrusted. A protocol violation is an error that ends the connection. A
//! server's input never causes a panic, wrong data or unbounded memory.

pub mod handshake;
pub mod reply;
pub mod request;

mod coverage;
