//! The work that a client may cause in one turn of the shard's loop.

/// Work budget of one client per turn of the shard's loop, in descriptors and payload pages. The
/// whole budget takes a fraction of a millisecond.
pub(super) const BUDGET: u32 = 4096;

/// Work budget of a client whose requests wait for a device: four requests of 4 KiB. The device
/// starts to read for these requests while the shard takes the next four requests.
const SMALL_BUDGET: u32 = 16;

/// Remaining work budget of a client in this turn of the shard's loop.
#[derive(Debug)]
pub struct Budget {
    pub(super) left: u32,
}

impl Budget {
    /// Returns the budget of one turn. `is_device_bound` is true if requests wait for a device.
    pub fn of_turn(is_device_bound: bool) -> Budget {
        Budget { left: if is_device_bound { SMALL_BUDGET } else { BUDGET } }
    }
}

impl Default for Budget {
    fn default() -> Budget {
        Budget::of_turn(false)
    }
}
