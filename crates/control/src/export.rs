//! API types for additional exports of a disk, with fewer rights or without effect on the cache.
//! For example, a backup can read through an export that promotes nothing, so the guest's data
//! stays in flash.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An additional export of a disk; body of `POST /v1/disks/{disk}/exports`. NBD clients find the
/// export by its name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// Name of the export. No disk and no other export has this name.
    pub name: String,
    /// Refuse writes through this export.
    #[serde(default)]
    pub read_only: bool,
    /// Reads through this export do not change the cache. The cache serves these reads if it has
    /// the data.
    #[serde(default)]
    pub no_promote: bool,
    /// Absolute path of the file through which the export appears (FUSE).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuse: Option<String>,
    /// Absolute path of the export's vhost-user socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
}

impl Export {
    /// Returns the export without its paths, which are valid on this host only.
    #[must_use]
    pub fn elsewhere(&self) -> Export {
        Export { fuse: None, vhost_user: None, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_settings_are_none() {
        let plain = Export { name: "b".into(), read_only: true, ..Export::default() };
        let text = r#"{"name":"b","read_only":true,"no_promote":false}"#;
        assert_eq!(serde_json::to_string(&plain).unwrap(), text);
        assert_eq!(serde_json::from_str::<Export>(text).unwrap(), plain);
        let placed =
            Export { fuse: Some("/b.img".into()), vhost_user: Some("/b.sock".into()), ..plain.clone() };
        let text = serde_json::to_string(&placed).unwrap();
        assert_eq!(serde_json::from_str::<Export>(&text).unwrap(), placed);
        assert_eq!(placed.elsewhere(), plain);
        assert!(serde_json::from_str::<Export>(r#"{"name":"b","file":"/b"}"#).is_err());
    }
}
