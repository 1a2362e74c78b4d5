//! Clones that share the data of their parent (docs/decisions/0020 and 0071). The parent, a
//! snapshot or a backing file, is served as a disk with its own cache. The parent's disk is created
//! when the first such clone is opened, and is removed after the last clone.
//!
//! If an operator has added a disk for the same parent, hob uses that disk instead. The content of
//! a snapshot or a read-only image never changes, and the backing gives this content a name. hob
//! finds the disk for the parent of each clone by this name. The shard of the parent's disk serves
//! the clones. While the parent's disk is offline, the clones read the parent's data through their
//! own backings. [`changes`] detects images that change although they must not.

mod changes;

use std::collections::BTreeSet;
use std::path::Path;
use std::pin::Pin;
use std::time::Duration;

use hob_control::{CacheSettings, NAME_CHARS_MAX, OnDirty, Size};
use hob_engine::units::DiskId;
use hob_storage::backing::{Format, NotShared, Parent};

use super::Disks;
use crate::api_error::{ApiError, Result, conflict};
use crate::background::spawn;
use crate::cache_settings::new_spec;
use crate::hardware::Backing;
use crate::services::flash;
use crate::services::qos::plain;
use crate::services::registry::{DiskEntry, DiskPhase, Inner};
use crate::shard_api::ShardHandle;
use crate::state::{CacheSpec, DiskState, FileSpec, FormatName, ImageSpec, ShareSpec};

/// Maximum time that opening a clone waits for its parent's disk. After this time, hob opens the
/// clone without the parent's disk. The clone starts to use that disk later.
const OPENING_MAX: Duration = Duration::from_secs(8);

/// Interval between two checks whether the parent's disk is online.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The parent of an open clone, and the disk that serves the parent.
#[derive(Debug, Default)]
pub(in crate::services) struct ParentLink {
    /// Name of the parent's unchanging content. hob uses the name to find the disk that serves the
    /// parent.
    constant: Option<String>,
    /// Name of the disk that serves the parent.
    linked: Option<String>,
    /// Reason why no disk serves the parent.
    reason: Option<String>,
    /// True if the parent has changed since the disk of the parent was opened.
    is_outdated: bool,
}

impl Disks {
    /// Makes a newly opened backing share its parent's data, if that is requested and possible.
    /// Returns the shard that must serve the clone, if only one shard can serve the clone. If it is
    /// unknown whether sharing is possible, the parent's disk still counts as used by the clone.
    pub(in crate::services) async fn share(
        &self,
        wanted: &DiskState,
        backing: Backing,
        notes: &mut Vec<String>,
    ) -> Result<(Backing, Option<ShardHandle>)> {
        let Some(share) = &wanted.share_parent else { return Ok((backing, None)) };
        let name = &wanted.name;
        let (backing, found) = flash::blocking(move || backing.share_parent()).await?;
        let parent = match found.and_then(|parent| self.not_writable(parent)) {
            Ok(parent) => parent,
            Err(why) => {
                let (disk, until) = match &why {
                    NotShared::Unsuitable(_) => (None, ""),
                    // The parent's disk stays, with its cache.
                    NotShared::Unknown(_) => (share.disk.as_deref(), " until it is opened again"),
                };
                notes.push(format!("the disk shares no blocks with other clones{until}: {why}"));
                let reason = Some(why.to_string());
                self.note_parent(name, disk, ParentLink { reason, ..ParentLink::default() })?;
                return Ok((backing, None));
            }
        };
        let link = ParentLink { constant: Some(parent.constant.clone()), ..ParentLink::default() };
        let disk = self.parent_disk(wanted, share, &parent, link, notes)?;
        self.await_parent(&disk).await;
        let shared = Size(parent.own.parent_bytes()).human();
        let so_far = if parent.own.is_complete() { "" } else { "; hob asks QEMU for the rest" };
        tracing::info!("disk {name} shares {shared} of its parent through disk {disk}{so_far}");
        let inner = self.registry.inner();
        let online = inner.disk(&disk).ok().and_then(|disk| disk.shard().ok());
        Ok((backing, online))
    }

    /// Returns the parent, or an error if a disk with the same backing can change the parent's
    /// data.
    fn not_writable(&self, parent: Parent) -> Result<Parent, NotShared> {
        let inner = self.registry.inner();
        let changes = |disk: &&DiskEntry| !disk.wanted.read_only && disk.wanted.backing == parent.spec;
        match inner.disks.values().find(changes) {
            Some(disk) => Err(NotShared::Unsuitable(format!(
                "its parent {} is served as disk {}, whose guests may change it",
                parent.spec, disk.wanted.name
            ))),
            None => Ok(parent),
        }
    }

    fn note_parent(&self, name: &str, disk: Option<&str>, link: ParentLink) -> Result<()> {
        let mut inner = self.registry.inner();
        let entry = inner.disk_mut(name)?;
        entry.parent = Some(link);
        if let Some(share) = &mut entry.wanted.share_parent {
            share.disk = disk.map(str::to_owned);
        }
        Ok(())
    }

    /// Returns the disk of a clone's parent; creates the disk if there is none.
    fn parent_disk(
        &self,
        wanted: &DiskState,
        share: &ShareSpec,
        parent: &Parent,
        link: ParentLink,
        notes: &mut Vec<String>,
    ) -> Result<String> {
        let found = self.registry.inner().find_parent(parent);
        if let Some(disk) = found {
            self.note_parent(&wanted.name, Some(&disk), link)?;
            return Ok(disk);
        }
        let cache = self.registry.inner().parent_cache(wanted, share)?;
        let disk = self.registry.inner().parent_name(&parent.spec);
        if let Some((_, more)) = &cache {
            notes.extend(more.iter().map(|note| format!("{disk}: {note}")));
        } else {
            notes.push(format!(
                "{disk} serves the parent of clones, and has no cache: 'hob cache enable \
                {disk} --pool POOL --size SIZE'"
            ));
        }
        // The clone's link to the parent is recorded before the parent's disk is created, because
        // hob removes a parent's disk without clones.
        self.note_parent(&wanted.name, Some(&disk), link)?;
        let state = DiskState {
            cache: cache.map(|(spec, _)| spec),
            datastore: wanted.datastore.clone(),
            image: Some(image_of(parent)),
            for_clones: true,
            ..DiskState::new(disk.clone(), parent.spec.clone(), true)
        };
        match self.enter(state, None) {
            Ok(_) => Ok(disk),
            // A concurrent opening of another clone may have created the parent's disk first.
            Err(error) => self.registry.inner().find_parent(parent).ok_or(error),
        }
    }

    /// Waits until a parent's disk is online or has failed to open, or until the time limit is
    /// over.
    async fn await_parent(&self, name: &str) {
        let opening = spawn(self.clone().bring_parent_online(name.to_owned()));
        let over = tokio::time::Instant::now() + OPENING_MAX;
        let is_pending = || {
            self.registry.inner().disk(name).is_ok_and(|disk| disk.shard().is_err() && disk.busy.is_some())
        };
        while (!opening.is_finished() || is_pending()) && tokio::time::Instant::now() < over {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Opens a parent's disk by [`Disks::bring_online`], in a boxed future, because that function
    /// calls this one.
    fn bring_parent_online(self, name: String) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move { self.bring_online(&name).await })
    }

    /// Tells the shards which disk is the parent of which clone. Runs periodically, because disks
    /// are added and removed.
    pub(in crate::services) fn link_parents(&self) {
        let mut inner = self.registry.inner();
        let parents: Vec<(String, String, DiskId, ShardHandle)> = inner
            .disks
            .values()
            .filter_map(|disk| {
                let shard = disk.shard().ok()?;
                Some((disk.constant.clone()?, disk.wanted.name.clone(), disk.id, shard))
            })
            .collect();
        let online: BTreeSet<String> = {
            let is_online = |disk: &&DiskEntry| matches!(disk.phase, DiskPhase::Online(_));
            inner.disks.values().filter(is_online).map(|disk| disk.wanted.name.clone()).collect()
        };
        for disk in inner.disks.values_mut() {
            let Ok(shard) = disk.shard() else { continue };
            let Some(link) = &mut disk.parent else { continue };
            let Some(constant) = &link.constant else { continue };
            let of_clone = |(of, name, ..): &&(_, _, _, _)| of == constant && *name != disk.wanted.name;
            let mut found = parents.iter().filter(of_clone).peekable();
            let there_is_one = found.peek().is_some();
            let parent = found.find(|(.., other)| other.is_same(&shard));
            shard.link_parent(disk.id, parent.map(|(_, _, id, _)| *id));
            link.linked = parent.map(|(_, name, ..)| name.clone());
            let named = disk.wanted.share_parent.as_ref().and_then(|share| share.disk.as_ref());
            link.is_outdated =
                parent.is_none() && !there_is_one && named.is_some_and(|named| online.contains(named));
            link.reason = match (parent, there_is_one) {
                (Some(_), _) => None,
                (None, false) if link.is_outdated => Some(
                    "its parent has changed since the disk of the parent was opened: its file was written, \
                     renamed or replaced. The clone reads it itself; to share again, restart hob, or remove \
                     all clones of the parent and add them again"
                        .into(),
                ),
                (None, true) => Some(
                    "its parent's disk is on another shard; remove the clone and add it again to \
                     share the parent"
                        .into(),
                ),
                (None, false) => Some(
                    "the disk of its parent is not online; if there is none, hob creates it when \
                        the clone is opened again"
                        .into(),
                ),
            };
        }
    }

    /// Removes parents' disks that hob created, if no clone uses them any more.
    pub(in crate::services) fn drop_idle_parents(&self) {
        let idle: Vec<String> = {
            let inner = self.registry.inner();
            let is_idle = |disk: &&DiskEntry| {
                let name = &disk.wanted.name;
                disk.wanted.for_clones && disk.busy.is_none() && inner.clones_of(name).is_empty()
            };
            inner.disks.values().filter(is_idle).map(|disk| disk.wanted.name.clone()).collect()
        };
        for name in idle {
            let service = self.clone();
            spawn(async move {
                match service.disk_remove(name.clone(), OnDirty::Drain).await {
                    Ok(_) => tracing::info!("disk {name}: removed with the last clone that used it"),
                    Err(error) => tracing::warn!(
                        "disk {name}: no clone uses it any more, but it cannot be removed: {error}"
                    ),
                }
            });
        }
    }

    /// Refuses to remove a parent's disk while clones use it.
    pub(in crate::services) fn check_no_clones(&self, name: &str) -> Result<()> {
        let inner = self.registry.inner();
        let clones = inner.clones_of(name);
        if !inner.disk(name)?.wanted.for_clones || clones.is_empty() {
            return Ok(());
        }
        Err(conflict!("{name} serves the parent of these clones: {}", clones.join(", "))
            .hint("hob removes it with the last clone"))
    }
}

impl DiskEntry {
    /// Returns the name of the disk that serves this clone's parent, or is to serve it; `None` if
    /// there is none.
    pub(in crate::services) fn wanted_parent(&self) -> Option<&str> {
        self.wanted.share_parent.as_ref()?.disk.as_deref()
    }

    /// Returns the name of the disk that serves the clone's parent if the parent has changed since
    /// that disk was opened.
    pub(in crate::services) fn changed_parent(&self) -> Option<&str> {
        let is_outdated = self.parent.as_ref().is_some_and(|link| link.is_outdated);
        self.wanted.share_parent.as_ref().filter(|_| is_outdated)?.disk.as_deref()
    }
}

impl Inner {
    /// Returns the names of the clones that use a disk as their parent, including offline clones.
    pub(in crate::services) fn clones_of(&self, name: &str) -> Vec<String> {
        let uses = |disk: &&DiskEntry| disk.wanted_parent() == Some(name);
        self.disks.values().filter(uses).map(|disk| disk.wanted.name.clone()).collect()
    }

    /// Returns the name of the disk that serves a parent, whether online or not; `None` if there is
    /// none.
    fn find_parent(&self, parent: &Parent) -> Option<String> {
        let is_known = |disk: &&DiskEntry| disk.constant.as_ref() == Some(&parent.constant);
        let is_same = |disk: &&DiskEntry| {
            let wanted = &disk.wanted;
            let is_read_alike = parent.format.is_none_or(|format| format_of(wanted) == format);
            wanted.read_only && !wanted.unlocked && wanted.backing == parent.spec && is_read_alike
        };
        let stays = || self.disks.values().filter(|disk| !matches!(disk.phase, DiskPhase::Removing));
        let found = stays().find(is_known).or_else(|| stays().find(is_same))?;
        Some(found.wanted.name.clone())
    }

    /// Returns the cache for a parent's disk, if the clone's settings give a size. The cache is in
    /// the pool of the clone's own cache, or in the only pool.
    fn parent_cache(
        &self,
        wanted: &DiskState,
        share: &ShareSpec,
    ) -> Result<Option<(CacheSpec, Vec<String>)>> {
        let Some(size) = share.cache else { return Ok(None) };
        let own = wanted.cache.as_ref().map(|cache| cache.pool.clone());
        let mut pools = self.pools.keys();
        let pool = match (own, pools.next(), pools.next()) {
            (Some(own), ..) => own,
            (None, Some(only), None) => only.clone(),
            (None, ..) => {
                return Err(ApiError::invalid("cannot choose a pool for the cache of the parent").hint(
                    "omit the size of the parent's cache and enable that cache later, or configure \
                    the clone's own cache in hob.toml; the parent's cache then uses the same pool",
                ));
            }
        };
        new_spec(pool.clone(), Some(size), &CacheSettings::default(), self.context(&pool)?).map(Some)
    }

    /// Returns an unused name for the disk of a parent.
    pub(in crate::services) fn parent_name(&self, spec: &str) -> String {
        let mut name = if Backing::is_path(spec) {
            plain(&Path::new(spec).file_name().unwrap_or_default().to_string_lossy())
        } else {
            // Options follow after a colon. A colon in a name is preceded by a backslash.
            let place = spec.split_once(':').map_or(spec, |(_, rest)| rest);
            let place = place.replace("\\:", "-");
            plain(place.split(':').next().unwrap_or_default())
        };
        name.truncate(NAME_CHARS_MAX - 5);
        let numbered = (2..).map(|number| format!("{name}-{number}"));
        let mut names = std::iter::once(name.clone()).chain(numbered);
        names.find(|name| self.check_export_name(name).is_ok()).expect("there are fewer names than numbers")
    }
}

/// Returns the image settings for the disk of a parent.
fn image_of(parent: &Parent) -> ImageSpec {
    let files = parent.format.map(|_| parent.files.iter().map(FileSpec::of).collect());
    ImageSpec { files, ..ImageSpec::of(parent.format) }
}

/// Returns the format in which a disk reads the file at its path.
fn format_of(wanted: &DiskState) -> Format {
    let decided = wanted.image.as_ref().and_then(|image| image.format);
    decided.map_or_else(|| Format::assumed(Path::new(&wanted.backing)), |FormatName(format)| format)
}

impl DiskEntry {
    /// Returns the name of the disk that serves the clone's parent. If there is none, returns the
    /// reason as the second value.
    pub(in crate::services) fn parent_view(&self) -> (Option<String>, Option<String>) {
        if self.wanted.share_parent.is_none() || !matches!(self.phase, DiskPhase::Online(_)) {
            return (None, None);
        }
        self.parent.as_ref().map_or((None, None), |link| (link.linked.clone(), link.reason.clone()))
    }
}
