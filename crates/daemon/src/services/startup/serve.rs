//! Opens the one disk of `hob serve`, which ends if the disk cannot be opened.

use std::path::Path;

use hob_control::{CacheEnable, DiskAdd, OnDirty, PoolCreate, Size};
use hob_storage::pool::{SEGMENT_BYTES_DEFAULT, SEGMENT_BYTES_MIN, device_bytes_for};

use super::super::disks::image_asked;
use super::super::flash::{Flash, Opened, are_pool_devices};
use super::super::pools::{AllocationRule, Known, journal_room};
use super::Startup;
use crate::api_error::{Result, conflict, failed, invalid};
use crate::cache_settings::{CacheContext, new_spec};
use crate::state::{CacheOwner, CacheSpec, DiskState, JournalSpec};
use crate::swap::{FileId, loops_over};

/// Name of the pool of `hob serve`.
const SERVE_POOL: &str = "default";

impl Startup {
    /// Opens the disk of `hob serve` with its cache. Nothing is undone after an error, because the
    /// caller then ends the process.
    pub(crate) async fn start_serving(
        &self,
        disk: DiskAdd,
        cache: Option<(String, CacheEnable)>,
        force: bool,
    ) -> Result<()> {
        let Some((device, enable)) = cache else {
            return self.serve_disk(disk, None).await.map(drop);
        };
        let name = disk.name.clone();
        // Reports errors before a pool file is created.
        let context = CacheContext { segment_bytes: SEGMENT_BYTES_MIN, devices: 1, peers: 0 };
        let (spec, _) = new_spec(enable.pool.clone(), enable.size, &enable.settings, context)?;
        self.registry.inner().check_memory(&name, &spec)?;
        let path = std::path::absolute(&device).map_err(|error| invalid!("{device}: {error}"))?;
        let is_pool = !force && are_pool_devices(vec![path.clone()]).await?;
        if is_pool {
            self.serve_pool(&path, &spec, force).await?;
            if let Some(kept) = self.kept_cache(&device, &spec).await? {
                self.serve_disk(disk, Some(kept)).await?;
                let notes = self.pools.fit_cache(&name, AllocationRule::Exactly).await?;
                notes.iter().for_each(|note| tracing::info!("{name}: {note}"));
                return Ok(());
            }
        }
        self.serve_disk(disk, None).await?;
        if !is_pool {
            self.serve_pool(&path, &spec, force).await?;
        }
        for note in self.pools.enable(&name, enable).await?.notes {
            tracing::info!("{name}: {note}");
        }
        Ok(())
    }

    async fn serve_disk(&self, disk: DiskAdd, cache: Option<CacheSpec>) -> Result<()> {
        let name = disk.name.clone();
        let changed = match cache {
            Some(_) => {
                let DiskAdd { name, backing, format, read_only, datastore, fuse, vhost_user, .. } = disk;
                let image = Some(image_asked(&backing, format.as_deref())?);
                let state = DiskState::new(name, backing, read_only);
                self.disks.add_state(DiskState { image, cache, datastore, fuse, vhost_user, ..state }).await?
            }
            None => self.disks.add(disk).await?,
        };
        changed.notes.iter().for_each(|note| tracing::warn!("{name}: {note}"));
        Ok(())
    }

    /// Returns the persistent cache that an earlier `hob serve` left in its pool, with its new
    /// settings.
    async fn kept_cache(&self, device: &str, spec: &CacheSpec) -> Result<Option<CacheSpec>> {
        let (owners, segment_bytes) = {
            let inner = self.registry.inner();
            let pool = inner.pool(SERVE_POOL)?;
            (pool.owners.clone(), pool.segment_bytes)
        };
        match (owners.as_slice(), &spec.journal) {
            ([], _) => Ok(None),
            ([(owner, _)], Some(_)) => {
                let size = Size(spec.size.bytes().next_multiple_of(segment_bytes));
                let owner = CacheOwner(owner.0);
                let journal = JournalSpec { owner, ring: 1, mode_unknown: true, ..JournalSpec::new() };
                Ok(Some(CacheSpec { size, journal: Some(journal), ..spec.clone() }))
            }
            _ => Err(conflict!("{device} has a persistent cache, which may have dirty data").hint(
                "serve the disk as before, with --persistent or a mode or preset that implies it, \
                or pass --force to discard the cache",
            )),
        }
    }

    /// Opens the pool of `hob serve`. A pool file that an earlier `hob serve` created is replaced
    /// if it is too small.
    async fn serve_pool(&self, path: &Path, spec: &CacheSpec, force: bool) -> Result<()> {
        let size = Size(spec.size.bytes());
        let is_file = std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file());
        if !force && are_pool_devices(vec![path.to_owned()]).await? {
            let opened = Flash::open(SERVE_POOL.to_owned(), vec![path.to_owned()], None, 0).await?;
            if let Some((path, reason)) = opened.offline.first() {
                return Err(failed!("{}: {reason}", path.display())
                    .hint("choose another pool file, or pass --force to discard its contents"));
            }
            let is_kept =
                !opened.flash.owners().await?.0.is_empty() || !opened.flash.swap_areas().await?.is_empty();
            if room(&opened) >= size.bytes() || !is_file || is_kept {
                return self.pools.take_pool_in(SERVE_POOL, opened, Known::default()).await;
            }
            tracing::info!("{} is too small for a cache of {size}; creating it again", path.display());
            drop(opened);
            remove_pool_file(path)?;
        } else if force && is_file {
            remove_pool_file(path)?;
        }
        let segment_bytes = match spec.journal {
            None => serve_segment_bytes(size.bytes()),
            // A ring takes whole segments, which should not be much larger than the ring.
            Some(_) => serve_segment_bytes(size.bytes().div_ceil(16)),
        };
        let size = Size(size.bytes() + journal_room(spec, segment_bytes));
        let create = PoolCreate {
            name: SERVE_POOL.to_owned(),
            devices: vec![path.to_string_lossy().into_owned()],
            size: Some(Size(device_bytes_for(size.bytes(), segment_bytes))),
            segment_size: Some(Size(segment_bytes)),
            force,
            flash_writes: None,
        };
        self.pools.create(create, OnDirty::Discard).await.map(|_| ())
    }
}

fn remove_pool_file(path: &Path) -> Result<()> {
    let failed = |error| failed!("cannot replace {}: {error}", path.display());
    let file = std::fs::File::open(path).map_err(failed)?;
    if let Some(device) = FileId::of(&file).and_then(loops_over).ok().and_then(|mut over| over.pop()) {
        let (path, device) = (path.display(), device.display());
        return Err(conflict!("{path} is on {device}, which is in use")
            .hint("'swapon' and 'losetup -l' show the use; end it first"));
    }
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => std::fs::remove_file(path).map_err(failed),
        Err(_) => Err(conflict!("{} is in use by another process", path.display())),
    }
}

fn room(opened: &Opened) -> u64 {
    opened.devices.iter().map(|device| device.segments * opened.segment_bytes).sum()
}

/// Returns the largest usual segment size that divides `cache_bytes`, so that little is lost to
/// rounding.
fn serve_segment_bytes(cache_bytes: u64) -> u64 {
    let fitting = 1u64.checked_shl(cache_bytes.trailing_zeros()).unwrap_or(SEGMENT_BYTES_DEFAULT);
    fitting.clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES_DEFAULT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_of_a_served_pool_fit_its_cache() {
        for (cache, segment) in [
            (8 << 30, 16 << 20),
            (64 << 20, 16 << 20),
            (10 << 20, 2 << 20),
            (3 << 20, 1 << 20),
            (1, 1 << 20),
            (5000, 1 << 20),
        ] {
            assert_eq!(serve_segment_bytes(cache), segment, "{cache}");
        }
    }
}
