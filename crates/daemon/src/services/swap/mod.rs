//! Swap areas of the host on flash of a pool: creating, listing, removing; [`work`] turns them on
//! and off.
//!
//! The daemon asks the kernel each time whether an area is on. The kernel continues to swap after
//! the daemon has ended, and other programs may turn swap off. The state file keeps the list of
//! areas and whether each should be on. docs/decisions/0014 gives the reasons.

mod areas;
mod work;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hob_control::{Admission, DeviceState, Size, Swap, SwapChanged, SwapCreate, SwapRoom};
use hob_engine::units::DeviceId;
use hob_storage::pool::OwnerId;
use hob_storage::ring::FdClass;

use super::flash::{self, Flash};
use super::registry::{DeviceEntry, Inner, Registry, StatePart};
use super::tasks::Tasks;
use crate::api_error::{ApiError, Result, conflict, invalid, not_found};
use crate::background::spawn;
use crate::hardware::FlashDevice;
use crate::state::{CacheOwner, SwapSpec};
use crate::swap::{Active, BYTES_MAX, BYTES_MIN, PRIORITY_MAX, Range, Spot, SwapError, SwapKernel};
use areas::{AreaLocation, Areas, SwapEntry, no_swap};
use work::{Doing, Work};

service! {
    /// The swap areas of this host.
    #[derive(Clone, Debug)]
    pub(crate) struct Swaps {
        registry: Arc<Registry>,
        tasks: Tasks,
        kernel: Arc<dyn SwapKernel>,
    } with {
        areas: Arc<Mutex<Areas>>,
    }
}

impl Swaps {
    /// Returns the service's part of the state file.
    pub(super) fn state_part(&self) -> Arc<dyn StatePart> {
        self.areas.clone()
    }

    /// Restores the areas of the state file. The devices of swap areas are found when their pools
    /// are opened.
    pub(super) fn restore(&self, kept: &[SwapSpec]) {
        let entry = |spec: &SwapSpec| {
            let entry = SwapEntry { wanted: spec.clone(), location: None, work: None, failed: None };
            (spec.name.clone(), entry)
        };
        self.areas().0 = kept.iter().map(entry).collect();
    }

    fn areas(&self) -> MutexGuard<'_, Areas> {
        self.areas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns all swap areas by name.
    pub(crate) async fn all(&self) -> Result<Vec<Swap>> {
        let spots: Vec<(String, Option<Spot>)> = {
            let areas = self.areas();
            let spot = |entry: &SwapEntry| entry.location.as_ref().map(|location| location.spot);
            areas.0.iter().map(|(name, entry)| (name.clone(), spot(entry))).collect()
        };
        let kernel = self.kernel.clone();
        let look = move |(name, spot): (String, Option<Spot>)| {
            let active = spot.map_or(Ok(None), |spot| kernel.look(spot));
            (name, active.map_err(|error| error.to_string()))
        };
        let looked: Vec<_> = flash::blocking(move || spots.into_iter().map(look).collect()).await?;
        let areas = self.areas();
        let view = |(name, active): (String, _)| Some(areas.0.get(&name)?.view(active));
        Ok(looked.into_iter().filter_map(view).collect())
    }

    pub(crate) async fn one(&self, name: &str) -> Result<Swap> {
        self.areas().get(name)?;
        let all = self.all().await?;
        all.into_iter().find(|swap| swap.name == name).ok_or_else(|| no_swap(name))
    }

    /// Allocates a swap area in a pool and turns it on.
    pub(crate) async fn create(&self, create: SwapCreate) -> Result<SwapChanged> {
        let service = self.clone();
        self.tasks
            .run("swap create", create.name.clone().unwrap_or_default(), async move {
                let off = create.off;
                let name = service.carve(create).await?;
                if !off {
                    service.begin_on(&name).await.map_err(|error| {
                        let what = format!(
                            "{name} was created, but could not be turned on: {}",
                            error.problem.error
                        );
                        ApiError { kind: error.kind, problem: hob_control::Problem::new(what) }.hint(format!(
                            "'hob swap on {name}' tries again, 'hob swap remove {name}' removes the area"
                        ))
                    })?;
                }
                service.changed(&name, Vec::new()).await
            })
            .await
    }

    async fn carve(&self, create: SwapCreate) -> Result<String> {
        if !self.registry.has_state_file() {
            return Err(ApiError::conflict("'hob serve' saves no state, so it cannot have swap areas")
                .hint("use 'hob daemon' for swap, not 'hob serve'"));
        }
        let SwapCreate { name, pool, device, size, priority, off: _ } = create;
        if priority.is_some_and(|priority| priority > PRIORITY_MAX) {
            return Err(invalid!("a priority is at most {PRIORITY_MAX}"));
        }
        let (name, pool) = {
            let areas = self.areas();
            (areas.new_name(name)?, only_pool(&self.registry.inner(), pool)?)
        };
        let guard = self.registry.guard_pool(&pool, "given a swap area")?;
        let (flash, segment_bytes) = {
            let inner = self.registry.inner();
            let entry = inner.pool(&pool)?;
            (entry.flash.clone(), entry.segment_bytes)
        };
        if !(BYTES_MIN..=BYTES_MAX).contains(&size.bytes()) {
            let (least, most) = (Size(BYTES_MIN), Size(BYTES_MAX));
            return Err(invalid!("a swap area has {least} to {most}, not {size}"));
        }
        let kernel = self.kernel.clone();
        flash::blocking(move || kernel.check_able()).await?.map_err(|error| refuse("swap", &error))?;
        let (chosen, bad) = self.good_devices(&pool, &flash, device.as_deref()).await?;
        let owner = CacheOwner::random();
        let segments = size.bytes().div_ceil(segment_bytes);
        let (area, devices) = flash.allocate_swap(OwnerId(owner.0), segments, chosen, bad).await?;
        self.registry.refresh(&pool, &devices);
        let info = devices.iter().find(|device| device.id == area.device);
        let device = info.map(|device| device.path.clone()).unwrap_or_default();
        let size = Size(segments * segment_bytes);
        let wanted =
            SwapSpec { name: name.clone(), pool: pool.clone(), device, size, owner, on: false, priority };
        let entry = SwapEntry { wanted, location: None, work: None, failed: None };
        self.areas().0.insert(name.clone(), entry);
        self.refresh(&pool).await;
        if let Err(error) = self.registry.save_first().await {
            self.areas().0.remove(&name);
            self.release(&pool, &flash, OwnerId(owner.0)).await?;
            return Err(error);
        }
        drop(guard);
        tracing::info!("swap area {name}: {size} of pool {pool} allocated");
        Ok(name)
    }

    /// Returns the device that a new area must use, if only one device is possible, and the devices
    /// that it must not use.
    async fn good_devices(
        &self,
        pool: &str,
        flash: &Flash,
        named: Option<&str>,
    ) -> Result<(Option<DeviceId>, Vec<DeviceId>)> {
        let devices: Vec<(PathBuf, Result<DeviceId, String>)> = {
            let inner = self.registry.inner();
            let entry = inner.pool(pool)?;
            let named =
                entry.devices.iter().filter(|device| named.is_none_or(|path| device.path == Path::new(path)));
            let judge = |device: &DeviceEntry| (device.path.clone(), judge(pool, device));
            named.map(judge).collect()
        };
        if let (true, Some(path)) = (devices.is_empty(), named) {
            return Err(not_found!("pool {pool} has no device {path}")
                .hint(format!("'hob pool show {pool}' lists them")));
        }
        let (mut good, mut bad, mut why) = (Vec::new(), Vec::new(), None);
        for (path, judged) in devices {
            let why_not = match judged {
                Ok(id) => match self.check_ground(flash.file(id).await?).await? {
                    Ok(()) => {
                        good.push(id);
                        continue;
                    }
                    Err(error) => {
                        bad.push(id);
                        error.to_string()
                    }
                },
                Err(reason) => reason,
            };
            why.get_or_insert(format!("{} {why_not}", path.display()));
        }
        match (good.as_slice(), why) {
            ([], why) => Err(conflict!("pool {pool} cannot have a swap area: {}",
                why.unwrap_or_else(|| "the pool has no device".to_owned())
            )
            .hint("swap needs a device of a pool that is a block device of this host, or a file of ext4 or XFS on one")),
            ([only], _) => Ok((Some(*only), bad)),
            _ => Ok((None, bad)),
        }
    }

    /// Checks whether the kernel may swap to a device.
    async fn check_ground(&self, device: FlashDevice) -> Result<Result<(), SwapError>> {
        let Some(device) = device.here() else {
            return Ok(Err(SwapError::Unsafe("is on another host".to_owned())));
        };
        if device.class == FdClass::Volatile {
            return Ok(Err(SwapError::Unsafe(
                "is in power-cut test mode, which loses unflushed data".to_owned(),
            )));
        }
        let kernel = self.kernel.clone();
        flash::blocking(move || kernel.check_ground(&device.file)).await
    }

    /// Removes an area and releases its segments. Returns the area's pool, if present, and notes.
    /// The caller must save the state afterwards. Before that, the caller may give the released
    /// segments to caches of the pool.
    pub(super) async fn remove(&self, name: &str) -> Result<(Option<String>, Vec<String>)> {
        let pool = self.areas().get(name)?.wanted.pool.clone();
        // Without its pool, the area has no segments to release.
        let has_pool = self.registry.inner().pools.contains_key(&pool);
        let guard = match has_pool {
            true => Some(self.registry.guard_pool_for_command(&pool, "given back a swap area").await?),
            false => None,
        };
        let (spot, owner) = {
            let mut areas = self.areas();
            let entry = areas.get_mut(name)?;
            entry.check_idle(name)?;
            // From here on the area must not be turned on, because its segments may be allocated
            // again.
            entry.work = Some(Work::new(Doing::Removing));
            (entry.location.as_ref().map(|location| location.spot), OwnerId(entry.wanted.owner.0))
        };
        let given_back = self.give_back(name, &pool, spot, owner).await;
        {
            let mut areas = self.areas();
            match &given_back {
                Ok(()) => drop(areas.0.remove(name)),
                Err(_) => areas.get_mut(name)?.work = None,
            }
        }
        given_back?;
        drop(guard);
        let mut notes = Vec::new();
        if spot.is_none() {
            notes.push(
                "its device is offline; if the device returns, hob finds the area on it again".to_owned(),
            );
        }
        tracing::info!("swap area {name} was removed");
        Ok((has_pool.then_some(pool), notes))
    }

    /// Releases the segments of an area, unless the kernel swaps to it.
    async fn give_back(&self, name: &str, pool: &str, spot: Option<Spot>, owner: OwnerId) -> Result<()> {
        let Some(spot) = spot else { return Ok(()) };
        if self.look(spot).await?.is_some() {
            return Err(conflict!("the kernel uses the swap area {name}")
                .hint(format!("turn it off with 'hob swap off {name}'")));
        }
        let flash = self.registry.inner().pool(pool)?.flash.clone();
        self.release(pool, &flash, owner).await
    }

    async fn release(&self, pool: &str, flash: &Flash, owner: OwnerId) -> Result<()> {
        let segments = flash.segments_of(owner).await?;
        let devices = flash.release(segments).await?;
        self.registry.refresh(pool, &devices);
        Ok(())
    }

    /// Asks the kernel whether it swaps to this area.
    async fn look(&self, spot: Spot) -> Result<Option<Active>> {
        let kernel = self.kernel.clone();
        flash::blocking(move || kernel.look(spot)).await?.map_err(|error| refuse("swap", &error))
    }

    /// Updates the table with the areas on a pool's devices, including unknown areas. Turns on the
    /// areas that should be on and whose location on flash was unknown until now.
    pub(super) async fn refresh(&self, pool: &str) {
        let Ok(flash) = self.registry.inner().pool(pool).map(|entry| entry.flash.clone()) else { return };
        let (areas, segment_bytes) = match flash.swap_areas().await {
            Ok(areas) => (areas, self.registry.inner().pool(pool).map_or(0, |entry| entry.segment_bytes)),
            Err(error) => return tracing::warn!("pool {pool}: {error}"),
        };
        let mut to_turn_on = Vec::new();
        {
            let mut all = self.areas();
            let mut gone: Vec<OwnerId> =
                all.in_pool(pool).map(|entry| OwnerId(entry.wanted.owner.0)).collect();
            for (area, file, path) in areas {
                gone.retain(|owner| *owner != area.owner);
                let range = Range { offset: area.offset, bytes: area.segments * segment_bytes };
                let location =
                    AreaLocation { device: area.device, spot: Spot { file, range }, whole: area.whole };
                let entry = all.of_owner(pool, area.owner, &path);
                entry.wanted.device = path;
                entry.wanted.size = Size(range.bytes);
                if entry.location.replace(location).is_none() && entry.wanted.on {
                    to_turn_on.push(entry.wanted.name.clone());
                }
            }
            for entry in all.0.values_mut().filter(|entry| entry.wanted.pool == pool) {
                if gone.contains(&OwnerId(entry.wanted.owner.0)) {
                    entry.location = None;
                }
            }
        }
        for name in to_turn_on {
            let service = self.clone();
            spawn(async move {
                if let Err(error) = service.begin_on(&name).await {
                    tracing::error!("swap area {name}: cannot turn it on: {error}");
                }
            });
        }
    }

    /// Refuses operations that would remove the flash below a swap area.
    pub(super) fn check_none(&self, pool: &str, device: Option<&Path>) -> Result<()> {
        self.registry.inner().pool(pool)?;
        let areas = self.areas();
        let is_on = |entry: &&SwapEntry| device.is_none_or(|path| entry.wanted.device == path);
        let names: Vec<&str> =
            areas.in_pool(pool).filter(is_on).map(|entry| entry.wanted.name.as_str()).collect();
        let Some(first) = names.first() else { return Ok(()) };
        let what = device.map_or_else(|| format!("pool {pool}"), |path| path.display().to_string());
        Err(conflict!("{what} has a swap area of the host: {}", names.join(", "))
            .hint(format!("'hob swap off {first}' and 'hob swap remove {first}' remove the area")))
    }

    async fn changed(&self, name: &str, notes: Vec<String>) -> Result<SwapChanged> {
        Ok(SwapChanged { swap: Some(self.one(name).await?), notes })
    }

    /// Returns the areas that should be on but are off, with the reasons.
    pub(super) fn missing(&self) -> Vec<(String, String)> {
        self.areas().missing()
    }

    /// Returns the present areas of a pool.
    pub(super) fn rooms(&self, pool: &str) -> Vec<SwapRoom> {
        self.areas().rooms(pool)
    }
}

/// Returns the pool id of a device that is suitable for swap, or the reason why the device is not
/// suitable.
fn judge(pool: &str, device: &DeviceEntry) -> Result<DeviceId, String> {
    let path = device.path.display();
    let reason = || device.reason.clone().unwrap_or_else(|| "see the daemon's log".to_owned());
    match (device.state, device.ids) {
        (DeviceState::Online, Some(ids)) => match (device.admission, device.access) {
            (Admission::Out, _) => Err(format!(
                "has allocation off; 'hob pool set-device {pool} {path} --admission in' turns it on"
            )),
            (_, "memory") => Err("is in memory, so swapping to it would free no memory".to_owned()),
            (_, "direct") => Ok(ids.in_pool),
            _ => Err("is on a filesystem without direct I/O, where swapping out takes memory".to_owned()),
        },
        (DeviceState::Fenced, _) => Err(format!("is fenced: {}", reason())),
        (DeviceState::Stalled, _) => Err(format!("does not answer: {}", reason())),
        (_, _) => Err(format!("is offline: {}", reason())),
    }
}

fn only_pool(inner: &Inner, named: Option<String>) -> Result<String> {
    let names: Vec<&str> = inner.pools.keys().map(String::as_str).collect();
    match (named, names.as_slice()) {
        (Some(pool), _) => inner.pool(&pool).map(|_| pool.clone()),
        (None, [only]) => Ok((*only).to_owned()),
        (None, []) => {
            Err(ApiError::conflict("there is no pool").hint("create a pool with 'hob pool create'"))
        }
        (None, several) => {
            Err(invalid!("there are several pools: {}", several.join(", ")).hint("choose one with --pool"))
        }
    }
}

/// Converts a swap error into an API error. `what` is the name of the swap area, or `swap` if the
/// error concerns no single area.
fn refuse(what: &str, error: &SwapError) -> ApiError {
    let said = format!("{what}: {error}");
    match error {
        SwapError::Unsafe(why) => {
            conflict!("swap area {what} cannot be turned on: its device {why}")
        }
        SwapError::Occupied(_) => ApiError::conflict(said),
        SwapError::NoMemory => {
            ApiError::conflict(said).hint("first free memory: end programs, or add other swap to the host")
        }
        SwapError::Stopped => {
            conflict!("the change of {what} was stopped by another command")
        }
        SwapError::Killed => ApiError::conflict(said),
        SwapError::NotAllowed | SwapError::NoLoopDevices | SwapError::System { .. } => ApiError::failed(said),
    }
}
