//! API handlers that compare hob.toml with the running daemon.

use std::sync::Arc;

use axum::extract::State;
use hob_control::{ConfigApplied, ConfigApply, ConfigDiff, Problem};

use super::extract::{Answer, Body};
use crate::daemon::manager::Manager;

type App = State<Arc<Manager>>;

/// Compares the current hob.toml with the running daemon.
#[utoipa::path(
    get,
    path = "/v1/config/diff",
    operation_id = "config_diff",
    responses((status = 200, body = ConfigDiff), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn diff(State(manager): App) -> Answer<ConfigDiff> {
    manager.config_diff().await.into()
}

/// Applies hob.toml to the running daemon. Before a change empties or removes a cache or ends
/// write-back, the daemon writes the cache's dirty data to the backing.
#[utoipa::path(
    post,
    path = "/v1/config/apply",
    operation_id = "config_apply",
    request_body = ConfigApply,
    responses((status = 200, body = ConfigApplied), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn apply(State(manager): App, Body(apply): Body<ConfigApply>) -> Answer<ConfigApplied> {
    manager.config_apply(apply.yes).await.into()
}
