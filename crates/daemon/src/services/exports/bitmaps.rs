//! Creates, rotates and removes dirty bitmaps, and saves them when their disk is closed
//! (docs/decisions/0016).
//!
//! A bitmap that records changes has no file while its disk is served. So if the daemon ends
//! without closing the disk, the file is missing at the next start, and the bitmap restarts with
//! every granule marked as changed. A frozen bitmap always has a file.

use std::path::{Path, PathBuf};

use hob_control::{
    BITMAPS_MAX, Bitmap as Shown, BitmapAdd, BitmapMerge, BitmapRotate, BitmapState, Bitmaps, Size,
};
use hob_engine::command::{Bitmap, BitmapChange};
use hob_engine::granules::{GRANULE_BYTES_MAX, GRANULE_BYTES_MIN, GRANULES_MAX, Granules};
use hob_engine::units::DiskId;
use hob_nbd::wire::QEMU_DIRTY_BITMAP;
use hob_storage::bitmap::{self, Kept};

use super::ExportService;
use crate::api_error::{ApiError, Result, conflict, failed, invalid, not_found};
use crate::hardware::{BackingInfo, ChangeMark};
use crate::services::flash;
use crate::services::registry::{DiskEntry, DiskPhase};
use crate::shard_api::{Gone, ShardError, ShardHandle};
use crate::state::BitmapSpec;
use crate::watchdog::contained;

/// Reason why a bitmap marks the whole disk as changed: the bitmap's file is missing.
const NOT_CLOSED: &str = "hob ended without closing the disk";

impl ExportService {
    pub(crate) async fn bitmaps(&self, disk: String) -> Result<Bitmaps> {
        let (specs, online) = {
            let inner = self.registry.inner();
            let entry = inner.disk(&disk)?;
            (entry.wanted.bitmaps.clone(), entry.shard().ok().map(|shard| (shard, entry.id)))
        };
        let noted = match online {
            Some((shard, id)) if !specs.is_empty() => shard.bitmaps(id, None).await?.all,
            _ => Vec::new(),
        };
        let show = |spec: &BitmapSpec| {
            let found = noted.iter().find(|noted| noted.name == spec.name);
            Shown {
                name: spec.name.clone(),
                state: match (found, spec.frozen) {
                    (_, true) => BitmapState::Frozen,
                    (Some(_), false) => BitmapState::Recording,
                    (None, false) => BitmapState::Offline,
                },
                granularity: found.map(|noted| Size(noted.granule_bytes)),
                dirty: found.map(|noted| Size(noted.dirty_bytes)),
                everything_because: spec.everything.clone(),
            }
        };
        Ok(Bitmaps { bitmaps: specs.iter().map(show).collect(), disk })
    }

    pub(crate) async fn bitmap_add(&self, disk: String, add: BitmapAdd) -> Result<Bitmaps> {
        let service = self.clone();
        self.tasks
            .run("bitmap add", disk.clone(), async move {
                let guard = service.registry.guard_disk_for_command(&disk, "given a bitmap").await?;
                let path = service.bitmap_path(&disk, &add.name)?;
                service.check_new_bitmap(&disk, &add.name)?;
                let (shard, id) = service.registry.shard_of(&disk)?;
                let size = service.registry.inner().disk(&disk)?.size_bytes;
                let granules = granules(size, add.granularity)?;
                let granularity = Size(granules.granule_bytes());
                // An existing file is a leftover.
                flash::blocking(move || {
                    std::fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
                    bitmap::remove(&path)
                })
                .await?
                .map_err(|error| cannot("made", &disk, &error))?;
                let made = Bitmap::recording(add.name.clone(), granules);
                shard.change_bitmaps(id, BitmapChange::Add(Box::new(made))).await?;
                let spec =
                    BitmapSpec { name: add.name.clone(), granularity, frozen: false, everything: None };
                service.registry.inner().disk_mut(&disk)?.wanted.bitmaps.push(spec);
                if let Err(error) = service.registry.save_first().await {
                    service.forget_bitmap(&disk, &add.name)?;
                    shard.change_bitmaps(id, BitmapChange::Remove(add.name)).await?;
                    return Err(error);
                }
                service.offer_bitmaps(&disk)?;
                drop(guard);
                service.bitmaps(disk).await
            })
            .await
    }

    pub(crate) async fn bitmap_remove(&self, disk: String, name: String) -> Result<Bitmaps> {
        let service = self.clone();
        self.tasks
            .run("bitmap remove", disk.clone(), async move {
                let guard =
                    service.registry.guard_disk_for_command(&disk, "changed (a bitmap is removed)").await?;
                service.bitmap_spec(&disk, &name)?;
                let path = service.bitmap_path(&disk, &name)?;
                service.forget_bitmap(&disk, &name)?;
                service.offer_bitmaps(&disk)?;
                if let Ok((shard, id)) = service.registry.shard_of(&disk) {
                    shard.change_bitmaps(id, BitmapChange::Remove(name)).await?;
                }
                drop(guard);
                service.registry.save().await?;
                remove_file(path).await;
                service.bitmaps(disk).await
            })
            .await
    }

    pub(crate) async fn bitmap_clear(&self, disk: String, name: String) -> Result<Bitmaps> {
        let service = self.clone();
        self.tasks
            .run("bitmap clear", disk.clone(), async move {
                let guard = service.registry.guard_disk_for_command(&disk, "changed").await?;
                service.recording_bitmap(&disk, &name)?;
                let (shard, id) = service.registry.shard_of(&disk)?;
                shard.change_bitmaps(id, BitmapChange::Clear(name.clone())).await?;
                service.with_bitmap(&disk, &name, |spec| spec.everything = None)?;
                drop(guard);
                service.registry.save().await?;
                service.bitmaps(disk).await
            })
            .await
    }

    /// Moves the content of a recording bitmap to a new frozen bitmap. The recording bitmap then
    /// starts empty.
    pub(crate) async fn bitmap_rotate(
        &self,
        disk: String,
        name: String,
        rotate: BitmapRotate,
    ) -> Result<Bitmaps> {
        let service = self.clone();
        self.tasks
            .run("bitmap rotate", disk.clone(), async move {
                let guard = service.registry.guard_disk_for_command(&disk, "changed").await?;
                let frozen = rotate.frozen;
                let path = service.bitmap_path(&disk, &frozen)?;
                let spec = service.recording_bitmap(&disk, &name)?;
                service.check_new_bitmap(&disk, &frozen)?;
                let (shard, id) = service.registry.shard_of(&disk)?;
                let change = BitmapChange::Rotate { name: name.clone(), frozen: frozen.clone() };
                shard.change_bitmaps(id, change).await?;
                if let Err(error) = service.keep_frozen(&disk, &shard, id, spec, frozen.clone(), path).await {
                    // The recorded changes are kept.
                    service.forget_bitmap(&disk, &frozen)?;
                    shard.change_bitmaps(id, BitmapChange::Merge { from: frozen, into: name }).await?;
                    return Err(error);
                }
                service.with_bitmap(&disk, &name, |spec| spec.everything = None)?;
                service.offer_bitmaps(&disk)?;
                drop(guard);
                service.registry.save().await?;
                service.bitmaps(disk).await
            })
            .await
    }

    /// Saves a frozen bitmap durably, before hob reports to the client that the bitmap is frozen.
    async fn keep_frozen(
        &self,
        disk: &str,
        shard: &ShardHandle,
        id: DiskId,
        spec: BitmapSpec,
        frozen: String,
        path: PathBuf,
    ) -> Result<()> {
        let whole = shard.bitmaps(id, Some(frozen.clone())).await?.whole;
        let granules =
            whole.ok_or_else(|| ApiError::failed("the frozen bitmap was lost before it was saved"))?.granules;
        let identity = self.registry.inner().disk(disk)?.identity;
        let kept = Kept { granules, identity, changed: None };
        flash::blocking(move || bitmap::write(&path, &kept))
            .await?
            .map_err(|error| cannot("kept", disk, &error))?;
        let frozen = BitmapSpec { name: frozen, frozen: true, ..spec };
        self.registry.inner().disk_mut(disk)?.wanted.bitmaps.push(frozen);
        self.registry.save_first().await
    }

    /// Adds the changed granules of the bitmap `name` to a recording bitmap, and then removes the
    /// bitmap `name`.
    pub(crate) async fn bitmap_merge(
        &self,
        disk: String,
        name: String,
        merge: BitmapMerge,
    ) -> Result<Bitmaps> {
        let service = self.clone();
        self.tasks
            .run("bitmap merge", disk.clone(), async move {
                let guard = service.registry.guard_disk_for_command(&disk, "changed").await?;
                let into = merge.into;
                let from = service.bitmap_spec(&disk, &name)?;
                service.recording_bitmap(&disk, &into)?;
                if into == name {
                    return Err(ApiError::invalid("a bitmap cannot be merged with itself"));
                }
                let path = service.bitmap_path(&disk, &name)?;
                let (shard, id) = service.registry.shard_of(&disk)?;
                let change = BitmapChange::Merge { from: name.clone(), into: into.clone() };
                shard.change_bitmaps(id, change).await?;
                service.with_bitmap(&disk, &into, |spec| {
                    spec.everything = spec.everything.take().or(from.everything);
                })?;
                service.forget_bitmap(&disk, &name)?;
                service.offer_bitmaps(&disk)?;
                drop(guard);
                service.registry.save().await?;
                remove_file(path).await;
                service.bitmaps(disk).await
            })
            .await
    }

    /// Marks the whole disk as changed in all of its bitmaps, because any part of the disk may have
    /// changed. The marks persist across restarts.
    pub(in crate::services) async fn all_is_changed(&self, disk: &str, because: &str) -> Result<()> {
        let (names, online) = {
            let mut inner = self.registry.inner();
            let entry = inner.disk_mut(disk)?;
            let online = entry.shard().ok().map(|shard| (shard, entry.id));
            let recording = entry.wanted.bitmaps.iter_mut().filter(|spec| !spec.frozen);
            let name = |spec: &mut BitmapSpec| {
                // All granules are marked after the first reason, so later reasons add nothing.
                spec.everything.get_or_insert_with(|| because.to_owned());
                spec.name.clone()
            };
            (recording.map(name).collect::<Vec<String>>(), online)
        };
        if names.is_empty() {
            return Ok(());
        }
        tracing::warn!("disk {disk}: its dirty bitmaps now mark the whole disk as changed: {because}");
        if let Some((shard, id)) = online {
            for name in names {
                shard.change_bitmaps(id, BitmapChange::InsertAll(name)).await?;
            }
        }
        self.registry.save_first().await
    }

    /// Adds the saved bitmaps to a disk on its shard, before clients can write to the disk.
    pub(in crate::services) async fn open_bitmaps(
        &self,
        disk: &str,
        shard: &ShardHandle,
        info: &BackingInfo,
    ) -> Result<()> {
        let (specs, id) = {
            let inner = self.registry.inner();
            let entry = inner.disk(disk)?;
            (entry.wanted.bitmaps.clone(), entry.id)
        };
        for spec in specs {
            let path = self.bitmap_path(disk, &spec.name)?;
            let (looked_for, info) = (spec.clone(), info.clone());
            let (granules, why) =
                flash::blocking(move || contained(|| look_at(&path, &looked_for, &info))).await?;
            let mut granules = granules;
            if spec.everything.is_some() {
                granules.insert_all();
            }
            if let Some(why) = why {
                tracing::warn!(
                    "disk {disk}: its dirty bitmap {} now marks the whole disk as changed: {why}",
                    spec.name
                );
                self.with_bitmap(disk, &spec.name, |spec| {
                    spec.everything.get_or_insert(why);
                })?;
            }
            let bitmap = Bitmap { name: spec.name, granules, is_recording: !spec.frozen };
            shard.change_bitmaps(id, BitmapChange::Add(Box::new(bitmap))).await?;
        }
        Ok(())
    }

    /// Removes the files of the saved bitmaps before clients may write, because each write makes
    /// these files outdated.
    pub(in crate::services) async fn begin_recording(&self, disk: &str) -> Result<()> {
        let specs = self.registry.inner().disk(disk)?.wanted.bitmaps.clone();
        for spec in specs.into_iter().filter(|spec| !spec.frozen) {
            let path = self.bitmap_path(disk, &spec.name)?;
            flash::blocking(move || bitmap::remove(&path))
                .await?
                .map_err(|error| cannot("opened", disk, &error))?;
        }
        Ok(())
    }

    /// Removes a disk from its shard and saves its bitmaps.
    pub(in crate::services) async fn take_from_shard(
        &self,
        disk: &str,
        shard: &ShardHandle,
        id: DiskId,
    ) -> Result<Gone, ShardError> {
        let mut gone = shard.remove_disk(id).await?;
        let is_changed = self.registry.inner().disk_mut(disk).is_ok_and(|entry| {
            entry.set_owed(gone.failures_owed);
            if gone.is_unanswered {
                entry.note_unanswered();
            }
            gone.is_unflushed && entry.expect_no_crash_log()
        });
        let saved = if is_changed { self.registry.save().await } else { Ok(()) };
        match saved {
            Ok(()) if is_changed || !gone.is_unflushed => shard.remove_ended_crash_log(id),
            Ok(()) => {}
            // The saved state still expects a crash log, so the crash log is kept for the next
            // start.
            Err(error) => tracing::error!("{error}"),
        }
        let bitmaps = std::mem::take(&mut gone.bitmaps);
        self.keep_bitmaps(disk, bitmaps, gone.changed).await;
        Ok(gone)
    }

    /// Saves the bitmaps of a closed disk. A bitmap that cannot be saved marks the whole disk as
    /// changed when the disk is opened again.
    async fn keep_bitmaps(&self, disk: &str, bitmaps: Vec<Bitmap>, changed: Option<ChangeMark>) {
        let Ok(identity) = self.registry.inner().disk(disk).map(|entry| entry.identity) else { return };
        for Bitmap { name, granules, .. } in bitmaps.into_iter().filter(|bitmap| bitmap.is_recording) {
            let Ok(path) = self.bitmap_path(disk, &name) else { continue };
            let kept = Kept { granules, identity, changed };
            let written = flash::blocking(move || bitmap::write(&path, &kept)).await;
            let error = match written {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error.to_string(),
                Err(error) => error.to_string(),
            };
            tracing::error!(
                "disk {disk}: cannot save its dirty bitmap {name}, which will mark the whole disk as changed: {error}"
            );
        }
    }

    pub(in crate::services) async fn forget_bitmaps(&self, disk: &str) {
        let Some(directory) = self.bitmaps.as_ref().map(|all| all.join(disk)) else { return };
        let _ = flash::blocking(move || std::fs::remove_dir_all(directory)).await;
    }

    /// Returns the NBD metadata contexts of a disk's bitmaps.
    pub(in crate::services) fn bitmap_contexts(specs: &[BitmapSpec]) -> Vec<String> {
        specs.iter().map(|spec| format!("{QEMU_DIRTY_BITMAP}{}", spec.name)).collect()
    }

    /// Offers the current bitmaps to clients that connect from now on.
    fn offer_bitmaps(&self, disk: &str) -> Result<()> {
        let contexts = Self::bitmap_contexts(&self.registry.inner().disk(disk)?.wanted.bitmaps);
        self.table.set_contexts(disk, &contexts);
        Ok(())
    }

    fn bitmap_spec(&self, disk: &str, name: &str) -> Result<BitmapSpec> {
        let inner = self.registry.inner();
        let found = inner.disk(disk)?.wanted.bitmaps.iter().find(|spec| spec.name == name).cloned();
        found.ok_or_else(|| {
            not_found!("{disk} has no bitmap '{name}'").hint(format!("'hob bitmap list {disk}' shows all"))
        })
    }

    fn recording_bitmap(&self, disk: &str, name: &str) -> Result<BitmapSpec> {
        let spec = self.bitmap_spec(disk, name)?;
        if spec.frozen {
            return Err(conflict!("bitmap '{name}' of {disk} is frozen: it does not record changes")
                .hint(format!("'hob bitmap list {disk}' shows which bitmaps record changes")));
        }
        Ok(spec)
    }

    fn check_new_bitmap(&self, disk: &str, name: &str) -> Result<()> {
        BitmapAdd::check_name(name).map_err(ApiError::invalid)?;
        let inner = self.registry.inner();
        let specs = &inner.disk(disk)?.wanted.bitmaps;
        if specs.iter().any(|spec| spec.name == name) {
            return Err(conflict!("{disk} has a bitmap '{name}' already").hint("choose another name"));
        }
        if specs.len() >= BITMAPS_MAX {
            return Err(conflict!("{disk} has {BITMAPS_MAX} bitmaps, which is the maximum")
                .hint("remove a bitmap, or merge frozen bitmaps into a recording one"));
        }
        Ok(())
    }

    fn with_bitmap(&self, disk: &str, name: &str, f: impl FnOnce(&mut BitmapSpec)) -> Result<()> {
        let mut inner = self.registry.inner();
        let specs = &mut inner.disk_mut(disk)?.wanted.bitmaps;
        if let Some(spec) = specs.iter_mut().find(|spec| spec.name == name) {
            f(spec);
        }
        Ok(())
    }

    fn forget_bitmap(&self, disk: &str, name: &str) -> Result<()> {
        self.registry.inner().disk_mut(disk)?.wanted.bitmaps.retain(|spec| spec.name != name);
        Ok(())
    }

    fn bitmap_path(&self, disk: &str, name: &str) -> Result<PathBuf> {
        // The names of the disk and of the bitmap become parts of a path.
        BitmapAdd::check_name(name).map_err(ApiError::invalid)?;
        let directory = self.bitmaps.as_ref().ok_or_else(|| {
            ApiError::conflict("'hob serve' saves no state, so it cannot have dirty bitmaps")
                .hint("serve the disk with 'hob daemon', which has a state directory")
        })?;
        Ok(directory.join(disk).join(name))
    }

    /// Returns true if a disk has bitmaps that must be saved when it closes.
    pub(in crate::services) fn has_bitmaps(disk: &DiskEntry) -> bool {
        matches!(disk.phase, DiskPhase::Online(_)) && disk.wanted.bitmaps.iter().any(|spec| !spec.frozen)
    }
}

/// Returns the granules of a bitmap without changes, for a disk of `size` bytes and with the wanted
/// granularity or the default.
fn granules(size: u64, wanted: Option<Size>) -> Result<Granules> {
    let Some(bytes) = wanted.map(Size::bytes).or_else(|| Granules::usual_bytes(size)) else {
        return Err(ApiError::invalid("the disk is too large for a bitmap"));
    };
    Granules::new(size, bytes).ok_or_else(|| {
        let (min, max) = (Size(GRANULE_BYTES_MIN), Size(GRANULE_BYTES_MAX));
        if bytes.is_power_of_two() && (min.bytes()..=max.bytes()).contains(&bytes) {
            let enough = Granules::usual_bytes(size).map_or(max, Size);
            let most = Size(bytes.saturating_mul(GRANULES_MAX));
            invalid!("a bitmap with a granularity of {} is possible for disks of at most {most}", Size(bytes))
                .hint(format!("use a granularity of at least {enough} for this disk"))
        } else {
            let wanted = Size(bytes);
            invalid!("the granularity must be a power of two from {min} to {max}, not {wanted}")
        }
    })
}

/// Loads a saved bitmap. If its file is unusable, returns all granules as changed, and the reason.
fn look_at(path: &Path, spec: &BitmapSpec, info: &BackingInfo) -> (Granules, Option<String>) {
    let all = || {
        let mut all = Granules::new(info.size_bytes, spec.granularity.bytes())
            .or_else(|| Granules::new(info.size_bytes, Granules::usual_bytes(info.size_bytes)?))
            .unwrap_or_else(|| Granules::new(0, GRANULE_BYTES_MIN).expect("of nothing"));
        all.insert_all();
        all
    };
    let mut kept = match bitmap::read(path) {
        Ok(Some(kept)) => kept,
        Ok(None) if spec.frozen => return (all(), Some("its file does not exist".to_owned())),
        Ok(None) => return (all(), Some(NOT_CLOSED.to_owned())),
        Err(error) => return (all(), Some(format!("its file cannot be used: {error}"))),
    };
    let changed_since = matches!((kept.changed, info.changed), (Some(then), Some(now)) if then != now);
    let known = kept.granules.disk_bytes();
    let has_grown = known < info.size_bytes && info.identity_at(known) == Some(kept.identity);
    let why = if known != info.size_bytes && !has_grown {
        "the size of the backing changed while hob did not serve it"
    } else if kept.identity != info.identity && !has_grown {
        "the disk has another backing"
    } else if !spec.frozen && changed_since {
        "another program changed the backing while hob did not serve it"
    } else {
        // The added part counts as changed.
        kept.granules.grow(info.size_bytes);
        return (kept.granules, None);
    };
    (all(), Some(why.to_owned()))
}

async fn remove_file(path: PathBuf) {
    // The file is no longer used.
    let _ = flash::blocking(move || bitmap::remove(&path)).await;
}

fn cannot(what: &str, disk: &str, error: &std::io::Error) -> ApiError {
    failed!("a bitmap of {disk} cannot be {what}: {error}")
        .hint("free space in the state directory or repair it, and try again")
}
