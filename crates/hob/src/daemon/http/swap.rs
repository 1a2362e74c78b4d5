//! API handlers for the host's swap areas.

use std::sync::Arc;

use axum::extract::{Path, State};
use hob_control::{Problem, Swap, SwapChanged, SwapCreate, SwapPatch};

use super::extract::{Answer, Body};
use crate::daemon::manager::Manager;

type App = State<Arc<Manager>>;

/// Returns all swap areas with the kernel's state.
#[utoipa::path(
    get,
    path = "/v1/swap",
    operation_id = "swaps",
    responses((status = 200, body = Vec<Swap>), (status = "5XX", body = Problem))
)]
pub(super) async fn swaps(State(manager): App) -> Answer<Vec<Swap>> {
    manager.swap.all().await.into()
}

/// Creates a swap area in a pool and turns it on. A long operation continues after the response.
#[utoipa::path(
    post,
    path = "/v1/swap",
    operation_id = "swap_create",
    request_body = SwapCreate,
    responses((status = 200, body = SwapChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn create(State(manager): App, Body(create): Body<SwapCreate>) -> Answer<SwapChanged> {
    manager.swap.create(create).await.into()
}

/// Returns a swap area.
#[utoipa::path(
    get,
    path = "/v1/swap/{swap}",
    operation_id = "swap",
    params(("swap" = String, Path, description = "Its name")),
    responses((status = 200, body = Swap), (status = 404, body = Problem))
)]
pub(super) async fn swap(State(manager): App, Path(swap): Path<String>) -> Answer<Swap> {
    manager.swap.one(&swap).await.into()
}

/// Turns a swap area on or off, or cancels the opposite change. A long operation continues after
/// the response.
#[utoipa::path(
    patch,
    path = "/v1/swap/{swap}",
    operation_id = "swap_set",
    params(("swap" = String, Path, description = "Its name")),
    request_body = SwapPatch,
    responses((status = 200, body = SwapChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn set(
    State(manager): App,
    Path(swap): Path<String>,
    Body(patch): Body<SwapPatch>,
) -> Answer<SwapChanged> {
    manager.swap.set(swap, patch).await.into()
}

/// Removes a swap area that is off, and returns its space to the pool.
#[utoipa::path(
    delete,
    path = "/v1/swap/{swap}",
    operation_id = "swap_remove",
    params(("swap" = String, Path, description = "Its name")),
    responses((status = 200, body = SwapChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn remove(State(manager): App, Path(swap): Path<String>) -> Answer<SwapChanged> {
    manager.pools.swap_remove(swap).await.into()
}
