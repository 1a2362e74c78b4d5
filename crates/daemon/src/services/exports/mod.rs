//! The export service: the table of exports that listeners read, vhost-user sockets, FUSE files,
//! block devices of this host, and the dirty bitmaps that NBD clients see.
//!
//! A FUSE file is an export that hob mounts as a file on this host. The service owns the table, the
//! FUSE files inherited from the previous daemon process, and the directory of bitmaps. The
//! registry entry of a disk lists the disk's exports, FUSE files and dirty bitmaps.

mod additional;
mod bitmaps;
mod closing;
mod devices;
mod files;
mod inherited;
mod own;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use super::registry::Registry;
use super::tasks::Tasks;
use crate::exports::Exports;
use crate::socket_access::SocketAccess;
use crate::vhost_user::SocketPlace;
pub(super) use devices::DeviceEntry;
pub(super) use files::FileEntry;
pub(crate) use inherited::InheritedFile;

service! {
    /// The export service; see the module.
    #[derive(Clone, Debug)]
    pub(crate) struct ExportService {
        registry: Arc<Registry>,
        tasks: Tasks,
        /// The table that listeners read.
        table: Exports,
        /// Directory of the dirty bitmaps; `None` if no state is saved.
        bitmaps: Option<PathBuf>,
    } with {
        /// Access rights of the disks' sockets.
        socket_access: Arc<OnceLock<SocketAccess>>,
        /// FUSE files inherited from the previous daemon process, by export.
        inherited: Arc<Mutex<BTreeMap<String, InheritedFile>>>,
    }
}

impl ExportService {
    /// Sets the access rights of the disks' sockets. The caller does this before it opens the first
    /// disk.
    pub(crate) fn set_socket_access(&self, access: SocketAccess) {
        let _ = self.socket_access.set(access);
    }

    /// Returns a socket address at `path` with the configured access rights.
    pub(super) fn socket_at(&self, path: &str) -> SocketPlace {
        SocketPlace { path: path.into(), access: self.socket_access.get().copied().unwrap_or_default() }
    }

    /// Returns the table of exports: the NBD exports and vhost-user sockets through which clients
    /// use the disks.
    pub(super) fn table(&self) -> &Exports {
        &self.table
    }
}
