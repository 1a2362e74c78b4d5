//! Disks: opened and given to a shard, their caches recovered, closed, removed; their images, parents and sizes.
//!
//! Which host may serve a disk, and whether it is moving, is decided above this service: it opens a disk through its [`DiskOwner`],
//! which calls [`Disks::open_owned`] when the disk is this host's. In order: [`opening`], [`recover`] and [`recovering`] with the table in
//! [`fencing`], [`dirty_rescue`] and [`abandon`] for what is given up, [`resize`], [`image`], [`parents`].

mod abandon;
mod backing_timeout;
mod dirty;
mod dirty_rescue;
mod evidence;
mod export_dirty;
mod fencing;
mod foreign_writer;
mod image;
mod life_cycle;
mod opening;
mod parents;
mod pool_preview;
mod preview;
mod recover;
mod recovering;
mod resize;

use std::pin::Pin;
use std::sync::{Arc, OnceLock, Weak};

use hob_control::DiskChanged;

use super::api_error::ApiError;
use super::exports::ExportService;
use super::observe::Observe;
use super::peer_access::PeerAccess;
use super::pools::Pools;
use super::qos::QosService;
use super::registry::Registry;
use super::tasks::Tasks;
use crate::daemon::hardware::BackingOptions;
pub(super) use dirty::{Dirty, Source};
pub(super) use image::image_asked;
pub(super) use opening::{BACKING_CHARS_MAX, Open, access_of, open_gateway};
pub(super) use parents::ParentLink;
pub(super) use recovering::{OldRings, RecoveringCache};
pub(super) use resize::Measure;

type Answer<T> = Pin<Box<dyn Future<Output = Result<T, ApiError>> + Send>>;

/// Notes, and the cache that is still being recovered.
pub(super) type Opened = (Vec<String>, Option<RecoveringCache>);

/// A service of a higher layer, which decides whose a disk is.
pub(super) trait DiskOwner: std::fmt::Debug + Send + Sync {
    /// Opens a disk of which the caller holds the operation guard, if this host may serve it.
    fn open(self: Arc<Self>, disk: String, when: Open) -> Answer<Opened>;

    /// Removes what is kept of a disk that is not here. Returns nothing if the disk is here.
    fn remove_absent(self: Arc<Self>, disk: String) -> Answer<Option<DiskChanged>>;
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Disks {
    registry: Arc<Registry>,
    tasks: Tasks,
    exports: ExportService,
    qos: QosService,
    pools: Pools,
    observe: Observe,
    peers: Arc<PeerAccess>,
    backing_options: BackingOptions,
    owner: Arc<OnceLock<Weak<dyn DiskOwner>>>,
}

impl Disks {
    #[expect(clippy::too_many_arguments, reason = "all services of lower layers")]
    pub(super) fn new(
        registry: Arc<Registry>,
        tasks: Tasks,
        exports: ExportService,
        qos: QosService,
        pools: Pools,
        observe: Observe,
        peers: Arc<PeerAccess>,
        backing_options: BackingOptions,
    ) -> Disks {
        let owner = Arc::default();
        Disks { registry, tasks, exports, qos, pools, observe, peers, backing_options, owner }
    }

    /// Sets who decides whose a disk is. Later calls have no effect.
    pub(super) fn connect(&self, owner: Weak<dyn DiskOwner>) {
        let _ = self.owner.set(owner);
    }

    fn owner(&self) -> Result<Arc<dyn DiskOwner>, ApiError> {
        let owner = self.owner.get().and_then(Weak::upgrade);
        owner.ok_or_else(|| ApiError::conflict("the daemon is ending"))
    }

    async fn open_by_owner(&self, name: &str, when: Open) -> Result<Opened, ApiError> {
        self.owner()?.open(name.to_owned(), when).await
    }
}
