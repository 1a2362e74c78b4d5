//! Creates, opens and unlocks disks in an object store. A writer registers by creating the manifest
//! after the newest one.

use std::sync::Arc;

use tokio::task::JoinSet;

use super::disk::{Disk, State};
use super::format::{EPOCH_MAX, Generation, Manifest, Name, Shape, decode_page};
use super::map::Map;
use super::owner::{Here, Owner, OwnerLiveness};
use super::store::{RetryingStore, StoreError};
use super::worker::CLOSE_MAX;

/// Maximum number of searches for the newest manifest. A search fails if the manifest is replaced
/// before it was read.
const LOOKS_MAX: usize = 10;

/// Reason why an object disk cannot be opened or created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// A process of this host has the disk open.
    InUse(String),
    /// The request is invalid, or the state of the disk or the object store does not allow it. The
    /// text says why.
    Unfit(String),
    /// The object store failed a request.
    Store(String),
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Trouble {
        Trouble::Store(error.to_string())
    }
}

/// Returns the newest manifest; `None` if there is no disk.
pub(super) async fn newest(store: &RetryingStore) -> Result<Option<Manifest>, Trouble> {
    for _ in 0..LOOKS_MAX {
        let Some(sequence) = store.manifests().await?.into_iter().max() else { return Ok(None) };
        match store.get(Name::Manifest(sequence), None).await {
            // The next manifest was written.
            Err(StoreError::Absent) => {}
            found => {
                let manifest = Manifest::decode(&found?, sequence);
                let unfit = |error| Trouble::Unfit(format!("{}: {error}", Name::Manifest(sequence)));
                return manifest.map(Some).map_err(unfit);
            }
        }
    }
    Err(Trouble::Store("the disk's manifests change faster than hob can read them".into()))
}

/// Creates a disk of zeroes.
pub(super) async fn create(store: &RetryingStore, shape: Shape) -> Result<Manifest, Trouble> {
    shape.check().map_err(Trouble::Unfit)?;
    if let Some(there) = newest(store).await? {
        let size = there.shape.size_bytes;
        return Err(Trouble::Unfit(format!(
            "a disk of {size} bytes exists already; remove it or choose another location"
        )));
    }
    let manifest = Manifest {
        shape,
        sequence: 1,
        epoch: 1,
        content: 0,
        closed: true,
        leftovers: false,
        stays: false,
        owner: Owner::default(),
        pages: vec![Generation::ABSENT; shape.pages()],
        changes: Vec::new(),
    };
    match store.create(Name::Manifest(1), manifest.encode().into()).await {
        Err(StoreError::Present) => {
            Err(Trouble::Unfit("another client has just created a disk there".into()))
        }
        result => {
            result?;
            check_conditions(store, &manifest).await?;
            Ok(manifest)
        }
    }
}

/// Checks that the object store refuses to create an existing object. A store that allows it cannot
/// exclude a second writer.
async fn check_conditions(store: &RetryingStore, there: &Manifest) -> Result<(), Trouble> {
    match store.create_again(Name::Manifest(there.sequence), there.encode().into()).await {
        Err(StoreError::Present) => Ok(()),
        Ok(()) => Err(Trouble::Unfit(
            "the store replaces existing objects in spite of If-None-Match: *, so it cannot exclude a second writer".into(),
        )),
        Err(error) => Err(error.into()),
    }
}

/// Why a writer takes a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taking {
    /// The writer will write the disk.
    Own,
    /// The writer releases the disk from its owner for other writers.
    Release,
}

/// A disk for which a writer of this process has created the newest manifest.
struct Taken {
    before: Manifest,
    manifest: Manifest,
    /// Map from the disk's objects to their generations; empty if the disk was only released.
    map: Map,
}

/// Creates a manifest after the newest one, so that the previous owner finds its next number taken.
async fn take(
    store: &Arc<RetryingStore>,
    owner: &Owner,
    taking: Taking,
    may: impl Fn(&Manifest) -> Result<(), Trouble>,
) -> Result<Taken, Trouble> {
    for _ in 0..LOOKS_MAX {
        let found = newest(store).await?;
        let before = found.ok_or_else(no_disk)?;
        may(&before)?;
        // The disk is loaded before anything is stored: hob retries opening a disk that cannot be
        // loaded again and again, and each manifest that is stored may stay forever.
        let map = match taking {
            Taking::Own => load(store, &before).await,
            Taking::Release => Ok(Map::new(&before.shape)),
        };
        let map = match map {
            // The manifest may have a successor.
            Err(StoreError::Absent) if is_over(store, &before).await? => continue,
            map => map?,
        };
        if before.epoch == EPOCH_MAX {
            return Err(Trouble::Unfit(
                "the disk was opened 2^24 times, the maximum; copy it to a new disk".into(),
            ));
        }
        check_conditions(store, &before).await?;
        let manifest = Manifest {
            sequence: before.sequence + 1,
            epoch: before.epoch + 1,
            closed: taking == Taking::Release,
            leftovers: before.leftovers || !before.closed,
            stays: !before.closed,
            owner: if taking == Taking::Own { owner.clone() } else { Owner::default() },
            ..before.clone()
        };
        match store.create(Name::Manifest(manifest.sequence), manifest.encode().into()).await {
            // Another host was faster.
            Err(StoreError::Present) => continue,
            result => result?,
        }
        // The number may have been free because other writers deleted it after use. Then there are
        // manifests with higher numbers.
        if !is_over(store, &manifest).await? {
            return Ok(Taken { before, manifest, map });
        }
    }
    Err(Trouble::Store("other writers take the disk repeatedly".into()))
}

/// Returns true if a manifest newer than `manifest` exists.
async fn is_over(store: &RetryingStore, manifest: &Manifest) -> Result<bool, StoreError> {
    Ok(store.manifests().await?.into_iter().max() != Some(manifest.sequence))
}

/// Refuses to unlock a disk that no owner has, or whose owner is a running process of this host.
fn may_unlock(there: &Manifest) -> Result<(), Trouble> {
    if there.closed {
        return Err(Trouble::Unfit("no host has the disk open, so there is nothing to unlock".into()));
    }
    match there.owner.presence(&Owner::this(), false) {
        OwnerLiveness::Here => {
            Err(Trouble::InUse(format!("{} has the disk open and still runs; stop it first", there.owner)))
        }
        OwnerLiveness::Gone | OwnerLiveness::Elsewhere => Ok(()),
    }
}

/// Returns the newest manifest of a disk that [`unlock`] would release, without a change.
pub(super) async fn check_unlock(store: &RetryingStore) -> Result<Manifest, Trouble> {
    let there = newest(store).await?.ok_or_else(no_disk)?;
    may_unlock(&there)?;
    Ok(there)
}

/// Releases a disk that its owner did not close.
pub(super) async fn unlock(store: &Arc<RetryingStore>) -> Result<Manifest, Trouble> {
    take(store, &Owner::default(), Taking::Release, may_unlock).await.map(|taken| taken.before)
}

/// Opens a disk read-only with its present content.
pub(super) async fn open_to_read(store: Arc<RetryingStore>) -> Result<Disk, Trouble> {
    for _ in 0..LOOKS_MAX {
        let manifest = newest(&store).await?.ok_or_else(no_disk)?;
        match load(&store, &manifest).await {
            // In the meantime another manifest has followed this one.
            Err(StoreError::Absent) => {}
            map => return Ok(Disk::new(store, Owner::default(), &manifest, state(&manifest, map?), None)),
        }
    }
    Err(Trouble::Store("the disk's manifests change faster than hob can read them".into()))
}

pub(super) async fn open_to_write(store: Arc<RetryingStore>) -> Result<Disk, Trouble> {
    let found = newest(&store).await?.ok_or_else(no_disk)?;
    match Here::enter(found.shape.uuid, CLOSE_MAX) {
        Some(here) => open_as(store, Owner::this(), here).await,
        None => Err(Trouble::InUse("this process has the disk open already".into())),
    }
}

/// Takes a disk for writing, as the given owner.
pub(super) async fn open_as(store: Arc<RetryingStore>, this: Owner, here: Here) -> Result<Disk, Trouble> {
    let may = |there: &Manifest| {
        if there.closed {
            return Ok(());
        }
        match there.owner.presence(&this, false) {
            OwnerLiveness::Gone => Ok(()),
            OwnerLiveness::Here => Err(Trouble::InUse(there.owner.to_string())),
            OwnerLiveness::Elsewhere => Err(Trouble::Unfit(format!(
                "{} has the disk open, or did not close it. A disk can have only one writer: end \
                that process; if it will never return, run 'hob objects unlock'",
                there.owner
            ))),
        }
    };
    let Taken { before, manifest, map } = take(&store, &this, Taking::Own, may).await?;
    let mut state = state(&manifest, map);
    if manifest.leftovers
        && let Err(error) = store.tidy().await
    {
        tracing::warn!("cannot remove the files of interrupted writes from the directory: {error}");
        state.leftovers = true;
    }
    if !before.stays {
        state.garbage.insert(Name::Manifest(before.sequence));
    }
    Ok(Disk::new(store, this, &manifest, state, Some(here)))
}

fn no_disk() -> Trouble {
    Trouble::Unfit("the disk does not exist; create it with 'hob objects create'".to_owned())
}

fn state(manifest: &Manifest, map: Map) -> State {
    State {
        map,
        pages: manifest.pages.clone(),
        changed: manifest.changes.iter().map(|(index, _)| *index).collect(),
        content: manifest.content,
        sequence: manifest.sequence,
        stays: manifest.stays,
        inherited: manifest.leftovers,
        ..State::default()
    }
}

/// Loads the object generations that a manifest refers to.
async fn load(store: &Arc<RetryingStore>, manifest: &Manifest) -> Result<Map, StoreError> {
    let shape = manifest.shape;
    let mut map = Map::new(&shape);
    let mut gets = JoinSet::new();
    for (page, generation) in manifest.pages.iter().copied().enumerate() {
        if !generation.is_absent() {
            let store = store.clone();
            gets.spawn(async move {
                let name = Name::Page(page as u32, generation);
                let bytes = store.get(name, None).await?;
                let entries = decode_page(&bytes, &shape, page, generation);
                entries
                    .map(|entries| (page, entries))
                    .map_err(|error| StoreError::Refused(format!("{name}: {error}")))
            });
        }
    }
    while let Some(page) = gets.join_next().await {
        let (page, entries) = page.expect("pages are read without panic")?;
        map.load(page, entries);
    }
    for (index, generation) in &manifest.changes {
        map.set(*index, *generation);
    }
    Ok(map)
}

/// Returns the newest manifest, and the number of objects that it refers to.
pub(super) async fn look(store: &Arc<RetryingStore>) -> Result<(Manifest, u64), Trouble> {
    for _ in 0..LOOKS_MAX {
        let manifest = newest(store).await?.ok_or_else(no_disk)?;
        match load(store, &manifest).await {
            Err(StoreError::Absent) => {}
            map => return Ok((manifest, map?.present())),
        }
    }
    Err(Trouble::Store("the disk's manifests change faster than hob can read them".into()))
}
