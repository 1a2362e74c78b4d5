//! Settings of a cache. Each setting is part of a preset and can also be set by itself. The values
//! are those of docs/presets.md and docs/policies.md. The daemon checks them and lists the valid
//! ones.

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use crate::Size;

macro_rules! settings {
    ($($(#[doc = $doc:literal])* $(#[serde($($wire:tt)*)])? $field:ident: $type:ty,)*) => {
        /// Settings of a cache. An absent setting has the preset's value, or keeps its present
        /// value.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
        pub struct CacheSettings {
            $(
                $(#[doc = $doc])*
                #[serde(default, skip_serializing_if = "Option::is_none")]
                pub $field: Option<$type>,
            )*
        }

        impl CacheSettings {
            /// Returns true if no setting is given.
            pub fn is_empty(&self) -> bool {
                $(self.$field.is_none())&&*
            }
        }

        // The fields are repeated here, because serde cannot refuse unknown fields in a flattened
        // struct.
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct EnableWire {
            pool: String,
            #[serde(default)]
            size: Option<Size>,
            $(#[serde(default $(, $($wire)*)?)] $field: Option<$type>,)*
        }

        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct PatchWire {
            #[serde(default)]
            size: Option<Size>,
            $(#[serde(default $(, $($wire)*)?)] $field: Option<$type>,)*
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
    /// A preset of docs/presets.md; the other fields override its settings. A PATCH request with a
    /// preset also changes all settings that are part of the preset.
    preset: String,
    /// Block size: unit of fill and eviction, a power of two from 4K to 1M. A change empties the
    /// cache.
    block_size: Size,
    /// Name of a replacement policy, or `auto`. A change keeps the cache's contents.
    policy: String,
    /// `write-through`, `write-back`, `write-around`, `read-only-cache` or `pass-through`. A change away from
    /// `write-back` drains the cache first.
    mode: String,
    /// Whether the cache survives a restart. Write-back requires it. A change empties the cache.
    persistent: bool,
    /// `unified`, or `split:70` for 70 % read cache and 30 % write buffer. A change empties the cache.
    layout: String,
    /// Admission rule: `auto`, `always`, `while-free`, `nth-access:N` or `ghost`. Each rule except
    /// `auto` can be followed by `+not-sequential:BYTES`, `+while-filling:PERCENT%` and
    /// `+reads-only`. A change keeps the cache's contents.
    admission: String,
    /// How much a read miss fills: `sectors` (what the guest read), `block` (also uncached data next
    /// to it) or `auto` (the same as `block` while guests use enough of that data). A change keeps
    /// the cache's contents.
    fill: String,
    /// Order in which dirty data is written to the backing: `elevator` or `coldest`.
    destage_order: String,
    /// When dirty data takes up more than this percentage of the cache, destaging starts.
    dirty_start: u8,
    /// When dirty data takes up at most this percentage of the cache, destaging stops.
    dirty_stop: u8,
    /// When dirty data takes up at least this percentage of the cache, writes to uncached blocks
    /// bypass the cache. In a split cache, the size of the write buffer has this effect.
    dirty_full: u8,
    /// Maximum age of dirty data, seconds. With 0, only `dirty_start` starts destaging.
    dirty_age_max: u32,
    /// `1`, `2-dirty` (two copies of dirty data) or `2` (two copies of all data).
    copies: String,
    /// Whether destaging keeps the order of a guest's FLUSHes. A write after a FLUSH then reaches
    /// the backing only after all writes before the FLUSH. A write after an acknowledged write with
    /// FUA reaches the backing only after the write with FUA. Data that was dirty at a restart of
    /// hob counts as written between two FLUSHes. Destaging is slower.
    ordered: bool,
    /// Whether a persistent cache is compared with its backing after a restart, before it serves:
    /// `auto` (unless there is evidence that the backing is unchanged), `always` or `trust`
    /// (never). Not part of a preset. A change takes effect at the next restart.
    verify: String,
    /// Memory above the cache for frequently read data and read-ahead; 0 for none. This setting is
    /// not part of a preset. A change empties the memory.
    ram: Size,
    /// True for a cache without a size of its own: it shares the rest of its pool with other such
    /// caches, and hob chooses their sizes. Not part of a preset.
    shared: bool,
    /// Minimum size of a shared cache.
    min: Size,
    /// Maximum size of a shared cache; 0 for none.
    max: Size,
    /// Weight of a shared cache's hits when hob chooses the sizes of the shared caches: `low`,
    /// `normal`, `high` or a number, 1000 by default.
    #[serde(deserialize_with = "shares_or_word")]
    shares: u32,
    /// Whether a shared cache keeps its present size.
    pin: bool,
}

/// Words for shares, as vSphere uses them, with their numbers.
const SHARES: [(&str, u32); 3] = [("low", 500), ("normal", 1000), ("high", 2000)];

/// Returns the number of shares that a text names: `low`, `normal`, `high` or a number.
///
/// # Errors
/// Returns a sentence with the accepted forms if the text has none of them.
pub fn parse_shares(text: &str) -> Result<u32, String> {
    let word = SHARES.iter().find(|(word, _)| *word == text).map(|(_, shares)| *shares);
    word.or_else(|| text.parse().ok())
        .ok_or_else(|| format!("shares are low, normal, high or a number, not '{text}'"))
}

/// Shares in a request or in hob.toml.
#[derive(Deserialize)]
#[serde(untagged, expecting = "shares are low, normal, high or a number")]
enum SharesWire {
    Number(u32),
    Word(String),
}

fn shares_or_word<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    match Option::<SharesWire>::deserialize(deserializer)? {
        None => Ok(None),
        Some(SharesWire::Number(shares)) => Ok(Some(shares)),
        Some(SharesWire::Word(text)) => parse_shares(&text).map(Some).map_err(serde::de::Error::custom),
    }
}

/// `PUT /v1/disks/{disk}/cache`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(from = "EnableWire")]
pub struct CacheEnable {
    /// Name of the pool.
    pub pool: String,
    /// Size of the cache, rounded up to whole segments. A journal needs additional space. A cache
    /// without a size shares the rest of the pool with other such caches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
    /// Settings of the cache.
    #[serde(flatten)]
    pub settings: CacheSettings,
}

/// `PATCH /v1/disks/{disk}/cache`: absent fields keep their value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(from = "PatchWire")]
pub struct CachePatch {
    /// New size of the cache, rounded up to whole segments. Cached data that fits is kept. A shared
    /// cache becomes one with this fixed size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
    /// The settings to change.
    #[serde(flatten)]
    pub settings: CacheSettings,
}

/// Dirty data of a cache: acknowledged data that is not on the backing yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Dirty {
    /// Amount of dirty data, bytes.
    pub size: Size,
    /// Part of the dirty data that flash cannot return any more.
    pub lost: Size,
    /// Whether a drain is in progress.
    pub draining: bool,
    /// Present rate of destaging, bytes per second.
    pub rate: Size,
    /// Seconds until the cache is clean at the present rate. Absent while nothing is destaged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_seconds: Option<u64>,
    /// Why the drain makes no progress, or why the last drain ended early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// How dirty data is handled when a cache is removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDirty {
    /// Dirty data is written to the backing before the cache is removed.
    #[default]
    Drain,
    /// Dirty data is lost: acknowledged writes are undone.
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
    /// Absolute path of a new file on the daemon's host. The file must not exist.
    pub path: String,
}

/// `POST /v1/disks/{disk}/cache/adopt`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AdoptCache {
    /// Owner id of the orphan cache, 32 hexadecimal digits, as shown by its pool.
    pub owner: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_stand_beside_the_others_and_survive_json() {
        let enable = CacheEnable {
            pool: "p".into(),
            size: Some(Size(1 << 20)),
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
    fn shares_are_numbers_or_words() {
        let of = |text: &str| serde_json::from_str::<CachePatch>(text).map(|patch| patch.settings.shares);
        for (text, shares) in
            [("\"low\"", 500), ("\"normal\"", 1000), ("\"high\"", 2000), ("7", 7), ("\"7\"", 7)]
        {
            assert_eq!(of(&format!("{{\"shares\": {text}}}")).unwrap(), Some(shares), "{text}");
        }
        assert_eq!(of("{}").unwrap(), None);
        for text in ["\"many\"", "-1", "true"] {
            let error = of(&format!("{{\"shares\": {text}}}")).unwrap_err().to_string();
            assert!(error.contains("low, normal, high"), "{text}: {error}");
        }
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
