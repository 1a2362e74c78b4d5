//! How a cache is to work: the parts of a preset, each of which can be set by itself. Words are
//! those of docs/presets.md and docs/policies.md; the daemon checks them and names the right ones.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Size;

macro_rules! settings {
    ($($(#[doc = $doc:literal])* $field:ident: $type:ty,)*) => {
        /// Parts of a cache. What is absent is as the preset has it, or stays as it is.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
        pub struct CacheSettings {
            $(
                $(#[doc = $doc])*
                #[serde(default, skip_serializing_if = "Option::is_none")]
                pub $field: Option<$type>,
            )*
        }

        impl CacheSettings {
            /// Nothing is said.
            pub fn is_empty(&self) -> bool {
                $(self.$field.is_none())&&*
            }
        }

        // Flat, because serde cannot refuse unknown fields in a flattened struct.
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct EnableWire {
            pool: String,
            size: Size,
            $(#[serde(default)] $field: Option<$type>,)*
        }

        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct PatchWire {
            #[serde(default)]
            size: Option<Size>,
            $(#[serde(default)] $field: Option<$type>,)*
        }

        impl From<EnableWire> for CacheEnable {
            fn from(wire: EnableWire) -> CacheEnable {
                let EnableWire { pool, size, $($field),* } = wire;
                CacheEnable { pool, size, settings: CacheSettings { $($field),* } }
            }
        }

        impl From<PatchWire> for CachePatch {
            fn from(wire: PatchWire) -> CachePatch {
                let PatchWire { size, $($field),* } = wire;
                CachePatch { size, settings: CacheSettings { $($field),* } }
            }
        }
    };
}

settings! {
    /// A name of docs/presets.md; the other fields change its parts. In a patch, all parts become those of the preset.
    preset: String,
    /// Unit of fill and eviction, a power of two from 4K to 1M. A change empties the cache.
    block_size: Size,
    /// A policy's name, or `auto`. A change keeps the contents.
    policy: String,
    /// `write-through`, `write-back`, `write-around`, `read-only-cache` or `pass-through`. A change away from
    /// `write-back` drains the cache first.
    mode: String,
    /// Whether the cache survives a restart. Write-back requires it. A change empties the cache.
    persistent: bool,
    /// `unified`, or `split:70` for 70 % read cache and 30 % write buffer. A change empties the cache.
    layout: String,
    /// Admission rule: `auto`, or `always`, `while-free`, `nth-access:N` or `ghost`, each optionally
    /// with `+not-sequential:BYTES` and `+while-filling:PERCENT%`. A change keeps the contents.
    admission: String,
    /// Order in which dirty data is written to the backing: `elevator` or `coldest`.
    destage_order: String,
    /// Destaging starts above this percentage of dirty blocks.
    dirty_start: u8,
    /// Destaging stops at this percentage of dirty blocks.
    dirty_stop: u8,
    /// Above this percentage of dirty blocks, writes to uncached blocks bypass the cache.
    dirty_full: u8,
    /// Maximum age of dirty data, seconds; 0: no limit besides `dirty_start`.
    dirty_age_max: u32,
    /// `1`, `2-dirty` (two copies of dirty data) or `2` (two copies of all data).
    copies: String,
    /// The backing always holds a state that existed, at the price of slower destaging.
    ordered: bool,
    /// Whether a persistent cache is compared with its backing after a restart, before it serves:
    /// `auto` (unless there is evidence that the backing is unchanged), `always` or `trust`
    /// (never). Not part of a preset. A change takes effect at the next restart.
    verify: String,
    /// Memory above the cache for frequently read data and read-ahead; 0 for none. Not part of a
    /// preset. A change empties it.
    ram: Size,
}

/// `PUT /v1/disks/{disk}/cache`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(from = "EnableWire")]
pub struct CacheEnable {
    /// Name of the pool.
    pub pool: String,
    /// Size, rounded up to whole segments. A journal needs additional space.
    pub size: Size,
    /// Its settings.
    #[serde(flatten)]
    pub settings: CacheSettings,
}

/// `PATCH /v1/disks/{disk}/cache`: absent fields keep their value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(from = "PatchWire")]
pub struct CachePatch {
    /// New size, rounded up to whole segments. What fits is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
    /// The settings to change.
    #[serde(flatten)]
    pub settings: CacheSettings,
}

/// Dirty data of a cache: data that is not on the backing yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Dirty {
    /// Bytes that only flash has.
    pub size: Size,
    /// Part of it that flash cannot deliver any more.
    pub lost: Size,
    /// A drain is under way.
    pub draining: bool,
    /// Bytes that go to the backing each second at present.
    pub rate: Size,
    /// Seconds until nothing is dirty at that rate; absent while nothing moves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_seconds: Option<u64>,
    /// Why the drain does not get on, or how the last one ended before it was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// What happens to dirty data when a cache is removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDirty {
    /// It goes to the backing first.
    #[default]
    Drain,
    /// It is lost: writes that were acknowledged to guests are undone.
    Discard,
}

impl OnDirty {
    pub(crate) fn query(self) -> &'static str {
        match self {
            OnDirty::Drain => "",
            OnDirty::Discard => "?discard_dirty=true",
        }
    }
}

/// `POST /v1/disks/{disk}/cache/export-dirty`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportDirty {
    /// Absolute path of a file on the daemon's host. It must not exist.
    pub path: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_stand_beside_the_others_and_survive_json() {
        let enable = CacheEnable {
            pool: "p".into(),
            size: Size(1 << 20),
            settings: CacheSettings {
                preset: Some("vsan".into()),
                dirty_start: Some(20),
                ordered: Some(true),
                ..CacheSettings::default()
            },
        };
        let text = serde_json::to_string(&enable).unwrap();
        assert_eq!(text, r#"{"pool":"p","size":1048576,"preset":"vsan","dirty_start":20,"ordered":true}"#);
        assert_eq!(serde_json::from_str::<CacheEnable>(&text).unwrap(), enable);
        let patch: CachePatch = serde_json::from_str(r#"{"mode":"write-back"}"#).unwrap();
        assert_eq!(patch.settings.mode.as_deref(), Some("write-back"));
        assert!(!patch.settings.is_empty() && CachePatch::default().settings.is_empty());
    }

    #[test]
    fn a_misspelt_setting_is_refused_by_name() {
        let error = serde_json::from_str::<CachePatch>(r#"{"blok_size": 4096}"#).unwrap_err().to_string();
        assert!(error.contains("blok_size") && error.contains("block_size"), "{error}");
        let error = serde_json::from_str::<CachePatch>(r#"{"pool": "p"}"#).unwrap_err().to_string();
        assert!(error.contains("pool"), "{error}");
        let error = serde_json::from_str::<CacheEnable>(r#"{"size": 4096}"#).unwrap_err().to_string();
        assert!(error.contains("pool"), "{error}");
        let error = serde_json::from_str::<CachePatch>(r#"{"dirty_start": 300}"#).unwrap_err().to_string();
        assert!(error.contains("300"), "{error}");
    }
}
