//! The client's side: negotiate with [`handshake`], encode requests with [`request`], decode replies with
//! [`reply`].
//!
//! A server is trusted no more than a client: a violation of the protocol is an error that ends the
//! connection. It never causes a panic, wrong data or unbounded memory.

pub mod handshake;
pub mod reply;
pub mod request;

mod coverage;
