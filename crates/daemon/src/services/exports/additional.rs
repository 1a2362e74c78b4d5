//! The exports of a disk: its own export, and additional exports, which can have fewer rights or
//! leave the cache's content unchanged. NBD clients select an export by name. An export can also be
//! a file and a vhost-user socket.

use hob_control::{Export as ExportSpec, check_name};
use hob_engine::io::Promote;
use hob_engine::units::DiskId;
use hob_frontends::vhost_user::block::Info;
use hob_nbd::ExportInfo;

use super::ExportService;
use crate::api_error::{ApiError, Result, conflict, failed, invalid, not_found};
use crate::exports::{EXPORTS_MAX, Export};
use crate::services::registry::{DiskEntry, Inner};
use crate::shard_api::ShardHandle;
use crate::vhost_user::{ExportedDisk, Failing, Gateway, SocketPlace, check_path};

impl ExportService {
    /// Adds an export to a disk, and saves the disk's exports.
    pub(in crate::services) async fn add(&self, disk: &str, export: ExportSpec) -> Result<()> {
        let guard = self.registry.guard_disk_for_command(disk, "given another export").await?;
        self.registry.inner().check_export(disk, &export)?;
        if let Some(path) = &export.fuse {
            self.check_file(path)?;
        }
        self.registry.inner().disk_mut(disk)?.wanted.exports.push(export.clone());
        if let Err(error) = self.open_export(disk, &export).await {
            self.table.remove(&export.name).await;
            self.registry.inner().disk_mut(disk)?.forget_export(&export.name);
            return Err(error);
        }
        drop(guard);
        self.registry.save().await
    }

    /// Removes an export, closes the connections of its clients, and saves the remaining exports.
    /// Fails if the export's file is open.
    pub(in crate::services) async fn remove(&self, disk: &str, export: String) -> Result<()> {
        let guard = self.registry.guard_disk_for_command(disk, "changed (an export is removed)").await?;
        let known = self.registry.inner().disk(disk)?.wanted.exports.iter().any(|known| known.name == export);
        if !known {
            let hint = match export == disk {
                true => "the disk's own export is removed with the disk: hob disk remove",
                false => "'hob export list' shows all exports",
            };
            return Err(not_found!("{disk} has no additional export '{export}'").hint(hint));
        }
        self.hide_export(disk, &export).await?;
        self.registry.inner().disk_mut(disk)?.forget_export(&export);
        self.table.remove(&export).await;
        if let Ok((shard, id)) = self.registry.shard_of(disk) {
            shard.close_export(id, export);
        }
        drop(guard);
        self.registry.save().await
    }

    /// Opens an additional export of a disk on all front ends that the export has. An export of an
    /// offline disk is opened when the disk comes online.
    async fn open_export(&self, disk: &str, export: &ExportSpec) -> Result<()> {
        // The disk's own export exists while the disk is online.
        let Some(own) = self.table.get(disk) else { return Ok(()) };
        let further = further(&own, export);
        if let Some(path) = &export.vhost_user {
            let opened = open_gateway(self.socket_at(path), &export.name, &further, Failing::Refuse).await;
            let gateway =
                opened.map_err(|error| failed!("cannot open the vhost-user socket {path}: {error}"))?;
            self.table.listen_vhost_user(disk, &export.name, gateway);
        }
        if let Some(path) = &export.fuse {
            self.show_export(disk, &export.name, path).await?;
        }
        // This step is last, so that clients never connect to an export that is not complete.
        self.table.insert(&export.name, further);
        Ok(())
    }

    /// Offers an online disk to NBD and vhost-user clients under all of its export names. Mounts no
    /// files.
    pub(in crate::services) async fn offer(
        &self,
        name: &str,
        disk: DiskId,
        shard: ShardHandle,
        mut info: ExportInfo,
    ) {
        let (bitmaps, further_ones) = {
            let inner = self.registry.inner();
            inner.disk(name).map_or((Vec::new(), Vec::new()), |disk| {
                (disk.wanted.bitmaps.clone(), disk.wanted.exports.clone())
            })
        };
        info.contexts = Self::bitmap_contexts(&bitmaps);
        let own = Export { of: name.to_owned(), disk, shard, info, promote: Promote::Usual };
        for spec in &further_ones {
            let export = further(&own, spec);
            if let Some(path) = &spec.vhost_user {
                match open_gateway(self.socket_at(path), &spec.name, &export, Failing::TryAgain).await {
                    Ok(gateway) => self.table.listen_vhost_user(name, &spec.name, gateway),
                    Err(error) => {
                        tracing::error!(
                            "export {}: cannot open the vhost-user socket {path}: {error}",
                            spec.name
                        );
                    }
                }
            }
            self.table.insert(&spec.name, export);
        }
        self.table.insert(name, own);
    }
}

/// Derives an additional export from a disk's own export.
fn further(own: &Export, spec: &ExportSpec) -> Export {
    let mut export = own.clone();
    export.info.read_only |= spec.read_only;
    if spec.no_promote {
        export.promote = Promote::Never;
    }
    export
}

/// Opens a vhost-user socket for the export `name`.
pub(super) async fn open_gateway(
    place: SocketPlace,
    name: &str,
    export: &Export,
    failing: Failing,
) -> std::io::Result<Gateway> {
    let info = Info {
        size_bytes: export.info.size_bytes,
        read_only: export.info.read_only,
        block_bytes: export.info.block_size_min.max(512),
        can_discard: export.info.can_trim,
        name: name.to_owned(),
    };
    let Export { disk, shard, promote, .. } = export.clone();
    Gateway::open_aside(place, ExportedDisk { disk, shard, info, promote }, failing).await
}

impl DiskEntry {
    /// Removes an export from the disk's entry. The export's front ends must be closed already.
    fn forget_export(&mut self, export: &str) {
        self.wanted.exports.retain(|known| known.name != export);
        self.files.remove(export);
    }
}

impl Inner {
    fn check_export(&self, disk: &str, export: &ExportSpec) -> Result<()> {
        let name = &export.name;
        check_name(name).map_err(|error| invalid!("'{name}' cannot be an export's name: {error}"))?;
        self.check_export_name(name)?;
        if let Some(path) = &export.vhost_user {
            check_path(path).map_err(ApiError::invalid)?;
        }
        if self.disk(disk)?.wanted.exports.len() >= EXPORTS_MAX {
            return Err(conflict!("{disk} has {EXPORTS_MAX} additional exports, which is the maximum"));
        }
        Ok(())
    }

    pub(in crate::services) fn check_export_name(&self, name: &str) -> Result<()> {
        let has_it = |disk: &&DiskEntry| {
            disk.wanted.name == name || disk.wanted.exports.iter().any(|export| export.name == name)
        };
        match self.disks.values().find(has_it).map(|disk| &disk.wanted.name) {
            None => Ok(()),
            Some(disk) if disk == name => {
                Err(conflict!("there is a disk '{name}' already").hint("choose another name"))
            }
            Some(disk) => {
                Err(conflict!("disk {disk} has an export '{name}' already").hint("choose another name"))
            }
        }
    }
}
