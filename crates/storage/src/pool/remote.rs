//! A pool device on another host, served as an NBD export at a socket of this host.
//!
//! The listener at the socket connects to the other host. The listener ensures that each connection
//! reaches the same device, served by the same process of the other host. So a broken connection
//! loses no acknowledged write. `RemoteFile` reads and writes superblock and segment table, on
//! threads that may block. Cache I/O uses a separate connection of each shard ([`RemoteFlash`]).
//!
//! # Errors
//! hob refuses an export that cannot flush or is read-only. A request without a reply within
//! [`WAIT_MAX`] fails. Further requests within [`PAUSE`] fail immediately.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use hob_engine::command::Access;
use hob_engine::io::IoError;
use hob_nbd::TransmissionFlags;
use hob_nbd::uri::{Address, NbdUri};

use super::error::PoolError;
use crate::backing::nbd::connect::{Link, connect};
use crate::backing::nbd::sample::{self, SampleError};
use crate::backing::nbd::{NbdBacking, open_uri};
use crate::backing::{BackingOptions, OpenError};

/// Name under which a lending host exports its device by NBD.
pub const REMOTE_EXPORT: &str = "lent";

/// Time limit for connecting, and for a read, write or flush of superblock or table.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// Time after which a failing request suspends the device: further requests fail immediately for
/// [`PAUSE`].
const SILENT_AFTER: Duration = Duration::from_secs(2);

/// Duration of a device's suspension. Reading a journal sends thousands of requests. Without the
/// suspension, each of them would time out.
const PAUSE: Duration = Duration::from_secs(30);

/// Time limit of a shard's I/O: a year, because I/O to a remote device waits until the device
/// answers or is abandoned.
const HELD_MAX: Duration = Duration::from_secs(86_400 * 365);

/// Maximum payload of one request, bytes. Every server accepts this size.
const PIECE_BYTES: usize = 1 << 20;

/// A remote device, for threads that may block.
#[derive(Debug)]
pub(crate) struct RemoteFile {
    socket: PathBuf,
    size_bytes: u64,
    connection: Mutex<Connection>,
    /// Whether the device was abandoned: no more requests are sent.
    given_up: AtomicBool,
}

#[derive(Debug)]
struct Connection {
    /// Connection to the device; `None` after it broke. The next request connects again.
    link: Option<Link>,
    /// Time until which requests to the device fail immediately; `None` if the device is not
    /// suspended.
    paused_until: Option<Instant>,
}

/// A remote device, for a shard.
pub struct RemoteFlash {
    pub(crate) driver: NbdBacking,
}

impl std::fmt::Debug for RemoteFlash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RemoteFlash")
    }
}

fn uri(socket: &Path) -> NbdUri {
    NbdUri::new(Address::Unix { path: socket.to_owned() }, REMOTE_EXPORT)
}

impl RemoteFile {
    /// Connects to the remote device behind a socket.
    pub(crate) fn open(socket: &Path) -> Result<RemoteFile, PoolError> {
        let unworkable = |what: String| PoolError::Unworkable {
            reason: format!("cannot use the remote device at socket {}: {what}", socket.display()),
        };
        let link = connect(&uri(socket), WAIT_MAX, WAIT_MAX).map_err(unworkable)?;
        let flags = link.negotiated.flags;
        if flags.contains(TransmissionFlags::READ_ONLY) || !flags.contains(TransmissionFlags::SEND_FLUSH) {
            return Err(unworkable("the export must be writable and support FLUSH".to_owned()));
        }
        let size_bytes = link.negotiated.size_bytes;
        Ok(RemoteFile {
            socket: socket.to_owned(),
            size_bytes,
            connection: Mutex::new(Connection { link: Some(link), paused_until: None }),
            given_up: AtomicBool::new(false),
        })
    }

    /// Abandons the device: every further request fails immediately.
    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Returns a connection for a shard, after its handshake.
    pub(crate) fn for_shard(&self) -> Result<RemoteFlash, PoolError> {
        let options = BackingOptions {
            wait_max: HELD_MAX,
            connect_max: WAIT_MAX,
            reconnect_max: Duration::from_secs(1),
            keeps_writes: true,
            ..BackingOptions::default()
        };
        let what = format!("the remote device at socket {}", self.socket.display());
        let driver = open_uri(&uri(&self.socket), Access::ReadWrite, &options, what, &|_| String::new())
            .map_err(|error: OpenError| PoolError::Unworkable { reason: error.to_string() })?;
        Ok(RemoteFlash { driver })
    }

    pub(crate) fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let mut at = offset;
        for piece in bytes.chunks_mut(PIECE_BYTES) {
            self.with(|link| sample::read(link, at, piece, WAIT_MAX))?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    pub(crate) fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut at = offset;
        for piece in bytes.chunks(PIECE_BYTES) {
            self.with(|link| sample::write(link, at, piece, WAIT_MAX))?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    pub(crate) fn sync_data(&self) -> io::Result<()> {
        self.with(|link| sample::flush(link, WAIT_MAX))
    }

    /// Sends one request, over the present connection or a new one. The function does not retry
    /// after a broken connection, because the caller's timeout is for one attempt.
    fn with(&self, ask: impl FnMut(&Link) -> Result<(), SampleError>) -> io::Result<()> {
        if self.given_up.load(Ordering::Relaxed) {
            return Err(io::Error::other("the remote device was abandoned"));
        }
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let began = Instant::now();
        if connection.paused_until.is_some_and(|until| began < until) {
            return Err(io::Error::other("the remote device did not answer a recent request"));
        }
        let asked = self.ask(&mut connection.link, ask);
        let is_silent = asked.is_err() && began.elapsed() >= SILENT_AFTER;
        connection.paused_until = is_silent.then(|| Instant::now() + PAUSE);
        asked
    }

    fn ask(
        &self,
        place: &mut Option<Link>,
        mut ask: impl FnMut(&Link) -> Result<(), SampleError>,
    ) -> io::Result<()> {
        let link = match place.take() {
            Some(link) => link,
            None => {
                let link = connect(&uri(&self.socket), WAIT_MAX, WAIT_MAX).map_err(io::Error::other)?;
                if link.negotiated.size_bytes != self.size_bytes {
                    return Err(io::Error::other("the remote device has another size after a reconnection"));
                }
                link
            }
        };
        match ask(&link) {
            Ok(()) => {
                *place = Some(link);
                Ok(())
            }
            Err(SampleError::Refused(error)) => {
                *place = Some(link);
                Err(match error {
                    IoError::NoSpace => io::Error::from_raw_os_error(libc::ENOSPC),
                    _ => io::Error::from_raw_os_error(libc::EIO),
                })
            }
            Err(SampleError::Broken(why)) => Err(io::Error::other(why)),
        }
    }
}
