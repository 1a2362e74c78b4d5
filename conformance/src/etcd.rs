//! A cluster of etcd in a scratch directory, on the loopback interface or on a separate host. Its
//! members can be killed, paused and started again.

use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;

use crate::hosts::Host;
use crate::process::Process;
use crate::scratch::{Scratch, free_port, wait_until};
use crate::tool::{Tool, find};

/// Maximum time until a member serves.
const READY_MAX: Duration = Duration::from_secs(120);

/// Heartbeat interval of the leader, and election timeout, milliseconds.
const HEARTBEAT_MS: u32 = 100;
const ELECTION_MS: u32 = 1000;

/// The cluster; see the module documentation. Dropping the value kills all members.
#[derive(Debug)]
pub struct Etcd {
    scratch: Scratch,
    address: String,
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    client_port: u16,
    peer_port: u16,
    process: Option<Process>,
}

impl Etcd {
    /// Starts a cluster of `members` members and waits until all members serve.
    ///
    /// # Panics
    /// Panics if the members do not serve in time.
    #[must_use]
    #[track_caller]
    pub fn start(members: usize) -> Self {
        let mut etcd = Self::prepare(members, "127.0.0.1");
        (0..members).for_each(|member| etcd.launch(member, None));
        (0..members).for_each(|member| etcd.wait_for(member, None));
        etcd
    }

    /// Starts one member on a separate host. The member serves all hosts that reach that host.
    ///
    /// # Panics
    /// Panics if the member does not serve in time.
    #[must_use]
    #[track_caller]
    pub fn start_on(host: &Host) -> Self {
        let mut etcd = Self::prepare(1, host.address());
        etcd.launch(0, Some(host));
        etcd.wait_for(0, Some(host));
        etcd
    }

    fn prepare(members: usize, address: &str) -> Self {
        let member = |_| Member { client_port: free_port(), peer_port: free_port(), process: None };
        let members = (0..members).map(member).collect();
        Self { scratch: Scratch::new(), address: address.to_owned(), members }
    }

    /// Returns the client addresses of the members as a TOML list.
    #[must_use]
    pub fn endpoints(&self) -> String {
        let all: Vec<String> =
            (0..self.members.len()).map(|it| format!("{:?}", self.client_url(it))).collect();
        format!("[{}]", all.join(", "))
    }

    fn client_url(&self, member: usize) -> String {
        format!("http://{}:{}", self.address, self.members[member].client_port)
    }

    fn peer_url(&self, member: usize) -> String {
        format!("http://{}:{}", self.address, self.members[member].peer_port)
    }

    #[track_caller]
    fn launch(&mut self, member: usize, host: Option<&Host>) {
        let all: Vec<String> =
            (0..self.members.len()).map(|it| format!("m{it}={}", self.peer_url(it))).collect();
        let (client, peer) = (self.client_url(member), self.peer_url(member));
        let mut command = Command::new(find("etcd"));
        command.args([
            "--name",
            &format!("m{member}"),
            "--data-dir",
            &self.scratch.text(&format!("m{member}")),
        ]);
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &all.join(","), "--initial-cluster-state", "new"]);
        command.args(["--heartbeat-interval", &HEARTBEAT_MS.to_string()]);
        command.args(["--election-timeout", &ELECTION_MS.to_string()]);
        command.args(["--logger", "zap", "--log-outputs", "stderr", "--log-level", "error"]);
        // Leases must not end because the disk of the test is slow. A killed member loses nothing,
        // because the kernel has its data.
        command.arg("--unsafe-no-fsync");
        let mut command = match host {
            Some(host) => host.wrap(&command),
            None => command,
        };
        let process = Process::start("etcd", &mut command).unwrap_or_else(|e| panic!("start etcd: {e}"));
        self.members[member].process = Some(process);
    }

    /// Returns the number of key ranges that the first member has read so far, for all clients.
    ///
    /// # Panics
    /// Panics if the first member does not report the number.
    #[must_use]
    #[track_caller]
    pub fn reads(&self) -> u64 {
        let metrics = Tool::new("curl").args(["-s", &format!("{}/metrics", self.client_url(0))]).run();
        let count = metrics.lines().find_map(|line| line.strip_prefix("etcd_debugging_mvcc_range_total "));
        count.and_then(|count| count.parse::<f64>().ok()).expect("etcd counts what it reads") as u64
    }

    /// Pauses a member, as on a hanging host.
    #[track_caller]
    pub fn pause(&mut self, member: usize) {
        self.process(member).signal(Signal::STOP);
    }

    /// Resumes a paused member.
    #[track_caller]
    pub fn resume(&mut self, member: usize) {
        self.process(member).signal(Signal::CONT);
    }

    /// Kills a member with SIGKILL.
    #[track_caller]
    pub fn kill(&mut self, member: usize) {
        self.process(member).kill();
        self.members[member].process = None;
    }

    /// Starts a killed member again.
    ///
    /// # Panics
    /// Panics if the member does not serve in time.
    #[track_caller]
    pub fn restart(&mut self, member: usize) {
        self.launch(member, None);
        self.wait_for(member, None);
    }

    #[track_caller]
    fn process(&mut self, member: usize) -> &mut Process {
        self.members[member].process.as_mut().expect("the member was started")
    }

    #[track_caller]
    fn wait_for(&self, member: usize, host: Option<&Host>) {
        let url = self.client_url(member);
        wait_until("a member of etcd", READY_MAX, || {
            let mut get = Tool::new("etcdctl").env("ETCDCTL_API", "3");
            get = get.args(["--endpoints", &url, "--command-timeout", "2s", "get", "health"]);
            if let Some(host) = host {
                get = get.inside(host);
            }
            get.output().success()
        });
    }
}
