//! Front ends: one module for each protocol through which guests use disks. A front end translates
//! its protocol into engine requests and replies. The shard loop owns the sockets and buffers and
//! moves the bytes.

pub mod fuse;
pub mod nbd;
mod payload;
mod peer_process;
mod slots;
pub mod vhost_user;

pub use payload::{Payload, PlainBuffers};
pub use peer_process::peer_process;
