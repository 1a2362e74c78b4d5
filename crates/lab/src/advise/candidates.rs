//! Simulates candidate caches and makes a first choice of the cache's properties, one property at a
//! time.
//!
//! First comes the policy that reaches the target with the smallest size, then the largest block
//! size, and then the admission with the fewest flash writes. Hit ratios within one percentage
//! point count as equal. An admission with a hit ratio two points lower is accepted if it writes at
//! most a tenth as much to flash. The first choice gives the range of sizes in which
//! `joint_choice.rs` chooses all properties together.

use std::borrow::Cow;
use std::cell::RefCell;

use anyhow::Result;
use hob_engine::admission::Admission;
use hob_engine::granularity::Fill;
use hob_engine::policy::PolicyKind;
use serde::{Serialize, Serializer};

use super::POINT;
use super::curves::Start;
use super::input::{CollectedTrace, Sample, Slices, count_touching};
use super::reporter::Reporter;
use crate::sim::{self, Point, Simulated};

/// Factor by which the search reduces the cache size in each step, as long as a policy reaches the
/// target.
const SMALLER: f64 = 0.7;
const LARGER: f64 = 1.25;
/// Factor by which a cache is enlarged if it has too few hits over the whole trace, because the
/// sample promised too many. A cache is enlarged at most `ENLARGED_MAX` times.
const ENLARGED: f64 = 1.1;
const ENLARGED_MAX: u32 = 7;
/// Maximum number of smaller sizes to try. The smallest tried size is a twelfth of the size that
/// LRU needs.
const STEPS_MAX: u32 = 7;
/// Sizes to try between a size that is too small and a sufficient size, as positions between the
/// two.
const BETWEEN: [f64; 3] = [0.25, 0.5, 0.75];
/// Sizes to show, relative to the chosen size.
const SIZES_SHOWN: [f64; 5] = [0.25, 0.5, 1.0, 2.0, 4.0];
/// Amounts of flash writes that differ by at most this factor count as equal.
const WRITES_ALIKE: f64 = 1.02;
/// Maximum number of touched sectors of a trace. For a trace with more, the results for other sizes
/// come from the sample.
const WHOLE_TOUCHES_MAX: u64 = 20_000_000;
/// Maximum number of blocks of the cache that evicts nothing.
const UNLIMITED_BLOCKS_MAX: u64 = 32 << 20;
/// The coarse search uses a part of the trace with 1/`COARSE_PART` of the trace's touched sectors,
/// within the limits `COARSE_TOUCHES`. The limits bound the time of the search, which simulates
/// some hundred caches.
const COARSE_PART: u64 = 10;
const COARSE_TOUCHES: (u64, u64) = (10_000, 100_000);
/// Minimum number of requests in a sample of the coarse search. If a sample has fewer, all requests
/// of the trace go to a few regions, and the sample has none or one of these regions. The coarse
/// search then uses the start of the trace, with up to `COARSE_START` times as many touched
/// sectors.
const COARSE_REQUESTS_MIN: usize = 1000;
const COARSE_START: u64 = 4;
/// Maximum number of caches that the coarse search simulates at the same time, which bounds its
/// memory.
const COARSE_CACHES_MAX: usize = 128;
/// Minimum size of a cache, bytes.
const CACHE_BYTES_MIN: u64 = 1 << 20;
/// Maximum reduction of the hit ratio by a *sparing* admission. A sparing admission writes at most
/// [`SPARING_PART`] as much to flash as the admission that it replaces.
pub(super) const SPARING_LOSS: f64 = 2.0 * POINT;
/// Maximum flash writes of a *sparing* admission, as a share of the flash writes of the admission
/// that it replaces.
pub(super) const SPARING_PART: f64 = 0.1;
/// Admissions of the daemon that the advice tries.
pub(super) const ADMISSIONS: [&str; 6] = [
    "always",
    "always+not-sequential:512K",
    "nth-access:2",
    "nth-access:2+not-sequential:512K",
    "ghost",
    "ghost+not-sequential:512K",
];

/// Settings of a simulated cache.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// Size of the cache in bytes, rounded down to whole blocks.
    pub cache_bytes: u64,
    /// Block size of the cache, bytes.
    pub block_bytes: u32,
    /// Replacement policy of the cache.
    #[serde(serialize_with = "policy_name")]
    pub policy: PolicyKind,
    /// Admission of the cache.
    #[serde(serialize_with = "admission_form")]
    pub admission: Admission,
}

fn policy_name<S: Serializer>(policy: &PolicyKind, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(policy.info().name)
}

fn admission_form<S: Serializer>(admission: &Admission, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(admission)
}

/// A simulated cache and its results for the trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    /// Settings of the simulated cache.
    #[serde(flatten)]
    pub setting: Setting,
    /// Hit ratio of reads.
    pub read_hit_ratio: f64,
    /// Hit ratio of read bytes.
    pub read_hit_byte_ratio: f64,
    /// Number of bytes written to flash during the trace.
    pub flash_write_bytes: u64,
    /// Memory for index, policy and admission, bytes.
    pub memory_bytes: u64,
}

#[cfg(test)]
impl Trial {
    /// Returns made-up results of an LRU cache of 16 MiB that admits everything, with blocks of 4 KiB.
    pub(super) fn made_up(read_hit_ratio: f64, flash_write_bytes: u64) -> Trial {
        let policy = PolicyKind::from_name("lru").unwrap();
        let setting =
            Setting { cache_bytes: 16 << 20, block_bytes: 4096, policy, admission: Admission::default() };
        Trial { setting, read_hit_ratio, read_hit_byte_ratio: 0.5, flash_write_bytes, memory_bytes: 0 }
    }
}

/// The sampled trace and the settings that all trial simulations share.
pub(super) struct Trials<'a, 'b> {
    sample: &'a Sample<'a>,
    held: &'a CollectedTrace,
    threads: usize,
    pub(super) reporter: &'a Reporter<'b>,
    /// Results of all simulations so far on the sample. `on_whole` has the results on the whole
    /// trace, unless the sample is the whole trace. The stages of the search reuse these results,
    /// because they have many caches in common.
    on_sample: RefCell<Vec<Trial>>,
    on_whole: RefCell<Vec<Trial>>,
}

impl<'a, 'b> Trials<'a, 'b> {
    pub(super) fn new(
        sample: &'a Sample<'a>,
        held: &'a CollectedTrace,
        threads: usize,
        reporter: &'a Reporter<'b>,
    ) -> Self {
        let (on_sample, on_whole) = (RefCell::default(), RefCell::default());
        Trials { sample, held, threads, reporter, on_sample, on_whole }
    }

    /// Simulates a cache with each of these settings on the sample.
    pub(super) fn run(&self, settings: &[Setting]) -> Result<Vec<Trial>> {
        self.run_new(self.sample, settings, &self.on_sample)
    }

    /// Simulates a cache with each of these settings on a small part of the trace.
    pub(super) fn run_coarsely(&self, settings: &[Setting]) -> Result<Vec<Trial>> {
        let coarse = coarse_sample(self.held);
        let mut results = Vec::with_capacity(settings.len());
        for part in settings.chunks(COARSE_CACHES_MAX) {
            results.extend(self.run_on(&coarse, part)?);
        }
        Ok(results)
    }

    /// Simulates a cache on the whole trace.
    pub(super) fn exactly(&self, setting: Setting) -> Result<Trial> {
        Ok(self.run_exactly(&[setting])?.remove(0))
    }

    /// Simulates a cache with each of these settings on the whole trace.
    fn run_exactly(&self, settings: &[Setting]) -> Result<Vec<Trial>> {
        let known = if self.sample.rate < 1.0 { &self.on_whole } else { &self.on_sample };
        self.run_new(&self.held.whole(), settings, known)
    }

    /// Simulates a cache on the whole trace with this fill granularity. All other simulations fill
    /// only the sectors of a miss.
    pub(super) fn filling(&self, setting: Setting, fill: Fill) -> Result<Trial> {
        let point = Point { fill, ..point(&setting, 1.0) };
        Ok(self.run_points(&self.held.whole(), &[setting], &[point])?.remove(0))
    }

    /// Simulates the caches whose results are not known yet, and adds these results to the known
    /// ones.
    fn run_new(
        &self,
        sample: &Sample<'_>,
        settings: &[Setting],
        known: &RefCell<Vec<Trial>>,
    ) -> Result<Vec<Trial>> {
        let find = |setting: &Setting| known.borrow().iter().find(|trial| trial.setting == *setting).cloned();
        let mut new: Vec<Setting> = Vec::new();
        for setting in settings {
            if find(setting).is_none() && !new.contains(setting) {
                new.push(*setting);
            }
        }
        if !new.is_empty() {
            let results = self.run_on(sample, &new)?;
            known.borrow_mut().extend(results);
        }
        Ok(settings.iter().map(|setting| find(setting).expect("all caches were simulated")).collect())
    }

    fn run_on(&self, sample: &Sample<'_>, settings: &[Setting]) -> Result<Vec<Trial>> {
        let points: Vec<Point> = settings.iter().map(|setting| point(setting, sample.rate)).collect();
        self.run_points(sample, settings, &points)
    }

    fn run_points(&self, sample: &Sample<'_>, settings: &[Setting], points: &[Point]) -> Result<Vec<Trial>> {
        let report = |_| self.reporter.report();
        let results = sim::grid(&mut Slices(&sample.records), points, self.threads, report)?;
        self.reporter.end_run()?;
        Ok(settings.iter().zip(results).map(|(setting, result)| trial(*setting, &result, sample)).collect())
    }
}

/// Returns the part of the trace for the coarse search.
fn coarse_sample(held: &CollectedTrace) -> Sample<'_> {
    let (least, most) = COARSE_TOUCHES;
    let touches_max = (held.profile.footprint.touches / COARSE_PART).clamp(least, most);
    let sample = held.sample(touches_max);
    if sample.rate == 1.0 || sample.records.len() >= COARSE_REQUESTS_MIN {
        return sample;
    }
    let count = count_touching(held.records.iter(), COARSE_START * touches_max).min(touches_max as usize);
    let start = &held.records[..count.max(COARSE_REQUESTS_MIN).min(held.records.len())];
    Sample { records: Cow::Borrowed(start), rate: 1.0, correction: 1.0 }
}

/// Returns the hit ratio of reads of a cache that evicts nothing.
pub(super) fn unlimited(sample: &Sample<'_>, threads: usize, reporter: &Reporter<'_>) -> Result<f64> {
    let policy = PolicyKind::from_name("lru").expect("hob has LRU");
    // A simulation needs memory for each block of the cache, so large traces get larger blocks.
    let sizes: Vec<u64> = (12..=18).map(|shift| 1 << shift).collect();
    let counts = sample.blocks(&sizes);
    let fits = |(_, count): &(&u64, &u64)| **count <= UNLIMITED_BLOCKS_MAX;
    let Some((size, count)) = sizes.iter().zip(&counts).find(fits) else { return Ok(0.0) };
    let (block_bytes, cache_bytes) = (*size as u32, (count + 1) * size);
    let admission = Admission::default();
    let setting = Setting { cache_bytes, block_bytes, policy, admission };
    let points = [point(&setting, 1.0)];
    let results = sim::grid(&mut Slices(&sample.records), &points, threads, |_| reporter.report())?;
    reporter.end_run()?;
    Ok(sample.corrected(results[0].stats.read_hit_ratio()))
}

/// Simulates the chosen cache over the whole trace, and enlarges the cache while it has too few
/// hits.
pub(super) fn settled(trials: &Trials<'_, '_>, setting: Setting, target: f64) -> Result<Trial> {
    let mut cache = trials.exactly(setting)?;
    for _ in 0..ENLARGED_MAX {
        if trials.sample.rate == 1.0 || cache.read_hit_ratio >= target - POINT {
            break;
        }
        let cache_bytes = rounded(cache.setting.cache_bytes as f64 * ENLARGED);
        cache = trials.exactly(Setting { cache_bytes, ..setting })?;
    }
    Ok(cache)
}

fn point(setting: &Setting, rate: f64) -> Point {
    let Setting { cache_bytes, block_bytes, policy, admission } = *setting;
    let blocks = (cache_bytes / u64::from(block_bytes)) as f64 * rate;
    let cache_bytes = (blocks.round() as u64).max(1) * u64::from(block_bytes);
    Point {
        policy,
        admission,
        fill: Fill::Sectors,
        block_bytes,
        cache_bytes,
        flash_writes: None,
        sample_rate: 1.0,
    }
}

fn trial(setting: Setting, simulated: &Simulated, sample: &Sample<'_>) -> Trial {
    let scaled = |count: u64| (count as f64 / sample.rate) as u64;
    Trial {
        setting,
        read_hit_ratio: sample.corrected(simulated.stats.read_hit_ratio()),
        read_hit_byte_ratio: sample.corrected(simulated.stats.read_hit_byte_ratio()),
        flash_write_bytes: scaled(simulated.stats.flash_write_bytes),
        memory_bytes: scaled(simulated.memory_bytes),
    }
}

/// Rounds a size up to a value that is easy to type: whole MiB, and at most 1/64 or 1 MiB larger.
pub(super) fn rounded(bytes: f64) -> u64 {
    let bytes = (bytes as u64).max(CACHE_BYTES_MIN);
    bytes.next_multiple_of((1 << bytes.ilog2() >> 6).max(CACHE_BYTES_MIN))
}

/// Returns the replacement policies that the daemon supports.
pub(super) fn serving() -> impl Iterator<Item = PolicyKind> {
    PolicyKind::all().filter(|policy| policy.info().serves)
}

/// Returns the first choice of the cache's properties, which the module documentation describes.
pub(super) fn choose(trials: &Trials<'_, '_>, start: &Start, target: f64) -> Result<Setting> {
    let setting = choose_policy(trials, start, target, Admission::default())?;
    let setting = choose_block(trials, setting, start.block_bytes_max as u32)?;
    choose_admission(trials, setting)
}

/// Returns the cache with the smallest size at which a policy reaches the target.
fn choose_policy(
    trials: &Trials<'_, '_>,
    start: &Start,
    target: f64,
    admission: Admission,
) -> Result<Setting> {
    let enough = target - POINT / 2.0;
    let block_bytes = start.block_bytes as u32;
    let all_at = |cache_bytes: u64| {
        let setting = |policy| Setting { cache_bytes, block_bytes, policy, admission };
        trials.run(&serving().map(setting).collect::<Vec<_>>())
    };
    // LRU reaches the target at the first size, except for rounding and sampling errors.
    let mut size = rounded(start.cache_bytes as f64);
    let mut at_size = all_at(size)?;
    if best(&at_size) < enough {
        size = rounded(size as f64 * LARGER);
        at_size = all_at(size)?;
    }
    let mut too_small = size;
    for _ in 0..STEPS_MAX {
        if size == CACHE_BYTES_MIN {
            break;
        }
        // Rounding up must not give the same size again.
        let smaller = rounded(size as f64 * SMALLER).min(size - CACHE_BYTES_MIN);
        let trials = all_at(smaller)?;
        too_small = smaller;
        if best(&trials) < enough {
            break;
        }
        (size, at_size) = (smaller, trials);
    }
    let setting = pick(&at_size, enough).setting;
    let between = BETWEEN.map(|part| rounded(too_small as f64 + part * (size - too_small) as f64));
    let settings = between.map(|cache_bytes| Setting { cache_bytes, ..setting });
    let reached = trials.run(&settings)?.into_iter().find(|trial| trial.read_hit_ratio >= enough);
    if let Some(smaller) = reached.filter(|smaller| smaller.setting.cache_bytes < size) {
        at_size = all_at(smaller.setting.cache_bytes)?;
    }
    Ok(pick(&at_size, enough).setting)
}

fn best(trials: &[Trial]) -> f64 {
    trials.iter().map(|trial| trial.read_hit_ratio).fold(0.0, f64::max)
}

/// Returns the trial with the fewest flash writes among the trials within one point of the best hit
/// ratio. If a trial reaches the hit ratio `enough`, trials below `enough` are left out. The first
/// of equal trials wins.
pub(super) fn pick(trials: &[Trial], enough: f64) -> &Trial {
    let best = best(trials);
    let least_hits = (best - POINT).max(enough.min(best));
    let good: Vec<&Trial> = trials.iter().filter(|trial| trial.read_hit_ratio >= least_hits).collect();
    let least = good.iter().map(|trial| trial.flash_write_bytes).min().expect("the best trial qualifies");
    let alike = |trial: &&&Trial| trial.flash_write_bytes as f64 <= least as f64 * WRITES_ALIKE;
    good.iter().find(alike).expect("the trial with the fewest writes qualifies")
}

/// Returns the cache with the largest block size whose hit ratio is at most half a percentage point
/// below that of the best block size.
fn choose_block(trials: &Trials<'_, '_>, setting: Setting, block_bytes_max: u32) -> Result<Setting> {
    let sizes = (12..=block_bytes_max.ilog2()).map(|shift| 1 << shift);
    let settings: Vec<Setting> = sizes.map(|block_bytes| Setting { block_bytes, ..setting }).collect();
    let results = trials.run(&settings)?;
    let least = best(&results) - POINT / 2.0;
    let good = results.iter().rfind(|trial| trial.read_hit_ratio >= least);
    Ok(good.expect("the best trial qualifies").setting)
}

/// Returns the settings with the admission that [`sparing`] prefers.
fn choose_admission(trials: &Trials<'_, '_>, setting: Setting) -> Result<Setting> {
    let admissions = ADMISSIONS.map(|form| form.parse::<Admission>().expect("the admissions are valid"));
    let results = trials.run(&admissions.map(|admission| Setting { admission, ..setting }))?;
    Ok(sparing(&results).setting)
}

/// Returns the trial that [`pick`] returns, or a sparing trial instead: one with nearly as many
/// hits and few flash writes.
pub(super) fn sparing(trials: &[Trial]) -> &Trial {
    sparing_of(pick(trials, 0.0), trials.iter(), best(trials) - SPARING_LOSS)
}

/// Returns the trial with the fewest flash writes among the sparing trials, or `picked` if there is
/// no sparing trial. A sparing trial has a hit ratio of at least `least_hits`, and writes at most
/// [`SPARING_PART`] as much to flash as `picked`.
pub(super) fn sparing_of<'a>(
    picked: &'a Trial,
    trials: impl Iterator<Item = &'a Trial>,
    least_hits: f64,
) -> &'a Trial {
    let most_writes = picked.flash_write_bytes as f64 * SPARING_PART;
    let is_sparing =
        |trial: &&Trial| trial.read_hit_ratio >= least_hits && trial.flash_write_bytes as f64 <= most_writes;
    trials.filter(is_sparing).min_by_key(|trial| trial.flash_write_bytes).unwrap_or(picked)
}

/// Returns the chosen cache and trials of other sizes, smallest first. Each trial of another size
/// has the best policy for this size.
pub(super) fn sizes(trials: &Trials<'_, '_>, cache: &Trial, knee_bytes: Option<u64>) -> Result<Vec<Trial>> {
    let setting = cache.setting;
    let parts = SIZES_SHOWN.map(|part| setting.cache_bytes as f64 * part);
    let most = trials.held.profile.footprint.bytes as f64 * 1.1;
    let small_enough = |bytes: &f64| *bytes <= most.max(setting.cache_bytes as f64);
    let shown = parts.into_iter().filter(small_enough).map(rounded);
    let mut sizes: Vec<u64> = shown.chain(knee_bytes.map(|bytes| rounded(bytes as f64))).collect();
    sizes.retain(|size| *size != setting.cache_bytes);
    sizes.sort_unstable();
    sizes.dedup();
    let policies: Vec<PolicyKind> = serving().collect();
    let settings = sizes.iter().flat_map(|cache_bytes| {
        policies.iter().map(|policy| Setting { cache_bytes: *cache_bytes, policy: *policy, ..setting })
    });
    let results = trials.run(&settings.collect::<Vec<_>>())?;
    let best: Vec<Setting> = results.chunks(policies.len()).map(|of| pick(of, 1.0).setting).collect();
    let mut shown = match trials.held.profile.footprint.touches {
        0..=WHOLE_TOUCHES_MAX => trials.run_exactly(&best)?,
        _ => trials.run(&best)?,
    };
    shown.push(cache.clone());
    shown.sort_by_key(|trial| trial.setting.cache_bytes);
    Ok(shown)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::advise::Material;
    use hob_trace::{Op, Record};

    /// Returns reads of few regions, of which a small sample has none.
    fn collected(requests: u64, len: u32) -> CollectedTrace {
        let mut material = Material::new(usize::MAX);
        (0..requests).for_each(|i| {
            let offset = i * u64::from(len) % (1 << 20);
            material.add(&Record { at_ns: i, offset, len, op: Op::Read, disk: 0 });
        });
        material.finish().unwrap()
    }

    #[test]
    fn the_coarse_search_touches_few_sectors_also_with_large_requests() {
        for (requests, len, expected) in
            [(3000, 1 << 20, 1200), (3000, 4 << 20, 1000), (200_000, 4096, 20_000)]
        {
            let held = collected(requests, len);
            let coarse = coarse_sample(&held);
            assert_eq!((coarse.records.len(), coarse.rate), (expected, 1.0), "{len}");
        }
    }

    #[test]
    fn a_cache_is_simulated_once() {
        let held = collected(100, 4096);
        let sample = held.whole();
        let blocks = Cell::new(0);
        let count = &mut |_: &str, _: f64| {
            blocks.set(blocks.get() + 1);
            true
        };
        let reporter = Reporter::new(count);
        let trials = Trials::new(&sample, &held, 1, &reporter);
        let one = Trial::made_up(0.0, 0).setting;
        let other = Setting { cache_bytes: 1 << 20, ..one };
        let results = trials.run(&[one, other, one]).unwrap();
        assert_eq!(results.iter().map(|trial| trial.setting).collect::<Vec<_>>(), [one, other, one]);
        assert_eq!(trials.exactly(one).unwrap(), results[0]);
        assert_eq!(blocks.get(), 1, "the trace has one block of requests");
    }
}
