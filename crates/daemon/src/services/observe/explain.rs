//! Explains why a disk's I/O is, or is not, served from flash. The sentences are made from the
//! disk's state and statistics.

use std::cmp::Ordering;

use hob_control::{
    BackingState, Cache, CacheCandidate, CacheChoice, CacheFlashWrites, CacheState, Dirty, Disk, DiskState,
    DiskStats, Explanation, RecentReads, Share, SharedCache, Size,
};
use hob_engine::command::Mode;
use hob_engine::outcome::{OUTCOMES, Outcome};
use hob_engine::preset::MODES;

use super::Observe;
use super::figures::percent;
use crate::api_error::{ApiError, ErrorKind, Result};

/// A cache with data in less than this percentage of its blocks is still warming.
const FULL_PERCENT: f64 = 95.0;

/// A full cache with a smaller percentage of hits than this is reported as too small.
const LOW_HITS_PERCENT: f64 = 50.0;

/// A cache whose blocks have a smaller percentage of valid sectors than this is reported as having
/// too large blocks.
const SPARSE_PERCENT: f64 = 50.0;

/// A cache that is not full is still warming under two conditions: more than this percentage of the
/// recent reads are first reads of their data, and more than this percentage of the latest reads
/// miss.
const FIRST_PERCENT: f64 = 5.0;

/// Difference between the expected and the measured hit ratio, percentage points. hob explains
/// larger differences.
const FAR_OFF: f64 = 10.0;

/// Text that tells an operator how a guest is affected if a cache with ordered destaging cannot
/// write dirty data to the backing.
pub(super) const ORDERED_WAITS: &str = "because destaging is ordered, a guest's write waits for the backing if it changes data from \
                                        before the guest's last FLUSH";

/// Minimum number of requests before the explanation says whether a cache works well.
const REQUESTS_TELLING: u64 = 1000;

impl Observe {
    /// Explains why a disk's I/O is, or is not, served from flash.
    pub(crate) async fn explain(&self, name: &str) -> Result<Explanation> {
        let disk = {
            let inner = self.registry.inner();
            inner.disk(name)?.view(&inner)
        };
        let stats = match self.stats(name).await {
            Ok(stats) => Some(stats),
            // An offline disk has no statistics, and a hung shard does not answer the query.
            Err(ApiError { kind: ErrorKind::Conflict | ErrorKind::Busy, .. }) => None,
            Err(error) => return Err(error),
        };
        Ok(explain(&disk, stats.as_ref()))
    }
}

/// Builds the sentences from the state and the statistics of a disk.
fn explain(disk: &Disk, stats: Option<&DiskStats>) -> Explanation {
    let mut explanation = Explanation {
        disk: disk.name.clone(),
        cache: disk.cache.as_ref().map_or(CacheState::None, |cache| cache.state),
        ..Explanation::default()
    };
    if disk.state != DiskState::Online {
        let reason = disk.reason.as_deref().unwrap_or("it is being removed");
        explanation.sentences.push(format!("{} is not served: {reason}.", disk.name));
        return explanation;
    }
    explanation.sentences.extend(about_backing(disk));
    let Some(stats) = stats else {
        let sentence =
            format!("The shard of {} does not answer, so its statistics are not available now.", disk.name);
        explanation.sentences.push(sentence);
        return explanation;
    };
    explanation.cache = stats.cache;
    explanation.sentences.extend(about_cache(disk, stats));
    explanation.requests = stats.requests;
    let count = |outcome: Outcome| stats.outcomes.get(outcome as usize).map_or(0, |row| row.count);
    let from_memory = count(Outcome::HitMemory) + count(Outcome::HitPrefetched);
    explanation.served_from_flash_percent = percent(count(Outcome::Hit), stats.requests);
    explanation.served_from_memory_percent = percent(from_memory, stats.requests);
    explanation.not_served = not_served(stats);
    if stats.requests == 0 {
        explanation.sentences.push("There have been no requests yet.".to_owned());
    } else {
        explanation.sentences.push(format!(
            "Of {} requests, {:.1} % {}; of the reads alone, {:.1} %.",
            stats.requests,
            explanation.served_from_flash_percent,
            Outcome::Hit.info().sentence,
            stats.hit_percent
        ));
        if stats.recent.reads > 0 && stats.recent.reads < stats.reads {
            explanation.sentences.push(format!(
                "Of the last {} reads, {:.1} % were served from flash or memory.",
                stats.recent.reads, stats.recent.hit_percent
            ));
        }
        if from_memory > 0 {
            explanation.sentences.push(format!(
                "{:.1} % {}; of the reads alone, {:.1} %.",
                explanation.served_from_memory_percent,
                Outcome::HitMemory.info().sentence,
                stats.memory_hit_percent
            ));
        }
    }
    explanation
}

/// Returns a sentence about a backing that is slow or not connected.
fn about_backing(disk: &Disk) -> Option<String> {
    let state = disk.backing_state.as_ref().filter(|state| **state != BackingState::Connected)?;
    let hits = if disk.cache.is_some() { "; reads of cached data are served meanwhile" } else { "" };
    let verb = if matches!(state, BackingState::Reconnecting { .. }) { "is " } else { "" };
    Some(format!("The backing {} {verb}{}{hits}.", disk.backing, state.sentence()))
}

fn not_served(stats: &DiskStats) -> Vec<Share> {
    let shares = stats
        .outcomes
        .iter()
        .zip(OUTCOMES)
        .filter(|(outcome, row)| outcome.count > 0 && row.class != Outcome::Hit.info().class);
    let mut shares: Vec<Share> = shares
        .map(|(outcome, row)| Share {
            class: outcome.class.clone(),
            reason: outcome.reason.clone(),
            count: outcome.count,
            percent: outcome.percent,
            sentence: format!("{} ({}) {}.", share(outcome.percent), outcome.count, row.sentence),
        })
        .collect();
    shares.sort_by_key(|share| std::cmp::Reverse(share.count));
    shares
}

fn share(percent: f64) -> String {
    if percent < 0.05 { "Less than 0.1 %".to_owned() } else { format!("{percent:.1} %") }
}

/// Returns sentences about the activity of the cache, and whether its size fits the workload.
fn about_cache(disk: &Disk, stats: &DiskStats) -> Vec<String> {
    let name = &disk.name;
    let Some(cache) = &disk.cache else {
        if let Some(parent) = disk.parent.as_ref().filter(|_| disk.parent_reason.is_none()) {
            return vec![format!(
                "{name} has no cache of its own; the disk {parent} serves the data of its parent, \
                 with its own cache if it has one; 'hob explain {parent}' describes that disk."
            )];
        }
        return vec![format!(
            "{name} has no cache, so all of its I/O goes to the backing; 'hob cache enable {name}' adds a cache."
        )];
    };
    let mut sentences = Vec::new();
    match stats.cache {
        CacheState::None => {
            let reason = cache.reason.clone().unwrap_or_else(|| "it is being created".to_owned());
            sentences.push(format!("{name} has none of its configured cache: {reason}."));
        }
        CacheState::Changing => {
            sentences.push(
                "The cache is being changed; requests go to the backing until the change is complete."
                    .to_owned(),
            );
        }
        CacheState::Recovering => {
            let progress = cache.reason.clone().unwrap_or_else(|| "its journal is being read".to_owned());
            sentences.push(format!(
                "The cache is being recovered after the restart: {progress}. Until the recovery ends, reads go to the \
                 backing. A read waits if only flash may have its data, and writes may wait too."
            ));
        }
        CacheState::Stalled => sentences.push(format!(
            "The flash of the cache does not answer in time; until it does, requests that need it wait, and other \
             requests go to the backing. 'hob pool show {}' shows which device.",
            cache.pool
        )),
        CacheState::Fenced => sentences.push(format!(
            "All flash of the cache is fenced after repeated errors; requests go to the backing. \
             'hob pool show {pool}' shows which device, and whether hob uses it again by itself; \
             'hob pool remove-device {pool} DEVICE' removes it.",
            pool = cache.pool
        )),
        CacheState::Active => sentences.extend(about_fill(stats, cache)),
    }
    sentences.extend(cache.shared.as_ref().map(about_share));
    sentences.extend(stats.choice.as_ref().map(|choice| about_choice(choice, stats)).unwrap_or_default());
    sentences.extend(cache.flash_writes.as_ref().map(|part| about_budget(part, &cache.pool)));
    sentences.extend(about_extra(cache, stats));
    sentences.extend(about_verification(stats));
    sentences.extend(about_writes(cache, stats));
    if stats.cache != CacheState::None
        && let Some(reason) = &cache.reason
    {
        sentences.push(format!("The cache is degraded: {reason}."));
    }
    sentences
}

/// Describes the size that hob has chosen for a shared cache.
fn about_share(shared: &SharedCache) -> String {
    let SharedCache { size, target, reads_per_second, more_hits_per_second, gained_hits_per_second, .. } =
        shared;
    let towards = match target.cmp(size) {
        Ordering::Equal => String::new(),
        _ if target.bytes() == 0 => String::new(),
        _ => format!(" and moves it towards {}", target.human()),
    };
    format!(
        "The cache shares its pool: hob has chosen {} for {reads_per_second} reads per second{towards}. An equal part of the shared \
         flash would give {} hits per second {}; 1/16 more flash would give {more_hits_per_second} more.",
        size.human(),
        gained_hits_per_second.unsigned_abs(),
        if *gained_hits_per_second < 0 { "more" } else { "fewer" },
    )
}

/// Describes the policy and admission that hob has chosen, and the alternatives with the hits and
/// flash writes that hob expects of them.
fn about_choice(choice: &CacheChoice, stats: &DiskStats) -> Vec<String> {
    let is_current = |one: &&CacheCandidate| one.policy == choice.policy && one.admission == choice.admission;
    let since = match choice.phase.as_str() {
        "filling" => "while the cache fills",
        "changed" => "a short time ago",
        _ => "for this workload",
    };
    let CacheChoice { policy, admission, .. } = choice;
    let mut sentences = vec![format!("hob has chosen policy {policy} and admission {admission} {since}.")];
    if choice.phase == "filling" {
        // As long as the cache has free space, the simulated caches have free space too. So their
        // results say nothing about full caches.
        sentences.push(format!(
            "The expected hits of this policy and of the alternatives are not known yet. hob compares them after the cache \
             has been full for the first time; now {:.0} % of its blocks have data.",
            percent(stats.blocks_cached, stats.blocks)
        ));
    } else if let Some(current) = choice.candidates.iter().find(is_current) {
        let alternative = |one: &CacheCandidate| {
            let CacheCandidate { policy, admission, hit_percent, flash_write_percent } = one;
            format!("{policy} {admission}: {hit_percent:.1} % and {flash_write_percent:.0} bytes")
        };
        let others: Vec<String> =
            choice.candidates.iter().filter(|one| !is_current(one)).map(alternative).collect();
        sentences.push(format!(
            "hob simulates a sample of the latest accesses, to about 16 times as many blocks as the cache has. It expects \
             {:.1} % hits, and {:.0} bytes written to flash per 100 bytes of requests. The alternatives: {}.",
            current.hit_percent,
            current.flash_write_percent,
            others.join("; ")
        ));
        sentences.extend(about_difference(choice, current.hit_percent, stats));
    }
    sentences
}

/// Explains why the expected hit ratio differs much from the hit ratio of the recent reads.
fn about_difference(choice: &CacheChoice, expected: f64, stats: &DiskStats) -> Option<String> {
    let RecentReads { reads, hit_percent, latest_reads, latest_hit_percent, .. } = stats.recent;
    let is_far = |measured: f64| (expected - measured).abs() > FAR_OFF;
    if reads < REQUESTS_TELLING || !is_far(hit_percent) {
        return None;
    }
    let why = if latest_reads > 0 && !is_far(latest_hit_percent) {
        format!(
            "they include older reads; of the latest {latest_reads} reads, {latest_hit_percent:.1} % were hits"
        )
    } else if choice.phase == "changed" {
        "the cache still has the blocks of its previous policy and admission".to_owned()
    } else {
        "the simulation covers more accesses than these reads, so it follows a change of the workload later"
            .to_owned()
    };
    Some(format!("The {hit_percent:.1} % of the last {reads} reads differ from this, because {why}."))
}

/// Returns a sentence about the cache's part of a flash write budget.
fn about_budget(part: &CacheFlashWrites, pool: &str) -> String {
    let CacheFlashWrites { part, saved, pressure_percent, written, refused } = part;
    let effect = match pressure_percent {
        0 => "it does not limit the cache now".to_owned(),
        100 => "it is used up, so copies of clean data are not written to flash".to_owned(),
        percent => {
            format!(
                "little is left, so admission is stricter, by {percent} % (100 %: no copies of clean data)"
            )
        }
    };
    let debt = if *saved < 0 { "a debt of " } else { "" };
    format!(
        "Its part of the flash write budget of pool {pool} is {} a day, of which {debt}{} is left: {effect}. The cache \
         wrote {} to flash, and the budget kept {} from flash.",
        part.human(),
        Size(saved.unsigned_abs()).human(),
        written.human(),
        refused.human(),
    )
}

/// Describes the data that misses bring into the cache in addition to what guests read.
fn about_extra(cache: &Cache, stats: &DiskStats) -> Option<String> {
    (stats.extra_read_bytes > 0).then(|| {
        let (read, uses) = (Size(stats.extra_read_bytes).human(), stats.extra_blocks_used);
        format!(
            "In addition to the data that guests read, misses brought {read} into the cache (fill {}). Guests used \
             these blocks {uses} times.",
            cache.fill
        )
    })
}

/// Describes the progress of verifying the cache against the backing.
fn about_verification(stats: &DiskStats) -> Option<String> {
    let (left, all) = (stats.unverified_bytes, stats.to_verify_bytes);
    let percent = 100 - (u128::from(left) * 100).div_ceil(u128::from(all.max(left).max(1)));
    (left > 0).then(|| {
        format!(
            "The backing may have changed during the restart, so hob compares the cache with it: {percent} % is done. \
             Reads of the remaining {} go to the backing.",
            Size(left).human()
        )
    })
}

/// Describes the write mode and the amount of dirty data.
fn about_writes(cache: &Cache, stats: &DiskStats) -> Option<String> {
    if stats.cache == CacheState::None || stats.mode.is_empty() {
        return None;
    }
    let dirty = Size(stats.dirty_bytes).human();
    let behind = match (&cache.dirty, stats.dirty_bytes) {
        (_, 0) => None,
        (Some(Dirty { why: Some(why), .. }), _) if cache.ordered => {
            Some(format!("{dirty} are not on the backing yet; {why}; {ORDERED_WAITS}"))
        }
        (Some(Dirty { why: Some(why), .. }), _) => Some(format!("{dirty} are not on the backing yet; {why}")),
        (Some(Dirty { draining: true, eta_seconds: Some(seconds), .. }), _) => Some(format!(
            "{dirty} are not on the backing yet; the drain in progress ends in about {seconds} s"
        )),
        (Some(Dirty { draining: true, .. }), _) => {
            Some(format!("{dirty} are not on the backing yet; a drain is in progress"))
        }
        _ => Some(format!("{dirty} are not on the backing yet")),
    };
    let mode = MODES.iter().find(|row| row.name == stats.mode)?;
    Some(match (mode.value, behind) {
        (Mode::WriteThrough, None) => return None,
        (_, None) => format!("The cache is in mode {}: {}.", mode.name, mode.summary),
        (_, Some(behind)) => format!("The cache is in mode {}: {}. {behind}.", mode.name, mode.summary),
    })
}

/// Returns why a cache that is not full is warm nevertheless: few of the recent reads were first
/// reads of their data, or few of the latest reads missed. The recent reads cover a longer time
/// than the latest reads, so they include the reads of a warm-up for longer.
fn warm_because(stats: &DiskStats) -> Option<String> {
    let recent = &stats.recent;
    if recent.reads >= REQUESTS_TELLING && recent.first_percent <= FIRST_PERCENT {
        Some("few recent reads asked for new data".to_owned())
    } else if recent.latest_reads > 0 && recent.latest_hit_percent >= 100.0 - FIRST_PERCENT {
        let RecentReads { latest_reads, latest_hit_percent, .. } = recent;
        Some(format!("{latest_hit_percent:.1} % of the latest {latest_reads} reads were hits"))
    } else {
        None
    }
}

/// Describes whether the cache is warming, full, too small, or has too large blocks.
fn about_fill(stats: &DiskStats, cache: &Cache) -> Vec<String> {
    let mut sentences = Vec::new();
    let size = cache.size;
    let filled = percent(stats.blocks_cached, stats.blocks);
    let per_eviction = stats.vsphere.evict_avg_num_blocks_per_op;
    let is_passed_through = MODES.iter().any(|row| row.value == Mode::PassThrough && row.name == stats.mode);
    if is_passed_through && stats.blocks_cached > 0 {
        sentences.push(format!(
            "{filled:.0} % of the {} blocks of the cache of {} have data, which is served again in another mode.",
            stats.blocks,
            size.human()
        ));
    } else if stats.blocks_cached == 0 {
        sentences.push(format!("The cache of {} is empty.", size.human()));
    } else if let Some(why) = warm_because(stats).filter(|_| filled < FULL_PERCENT) {
        sentences.push(format!(
            "The cache of {} is warm: {why}, and {filled:.0} % of its {} blocks have data.",
            size.human(),
            stats.blocks
        ));
    } else if filled < FULL_PERCENT {
        sentences.push(format!(
            "The cache of {} is warming: {filled:.0} % of its {} blocks have data.",
            size.human(),
            stats.blocks
        ));
    } else if stats.evictions.operations == 0 {
        sentences.push(format!("The cache of {} is full; no block has been evicted yet.", size.human()));
    } else {
        sentences.push(format!(
            "The cache of {} is full: {} blocks were evicted, {per_eviction:.1} at a time.",
            size.human(),
            stats.evictions.blocks
        ));
        if stats.hit_percent + stats.memory_hit_percent < LOW_HITS_PERCENT && stats.reads >= REQUESTS_TELLING
        {
            let (disk, pool, twice) = (&stats.disk, &cache.pool, Size(size.bytes().saturating_mul(2)));
            // A fixed size would end the sharing.
            let advice = match &cache.shared {
                None => format!("try 'hob cache resize {disk} {twice}'"),
                Some(_) => format!(
                    "it shares its pool, so raise its minimum ('hob cache set {disk} --min {twice}') or its --shares, \
                     or add flash ('hob pool add-device {pool} DEVICE')"
                ),
            };
            sentences.push(format!(
                "The cache is probably too small for the workload: it is full, and only {:.0} % of the reads hit; {advice}.",
                stats.hit_percent,
            ));
        }
    }
    let sectors = stats.blocks_cached * (stats.block_size.bytes() / hob_engine::units::SECTOR_BYTES);
    let valid = percent(stats.sectors_valid, sectors);
    if sectors > 0 && valid < SPARSE_PERCENT && stats.requests >= REQUESTS_TELLING {
        sentences.push(format!(
            "Its blocks of {} are only {valid:.0} % filled, because most requests are smaller. With smaller blocks \
             the cache would have more data.",
            stats.block_size
        ));
    }
    sentences
}

#[cfg(test)]
mod tests;
