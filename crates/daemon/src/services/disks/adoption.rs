//! Handles orphans (persistent caches that belong to no disk) that have dirty data of a disk's
//! backing. The disk does not come online until an operator gives the orphan to the disk, or
//! discards the orphan (docs/decisions/0064).

use std::time::Duration;

use hob_control::{DiskChanged, Size};
use hob_engine::command::Mode;
use hob_storage::pool::OwnerId;

use super::comparison::same_backing;
use super::fencing::Same;
use super::{Disks, Open};
use crate::api_error::{ApiError, Result, conflict, not_found};
use crate::cache_settings::new_spec;
use crate::hardware::BackingInfo;
use crate::services::flash::Flash;
use crate::services::registry::{DiskEntry, DiskPhase, Inner, OrphanContent, OrphanJournal};
use crate::state::{CacheOwner, CacheSpec, DiskState, JournalSpec};

/// Maximum time that the opening of a disk waits until hob has read the journals of orphans.
const READ_MAX: Duration = Duration::from_secs(10);

/// Time before a disk that was refused because of an orphan is opened again.
const RETRY_AFTER: Duration = Duration::from_secs(5);

impl Disks {
    /// Refuses to open a disk while an orphan has dirty data of the disk's backing. A disk that was
    /// never served is also refused while the backing of some orphan with dirty data is unknown.
    pub(super) async fn check_orphans(&self, name: &str, info: &BackingInfo, when: Open) -> Result<()> {
        self.pools.await_orphans(READ_MAX).await;
        let checked = match self.check_offline_caches(name, info).await {
            Ok(()) => self.registry.inner().check_orphans(name, info, when),
            error => error,
        };
        if checked.is_err() {
            let retry_after = Some(tokio::time::Instant::now() + RETRY_AFTER);
            self.registry.inner().disk_mut(name)?.retry_after = retry_after;
        }
        checked
    }

    /// Refuses to open a disk that was never served while an offline disk may have dirty data of
    /// the same backing. The two disks may name the backing by different paths.
    async fn check_offline_caches(&self, name: &str, info: &BackingInfo) -> Result<()> {
        let others = self.registry.inner().offline_caches(name)?;
        for OfflineCache { disk, known, flash, owner, is_whole } in others {
            let dirty = match &known {
                Some(known) if is_same(known, info) => None,
                Some(_) => continue,
                None => match self.pools.read_in_turn(&flash, owner).await {
                    OrphanJournal::Read(content) if !content.is_of(info) => continue,
                    journal => journal.dirty_bytes(is_whole),
                },
            };
            let what = match dirty {
                Some(0) => continue,
                Some(dirty) => format!("has {} of dirty data of this backing", Size(dirty).human()),
                None => "may have dirty data of this backing".to_owned(),
            };
            return Err(conflict!("the disk {disk}, which is offline, {what}").hint(format!(
                "'hob disk show {disk}' shows why it is offline; 'hob cache discard-dirty {disk} --yes' loses \
                 its dirty data"
            )));
        }
        Ok(())
    }

    /// Gives an offline disk a cache that belongs to no disk, and opens the disk.
    pub(crate) async fn cache_adopt(&self, disk: String, owner: String) -> Result<DiskChanged> {
        let service = self.clone();
        self.tasks.run("cache adopt", disk.clone(), async move { service.adopt(&disk, &owner).await }).await
    }

    async fn adopt(&self, name: &str, owner: &str) -> Result<DiskChanged> {
        let guard = self.registry.guard_disk_for_command(name, "changed").await?;
        self.pools.await_orphans(READ_MAX).await;
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk(name)?;
            if !matches!(disk.phase, DiskPhase::Offline(_)) {
                return Err(conflict!(
                    "{name} is online, and its guest may have changed the data that the cache has"
                )
                .hint(format!(
                    "to use the cache's data instead, stop the guest, remove the disk with 'hob disk remove \
                     {name}', and add it again with --adopt-cache {owner}"
                )));
            }
            let content = inner.orphan_content(owner)?.1;
            let Some(measure) = &disk.measure else {
                return Err(conflict!(
                    "the backing of {name} was never reached, so it is unknown whether the cache {owner} \
                     belongs to it"
                )
                .hint("make the backing available first; 'hob disk show' shows why the disk is offline"));
            };
            if !content.is_of(&measure.info) {
                return Err(conflict!(
                    "the cache {owner} belongs to another backing than {name}, or to another disk size"
                )
                .hint(
                    "'hob health' shows the disk to whose backing the cache belongs, if the daemon \
                     has that disk",
                ));
            }
            let spec = inner.adopted_cache(&disk.wanted, owner)?;
            inner.disk_mut(name)?.wanted.cache = Some(spec);
        }
        self.registry.save_first().await?;
        tracing::warn!("{name}: the cache {owner}, which belonged to no disk, is its cache now, by command");
        drop(guard);
        self.bring_online(name).await;
        self.observe.disk_changed(name, Vec::new())
    }

    /// Returns the cache of a new disk that adopts an orphan.
    pub(super) async fn cache_to_adopt(&self, wanted: &DiskState, owner: &str) -> Result<CacheSpec> {
        self.pools.await_orphans(READ_MAX).await;
        self.registry.inner().adopted_cache(wanted, owner)
    }
}

/// The cache of an offline disk, which may have dirty data.
struct OfflineCache {
    disk: String,
    /// The disk's backing; `None` if this daemon process has not opened the backing yet.
    known: Option<BackingInfo>,
    flash: Flash,
    owner: OwnerId,
    /// True if no device of the pool is missing.
    is_whole: bool,
}

/// Returns true if `one` and `two` describe the same backing, possibly with different sizes.
fn is_same(one: &BackingInfo, two: &BackingInfo) -> bool {
    let has_been = |now: &BackingInfo, then: &BackingInfo| {
        same_backing(now, then.size_bytes, &then.identity) != Same::No
    };
    has_been(one, two) || has_been(two, one)
}

impl Inner {
    /// Refuses to open a disk if an orphan may have dirty data of the disk, or if a pool device
    /// that hob has not read may have such data.
    fn check_orphans(&self, name: &str, info: &BackingInfo, when: Open) -> Result<()> {
        if let Some((pool, devices)) = self.unknown_devices() {
            return Err(conflict!("pool {pool} has devices that hob's state does not know ({devices}), and that may have dirty data \
                 of this disk. Was hob's state directory lost or replaced?"
            )
            .hint(format!(
                "connect each device with 'hob pool add-device {pool} PATH', or remove it from the \
                 pool with 'hob pool remove-device {pool} {}'",
                devices.split(", ").next().unwrap_or_default()
            )));
        }
        if let Some((pool, devices)) = self.unseen_devices(&self.disk(name)?.wanted) {
            return Err(conflict!("pool {pool} has lacked {devices} since hob opened the pool without a saved state, and the missing \
                 device may have dirty data of this disk"
            )
            .hint(format!(
                "connect the device again, or remove it from the pool with 'hob pool \
                 remove-device {pool} DEVICE'"
            )));
        }
        let Some((why, pool, owner)) = self.blocking_orphan(&self.disk(name)?.wanted, info) else {
            return Ok(());
        };
        let adopt = match when {
            Open::AtOnce => format!("'hob cache adopt {name} {owner}'"),
            Open::WithCache => format!("'hob disk add {name} … --adopt-cache {owner}'"),
        };
        Err(conflict!("{why}. Was hob's state directory lost or replaced?").hint(format!(
            "{adopt} gives the disk this cache with its dirty data; 'hob pool discard-orphan {pool} {owner} \
             --yes' loses the data"
        )))
    }

    /// Returns the caches of offline disks that may have dirty data, if `name` was never served.
    /// Leaves out a disk whose backing this daemon process has opened and whose mode is not
    /// write-back. For other disks, the saved mode proves nothing, because it may be older than the
    /// journal.
    fn offline_caches(&self, name: &str) -> Result<Vec<OfflineCache>> {
        if !self.disk(name)?.wanted.is_new {
            return Ok(Vec::new());
        }
        let cache_of = |disk: &DiskEntry| {
            let spec = disk.cache()?;
            let journal = spec.journal.filter(|journal| journal.ring > 0)?;
            let pool = self.pool(&spec.pool).ok()?;
            let known = disk.measure.as_ref().map(|measure| measure.info.clone());
            let may_be_dirty = known.is_none() || spec.mode == Mode::WriteBack;
            may_be_dirty.then(|| OfflineCache {
                disk: disk.wanted.name.clone(),
                known,
                flash: pool.flash.clone(),
                owner: OwnerId(journal.owner.0),
                is_whole: pool.is_whole(),
            })
        };
        let is_offline = |disk: &&DiskEntry| matches!(disk.phase, DiskPhase::Offline(_));
        let others = self.disks.values().filter(|disk| disk.wanted.name != name);
        Ok(others.filter(is_offline).filter_map(cache_of).collect())
    }

    /// Returns the reason why an orphan prevents the opening of a disk, with the orphan's pool and
    /// owner id.
    fn blocking_orphan(
        &self,
        wanted: &DiskState,
        info: &BackingInfo,
    ) -> Option<(String, String, CacheOwner)> {
        for (pool, entry) in &self.pools {
            for (owner, journal) in entry.orphans(self) {
                let dirty = journal.and_then(|journal| journal.dirty_bytes(entry.is_whole()));
                let owner = CacheOwner(owner.0);
                let of = format!("the cache {owner} in pool {pool}, which belongs to no disk");
                let why = match journal {
                    _ if dirty == Some(0) => continue,
                    Some(OrphanJournal::Read(content)) if content.is_of(info) => match dirty {
                        Some(dirty) => format!(
                            "{of}, has {} of dirty data of this backing, which has older data",
                            Size(dirty).human()
                        ),
                        None => format!(
                            "{of}, belongs to this backing, and may have dirty data of it on missing devices"
                        ),
                    },
                    Some(OrphanJournal::Read(_)) => continue,
                    _ if !wanted.is_new => continue,
                    Some(OrphanJournal::Unreadable(why)) => {
                        format!("{of}, may have dirty data of this disk; its journal cannot be read: {why}")
                    }
                    Some(OrphanJournal::Empty) => {
                        format!("{of}, may have dirty data of this disk on missing devices")
                    }
                    None | Some(OrphanJournal::Reading(_)) => {
                        format!("{of}, may have dirty data of this disk; its journal is still being read")
                    }
                };
                return Some((why, pool.clone(), owner));
            }
        }
        None
    }

    /// Returns the pool of the disk's cache and the pool's missing devices, if these devices may
    /// have dirty data of the disk. This is possible for a write-back cache of a disk that was
    /// never served, if hob opened the pool without a saved state and the devices have been missing
    /// since then.
    fn unseen_devices(&self, wanted: &DiskState) -> Option<(String, String)> {
        let writes_back = |spec: &&CacheSpec| spec.mode == Mode::WriteBack && spec.journal.is_some();
        let spec = wanted.cache.as_ref().filter(|_| wanted.is_new).filter(writes_back)?;
        let entry = self.pools.get(&spec.pool).filter(|entry| entry.is_unseen)?;
        let missing = entry.devices.iter().filter(|device| device.ids.is_none());
        let missing: Vec<String> = missing.map(|device| device.path.display().to_string()).collect();
        (!missing.is_empty()).then(|| (spec.pool.clone(), missing.join(", ")))
    }

    fn orphan_content(&self, owner: &str) -> Result<(String, OrphanContent)> {
        let owner: CacheOwner = owner.parse().map_err(ApiError::invalid)?;
        for (pool, entry) in &self.pools {
            let mut orphans = entry.orphans(self).into_iter();
            match orphans.find(|(other, _)| *other == OwnerId(owner.0)) {
                None => {}
                Some((_, Some(OrphanJournal::Read(content)))) => return Ok((pool.clone(), *content)),
                Some((_, Some(OrphanJournal::Unreadable(why)))) => {
                    return Err(conflict!("the journal of the cache {owner} cannot be read: {why}"));
                }
                Some(_) => {
                    return Err(conflict!(
                        "the cache {owner} has no journal on the present devices, or it is still being read"
                    ));
                }
            }
        }
        Err(not_found!("no pool has a cache {owner} that belongs to no disk")
            .hint("'hob pool show POOL' lists the caches that belong to no disk"))
    }

    /// Returns the settings of a disk's cache after the disk has adopted an orphan. The mode is
    /// write-back. The other settings are those of the disk's configured cache, or the defaults if
    /// the disk has no cache.
    fn adopted_cache(&self, wanted: &DiskState, owner: &str) -> Result<CacheSpec> {
        let (pool, content) = self.orphan_content(owner)?;
        if wanted.read_only {
            return Err(conflict!(
                "{} is read-only, so the dirty data of a cache could never be written to its backing",
                wanted.name
            )
            .hint("add the disk without --read-only"));
        }
        if wanted.unlocked {
            return Err(conflict!("the backing of {} is not locked", wanted.name)
                .hint("'hob attach' locks the backing when QEMU has released it"));
        }
        let has_data = |spec: &CacheSpec| {
            let ring = spec.journal.filter(|journal| journal.ring > 0);
            // An older state file may name a cache that was removed later.
            let is_gone = |journal: JournalSpec| {
                let owner = OwnerId(journal.owner.0);
                let pool = self.pools.get(&spec.pool);
                pool.is_some_and(|it| it.is_whole() && it.owners.iter().all(|(of, _)| *of != owner))
            };
            ring.is_some_and(|journal| !is_gone(journal))
        };
        let spec = match &wanted.cache {
            Some(spec) if has_data(spec) => {
                return Err(conflict!("{} has another persistent cache", wanted.name)
                    .hint("remove that cache with 'hob cache disable'"));
            }
            Some(spec) if spec.pool == pool => spec.clone(),
            _ => {
                let context = self.context(&pool)?;
                let size = Size(content.segments.max(1) * context.segment_bytes);
                let settings = hob_control::CacheSettings {
                    mode: Some(Mode::WriteBack.to_string()),
                    persistent: Some(true),
                    block_size: Some(Size(u64::from(content.block_bytes))),
                    copies: Some(if content.copies > 1 { "2-dirty" } else { "1" }.to_owned()),
                    ..hob_control::CacheSettings::default()
                };
                let (spec, _) = new_spec(pool, Some(size), &settings, context)?;
                self.check_memory(&wanted.name, &spec)?;
                spec
            }
        };
        let owner: CacheOwner = owner.parse().map_err(ApiError::invalid)?;
        let ring = content.ring;
        let journal = JournalSpec { owner, ring, written: ring, ..JournalSpec::new() };
        // In write-back mode, dirty data is never assumed to be on the backing.
        Ok(CacheSpec { mode: Mode::WriteBack, journal: Some(journal), ..spec })
    }
}
