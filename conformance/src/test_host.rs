//! One of several hosts in a test: a daemon with its own sockets, flash and configuration, in its
//! own scratch directory.
//!
//! A [`Plan`] defines the configuration; the [`TestHost`] created from it can be killed and started again.

use std::fmt::Write;
use std::path::PathBuf;

use rustix::process::Signal;
use serde_json::Value;

use crate::authority::{Authority, Files};
use crate::etcd::Etcd;
use crate::hob::Daemon;
use crate::hosts::Host;
use crate::nbd_client::{Address, Client};
use crate::process::Output;
use crate::scratch::{Scratch, free_port, text, wait_for};

/// Address of all hosts, unless they have a network of their own.
const LOOPBACK: &str = "127.0.0.1";

/// A builder for a daemon's configuration.
#[derive(Debug)]
pub struct Plan {
    name: String,
    scratch: Scratch,
    address: Option<String>,
    /// Additional keys of the control section, and the sections that follow it in the
    /// configuration.
    control: String,
    sections: String,
}

impl Plan {
    /// Creates a daemon without disks, which other hosts cannot reach.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let (control, sections) = (String::new(), String::new());
        Self { name: name.to_owned(), scratch: Scratch::new(), address: None, control, sections }
    }

    /// Lets other hosts reach the daemon on the loopback interface, with a server certificate.
    #[must_use]
    pub fn reached(self, authority: &Authority) -> Self {
        let files = authority.server(self.scratch.dir());
        self.listening(&files, LOOPBACK, free_port())
    }

    /// Like `reached`. The daemon also uses the certificate for calls to other hosts. The other
    /// hosts identify the daemon by the certificate's common name.
    #[must_use]
    pub fn reached_as(self, authority: &Authority, common_name: &str) -> Self {
        self.reached_at(authority, common_name, LOOPBACK, free_port())
    }

    /// Like `reached_as`, but the daemon has its own address.
    #[must_use]
    pub fn reached_at(self, authority: &Authority, common_name: &str, address: &str, port: u16) -> Self {
        let files = authority.host(self.scratch.dir(), common_name, address);
        self.listening(&files, address, port)
    }

    fn listening(mut self, files: &Files, address: &str, port: u16) -> Self {
        let Files { cert, key, ca, .. } = files;
        self.address = Some(format!("{address}:{port}"));
        self.control = format!("tls = {{ cert = {cert:?}, key = {key:?}, client_ca = {ca:?} }}\n");
        self
    }

    /// Gives clients with that common name in their certificate this role.
    #[must_use]
    pub fn admits(self, common_name: &str, role: &str) -> Self {
        self.says(&format!("[[control.client]]\ncertificate = \"cn:{common_name}\"\nrole = {role:?}"))
    }

    /// Makes the daemon call other hosts with this certificate instead of the certificate of its
    /// control socket.
    #[must_use]
    pub fn calls_as(self, files: &Files) -> Self {
        let Files { cert, key, ca, .. } = files;
        self.says(&format!("[migrate]\ncert = {cert:?}\nkey = {key:?}\nca = {ca:?}"))
    }

    /// Makes the daemon a member of a cluster. `more` contains further lines of that section of
    /// hob.toml.
    #[must_use]
    pub fn joins(self, etcd: &Etcd, more: &str) -> Self {
        let head = format!("[cluster]\netcd = {}\nhost = {:?}", etcd.endpoints(), self.name);
        self.says(&head).says(more)
    }

    /// Adds the pool `fast` on a separate file. `more` contains further lines of that section of
    /// hob.toml.
    #[must_use]
    pub fn pool(self, more: &str) -> Self {
        let head = format!("[[pool]]\nname = \"fast\"\ndevices = [{:?}]", self.scratch.path("flash"));
        self.says(&head).says(more)
    }

    /// Adds a disk. `more` contains further lines of that section of hob.toml, and the section's
    /// subsections.
    #[must_use]
    pub fn disk(self, name: &str, backing: &str, more: &str) -> Self {
        self.says(&format!("[[disk]]\nname = {name:?}\nbacking = {backing:?}")).says(more)
    }

    /// Adds any other lines to hob.toml.
    #[must_use]
    pub fn says(mut self, lines: &str) -> Self {
        writeln!(self.sections, "{lines}").expect("a string takes all");
        self
    }

    /// Returns the address for other hosts, `address:port`.
    ///
    /// # Panics
    /// Panics if the host has no address for other hosts.
    #[must_use]
    #[track_caller]
    pub fn address(&self) -> &str {
        self.address.as_deref().expect("other hosts reach it")
    }

    /// Returns a path in the daemon's scratch directory. Nothing is created.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    /// Starts the daemon.
    #[must_use]
    #[track_caller]
    pub fn start(self) -> TestHost {
        let mut started = self.written();
        started.start();
        started
    }

    /// Starts the daemon on a separate host.
    #[must_use]
    #[track_caller]
    pub fn start_inside(self, host: &Host) -> TestHost {
        let mut started = self.written();
        started.daemon = Some(Daemon::start_inside(host, &started.config(), &started.control()));
        started
    }

    fn written(self) -> TestHost {
        let Self { name, scratch, address, control, sections } = self;
        let mut listen = vec![format!("unix:{}", scratch.text("ctl.sock"))];
        listen.extend(address.as_ref().map(|address| format!("tcp:{address}")));
        let head = format!(
            "state_dir = {:?}\nlisten = [\"unix:{}\"]\n[control]\nlisten = {listen:?}\n",
            scratch.path("state"),
            scratch.text("nbd.sock"),
        );
        let started = TestHost { name, scratch, address, daemon: None };
        std::fs::write(started.config(), head + &control + &sections).expect("write");
        started
    }
}

/// A configured daemon; see the module documentation. Dropping the value kills the daemon.
#[derive(Debug)]
pub struct TestHost {
    name: String,
    scratch: Scratch,
    address: Option<String>,
    daemon: Option<Daemon>,
}

impl TestHost {
    fn config(&self) -> PathBuf {
        self.path("hob.toml")
    }

    fn control(&self) -> PathBuf {
        self.path("ctl.sock")
    }

    /// Returns a path in the daemon's scratch directory: `flash` is the file of the daemon's pool,
    /// `state` the daemon's state directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    /// Returns the same path as text, for command lines.
    #[must_use]
    pub fn text(&self, name: &str) -> String {
        text(&self.path(name))
    }

    /// Returns the scratch directory of the daemon.
    #[must_use]
    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// Returns the address for other hosts, `address:port`.
    ///
    /// # Panics
    /// Panics if the host has no address for other hosts.
    #[must_use]
    #[track_caller]
    pub fn address(&self) -> &str {
        self.address.as_deref().expect("other hosts reach it")
    }

    /// Starts a killed or stopped daemon again, on the common host.
    #[track_caller]
    pub fn start(&mut self) {
        // A killed daemon leaves its sockets.
        let _ = std::fs::remove_file(self.control());
        let _ = std::fs::remove_file(self.path("nbd.sock"));
        self.daemon = Some(Daemon::start(&self.config(), &self.control()));
    }

    /// Kills the daemon with SIGKILL. Returns the daemon's output, which is also printed to explain
    /// failures.
    ///
    /// # Panics
    /// Panics if the daemon is not running.
    #[track_caller]
    pub fn kill(&mut self) -> String {
        let mut daemon = self.daemon.take().expect("it runs");
        daemon.process.kill();
        let said = daemon.process.stderr();
        eprintln!("--- {} was killed:\n{said}", self.name);
        said
    }

    /// Sends SIGTERM to the daemon, which must end with status 0.
    ///
    /// # Panics
    /// Panics if the daemon does not end with status 0.
    #[track_caller]
    pub fn stop(&mut self) {
        self.daemon.take().expect("it runs").stop();
    }

    /// Sends the daemon a signal.
    ///
    /// # Panics
    /// Panics if the daemon is not running.
    #[track_caller]
    pub fn signal(&mut self, signal: Signal) {
        self.daemon.as_mut().expect("it runs").process.signal(signal);
    }

    /// Returns the running daemon.
    ///
    /// # Panics
    /// Panics if the daemon is not running.
    #[must_use]
    #[track_caller]
    pub fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("it runs")
    }

    /// Runs a client command, which must succeed.
    #[track_caller]
    pub fn ctl(&self, args: &[&str]) -> String {
        self.daemon().ctl(args)
    }

    /// Like `ctl`, but with the command line as one text. Its words must not contain spaces.
    #[track_caller]
    pub fn tell(&self, line: &str) -> String {
        self.daemon().tell(line)
    }

    /// Runs a client command with any result.
    #[must_use]
    #[track_caller]
    pub fn try_ctl(&self, args: &[&str]) -> Output {
        self.daemon().try_ctl(args)
    }

    /// Runs a `hob` command against the daemon. The command must succeed and return JSON.
    ///
    /// # Panics
    /// Panics if the command fails, or does not return JSON.
    #[must_use]
    #[track_caller]
    pub fn json(&self, args: &[&str]) -> Value {
        self.daemon().json(args)
    }

    /// Returns a disk's entry in `hob disk list`; null if the disk does not exist.
    #[must_use]
    #[track_caller]
    pub fn disk(&self, name: &str) -> Value {
        let list = self.daemon().disk_list();
        let found = list.as_array().expect("a list").iter().find(|disk| disk["name"] == name);
        found.cloned().unwrap_or_default()
    }

    /// Returns a disk's state; `absent` if the disk does not exist.
    #[must_use]
    #[track_caller]
    pub fn state(&self, disk: &str) -> String {
        self.disk(disk)["state"].as_str().unwrap_or("absent").to_owned()
    }

    /// Returns why a disk is not served; empty if the disk is served.
    #[must_use]
    #[track_caller]
    pub fn reason(&self, disk: &str) -> String {
        self.disk(disk)["reason"].as_str().unwrap_or_default().to_owned()
    }

    /// Returns true if this host serves a disk.
    #[must_use]
    #[track_caller]
    pub fn serves(&self, disk: &str) -> bool {
        self.state(disk) == "online"
    }

    /// Waits until this host serves the disk.
    ///
    /// # Panics
    /// Panics if this host does not serve the disk in time.
    #[track_caller]
    pub fn wait_until_serving(&self, disk: &str) {
        wait_for(&format!("{disk} to be served by {}", self.name), || self.serves(disk));
    }

    /// Returns the NBD address of the daemon.
    #[must_use]
    pub fn nbd(&self) -> Address {
        self.scratch.nbd()
    }

    /// Opens a new NBD connection to a disk.
    ///
    /// # Panics
    /// Panics if this host does not serve the disk.
    #[must_use]
    #[track_caller]
    pub fn connect(&self, disk: &str) -> Client {
        Client::connect(&self.nbd(), disk).unwrap_or_else(|e| panic!("{disk} at {}: {e}", self.name))
    }
}
