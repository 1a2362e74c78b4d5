//! Tests the checks of the figures with sabotages, for example another policy, a device twice as
//! fast, or a cache that is too small. On small runs, each check passes without a sabotage and
//! fails with its sabotage.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use hob_engine::admission::Admission;
use hob_engine::command::Layout;
use hob_world::disk_model::{ArrayConfig, Level};
use hob_world::flash_model::FlashConfig;
use hob_world::remote_model::RemoteConfig;
use hob_world::replay::CacheSetup;

use super::case::{Backing, Case, CaseCache, Measured, play};
use super::levels::Mix;
use super::*;
use crate::page::Check;

/// Function that changes a figure's runs.
type Change = fn(&mut Vec<Case>);

/// A figure with small workloads.
struct Small {
    cases: Vec<Case>,
    judge: fn(&[Measured]) -> Result<Findings>,
    /// Results by case. Most sabotages change one case only.
    played: HashMap<String, Measured>,
}

impl Small {
    fn new(name: &str, settings: &[&str]) -> Small {
        let Work::Play { cases, judge } = FigureInfo::find(name).unwrap().work else { panic!("not run") };
        let small = |case: Case| settings.iter().fold(case, |case, setting| case.set(setting));
        Small { cases: cases(Size::Full).into_iter().map(small).collect(), judge, played: HashMap::new() }
    }

    /// Returns the lines of the figure after a change of its runs.
    fn lines(&mut self, change: Change) -> Vec<Line> {
        let mut cases = self.cases.clone();
        change(&mut cases);
        let run = |case: &Case| {
            let run = self.played.entry(format!("{case:?}"));
            run.or_insert_with(|| play(case, &Arc::default(), &Arc::new(AtomicU64::new(0))).unwrap()).clone()
        };
        let runs: Vec<Measured> = cases.iter().map(run).collect();
        (self.judge)(&runs).unwrap().lines
    }
}

fn passes(line: &Line) -> bool {
    matches!(line.check, Some(Check::Holds | Check::Differs))
}

/// Runs the figure without a change, and with each sabotage, which must fail the named checks. All
/// checks of the figure must be named.
fn sabotaged(name: &str, small: &[&str], sabotages: &[(&[&str], Change)]) {
    adapted_and_sabotaged(name, small, |_| {}, sabotages);
}

/// Runs the figure without a change, and with each sabotage, as [`sabotaged`] does. `adapt` first
/// adapts single cases to the small size of the runs.
fn adapted_and_sabotaged(name: &str, small: &[&str], adapt: Change, sabotages: &[(&[&str], Change)]) {
    let mut figure = Small::new(name, small);
    adapt(&mut figure.cases);
    let sound = figure.lines(|_| {});
    let broken = sabotages.iter().map(|(names, change)| (*names, figure.lines(*change)));
    all_fail(name, &sound, broken.collect());
}

fn all_fail(name: &str, sound: &[Line], broken: Vec<(&[&str], Vec<Line>)>) {
    for line in sound {
        assert_ne!(line.check, Some(Check::Fails), "{name} without sabotage: {line:?} of {sound:?}");
        let named = || broken.iter().flat_map(|(names, _)| names.iter());
        assert!(
            !passes(line) || named().any(|what| *what == line.what),
            "{name}: {} is not sabotaged",
            line.what
        );
    }
    for (names, lines) in &broken {
        for what in *names {
            let line = lines.iter().find(|line| line.what == *what).unwrap_or_else(|| panic!("{what}"));
            assert_eq!(line.check, Some(Check::Fails), "{name}, sabotaged: {line:?}");
        }
    }
}

fn slow_backing(cases: &mut [Case]) {
    for case in cases {
        let Backing::FixedNs(ns) = case.backing else { panic!("a fixed latency") };
        case.backing = Backing::FixedNs(2 * ns);
    }
}

fn fast_array(bytes: u64) -> ArrayConfig {
    ArrayConfig { disks: 12, ..ArrayConfig::raid5_of_five_15k(bytes) }
}

fn small_array(bytes: u64) -> ArrayConfig {
    ArrayConfig { disks: 3, ..ArrayConfig::raid5_of_four_7200(bytes) }
}

fn half(cases: &mut [Case], index: usize) {
    let flash = FlashConfig::sata_ssd();
    cases[index].cache = CaseCache::Share(flash, 0.5);
}

#[test]
fn every_figure_has_a_sabotage() {
    let source = include_str!("sabotage.rs");
    for figure in FIGURES.iter().filter(|figure| figure.waits_for().is_none()) {
        let has = |function: &str| source.contains(&format!("{function}(\"{}\",", figure.name));
        assert!(has("sabotaged") || has("all_fail"), "{}", figure.name);
    }
}

#[test]
fn latencies_fail_with_a_small_cache_and_a_slow_backing() {
    let small = ["scale=64", "requests=30000"];
    sabotaged("hm-latency", &small, &[(&["read hits"], |cases| half(cases, 1))]);
    let slow: Change = |cases| slow_backing(cases);
    sabotaged("proxy-latency", &small, &[(&["mean latency, cache"], slow)]);
}

#[test]
fn block_sizes_fail_in_another_order_and_on_a_slow_backing() {
    let points = ["16 KiB", "32 KiB", "64 KiB", "128 KiB", "256 KiB"].map(|size| format!("blocks of {size}"));
    let points: Vec<&str> = points.iter().map(String::as_str).collect();
    // The runs with blocks of these sizes.
    let slow: Change = |cases| slow_backing(&mut cases[3..8]);
    let reverse: Change = |cases| cases[1..].reverse();
    let sabotages: [(&[&str], Change); 2] =
        [(&points, slow), (&["from block to larger block", "best block size"], reverse)];
    sabotaged("block-size", &["scale=32", "requests=20000"], &sabotages);
}

#[test]
fn databases_fail_on_other_arrays_and_with_small_caches() {
    let checks: [(&[&str], Change); 2] = [
        (&["mean disk read, cache against none"], |cases| {
            cases[1].backing = Backing::Array(small_array);
        }),
        (&["response time against think time, flash and disks"], |cases| {
            cases[1] = cases[1].clone().set("think-us=12000");
        }),
    ];
    sabotaged("dss", &["scale=64", "transactions=210"], &checks);
    let small: Change = |cases| half(cases, 2);
    let names =
        ["orders a minute, cache of 15 GB", "gain of the cache of 15 GB", "read hits, cache of 15 GB"];
    sabotaged("dvdstore", &["scale=64", "transactions=10000"], &[(&names, small)]);
}

#[test]
fn the_calibration_fails_on_fast_disks_and_with_a_tiny_cache() {
    let fast: Change = |cases| cases[1].backing = Backing::Array(fast_array);
    let tiny: Change = |cases| {
        let flash = FlashConfig::sata_ssd();
        cases[1].cache = CaseCache::Share(flash, 0.02);
    };
    let disks = [
        "reads a second, pass 1",
        "reads of the disks, first pass against no cache",
        "reads of the disks, last pass against no cache",
    ];
    let checks: [(&[&str], Change); 2] = [(&disks, fast), (&["last pass against first pass"], tiny)];
    sabotaged("calibration", &["scale=64"], &checks);
}

#[test]
fn sizing_statistics_fail_with_the_caches_exchanged() {
    let names = [
        "numBlocksCurrentlyCached, small cache",
        "numBlocksCurrentlyCached, large cache",
        "evicted blocks, large cache",
    ];
    let small = ["scale=64", "requests=30000"];
    sabotaged("statistics", &small, &[(&names, |cases| cases.reverse())]);
}

#[test]
fn memory_fails_if_blocks_take_ten_times_as_much() {
    let sound = memory::judge(1.0).unwrap().lines;
    let names: [&str; 2] = ["blocks of 4 KiB", "blocks of 512 KiB"];
    let falling: [&str; 1] = ["from block to larger block"];
    let broken = vec![
        (&names[..], memory::judge(10.0).unwrap().lines),
        (&falling[..], memory::judge(0.0).unwrap().lines),
    ];
    all_fail("metadata-memory", &sound, broken);
}

#[test]
fn promotion_fails_with_another_admission() {
    let sound = promotion::judge(|_| {}).unwrap().lines;
    let always = |cache: &mut CacheSetup| cache.config.admission = Admission::default();
    let never = |cache: &mut CacheSetup| {
        cache.config.admission = "nth-access:7".parse().expect("an admission");
    };
    let reads = [2, 3].map(|time| format!("random reads served by flash, pass {time} of 6"));
    let writes = [1, 2].map(|time| format!("random writes taken by flash, pass {time} of 6"));
    let early: Vec<&str> = reads.iter().chain(&writes).map(String::as_str).collect();
    let stream = ["sequential reads served by flash, highest of 6 passes"];
    let reads = [4, 5, 6].map(|time| format!("random reads served by flash, pass {time} of 6"));
    let writes = [3, 4, 5, 6].map(|time| format!("random writes taken by flash, pass {time} of 6"));
    let late: Vec<&str> = reads.iter().chain(&writes).map(String::as_str).collect();
    let lines = |adjust| promotion::judge(adjust).unwrap().lines;
    let broken = vec![(&early[..], lines(always)), (&stream[..], lines(always)), (&late[..], lines(never))];
    all_fail("fast-cache-promotion", &sound, broken);
}

#[test]
fn the_split_fails_with_one_space_for_all() {
    let unified: Change = |cases| {
        for case in cases {
            case.adjust = Some(|cache| cache.config.layout = Layout::Unified);
        }
    };
    let names = ["most that reads had of the flash", "most that writes had of the flash"];
    sabotaged("vsan-split", &["scale=8192", "requests=100000"], &[(&names, unified)]);
}

fn many_disks(bytes: u64) -> ArrayConfig {
    ArrayConfig { disks: 60, level: Level::Raid0, ..ArrayConfig::raid5_of_ten_10k(bytes) }
}

fn a_single_disk(bytes: u64) -> ArrayConfig {
    ArrayConfig { disks: 1, ..many_disks(bytes) }
}

/// Highest number of tiles that the figure of tiles tries. Each combination of array and cache has
/// one run for each number of tiles.
const TILES: usize = 4;

#[test]
fn tiles_fail_without_a_cache_on_fast_disks_and_with_the_arrays_exchanged() {
    let uncached: Change = |cases| {
        for array in 0..2 {
            for case in &mut cases[(2 * array + 1) * TILES..][..TILES] {
                // Without a cache there is nothing to warm up.
                (case.cache, case.twice) = (CaseCache::Off, false);
            }
        }
    };
    let fast: Change = |cases| {
        cases[2 * TILES..][..TILES]
            .iter_mut()
            .for_each(|case| case.backing = Backing::LunsAndOne(2, many_disks, many_disks));
    };
    let exchanged: Change = |cases| cases[..4 * TILES].rotate_left(2 * TILES);
    let fast_at_other_rates: Change = |cases| {
        cases[4 * TILES..]
            .iter_mut()
            .for_each(|case| case.backing = Backing::LunsAndOne(2, many_disks, many_disks));
    };
    let other_rates =
        ["tiles on 20 disks, no cache, rate 10 % lower", "tiles on 20 disks, no cache, rate 10 % higher"];
    let sabotages: [(&[&str], Change); 4] = [
        (&other_rates, fast_at_other_rates),
        (&["tiles on 20 disks, 92 GB", "tiles on 11 disks, 92 GB"], uncached),
        (&["tiles on 11 disks, no cache"], fast),
        (&["mean latency of 1 tile, no cache, 11 disks against 20"], exchanged),
    ];
    sabotaged("fast-cache-tiles", &["scale=1024", "seconds=8"], &sabotages);
}

#[test]
fn shares_of_io_fail_with_other_caches_and_with_caches_or_arrays_exchanged() {
    // The first accesses to a hot page are misses. These misses have the same share of all requests
    // as at full size, if each hot page gets as many requests as at full size.
    let longer: Change = |cases| cases[5] = cases[5].clone().set("hot-percent=8.4").set("seconds=25");
    let sabotages: [(&[&str], Change); 7] = [
        (&["served by DRAM and flash, 92 GB, 20 disks, cache empty at first"], |cases| {
            cases[5] = cases[5].clone().set("cache=60GiB");
        }),
        (&["lost from three to four tiles"], |cases| cases[0] = cases[2].clone()),
        (&["served by DRAM and flash, 366 GB"], |cases| cases[2] = cases[0].clone()),
        (&["reads that DRAM serves, 92 GB"], |cases| cases[0].memory_bytes *= 2),
        (&["mean read latency, 366 GB against 92 GB"], |cases| cases.swap(0, 2)),
        (&["mean read latency, 20 disks against 11"], |cases| cases.swap(0, 1)),
        (&["mean write latency, slowest against fastest of the three"], |cases| {
            cases[1].cache = CaseCache::Off;
        }),
    ];
    // With these values enough requests reach the disks of the small run.
    let small = ["scale=1024", "seconds=16", "hot-percent=8.7", "tile-iops=1300"];
    adapted_and_sabotaged("fast-cache-share", &small, longer, &sabotages);
}

#[test]
fn desktops_fail_without_a_cache_and_on_an_array_as_fast_as_flash() {
    // With this skew, the disks are as busy as in the source at the small scale too.
    let less_skew: Change = |cases| cases[3] = cases[3].clone().set("theta=1.6");
    let cached = [
        "mean latency",
        "mean latency in the second of the peak",
        "mean latency, comfort limit",
        "comfort limit in the second of the peak",
    ];
    let sabotages: [(&[&str], Change); 5] = [
        (&cached, |cases| {
            cases[1].cache = CaseCache::Off;
            // This array has no write cache, which would absorb the writes of a short run.
            cases[1].backing = Backing::Array(ArrayConfig::raid5_of_five_15k);
        }),
        (&["peak I/Os a second, no cache"], |cases| cases[0].backing = Backing::FixedNs(100_000)),
        (&["mean utilisation of the disks"], |cases| cases[3] = cases[1].clone()),
        (&["mean utilisation of the disks"], |cases| {
            for index in [1, 3] {
                cases[index].backing = Backing::FixedNs(100_000);
            }
        }),
        (&["reads that DRAM serves, 200 desktops"], |cases| cases.swap(1, 2)),
    ];
    // At this scale a desktop has few pages. With a steeper skew, the small desktop has the same
    // share of hits as a full-size desktop.
    let small = ["scale=1024", "theta=2.5", "boot-s=5", "login-s=5", "work-s=30"];
    adapted_and_sabotaged("fast-cache-desktops", &small, less_skew, &sabotages);
}

/// Sabotages of both figures of continuous writers.
const WRITERS: [(&[&str], Change); 3] = [
    (&["vSAN, written before the buffer is full"], |cases| cases[1] = cases[1].clone().set("cache=447GiB")),
    (&["ZBS, lowest against first", "ZBS, written to flash of 500 GB"], |cases| {
        cases[2] = cases[2].clone().set("cache=150GiB");
        cases[2].backing = Backing::Array(a_single_disk);
    }),
    (&["ZBS, written before the one space is full"], |cases| {
        // The space would be full after 768 GiB, so fewer writes suffice too.
        cases[4] = cases[4].clone().set("cache=300GiB").set("span=1000GiB");
    }),
];

/// Replaces runs of continuous writers on which no check depends. A run that is equal to another one
/// is not repeated.
fn leave_out(cases: &mut [Case], unchecked: &[usize]) {
    for index in unchecked {
        cases[*index] = cases[1].clone();
    }
}

#[test]
fn sequential_writes_fail_with_small_caches_and_the_same_disks() {
    let mut sabotages = WRITERS.to_vec();
    // With disks of the rated speed, the second run does not confirm that the disks of the
    // publication were slower.
    sabotages.push((&["vSAN, last against first"], |cases| cases[5] = cases[1].clone()));
    // With writers that do not pause, the second run does not confirm that destaging is the reason.
    sabotages.push((&["ZBS, lowest against first"], |cases| cases[6] = cases[2].clone()));
    // ZBS's disks alone, and vSAN on slower disks, on faster disks, and on one disk.
    adapted_and_sabotaged("zbs-sequential", &[], |cases| leave_out(cases, &[3, 7, 8, 9]), &sabotages);
}

#[test]
fn random_writes_fail_with_small_caches_and_without_the_runs_that_confirm_reasons() {
    let mut sabotages = WRITERS.to_vec();
    // With disks of the assumed speed, the second run does not confirm that the disks of the
    // publication were faster.
    sabotages.push((&["vSAN, last against first"], |cases| cases[8] = cases[1].clone()));
    // With a cache that destages, the second run does not confirm that destaging is the reason.
    sabotages.push((&["ZBS, lowest against first"], |cases| cases[5] = cases[2].clone()));
    sabotages.push((&["vSAN, last against its disks alone"], |cases| cases.swap(0, 1)));
    // ZBS's disks alone, and vSAN on slower disks.
    adapted_and_sabotaged("zbs-random", &[], |cases| leave_out(cases, &[3, 7]), &sabotages);
}

#[test]
fn query_types_fail_without_a_cache() {
    let uncached: Change = |cases| cases[1].cache = CaseCache::Off;
    let faster = ["5 %", "25 %", "45 %"]
        .map(|share| format!("mean response time, no cache against cache, {share} look-ups"));
    let faster: Vec<&str> = faster.iter().map(String::as_str).collect();
    sabotaged("dss-types", &["scale=64", "transactions=210"], &[(&faster, uncached)]);
}

#[test]
fn a_neighbour_that_writes_fails_to_gain_without_the_cache_of_the_reader() {
    let names = [
        "writes a second, cache of the reader against none",
        "mean latency of writes, cache of the reader against none",
    ];
    let small = ["requests=6000"];
    sabotaged("write-neighbour", &small, &[(&names, |cases| cases[1] = cases[0].clone())]);
}

#[test]
fn hits_miss_the_ratings_on_a_device_of_half_the_speed_and_in_another_order() {
    // No check depends on the second half of the runs, which have one hit at a time. A run that is
    // equal to another one is not repeated.
    let no_single_hits: Change = |cases| {
        let rated = cases.len() / 2;
        cases.truncate(rated);
        cases.extend_from_within(..);
    };
    let half: Change = |cases| {
        for case in cases {
            let CaseCache::Planned(flash) = case.cache else { panic!("a cache") };
            let (read_command_ns, read_page_ns) = (2 * flash.read_command_ns, 2 * flash.read_page_ns);
            let read_bytes_per_s = flash.read_bytes_per_s / 2;
            case.cache =
                CaseCache::Planned(FlashConfig { read_command_ns, read_page_ns, read_bytes_per_s, ..flash });
        }
    };
    let names = [
        "SATA SSD of the source",
        "current SATA SSD",
        "PCIe card of the source",
        "current NVMe SSD, PCIe 4",
        "current NVMe SSD, PCIe 5",
    ];
    let names = names.map(|name| format!("hits a second, {name}"));
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let sabotages: [(&[&str], Change); 2] =
        [(&names, half), (&["from device to faster device"], |cases| cases.swap(0, 1))];
    adapted_and_sabotaged("devices", &["requests=60000"], no_single_hits, &sabotages);
}

#[test]
fn two_level_lru_fails_if_it_is_lru_and_before_it_has_adapted() {
    let half = levels::READS / 2;
    // Hits by policy, load and number of the read at which the load moves.
    let mut known = HashMap::new();
    let mut lines_if_moved_at = |moved_at: u64, policies: [&'static str; 2]| {
        let hits = |policy: &'static str, load: Mix| {
            let moved_at = if load == Mix::Moved { moved_at } else { 0 };
            let hits = || levels::hits(policy, load, moved_at).unwrap();
            Ok(*known.entry((policy, load, moved_at)).or_insert_with(hits))
        };
        levels::judge_hits(policies, hits).unwrap().lines
    };
    let sound = lines_if_moved_at(half, ["lru", "two-level-lru"]);
    let moved_late = lines_if_moved_at(levels::READS - levels::MEASURED, ["lru", "two-level-lru"]);
    let mut lines = |policies| lines_if_moved_at(half, policies);
    let broken: Vec<(&[&str], Vec<Line>)> = vec![
        (
            &[
                "two-level LRU against LRU while other data passes",
                "two-level LRU while other data passes against alone",
            ],
            lines(["lru", "lru"]),
        ),
        (&["two-level LRU against LRU, popular data alone"], lines(["lfu", "fifo"])),
        (&["two-level LRU after a move against before"], moved_late),
    ];
    all_fail("two-level-lru", &sound, broken);
}

#[test]
fn volumes_fail_behind_a_small_limit_and_a_slow_network() {
    fn slower(config: RemoteConfig) -> RemoteConfig {
        RemoteConfig { read_ns: 2 * config.read_ns, write_ns: 2 * config.write_ns, ..config }
    }
    let slow: Change = |cases| {
        let half = cases.len() / 2;
        for case in &mut cases[half..] {
            let Backing::Remote(config) = case.backing else { panic!("a volume") };
            case.backing = Backing::Remote(slower(config));
        }
    };
    let limited: Change = |cases| {
        let half = cases.len() / 2;
        let reads_per_s = 1500;
        cases[half + 2].backing =
            Backing::Remote(RemoteConfig { reads_per_s, ..RemoteConfig::cloud_general() });
    };
    let names = ["Ceph", "NFS", "cloud, provisioned"]
        .map(|name| format!("mean read latency, {name}, cache against flash and misses"));
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    names.push("mean write latency, cache against none, slowest of the unlimited");
    let limit = ["I/Os a second, cloud, general, cache against the limit over misses and writes"];
    sabotaged("backings", &["scale=16", "requests=20000"], &[(&names, slow), (&limit, limited)]);
}

#[test]
fn shares_fail_without_throttling_and_bounds_without_their_settings() {
    let sabotages: [(&[&str], Change); 4] = [
        (
            &[
                "normal shares against low",
                "high shares against normal",
                "normal shares against low, with flash",
                "high shares against normal, with flash",
            ],
            |cases| {
                cases[1].begin = Some(sioc::shares_alone);
                cases[2].begin = Some(sioc::shares_alone);
            },
        ),
        (&["high shares against low, without contention"], |cases| cases[3] = cases[1].clone()),
        (
            &[
                "I/Os a second of the disk with a limit of 100",
                "I/Os a second of the disk with a reservation of 700",
                "datastore reads a second with a limit of 100 and flash",
                "datastore reads a second with a reservation of 700 and flash",
            ],
            |cases| {
                for case in [4, 5, 7, 8] {
                    cases[case].begin = Some(sioc::equal);
                }
            },
        ),
        (&["I/Os of 64 KB against I/Os of 8 KB, equal shares"], |cases| {
            cases[6] = cases[6].clone().set("last-io=32KiB");
        }),
    ];
    sabotaged("sioc", &[], &sabotages);
}

#[test]
fn a_migration_fails_if_sizes_are_exchanged_or_the_cache_has_other_data() {
    let unlisted: Change = |cases| cases[0].lists_extents = false;
    let small: Change = |cases| cases[3] = cases[2].clone().set("cache=1GiB");
    let same: Change = |cases| cases[1] = cases[0].clone();
    let sabotages: [(&[&str], Change); 3] = [
        (&["copied data"], unlisted),
        (&["time of the copy, 32 GB against 16 GB"], small),
        (&["time of the copy, 4 GB against 2 GB"], same),
    ];
    sabotaged("migration", &["scale=256"], &sabotages);
}
