//! Pools, devices, disks and caches: what can be listed, made and changed.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{BackingState, BackingTimeout, BackingTimeoutChange, Dirty, Export, Migration, Size, SwapRoom};

/// Version of the daemon and of its API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// Always `hob`.
    pub name: String,
    /// Version of the daemon.
    pub version: String,
    /// Version of the API, as in its paths (`v1`).
    pub api: String,
    /// Process id.
    pub pid: u32,
    /// Threads that serve I/O.
    pub shards: usize,
}

/// Flash devices of this host, aggregated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// Unit of allocation; sizes of caches are rounded up to it.
    pub segment_size: Size,
    /// Room for caches in all, on devices that are online.
    pub size: Size,
    /// Room that no cache has, on devices that give new segments.
    pub free: Size,
    /// Its devices.
    pub devices: Vec<Device>,
    /// Disks whose caches lie in it.
    pub caches: Vec<String>,
    /// Persistent caches on its devices that belong to no disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub orphans: Vec<Orphan>,
    /// Swap areas of the host on its devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub swap: Vec<SwapRoom>,
}

/// A persistent cache that belongs to no disk of this daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Orphan {
    /// Owner id of its segments on flash, 32 hexadecimal digits.
    pub owner: String,
    /// Room that it takes, its journal included.
    pub size: Size,
}

/// One flash device, or a file on one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Device {
    /// Its path.
    pub path: String,
    /// Whether it can be used.
    pub state: DeviceState,
    /// Why not, where it cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// HOST:PORT of the host that has the device, if it is on another host. It takes second copies
    /// only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// Whether caches may allocate segments on it. Never for a fenced device.
    pub admission: Admission,
    /// Room for caches.
    pub size: Size,
    /// Room that no cache has.
    pub free: Size,
    /// How it is read and written; absent while it is offline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io: Option<IoMode>,
    /// Number of times since the daemon started that it did not answer in time and its caches were bypassed.
    #[serde(default)]
    pub stalls: u64,
}

/// Whether a flash device can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceState {
    /// Yes.
    Online,
    /// It does not answer in time; caches bypass it until it does.
    Stalled,
    /// It failed too often; caches gave it up. Remove it, or add it again.
    Fenced,
    /// It could not be opened.
    Offline,
}

/// Whether caches may allocate segments on a flash device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Admission {
    /// Yes.
    In,
    /// No; segments in use on it stay.
    Out,
}

/// Whether I/O to a device bypasses the kernel's page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum IoMode {
    /// No (O_DIRECT).
    Direct,
    /// Yes, because the filesystem cannot do without.
    Buffered,
    /// There is nothing else: the file lies in memory (tmpfs).
    Memory,
    /// It is on another host.
    Remote,
}

/// A virtual disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Disk {
    /// Its name, which is its NBD export name.
    pub name: String,
    /// Whether it is served.
    pub state: DiskState,
    /// Why not, where it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Path or URI of its data.
    pub backing: String,
    /// State of its backing. Absent while the disk is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_state: Option<BackingState>,
    /// How the file or block device is read; absent for other backings, and until it was opened for the first time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// The disk's own limit for requests that wait for the backing during an outage; absent if it has the daemon's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_timeout: Option<BackingTimeout>,
    /// The limit in effect: the disk's own, or the daemon's. Absent from daemons of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_timeout_in_effect: Option<BackingTimeout>,
    /// Bytes; 0 while it has never been opened.
    pub size: Size,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The backing is not locked, because another program has it open.
    #[serde(default, skip_serializing_if = "is_false")]
    pub unlocked: bool,
    /// The socket at which a machine uses it through vhost-user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
    /// Its cache, if it is to have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<Cache>,
    /// Further exports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exports: Vec<Export>,
    /// The file that it is, for programs that open files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuse: Option<String>,
    /// Why it is not that file now, or an export of it not the file that it is to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuse_reason: Option<String>,
    /// The recording of its requests that is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recording: Option<Recording>,
    /// Its way to another host, or from one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<Migration>,
    /// For a clone that shares blocks of its parent: the disk that serves the parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Why no disk does, where one should.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_reason: Option<String>,
    /// The clones that share this disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub clones: Vec<String>,
}

/// A recording of a disk's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Recording {
    /// Requests recorded so far.
    pub requests: u64,
    /// Requests that are missing because the client is too slow.
    pub dropped: u64,
}

/// Whether a disk is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DiskState {
    /// Yes.
    Online,
    /// Its backing could not be opened; it is tried again now and then.
    #[default]
    Offline,
    /// It is being removed.
    Removing,
    /// Another host has it and migrates it to this one. Reads are served.
    Awaited,
    /// Another host has it.
    Away,
}

/// One disk's part of a pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Cache {
    /// Name of the pool.
    pub pool: String,
    /// Its state.
    pub state: CacheState,
    /// Why its state differs from the configuration, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Room that was asked for, in whole segments.
    pub size: Size,
    /// Room that it has: less than `size` after a device was lost or removed.
    pub room: Size,
    /// Room that its journal takes besides; 0 for a volatile cache.
    #[serde(default)]
    pub journal: Size,
    /// The preset whose parts it has, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// Unit of fill and eviction.
    pub block_size: Size,
    /// Replacement policy.
    pub policy: String,
    /// Write mode.
    pub mode: String,
    /// The mode in effect, and until when, if it differs from `mode`: `write-through until the drain ends`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode_in_effect: Option<String>,
    /// Whether it survives a restart.
    pub persistent: bool,
    /// One room, or a read cache and a write buffer.
    pub layout: String,
    /// Admission rule.
    pub admission: String,
    /// Order in which dirty data is written to the backing.
    pub destage_order: String,
    /// Destaging starts when more than this share of the blocks is dirty, percent.
    pub dirty_start: u8,
    /// It stops when no more than this is, percent.
    pub dirty_stop: u8,
    /// Above this share, writes to blocks that are not in the cache go past it, percent.
    pub dirty_full: u8,
    /// For how many seconds the backing may lag; 0: until the shares say so.
    pub dirty_age_max: u32,
    /// Copies on flash.
    pub copies: String,
    /// Whether the backing always holds a state that existed.
    pub ordered: bool,
    /// When it is compared with its backing after a restart.
    #[serde(default)]
    pub verify: String,
    /// Memory above it; 0 for none.
    #[serde(default)]
    pub ram: Size,
    /// Data that is not on the backing yet; absent if nothing can be dirty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty: Option<Dirty>,
    /// How far the comparison with the backing after a restart is; absent where nothing is left to be compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verification: Option<Verification>,
}

/// How far a cache is compared with its backing after a restart, since nothing proved that the backing is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Verification {
    /// Data that is not compared yet; reads of it go to the backing.
    pub left: Size,
    /// All that was to be compared.
    pub total: Size,
}

/// State of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CacheState {
    /// The disk has none, or it could not be given any flash.
    #[default]
    None,
    /// Serving.
    Active,
    /// A change is under way; requests go to the backing.
    Changing,
    /// Its journal is being read after a restart; reads go to the backing, and what may not have to wait.
    Recovering,
    /// Its flash does not answer in time; requests go to the backing.
    Stalled,
    /// All of its flash is fenced; requests go to the backing.
    Fenced,
}

/// `POST /v1/pools`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolCreate {
    /// Its name.
    pub name: String,
    /// Paths of its devices: block devices or files.
    pub devices: Vec<String>,
    /// Size of each file; files are made this large. Block devices are used whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
    /// Unit of allocation, a power of two; 16 MiB if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub segment_size: Option<Size>,
    /// Use devices that seem to be in use. Their data is lost.
    #[serde(default)]
    pub force: bool,
}

/// `POST /v1/pools/{pool}/devices`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceAdd {
    /// Its path; nothing with `peer`.
    #[serde(default)]
    pub path: String,
    /// HOST:PORT of another host's control API: so much of its flash, for second copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// As in [`PoolCreate`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
    /// As in [`PoolCreate`].
    #[serde(default)]
    pub force: bool,
}

/// `PATCH /v1/pools/{pool}/devices`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DevicePatch {
    /// Whether caches may allocate segments on it.
    pub admission: Admission,
}

/// `POST /v1/disks`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskAdd {
    /// Its name.
    pub name: String,
    /// A raw file, a block device, `nbd://host/export`, `nbd+unix:///export?socket=…`, `objects+file:///DIRECTORY`,
    /// `s3://BUCKET/PREFIX`, or a qcow2, VMDK, VDI, VHDX or VPC image.
    pub backing: String,
    /// How a file or block device is read: `raw`, `qcow2`, `vmdk`, `vdi`, `vhdx` or `vpc`. By the file's extension if absent, otherwise raw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// Refuse changes.
    #[serde(default)]
    pub read_only: bool,
    /// How long its requests wait for the backing during an outage: `30s`, `2m` or `forever`. As `[limits]` says if absent: `forever` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_timeout: Option<BackingTimeout>,
    /// The storage that its backing shares with others; detected by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// A path on this host at which it is to be a file, for programs that open files: an existing regular file, which is covered,
    /// or a name in a directory that exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuse: Option<String>,
    /// Absolute path of a socket at which a machine uses the disk through vhost-user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
    /// For a clone: cache blocks of its parent's snapshot once for all clones of that snapshot. A
    /// disk for the snapshot serves them; it is created if there is none.
    #[serde(default)]
    pub share_parent: bool,
    /// The size of the cache of that disk, if it is made for this one; it has none if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_cache: Option<Size>,
    /// Open the backing, a raw file or block device, without its lock, because a running QEMU has it. The disk has no
    /// cache until `PATCH /v1/disks/{disk}` locks the backing.
    #[serde(default, skip_serializing_if = "is_false")]
    pub unlocked: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// `POST /v1/disks/{disk}/resize`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskResize {
    /// How large it is to be: no smaller than it is. A raw file is made that large; anything else has to have that size already.
    /// Absent: as large as its backing is now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
}

/// `PATCH /v1/disks/{disk}`: absent fields keep their value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskPatch {
    /// How long its requests wait for the backing during an outage, from now on: `30s`, `2m` or `forever`; `default` for the
    /// limit of the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing_timeout: Option<BackingTimeoutChange>,
    /// Lock the backing, or release its lock for another program. Only a disk without a cache can be unlocked; every
    /// acknowledged write is durable in the backing first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub locked: Option<bool>,
}

/// A pool after a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolChanged {
    /// The pool; absent when it was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<Pool>,
    /// Deviations from the request, as sentences.
    pub notes: Vec<String>,
}

/// A disk after a change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskChanged {
    /// The disk; absent when it was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<Disk>,
    /// Deviations from the request, as sentences.
    pub notes: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

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
            format: None,
            size: Size(1 << 30),
            read_only: true,
            unlocked: true,
            parent: Some("golden".into()),
            parent_reason: None,
            clones: vec!["vm2".into()],
            vhost_user: Some("/run/vm1.sock".into()),
            cache: Some(Cache {
                pool: "default".into(),
                state: CacheState::Changing,
                reason: None,
                mode_in_effect: None,
                size: Size(64 << 20),
                room: Size(48 << 20),
                block_size: Size(4096),
                policy: "lru".into(),
                journal: Size(1 << 20),
                preset: None,
                mode: "write-back".into(),
                persistent: true,
                layout: "unified".into(),
                admission: "always".into(),
                destage_order: "elevator".into(),
                dirty_start: 10,
                dirty_stop: 5,
                dirty_full: 70,
                dirty_age_max: 30,
                copies: "1".into(),
                ordered: false,
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
            }),
            exports: vec![],
            fuse: Some("/run/vm1.img".into()),
            fuse_reason: Some("in use".into()),
            recording: Some(Recording { requests: 7, dropped: 1 }),
            migration: None,
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
                force: false
            }
        );
    }
}
