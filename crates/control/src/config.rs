//! Differences between hob.toml and what a daemon serves.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `GET /v1/config/diff`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigDiff {
    /// The file.
    pub file: String,
    /// What is different; empty if the daemon is as the file says.
    pub differences: Vec<ConfigDifference>,
}

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigDifference {
    /// What it concerns: `disk web`, `pool flash`, `storage-policy gold`, `datastore array` or `daemon`.
    pub subject: String,
    /// Which setting; empty if all of it is there on one side only.
    pub key: String,
    /// As the file has it; absent if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// As the daemon has it; absent if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<String>,
    /// How it is made to go.
    pub by: ConfigRemedy,
    /// What `hob config apply` does, or what is to be done instead.
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

/// What became of the differences.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigApplied {
    /// Changes that were made.
    pub done: Vec<String>,
    /// Changes that failed, and why.
    pub failed: Vec<String>,
    /// Differences that are left, with what is to be done.
    pub left: Vec<String>,
}

impl ConfigDifference {
    /// The setting and its subject, in words.
    pub fn what(&self) -> String {
        if self.key.is_empty() { self.subject.clone() } else { format!("{}: {}", self.subject, self.key) }
    }
}
