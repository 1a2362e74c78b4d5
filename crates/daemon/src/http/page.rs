//! The dashboard: a page and its files, which are part of the binary.
//!
//! The files contain no data of the daemon, so they are public for all clients that reach the
//! socket. The page gets its data from the API with its user's rights. The page may load from its
//! own origin only, and runs no inline scripts.

use std::sync::OnceLock;

use axum::Router;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// The content security policy of the page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      require-trusted-types-for 'script'; trusted-types 'none'; frame-ancestors 'none'; base-uri 'none'; \
                      form-action 'none'";

/// A file of dashboard/dist.
#[derive(Debug)]
struct Asset {
    path: &'static str,
    media_type: &'static str,
    bytes: &'static [u8],
}

macro_rules! assets {
    ($($path:literal $media_type:literal $file:literal)*) => {
        const ASSETS: &[Asset] = &[$(Asset {
            path: $path,
            media_type: $media_type,
            bytes: include_bytes!(concat!("../../../../dashboard/dist/", $file)),
        }),*];
    };
}

assets! {
    "/" "text/html; charset=utf-8" "index.html"
    "/assets/app.js" "text/javascript; charset=utf-8" "app.js"
    "/assets/app.css" "text/css; charset=utf-8" "app.css"
    "/assets/icon.svg" "image/svg+xml" "icon.svg"
}

/// Returns true if the path is a public file of the dashboard.
pub(super) fn is_public(method: &Method, path: &str) -> bool {
    matches!(*method, Method::GET | Method::HEAD) && ASSETS.iter().any(|asset| asset.path == path)
}

/// Adds the dashboard's files to a router.
pub(super) fn with_page<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    ASSETS.iter().fold(router, |router, asset| {
        router.route(asset.path, get(async move |headers: HeaderMap| serve(asset, &headers)))
    })
}

fn serve(asset: &Asset, headers: &HeaderMap) -> Response {
    let tag = tag();
    let fixed = [(ETAG, tag), (CACHE_CONTROL, "no-cache"), (CONTENT_SECURITY_POLICY, POLICY)];
    if headers.get(IF_NONE_MATCH).is_some_and(|known| known == tag) {
        return (StatusCode::NOT_MODIFIED, fixed).into_response();
    }
    (fixed, [(CONTENT_TYPE, asset.media_type)], asset.bytes).into_response()
}

/// Returns the entity tag of all files. All files share one tag because they belong together.
fn tag() -> &'static str {
    static TAG: OnceLock<String> = OnceLock::new();
    TAG.get_or_init(|| {
        let mut all = ring::digest::Context::new(&ring::digest::SHA256);
        ASSETS.iter().for_each(|asset| all.update(asset.bytes));
        let hex: String = all.finish().as_ref().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        format!("\"{hex}\"")
    })
}
