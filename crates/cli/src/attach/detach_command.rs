//! The command `hob detach`: detaches the chosen disks of a running or stopped VM.

use std::sync::Arc;

use anyhow::{anyhow, bail};
use hob_control::client::Client;

use super::definition::{check_next_start, warn_of_removed_disk};
use super::dry_run::{end, print_plan};
use super::execution::{Work, drain_if_present, tell};
use super::interrupt::{Interrupt, OnSignal};
use super::locked_vm::LockedVm;
use super::lost_record;
use super::plan::Goal;
use super::qmp::{Monitor, NotRunning};
use super::record::{Record, Records};
use super::target::Kind;
use super::vm::Vm;
use super::{Detach, milliseconds, summary};
use crate::remote::explain;

pub(super) async fn run(client: &Client, args: Detach) -> anyhow::Result<()> {
    let mut locked = LockedVm::lock(&args.common, "detach", &args.target).await?;
    if !args.stopped && lost_record::is_needed(&args.disks, &locked.known) {
        let found = lost_record::find(client, &locked.target, &args.disks, &locked.known, &locked.records);
        let found = Box::pin(found).await?;
        for record in &found {
            locked.locks.add_disk(&record.disk)?;
            if locked.records.has(&record.disk) {
                bail!("another command has just recorded the disk {}; repeat this command", record.disk);
            }
        }
        locked.known.extend(found);
    }
    let LockedVm { target, known, records, .. } = &locked;
    let is_dry = args.common.dry_run;
    if known.is_empty() {
        bail!(lost_record::not_attached(target));
    }
    if let Some(name) = args.disks.iter().find(|name| !known.iter().any(|record| record.is_named(name))) {
        let labels: Vec<&str> = known.iter().map(|record| record.label.as_str()).collect();
        bail!("no such disk of {} is attached: {name}; attached are: {}", target.text, labels.join(", "));
    }
    let is_chosen =
        |record: &&Record| args.disks.is_empty() || args.disks.iter().any(|name| record.is_named(name));
    let chosen: Vec<Record> = known.iter().filter(is_chosen).cloned().collect();
    let interrupt = args.common.listen(OnSignal::End)?;
    if args.stopped {
        if is_dry {
            bail!("--stopped has no plan to print; omit --dry-run");
        }
        match target.connect().await {
            Ok(_) => bail!("the VM of {} is running: omit --stopped, or stop the VM", target.text),
            Err(error) if error.is::<NotRunning>() => {}
            Err(error) => return Err(error.context("cannot check that the VM is stopped")),
        }
        check_next_start(target, &chosen).await?;
        let mut none = Monitor::None;
        for record in &chosen {
            Work::new(&mut none, client, records, record, &interrupt).detach_stopped().await?;
            tell(&format!("{} is detached; its image {} has all data", record.label, record.file.display()));
        }
        return Ok(());
    }
    let (mut monitor, vm) = connect(client, &locked, is_dry).await?;
    if args.disks.is_empty() {
        lost_record::note_others(&vm, known, records, target)?;
    }
    let adapt = |record| -> anyhow::Result<Record> { Ok(vm.started(&record)?.unwrap_or(record)) };
    let chosen = chosen.into_iter().map(adapt).collect::<anyhow::Result<Vec<Record>>>()?;
    if matches!(target.kind, Kind::Proxmox(_)) && !is_dry {
        check_each(&mut monitor, client, records, &chosen, &interrupt).await?;
        // Programs of Proxmox VE wait while hob is connected to QEMU, and a drain takes long.
        drop(monitor);
        for record in &chosen {
            drain_if_present(client, &record.disk).await?;
        }
        (monitor, _) = connect(client, &locked, is_dry).await?;
    }
    if !is_dry {
        check_each(&mut monitor, client, records, &chosen, &interrupt).await?;
    }
    for record in &chosen {
        let mut work = Work::new(&mut monitor, client, records, record, &interrupt);
        if is_dry {
            tell(&summary::of_detachment(record, &client.disks().await.map_err(explain)?));
            let state = work.look(Goal::Detached).await?;
            print_plan(record, Goal::Detached, state).await?;
            continue;
        }
        if !known.contains(record) || !records.has(&record.disk) {
            records.save(record)?;
        }
        work.detach().await?;
        let pause = work.paused;
        tell(&format!("{} is detached; the VM was paused for {}", record.label, milliseconds(pause)));
        warn_of_removed_disk(record);
    }
    end(is_dry)
}

/// Refuses to detach disks if one of them cannot be detached now.
async fn check_each(
    monitor: &mut Monitor,
    client: &Client,
    records: &Records,
    chosen: &[Record],
    interrupt: &Arc<Interrupt>,
) -> anyhow::Result<()> {
    for record in chosen {
        let mut work = Work::new(monitor, client, records, record, interrupt);
        work.check(Goal::Detached).await?;
        work.check_image().await?;
    }
    Ok(())
}

/// Connects to a VM with attached disks, and examines it. Refuses a VM whose disks cannot be changed
/// now.
async fn connect(client: &Client, locked: &LockedVm, is_dry: bool) -> anyhow::Result<(Monitor, Vm)> {
    let target = &locked.target;
    let mut monitor = target.connect().await.map_err(|error| match error.is::<NotRunning>() {
        true => anyhow!("{error:#}. If the VM is stopped, use 'hob detach --stopped {}'", target.text),
        false => error,
    })?;
    let vm = Vm::look(&mut monitor, "").await?;
    Vm::check(&mut monitor, Goal::Detached).await?;
    locked.check_jobs(&vm, &mut monitor, client, is_dry).await?;
    Ok((monitor, vm))
}
