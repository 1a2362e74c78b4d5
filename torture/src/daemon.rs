//! The daemon under test: its process, its sockets and its log.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::lateness::TimeLimit;

/// Maximum time for the daemon to start.
const READY_MAX: Duration = Duration::from_secs(120);
/// Maximum time for the daemon to stop after SIGTERM.
const STOP_MAX: Duration = Duration::from_secs(120);
/// Maximum time for an upgrade.
const UPGRADE_MAX: Duration = Duration::from_secs(180);
/// Maximum time for a CLI command.
const COMMAND_MAX: Duration = Duration::from_secs(180);

/// Text in the daemon's log when the daemon is ready.
const READY_LINE: &str = "the control API is at";
/// Text in the daemon's log when it refuses an upgrade.
const REFUSED_LINE: &str = "not upgraded";

/// The daemon under test, running or not. Dropping this value kills the daemon.
#[derive(Debug)]
pub struct Daemon {
    program: PathBuf,
    dir: PathBuf,
    child: Option<Child>,
    /// Boot id of the simulated host, which a power cut changes.
    boot: u32,
}

/// How an upgrade of the running daemon ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Upgrade {
    /// The daemon runs the new program.
    Done,
    /// The daemon continues with the old program, for this reason.
    Refused(String),
}

/// Error of an operation of the daemon that exceeded its time limit.
#[derive(Debug)]
pub struct TimedOut {
    what: String,
    /// Exceeded time limit.
    pub checked: TimeLimit,
}

impl TimedOut {
    fn new(since: Instant, limit: Duration, what: String) -> Self {
        Self { what, checked: TimeLimit { since, limit } }
    }
}

impl std::fmt::Display for TimedOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for TimedOut {}

impl Daemon {
    /// Creates a daemon with the binary `program` that does not run yet. `hob.toml`, sockets and
    /// log are in `dir`.
    #[must_use]
    pub fn new(program: &Path, dir: &Path) -> Self {
        Self { program: program.to_owned(), dir: dir.to_owned(), child: None, boot: 1 }
    }

    /// Returns the path of the daemon's NBD socket.
    #[must_use]
    pub fn nbd_socket(&self) -> PathBuf {
        self.dir.join("nbd.sock")
    }

    /// Returns the path of the daemon's control socket.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        self.dir.join("control.sock")
    }

    /// Returns the directory of hob's crash logs. In the test this directory is on disk. A normal
    /// daemon has its crash logs on a filesystem in memory.
    fn crash_logs(&self) -> PathBuf {
        self.dir.join("memory")
    }

    /// Deletes hob's crash logs, as a power cut does, and changes the boot id.
    pub fn lose_crash_logs(&mut self) {
        self.boot += 1;
        let _ = std::fs::remove_dir_all(self.crash_logs());
    }

    fn log_path(&self) -> PathBuf {
        self.dir.join("hob.log")
    }

    /// Returns the daemon's log.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read(self.log_path())
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Returns the last lines of the daemon's log.
    #[must_use]
    pub fn log_tail(&self, lines: usize) -> Vec<String> {
        let log = self.log();
        let all: Vec<&str> = log.lines().collect();
        all[all.len().saturating_sub(lines)..].iter().map(|line| format!("log: {line}")).collect()
    }

    /// Starts the daemon and waits until it is ready. By that time, disks that the daemon cannot
    /// serve are offline.
    ///
    /// # Errors
    /// Returns an error if the daemon ends, and [`TimedOut`] if the daemon is not ready in time.
    pub fn start(&mut self) -> Result<()> {
        let before = self.log().matches(READY_LINE).count();
        self.launch()?;
        let start = Instant::now();
        while self.log().matches(READY_LINE).count() == before {
            if let Some(status) = self.ended()? {
                bail!("hob ended ({status}) instead of serving");
            }
            if start.elapsed() > READY_MAX {
                let what = format!("hob does not serve after {READY_MAX:?}");
                return Err(TimedOut::new(start, READY_MAX, what).into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Starts the daemon without waiting until it is ready.
    ///
    /// # Errors
    /// Returns errors of the operating system.
    pub fn launch(&mut self) -> Result<()> {
        std::fs::create_dir_all(self.crash_logs())?;
        // A killed daemon leaves its socket files behind.
        let _ = std::fs::remove_file(self.control_socket());
        let log: File = OpenOptions::new().create(true).append(true).open(self.log_path())?;
        // With setpriv, the kernel kills the daemon when the test process ends.
        let child = Command::new(conformance::tool::find("setpriv"))
            .args(["--pdeathsig", "KILL", "--"])
            .arg(&self.program)
            .args(["daemon", "--log", "info", "--config"])
            .arg(self.dir.join("hob.toml"))
            .env("HOB_CRASH_LOG_DIR", self.crash_logs())
            .env("HOB_BOOT_ID", format!("{:032x}", self.boot))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("start hob")?;
        self.child = Some(child);
        Ok(())
    }

    /// Returns the exit status of the daemon if it has ended.
    ///
    /// # Errors
    /// Returns errors of the operating system.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.as_mut().map_or(Ok(None), |child| Ok(child.try_wait()?))
    }

    /// Sends a signal to the daemon.
    pub fn signal(&mut self, signal: Signal) {
        if let (Ok(None), Some(child)) = (self.ended(), self.child.as_ref()) {
            let _ = kill_process(Pid::from_child(child), signal);
        }
    }

    /// Limits the daemon's address space to `headroom` bytes above its current size, or removes the
    /// limit.
    pub fn limit_memory(&mut self, headroom: Option<u64>) {
        let Some(pid) = self.child.as_ref().map(Child::id) else { return };
        let pages = |text: String| text.split(' ').next().and_then(|it| it.parse::<u64>().ok());
        let size =
            std::fs::read_to_string(format!("/proc/{pid}/statm")).ok().and_then(pages).unwrap_or(0) * 4096;
        // Only the soft limit changes, because an unprivileged process cannot raise a lowered hard
        // limit again.
        let limit =
            headroom.map_or("unlimited:unlimited".to_owned(), |more| format!("{}:unlimited", size + more));
        let tool =
            conformance::Tool::new("prlimit").args(["--pid", &pid.to_string(), &format!("--as={limit}")]);
        let _ = tool.output();
    }

    /// Kills the daemon with SIGKILL and waits for its end.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Sends SIGTERM to the daemon and checks that it ends cleanly.
    ///
    /// # Errors
    /// Kills the daemon if it does not end in time, and returns [`TimedOut`]. Returns an error if
    /// the daemon ends with an error status.
    pub fn stop(&mut self) -> Result<()> {
        self.signal(Signal::TERM);
        let start = Instant::now();
        loop {
            if let Some(status) = self.ended()? {
                self.child = None;
                if !status.success() {
                    bail!("hob ended with {status} after SIGTERM");
                }
                return Ok(());
            }
            if start.elapsed() > STOP_MAX {
                self.kill();
                let what = format!("hob has not ended {STOP_MAX:?} after SIGTERM");
                return Err(TimedOut::new(start, STOP_MAX, what).into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends SIGHUP to the daemon and waits for the result of the upgrade.
    ///
    /// # Errors
    /// Returns an error if the daemon ends, and [`TimedOut`] if it reports no result in time.
    pub fn upgrade(&mut self) -> Result<Upgrade> {
        let count = |log: &str, what: &str| log.matches(what).count();
        let before = self.log();
        let (ready, refused) = (count(&before, READY_LINE), count(&before, REFUSED_LINE));
        self.signal(Signal::HUP);
        let start = Instant::now();
        loop {
            if let Some(status) = self.ended()? {
                bail!("hob ended ({status}) in an upgrade");
            }
            let log = self.log();
            if count(&log, REFUSED_LINE) > refused {
                let line = log.lines().rfind(|line| line.contains(REFUSED_LINE)).unwrap_or_default();
                return Ok(Upgrade::Refused(line.to_owned()));
            }
            if count(&log, READY_LINE) > ready {
                return Ok(Upgrade::Done);
            }
            if start.elapsed() > UPGRADE_MAX {
                let what = format!("hob has not reported the end of an upgrade for {UPGRADE_MAX:?}");
                return Err(TimedOut::new(start, UPGRADE_MAX, what).into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Runs a `hob` command. Returns true if the command succeeded, and the command's output.
    ///
    /// # Errors
    /// Returns an error if the command cannot be started, and [`TimedOut`] if it does not end in
    /// time.
    pub fn command(&self, args: &[&str]) -> Result<(bool, String)> {
        let control = format!("unix:{}", self.control_socket().display());
        let mut command = Command::new(&self.program);
        command.args(args).args(["--control", &control]);
        let start = Instant::now();
        let mut process = conformance::process::Process::start("hob", &mut command)?;
        let output = process.finish(COMMAND_MAX);
        if output.status.is_none() {
            let what = format!("hob {args:?} has not ended after {COMMAND_MAX:?}");
            return Err(TimedOut::new(start, COMMAND_MAX, what).into());
        }
        Ok((output.success(), output.all()))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.signal(Signal::CONT);
        self.kill();
    }
}
