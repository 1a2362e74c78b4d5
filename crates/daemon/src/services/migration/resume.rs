//! Continuation of migrations after a restart, from their records.

use std::sync::Arc;
use std::time::Duration;

use hob_control::Side;
use hob_engine::command::Mode;
use hob_engine::migration::{Record, Source};

use super::super::registry::{DiskPhase, MIGRATING};
use super::Migrations;
use super::orders::{self, departed};
use super::status::Shared;
use crate::api_error::Result;
use crate::background::spawn;
use crate::state::DiskState;

/// Pause between two attempts to continue a migration whose disk is not online yet.
const RETRY_EVERY: Duration = Duration::from_secs(1);

impl Migrations {
    /// Adds a disk from the state file to the registry. Returns true if this host must open the
    /// disk, and false if another host owns the disk.
    pub(in super::super) fn enter_kept(self: &Arc<Self>, mut disk: DiskState) -> Result<bool> {
        let name = disk.name.clone();
        let Some(spec) = disk.migration.as_mut() else {
            self.disks.enter(disk, None)?;
            return Ok(true);
        };
        let why = match spec.record.record() {
            Record::Owner { .. } => {
                // Restores the cache mode that a migration had changed. Recovery uses the stricter
                // mode.
                if let (Some(due), Some(cache)) = (spec.mode_due.take(), disk.cache.as_mut())
                    && let Ok(mode) = due.parse::<Mode>()
                {
                    cache.mode = mode;
                }
                None
            }
            Record::Leaving(_) | Record::Gone(_) => None,
            Record::Away { taken, .. } => Some(departed(&spec.peer, taken)),
            Record::Awaiting(_) => Some("the disk has not arrived yet".to_owned()),
        };
        self.disks.enter(disk, None)?;
        let is_here = why.is_none();
        if let Some(why) = why {
            self.show_away(&name, why);
        }
        Ok(is_here)
    }

    /// Continues the migrations that were in progress.
    pub(in super::super) fn resume(self: &Arc<Self>) {
        let known: Vec<(String, Record)> = {
            let inner = self.registry.inner();
            let moved = inner.disks.values().filter_map(|disk| {
                Some((disk.wanted.name.clone(), disk.wanted.migration.as_ref()?.record.record()))
            });
            moved.collect()
        };
        for (name, record) in known {
            let migrations = self.clone();
            match record {
                Record::Leaving(_) => drop(spawn(migrations.leave_again(name))),
                Record::Away { taken, .. } => drop(spawn(migrations.stay_away(name, taken))),
                Record::Awaiting(_) => self.await_again(&name, record),
                Record::Owner { .. } | Record::Gone(_) => {}
            }
        }
    }

    fn await_again(self: &Arc<Self>, name: &str, record: Record) {
        let Record::Awaiting(session) = record else { return };
        let Some(spec) = self.registry.inner().disk(name).ok().and_then(|disk| disk.wanted.migration.clone())
        else {
            return;
        };
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            disk.busy = Some(MIGRATING);
        }
        tracing::info!("disk {name}: waiting for its migration from {}", spec.peer);
        let shared = Shared::new(Side::Destination, spec.peer, spec.cache, session);
        if let Err(error) = self.run_destination(name, &spec.lineage, Some(record), shared) {
            tracing::info!("disk {name}: its migration is not continued now: {error}");
        }
    }

    /// Starts the next attempt to migrate a disk, when the disk is online.
    async fn leave_again(self: Arc<Self>, name: String) {
        loop {
            let Ok(Some(spec)) = self.registry.inner().disk(&name).map(|disk| disk.wanted.migration.clone())
            else {
                return;
            };
            let (Record::Leaving(_), Some(plan)) = (spec.record.record(), spec.plan.clone()) else { return };
            let is_there = self.registry.inner().disk(&name).is_ok_and(|disk| disk.shard().is_ok());
            if is_there && let Ok(guard) = self.registry.guard_disk(&name, MIGRATING) {
                let session = orders::next_session(spec.record.record());
                match self.leaving(&name, spec.lineage, plan, session) {
                    Ok(leaving) => return self.begin_attempt(leaving, session, Some(guard)),
                    Err(error) => tracing::error!(
                        "disk {name}: cannot continue its migration to {}: {error}",
                        spec.peer
                    ),
                }
            }
            tokio::time::sleep(RETRY_EVERY).await;
        }
    }

    /// Continues a migration whose disk was handed over: notifies the new host until it confirms.
    async fn stay_away(self: Arc<Self>, name: String, taken: bool) {
        let Ok(Some(spec)) = self.registry.inner().disk(&name).map(|disk| disk.wanted.migration.clone())
        else {
            return;
        };
        if let Err(error) = self.bury(&name, departed(&spec.peer, taken)).await {
            tracing::warn!("{name}: {error}");
        }
        let Record::Away { session, .. } = spec.record.record() else { return };
        if taken {
            return;
        }
        // The daemon that handed the disk over may have ended before this step.
        self.ownership.give_back_departed(&name);
        loop {
            let Some(plan) = spec.plan.clone() else { return };
            match self.leaving(&name, spec.lineage.clone(), plan, session) {
                Ok(leaving) => return self.run_source(leaving, Source::resume_away(session), None),
                Err(error) => {
                    tracing::error!(
                        "disk {name}: handed over to {}, but that host could not be notified: {error}",
                        spec.peer
                    )
                }
            }
            tokio::time::sleep(RETRY_EVERY).await;
        }
    }

    /// Restores the cache mode from before the migration, in memory only.
    pub(super) fn restore_wanted_mode(&self, name: &str) -> Result<()> {
        let mut inner = self.registry.inner();
        let wanted = &mut inner.disk_mut(name)?.wanted;
        let due = wanted.migration.as_mut().and_then(|spec| spec.mode_due.take());
        if let (Some(cache), Some(Ok(mode))) = (wanted.cache.as_mut(), due.map(|due| due.parse::<Mode>())) {
            cache.mode = mode;
        }
        Ok(())
    }

    /// Returns the number of bytes of data for which a disk's cache has space.
    pub(super) fn cache_room(&self, name: &str) -> u64 {
        let inner = self.registry.inner();
        let Ok(disk) = inner.disk(name) else { return 0 };
        let segment_bytes =
            disk.cache().and_then(|spec| inner.pool(&spec.pool).ok()).map_or(0, |pool| pool.segment_bytes);
        disk.held.len() as u64 * segment_bytes
    }

    /// Marks an incoming disk as migrating, and returns its operation guard.
    pub(super) fn guard_awaited(self: &Arc<Self>, name: &str) -> super::super::registry::OperationGuard {
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            disk.busy = Some(MIGRATING);
            if matches!(disk.phase, DiskPhase::Offline(_)) {
                disk.phase = DiskPhase::Away("the disk has not arrived yet".to_owned());
            }
        }
        self.registry.guard_new_disk(name)
    }
}
