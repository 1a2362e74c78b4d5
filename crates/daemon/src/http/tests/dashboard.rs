//! The dashboard, its events, and the clients that may read them.

use std::time::Duration;

use hob_control::Snapshot;
use hyper::header::{HeaderMap, HeaderValue, ORIGIN};
use hyper::{Method, Response};
use tokio::net::TcpStream;

use super::tls::{ADMIN, READER, site};
use super::*;
use crate::config::Role;
use crate::listening_sockets::ListeningSockets;

/// Returns a response as it is sent, up to the end of the connection.
async fn answer(stream: impl AsyncReadExt + AsyncWriteExt + Unpin, request: String) -> String {
    let mut stream = stream;
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

fn request(method: &str, path: &str, headers: &[&str]) -> String {
    let headers: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
    format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n{headers}\r\n")
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_else(|| panic!("{answer:?}"))
}

/// Reads from a stream of events until it has `count` snapshots.
async fn snapshots(stream: &mut (impl AsyncReadExt + Unpin), count: usize) -> Vec<Snapshot> {
    let mut text = String::new();
    let mut piece = [0; 4096];
    while text.matches("event: snapshot").count() < count || !text.ends_with("\n\n\r\n") {
        let length = stream.read(&mut piece).await.unwrap();
        assert!(length > 0, "the stream ended: {text}");
        text += std::str::from_utf8(&piece[..length]).unwrap();
    }
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    data.map(|json| serde_json::from_str(json).unwrap_or_else(|error| panic!("{json}: {error}"))).collect()
}

async fn listen(endpoint: &Endpoint) -> UnixStream {
    let Endpoint::Unix(path) = endpoint else { panic!("a Unix socket") };
    let mut stream = UnixStream::connect(path).await.unwrap();
    stream.write_all(b"GET /v1/events HTTP/1.1\r\nHost: hob\r\n\r\n").await.unwrap();
    stream
}

#[test]
fn the_page_may_load_only_from_the_daemon() {
    run(async |_, endpoint| {
        let Endpoint::Unix(path) = &endpoint else { panic!("a Unix socket") };
        let get = async |path_on_it: &str, more: &[&str]| {
            let headers = [&["Host: hob"], more].concat();
            let stream = UnixStream::connect(path).await.unwrap();
            answer(stream, request("GET", path_on_it, &headers)).await
        };
        let page = get("/", &[]).await;
        assert_eq!(status(&page), 200);
        for part in ["default-src 'none'", "script-src 'self'", "nosniff", "text/html", "no-cache"] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(!page.contains("unsafe-inline") && !page.contains("https://"), "{page}");
        let tag = page.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap();
        for (path, media_type) in [("/assets/app.js", "text/javascript"), ("/assets/app.css", "text/css")] {
            let asset = get(path, &[]).await;
            assert!(status(&asset) == 200 && asset.contains(media_type), "{path}");
            let known = get(path, &[&format!("If-None-Match: {tag}")]).await;
            assert!(status(&known) == 304 && known.ends_with("\r\n\r\n"), "{known}");
        }
        // The API's responses are no HTML pages.
        assert!(get("/v1/disks", &[]).await.contains("default-src 'none'; frame-ancestors"));
    });
}

#[test]
fn events_match_the_api() {
    run(async |dir, endpoint| {
        let client = Client::new(endpoint.clone(), None);
        std::fs::File::create(dir.join("vm.img")).unwrap().set_len(MIB).unwrap();
        let backing = dir.join("vm.img").to_string_lossy().into_owned();
        let add =
            DiskAdd { name: "vm".into(), backing, datastore: Some("array".into()), ..DiskAdd::default() };
        client.disk_add(&add).await.unwrap();
        let mut stream = listen(&endpoint).await;
        let [first, second] = &snapshots(&mut stream, 2).await[..] else { panic!("two snapshots") };
        assert!(second.at_ms - first.at_ms >= 900, "{} {}", first.at_ms, second.at_ms);
        assert_eq!(second.version, client.version().await.unwrap());
        assert_eq!(second.health, client.health().await.unwrap());
        assert_eq!(second.disks.len(), 1);
        assert_eq!(second.disks[0].disk, client.disk("vm").await.unwrap());
        assert_eq!(second.disks[0].qos.as_ref(), Some(&client.qos("vm").await.unwrap()));
        assert_eq!(second.datastores, Some(client.datastores().await.unwrap()));
        let (figures, stats) = (second.disks[0].figures.as_ref().unwrap(), client.stats("vm").await.unwrap());
        assert_eq!((figures.reads, figures.writes), (stats.reads, stats.writes));
    });
}

#[test]
fn listeners_have_few_places_and_leave_them() {
    run(async |_, endpoint| {
        let mut listeners = Vec::new();
        for _ in 0..16 {
            let mut listener = listen(&endpoint).await;
            snapshots(&mut listener, 1).await;
            listeners.push(listener);
        }
        let (refused, why) = send(&endpoint, "GET", "/v1/events", "").await;
        assert!(refused == 503 && why.contains("16 clients"), "{why}");
        // Connections remain for the rest of the API.
        assert_eq!(send(&endpoint, "GET", "/v1/version", "").await.0, 200);
        listeners.pop();
        let mut again = listen(&endpoint).await;
        let mut first = [0; 15];
        // The daemon detects after a moment that a client has disconnected.
        for _ in 0..3000 {
            again.read_exact(&mut first).await.unwrap();
            if first.ends_with(b"200 OK") {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            again = listen(&endpoint).await;
        }
        assert!(first.ends_with(b"200 OK"), "{}", String::from_utf8_lossy(&first));
    });
}

#[test]
fn a_client_that_reads_nothing_is_disconnected() {
    // Time passes only while nothing happens, so hours are short. A shard then seems silent, which
    // does not matter here.
    crate::background::run_in_virtual_time(async {
        let dir = tempfile::tempdir().unwrap();
        let endpoint = Endpoint::Unix(dir.path().join("c.sock"));
        let listener =
            ControlListener::bind(endpoint.clone(), &Guard::default(), &ListeningSockets::default())
                .await
                .unwrap();
        tokio::spawn(listener.serve(router(services())));
        let mut asleep = listen(&endpoint).await;
        tokio::time::sleep(Duration::from_secs(6 * 3600)).await;
        let mut taken = Vec::new();
        let end = asleep.read_to_end(&mut taken);
        let end = tokio::time::timeout(Duration::from_secs(3600), end).await;
        assert!(end.is_ok(), "the stream goes on after {} bytes", taken.len());
        // A complete response would wait until the client reads it: the connection was closed, and
        // its slot is free.
        assert!(
            taken.starts_with(b"HTTP/1.1 200") && !taken.ends_with(b"\r\n0\r\n\r\n"),
            "it was only told the end"
        );
    });
}

#[test]
fn over_tls_the_page_is_for_everybody_and_its_data_is_not() {
    site(async |site| {
        let client = site.client(None, None);
        let ask = async |method: Method, path: &str, token: Option<&str>| {
            let client = site.client(token, None);
            client.forward(method, path, Vec::new(), hyper::body::Bytes::new()).await.unwrap()
        };
        let role = |answer: &Response<_>| answer.headers().get("x-hob-role").cloned();
        for path in ["/", "/assets/app.js", "/assets/app.css", "/assets/icon.svg"] {
            assert_eq!(ask(Method::GET, path, None).await.status(), 200, "{path}");
            assert_eq!(ask(Method::POST, path, None).await.status(), 401, "{path}");
        }
        for path in ["/v1/events", "/v1/disks", "/metrics", "/healthz", "/openapi.json", "/assets/x", "//"] {
            assert_eq!(ask(Method::GET, path, None).await.status(), 401, "{path}");
        }
        let (admin, reader) =
            (ask(Method::GET, "/v1/events", Some(ADMIN)).await, ask(Method::GET, "/v1/events", Some(READER)));
        assert_eq!(
            (admin.status().as_u16(), role(&admin).unwrap()),
            (200, HeaderValue::from_static("admin"))
        );
        let reader = reader.await;
        assert_eq!(role(&reader).unwrap(), HeaderValue::from_static("read-only"));
        assert_eq!(ask(Method::DELETE, "/v1/disks/a", Some(READER)).await.status(), 403);
        // A malicious site that misuses a browser with a stored token gets nothing, even with the
        // token.
        let other = vec![(ORIGIN, HeaderValue::from_static("https://evil.example"))];
        let client = client.forward(Method::GET, "/", other, hyper::body::Bytes::new()).await.unwrap();
        assert_eq!(client.status(), 403);
    });
}

/// Returns the head and the body of a response on the loopback interface.
async fn at(address: std::net::SocketAddr, method: &str, path: &str, headers: &[&str]) -> String {
    answer(TcpStream::connect(address).await.unwrap(), request(method, path, headers)).await
}

#[test]
fn the_loopback_interface_needs_the_token_for_the_dashboard() {
    run(async |_, endpoint| {
        for (role, change) in [(Role::Admin, 404), (Role::ReadOnly, 403)] {
            let loopback = Loopback::bind(0, role).await.unwrap();
            let (address, url) = (loopback.address().unwrap(), loopback.url().unwrap());
            let token = url.split_once("#token=").unwrap().1.to_owned();
            tokio::spawn(loopback.serve(Client::new(endpoint.clone(), None)));
            let host = format!("Host: {address}");
            let bearer = format!("Authorization: Bearer {token}");
            let known = [host.as_str(), bearer.as_str()];
            let page = at(address, "GET", "/", &[&host]).await;
            assert!(status(&page) == 200 && page.contains("script-src 'self'"), "{page}");
            assert_eq!(status(&at(address, "GET", "/v1/disks", &[&host]).await), 401);
            let disks = at(address, "GET", "/v1/disks", &known).await;
            assert!(status(&disks) == 200 && disks.ends_with("[]"), "{disks}");
            let said = if role == Role::Admin { "x-hob-role: admin" } else { "x-hob-role: read-only" };
            assert!(disks.contains(said), "{disks}");
            assert_eq!(status(&at(address, "DELETE", "/v1/disks/none", &known).await), change);
            // A page that was loaded under another name, or from another site.
            for (headers, expected) in [
                (&["Host: evil.example", &bearer][..], 403),
                (&[&host, &bearer, "Origin: http://evil.example"], 403),
                (&[&host, &bearer, "Sec-Fetch-Site: cross-site"], 403),
                (&[&host, &bearer, "Sec-Fetch-Site: same-origin"], change),
                (&["Host: localhost:1", &bearer], change),
            ] {
                let got = at(address, "DELETE", "/v1/disks/none", headers).await;
                assert_eq!(status(&got), expected, "{headers:?}: {got}");
            }
            let mut stream = TcpStream::connect(address).await.unwrap();
            let listen = format!("GET /v1/events HTTP/1.1\r\n{host}\r\n{bearer}\r\n\r\n");
            stream.write_all(listen.as_bytes()).await.unwrap();
            assert_eq!(snapshots(&mut stream, 2).await.len(), 2);
        }
    });
}

#[test]
fn the_loopback_says_when_the_daemon_is_gone() {
    run(async |dir, _| {
        let loopback = Loopback::bind(0, Role::Admin).await.unwrap();
        let (address, url) = (loopback.address().unwrap(), loopback.url().unwrap());
        let bearer = format!("Authorization: Bearer {}", url.split_once("#token=").unwrap().1);
        tokio::spawn(loopback.serve(Client::new(Endpoint::Unix(dir.join("none.sock")), None)));
        let gone = at(address, "GET", "/v1/disks", &["Host: localhost", &bearer]).await;
        assert!(status(&gone) == 502 && gone.contains("none.sock"), "{gone}");
        let long = "x".repeat(BODY_BYTES_MAX + 1);
        let length = format!("Content-Length: {}", long.len());
        let long = request("PATCH", "/v1/x", &["Host: localhost", &bearer, &length]) + &long;
        let refused = answer(TcpStream::connect(address).await.unwrap(), long).await;
        assert_eq!(status(&refused), 413);
    });
}

#[test]
fn headers_of_a_forwarded_answer_are_its_own() {
    run(async |_, endpoint| {
        let client = Client::new(endpoint, None);
        let named = vec![("x-request-id".parse().unwrap(), HeaderValue::from_static("mine"))];
        let found = client.forward(Method::GET, "/v1/none", named, hyper::body::Bytes::new()).await.unwrap();
        let headers: &HeaderMap = found.headers();
        assert_eq!((found.status().as_u16(), headers["x-request-id"].to_str().unwrap()), (404, "mine"));
    });
}
