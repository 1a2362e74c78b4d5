//! Server side of NBD: [`handshake`] negotiates, [`request`] decodes and checks requests, [`reply`]
//! encodes replies.
//!
//! [`handshake`] and [`request`] list the refused messages. The caller executes the requests.

pub mod handshake;
pub mod reply;
pub mod request;

mod option;
