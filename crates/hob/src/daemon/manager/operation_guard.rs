//! One change at a time: a guard of a disk or a pool, given back when dropped.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::api_error::ApiError;
use super::drain::{DRAINING, SHRINKING};
use super::migration::MIGRATING;
use super::{DiskPhase, Manager, away};

/// What hob does to a disk by itself: its caches are balanced and enlarged without a command.
pub(super) const SPREADING: &str = "spread over devices";
pub(super) const COPYING: &str = "given a second copy";
pub(super) const ENLARGING: &str = "given more room";

/// Longest wait of a command for hob's own work on the disk.
const OWN_WORK_MAX: Duration = Duration::from_secs(10);

/// Interval between two checks whether that work has ended.
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// The right to change one disk or one pool.
#[derive(Debug)]
pub(super) struct OperationGuard {
    manager: Arc<Manager>,
    on: Thing,
}

#[derive(Debug)]
enum Thing {
    Disk(String),
    Pool(String),
}

impl Manager {
    /// Takes the operation guard of a disk, which exists. `doing` completes "it is being …".
    pub(super) fn guard_disk(
        self: &Arc<Self>,
        name: &str,
        doing: &'static str,
    ) -> Result<OperationGuard, ApiError> {
        let mut inner = self.inner();
        inner.check_stays()?;
        let disk = inner.disk_mut(name)?;
        take(&mut disk.busy, name, doing)?;
        if let DiskPhase::Away(why) = &disk.phase {
            disk.busy = None;
            return Err(away(name, why));
        }
        Ok(OperationGuard { manager: self.clone(), on: Thing::Disk(name.to_owned()) })
    }

    /// Takes the operation guard of a disk for a command. Work that hob began by itself delays the command, and makes it fail only after
    /// [`OWN_WORK_MAX`].
    pub(super) async fn guard_disk_for_command(
        self: &Arc<Self>,
        name: &str,
        doing: &'static str,
    ) -> Result<OperationGuard, ApiError> {
        let end = Instant::now() + OWN_WORK_MAX;
        while self.inner().disk(name)?.busy.is_some_and(is_own_work) && Instant::now() < end {
            tokio::time::sleep(CHECK_EVERY).await;
        }
        self.guard_disk(name, doing)
    }

    /// Takes the operation guard of a pool, which exists.
    pub(super) fn guard_pool(
        self: &Arc<Self>,
        name: &str,
        doing: &'static str,
    ) -> Result<OperationGuard, ApiError> {
        let mut inner = self.inner();
        inner.check_stays()?;
        take(&mut inner.pool_mut(name)?.busy, name, doing)?;
        Ok(OperationGuard { manager: self.clone(), on: Thing::Pool(name.to_owned()) })
    }

    /// The operation guard of a disk whose entry was made with `busy` set.
    pub(super) fn guard_new_disk(self: &Arc<Self>, name: &str) -> OperationGuard {
        OperationGuard { manager: self.clone(), on: Thing::Disk(name.to_owned()) }
    }
}

fn is_own_work(doing: &str) -> bool {
    [SPREADING, COPYING, ENLARGING].contains(&doing)
}

fn take(busy: &mut Option<&'static str>, name: &str, doing: &'static str) -> Result<(), ApiError> {
    if *busy == Some(DRAINING) {
        return Err(ApiError::conflict(format!("{name} is being drained"))
            .hint(format!("wait for its end, or stop it with 'hob drain {name} --stop'")));
    }
    if *busy == Some(SHRINKING) {
        return Err(ApiError::conflict(format!("the cache of {name} is getting smaller"))
            .hint(format!("wait for its end, or stop it with 'hob drain {name} --stop'")));
    }
    if *busy == Some(MIGRATING) {
        return Err(ApiError::conflict(format!("{name} is moving between hosts")).hint(format!(
            "'hob migrate {name}' shows how far it is, 'hob migrate {name} --cancel' keeps it where it is"
        )));
    }
    if let Some(other) = busy {
        return Err(
            ApiError::conflict(format!("{name} is being {other}")).hint("try again when that is done")
        );
    }
    *busy = Some(doing);
    Ok(())
}

impl Drop for OperationGuard {
    fn drop(&mut self) {
        let mut inner = self.manager.inner();
        match &self.on {
            Thing::Disk(name) => {
                if let Some(disk) = inner.disks.get_mut(name) {
                    disk.busy = None;
                }
            }
            Thing::Pool(name) => {
                if let Some(pool) = inner.pools.get_mut(name) {
                    pool.busy = None;
                }
            }
        }
    }
}
