//! Child processes, which cannot outlive the test that started them, and the output of these
//! processes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::scratch::wait_for;

/// A running child process. Dropping the value kills the child by its process id, and reaps the
/// child.
///
/// The output of the child goes to files instead of pipes, so that a child with much output never
/// blocks.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    stdout: File,
    stderr: File,
    gone: Option<ExitStatus>,
}

/// Result of a finished process.
#[derive(Debug, Clone)]
pub struct Output {
    /// Exit status of the process; `None` if it timed out and was killed.
    pub status: Option<ExitStatus>,
    /// Standard output of the process, undecodable bytes replaced.
    pub stdout: String,
    /// Standard error of the process, undecodable bytes replaced.
    pub stderr: String,
}

impl Output {
    /// Returns true if the process exited with status 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.status.is_some_and(|s| s.success())
    }

    /// Returns both streams, for searches in either.
    #[must_use]
    pub fn all(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }
}

impl Process {
    /// Starts `command` with empty standard input. The kernel kills the child when the calling thread ends,
    /// so call this from the test's own thread.
    ///
    /// # Errors
    /// Returns an error if the program cannot be started.
    pub fn start(name: &str, command: &mut Command) -> std::io::Result<Self> {
        Self::spawn(name, &mut wrapped(command))
    }

    /// Starts `command` like [`start`](Self::start), in a process group of its own. So Ctrl-C in the
    /// terminal does not end the child.
    ///
    /// # Errors
    /// Returns an error if the program cannot be started.
    pub fn start_in_own_group(name: &str, command: &mut Command) -> std::io::Result<Self> {
        Self::spawn(name, wrapped(command).process_group(0))
    }

    fn spawn(name: &str, wrapped: &mut Command) -> std::io::Result<Self> {
        let (stdout, stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
        let child =
            wrapped.stdin(Stdio::null()).stdout(stdout.try_clone()?).stderr(stderr.try_clone()?).spawn()?;
        Ok(Self { name: name.to_owned(), child, stdout, stderr, gone: None })
    }

    /// Returns the process id of the child.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the exit status of the child, or `None` while the child runs.
    pub fn poll(&mut self) -> Option<ExitStatus> {
        if self.gone.is_none() {
            self.gone = self.child.try_wait().expect("wait for a child");
        }
        self.gone
    }

    /// Sends `signal` to this process and no other. SIGSTOP takes effect with a delay, in which the
    /// process may still do work. For SIGSTOP, this function returns when no thread of the process
    /// runs.
    ///
    /// # Panics
    /// Panics if the process does not stop in time.
    #[track_caller]
    pub fn signal(&mut self, signal: Signal) {
        if self.poll().is_none() {
            let pid = Pid::from_child(&self.child);
            kill_process(pid, signal).unwrap_or_else(|e| panic!("signal {}: {e}", self.name));
            if signal == Signal::STOP {
                self.wait_until_stopped();
            }
        }
    }

    #[track_caller]
    fn wait_until_stopped(&mut self) {
        let tasks = format!("/proc/{}/task", self.pid());
        wait_for("the stop of every thread", || {
            std::fs::read_dir(&tasks).expect("a live process").flatten().all(|task| {
                let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
                stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
            })
        });
    }

    /// Sends SIGKILL to the child, and reaps it.
    pub fn kill(&mut self) {
        if self.gone.is_none() {
            let _ = self.child.kill();
            self.gone = self.child.wait().ok();
        }
    }

    /// Waits for the end of the child, at most `limit`. Returns `None` if the child still runs
    /// then.
    pub fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.poll() {
                return Some(status);
            }
            let waited = start.elapsed();
            if waited > limit {
                return None;
            }
            std::thread::sleep((waited / 20).clamp(Duration::from_millis(2), Duration::from_millis(50)));
        }
    }

    /// Waits for the end of the child, and returns the child's output. Kills the child after
    /// `limit`.
    pub fn finish(&mut self, limit: Duration) -> Output {
        let status = self.wait(limit);
        self.kill();
        Output { status, stdout: self.stdout(), stderr: self.stderr() }
    }

    /// Returns the child's standard output so far.
    #[must_use]
    pub fn stdout(&self) -> String {
        contents(&self.stdout)
    }

    /// Returns the child's standard error so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        contents(&self.stderr)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let (out, err) = (self.stdout(), self.stderr());
            eprintln!("--- {} ended {:?}; it printed:\n{}", self.name, self.gone, tail(&out, 20));
            eprintln!("--- {} standard error:\n{}", self.name, tail(&err, 60));
        }
    }
}

/// Returns a command like `command` whose process the kernel kills when the calling thread ends.
fn wrapped(command: &Command) -> Command {
    // setpriv (util-linux) asks the kernel for the signal and then becomes the program: same pid.
    let mut wrapped = Command::new(crate::tool::find("setpriv"));
    wrapped.args(["--pdeathsig", "KILL", "--"]).arg(command.get_program()).args(command.get_args());
    for (key, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(key, value),
            None => wrapped.env_remove(key),
        };
    }
    if let Some(dir) = command.get_current_dir() {
        wrapped.current_dir(dir);
    }
    wrapped
}

/// Returns the process ids of all present descendants of `pid`.
#[must_use]
pub fn descendants(pid: u32) -> Vec<u32> {
    let mut parent_of = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(child) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        // The second field is the program's name in parentheses, which may contain anything.
        let Some((_, rest)) = stat.rsplit_once(')') else { continue };
        if let Some(Ok(parent)) = rest.split_whitespace().nth(1).map(str::parse::<u32>) {
            parent_of.push((child, parent));
        }
    }
    let mut found: Vec<u32> = Vec::new();
    let mut look = vec![pid];
    while let Some(parent) = look.pop() {
        for &(child, _) in parent_of.iter().filter(|&&(_, p)| p == parent) {
            found.push(child);
            look.push(child);
        }
    }
    found
}

/// Returns true if the process exists and is not a zombie.
#[must_use]
pub fn alive(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

/// Returns the resident memory of a process, in KiB.
///
/// # Panics
/// Panics if the process does not exist.
#[must_use]
#[track_caller]
pub fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a living process");
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).expect("VmRSS in /proc/PID/status");
    line.trim().trim_end_matches(" kB").trim().parse().expect("a number of KiB")
}

fn contents(file: &File) -> String {
    // Read by offset: the child writes through the same open file and uses its position.
    let mut bytes = Vec::new();
    let mut chunk = [0; 8192];
    loop {
        match file.read_at(&mut chunk, bytes.len() as u64) {
            Ok(0) => return String::from_utf8_lossy(&bytes).into_owned(),
            Ok(n) => bytes.extend_from_slice(&chunk[..n]),
            Err(e) => return format!("(unreadable: {e})"),
        }
    }
}

fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod tests {
    use rustix::process::{getpgid, getpgrp};

    use super::*;

    #[test]
    fn a_process_in_its_own_group_is_not_in_that_of_the_terminal() {
        let mut command = Command::new(crate::tool::find("sleep"));
        command.arg("60");
        let shared = Process::start("sleep", &mut command).unwrap();
        let own = Process::start_in_own_group("sleep", &mut command).unwrap();
        let [of_shared, of_own] = [&shared, &own].map(|process| Pid::from_child(&process.child));
        assert_eq!(getpgid(Some(of_shared)), Ok(getpgrp()));
        assert_eq!(getpgid(Some(of_own)), Ok(of_own));
    }
}
