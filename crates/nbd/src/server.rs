//! The server's side: negotiate with [`handshake`], then decode and check with [`request`], answer with
//! [`reply`].
//!
//! [`handshake`] and [`request`] list the refused messages. The caller executes the requests.

pub mod handshake;
pub mod reply;
pub mod request;

mod option;
