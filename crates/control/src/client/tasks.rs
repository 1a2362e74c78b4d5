//! Questions and instructions about changes in the background.

use hyper::Method;

use super::{Client, ClientError};
use crate::Task;

impl Client {
    /// Returns the tasks in progress, and those that ended after its request was answered.
    pub async fn tasks(&self) -> Result<Vec<Task>, ClientError> {
        self.get("/v1/tasks").await
    }

    /// Stops a task. Returns all of them.
    pub async fn task_cancel(&self, id: u64) -> Result<Vec<Task>, ClientError> {
        self.delete(&format!("/v1/tasks/{id}")).await
    }

    /// Removes a task that has ended. Returns the others.
    pub async fn task_acknowledge(&self, id: u64) -> Result<Vec<Task>, ClientError> {
        self.send(Method::POST, &format!("/v1/tasks/{id}/acknowledge"), None::<&()>).await
    }
}
