//! Caches: what is wanted is written into the disk's entry, then the shard's cache is made to fit.

use std::collections::BTreeSet;
use std::sync::Arc;

use hob_control::{CacheEnable, CachePatch, DiskChanged, Size};
use hob_engine::admission::Admission;
use hob_engine::command::{CacheChange, CacheConfig, CommandError, DataSegment, Segment};
use hob_engine::policy::{POLICIES, PolicyKind};
use hob_engine::units::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, DeviceId};

use super::refusal::Refusal;
use super::room::Wanted;
use super::{DiskEntry, Life, Manager};
use crate::daemon::shard_api::ShardError;
use crate::daemon::state::CacheSpec;

/// Cache block when nobody says otherwise.
const BLOCK_SIZE: Size = Size(4096);

/// What to do when the pool has less room than is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// Refuse, and change nothing.
    Exactly,
    /// Take what there is.
    AsFarAsPossible,
}

impl Manager {
    /// Gives a disk a cache.
    pub(crate) async fn cache_enable(
        self: &Arc<Self>,
        disk: String,
        e: CacheEnable,
    ) -> Result<DiskChanged, Refusal> {
        let manager = self.clone();
        self.change(async move { manager.enable(&disk, e).await }).await
    }

    /// Changes a cache's size, block size or policy.
    pub(crate) async fn cache_patch(
        self: &Arc<Self>,
        disk: String,
        p: CachePatch,
    ) -> Result<DiskChanged, Refusal> {
        let manager = self.clone();
        self.change(async move { manager.patch(&disk, p).await }).await
    }

    /// Takes a cache away.
    pub(crate) async fn cache_disable(self: &Arc<Self>, disk: String) -> Result<DiskChanged, Refusal> {
        let manager = self.clone();
        self.change(async move { manager.disable(&disk).await }).await
    }

    /// Empties a cache.
    pub(crate) async fn cache_clear(self: &Arc<Self>, disk: String) -> Result<DiskChanged, Refusal> {
        let manager = self.clone();
        self.change(async move { manager.clear(&disk).await }).await
    }

    /// As `cache_enable`, however long it takes.
    pub(super) async fn enable(
        self: &Arc<Self>,
        name: &str,
        enable: CacheEnable,
    ) -> Result<DiskChanged, Refusal> {
        let claim = self.claim_disk(name, "given a cache")?;
        let (spec, mut notes) = {
            let mut inner = self.inner();
            let segment_bytes = inner.pool(&enable.pool)?.segment_bytes;
            let (spec, notes) = cache_spec(enable, segment_bytes)?;
            let disk = inner.disk_mut(name)?;
            if disk.cache().is_some() {
                return Err(Refusal::conflict(format!("{name} has a cache already"))
                    .hint("change it with 'hob cache resize' or 'hob cache set'"));
            }
            disk.wanted.cache = Some(spec.clone());
            (spec, notes)
        };
        match self.fit_cache(name, Fit::Exactly).await {
            Ok(more) => notes.extend(more),
            Err(refusal) => {
                self.inner().disk_mut(name)?.wanted.cache = None;
                return Err(refusal);
            }
        }
        tracing::info!(
            "{name} has a cache of {} in blocks of {} ({})",
            spec.size,
            spec.block_size,
            spec.policy
        );
        self.finish_disk(name, claim, notes).await
    }

    async fn patch(self: &Arc<Self>, name: &str, patch: CachePatch) -> Result<DiskChanged, Refusal> {
        let claim = self.claim_disk(name, "changed")?;
        let (before, wanted, mut notes) = {
            let inner = self.inner();
            let before = inner.disk(name)?.cache().cloned().ok_or_else(|| no_cache(name))?;
            let asked = CacheEnable {
                pool: before.pool.clone(),
                size: patch.size.unwrap_or(before.size),
                block_size: Some(patch.block_size.unwrap_or(before.block_size)),
                policy: Some(patch.policy.unwrap_or_else(|| before.policy.clone())),
            };
            let (wanted, notes) = cache_spec(asked, inner.pool(&before.pool)?.segment_bytes)?;
            (before, wanted, notes)
        };
        if wanted == before {
            notes.push("the cache was so already".to_owned());
        }
        let resized = CacheSpec { size: wanted.size, ..before.clone() };
        self.want(name, &resized)?;
        match self.fit_cache(name, Fit::Exactly).await {
            Ok(more) => notes.extend(more),
            Err(refusal) => {
                self.want(name, &before)?;
                return Err(refusal);
            }
        }
        if wanted != resized {
            self.want(name, &wanted)?;
            if let Err(refusal) = self.configure(name).await {
                self.want(name, &resized)?;
                return Err(refusal);
            }
            notes.push("the cache starts empty".to_owned());
        }
        self.finish_disk(name, claim, notes).await
    }

    async fn disable(self: &Arc<Self>, name: &str) -> Result<DiskChanged, Refusal> {
        let claim = self.claim_disk(name, "changed")?;
        self.inner().disk(name)?.cache().ok_or_else(|| no_cache(name))?;
        self.take_cache(name).await?;
        {
            let mut inner = self.inner();
            let disk = inner.disk_mut(name)?;
            disk.wanted.cache = None;
            disk.cache_reason = None;
        }
        tracing::info!("{name} has no cache any more");
        self.finish_disk(name, claim, Vec::new()).await
    }

    async fn clear(self: &Arc<Self>, name: &str) -> Result<DiskChanged, Refusal> {
        let claim = self.claim_disk(name, "cleared")?;
        let (shard, id, has_cache) = {
            let inner = self.inner();
            let disk = inner.disk(name)?;
            disk.cache().ok_or_else(|| no_cache(name))?;
            (disk.shard()?, disk.id, disk.has_cache && !disk.held.is_empty())
        };
        if has_cache {
            shard.change_cache(id, CacheChange::Clear(None)).await?;
        }
        drop(claim);
        self.disk_changed(name, Vec::new())
    }

    /// Makes the shard's cache as large as is wanted. The caller has claimed the disk. Says what
    /// came out differently. A disk that is offline gets its cache when it is back.
    pub(super) async fn fit_cache(self: &Arc<Self>, name: &str, fit: Fit) -> Result<Vec<String>, Refusal> {
        let (shard, id, spec, config, has_cache, have) = {
            let inner = self.inner();
            let disk = inner.disk(name)?;
            let Some(spec) = disk.cache().cloned() else { return Ok(Vec::new()) };
            let Life::Online(shard) = &disk.life else {
                return Ok(vec![format!("{name} is offline; it gets its cache when it is back")]);
            };
            let config = engine_config(&spec, inner.pool(&spec.pool)?.segment_bytes)?;
            (shard.clone(), disk.id, spec, config, disk.has_cache, disk.held.len() as u64)
        };
        let target = spec.size.bytes().div_ceil(config.segment_bytes);
        if have > target {
            let surplus =
                u32::try_from(have - target).map_err(|_| Refusal::invalid("that is too large a change"))?;
            let released = shard.change_cache(id, CacheChange::Shrink(surplus, None)).await?;
            let free = self.let_go(name, &released, |_| false);
            self.give_back(&spec.pool, &free).await;
        }
        let missing = target.saturating_sub(have);
        if missing == 0 {
            self.inner().disk_mut(name)?.cache_reason = None;
            return Ok(Vec::new());
        }
        let least = if fit == Fit::Exactly { missing } else { 0 };
        let segments = self.take_room(&spec.pool, id, Wanted { least, most: missing }).await?;
        let got = segments.len() as u64;
        if got > 0 {
            let change = if has_cache {
                CacheChange::Grow(DataSegment::without_order(segments.clone()), None)
            } else {
                CacheChange::enable_volatile(config, segments.clone())
            };
            let mut result = shard.change_cache(id, change).await;
            if has_cache && result == Err(ShardError::Command(CommandError::NoCache)) {
                result = shard.change_cache(id, CacheChange::enable_volatile(config, segments.clone())).await;
            }
            if let Err(error) = result {
                self.give_back(&spec.pool, &segments).await;
                return Err(error.into());
            }
        }
        let mut inner = self.inner();
        let disk = inner.disk_mut(name)?;
        disk.held.extend(segments);
        disk.has_cache |= got > 0;
        disk.cache_reason = None;
        if got == missing {
            return Ok(Vec::new());
        }
        let room = Size(disk.held.len() as u64 * config.segment_bytes);
        let reason = format!("pool {} has room for {room} of {} only", spec.pool, spec.size);
        disk.cache_reason = Some(reason.clone());
        Ok(vec![format!("{reason}; the rest follows when there is room")])
    }

    /// Applies block size and policy.
    async fn configure(self: &Arc<Self>, name: &str) -> Result<(), Refusal> {
        let (shard, id, config) = {
            let inner = self.inner();
            let disk = inner.disk(name)?;
            let spec = disk.cache().ok_or_else(|| no_cache(name))?;
            let config = engine_config(spec, inner.pool(&spec.pool)?.segment_bytes)?;
            // A cache that lost everything is made anew when there is room.
            let has_cache = disk.has_cache && !disk.held.is_empty();
            (has_cache.then(|| disk.shard()), disk.id, config)
        };
        if let Some(shard) = shard {
            shard?.change_cache(id, CacheChange::Configure(config, None)).await?;
        }
        Ok(())
    }

    /// Takes the shard's cache away; what is wanted stays.
    async fn take_cache(self: &Arc<Self>, name: &str) -> Result<(), Refusal> {
        let (shard, id, pool) = {
            let inner = self.inner();
            let disk = inner.disk(name)?;
            let (true, Some(spec)) = (disk.has_cache, disk.cache()) else { return Ok(()) };
            (disk.shard()?, disk.id, spec.pool.clone())
        };
        let released = match shard.change_cache(id, CacheChange::Disable).await {
            // Nothing was left of it.
            Err(ShardError::Command(CommandError::NoCache)) => Vec::new(),
            result => result?,
        };
        let free = self.let_go(name, &released, |_| true);
        self.inner().disk_mut(name)?.has_cache = false;
        self.give_back(&pool, &free).await;
        Ok(())
    }

    /// Moves a disk's cache off a device, onto others as far as there is room. The caller has
    /// claimed the disk. Says by how much the cache got smaller.
    pub(super) async fn leave_device(
        self: &Arc<Self>,
        name: &str,
        device: DeviceId,
    ) -> Result<Vec<String>, Refusal> {
        let (shard, id, pool, all, leaving) = {
            let inner = self.inner();
            let disk = inner.disk(name)?;
            let leaving = disk.held.iter().filter(|segment| segment.device == device).count();
            let (true, Some(spec)) = (leaving > 0, disk.cache()) else { return Ok(Vec::new()) };
            (disk.shard()?, disk.id, spec.pool.clone(), disk.held.len(), leaving)
        };
        let wanted = Wanted { least: 0, most: leaving as u64 };
        let replacements = self.take_room(&pool, id, wanted).await.unwrap_or_else(|refusal| {
            tracing::warn!("pool {pool}: {refusal}");
            Vec::new()
        });
        let got = replacements.len();
        if all == leaving && got == 0 {
            self.take_cache(name).await?;
        } else {
            let change = CacheChange::Leave(device, DataSegment::without_order(replacements.clone()), None);
            match shard.change_cache(id, change).await {
                Ok(released) => {
                    let free = self.let_go(name, &released, |segment| segment.device == device);
                    self.inner().disk_mut(name)?.held.extend(replacements);
                    self.give_back(&pool, &free).await;
                }
                // A fence was faster and has taken the segments already.
                Err(ShardError::Command(CommandError::NoCache)) => {
                    self.let_go(name, &[], |segment| segment.device == device);
                    self.give_back(&pool, &replacements).await;
                    return Ok(Vec::new());
                }
                Err(error) => {
                    self.give_back(&pool, &replacements).await;
                    return Err(error.into());
                }
            }
        }
        let mut inner = self.inner();
        let segment_bytes = inner.pool(&pool)?.segment_bytes;
        let disk = inner.disk_mut(name)?;
        if got == leaving {
            return Ok(Vec::new());
        }
        let room = Size(disk.held.len() as u64 * segment_bytes);
        let wanted = disk.cache().map_or(Size(0), |spec| spec.size);
        disk.cache_reason = Some(format!("pool {pool} has room for {room} of {wanted} only"));
        let less = Size((leaving - got) as u64 * segment_bytes);
        Ok(vec![format!("the cache of {name} is {less} smaller until pool {pool} has room again")])
    }

    /// Notes that a cache does not use `released` any more, and that it lost what else it held of
    /// what is `gone`. Returns what can be given away.
    pub(super) fn let_go(
        &self,
        name: &str,
        released: &[Segment],
        gone: impl Fn(&Segment) -> bool,
    ) -> Vec<Segment> {
        let released: BTreeSet<&Segment> = released.iter().collect();
        let mut inner = self.inner();
        let Ok(disk) = inner.disk_mut(name) else { return Vec::new() };
        let held = std::mem::take(&mut disk.held);
        let (leaving, staying) =
            held.into_iter().partition(|segment| released.contains(segment) || gone(segment));
        disk.held = staying;
        let (free, lost): (Vec<_>, Vec<_>) =
            Vec::into_iter(leaving).partition(|segment: &Segment| released.contains(segment));
        for segment in lost {
            inner.note_lost(segment);
        }
        free
    }

    /// Gives the caches of a pool the room that they are short of, where there is some now.
    pub(super) async fn top_up(self: &Arc<Self>, pool: &str) -> Vec<String> {
        let short: Vec<String> = {
            let inner = self.inner();
            let Ok(entry) = inner.pool(pool) else { return Vec::new() };
            let is_short = |disk: &&DiskEntry| {
                let spec =
                    disk.cache().filter(|spec| spec.pool == pool && matches!(disk.life, Life::Online(_)));
                spec.is_some_and(|spec| {
                    (disk.held.len() as u64) < spec.size.bytes().div_ceil(entry.segment_bytes)
                })
            };
            inner.disks.values().filter(is_short).map(|disk| disk.wanted.name.clone()).collect()
        };
        let mut notes = Vec::new();
        for name in short {
            // Whoever changes it at this moment fits it as well.
            let Ok(_claim) = self.claim_disk(&name, "given more room") else { continue };
            match self.fit_cache(&name, Fit::AsFarAsPossible).await {
                Ok(more) => notes.extend(more),
                Err(refusal) => tracing::warn!("the cache of {name} stays as it is: {refusal}"),
            }
        }
        notes
    }

    fn want(&self, name: &str, spec: &CacheSpec) -> Result<(), Refusal> {
        self.inner().disk_mut(name)?.wanted.cache = Some(spec.clone());
        Ok(())
    }
}

fn no_cache(name: &str) -> Refusal {
    Refusal::conflict(format!("{name} has no cache")).hint("give it one with 'hob cache enable'")
}

/// Checks what was asked for and rounds it to whole segments.
pub(super) fn cache_spec(
    enable: CacheEnable,
    segment_bytes: u64,
) -> Result<(CacheSpec, Vec<String>), Refusal> {
    let CacheEnable { pool, size, block_size, policy } = enable;
    let block_size = block_size.unwrap_or(BLOCK_SIZE);
    if !block_size.bytes().is_power_of_two()
        || !(BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&block_size.bytes())
    {
        return Err(Refusal::invalid(format!(
            "a cache block is a power of two from 4K to 1M, not {block_size}"
        )));
    }
    let policy = policy.unwrap_or_else(|| POLICIES[0].name.to_owned());
    let policy = match PolicyKind::from_name(&policy).map(PolicyKind::info) {
        Some(info) if info.serves => info.name.to_owned(),
        known => {
            let why = if known.is_some() { "is for the lab only" } else { "does not exist" };
            let names: Vec<_> = POLICIES.iter().filter(|row| row.serves).map(|row| row.name).collect();
            return Err(Refusal::invalid(format!(
                "the policy '{policy}' {why}; there are {}",
                names.join(", ")
            )));
        }
    };
    if size.bytes() == 0 {
        return Err(Refusal::invalid("a cache cannot have size 0").hint("'hob cache disable' takes it away"));
    }
    let whole =
        size.bytes().div_ceil(segment_bytes).checked_mul(segment_bytes).filter(|bytes| *bytes <= 1 << 60);
    let whole =
        Size(whole.ok_or_else(|| Refusal::invalid(format!("a cache of {size} is beyond all bounds")))?);
    let mut notes = Vec::new();
    if whole != size {
        notes.push(format!("{size} is rounded up to {whole}, whole segments of {}", Size(segment_bytes)));
    }
    Ok((CacheSpec { pool, size: whole, block_size, policy }, notes))
}

fn engine_config(spec: &CacheSpec, segment_bytes: u64) -> Result<CacheConfig, Refusal> {
    let unknown = || Refusal::failed(format!("this hob has no policy '{}'", spec.policy));
    Ok(CacheConfig::write_through(
        u32::try_from(spec.block_size.bytes()).unwrap_or(u32::MAX),
        segment_bytes,
        PolicyKind::from_name(&spec.policy).ok_or_else(unknown)?,
        Admission::default(),
    ))
}
