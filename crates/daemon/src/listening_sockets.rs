//! Listening sockets, and how they are handed from one program to the next at an upgrade.
//!
//! A listening socket that stays open refuses no client: connections queue in the kernel until the
//! next program accepts them. So the file of a Unix socket stays when its listener is dropped, and
//! the upgrade waits until no client is in the middle of its handshake.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hob_control::Endpoint;
use tokio::sync::watch;

/// Interval at which [`ListeningSockets::until_handshakes_end`] checks for handshakes in progress.
const CHECK_EVERY: Duration = Duration::from_millis(2);

/// Returns the name of a listening socket: its protocol and its address.
pub(crate) fn name(protocol: &str, endpoint: &Endpoint) -> String {
    format!("{protocol} {endpoint}")
}

/// The listening sockets of NBD and of the control API, which an upgrade hands to the next program.
/// Clones share the same sockets.
#[derive(Clone, Debug)]
pub(crate) struct ListeningSockets {
    table: Arc<Mutex<Table>>,
    paused: Arc<watch::Sender<bool>>,
    /// Each handshake in progress has a clone of this value, so that the number of clones is the
    /// number of handshakes.
    handshakes: Arc<()>,
}

#[derive(Debug, Default)]
struct Table {
    /// Sockets that the previous program left open and that are not used yet.
    inherited: BTreeMap<String, OwnedFd>,
    /// A second descriptor of each socket in use.
    open: BTreeMap<String, OwnedFd>,
    /// Sockets that stay open for the next program although their listeners are dropped; `None`
    /// before the upgrade.
    kept: Option<BTreeSet<String>>,
}

/// A handshake in progress. Dropping this value ends the handshake.
#[derive(Debug)]
pub(crate) struct HandshakeGuard {
    _handshakes: Arc<()>,
}

impl Default for ListeningSockets {
    fn default() -> ListeningSockets {
        ListeningSockets::inherited(Vec::new())
    }
}

impl ListeningSockets {
    /// Creates the value with the sockets that the previous program left open.
    pub(crate) fn inherited(open: Vec<(String, OwnedFd)>) -> ListeningSockets {
        let table = Table { inherited: open.into_iter().collect(), ..Table::default() };
        ListeningSockets {
            table: Arc::new(Mutex::new(table)),
            paused: Arc::new(watch::Sender::new(false)),
            handshakes: Arc::default(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the inherited socket of this name. `None` if there is none, or if no client can
    /// reach the socket because its file was removed.
    pub(crate) fn take_inherited(&self, name: &str) -> Option<OwnedFd> {
        let socket = self.table().inherited.remove(name)?;
        let has_file = path_of(name).is_none_or(|path| is_socket(&path));
        let listens = rustix::net::sockopt::socket_acceptconn(&socket).unwrap_or(false);
        (has_file && listens).then_some(socket)
    }

    /// Adds a socket at which this program accepts connections.
    pub(crate) fn add(&self, name: String, socket: impl AsFd) {
        match socket.as_fd().try_clone_to_owned() {
            Ok(second) => drop(self.table().open.insert(name, second)),
            Err(error) => tracing::warn!("{name}: this socket cannot stay open during an upgrade: {error}"),
        }
    }

    /// Removes a socket whose listener was dropped, and its file. Keeps both if the socket is
    /// handed over in an upgrade.
    pub(crate) fn remove(&self, name: &str) {
        let mut table = self.table();
        if table.kept.as_ref().is_some_and(|kept| kept.contains(name)) {
            return;
        }
        table.open.remove(name);
        drop(table);
        if let Some(path) = path_of(name) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Keeps all sockets open for the next program, also when their listeners are dropped.
    pub(crate) fn keep_open(&self) {
        let mut table = self.table();
        table.kept = Some(table.open.keys().cloned().collect());
    }

    /// Removes and returns the listening sockets that were kept open for the next program.
    pub(crate) fn take_kept_open(&self) -> Vec<(String, OwnedFd)> {
        std::mem::take(&mut self.table().open).into_iter().collect()
    }

    /// Closes inherited sockets that this configuration does not use.
    pub(crate) fn close_unused(&self) {
        for name in self.table().inherited.keys() {
            tracing::info!("{name}: this socket is closed, because the configuration no longer lists it");
        }
        self.close_inherited();
    }

    /// Closes inherited sockets that are not in use, and removes their files.
    pub(crate) fn close_inherited(&self) {
        let unused = std::mem::take(&mut self.table().inherited);
        for (name, socket) in unused {
            drop(socket);
            if let Some(path) = path_of(&name).filter(|path| is_socket(path)) {
                let _ = std::fs::remove_file(path);
            }
        }
    }

    /// Stops accepting connections until [`resume`](Self::resume).
    pub(crate) fn pause(&self) {
        self.paused.send_replace(true);
    }

    /// Accepts connections again.
    pub(crate) fn resume(&self) {
        self.paused.send_replace(false);
    }

    /// Waits until no call of [`Self::pause`] is in effect, so connections are accepted.
    pub(crate) async fn until_resumed(&self) {
        // An error would mean that the sender was dropped, but `self` owns the sender.
        let _ = self.paused.subscribe().wait_for(|paused| !paused).await;
    }

    /// Waits until a call of [`Self::pause`] stops the acceptance of connections.
    pub(crate) async fn until_paused(&self) {
        let _ = self.paused.subscribe().wait_for(|paused| *paused).await;
    }

    /// Counts a handshake as in progress until the guard is dropped.
    pub(crate) fn begin_handshake(&self) -> HandshakeGuard {
        HandshakeGuard { _handshakes: self.handshakes.clone() }
    }

    /// Waits until no handshake is in progress, for at most `time_max`.
    pub(crate) async fn until_handshakes_end(&self, time_max: Duration) {
        let ended = async {
            while Arc::strong_count(&self.handshakes) > self.clones() {
                tokio::time::sleep(CHECK_EVERY).await;
            }
        };
        if tokio::time::timeout(time_max, ended).await.is_err() {
            tracing::info!("NBD clients that had not chosen an export yet must reconnect");
        }
    }

    /// Returns the number of clones of this value. Each clone has a clone of `handshakes`.
    fn clones(&self) -> usize {
        Arc::strong_count(&self.table)
    }
}

/// Returns the path of a Unix socket; `None` for TCP.
fn path_of(name: &str) -> Option<PathBuf> {
    name.split_once(" unix:").map(|(_, path)| path.into())
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_kept_socket_keeps_its_file_and_its_queued_connections() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let name = name("nbd", &Endpoint::Unix(path.clone()));
        let listening = ListeningSockets::default();
        let listener = UnixListener::bind(&path).unwrap();
        listening.add(name.clone(), &listener);
        listening.keep_open();
        let next = ListeningSockets::inherited(listening.take_kept_open());
        drop(listener);
        listening.remove(&name);
        let _client = UnixStream::connect(&path).unwrap();
        assert!(next.take_inherited("nbd unix:/another").is_none());
        let listener = UnixListener::from(next.take_inherited(&name).unwrap());
        assert!(next.take_inherited(&name).is_none(), "it can be taken once");
        listener.accept().unwrap();
        // Without another upgrade its file is removed.
        next.add(name.clone(), &listener);
        drop(listener);
        next.remove(&name);
        assert!(!path.exists());
        assert!(next.take_kept_open().is_empty());
    }

    #[test]
    fn unused_and_unusable_inherited_sockets_are_closed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |file: &str| dir.path().join(file);
        let inherit = |file: &str, fd: OwnedFd| {
            let name = name("nbd", &Endpoint::Unix(at(file)));
            (name.clone(), ListeningSockets::inherited(vec![(name, fd)]))
        };
        let (_, listening) = inherit("a", UnixListener::bind(at("a")).unwrap().into());
        listening.close_unused();
        assert!(!at("a").exists());
        // Without its file no client can connect.
        let (name, listening) = inherit("b", UnixListener::bind(at("b")).unwrap().into());
        std::fs::remove_file(at("b")).unwrap();
        assert!(listening.take_inherited(&name).is_none());
        // Descriptors that do not listen.
        let _other = UnixListener::bind(at("c")).unwrap();
        let (name, listening) = inherit("c", UnixStream::pair().unwrap().0.into());
        assert!(listening.take_inherited(&name).is_none());
        let (name, listening) = inherit("c", tempfile::tempfile().unwrap().into());
        assert!(listening.take_inherited(&name).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_ends_when_no_handshake_is_in_progress() {
        let listening = ListeningSockets::default();
        let clone = listening.clone();
        let guest = listening.begin_handshake();
        let start = tokio::time::Instant::now();
        listening.until_handshakes_end(Duration::from_secs(3)).await;
        assert!(start.elapsed() >= Duration::from_secs(3));
        let leaving = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            drop(guest);
        };
        let start = tokio::time::Instant::now();
        tokio::join!(leaving, clone.until_handshakes_end(Duration::from_secs(60)));
        assert!(start.elapsed() < Duration::from_secs(2));
        listening.pause();
        clone.until_paused().await;
        assert!(tokio::time::timeout(Duration::from_secs(1), clone.until_resumed()).await.is_err());
        listening.resume();
        clone.until_resumed().await;
    }
}
