//! A disk made of objects: reads, writes, zeroes, and the data that is still in memory.
//!
//! # Three places of data
//! The newest data of an object is in its *dirty* layer, which accepts writes. Older data is in the
//! layer that is being *written* to the object store, which does not change. The rest is in the
//! object store, under the generation in the map. A layer is removed from memory when it was
//! written, even before a manifest refers to it. [`commit`](super::commit) stores the map's content
//! as a flush point.
//!
//! # Limits
//! The number of objects with layers is limited: a write to another object first writes a layer to
//! the object store. The mutex of the disk's state is never held across an await. Tasks that change
//! anything are spawned, so that a cancelled caller does not leave them half done.
//!
//! The callers never run two calls at once that overlap in a 4 KiB sector if one of them is a
//! change. The engine ensures that.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use hob_engine::io::IoError;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;

use super::format::{CHANGES_MAX, Generation, Manifest, Name, SIZE_UNIT, Shape};
use super::layer::{self, Layer};
use super::map::Map;
use super::owner::{Here, Owner};
use super::store::{RetryingStore, StoreError};
use crate::backing::StatusExtent;

/// Maximum memory for data that is not in the object store yet, bytes. A disk of large objects has
/// at least `LAYERS_MIN` layers.
const LAYER_BYTES_MAX: u64 = 64 << 20;
const LAYERS_MIN: u64 = 4;

/// Maximum size of a single change in bytes: memory for it must be available at once.
const CHANGE_BYTES_MAX: u64 = 32 << 20;

/// Maximum total size of the objects that are written to the object store at the same time, bytes.
/// The number of these objects is at least `PUTS_MIN` and at most `PUTS_MAX`.
const PUT_BYTES_MAX: u64 = 64 << 20;
const PUTS_MIN: u64 = 2;
const PUTS_MAX: u64 = 32;

/// Maximum number of deletions in flight.
const DELETES_MAX: usize = 8;

/// Maximum number of times that a read looks up an object that is replaced during the read.
const LOOKS_MAX: usize = 16;

/// Maximum number of extents in one reply to a status query. The caller asks again for more.
const EXTENTS_MAX: usize = 4096;

/// The mutable state of an object disk.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Newest generation of each object in the object store.
    pub(super) map: Map,
    /// Generations of the map pages that the newest manifest names.
    pub(super) pages: Vec<Generation>,
    /// Objects whose generation may differ from the one in the map pages.
    pub(super) changed: BTreeSet<u64>,
    /// Dirty layers by object, each with a number. A layer with a lower number is older.
    pub(super) dirty: BTreeMap<u64, (u64, Layer)>,
    /// Layers that are being written to the object store.
    pub(super) writing: BTreeMap<u64, Arc<Layer>>,
    /// True while a manifest is being created. During this time nothing is added to the map.
    pub(super) committing: bool,
    /// Number of generations of this epoch that were assigned.
    pub(super) given: u64,
    /// Value of `given` when the newest manifest was built, even if its creation failed or had no
    /// reply. No manifest names a later generation of this epoch.
    pub(super) published: u64,
    /// Objects that are unreferenced after the next manifest.
    pub(super) garbage: BTreeSet<Name>,
    /// Number of changes since the disk was opened. `committed` is the number of these changes that
    /// the newest manifest contains.
    pub(super) changes: u64,
    pub(super) committed: u64,
    /// Field `content` of the newest manifest: the number of manifests that changed the disk's
    /// content.
    pub(super) content: u64,
    pub(super) sequence: u64,
    /// Whether the newest manifest must never be deleted.
    pub(super) stays: bool,
    /// Whether unreferenced objects of earlier owners (`inherited`) or of this owner (`leftovers`)
    /// may be in the object store.
    pub(super) inherited: bool,
    pub(super) leftovers: bool,
    /// Whether an object in the map was missing in the object store.
    pub(super) missed: bool,
    /// Whether another writer has taken the disk.
    pub(super) lost: bool,
}

/// An open disk.
pub(super) struct Disk {
    pub(super) shape: Shape,
    pub(super) epoch: u64,
    pub(super) owner: Owner,
    pub(super) store: Arc<RetryingStore>,
    pub(super) state: Mutex<State>,
    /// Notified when a layer was written, or a commit ended.
    pub(super) ended: Notify,
    /// Notified when another writer has taken the disk.
    pub(super) lost: Notify,
    /// Lock of the commit in progress.
    pub(super) turn: tokio::sync::Mutex<()>,
    pub(super) puts: Semaphore,
    pub(super) deletes: Semaphore,
    pub(super) deletions: AtomicUsize,
    layers_max: usize,
    /// Number of changed objects above which a flush writes map pages again.
    pub(super) changes_max: usize,
    /// This process's registration as writer; `None` for a disk opened read-only.
    pub(super) here: Option<Here>,
}

/// A part of a range, within one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    index: u64,
    /// Offset of the part in the object, bytes.
    at: usize,
    len: usize,
    /// Offset of the part in the range, bytes.
    from: usize,
}

impl Disk {
    /// Creates a disk from a manifest whose map was loaded.
    pub(super) fn new(
        store: Arc<RetryingStore>,
        owner: Owner,
        manifest: &Manifest,
        state: State,
        here: Option<Here>,
    ) -> Disk {
        let Manifest { shape, epoch, .. } = *manifest;
        let layers = (LAYER_BYTES_MAX / shape.object_bytes).max(LAYERS_MIN);
        let at_once = CHANGE_BYTES_MAX / shape.object_bytes + 2;
        let puts = (PUT_BYTES_MAX / shape.object_bytes).clamp(PUTS_MIN, PUTS_MAX);
        Disk {
            shape,
            epoch,
            owner,
            store,
            state: Mutex::new(state),
            ended: Notify::new(),
            lost: Notify::new(),
            turn: tokio::sync::Mutex::new(()),
            puts: Semaphore::new(puts as usize),
            deletes: Semaphore::new(DELETES_MAX),
            deletions: AtomicUsize::new(0),
            layers_max: layers.max(at_once) as usize,
            changes_max: CHANGES_MAX,
            here,
        }
    }

    /// Returns the disk with lower limits on layers and changes, for tests.
    #[cfg(test)]
    pub(super) fn narrow(self, layers_max: usize, changes_max: usize) -> Disk {
        Disk { layers_max, changes_max, ..self }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails if another writer has taken the disk.
    pub(super) fn check_ours(&self) -> Result<(), IoError> {
        if self.state().lost { Err(IoError::Failed) } else { Ok(()) }
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<(), IoError> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.shape.size_bytes);
        if inside && len > 0 { Ok(()) } else { Err(IoError::Invalid) }
    }

    fn parts(&self, offset: u64, len: u64) -> Vec<Part> {
        let (mut parts, mut from) = (Vec::new(), 0);
        while from < len {
            let (index, at) =
                ((offset + from) / self.shape.object_bytes, (offset + from) % self.shape.object_bytes);
            let part = (self.shape.object_bytes - at).min(len - from);
            parts.push(Part { index, at: at as usize, len: part as usize, from: from as usize });
            from += part;
        }
        parts
    }

    /// Returns the content of a range of bytes.
    pub(super) async fn read(self: &Arc<Self>, offset: u64, len: u64) -> Result<Vec<u8>, IoError> {
        self.check_range(offset, len)?;
        self.check_ours()?;
        let start = offset / SIZE_UNIT * SIZE_UNIT;
        let end = (offset + len).next_multiple_of(SIZE_UNIT);
        let parts = self.parts(start, end - start);
        let mut bytes = vec![0; (end - start) as usize];
        if let [part] = parts[..] {
            self.read_part(part, &mut bytes).await?;
        } else {
            let mut reads = JoinSet::new();
            for part in parts {
                let disk = self.clone();
                reads.spawn(async move {
                    let mut bytes = vec![0; part.len];
                    disk.read_part(part, &mut bytes).await.map(|()| (part, bytes))
                });
            }
            while let Some(read) = reads.join_next().await {
                let (part, read) = read.expect("reads do not panic")?;
                bytes[part.from..part.from + part.len].copy_from_slice(&read);
            }
        }
        bytes.drain(..(offset - start) as usize);
        bytes.truncate(len as usize);
        Ok(bytes)
    }

    async fn read_part(&self, part: Part, out: &mut [u8]) -> Result<(), IoError> {
        let mut gone = Generation::ABSENT;
        for _ in 0..LOOKS_MAX {
            let (generation, missing) = {
                let state = self.state();
                let dirty = state.dirty.get(&part.index).map(|(_, layer)| layer);
                let layers: Vec<&Layer> =
                    dirty.into_iter().chain(state.writing.get(&part.index).map(|layer| &**layer)).collect();
                out.fill(0);
                (state.map.get(part.index), layer::look(&layers, part.at, out))
            };
            let Some((span, missing)) = missing else { return Ok(()) };
            if generation.is_absent() {
                return Ok(());
            }
            if generation == gone {
                break;
            }
            let range = (part.at + span.start) as u64..(part.at + span.end) as u64;
            match self.store.get(Name::Data(part.index, generation), Some(range)).await {
                Ok(bytes) => {
                    layer::fill(out, &missing, &bytes);
                    return Ok(());
                }
                // Either the object was replaced and deleted after the map was read, or the object
                // is missing although it should exist.
                Err(StoreError::Absent) => gone = generation,
                Err(error) => return Err(io_error(&error)),
            }
        }
        self.look_who_has_it().await;
        tracing::error!(
            "the object {} is not in the object store: data is lost, or another host writes this disk",
            Name::Data(part.index, gone)
        );
        Err(IoError::Failed)
    }

    /// Buffers a write in memory. The write becomes durable with the next flush.
    pub(super) async fn write(self: &Arc<Self>, offset: u64, data: Bytes) -> Result<(), IoError> {
        self.check_range(offset, data.len() as u64)?;
        let end = offset + data.len() as u64;
        let (first, last) = (offset / SIZE_UNIT * SIZE_UNIT, end.next_multiple_of(SIZE_UNIT));
        if (first, last) == (offset, end) {
            return self.change(offset, data.len() as u64, Change::Write(&data)).await;
        }
        // hob writes whole units: the other bytes of the first and the last unit are written again.
        let mut whole = Vec::with_capacity((last - first) as usize);
        if first < offset {
            whole.extend(self.read(first, offset - first).await?);
        }
        whole.extend_from_slice(&data);
        if last > end {
            whole.extend(self.read(end, last - end).await?);
        }
        self.change(first, last - first, Change::Write(&whole)).await
    }

    /// Zeroes a range. The range stays allocated if `kept` is true.
    pub(super) async fn zero(self: &Arc<Self>, offset: u64, len: u64, kept: Kept) -> Result<(), IoError> {
        self.check_range(offset, len)?;
        let (first, end) = (offset.next_multiple_of(SIZE_UNIT), (offset + len) / SIZE_UNIT * SIZE_UNIT);
        if first >= end {
            return self.write(offset, vec![0; len as usize].into()).await;
        }
        if first > offset {
            self.write(offset, vec![0; (first - offset) as usize].into()).await?;
        }
        if offset + len > end {
            self.write(end, vec![0; (offset + len - end) as usize].into()).await?;
        }
        // Each object is handled separately, because a range may have any number of objects.
        for part in self.parts(first, end - first) {
            let at = part.index * self.shape.object_bytes + part.at as u64;
            self.change(at, part.len as u64, Change::Zero(kept)).await?;
        }
        Ok(())
    }

    /// Removes the objects that the range covers completely. Objects that the range covers in part
    /// stay unchanged.
    pub(super) async fn discard(self: &Arc<Self>, offset: u64, len: u64) -> Result<(), IoError> {
        self.check_range(offset, len)?;
        for part in self.parts(offset, len) {
            if part.len == self.shape.object_len(part.index) {
                let at = part.index * self.shape.object_bytes;
                self.change(at, part.len as u64, Change::Zero(Kept::No)).await?;
            }
        }
        self.check_ours()
    }

    /// Applies a change of whole units atomically.
    async fn change(self: &Arc<Self>, offset: u64, len: u64, change: Change<'_>) -> Result<(), IoError> {
        if self.here.is_none() {
            return Err(IoError::ReadOnly);
        }
        let parts = self.parts(offset, len);
        assert!(parts.len() <= self.layers_max, "a change has room at once");
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            match self.try_change(&parts, change)? {
                Tried::Done(full) => {
                    full.into_iter().for_each(|index| _ = tokio::spawn(self.clone().write_out(index)));
                    return Ok(());
                }
                Tried::NoRoom(Some(oldest)) => {
                    let out = tokio::spawn(self.clone().write_out(oldest)).await;
                    out.expect("writing out does not panic")?;
                }
                Tried::NoRoom(None) => ended.await,
            }
        }
    }

    fn try_change(&self, parts: &[Part], change: Change<'_>) -> Result<Tried, IoError> {
        let state = &mut *self.state();
        if state.lost {
            return Err(IoError::Failed);
        }
        let new = parts.iter().filter(|part| !state.dirty.contains_key(&part.index)).count();
        if state.dirty.len() + state.writing.len() + new > self.layers_max.max(parts.len()) {
            return Ok(Tried::NoRoom(state.begin_oldest()));
        }
        state.changes += 1;
        for part in parts {
            let len = self.shape.object_len(part.index);
            let is_whole = part.len == len;
            if let (Change::Zero(kept), true) = (change, is_whole) {
                state.make_zero(part.index, len, kept);
                continue;
            }
            let age = state.changes;
            let (_, layer) = state.dirty.entry(part.index).or_insert_with(|| (age, Layer::new(len)));
            match change {
                Change::Write(data) => layer.write(part.at, &data[part.from..part.from + part.len]),
                Change::Zero(kept) => {
                    layer.zero(part.at, part.len);
                    if kept == Kept::Yes {
                        layer.keep();
                    }
                }
            }
        }
        // Waiting does not make room in a full layer.
        let is_full = |part: &&Part| state.dirty.get(&part.index).is_some_and(|(_, layer)| layer.is_full());
        let full: Vec<u64> = parts.iter().filter(is_full).map(|part| part.index).collect();
        Ok(Tried::Done(full.into_iter().filter(|index| state.begin(*index)).collect()))
    }

    /// Writes to the object store the layer of an object that [`State::begin`] has set aside. If
    /// that fails, the layer is dirty again.
    pub(super) async fn write_out(self: Arc<Self>, index: u64) -> Result<(), IoError> {
        let _place = self.puts.acquire().await.expect("it is never closed");
        let (layer, base) = {
            let state = self.state();
            let layer = state.writing.get(&index).expect("it was begun").clone();
            (layer, state.map.get(index))
        };
        let mut made = Generation::ABSENT;
        let mut result = self.put_object(index, &layer, base, &mut made).await;
        if matches!(result, Err(StoreError::NoSpace(_))) && self.has_freed_space().await {
            self.state().note_failed_put(index, std::mem::take(&mut made));
            result = self.put_object(index, &layer, base, &mut made).await;
        }
        let mut state = self.state();
        let layer = state.writing.remove(&index).expect("it is on its way");
        match result {
            Ok(()) => {
                state.replace(index, made);
                drop(state);
                self.ended.notify_waiters();
                Ok(())
            }
            Err(error) => {
                state.note_failed_put(index, made);
                state.missed |= error == StoreError::Absent;
                state.take_back(index, &layer);
                drop(state);
                self.ended.notify_waiters();
                Err(io_error(&error))
            }
        }
    }

    async fn put_object(
        &self,
        index: u64,
        layer: &Arc<Layer>,
        base: Generation,
        made: &mut Generation,
    ) -> Result<(), StoreError> {
        let bytes = if layer.full().is_some() {
            Bytes::from_owner(FullLayer(layer.clone()))
        } else if layer.is_whole() || base.is_absent() {
            layer.over(None).into()
        } else {
            let len = self.shape.object_len(index) as u64;
            let base = self.store.get(Name::Data(index, base), Some(0..len)).await?;
            layer.over(Some(&base)).into()
        };
        if !layer.keeps() && layer::is_zero(&bytes) {
            return Ok(());
        }
        *made = self.state().next_generation(self.epoch);
        self.store.put(Name::Data(index, *made), bytes).await
    }

    /// Returns the known allocation of a range: data in memory, and existing objects.
    pub(super) fn status(&self, offset: u64, len: u64) -> Result<Vec<StatusExtent>, IoError> {
        self.check_range(offset, len)?;
        let state = self.state();
        let mut extents: Vec<StatusExtent> = Vec::new();
        for part in self.parts_lazily(offset, len) {
            let is_there = !state.map.get(part.index).is_absent()
                || state.dirty.contains_key(&part.index)
                || state.writing.contains_key(&part.index);
            let is_last = extents.len() == EXTENTS_MAX;
            match extents.last_mut() {
                Some(last) if last.hole != is_there => last.len += part.len as u64,
                _ if is_last => break,
                _ => extents.push(StatusExtent { len: part.len as u64, hole: !is_there, zero: !is_there }),
            }
        }
        Ok(extents)
    }

    fn parts_lazily(&self, offset: u64, len: u64) -> impl Iterator<Item = Part> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            if from >= len {
                return None;
            }
            let part = self.parts(offset + from, (len - from).min(self.shape.object_bytes))[0];
            from += part.len as u64;
            Some(part)
        })
    }

    /// Returns a number that changes with the disk's content; `None` if the newest manifest does
    /// not contain all changes.
    pub(super) fn mark(&self) -> Option<u64> {
        let state = self.state();
        (state.changes == state.committed).then_some(state.content)
    }

    /// Deletes objects that no manifest names whenever the object store is full, until the future
    /// is dropped.
    pub(super) async fn free_when_full(self: &Arc<Self>) {
        loop {
            self.store.filled().await;
            self.delete_unpublished();
        }
    }

    /// Deletes objects that no manifest names, because the object store is full. Returns true if
    /// objects were deleted, or if deletions of another call were in progress.
    async fn has_freed_space(self: &Arc<Self>) -> bool {
        self.delete_unpublished();
        let is_freeing = self.deletions.load(Ordering::Relaxed) > 0;
        is_freeing && self.deleted().await
    }

    /// Begins to delete the unreferenced objects that no manifest names. The other unreferenced
    /// objects are needed until the next manifest is durable. Returns true if there are objects to
    /// delete.
    pub(super) fn delete_unpublished(self: &Arc<Self>) -> bool {
        let names = self.state().take_unpublished(self.epoch);
        let is_freeing = !names.is_empty();
        self.forget(names);
        is_freeing
    }

    /// Deletes unreferenced objects in the background, after a manifest is durable or if no
    /// manifest names them.
    pub(super) fn forget(self: &Arc<Self>, names: Vec<Name>) {
        if names.is_empty() {
            return;
        }
        if self.deletions.fetch_add(names.len(), Ordering::Relaxed) > DELETIONS_MAX {
            // The object store is slower than the writes. When the disk is opened next, these
            // objects are found.
            self.deletions.fetch_sub(names.len(), Ordering::Relaxed);
            self.state().leftovers = true;
            return;
        }
        let disk = self.clone();
        tokio::spawn(async move {
            for name in names {
                let _place = disk.deletes.acquire().await.expect("it is never closed");
                if disk.store.delete(name).await.is_err() {
                    disk.state().leftovers = true;
                }
                disk.deletions.fetch_sub(1, Ordering::Relaxed);
            }
        });
    }
}

/// Maximum number of objects that wait for their deletion.
const DELETIONS_MAX: usize = 1 << 17;

/// A change of a range.
#[derive(Clone, Copy)]
enum Change<'a> {
    Write(&'a [u8]),
    Zero(Kept),
}

/// Whether zeroes stay allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    Yes,
    No,
}

enum Tried {
    /// The change was made. The layers of the listed objects are full and should be written to the
    /// object store.
    Done(Vec<u64>),
    /// The maximum number of layers is in use. The caller first writes the layer of this object to
    /// the object store. `None` means that the caller waits until a write in progress ends.
    NoRoom(Option<u64>),
}

impl State {
    /// Sets the oldest dirty layer aside, to be written to the object store.
    fn begin_oldest(&mut self) -> Option<u64> {
        let may = |index: &u64| !self.committing && !self.writing.contains_key(index);
        let oldest = self.dirty.iter().filter(|(index, _)| may(index)).min_by_key(|(_, (age, _))| *age);
        let index = *oldest?.0;
        self.begin(index).then_some(index)
    }

    /// Sets an object's dirty layer aside, to be written to the object store. Returns false if the
    /// layer must wait.
    fn begin(&mut self, index: u64) -> bool {
        if self.committing || self.writing.contains_key(&index) {
            return false;
        }
        let Some((_, layer)) = self.dirty.remove(&index) else { return false };
        self.writing.insert(index, Arc::new(layer));
        true
    }

    /// Makes a whole object zero.
    fn make_zero(&mut self, index: u64, len: usize, kept: Kept) {
        if kept == Kept::No && !self.committing && !self.writing.contains_key(&index) {
            self.dirty.remove(&index);
            if !self.map.get(index).is_absent() {
                self.replace(index, Generation::ABSENT);
            }
            return;
        }
        let mut layer = Layer::zeroes(len);
        if kept == Kept::Yes {
            layer.keep();
        }
        self.dirty.insert(index, (self.changes, layer));
    }

    /// Records the new generation of an object.
    fn replace(&mut self, index: u64, generation: Generation) {
        let before = self.map.set(index, generation);
        self.changed.insert(index);
        if !before.is_absent() {
            self.garbage.insert(Name::Data(index, before));
        }
    }

    /// Makes a layer dirty again that could not be written to the object store.
    fn take_back(&mut self, index: u64, layer: &Arc<Layer>) {
        match self.dirty.get_mut(&index) {
            Some((_, newer)) => newer.put_under(layer),
            None => _ = self.dirty.insert(index, (0, Layer::clone(layer))),
        }
    }

    /// Records an object whose put failed; [`Generation::ABSENT`] if there was no put. The object
    /// may exist, or appear later.
    fn note_failed_put(&mut self, index: u64, made: Generation) {
        if !made.is_absent() {
            self.garbage.insert(Name::Data(index, made));
            self.leftovers = true;
        }
    }

    /// Removes from `garbage` the objects that no manifest names, and returns them. A manifest
    /// whose creation had no reply may appear later, so its objects are not among them.
    fn take_unpublished(&mut self, epoch: u64) -> Vec<Name> {
        let is_unpublished = |name: &Name| match name {
            Name::Data(_, made) | Name::Page(_, made) => {
                made.epoch() == epoch && made.count() > self.published
            }
            Name::Manifest(_) => false,
        };
        let names: Vec<Name> = self.garbage.iter().copied().filter(is_unpublished).collect();
        names.iter().for_each(|name| _ = self.garbage.remove(name));
        names
    }

    pub(super) fn next_generation(&mut self, epoch: u64) -> Generation {
        self.given += 1;
        Generation::new(epoch, self.given)
    }
}

/// A layer of which all bytes were written.
struct FullLayer(Arc<Layer>);

impl AsRef<[u8]> for FullLayer {
    fn as_ref(&self) -> &[u8] {
        self.0.full().expect("all of it was written")
    }
}

/// Converts an error of the object store for the engine.
pub(super) fn io_error(error: &StoreError) -> IoError {
    match error {
        StoreError::NoSpace(_) => IoError::NoSpace,
        _ => IoError::Failed,
    }
}
