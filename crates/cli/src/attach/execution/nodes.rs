//! The steps that add and delete block nodes of QEMU, and redirect the VM's requests to another block
//! node.

use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use serde_json::{Value, json};

use super::{CONNECT_EVERY, Work};
use crate::attach::graph::{Graph, has_node};
use crate::attach::record::{Method, name_of};

/// Maximum time for a block job to start or end.
const JOB_MAX: Duration = Duration::from_secs(20);
/// Maximum time for QEMU to connect to hob.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Interval between two checks of a block job.
const LOOK_EVERY: Duration = Duration::from_millis(2);

impl Work<'_> {
    /// Connects QEMU to hob. Repeats failed attempts, because a restarting daemon listens on its
    /// control socket before its NBD socket.
    pub(super) async fn add_node(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + CONNECT_MAX;
        loop {
            let Err(error) = self.ask("blockdev-add", self.record.node.clone()).await else { return Ok(()) };
            if has_node(self.monitor, self.record.node_name()).await? {
                return Ok(());
            }
            if is_denied(&error) {
                return Err(anyhow!(
                    "{error}. QEMU's user may not open hob's socket: set 'socket_group' and 'socket_mode' in \
                     /etc/hob/hob.toml, and allow the socket in AppArmor or SELinux (docs/SECURITY.md, 'AppArmor and \
                     SELinux')"
                ));
            }
            if Instant::now() >= deadline {
                return Err(error);
            }
            tokio::time::sleep(CONNECT_EVERY).await;
        }
    }

    /// Redirects the VM's requests to another block node of QEMU.
    pub(super) async fn send_to(&mut self, node: &str) -> anyhow::Result<()> {
        let record = self.record;
        match (record.method, &record.parent) {
            (Method::Reopen, Some(parent)) => {
                let mut options = parent.clone();
                options["file"] = json!(node);
                self.ask("blockdev-reopen", json!({ "options": [options] })).await
            }
            (Method::Mirror, _) => self.mirror_to(node).await,
            _ => {
                self.root_node().await?;
                // `reopen` resets `detect-zeroes` unless the command has this option.
                let zeroes = self.detect_zeroes.as_ref();
                let zeroes = zeroes.map_or_else(String::new, |value| format!(",detect-zeroes={value}"));
                let line = format!("qemu-io {} \"reopen -o file={node}{zeroes}\"", record.backend);
                let said = self.monitor.ask("human-monitor-command", json!({ "command-line": line })).await?;
                match said.as_str().map(str::trim) {
                    None | Some("") => Ok(()),
                    Some(reason) => Err(anyhow!("QEMU refuses to reopen {}: {reason}", record.backend)),
                }
            }
        }
    }

    /// Returns the root node of the device.
    ///
    /// # Errors
    /// Returns an error if another program has replaced the root node, for example by a snapshot.
    /// The methods `mirror` and `device` would then replace the data of the overlay.
    async fn root_node(&mut self) -> anyhow::Result<String> {
        let root = Graph::read_edges(self.monitor).await?.child(&self.record.backend, "root");
        match root {
            Some(root) if self.root.as_ref() == Some(&root) => Ok(root),
            _ => bail!("another program has changed the VM's block nodes; repeat the command"),
        }
    }

    /// Replaces the node below the device through a mirror that copies nothing. The VM is paused,
    /// so no write occurs meanwhile.
    async fn mirror_to(&mut self, node: &str) -> anyhow::Result<()> {
        let job = self.record.job();
        let from = self.root_node().await?;
        let arguments = json!({ "job-id": job, "device": from, "target": node, "sync": "none" });
        self.ask("blockdev-mirror", arguments).await?;
        self.await_job(&job, |found| found.is_none_or(|job| job["ready"] == true)).await?;
        self.ask("block-job-complete", json!({ "device": job })).await?;
        self.await_job(&job, |found| found.is_none()).await?;
        let now = Graph::read_edges(self.monitor).await?.chain(&self.record.backend)?.swap_remove(0);
        if now != node {
            bail!("the block job ended, but the VM still uses the node {now}");
        }
        Ok(())
    }

    pub(super) async fn cancel_job(&mut self) -> anyhow::Result<()> {
        let job = self.record.job();
        let cancelled = self.ask("block-job-cancel", json!({ "device": job, "force": true })).await;
        // QEMU refuses to cancel a job that is ending.
        self.await_job(&job, |found| found.is_none()).await.map_err(|error| cancelled.err().unwrap_or(error))
    }

    async fn await_job(&mut self, job: &str, is_so: impl Fn(Option<&Value>) -> bool) -> anyhow::Result<()> {
        let deadline = Instant::now() + JOB_MAX;
        loop {
            let jobs = self.monitor.ask("query-block-jobs", json!({})).await?;
            if is_so(jobs.as_array().and_then(|jobs| jobs.iter().find(|found| found["device"] == job))) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("the block job {job} takes longer than {} s", JOB_MAX.as_secs());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    pub(super) async fn delete_spare(&mut self) -> anyhow::Result<()> {
        for spare in self.record.spare.iter().rev().map(name_of) {
            self.delete_node(spare).await?;
        }
        Ok(())
    }

    /// Deletes a block node, if QEMU has it. Nodes inside another node's options are deleted together
    /// with that node.
    pub(super) async fn delete_node(&mut self, node: &str) -> anyhow::Result<()> {
        if let Err(error) = self.ask("blockdev-del", json!({ "node-name": node })).await
            && has_node(self.monitor, node).await?
        {
            return Err(error);
        }
        Ok(())
    }

    pub(super) async fn add_spare(&mut self) -> anyhow::Result<()> {
        for spare in &self.record.spare {
            if let Err(error) = self.ask("blockdev-add", spare.clone()).await
                && !has_node(self.monitor, name_of(spare)).await?
            {
                return Err(error);
            }
        }
        Ok(())
    }
}

/// Returns true if QEMU has no permission to open hob's socket. Further attempts would fail too.
fn is_denied(error: &anyhow::Error) -> bool {
    error.to_string().contains("Permission denied")
}
