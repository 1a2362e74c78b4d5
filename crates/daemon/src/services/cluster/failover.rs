//! Failover of a disk whose owner has failed and whose replica is on this host
//! (docs/decisions/0023). The replica's dirty data is written to the backing, and then this host
//! owns the disk.
//!
//! | step | effect of an interruption after it |
//! |---|---|
//! | acquire the ownership lock; do not change the ownership record | the former owner has the disk as before when it restarts |
//! | end the flash lease, so that the former owner can no longer write to the replica | as after the previous step |
//! | read the journal, verify the checksum of each dirty sector, open the backing | as after the previous step |
//! | write the ownership record: from now on only the replica is valid | this host restarts the failover |
//! | write every dirty sector to the backing, then flush the backing | as after the previous step |
//! | record that no dirty data is left | the disk is opened normally |
//!
//! A failover does not change the replica, so the failover can always be restarted. A wrong
//! checksum or a read error ends the failover before the ownership record changes. The disk is then
//! offline with a reason. Before each write, this host checks that its lease in etcd is valid.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hob_control::Size;
use hob_engine::cluster::SecondCopy;
use hob_engine::command::Access;
use hob_storage::pool::{OwnerId, Pool};
use tokio::time::Instant;

use super::super::disks::{Dirty, DirtyPass, Source, note_progress, write_to_backing};
use super::super::flash::blocking;
use super::ClusterService;
use crate::api_error::{ApiError, Result, conflict, failed, open_error};
use crate::cluster::{Cluster, FailoverCandidate, Taken};
use crate::hardware::{Backing, BackingInfo};
use crate::lease_clock::LeaseClock;
use crate::state::CacheOwner;

/// Time before an unusable replica is examined again.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// A replica that was read and verified, and its backing.
struct Checked {
    /// The replica's pool. The pool's devices stay locked while this value exists.
    _pool: Pool,
    dirty: Dirty,
    backing: Backing,
    bytes: u64,
}

impl ClusterService {
    /// Fails the disk over to this host; see the module's text. The caller holds the ownership lock
    /// and the operation guard.
    pub(super) async fn adopt(
        self: &Arc<Self>,
        cluster: &Cluster,
        name: &str,
        to_adopt: FailoverCandidate,
    ) -> Result<Taken> {
        let adopted = self.adopt_now(cluster, name, to_adopt).await;
        if adopted.is_err()
            && let Ok(disk) = self.registry.inner().disk_mut(name)
        {
            disk.retry_after = Some(Instant::now() + RETRY_AFTER);
        }
        adopted
    }

    async fn adopt_now(
        self: &Arc<Self>,
        cluster: &Cluster,
        name: &str,
        to_adopt: FailoverCandidate,
    ) -> Result<Taken> {
        let FailoverCandidate { copy, from, clock } = to_adopt;
        tracing::warn!(
            "disk {name}: its owner {} has failed; failing over to the replica on this host",
            from.name
        );
        let unusable = |error: ApiError| {
            let why = error.problem.error;
            conflict!("the replica of {}'s dirty data on this host cannot be used: {why}", from.name).hint(
                format!(
                    "start that host again; if this is impossible, 'hob cluster take {name} --force --yes' \
                 discards its dirty data"
                ),
            )
        };
        let path = self.remote_flash.end_for_failover(&from.id, &copy.loan).await.map_err(unusable)?;
        let spec = self.registry.inner().disk(name)?.wanted.backing.clone();
        let (service, disk) = (self.clone(), name.to_owned());
        let options = self.disks.image_options(name).await?;
        let checked = blocking(move || {
            let (pool, mut dirty, bytes) = service.check_copy(&disk, &path, &copy)?;
            let backing =
                Backing::open(&spec, Access::ReadWrite, &options).map_err(|error| open_error(&error))?;
            check_backing(&dirty, backing.info())?;
            let mut pass = DirtyPass::new(&service.registry, &disk, "its replica", "is being checked", bytes);
            dirty.each(|range, found| match found {
                Ok(_) => {
                    pass.advance(&range);
                    Ok(())
                }
                Err(lost) => Err(failed!("the dirty sector at {}: {lost}", range.start)),
            })?;
            Ok(Checked { _pool: pool, dirty, backing, bytes })
        })
        .await?
        .map_err(unusable)?;
        let bytes = checked.bytes;
        cluster.begin_adopting(name).await.map_err(not_told)?;
        let (service, disk) = (self.clone(), name.to_owned());
        blocking(move || service.bring(&disk, checked, &clock)).await??;
        let (_, writes_back) = self.registry.wish(name)?;
        let taken = cluster.end_adopting(name, writes_back).await.map_err(not_told)?;
        tracing::warn!(
            "disk {name}: {} of dirty data of {} was written to the backing from the replica; no data is \
             lost",
            Size(bytes).human(),
            from.name
        );
        Ok(taken)
    }

    /// Opens the replica and counts its dirty data.
    fn check_copy(&self, name: &str, path: &Path, copy: &SecondCopy) -> Result<(Pool, Dirty, u64)> {
        let owner: CacheOwner = copy.cache.parse().map_err(ApiError::conflict)?;
        let pool = Pool::open(&[path.to_owned()]).map_err(|error| ApiError::failed(error.to_string()))?;
        let found = pool.devices()[0].uuid.to_string();
        if found != copy.loan {
            return Err(conflict!(
                "{} is the flash lease {found}, but the replica is in the flash lease {}",
                path.display(),
                copy.loan
            ));
        }
        let dirty = Dirty::of(Source::of(&pool, OwnerId(owner.0))?, |done, all| {
            let percent = (u128::from(done) * 100).checked_div(u128::from(all)).unwrap_or(0);
            note_progress(
                &self.registry,
                name,
                format!("its replica is being read, {percent} % of its journal"),
            );
        })?;
        let summary = dirty.summary();
        if summary.sectors_missing > 0 {
            return Err(conflict!(
                "{} dirty sectors of the owner's journal are missing in the replica",
                summary.sectors_missing
            ));
        }
        let bytes = summary.sectors_dirty * hob_engine::units::SECTOR_BYTES;
        Ok((pool, dirty, bytes))
    }

    /// Writes all dirty data of the replica to the backing and flushes it.
    fn bring(&self, name: &str, checked: Checked, clock: &Arc<LeaseClock>) -> Result<()> {
        let Checked { _pool, mut dirty, backing, bytes } = checked;
        let mut pass =
            DirtyPass::new(&self.registry, name, "its replica", "is being written to the backing", bytes);
        write_to_backing(&mut dirty, backing, Some(clock), &|| true, |range| pass.advance(range))
    }
}

/// Checks that the backing is that of the replica's disk: it is writable, large enough, and has the
/// same identity. If the identity of this kind of backing can differ between hosts, a difference is
/// only logged.
fn check_backing(dirty: &Dirty, info: &BackingInfo) -> Result<()> {
    let summary = dirty.summary();
    if info.read_only {
        return Err(ApiError::conflict("the backing is read-only here"));
    }
    if info.size_bytes < summary.disk_bytes {
        return Err(conflict!(
            "the backing has {} bytes on this host, and the replica is of a disk of {}",
            info.size_bytes,
            summary.disk_bytes
        ));
    }
    let identity = info.identity_at(summary.disk_bytes).unwrap_or(info.identity);
    if identity != summary.identity {
        if is_same_everywhere(&info.identity_text) {
            return Err(conflict!(
                "the disk has another backing on this host than on its owner; on this host it is {}",
                info.identity_text
            ));
        }
        tracing::warn!(
            "cannot compare the identity of the backing ({}) with that of the replica",
            info.identity_text
        );
    }
    Ok(())
}

/// Returns true if the identity text of this kind of backing is the same on every host.
fn is_same_everywhere(identity_text: &str) -> bool {
    const EVERYWHERE: [&str; 8] = [
        " created at ",
        "rbd image",
        "disk of objects",
        "block device wwid",
        "block device uuid",
        "block device serial",
        "block device device-mapper",
        "block device array",
    ];
    EVERYWHERE.iter().any(|part| identity_text.contains(part))
}

fn not_told(why: crate::cluster::Unsaid) -> ApiError {
    failed!("cannot record the failover in etcd: {why}").hint("the failover restarts by itself")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_differ_between_hosts_prove_nothing() {
        for (text, expected) in [
            ("file with inode 7 created at 12.000000001, 512 bytes", true),
            ("file with inode 7 on device 8:1, 512 bytes", false),
            ("block device wwid naa.5, 512 bytes", true),
            ("block device number 8:0, 512 bytes", false),
            ("block device loop of /images/a, 512 bytes", false),
        ] {
            assert_eq!(is_same_everywhere(text), expected, "{text}");
        }
    }
}
