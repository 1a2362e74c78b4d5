//! Running other programs, and knowing when the user has had enough.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("xtask lies in the workspace").to_owned()
}

/// A call of the cargo that runs us, in the root of the workspace.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root());
    command
}

/// Runs `command` with our output and no input; an error when it fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let words = words(command);
    println!("$ {words}");
    let status = command.stdin(Stdio::null()).status().with_context(|| format!("start {words}"))?;
    if !status.success() {
        bail!("{words}: {status}");
    }
    Ok(())
}

/// Runs `command` while others print, and shows what it said when it has ended; an error when it fails.
pub(crate) fn run_apart(command: &mut Command) -> Result<()> {
    let words = words(command);
    println!("$ {words}");
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("start {words}"))?;
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    println!("\n$ {words}\n{}", said.concat());
    if !output.status.success() {
        bail!("{words}: {}", output.status);
    }
    Ok(())
}

/// Runs `command` quietly and returns what it printed; an error when it fails.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let words = words(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("start {words}"))?;
    if !output.status.success() {
        bail!("{words}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// What cargo says about the workspace's own packages.
pub(crate) fn metadata() -> Result<serde_json::Value> {
    let text = output(&mut cargo(&["metadata", "--no-deps", "--format-version", "1"]))?;
    Ok(serde_json::from_str(&text)?)
}

/// The directory cargo builds into.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let metadata = metadata()?;
    let dir = metadata["target_directory"].as_str().context("cargo metadata names a target directory")?;
    Ok(dir.into())
}

/// Set by Ctrl-C and SIGTERM from the moment this exists, so that scratch files and servers can be
/// put away before the program ends.
#[derive(Debug, Clone)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Starts listening for the signals.
    pub(crate) fn listen() -> Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&flag)).context("listen for signals")?;
        }
        Ok(Self(flag))
    }

    /// An error once a signal has come.
    pub(crate) fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok(())
    }
}

fn words(command: &Command) -> String {
    let name = PathBuf::from(command.get_program());
    let name = name.file_name().unwrap_or(command.get_program()).to_string_lossy().into_owned();
    let args = command.get_args().map(|a| a.to_string_lossy().into_owned());
    std::iter::once(name).chain(args).collect::<Vec<_>>().join(" ")
}
