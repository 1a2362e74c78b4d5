//! API types of pools, devices, disks and caches.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::named::named;
use crate::{
    BackingState, BackingTimeout, CacheFlashWrites, Dirty, Export, FlashWritesUsage, Migration, Size,
    SwapRoom,
};

/// Version of the daemon and of its API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// Name of the program: always `hob`.
    pub name: String,
    /// Version of the daemon.
    pub version: String,
    /// Version of the API as in its URLs (`v1`).
    pub api: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// Number of shards, which are the threads that serve I/O.
    pub shards: usize,
}

/// A pool: the flash devices that this host's caches share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Pool {
    /// Name of the pool.
    pub name: String,
    /// Unit of flash allocation. Cache sizes are rounded up to it.
    pub segment_size: Size,
    /// Space for caches on all devices of the pool that are online.
    pub size: Size,
    /// Unallocated space on devices that allow allocation.
    pub free: Size,
    /// Devices of the pool.
    pub devices: Vec<Device>,
    /// Names of the disks whose caches are in the pool.
    pub caches: Vec<String>,
    /// Division of the pool among its shared caches; absent without shared caches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedCapacity>,
    /// Flash writes of the pool's caches, and their budget; absent from earlier versions of the
    /// daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash_writes: Option<FlashWritesUsage>,
    /// Persistent caches in the pool that belong to no disk of this daemon.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub orphans: Vec<Orphan>,
    /// Swap areas of the host in the pool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub swap: Vec<SwapRoom>,
}

/// Limits of a shared cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SharedLimits {
    /// Minimum size; 0 for one segment.
    pub min: Size,
    /// Maximum size; 0 for none.
    pub max: Size,
    /// Weight of the cache's hits when hob chooses the sizes of the pool's shared caches.
    pub shares: u32,
    /// Whether the cache keeps its size.
    pub pin: bool,
}

/// The part of a pool that shared caches divide.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SharedCapacity {
    /// Capacity that the shared caches divide: their sizes, and free space.
    pub size: Size,
    /// Capacity that has moved from one cache to another since the daemon started.
    pub moved: Size,
    /// Dirty data that hob wrote to the backings so that its capacity could move to another cache.
    pub destaged: Size,
    /// The shared caches, by disk name.
    pub caches: Vec<SharedCache>,
}

/// A shared cache, and the benefit of its size for the recent reads of its disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SharedCache {
    /// Name of the disk.
    pub disk: String,
    /// Present size of the cache.
    pub size: Size,
    /// Size that the cache should have for the highest benefit of all shared caches together. hob
    /// changes the present size towards this size step by step.
    pub target: Size,
    /// Limits of the cache's size.
    pub limits: SharedLimits,
    /// Recent reads of the disk per second.
    pub reads_per_second: u64,
    /// Estimated share of the disk's recent reads that a cache of the present size serves, in
    /// thousandths.
    pub hit_permille: u32,
    /// Estimated additional hits per second with 1/16 more capacity.
    pub more_hits_per_second: u64,
    /// Estimated additional hits per second, compared with an equal part of the capacity; negative if
    /// an equal part would give more hits.
    pub gained_hits_per_second: i64,
}

/// A persistent cache that belongs to no disk of this daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Orphan {
    /// Owner id of the cache's segments on flash, 32 hexadecimal digits.
    pub owner: String,
    /// Flash that the orphan cache occupies, including its journal.
    pub size: Size,
    /// Dirty data of the orphan cache: writes that were acknowledged to a guest. Absent if its
    /// journal cannot be read, or is not read yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty: Option<Size>,
    /// Disk whose backing the orphan cache belonged to, if this daemon has that disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
}

/// A flash device of a pool, or a file used as one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Device {
    /// Path of the device.
    pub path: String,
    /// Whether caches can use the device.
    pub state: DeviceState,
    /// Why the device cannot be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// HOST:PORT of the host that has the device, if it is remote flash. A remote device stores
    /// replicas only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// Whether caches may allocate segments on the device. Never for a fenced device.
    pub admission: Admission,
    /// Space for caches on the device.
    pub size: Size,
    /// Unallocated space on the device.
    pub free: Size,
    /// How hob reads and writes the device; absent while the device is offline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io: Option<IoMode>,
    /// Number of times since the daemon started that the device did not answer in time and its
    /// caches were bypassed.
    #[serde(default)]
    pub stalls: u64,
}

named! {
    /// Whether a flash device can be used.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
    #[serde(rename_all = "kebab-case")]
    pub enum DeviceState {
        /// The device is open and in use.
        Online = "online",
        /// The device does not answer in time. Requests that need the device wait, and caches bypass it for
        /// other requests.
        Stalled = "stalled",
        /// The device failed too often and hob stopped using it. The reason says when hob uses the
        /// device again, or what to do.
        Fenced = "fenced",
        /// The device could not be opened.
        Offline = "offline",
    }
}

/// Whether caches may allocate segments on a flash device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Admission {
    /// Caches may allocate segments on the device.
    In,
    /// Caches may not allocate segments on the device. Segments in use stay.
    Out,
}

/// Whether I/O to a device bypasses the kernel's page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum IoMode {
    /// I/O bypasses the page cache (O_DIRECT).
    Direct,
    /// I/O uses the page cache, because the filesystem has no direct I/O.
    Buffered,
    /// I/O uses memory only, because the file is on a tmpfs.
    Memory,
    /// The device is on another host.
    Remote,
}

/// A virtual disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Disk {
    /// Name of the disk, also its NBD export name.
    pub name: String,
    /// Whether the disk is served.
    pub state: DiskState,
    /// Why the disk is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Path or URI of the disk's backing.
    pub backing: String,
    /// State of the disk's backing. Absent while the disk is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_state: Option<BackingState>,
    /// Image format of the file or block device. Absent for other backings, and until the backing
    /// was opened for the first time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// The disk's own backing timeout: how long requests wait during an outage. Absent if the disk
    /// uses the daemon's timeout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_timeout: Option<BackingTimeout>,
    /// The backing timeout in effect: the disk's own, or the daemon's. Absent from earlier versions
    /// of the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_timeout_in_effect: Option<BackingTimeout>,
    /// Why the backing timeout does not apply to this backing, or applies only in some outages.
    /// Absent if it applies in all outages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_timeout_reason: Option<String>,
    /// The disk's own stripe size, bytes. Absent if the disk uses the detected one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe: Option<Size>,
    /// The stripe size in effect: the disk's own, or the detected one, bytes. Absent if it is
    /// unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_in_effect: Option<Size>,
    /// Size of the disk, bytes; 0 until the backing was opened for the first time.
    pub size: Size,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether the backing is unlocked because another program has it open.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unlocked: bool,
    /// Path of the disk's vhost-user socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
    /// The disk's cache, if one is configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<Cache>,
    /// Additional exports of the disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exports: Vec<Export>,
    /// Path of the file through which programs use the disk (FUSE).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuse: Option<String>,
    /// Why the FUSE file of the disk or of an export is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuse_reason: Option<String>,
    /// Path of the disk's block device on this host, if it should have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Why the block device is missing, or not connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_reason: Option<String>,
    /// The recording of the disk's requests that is in progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recording: Option<Recording>,
    /// The disk's migration to or from another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<Migration>,
    /// For a clone that shares its parent's cached blocks: the disk that serves the parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Why no disk serves the clone's parent, although one should.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_reason: Option<String>,
    /// Names of the clones that share this disk's cached blocks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub clones: Vec<String>,
}

/// A recording of a disk's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Recording {
    /// Number of requests recorded so far.
    pub requests: u64,
    /// Number of requests missing from the recording because its client is too slow.
    pub dropped: u64,
}

named! {
    /// Whether a disk is served.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
    #[serde(rename_all = "kebab-case")]
    pub enum DiskState {
        /// The disk is served.
        Online = "online",
        /// The disk's backing could not be opened. The daemon tries again periodically.
        #[default]
        Offline = "offline",
        /// The disk is being removed.
        Removing = "removing",
        /// Another host owns the disk and migrates it to this host. This host serves reads of the disk.
        Awaited = "awaited",
        /// Another host owns the disk.
        Away = "away",
    }
}

/// The cache of a disk: its part of a pool, and its settings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Cache {
    /// Name of the pool.
    pub pool: String,
    /// Whether requests use the cache.
    pub state: CacheState,
    /// Why the cache's state differs from the configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Configured size of the cache, in whole segments; the size that hob has chosen for a shared
    /// cache.
    pub size: Size,
    /// Details of a shared cache, whose size hob chooses; absent for a fixed size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedCache>,
    /// Flash that the cache has; less than `size` after a device was lost or removed.
    pub room: Size,
    /// Flash for the cache's journal, in addition to `size`; 0 for a volatile cache.
    #[serde(default)]
    pub journal: Size,
    /// The preset that equals the cache's settings, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// Block size: the unit of fill and eviction.
    pub block_size: Size,
    /// Replacement policy of the cache.
    pub policy: String,
    /// Write mode of the cache.
    pub mode: String,
    /// The write mode in effect and its end, if it differs from `mode`: `write-through until the
    /// drain ends`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode_in_effect: Option<String>,
    /// Whether the cache survives a restart.
    pub persistent: bool,
    /// Layout of the cache: `unified`, or `split` into a read cache and a write buffer.
    pub layout: String,
    /// Admission rule of the cache.
    pub admission: String,
    /// Amount of data that a read miss brings into the cache.
    #[serde(default)]
    pub fill: String,
    /// Order in which dirty data is written to the backing.
    pub destage_order: String,
    /// When dirty data takes up more than this percentage of the cache, destaging starts.
    pub dirty_start: u8,
    /// When dirty data takes up at most this percentage of the cache, destaging stops.
    pub dirty_stop: u8,
    /// When dirty data takes up at least this percentage of the cache, writes to uncached blocks
    /// bypass the cache. In a split cache, the size of the write buffer has this effect.
    pub dirty_full: u8,
    /// Maximum age of dirty data, seconds. With 0, only `dirty_start` starts destaging.
    pub dirty_age_max: u32,
    /// Number of copies on flash, of all data or only of dirty data.
    pub copies: String,
    /// Whether destaging keeps the order of writes before and after a guest's FLUSH.
    pub ordered: bool,
    /// When the cache is compared with its backing after a restart.
    #[serde(default)]
    pub verify: String,
    /// Memory above the cache, bytes; 0 for none.
    #[serde(default)]
    pub ram: Size,
    /// Dirty data of the cache; absent if the cache cannot have any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty: Option<Dirty>,
    /// Progress of the comparison with the backing after a restart. Absent if nothing is left to
    /// compare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verification: Option<Verification>,
    /// The cache's part of the pool's flash write budget; absent without a budget.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash_writes: Option<CacheFlashWrites>,
}

/// Progress of a cache's comparison with its backing. A restart requires it if there is no evidence
/// that the backing is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Verification {
    /// Cached data that was not compared yet. Reads of it go to the backing.
    pub left: Size,
    /// Amount of cached data to compare when the comparison began.
    pub total: Size,
}

named! {
    /// State of a disk's cache.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
    #[serde(rename_all = "kebab-case")]
    pub enum CacheState {
        /// The disk has no cache, or the pool has no flash for it.
        #[default]
        None = "none",
        /// The cache serves requests.
        Active = "active",
        /// The cache is being changed, and requests go to the backing.
        Changing = "changing",
        /// The journal is being read after a restart. Reads go to the backing. Reads of data that may
        /// be dirty wait.
        Recovering = "recovering",
        /// The cache's flash does not answer in time. Requests that need it wait, and other requests go to
        /// the backing.
        Stalled = "stalled",
        /// All flash of the cache is fenced, and requests go to the backing.
        Fenced = "fenced",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DevicePatch, PoolCreate};

    #[test]
    fn resources_survive_json() {
        let disk = Disk {
            name: "vm1".into(),
            state: DiskState::Offline,
            reason: Some("no such file".into()),
            backing: "/vm.img".into(),
            backing_state: Some(BackingState::Slow { oldest_request_ms: 2500, waiting_requests: 7 }),
            backing_timeout: Some(BackingTimeout::Forever),
            backing_timeout_in_effect: Some(BackingTimeout::Forever),
            backing_timeout_reason: Some("does not apply to files".into()),
            stripe: Some(Size(192 << 10)),
            stripe_in_effect: Some(Size(192 << 10)),
            size: Size(1 << 30),
            read_only: true,
            unlocked: true,
            parent: Some("golden".into()),
            clones: vec!["vm2".into()],
            vhost_user: Some("/run/vm1.sock".into()),
            cache: Some(Cache {
                pool: "default".into(),
                state: CacheState::Changing,
                size: Size(64 << 20),
                room: Size(48 << 20),
                block_size: Size(4096),
                policy: "lru".into(),
                journal: Size(1 << 20),
                mode: "write-back".into(),
                persistent: true,
                layout: "unified".into(),
                admission: "always".into(),
                fill: "sectors".into(),
                destage_order: "elevator".into(),
                dirty_start: 10,
                dirty_stop: 5,
                dirty_full: 70,
                dirty_age_max: 30,
                copies: "1".into(),
                verify: "auto".into(),
                ram: Size(64 << 20),
                dirty: Some(Dirty {
                    size: Size(8192),
                    lost: Size(0),
                    draining: true,
                    rate: Size(4096),
                    eta_seconds: Some(2),
                    why: None,
                }),
                verification: Some(Verification { left: Size(4096), total: Size(8192) }),
                ..Cache::default()
            }),
            fuse: Some("/run/vm1.img".into()),
            fuse_reason: Some("in use".into()),
            device: Some("/dev/hob/vm1".into()),
            device_reason: Some("no driver".into()),
            recording: Some(Recording { requests: 7, dropped: 1 }),
            ..Disk::default()
        };
        let text = serde_json::to_string(&disk).unwrap();
        assert!(text.contains(r#""state":"offline""#) && text.contains(r#""state":"changing""#), "{text}");
        assert_eq!(serde_json::from_str::<Disk>(&text).unwrap(), disk);
    }

    #[test]
    fn admission_is_one_of_two_words() {
        let patch = DevicePatch { admission: Admission::Out };
        assert_eq!(serde_json::to_string(&patch).unwrap(), r#"{"admission":"out"}"#);
        assert_eq!(serde_json::from_str::<DevicePatch>(r#"{"admission":"out"}"#).unwrap(), patch);
        for wrong in [r#"{"admission":"Out"}"#, r#"{"admision":"out"}"#, "{}"] {
            let error = serde_json::from_str::<DevicePatch>(wrong).unwrap_err().to_string();
            assert!(error.contains("`out`") || error.contains("`admission`"), "{error}");
        }
    }

    #[test]
    fn absent_fields_have_defaults() {
        let create: PoolCreate = serde_json::from_str(r#"{"name":"p","devices":["/a"]}"#).unwrap();
        assert_eq!(
            create,
            PoolCreate {
                name: "p".into(),
                devices: vec!["/a".into()],
                size: None,
                segment_size: None,
                force: false,
                flash_writes: None,
            }
        );
    }
}
