//! API types for differences between hob.toml and the running daemon.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `GET /v1/config/diff`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigDiff {
    /// Path of hob.toml.
    pub file: String,
    /// The differences; empty if the daemon runs as hob.toml says.
    pub differences: Vec<ConfigDifference>,
}

/// One difference between hob.toml and the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigDifference {
    /// The object that differs: `disk web`, `pool flash`, `storage-policy gold`, `datastore array`
    /// or `daemon`.
    pub subject: String,
    /// Name of the setting that differs. Empty if the object exists on one side only.
    pub key: String,
    /// Value of the setting in hob.toml; absent if it is not set there. For a setting of the daemon
    /// itself, the text `changed`. If `key` is empty, the object's backing or devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Value of the setting in the daemon; absent if it is not set there, and for a setting of the
    /// daemon itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<String>,
    /// How the difference is resolved.
    pub by: ConfigRemedy,
    /// The change that `hob config apply` makes, or the action that the operator takes instead.
    pub action: String,
}

/// How a difference between hob.toml and the daemon is resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ConfigRemedy {
    /// `hob config apply` removes the difference, as does a reload after hob.toml was changed.
    Apply,
    /// `hob config apply --yes` removes the difference, because this empties a cache or removes an
    /// object.
    ApplyWithYes,
    /// `systemctl reload hob` removes the difference.
    Reload,
    /// Only commands for the object remove the difference.
    Command,
}

/// `POST /v1/config/apply`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ConfigApply {
    /// Also make changes that empty a cache or remove an object. Dirty data is drained first.
    #[serde(default)]
    pub yes: bool,
}

/// The result of `hob config apply`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigApplied {
    /// Changes that `hob config apply` made.
    pub done: Vec<String>,
    /// Changes that failed, with the reason.
    pub failed: Vec<String>,
    /// Differences that remain, with the action that each needs.
    pub left: Vec<String>,
    /// Remarks about the changes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl ConfigDifference {
    /// Returns the object and the name of the setting that differs.
    pub fn what(&self) -> String {
        if self.key.is_empty() { self.subject.clone() } else { format!("{}: {}", self.subject, self.key) }
    }

    /// Returns true if the object is in the file, and the daemon does not have it.
    pub fn is_added(&self) -> bool {
        self.key.is_empty() && self.file.is_some() && self.running.is_none()
    }
}
