//! A synchronous NBD client, written from the protocol's text (github.com/NetworkBlockDevice/nbd,
//! doc/proto.md). The client uses no crate of the product, because both could then share a mistake.
//! The client supports fixed newstyle negotiation, `NBD_OPT_GO` and simple replies. Requests can be
//! pipelined with [`Client::send`] and [`Client::receive`]. Every read from the socket has a timeout.

use std::fmt;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use crate::MIB;

/// Reads from the export.
pub const CMD_READ: u16 = 0;
/// Writes to the export.
pub const CMD_WRITE: u16 = 1;
/// Ends the connection; has no reply.
pub const CMD_DISC: u16 = 2;
/// Makes acknowledged writes durable.
pub const CMD_FLUSH: u16 = 3;
/// Discards a range.
pub const CMD_TRIM: u16 = 4;
/// Prefetches a range.
pub const CMD_CACHE: u16 = 5;
/// Makes a range read as zeroes.
pub const CMD_WRITE_ZEROES: u16 = 6;
/// Asks for the allocation of a range. Only for clients that have negotiated a metadata context for
/// allocation.
pub const CMD_BLOCK_STATUS: u16 = 7;
/// Command flag: durable before the reply.
pub const FLAG_FUA: u16 = 1;
/// Protocol error: not permitted, as on a read-only export.
pub const EPERM: u32 = 1;
/// Protocol error: input or output failed.
pub const EIO: u32 = 5;
/// Protocol error: the request is invalid.
pub const EINVAL: u32 = 22;
/// Protocol error: a write beyond the end.
pub const ENOSPC: u32 = 28;
/// Magic number of a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;

const REPLY_MAGIC: u32 = 0x6744_6698;
const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const SILENCE_MAX: Duration = Duration::from_secs(120);

/// Address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP port of the loopback interface.
    Tcp(u16),
}

/// A byte stream to a server.
pub trait Stream: Read + Write + Send + fmt::Debug {}
impl<T: Read + Write + Send + fmt::Debug> Stream for T {}

impl Address {
    /// Returns the NBD URI of `export` at this address.
    #[must_use]
    pub fn uri(&self, export: &str) -> String {
        match self {
            Self::Unix(path) => format!("nbd+unix:///{export}?socket={}", path.display()),
            Self::Tcp(port) => format!("nbd://127.0.0.1:{port}/{export}"),
        }
    }

    /// Opens a connection without sending anything.
    ///
    /// # Errors
    /// Returns the error of the system if the connection fails.
    pub fn open(&self) -> Result<Box<dyn Stream>> {
        match self {
            Self::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(SILENCE_MAX))?;
                stream.set_write_timeout(Some(SILENCE_MAX))?;
                Ok(Box::new(stream))
            }
            Self::Tcp(port) => {
                let stream = TcpStream::connect(("127.0.0.1", *port))?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(SILENCE_MAX))?;
                stream.set_write_timeout(Some(SILENCE_MAX))?;
                Ok(Box::new(stream))
            }
        }
    }
}

/// One connection in transmission.
#[derive(Debug)]
pub struct Client {
    stream: Box<dyn Stream>,
    size: u64,
    flags: u16,
    cookie: u64,
}

/// The server's answer to one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reply {
    /// Cookie of the request that this reply answers.
    pub cookie: u64,
    /// 0, or the protocol's error number.
    pub error: u32,
}

impl Client {
    /// Connects, negotiates, and enters transmission on `export`.
    ///
    /// # Errors
    /// Returns an error of the socket, or `InvalidData` for an answer that violates the protocol.
    pub fn connect(address: &Address, export: &str) -> Result<Self> {
        let mut stream = address.open()?;
        let mut hello = [0; 18];
        stream.read_exact(&mut hello)?;
        if &hello[..8] != b"NBDMAGIC" || &hello[8..16] != OPTION_MAGIC || hello[17] & 1 == 0 {
            return Err(strange(format!("greeting {hello:02x?}")));
        }
        stream.write_all(&u32::from(hello[17] & 3).to_be_bytes())?;
        let mut go = Vec::new();
        go.extend((export.len() as u32).to_be_bytes());
        go.extend(export.as_bytes());
        go.extend(0_u16.to_be_bytes()); // no special information wanted
        stream.write_all(&option(OPT_GO, &go))?;
        let mut export = None;
        loop {
            let (kind, data) = option_reply(&mut stream)?;
            match kind {
                REP_ACK => break,
                REP_INFO if data.len() == 12 && data[..2] == [0, 0] => {
                    export = Some((be64(&data[2..10]), u16::from_be_bytes([data[10], data[11]])));
                }
                REP_INFO => {}
                other => {
                    return Err(strange(format!(
                        "GO answered {other:#x}: {}",
                        String::from_utf8_lossy(&data)
                    )));
                }
            }
        }
        let (size, flags) = export.ok_or_else(|| strange("GO without an export's size"))?;
        Ok(Self { stream, size, flags, cookie: 0 })
    }

    /// Returns the export's size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the export's transmission flags.
    #[must_use]
    pub fn flags(&self) -> u16 {
        self.flags
    }

    /// Returns the raw stream, to send data that the protocol forbids.
    pub fn raw(&mut self) -> &mut dyn Stream {
        &mut *self.stream
    }

    /// Sends a request and returns its cookie; `payload` follows the header (writes only).
    ///
    /// # Errors
    /// Returns an error of the socket.
    pub fn send(
        &mut self,
        flags: u16,
        command: u16,
        offset: u64,
        length: u32,
        payload: &[u8],
    ) -> Result<u64> {
        self.cookie += 1;
        self.stream.write_all(&request(flags, command, self.cookie, offset, length))?;
        self.stream.write_all(payload)?;
        Ok(self.cookie)
    }

    /// Receives the head of the next reply. After a successful read, [`Client::take`] its data.
    ///
    /// # Errors
    /// Returns an error of the socket, or `InvalidData` for a wrong magic number.
    pub fn receive(&mut self) -> Result<Reply> {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head)?;
        let magic = be32(&head[..4]);
        if magic != REPLY_MAGIC {
            return Err(strange(format!("reply magic {magic:#x}")));
        }
        Ok(Reply { cookie: be64(&head[8..]), error: be32(&head[4..8]) })
    }

    /// Receives the data that follow a successful read's reply.
    ///
    /// # Errors
    /// Returns an error of the socket.
    pub fn take(&mut self, data: &mut [u8]) -> Result<()> {
        self.stream.read_exact(data)
    }

    /// Sends one request and waits for its reply; returns the protocol's error number, 0 for success.
    ///
    /// # Errors
    /// Returns an error of the socket, or `InvalidData` if the reply answers another request.
    pub fn call(
        &mut self,
        flags: u16,
        command: u16,
        offset: u64,
        length: u32,
        payload: &[u8],
    ) -> Result<u32> {
        let cookie = self.send(flags, command, offset, length, payload)?;
        let reply = self.receive()?;
        if reply.cookie != cookie {
            return Err(strange(format!("asked {cookie}, answered {}", reply.cookie)));
        }
        Ok(reply.error)
    }

    /// Reads `length` bytes at `offset`.
    ///
    /// # Errors
    /// Returns an error of the socket, or `Other` when the server answers with an error.
    pub fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>> {
        good(self.call(0, CMD_READ, offset, length, &[])?)?;
        let mut data = vec![0; length as usize];
        self.take(&mut data)?;
        Ok(data)
    }

    /// Writes `data` at `offset`.
    ///
    /// # Errors
    /// Returns the same errors as [`Client::read`].
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        good(self.call(0, CMD_WRITE, offset, data.len() as u32, data)?)
    }

    /// Flushes.
    ///
    /// # Errors
    /// Returns the same errors as [`Client::read`].
    pub fn flush(&mut self) -> Result<()> {
        good(self.call(0, CMD_FLUSH, 0, 0, &[])?)
    }

    /// Discards a range.
    ///
    /// # Errors
    /// Returns the same errors as [`Client::read`].
    pub fn trim(&mut self, offset: u64, length: u32) -> Result<()> {
        good(self.call(0, CMD_TRIM, offset, length, &[])?)
    }

    /// Zeroes a range.
    ///
    /// # Errors
    /// Returns the same errors as [`Client::read`].
    pub fn write_zeroes(&mut self, offset: u64, length: u32) -> Result<()> {
        good(self.call(0, CMD_WRITE_ZEROES, offset, length, &[])?)
    }
}

/// Reads a range of a disk in pieces of about 1 MiB that are not aligned to the clusters of an image
/// or to objects.
///
/// # Panics
/// Panics if a read fails.
#[track_caller]
pub fn read_range(client: &mut Client, range: Range<u64>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let len = (MIB - at % MIB + 12288).min(range.end - at);
        bytes.extend(client.read(at, len as u32).unwrap_or_else(|e| panic!("read at {at}: {e}")));
        at += len;
    }
    bytes
}

/// Reads a range of a disk in requests of 1 MiB. The length of the range is a multiple of 1 MiB.
///
/// # Panics
/// Panics if a read fails.
#[track_caller]
pub fn read_mibs(client: &mut Client, range: Range<u64>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for at in range.step_by(MIB as usize) {
        let data = client.read(at, MIB as u32).unwrap_or_else(|e| panic!("read at {at}: {e}"));
        bytes.extend_from_slice(&data);
    }
    bytes
}

/// Returns the bytes of a request's header.
#[must_use]
pub fn request(flags: u16, command: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut head = Vec::with_capacity(28);
    head.extend(REQUEST_MAGIC.to_be_bytes());
    head.extend(flags.to_be_bytes());
    head.extend(command.to_be_bytes());
    head.extend(cookie.to_be_bytes());
    head.extend(offset.to_be_bytes());
    head.extend(length.to_be_bytes());
    head
}

/// Returns the bytes of an option request.
#[must_use]
pub fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Receives one reply to an option: its type and its data.
///
/// # Errors
/// Returns an error of the socket, or `InvalidData` for a wrong magic number or an excessive
/// length.
pub fn option_reply(stream: &mut dyn Stream) -> Result<(u32, Vec<u8>)> {
    let mut head = [0; 20];
    stream.read_exact(&mut head)?;
    let length = be32(&head[16..]) as usize;
    if be64(&head[..8]) != OPTION_REPLY_MAGIC || length > 1 << 16 {
        return Err(strange(format!("option reply {head:02x?}")));
    }
    let mut data = vec![0; length];
    stream.read_exact(&mut data)?;
    Ok((be32(&head[12..16]), data))
}

fn good(error: u32) -> Result<()> {
    match error {
        0 => Ok(()),
        n => Err(Error::other(format!("the server answered error {n}"))),
    }
}

fn strange(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidData, what.into())
}

fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes.try_into().expect("four bytes"))
}

fn be64(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes.try_into().expect("eight bytes"))
}
