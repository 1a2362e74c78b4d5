//! One change at a time: a claim on a disk or a pool, given back when dropped.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::drain::{DRAINING, SHRINKING};
use super::migration::MIGRATING;
use super::refusal::Refusal;
use super::{Life, Manager, away};

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
pub(super) struct Claim {
    manager: Arc<Manager>,
    on: Thing,
}

#[derive(Debug)]
enum Thing {
    Disk(String),
    Pool(String),
}

impl Manager {
    /// Claims a disk, which exists. `doing` completes "it is being …".
    pub(super) fn claim_disk(self: &Arc<Self>, name: &str, doing: &'static str) -> Result<Claim, Refusal> {
        let mut inner = self.inner();
        inner.check_stays()?;
        let disk = inner.disk_mut(name)?;
        take(&mut disk.busy, name, doing)?;
        if let Life::Away(why) = &disk.life {
            disk.busy = None;
            return Err(away(name, why));
        }
        Ok(Claim { manager: self.clone(), on: Thing::Disk(name.to_owned()) })
    }

    /// Claims a disk for a command. Work that hob began by itself delays the command, and makes it fail only after
    /// [`OWN_WORK_MAX`].
    pub(super) async fn claim_disk_for_command(
        self: &Arc<Self>,
        name: &str,
        doing: &'static str,
    ) -> Result<Claim, Refusal> {
        let end = Instant::now() + OWN_WORK_MAX;
        while self.inner().disk(name)?.busy.is_some_and(is_own_work) && Instant::now() < end {
            tokio::time::sleep(CHECK_EVERY).await;
        }
        self.claim_disk(name, doing)
    }

    /// Claims a pool, which exists.
    pub(super) fn claim_pool(self: &Arc<Self>, name: &str, doing: &'static str) -> Result<Claim, Refusal> {
        let mut inner = self.inner();
        inner.check_stays()?;
        take(&mut inner.pool_mut(name)?.busy, name, doing)?;
        Ok(Claim { manager: self.clone(), on: Thing::Pool(name.to_owned()) })
    }

    /// The claim on a disk whose entry was made with `busy` set.
    pub(super) fn claim_new_disk(self: &Arc<Self>, name: &str) -> Claim {
        Claim { manager: self.clone(), on: Thing::Disk(name.to_owned()) }
    }
}

fn is_own_work(doing: &str) -> bool {
    [SPREADING, COPYING, ENLARGING].contains(&doing)
}

fn take(busy: &mut Option<&'static str>, name: &str, doing: &'static str) -> Result<(), Refusal> {
    if *busy == Some(DRAINING) {
        return Err(Refusal::conflict(format!("{name} is being drained"))
            .hint(format!("wait for its end, or stop it with 'hob drain {name} --stop'")));
    }
    if *busy == Some(SHRINKING) {
        return Err(Refusal::conflict(format!("the cache of {name} is getting smaller"))
            .hint(format!("wait for its end, or stop it with 'hob drain {name} --stop'")));
    }
    if *busy == Some(MIGRATING) {
        return Err(Refusal::conflict(format!("{name} is moving between hosts")).hint(format!(
            "'hob migrate {name}' shows how far it is, 'hob migrate {name} --cancel' keeps it where it is"
        )));
    }
    if let Some(other) = busy {
        return Err(Refusal::conflict(format!("{name} is being {other}")).hint("try again when that is done"));
    }
    *busy = Some(doing);
    Ok(())
}

impl Drop for Claim {
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
