//! The ways in which a daemon process ends. They differ in what happens to dirty data, and whether
//! another process takes over the disks.

/// How a daemon process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The daemon stops, and dirty data stays in persistent caches.
    Plain,
    /// The daemon writes dirty data to the backings, as far as they accept it, and then stops.
    Drain,
    /// Another daemon process takes over the disks immediately (upgrade).
    HandOver,
}
