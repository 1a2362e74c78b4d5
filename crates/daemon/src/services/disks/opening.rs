//! Opens disks, assigns them to shards, and offers them to clients.

use std::time::Instant;

use hob_control::{DiskAdd, DiskChanged, Export, Size, check_name};
use hob_engine::command::{Access, DiskConfig};
use hob_engine::io::Promote;
use hob_engine::units::DiskId;
use hob_frontends::vhost_user::block::Info;
use hob_storage::backing::{BackingInfo, OpenError};
use hob_storage::device_name::DeviceName;
use hob_storage::pool::OwnerId;

use super::Disks;
use super::comparison::Source;
use super::image::image_asked;
use super::opening_turns::OpeningSpeed;
use super::recover::{Kept, Reading};
use super::recovering::{Early, RecoveringCache};
use super::resize::Measure;
use crate::api_error::{ApiError, Result, conflict, failed, invalid, open_error};
use crate::background::spawn;
use crate::cluster::{Release, Taken};
use crate::descriptors;
use crate::exports::export_info;
use crate::hardware::{Backing, BackingOptions, file_number};
use crate::services::flash;
use crate::services::pools::AllocationRule;
use crate::services::qos::datastore_of;
use crate::services::registry::{
    ADDING, CANNOT_FLUSH, ClusterWait, DISKS_MAX, DiskEntry, DiskPhase, OPENING, OperationGuard,
};
use crate::shard_api::{Gone, ShardError, ShardHandle};
use crate::state::{DiskState, ShareSpec};
use crate::stripe;
use crate::vhost_user::{ExportedDisk, Failing, Gateway, SocketPlace, check_path};

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
    /// Name of the datastore.
    datastore: String,
    /// True if the backing keeps unflushed changes only in the daemon's memory.
    is_in_memory: bool,
}

/// Maximum length of a backing specification, in bytes.
pub(in crate::services) const BACKING_CHARS_MAX: usize = 4096;

/// Returns the error for a backing specification that is empty or longer than
/// [`BACKING_CHARS_MAX`].
pub(in crate::services) fn no_backing(backing: &str) -> ApiError {
    match backing.len() {
        0 => ApiError::invalid("a disk needs a backing: a path or an nbd:// URI"),
        bytes => invalid!(
            "the path or URI of the backing has {bytes} bytes; hob accepts at most {BACKING_CHARS_MAX} bytes"
        ),
    }
}

impl Disks {
    /// Saves the generation to which the disk's data on flash belongs. Must be called before the
    /// disk is served.
    pub(in crate::services) async fn keep_generation(&self, name: &str, taken: &Taken) -> Result<()> {
        if let Some(why) = &taken.foreign {
            self.exports.all_is_changed(name, why).await?;
        }
        let known = self.registry.inner().disk_mut(name)?.wanted.generation.replace(taken.generation);
        if known == Some(taken.generation) { Ok(()) } else { self.registry.save_first().await }
    }

    /// Releases this host's ownership of a disk in the cluster. The disk's cache is not needed any
    /// more.
    pub(in crate::services) async fn leave_disk(&self, name: &str) {
        let Some(cluster) = self.peers.cluster() else { return };
        let (known, _) = self.registry.wish(name).unwrap_or((None, false));
        let release = self.registry.inner().release_of(name, cluster.settle());
        if release == Release::AfterSettling {
            tracing::warn!(
                "disk {name}: its backing may still execute requests of this host; other hosts can acquire it \
                after settle_seconds"
            );
        }
        if let Err(why) = cluster.give_up(name, known, release).await {
            tracing::warn!(
                "disk {name}: cannot release it in the cluster: {why}; its ownership lock ends with the \
                 lease of this host"
            );
        }
    }

    pub(crate) async fn disk_add(&self, add: DiskAdd) -> Result<DiskChanged> {
        let service = self.clone();
        self.tasks.run("disk add", add.name.clone(), async move { service.add(add).await }).await
    }

    /// Adds a disk and serves it. Waits for the result without a time limit, unlike `disk_add`.
    pub(in crate::services) async fn add(&self, add: DiskAdd) -> Result<DiskChanged> {
        let name = add.name.clone();
        check_name(&name).map_err(|error| invalid!("'{name}' cannot be a disk's name: {error}"))?;
        if add.backing.is_empty() || add.backing.len() > BACKING_CHARS_MAX {
            return Err(no_backing(&add.backing));
        }
        if let Some(datastore) = &add.datastore {
            check_name(datastore)
                .map_err(|error| invalid!("'{datastore}' cannot be a datastore's name: {error}"))?;
        }
        if let Some(path) = &add.fuse {
            self.exports.check_file(path)?;
        }
        if let Some(path) = &add.vhost_user {
            check_path(path).map_err(ApiError::invalid)?;
        }
        let share_parent = share_of(add.share_parent, add.parent_cache)?;
        let image = Some(image_asked(&add.backing, add.format.as_deref())?);
        let path = std::path::PathBuf::from(&add.backing);
        let wanted = DiskState {
            share_parent,
            image,
            backing_timeout: add.backing_timeout,
            stripe: stripe::chosen(add.stripe).map_err(ApiError::invalid)?,
            datastore: add.datastore,
            fuse: add.fuse,
            device: add.device,
            vhost_user: add.vhost_user,
            unlocked: add.unlocked,
            ..DiskState::new(name.clone(), add.backing, add.read_only)
        };
        let cache = match &add.adopt_cache {
            Some(owner) => Some(self.cache_to_adopt(&wanted, owner).await?),
            None => None,
        };
        let about_timeout = wanted.backing_timeout_note();
        let mut changed = self.add_state(DiskState { cache, ..wanted }).await?;
        changed.notes.extend(about_timeout);
        changed.notes.extend(flash::blocking(move || DeviceName::of(&path).note(&path)).await?);
        Ok(changed)
    }

    /// Adds a disk with these settings and serves it. The settings may name an existing persistent
    /// cache.
    pub(in crate::services) async fn add_state(&self, wanted: DiskState) -> Result<DiskChanged> {
        let name = wanted.name.clone();
        let has_device = wanted.device;
        let guard = self
            .enter(wanted, Some(ADDING))?
            .ok_or_else(|| ApiError::failed("internal error: the disk has no operation guard"))?;
        if has_device && let Err(error) = self.exports.clear_stale_device(&name).await {
            self.drop_arriving(&name).await;
            return Err(error);
        }
        let notes = match self.open_by_owner(&name, Open::WithCache).await {
            Ok((notes, _)) => notes,
            // The disk stays added, although it is not served now. It comes online when the other
            // host releases it.
            Err(error) if self.registry.is_served_elsewhere(&name) => {
                self.note_offline(&name, &error);
                self.registry.inner().disks_removed.retain(|removed| *removed != name);
                return self
                    .pools
                    .finish_disk(&name, guard, vec![format!("the disk is not served on this host: {error}")])
                    .await;
            }
            Err(error) => {
                self.drop_arriving(&name).await;
                return Err(error);
            }
        };
        if let Err(error) = self.exports.show_file(&name).await {
            self.take_back(&name).await;
            return Err(error);
        }
        self.registry.inner().disks_removed.retain(|removed| *removed != name);
        self.pools.finish_disk(&name, guard, notes).await
    }

    /// Removes a disk that was just added, because a later part of the same request failed.
    async fn take_back(&self, name: &str) {
        self.exports.table().remove_disk(name).await;
        // The entry must not unmount a file when it is dropped under the registry's lock.
        self.exports.hide_file_at_end(name).await;
        self.exports.drop_device(name).await;
        if let Ok((shard, id)) = self.registry.shard_of(name)
            && let Err(error) = self.leave_shard(name, &shard, id).await
        {
            tracing::warn!("{name}: {error}");
            // No other disk may get the id.
            self.remove_kept_disk(name, &shard, id);
        }
        self.exports.forget_bitmaps(name).await;
        self.leave_disk(name).await;
        self.drop_arriving(name).await;
    }

    /// Saves a disk that is being added with a persistent cache. The caller does this before
    /// clients may write to the disk, so that the saved state names each cache that has dirty data.
    pub(in crate::services) async fn save_arriving(&self, name: &str) -> Result<()> {
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            let is_persistent = disk.cache().is_some_and(|spec| spec.journal.is_some());
            if !disk.is_arriving() || !is_persistent {
                return Ok(());
            }
            disk.is_saved_early = true;
        }
        self.registry.save_first().await
    }

    /// Removes the entry of a disk that could not be added. If the disk was to adopt an orphan, the
    /// cache is an orphan again.
    pub(in crate::services) async fn drop_arriving(&self, name: &str) {
        let is_saved = {
            let mut inner = self.registry.inner();
            let Some(disk) = inner.disks.remove(name) else { return };
            if let Some(journal) = disk.cache().and_then(|spec| spec.journal) {
                inner.ended.forget(OwnerId(journal.owner.0));
            }
            disk.is_saved_early
        };
        if is_saved && let Err(error) = self.registry.save().await {
            tracing::error!("disk {name}: it could not be added, but the saved state still has it: {error}");
        }
    }

    /// Creates the entry of a disk that is not open yet. Takes its operation guard if `busy` names
    /// an operation.
    pub(in crate::services) fn enter(
        &self,
        wanted: DiskState,
        busy: Option<&'static str>,
    ) -> Result<Option<OperationGuard>> {
        let name = wanted.name.clone();
        let mut inner = self.registry.inner();
        inner.check_stays()?;
        inner.check_export_name(&name)?;
        wanted.exports.iter().try_for_each(|export| inner.check_export_name(&export.name))?;
        if let Some(disk) = inner.disk_with_file(&wanted.backing) {
            return Err(conflict!(
                "cannot add a disk on {}: hob serves the disk {disk} as this file",
                wanted.backing
            )
            .hint(format!("use the backing of {disk}, after removing that disk")));
        }
        if let Some(journal) = wanted.cache.as_ref().and_then(|spec| spec.journal)
            && inner.known_owners().contains(&OwnerId(journal.owner.0))
        {
            return Err(conflict!("the cache {} belongs to another disk", journal.owner));
        }
        if inner.disks.len() >= DISKS_MAX {
            return Err(conflict!("cannot add a disk: hob serves at most {DISKS_MAX} disks"));
        }
        let entry = DiskEntry { id: inner.new_disk_id(), wanted, busy, ..DiskEntry::default() };
        inner.disks.insert(name.clone(), entry);
        drop(inner);
        Ok(busy.map(|_| self.registry.guard_new_disk(&name)))
    }

    /// Converts the error of opening a disk's backing. If another disk of this daemon has the
    /// backing open, the error names that disk instead of "another process".
    async fn name_holder(&self, name: &str, error: &OpenError) -> ApiError {
        let (OpenError::InUse { path } | OpenError::InUseByQemu { path, .. }) = error else {
            return open_error(error);
        };
        let file = path.clone();
        let number =
            flash::blocking(move || std::fs::metadata(file).ok().and_then(|metadata| file_number(&metadata)));
        let number = number.await.ok().flatten();
        let inner = self.registry.inner();
        let has_it = |disk: &DiskEntry| {
            let info = disk.measure.as_ref().map(|measure| &measure.info);
            let is_file = |info: &BackingInfo| {
                number.is_some()
                    && (info.file == number || info.lower_files.iter().any(|(_, file)| Some(*file) == number))
            };
            info.is_some_and(|info| is_file(info) || std::path::Path::new(&disk.wanted.backing) == path)
        };
        let holder = inner.disks.iter().find(|(other, disk)| *other != name && has_it(disk));
        match holder {
            Some((holder, _)) => {
                conflict!("{} is in use: hob itself has it open for the disk {holder}", path.display()).hint(
                    format!("a disk can have only one writer; use the disk {holder}, or remove it first"),
                )
            }
            None => open_error(error),
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
        let (wanted, id, speed) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            (disk.wanted.clone(), disk.id, disk.opening_speed)
        };
        let turn = self.opening_turns.take(speed).await;
        let room = descriptors::room().await.map_err(ApiError::conflict)?;
        self.exports.clear_stale_file(name).await?;
        let options = self.open_options(name, &wanted).await?;
        let access = if wanted.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let (spec, said) = (wanted.backing.clone(), wanted.datastore.clone());
        let begun = Instant::now();
        let opened = flash::blocking(move || {
            let backing = Backing::open(&spec, access, &options)?;
            Ok::<_, OpenError>((backing, said.unwrap_or_else(|| datastore_of(&spec))))
        })
        .await?;
        drop(turn);
        self.registry.inner().disk_mut(name)?.opening_speed = OpeningSpeed::of(begun.elapsed());
        let (backing, datastore) = match opened {
            Ok(opened) => opened,
            Err(error) => return Err(self.name_holder(name, &error).await),
        };
        // The disk's descriptors are open now, so their reservation ends. A clone's parent, which
        // may be opened next, reserves its own.
        drop(room);
        let mut notes = Vec::new();
        let (backing, home) = self.share(&wanted, backing, &mut notes).await?;
        let info = backing.info().clone();
        self.check_device(name, &info).await?;
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            (disk.identity, disk.lock) = (info.identity, backing.lock());
            disk.constant = backing.constant().map(str::to_owned);
            let (gauge, witness, monitor) = (backing.size_probe(), backing.witness(), backing.monitor());
            disk.measure = Some(Measure { gauge, witness, monitor, info: info.clone() });
        }
        self.check_orphans(name, &info, when).await?;
        let (mut kept, mut recovering, mut backing) = (None, None, backing);
        if let Some(spec) = wanted.cache.as_ref().filter(|spec| spec.journal.is_some()) {
            let mut reading = self.begin_recovery(name, spec).await?;
            reading.later = self.later_change(name, info.times).await;
            reading.foreign = taken.and_then(|taken| taken.foreign.clone()).or(reading.foreign);
            reading.outdated_by = taken.and_then(|taken| taken.outdated_by.clone());
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
        let access = if info.read_only && access == Access::ReadWrite {
            notes.push("the backing is read-only, so the disk is read-only too".to_owned());
            Access::ReadOnly
        } else {
            access
        };
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
            datastore,
            is_in_memory: memory.is_some(),
        };
        let recovering = match self.prepare(added, taken, kept, recovering).await {
            Ok(recovering) => recovering,
            Err(error) => {
                let left = self.leave_shard(name, &shard, id).await;
                let error = self.close_incomplete(name, &shard, id, left, error).await;
                if self.needs_offline_drain(name) {
                    return Box::pin(self.open_owned(name, when, taken)).await;
                }
                return Err(error);
            }
        };
        if let Err(error) = self.exports.begin_recording(name).await {
            let left = self.leave_shard_with_bitmaps(name, &shard, id).await;
            return Err(self.close_incomplete(name, &shard, id, left, error).await);
        }
        if let Err(error) = self.save_arriving(name).await {
            let left = self.leave_shard_with_bitmaps(name, &shard, id).await;
            return Err(self.close_incomplete(name, &shard, id, left, error).await);
        }
        // From here on clients may write to the disk: the socket accepts a guest at once.
        let gateway = match &wanted.vhost_user {
            None => None,
            Some(path) => {
                let place = self.exports.socket_at(path);
                match open_gateway(name, place, id, &shard, &info, access, when).await {
                    Ok(gateway) => Some(gateway),
                    Err(error) => {
                        let left = self.leave_shard_with_bitmaps(name, &shard, id).await;
                        let error = failed!("cannot open the vhost-user socket {path}: {error}");
                        return Err(self.close_incomplete(name, &shard, id, left, error).await);
                    }
                }
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

    /// Returns the options with which a disk's backing is opened.
    pub(super) async fn open_options(&self, name: &str, wanted: &DiskState) -> Result<BackingOptions> {
        Ok(BackingOptions { locked: !wanted.unlocked, ..self.image_options(name).await? })
    }

    /// Prepares a disk that was just added to its shard, before clients may write to it. If this
    /// fails, the caller removes the disk from its shard.
    async fn prepare(
        &self,
        added: AddedDisk<'_>,
        taken: Option<&Taken>,
        kept: Option<Kept>,
        recovering: Option<(Early, Reading)>,
    ) -> Result<Option<RecoveringCache>> {
        let AddedDisk { wanted, id, shard, info, datastore, is_in_memory } = added;
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
            disk.size_bytes = info.size_bytes;
            disk.datastore = Some(datastore);
            // An entitlement of the time before is sent here. A later one is sent by its command.
            disk.wanted.qos.is_some()
        };
        if is_in_memory {
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

    /// Releases the memory and the segments of a disk that could not be opened completely, and
    /// returns the error of the opening. `left` is the result of removing the disk from its shard.
    /// Without the release, the segments of this opening's journal ring would still be in use at
    /// the next opening.
    async fn close_incomplete(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
        left: Result<Gone, ShardError>,
        error: ApiError,
    ) -> ApiError {
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

    /// Refuses a block device that is not the one that the disk had before. If the disk is opened
    /// for the first time, records its device. The kernel numbers devices differently after a
    /// restart of the host, and `/dev/dm-6` may then be the volume of another VM.
    async fn check_device(&self, name: &str, info: &BackingInfo) -> Result<()> {
        let is_new = {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            match (&disk.wanted.backing_device, info.device_name()) {
                (None, None) => return Ok(()),
                (Some(known), Some(device)) if known == device => return Ok(()),
                (Some(known), _) => {
                    return Err(conflict!("{} leads to another device than before: it was {known}, and is now {}",
                        disk.wanted.backing, info.identity_text
                    )
                    .hint(format!(
                        "make the path lead to the former device; hob then opens the disk. If the new device is intended, \
                         remove the disk and add it again ('hob disk remove {name}'), by a name that is permanent, such as \
                         a link in /dev/disk/by-id"
                    )));
                }
                (None, Some(device)) => {
                    disk.wanted.backing_device = Some(device.to_owned());
                    disk.busy == Some(ADDING)
                }
            }
        };
        // The entry of a new disk is saved when it has been added.
        if is_new { Ok(()) } else { self.registry.save().await }
    }

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

    pub(crate) async fn export_add(&self, disk: String, export: Export) -> Result<DiskChanged> {
        let service = self.clone();
        self.tasks
            .run("export add", disk.clone(), async move {
                service.exports.add(&disk, export).await?;
                service.observe.disk_changed(&disk, Vec::new())
            })
            .await
    }

    /// Removes an export and closes the connections of its clients.
    pub(crate) async fn export_remove(&self, disk: String, export: String) -> Result<DiskChanged> {
        let service = self.clone();
        self.tasks
            .run("export remove", disk.clone(), async move {
                service.exports.remove(&disk, export).await?;
                service.observe.disk_changed(&disk, Vec::new())
            })
            .await
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
pub(in crate::services) fn access_of(wanted: &DiskState, info: &BackingInfo) -> Access {
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

/// Returns the setting to share a clone's parent; `None` if sharing is not requested.
pub(in crate::services) fn share_of(share_parent: bool, cache: Option<Size>) -> Result<Option<ShareSpec>> {
    match (share_parent, cache) {
        (false, Some(_)) => Err(ApiError::invalid(
            "a cache size for the parent is only possible if the disk shares its parent",
        )
        .hint("also pass --share-parent, or set share_parent = true")),
        (false, None) => Ok(None),
        (true, cache) => Ok(Some(ShareSpec { cache, disk: None })),
    }
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
