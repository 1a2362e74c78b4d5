//! Conversion of requests into types, and of results into responses.

use std::io;

use axum::RequestExt;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{FromRequest, Path, Query, Request};
use axum::http::header::{CONNECTION, CONTENT_TYPE, UPGRADE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use hob_control::peer::DATA_PROTOCOL;
use hob_control::{Problem, Size, without_error_numbers, without_type_names};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api_error::{ApiError, ErrorKind, Result};
use crate::background::spawn;

/// A JSON body of type `T`, whatever the content type is.
pub(super) struct Body<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Answer<()>;

    async fn from_request(request: Request, state: &S) -> Result<Body<T>, Answer<()>> {
        let bytes = axum::body::Bytes::from_request(request, state).await.map_err(|error| match error {
            BytesRejection::FailedToBufferBody(_) if error.status() == StatusCode::PAYLOAD_TOO_LARGE => {
                let most = Size(super::BODY_BYTES_MAX as u64).human();
                Answer::no(StatusCode::PAYLOAD_TOO_LARGE, format!("a request body has at most {most}"))
            }
            _ => Answer::no(
                StatusCode::BAD_REQUEST,
                "the client disconnected before the end of the request body",
            ),
        })?;
        let mut deserializer = serde_json::Deserializer::from_slice(&bytes);
        T::deserialize(&mut deserializer).and_then(|value| deserializer.end().map(|()| Body(value))).map_err(
            |error| {
                let what = without_type_names(&error.to_string(), "an object");
                Answer::no(StatusCode::BAD_REQUEST, format!("the request body is invalid: {what}"))
            },
        )
    }
}

/// The query parameters of a request.
pub(super) trait Form: DeserializeOwned {
    /// Error message for invalid parameters. It names the parameters that the request may have.
    const ALLOWED: &'static str;
}

/// Returns the query parameters of a request.
pub(super) fn parameters<T: Form>(request: &Request) -> Result<T, Answer<()>> {
    match Query::try_from_uri(request.uri()) {
        Ok(Query(form)) => Ok(form),
        Err(_) => Err(Answer::no(StatusCode::BAD_REQUEST, T::ALLOWED)),
    }
}

/// Returns the parameters in the path of a request.
pub(super) async fn path<T>(request: &mut Request) -> Result<T, Answer<()>>
where
    T: DeserializeOwned + Send + 'static,
{
    let found: Result<Path<T>, PathRejection> = request.extract_parts().await;
    match found {
        Ok(Path(parts)) => Ok(parts),
        Err(rejection) => Err(Answer::no(rejection.status(), rejection.body_text())),
    }
}

/// Returns the JSON body of a request.
pub(super) async fn body<T: DeserializeOwned>(request: Request) -> Result<T, Answer<()>> {
    Body::from_request(request, &()).await.map(|Body(value)| value)
}

/// Returns the response to a request: the result of its handler, or why the request is invalid.
pub(super) fn respond<T: Serialize>(answer: Result<Result<T>, Answer<()>>) -> Response {
    match answer {
        Ok(result) => Answer::from(result).into_response(),
        Err(refusal) => refusal.into_response(),
    }
}

/// The connection of a request that asks to switch to [`DATA_PROTOCOL`].
pub(super) struct DataConnection(OnUpgrade);

impl<S: Send + Sync> FromRequest<S> for DataConnection {
    type Rejection = Answer<()>;

    async fn from_request(mut request: Request, _: &S) -> Result<DataConnection, Answer<()>> {
        let protocol = request.headers().get(UPGRADE);
        if protocol.is_none_or(|protocol| protocol.as_bytes() != DATA_PROTOCOL.as_bytes()) {
            let said = format!("a data connection needs the header 'Upgrade: {DATA_PROTOCOL}'");
            return Err(Answer::no(StatusCode::UPGRADE_REQUIRED, said));
        }
        Ok(DataConnection(hyper::upgrade::on(&mut request)))
    }
}

impl DataConnection {
    /// Accepts the protocol switch. Calls `speak` with the connection after the response, or with
    /// an error.
    pub(super) fn switch<F>(
        self,
        speak: impl FnOnce(io::Result<TokioIo<Upgraded>>) -> F + Send + 'static,
    ) -> Response
    where
        F: Future<Output = ()> + Send,
    {
        spawn(async move {
            speak(self.0.await.map(TokioIo::new).map_err(io::Error::other)).await;
        });
        let headers = [
            (CONNECTION, HeaderValue::from_static("upgrade")),
            (UPGRADE, HeaderValue::from_static(DATA_PROTOCOL)),
        ];
        (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
    }
}

/// A response: a value, or a problem with its HTTP status.
pub(super) enum Answer<T> {
    /// Success, with status 200.
    Yes(T),
    /// Failure, with another status.
    No(StatusCode, Problem),
}

impl Answer<()> {
    /// Creates a failure with this status and error message, without a hint.
    pub(super) fn no(status: StatusCode, error: impl Into<String>) -> Answer<()> {
        Answer::No(status, Problem::new(error))
    }
}

impl<T> From<Result<T>> for Answer<T> {
    fn from(result: Result<T>) -> Answer<T> {
        match result {
            Ok(value) => Answer::Yes(value),
            Err(ApiError { kind, problem }) => Answer::No(status_of(kind), problem),
        }
    }
}

fn status_of(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::Invalid => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorKind::Conflict => StatusCode::CONFLICT,
        ErrorKind::Busy => StatusCode::SERVICE_UNAVAILABLE,
        ErrorKind::Failed => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl<T: Serialize> IntoResponse for Answer<T> {
    fn into_response(self) -> Response {
        match self {
            Answer::Yes(value) => json(StatusCode::OK, &value),
            Answer::No(status, problem) => json(status, &problem),
        }
    }
}

/// Returns a response with a value as JSON. Removes the numbers of system errors from its texts.
/// All errors that the daemon reports to users pass through this function.
fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_string(value) {
        Ok(text) => {
            let headers = [(CONTENT_TYPE, HeaderValue::from_static("application/json"))];
            (status, headers, without_error_numbers(&text).into_owned()).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
