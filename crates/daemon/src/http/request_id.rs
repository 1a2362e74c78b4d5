//! An id for each request of the control API, so that its log lines can be found.
//!
//! Everything that a request does is logged in a span with its id, also after the response. A
//! client may send its own id as `X-Request-Id`. Every response carries the id.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Instrument as _;

/// The header with the request's id, in requests and responses.
const HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// Maximum length of an accepted id, in characters.
const CHARS_MAX: usize = 64;

/// Assigns an id to each request, adds it to the response, and logs the result: changes at level
/// `info`, queries at `debug`.
pub(super) async fn name(request: Request, next: Next) -> Response {
    let given = request.headers().get(&HEADER).and_then(|value| value.to_str().ok());
    let id = given.filter(|id| is_sound(id)).map_or_else(new, str::to_owned);
    let is_question = matches!(*request.method(), Method::GET | Method::HEAD);
    let span = tracing::info_span!(
        "request",
        id,
        method = %request.method(),
        path = request.uri().path(),
        // The client, after authentication (`auth`).
        caller = tracing::field::Empty,
    );
    let began = Instant::now();
    let mut response = next.run(request).instrument(span.clone()).await;
    let (status, ms) = (response.status().as_u16(), began.elapsed().as_secs_f64() * 1e3);
    span.in_scope(|| match is_question {
        true => tracing::debug!(status, ms, "answered"),
        false => tracing::info!(status, ms, "answered"),
    });
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

/// Returns true if the id is short and needs no escaping in logs and headers.
fn is_sound(id: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':');
    (1..=CHARS_MAX).contains(&id.len()) && id.bytes().all(plain)
}

/// Returns an id that is unique in this process and almost certainly unique across processes. The
/// id is made of the process id, the time of the process's first request, and a counter.
fn new() -> String {
    static PREFIX: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let prefix = PREFIX.get_or_init(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        now.as_secs() << 16 ^ u64::from(std::process::id())
    });
    format!("{prefix:012x}-{}", NUMBER.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_made_once_each_and_are_sound() {
        let (a, b) = (new(), new());
        assert_ne!(a, b);
        assert!(is_sound(&a), "{a}");
    }

    #[test]
    fn a_request_id_that_would_forge_log_lines_is_replaced() {
        for wrong in ["", "a b", "a\"b", "ä", "a\nb", "x".repeat(65).as_str()] {
            assert!(!is_sound(wrong), "{wrong:?}");
        }
        assert!(is_sound("6f1c-ops.vm:17_2"));
    }
}
