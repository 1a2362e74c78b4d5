//! Dirty bitmaps of a disk: which parts of it were changed since when. An incremental backup copies those.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Size, check_name};

/// Bitmaps of a disk at most.
pub const BITMAPS_MAX: usize = 8;

/// Whether a bitmap records changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BitmapState {
    /// It notes every change.
    Recording,
    /// It does not change: it has what changed up to the moment when it was frozen.
    Frozen,
    /// Its disk is offline. What it has recorded is kept.
    Offline,
}

/// A bitmap as it is now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Bitmap {
    /// Its name. NBD clients find it as the metadata context `qemu:dirty-bitmap:NAME` of all exports of the disk.
    pub name: String,
    /// Whether it records.
    pub state: BitmapState,
    /// Bytes that one bit of the bitmap stands for. Absent while its disk is offline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub granularity: Option<Size>,
    /// How much of the disk counts as changed; absent while its disk is offline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty: Option<Size>,
    /// Why all of the disk counts as changed, if it does because hob cannot tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub everything_because: Option<String>,
}

/// All bitmaps of a disk, after a change of them too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Bitmaps {
    /// The disk.
    pub disk: String,
    /// In the order in which they were made.
    pub bitmaps: Vec<Bitmap>,
}

/// `POST /v1/disks/{disk}/bitmaps`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BitmapAdd {
    /// Its name, unlike those of the disk's other bitmaps.
    pub name: String,
    /// Bytes that one bit stands for: a power of two from 4K to 64M. Default: 64K, more on disks
    /// over 4 TiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granularity: Option<Size>,
}

/// `POST /v1/disks/{disk}/bitmaps/{bitmap}/rotate`: freezes what the bitmap has recorded under
/// another name. The bitmap continues, empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BitmapRotate {
    /// Name of the frozen bitmap.
    pub frozen: String,
}

/// `POST /v1/disks/{disk}/bitmaps/{bitmap}/merge`: what the bitmap has noted is noted by another one, and it is removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BitmapMerge {
    /// One of the same disk that records.
    pub into: String,
}

impl BitmapAdd {
    /// Why there can be no bitmap of that name.
    ///
    /// # Errors
    /// A line for people.
    pub fn check_name(name: &str) -> Result<(), String> {
        check_name(name).map_err(|error| format!("'{name}' cannot be a bitmap's name: {error}"))
    }
}
