//! The command `hob attach`: attaches the chosen disks of a VM, one after the other.

use anyhow::{Context, anyhow};
use hob_control::client::Client;

use super::definition::Persistent;
use super::dry_run::{end, print_plan};
use super::execution::{Work, tell};
use super::interrupt::OnSignal;
use super::locked_vm::LockedVm;
use super::plan::Goal;
use super::qmp::{Absence, NotRunning};
use super::record::Record;
use super::selection::{Selection, select};
use super::target::Target;
use super::vm::Vm;
use super::{Attach, Common, milliseconds, new_cache, summary};
use crate::remote::explain;

pub(super) async fn run(client: &Client, target: &Target, args: Attach) -> anyhow::Result<()> {
    let is_dry = args.common.dry_run;
    let mut locked = LockedVm::lock(&args.common, "attach", target).await?;
    let mut monitor = locked.target.connect().await.map_err(|error| match locked.known.is_empty() {
        true => error,
        false => not_running(error, &locked.target),
    })?;
    let mut vm = Vm::look(&mut monitor, &locked.target.default_name()).await?;
    if let Some(name) = &args.name {
        vm.name.clone_from(name);
    }
    Vm::check(&mut monitor, Goal::Attached).await?;
    locked.check_jobs(&vm, &mut monitor, client, is_dry).await?;
    let persistent = Persistent::read(&locked.target).await?;
    persistent.warn_if_absent(&locked.target);
    let pools = client.pools().await.map_err(explain)?;
    let pool = new_cache::pool(&pools, args.pool.as_deref())?;
    let Selection { wanted, left_over } =
        select(&args, &vm, &mut monitor, client, &mut locked, pool, &persistent).await?;
    let records = &locked.records;
    let new = wanted.iter().filter(|record| !records.has(&record.disk));
    new_cache::check_space(new, pool)?;
    let interrupt = args.common.listen(OnSignal::Undo)?;
    for record in &left_over {
        let mut work = Work::new(&mut monitor, client, records, record, &interrupt);
        remove_left_over(&mut work, &args.common).await?;
    }
    if !is_dry {
        for record in &wanted {
            Work::new(&mut monitor, client, records, record, &interrupt).check(Goal::Attached).await?;
        }
    }
    for record in &wanted {
        summary::of_attachment(record, &pools).iter().for_each(|line| tell(line));
        let mut work = Work::new(&mut monitor, client, records, record, &interrupt);
        if is_dry {
            let state = work.look(Goal::Attached).await?;
            let is_removed = left_over.iter().any(|earlier: &Record| earlier.disk == record.disk);
            let state = if is_removed { state.without_hob() } else { state };
            print_plan(record, Goal::Attached, state).await?;
            continue;
        }
        work.attach().await?;
        let pause = work.paused;
        tell(&format!(
            "{} is attached as hob's disk {}; the VM was paused for {}",
            record.label,
            record.disk,
            milliseconds(pause)
        ));
    }
    end(is_dry)
}

/// Removes hob's disk of an attachment of which QEMU has no node, object or job. With `--dry-run`,
/// prints the plan of the removal instead.
async fn remove_left_over(work: &mut Work<'_>, common: &Common) -> anyhow::Result<()> {
    let record = work.record;
    let Record { label, disk, file, .. } = record;
    let image = file.display();
    tell(&format!(
        "{label}: the attachment of {image} as hob's disk {disk} is left over from an earlier command or an earlier \
         start of the VM, and is removed first"
    ));
    if common.dry_run {
        let state = work.look(Goal::Detached).await?;
        return print_plan(record, Goal::Detached, state).await;
    }
    let removed = match work.check(Goal::Detached).await {
        Ok(()) => work.pursue(Goal::Detached).await,
        refused => refused,
    };
    removed
        .with_context(|| format!("{label} is not attached: hob's disk {disk} of {image} cannot be removed"))
}

/// Returns the message that a VM with attached disks does not run, with what to do.
fn not_running(error: anyhow::Error, target: &Target) -> anyhow::Error {
    let keeps = "hob keeps the attached disks of this VM";
    let detach = format!("'hob detach --stopped {}'", target.text);
    let why = error.downcast_ref::<NotRunning>().map(|error| error.why);
    match why {
        None => error,
        Some(Absence::Stopped) => anyhow!("{error:#}. {keeps}: start it with these, or run {detach}"),
        Some(Absence::Saved) => {
            anyhow!("{error:#}. {keeps}; 'hob attach --list' shows whether the saved VM needs them")
        }
        Some(Absence::Gone) => anyhow!("{error:#}. {keeps}; remove them with {detach}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_does_not_run_has_advice() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let target: Target = "qmp:/nowhere/web.qmp".parse().unwrap();
        let error = runtime.block_on(target.connect()).unwrap_err();
        let error = not_running(error, &target).to_string();
        assert!(error.contains("start it with these") && error.contains("hob detach --stopped"), "{error}");
        let other = not_running(anyhow!("cannot run virsh"), &target).to_string();
        assert_eq!(other, "cannot run virsh");
    }
}
