//! Sockets that lead to flash of other hosts.
//!
//! A device on another host is a socket of this one: whoever connects there is connected with the lender, inside TLS, to the lease as
//! it was when the device was opened.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hob_control::peer::{Peer, PeerError};
use hob_control::{ClientTls, Loan, LoanAsk, Problem};
use tokio::net::{UnixListener, UnixStream};

use super::RemoteFlash;
use crate::daemon::manager::api_error::{ApiError, ErrorKind};
use crate::daemon::nbd_listener::bind_socket;
use crate::daemon::relay;
use crate::daemon::socket_access::SocketAccess;
use crate::daemon::state::PeerState;

/// A lender answers a question within that, or is not there.
const ASK_MAX: Duration = Duration::from_secs(6);

/// The sockets of borrowed devices, by their paths. Dropping one closes it.
pub(super) type LenderSockets = Mutex<BTreeMap<PathBuf, LenderSocket>>;

/// A socket that leads to a lender.
#[derive(Debug)]
pub(super) struct LenderSocket {
    to: PeerState,
    /// The loan that connections are to.
    loan: Arc<Mutex<Option<Loan>>>,
    /// Held while the lender is asked whether it is back.
    asking: Arc<tokio::sync::Mutex<()>>,
    task: tokio::task::JoinHandle<()>,
}

impl LenderSocket {
    /// The lease that connections are to.
    pub(super) fn lease(&self) -> Option<Loan> {
        self.loan.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for LenderSocket {
    fn drop(&mut self) {
        self.task.abort();
        let _ = std::fs::remove_file(&self.to.path);
    }
}

/// Where a lender's control API is, and what is shown to it.
#[derive(Clone, Debug)]
struct Lender {
    host: String,
    port: u16,
    tls: ClientTls,
    /// What this host is to it.
    me: String,
}

impl Lender {
    fn peer(&self) -> Peer {
        Peer::new(self.host.clone(), self.port, self.tls.clone())
    }

    /// Connects a shard, or whoever reads tables, with the loan. Ends when one of them leaves.
    async fn connect(self, loan: Arc<Mutex<Option<Loan>>>, here: UnixStream) {
        let epoch =
            loan.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(|loan| loan.epoch.clone());
        let Some(epoch) = epoch else { return };
        let path = format!("/v1/loans/{}/data?epoch={epoch}", self.me);
        match self.peer().data(&path).await {
            Ok(stream) => relay::relay(stream, here).await,
            Err(error) => tracing::debug!("no connection with {}:{}: {error}", self.host, self.port),
        }
    }
}

impl RemoteFlash {
    fn lender(&self, to: &str) -> Result<Lender, ApiError> {
        let (host, port, tls) = self.0.peers.other_daemon(to)?;
        let directory = &self.0.peers.transport()?.directory;
        let me = crate::daemon::cluster::identity(directory)
            .map_err(|error| ApiError::failed(error.to_string()))?;
        Ok(Lender { host, port, tls, me })
    }

    /// The socket that a device on that host has.
    pub(in crate::daemon::manager) fn socket_for(&self, to: &str) -> Result<PathBuf, ApiError> {
        Ok(self.0.peers.transport()?.directory.join("peers").join(to.replace('/', "_")))
    }

    /// Listens at the socket of a device on another host, unless that is done already.
    pub(in crate::daemon::manager) fn open_socket(&self, to: &PeerState) -> Result<(), ApiError> {
        let mut sockets = self.0.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        if sockets.contains_key(&to.path) {
            return Ok(());
        }
        let lender = self.lender(&to.host)?;
        let failed = |error: std::io::Error| {
            ApiError::failed(format!("cannot listen at {}: {error}", to.path.display()))
        };
        let directory = to.path.parent().unwrap_or(Path::new("/"));
        std::fs::create_dir_all(directory).map_err(failed)?;
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o700)).map_err(failed)?;
        let listener = bind_socket(&to.path, SocketAccess::default())
            .and_then(UnixListener::from_std)
            .map_err(failed)?;
        let loan = Arc::new(Mutex::new(None));
        let known = loan.clone();
        let task = tokio::spawn(async move {
            // What it has connected ends with it.
            let mut joined = tokio::task::JoinSet::new();
            loop {
                while joined.try_join_next().is_some() {}
                match listener.accept().await {
                    Ok((here, _)) => drop(joined.spawn(lender.clone().connect(known.clone(), here))),
                    Err(error) => {
                        tracing::warn!(%error, "cannot connect with a lender");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                }
            }
        });
        sockets.insert(to.path.clone(), LenderSocket { to: to.clone(), loan, asking: Arc::default(), task });
        Ok(())
    }

    /// Where the socket of a device leads, if it leads anywhere.
    pub(in crate::daemon::manager) fn lender_at(&self, path: &Path) -> Option<PeerState> {
        self.0
            .sockets
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(path)
            .map(|socket| socket.to.clone())
    }

    /// Ends what listens at the socket of a device.
    pub(in crate::daemon::manager) fn close_socket(&self, path: &Path) {
        self.0.sockets.lock().unwrap_or_else(PoisonError::into_inner).remove(path);
    }

    /// Asks a lender for its loan: for the first time, or as it is now. Connections are to this one from now on.
    pub(in crate::daemon::manager) async fn ask_lease(&self, to: &PeerState) -> Result<Loan, ApiError> {
        let lender = self.lender(&to.host)?;
        let ask = LoanAsk { name: self.0.peers.own_name(), size: to.size };
        let path = format!("/v1/loans/{}", lender.me);
        let loan: Loan = lender.peer().ask(&path, &ask, ASK_MAX).await.map_err(|error| match error {
            PeerError::Refused { problem, .. } => {
                let what = Problem { error: format!("{}: {}", to.host, problem.error), ..problem };
                ApiError { kind: ErrorKind::Conflict, problem: what }
            }
            PeerError::Lost(why) => ApiError::failed(format!("{} lends nothing: {why}", to.host)),
        })?;
        let sockets = self.0.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(socket) = sockets.get(&to.path) {
            *socket.loan.lock().unwrap_or_else(PoisonError::into_inner) = Some(loan.clone());
        }
        Ok(loan)
    }

    /// Gives a loan back, as far as its lender can be told.
    pub(in crate::daemon::manager) async fn give_back(&self, to: &PeerState) {
        let Ok(lender) = self.lender(&to.host) else { return };
        let path = format!("/v1/loans/{}/end", lender.me);
        let told: Result<Vec<String>, _> = lender.peer().ask(&path, &(), ASK_MAX).await;
        match told {
            Ok(notes) => notes.iter().for_each(|note| tracing::info!("{}: {note}", to.host)),
            Err(error) => {
                tracing::warn!("{} does not answer, so its flash lease is not returned yet: {error}", to.host)
            }
        }
    }

    /// As [`RemoteFlash::ask_lease`], unless somebody is asking.
    pub(in crate::daemon::manager) async fn ask_lease_once(
        &self,
        to: &PeerState,
    ) -> Option<Result<Loan, ApiError>> {
        if let Err(error) = self.open_socket(to) {
            return Some(Err(error));
        }
        let asking = {
            let sockets = self.0.sockets.lock().unwrap_or_else(PoisonError::into_inner);
            sockets.get(&to.path)?.asking.clone()
        };
        let _asking = asking.try_lock().ok()?;
        Some(self.ask_lease(to).await)
    }
}
