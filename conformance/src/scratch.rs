//! Scratch directories and addresses nobody else uses. Everything in a scratch directory is deleted
//! when its owner goes out of scope, in a panic as well.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The ports that tests have: below those that Linux gives to whoever asks for any, for a server that was killed
/// starts again at its own.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// The next port to look at, and what says to other test processes that the earlier ones are this one's.
static CLAIMED: Mutex<(u16, Vec<UnixListener>)> = Mutex::new((PORTS.start, Vec::new()));

/// A directory that deletes itself.
///
/// Paths in it are short, because a Unix socket address holds about a hundred bytes.
#[derive(Debug)]
pub struct Scratch {
    dir: tempfile::TempDir,
}

impl Scratch {
    /// A new empty directory under the system's temporary directory.
    ///
    /// # Panics
    /// When the directory cannot be made.
    #[must_use]
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("hobt").tempdir().expect("a scratch directory");
        Self { dir }
    }

    /// The directory itself.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A path inside the directory; nothing is created.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The same path as text, for command lines.
    #[must_use]
    pub fn text(&self, name: &str) -> String {
        text(&self.path(name))
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

/// A path as text; the paths made here are all ASCII.
#[must_use]
pub fn text(path: &Path) -> String {
    path.to_str().expect("scratch paths are ASCII").to_owned()
}

/// A TCP port of the loopback interface that is this test process's own until it ends.
///
/// # Panics
/// When not one is left.
#[must_use]
pub fn free_port() -> u16 {
    let mut claimed = CLAIMED.lock().expect("a thread that panics here has found none");
    let (next, claims) = &mut *claimed;
    for port in *next..PORTS.end {
        // An abstract socket's name goes with its process, however that ends.
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

/// Asks `done` every few milliseconds until it answers yes; `what` names the wish in the failure.
///
/// # Panics
/// When `limit` passes first.
#[track_caller]
pub fn wait_until(what: &str, limit: Duration, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < limit, "waited {limit:?} in vain for: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
