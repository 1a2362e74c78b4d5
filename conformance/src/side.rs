//! One of several hosts: a daemon with its own sockets, flash and configuration, in its own scratch
//! directory.
//!
//! A [`Plan`] defines the configuration; the [`Side`] created from it can be killed and started again.

use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::authority::{Authority, Files};
use crate::etcd::Etcd;
use crate::hob::Daemon;
use crate::hosts::Host;
use crate::nbd_client::{Address, Client};
use crate::process::Output;
use crate::scratch::{Scratch, free_port, text, wait_until};

/// Address of all hosts, unless they have a network of their own.
const LOOPBACK: &str = "127.0.0.1";

/// A builder for a daemon's configuration.
#[derive(Debug)]
pub struct Plan {
    name: String,
    scratch: Scratch,
    address: Option<String>,
    /// Further keys of the control section, and the sections after it.
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

    /// Other hosts reach it on the loopback interface, with a server certificate.
    #[must_use]
    pub fn reached(self, authority: &Authority) -> Self {
        let files = authority.server(self.scratch.dir());
        self.listening(&files, LOOPBACK, free_port())
    }

    /// As `reached`; it also uses the certificate for calls to other hosts, which know it by that common
    /// name.
    #[must_use]
    pub fn reached_as(self, authority: &Authority, common_name: &str) -> Self {
        self.reached_at(authority, common_name, LOOPBACK, free_port())
    }

    /// As `reached_as`, at an address of its own.
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

    /// It calls other hosts with this certificate instead of its control socket's.
    #[must_use]
    pub fn calls_as(self, files: &Files) -> Self {
        let Files { cert, key, ca, .. } = files;
        self.says(&format!("[migrate]\ncert = {cert:?}\nkey = {key:?}\nca = {ca:?}"))
    }

    /// Makes it a member of a cluster; `more` are lines of the same section.
    #[must_use]
    pub fn joins(self, etcd: &Etcd, more: &str) -> Self {
        let head = format!("[cluster]\netcd = {}\nhost = {:?}", etcd.endpoints(), self.name);
        self.says(&head).says(more)
    }

    /// Adds the pool `fast` on a file of its own; `more` are lines of the same section.
    #[must_use]
    pub fn pool(self, more: &str) -> Self {
        let head = format!("[[pool]]\nname = \"fast\"\ndevices = [{:?}]", self.scratch.path("flash"));
        self.says(&head).says(more)
    }

    /// Adds a disk; `more` are lines of the same section, and its subsections.
    #[must_use]
    pub fn disk(self, name: &str, backing: &str, more: &str) -> Self {
        self.says(&format!("[[disk]]\nname = {name:?}\nbacking = {backing:?}")).says(more)
    }

    /// Adds any other lines.
    #[must_use]
    pub fn says(mut self, lines: &str) -> Self {
        writeln!(self.sections, "{lines}").expect("a string takes all");
        self
    }

    /// Returns the address for other hosts, `address:port`.
    ///
    /// # Panics
    /// If it has none.
    #[must_use]
    #[track_caller]
    pub fn address(&self) -> &str {
        self.address.as_deref().expect("other hosts reach it")
    }

    /// Returns a path of its own; nothing is created.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    /// Starts the daemon.
    #[must_use]
    #[track_caller]
    pub fn start(self) -> Side {
        let mut side = self.written();
        side.start();
        side
    }

    /// Starts the daemon on a host of its own.
    #[must_use]
    #[track_caller]
    pub fn start_inside(self, host: &Host) -> Side {
        let mut side = self.written();
        side.daemon = Some(Daemon::start_inside(host, &side.config(), &side.control()));
        side
    }

    fn written(self) -> Side {
        let Self { name, scratch, address, control, sections } = self;
        let mut listen = vec![format!("unix:{}", scratch.text("ctl.sock"))];
        listen.extend(address.as_ref().map(|address| format!("tcp:{address}")));
        let head = format!(
            "state_dir = {:?}\nlisten = [\"unix:{}\"]\n[control]\nlisten = {listen:?}\n",
            scratch.path("state"),
            scratch.text("nbd.sock"),
        );
        let side = Side { name, scratch, address, daemon: None };
        std::fs::write(side.config(), head + &control + &sections).expect("write");
        side
    }
}

/// A configured daemon; see the module documentation. Dropping it kills the daemon.
#[derive(Debug)]
pub struct Side {
    name: String,
    scratch: Scratch,
    address: Option<String>,
    daemon: Option<Daemon>,
}

impl Side {
    fn config(&self) -> PathBuf {
        self.path("hob.toml")
    }

    fn control(&self) -> PathBuf {
        self.path("ctl.sock")
    }

    /// Returns a path of its own: `flash` is its pool's file, `state` its state directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    /// Returns the same path as text, for command lines.
    #[must_use]
    pub fn text(&self, name: &str) -> String {
        text(&self.path(name))
    }

    /// Returns its scratch directory.
    #[must_use]
    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// Returns the address for other hosts, `address:port`.
    ///
    /// # Panics
    /// If it has none.
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

    /// Kills it with SIGKILL. Returns its output, which is also printed as a help in failures.
    ///
    /// # Panics
    /// If it is not running.
    #[track_caller]
    pub fn kill(&mut self) -> String {
        let mut daemon = self.daemon.take().expect("it runs");
        daemon.process.kill();
        let said = daemon.process.stderr();
        eprintln!("--- {} was killed:\n{said}", self.name);
        said
    }

    /// Sends SIGTERM; it must end with status 0.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn stop(&mut self) {
        self.daemon.take().expect("it runs").stop();
    }

    /// Sends the daemon a signal.
    ///
    /// # Panics
    /// If it is not running.
    #[track_caller]
    pub fn signal(&mut self, signal: Signal) {
        self.daemon.as_mut().expect("it runs").process.signal(signal);
    }

    /// Returns the daemon.
    ///
    /// # Panics
    /// If it is not running.
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

    /// As `ctl`, with a command line whose words contain no spaces.
    #[track_caller]
    pub fn tell(&self, line: &str) -> String {
        self.ctl(&line.split_whitespace().collect::<Vec<_>>())
    }

    /// Runs a client command with any result.
    #[must_use]
    #[track_caller]
    pub fn try_ctl(&self, args: &[&str]) -> Output {
        self.daemon().try_ctl(args)
    }

    /// Runs a client command, which must succeed and return JSON.
    ///
    /// # Panics
    /// If it does not.
    #[must_use]
    #[track_caller]
    pub fn json(&self, args: &[&str]) -> Value {
        let said = self.ctl(&[args, &["-o", "json"]].concat());
        serde_json::from_str(&said).unwrap_or_else(|e| panic!("{args:?}: {e}: {said}"))
    }

    /// Returns a disk as in `hob disk list`; null if it does not exist.
    #[must_use]
    #[track_caller]
    pub fn disk(&self, name: &str) -> Value {
        let list = self.json(&["disk", "list"]);
        let found = list.as_array().expect("a list").iter().find(|disk| disk["name"] == name);
        found.cloned().unwrap_or_default()
    }

    /// Returns a disk's state, `absent` if it does not exist.
    #[must_use]
    #[track_caller]
    pub fn state(&self, disk: &str) -> String {
        self.disk(disk)["state"].as_str().unwrap_or("absent").to_owned()
    }

    /// Returns why a disk is not served, empty if it is.
    #[must_use]
    #[track_caller]
    pub fn reason(&self, disk: &str) -> String {
        self.disk(disk)["reason"].as_str().unwrap_or_default().to_owned()
    }

    /// Returns true if a disk is served here.
    #[must_use]
    #[track_caller]
    pub fn serves(&self, disk: &str) -> bool {
        self.state(disk) == "online"
    }

    /// Waits until the disk is served here.
    ///
    /// # Panics
    /// If it is not in time.
    #[track_caller]
    pub fn wait_until_serving(&self, disk: &str, limit: Duration) {
        wait_until(&format!("{disk} to be served by {}", self.name), limit, || self.serves(disk));
    }

    /// Returns its NBD address.
    #[must_use]
    pub fn nbd(&self) -> Address {
        Address::Unix(self.path("nbd.sock"))
    }

    /// Opens a new NBD connection to a disk.
    ///
    /// # Panics
    /// If it is not served here.
    #[must_use]
    #[track_caller]
    pub fn connect(&self, disk: &str) -> Client {
        Client::connect(&self.nbd(), disk).unwrap_or_else(|e| panic!("{disk} at {}: {e}", self.name))
    }
}
