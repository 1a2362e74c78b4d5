//! Kinds of the daemon's end.

/// Kind of the daemon's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Dirty data stays in persistent caches.
    Plain,
    /// Dirty data is written to the backings first, as far as they accept it.
    Drain,
    /// Another daemon process continues at once.
    HandOver,
}
