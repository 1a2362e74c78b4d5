//! Creates the pools of hob.toml.

use std::path::PathBuf;

use hob_control::{OnDirty, PoolCreate};
use hob_storage::pool::Overwrite;

use super::super::flash::{Flash, Opened, are_pool_devices, check_devices_answer};
use super::super::pools::{Known, device_spec, segment_bytes};
use super::super::registry::PoolEntry;
use super::HobToml;
use crate::api_error::{Result, conflict};

impl HobToml {
    /// Creates a pool of hob.toml after the daemon's start. If hob could not create the pool at the
    /// start, tries again with the pool's present definition in hob.toml.
    pub(super) async fn create_pool(&self, pool: &PoolCreate) -> Result<()> {
        let name = &pool.name;
        let mut failed = None;
        if self.registry.inner().pools.get(name).is_some_and(|entry| !entry.was_opened()) {
            let guard = self.registry.guard_pool_for_command(name, "created").await?;
            // A device may have been opened while the guard was awaited.
            if self.registry.inner().pool(name)?.was_opened() {
                return Ok(());
            }
            failed = self.registry.inner().pools.remove(name);
            drop(guard);
        }
        let created = self.create_or_open(pool).await;
        match (&created, failed) {
            // Caches of the pool that were waiting for it.
            (Ok(()), Some(_)) => _ = self.pools.top_up(name).await,
            (Err(error), Some(mut entry)) => {
                entry.busy = None;
                entry.note_failed_creation(&error.problem.error);
                self.registry.inner().pools.entry(name.clone()).or_insert(entry);
            }
            (_, None) => {}
        }
        created
    }

    /// Opens the pool if it exists on its devices, and creates it otherwise.
    async fn create_or_open(&self, pool: &PoolCreate) -> Result<()> {
        let paths: Vec<PathBuf> = pool.devices.iter().map(PathBuf::from).collect();
        check_devices_answer(paths.clone()).await?;
        if !pool.force && are_pool_devices(paths.clone()).await? {
            let opened = Flash::open(pool.name.clone(), paths, None, segment_bytes(pool)).await?;
            if let Some((path, reason)) = opened.offline.first() {
                return Err(conflict!("{}: {reason}", path.display()));
            }
            return self.take_in(pool, opened).await;
        }
        self.pools.create(pool.clone(), OnDirty::Drain).await.map(drop)
    }

    /// Creates a new pool of hob.toml at the start, or opens the pool if it was created before. If
    /// both fail, the daemon keeps the pool without its devices, because the devices may have dirty
    /// data.
    pub(in super::super) async fn start_new_pool(&self, pool: &PoolCreate) -> Result<()> {
        let name = pool.name.clone();
        let paths: Vec<PathBuf> = pool.devices.iter().map(PathBuf::from).collect();
        let segment_bytes = segment_bytes(pool);
        if let Err(error) = check_devices_answer(paths.clone()).await {
            tracing::error!("pool {name} of hob.toml: {error}");
            let opened = Flash::open(name, paths, None, segment_bytes).await?;
            return self.take_in(pool, opened).await;
        }
        if !pool.force && are_pool_devices(paths.clone()).await? {
            let opened = Flash::open(name, paths, None, segment_bytes).await?;
            return self.take_in(pool, opened).await;
        }
        match self.pools.create(pool.clone(), OnDirty::Drain).await {
            Ok(_) => Ok(()),
            Err(error) => {
                let mut opened = Flash::open(name.clone(), paths, None, segment_bytes).await?;
                let was_whole = opened.offline.is_empty();
                complete(pool, &mut opened).await?;
                if !was_whole && opened.offline.is_empty() {
                    // An interrupted creation may have used further device ids.
                    return self.take_in_with(pool, opened, Known::default()).await;
                }
                let is_created = opened.offline.is_empty();
                self.take_in(pool, opened).await?;
                if !is_created {
                    tracing::error!("pool {name} of hob.toml: cannot create it: {error}");
                    self.registry.inner().pool_mut(&name)?.note_failed_creation(&error.problem.error);
                }
                Ok(())
            }
        }
    }

    /// Adds to the daemon a pool of hob.toml that the saved state does not have. If some of the
    /// pool's devices are missing, they may have dirty data from before the state was lost.
    async fn take_in(&self, pool: &PoolCreate, opened: Opened) -> Result<()> {
        let known = Known { device_ids: Some(0), ..Known::default() };
        self.take_in_with(pool, opened, known).await
    }

    async fn take_in_with(&self, pool: &PoolCreate, opened: Opened, known: Known<'_>) -> Result<()> {
        self.pools.take_pool_in(&pool.name, opened, known).await?;
        self.pools.restore_flash_writes(&pool.name, pool.flash_writes).await;
        let mut inner = self.registry.inner();
        let entry = inner.pool_mut(&pool.name)?;
        entry.is_unseen = !entry.is_whole();
        Ok(())
    }
}

impl PoolEntry {
    /// Returns true if a device of the pool was ever opened, so the pool exists.
    pub(in super::super) fn was_opened(&self) -> bool {
        self.uuid.is_some()
            || self.device_ids > 0
            || self.devices.iter().any(|device| device.ids.is_some() || device.peer.is_some())
    }

    /// Sets the reason why hob could not create the pool as the reason why each of its devices is
    /// missing.
    fn note_failed_creation(&mut self, why: &str) {
        if self.was_opened() {
            return;
        }
        for device in &mut self.devices {
            device.reason = Some(format!(
                "hob could not create the pool: {why}. Remove the cause, then 'hob config apply' creates it. If \
                 the pool exists already, restore its devices, which hob opens again by itself"
            ));
        }
    }
}

/// Formats the remaining devices of a pool whose creation was interrupted by a crash. hob does this
/// only if these devices have no other data, and the pool has no caches and no swap areas.
/// Otherwise the remaining devices stay offline, because they may have data.
async fn complete(pool: &PoolCreate, opened: &mut Opened) -> Result<()> {
    let flash = opened.flash.clone();
    let is_new =
        flash.owners().await?.0.is_empty() && flash.swap_areas().await.is_ok_and(|areas| areas.is_empty());
    if opened.devices.is_empty() || !is_new {
        return Ok(());
    }
    for (path, _) in std::mem::take(&mut opened.offline) {
        let spec = device_spec(path.to_string_lossy().into_owned(), pool.size);
        match flash.add_device(spec, Overwrite::Refuse).await {
            Ok((_, devices)) => {
                tracing::warn!(
                    "pool {}: its creation was interrupted; hob formats {} now",
                    pool.name,
                    path.display()
                );
                opened.devices = devices;
            }
            Err(error) => opened.offline.push((path, error.problem.error)),
        }
    }
    Ok(())
}
