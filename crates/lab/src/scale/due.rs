//! What each disk of a model is due: a level of units a second for each share, the same for all, at which everything that the store
//! did is given out. No disk gets more than it wants or its limit allows, and none less than its reservation, if it wants that much.

use super::{Demand, Disk};

/// Halvings of the interval in which the level lies.
const STEPS: usize = 100;

/// Units a second that a disk would take.
pub(super) fn wants(disk: &Disk) -> f64 {
    let limit = disk.due.limit.map_or(f64::INFINITY, f64::from);
    match disk.demand {
        Demand::Rate(rate) => f64::from(rate).min(limit),
        Demand::Depth(_) => limit,
    }
}

/// What disks are due of so many units a second together, by disk.
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
