//! Reads the journals of orphans, which are persistent caches that belong to no disk of this
//! daemon. Each journal is read once, in the background. The journal shows whether the orphan has
//! dirty data, and of which backing (docs/decisions/0064).

use std::time::Duration;

use hob_control::Size;
use hob_engine::units::SECTOR_BYTES;
use hob_storage::pool::OwnerId;
use hob_storage::pool::recovery::Found;
use tokio::time::Instant;

use super::Pools;
use crate::api_error::ApiError;
use crate::background::spawn;
use crate::services::flash::{Flash, blocking};
use crate::services::registry::{OrphanContent, OrphanJournal, PoolEntry};
use crate::state::CacheOwner;
use crate::watchdog::contained;

/// Interval between two checks whether all reads of journals have ended.
const CHECK_EVERY: Duration = Duration::from_millis(50);

/// Reads the journal of an orphan or of an offline disk's cache.
pub(in crate::services) async fn read_journal(flash: &Flash, owner: OwnerId) -> OrphanJournal {
    let read = async {
        let (recovery, _) = flash.recovery(owner).await?;
        blocking(move || contained(|| recovery.run(|_, _| (), |_| ())))
            .await?
            .map_err(|error| ApiError::failed(error.to_string()))
    };
    match read.await {
        Ok(Found::Nothing(remains)) if remains.data.is_empty() => OrphanJournal::Empty,
        Ok(Found::Nothing(_)) => OrphanJournal::Unreadable("flash has no valid page of it".to_owned()),
        Ok(Found::Damaged { what, .. }) => OrphanJournal::Unreadable(format!("it is damaged ({what})")),
        Ok(Found::Recovered(recovered, remains)) => {
            let summary = recovered.summary;
            OrphanJournal::Read(OrphanContent {
                identity: summary.identity,
                disk_bytes: summary.disk_bytes,
                dirty_bytes: summary.sectors_dirty * SECTOR_BYTES,
                ring: summary.ring,
                copies: remains.rings.first().map_or(1, |ring| ring.copies.len()),
                block_bytes: summary.block_bytes,
                segments: remains.data.len() as u64,
            })
        }
        Err(error) => OrphanJournal::Unreadable(error.problem.error),
    }
}

impl Pools {
    /// Starts to read the journals of the orphans that were already orphans at the previous call.
    /// The daemon calls this function regularly.
    pub(in crate::services) fn read_orphans(&self) {
        self.read_these(PoolEntry::begin_reading_old);
    }

    /// Starts to read the journals that `begin` returns for each pool. Returns true if no journal
    /// is being read.
    fn read_these(&self, begin: fn(&mut PoolEntry, &[OwnerId]) -> Vec<OwnerId>) -> bool {
        let (unread, is_reading) = {
            let mut inner = self.registry.inner();
            let known = inner.settled_owners();
            let (mut unread, mut is_reading) = (Vec::new(), false);
            for (name, pool) in &mut inner.pools {
                let owners = begin(pool, &known).into_iter();
                unread.extend(owners.map(|owner| (name.clone(), pool.flash.clone(), owner)));
                is_reading |= pool.orphans.values().any(|of| matches!(of.journal, OrphanJournal::Reading(_)));
            }
            (unread, is_reading)
        };
        for (pool, flash, owner) in unread {
            let service = self.clone();
            spawn(async move {
                let journal = service.read_in_turn(&flash, owner).await;
                service.note_orphan(&pool, owner, journal);
            });
        }
        !is_reading
    }

    /// Reads the journal of a cache that no shard uses. An index needs much memory, so only one
    /// journal is read at a time.
    pub(in crate::services) async fn read_in_turn(&self, flash: &Flash, owner: OwnerId) -> OrphanJournal {
        let _turn = self.orphan_turn.lock().await;
        read_journal(flash, owner).await
    }

    /// Starts to read the journals of all orphans that are not read yet, and waits until these
    /// reads have ended. The wait ends after `patience` in any case.
    pub(in crate::services) async fn await_orphans(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        while !self.read_these(PoolEntry::begin_reading) && Instant::now() < deadline {
            tokio::time::sleep(CHECK_EVERY).await;
        }
    }

    fn note_orphan(&self, pool: &str, owner: OwnerId, journal: OrphanJournal) {
        let mut inner = self.registry.inner();
        let Ok(entry) = inner.pool_mut(pool) else { return };
        let is_whole = entry.is_whole();
        let Some(record) = entry.orphans.get_mut(&owner) else { return };
        let of = CacheOwner(owner.0);
        match journal.dirty_bytes(is_whole) {
            Some(0) => {
                tracing::info!("pool {pool}: the cache {of} belongs to no disk, and has no dirty data")
            }
            Some(dirty) => tracing::error!(
                "pool {pool}: the cache {of} belongs to no disk, and has {} of dirty data; see 'hob health'",
                Size(dirty).human()
            ),
            None => tracing::error!(
                "pool {pool}: the cache {of} belongs to no disk, and may have dirty data; see 'hob health'"
            ),
        }
        record.journal = journal;
    }
}
