//! Vhost-user listeners: a socket and a thread for each export that has one.
//!
//! A socket serves one client at a time. A second client waits until the first has disconnected.
//! The socket exists while the disk is served. If the socket cannot be created at a restart, the
//! daemon retries.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use hob_engine::io::Promote;
use hob_engine::units::DiskId;
use hob_frontends::vhost_user::block::Info;
use hob_frontends::vhost_user::capacity::Capacity;
use hob_frontends::vhost_user::{Start, session};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::shard_api::{ShardHandle, VhostUserCall};
use super::socket_access::{SocketAccess, bind_socket};

/// Interval between two attempts to create a socket.
const AGAIN: Duration = Duration::from_secs(1);

/// Maximum length of a socket path in bytes.
const PATH_BYTES_MAX: usize = 107;

/// Checks that the text can be the path of a socket.
pub(crate) fn check_path(path: &str) -> Result<(), String> {
    if path.starts_with('/') && path.len() <= PATH_BYTES_MAX && !path.contains('\0') {
        return Ok(());
    }
    Err(format!(
        "'{path}' cannot be a vhost-user socket: use an absolute path of at most {PATH_BYTES_MAX} bytes"
    ))
}

/// The vhost-user socket of an export. Dropping this value disconnects the client and removes the
/// socket.
#[derive(Debug)]
pub(crate) struct Gateway {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    access: SocketAccess,
    /// Size of the disk, and the client to notify.
    capacity: Arc<Capacity>,
    /// Eventfd that wakes the listener's thread when the socket is dropped.
    stop: OwnedFd,
    state: Mutex<State>,
    /// Why the socket could not be created at the last attempt. The lock on `state` may be held
    /// while a filesystem hangs.
    problem: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct State {
    stopped: bool,
    /// True if this process created the socket file.
    bound: bool,
    /// Second descriptor of the client's connection, to close it.
    client: Option<UnixStream>,
}

/// The disk that a vhost-user socket serves.
#[derive(Debug)]
pub(crate) struct ExportedDisk {
    /// Id of the disk on its shard.
    pub(crate) disk: DiskId,
    /// The shard that serves the disk.
    pub(crate) shard: ShardHandle,
    /// Properties of the device for guests.
    pub(crate) info: Info,
    /// Which reads of the export's guests promote data into the cache.
    pub(crate) promote: Promote,
}

/// Path and permissions of a socket.
#[derive(Clone, Debug)]
pub(crate) struct SocketPlace {
    /// Absolute path of the socket's file.
    pub(crate) path: PathBuf,
    /// Owner, group and mode of the socket.
    pub(crate) access: SocketAccess,
}

/// How the daemon handles a socket that cannot be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failing {
    /// Return an error.
    Refuse,
    /// Retry until the socket is created.
    TryAgain,
}

impl Gateway {
    /// Opens a vhost-user socket at `path`.
    pub(crate) fn open(place: &SocketPlace, exported: ExportedDisk, failing: Failing) -> io::Result<Gateway> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let capacity = Capacity::new(exported.info.size_bytes);
        let SocketPlace { path, access } = place.clone();
        let shared = Arc::new(Shared {
            path,
            access,
            capacity,
            stop,
            state: Mutex::default(),
            problem: Mutex::default(),
        });
        let listener = match shared.bind() {
            Err(error) if failing == Failing::Refuse => return Err(error),
            bound => bound.inspect_err(|error| shared.complain(&exported, error)).ok(),
        };
        let thread = std::thread::Builder::new().name("hob-vhost-user".to_owned());
        let gateway = Gateway { shared: Arc::clone(&shared) };
        thread.spawn(move || shared.run(listener, &exported))?;
        Ok(gateway)
    }

    /// Returns why the socket does not exist; `None` if it exists.
    pub(crate) fn problem(&self) -> Option<String> {
        self.shared.problem.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns a function that ends the acceptance of guests, unless a guest is connected. The
    /// function returns false if a guest is connected. It may block while a filesystem hangs.
    pub(crate) fn end_unless_used(&self) -> impl FnOnce() -> bool + use<> {
        let shared = self.shared.clone();
        move || {
            let mut state = shared.state();
            state.stopped |= state.client.is_none();
            state.stopped
        }
    }

    /// Notifies the connected guest that the disk has grown. The shard already knows the new size.
    pub(crate) fn grow(&self, size_bytes: u64) {
        if !self.shared.capacity.grow(size_bytes) {
            tracing::debug!("{}: no guest to notify of the new size", self.shared.path.display());
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.stopped = true;
        if state.bound {
            let _ = std::fs::remove_file(&self.shared.path);
        }
        if let Some(client) = &state.client {
            let _ = client.shutdown(std::net::Shutdown::Both);
        }
        let _ = rustix::io::write(&self.shared.stop, &1u64.to_ne_bytes());
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn complain(&self, exported: &ExportedDisk, error: &io::Error) {
        let (name, path) = (&exported.info.name, self.path.display());
        tracing::error!("{name}: cannot listen on the vhost-user socket {path}, retrying: {error}");
    }

    fn bind(&self) -> io::Result<UnixListener> {
        let mut state = self.state();
        if state.stopped {
            return Err(io::Error::other("the disk was removed"));
        }
        let bound = bind_socket(&self.path, self.access);
        state.bound = bound.is_ok();
        let reason =
            |error| format!("cannot listen on the vhost-user socket {}: {error}", self.path.display());
        let problem = bound.as_ref().err().map(reason);
        *self.problem.lock().unwrap_or_else(PoisonError::into_inner) = problem;
        bound
    }

    /// Serves one client after the other until the socket is dropped.
    fn run(&self, listener: Option<UnixListener>, exported: &ExportedDisk) {
        let mut listener = listener;
        loop {
            match &listener {
                None => listener = self.bind().ok(),
                Some(listener) => match listener.accept() {
                    Ok((socket, _)) => self.serve(socket, exported),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => {
                        tracing::warn!(%error, "{}: cannot accept a vhost-user client", exported.info.name);
                        std::thread::sleep(AGAIN);
                    }
                },
            }
            let stopped = self.wait(listener.as_ref());
            if stopped {
                return;
            }
        }
    }

    /// Waits for the next client, or for the time of the next attempt to create the socket. Returns
    /// true when the socket is dropped.
    fn wait(&self, listener: Option<&UnixListener>) -> bool {
        let again = rustix::event::Timespec { tv_sec: AGAIN.as_secs() as i64, tv_nsec: 0 };
        let timeout = if listener.is_none() { Some(&again) } else { None };
        let mut fds = vec![PollFd::new(&self.stop, PollFlags::IN)];
        fds.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
        // A signal may end the wait early, which does no harm.
        let _ = poll(&mut fds, timeout);
        self.state().stopped
    }

    fn serve(&self, socket: UnixStream, exported: &ExportedDisk) {
        let name = &exported.info.name;
        let ready = || -> io::Result<bool> {
            socket.set_nonblocking(false)?;
            let mut state = self.state();
            state.client = Some(socket.try_clone()?);
            Ok(!state.stopped)
        };
        match ready() {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return tracing::warn!(%error, "{name}: cannot serve a vhost-user client"),
        }
        tracing::info!("{name}: guest connected");
        if let Some(mut client) = ServedClient::take(exported) {
            match session::run(socket, exported.info.clone(), &self.capacity, &mut client) {
                Ok(()) => tracing::info!("{name}: guest disconnected"),
                Err(why) => tracing::warn!("{name}: connection of the guest closed: {why}"),
            }
        }
        self.state().client = None;
    }
}

/// Registration of a vhost-user client on its shard.
struct ServedClient<'a> {
    shard: &'a ShardHandle,
    client: u16,
}

impl ServedClient<'_> {
    fn take(exported: &ExportedDisk) -> Option<ServedClient<'_>> {
        let (answer, number) = mpsc::channel();
        let ExportedDisk { disk, shard, info, promote } = exported;
        let open = VhostUserCall::Open { disk: *disk, info: info.clone(), promote: *promote, answer };
        shard.vhost_user(open).ok()?;
        Some(ServedClient { shard, client: number.recv().ok()? })
    }
}

impl Drop for ServedClient<'_> {
    fn drop(&mut self) {
        // A shard that has ended has no clients.
        let _ = self.shard.vhost_user(VhostUserCall::Close { client: self.client });
    }
}

impl session::Shard for &mut ServedClient<'_> {
    fn start(&mut self, start: Start, kick: OwnedFd, call: Option<OwnedFd>) {
        let start = Box::new(start);
        let _ = self.shard.vhost_user(VhostUserCall::Start { client: self.client, start, kick, call });
    }

    fn set_call(&mut self, queue: u16, call: Option<OwnedFd>) {
        let _ = self.shard.vhost_user(VhostUserCall::SetCall { client: self.client, queue, call });
    }

    fn stop(&mut self, queue: u16) -> Option<u16> {
        let (answer, base) = mpsc::channel();
        self.shard.vhost_user(VhostUserCall::Stop { client: self.client, queue, answer }).ok()?;
        base.recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exported() -> ExportedDisk {
        let (shard, _calls) = ShardHandle::new(|| {});
        let info = Info {
            size_bytes: 512,
            read_only: false,
            block_bytes: 512,
            can_discard: true,
            name: "vm".into(),
        };
        ExportedDisk { disk: DiskId(0), shard, info, promote: Promote::Usual }
    }

    fn at(path: &std::path::Path) -> SocketPlace {
        SocketPlace { path: path.to_owned(), access: SocketAccess::default() }
    }

    #[test]
    fn a_socket_has_the_mode_that_was_set() {
        use crate::socket_access::SocketSettings;
        use std::os::unix::fs::PermissionsExt as _;

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        let settings = SocketSettings { mode: Some("0606".to_owned()), ..SocketSettings::default() };
        let place = SocketPlace { path: path.clone(), access: SocketAccess::of(&settings).unwrap() };
        let _gateway = Gateway::open(&place, exported(), Failing::Refuse).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o606);
    }

    #[test]
    fn a_socket_is_there_for_as_long_as_its_gateway() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        let gateway = Gateway::open(&at(&path), exported(), Failing::Refuse).unwrap();
        let other = Gateway::open(&at(&path), exported(), Failing::Refuse);
        assert_eq!(other.err().unwrap().kind(), io::ErrorKind::AddrInUse);
        assert!(path.exists(), "the second one took the first one's socket away");
        // The shard has ended, and with it the client's connection.
        let mut client = UnixStream::connect(&path).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(io::Read::read(&mut client, &mut [0]).unwrap(), 0);
        drop(gateway);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_with_a_guest_does_not_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        let gateway = Gateway::open(&at(&path), exported(), Failing::Refuse).unwrap();
        let guest = UnixStream::pair().unwrap().0;
        gateway.shared.state().client = Some(guest);
        assert!(!gateway.end_unless_used()());
        gateway.shared.state().client = None;
        assert!(gateway.end_unless_used()());
        // A guest that connects now is not served.
        assert!(gateway.shared.state().stopped);
    }

    /// Health looks at all sockets, on the control thread.
    #[test]
    fn a_socket_that_hangs_while_it_is_replaced_delays_no_look_at_the_sockets() {
        let dir = tempfile::tempdir().unwrap();
        let gateway = Gateway::open(&at(&dir.path().join("vm.sock")), exported(), Failing::Refuse).unwrap();
        let shared = gateway.shared.clone();
        let exports = crate::exports::Exports::default();
        exports.listen_vhost_user("vm", "vm", gateway);
        let hangs = shared.state();
        let table = exports.clone();
        let replaced = std::thread::spawn(move || table.replace_vhost_user("vm", None));
        std::thread::sleep(Duration::from_millis(100));
        let (sender, answers) = mpsc::channel();
        std::thread::spawn(move || sender.send(exports.failing_sockets()));
        assert_eq!(answers.recv_timeout(Duration::from_secs(60)), Ok(Vec::new()));
        drop(hangs);
        assert!(replaced.join().unwrap());
    }

    #[test]
    fn after_a_restart_a_socket_that_cannot_be_made_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("later").join("vm.sock");
        assert!(Gateway::open(&at(&path), exported(), Failing::Refuse).is_err());
        let gateway = Gateway::open(&at(&path), exported(), Failing::TryAgain).unwrap();
        assert!(gateway.problem().unwrap().contains("cannot listen on the vhost-user socket"));
        std::fs::create_dir(dir.path().join("later")).unwrap();
        let start = std::time::Instant::now();
        while !path.exists() {
            assert!(start.elapsed() < Duration::from_secs(60), "it is not tried again");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(gateway.problem(), None);
        drop(gateway);
        assert!(!path.exists());
    }

    #[test]
    fn paths_are_absolute_and_fit_a_socket() {
        for (path, good) in [
            ("/run/vm.sock".to_owned(), true),
            ("vm.sock".to_owned(), false),
            (String::new(), false),
            (format!("/{}", "x".repeat(106)), true),
            (format!("/{}", "x".repeat(107)), false),
            ("/a\0b".to_owned(), false),
        ] {
            assert_eq!(check_path(&path).is_ok(), good, "{path:?}");
        }
    }
}
