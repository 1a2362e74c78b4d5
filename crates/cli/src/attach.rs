//! `hob attach` and `hob detach`: hob's cache for the disks of a running VM (docs/decisions/0054).
//!
//! Both commands lock the VM ([`locked_vm`]), examine it ([`vm`]) and compute the next step from its
//! state ([`plan`]), which [`execution`] performs. [`selection`] chooses the disks of `hob attach`,
//! and [`vm`] makes the record of each.

mod attach_command;
mod definition;
mod detach_command;
mod dry_run;
mod execution;
#[cfg(test)]
mod fake_qemu;
mod graph;
mod image;
mod image_growth;
mod interrupt;
mod libvirt;
mod list;
mod locked_vm;
mod locks;
mod lost_record;
mod new_cache;
mod options;
mod overlay;
mod plan;
mod proxmox;
mod qmp;
mod reconnect;
mod record;
mod retries;
mod selection;
mod summary;
mod target;
pub(super) mod targets;
mod test_stop;
mod threads;
mod virsh;
mod vm;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use hob_control::Size;
use interrupt::{Interrupt, OnSignal};
use record::Method;
use target::Target;

use super::Global;
use super::remote::converse;
use super::settings::Settings;

/// Default directory of the records of attached disks; `--records` names another one.
pub(super) const RECORDS: &str = "/var/lib/hob/attach";

/// Options that `hob attach` and `hob detach` have in common.
#[derive(Debug, Args)]
struct Common {
    /// Print the plan, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Directory with the records of attached disks
    #[arg(long, value_name = "DIRECTORY", default_value = RECORDS)]
    records: PathBuf,
}

impl Common {
    /// Listens for signals, except during a dry run, which can end at any time.
    fn listen(&self, reaction: OnSignal) -> anyhow::Result<Arc<Interrupt>> {
        if self.dry_run { Ok(Arc::default()) } else { Interrupt::listen(reaction) }
    }
}

/// Cache the disks of a running VM, without stopping it
///
/// The VM pauses for some milliseconds while its requests are redirected to hob. If a step fails,
/// or the user interrupts the command, the command undoes all its changes. If the command was
/// killed, repeat it: the new command continues with the next step.
#[derive(Debug, Args)]
pub(crate) struct Attach {
    /// The VM: qmp:PATH (QEMU's QMP socket), libvirt:NAME, or pve:VMID (Proxmox VE)
    #[arg(required_unless_present = "list", value_name = "TARGET")]
    target: Option<Target>,
    /// Disks: the name of the device, drive or node, or the path of the image; all writable disks
    /// if absent
    #[arg(value_name = "DISK")]
    disks: Vec<String>,
    /// List attached disks, and how their VMs use them
    #[arg(long, conflicts_with = "target")]
    list: bool,
    /// Pool for the caches; not needed if there is only one
    #[arg(long)]
    pool: Option<String>,
    /// Size of each cache; a tenth of the image if absent
    #[arg(long)]
    size: Option<Size>,
    #[command(flatten)]
    settings: Settings,
    /// Name of the VM in the names of hob's disks; QEMU's name of the VM if absent. Volumes on a
    /// storage of the type hob (Proxmox VE) keep the names that the storage plugin gives them
    #[arg(long, value_name = "NAME", conflicts_with = "list")]
    name: Option<String>,
    /// Method to redirect the VM's requests to hob; chosen by hob if absent
    #[arg(long, value_enum)]
    method: Option<Method>,
    /// hob's NBD socket
    #[arg(long, value_name = "PATH", default_value = "/run/hob/nbd.sock")]
    nbd: PathBuf,
    #[command(flatten)]
    common: Common,
}

/// Return the disks of a running VM to their images, without stopping it
///
/// Dirty data is written to the image first. If the command was interrupted, repeat it: the new
/// command continues with the next step.
#[derive(Debug, Args)]
pub(crate) struct Detach {
    /// The VM: qmp:PATH (QEMU's QMP socket), libvirt:NAME, or pve:VMID (Proxmox VE)
    target: Target,
    /// Disks: the name of the device, of hob's disk, or the path of the image; all disks of the VM
    /// with a record of their attachment if absent
    #[arg(value_name = "DISK")]
    disks: Vec<String>,
    /// Detach from a stopped VM: write dirty data to the image, and remove hob's disk
    #[arg(long)]
    stopped: bool,
    #[command(flatten)]
    common: Common,
}

pub(super) fn run_attach(args: Attach, global: &Global) -> anyhow::Result<()> {
    if args.list {
        return list::run(&args.common.records, global);
    }
    let target =
        args.target.clone().ok_or_else(|| anyhow!("name a VM: qmp:PATH, libvirt:NAME or pve:VMID"))?;
    converse(global, async |client| attach_command::run(&client, &target, args).await)
}

pub(super) fn run_detach(args: Detach, global: &Global) -> anyhow::Result<()> {
    converse(global, async |client| detach_command::run(&client, args).await)
}

fn milliseconds(time: Duration) -> String {
    format!("{:.0} ms", time.as_secs_f64() * 1e3)
}
