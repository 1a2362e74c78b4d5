//! Runs other programs, and detects an interrupt by the user.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};

use crate::failures::Failures;

/// Returns the root directory of the workspace.
pub fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("xtask lies in the workspace").to_owned()
}

/// Returns a cargo command in the root directory of the workspace, with the cargo that runs xtask.
/// The command does not inherit the variables about xtask that `cargo run` sets: some build scripts
/// depend on these variables, so a build by this command and a build by hand would replace each
/// other.
pub fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root());
    let of_xtask = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_xtask)) {
        command.env_remove(name);
    }
    command
}

/// Installs the cargo command `name` if it is absent.
pub fn install_cargo_command(name: &str) -> Result<()> {
    if cargo(&[name, "--version"]).output().is_ok_and(|output| output.status.success()) {
        return Ok(());
    }
    println!("cargo-{name} is not installed; installing it with cargo");
    run(&mut cargo(&["install", &format!("cargo-{name}"), "--locked"]))
}

/// Runs `command` with xtask's output and without input. Returns an error if the command fails.
pub fn run(command: &mut Command) -> Result<()> {
    let words = words(command);
    println!("$ {words}");
    let status = command.stdin(Stdio::null()).status().with_context(|| format!("cannot start {words}"))?;
    if !status.success() {
        bail!("{words}: {status}");
    }
    Ok(())
}

/// Runs a cargo command. Returns an error if the command fails, or if the compiler printed a
/// warning. Cargo's own warnings, such as those about the network, are no errors.
pub fn run_without_warnings(command: &mut Command) -> Result<()> {
    let mut warned = Vec::new();
    let status = run_and_read(command.stderr(Stdio::piped()), |line| {
        eprintln!("{line}");
        if line.starts_with("warning: `") && line.contains(" generated ") {
            warned.push(line.to_owned());
        }
    })?;
    let words = words(command);
    if !status.success() {
        bail!("{words}: {status}");
    }
    if !warned.is_empty() {
        bail!("{words}: warnings are errors here\n{}", warned.join("\n"));
    }
    Ok(())
}

/// Runs all commands at the same time. Returns an error if one fails, after the others have ended.
pub fn run_together(commands: Vec<Command>) -> Result<()> {
    let mut running = Vec::new();
    let mut failed = Vec::new();
    for mut command in commands {
        let words = words(&command);
        println!("$ {words}");
        match command.stdin(Stdio::null()).spawn() {
            Ok(child) => running.push((words, child)),
            Err(error) => failed.push(format!("cannot start {words}: {error}")),
        }
    }
    for (words, mut child) in running {
        match child.wait() {
            Ok(status) if status.success() => {}
            Ok(status) => failed.push(format!("{words}: {status}")),
            Err(error) => failed.push(format!("cannot wait for {words}: {error}")),
        }
    }
    if !failed.is_empty() {
        bail!("{}", failed.join("\n"));
    }
    Ok(())
}

/// Runs a test command with xtask's output. The error has the failed tests and their messages.
pub fn run_tests(command: &mut Command) -> Result<()> {
    let mut failures = Failures::default();
    let status = run_and_read(command.stdout(Stdio::piped()), |line| {
        println!("{line}");
        failures.take(line);
    })?;
    if !status.success() {
        bail!("{}: {status}\n{}", words(command), failures.text());
    }
    Ok(())
}

/// Runs `command` and passes each line of its piped stream to `take`.
fn run_and_read(command: &mut Command, mut take: impl FnMut(&str)) -> Result<ExitStatus> {
    let words = words(command);
    println!("$ {words}");
    let mut child = command.stdin(Stdio::null()).spawn().with_context(|| format!("cannot start {words}"))?;
    let out = child.stdout.take().map(|it| Box::new(it) as Box<dyn Read>);
    let stream = out.or(child.stderr.take().map(|it| Box::new(it) as Box<dyn Read>));
    for line in BufReader::new(stream.expect("one stream is piped")).split(b'\n') {
        let line = line.with_context(|| format!("cannot read the output of {words}"))?;
        take(&String::from_utf8_lossy(&line));
    }
    Ok(child.wait()?)
}

/// Runs `command` and returns its output. Returns an error if the command fails.
pub fn output(command: &mut Command) -> Result<String> {
    let words = words(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {words}"))?;
    if !output.status.success() {
        bail!("{words}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns cargo's metadata of the workspace's own packages.
pub fn metadata() -> Result<serde_json::Value> {
    let text = output(&mut cargo(&["metadata", "--no-deps", "--format-version", "1"]))?;
    Ok(serde_json::from_str(&text)?)
}

/// Returns cargo's target directory.
pub fn target_dir() -> Result<PathBuf> {
    let metadata = metadata()?;
    let dir = metadata["target_directory"].as_str().context("cargo metadata names no target directory")?;
    Ok(dir.into())
}

/// Flag that SIGINT and SIGTERM set from `listen` until the program ends, instead of ending it.
/// Scratch files and servers can thus be removed before the program ends.
#[derive(Debug, Clone)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Installs the signal handlers.
    pub fn listen() -> Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&flag)).context("cannot listen for signals")?;
        }
        Ok(Self(flag))
    }

    /// Returns an error after a signal.
    pub fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok(())
    }
}

/// Returns the command as text, with the name of the program and its arguments.
pub fn words(command: &Command) -> String {
    let name = PathBuf::from(command.get_program());
    let name = name.file_name().unwrap_or(command.get_program()).to_string_lossy().into_owned();
    let args = command.get_args().map(|a| a.to_string_lossy().into_owned());
    std::iter::once(name).chain(args).collect::<Vec<_>>().join(" ")
}
