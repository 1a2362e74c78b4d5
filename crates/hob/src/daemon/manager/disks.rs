//! Disks: opened, given to a shard, offered to clients, and taken back.

use std::sync::Arc;

use hob_control::{DiskAdd, DiskChanged, OnClients, OnDirty, Size, check_name};
use hob_engine::command::{Access, DiskConfig};
use hob_engine::io::Promote;
use hob_engine::units::{DatastoreId, DiskId};
use hob_frontends::vhost_user::block::Info;
use hob_nbd::ExportInfo;
use hob_storage::backing::{BackingInfo, OpenError};

use super::abandon::REMOVING;
use super::allocation::AllocationRule;
use super::api_error::{ApiError, ErrorKind};
use super::cluster::ClusterWait;
use super::datastores::datastore_of;
use super::dirty_rescue::Afterwards;
use super::image::image_asked;
use super::operation_guard::OperationGuard;
use super::recover::Source;
use super::recovering::RecoveringCache;
use super::resize::Measure;
use super::{DISKS_MAX, DiskEntry, DiskPhase, Inner, Manager, flash};
use crate::daemon::cluster::Taken;
use crate::daemon::descriptors;
use crate::daemon::hardware::Backing;
use crate::daemon::request_recorder::Counter;
use crate::daemon::shard_api::{Gone, ShardHandle};
use crate::daemon::state::{DiskState, ShareSpec};
use crate::daemon::vhost_user::{Behind, Failing, Gateway, SocketPlace, check_path};

/// When is a disk offered to clients?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Open {
    /// As soon as that is safe, even if its cache is still being recovered.
    AtOnce,
    /// When its cache is there.
    WithCache,
}

/// What is being done to a disk that has never been online.
pub(super) const ADDING: &str = "added";

/// Of a backing whose server has no flush command.
pub(super) const CANNOT_FLUSH: &str =
    "its backing has no flush: a flush of the guest does not make its writes durable there";

/// Longest specification of a backing, bytes.
pub(super) const BACKING_CHARS_MAX: usize = 4096;

impl Manager {
    /// Serves a disk.
    pub(crate) async fn disk_add(self: &Arc<Self>, add: DiskAdd) -> Result<DiskChanged, ApiError> {
        let manager = self.clone();
        self.change("disk add", add.name.clone(), async move { manager.add(add).await }).await
    }

    /// Stops serving a disk whose files nobody has open.
    pub(crate) async fn disk_remove(
        self: &Arc<Self>,
        disk: String,
        dirty: OnDirty,
    ) -> Result<DiskChanged, ApiError> {
        self.disk_remove_from(disk, dirty, OnClients::Refuse).await
    }

    /// Stops serving a disk. With what is dirty in it discarded, programs that have its file open may lose that; otherwise they keep it.
    pub(crate) async fn disk_remove_from(
        self: &Arc<Self>,
        disk: String,
        dirty: OnDirty,
        clients: OnClients,
    ) -> Result<DiskChanged, ApiError> {
        let (manager, name) = (self.clone(), disk.clone());
        let removal = async move { manager.remove(&disk, dirty, clients).await };
        self.change("disk remove", name, removal).await
    }

    /// As `disk_add`, however long it takes.
    pub(super) async fn add(self: &Arc<Self>, add: DiskAdd) -> Result<DiskChanged, ApiError> {
        let name = add.name.clone();
        check_name(&name)
            .map_err(|error| ApiError::invalid(format!("'{name}' cannot be a disk's name: {error}")))?;
        if add.backing.is_empty() || add.backing.len() > BACKING_CHARS_MAX {
            return Err(ApiError::invalid("a disk needs a backing: a path or an nbd:// URI"));
        }
        if let Some(datastore) = &add.datastore {
            check_name(datastore).map_err(|error| {
                ApiError::invalid(format!("'{datastore}' cannot be a datastore's name: {error}"))
            })?;
        }
        if let Some(path) = &add.fuse {
            self.check_file(path)?;
        }
        if let Some(path) = &add.vhost_user {
            check_path(path).map_err(ApiError::invalid)?;
        }
        let share_parent = share_of(add.share_parent, add.parent_cache)?;
        let image = Some(image_asked(&add.backing, add.format.as_deref())?);
        let wanted = DiskState {
            share_parent,
            image,
            backing_timeout: add.backing_timeout,
            datastore: add.datastore,
            fuse: add.fuse,
            vhost_user: add.vhost_user,
            ..DiskState::new(name.clone(), add.backing, add.read_only)
        };
        self.add_state(wanted).await
    }

    /// Serves a disk, with a persistent cache of earlier if it is to have one.
    pub(super) async fn add_state(self: &Arc<Self>, wanted: DiskState) -> Result<DiskChanged, ApiError> {
        let name = wanted.name.clone();
        let guard =
            self.enter(wanted, Some(ADDING))?.ok_or_else(|| ApiError::failed("the disk was not claimed"))?;
        let notes = match self.open_disk(&name, Open::WithCache).await {
            Ok((notes, _)) => notes,
            // It is added all the same, and comes when that host gives it back.
            Err(error) if self.is_served_elsewhere(&name) => {
                self.note_offline(&name, &error);
                self.inner().disks_removed.retain(|removed| *removed != name);
                return self.finish_disk(&name, guard, vec![format!("it is not served here: {error}")]).await;
            }
            Err(error) => {
                self.inner().disks.remove(&name);
                return Err(error);
            }
        };
        if let Err(error) = self.show_file(&name).await {
            self.take_back(&name).await;
            return Err(error);
        }
        self.inner().disks_removed.retain(|removed| *removed != name);
        self.finish_disk(&name, guard, notes).await
    }

    /// Takes a disk back that was added and cannot be all that was asked for.
    async fn take_back(self: &Arc<Self>, name: &str) {
        self.exports.remove_disk(name);
        if let Ok((shard, id)) = self.shard_of(name)
            && let Err(error) = shard.remove_disk(id).await
        {
            tracing::warn!("{name}: {error}");
        }
        self.forget_bitmaps(name).await;
        self.leave_disk(name).await;
        self.inner().disks.remove(name);
    }

    async fn remove(
        self: &Arc<Self>,
        name: &str,
        dirty: OnDirty,
        clients: OnClients,
    ) -> Result<DiskChanged, ApiError> {
        if let Some(changed) = self.remove_absent(name).await? {
            return Ok(changed);
        }
        self.check_no_clones(name)?;
        let guard = match dirty {
            OnDirty::Drain => self.guard_disk_for_command(name, REMOVING).await?,
            OnDirty::Discard => match self.guard_to_discard(name, REMOVING).await {
                // A removal that was under way has got on.
                Err(_) if self.inner().disk(name).is_err() => {
                    return Ok(DiskChanged { disk: None, notes: Vec::new() });
                }
                guard => guard?,
            },
        };
        match dirty {
            OnDirty::Drain => self.hide_file(name).await?,
            OnDirty::Discard => self.hide_file_soon(name, clients).await?,
        }
        let removed = self.remove_hidden(name, dirty, guard).await;
        if removed.is_err() && self.inner().disk(name).is_ok_and(|disk| disk.shard().is_ok()) {
            // It stays, and so does its file.
            let _ = self.show_file(name).await;
        }
        removed
    }

    async fn remove_hidden(
        self: &Arc<Self>,
        name: &str,
        dirty: OnDirty,
        guard: OperationGuard,
    ) -> Result<DiskChanged, ApiError> {
        let cache = self.inner().disk(name)?.cache().cloned();
        let is_online = self.inner().disk(name)?.shard().is_ok();
        let notes = match (dirty, is_online) {
            (OnDirty::Discard, true) => {
                let notes = self.take_abandoned(name).await?;
                // Programs that have it open get errors from now on.
                self.hide_file_at_end(name).await;
                notes
            }
            _ => self.take_with_its_data(name, dirty).await?,
        };
        self.leave_disk(name).await;
        {
            let mut inner = self.inner();
            inner.disks.remove(name);
            inner.caches_refused.remove(name);
            if inner.defined.contains(name) {
                inner.disks_removed.push(name.to_owned());
            }
        }
        drop(guard);
        tracing::info!("{name} is not served any more");
        self.save().await?;
        self.forget_bitmaps(name).await;
        if let Some(spec) = &cache {
            self.forget_owner(spec).await;
        }
        self.link_parents();
        self.drop_idle_parents();
        Ok(DiskChanged { disk: None, notes })
    }

    /// Takes a disk that is to be removed from its shard. What is dirty goes to the backing first; of a disk that is offline it may be given up.
    async fn take_with_its_data(
        self: &Arc<Self>,
        name: &str,
        dirty: OnDirty,
    ) -> Result<Vec<String>, ApiError> {
        let mut notes = Vec::new();
        let cache = self.inner().disk(name)?.cache().cloned();
        if dirty == OnDirty::Discard && cache.as_ref().is_some_and(|spec| spec.journal.is_some()) {
            notes.extend(self.discard(name, Afterwards::TakenAway).await?);
        }
        self.check_given_up(name)?;
        if cache.as_ref().is_some_and(|spec| spec.journal.is_some()) {
            // While it is still served: a persistent cache goes to the backing first.
            self.take_cache(name).await?;
        }
        self.exports.remove_disk(name);
        let (shard, id) = {
            let mut inner = self.inner();
            let disk = inner.disk_mut(name)?;
            let shard = match std::mem::replace(&mut disk.phase, DiskPhase::Removing) {
                DiskPhase::Online(shard) => Some(shard),
                _ => None,
            };
            (shard, disk.id)
        };
        if let Some(shard) = shard {
            let gone = self.leave_shard(name, &shard, id).await.unwrap_or_else(|error| {
                tracing::warn!("{name}: {error}");
                Gone::default()
            });
            let Gone { released, memory, .. } = gone;
            flash::blocking(move || drop(memory)).await?;
            let free = self.let_go(name, &released, |_| true);
            if let Some(spec) = &cache {
                self.give_back(&spec.pool, &free).await;
            }
        }
        Ok(notes)
    }

    /// Makes the entry of a disk that is not open yet, claimed if `busy` says for what.
    pub(super) fn enter(
        self: &Arc<Self>,
        wanted: DiskState,
        busy: Option<&'static str>,
    ) -> Result<Option<OperationGuard>, ApiError> {
        let name = wanted.name.clone();
        let mut inner = self.inner();
        inner.check_stays()?;
        inner.check_export_name(&name)?;
        wanted.exports.iter().try_for_each(|export| inner.check_export_name(&export.name))?;
        if inner.disks.len() >= DISKS_MAX {
            return Err(ApiError::conflict(format!("there are {DISKS_MAX} disks; more cannot be served")));
        }
        let entry = DiskEntry {
            id: inner.new_disk_id(),
            wanted,
            phase: DiskPhase::Offline("it is being opened".to_owned()),
            size_bytes: 0,
            datastore: None,
            has_cache: false,
            recovering: None,
            held: Vec::new(),
            apart: Vec::new(),
            leaves_peer: false,
            copy_said: false,
            ring: Vec::new(),
            ring_copies: 0,
            memory: None,
            identity: [0; 32],
            watch: super::drain::Watch::default(),
            retry_after: None,
            offline_reason: None,
            content_noted: false,
            cluster_wait: ClusterWait::No,
            drained_at_end: false,
            cache_reason: None,
            quality: super::quality::Quality::default(),
            files: std::collections::BTreeMap::new(),
            busy,
            measure: None,
            lock: None,
            constant: None,
            parent: None,
            recording: Counter::default(),
        };
        inner.disks.insert(name.clone(), entry);
        drop(inner);
        Ok(busy.map(|_| self.guard_new_disk(&name)))
    }

    /// Opens a disk's backing, gives it to a shard and offers it to clients. The caller has
    /// claimed the disk, which is offline. Where the cache is still on its way then, that goes on with
    /// [`Manager::await_cache`].
    pub(super) async fn open_owned(
        self: &Arc<Self>,
        name: &str,
        when: Open,
        taken: Option<&Taken>,
    ) -> Result<(Vec<String>, Option<RecoveringCache>), ApiError> {
        let (wanted, id) = {
            let inner = self.inner();
            let disk = inner.disk(name)?;
            (disk.wanted.clone(), disk.id)
        };
        descriptors::check_room().map_err(ApiError::conflict)?;
        self.clear_stale_file(name).await?;
        let options = self.image_options(name).await?;
        let access = if wanted.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let (spec, said) = (wanted.backing.clone(), wanted.datastore.clone());
        let (backing, datastore) = flash::blocking(move || {
            let backing = Backing::open(&spec, access, &options)?;
            Ok((backing, said.unwrap_or_else(|| datastore_of(&spec))))
        })
        .await?
        .map_err(|error| refuse(&error))?;
        let mut notes = Vec::new();
        let (backing, home) = self.share(&wanted, backing, &mut notes).await?;
        let info = backing.info().clone();
        {
            let mut inner = self.inner();
            let disk = inner.disk_mut(name)?;
            (disk.identity, disk.lock) = (info.identity, backing.lock());
            disk.constant = backing.constant().map(str::to_owned);
            let (gauge, witness, monitor) = (backing.size_probe(), backing.witness(), backing.monitor());
            disk.measure = Some(Measure { gauge, witness, monitor, info: info.clone() });
        }
        let (mut kept, mut recovering, mut backing) = (None, None, backing);
        if let Some(spec) = wanted.cache.as_ref().filter(|spec| spec.journal.is_some()) {
            let mut reading = self.begin_recovery(name, spec).await?;
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
            }
        }
        let access = if info.read_only && access == Access::ReadWrite {
            notes.push("the backing is read-only, and so is the disk".to_owned());
            Access::ReadOnly
        } else {
            access
        };
        let datastore_id = self.inner().datastore_id(&datastore, wanted.datastore.is_some())?;
        let shard = home.unwrap_or_else(|| self.shard_for(datastore_id));
        if !info.can_flush && access == Access::ReadWrite {
            notes.push(CANNOT_FLUSH.to_owned());
        }
        let config = DiskConfig { size_bytes: info.size_bytes, access, datastore: datastore_id };
        if let Some(taken) = taken {
            self.keep_generation(name, taken).await?;
        }
        self.forget_foreign(name).await?;
        shard.add_disk(id, config, backing).await?;
        shard.owe_failures(id, self.inner().disk(name)?.wanted.flush_failures_owed)?;
        if let Some(taken) = taken {
            shard.set_lease(id, taken.clock.clone())?;
        }
        if let Err(error) = self.open_bitmaps(name, &shard, &info).await {
            shard.remove_disk(id).await?;
            return Err(error);
        }
        {
            let mut inner = self.inner();
            let disk = inner.disk_mut(name)?;
            disk.phase = DiskPhase::Online(shard.clone());
            disk.memory = None;
            disk.offline_reason = None;
            disk.size_bytes = info.size_bytes;
            disk.datastore = Some(datastore);
        }
        self.link_parents();
        if wanted.qos.is_some() {
            self.apply_qos(name).await?;
        } else {
            self.apply_control_of(name);
        }
        let recovering = match recovering {
            Some((early, reading)) => Some(self.expect_cache(name, early, reading).await?),
            None => None,
        };
        if let Some(kept) = kept
            && let Err(error) = self.enable_kept(name, kept).await
        {
            let error = ApiError::from(error);
            // Without its dirty data the disk is not what its guest knows.
            shard.remove_disk(id).await?;
            self.inner().disk_mut(name)?.phase = DiskPhase::Offline(error.problem.error.clone());
            return Err(error);
        }
        // From here on the disk may be changed.
        if let Err(error) = self.begin_recording(name).await {
            self.take_from_shard(name, &shard, id).await?;
            self.inner().disk_mut(name)?.phase = DiskPhase::Offline(error.problem.error.clone());
            return Err(error);
        }
        let gateway = match &wanted.vhost_user {
            None => None,
            Some(path) => match open_gateway(name, &self.socket_at(path), id, &shard, &info, access, when) {
                Ok(gateway) => Some(gateway),
                Err(error) => {
                    self.take_from_shard(name, &shard, id).await?;
                    let error = ApiError::failed(format!("machines cannot come in at {path}: {error}"));
                    self.inner().disk_mut(name)?.phase = DiskPhase::Offline(error.problem.error.clone());
                    return Err(error);
                }
            },
        };
        tracing::info!("{name} is online; its backing is {}, {} bytes", info.description, info.size_bytes);
        if let Some(gateway) = gateway {
            self.exports.let_machines_in(name, name, gateway);
        }
        if access == Access::ReadWrite {
            // Writes that an earlier hob acknowledged may not be durable, and its guests may flush them here. A failure is the
            // next flush's of each client.
            let shard = shard.clone();
            tokio::spawn(async move { shard.flush(id).await });
        }
        if !wanted.for_clones {
            self.offer(name, id, shard, export_info(&info, access));
        }
        Ok((notes, recovering))
    }

    /// Opens a disk that was to be there from the start, or that was offline, with its cache.
    pub(super) async fn bring_online(self: &Arc<Self>, name: &str) {
        let Ok(guard) = self.guard_disk(name, "opened") else { return };
        if !matches!(
            self.inner().disk(name).map(|disk| matches!(disk.phase, DiskPhase::Offline(_))),
            Ok(true)
        ) {
            return;
        }
        let recovering = match self.open_disk(name, Open::AtOnce).await {
            Ok((notes, recovering)) => {
                notes.iter().for_each(|note| tracing::warn!("{name}: {note}"));
                if let Err(error) = self.show_file(name).await {
                    tracing::error!("{name} is no file: {error}; it is tried again every few seconds");
                }
                recovering
            }
            Err(error) => return self.note_offline(name, &error),
        };
        match recovering {
            // Whoever waits for the disk has it.
            Some(recovering) => {
                let (manager, name) = (self.clone(), name.to_owned());
                tokio::spawn(async move { manager.await_cache(&name, recovering, guard).await });
            }
            None => self.fit_opened(name).await,
        }
    }

    /// Gives a disk that has just been opened as much of its cache as can be had.
    pub(super) async fn fit_opened(self: &Arc<Self>, name: &str) {
        match self.fit_cache(name, AllocationRule::AsFarAsPossible).await {
            Ok(notes) => notes.iter().for_each(|note| tracing::warn!("{name}: {note}")),
            Err(error) => {
                tracing::warn!("{name} has no cache: {error}");
                if let Ok(disk) = self.inner().disk_mut(name) {
                    disk.cache_reason = Some(error.problem.error);
                }
            }
        }
    }

    /// Says so once for each new reason.
    pub(super) fn note_offline(&self, name: &str, error: &ApiError) {
        let reason = error.to_string();
        if let Ok(disk) = self.inner().disk_mut(name) {
            let news = disk.offline_reason.as_ref() != Some(&reason);
            if news && disk.cluster_wait == ClusterWait::Served {
                tracing::info!("{name} is not served here: {error}");
            } else if news {
                let again =
                    if disk.retry_after.is_some() { "" } else { "; it is tried again every few seconds" };
                tracing::error!("{name} is offline: {error}{again}");
            }
            // Recovery says in the meantime how far it is.
            disk.offline_reason = Some(reason.clone());
            disk.phase = DiskPhase::Offline(reason);
        }
    }

    /// Drops the operation guard, keeps what is wanted, and shows the disk.
    pub(super) async fn finish_disk(
        self: &Arc<Self>,
        name: &str,
        guard: OperationGuard,
        notes: Vec<String>,
    ) -> Result<DiskChanged, ApiError> {
        drop(guard);
        self.save().await?;
        self.disk_changed(name, notes)
    }

    pub(super) fn disk_changed(&self, name: &str, notes: Vec<String>) -> Result<DiskChanged, ApiError> {
        Ok(DiskChanged { disk: Some(self.disk(name)?), notes })
    }

    fn quietest_shard(&self, inner: &Inner) -> ShardHandle {
        let load = |shard: &ShardHandle| {
            let here = |phase: &DiskPhase| matches!(phase, DiskPhase::Online(other) if other.is_same(shard));
            inner.disks.values().filter(|disk| here(&disk.phase)).count()
        };
        self.shards.iter().min_by_key(|shard| load(shard)).expect("there is a shard").clone()
    }

    /// The shard for another disk of a datastore. Shares hold among the disks of a shard: those of a datastore that somebody
    /// named or set go where the first of them went.
    pub(super) fn shard_for(&self, datastore: DatastoreId) -> ShardHandle {
        let mut inner = self.inner();
        let quietest = self.quietest_shard(&inner);
        let store = &mut inner.datastores[usize::from(datastore.0)];
        if store.is_meant() { store.home.get_or_insert(quietest).clone() } else { quietest }
    }
}

impl Inner {
    /// Ids are small, as shards have tables of them.
    pub(super) fn new_disk_id(&self) -> DiskId {
        let disks = self.disks.values().map(|disk| disk.id);
        let taken: std::collections::BTreeSet<u32> = disks
            .chain(self.loan_disks.iter().chain(self.abandoned.keys()).copied())
            .map(|id| id.0)
            .collect();
        DiskId((0..).find(|id| !taken.contains(id)).expect("there are fewer disks than ids"))
    }
}

pub(super) fn open_gateway(
    name: &str,
    place: &SocketPlace,
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
    // Somebody waits for what was added by command; nobody watches a restart.
    let failing = match when {
        Open::WithCache => Failing::Refuse,
        Open::AtOnce => Failing::TryAgain,
    };
    let behind = Behind { disk, shard: shard.clone(), info, promote: Promote::Usual };
    Gateway::open(place, behind, failing)
}

/// May it be changed?
pub(super) fn access_of(wanted: &DiskState, info: &BackingInfo) -> Access {
    if wanted.read_only || info.read_only { Access::ReadOnly } else { Access::ReadWrite }
}

pub(super) fn export_info(info: &BackingInfo, access: Access) -> ExportInfo {
    ExportInfo {
        read_only: access == Access::ReadOnly,
        can_trim: info.can_discard,
        can_fast_zero: info.can_fast_zero,
        description: info.description.clone(),
        block_size_min: info.block_bytes_min,
        block_size_preferred: info.block_bytes_min.max(4096),
        ..ExportInfo::new(info.size_bytes)
    }
}

/// What was asked for about a clone's parent.
pub(super) fn share_of(share_parent: bool, cache: Option<Size>) -> Result<Option<ShareSpec>, ApiError> {
    match (share_parent, cache) {
        (false, Some(_)) => Err(ApiError::invalid("a cache for its parent is made where that is shared")
            .hint("say --share-parent too, or share_parent = true")),
        (false, None) => Ok(None),
        (true, cache) => Ok(Some(ShareSpec { cache, disk: None })),
    }
}

/// Which reaction storage's error asks for.
pub(super) fn refuse(error: &OpenError) -> ApiError {
    let kind = match error {
        OpenError::Spec { .. } | OpenError::System { .. } | OpenError::Unfit { .. } => ErrorKind::Invalid,
        OpenError::InUse { .. } | OpenError::InUseByQemu { .. } => ErrorKind::Conflict,
        OpenError::Connect { .. } | OpenError::MissingProgram { .. } | OpenError::Unresponsive { .. } => {
            ErrorKind::Failed
        }
    };
    ApiError { kind, problem: hob_control::Problem::new(error.to_string()) }
}
