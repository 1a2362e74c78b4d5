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
//! The failover does not change the replica, so it can always be restarted. A wrong checksum or a
//! read error ends the failover before the ownership record changes. The disk is then offline with
//! a reason. Before each write, this host checks that its lease in etcd is valid.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hob_control::Size;
use hob_engine::cluster::SecondCopy;
use hob_engine::command::Access;
use hob_storage::backing::offline_writer::{OfflineWriter, WRITE_BYTES_MAX};
use hob_storage::pool::{OwnerId, Pool};
use tokio::time::Instant;

use super::super::disks::{Dirty, Source};
use super::super::flash::blocking;
use super::super::registry::DiskPhase;
use super::ClusterService;
use crate::api_error::{ApiError, Result, conflict, failed, open_error};
use crate::cluster::{Cluster, FailoverCandidate, Taken};
use crate::hardware::{Backing, BackingInfo};
use crate::lease_clock::{LeaseClock, now};
use crate::state::CacheOwner;

/// Time before an unusable replica is examined again.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// Number of bytes between two progress reports.
const TELL_EVERY_BYTES: u64 = 16 << 20;

/// A replica that was read and verified, and its backing.
struct Checked {
    /// The replica's pool. The pool's devices stay locked while this value exists.
    _pool: Pool,
    dirty: Dirty,
    backing: Backing,
    bytes: u64,
}

/// Progress of one pass over the replica's dirty data, which checks the data or writes it to the
/// backing.
struct Pass<'a> {
    service: &'a ClusterService,
    name: &'a str,
    doing: &'static str,
    began: Instant,
    done: u64,
    all: u64,
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
            let mut pass = Pass::new(&service, &disk, "is being checked", bytes);
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
            self.note_adoption(name, format!("its replica is being read, {percent} % of its journal"));
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
        let may_go_on = || now() < clock.calls_back_at();
        let mut alone = OfflineWriter::new(backing, Some(clock.clone()), &may_go_on)
            .map_err(|error| ApiError::failed(error.to_string()))?;
        let mut pass = Pass::new(self, name, "is being written to the backing", bytes);
        let written = write_all(&mut dirty, &mut alone, clock, |range| pass.advance(range));
        let flushed = written.and_then(|()| {
            alone.flush().map_err(|error| {
                failed!("cannot write the dirty data to the backing: {error:?}")
                    .hint("repair the backing; hob retries by itself")
            })
        });
        alone.close();
        flushed
    }

    fn note_adoption(&self, name: &str, reason: String) {
        if let Ok(disk) = self.registry.inner().disk_mut(name)
            && let DiskPhase::Offline(known) = &mut disk.phase
        {
            *known = reason;
        }
    }
}

impl<'a> Pass<'a> {
    fn new(service: &'a ClusterService, name: &'a str, doing: &'static str, all: u64) -> Self {
        let mut pass = Pass { service, name, doing, began: Instant::now(), done: 0, all };
        pass.advance(&(0..0));
        pass
    }

    fn advance(&mut self, range: &Range<u64>) {
        let before = self.done;
        self.done += range.end - range.start;
        if self.done / TELL_EVERY_BYTES != before / TELL_EVERY_BYTES || self.done == before {
            let left = left_text(self.done, self.all, self.began.elapsed());
            let (doing, all) = (self.doing, Size(self.all).human());
            let percent = (u128::from(self.done) * 100).checked_div(u128::from(self.all)).unwrap_or(100);
            let text = format!("its replica ({all} of dirty data) {doing}, {percent} %{left}");
            self.service.note_adoption(self.name, text);
        }
    }
}

/// Returns a text with the estimated time to the end of the failover; an empty text without an
/// estimate.
fn left_text(done: u64, all: u64, took: Duration) -> String {
    if done == 0 || took < Duration::from_secs(1) {
        return String::new();
    }
    let left = took.as_secs_f64() * (all.saturating_sub(done)) as f64 / done as f64;
    format!(", about {} s left", left.ceil())
}

/// Writes the dirty data; adjacent sectors are merged into one write.
fn write_all(
    dirty: &mut Dirty,
    alone: &mut OfflineWriter<'_>,
    clock: &LeaseClock,
    mut advance: impl FnMut(&Range<u64>),
) -> Result<()> {
    let mut run: (u64, Vec<u8>) = (0, Vec::with_capacity(WRITE_BYTES_MAX));
    let mut put = |run: &mut (u64, Vec<u8>)| {
        if run.1.is_empty() {
            return Ok(());
        }
        if !clock.is_valid(now()) {
            return Err(ApiError::failed("this host's lease may have ended")
                .hint("the failover restarts when etcd answers again"));
        }
        let written = alone.write(run.0, &run.1).map_err(|error| {
            failed!("cannot write the dirty data to the backing: {error:?}")
                .hint("repair the backing; hob retries by itself")
        });
        run.1.clear();
        written
    };
    dirty.each(|range, found| {
        let bytes = found.map_err(|lost| {
            failed!("the dirty sector at {} was readable before, and is not any more: {lost}", range.start)
        })?;
        let follows = run.0 + run.1.len() as u64 == range.start;
        if !follows || run.1.len() + bytes.len() > WRITE_BYTES_MAX {
            put(&mut run)?;
            run.0 = range.start;
        }
        run.1.extend_from_slice(bytes);
        advance(&range);
        Ok::<(), ApiError>(())
    })?;
    put(&mut run)
}

/// Checks that the backing is that of the replica's disk: it is writable, large enough, and has the
/// same identity. If the identity of this kind of backing can differ between hosts, a different one
/// is only logged.
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

    #[test]
    fn the_remaining_time_is_reported_when_known() {
        assert_eq!(left_text(0, 100, Duration::from_secs(9)), "");
        assert_eq!(left_text(50, 100, Duration::from_millis(10)), "");
        assert_eq!(left_text(25, 100, Duration::from_secs(10)), ", about 30 s left");
        assert_eq!(left_text(100, 100, Duration::from_secs(10)), ", about 0 s left");
    }
}
