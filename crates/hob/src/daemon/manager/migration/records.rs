//! Whose a disk is, in the state file.
//!
//! A record is in memory before it is on media, and other changes may bring it there: so whoever was told that it could not be kept
//! must count with both, as the machines do.

use std::sync::Arc;

use hob_engine::migration::{Record, Session};

use super::super::api_error::ApiError;
use super::super::{DiskPhase, Manager};
use crate::daemon::state::{CacheOwner, GoneState, MigrationSpec, RecordSpec};

/// Disks of which it is remembered that they did not come.
const GONE_MAX: usize = 4096;

impl Manager {
    /// Which disk of that name it is, as far as that was ever said.
    pub(super) fn lineage_of(&self, name: &str) -> Option<String> {
        let inner = self.inner();
        inner.disk(name).ok()?.wanted.migration.as_ref().map(|spec| spec.lineage.clone())
    }

    /// Changes what is kept of a disk's migrations, and keeps it.
    pub(super) async fn keep_spec(
        self: &Arc<Self>,
        name: &str,
        change: impl FnOnce(&mut MigrationSpec),
    ) -> Result<(), ApiError> {
        if let Some(spec) = self.inner().disk_mut(name)?.wanted.migration.as_mut() {
            change(spec);
        }
        self.save_first().await
    }

    /// Keeps a record. Not for [`Record::Gone`].
    pub(super) async fn keep_record(self: &Arc<Self>, name: &str, record: Record) -> Result<(), ApiError> {
        let record = RecordSpec::of(record).ok_or_else(|| ApiError::failed("that is kept elsewhere"))?;
        {
            let mut inner = self.inner();
            let disk = inner.disk_mut(name)?;
            if let Some(spec) = disk.wanted.migration.as_mut() {
                spec.record = record;
            }
            if matches!(record, RecordSpec::Owner { .. }) {
                // It came: what it would have been otherwise is of no use any more.
                inner.waited.remove(name);
            }
        }
        self.save_first().await
    }

    /// Keeps that an awaited disk did not come; its entry goes, if it has not gone before.
    pub(super) async fn keep_gone(
        self: &Arc<Self>,
        name: &str,
        lineage: &str,
        session: Session,
    ) -> Result<(), ApiError> {
        {
            let mut inner = self.inner();
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
        self.save_first().await?;
        if self.inner().disk(name).is_err() {
            self.exports.forget_bitmaps(name).await;
        }
        Ok(())
    }

    /// What a disk that is here is called in migrations from now on.
    pub(super) fn spec_to_leave(&self, name: &str) -> Result<MigrationSpec, ApiError> {
        let inner = self.inner();
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

    /// Shows a disk as one that another host has.
    pub(super) fn show_away(&self, name: &str, why: String) {
        if let Ok(disk) = self.inner().disk_mut(name) {
            disk.phase = DiskPhase::Away(why);
        }
    }
}
