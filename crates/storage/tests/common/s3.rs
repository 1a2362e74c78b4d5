//! An S3 store in this process, which can refuse all requests. The store supports the requests that
//! hob uses: get with a range, put with If-None-Match, delete of several objects, and list.
#![allow(dead_code, unreachable_pub)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// The reply to all requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outage {
    /// 503 SlowDown: the store is overloaded.
    SlowDown,
    /// 403 AccessDenied: the credentials were withdrawn.
    Forbidden,
    /// 400 ExpiredToken: the credentials have expired.
    ExpiredToken,
    /// 404 NoSuchBucket: the storage of the server is not mounted.
    NoBucket,
}

impl Outage {
    fn reply(self) -> (&'static str, &'static str) {
        match self {
            Outage::SlowDown => ("503 Slow Down", "SlowDown"),
            Outage::Forbidden => ("403 Forbidden", "AccessDenied"),
            Outage::ExpiredToken => ("400 Bad Request", "ExpiredToken"),
            Outage::NoBucket => ("404 Not Found", "NoSuchBucket"),
        }
    }
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Vec<u8>>,
    outage: Option<Outage>,
    refused: usize,
}

/// Handle to a running store with one bucket.
#[derive(Clone)]
pub struct Store {
    state: Arc<Mutex<State>>,
    port: u16,
}

struct Request {
    method: String,
    /// Key of the object; empty for the bucket.
    key: String,
    query: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

impl Store {
    pub fn start() -> Store {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let store = Store { state: Arc::default(), port: listener.local_addr().unwrap().port() };
        let state = store.state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = state.clone();
                std::thread::spawn(move || while serve(&stream, &state).is_some() {});
            }
        });
        store
    }

    /// Returns the specification of a disk in the bucket.
    pub fn spec(&self) -> String {
        let place = format!("endpoint=http://127.0.0.1:{}&allow_http=true", self.port);
        format!("s3://bucket/disk?{place}&skip_signature=true&region=test")
    }

    pub fn refuse(&self, outage: Outage) {
        self.state.lock().unwrap().outage = Some(outage);
    }

    pub fn heal(&self) {
        self.state.lock().unwrap().outage = None;
    }

    /// Returns the number of refused requests.
    pub fn refused(&self) -> usize {
        self.state.lock().unwrap().refused
    }
}

/// Answers one request. Returns `None` at the end of the connection.
fn serve(mut stream: &TcpStream, state: &Mutex<State>) -> Option<()> {
    let request = receive(stream)?;
    let mut state = state.lock().unwrap();
    let (status, headers, body) = match state.outage {
        Some(outage) => {
            state.refused += 1;
            let (status, code) = outage.reply();
            (status, String::new(), format!("<Error><Code>{code}</Code></Error>").into_bytes())
        }
        None => answer(&mut state.objects, &request),
    };
    drop(state);
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nETag: \"1\"\r\n\
         Last-Modified: Thu, 26 Nov 2026 12:00:00 GMT\r\n{headers}\r\n"
    );
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(&body).ok()
}

fn receive(stream: &TcpStream) -> Option<Request> {
    let mut input = BufReader::with_capacity(1, stream);
    let mut line = String::new();
    input.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let key = path.trim_start_matches("/bucket").trim_start_matches('/').to_owned();
    let query = query.to_owned();
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        input.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim().split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").map_or(0, |it| it.parse().unwrap());
    let mut body = vec![0; length];
    input.read_exact(&mut body).ok()?;
    Some(Request { method, key, query, headers, body })
}

type Answer = (&'static str, String, Vec<u8>);

fn answer(objects: &mut BTreeMap<String, Vec<u8>>, request: &Request) -> Answer {
    let empty = |status| (status, String::new(), Vec::new());
    match request.method.as_str() {
        "PUT" if request.headers.contains_key("if-none-match") && objects.contains_key(&request.key) => {
            empty("412 Precondition Failed")
        }
        "PUT" => {
            objects.insert(request.key.clone(), request.body.clone());
            empty("200 OK")
        }
        "POST" => {
            let text = String::from_utf8(request.body.clone()).unwrap();
            for key in text.split("<Key>").skip(1) {
                objects.remove(key.split('<').next().unwrap());
            }
            ("200 OK", String::new(), b"<DeleteResult></DeleteResult>".to_vec())
        }
        "DELETE" => {
            objects.remove(&request.key);
            empty("204 No Content")
        }
        "GET" if request.key.is_empty() => list(objects, &request.query),
        "GET" | "HEAD" => match objects.get(&request.key) {
            None => empty("404 Not Found"),
            Some(bytes) => read(bytes, request.headers.get("range")),
        },
        _ => empty("405 Method Not Allowed"),
    }
}

fn read(bytes: &[u8], range: Option<&String>) -> Answer {
    let Some(range) = range else { return ("200 OK", String::new(), bytes.to_vec()) };
    let (first, last) = range.trim_start_matches("bytes=").split_once('-').unwrap();
    let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
    let last = last.min(bytes.len() - 1);
    let header = format!("Content-Range: bytes {first}-{last}/{}\r\n", bytes.len());
    ("206 Partial Content", header, bytes[first..=last].to_vec())
}

fn list(objects: &BTreeMap<String, Vec<u8>>, query: &str) -> Answer {
    let prefix = query.split('&').find_map(|it| it.strip_prefix("prefix=")).unwrap_or("");
    let prefix = prefix.replace("%2F", "/");
    let found: String = objects
        .iter()
        .filter(|(key, _)| key.starts_with(&prefix))
        .map(|(key, bytes)| {
            let time = "2026-11-26T12:00:00.000Z";
            let size = bytes.len();
            format!(
                "<Contents><Key>{key}</Key><LastModified>{time}</LastModified><Size>{size}</Size>\
                 <ETag>\"1\"</ETag></Contents>"
            )
        })
        .collect();
    let text = format!("<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>");
    ("200 OK", String::new(), text.into_bytes())
}
