//! Execution of the plan: examines the state, performs the next step, and undoes the changes if a
//! step fails.

mod nodes;
mod started;
mod stopped;

use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use hob_control::client::{Client, ClientError};
use hob_control::{DiskAdd, DiskPatch, DrainFor, OnClients, OnDirty};
use serde_json::{Value, json};

use super::definition;
use super::graph::{Graph, is_made_up};
use super::image_growth::room;
use super::interrupt::Interrupt;
use super::overlay::{has_hobs_node, path};
use super::plan::{Definition, Goal, HobDisk, NoDaemon, Path, Spare, State, Step, after, next};
use super::qmp::{Monitor, is_ended};
use super::record::{Record, Records, name_of};
use super::retries::{DAEMON_MAX, Passes, RESTARTS_MAX, Restarts, lock_time_max};
use super::test_stop::{self, TestStop};
use crate::drain::drain_first;
pub(super) use crate::output::tell;
use crate::remote::explain;

/// Name of the QEMU object which records that hob paused the VM. The object outlives a killed
/// command.
pub(super) const MARK: &str = "hob-paused";

/// Maximum time for hob to notice that QEMU has disconnected.
const DISCONNECT_MAX: Duration = Duration::from_secs(10);
/// Pause between two attempts to connect to hob.
const CONNECT_EVERY: Duration = Duration::from_millis(100);

/// The attachment or detachment of one disk.
pub(super) struct Work<'a> {
    monitor: &'a mut Monitor,
    client: &'a Client,
    records: &'a Records,
    pub(super) record: &'a Record,
    interrupt: Arc<Interrupt>,
    /// True after a step of the command failed. The command undoes its changes, also if the user
    /// interrupts it.
    is_undoing: bool,
    paused_at: Option<Instant>,
    /// Time for which the VM was paused.
    pub(super) paused: Duration,
    stop: TestStop,
    /// True if the daemon did not answer while the command waited. The command does not wait again.
    has_no_daemon: bool,
    /// The last step that was printed. Further attempts of the same step are not printed.
    told: Option<Step>,
    /// Root node of the device when the state was last examined.
    root: Option<String>,
    /// How the root node treats writes of zeroes: QEMU's option `detect-zeroes`, if it is not off.
    detect_zeroes: Option<String>,
    /// Messages that are printed after the end of the pause of the VM.
    untold: Vec<String>,
}

impl<'a> Work<'a> {
    pub(super) fn new(
        monitor: &'a mut Monitor,
        client: &'a Client,
        records: &'a Records,
        record: &'a Record,
        interrupt: &Arc<Interrupt>,
    ) -> Work<'a> {
        Work {
            monitor,
            client,
            records,
            record,
            interrupt: interrupt.clone(),
            is_undoing: false,
            paused_at: None,
            paused: Duration::ZERO,
            stop: TestStop::from_environment(),
            has_no_daemon: false,
            told: None,
            root: None,
            detect_zeroes: None,
            untold: Vec::new(),
        }
    }

    /// Refuses a disk whose block nodes in QEMU differ from those that the record describes. Each
    /// command checks all of its disks before the first step.
    pub(super) async fn check(&mut self, goal: Goal) -> anyhow::Result<()> {
        let checked = match self.look(goal).await {
            Ok(state) if goal == Goal::Detached => self.check_users(state).await,
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        };
        let Err(error) = checked else { return Ok(()) };
        Err(self.refusal(error).await)
    }

    /// Returns the message of a command that does nothing because of `error`. Continues the VM if
    /// an earlier command was killed while it had the VM paused.
    pub(super) async fn refusal(&mut self, error: anyhow::Error) -> anyhow::Error {
        self.reconnect_after(&error).await;
        match self.resume().await {
            vm if vm.is_empty() => error,
            vm => anyhow!("{error:#}. {}", vm.trim_end()),
        }
    }

    /// Returns true if QEMU has no node, object or job of the attachment, and the VM uses an image.
    /// Either an earlier command was killed before it changed QEMU, or the VM has started again
    /// since. The VM may have another image now, even at the same path, so hob's disk must not be
    /// used for this image. Returns false if the VM's definition has hob's disk: a detachment was
    /// killed near its end, and the VM still has the same image. Returns true if hob cannot add
    /// the record's node again: a detachment was killed after this node of the VM's start was deleted.
    pub(super) async fn is_left_over(&mut self) -> bool {
        // `check` reports errors.
        let Ok(state) = self.look(Goal::Detached).await else { return false };
        let is_in_qemu = state.node || state.marked || state.job;
        let is_unknown = !is_in_qemu && state.definition != Definition::Hob;
        let is_deleted = !state.node && !state.job && is_made_up(self.record.node_name());
        state.path == Path::Image && (is_unknown || is_deleted)
    }

    /// Attaches the disk. Undoes everything if a step fails.
    pub(super) async fn attach(&mut self) -> anyhow::Result<()> {
        let Err(error) = self.pursue(Goal::Attached).await else { return Ok(()) };
        self.tell_rest();
        tell(&format!("{}: {error:#}; undoing", self.record.label));
        self.is_undoing = true;
        self.reconnect_after(&error).await;
        match self.pursue(Goal::Detached).await {
            Ok(()) => {
                Err(error.context(format!("{} is not attached, and nothing was changed", self.record.label)))
            }
            Err(second) if is_ended(&second) => Err(self.after_end(&error)),
            Err(second) => {
                let vm = self.resume().await;
                Err(anyhow!(
                    "{0}: {error:#}; undoing this failed as well: {second:#}. {vm}Repeat 'hob attach {1}', or undo \
                     it with 'hob detach {1}'",
                    self.record.label,
                    self.record.target
                ))
            }
        }
    }

    /// Detaches the disk. Attaches it again if a step fails while the VM uses hob.
    pub(super) async fn detach(&mut self) -> anyhow::Result<()> {
        let Err(error) = self.pursue(Goal::Detached).await else { return Ok(()) };
        self.tell_rest();
        self.is_undoing = true;
        self.reconnect_after(&error).await;
        let uses_hob = match self.look(Goal::Attached).await {
            Err(second) if is_ended(&second) => return Err(self.after_end(&error)),
            state => state.is_ok_and(|state| state.path == Path::Hob),
        };
        if uses_hob {
            tell(&format!("{}: {error:#}; undoing", self.record.label));
            if self.pursue(Goal::Attached).await.is_ok() {
                return Err(error.context(format!("{} is still attached", self.record.label)));
            }
        }
        let vm = self.resume().await;
        Err(anyhow!(
            "{}: {error:#}. {vm}Repeat 'hob detach {}'; 'hob attach --list' shows the disk's state",
            self.record.label,
            self.record.target
        ))
    }

    /// Returns the error message for a VM that has probably ended, with advice for the user.
    fn after_end(&self, error: &anyhow::Error) -> anyhow::Error {
        let Record { label, disk, target, .. } = self.record;
        anyhow!(
            "{label}: {error:#}. If the VM has ended, hob keeps its disk {disk}: run 'hob detach --stopped {target}' \
             before the VM's next start. If the VM runs, repeat the command"
        )
    }

    /// Connects to QEMU again if the connection was lost and QEMU still runs, because the VM may be
    /// paused.
    async fn reconnect_after(&mut self, error: &anyhow::Error) {
        if is_ended(error) {
            self.monitor.reconnect().await;
        }
    }

    /// Continues the VM after a failure, if hob paused it. Returns a sentence about the VM for the
    /// message, or nothing if hob had not paused it.
    pub(super) async fn resume(&mut self) -> String {
        self.tell_rest();
        match self.continue_vm().await {
            Ok(false) => String::new(),
            Ok(true) => "The VM continues. ".to_owned(),
            Err(error) => format!("hob cannot continue the VM: {error:#}. "),
        }
    }

    /// Continues the VM if hob paused it, and deletes the object [`MARK`] from QEMU. Returns true
    /// if the VM was paused.
    ///
    /// # Errors
    /// Returns an error if the VM uses hob, and another program could open the image, because hob
    /// cannot lock it.
    async fn continue_vm(&mut self) -> anyhow::Result<bool> {
        if !self.is_marked().await? {
            return Ok(false);
        }
        // hob pauses only running VMs. A VM in another state, for example after a migration, must not run.
        let is_paused = self.monitor.ask("query-status", json!({})).await?["status"] == "paused";
        if is_paused {
            self.secure().await?;
            self.continue_guest().await?;
        }
        self.unmark().await?;
        Ok(is_paused)
    }

    /// Makes sure that the VM may continue: no block job of hob copies the disk, and hob or QEMU has the
    /// lock of the image.
    async fn secure(&mut self) -> anyhow::Result<()> {
        let record = self.record;
        let mut graph = Graph::read(self.monitor).await?;
        if graph.jobs.iter().any(|(id, _)| *id == record.job()) {
            self.cancel_job().await?;
            graph = Graph::read(self.monitor).await?;
        }
        if has_hobs_node(&graph, record) && graph.below(&record.backend).contains(record.node_name()) {
            self.lock_again().await?;
        }
        Ok(())
    }

    /// Makes the VM's other disks safe before the VM continues: a command may have been killed
    /// between their steps. No block job of hob may copy another disk, and hob or QEMU must have
    /// the lock of its image.
    async fn secure_others(&mut self) -> anyhow::Result<()> {
        let record = self.record;
        let mut records = self.records.all()?;
        records.retain(|other| other.target == record.target && other.disk != record.disk);
        for other in &records {
            let mut work = Work::new(self.monitor, self.client, self.records, other, &self.interrupt);
            work.secure().await.map_err(|error| {
                error.context(format!(
                    "a command was interrupted between its steps for the disk {0}; repeat 'hob attach {1} {0}', or run \
                     'hob detach {1} {0}'",
                    other.label, other.target
                ))
            })?;
        }
        Ok(())
    }

    /// Makes sure that hob or QEMU holds the image's lock while the VM uses hob.
    async fn lock_again(&mut self) -> anyhow::Result<()> {
        match self.disk().await? {
            HobDisk::Locked | HobDisk::Cached => Ok(()),
            HobDisk::Unlocked => {
                // QEMU has the lock as long as it has the image open.
                if self.delete_spare().await.is_err() {
                    return Ok(());
                }
                self.set_lock(true).await
            }
            HobDisk::Absent => bail!("hob does not have the disk {}", self.record.disk),
            HobDisk::Unknown => bail!("the hob daemon does not answer; start it and repeat the command"),
        }
    }

    /// Performs steps until the goal is reached.
    pub(super) async fn pursue(&mut self, goal: Goal) -> anyhow::Result<()> {
        let mut state = self.look(goal).await?;
        let mut is_fresh = true;
        let mut restarts = Restarts::default();
        let mut passes = Passes::default();
        passes.begin(goal, state)?;
        loop {
            if goal == Goal::Attached && !self.is_undoing && self.interrupt.is_requested() {
                bail!("interrupted");
            }
            match next(goal, state) {
                Ok(Some(step)) => match self.perform(step, state).await {
                    Ok(()) => {
                        (state, is_fresh) = match step {
                            // While the job runs, it is unknown which node the VM uses.
                            Step::CancelJob => (self.look(goal).await?, true),
                            // The VM may be paused. The state is computed, because examining the VM
                            // takes longer.
                            _ => (after(step, state), false),
                        };
                        self.stop_here();
                    }
                    Err(error) if restarts.may_try_again(&error) => {
                        self.tell_rest();
                        // It is unknown whether the daemon has completed the step.
                        self.await_daemon().await?;
                        tokio::time::sleep(CONNECT_EVERY).await;
                        (state, is_fresh) = (self.look(goal).await?, true);
                    }
                    Err(error) => return Err(error.context(format!("cannot {step}"))),
                },
                Ok(None) if is_fresh => return Ok(()),
                Ok(None) => {
                    (state, is_fresh) = (self.look(goal).await?, true);
                    passes.begin(goal, state)?;
                }
                Err(NoDaemon) if restarts.count() => {
                    self.tell_rest();
                    self.await_daemon().await?;
                    (state, is_fresh) = (self.look(goal).await?, true);
                }
                Err(NoDaemon) => bail!("the hob daemon restarted more than {RESTARTS_MAX} times"),
            }
        }
    }

    fn stop_here(&mut self) {
        if self.stop.is_due() {
            self.tell_rest();
            test_stop::stop();
        }
    }

    async fn await_daemon(&mut self) -> anyhow::Result<()> {
        let max = if self.has_no_daemon { Duration::ZERO } else { DAEMON_MAX };
        let result = await_daemon(self.client, max).await;
        self.has_no_daemon = result.is_err();
        result
    }

    /// Returns the present state of the VM, of hob's disk and of the attachment's record.
    ///
    /// # Errors
    /// Returns an error if the VM uses other nodes than the record says, for example because of a
    /// snapshot.
    pub(super) async fn look(&mut self, goal: Goal) -> anyhow::Result<State> {
        let record = self.record;
        let graph = Graph::read(self.monitor).await?;
        let job = graph.jobs.iter().any(|(id, _)| *id == record.job());
        let path = if job { Path::Image } else { path(&graph, record, goal)? };
        self.root = graph.child(&record.backend, "root");
        let zeroes = self.root.as_ref().and_then(|root| graph.detect_zeroes(root));
        self.detect_zeroes = zeroes.map(str::to_owned);
        let present = record.spare.iter().filter(|spare| graph.has(name_of(spare))).count();
        let spare = match present {
            0 => Spare::None,
            count if count == record.spare.len() => Spare::All,
            _ => Spare::Part,
        };
        let status = self.monitor.ask("query-status", json!({})).await?;
        let running = status["running"].as_bool().unwrap_or(false);
        let marked = self.is_marked().await?;
        self.interrupt.set_pausing(marked);
        Ok(State {
            recorded: self.records.has(&record.disk),
            disk: self.disk().await?,
            node: has_hobs_node(&graph, record),
            path,
            spare: if path == Path::Hob { spare } else { Spare::None },
            running,
            marked,
            job,
            definition: definition::read(self.record).await?,
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

    async fn perform(&mut self, step: Step, state: State) -> anyhow::Result<()> {
        let record = self.record;
        if self.told.replace(step) != Some(step) {
            self.say(format!("{}: {step}", record.label));
        }
        let disk = record.disk.as_str();
        match step {
            Step::Record => self.records.save(record),
            Step::AddDisk => self.add_disk().await,
            Step::AddNode => self.add_node().await,
            Step::Mark => self.mark().await,
            Step::Pause => self.pause(state.path).await,
            Step::ToHob => self.send_to(record.node_name()).await,
            Step::ToImage => self.send_to(record.image_node()).await,
            Step::DeleteSpare => self.delete_spare().await,
            Step::AddSpare => self.add_spare().await,
            Step::Lock => self.set_lock(true).await,
            Step::Unlock => self.set_lock(false).await,
            Step::Continue => self.continue_guest().await,
            Step::Unmark => self.unmark().await,
            Step::EnableCache => {
                let enabled = self.client.cache_enable(disk, &record.cache).await;
                enabled.map(|_| ()).map_err(explain)
            }
            Step::Define => definition::change(record, Definition::Hob).await,
            Step::Undefine => definition::change(record, Definition::Image).await,
            Step::CancelJob => self.cancel_job().await,
            Step::DisableCache if state.disk == HobDisk::Cached => {
                drain_first(self.client, disk, DrainFor::Detach).await?;
                self.client.cache_disable(disk, OnDirty::Drain).await.map(|_| ()).map_err(explain)
            }
            Step::DisableCache => Ok(()),
            Step::DeleteNode => self.delete_node(record.node_name()).await,
            Step::RemoveDisk => self.remove_disk().await,
            Step::Forget => self.records.delete(disk),
        }
    }

    async fn ask(&mut self, command: &str, arguments: Value) -> anyhow::Result<()> {
        self.monitor.ask(command, arguments).await.map(|_| ())
    }

    /// Prints a message. While the VM is paused, the message waits for the end of the pause,
    /// because a terminal that does not accept output must not keep the VM paused.
    fn say(&mut self, text: String) {
        match self.paused_at {
            Some(_) => self.untold.push(text),
            None => tell(&text),
        }
    }

    /// Prints the messages that wait for the end of the pause.
    fn tell_rest(&mut self) {
        self.untold.drain(..).for_each(|text| tell(&text));
    }

    async fn pause(&mut self, from: Path) -> anyhow::Result<()> {
        if let Err(error) = self.before_pause(from).await {
            // The VM ran when the state was examined. If it is paused now, hob has not paused it, and
            // must not continue it.
            self.unmark().await?;
            return Err(error);
        }
        self.paused_at = Some(Instant::now());
        self.ask("stop", json!({})).await
    }

    /// Writes the data of the VM's image files to storage, and checks that no other program has
    /// changed the VM.
    async fn before_pause(&mut self, from: Path) -> anyhow::Result<()> {
        // QEMU flushes all disks when it stops the VM. Writes their data now, and not during the
        // pause.
        let mut files = Graph::read(self.monitor).await?.written_files();
        files.push(self.record.file.clone());
        self.write_out(files).await?;
        self.monitor.prepare().await;
        self.check_unchanged(from).await
    }

    /// Refuses to pause a VM that another program has changed since the state was examined. `from` is
    /// the present target of the VM's requests.
    async fn check_unchanged(&mut self, from: Path) -> anyhow::Result<()> {
        let goal = if from == Path::Image { Goal::Attached } else { Goal::Detached };
        let graph = Graph::read(self.monitor).await?;
        let is_same = path(&graph, self.record, goal)? == from;
        if !is_same || graph.child(&self.record.backend, "root") != self.root {
            bail!("another program has changed the VM's block nodes; repeat the command");
        }
        graph.check_jobs()?;
        let status = self.monitor.ask("query-status", json!({})).await?;
        if status["running"] == json!(false) {
            bail!("another program has paused the VM; repeat the command");
        }
        Ok(())
    }

    async fn is_marked(&mut self) -> anyhow::Result<bool> {
        Ok(self.monitor.objects().await?.iter().any(|name| name == MARK))
    }

    async fn mark(&mut self) -> anyhow::Result<()> {
        self.interrupt.set_pausing(true);
        let arguments = json!({ "qom-type": "throttle-group", "id": MARK });
        if let Err(error) = self.ask("object-add", arguments).await
            && !self.is_marked().await?
        {
            return Err(error);
        }
        Ok(())
    }

    async fn unmark(&mut self) -> anyhow::Result<()> {
        if let Err(error) = self.ask("object-del", json!({ "id": MARK })).await
            && self.is_marked().await?
        {
            return Err(error);
        }
        self.interrupt.set_pausing(false);
        Ok(())
    }

    /// Writes the data of image files to their disks. A signal ends the command while a filesystem
    /// hangs.
    async fn write_out(&self, files: Vec<PathBuf>) -> anyhow::Result<()> {
        let (done, mut is_done) = tokio::sync::oneshot::channel();
        // When the command ends, the runtime waits for all threads that it started. A thread
        // outside the runtime does not delay the end.
        std::thread::spawn(move || {
            files.iter().for_each(|file| write_out(file));
            let _: Result<(), ()> = done.send(());
        });
        loop {
            match tokio::time::timeout(CONNECT_EVERY, &mut is_done).await {
                Ok(_) => return Ok(()),
                Err(_) if self.interrupt.is_requested() && !self.is_undoing => bail!("interrupted"),
                Err(_) => {}
            }
        }
    }

    async fn continue_guest(&mut self) -> anyhow::Result<()> {
        // While this command had the VM paused, no other disk had a step.
        if self.paused_at.is_none() {
            self.secure_others().await?;
        }
        self.ask("cont", json!({})).await?;
        self.paused += self.paused_at.take().map_or(Duration::ZERO, |at| at.elapsed());
        self.tell_rest();
        Ok(())
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

    async fn set_lock(&mut self, is_locked: bool) -> anyhow::Result<()> {
        let patch = DiskPatch { locked: Some(is_locked), ..DiskPatch::default() };
        let begin = Instant::now();
        loop {
            match self.client.disk_patch(&self.record.disk, &patch).await {
                Ok(_) => return Ok(()),
                // The daemon may be restarting, while the VM is paused. It is unknown whether the
                // daemon has set the lock.
                Err(error) if begin.elapsed() < lock_time_max(&error) => {
                    self.tell_rest();
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
}

/// Writes the data of an image file to its disk. Errors are ignored: QEMU's own flush reports them.
fn write_out(path: &std::path::Path) {
    // QEMU's answers are not trusted: opening a file that is neither regular nor a block device can
    // have effects.
    let is_image =
        std::fs::metadata(path).is_ok_and(|file| file.is_file() || file.file_type().is_block_device());
    if is_image && let Ok(file) = std::fs::File::open(path) {
        let _ = file.sync_data();
    }
}

/// Waits until the daemon answers, for at most `max`.
async fn await_daemon(client: &Client, max: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + max;
    let mut is_told = false;
    loop {
        match client.disks().await {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() >= deadline => return Err(explain(error)),
            Err(_) => {
                if !std::mem::replace(&mut is_told, true) {
                    tell("the hob daemon does not answer; waiting for it");
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Writes the dirty data of a disk to its image, if hob has the disk. Waits for a daemon that
/// restarts.
pub(super) async fn drain_if_present(client: &Client, disk: &str) -> anyhow::Result<()> {
    let mut restarts = Restarts::default();
    loop {
        let drained = match client.disks().await {
            Ok(disks) if disks.iter().any(|found| found.name == disk && found.cache.is_some()) => {
                drain_first(client, disk, DrainFor::Detach).await
            }
            Ok(_) => Ok(()),
            Err(error) => Err(explain(error)),
        };
        match drained {
            Err(error) if restarts.may_try_again(&error) => {
                await_daemon(client, DAEMON_MAX).await?;
                tokio::time::sleep(CONNECT_EVERY).await;
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests;
