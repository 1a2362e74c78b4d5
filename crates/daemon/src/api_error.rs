//! Errors of API requests. Each kind corresponds to one reaction of the client.

use hob_control::Problem;
use hob_storage::backing::OpenError;

use crate::shard_api::ShardError;
use crate::state::StateError;

// Macros that create an error of one kind. Their arguments are those of `format!`.
macro_rules! not_found {
    ($($message:tt)*) => { $crate::api_error::ApiError::not_found(format!($($message)*)) };
}
macro_rules! invalid {
    ($($message:tt)*) => { $crate::api_error::ApiError::invalid(format!($($message)*)) };
}
macro_rules! conflict {
    ($($message:tt)*) => { $crate::api_error::ApiError::conflict(format!($($message)*)) };
}
macro_rules! failed {
    ($($message:tt)*) => { $crate::api_error::ApiError::failed(format!($($message)*)) };
}
pub(crate) use {conflict, failed, invalid, not_found};

/// The result of a request. The error type is [`ApiError`] by default.
pub(crate) type Result<T, E = ApiError> = std::result::Result<T, E>;

/// Kind of an API error, named by the client's reaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorKind {
    /// The object does not exist. The client must name another object.
    NotFound,
    /// The request is invalid. The client must change the request.
    Invalid,
    /// The request conflicts with the present state, which the client must change first.
    Conflict,
    /// The client must wait and try again.
    Busy,
    /// The host failed. An operator must repair it.
    Failed,
}

/// An API error with a kind and a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub(crate) struct ApiError {
    pub(crate) kind: ErrorKind,
    pub(crate) problem: Problem,
}

impl ApiError {
    pub(crate) fn not_found(error: impl Into<String>) -> ApiError {
        ApiError { kind: ErrorKind::NotFound, problem: Problem::new(error) }
    }

    pub(crate) fn invalid(error: impl Into<String>) -> ApiError {
        ApiError { kind: ErrorKind::Invalid, problem: Problem::new(error) }
    }

    pub(crate) fn conflict(error: impl Into<String>) -> ApiError {
        ApiError { kind: ErrorKind::Conflict, problem: Problem::new(error) }
    }

    pub(crate) fn busy(error: impl Into<String>) -> ApiError {
        ApiError { kind: ErrorKind::Busy, problem: Problem::new(error) }
    }

    pub(crate) fn failed(error: impl Into<String>) -> ApiError {
        ApiError { kind: ErrorKind::Failed, problem: Problem::new(error) }
    }

    /// Sets the hint that is shown after the message.
    pub(crate) fn hint(self, hint: impl Into<String>) -> ApiError {
        ApiError { problem: self.problem.with_hint(hint), ..self }
    }
}

impl From<ShardError> for ApiError {
    fn from(error: ShardError) -> ApiError {
        let kind = match error {
            ShardError::Command(_) => ErrorKind::Conflict,
            ShardError::Busy => ErrorKind::Busy,
            ShardError::Unusable(_) | ShardError::Gone => ErrorKind::Failed,
        };
        ApiError { kind, problem: Problem::new(error.to_string()) }
    }
}

impl ApiError {
    /// Returns the error for a change that hob stopped because the state could not be saved.
    pub(crate) fn not_begun(error: &StateError) -> ApiError {
        ApiError::failed(format!("hob stopped in the middle of the change: {error}"))
            .hint("free space in the state directory or repair it, and try again")
    }
}

impl From<StateError> for ApiError {
    fn from(error: StateError) -> ApiError {
        ApiError::failed(format!("the change is in effect, but hob cannot save it: {error}")).hint(
            "free space in the state directory or repair it, and repeat the command before the daemon restarts",
        )
    }
}

/// Converts an error from opening a backing into an API error.
pub(crate) fn open_error(error: &OpenError) -> ApiError {
    let kind = match error {
        OpenError::Spec { .. } | OpenError::System { .. } | OpenError::Unfit { .. } => ErrorKind::Invalid,
        OpenError::InUse { .. } | OpenError::InUseByQemu { .. } => ErrorKind::Conflict,
        OpenError::Connect { .. } | OpenError::MissingProgram { .. } | OpenError::Unresponsive { .. } => {
            ErrorKind::Failed
        }
    };
    ApiError { kind, problem: Problem::new(error.to_string()) }
}
