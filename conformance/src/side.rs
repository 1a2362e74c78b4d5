//! One of several hosts: a daemon with sockets, flash and a configuration of its own, in a scratch directory of its own.
//!
//! A [`Plan`] says what the configuration is to have; the [`Side`] that it becomes can be killed and started again with it.

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

/// Where all of them are, unless they are hosts with a network of their own.
const LOOPBACK: &str = "127.0.0.1";

/// How to configure a daemon; a builder.
#[derive(Debug)]
pub struct Plan {
    name: String,
    scratch: Scratch,
    address: Option<String>,
    /// What the control socket has beside its Unix address, and the sections behind that.
    control: String,
    sections: String,
}

impl Plan {
    /// A daemon that serves nothing, and that other hosts cannot reach.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let (control, sections) = (String::new(), String::new());
        Self { name: name.to_owned(), scratch: Scratch::new(), address: None, control, sections }
    }

    /// Other hosts reach it on the loopback interface; its certificate is a server's.
    #[must_use]
    pub fn reached(self, authority: &Authority) -> Self {
        let files = authority.server(self.scratch.dir());
        self.listening(&files, LOOPBACK, free_port())
    }

    /// The same; with its certificate it also calls others, who know it by that common name.
    #[must_use]
    pub fn reached_as(self, authority: &Authority, common_name: &str) -> Self {
        self.reached_at(authority, common_name, LOOPBACK, free_port())
    }

    /// The same at an address of its own.
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

    /// Who has a certificate with that common name may do what the role may.
    #[must_use]
    pub fn admits(self, common_name: &str, role: &str) -> Self {
        self.says(&format!("[[control.client]]\ncertificate = \"cn:{common_name}\"\nrole = {role:?}"))
    }

    /// It calls other hosts with this certificate, and not with that of its control socket.
    #[must_use]
    pub fn calls_as(self, files: &Files) -> Self {
        let Files { cert, key, ca, .. } = files;
        self.says(&format!("[migrate]\ncert = {cert:?}\nkey = {key:?}\nca = {ca:?}"))
    }

    /// It is a member of a cluster; `more` are lines of the same section.
    #[must_use]
    pub fn joins(self, etcd: &Etcd, more: &str) -> Self {
        let head = format!("[cluster]\netcd = {}\nhost = {:?}", etcd.endpoints(), self.name);
        self.says(&head).says(more)
    }

    /// The pool `fast` on a file of its own; `more` are lines of the same section.
    #[must_use]
    pub fn pool(self, more: &str) -> Self {
        let head = format!("[[pool]]\nname = \"fast\"\ndevices = [{:?}]", self.scratch.path("flash"));
        self.says(&head).says(more)
    }

    /// A disk; `more` are lines of the same section, and its subsections.
    #[must_use]
    pub fn disk(self, name: &str, backing: &str, more: &str) -> Self {
        self.says(&format!("[[disk]]\nname = {name:?}\nbacking = {backing:?}")).says(more)
    }

    /// Whatever else.
    #[must_use]
    pub fn says(mut self, lines: &str) -> Self {
        writeln!(self.sections, "{lines}").expect("a string takes all");
        self
    }

    /// Where other hosts reach it, `address:port`.
    ///
    /// # Panics
    /// When they do not.
    #[must_use]
    #[track_caller]
    pub fn address(&self) -> &str {
        self.address.as_deref().expect("other hosts reach it")
    }

    /// A path of its own; nothing is created.
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

/// See the module's text. Dropping it kills the daemon.
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

    /// A path of its own: `flash` is the file of its pool, `state` the directory of its state.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    /// The same path as text, for command lines.
    #[must_use]
    pub fn text(&self, name: &str) -> String {
        text(&self.path(name))
    }

    /// The directory that all of that is in.
    #[must_use]
    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// Where other hosts reach it, `address:port`.
    ///
    /// # Panics
    /// When they do not.
    #[must_use]
    #[track_caller]
    pub fn address(&self) -> &str {
        self.address.as_deref().expect("other hosts reach it")
    }

    /// Starts the daemon again that was killed or stopped, on the host that all share.
    #[track_caller]
    pub fn start(&mut self) {
        // Whoever was killed leaves them.
        let _ = std::fs::remove_file(self.control());
        let _ = std::fs::remove_file(self.path("nbd.sock"));
        self.daemon = Some(Daemon::start(&self.config(), &self.control()));
    }

    /// SIGKILL. Returns what it said until then, which is also printed for whoever looks for the cause of a failure.
    ///
    /// # Panics
    /// When it does not run.
    #[track_caller]
    pub fn kill(&mut self) -> String {
        let mut daemon = self.daemon.take().expect("it runs");
        daemon.process.kill();
        let said = daemon.process.stderr();
        eprintln!("--- {} was killed:\n{said}", self.name);
        said
    }

    /// SIGTERM; must end with status 0.
    ///
    /// # Panics
    /// When it does not.
    #[track_caller]
    pub fn stop(&mut self) {
        self.daemon.take().expect("it runs").stop();
    }

    /// Sends the daemon a signal.
    ///
    /// # Panics
    /// When it does not run.
    #[track_caller]
    pub fn signal(&mut self, signal: Signal) {
        self.daemon.as_mut().expect("it runs").process.signal(signal);
    }

    /// The daemon.
    ///
    /// # Panics
    /// When it does not run.
    #[must_use]
    #[track_caller]
    pub fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("it runs")
    }

    /// Runs a client command and demands success.
    #[track_caller]
    pub fn ctl(&self, args: &[&str]) -> String {
        self.daemon().ctl(args)
    }

    /// The same of one line, none of whose words has a space in it.
    #[track_caller]
    pub fn tell(&self, line: &str) -> String {
        self.ctl(&line.split_whitespace().collect::<Vec<_>>())
    }

    /// Runs a client command, whatever comes of it.
    #[must_use]
    #[track_caller]
    pub fn try_ctl(&self, args: &[&str]) -> Output {
        self.daemon().try_ctl(args)
    }

    /// Runs a client command and demands success, and JSON.
    ///
    /// # Panics
    /// When it is something else.
    #[must_use]
    #[track_caller]
    pub fn json(&self, args: &[&str]) -> Value {
        let said = self.ctl(&[args, &["-o", "json"]].concat());
        serde_json::from_str(&said).unwrap_or_else(|e| panic!("{args:?}: {e}: {said}"))
    }

    /// A disk, as `hob disk list` has it; null if it is not there.
    #[must_use]
    #[track_caller]
    pub fn disk(&self, name: &str) -> Value {
        let list = self.json(&["disk", "list"]);
        let found = list.as_array().expect("a list").iter().find(|disk| disk["name"] == name);
        found.cloned().unwrap_or_default()
    }

    /// A disk's state, `absent` if it is not there.
    #[must_use]
    #[track_caller]
    pub fn state(&self, disk: &str) -> String {
        self.disk(disk)["state"].as_str().unwrap_or("absent").to_owned()
    }

    /// Why a disk is not served, empty if it is.
    #[must_use]
    #[track_caller]
    pub fn reason(&self, disk: &str) -> String {
        self.disk(disk)["reason"].as_str().unwrap_or_default().to_owned()
    }

    /// Whether a disk is served here.
    #[must_use]
    #[track_caller]
    pub fn serves(&self, disk: &str) -> bool {
        self.state(disk) == "online"
    }

    /// Waits until it does.
    ///
    /// # Panics
    /// When it does not in time.
    #[track_caller]
    pub fn wait_until_serving(&self, disk: &str, limit: Duration) {
        wait_until(&format!("{disk} to be served by {}", self.name), limit, || self.serves(disk));
    }

    /// Where it serves NBD.
    #[must_use]
    pub fn nbd(&self) -> Address {
        Address::Unix(self.path("nbd.sock"))
    }

    /// A new NBD connection to a disk.
    ///
    /// # Panics
    /// When it is not served here.
    #[must_use]
    #[track_caller]
    pub fn connect(&self, disk: &str) -> Client {
        Client::connect(&self.nbd(), disk).unwrap_or_else(|e| panic!("{disk} at {}: {e}", self.name))
    }
}
