//! Detachment of a disk whose VM does not run.

use std::time::Instant;

use anyhow::bail;
use hob_control::{DrainFor, OnDirty, PlannedChange};

use super::{CONNECT_EVERY, DISCONNECT_MAX, HobDisk, Work, tell};
use crate::attach::definition;
use crate::attach::plan::Definition;
use crate::attach::retries::Restarts;
use crate::drain::drain_first;
use crate::remote::explain;

impl Work<'_> {
    /// Removes hob's disk of a stopped VM, and the record of the attachment. Waits for a daemon that
    /// restarts.
    pub(in crate::attach) async fn detach_stopped(&mut self) -> anyhow::Result<()> {
        let mut restarts = Restarts::default();
        loop {
            match self.remove_stopped().await {
                Err(error) if restarts.may_try_again(&error) => {
                    self.await_daemon().await?;
                    tokio::time::sleep(CONNECT_EVERY).await;
                }
                result => return result,
            }
        }
    }

    async fn remove_stopped(&mut self) -> anyhow::Result<()> {
        let disk = self.record.disk.as_str();
        if self.disk().await? != HobDisk::Absent {
            self.await_unused().await?;
        }
        if self.disk().await? == HobDisk::Cached {
            drain_first(self.client, disk, DrainFor::Detach).await?;
            self.client.cache_disable(disk, OnDirty::Drain).await.map_err(explain)?;
        }
        // The definition changes after the drain. If the drain fails, the VM can still start with
        // hob's disk.
        definition::change(self.record, Definition::Image).await?;
        if let (Some(domain), Some(image)) = (self.record.domain(), &self.record.definition)
            && definition::read(self.record).await? != Definition::Image
        {
            tell(&format!(
                "warning: libvirt has no domain {domain} with this disk any more. If the domain was renamed, replace \
                 the disk {disk} in its XML ('virsh edit') by its image:\n{image}"
            ));
        }
        if self.disk().await? != HobDisk::Absent {
            self.remove_disk().await?;
        }
        self.records.delete(disk)
    }

    /// Waits until no client uses hob's disk.
    ///
    /// # Errors
    /// Returns an error if a client stays connected. The VM then runs, and hob must keep the disk
    /// and its cache.
    async fn await_unused(&self) -> anyhow::Result<()> {
        if self.is_unused().await {
            return Ok(());
        }
        bail!(
            "a program is still connected to hob's disk {}, so the VM seems to run, although hob cannot reach it as \
             {}. Another QEMU that was started with the same QMP socket may have removed the socket. Stop the VM, \
             and repeat the command",
            self.record.disk,
            self.record.target
        )
    }

    /// Returns true when no client uses hob's disk, and false if a client stays connected: a QEMU that
    /// was killed may still be ending.
    pub(super) async fn is_unused(&self) -> bool {
        let deadline = Instant::now() + DISCONNECT_MAX;
        loop {
            let change = PlannedChange::Remove { discard_dirty: false };
            // The removal reports all other errors.
            let Ok(preview) = self.client.preview(&self.record.disk, &change).await else { return true };
            if preview.clients == 0 {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            tokio::time::sleep(CONNECT_EVERY).await;
        }
    }
}
