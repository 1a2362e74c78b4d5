//! The pool service: pools, their devices, and the caches on them, with allocation, journals,
//! drains, replicas and the memory tier.
//!
//! The registry entry of a pool lists its devices and segments. The entry of a disk lists the
//! segments of its cache. The pool service changes both entries and informs the shards. The pool
//! service does not open, recover or migrate disks.
//!
//! The submodules are: [`devices`] of pools, [`allocation`] of segments, [`caches`] and their
//! commands, [`sharing`] of a pool among caches, [`flash_writes`] and their budgets, [`rings`] of
//! journals, [`replicas`] on a peer, and [`drain`].

mod allocation;
mod balance;
mod caches;
mod device_absence;
mod device_health;
mod device_returns;
mod devices;
mod discard;
mod drain;
mod fenced_devices;
mod flash_writes;
mod foreign;
mod journal_lost;
mod memory;
mod miss_cost;
mod orphans;
mod remote_devices;
mod replacement;
mod replica_records;
mod replicas;
mod returned_devices;
mod rings;
mod sharing;
mod stalls;
mod unknown_devices;

use std::sync::Arc;

use super::observe::Observe;
use super::peer_access::PeerAccess;
use super::registry::Registry;
use super::remote_flash::RemoteFlash;
use super::swap::Swaps;
use super::tasks::Tasks;
pub(super) use allocation::{AllocationRule, Restructure, places};
pub(super) use balance::Surplus;
pub(super) use caches::no_cache;
pub(super) use devices::{Known, device_spec, no_device, segment_bytes};
pub(super) use discard::REMOVING;
pub(super) use drain::{LOOK_EVERY, Watch};
pub(super) use fenced_devices::RETURN_EVERY;
pub(super) use flash_writes::PoolWrites;
pub(super) use foreign::overwritten;
pub(super) use memory::CacheMemory;
pub(super) use orphans::read_journal;
pub(super) use rings::{journal_room, release_owner};
pub(super) use sharing::{REPARTITION_EVERY, Sharing};
pub(super) use stalls::Stalls;

service! {
    /// The pool service; see the module.
    #[derive(Clone, Debug)]
    pub(crate) struct Pools {
        registry: Arc<Registry>,
        tasks: Tasks,
        swap: Swaps,
        remote_flash: RemoteFlash,
        observe: Observe,
        peers: Arc<PeerAccess>,
    } with {
        /// Locked while the replicas in an ownership record are changed, so that an older change
        /// never replaces a newer one.
        copy_words: Arc<tokio::sync::Mutex<()>>,
        /// Locked while the journal of an orphan or of an offline disk's cache is read.
        orphan_turn: Arc<tokio::sync::Mutex<()>>,
        /// Fenced devices, which may return.
        returns: device_returns::DeviceReturns,
    }
}
