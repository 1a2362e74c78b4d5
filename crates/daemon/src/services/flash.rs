//! A pool of flash devices, as the services of the daemon use it: the [`Pool`] of the storage crate
//! behind a lock. Its operations run on threads that may block.
//!
//! Pool operations read and write devices, which may hang. The control thread only uses the device
//! states that the last operation returned.
//!
//! A newly opened device allows no allocation until it is [admitted](Flash::set_admission), because
//! the shards must open it first.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::Duration;

use hob_control::Size;
use hob_engine::command::{DataSegment, Segment};
use hob_engine::units::DeviceId;
use hob_storage::pool::recovery::Recovery;
use hob_storage::pool::{
    Admission, DeviceInfo, DeviceSpec, FormerSuperblock, Overwrite, OwnerId, Pool, PoolError, SwapArea,
    check_all_answer, check_answers, check_returned, is_disconnected,
};
use tokio::time::Instant;

use crate::api_error::{ApiError, Result, conflict, failed};
use crate::config::flash_stall_ms_default;
use crate::hardware::FlashDevice;
use crate::swap::FileId;
use crate::watchdog::contained;

/// hob opens a device only if the device answers a read and a flush within this time.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Returns [`ANSWER_MAX`], or a longer time if hob's own tests allow flash to stall for longer.
pub(super) fn answer_max() -> Duration {
    ANSWER_MAX.max(Duration::from_millis(flash_stall_ms_default()))
}

/// Maximum wait for the pool's lock in [`Flash::read_if_free`], and the pause between two attempts.
const FREE_MAX: Duration = Duration::from_secs(1);
const FREE_EVERY: Duration = Duration::from_millis(20);

/// Number of segments that an allocation requests: minimum and maximum.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) least: u64,
    pub(super) most: u64,
    /// Number of segments that stay free on each device.
    pub(super) spare: u64,
}

/// A handle to a pool; clones of the handle refer to the same pool. Device ids are unique only
/// within the pool.
#[derive(Clone, Debug)]
pub(super) struct Flash {
    name: String,
    segment_bytes: u64,
    /// The open pool; `None` while no device is open.
    pool: Arc<Mutex<Option<Pool>>>,
}

/// A function that allocates a journal ring. Its arguments are the owner, the ring's number, the
/// number of copies and of segments, and the devices to avoid.
type AllocateRing =
    fn(&mut Pool, OwnerId, u32, usize, u64, &[DeviceId]) -> Result<Vec<Vec<Segment>>, PoolError>;

/// Number and locations of the copies of a journal ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RingCopies {
    /// All copies of the journal are on local devices; the value is the number of copies.
    Here(usize),
    /// Two copies: one on a local device, and the second on another host.
    OneFar,
}

/// Owner of newly allocated segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// The segments are free after a restart.
    Volatile(OwnerId),
    /// The segments survive a restart.
    Persistent(OwnerId),
}

/// Result of opening a pool.
pub(super) struct Opened {
    pub(super) flash: Flash,
    pub(super) uuid: Option<String>,
    pub(super) segment_bytes: u64,
    pub(super) devices: Vec<DeviceInfo>,
    /// Unusable devices, with the reason.
    pub(super) offline: Vec<(PathBuf, String)>,
}

impl Flash {
    pub(super) async fn create(
        name: String,
        devices: Vec<DeviceSpec>,
        segment_bytes: u64,
        overwrite: Overwrite,
    ) -> Result<Opened> {
        blocking(move || {
            let mut pool = Pool::create(&name, &devices, segment_bytes, overwrite).map_err(refuse)?;
            hold_back(&mut pool);
            Ok(Opened {
                uuid: Some(pool.uuid().to_string()),
                segment_bytes,
                devices: pool.devices(),
                offline: Vec::new(),
                flash: Flash { name, segment_bytes, pool: Arc::new(Mutex::new(Some(pool))) },
            })
        })
        .await?
    }

    /// Opens those devices of the pool that can be opened.
    pub(super) async fn open(
        name: String,
        paths: Vec<PathBuf>,
        uuid: Option<String>,
        segment_bytes: u64,
    ) -> Result<Opened> {
        blocking(move || {
            let (mut good, mut offline, mut uuid) = (Vec::new(), Vec::new(), uuid);
            let answers = check_all_answer(&paths, answer_max());
            for (path, answer) in paths.into_iter().zip(answers) {
                match answer.and_then(|()| open_one(&path, &name, uuid.as_deref())) {
                    Ok(pool) => {
                        uuid.get_or_insert_with(|| pool.uuid().to_string());
                        good.push(path);
                    }
                    Err(reason) => offline.push((path, reason)),
                }
            }
            let mut pool = None;
            match contained(|| Pool::open(&good)) {
                Ok(opened) => pool = Some(opened),
                Err(_) if good.is_empty() => {}
                Err(error) => offline.extend(good.into_iter().map(|path| (path, error.to_string()))),
            }
            let segment_bytes = pool.as_ref().map_or(segment_bytes, Pool::segment_bytes);
            if let Some(pool) = &mut pool {
                hold_back(pool);
            }
            let devices = pool.iter().flat_map(Pool::devices).collect();
            let flash = Flash { name, segment_bytes, pool: Arc::new(Mutex::new(pool)) };
            Opened { flash, uuid, segment_bytes, devices, offline }
        })
        .await
    }

    /// Opens a device of this pool that could not be opened before.
    pub(super) async fn open_late(&self, path: PathBuf, uuid: Option<String>) -> Result<Vec<DeviceInfo>> {
        let (name, segment_bytes) = (self.name.clone(), self.segment_bytes);
        // This check comes before the pool is locked, so that a hung device does not delay the
        // pool's other devices.
        let device = path.clone();
        blocking(move || check_answers(&device, answer_max())).await?.map_err(ApiError::failed)?;
        self.with(move |pool| {
            let mut late = open_one(&path, &name, uuid.as_deref()).map_err(ApiError::failed)?;
            if late.segment_bytes() != segment_bytes {
                let found = Size(late.segment_bytes());
                let reason =
                    format!("its segment size of {found} is not that of the pool; restart hob to use it");
                return Err(ApiError::failed(reason));
            }
            hold_back(&mut late);
            match pool {
                Some(pool) => pool.join(late).map_err(refuse)?,
                None => *pool = Some(late),
            }
            Ok(())
        })
        .await
        .map(|((), devices)| devices)
    }

    pub(super) async fn add_device(
        &self,
        spec: DeviceSpec,
        overwrite: Overwrite,
    ) -> Result<(DeviceId, Vec<DeviceInfo>)> {
        let (name, segment_bytes) = (self.name.clone(), self.segment_bytes);
        self.with(move |pool| match pool {
            Some(pool) => {
                let id = pool.add_device(&spec, overwrite).map_err(refuse)?;
                // Allocation stays off, because caches may allocate journals at any time and the
                // shards have not opened the device yet.
                set(pool, id, Admission::Out);
                Ok(id)
            }
            None => {
                let mut made = Pool::create(&name, &[spec], segment_bytes, overwrite).map_err(refuse)?;
                hold_back(&mut made);
                let id = made.devices()[0].id;
                *pool = Some(made);
                Ok(id)
            }
        })
        .await
    }

    /// Returns true if the descriptors of a device, which answers at its path, do not work any more.
    /// Returns false if the pool's lock is not free.
    pub(super) async fn is_disconnected(&self, id: DeviceId, path: PathBuf) -> bool {
        let Some(file) = self.read_if_free(|pool| pool.file(id).ok()).await else { return false };
        let Some(local) = file.here() else { return false };
        blocking(move || is_disconnected(&path, local.file, answer_max())).await.unwrap_or_default()
    }

    /// Returns the superblock that this process wrote last to a device.
    pub(super) async fn former_superblock(&self, id: DeviceId) -> Result<FormerSuperblock> {
        self.read(move |pool| pool.former_superblock(id).map_err(refuse)).await
    }

    /// Returns the superblock that this process wrote last to a device; `None` if the device is not
    /// open or if the pool's lock is not free.
    pub(super) async fn former_superblock_if_free(&self, id: DeviceId) -> Option<FormerSuperblock> {
        self.read_if_free(|pool| pool.former_superblock(id).ok()).await
    }

    /// Closes a device that has failed, and keeps its content. Returns its last superblock; `None`
    /// if the device is closed already. Refuses if segments other than `lost` are in use.
    pub(super) async fn close_failed(
        &self,
        id: DeviceId,
        lost: Vec<Segment>,
    ) -> Result<Option<FormerSuperblock>> {
        let closed = self.with(move |place| {
            let Some(pool) = place.as_mut().filter(|pool| has(pool, id)) else { return Ok(None) };
            let former = pool.close_failed(id, &lost).map_err(refuse)?;
            if pool.devices().is_empty() {
                *place = None;
            }
            Ok(Some(former))
        });
        closed.await.map(|(former, _)| former)
    }

    /// Formats a device of this pool that failed and has returned, and adds it again. `former` is
    /// the device's last superblock. `device_ids` is the number of device ids that the pool has
    /// given out.
    pub(super) async fn add_returned(
        &self,
        path: PathBuf,
        former: FormerSuperblock,
        device_ids: u16,
    ) -> Result<(DeviceId, Vec<DeviceInfo>)> {
        self.with(move |place| {
            let id = match place {
                Some(pool) => pool.add_returned(&path, &former).map_err(refuse)?,
                None => {
                    let pool = Pool::of_returned(&path, &former, device_ids).map_err(refuse)?;
                    let id = pool.devices()[0].id;
                    *place = Some(pool);
                    id
                }
            };
            // Allocation stays off, as in `add_device`.
            place.iter_mut().for_each(|pool| set(pool, id, Admission::Out));
            Ok(id)
        })
        .await
    }

    /// Returns the number of device ids that the pool has given out, as far as its open devices
    /// know.
    pub(super) async fn device_ids(&self) -> Result<u16> {
        self.with(|pool| Ok(pool.as_ref().map_or(0, Pool::device_ids))).await.map(|(ids, _)| ids)
    }

    /// Returns the UUID of the pool; `None` while none of its devices is open.
    pub(super) async fn uuid(&self) -> Result<Option<String>> {
        self.with(|pool| Ok(pool.as_ref().map(|pool| pool.uuid().to_string()))).await.map(|(uuid, _)| uuid)
    }

    /// Switches allocation from a device on or off. Succeeds even if the device cannot store the
    /// setting.
    pub(super) async fn set_admission(&self, id: DeviceId, admission: Admission) -> Result<Vec<DeviceInfo>> {
        self.with(move |pool| {
            if let Some(pool) = pool.as_mut().filter(|pool| has(pool, id)) {
                set(pool, id, admission);
            }
            Ok(())
        })
        .await
        .map(|((), devices)| devices)
    }

    /// Removes a device. The device's segments in use are abandoned.
    pub(super) async fn remove_device(&self, id: DeviceId, in_use: Vec<Segment>) -> Result<Vec<DeviceInfo>> {
        self.with(move |place| {
            let Some(pool) = place.as_mut().filter(|pool| has(pool, id)) else { return Ok(()) };
            release_from(pool, &in_use);
            pool.remove_device(id).map_err(refuse)?;
            if pool.devices().is_empty() {
                *place = None;
            }
            Ok(())
        })
        .await
        .map(|((), devices)| devices)
    }

    /// Allocates data segments: up to `most`, at least `least`.
    pub(super) async fn allocate(
        &self,
        owner: Owner,
        wanted: Wanted,
    ) -> Result<(Vec<DataSegment>, Vec<DeviceInfo>)> {
        let segment_bytes = self.segment_bytes;
        let Wanted { least, most, spare } = wanted;
        self.with(move |pool| {
            let free = pool.as_ref().map_or(0, |pool| pool.free_segments_beyond(spare));
            if free < least {
                return Err(no_room(free, wanted, segment_bytes));
            }
            let Some(pool) = pool.as_mut().filter(|_| free > 0 && most > 0) else { return Ok(Vec::new()) };
            let count = most.min(free);
            let segments = match owner {
                Owner::Volatile(owner) => pool.allocate(owner, count, spare).map(DataSegment::without_order),
                Owner::Persistent(owner) => pool.allocate_data(owner, count, spare),
            };
            segments.map_err(refuse)
        })
        .await
    }

    /// Allocates up to `most` data segments on local devices other than `besides`.
    pub(super) async fn allocate_besides(
        &self,
        owner: OwnerId,
        most: u64,
        besides: DeviceId,
    ) -> Result<(Vec<DataSegment>, Vec<DeviceInfo>)> {
        self.with(move |pool| match pool {
            Some(pool) => pool.allocate_data_besides(owner, most, besides).map_err(refuse),
            None => Ok(Vec::new()),
        })
        .await
    }

    /// Allocates a journal ring. Each copy of the journal ring is on its own device. If there is no
    /// space for two copies, allocates one copy. The number of the ring is `number`, or a higher
    /// one if the owner has used `number` already. `opening` means that the cache has data on flash
    /// and cannot be opened without a ring. Then the ring may be on devices with allocation off, if
    /// no other device has space.
    pub(super) async fn allocate_ring(
        &self,
        owner: OwnerId,
        number: u32,
        copies: RingCopies,
        segments: u64,
        avoid: Vec<DeviceId>,
        opening: bool,
    ) -> Result<((u32, Vec<Vec<Segment>>), Vec<DeviceInfo>)> {
        self.with(move |pool| match pool {
            Some(pool) => {
                let number = number.max(pool.ring_number_max(owner).saturating_add(1));
                let here: AllocateRing = Pool::allocate_ring;
                let far: AllocateRing = Pool::allocate_ring_far;
                let anywhere: AllocateRing = Pool::allocate_ring_anywhere;
                let mut attempts = match copies {
                    RingCopies::Here(copies) => vec![(here, copies), (here, 1)],
                    // The last choice is for failed local flash: the cache uses only data on its
                    // peer.
                    RingCopies::OneFar => vec![(far, 2), (here, 1), (far, 1)],
                };
                match copies {
                    _ if !opening => {}
                    RingCopies::Here(copies) => attempts.extend([(anywhere, copies), (anywhere, 1)]),
                    RingCopies::OneFar => attempts.push((anywhere, 1)),
                }
                let mut attempts = attempts.into_iter();
                let ring = loop {
                    let (allocate, copies) = attempts.next().expect("the last attempt ends the loop");
                    match allocate(pool, owner, number, copies, segments, &avoid) {
                        Err(PoolError::TooFewDevices { .. }) if attempts.len() > 0 => {}
                        result => break result,
                    }
                };
                ring.map(|ring| (number, ring)).map_err(refuse)
            }
            None => Err(ApiError::conflict("no device of the pool is online")),
        })
        .await
    }

    /// Allocates up to `most` segments on remote devices for the replica of a cache of this host.
    /// At least `spare` segments stay free on each device.
    pub(super) async fn allocate_seconds(
        &self,
        owner: OwnerId,
        most: u64,
        spare: u64,
    ) -> Result<(Vec<DataSegment>, Vec<DeviceInfo>)> {
        self.with(move |pool| match pool {
            Some(pool) => pool.allocate_seconds(owner, most, spare).map_err(refuse),
            None => Ok(Vec::new()),
        })
        .await
    }

    /// Stops all reads, writes and allocations on a device of another host that does not answer.
    pub(super) async fn give_up(&self, id: DeviceId) {
        let given_up = self.with(move |pool| {
            // A device that was removed already is ignored.
            pool.iter_mut().for_each(|pool| drop(pool.give_up(id)));
            Ok(())
        });
        if let Err(error) = given_up.await {
            tracing::warn!("{error}");
        }
    }

    /// Allocates a swap area on `device`, or on any device that is not excluded. Device ids are
    /// those of the pool.
    pub(super) async fn allocate_swap(
        &self,
        owner: OwnerId,
        segments: u64,
        device: Option<DeviceId>,
        but: Vec<DeviceId>,
    ) -> Result<(SwapArea, Vec<DeviceInfo>)> {
        let segment_bytes = self.segment_bytes;
        self.with(move |pool| match pool {
            Some(pool) => pool.allocate_swap(owner, segments, device, &but).map_err(|error| match error {
                PoolError::InPieces { free, longest, .. } => {
                    let size = |segments: u64| Size(segments * segment_bytes).human();
                    conflict!(
                        "no device has {} free in one piece; the longest free piece is {}, and its \
                        device has {} free",
                        size(segments),
                        size(longest),
                        size(free)
                    )
                    .hint("choose a smaller size, make a cache smaller, or add a device to the pool")
                }
                error => refuse(error),
            }),
            None => Err(ApiError::conflict("no device of the pool is online")),
        })
        .await
    }

    /// Returns the swap areas on the present devices, with their files.
    pub(super) async fn swap_areas(&self) -> Result<Vec<(SwapArea, FileId, PathBuf)>> {
        let areas = self.with(|pool| {
            let Some(pool) = pool else { return Ok(Vec::new()) };
            let devices = pool.devices();
            let found = pool.swap_areas().into_iter().map(|area| {
                let file = pool.file(area.device).map_err(refuse)?;
                let file = file.here().ok_or_else(|| {
                    ApiError::failed("a swap area must be on flash of this host, not on remote flash")
                })?;
                let file =
                    FileId::of(&file.file).map_err(|error| failed!("cannot query a device: {error}"))?;
                let path = devices.iter().find(|device| device.id == area.device);
                Ok((area, file, path.map(|device| device.path.clone()).unwrap_or_default()))
            });
            found.collect::<Result<Vec<_>>>()
        });
        areas.await.map(|(areas, _)| areas)
    }

    pub(super) async fn segments_of(&self, owner: OwnerId) -> Result<Vec<Segment>> {
        let segments = self.with(move |pool| Ok(pool.as_ref().map(|pool| pool.segments_of(owner))));
        Ok(segments.await?.0.unwrap_or_default())
    }

    /// Returns the data for recovering a persistent cache, and its highest ring number.
    pub(super) async fn recovery(&self, owner: OwnerId) -> Result<(Recovery, u32)> {
        self.read(move |pool| {
            let recovery = Recovery::of(pool, owner).map_err(refuse)?;
            Ok((recovery, pool.ring_number_max(owner)))
        })
        .await
    }

    /// Frees the journal rings of an owner except the ring `in_use`. Each device records this with
    /// its next allocation.
    pub(super) async fn free_rings_besides(&self, owner: OwnerId, in_use: u32) -> Result<()> {
        let freed = self.with(move |pool| {
            pool.iter_mut().for_each(|pool| pool.free_rings_besides(owner, in_use));
            Ok(())
        });
        freed.await.map(|((), _)| ())
    }

    /// Invalidates the journal rings of an owner up to a number.
    pub(super) async fn make_void(&self, owner: OwnerId, upto: u32) -> Result<()> {
        let void = self.with(move |pool| match pool {
            Some(pool) => pool.make_void(owner, upto).map_err(refuse),
            None => Err(ApiError::conflict("no device of the pool is online")),
        });
        void.await.map(|((), _)| ())
    }

    /// Runs `read` with the open pool on a blocking thread.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Pool) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let value = self.with(move |pool| match pool {
            Some(pool) => read(pool),
            None => Err(ApiError::conflict("no device of the pool is online")
                .hint("reconnect the missing devices; hob retries every few seconds")),
        });
        Ok(value.await?.0)
    }

    /// Runs `read`, which performs no I/O, with the open pool. Returns `None` if another operation
    /// has the pool's lock for [`FREE_MAX`], because an operation keeps the lock while a device
    /// hangs. No blocking thread waits, so that repeated calls do not take all of them.
    async fn read_if_free<T>(&self, read: impl Fn(&Pool) -> Option<T>) -> Option<T> {
        let end = Instant::now() + FREE_MAX;
        loop {
            match self.pool.try_lock() {
                Ok(pool) => return pool.as_ref().and_then(&read),
                Err(TryLockError::Poisoned(pool)) => return pool.into_inner().as_ref().and_then(&read),
                Err(TryLockError::WouldBlock) if Instant::now() >= end => return None,
                Err(TryLockError::WouldBlock) => {}
            }
            tokio::time::sleep(FREE_EVERY).await;
        }
    }

    /// Returns the owners of persistent caches with their number of segments.
    pub(super) async fn owners(&self) -> Result<(Vec<(OwnerId, u64)>, Vec<DeviceInfo>)> {
        self.with(|pool| {
            let owners = pool.iter().flat_map(|pool| {
                let size = |owner| (owner, pool.segments_of(owner).len() as u64);
                pool.owners().into_iter().map(size).collect::<Vec<_>>()
            });
            Ok(owners.collect())
        })
        .await
    }

    /// Releases segments. If a device cannot record the release, the release is repeated after the
    /// next start.
    pub(super) async fn release(&self, segments: Vec<Segment>) -> Result<Vec<DeviceInfo>> {
        self.with(move |pool| {
            pool.iter_mut().for_each(|pool| release_from(pool, &segments));
            Ok(())
        })
        .await
        .map(|((), devices)| devices)
    }

    /// Releases the segments of a persistent cache on a device, except the segments `in_use`, and
    /// returns the number of released segments. Releases nothing and returns `None` if one of these
    /// segments is not older than `ring`, the number of the ring that the cache uses.
    pub(super) async fn release_outdated(
        &self,
        device: DeviceId,
        owner: OwnerId,
        ring: u32,
        in_use: Vec<Segment>,
    ) -> Result<(Option<usize>, Vec<DeviceInfo>)> {
        self.with(move |pool| {
            let Some(pool) = pool else { return Ok(Some(0)) };
            let Some(outdated) = pool.outdated_on(device, owner, ring, &in_use) else { return Ok(None) };
            if !outdated.is_empty() {
                release_from(pool, &outdated);
            }
            Ok(Some(outdated.len()))
        })
        .await
    }

    /// Opens a descriptor of a device for a shard.
    pub(super) async fn file(&self, id: DeviceId) -> Result<FlashDevice> {
        self.with(move |pool| match pool.as_ref().filter(|pool| has(pool, id)) {
            Some(pool) => pool.file(id).map_err(refuse),
            None => Err(failed!("device {id} is not open")),
        })
        .await
        .map(|(file, _)| file)
    }

    /// Runs `operation` on a thread that may block. Returns its result and the states of the
    /// devices after the operation.
    pub(super) async fn with<T: Send + 'static>(
        &self,
        operation: impl FnOnce(&mut Option<Pool>) -> Result<T> + Send + 'static,
    ) -> Result<(T, Vec<DeviceInfo>)> {
        let pool = self.pool.clone();
        blocking(move || {
            let mut pool = pool.lock().unwrap_or_else(PoisonError::into_inner);
            let value = operation(&mut pool)?;
            Ok((value, pool.iter().flat_map(Pool::devices).collect()))
        })
        .await?
    }
}

/// Runs work that may wait for a device on a blocking thread.
pub(super) fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = Result<T>> + Send {
    // The compiler makes the code of a boxed task once for each type of result.
    blocking_boxed(Box::new(work))
}

async fn blocking_boxed<T: Send + 'static>(work: Box<dyn FnOnce() -> T + Send>) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| failed!("an internal task ended unexpectedly: {error}"))
}

/// Returns an error if one of these devices does not answer in time.
pub(super) async fn check_devices_answer(paths: Vec<PathBuf>) -> Result<()> {
    let answers = blocking(move || check_all_answer(&paths, answer_max())).await?;
    answers.into_iter().collect::<Result<(), String>>().map_err(ApiError::failed)
}

/// Returns an error if the device with this superblock, which failed, has not returned to `path`.
pub(super) async fn check_device_returned(path: PathBuf, former: FormerSuperblock) -> Result<()> {
    blocking(move || check_returned(&path, &former, answer_max())).await?.map_err(ApiError::failed)
}

/// Returns true if all paths are devices of hob pools that can be opened.
pub(super) async fn are_pool_devices(paths: Vec<PathBuf>) -> Result<bool> {
    let can_open = |path: &PathBuf| Pool::open(std::slice::from_ref(path)).is_ok();
    blocking(move || contained(|| paths.iter().all(can_open))).await
}

fn open_one(path: &Path, name: &str, uuid: Option<&str>) -> Result<Pool, String> {
    let pool = contained(|| Pool::open(&[path.to_owned()])).map_err(|error| error.to_string())?;
    if pool.name() != name || uuid.is_some_and(|uuid| uuid != pool.uuid().to_string()) {
        return Err(format!("the device belongs to another pool ({}, {})", pool.name(), pool.uuid()));
    }
    Ok(pool)
}

/// Switches off allocation from devices that the shards have not opened yet.
fn hold_back(pool: &mut Pool) {
    for device in pool.devices() {
        set(pool, device.id, Admission::Out);
    }
}

/// Sets whether caches may allocate segments on a device. A failure of the device is only logged.
fn set(pool: &mut Pool, id: DeviceId, admission: Admission) {
    let is_so = pool.devices().iter().any(|device| device.id == id && device.admission == admission);
    if !is_so && let Err(error) = pool.set_admission(id, admission) {
        tracing::warn!("{error}");
    }
}

fn has(pool: &Pool, id: DeviceId) -> bool {
    pool.devices().iter().any(|device| device.id == id)
}

/// Releases segments. Only logs a failure of the device.
fn release_from(pool: &mut Pool, segments: &[Segment]) {
    if let Err(error) = pool.release(segments) {
        tracing::warn!("{error}");
    }
}

/// Returns the error for an allocation from a pool with `free` segments that the allocation may
/// use.
pub(super) fn no_room(free: u64, wanted: Wanted, segment_bytes: u64) -> ApiError {
    let size = |segments: u64| Size(segments.saturating_mul(segment_bytes));
    let besides = if wanted.spare > 0 { " besides the space for journals" } else { "" };
    conflict!("the pool has {} free{besides} and {} are needed", size(free), size(wanted.least))
        .hint("add a device, make another cache smaller, or choose a smaller size")
}

/// Converts a storage error into an API error.
fn refuse(error: PoolError) -> ApiError {
    let what = error.to_string();
    match error {
        PoolError::Unworkable { .. } | PoolError::TooSmall { .. } | PoolError::NoSuchDevice { .. } => {
            ApiError::invalid(what)
        }
        PoolError::Foreign { .. }
        | PoolError::OtherPool { .. }
        | PoolError::InUse { .. }
        | PoolError::Full { .. }
        | PoolError::TooFewDevices { .. }
        | PoolError::DeviceBusy { .. }
        | PoolError::InPieces { .. }
        | PoolError::UnderLoop { .. }
        | PoolError::NotAPool { .. }
        | PoolError::NoSpace { .. } => ApiError::conflict(what),
        PoolError::Damaged { .. } | PoolError::Newer { .. } | PoolError::System { .. } => {
            ApiError::failed(what)
        }
    }
}
