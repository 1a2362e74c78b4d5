//! The exports of online disks for NBD clients, and the vhost-user sockets.
//!
//! Each disk has an export with its own name, and may have others. The services change the table of
//! exports, and listeners read the table. The lock of the table is held only while one call reads
//! or changes the table.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hob_engine::command::Access;
use hob_engine::io::Promote;
use hob_engine::units::DiskId;
use hob_nbd::ExportInfo;
use tokio::sync::Notify;

use super::hardware::BackingInfo;
use super::shard_api::ShardHandle;
use super::vhost_user::{self, Gateway};

/// An export of a disk to which clients can connect.
#[derive(Clone, Debug)]
pub(crate) struct Export {
    pub(crate) of: String,
    /// Id of the disk on its shard.
    pub(crate) disk: DiskId,
    /// The shard that serves the disk.
    pub(crate) shard: ShardHandle,
    /// Size and features that are announced to NBD clients.
    pub(crate) info: ExportInfo,
    /// Which reads through this export promote data into the cache.
    pub(crate) promote: Promote,
}

/// Maximum number of additional exports per disk.
pub(crate) const EXPORTS_MAX: usize = 16;

/// All exports and vhost-user sockets. Clones share one table of each.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exports(Arc<Mutex<BTreeMap<String, Export>>>, Arc<Mutex<Gateways>>, Arc<Opening>);

/// Disks that are being opened at the start of the daemon. A client that asks for one of these
/// disks waits until its opening has ended.
#[derive(Debug, Default)]
struct Opening {
    /// The disk of each export, by the export's name.
    names: Mutex<BTreeMap<String, String>>,
    changed: Notify,
}

/// A disk that is being opened. Dropping this value tells the clients that wait for the disk that
/// its opening has ended.
#[derive(Debug)]
pub(crate) struct OpeningDisk {
    exports: Exports,
    disk: String,
}

impl Drop for OpeningDisk {
    fn drop(&mut self) {
        self.exports.opening().retain(|_, disk| *disk != self.disk);
        self.exports.2.changed.notify_waiters();
    }
}

/// Vhost-user sockets by export name, each with the name of its disk.
type Gateways = BTreeMap<String, (String, Gateway)>;

impl Exports {
    /// Exports a disk under a name. Does not replace the export of another disk, because the
    /// clients of that disk would then write to this one.
    pub(crate) fn insert(&self, name: &str, export: Export) {
        let mut table = self.table();
        match table.get(name).filter(|known| known.of != export.of) {
            Some(known) => tracing::error!(
                "disk {}: cannot export it as '{name}', which is a name of disk {}",
                export.of,
                known.of
            ),
            None => _ = table.insert(name.to_owned(), export),
        }
        drop(table);
        // Clients need not wait for the cache, which may still be recovering.
        self.opening().remove(name);
        self.2.changed.notify_waiters();
    }

    /// Removes an export and disconnects its vhost-user client. The shard closes the connections of
    /// NBD clients.
    pub(crate) async fn remove(&self, name: &str) {
        let removed = self.gateways().remove(name);
        self.table().remove(name);
        vhost_user::close(removed.into_iter().map(|(_, gateway)| gateway).collect()).await;
    }

    /// Sets the metadata contexts of all exports of a disk. Connected NBD clients keep the contexts
    /// that they have chosen.
    pub(crate) fn set_contexts(&self, disk: &str, contexts: &[String]) {
        for export in self.table().values_mut().filter(|export| export.of == disk) {
            export.info.contexts = contexts.to_vec();
        }
    }

    /// Changes the size of a disk: new clients see the new size, and vhost-user clients are
    /// notified. Connected NBD clients keep the old size.
    pub(crate) fn grow(&self, disk: &str, size_bytes: u64) {
        for export in self.table().values_mut().filter(|export| export.of == disk) {
            export.info.size_bytes = size_bytes;
        }
        for (_, gateway) in self.gateways().values().filter(|(of, _)| of == disk) {
            gateway.grow(size_bytes);
        }
    }

    /// Adds the vhost-user socket of an export; the socket exists until the export is removed.
    pub(crate) fn listen_vhost_user(&self, disk: &str, name: &str, gateway: Gateway) {
        self.gateways().insert(name.to_owned(), (disk.to_owned(), gateway));
    }

    /// Replaces the vhost-user socket of a disk's own export; `None` removes it. Returns false, and
    /// keeps the present socket, if a guest is connected to it. May block for as long as
    /// [`Gateway::close`].
    pub(crate) fn replace_vhost_user(&self, disk: &str, gateway: Option<Gateway>) -> bool {
        let end = self.gateways().get(disk).map(|(_, present)| present.end_unless_used());
        if end.is_some_and(|end| !end()) {
            return false;
        }
        let mut gateways = self.gateways();
        let replaced = match gateway {
            Some(gateway) => gateways.insert(disk.to_owned(), (disk.to_owned(), gateway)),
            None => gateways.remove(disk),
        };
        // The lock of the table is released first, because the control thread needs the lock.
        drop(gateways);
        if let Some((_, replaced)) = replaced {
            replaced.close();
        }
        true
    }

    /// Returns the vhost-user sockets that could not be created: disk, export and reason.
    pub(crate) fn failing_sockets(&self) -> Vec<(String, String, String)> {
        let gateways = self.gateways();
        let failing = gateways
            .iter()
            .filter_map(|(name, (disk, gateway))| Some((disk.clone(), name.clone(), gateway.problem()?)));
        failing.collect()
    }

    /// Removes all exports and vhost-user sockets of a disk.
    pub(crate) async fn remove_disk(&self, disk: &str) {
        let removed = self.take_gateways(disk);
        self.table().retain(|_, export| export.of != disk);
        vhost_user::close(removed).await;
    }

    fn take_gateways(&self, disk: &str) -> Vec<Gateway> {
        let mut gateways = self.gateways();
        let (taken, kept): (Gateways, Gateways) =
            std::mem::take(&mut *gateways).into_iter().partition(|(_, (of, _))| of == disk);
        *gateways = kept;
        taken.into_values().map(|(_, gateway)| gateway).collect()
    }

    /// Returns the export with this name; `None` if there is none.
    pub(crate) fn get(&self, name: &str) -> Option<Export> {
        self.table().get(name).cloned()
    }

    /// Returns all exports for which `may` returns true, by name. The arguments of `may` are the
    /// names of the export and of its disk.
    pub(crate) fn visible(&self, may: impl Fn(&str, &str) -> bool) -> Vec<(String, Export)> {
        let table = self.table();
        let seen = table.iter().filter(|(name, export)| may(name, &export.of));
        seen.map(|(name, export)| (name.clone(), export.clone())).collect()
    }

    /// Records that a disk is being opened: clients that ask for one of these exports wait until
    /// the result is dropped.
    pub(crate) fn begin_opening(&self, disk: &str, exports: impl IntoIterator<Item = String>) -> OpeningDisk {
        self.opening().extend(exports.into_iter().map(|name| (name, disk.to_owned())));
        OpeningDisk { exports: self.clone(), disk: disk.to_owned() }
    }

    /// Returns true if an export of this name belongs to a disk that is being opened, and `may`
    /// returns true for the export. The empty name matches every export. The arguments of `may` are
    /// the names of the export and of its disk.
    pub(crate) fn is_opening(&self, name: &str, may: impl Fn(&str, &str) -> bool) -> bool {
        let opening = self.opening();
        opening.iter().any(|(export, disk)| (name.is_empty() || name == export) && may(export, disk))
    }

    /// Waits until `is_over` returns true. `is_over` is called again each time a disk has been
    /// opened or could not be opened.
    pub(crate) async fn until_opened(&self, is_over: impl Fn() -> bool) {
        loop {
            let changed = self.2.changed.notified();
            tokio::pin!(changed);
            // Every change after this call is noticed.
            changed.as_mut().enable();
            if is_over() {
                return;
            }
            changed.await;
        }
    }

    fn opening(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.2.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn gateways(&self) -> MutexGuard<'_, Gateways> {
        self.1.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Export>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the NBD export information of a disk with this backing.
pub(crate) fn export_info(info: &BackingInfo, access: Access) -> ExportInfo {
    ExportInfo {
        read_only: access == Access::ReadOnly,
        can_trim: info.can_discard,
        can_fast_zero: info.can_fast_zero,
        description: info.description.clone(),
        block_size_min: info.block_bytes_min,
        block_size_preferred: info.block_bytes_min.max(4096),
        ..ExportInfo::new(info.size_bytes)
    }
}
