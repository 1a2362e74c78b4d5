//! Chooses the policy and admission of a cache whose settings say `auto`.
//!
//! Each candidate, a combination of a policy and an admission, runs in a *miniature*: a simulated
//! cache of at most [`MINIATURE_BLOCKS`] blocks beside the real one. A miniature gets only the
//! requests to a sample of the disk. The sample is smaller than the disk by the same factor by
//! which the miniature is smaller than the cache (Waldspurger, Saemundsson, Ahmad, Park: "Cache
//! modeling and optimization using miniature simulations", USENIX ATC 2017). The unit of the sample
//! is a region of 64 KiB, so that most requests are counted whole. A request of several blocks hits
//! only if all its blocks hit.
//!
//! The *choice* is the candidate that the real cache uses now. In the time in which guests access
//! as many blocks as the cache holds, the candidates are compared several times. A change of the
//! choice costs at most as many hits as the cache has blocks, because the cache still holds the
//! blocks that the old choice kept. So a candidate replaces the choice only if its lead (its
//! additional hits) since the choice was made is at least its *price*: [`PRICE_PERCENT`] of the
//! hits that the change can cost. A candidate that differs from the choice only in the treatment of
//! writes holds mostly the same blocks, so its price is lower ([`WRITES_PRICE_PERCENT`];
//! docs/decisions/0061-write-admission.md). After a sudden drop of the hit ratio ([`DROP_PPM`]) the
//! contents are worth little, and the price is lower for a while ([`PRICE_AFTER_DROP_PERCENT`]). A
//! candidate can also replace the choice to reduce flash writes. For this it must write less than
//! [`WRITES_PERCENT`] of the sectors that the choice writes, and its hit ratio must be at most one
//! percentage point ([`EQUAL_PPM`]) below the highest hit ratio of all candidates.
//!
//! A flash write budget that is running out takes precedence over these rules: a candidate can be
//! chosen only if the cache's part of the budget covers its flash writes. With a budget, candidates
//! with a stricter admission ([`BUDGET_CANDIDATES`]) are compared too
//! (docs/decisions/0050-flash-write-budget.md).
//!
//! Memory use: at most 400 KiB for each cache, independent of its size; 600 KiB with a budget.

mod budget;
#[cfg(test)]
mod tests;

use std::fmt;

use budget::ChoiceBudget;

use crate::admission::streams::Streams;
use crate::admission::{Admission, AdmissionEffect, Popularity};
use crate::command::Mode;
use crate::granularity::Fill;
use crate::index::hash;
use crate::policy::PolicyKind;
use crate::simulate::{CacheSim, SimConfig};
use crate::units::{BlockNo, SECTOR_BYTES};

/// Maximum number of blocks of a miniature cache.
const MINIATURE_BLOCKS: u32 = 2048;
/// Base-2 logarithm of the number of sectors in a region, the unit of the sample.
const REGION_SHIFT: u32 = 4;
/// Number of comparisons of the candidates during as many block accesses as a miniature has blocks.
const COMPARISONS: u64 = 8;
/// At each comparison, the counts of a window lose 1/2ⁿ of their weight, where *n* is this
/// constant. So a window covers about 16 times as many block accesses as the cache has blocks.
const WINDOW_SHIFT: u32 = 7;
/// Minimum lead of a candidate (a policy and an admission) that replaces the choice, in hits, as a
/// percentage of the number of reads whose data would fill the cache. With 50, the choice follows
/// each phase of a loop, which cost 10 percentage points of the hit ratio on a real trace. With
/// 150, the choice changes too late after a change of the workload.
const PRICE_PERCENT: i64 = 100;
/// Minimum lead, in hits, of a candidate that differs from the choice only in the treatment of
/// writes. The value is a percentage of the number of reads in the time in which guests access as
/// many sectors as the cache holds.
const WRITES_PRICE_PERCENT: i64 = 25;
/// Base-2 logarithm of the number of comparisons that the recent hit ratio covers. In this time,
/// half as many blocks are accessed as the cache holds.
const RECENT_SHIFT: u32 = 2;
/// Minimum drop of the choice's hit ratio that indicates a new phase of the workload, millionths:
/// the ratio over the whole window minus the recent ratio.
const DROP_PPM: i64 = 200_000;
/// Minimum lead of a candidate after a drop of the hit ratio by more than [`DROP_PPM`], as a
/// percentage of the number of reads whose data would fill the cache. This minimum applies for
/// `COMPARISONS_AFTER_DROP` comparisons.
const PRICE_AFTER_DROP_PERCENT: i64 = 10;
const COMPARISONS_AFTER_DROP: u64 = 2 * COMPARISONS;
/// Absolute minimum of the lead, in hits, of a candidate that replaces the choice. A lead of a few
/// hits may be chance.
const PRICE_HITS_MIN: i64 = 8;
/// Maximum recorded lag of a candidate behind the choice, in hits, as a percentage of the number of
/// reads whose data would fill the cache. A larger lag is reduced to this maximum, so that a
/// candidate that becomes better can catch up.
const BEHIND_PERCENT_MAX: i64 = 50;
/// Maximum difference between the highest hit ratio of all candidates and the hit ratio of a
/// candidate that replaces the choice because it writes less, millionths.
const EQUAL_PPM: i64 = 10_000;
/// Maximum flash writes of a candidate that replaces the choice because it writes less, percent of
/// the current flash writes.
const WRITES_PERCENT: i64 = 80;
/// Minimum number of comparisons since the last change of the choice before a candidate with fewer
/// flash writes replaces the choice.
const COMPARISONS_TO_SPARE: u64 = 4 * COMPARISONS;
/// Maximum number of frames of a cache whose policy may change. To bring more frames into a new
/// eviction order would stop the shard for too long.
const FRAMES_MAX_TO_REORDER: u32 = 1 << 20;

/// The candidates: `s3-fifo` with or without ghost admission, and with or without admission of
/// writes. The first candidate is the choice until the miniatures have results. All candidates have
/// the same policy, so that a change of the choice keeps the eviction order.
const CANDIDATES: &[(&str, &str)] = &[
    ("s3-fifo", "ghost+not-sequential:128K+while-filling:100%+reads-only"),
    ("s3-fifo", "ghost+not-sequential:128K+while-filling:100%"),
    ("s3-fifo", "always+reads-only"),
    ("s3-fifo", "always"),
];

/// Further candidates of a cache with a flash write budget.
const BUDGET_CANDIDATES: &[(&str, &str)] = &[
    ("s3-fifo", "nth-access:3+not-sequential:128K+reads-only"),
    ("s3-fifo", "nth-access:5+not-sequential:128K+reads-only"),
];

/// The policies among which `auto` chooses if the settings fix the admission.
const POLICIES: &[&str] = &["s3-fifo", "wtinylfu", "lru"];

/// A policy and an admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Combination {
    /// The policy, never `auto`.
    pub policy: PolicyKind,
    /// The admission, never `auto`.
    pub admission: Admission,
}

impl fmt::Display for Combination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.policy.info().name, self.admission)
    }
}

/// Effect of a request on the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheAccess {
    Read,
    /// A write of which the cache may keep a copy.
    Write,
    /// A write that makes cached data dirty.
    WriteBack,
    /// A write that only invalidates cached data.
    WriteAround,
}

impl CacheAccess {
    /// Returns the effect of a write in a mode.
    pub(crate) fn of_write(mode: Mode) -> CacheAccess {
        match mode {
            Mode::WriteThrough => CacheAccess::Write,
            Mode::WriteBack => CacheAccess::WriteBack,
            Mode::WriteAround | Mode::ReadOnlyCache | Mode::PassThrough => CacheAccess::WriteAround,
        }
    }
}

/// State of a cache whose policy or admission is `auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// The cache has not been full yet.
    #[default]
    Filling,
    /// The choice is the first one, or as many blocks as the cache holds were accessed since the
    /// choice was made.
    Warm,
    /// The choice changed recently, so the cache still holds blocks that the previous choice kept.
    Changed,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Filling => "filling",
            Phase::Warm => "warm",
            Phase::Changed => "changed",
        })
    }
}

/// Results of a candidate, over about 16 times as many block accesses as the cache has blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alternative {
    /// The candidate.
    pub combination: Combination,
    /// Expected hit ratio of reads, 0 to 1.
    pub hit_ratio: f64,
    /// Expected bytes written to flash per byte that guests read or write.
    pub flash_write_ratio: f64,
}

/// The combination that an automatic cache uses, and the reasons.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Combination in use.
    pub current: Combination,
    /// Whether the cache has been full, and whether the current choice is new.
    pub phase: Phase,
    /// Number of changes of the choice.
    pub changes: u64,
    /// All candidates, including the current choice.
    pub alternatives: Vec<Alternative>,
}

/// Sums over a window of requests, with decaying weight.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    /// Number of comparisons.
    comparisons: i64,
    reads: i64,
    hits: i64,
    sectors: i64,
    sectors_read: i64,
    sectors_written: i64,
}

impl Window {
    /// Fixed-point weight of one event, so that sums decay without floating-point arithmetic.
    const UNIT: i64 = 256;

    fn add(&mut self, since: &Window, shift: u32) {
        let age = |sum: &mut i64, new: i64| *sum += new * Self::UNIT - (*sum >> shift);
        age(&mut self.comparisons, since.comparisons);
        age(&mut self.reads, since.reads);
        age(&mut self.hits, since.hits);
        age(&mut self.sectors, since.sectors);
        age(&mut self.sectors_read, since.sectors_read);
        age(&mut self.sectors_written, since.sectors_written);
    }

    /// Returns the mean number of blocks of a read.
    fn blocks_read(&self, block_shift: u32) -> i64 {
        ((self.sectors_read / self.reads.max(1)) >> block_shift).max(1)
    }

    /// Returns the hits per million reads.
    fn hit_ppm(&self) -> i64 {
        self.hits * 1_000_000 / self.reads.max(1)
    }
}

struct Miniature {
    combination: Combination,
    cache: CacheSim,
    /// Counts of the simulated cache at the last comparison.
    seen: Window,
    window: Window,
    /// Results of the most recent comparisons only ([`RECENT_SHIFT`]).
    recent: Window,
    /// Lead in hits over the current choice since the choice was made. A negative number is a lag,
    /// which [`BEHIND_PERCENT_MAX`] limits.
    lead: i64,
}

impl Miniature {
    /// Creates an empty miniature. `admits_dirty` is true if admission applies to clean data only.
    fn new(blocks: u32, block_shift: u32, combination: Combination, admits_dirty: bool) -> Miniature {
        let config = SimConfig {
            blocks,
            block_bytes: (SECTOR_BYTES as u32) << block_shift,
            policy: combination.policy,
            admission: combination.admission,
            fill: Fill::Sectors,
        };
        let Ok(mut cache) = CacheSim::new(&config) else {
            panic!("a miniature is smaller than the real cache");
        };
        if admits_dirty {
            cache.admit_dirty();
        }
        let empty = Window::default();
        Miniature { combination, cache, seen: empty, window: empty, recent: empty, lead: 0 }
    }

    fn counts(&self) -> Window {
        let stats = self.cache.stats();
        Window {
            comparisons: self.seen.comparisons + 1,
            reads: stats.reads as i64,
            hits: stats.read_hits as i64,
            sectors: ((stats.read_bytes + stats.write_bytes) / SECTOR_BYTES) as i64,
            sectors_read: (stats.read_bytes / SECTOR_BYTES) as i64,
            sectors_written: (stats.flash_write_bytes / SECTOR_BYTES) as i64,
        }
    }

    /// Adds the counts since the previous call of this function to the windows. Returns the number
    /// of hits since that call.
    fn compare(&mut self) -> i64 {
        let now = self.counts();
        let since = Window {
            comparisons: 1,
            reads: now.reads - self.seen.reads,
            hits: now.hits - self.seen.hits,
            sectors: now.sectors - self.seen.sectors,
            sectors_read: now.sectors_read - self.seen.sectors_read,
            sectors_written: now.sectors_written - self.seen.sectors_written,
        };
        self.window.add(&since, WINDOW_SHIFT);
        self.recent.add(&since, RECENT_SHIFT);
        self.seen = now;
        since.hits
    }
}

/// The miniature caches of one cache, and the current choice.
pub(crate) struct Chooser {
    miniatures: Vec<Miniature>,
    /// Number of blocks of each miniature.
    blocks: i64,
    block_shift: u32,
    current: usize,
    /// False once the cache has been full.
    is_filling: bool,
    changes: u64,
    streams: Streams,
    /// A region is sampled if the upper half of its hash is at most this threshold.
    threshold: u32,
    region_shift: u32,
    /// Number of sectors that requests access until the candidates (combinations of policy and
    /// admission) are compared again.
    sectors_left: u64,
    sectors_per_comparison: u64,
    /// Number of comparisons since the choice was made.
    comparisons: u64,
    /// True from a drop of the hit ratio until the ratio has recovered.
    has_dropped: bool,
    /// Number of further comparisons for which the price after a drop applies.
    comparisons_after_drop: u64,
    /// The cache's part of a flash write budget.
    budget: Option<ChoiceBudget>,
    /// True if the settings let the chooser select the admission.
    chooses_admission: bool,
}

impl Chooser {
    /// Creates the chooser of a cache, or returns `None` if neither policy nor admission is `auto`.
    pub(crate) fn new(
        frames: u32,
        block_shift: u32,
        policy: PolicyKind,
        admission: Admission,
    ) -> Option<Chooser> {
        let combinations = combinations(frames, policy, admission)?;
        let blocks = frames.min(MINIATURE_BLOCKS);
        let chooses_admission = admission.popularity == Popularity::Auto;
        let miniature = |combination| Miniature::new(blocks, block_shift, combination, chooses_admission);
        let sectors_per_comparison = ((u64::from(blocks) << block_shift) / COMPARISONS).max(1);
        Some(Chooser {
            miniatures: combinations.into_iter().map(miniature).collect(),
            blocks: i64::from(blocks),
            block_shift,
            current: 0,
            is_filling: true,
            changes: 0,
            streams: Streams::default(),
            threshold: (u64::from(u32::MAX) * u64::from(blocks) / u64::from(frames)) as u32,
            region_shift: REGION_SHIFT.max(block_shift),
            sectors_left: sectors_per_comparison,
            sectors_per_comparison,
            comparisons: 0,
            has_dropped: false,
            comparisons_after_drop: 0,
            budget: None,
            chooses_admission,
        })
    }

    /// Makes this combination the first choice if it is a candidate. Otherwise the first candidate
    /// stays the choice.
    pub(crate) fn start_with(&mut self, combination: Combination) {
        if let Some(at) = self.miniatures.iter().position(|mini| mini.combination == combination) {
            self.current = at;
        }
    }

    pub(crate) fn current(&self) -> Combination {
        self.miniatures[self.current].combination
    }

    /// Records a request for the disk's sectors `first..end`. Returns the length of the request's
    /// sequential run, bytes.
    #[inline]
    pub(crate) fn observe(&mut self, first: u64, end: u64, access: CacheAccess) -> u64 {
        let run_bytes = self.streams.observe(first, end) * SECTOR_BYTES;
        let mut at = first;
        while at < end {
            let region = at >> self.region_shift;
            let stop = end.min((region + 1) << self.region_shift);
            if (hash(BlockNo(region as u32)) >> 32) as u32 <= self.threshold {
                self.simulate(at, stop, run_bytes, access);
            }
            at = stop;
        }
        run_bytes
    }

    #[cold]
    fn simulate(&mut self, first: u64, end: u64, run_bytes: u64, access: CacheAccess) {
        for mini in &mut self.miniatures {
            match access {
                CacheAccess::Read => mini.cache.read_of_run(first, end, run_bytes),
                CacheAccess::Write => {
                    mini.cache.write_of_run(first, end, run_bytes, AdmissionEffect::CleanWrite)
                }
                CacheAccess::WriteBack => {
                    mini.cache.write_of_run(first, end, run_bytes, AdmissionEffect::Dirty)
                }
                CacheAccess::WriteAround => mini.cache.write_around(first, end),
            }
        }
        self.sectors_left = self.sectors_left.saturating_sub(end - first);
    }

    /// Returns true if the candidates must be compared now.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.sectors_left == 0
    }

    /// Compares the candidates. Returns the new choice if the choice changed. `has_room` is true if
    /// the real cache has free frames.
    pub(crate) fn compare(&mut self, has_room: bool) -> Option<Combination> {
        self.sectors_left = self.sectors_per_comparison;
        self.comparisons += 1;
        self.is_filling &= has_room;
        let lead_of_choice = self.miniatures[self.current].lead;
        for mini in &mut self.miniatures {
            mini.lead += mini.compare();
        }
        let hits_of_choice = self.miniatures[self.current].lead - lead_of_choice;
        self.note_drop();
        let reads_to_fill = self.reads_to_fill();
        for mini in &mut self.miniatures {
            let behind = -reads_to_fill * BEHIND_PERCENT_MAX / 100;
            mini.lead = (mini.lead - hits_of_choice).max(behind);
        }
        let affordable = self.affordable();
        let beyond_price = |mini: &Miniature| mini.lead - self.price(&mini.combination);
        let candidates =
            self.miniatures.iter().map(beyond_price).enumerate().filter(|(at, _)| affordable[*at]);
        let (leader, beyond) = candidates.max_by_key(|(_, beyond)| *beyond)?;
        if beyond >= 0 {
            return self.adopt(leader);
        }
        if !affordable[self.current] && self.comparisons >= COMPARISONS {
            return self.adopt(self.best_of(&affordable));
        }
        let sparing = self.most_sparing();
        if sparing != self.current && self.comparisons >= COMPARISONS_TO_SPARE {
            return self.adopt(sparing);
        }
        None
    }

    /// Detects a sudden drop of the choice's hit ratio, and then forgets all earlier leads.
    fn note_drop(&mut self) {
        self.comparisons_after_drop = self.comparisons_after_drop.saturating_sub(1);
        let Miniature { window, recent, .. } = &self.miniatures[self.current];
        let drop = window.hit_ppm() - recent.hit_ppm();
        if drop > DROP_PPM && !self.has_dropped && !self.is_filling {
            self.has_dropped = true;
            self.comparisons_after_drop = COMPARISONS_AFTER_DROP;
            self.miniatures.iter_mut().for_each(|mini| mini.lead = 0);
        } else if drop < DROP_PPM / 2 {
            self.has_dropped = false;
        }
    }

    /// Returns the number of reads whose data would fill a miniature.
    fn reads_to_fill(&self) -> i64 {
        self.blocks / self.miniatures[self.current].window.blocks_read(self.block_shift)
    }

    /// Returns the lead in hits from which a candidate replaces the choice.
    fn price(&self, candidate: &Combination) -> i64 {
        let current = self.current();
        let other_writes = Admission { reads_only: !current.admission.reads_only, ..current.admission };
        let price = if *candidate == (Combination { admission: other_writes, ..current }) {
            let window = &self.miniatures[self.current].window;
            let reads = (self.blocks << self.block_shift) * window.reads / window.sectors.max(1);
            reads * WRITES_PRICE_PERCENT / 100
        } else {
            let is_after_drop = self.comparisons_after_drop > 0;
            let percent = if is_after_drop { PRICE_AFTER_DROP_PERCENT } else { PRICE_PERCENT };
            self.reads_to_fill() * percent / 100
        };
        price.max(PRICE_HITS_MIN)
    }

    fn adopt(&mut self, at: usize) -> Option<Combination> {
        self.current = at;
        self.changes += 1;
        self.comparisons = 0;
        self.miniatures.iter_mut().for_each(|mini| mini.lead = 0);
        Some(self.current())
    }

    /// Returns the candidate with the fewest flash writes among those whose hit ratio is at most
    /// [`EQUAL_PPM`] below the highest one, and which write less than [`WRITES_PERCENT`] of the
    /// sectors that the choice writes. Returns the choice if there is no such candidate.
    fn most_sparing(&self) -> usize {
        let window = |at: usize| &self.miniatures[at].window;
        let all = 0..self.miniatures.len();
        let most = all.clone().map(|at| window(at).hit_ppm()).max().unwrap_or(0);
        let written_max = window(self.current).sectors_written * WRITES_PERCENT / 100;
        all.filter(|at| {
            window(*at).hit_ppm() + EQUAL_PPM >= most && window(*at).sectors_written < written_max
        })
        .min_by_key(|at| window(*at).sectors_written)
        .unwrap_or(self.current)
    }

    fn phase(&self) -> Phase {
        match self.comparisons {
            _ if self.is_filling => Phase::Filling,
            few if self.changes > 0 && few < COMPARISONS => Phase::Changed,
            _ => Phase::Warm,
        }
    }

    /// Returns the choice, its alternatives, and the expected results of each.
    pub(crate) fn choice(&self) -> Choice {
        let alternative = |mini: &Miniature| {
            let window = &mini.window;
            Alternative {
                combination: mini.combination,
                hit_ratio: window.hit_ppm() as f64 / 1e6,
                flash_write_ratio: window.sectors_written as f64 / window.sectors.max(1) as f64,
            }
        };
        Choice {
            current: self.current(),
            phase: self.phase(),
            changes: self.changes,
            alternatives: self.miniatures.iter().map(alternative).collect(),
        }
    }

    /// Returns the memory use, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.miniatures.iter().map(|mini| mini.cache.bytes() + size_of::<Miniature>() as u64).sum()
    }
}

/// Returns the candidates for these settings, the first choice first. Returns `None` if neither
/// policy nor admission is `auto`.
fn combinations(frames: u32, policy: PolicyKind, admission: Admission) -> Option<Vec<Combination>> {
    let named = |name: &&str| PolicyKind::from_name(name).expect("candidates name policies");
    let may_reorder = frames <= FRAMES_MAX_TO_REORDER;
    let parsed = CANDIDATES.iter().map(|(policy, admission)| Combination {
        policy: named(policy),
        admission: admission.parse().expect("candidates name admissions"),
    });
    match (policy.is_auto(), admission.popularity == Popularity::Auto) {
        (false, false) => None,
        (true, true) => Some(parsed.collect()),
        (true, false) => {
            let policies = POLICIES.iter().take(if may_reorder { POLICIES.len() } else { 1 });
            Some(policies.map(|name| Combination { policy: named(name), admission }).collect())
        }
        (false, true) => {
            let mut found: Vec<Combination> = Vec::new();
            for candidate in parsed {
                let combination = Combination { policy, ..candidate };
                if !found.contains(&combination) {
                    found.push(combination);
                }
            }
            Some(found)
        }
    }
}
