//! Further exports of a disk: other ways to it, with fewer rights, or without effect on its
//! cache. A backup reads through one that promotes nothing, and what the guest uses stays in flash.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An additional export, and `POST /v1/disks/{disk}/exports`. NBD clients find it by its name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// Its name, unlike those of all disks and of their other exports.
    pub name: String,
    /// Refuse writes through this export.
    #[serde(default)]
    pub read_only: bool,
    /// Reads through this export change nothing in the cache. They are served from it if it has the
    /// data.
    #[serde(default)]
    pub no_promote: bool,
    /// Absolute path at which it appears as a file, through FUSE.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuse: Option<String>,
    /// Absolute path of its vhost-user socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
}

impl Export {
    /// The same on another host, where these paths mean something else.
    #[must_use]
    pub fn elsewhere(&self) -> Export {
        Export { fuse: None, vhost_user: None, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_is_not_there() {
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
