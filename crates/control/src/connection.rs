//! The connections of HTTP clients: to daemons, and to etcd.

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

/// A connected socket, with or without TLS. Connections use a boxed socket, because hyper would
/// otherwise be compiled once for each type of socket.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// The task that moves a connection's bytes. Dropping this handle closes the connection.
#[derive(Debug)]
pub(crate) struct Driver(Option<tokio::task::JoinHandle<hyper::Result<()>>>);

impl Driver {
    /// Drops the handle and leaves the connection open. The task ends when the connection ends.
    pub(crate) fn finish(mut self) {
        self.0.take();
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

/// Starts a connection over a connected socket.
pub(crate) async fn open(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> hyper::Result<(SendRequest<Full<Bytes>>, Driver)> {
    let stream: Box<dyn Stream> = Box::new(stream);
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    Ok((sender, Driver(Some(tokio::spawn(connection.with_upgrades())))))
}

/// Sends a request over a connected socket, and returns the head of the response.
pub(crate) async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> hyper::Result<(Response<Incoming>, Driver)> {
    let (mut sender, driver) = open(stream).await?;
    Ok((sender.send_request(request).await?, driver))
}
