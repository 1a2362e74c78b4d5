//! Executes the engine's I/O: buffers, the I/O ring, flash devices and backings.
//!
//! A *shard* is one thread of the daemon with the disks that it serves. The shard's thread performs
//! the I/O of guests' requests. The thread owns a [`ring::Ring`], which owns the payload buffers.
//! Backings and flash devices put operations into the I/O ring, and get the completions with their
//! [`token::Token`].
//!
//! Other threads run the calls that may block: [`pool::Pool`] belongs to a control thread, and
//! backings are opened on any thread.

pub mod area;
pub mod backing;
pub mod bitmap;
pub mod buffers;
pub mod checksum;
pub mod crash_log;
pub mod device_name;
pub mod device_number;
pub mod failing;
pub mod flash;
pub mod pool;
pub mod ring;
pub mod signals;
pub mod swap;
pub mod token;
pub mod unflushed_mark;
pub mod volatile;

mod direct;
mod fields;
mod filesystem;
mod lock;
mod memory;
mod pauses;
mod time_limit;

pub use filesystem::{FileNumber, file_number};
pub use lock::{PathLock, lock_exclusive};
