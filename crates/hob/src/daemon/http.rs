//! The control API: JSON over HTTP/1.1 on Unix sockets, and over TLS with a token or a certificate.
//!
//! `/` is the dashboard ([`page`]).
//!
//! All responses are JSON, except the dashboard, recordings, events, `/metrics` and `/healthz`.
//! Each error response is a [`Problem`](hob_control::Problem). The length of requests
//! ([`BODY_BYTES_MAX`]), their time ([`REQUEST_SECONDS_MAX`]) and the number of connections are
//! limited. A change that takes longer continues in the background.

mod auth;
mod bitmaps;
mod browser;
mod cluster;
mod config;
mod events;
mod exports;
mod extract;
mod flash_leases;
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
use axum::routing::{delete, get, post, put};
use axum::{Extension, Router};
use hob_control::Problem;
use utoipa::OpenApi;

pub(crate) use auth::Role;
pub(crate) use listener::{ControlListener, Guard};
pub(crate) use loopback::Loopback;

use super::manager::Manager;
use super::watchdog::contained_task;
use extract::Answer;

/// Maximum length of a request body in bytes.
const BODY_BYTES_MAX: usize = 64 << 10;

/// Maximum time from a request's head to its answer, in seconds. The time limit exceeds the
/// manager's own one.
const REQUEST_SECONDS_MAX: u64 = 30;

/// Returns the router of the whole API.
pub(crate) fn router(manager: Arc<Manager>) -> Router {
    use handlers::*;
    use monitor::{health, healthz, load, metrics};

    page::with_page(Router::new())
        .route("/healthz", get(healthz))
        .route("/metrics", get(metrics))
        .route("/v1/health", get(health))
        .route("/v1/load", get(load))
        .route("/v1/events", get(events::events))
        .route("/openapi.json", get(openapi))
        .route("/v1/version", get(version))
        .route("/v1/pools", get(pools).post(pool_create))
        .route("/v1/pools/{pool}", get(pool).delete(pool_remove))
        .route(
            "/v1/pools/{pool}/devices",
            get(devices).post(device_add).patch(device_set).delete(device_remove),
        )
        .route("/v1/pools/{pool}/preview", post(handlers::pool_preview))
        .route("/v1/pools/{pool}/orphans/{owner}", delete(orphan_discard))
        .route("/v1/disks", get(disks).post(disk_add))
        .route("/v1/disks/{disk}", get(disk).patch(handlers::disk_patch).delete(disk_remove))
        .route(
            "/v1/disks/{disk}/cache",
            get(cache).put(cache_enable).patch(cache_patch).delete(cache_disable),
        )
        .route("/v1/disks/{disk}/cache/clear", post(cache_clear))
        .route("/v1/disks/{disk}/cache/discard-dirty", post(discard_dirty))
        .route("/v1/disks/{disk}/cache/export-dirty", post(export_dirty))
        .route("/v1/disks/{disk}/preview", post(handlers::preview))
        .route("/v1/disks/{disk}/resize", post(handlers::disk_resize))
        .route("/v1/disks/{disk}/events", post(handlers::disk_event))
        .route("/v1/disks/{disk}/drain", post(drain).delete(drain_stop))
        .route("/v1/disks/{disk}/stats", get(stats))
        .route("/v1/disks/{disk}/histograms", get(observe::histograms).delete(observe::histograms_reset))
        .route("/v1/disks/{disk}/curve", get(observe::curve).delete(observe::curve_reset))
        .route("/v1/disks/{disk}/explain", get(explain))
        .route("/v1/disks/{disk}/trace", get(trace))
        .route("/v1/disks/{disk}/bitmaps", get(bitmaps::list).post(bitmaps::add))
        .route("/v1/disks/{disk}/bitmaps/{bitmap}", delete(bitmaps::remove))
        .route("/v1/disks/{disk}/bitmaps/{bitmap}/clear", post(bitmaps::clear))
        .route("/v1/disks/{disk}/bitmaps/{bitmap}/rotate", post(bitmaps::rotate))
        .route("/v1/disks/{disk}/bitmaps/{bitmap}/merge", post(bitmaps::merge))
        .route("/v1/disks/{disk}/exports", post(exports::add))
        .route("/v1/disks/{disk}/exports/{export}", delete(exports::remove))
        .route("/v1/qos", get(qos::disks))
        .route("/v1/disks/{disk}/qos", get(qos::disk).patch(qos::set))
        .route("/v1/storage-policies", get(qos::policies))
        .route("/v1/storage-policies/{policy}", put(qos::policy_set).delete(qos::policy_remove))
        .route("/v1/config/diff", get(config::diff))
        .route("/v1/config/apply", post(config::apply))
        .route("/v1/swap", get(swap::swaps).post(swap::create))
        .route("/v1/swap/{swap}", get(swap::swap).patch(swap::set).delete(swap::remove))
        .route("/v1/datastores", get(qos::datastores))
        .route("/v1/datastores/{datastore}", get(qos::datastore).patch(qos::datastore_set))
        .fallback(async || {
            Answer::no(
                StatusCode::NOT_FOUND,
                "there is no such path; see \
            /openapi.json",
            )
        })
        .method_not_allowed_fallback(async || {
            Answer::no(
                StatusCode::METHOD_NOT_ALLOWED,
                "this path does not support the method; see /openapi.json",
            )
        })
        .merge(migration::routes())
        .merge(cluster::routes())
        .merge(flash_leases::routes())
        .merge(tasks::routes())
        .layer(Extension(events::EventBroadcaster::new(Arc::clone(&manager))))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(middleware::from_fn(in_time))
        .with_state(manager)
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

#[derive(OpenApi)]
#[openapi(
    info(title = "hob", description = "Control API of hob, the host block cache."),
    paths(
        monitor::healthz,
        monitor::metrics,
        monitor::health,
        monitor::load,
        events::events,
        handlers::version,
        handlers::pools,
        handlers::pool_create,
        handlers::pool,
        handlers::pool_remove,
        handlers::pool_preview,
        handlers::devices,
        handlers::device_add,
        handlers::device_set,
        handlers::device_remove,
        handlers::orphan_discard,
        handlers::disks,
        handlers::disk_add,
        handlers::disk,
        handlers::disk_remove,
        handlers::preview,
        handlers::cache,
        handlers::cache_enable,
        handlers::cache_patch,
        handlers::cache_disable,
        handlers::cache_clear,
        handlers::discard_dirty,
        handlers::export_dirty,
        handlers::disk_patch,
        handlers::disk_resize,
        handlers::disk_event,
        handlers::drain,
        handlers::drain_stop,
        handlers::stats,
        observe::histograms,
        observe::histograms_reset,
        observe::curve,
        observe::curve_reset,
        handlers::explain,
        handlers::trace,
        bitmaps::list,
        bitmaps::add,
        bitmaps::remove,
        bitmaps::clear,
        bitmaps::rotate,
        bitmaps::merge,
        exports::add,
        exports::remove,
        migration::start,
        migration::show,
        migration::cancel,
        migration::finish,
        migration::take_back,
        migration::arrive,
        migration::changed,
        migration::list,
        migration::call,
        migration::data,
        qos::disks,
        qos::disk,
        qos::set,
        qos::policies,
        qos::policy_set,
        qos::policy_remove,
        qos::datastores,
        qos::datastore,
        qos::datastore_set,
        config::diff,
        config::apply,
        swap::swaps,
        swap::create,
        swap::swap,
        swap::set,
        swap::remove,
        cluster::cluster,
        cluster::hosts,
        cluster::disks,
        cluster::take,
        flash_leases::peers,
        flash_leases::ask,
        flash_leases::end,
        flash_leases::data,
        cluster::start_move,
        cluster::cancel_move,
        cluster::moves,
        cluster::advice,
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

/// The OpenAPI document, indented, with a newline at the end.
pub(crate) fn openapi_json() -> String {
    let mut text = Api::openapi().to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

#[cfg(test)]
mod tests;
