//! The disk service: opens disks, assigns them to shards, recovers their caches, closes and removes
//! them, and handles their images, parents and sizes.
//!
//! A higher layer decides which host may serve a disk, and migrates disks. This service opens a
//! disk through its [`DiskOwner`], which calls [`Disks::open_owned`] if this host may serve the
//! disk.
//!
//! Read [`adding`] and [`opening`] first. [`opening_turns`] limits how many disks are opened at the
//! same time. The recovery of a cache is in [`journal_reading`], [`recover`], [`comparison`],
//! [`recovering`] and [`kept_cache`]. [`fencing`], [`evidence`] and
//! [`last_served`] decide whether a recovered cache may be used. [`offline_drain`] drains caches
//! without space for a journal, and [`adoption`] gives a disk a cache that belongs to no disk.
//! [`removal`] removes disks, and [`dirty_rescue`] and [`abandon`] discard dirty data.

mod abandon;
mod adding;
mod adoption;
mod backing;
mod backing_timeout;
mod comparison;
mod crash_log;
mod dirty;
mod dirty_rescue;
mod evidence;
mod export_dirty;
mod fencing;
mod file_questions;
mod flash_content;
mod foreign_writer;
mod image;
mod image_lock;
mod journal_reading;
mod kept_cache;
mod last_served;
mod life_cycle;
mod offline_drain;
mod opening;
mod opening_turns;
mod parents;
mod pool_preview;
mod preview;
mod recover;
mod recovering;
mod recovery_memory;
mod refusal;
mod removal;
mod reopening;
mod resize;
mod settings;
mod to_backing;

use std::pin::Pin;
use std::sync::{Arc, OnceLock, Weak};

use hob_control::DiskChanged;

pub(super) use foreign_writer::has_no_dirty_data;

use super::exports::ExportService;
use super::observe::Observe;
use super::peer_access::PeerAccess;
use super::pools::Pools;
use super::qos::QosService;
use super::registry::Registry;
use super::tasks::Tasks;
use crate::api_error::{ApiError, Result};
use crate::hardware::BackingOptions;
pub(super) use adding::{BACKING_CHARS_MAX, no_backing};
pub(crate) use backing_timeout::wait_max;
pub(super) use dirty::{Dirty, Source};
pub(super) use image::image_asked;
use last_served::Record;
pub(super) use opening::{Open, open_gateway};
pub(super) use opening_turns::OpeningSpeed;
use opening_turns::OpeningTurns;
pub(super) use parents::ParentLink;
pub(super) use recovering::{OldRings, RecoveringCache};
use recovery_memory::RecoveryMemory;
pub(super) use resize::Measure;
pub(super) use to_backing::{DirtyPass, note_progress, write_to_backing};

type Answer<T> = Pin<Box<dyn Future<Output = Result<T>> + Send>>;

/// Result of opening a disk: notes for the log, and the disk's cache if it is still being
/// recovered.
pub(super) type Opened = (Vec<String>, Option<RecoveringCache>);

/// Interface to the higher-layer service that decides which host owns a disk.
pub(super) trait DiskOwner: std::fmt::Debug + Send + Sync {
    /// Opens a disk if this host may serve it. The caller holds the disk's operation guard.
    fn open(self: Arc<Self>, disk: String, when: Open) -> Answer<Opened>;

    /// Removes the records of a disk that is not on this host. Returns `None` if the disk is on
    /// this host.
    fn remove_absent(self: Arc<Self>, disk: String) -> Answer<Option<DiskChanged>>;
}

service! {
    /// The disk service; see the module.
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
    } with {
        owner: Arc<OnceLock<Weak<dyn DiskOwner>>>,
        last_served: Arc<Record>,
        recovery_memory: Arc<RecoveryMemory>,
        opening_turns: Arc<OpeningTurns>,
    }
}

impl Disks {
    /// Sets the service that decides which host owns a disk. Only the first call has an effect.
    pub(super) fn connect(&self, owner: Weak<dyn DiskOwner>) {
        let _ = self.owner.set(owner);
    }

    fn owner(&self) -> Result<Arc<dyn DiskOwner>> {
        let owner = self.owner.get().and_then(Weak::upgrade);
        owner.ok_or_else(|| ApiError::conflict("the daemon is shutting down"))
    }

    /// Opens a disk if this host may serve it. Refuses a disk that a shard still has, before this
    /// host acquires the disk in its cluster.
    async fn open_by_owner(&self, name: &str, when: Open) -> Result<Opened> {
        self.registry.inner().check_left_by_shard(name)?;
        self.owner()?.open(name.to_owned(), when).await
    }
}
