//! Tests divisions of a pool between disks whose best division is known.

use super::*;
use crate::prng::splitmix64;

const BLOCK: u64 = 4096;

/// Returns random reads of `blocks` blocks, `per_second` each second, during `seconds`.
fn random(blocks: u64, per_second: u64, seconds: std::ops::Range<u64>, seed: u64) -> Vec<Record> {
    let mut seed = seed;
    let record = |i: u64| Record {
        at_ns: seconds.start * 1_000_000_000 + i * 1_000_000_000 / per_second,
        offset: splitmix64(&mut seed) % blocks * BLOCK,
        len: BLOCK as u32,
        op: Op::Read,
        disk: 0,
    };
    (0..(seconds.end - seconds.start) * per_second).map(record).collect()
}

fn host(disks: &[Vec<Record>]) -> Host {
    let mut host = Host::default();
    for (number, disk) in disks.iter().enumerate() {
        host.add(format!("disk {number}"), disk, None).unwrap();
    }
    host.sort();
    host
}

fn play(host: &Host, pool: &Pool, share: Share) -> Result<Shared> {
    super::play(host, pool, share, &Watch::new(&AtomicBool::new(false)))
}

fn pool(segments: u32) -> Pool {
    Pool {
        segments,
        segment_bytes: 16 * BLOCK,
        block_bytes: BLOCK as u32,
        policy: PolicyKind::from_name("lru").unwrap(),
        admission: Admission::default(),
    }
}

#[test]
fn the_optimum_serves_the_disk_that_reads_more() {
    let host = host(&[random(800, 100, 0..100, 1), random(800, 300, 0..100, 2)]);
    let ratio = |share| play(&host, &pool(52), share).unwrap();
    let best = ratio(Share::Optimum);
    assert_eq!(best.segments.iter().sum::<u32>(), 52);
    assert!(best.segments[1] >= 50, "{:?}", best.segments);
    let [equal, auto, one] = [Share::Static, Share::Auto, Share::OneLru].map(ratio);
    assert_eq!(equal.segments, [26, 26]);
    assert!(auto.segments[1] >= 47, "{:?}", auto.segments);
    let [best, equal, auto, one] = [&best, &equal, &auto, &one].map(Shared::read_hit_ratio);
    assert!(best > equal + 0.2 && auto > equal + 0.18 && auto > one, "{best} {equal} {auto} {one}");
}

/// The best parts are computed with LRU, and other policies can have more hits with equal parts.
#[test]
fn the_optimum_has_at_least_the_hits_of_equal_parts_with_every_policy() {
    let host = host(&[random(400, 100, 0..20, 1), random(500, 110, 0..20, 2)]);
    for policy in PolicyKind::all() {
        for segments in [20, 50] {
            let pool = Pool { policy, ..pool(segments) };
            let ratio = |share| play(&host, &pool, share).unwrap().read_hit_ratio();
            let (best, even) = (ratio(Share::Optimum), ratio(Share::Static));
            assert!(best >= even, "{} {segments}: {best} {even}", policy.info().name);
        }
    }
}

#[test]
fn auto_follows_a_change_of_phase_that_no_fixed_size_can() {
    let host = host(&[random(800, 200, 0..200, 1), random(800, 200, 200..400, 2)]);
    let [equal, auto, best] =
        [Share::Static, Share::Auto, Share::Optimum].map(|share| play(&host, &pool(54), share).unwrap());
    // 90 % of the segments that the new load should have. Moving the last ones would gain too little.
    assert!(auto.segments[1] >= 48, "{:?}", auto.segments);
    assert!(auto.moved >= 40 && auto.moved < 80, "{} segments", auto.moved);
    let [equal, auto, best] = [equal, auto, best].map(|shared| shared.read_hit_ratio());
    assert!(auto > equal + 0.2 && auto > best + 0.2, "{equal} {auto} {best}");
}

#[test]
fn disks_keep_apart_and_times_stretch() {
    let mut host = Host::default();
    let far = [Record { at_ns: 10, offset: 1 << 50, len: 4096, op: Op::Read, disk: 0 }];
    host.add("near", &far, None).unwrap();
    host.add("far", &far, Some(1000)).unwrap();
    host.sort();
    assert_eq!(host.footprint(4096), 8192);
    assert_eq!(
        host.records().iter().map(|record| (record.disk, record.at_ns)).collect::<Vec<_>>(),
        [(0, 10), (1, 1000)]
    );
}

/// Uses real traces as the disks of one host, if there are any: `HOB_TRACES` names a folder of
/// `.csv` or `.csv.zst` files. The times of each trace are scaled to one hour.
/// `HOB_TRACES_REQUESTS` limits the number of requests of each trace. Prints read hits by division
/// and size of the pool.
#[test]
fn real_traces_share_a_pool() {
    let Some(folder) = std::env::var_os("HOB_TRACES") else {
        println!("skipped: HOB_TRACES names no folder of traces");
        return;
    };
    let limit = std::env::var("HOB_TRACES_REQUESTS").map_or(usize::MAX, |text| text.parse().unwrap());
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let mut host = Host::default();
    for path in paths.iter().filter(|path| path.to_string_lossy().contains(".csv")) {
        let reader = hob_trace::open(path, &hob_trace::OpenOptions::default()).unwrap();
        let records = reader.take(limit).collect::<Result<Vec<_>>>().unwrap();
        host.add(path.to_string_lossy(), &records, Some(3_600_000_000_000)).unwrap();
    }
    host.sort();
    let footprint = host.footprint(BLOCK);
    println!("{} disks, {} requests, {footprint} bytes", host.disks(), host.records().len());
    for percent in [1, 5, 10, 20] {
        let segment_bytes = (footprint * percent / 100 / 512 / BLOCK).max(1) * BLOCK;
        for share in Share::ALL {
            let shared = play(&host, &Pool { segment_bytes, ..pool(512) }, share).unwrap();
            println!(
                "{percent} % {:8} read hits {:.2} %, {} segments moved, {} bytes dropped, {} written to flash, {:?}",
                share.name(),
                100.0 * shared.read_hit_ratio(),
                shared.moved,
                shared.dropped * BLOCK,
                shared.flash_write_bytes(),
                shared.segments,
            );
        }
    }
}

#[test]
fn divisions_are_parsed_by_their_names() {
    for share in Share::ALL {
        assert_eq!(share.name().parse(), Ok(share));
    }
    let error = "dynamic".parse::<Share>().unwrap_err();
    assert_eq!(error, "'dynamic' is not a division of a pool; there are static, auto, one-lru, optimum");
}

#[test]
fn each_disk_has_its_own_reads_and_hits_in_every_division() {
    let host = host(&[random(10, 100, 0..10, 1), random(4000, 300, 0..10, 2)]);
    for share in Share::ALL {
        let shared = play(&host, &pool(20), share).unwrap();
        let name = share.name();
        assert_eq!(shared.reads.iter().map(|disk| disk.reads).collect::<Vec<_>>(), [1000, 3000], "{name}");
        let hits = |of: &[u64]| of.iter().sum::<u64>();
        let by_disk: Vec<u64> = shared.reads.iter().map(|disk| disk.hits).collect();
        let by_cache: Vec<u64> = shared.caches.iter().map(|stats| stats.read_hits).collect();
        assert_eq!(hits(&by_disk), hits(&by_cache), "{name}");
        // The ten blocks of the first disk miss once, except in one LRU, where the other disk evicts
        // some of them.
        assert!(by_disk[0] > 900 && by_disk[0] <= 990, "{name}: {by_disk:?}");
        assert!(by_disk[1] < 600, "{name}: {by_disk:?}");
    }
}

fn rows(host: &Host, segments: &[u32], shares: &[Share]) -> Vec<Row> {
    let pools: Vec<Pool> = segments.iter().map(|count| pool(*count)).collect();
    let plan = Plan { host, footprint_bytes: host.footprint(BLOCK), pools: &pools, shares, threads: 2 };
    let mut told = Vec::new();
    let rows = plan.run(&AtomicBool::new(false), |progress| told.push(progress)).unwrap();
    let last = told.last().unwrap();
    assert_eq!((last.runs, last.runs_total), (rows.len(), rows.len()));
    assert!(last.requests > 0);
    rows
}

#[test]
fn rows_have_the_difference_to_the_best_fixed_parts_of_the_same_pool() {
    let host = host(&[random(800, 100, 0..50, 1), random(800, 300, 0..50, 2)]);
    let rows = rows(&host, &[20, 52], &Share::ALL);
    let found: Vec<_> = rows.iter().map(|row| (row.cache_bytes, row.division)).collect();
    let names = Share::ALL.map(Share::name);
    let expected: Vec<_> =
        [20, 52].into_iter().flat_map(|count| names.map(|name| (count * 16 * BLOCK, name))).collect();
    assert_eq!(found, expected);
    for pool in rows.chunks(4) {
        let [equal, auto, one, best] = pool else { panic!("{pool:?}") };
        for row in pool {
            assert_eq!(row.difference_to_optimum, Some(row.read_hit_ratio - best.read_hit_ratio));
            let reads: u64 = row.disks.iter().map(|disk| disk.read_hits).sum();
            assert!((reads as f64 / 20_000.0 - row.read_hit_ratio).abs() < 1e-9, "{row:?}");
        }
        assert_eq!(best.points_to_optimum(), "+0.00");
        assert!(equal.points_to_optimum().starts_with('-'), "{}", equal.points_to_optimum());
        assert!(one.history.is_empty() && equal.history.is_empty() && best.history.is_empty());
        assert!(one.disks.iter().all(|disk| disk.cache_bytes.is_none()) && one.sizes.len() == 1);
        for (disk, history) in auto.disks.iter().zip(&auto.history) {
            assert_eq!(history[0], (0, 16 * BLOCK));
            assert_eq!(history.last().map(|(_, bytes)| *bytes), disk.cache_bytes);
            assert!(history.is_sorted_by_key(|(at_ns, _)| *at_ns));
        }
    }
    let without = self::rows(&host, &[20], &[Share::Auto]);
    assert_eq!((without.len(), without[0].difference_to_optimum), (1, None));
    assert_eq!(without[0].points_to_optimum(), "–");
    assert!(csv(&without).ends_with(",\n"), "{}", csv(&without));
}

#[test]
fn an_interrupted_comparison_is_an_error() {
    let host = host(&[random(800, 100, 0..50, 1)]);
    let stop = AtomicBool::new(false);
    let pools = [pool(20)];
    let plan = Plan { host: &host, footprint_bytes: 1, pools: &pools, shares: &Share::ALL, threads: 1 };
    let error = plan.run(&stop, |_| stop.store(true, Ordering::Relaxed)).unwrap_err().to_string();
    assert!(error.starts_with("interrupted after "), "{error}");
    for share in Share::ALL {
        let error = super::play(&host, &pools[0], share, &Watch::new(&stop)).unwrap_err();
        assert_eq!(error.to_string(), "interrupted");
    }
}

#[test]
fn the_page_shows_every_pool_and_disk_and_its_files_are_complete() {
    let dir = tempfile::tempdir().unwrap();
    let mut host = Host::default();
    host.add("<web>, \"1\"", &random(800, 100, 0..50, 1), None).unwrap();
    for number in 0..30 {
        host.add(format!("vm{number}"), &random(10, 1 + number, 0..50, number), None).unwrap();
    }
    host.sort();
    let rows = rows(&host, &[40, 60], &Share::ALL);
    let facts = Facts {
        requests: host.records().len(),
        footprint_bytes: host.footprint(BLOCK),
        duration_ns: 50_000_000_000,
        settings: "lru".to_owned(),
        made_by: "a <test>".to_owned(),
    };
    let mut files = write(dir.path(), &rows, &facts).unwrap();
    assert_eq!(files.last().unwrap(), "divisions.html");
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
    let html = read("divisions.html");
    let mut pictures = 0;
    for name in files.iter().filter(|name| !name.ends_with(".csv")) {
        assert_eq!(crate::markup::judge::flaw(&read(name)), None, "{name}");
        assert!(!read(name).contains("no data"), "{name}");
        pictures += usize::from(name.ends_with(".svg") && html.contains(read(name).trim_end()));
    }
    assert_eq!(pictures, 5, "one of all disks, and two of each pool");
    assert!(html.contains("&lt;web&gt;, &quot;1&quot;") && html.contains("vm29"));
    assert!(html.contains("the 12 of 31 disks with the most reads"));
    assert!(html.contains("the 14 of 31 disks with the largest caches"));
    assert_eq!(read("divisions.csv").lines().count(), 1 + 8);
    assert_eq!(read("divisions-disks.csv").lines().count(), 1 + 8 * 31);
    assert!(read("divisions-capacity.csv").contains("auto,2621440,\"<web>, \"\"1\"\"\",0,65536\n"));
    let mut left: Vec<String> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    left.sort();
    assert_eq!(files, left, "and nothing else is left behind");
}
