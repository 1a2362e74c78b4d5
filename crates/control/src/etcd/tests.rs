//! Requests and parsed responses of the etcd client, with a server that returns configured
//! responses.

use std::io::{Read, Write};
use std::net::TcpListener;

use super::*;

const SOON: Duration = Duration::from_secs(5);

/// Starts a server that returns each of these responses once and then none; returns the requests
/// that it received.
fn server(answers: &[(u16, &str)]) -> (EtcdEndpoint, std::thread::JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let answers: Vec<(u16, String)> =
        answers.iter().map(|(code, body)| (*code, (*body).to_owned())).collect();
    let serving = std::thread::spawn(move || {
        let mut asked = Vec::new();
        for (code, body) in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut text = Vec::new();
            let mut some = [0; 4096];
            loop {
                let count = stream.read(&mut some).unwrap();
                text.extend(&some[..count]);
                let all = String::from_utf8_lossy(&text).into_owned();
                let Some((head, rest)) = all.split_once("\r\n\r\n") else { continue };
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
                if rest.len() == length.parse::<usize>().unwrap() {
                    asked.push(format!("{} {rest}", head.split(' ').nth(1).unwrap()));
                    break;
                }
            }
            let head = format!("HTTP/1.1 {code} X\r\ncontent-length: {}\r\n\r\n", body.len());
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(body.as_bytes()).unwrap();
        }
        asked
    });
    (endpoint, serving)
}

fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

#[test]
fn base64_matches_the_standard() {
    for (plain, coded) in [
        ("", ""),
        ("f", "Zg=="),
        ("fo", "Zm8="),
        ("foo", "Zm9v"),
        ("foob", "Zm9vYg=="),
        ("fooba", "Zm9vYmE="),
        ("foobar", "Zm9vYmFy"),
    ] {
        assert_eq!(encode(plain.as_bytes()), coded);
        assert_eq!(decode(coded).as_deref(), Some(plain.as_bytes()));
    }
    assert_eq!(encode(&[251, 255, 254]), "+//+");
    for wrong in ["Z", "Zg=", "Z===", "Zg.=", "=Zg=", "Zm9v="] {
        assert_eq!(decode(wrong), None, "{wrong}");
    }
}

#[test]
fn endpoints_are_urls() {
    for text in ["http://127.0.0.1:2379", "https://etcd-1.example:2379", "http://[::1]:1"] {
        assert_eq!(text.parse::<EtcdEndpoint>().unwrap().to_string(), text);
        assert_eq!(format!("{text}/").parse::<EtcdEndpoint>().unwrap().to_string(), text);
    }
    for text in [
        "",
        "127.0.0.1:2379",
        "http://",
        "http://h",
        "http://h:x",
        "http://a@b:1",
        "http://::1:1",
        "ftp://h:1",
    ] {
        assert!(text.parse::<EtcdEndpoint>().unwrap_err().contains("http://host:port"), "{text}");
    }
}

#[test]
fn leases_and_transactions_are_asked_for_as_etcd_wants_them() {
    let (endpoint, serving) = server(&[
        (200, r#"{"header":{"raft_term":"2"},"ID":"77","TTL":"10"}"#),
        (200, r#"{"header":{"revision":"12","raft_term":"2"},"succeeded":true}"#),
        (200, r#"{"header":{"revision":"12","raft_term":"2"}}"#),
    ]);
    run(async {
        let etcd = Etcd::new(vec![endpoint], None);
        assert_eq!(etcd.grant(10, SOON).await, Ok((77, 10)));
        let conditions = [
            ("a".to_owned(), EtcdIs::Absent),
            ("b".to_owned(), EtcdIs::At(5)),
            ("c".to_owned(), EtcdIs::Under(7)),
        ];
        let changes =
            [EtcdChange::Put("f".to_owned(), b"foo".to_vec(), 7), EtcdChange::Delete("a".to_owned())];
        assert_eq!(etcd.txn(&conditions, &changes, SOON).await, Ok(Some(12)));
        assert_eq!(etcd.txn(&[], &[], SOON).await, Ok(None), "what is not there is false");
    });
    let asked = serving.join().unwrap();
    assert_eq!(asked[0], r#"/v3/lease/grant {"TTL":"10"}"#);
    let txn: Value = serde_json::from_str(asked[1].strip_prefix("/v3/kv/txn ").unwrap()).unwrap();
    assert_eq!(
        txn,
        json!({
            "compare": [
                { "key": "YQ==", "target": "CREATE", "result": "EQUAL", "create_revision": "0" },
                { "key": "Yg==", "target": "MOD", "result": "EQUAL", "mod_revision": "5" },
                { "key": "Yw==", "target": "LEASE", "result": "EQUAL", "lease": "7" },
            ],
            "success": [
                { "request_put": { "key": "Zg==", "value": "Zm9v", "lease": "7" } },
                { "request_delete_range": { "key": "YQ==" } },
            ],
        })
    );
}

/// docs/decisions/0019: a deposed leader renews leases that the next leader may have ended.
#[test]
fn a_renewal_counts_if_the_majority_confirms_its_term() {
    let kept = r#"{"result":{"header":{"raft_term":"2"},"ID":"7","TTL":"10"}}"#;
    let read = |term: u64, lease: u64| {
        format!(
            r#"{{"header":{{"raft_term":"{term}"}},"kvs":[{{"key":"YQ==","mod_revision":"3","lease":"{lease}","value":"Zg=="}}]}}"#
        )
    };
    let (good, later, other) = (read(2, 7), read(3, 7), read(2, 8));
    for (answers, expected) in [
        ([(200, kept), (200, &good)].as_slice(), Ok(10)),
        (&[(200, kept), (200, &other)], Err("does not know the lease")),
        (&[(200, kept), (200, r#"{"header":{"raft_term":"2"}}"#)], Err("does not know the lease")),
        (&[(200, kept), (200, &later)], Err("no longer etcd's leader")),
        (&[(200, r#"{"result":{"ID":"7","TTL":"10"}}"#), (200, &good)], Err("no longer etcd's leader")),
        (&[(200, r#"{"result":{"header":{"raft_term":"2"},"ID":"7"}}"#)], Err("does not know the lease")),
    ] {
        let (endpoint, serving) = server(answers);
        let renewed = run(async { Etcd::new(vec![endpoint], None).renew(7, "a", SOON).await });
        serving.join().unwrap();
        match (renewed, expected) {
            (Ok(seconds), Ok(expected)) => assert_eq!(seconds, expected),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (renewed, expected) => panic!("{renewed:?} and not {expected:?}"),
        }
    }
}

#[test]
fn entries_are_parsed_and_invalid_ones_are_skipped() {
    let answer = r#"{"responses":[
        {"response_range":{"kvs":[{"key":"YQ==","value":"Zm9v","mod_revision":"4"}]}},
        {"response_range":{}},
        {"response_range":{"kvs":[{"key":"Y","value":"Zm9v","mod_revision":"4"},{"key":"Yg==","mod_revision":"5","lease":"9"},7]}}]}"#;
    let (endpoint, serving) = server(&[(200, answer)]);
    let got = run(async { Etcd::new(vec![endpoint], None).get(&["a", "b"], SOON).await }).unwrap();
    assert_eq!(
        got,
        [
            EtcdEntry { key: "a".to_owned(), value: b"foo".to_vec(), revision: 4, lease: 0 },
            EtcdEntry { key: "b".to_owned(), value: Vec::new(), revision: 5, lease: 9 },
        ]
    );
    serving.join().unwrap();
}

#[test]
fn the_next_endpoint_is_asked_after_one_that_failed() {
    // The listener is closed, so no server listens on the port.
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (endpoint, serving) =
        server(&[(200, r#"{"ID":"7","TTL":"3"}"#), (503, r#"{"error":"no leader","code":14}"#)]);
    run(async {
        let etcd = Etcd::new(vec![format!("http://{nobody}").parse().unwrap(), endpoint], None);
        let error = etcd.grant(3, SOON).await.unwrap_err();
        assert!(error.to_string().contains(&nobody.to_string()), "{error}");
        assert_eq!(etcd.grant(3, SOON).await, Ok((7, 3)));
        let error = etcd.grant(3, SOON).await.unwrap_err();
        assert!(matches!(&error, EtcdError::Refused { why, .. } if why == "no leader"), "{error:?}");
    });
    serving.join().unwrap();
}

#[test]
fn invalid_answers_are_errors_and_a_silent_server_times_out() {
    for answer in ["", "[]", "7", "<html>", r#"{"ID":"x","TTL":"3"}"#, r#"{"ID":"0","TTL":"3"}"#] {
        let (endpoint, serving) = server(&[(200, answer)]);
        assert!(run(async { Etcd::new(vec![endpoint], None).grant(3, SOON).await }).is_err(), "{answer}");
        serving.join().unwrap();
    }
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap()).parse().unwrap();
    let error = run(async { Etcd::new(vec![endpoint], None).grant(3, Duration::from_millis(50)).await });
    assert!(error.unwrap_err().to_string().contains("within 50 ms"));
}
