//! Where machines come in that use a disk through vhost-user: a socket for each such disk, a thread for each socket.
//!
//! One machine at a time uses a socket; a second one waits until the first is gone. The socket is there while the disk is
//! served. Where it cannot be made at a restart, which nobody watches, that is tried again.

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

use super::nbd_listener::bind_socket;
use super::shard::MachineCall;
use super::shard_api::ShardHandle;
use super::socket_access::SocketAccess;

/// How often a socket that cannot be made is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// Longest path of a socket, bytes.
const PATH_BYTES_MAX: usize = 107;

/// Can it be the path of a socket?
pub(crate) fn check_path(path: &str) -> Result<(), String> {
    if path.starts_with('/') && path.len() <= PATH_BYTES_MAX && !path.contains('\0') {
        return Ok(());
    }
    Err(format!(
        "'{path}' cannot be the socket of a machine: it needs an absolute path of at most {PATH_BYTES_MAX} bytes"
    ))
}

/// The socket of an export. Dropping it sends its machine away and removes it.
#[derive(Debug)]
pub(crate) struct Gateway {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    access: SocketAccess,
    /// How large the disk is, and who is told.
    capacity: Arc<Capacity>,
    /// Wakes the thread up.
    stop: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    stopped: bool,
    /// The socket's file is ours.
    bound: bool,
    /// Ends the connection of the machine that is there.
    machine: Option<UnixStream>,
}

/// Which disk is behind a socket.
#[derive(Debug)]
pub(crate) struct Behind {
    /// Its name on its shard.
    pub(crate) disk: DiskId,
    /// Who serves it.
    pub(crate) shard: ShardHandle,
    /// As machines are to see it.
    pub(crate) info: Info,
    /// What their reads leave behind in the cache.
    pub(crate) promote: Promote,
}

/// Where a socket is, and who may open it.
#[derive(Clone, Debug)]
pub(crate) struct SocketPlace {
    /// Absolute.
    pub(crate) path: PathBuf,
    /// Its owner, group and mode.
    pub(crate) access: SocketAccess,
}

/// What to do where a socket cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failing {
    /// Say so.
    Refuse,
    /// Try again until it can be.
    TryAgain,
}

impl Gateway {
    /// Lets machines in at `path`.
    pub(crate) fn open(place: &SocketPlace, behind: Behind, failing: Failing) -> io::Result<Gateway> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let capacity = Capacity::new(behind.info.size_bytes);
        let SocketPlace { path, access } = place.clone();
        let shared = Arc::new(Shared { path, access, capacity, stop, state: Mutex::default() });
        let listener = match shared.bind() {
            Err(error) if failing == Failing::Refuse => return Err(error),
            bound => bound.inspect_err(|error| shared.complain(&behind, error)).ok(),
        };
        let thread = std::thread::Builder::new().name("hob-vhost-user".to_owned());
        let gateway = Gateway { shared: Arc::clone(&shared) };
        thread.spawn(move || shared.run(listener, &behind))?;
        Ok(gateway)
    }

    /// The disk has so many bytes now, and its shard knows: the machine that is there is told.
    pub(crate) fn grow(&self, size_bytes: u64) {
        if !self.shared.capacity.grow(size_bytes) {
            tracing::debug!("{}: no machine to tell of the new size", self.shared.path.display());
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
        if let Some(machine) = &state.machine {
            let _ = machine.shutdown(std::net::Shutdown::Both);
        }
        let _ = rustix::io::write(&self.shared.stop, &1u64.to_ne_bytes());
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn complain(&self, behind: &Behind, error: &io::Error) {
        let (name, path) = (&behind.info.name, self.path.display());
        tracing::error!("{name}: machines cannot come in at {path}, which is tried again: {error}");
    }

    fn bind(&self) -> io::Result<UnixListener> {
        let mut state = self.state();
        if state.stopped {
            return Err(io::Error::other("the disk was taken away"));
        }
        let listener = bind_socket(&self.path, self.access)?;
        state.bound = true;
        Ok(listener)
    }

    /// Serves one machine after the other until the socket is to go.
    fn run(&self, listener: Option<UnixListener>, behind: &Behind) {
        let mut listener = listener;
        loop {
            match &listener {
                None => listener = self.bind().ok(),
                Some(listener) => match listener.accept() {
                    Ok((socket, _)) => self.serve(socket, behind),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => {
                        tracing::warn!(%error, "{}: cannot accept a machine", behind.info.name);
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

    /// Waits for the next machine, or for as long as one should before trying again. True at the end.
    fn wait(&self, listener: Option<&UnixListener>) -> bool {
        let again = rustix::event::Timespec { tv_sec: AGAIN.as_secs() as i64, tv_nsec: 0 };
        let timeout = if listener.is_none() { Some(&again) } else { None };
        let mut fds = vec![PollFd::new(&self.stop, PollFlags::IN)];
        fds.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
        // Interruptions end it early, which does no harm.
        let _ = poll(&mut fds, timeout);
        self.state().stopped
    }

    fn serve(&self, socket: UnixStream, behind: &Behind) {
        let name = &behind.info.name;
        let ready = || -> io::Result<bool> {
            socket.set_nonblocking(false)?;
            let mut state = self.state();
            state.machine = Some(socket.try_clone()?);
            Ok(!state.stopped)
        };
        match ready() {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return tracing::warn!(%error, "{name}: a machine cannot be served"),
        }
        tracing::info!("{name}: a machine has come");
        if let Some(mut client) = ServedClient::take(behind) {
            match session::run(socket, behind.info.clone(), &self.capacity, &mut client) {
                Ok(()) => tracing::info!("{name}: the machine has gone"),
                Err(why) => tracing::warn!("{name}: the machine was sent away: {why}"),
            }
        }
        self.state().machine = None;
    }
}

/// A machine's place on its shard.
struct ServedClient<'a> {
    shard: &'a ShardHandle,
    machine: u16,
}

impl ServedClient<'_> {
    fn take(behind: &Behind) -> Option<ServedClient<'_>> {
        let (answer, number) = mpsc::channel();
        let Behind { disk, shard, info, promote } = behind;
        let open = MachineCall::Open { disk: *disk, info: info.clone(), promote: *promote, answer };
        shard.machine(open).ok()?;
        Some(ServedClient { shard, machine: number.recv().ok()? })
    }
}

impl Drop for ServedClient<'_> {
    fn drop(&mut self) {
        // A shard that is gone has no machines.
        let _ = self.shard.machine(MachineCall::Close { machine: self.machine });
    }
}

impl session::Shard for &mut ServedClient<'_> {
    fn start(&mut self, start: Start, kick: OwnedFd, call: Option<OwnedFd>) {
        let start = Box::new(start);
        let _ = self.shard.machine(MachineCall::Start { machine: self.machine, start, kick, call });
    }

    fn set_call(&mut self, queue: u16, call: Option<OwnedFd>) {
        let _ = self.shard.machine(MachineCall::SetCall { machine: self.machine, queue, call });
    }

    fn stop(&mut self, queue: u16) -> Option<u16> {
        let (answer, base) = mpsc::channel();
        self.shard.machine(MachineCall::Stop { machine: self.machine, queue, answer }).ok()?;
        base.recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn behind() -> Behind {
        let (shard, _calls) = ShardHandle::new(|| {});
        let info = Info {
            size_bytes: 512,
            read_only: false,
            block_bytes: 512,
            can_discard: true,
            name: "vm".into(),
        };
        Behind { disk: DiskId(0), shard, info, promote: Promote::Usual }
    }

    fn at(path: &std::path::Path) -> SocketPlace {
        SocketPlace { path: path.to_owned(), access: SocketAccess::default() }
    }

    #[test]
    fn a_socket_has_the_mode_that_was_set() {
        use crate::daemon::socket_access::SocketSettings;
        use std::os::unix::fs::PermissionsExt as _;

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        let settings = SocketSettings { mode: Some("0606".to_owned()), ..SocketSettings::default() };
        let place = SocketPlace { path: path.clone(), access: SocketAccess::of(&settings).unwrap() };
        let _gateway = Gateway::open(&place, behind(), Failing::Refuse).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o606);
    }

    #[test]
    fn a_socket_is_there_for_as_long_as_its_gateway() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        let gateway = Gateway::open(&at(&path), behind(), Failing::Refuse).unwrap();
        let other = Gateway::open(&at(&path), behind(), Failing::Refuse);
        assert_eq!(other.err().unwrap().kind(), io::ErrorKind::AddrInUse);
        assert!(path.exists(), "the second one took the first one's socket away");
        // The shard is gone, and with it the machine's connection.
        let mut machine = UnixStream::connect(&path).unwrap();
        machine.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert_eq!(io::Read::read(&mut machine, &mut [0]).unwrap(), 0);
        drop(gateway);
        assert!(!path.exists());
    }

    #[test]
    fn after_a_restart_a_socket_that_cannot_be_made_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("later").join("vm.sock");
        assert!(Gateway::open(&at(&path), behind(), Failing::Refuse).is_err());
        let gateway = Gateway::open(&at(&path), behind(), Failing::TryAgain).unwrap();
        std::fs::create_dir(dir.path().join("later")).unwrap();
        let start = std::time::Instant::now();
        while !path.exists() {
            assert!(start.elapsed() < Duration::from_secs(20), "it is not tried again");
            std::thread::sleep(Duration::from_millis(20));
        }
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
