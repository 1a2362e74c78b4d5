//! How disks reach guests. One module each; a front end turns its protocol into the engine's
//! requests and replies, and owns neither sockets nor buffers: the shard loop moves the bytes.

pub mod fuse;
pub mod nbd;
mod payload;
pub mod vhost_user;

pub use payload::{Payload, PlainBuffers};
