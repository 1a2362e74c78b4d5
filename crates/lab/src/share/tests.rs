//! Disks whose best division is known.

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
    disks.iter().for_each(|disk| host.add(disk, None).unwrap());
    host.sort();
    host
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

#[test]
fn auto_follows_a_change_of_phase_that_no_fixed_size_can() {
    let host = host(&[random(800, 200, 0..200, 1), random(800, 200, 200..400, 2)]);
    let [equal, auto, best] =
        [Share::Static, Share::Auto, Share::Optimum].map(|share| play(&host, &pool(54), share).unwrap());
    // 90 % of what the new load should have. The last moves would gain too little.
    assert!(auto.segments[1] >= 48, "{:?}", auto.segments);
    assert!(auto.moved >= 40 && auto.moved < 80, "{} segments", auto.moved);
    let [equal, auto, best] = [equal, auto, best].map(|shared| shared.read_hit_ratio());
    assert!(auto > equal + 0.2 && auto > best + 0.2, "{equal} {auto} {best}");
}

#[test]
fn disks_keep_apart_and_times_stretch() {
    let mut host = Host::default();
    let far = [Record { at_ns: 10, offset: 1 << 50, len: 4096, op: Op::Read, disk: 0 }];
    host.add(&far, None).unwrap();
    host.add(&far, Some(1000)).unwrap();
    host.sort();
    assert_eq!(host.footprint(4096), 8192);
    assert_eq!(
        host.records().iter().map(|record| (record.disk, record.at_ns)).collect::<Vec<_>>(),
        [(0, 10), (1, 1000)]
    );
}

/// Uses real traces as the disks of one host, if there are any: `HOB_TRACES` names a folder of
/// `.csv` or `.csv.zst` files. Each takes an hour of virtual time. `HOB_TRACES_REQUESTS` limits the
/// requests of each. Prints read hits by division and size of the pool.
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
        let reader = crate::trace::open(path, &crate::trace::OpenOptions::default()).unwrap();
        let records = reader.take(limit).collect::<Result<Vec<_>>>().unwrap();
        host.add(&records, Some(3_600_000_000_000)).unwrap();
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
    assert_eq!(error, "'dynamic' is no division: static, auto, one-lru, optimum");
}
