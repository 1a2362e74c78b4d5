//! Calls from one daemon to another: requests over a persistent connection, and connections
//! upgraded to carry data.
//!
//! Connections use TLS with client certificates. A failed call closes the connection, and the next
//! call opens a new one. A failed call may have been executed by the peer.

use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper::header::{CONNECTION, CONTENT_TYPE, HOST, UPGRADE};
use hyper::http::request::Builder;
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;

use crate::client::percent_encode;
use crate::connection::{self, Driver};
use crate::{CallAnswer, CarrySession, ClientTls, Problem};

/// Name of the protocol of an upgraded data connection.
pub const DATA_PROTOCOL: &str = "hob-nbd/1";

/// Longest time to connect to the peer.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Longest response to a call, bytes.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Why a call to a peer failed.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The call or its response was lost.
    #[error("{0}")]
    Lost(String),
    /// The peer refused the call.
    #[error("{status}: {problem}")]
    Refused {
        /// HTTP status of the response.
        status: u16,
        /// Error that the peer reported.
        problem: Problem,
    },
}

/// Client of another host's daemon. Dropping this value closes its connection.
#[derive(Debug)]
pub struct Peer {
    host: String,
    port: u16,
    tls: ClientTls,
    kept: Option<(SendRequest<Full<Bytes>>, Driver)>,
}

/// Returns the path of a call that concerns a disk.
pub fn call_path(disk: &str, call: &str, session: &CarrySession, more: &str) -> String {
    let CarrySession { generation, attempt, lineage } = session;
    let disk = percent_encode(disk);
    let lineage = percent_encode(lineage);
    format!(
        "/v1/disks/{disk}/arrival/{call}?generation={generation}&attempt={attempt}&lineage={lineage}{more}"
    )
}

impl Peer {
    /// Creates a client of the daemon whose control API is at `host` and `port`.
    pub fn new(host: String, port: u16, tls: ClientTls) -> Peer {
        Peer { host, port, tls, kept: None }
    }

    /// Sends a call, and waits for the response for at most `wait_max`.
    pub async fn call(
        &mut self,
        path: &str,
        body: Vec<u8>,
        wait_max: Duration,
    ) -> Result<CallAnswer, PeerError> {
        let called = tokio::time::timeout(wait_max, self.call_now(path, body)).await;
        let answer = called.unwrap_or_else(|_| {
            Err(PeerError::Lost(format!("{} did not answer within {wait_max:?}", self.host)))
        });
        if answer.is_err() {
            self.kept = None;
        }
        answer
    }

    async fn call_now(&mut self, path: &str, body: Vec<u8>) -> Result<CallAnswer, PeerError> {
        if self.kept.as_ref().is_none_or(|(sender, _)| sender.is_closed()) {
            self.kept = Some(self.connect().await?);
        }
        let request = self.request(path).header(CONTENT_TYPE, "application/octet-stream");
        let Some((sender, _)) = &mut self.kept else { return Err(lost("not connected")) };
        sender.ready().await.map_err(lost)?;
        serde_json::from_slice(&answer(sender, request, body).await?).map_err(lost)
    }

    /// Sends one request over a new connection, and waits for the response for at most `wait_max`.
    pub async fn ask<Q: Serialize + Sync, A: DeserializeOwned>(
        &self,
        path: &str,
        question: &Q,
        wait_max: Duration,
    ) -> Result<A, PeerError> {
        let body = serde_json::to_vec(question).map_err(lost)?;
        let asking = async {
            let (mut sender, _driver) = self.connect().await?;
            let request = self.request(path).header(CONTENT_TYPE, "application/json");
            answer(&mut sender, request, body).await
        };
        let bytes = tokio::time::timeout(wait_max, asking)
            .await
            .unwrap_or_else(|_| Err(lost(format!("{} does not answer within {wait_max:?}", self.host))))?;
        serde_json::from_slice(&bytes).map_err(lost)
    }

    /// Opens a new connection for data. The path decides which side is the NBD server.
    pub async fn data(&self, path: &str) -> Result<TokioIo<Upgraded>, PeerError> {
        let opening = async {
            let (mut sender, driver) = self.connect().await?;
            let request = self.request(path).header(CONNECTION, "upgrade").header(UPGRADE, DATA_PROTOCOL);
            let request = request.body(Full::new(Bytes::new())).map_err(lost)?;
            let answer = sender.send_request(request).await.map_err(lost)?;
            let status = answer.status();
            if status != StatusCode::SWITCHING_PROTOCOLS {
                return Err(refused(status, &collect(answer).await?));
            }
            let upgraded = hyper::upgrade::on(answer).await.map_err(lost)?;
            // hyper has released the connection.
            driver.finish();
            Ok(TokioIo::new(upgraded))
        };
        tokio::time::timeout(CONNECT_MAX, opening)
            .await
            .unwrap_or_else(|_| Err(lost(format!("{} does not answer in time", self.host))))
    }

    fn request(&self, path: &str) -> Builder {
        let host = format!("{}:{}", self.host, self.port);
        Request::builder().method(Method::POST).uri(path).header(HOST, host)
    }

    async fn connect(&self) -> Result<(SendRequest<Full<Bytes>>, Driver), PeerError> {
        let connecting = async {
            let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
            // Calls are short and a guest may wait for the response, so Nagle's algorithm is off.
            stream.set_nodelay(true)?;
            self.tls.connect(&self.host, stream).await
        };
        let stream = tokio::time::timeout(CONNECT_MAX, connecting)
            .await
            .map_err(|_| lost("the peer did not answer in time"))
            .and_then(|connected| connected.map_err(lost))
            .map_err(|error| lost(format!("cannot reach {}:{}: {error}", self.host, self.port)))?;
        connection::open(stream).await.map_err(lost)
    }
}

/// Sends a request, and returns the body of the response.
async fn answer(
    sender: &mut SendRequest<Full<Bytes>>,
    request: Builder,
    body: Vec<u8>,
) -> Result<Bytes, PeerError> {
    let request = request.body(Full::new(Bytes::from(body))).map_err(lost)?;
    let answer = sender.send_request(request).await.map_err(lost)?;
    let status = answer.status();
    let bytes = collect(answer).await?;
    match status.is_success() {
        true => Ok(bytes),
        false => Err(refused(status, &bytes)),
    }
}

fn lost(why: impl ToString) -> PeerError {
    PeerError::Lost(why.to_string())
}

fn refused(status: StatusCode, bytes: &[u8]) -> PeerError {
    let problem = serde_json::from_slice(bytes).unwrap_or_else(|_| Problem::new("the peer gave no reason"));
    PeerError::Refused { status: status.as_u16(), problem }
}

async fn collect(answer: Response<Incoming>) -> Result<Bytes, PeerError> {
    Ok(Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await.map_err(lost)?.to_bytes())
}
