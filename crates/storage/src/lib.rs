//! What the engine's I/O really does: buffers, the ring, flash devices and backings.
//!
//! Everything here is driven by one thread, the shard's. It owns a [`ring::Ring`], which owns the
//! payload buffers; backings and flash devices put operations into the ring and are given the
//! completions that carry their [`token::Token`]. Only [`pool::Pool`] belongs to a control thread.

pub mod area;
pub mod backing;
pub mod bitmap;
pub mod buffers;
pub mod checksum;
pub mod failing;
pub mod flash;
pub mod pool;
pub mod ring;
pub mod signals;
pub mod swap;
pub mod token;
pub mod volatile;

mod direct;
mod filesystem;
mod lock;
mod memory;
