//! Creates the pools of hob.toml.

use std::path::PathBuf;

use hob_control::{OnDirty, PoolCreate, Size};
use hob_storage::pool::{Overwrite, SEGMENT_BYTES_DEFAULT};

use super::super::flash::{Flash, Opened, are_pool_devices, check_devices_answer};
use super::super::pools::{Known, device_spec};
use super::HobToml;
use crate::api_error::Result;

impl HobToml {
    /// Creates a new pool of hob.toml, or opens the pool if it was created before.
    pub(in super::super) async fn start_new_pool(&self, pool: &PoolCreate) -> Result<()> {
        let name = pool.name.clone();
        let paths: Vec<PathBuf> = pool.devices.iter().map(PathBuf::from).collect();
        let segment_bytes = pool.segment_size.map_or(SEGMENT_BYTES_DEFAULT, Size::bytes);
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
                if !opened.offline.is_empty() {
                    tracing::error!("pool {name} of hob.toml: cannot create it: {error}");
                }
                self.take_in(pool, opened).await
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

/// Completes a pool whose creation was interrupted by a crash: its remaining devices are formatted.
/// hob does this only if these devices have no other data, and the pool has no caches and no swap
/// areas. Otherwise the remaining devices stay offline, because they may have data.
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
