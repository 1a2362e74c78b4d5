//! Protection of the daemon against other web sites in an operator's browser.
//!
//! A browser with a client certificate sends this certificate with each request, even if a page of
//! another site causes the request. Therefore a request from another site is refused. The origin of
//! a request is in `Sec-Fetch-Site`, which pages cannot forge, or else in `Origin`, which every
//! browser sends with requests that make changes. Programs other than browsers send neither header.
//! A link on another site may open a page of the dashboard, but cannot call the API. Over TCP,
//! `Host` must be an address or a name of this host, which prevents DNS rebinding. No response has
//! a CORS header, so a page of another site cannot read a response.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HOST, HeaderName, ORIGIN, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::extract::Answer;
use crate::tls::Tls;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const SEC_FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");
const SEC_FETCH_DEST: HeaderName = HeaderName::from_static("sec-fetch-dest");

/// Path prefix of the API.
const API: &str = "/v1/";

/// Headers of every response unless its handler sets a different value.
const ANSWER_HEADERS: [(HeaderName, HeaderValue); 5] = [
    (CACHE_CONTROL, HeaderValue::from_static("no-store")),
    (
        CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(
            "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        ),
    ),
    (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
];

/// Host names that a socket accepts.
#[derive(Clone, Debug)]
pub(super) enum Names {
    /// Any name, because browsers cannot open a Unix socket.
    Any,
    /// Names of the loopback addresses at any port, because the port may be forwarded.
    Loopback,
    /// Names in the daemon's certificate, and the listening address.
    Ours {
        /// TLS settings with the certificate.
        tls: Arc<Tls>,
        /// Host part of the address at which the socket listens.
        listen: String,
    },
}

impl Names {
    fn include(&self, host: &str) -> bool {
        match self {
            Names::Any => true,
            Names::Loopback => {
                host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
                    || host.eq_ignore_ascii_case("localhost")
            }
            Names::Ours { tls, listen } => {
                host.parse::<IpAddr>().is_ok()
                    || host.eq_ignore_ascii_case("localhost")
                    || host.eq_ignore_ascii_case(listen)
                    || tls.is_for(host)
            }
        }
    }
}

/// Refuses requests that another site caused in a browser.
pub(super) async fn check(State(names): State<Names>, request: Request, next: Next) -> Response {
    let mut response = match objection(&names, request.method(), request.uri().path(), request.headers()) {
        None => next.run(request).await,
        Some(why) => {
            tracing::info!("request refused: {why}");
            Answer::no(StatusCode::FORBIDDEN, why).into_response()
        }
    };
    for (name, value) in ANSWER_HEADERS {
        response.headers_mut().entry(name).or_insert(value);
    }
    response
}

fn objection(names: &Names, method: &Method, path: &str, headers: &HeaderMap) -> Option<&'static str> {
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let authority = text(HOST).unwrap_or_default();
    if !names.include(host_of(authority)) {
        return Some("the Host header names another server; use the name in the daemon's certificate");
    }
    let is_change = !matches!(*method, Method::GET | Method::HEAD);
    match (text(SEC_FETCH_SITE), text(ORIGIN)) {
        (Some("same-origin"), _) => None,
        // The user typed the address or used a bookmark.
        (Some("none"), _) if !is_change => None,
        (Some(_), _) => {
            let is_link =
                text(SEC_FETCH_MODE) == Some("navigate") && text(SEC_FETCH_DEST) == Some("document");
            let may = !is_change && is_link && !path.starts_with(API);
            (!may).then_some("the request is from another web site")
        }
        (None, Some(origin)) => {
            let ours = origin.split_once("://").is_some_and(|(_, rest)| rest.eq_ignore_ascii_case(authority));
            (!ours).then_some("the request is from another web site")
        }
        (None, None) => None,
    }
}

/// Returns the host without the port and without the brackets of an IPv6 address.
fn host_of(authority: &str) -> &str {
    if let Some((host, _)) = authority.strip_prefix('[').and_then(|inside| inside.split_once(']')) {
        return host;
    }
    authority.rsplit_once(':').map_or(authority, |(host, _)| host)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::WithoutCertificate;
    use crate::tls::tests::Authority;

    fn allowed(names: &Names, method: Method, path: &str, headers: &[(&'static str, &str)]) -> bool {
        let headers = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()))
            .collect();
        objection(names, &method, path, &headers).is_none()
    }

    #[test]
    fn other_sites_are_refused_and_programs_are_not() {
        let (get, post) = (Method::GET, Method::POST);
        let host = ("host", "h:1");
        let link = [("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")];
        for (method, path, more, may) in [
            (&get, "/v1/disks", &[][..], true),
            (&post, "/v1/disks", &[], true),
            (&post, "/v1/disks", &[("origin", "https://h:1")], true),
            (&post, "/v1/disks", &[("origin", "https://h:2")], false),
            (&post, "/v1/disks", &[("origin", "https://h")], false),
            (&post, "/v1/disks", &[("origin", "null")], false),
            (&get, "/v1/disks", &[("origin", "https://evil.example")], false),
            (&post, "/v1/disks", &[("sec-fetch-site", "same-origin")], true),
            (&post, "/v1/disks", &[("sec-fetch-site", "same-site")], false),
            (&post, "/v1/disks", &[("sec-fetch-site", "cross-site")], false),
            (&post, "/v1/disks", &[("sec-fetch-site", "cross-site"), ("origin", "https://h:1")], false),
            (&post, "/v1/disks", &[("sec-fetch-site", "none")], false),
            (&post, "/v1/disks", &[("sec-fetch-site", "nonsense")], false),
            (&get, "/v1/disks", &[("sec-fetch-site", "same-origin")], true),
            (&get, "/v1/disks", &[("sec-fetch-site", "none")], true),
            (&get, "/v1/disks", &[("sec-fetch-site", "cross-site")], false),
            (&get, "/", &[("sec-fetch-site", "cross-site")], false),
            (&get, "/", &[("sec-fetch-site", "cross-site"), link[0], link[1]], true),
            (&get, "/", &[("sec-fetch-site", "cross-site"), link[0], ("sec-fetch-dest", "iframe")], false),
            (&get, "/v1/disks/a/trace", &[("sec-fetch-site", "cross-site"), link[0], link[1]], false),
            (&post, "/", &[("sec-fetch-site", "cross-site"), link[0], link[1]], false),
        ] {
            let headers: Vec<_> = std::iter::once(host).chain(more.iter().copied()).collect();
            assert_eq!(allowed(&Names::Any, method.clone(), path, &headers), may, "{method} {path} {more:?}");
        }
        let strange = HeaderMap::from_iter([(ORIGIN, HeaderValue::from_bytes(b"\xff").unwrap())]);
        assert!(objection(&Names::Any, &post, "/v1/disks", &strange).is_some());
    }

    #[test]
    fn only_our_own_names_are_answered_over_tcp() {
        let dir = tempfile::tempdir().unwrap();
        let files = Authority::new().server_files(dir.path());
        let tls = Arc::new(Tls::load(files, WithoutCertificate::Welcome).unwrap());
        let names = Names::Ours { tls, listen: "control.lan".to_owned() };
        for (host, may) in [
            ("127.0.0.1:9443", true),
            ("[::1]:9443", true),
            ("10.0.0.1", true),
            ("localhost:9443", true),
            ("hob.example:9443", true),
            ("HOB.example", true),
            ("control.lan:9443", true),
            ("evil.example:9443", false),
            ("hob.example.evil.example", false),
            ("127.0.0.1.evil.example", false),
            ("[", false),
            ("", false),
        ] {
            assert_eq!(allowed(&names, Method::GET, "/v1/disks", &[("host", host)]), may, "{host}");
        }
        assert!(!allowed(&names, Method::GET, "/v1/disks", &[]));
    }
}
