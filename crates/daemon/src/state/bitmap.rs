//! The configuration of a dirty bitmap in the state file.

use hob_control::Size;
use serde::{Deserialize, Serialize};

/// A dirty bitmap of a disk, without its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BitmapSpec {
    pub(crate) name: String,
    /// Number of bytes of the disk that one bit stands for. It never changes.
    pub(crate) granularity: Size,
    /// True if the bitmap does not record writes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) frozen: bool,
    /// Reason why the bitmap counts as fully marked, whatever its file contains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) everything: Option<String>,
}
