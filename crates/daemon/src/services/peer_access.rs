//! Data with which this host connects to other hosts: its certificate, its name, and its cluster.
//! All of this data is set before the services start.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use hob_control::{ClientTls, Endpoint};

use crate::api_error::{ApiError, Result, invalid};
use crate::cluster::{Cluster, host_name};
use crate::config::MigrationTls;

/// TLS files for connections to other hosts, and the directory for the local sockets of these
/// connections.
#[derive(Clone, Debug)]
pub(crate) struct MigrationTransport {
    /// Certificate of this host and the trusted authorities; `None` if not configured.
    pub(crate) tls: Option<MigrationTls>,
    /// Directory for local sockets.
    pub(crate) directory: PathBuf,
}

/// The access to peers; see the module.
#[derive(Debug, Default)]
pub(super) struct PeerAccess {
    transport: OnceLock<MigrationTransport>,
    cluster: OnceLock<Arc<Cluster>>,
    name: OnceLock<String>,
}

impl PeerAccess {
    /// Sets the credentials and the directory for migrations. Later calls have no effect.
    pub(super) fn set_transport(&self, transport: MigrationTransport) {
        let _ = self.transport.set(transport);
    }

    /// Sets the cluster. Later calls have no effect.
    pub(super) fn set_cluster(&self, cluster: Arc<Cluster>) {
        let _ = self.cluster.set(cluster);
    }

    /// Sets the name of this host outside a cluster. Later calls have no effect.
    pub(super) fn set_name(&self, name: String) {
        let _ = self.name.set(name);
    }

    pub(super) fn cluster(&self) -> Option<&Arc<Cluster>> {
        self.cluster.get()
    }

    pub(super) fn transport(&self) -> Result<&MigrationTransport> {
        self.transport.get().ok_or_else(|| {
            ApiError::conflict("'hob serve' saves no state, so its disk cannot be moved to another host")
                .hint("serve the disk with 'hob daemon', which saves the owner of each disk")
        })
    }

    /// Returns the name of this host among its peers.
    pub(super) fn own_name(&self) -> String {
        match self.cluster() {
            Some(cluster) => cluster.view().host,
            None => self.name.get().cloned().unwrap_or_else(host_name),
        }
    }

    /// Returns the address of another host's daemon and the credentials for it.
    pub(super) fn other_daemon(&self, to: &str) -> Result<(String, u16, ClientTls)> {
        let Ok(Endpoint::Tcp { host, port }) = Endpoint::parse_control(&format!("tcp:{to}")) else {
            return Err(invalid!("'{to}' is not the address of a control API (HOST:PORT)"));
        };
        let tls = self.transport()?.tls.clone().ok_or_else(|| {
            ApiError::conflict("this host has no certificate for connections to other hosts").hint(
                "set cert, key and ca in [migrate] of hob.toml, or cert, key and client_ca in [control.tls]",
            )
        })?;
        let tls = tls.load().map_err(|error| ApiError::failed(error.to_string()))?;
        Ok((host, port, tls))
    }
}
