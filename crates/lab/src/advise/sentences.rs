//! Writes the sentences of the advice: recommendation, reasons and caveats.

use hob_engine::admission::Admission;

use super::candidates::Trial;
use super::devices::WARRANTY_YEARS;
use super::input::CollectedTrace;
use super::latency::{self, Timing};
use super::{Advice, HIT_RATIO_MIN, Options, POINT, Setting, Verdict};
use crate::picture::Unit;

/// Minimum duration of a trace that shows daily repetition, seconds.
const DAY_S: f64 = 86_400.0;
/// Minimum duration of a trace that shows repeated reads well, seconds.
const HOUR_S: f64 = 3600.0;
/// Maximum life of flash that the advice reports, years.
const LIFE_YEARS_MAX: f64 = 50.0;
/// Write-back saves writes to the backing. The advice mentions the saved part of the written bytes,
/// or of the writes, only if this part is larger than 0.5 %.
const NOTICEABLE: f64 = 0.005;
/// If the target hit ratio exceeds the best possible hit ratio by more than this, the advice says
/// that no cache reaches the target.
const OVER: f64 = 0.005;

pub(super) fn bytes(value: u64) -> String {
    Unit::Bytes.text(value as f64)
}

/// Formats a ratio as a percentage without false precision.
pub(super) fn percent(ratio: f64) -> String {
    let percent = ratio * 100.0;
    if percent > 0.0 && percent < 0.05 {
        "less than 0.1 %".to_owned()
    } else if percent > 0.0 && percent < 9.95 || percent > 99.0 && percent < 100.0 {
        format!("{percent:.1} %")
    } else {
        format!("{percent:.0} %")
    }
}

pub(super) fn ms(ns: u64) -> String {
    Unit::Seconds.text(ns as f64 / 1e9)
}

pub(super) fn years(years: f64) -> String {
    match years {
        _ if years > LIFE_YEARS_MAX => format!("more than {LIFE_YEARS_MAX} years"),
        _ if years * 365.25 < 1.0 => "less than a day".to_owned(),
        _ if years < 1.0 => format!("{:.0} days", years * 365.25),
        _ => format!("{years:.1} years"),
    }
}

/// Formats a byte count in the form that `hob` parses.
pub(super) fn typed(bytes: u64) -> String {
    let suffixes = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    let exact = suffixes.into_iter().find(|(shift, _)| bytes.is_multiple_of(1 << shift));
    exact.map_or(bytes.to_string(), |(shift, suffix)| format!("{}{suffix}", bytes >> shift))
}

/// Describes a cache in one phrase.
pub(super) fn described(setting: &Setting) -> String {
    format!(
        "{} with {} blocks, policy {}, admission {}",
        bytes(setting.cache_bytes),
        bytes(setting.block_bytes.into()),
        setting.policy.info().name,
        setting.admission,
    )
}

/// Adds the sentences of the advice not to use a cache.
pub(super) fn refusing(mut advice: Advice, held: &CollectedTrace) -> Advice {
    advice.verdict = Verdict::NoCache;
    let best = advice.target.best_read_hit_ratio;
    let profile = &advice.profile;
    advice.summary = if profile.reads == 0 {
        "Give this disk no read cache: nothing is read from it in this trace.".to_owned()
    } else if best == 0.0 {
        "A cache does not help this disk: the trace never reads data that it has read or written before."
            .to_owned()
    } else {
        format!(
            "A cache does not help this disk: only {} of its reads ask for data that was read or written before, and a \
             cache of any size can serve only these reads.",
            percent(best)
        )
    };
    if best > 0.0 {
        advice.why.push(format!(
            "At most {1} of the {0} reads could be hits. Below {2:.0} %, a cache is not worth its flash.",
            profile.reads,
            percent(best),
            HIT_RATIO_MIN * 100.0,
        ));
    }
    push_write_back(&mut advice);
    push_trace_caveats(&mut advice, held);
    advice
}

/// Adds the sentences of a recommendation.
pub(super) fn recommending(mut advice: Advice, held: &CollectedTrace, options: &Options) -> Advice {
    let recommendation = advice.recommendation.clone().expect("there is a recommendation");
    let cache = &recommendation.cache;
    let setting = &cache.setting;
    let policy = setting.policy.info().name;
    let back = advice.mode.clone().filter(|mode| mode.is_write_back);
    let admission = back.as_ref().map_or(setting.admission.to_string(), |back| back.admission.clone());
    let mode = if back.is_some() { ", mode write-back" } else { "" };
    let mut summary = format!(
        "Give this disk {} with {} blocks, policy {policy}, admission {admission}{mode}: {} of its reads from \
         flash (now: none)",
        bytes(setting.cache_bytes),
        bytes(setting.block_bytes.into()),
        percent(cache.read_hit_ratio),
    );
    match &advice.latency {
        Some(latency) if back.is_some() => {
            let (without, with) = (ms(latency.all_without_ns), ms(latency.all_with_ns));
            summary += &format!(", mean request {without} → {with}");
        }
        Some(latency) => {
            summary += &format!(", mean read {} → {}", ms(latency.without_ns), ms(latency.with_ns));
        }
        None => {}
    }
    if let Some(wear) = &advice.wear {
        summary += &format!(", {} of flash writes a day", bytes(wear.flash_write_bytes_per_day as u64));
    }
    advice.summary = summary + ".";
    advice.command = format!(
        "hob cache enable DISK --pool POOL{} --size {} --block-size {} --policy {policy} --admission {admission} \
         --fill sectors",
        if back.is_some() { " --preset auto" } else { "" },
        typed(setting.cache_bytes),
        typed(setting.block_bytes.into()),
    );
    // The tables have alternatives to the best cache with write-through.
    let through = &recommendation.write_through;
    push_size(&mut advice, through);
    push_second_choice(&mut advice, through);
    push_policy(&mut advice, through);
    push_block(&mut advice, through);
    push_admission(&mut advice, cache);
    push_preset_choice(&mut advice, through);
    push_fill(&mut advice);
    push_mode(&mut advice);
    push_latency(&mut advice, options);
    push_wear(&mut advice);
    push_target_caveats(&mut advice, through, options);
    push_trace_caveats(&mut advice, held);
    advice
}

fn push_size(advice: &mut Advice, cache: &Trial) {
    let of_footprint = cache.setting.cache_bytes as f64 / advice.profile.footprint.bytes.max(1) as f64;
    let target = &advice.target;
    let aim = if target.is_given {
        format!("the {} you asked for", percent(target.read_hit_ratio))
    } else {
        format!("nine tenths of the {} that no cache can exceed", percent(target.best_read_hit_ratio))
    };
    let size = bytes(cache.setting.cache_bytes);
    let (share, touched) = (percent(of_footprint), bytes(advice.profile.footprint.bytes));
    let reaches = match target.read_hit_ratio - cache.read_hit_ratio {
        ..=POINT => format!("is the smallest tried with this policy and admission that reaches {aim}"),
        short => format!("misses {aim} by {:.1} points, for far fewer flash writes", short * 100.0),
    };
    advice.why.push(format!("Size: {size}, {share} of the {touched} the trace touches, {reaches}."));
    advice.why.push(
        "Size, blocks, policy and admission were chosen together: of the combinations compared that reach the aim, \
         it has about the smallest product of flash in five years and mean latency."
            .to_owned(),
    );
    if let Some(knee) = advice.knee
        && knee.cache_bytes * 10 < cache.setting.cache_bytes * 9
    {
        advice.why.push(format!(
            "The knee of the curve is at {} ({} by LRU): the choice when flash is scarce.",
            bytes(knee.cache_bytes),
            percent(knee.read_hit_ratio),
        ));
    }
}

/// Compares the cache with the second-best combination.
fn push_second_choice(advice: &mut Advice, cache: &Trial) {
    let Some(second) = &advice.second_choice else { return };
    let latency = second.mean_ns.map_or(String::new(), |ns| format!(", mean request {}", ms(ns)));
    let sentence = format!(
        "Runner-up: {} serves {} of the reads instead of {}{latency}, {}.",
        second.value,
        percent(second.trial.read_hit_ratio),
        percent(cache.read_hit_ratio),
        writes_compared(&second.trial, cache),
    );
    advice.why.push(sentence);
}

fn push_policy(advice: &mut Advice, cache: &Trial) {
    let chosen = cache.setting.policy;
    let name = chosen.info().name;
    let find = |name: &str| advice.policies.iter().find(|trial| trial.setting.policy.info().name == name);
    let (Some(own), Some(best)) = (find(name), advice.policies.first()) else { return };
    let against = match find("lru") {
        Some(_) if name == "lru" => String::new(),
        Some(lru) if looks_equal(lru, own) => format!(" (lru has as many, {})", writes_compared(lru, own)),
        Some(lru) => format!(" (lru: {})", percent(lru.read_hit_ratio)),
        None => String::new(),
    };
    let place = match best.read_hit_ratio - own.read_hit_ratio {
        ..1e-9 => "has the most hits of all at this size".to_owned(),
        ..=POINT => "is within a point of the best at this size".to_owned(),
        _ => format!("has fewer hits than {}, for fewer flash writes", best.setting.policy.info().name),
    };
    advice.why.push(format!("Policy: {name} {place}, {}{against}.", percent(own.read_hit_ratio)));
}

/// Returns true if two hit ratios have the same text.
fn looks_equal(one: &Trial, other: &Trial) -> bool {
    percent(one.read_hit_ratio) == percent(other.read_hit_ratio)
}

/// Returns a phrase that compares the flash writes of the cache `other` with those of the chosen
/// cache `own`.
fn writes_compared(other: &Trial, own: &Trial) -> String {
    let (other, own) = (bytes(other.flash_write_bytes), bytes(own.flash_write_bytes));
    match other == own {
        true => "and writes as much to flash".to_owned(),
        false => format!("and writes {other} to flash instead of {own}"),
    }
}

fn push_block(advice: &mut Advice, cache: &Trial) {
    let block = u64::from(cache.setting.block_bytes);
    let larger = advice.block_sizes.iter().find(|size| size.block_bytes == block * 2);
    let smallest = advice.block_sizes.first().filter(|size| size.block_bytes < block);
    let against = match (larger, smallest) {
        (Some(larger), _) => {
            format!("with LRU, blocks of {} reach {}", bytes(block * 2), percent(larger.read_hit_ratio))
        }
        (None, Some(_)) => "larger blocks were not tried".to_owned(),
        (None, None) => "larger blocks would be mostly empty".to_owned(),
    };
    advice.why.push(format!(
        "Blocks: {} is the largest size without loss of hits, and its index takes {} of memory; {against}.",
        bytes(block),
        bytes(cache.memory_bytes),
    ));
}

fn push_admission(advice: &mut Advice, cache: &Trial) {
    let admission = cache.setting.admission;
    let find = |admission| advice.admissions.iter().find(|trial| trial.setting.admission == admission);
    let Some(own) = find(admission) else { return };
    let has_other = |trial: &&Trial| trial.setting.admission != admission;
    let hits = |trial: &Trial| percent(trial.read_hit_ratio);
    let sentence = match find(Admission::default()).filter(has_other) {
        // The cache does not admit everything.
        Some(always) => {
            let part = own.flash_write_bytes as f64 / always.flash_write_bytes.max(1) as f64;
            format!(
                "Admission: {admission} writes {} as much to flash as always; {} of the reads hit (always: {}).",
                percent(part),
                hits(own),
                hits(always),
            )
        }
        None => {
            let others = advice.admissions.iter().filter(has_other);
            let Some(next) = others.max_by(|a, b| a.read_hit_ratio.total_cmp(&b.read_hit_ratio)) else {
                return;
            };
            let other = next.setting.admission;
            if looks_equal(next, own) {
                format!(
                    "Admission: {admission}; the next best, {other}, has as many hits ({}), {}.",
                    hits(own),
                    writes_compared(next, own),
                )
            } else {
                format!(
                    "Admission: {admission}; the next best, {other}, has {} of hits instead of {}.",
                    hits(next),
                    hits(own),
                )
            }
        }
    };
    advice.why.push(sentence);
    if let Some(write_through) = advice.recommendation.as_ref().map(|advised| &advised.write_through)
        && write_through.setting.admission != admission
    {
        let other = write_through.setting.admission;
        advice.why.push(format!(
            "With write-through, admission {other} would be better. With write-back it would send new writes to the \
             backing."
        ));
    }
}

/// Compares the cache with the policy and admission that a cache has by default.
fn push_preset_choice(advice: &mut Advice, cache: &Trial) {
    let Some(default) = &advice.preset_choice else { return };
    if default.setting == cache.setting {
        return;
    }
    let sentence = format!(
        "Default: policy {} and admission {}, which hob chooses while the cache serves, {}, {}.",
        default.setting.policy.info().name,
        default.setting.admission,
        match looks_equal(default, cache) {
            true => format!("serve as many reads ({})", percent(cache.read_hit_ratio)),
            false => format!(
                "serve {} of the reads instead of {}",
                percent(default.read_hit_ratio),
                percent(cache.read_hit_ratio)
            ),
        },
        writes_compared(default, cache).replace("and writes", "and write"),
    );
    advice.why.push(sentence);
}

fn push_fill(advice: &mut Advice) {
    let (Some(filled), Some(advised)) = (&advice.preset_fill, &advice.recommendation) else { return };
    let own = &advised.write_through;
    let hits = if looks_equal(filled, own) {
        "has as many hits".to_owned()
    } else {
        format!(
            "serves {} of the reads instead of {}",
            percent(filled.read_hit_ratio),
            percent(own.read_hit_ratio)
        )
    };
    let sentence = format!(
        "Fill: the command has --fill sectors, like all results here. The preset's fill auto also reads data \
         next to a miss: it {hits}, {}.",
        writes_compared(filled, own),
    );
    advice.why.push(sentence);
}

fn push_mode(advice: &mut Advice) {
    let profile = &advice.profile;
    if profile.writes == 0 {
        advice.why.push("Mode: write-through (preset vfrc); the trace writes nothing.".to_owned());
        return;
    }
    let Some(mode) = advice.mode.clone() else {
        advice.why.push(format!(
            "Mode: write-through (preset vfrc); {} of the requests are reads.",
            percent(profile.read_percent / 100.0),
        ));
        return push_write_back(advice);
    };
    let life = mode.life_years.map_or(String::new(), |life| format!(", and flash lasts {}", years(life)));
    let (back, through) = (ms(mode.back_ns), ms(mode.through_ns));
    let instead =
        if back == through { " with both modes".to_owned() } else { format!(" instead of {through}") };
    let written = match mode.flash_writes {
        Some(times) => format!("flash is written {times:.1} times as much"),
        None if mode.flash_write_bytes == 0 => {
            "neither mode writes to flash in the replayed requests".to_owned()
        }
        None => format!(
            "write-back writes {} to flash in the replayed requests, and write-through writes nothing to flash there",
            bytes(mode.flash_write_bytes),
        ),
    };
    let compared = format!("a request takes {back} on average{instead}, {written}{life}");
    if mode.is_write_back {
        advice
            .why
            .push(format!("Mode: write-back (preset auto) with admission {}: {compared}.", mode.admission));
        push_other_cache(advice);
        advice.caveats.push(
            "Write-back: for up to 30 seconds, written data is only on flash, so nothing else may read or change \
             the backing. Use a pool of two devices: with one device, a loss of the device loses this data."
                .to_owned(),
        );
    } else {
        advice.why.push(format!(
            "Mode: write-through (preset vfrc). With write-back and admission {}, {compared}. But with write-back, \
             written data is only on flash for a time.",
            mode.admission
        ));
        push_write_back(advice);
    }
}

/// If the write-back cache differs from the write-through cache in more than the admission, adds a
/// sentence about the difference.
fn push_other_cache(advice: &mut Advice) {
    let Some(advised) = &advice.recommendation else { return };
    let (back, through) = (advised.cache.setting, advised.write_through.setting);
    if (Setting { admission: back.admission, ..through }) == back {
        return;
    }
    let sentence = format!(
        "With write-back, {} is better than {}, which is the best with write-through. The other reasons and the tables \
         are for the cache with write-through.",
        described(&back),
        described(&through),
    );
    advice.why.push(sentence);
}

fn push_write_back(advice: &mut Advice) {
    if let Some(saves) = advice.write_back.filter(|saves| saves.absorbed_ratio > NOTICEABLE) {
        // Dirty blocks are destaged one by one, so writes larger than a block become more writes.
        let writes = match saves.writes_saved_ratio {
            NOTICEABLE.. => format!(" and {} of the writes", percent(saves.writes_saved_ratio)),
            _ => String::new(),
        };
        let absorbed = percent(saves.absorbed_ratio);
        advice.why.push(format!(
            "With write-back, {absorbed} of the written bytes{writes} would never go to the backing. Until it is destaged, \
             written data would be only on flash."
        ));
    }
}

fn push_latency(advice: &mut Advice, options: &Options) {
    let Some(latency) = advice.latency.clone() else {
        advice
            .caveats
            .push("Latency is not estimated: the end of the trace has no read that hits.".to_owned());
        return;
    };
    advice.why.push(format!(
        "Latency: {} from {}, {} from {}; both are models{}.",
        ms(latency.hit_ns),
        latency.flash,
        ms(latency.miss_ns),
        latency.backing,
        if latency.timing == Timing::Original {
            ", at the trace's own times"
        } else {
            ", one request at a time"
        },
    ));
    match latency.timing {
        Timing::Original => {}
        Timing::OneAtATimeNoTimes => advice.caveats.push(
            "The trace has no times: the latencies do not include queueing, and the flash writes a day are \
             unknown."
                .to_owned(),
        ),
        Timing::OneAtATimeEven => advice.caveats.push(
            "The requests of the trace are evenly spaced in time: the latencies do not include queueing.".to_owned(),
        ),
        Timing::OneAtATimeOverload => advice.caveats.push(format!(
            "The requests of the trace arrive faster than {} alone can serve them: the latencies do not include \
             queueing. Give your backing \
             with --backing.",
            options.backing.describe(),
        )),
    }
    if latency.with_ns >= latency.without_ns {
        advice.caveats.push("On this backing the cache does not reduce the latency.".to_owned());
    }
}

fn push_wear(advice: &mut Advice) {
    let Some(wear) = &advice.wear else { return };
    let sentence = format!(
        "Flash: the cache writes {:.1} times its size a day. Flash of its size with a rating of {} lasts {}.",
        wear.cache_writes_per_day,
        wear.endurance,
        years(wear.life_years),
    );
    let advised = match wear.device_bytes {
        Some(device) => {
            format!("To last {WARRANTY_YEARS} years, it needs a device of {}", bytes(device as u64))
        }
        None => "It needs more flash".to_owned(),
    };
    if wear.life_years < WARRANTY_YEARS {
        advice.caveats.push(format!("{sentence} {advised}, or a device with a better rating (--endurance)."));
    } else {
        advice.why.push(sentence);
    }
}

fn push_target_caveats(advice: &mut Advice, cache: &Trial, options: &Options) {
    let best = advice.target.best_read_hit_ratio;
    if let Some(asked) = options.target_hit.filter(|asked| *asked > best + OVER) {
        advice.caveats.push(format!(
            "No cache reaches the {} you asked for: at most {} is possible, because the other reads are first \
             reads of their data.",
            percent(asked),
            percent(best),
        ));
    }
    if advice.sample_rate < 1.0 {
        let estimated = "The tables on other sizes, policies and blocks are";
        advice.caveats.push(format!(
            "{estimated} estimated from {} of the trace; the recommended cache was simulated over the whole trace.",
            percent(advice.sample_rate),
        ));
    }
    if cache.read_hit_ratio < advice.target.read_hit_ratio - 3.0 * POINT {
        advice.caveats.push(format!(
            "The sample promised a hit ratio of {}, but over the whole trace the ratio is lower.",
            percent(advice.target.read_hit_ratio),
        ));
    }
}

fn push_trace_caveats(advice: &mut Advice, held: &CollectedTrace) {
    let profile = &held.profile;
    if held.left_out > 0 {
        advice.caveats.push(format!(
            "Only the first {} requests were used; {} more were left out.",
            profile.requests, held.left_out
        ));
    }
    if profile.disks > 1 {
        advice.caveats.push(format!(
            "The trace has {} disks, and this is one cache for all; use --disk for the cache of one disk, or --share for a \
             pool of all.",
            profile.disks
        ));
    } else if held.is_moved && advice.verdict == Verdict::Cache {
        advice.caveats.push(
            "Addresses beyond 4 TiB were moved together, so the simulated seeks are too short.".to_owned(),
        );
    }
    if let Some(seconds) = latency::seconds(held).filter(|seconds| *seconds < DAY_S) {
        let what = match advice.verdict {
            Verdict::NoCache => {
                "data that is read once in this time may be read again within a day: record a longer trace to be sure"
            }
            Verdict::Cache if seconds < HOUR_S => {
                "figures for a day assume the same load all day, and a longer trace may show more reuse"
            }
            Verdict::Cache => "figures for a day assume the same load all day",
        };
        advice.caveats.push(format!("The trace lasts {}: {what}.", Unit::Seconds.text(seconds)));
    }
    let cold = 1.0 - advice.target.best_read_hit_ratio;
    if advice.verdict == Verdict::Cache && cold > 0.5 {
        advice.caveats.push(format!(
            "{} of the reads are first reads of their data; a longer trace may show that this data is read again.",
            percent(cold)
        ));
    }
}

#[cfg(test)]
mod tests {
    use hob_trace::profile::Profile;

    use super::*;
    use crate::advise::ModeChoice;

    #[test]
    fn equal_texts_are_not_compared() {
        let (own, other) = (Trial::made_up(0.951, 2 << 20), Trial::made_up(0.949, 1 << 20));
        assert!(looks_equal(&own, &other) && !looks_equal(&own, &Trial::made_up(0.93, 0)));
        assert_eq!(writes_compared(&other, &own), "and writes 1 MiB to flash instead of 2 MiB");
        assert_eq!(writes_compared(&own, &own), "and writes as much to flash");
    }

    #[test]
    fn flash_writes_of_write_back_are_not_compared_with_none() {
        let said = |flash_writes, flash_write_bytes| {
            let mode = ModeChoice {
                is_write_back: false,
                admission: "always".to_owned(),
                cache: Trial::made_up(0.5, 0),
                through_ns: 2_000_000,
                back_ns: 1_000_000,
                flash_writes,
                flash_write_bytes,
                life_years: None,
                wear: None,
            };
            let profile = Profile { reads: 1, writes: 1, ..Profile::default() };
            let mut advice = Advice { mode: Some(mode), profile, ..Advice::default() };
            push_mode(&mut advice);
            advice.why.join(" ")
        };
        let times = said(Some(1.5), 3 << 20);
        assert!(times.contains("flash is written 1.5 times as much"), "{times}");
        let only_back = said(None, 3 << 20);
        assert!(only_back.contains("write-back writes 3 MiB to flash"), "{only_back}");
        assert!(only_back.contains("write-through writes nothing to flash"), "{only_back}");
        assert!(!only_back.contains("times as much"), "{only_back}");
        let neither = said(None, 0);
        assert!(neither.contains("neither mode writes to flash"), "{neither}");
    }
}
