//! The persistent definition of a VM, in libvirt or Proxmox VE: which disk its next start uses.

use super::execution::tell;
use super::libvirt::{self, Defined};
use super::plan::Definition;
use super::proxmox::{self, Settings};
use super::reconnect;
use super::record::Record;
use super::target::{Kind, Target};

/// The persistent definition of a VM.
pub(super) enum Persistent {
    /// hob does not know the VM's definition.
    None,
    /// The XML of a libvirt domain.
    Libvirt(String),
    Proxmox(Settings),
}

impl Persistent {
    /// Reads the persistent definition of a VM.
    pub(super) async fn read(target: &Target) -> anyhow::Result<Persistent> {
        Ok(match &target.kind {
            Kind::Qmp(_) => Persistent::None,
            Kind::Libvirt(domain) => {
                libvirt::definition(domain).await?.map_or(Persistent::None, Persistent::Libvirt)
            }
            Kind::Proxmox(vmid) => {
                let settings = Settings::read(*vmid)?;
                settings.check_lock(*vmid)?;
                Persistent::Proxmox(settings)
            }
        })
    }

    /// Warns if a domain of libvirt has no persistent definition.
    pub(super) fn warn_if_absent(&self, target: &Target) {
        if let (Kind::Libvirt(domain), Persistent::None) = (&target.kind, self) {
            tell(&format!(
                "warning: the domain {domain} has no persistent XML. After it has stopped, run 'hob detach --stopped {}' \
                 before its next start",
                target.text
            ));
        }
    }

    /// Warns if the VM's next start will not use hob's disk.
    pub(super) fn warn_of_next_start(&self, record: &Record) {
        let (label, target) = (&record.label, &record.target);
        let reason = match self {
            Persistent::Proxmox(settings) => settings.volumes(label).err(),
            Persistent::Libvirt(_) if record.definition.is_none() => Some(format!(
                "the domain's persistent XML has no disk with the image {}",
                record.file.display()
            )),
            Persistent::Libvirt(_) | Persistent::None => None,
        };
        if let Some(reason) = reason {
            tell(&format!(
                "{label}: warning: the VM's configuration keeps its image: {reason}. After the VM has stopped, \
                 run 'hob detach --stopped {target}' before its next start"
            ));
        }
    }
}

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

/// Refuses to remove hob's disks of a stopped VM whose next start needs them in its present state:
/// libvirt has saved the VM with the disks, or an operation of Proxmox VE has locked the VM.
pub(super) async fn check_next_start(target: &Target, chosen: &[Record]) -> anyhow::Result<()> {
    match &target.kind {
        Kind::Qmp(_) => {}
        Kind::Libvirt(domain) => {
            if let Some(saved) = libvirt::saved(domain).await? {
                libvirt::check_saved(domain, &saved, chosen)?;
            }
        }
        Kind::Proxmox(vmid) => {
            let has_volumes = chosen.iter().any(|record| record.volumes.is_some());
            if has_volumes && !proxmox::is_gone(*vmid) {
                Settings::read(*vmid)?.check_lock(*vmid)?;
            }
        }
    }
    Ok(())
}

/// Warns if the VM's next start would use hob's disk, which a detachment has removed.
pub(super) fn warn_of_removed_disk(record: &Record) {
    let is_defined = record.definition.is_some() || record.volumes.is_some();
    if record.has_own_node() || is_defined {
        return;
    }
    let Record { label, disk, file, .. } = record;
    tell(&format!(
        "{label}: warning: the VM was started with hob's disk {disk}, which does not exist any more. Start the VM with its \
         image {} next time",
        file.display()
    ));
}
