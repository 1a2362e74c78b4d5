//! Differences between hob.toml and what a daemon serves.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `GET /v1/config/diff`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigDiff {
    /// The file.
    pub file: String,
    /// The differences; empty if the daemon runs as the file says.
    pub differences: Vec<ConfigDifference>,
}

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigDifference {
    /// The object: `disk web`, `pool flash`, `storage-policy gold`, `datastore array` or `daemon`.
    pub subject: String,
    /// The setting. Empty if the object exists on one side only.
    pub key: String,
    /// Value in the file; absent if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Value in the daemon; absent if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<String>,
    /// How the difference is resolved.
    pub by: ConfigRemedy,
    /// The change that `hob config apply` makes, or the action that is needed instead.
    pub action: String,
}

/// How a difference is made to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ConfigRemedy {
    /// `hob config apply`, and a reload after the file was changed.
    Apply,
    /// `hob config apply --yes`: a cache is emptied, or something is removed.
    ApplyWithYes,
    /// `systemctl reload hob`.
    Reload,
    /// Commands.
    Command,
}

/// `POST /v1/config/apply`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ConfigApply {
    /// Also make changes that empty a cache or remove something. Dirty data is drained first.
    #[serde(default)]
    pub yes: bool,
}

/// The result of `hob config apply`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigApplied {
    /// Changes that were made.
    pub done: Vec<String>,
    /// Changes that failed, and why.
    pub failed: Vec<String>,
    /// Remaining differences, with the action that each needs.
    pub left: Vec<String>,
}

impl ConfigDifference {
    /// The setting and its subject, in words.
    pub fn what(&self) -> String {
        if self.key.is_empty() { self.subject.clone() } else { format!("{}: {}", self.subject, self.key) }
    }
}
