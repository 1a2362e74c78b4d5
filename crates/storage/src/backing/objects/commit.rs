//! Flushes of an object disk: all layers become objects, and a manifest makes them valid.
//!
//! A flush waits for objects that are being written, and then freezes the dirty layers: this moment
//! is the flush point. The flush writes the layers as objects. The flush also writes map pages if
//! too much has changed since the last map pages. At last, the flush creates the manifest under the
//! next number, if no other manifest has that number. Between the freeze and the creation of the
//! manifest, nothing else is added to the map. If a step fails, the frozen layers become dirty
//! again and the next flush retries.
//!
//! # Owner of a number
//! Each time a writer takes the disk, a new *epoch* begins. An attempt to create a manifest that
//! timed out may succeed later. So if a number is taken, hob reads the manifest with this number. A
//! manifest of this epoch is from an earlier flush of this owner and is ignored, because the next
//! manifest has all of its content. A manifest of another epoch means that another writer has taken
//! the disk. A reply that is no undamaged manifest says nothing about the owner: the disk stays with
//! this owner, and the flush that needs the reply retries.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use hob_engine::io::IoError;
use tokio::task::JoinSet;

use super::disk::{Disk, io_error};
use super::format::{Generation, Manifest, Name, encode_page};
use super::map::place;
use super::store::StoreError;

/// Maximum number of manifest numbers that one flush skips. A flush skips a number if an earlier
/// flush of this owner used it in an attempt that timed out and succeeded later.
const OWN_MAX: usize = 64;

/// Maximum time that closing waits for deletions of objects.
const DELETED_MAX: Duration = Duration::from_secs(3);

/// Whether the disk is used after a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// The disk is used after the commit.
    Goes,
    /// The disk is closed after the commit.
    Closes,
}

impl Disk {
    /// Flushes the disk: makes everything durable that was acknowledged before.
    pub(super) async fn flush(self: &Arc<Self>) -> Result<(), IoError> {
        self.check_ours()?;
        if self.here.is_none() {
            return Ok(());
        }
        let wanted = self.state().changes;
        let disk = self.clone();
        let flush = tokio::spawn(async move {
            let _turn = disk.turn.lock().await;
            disk.check_ours()?;
            // The previous commit may already include these changes.
            if disk.state().committed >= wanted { Ok(()) } else { disk.commit(After::Goes).await }
        });
        flush.await.expect("flushes do not panic")
    }

    /// Flushes a last time, and records in the manifest that no host owns the disk.
    pub(super) async fn close(self: &Arc<Self>) -> Result<(), IoError> {
        if self.here.is_none() || self.state().lost {
            return Ok(());
        }
        // Closing first deletes the garbage of earlier manifests. The last manifest then records
        // that there is none.
        self.flush().await?;
        if !self.deleted().await {
            self.state().leftovers = true;
        }
        let disk = self.clone();
        let close = tokio::spawn(async move {
            let _turn = disk.turn.lock().await;
            disk.commit(After::Closes).await
        });
        close.await.expect("closing does not panic")?;
        self.deleted().await;
        Ok(())
    }

    /// Waits for a limited time until all deletions are done.
    pub(super) async fn deleted(&self) -> bool {
        let deadline = tokio::time::Instant::now() + DELETED_MAX;
        while self.deletions.load(Ordering::Relaxed) > 0 {
            if tokio::time::Instant::now() > deadline {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        true
    }

    /// Periodic check: verifies the ownership, and flushes data that was already unflushed at the
    /// last check. `seen` is the value that the previous check returned.
    pub(super) async fn look_after(self: &Arc<Self>, seen: u64) -> u64 {
        if self.here.is_none() && self.store.has_outage() {
            // A reader makes no other periodic call that notices the end of the outage.
            let newest = self.state().sequence;
            let _ = self.store.peek_manifest(newest).await;
        }
        if self.here.is_none() || self.state().lost {
            return seen;
        }
        self.look_who_has_it().await;
        let (changes, committed) = {
            let state = self.state();
            (state.changes, state.committed)
        };
        if seen > committed
            && let Err(error) = self.flush().await
        {
            tracing::warn!("cannot write changes of the disk to the object store: {error:?}");
        }
        changes
    }

    /// Marks the disk as lost if another writer has taken it.
    pub(super) async fn look_who_has_it(&self) {
        // A commit in progress detects this in any case.
        let Ok(_turn) = self.turn.try_lock() else { return };
        self.look_at_next().await;
    }

    /// Checks whether another writer created the next manifest. The caller holds `turn`.
    async fn look_at_next(&self) {
        let next = self.state().sequence + 1;
        if let Ok(bytes) = self.store.peek_manifest(next).await {
            let _ = self.is_own(next, &bytes);
        }
    }

    /// Commits all changes with a new manifest. The caller holds `turn`.
    async fn commit(self: &Arc<Self>, after: After) -> Result<(), IoError> {
        self.stop_writing_out().await;
        let (frozen, point) = {
            let state = &mut *self.state();
            let frozen: Vec<u64> = state.dirty.keys().copied().collect();
            for (index, (_, layer)) in std::mem::take(&mut state.dirty) {
                state.writing.insert(index, Arc::new(layer));
            }
            (frozen, state.changes)
        };
        let mut outs = JoinSet::new();
        for index in frozen {
            outs.spawn(self.clone().write_out(index));
        }
        let mut result = Ok(());
        while let Some(out) = outs.join_next().await {
            result = result.and(out.expect("writing out does not panic"));
        }
        if result.is_ok() {
            // The next manifest does not name these objects either, and may need their space.
            let is_freeing = self.delete_unpublished();
            let mut published = self.publish(point, after).await;
            if is_freeing && matches!(published, Err(StoreError::NoSpace(_))) && self.deleted().await {
                published = self.publish(point, after).await;
            }
            result = published.map_err(|error| io_error(&error));
        }
        if std::mem::take(&mut self.state().missed) {
            // Another owner of the disk may have deleted the object.
            self.look_at_next().await;
        }
        self.state().committing = false;
        self.ended.notify_waiters();
        result
    }

    /// Starts no further writes of layers until the commit ends, and waits for those in progress.
    async fn stop_writing_out(&self) {
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            {
                let mut state = self.state();
                state.committing = true;
                if state.writing.is_empty() {
                    return;
                }
            }
            ended.await;
        }
    }

    /// Makes the map's content durable with a new manifest.
    async fn publish(self: &Arc<Self>, point: u64, after: After) -> Result<(), StoreError> {
        let pages = self.renew_pages().await?;
        let (mut manifest, mut garbage) = {
            let state = &mut *self.state();
            state.published = state.given;
            let changes = match &pages {
                Some(_) => Vec::new(),
                None => state.changed.iter().map(|index| (*index, state.map.get(*index))).collect(),
            };
            let manifest = Manifest {
                shape: self.shape,
                sequence: state.sequence + 1,
                epoch: self.epoch,
                content: state.content + u64::from(state.committed != point),
                closed: after == After::Closes,
                leftovers: state.leftovers || state.inherited,
                stays: false,
                owner: self.owner.clone(),
                pages: pages.clone().unwrap_or_else(|| state.pages.clone()),
                changes,
            };
            let mut garbage: Vec<Name> = state.garbage.iter().copied().collect();
            if !state.stays {
                garbage.push(Name::Manifest(state.sequence));
            }
            (manifest, garbage)
        };
        let renewed: Vec<Name> = {
            let state = self.state();
            let new = manifest.pages.iter().zip(&state.pages).enumerate();
            let new = new.filter(|(_, (new, old))| new != old && !new.is_absent());
            new.map(|(page, (new, _))| Name::Page(page as u32, *new)).collect()
        };
        let result = self.create_next(&mut manifest, &mut garbage).await;
        match &result {
            Ok(()) => {
                garbage.extend(self.install(&manifest, pages.is_some(), point, &garbage));
                self.forget(garbage);
            }
            // The manifest may exist nevertheless, until the next one exists.
            Err(_) => self.state().garbage.extend(renewed),
        }
        result
    }

    /// Creates a manifest under the first free number. Skips numbers that earlier flushes of this
    /// owner have used in attempts that timed out and succeeded later.
    async fn create_next(&self, manifest: &mut Manifest, garbage: &mut Vec<Name>) -> Result<(), StoreError> {
        for _ in 0..OWN_MAX {
            let (name, bytes) = (Name::Manifest(manifest.sequence), Bytes::from(manifest.encode()));
            match self.store.create(name, bytes).await {
                Err(StoreError::Present) => {
                    let there = self.store.get_manifest(manifest.sequence).await?;
                    if !self.is_own(manifest.sequence, &there) {
                        return Err(StoreError::Refused("another host has taken the disk".into()));
                    }
                    garbage.push(name);
                    manifest.sequence += 1;
                }
                result => return result,
            }
        }
        Err(StoreError::Failed("the numbers of the next 64 manifests are all taken".into()))
    }

    /// Records a durable manifest. Returns the objects that are no longer referenced, in addition
    /// to the known ones.
    fn install(&self, manifest: &Manifest, renewed: bool, point: u64, garbage: &[Name]) -> Vec<Name> {
        let state = &mut *self.state();
        garbage.iter().for_each(|name| _ = state.garbage.remove(name));
        let before = std::mem::replace(&mut state.pages, manifest.pages.clone());
        if renewed {
            state.changed.clear();
        }
        (state.sequence, state.content) = (manifest.sequence, manifest.content);
        (state.committed, state.stays) = (point, manifest.stays);
        let renewed = before.iter().zip(&manifest.pages).enumerate();
        let gone = renewed.filter(|(_, (before, now))| before != now && !before.is_absent());
        gone.map(|(page, (before, _))| Name::Page(page as u32, *before)).collect()
    }

    /// Writes the map pages again if too many objects changed since the last ones. The manifest
    /// then refers to the new pages.
    async fn renew_pages(self: &Arc<Self>) -> Result<Option<Vec<Generation>>, StoreError> {
        let (mut pages, wanted) = {
            let state = self.state();
            if state.changed.len() <= self.changes_max {
                return Ok(None);
            }
            let wanted: BTreeSet<usize> = state.changed.iter().map(|index| place(*index).0).collect();
            (state.pages.clone(), wanted)
        };
        let mut puts = JoinSet::new();
        for page in wanted {
            let disk = self.clone();
            puts.spawn(async move { (page, disk.put_page(page).await) });
        }
        let mut result = Ok(());
        while let Some(put) = puts.join_next().await {
            match put.expect("pages are put without panic") {
                (page, Ok(generation)) => pages[page] = generation,
                (_, Err(error)) => result = Err(error),
            }
        }
        if let Err(error) = result {
            // Pages that were stored are unreferenced.
            let state = &mut *self.state();
            let made = pages.iter().zip(&state.pages).enumerate().filter(|(_, (new, old))| new != old);
            state.garbage.extend(made.map(|(page, (new, _))| Name::Page(page as u32, *new)));
            state.garbage.retain(|name| !matches!(name, Name::Page(_, generation) if generation.is_absent()));
            return Err(error);
        }
        Ok(Some(pages))
    }

    async fn put_page(&self, page: usize) -> Result<Generation, StoreError> {
        let _place = self.puts.acquire().await.expect("it is never closed");
        let (generation, bytes) = {
            let state = &mut *self.state();
            if state.map.page(page).is_none() {
                return Ok(Generation::ABSENT);
            }
            let generation = state.next_generation(self.epoch);
            let entries = state.map.page(page).expect("there is something in it");
            (generation, encode_page(&self.shape, page, generation, entries))
        };
        let name = Name::Page(page as u32, generation);
        let result = self.store.put(name, bytes.into()).await;
        if result.is_err() {
            let mut state = self.state();
            state.garbage.insert(name);
            state.leftovers = true;
        }
        result.map(|()| generation)
    }

    /// Returns true if this owner created the manifest in its present ownership. If another owner
    /// made it, the disk is marked as lost.
    fn is_own(&self, sequence: u64, bytes: &[u8]) -> bool {
        match Manifest::decode(bytes, sequence) {
            Ok(there) if there.epoch == self.epoch && there.owner == self.owner => return true,
            Ok(there) => tracing::error!("{} took over the disk: writes on this host are lost", there.owner),
            Err(error) => {
                tracing::error!(
                    "{}: {error}: this host can no longer flush the disk",
                    Name::Manifest(sequence)
                )
            }
        }
        self.state().lost = true;
        self.ended.notify_waiters();
        self.lost.notify_one();
        false
    }
}
