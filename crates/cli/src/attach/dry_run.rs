//! `--dry-run`: prints the steps of the plan, and whether its first ones would fail.

use anyhow::{anyhow, bail};

use super::execution::tell;
use super::plan::{Goal, State, Step, steps};
use super::record::Record;
use crate::DryRunEnded;

/// Prints the steps from a state to a goal.
pub(super) async fn print_plan(record: &Record, goal: Goal, state: State) -> anyhow::Result<()> {
    let no_daemon = "the hob daemon does not answer; start it with 'systemctl start hob'";
    let steps = steps(goal, state).map_err(|_| anyhow!(no_daemon))?;
    if steps.is_empty() {
        tell(&format!("{}: nothing to do: the disk is attached", record.label));
    }
    for (step, number) in steps.iter().zip(1..) {
        tell(&format!("{number:>3}. {step}"));
    }
    if steps.contains(&Step::AddNode)
        && let Err(error) = tokio::net::UnixStream::connect(record.socket()).await
    {
        bail!(
            "{}: the step '{}' would fail: nothing listens on hob's NBD socket {} ({error}); add it to 'listen' \
             in hob's configuration, or name another socket with --nbd",
            record.label,
            Step::AddNode,
            record.socket()
        );
    }
    Ok(())
}

/// Returns the result of a command that has ended without an error.
pub(super) fn end(is_dry: bool) -> anyhow::Result<()> {
    if is_dry { Err(DryRunEnded.into()) } else { Ok(()) }
}
