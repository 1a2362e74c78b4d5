//! API handlers for monitoring: metrics, health, load.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::header::{ACCEPT, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, VARY};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use hob_control::{DiskLoad, Health, HealthStatus};
use serde::Deserialize;
use utoipa::IntoParams;

use super::endpoints::endpoints;
use super::extract::Answer;
use super::gzip;
use crate::metrics::{Form, Latencies};
use crate::services::Services;

type App = State<Arc<Services>>;

endpoints! { services;
    /// Returns the health as JSON.
    get "/v1/health"
    health() -> Health {
        Ok(services.observe.health().await)
    }

    /// Returns a few counters of each disk.
    get "/v1/load"
    load() -> Vec<DiskLoad> {
        Ok(services.observe.load().await)
    }
}

/// Returns the health for load balancers and monitors. The listed objects fail or work badly; all
/// others work. hob restarts nothing because of a problem, and its supervisor should not either:
/// the watchdog serves that purpose.
#[utoipa::path(
    get,
    path = "/healthz",
    responses(
        (status = 200, description = "`ok`", body = String),
        (status = 503, description = "`degraded`, and a line for each problem", body = String)
    )
)]
pub(super) async fn healthz(State(services): App) -> Response {
    let health = services.observe.health().await;
    let mut text = String::new();
    let status = match health.status {
        HealthStatus::Ok => StatusCode::OK,
        HealthStatus::Degraded => StatusCode::SERVICE_UNAVAILABLE,
    };
    text.push_str(if status == StatusCode::OK { "ok\n" } else { "degraded\n" });
    for problem in &health.problems {
        text.push_str(&format!("{}: {}: {}\n", problem.kind.name(), problem.subject, problem.reason));
    }
    (status, [(CACHE_CONTROL, "no-store")], text).into_response()
}

/// Selects the content of the metrics page.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct WhichMetrics {
    /// `outcome`: one latency histogram for each outcome of each disk that has occurred. `disk`:
    /// one for each disk, and no values of outcomes that have not occurred, except failures.
    /// Default: `outcome`, unless there are very many disks.
    #[serde(default)]
    latency: Option<LatencyBy>,
}

/// Granularity of latency histograms, see [`WhichMetrics`].
#[derive(Clone, Copy, Debug, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
enum LatencyBy {
    Outcome,
    Disk,
}

/// Returns all metrics in Prometheus text format 0.0.4, or as OpenMetrics 1.0 if requested by
/// `application/openmetrics-text`. docs/metrics.md lists them. The answer is compressed if the
/// client accepts gzip.
#[utoipa::path(
    get,
    path = "/metrics",
    params(WhichMetrics),
    responses((status = 200, description = "The metrics", content_type = "text/plain", body = String))
)]
pub(super) async fn metrics(
    State(services): App,
    headers: HeaderMap,
    query: Result<Query<WhichMetrics>, QueryRejection>,
) -> Response {
    let Ok(Query(which)) = query else {
        let wrong = "the only parameter of this request is ?latency=outcome or ?latency=disk";
        return Answer::no(StatusCode::BAD_REQUEST, wrong).into_response();
    };
    let latencies = which.latency.map(|by| match by {
        LatencyBy::Outcome => Latencies::PerOutcome,
        LatencyBy::Disk => Latencies::PerDisk,
    });
    let accept = headers.get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let form = Form::accepted(accept);
    let text = services.observe.metrics(form, latencies).await;
    let head = [(CONTENT_TYPE, form.media_type()), (CACHE_CONTROL, "no-store"), (VARY, "accept-encoding")];
    if text.len() < gzip::COMPRESSED_MIN || !gzip::is_accepted(&headers) {
        return (head, text).into_response();
    }
    match tokio::task::spawn_blocking(move || gzip::compress(&text)).await {
        Ok(compressed) => (head, [(CONTENT_ENCODING, "gzip")], compressed).into_response(),
        Err(_) => {
            let wrong = "cannot compress the metrics; ask for them without 'Accept-Encoding: gzip'";
            Answer::no(StatusCode::INTERNAL_SERVER_ERROR, wrong).into_response()
        }
    }
}
