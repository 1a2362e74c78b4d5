//! The manager: the pools, disks and caches of this host, their assignment to shards, and all
//! changes of them.
//!
//! The manager runs on the control thread. The state file keeps the configuration. The manager
//! implements it as far as devices and backings allow. The manager is being divided into services,
//! each with its own state ([0049](../../../../docs/decisions/0049-services.md)). The lowest layer
//! is the [`Registry`]. Code that is not in a service yet is a method of [`Manager`], which reaches
//! the registry through `Deref`.
//!
//! # Changes
//! A change runs as a [task](Tasks) to its end, even if its client has disconnected. Only one
//! change of a disk or pool runs at a time. A second one is refused meanwhile
//! ([`registry::OperationGuard`]).

mod adopt;
mod api_error;
mod cluster;
mod config_diff;
pub(crate) mod definitions;
mod disks;
mod events;
mod exports;
mod flash;
mod leave;
mod migration;
mod moves;
mod observe;
mod peer_access;
mod placement;
mod pools;
mod qos;
mod qos_peers;
mod registry;
mod remote_flash;
mod settings;
mod stalls;
mod start;
mod swap;
mod tasks;

use std::collections::BTreeMap;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use hob_control::{Disk, DiskChanged};

use super::config::Config;
use super::exports::Exports;
use super::hardware::BackingOptions;
use super::shard_api::ShardHandle;
use super::state::Store;
use super::swap::{HostKernel, SwapKernel};
pub(crate) use api_error::{ApiError, ErrorKind};
pub(crate) use disks::wait_max;
use disks::{DiskOwner, Disks, Open, Opened};
use exports::ExportService;
pub(crate) use exports::InheritedFile;
pub(crate) use leave::Ending;
pub(crate) use migration::{CHANGED_BYTES_MAX, CallIn};
pub(crate) use observe::Recording;
use observe::{DiskDetail, Observe};
use peer_access::PeerAccess;
pub(crate) use peer_access::{MigrationTls, MigrationTransport};
use pools::Pools;
use qos::QosService;
use registry::{DeviceEntry, DiskEntry, DiskPhase, Inner, Registry, SaveObserver};
use remote_flash::RemoteFlash;
pub(crate) use remote_flash::{Ended, FlashExports};
pub(crate) use settings::simulated as simulated_cache;
use swap::Swaps;
use tasks::Tasks;

/// The manager; see the module.
#[derive(Debug)]
pub(crate) struct Manager {
    registry: Arc<Registry>,
    pub(crate) qos: QosService,
    pub(crate) swap: Swaps,
    pub(crate) observe: Observe,
    pub(crate) remote_flash: RemoteFlash,
    pub(crate) pools: Pools,
    pub(crate) disks: Disks,
    tasks: Tasks,
    peers: Arc<PeerAccess>,
    pub(crate) exports: ExportService,
    backing_options: BackingOptions,
    /// Migrations by disk name.
    migrations: Mutex<BTreeMap<String, migration::Handle>>,
    /// Orders to move disks within the cluster.
    moves: moves::Moves,
    rates: placement::Rates,
    /// Configuration at the daemon's start.
    config: OnceLock<Box<Config>>,
}

impl Manager {
    /// Creates a manager without pools and disks.
    pub(crate) fn new(
        shards: Vec<ShardHandle>,
        exports: Exports,
        backing_options: BackingOptions,
        store: Store,
    ) -> Arc<Manager> {
        Manager::with_swap_kernel(shards, exports, backing_options, store, Arc::new(HostKernel))
    }

    /// Creates a manager that uses this kernel interface for swap.
    fn with_swap_kernel(
        shards: Vec<ShardHandle>,
        exports: Exports,
        backing_options: BackingOptions,
        store: Store,
        kernel: Arc<dyn SwapKernel>,
    ) -> Arc<Manager> {
        let bitmaps = store.directory().map(|directory| directory.join("bitmaps"));
        let registry = Registry::new(shards, store);
        registry.inner().wait_max = backing_options.wait_max;
        let tasks = Tasks::default();
        tasks.connect(&registry);
        let qos = QosService::new(registry.clone(), tasks.clone());
        let swap = Swaps::new(registry.clone(), tasks.clone(), kernel);
        let exports = ExportService::new(registry.clone(), tasks.clone(), exports, bitmaps);
        let peers = Arc::new(PeerAccess::default());
        let remote_flash = RemoteFlash::new(
            registry.clone(),
            tasks.clone(),
            qos.clone(),
            peers.clone(),
            backing_options.clone(),
        );
        let observe = Observe::new(registry.clone(), tasks.clone(), qos.clone(), swap.clone(), peers.clone());
        let pools = Pools::new(
            registry.clone(),
            tasks.clone(),
            swap.clone(),
            remote_flash.clone(),
            observe.clone(),
            peers.clone(),
        );
        let disks = Disks::new(
            registry.clone(),
            tasks.clone(),
            exports.clone(),
            qos.clone(),
            pools.clone(),
            observe.clone(),
            peers.clone(),
            backing_options.clone(),
        );
        let parts = vec![qos.state_part(), swap.state_part(), Arc::new(tasks.clone()) as _];
        let manager = Arc::new(Manager {
            registry,
            qos,
            swap,
            observe,
            remote_flash,
            pools,
            disks,
            tasks,
            peers,
            exports,
            backing_options,
            migrations: Mutex::default(),
            moves: moves::Moves::default(),
            rates: placement::Rates::default(),
            config: OnceLock::new(),
        });
        let observer: Weak<Manager> = Arc::downgrade(&manager);
        manager.registry.connect(parts, observer.clone());
        manager.observe.connect(observer.clone());
        manager.disks.connect(observer);
        manager
    }

    /// Sets the credentials and the directory for migrations, before the start.
    pub(crate) fn set_migration_transport(&self, transport: MigrationTransport) {
        self.peers.set_transport(transport);
    }

    /// Sets the name of this host among its peers, outside a cluster.
    pub(crate) fn set_peer_name(&self, name: Option<String>) {
        if let Some(name) = name {
            self.peers.set_name(name);
        }
    }
}

impl Deref for Manager {
    type Target = Arc<Registry>;

    fn deref(&self) -> &Arc<Registry> {
        &self.registry
    }
}

impl DiskOwner for Manager {
    fn open(
        self: Arc<Self>,
        disk: String,
        when: Open,
    ) -> Pin<Box<dyn Future<Output = Result<Opened, ApiError>> + Send>> {
        Box::pin(async move { self.open_disk(&disk, when).await })
    }

    fn remove_absent(
        self: Arc<Self>,
        disk: String,
    ) -> Pin<Box<dyn Future<Output = Result<Option<DiskChanged>, ApiError>> + Send>> {
        Box::pin(async move { self.remove_absent_disk(&disk).await })
    }
}

impl DiskDetail for Manager {
    fn add_to(&self, disk: &mut Disk) {
        self.show_migration(disk);
    }
}

impl SaveObserver for Manager {
    fn before_save(&self) -> Pin<Box<dyn Future<Output = Result<(), ApiError>> + Send + '_>> {
        Box::pin(self.mark_dirty())
    }
}

#[cfg(test)]
mod tests;
