//! What a change would do to cached data, dirty data and clients; and the guards that keep a call from doing so by accident.

use std::time::Duration;

use hob_control::{CachePatch, Effect, LifeEvent, OnClients, PlannedChange, Preview, Size};
use hob_engine::units::SECTOR_BYTES;

use super::Disks;
use crate::daemon::manager::api_error::ApiError;
use crate::daemon::manager::pools::no_cache;
use crate::daemon::manager::registry::DiskPhase;
use crate::daemon::manager::settings::changed_spec;
use crate::daemon::state::CacheSpec;

/// A shard learns of a client's end a moment later: users are counted so often before a disk counts as used.
const SETTLE_LOOKS: u32 = 5;

/// Pause between two counts.
const SETTLE_EVERY: Duration = Duration::from_millis(100);

/// What a change means for the contents of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// They stay.
    Stays,
    /// Cached data goes; dirty data reaches the backing first.
    Emptied,
    /// Dirty data is lost, and the rest stays.
    DirtyLost,
    /// Both go.
    AllLost,
}

/// What a cache holds.
struct Holds {
    cached: u64,
    /// Unknown while the disk is offline.
    dirty: Option<u64>,
}

impl Disks {
    /// Says what a change would do, without making it.
    pub(crate) async fn preview(&self, disk: &str, change: &PlannedChange) -> Result<Preview, ApiError> {
        let spec = self.registry.inner().disk(disk)?.cache().cloned();
        let mut preview = Preview::default();
        let fate = match change {
            PlannedChange::Remove { discard_dirty } | PlannedChange::Disable { discard_dirty } => {
                if *discard_dirty {
                    Fate::AllLost
                } else {
                    Fate::Emptied
                }
            }
            PlannedChange::Clear => Fate::Emptied,
            PlannedChange::DiscardDirty => Fate::DirtyLost,
            PlannedChange::Event { event } => fate_of(*event, spec.as_ref()),
            PlannedChange::Set { patch } => {
                let (fate, sentence) = self.fate_of_patch(disk, spec.as_ref(), patch)?;
                preview.effects.extend(sentence);
                fate
            }
        };
        if let Some(spec) = &spec {
            let holds = self.holds(disk, spec).await;
            describe(disk, fate, &holds, &mut preview);
        }
        if matches!(change, PlannedChange::Remove { .. }) {
            preview.clients = self.settled_users(disk).await;
            if preview.clients > 0 {
                preview.effects.push(format!("{disk}: {} are disconnected", clients(preview.clients)));
            }
        }
        Ok(preview)
    }

    /// Refuses to remove a disk that clients use, unless they may be disconnected.
    pub(crate) async fn check_unused(&self, disk: &str, on_clients: OnClients) -> Result<(), ApiError> {
        let users = self.settled_users(disk).await;
        if users == 0 || on_clients == OnClients::Disconnect {
            return Ok(());
        }
        Err(ApiError::conflict(format!("{disk} has {} connected", clients(users)))
            .hint("stop the guest first, or disconnect it with --force (API: ?force=true)"))
    }

    /// Refuses to lose dirty data by a call that does not say that it may be lost.
    pub(crate) async fn check_discard(
        &self,
        disk: &str,
        change: &PlannedChange,
        may_lose: bool,
    ) -> Result<(), ApiError> {
        if may_lose {
            return Ok(());
        }
        let preview = self.preview(disk, change).await?;
        if !preview.loses_dirty() {
            return Ok(());
        }
        Err(ApiError::conflict(preview.effects.join("; "))
            .hint("nothing was changed; pass --yes to discard the data (API: discard_dirty=true)"))
    }

    /// The same, when clients that have just gone are gone.
    async fn settled_users(&self, disk: &str) -> u64 {
        for _ in 0..SETTLE_LOOKS {
            match self.users_of_disk(disk).await {
                0 => return 0,
                _ => tokio::time::sleep(SETTLE_EVERY).await,
            }
        }
        self.users_of_disk(disk).await
    }

    /// Connected clients and guests; none of a disk that is not served.
    async fn users_of_disk(&self, disk: &str) -> u64 {
        match self.registry.shard_of(disk) {
            Ok((shard, id)) => shard.users(id).await.unwrap_or(0),
            Err(_) => 0,
        }
    }

    async fn holds(&self, disk: &str, spec: &CacheSpec) -> Holds {
        let is_offline =
            self.registry.inner().disk(disk).is_ok_and(|disk| matches!(disk.phase, DiskPhase::Offline(_)));
        let nothing = Holds { cached: 0, dirty: Some(0).filter(|_| spec.journal.is_none() || !is_offline) };
        let Ok((shard, id)) = self.registry.shard_of(disk) else { return nothing };
        match shard.stats(id).await {
            Ok(stats) => Holds {
                cached: stats.blocks_cached * spec.block_size.bytes(),
                dirty: Some(stats.sectors_dirty * SECTOR_BYTES),
            },
            Err(_) => Holds { dirty: None, ..nothing },
        }
    }

    fn fate_of_patch(
        &self,
        disk: &str,
        spec: Option<&CacheSpec>,
        patch: &CachePatch,
    ) -> Result<(Fate, Option<String>), ApiError> {
        let before = spec.ok_or_else(|| no_cache(disk))?;
        let context = self.registry.inner().context(&before.pool)?;
        let (wanted, _) = changed_spec(before, patch.size, &patch.settings, context)?;
        if before.structure() != wanted.structure() {
            return Ok((Fate::Emptied, None));
        }
        let shrinks = wanted.size < before.size;
        let sentence = || {
            format!(
                "{disk}: the cache shrinks from {} to {}; what does not fit goes",
                before.size, wanted.size
            )
        };
        Ok((Fate::Stays, shrinks.then(sentence)))
    }
}

/// What an event of the guest means for a cache.
fn fate_of(event: LifeEvent, spec: Option<&CacheSpec>) -> Fate {
    let is_persistent = spec.is_some_and(|spec| spec.journal.is_some());
    match if is_persistent { event.info().of_persistent } else { event.info().of_volatile } {
        Effect::Nothing | Effect::Drain => Fate::Stays,
        Effect::Empty => Fate::Emptied,
        Effect::Discard => Fate::AllLost,
    }
}

fn describe(disk: &str, fate: Fate, holds: &Holds, preview: &mut Preview) {
    if matches!(fate, Fate::Emptied | Fate::AllLost) {
        preview.cached = Size(holds.cached);
        preview
            .effects
            .push(format!("{disk}: the cache is emptied; it holds {}", Size(holds.cached).human()));
    }
    match (fate, holds.dirty) {
        (Fate::Emptied, Some(dirty)) if dirty > 0 => {
            preview
                .effects
                .push(format!("{disk}: {} of dirty data goes to the backing first", Size(dirty).human()));
        }
        (Fate::DirtyLost | Fate::AllLost, Some(dirty)) => {
            preview.dirty_lost = Size(dirty);
            if dirty > 0 || fate == Fate::DirtyLost {
                preview.effects.push(format!(
                    "{disk}: {} of dirty data is lost: writes that the guest was told were done are undone",
                    Size(dirty).human()
                ));
            }
        }
        (Fate::DirtyLost | Fate::AllLost, None) => {
            preview.dirty_unknown = true;
            preview.effects.push(format!(
                "{disk}: all dirty data is lost; how much it is cannot be told while the disk is offline"
            ));
        }
        _ => {}
    }
}

fn clients(count: u64) -> String {
    if count == 1 { "1 client".to_owned() } else { format!("{count} clients") }
}
