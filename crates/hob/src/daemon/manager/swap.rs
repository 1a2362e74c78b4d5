//! Swap areas of the host: made, shown, given back; on and off in [`work`].
//!
//! Whether an area is on is the kernel's to say, and is asked each time: it goes on swapping when a daemon ends, and others may turn swap off. What is
//! kept is which areas there are and whether they are to be on. docs/decisions/0014 says why it is so.

mod work;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hob_control::{
    Admission, DeviceState, Size, Swap, SwapChanged, SwapCreate, SwapRoom, SwapState, check_name,
};
use hob_engine::units::DeviceId;
use hob_storage::pool::OwnerId;
use hob_storage::ring::FdClass;

use super::api_error::ApiError;
use super::flash::{self, Flash};
use super::{Inner, Manager};
use crate::daemon::hardware::FlashDevice;
use crate::daemon::state::{CacheOwner, Store, SwapSpec};
use crate::daemon::swap::{Active, BYTES_MAX, BYTES_MIN, PRIORITY_MAX, Range, Spot, SwapError};
use work::{Doing, Work};

/// Swap areas there can be. The kernel has about 30 places for swap in all.
const SWAPS_MAX: usize = 16;

/// A swap area.
#[derive(Debug)]
pub(super) struct SwapEntry {
    pub(super) wanted: SwapSpec,
    /// Where it is, while its device is there.
    place: Option<Place>,
    /// What is being done to it.
    work: Option<Arc<Work>>,
    /// What could not be done to it, and why.
    failed: Option<(Doing, String)>,
}

/// Where an area is.
#[derive(Clone, Debug)]
struct Place {
    /// The pool's id.
    device: DeviceId,
    spot: Spot,
    /// All its segments are there.
    whole: bool,
}

impl SwapEntry {
    /// What was kept, of which nothing has been seen yet.
    pub(super) fn all(kept: &[SwapSpec]) -> BTreeMap<String, SwapEntry> {
        let entry = |spec: &SwapSpec| {
            let entry = SwapEntry { wanted: spec.clone(), place: None, work: None, failed: None };
            (spec.name.clone(), entry)
        };
        kept.iter().map(entry).collect()
    }

    /// As the API shows it. `active` is what the kernel says, if it could be asked.
    fn view(&self, active: Result<Option<Active>, String>) -> Swap {
        let SwapSpec { name, pool, device, size, on, priority, .. } = &self.wanted;
        let doing = self.work.as_ref().map(|work| work.doing);
        let (active, cannot_look) = match active {
            Ok(active) => (active, None),
            Err(why) => (None, Some(why)),
        };
        let state = match (doing, &self.place, &active) {
            (Some(Doing::TurningOff), ..) => SwapState::TurningOff,
            (Some(Doing::TurningOn), ..) => SwapState::Preparing,
            (_, _, Some(_)) => SwapState::On,
            (_, None, _) => SwapState::Unavailable,
            (_, Some(_), None) => SwapState::Off,
        };
        let used = Size(active.as_ref().map_or(0, |active| active.used));
        let expected = || match state {
            SwapState::Unavailable => Some(self.away()),
            SwapState::Off if self.is_in_parts() => Some(IN_PARTS.to_owned()),
            SwapState::Off if *on => {
                Some(format!("something else than hob turned it off; 'hob swap on {name}' turns it on"))
            }
            _ => None,
        };
        Swap {
            name: name.clone(),
            pool: pool.clone(),
            device: device.to_string_lossy().into_owned(),
            size: *size,
            state,
            reason: self.failed.as_ref().map(|(_, why)| why.clone()).or(cannot_look).or_else(expected),
            at_start: *on,
            used,
            left: match state {
                SwapState::Preparing => self.work.as_ref().map(|work| Size(work.left(size.bytes()))),
                SwapState::TurningOff => Some(used),
                _ => None,
            },
            priority: active.as_ref().map(|active| active.priority).or(priority.map(i32::from)),
            loop_device: active.map(|active| active.path.to_string_lossy().into_owned()),
        }
    }

    /// What is said of an area whose device is away.
    fn away(&self) -> String {
        let SwapSpec { pool, device, .. } = &self.wanted;
        format!(
            "{} is not there, or no longer has it; pool {pool} says how its devices are",
            device.display()
        )
    }

    fn is_in_parts(&self) -> bool {
        self.place.as_ref().is_some_and(|place| !place.whole)
    }
}

/// What is said of an area that a crash left in parts.
const IN_PARTS: &str = "a crash left only parts of it; remove it";

impl Manager {
    /// All swap areas, by name.
    pub(crate) async fn swaps(self: &Arc<Self>) -> Result<Vec<Swap>, ApiError> {
        let spots: Vec<(String, Option<Spot>)> = {
            let inner = self.inner();
            let spot = |entry: &SwapEntry| entry.place.as_ref().map(|place| place.spot);
            inner.swaps.iter().map(|(name, entry)| (name.clone(), spot(entry))).collect()
        };
        let kernel = self.swap_kernel.clone();
        let look = move |(name, spot): (String, Option<Spot>)| {
            let active = spot.map_or(Ok(None), |spot| kernel.look(spot));
            (name, active.map_err(|error| error.to_string()))
        };
        let looked: Vec<_> = flash::blocking(move || spots.into_iter().map(look).collect()).await?;
        let inner = self.inner();
        let view = |(name, active): (String, _)| Some(inner.swaps.get(&name)?.view(active));
        Ok(looked.into_iter().filter_map(view).collect())
    }

    /// One of them.
    pub(crate) async fn swap(self: &Arc<Self>, name: &str) -> Result<Swap, ApiError> {
        self.inner().swap(name)?;
        let all = self.swaps().await?;
        all.into_iter().find(|swap| swap.name == name).ok_or_else(|| no_swap(name))
    }

    /// Carves an area out of a pool and turns it on.
    pub(crate) async fn swap_create(self: &Arc<Self>, create: SwapCreate) -> Result<SwapChanged, ApiError> {
        let manager = self.clone();
        self.change("swap create", create.name.clone().unwrap_or_default(), async move {
            let off = create.off;
            let name = manager.carve_swap(create).await?;
            if !off {
                manager.begin_on(&name).await.map_err(|error| {
                    let what = format!("{name} is made, but not on: {}", error.problem.error);
                    ApiError { kind: error.kind, problem: hob_control::Problem::new(what) }.hint(format!(
                        "'hob swap on {name}' tries again, 'hob swap remove {name}' takes it away"
                    ))
                })?;
            }
            manager.swap_changed(&name, Vec::new()).await
        })
        .await
    }

    async fn carve_swap(self: &Arc<Self>, create: SwapCreate) -> Result<String, ApiError> {
        if matches!(*self.store.lock().unwrap_or_else(std::sync::PoisonError::into_inner), Store::Memory) {
            return Err(ApiError::conflict("this hob remembers nothing, and swap outlives it")
                .hint("use 'hob daemon' for swap, not 'hob serve'"));
        }
        let SwapCreate { name, pool, device, size, priority, off: _ } = create;
        if priority.is_some_and(|priority| priority > PRIORITY_MAX) {
            return Err(ApiError::invalid(format!("a priority is at most {PRIORITY_MAX}")));
        }
        let (name, pool) = {
            let inner = self.inner();
            (inner.new_swap_name(name)?, inner.only_pool(pool)?)
        };
        let guard = self.guard_pool(&pool, "given a swap area")?;
        let (flash, segment_bytes) = {
            let inner = self.inner();
            let entry = inner.pool(&pool)?;
            (entry.flash.clone(), entry.segment_bytes)
        };
        if !(BYTES_MIN..=BYTES_MAX).contains(&size.bytes()) {
            let (least, most) = (Size(BYTES_MIN), Size(BYTES_MAX));
            return Err(ApiError::invalid(format!("a swap area has {least} to {most}, not {size}")));
        }
        let kernel = self.swap_kernel.clone();
        flash::blocking(move || kernel.check_able()).await?.map_err(|error| refuse("swap", &error))?;
        let (chosen, bad) = self.good_devices(&pool, &flash, device.as_deref()).await?;
        let owner = CacheOwner::random();
        let segments = size.bytes().div_ceil(segment_bytes);
        let (area, devices) = flash.allocate_swap(OwnerId(owner.0), segments, chosen, bad).await?;
        self.refresh(&pool, &devices);
        let info = devices.iter().find(|device| device.id == area.device);
        let device = info.map(|device| device.path.clone()).unwrap_or_default();
        let size = Size(segments * segment_bytes);
        let wanted =
            SwapSpec { name: name.clone(), pool: pool.clone(), device, size, owner, on: false, priority };
        let entry = SwapEntry { wanted, place: None, work: None, failed: None };
        self.inner().swaps.insert(name.clone(), entry);
        self.refresh_swaps(&pool).await;
        if let Err(error) = self.save_first().await {
            self.inner().swaps.remove(&name);
            self.release_swap(&pool, &flash, OwnerId(owner.0)).await?;
            return Err(error);
        }
        drop(guard);
        tracing::info!("swap area {name} takes {size} of pool {pool}");
        Ok(name)
    }

    /// Which device an area is to be on, if only one may be, and on which ones it must not be.
    async fn good_devices(
        &self,
        pool: &str,
        flash: &Flash,
        named: Option<&str>,
    ) -> Result<(Option<DeviceId>, Vec<DeviceId>), ApiError> {
        let devices: Vec<(PathBuf, Result<DeviceId, String>)> = {
            let inner = self.inner();
            let entry = inner.pool(pool)?;
            let named =
                entry.devices.iter().filter(|device| named.is_none_or(|path| device.path == Path::new(path)));
            let judge = |device: &super::DeviceEntry| (device.path.clone(), judge(pool, device));
            named.map(judge).collect()
        };
        if let (true, Some(path)) = (devices.is_empty(), named) {
            return Err(ApiError::not_found(format!("pool {pool} has no device {path}"))
                .hint(format!("'hob pool show {pool}' lists them")));
        }
        let (mut good, mut bad, mut why) = (Vec::new(), Vec::new(), None);
        for (path, judged) in devices {
            let context = match judged {
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
            why.get_or_insert(format!("{} {context}", path.display()));
        }
        match (good.as_slice(), why) {
            ([], why) => Err(ApiError::conflict(format!(
                "cannot swap to pool {pool}: {}",
                why.unwrap_or_else(|| "it has no device".to_owned())
            ))
            .hint("swap needs a device of a pool that is a block device of this host, or a file of ext4 or XFS on one")),
            ([only], _) => Ok((Some(*only), bad)),
            _ => Ok((None, bad)),
        }
    }

    /// What the kernel may not swap to.
    async fn check_ground(&self, device: FlashDevice) -> Result<Result<(), SwapError>, ApiError> {
        let Some(device) = device.here() else {
            return Ok(Err(SwapError::Unsafe("is on another host".to_owned())));
        };
        if device.class == FdClass::Volatile {
            return Ok(Err(SwapError::Unsafe("forgets what is not flushed, for a test".to_owned())));
        }
        let kernel = self.swap_kernel.clone();
        flash::blocking(move || kernel.check_ground(&device.file)).await
    }

    /// Gives an area that is off back to its pool.
    pub(crate) async fn swap_remove(self: &Arc<Self>, name: String) -> Result<SwapChanged, ApiError> {
        let manager = self.clone();
        self.change("swap remove", name.clone(), async move { manager.remove_swap(&name).await }).await
    }

    async fn remove_swap(self: &Arc<Self>, name: &str) -> Result<SwapChanged, ApiError> {
        let pool = self.inner().swap(name)?.wanted.pool.clone();
        // Without its pool there is nothing to give back.
        let has_pool = self.inner().pools.contains_key(&pool);
        let guard = match has_pool {
            true => Some(self.guard_pool(&pool, "given back a swap area")?),
            false => None,
        };
        let (spot, owner) = {
            let mut inner = self.inner();
            let entry = inner.swap_mut(name)?;
            entry.check_idle(name)?;
            // From here on nobody turns it on: its segments may be somebody else's at any moment.
            entry.work = Some(Work::new(Doing::Removing));
            (entry.place.as_ref().map(|place| place.spot), OwnerId(entry.wanted.owner.0))
        };
        let given_back = self.give_swap_back(name, &pool, spot, owner).await;
        {
            let mut inner = self.inner();
            match &given_back {
                Ok(()) => drop(inner.swaps.remove(name)),
                Err(_) => inner.swap_mut(name)?.work = None,
            }
        }
        given_back?;
        drop(guard);
        let mut notes = Vec::new();
        if spot.is_none() {
            notes.push("its device is not there; if it comes back, the area is found on it again".to_owned());
        }
        tracing::info!("swap area {name} is no more");
        if has_pool {
            notes.extend(self.top_up(&pool).await);
        }
        self.save().await?;
        Ok(SwapChanged { swap: None, notes })
    }

    /// Gives the segments of an area that is there back, unless the kernel swaps to it.
    async fn give_swap_back(
        &self,
        name: &str,
        pool: &str,
        spot: Option<Spot>,
        owner: OwnerId,
    ) -> Result<(), ApiError> {
        let Some(spot) = spot else { return Ok(()) };
        if self.look_at_swap(spot).await?.is_some() {
            return Err(ApiError::conflict(format!("the kernel swaps to {name}"))
                .hint(format!("'hob swap off {name}' ends that")));
        }
        let flash = self.inner().pool(pool)?.flash.clone();
        self.release_swap(pool, &flash, owner).await
    }

    async fn release_swap(&self, pool: &str, flash: &Flash, owner: OwnerId) -> Result<(), ApiError> {
        let segments = flash.segments_of(owner).await?;
        let devices = flash.release(segments).await?;
        self.refresh(pool, &devices);
        Ok(())
    }

    /// Is it on?
    async fn look_at_swap(&self, spot: Spot) -> Result<Option<Active>, ApiError> {
        let kernel = self.swap_kernel.clone();
        flash::blocking(move || kernel.look(spot)).await?.map_err(|error| refuse("swap", &error))
    }

    /// Takes note of the areas on a pool's devices, those included that nobody knows any more, and turns on those that came with their device
    /// and are to be on.
    pub(super) async fn refresh_swaps(self: &Arc<Self>, pool: &str) {
        let Ok(flash) = self.inner().pool(pool).map(|entry| entry.flash.clone()) else { return };
        let (areas, segment_bytes) = match flash.swap_areas().await {
            Ok(areas) => (areas, self.inner().pool(pool).map_or(0, |entry| entry.segment_bytes)),
            Err(error) => return tracing::warn!("pool {pool}: {error}"),
        };
        let mut to_turn_on = Vec::new();
        {
            let mut inner = self.inner();
            let mut gone: Vec<OwnerId> =
                inner.swaps_of(pool).map(|entry| OwnerId(entry.wanted.owner.0)).collect();
            for (area, file, path) in areas {
                gone.retain(|owner| *owner != area.owner);
                let range = Range { offset: area.offset, bytes: area.segments * segment_bytes };
                let place = Place { device: area.device, spot: Spot { file, range }, whole: area.whole };
                let entry = inner.swap_of(pool, area.owner, &path);
                entry.wanted.device = path;
                entry.wanted.size = Size(range.bytes);
                if entry.place.replace(place).is_none() && entry.wanted.on {
                    to_turn_on.push(entry.wanted.name.clone());
                }
            }
            for entry in inner.swaps.values_mut().filter(|entry| entry.wanted.pool == pool) {
                if gone.contains(&OwnerId(entry.wanted.owner.0)) {
                    entry.place = None;
                }
            }
        }
        for name in to_turn_on {
            let manager = self.clone();
            tokio::spawn(async move {
                if let Err(error) = manager.begin_on(&name).await {
                    tracing::error!("swap area {name} cannot be turned on: {error}");
                }
            });
        }
    }

    /// Refuses what would take the ground from under a swap area.
    pub(super) fn check_no_swap(&self, pool: &str, device: Option<&Path>) -> Result<(), ApiError> {
        let inner = self.inner();
        inner.pool(pool)?;
        let is_on = |entry: &&SwapEntry| device.is_none_or(|path| entry.wanted.device == path);
        let names: Vec<&str> =
            inner.swaps_of(pool).filter(is_on).map(|entry| entry.wanted.name.as_str()).collect();
        let Some(first) = names.first() else { return Ok(()) };
        let what = device.map_or_else(|| format!("pool {pool}"), |path| path.display().to_string());
        Err(ApiError::conflict(format!("{what} has swap of the host: {}", names.join(", ")))
            .hint(format!("'hob swap off {first}' and 'hob swap remove {first}' take it away")))
    }

    async fn swap_changed(self: &Arc<Self>, name: &str, notes: Vec<String>) -> Result<SwapChanged, ApiError> {
        Ok(SwapChanged { swap: Some(self.swap(name).await?), notes })
    }
}

/// The pool's id of a device that may be swapped to, as far as the manager knows; or why not.
fn judge(pool: &str, device: &super::DeviceEntry) -> Result<DeviceId, String> {
    let path = device.path.display();
    let reason = || device.reason.clone().unwrap_or_else(|| "the log says why".to_owned());
    match (device.state, device.ids) {
        (DeviceState::Online, Some(ids)) => match (device.admission, device.access) {
            (Admission::Out, _) => Err(format!(
                "gives no new segments; 'hob pool set-device {pool} {path} --admission in' lets it"
            )),
            (_, "memory") => Err("lies in memory, which swapping is to relieve".to_owned()),
            (_, "direct") => Ok(ids.in_pool),
            _ => Err("is on a filesystem without direct I/O, where swapping out takes memory".to_owned()),
        },
        (DeviceState::Fenced, _) => Err(format!("is fenced: {}", reason())),
        (DeviceState::Stalled, _) => Err(format!("does not answer: {}", reason())),
        (_, _) => Err(format!("is offline: {}", reason())),
    }
}

impl SwapEntry {
    fn check_idle(&self, name: &str) -> Result<(), ApiError> {
        match self.work.as_ref().map(|work| work.doing) {
            None => Ok(()),
            Some(Doing::TurningOn) => Err(ApiError::conflict(format!("{name} is being turned on"))
                .hint(format!("'hob swap off {name}' stops that"))),
            Some(Doing::TurningOff) => Err(ApiError::conflict(format!("{name} is being turned off"))
                .hint(format!("try again when that is done, or stop it with 'hob swap on {name}'"))),
            Some(Doing::Removing) => Err(being_removed(name)),
        }
    }
}

impl Inner {
    fn swap(&self, name: &str) -> Result<&SwapEntry, ApiError> {
        self.swaps.get(name).ok_or_else(|| no_swap(name))
    }

    fn swap_mut(&mut self, name: &str) -> Result<&mut SwapEntry, ApiError> {
        self.swaps.get_mut(name).ok_or_else(|| no_swap(name))
    }

    fn swaps_of(&self, pool: &str) -> impl Iterator<Item = &SwapEntry> {
        self.swaps.values().filter(move |entry| entry.wanted.pool == pool)
    }

    /// The area with that owner, which is entered if nobody knows it.
    fn swap_of(&mut self, pool: &str, owner: OwnerId, path: &Path) -> &mut SwapEntry {
        let known = self.swaps_of(pool).find(|entry| OwnerId(entry.wanted.owner.0) == owner);
        let name = match known.map(|entry| entry.wanted.name.clone()) {
            Some(name) => name,
            None => {
                let name = format!("found-{:08x}", owner.0 as u32);
                tracing::warn!("pool {pool} has a swap area that nobody knows, from now on {name}");
                name
            }
        };
        self.swaps.entry(name.clone()).or_insert_with(|| SwapEntry {
            wanted: SwapSpec {
                name,
                pool: pool.to_owned(),
                device: path.to_owned(),
                size: Size(0),
                owner: CacheOwner(owner.0),
                on: false,
                priority: None,
            },
            place: None,
            work: None,
            failed: None,
        })
    }

    /// Areas that are to be on and are not, as far as is known without asking the kernel, and why.
    pub(super) fn missing_swap(&self) -> Vec<(String, String)> {
        let why = |entry: &SwapEntry| match (&entry.failed, &entry.place) {
            (Some((Doing::TurningOn, why)), _) => Some(why.clone()),
            (_, None) => Some(entry.away()),
            _ => None,
        };
        let wanted = self.swaps.iter().filter(|(_, entry)| entry.wanted.on);
        wanted.filter_map(|(name, entry)| Some((name.clone(), why(entry)?))).collect()
    }

    /// What swap areas take of a pool.
    pub(super) fn swap_rooms(&self, pool: &str) -> Vec<SwapRoom> {
        let there = self.swaps_of(pool).filter(|entry| entry.place.is_some());
        there.map(|entry| SwapRoom { name: entry.wanted.name.clone(), size: entry.wanted.size }).collect()
    }

    fn new_swap_name(&self, name: Option<String>) -> Result<String, ApiError> {
        if self.swaps.len() >= SWAPS_MAX {
            return Err(ApiError::conflict(format!("there are {SWAPS_MAX} swap areas; more cannot be had")));
        }
        let Some(name) = name else {
            let free =
                (0..).map(|number| format!("swap{number}")).find(|name| !self.swaps.contains_key(name));
            return Ok(free.expect("numbers do not end"));
        };
        check_name(&name)
            .map_err(|error| ApiError::invalid(format!("'{name}' cannot be a swap area's name: {error}")))?;
        match self.swaps.contains_key(&name) {
            false => Ok(name),
            true => Err(ApiError::conflict(format!("there is a swap area '{name}' already"))
                .hint("choose another name")),
        }
    }

    fn only_pool(&self, named: Option<String>) -> Result<String, ApiError> {
        let names: Vec<&str> = self.pools.keys().map(String::as_str).collect();
        match (named, names.as_slice()) {
            (Some(pool), _) => self.pool(&pool).map(|_| pool.clone()),
            (None, [only]) => Ok((*only).to_owned()),
            (None, []) => Err(ApiError::conflict("there is no pool").hint("'hob pool create' makes one")),
            (None, several) => {
                Err(ApiError::invalid(format!("there are several pools: {}", several.join(", ")))
                    .hint("say which one with --pool"))
            }
        }
    }
}

fn being_removed(name: &str) -> ApiError {
    ApiError::conflict(format!("{name} is being removed"))
}

fn no_swap(name: &str) -> ApiError {
    ApiError::not_found(format!("there is no swap area '{name}'")).hint("'hob swap list' shows all")
}

/// Which reaction an error asks for. `what` is the area or its device.
fn refuse(what: &str, error: &SwapError) -> ApiError {
    let said = format!("{what}: {error}");
    match error {
        SwapError::Unsafe(why) => ApiError::conflict(format!("cannot swap to {what}: its device {why}")),
        SwapError::Occupied(_) => ApiError::conflict(said),
        SwapError::NoMemory => {
            ApiError::conflict(said).hint("free memory first: end programs, or give the host other swap")
        }
        SwapError::Stopped => {
            ApiError::conflict(format!("the change of {what} was stopped by another command"))
        }
        SwapError::Killed => ApiError::conflict(said),
        SwapError::NotAllowed | SwapError::NoLoopDevices | SwapError::System { .. } => ApiError::failed(said),
    }
}
