//! Pools, their devices, and the caches that lie on them: room and journals, drains, second copies, memory.
//!
//! Devices and segments are in the pool's entry of the registry, a cache's segments in its disk's entry. The service changes both, and
//! tells shards of it. It knows nothing of how disks are opened, recovered or moved. In order: [`devices`] of pools, [`allocation`] of
//! their room, [`caches`] as commands change them, [`rings`] of journals, [`replicas`] at a peer, [`drain`].

mod allocation;
mod balance;
mod caches;
mod devices;
mod discard;
mod drain;
mod journal_lost;
mod memory;
mod remote_devices;
mod replica_records;
mod replicas;
mod rings;

use std::sync::Arc;

use super::observe::Observe;
use super::peer_access::PeerAccess;
use super::registry::Registry;
use super::remote_flash::RemoteFlash;
use super::swap::Swaps;
use super::tasks::Tasks;
pub(super) use allocation::{AllocationRule, Restructure, places};
pub(super) use caches::no_cache;
pub(super) use devices::{device_spec, no_device};
pub(super) use discard::REMOVING;
pub(super) use drain::{LOOK_EVERY, Watch};
pub(super) use rings::{journal_room, release_owner};

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Pools {
    registry: Arc<Registry>,
    tasks: Tasks,
    swap: Swaps,
    remote_flash: RemoteFlash,
    observe: Observe,
    peers: Arc<PeerAccess>,
    /// Held while ownership records are told of second copies: what is said last counts.
    copy_words: Arc<tokio::sync::Mutex<()>>,
}

impl Pools {
    pub(super) fn new(
        registry: Arc<Registry>,
        tasks: Tasks,
        swap: Swaps,
        remote_flash: RemoteFlash,
        observe: Observe,
        peers: Arc<PeerAccess>,
    ) -> Pools {
        Pools { registry, tasks, swap, remote_flash, observe, peers, copy_words: Arc::default() }
    }
}
