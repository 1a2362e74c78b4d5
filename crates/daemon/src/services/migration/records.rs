//! Migration records in the state file: which host owns a disk.
//!
//! A record is in memory before it is saved. So a concurrent save of other settings may already
//! write the record to the state file. After a failed save, the state file may have the record or
//! not. The state machines handle both cases.

use std::sync::Arc;

use hob_engine::migration::{Record, Session};

use super::super::registry::DiskPhase;
use super::Migrations;
use crate::api_error::{ApiError, Result};
use crate::state::{CacheOwner, GoneState, MigrationSpec, RecordSpec};

/// Maximum number of recorded disks whose migration to this host was cancelled.
const GONE_MAX: usize = 4096;

impl Migrations {
    pub(super) fn lineage_of(&self, name: &str) -> Option<String> {
        let inner = self.registry.inner();
        inner.disk(name).ok()?.wanted.migration.as_ref().map(|spec| spec.lineage.clone())
    }

    /// Changes the migration settings of a disk and saves the settings.
    pub(super) async fn keep_spec(
        self: &Arc<Self>,
        name: &str,
        change: impl FnOnce(&mut MigrationSpec),
    ) -> Result<()> {
        if let Some(spec) = self.registry.inner().disk_mut(name)?.wanted.migration.as_mut() {
            change(spec);
        }
        self.registry.save_first().await
    }

    /// Saves a migration record of a disk. Returns an error for [`Record::Gone`], which
    /// [`keep_gone`](Self::keep_gone) saves.
    pub(super) async fn keep_record(self: &Arc<Self>, name: &str, record: Record) -> Result<()> {
        let record = RecordSpec::of(record)
            .ok_or_else(|| ApiError::failed("internal error: this migration record cannot be saved"))?;
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            if let Some(spec) = disk.wanted.migration.as_mut() {
                spec.record = record;
            }
            if matches!(record, RecordSpec::Owner { .. }) {
                // The disk has arrived, so its earlier configuration for the cluster is obsolete.
                inner.waited.remove(name);
            }
        }
        self.registry.save_first().await
    }

    /// Saves that an incoming disk did not arrive, and removes its entry.
    pub(super) async fn keep_gone(
        self: &Arc<Self>,
        name: &str,
        lineage: &str,
        session: Session,
    ) -> Result<()> {
        {
            let mut inner = self.registry.inner();
            let is_it = |spec: &MigrationSpec| spec.lineage == lineage;
            if inner.disk(name).is_ok_and(|disk| disk.wanted.migration.as_ref().is_some_and(is_it)) {
                inner.disks.remove(name);
            }
            inner.gone.retain(|gone| gone.name != name);
            if inner.gone.len() >= GONE_MAX {
                inner.gone.remove(0);
            }
            let Session { generation, attempt } = session;
            inner.gone.push(GoneState {
                name: name.to_owned(),
                lineage: lineage.to_owned(),
                generation,
                attempt,
            });
        }
        self.wait_for_cluster_again(name);
        self.registry.save_first().await?;
        if self.registry.inner().disk(name).is_err() {
            self.exports.forget_bitmaps(name).await;
        }
        Ok(())
    }

    /// Returns the migration settings with which a disk leaves this host: the recorded settings, or
    /// new settings with a random lineage if none are recorded.
    ///
    /// # Errors
    /// Returns an error if this host has no disk of this name.
    pub(super) fn spec_to_leave(&self, name: &str) -> Result<MigrationSpec> {
        let inner = self.registry.inner();
        let known = inner.disk(name)?.wanted.migration.clone();
        Ok(known.unwrap_or_else(|| MigrationSpec {
            lineage: CacheOwner::random().to_string(),
            record: RecordSpec::Owner { generation: 0, attempts: 0 },
            peer: String::new(),
            cache: hob_control::CarryMode::default(),
            mode_due: None,
            plan: None,
        }))
    }

    /// Marks a disk as owned by another host.
    pub(super) fn show_away(&self, name: &str, why: String) {
        if let Ok(disk) = self.registry.inner().disk_mut(name) {
            disk.phase = DiskPhase::Away(why);
        }
    }
}
