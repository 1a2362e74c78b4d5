//! API handlers for migrations: commands of operators, and calls of other hosts.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use hob_control::{
    Arrival, CallAnswer, CarrySession, DiskChanged, Migration, MigrationStart, Problem, TakeBack,
};
use hob_engine::migration::Order;
use serde::Deserialize;

use super::endpoints::endpoints;
use super::extract::{Answer, DataConnection, Form};
use crate::services::{CHANGED_BYTES_MAX, CallIn, Services};

type App = State<Arc<Services>>;

endpoints! { services;
    /// Starts the migration of a disk with its cache to another host.
    post "/v1/disks/{disk}/migration"
    migration_start(disk = "disk": "The disk"; start: MigrationStart) -> Migration, "4XX", "5XX" {
        services.migrations.migrate(disk, start).await
    }

    /// Returns the progress of a disk's migration, or the result of the last one.
    get "/v1/disks/{disk}/migration"
    migration(disk = "disk": "The disk") -> Migration, "4XX" {
        services.migrations.migration(&disk)
    }

    /// Cancels the migration of a disk.
    delete "/v1/disks/{disk}/migration"
    migration_cancel(disk = "disk": "The disk") -> Migration, "4XX", "5XX" {
        services.migrations.order(&disk, Order::Cancel).await
    }

    /// Hands a migrating disk over now.
    post "/v1/disks/{disk}/migration/finish"
    migration_finish(disk = "disk": "The disk") -> Migration, "4XX", "5XX" {
        services.migrations.order(&disk, Order::Finish).await
    }

    /// Takes a migrated disk back. The other host must never serve it again.
    post "/v1/disks/{disk}/migration/take-back"
    migration_take_back(disk = "disk": "The disk"; take: TakeBack) -> DiskChanged, "4XX", "5XX" {
        services.migrations.take_back(disk, take.force).await
    }

    /// For other hosts: prepares to receive the disk.
    post "/v1/disks/{disk}/arrival/arrive"
    arrival_arrive(disk = "disk": "The disk"; ?session: CarrySession; arrival: Arrival)
        -> CallAnswer, "4XX", "5XX" {
        services.migrations.call_in(disk, session, CallIn::Arrive(Box::new(arrival))).await
    }
}

impl Form for CarrySession {
    const ALLOWED: &'static str = "the parameters of this request are generation, attempt and lineage";
}

/// Maximum length of a page of the list of cached blocks, in bytes: enough for the maximum number
/// of ranges, with two varints each.
const PAGE_BYTES_MAX: usize = 128 << 10;

/// Returns the routes of this file.
pub(super) fn routes() -> Router<Arc<Services>> {
    Router::new()
        .route(
            "/v1/disks/{disk}/arrival/changed",
            post(changed).layer(DefaultBodyLimit::max(CHANGED_BYTES_MAX)),
        )
        .route("/v1/disks/{disk}/arrival/list", post(list).layer(DefaultBodyLimit::max(PAGE_BYTES_MAX)))
        .route("/v1/disks/{disk}/arrival/data", post(data))
        .route("/v1/disks/{disk}/arrival/{call}", post(call))
}

/// For other hosts: invalidates changed ranges.
///
/// The body is a list of pages, each after its length (u32, little-endian). A page is a varint with
/// the count of ranges, and two varints for each range: the sectors between the end of the previous
/// range and its first sector, and its number of sectors.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/arrival/changed",
    operation_id = "arrival_changed",
    params(("disk" = String, Path, description = "The disk"), CarrySession),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, body = CallAnswer), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn changed(
    State(services): App,
    Path(disk): Path<String>,
    Query(session): Query<CarrySession>,
    body: Bytes,
) -> Answer<CallAnswer> {
    services.migrations.call_in(disk, session, CallIn::Changed(body.to_vec())).await.into()
}

/// Number of the page in the request's body, and whether it is the last page of the list.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ListPage {
    /// Page number, from 0.
    page: u32,
    /// True for the last page.
    last: bool,
}

/// For the source host of a migration: receives a page of the list of ranges to pull, hottest
/// first.
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
    State(services): App,
    Path(disk): Path<String>,
    Query(session): Query<CarrySession>,
    Query(ListPage { page, last }): Query<ListPage>,
    body: Bytes,
) -> Answer<CallAnswer> {
    services.migrations.call_in(disk, session, CallIn::List { page, last, body: body.to_vec() }).await.into()
}

/// For other hosts: `yours`, `cancel` or `look`.
///
/// The body of `yours` is that of `arrive`, for a host that has dropped the disk; it is optional.
#[utoipa::path(
    post,
    path = "/v1/disks/{disk}/arrival/{call}",
    operation_id = "arrival_call",
    params(
        ("disk" = String, Path, description = "The disk"),
        ("call" = String, Path, description = "`yours`: hands the disk over to this host; `cancel`: cancels the migration; `look`: asks for its progress"),
        CarrySession
    ),
    responses((status = 200, body = CallAnswer), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn call(
    State(services): App,
    Path((disk, call)): Path<(String, String)>,
    Query(session): Query<CarrySession>,
    body: Bytes,
) -> Answer<CallAnswer> {
    let call = match call.as_str() {
        // Older hosts send no body, and newer ones may send another one. Only a host that has
        // dropped the disk needs it.
        "yours" => CallIn::Yours(serde_json::from_slice(&body).ok()),
        "cancel" => CallIn::Cancel,
        "look" => CallIn::Look,
        _ => {
            return Answer::No(
                StatusCode::NOT_FOUND,
                Problem::new("there is no such migration call; the calls are yours, cancel and look"),
            );
        }
    };
    services.migrations.call_in(disk, session, call).await.into()
}

/// Role of the calling host for the connection.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct DataOf {
    /// True if the calling host is the former owner, whose flash is read.
    #[serde(default)]
    former: bool,
}

/// For other hosts: opens a connection through which this host reads the disk from the caller, by
/// NBD.
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
    State(services): App,
    Path(disk): Path<String>,
    Query(session): Query<CarrySession>,
    Query(DataOf { former }): Query<DataOf>,
    connection: DataConnection,
) -> Response {
    let taker = match services.migrations.data_in(&disk, &session, former) {
        Ok(taker) => taker,
        Err(error) => return Answer::<()>::from(Err(error)).into_response(),
    };
    connection.switch(move |connection| async move {
        match connection {
            Ok(connection) => taker.put(connection),
            Err(error) => {
                tracing::debug!("disk {disk}: cannot use a data connection of another host: {error}")
            }
        }
    })
}
