//! API types for the migration of a disk and its cache to another host. The types are the requests
//! to the source, the progress, and the protocol between the two hosts (docs/decisions/0013).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::named::named;
use crate::{BackingTimeout, CacheSettings, Export, Qos, Size};

named! {
    /// How the cache of a migrating disk is handled.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
    #[serde(rename_all = "kebab-case")]
    pub enum CarryMode {
        /// The cache is copied while the guest runs, most frequently read blocks first. Blocks that are
        /// not copied before the hand-over are copied after it.
        #[default]
        Copy = "copy",
        /// The destination gets a list of the cached blocks, and reads the blocks from the backing.
        HeatMap = "heat-map",
        /// The destination starts with an empty cache. On a miss, the destination reads from the
        /// source's flash.
        Remote = "remote",
        /// The cache is not migrated.
        Drop = "drop",
    }
}

/// The trigger of a disk's hand-over to the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Switch {
    /// A write that waits at the destination triggers the hand-over, because the write shows that
    /// the guest runs there.
    #[default]
    OnWrite,
    /// Only the operator's request triggers the hand-over.
    Ask,
}

/// `POST /v1/disks/{disk}/migration`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrationStart {
    /// Control API of the destination: `HOST:PORT`.
    pub to: String,
    /// How the disk's cache is handled.
    #[serde(default)]
    pub cache: CarryMode,
    /// Largest rate at which the cache is copied, bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Size>,
    /// The trigger of the hand-over.
    #[serde(default)]
    pub switch: Switch,
    /// Path or URI of the backing at the destination; the same as here if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<String>,
    /// Pool of the destination. If absent: the pool of the same name, or the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Path of the disk's vhost-user socket at the destination.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
    /// Path of the disk's FUSE file at the destination.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuse: Option<String>,
}

/// `POST /v1/disks/{disk}/migration/take-back`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TakeBack {
    /// Confirms that the other host will never serve the disk again.
    pub force: bool,
}

/// The role of a host in a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// The host owns, or owned, the disk.
    Source,
    /// The host will own, or owns, the disk after the migration.
    Destination,
}

/// State of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationState {
    /// The source writes dirty data to the backing, or the destination opens the disk.
    Preparing,
    /// The source asks the destination to prepare for the disk.
    Announcing,
    /// The destination is prepared for the disk, and copies cached data from the source.
    Copying,
    /// The disk is frozen, and the guest's requests wait for the hand-over.
    Frozen,
    /// The source has handed the disk over, and the destination has not confirmed this yet. The
    /// guest's requests wait.
    HandingOver,
    /// The destination owns the disk, and reads cached data from the source.
    Serving,
    /// The migration ended, and the destination owns the disk.
    Over,
    /// The migration was cancelled and the disk stays at the source. The source is telling the
    /// destination.
    Cancelling,
    /// The migration ended without a hand-over: the disk stayed at the source.
    Kept,
    /// At the destination: the disk is in standby.
    Awaiting,
    /// At the destination: the disk is served, and the new ownership is being made durable.
    Arrived,
    /// At the destination: the disk is served while cached data is still copied.
    Filling,
    /// Another host owns the disk.
    Away,
}

/// `GET /v1/disks/{disk}/migration`: progress of a migration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Migration {
    /// The disk.
    pub disk: String,
    /// Role of this host in the migration.
    pub side: Side,
    /// Name or address of the other host; empty if unknown.
    pub peer: String,
    /// How the disk's cache is handled.
    pub cache: CarryMode,
    /// State of the migration.
    pub state: MigrationState,
    /// Whether everything that precedes the hand-over is done.
    pub warm: bool,
    /// Whether a write waits at the destination.
    pub wanted: bool,
    /// The source's generation.
    pub generation: u64,
    /// Number of the migration attempt.
    pub attempt: u32,
    /// The last error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Cached data at the source when the migration began.
    pub valid: Size,
    /// Cached data sent to the destination.
    pub sent: Size,
    /// Cached data that was sent again because a write had changed it, included in `sent`.
    pub resent: Size,
    /// Cached data that the destination has copied.
    pub pulled: Size,
    /// Cached data that the destination still has to copy.
    pub left: Size,
    /// Rate at which the destination copies cached data, bytes per second.
    pub rate: Size,
    /// Copied data, percentage of all data to copy.
    pub percent: u8,
    /// Seconds until all cached data is copied, at the present rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_seconds: Option<u64>,
    /// Duration of the drain at the source, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_ms: Option<u64>,
    /// Time from the freeze of the disk until the destination confirmed the hand-over,
    /// milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<f64>,
    /// At the destination: time that the first waiting write waited for the hand-over,
    /// milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_ms: Option<f64>,
    /// Time since the migration began, or its duration if it has ended, milliseconds.
    pub total_ms: u64,
}

/// The migration attempt that a call of the source to the destination belongs to. The query
/// parameters of the call's URL name the attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct CarrySession {
    /// Generation of the owner.
    pub generation: u64,
    /// Number of the owner's migration attempt.
    pub attempt: u32,
    /// Lineage of the disk: a random identity that distinguishes disks of the same name, 32
    /// hexadecimal digits.
    pub lineage: String,
}

/// `POST /v1/disks/{disk}/arrival/arrive`: announces a disk to the destination.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Arrival {
    /// Name of the source host.
    pub from: String,
    /// Path or URI of the disk's backing, valid at the destination.
    pub backing: String,
    /// Image format of the backing, such as `raw` or `qcow2`. Absent if the backing's URI
    /// determines it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// How long the disk's requests wait for its backing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_timeout: Option<BackingTimeout>,
    /// The disk's own stripe size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe: Option<Size>,
    /// Size of the disk, bytes.
    pub size_bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// How the disk's cache is handled.
    pub mode: CarryMode,
    /// The disk's cache, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<ArrivingCache>,
    /// Further NBD exports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exports: Vec<Export>,
    /// Shares, reservation and limits of the disk, if they were configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qos: Option<Qos>,
    /// The disk's datastore, if one was configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// Path of the disk's vhost-user socket, if a guest uses one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
    /// Path of the disk's FUSE file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuse: Option<String>,
    /// Name of the cluster that owns the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// Number of guests that have not received a report of a failed flush; the destination reports
    /// it to them. Absent if there are none. Earlier versions of hob do not know this field.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub flush_failures_owed: u32,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// The cache of a disk that is being migrated to this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ArrivingCache {
    /// The pool that the operator requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Name of the cache's pool at the source. The destination uses its pool of the same name, if
    /// it has one.
    pub like_pool: String,
    /// Size of the cache.
    pub size: Size,
    /// All settings of the cache.
    #[schema(inline)]
    pub settings: ArrivingSettings,
}

/// [`CacheSettings`] that can be deserialized.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct ArrivingSettings(#[serde(with = "as_patch")] pub CacheSettings);

mod as_patch {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::{CachePatch, CacheSettings};

    pub(super) fn serialize<S: Serializer>(settings: &CacheSettings, to: S) -> Result<S::Ok, S::Error> {
        settings.serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<CacheSettings, D::Error> {
        Ok(CachePatch::deserialize(from)?.settings)
    }
}

/// The destination's response to a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CallAnswer {
    /// Why the destination refused the call; absent if it accepted the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<CallRefusal>,
    /// Whether a write of the guest waits at the destination.
    pub wants: bool,
    /// Whether the destination has copied all cached data.
    pub done: bool,
    /// Bytes of cached data that the destination has copied.
    pub pulled_bytes: u64,
    /// Bytes that the destination copied more than once, included in `pulled_bytes`.
    pub again_bytes: u64,
    /// Bytes of cached data that the destination still has to copy.
    pub left_bytes: u64,
    /// Page of the block list that the destination needs next; absent if it needs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<u32>,
    /// Ranges of the block list that the destination has not copied yet.
    pub ranges: u64,
}

/// Why a destination refused a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum CallRefusal {
    /// The destination does not expect the disk, or expects it in another session.
    NotAwaited,
    /// The destination already owns the disk.
    Owner {
        /// Generation of the owner.
        generation: u64,
    },
    /// The call failed at the destination. A later call may succeed.
    Failed {
        /// Why the call failed.
        why: String,
    },
    /// The destination will never accept the call.
    Never {
        /// Why the destination will never accept the call.
        why: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arrival_survives_json_and_refuses_unknown_fields() {
        let settings = CacheSettings { mode: Some("write-back".into()), ..CacheSettings::default() };
        let cache = ArrivingCache {
            pool: None,
            like_pool: "p".into(),
            size: Size(1 << 20),
            settings: ArrivingSettings(settings),
        };
        let arrival = Arrival {
            from: "a".into(),
            backing: "/b".into(),
            size_bytes: 4096,
            mode: CarryMode::HeatMap,
            cache: Some(cache),
            ..Arrival::default()
        };
        let text = serde_json::to_string(&arrival).unwrap();
        assert!(!text.contains("owed"), "an older hob reads it: {text}");
        assert!(text.contains(r#""mode":"heat-map""#), "{text}");
        assert_eq!(serde_json::from_str::<Arrival>(&text).unwrap(), arrival);
        let odd = text.replace(r#""mode":"write-back""#, r#""mood":"write-back""#);
        assert!(serde_json::from_str::<Arrival>(&odd).unwrap_err().to_string().contains("mood"));
    }

    #[test]
    fn modes_are_called_as_they_are_typed() {
        for mode in CarryMode::ALL {
            assert_eq!(serde_json::to_string(&mode).unwrap(), format!("\"{}\"", mode.name()));
        }
    }
}
