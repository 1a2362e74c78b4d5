//! Grows disks while they are served (docs/decisions/0017): first the backing, then the journal
//! ring, then the disk in the engine, and last in the front ends.
//!
//! # Refused requests
//! hob refuses to shrink a disk, and to grow a backing that is not a raw file. hob refuses a size
//! that the backing does not have and to which hob cannot grow the backing. hob refuses to resize a
//! disk that is migrating, or whose cache is being recovered.

use std::io::ErrorKind;
use std::sync::Arc;

use hob_control::{DiskChanged, DiskResize, Size};
use hob_engine::command::{CacheChange, NewRing};
use hob_engine::units::DiskId;
use hob_storage::backing::Format;

use super::Disks;
use crate::api_error::{ApiError, Result, conflict, failed, invalid};
use crate::hardware::{Backing, BackingInfo, ChangeDetector, ChangeToken, Monitor, SizeProbe};
use crate::services::flash::blocking;
use crate::shard_api::ShardHandle;

/// Disk sizes are multiples of this number of bytes.
const UNIT_BYTES: u64 = 512;

/// Advice for an operator whose NBD server has enlarged its export: what makes hob read the new
/// size.
const SIZE_OF_CONNECTION: &str = "an NBD server reports a new size only to new connections, so let the \
    server close hob's connection, which hob opens again by itself";

/// Objects that examine the backing of a served disk.
#[derive(Debug)]
pub(in crate::services) struct Measure {
    /// Measures the current size of the backing.
    pub(in crate::services) gauge: Option<SizeProbe>,
    /// Detects changes of the backing by other programs.
    pub(in crate::services) witness: Option<ChangeDetector>,
    /// Tells whether the backing is connected and answers.
    pub(in crate::services) monitor: Arc<Monitor>,
    /// Properties of the backing when the disk was opened or resized.
    pub(in crate::services) info: BackingInfo,
}

impl Measure {
    /// Returns true if a cache of the disk can match a backing in the state that `evidence`
    /// describes. For a writable backing, returns true, because hob itself changes the backing. If
    /// a read-only backing has changed since it was opened, a program that ignores locks has
    /// written to it, and cached data may be stale.
    pub(in crate::services) fn permits(&self, evidence: ChangeToken) -> bool {
        !self.info.read_only || self.info.evidence == Some(evidence)
    }
}

impl Disks {
    /// Grows a disk to the size of its backing, or to the given size after growing the backing.
    pub(crate) async fn disk_resize(&self, disk: String, resize: DiskResize) -> Result<DiskChanged> {
        let service = self.clone();
        self.tasks
            .run("disk resize", disk.clone(), async move {
                service.resize_to(&disk, resize.size.map(Size::bytes)).await
            })
            .await
    }

    async fn resize_to(&self, name: &str, wanted: Option<u64>) -> Result<DiskChanged> {
        let guard = self.registry.guard_disk_for_command(name, "resized").await?;
        let (shard, id) = self.registry.shard_of(name)?;
        let (before, gauge, read_only, silent) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            let measure = disk.measure.as_ref();
            let gauge = measure.and_then(|measure| measure.gauge.clone());
            let read_only = measure.is_some_and(|measure| measure.info.read_only);
            (disk.size_bytes, gauge, read_only, disk.silent_backing())
        };
        // hob knows only the size that the backing had before the outage.
        if let Some(why) = silent {
            return Err(conflict!("{name} cannot be resized now: {why}")
                .hint("repeat the command when the backing answers ('hob health')"));
        }
        let gauge = gauge.ok_or_else(|| {
            conflict!("hob cannot measure the size of the backing of {name} while the disk is online").hint(
                "hob measures the size of the backing when the daemon starts, or when you remove \
                the disk and add it again",
            )
        })?;
        if let Some(wanted) = wanted {
            // A refused size must not enlarge the backing.
            self.check_blocks(name, wanted)?;
        }
        let size = self.size_of_backing(name, before, wanted, read_only, gauge).await?;
        if size == before {
            let mut notes = vec![format!("the disk already has {}", Size(size))];
            if self.has_nbd_backing(name)? {
                notes.push(format!("{SIZE_OF_CONNECTION}, and repeat the command"));
            }
            return self.pools.finish_disk(name, guard, notes).await;
        }
        self.check_blocks(name, size)?;
        self.grow_disk(name, &shard, id, size).await?;
        tracing::info!("disk {name}: resized from {before} to {size} bytes");
        let mut notes = vec!["connected NBD clients see the new size when they connect again".to_owned()];
        if let Err(error) = self.exports.grow_device(name, size).await {
            notes.push(format!("its block device keeps the old size: {error}"));
        }
        self.pools.finish_disk(name, guard, notes).await
    }

    fn has_nbd_backing(&self, name: &str) -> Result<bool> {
        Ok(is_nbd(&self.registry.inner().disk(name)?.wanted.backing))
    }

    /// Returns the new size of a disk in bytes, after growing its backing if necessary. `before` is
    /// the disk's current size in bytes.
    async fn size_of_backing(
        &self,
        name: &str,
        before: u64,
        wanted: Option<u64>,
        read_only: bool,
        gauge: SizeProbe,
    ) -> Result<u64> {
        let cannot =
            |what: &str, error: &std::io::Error| failed!("the backing of {name} cannot be {what}: {error}");
        let whole = |size: u64| match size.is_multiple_of(UNIT_BYTES) {
            true => Ok(()),
            false => Err(invalid!("the size of a disk must be a multiple of {UNIT_BYTES} bytes, not {size}")),
        };
        if let Some(wanted) = wanted {
            whole(wanted)?;
            if wanted < before {
                return Err(no_smaller(name, &format!("it has {before} bytes")));
            }
        }
        let measured = gauge.clone();
        let now =
            blocking(move || measured.size_bytes()).await?.map_err(|error| cannot("measured", &error))?;
        if now < before {
            let has = Size(now);
            return Err(no_smaller(
                name,
                &format!("its backing has {has}, and the disk has {}", Size(before)),
            ));
        }
        match wanted {
            None => whole(now).map(|()| now),
            Some(wanted) if wanted == now => Ok(wanted),
            Some(wanted) if wanted < now => Err(conflict!("the backing of {name} has {} already", Size(now))
                .hint(format!(
                    "'hob disk resize {name}' without --size grows the disk to the size of its \
                        backing; {} is not possible",
                    Size(wanted)
                ))),
            Some(_) if self.has_nbd_backing(name)? => Err(not_that_large(name, now)),
            Some(_) if read_only => {
                Err(conflict!("{name} is read-only, so hob does not make its backing larger")
                    .hint(format!("enlarge the backing by other means, then run 'hob disk resize {name}'")))
            }
            Some(wanted) => {
                let grown = blocking(move || gauge.is_file().then(|| gauge.grow(wanted))).await?;
                let grown = grown.ok_or_else(|| {
                    conflict!("the backing of {name} has {}, and hob can enlarge only raw files", Size(now))
                        .hint(format!("make it larger yourself, and then 'hob disk resize {name}'"))
                })?;
                grown.map_err(|error| match error.kind() {
                    ErrorKind::FileTooLarge | ErrorKind::InvalidInput => invalid!(
                        "the file system of the backing of {name} does not support files of {}",
                        Size(wanted)
                    ),
                    _ => cannot("made larger", &error),
                })?;
                Ok(wanted)
            }
        }
    }

    /// Refuses a size with more blocks than the disk's cache supports.
    fn check_blocks(&self, name: &str, size: u64) -> Result<()> {
        let inner = self.registry.inner();
        let Some(spec) = inner.disk(name)?.cache() else { return Ok(()) };
        if size.div_ceil(spec.block_size.bytes()) <= u64::from(u32::MAX) {
            return Ok(());
        }
        let most = Size(u64::from(u32::MAX) * spec.block_size.bytes());
        Err(conflict!("a cache with blocks of {} supports disks of at most {most}", spec.block_size).hint(
            format!("choose larger blocks with 'hob cache set {name} --block-size', or remove the cache"),
        ))
    }

    /// Grows a disk to a size that its backing already has.
    async fn grow_disk(&self, name: &str, shard: &ShardHandle, id: DiskId, size: u64) -> Result<()> {
        let (identity, before, persistent) = {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            let measure = disk.measure.as_ref();
            let before = disk.identity;
            let identity = measure.and_then(|measure| measure.info.identity_at(size)).unwrap_or(before);
            // The new ring is bound to this identity.
            disk.identity = identity;
            let spec = disk.cache().filter(|spec| spec.journal.is_some() && disk.has_cache);
            (identity, before, spec.map(|spec| (spec.pool.clone(), disk.held.len() as u64)))
        };
        let grow = |ring: &Option<NewRing>| CacheChange::GrowDisk(size, ring.clone());
        let grown = match &persistent {
            Some((_, segments)) => {
                self.pools.restructure(name, *segments, grow).await.map_err(ApiError::from)
            }
            None => shard.change_cache(id, grow(&None)).await.map_err(ApiError::from),
        };
        let released = match grown {
            Ok(released) => released,
            Err(error) => {
                self.registry.inner().disk_mut(name)?.identity = before;
                return Err(error);
            }
        };
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            disk.size_bytes = size;
            if let Some(measure) = &mut disk.measure {
                measure.info.grow(size);
                debug_assert!(measure.info.identity == identity, "both are of the same sentence");
            }
        }
        self.exports.table().grow(name, size);
        if let Some((pool, _)) = persistent {
            self.pools.give_back(name, &pool, &released).await;
        }
        Ok(())
    }
}

/// Returns true if a backing's address is that of an NBD server.
fn is_nbd(backing: &str) -> bool {
    Backing::kind(backing, Format::Raw).name == "nbd"
}

/// The error for a size larger than the one that the NBD server of a disk reported.
fn not_that_large(name: &str, reported: u64) -> ApiError {
    conflict!(
        "the NBD server of {name} reported {} when hob connected, and hob cannot enlarge its export",
        Size(reported)
    )
    .hint(format!(
        "if the export is larger now: {SIZE_OF_CONNECTION}, and repeat the command; otherwise enlarge \
        the export first"
    ))
}

fn no_smaller(name: &str, because: &str) -> ApiError {
    conflict!("{name} cannot get smaller: {because}").hint("copy the data to a smaller disk")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_that_an_nbd_server_has_not_reported_needs_another_connection() {
        assert!(is_nbd("nbd+unix:///?socket=/s") && is_nbd("nbd://host/vm"));
        assert!(!is_nbd("/nbd.img") && !is_nbd("rbd:pool/image"));
        let error = not_that_large("vm", 64 << 20).problem;
        assert!(error.error.contains("reported 64M when hob connected"), "{error}");
        assert!(error.to_string().contains("let the server close hob's connection"), "{error}");
    }
}
