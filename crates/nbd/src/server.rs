//! The server's end: negotiate with [`handshake`], then decode and check with [`request`], answer with [`reply`].
//!
//! It refuses what [`handshake`] and [`request`] list; it never decides what a request *does*.

pub mod handshake;
pub mod reply;
pub mod request;

mod option;
