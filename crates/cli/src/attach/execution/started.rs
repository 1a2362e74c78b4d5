//! A VM that was started with hob's disk after an attachment, so that QEMU has none of the block nodes
//! in the record.

use anyhow::{anyhow, bail};
use serde_json::json;

use super::{HobDisk, Work};
use crate::attach::graph::Graph;
use crate::attach::image::disk_of_image;
use crate::attach::options::node_name;
use crate::attach::overlay::{NotDirect, SINCE_START};
use crate::attach::plan::{Goal, Path, State};
use crate::attach::record::Record;

impl Work<'_> {
    /// Returns true if the VM was started with hob's disk, for example by the definition that an
    /// earlier command has changed.
    pub(in crate::attach) async fn is_started_with_hob(&mut self) -> bool {
        // `check` reports other errors.
        let Err(error) = self.look(Goal::Attached).await else { return false };
        error.downcast_ref::<NotDirect>().is_some_and(|error| error.short == SINCE_START)
    }

    /// Refuses a disk that a client uses although QEMU has no block node for it, before the cache is
    /// disabled. The VM may have been started with hob's disk over vhost-user.
    pub(super) async fn check_users(&self, state: State) -> anyhow::Result<()> {
        let is_in_qemu = state.path == Path::Hob || state.node || state.job || state.marked;
        if is_in_qemu || state.disk != HobDisk::Cached || self.is_unused().await {
            return Ok(());
        }
        let Record { label, disk, target, .. } = self.record;
        bail!(
            "{label}: a client is connected to hob's disk {disk}, although QEMU has no block node for it. If the VM was \
             started with hob's disk, stop the VM, and run 'hob detach --stopped {target}'. Otherwise disconnect the \
             client, and repeat the command"
        )
    }

    /// Checks that hob's disk serves the image of a VM that was started with this disk, and that
    /// QEMU can open the image, before the cache is disabled. libvirt gives QEMU access only to the
    /// disks of the VM's start.
    pub(in crate::attach) async fn check_image(&mut self) -> anyhow::Result<()> {
        let record = self.record;
        if record.has_own_node() {
            return Ok(());
        }
        if let Err(error) = self.check_backing().await {
            return Err(self.refusal(error).await);
        }
        let Err(error) = self.open_image().await else { return Ok(()) };
        let Record { label, file, target, .. } = record;
        let file = file.display();
        let is_denied = error.to_string().contains("Permission denied");
        let advice = match self.monitor.pid().and_then(user).filter(|_| is_denied) {
            Some(user) => format!(
                "'chown {user} {file}' gives access to QEMU's user, unless AppArmor or SELinux denies it. Or stop"
            ),
            None => "Stop".to_owned(),
        };
        let error = anyhow!(
            "{label}: QEMU cannot open the image {file}, which the VM did not have at its start: {error:#}. {advice} \
             the VM, and run 'hob detach --stopped {target}'"
        );
        Err(self.refusal(error).await)
    }

    /// Refuses a disk of hob that was replaced since the attachment: the VM has the data of the new
    /// disk, and must not be given the former image.
    async fn check_backing(&self) -> anyhow::Result<()> {
        let Record { label, disk, file, target, .. } = self.record;
        // A daemon that does not answer is reported later.
        let Ok(found) = self.client.disk(disk).await else { return Ok(()) };
        let is_raw = found.format.as_deref().is_none_or(|format| format == "raw");
        if is_raw && disk_of_image(std::iter::once(&found), file).await.is_some() {
            return Ok(());
        }
        bail!(
            "{label}: hob's disk {disk} was replaced since 'hob attach': its backing is {}, and the record names the \
             image {}. Stop the VM, run 'hob detach --stopped {target}', and start the VM with the image that it needs",
            found.backing,
            file.display()
        )
    }

    /// Opens the image in QEMU without a lock, and closes it. Does nothing if the VM does not use hob any
    /// more.
    async fn open_image(&mut self) -> anyhow::Result<()> {
        let record = self.record;
        let graph = Graph::read_edges(self.monitor).await?;
        let Some(mut options) = record.image_options() else { return Ok(()) };
        if !graph.below(&record.backend).contains(record.node_name()) {
            return Ok(());
        }
        let name = node_name(&record.disk, "-probe");
        options["node-name"] = json!(name);
        options["locking"] = json!("off");
        // With `auto-read-only`, QEMU would open the file for reading only, until a writer uses the node.
        options["auto-read-only"] = json!(false);
        // A killed command may have left the node.
        self.delete_node(&name).await?;
        self.ask("blockdev-add", options).await?;
        self.delete_node(&name).await
    }
}

/// Returns the number of the user as whom a process opens files.
fn user(pid: i32) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    users.split_whitespace().last().map(str::to_owned)
}
