//! Queries about all disks and pools at once: metrics, load and health.
//!
//! A query waits for a hung shard only once and briefly. The values of the hung shard are missing
//! from the answer.

use std::collections::BTreeMap;
use std::time::Duration;

use hob_control::{
    Bucket, CacheState, ClusterState, Datastore, DeviceState, Disk, DiskLoad, DiskState as DiskLife, Health,
    HealthProblem, Pool, ProblemKind, Size,
};
use hob_engine::command::Mode;
use hob_engine::histogram::Histogram;
use hob_engine::stats::DiskStats;
use hob_engine::units::{DeviceId, DiskId, SECTOR_BYTES};
use hob_storage::pool::OwnerId;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::Observe;
use super::explain::ORDERED_WAITS;
use crate::hardware::DeviceCounts;
use crate::metrics::{Daemon, Form, Latencies, Page, Process};
use crate::services::registry::{
    CANNOT_FLUSH, ClusterWait, DeviceEntry, DiskEntry, DiskPhase, Inner, JOURNAL_LOST, OrphanJournal,
    PoolEntry,
};
use crate::shard_api::ShardHandle;
use crate::state::{CacheOwner, DiskState};

/// Maximum time for a shard to answer a ping.
pub(in crate::services) const PING_MAX: Duration = Duration::from_secs(1);

/// Time after which health reports an orphan whose journal is still being read.
const ORPHAN_READ_MAX: Duration = Duration::from_secs(10);

/// Maximum time for collecting the statistics of all disks.
const ROUND_MAX: Duration = Duration::from_secs(5);

/// Maximum number of disks whose statistics are requested together. A shard copies about 60 KiB for
/// each disk, and its guests wait during this time.
pub(in crate::services) const STATS_MAX: usize = 8;

impl Observe {
    /// Returns all metrics as text. Without `latencies`, the number of disks decides how many
    /// histograms are included.
    pub(crate) async fn metrics(&self, form: Form, latencies: Option<Latencies>) -> String {
        let suitable = || Latencies::for_disks(self.registry.inner().disks.len());
        let latencies = latencies.unwrap_or_else(suitable);
        let began = Instant::now();
        let answers = self.ask_shards(PING_MAX).await;
        let shards: Vec<bool> = answers.iter().map(Option::is_some).collect();
        let mut page = Page::new(form, latencies);
        let mut disks_missing = 0;
        self.round(&shards, |disk, stats| {
            disks_missing += usize::from(stats.is_none() && disk.state == DiskLife::Online);
            page.add_disk(disk, stats);
        })
        .await;
        page.add_qos(&self.qos.disks(), &self.datastores_now(&shards).await.unwrap_or_default());
        let counts = sum(answers);
        for (pool, counts) in self.pools_with(counts.as_ref()) {
            page.add_pool(&pool, &counts);
        }
        page.add_daemon(&Daemon {
            process: Process::look(),
            cluster: self.cluster_view(),
            problems: self.problems(&shards),
            shards,
            gathered_seconds: began.elapsed().as_secs_f64(),
            disks_missing,
        });
        page.finish()
    }

    /// Returns the state of the datastores, or `None` if a shard is hung. A query of each datastore
    /// would wait for the hung shard in vain.
    pub(in crate::services) async fn datastores_now(&self, shards: &[bool]) -> Option<Vec<Datastore>> {
        let all_answer = shards.iter().all(|answers| *answers);
        let asked = async { self.qos.datastores().await.ok() };
        if all_answer { tokio::time::timeout(PING_MAX, asked).await.ok().flatten() } else { None }
    }

    /// Returns the counters of every disk, from which clients compute rates.
    pub(crate) async fn load(&self) -> Vec<DiskLoad> {
        let shards = self.shards_answering().await;
        let mut loads = Vec::new();
        self.round(&shards, |disk, stats| loads.push(load(disk, stats))).await;
        loads
    }

    pub(crate) async fn health(&self) -> Health {
        self.problems(&self.shards_answering().await).into()
    }

    /// Returns true if every shard answers within `patience`.
    pub(crate) async fn is_alive(&self, patience: Duration) -> bool {
        self.ask_shards(patience).await.iter().all(Option::is_some)
    }

    /// Returns a short summary of the number of disks and their states.
    pub(crate) fn summary(&self) -> String {
        let inner = self.registry.inner();
        let online = inner.disks.values().filter(|disk| matches!(disk.phase, DiskPhase::Online(_))).count();
        match inner.disks.len() {
            0 => "no disks".to_owned(),
            1 if online == 1 => "1 disk online".to_owned(),
            all if online == all => format!("{all} disks online"),
            all => format!("{online} of {all} disks online"),
        }
    }

    /// Returns one entry for each shard: true if the shard answers in time.
    async fn shards_answering(&self) -> Vec<bool> {
        self.ask_shards(PING_MAX).await.iter().map(Option::is_some).collect()
    }

    /// Returns the device counters of each shard, or `None` for a shard that does not answer within
    /// `patience`.
    pub(in crate::services) async fn ask_shards(&self, patience: Duration) -> Vec<Option<ShardDevices>> {
        let mut pings = JoinSet::new();
        for (number, shard) in self.registry.shards.iter().cloned().enumerate() {
            pings.spawn(async move { (number, shard.devices(patience).await) });
        }
        let mut answers = vec![None; self.registry.shards.len()];
        while let Some(ping) = pings.join_next().await {
            if let Ok((number, devices)) = ping {
                answers[number] = devices;
            }
        }
        answers
    }

    /// Returns the API view of each pool, with the counters of each device in the same order;
    /// `None` for a device without counters in `counts`.
    pub(in crate::services) fn pools_with(
        &self,
        counts: Option<&BTreeMap<DeviceId, DeviceCounts>>,
    ) -> Vec<(Pool, Vec<Option<DeviceCounts>>)> {
        let mut pools: Vec<(Pool, Vec<Option<DeviceCounts>>)> = {
            let inner = self.registry.inner();
            let of = |device: &DeviceEntry| counts?.get(&device.ids?.on_shards).copied();
            let view = |(name, pool): (&String, &PoolEntry)| {
                (pool.view(name, &inner), pool.devices.iter().map(of).collect())
            };
            inner.pools.iter().map(view).collect()
        };
        pools.iter_mut().for_each(|(pool, _)| pool.swap = self.swap.rooms(&pool.name));
        pools
    }

    /// Calls `visit` for every disk by name, with its statistics if its shard answers.
    pub(in crate::services) async fn round(
        &self,
        answering: &[bool],
        mut visit: impl FnMut(&Disk, Option<&DiskStats>),
    ) {
        let deadline = Instant::now() + ROUND_MAX;
        let disks: Vec<(Disk, Option<ShardAndId>)> = {
            let inner = self.registry.inner();
            let position = |disk: &DiskEntry| {
                let DiskPhase::Online(shard) = &disk.phase else { return None };
                let number = self.registry.shards.iter().position(|known| known.is_same(shard))?;
                answering[number].then_some((number, disk.id))
            };
            let positions = inner.disks.values().map(position);
            inner.disk_views().into_iter().zip(positions).collect()
        };
        for some in disks.chunks(STATS_MAX) {
            let positions: Vec<Option<ShardAndId>> = some.iter().map(|(_, position)| *position).collect();
            let all = self.stats_of(&positions, deadline).await;
            for ((disk, _), stats) in some.iter().zip(all) {
                visit(disk, stats.as_deref());
            }
        }
    }

    /// Returns the statistics of the disks at these positions, in the same order. Each shard is asked
    /// once for all of its disks.
    async fn stats_of(
        &self,
        positions: &[Option<ShardAndId>],
        deadline: Instant,
    ) -> Vec<Option<Box<DiskStats>>> {
        let mut all = vec![None; positions.len()];
        for (number, shard) in self.registry.shards.iter().enumerate() {
            let mut indexes = Vec::new();
            let mut ids = Vec::new();
            for (index, position) in positions.iter().enumerate() {
                if let Some((_, id)) = position.filter(|(on, _)| *on == number) {
                    indexes.push(index);
                    ids.push(id);
                }
            }
            if ids.is_empty() {
                continue;
            }
            let asked = tokio::time::timeout_at(deadline, shard.stats_of(ids)).await;
            let Ok(Ok(stats)) = asked else { continue };
            for (index, stats) in indexes.into_iter().zip(stats) {
                all[index] = stats;
            }
        }
        all
    }

    pub(in crate::services) fn problems(&self, answering: &[bool]) -> Vec<HealthProblem> {
        let problem =
            |kind, subject: &str, reason: String| HealthProblem { kind, subject: subject.to_owned(), reason };
        let silent = answering.iter().enumerate().filter(|(_, answers)| !**answers).map(|(number, _)| {
            let reason = format!("it has not answered for {} s", PING_MAX.as_secs());
            problem(ProblemKind::ShardSilent, &format!("shard {number}"), reason)
        });
        let mut problems: Vec<HealthProblem> = silent.collect();
        if let Some(cluster) = self.cluster_view()
            && cluster.state != ClusterState::Member
        {
            let why = cluster.why.unwrap_or_else(|| "etcd does not answer".to_owned());
            problems.push(problem(ProblemKind::ClusterAway, &cluster.host, why));
        }
        let failed = self.tasks.failed().into_iter();
        problems.extend(failed.map(|(subject, why)| problem(ProblemKind::TaskFailed, &subject, why)));
        let missing = self.swap.missing();
        let sockets = self.export_table.failing_sockets();
        let low_space = self.state_space().problem();
        let files = self.open_files().problems().into_iter();
        let inner = self.registry.inner();
        if let Some(why) = &inner.config_refused {
            problems.push(problem(ProblemKind::ConfigRefused, "hob.toml", why.clone()));
        }
        for it in inner.config_pending.iter().filter(|it| inner.is_pending(&it.difference)) {
            problems.push(problem(ProblemKind::ConfigPending, "hob.toml", it.reason()));
        }
        for (pool, entry) in &inner.pools {
            for device in &entry.devices {
                let kind = match device.state {
                    DeviceState::Online => continue,
                    DeviceState::Stalled => ProblemKind::DeviceStalled,
                    DeviceState::Fenced => ProblemKind::DeviceFenced,
                    DeviceState::Offline => ProblemKind::DeviceOffline,
                };
                let subject = format!("{pool} {}", device.path.display());
                let mut reason = device.reason.clone().unwrap_or_default();
                // A device that hob's state does not know, and a pool that could not be created, have
                // their own remedies.
                let is_explained = device.peer.is_some()
                    || ["hob pool remove-device", "hob config apply"].iter().any(|it| reason.contains(it));
                if kind == ProblemKind::DeviceOffline && !is_explained {
                    reason = format!(
                        "{reason}; restore the device, which hob opens again by itself, or remove it \
                         from the pool with 'hob pool remove-device {subject}'"
                    );
                }
                problems.push(problem(kind, &subject, reason));
            }
            let orphans = entry.orphan_problems(pool, &inner).into_iter();
            problems.extend(
                orphans
                    .map(|(owner, why)| problem(ProblemKind::OrphanDirty, &format!("{pool} {owner}"), why)),
            );
        }
        for (pool, reason) in inner.flash_write_problems() {
            problems.push(problem(ProblemKind::FlashWritesExceeded, &pool, reason));
        }
        for (name, disk) in &inner.disks {
            let found = disk.problems(&inner).into_iter();
            problems.extend(found.map(|(kind, reason)| problem(kind, name, reason)));
        }
        problems.extend(sockets.into_iter().map(|(disk, export, why)| {
            let reason = if export == disk { why } else { format!("export {export}: {why}") };
            problem(ProblemKind::ExportFailed, &disk, format!("{reason}; hob retries every second"))
        }));
        problems.extend(files.map(|(subject, why)| problem(ProblemKind::FileMissing, &subject, why)));
        if let Some(why) = &inner.unsaved {
            let reason = format!("{why}; later changes are lost at a restart. Free space there");
            problems.push(problem(ProblemKind::StateNotSaved, "state", reason));
        }
        problems.extend(low_space.map(|why| problem(ProblemKind::StateSpaceLow, "state", why)));
        problems
            .extend(missing.into_iter().map(|(name, reason)| problem(ProblemKind::SwapOff, &name, reason)));
        problems
    }
}

/// The number of a disk's shard, and the disk's id there.
type ShardAndId = (usize, DiskId);

/// Counters of flash devices from one shard.
pub(in crate::services) type ShardDevices = Vec<(DeviceId, DeviceCounts)>;

/// Sums up the counters of each device over all shards. Returns `None` if a shard does not answer,
/// because a smaller sum would look like a counter reset.
pub(in crate::services) fn sum(
    answers: Vec<Option<ShardDevices>>,
) -> Option<BTreeMap<DeviceId, DeviceCounts>> {
    let mut all = BTreeMap::<DeviceId, DeviceCounts>::new();
    for (device, counts) in answers.into_iter().collect::<Option<Vec<_>>>()?.into_iter().flatten() {
        let so_far = all.entry(device).or_default();
        so_far.ios += counts.ios;
        so_far.errors += counts.errors;
        so_far.read_bytes += counts.read_bytes;
        so_far.written_bytes += counts.written_bytes;
        so_far.in_flight += counts.in_flight;
    }
    Some(all)
}

impl PoolEntry {
    /// Returns the orphans that have dirty data, or may have some, each with an explanation.
    fn orphan_problems(&self, pool: &str, inner: &Inner) -> Vec<(String, String)> {
        let explain = |(owner, journal): (OwnerId, Option<&OrphanJournal>)| {
            let journal = journal?;
            let owner = CacheOwner(owner.0).to_string();
            let what = match (journal.dirty_bytes(self.is_whole()), journal) {
                (Some(0), _) => return None,
                (None, OrphanJournal::Reading(since)) if since.elapsed() < ORPHAN_READ_MAX => return None,
                (Some(dirty), _) => format!("it has {} of dirty data", Size(dirty).human()),
                (None, OrphanJournal::Reading(_)) => {
                    "it may have dirty data: its journal is still being read".to_owned()
                }
                (None, OrphanJournal::Unreadable(why)) => {
                    format!("it may have dirty data: its journal cannot be read: {why}")
                }
                (None, _) => "it may have dirty data on missing devices of the pool".to_owned(),
            };
            let disk = inner.disk_of(journal).and_then(|name| inner.disks.get(&name));
            let way_out = match disk {
                Some(DiskEntry { wanted: DiskState { name, .. }, phase: DiskPhase::Online(_), .. }) => {
                    format!(
                        "it belongs to the backing of {name}, and {name} serves older data without it; stop the \
                     guest, and restart hob, then 'hob cache adopt {name} {owner}' restores the data"
                    )
                }
                Some(DiskEntry { wanted: DiskState { name, .. }, .. }) => format!(
                    "it belongs to the backing of {name}; 'hob cache adopt {name} {owner}' gives {name} its data"
                ),
                None => format!(
                    "add its disk with 'hob disk add NAME --backing SPEC --adopt-cache {owner}' to use the data"
                ),
            };
            let why = format!(
                "the cache {owner} belongs to no disk of this daemon, and {what}; {way_out}, and 'hob pool \
                 discard-orphan {pool} {owner} --yes' discards the cache"
            );
            Some((owner, why))
        };
        self.orphans(inner).into_iter().filter_map(explain).collect()
    }
}

impl DiskEntry {
    fn problems(&self, inner: &Inner) -> Vec<(ProblemKind, String)> {
        match &self.phase {
            // A disk that was never online is not a problem.
            DiskPhase::Offline(_) if self.is_arriving() => Vec::new(),
            // A disk that another host of the cluster serves is not a problem.
            DiskPhase::Offline(_) if self.cluster_wait == ClusterWait::Served => Vec::new(),
            DiskPhase::Away(_) | DiskPhase::Removing => Vec::new(),
            DiskPhase::Offline(reason) => vec![(ProblemKind::DiskOffline, reason.clone())],
            DiskPhase::Online(shard) => {
                let mut problems = self.cache_problems(inner);
                problems.extend(self.crash_log_problem(shard));
                problems.extend(self.backing_problem());
                problems.extend(self.flush_problem());
                problems.extend(self.device_reason().map(|why| (ProblemKind::HostDeviceMissing, why)));
                let files = self.files_reason();
                problems.extend(files.map(|why| {
                    let reason = format!("its file cannot be mounted: {why}; hob retries every few seconds");
                    (ProblemKind::ExportFailed, reason)
                }));
                problems.extend(self.displaced_files().map(|why| (ProblemKind::ExportFailed, why)));
                problems.extend(self.golden_image_problem(inner));
                problems
            }
        }
    }

    /// Returns why unflushed writes may be lost if hob is killed.
    fn crash_log_problem(&self, shard: &ShardHandle) -> Option<(ProblemKind, String)> {
        let writes_back = self.cache().is_some_and(|spec| spec.mode == Mode::WriteBack);
        let why = if writes_back && self.has_cache { shard.crash_log_problem(self.id) } else { None };
        let reason = match why {
            Some(why) => format!(
                "its cache has no crash log ({why}); if hob is killed, unflushed writes may be lost. Free space \
                 in /dev/shm if it is full, and restart hob"
            ),
            None => format!(
                "hob cannot record that the disk has unflushed changes ({}); if hob is killed, guests do not \
                 learn of lost writes. Restart hob",
                shard.mark_problem(self.id)?
            ),
        };
        Some((ProblemKind::CrashLogMissing, reason))
    }

    /// Returns a problem if the disk serves a golden image that has changed while clones use it.
    fn golden_image_problem(&self, inner: &Inner) -> Option<(ProblemKind, String)> {
        // Each golden image is read-only. The check of the clones is only for disks that may be one.
        if !self.wanted.read_only || self.constant.is_some() {
            return None;
        }
        let name = self.wanted.name.as_str();
        let is_concerned = |clone: &&DiskEntry| {
            matches!(clone.phase, DiskPhase::Online(_)) && clone.changed_parent() == Some(name)
        };
        let clones = inner.disks.values().filter(is_concerned);
        let clones: Vec<&str> = clones.map(|clone| clone.wanted.name.as_str()).collect();
        if clones.is_empty() {
            return None;
        }
        let reason = format!(
            "its image was written, renamed or replaced, or its attributes were changed, while the clones {} use \
             it. They read the image themselves now, and a write may have damaged their filesystems. To share the \
             image again, restart hob, or remove all its clones and add them again",
            clones.join(", ")
        );
        Some((ProblemKind::FileMissing, reason))
    }

    fn flush_problem(&self) -> Option<(ProblemKind, String)> {
        let info = &self.measure.as_ref()?.info;
        let is_missing = !info.can_flush && !info.read_only && !self.wanted.read_only;
        is_missing.then(|| (ProblemKind::FlushMissing, CANNOT_FLUSH.to_owned()))
    }

    fn cache_problems(&self, inner: &Inner) -> Vec<(ProblemKind, String)> {
        let mut problems = Vec::new();
        let view = self.view_without_clones(inner);
        let Some(cache) = view.cache else {
            let refused = inner.caches_refused.get(&self.wanted.name);
            let reason =
                |why: &String| format!("the cache that hob.toml defines could not be created: {why}");
            problems.extend(refused.map(|why| (ProblemKind::CacheDegraded, reason(why))));
            return problems;
        };
        let has_lost_journal = self.cache_reason.as_deref() == Some(JOURNAL_LOST);
        if has_lost_journal {
            problems.push((ProblemKind::JournalLost, JOURNAL_LOST.to_owned()));
        }
        if let Some(dirty) = cache.dirty {
            if dirty.lost.bytes() > 0 {
                let reason = format!("{} of dirty data cannot be read from flash", dirty.lost.human());
                problems.push((ProblemKind::DirtyLost, reason));
            }
            let stuck = self.watch.stuck(self.pushes(), Instant::now());
            let with_waits = |why: String| match cache.ordered {
                true => format!("{why}; {ORDERED_WAITS}"),
                false => why,
            };
            problems.extend(stuck.map(|why| (ProblemKind::DestageStuck, with_waits(why))));
        }
        let mismatches = self.mismatches(Instant::now());
        problems.extend(mismatches.map(|reason| (ProblemKind::ChecksumMismatch, reason)));
        // While the cache is changed or recovered, its reason describes the progress. A hung device
        // is a separate problem.
        let is_settled = matches!(cache.state, CacheState::None | CacheState::Active | CacheState::Fenced);
        if let Some(reason) = cache.reason.filter(|_| is_settled && !has_lost_journal) {
            problems.push((ProblemKind::CacheDegraded, reason));
        }
        problems
    }
}

/// Returns a histogram's buckets. Their bounds are fixed, so that a client can subtract an earlier
/// answer from a later one.
fn raw_buckets(latency: &Histogram) -> Vec<Bucket> {
    latency.buckets().map(|(up_to_ns, count)| Bucket { up_to_ns, count }).collect()
}

fn load(disk: &Disk, stats: Option<&DiskStats>) -> DiskLoad {
    let (name, backing_state) = (disk.name.clone(), disk.backing_state.clone());
    let mut load = DiskLoad { disk: name, state: disk.state, backing_state, ..DiskLoad::default() };
    if let Some(cache) = &disk.cache {
        (load.cache, load.mode) = (cache.state, cache.mode.clone());
    }
    let Some(stats) = stats else { return load };
    let latency = stats.latency();
    let block_bytes = disk.cache.as_ref().map_or(0, |cache| cache.block_size.bytes());
    DiskLoad {
        is_counted: true,
        elapsed_ns: stats.elapsed_ns,
        requests: stats.requests(),
        reads: stats.reads,
        writes: stats.writes,
        read_bytes: stats.read_bytes,
        write_bytes: stats.write_bytes,
        read_hits: stats.read_hits,
        memory_hits: stats.memory_hits,
        in_flight: stats.in_flight,
        latency_sum_ns: latency.sum_ns(),
        latency: raw_buckets(&latency),
        cache_bytes: stats.blocks * block_bytes,
        used_bytes: stats.blocks_cached * block_bytes,
        dirty_bytes: stats.sectors_dirty * SECTOR_BYTES,
        is_draining: stats.draining,
        ..load
    }
}
