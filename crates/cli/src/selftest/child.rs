//! The daemon under test: this program as a child process, with files that lose unflushed writes.

use std::fs::OpenOptions;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use hob_daemon::power_cut;
use hob_lab::driver::{Connection, NbdClient};
use hob_storage::crash_log;
use hob_storage::volatile::VolatileOptions;
use rustix::process::{Pid, Signal, kill_process};

use super::setup::Stage;

/// Number of daemons that were started, plus 1.
static STARTS: AtomicU64 = AtomicU64::new(1);

/// Maximum time from the start of a daemon until it serves its disk.
const READY_MAX: Duration = Duration::from_secs(30);

/// Maximum time until a request is answered, and until the process ends when asked to.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Maximum time for the kernel to end a killed process.
const DEATH_MAX: Duration = Duration::from_secs(20);

const POLL: Duration = Duration::from_millis(2);

/// A running daemon. Dropping the value kills the daemon.
pub(super) struct Daemon {
    child: Child,
}

impl Daemon {
    pub(super) fn start(stage: &Stage, options: &VolatileOptions) -> anyhow::Result<Daemon> {
        for socket in [stage.nbd_socket(), stage.control_socket()] {
            let _ = std::fs::remove_file(socket);
        }
        let log = OpenOptions::new().create(true).append(true).open(stage.log())?;
        // The program's file may have been replaced since this process started.
        let child = Command::new("/proc/self/exe")
            .args(["daemon", "--log", "info", "--config"])
            .arg(stage.config())
            .env(power_cut::VARIABLE, power_cut::order(options))
            .env(crash_log::DIRECTORY_VARIABLE, stage.empty_memory()?)
            // A power cut restarts the host, so each daemon gets another boot id.
            .env(crash_log::BOOT_VARIABLE, format!("{:032x}", STARTS.fetch_add(1, Ordering::Relaxed)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            // Ctrl-C must reach only this process.
            .process_group(0)
            .spawn()
            .context("cannot start the daemon")?;
        Ok(Daemon { child })
    }

    /// Waits until the daemon serves its disk; returns `None` if the power was cut before.
    pub(super) fn connect(&mut self, stage: &Stage) -> anyhow::Result<Option<NbdClient>> {
        let start = Instant::now();
        loop {
            let tried = Connection::open(&stage.uri());
            if let Some(status) = self.child.try_wait()? {
                demand_cut(status).context("the daemon ended instead of serving the disk")?;
                return Ok(None);
            }
            match tried {
                Ok(connection) => return Ok(Some(NbdClient::open(connection, SILENCE_MAX)?)),
                Err(error) if start.elapsed() > READY_MAX => {
                    let said = format!("the daemon does not serve the disk after {} s", READY_MAX.as_secs());
                    return Err(error.context(format!("{said}; {}", stage.last_complaint())));
                }
                Err(_) => thread::sleep(POLL),
            }
        }
    }

    /// Runs `work`, and kills the daemon with SIGKILL after `time` unless the work has ended.
    pub(super) fn killed_after<T>(&self, time: Duration, work: impl FnOnce() -> T) -> T {
        let (through, waits) = mpsc::channel::<()>();
        let pid = Pid::from_child(&self.child);
        thread::scope(|scope| {
            scope.spawn(move || {
                if waits.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
                    // The daemon may have killed itself just before. Its pid is still valid,
                    // because the process was not waited for.
                    let _ = kill_process(pid, Signal::KILL);
                }
            });
            let done = work();
            drop(through);
            done
        })
    }

    /// Waits for the end of a killed daemon; any other end is an error.
    pub(super) fn bury(mut self) -> anyhow::Result<()> {
        match self.wait(DEATH_MAX)? {
            Some(status) => demand_cut(status),
            None => bail!("the daemon closed its connection but still runs"),
        }
    }

    /// Sends SIGTERM and requires a clean end.
    pub(super) fn stop(mut self) -> anyhow::Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM).context("cannot signal the daemon")?;
        let status = self.wait(SILENCE_MAX)?;
        let Some(status) = status else {
            bail!("the daemon still runs {} s after SIGTERM", SILENCE_MAX.as_secs())
        };
        ensure!(status.success(), "after SIGTERM the daemon ended with {status}");
        Ok(())
    }

    fn wait(&mut self, time: Duration) -> anyhow::Result<Option<ExitStatus>> {
        let start = Instant::now();
        while start.elapsed() < time {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            thread::sleep(POLL);
        }
        Ok(None)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // An error means that the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Requires that a process was killed. A daemon that ends by itself has a bug.
fn demand_cut(status: ExitStatus) -> anyhow::Result<()> {
    ensure!(status.signal() == Some(Signal::KILL.as_raw()), "the daemon ended unexpectedly, with {status}");
    Ok(())
}
