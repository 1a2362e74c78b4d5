//! Freezes a process with the freezer of cgroup v2, as a host does that suspends a service or a
//! container. Unlike SIGSTOP, the freezer also stops the kernel's worker threads of io_uring.
//!
//! This needs root and a mount of cgroup v2.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use crate::scratch::wait_until;

/// Maximum time until all threads of a process are frozen.
const FREEZE_MAX: Duration = Duration::from_secs(60);

/// A process in its own cgroup. When the value is dropped, the process continues and returns to its
/// former cgroup.
#[derive(Debug)]
pub struct Freezer {
    root: PathBuf,
    group: PathBuf,
    pid: u32,
}

/// Returns the root of the mounted cgroup v2 hierarchy.
fn root() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts").ok()?;
    let of_version_2 = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"))?;
    of_version_2.split(' ').nth(1).map(PathBuf::from)
}

impl Freezer {
    /// Moves a process into a new cgroup.
    ///
    /// # Panics
    /// Panics if cgroup v2 is not mounted, or this process is not root.
    #[must_use]
    #[track_caller]
    pub fn of(pid: u32) -> Self {
        let root = root().expect("this test needs a mount of cgroup v2 (mount -t cgroup2)");
        let group = root.join(format!("hob-test-{}-{pid}", std::process::id()));
        fs::create_dir(&group).unwrap_or_else(|error| panic!("this test needs root: {error}"));
        let freezer = Self { root, group, pid };
        fs::write(freezer.group.join("cgroup.procs"), pid.to_string()).expect("move the process");
        freezer
    }

    /// Stops all threads of the process. Returns when all threads have stopped.
    ///
    /// # Panics
    /// Panics if the threads do not stop.
    #[track_caller]
    pub fn freeze(&self) {
        fs::write(self.group.join("cgroup.freeze"), "1").expect("freeze the process");
        let events = self.group.join("cgroup.events");
        wait_until("the process to be frozen", FREEZE_MAX, || {
            fs::read_to_string(&events).is_ok_and(|text| text.lines().any(|line| line == "frozen 1"))
        });
    }

    /// Lets the process continue.
    ///
    /// # Panics
    /// Panics if the kernel refuses to continue the process.
    #[track_caller]
    pub fn thaw(&self) {
        fs::write(self.group.join("cgroup.freeze"), "0").expect("thaw the process");
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let _ = fs::write(self.group.join("cgroup.freeze"), "0");
        // A process that has ended cannot be moved.
        let _ = fs::write(self.root.join("cgroup.procs"), self.pid.to_string());
        let _ = fs::remove_dir(&self.group);
    }
}
