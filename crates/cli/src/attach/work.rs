//! Execution of the plan: examines the state, performs the next step, and undoes the changes if a
//! step fails.

use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use hob_control::client::{Client, ClientError};
use hob_control::{DiskAdd, DiskPatch, OnClients, OnDirty};
use serde_json::{Value, json};

use super::graph::Graph;
use super::libvirt;
use super::plan::{Definition, Goal, HobDisk, NoDaemon, Path, Spare, State, Step, after, next};
use super::proxmox::{self, Settings};
use super::qmp::Monitor;
use super::record::{Method, Record, Records, name_of};
use super::survey::room;
use crate::drain::drain_first;
use crate::remote::explain;

/// Object in QEMU which marks that hob paused the VM. The object exists until the VM ends.
const MARK: &str = "hob-paused";

/// Maximum time for a daemon that does not answer to restart.
const DAEMON_MAX: Duration = Duration::from_secs(30);
/// Maximum time for a block job to start or end.
const JOB_MAX: Duration = Duration::from_secs(20);
/// Maximum time for hob to notice that QEMU has disconnected.
const DISCONNECT_MAX: Duration = Duration::from_secs(10);
/// Maximum time for QEMU to connect to hob.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Pause between two attempts.
const CONNECT_EVERY: Duration = Duration::from_millis(100);
/// Interval between two checks.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Name of an environment variable for tests: a number of steps, after which the command stops
/// itself with SIGSTOP.
const STOP_AFTER: &str = "HOB_ATTACH_STOP_AFTER";

/// The work on one disk.
pub(super) struct Work<'a> {
    pub(super) monitor: &'a mut Monitor,
    pub(super) client: &'a Client,
    pub(super) records: &'a Records,
    pub(super) record: &'a Record,
    /// Set when the user interrupts the command.
    pub(super) interrupted: Arc<AtomicBool>,
    pub(super) paused_at: Option<Instant>,
    /// Time for which the VM was paused.
    pub(super) paused: Duration,
    pub(super) stop_after: Option<u32>,
}

/// Returns the number of steps after which a test stops the command.
pub(super) fn stop_after() -> Option<u32> {
    std::env::var(STOP_AFTER).ok()?.parse().ok()
}

impl Work<'_> {
    /// Attaches the disk. Undoes everything if a step fails.
    pub(super) async fn attach(&mut self) -> anyhow::Result<()> {
        let Err(error) = self.pursue(Goal::Attached).await else { return Ok(()) };
        tell(&format!("{}: {error:#}; undoing", self.record.label));
        self.interrupted = Arc::default();
        match self.pursue(Goal::Detached).await {
            Ok(()) => {
                Err(error.context(format!("{} is not attached, and nothing was changed", self.record.label)))
            }
            Err(second) => Err(anyhow!(
                "{0}: {error:#}; undoing this failed as well: {second:#}. Repeat 'hob attach {1}', or undo it with \
                 'hob detach {1}'",
                self.record.label,
                self.record.target
            )),
        }
    }

    /// Performs steps until the goal is reached.
    pub(super) async fn pursue(&mut self, goal: Goal) -> anyhow::Result<()> {
        let mut state = self.look().await?;
        let mut is_fresh = true;
        loop {
            if goal == Goal::Attached && self.interrupted.load(Ordering::Relaxed) {
                bail!("interrupted");
            }
            match next(goal, state) {
                Ok(Some(step)) => {
                    self.perform(step, state).await.with_context(|| format!("cannot {step}"))?;
                    // The VM is paused, so this avoids the time for examining the state.
                    (state, is_fresh) = (after(step, state), false);
                    self.stop_here();
                }
                Ok(None) if is_fresh => return Ok(()),
                Ok(None) => (state, is_fresh) = (self.look().await?, true),
                Err(NoDaemon) => {
                    self.await_daemon().await?;
                    (state, is_fresh) = (self.look().await?, true);
                }
            }
        }
    }

    fn stop_here(&mut self) {
        if let Some(left) = self.stop_after.as_mut() {
            *left = left.saturating_sub(1);
            if *left == 0 {
                self.stop_after = None;
                let _ =
                    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP);
            }
        }
    }

    async fn await_daemon(&self) -> anyhow::Result<()> {
        tell("the hob daemon does not answer; waiting for it");
        let deadline = Instant::now() + DAEMON_MAX;
        loop {
            match self.client.disks().await {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() > deadline => return Err(explain(error)),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// Examines the VM, hob and the record.
    pub(super) async fn look(&mut self) -> anyhow::Result<State> {
        let record = self.record;
        let graph = Graph::read(self.monitor).await?;
        let job = graph.jobs.iter().any(|(id, _)| *id == record.job());
        let path = if job { Path::Image } else { path(&graph, record)? };
        let present = record.spare.iter().filter(|spare| graph.has(name_of(spare))).count();
        let spare = match present {
            0 => Spare::None,
            count if count == record.spare.len() => Spare::All,
            _ => Spare::Part,
        };
        let status = self.monitor.ask("query-status", json!({})).await?;
        Ok(State {
            recorded: self.records.has(&record.disk),
            disk: self.disk().await?,
            node: graph.has(record.node_name()),
            path,
            spare: if path == Path::Hob { spare } else { Spare::None },
            running: status["running"].as_bool().unwrap_or(false),
            marked: self.monitor.objects().await?.iter().any(|name| name == MARK),
            job,
            definition: self.definition().await?,
        })
    }

    async fn disk(&self) -> anyhow::Result<HobDisk> {
        match self.client.disk(&self.record.disk).await {
            Ok(disk) if disk.cache.is_some() => Ok(HobDisk::Cached),
            Ok(disk) if disk.unlocked => Ok(HobDisk::Unlocked),
            Ok(_) => Ok(HobDisk::Locked),
            Err(ClientError::Refused { status: 404, .. }) => Ok(HobDisk::Absent),
            Err(ClientError::Unreachable { .. } | ClientError::BrokeOff { .. }) => Ok(HobDisk::Unknown),
            Err(error) => Err(explain(error)),
        }
    }

    /// Returns the disk's source in the VM's persistent definition.
    async fn definition(&self) -> anyhow::Result<Definition> {
        if let (Some(vmid), Some(volumes)) = (self.record.vmid(), &self.record.volumes) {
            return Ok(Settings::read(vmid)?.definition(volumes));
        }
        let (Some(domain), Some(_)) = (self.record.domain(), &self.record.definition) else {
            return Ok(Definition::None);
        };
        let Some(xml) = libvirt::definition(domain).await? else { return Ok(Definition::None) };
        Ok(match libvirt::find(&xml, &self.record.file, &self.record.disk) {
            None => Definition::None,
            Some(libvirt::Defined::Image(_)) => Definition::Image,
            Some(libvirt::Defined::Hob(_)) => Definition::Hob,
        })
    }

    /// Changes the VM's persistent definition.
    async fn define(&self, to: Definition) -> anyhow::Result<()> {
        let record = self.record;
        if let (Some(vmid), Some(volumes)) = (record.vmid(), &record.volumes) {
            let (image, hob) = (&volumes.image, &volumes.hob);
            return match (to, self.definition().await?) {
                (Definition::Hob, Definition::Image) => {
                    proxmox::replace(vmid, &volumes.key, image, hob).await
                }
                (Definition::Image, Definition::Hob) => {
                    proxmox::replace(vmid, &volumes.key, hob, image).await
                }
                _ => Ok(()),
            };
        }
        let (Some(domain), Some(image)) = (record.domain(), &record.definition) else { return Ok(()) };
        let xml = libvirt::definition(domain).await?.unwrap_or_default();
        match (to, libvirt::find(&xml, &record.file, &record.disk)) {
            (Definition::Hob, Some(libvirt::Defined::Image(old))) => {
                let new = libvirt::with_hob(&old, &record.disk, record.socket())?;
                libvirt::replace(domain, &old, &new).await?;
                let xml = libvirt::definition(domain).await?.unwrap_or_default();
                let defined = libvirt::find(&xml, &record.file, &record.disk);
                if !matches!(defined, Some(libvirt::Defined::Hob(element)) if element.contains("<reconnect"))
                {
                    tell(&format!(
                        "warning: this libvirt does not keep <reconnect> for NBD disks: after the next start of {domain}, \
                         a crash of hob fails the guest's I/O. 'hob detach --stopped' before that start avoids it"
                    ));
                }
                Ok(())
            }
            (Definition::Image, Some(libvirt::Defined::Hob(old))) => {
                libvirt::replace(domain, &old, image).await
            }
            _ => Ok(()),
        }
    }

    async fn perform(&mut self, step: Step, state: State) -> anyhow::Result<()> {
        tell(&format!("{}: {step}", self.record.label));
        let record = self.record;
        let disk = record.disk.as_str();
        match step {
            Step::Record => self.records.save(record),
            Step::AddDisk => self.add_disk().await,
            Step::AddNode => self.add_node().await,
            Step::Mark => self.ask("object-add", json!({ "qom-type": "throttle-group", "id": MARK })).await,
            Step::Pause => {
                // Writes the guest's data to the disk now, and not during the pause.
                let file = record.file.clone();
                let _ = tokio::task::spawn_blocking(move || std::fs::File::open(file)?.sync_data()).await;
                self.paused_at = Some(Instant::now());
                self.ask("stop", json!({})).await
            }
            Step::ToHob => self.send_to(record.node_name()).await,
            Step::ToImage => self.send_to(record.image_node()).await,
            Step::DeleteSpare => self.delete_spare().await,
            Step::AddSpare => self.add_spare().await,
            Step::Lock => self.set_lock(true).await,
            Step::Unlock => self.set_lock(false).await,
            Step::Continue => {
                self.ask("cont", json!({})).await?;
                self.paused += self.paused_at.take().map_or(Duration::ZERO, |at| at.elapsed());
                Ok(())
            }
            Step::Unmark => self.ask("object-del", json!({ "id": MARK })).await,
            Step::EnableCache => {
                let enabled = self.client.cache_enable(disk, &record.cache).await;
                enabled.map(|_| ()).map_err(explain)
            }
            Step::Define => self.define(Definition::Hob).await,
            Step::Undefine => self.define(Definition::Image).await,
            Step::CancelJob => self.cancel_job().await,
            Step::DisableCache if state.disk == HobDisk::Cached => {
                drain_first(self.client, disk).await?;
                self.client.cache_disable(disk, OnDirty::Drain).await.map(|_| ()).map_err(explain)
            }
            Step::DisableCache => Ok(()),
            Step::DeleteNode => self.ask("blockdev-del", json!({ "node-name": record.node_name() })).await,
            Step::RemoveDisk => self.remove_disk().await,
            Step::Forget => self.records.delete(disk),
        }
    }

    async fn ask(&mut self, command: &str, arguments: Value) -> anyhow::Result<()> {
        self.monitor.ask(command, arguments).await.map(|_| ())
    }

    /// Adds hob's disk, after enlarging the file for an image that can grow.
    async fn add_disk(&self) -> anyhow::Result<()> {
        let record = self.record;
        if let Some(bytes) = room(record).await? {
            let file = std::fs::File::options().write(true).open(&record.file)?;
            if file.metadata()?.is_file() && file.metadata()?.len() < bytes {
                file.set_len(bytes)?;
            }
        }
        let add = DiskAdd {
            name: record.disk.clone(),
            backing: record.file.to_string_lossy().into_owned(),
            format: Some("raw".to_owned()),
            unlocked: true,
            ..DiskAdd::default()
        };
        self.client.disk_add(&add).await.map(|_| ()).map_err(explain)
    }

    /// Connects QEMU to hob. A restarting daemon answers on its control socket before its NBD
    /// socket.
    async fn add_node(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + CONNECT_MAX;
        loop {
            match self.ask("blockdev-add", self.record.node.clone()).await {
                Err(_) if Instant::now() < deadline => tokio::time::sleep(CONNECT_EVERY).await,
                result => return result,
            }
        }
    }

    async fn set_lock(&self, is_locked: bool) -> anyhow::Result<()> {
        let patch = DiskPatch { locked: Some(is_locked), ..DiskPatch::default() };
        let deadline = Instant::now() + DAEMON_MAX;
        loop {
            match self.client.disk_patch(&self.record.disk, &patch).await {
                Ok(_) => return Ok(()),
                // The daemon is restarting; the VM is paused meanwhile, and the result is still
                // open.
                Err(
                    ClientError::Unreachable { .. }
                    | ClientError::BrokeOff { .. }
                    | ClientError::Refused { status: 409, .. },
                ) if Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(error) => return Err(explain(error)),
            }
        }
    }

    async fn remove_disk(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + DISCONNECT_MAX;
        loop {
            match self.client.disk_remove(&self.record.disk, OnDirty::Drain, OnClients::Refuse).await {
                Ok(_) => return Ok(()),
                Err(ClientError::Refused { status: 409, .. }) if Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Err(error) => return Err(explain(error)),
            }
        }
    }

    /// Sends the VM's requests to another node.
    async fn send_to(&mut self, node: &str) -> anyhow::Result<()> {
        let record = self.record;
        match (record.method, &record.parent) {
            (Method::Reopen, Some(parent)) => {
                let mut options = parent.clone();
                options["file"] = json!(node);
                self.ask("blockdev-reopen", json!({ "options": [options] })).await
            }
            (Method::Mirror, _) => self.mirror_to(node).await,
            _ => {
                let line = format!("qemu-io {} \"reopen -o file={node}\"", record.backend);
                let said = self.monitor.ask("human-monitor-command", json!({ "command-line": line })).await?;
                match said.as_str().map(str::trim) {
                    None | Some("") => Ok(()),
                    Some(reason) => Err(anyhow!("QEMU refuses to reopen {}: {reason}", record.backend)),
                }
            }
        }
    }

    /// Replaces the node below the device through a mirror that copies nothing. The VM is paused,
    /// so no write occurs meanwhile.
    async fn mirror_to(&mut self, node: &str) -> anyhow::Result<()> {
        let job = self.record.job();
        let from = Graph::read(self.monitor).await?.chain(&self.record.backend)?.swap_remove(0);
        let arguments = json!({ "job-id": job, "device": from, "target": node, "sync": "none" });
        self.ask("blockdev-mirror", arguments).await?;
        self.await_job(&job, |found| found.is_none_or(|job| job["ready"] == true)).await?;
        self.ask("block-job-complete", json!({ "device": job })).await?;
        self.await_job(&job, |found| found.is_none()).await?;
        let now = Graph::read(self.monitor).await?.chain(&self.record.backend)?.swap_remove(0);
        if now != node {
            bail!("the block job ended, but the VM still uses the node {now}");
        }
        Ok(())
    }

    async fn cancel_job(&mut self) -> anyhow::Result<()> {
        let job = self.record.job();
        self.ask("block-job-cancel", json!({ "device": job, "force": true })).await?;
        self.await_job(&job, |found| found.is_none()).await
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

    async fn delete_spare(&mut self) -> anyhow::Result<()> {
        for spare in self.record.spare.iter().rev().map(name_of) {
            if let Err(error) = self.ask("blockdev-del", json!({ "node-name": spare })).await {
                // Nodes inside another node's options are deleted together with it.
                if Graph::read(self.monitor).await?.has(spare) {
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    async fn add_spare(&mut self) -> anyhow::Result<()> {
        for spare in &self.record.spare {
            if let Err(error) = self.ask("blockdev-add", spare.clone()).await
                && !Graph::read(self.monitor).await?.has(name_of(spare))
            {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Removes hob's disk of a stopped VM, and its record.
    pub(super) async fn detach_stopped(&mut self) -> anyhow::Result<()> {
        let disk = self.record.disk.as_str();
        self.define(Definition::Image).await?;
        if self.disk().await? == HobDisk::Cached {
            drain_first(self.client, disk).await?;
            self.client.cache_disable(disk, OnDirty::Drain).await.map_err(explain)?;
        }
        if self.disk().await? != HobDisk::Absent {
            self.remove_disk().await?;
        }
        self.records.delete(disk)
    }
}

/// Returns the target of a VM's requests.
fn path(graph: &Graph, record: &Record) -> anyhow::Result<Path> {
    let chain = graph.chain(&record.backend)?;
    let last = chain.last().expect("a chain has a node");
    let node = &graph.nodes[last];
    match node.driver.as_str() {
        _ if last == record.node_name() => Ok(Path::Hob),
        "file" | "host_device" => Ok(Path::Image),
        driver => bail!(
            "{} now uses {} ({driver}); if the VM was started with hob's disk, stop the VM and use \
            'hob detach --stopped'",
            record.label,
            node.file
        ),
    }
}

/// Writes a message to stderr, and ignores a closed stderr.
pub(super) fn tell(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}
