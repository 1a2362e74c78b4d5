//! What NBD clients can ask for: the disks that are online, by the names of their exports; and where machines come in.
//!
//! Each disk has an export of its own name, and may have others. The manager writes this table, listeners read it. The lock is held
//! for a look-up only.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hob_engine::command::Access;
use hob_engine::io::Promote;
use hob_engine::units::DiskId;
use hob_nbd::ExportInfo;
use tokio::sync::Notify;

use super::hardware::BackingInfo;
use super::shard_api::ShardHandle;
use super::vhost_user::Gateway;

/// One way to a disk that clients can connect to.
#[derive(Clone, Debug)]
pub(crate) struct Export {
    /// The disk.
    pub(crate) of: String,
    /// Its name on its shard.
    pub(crate) disk: DiskId,
    /// Who serves it.
    pub(crate) shard: ShardHandle,
    /// As clients see it.
    pub(crate) info: ExportInfo,
    /// What reads leave behind in the cache.
    pub(crate) promote: Promote,
}

/// All exports, and where machines come in. Clones share one table of each.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exports(Arc<Mutex<BTreeMap<String, Export>>>, Arc<Mutex<Gateways>>, Arc<Opening>);

/// Disks that are being opened at the start of the daemon. Clients that ask for one wait.
#[derive(Debug, Default)]
struct Opening {
    /// The disk of each export, by the export's name.
    names: Mutex<BTreeMap<String, String>>,
    changed: Notify,
}

/// A disk that is being opened, until dropped.
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

/// By the names of exports: of which disk, and where.
type Gateways = BTreeMap<String, (String, Gateway)>;

impl Exports {
    /// Offers a disk under a name. Not under that of another disk, whoever may have missed that: its clients would write to this one.
    pub(crate) fn insert(&self, name: &str, export: Export) {
        let mut table = self.table();
        match table.get(name).filter(|known| known.of != export.of) {
            Some(known) => tracing::error!("{} is not offered as '{name}': that is {}", export.of, known.of),
            None => _ = table.insert(name.to_owned(), export),
        }
        drop(table);
        // Clients need not wait for its cache, which may still be recovered.
        self.opening().remove(name);
        self.2.changed.notify_waiters();
    }

    /// Offers an export no more, and sends its machine away. Other connections that exist are the shard's matter.
    pub(crate) fn remove(&self, name: &str) {
        self.gateways().remove(name);
        self.table().remove(name);
    }

    /// Gives all exports of a disk these metadata contexts. Clients that are there keep what they chose.
    pub(crate) fn set_contexts(&self, disk: &str, contexts: &[String]) {
        for export in self.table().values_mut().filter(|export| export.of == disk) {
            export.info.contexts = contexts.to_vec();
        }
    }

    /// A disk is larger now: clients that come see that, and its machines are told. Clients that are there keep the size they know.
    pub(crate) fn grow(&self, disk: &str, size_bytes: u64) {
        for export in self.table().values_mut().filter(|export| export.of == disk) {
            export.info.size_bytes = size_bytes;
        }
        for (_, gateway) in self.gateways().values().filter(|(of, _)| of == disk) {
            gateway.grow(size_bytes);
        }
    }

    /// Lets machines use a disk by the export of that name, for as long as it is offered.
    pub(crate) fn let_machines_in(&self, disk: &str, name: &str, gateway: Gateway) {
        self.gateways().insert(name.to_owned(), (disk.to_owned(), gateway));
    }

    /// Offers no export of a disk any more, and no way in for machines.
    pub(crate) fn remove_disk(&self, disk: &str) {
        self.gateways().retain(|_, (of, _)| of != disk);
        self.table().retain(|_, export| export.of != disk);
    }

    /// The export of that name.
    pub(crate) fn get(&self, name: &str) -> Option<Export> {
        self.table().get(name).cloned()
    }

    /// All of them, by name, that `may` be seen, which is told the export's name and its disk's.
    pub(crate) fn visible(&self, may: impl Fn(&str, &str) -> bool) -> Vec<(String, Export)> {
        let table = self.table();
        let seen = table.iter().filter(|(name, export)| may(name, &export.of));
        seen.map(|(name, export)| (name.clone(), export.clone())).collect()
    }

    /// Notes that a disk is being opened: clients that ask for one of these exports wait until the result is dropped.
    pub(crate) fn begin_opening(&self, disk: &str, exports: impl IntoIterator<Item = String>) -> OpeningDisk {
        self.opening().extend(exports.into_iter().map(|name| (name, disk.to_owned())));
        OpeningDisk { exports: self.clone(), disk: disk.to_owned() }
    }

    /// Is a disk being opened with an export of that name that `may` be seen? The empty name is that of any. `may` is told the
    /// export's name and its disk's.
    pub(crate) fn is_opening(&self, name: &str, may: impl Fn(&str, &str) -> bool) -> bool {
        let opening = self.opening();
        opening.iter().any(|(export, disk)| (name.is_empty() || name == export) && may(export, disk))
    }

    /// Waits until a disk has been opened, or could not be: `is_over` is asked after each.
    pub(crate) async fn until_opened(&self, is_over: impl Fn() -> bool) {
        loop {
            let changed = self.2.changed.notified();
            tokio::pin!(changed);
            // From here on no change is missed.
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

/// What clients are told of a disk with that backing.
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
