//! Preview of a pool change: its effects on caches and dirty data. The module also has the check
//! that prevents an accidental loss of dirty data.

use std::path::Path;
use std::time::Duration;

use hob_control::{PlannedPoolChange, Preview, Size};
use hob_engine::command::Segment;
use hob_engine::units::DeviceId;
use hob_storage::pool::OwnerId;

use super::Disks;
use crate::api_error::{ApiError, Result, conflict, not_found};
use crate::services::pools::{no_device, overwritten, read_journal};
use crate::services::registry::{DiskEntry, DiskPhase, Inner};
use crate::state::CacheOwner;

/// Maximum time for reading the journal of a cache without a disk, to count its dirty data.
const READ_MAX: Duration = Duration::from_secs(10);

impl Disks {
    /// Returns the effects of a pool change without making the change.
    pub(crate) async fn pool_preview(&self, pool: &str, change: &PlannedPoolChange) -> Result<Preview> {
        match change {
            PlannedPoolChange::UseDevices { paths } => Ok(overwritten(paths).await),
            PlannedPoolChange::Create { create } => {
                self.registry.inner().check_new_pool(create)?;
                Ok(if create.force { overwritten(&create.devices).await } else { Preview::default() })
            }
            PlannedPoolChange::AddDevice { add } if add.peer.is_some() => {
                self.registry.inner().pool(pool)?;
                Ok(Preview::default())
            }
            PlannedPoolChange::AddDevice { add } => {
                self.registry.inner().check_new_device(pool, Path::new(&add.path))?;
                let paths = std::slice::from_ref(&add.path);
                Ok(if add.force { overwritten(paths).await } else { Preview::default() })
            }
            PlannedPoolChange::RemoveDevice { path } => {
                self.registry.inner().without_device(pool, Path::new(path))
            }
            PlannedPoolChange::DiscardOrphan { owner } => self.without_orphan(pool, owner).await,
        }
    }

    /// Refuses a pool change that loses dirty data, unless the caller allows the loss.
    pub(crate) async fn check_pool_discard(
        &self,
        pool: &str,
        change: &PlannedPoolChange,
        may_lose: bool,
    ) -> Result<()> {
        if may_lose {
            return Ok(());
        }
        let preview = self.pool_preview(pool, change).await?;
        if !preview.loses_dirty() {
            return Ok(());
        }
        let command = match change {
            PlannedPoolChange::UseDevices { .. } | PlannedPoolChange::Create { .. } => {
                format!("'hob pool create {pool}")
            }
            PlannedPoolChange::AddDevice { add } => format!("'hob pool add-device {pool} {}", add.path),
            PlannedPoolChange::RemoveDevice { path } => format!("'hob pool remove-device {pool} {path}"),
            PlannedPoolChange::DiscardOrphan { owner } => format!("'hob pool discard-orphan {pool} {owner}"),
        };
        Err(ApiError::conflict(preview.effects.join("; ")).hint(format!(
            "nothing was changed; {command} --yes' discards the data (API: discard_dirty=true)"
        )))
    }

    async fn without_orphan(&self, pool: &str, owner: &str) -> Result<Preview> {
        let (owner, size, flash) = {
            let inner = self.registry.inner();
            let owner = inner.orphan(pool, owner)?;
            let entry = inner.pool(pool)?;
            let segments = entry.owners.iter().find(|(other, _)| other.0 == owner.0);
            let size = segments.map_or(0, |(_, segments)| segments * entry.segment_bytes);
            (owner, Size(size), entry.flash.clone())
        };
        let mut preview = Preview { cached: size, ..Preview::default() };
        preview.effects.push(format!(
            "pool {pool}: the cache {owner}, which belongs to no disk, is removed; it takes {} of flash",
            size.human()
        ));
        let reading = read_journal(&flash, OwnerId(owner.0));
        let journal = tokio::time::timeout(READ_MAX, reading).await.ok();
        // Data on a missing device cannot be counted.
        let is_whole = self.registry.inner().pool(pool)?.is_whole();
        let dirty = journal.and_then(|journal| journal.dirty_bytes(is_whole));
        match dirty.filter(|_| is_whole) {
            Some(dirty) => {
                preview.dirty_lost = Size(dirty);
                if dirty > 0 {
                    preview.effects.push(format!("{owner}: {} of dirty data is lost", Size(dirty).human()));
                }
            }
            None => {
                preview.dirty_unknown = true;
                preview.effects.push(format!(
                    "{owner}: all dirty data is lost; the amount is unknown, because its journal \
                    cannot be read"
                ));
            }
        }
        Ok(preview)
    }
}

impl Inner {
    /// Parses the owner id of a cache in a pool, and checks that the cache belongs to no disk.
    pub(in crate::services) fn orphan(&self, pool: &str, owner: &str) -> Result<CacheOwner> {
        let owner: CacheOwner = owner.parse().map_err(ApiError::invalid)?;
        let entry = self.pool(pool)?;
        if self.known_owners().contains(&OwnerId(owner.0)) {
            return Err(conflict!("{owner} is the cache of a disk, not an orphan")
                .hint("'hob cache disable' removes the cache"));
        }
        if !entry.owners.iter().any(|(other, _)| other.0 == owner.0) {
            return Err(not_found!("pool {pool} has no data of the owner {owner}")
                .hint(format!("'hob pool show {pool}' lists orphans (caches that belong to no disk)")));
        }
        Ok(owner)
    }

    fn without_device(&self, pool: &str, path: &Path) -> Result<Preview> {
        let entry = self.pool(pool)?;
        let device = entry.devices.iter().find(|device| device.path == path);
        let device = device.ok_or_else(|| no_device(pool, path))?;
        let mut preview = Preview::default();
        match device.ids {
            // The device is on another host, and has only replicas of data that is also on this
            // host's flash.
            Some(_) if device.peer.is_some() => {}
            Some(ids) => {
                let elsewhere = entry.devices.iter().filter(|other| {
                    other.path != device.path && other.peer.is_none() && other.gives_segments()
                });
                let free = elsewhere.map(|other| other.free_segments).sum();
                self.caches_move(pool, ids.on_shards, entry.segment_bytes, free, &mut preview);
            }
            None => self.caches_are_unread(pool, path, &mut preview),
        }
        Ok(preview)
    }

    /// Adds to the preview the moves of caches from a device to the `free` segments of other
    /// devices.
    fn caches_move(
        &self,
        pool: &str,
        device: DeviceId,
        segment_bytes: u64,
        mut free: u64,
        preview: &mut Preview,
    ) {
        let on_it =
            |segments: &[Segment]| segments.iter().filter(|segment| segment.device == device).count() as u64;
        for disk in self.disks.values() {
            let (name, data, ring) = (&disk.wanted.name, on_it(&disk.held), on_it(&disk.ring));
            if data + ring == 0 {
                continue;
            }
            let moved = data.min(free);
            free -= moved;
            let less = Size((data - moved) * segment_bytes);
            if less == Size(0) {
                preview.effects.push(format!("{name}: its cache moves to other devices of pool {pool}"));
                continue;
            }
            preview.cached = Size(preview.cached.bytes() + less.bytes());
            preview.effects.push(if data == disk.held.len() as u64 && moved == 0 {
                format!(
                    "{name}: the cache is emptied, because pool {pool} has no other space for it; \
                    dirty data is first written to the backing"
                )
            } else {
                format!(
                    "{name}: the cache shrinks by {}; data that does not fit is dropped, and dirty \
                    data is first written to the backing",
                    less.human()
                )
            });
        }
    }

    /// Adds to the preview the effects of removing a missing device. After the removal, hob no
    /// longer waits for the device's data.
    fn caches_are_unread(&self, pool: &str, path: &Path, preview: &mut Preview) {
        let waits = |disk: &&DiskEntry| {
            let of_pool = disk.cache().filter(|spec| spec.pool == pool);
            let has_journal = of_pool.and_then(|spec| spec.journal).is_some_and(|journal| journal.ring > 0);
            has_journal && matches!(disk.phase, DiskPhase::Offline(_))
        };
        for disk in self.disks.values().filter(waits) {
            preview.dirty_unknown = true;
            preview.effects.push(format!(
                "{}: the disk is offline, and dirty data of its cache on {} is lost; the amount is \
                unknown while the device is missing",
                disk.wanted.name,
                path.display()
            ));
        }
    }
}
