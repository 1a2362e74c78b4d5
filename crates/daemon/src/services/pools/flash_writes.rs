//! Flash writes of pools, and their flash write budgets (docs/decisions/0050).
//!
//! Every [`COUNT_EVERY`], the daemon runs a *budget round*. It asks the shards how much each cache
//! wrote, and charges these bytes to the account of the pool ([`FlashBudget`]). Then it sends each
//! cache its new part of the budget. The shards count every write to the pool's devices. Writes
//! that no cache counts, such as the last writes of a removed disk, are charged to the pool. The
//! accounts survive a restart in a file of the state directory, which is written every
//! [`KEEP_EVERY`] and at the end of the daemon.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use hob_control::{CacheFlashWrites, FlashWrites, FlashWritesUsage, PoolChanged, PoolPatch, Size};
use hob_engine::flash_budget::{
    Allowance, Counts, FlashBudget, History, Member, ROUND_NS, Saved, Settings, pressure,
};
use hob_engine::partition::SHARES_DEFAULT;
use hob_engine::units::{DeviceId, DiskId, Instant};
use serde::{Deserialize, Serialize};
use tokio::time::Instant as Clock;

use super::Pools;
use crate::api_error::Result;
use crate::hardware::DeviceCounts;
use crate::services::flash::blocking;
use crate::services::observe::{PING_MAX, sum};
use crate::services::registry::{DiskEntry, DiskPhase, Inner, PoolEntry};
use crate::shard_api::ShardHandle;
use crate::state::create_private;

/// Time between two budget rounds.
pub(in crate::services) const COUNT_EVERY: Duration = Duration::from_nanos(ROUND_NS);

/// Time between two writes of the file with the accounts. A crash loses the counts since the last
/// write of the file, at most the counts of one such interval.
const KEEP_EVERY: Duration = Duration::from_secs(60);

/// Name of the file with the accounts, in the state directory.
const FILE: &str = "flash-writes.json";

/// hob reports a health problem if a pool's flash writes exceed the budget by more than the budget
/// of a day divided by this number.
const DEBT_PART: i64 = 24;

/// Maximum pressure, the number by which the engine measures how strictly admission refuses writes.
const PRESSURE_MAX: u32 = hob_engine::flash_budget::limit::PRESSURE_MAX;

/// Flash writes of one pool.
#[derive(Debug)]
pub(in crate::services) struct PoolWrites {
    began: Clock,
    /// Wall-clock time at `began`, nanoseconds since 1970.
    began_ns: u64,
    wanted: Option<FlashWrites>,
    /// Account of the budget; `None` without a budget.
    account: Option<FlashBudget>,
    history: History,
    /// Flash writes of each cache at the last budget round.
    caches: BTreeMap<DiskId, Counts>,
    allowances: BTreeMap<DiskId, Allowance>,
    /// Number of bytes that had been written to each device at the last budget round.
    devices: BTreeMap<DeviceId, u64>,
    /// Number of bytes written according to the counters of the pool's devices.
    by_devices: u64,
    /// Number of bytes in `by_devices` that caches counted, or that were charged to the pool.
    attributed: u64,
    /// Sum of the counts of all caches of the pool since the daemon started.
    total: Counts,
}

impl Default for PoolWrites {
    fn default() -> PoolWrites {
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let began_ns = u64::try_from(since_1970.as_nanos()).unwrap_or_default();
        PoolWrites {
            began: Clock::now(),
            began_ns,
            wanted: None,
            account: None,
            history: History::new(began_ns),
            caches: BTreeMap::new(),
            allowances: BTreeMap::new(),
            devices: BTreeMap::new(),
            by_devices: 0,
            attributed: 0,
            total: Counts::default(),
        }
    }
}

/// Content of the file with the accounts.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Kept {
    pools: BTreeMap<String, KeptPool>,
}

/// The account of one pool in the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct KeptPool {
    /// Time of this entry, nanoseconds since 1970.
    at_ns: u64,
    /// UUID of the pool, so that a new pool with the same name starts with an empty account.
    uuid: Option<String>,
    /// Saved budget in bytes, negative for a debt, and loan in bytes: past writes that later budget
    /// must still repay. Absent without a budget.
    budget: Option<(i64, u64)>,
    /// History of flash writes: start and step in nanoseconds, and the bytes of each step.
    history: (u64, u64, Vec<u64>),
}

impl PoolWrites {
    /// Sets the budget. The account begins with the next budget round.
    pub(in crate::services) fn set_wanted(&mut self, wanted: Option<FlashWrites>) {
        self.wanted = wanted;
        if wanted.is_none() {
            self.account = None;
        }
    }

    pub(in crate::services) fn wanted(&self) -> Option<FlashWrites> {
        self.wanted
    }

    fn now(&self) -> Instant {
        Instant(u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    fn now_ns(&self) -> u64 {
        self.began_ns.saturating_add(self.now().0)
    }

    /// Continues the account of an earlier process. No cache has written to flash since that
    /// process ended.
    fn restore(&mut self, kept: KeptPool, pool_bytes: u64) {
        let (began_ns, step, written) = kept.history;
        self.history = History::from_parts(began_ns, step, written);
        if let (Some((credit, loan)), Some(wanted)) = (kept.budget, self.wanted) {
            let settings = Settings { bytes_per_day: wanted.bytes_per_day(pool_bytes), pool_bytes };
            let mut account = FlashBudget::restore(self.now(), settings, Saved { credit, loan });
            account.earn_idle(self.now_ns().saturating_sub(kept.at_ns));
            self.account = Some(account);
        }
    }

    fn keep(&self, uuid: Option<String>) -> KeptPool {
        let (began_ns, step, written) = self.history.parts();
        let saved = |account: &FlashBudget| {
            let Saved { credit, loan } = account.saved();
            (credit, loan)
        };
        KeptPool {
            at_ns: self.now_ns(),
            uuid,
            budget: self.account.as_ref().map(saved),
            history: (began_ns, step, written.to_vec()),
        }
    }

    /// Returns the number of bytes that were written to the pool's devices since the last budget
    /// round, and that no cache has counted.
    fn unattributed(&mut self, devices: &[(DeviceId, u64)], by_caches: u64) -> u64 {
        for (device, written) in devices {
            let known = self.devices.insert(*device, *written).unwrap_or(0);
            self.by_devices += if *written >= known { written - known } else { *written };
        }
        self.attributed += by_caches;
        let more = self.by_devices.saturating_sub(self.attributed);
        self.attributed += more;
        more
    }

    /// Charges the bytes that the caches wrote, and returns the new part of the budget for each
    /// cache.
    fn round(&mut self, pool_bytes: u64, devices: &[(DeviceId, u64)], members: &[Member]) {
        let mut by_caches = Counts::default();
        for member in members {
            let known = self.caches.get(&member.disk).copied().unwrap_or(member.counts);
            let Counts { written, clean, borrowed, refused } = member.counts.since(known);
            by_caches.written += written;
            by_caches.clean += clean;
            by_caches.borrowed += borrowed;
            by_caches.refused += refused;
        }
        self.caches = members.iter().map(|member| (member.disk, member.counts)).collect();
        let unattributed = self.unattributed(devices, by_caches.written);
        self.total.written += by_caches.written + unattributed;
        self.total.clean += by_caches.clean;
        self.total.borrowed += by_caches.borrowed;
        self.total.refused += by_caches.refused;
        let (now, now_ns) = (self.now(), self.now_ns());
        self.history.add(now_ns, by_caches.written + unattributed);
        self.allowances.clear();
        let Some(wanted) = self.wanted.filter(|_| pool_bytes > 0) else { return };
        let settings = Settings { bytes_per_day: wanted.bytes_per_day(pool_bytes), pool_bytes };
        let account = self.account.get_or_insert_with(|| FlashBudget::new(now, settings));
        if account.settings() != settings {
            account.set(settings);
        }
        let allowances = account.round(now, unattributed, members);
        self.allowances = members.iter().map(|member| member.disk).zip(allowances).collect();
    }

    /// Returns the API view of the pool's flash writes and their budget.
    pub(in crate::services) fn usage(&self, pool_bytes: u64) -> FlashWritesUsage {
        let mut history = self.history.clone();
        let (written_day, covered_ns) = history.last_day(self.now_ns());
        let status = self.account.as_ref().map(FlashBudget::status).unwrap_or_default();
        FlashWritesUsage {
            budget: self.wanted,
            bytes_per_day: Size(self.wanted.map_or(0, |wanted| wanted.bytes_per_day(pool_bytes))),
            written_day: Size(written_day),
            covered_seconds: covered_ns / 1_000_000_000,
            written: Size(self.total.written),
            unrefusable: Size(self.total.written.saturating_sub(self.total.clean)),
            refused: Size(self.total.refused),
            saved: Size(status.credit.max(0).unsigned_abs()),
            debt: Size(status.credit.min(0).unsigned_abs()),
            loan: Size(status.loan),
        }
    }

    /// Returns the API view of one cache's flash writes and its part of the budget.
    pub(in crate::services) fn part_of(&self, disk: DiskId) -> Option<CacheFlashWrites> {
        let allowance = self.allowances.get(&disk)?;
        let counts = self.caches.get(&disk).copied().unwrap_or_default();
        let pressure = pressure(allowance.credit, allowance.credit_max);
        Some(CacheFlashWrites {
            part: Size(allowance.credit_max.unsigned_abs()),
            saved: allowance.credit,
            pressure_percent: (pressure * 100).div_ceil(PRESSURE_MAX) as u8,
            written: Size(counts.written),
            refused: Size(counts.refused),
        })
    }

    /// Returns the reason why flash writes exceed the budget although caches refuse all writes that
    /// they may refuse.
    pub(in crate::services) fn problem(&self, name: &str, pool_bytes: u64) -> Option<String> {
        let status = self.account.as_ref()?.status();
        if status.credit > -(i64::try_from(status.bytes_per_day).unwrap_or(i64::MAX) / DEBT_PART).max(1) {
            return None;
        }
        let FlashWritesUsage { written_day, bytes_per_day, unrefusable, written, .. } =
            self.usage(pool_bytes);
        let share = unrefusable.bytes() as u128 * 100 / u128::from(written.bytes().max(1));
        Some(format!(
            "caches wrote {} to flash in the last 24 hours, and the flash write budget is {} a day; {share} % of \
             the writes since the start are dirty data, second copies and journals, which hob does not refuse. \
             Raise the budget ('hob pool set {name} --flash-writes …'), or set caches to write-through",
            written_day.human(),
            bytes_per_day.human(),
        ))
    }
}

impl PoolEntry {
    /// Returns the size of the pool's devices on this host, bytes.
    pub(in crate::services) fn local_bytes(&self) -> u64 {
        let local = self.devices.iter().filter(|device| device.peer.is_none());
        local.map(|device| device.segments * self.segment_bytes).sum()
    }
}

impl DiskEntry {
    /// Returns the weight of the disk's cache in the division of a budget.
    fn flash_weight(&self) -> u64 {
        let shares = self.cache().and_then(|spec| spec.shared).map_or(SHARES_DEFAULT, |shared| shared.shares);
        self.held.len().max(1) as u64 * u64::from(shares.max(1))
    }
}

/// The new parts of the flash write budget for the caches of a shard.
type Orders = Vec<(DiskId, Option<Allowance>)>;

/// The caches of each pool at the start of a budget round.
type Members = BTreeMap<String, Vec<Member>>;

impl Pools {
    pub(crate) async fn pool_set(&self, pool: String, patch: PoolPatch) -> Result<PoolChanged> {
        let service = self.clone();
        self.tasks
            .run("pool set", pool.clone(), async move {
                if let Some(change) = patch.flash_writes {
                    service.registry.inner().pool_mut(&pool)?.flash_writes.set_wanted(change.budget());
                    tracing::info!("pool {pool}: the flash write budget is {change}");
                    service.count_flash_writes().await;
                    service.registry.save().await?;
                }
                service.pool_changed(&pool, Vec::new())
            })
            .await
    }

    /// Counts flash writes until the daemon ends.
    pub(in crate::services) async fn count_flash_writes_forever(self) -> Infallible {
        let mut every = tokio::time::interval(COUNT_EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut kept = Clock::now();
        loop {
            every.tick().await;
            self.count_flash_writes().await;
            if kept.elapsed() >= KEEP_EVERY {
                kept = Clock::now();
                self.keep_flash_writes().await;
            }
        }
    }

    /// Runs a budget round: charges the bytes that the caches wrote, and sends the caches their new
    /// parts of the budgets.
    pub(in crate::services) async fn count_flash_writes(&self) {
        // The devices are asked first, so that no write is missing in the caches' counts.
        let devices = sum(self.observe.ask_shards(PING_MAX).await);
        let members = self.flash_members().await;
        let mut orders: Vec<(ShardHandle, Orders)> = Vec::new();
        let mut inner = self.registry.inner();
        let shards = inner.shards_of_disks();
        for (name, members) in members {
            let Ok(entry) = inner.pool_mut(&name) else { continue };
            let pool_bytes = entry.local_bytes();
            let counted = entry.written(devices.as_ref());
            entry.flash_writes.round(pool_bytes, &counted, &members);
            let allowances = entry.flash_writes.allowances.clone();
            for member in members {
                let Some(shard) = shards.get(&member.disk) else { continue };
                let order = (member.disk, allowances.get(&member.disk).copied());
                match orders.iter_mut().find(|(other, _)| other.is_same(shard)) {
                    Some((_, orders)) => orders.push(order),
                    None => orders.push((shard.clone(), vec![order])),
                }
            }
        }
        drop(inner);
        for (shard, allowances) in orders {
            shard.allow_flash_writes(allowances);
        }
    }

    /// Returns the caches of each pool with their counts of flash writes. If a shard does not
    /// answer, its caches have the last known counts.
    async fn flash_members(&self) -> Members {
        let mut members: Members = BTreeMap::new();
        let mut by_shard: Vec<(ShardHandle, Vec<(String, Member)>)> = Vec::new();
        {
            let inner = self.registry.inner();
            members.extend(inner.pools.keys().map(|name| (name.clone(), Vec::new())));
            for disk in inner.disks.values().filter(|disk| disk.has_cache) {
                let (Some(spec), DiskPhase::Online(shard)) = (disk.cache(), &disk.phase) else { continue };
                let Some(entry) = inner.pools.get(&spec.pool) else { continue };
                let counts = entry.flash_writes.caches.get(&disk.id).copied().unwrap_or_default();
                let member =
                    (spec.pool.clone(), Member { disk: disk.id, weight: disk.flash_weight(), counts });
                match by_shard.iter_mut().find(|(other, _)| other.is_same(shard)) {
                    Some((_, members)) => members.push(member),
                    None => by_shard.push((shard.clone(), vec![member])),
                }
            }
        }
        for (shard, caches) in by_shard {
            let ids = caches.iter().map(|(_, member)| member.disk).collect();
            let counts = shard.flash_counts(ids).await.unwrap_or_default();
            for (at, (pool, member)) in caches.into_iter().enumerate() {
                let counts = counts.get(at).copied().flatten().unwrap_or(member.counts);
                members.entry(pool).or_default().push(Member { counts, ..member });
            }
        }
        members
    }

    /// Continues the account of a pool that was open before.
    pub(in crate::services) async fn restore_flash_writes(&self, pool: &str, wanted: Option<FlashWrites>) {
        let path = self.registry.directory().map(|directory| directory.join(FILE));
        let kept = match path {
            Some(path) => blocking(move || read(&path)).await.unwrap_or_default(),
            None => Kept::default(),
        };
        let mut inner = self.registry.inner();
        let Ok(entry) = inner.pool_mut(pool) else { return };
        entry.flash_writes.set_wanted(wanted);
        let (uuid, bytes) = (entry.uuid.clone(), entry.local_bytes());
        if let Some(kept) = kept.pools.get(pool).filter(|kept| kept.uuid == uuid) {
            entry.flash_writes.restore(kept.clone(), bytes);
        }
    }

    /// Writes the accounts of all pools to the file.
    pub(in crate::services) async fn keep_flash_writes(&self) {
        let Some(path) = self.registry.directory().map(|directory| directory.join(FILE)) else { return };
        let kept = {
            let inner = self.registry.inner();
            let of = |(name, entry): (&String, &PoolEntry)| {
                (name.clone(), entry.flash_writes.keep(entry.uuid.clone()))
            };
            Kept { pools: inner.pools.iter().map(of).collect() }
        };
        if let Ok(Err(error)) = blocking(move || write(&path, &kept)).await {
            tracing::warn!(
                "cannot save the counts of flash writes: {error}; a restart loses the latest counts"
            );
        }
    }
}

impl PoolEntry {
    /// Returns the number of bytes written to each device of the pool whose count is known.
    fn written(&self, counts: Option<&BTreeMap<DeviceId, DeviceCounts>>) -> Vec<(DeviceId, u64)> {
        let ids = self.devices.iter().filter_map(|device| Some(device.ids?.on_shards));
        let Some(counts) = counts else { return Vec::new() };
        ids.filter_map(|id| Some((id, counts.get(&id)?.written_bytes))).collect()
    }
}

impl Inner {
    /// Returns the shard of each online disk.
    fn shards_of_disks(&self) -> BTreeMap<DiskId, ShardHandle> {
        let place = |disk: &DiskEntry| match &disk.phase {
            DiskPhase::Online(shard) => Some((disk.id, shard.clone())),
            _ => None,
        };
        self.disks.values().filter_map(place).collect()
    }

    /// Returns the pools whose budgets are exceeded, and why.
    pub(in crate::services) fn flash_write_problems(&self) -> Vec<(String, String)> {
        let problem = |(name, entry): (&String, &PoolEntry)| {
            Some((name.clone(), entry.flash_writes.problem(name, entry.local_bytes())?))
        };
        self.pools.iter().filter_map(problem).collect()
    }
}

fn read(path: &Path) -> Kept {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Kept::default(),
        Err(error) => {
            tracing::warn!("cannot read {}: {error}; the saved flash writes are lost", path.display());
            return Kept::default();
        }
    };
    serde_json::from_slice(&text).unwrap_or_else(|error| {
        tracing::warn!("{} is malformed ({error}); the saved flash writes are lost", path.display());
        Kept::default()
    })
}

fn write(path: &Path, kept: &Kept) -> std::io::Result<()> {
    use std::io::Write as _;
    let new: PathBuf = path.with_extension("json.new");
    let mut file = create_private(&new)?;
    file.write_all(&serde_json::to_vec(kept)?)?;
    file.sync_all()?;
    std::fs::rename(&new, path)
}
