//! Vhost-user listeners: a socket and a thread for each export that has one.
//!
//! A socket serves one client at a time. A second client waits until the first has disconnected.
//! The socket exists while the disk is served. If the socket cannot be created at a restart, the
//! daemon retries.
//!
//! A filesystem may hang while a socket is created or removed. Only threads of this module wait for
//! such a filesystem. Callers wait for these threads for a limited time.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

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

/// Longest wait for the filesystem if a failure to create the socket is an error for the caller.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Longest wait for the filesystem if hob retries after a failure to create the socket, or removes
/// the socket.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Reason for a socket that does not exist yet because its filesystem hangs.
const NO_ANSWER: &str = "its filesystem does not answer";

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
    /// Size of the disk, and the client that is notified when this size changes.
    capacity: Arc<Capacity>,
    /// Eventfd that wakes the listener's thread when the socket is dropped.
    stop: OwnedFd,
    state: Mutex<State>,
    /// True if this process created the socket file and has not removed it yet.
    is_bound: AtomicBool,
    /// Why the socket does not exist.
    problem: Mutex<Option<String>>,
}

/// Paths of dropped sockets whose files are being removed.
static ENDING: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Wakes the threads that wait for a change of [`ENDING`].
static ENDED: Condvar = Condvar::new();

#[derive(Debug, Default)]
struct State {
    stopped: bool,
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
    /// Opens a vhost-user socket on a thread that may block.
    pub(crate) async fn open_aside(
        place: SocketPlace,
        exported: ExportedDisk,
        failing: Failing,
    ) -> io::Result<Gateway> {
        let opening = tokio::task::spawn_blocking(move || Gateway::open(&place, exported, failing));
        opening.await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Opens a vhost-user socket. Waits for the filesystem for at most [`ANSWER_MAX`], so do not
    /// call it on the control thread.
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
            is_bound: AtomicBool::new(false),
            problem: Mutex::default(),
        });
        shared.set_problem(Some(format!("the vhost-user socket {}: {NO_ANSWER}", shared.path.display())));
        let gateway = Gateway { shared: Arc::clone(&shared) };
        let name = exported.info.name.clone();
        let (report, tried) = mpsc::channel();
        let thread = std::thread::Builder::new().name("hob-vhost-user".to_owned());
        thread.spawn(move || shared.run(&exported, &report))?;
        let wait_max = match failing {
            Failing::Refuse => ANSWER_MAX,
            Failing::TryAgain => WAIT_MAX,
        };
        let hangs = |_| Err(io::Error::new(io::ErrorKind::TimedOut, NO_ANSWER));
        match tried.recv_timeout(wait_max).unwrap_or_else(hangs) {
            Err(error) if failing == Failing::Refuse => return Err(error),
            Err(error) => gateway.shared.complain(&name, &error),
            Ok(()) => {}
        }
        Ok(gateway)
    }

    /// Disconnects the client and removes the socket. Waits for the filesystem for at most
    /// [`WAIT_MAX`], so do not call it on the control thread.
    pub(crate) fn close(self) {
        let path = self.shared.path.clone();
        drop(self);
        wait_until_removed(&path, WAIT_MAX);
    }

    /// Returns why the socket does not exist.
    pub(crate) fn problem(&self) -> Option<String> {
        self.shared.problem.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns a function that ends the acceptance of guests, unless a guest is connected. The
    /// function returns false if a guest is connected.
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
        ending().push(self.shared.path.clone());
        let mut state = self.shared.state();
        state.stopped = true;
        if let Some(client) = &state.client {
            let _ = client.shutdown(std::net::Shutdown::Both);
        }
        drop(state);
        let _ = rustix::io::write(&self.shared.stop, &1u64.to_ne_bytes());
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name("hob-socket-end".to_owned());
        if thread.spawn(move || shared.end()).is_err() {
            self.shared.end();
        }
    }
}

/// Closes sockets on a thread that may block; see [`Gateway::close`].
pub(crate) async fn close(gateways: Vec<Gateway>) {
    let paths: Vec<PathBuf> = gateways.iter().map(|gateway| gateway.shared.path.clone()).collect();
    drop(gateways);
    if paths.is_empty() {
        return;
    }
    let until = Instant::now() + WAIT_MAX;
    let removed =
        move |path: &PathBuf| wait_until_removed(path, until.saturating_duration_since(Instant::now()));
    let _ = tokio::task::spawn_blocking(move || paths.iter().all(removed)).await;
}

fn ending() -> MutexGuard<'static, Vec<PathBuf>> {
    ENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until no dropped socket of this process is being removed at this path. Returns false after
/// `wait_max`.
fn wait_until_removed(path: &Path, wait_max: Duration) -> bool {
    let is_ending = |paths: &mut Vec<PathBuf>| paths.iter().any(|ending| ending == path);
    let waited = ENDED.wait_timeout_while(ending(), wait_max, is_ending);
    !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn complain(&self, name: &str, error: &io::Error) {
        let path = self.path.display();
        tracing::error!("{name}: cannot listen on the vhost-user socket {path}, retrying: {error}");
    }

    /// Removes the file of the socket if this process created it.
    fn remove_file(&self) {
        if self.is_bound.swap(false, Ordering::AcqRel) {
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// Removes the file of the dropped socket.
    fn end(&self) {
        self.remove_file();
        let mut paths = ending();
        if let Some(at) = paths.iter().position(|path| *path == self.path) {
            paths.swap_remove(at);
        }
        drop(paths);
        ENDED.notify_all();
    }

    fn set_problem(&self, why: Option<String>) {
        *self.problem.lock().unwrap_or_else(PoisonError::into_inner) = why;
    }

    fn bind(&self) -> io::Result<UnixListener> {
        let bound = self.bind_when_free();
        let why = |error| format!("cannot listen on the vhost-user socket {}: {error}", self.path.display());
        self.set_problem(bound.as_ref().err().map(why));
        bound
    }

    fn bind_when_free(&self) -> io::Result<UnixListener> {
        if !wait_until_removed(&self.path, WAIT_MAX) {
            return Err(io::Error::new(io::ErrorKind::TimedOut, NO_ANSWER));
        }
        let listener = bind_socket(&self.path, self.access)?;
        self.is_bound.store(true, Ordering::Release);
        if self.state().stopped {
            self.remove_file();
            return Err(io::Error::other("the disk was removed"));
        }
        Ok(listener)
    }

    /// Serves one client after the other until the socket is dropped.
    /// Reports the result of the first attempt to create the socket.
    fn run(&self, exported: &ExportedDisk, first: &mpsc::Sender<io::Result<()>>) {
        let (mut listener, tried) = match self.bind() {
            Ok(listener) => (Some(listener), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let _ = first.send(tried);
        while !self.wait(listener.as_ref()) {
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
        gateway.close();
        assert!(!path.exists());
        // The path is free again at once.
        drop(Gateway::open(&at(&path), exported(), Failing::Refuse).unwrap());
        Gateway::open(&at(&path), exported(), Failing::Refuse).unwrap().close();
        assert!(!path.exists());
    }

    /// The control thread closes sockets, so it waits only for a limited time for a filesystem that
    /// hangs.
    #[test]
    fn a_socket_that_is_still_being_removed_is_waited_for_until_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        // As if the filesystem did not answer to the removal of an earlier socket.
        ending().push(path.clone());
        assert!(!wait_until_removed(&path, Duration::from_millis(1)));
        let opened = Gateway::open(&at(&path), exported(), Failing::Refuse);
        assert_eq!(opened.err().unwrap().kind(), io::ErrorKind::TimedOut);
        let gateway = Gateway::open(&at(&path), exported(), Failing::TryAgain).unwrap();
        assert!(gateway.problem().unwrap().contains(NO_ANSWER), "{:?}", gateway.problem());
        ending().retain(|ending| *ending != path);
        ENDED.notify_all();
        let start = Instant::now();
        while gateway.problem().is_some() {
            assert!(start.elapsed() < Duration::from_secs(60), "it is not tried again");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(path.exists());
        gateway.close();
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

    /// The control thread looks at all sockets for health, so a socket that hangs must not delay
    /// it.
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
        let start = Instant::now();
        while gateway.problem().is_some() {
            assert!(start.elapsed() < Duration::from_secs(60), "it is not tried again");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(path.exists());
        gateway.close();
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
