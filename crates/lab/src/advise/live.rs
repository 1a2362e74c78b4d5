//! Advice for a disk in service, computed from the miss-ratio curves that the daemon measures
//! ([`hob_engine::sizing`]).
//!
//! Like the advice for a trace, this advice has the smallest cache that reaches the target hit
//! ratio, the knee, and flash writes. It also has the largest block size whose hit ratio is at most
//! half a percentage point below the best. Results that need the requests themselves are left out,
//! and the advice says so. The results left out are policies other than LRU, admission, latencies,
//! savings of write-back, and blocks above 64 KiB. Sizes are in bytes, times in nanoseconds, and
//! ratios from 0 to 1.

#[cfg(test)]
mod tests;

use hob_engine::sizing::Curve;
use serde::Serialize;

use super::candidates::rounded;
use super::curves::report_sizes;
use super::devices::{Endurance, WARRANTY_YEARS};
use super::sentences::{bytes, percent, typed, years};
use super::text::{columns, filled, section};
use super::{BlockSize, HIT_RATIO_MIN, POINT, SizePoint, Target, Verdict, Wear};
use crate::picture::Unit;

/// If more than this share of the recent reads are first reads of their data, the cache is still
/// warming up.
const FIRST_SHARE_WARM: f64 = 0.05;
/// Observation time after which first reads of data no longer count as a sign of a warm-up,
/// seconds.
const SETTLED_S: f64 = DAY_S;
/// Maximum difference between the hit ratios of the present cache and of a smaller recommended one,
/// if the user gave no target.
const SHRINK_LOSS_MAX: f64 = POINT / 2.0;
/// Minimum number of reads for a confidence above [`Confidence::Low`].
const READS_TELLING: u64 = 10_000;
/// Minimum duration of measurements for an estimate of daily writes, seconds.
const SECONDS_TELLING: f64 = 60.0;
const DAY_S: f64 = 86_400.0;
/// Maximum relative difference between the present cache size and the recommended size at which the
/// present size counts as right.
const NEAR: f64 = 0.1;
/// Cache sizes that the advice shows, as multiples of the recommended size.
const SIZES_SHOWN: [f64; 5] = [0.25, 0.5, 1.0, 2.0, 4.0];
/// Minimum difference between the expected and the measured hit ratio of the present cache for
/// which the advice has a remark.
const FALLS_SHORT: f64 = 0.1;

/// Measurements of a disk in service.
#[derive(Clone, Debug)]
pub struct Live {
    /// Name of the disk.
    pub disk: String,
    /// Duration of the measurements, nanoseconds.
    pub elapsed_ns: u64,
    /// Number of the disk's reads.
    pub reads: u64,
    /// Total length of the disk's reads, bytes.
    pub read_bytes: u64,
    /// Share of the reads that flash or memory served.
    pub read_hit_ratio: f64,
    /// Number of the disk's writes.
    pub writes: u64,
    /// Total length of the disk's writes, bytes.
    pub write_bytes: u64,
    /// Measurements of the recent reads.
    pub recent: LiveRecent,
    /// The disk's present cache.
    pub cache: Option<LiveCache>,
    /// Measurements by block size, smallest block size first.
    pub block_sizes: Vec<LiveCurve>,
}

/// Measurements of the *recent* reads of a disk: the last 16,384 to 32,768 reads, or all reads if
/// there are fewer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LiveRecent {
    /// Number of the recent reads.
    pub reads: u64,
    /// Share of the recent reads that flash or memory served.
    pub read_hit_ratio: f64,
    /// Share of the recent reads of data that had not been read or written since the measurement
    /// began.
    pub first_share: f64,
    /// Total length of the recent reads, bytes.
    pub read_bytes: u64,
    /// Total length of the writes since the first of the recent reads, bytes.
    pub write_bytes: u64,
    /// Number of reads in the latest complete interval of at least a minute; 0 until the first such
    /// interval ends. The recent reads can be older.
    pub latest_reads: u64,
    /// Share of the latest reads that flash or memory served.
    pub latest_hit_ratio: f64,
}

/// Confidence in the advice for a disk in service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Confidence {
    /// The confidence is low, because the disk has had too few reads.
    Low,
    /// Many recent reads are first reads of their data. The cache is warming up and may need more
    /// space.
    WarmingUp,
    /// Few recent reads are first reads of their data, few of the latest reads missed, or the load
    /// was observed for a day.
    Steady,
}

/// Present cache of a disk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LiveCache {
    /// Size of the cache, bytes.
    pub cache_bytes: u64,
    /// Block size of the cache, bytes.
    pub block_bytes: u64,
    /// Replacement policy of the cache.
    pub policy: String,
    /// True if the cache shares its pool, so that hob chooses its size.
    pub is_shared: bool,
}

/// Measurements of a disk for one block size.
#[derive(Clone, Debug)]
pub struct LiveCurve {
    /// Block size, bytes.
    pub block_bytes: u64,
    /// Estimated size of all touched blocks, bytes.
    pub footprint_bytes: u64,
    /// Sampling rate of the blocks.
    pub sample_rate: f64,
    /// Miss ratio of reads, by number of blocks in the cache.
    pub misses: Curve,
}

/// Goals and devices of the user.
#[derive(Clone, Copy, Debug, Default)]
pub struct LiveOptions {
    /// Hit ratio to reach. The default is 90 % of the hit ratio of an unlimited cache.
    pub target_hit: Option<f64>,
    /// Write endurance of the flash.
    pub endurance: Endurance,
}

/// Advice for a disk in service.
#[derive(Clone, Debug, Serialize)]
pub struct LiveAdvice {
    /// Name of the disk.
    pub disk: String,
    /// Tells whether a cache is worthwhile for the disk.
    pub verdict: Verdict,
    /// Confidence in the advice.
    pub confidence: Confidence,
    /// The confidence and its reason in one or more sentences.
    pub confidence_reason: String,
    /// Time until there is enough data for good confidence, at the present rate of reads,
    /// nanoseconds. `None` if there is enough data, or if the time is unknown because nothing was
    /// read.
    pub data_missing_ns: Option<u64>,
    /// The advice in one or two sentences.
    pub summary: String,
    /// Command that the user should run; empty if no change is needed. The user adds the name of
    /// the pool.
    pub command: String,
    /// Reasons for the advice, one sentence each.
    pub why: Vec<String>,
    /// Limits and possible errors of the advice, one sentence each.
    pub caveats: Vec<String>,
    /// Recommended cache.
    pub recommendation: Option<LiveRecommendation>,
    /// Target hit ratio.
    pub target: Target,
    /// Knee of the curve for the recommended block size: a larger cache adds few hits.
    pub knee: Option<SizePoint>,
    /// Results by block size, smallest block size first.
    pub block_sizes: Vec<BlockSize>,
    /// Hit ratios by cache size, with the recommended block size and LRU. The sizes are fractions
    /// and multiples of the recommended size, the knee, and the size of the present cache.
    pub sizes: Vec<SizePoint>,
    /// Estimated wear of the flash.
    pub wear: Option<Wear>,
    /// The disk's present cache.
    pub cache: Option<LiveCache>,
    /// Share of the reads that flash or memory serves now.
    pub read_hit_ratio: f64,
    /// Measurements of the recent reads.
    pub recent: LiveRecent,
    /// Duration of the measurements, nanoseconds.
    pub elapsed_ns: u64,
    /// Number of measured reads.
    pub reads: u64,
    /// Number of measured writes.
    pub writes: u64,
}

/// Recommended cache for a disk in service.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LiveRecommendation {
    /// Recommended cache size, bytes.
    pub cache_bytes: u64,
    /// Recommended block size, bytes.
    pub block_bytes: u64,
    /// Expected hit ratio of the recommended cache, with LRU.
    pub read_hit_ratio: f64,
    /// Recommended size relative to the data that the disk's requests touch.
    pub of_footprint: f64,
}

impl LiveCurve {
    fn best(&self) -> f64 {
        self.misses.points().last().map_or(0.0, |point| 1.0 - point.miss_ratio)
    }

    fn hit_ratio(&self, cache_bytes: u64) -> f64 {
        1.0 - self.misses.miss_ratio_at(cache_bytes / self.block_bytes)
    }

    fn size_for(&self, hit_ratio: f64) -> Option<u64> {
        // The margin compensates rounding of hit ratios that come from the curve itself.
        let blocks = self.misses.size_for(hit_ratio - 1e-12)?;
        Some(blocks.max(1).saturating_mul(self.block_bytes))
    }

    fn knee(&self) -> Option<SizePoint> {
        let knee = self.misses.knee()?;
        let cache_bytes = knee.blocks.saturating_mul(self.block_bytes);
        Some(SizePoint { cache_bytes, read_hit_ratio: 1.0 - knee.miss_ratio })
    }

    fn report(&self, target: f64, cache_bytes: Option<u64>) -> BlockSize {
        let target_bytes = self.size_for(target).filter(|_| self.best() > 0.0);
        let point = |blocks: u64| self.point(blocks.saturating_mul(self.block_bytes));
        BlockSize {
            block_bytes: self.block_bytes,
            target_bytes,
            knee: self.knee(),
            read_hit_ratio: self.hit_ratio(cache_bytes.or(target_bytes).unwrap_or(0)),
            curve: report_sizes(&self.misses).map(point).collect(),
        }
    }

    fn point(&self, cache_bytes: u64) -> SizePoint {
        SizePoint { cache_bytes, read_hit_ratio: self.hit_ratio(cache_bytes) }
    }
}

impl Live {
    fn confidence(&self) -> Confidence {
        if self.reads < READS_TELLING {
            Confidence::Low
        } else if self.is_settled() || self.recent.fits() {
            Confidence::Steady
        } else {
            Confidence::WarmingUp
        }
    }

    /// Returns [`LiveAdvice::data_missing_ns`].
    fn data_missing_ns(&self) -> Option<u64> {
        let elapsed_ns = self.elapsed_ns as f64;
        match self.confidence() {
            Confidence::Low if self.reads == 0 => None,
            Confidence::Low => {
                Some(((READS_TELLING - self.reads) as f64 * elapsed_ns / self.reads as f64) as u64)
            }
            Confidence::WarmingUp => Some((SETTLED_S * 1e9 - elapsed_ns) as u64),
            Confidence::Steady => None,
        }
    }

    /// Returns the highest measured hit ratio, and the reads from which it was measured. Returns
    /// `None` if the disk has no cache.
    fn served_most(&self) -> Option<(f64, String)> {
        self.cache.as_ref()?;
        let LiveRecent { reads, read_hit_ratio, latest_reads, latest_hit_ratio, .. } = self.recent;
        let measured = [
            (self.read_hit_ratio, self.reads, "all reads".to_owned()),
            (read_hit_ratio, reads, format!("the last {reads} reads")),
            (latest_hit_ratio, latest_reads, format!("the latest {latest_reads} reads")),
        ];
        let known = measured.into_iter().filter(|(_, reads, _)| *reads > 0);
        known.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(hits, _, which)| (hits, which))
    }

    /// Returns true if the recent requests are representative of the load.
    fn is_settled(&self) -> bool {
        self.recent.first_share <= FIRST_SHARE_WARM || self.elapsed_ns as f64 / 1e9 >= SETTLED_S
    }
}

impl LiveRecent {
    /// Returns true if the cache served nearly all of the latest reads. In this case the warm-up of
    /// the cache has ended, even if the recent reads include first reads from the warm-up.
    fn fits(&self) -> bool {
        self.latest_reads > 0 && self.latest_hit_ratio >= 1.0 - FIRST_SHARE_WARM
    }
}

impl LiveAdvice {
    fn confidence_sentence(&self) -> String {
        let first = percent(self.recent.first_share);
        let recent = self.recent.reads;
        let left = self.data_missing_ns.map(|left_ns| Unit::Seconds.text(left_ns as f64 / 1e9));
        match self.confidence {
            Confidence::Low => {
                let takes = |left: String| format!(", which takes about {left} more at the present rate");
                let more = left.map_or(String::new(), takes);
                format!(
                    "Confidence: low, too little data. There were {} reads in {}; advice needs {READS_TELLING}{more}.",
                    self.reads,
                    Unit::Seconds.text(self.elapsed_ns as f64 / 1e9),
                )
            }
            Confidence::WarmingUp => format!(
                "Confidence: low while the load warms up. {first} of the last {recent} reads asked for new data. \
                 Confidence is good at {} or less, and in any case after a day of requests, which takes {} more.",
                percent(FIRST_SHARE_WARM),
                left.unwrap_or_default(),
            ),
            Confidence::Steady if self.recent.first_share > FIRST_SHARE_WARM && self.recent.fits() => {
                format!(
                    "Confidence: good. {} of the latest {} reads were served from flash or memory.",
                    percent(self.recent.latest_hit_ratio),
                    self.recent.latest_reads,
                )
            }
            Confidence::Steady => format!(
                "Confidence: good. {first} of the last {recent} reads asked for new data; {} were served from flash or \
                 memory.",
                percent(self.recent.read_hit_ratio),
            ),
        }
    }
}

/// Returns the advice for a disk in service.
pub fn live(disk: &Live, options: &LiveOptions) -> LiveAdvice {
    let best = disk.block_sizes.iter().map(LiveCurve::best).fold(0.0, f64::max);
    let target = Target::new(best, options.target_hit);
    let chosen = if disk.reads == 0 || best < HIT_RATIO_MIN { None } else { choose(disk, &target) };
    let cache_bytes = chosen.map(|(_, cache_bytes)| cache_bytes);
    let mut advice = LiveAdvice {
        disk: disk.disk.clone(),
        verdict: if chosen.is_some() { Verdict::Cache } else { Verdict::NoCache },
        confidence: disk.confidence(),
        confidence_reason: String::new(),
        data_missing_ns: disk.data_missing_ns(),
        summary: String::new(),
        command: String::new(),
        why: Vec::new(),
        caveats: Vec::new(),
        recommendation: None,
        target,
        knee: None,
        block_sizes: disk
            .block_sizes
            .iter()
            .map(|curve| curve.report(target.read_hit_ratio, cache_bytes))
            .collect(),
        sizes: Vec::new(),
        wear: None,
        cache: disk.cache.clone(),
        read_hit_ratio: disk.read_hit_ratio,
        recent: disk.recent,
        elapsed_ns: disk.elapsed_ns,
        reads: disk.reads,
        writes: disk.writes,
    };
    match chosen {
        Some((curve, cache_bytes)) => recommend(&mut advice, disk, options, curve, cache_bytes),
        None => refuse(&mut advice, disk),
    }
    push_caveats(&mut advice, disk, options);
    advice.confidence_reason = advice.confidence_sentence();
    advice
}

/// Returns the best block size and the smallest cache size that reaches the target. The best block
/// size is the largest block size whose hit ratio at this cache size is at most half a percentage
/// point below the highest hit ratio.
fn choose<'a>(disk: &'a Live, target: &Target) -> Option<(&'a LiveCurve, u64)> {
    let sizes = disk.block_sizes.iter().filter_map(|curve| curve.size_for(target.read_hit_ratio));
    let cache_bytes = rounded(sizes.min()? as f64);
    let hits = |curve: &LiveCurve| curve.hit_ratio(cache_bytes);
    let best = disk.block_sizes.iter().map(hits).fold(0.0, f64::max);
    let curve = disk.block_sizes.iter().rfind(|curve| hits(curve) >= best - POINT / 2.0)?;
    Some((curve, cache_bytes))
}

fn recommend(
    advice: &mut LiveAdvice,
    disk: &Live,
    options: &LiveOptions,
    curve: &LiveCurve,
    cache_bytes: u64,
) {
    let recommended = LiveRecommendation {
        cache_bytes,
        block_bytes: curve.block_bytes,
        read_hit_ratio: curve.hit_ratio(cache_bytes),
        of_footprint: cache_bytes as f64 / footprint(disk) as f64,
    };
    advice.recommendation = Some(recommended);
    advice.knee = curve.knee();
    let most = footprint(disk).max(cache_bytes) as f64 * 1.1;
    let parts = SIZES_SHOWN.map(|part| part * cache_bytes as f64).into_iter().filter(|size| *size <= most);
    let own = disk.cache.as_ref().map(|cache| cache.cache_bytes);
    let mut sizes: Vec<u64> =
        parts.chain(advice.knee.map(|knee| knee.cache_bytes as f64)).map(rounded).chain(own).collect();
    sizes.sort_unstable();
    sizes.dedup();
    advice.sizes = sizes.into_iter().map(|size| curve.point(size)).collect();
    say(advice, disk, &recommended);
    advice.wear = wear(disk, options, advice, curve);
    push_why(advice, disk, &recommended);
}

/// Returns the number of bytes that requests touch, counted in blocks of the smallest size.
fn footprint(disk: &Live) -> u64 {
    disk.block_sizes.first().map_or(1, |curve| curve.footprint_bytes.max(1))
}

/// Returns the wear of the flash if the user follows the advice. If the advice is to change
/// nothing, the wear is computed from the measured misses of the present cache.
fn wear(disk: &Live, options: &LiveOptions, advice: &LiveAdvice, curve: &LiveCurve) -> Option<Wear> {
    let LiveRecent { reads, read_hit_ratio, first_share, read_bytes, write_bytes, .. } = disk.recent;
    let seconds = disk.elapsed_ns as f64 / 1e9;
    // Requests during a warm-up are not representative.
    let is_known = seconds >= SECONDS_TELLING && disk.confidence() == Confidence::Steady && disk.is_settled();
    if !is_known || reads == 0 || read_bytes == 0 {
        return None;
    }
    let advised = advice.recommendation.as_ref()?;
    let (cache_bytes, misses) = match disk.cache.as_ref().filter(|_| advice.command.is_empty()) {
        Some(own) => (own.cache_bytes, 1.0 - read_hit_ratio),
        // The first read of a block misses at any cache size. The number of other misses comes from
        // the curve.
        None => (advised.cache_bytes, (first_share + curve.best() - advised.read_hit_ratio).clamp(0.0, 1.0)),
    };
    // Flash gets the data of misses and all writes. The totals include the warm-up of the cache. So
    // the mean number of bytes of a read is taken from the recent reads.
    let per_read = (misses * read_bytes as f64 + write_bytes as f64) / reads as f64;
    let per_day = per_read * disk.reads as f64 / seconds * DAY_S;
    Some(Wear::new(options.endurance, cache_bytes, per_day))
}

/// Adds the summary sentence and the command to the advice.
fn say(advice: &mut LiveAdvice, disk: &Live, cache: &LiveRecommendation) {
    let size = bytes(cache.cache_bytes);
    let hits = percent(cache.read_hit_ratio);
    let name = &disk.disk;
    let Some(own) = &disk.cache else {
        let block = cache.block_bytes;
        advice.summary = format!(
            "Give {name} {size} with {} blocks: {hits} of its reads from flash by LRU (now: none).",
            bytes(block)
        );
        let (size, block) = (typed(cache.cache_bytes), typed(block));
        advice.command = format!("hob cache enable {name} --pool POOL --size {size} --block-size {block}");
        return;
    };
    let now = percent(disk.read_hit_ratio);
    let times = own.cache_bytes as f64 / cache.cache_bytes as f64;
    if (times - 1.0).abs() <= NEAR {
        advice.summary = format!(
            "Leave the cache of {name} at {}: LRU would serve {hits} of its reads at this size, and {now} \
             of all its reads so far were served.",
            bytes(own.cache_bytes)
        );
        return;
    }
    if own.is_shared {
        return say_shared(advice, disk, own, cache);
    }
    if times > 1.0 && keeps_size(advice, disk, own, cache) {
        return;
    }
    let what = if times < 1.0 { "Enlarge" } else { "The target needs less: shrink" };
    advice.summary = format!(
        "{what} the cache of {name} from {} to {size}: {hits} of its reads from flash by LRU (measured \
         for all its reads so far: {now}).",
        bytes(own.cache_bytes)
    );
    advice.command = format!("hob cache resize {name} {}", typed(cache.cache_bytes));
}

/// Adds the summary sentence and the command for a shared cache. A fixed size would end the
/// sharing.
fn say_shared(advice: &mut LiveAdvice, disk: &Live, own: &LiveCache, cache: &LiveRecommendation) {
    let (name, size, wanted) = (&disk.disk, bytes(own.cache_bytes), bytes(cache.cache_bytes));
    let (hits, now) = (percent(cache.read_hit_ratio), percent(disk.read_hit_ratio));
    if own.cache_bytes >= cache.cache_bytes {
        advice.summary = format!(
            "Leave the cache of {name} as it is: it shares its pool and has {size} now, and LRU would serve {hits} of \
             its reads from {wanted}. If another cache needs the flash more, hob moves it there."
        );
        return;
    }
    advice.summary = format!(
        "The cache of {name} shares its pool and has {size} now. With {wanted}, {hits} of its reads would be from \
         flash by LRU (measured for all its reads so far: {now}). Make this its minimum, give it more shares \
         ('hob cache set {name} --shares NUMBER'), or add flash to the pool."
    );
    advice.command = format!("hob cache set {name} --min {}", typed(cache.cache_bytes));
}

/// Explains why a cache should not be made smaller: the cache is not warm yet, or it would lose
/// hits without the user's consent.
fn keeps_size(advice: &mut LiveAdvice, disk: &Live, own: &LiveCache, cache: &LiveRecommendation) -> bool {
    let (name, size) = (&disk.disk, bytes(own.cache_bytes));
    if advice.confidence != Confidence::Steady {
        advice.summary = format!(
            "Leave the cache of {name} at {size} for now: hob does not know yet whether a smaller cache is sufficient."
        );
        return true;
    }
    let curve = disk.block_sizes.iter().find(|curve| curve.block_bytes == cache.block_bytes);
    let Some(curve) = curve.filter(|_| !advice.target.is_given) else { return false };
    let hits = curve.hit_ratio(own.cache_bytes);
    let loss = hits - cache.read_hit_ratio;
    if loss <= SHRINK_LOSS_MAX {
        return false;
    }
    // Size of the smallest cache whose hit ratio is nearly that of the present cache.
    let same = curve.size_for(hits - SHRINK_LOSS_MAX).map_or(own.cache_bytes, |same| rounded(same as f64));
    if own.cache_bytes as f64 > same as f64 * (1.0 + NEAR) {
        advice.summary = format!(
            "Shrink the cache of {name} from {size} to {}: LRU serves the same share of its reads, {}, from both.",
            bytes(same),
            percent(curve.hit_ratio(same)),
        );
        advice.command = format!("hob cache resize {name} {}", typed(same));
        return true;
    }
    advice.summary = format!(
        "Leave the cache of {name} at {size}: with {}, {} more of its reads would go to the backing. Set the \
         sufficient share of hits with --target-hit.",
        bytes(cache.cache_bytes),
        percent(loss),
    );
    true
}

fn push_why(advice: &mut LiveAdvice, disk: &Live, cache: &LiveRecommendation) {
    let target = &advice.target;
    let aim = if target.is_given {
        format!("the {} you asked for", percent(target.read_hit_ratio))
    } else {
        let best = percent(target.best_read_hit_ratio);
        format!("nine tenths of the {best} of reads that ask for data requested before")
    };
    advice.why.push(format!(
        "Size: {}, {} of the {} its requests touch, is the smallest that reaches {aim}.",
        bytes(cache.cache_bytes),
        percent(cache.of_footprint),
        bytes(footprint(disk)),
    ));
    // A knee that was measured during a warm-up moves, so it is no choice yet.
    if advice.confidence == Confidence::Steady
        && let Some(knee) = advice.knee
        && knee.cache_bytes * 10 < cache.cache_bytes * 9
    {
        advice.why.push(format!(
            "The knee of the curve is at {} ({}): the choice when flash is scarce.",
            bytes(knee.cache_bytes),
            percent(knee.read_hit_ratio),
        ));
    }
    push_block(advice, disk, cache);
    if let Some(wear) = &advice.wear {
        let sentence = format!(
            "Flash: about {} written a day, {:.1} times the cache's size. Flash of this size with a rating of {} lasts {}.",
            bytes(wear.flash_write_bytes_per_day as u64),
            wear.cache_writes_per_day,
            wear.endurance,
            years(wear.life_years),
        );
        match wear.life_years < WARRANTY_YEARS {
            true => advice.caveats.push(sentence),
            false => advice.why.push(sentence),
        }
    }
}

fn push_block(advice: &mut LiveAdvice, disk: &Live, cache: &LiveRecommendation) {
    let own = disk.cache.as_ref().map_or(cache.block_bytes, |own| own.block_bytes);
    let at = |block_bytes: u64| disk.block_sizes.iter().find(|curve| curve.block_bytes == block_bytes);
    let hits = |curve: &LiveCurve| percent(curve.hit_ratio(cache.cache_bytes));
    let others = disk.block_sizes.iter().filter(|curve| curve.block_bytes != cache.block_bytes);
    let others: Vec<String> =
        others.map(|curve| format!("{} with {}", hits(curve), bytes(curve.block_bytes))).collect();
    let sentence = format!(
        "Blocks: {} is the largest measured size without loss of hits, {} ({}).",
        bytes(cache.block_bytes),
        percent(cache.read_hit_ratio),
        others.join(", "),
    );
    advice.why.push(sentence);
    match at(own) {
        None => advice.caveats.push(format!(
            "Blocks of {}, which the cache has, are not measured; the figures are for blocks of {}.",
            bytes(own),
            bytes(cache.block_bytes),
        )),
        Some(curve) if curve.hit_ratio(cache.cache_bytes) < cache.read_hit_ratio - POINT => {
            let (name, block) = (&disk.disk, typed(cache.block_bytes));
            advice.why.push(format!(
                "The cache has blocks of {}, which reach {} at that size: 'hob cache set {name} --block-size {block}' \
                 changes them, and empties it.",
                bytes(own),
                hits(curve),
            ));
        }
        Some(_) => {}
    }
}

fn refuse(advice: &mut LiveAdvice, disk: &Live) {
    let (name, best) = (&disk.disk, advice.target.best_read_hit_ratio);
    advice.summary = if disk.reads == 0 {
        format!("There is nothing to advise on: nothing was read from {name} since counting began.")
    } else if best == 0.0 {
        format!("A cache does not help {name} so far: it reads no data that it has read or written before.")
    } else {
        format!(
            "A cache does not help {name} so far: only {} of its reads ask for data that was read or written before.",
            percent(best)
        )
    };
}

fn push_caveats(advice: &mut LiveAdvice, disk: &Live, options: &LiveOptions) {
    let best = advice.target.best_read_hit_ratio;
    let mut say = |sentence: String| advice.caveats.push(sentence);
    if let Some(asked) = options.target_hit.filter(|asked| *asked > best + POINT / 2.0) {
        say(format!(
            "No size reaches the {} you asked for: {} of the reads ask for data requested before, and the others \
             are first reads of their data.",
            percent(asked),
            percent(best)
        ));
    }
    if let Some((hits, which)) = disk.served_most().filter(|(hits, _)| *hits > best + POINT / 2.0) {
        say(format!(
            "{} of {which} were served from flash or memory. The {} are of all reads since counting began, and count \
             each first read of data as a miss, even if the cache had the data.",
            percent(hits),
            percent(best)
        ));
    }
    if let Some(own) = &disk.cache {
        let curve = disk.block_sizes.iter().rfind(|curve| curve.block_bytes <= own.block_bytes);
        let expected = curve.map_or(0.0, |curve| curve.hit_ratio(own.cache_bytes));
        if disk.reads >= READS_TELLING && disk.read_hit_ratio < expected - FALLS_SHORT {
            say(format!(
                "The cache serves {} where LRU of its size would serve {}. The cache was smaller, empty or off for \
                 some of the time, or its policy ({}) or admission does not suit the load. 'hob explain {}' tells more.",
                percent(disk.read_hit_ratio),
                percent(expected),
                own.policy,
                disk.disk
            ));
        }
    }
    let seconds = disk.elapsed_ns as f64 / 1e9;
    if seconds < DAY_S {
        let time = Unit::Seconds.text(seconds);
        say(format!(
            "The curves were measured for {time}: data that is read again only after a longer time counts as new."
        ));
    }
    if advice.verdict == Verdict::Cache && best < 0.5 {
        advice.caveats.push(format!(
            "{} of the reads are first reads of their data; after a longer time this data may be read again.",
            percent(1.0 - best)
        ));
    }
    let rate = disk.block_sizes.first().map_or(1.0, |curve| curve.sample_rate);
    if rate < 1.0 {
        let part = percent(rate);
        advice.caveats.push(format!("The curves are estimated from {part} of the disk's 4 KiB blocks."));
    }
    advice.caveats.push(
        "These figures assume LRU, and count a read once for each block that it touches. Advice on policies, \
         admission, latencies, write-back and blocks above 64 KiB needs a trace: run 'hob record', then 'hob lab advise'."
            .to_owned(),
    );
}

/// Returns the advice as plain text.
pub fn live_text(advice: &LiveAdvice) -> String {
    let mut out = filled("", &advice.confidence_reason);
    out.push('\n');
    out += &filled("", &advice.summary);
    if !advice.command.is_empty() {
        out += &format!("\n  {}\n", advice.command);
    }
    section(&mut out, "Why", &advice.why);
    if let Some(advised) = &advice.recommendation {
        let own = advice.cache.as_ref().map(|cache| cache.cache_bytes);
        out += "\nSizes, with the read hits that LRU would have\n";
        out += &columns(
            &["SIZE", "FOOTPRINT", "READ HITS"],
            advice.sizes.iter().map(|size| {
                let of_footprint =
                    advised.of_footprint * size.cache_bytes as f64 / advised.cache_bytes as f64;
                let now = if own == Some(size.cache_bytes) { " (now)" } else { "" };
                let cells = [
                    format!("{}{now}", bytes(size.cache_bytes)),
                    percent(of_footprint),
                    percent(size.read_hit_ratio),
                ];
                (size.cache_bytes == advised.cache_bytes, cells.to_vec())
            }),
        );
    }
    section(&mut out, "Mind", &advice.caveats);
    out
}
