//! Further exports of a disk: other names under which NBD clients find it, with fewer rights, or without effect on its
//! cache. A backup reads through one that promotes nothing, and what the guest uses stays in flash.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A further export, and `POST /v1/disks/{disk}/exports`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// Its name, unlike those of all disks and of their other exports.
    pub name: String,
    /// Refuse changes that come this way.
    #[serde(default)]
    pub read_only: bool,
    /// Reads that come this way bring nothing into the cache and keep nothing there: what is cached serves them.
    #[serde(default)]
    pub no_promote: bool,
}
