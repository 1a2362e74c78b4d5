//! Client methods for changes that continue in the background.

use hyper::Method;

use super::{Client, ClientError};
use crate::Task;

impl Client {
    /// Returns the tasks in progress, and those that ended after the response to their request.
    pub async fn tasks(&self) -> Result<Vec<Task>, ClientError> {
        self.get("/v1/tasks").await
    }

    /// Cancels a task, and returns all tasks.
    pub async fn task_cancel(&self, id: u64) -> Result<Vec<Task>, ClientError> {
        self.delete(&format!("/v1/tasks/{id}")).await
    }

    /// Removes a task that has ended, and returns all remaining tasks.
    pub async fn task_acknowledge(&self, id: u64) -> Result<Vec<Task>, ClientError> {
        self.send(Method::POST, &format!("/v1/tasks/{id}/acknowledge"), None::<&()>).await
    }
}
