//! A backing that other hosts may share: nbdkit, which neither locks nor fences.

use std::path::{Path, PathBuf};

use rustix::process::Signal;

use crate::process::Process;
use crate::scratch::{Scratch, is_listening, text, wait_for};
use crate::tool::Tool;

/// Option that makes nbdkit handle the requests of each client one after the other. Otherwise
/// version 1.32 may abort (`raw_send_socket: Assertion`) if a client is killed while several of its
/// requests are answered.
pub const ONE_BY_ONE: [&str; 2] = ["--threads", "1"];

/// Starts nbdkit at `socket` with these arguments, and waits until nbdkit listens there.
///
/// # Panics
/// Panics if nbdkit does not serve in time.
#[must_use]
#[track_caller]
pub fn nbdkit(socket: &Path, args: &[&str]) -> Process {
    // A killed nbdkit leaves its socket.
    let _ = std::fs::remove_file(socket);
    let server = Tool::new("nbdkit").args(["--foreground", "--unix", &text(socket)]).args(args).start();
    wait_for("nbdkit", || is_listening(socket));
    server
}

impl Scratch {
    /// Starts an nbdkit that serves the image `name` of the directory at the socket `backing.sock`.
    ///
    /// # Panics
    /// Panics if nbdkit does not serve in time.
    #[must_use]
    #[track_caller]
    pub fn serve_image(&self, name: &str) -> Process {
        nbdkit(&self.path("backing.sock"), &["file", &self.text(name)])
    }

    /// Like `serve_image`, and each write takes at least `delay`: `3` is three seconds.
    ///
    /// # Panics
    /// Panics if nbdkit does not serve in time.
    #[must_use]
    #[track_caller]
    pub fn serve_image_slowly(&self, name: &str, delay: &str) -> Process {
        let (image, delay) = (self.text(name), format!("wdelay={delay}"));
        nbdkit(&self.path("backing.sock"), &["--filter=delay", "file", &image, &delay])
    }

    /// Returns the URI of the image that [`Scratch::serve_image`] serves.
    #[must_use]
    pub fn backing_uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.text("backing.sock"))
    }
}

/// A running nbdkit on a Unix socket. Dropping the value ends the process.
#[derive(Debug)]
pub struct Store {
    socket: PathBuf,
    server: Process,
}

impl Store {
    /// Starts nbdkit at `socket` with these arguments.
    ///
    /// # Panics
    /// Panics if nbdkit does not serve in time.
    #[must_use]
    #[track_caller]
    pub fn start(socket: &Path, args: &[&str]) -> Self {
        Self { socket: socket.to_owned(), server: nbdkit(socket, args) }
    }

    /// Sends nbdkit a signal.
    pub fn signal(&mut self, signal: Signal) {
        self.server.signal(signal);
    }

    /// Returns the name of a disk's backing; `export` may be empty.
    #[must_use]
    pub fn backing(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", text(&self.socket))
    }
}
