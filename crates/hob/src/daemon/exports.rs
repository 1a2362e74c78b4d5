//! What NBD clients can ask for: the disks that are online, by name.
//!
//! The manager writes this table, listeners read it. The lock is held for a look-up only.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hob_engine::units::DiskId;
use hob_nbd::{ExportDirectory, ExportInfo};

use super::shard_api::ShardHandle;
use super::vhost_user::Gateway;

/// One disk that clients can connect to.
#[derive(Clone, Debug)]
pub(crate) struct Export {
    /// Its name on its shard.
    pub(crate) disk: DiskId,
    /// Who serves it.
    pub(crate) shard: ShardHandle,
    /// As clients see it.
    pub(crate) info: ExportInfo,
    /// Where machines come in, for as long as it is offered.
    pub(crate) _gateway: Option<Arc<Gateway>>,
}

/// All exports. Clones share one table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exports(Arc<Mutex<BTreeMap<String, Export>>>);

impl Exports {
    /// Offers a disk.
    pub(crate) fn insert(&self, name: &str, export: Export) {
        self.table().insert(name.to_owned(), export);
    }

    /// Offers it no more. Connections that exist are the shard's matter.
    pub(crate) fn remove(&self, name: &str) {
        self.table().remove(name);
    }

    /// The export of that name. The empty name means the only disk there is, if there is one only.
    pub(crate) fn get(&self, name: &str) -> Option<Export> {
        let table = self.table();
        match name {
            "" if table.len() == 1 => table.values().next().cloned(),
            _ => table.get(name).cloned(),
        }
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Export>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ExportDirectory for Exports {
    fn find(&self, name: &str) -> Option<ExportInfo> {
        self.get(name).map(|export| export.info)
    }

    fn list(&self) -> Vec<(String, String)> {
        self.table().iter().map(|(name, export)| (name.clone(), export.info.description.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_empty_name_means_the_only_disk() {
        let exports = Exports::default();
        let (shard, _calls) = ShardHandle::new(|| {});
        let export = |disk, bytes| Export {
            disk: DiskId(disk),
            shard: shard.clone(),
            info: ExportInfo::new(bytes),
            _gateway: None,
        };
        assert!(exports.find("").is_none());
        exports.insert("a", export(1, 512));
        assert_eq!(exports.find("").unwrap().size_bytes, 512);
        exports.insert("b", export(2, 1024));
        assert!(exports.find("").is_none() && exports.find("c").is_none());
        assert_eq!(exports.get("b").unwrap().disk, DiskId(2));
        exports.remove("a");
        assert_eq!(exports.list(), [("b".to_owned(), String::new())]);
    }
}
