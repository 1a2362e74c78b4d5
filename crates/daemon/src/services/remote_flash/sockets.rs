//! Local sockets that lead to flash of other hosts.
//!
//! hob reaches a device on another host through a local socket. Each connection to the socket is
//! forwarded over TLS to the lending host. The connection names the incarnation of the flash lease
//! that the lending host returned last. This host requests the lease before it opens the device.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hob_control::peer::{Peer, PeerError};
use hob_control::{ClientTls, FlashLease, FlashLeaseRequest, Problem};
use tokio::net::{UnixListener, UnixStream};

use super::RemoteFlash;
use crate::api_error::{ApiError, ErrorKind, Result, failed};
use crate::background::spawn;
use crate::relay;
use crate::socket_access::{SocketAccess, bind_socket, serve_each};
use crate::state::PeerState;

/// Maximum time for a lending host to answer a request.
const ASK_MAX: Duration = Duration::from_secs(6);

/// Sockets of remote devices by path. Dropping a socket closes it.
pub(super) type LenderSockets = Mutex<BTreeMap<PathBuf, LenderSocket>>;

/// A local socket that leads to a lending host.
#[derive(Debug)]
pub(super) struct LenderSocket {
    to: PeerState,
    /// The flash lease on another host to which connections are forwarded.
    lease: Arc<Mutex<Option<FlashLease>>>,
    /// Locked while this host asks the lending host whether it is available again.
    asking: Arc<tokio::sync::Mutex<()>>,
    task: tokio::task::JoinHandle<()>,
}

impl LenderSocket {
    /// Returns the flash lease to which connections are forwarded; `None` until the lending host
    /// has answered.
    pub(super) fn lease(&self) -> Option<FlashLease> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for LenderSocket {
    fn drop(&mut self) {
        self.task.abort();
        let _ = std::fs::remove_file(&self.to.path);
    }
}

/// Address of a lending host's control API, and the credentials for it.
#[derive(Clone, Debug)]
struct Lender {
    host: String,
    port: u16,
    tls: ClientTls,
    /// Name of this host, as the lending host knows it.
    me: String,
}

impl Lender {
    fn peer(&self) -> Peer {
        Peer::new(self.host.clone(), self.port, self.tls.clone())
    }

    /// Forwards a local connection to the lending host, until one side closes it.
    async fn connect(self, lease: Arc<Mutex<Option<FlashLease>>>, here: UnixStream) {
        let epoch = lease
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .and_then(|lease| lease.epoch.clone());
        let Some(epoch) = epoch else { return };
        let path = format!("/v1/loans/{}/data?epoch={epoch}", self.me);
        match self.peer().data(&path).await {
            Ok(stream) => relay::relay(stream, here).await,
            Err(error) => {
                tracing::debug!("cannot connect to the lender {}:{}: {error}", self.host, self.port)
            }
        }
    }
}

impl RemoteFlash {
    fn lender(&self, to: &str) -> Result<Lender> {
        let (host, port, tls) = self.peers.other_daemon(to)?;
        let directory = &self.peers.transport()?.directory;
        let me = crate::cluster::identity(directory).map_err(|error| ApiError::failed(error.to_string()))?;
        Ok(Lender { host, port, tls, me })
    }

    /// Returns the socket path of a device on that host.
    pub(in crate::services) fn socket_for(&self, to: &str) -> Result<PathBuf> {
        Ok(self.peers.transport()?.directory.join("peers").join(to.replace('/', "_")))
    }

    /// Listens on the socket of a remote device, unless this host already listens on the socket.
    pub(in crate::services) fn open_socket(&self, to: &PeerState) -> Result<()> {
        let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        if sockets.contains_key(&to.path) {
            return Ok(());
        }
        let lender = self.lender(&to.host)?;
        let failed = |error: std::io::Error| failed!("cannot listen at {}: {error}", to.path.display());
        let directory = to.path.parent().unwrap_or(Path::new("/"));
        std::fs::create_dir_all(directory).map_err(failed)?;
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o700)).map_err(failed)?;
        let listener = bind_socket(&to.path, SocketAccess::default())
            .and_then(UnixListener::from_std)
            .map_err(failed)?;
        let lease = Arc::new(Mutex::new(None));
        let known = lease.clone();
        let connect = move |here| lender.clone().connect(known.clone(), here);
        let task = spawn(serve_each(listener, "remote device", connect));
        sockets.insert(to.path.clone(), LenderSocket { to: to.clone(), lease, asking: Arc::default(), task });
        Ok(())
    }

    /// Returns the lending host behind the socket of a device, if there is one.
    pub(in crate::services) fn lender_at(&self, path: &Path) -> Option<PeerState> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner).get(path).map(|socket| socket.to.clone())
    }

    pub(in crate::services) fn close_socket(&self, path: &Path) {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner).remove(path);
    }

    /// Requests or renews the flash lease of a remote device. New connections go to the returned
    /// incarnation.
    pub(in crate::services) async fn ask_lease(&self, to: &PeerState) -> Result<FlashLease> {
        let lender = self.lender(&to.host)?;
        let ask = FlashLeaseRequest { name: self.peers.own_name(), size: to.size };
        let path = format!("/v1/loans/{}", lender.me);
        let lease: FlashLease =
            lender.peer().ask(&path, &ask, ASK_MAX).await.map_err(|error| match error {
                PeerError::Refused { problem, .. } => {
                    let what = Problem { error: format!("{}: {}", to.host, problem.error), ..problem };
                    ApiError { kind: ErrorKind::Conflict, problem: what }
                }
                PeerError::Lost(why) => {
                    failed!("cannot get a flash lease from {}: {why}", to.host)
                }
            })?;
        let sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(socket) = sockets.get(&to.path) {
            *socket.lease.lock().unwrap_or_else(PoisonError::into_inner) = Some(lease.clone());
        }
        Ok(lease)
    }

    /// Returns a flash lease to its lending host, if the lending host answers.
    pub(in crate::services) async fn give_back(&self, to: &PeerState) {
        let Ok(lender) = self.lender(&to.host) else { return };
        let path = format!("/v1/loans/{}/end", lender.me);
        let told: Result<Vec<String>, _> = lender.peer().ask(&path, &(), ASK_MAX).await;
        match told {
            Ok(notes) => notes.iter().for_each(|note| tracing::info!("{}: {note}", to.host)),
            Err(error) => tracing::warn!("cannot return the flash lease to its lender {}: {error}", to.host),
        }
    }

    /// Requests the flash lease like [`RemoteFlash::ask_lease`], unless another request is in
    /// progress.
    pub(in crate::services) async fn ask_lease_once(&self, to: &PeerState) -> Option<Result<FlashLease>> {
        if let Err(error) = self.open_socket(to) {
            return Some(Err(error));
        }
        let asking = {
            let sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
            sockets.get(&to.path)?.asking.clone()
        };
        let _asking = asking.try_lock().ok()?;
        Some(self.ask_lease(to).await)
    }
}
