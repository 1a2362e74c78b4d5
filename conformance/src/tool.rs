//! Runs third-party programs with a timeout, and reports all their output on failure.

use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::hosts::Host;
use crate::process::{Output, Process};

/// Default timeout of a tool.
const TIME_MAX: Duration = Duration::from_secs(240);

/// Returns the path of a program, searched in `PATH` and in the system administration directories.
///
/// # Panics
/// Panics if the program is not found: the test suite fails instead of skipping tests.
#[must_use]
#[track_caller]
pub fn find(program: &str) -> PathBuf {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':')
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"])
        .filter(|dir| !dir.is_empty())
        .map(|dir| PathBuf::from(dir).join(program))
        .find(|file| file.is_file())
        .unwrap_or_else(|| {
            panic!("{program} is not installed; `cargo xtask test` installs what this suite needs")
        })
}

/// A builder for a call of a program.
#[derive(Debug)]
pub struct Tool {
    name: String,
    command: Command,
    time_max: Duration,
    start: Start,
}

/// A function that starts a program.
type Start = fn(&str, &mut Command) -> io::Result<Process>;

impl Tool {
    /// Creates a call of `program`, which must be installed.
    #[must_use]
    #[track_caller]
    pub fn new(program: &str) -> Self {
        Self {
            name: program.to_owned(),
            command: Command::new(find(program)),
            time_max: TIME_MAX,
            start: Process::start,
        }
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    /// Adds several arguments.
    #[must_use]
    pub fn args<S: AsRef<std::ffi::OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    /// Sets the environment variable `key`.
    #[must_use]
    pub fn env(mut self, key: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(key, value);
        self
    }

    /// Runs the program on a separate host.
    #[must_use]
    #[track_caller]
    pub fn inside(mut self, host: &Host) -> Self {
        self.command = host.wrap(&self.command);
        self
    }

    /// Runs the program in a process group of its own, so that Ctrl-C in the terminal does not end
    /// the program.
    #[must_use]
    pub fn in_own_group(mut self) -> Self {
        self.start = Process::start_in_own_group;
        self
    }

    /// Changes the time limit.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.time_max = limit;
        self
    }

    /// Starts the program, without waiting for its end.
    #[must_use]
    #[track_caller]
    pub fn start(mut self) -> Process {
        (self.start)(&self.name, &mut self.command).unwrap_or_else(|e| panic!("start {}: {e}", self.name))
    }

    /// Runs the program until it ends, with any result.
    #[must_use]
    #[track_caller]
    pub fn output(mut self) -> Output {
        let mut process = (self.start)(&self.name, &mut self.command)
            .unwrap_or_else(|e| panic!("start {}: {e}", self.name));
        process.finish(self.time_max)
    }

    /// Runs the program, which must succeed. Returns the program's standard output.
    ///
    /// # Panics
    /// Panics if the program fails or times out. The message contains all output of the program.
    #[track_caller]
    pub fn run(self) -> String {
        let line = format!("{:?}", self.command);
        let time_max = self.time_max;
        let output = self.output();
        assert!(output.success(), "{}", explain(&line, &output, time_max));
        output.stdout
    }

    /// Runs the program, and returns its standard output.
    ///
    /// # Errors
    /// Returns an error with all output of the program if the program cannot be started, fails or
    /// times out.
    pub fn try_run(mut self) -> io::Result<String> {
        let output = (self.start)(&self.name, &mut self.command)?.finish(self.time_max);
        if output.success() {
            return Ok(output.stdout);
        }
        Err(io::Error::other(explain(&format!("{:?}", self.command), &output, self.time_max)))
    }

    /// Runs the program, which must fail by itself. Returns standard output and standard error.
    ///
    /// # Panics
    /// Panics if the program succeeds or times out.
    #[track_caller]
    pub fn run_failing(self) -> Output {
        let line = format!("{:?}", self.command);
        let time_max = self.time_max;
        let output = self.output();
        let failed = output.status.is_some_and(|s| !s.success());
        assert!(failed, "this should have failed: {}", explain(&line, &output, time_max));
        output
    }
}

fn explain(line: &str, output: &Output, limit: Duration) -> String {
    let end = match output.status {
        Some(status) => status.to_string(),
        None => format!("still running after {limit:?}, killed"),
    };
    format!("{line}\n{end}\n--- stdout\n{}\n--- stderr\n{}", output.stdout, output.stderr)
}
