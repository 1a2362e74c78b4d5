//! Where NBD clients come in: accept, negotiate, and hand the socket to the shard of its disk.
//!
//! Negotiation is not worth a shard's time. It runs here, on the control thread's runtime, with a
//! time limit for clients that connect and then say nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hob_control::Endpoint;
use hob_nbd::server::handshake::{Handshake, HandshakeLimits, HandshakeOutcome, Negotiated};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::exports::Exports;

/// A client must have chosen its export by then.
const NEGOTIATION_MAX: Duration = Duration::from_secs(15);

/// The right to be connected. There are as many as connections may be; further clients wait in the
/// kernel.
pub(crate) type Place = OwnedSemaphorePermit;

/// A bound socket. Dropping it removes a Unix socket's file.
pub(crate) struct Listener {
    socket: Socket,
    path: Option<PathBuf>,
}

enum Socket {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    /// Binds. A socket file that nobody listens on any more is replaced.
    pub(crate) async fn bind(endpoint: &Endpoint) -> io::Result<Listener> {
        match endpoint {
            Endpoint::Unix(path) => {
                remove_stale(path)?;
                Ok(Listener { socket: Socket::Unix(bind_ready(path)?), path: Some(path.clone()) })
            }
            Endpoint::Tcp { .. } => {
                let address = endpoint.to_string();
                let address = address.strip_prefix("tcp:").unwrap_or(&address);
                Ok(Listener { socket: Socket::Tcp(TcpListener::bind(address).await?), path: None })
            }
        }
    }

    /// Accepts clients until the task is dropped.
    pub(crate) async fn run(self, exports: Exports, places: Arc<Semaphore>) {
        loop {
            let place = Arc::clone(&places).acquire_owned().await.expect("never closed");
            let accepted = match &self.socket {
                Socket::Unix(listener) => {
                    listener.accept().await.and_then(|(s, _)| s.into_std()).map(OwnedFd::from)
                }
                Socket::Tcp(listener) => listener.accept().await.and_then(|(s, _)| {
                    s.set_nodelay(true)?;
                    s.into_std().map(OwnedFd::from)
                }),
            };
            let is_unix = self.path.is_some();
            match accepted {
                Ok(socket) => {
                    let exports = exports.clone();
                    tokio::spawn(async move {
                        if let Err(error) = serve(socket, is_unix, &exports, place).await {
                            tracing::info!("a client did not get as far as an export: {error}");
                        }
                    });
                }
                Err(error) => {
                    // Out of descriptors, most likely: others must leave first.
                    tracing::warn!(%error, "cannot accept a client");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Binds under another name first, so that a socket that is there answers. What is in its place stays, and binding fails.
fn bind_ready(path: &Path) -> io::Result<UnixListener> {
    let mut other = path.as_os_str().to_owned();
    other.push(format!(".{}", std::process::id()));
    let _ = std::fs::remove_file(&other);
    let listener = match UnixListener::bind(&other) {
        // The names of sockets have a limit, which this one may keep to and the other not.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => return UnixListener::bind(path),
        bound => bound?,
    };
    let linked = std::fs::hard_link(&other, path);
    std::fs::remove_file(&other)?;
    match linked {
        Ok(()) => Ok(listener),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Err(io::Error::new(io::ErrorKind::AddrInUse, "Address already in use"))
        }
        Err(error) => Err(error),
    }
}

/// Removes a socket file that nobody listens on. Anything else in its place stays, and binding fails.
pub(crate) fn remove_stale(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt;
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => {
            match std::os::unix::net::UnixStream::connect(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
                _ => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

async fn serve(socket: OwnedFd, is_unix: bool, exports: &Exports, place: Place) -> io::Result<()> {
    let (socket, outcome) = if is_unix {
        let mut stream = tokio::net::UnixStream::from_std(socket.into())?;
        let outcome = tokio::time::timeout(NEGOTIATION_MAX, negotiate(&mut stream, exports)).await;
        (OwnedFd::from(stream.into_std()?), outcome)
    } else {
        let mut stream = tokio::net::TcpStream::from_std(socket.into())?;
        let outcome = tokio::time::timeout(NEGOTIATION_MAX, negotiate(&mut stream, exports)).await;
        (OwnedFd::from(stream.into_std()?), outcome)
    };
    let chosen = outcome.map_err(|_| io::Error::other("it said nothing for too long"))??;
    if let Some((negotiated, leftover)) = chosen
        && let Some(export) = exports.get(&negotiated.export)
    {
        export.shard.attach(export.disk, socket, negotiated, leftover, place).map_err(io::Error::other)?;
    }
    Ok(())
}

/// Negotiates; `None` when the client said goodbye.
async fn negotiate(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    exports: &Exports,
) -> io::Result<Option<(Negotiated, Vec<u8>)>> {
    let mut handshake = Handshake::new(HandshakeLimits::default());
    let mut received: Vec<u8> = Vec::with_capacity(4096);
    loop {
        let used = handshake.handle_input(&received, exports);
        received.drain(..used);
        if let Some(output) = handshake.poll_output() {
            stream.write_all(&output).await?;
            continue;
        }
        match handshake.poll_outcome() {
            Some(HandshakeOutcome::Done(negotiated)) => return Ok(Some((negotiated, received))),
            Some(HandshakeOutcome::Aborted) => return Ok(None),
            Some(HandshakeOutcome::Failed(error)) => return Err(io::Error::other(error)),
            None if used > 0 => continue,
            None => {}
        }
        if stream.read_buf(&mut received).await? == 0 {
            return Ok(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_that_is_there_answers_and_replaces_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nbd.sock");
        let listener = Listener::bind(&Endpoint::Unix(path.clone())).await.unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        let again = Listener::bind(&Endpoint::Unix(path.clone())).await;
        assert_eq!(again.err().unwrap().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        assert!(!path.exists());
        std::fs::write(&path, "a file of somebody's").unwrap();
        let again = Listener::bind(&Endpoint::Unix(path.clone())).await;
        assert_eq!(again.err().unwrap().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a file of somebody's");
    }
}
