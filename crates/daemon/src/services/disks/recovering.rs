//! Serving a disk while its cache is being recovered (docs/decisions/0008).
//!
//! A persistent cache is recovered from its journal in two passes. A cache fits the backing if the
//! backing has the identity and at least the size that the journal records, and is not known to
//! have changed since the cache was closed.
//!
//! | state of the recovery | the disk is served |
//! |---|---|
//! | the saved mode shows that the cache has no dirty data | at once |
//! | the first pass over the journal found which data may be dirty, and the cache fits the backing | after the first pass; changes, flushes, and reads of data that may be dirty wait |
//! | none of the above; or another host had the disk, a device is missing, the pool has no space for the next journal, the backing cannot be read a second time at once, or the cache was refused before | when the cache is recovered |
//!
//! If the cache has no dirty data, a write need not wait for the recovery: hob invalidates the old
//! journal rings, and then executes the write. If hob crashes before the new journal ring is
//! written, the cache is empty after the restart.

use hob_engine::command::{CacheChange, CommandError, Expect};
use hob_engine::regions::Regions;
use hob_engine::units::DiskId;
use hob_storage::pool::OwnerId;

use super::Disks;
use super::comparison::{Served, Source};
use super::journal_reading::Reading;
use crate::api_error::{ApiError, Result};
use crate::hardware::{BackingInfo, Reader};
use crate::services::pools::Restructure;
use crate::services::registry::DiskPhase;
use crate::services::registry::OperationGuard;
use crate::shard_api::ShardError;

/// A disk that can be served before its cache is recovered.
pub(super) struct Early {
    info: BackingInfo,
    reader: Box<dyn Reader>,
    doubtful: Regions,
}

/// The unfinished recovery of a served disk's cache.
pub(in crate::services) struct RecoveringCache {
    reading: Reading,
    served: Served,
}

/// The journal rings from which a cache is being recovered.
#[derive(Clone, Copy, Debug)]
pub(in crate::services) struct OldRings {
    owner: OwnerId,
    /// The highest number of these journal rings.
    upto: u32,
    /// Number of the last complete ring when the recovery started.
    written: u32,
}

impl Disks {
    /// Returns the data for serving a disk while its journal is read: the regions that may be
    /// dirty, and a second reader of its backing. Returns `None` if the disk must wait for the
    /// recovery. Waits for the first pass over the journal if necessary.
    pub(super) async fn early(
        &self,
        name: &str,
        info: &BackingInfo,
        reader: Option<Box<dyn Reader>>,
        reading: &mut Reading,
    ) -> Option<Early> {
        let (info, reader) = (info.clone(), reader?);
        // hob drops the record that another host has used the disk when the disk is served. The
        // data on flash must be discarded before.
        if !reading.is_complete() || reading.cache.foreign.is_some() {
            return None;
        }
        let doubtful = if reading.may_be_dirty() {
            // If the disk was offline before, it stays offline until its cache is recovered, so
            // that it does not repeatedly appear and disappear. A cache without space for a journal
            // must be drained before its disk is served.
            if self.registry.inner().disk(name).ok()?.offline_reason.is_some()
                || !self.registry.inner().has_next_ring_space(&reading.cache.spec, reading.data_segments)
            {
                return None;
            }
            let surveyed = (&mut reading.surveyed).await.ok()?;
            if !reading.fits(&surveyed, &info) {
                return None;
            }
            // The backing may have grown since the journal was written.
            surveyed.doubtful.grown(info.size_bytes)
        } else {
            Regions::new(info.size_bytes)
        };
        Some(Early { info, reader, doubtful })
    }

    /// Tells the disk's shard that its cache is being recovered, and which regions may be dirty.
    pub(super) async fn expect_cache(
        &self,
        name: &str,
        early: Early,
        reading: Reading,
    ) -> Result<RecoveringCache> {
        let Early { info, reader, doubtful } = early;
        let (shard, id) = self.registry.shard_of(name)?;
        let waits = doubtful.permille();
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            let journal = disk.cache().and_then(|spec| spec.journal);
            disk.recovering = journal.map(|journal| OldRings {
                owner: OwnerId(journal.owner.0),
                upto: reading.cache.upto,
                written: journal.written,
            });
            disk.cache_reason = Some("it is being recovered".to_owned());
        }
        let expect = Expect { doubtful, is_void: false };
        shard.change_cache(id, CacheChange::Expect(Some(Box::new(expect)))).await?;
        match waits {
            0 => tracing::info!("{name} is online; requests go to the backing until its cache is recovered"),
            _ => tracing::info!(
                "{name} is online; until its cache is recovered, changes wait, and so do reads of \
                regions with possible dirty data (at most {waits} ‰ of the disk). Other reads go to \
                the backing"
            ),
        }
        Ok(RecoveringCache { reading, served: Served { info, reader, shard, id } })
    }

    /// Waits for the recovery of a served disk's cache, and then puts the cache into service.
    pub(in crate::services) async fn await_cache(
        &self,
        name: &str,
        recovering: RecoveringCache,
        guard: OperationGuard,
    ) {
        let result = self.bring_cache(name, recovering).await;
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            disk.recovering = None;
            disk.cache_reason = None;
        }
        match result {
            Ok(notes) => {
                notes.iter().for_each(|note| tracing::warn!("{name}: {note}"));
                self.fit_opened(name).await;
            }
            Err(Restructure::Shard(error)) if is_leaving(&error) => {}
            Err(error) => self.take_offline(name, &error.into()).await,
        }
        drop(guard);
    }

    async fn bring_cache(&self, name: &str, recovering: RecoveringCache) -> Result<Vec<String>, Restructure> {
        let RecoveringCache { reading, served } = recovering;
        let (shard, id, upto) = (served.shard.clone(), served.id, reading.cache.upto);
        let may_be_dirty = reading.may_be_dirty();
        let found = match self.recover(name, reading, Source::Served(served)).await {
            Ok((_, None, notes)) => Ok(notes),
            Ok((_, Some(kept), notes)) => match self.enable_kept(name, kept).await {
                Ok(()) => return Ok(notes),
                Err(Restructure::Shard(error)) if is_leaving(&error) => return Err(error.into()),
                Err(error) => Err(error),
            },
            Err(error) => Err(error.into()),
        };
        let is_served = matches!(self.registry.inner().disk(name)?.phase, DiskPhase::Online(_));
        let notes = match found {
            Ok(notes) => notes,
            Err(error) if may_be_dirty || !is_served => return Err(error),
            Err(error) => {
                let why = ApiError::from(error).problem.error;
                vec![format!("its cache cannot be used and starts empty: {why}")]
            }
        };
        // From here on writes bypass the old cache, so it becomes outdated and must never be used.
        let spec = self.registry.inner().disk(name)?.cache().cloned();
        if let Some((spec, journal)) = spec.and_then(|spec| spec.journal.map(|journal| (spec, journal))) {
            let flash = self.registry.inner().pool(&spec.pool)?.flash.clone();
            flash.make_void(OwnerId(journal.owner.0), upto).await?;
            self.pools.forget_owner(&spec).await;
        }
        shard.change_cache(id, CacheChange::Expect(None)).await?;
        Ok(notes)
    }

    /// Lets the shard execute the waiting writes of a disk before the disk's cache is recovered.
    /// First invalidates the old journal rings on flash, so that the cache is empty after a crash.
    pub(in crate::services) async fn let_changes_pass(&self, id: DiskId) {
        let (name, spec, rings, flash, size_bytes, shard) = {
            let inner = self.registry.inner();
            let Some(disk) = inner.disks.values().find(|disk| disk.id == id) else { return };
            let (Some(rings), Ok(shard), Some(spec)) = (disk.recovering, disk.shard(), disk.cache()) else {
                return;
            };
            // The cache is in service, with a new ring that must not be recorded as removed. No
            // write waits any more.
            if spec.journal.is_none_or(|journal| journal.written != rings.written) {
                return;
            }
            let Ok(pool) = inner.pool(&spec.pool) else { return };
            (disk.wanted.name.clone(), spec.clone(), rings, pool.flash.clone(), disk.size_bytes, shard)
        };
        let made_void = match self.pools.note_end(&spec).await {
            Ok(()) => flash.make_void(rings.owner, rings.upto).await,
            error => error,
        };
        if let Err(error) = made_void {
            tracing::warn!("disk {name}: writes wait until its cache is recovered: {error}");
            return;
        }
        tracing::info!(
            "disk {name}: a guest wrote to it during the recovery of its cache; if the daemon \
            crashes now, the cache will be empty"
        );
        let expect = Expect { doubtful: Regions::new(size_bytes), is_void: true };
        // If the cache was recovered in the meantime, no write waits any more, so an error has no
        // effect.
        if let Err(error) = shard.change_cache(id, CacheChange::Expect(Some(Box::new(expect)))).await {
            tracing::debug!("{name}: {error}");
        }
    }

    /// Closes a served disk, which is then offline because of `error`.
    pub(in crate::services) async fn take_offline(&self, name: &str, error: &ApiError) {
        self.exports.table().remove_disk(name).await;
        // The files are mounted again when the disk is back.
        self.exports.hide_file_at_end(name).await;
        if let Ok((shard, id)) = self.registry.shard_of(name) {
            // Later this process may open the disk again, which finds or creates its cache.
            let taken = match self.exports.take_from_shard(name, &shard, id).await {
                Ok(gone) => self.release_closed_soon(name, gone).await,
                Err(error) => {
                    if !is_leaving(&error) {
                        self.remove_kept_disk(name, &shard, id);
                    }
                    Err(error.into())
                }
            };
            if let Err(error) = taken {
                tracing::warn!("{name}: {error}");
            }
        }
        let is_served = matches!(
            self.registry.inner().disk(name).map(|disk| matches!(disk.phase, DiskPhase::Online(_))),
            Ok(true)
        );
        if is_served {
            self.note_offline(name, error);
        }
    }
}

/// Returns true if the disk is being removed or the daemon is ending.
fn is_leaving(error: &ShardError) -> bool {
    matches!(error, ShardError::Gone | ShardError::Command(CommandError::Removing | CommandError::NoSuchDisk))
}
