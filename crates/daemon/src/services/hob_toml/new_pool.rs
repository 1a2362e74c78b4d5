//! Creates the pools of hob.toml.

use std::path::PathBuf;

use hob_control::{PoolCreate, Size};
use hob_storage::pool::{Overwrite, SEGMENT_BYTES_DEFAULT};

use super::super::flash::{Flash, Opened, are_pool_devices};
use super::super::pools::{check_overwritten, device_spec};
use super::HobToml;
use crate::api_error::ApiError;

impl HobToml {
    /// Creates a new pool of hob.toml, or opens the pool if it was created before.
    pub(in super::super) async fn start_new_pool(&self, pool: &PoolCreate) -> Result<(), ApiError> {
        let name = pool.name.clone();
        let paths: Vec<PathBuf> = pool.devices.iter().map(PathBuf::from).collect();
        let segment_bytes = pool.segment_size.map_or(SEGMENT_BYTES_DEFAULT, Size::bytes);
        if !pool.force && are_pool_devices(paths.clone()).await? {
            let opened = Flash::open(name, paths, None, segment_bytes).await?;
            return self.pools.take_pool_in(&pool.name, opened, &[], &[]).await;
        }
        let checked = if pool.force { check_overwritten(&pool.devices).await } else { Ok(()) };
        let created = match checked {
            Ok(()) => self.pools.create(pool.clone()).await,
            Err(error) => Err(error),
        };
        match created {
            Ok(_) => Ok(()),
            Err(error) => {
                let mut opened = Flash::open(name.clone(), paths, None, segment_bytes).await?;
                complete(pool, &mut opened).await?;
                if !opened.offline.is_empty() {
                    tracing::error!("pool {name} of hob.toml: cannot create it: {error}");
                }
                self.pools.take_pool_in(&pool.name, opened, &[], &[]).await
            }
        }
    }
}

/// Completes a pool whose creation was interrupted by a crash: its remaining devices are formatted.
/// This needs devices without other data, and a pool without caches and swap areas. Otherwise the
/// missing devices stay offline, because they may hold data.
async fn complete(pool: &PoolCreate, opened: &mut Opened) -> Result<(), ApiError> {
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
