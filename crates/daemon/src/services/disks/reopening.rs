//! Closes a disk and opens it again to change its access (read-only or read-write) or its
//! datastore. Neither can change while a disk is open: the access decides how the backing is opened
//! and locked, and the disks of a datastore share a shard.
//!
//! The disk is closed as at the daemon's end, so a persistent cache keeps its content, its dirty
//! data included. A disk that becomes read-only is drained first. A volatile cache starts empty.
//! NBD clients that connect while the disk is closed wait. If the disk cannot be opened with the
//! new settings, hob opens it with the previous ones.

use std::time::Duration;

use hob_control::{OnClients, Problem};
use hob_engine::command::Segment;
use hob_engine::units::DiskId;
use tokio::time::timeout;

use super::Disks;
use super::foreign_writer::wait_briefly;
use super::opening::{Open, access_of, open_gateway};
use super::preview::clients;
use crate::api_error::{ApiError, conflict};
use crate::exports::export_info;
use crate::services::flash;
use crate::services::pools::Watch;
use crate::services::registry::{DiskEntry, DiskPhase, Inner};
use crate::shard_api::{Gone, ShardHandle};
use crate::state::DiskState;

/// Maximum time for the flush of the backing before a disk is closed.
const FLUSH_MAX: Duration = Duration::from_secs(10);

/// Reason why a disk is offline while it is closed and opened again.
const REOPENING: &str = "its settings are being changed";

/// Settings that are fixed while a disk is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OpenSettings {
    pub(super) read_only: bool,
    /// Name of the datastore that an operator chose; `None` if hob chooses the datastore.
    pub(super) datastore: Option<String>,
}

impl OpenSettings {
    pub(super) fn of(wanted: &DiskState) -> OpenSettings {
        OpenSettings { read_only: wanted.read_only, datastore: wanted.datastore.clone() }
    }

    fn apply_to(&self, wanted: &mut DiskState) {
        wanted.read_only = self.read_only;
        wanted.datastore.clone_from(&self.datastore);
    }
}

impl Disks {
    /// Changes settings of a disk that cannot change while the disk is open. Fails if a client is
    /// connected. The caller holds the disk's operation guard, and saves the settings.
    pub(super) async fn reopen_with(
        &self,
        name: &str,
        wanted: &OpenSettings,
    ) -> Result<Vec<String>, ApiError> {
        let (before, store) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            (OpenSettings::of(&disk.wanted), disk.datastore.clone())
        };
        if before == *wanted {
            return Ok(Vec::new());
        }
        let becomes_read_only = wanted.read_only && !before.read_only;
        self.check_reopen(name, &before, wanted).await?;
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            if matches!(disk.phase, DiskPhase::Offline(_)) {
                wanted.apply_to(&mut disk.wanted);
                return Ok(vec![format!("{name} is offline; hob opens it with the new settings")]);
            }
        }
        let (shard, id) = self.registry.shard_of(name)?;
        self.exports.hide_file(name, OnClients::Refuse).await?;
        if let Err(error) = self.prepare_to_close(name, &shard, id, becomes_read_only).await {
            self.serve_again(name, &shard, id, becomes_read_only).await;
            return Err(error);
        }
        let names: Vec<String> = {
            let inner = self.registry.inner();
            let exports = inner.disk(name)?.wanted.exports.iter().map(|export| export.name.clone());
            exports.chain([name.to_owned()]).collect()
        };
        let opening = self.exports.table().begin_opening(name, names);
        self.exports.table().remove_disk(name).await;
        match self.exports.close_on_shard(name, &shard, id, REOPENING).await {
            Ok(gone) => self.release_closed(name, gone).await?,
            Err(error) => {
                // The shard still has the disk, for example because its journal cannot be closed.
                self.offer_again(name).await?;
                self.serve_again(name, &shard, id, becomes_read_only).await;
                return Err(error.into());
            }
        }
        wanted.apply_to(&mut self.registry.inner().disk_mut(name)?.wanted);
        let opened = self.open_again(name, &before).await;
        drop(opening);
        // The remaining disks of the former datastore may be on fewer shards now, so the shards'
        // parts of the datastore's limit change.
        store.into_iter().for_each(|store| self.qos.apply_control(&store));
        self.qos.drop_unused_datastores();
        opened
    }

    /// Refuses to close a disk and open it again with other settings if this is not possible now.
    /// Changes nothing.
    pub(super) async fn check_reopen(
        &self,
        name: &str,
        before: &OpenSettings,
        wanted: &OpenSettings,
    ) -> Result<(), ApiError> {
        let changes_access = before.read_only != wanted.read_only;
        if changes_access {
            self.exports.check_no_left_file(name, |_| true)?;
        }
        let in_cluster = self.peers.cluster().is_some();
        let silent = {
            let inner = self.registry.inner();
            inner.check_reopening(name, changes_access, in_cluster)?;
            let disk = inner.disk(name)?;
            if matches!(disk.phase, DiskPhase::Offline(_)) {
                return Ok(());
            }
            disk.shard()?;
            disk.silent_backing()
        };
        // A closed disk could not be opened again.
        if let Some(why) = silent {
            return Err(conflict!("{name}: {why}, and this change closes the disk and opens it again")
                .hint("repeat the change when the backing answers ('hob health')"));
        }
        self.check_idle(name).await
    }

    /// Flushes the backing of a writable disk before the disk is closed. If the disk becomes
    /// read-only, first drains its cache. Then checks that no client has connected in the meantime.
    async fn prepare_to_close(
        &self,
        name: &str,
        shard: &ShardHandle,
        id: DiskId,
        becomes_read_only: bool,
    ) -> Result<(), ApiError> {
        let (is_read_only, has_cache) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            (disk.wanted.read_only, disk.cache().is_some())
        };
        if becomes_read_only && has_cache {
            // Dirty data could not be written to a read-only backing.
            self.pools.clean_while_answering(name, shard, id).await?;
        }
        if !is_read_only {
            let flushed = timeout(FLUSH_MAX, shard.flush(id)).await.map_err(|_| {
                let seconds = FLUSH_MAX.as_secs();
                ApiError::conflict(format!("{name}: the backing was not flushed within {seconds} s"))
                    .hint("nothing was changed; check the backing ('hob health'), and repeat the change")
            })?;
            flushed?;
        }
        self.check_idle(name).await
    }

    /// Refuses to close a disk that clients use.
    async fn check_idle(&self, name: &str) -> Result<(), ApiError> {
        match self.known_users(name).await? {
            0 => Ok(()),
            users => Err(ApiError::conflict(format!(
                "{name} has {} connected, and this change closes the disk and opens it again",
                clients(users)
            ))
            .hint("stop the guest or disconnect the client, and repeat the change")),
        }
    }

    /// Makes a disk available to clients as before, after an attempt to close the disk has failed.
    async fn serve_again(&self, name: &str, shard: &ShardHandle, id: DiskId, is_drained: bool) {
        // The drain has switched the cache to write-through.
        if is_drained && let Err(error) = self.pools.tune(name, shard, id).await {
            tracing::warn!("disk {name}: {error}");
        }
        if let Err(error) = self.exports.show_file(name).await {
            tracing::error!("disk {name}: its file or block device is missing: {error}");
        }
    }

    /// Releases the memory and the flash segments that a closed disk had on its shard. A persistent
    /// cache keeps its segments, which the next opening finds on flash.
    pub(super) async fn release_closed(&self, name: &str, gone: Gone) -> Result<(), ApiError> {
        if let Some((pool, free)) = self.forget_closed(name, gone).await? {
            self.registry.give_back(&pool, &free).await;
        }
        Ok(())
    }

    /// Does the same as [`release_closed`](Self::release_closed), but does not wait long for a pool
    /// that is in use. The flash segments are then released later.
    pub(super) async fn release_closed_soon(&self, name: &str, gone: Gone) -> Result<(), ApiError> {
        if let Some((pool, free)) = self.forget_closed(name, gone).await? {
            let registry = self.registry.clone();
            wait_briefly(async move { registry.give_back(&pool, &free).await }).await;
        }
        Ok(())
    }

    /// Releases the memory that a closed disk had on its shard. Returns the flash segments that the
    /// caller must release, and their pool; `None` if the disk has no cache.
    async fn forget_closed(
        &self,
        name: &str,
        gone: Gone,
    ) -> Result<Option<(String, Vec<Segment>)>, ApiError> {
        let Gone { released, memory, .. } = gone;
        flash::blocking(move || drop(memory)).await?;
        let spec = self.registry.inner().disk(name)?.cache().cloned();
        let is_volatile = spec.as_ref().is_some_and(|spec| spec.journal.is_none());
        let free = self.pools.let_go(name, &released, |_| is_volatile);
        self.registry.inner().disk_mut(name)?.forget_shard();
        Ok(spec.map(|spec| (spec.pool, free)))
    }

    /// Opens a closed disk with its new settings. If that fails, opens the disk with the earlier
    /// settings `before`.
    async fn open_again(&self, name: &str, before: &OpenSettings) -> Result<Vec<String>, ApiError> {
        let error = match self.open_by_owner(name, Open::WithCache).await {
            Ok((notes, _)) => {
                self.complete_opening(name).await;
                return Ok(notes);
            }
            Err(error) => error,
        };
        before.apply_to(&mut self.registry.inner().disk_mut(name)?.wanted);
        match self.open_by_owner(name, Open::WithCache).await {
            Ok((notes, _)) => {
                notes.iter().for_each(|note| tracing::warn!("{name}: {note}"));
                self.complete_opening(name).await;
            }
            Err(again) => self.note_offline(name, &again),
        }
        let what =
            format!("{name} keeps its settings, because it cannot be opened with the new ones: {error}");
        Err(ApiError { kind: error.kind, problem: Problem::new(what) })
    }

    async fn complete_opening(&self, name: &str) {
        if let Err(error) = self.exports.show_file(name).await {
            tracing::error!("disk {name}: its file or block device is missing: {error}");
        }
        self.fit_opened(name).await;
    }

    /// Offers an open disk to clients again.
    pub(in crate::services) async fn offer_again(&self, name: &str) -> Result<(), ApiError> {
        let (shard, id) = self.registry.shard_of(name)?;
        let (info, access, vhost_user, timeout) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let info = disk.measure.as_ref().map(|measure| measure.info.clone());
            let info = info.ok_or_else(|| ApiError::failed(format!("the size of {name} is unknown")))?;
            let wanted = &disk.wanted;
            (info.clone(), access_of(wanted, &info), wanted.vhost_user.clone(), wanted.backing_timeout)
        };
        // The shard had shortened this disk's maximum wait for its backing, because the disk was
        // about to leave the shard.
        shard.set_wait_max(id, self.wait_max_of(timeout));
        if let Some(path) = &vhost_user {
            let place = self.exports.socket_at(path);
            match open_gateway(name, place, id, &shard, &info, access, Open::AtOnce).await {
                Ok(gateway) => self.exports.table().listen_vhost_user(name, name, gateway),
                Err(error) => {
                    tracing::error!("disk {name}: cannot open the vhost-user socket {path}: {error}");
                }
            }
        }
        self.exports.offer(name, id, shard, export_info(&info, access)).await;
        Ok(())
    }
}

impl DiskEntry {
    /// Resets the fields of the entry that described the disk on its shard, after the disk was
    /// closed.
    fn forget_shard(&mut self) {
        (self.has_cache, self.memory) = (false, None);
        [&mut self.held, &mut self.apart, &mut self.ring].into_iter().for_each(Vec::clear);
        (self.ring_copies, self.cache_reason, self.watch) = (0, None, Watch::default());
    }
}

impl Inner {
    /// Refuses to close a disk and open it again if the disk must stay open. In a cluster, also
    /// refuses to change the disk's access.
    fn check_reopening(&self, name: &str, changes_access: bool, in_cluster: bool) -> Result<(), ApiError> {
        let disk = self.disk(name)?;
        let clones = self.clones_of(name);
        if disk.wanted.for_clones || !clones.is_empty() {
            return Err(ApiError::conflict(format!(
                "{name} serves a parent snapshot and stays open for its clones: {}",
                clones.join(", ")
            ))
            .hint("remove the clones first"));
        }
        if disk.wanted.unlocked {
            return Err(ApiError::conflict(format!("a running QEMU has the backing of {name} open"))
                .hint("complete 'hob attach', and repeat the change"));
        }
        if changes_access && in_cluster {
            return Err(ApiError::conflict(format!(
                "{name}: hosts of a cluster own disks that guests may change, and no read-only disks, so the access \
                 cannot change"
            ))
            .hint(format!("'hob disk remove {name}', and add the disk again")));
        }
        let may_be_dirty = disk.cache().and_then(|spec| spec.journal).is_some_and(|journal| journal.ring > 0);
        if changes_access && may_be_dirty && matches!(disk.phase, DiskPhase::Offline(_)) {
            return Err(ApiError::conflict(format!("{name} is offline, and its cache may have dirty data"))
                .hint(format!(
                    "'hob disk show {name}' shows the reason; repeat the change when the disk is online"
                )));
        }
        Ok(())
    }
}
