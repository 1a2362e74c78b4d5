//! Who is served next where many disks share one resource: a datastore, or a flash device.
//!
//! A disk has *shares* (its part when there is too little for all), a *limit* it does not pass and a *reservation* it does not
//! fall below. I/O is counted in *units*, of 32 KiB unless told otherwise, and each I/O is one unit at least.
//! [`Scheduler`] orders what waits, by mClock (Gulati, Merchant, Varman, OSDI 2010); [`Window`] says how much may be in the
//! resource at once, by its latency (PARDA: Gulati, Ahmad, Waldspurger, FAST 2009). Neither knows what an I/O is. Hosts that share a
//! resource [agree] on how much of it each has.

use crate::units::{DatastoreId, DeviceId};

mod fellows;
mod heap;
mod knee;
mod scheduler;
#[cfg(test)]
mod tests;
mod window;

pub use fellows::{Agreement, Report, agree};
pub use scheduler::{FlowId, Scheduler};
pub use window::{Control, Late, Window, WindowState};

/// Bytes of one unit of I/O, unless somebody wants another: as Storage I/O Control has it.
pub const UNIT_BYTES_DEFAULT: u32 = 32 << 10;

/// Shares of a disk that nobody gave any: `normal`.
pub const SHARES_DEFAULT: u32 = 1000;

/// The most shares.
pub const SHARES_MAX: u32 = 1_000_000;

/// The most units a second that a limit or a reservation can be about.
pub const RATE_MAX: u32 = 100_000_000;

/// What one flow is due on one resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Due {
    /// Its part of what is left when every reservation is met: 1 to [`SHARES_MAX`].
    pub shares: u32,
    /// Units a second that it gets even if others have more shares. 0: none.
    pub reservation: u32,
    /// Units a second that it does not pass.
    pub limit: Option<u32>,
    /// Bytes a second that it does not pass.
    pub bytes_limit: Option<u64>,
}

impl Default for Due {
    fn default() -> Self {
        Due { shares: SHARES_DEFAULT, reservation: 0, limit: None, bytes_limit: None }
    }
}

/// What a disk is due on what it uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskQos {
    /// On the datastore of its backing.
    pub backing: Due,
    /// On each flash device.
    pub flash: Due,
}

/// What disks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resource {
    /// What several backings lie on.
    Datastore(DatastoreId),
    /// A flash device.
    Flash(DeviceId),
}

/// How a resource is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceState {
    /// Its window.
    pub window: WindowState,
    /// I/Os that wait for their turn.
    pub waiting: usize,
}

/// Units that an I/O of so many bytes counts as.
#[inline]
pub fn units(bytes: u64, unit_bytes: u32) -> u32 {
    // Nearly all I/O is one, which takes no division.
    if bytes <= u64::from(unit_bytes) {
        return 1;
    }
    bytes.div_ceil(u64::from(unit_bytes)).clamp(1, u64::from(u32::MAX)) as u32
}
