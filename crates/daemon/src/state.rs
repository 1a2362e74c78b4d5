//! The daemon's persistent state: its pools, disks and caches.
//!
//! The state is one JSON file, which is replaced as a whole: hob writes and syncs a new file,
//! exchanges both files, and syncs the directory. The previous file stays beside the new one and
//! keeps its space, so a full filesystem does not prevent the next save. A malformed file is never
//! overwritten. The daemon refuses to start and reports the error.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use hob_control::{BackingTimeout, Export, FlashWrites, Size};
use hob_storage::backing::Format;
use hob_storage::failing;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::stripe;
use crate::writable;

mod bitmap;
mod cache;
mod image;
mod last_served;
mod migration;
mod qos;

pub(crate) use bitmap::BitmapSpec;
pub(crate) use cache::{BootId, CacheOwner, CacheSpec, Closed, DestageSpec, JournalSpec, SharedSize};
pub(crate) use image::{FileSpec, FormatName, ImageSpec};
pub(crate) use last_served::{LastServed, Served};
pub(crate) use migration::{GoneState, MigrationSpec, RecordSpec};
pub(crate) use qos::{ControlSpec, DatastoreState, DiskQosSpec, PolicyState, check_qos, patched_qos};

/// Version of the file format.
const VERSION: u32 = 1;

/// The state file is padded with newlines to a multiple of this many bytes.
const SPARE_BYTES: usize = 16 << 10;

/// Maximum length of a state file in bytes.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// All configured objects of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct State {
    /// Version of the state file's format.
    pub(crate) version: u32,
    pub(crate) pools: Vec<PoolState>,
    pub(crate) disks: Vec<DiskState>,
    /// Pools that hob.toml defines and that were removed by command.
    #[serde(default)]
    pub(crate) pools_removed: Vec<String>,
    /// Disks that hob.toml defines and that were removed by command.
    #[serde(default)]
    pub(crate) disks_removed: Vec<String>,
    /// Storage policies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) policies: Vec<PolicyState>,
    /// Datastores with changed settings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) datastores: Vec<DatastoreState>,
    /// Incoming disks of migrations that did not complete.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) gone: Vec<GoneState>,
    /// Incoming disks of migrations, as they were when they still waited for the cluster.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) waited: Vec<DiskState>,
    /// Swap areas of the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) swaps: Vec<SwapSpec>,
    /// Definitions of hob.toml when it was last read, as JSON, keyed by kind and name. Also has deleted
    /// definitions whose objects still exist, dropped devices, and changes that were not made (the key
    /// begins with `unapplied`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) definitions: BTreeMap<String, String>,
    /// Why caches that hob.toml defines could not be created, by disk.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) caches_refused: BTreeMap<String, String>,
    /// Caches whose data must not be used any more, although their segments may still be allocated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) ended_caches: Vec<EndedCache>,
    /// Changes that failed in the background and were not acknowledged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) failed_tasks: Vec<FailedTask>,
}

/// A change that failed in the background.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FailedTask {
    /// The command that started the change.
    pub(crate) what: String,
    /// Subject of the change, such as the name of a disk.
    pub(crate) subject: String,
    /// Why the change failed.
    pub(crate) error: String,
}

/// A cache that the daemon has ended. A failed device may have refused to free its segments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EndedCache {
    pub(crate) pool: String,
    /// Owner id of the cache.
    #[serde(with = "cache::word")]
    pub(crate) owner: CacheOwner,
}

/// A pool and its devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PoolState {
    pub(crate) name: String,
    /// Paths of the pool's devices on this host.
    pub(crate) devices: Vec<PathBuf>,
    /// The devices of the pool on which allocation is off.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) devices_out: Vec<PathBuf>,
    /// Devices of the pool that are on other hosts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) peers: Vec<PeerState>,
    /// Size of a segment, the unit in which the pool's flash is allocated to caches.
    pub(crate) segment_size: Size,
    /// UUID of the pool on its devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) uuid: Option<String>,
    /// Number of device ids that the pool had given out. If the pool has given out more since,
    /// devices were added after this state was saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device_ids: Option<u16>,
    /// Flash write budget.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) flash_writes: Option<FlashWrites>,
    /// True if the pool was opened without a saved state, and not all of its devices have been
    /// present since. Missing devices may have dirty data of disks that the state does not know.
    #[serde(default, skip_serializing_if = "cache::is_default")]
    pub(crate) is_unseen: bool,
}

impl PoolState {
    /// Returns false if hob was never able to create or to open the pool of hob.toml.
    pub(crate) fn was_created(&self) -> bool {
        self.uuid.is_some() || self.device_ids.is_some() || !self.is_unseen
    }
}

/// A device on another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PeerState {
    /// Path of the local socket that leads to the device.
    pub(crate) path: PathBuf,
    /// HOST:PORT of the other host's control API.
    pub(crate) host: String,
    /// Size of the flash lease.
    pub(crate) size: Size,
}

/// A swap area of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SwapSpec {
    pub(crate) name: String,
    pub(crate) pool: String,
    /// Device on which the area was found last.
    pub(crate) device: PathBuf,
    /// Size of the area, a multiple of the segment size.
    pub(crate) size: Size,
    /// Owner id of the area's segments, which the area's header repeats.
    #[serde(with = "cache::word")]
    pub(crate) owner: CacheOwner,
    /// True if hob turns the area on when the daemon starts.
    pub(crate) on: bool,
    /// The swap priority that the operator requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) priority: Option<u16>,
}

/// A disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiskState {
    pub(crate) name: String,
    /// Path or URI of the disk's backing.
    pub(crate) backing: String,
    /// Permanent name that the backing's block device had when the disk was first opened. The path
    /// may lead to another device after a restart of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) backing_device: Option<String>,
    /// Image format and files, if the backing is a path. State files of earlier versions lack this
    /// field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) image: Option<ImageSpec>,
    /// True if the disk refuses writes.
    pub(crate) read_only: bool,
    /// The configured cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cache: Option<CacheSpec>,
    /// How long requests wait for the disk's backing. If absent, the daemon's limit applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) backing_timeout: Option<BackingTimeout>,
    /// Stripe size of the backing's storage, if an operator chose one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) stripe: Option<Size>,
    /// Number of guests that must still get an error because acknowledged writes may be lost. If
    /// the number decreases, hob may save the new number some seconds later.
    #[serde(default, skip_serializing_if = "cache::is_default")]
    pub(crate) flush_failures_owed: u32,
    /// Datastore of the disk, if an operator named one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) datastore: Option<String>,
    /// Path of the disk's vhost-user socket, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) vhost_user: Option<String>,
    /// Entitlement of the disk, if one was configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) qos: Option<DiskQosSpec>,
    /// Additional exports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) exports: Vec<Export>,
    /// Path of the disk's file, if it is mounted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fuse: Option<String>,
    /// True if the disk is a block device of this host.
    #[serde(default, skip_serializing_if = "cache::is_default")]
    pub(crate) device: bool,
    /// Migration state of the disk, if it ever migrated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) migration: Option<MigrationSpec>,
    /// In a cluster: the generation to which the disk's data in flash belongs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) generation: Option<u64>,
    /// Present if the disk is a clone that shares its parent's blocks with other clones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) share_parent: Option<ShareSpec>,
    /// True if hob created the disk to serve the parent of clones. hob removes the disk with the
    /// last clone.
    #[serde(default, skip_serializing_if = "cache::is_default")]
    pub(crate) for_clones: bool,
    /// Dirty bitmaps of the disk; their content is in separate files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) bitmaps: Vec<BitmapSpec>,
    /// True if the backing is opened without a lock, because a running QEMU has the lock.
    #[serde(default, skip_serializing_if = "cache::is_default")]
    pub(crate) unlocked: bool,
    /// Id of the host's boot in which hob serves the disk, while the memory of hob or of its
    /// `qemu-nbd` may have unflushed changes of the disk. If hob is killed in this boot, the file
    /// that records these changes must exist at the next start.
    #[serde(default, with = "cache::boot", skip_serializing_if = "Option::is_none")]
    pub(crate) in_memory: Option<BootId>,
    /// True until the disk is served for the first time. If the state was lost, an unreadable cache
    /// that belongs to no disk may have dirty data of a disk that seems new.
    #[serde(default, skip_serializing_if = "cache::is_default")]
    pub(crate) is_new: bool,
}

/// How a clone shares the blocks of its parent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShareSpec {
    /// Size of the cache for the parent's disk, if that disk is created for this clone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cache: Option<Size>,
    /// Name of the disk that serves the parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) disk: Option<String>,
}

impl DiskState {
    /// Creates a disk with default settings.
    pub(crate) fn new(name: String, backing: String, read_only: bool) -> DiskState {
        DiskState {
            name,
            backing,
            image: Some(ImageSpec::default()),
            read_only,
            is_new: true,
            ..DiskState::default()
        }
    }
}

impl DiskState {
    /// Returns the number of guests that hob assumes to have written to the disk if the real number
    /// is unknown: one for the disk's own export, and one for each further writable export.
    pub(crate) fn writers_max(&self) -> u32 {
        let more = self.exports.iter().filter(|export| !export.read_only).count();
        u32::try_from(more).map_or(u32::MAX, |more| more.saturating_add(1))
    }

    /// Returns the name of the decided image format, if the backing is a path.
    pub(crate) fn format_name(&self) -> Option<String> {
        Some(self.image.as_ref()?.format?.0.name().to_owned())
    }

    /// Returns the image format to send to another host. The other host finds the backing at the
    /// path `elsewhere`, or at the same path as this host if `elsewhere` is `None`. Returns `None`
    /// if the path implies the format.
    pub(crate) fn format_to_say(&self, elsewhere: Option<&str>) -> Option<String> {
        let FormatName(format) = self.image.as_ref()?.format?;
        let path = Path::new(elsewhere.unwrap_or(&self.backing));
        (Format::assumed(path) != format).then(|| format.name().to_owned())
    }
}

impl State {
    /// Reads the state in a directory, without locking it. Changes nothing.
    pub(crate) fn read(directory: &Path) -> Result<State, StateError> {
        let file = directory.join("state.json");
        let failed = |source| StateError::Io { doing: "read", path: file.clone(), source };
        let broken = |what| StateError::Broken { path: file.clone(), what };
        match fs::metadata(&file) {
            Err(none) if none.kind() == io::ErrorKind::NotFound => Ok(State::default()),
            Err(other) => Err(failed(other)),
            Ok(metadata) if metadata.len() > FILE_BYTES_MAX => {
                Err(broken("the file is far too long".to_owned()))
            }
            Ok(_) => parse(&fs::read(&file).map_err(failed)?).map_err(broken),
        }
    }

    /// Checks the numeric settings and the names of the state, which are not checked again later.
    fn check(&self) -> Result<(), String> {
        for disk in &self.disks {
            let own = disk.qos.as_ref().map_or(Ok(()), |spec| check_qos(&spec.own));
            let cache = disk.cache.as_ref().map_or(Ok(()), CacheSpec::check);
            let stripe = stripe::chosen(disk.stripe).map(drop);
            own.and(cache).and(stripe).map_err(|what| format!("disk {}: {what}", disk.name))?;
        }
        for policy in &self.policies {
            check_qos(&policy.qos).map_err(|what| format!("storage policy {}: {what}", policy.name))?;
        }
        for store in &self.datastores {
            store.check().map_err(|what| format!("datastore {}: {what}", store.name))?;
        }
        let pools: Vec<&str> = self.pools.iter().map(|pool| pool.name.as_str()).collect();
        let disks: Vec<&str> = self.disks.iter().map(|disk| disk.name.as_str()).collect();
        for (kind, mut names) in [("pool", pools), ("disk", disks)] {
            names.sort_unstable();
            if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(format!("the {kind} '{}' appears twice", pair[0]));
            }
        }
        Ok(())
    }
}

impl Default for State {
    fn default() -> State {
        State {
            version: VERSION,
            pools: Vec::new(),
            disks: Vec::new(),
            pools_removed: Vec::new(),
            disks_removed: Vec::new(),
            policies: Vec::new(),
            datastores: Vec::new(),
            gone: Vec::new(),
            waited: Vec::new(),
            swaps: Vec::new(),
            definitions: BTreeMap::new(),
            caches_refused: BTreeMap::new(),
            ended_caches: Vec::new(),
            failed_tasks: Vec::new(),
        }
    }
}

/// Why the state file cannot be read or saved.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StateError {
    /// A system call failed.
    #[error("cannot {doing} {path}: {source}")]
    Io {
        /// The failed action.
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The file has an invalid format or an unknown version.
    #[error("{path} is malformed ({what}); repair it, or move it away to start without pools and disks")]
    Broken { path: PathBuf, what: String },
}

/// The place where the state is stored.
#[derive(Debug)]
pub(crate) enum Store {
    /// The state is only in memory and is lost when the daemon ends.
    Memory,
    /// In a directory, locked for this process.
    Directory { path: PathBuf, _lock: File },
}

impl Store {
    /// Opens the directory, creating it if necessary, and reads the state. Waits up to some seconds
    /// for a daemon that is just ending.
    pub(crate) fn open(directory: &Path) -> Result<(Store, State), StateError> {
        Self::open_locked(directory, |lock| hob_storage::lock_exclusive(lock))
    }

    /// Like `open`, but does not wait.
    #[cfg(test)]
    pub(crate) fn open_now(directory: &Path) -> Result<(Store, State), StateError> {
        use rustix::fs::{FlockOperation, flock};
        Self::open_locked(directory, |lock| flock(lock, FlockOperation::NonBlockingLockExclusive))
    }

    fn open_locked(
        directory: &Path,
        take: impl Fn(&File) -> Result<(), rustix::io::Errno>,
    ) -> Result<(Store, State), StateError> {
        let error = |doing, path: &Path| {
            let path = path.to_owned();
            move |source| StateError::Io { doing, path, source }
        };
        fs::create_dir_all(directory).map_err(error("make", directory))?;
        let lock_path = directory.join("lock");
        let lock = create_private(&lock_path).map_err(error("open", &lock_path))?;
        if let Err(source) = take(&lock) {
            let source = match source {
                rustix::io::Errno::WOULDBLOCK => {
                    io::Error::other("another hob daemon uses this state directory")
                }
                other => other.into(),
            };
            return Err(error("lock", &lock_path)(source));
        }
        let state = State::read(directory)?;
        Ok((Store::Directory { path: directory.to_owned(), _lock: lock }, state))
    }

    /// Returns the state directory, in which other files can be stored; `None` if the state is in
    /// memory only.
    pub(crate) fn directory(&self) -> Option<&Path> {
        match self {
            Store::Memory => None,
            Store::Directory { path, .. } => Some(path),
        }
    }

    /// Replaces the stored state by `state` atomically. The new state is durable when this returns.
    pub(crate) fn save(&self, state: &State) -> Result<(), StateError> {
        let Store::Directory { path: directory, .. } = self else { return Ok(()) };
        let spare = directory.join("state.json.new");
        let target = directory.join("state.json");
        let written = || -> io::Result<()> {
            failing::before_change(&target)?;
            let mut text = serde_json::to_vec_pretty(state)?;
            text.push(b'\n');
            let mut file = open_private(&spare)?;
            // The spare file keeps its space, so that a full filesystem takes the next state too.
            let room = (file.metadata()?.len() as usize).max(text.len().next_multiple_of(SPARE_BYTES));
            text.resize(room, b'\n');
            file.write_all(&text)?;
            file.sync_all()?;
            put_in_place(&spare, &target)?;
            failing::before_change(&target)?;
            File::open(directory)?.sync_all()
        };
        written().map_err(|source| StateError::Io { doing: "save", path: target.clone(), source })
    }

    /// Checks that a state of the usual size can be written to the directory, or that a missing
    /// directory can be created.
    pub(crate) fn check_writable(directory: &Path) -> Result<(), StateError> {
        let path = directory.join(format!("check.{}", std::process::id()));
        if !directory.exists() {
            let fault = |source| StateError::Io { doing: "create", path: directory.to_owned(), source };
            return writable::check(directory).map_err(fault);
        }
        let written = create_private(&path).and_then(|mut file| {
            file.write_all(&[b'\n'; 4 * SPARE_BYTES])?;
            file.sync_all()
        });
        let removed = fs::remove_file(&path);
        let tried = written.and(removed);
        tried.map_err(|source| StateError::Io { doing: "write the test file", path, source })
    }
}

/// Exchanges a new state file with the old one, which becomes the spare file.
fn put_in_place(spare: &Path, target: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    if renameat_with(CWD, spare, CWD, target, RenameFlags::EXCHANGE).is_ok() {
        return Ok(());
    }
    // The target does not exist yet, or the filesystem cannot exchange names.
    let room = fs::metadata(spare)?.len();
    fs::rename(spare, target)?;
    // Without a spare file, saving works for as long as there is space.
    let _ = create_private(spare).and_then(|mut file| file.write_all(&vec![b'\n'; room as usize]));
    Ok(())
}

/// Creates an empty file that only this user may read, or empties the existing file.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    let file = open_private(path)?;
    file.set_len(0)?;
    Ok(file)
}

/// Opens a file for writing, or creates it, so that only this user may read it.
fn open_private(path: &Path) -> io::Result<File> {
    let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    // Earlier versions created the file with other permissions.
    rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(0o600))?;
    Ok(file)
}

fn parse(text: &[u8]) -> Result<State, String> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }

    // The version is checked first, because a file of a different version has different fields.
    let Versioned { version } = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if version != VERSION {
        return Err(format!("it has version {version}, and this hob supports version {VERSION}"));
    }
    let state: State = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    state.check()?;
    check_modes(text)?;
    Ok(state)
}

/// Returns an error if a persistent cache has no write mode. Each version of hob that saves a
/// journal also saves the mode. The default mode, write-through, would drop the dirty data of a
/// write-back cache whose mode is missing.
fn check_modes(text: &[u8]) -> Result<(), String> {
    #[derive(Deserialize)]
    struct Disks {
        disks: Vec<Disk>,
    }
    #[derive(Deserialize)]
    struct Disk {
        name: String,
        cache: Option<Cache>,
    }
    #[derive(Deserialize)]
    struct Cache {
        mode: Option<IgnoredAny>,
        journal: Option<IgnoredAny>,
    }

    let Disks { disks } = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    for Disk { name, cache } in disks {
        if cache.is_some_and(|cache| cache.journal.is_some() && cache.mode.is_none()) {
            return Err(format!("disk {name}: its persistent cache has no mode"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
