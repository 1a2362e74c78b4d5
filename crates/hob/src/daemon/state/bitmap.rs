//! What is kept of a dirty bitmap beside what it has noted.

use hob_control::Size;
use serde::{Deserialize, Serialize};

/// A bitmap of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BitmapSpec {
    /// Its name.
    pub(crate) name: String,
    /// What is noted as one, when it was made.
    pub(crate) granularity: Size,
    /// It does not record.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) frozen: bool,
    /// Why everything is in it, whatever its file says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) everything: Option<String>,
}
