//! The control API: JSON over HTTP/1.1 on Unix sockets, and over TLS with a token or a certificate.
//!
//! `/` is the dashboard ([`page`]).
//!
//! All responses are JSON, except the dashboard, recordings, events, `/metrics` and `/healthz`.
//! Each error response is a [`Problem`](hob_control::Problem). The length of requests
//! ([`BODY_BYTES_MAX`]), their duration ([`REQUEST_SECONDS_MAX`]) and the number of connections are
//! limited. A change that takes longer continues in the background.

mod auth;
mod bitmaps;
mod browser;
mod cluster;
mod config;
mod endpoints;
mod events;
mod exports;
mod extract;
mod flash_leases;
mod gzip;
mod handlers;
mod listener;
mod loopback;
mod migration;
mod monitor;
mod observe;
mod page;
mod qos;
mod request_id;
mod swap;
mod tasks;
mod trace;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use hob_control::Problem;
use utoipa::OpenApi;

pub(crate) use listener::{ControlListener, Guard};
pub use loopback::Loopback;

use super::services::Services;
use super::watchdog::contained_task;
use extract::Answer;

/// Maximum length of a request body in bytes.
const BODY_BYTES_MAX: usize = 64 << 10;

/// Maximum time from a request's head to its answer, in seconds. It exceeds the time limit of calls
/// between hosts.
const REQUEST_SECONDS_MAX: u64 = 30;

/// Returns the router of the whole API.
pub(crate) fn router(services: Arc<Services>) -> Router {
    page::with_page(Router::new())
        .route("/healthz", get(monitor::healthz))
        .route("/metrics", get(monitor::metrics))
        .route("/v1/events", get(events::events))
        .route("/openapi.json", get(handlers::openapi))
        .route("/v1/disks/{disk}/histograms", get(observe::histograms))
        .route("/v1/disks/{disk}/trace", get(handlers::trace))
        .merge(flash_leases::routes())
        .merge(migration::routes())
        .merge(tasks::routes())
        .merge(bitmaps::table())
        .merge(cluster::table())
        .merge(config::table())
        .merge(exports::table())
        .merge(flash_leases::table())
        .merge(handlers::table())
        .merge(migration::table())
        .merge(monitor::table())
        .merge(observe::table())
        .merge(qos::table())
        .merge(swap::table())
        .fallback(async || Answer::no(StatusCode::NOT_FOUND, "there is no such path; see /openapi.json"))
        .method_not_allowed_fallback(async || {
            Answer::no(
                StatusCode::METHOD_NOT_ALLOWED,
                "this path does not support the method; see /openapi.json",
            )
        })
        .layer(Extension(events::EventBroadcaster::new(Arc::clone(&services))))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(middleware::from_fn(in_time))
        .with_state(services)
}

async fn in_time(request: Request, next: Next) -> Response {
    let changes_nothing = matches!(*request.method(), Method::GET | Method::HEAD);
    let run = contained_task(changes_nothing, next.run(request));
    match tokio::time::timeout(Duration::from_secs(REQUEST_SECONDS_MAX), run).await {
        Ok(response) => response,
        Err(_) => {
            let problem = Problem::new(format!("the request took longer than {REQUEST_SECONDS_MAX} s"));
            (StatusCode::REQUEST_TIMEOUT, axum::Json(problem)).into_response()
        }
    }
}

/// The OpenAPI document of the endpoints that the macro `endpoints!` does not define.
#[derive(OpenApi)]
#[openapi(
    info(title = "hob", description = "Control API of hob, the host block cache."),
    paths(
        monitor::healthz,
        monitor::metrics,
        events::events,
        handlers::trace,
        observe::histograms,
        migration::changed,
        migration::list,
        migration::call,
        migration::data,
        flash_leases::ask,
        flash_leases::end,
        flash_leases::data,
        tasks::list,
        tasks::cancel,
        tasks::acknowledge,
    ),
    components(schemas(Problem)),
    modifiers(&BearerOverTcp),
)]
struct Api;

struct BearerOverTcp;

impl utoipa::Modify for BearerOverTcp {
    fn modify(&self, api: &mut utoipa::openapi::OpenApi) {
        use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};

        let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        api.components.get_or_insert_default().add_security_scheme("token", scheme);
        // Requests on a Unix socket need no token, requests over TCP do.
        api.security = Some(vec![SecurityRequirement::default(), SecurityRequirement::new("token", [""; 0])]);
    }
}

/// Returns the OpenAPI document as indented JSON with a newline at the end.
pub fn openapi_json() -> String {
    let tables = [
        bitmaps::Paths::openapi(),
        cluster::Paths::openapi(),
        config::Paths::openapi(),
        exports::Paths::openapi(),
        flash_leases::Paths::openapi(),
        handlers::Paths::openapi(),
        migration::Paths::openapi(),
        monitor::Paths::openapi(),
        observe::Paths::openapi(),
        qos::Paths::openapi(),
        swap::Paths::openapi(),
    ];
    let mut api = Api::openapi();
    tables.into_iter().for_each(|table| api.merge(table));
    let mut text = api.to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

#[cfg(test)]
mod tests;
