//! API handlers for changes that continue in the background.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::{delete, get, post};
use hob_control::{Problem, Task};

use super::extract::Answer;
use crate::api_error::{Result, not_found};
use crate::services::Services;

type App = State<Arc<Services>>;

pub(super) fn routes() -> Router<Arc<Services>> {
    Router::new()
        .route("/v1/tasks", get(list))
        .route("/v1/tasks/{task}", delete(cancel))
        .route("/v1/tasks/{task}/acknowledge", post(acknowledge))
}

fn number(task: &str) -> Result<u64> {
    task.parse().map_err(|_| not_found!("there is no task '{task}': tasks have numbers"))
}

/// Returns changes in progress, and those that ended after their request was answered. Failed
/// changes are listed until they are acknowledged. Of the other ended changes, the last 20 are
/// listed.
#[utoipa::path(get, path = "/v1/tasks", responses((status = 200, body = Vec<Task>)))]
pub(super) async fn list(State(services): App) -> Answer<Vec<Task>> {
    Answer::Yes(services.pools.tasks_view())
}

/// Cancels a task that drains a disk (`can_cancel`): the drain stops, and a change that waited for
/// it is not made. Other tasks cannot be cancelled.
#[utoipa::path(
    delete,
    path = "/v1/tasks/{task}",
    params(("task" = u64, Path, description = "Its number")),
    responses((status = 200, body = Vec<Task>), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn cancel(State(services): App, Path(task): Path<String>) -> Answer<Vec<Task>> {
    match number(&task) {
        Ok(id) => services.pools.task_cancel(id).await.into(),
        Err(error) => Answer::from(Err(error)),
    }
}

/// Removes a task that has ended from the list, and its failure from health.
#[utoipa::path(
    post,
    path = "/v1/tasks/{task}/acknowledge",
    params(("task" = u64, Path, description = "Its number")),
    responses((status = 200, body = Vec<Task>), (status = "4XX", body = Problem))
)]
pub(super) async fn acknowledge(State(services): App, Path(task): Path<String>) -> Answer<Vec<Task>> {
    number(&task).and_then(|id| services.pools.task_acknowledge(id)).into()
}
