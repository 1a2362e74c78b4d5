//! Scratch directories and unused addresses. When the owner of a scratch directory goes out of
//! scope, the directory is deleted with its contents, even after a panic.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::data::noise_file;
use crate::hob::Daemon;
use crate::nbd_client::{Address, Client};

/// The ports for tests: below Linux's ephemeral ports, because a killed server starts again at its own
/// port.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// The next port to try, and the sockets that reserve the earlier ones against other test processes.
static CLAIMED: Mutex<(u16, Vec<UnixListener>)> = Mutex::new((PORTS.start, Vec::new()));

/// A directory that is deleted when dropped.
///
/// The directory's path is short, because the path of a Unix socket has at most about a hundred
/// bytes.
#[derive(Debug)]
pub struct Scratch {
    dir: tempfile::TempDir,
}

impl Scratch {
    /// Creates an empty directory under the system's temporary directory.
    ///
    /// # Panics
    /// Panics if the directory cannot be created.
    #[must_use]
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("hobt").tempdir().expect("a scratch directory");
        Self { dir }
    }

    /// Returns the path of the directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns a path inside the directory. Nothing is created.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns a path inside the directory as text, for command lines.
    #[must_use]
    pub fn text(&self, name: &str) -> String {
        text(&self.path(name))
    }

    /// Reads a file inside the directory.
    ///
    /// # Panics
    /// Panics if the file cannot be read.
    #[must_use]
    #[track_caller]
    pub fn read(&self, name: &str) -> Vec<u8> {
        let path = self.path(name);
        std::fs::read(&path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()))
    }

    /// Creates a file with `len` bytes of noise inside the directory. Returns the content of the
    /// file.
    ///
    /// # Panics
    /// Panics if the file cannot be written.
    #[must_use]
    #[track_caller]
    pub fn noise(&self, name: &str, len: u64, seed: u64) -> Vec<u8> {
        noise_file(&self.path(name), len, seed);
        self.read(name)
    }

    /// Returns the first lines of a hob.toml: the state directory, and the sockets `nbd.sock` and
    /// `ctl.sock`.
    #[must_use]
    pub fn daemon_config(&self) -> String {
        format!(
            "state_dir = \"{}\"\nlisten = [\"unix:{}\"]\n[control]\nlisten = [\"unix:{}\"]\n",
            self.text("state"),
            self.text("nbd.sock"),
            self.text("ctl.sock"),
        )
    }

    /// Writes a hob.toml that consists of `daemon_config` and these sections.
    #[track_caller]
    pub fn configure(&self, sections: &str) {
        self.write_config(self.daemon_config() + sections);
    }

    /// Writes any hob.toml.
    ///
    /// # Panics
    /// Panics if the file cannot be written.
    #[track_caller]
    pub fn write_config(&self, text: impl AsRef<str>) {
        let path = self.path("hob.toml");
        std::fs::write(&path, text.as_ref()).unwrap_or_else(|e| panic!("write {}: {e}", path.display()));
    }

    /// Starts a daemon with the directory's hob.toml, and waits until its control socket `ctl.sock`
    /// answers.
    #[must_use]
    #[track_caller]
    pub fn start_daemon(&self) -> Daemon {
        Daemon::start(&self.path("hob.toml"), &self.path("ctl.sock"))
    }

    /// Returns the state that the daemon has saved.
    ///
    /// # Panics
    /// Panics if there is no saved state.
    #[must_use]
    #[track_caller]
    pub fn saved_state(&self) -> Value {
        let text = std::fs::read_to_string(self.path("state/state.json")).expect("a saved state");
        serde_json::from_str(text.trim_end()).expect("JSON")
    }

    /// Returns the address of the daemon's NBD socket `nbd.sock`.
    #[must_use]
    pub fn nbd(&self) -> Address {
        Address::Unix(self.path("nbd.sock"))
    }

    /// Opens a new NBD connection to a disk or an export of the daemon.
    ///
    /// # Panics
    /// Panics if the daemon does not serve the disk.
    #[must_use]
    #[track_caller]
    pub fn connect(&self, export: &str) -> Client {
        Client::connect(&self.nbd(), export).unwrap_or_else(|e| panic!("connect to {export}: {e}"))
    }

    /// Like `connect`, but waits until the daemon serves the disk.
    ///
    /// # Panics
    /// Panics if the daemon does not serve the disk within three minutes.
    #[must_use]
    #[track_caller]
    pub fn connect_when_served(&self, export: &str) -> Client {
        let mut client = None;
        wait_for(&format!("{export} to be served"), || {
            client = Client::connect(&self.nbd(), export).ok();
            client.is_some()
        });
        client.expect("it is served")
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns a path as text. The path must be ASCII, as all scratch paths are.
#[must_use]
pub fn text(path: &Path) -> String {
    path.to_str().expect("scratch paths are ASCII").to_owned()
}

/// Reserves a TCP port of the loopback interface for this test process.
///
/// # Panics
/// Panics if no port is free.
#[must_use]
pub fn free_port() -> u16 {
    let mut claimed = CLAIMED.lock().expect("a thread that panics here has found none");
    let (next, claims) = &mut *claimed;
    for port in *next..PORTS.end {
        // An abstract socket's name is released with its process, however that ends.
        let name = SocketAddr::from_abstract_name(format!("hob-test-port-{port}")).expect("a short name");
        let Ok(claim) = UnixListener::bind_addr(&name) else { continue };
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            claims.push(claim);
            *next = port + 1;
            return port;
        }
    }
    panic!("the ports {PORTS:?} are all taken")
}

/// Returns true if a process listens on a Unix socket that was bound with this absolute path. A server
/// creates the socket's file a moment before the server listens, and refuses clients until then.
/// Connecting would count as a client.
///
/// # Panics
/// Panics if the kernel does not list the Unix sockets.
#[must_use]
pub fn is_listening(socket: &Path) -> bool {
    /// Flags of a socket that accepts connections (`__SO_ACCEPTCON`).
    const ACCEPTS: &str = "00010000";
    let table = std::fs::read("/proc/net/unix").expect("the kernel lists Unix sockets");
    let path = text(socket);
    String::from_utf8_lossy(&table).lines().any(|line| {
        // Num RefCount Protocol Flags Type St Inode Path
        let mut fields = line.split_whitespace();
        fields.nth(3) == Some(ACCEPTS) && fields.nth(3) == Some(path.as_str())
    })
}

/// Usual time within which a condition becomes true, on a busy host.
const WAIT_MAX: Duration = Duration::from_secs(180);

/// Calls `done` until `done` returns true, like [`wait_until`] with the usual limit of three minutes.
///
/// # Panics
/// Panics if three minutes pass before `done` returns true.
#[track_caller]
pub fn wait_for(what: &str, done: impl FnMut() -> bool) {
    wait_until(what, WAIT_MAX, done);
}

/// Shortest and longest pause between two calls in [`wait_until`].
const PAUSES: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(200)];

/// Calls `done` until `done` returns true. `what` names the awaited condition in the message of a
/// failure. The pauses between the calls are a twentieth of the time waited, and at least as long as
/// the last call. Most conditions run a program, and without pauses a long wait would take a processor
/// from the programs under test.
///
/// # Panics
/// Panics if `limit` passes before `done` returns true.
#[track_caller]
pub fn wait_until(what: &str, limit: Duration, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    loop {
        let called = Instant::now();
        if done() {
            return;
        }
        let waited = start.elapsed();
        assert!(waited < limit, "waited {limit:?} in vain for: {what}");
        std::thread::sleep((waited / 20).max(called.elapsed()).clamp(PAUSES[0], PAUSES[1]));
    }
}
