//! The lock of a disk's backing, taken and released while the disk is served (docs/decisions/0054).
//!
//! `hob attach` inserts a disk below a running QEMU. Until QEMU closes the image, hob has the image
//! open without a lock and without a cache, and passes all requests to the image.

use std::path::PathBuf;

use super::Disks;
use crate::api_error::{ApiError, Result, conflict, failed};
use crate::services::flash::blocking;

impl Disks {
    /// Locks the backing of a served disk. Writes of the program that had the backing before are
    /// durable when this returns.
    ///
    /// # Errors
    /// Returns a conflict if another program still has the backing.
    pub(super) async fn lock_backing(&self, name: &str) -> Result<()> {
        let (shard, id) = self.registry.shard_of(name)?;
        let lock = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            if !disk.wanted.unlocked {
                return Ok(());
            }
            disk.lock.clone()
        };
        let lock = lock.ok_or_else(|| {
            conflict!("hob has not locked the backing of {name}, so there is no lock to release")
        })?;
        let taken = lock.clone();
        blocking(move || taken.take()).await?.map_err(|error| {
            conflict!("{name}: another program has the backing open: {error}")
                .hint("'fuser' shows which program has the file open")
        })?;
        // The lock is recorded last. If the daemon is killed before that, the next daemon opens the
        // disk without a lock again.
        let recorded = match shard.flush(id).await {
            Ok(()) => {
                self.registry.inner().disk_mut(name)?.wanted.unlocked = false;
                self.registry.save_first().await
            }
            Err(error) => Err(error.into()),
        };
        if let Err(reason) = recorded {
            self.registry.inner().disk_mut(name)?.wanted.unlocked = true;
            blocking(move || lock.release()).await?.map_err(|error| ApiError::failed(error.to_string()))?;
            return Err(reason);
        }
        tracing::info!("disk {name}: its backing is now locked");
        Ok(())
    }

    /// Releases the lock of a served disk's backing, after making every acknowledged write durable.
    ///
    /// # Errors
    /// Returns a conflict if the disk has a cache. Returns another error if the backing's path now
    /// leads to another file, because the program that asks for the release would open that file.
    pub(super) async fn unlock_backing(&self, name: &str) -> Result<()> {
        let (shard, id) = self.registry.shard_of(name)?;
        let (lock, path) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            if disk.cache().is_some() {
                return Err(conflict!("{name} has a cache, so its backing stays locked")
                    .hint(format!("'hob cache disable {name}' first")));
            }
            (disk.lock.clone(), PathBuf::from(&disk.wanted.backing))
        };
        let lock = lock.ok_or_else(|| conflict!("the backing of {name} has no lock"))?;
        let (named, at) = (lock.clone(), path.clone());
        let is_at = blocking(move || named.is_at(&at)).await?;
        let reason = match is_at {
            Ok(true) => None,
            Ok(false) => Some("another file is there now".to_owned()),
            Err(error) => Some(error.to_string()),
        };
        if let Some(reason) = reason {
            let path = path.display();
            return Err(failed!("{name}: the backing that hob has open is not at {path} any more: {reason}")
                .hint("move the file back, and repeat the command"));
        }
        shard.flush(id).await?;
        self.registry.inner().disk_mut(name)?.wanted.unlocked = true;
        if let Err(reason) = self.registry.save_first().await {
            self.registry.inner().disk_mut(name)?.wanted.unlocked = false;
            return Err(reason);
        }
        blocking(move || lock.release()).await?.map_err(|error| ApiError::failed(error.to_string()))?;
        tracing::info!("disk {name}: the lock of its backing is released");
        Ok(())
    }
}
