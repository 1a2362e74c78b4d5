//! Opens disks, assigns them to shards, and offers them to clients.

use hob_engine::command::{Access, DiskConfig};
use hob_engine::io::Promote;
use hob_engine::units::DiskId;
use hob_frontends::vhost_user::block::Info;
use hob_storage::backing::BackingInfo;

use super::Disks;
use super::comparison::Source;
use super::journal_reading::Reading;
use super::kept_cache::Kept;
use super::recovering::{Early, RecoveringCache};
use crate::api_error::{ApiError, Result, failed};
use crate::background::spawn;
use crate::cluster::Taken;
use crate::exports::export_info;
use crate::services::pools::AllocationRule;
use crate::services::registry::{CANNOT_FLUSH, ClusterWait, DiskEntry, DiskPhase, OPENING};
use crate::shard_api::{Gone, ShardError, ShardHandle};
use crate::state::DiskState;
use crate::stripe;
use crate::vhost_user::{ExportedDisk, Failing, Gateway, SocketPlace};

/// When a disk is offered to clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::services) enum Open {
    /// Open the disk as soon as that is safe, even while its cache is being recovered.
    AtOnce,
    /// Offer the disk after its cache is recovered.
    WithCache,
}

/// A disk that was just added to its shard.
struct AddedDisk<'a> {
    wanted: &'a DiskState,
    id: DiskId,
    shard: &'a ShardHandle,
    info: &'a BackingInfo,
    access: Access,
    /// Name of the datastore.
    datastore: String,
    /// True if the backing keeps unflushed changes only in the daemon's memory.
    is_in_memory: bool,
}

impl Disks {
    /// Opens an offline disk with its cache, at the daemon's start or later.
    pub(in crate::services) async fn bring_online(&self, name: &str) {
        let Ok(guard) = self.registry.guard_disk(name, OPENING) else { return };
        if !matches!(
            self.registry.inner().disk(name).map(|disk| matches!(disk.phase, DiskPhase::Offline(_))),
            Ok(true)
        ) {
            return;
        }
        // Each attempt that fails while its journal is read would add a thread, and an index in memory.
        let is_read = |disk: &DiskEntry| disk.journal_reader.strong_count() > 0;
        if self.registry.inner().disk(name).is_ok_and(is_read) {
            return;
        }
        let is_new = self.registry.inner().disk(name).is_ok_and(|disk| disk.wanted.is_new);
        let recovering = match self.open_by_owner(name, Open::AtOnce).await {
            Ok((notes, recovering)) => {
                if is_new && let Err(error) = self.registry.save().await {
                    tracing::warn!("{name}: {error}");
                }
                notes.iter().for_each(|note| tracing::warn!("{name}: {note}"));
                if let Err(error) = self.exports.show_file(name).await {
                    tracing::error!(
                        "disk {name}: its file or block device is missing: {error}; hob tries again \
                        every few seconds"
                    );
                }
                recovering
            }
            Err(error) => return self.note_offline(name, &error),
        };
        match recovering {
            // Clients can already use the disk.
            Some(recovering) => {
                let (service, name) = (self.clone(), name.to_owned());
                spawn(async move { service.await_cache(&name, recovering, guard).await });
            }
            None => self.fit_opened(name).await,
        }
    }

    /// Adjusts the cache of a disk that has just been opened to its configured size, as far as the
    /// pool has free space.
    pub(in crate::services) async fn fit_opened(&self, name: &str) {
        match self.pools.fit_cache(name, AllocationRule::AsFarAsPossible).await {
            Ok(notes) => notes.iter().for_each(|note| tracing::warn!("{name}: {note}")),
            Err(error) => {
                tracing::warn!("{name} has no cache: {error}");
                if let Ok(disk) = self.registry.inner().disk_mut(name) {
                    disk.cache_reason = Some(error.problem.error);
                }
            }
        }
    }

    /// Records why a disk is offline, and logs the reason unless the same reason is recorded
    /// already.
    pub(in crate::services) fn note_offline(&self, name: &str, error: &ApiError) {
        let reason = error.to_string();
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            let news = disk.offline_reason.as_ref() != Some(&reason);
            if news && disk.cluster_wait == ClusterWait::Served {
                tracing::info!("{name} is not served on this host: {error}");
            } else if news {
                let again = if disk.retry_after.is_some() { "" } else { "; hob retries every few seconds" };
                tracing::error!("{name} is offline: {error}{again}");
            }
            // During recovery the reason changes with the progress.
            disk.offline_reason = Some(reason.clone());
            disk.phase = DiskPhase::Offline(reason);
        }
    }

    /// Opens a disk's backing, assigns the disk to a shard and offers it to clients. The caller
    /// holds the operation guard of the offline disk. If the cache is still being recovered, the
    /// caller continues with [`Disks::await_cache`].
    pub(in crate::services) async fn open_owned(
        &self,
        name: &str,
        when: Open,
        taken: Option<&Taken>,
    ) -> Result<(Vec<String>, Option<RecoveringCache>)> {
        let (wanted, id) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            (disk.wanted.clone(), disk.id)
        };
        let (backing, datastore) = self.open_backing(name, &wanted).await?;
        let mut notes = Vec::new();
        let (backing, home) = self.share(&wanted, backing, &mut notes).await?;
        let info = backing.info().clone();
        self.check_device(name, &info).await?;
        self.note_backing(name, &backing)?;
        self.check_orphans(name, &info, when).await?;
        let (mut kept, mut recovering, mut backing) = (None, None, backing);
        if let Some(spec) = wanted.cache.as_ref().filter(|spec| spec.journal.is_some()) {
            let mut reading = self.begin_recovery(name, spec).await?;
            reading.cache.later = self.later_change(name, info.times).await;
            let foreign = taken.and_then(|taken| taken.foreign.clone());
            reading.cache.foreign = foreign.or(reading.cache.foreign);
            reading.cache.outdated_by = taken.and_then(|taken| taken.outdated_by.clone());
            let early = match when {
                Open::WithCache => None,
                Open::AtOnce => self.early(name, &info, backing.reader(), &mut reading).await,
            };
            if let Some(early) = early {
                recovering = Some((early, reading));
            } else {
                let (source, found, more) = self.recover(name, reading, Source::Own(backing)).await?;
                (backing, kept) = (source.own(), found);
                notes.extend(more);
                if let Some(kept) = kept.take_if(|_| self.needs_offline_drain(name)) {
                    drop(backing);
                    self.drain_offline(name, kept, &info, taken).await?;
                    return Box::pin(self.open_owned(name, when, taken)).await;
                }
            }
        }
        let access = access_of(&wanted, &info);
        if info.read_only && !wanted.read_only {
            notes.push("the backing is read-only, so the disk is read-only too".to_owned());
        }
        let (datastore_id, _use) = self.qos.datastore_id(&datastore, wanted.datastore.is_some())?;
        let shard = home.unwrap_or_else(|| self.qos.shard_for(datastore_id));
        if !info.can_flush && access == Access::ReadWrite {
            notes.push(CANNOT_FLUSH.to_owned());
        }
        let has_file = wanted.fuse.is_some() && access == Access::ReadWrite;
        notes.extend(about_alignment(info.block_bytes_min).filter(|_| has_file));
        let config = DiskConfig { size_bytes: info.size_bytes, access, datastore: datastore_id };
        if let Some(taken) = taken {
            self.keep_generation(name, taken).await?;
        }
        self.forget_foreign(name).await?;
        let memory = backing.memory_id();
        if let Some(memory) = &memory {
            notes.extend(self.registry.note_killed(name, memory).await?);
        }
        self.record_service(name).await;
        shard.add_disk(id, config, backing).await?;
        shard.set_stripe(id, stripe::for_shard(wanted.stripe, &info));
        let added = AddedDisk {
            wanted: &wanted,
            id,
            shard: &shard,
            info: &info,
            access,
            datastore,
            is_in_memory: memory.is_some(),
        };
        let recovering = match self.prepare(&added, taken, kept, recovering).await {
            Ok(recovering) => recovering,
            Err(error) => {
                let left = self.leave_shard(name, &shard, id).await;
                let error = self.close_incomplete(&added, left, error).await;
                if self.needs_offline_drain(name) {
                    return Box::pin(self.open_owned(name, when, taken)).await;
                }
                return Err(error);
            }
        };
        let gateway = match self.open_for_writes(&added, when).await {
            Ok(gateway) => gateway,
            Err(error) => {
                let left = self.leave_shard_with_bitmaps(name, &shard, id).await;
                return Err(self.close_incomplete(&added, left, error).await);
            }
        };
        tracing::info!("{name} is online; its backing is {}, {} bytes", info.description, info.size_bytes);
        if let Some(gateway) = gateway {
            self.exports.table().listen_vhost_user(name, name, gateway);
        }
        if access == Access::ReadWrite {
            // Writes that an earlier daemon acknowledged may not be durable, and guests rely on a
            // flush to this daemon. If the flush fails, each client's next flush fails.
            let shard = shard.clone();
            tokio::spawn(async move { shard.flush(id).await });
        }
        if !wanted.for_clones {
            self.exports.offer(name, id, shard, export_info(&info, access)).await;
        }
        Ok((notes, recovering))
    }

    /// Saves the generation to which the disk's data on flash belongs. Must be called before the
    /// disk is served.
    async fn keep_generation(&self, name: &str, taken: &Taken) -> Result<()> {
        if let Some(why) = &taken.foreign {
            self.exports.all_is_changed(name, why).await?;
        }
        let known = self.registry.inner().disk_mut(name)?.wanted.generation.replace(taken.generation);
        if known == Some(taken.generation) { Ok(()) } else { self.registry.save_first().await }
    }

    /// Prepares a disk that was just added to its shard, before clients may write to it. If this
    /// fails, the caller removes the disk from its shard.
    async fn prepare(
        &self,
        added: &AddedDisk<'_>,
        taken: Option<&Taken>,
        kept: Option<Kept>,
        recovering: Option<(Early, Reading)>,
    ) -> Result<Option<RecoveringCache>> {
        let AddedDisk { wanted, id, shard, info, .. } = *added;
        let name = wanted.name.as_str();
        shard.owe_failures(id, self.registry.inner().disk(name)?.wanted.flush_failures_owed)?;
        if let Some(taken) = taken {
            shard.set_lease(id, taken.clock.clone())?;
        }
        self.exports.open_bitmaps(name, shard, info).await?;
        let has_qos = {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            disk.phase = DiskPhase::Online(shard.clone());
            disk.wanted.is_new = false;
            disk.memory = None;
            disk.offline_reason = None;
            disk.lost_dirty = None;
            disk.size_bytes = info.size_bytes;
            disk.datastore = Some(added.datastore.clone());
            // An entitlement of the time before is sent here. A later one is sent by its command.
            disk.wanted.qos.is_some()
        };
        if added.is_in_memory {
            self.registry.note_in_memory(name).await?;
        }
        self.link_parents();
        if has_qos {
            self.qos.apply(name).await?;
        } else {
            self.qos.apply_control_of(name);
        }
        let recovering = match recovering {
            Some((early, reading)) => Some(self.expect_cache(name, early, reading).await?),
            None => None,
        };
        if let Some(kept) = kept {
            // Without its dirty data, the disk would show the guest older data.
            self.enable_kept(name, kept).await?;
        }
        Ok(recovering)
    }

    /// Takes the last steps before clients may write to a disk, and opens the disk's vhost-user
    /// socket, which accepts a guest at once. If this fails, the caller removes the disk and its
    /// bitmaps from its shard.
    async fn open_for_writes(&self, added: &AddedDisk<'_>, when: Open) -> Result<Option<Gateway>> {
        let AddedDisk { wanted, id, shard, info, access, .. } = *added;
        let name = wanted.name.as_str();
        self.exports.begin_recording(name).await?;
        self.save_arriving(name).await?;
        let Some(path) = &wanted.vhost_user else { return Ok(None) };
        let place = self.exports.socket_at(path);
        let gateway = open_gateway(name, place, id, shard, info, access, when).await;
        gateway.map(Some).map_err(|error| failed!("cannot open the vhost-user socket {path}: {error}"))
    }

    /// Releases the memory and the segments of a disk that could not be opened completely, and
    /// returns the error of the opening. `left` is the result of removing the disk from its shard.
    /// Without the release, the segments of this opening's journal ring would still be in use at
    /// the next opening.
    async fn close_incomplete(
        &self,
        added: &AddedDisk<'_>,
        left: Result<Gone, ShardError>,
        error: ApiError,
    ) -> ApiError {
        let AddedDisk { wanted, id, shard, .. } = *added;
        let name = wanted.name.as_str();
        let released = match left {
            Ok(gone) => self.release_closed(name, gone).await,
            Err(error) => {
                self.remove_kept_disk(name, shard, id);
                Err(error.into())
            }
        };
        if let Err(error) = released {
            tracing::warn!("disk {name}: cannot close it after its opening failed: {error}");
        }
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            disk.recovering = None;
            disk.phase = DiskPhase::Offline(error.problem.error.clone());
        }
        error
    }
}

/// Opens the vhost-user socket of a disk's own export.
pub(in crate::services) async fn open_gateway(
    name: &str,
    place: SocketPlace,
    disk: DiskId,
    shard: &ShardHandle,
    info: &BackingInfo,
    access: Access,
    when: Open,
) -> std::io::Result<Gateway> {
    let info = Info {
        size_bytes: info.size_bytes,
        read_only: access == Access::ReadOnly,
        block_bytes: info.block_bytes_min.max(512),
        can_discard: info.can_discard,
        name: name.to_owned(),
    };
    // A command reports the failure to its caller; a restart retries.
    let failing = match when {
        Open::WithCache => Failing::Refuse,
        Open::AtOnce => Failing::TryAgain,
    };
    let exported = ExportedDisk { disk, shard: shard.clone(), info, promote: Promote::Usual };
    Gateway::open_aside(place, exported, failing).await
}

/// Returns the access of clients to the disk: read-only or read-write.
pub(super) fn access_of(wanted: &DiskState, info: &BackingInfo) -> Access {
    if wanted.read_only || info.read_only { Access::ReadOnly } else { Access::ReadWrite }
}

/// Returns a note for a disk that is served as a file, if the disk's backing requires a minimum
/// block size. An NBD export can announce a minimum block size to clients, and a file cannot.
fn about_alignment(block_bytes_min: u32) -> Option<String> {
    (block_bytes_min > 1).then(|| {
        format!(
            "the backing accepts only multiples of {block_bytes_min} bytes, so other writes to the disk's file fail with \
             EINVAL; docs/FUSE.md explains it"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files do not announce a minimum block size to programs.
    #[test]
    fn the_alignment_that_a_backing_requires_is_noted_for_files() {
        assert_eq!(about_alignment(1), None);
        assert!(about_alignment(512).unwrap().contains("multiples of 512 bytes"));
    }
}
