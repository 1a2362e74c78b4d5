//! Front ends: the protocols by which guests reach disks, one module each. A front end translates its
//! protocol into engine requests and replies. It owns neither sockets nor buffers: the shard loop moves the
//! bytes.

pub mod fuse;
pub mod nbd;
mod payload;
pub mod vhost_user;

pub use payload::{Payload, PlainBuffers};
