//! Drains in the list of tasks: their dirty data and their cancellation.

use hob_control::Task;

use super::super::Pools;
use crate::api_error::ApiError;

impl Pools {
    /// Returns the tasks in progress, and those that ended after their client stopped waiting; the
    /// oldest first.
    pub(crate) fn tasks_view(&self) -> Vec<Task> {
        self.observe.tasks_view()
    }

    /// Cancels a task that drains a disk. Other tasks cannot be cancelled.
    pub(crate) async fn task_cancel(&self, id: u64) -> Result<Vec<Task>, ApiError> {
        let shown = self.tasks_view().into_iter().find(|task| task.id == id);
        let (what, subject) = self.tasks.running(id)?;
        if !shown.is_some_and(|task| task.can_cancel) {
            return Err(ApiError::conflict(format!(
                "task {id} ({what} {subject}) cannot be cancelled: only a drain of dirty data can be stopped"
            ))
            .hint(
                "'hob tasks' shows the result when the task has ended; if a disk waits for a dead \
                backing, 'hob disk remove --discard-dirty' does not wait",
            ));
        }
        self.tasks.cancel(id)?;
        self.drain_stop(subject).await?;
        Ok(self.tasks_view())
    }

    /// Removes a task that has ended from the list, and its failure from health.
    pub(crate) fn task_acknowledge(&self, id: u64) -> Result<Vec<Task>, ApiError> {
        self.tasks.acknowledge(id)?;
        Ok(self.tasks_view())
    }
}
