//! Metrics, health and names of requests over real sockets.

use super::*;

/// Returns the whole response to a request with these headers.
async fn ask(endpoint: &Endpoint, path: &str, headers: &str) -> String {
    let Endpoint::Unix(socket) = endpoint else { panic!("a Unix socket") };
    let mut stream = UnixStream::connect(socket).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: hob\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

/// Returns the value of a header of a response.
fn header<'a>(answer: &'a str, name: &str) -> Option<&'a str> {
    let head = answer.split("\r\n\r\n").next()?;
    head.lines().find_map(|line| {
        let (key, value) = line.split_once(": ")?;
        key.eq_ignore_ascii_case(name).then_some(value)
    })
}

#[test]
fn metrics_come_in_the_form_that_is_asked_for() {
    run(async |_, endpoint| {
        let old = ask(&endpoint, "/metrics", "").await;
        assert_eq!(header(&old, "content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
        assert!(
            old.contains("# TYPE process_cpu_seconds_total counter\n") && !old.contains("# EOF"),
            "{old}"
        );
        let new = ask(&endpoint, "/metrics?latency=disk", "Accept: application/openmetrics-text\r\n").await;
        assert!(header(&new, "content-type").unwrap().starts_with("application/openmetrics-text"));
        assert!(new.contains("# TYPE hob_build info\nhob_build_info{version=") && new.ends_with("# EOF\n"));
        let wrong = ask(&endpoint, "/metrics?latency=block", "").await;
        assert!(wrong.starts_with("HTTP/1.1 400") && wrong.contains("?latency=disk"), "{wrong}");
    });
}

#[test]
fn metrics_are_compressed_for_clients_that_accept_gzip() {
    run(async |_, endpoint| {
        let Endpoint::Unix(socket) = endpoint.clone() else { panic!("a Unix socket") };
        let mut stream = UnixStream::connect(socket).await.unwrap();
        let request = "GET /metrics HTTP/1.1\r\nHost: hob\r\nConnection: close\r\n\
                       Accept-Encoding: gzip\r\n\r\n";
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
        let head = String::from_utf8_lossy(&answer[..end + 4]).into_owned();
        assert_eq!(header(&head, "content-encoding"), Some("gzip"));
        assert_eq!(header(&head, "content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
        let decoder = flate2::read::GzDecoder::new(&answer[end + 4..]);
        let text = std::io::read_to_string(decoder).unwrap();
        assert!(text.contains("# TYPE process_cpu_seconds_total counter\n"), "{text}");
        let plain = ask(&endpoint, "/metrics", "").await;
        assert_eq!(header(&plain, "content-encoding"), None);
        assert!(plain.len() > answer.len(), "{} {}", plain.len(), answer.len());
    });
}

#[test]
fn health_is_a_status_for_monitors_and_json_for_programs() {
    run_with_shard(async |_, endpoint, fake| {
        let client = Client::new(endpoint.clone(), None);
        assert_eq!(send(&endpoint, "GET", "/healthz", "").await, (200, "ok\n".to_owned()));
        assert!(client.health().await.unwrap().problems.is_empty());
        fake.set_hangs(true);
        let (status, text) = send(&endpoint, "GET", "/healthz", "").await;
        assert_eq!((status, text.lines().next()), (503, Some("degraded")));
        assert!(text.contains("shard-silent: shard 0: "), "{text}");
        let health = client.health().await.unwrap();
        assert_eq!(health.problems[0].kind, hob_control::ProblemKind::ShardSilent);
    });
}

#[test]
fn every_answer_carries_the_name_of_its_request() {
    run(async |_, endpoint| {
        let id = |answer: &str| header(answer, "x-request-id").map(str::to_owned);
        let one = id(&ask(&endpoint, "/v1/version", "").await).expect("a name");
        let two = id(&ask(&endpoint, "/nowhere", "").await).expect("a name, also of what is not there");
        assert_ne!(one, two);
        let given = ask(&endpoint, "/v1/version", "X-Request-Id: ops-17\r\n").await;
        assert_eq!(id(&given).as_deref(), Some("ops-17"));
        let forged = ask(&endpoint, "/v1/version", "X-Request-Id: a b\"c\r\n").await;
        assert!(id(&forged).is_some_and(|id| !id.contains(' ')), "{forged}");
    });
}
