//! Disks that move between hosts: what operators ask for, and what other hosts say.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use hob_control::{
    Arrival, CallAnswer, CarrySession, DiskChanged, Migration, MigrationStart, Problem, TakeBack,
};
use hob_engine::migration::Order;
use serde::Deserialize;

use super::extract::{Answer, Body, DataConnection};
use crate::daemon::manager::{CHANGED_BYTES_MAX, CallIn, Manager};

type App = State<Arc<Manager>>;

/// A page of the list has no more bytes: as many ranges as one may have, of two numbers each.
const PAGE_BYTES_MAX: usize = 128 << 10;

/// The paths of this file.
pub(super) fn routes() -> Router<Arc<Manager>> {
    Router::new()
        .route("/v1/disks/{disk}/migration", get(show).post(start).delete(cancel))
        .route("/v1/disks/{disk}/migration/finish", post(finish))
        .route("/v1/disks/{disk}/migration/take-back", post(take_back))
        .route("/v1/disks/{disk}/arrival/arrive", post(arrive))
        .route(
            "/v1/disks/{disk}/arrival/changed",
            post(changed).layer(DefaultBodyLimit::max(CHANGED_BYTES_MAX)),
        )
        .route("/v1/disks/{disk}/arrival/list", post(list).layer(DefaultBodyLimit::max(PAGE_BYTES_MAX)))
        .route("/v1/disks/{disk}/arrival/data", post(data))
        .route("/v1/disks/{disk}/arrival/{call}", post(call))
}

/// Begins to move a disk to another host, with its cache.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/migration",
    operation_id = "migration_start",
    params(("disk" = String, Path, description = "The disk")),
    request_body = MigrationStart,
    responses((status = 200, body = Migration), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn start(
    State(manager): App,
    Path(disk): Path<String>,
    Body(start): Body<MigrationStart>,
) -> Answer<Migration> {
    manager.migrate(disk, start).await.into()
}

/// How far a disk's migration is, or how the last one went.
#[utoipa::path(
    get,
    path = "/v1/disks/{disk}/migration",
    operation_id = "migration",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = Migration), (status = "4XX", body = Problem))
)]
pub(super) async fn show(State(manager): App, Path(disk): Path<String>) -> Answer<Migration> {
    manager.migration(&disk).into()
}

/// Keeps the disk where it is.
#[utoipa::path(
    delete,
    path = "/v1/disks/{disk}/migration",
    operation_id = "migration_cancel",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = Migration), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn cancel(State(manager): App, Path(disk): Path<String>) -> Answer<Migration> {
    manager.order(&disk, Order::Cancel).await.into()
}

/// Hands the disk over now.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/migration/finish",
    operation_id = "migration_finish",
    params(("disk" = String, Path, description = "The disk")),
    responses((status = 200, body = Migration), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn finish(State(manager): App, Path(disk): Path<String>) -> Answer<Migration> {
    manager.order(&disk, Order::Finish).await.into()
}

/// Takes a disk back that is away. The other host must never serve it again.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/migration/take-back",
    operation_id = "migration_take_back",
    params(("disk" = String, Path, description = "The disk")),
    request_body = TakeBack,
    responses((status = 200, body = DiskChanged), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn take_back(
    State(manager): App,
    Path(disk): Path<String>,
    Body(TakeBack { force }): Body<TakeBack>,
) -> Answer<DiskChanged> {
    manager.migration_take_back(disk, force).await.into()
}

/// Of another host: await the disk.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/arrival/arrive",
    operation_id = "arrival_arrive",
    params(("disk" = String, Path, description = "The disk"), CarrySession),
    request_body = Arrival,
    responses((status = 200, body = CallAnswer), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn arrive(
    State(manager): App,
    Path(disk): Path<String>,
    Query(session): Query<CarrySession>,
    Body(arrival): Body<Arrival>,
) -> Answer<CallAnswer> {
    manager.call_in(disk, session, CallIn::Arrive(Box::new(arrival))).await.into()
}

/// Of another host: forget what was changed.
///
/// The body is pages, each after its length (u32, little-endian): a varint with the count of ranges, and for each two
/// varints, the sectors from the end of the range before it to its first, and its sectors.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/arrival/changed",
    operation_id = "arrival_changed",
    params(("disk" = String, Path, description = "The disk"), CarrySession),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, body = CallAnswer), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn changed(
    State(manager): App,
    Path(disk): Path<String>,
    Query(session): Query<CarrySession>,
    body: Bytes,
) -> Answer<CallAnswer> {
    manager.call_in(disk, session, CallIn::Changed(body.to_vec())).await.into()
}

/// Which page of the list.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
pub(super) struct ListPage {
    /// From 0 on.
    page: u32,
    /// There is none after it.
    last: bool,
}

/// Of another host: a page of the list of what is cached there, hottest first.
///
/// The body is a page as in `changed`, without its length.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/arrival/list",
    operation_id = "arrival_list",
    params(("disk" = String, Path, description = "The disk"), CarrySession, ListPage),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, body = CallAnswer), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn list(
    State(manager): App,
    Path(disk): Path<String>,
    Query(session): Query<CarrySession>,
    Query(ListPage { page, last }): Query<ListPage>,
    body: Bytes,
) -> Answer<CallAnswer> {
    manager.call_in(disk, session, CallIn::List { page, last, body: body.to_vec() }).await.into()
}

/// Of another host: `yours`, `cancel` or `look`.
///
/// The body of `yours` is that of `arrive`, for a host that gave the disk up; it may be missing.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/arrival/{call}",
    operation_id = "arrival_call",
    params(
        ("disk" = String, Path, description = "The disk"),
        ("call" = String, Path, description = "`yours`: the disk is this host's now; `cancel`: it does not come; `look`: how far is it?"),
        CarrySession
    ),
    responses((status = 200, body = CallAnswer), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn call(
    State(manager): App,
    Path((disk, call)): Path<(String, String)>,
    Query(session): Query<CarrySession>,
    body: Bytes,
) -> Answer<CallAnswer> {
    let call = match call.as_str() {
        // Older hosts do not say it, and newer ones perhaps something else: only who gave the disk up needs it.
        "yours" => CallIn::Yours(serde_json::from_slice(&body).ok()),
        "cancel" => CallIn::Cancel,
        "look" => CallIn::Look,
        _ => return Answer::No(StatusCode::NOT_FOUND, Problem::new("there is no such call")),
    };
    manager.call_in(disk, session, call).await.into()
}

/// As what the other host is read.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
pub(super) struct DataOf {
    /// It had the disk before, and is read for what it has in flash.
    #[serde(default)]
    former: bool,
}

/// Of another host: a connection in which it is an NBD server with the disk, read-only.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/arrival/data",
    operation_id = "arrival_data",
    params(("disk" = String, Path, description = "The disk"), CarrySession, DataOf),
    responses(
        (status = 101, description = "The connection speaks `hob-nbd/1` from now on"),
        (status = "4XX", body = Problem)
    )
)]
pub(super) async fn data(
    State(manager): App,
    Path(disk): Path<String>,
    Query(session): Query<CarrySession>,
    Query(DataOf { former }): Query<DataOf>,
    connection: DataConnection,
) -> Response {
    let taker = match manager.data_in(&disk, &session, former) {
        Ok(taker) => taker,
        Err(error) => return Answer::<()>::from(Err(error)).into_response(),
    };
    connection.switch(move |connection| async move {
        match connection {
            Ok(connection) => taker.put(connection),
            Err(error) => tracing::debug!("{disk}: a data connection was not taken over: {error}"),
        }
    })
}
