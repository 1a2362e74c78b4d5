//! Chooses the disks that `hob attach` attaches, and makes the record of each. Refuses a disk whose
//! name or image hob already has.

use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use hob_control::Pool;
use hob_control::client::Client;

use super::Attach;
use super::definition::Persistent;
use super::execution::{Work, tell};
use super::image::disk_of_image;
use super::locked_vm::LockedVm;
use super::new_cache;
use super::qmp::Monitor;
use super::reconnect;
use super::record::{Record, Records};
use super::vm::{Vm, Wanted};
use crate::pool::absolute;
use crate::remote::explain;

/// The disks of an attach command.
pub(super) struct Selection {
    /// The records of the attachments to make or to continue.
    pub(super) wanted: Vec<Record>,
    /// The records of earlier attachments of these disks, which the command removes first.
    pub(super) left_over: Vec<Record>,
}

/// Returns the disks that the user names, or all disks of the VM that can be attached. Locks the
/// names of these disks in hob.
///
/// # Errors
/// Returns the reason why one of the disks cannot be attached.
pub(super) async fn select(
    args: &Attach,
    vm: &Vm,
    monitor: &mut Monitor,
    client: &Client,
    locked: &mut LockedVm,
    pool: &Pool,
    persistent: &Persistent,
) -> anyhow::Result<Selection> {
    let LockedVm { locks, target, known, records } = locked;
    let known = known.as_slice();
    let others = records.all()?.into_iter().filter(|record| !known.contains(record));
    let others: Vec<Record> = others.collect();
    let (mut wanted, mut left_over) = (Vec::new(), Vec::new());
    let devices = vm.choose(&args.disks)?;
    let is_one_of_all = args.disks.is_empty() && devices.len() > 1;
    for device in devices {
        if wanted.iter().any(|record: &Record| record.backend == device.backend) {
            // The user named the disk twice.
            continue;
        }
        if let Some(record) = vm.attached_by(&device.backend, &others) {
            let error = already_attached(&device.label, record);
            return Err(error.context(not_attachable(&device.label, is_one_of_all)));
        }
        let earlier = known.iter().find(|record| record.backend == device.backend);
        if let Some(record) = earlier {
            let mut work = Work::new(monitor, client, records, record, &Arc::default());
            if work.is_started_with_hob().await {
                tell(&format!(
                    "{}: nothing to do: the VM uses hob's disk {1} since its start; 'hob disk show {1}' shows its cache",
                    record.label, record.disk
                ));
                continue;
            }
            if !work.is_left_over().await {
                // The record of an interrupted attachment already has the settings, so its cache
                // keeps them.
                if new_cache::has_options(args) {
                    tell(&format!(
                        "note: the attachment of {} exists already, and keeps its cache; 'hob cache resize' and 'hob \
                         cache set' change the cache",
                        record.label
                    ));
                }
                wanted.push(record.clone());
                continue;
            }
            left_over.push(record.clone());
        }
        let how = Wanted {
            target: target.text.clone(),
            method: args.method,
            socket: absolute(args.nbd.to_string_lossy().into_owned()).into(),
            cache: new_cache::settings(args, pool, earlier),
            persistent,
        };
        let mut record =
            vm.record(&device, &how).with_context(|| not_attachable(&device.label, is_one_of_all))?;
        persistent.warn_of_next_start(&record);
        reconnect::warn(persistent, &record).await;
        if record.cache.size.is_none() {
            record.cache.size = Some(new_cache::usual_size(&record.file));
        }
        check_distinct(&wanted, &record)?;
        locks.add_disk(&record.disk)?;
        check_unused(&record, earlier, known, records, client).await?;
        wanted.push(record);
    }
    Ok(Selection { wanted, left_over })
}

/// Refuses a disk that would have the same name in hob as another disk of the same command.
fn check_distinct(wanted: &[Record], record: &Record) -> anyhow::Result<()> {
    if let Some(other) = wanted.iter().find(|other| other.disk == record.disk) {
        bail!(
            "{} and {} would both have the name {} in hob; give one of the devices another id, and attach the other \
             one alone until then",
            other.label,
            record.label,
            record.disk
        );
    }
    Ok(())
}

/// Returns the message that the VM uses hob's disk of a record with another target.
fn already_attached(label: &str, record: &Record) -> anyhow::Error {
    let Record { disk, target, .. } = record;
    anyhow!(
        "{label} is hob's disk {disk} already, which was attached as a disk of {target}. Use this name of the VM, for \
         example in 'hob detach {target}'"
    )
}

/// Returns the start of the message that a disk cannot be attached. `is_one_of_all` is true if the
/// user named no disks.
fn not_attachable(label: &str, is_one_of_all: bool) -> String {
    let next = if is_one_of_all { " (to attach the other disks, name them in the command)" } else { "" };
    format!("the disk {label} cannot be attached{next}")
}

/// Refuses a disk whose name another disk of hob or another attachment has, and an image that hob
/// already serves. `earlier` is the earlier attachment of the disk, and `known` has all attachments
/// of the VM.
async fn check_unused(
    record: &Record,
    earlier: Option<&Record>,
    known: &[Record],
    records: &Records,
    client: &Client,
) -> anyhow::Result<()> {
    let disks = client.disks().await.map_err(explain)?;
    let is_taken = disks.iter().any(|disk| disk.name == record.disk);
    let is_own = earlier.is_some_and(|earlier| earlier.disk == record.disk);
    if is_taken && !is_own {
        bail!(
            "hob already has a disk {0}, which would be the name of {1} in hob. 'hob disk show {0}' shows it: if no \
             VM uses it, remove it with 'hob disk remove {0}'; if another VM of the same name uses it, choose \
             another name with --name",
            record.disk,
            record.label
        );
    }
    if records.has(&record.disk) && !is_own {
        bail!(
            "another VM has an attached disk {}, which would be the name of {} in hob; 'hob attach --list' shows \
             it. Detach it, or choose another name with --name",
            record.disk,
            record.label
        );
    }
    // Otherwise hob would find this out while the VM is paused, when hob cannot lock the image.
    let others = disks.iter().filter(|disk| !known.iter().any(|record| record.disk == disk.name));
    if let Some(other) = disk_of_image(others, &record.file).await {
        bail!(
            "hob already serves {} as the disk {other}, so {} cannot be attached. Start the VM with that disk, or \
             remove it with 'hob disk remove {other}'",
            record.file.display(),
            record.label
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::record::example;

    #[test]
    fn two_disks_of_a_vm_do_not_get_one_name() {
        let record = |label: &str, disk: &str| Record { label: label.into(), disk: disk.into(), ..example() };
        let wanted = [record("device[0]", "web-device-0-")];
        check_distinct(&wanted, &record("vda", "web-vda")).unwrap();
        let error = check_distinct(&wanted, &record("device-0-", "web-device-0-")).unwrap_err().to_string();
        assert!(error.contains("device[0] and device-0-"), "{error}");
    }

    #[test]
    fn a_disk_of_another_target_is_refused_with_the_name_of_that_target() {
        let error = already_attached("vda", &example()).to_string();
        assert!(error.contains("disk web-vda") && error.contains("'hob detach qmp:/run/web.qmp'"), "{error}");
    }
}
