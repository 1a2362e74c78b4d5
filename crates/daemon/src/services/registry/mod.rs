//! The registry: all pools and disks of this host, and the operation in progress on each.
//!
//! The registry is the lowest layer of the services. Services look up names and ids here, take the
//! [`OperationGuard`] of an object that they change, and request saves of the state file. The
//! registry calls no service. Two interfaces lead to higher layers: a service with data in the
//! state file is a [`StatePart`], and a service that must act before a save is the
//! [`SaveObserver`].
//!
//! The lock on [`Inner`] is held only for look-ups and never across an await. A service that holds
//! its own lock may take this lock. A service that holds this lock must not take its own.

mod ended_caches;
mod operation_guard;
mod orphans;
mod ownership;
mod pending_change;
mod repeated_message;
mod segments;
mod unreported_failures;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use hob_control::{Admission, DeviceState, Size};
use hob_engine::command::{MemoryConfig, Segment};
use hob_engine::units::{DeviceId, DiskId};
use hob_storage::pool::OwnerId;

use super::flash::{self, Flash};
use super::{disks, exports, observe, pools};
use crate::api_error::{ApiError, Result, conflict, not_found};
use crate::hardware::{FileNumber, Lock};
use crate::request_recorder::Counter;
use crate::shard_api::ShardHandle;
use crate::state::{
    CacheOwner, CacheSpec, DiskState, GoneState, JournalSpec, PeerState, PoolState, State, StateError, Store,
};
pub(super) use ended_caches::EndedCaches;
pub(super) use operation_guard::{
    ADDING, CLEARING, COPYING, DRAINING, ENLARGING, GUARD_EVERY, LENDING_AGAIN, MIGRATING, MOVING, OPENING,
    OperationGuard, REPARTITIONING, SHRINKING, SPREADING, is_own_work,
};
pub(super) use orphans::{OrphanContent, OrphanJournal, OrphanRecord};
pub(super) use pending_change::PendingChange;
pub(super) use repeated_message::RepeatedMessage;
pub(super) use unreported_failures::UnreportedFailures;

/// Maximum number of pools.
pub(in crate::services) const POOLS_MAX: usize = 64;

/// Maximum number of disks.
pub(in crate::services) const DISKS_MAX: usize = 4096;

/// Reason within the cluster why a disk is offline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::services) enum ClusterWait {
    /// The disk is not offline because of the cluster.
    #[default]
    No,
    /// Another host serves the disk, which is normal.
    Served,
    /// The disk's owner has failed, and this host can soon acquire the disk.
    Settles,
    /// This host could not acquire the disk, and apparently no other host serves it.
    Yes,
}

/// Health text for a cache that has no working journal.
pub(in crate::services) const JOURNAL_LOST: &str = "its journal cannot be written. hob destages its dirty data, \
and writes to the disk wait for at most half a minute, until hob has created a journal on another device";

/// Health text for a backing whose server has no flush command.
pub(in crate::services) const CANNOT_FLUSH: &str =
    "its backing does not support flush, so a flush of the guest does not make its writes durable there";

/// A service whose state is part of the state file.
pub(super) trait StatePart: std::fmt::Debug + Send + Sync {
    /// Adds the state of the service.
    fn add_to(&self, state: &mut State);
}

/// A service that acts before the state file is saved with a change that takes effect afterwards.
pub(super) trait SaveObserver: std::fmt::Debug + Send + Sync {
    /// Publishes data that other hosts must know before the save. An error prevents the save.
    fn before_save(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>>;
}

/// The registry; see the module's text.
#[derive(Debug)]
pub(crate) struct Registry {
    pub(super) shards: Vec<ShardHandle>,
    /// The state file. It is locked during a save, which may hang, so the control thread must not
    /// lock it.
    store: Mutex<Store>,
    /// The state directory; `None` without a state file.
    directory: Option<PathBuf>,
    inner: Mutex<Inner>,
    parts: OnceLock<Vec<Arc<dyn StatePart>>>,
    observer: OnceLock<Weak<dyn SaveObserver>>,
}

/// The registry's data behind its lock.
#[derive(Debug, Default)]
pub(in crate::services) struct Inner {
    pub(in crate::services) pools: BTreeMap<String, PoolEntry>,
    pub(in crate::services) disks: BTreeMap<String, DiskEntry>,
    /// Time that requests wait for the backing of a disk whose settings have no backing timeout.
    pub(in crate::services) wait_max: std::time::Duration,
    /// Age from which a flash I/O in flight counts as a stall of its device.
    pub(in crate::services) flash_stall_max: std::time::Duration,
    /// Reason why the daemon uses the last hob.toml that it accepted instead of the current file:
    /// the daemon refused the current file, or the last reload failed.
    pub(in crate::services) config_refused: Option<String>,
    /// Changes of hob.toml that the last reload did not make.
    pub(in crate::services) config_pending: Vec<PendingChange>,
    /// Id that the next flash device gets. Ids are not reused, because shards keep state per id.
    pub(in crate::services) next_device: u16,
    /// True when all pools and disks of the state file are in the registry. Before that, nothing is
    /// saved, because a save would remove the missing ones from the state file.
    is_restored: bool,
    /// Error of the latest save of the state file, if it failed.
    pub(in crate::services) unsaved: Option<String>,
    /// True if a save of the unreported flush failures is about to start.
    pub(in crate::services) saves_owed: bool,
    /// True if an upgrade is about to hand over to another process. Changes are refused meanwhile.
    pub(in crate::services) leaving: bool,
    /// Reason per disk why a cache that hob.toml defines could not be created.
    pub(in crate::services) caches_refused: BTreeMap<String, String>,
    /// Names of the pools and disks that hob.toml defines.
    pub(in crate::services) defined: BTreeSet<String>,
    /// Pools of hob.toml that were removed by command. `disks_removed` lists the disks of hob.toml
    /// that were removed by command.
    pub(in crate::services) pools_removed: Vec<String>,
    pub(in crate::services) disks_removed: Vec<String>,
    /// Disks that did not arrive on this host, because their migration was cancelled.
    pub(in crate::services) gone: Vec<GoneState>,
    /// Ids under which shards serve flash leases to borrowers.
    pub(in crate::services) lease_disks: BTreeSet<DiskId>,
    /// Removed disks whose backing is still open. The ids of these disks cannot be reused yet.
    pub(in crate::services) abandoned: BTreeMap<DiskId, String>,
    /// Ids in `abandoned` of disks that their shard refuses to remove, and the owners of their
    /// persistent caches, which are in use.
    pub(in crate::services) kept_by_shard: BTreeMap<DiskId, Option<OwnerId>>,
    /// Ids on the shards of remote devices whose content is no longer valid.
    pub(in crate::services) given_up: BTreeSet<DeviceId>,
    /// Incoming disks of migrations, as they were when they still waited for the cluster.
    pub(in crate::services) waited: BTreeMap<String, DiskState>,
    /// Caches that the daemon has ended, so that they must not be used any more.
    pub(in crate::services) ended: EndedCaches,
}

#[derive(Debug)]
pub(in crate::services) struct PoolEntry {
    pub(in crate::services) flash: Flash,
    pub(in crate::services) uuid: Option<String>,
    pub(in crate::services) segment_bytes: u64,
    pub(in crate::services) devices: Vec<DeviceEntry>,
    /// Number of device ids that the pool has given out, as far as known.
    pub(in crate::services) device_ids: u16,
    /// Devices, by pool id, that were missing and are back, while they may have outdated segments
    /// of caches in use.
    pub(in crate::services) returned: Vec<DeviceId>,
    /// Owners of persistent caches in the pool with their number of segments, as looked up last.
    pub(in crate::services) owners: Vec<(OwnerId, u64)>,
    /// Persistent caches that belong to no disk, as far as their journals were read.
    pub(in crate::services) orphans: BTreeMap<OwnerId, OrphanRecord>,
    /// Owner ids of the orphans that the last regular check found.
    pub(in crate::services) orphans_before: Vec<OwnerId>,
    /// True if the pool was opened without a saved state, and not all of its devices were present
    /// since.
    pub(in crate::services) is_unseen: bool,
    /// Operation in progress on the pool.
    pub(in crate::services) busy: Option<&'static str>,
    /// The disk whose cache leaves a device that is being removed.
    pub(in crate::services) leaving_disk: Option<String>,
    /// Division of the pool among its shared caches.
    pub(in crate::services) sharing: pools::Sharing,
    /// Flash writes of the pool's caches, and their budget.
    pub(in crate::services) flash_writes: pools::PoolWrites,
}

#[derive(Debug)]
pub(in crate::services) struct DeviceEntry {
    pub(in crate::services) path: PathBuf,
    /// Ids of the device while it is open.
    pub(in crate::services) ids: Option<DeviceIds>,
    pub(in crate::services) state: DeviceState,
    pub(in crate::services) reason: Option<String>,
    /// Whether caches may allocate segments on this device, as configured. A fence overrides this.
    pub(in crate::services) admission: Admission,
    pub(in crate::services) segments: u64,
    pub(in crate::services) free_segments: u64,
    pub(in crate::services) access: &'static str,
    /// UUID of the device while it is open.
    pub(in crate::services) uuid: Option<String>,
    /// Numbers that identify the regular file of the device, while the device is open.
    pub(in crate::services) file: Option<FileNumber>,
    /// Location of the device if it is on another host.
    pub(in crate::services) peer: Option<PeerState>,
    /// Segments that caches lost when the device was fenced, with the device ids of the shards.
    /// These segments are not allocated again.
    pub(in crate::services) lost: Vec<Segment>,
    pub(in crate::services) stalls: pools::Stalls,
}

/// The two ids of a device: one in its pool, and one on the shards, where the devices of all pools
/// have different ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::services) struct DeviceIds {
    pub(in crate::services) in_pool: DeviceId,
    pub(in crate::services) on_shards: DeviceId,
}

#[derive(Debug, Default)]
pub(in crate::services) struct DiskEntry {
    pub(in crate::services) id: DiskId,
    pub(in crate::services) wanted: DiskState,
    pub(in crate::services) phase: DiskPhase,
    pub(in crate::services) size_bytes: u64,
    /// Datastore of the backing, determined when the disk was last opened.
    pub(in crate::services) datastore: Option<String>,
    /// True if the disk has a cache on its shard.
    pub(in crate::services) has_cache: bool,
    /// The journal rings from which the cache of the served disk is being recovered; `None` if no
    /// recovery is in progress.
    pub(in crate::services) recovering: Option<disks::OldRings>,
    /// Exists while a thread reads the journal of the cache. The thread may still read after the
    /// opening of the disk has failed.
    pub(in crate::services) journal_reader: Weak<()>,
    /// Number of free segments in the pool at the last attempt to use the recovered cache, if the
    /// attempt found too little space for the cache's journal; otherwise `None`.
    pub(in crate::services) too_few_for_journal: Option<u64>,
    /// Exists while the dirty data of the offline disk is written to the backing. The value true
    /// stops these writes.
    pub(in crate::services) offline_drain: Option<Arc<AtomicBool>>,
    /// Data segments of the cache, with the device ids of the shards.
    pub(in crate::services) held: Vec<Segment>,
    /// Segments of the cache's replica on another host, with the device ids of the shards.
    pub(in crate::services) apart: Vec<Segment>,
    /// True while the replica's segments are being released. Meanwhile the replica is not added to
    /// the ownership record in etcd.
    pub(in crate::services) leaves_peer: bool,
    /// The segments that should still move after the last attempt to balance the cache over
    /// devices, and the time of that attempt. Only set if the attempt changed nothing.
    pub(in crate::services) vain_spread: Option<(pools::Surplus, tokio::time::Instant)>,
    /// True if the disk's ownership record may name the replica.
    pub(in crate::services) copy_said: bool,
    /// Segments of the journal's ring, with the device ids of the shards. While the journal ring is
    /// being replaced, the list also has the segments of the next journal ring.
    pub(in crate::services) ring: Vec<Segment>,
    /// Number of copies of the newest journal ring.
    pub(in crate::services) ring_copies: usize,
    /// Settings of the memory tier on the shard.
    pub(in crate::services) memory: Option<MemoryConfig>,
    /// Identity of the backing when the disk was last opened.
    pub(in crate::services) identity: [u8; 32],
    /// Objects that examine the disk's backing; `None` until the disk is opened.
    pub(in crate::services) measure: Option<disks::Measure>,
    /// The lock on the backing that excludes other writers.
    pub(in crate::services) lock: Option<Lock>,
    /// Name of the backing's content, if this content never changes; clones find their parent by
    /// this name. `None` for other backings, and after hob has detected a change.
    pub(in crate::services) constant: Option<String>,
    /// The parent of the clone, as found when the disk was last opened.
    pub(in crate::services) parent: Option<disks::ParentLink>,
    /// State of the dirty data when it was last read, to detect that a drain makes no progress.
    pub(in crate::services) watch: pools::Watch,
    /// How fast the last opening of the backing failed.
    pub(in crate::services) opening_speed: disks::OpeningSpeed,
    /// Earliest time at which hob itself tries to open the offline disk again; `None` for no such
    /// limit.
    pub(in crate::services) retry_after: Option<tokio::time::Instant>,
    /// Limits how often hob logs that the backing may have lost writes.
    pub(in crate::services) loss_message: RepeatedMessage,
    /// True if hob has logged that the backing fails requests, and has not yet logged that the
    /// backing works again.
    pub(in crate::services) backing_was_failing: bool,
    /// Limits how often hob logs that flash cannot return dirty data.
    pub(in crate::services) dirty_lost_message: RepeatedMessage,
    /// The last logged reason why the disk is offline.
    pub(in crate::services) offline_reason: Option<String>,
    /// True if hob has logged its notes about the format that the disk's content looks like.
    pub(in crate::services) content_noted: bool,
    /// Number of guests that have not received a report of a failed flush.
    pub(in crate::services) owed: UnreportedFailures,
    /// Reason within the cluster why the disk could not be acquired when it was last opened.
    pub(in crate::services) cluster_wait: ClusterWait,
    /// The cache that the disk had when another program or host took the disk over, and whether
    /// this cache may have dirty data. `None` for a disk that was opened since then.
    pub(in crate::services) lost_dirty: Option<(CacheOwner, bool)>,
    /// True if the daemon is ending and the disk has no dirty data any more.
    pub(in crate::services) drained_at_end: bool,
    /// True if the drain left no dirty data, also not on devices that are missing.
    pub(in crate::services) clean_at_end: bool,
    /// Time when the disk was closed last, if its backing could then still execute requests of this
    /// host for whose replies hob no longer waits.
    pub(in crate::services) unanswered_since: Option<tokio::time::Instant>,
    /// Reason why the cache differs from its configuration.
    pub(in crate::services) cache_reason: Option<String>,
    /// Findings of the latest repartitioning about the shared cache.
    pub(in crate::services) sharing: hob_engine::partition::Status,
    /// Comparisons of the cache's hits with its miss-ratio curve, and counts of wrong checksums.
    pub(in crate::services) quality: observe::Quality,
    /// FUSE files of the disk by export, mounted or not.
    pub(in crate::services) files: BTreeMap<String, exports::FileEntry>,
    /// The disk's block device on this host.
    pub(in crate::services) device: exports::DeviceEntry,
    /// Operation in progress on the disk.
    pub(in crate::services) busy: Option<&'static str>,
    /// True while the disk's shares, limits or reservation are being changed.
    pub(in crate::services) changes_qos: bool,
    /// Number of recordings of the disk's requests.
    pub(in crate::services) recording: Counter,
    /// True if the disk is saved although it is still being added, because clients may write to its
    /// cache.
    pub(in crate::services) is_saved_early: bool,
}

/// Phase of a disk on this host.
#[derive(Debug)]
pub(in crate::services) enum DiskPhase {
    /// The disk is served by this shard.
    Online(ShardHandle),
    /// The disk is not served, for this reason.
    Offline(String),
    /// Another host has the disk, as far as this host knows. The text gives details.
    Away(String),
    /// The disk is being removed.
    Removing,
}

impl Default for DiskPhase {
    fn default() -> DiskPhase {
        DiskPhase::Offline("the disk is being opened".to_owned())
    }
}

impl Registry {
    /// Creates a registry without pools and disks. Saves have no effect before
    /// [`set_restored`](Self::set_restored).
    pub(super) fn new(shards: Vec<ShardHandle>, store: Store) -> Arc<Registry> {
        assert!(!shards.is_empty(), "the daemon has at least one shard");
        let directory = store.directory().map(std::path::Path::to_owned);
        Arc::new(Registry {
            shards,
            store: Mutex::new(store),
            directory,
            inner: Mutex::default(),
            parts: OnceLock::new(),
            observer: OnceLock::new(),
        })
    }

    /// Sets the services with data in the state file, and the observer of saves. Later calls have
    /// no effect.
    pub(super) fn connect(&self, parts: Vec<Arc<dyn StatePart>>, observer: Weak<dyn SaveObserver>) {
        let _ = self.parts.set(parts);
        let _ = self.observer.set(observer);
    }

    pub(super) fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Declares that all pools and disks of the state file are in the registry.
    pub(super) fn set_restored(&self) {
        self.inner().is_restored = true;
    }

    /// Returns the shard with the fewest disks.
    pub(super) fn quietest_shard(&self) -> ShardHandle {
        let inner = self.inner();
        let load = |shard: &ShardHandle| {
            let here = |phase: &DiskPhase| matches!(phase, DiskPhase::Online(other) if other.is_same(shard));
            inner.disks.values().filter(|disk| here(&disk.phase)).count()
        };
        self.shards.iter().min_by_key(|shard| load(shard)).expect("there is a shard").clone()
    }

    /// Returns the shard that serves a disk, and the disk's id there.
    pub(super) fn shard_of(&self, name: &str) -> Result<(ShardHandle, DiskId)> {
        let inner = self.inner();
        let disk = inner.disk(name)?;
        Ok((disk.shard()?, disk.id))
    }

    /// Returns true if the state is saved in a file. `hob serve` has no state file.
    pub(super) fn has_state_file(&self) -> bool {
        self.directory.is_some()
    }

    /// Returns the state directory; `None` without a state file.
    pub(super) fn directory(&self) -> Option<PathBuf> {
        self.directory.clone()
    }

    /// Saves the configuration that is already in effect.
    pub(super) async fn save(self: &Arc<Self>) -> Result<()> {
        Ok(self.keep().await??)
    }

    /// Saves a change of the configuration before it takes effect.
    pub(super) async fn save_first(self: &Arc<Self>) -> Result<()> {
        if let Some(observer) = self.observer.get().and_then(Weak::upgrade) {
            observer.before_save().await?;
        }
        self.keep().await?.map_err(|error| ApiError::not_begun(&error))
    }

    async fn keep(self: &Arc<Self>) -> Result<Result<(), StateError>> {
        let registry = self.clone();
        flash::blocking(move || {
            // The lock is taken first, so that an older state never replaces a newer state in the
            // file.
            let store = registry.store.lock().unwrap_or_else(PoisonError::into_inner);
            let mut state = {
                let mut inner = registry.inner();
                if !inner.is_restored {
                    return Ok(());
                }
                inner.note_ended_caches();
                inner.state()
            };
            registry.parts.get().into_iter().flatten().for_each(|part| part.add_to(&mut state));
            let saved = store.save(&state);
            registry.inner().unsaved = saved.as_ref().err().map(ToString::to_string);
            saved
        })
        .await
    }
}

impl Inner {
    /// Returns the disks that the state file has. A new disk is saved when it was added, or earlier
    /// if clients may write to its cache. A disk is no longer saved when its removal begins.
    fn saved_disks(&self) -> impl Iterator<Item = &DiskEntry> {
        let is_saved = |disk: &&DiskEntry| {
            !matches!(disk.phase, DiskPhase::Removing) && (!disk.is_arriving() || disk.is_saved_early)
        };
        self.disks.values().filter(is_saved)
    }

    pub(in crate::services) fn state(&self) -> State {
        let pools = self.pools.iter().map(|(name, pool)| PoolState {
            name: name.clone(),
            devices: pool.devices.iter().map(|device| device.path.clone()).collect(),
            devices_out: pool.chosen_out().map(|device| device.path.clone()).collect(),
            peers: pool.devices.iter().filter_map(|device| device.peer.clone()).collect(),
            segment_size: Size(pool.segment_bytes),
            uuid: pool.uuid.clone(),
            device_ids: Some(pool.device_ids).filter(|ids| *ids > 0),
            flash_writes: pool.flash_writes.wanted(),
            is_unseen: pool.is_unseen,
        });
        State {
            pools: pools.collect(),
            disks: self.saved_disks().map(|disk| disk.wanted.clone()).collect(),
            pools_removed: self.pools_removed.clone(),
            disks_removed: self.disks_removed.clone(),
            gone: self.gone.clone(),
            waited: self.waited.values().cloned().collect(),
            caches_refused: self.caches_refused.clone(),
            ended_caches: self.ended.to_save(),
            ..State::default()
        }
    }

    pub(in crate::services) fn pool(&self, name: &str) -> Result<&PoolEntry> {
        self.pools.get(name).ok_or_else(|| no_pool(name))
    }

    pub(in crate::services) fn pool_mut(&mut self, name: &str) -> Result<&mut PoolEntry> {
        self.pools.get_mut(name).ok_or_else(|| no_pool(name))
    }

    pub(in crate::services) fn disk(&self, name: &str) -> Result<&DiskEntry> {
        self.disks.get(name).ok_or_else(|| no_disk(name))
    }

    pub(in crate::services) fn disk_mut(&mut self, name: &str) -> Result<&mut DiskEntry> {
        self.disks.get_mut(name).ok_or_else(|| no_disk(name))
    }
}

impl Inner {
    /// Returns the smallest unused disk id, because shards index tables by id.
    pub(in crate::services) fn new_disk_id(&self) -> DiskId {
        let disks = self.disks.values().map(|disk| disk.id);
        let taken: std::collections::BTreeSet<u32> = disks
            .chain(self.lease_disks.iter().chain(self.abandoned.keys()).copied())
            .map(|id| id.0)
            .collect();
        DiskId((0..).find(|id| !taken.contains(id)).expect("there are fewer disks than ids"))
    }

    /// Returns an id for a disk that only a borrower of flash uses.
    pub(in crate::services) fn new_lease_id(&mut self) -> DiskId {
        let id = self.new_disk_id();
        self.lease_disks.insert(id);
        id
    }
}

impl DiskEntry {
    pub(in crate::services) fn cache(&self) -> Option<&CacheSpec> {
        self.wanted.cache.as_ref()
    }

    pub(in crate::services) fn shard(&self) -> Result<ShardHandle> {
        match &self.phase {
            DiskPhase::Online(shard) => Ok(shard.clone()),
            DiskPhase::Offline(reason) => {
                let hint = match self.waits_for_cluster() {
                    true => "'hob cluster disks' shows the owners of all disks",
                    false => "repair the backing of the disk; hob retries every few seconds",
                };
                Err(conflict!("{} is offline: {reason}", self.wanted.name).hint(hint))
            }
            DiskPhase::Away(why) => Err(away(&self.wanted.name, why)),
            DiskPhase::Removing => Err(conflict!("{} is being removed", self.wanted.name)),
        }
    }

    /// Records that the disk's cache, which is not used any more, has no dirty data.
    pub(in crate::services) fn note_clean_cache(&mut self) {
        if self.has_cache && self.recovering.is_none() {
            let journal = self.wanted.cache.as_mut().and_then(|spec| spec.journal.as_mut());
            journal.into_iter().for_each(JournalSpec::note_clean);
        }
    }

    /// Returns true if the disk was added by an operation that is still in progress, and was not
    /// online yet.
    pub(in crate::services) fn is_arriving(&self) -> bool {
        self.busy == Some(ADDING)
    }
}

impl Inner {
    /// Refuses changes during an upgrade.
    pub(super) fn check_stays(&self) -> Result<()> {
        match self.leaving {
            false => Ok(()),
            true => Err(ApiError::conflict("hob is being upgraded").hint("try again in a moment")),
        }
    }
}

pub(in crate::services) fn away(name: &str, why: &str) -> ApiError {
    conflict!("{name} belongs to another host: {why}")
        .hint(format!("'hob migrate {name}' shows the migration"))
}

fn no_pool(name: &str) -> ApiError {
    not_found!("there is no pool '{name}'").hint("'hob pool list' shows all")
}

fn no_disk(name: &str) -> ApiError {
    not_found!("there is no disk '{name}'").hint("'hob disk list' shows all")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A save may hang on its filesystem. Meanwhile the control thread must still get the
    /// directory.
    #[test]
    fn the_state_directory_is_known_while_a_save_hangs() {
        let directory = tempfile::tempdir().unwrap();
        let (store, _) = Store::open(directory.path()).unwrap();
        let (shard, _calls) = ShardHandle::new(|| {});
        let registry = Registry::new(vec![shard], store);
        let _saving = registry.store.lock().unwrap();
        let (sender, answers) = std::sync::mpsc::channel();
        let asked = registry.clone();
        std::thread::spawn(move || sender.send((asked.directory(), asked.has_state_file())));
        let answer = answers.recv_timeout(Duration::from_secs(60));
        assert_eq!(answer, Ok((Some(directory.path().to_owned()), true)));
    }
}
