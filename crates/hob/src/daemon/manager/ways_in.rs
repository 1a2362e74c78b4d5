//! Under which names clients find a disk: its own, and further ones with fewer rights or without effect on its cache.

use std::sync::Arc;

use hob_control::{DiskChanged, Export as ExportSpec, check_name};
use hob_engine::io::Promote;
use hob_engine::units::DiskId;
use hob_nbd::ExportInfo;

use super::refusal::Refusal;
use super::{Inner, Manager};
use crate::daemon::exports::Export;
use crate::daemon::shard_api::ShardHandle;

/// Further exports of one disk.
const EXPORTS_MAX: usize = 16;

impl Manager {
    /// Gives a disk another export.
    pub(crate) async fn export_add(
        self: &Arc<Self>,
        disk: String,
        export: ExportSpec,
    ) -> Result<DiskChanged, Refusal> {
        let manager = self.clone();
        self.change(async move {
            let claim = manager.claim_disk(&disk, "given another export")?;
            manager.inner().check_export(&disk, &export)?;
            manager.inner().disk_mut(&disk)?.wanted.exports.push(export.clone());
            // That of its own name is there while the disk is.
            if let Some(own) = manager.exports.get(&disk) {
                manager.exports.insert(&export.name, further(&own, &export));
            }
            manager.finish_disk(&disk, claim, Vec::new()).await
        })
        .await
    }

    /// Takes one away, with the connections of its clients.
    pub(crate) async fn export_remove(
        self: &Arc<Self>,
        disk: String,
        export: String,
    ) -> Result<DiskChanged, Refusal> {
        let manager = self.clone();
        self.change(async move {
            let claim = manager.claim_disk(&disk, "deprived of an export")?;
            {
                let mut inner = manager.inner();
                let exports = &mut inner.disk_mut(&disk)?.wanted.exports;
                let before = exports.len();
                exports.retain(|known| known.name != export);
                if exports.len() == before {
                    let hint = match export == disk {
                        true => "a disk's own export goes with the disk: hob disk remove",
                        false => "see hob export list",
                    };
                    return Err(
                        Refusal::not_found(format!("{disk} has no further export '{export}'")).hint(hint)
                    );
                }
            }
            manager.exports.remove(&export);
            if let Ok((shard, id)) = manager.shard_of(&disk) {
                shard.close_export(id, export);
            }
            manager.finish_disk(&disk, claim, Vec::new()).await
        })
        .await
    }

    /// Offers a disk that is online, under all of its names.
    pub(super) fn offer(&self, name: &str, disk: DiskId, shard: ShardHandle, mut info: ExportInfo) {
        let bitmaps = self.inner().disk(name).map_or(Vec::new(), |disk| disk.wanted.bitmaps.clone());
        info.contexts = Self::bitmap_contexts(&bitmaps);
        let own = Export { of: name.to_owned(), disk, shard, info, promote: Promote::Usual };
        let inner = self.inner();
        for spec in inner.disk(name).map_or(&[][..], |disk| &disk.wanted.exports) {
            self.exports.insert(&spec.name, further(&own, spec));
        }
        self.exports.insert(name, own);
    }
}

/// Another export beside a disk's own.
fn further(own: &Export, spec: &ExportSpec) -> Export {
    let mut export = own.clone();
    export.info.read_only |= spec.read_only;
    if spec.no_promote {
        export.promote = Promote::Never;
    }
    export
}

impl Inner {
    /// May a disk be given that export?
    fn check_export(&self, disk: &str, export: &ExportSpec) -> Result<(), Refusal> {
        let name = &export.name;
        check_name(name)
            .map_err(|error| Refusal::invalid(format!("'{name}' cannot be an export's name: {error}")))?;
        self.check_export_name(name)?;
        if self.disk(disk)?.wanted.exports.len() >= EXPORTS_MAX {
            return Err(Refusal::conflict(format!(
                "{disk} has {EXPORTS_MAX} further exports; it cannot have more"
            )));
        }
        Ok(())
    }

    /// Has nothing that clients can ask for that name?
    pub(super) fn check_export_name(&self, name: &str) -> Result<(), Refusal> {
        let has_it = |disk: &&super::DiskEntry| {
            disk.wanted.name == name || disk.wanted.exports.iter().any(|export| export.name == name)
        };
        match self.disks.values().find(has_it).map(|disk| &disk.wanted.name) {
            None => Ok(()),
            Some(disk) if disk == name => {
                Err(Refusal::conflict(format!("there is a disk '{name}' already"))
                    .hint("choose another name"))
            }
            Some(disk) => Err(Refusal::conflict(format!("disk {disk} has an export '{name}' already"))
                .hint("choose another name")),
        }
    }
}
