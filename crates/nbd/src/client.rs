//! The client's end: negotiate with [`handshake`], send with [`request`], understand the answers with [`reply`].
//!
//! A server is trusted no more than a client: whatever breaks the protocol is an error that ends the connection,
//! never a panic, a wrong byte or unbounded memory.

pub mod handshake;
pub mod reply;
pub mod request;

mod coverage;
