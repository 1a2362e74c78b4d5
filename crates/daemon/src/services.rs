//! The services of the daemon, and the order in which they may call each other
//! ([0049](../../../docs/decisions/0049-services.md)).
//!
//! The state file keeps the configuration of pools, disks and caches. The services apply this
//! configuration as far as devices and backings allow. The services run on the control thread. Each
//! service owns its state behind its own lock and calls only services of lower layers; the lowest
//! one is the [`Registry`]. [`Services`] connects the services and has no other task: the control
//! API calls the services.
//!
//! # Changes
//!
//! A change runs as a [task](Tasks) to its end, even if its client has disconnected. Only one
//! change of a disk or pool runs at a time. During a change, the registry refuses a second change
//! of the disk or pool ([`registry::OperationGuard`]).

/// Defines a service and its function `new`, whose arguments are the services and values that the
/// new service uses. `with` lists the service's own state, which is empty at first.
macro_rules! service {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $Service:ident {
            $($(#[$about_used:meta])* $used:ident: $Used:ty,)*
        } with {
            $($(#[$about_state:meta])* $state:ident: $State:ty,)*
        }
    ) => {
        $(#[$attribute])*
        $visibility struct $Service {
            $($(#[$about_used])* $used: $Used,)*
            $($(#[$about_state])* $state: $State,)*
        }

        impl $Service {
            #[allow(clippy::too_many_arguments, reason = "services of lower layers")]
            pub(super) fn new($($used: &$Used),*) -> $Service {
                $Service { $($used: $used.clone(),)* $($state: Default::default(),)* }
            }
        }
    };
}

mod cluster;
mod disks;
mod ending;
mod events;
mod exports;
mod flash;
mod hob_toml;
mod migration;
mod moves;
mod observe;
mod ownership;
mod peer_access;
mod pools;
mod qos;
mod registry;
mod remote_flash;
mod shutdown;
mod startup;
mod swap;
mod tasks;

use std::sync::{Arc, Weak};

use super::cluster::Cluster;
use super::exports::Exports;
use super::hardware::BackingOptions;
use super::shard_api::ShardHandle;
use super::state::Store;
use super::swap::{HostKernel, SwapKernel};
use cluster::ClusterService;
pub(crate) use disks::wait_max;
use disks::{DiskOwner, Disks};
pub(crate) use ending::Ending;
use events::Events;
use exports::ExportService;
pub(crate) use exports::InheritedFile;
use hob_toml::HobToml;
use migration::Migrations;
pub(crate) use migration::{CHANGED_BYTES_MAX, CallIn};
use moves::Moves;
pub(crate) use observe::Recording;
use observe::{DiskDetail, Observe};
use ownership::Ownership;
pub(crate) use peer_access::MigrationTransport;
use peer_access::PeerAccess;
use pools::Pools;
use qos::QosService;
use registry::{Registry, SaveObserver};
use remote_flash::RemoteFlash;
pub(crate) use remote_flash::{Ended, FlashExports};
use shutdown::Shutdown;
use startup::Startup;
use swap::Swaps;
use tasks::Tasks;

/// All services; see the module's text.
#[derive(Debug)]
pub(crate) struct Services {
    peers: Arc<PeerAccess>,
    pub(crate) qos: QosService,
    pub(crate) swap: Swaps,
    pub(crate) observe: Observe,
    pub(crate) remote_flash: RemoteFlash,
    pub(crate) exports: ExportService,
    pub(crate) pools: Pools,
    pub(crate) disks: Disks,
    pub(crate) migrations: Arc<Migrations>,
    pub(crate) moves: Arc<Moves>,
    pub(crate) cluster: Arc<ClusterService>,
    pub(crate) hob_toml: HobToml,
    pub(crate) startup: Startup,
    pub(crate) shutdown: Shutdown,
    pub(crate) events: Events,
    #[cfg(test)]
    registry: Arc<Registry>,
    #[cfg(test)]
    tasks: Tasks,
}

impl Services {
    /// Connects the services, which have no pools and disks yet.
    pub(crate) fn new(
        shards: Vec<ShardHandle>,
        exports: Exports,
        backing_options: BackingOptions,
        store: Store,
    ) -> Arc<Services> {
        Services::with_swap_kernel(shards, exports, backing_options, store, Arc::new(HostKernel))
    }

    /// Connects the services, with this kernel interface for swap.
    fn with_swap_kernel(
        shards: Vec<ShardHandle>,
        exports: Exports,
        backing_options: BackingOptions,
        store: Store,
        kernel: Arc<dyn SwapKernel>,
    ) -> Arc<Services> {
        let bitmaps = store.directory().map(|directory| directory.join("bitmaps"));
        let registry = Registry::new(shards, store);
        registry.inner().wait_max = backing_options.wait_max;
        let peers = Arc::new(PeerAccess::default());
        let tasks = Tasks::default();
        tasks.connect(&registry);
        let qos = QosService::new(&registry, &tasks);
        let swap = Swaps::new(&registry, &tasks, &kernel);
        let export_table = exports.clone();
        let exports = ExportService::new(&registry, &tasks, &exports, &bitmaps);
        let remote_flash = RemoteFlash::new(&registry, &tasks, &qos, &peers, &backing_options);
        let observe = Observe::new(&registry, &tasks, &qos, &swap, &peers, &export_table);
        let pools = Pools::new(&registry, &tasks, &swap, &remote_flash, &observe, &peers);
        let disks = Disks::new(&registry, &tasks, &exports, &qos, &pools, &observe, &peers, &backing_options);
        let ownership = Arc::new(Ownership::new(&registry, &pools, &peers));
        let migrations = Arc::new(Migrations::new(
            &registry,
            &tasks,
            &exports,
            &qos,
            &pools,
            &disks,
            &observe,
            &ownership,
            &peers,
            &backing_options,
        ));
        let moves =
            Arc::new(Moves::new(&registry, &exports, &pools, &disks, &observe, &ownership, &migrations));
        let cluster = Arc::new(ClusterService::new(
            &registry,
            &tasks,
            &observe,
            &remote_flash,
            &disks,
            &ownership,
            &migrations,
            &moves,
        ));
        let hob_toml = HobToml::new(&registry, &tasks, &qos, &pools, &disks);
        let startup = Startup::new(
            &registry,
            &tasks,
            &qos,
            &swap,
            &exports,
            &remote_flash,
            &pools,
            &disks,
            &migrations,
            &hob_toml,
        );
        let shutdown = Shutdown::new(&registry, &tasks, &exports, &pools, &disks, &migrations);
        let events = Events::new(
            &registry,
            &peers,
            &qos,
            &exports,
            &observe,
            &remote_flash,
            &pools,
            &disks,
            &migrations,
        );
        let parts =
            vec![qos.state_part(), swap.state_part(), hob_toml.state_part(), Arc::new(tasks.clone()) as _];
        registry.connect(parts, Arc::downgrade(&ownership) as Weak<dyn SaveObserver>);
        observe.connect(Arc::downgrade(&migrations) as Weak<dyn DiskDetail>);
        disks.connect(Arc::downgrade(&cluster) as Weak<dyn DiskOwner>);
        Arc::new(Services {
            peers,
            qos,
            swap,
            observe,
            remote_flash,
            exports,
            pools,
            disks,
            migrations,
            moves,
            cluster,
            hob_toml,
            startup,
            shutdown,
            events,
            #[cfg(test)]
            registry,
            #[cfg(test)]
            tasks,
        })
    }

    /// Sets the credentials and the directory for migrations, before the start.
    pub(crate) fn set_migration_transport(&self, transport: MigrationTransport) {
        self.peers.set_transport(transport);
    }

    /// Makes this host serve its disks as a member of a cluster. Call this function before the
    /// first disk is opened.
    pub(crate) fn set_cluster(&self, cluster: Arc<Cluster>) {
        self.peers.set_cluster(cluster);
    }

    /// Sets the name of this host among its peers, outside a cluster.
    pub(crate) fn set_peer_name(&self, name: Option<String>) {
        if let Some(name) = name {
            self.peers.set_name(name);
        }
    }
}

#[cfg(test)]
mod tests;
