//! Why something that was asked for was not done. Each kind is one reaction of whoever asked.

use hob_control::Problem;
use hob_storage::backing::OpenError;

use crate::daemon::shard_api::ShardError;
use crate::daemon::state::StateError;

/// Which reaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorKind {
    /// Name something that exists.
    NotFound,
    /// Ask for something else.
    Invalid,
    /// Change something else first.
    Conflict,
    /// Wait.
    Busy,
    /// Repair the host.
    Failed,
}

/// A kind, and the words for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    /// Which reaction.
    pub(crate) kind: ErrorKind,
    /// What to say.
    pub(crate) problem: Problem,
}

impl ApiError {
    /// No such thing.
    pub(crate) fn not_found(error: impl Into<String>) -> ApiError {
        ApiError { kind: ErrorKind::NotFound, problem: Problem::new(error) }
    }

    /// It cannot be asked for.
    pub(crate) fn invalid(error: impl Into<String>) -> ApiError {
        ApiError { kind: ErrorKind::Invalid, problem: Problem::new(error) }
    }

    /// Not as things are.
    pub(crate) fn conflict(error: impl Into<String>) -> ApiError {
        ApiError { kind: ErrorKind::Conflict, problem: Problem::new(error) }
    }

    /// Not yet.
    pub(crate) fn busy(error: impl Into<String>) -> ApiError {
        ApiError { kind: ErrorKind::Busy, problem: Problem::new(error) }
    }

    /// It should have worked.
    pub(crate) fn failed(error: impl Into<String>) -> ApiError {
        ApiError { kind: ErrorKind::Failed, problem: Problem::new(error) }
    }

    /// The same with a hint.
    pub(crate) fn hint(self, hint: impl Into<String>) -> ApiError {
        ApiError { problem: self.problem.with_hint(hint), ..self }
    }
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.problem.fmt(f)
    }
}

impl std::error::Error for ApiError {}

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
    /// The state could not be kept, and so the change was not made.
    pub(crate) fn not_begun(error: &StateError) -> ApiError {
        ApiError::failed(format!("nothing more was changed: {error}"))
            .hint("free space in the state directory or repair it, and try again")
    }
}

impl From<StateError> for ApiError {
    fn from(error: StateError) -> ApiError {
        ApiError::failed(format!("the change is in effect, but not kept: {error}")).hint(
            "free space in the state directory or repair it, and repeat the command before the daemon restarts",
        )
    }
}

/// Why a backing cannot be opened.
pub(super) fn open_error(error: &OpenError) -> ApiError {
    let kind = match error {
        OpenError::Spec { .. } | OpenError::System { .. } | OpenError::Unfit { .. } => ErrorKind::Invalid,
        OpenError::InUse { .. } | OpenError::InUseByQemu { .. } => ErrorKind::Conflict,
        OpenError::Connect { .. } | OpenError::MissingProgram { .. } | OpenError::Unresponsive { .. } => {
            ErrorKind::Failed
        }
    };
    ApiError { kind, problem: Problem::new(error.to_string()) }
}
