//! Forwards requests of other clients unchanged. The response's status, headers and body are
//! returned unchanged, too.

use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{HeaderName, HeaderValue};
use hyper::{Method, Response};

use crate::client::{Client, ClientError};
use crate::connection::Driver;

/// Body of a response, read as a stream. Dropping this value closes the connection.
#[derive(Debug)]
pub struct Forwarded {
    body: Incoming,
    _driver: Driver,
}

impl Client {
    /// Forwards a request with this client's credentials, and returns the response for every
    /// status. The response's body is not read yet.
    ///
    /// # Errors
    /// Returns an error if the other daemon does not respond.
    pub async fn forward(
        &self,
        method: Method,
        path_and_query: &str,
        headers: Vec<(HeaderName, HeaderValue)>,
        body: Bytes,
    ) -> Result<Response<Forwarded>, ClientError> {
        let (answer, driver) = self.in_time(self.exchange(method, path_and_query, headers, body)).await?;
        Ok(answer.map(|body| Forwarded { body, _driver: driver }))
    }
}

impl Body for Forwarded {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
