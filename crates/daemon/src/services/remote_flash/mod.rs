//! Remote flash: the flash leases of this host ([`exports`]), and the local sockets that lead to
//! flash leased from other hosts ([`sockets`]).
//!
//! A flash lease lets one host use flash of another host as a pool device
//! ([0022](../../../../../docs/decisions/0022-peer-copies.md)). The pool service decides when hob
//! stops using a device whose lending host does not answer.

mod exports;
mod sockets;

use std::sync::{Arc, OnceLock, PoisonError};

use hob_control::FlashLease;

use super::peer_access::PeerAccess;
use super::qos::QosService;
use super::registry::Registry;
use super::tasks::Tasks;
use crate::hardware::BackingOptions;
#[cfg(test)]
pub(super) use exports::{Admitted, CONNECTIONS_MAX};
pub(crate) use exports::{Ended, FlashExports};
use sockets::LenderSockets;

service! {
    /// The remote flash service; see the module.
    #[derive(Clone, Debug)]
    pub(crate) struct RemoteFlash {
        registry: Arc<Registry>,
        tasks: Tasks,
        qos: QosService,
        peers: Arc<PeerAccess>,
        backing_options: BackingOptions,
    } with {
        /// The flash leases of this host, if it lends flash.
        exports: Arc<OnceLock<FlashExports>>,
        sockets: Arc<LenderSockets>,
    }
}

impl RemoteFlash {
    /// Sets the flash leases of this host, before the start. Later calls have no effect.
    pub(crate) fn set_exports(&self, exports: FlashExports) {
        let _ = self.exports.set(exports);
    }

    /// Returns the flash lease behind the socket of a remote device, if the lending host has
    /// answered.
    pub(super) fn lease_at(&self, path: &std::path::Path) -> Option<FlashLease> {
        let sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.get(path)?.lease()
    }
}
