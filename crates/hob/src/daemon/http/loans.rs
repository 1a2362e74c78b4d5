//! Flash that hosts lend each other: what operators see, and what other hosts ask for.

use std::sync::Arc;

use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use hob_control::{Loan, LoanAsk, Peers, Problem};
use serde::Deserialize;

use super::extract::{Answer, Body, DataConnection};
use crate::daemon::manager::{Ended, Manager};
use crate::daemon::tls::PeerCertificate;

type App = State<Arc<Manager>>;
type Shown = Option<Extension<PeerCertificate>>;

/// The paths of this file.
pub(super) fn routes() -> Router<Arc<Manager>> {
    Router::new()
        .route("/v1/peers", get(peers))
        .route("/v1/loans/{borrower}", post(ask))
        .route("/v1/loans/{borrower}/end", post(end))
        .route("/v1/loans/{borrower}/data", post(data))
}

fn name_of(shown: Shown) -> Option<String> {
    shown.map(|Extension(certificate)| certificate.to_string())
}

/// What this host lends, and what it has borrowed.
#[utoipa::path(get, path = "/v1/peers", operation_id = "peers", responses((status = 200, body = Peers)))]
pub(super) async fn peers(State(manager): App) -> Answer<Peers> {
    Answer::Yes(manager.pools.peers())
}

/// Of another host: lend it flash for second copies, or go on doing so.
#[utoipa::path(
    post,
    path = "/v1/loans/{borrower}",
    operation_id = "loan_ask",
    params(("borrower" = String, Path, description = "The other host's identity")),
    request_body = LoanAsk,
    responses((status = 200, body = Loan), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn ask(
    State(manager): App,
    Path(borrower): Path<String>,
    shown: Shown,
    Body(ask): Body<LoanAsk>,
) -> Answer<Loan> {
    manager.remote_flash.lend(borrower, ask, name_of(shown)).await.into()
}

/// What becomes of a loan that is ended.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
pub(super) struct EndQuery {
    /// The other host may ask for another one.
    #[serde(default)]
    forget: bool,
}

/// Ends a loan: the other host can use it no more. Answers with what there is to be said about it.
#[utoipa::path(
    post,
    path = "/v1/loans/{borrower}/end",
    operation_id = "loan_end",
    params(("borrower" = String, Path, description = "The other host's identity"), EndQuery),
    responses((status = 200, body = Vec<String>), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub(super) async fn end(
    State(manager): App,
    Path(borrower): Path<String>,
    Query(EndQuery { forget }): Query<EndQuery>,
    shown: Shown,
) -> Answer<Vec<String>> {
    let after = if forget { Ended::Forgotten } else { Ended::Known };
    manager.remote_flash.end(borrower, name_of(shown), after).await.into()
}

/// Which loan is meant.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
pub(super) struct Epoch {
    /// As the lender called it.
    epoch: String,
}

/// Of another host: a connection in which this one is an NBD server with what it lends.
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
    State(manager): App,
    Path(borrower): Path<String>,
    Query(Epoch { epoch }): Query<Epoch>,
    shown: Shown,
    connection: DataConnection,
) -> Response {
    let admitted = match manager.remote_flash.admit(&borrower, &epoch, name_of(shown)) {
        Ok(admitted) => admitted,
        Err(error) => return Answer::<()>::from(Err(error)).into_response(),
    };
    connection.switch(move |connection| async move {
        let served = match connection {
            Ok(connection) => admitted.serve(connection).await,
            Err(error) => Err(error),
        };
        if let Err(error) = served {
            tracing::debug!("{borrower}: a connection to its loan broke off: {error}");
        }
    })
}
