//! API types of changes of pools, devices and disks: the requests, and their results.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    Admission, BackingTimeout, BackingTimeoutChange, Disk, FlashWrites, FlashWritesChange, Pool, Size,
};

/// `POST /v1/pools`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolCreate {
    /// Name of the pool.
    pub name: String,
    /// Paths of the pool's devices: block devices or files.
    pub devices: Vec<String>,
    /// Size of each file of the pool; files are created with this size. Block devices are used
    /// completely.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
    /// Unit of flash allocation, a power of two. If absent, a 64th of `size`, from 1 MiB to 16 MiB;
    /// 16 MiB without `size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub segment_size: Option<Size>,
    /// Use devices even if they contain other data, which is lost. hob refuses devices with dirty data
    /// of another pool.
    #[serde(default)]
    pub force: bool,
    /// Flash write budget: `1 DWPD`, `500G/day`, `5 years at 600 TBW` or `off`. If absent, flash writes
    /// are not limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(deserialize_with = "crate::flash_writes::budget_or_off")]
    pub flash_writes: Option<FlashWrites>,
}

/// `PATCH /v1/pools/{pool}`: absent fields keep their value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolPatch {
    /// Flash write budget: `1 DWPD`, `500G/day`, `5 years at 600 TBW` or `off`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash_writes: Option<FlashWritesChange>,
}

/// `POST /v1/pools/{pool}/devices`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceAdd {
    /// Path of the device; empty with `peer`.
    #[serde(default)]
    pub path: String,
    /// HOST:PORT of another host's control API. The pool leases `size` bytes of that host's flash
    /// for replicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// Size of the device's file, or of the peer's flash. Block devices are used completely.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
    /// Use the device even if it contains other data, which is lost. hob refuses a device with dirty
    /// data of another pool.
    #[serde(default)]
    pub force: bool,
}

/// `PATCH /v1/pools/{pool}/devices`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DevicePatch {
    /// Whether caches may allocate segments on the device.
    pub admission: Admission,
}

/// `POST /v1/disks`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskAdd {
    /// Name of the disk.
    pub name: String,
    /// A raw file, a block device, `nbd://host/export`, `nbd+unix:///export?socket=…`, `objects+file:///DIRECTORY`,
    /// `s3://BUCKET/PREFIX`, or a qcow2, VMDK, VDI, VHDX or VPC image.
    pub backing: String,
    /// Image format of a file or block device: `raw`, `qcow2`, `vmdk`, `vdi`, `vhdx` or `vpc`. If
    /// absent, the file's extension decides; other files are raw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// Refuse changes.
    #[serde(default)]
    pub read_only: bool,
    /// How long the disk's requests wait for the backing during an outage: `30s`, `2m` or
    /// `forever`. If absent, the setting of `[limits]` applies: `forever` by default. The timeout
    /// does not apply to RBD images. For files and block devices, the timeout applies only after
    /// `ESTALE`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_timeout: Option<BackingTimeout>,
    /// Size of a full stripe of the backing's storage: the data of one stripe, without parity. A
    /// multiple of 4 KiB, at most 16 MiB. If absent or 0, the detected size applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe: Option<Size>,
    /// Datastore of the backing: the storage that it shares with other backings. Detected by
    /// default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// Path on this host at which the disk appears as a file, through FUSE. The path names an
    /// existing regular file, which is covered, or a new file in an existing directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuse: Option<String>,
    /// Make the disk a block device of this host, `/dev/hob/NAME`, by the kernel's NBD driver.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub device: bool,
    /// Absolute path of the disk's vhost-user socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
    /// For a clone: cache blocks of its parent (backing file or RBD snapshot) once for all clones of
    /// it. A disk for the parent serves these blocks; hob creates it if there is none.
    #[serde(default)]
    pub share_parent: bool,
    /// Cache size of the parent's disk if hob creates that disk for this clone. If absent, the
    /// parent's disk has no cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_cache: Option<Size>,
    /// Open a raw file or block device without locking it, because a running QEMU has it open. The
    /// disk has no cache until `PATCH /v1/disks/{disk}` locks the backing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unlocked: bool,
    /// Owner id of a cache in a pool that belongs to no disk, and that becomes the disk's cache,
    /// with its dirty data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adopt_cache: Option<String>,
}

/// `POST /v1/disks/{disk}/resize`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskResize {
    /// New size of the disk, at least its present size. hob grows a raw file; other backings must
    /// have the size already. If absent, the disk gets the backing's present size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
}

/// `PATCH /v1/disks/{disk}`: absent fields keep their value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskPatch {
    /// How long the disk's requests wait for the backing during an outage: `30s`, `2m` or
    /// `forever`. `default` selects the daemon's limit. The timeout does not apply to RBD images.
    /// For files and block devices, the timeout applies only after `ESTALE`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_timeout: Option<BackingTimeoutChange>,
    /// Size of a full stripe of the backing's storage: the data of one stripe, without parity. A
    /// multiple of 4 KiB, at most 16 MiB; 0 selects the detected size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe: Option<Size>,
    /// Lock the backing, or release its lock for another program. Only a disk without a cache can
    /// be unlocked. Every acknowledged write becomes durable in the backing first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub locked: Option<bool>,
    /// Create the disk's block device, or remove it. A device in use is not removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<bool>,
    /// Refuse changes, or allow them. The disk is closed and opened again, so no client may be
    /// connected. A volatile cache is emptied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
    /// Datastore of the backing; an empty text selects the detected datastore. The disk is closed
    /// and opened again, so no client may be connected. A volatile cache is emptied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// Absolute path of the disk's vhost-user socket; an empty text removes the socket. A socket
    /// to which a guest is connected stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
    /// Absolute path at which the disk appears as a file, through FUSE; an empty text removes the
    /// file. A file that a program has open stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuse: Option<String>,
}

/// A pool after a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolChanged {
    /// The changed pool; absent if it was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<Pool>,
    /// Deviations of the result from the request, as sentences.
    pub notes: Vec<String>,
}

/// A disk after a change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskChanged {
    /// The changed disk; absent if it was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<Disk>,
    /// Deviations of the result from the request, as sentences.
    pub notes: Vec<String>,
}
