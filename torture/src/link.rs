//! The way from a guest to its disk: NBD or vhost-user-blk.

use std::io;
use std::path::PathBuf;

use conformance::nbd_client::{
    Address, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, CMD_WRITE_ZEROES, Client, FLAG_FUA,
};

use crate::stamp::UNIT;

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// Fill a buffer from so many units.
    Read {
        /// Units.
        units: u64,
    },
    /// Write the data that come with it.
    Write {
        /// Durable before the answer.
        fua: bool,
    },
    /// Write zeroes to so many units.
    WriteZeroes {
        /// Units.
        units: u64,
    },
    /// Give so many units up.
    Discard {
        /// Units.
        units: u64,
    },
    /// Make what was acknowledged durable.
    Flush,
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The number that [`Link::send`] returned.
    pub request: u64,
    /// 0, or an error number.
    pub error: u32,
    /// What was read.
    pub data: Vec<u8>,
}

/// Where a disk is reached.
#[derive(Debug, Clone)]
pub enum Endpoint {
    /// An export of an NBD server.
    Nbd {
        /// Its Unix socket.
        socket: PathBuf,
        /// The export.
        export: String,
    },
}

/// A connection of a guest.
pub trait Link: Send {
    /// Sends a request at `unit`; returns its number.
    ///
    /// # Errors
    /// The connection is gone.
    fn send(&mut self, ask: Ask, unit: u64, data: &[u8]) -> io::Result<u64>;

    /// Waits for an answer.
    ///
    /// # Errors
    /// The connection is gone, or `WouldBlock`/`TimedOut` when there was no answer for a minute.
    fn receive(&mut self) -> io::Result<Answer>;
}

impl Endpoint {
    /// Connects.
    ///
    /// # Errors
    /// The server's or the system's.
    pub fn connect(&self) -> io::Result<Box<dyn Link>> {
        match self {
            Endpoint::Nbd { socket, export } => {
                let client = Client::connect(&Address::Unix(socket.clone()), export)?;
                Ok(Box::new(Nbd { client, reads: Vec::new() }))
            }
        }
    }
}

struct Nbd {
    client: Client,
    /// Reads in flight and their lengths.
    reads: Vec<(u64, usize)>,
}

impl Link for Nbd {
    fn send(&mut self, ask: Ask, unit: u64, data: &[u8]) -> io::Result<u64> {
        let offset = unit * UNIT as u64;
        let bytes = |units: u64| (units * UNIT as u64) as u32;
        let (flags, command, length) = match ask {
            Ask::Read { units } => (0, CMD_READ, bytes(units)),
            Ask::Write { fua } => (if fua { FLAG_FUA } else { 0 }, CMD_WRITE, data.len() as u32),
            Ask::WriteZeroes { units } => (0, CMD_WRITE_ZEROES, bytes(units)),
            Ask::Discard { units } => (0, CMD_TRIM, bytes(units)),
            Ask::Flush => (0, CMD_FLUSH, 0),
        };
        let offset = if ask == Ask::Flush { 0 } else { offset };
        let request = self.client.send(flags, command, offset, length, data)?;
        if command == CMD_READ {
            self.reads.push((request, length as usize));
        }
        Ok(request)
    }

    fn receive(&mut self) -> io::Result<Answer> {
        let reply = self.client.receive()?;
        let mut data = Vec::new();
        if let Some(at) = self.reads.iter().position(|(request, _)| *request == reply.cookie) {
            let (_, length) = self.reads.swap_remove(at);
            if reply.error == 0 {
                data = vec![0; length];
                self.client.take(&mut data)?;
            }
        }
        Ok(Answer { request: reply.cookie, error: reply.error, data })
    }
}
