//! `hob tasks`: changes that continue in the background, and how they ended.

use clap::{Args, Subcommand};
use hob_control::Task;

use super::Global;
use super::drain::{sentence, time};
use super::output::{print, table, word};
use super::remote::ask;

/// Show changes that continue in the background, and how they ended
///
/// A failed change stays in the list, and in 'hob health', until it is acknowledged. After a
/// restart of the daemon, the list has only the failed changes.
#[derive(Debug, Args)]
pub(crate) struct Tasks {
    #[command(subcommand)]
    command: Option<What>,
}

#[derive(Debug, Subcommand)]
enum What {
    /// List all tasks, as without a subcommand
    List,
    /// Stop a drain, and the change that waits for it; other tasks cannot be cancelled
    Cancel {
        /// The task's number
        #[arg(value_parser = task_number)]
        task: u64,
    },
    /// Remove a task that has ended from the list, and its failure from 'hob health'
    Acknowledge {
        /// The task's number
        #[arg(value_parser = task_number)]
        task: u64,
    },
}

pub(super) fn run(args: &Tasks, global: &Global) -> anyhow::Result<()> {
    let tasks = ask(global, async |client| match args.command {
        None | Some(What::List) => client.tasks().await,
        Some(What::Cancel { task }) => client.task_cancel(task).await,
        Some(What::Acknowledge { task }) => client.task_acknowledge(task).await,
    })?;
    print(global.output, &tasks, |tasks| show(tasks))
}

fn task_number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "a task is a number such as 7; 'hob tasks' shows the numbers".to_owned())
}

fn show(tasks: &[Task]) -> String {
    if tasks.is_empty() {
        return "no tasks".to_owned();
    }
    let columns = "TASK:|WHAT|OF|STATE|SINCE|DETAIL";
    table(columns, tasks.iter().map(row))
}

fn row(task: &Task) -> Vec<String> {
    let waits = task.waits_for.as_ref().map(|what| format!("waits for {what}"));
    let detail = match &task.error {
        Some(error) => error.clone(),
        None => task.dirty.as_ref().map(sentence).into_iter().chain(waits).collect::<Vec<_>>().join("; "),
    };
    let since = time(task.ended_seconds_ago.unwrap_or(task.age_seconds));
    vec![task.id.to_string(), task.what.clone(), task.subject.clone(), word(&task.state), since, detail]
}

#[cfg(test)]
mod tests {
    use hob_control::TaskState;

    use super::*;

    #[test]
    fn a_task_is_a_line_with_its_progress_or_its_error() {
        let task = Task {
            id: 7,
            what: "disk remove".to_owned(),
            subject: "vm".to_owned(),
            state: TaskState::Failed,
            age_seconds: 200,
            ended_seconds_ago: Some(61),
            dirty: None,
            waits_for: None,
            can_cancel: false,
            error: Some("the task ended unexpectedly".to_owned()),
        };
        assert_eq!(
            row(&task),
            ["7", "disk remove", "vm", "failed", "1 min 1 s", "the task ended unexpectedly"]
        );
        let running = Task { state: TaskState::Running, ended_seconds_ago: None, error: None, ..task };
        assert_eq!(row(&running)[3..], ["running", "3 min 20 s", ""]);
        let waiting = Task { waits_for: Some("the flash device /f".to_owned()), ..running };
        assert_eq!(row(&waiting)[5], "waits for the flash device /f");
        assert_eq!(show(&[]), "no tasks");
    }
}
