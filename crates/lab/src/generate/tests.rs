//! Compares measurements of each generator's requests with its published properties, and results of
//! a run with published results.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use hob_engine::outcome::Outcome;
use hob_engine::policy::PolicyKind;
use hob_world::disk_model::{ArrayConfig, ArrayModel};
use hob_world::flash_model::{FlashConfig, FlashModel};
use hob_world::service::{FixedModel, ServiceModel};

use hob_world::replay::CacheSetup;

use super::run::Played;
use super::*;

const GIB: u64 = 1 << 30;

fn experiment(name: &str, settings: &[&str]) -> Experiment {
    GeneratorInfo::find(name).unwrap().experiment(settings).unwrap()
}

fn records(name: &str, settings: &[&str]) -> Vec<Record> {
    experiment(name, settings).into_records(1000).collect()
}

/// Returns true if the requests depend on the seed. This is true for all generators except the
/// sequential writer.
fn is_random(info: &GeneratorInfo) -> bool {
    info.name != "seq-write"
}

/// Settings that make a small, listable experiment.
const SMALL: &[&str] = &["scale=4096"];

#[test]
fn a_seed_is_a_workload_and_another_seed_another() {
    for info in GENERATORS {
        let list = |seed: &str| {
            let experiment = info.experiment(&["scale=1024", seed]).unwrap();
            experiment.into_records(1000).take(5000).collect::<Vec<Record>>()
        };
        assert!(list("seed=1").len() > 1000, "{}", info.name);
        assert_eq!(list("seed=1"), list("seed=1"), "{}", info.name);
        assert_eq!(list("seed=1") == list("seed=2"), !is_random(info), "{}", info.name);
    }
}

#[test]
fn requests_lie_on_their_disks_and_come_in_order() {
    for info in GENERATORS {
        let experiment = info.experiment(SMALL).unwrap();
        let disks = experiment.disks.clone();
        assert!(experiment.block_bytes.is_power_of_two() && experiment.cache_bytes > 0, "{}", info.name);
        let mut last = 0;
        for record in experiment.into_records(1000).take(100_000) {
            assert!(record.offset + u64::from(record.len) <= disks[usize::from(record.disk)], "{record:?}");
            assert!(record.len > 0 && record.offset.is_multiple_of(4096) && record.at_ns >= last);
            last = record.at_ns;
        }
    }
}

#[test]
fn every_listed_parameter_can_be_typed_as_it_is_shown() {
    let mut names = BTreeSet::new();
    for info in GENERATORS {
        assert!(names.insert(info.name), "{} twice", info.name);
        assert!(!info.summary.is_empty() && !info.source.is_empty());
        let settings: Vec<String> =
            (info.parameters)().iter().map(|row| format!("{}={}", row.name, row.default)).collect();
        assert!(info.experiment(&settings).is_ok(), "{settings:?}");
        assert!((info.parameters)().iter().all(|row| !row.about.is_empty()));
    }
}

#[test]
fn invalid_input_is_refused_with_one_line() {
    let error = |name: &str, setting: &str| {
        let info = GeneratorInfo::find(name);
        let error = info.and_then(|info| info.experiment(&[setting])).unwrap_err().to_string();
        assert!(!error.contains('\n') && error.len() < 300, "{error}");
        error
    };
    assert!(error("hmm", "").starts_with("there is no generator hmm; there are hm, proxy, dss"));
    assert_eq!(error("hm", "requests"), "hm: expected key=value, not requests");
    assert_eq!(error("hm", "read-percent=101"), "hm: read-percent=101: expected 0 to 100");
    assert_eq!(error("hm", "scale=0"), "hm: scale=0: expected 1 to 1048576");
    assert!(error("hm", "disk=1GiB").starts_with("hm: spots=1280000: expected 1 to 32768 on a disk of 1GiB"));
    assert_eq!(error("dss", "io=5000"), "dss: io=5000: expected a multiple of 4KiB");
    assert_eq!(error("dss", "scale=1048576"), "dss: scale=1048576: too little is left of the database");
    assert_eq!(error("calibration", "files=300GiB"), "calibration: files=300GiB: expected 8KiB to 200GiB");
    assert_eq!(error("vdi", "desktops=0"), "vdi: desktops=0: expected 1 to 60000");
    assert_eq!(error("vmmark", "io=1MiB"), "vmmark: io=1MiB: expected 4KiB to 64KiB");
    assert_eq!(error("zipf", "theta=-1"), "zipf: theta=-1: expected 0 to 5");
    assert_eq!(error("zipf", "iops=0"), "zipf: iops=0: expected 0.001 to 1000000000");
    // Extreme settings are refused or harmless, and never panic.
    for info in GENERATORS {
        for row in (info.parameters)() {
            for extreme in ["0", "1", "18446744073709551615", "1e300", "-0", "nan", ""] {
                let _ = info.experiment(&[format!("{}={extreme}", row.name)]);
            }
        }
    }
}

fn share(records: &[Record], is_one: impl Fn(&Record) -> bool) -> f64 {
    records.iter().filter(|record| is_one(record)).count() as f64 / records.len() as f64
}

fn is_near(measured: f64, published: f64, by: f64) -> bool {
    (measured - published).abs() <= by
}

fn reads(record: &Record) -> bool {
    record.op == Op::Read
}

#[test]
fn hm_and_proxy_have_the_published_mix_and_far_hot_spots() {
    for (name, requests, read_share, per_s) in
        [("hm", 600_000, 0.95, 100.0), ("proxy", 5_000_000, 0.67, 300.0)]
    {
        let whole = experiment(name, &[]);
        assert_eq!(whole.disks.len(), 1);
        let listed = (GeneratorInfo::find(name).unwrap().parameters)();
        assert!(listed.iter().any(|row| row.name == "requests" && row.default == requests.to_string()));
        let list = records(name, &["scale=64", "requests=100000"]);
        assert!(is_near(share(&list, reads), read_share, 0.005), "{name}");
        assert!(share(&list, |record| record.len == 4096) > 0.9, "{name}: mostly 4 KB");
        let seconds = list.last().unwrap().at_ns as f64 / 1e9;
        assert!(is_near(list.len() as f64 / seconds, per_s, per_s * 0.02), "{name}");
        // One spot in 32 KiB, always with the same position and length.
        let mut spots = HashMap::new();
        for record in &list {
            let spot = (record.offset, record.len);
            assert_eq!(*spots.entry(record.offset >> 15).or_insert(spot), spot, "{name}");
        }
        assert!(spots.len() > 15_000, "{name}: {}", spots.len());
    }
}

fn flash() -> FlashModel {
    FlashModel::new(FlashConfig::sata_ssd())
}

/// Runs an experiment. Returns the measurements and the mean latency, milliseconds.
fn play(
    experiment: Experiment,
    cache: Option<CacheSetup>,
    flash: FlashModel,
    backing: impl Into<ServiceModel>,
) -> (Played, f64) {
    let setup = experiment.setup(cache, flash, backing);
    let (mut count, mut sum) = (0u64, 0);
    let played = experiment
        .play(setup, 1.0, |served| {
            count += 1;
            sum += served.latency_ns;
        })
        .unwrap();
    assert_eq!(count, played.run.requests);
    (played, sum as f64 / count as f64 / 1e6)
}

fn popular_first() -> PolicyKind {
    PolicyKind::from_name("s3-fifo").unwrap()
}

#[test]
fn hm_hits_as_published_and_worse_with_every_larger_block() {
    let settings = ["scale=64", "requests=60000"];
    let fixed = || FixedModel::new(1_269_000, 1_269_000, usize::MAX);
    let sweep: Vec<(f64, f64)> = (2..10)
        .map(|shift| {
            let experiment = experiment("hm", &settings);
            let cache = CacheSetup::volatile(experiment.cache_bytes, 1024 << shift, popular_first());
            let (played, mean) = play(experiment, Some(cache), flash(), fixed());
            assert_eq!(played.run.requests, 60_000);
            (played.disks[0].read_hit_ratio(), mean)
        })
        .collect();
    assert!(is_near(sweep[0].0, 0.85, 0.02), "{sweep:?}");
    assert!(is_near(sweep[0].1, 0.321, 0.03), "{sweep:?}");
    assert!(sweep.is_sorted_by(|a, b| a.1 < b.1), "{sweep:?}");
    assert!(sweep[7].1 > 0.9 * 1.269 && sweep[7].1 < 1.269, "{sweep:?}");
    let experiment = experiment("hm", &settings);
    let (_, without) = play(experiment, None, flash(), fixed());
    assert!(is_near(without, 1.269, 0.001));
}

#[test]
fn proxy_hits_as_published() {
    let experiment = experiment("proxy", &["scale=256", "requests=100000"]);
    let cache = experiment.cache(popular_first());
    let (played, mean) =
        play(experiment, Some(cache), flash(), FixedModel::new(1_357_000, 1_357_000, usize::MAX));
    assert!(is_near(played.disks[0].read_hit_ratio(), 0.83, 0.02));
    assert!((2.0..=4.0).contains(&(1.357 / mean)), "{mean}");
}

#[test]
fn dss_scans_and_looks_up_all_over_its_database() {
    let list = records("dss", &["scale=64", "transactions=10", "warmup-per-block=0"]);
    assert_eq!(list.len(), 10 * 1080);
    assert!(list.iter().all(|record| record.op == Op::Read && record.len == 8192));
    assert!(is_near(experiment("dss", &[]).disks[0] as f64 / GIB as f64, 15.0, 0.0));
    // A user's scan continues eight kilobytes after its last read in three of four cases.
    let mut clients = match experiment("dss", &["scale=64"]).load {
        Load::Closed(clients) => clients,
        Load::Open(_) => panic!("users wait for answers"),
    };
    assert_eq!(clients.count(), 21);
    let turns: Vec<Turn> = (0..1080).map_while(|_| clients.next(3)).collect();
    assert_eq!(turns.iter().filter(|turn| turn.tag == 1).count(), 1);
    assert_eq!(turns.last().unwrap().tag, 1);
    let index_end = experiment("dss", &["scale=64"]).disks[0] / 10 * 3;
    let scans: Vec<u64> =
        turns.iter().map(|turn| turn.offset).filter(|offset| *offset >= index_end - 8192).collect();
    assert!(is_near(scans.len() as f64 / 1080.0, 0.75, 0.04));
    let follow = scans.windows(2).filter(|pair| pair[1] == pair[0] + 8192).count();
    assert!(follow + 8 > scans.len(), "{follow} of {}", scans.len());
}

fn per_minute(
    experiment: Experiment,
    cache: Option<CacheSetup>,
    flash: FlashModel,
    array: fn(u64) -> ArrayConfig,
) -> (f64, f64) {
    let array = ArrayModel::new(array(experiment.disks_bytes()));
    let setup = experiment.setup(cache, flash, array);
    let mut transactions = 0;
    let played =
        experiment.play(setup, 1.0, |served| transactions += u64::from(served.ask.tag % 2 == 1)).unwrap();
    let minutes = (played.run.ended - played.run.began) as f64 / 60e9;
    (transactions as f64 / minutes, played.disks[0].read_hit_ratio())
}

#[test]
fn dss_runs_about_twice_as_fast_with_a_cache_that_hits_as_published() {
    let settings = ["scale=64", "transactions=210"];
    let array = ArrayConfig::raid5_of_five_15k;
    let (without, _) = per_minute(experiment("dss", &settings), None, flash(), array);
    let cache = experiment("dss", &settings).cache(popular_first());
    let (with, hits) = per_minute(experiment("dss", &settings), Some(cache), flash(), array);
    assert!(is_near(without, 61.7, 3.0), "{without}");
    assert!(is_near(with, 112.9, 6.0), "{with}");
    assert!(is_near(hits, 0.89, 0.03), "{hits}");
}

#[test]
fn dvdstore_is_uniform_over_the_database() {
    let list = records("dvdstore", &["scale=1024", "transactions=20000", "warmup-per-block=0"]);
    assert_eq!(list.len(), 160_000);
    assert!(is_near(share(&list, reads), 0.6, 0.005));
    let blocks = experiment("dvdstore", &["scale=1024"]).disks[0] / 8192;
    let mut counts = vec![0u64; blocks as usize];
    for record in &list {
        assert_eq!(record.len, 8192);
        counts[(record.offset / 8192) as usize] += 1;
    }
    let expected = list.len() as f64 / blocks as f64;
    let chi_squared: f64 = counts.iter().map(|&count| (count as f64 - expected).powi(2) / expected).sum();
    let freedom = blocks as f64 - 1.0;
    assert!(chi_squared < freedom + 5.0 * (2.0 * freedom).sqrt(), "{chi_squared}");
}

#[test]
fn dvdstore_gains_when_all_of_it_fits_and_hardly_before() {
    let card = || FlashModel::new(FlashConfig::pcie_card());
    let orders = |gib: Option<u64>| {
        let experiment = experiment("dvdstore", &["scale=64", "transactions=8000"]);
        let cache = gib.map(|gib| experiment.cache(popular_first()).with_bytes(gib * GIB / 64));
        per_minute(experiment, cache, card(), ArrayConfig::raid5_of_ten_10k).0
    };
    let (without, ten, fifteen) = (orders(None), orders(Some(10)), orders(Some(15)));
    assert!(is_near(without, 8802.0, 400.0), "{without}");
    assert!((1.0..=1.05).contains(&(ten / without)), "{ten} of {without}");
    assert!((1.30..=1.50).contains(&(fifteen / without)), "{fifteen} of {without}");
}

#[test]
fn calibration_passes_rise_to_the_published_hits_from_the_published_baseline() {
    let array = || ArrayModel::new(ArrayConfig::raid5_of_four_7200(200 * GIB / 256));
    let rates = |cached: bool| {
        let experiment =
            experiment("calibration", &["scale=256", if cached { "passes=5" } else { "passes=1" }]);
        assert_eq!(experiment.disks, [200 * GIB / 256]);
        let cache = cached.then(|| experiment.cache(popular_first()));
        let setup = experiment.setup(cache, flash(), array());
        // By pass: reads, hits, last reply.
        let mut passes: BTreeMap<u32, (u64, u64, u64)> = BTreeMap::new();
        experiment
            .play(setup, 1.0, |served| {
                let pass = passes.entry(served.ask.tag).or_default();
                assert_eq!(served.ask.len, 8192);
                pass.0 += 1;
                pass.1 += u64::from(served.outcome == Outcome::Hit);
                pass.2 = pass.2.max(served.at.0 + served.latency_ns);
            })
            .unwrap();
        let mut began = 0;
        passes
            .into_values()
            .map(|(reads, hits, ended)| {
                let rate = reads as f64 * 1e9 / (ended - began) as f64;
                began = ended;
                (rate, hits as f64 / reads as f64)
            })
            .collect::<Vec<(f64, f64)>>()
    };
    let baseline = rates(false)[0].0;
    assert!((576.0..=612.0).contains(&baseline), "{baseline:.0}");
    let cached = rates(true);
    assert!(cached[0].1 < 0.12, "the first pass is cold: {cached:?}");
    assert!(is_near(cached[4].1, 0.29, 0.02), "{cached:?}");
    assert!(cached[4].0 > 1.3 * baseline, "{cached:?} against {baseline:.0}");
}

#[test]
fn desktops_boot_log_in_and_work_as_published() {
    let experiment = experiment("vdi", &["scale=64"]);
    assert_eq!(experiment.disks.len(), 201);
    let list: Vec<Record> = experiment.into_records(0).collect();
    let phase = |from: f64, to: f64| -> Vec<Record> {
        let within = |record: &&Record| (from..to).contains(&(record.at_ns as f64 / 1e9));
        list.iter().filter(within).copied().collect()
    };
    let boot = phase(0.0, 60.0);
    assert!(is_near(boot.len() as f64 / 60.0, 3848.0, 40.0), "{}", boot.len());
    assert!(boot.iter().all(|record| (record.op == Op::Read) == (record.disk == 0)), "one image for all");
    let work = phase(180.5, 780.0);
    assert!(is_near(work.len() as f64 / 599.5 / 200.0, 1.34 + 7.58, 0.05));
    assert!(is_near(share(&work, reads), 0.15, 0.005));
    for (op, published) in [(Op::Read, 14.0), (Op::Write, 12.0)] {
        let sizes: Vec<f64> = work
            .iter()
            .filter(|record| record.op == op)
            .map(|record| f64::from(record.len) / 1024.0)
            .collect();
        assert!(is_near(sizes.iter().sum::<f64>() / sizes.len() as f64, published, 0.1), "{op:?}");
    }
    assert!(work.iter().all(|record| record.disk > 0));
    assert_eq!(work.iter().map(|record| record.disk).collect::<BTreeSet<u16>>().len(), 200);
    let total: u64 = super::tests::experiment("vdi", &[]).disks.iter().sum();
    assert!(is_near(total as f64 / GIB as f64, 100.0, 0.1));
}

#[test]
fn tiles_have_the_published_mix_and_a_small_hot_part() {
    let whole = experiment("vmmark", &[]);
    let data: u64 = whole.disks.iter().sum();
    assert!(is_near(data as f64 / (1u64 << 40) as f64, 1.09, 0.005));
    assert!(is_near(whole.cache_bytes as f64 / data as f64, 0.08, 0.005));
    let experiment = experiment("vmmark", &["scale=256", "seconds=100"]);
    let pages = experiment.disks.iter().sum::<u64>() / (64 << 10);
    let list: Vec<Record> = experiment.into_records(0).collect();
    assert!(is_near(share(&list, reads), 0.24, 0.005));
    assert!(is_near(list.len() as f64 / 100.0, 4.0 * 1400.0, 60.0));
    let mut counts: HashMap<(u16, u64), u64> = HashMap::new();
    for record in &list {
        *counts.entry((record.disk, record.offset >> 16)).or_default() += 1;
    }
    let mut counts: Vec<u64> = counts.into_values().collect();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    let top: u64 = counts.iter().take(pages as usize * 8 / 100).sum();
    let top = top as f64 / list.len() as f64;
    assert!((0.92..=0.98).contains(&top), "{top}");
}

#[test]
fn deployments_copy_in_order_on_one_more_disk_and_leave_the_tiles_alone() {
    let settings = ["scale=1024", "seconds=20", "tiles=2", "deploy-mib-s=10"];
    assert_eq!(experiment("vmmark", &settings).disks.len(), 3);
    let list: Vec<Record> = experiment("vmmark", &settings).into_records(0).collect();
    let (copies, tiles): (Vec<Record>, Vec<Record>) = list.into_iter().partition(|record| record.disk == 2);
    assert!(is_near(tiles.len() as f64 / 20.0, 2.0 * 1400.0, 60.0));
    let [read, written] = [Op::Read, Op::Write].map(|op| {
        let of_op = || copies.iter().filter(move |record| record.op == op);
        let bytes: u64 = of_op().map(|record| u64::from(record.len)).sum();
        assert!(is_near(bytes as f64 / f64::from(20 << 20), 10.0, 1.5), "{bytes} bytes of {op:?}");
        of_op().map(|record| record.offset).take(100).collect::<Vec<u64>>()
    });
    assert!(read.is_sorted() && written.is_sorted() && read.last() < written.first());
    assert!(tiles.iter().all(|record| record.len == 8192));
}

#[test]
fn writers_write_everything_once() {
    for (name, io, in_order) in [("seq-write", 256 << 10, true), ("rand-write", 4096, false)] {
        assert_eq!(experiment(name, &[]).disks, [300 * GIB]);
        let list = records(name, SMALL);
        assert!(list.iter().all(|record| record.op == Op::Write && record.len == io));
        assert_eq!(list.is_sorted_by_key(|record| record.offset), in_order);
        let places: BTreeSet<u64> = list.iter().map(|record| record.offset).collect();
        assert_eq!(places.len() as u64 * u64::from(io), 300 * GIB / 4096 / u64::from(io) * u64::from(io));
        assert_eq!(places.len(), list.len());
    }
}

#[test]
fn zipf_takes_its_parameters() {
    let settings = ["scale=16", "requests=50000", "theta=0.9", "read-percent=70", "iops=5000", "io=8KiB"];
    let list = records("zipf", &settings);
    assert_eq!(list.len(), 50_000);
    assert!(is_near(share(&list, reads), 0.7, 0.01));
    assert!(list.iter().all(|record| record.len == 8192));
    assert!(is_near(list.last().unwrap().at_ns as f64 / 1e9, 10.0, 0.3));
    assert_eq!(experiment("zipf", &settings).disks, [GIB]);
}

#[test]
fn a_plan_is_played_the_same_way_twice() {
    let once = || {
        let experiment = experiment("vmmark", &["scale=1024", "seconds=3", "tiles=2"]);
        let array = ArrayModel::new(ArrayConfig::raid5_of_five_15k(experiment.disks_bytes()));
        let cache = experiment.cache(popular_first());
        let setup = experiment.setup(Some(cache), flash(), array);
        let mut list = Vec::new();
        let played = experiment.play(setup, 2.0, |served| list.push(*served)).unwrap();
        assert_eq!(played.disks.len(), 2);
        (list, played.run)
    };
    let (list, run) = once();
    assert_eq!((list.clone(), run), once());
    // Twice as fast as its own times: 8400 requests in about one and a half seconds.
    let last = list.iter().map(|served| served.at.0).max().unwrap();
    assert!(is_near(last as f64 / 1e9, 1.5, 0.05), "{last}");
}

#[test]
fn disks_become_one_behind_the_other() {
    let settings = ["scale=1024", "seconds=3", "tiles=2"];
    let apart: Vec<Record> = experiment("vmmark", &settings).into_records(0).collect();
    let whole = experiment("vmmark", &settings);
    let starts: Vec<u64> = whole.starts().collect();
    let one = whole.on_one_disk();
    assert_eq!((starts[0], starts[1], one.disks.clone()), (0, one.disks[0] / 2, vec![2 * starts[1]]));
    for (record, moved) in apart.iter().zip(one.into_records(0)) {
        let offset = starts[usize::from(record.disk)] + record.offset;
        assert_eq!(moved, Record { offset, disk: 0, ..*record });
    }
    let closed: Vec<Record> = experiment("dss", &["scale=512", "transactions=2"]).into_records(0).collect();
    let one: Vec<Record> =
        experiment("dss", &["scale=512", "transactions=2"]).on_one_disk().into_records(0).collect();
    assert!(closed == one && !one.is_empty(), "one disk stays as it is");
}

#[test]
fn contenders_read_all_data_first_and_only_the_last_disk_differs() {
    let settings = ["footprint=1MiB", "disks=2", "depth=2", "sweeps=1", "requests=20000"];
    let other = ["last-io=64KiB", "last-read-percent=0", "read-percent=80"];
    let experiment = experiment("contenders", &[&settings[..], &other].concat());
    let swept = experiment.warmup as usize;
    assert_eq!((experiment.disks.clone(), swept), (vec![1 << 20; 2], 2 * (1 << 20) / 8192));
    let list: Vec<Record> = experiment.into_records(0).collect();
    assert_eq!(list.len(), swept + 20_000);
    let places: BTreeSet<(u16, u64)> =
        list[..swept].iter().map(|record| (record.disk, record.offset)).collect();
    assert_eq!(places.len(), swept);
    let [first, last] = [0, 1].map(|disk| {
        list[swept..].iter().filter(|record| record.disk == disk).copied().collect::<Vec<Record>>()
    });
    assert!(first.iter().all(|record| record.len == 8192) && is_near(share(&first, reads), 0.8, 0.02));
    assert!(last.iter().all(|record| record.len == 64 << 10 && record.op == Op::Write));
    assert!(is_near(first.len() as f64, last.len() as f64, 2.0), "clients take turns");
}

#[test]
fn types_of_query_differ_in_their_look_ups_and_take_turns() {
    let experiment =
        experiment("dss", &["scale=64", "warmup-per-block=0", "transactions=63", "spread-percent=25"]);
    let Load::Closed(mut clients) = experiment.load else { panic!("clients wait for replies") };
    let mut ends = BTreeMap::new();
    let mut client = 0;
    while let Some(turn) = clients.next(client) {
        if turn.tag % 2 == 1 {
            *ends.entry(turn.tag / 2).or_insert(0) += 1;
        }
        client = (client + 1) % clients.count();
    }
    assert_eq!(ends, BTreeMap::from([(0, 21), (1, 21), (2, 21)]));
}
