//! I/O scheduling among disks that share a datastore or a flash device.
//!
//! A disk has *shares* (its relative part of the rate under contention), a *limit* that it does not
//! exceed, and a *reservation* that it gets at least. I/O is counted in *units*, 32 KiB by default.
//! Each I/O counts as at least one unit. [`Scheduler`] orders waiting I/O by mClock (Gulati,
//! Merchant, Varman, OSDI 2010). [`Window`] limits the I/Os in flight by the latency (PARDA:
//! Gulati, Ahmad, Waldspurger, FAST 2009). Reads and writes count alike. Hosts that share a
//! datastore [agree] on each host's part.

use crate::units::{DatastoreId, DeviceId};

mod heap;
mod knee;
mod peer_hosts;
mod scheduler;
#[cfg(test)]
mod tests;
mod window;

pub use peer_hosts::{Report, SharedDatastore, agree};
pub use scheduler::{FlowId, Scheduler};
pub use window::{Control, Late, Window, WindowState};

/// Default size of an I/O unit in bytes, as in Storage I/O Control.
pub const UNIT_BYTES_DEFAULT: u32 = 32 << 10;

/// Default shares of a disk, which correspond to `normal`.
pub const SHARES_DEFAULT: u32 = 1000;

/// Maximum shares of a disk.
pub const SHARES_MAX: u32 = 1_000_000;

/// Maximum of a limit or reservation, units per second.
pub const RATE_MAX: u32 = 100_000_000;

/// Shares, reservation and limits of one flow (one disk, or all background I/O) at one resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entitlement {
    /// Relative part of the rate that is left after all reservations, from 1 to [`SHARES_MAX`].
    pub shares: u32,
    /// Guaranteed rate, even if other flows have more shares, units of I/O (32 KiB by default) per
    /// second. 0 means no reservation.
    pub reservation: u32,
    /// Maximum rate, units of I/O (32 KiB by default) per second. `None` means no limit.
    pub limit: Option<u32>,
    /// Maximum rate, bytes per second. `None` means no limit.
    pub bytes_limit: Option<u64>,
}

impl Default for Entitlement {
    fn default() -> Self {
        Entitlement { shares: SHARES_DEFAULT, reservation: 0, limit: None, bytes_limit: None }
    }
}

/// Entitlements of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskQos {
    /// Entitlement at the datastore of the disk's backing.
    pub backing: Entitlement,
    /// Entitlement at each flash device.
    pub flash: Entitlement,
}

/// A resource that disks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resource {
    /// A datastore of several backings.
    Datastore(DatastoreId),
    /// A flash device.
    Flash(DeviceId),
}

/// Use of a datastore or flash device: its window and its waiting I/Os.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceState {
    /// State of the resource's window.
    pub window: WindowState,
    /// Number of I/Os that wait in the scheduler.
    pub waiting: usize,
}

/// Returns the number of units that an I/O of `bytes` counts as.
#[inline]
pub fn units(bytes: u64, unit_bytes: u32) -> u32 {
    // Nearly every I/O counts as one unit, which needs no division.
    if bytes <= u64::from(unit_bytes) {
        return 1;
    }
    bytes.div_ceil(u64::from(unit_bytes)).clamp(1, u64::from(u32::MAX)) as u32
}
