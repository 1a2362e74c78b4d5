//! What survives a restart of the daemon: which pools, disks and caches there are to be.
//!
//! One JSON file, replaced as a whole: written beside, synced, exchanged, directory synced. The file before it stays beside it, with its
//! space: a full filesystem does not keep the next state from being saved. A file that cannot be understood is never overwritten; the daemon refuses to start and says why.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use hob_control::{BackingTimeout, Export, Size};
use hob_storage::backing::Format;
use hob_storage::failing;
use serde::{Deserialize, Serialize};

mod bitmap;
mod cache;
mod image;
mod migration;
mod qos;

pub(crate) use bitmap::BitmapSpec;
pub(crate) use cache::{CacheOwner, CacheSpec, Closed, DestageSpec, JournalSpec};
pub(crate) use image::{FileSpec, FormatName, ImageSpec};
pub(crate) use migration::{GoneState, MigrationSpec, RecordSpec};
pub(crate) use qos::{ControlSpec, DatastoreState, DiskQosSpec, PolicyState, check_qos};

/// Version of the file's form.
const VERSION: u32 = 1;

/// The state file is padded with newlines to a multiple of this many bytes.
const SPARE_BYTES: usize = 16 << 10;

/// Longest state file that is read, bytes.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// What there is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct State {
    /// Of the file's form.
    pub(crate) version: u32,
    /// Pools.
    pub(crate) pools: Vec<PoolState>,
    /// Disks.
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
    /// Datastores of which something was said.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) datastores: Vec<DatastoreState>,
    /// Disks that were awaited from another host and did not come.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) gone: Vec<GoneState>,
    /// Of disks that are awaited from another host, as they were when they waited for their cluster.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) waited: Vec<DiskState>,
    /// Swap areas of the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) swaps: Vec<SwapSpec>,
    /// What hob.toml defined when it was last read, by what it is and its name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) definitions: BTreeMap<String, String>,
    /// Why caches that hob.toml defines could not be created, by disk.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) caches_refused: BTreeMap<String, String>,
}

/// A pool and where it lies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PoolState {
    /// Its name.
    pub(crate) name: String,
    /// Paths of its devices.
    pub(crate) devices: Vec<PathBuf>,
    /// Of these, the ones that give no new segments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) devices_out: Vec<PathBuf>,
    /// Of these, the ones on other hosts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) peers: Vec<PeerState>,
    /// Unit of allocation.
    pub(crate) segment_size: Size,
    /// Its identity, as its devices tell it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) uuid: Option<String>,
}

/// A device on another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PeerState {
    /// The socket that it is here.
    pub(crate) path: PathBuf,
    /// HOST:PORT of that host's control API.
    pub(crate) host: String,
    /// How much was borrowed.
    pub(crate) size: Size,
}

/// A swap area of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SwapSpec {
    /// Its name.
    pub(crate) name: String,
    /// Where.
    pub(crate) pool: String,
    /// The device that it was on last.
    pub(crate) device: PathBuf,
    /// Room, whole segments.
    pub(crate) size: Size,
    /// What its segments are marked with, and its header.
    #[serde(with = "cache::word")]
    pub(crate) owner: CacheOwner,
    /// Is it turned on at the start?
    pub(crate) on: bool,
    /// What was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) priority: Option<u16>,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiskState {
    /// Its name.
    pub(crate) name: String,
    /// Where its data lives.
    pub(crate) backing: String,
    /// How that is read, where it is a path. State files of earlier versions do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) image: Option<ImageSpec>,
    /// Are changes refused?
    pub(crate) read_only: bool,
    /// The cache it is to have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cache: Option<CacheSpec>,
    /// How long requests wait for its backing; the daemon's limit if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) backing_timeout: Option<BackingTimeout>,
    /// Guests that were not told, when it was closed, that acknowledged writes may be lost.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) flush_failures_owed: u32,
    /// What its backing lies on, if its owner said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) datastore: Option<String>,
    /// Where a machine uses it through vhost-user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) vhost_user: Option<String>,
    /// What it is due, if somebody said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) qos: Option<DiskQosSpec>,
    /// Further exports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) exports: Vec<Export>,
    /// The file that it is to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fuse: Option<String>,
    /// Its way from host to host, if it ever began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) migration: Option<MigrationSpec>,
    /// In a cluster: its generation when it was served here last, of which what flash has is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) generation: Option<u64>,
    /// What it has of its parent it shares with other clones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) share_parent: Option<ShareSpec>,
    /// Nobody asked for it but clones that name it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) for_clones: bool,
    /// Its dirty bitmaps; what they have noted is in files of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) bitmaps: Vec<BitmapSpec>,
}

/// How a clone shares what it has of its parent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShareSpec {
    /// How large a cache the parent's disk is given if it is made for this clone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cache: Option<Size>,
    /// The parent's disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) disk: Option<String>,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

fn is_false(value: &bool) -> bool {
    !value
}

impl DiskState {
    /// A disk of which nothing else is said.
    pub(crate) fn new(name: String, backing: String, read_only: bool) -> DiskState {
        DiskState {
            name,
            backing,
            image: Some(ImageSpec::default()),
            read_only,
            cache: None,
            backing_timeout: None,
            flush_failures_owed: 0,
            datastore: None,
            qos: None,
            exports: Vec::new(),
            fuse: None,
            vhost_user: None,
            migration: None,
            generation: None,
            share_parent: None,
            for_clones: false,
            bitmaps: Vec::new(),
        }
    }
}

impl DiskState {
    /// How its backing is read, if that is a path and was decided.
    pub(crate) fn format_name(&self) -> Option<String> {
        Some(self.image.as_ref()?.format?.0.name().to_owned())
    }

    /// What another host has to be told of the format, where it knows the disk by this path, or by the same; nothing if the path says it.
    pub(crate) fn format_to_say(&self, elsewhere: Option<&str>) -> Option<String> {
        let FormatName(format) = self.image.as_ref()?.format?;
        let path = Path::new(elsewhere.unwrap_or(&self.backing));
        (Format::assumed(path) != format).then(|| format.name().to_owned())
    }
}

impl State {
    /// What is kept in a directory, whoever has it locked. Changes nothing.
    pub(crate) fn read(directory: &Path) -> Result<State, StateError> {
        let file = directory.join("state.json");
        let failed = |source| StateError::Io { doing: "read", path: file.clone(), source };
        let broken = |what| StateError::Broken { path: file.clone(), what };
        match fs::metadata(&file) {
            Err(none) if none.kind() == io::ErrorKind::NotFound => Ok(State::default()),
            Err(other) => Err(failed(other)),
            Ok(metadata) if metadata.len() > FILE_BYTES_MAX => Err(broken("it is far too long".to_owned())),
            Ok(_) => parse(&fs::read(&file).map_err(failed)?).map_err(broken),
        }
    }

    /// Numbers that nothing could work with: nobody looks at them again.
    fn check(&self) -> Result<(), String> {
        for disk in &self.disks {
            let own = disk.qos.as_ref().map_or(Ok(()), |spec| check_qos(&spec.own));
            let cache = disk.cache.as_ref().map_or(Ok(()), CacheSpec::check);
            own.and(cache).map_err(|what| format!("disk {}: {what}", disk.name))?;
        }
        for policy in &self.policies {
            check_qos(&policy.qos).map_err(|what| format!("storage policy {}: {what}", policy.name))?;
        }
        for store in &self.datastores {
            store.check().map_err(|what| format!("datastore {}: {what}", store.name))?;
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
        }
    }
}

/// Why the state cannot be read or kept.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StateError {
    /// The system says no.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// The answer.
        source: io::Error,
    },
    /// The file is not what this version wrote.
    #[error("{} cannot be understood ({what}); repair it, or move it away to start with no pools and disks", path.display())]
    Broken {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

/// Where the state is kept.
#[derive(Debug)]
pub(crate) enum Store {
    /// Nowhere: it ends with the process.
    Memory,
    /// In a directory, locked for this process.
    Directory {
        /// Which.
        path: PathBuf,
        /// Held locked.
        _lock: File,
    },
}

impl Store {
    /// Opens the directory, making it if need be, and reads what is there.
    pub(crate) fn open(directory: &Path) -> Result<(Store, State), StateError> {
        let error = |doing, path: &Path| {
            let path = path.to_owned();
            move |source| StateError::Io { doing, path, source }
        };
        fs::create_dir_all(directory).map_err(error("make", directory))?;
        let lock_path = directory.join("lock");
        let lock = create_private(&lock_path).map_err(error("open", &lock_path))?;
        if let Err(source) = rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
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

    /// Where other things may be kept too.
    pub(crate) fn directory(&self) -> Option<&Path> {
        match self {
            Store::Memory => None,
            Store::Directory { path, .. } => Some(path),
        }
    }

    /// Keeps `state` in place of what was kept, all or nothing, on media when it returns.
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

    /// Tries to write as much in the state directory as a state may take. A directory that does not exist yet passes.
    pub(crate) fn check_writable(directory: &Path) -> Result<(), StateError> {
        let path = directory.join(format!("check.{}", std::process::id()));
        if !directory.exists() {
            return Ok(());
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

/// Gives a written file the name of the one that it replaces, which stays as the spare file.
fn put_in_place(spare: &Path, target: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    if renameat_with(CWD, spare, CWD, target, RenameFlags::EXCHANGE).is_ok() {
        return Ok(());
    }
    // There is none yet, or this filesystem cannot exchange names.
    let room = fs::metadata(spare)?.len();
    fs::rename(spare, target)?;
    // Without a spare file, saving works for as long as there is space.
    let _ = create_private(spare).and_then(|mut file| file.write_all(&vec![b'\n'; room as usize]));
    Ok(())
}

/// Creates a file, or empties it, that only this user may read.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    let file = open_private(path)?;
    file.set_len(0)?;
    Ok(file)
}

/// Opens a file for writing, or creates it, so that only this user may read it.
fn open_private(path: &Path) -> io::Result<File> {
    let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    // Earlier versions created it with other permissions.
    rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(0o600))?;
    Ok(file)
}

fn parse(text: &[u8]) -> Result<State, String> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }

    // The version first: a file of another form has other fields.
    let Versioned { version } = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if version != VERSION {
        return Err(format!("it has version {version}, this hob knows version {VERSION}"));
    }
    let state: State = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    state.check()?;
    Ok(state)
}

#[cfg(test)]
mod tests;
