//! Chooses the write mode: write-back if it makes requests much faster and does not wear out the
//! flash.
//!
//! The same requests are replayed in virtual time with both modes. Write-back is tried with several
//! caches, because the best cache with write-through is not always the best one with write-back.
//! With write-back, an admission that refuses new data sends writes to the backing. The write-back
//! caches keep two copies of dirty data, as the preset `auto` does, so that the loss of one device
//! loses no data. Write-back is chosen only if the gain is large, because dirty data is not on the
//! backing until it is destaged. Backups, snapshots and other hosts must then not read the backing
//! without hob.

use anyhow::Result;
use hob_engine::policy::PolicyKind;
use hob_engine::preset::{PRESETS, Preset};
use serde::Serialize;

use super::candidates::{Setting, Trial};
use super::devices::WARRANTY_YEARS;
use super::input::CollectedTrace;
use super::joint_choice::Costs;
use super::latency::{self, Means, Timing};
use super::reporter::Reporter;
use super::{Options, Wear};

/// Write-back is chosen if its mean latency of all requests is at most this share of the latency
/// with write-through.
const GAIN_MIN: f64 = 0.7;
/// Write-back caches whose mean latency is at most this many times the lowest mean latency count as
/// equally fast. Of these caches, the one that takes the least flash wins.
const ALIKE: f64 = 1.1;
/// Write-back is considered only if at least this share of the requests are writes.
const WRITES_MIN: f64 = 0.05;

/// Write-back compared with write-through.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModeChoice {
    /// True if write-back is recommended.
    pub is_write_back: bool,
    /// Admission of the write-back cache.
    pub admission: String,
    /// The write-back cache. Its hits and flash writes are those of a simulation with write-through.
    pub cache: Trial,
    /// Mean latency of all requests with write-through, nanoseconds.
    pub through_ns: u64,
    /// Mean latency of all requests with write-back, nanoseconds.
    pub back_ns: u64,
    /// Flash writes of write-back in the replayed part of the trace, relative to those of
    /// write-through; `None` if write-through writes nothing to flash there.
    pub flash_writes: Option<f64>,
    /// Number of bytes that write-back writes to flash in the replayed part of the trace.
    pub flash_write_bytes: u64,
    /// Life of the flash with write-back in years; `None` if the trace has no times.
    pub life_years: Option<f64>,
    /// Wear of the flash with write-back; `None` if the trace has no times.
    #[serde(skip)]
    pub(super) wear: Option<Wear>,
}

/// Returns the preset whose write-back settings the advice recommends.
pub(super) fn preset() -> &'static Preset {
    PRESETS.iter().find(|preset| preset.name == "auto").expect("hob has this preset")
}

/// Returns a cache of this size and block size with the policy and admission of the preset.
pub(super) fn preset_choice(setting: Setting) -> Setting {
    let preset = preset();
    let policy = PolicyKind::from_name(preset.policy).expect("presets name policies");
    Setting { policy, admission: preset.admission, ..setting }
}

/// Returns true if the trace has enough writes to consider write-back.
pub(super) fn has_writes(held: &CollectedTrace) -> bool {
    let profile = &held.profile;
    profile.writes as f64 / (profile.reads + profile.writes) as f64 >= WRITES_MIN
}

/// Results of one cache in write-back mode.
struct Back<'a> {
    trial: &'a Trial,
    mean_ns: u64,
    /// Flash writes relative to those of the write-through cache, in the replayed part of the trace.
    flash_writes: Option<f64>,
    /// Number of bytes written to flash in the replayed part of the trace.
    flash_write_bytes: u64,
    /// Flash that the cache takes for five years, bytes.
    flash_bytes: f64,
    wear: Option<Wear>,
}

/// The best cache with write-through, its mean latencies, and the arrival times of its replay.
pub(super) type Through<'a> = (&'a Trial, &'a Means, Timing);

/// Compares write-back with write-through. `caches` are the caches to try with write-back, at least
/// one. Returns `None` if the trace has hardly any writes.
pub(super) fn choose(
    held: &CollectedTrace,
    options: &Options,
    costs: &Costs,
    caches: &[Trial],
    (cache, through, timing): Through<'_>,
    reporter: &Reporter<'_>,
) -> Result<Option<ModeChoice>> {
    if !has_writes(held) {
        return Ok(None);
    }
    let through_bytes = cache.flash_write_bytes as f64;
    let wear = super::wear(held, options, cache.setting.cache_bytes, through_bytes);
    let mut tried = Vec::with_capacity(caches.len());
    for trial in caches {
        let means = latency::measured(held, options, trial, true, timing, reporter)?;
        let replayed = means.flash_write_bytes as f64;
        let flash_writes =
            (through.flash_write_bytes > 0).then(|| replayed / through.flash_write_bytes as f64);
        let written = match flash_writes {
            Some(times) => through_bytes * times,
            None => through_bytes + replayed / latency::replayed_share(held),
        };
        let size = trial.setting.cache_bytes;
        tried.push(Back {
            trial,
            mean_ns: means.all_ns,
            flash_writes,
            flash_write_bytes: means.flash_write_bytes,
            flash_bytes: costs.flash_bytes_of(size, written),
            wear: super::wear(held, options, size, written),
        });
    }
    let is_advised = |back: &&Back<'_>| {
        (back.mean_ns as f64) < through.all_ns as f64 * GAIN_MIN
            && !is_worn(wear.as_ref(), back.wear.as_ref())
    };
    let advised: Vec<&Back<'_>> = tried.iter().filter(is_advised).collect();
    let is_write_back = !advised.is_empty();
    let back = if is_write_back { best(&advised) } else { best(&tried.iter().collect::<Vec<_>>()) };
    Ok(Some(ModeChoice {
        is_write_back,
        admission: back.trial.setting.admission.to_string(),
        cache: back.trial.clone(),
        through_ns: through.all_ns,
        back_ns: back.mean_ns,
        flash_writes: back.flash_writes,
        flash_write_bytes: back.flash_write_bytes,
        life_years: back.wear.as_ref().map(|wear| wear.life_years),
        wear: back.wear.clone(),
    }))
}

/// Returns true if write-back wears out flash too early. Wear is a reason against write-back only
/// if the flash would last long enough with write-through.
fn is_worn(through: Option<&Wear>, back: Option<&Wear>) -> bool {
    let lasts = |wear: &Wear| wear.life_years >= WARRANTY_YEARS;
    back.is_some_and(|back| !lasts(back)) && through.is_some_and(lasts)
}

/// Among the caches that are about as fast as the fastest one, returns the cache that takes the
/// least flash.
fn best<'a, 'b>(tried: &[&'a Back<'b>]) -> &'a Back<'b> {
    let fastest = tried.iter().map(|back| back.mean_ns).min().expect("at least one was tried");
    let alike = tried.iter().copied().filter(|back| back.mean_ns as f64 <= fastest as f64 * ALIKE);
    alike.min_by(|a, b| a.flash_bytes.total_cmp(&b.flash_bytes)).expect("the fastest cache qualifies")
}

#[cfg(test)]
mod tests {
    use hob_trace::{Op, Record};

    use super::super::{Endurance, Material};
    use super::*;

    #[test]
    fn of_equally_fast_caches_the_one_with_the_least_flash_wins() {
        let trial = Trial::made_up(0.5, 0);
        let back = |mean_ns, flash_bytes| Back {
            trial: &trial,
            mean_ns,
            flash_writes: Some(1.0),
            flash_write_bytes: 0,
            flash_bytes,
            wear: None,
        };
        let (fast, alike, sparing) = (back(1000, 9.0), back(1090, 5.0), back(1200, 1.0));
        assert_eq!(best(&[&fast, &alike, &sparing]).mean_ns, 1090);
        assert_eq!(best(&[&sparing, &fast]).mean_ns, 1000);
    }

    /// An admission can refuse all data of the replayed requests in write-through. The flash writes
    /// of write-back are then no multiple of those of write-through.
    #[test]
    fn write_back_is_compared_with_write_through_that_writes_nothing_to_flash() {
        let mut material = Material::new(usize::MAX);
        for i in 0..80_u64 {
            let (op, block) = if i % 2 == 0 { (Op::Read, 0) } else { (Op::Write, i) };
            material.add(&Record { at_ns: i * i * 1_000_000, offset: block * 4096, len: 4096, op, disk: 0 });
        }
        let (held, options) = (material.finish().unwrap(), Options::default());
        let costs = Costs::new(&held, Endurance::default());
        let cache = Trial::made_up(0.5, 4096);
        let caches = [Trial::made_up(0.5, 0)];
        let through = Means { read_ns: 1, hit_ns: 1, miss_ns: 1, all_ns: 1, flash_write_bytes: 0 };
        let through = (&cache, &through, Timing::OneAtATimeNoTimes);
        let go_on = &mut |_: &str, _: f64| true;
        let reporter = Reporter::new(go_on);
        let choice = choose(&held, &options, &costs, &caches, through, &reporter).unwrap().unwrap();
        assert_eq!(choice.flash_writes, None);
        assert!(choice.flash_write_bytes >= 20 * 4096, "{choice:?}");
        // Half of the requests are replayed.
        let days = held.profile.duration_ns as f64 / 86_400e9;
        let written = 4096.0 + 2.0 * choice.flash_write_bytes as f64;
        let wear = choice.wear.unwrap();
        assert!((wear.flash_write_bytes_per_day * days - written).abs() < 2.0, "{wear:?}");
    }
}
