//! Drains and shrinking caches in the list of tasks: their dirty data and their cancellation.

use hob_control::Task;

use super::super::Pools;
use super::STOP_TASK;
use crate::api_error::{Result, conflict};

impl Pools {
    /// Returns the tasks in progress, and those that ended after their client stopped waiting; the
    /// oldest first.
    pub(crate) fn tasks_view(&self) -> Vec<Task> {
        self.observe.tasks_view()
    }

    /// Cancels a task that drains a disk, shrinks its cache, or moves its cache off a device. Other
    /// tasks cannot be cancelled.
    pub(crate) async fn task_cancel(&self, id: u64) -> Result<Vec<Task>> {
        let shown = self.tasks_view().into_iter().find(|task| task.id == id && task.can_cancel);
        let (what, subject) = self.tasks.running(id)?;
        let Some(disk) = shown.and_then(|task| self.disk_of_task(&task)) else {
            return Err(conflict!(
                "task {id} ({what} {subject}) cannot be cancelled: only a drain of dirty data can be stopped"
            )
            .hint(
                "'hob tasks' shows the result when the task has ended; if a disk waits for a dead \
                backing, 'hob disk remove --discard-dirty' does not wait",
            ));
        };
        self.tasks.cancel(id)?;
        self.drain_stop(disk).await?;
        Ok(self.tasks_view())
    }

    /// Records that an operator cancels the tasks that write a disk's dirty data to its backing.
    pub(super) fn note_stopped(&self, name: &str) {
        let is_stopped = |task: &Task| {
            task.can_cancel
                && task.what != STOP_TASK
                && self.disk_of_task(task).is_some_and(|disk| disk == name)
        };
        for task in self.tasks_view().into_iter().filter(is_stopped) {
            // A task that is not in the list any more has ended.
            let _ = self.tasks.cancel(task.id);
        }
    }

    /// Returns the name of the disk whose dirty data a task may have to write to the backing.
    fn disk_of_task(&self, task: &Task) -> Option<String> {
        self.registry.inner().disk_of_task(task).map(|(name, _)| name.to_owned())
    }

    /// Removes a task that has ended from the list, and its failure from health.
    pub(crate) fn task_acknowledge(&self, id: u64) -> Result<Vec<Task>> {
        self.tasks.acknowledge(id)?;
        Ok(self.tasks_view())
    }
}
