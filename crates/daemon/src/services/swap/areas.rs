//! The table of swap areas: their configuration, their locations, and the operations in progress on
//! them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use hob_control::{Size, Swap, SwapRoom, SwapState, check_name};
use hob_engine::units::DeviceId;
use hob_storage::pool::OwnerId;

use super::super::registry::StatePart;
use super::work::{Doing, Work};
use crate::api_error::{ApiError, Result, conflict, invalid, not_found};
use crate::state::{CacheOwner, State, SwapSpec};
use crate::swap::{Active, Spot};

/// Maximum number of swap areas. The kernel supports about 30 in total.
const SWAPS_MAX: usize = 16;

/// Entry of a swap area.
#[derive(Debug)]
pub(super) struct SwapEntry {
    pub(super) wanted: SwapSpec,
    /// Location of the area, while its device is present.
    pub(super) location: Option<AreaLocation>,
    /// Operation in progress on the area.
    pub(super) work: Option<Arc<Work>>,
    /// The last failed operation and its error.
    pub(super) failed: Option<(Doing, String)>,
}

/// Location of a swap area.
#[derive(Clone, Debug)]
pub(super) struct AreaLocation {
    /// Pool id of the device.
    pub(super) device: DeviceId,
    pub(super) spot: Spot,
    /// True if all segments of the area exist.
    pub(super) whole: bool,
}

/// Swap areas by name.
#[derive(Debug, Default)]
pub(super) struct Areas(pub(super) BTreeMap<String, SwapEntry>);

impl StatePart for Mutex<Areas> {
    fn add_to(&self, state: &mut State) {
        let areas = self.lock().unwrap_or_else(PoisonError::into_inner);
        state.swaps = areas.0.values().map(|area| area.wanted.clone()).collect();
    }
}

/// Reason why an area that a crash left incomplete is not usable.
pub(super) const IN_PARTS: &str = "a crash left it incomplete; remove it";

impl SwapEntry {
    /// Returns the API view of a swap area. `active` is the kernel's answer whether it swaps to the
    /// area, or the error of the query.
    pub(super) fn view(&self, active: Result<Option<Active>, String>) -> Swap {
        let SwapSpec { name, pool, device, size, on, priority, .. } = &self.wanted;
        let doing = self.work.as_ref().map(|work| work.doing);
        let (active, cannot_look) = match active {
            Ok(active) => (active, None),
            Err(why) => (None, Some(why)),
        };
        let state = match (doing, &self.location, &active) {
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
                Some(format!("another program turned it off; 'hob swap on {name}' turns it on"))
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

    /// Returns the reason why an area whose device is missing is not usable.
    pub(super) fn away(&self) -> String {
        let SwapSpec { pool, device, .. } = &self.wanted;
        format!(
            "{} is offline, or the area's data on it is gone; 'hob pool show {pool}' shows the devices",
            device.display()
        )
    }

    pub(super) fn is_in_parts(&self) -> bool {
        self.location.as_ref().is_some_and(|location| !location.whole)
    }

    pub(super) fn check_idle(&self, name: &str) -> Result<()> {
        match self.work.as_ref().map(|work| work.doing) {
            None => Ok(()),
            Some(Doing::TurningOn) => {
                Err(conflict!("{name} is being turned on")
                    .hint(format!("'hob swap off {name}' cancels that")))
            }
            Some(Doing::TurningOff) => Err(conflict!("{name} is being turned off")
                .hint(format!("try again later, or cancel turning it off with 'hob swap on {name}'"))),
            Some(Doing::Removing) => Err(being_removed(name)),
        }
    }
}

impl Areas {
    pub(super) fn get(&self, name: &str) -> Result<&SwapEntry> {
        self.0.get(name).ok_or_else(|| no_swap(name))
    }

    pub(super) fn get_mut(&mut self, name: &str) -> Result<&mut SwapEntry> {
        self.0.get_mut(name).ok_or_else(|| no_swap(name))
    }

    pub(super) fn in_pool(&self, pool: &str) -> impl Iterator<Item = &SwapEntry> {
        self.0.values().filter(move |entry| entry.wanted.pool == pool)
    }

    /// Returns the area with this owner, and creates an entry if there is no such area.
    pub(super) fn of_owner(&mut self, pool: &str, owner: OwnerId, path: &Path) -> &mut SwapEntry {
        let known = self.in_pool(pool).find(|entry| OwnerId(entry.wanted.owner.0) == owner);
        let name = match known.map(|entry| entry.wanted.name.clone()) {
            Some(name) => name,
            None => {
                let name = format!("found-{:08x}", owner.0 as u32);
                tracing::warn!("pool {pool}: found an unknown swap area, now named {name}");
                name
            }
        };
        self.0.entry(name.clone()).or_insert_with(|| SwapEntry {
            wanted: SwapSpec {
                name,
                pool: pool.to_owned(),
                device: path.to_owned(),
                size: Size(0),
                owner: CacheOwner(owner.0),
                on: false,
                priority: None,
            },
            location: None,
            work: None,
            failed: None,
        })
    }

    /// Returns the areas that should be on but are off, with the reasons, as far as known without
    /// asking the kernel.
    pub(super) fn missing(&self) -> Vec<(String, String)> {
        let why = |entry: &SwapEntry| match (&entry.failed, &entry.location) {
            (Some((Doing::TurningOn, why)), _) => Some(why.clone()),
            (_, None) => Some(entry.away()),
            _ => None,
        };
        let wanted = self.0.iter().filter(|(_, entry)| entry.wanted.on);
        wanted.filter_map(|(name, entry)| Some((name.clone(), why(entry)?))).collect()
    }

    /// Returns the space that swap areas take in a pool.
    pub(super) fn rooms(&self, pool: &str) -> Vec<SwapRoom> {
        let there = self.in_pool(pool).filter(|entry| entry.location.is_some());
        there.map(|entry| SwapRoom { name: entry.wanted.name.clone(), size: entry.wanted.size }).collect()
    }

    pub(super) fn new_name(&self, name: Option<String>) -> Result<String> {
        if self.0.len() >= SWAPS_MAX {
            return Err(conflict!("there are {SWAPS_MAX} swap areas, which is the maximum"));
        }
        let Some(name) = name else {
            let free = (0..).map(|number| format!("swap{number}")).find(|name| !self.0.contains_key(name));
            return Ok(free.expect("numbers do not end"));
        };
        check_name(&name).map_err(|error| invalid!("'{name}' cannot be a swap area's name: {error}"))?;
        match self.0.contains_key(&name) {
            false => Ok(name),
            true => Err(conflict!("there is a swap area '{name}' already").hint("choose another name")),
        }
    }
}

pub(super) fn being_removed(name: &str) -> ApiError {
    conflict!("{name} is being removed")
}

pub(super) fn no_swap(name: &str) -> ApiError {
    not_found!("there is no swap area '{name}'").hint("'hob swap list' shows all")
}
