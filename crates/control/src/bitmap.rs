//! Dirty bitmaps: each records which parts of a disk changed since a given moment. An incremental
//! backup copies only those parts.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Size, check_name};

/// Largest number of dirty bitmaps of one disk.
pub const BITMAPS_MAX: usize = 8;

/// Whether a bitmap records changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BitmapState {
    /// The dirty bitmap records every change of the disk.
    Recording,
    /// The dirty bitmap records no more changes. The bitmap keeps the changes that it recorded
    /// before it was frozen.
    Frozen,
    /// The bitmap's disk is offline. The recorded changes are kept.
    Offline,
}

/// A dirty bitmap of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Bitmap {
    /// Name of the bitmap. NBD clients find it as metadata context `qemu:dirty-bitmap:NAME` on all
    /// exports of the disk.
    pub name: String,
    /// Whether the bitmap records changes.
    pub state: BitmapState,
    /// Bytes of the disk that one bit of the bitmap covers. Absent while the disk is offline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub granularity: Option<Size>,
    /// How much of the disk the bitmap reports as changed. Absent while the disk is offline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty: Option<Size>,
    /// Why the bitmap reports the whole disk as changed. Absent if the bitmap knows the changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub everything_because: Option<String>,
}

/// All dirty bitmaps of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Bitmaps {
    /// Name of the disk.
    pub disk: String,
    /// The dirty bitmaps, oldest first.
    pub bitmaps: Vec<Bitmap>,
}

/// `POST /v1/disks/{disk}/bitmaps`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BitmapAdd {
    /// Name of the new bitmap. No other bitmap of the disk has this name.
    pub name: String,
    /// Bytes of the disk that one bit covers: a power of two from 4K to 64M. Default: 64K; more on
    /// disks over 4 TiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granularity: Option<Size>,
}

/// `POST /v1/disks/{disk}/bitmaps/{bitmap}/rotate`: moves the recorded changes to a new frozen
/// bitmap. The bitmap continues, empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BitmapRotate {
    /// Name of the new frozen bitmap.
    pub frozen: String,
}

/// `POST /v1/disks/{disk}/bitmaps/{bitmap}/merge`: adds the bitmap's changes to another bitmap, and
/// removes the bitmap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BitmapMerge {
    /// Name of the bitmap that receives the changes. That bitmap must be recording.
    pub into: String,
}

impl BitmapAdd {
    /// Checks that `name` is a valid name of a dirty bitmap.
    ///
    /// # Errors
    /// Returns a message for users if the name is not valid.
    pub fn check_name(name: &str) -> Result<(), String> {
        check_name(name).map_err(|error| format!("'{name}' cannot be a bitmap's name: {error}"))
    }
}
