//! A lease gate that can be replaced. When a host acquires a disk again, the host has a new lease,
//! and sends may still wait for the gate of the earlier lease.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::ring::Gate;

/// A gate that is open if the gate that was set last is open, or if no gate was set.
#[derive(Debug, Default)]
pub(super) struct ReplaceableGate(Mutex<Option<Arc<dyn Gate>>>);

impl ReplaceableGate {
    pub(super) fn set(&self, gate: Arc<dyn Gate>) {
        *self.lock() = Some(gate);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<dyn Gate>>> {
        // Nothing panics while it is locked.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Gate for ReplaceableGate {
    fn is_open(&self) -> bool {
        self.lock().as_ref().is_none_or(|gate| gate.is_open())
    }
}
