//! Opens the backing of a disk, and checks that it is still the backing that the disk had before.

use std::time::Instant;

use hob_engine::command::Access;
use hob_storage::backing::{BackingInfo, OpenError};

use super::Disks;
use super::opening_turns::OpeningSpeed;
use super::resize::Measure;
use crate::api_error::{ApiError, Result, conflict, open_error};
use crate::descriptors;
use crate::hardware::{Backing, BackingOptions, file_number};
use crate::services::flash;
use crate::services::qos::datastore_of;
use crate::services::registry::{ADDING, DiskEntry};
use crate::state::DiskState;

impl Disks {
    /// Opens a disk's backing. Returns the backing, and the name of its datastore.
    pub(super) async fn open_backing(&self, name: &str, wanted: &DiskState) -> Result<(Backing, String)> {
        let speed = self.registry.inner().disk(name)?.opening_speed;
        let turn = self.opening_turns.take(speed).await;
        // The reservation ends when the disk's descriptors are open. A clone's parent, which may be
        // opened next, reserves its own.
        let _room = descriptors::room().await.map_err(ApiError::conflict)?;
        self.exports.clear_stale_file(name).await?;
        let options = self.open_options(name, wanted).await?;
        let access = if wanted.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let (spec, said) = (wanted.backing.clone(), wanted.datastore.clone());
        let (opened, speed) = flash::blocking(move || {
            // The wait for this thread says nothing about the backing.
            let begun = Instant::now();
            let opened = Backing::open(&spec, access, &options);
            let speed = OpeningSpeed::of(&opened, begun.elapsed());
            (opened.map(|backing| (backing, said.unwrap_or_else(|| datastore_of(&spec)))), speed)
        })
        .await?;
        drop(turn);
        self.registry.inner().disk_mut(name)?.opening_speed = speed;
        match opened {
            Ok(opened) => Ok(opened),
            Err(error) => Err(self.name_holder(name, &error).await),
        }
    }

    /// Returns the options with which a disk's backing is opened.
    pub(super) async fn open_options(&self, name: &str, wanted: &DiskState) -> Result<BackingOptions> {
        Ok(BackingOptions { locked: !wanted.unlocked, ..self.image_options(name).await? })
    }

    /// Converts the error of opening a disk's backing. If another disk of this daemon has the
    /// backing open, the error names that disk instead of "another process".
    async fn name_holder(&self, name: &str, error: &OpenError) -> ApiError {
        let (OpenError::InUse { path } | OpenError::InUseByQemu { path, .. }) = error else {
            return open_error(error);
        };
        let file = path.clone();
        let number =
            flash::blocking(move || std::fs::metadata(file).ok().and_then(|metadata| file_number(&metadata)));
        let number = number.await.ok().flatten();
        let inner = self.registry.inner();
        let has_it = |disk: &DiskEntry| {
            let info = disk.measure.as_ref().map(|measure| &measure.info);
            let is_file = |info: &BackingInfo| {
                number.is_some()
                    && (info.file == number || info.lower_files.iter().any(|(_, file)| Some(*file) == number))
            };
            info.is_some_and(|info| is_file(info) || std::path::Path::new(&disk.wanted.backing) == path)
        };
        let holder = inner.disks.iter().find(|(other, disk)| *other != name && has_it(disk));
        match holder {
            Some((holder, _)) => {
                conflict!("{} is in use: hob itself has it open for the disk {holder}", path.display()).hint(
                    format!("a disk can have only one writer; use the disk {holder}, or remove it first"),
                )
            }
            None => open_error(error),
        }
    }

    /// Refuses a block device that is not the one that the disk had before. If the disk is opened
    /// for the first time, records its device. The kernel numbers devices differently after a
    /// restart of the host, and `/dev/dm-6` may then be the volume of another VM.
    pub(super) async fn check_device(&self, name: &str, info: &BackingInfo) -> Result<()> {
        let is_new = {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            match (&disk.wanted.backing_device, info.device_name()) {
                (None, None) => return Ok(()),
                (Some(known), Some(device)) if known == device => return Ok(()),
                (Some(known), _) => {
                    return Err(conflict!("{} leads to another device than before: it was {known}, and is now {}",
                        disk.wanted.backing, info.identity_text
                    )
                    .hint(format!(
                        "make the path lead to the former device; hob then opens the disk. If the new device is intended, \
                         remove the disk and add it again ('hob disk remove {name}'), by a name that is permanent, such as \
                         a link in /dev/disk/by-id"
                    )));
                }
                (None, Some(device)) => {
                    disk.wanted.backing_device = Some(device.to_owned());
                    disk.busy == Some(ADDING)
                }
            }
        };
        // The entry of a new disk is saved when it has been added.
        if is_new { Ok(()) } else { self.registry.save().await }
    }

    /// Records the properties of a disk's open backing in the disk's entry.
    pub(super) fn note_backing(&self, name: &str, backing: &Backing) -> Result<()> {
        let mut inner = self.registry.inner();
        let disk = inner.disk_mut(name)?;
        let info = backing.info().clone();
        (disk.identity, disk.lock) = (info.identity, backing.lock());
        disk.constant = backing.constant().map(str::to_owned);
        let (gauge, witness, monitor) = (backing.size_probe(), backing.witness(), backing.monitor());
        disk.measure = Some(Measure { gauge, witness, monitor, info });
        Ok(())
    }
}
