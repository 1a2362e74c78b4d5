//! `hob health`: shows problems.

use clap::Args;
use hob_control::{Health as State, HealthStatus};

use super::output::{print, table};
use super::remote::ask;
use super::{Global, NotInOrder};

/// Show problems; exit status 0 if there are none
#[derive(Debug, Args)]
pub(crate) struct Health {}

pub(super) fn run(Health {}: &Health, global: &Global) -> anyhow::Result<()> {
    let health = ask(global, async |client| client.health().await)?;
    print(global.output, &health, show)?;
    match health.status {
        HealthStatus::Ok => Ok(()),
        HealthStatus::Degraded => Err(NotInOrder.into()),
    }
}

fn show(health: &State) -> String {
    if health.problems.is_empty() {
        return "no problems".to_owned();
    }
    let row = |problem: &hob_control::HealthProblem| {
        vec![problem.kind.name().to_owned(), problem.subject.clone(), problem.reason.clone()]
    };
    table("PROBLEM|WHERE|WHY", health.problems.iter().map(row))
}
