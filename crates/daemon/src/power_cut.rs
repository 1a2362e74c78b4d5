//! How `hob selftest` tells its child process to lose unflushed data.
//!
//! The parent process sets an environment variable for the child. The variable is undocumented on
//! purpose. It contains the process id of the parent, so it cannot take effect by accident. In a
//! grandchild or a shell, the variable is an error, and the program does not start. The child ends
//! when its parent ends.

use anyhow::{Context, bail, ensure};
use hob_storage::volatile::{self, Flushes, VolatileOptions};
use rustix::process::Signal;

/// Name of the environment variable that makes the child lose unflushed data.
pub const VARIABLE: &str = "HOB_SELFTEST_POWER_CUT";

/// Returns the value of the environment variable [`VARIABLE`] for a child of this process: this
/// process's id and the options.
pub fn order(options: &VolatileOptions) -> String {
    let VolatileOptions { seed, flushes, cut_after } = options;
    let flushes = match flushes {
        Flushes::Honest => "honest",
        Flushes::Ignored => "ignored",
    };
    format!("{} {seed} {flushes} {}", std::process::id(), cut_after.unwrap_or(0))
}

/// Enables the loss of unflushed data, if the parent process requests it.
pub(super) fn obey() -> anyhow::Result<()> {
    let Some(text) = std::env::var_os(VARIABLE) else { return Ok(()) };
    let text = text.to_string_lossy();
    let error = || format!("{VARIABLE} is for hob's own use in `hob selftest`; unset it");
    let (parent, options) = parse(&text).with_context(error)?;
    let actual = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    ensure!(actual == Some(parent), error());
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .context("cannot bind to selftest")?;
    Ok(volatile::switch_on(options)?)
}

/// Writes all unflushed data, because the daemon ends without a simulated power cut, which would
/// lose that data.
pub(super) fn end_in_peace() {
    if let Err(error) = volatile::settle() {
        tracing::error!(%error, "power-cut test: cannot write the unflushed data to the file at the end");
    }
}

/// Parses the value that [`order`] writes: the parent process and the options.
fn parse(text: &str) -> anyhow::Result<(i32, VolatileOptions)> {
    let words: Vec<&str> = text.split(' ').collect();
    let [parent, seed, flushes, cut_after] = words[..] else {
        bail!("the power-cut test expects four words, not '{text}'")
    };
    let flushes = match flushes {
        "honest" => Flushes::Honest,
        "ignored" => Flushes::Ignored,
        other => bail!("the power-cut test expects flushes to be 'honest' or 'ignored', not '{other}'"),
    };
    let cut_after = Some(cut_after.parse()?).filter(|steps| *steps > 0);
    Ok((parent.parse()?, VolatileOptions { seed: seed.parse()?, flushes, cut_after }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_valid_order_is_parsed_and_an_invalid_one_is_refused() {
        let parent = i32::try_from(std::process::id()).unwrap();
        for options in [
            VolatileOptions { seed: 7, flushes: Flushes::Honest, cut_after: None },
            VolatileOptions { seed: u64::MAX, flushes: Flushes::Ignored, cut_after: Some(9) },
        ] {
            assert_eq!(parse(&order(&options)).unwrap(), (parent, options));
        }
        for nonsense in
            ["", "1", "1 2 honest", "1 2 honest 3 4", "1 2 lies 3", "x 2 honest 3", "1 -2 honest 3"]
        {
            assert!(parse(nonsense).is_err(), "{nonsense}");
        }
    }
}
