//! Two hosts on one machine: network namespaces connected by a virtual cable.
//!
//! A namespace exists as long as one process is in it. This process is a child of the test, and the
//! kernel kills it when the test ends for any reason. Then the kernel removes the namespace and the
//! cable. So there are no names that could conflict, and no test leaves namespaces behind. The
//! tests need root.

use std::process::Command;

use crate::process::Process;
use crate::scratch::wait_for;
use crate::tool::{Tool, find};

/// The addresses of the two hosts.
const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

/// Name of the network device on both hosts.
const DEVICE: &str = "net0";

/// A host with a network of its own; files are shared with all hosts.
#[derive(Debug)]
pub struct Host {
    address: &'static str,
    holder: Process,
}

impl Host {
    /// Creates two hosts that reach only each other.
    ///
    /// # Panics
    /// Panics if namespaces cannot be created.
    #[must_use]
    #[track_caller]
    pub fn pair() -> [Self; 2] {
        let hosts = ADDRESSES.map(Self::alone);
        let pids = hosts.each_ref().map(|host| host.holder.pid().to_string());
        let ip = |args: &[&str]| Tool::new("ip").args(args).run();
        ip(&[
            "link", "add", DEVICE, "netns", &pids[0], "type", "veth", "peer", "name", DEVICE, "netns",
            &pids[1],
        ]);
        for host in &hosts {
            let ip = |args: &[&str]| Tool::new("ip").args(args).inside(host).run();
            ip(&["address", "add", &format!("{}/30", host.address), "dev", DEVICE]);
            ip(&["link", "set", "lo", "up"]);
            ip(&["link", "set", DEVICE, "up"]);
        }
        hosts
    }

    #[track_caller]
    fn alone(address: &'static str) -> Self {
        let ours = std::fs::read_link("/proc/self/ns/net").expect("this process has a network");
        let holder = Tool::new("unshare").args(["--net", "--", "sleep", "infinity"]).start();
        let theirs = format!("/proc/{}/ns/net", holder.pid());
        wait_for("a network namespace", || std::fs::read_link(&theirs).is_ok_and(|theirs| theirs != ours));
        Self { address, holder }
    }

    /// Returns the IPv4 address of this host.
    #[must_use]
    pub fn address(&self) -> &'static str {
        self.address
    }

    /// Returns the command that runs `command` on this host, as the same process.
    #[must_use]
    #[track_caller]
    pub fn wrap(&self, command: &Command) -> Command {
        let mut wrapped = Command::new(find("nsenter"));
        wrapped.arg(format!("--net=/proc/{}/ns/net", self.holder.pid())).arg("--");
        wrapped.arg(command.get_program()).args(command.get_args());
        wrapped.envs(command.get_envs().filter_map(|(key, value)| Some((key, value?))));
        wrapped
    }

    /// Returns the number of bytes that this host has sent on the cable so far, with the headers of
    /// all layers.
    ///
    /// # Panics
    /// Panics if the kernel does not count these bytes.
    #[must_use]
    #[track_caller]
    pub fn sent_bytes(&self) -> u64 {
        let path = format!("/proc/{}/net/dev", self.holder.pid());
        let table = std::fs::read_to_string(path).expect("the host is there");
        let row =
            table.lines().find_map(|line| line.trim().strip_prefix("net0:")).expect("the cable is there");
        row.split_whitespace().nth(8).and_then(|n| n.parse().ok()).expect("a count of bytes")
    }
}
