//! A VM that a command has locked, with the records of its attached disks.

use std::sync::Arc;

use hob_control::client::Client;

use super::Common;
use super::execution::{Work, tell};
use super::locks::Locks;
use super::qmp::Monitor;
use super::record::{Record, Records};
use super::target::Target;
use super::vm::Vm;

/// A VM that no other command changes while this value exists.
pub(super) struct LockedVm {
    pub(super) locks: Locks,
    /// The VM as its records name it.
    pub(super) target: Target,
    /// The records of the VM's attached disks.
    pub(super) known: Vec<Record>,
    /// The records of all VMs.
    pub(super) records: Records,
}

impl LockedVm {
    /// Locks a VM and the names of its attached disks for the command `hob VERB TARGET`.
    pub(super) async fn lock(common: &Common, verb: &str, target: &Target) -> anyhow::Result<LockedVm> {
        let records = Records::open(&common.records)?;
        let names = target.names().await?;
        let command = format!("hob {verb} {}", target.text);
        let mut locks = Locks::of_vm(&common.records, &target.locked(&names), &command)?;
        let known = of_names(&records, &names)?;
        known.iter().try_for_each(|record| locks.add_disk(&record.disk))?;
        let recorded = known.first().and_then(|record| record.target.parse::<Target>().ok());
        let target = recorded.unwrap_or_else(|| target.clone());
        Ok(LockedVm { locks, target, known, records })
    }

    /// Refuses a VM with a block job of another program. If a killed command left the VM paused,
    /// this function continues the VM first, except in a dry run. Otherwise the VM could stay
    /// paused until the job ends, or while the command changes other disks.
    pub(super) async fn check_jobs(
        &self,
        vm: &Vm,
        monitor: &mut Monitor,
        client: &Client,
        is_dry: bool,
    ) -> anyhow::Result<()> {
        let jobs = vm.graph.check_jobs();
        let Some(record) = self.known.first().filter(|_| !is_dry) else { return jobs };
        let mut work = Work::new(monitor, client, &self.records, record, &Arc::default());
        match jobs {
            Err(error) => return Err(work.refusal(error).await),
            Ok(()) if self.known.len() == 1 => {}
            Ok(()) => match work.resume().await {
                said if said.is_empty() => {}
                said => tell(&format!(
                    "a command was interrupted while it had the VM paused. {}",
                    said.trim_end()
                )),
            },
        }
        Ok(())
    }
}

/// Returns the records of a VM with these names.
fn of_names(records: &Records, names: &[String]) -> anyhow::Result<Vec<Record>> {
    let is_same =
        |record: &Record| record.target.parse::<Target>().is_ok_and(|found| names.contains(&found.text));
    Ok(records.all()?.into_iter().filter(is_same).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::record::example;

    #[test]
    fn the_records_of_a_domain_are_found_by_all_its_names() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path()).unwrap();
        for (target, disk) in [("libvirt:web", "a"), ("libvirt:0b1c", "b"), ("libvirt:db", "c")] {
            let (target, disk) = (target.to_owned(), disk.to_owned());
            records.save(&Record { target, disk, ..example() }).unwrap();
        }
        let found = of_names(&records, &["libvirt:0b1c", "libvirt:web"].map(str::to_owned)).unwrap();
        let disks: Vec<&str> = found.iter().map(|record| record.disk.as_str()).collect();
        assert_eq!(disks, ["b", "a"]);
    }
}
