//! Computes the entitlement of each disk of a model. All disks have the same rate per share, chosen
//! so that the entitlements add up to the datastore's total rate. The entitlement of a disk is at
//! most its demand and its limit. It is at least the disk's reservation, if the disk demands that
//! much.

use super::{Demand, Disk};

/// Number of bisection steps to find the rate per share.
const STEPS: usize = 100;

/// Returns the demand of a disk, units per second. A disk with a constant queue depth demands as
/// much as its limit allows.
pub(super) fn wants(disk: &Disk) -> f64 {
    let limit = disk.due.limit.map_or(f64::INFINITY, f64::from);
    match disk.demand {
        Demand::Rate(rate) => f64::from(rate).min(limit),
        Demand::Depth(_) => limit,
    }
}

/// Returns the entitlement of each disk at a total rate of `rate` units per second.
pub(super) fn due(disks: &[Disk], rate: f64) -> Vec<f64> {
    let at = |level: f64| -> Vec<f64> {
        let of = |disk: &Disk| {
            let share = f64::from(disk.due.shares) * level;
            share.max(f64::from(disk.due.reservation)).min(wants(disk))
        };
        disks.iter().map(of).collect()
    };
    let (mut low, mut high) = (0.0, rate.max(1.0));
    for _ in 0..STEPS {
        let level = (low + high) / 2.0;
        if at(level).iter().sum::<f64>() < rate { low = level } else { high = level }
    }
    at(high)
}
