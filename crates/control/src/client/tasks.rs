//! Client methods for changes that continue in the background.

use super::requests::requests;
use crate::Task;

requests! {
    /// Returns the tasks in progress, and tasks that ended after the daemon had answered their
    /// request.
    tasks() -> Vec<Task>: GET "/v1/tasks";
    /// Cancels a task, and returns all tasks.
    task_cancel(id: u64) -> Vec<Task>: DELETE "/v1/tasks/{id}";
    /// Removes a task that has ended, and returns all remaining tasks.
    task_acknowledge(id: u64) -> Vec<Task>: POST "/v1/tasks/{id}/acknowledge";
}
