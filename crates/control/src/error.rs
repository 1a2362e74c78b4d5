//! Body of every HTTP response that reports an error.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An error, and how to resolve it. The HTTP status separates client errors from server errors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// The error as one sentence, without a full stop.
    pub error: String,
    /// A hint for the user how to resolve the error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl Problem {
    /// Creates an error without a hint.
    pub fn new(error: impl Into<String>) -> Problem {
        Problem { error: error.into(), hint: None }
    }

    /// Adds a hint to the error.
    pub fn with_hint(self, hint: impl Into<String>) -> Problem {
        Problem { hint: Some(hint.into()), ..self }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.hint {
            Some(hint) => write!(f, "{}; {hint}", self.error),
            None => f.write_str(&self.error),
        }
    }
}

impl std::error::Error for Problem {}
