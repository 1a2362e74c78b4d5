//! Preview of a change of a disk: its effects on cached data, dirty data and clients. The module
//! also contains the checks that prevent an accidental loss of data.

use std::time::Duration;

use hob_control::{CachePatch, Effect, LifeEvent, OnClients, PlannedChange, Preview, Size};
use hob_engine::units::SECTOR_BYTES;

use super::Disks;
use super::settings::Reopening;
use crate::api_error::{ApiError, Result, conflict};
use crate::cache_settings::changed_spec;
use crate::services::pools::no_cache;
use crate::services::registry::DiskPhase;
use crate::state::CacheSpec;

/// Number of times that hob counts a disk's users before it concludes that the disk is in use. A
/// shard notices with a delay that a client has disconnected.
const SETTLE_LOOKS: u32 = 5;

/// Pause between two counts of a disk's users.
const SETTLE_EVERY: Duration = Duration::from_millis(100);

/// Effect of a change on the contents of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The cache keeps its contents.
    Stays,
    /// Cached data is dropped; dirty data is written to the backing first.
    Emptied,
    /// Dirty data is lost, and the cache keeps its other data.
    DirtyLost,
    /// Cached and dirty data are lost.
    AllLost,
}

/// Amounts of cached and dirty data in a cache, bytes.
struct Holds {
    /// Amount of cached data, bytes; `None` while the disk is offline.
    cached: Option<u64>,
    /// Amount of dirty data, bytes; `None` while the disk is offline.
    dirty: Option<u64>,
}

impl Disks {
    /// Returns the effects of a change of a disk without making the change.
    pub(crate) async fn preview(&self, disk: &str, change: &PlannedChange) -> Result<Preview> {
        let is_offline = matches!(self.registry.inner().disk(disk)?.phase, DiskPhase::Offline(_));
        let discards = matches!(
            change,
            PlannedChange::DiscardDirty
                | PlannedChange::Event { .. }
                | PlannedChange::Remove { discard_dirty: true }
                | PlannedChange::Disable { discard_dirty: true }
        );
        if is_offline && !discards {
            // The command that makes the change also waits for hob's own work.
            self.registry.wait_for_own_work(disk).await?;
        }
        let spec = self.registry.inner().disk(disk)?.cache().cloned();
        let mut preview = Preview::default();
        let fate = match change {
            PlannedChange::Remove { discard_dirty } | PlannedChange::Disable { discard_dirty } => {
                match change {
                    PlannedChange::Remove { .. } => self.check_no_clones(disk)?,
                    _ if spec.is_none() => return Err(no_cache(disk)),
                    _ => {}
                }
                if *discard_dirty {
                    if spec.as_ref().is_some_and(|spec| spec.journal.is_some()) {
                        self.check_discardable(disk)?;
                    }
                    Fate::AllLost
                } else {
                    self.check_given_up(disk)?;
                    Fate::Emptied
                }
            }
            PlannedChange::Clear => {
                self.registry.inner().check_clear(disk)?;
                Fate::Emptied
            }
            PlannedChange::Reopen => fate_of_reopening(spec.as_ref()),
            PlannedChange::SetDisk { patch } => {
                self.check_patch(disk, patch)?;
                match self.check_open_settings(disk, patch).await? {
                    Reopening::Needed => fate_of_reopening(spec.as_ref()),
                    Reopening::NotNeeded => Fate::Stays,
                }
            }
            PlannedChange::DiscardDirty => {
                spec.as_ref().ok_or_else(|| no_cache(disk))?;
                self.check_discardable(disk)?;
                Fate::DirtyLost
            }
            PlannedChange::Event { event } => {
                let fate = fate_of(*event, spec.as_ref());
                match fate {
                    Fate::Emptied if spec.is_some() => self.registry.inner().check_clear(disk)?,
                    Fate::AllLost => self.check_discardable(disk)?,
                    _ => {}
                }
                fate
            }
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
                preview.client_pids = self.client_pids(disk).await;
                preview.effects.push(format!("{disk}: {} disconnected", clients_are(preview.clients)));
            }
        }
        Ok(preview)
    }

    /// Refuses to remove a disk that clients use, unless they may be disconnected.
    pub(crate) async fn check_unused(&self, disk: &str, on_clients: OnClients) -> Result<()> {
        if on_clients == OnClients::Disconnect {
            return Ok(());
        }
        let users = self.known_users(disk).await?;
        if users == 0 {
            return Ok(());
        }
        Err(conflict!("{disk} has {} connected", clients(users))
            .hint("stop the guest first, or disconnect it with --force (API: ?force=true)"))
    }

    /// Refuses a change that loses dirty data, unless the caller allows the loss.
    pub(crate) async fn check_discard(
        &self,
        disk: &str,
        change: &PlannedChange,
        may_lose: bool,
    ) -> Result<()> {
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

    /// Counts the users of a disk, and waits briefly for disconnected clients to disappear.
    pub(super) async fn settled_users(&self, disk: &str) -> u64 {
        for _ in 0..SETTLE_LOOKS {
            match self.users_of_disk(disk).await {
                0 => return 0,
                _ => tokio::time::sleep(SETTLE_EVERY).await,
            }
        }
        self.users_of_disk(disk).await
    }

    /// Counts the users of a disk, and waits briefly for disconnected clients to disappear. Fails
    /// if the shard does not answer, because the disk may then have users.
    pub(super) async fn known_users(&self, disk: &str) -> Result<u64> {
        let users = self.settled_users(disk).await;
        match self.registry.shard_of(disk) {
            Ok((shard, id)) => Ok(users.max(shard.users(id).await?)),
            Err(_) => Ok(users),
        }
    }

    /// Returns the number of connected clients and guests; 0 if the disk is not served, or if its
    /// shard does not answer.
    async fn users_of_disk(&self, disk: &str) -> u64 {
        match self.registry.shard_of(disk) {
            Ok((shard, id)) => shard.users(id).await.unwrap_or(0),
            Err(_) => 0,
        }
    }

    /// Returns the process ids of a disk's clients, as far as they are known.
    async fn client_pids(&self, disk: &str) -> Vec<u32> {
        match self.registry.shard_of(disk) {
            Ok((shard, id)) => shard.client_pids(id).await.unwrap_or_default(),
            Err(_) => Vec::new(),
        }
    }

    async fn holds(&self, disk: &str, spec: &CacheSpec) -> Holds {
        let is_offline =
            self.registry.inner().disk(disk).is_ok_and(|disk| matches!(disk.phase, DiskPhase::Offline(_)));
        let nothing = Some(0).filter(|_| spec.journal.is_none() || !is_offline);
        let Ok((shard, id)) = self.registry.shard_of(disk) else {
            return Holds { cached: nothing, dirty: nothing };
        };
        match shard.stats(id).await {
            Ok(stats) => Holds {
                cached: Some(stats.blocks_cached * spec.block_size.bytes()),
                dirty: Some(stats.sectors_dirty * SECTOR_BYTES),
            },
            Err(_) => Holds { cached: None, dirty: None },
        }
    }

    fn fate_of_patch(
        &self,
        disk: &str,
        spec: Option<&CacheSpec>,
        patch: &CachePatch,
    ) -> Result<(Fate, Option<String>)> {
        let before = spec.ok_or_else(|| no_cache(disk))?;
        let context = self.registry.inner().context(&before.pool)?;
        let (wanted, _) = changed_spec(before, patch.size, &patch.settings, context)?;
        let resized = CacheSpec { size: wanted.size, shared: wanted.shared, ..before.clone() };
        {
            let inner = self.registry.inner();
            inner.check_change(disk, &wanted)?;
            if resized != wanted {
                inner.check_reconfiguration(disk, &resized, &wanted)?;
            }
        }
        if before.structure() != wanted.structure() {
            return Ok((Fate::Emptied, None));
        }
        let shrinks = wanted.size < before.size && wanted.shared.is_none();
        let sentence = || {
            format!(
                "{disk}: the cache shrinks from {} to {}; data that does not fit is dropped",
                before.size, wanted.size
            )
        };
        Ok((Fate::Stays, shrinks.then(sentence)))
    }
}

/// Returns the effect of closing a disk and opening it again. A volatile cache is lost when the
/// disk is closed.
fn fate_of_reopening(spec: Option<&CacheSpec>) -> Fate {
    match spec.is_some_and(|spec| spec.journal.is_none()) {
        true => Fate::Emptied,
        false => Fate::Stays,
    }
}

/// Returns the effect of a guest life-cycle event on a cache.
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
        preview.cached = Size(holds.cached.unwrap_or(0));
        let has = holds.cached.map(|cached| format!("; it has {}", Size(cached).human()));
        preview.effects.push(format!("{disk}: the cache is emptied{}", has.unwrap_or_default()));
    }
    match (fate, holds.dirty) {
        (Fate::Emptied, Some(dirty)) if dirty > 0 => {
            preview.effects.push(format!(
                "{disk}: {} of dirty data is first written to the backing",
                Size(dirty).human()
            ));
        }
        (Fate::DirtyLost | Fate::AllLost, Some(dirty)) => {
            preview.dirty_lost = Size(dirty);
            if dirty > 0 {
                preview.effects.push(format!(
                    "{disk}: {} of dirty data is lost: writes that were acknowledged to the guest are undone",
                    Size(dirty).human()
                ));
            }
        }
        (Fate::DirtyLost | Fate::AllLost, None) => {
            preview.dirty_unknown = true;
            preview.effects.push(format!(
                "{disk}: all dirty data is lost; the amount is unknown while the disk is offline"
            ));
        }
        _ => {}
    }
}

fn clients_are(count: u64) -> String {
    format!("{} {}", clients(count), if count == 1 { "is" } else { "are" })
}

pub(super) fn clients(count: u64) -> String {
    if count == 1 { "1 client".to_owned() } else { format!("{count} clients") }
}
