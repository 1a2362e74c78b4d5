//! How clients reach disks: the table of exports that listeners read, sockets of vhost-user, files, and the dirty bitmaps that NBD
//! clients see.
//!
//! The service owns the table, the files that the program before has left, and the directory of bitmaps. Which exports, files and
//! bitmaps a disk is to have is in its entry of the registry.

mod additional;
mod bitmaps;
mod files;
mod inherited;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use super::registry::Registry;
use super::tasks::Tasks;
use crate::daemon::exports::Exports;
use crate::daemon::socket_access::SocketAccess;
use crate::daemon::vhost_user::SocketPlace;
pub(super) use files::FileEntry;
pub(crate) use inherited::InheritedFile;

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct ExportService(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    registry: Arc<Registry>,
    tasks: Tasks,
    table: Exports,
    /// Where dirty bitmaps are kept, if anything is.
    bitmaps: Option<PathBuf>,
    /// Who may open the sockets of disks.
    socket_access: OnceLock<SocketAccess>,
    /// By export.
    inherited: Mutex<BTreeMap<String, InheritedFile>>,
}

impl ExportService {
    /// A service over the table that listeners read. `bitmaps` is the directory of dirty bitmaps.
    pub(super) fn new(
        registry: Arc<Registry>,
        tasks: Tasks,
        table: Exports,
        bitmaps: Option<PathBuf>,
    ) -> ExportService {
        let (socket_access, inherited) = (OnceLock::new(), Mutex::default());
        ExportService(Arc::new(Shared { registry, tasks, table, bitmaps, socket_access, inherited }))
    }

    /// Sets who may open the sockets of disks, before the first disk is opened.
    pub(crate) fn set_socket_access(&self, access: SocketAccess) {
        let _ = self.0.socket_access.set(access);
    }

    /// A socket of a disk at `path`.
    pub(super) fn socket_at(&self, path: &str) -> SocketPlace {
        SocketPlace { path: path.into(), access: self.0.socket_access.get().copied().unwrap_or_default() }
    }

    /// What clients can ask for.
    pub(super) fn table(&self) -> &Exports {
        &self.0.table
    }
}
