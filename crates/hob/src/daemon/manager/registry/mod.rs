//! The registry: the pools and disks that this host knows, and which operation has each of them.
//!
//! It is the lowest layer of the manager. Services look names and ids up here, take the
//! [`OperationGuard`] of what they change, and ask for a save of the state file. The registry calls
//! no service. Two interfaces lead upwards: a service whose state is in the state file is a
//! [`StatePart`], and the one that must hear of a save before it happens is the [`SaveObserver`].
//!
//! The lock on [`Inner`] is held for look-ups only and never across an await. A service that holds its own
//! lock may take this one, never the other way round.

mod operation_guard;
mod owed;
mod ownership;
mod segments;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use hob_control::{Admission, DeviceState, Size};
use hob_engine::command::{MemoryConfig, Segment};
use hob_engine::units::{DeviceId, DiskId};
use hob_storage::pool::OwnerId;

use super::api_error::ApiError;
use super::flash::{self, Flash};
use super::{disks, exports, observe, pools, stalls};
use crate::daemon::hardware::Lock;
use crate::daemon::request_recorder::Counter;
use crate::daemon::shard_api::ShardHandle;
use crate::daemon::state::{CacheSpec, DiskState, GoneState, PeerState, PoolState, State, StateError, Store};
pub(super) use operation_guard::{
    ADDING, COPYING, DRAINING, ENLARGING, GUARD_EVERY, MIGRATING, OperationGuard, SHRINKING, SPREADING,
};
pub(super) use owed::Owed;
pub(super) use segments::Wanted;

/// Pools there can be.
pub(in crate::daemon::manager) const POOLS_MAX: usize = 64;

/// Disks there can be.
pub(in crate::daemon::manager) const DISKS_MAX: usize = 4096;

/// Why a disk is offline, as far as its cluster is concerned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::daemon::manager) enum ClusterWait {
    /// It is not the cluster's matter.
    #[default]
    No,
    /// Another host serves it: all is well.
    Served,
    /// Its owner vanished, and it is had soon.
    Settles,
    /// It could not be had, and nobody serves it, for all that is known.
    Yes,
}

/// The reason of a cache that is without a journal for now.
pub(in crate::daemon::manager) const JOURNAL_LOST: &str = "its journal cannot be written: what is dirty goes to the backing, and writes to the disk wait, \
     for half a minute at most, until the journal is elsewhere";

/// Of a backing whose server has no flush command.
pub(in crate::daemon::manager) const CANNOT_FLUSH: &str =
    "its backing has no flush: a flush of the guest does not make its writes durable there";

/// A service whose state is part of the state file.
pub(super) trait StatePart: std::fmt::Debug + Send + Sync {
    /// Adds the state of the service.
    fn add_to(&self, state: &mut State);
}

/// Hears of a save whose content takes effect only afterwards.
pub(super) trait SaveObserver: std::fmt::Debug + Send + Sync {
    /// Makes known what has to be known before the save. The save does not happen if this fails.
    fn before_save(&self) -> Pin<Box<dyn Future<Output = Result<(), ApiError>> + Send + '_>>;
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Registry {
    pub(super) shards: Vec<ShardHandle>,
    store: Mutex<Store>,
    inner: Mutex<Inner>,
    parts: OnceLock<Vec<Arc<dyn StatePart>>>,
    observer: OnceLock<Weak<dyn SaveObserver>>,
}

/// What the manager knows.
#[derive(Debug, Default)]
pub(in crate::daemon::manager) struct Inner {
    pub(in crate::daemon::manager) pools: BTreeMap<String, PoolEntry>,
    pub(in crate::daemon::manager) disks: BTreeMap<String, DiskEntry>,
    /// How long requests of disks without a limit of their own wait for their backing.
    pub(in crate::daemon::manager) wait_max: std::time::Duration,
    /// Why hob.toml is not used as it is now, but as it was at the last start.
    pub(in crate::daemon::manager) config_refused: Option<String>,
    /// Ids of devices are not used twice: a shard remembers what it thinks of each.
    pub(in crate::daemon::manager) next_device: u16,
    /// Why the state could not be saved, the last time that was tried.
    pub(in crate::daemon::manager) unsaved: Option<String>,
    /// A save of the failures that guests were not told of is about to begin.
    pub(in crate::daemon::manager) saves_owed: bool,
    /// Somebody else goes on soon: nothing is changed any more.
    pub(in crate::daemon::manager) leaving: bool,
    /// What hob.toml defined when it was last read, by what it is and its name.
    pub(in crate::daemon::manager) definitions: BTreeMap<String, String>,
    /// Why caches that hob.toml defines could not be created, by disk.
    pub(in crate::daemon::manager) caches_refused: BTreeMap<String, String>,
    /// Names that hob.toml defines.
    pub(in crate::daemon::manager) defined: BTreeSet<String>,
    /// Of these, removed by command.
    pub(in crate::daemon::manager) pools_removed: Vec<String>,
    pub(in crate::daemon::manager) disks_removed: Vec<String>,
    /// Disks that were awaited and did not come.
    pub(in crate::daemon::manager) gone: Vec<GoneState>,
    /// Ids of what shards serve to borrowers.
    pub(in crate::daemon::manager) lease_disks: BTreeSet<DiskId>,
    /// Disks that are gone from their shard and whose backing is not closed, by the ids that are not free before.
    pub(in crate::daemon::manager) abandoned: BTreeMap<DiskId, String>,
    /// Devices on other hosts, by their ids on the shards, that nobody is to believe any more.
    pub(in crate::daemon::manager) given_up: BTreeSet<DeviceId>,
    /// Of awaited disks, as they were when they waited for their cluster.
    pub(in crate::daemon::manager) waited: BTreeMap<String, DiskState>,
}

#[derive(Debug)]
pub(in crate::daemon::manager) struct PoolEntry {
    pub(in crate::daemon::manager) flash: Flash,
    pub(in crate::daemon::manager) uuid: Option<String>,
    pub(in crate::daemon::manager) segment_bytes: u64,
    pub(in crate::daemon::manager) devices: Vec<DeviceEntry>,
    /// Who had persistent caches on them when that was looked up, and how many segments.
    pub(in crate::daemon::manager) owners: Vec<(OwnerId, u64)>,
    /// What is being done to it.
    pub(in crate::daemon::manager) busy: Option<&'static str>,
}

#[derive(Debug)]
pub(in crate::daemon::manager) struct DeviceEntry {
    pub(in crate::daemon::manager) path: PathBuf,
    /// Its ids, while it is open.
    pub(in crate::daemon::manager) ids: Option<DeviceIds>,
    pub(in crate::daemon::manager) state: DeviceState,
    pub(in crate::daemon::manager) reason: Option<String>,
    /// What was chosen; a fence goes before it.
    pub(in crate::daemon::manager) admission: Admission,
    pub(in crate::daemon::manager) segments: u64,
    pub(in crate::daemon::manager) free_segments: u64,
    pub(in crate::daemon::manager) access: &'static str,
    /// Its own name, while it is open.
    pub(in crate::daemon::manager) uuid: Option<String>,
    /// Whose it is, if it is on another host.
    pub(in crate::daemon::manager) peer: Option<PeerState>,
    /// Segments, by their ids on the shards, that caches lost with it. They are not given away.
    pub(in crate::daemon::manager) lost: Vec<Segment>,
    pub(in crate::daemon::manager) stalls: stalls::Stalls,
}

/// A device has one name in its pool and another on the shards, which know devices of all pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon::manager) struct DeviceIds {
    pub(in crate::daemon::manager) in_pool: DeviceId,
    pub(in crate::daemon::manager) on_shards: DeviceId,
}

#[derive(Debug)]
pub(in crate::daemon::manager) struct DiskEntry {
    pub(in crate::daemon::manager) id: DiskId,
    pub(in crate::daemon::manager) wanted: DiskState,
    pub(in crate::daemon::manager) phase: DiskPhase,
    pub(in crate::daemon::manager) size_bytes: u64,
    /// What its backing lies on, since it was last opened.
    pub(in crate::daemon::manager) datastore: Option<String>,
    /// The shard has a cache for it.
    pub(in crate::daemon::manager) has_cache: bool,
    /// Its cache is being recovered while it is served.
    pub(in crate::daemon::manager) recovering: Option<disks::OldRings>,
    /// Segments of the cache's data, by their ids on the shards.
    pub(in crate::daemon::manager) held: Vec<Segment>,
    /// Segments for its second copies on another host, likewise.
    pub(in crate::daemon::manager) apart: Vec<Segment>,
    /// These are being given up: nobody is to be told of them.
    pub(in crate::daemon::manager) leaves_peer: bool,
    /// Its title may name them, or has done so.
    pub(in crate::daemon::manager) copy_said: bool,
    /// Segments of its journal, likewise: of the ring in use, and while it is replaced of the next one.
    pub(in crate::daemon::manager) ring: Vec<Segment>,
    /// Copies of the newest ring.
    pub(in crate::daemon::manager) ring_copies: usize,
    /// Memory above it that the shard has.
    pub(in crate::daemon::manager) memory: Option<MemoryConfig>,
    /// What the backing is known by, since it was last opened.
    pub(in crate::daemon::manager) identity: [u8; 32],
    /// Its backing, since it was last opened.
    pub(in crate::daemon::manager) measure: Option<disks::Measure>,
    /// The backing's lock.
    pub(in crate::daemon::manager) lock: Option<Lock>,
    /// What a backing that never changes is called by its clones, since it was last opened.
    pub(in crate::daemon::manager) constant: Option<String>,
    /// What it shares with other clones, since it was last opened.
    pub(in crate::daemon::manager) parent: Option<disks::ParentLink>,
    /// What was last seen of its dirty data.
    pub(in crate::daemon::manager) watch: pools::Watch,
    /// A cache that was refused is not read again before.
    pub(in crate::daemon::manager) retry_after: Option<tokio::time::Instant>,
    /// Why it is offline, as it was last said in the log.
    pub(in crate::daemon::manager) offline_reason: Option<String>,
    /// What its content looks like was said in the log.
    pub(in crate::daemon::manager) content_noted: bool,
    /// Guests that have not been told of a failed flush.
    pub(in crate::daemon::manager) owed: Owed,
    /// Could it be had of the cluster when it was opened last?
    pub(in crate::daemon::manager) cluster_wait: ClusterWait,
    /// The daemon is ending, and nothing of it is dirty any more.
    pub(in crate::daemon::manager) drained_at_end: bool,
    /// Why the cache is not as wanted.
    pub(in crate::daemon::manager) cache_reason: Option<String>,
    /// How well it does its work.
    pub(in crate::daemon::manager) quality: observe::Quality,
    /// The files that it is or should be, by export.
    pub(in crate::daemon::manager) files: BTreeMap<String, exports::FileEntry>,
    /// What is being done to it.
    pub(in crate::daemon::manager) busy: Option<&'static str>,
    /// The recording of its requests that is under way, if one is.
    pub(in crate::daemon::manager) recording: Counter,
}

/// Is a disk served?
#[derive(Debug)]
pub(in crate::daemon::manager) enum DiskPhase {
    /// By that shard.
    Online(ShardHandle),
    /// No, because of that.
    Offline(String),
    /// Another host has it, for all that is known here; and what is known.
    Away(String),
    /// Not much longer.
    Removing,
}

impl Registry {
    /// A registry with no pools and no disks.
    pub(super) fn new(shards: Vec<ShardHandle>, store: Store) -> Arc<Registry> {
        assert!(!shards.is_empty(), "somebody has to serve the disks");
        Arc::new(Registry {
            shards,
            store: Mutex::new(store),
            inner: Mutex::default(),
            parts: OnceLock::new(),
            observer: OnceLock::new(),
        })
    }

    /// Sets whose state is saved too, and who hears of saves. Later calls have no effect.
    pub(super) fn connect(&self, parts: Vec<Arc<dyn StatePart>>, observer: Weak<dyn SaveObserver>) {
        let _ = self.parts.set(parts);
        let _ = self.observer.set(observer);
    }

    pub(super) fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The shard with the fewest disks.
    pub(super) fn quietest_shard(&self) -> ShardHandle {
        let inner = self.inner();
        let load = |shard: &ShardHandle| {
            let here = |phase: &DiskPhase| matches!(phase, DiskPhase::Online(other) if other.is_same(shard));
            inner.disks.values().filter(|disk| here(&disk.phase)).count()
        };
        self.shards.iter().min_by_key(|shard| load(shard)).expect("there is a shard").clone()
    }

    /// The shard that serves a disk, and the id of the disk there.
    pub(super) fn shard_of(&self, name: &str) -> Result<(ShardHandle, DiskId), ApiError> {
        let inner = self.inner();
        let disk = inner.disk(name)?;
        Ok((disk.shard()?, disk.id))
    }

    /// Is the state saved in a file? `hob serve` has none.
    pub(super) fn has_state_file(&self) -> bool {
        !matches!(*self.store.lock().unwrap_or_else(PoisonError::into_inner), Store::Memory)
    }

    /// Keeps what is wanted now, and is in effect.
    pub(super) async fn save(self: &Arc<Self>) -> Result<(), ApiError> {
        Ok(self.keep().await??)
    }

    /// Keeps what is wanted before it is in effect.
    pub(super) async fn save_first(self: &Arc<Self>) -> Result<(), ApiError> {
        if let Some(observer) = self.observer.get().and_then(Weak::upgrade) {
            observer.before_save().await?;
        }
        self.keep().await?.map_err(|error| ApiError::not_begun(&error))
    }

    async fn keep(self: &Arc<Self>) -> Result<Result<(), StateError>, ApiError> {
        let registry = self.clone();
        flash::blocking(move || {
            // The lock comes first, so that a later state is never replaced by an earlier one.
            let store = registry.store.lock().unwrap_or_else(PoisonError::into_inner);
            let mut state = registry.inner().state();
            registry.parts.get().into_iter().flatten().for_each(|part| part.add_to(&mut state));
            let saved = store.save(&state);
            registry.inner().unsaved = saved.as_ref().err().map(ToString::to_string);
            saved
        })
        .await
    }
}

impl Inner {
    pub(in crate::daemon::manager) fn state(&self) -> State {
        let pools = self.pools.iter().map(|(name, pool)| PoolState {
            name: name.clone(),
            devices: pool.devices.iter().map(|device| device.path.clone()).collect(),
            devices_out: pool.chosen_out().map(|device| device.path.clone()).collect(),
            peers: pool.devices.iter().filter_map(|device| device.peer.clone()).collect(),
            segment_size: Size(pool.segment_bytes),
            uuid: pool.uuid.clone(),
        });
        // A disk that is on its way in is kept when it has arrived, and out when it has begun to leave.
        let kept = self
            .disks
            .values()
            .filter(|disk| !matches!(disk.phase, DiskPhase::Removing) && !disk.is_arriving());
        State {
            pools: pools.collect(),
            disks: kept.map(|disk| disk.wanted.clone()).collect(),
            pools_removed: self.pools_removed.clone(),
            disks_removed: self.disks_removed.clone(),
            gone: self.gone.clone(),
            waited: self.waited.values().cloned().collect(),
            definitions: self.definitions.clone(),
            caches_refused: self.caches_refused.clone(),
            ..State::default()
        }
    }

    pub(in crate::daemon::manager) fn pool(&self, name: &str) -> Result<&PoolEntry, ApiError> {
        self.pools.get(name).ok_or_else(|| no_pool(name))
    }

    pub(in crate::daemon::manager) fn pool_mut(&mut self, name: &str) -> Result<&mut PoolEntry, ApiError> {
        self.pools.get_mut(name).ok_or_else(|| no_pool(name))
    }

    pub(in crate::daemon::manager) fn disk(&self, name: &str) -> Result<&DiskEntry, ApiError> {
        self.disks.get(name).ok_or_else(|| no_disk(name))
    }

    pub(in crate::daemon::manager) fn disk_mut(&mut self, name: &str) -> Result<&mut DiskEntry, ApiError> {
        self.disks.get_mut(name).ok_or_else(|| no_disk(name))
    }
}

impl Inner {
    /// Ids are small, as shards have tables of them.
    pub(in crate::daemon::manager) fn new_disk_id(&self) -> DiskId {
        let disks = self.disks.values().map(|disk| disk.id);
        let taken: std::collections::BTreeSet<u32> = disks
            .chain(self.lease_disks.iter().chain(self.abandoned.keys()).copied())
            .map(|id| id.0)
            .collect();
        DiskId((0..).find(|id| !taken.contains(id)).expect("there are fewer disks than ids"))
    }

    /// An id for a disk that nobody but a borrower sees.
    pub(in crate::daemon::manager) fn new_lease_id(&mut self) -> DiskId {
        let id = self.new_disk_id();
        self.lease_disks.insert(id);
        id
    }
}

impl DiskEntry {
    pub(in crate::daemon::manager) fn cache(&self) -> Option<&CacheSpec> {
        self.wanted.cache.as_ref()
    }

    pub(in crate::daemon::manager) fn shard(&self) -> Result<ShardHandle, ApiError> {
        match &self.phase {
            DiskPhase::Online(shard) => Ok(shard.clone()),
            DiskPhase::Offline(reason) => {
                Err(ApiError::conflict(format!("{} is offline: {reason}", self.wanted.name))
                    .hint("repair the backing of the disk; hob retries every few seconds"))
            }
            DiskPhase::Away(why) => Err(away(&self.wanted.name, why)),
            DiskPhase::Removing => Err(ApiError::conflict(format!("{} is being removed", self.wanted.name))),
        }
    }

    /// It was asked for and has never been online.
    pub(in crate::daemon::manager) fn is_arriving(&self) -> bool {
        self.busy == Some(ADDING)
    }
}

impl Inner {
    /// May something be changed?
    pub(super) fn check_stays(&self) -> Result<(), ApiError> {
        match self.leaving {
            false => Ok(()),
            true => Err(ApiError::conflict("hob is being upgraded").hint("try again in a moment")),
        }
    }
}

pub(in crate::daemon::manager) fn away(name: &str, why: &str) -> ApiError {
    ApiError::conflict(format!("{name} is not this host's: {why}"))
        .hint(format!("'hob migrate {name}' tells more"))
}

fn no_pool(name: &str) -> ApiError {
    ApiError::not_found(format!("there is no pool '{name}'")).hint("'hob pool list' shows all")
}

fn no_disk(name: &str) -> ApiError {
    ApiError::not_found(format!("there is no disk '{name}'")).hint("'hob disk list' shows all")
}
