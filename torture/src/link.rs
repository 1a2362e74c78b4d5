//! A test guest's connection to its disk, by NBD or vhost-user-blk.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use conformance::nbd_client::{
    Address, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, CMD_WRITE_ZEROES, Client, FLAG_FUA,
};
use conformance::vhost_driver::{Driver, Kind, SLOTS};

use crate::stamp::UNIT;

/// Maximum time that a test guest waits for a reply.
pub const SILENCE_MAX: Duration = Duration::from_secs(60);
/// Interval at which a vhost-user link checks that the server is still running.
const LOOK: Duration = Duration::from_millis(50);

/// A request of a test guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// Reads units of 512 bytes.
    Read {
        /// Number of 512-byte units to read.
        units: u64,
    },
    /// Writes the given data.
    Write {
        /// True for FUA: the data is durable before the reply.
        fua: bool,
    },
    /// Writes zeroes.
    WriteZeroes {
        /// Number of 512-byte units to zero.
        units: u64,
    },
    /// Discards units of 512 bytes.
    Discard {
        /// Number of 512-byte units to discard.
        units: u64,
    },
    /// Flushes: makes acknowledged writes durable.
    Flush,
}

/// Protocol between a test guest and the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// NBD.
    Nbd,
    /// vhost-user-blk.
    VhostUser,
}

impl Protocol {
    /// Names of the protocols, in the order of their variants.
    pub const NAMES: [&str; 2] = ["NBD", "vhost-user"];
}

/// Kind of a request as the daemon receives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A read.
    Read,
    /// A write of data.
    Write,
    /// A request to write zeroes.
    Zeroes,
    /// A discard.
    Discard,
    /// A flush.
    Flush,
}

impl Operation {
    /// Names of the operations, in the order of their variants.
    pub const NAMES: [&str; 5] = ["reads", "writes", "zeroes", "discards", "flushes"];
}

/// A reply to a request.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Request number that [`Link::send`] returned.
    pub request: u64,
    /// Error number, or 0 for success.
    pub error: u32,
    /// Data of a read.
    pub data: Vec<u8>,
}

/// Address at which a test guest connects to a disk.
#[derive(Debug, Clone)]
pub enum Endpoint {
    /// An export of an NBD server.
    Nbd {
        /// Path of the NBD server's Unix socket.
        socket: PathBuf,
        /// Name of the export.
        export: String,
    },
    /// A vhost-user-blk server.
    VhostUser {
        /// Path of the vhost-user-blk server's socket.
        socket: PathBuf,
    },
}

/// Connection of a test guest to its disk.
pub trait Link: Send {
    /// Sends a request at `unit` and returns its number.
    ///
    /// # Errors
    /// Returns an error if the connection is closed.
    fn send(&mut self, ask: Ask, unit: u64, data: &[u8]) -> io::Result<u64>;

    /// Waits for a reply.
    ///
    /// # Errors
    /// Returns an error if the connection is closed, or `WouldBlock` or `TimedOut` if no reply
    /// arrived for a minute.
    fn receive(&mut self) -> io::Result<Answer>;

    /// Reconnects after the connection has ended. Returns true if requests in flight will still be
    /// answered. Returns false, without any effect, if a new link is required.
    ///
    /// # Errors
    /// Returns errors of the server or the operating system.
    fn resume(&mut self) -> io::Result<bool>;
}

impl Endpoint {
    /// Returns the protocol of connections to this address.
    #[must_use]
    pub fn protocol(&self) -> Protocol {
        match self {
            Endpoint::Nbd { .. } => Protocol::Nbd,
            Endpoint::VhostUser { .. } => Protocol::VhostUser,
        }
    }

    /// Connects to the disk.
    ///
    /// # Errors
    /// Returns errors of the server or the operating system.
    pub fn connect(&self) -> io::Result<Box<dyn Link>> {
        match self {
            Endpoint::Nbd { socket, export } => {
                let client = Client::connect(&Address::Unix(socket.clone()), export)?;
                Ok(Box::new(Nbd { client, reads: Vec::new() }))
            }
            Endpoint::VhostUser { socket } => {
                let driver = Driver::connect(socket)?;
                Ok(Box::new(VhostUser {
                    driver,
                    socket: socket.clone(),
                    slots: BTreeMap::new(),
                    requests: 0,
                }))
            }
        }
    }
}

struct Nbd {
    client: Client,
    /// Reads in flight: request number, and length in bytes.
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

    fn resume(&mut self) -> io::Result<bool> {
        Ok(false)
    }
}

/// vhost-user-blk driver. Requests survive a restart of the server, because the in-flight memory of
/// the vhost-user protocol records the requests. The driver has no FUA. For zeroes and discards,
/// the driver sends ordinary writes of zero bytes.
struct VhostUser {
    driver: Driver,
    socket: PathBuf,
    /// Requests in flight by slot: request number, and number of bytes that a read returns.
    slots: BTreeMap<u16, (u64, usize)>,
    requests: u64,
}

impl Link for VhostUser {
    fn send(&mut self, ask: Ask, unit: u64, data: &[u8]) -> io::Result<u64> {
        let slot =
            (0..SLOTS).find(|slot| !self.slots.contains_key(slot)).expect("guests have fewer in flight");
        let zeroes = |units: u64| vec![0; units as usize * UNIT];
        let (kind, length) = match ask {
            Ask::Read { units } => (Kind::Read, units as usize * UNIT),
            Ask::Write { .. } => {
                self.driver.set_data(slot, data);
                (Kind::Write, data.len())
            }
            Ask::WriteZeroes { units } | Ask::Discard { units } => {
                self.driver.set_data(slot, &zeroes(units));
                (Kind::Write, units as usize * UNIT)
            }
            Ask::Flush => (Kind::Flush, 0),
        };
        self.driver.submit(slot, kind, unit * UNIT as u64, length as u32);
        self.driver.kick();
        self.requests += 1;
        let reads = if kind == Kind::Read { length } else { 0 };
        self.slots.insert(slot, (self.requests, reads));
        Ok(self.requests)
    }

    fn receive(&mut self) -> io::Result<Answer> {
        let start = Instant::now();
        loop {
            if let Some((slot, status)) = self.driver.reap() {
                let Some((request, reads)) = self.slots.remove(&slot) else {
                    return Err(io::Error::other(format!("slot {slot} was answered and is not in flight")));
                };
                let data = if status == 0 { self.driver.data(slot, reads) } else { Vec::new() };
                return Ok(Answer { request, error: u32::from(status), data });
            }
            if !self.driver.wait(LOOK) && self.driver.hung_up()? {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            if start.elapsed() > SILENCE_MAX {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    fn resume(&mut self) -> io::Result<bool> {
        self.driver.reconnect(&self.socket)?;
        // The server was not running when some descriptor chains were submitted, so it has not seen
        // their kicks.
        self.driver.kick_anyway();
        Ok(true)
    }
}
