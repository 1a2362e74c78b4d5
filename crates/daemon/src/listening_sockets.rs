//! Listening sockets, and how they are handed from one program to the next at an upgrade.
//!
//! A listening socket that stays open refuses no client: connections queue in the kernel until the
//! next program accepts them. So the file of a Unix socket stays when its listener is dropped, and
//! the upgrade waits until no client is in the middle of its handshake.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hob_control::Endpoint;
use tokio::sync::watch;

use super::writable;

/// Interval at which [`ListeningSockets::until_handshakes_end`] checks for handshakes in progress.
const CHECK_EVERY: Duration = Duration::from_millis(2);

/// Environment variable of a program that a daemon starts with `--check`: the names of the daemon's
/// listening sockets, one on each line.
pub(crate) const VARIABLE: &str = "HOB_LISTENING";

/// Returns the name of a listening socket: its protocol and its address.
pub(crate) fn name(protocol: &str, endpoint: &Endpoint) -> String {
    format!("{protocol} {endpoint}")
}

/// Returns the address for clients of a TCP socket that is bound to `bound`: `endpoint`, with the
/// actual port if the configured port is 0.
pub(crate) fn for_clients(endpoint: &Endpoint, bound: io::Result<SocketAddr>) -> Endpoint {
    match (endpoint, bound) {
        (Endpoint::Tcp { host, .. }, Ok(bound)) => Endpoint::Tcp { host: host.clone(), port: bound.port() },
        _ => endpoint.clone(),
    }
}

/// Checks that this host can listen at an address, and that the file of a new Unix socket can be
/// created. `daemon` is the value of [`VARIABLE`], or `None` if it is unknown which sockets a
/// running daemon has.
///
/// # Errors
/// Returns the error of the system.
pub(crate) fn check_address(protocol: &str, endpoint: &Endpoint, daemon: Option<&str>) -> io::Result<()> {
    match endpoint {
        Endpoint::Tcp { .. } => check_port(protocol, endpoint, daemon),
        Endpoint::Unix(path) => match std::fs::symlink_metadata(path) {
            Err(_) => writable::check(path.parent().unwrap_or(path)),
            Ok(_) if !is_socket(path) => Err(io::Error::other("the path exists and is not a socket")),
            Ok(_) if is_of_other_program(endpoint, path, daemon) => Err(ErrorKind::AddrInUse.into()),
            Ok(_) => Ok(()),
        },
    }
}

/// Returns true if a program other than the daemon listens on a Unix socket. Without the daemon's
/// names, the socket may belong to a running daemon.
fn is_of_other_program(endpoint: &Endpoint, path: &Path, daemon: Option<&str>) -> bool {
    let address = endpoint.to_string();
    let is_own = |name: &str| name.split_once(' ').is_some_and(|(_, own)| own == address);
    daemon.is_some_and(|names| !names.lines().any(is_own)) && UnixStream::connect(path).is_ok()
}

/// Checks that this host can listen at a TCP address, like [`check_address`]. Unix sockets are not
/// checked.
///
/// # Errors
/// Returns the error of the system, for example because another program has the port.
pub(crate) fn check_port(protocol: &str, endpoint: &Endpoint, daemon: Option<&str>) -> io::Result<()> {
    let Endpoint::Tcp { host, port } = endpoint else { return Ok(()) };
    let own: Vec<&str> = daemon.unwrap_or_default().lines().collect();
    if own.contains(&name(protocol, endpoint).as_str()) {
        return Ok(());
    }
    // The daemon may have this port at another address. The next program closes that socket first.
    let has_port = || own.iter().any(|name| name.contains(" tcp:") && name.ends_with(&format!(":{port}")));
    match TcpListener::bind((host.as_str(), *port)) {
        Err(error) if error.kind() == ErrorKind::AddrInUse && (daemon.is_none() || has_port()) => Ok(()),
        // The daemon may run as another user.
        Err(error) if error.kind() == ErrorKind::PermissionDenied && daemon.is_none() => Ok(()),
        result => result.map(drop),
    }
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

    /// Returns the names of the sockets at which this program listens, one on each line.
    pub(crate) fn names(&self) -> String {
        self.table().open.keys().map(String::as_str).collect::<Vec<_>>().join("\n")
    }

    /// Closes inherited sockets whose names are not in `used`. This program may then use their
    /// ports at other addresses.
    pub(crate) fn close_unused(&self, used: &BTreeSet<String>) {
        let inherited = std::mem::take(&mut self.table().inherited);
        let (kept, unused): (BTreeMap<_, _>, BTreeMap<_, _>) =
            inherited.into_iter().partition(|(name, _)| used.contains(name));
        self.table().inherited = kept;
        for name in unused.keys() {
            tracing::info!("{name}: this socket is closed, because the configuration no longer lists it");
        }
        close(unused);
    }

    /// Closes inherited sockets that are not in use, and removes their files.
    pub(crate) fn close_inherited(&self) {
        let unused = std::mem::take(&mut self.table().inherited);
        close(unused);
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

/// Closes sockets, and removes their files.
fn close(sockets: BTreeMap<String, OwnedFd>) {
    for (name, socket) in sockets {
        drop(socket);
        if let Some(path) = path_of(&name).filter(|path| is_socket(path)) {
            let _ = std::fs::remove_file(path);
        }
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
    use std::os::unix::net::UnixListener;

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
        let (name, listening) = inherit("a", UnixListener::bind(at("a")).unwrap().into());
        listening.close_unused(&BTreeSet::from([name]));
        assert!(at("a").exists(), "the configuration lists it");
        listening.close_unused(&BTreeSet::new());
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

    #[test]
    fn an_address_of_another_program_or_host_is_refused() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = |host: &str, port| Endpoint::Tcp { host: host.to_owned(), port };
        let port = taken.local_addr().unwrap().port();
        let check = |host: &str, daemon: Option<&str>| {
            check_address("nbd", &at(host, port), daemon).map_err(|error| error.kind())
        };
        for host in ["127.0.0.1", "0.0.0.0"] {
            assert_eq!(check(host, Some("control unix:/run/c.sock")), Err(ErrorKind::AddrInUse), "{host}");
            // The running daemon has the port.
            let own = format!("control unix:/run/c.sock\nnbd tcp:127.0.0.1:{port}");
            assert_eq!(check(host, Some(&own)), Ok(()), "{host}");
            assert_eq!(check(host, None), Ok(()), "perhaps a running daemon has {host}");
        }
        // No host has an address of TEST-NET-1 (RFC 5737).
        for daemon in [None, Some("")] {
            assert_eq!(check("192.0.2.1", daemon), Err(ErrorKind::AddrNotAvailable));
        }
        drop(taken);
        let dir = tempfile::tempdir().unwrap();
        check_address("nbd", &Endpoint::Unix(dir.path().join("a.sock")), None).unwrap();
        check_address("nbd", &Endpoint::Unix("/proc/a.sock".into()), None).unwrap_err();
    }

    #[test]
    fn a_unix_socket_of_another_program_is_refused_and_one_of_the_daemon_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let endpoint = Endpoint::Unix(path.clone());
        let check =
            |daemon: Option<&str>| check_address("nbd", &endpoint, daemon).map_err(|error| error.kind());
        let socket = UnixListener::bind(&path).unwrap();
        assert_eq!(check(Some("nbd tcp:127.0.0.1:1")), Err(ErrorKind::AddrInUse));
        // Also if the daemon uses the socket for another protocol.
        let own = format!("control unix:{}", path.display());
        assert_eq!((check(Some(&own)), check(None)), (Ok(()), Ok(())));
        drop(socket);
        assert_eq!(check(Some("")), Ok(()), "nothing listens on the socket");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        assert_eq!((check(None), check(Some(""))), (Err(ErrorKind::Other), Err(ErrorKind::Other)));
    }

    /// A listener may move to another address of its port.
    #[test]
    fn the_port_of_an_unused_socket_is_free() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let name = name("nbd", &Endpoint::Tcp { host: "127.0.0.1".to_owned(), port: address.port() });
        let listening = ListeningSockets::inherited(vec![(name, socket.into())]);
        assert!(TcpListener::bind(address).is_err());
        listening.close_unused(&BTreeSet::new());
        TcpListener::bind(address).unwrap();
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
