//! Chooses the write mode: write-back if it makes requests much faster and does not wear out the
//! flash.
//!
//! Both modes play the same requests in virtual time. Write-back keeps two copies of dirty data, as
//! the preset `auto` does, because the only copy on a lost device is lost data. Write-back is
//! chosen only if the gain is large: dirty data is not on the backing until it is destaged, so
//! backups, snapshots and other hosts must not read the backing without hob.

use anyhow::Result;
use hob_engine::admission::Admission;
use hob_engine::preset::{PRESETS, Preset};
use serde::Serialize;

use super::candidates::Trial;
use super::devices::WARRANTY_YEARS;
use super::input::CollectedTrace;
use super::latency::{self, Means, Timing};
use super::{Options, Wear};

/// Write-back is chosen if it reduces the mean latency of all requests at least to this part.
const GAIN_MIN: f64 = 0.7;
/// Write-back is considered only if at least this share of the requests are writes.
const WRITES_MIN: f64 = 0.05;

/// Write-back compared with write-through.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModeChoice {
    /// True if write-back is recommended.
    pub is_write_back: bool,
    /// Admission of the write-back cache.
    pub admission: String,
    /// Mean latency of all requests with write-through, nanoseconds.
    pub through_ns: u64,
    /// Mean latency of all requests with write-back, nanoseconds.
    pub back_ns: u64,
    /// Flash writes of write-back, relative to those of write-through.
    pub flash_writes: f64,
    /// Life of the flash with write-back in years; `None` if the trace has no times.
    pub life_years: Option<f64>,
}

/// Returns the preset whose write-back settings the advice recommends.
pub(super) fn preset() -> &'static Preset {
    PRESETS.iter().find(|preset| preset.name == "auto").expect("hob has this preset")
}

/// Compares write-back with write-through, whose latencies are `through`. `always` is the cache
/// that admits all data. Returns `None` if the trace has hardly any writes.
pub(super) fn choose(
    held: &CollectedTrace,
    options: &Options,
    (cache, always): (&Trial, &Trial),
    (through, timing): (&Means, Timing),
    wear: Option<&Wear>,
) -> Result<Option<ModeChoice>> {
    let profile = &held.profile;
    let writes = profile.writes as f64 / (profile.reads + profile.writes) as f64;
    if writes < WRITES_MIN {
        return Ok(None);
    }
    let mut best: Option<(Means, Admission)> = None;
    for cache in [cache, always] {
        let means = latency::measured(held, options, cache, true, timing)?;
        if best.as_ref().is_none_or(|(best, _)| means.all_ns < best.all_ns) {
            best = Some((means, cache.setting.admission));
        }
    }
    let (back, admission) = best.expect("there is an admission");
    let flash_writes = back.flash_write_bytes as f64 / through.flash_write_bytes.max(1) as f64;
    let life_years = wear.map(|wear| wear.life_years / flash_writes.max(1e-9));
    let lasts = |years: f64| years >= WARRANTY_YEARS;
    // Wear is a reason against write-back only if the flash would last long enough with
    // write-through.
    let is_worn =
        life_years.is_some_and(|back| !lasts(back)) && wear.is_some_and(|wear| lasts(wear.life_years));
    let is_faster = (back.all_ns as f64) < through.all_ns as f64 * GAIN_MIN;
    Ok(Some(ModeChoice {
        is_write_back: is_faster && !is_worn,
        admission: admission.to_string(),
        through_ns: through.all_ns,
        back_ns: back.all_ns,
        flash_writes,
        life_years,
    }))
}
