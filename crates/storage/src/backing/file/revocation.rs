//! The lease gate of a file, which can be closed permanently.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::ring::Gate;

/// A lease gate that closes permanently when this host stops using the disk. Changes that still
/// wait for a thread then do not start, even if the host's lease is valid: another host may own the
/// disk.
#[derive(Debug)]
pub(super) struct RevocableGate {
    lease: Arc<dyn Gate>,
    is_revoked: AtomicBool,
}

impl RevocableGate {
    pub(super) fn new(lease: Arc<dyn Gate>) -> RevocableGate {
        RevocableGate { lease, is_revoked: AtomicBool::new(false) }
    }

    pub(super) fn revoke(&self) {
        self.is_revoked.store(true, Ordering::SeqCst);
    }
}

impl Gate for RevocableGate {
    fn is_open(&self) -> bool {
        !self.is_revoked.load(Ordering::SeqCst) && self.lease.is_open()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Lease(AtomicBool);

    impl Gate for Lease {
        fn is_open(&self) -> bool {
            self.0.load(Ordering::SeqCst)
        }
    }

    #[test]
    fn the_gate_is_open_while_the_lease_is_valid_and_until_the_disk_is_given_up() {
        let lease = Arc::new(Lease(AtomicBool::new(false)));
        let gate = RevocableGate::new(lease.clone());
        assert!(!gate.is_open());
        lease.0.store(true, Ordering::SeqCst);
        assert!(gate.is_open());
        gate.revoke();
        assert!(!gate.is_open());
    }
}
