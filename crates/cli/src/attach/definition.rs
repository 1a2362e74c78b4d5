//! The persistent definition of a VM, in libvirt or Proxmox VE: which disk its next start uses.

use super::execution::tell;
use super::libvirt::{self, Defined};
use super::plan::Definition;
use super::proxmox::{self, Settings};
use super::reconnect;
use super::record::Record;

/// Returns the disk's source in the VM's persistent definition.
pub(super) async fn read(record: &Record) -> anyhow::Result<Definition> {
    if let (Some(vmid), Some(volumes)) = (record.vmid(), &record.volumes) {
        return if proxmox::is_gone(vmid) {
            Ok(Definition::None)
        } else {
            Ok(Settings::read(vmid)?.definition(volumes))
        };
    }
    let (Some(domain), Some(_)) = (record.domain(), &record.definition) else {
        return Ok(Definition::None);
    };
    let Some(xml) = libvirt::definition(domain).await? else { return Ok(Definition::None) };
    Ok(match libvirt::find(&xml, &record.file, &record.disk) {
        None => Definition::None,
        Some(Defined::Image(_)) => Definition::Image,
        Some(Defined::Hob(_)) => Definition::Hob,
    })
}

/// Changes the VM's persistent definition.
pub(super) async fn change(record: &Record, to: Definition) -> anyhow::Result<()> {
    if let (Some(vmid), Some(volumes)) = (record.vmid(), &record.volumes) {
        let (image, hob) = (&volumes.image, &volumes.hob);
        return match (to, read(record).await?) {
            (Definition::Hob, Definition::Image) => proxmox::replace(vmid, &volumes.key, image, hob).await,
            (Definition::Image, Definition::Hob) => proxmox::replace(vmid, &volumes.key, hob, image).await,
            _ => Ok(()),
        };
    }
    let (Some(domain), Some(image)) = (record.domain(), &record.definition) else { return Ok(()) };
    let xml = libvirt::definition(domain).await?.unwrap_or_default();
    match (to, libvirt::find(&xml, &record.file, &record.disk)) {
        (Definition::Hob, Some(Defined::Image(old))) => {
            let new = libvirt::with_hob(&old, &record.disk, record.socket())?;
            libvirt::replace(domain, &old, &new).await?;
            let xml = libvirt::definition(domain).await?.unwrap_or_default();
            let defined = libvirt::find(&xml, &record.file, &record.disk);
            if !matches!(defined, Some(Defined::Hob(element)) if element.contains("<reconnect")) {
                tell(&format!(
                    "warning: this libvirt does not keep <reconnect> for NBD disks: after the next start of {domain}, \
                     a restart or crash of hob causes I/O errors in the guest. {}",
                    reconnect::ADVICE
                ));
            }
            Ok(())
        }
        (Definition::Image, Some(Defined::Hob(old))) => libvirt::replace(domain, &old, image).await,
        _ => Ok(()),
    }
}
