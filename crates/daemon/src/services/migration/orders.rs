//! Checks the migration commands of operators, and passes them to the task of the disk's migration.

use std::sync::Arc;
use std::time::Duration;

use hob_control::peer::call_path;
use hob_control::{
    CallRefusal, Disk, DiskChanged, DiskState, Migration, MigrationStart, MigrationState, Side, Size, Switch,
};
use hob_engine::migration::{Order, Record, Session, Source, SourceOptions};
use tokio::sync::{mpsc, oneshot};

use super::super::observe::DiskDetail;
use super::super::registry::{DiskPhase, MIGRATING, OperationGuard};
use super::Migrations;
use super::destination;
use super::flow::Bandwidth;
use super::source::{self, Leaving, serves_after};
use super::status::Shared;
use super::{Handle, Inputs, incoming};
use crate::api_error::{ApiError, Result, conflict, failed, not_found};
use crate::background::spawn;
use crate::state::RecordSpec;

/// Maximum time that guest requests wait for an answer of the destination host during the
/// hand-over, in nanoseconds.
const FREEZE_NS_MAX: u64 = 3_000_000_000;

/// Maximum time that the command waits until the record of a new migration is saved durably. The
/// migration's task continues after this time.
const RECORD_MAX: Duration = Duration::from_secs(5);

/// Maximum time for the destination to answer whether it is ready.
const LOOK_MAX: Duration = Duration::from_secs(10);

/// Minimum bandwidth limit of a migration, in bytes per second.
const BANDWIDTH_MIN: u64 = 512 << 10;

impl Migrations {
    pub(crate) async fn migrate(self: &Arc<Self>, name: String, start: MigrationStart) -> Result<Migration> {
        let migrations = self.clone();
        self.tasks
            .run("migrate", name.clone(), async move {
                let guard = migrations.registry.guard_disk_for_command(&name, MIGRATING).await?;
                if migrations.registry.inner().disk(&name)?.wanted.unlocked {
                    return Err(conflict!("{name} is being attached or detached"));
                }
                if migrations.registry.inner().disk(&name)?.wanted.device {
                    return Err(conflict!("{name} is a block device of this host")
                        .hint(format!("remove the device first: hob disk set {name} --device off")));
                }
                migrations.check_leaving(&name, &start).await?;
                let spec = migrations.spec_to_leave(&name)?;
                let session = next_session(spec.record.record());
                let leaving = migrations.leaving(&name, spec.lineage.clone(), start.clone(), session)?;
                leaving.meet(session).await?;
                migrations.end_filling(&name);
                if let Ok(disk) = migrations.registry.inner().disk_mut(&name) {
                    let record = spec.record;
                    disk.wanted.migration = Some(crate::state::MigrationSpec {
                        peer: start.to.clone(),
                        cache: start.cache,
                        plan: Some(start),
                        record,
                        ..spec
                    });
                }
                let shared = leaving.shared.clone();
                migrations.begin_attempt(leaving, session, Some(guard));
                // Waits until the migration would continue after a crash, because the caller may
                // rely on this.
                let _ = tokio::time::timeout(RECORD_MAX, shared.recorded.notified()).await;
                migrations.migration(&name)
            })
            .await
    }

    /// Stops pulling the cached data of a disk that has migrated to this host. The cache keeps the
    /// data that was pulled so far.
    fn end_filling(&self, name: &str) {
        let before = self.handles().remove(name);
        if let Some(Handle { task, .. }) = before {
            task.abort();
        }
        if let Ok((shard, id)) = self.registry.shard_of(name) {
            shard.leave_peer(id);
        }
    }

    /// Checks a migration as far as possible without asking the destination.
    async fn check_leaving(self: &Arc<Self>, name: &str, start: &MigrationStart) -> Result<()> {
        incoming::check_directory(&self.peers.transport()?.directory)?;
        let backing = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            disk.shard()?;
            disk.wanted.backing.clone()
        };
        for backing in std::iter::once(&backing).chain(&start.backing) {
            self.check_two_can_open(backing).await?;
        }
        check_bandwidth(start.bandwidth)
    }

    /// Returns the data that the task of a migration from this host needs.
    pub(super) fn leaving(
        self: &Arc<Self>,
        name: &str,
        lineage: String,
        plan: MigrationStart,
        session: Session,
    ) -> Result<Leaving> {
        let (host, port, tls) = self.peers.other_daemon(&plan.to)?;
        let to = (host, port);
        let shared = Arc::new(Shared::new(Side::Source, plan.to.clone(), plan.cache, session));
        let bandwidth = Arc::new(Bandwidth::new(plan.bandwidth.map(Size::bytes)));
        Ok(Leaving {
            migrations: self.clone(),
            name: name.to_owned(),
            lineage,
            plan,
            shared,
            bandwidth,
            to,
            tls,
        })
    }

    /// Starts the task for a migration attempt.
    pub(super) fn begin_attempt(&self, leaving: Leaving, session: Session, guard: Option<OperationGuard>) {
        let options = SourceOptions {
            on_demand: leaving.plan.switch == Switch::OnWrite,
            freeze_ns_max: FREEZE_NS_MAX,
            serves_after: serves_after(leaving.plan.cache),
        };
        self.run_source(leaving, Source::start(session, options), guard);
    }

    pub(super) fn run_source(&self, leaving: Leaving, source: Source, guard: Option<OperationGuard>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let (name, shared) = (leaving.name.clone(), leaving.shared.clone());
        let task = spawn(source::run(leaving, source, guard, sender.clone(), receiver));
        self.handles().insert(name, Handle { inputs: Inputs::Source(sender), shared, task });
    }

    /// Returns the progress of a disk's migration, or the result of the last one.
    pub(crate) fn migration(&self, name: &str) -> Result<Migration> {
        if let Some(handle) = self.handles().get(name) {
            return Ok(handle.shared.view(name));
        }
        let inner = self.registry.inner();
        let disk = inner.disk(name)?;
        let none = || {
            not_found!("{name} is not moving").hint(format!("'hob migrate {name} --to HOST:PORT' moves it"))
        };
        let spec = disk.wanted.migration.as_ref().ok_or_else(none)?;
        match spec.record.record() {
            Record::Away { session, .. } => {
                let shared = Shared::new(Side::Source, spec.peer.clone(), spec.cache, session);
                shared.facts().end(MigrationState::Away);
                let view = shared.view(name);
                Ok(Migration { total_ms: 0, ..view })
            }
            _ => Err(none()),
        }
    }

    /// Hands a migrating disk over now, or cancels its migration.
    pub(crate) async fn order(self: &Arc<Self>, name: &str, order: Order) -> Result<Migration> {
        self.registry.inner().disk(name)?;
        let (in_time, answer) = oneshot::channel();
        {
            let handles = self.handles();
            let handle = handles.get(name).filter(|handle| handle.is_under_way());
            match handle.map(|handle| &handle.inputs) {
                Some(Inputs::Source(sender)) => drop(sender.send(source::Input::Order(order, in_time))),
                Some(Inputs::Destination(..)) => {
                    return Err(conflict!("{name} is migrating to this host, and another host owns it")
                        .hint(format!(
                            "run the command on the other host, or cancel the migration with 'hob disk \
                        remove {name}'"
                        )));
                }
                None => return Err(conflict!("{name} is not moving")),
            }
        }
        match answer.await {
            Ok(true) => self.migration(name),
            _ => Err(conflict!(
                "it is too late: {name} was already handed over, or its migration was cancelled"
            )),
        }
    }

    /// Takes a migrated disk back after the operator has confirmed that its new host will never
    /// serve it again.
    pub(crate) async fn take_back(self: &Arc<Self>, name: String, force: bool) -> Result<DiskChanged> {
        let migrations = self.clone();
        self.tasks
            .run("migrate --take-back", name.clone(), async move {
                let spec = migrations.registry.inner().disk(&name)?.wanted.migration.clone();
                let Some((spec, Record::Away { session, .. })) =
                    spec.map(|spec| (spec.clone(), spec.record.record()))
                else {
                    return Err(conflict!("{name} has not migrated to another host"));
                };
                if !force {
                    return Err(conflict!(
                        "{name} belongs to {}: if that host still serves the disk and this host takes \
                    it, both write to it and its data is corrupted",
                        spec.peer
                    )
                    .hint("make sure that the other host never serves the disk again, and pass --force"));
                }
                if let Some(handle) = migrations.handles().remove(&name) {
                    handle.task.abort();
                }
                migrations.give_cache_up(&name, &spec.peer).await?;
                let record = Record::Owner { generation: session.generation + 2, attempts: 0 };
                migrations.keep_record(&name, record).await?;
                migrations.restore_wanted_mode(&name)?;
                tracing::warn!(
                    "disk {name}: taken back by command; host {} must not serve the disk any more",
                    spec.peer
                );
                if let Ok(disk) = migrations.registry.inner().disk_mut(&name) {
                    disk.phase = DiskPhase::Offline("the disk was taken back".to_owned());
                    disk.busy = None;
                }
                migrations.registry.save().await?;
                migrations.disks.bring_online(&name).await;
                let note =
                    format!("{} must never serve the disk again: its data is not {name} any more", spec.peer);
                migrations.observe.disk_changed(&name, vec![note])
            })
            .await
    }

    /// Removes a disk that is not on this host: deletes the tombstone of a migrated disk, or
    /// cancels the migration of an incoming disk. Returns `None` for any other disk.
    pub(in super::super) async fn remove_absent_disk(
        self: &Arc<Self>,
        name: &str,
    ) -> Result<Option<DiskChanged>> {
        let record = {
            let inner = self.registry.inner();
            inner.disk(name)?.wanted.migration.as_ref().map(|spec| spec.record)
        };
        match record {
            Some(RecordSpec::Awaiting { .. }) => {
                if let Some(Handle { inputs: Inputs::Destination(sender, ..), .. }) = self.handles().get(name)
                {
                    let _ = sender.send(destination::Input::GiveUp);
                }
                let note = "the source keeps the disk".to_owned();
                Ok(Some(DiskChanged { disk: None, notes: vec![note] }))
            }
            Some(RecordSpec::Away { taken: true, .. }) => {
                let is_serving = self.is_migrating(name);
                if is_serving {
                    return Err(conflict!(
                        "{name} has moved, and its new owner still reads its cache on this host"
                    )
                    .hint("hob removes the disk here when the new owner needs no more data"));
                }
                self.handles().remove(name);
                self.registry.inner().disks.remove(name);
                self.registry.save().await?;
                self.exports.forget_bitmaps(name).await;
                Ok(Some(DiskChanged { disk: None, notes: Vec::new() }))
            }
            Some(RecordSpec::Away { taken: false, .. }) => Err(conflict!(
                "{name} was handed over, and its new owner has not confirmed that yet: if this \
                record were removed, the disk would have no owner"
            )),
            _ => Ok(None),
        }
    }

    /// Removes the result of a disk's last migration from the API view of the disk.
    pub(in super::super) fn forget(&self, name: &str) {
        let mut handles = self.handles();
        if handles.get(name).is_some_and(|handle| !handle.is_under_way()) {
            handles.remove(name);
        }
    }
}

impl DiskDetail for Migrations {
    fn add_to(&self, disk: &mut Disk) {
        let is_over = |state| matches!(state, MigrationState::Over | MigrationState::Kept);
        disk.migration = self
            .migration(&disk.name)
            .ok()
            .filter(|migration| !is_over(migration.state) || matches!(disk.state, DiskState::Away));
        let awaits = disk.migration.as_ref().is_some_and(|migration| {
            matches!(migration.state, MigrationState::Awaiting | MigrationState::Preparing)
                && migration.side == Side::Destination
        });
        if awaits && matches!(disk.state, DiskState::Online | DiskState::Away) {
            disk.state = DiskState::Awaited;
            disk.reason = None;
        }
        let has_left = disk.migration.as_ref().filter(|migration| {
            matches!(migration.state, MigrationState::HandingOver | MigrationState::Serving)
        });
        // The disk may still be open, but it is not served to guests any more.
        if let Some(migration) = has_left
            && matches!(disk.state, DiskState::Online | DiskState::Away)
        {
            disk.reason = Some(departed(&migration.peer, migration.state == MigrationState::Serving));
            disk.state = DiskState::Away;
        }
    }
}

impl Leaving {
    /// Checks that the destination host answers and accepts calls of this host, the source.
    async fn meet(&self, session: Session) -> Result<()> {
        let path = call_path(&self.name, "look", &self.session(session), "");
        let _asking = Asking::start(&self.migrations, &self.lineage);
        let answer = self
            .peer()
            .call(&path, Vec::new(), LOOK_MAX)
            .await
            .map_err(|error| failed!("{} cannot take {}: {error}", self.plan.to, self.name))?;
        match answer.refused {
            None | Some(CallRefusal::NotAwaited | CallRefusal::Failed { .. }) => Ok(()),
            Some(CallRefusal::Owner { .. }) => {
                Err(conflict!("{} has a disk {} already", self.plan.to, self.name))
            }
            Some(CallRefusal::Never { why }) => {
                Err(conflict!("{} cannot take {}: {why}", self.plan.to, self.name))
            }
        }
    }
}

/// The time in which this host asks a destination about a disk. If the destination is this host
/// itself, it recognizes the disk's lineage.
struct Asking<'a> {
    migrations: &'a Migrations,
    lineage: &'a str,
}

impl<'a> Asking<'a> {
    fn start(migrations: &'a Migrations, lineage: &'a str) -> Asking<'a> {
        migrations.asking().insert(lineage.to_owned());
        Asking { migrations, lineage }
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.migrations.asking().remove(self.lineage);
    }
}

/// Returns why this host does not serve a disk that it has handed over to `peer`.
pub(super) fn departed(peer: &str, is_confirmed: bool) -> String {
    match is_confirmed {
        true => format!("the disk is on {peer}"),
        false => format!(
            "handed over to {peer}, which has not confirmed it yet; no host serves the disk until then"
        ),
    }
}

/// Refuses a bandwidth limit with which a part of the cached data takes longer than a second. The
/// hand-over and other calls wait for the parts that are being copied, and their time is limited.
pub(in crate::services) fn check_bandwidth(bandwidth: Option<Size>) -> Result<()> {
    match bandwidth {
        Some(bandwidth) if bandwidth.bytes() < BANDWIDTH_MIN => Err(ApiError::invalid(
            "the bandwidth must be at least 512K a second, because hob copies cached data in parts of 512 KiB",
        )),
        _ => Ok(()),
    }
}

/// Returns the session in which the owner of a disk with this record next tries to migrate the
/// disk.
pub(super) fn next_session(record: Record) -> Session {
    match record {
        Record::Owner { generation, attempts } => Session { generation, attempt: attempts + 1 },
        Record::Leaving(Session { generation, attempt }) => Session { generation, attempt: attempt + 1 },
        Record::Away { session, .. } | Record::Awaiting(session) | Record::Gone(session) => session,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bandwidth_that_is_too_small_for_one_pull_a_second_is_refused() {
        assert!(check_bandwidth(None).is_ok() && check_bandwidth(Some(Size(512 << 10))).is_ok());
        let error = check_bandwidth(Some(Size((512 << 10) - 1))).unwrap_err().to_string();
        assert!(error.contains("at least 512K"), "{error}");
    }
}
