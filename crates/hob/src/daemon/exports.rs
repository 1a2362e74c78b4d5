//! What NBD clients can ask for: the disks that are online, by the names of their exports; and where machines come in.
//!
//! Each disk has an export of its own name, and may have others. The manager writes this table, listeners read it. The lock is held
//! for a look-up only.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hob_engine::io::Promote;
use hob_engine::units::DiskId;
use hob_nbd::ExportInfo;

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
pub(crate) struct Exports(Arc<Mutex<BTreeMap<String, Export>>>, Arc<Mutex<Gateways>>);

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

    fn gateways(&self) -> MutexGuard<'_, Gateways> {
        self.1.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Export>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
