//! Flash of other hosts: what this host lends ([`exports`]), and the sockets that lead to what it borrows ([`sockets`]).
//!
//! A lease is flash of one host that another one uses. Here it is a device of a pool
//! ([0022](../../../../../../docs/decisions/0022-peer-copies.md)); the pool decides what becomes of a device whose lender is silent.

mod exports;
mod sockets;

use std::sync::{Arc, OnceLock, PoisonError};

use hob_control::Loan;

use super::peer_access::PeerAccess;
use super::qos::QosService;
use super::registry::Registry;
use super::tasks::Tasks;
use crate::daemon::hardware::BackingOptions;
#[cfg(test)]
pub(super) use exports::{Admitted, CONNECTIONS_MAX};
pub(crate) use exports::{Ended, FlashExports};
use sockets::LenderSockets;

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct RemoteFlash(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    registry: Arc<Registry>,
    tasks: Tasks,
    qos: QosService,
    peers: Arc<PeerAccess>,
    backing_options: BackingOptions,
    /// What this host lends, if anything.
    exports: OnceLock<FlashExports>,
    sockets: LenderSockets,
}

impl RemoteFlash {
    /// A service that lends and borrows nothing yet.
    pub(super) fn new(
        registry: Arc<Registry>,
        tasks: Tasks,
        qos: QosService,
        peers: Arc<PeerAccess>,
        backing_options: BackingOptions,
    ) -> RemoteFlash {
        let (exports, sockets) = (OnceLock::new(), LenderSockets::default());
        RemoteFlash(Arc::new(Shared { registry, tasks, qos, peers, backing_options, exports, sockets }))
    }

    /// Sets what is lent, before the start. Later calls have no effect.
    pub(crate) fn set_exports(&self, exports: FlashExports) {
        let _ = self.0.exports.set(exports);
    }

    /// The lease to which the socket of a device leads, if the lender has answered.
    pub(super) fn lease_at(&self, path: &std::path::Path) -> Option<Loan> {
        let sockets = self.0.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.get(path)?.lease()
    }
}
