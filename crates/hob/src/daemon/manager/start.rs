//! Start of the daemon: opening the pools and disks of the state file, of hob.toml, or of the `hob
//! serve` command line. In a daemon, an object that cannot be opened does not stop the others. `hob
//! serve` has only one disk and ends if it cannot be opened.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hob_control::{CacheEnable, DiskAdd, PoolCreate, Size};
use hob_storage::backing::Format;
use hob_storage::pool::{
    Overwrite, SEGMENT_BYTES_DEFAULT, SEGMENT_BYTES_MIN, device_bytes_for, is_segment_size,
};

use super::api_error::ApiError;
use super::disks::image_asked;
use super::flash::{Flash, Opened, are_pool_devices};
use super::pools::AllocationRule;
use super::pools::device_spec;
use super::pools::journal_room;
use super::settings::{CacheContext, new_spec};
use super::{Config, Manager};
use crate::daemon::config::DiskEntry;
use crate::daemon::state::{
    CacheOwner, CacheSpec, DiskState, ImageSpec, JournalSpec, PoolState, ShareSpec, State,
};
use crate::daemon::swap::{FileId, loops_over};

/// Maximum time that the listeners and the control API wait at the start for slow disks. Clients of
/// a slow disk wait longer.
const OPENING_MAX: Duration = Duration::from_secs(3);

/// Name of the pool of `hob serve`.
const SERVE_POOL: &str = "default";

impl Manager {
    /// Opens the pools and disks of a daemon.
    pub(crate) async fn start(self: &Arc<Self>, kept: State, config: &Config) -> Result<(), ApiError> {
        {
            let mut inner = self.inner();
            let names =
                config.pools.iter().map(|pool| &pool.name).chain(config.disks.iter().map(|disk| &disk.name));
            inner.defined = names.cloned().collect();
            // An entry that was deleted from the file and returns later is intended.
            let defined = |names: &[String]| {
                names.iter().filter(|name| inner.defined.contains(*name)).cloned().collect()
            };
            (inner.pools_removed, inner.disks_removed) =
                (defined(&kept.pools_removed), defined(&kept.disks_removed));
        }
        {
            let mut inner = self.inner();
            inner.definitions = kept.definitions.clone();
            inner.caches_refused = kept.caches_refused.clone();
            inner.gone = kept.gone.clone();
            inner.waited = kept.waited.iter().map(|disk| (disk.name.clone(), disk.clone())).collect();
        }
        self.tasks.restore(&kept.failed_tasks);
        self.qos.restore(&kept);
        self.swap.restore(&kept.swaps);
        self.qos.start(config)?;
        for pool in &kept.pools {
            self.start_pool(pool).await?;
        }
        for pool in &config.pools {
            let known = kept.pools.iter().any(|kept| kept.name == pool.name);
            if kept.pools_removed.contains(&pool.name) {
                tracing::info!(
                    "pool {} of hob.toml is not created, because it was removed by command",
                    pool.name
                );
            } else if !known {
                self.start_new_pool(pool).await?;
            }
        }
        let mut new = Vec::new();
        for disk in &config.disks {
            let known = kept.disks.iter().any(|kept| kept.name == disk.name);
            if kept.disks_removed.contains(&disk.name) {
                tracing::info!(
                    "disk {} of hob.toml is not added, because it was removed by command",
                    disk.name
                );
            } else if !known {
                new.push(self.first_state(disk));
            }
        }
        let mut opening = Vec::new();
        for disk in told_apart(kept.disks, new) {
            let name = disk.name.clone();
            let names: Vec<String> = disk.exports.iter().map(|export| export.name.clone()).collect();
            if !self.enter_kept(disk)? {
                continue;
            }
            let manager = self.clone();
            let is_opening =
                self.exports.table().begin_opening(&name, names.into_iter().chain([name.clone()]));
            opening.push(tokio::spawn(async move {
                let started = tokio::time::Instant::now();
                manager.disks.bring_online(&name).await;
                if started.elapsed() > OPENING_MAX {
                    tracing::info!(
                        "disk {name}: opening it took {} s, and its clients waited",
                        started.elapsed().as_secs()
                    );
                }
                drop(is_opening);
            }));
        }
        // A hung disk is listed as offline until it is open. Other disks do not wait for it, but
        // its own clients do.
        let deadline = tokio::time::Instant::now() + OPENING_MAX;
        for task in opening {
            let _ = tokio::time::timeout_at(deadline, task).await;
        }
        self.resume_migrations();
        self.apply_changed(config).await;
        // The saved state is intact and guests need their disks, so health reports the failure.
        if let Err(error) = self.save().await {
            tracing::error!("cannot save the state: {error}; the daemon continues with the state in memory");
        }
        Ok(())
    }

    /// Returns the state of a new disk from hob.toml, with its cache.
    fn first_state(&self, disk: &DiskEntry) -> DiskState {
        let DiskEntry {
            name,
            backing,
            format,
            read_only,
            cache,
            backing_timeout,
            datastore,
            exports,
            qos,
            fuse,
            vhost_user,
            ..
        } = disk.clone();
        let share_parent = disk.share_parent.then_some(ShareSpec { cache: disk.parent_cache, disk: None });
        let spec = cache.and_then(|cache| {
            let context = self.inner().context(&cache.pool);
            let spec = context.and_then(|context| new_spec(cache.pool, cache.size, &cache.settings, context));
            let spec = spec.and_then(|(spec, notes)| {
                self.inner().check_memory(&name, &spec)?;
                Ok((spec, notes))
            });
            match spec {
                Ok((spec, notes)) => {
                    notes.iter().for_each(|note| tracing::info!("{name}: {note}"));
                    Some(spec)
                }
                Err(error) => {
                    tracing::error!("disk {name} of hob.toml: cannot create its cache: {error}");
                    self.inner().caches_refused.insert(name.clone(), error.to_string());
                    None
                }
            }
        });
        let qos = qos.and_then(|qos| match self.qos.first_of(&qos) {
            Ok(qos) => Some(qos),
            Err(error) => {
                tracing::error!("disk {name} of hob.toml: using default shares, because its QoS settings are invalid: {error}");
                None
            }
        });
        // The file was checked already.
        let format = format.as_deref().and_then(Format::from_name);
        DiskState {
            share_parent,
            image: Some(ImageSpec::of(format)),
            cache: spec,
            backing_timeout,
            datastore,
            exports,
            qos,
            fuse,
            vhost_user,
            ..DiskState::new(name, backing, read_only)
        }
    }

    async fn start_pool(self: &Arc<Self>, pool: &PoolState) -> Result<(), ApiError> {
        // Earlier versions saved an invalid segment size for a pool of hob.toml that could not be
        // created.
        let segment_bytes = Some(pool.segment_size.bytes())
            .filter(|bytes| is_segment_size(*bytes))
            .unwrap_or(SEGMENT_BYTES_DEFAULT);
        for peer in &pool.peers {
            let asked = match self.remote_flash.open_socket(peer) {
                Ok(()) => self.remote_flash.ask_lease(peer).await.map(drop),
                Err(error) => Err(error),
            };
            if let Err(error) = asked {
                tracing::error!("pool {}: cannot open the remote flash at {}: {error}", pool.name, peer.host);
            }
        }
        let opened =
            Flash::open(pool.name.clone(), pool.devices.clone(), pool.uuid.clone(), segment_bytes).await?;
        self.pools.take_pool_in(&pool.name, opened, &pool.devices_out, &pool.peers).await
    }

    /// Creates a new pool of hob.toml, or opens it where it was created before.
    pub(super) async fn start_new_pool(self: &Arc<Self>, pool: &PoolCreate) -> Result<(), ApiError> {
        let name = pool.name.clone();
        let paths: Vec<PathBuf> = pool.devices.iter().map(PathBuf::from).collect();
        let segment_bytes = pool.segment_size.map_or(SEGMENT_BYTES_DEFAULT, Size::bytes);
        if !pool.force && are_pool_devices(paths.clone()).await? {
            let opened = Flash::open(name, paths, None, segment_bytes).await?;
            return self.pools.take_pool_in(&pool.name, opened, &[], &[]).await;
        }
        match self.pools.create(pool.clone()).await {
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

    /// Opens the disk of `hob serve`, completely or not at all.
    pub(crate) async fn start_serving(
        self: &Arc<Self>,
        disk: DiskAdd,
        cache: Option<(String, CacheEnable)>,
        force: bool,
    ) -> Result<(), ApiError> {
        let Some((device, enable)) = cache else {
            return self.serve_disk(disk, None).await.map(drop);
        };
        let name = disk.name.clone();
        // Reports errors before a pool file is created.
        let context = CacheContext { segment_bytes: SEGMENT_BYTES_MIN, devices: 1, peers: 0 };
        let (spec, _) = new_spec(enable.pool.clone(), enable.size, &enable.settings, context)?;
        self.inner().check_memory(&name, &spec)?;
        let path =
            std::path::absolute(&device).map_err(|error| ApiError::invalid(format!("{device}: {error}")))?;
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

    async fn serve_disk(self: &Arc<Self>, disk: DiskAdd, cache: Option<CacheSpec>) -> Result<(), ApiError> {
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
    async fn kept_cache(&self, device: &str, spec: &CacheSpec) -> Result<Option<CacheSpec>, ApiError> {
        let (owners, segment_bytes) = {
            let inner = self.inner();
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
            _ => {
                Err(ApiError::conflict(format!("{device} has a persistent cache, which may have dirty data"))
                    .hint(
                        "serve the disk as before, with --persistent or a mode or preset that implies it, \
                or pass --force to discard the cache",
                    ))
            }
        }
    }

    /// Opens the pool of `hob serve`. A pool file that an earlier `hob serve` created is replaced
    /// if it is too small.
    async fn serve_pool(
        self: &Arc<Self>,
        path: &Path,
        spec: &CacheSpec,
        force: bool,
    ) -> Result<(), ApiError> {
        let size = Size(spec.size.bytes());
        let is_file = std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file());
        if !force && are_pool_devices(vec![path.to_owned()]).await? {
            let opened = Flash::open(SERVE_POOL.to_owned(), vec![path.to_owned()], None, 0).await?;
            if let Some((path, reason)) = opened.offline.first() {
                return Err(ApiError::failed(format!("{}: {reason}", path.display()))
                    .hint("choose another pool file, or pass --force to discard its contents"));
            }
            let is_kept =
                !opened.flash.owners().await?.0.is_empty() || !opened.flash.swap_areas().await?.is_empty();
            if room(&opened) >= size.bytes() || !is_file || is_kept {
                return self.pools.take_pool_in(SERVE_POOL, opened, &[], &[]).await;
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
        };
        self.pools.create(create).await.map(|_| ())
    }
}

/// Resolves name conflicts between disks and exports. Names given by command take precedence over
/// hob.toml, disk names over export names, and earlier entries over new ones. Conflicting entries
/// are left out. The others are served.
pub(super) fn told_apart(kept: Vec<DiskState>, new: Vec<DiskState>) -> Vec<DiskState> {
    let own = |disk: &DiskState| (disk.name.clone(), disk.name.clone());
    let mut owners: BTreeMap<String, String> = kept.iter().map(own).collect();
    let mut disks: Vec<DiskState> = kept.into_iter().chain(new).collect();
    disks.retain_mut(|DiskState { name, exports, .. }| {
        let owner = owners.entry(name.clone()).or_insert_with(|| name.clone());
        if owner != name {
            tracing::error!(
                "disk {name} of hob.toml is not served, because disk {owner} has an export \
                '{name}'; rename the disk, or run 'hob export remove {owner} {name}' and start the \
                daemon again"
            );
            return false;
        }
        exports.retain(|export| {
            let of = &export.name;
            let owner = owners.entry(of.clone()).or_insert_with(|| name.clone());
            if owner != name {
                tracing::error!(
                    "{name} is served without its export '{of}', because disk {owner} has that \
                    name; add an export with another name by 'hob export add'"
                );
            }
            owner == name
        });
        true
    });
    disks
}

/// Completes a pool whose creation was interrupted by a crash: formats the pool's remaining
/// devices. The remaining devices must contain no other data, and the pool must have no caches and
/// swap areas. Otherwise the missing devices stay offline, because they may hold data.
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

fn remove_pool_file(path: &Path) -> Result<(), ApiError> {
    let failed = |error| ApiError::failed(format!("cannot replace {}: {error}", path.display()));
    let file = std::fs::File::open(path).map_err(failed)?;
    if let Some(device) = FileId::of(&file).and_then(loops_over).ok().and_then(|mut over| over.pop()) {
        let (path, device) = (path.display(), device.display());
        return Err(ApiError::conflict(format!("{path} is on {device}, which is in use"))
            .hint("'swapon' and 'losetup -l' show the use; end it first"));
    }
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => std::fs::remove_file(path).map_err(failed),
        Err(_) => Err(ApiError::conflict(format!("{} is in use by another process", path.display()))),
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
