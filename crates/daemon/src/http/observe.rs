//! API handlers for request histograms of disks and for the predicted effect of other cache sizes.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use hob_control::{DiskCurve, DiskHistograms, Problem};
use serde::Deserialize;
use utoipa::IntoParams;

use super::endpoints::endpoints;
use super::extract::Answer;
use crate::services::Services;

type App = State<Arc<Services>>;

endpoints! { services;
    /// Resets a disk's histograms, and returns the empty histograms. Other counters continue.
    delete "/v1/disks/{disk}/histograms"
    histograms_reset(disk = "disk": "The disk") -> DiskHistograms, "4XX", "5XX" {
        services.observe.histograms_reset(&disk).await
    }

    /// Returns the predicted effect of other cache sizes for a disk: miss-ratio curves, estimated
    /// while the disk is served.
    get "/v1/disks/{disk}/curve"
    curve(disk = "disk": "The disk") -> DiskCurve, "4XX", "5XX" {
        services.observe.curve(&disk).await
    }

    /// Discards the curves of a disk, and returns the empty curves.
    delete "/v1/disks/{disk}/curve"
    curve_reset(disk = "disk": "The disk") -> DiskCurve, "4XX", "5XX" {
        services.observe.curve_reset(&disk).await
    }
}

/// Selects the format of the response.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Form {
    /// `json` or `csv`. Default: the type in the `Accept` header, otherwise JSON.
    format: Option<String>,
}

impl Form {
    fn is_csv(query: Result<Query<Form>, QueryRejection>, headers: &HeaderMap) -> Result<bool, Problem> {
        match query.as_ref().map(|Query(form)| form.format.as_deref()) {
            Ok(Some("csv")) => Ok(true),
            Ok(Some("json")) => Ok(false),
            Ok(None) => {
                let accepted = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
                Ok(accepted.is_some_and(|accept| accept.contains("text/csv")))
            }
            Ok(Some(_)) | Err(_) => {
                Err(Problem::new("the only parameter of this request is ?format=csv or ?format=json"))
            }
        }
    }
}

/// Returns the histograms of a disk's requests, in the buckets of vscsiStats.
#[utoipa::path(
    get,
    path = "/v1/disks/{disk}/histograms",
    params(("disk" = String, Path, description = "The disk"), Form),
    responses(
        (status = 200, content(
            (DiskHistograms = "application/json"),
            (String = "text/csv")
        )),
        (status = "4XX", body = Problem),
        (status = "5XX", body = Problem)
    )
)]
pub(super) async fn histograms(
    State(services): App,
    Path(disk): Path<String>,
    query: Result<Query<Form>, QueryRejection>,
    headers: HeaderMap,
) -> Response {
    let is_csv = match Form::is_csv(query, &headers) {
        Ok(is_csv) => is_csv,
        Err(problem) => return Answer::<()>::No(StatusCode::BAD_REQUEST, problem).into_response(),
    };
    match services.observe.histograms(&disk).await {
        Ok(found) if is_csv => ([(CONTENT_TYPE, "text/csv")], found.to_csv()).into_response(),
        found => Answer::from(found).into_response(),
    }
}
