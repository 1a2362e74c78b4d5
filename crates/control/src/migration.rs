//! Migration of a disk and its cache to another host: requests to the source, its progress, and the
//! protocol between the two hosts (docs/decisions/0013).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{BackingTimeout, CacheSettings, Export, Qos, Size};

/// What happens to the cache of a migrating disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CarryMode {
    /// It is copied while the machine runs, hottest first; the rest after the hand-over.
    #[default]
    Copy,
    /// The destination gets a list of the cached blocks and reads them from the backing.
    HeatMap,
    /// The destination starts with an empty cache. On a miss it reads the flash of the source.
    Remote,
    /// It is not carried.
    Drop,
}

impl CarryMode {
    /// All of them.
    pub const ALL: [CarryMode; 4] = [CarryMode::Copy, CarryMode::HeatMap, CarryMode::Remote, CarryMode::Drop];

    /// Name in the command line and the API.
    pub fn name(self) -> &'static str {
        match self {
            CarryMode::Copy => "copy",
            CarryMode::HeatMap => "heat-map",
            CarryMode::Remote => "remote",
            CarryMode::Drop => "drop",
        }
    }
}

/// What triggers the hand-over of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Switch {
    /// A write that waits at the destination: the machine runs there.
    #[default]
    OnWrite,
    /// Nothing but the word of the operator.
    Ask,
}

/// `POST /v1/disks/{disk}/migration`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrationStart {
    /// Control API of the other host: `HOST:PORT`.
    pub to: String,
    /// What happens to the cache.
    #[serde(default)]
    pub cache: CarryMode,
    /// Bytes a second that the cache takes on its way, at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Size>,
    /// What triggers the hand-over.
    #[serde(default)]
    pub switch: Switch,
    /// The backing as the other host names it; as here if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<String>,
    /// The pool of the other host; the one of the same name, or the only one, if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Path of a socket there at which a machine uses the disk through vhost-user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
    /// A path there at which the disk is to be a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuse: Option<String>,
}

/// `POST /v1/disks/{disk}/migration/take-back`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TakeBack {
    /// The other host will never serve the disk again.
    pub force: bool,
}

/// On which side of a migration a host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// It has, or had, the disk.
    Source,
    /// It is to have it, or has it now.
    Destination,
}

/// How far a migration is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationState {
    /// Dirty data goes to the backing; at the destination: the disk is being opened.
    Preparing,
    /// The destination is asked to await the disk.
    Announcing,
    /// The destination awaits the disk, and pulls.
    Copying,
    /// The guest waits.
    Frozen,
    /// The disk is the other host's, which has not said so yet.
    HandingOver,
    /// The other host has the disk and reads cached data from this one.
    Serving,
    /// It has ended: the disk is where it was to go.
    Over,
    /// The disk stays here; the destination is being told.
    Cancelling,
    /// It has ended: the disk stayed.
    Kept,
    /// At the destination: the disk is there in standby.
    Awaiting,
    /// At the destination: the disk is served, and that is being made durable.
    Arrived,
    /// At the destination: the disk is served, and the cache still pulled.
    Filling,
    /// The disk is at another host.
    Away,
}

/// How far a migration is, in figures. `GET /v1/disks/{disk}/migration`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Migration {
    /// The disk.
    pub disk: String,
    /// On which side this host is.
    pub side: Side,
    /// The other host, as far as it is known.
    pub peer: String,
    /// What happens to the cache.
    pub cache: CarryMode,
    /// How far it is.
    pub state: MigrationState,
    /// Whatever is to be done before the hand-over is done.
    pub warm: bool,
    /// A write waits at the destination.
    pub wanted: bool,
    /// The source's generation.
    pub generation: u64,
    /// The number of the attempt.
    pub attempt: u32,
    /// The last error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Cached data at the source when the migration began.
    pub valid: Size,
    /// Data sent to the destination.
    pub sent: Size,
    /// Data sent again because it had changed, part of `sent`.
    pub resent: Size,
    /// Data that the destination has pulled.
    pub pulled: Size,
    /// Data that it has to pull.
    pub left: Size,
    /// Bytes a second that are pulled.
    pub rate: Size,
    /// Pulled data, percent of all.
    pub percent: u8,
    /// Seconds until it is pulled, at that rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_seconds: Option<u64>,
    /// How long draining took, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_ms: Option<u64>,
    /// From the freeze of the disk until the destination said that it has it, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<f64>,
    /// At the destination: from the first write that waited until it was served, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_ms: Option<f64>,
    /// Since it began, or until it ended, milliseconds.
    pub total_ms: u64,
}

/// The migration attempt that a call belongs to, as the query of its path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::IntoParams)]
pub struct CarrySession {
    /// Generation of the owner.
    pub generation: u64,
    /// Number of the owner's attempt.
    pub attempt: u32,
    /// Tells this disk from others of its name: 32 hexadecimal digits.
    pub lineage: String,
}

/// Announces a disk to the destination. `POST /v1/disks/{disk}/arrival/arrive`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Arrival {
    /// The host that has it, in words.
    pub from: String,
    /// Path or URI of its data, valid at the destination.
    pub backing: String,
    /// How that is read, where its name does not say it: `raw`, `qcow2`, …
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// How long its requests wait for the backing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_timeout: Option<BackingTimeout>,
    /// Its size, bytes.
    pub size_bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// What happens to the cache.
    pub mode: CarryMode,
    /// Its cache, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<ArrivingCache>,
    /// Further NBD exports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exports: Vec<Export>,
    /// Entitlement of the disk, if one was configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qos: Option<Qos>,
    /// Its datastore, if one was configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// Path of the vhost-user socket, if a guest uses it so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
    /// The file that it is to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuse: Option<String>,
    /// The cluster that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// Guests that have not been told of a failed flush: the destination tells as many. Absent if there are none; an older hob does not know it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub flush_failures_owed: u32,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// The cache of an arriving disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ArrivingCache {
    /// The pool that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The pool at the source: one of the same name is taken if there is one.
    pub like_pool: String,
    /// Its size.
    pub size: Size,
    /// All its settings.
    #[schema(inline)]
    pub settings: ArrivingSettings,
}

/// [`CacheSettings`] that can be read.
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
    /// Why it refused the call; absent if it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<CallRefusal>,
    /// A write waits.
    pub wants: bool,
    /// It has pulled everything.
    pub done: bool,
    /// Bytes it has pulled.
    pub pulled_bytes: u64,
    /// Bytes that it had pulled before, part of the above.
    pub again_bytes: u64,
    /// Bytes it has to pull.
    pub left_bytes: u64,
    /// The page of the block list that it needs next; absent if it needs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<u32>,
    /// Ranges of the list that it has not pulled yet.
    pub ranges: u64,
}

/// Why a destination refused a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum CallRefusal {
    /// It awaits the disk in another session, or not at all.
    NotAwaited,
    /// It owns the disk.
    Owner {
        /// Generation of the owner.
        generation: u64,
    },
    /// It could not; later it may.
    Failed {
        /// Why.
        why: String,
    },
    /// It never will.
    Never {
        /// Why.
        why: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arrival_survives_json_and_refuses_what_it_does_not_know() {
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
            format: None,
            backing_timeout: None,
            size_bytes: 4096,
            read_only: false,
            mode: CarryMode::HeatMap,
            cache: Some(cache),
            exports: vec![],
            qos: None,
            datastore: None,
            vhost_user: None,
            fuse: None,
            cluster: None,
            flush_failures_owed: 0,
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
