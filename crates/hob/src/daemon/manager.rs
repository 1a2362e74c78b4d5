//! The manager: which pools, disks and caches there are, on which shard, and how that changes.
//!
//! It lives on the control thread. What is wanted is kept in the [`Store`]; what there is follows
//! it as far as devices and backings allow. The lock on [`Inner`] is held for look-ups only, never
//! while anything is awaited.
//!
//! # Changes
//! A change runs as a task of its own, to its end, even if whoever asked has gone; the asker waits
//! for it no longer than [`PATIENCE`]. Changes to one disk, and to one pool, follow each other: a
//! second one is refused while the first is under way ([`OperationGuard`]).

mod abandon;
mod additional_exports;
mod adopt;
mod allocation;
mod api_error;
mod backing_state;
mod backing_timeout;
mod balance;
mod bitmaps;
mod borrowing;
mod caches;
mod cluster;
mod config_diff;
mod datastores;
pub(crate) mod definitions;
mod dirty;
mod dirty_rescue;
mod disks;
mod drain;
mod events;
mod explain;
mod export;
mod fellows;
mod fencing;
mod files;
mod flash;
mod foreign_writer;
mod heartbeat;
mod image;
mod journal_lost;
mod leave;
mod lending;
mod life_cycle;
mod measure;
mod memory;
mod migration;
mod moves;
mod observe;
mod operation_guard;
mod parents;
mod peer_copy;
mod persist;
mod placement;
mod pool_preview;
mod pools;
mod preview;
mod qos;
mod quality;
mod record;
mod recover;
mod recovering;
mod report;
mod resize;
mod room;
mod second_copies;
mod settings;
mod snapshot;
mod stalls;
mod start;
mod swap;
mod tasks;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use hob_control::{Admission, DeviceState, Qos, Size};
use hob_engine::command::{MemoryConfig, Segment};
use hob_engine::units::{DeviceId, DiskId};
use hob_storage::pool::OwnerId;
use tracing::Instrument as _;

use super::cluster::Cluster;
use super::config::Config;
use super::exports::Exports;
use super::hardware::{BackingOptions, Lock};
use super::request_recorder::Counter;
use super::shard_api::{PATIENCE, ShardHandle};
use super::socket_access::SocketAccess;
use super::state::{CacheSpec, DiskState, GoneState, PeerState, PoolState, State, StateError, Store};
use super::swap::{HostKernel, SwapKernel};
use super::vhost_user::SocketPlace;
pub(crate) use api_error::{ApiError, ErrorKind};
use datastores::DatastoreEntry;
use flash::Flash;
pub(crate) use leave::{Ending, InheritedFile};
pub(crate) use lending::{Ended, Lending};
pub(crate) use migration::{CHANGED_BYTES_MAX, CallIn, MigrationTls, MigrationTransport};
pub(crate) use record::Recording;
pub(crate) use settings::simulated as simulated_cache;
use swap::SwapEntry;

/// Pools there can be.
const POOLS_MAX: usize = 64;

/// Disks there can be.
const DISKS_MAX: usize = 4096;

/// See the module.
#[derive(Debug)]
pub(crate) struct Manager {
    shards: Vec<ShardHandle>,
    exports: Exports,
    backing_options: BackingOptions,
    store: Arc<Mutex<Store>>,
    /// Where dirty bitmaps are kept, if anything is.
    bitmaps: Option<PathBuf>,
    inner: Mutex<Inner>,
    tasks: Mutex<tasks::Tasks>,
    /// By the names of their disks.
    migrations: Mutex<BTreeMap<String, migration::Handle>>,
    migration_transport: OnceLock<MigrationTransport>,
    /// Orders to move disks within the cluster.
    moves: moves::Moves,
    rates: placement::Rates,
    cluster: OnceLock<Arc<Cluster>>,
    /// What is lent to other hosts, if anything is.
    lending: OnceLock<Lending>,
    /// What this host calls itself to its peers, if that was said.
    peer_name: OnceLock<String>,
    lines: borrowing::Lines,
    /// Held while titles are told of second copies: what is said last counts.
    copy_words: tokio::sync::Mutex<()>,
    /// Who may open the sockets of disks.
    socket_access: OnceLock<SocketAccess>,
    /// What the daemon was started with.
    config: OnceLock<Box<Config>>,
    swap_kernel: Arc<dyn SwapKernel>,
    /// Files that the program before has left mounted, by export.
    left_files: Mutex<BTreeMap<String, InheritedFile>>,
}

/// What the manager knows.
#[derive(Debug, Default)]
struct Inner {
    pools: BTreeMap<String, PoolEntry>,
    disks: BTreeMap<String, DiskEntry>,
    /// Named sets of rules.
    policies: BTreeMap<String, Qos>,
    /// In the order of their ids.
    datastores: Vec<DatastoreEntry>,
    swaps: BTreeMap<String, SwapEntry>,
    /// Ids of devices are not used twice: a shard remembers what it thinks of each.
    next_device: u16,
    /// Why the state could not be saved, the last time that was tried.
    unsaved: Option<String>,
    /// A save of the failures that guests were not told of is about to begin.
    saves_owed: bool,
    /// Somebody else goes on soon: nothing is changed any more.
    leaving: bool,
    /// What hob.toml defined when it was last read, by what it is and its name.
    definitions: BTreeMap<String, String>,
    /// Why caches that hob.toml defines could not be created, by disk.
    caches_refused: BTreeMap<String, String>,
    /// Names that hob.toml defines.
    defined: BTreeSet<String>,
    /// Of these, removed by command.
    pools_removed: Vec<String>,
    disks_removed: Vec<String>,
    /// Disks that were awaited and did not come.
    gone: Vec<GoneState>,
    /// Ids of what shards serve to borrowers.
    loan_disks: BTreeSet<DiskId>,
    /// Disks that are gone from their shard and whose backing is not closed, by the ids that are not free before.
    abandoned: BTreeMap<DiskId, String>,
    /// Devices on other hosts, by their ids on the shards, that nobody is to believe any more.
    given_up: BTreeSet<DeviceId>,
    /// Of awaited disks, as they were when they waited for their cluster.
    waited: BTreeMap<String, DiskState>,
}

#[derive(Debug)]
struct PoolEntry {
    flash: Flash,
    uuid: Option<String>,
    segment_bytes: u64,
    devices: Vec<DeviceEntry>,
    /// Who had persistent caches on them when that was looked up, and how many segments.
    owners: Vec<(OwnerId, u64)>,
    /// What is being done to it.
    busy: Option<&'static str>,
}

#[derive(Debug)]
struct DeviceEntry {
    path: PathBuf,
    /// Its ids, while it is open.
    ids: Option<DeviceIds>,
    state: DeviceState,
    reason: Option<String>,
    /// What was chosen; a fence goes before it.
    admission: Admission,
    segments: u64,
    free_segments: u64,
    access: &'static str,
    /// Its own name, while it is open.
    uuid: Option<String>,
    /// Whose it is, if it is on another host.
    peer: Option<PeerState>,
    /// Segments, by their ids on the shards, that caches lost with it. They are not given away.
    lost: Vec<Segment>,
    stalls: stalls::Stalls,
}

/// A device has one name in its pool and another on the shards, which know devices of all pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DeviceIds {
    in_pool: DeviceId,
    on_shards: DeviceId,
}

#[derive(Debug)]
struct DiskEntry {
    id: DiskId,
    wanted: DiskState,
    phase: DiskPhase,
    size_bytes: u64,
    /// What its backing lies on, since it was last opened.
    datastore: Option<String>,
    /// The shard has a cache for it.
    has_cache: bool,
    /// Its cache is being recovered while it is served.
    recovering: Option<recovering::OldRings>,
    /// Segments of the cache's data, by their ids on the shards.
    held: Vec<Segment>,
    /// Segments for its second copies on another host, likewise.
    apart: Vec<Segment>,
    /// These are being given up: nobody is to be told of them.
    leaves_peer: bool,
    /// Its title may name them, or has done so.
    copy_said: bool,
    /// Segments of its journal, likewise: of the ring in use, and while it is replaced of the next one.
    ring: Vec<Segment>,
    /// Copies of the newest ring.
    ring_copies: usize,
    /// Memory above it that the shard has.
    memory: Option<MemoryConfig>,
    /// What the backing is known by, since it was last opened.
    identity: [u8; 32],
    /// Its backing, since it was last opened.
    measure: Option<resize::Measure>,
    /// The backing's lock.
    lock: Option<Lock>,
    /// What a backing that never changes is called by its clones, since it was last opened.
    constant: Option<String>,
    /// What it shares with other clones, since it was last opened.
    parent: Option<parents::ParentLink>,
    /// What was last seen of its dirty data.
    watch: drain::Watch,
    /// A cache that was refused is not read again before.
    retry_after: Option<tokio::time::Instant>,
    /// Why it is offline, as it was last said in the log.
    offline_reason: Option<String>,
    /// What its content looks like was said in the log.
    content_noted: bool,
    /// Could it be had of the cluster when it was opened last?
    cluster_wait: cluster::ClusterWait,
    /// The daemon is ending, and nothing of it is dirty any more.
    drained_at_end: bool,
    /// Why the cache is not as wanted.
    cache_reason: Option<String>,
    /// How well it does its work.
    quality: quality::Quality,
    /// The files that it is or should be, by export.
    files: BTreeMap<String, files::FileEntry>,
    /// What is being done to it.
    busy: Option<&'static str>,
    /// The recording of its requests that is under way, if one is.
    recording: Counter,
}

/// Is a disk served?
#[derive(Debug)]
enum DiskPhase {
    /// By that shard.
    Online(ShardHandle),
    /// No, because of that.
    Offline(String),
    /// Another host has it, for all that is known here; and what is known.
    Away(String),
    /// Not much longer.
    Removing,
}

impl Manager {
    /// A manager with no pools and no disks.
    pub(crate) fn new(
        shards: Vec<ShardHandle>,
        exports: Exports,
        backing_options: BackingOptions,
        store: Store,
    ) -> Arc<Manager> {
        assert!(!shards.is_empty(), "somebody has to serve the disks");
        Arc::new(Manager {
            shards,
            exports,
            backing_options,
            bitmaps: store.directory().map(|directory| directory.join("bitmaps")),
            store: Arc::new(Mutex::new(store)),
            inner: Mutex::new(Inner::default()),
            tasks: Mutex::default(),
            migrations: Mutex::default(),
            migration_transport: OnceLock::new(),
            moves: moves::Moves::default(),
            rates: placement::Rates::default(),
            cluster: OnceLock::new(),
            lending: OnceLock::new(),
            peer_name: OnceLock::new(),
            lines: borrowing::Lines::default(),
            copy_words: tokio::sync::Mutex::new(()),
            socket_access: OnceLock::new(),
            config: OnceLock::new(),
            swap_kernel: Arc::new(HostKernel),
            left_files: Mutex::default(),
        })
    }

    /// Sets who may open the sockets of disks, before the first disk is opened.
    pub(crate) fn set_socket_access(&self, access: SocketAccess) {
        let _ = self.socket_access.set(access);
    }

    /// A socket of a disk at `path`.
    fn socket_at(&self, path: &str) -> SocketPlace {
        SocketPlace { path: path.into(), access: self.socket_access.get().copied().unwrap_or_default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a change to its end; waits for it as long as anybody may be made to wait. It is a [task](tasks), whose result is kept if nobody
    /// waits for it any more.
    async fn change<T: Send + 'static>(
        self: &Arc<Self>,
        what: &'static str,
        subject: String,
        change: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (done, result) = tokio::sync::oneshot::channel();
        let task = self.begin_task(what, subject);
        let id = task.id();
        let run = async move {
            let result = change.await;
            match done.send(result) {
                Ok(()) => task.forget(),
                Err(Ok(_)) => task.end(Ok(())),
                Err(Err(error)) => {
                    tracing::warn!("task {id}, a change that nobody waited for any more, failed: {error}");
                    task.end(Err(error.to_string()));
                }
            }
        };
        // What it says is said in the name of the request that asked for it, also later.
        tokio::spawn(run.in_current_span());
        match tokio::time::timeout(PATIENCE, result).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(ApiError::failed("the change broke off; the log says why")),
            Err(_) => Err(ApiError::busy(format!(
                "the change is not finished after {} s",
                PATIENCE.as_secs()
            ))
            .hint(format!(
                "it goes on in the background as task {id}; 'hob tasks' shows how far it is and how it ends"
            ))),
        }
    }

    /// Keeps what is wanted now, and is in effect.
    async fn save(self: &Arc<Self>) -> Result<(), ApiError> {
        Ok(self.keep().await??)
    }

    /// Keeps what is wanted before it is in effect.
    async fn save_first(self: &Arc<Self>) -> Result<(), ApiError> {
        self.mark_dirty().await?;
        self.keep().await?.map_err(|error| ApiError::not_begun(&error))
    }

    async fn keep(self: &Arc<Self>) -> Result<Result<(), StateError>, ApiError> {
        let manager = self.clone();
        flash::blocking(move || {
            // The lock comes first, so that a later state is never replaced by an earlier one.
            let store = manager.store.lock().unwrap_or_else(PoisonError::into_inner);
            let state = manager.inner().state();
            let saved = store.save(&state);
            manager.inner().unsaved = saved.as_ref().err().map(ToString::to_string);
            saved
        })
        .await
    }
}

impl Inner {
    fn state(&self) -> State {
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
            policies: self.policy_states(),
            datastores: self.datastore_states(),
            swaps: self.swaps.values().map(|swap| swap.wanted.clone()).collect(),
            definitions: self.definitions.clone(),
            caches_refused: self.caches_refused.clone(),
            ..State::default()
        }
    }

    fn pool(&self, name: &str) -> Result<&PoolEntry, ApiError> {
        self.pools.get(name).ok_or_else(|| no_pool(name))
    }

    fn pool_mut(&mut self, name: &str) -> Result<&mut PoolEntry, ApiError> {
        self.pools.get_mut(name).ok_or_else(|| no_pool(name))
    }

    fn disk(&self, name: &str) -> Result<&DiskEntry, ApiError> {
        self.disks.get(name).ok_or_else(|| no_disk(name))
    }

    fn disk_mut(&mut self, name: &str) -> Result<&mut DiskEntry, ApiError> {
        self.disks.get_mut(name).ok_or_else(|| no_disk(name))
    }
}

impl DiskEntry {
    fn cache(&self) -> Option<&CacheSpec> {
        self.wanted.cache.as_ref()
    }

    fn shard(&self) -> Result<ShardHandle, ApiError> {
        match &self.phase {
            DiskPhase::Online(shard) => Ok(shard.clone()),
            DiskPhase::Offline(reason) => {
                Err(ApiError::conflict(format!("{} is offline: {reason}", self.wanted.name))
                    .hint("repair its backing; it is tried again every few seconds"))
            }
            DiskPhase::Away(why) => Err(away(&self.wanted.name, why)),
            DiskPhase::Removing => Err(ApiError::conflict(format!("{} is being removed", self.wanted.name))),
        }
    }

    /// It was asked for and has never been online.
    fn is_arriving(&self) -> bool {
        self.busy == Some(disks::ADDING)
    }
}

fn away(name: &str, why: &str) -> ApiError {
    ApiError::conflict(format!("{name} is not this host's: {why}"))
        .hint(format!("'hob migrate {name}' tells more"))
}

fn no_pool(name: &str) -> ApiError {
    ApiError::not_found(format!("there is no pool '{name}'")).hint("'hob pool list' shows all")
}

fn no_disk(name: &str) -> ApiError {
    ApiError::not_found(format!("there is no disk '{name}'")).hint("'hob disk list' shows all")
}

#[cfg(test)]
mod tests;
