//! API handlers for flash leases: views for operators, and requests of other hosts.

use std::sync::Arc;

use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Router};
use hob_control::{FlashLease, FlashLeaseRequest, Peers, Problem};
use serde::Deserialize;

use super::endpoints::endpoints;
use super::extract::{Answer, Body, DataConnection};
use crate::services::{Ended, Services};
use crate::tls::PeerCertificate;

type App = State<Arc<Services>>;
type Shown = Option<Extension<PeerCertificate>>;

endpoints! { services;
    /// Returns the flash that this host lends to other hosts, and the flash that it uses of theirs.
    get "/v1/peers"
    peers() -> Peers {
        Ok(services.pools.peers())
    }
}

/// Returns the routes of this file.
pub(super) fn routes() -> Router<Arc<Services>> {
    Router::new()
        .route("/v1/loans/{borrower}", post(ask))
        .route("/v1/loans/{borrower}/end", post(end))
        .route("/v1/loans/{borrower}/data", post(data))
}

fn name_of(shown: Shown) -> Option<String> {
    shown.map(|Extension(certificate)| certificate.to_string())
}

/// For other hosts: creates or renews a flash lease for replicas.
#[utoipa::path(
    post,
    path = "/v1/loans/{borrower}",
    operation_id = "loan_ask",
    params(("borrower" = String, Path, description = "The other host's identity")),
    request_body = FlashLeaseRequest,
    responses((status = 200, body = FlashLease), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn ask(
    State(services): App,
    Path(borrower): Path<String>,
    shown: Shown,
    Body(ask): Body<FlashLeaseRequest>,
) -> Answer<FlashLease> {
    services.remote_flash.lend(borrower, ask, name_of(shown)).await.into()
}

/// Query parameters of `POST /v1/loans/{borrower}/end`.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct EndQuery {
    /// Allow the other host to request a new flash lease.
    #[serde(default)]
    forget: bool,
}

/// Ends a flash lease: the other host can no longer use the flash. Returns notes.
#[utoipa::path(
    post,
    path = "/v1/loans/{borrower}/end",
    operation_id = "loan_end",
    params(("borrower" = String, Path, description = "The other host's identity"), EndQuery),
    responses((status = 200, body = Vec<String>), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn end(
    State(services): App,
    Path(borrower): Path<String>,
    Query(EndQuery { forget }): Query<EndQuery>,
    shown: Shown,
) -> Answer<Vec<String>> {
    let after = if forget { Ended::Forgotten } else { Ended::Known };
    services.remote_flash.end(borrower, name_of(shown), after).await.into()
}

/// Selects an incarnation of a flash lease: the number that changes each time the lending host
/// opens the file again.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Epoch {
    /// The incarnation, as named by this host.
    epoch: String,
}

/// For other hosts: opens a connection on which this host is the NBD server of the leased flash.
#[utoipa::path(
    post,
    path = "/v1/loans/{borrower}/data",
    operation_id = "loan_data",
    params(("borrower" = String, Path, description = "The other host's identity"), Epoch),
    responses(
        (status = 101, description = "The connection speaks `hob-nbd/1` from now on"),
        (status = "4XX", body = Problem)
    )
)]
pub(super) async fn data(
    State(services): App,
    Path(borrower): Path<String>,
    Query(Epoch { epoch }): Query<Epoch>,
    shown: Shown,
    connection: DataConnection,
) -> Response {
    let admitted = match services.remote_flash.admit(&borrower, &epoch, name_of(shown)) {
        Ok(admitted) => admitted,
        Err(error) => return Answer::<()>::from(Err(error)).into_response(),
    };
    connection.switch(move |connection| async move {
        let served = match connection {
            Ok(connection) => admitted.serve(connection).await,
            Err(error) => Err(error),
        };
        if let Err(error) = served {
            tracing::debug!("a connection of borrower {borrower} to its leased flash failed: {error}");
        }
    })
}
