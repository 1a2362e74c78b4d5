//! Executes the actions that the migration state machine requests on the source host. The state
//! machine also waits for actions without a time limit, such as the drain of dirty data.

use std::sync::Arc;
use std::time::Duration;

use hob_control::{Arrival, ArrivingCache, ArrivingSettings, CacheSettings, MigrationStart};
use hob_engine::command::{CacheChange, Mode, Role};
use hob_engine::granularity::Fill;
use hob_engine::migration::SourceAct;
use hob_engine::preset::Verify;
use hob_engine::regions::Regions;

use super::super::flash::blocking;
use super::super::registry::{DiskEntry, DiskPhase};
use super::Migrations;
use super::orders::departed;
use super::source::Leaving;
use crate::api_error::{ApiError, Result, failed};
use crate::background::spawn;
use crate::cache_settings::whole_settings;
use crate::shard_api::Gone;
use crate::state::CacheSpec;

/// Pause between two attempts to stop a drain that may not have started.
const STOP_EVERY: Duration = Duration::from_millis(100);

impl Leaving {
    /// Executes an action. Returns its result, and the changed regions if they were requested.
    pub(super) async fn act(&self, act: SourceAct) -> (Result<(), String>, Option<Box<Regions>>) {
        let name = &self.name;
        let mut changes = None;
        let result = match act {
            SourceAct::Record(record) => {
                let kept = self.migrations.keep_record(name, record).await;
                self.shared.recorded.notify_one();
                kept
            }
            SourceAct::Prepare => self.prepare().await,
            SourceAct::TakeChanges => self.take_changes().await.map(|taken| changes = taken),
            SourceAct::Freeze => self.role(Role::Frozen).await,
            SourceAct::Settle => self.settle().await,
            SourceAct::Thaw => self.role(Role::Here).await,
            SourceAct::Leave => self.leave().await,
            SourceAct::Restore => self.restore().await,
            SourceAct::GiveUp => self.migrations.give_cache_up(name, &self.plan.to).await,
        };
        (result.map_err(|error| error.to_string()), changes)
    }

    async fn role(&self, role: Role) -> Result<()> {
        let (shard, id) = self.migrations.registry.shard_of(&self.name)?;
        Ok(shard.own(id, role).await?)
    }

    async fn settle(&self) -> Result<()> {
        let (shard, id) = self.migrations.registry.shard_of(&self.name)?;
        Ok(shard.settle(id).await?)
    }

    async fn take_changes(&self) -> Result<Option<Box<Regions>>> {
        let (shard, id) = self.migrations.registry.shard_of(&self.name)?;
        Ok(shard.take_changed(id).await?)
    }

    /// Ends write-back and drains the dirty data.
    async fn prepare(&self) -> Result<()> {
        let (migrations, name) = (&self.migrations, &self.name);
        let (shard, id) = migrations.registry.shard_of(name)?;
        let before = migrations.registry.inner().disk(name)?.cache().cloned();
        if let Some(before) = before.filter(|spec| spec.mode == Mode::WriteBack) {
            if let Err(error) = migrations.pools.clean(name, &shard, id).await {
                migrations.pools.tune(name, &shard, id).await?;
                return Err(error);
            }
            // From here on the state file says that the cache has no dirty data, and records its
            // earlier mode.
            migrations.set_mode(name, Mode::WriteThrough)?;
            migrations.keep_spec(name, |spec| spec.mode_due = Some(before.mode.to_string())).await?;
            migrations.pools.tune(name, &shard, id).await?;
        }
        self.shared.facts().drained = true;
        migrations.unmark_drained(name);
        shard.watch(id, true).await?;
        let stats = shard.stats(id).await?;
        self.shared.facts().valid = stats.sectors_valid * hob_engine::units::SECTOR_BYTES;
        Ok(())
    }

    async fn restore(&self) -> Result<()> {
        let (migrations, name) = (&self.migrations, &self.name);
        // The order matters: first the cache no longer counts as clean, then etcd is updated, then
        // write-back starts.
        self.shared.facts().drained = false;
        let (shard, id) = migrations.registry.shard_of(name)?;
        shard.watch(id, false).await?;
        if migrations.mode_due(name)?.is_some() {
            migrations.ownership.mark_kept(name).await?;
        }
        migrations.restore_mode(name).await
    }

    /// Stops a drain that is in progress or about to start.
    pub(super) fn stop_draining(self: Arc<Self>) {
        spawn(async move {
            while self.shared.facts().state == hob_control::MigrationState::Preparing {
                let Ok((shard, id)) = self.migrations.registry.shard_of(&self.name) else { return };
                let _ = shard.change_cache(id, CacheChange::StopDrain).await;
                tokio::time::sleep(STOP_EVERY).await;
            }
        });
    }

    /// Stops serving guests, and releases the backing so that the destination can open it.
    async fn leave(&self) -> Result<()> {
        let (migrations, name) = (&self.migrations, &self.name);
        let (shard, id) = migrations.registry.shard_of(name)?;
        shard.own(id, Role::Away).await?;
        migrations.exports.table().remove_disk(name).await;
        let lock = migrations.registry.inner().disk(name)?.lock.clone();
        if let Some(lock) = lock {
            blocking(move || lock.release())
                .await?
                .map_err(|error| failed!("cannot release the lock of the backing: {error}"))?;
        }
        migrations.ownership.give_back_departed(name);
        Ok(())
    }

    /// Returns the disk settings for the destination, encoded as JSON.
    pub(super) fn arrival(&self) -> Result<Vec<u8>> {
        let arrival = self.migrations.arrival(&self.name, &self.plan)?;
        serde_json::to_vec(&arrival).map_err(|error| ApiError::failed(error.to_string()))
    }
}

impl Migrations {
    /// Records in etcd that a disk was drained for its migration. If this host then fails, other
    /// hosts may acquire the disk. If etcd does not answer, a later check repeats the request.
    fn unmark_drained(self: &Arc<Self>, name: &str) {
        let (migrations, name) = (self.clone(), name.to_owned());
        spawn(async move {
            let is_drained = || migrations.is_drained_to_leave(&name);
            migrations.ownership.unmark_if_clean(&name, is_drained).await;
        });
    }

    /// Returns the settings with which the destination of a migration adds the disk: backing,
    /// cache, exports, limits.
    pub(in super::super) fn arrival(&self, name: &str, plan: &MigrationStart) -> Result<Arrival> {
        let qos = self.qos.rules_of(name);
        let inner = self.registry.inner();
        let disk = inner.disk(name)?;
        Ok(Arrival {
            from: host_name(),
            backing: plan.backing.clone().unwrap_or_else(|| disk.wanted.backing.clone()),
            format: disk.wanted.format_to_say(plan.backing.as_deref()),
            backing_timeout: disk.wanted.backing_timeout,
            stripe: disk.wanted.stripe,
            size_bytes: disk.size_bytes,
            read_only: disk.wanted.read_only,
            mode: plan.cache,
            cache: disk.cache().map(|spec| arriving(spec, disk, plan.pool.clone())),
            exports: disk.wanted.exports.iter().map(hob_control::Export::elsewhere).collect(),
            qos,
            datastore: disk.wanted.datastore.clone(),
            vhost_user: plan.vhost_user.clone(),
            fuse: plan.fuse.clone(),
            cluster: self.ownership.cluster_identity(),
            flush_failures_owed: disk.wanted.flush_failures_owed,
        })
    }
}

fn arriving(spec: &CacheSpec, disk: &DiskEntry, pool: Option<String>) -> ArrivingCache {
    let mode_due = disk.wanted.migration.as_ref().and_then(|spec| spec.mode_due.clone());
    // Earlier versions of hob do not know the fields `fill`, `verify` and `shared`.
    let settings = CacheSettings {
        mode: Some(mode_due.unwrap_or_else(|| spec.mode.to_string())),
        fill: (spec.fill != Fill::default()).then(|| spec.fill.to_string()),
        verify: (spec.verify != Verify::default()).then(|| spec.verify.to_string()),
        shared: spec.shared.map(|_| true),
        ..whole_settings(spec)
    };
    let like_pool = spec.pool.clone();
    ArrivingCache { pool, like_pool, size: spec.size, settings: ArrivingSettings(settings) }
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

impl Migrations {
    /// Changes the mode of a cache, in memory only.
    pub(super) fn set_mode(&self, name: &str, mode: Mode) -> Result<()> {
        let mut inner = self.registry.inner();
        if let Some(spec) = inner.disk_mut(name)?.wanted.cache.as_mut() {
            spec.mode = mode;
        }
        Ok(())
    }

    /// Returns the mode that a cache gets after the migration, if it differs from the current mode.
    fn mode_due(&self, name: &str) -> Result<Option<String>> {
        let inner = self.registry.inner();
        Ok(inner.disk(name)?.wanted.migration.as_ref().and_then(|spec| spec.mode_due.clone()))
    }

    /// Gives a cache its mode from before the migration.
    pub(super) async fn restore_mode(self: &Arc<Self>, name: &str) -> Result<()> {
        let Some(due) = self.mode_due(name)? else { return Ok(()) };
        let mode = due.parse::<Mode>().map_err(|error| ApiError::failed(error.to_string()))?;
        self.set_mode(name, mode)?;
        self.keep_spec(name, |spec| spec.mode_due = None).await?;
        let (shard, id) = self.registry.shard_of(name)?;
        self.pools.tune(name, &shard, id).await
    }

    /// Removes the cache and all other resources of a disk that migrated to another host. A
    /// tombstone stays.
    pub(super) async fn give_cache_up(self: &Arc<Self>, name: &str, to: &str) -> Result<()> {
        self.exports.table().remove_disk(name).await;
        self.exports.hide_file_at_end(name).await;
        self.exports.drop_device(name).await;
        if let Ok((shard, id)) = self.registry.shard_of(name) {
            if let Err(error) = self.pools.take_cache(name).await {
                tracing::warn!("disk {name}: cannot remove its cache cleanly: {error}");
            }
            let gone = shard.remove_disk(id).await.unwrap_or_else(|error| {
                tracing::warn!("{name}: {error}");
                Gone::default()
            });
            self.free_flash_of(name, gone).await?;
        }
        self.bury(name, departed(to, true)).await
    }

    /// Frees the memory and the segments of a disk that its shard has removed.
    pub(super) async fn free_flash_of(&self, name: &str, gone: Gone) -> Result<()> {
        let Gone { released, memory, .. } = gone;
        blocking(move || drop(memory)).await?;
        let free = self.pools.let_go(name, &released, |_| true);
        let pool = self.registry.inner().disk(name)?.cache().map(|spec| spec.pool.clone());
        if let Some(pool) = pool {
            self.registry.give_back(&pool, &free).await;
        }
        Ok(())
    }

    /// Frees the segments of a migrated disk, and records why this host does not serve it.
    pub(super) async fn bury(self: &Arc<Self>, name: &str, why: String) -> Result<()> {
        let spec = {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            disk.phase = DiskPhase::Away(why);
            disk.has_cache = false;
            disk.lock = None;
            disk.cache_reason = None;
            disk.cache().cloned()
        };
        if let Some(spec) = spec {
            self.pools.forget_owner(&spec).await;
        }
        Ok(())
    }
}
