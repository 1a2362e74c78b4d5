//! Tests the advice on traces for which the best advice is known.

use std::sync::LazyLock;

use hob_engine::granularity::Fill;
use hob_engine::policy::PolicyKind;

use super::*;
use crate::generate::GENERATORS;
use crate::prng::Prng;
use crate::sim::{Point, Simulation};
use hob_trace::{Op, Record};

const MIB: u64 = 1 << 20;

fn read(at_ns: u64, offset: u64, len: u32) -> Record {
    Record { at_ns, offset, len, op: Op::Read, disk: 0 }
}

fn advice_with(records: &[Record], options: &Options) -> Advice {
    let mut material = Material::new(usize::MAX);
    records.iter().for_each(|record| material.add(record));
    advise(material, options, &mut |_, _| true).unwrap()
}

fn advice(records: &[Record]) -> Advice {
    advice_with(records, &Options::default())
}

/// Returns requests of a generator, one per millisecond on average.
fn generated(name: &str, settings: &[&str]) -> Vec<Record> {
    let generator = GENERATORS.iter().find(|row| row.name == name).unwrap();
    generator.experiment(settings).unwrap().into_records(1_000_000).collect()
}

fn zipf(settings: &[&str]) -> Vec<Record> {
    generated("zipf", &[&["footprint=256M", "theta=1.0"], settings].concat())
}

/// Requests of 16 KiB, of which a fifth are writes, and the advice for these requests.
static LARGE_REQUESTS: LazyLock<(Vec<Record>, Advice)> = LazyLock::new(|| {
    let records = zipf(&["requests=20000", "footprint=32M", "io=16K", "read-percent=80"]);
    let found = advice(&records);
    (records, found)
});

/// Reads of 4 KiB, and the advice for these reads. The name of the trace has characters that HTML
/// must not have.
static SMALL_READS: LazyLock<(Vec<Record>, Advice)> = LazyLock::new(|| {
    let records = zipf(&["requests=30000", "footprint=32M"]);
    let options = Options { trace: "<web & co>.csv".to_owned(), ..Options::default() };
    let found = advice_with(&records, &options);
    (records, found)
});

/// Returns the hit ratio of a cache over all records.
fn simulated(records: &[Record], setting: Setting) -> f64 {
    simulated_filling(records, setting, Fill::Sectors)
}

fn simulated_filling(records: &[Record], setting: Setting, fill: Fill) -> f64 {
    let Setting { cache_bytes, block_bytes, policy, admission } = setting;
    let point =
        Point { policy, admission, fill, block_bytes, cache_bytes, flash_writes: None, sample_rate: 1.0 };
    let mut simulation = Simulation::new(point).unwrap();
    simulation.feed(records);
    simulation.result().stats.read_hit_ratio()
}

fn lru() -> PolicyKind {
    PolicyKind::from_name("lru").unwrap()
}

#[test]
fn a_zipf_load_gets_a_size_at_its_target() {
    let records = zipf(&["requests=50000", "footprint=64M"]);
    let advice = advice(&records);
    let advised = advice.recommendation.as_ref().unwrap();
    let setting = advised.cache.setting;
    assert_eq!((advice.verdict, advice.sample_rate), (Verdict::Cache, 1.0));
    assert_eq!(advised.cache.read_hit_ratio, simulated(&records, setting));
    let best = advice.target.best_read_hit_ratio;
    let distinct = advice.profile.footprint.sectors as f64;
    assert!((best - (1.0 - distinct / 50_000.0)).abs() < 1e-9, "all but first reads: {best}");
    assert!((advised.cache.read_hit_ratio - 0.9 * best).abs() < 0.03, "{}", advice.summary);
    // Not larger than LRU needs, and not twice as large as necessary.
    let lru_bytes = advice.block_sizes[0].target_bytes.unwrap();
    assert!(setting.cache_bytes <= lru_bytes + MIB, "{} of {lru_bytes}", setting.cache_bytes);
    let half = Setting { cache_bytes: setting.cache_bytes / 2, ..setting };
    assert!(simulated(&records, half) < 0.9 * best - 0.01);
    // Near the knee: scattered sectors in small blocks, within a small factor of the size.
    let knee = advice.knee.unwrap();
    assert!((1..=6).contains(&(setting.cache_bytes / knee.cache_bytes)), "knee {knee:?}, {setting:?}");
    assert_eq!(setting.block_bytes, 4096);
    assert_eq!(advice.policies.len(), PolicyKind::all().filter(|kind| kind.info().serves).count());
    assert!(
        advice.command.contains(&format!("--policy {} ", setting.policy.info().name)) || {
            advice.command.ends_with(&format!("--policy {}", setting.policy.info().name))
        }
    );
}

#[test]
fn a_sample_gives_nearly_the_same_advice_as_the_whole() {
    let records = zipf(&["requests=60000", "io=16K", "footprint=256M", "theta=0.8"]);
    let whole = advice(&records);
    let sampled = advice_with(&records, &Options { touches_max: 50_000, ..Options::default() });
    assert!(whole.sample_rate == 1.0 && sampled.sample_rate < 0.25);
    let (whole_at, sampled_at) = (whole.recommendation.unwrap().cache, sampled.recommendation.unwrap().cache);
    let sizes = sampled_at.setting.cache_bytes as f64 / whole_at.setting.cache_bytes as f64;
    assert!((0.7..1.4).contains(&sizes), "{sizes}");
    let hits = (sampled_at.read_hit_ratio, whole_at.read_hit_ratio);
    assert!((hits.0 - hits.1).abs() < 0.04, "{hits:?}: {sampled_at:?}, {whole_at:?}");
    // The sample's prediction holds over the whole trace.
    assert!((sampled_at.read_hit_ratio - sampled.target.read_hit_ratio).abs() < 0.05);
    assert_eq!(sampled_at.read_hit_ratio, simulated(&records, sampled_at.setting));
    for (a, b) in whole.block_sizes.iter().zip(&sampled.block_sizes) {
        let (a, b) = (a.target_bytes.unwrap() as f64, b.target_bytes.unwrap() as f64);
        assert!((0.6..1.5).contains(&(b / a)), "{a} {b}");
    }
    assert!(sampled.caveats.iter().any(|words| words.contains("estimated from")), "{:?}", sampled.caveats);
}

#[test]
fn a_long_trace_of_few_regions_is_used_completely() {
    let records: Vec<Record> = (0..1000).map(|i| read(i * i * 1000, i * 7919 % 256 * 4096, 4096)).collect();
    // A sample of this size has none of the four regions of 256 KiB.
    let found = advice_with(&records, &Options { touches_max: 20, ..Options::default() });
    assert_eq!((found.verdict, found.sample_rate), (Verdict::Cache, 1.0), "{}", found.summary);
}

#[test]
fn a_scan_gets_no_cache() {
    let records: Vec<Record> =
        (0..20_000).map(|i| read(i * i % 7919 + i * 10_000, i * 65_536, 65_536)).collect();
    let advice = advice(&records);
    assert_eq!((advice.verdict, advice.command.as_str()), (Verdict::NoCache, ""));
    assert!(advice.recommendation.is_none());
    assert!(advice.summary.contains("does not help"), "{}", advice.summary);
    assert!(
        advice.caveats.iter().any(|words| words.contains("record a longer trace")),
        "{:?}",
        advice.caveats
    );
    assert!(text(&advice).starts_with(&advice.summary[..40]));
    assert!(page(&advice, "").contains("does not help"));
}

#[test]
fn rare_returns_and_a_disk_that_is_only_written_get_no_cache() {
    let mut records: Vec<Record> = (0..10_000).map(|i| read(i * 1000, i * 4096, 4096)).collect();
    records.extend((0..300).map(|i| read((10_000 + i) * 1000, i * 4096, 4096)));
    let rare = advice(&records);
    assert_eq!(rare.verdict, Verdict::NoCache);
    assert!(rare.summary.contains("2.9 %"), "{}", rare.summary);
    let writes: Vec<Record> =
        (0..5000).map(|i| Record { op: Op::Write, ..read(i * 1000, (i % 100) * 4096, 4096) }).collect();
    let written = advice(&writes);
    assert!(written.summary.contains("nothing is read"), "{}", written.summary);
    assert_eq!(written.verdict, Verdict::NoCache);
}

#[test]
fn a_loop_gets_room_for_all_of_it_or_a_policy_that_stands_loops() {
    // 16 MiB, read 10 times: a smaller LRU cache has no hits.
    let records: Vec<Record> =
        (0..10 * 4096_u64).map(|i| read(i * 1_000_000, i % 4096 * 4096, 4096)).collect();
    let found = advice(&records);
    let advised = found.recommendation.unwrap();
    assert!((found.target.best_read_hit_ratio - 0.9).abs() < 1e-9);
    assert!(advised.cache.read_hit_ratio > 0.8, "{}", found.summary);
    let setting = advised.cache.setting;
    assert!((10 * MIB..=17 * MIB).contains(&setting.cache_bytes), "{setting:?}");
    let smaller = Setting { cache_bytes: 15 * MIB, policy: lru(), ..setting };
    assert_eq!(simulated(&records, smaller), 0.0);
    // One request per millisecond exactly: the times are request numbers.
    assert!(found.wear.is_none());
    assert!(found.caveats.iter().any(|words| words.contains("no times")), "{:?}", found.caveats);
}

#[test]
fn evenly_spaced_requests_have_flash_writes_a_day() {
    let requests = zipf(&["requests=10000", "footprint=16M"]);
    let records: Vec<Record> =
        (0..).zip(requests).map(|(i, record)| Record { at_ns: i * 2_000_000, ..record }).collect();
    let found = advice(&records);
    let wear = found.wear.as_ref().unwrap();
    assert!(wear.flash_write_bytes_per_day > 0.0 && wear.life_years > 0.0, "{wear:?}");
    assert!(found.summary.contains("of flash writes a day"), "{}", found.summary);
    assert_eq!(found.latency.as_ref().unwrap().timing, Timing::OneAtATimeEven);
    for (part, expected) in [("no times", false), ("evenly spaced in time", true), ("The trace lasts", true)]
    {
        let found = found.caveats.iter().any(|words| words.contains(part));
        assert_eq!(found, expected, "{part}");
    }
}

#[test]
fn dense_reuse_gets_larger_blocks_than_scattered() {
    let dense = advice(&zipf(&["requests=30000", "io=64K", "footprint=256M"]));
    let scattered = advice(&zipf(&["requests=30000", "footprint=2G", "theta=1.1"]));
    let block = |advice: &Advice| advice.recommendation.as_ref().unwrap().cache.setting.block_bytes;
    assert_eq!(block(&dense), 64 << 10);
    assert_eq!(block(&scattered), 4 << 10);
}

#[test]
fn a_target_is_reached_at_the_least_size_or_said_to_be_beyond_reach() {
    let records = zipf(&["requests=25000", "footprint=256M", "theta=0.9"]);
    let half = advice_with(&records, &Options { target_hit: Some(0.5), ..Options::default() });
    let cache = half.recommendation.unwrap().cache;
    assert!(cache.read_hit_ratio >= 0.495, "{}", half.summary);
    let smaller = Setting { cache_bytes: cache.setting.cache_bytes - MIB, ..cache.setting };
    assert!(simulated(&records, smaller) < 0.5, "{}", half.summary);
    let records = zipf(&["requests=5000", "footprint=16M"]);
    let all = advice_with(&records, &Options { target_hit: Some(0.999), ..Options::default() });
    assert!(all.caveats.iter().any(|words| words.contains("No cache reaches")), "{:?}", all.caveats);
}

#[test]
fn reads_become_faster_and_flash_is_worn_as_the_trace_says() {
    let records = zipf(&["requests=30000", "read-percent=70", "iops=50", "footprint=32M"]);
    let options = Options { backing: "fixed:10,10".parse().unwrap(), ..Options::default() };
    let found = advice_with(&records, &options);
    let latency = found.latency.unwrap();
    let advised = found.recommendation.unwrap();
    // The latencies of reads are those of write-through, and write-back may use another cache.
    let (cache, through) = (advised.cache, advised.write_through);
    // Some reads wait for a write of the same sectors.
    assert_eq!((latency.timing, latency.without_ns / 200_000), (Timing::Original, 50));
    assert!(latency.hit_ns < 500_000 && latency.miss_ns >= 10_000_000, "{latency:?}");
    let hits = through.read_hit_ratio;
    let expected = hits * latency.hit_ns as f64 + (1.0 - hits) * latency.miss_ns as f64;
    assert!((latency.with_ns as f64 - expected).abs() < 2.0);
    let wear = found.wear.unwrap();
    let days = found.profile.duration_ns as f64 / 86_400e9;
    // A backing of 10 ms makes write-back worthwhile, which writes more to flash.
    let mode = found.mode.unwrap();
    assert!(mode.is_write_back && mode.back_ns * 2 < mode.through_ns, "{mode:?}");
    assert_eq!(mode.cache, cache);
    let written = through.flash_write_bytes as f64 * mode.flash_writes.unwrap();
    assert!((wear.flash_write_bytes_per_day * days - written).abs() < 2.0);
    let per_day = wear.flash_write_bytes_per_day / cache.setting.cache_bytes as f64;
    assert!((wear.life_years * per_day - 5.0).abs() < 0.01, "a drive write a day lasts five years");
    assert!((wear.device_bytes.unwrap() - wear.flash_write_bytes_per_day).abs() < 1.0);
    let saves = found.write_back.unwrap();
    assert!((0.2..1.0).contains(&saves.absorbed_ratio), "{saves:?}");
}

#[test]
fn a_backing_that_cannot_keep_up_is_measured_without_queues() {
    let records = zipf(&["requests=10000", "iops=20000", "footprint=64M"]);
    let found = advice(&records);
    let latency = found.latency.unwrap();
    assert_eq!(latency.timing, Timing::OneAtATimeOverload);
    assert!((1_000_000..30_000_000).contains(&latency.without_ns), "{latency:?}");
    assert!(found.caveats.iter().any(|words| words.contains("--backing")));
}

#[test]
fn bursts_are_not_an_overload() {
    // 0.6 requests per second, 200 at the same time.
    let mut records = zipf(&["requests=10000", "footprint=64M"]);
    for (number, record) in (0..).zip(&mut records) {
        record.at_ns = number / 200 * 333_000_000_000 + number % 200;
    }
    let found = advice(&records);
    assert_eq!(found.latency.unwrap().timing, Timing::Original);
    assert!(!found.caveats.iter().any(|words| words.contains("--backing")), "{:?}", found.caveats);
}

/// Returns the advised cache with its results, for comparisons.
fn advised(advice: &Advice) -> &Trial {
    &advice.recommendation.as_ref().expect("a cache is advised").cache
}

#[test]
fn no_change_of_one_property_has_more_hits_with_fewer_writes() {
    for settings in [&["theta=0.7", "io=16K"][..], &["theta=1.1"], &["read-percent=60"]] {
        let records = zipf(&[settings, &["requests=20000", "footprint=32M"]].concat());
        let found = advice(&records);
        // Write-back may use another admission, because it is faster.
        let own = &found.recommendation.as_ref().expect("a cache is advised").write_through;
        let others = found.policies.iter().chain(&found.admissions);
        assert_eq!(others.clone().filter(|trial| trial.setting == own.setting).count(), 2);
        for other in others {
            let has_more = other.read_hit_ratio > own.read_hit_ratio + POINT;
            let is_sparing = other.flash_write_bytes < own.flash_write_bytes;
            assert!(!(has_more && is_sparing), "{other:?} beats {own:?}");
        }
    }
}

#[test]
fn each_property_has_a_runner_up_with_its_own_results() {
    let (records, found) = &*LARGE_REQUESTS;
    // Write-back may use another cache than the one that the alternatives are compared with.
    let own = found.recommendation.as_ref().expect("a cache is advised").write_through.setting;
    let properties: Vec<_> = found.runners_up.iter().map(|other| other.property).collect();
    assert_eq!(properties, ["size", "block size", "policy", "admission"]);
    for other in &found.runners_up {
        let setting = other.trial.setting;
        let changed = [
            setting.cache_bytes != own.cache_bytes,
            setting.block_bytes != own.block_bytes,
            setting.policy != own.policy,
            setting.admission != own.admission,
        ];
        let position = properties.iter().position(|property| *property == other.property).unwrap();
        assert!(changed[position], "{other:?}");
        // Another size has its own best policy.
        let allowed = if position == 0 { 2 } else { 1 };
        assert!(changed.into_iter().filter(|changed| *changed).count() <= allowed, "{other:?}");
        assert_eq!(other.trial.read_hit_ratio, simulated(records, setting));
        assert!(other.mean_ns.is_some());
        assert!(text(found).contains(&other.value), "{other:?}");
    }
    for (smaller, larger) in found.sizes.iter().zip(&found.sizes[1..]) {
        assert!(smaller.setting.cache_bytes < larger.setting.cache_bytes);
        let as_advised = Setting { policy: own.policy, ..smaller.setting };
        assert!(smaller.read_hit_ratio >= simulated(records, as_advised) - POINT, "{smaller:?}");
    }
}

#[test]
fn the_second_choice_is_another_combination_with_its_own_results() {
    let (records, found) = &*LARGE_REQUESTS;
    let own = found.recommendation.as_ref().expect("a cache is advised").write_through.clone();
    let second = found.second_choice.as_ref().expect("there are several combinations");
    assert!(!joint_choice::is_same_combination(&second.trial.setting, &own.setting), "{second:?}");
    assert_eq!(second.trial.read_hit_ratio, simulated(records, second.trial.setting));
    assert!(second.trial.read_hit_ratio >= found.target.read_hit_ratio - 3.0 * POINT, "{second:?}");
    assert!(second.mean_ns.is_some());
    let why = found.why.iter().find(|why| why.starts_with("Runner-up: ")).unwrap();
    assert!(why.contains(&second.value) && why.contains("to flash"), "{why}");
}

#[test]
fn a_finalist_wins_by_flash_and_latency_together() {
    let records = zipf(&["requests=2000"]);
    let mut material = Material::new(usize::MAX);
    records.iter().for_each(|record| material.add(record));
    let costs = Costs::new(&material.finish().unwrap(), "1000DWPD".parse().unwrap());
    let finalist = |mib: u64, read_hit_ratio, flash_write_bytes, mean_ns: u64| {
        let mut trial = Trial::made_up(read_hit_ratio, flash_write_bytes);
        trial.setting.cache_bytes = mib * MIB;
        (trial, mean_ns)
    };
    let first = finalist(100, 0.8, 1000, 5_000_000);
    let best = |other| joint_choice::best_finalist(&[first.clone(), other], &costs);
    // Half the latency justifies a tenth more flash, and does not justify twice as much flash.
    assert_eq!(best(finalist(110, 0.8, 1000, 2_500_000)), 1);
    assert_eq!(best(finalist(200, 0.8, 1000, 2_600_000)), 0);
    assert_eq!(best(finalist(100, 0.8, 1000, 4_900_000)), 0, "about the same");
    assert_eq!(best(finalist(100, 0.7, 1000, 2_500_000)), 0, "it misses the target");
    assert_eq!(best(finalist(100, 0.8, 20_000, 2_500_000)), 0, "it writes much more to flash");
}

#[test]
fn write_back_is_chosen_only_for_slow_writes() {
    let of = |settings: &[&str], backing: &str| {
        let records = zipf(&[settings, &["requests=10000", "footprint=16M", "iops=50"]].concat());
        advice_with(&records, &Options { backing: backing.parse().unwrap(), ..Options::default() })
    };
    let slow = of(&["read-percent=50"], "fixed:10,10");
    let mode = slow.mode.clone().unwrap();
    assert!(mode.is_write_back && mode.through_ns > 2 * mode.back_ns, "{mode:?}");
    assert!(slow.command.contains("--preset auto"), "{}", slow.command);
    assert!(slow.caveats.iter().any(|words| words.contains("two devices")), "{:?}", slow.caveats);
    // A backing whose writes are as fast as flash gains nothing.
    let fast = of(&["read-percent=50"], "fixed:10,0.03");
    assert!(!fast.mode.as_ref().unwrap().is_write_back, "{:?}", fast.mode);
    assert!(!fast.command.contains("--preset"), "{}", fast.command);
    assert!(fast.why.iter().any(|words| words.contains("With write-back")), "{:?}", fast.why);
    assert_eq!(of(&["read-percent=100"], "fixed:10,10").mode, None);
}

#[test]
fn the_highest_hit_ratio_is_that_of_a_cache_that_keeps_written_blocks() {
    // Small writes to the middle of 16 KiB make an LRU curve drop the rest of the block.
    let write = |at: u64, block: u64| Record { op: Op::Write, ..read(at, block * 16_384 + 4096, 512) };
    let records: Vec<Record> = (0..5000_u64)
        .flat_map(|i| [write(i * 2_000_003, i % 50), read(i * 2_000_003 + 900, i % 50 * 16_384, 16_384)])
        .collect();
    let found = advice(&records);
    let best = found.target.best_read_hit_ratio;
    assert!(advised(&found).read_hit_ratio <= best + 1e-9, "{best}: {:?}", advised(&found));
}

#[test]
fn two_points_of_hits_are_given_for_a_tenth_of_the_writes() {
    let trial = |form: &str, read_hit_ratio, flash_write_bytes| {
        let mut trial = Trial::made_up(read_hit_ratio, flash_write_bytes);
        trial.setting.admission = form.parse().unwrap();
        trial
    };
    let chosen = |trials: &[Trial]| candidates::sparing(trials).setting.admission.to_string();
    // The ratios of a small loop.
    assert_eq!(chosen(&[trial("always", 0.616, 1_000_000), trial("ghost", 0.6, 7_000)]), "ghost");
    assert_eq!(chosen(&[trial("always", 0.616, 1_000_000), trial("ghost", 0.6, 200_000)]), "always");
    assert_eq!(chosen(&[trial("always", 0.616, 1_000_000), trial("ghost", 0.59, 7_000)]), "always");
    let more_and_less = [trial("always", 0.5, 1000), trial("always+not-sequential:512K", 0.52, 500)];
    assert_eq!(chosen(&more_and_less), "always+not-sequential:512K");
}

#[test]
fn several_disks_share_no_block_and_far_addresses_are_moved_together() {
    let mut dice = Prng::new(7);
    // Both disks read the same addresses, each of them rarely: treated as one disk, half of all
    // reads would be hits.
    let records: Vec<Record> = (0..4000_u64)
        .map(|i| Record {
            disk: (i % 2) as u16,
            ..read(i * 1000 + dice.below(900), i / 2 * 4096 + (1 << 60), 4096)
        })
        .collect();
    let found = advice(&records);
    assert_eq!((found.verdict, found.target.best_read_hit_ratio), (Verdict::NoCache, 0.0));
    assert!(found.caveats.iter().any(|words| words.contains("--disk")), "{:?}", found.caveats);
    let again: Vec<Record> = records.iter().chain(&records).copied().collect();
    assert!((advice(&again).target.best_read_hit_ratio - 0.5).abs() < 1e-9);
}

#[test]
fn a_trace_without_usable_requests_is_an_error() {
    let error = |records: &[Record]| {
        let mut material = Material::new(100);
        records.iter().for_each(|record| material.add(record));
        advise(material, &Options::default(), &mut |_, _| true).unwrap_err().to_string()
    };
    assert!(error(&[]).contains("no read and no write"));
    assert!(error(&[Record { op: Op::Flush, ..read(0, 0, 0) }]).contains("no read and no write"));
    let mut material = Material::new(10);
    (0..50).for_each(|i| material.add(&read(i, 0, 4096)));
    let stopped = advise(material, &Options::default(), &mut |_, share| share < 0.5).unwrap_err();
    assert_eq!(stopped.to_string(), "interrupted");
}

#[test]
fn replays_can_be_cancelled() {
    let records = zipf(&["requests=3000", "footprint=16M", "read-percent=70"]);
    let mut material = Material::new(usize::MAX);
    records.iter().for_each(|record| material.add(record));
    let mut reports = 0;
    let stopped = advise(material, &Options::default(), &mut |stage, _| {
        reports += usize::from(stage == "latencies");
        reports < 2
    });
    assert_eq!(stopped.unwrap_err().to_string(), "interrupted");
    assert_eq!(reports, 2, "the work ends at once");
}

#[test]
fn a_long_trace_is_truncated_with_a_note() {
    let mut material = Material::new(1000);
    (0..5000).for_each(|i| material.add(&read(i * i, i % 100 * 4096, 4096)));
    let found = advise(material, &Options::default(), &mut |_, _| true).unwrap();
    assert_eq!(found.profile.requests, 1000);
    assert!(
        found.caveats.iter().any(|words| words.contains("4000 more were left out")),
        "{:?}",
        found.caveats
    );
}

#[test]
fn the_page_and_the_text_have_the_results() {
    let (_, found) = &*SMALL_READS;
    let html = page(found, "hob lab advise");
    assert!(html.starts_with("<!doctype html>") && html.trim_end().ends_with("</html>"));
    assert!(html.contains("&lt;web &amp; co&gt;.csv") && !html.contains("<web"));
    assert!(html.contains(&found.command) && html.contains("(advised)"));
    assert_eq!(html.matches("<svg ").count(), 2);
    assert_eq!(html.matches("<section").count(), html.matches("</section>").count());
    assert_eq!(html.matches("<table>").count(), html.matches("</table>").count());
    for marker in ["knee ", "advised "] {
        assert!(html.contains(marker), "{marker}");
    }
    let words = text(found);
    assert!(words.contains(&found.command) && words.lines().count() < 66, "{words}");
    let is_text = |line: &&str| line.trim() != found.command;
    assert!(words.lines().filter(is_text).all(|line| line.chars().count() <= 110), "{words}");
    assert!(found.command.contains(" --admission "), "{}", found.command);
}

/// The presets fill more than the sectors of a miss. So the advised command names the fill
/// granularity of the simulations, and the advice has the results of both fill granularities.
#[test]
fn the_fill_of_the_preset_is_compared_with_sectors() {
    let (records, found) = &*SMALL_READS;
    let own = found.recommendation.as_ref().unwrap().write_through.clone();
    let filled = found.preset_fill.as_ref().unwrap();
    assert_eq!(own.read_hit_ratio, simulated(records, own.setting));
    assert_eq!(filled.read_hit_ratio, simulated_filling(records, own.setting, Fill::Auto));
    assert_ne!(filled.flash_write_bytes, own.flash_write_bytes, "data next to a miss is written too");
    let why = found.why.iter().find(|why| why.starts_with("Fill: ")).unwrap();
    assert!(why.contains("--fill sectors") && why.contains("to flash"), "{why}");
    assert!(found.command.ends_with(" --fill sectors"), "{}", found.command);
    assert!(page(found, "").contains("as with --fill sectors"));
    for name in ["vfrc", "auto"] {
        assert_eq!(hob_engine::preset::preset(name).unwrap().fill, Fill::Auto, "the sentence says so");
    }
}

/// If the user does not set the advised policy and admission, the cache uses the policy and
/// admission of its preset.
#[test]
fn the_policy_and_admission_of_the_preset_are_compared_with_the_advised_ones() {
    let (records, found) = &*SMALL_READS;
    let own = found.recommendation.as_ref().unwrap().write_through.setting;
    let default = found.preset_choice.as_ref().unwrap();
    let auto =
        Setting { policy: PolicyKind::from_name("auto").unwrap(), admission: "auto".parse().unwrap(), ..own };
    assert_eq!(default.setting, auto);
    assert_eq!(default.read_hit_ratio, simulated(records, auto));
    let why = found.why.iter().find(|why| why.starts_with("Default: ")).unwrap();
    assert!(why.contains("admission auto") && why.contains("to flash"), "{why}");
}

#[test]
fn a_trace_of_several_disks_names_both_ways_out() {
    let mut records = zipf(&["requests=5000", "footprint=16M"]);
    records.iter_mut().step_by(2).for_each(|record| record.disk = 1);
    let found = advice(&records);
    let caveat = found.caveats.iter().find(|caveat| caveat.contains("2 disks")).unwrap();
    assert!(caveat.contains("--disk") && caveat.contains("--share"), "{caveat}");
}

#[test]
fn the_page_draws_at_most_four_curves_and_its_tables_can_be_copied() {
    let (_, found) = &*LARGE_REQUESTS;
    assert!(found.block_sizes.len() > 4);
    let html = page(found, "");
    let advised = found.recommendation.as_ref().unwrap().cache.setting.block_bytes;
    let drawn: Vec<u64> = page::curves_shown(found).map(|size| size.block_bytes).collect();
    assert!(drawn.len() <= 4 && drawn.contains(&u64::from(advised)), "{drawn:?}");
    let copy = html.split("<pre class=\"copy\"").nth(1).unwrap().split("</pre>").next().unwrap();
    let lines: Vec<&str> = copy.trim().lines().collect();
    let sizes = lines.iter().filter(|line| line.split('\t').count() == 7).count();
    assert_eq!((sizes, lines.len()), (found.sizes.len() + 1, found.sizes.len() + 1), "{copy}");
}

#[test]
fn devices_parse_as_they_are_shown() {
    assert_eq!("fixed:5,2.5".parse(), Ok(Backing::Fixed { read_ms: 5.0, write_ms: 2.5 }));
    assert_eq!("15k-raid5".parse(), Ok(Backing::Raid5Of15K));
    assert_eq!("0.3DWPD".parse(), Ok(Endurance::DriveWritesPerDay(0.3)));
    assert_eq!("600 tbw".parse(), Ok(Endurance::TerabytesWritten(600.0)));
    assert_eq!("pcie".parse(), Ok(Flash::Pcie));
    for text in ["", "fixed:", "fixed:1", "fixed:-1,2", "fixed:1,1e9", "fixed:NaN,1", "ssd"] {
        assert!(text.parse::<Backing>().unwrap_err().contains("fixed:READ_MS,WRITE_MS"), "{text}");
    }
    for text in ["", "DWPD", "0DWPD", "-1TBW", "infTBW", "NaNDWPD", "5"] {
        assert!(text.parse::<Endurance>().unwrap_err().contains("600TBW"), "{text}");
    }
}
