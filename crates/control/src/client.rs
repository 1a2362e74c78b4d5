//! Client of the control API. The client opens one HTTP/1.1 connection per request, over a Unix
//! socket, or over TCP with TLS.
//!
//! The file client.rs sends requests and reads responses. The files in `client/` list the requests,
//! one row for each; the macro in `requests.rs` turns a row into a method.

mod cluster;
mod disks;
mod pools;
mod qos;
mod requests;
mod tasks;

use std::io;
use std::path::Path;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use hyper::{Method, Request, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, timeout};

use crate::connection::{self, Driver};
use crate::tls;
use crate::{ClientTls, Endpoint, Problem, TraceDecoder, TraceFrame};

/// Longest response body that the client reads, bytes.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Longest wait for a response, seconds. The daemon's own limits are shorter.
const ANSWER_SECONDS_MAX: u64 = 60;

/// Time without a response after which a client [with a liveness check](Client::with_liveness_check)
/// makes the check.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// Longest wait for the response to a liveness check.
const CHECK_MAX: Duration = Duration::from_secs(7);

/// Longest time that the client waits for a place in the queue of the daemon's Unix socket.
const QUEUE_WAIT_MAX: Duration = Duration::from_secs(5);

/// Interval between two attempts to get a place in the queue of the daemon's Unix socket.
const QUEUE_CHECK_EVERY: Duration = Duration::from_millis(20);

/// Why a request of the client failed. Each variant needs a different reaction of the caller.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon accepts connections at this address: start the daemon, or name another socket.
    #[error("cannot reach the daemon at {endpoint}: {source}")]
    Unreachable {
        /// The daemon's address.
        endpoint: Endpoint,
        /// Why the connection failed.
        source: io::Error,
    },
    /// The address is on TCP and the client has no TLS settings: name the CA of the daemon's
    /// certificate.
    #[error("{endpoint} is a TCP address, and over TCP the daemon accepts only TLS")]
    NoTls {
        /// The daemon's address.
        endpoint: Endpoint,
    },
    /// The TLS handshake failed: one side does not trust the other's certificate.
    #[error("the TLS handshake with the daemon at {endpoint} failed: {why}")]
    Untrusted {
        /// The daemon's address.
        endpoint: Endpoint,
        /// Why the handshake failed.
        why: String,
    },
    /// The daemon refused the request.
    #[error("{problem}")]
    Refused {
        /// HTTP status of the response.
        status: u16,
        /// The daemon's error.
        problem: Problem,
    },
    /// The server's response does not follow the control API.
    #[error("the response of {endpoint} does not follow hob's API: {what}")]
    Garbled {
        /// The daemon's address.
        endpoint: Endpoint,
        /// The wrong part of the response.
        what: String,
    },
    /// The connection ended before the response was complete: the daemon was stopped or killed.
    #[error("{endpoint} closed the connection; the daemon was stopped or has failed")]
    BrokeOff {
        /// The daemon's address.
        endpoint: Endpoint,
    },
    /// The daemon sent no response in time: it is stopped by a signal, hangs, or is overloaded.
    #[error("the daemon at {endpoint} has not answered for {seconds} s")]
    TimedOut {
        /// The daemon's address.
        endpoint: Endpoint,
        /// Time that the client waited, seconds.
        seconds: u64,
    },
}

/// Client of one daemon. The client opens a connection for each request.
#[derive(Clone, Debug)]
pub struct Client {
    endpoint: Endpoint,
    token: Option<String>,
    tls: Option<ClientTls>,
    liveness_check: Option<LivenessCheck>,
}

/// When a client checks that the daemon answers at all.
#[derive(Clone, Copy, Debug)]
struct LivenessCheck {
    /// Time that a request has no response before the check.
    silence_max: Duration,
    /// Longest wait for the response to the check.
    check_max: Duration,
}

impl Client {
    /// Creates a client of the daemon at `endpoint`. TCP needs a token, or a certificate [with
    /// TLS](Self::with_tls).
    pub fn new(endpoint: Endpoint, token: Option<String>) -> Client {
        Client { endpoint, token, tls: None, liveness_check: None }
    }

    /// Adds TLS settings to the client. A connection over TCP needs TLS settings.
    #[must_use]
    pub fn with_tls(self, tls: ClientTls) -> Client {
        Client { tls: Some(tls), ..self }
    }

    /// Makes requests that change nothing fail if the daemon does not answer at all: if such a
    /// request has no response after 5 s, the client asks for the daemon's version. If neither has a
    /// response within 7 s more, the request fails with [`ClientError::TimedOut`]. Otherwise the client
    /// waits for up to 60 s, as for requests that change something.
    #[must_use]
    pub fn with_liveness_check(self) -> Client {
        let check = LivenessCheck { silence_max: SILENCE_MAX, check_max: CHECK_MAX };
        Client { liveness_check: Some(check), ..self }
    }

    /// Address of the daemon.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Starts recording a disk's requests.
    pub async fn trace(&self, disk: &str) -> Result<Trace, ClientError> {
        let path = format!("{}/trace", disk_path(disk));
        let (answer, driver) = self.in_time(self.ask(Method::GET, &path, Vec::new())).await?;
        Ok(Trace {
            client: self.clone(),
            body: answer.into_body(),
            decoder: TraceDecoder::default(),
            over: false,
            _driver: driver,
        })
    }

    async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        let body = match body {
            Some(body) => serde_json::to_vec(body).map_err(|error| self.garbled(error))?,
            None => Vec::new(),
        };
        let answer = self.answer_to(method, path, body).await?;
        serde_json::from_slice(&answer).map_err(|error| self.garbled(error))
    }

    /// Returns the body of the response to a request.
    async fn answer_to(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Bytes, ClientError> {
        let check = self.liveness_check.filter(|_| method == Method::GET);
        // The exchange is on the heap, because the futures of long commands contain many of them.
        let exchange = Box::pin(async {
            let (answer, _driver) = self.ask(method, path, body).await?;
            self.collect(answer).await
        });
        match check {
            Some(check) => self.in_time(Box::pin(self.checked(check, exchange))).await,
            None => self.in_time(exchange).await,
        }
    }

    /// Waits for a response. If there is none for some time, checks that the daemon answers another
    /// request.
    async fn checked<T>(
        &self,
        check: LivenessCheck,
        mut work: impl Future<Output = Result<T, ClientError>> + Unpin,
    ) -> Result<T, ClientError> {
        let LivenessCheck { silence_max, check_max } = check;
        if let Ok(result) = timeout(silence_max, &mut work).await {
            return result;
        }
        let version = self.ask(Method::GET, "/v1/version", Vec::new());
        let answers = tokio::select! {
            biased;
            result = &mut work => return result,
            version = timeout(check_max, version) => version.is_ok(),
        };
        if answers { work.await } else { Err(self.timed_out(silence_max + check_max)) }
    }

    /// Waits for a response for at most `ANSWER_SECONDS_MAX`.
    pub(crate) async fn in_time<T>(
        &self,
        work: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        let limit = Duration::from_secs(ANSWER_SECONDS_MAX);
        timeout(limit, work).await.map_err(|_| self.timed_out(limit))?
    }

    /// Connects, sends a request, and returns the response without its body. A response with an
    /// error status becomes an error.
    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<(Response<Incoming>, Driver), ClientError> {
        let json = (CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let headers = if body.is_empty() { Vec::new() } else { vec![json] };
        let (answer, driver) = self.exchange(method, path, headers, Bytes::from(body)).await?;
        let status = answer.status();
        if status.is_success() {
            return Ok((answer, driver));
        }
        match serde_json::from_slice::<Problem>(&self.collect(answer).await?) {
            Ok(problem) => Err(ClientError::Refused { status: status.as_u16(), problem }),
            Err(_) => Err(self.garbled(format!("HTTP status {status}"))),
        }
    }

    /// Connects, sends a request, and returns the head of the response.
    pub(crate) async fn exchange(
        &self,
        method: Method,
        path: &str,
        headers: Vec<(HeaderName, HeaderValue)>,
        body: Bytes,
    ) -> Result<(Response<Incoming>, Driver), ClientError> {
        let mut request = Request::builder().method(method).uri(path).header(HOST, self.host());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(Full::new(body)).map_err(|error| self.garbled(error))?;
        match &self.endpoint {
            Endpoint::Unix(socket) => {
                let stream = connect_unix(socket).await.map_err(|error| self.unreachable(error))?;
                self.exchange_over(stream, request).await
            }
            Endpoint::Tcp { host, port } => {
                let no_tls = || ClientError::NoTls { endpoint: self.endpoint.clone() };
                let tls = self.tls.as_ref().ok_or_else(no_tls)?;
                let stream = TcpStream::connect((host.as_str(), *port))
                    .await
                    .map_err(|error| self.unreachable(error))?;
                let stream = tls.connect(host, stream).await.map_err(|error| self.untrusted(&error))?;
                self.exchange_over(stream, request).await
            }
        }
    }

    async fn exchange_over(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        request: Request<Full<Bytes>>,
    ) -> Result<(Response<Incoming>, Driver), ClientError> {
        connection::exchange(stream, request).await.map_err(|error| self.failed(error))
    }

    async fn collect(&self, answer: Response<Incoming>) -> Result<Bytes, ClientError> {
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| {
            let has_ended = error.downcast_ref::<hyper::Error>().is_some_and(has_ended);
            if has_ended { self.broke_off() } else { self.garbled(error) }
        })?;
        Ok(body.to_bytes())
    }

    fn host(&self) -> String {
        let endpoint = self.endpoint.to_string();
        endpoint.strip_prefix("tcp:").unwrap_or("hob").to_owned()
    }

    /// Returns why an HTTP exchange failed: no trust in a TLS certificate, a connection that ended
    /// early, or an invalid response.
    fn failed(&self, error: hyper::Error) -> ClientError {
        match tls::cause(&error) {
            Some(why) => ClientError::Untrusted { endpoint: self.endpoint.clone(), why },
            None if has_ended(&error) => self.broke_off(),
            None => self.garbled(error),
        }
    }

    fn untrusted(&self, error: &io::Error) -> ClientError {
        ClientError::Untrusted { endpoint: self.endpoint.clone(), why: error.to_string() }
    }

    fn unreachable(&self, source: io::Error) -> ClientError {
        ClientError::Unreachable { endpoint: self.endpoint.clone(), source }
    }

    fn timed_out(&self, after: Duration) -> ClientError {
        ClientError::TimedOut { endpoint: self.endpoint.clone(), seconds: after.as_secs() }
    }

    fn broke_off(&self) -> ClientError {
        ClientError::BrokeOff { endpoint: self.endpoint.clone() }
    }

    fn garbled(&self, what: impl ToString) -> ClientError {
        ClientError::Garbled { endpoint: self.endpoint.clone(), what: what.to_string() }
    }
}

/// Connects to a Unix socket. Waits for a place in the socket's queue if the queue is full.
async fn connect_unix(socket: &Path) -> io::Result<UnixStream> {
    let end = Instant::now() + QUEUE_WAIT_MAX;
    loop {
        match UnixStream::connect(socket).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                tokio::time::sleep(QUEUE_CHECK_EVERY).await;
            }
            result => return result,
        }
    }
}

/// Returns true if the connection ended before the response was complete.
fn has_ended(error: &hyper::Error) -> bool {
    let is_io = std::error::Error::source(error).is_some_and(|cause| cause.is::<io::Error>());
    error.is_incomplete_message() || error.is_closed() || error.is_canceled() || is_io
}

/// A running recording of a disk's requests. Dropping this handle ends the recording.
#[derive(Debug)]
pub struct Trace {
    client: Client,
    body: Incoming,
    decoder: TraceDecoder,
    over: bool,
    _driver: Driver,
}

impl Trace {
    /// Returns the next frame of the recording; `None` when the disk was removed. The future can be
    /// dropped without losing a frame.
    pub async fn next(&mut self) -> Result<Option<TraceFrame>, ClientError> {
        while !self.over {
            if let Some(frame) = self.decoder.poll_frame().map_err(|error| self.client.garbled(error))? {
                self.over = frame.is_last;
                return Ok(Some(frame));
            }
            let broke_off = || self.client.broke_off();
            let piece = self.client.in_time(async { Ok(self.body.frame().await) }).await?;
            let piece = piece.ok_or_else(broke_off)?.map_err(|_| broke_off())?;
            if let Ok(bytes) = piece.into_data() {
                self.decoder.handle_input(&bytes);
            }
        }
        Ok(None)
    }
}

fn disk_path(disk: &str) -> String {
    format!("/v1/disks/{}", percent_encode(disk))
}

/// Percent-encodes every byte that has a meaning in a URI. Names of only dots are encoded too,
/// because `..` names a parent path.
pub(crate) fn percent_encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'~' | b'.') {
            encoded.push(byte as char);
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    if encoded.bytes().all(|byte| byte == b'.') { encoded.replace('.', "%2E") } else { encoded }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[test]
    fn names_cannot_leave_their_place_in_the_path() {
        assert_eq!(disk_path("vm-1.a"), "/v1/disks/vm-1.a");
        assert_eq!(disk_path("a/b?c d%ä"), "/v1/disks/a%2Fb%3Fc%20d%25%C3%A4");
        assert_eq!(disk_path(".."), "/v1/disks/%2E%2E");
    }

    #[test]
    fn an_unreachable_daemon_is_reported_with_the_address() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let endpoint = Endpoint::Unix("/nonexistent/hob.sock".into());
        let error = runtime.block_on(Client::new(endpoint, None).version()).unwrap_err();
        assert!(error.to_string().contains("unix:/nonexistent/hob.sock"), "{error}");
    }

    #[test]
    fn a_connection_waits_for_a_place_in_a_full_queue() {
        let path = std::env::temp_dir().join(format!("hob-full-queue-{}", std::process::id()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let socket = tokio::net::UnixSocket::new_stream().unwrap();
            socket.bind(&path).unwrap();
            let listener = socket.listen(1).unwrap();
            let mut queued = Vec::new();
            let full = loop {
                match UnixStream::connect(&path).await {
                    Ok(stream) => queued.push(stream),
                    Err(error) => break error,
                }
            };
            assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
            let accept = async {
                tokio::time::sleep(3 * QUEUE_CHECK_EVERY).await;
                listener.accept().await.unwrap()
            };
            let (connected, _accepted) = tokio::join!(connect_unix(&path), accept);
            connected.unwrap();
        });
        std::fs::remove_file(&path).unwrap();
    }

    /// A liveness check with short limits.
    const EARLY: LivenessCheck =
        LivenessCheck { silence_max: Duration::from_millis(200), check_max: Duration::from_millis(500) };

    fn client_with_early_check(socket: &Path) -> Client {
        let client = Client::new(Endpoint::Unix(socket.to_owned()), None);
        Client { liveness_check: Some(EARLY), ..client }
    }

    /// The kernel accepts connections for a daemon that SIGSTOP has stopped.
    #[test]
    fn a_daemon_that_answers_nothing_fails_a_query_soon_and_a_change_late() {
        let path = std::env::temp_dir().join(format!("hob-silent-{}", std::process::id()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let _listener = tokio::net::UnixListener::bind(&path).unwrap();
            let client = client_with_early_check(&path);
            let error = client.health().await.unwrap_err();
            assert!(matches!(error, ClientError::TimedOut { .. }), "{error}");
            let long = 3 * (EARLY.silence_max + EARLY.check_max);
            assert!(timeout(long, client.drain_stop("vm")).await.is_err());
            let without_check = Client { liveness_check: None, ..client };
            assert!(timeout(long, without_check.health()).await.is_err());
        });
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_query_may_take_long_while_the_daemon_answers_the_liveness_check() {
        let path = std::env::temp_dir().join(format!("hob-slow-query-{}", std::process::id()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::UnixListener::bind(&path).unwrap();
            // One connection of the query, and one of the check.
            let daemon = tokio::spawn(async move {
                for _ in 0..2 {
                    let (mut stream, _) = listener.accept().await.unwrap();
                    tokio::spawn(async move {
                        let mut request = [0; 4096];
                        let length = stream.read(&mut request).await.unwrap();
                        if !request[..length].starts_with(b"GET /v1/version ") {
                            tokio::time::sleep(2 * (EARLY.silence_max + EARLY.check_max)).await;
                        }
                        let answer = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]";
                        stream.write_all(answer.as_bytes()).await.unwrap();
                    });
                }
            });
            let disks = client_with_early_check(&path).disks().await.unwrap();
            assert!(disks.is_empty());
            daemon.await.unwrap();
        });
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_daemon_that_is_killed_during_a_request_is_no_protocol_error() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let client = Client::new(Endpoint::Unix("/run/hob/control.sock".into()), None);
        for answer in ["", "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"] {
            let (near, mut far) = tokio::io::duplex(4096);
            let request = Request::builder().uri("/v1/version").header(HOST, "hob");
            let request = request.body(Full::new(Bytes::new())).unwrap();
            let asked = async {
                let (answer, _driver) = client.exchange_over(near, request).await?;
                client.collect(answer).await
            };
            let daemon = async move {
                let mut request = [0; 4096];
                assert!(far.read(&mut request).await.unwrap() > 0);
                far.write_all(answer.as_bytes()).await.unwrap();
            };
            let (result, ()) = runtime.block_on(async { tokio::join!(asked, daemon) });
            let error = result.unwrap_err();
            assert!(matches!(error, ClientError::BrokeOff { .. }), "{answer:?}: {error}");
        }
    }
}
