//! Watches etcd for changes. The response to one request continues with a line for each batch of
//! changes.
//!
//! The watch ends if the etcd member has no leader or the connection fails (TCP keepalive). The
//! caller then reads all keys again, because the watch missed changes.

use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::{Value, json};

use super::{Etcd, EtcdError, after, decode, encode, number};
use crate::connection::Driver;

/// Longest line of a watch that the client reads, bytes. Etcd's own limit for one batch is lower.
const LINE_BYTES_MAX: usize = 64 << 20;

/// A change of one key in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdEvent {
    /// Name of the key.
    pub key: String,
    /// New value of the key; `None` if the key was deleted.
    pub value: Option<Vec<u8>>,
    /// Revision of etcd at which the key changed.
    pub revision: u64,
}

/// A running watch of etcd keys. Dropping this value ends the watch.
#[derive(Debug)]
pub struct EtcdWatch<'a> {
    etcd: &'a Etcd,
    by: usize,
    body: Incoming,
    /// Received bytes that were not returned yet.
    bytes: Vec<u8>,
    _driver: Driver,
}

impl Etcd {
    /// Starts a watch; it reports every change made after this function returns. The watch reports
    /// puts and deletes of keys that begin with one of `puts_and_deletes`, and deletes of keys that
    /// begin with one of `deletes`.
    ///
    /// # Errors
    /// Returns an [`EtcdError`] if this member does not answer in time.
    pub async fn watch(
        &self,
        puts_and_deletes: &[&str],
        deletes: &[&str],
        wait_max: Duration,
    ) -> Result<EtcdWatch<'_>, EtcdError> {
        let by = self.current();
        let starting = self.start_watch(by, puts_and_deletes, deletes);
        let watch = self.in_time(by, starting, wait_max).await;
        if watch.is_err() {
            self.next(by);
        }
        watch
    }

    async fn start_watch(
        &self,
        by: usize,
        all: &[&str],
        deletes: &[&str],
    ) -> Result<EtcdWatch<'_>, EtcdError> {
        let create = |prefix: &str, filters: &[&str]| {
            let end = after(prefix).ok_or_else(|| self.nonsense(by, "no key can follow this prefix"))?;
            let range =
                json!({ "key": encode(prefix.as_bytes()), "range_end": encode(&end), "filters": filters });
            Ok(format!("{}\n", json!({ "create_request": range })))
        };
        let all = all.iter().map(|prefix| create(prefix, &[]));
        let deletes = deletes.iter().map(|prefix| create(prefix, &["NOPUT"]));
        let questions = all.chain(deletes).collect::<Result<Vec<String>, EtcdError>>()?;
        let leads = [("Grpc-Metadata-hasleader", "true")];
        let (answer, driver) = self.exchange(by, "/v3/watch", questions.concat(), &leads).await?;
        if !answer.status().is_success() {
            let bytes = self.collect(by, answer).await?;
            return Err(self.refused(by, &serde_json::from_slice(&bytes).unwrap_or(Value::Null)));
        }
        let body = answer.into_body();
        let mut watch = EtcdWatch { etcd: self, by, body, bytes: Vec::new(), _driver: driver };
        for _ in &questions {
            if watch.line().await?["created"] != Value::Bool(true) {
                return Err(self.nonsense(by, "etcd did not start the watch"));
            }
        }
        Ok(watch)
    }
}

impl EtcdWatch<'_> {
    /// Returns the next events. Events of one prefix are in the order of etcd's revisions.
    ///
    /// # Errors
    /// Returns an [`EtcdError`] if the watch has ended.
    pub async fn next(&mut self) -> Result<Vec<EtcdEvent>, EtcdError> {
        let result = self.line().await;
        if result.is_err() {
            self.etcd.next(self.by);
        }
        let result = result?;
        let events = result["events"].as_array().map_or(&[][..], Vec::as_slice);
        Ok(events.iter().filter_map(event).collect())
    }

    /// Reads the next line and returns its `result` member.
    async fn line(&mut self) -> Result<Value, EtcdError> {
        let wrong = |why: String| self.etcd.nonsense(self.by, why);
        let mut looked = 0;
        let end = loop {
            if let Some(end) = self.bytes[looked..].iter().position(|byte| *byte == b'\n') {
                break looked + end;
            }
            looked = self.bytes.len();
            if looked > LINE_BYTES_MAX {
                return Err(wrong("a batch of changes is too long".to_owned()));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => self.bytes.extend_from_slice(&frame.into_data().unwrap_or_default()),
                Some(Err(error)) => return Err(wrong(error.to_string())),
                None => return Err(wrong("etcd ended the watch".to_owned())),
            }
        };
        let line: Vec<u8> = self.bytes.drain(..=end).collect();
        let mut value: Value = serde_json::from_slice(&line)
            .map_err(|_| wrong("the response is not JSON; check that the endpoint is etcd".to_owned()))?;
        let result = value["result"].take();
        let is_over = result["canceled"] == Value::Bool(true);
        if !result.is_object() || is_over {
            let said = value["error"]["message"].as_str().or_else(|| result["cancel_reason"].as_str());
            let why = said.unwrap_or("etcd ended the watch");
            return Err(wrong(why.chars().take(200).collect()));
        }
        Ok(result)
    }
}

/// Parses one event; `None` if it is malformed.
fn event(event: &Value) -> Option<EtcdEvent> {
    let kv = &event["kv"];
    let text = |name: &str| decode(kv[name].as_str().unwrap_or_default());
    let is_deleted = match event["type"].as_str() {
        Some("DELETE") => true,
        Some("PUT") | None => false,
        Some(_) => return None,
    };
    let value = if is_deleted { None } else { Some(text("value")?) };
    Some(EtcdEvent {
        key: String::from_utf8(text("key")?).ok()?,
        value,
        revision: number(kv, "mod_revision")?,
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    const SOON: Duration = Duration::from_secs(60);
    const CREATED: &str = r#"{"result":{"header":{"revision":"4"},"created":true}}"#;

    /// Watches a test server that sends `said` in pieces of any length, and then closes the
    /// connection.
    fn told(said: &str, pieces: usize) -> Vec<Result<Vec<EtcdEvent>, String>> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let said = said.as_bytes().to_vec();
        let serving = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            while asked.iter().filter(|byte| **byte == b'\n').count() < 2 || !asked.ends_with(b"}\n") {
                let mut some = [0; 4096];
                let count = stream.read(&mut some).unwrap();
                assert!(count > 0, "the question has an end");
                asked.extend(&some[..count]);
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").unwrap();
            for piece in said.chunks(pieces) {
                let head = format!("{:x}\r\n", piece.len());
                let _ = stream.write_all(&[head.as_bytes(), piece, b"\r\n"].concat());
            }
            let _ = stream.write_all(b"0\r\n\r\n");
            String::from_utf8(asked).unwrap()
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let all = runtime.block_on(async {
            let etcd = Etcd::new(vec![endpoint], None);
            let mut watch = match etcd.watch(&["t/"], &["h/"], SOON).await {
                Ok(watch) => watch,
                Err(error) => return vec![Err(error.to_string())],
            };
            let mut all = Vec::new();
            while all.last().is_none_or(Result::is_ok) {
                all.push(watch.next().await.map_err(|error| error.to_string()));
            }
            all
        });
        let asked = serving.join().unwrap();
        assert!(asked.contains("hasleader: true") && asked.contains("/v3/watch"), "{asked}");
        assert!(asked.contains(r#""filters":["NOPUT"],"key":"aC8=","range_end":"aDA=""#), "{asked}");
        all
    }

    #[test]
    fn changes_are_parsed_line_by_line_from_any_pieces() {
        let text = format!(
            "{CREATED}\n{CREATED}\n{}\n{}\n{}\n",
            r#"{"result":{"events":[{"kv":{"key":"dC9h","mod_revision":"5","value":"eA=="}}]}}"#,
            r#"{"result":{"events":[{"type":"DELETE","kv":{"key":"aC9h","mod_revision":"6"}},{"type":"?"}]}}"#,
            r#"{"result":{"header":{}}}"#,
        );
        let event = |key: &str, value: Option<&[u8]>, revision| EtcdEvent {
            key: key.to_owned(),
            value: value.map(<[u8]>::to_vec),
            revision,
        };
        for pieces in [1, 7, 4096] {
            let told = told(&text, pieces);
            assert_eq!(told[0], Ok(vec![event("t/a", Some(b"x"), 5)]));
            assert_eq!(told[1], Ok(vec![event("h/a", None, 6)]));
            assert_eq!(told[2], Ok(Vec::new()));
            assert!(told[3].as_ref().unwrap_err().contains("etcd ended the watch"), "{told:?}");
        }
    }

    #[test]
    fn the_end_of_a_watch_has_a_reason() {
        for (text, why) in [
            (r#"{"error":{"message":"etcdserver: no leader"}}"#.to_owned(), "no leader"),
            ("not JSON".to_owned(), "not JSON"),
            (format!("{CREATED}\n{{\"result\":{{}}}}"), "etcd did not start the watch"),
            (
                format!(
                    "{CREATED}\n{CREATED}\n{{\"result\":{{\"canceled\":true,\"cancel_reason\":\"compacted\"}}}}"
                ),
                "compacted",
            ),
        ] {
            let told = told(&format!("{text}\n"), 4096);
            assert!(told.last().unwrap().as_ref().unwrap_err().contains(why), "{text}: {told:?}");
        }
    }
}
