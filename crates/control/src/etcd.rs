//! Client of etcd version 3, for leases, reads and transactions. The client uses etcd's JSON
//! gateway (`/v3/…`), not gRPC.
//!
//! Each call to etcd is one HTTP/1.1 request to one endpoint, with limits on time and length. After
//! a failure, the next request uses the next endpoint. A request without a response may have been
//! executed. Every response is validated. Times are in seconds, as in etcd.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response};
use rustix::net::sockopt;
use serde_json::{Map, Value, json};
use tokio::net::TcpStream;

use crate::ClientTls;
use crate::connection::{self, Driver};
use crate::endpoint::host_and_port;

mod watch;

pub use watch::{EtcdEvent, EtcdWatch};

/// Longest response of etcd that the client reads, bytes.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Number of keys that one request of a listing returns.
const PAGE_KEYS: u64 = 1000;

/// Idle time after which TCP keepalive probes a connection to etcd, and the time between probes.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(3);

/// Client URL of an etcd member: `http://host:port`, or `https://host:port` for TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdEndpoint {
    host: String,
    port: u16,
    tls: bool,
}

impl FromStr for EtcdEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("'{text}' is not an endpoint of etcd; write http://host:port or https://host:port");
        let (tls, authority) = match (text.strip_prefix("http://"), text.strip_prefix("https://")) {
            (Some(rest), _) => (false, rest),
            (_, Some(rest)) => (true, rest),
            _ => return Err(wrong()),
        };
        let authority = authority.strip_suffix('/').unwrap_or(authority);
        let (host, port) =
            host_and_port(authority).filter(|(host, _)| !host.contains('@')).ok_or_else(wrong)?;
        Ok(EtcdEndpoint { host, port, tls })
    }
}

impl fmt::Display for EtcdEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        match self.host.contains(':') {
            true => write!(f, "{scheme}://[{}]:{}", self.host, self.port),
            false => write!(f, "{scheme}://{}:{}", self.host, self.port),
        }
    }
}

impl EtcdEndpoint {
    /// Returns true if the endpoint uses TLS.
    pub fn is_tls(&self) -> bool {
        self.tls
    }
}

/// Why a request to etcd failed. The request may have been executed, unless etcd refused it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EtcdError {
    /// The lease does not exist, or has expired.
    #[error("etcd does not know the lease: it has expired or never existed")]
    NoLease,
    /// Etcd refused the request, and did not execute it.
    #[error("etcd at {endpoint} refuses: {why}")]
    Refused {
        /// Endpoint of the etcd member.
        endpoint: String,
        /// Error that etcd reported.
        why: String,
    },
    /// No endpoint answered in time, or the response was invalid.
    #[error("{endpoint}: {why}")]
    Lost {
        /// Endpoint of the etcd member.
        endpoint: String,
        /// Why no valid response arrived.
        why: String,
    },
}

/// A key in etcd with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdEntry {
    /// Name of the key.
    pub key: String,
    /// Value of the key.
    pub value: Vec<u8>,
    /// Revision of etcd of the latest change of the key.
    pub revision: u64,
    /// Lease that the key is attached to; 0 for none.
    pub lease: u64,
}

/// A condition of an etcd transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EtcdIs {
    /// The key does not exist.
    Absent,
    /// The latest change of the key has this revision.
    At(u64),
    /// The key is attached to this lease.
    Under(u64),
}

/// A change that an etcd transaction makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EtcdChange {
    /// Writes a key: name, value, and the lease that the key is attached to (0 for none).
    Put(String, Vec<u8>, u64),
    /// Deletes this key.
    Delete(String),
}

/// Client of an etcd cluster. The client opens a connection for each request.
#[derive(Debug)]
pub struct Etcd {
    endpoints: Vec<EtcdEndpoint>,
    tls: Option<ClientTls>,
    /// Index of the endpoint that the next request uses.
    at: AtomicUsize,
    /// Id of the etcd cluster; 0 before the first response.
    id: AtomicU64,
}

/// A response of etcd, and the Raft term that the answering member knew.
struct EtcdResponse {
    body: Value,
    term: u64,
    revision: u64,
    by: usize,
}

impl Etcd {
    /// Creates a client of the etcd cluster with these endpoints. `endpoints` may omit members of
    /// the etcd cluster, but has at least one member. The client uses one endpoint at a time, and
    /// the next one after a failure.
    ///
    /// # Panics
    /// Panics if there is no endpoint.
    pub fn new(endpoints: Vec<EtcdEndpoint>, tls: Option<ClientTls>) -> Etcd {
        assert!(!endpoints.is_empty(), "an etcd client needs an endpoint");
        Etcd { endpoints, tls, at: AtomicUsize::new(0), id: AtomicU64::new(0) }
    }

    /// Returns the endpoints of the etcd cluster.
    pub fn endpoints(&self) -> &[EtcdEndpoint] {
        &self.endpoints
    }

    /// Returns the id of the etcd cluster, after its first response.
    pub fn id(&self) -> Option<u64> {
        Some(self.id.load(Ordering::Relaxed)).filter(|id| *id != 0)
    }

    /// Grants a lease of `seconds`. Returns its id and the time to live that etcd granted, in
    /// seconds.
    pub async fn grant(&self, seconds: u64, wait_max: Duration) -> Result<(u64, u64), EtcdError> {
        let told = self.ask("/v3/lease/grant", json!({ "TTL": seconds.to_string() }), wait_max).await?;
        match (number(&told.body, "ID"), number(&told.body, "TTL")) {
            (Some(id @ 1..), Some(seconds @ 1..)) => Ok((id, seconds)),
            _ => Err(self.nonsense(told.by, "etcd granted a lease without an id or a time to live")),
        }
    }

    /// Renews a lease and returns its time to live, in seconds. The client also checks that the
    /// answering member still leads etcd. For this the client reads `key` with a linearizable read.
    /// The read must be from the same term and must find the key attached to that lease.
    ///
    /// # Errors
    /// Returns [`EtcdError::NoLease`] if the lease has expired, and other errors if the state of
    /// the lease is unknown.
    pub async fn renew(&self, lease: u64, key: &str, wait_max: Duration) -> Result<u64, EtcdError> {
        let renewing = async {
            let told = self.ask("/v3/lease/keepalive", json!({ "ID": lease.to_string() }), wait_max).await?;
            let Some(seconds @ 1..) = number(&told.body["result"], "TTL") else {
                return Err(EtcdError::NoLease);
            };
            let term = term(&told.body["result"]).unwrap_or(told.term);
            let read = self.ask("/v3/kv/range", json!({ "key": encode(key.as_bytes()) }), wait_max).await?;
            let entry = entries(&read.body).into_iter().next();
            match entry {
                _ if term == 0 || term != read.term => Err(self
                    .nonsense(told.by, "the member was no longer etcd's leader when it renewed the lease")),
                Some(entry) if entry.lease == lease => Ok(seconds),
                _ => Err(EtcdError::NoLease),
            }
        };
        self.in_time(self.current(), renewing, wait_max).await
    }

    /// Revokes a lease. Etcd deletes all keys that are attached to the lease.
    pub async fn revoke(&self, lease: u64, wait_max: Duration) -> Result<(), EtcdError> {
        self.ask("/v3/lease/revoke", json!({ "ID": lease.to_string() }), wait_max).await.map(drop)
    }

    /// Reads these keys at one revision. Keys that do not exist are left out.
    pub async fn get(&self, keys: &[&str], wait_max: Duration) -> Result<Vec<EtcdEntry>, EtcdError> {
        let ranges = keys.iter().map(|key| json!({ "request_range": { "key": encode(key.as_bytes()) } }));
        let told = self.ask("/v3/kv/txn", json!({ "success": ranges.collect::<Vec<_>>() }), wait_max).await?;
        let responses = told.body["responses"].as_array().cloned().unwrap_or_default();
        Ok(responses.iter().flat_map(|response| entries(&response["response_range"])).collect())
    }

    /// Lists all keys that begin with `prefix`, by name, in pages. The list may miss changes made
    /// during the listing.
    pub async fn list(&self, prefix: &str, wait_max: Duration) -> Result<Vec<EtcdEntry>, EtcdError> {
        let Some(end) = after(prefix) else {
            return Err(self.nonsense(self.at.load(Ordering::Relaxed), "no key can follow this prefix"));
        };
        let (mut all, mut from) = (Vec::new(), prefix.as_bytes().to_vec());
        loop {
            let range =
                json!({ "key": encode(&from), "range_end": encode(&end), "limit": PAGE_KEYS.to_string() });
            let told = self.ask("/v3/kv/range", range, wait_max).await?;
            let page = entries(&told.body);
            let last = page.last().map(|entry| entry.key.clone());
            all.extend(page);
            match last {
                Some(last)
                    if told.body["more"] == Value::Bool(true) && last.as_bytes() >= from.as_slice() =>
                {
                    from = last.into_bytes();
                    from.push(0);
                }
                _ => return Ok(all),
            }
        }
    }

    /// Makes the changes if all conditions hold, and returns the revision.
    ///
    /// # Errors
    /// Returns an [`EtcdError`] if the result is unknown or etcd refused the transaction. The
    /// changes may have been made, unless the error is [`EtcdError::Refused`] or
    /// [`EtcdError::NoLease`].
    pub async fn txn(
        &self,
        conditions: &[(String, EtcdIs)],
        changes: &[EtcdChange],
        wait_max: Duration,
    ) -> Result<Option<u64>, EtcdError> {
        let compare: Vec<Value> = conditions.iter().map(|(key, is)| compare(key, *is)).collect();
        let success: Vec<Value> = changes.iter().map(operation).collect();
        let told =
            self.ask("/v3/kv/txn", json!({ "compare": compare, "success": success }), wait_max).await?;
        match told.body["succeeded"] {
            Value::Bool(true) if told.revision > 0 => Ok(Some(told.revision)),
            Value::Bool(true) => {
                Err(self.nonsense(told.by, "etcd's response to a transaction has no revision"))
            }
            _ => Ok(None),
        }
    }

    /// Sends a request to etcd. If it fails, the next request uses another endpoint.
    async fn ask(&self, path: &str, question: Value, wait_max: Duration) -> Result<EtcdResponse, EtcdError> {
        let by = self.current();
        let told = self.in_time(by, self.ask_one(by, path, &question), wait_max).await;
        if let Err(EtcdError::Lost { .. } | EtcdError::Refused { .. }) = told {
            self.next(by);
        }
        told
    }

    /// Waits for an answer of endpoint `by`. Without an answer in time, the next request uses
    /// another endpoint.
    async fn in_time<T>(
        &self,
        by: usize,
        work: impl Future<Output = Result<T, EtcdError>>,
        wait_max: Duration,
    ) -> Result<T, EtcdError> {
        match tokio::time::timeout(wait_max, work).await {
            Ok(done) => done,
            Err(_) => {
                self.next(by);
                Err(self.nonsense(by, format!("no answer within {} ms", wait_max.as_millis())))
            }
        }
    }

    /// Returns the number of the endpoint that the next request uses.
    fn current(&self) -> usize {
        self.at.load(Ordering::Relaxed) % self.endpoints.len()
    }

    fn next(&self, after: usize) {
        let next = (after + 1) % self.endpoints.len();
        let _ = self.at.compare_exchange(after, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    async fn ask_one(&self, by: usize, path: &str, question: &Value) -> Result<EtcdResponse, EtcdError> {
        let (answer, _driver) = self.exchange(by, path, question.to_string(), &[]).await?;
        let is_success = answer.status().is_success();
        let bytes = self.collect(by, answer).await?;
        let body: Value = serde_json::from_slice(&bytes)
            .map_err(|_| self.nonsense(by, "the response is not JSON; check that the endpoint is etcd"))?;
        if !is_success {
            return Err(self.refused(by, &body));
        }
        let header = if body["header"].is_object() { &body } else { &body["result"] };
        if let Some(id) = number(&header["header"], "cluster_id") {
            self.id.store(id, Ordering::Relaxed);
        }
        let (term, revision) =
            (term(header).unwrap_or(0), number(&header["header"], "revision").unwrap_or(0));
        Ok(EtcdResponse { term, revision, by, body })
    }

    /// Connects, sends a request, and returns the head of the response.
    async fn exchange(
        &self,
        by: usize,
        path: &str,
        question: String,
        headers: &[(&str, &str)],
    ) -> Result<(Response<Incoming>, Driver), EtcdError> {
        let endpoint = &self.endpoints[by];
        let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port))
            .await
            .map_err(|error| self.nonsense(by, error))?;
        let _ = stream.set_nodelay(true);
        keep_alive(&stream);
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(path)
            .header(HOST, format!("{}:{}", endpoint.host, endpoint.port))
            .header(CONTENT_TYPE, "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request =
            request.body(Full::new(Bytes::from(question))).map_err(|error| self.nonsense(by, error))?;
        let answered = match (&self.tls, endpoint.tls) {
            (_, false) => connection::exchange(stream, request).await,
            (Some(tls), true) => {
                let stream = tls.connect(&endpoint.host, stream).await;
                connection::exchange(stream.map_err(|error| self.nonsense(by, error))?, request).await
            }
            (None, true) => {
                let why = "the endpoint uses TLS, and no CA certificate is configured";
                return Err(self.nonsense(by, why));
            }
        };
        answered.map_err(|error| self.nonsense(by, error))
    }

    async fn collect(&self, by: usize, answer: Response<Incoming>) -> Result<Bytes, EtcdError> {
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        Ok(body.map_err(|error| self.nonsense(by, error))?.to_bytes())
    }

    fn refused(&self, by: usize, body: &Value) -> EtcdError {
        let said = |name| body[name].as_str().filter(|text| !text.is_empty());
        let why = said("message").or_else(|| said("error")).unwrap_or("etcd gave no reason");
        if why.contains("lease not found") {
            return EtcdError::NoLease;
        }
        EtcdError::Refused { endpoint: self.endpoints[by].to_string(), why: why.chars().take(200).collect() }
    }

    fn nonsense(&self, by: usize, why: impl ToString) -> EtcdError {
        let by = by % self.endpoints.len();
        EtcdError::Lost { endpoint: self.endpoints[by].to_string(), why: why.to_string() }
    }
}

/// Enables TCP keepalive, so that a long response ends if the other host fails.
fn keep_alive(stream: &TcpStream) {
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, KEEP_ALIVE_EVERY);
    let _ = sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE_EVERY);
    let _ = sockopt::set_tcp_keepcnt(stream, 3);
}

fn compare(key: &str, is: EtcdIs) -> Value {
    let mut compare = Map::new();
    compare.insert("key".to_owned(), encode(key.as_bytes()).into());
    compare.insert("result".to_owned(), "EQUAL".into());
    let (target, field, number) = match is {
        EtcdIs::Absent => ("CREATE", "create_revision", 0),
        EtcdIs::At(revision) => ("MOD", "mod_revision", revision),
        EtcdIs::Under(lease) => ("LEASE", "lease", lease),
    };
    compare.insert("target".to_owned(), target.into());
    compare.insert(field.to_owned(), number.to_string().into());
    Value::Object(compare)
}

fn operation(change: &EtcdChange) -> Value {
    match change {
        EtcdChange::Put(key, value, lease) => json!({ "request_put": {
            "key": encode(key.as_bytes()), "value": encode(value), "lease": lease.to_string(),
        } }),
        EtcdChange::Delete(key) => json!({ "request_delete_range": { "key": encode(key.as_bytes()) } }),
    }
}

/// Parses the entries of a range response, and skips malformed ones.
fn entries(range: &Value) -> Vec<EtcdEntry> {
    let all = range["kvs"].as_array().map_or(&[][..], Vec::as_slice);
    let entry = |kv: &Value| {
        let text = |name| decode(kv[name].as_str().unwrap_or_default());
        Some(EtcdEntry {
            key: String::from_utf8(text("key")?).ok()?,
            value: text("value")?,
            revision: number(kv, "mod_revision")?,
            lease: number(kv, "lease").unwrap_or(0),
        })
    };
    all.iter().filter_map(entry).collect()
}

fn term(of: &Value) -> Option<u64> {
    number(&of["header"], "raft_term")
}

/// Parses a 64-bit number. Etcd's JSON has these as strings, and leaves out zeros.
fn number(of: &Value, name: &str) -> Option<u64> {
    match &of[name] {
        Value::String(text) => text.parse().ok(),
        Value::Number(number) => number.as_u64(),
        _ => None,
    }
}

/// Returns the first key after all keys that begin with `prefix`.
fn after(prefix: &str) -> Option<Vec<u8>> {
    let mut end = prefix.as_bytes().to_vec();
    *end.last_mut()? += 1;
    Some(end)
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Encodes bytes as base64 (RFC 4648), the form of bytes in etcd's JSON.
fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for some in bytes.chunks(3) {
        let mut word = [0; 3];
        word[..some.len()].copy_from_slice(some);
        let bits = u32::from_be_bytes([0, word[0], word[1], word[2]]);
        for digit in 0..4 {
            match digit <= some.len() {
                true => text.push(DIGITS[(bits >> (18 - 6 * digit) & 63) as usize] as char),
                false => text.push('='),
            }
        }
    }
    text
}

/// Decodes base64; `None` if the text is malformed.
fn decode(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let digits = text.trim_end_matches('=');
    if text.len() - digits.len() > 2 {
        return None;
    }
    let (mut bytes, mut bits, mut count) = (Vec::with_capacity(digits.len() * 3 / 4), 0u32, 0);
    for digit in digits.bytes() {
        let value = DIGITS.iter().position(|known| *known == digit)?;
        bits = bits << 6 | value as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests;
