//! Control sockets: made, served, and removed again.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::middleware;
use hob_control::Endpoint;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;

use super::auth::{self, Token};
use super::request_id;

/// Connections at once, per socket; further ones wait.
const CONNECTIONS_MAX: usize = 64;

/// Longest wait for the head of a request, seconds: idle connections end too.
const HEAD_SECONDS_MAX: u64 = 60;

/// Why a control socket cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    /// TCP is open to everybody who can reach it.
    #[error("the control socket {0} is on TCP and needs a token; give --token-file or control.token_file")]
    NoToken(Endpoint),
    /// Another daemon is there.
    #[error("somebody answers on {0} already; stop that daemon or choose another socket")]
    InUse(Endpoint),
    /// Not a socket, so not ours to replace.
    #[error("{} exists and is no socket; remove it or choose another path", .0.display())]
    NotASocket(PathBuf),
    /// The system says no.
    #[error("cannot listen on {endpoint}: {source}")]
    System {
        /// Where.
        endpoint: Endpoint,
        /// Why.
        source: io::Error,
    },
}

/// A bound control socket. Its file is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct ControlListener {
    socket: Socket,
    endpoint: Endpoint,
    token: Option<Token>,
}

#[derive(Debug)]
enum Socket {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl ControlListener {
    /// Binds. A Unix socket is for its owner only (mode 0600), and a stale file of one is
    /// replaced if nobody answers on it.
    pub(crate) async fn bind(
        endpoint: Endpoint,
        token: Option<&Token>,
    ) -> Result<ControlListener, ListenError> {
        let system = |source| ListenError::System { endpoint: endpoint.clone(), source };
        match &endpoint {
            Endpoint::Unix(path) => {
                clear_stale(path, &endpoint)?;
                let socket = bind_private(path).map_err(system)?;
                Ok(ControlListener { socket: Socket::Unix(socket), endpoint, token: None })
            }
            Endpoint::Tcp { host, port } => {
                let Some(token) = token else { return Err(ListenError::NoToken(endpoint)) };
                let socket = TcpListener::bind((host.as_str(), *port)).await.map_err(system)?;
                Ok(ControlListener { socket: Socket::Tcp(socket), endpoint, token: Some(token.clone()) })
            }
        }
    }

    /// Where clients connect: with the port that was given when port 0 was asked for.
    pub(crate) fn endpoint(&self) -> Endpoint {
        match (&self.socket, &self.endpoint) {
            (Socket::Tcp(socket), Endpoint::Tcp { host, .. }) => match socket.local_addr() {
                Ok(address) => Endpoint::Tcp { host: host.clone(), port: address.port() },
                Err(_) => self.endpoint.clone(),
            },
            _ => self.endpoint.clone(),
        }
    }

    /// Accepts and serves until dropped.
    pub(crate) async fn serve(self, router: Router) {
        let router = match &self.token {
            Some(token) => router.layer(middleware::from_fn_with_state(token.clone(), auth::check)),
            None => router,
        };
        // Around everything else: who is refused has a name in the log too.
        let router = router.layer(middleware::from_fn(request_id::name));
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let Ok(place) = places.clone().acquire_owned().await else { return };
            let accepted = match &self.socket {
                Socket::Unix(socket) => socket
                    .accept()
                    .await
                    .map(|(stream, _)| tokio::spawn(connection(stream, router.clone(), place))),
                Socket::Tcp(socket) => socket
                    .accept()
                    .await
                    .map(|(stream, _)| tokio::spawn(connection(stream, router.clone(), place))),
            };
            if let Err(error) = accepted {
                tracing::warn!("control socket {}: {error}", self.endpoint);
                // Out of descriptors, most likely: wait for some to be closed.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

impl Drop for ControlListener {
    fn drop(&mut self) {
        if let Endpoint::Unix(path) = &self.endpoint {
            let _ = std::fs::remove_file(path);
        }
    }
}

async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    place: tokio::sync::OwnedSemaphorePermit,
) {
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_secs(HEAD_SECONDS_MAX))
        .max_buf_size(64 << 10)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .await;
    if let Err(error) = served {
        tracing::debug!("control connection: {error}");
    }
    drop(place);
}

fn clear_stale(path: &Path, endpoint: &Endpoint) -> Result<(), ListenError> {
    use std::os::unix::fs::FileTypeExt;

    let system = |source| ListenError::System { endpoint: endpoint.clone(), source };
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(none) if none.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(system(error)),
    };
    if !metadata.file_type().is_socket() {
        return Err(ListenError::NotASocket(path.to_owned()));
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Err(refused) if refused.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(system)
        }
        // Answered, or we may not ask: somebody may live there.
        _ => Err(ListenError::InUse(endpoint.clone())),
    }
}

/// Binds a socket that was never open to others: under another name first, then moved.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        std::fs::create_dir_all(directory)?;
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let _ = std::fs::remove_file(&temporary);
    let bind = || {
        let socket = UnixListener::bind(&temporary)?;
        std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o600))?;
        std::fs::rename(&temporary, path)?;
        Ok(socket)
    };
    bind().inspect_err(|_: &io::Error| {
        let _ = std::fs::remove_file(&temporary);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn a_socket_is_private_and_goes_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/c.sock");
        block_on(async {
            let listener = ControlListener::bind(Endpoint::Unix(path.clone()), None).await.unwrap();
            let mode = std::fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
            drop(listener);
        });
        assert!(!path.exists());
    }

    #[test]
    fn stale_sockets_are_replaced_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.sock");
        let endpoint = Endpoint::Unix(path.clone());
        block_on(async {
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            assert!(path.exists());
            let living = ControlListener::bind(endpoint.clone(), None).await.unwrap();
            let second = ControlListener::bind(endpoint.clone(), None).await;
            assert!(matches!(second, Err(ListenError::InUse(_))));
            assert!(path.exists());
            drop(living);
            std::fs::write(&path, "precious").unwrap();
            let third = ControlListener::bind(endpoint.clone(), None).await;
            assert!(matches!(third, Err(ListenError::NotASocket(_))));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        });
    }

    #[test]
    fn tcp_needs_a_token() {
        let endpoint = Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 };
        let result = block_on(ControlListener::bind(endpoint, None));
        assert!(matches!(result, Err(ListenError::NoToken(_))));
    }
}
