//! Executes the engine's I/O: buffers, the I/O ring, flash devices and backings.
//!
//! The shard's thread calls everything in this crate. The thread owns a [`ring::Ring`], which owns
//! the payload buffers. Backings and flash devices put operations into the I/O ring, and get the
//! completions with their [`token::Token`]. Only [`pool::Pool`] belongs to a control thread.

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
