//! Swap areas on and off: work that takes long, is shown, and can be stopped.
//!
//! One piece of work for one area at a time. Who asks waits for it a moment; then it goes on by itself, and the area shows how far it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use hob_control::{DeviceState, Size, SwapChanged, SwapPatch};
use hob_storage::pool::Uuid;
use hob_storage::ring::FdClass;
use tokio::sync::watch;

use super::super::api_error::ApiError;
use super::super::flash;
use super::{IN_PARTS, Place, SwapEntry, Swaps, being_removed, refuse};
use crate::daemon::hardware::LocalFlash;
use crate::daemon::swap::{Active, Area, Memory, Spot, SwapError};

/// How long who asked for work waits for its end.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// How long who stops work waits for its end.
const STOP_MAX: Duration = Duration::from_secs(8);

/// Part of all memory that is kept free when swap is turned off: what the kernel keeps for itself, about.
const MEMORY_KEPT: u64 = 50;

/// What is being done to an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    TurningOn,
    TurningOff,
    /// Its segments go back to the pool.
    Removing,
}

/// A piece of work.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) doing: Doing,
    done_bytes: AtomicU64,
    stop: AtomicBool,
    outcome: watch::Sender<Option<Result<(), ApiError>>>,
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

    /// Bytes that are left of so many.
    pub(super) fn left(&self, all: u64) -> u64 {
        all.saturating_sub(self.done_bytes.load(Ordering::Relaxed))
    }

    /// What became of it, if it ends in time.
    async fn wait(&self, patience: Duration) -> Option<Result<(), ApiError>> {
        let mut outcome = self.outcome.subscribe();
        let ended = outcome.wait_for(Option::is_some);
        tokio::time::timeout(patience, ended).await.ok()?.ok()?.clone()
    }
}

impl Swaps {
    /// Turns an area on or off, from now on.
    pub(crate) async fn set(&self, name: String, patch: SwapPatch) -> Result<SwapChanged, ApiError> {
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

    /// Begins to turn an area on, and waits for that a moment; stops its turning off. Says what there was to be said about it.
    pub(super) async fn begin_on(&self, name: &str) -> Result<Option<&'static str>, ApiError> {
        let (work, is_new, place) = {
            let mut areas = self.areas();
            let entry = areas.get_mut(name)?;
            let place = entry.usable_place(name)?;
            match &entry.work {
                Some(work) if work.doing == Doing::Removing => return Err(being_removed(name)),
                Some(work) => (work.clone(), false, place),
                None => (entry.work.insert(Work::new(Doing::TurningOn)).clone(), true, place),
            }
        };
        if is_new {
            let (service, name, mine) = (self.clone(), name.to_owned(), work.clone());
            tokio::spawn(async move {
                let result = service.turn_on(&name, &place, &mine).await;
                service.end_work(&name, &mine, result, true).await;
            });
        } else if work.doing == Doing::TurningOff {
            work.stop.store(true, Ordering::Relaxed);
            return match work.wait(STOP_MAX).await {
                Some(Ok(())) => Err(ApiError::conflict(format!("{name} was turned off already"))
                    .hint("repeat the command to turn it on again")),
                Some(Err(_)) => {
                    self.want(name, true).await?;
                    Ok(Some("it was being turned off; that was stopped"))
                }
                None => Err(ApiError::busy("its turning off does not stop yet").hint("look again later")),
            };
        }
        work.wait(WAIT_MAX).await.transpose()?;
        Ok(None)
    }

    async fn turn_on(&self, name: &str, place: &Place, work: &Arc<Work>) -> Result<(), ApiError> {
        let device = self.device_of(name, place).await?;
        let (owner, priority) = {
            let areas = self.areas();
            let wanted = &areas.get(name)?.wanted;
            (wanted.owner, wanted.priority)
        };
        let (kernel, spot, work, label) = (self.kernel.clone(), place.spot, work.clone(), name.to_owned());
        let turn_on = move || {
            // A daemon before this one may have turned it on.
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
            Some(path) => tracing::info!("the kernel swaps to {name}, through {}", path.display()),
            None => tracing::info!("the swap area {name} is already on"),
        }
        Ok(())
    }

    /// The device of an area, if it may be swapped to now.
    async fn device_of(&self, name: &str, place: &Place) -> Result<LocalFlash, ApiError> {
        let flash = {
            let areas = self.areas();
            let wanted = &areas.get(name)?.wanted;
            let inner = self.registry.inner();
            let entry = inner.pool(&wanted.pool)?;
            let device = entry.devices.iter().find(|device| device.path == wanted.device);
            if let Some(device) = device.filter(|device| device.state == DeviceState::Fenced) {
                return Err(ApiError::conflict(format!("{} is fenced", device.path.display()))
                    .hint(format!("remove {name} with 'hob swap remove {name}', and then the device")));
            }
            entry.flash.clone()
        };
        let device = flash.file(place.device).await?.here();
        let device = device.ok_or_else(|| ApiError::failed("swap is on this host's flash"))?;
        if device.class == FdClass::Volatile {
            return Err(ApiError::conflict(format!("the device of {name} forgets what is not flushed")));
        }
        Ok(device)
    }

    /// Begins to turn an area off, and waits for that a moment; stops its turning on. Says what there was to be said about it.
    async fn begin_off(&self, name: &str, force: bool) -> Result<Option<&'static str>, ApiError> {
        let (busy, spot) = {
            let areas = self.areas();
            let entry = areas.get(name)?;
            (entry.work.clone(), entry.place.as_ref().map(|place| place.spot))
        };
        if let Some(work) = busy {
            match work.doing {
                Doing::TurningOff => return Ok(Some("it is being turned off already")),
                Doing::Removing => return Err(being_removed(name)),
                Doing::TurningOn => {}
            }
            work.stop.store(true, Ordering::Relaxed);
            match work.wait(STOP_MAX).await {
                Some(Ok(())) => {}
                Some(Err(_)) => {
                    self.want(name, false).await?;
                    return Ok(Some("it was being turned on; that was stopped"));
                }
                None => {
                    return Err(ApiError::busy("its turning on does not stop yet").hint("look again later"));
                }
            }
        }
        let active = match spot {
            Some(spot) => self.look(spot).await?.map(|active| (spot, active)),
            None => None,
        };
        let Some((spot, active)) = active else {
            self.want(name, false).await?;
            return Ok(Some("it was off already"));
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
        tracing::info!("{name} is being turned off, {} are swapped out to it", Size(active.used).human());
        let (service, of, mine) = (self.clone(), name.to_owned(), work.clone());
        tokio::spawn(async move {
            let result = service.turn_off(&of, spot, active, &mine).await;
            service.end_work(&of, &mine, result, false).await;
        });
        work.wait(WAIT_MAX).await.transpose()?;
        Ok(None)
    }

    async fn turn_off(
        &self,
        name: &str,
        spot: Spot,
        active: Active,
        work: &Arc<Work>,
    ) -> Result<(), ApiError> {
        let (kernel, mine) = (self.kernel.clone(), work.clone());
        let ended = flash::blocking(move || kernel.turn_off(&active.path, &mine.stop)).await?;
        // What counts is how things are, whatever was said.
        match (self.look(spot).await?, ended) {
            (None, _) => {
                tracing::info!("the swap area {name} is off");
                Ok(())
            }
            (Some(_), Err(error)) => Err(refuse(name, &error)),
            (Some(_), Ok(())) => Err(ApiError::failed(format!("the kernel swaps to {name} all the same"))),
        }
    }

    /// Is there room for what is swapped out to an area?
    async fn check_memory_for(&self, name: &str, spot: Spot, active: &Active) -> Result<(), ApiError> {
        let kernel = self.kernel.clone();
        let memory = flash::blocking(move || kernel.memory()).await?;
        let memory = memory
            .map_err(|error| ApiError::failed(format!("cannot see how much memory there is: {error}")))?;
        let room = room_without(&memory, spot.range.bytes, active.used);
        if active.used <= room {
            return Ok(());
        }
        Err(ApiError::conflict(format!(
            "{} are swapped out to {name}, and there is room for {} in memory and in other swap",
            Size(active.used).human(),
            Size(room).human()
        ))
        .hint("free memory first, or pass --force and risk that the kernel kills programs"))
    }

    /// Ends a piece of work.
    async fn end_work(&self, name: &str, work: &Arc<Work>, result: Result<(), ApiError>, on: bool) {
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

    /// Keeps whether an area is turned on at the start.
    async fn want(&self, name: &str, on: bool) -> Result<(), ApiError> {
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
    /// Where the area is, if it can be turned on.
    fn usable_place(&self, name: &str) -> Result<Place, ApiError> {
        match &self.place {
            Some(place) if place.whole => Ok(place.clone()),
            Some(_) => Err(ApiError::conflict(format!("{name} cannot be used: {IN_PARTS}"))),
            None => Err(ApiError::conflict(format!(
                "{name} is unavailable: {} is not there, or no longer has it",
                self.wanted.device.display()
            ))
            .hint(format!("'hob pool show {}' says how its devices are", self.wanted.pool))),
        }
    }
}

/// Bytes that can come back from an area without that the host gets into trouble.
fn room_without(memory: &Memory, area_bytes: u64, used: u64) -> u64 {
    let in_memory = memory.available.saturating_sub(memory.total / MEMORY_KEPT);
    let in_other_swap = memory.swap_free.saturating_sub(area_bytes.saturating_sub(used));
    in_memory.saturating_add(in_other_swap)
}
