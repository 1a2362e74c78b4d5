//! Operation guards: at most one change of a disk or a pool at a time. Dropping a guard allows the
//! next change. A change of a disk's shares, limits and reservation has a guard of its own, because
//! it does not affect the other changes.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{DiskEntry, DiskPhase, Registry, away};
use crate::api_error::{Result, conflict};

/// Name of the drain operation. All these names complete the phrase "is being …".
pub(in crate::services) const DRAINING: &str = "drained";

/// Name of the operation that shrinks a cache, which writes dirty data to the backing first.
pub(in crate::services) const SHRINKING: &str = "shrunk";

/// Name of the migration operation.
pub(in crate::services) const MIGRATING: &str = "migrated";

/// Name of the operation that moves a disk without clients to another host.
pub(in crate::services) const MOVING: &str = "moved to another host";

/// Name of the operation that adds a disk, until the disk is online for the first time.
pub(in crate::services) const ADDING: &str = "added";

/// Name of the operation that moves segments of a cache to a second device, for replicas. The
/// daemon begins this operation, `COPYING`, `ENLARGING` and `REPARTITIONING` without a command.
pub(in crate::services) const SPREADING: &str = "spread over devices";
pub(in crate::services) const COPYING: &str = "given a second copy";
pub(in crate::services) const ENLARGING: &str = "given more room";
pub(in crate::services) const REPARTITIONING: &str = "given its part of the shared flash";

/// Name of the operation that releases outdated segments on a device that was missing, or
/// invalidates the cache of a disk that another host has taken over. This operation runs without a
/// command.
pub(in crate::services) const CLEARING: &str = "cleared of outdated segments";

/// Name of the operation that opens an offline disk, or a pool and its missing devices. On a pool,
/// this operation and `LENDING_AGAIN` run without a command.
pub(in crate::services) const OPENING: &str = "opened";
pub(in crate::services) const LENDING_AGAIN: &str = "given a peer's device again";

/// Maximum time that a command waits for the daemon's own work on a disk or a pool.
const OWN_WORK_MAX: Duration = Duration::from_secs(10);

/// Maximum time that a command on a disk that clients already use waits for the recovery of the
/// disk's cache. The recovery of a large cache takes longer, and the command is then refused.
const RECOVERY_WAIT_MAX: Duration = Duration::from_secs(2);

/// Maximum time that a change of a disk's shares, limits and reservation waits for another such
/// change of the disk. A change takes milliseconds, unless a shard or the state directory is slow.
const QOS_WAIT_MAX: Duration = Duration::from_secs(5);

/// Interval between two checks whether the daemon's own work, or another change, has ended.
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// Pause between two attempts to take a guard for an operation that cannot be refused.
pub(in crate::services) const GUARD_EVERY: Duration = Duration::from_millis(200);

/// Maximum number of attempts to take a guard for an operation that cannot be refused.
const GUARD_TRIES: u32 = 20;

/// The exclusive right to change one disk, one pool, or the shares and limits of one disk.
#[derive(Debug)]
pub(in crate::services) struct OperationGuard {
    registry: Arc<Registry>,
    on: Thing,
}

#[derive(Debug)]
enum Thing {
    Disk(String),
    Pool(String),
    Qos(String),
}

impl Registry {
    /// Takes the operation guard of an existing disk. `doing` completes "it is being …".
    pub(in crate::services) fn guard_disk(
        self: &Arc<Self>,
        name: &str,
        doing: &'static str,
    ) -> Result<OperationGuard> {
        let mut inner = self.inner();
        inner.check_stays()?;
        let disk = inner.disk_mut(name)?;
        let waits = disk.watch.waiting_reason().filter(|_| disk.busy != Some(DRAINING));
        if let (Some(busy), Some(why)) = (disk.busy, waits) {
            return Err(conflict!("{name} is being {busy}, which waits: {why}")
                .hint(format!("stop that change with 'hob drain {name} --stop'")));
        }
        take(&mut disk.busy, name, doing)?;
        if let DiskPhase::Away(why) = &disk.phase {
            disk.busy = None;
            return Err(away(name, why));
        }
        Ok(OperationGuard { registry: self.clone(), on: Thing::Disk(name.to_owned()) })
    }

    /// Takes the operation guard of a disk for a command. Before that, the command waits for the
    /// end of the daemon's own work, at most [`OWN_WORK_MAX`], or of a recovery, at most
    /// [`RECOVERY_WAIT_MAX`]. If the work continues after this time, the command is refused.
    pub(in crate::services) async fn guard_disk_for_command(
        self: &Arc<Self>,
        name: &str,
        doing: &'static str,
    ) -> Result<OperationGuard> {
        self.wait_for_own_work(name).await?;
        self.guard_disk(name, doing)
    }

    /// Waits for the end of the daemon's own work on a disk, at most as long as a command waits for
    /// this work.
    pub(in crate::services) async fn wait_for_own_work(&self, name: &str) -> Result<()> {
        let begin = Instant::now();
        while wait_max(self.inner().disk(name)?).is_some_and(|most| begin.elapsed() < most) {
            tokio::time::sleep(CHECK_EVERY).await;
        }
        Ok(())
    }

    /// Takes the operation guard of a disk. Waits briefly for the end of the operation in progress,
    /// if there is one.
    pub(in crate::services) async fn guard_patiently(
        self: &Arc<Self>,
        name: &str,
        doing: &'static str,
    ) -> Option<OperationGuard> {
        for _ in 0..GUARD_TRIES {
            match self.guard_disk(name, doing) {
                Ok(guard) => return Some(guard),
                Err(_) => tokio::time::sleep(GUARD_EVERY).await,
            }
        }
        None
    }

    /// Takes the guard of a disk's shares, limits and reservation. A drain or another change of the
    /// disk does not exclude it; [`check_qos_change`](DiskEntry::check_qos_change) has the
    /// exceptions.
    pub(in crate::services) fn guard_qos(self: &Arc<Self>, name: &str) -> Result<OperationGuard> {
        let mut inner = self.inner();
        inner.check_stays()?;
        let disk = inner.disk_mut(name)?;
        disk.check_qos_change()?;
        if disk.changes_qos {
            return Err(conflict!("{name} is being given other shares").hint("try again when that is done"));
        }
        disk.changes_qos = true;
        Ok(OperationGuard { registry: self.clone(), on: Thing::Qos(name.to_owned()) })
    }

    /// Takes the guard of [`guard_qos`](Self::guard_qos) for a command. Before that, the command
    /// waits for the end of another such change, at most [`QOS_WAIT_MAX`].
    pub(in crate::services) async fn guard_qos_for_command(
        self: &Arc<Self>,
        name: &str,
    ) -> Result<OperationGuard> {
        let end = Instant::now() + QOS_WAIT_MAX;
        while self.inner().disk(name)?.changes_qos && Instant::now() < end {
            tokio::time::sleep(CHECK_EVERY).await;
        }
        self.guard_qos(name)
    }

    /// Takes the operation guard of an existing pool.
    pub(in crate::services) fn guard_pool(
        self: &Arc<Self>,
        name: &str,
        doing: &'static str,
    ) -> Result<OperationGuard> {
        let mut inner = self.inner();
        inner.check_stays()?;
        take(&mut inner.pool_mut(name)?.busy, name, doing)?;
        Ok(OperationGuard { registry: self.clone(), on: Thing::Pool(name.to_owned()) })
    }

    /// Takes the operation guard of a pool for a command. Before that, the command waits for the
    /// end of the daemon's own work on the pool, at most [`OWN_WORK_MAX`]. If the work continues
    /// after this time, the command is refused.
    pub(in crate::services) async fn guard_pool_for_command(
        self: &Arc<Self>,
        name: &str,
        doing: &'static str,
    ) -> Result<OperationGuard> {
        let end = Instant::now() + OWN_WORK_MAX;
        while self.inner().pool(name)?.busy.is_some_and(is_own_work_on_pool) && Instant::now() < end {
            tokio::time::sleep(CHECK_EVERY).await;
        }
        self.guard_pool(name, doing)
    }

    /// Returns the operation guard of a disk whose entry was created with `busy` set.
    pub(in crate::services) fn guard_new_disk(self: &Arc<Self>, name: &str) -> OperationGuard {
        OperationGuard { registry: self.clone(), on: Thing::Disk(name.to_owned()) }
    }
}

impl DiskEntry {
    /// Refuses a change of the disk's shares, limits and reservation if the change would be lost:
    /// the disk is being added or removed, or another host has the disk or already has its
    /// settings.
    pub(in crate::services) fn check_qos_change(&self) -> Result<()> {
        let name = &self.wanted.name;
        if let Some(busy @ (ADDING | MIGRATING | MOVING)) = self.busy {
            return take(&mut Some(busy), name, busy);
        }
        match &self.phase {
            DiskPhase::Online(_) | DiskPhase::Offline(_) => Ok(()),
            DiskPhase::Away(why) => Err(away(name, why)),
            DiskPhase::Removing => Err(conflict!("{name} is being removed")),
        }
    }
}

/// Returns true for operations on disks that the daemon begins by itself.
pub(in crate::services) fn is_own_work(doing: &str) -> bool {
    [SPREADING, COPYING, ENLARGING, REPARTITIONING, CLEARING].contains(&doing)
}

/// Returns how long a command waits for the operation in progress on a disk. While a disk is being
/// opened and is online already, its cache is being recovered.
fn wait_max(disk: &DiskEntry) -> Option<Duration> {
    let is_offline = matches!(disk.phase, DiskPhase::Offline(_));
    match disk.busy? {
        OPENING if !is_offline => Some(RECOVERY_WAIT_MAX),
        busy => is_own_work(busy).then_some(OWN_WORK_MAX),
    }
}

/// Returns true for operations on pools that the daemon begins by itself.
fn is_own_work_on_pool(doing: &str) -> bool {
    [OPENING, LENDING_AGAIN].contains(&doing)
}

fn take(busy: &mut Option<&'static str>, name: &str, doing: &'static str) -> Result<()> {
    if *busy == Some(DRAINING) {
        return Err(conflict!("{name} is being drained")
            .hint(format!("wait for its end, or stop it with 'hob drain {name} --stop'")));
    }
    if *busy == Some(SHRINKING) {
        return Err(conflict!("the cache of {name} is getting smaller")
            .hint(format!("wait for its end, or stop it with 'hob drain {name} --stop'")));
    }
    if *busy == Some(MIGRATING) {
        return Err(conflict!("{name} is being migrated").hint(format!(
            "'hob migrate {name}' shows the progress, 'hob migrate {name} --cancel' cancels the migration"
        )));
    }
    if let Some(other) = busy {
        return Err(conflict!("{name} is being {other}").hint("try again when that is done"));
    }
    *busy = Some(doing);
    Ok(())
}

impl Drop for OperationGuard {
    fn drop(&mut self) {
        let mut inner = self.registry.inner();
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
            Thing::Qos(name) => {
                if let Some(disk) = inner.disks.get_mut(name) {
                    disk.changes_qos = false;
                }
            }
        }
    }
}
