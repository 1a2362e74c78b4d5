//! Turning swap areas on and off: operations that take long, show their progress and can be
//! stopped.
//!
//! At most one operation turns an area on or off at a time. The caller waits for a short time. Then
//! the operation continues in the background.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use hob_control::{DeviceState, Size, SwapChanged, SwapPatch};
use hob_storage::pool::Uuid;
use hob_storage::ring::FdClass;
use tokio::sync::watch;

use super::super::flash;
use super::areas::{AreaLocation, IN_PARTS, SwapEntry, being_removed};
use super::{Swaps, refuse};
use crate::api_error::{ApiError, Result, conflict, failed};
use crate::background::spawn;
use crate::hardware::LocalFlash;
use crate::swap::{Active, Area, Memory, Spot, SwapError};

/// Maximum time that a caller waits for the end of an operation.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Maximum time that a caller waits for an operation to end after the caller has told the operation
/// to stop.
const STOP_MAX: Duration = Duration::from_secs(8);

/// 1/`MEMORY_KEPT` of all memory stays free when swap is turned off: about as much as the kernel
/// reserves.
const MEMORY_KEPT: u64 = 50;

/// Kind of an operation on a swap area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    TurningOn,
    TurningOff,
    /// The segments of the area are being released.
    Removing,
}

/// An operation on a swap area.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) doing: Doing,
    done_bytes: AtomicU64,
    stop: AtomicBool,
    outcome: watch::Sender<Option<Result<()>>>,
}

impl Work {
    pub(super) fn new(doing: Doing) -> Arc<Work> {
        Arc::new(Work {
            doing,
            done_bytes: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            outcome: watch::Sender::new(None),
        })
    }

    /// Returns how many of `all` bytes the operation has not processed yet.
    pub(super) fn left(&self, all: u64) -> u64 {
        all.saturating_sub(self.done_bytes.load(Ordering::Relaxed))
    }

    /// Waits for the result of the operation, for at most `patience`; `None` after that.
    async fn wait(&self, patience: Duration) -> Option<Result<()>> {
        let mut outcome = self.outcome.subscribe();
        let ended = outcome.wait_for(Option::is_some);
        tokio::time::timeout(patience, ended).await.ok()?.ok()?.clone()
    }
}

impl Swaps {
    /// Turns an area on or off, also for later starts.
    pub(crate) async fn set(&self, name: String, patch: SwapPatch) -> Result<SwapChanged> {
        let service = self.clone();
        self.tasks
            .run("swap set", name.clone(), async move {
                let note = match patch.on {
                    true => service.begin_on(&name).await?,
                    false => service.begin_off(&name, patch.force).await?,
                };
                service.changed(&name, note.into_iter().map(str::to_owned).collect()).await
            })
            .await
    }

    /// Starts to turn an area on, or stops turning it off. Waits briefly, and returns a note for
    /// the caller.
    pub(super) async fn begin_on(&self, name: &str) -> Result<Option<&'static str>> {
        let (work, is_new, location) = {
            let mut areas = self.areas();
            let entry = areas.get_mut(name)?;
            let location = entry.usable_location(name)?;
            match &entry.work {
                Some(work) if work.doing == Doing::Removing => return Err(being_removed(name)),
                Some(work) => (work.clone(), false, location),
                None => (entry.work.insert(Work::new(Doing::TurningOn)).clone(), true, location),
            }
        };
        if is_new {
            let (service, name, mine) = (self.clone(), name.to_owned(), work.clone());
            spawn(async move {
                let result = service.turn_on(&name, &location, &mine).await;
                service.end_work(&name, &mine, result, true).await;
            });
        } else if work.doing == Doing::TurningOff {
            work.stop.store(true, Ordering::Relaxed);
            return match work.wait(STOP_MAX).await {
                Some(Ok(())) => {
                    Err(conflict!("{name} was turned off already")
                        .hint("repeat the command to turn it on again"))
                }
                Some(Err(_)) => {
                    self.want(name, true).await?;
                    Ok(Some("the area was being turned off, which was cancelled"))
                }
                None => Err(ApiError::busy("turning the swap area off cannot be cancelled yet")
                    .hint("repeat the command later")),
            };
        }
        work.wait(WAIT_MAX).await.transpose()?;
        Ok(None)
    }

    async fn turn_on(&self, name: &str, location: &AreaLocation, work: &Arc<Work>) -> Result<()> {
        let device = self.device_of(name, location).await?;
        let (owner, priority) = {
            let areas = self.areas();
            let wanted = &areas.get(name)?.wanted;
            (wanted.owner, wanted.priority)
        };
        let (kernel, spot, work, label) = (self.kernel.clone(), location.spot, work.clone(), name.to_owned());
        let turn_on = move || {
            // An earlier daemon may have turned the area on.
            if kernel.look(spot)?.is_some() {
                return Ok(None);
            }
            kernel.check_ground(&device.file)?;
            let area = Area { range: spot.range, uuid: Uuid(owner.0.to_le_bytes()), label: &label };
            kernel.prepare(&device.file, &area, &mut |done| {
                work.done_bytes.store(done, Ordering::Relaxed);
                !work.stop.load(Ordering::Relaxed)
            })?;
            work.done_bytes.store(spot.range.bytes, Ordering::Relaxed);
            match work.stop.load(Ordering::Relaxed) {
                true => Err(SwapError::Stopped),
                false => kernel.turn_on(&device.file, spot.range, priority).map(Some),
            }
        };
        match flash::blocking(turn_on).await?.map_err(|error| refuse(name, &error))? {
            Some(path) => tracing::info!("swap area {name} is on, through {}", path.display()),
            None => tracing::info!("swap area {name} was on already"),
        }
        Ok(())
    }

    /// Returns the device of an area, if it is suitable for swap now.
    async fn device_of(&self, name: &str, location: &AreaLocation) -> Result<LocalFlash> {
        let flash = {
            let areas = self.areas();
            let wanted = &areas.get(name)?.wanted;
            let inner = self.registry.inner();
            let entry = inner.pool(&wanted.pool)?;
            let device = entry.devices.iter().find(|device| device.path == wanted.device);
            if let Some(device) = device.filter(|device| device.state == DeviceState::Fenced) {
                return Err(conflict!("{} is fenced", device.path.display())
                    .hint(format!("first remove {name} with 'hob swap remove {name}', then the device")));
            }
            entry.flash.clone()
        };
        let device = flash.file(location.device).await?.here();
        let device = device.ok_or_else(|| ApiError::failed("swap is on this host's flash"))?;
        if device.class == FdClass::Volatile {
            return Err(conflict!(
                "the device of {name} is in power-cut test mode, which loses unflushed data"
            ));
        }
        Ok(device)
    }

    /// Starts to turn an area off, or stops turning it on. Waits briefly, and returns a note for
    /// the caller.
    async fn begin_off(&self, name: &str, force: bool) -> Result<Option<&'static str>> {
        let (busy, spot) = {
            let areas = self.areas();
            let entry = areas.get(name)?;
            (entry.work.clone(), entry.location.as_ref().map(|location| location.spot))
        };
        if let Some(work) = busy {
            match work.doing {
                Doing::TurningOff => return Ok(Some("the area is already being turned off")),
                Doing::Removing => return Err(being_removed(name)),
                Doing::TurningOn => {}
            }
            work.stop.store(true, Ordering::Relaxed);
            match work.wait(STOP_MAX).await {
                Some(Ok(())) => {}
                Some(Err(_)) => {
                    self.want(name, false).await?;
                    return Ok(Some("the area was being turned on, which was cancelled"));
                }
                None => {
                    return Err(ApiError::busy("turning the swap area on cannot be cancelled yet")
                        .hint("repeat the command later"));
                }
            }
        }
        let active = match spot {
            Some(spot) => self.look(spot).await?.map(|active| (spot, active)),
            None => None,
        };
        let Some((spot, active)) = active else {
            self.want(name, false).await?;
            return Ok(Some("the area was off already"));
        };
        if !force {
            self.check_memory_for(name, spot, &active).await?;
        }
        let work = {
            let mut areas = self.areas();
            let entry = areas.get_mut(name)?;
            entry.check_idle(name)?;
            entry.work.insert(Work::new(Doing::TurningOff)).clone()
        };
        tracing::info!(
            "swap area {name}: turning it off; {} are swapped out to it",
            Size(active.used).human()
        );
        let (service, of, mine) = (self.clone(), name.to_owned(), work.clone());
        spawn(async move {
            let result = service.turn_off(&of, spot, active, &mine).await;
            service.end_work(&of, &mine, result, false).await;
        });
        work.wait(WAIT_MAX).await.transpose()?;
        Ok(None)
    }

    async fn turn_off(&self, name: &str, spot: Spot, active: Active, work: &Arc<Work>) -> Result<()> {
        let (kernel, mine) = (self.kernel.clone(), work.clone());
        let ended = flash::blocking(move || kernel.turn_off(&active.path, &mine.stop)).await?;
        // The kernel's state decides, whatever the call returned.
        match (self.look(spot).await?, ended) {
            (None, _) => {
                tracing::info!("swap area {name} is off");
                Ok(())
            }
            (Some(_), Err(error)) => Err(refuse(name, &error)),
            (Some(_), Ok(())) => Err(failed!("the kernel still uses the swap area {name}")),
        }
    }

    /// Checks that the host's memory and its other swap have space for the data in a swap area.
    async fn check_memory_for(&self, name: &str, spot: Spot, active: &Active) -> Result<()> {
        let kernel = self.kernel.clone();
        let memory = flash::blocking(move || kernel.memory()).await?;
        let memory =
            memory.map_err(|error| failed!("cannot determine the amount of free memory: {error}"))?;
        let room = room_without(&memory, spot.range.bytes, active.used);
        if active.used <= room {
            return Ok(());
        }
        Err(conflict!(
            "{} are swapped out to {name}, and memory and other swap have only {} free",
            Size(active.used).human(),
            Size(room).human()
        )
        .hint("free memory first, or pass --force and risk that the kernel kills programs"))
    }

    /// Records the end of an operation.
    async fn end_work(&self, name: &str, work: &Arc<Work>, result: Result<()>, on: bool) {
        {
            let mut areas = self.areas();
            if let Ok(entry) = areas.get_mut(name) {
                entry.work = None;
                let is_stopped = work.stop.load(Ordering::Relaxed);
                let why = result.as_ref().err().filter(|_| !is_stopped);
                entry.failed = why.map(|error| (work.doing, error.problem.error.clone()));
            }
        }
        let saved = match &result {
            Ok(()) => self.want(name, on).await,
            Err(_) => Ok(()),
        };
        let outcome = result.and(saved);
        if let Err(error) = &outcome {
            tracing::warn!("{error}");
        }
        work.outcome.send_replace(Some(outcome));
    }

    /// Saves whether hob turns an area on when the daemon starts.
    async fn want(&self, name: &str, on: bool) -> Result<()> {
        {
            let mut areas = self.areas();
            let entry = areas.get_mut(name)?;
            entry.failed = None;
            if std::mem::replace(&mut entry.wanted.on, on) == on {
                return Ok(());
            }
        }
        self.registry.save().await
    }
}

impl SwapEntry {
    /// Returns the location of an area that can be turned on.
    fn usable_location(&self, name: &str) -> Result<AreaLocation> {
        match &self.location {
            Some(location) if location.whole => Ok(location.clone()),
            Some(_) => Err(conflict!("{name} cannot be used: {IN_PARTS}")),
            None => Err(conflict!(
                "{name} is unavailable: {} is offline, or the area's data on it is gone",
                self.wanted.device.display()
            )
            .hint(format!("'hob pool show {}' shows its devices", self.wanted.pool))),
        }
    }
}

/// Returns how many bytes the host can take back from an area without a shortage of memory.
fn room_without(memory: &Memory, area_bytes: u64, used: u64) -> u64 {
    let in_memory = memory.available.saturating_sub(memory.total / MEMORY_KEPT);
    let in_other_swap = memory.swap_free.saturating_sub(area_bytes.saturating_sub(used));
    in_memory.saturating_add(in_other_swap)
}
