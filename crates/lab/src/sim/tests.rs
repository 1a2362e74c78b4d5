//! Compares grids with single runs, and miniatures with exact simulations.

use super::*;
use crate::workload::{Workload, WorkloadConfig};
use hob_trace::blocks::Gathered;

fn point(policy: &str, blocks: u64) -> Point {
    Point {
        policy: PolicyKind::from_name(policy).expect("known"),
        admission: Admission::default(),
        fill: Fill::Sectors,
        block_bytes: 4096,
        cache_bytes: blocks * 4096,
        flash_writes: None,
        sample_rate: 1.0,
    }
}

/// Returns Zipf reads with some writes.
fn records(blocks: u64, count: usize) -> Vec<Record> {
    let workload = Workload::new(&WorkloadConfig {
        footprint_bytes: blocks * 4096,
        request_bytes: 4096,
        theta: 0.9,
        read_permille: 800,
        seed: 11,
    });
    let record = |(i, access): (u64, crate::workload::Access)| Record {
        at_ns: i * 1000,
        offset: access.offset,
        len: access.len,
        op: access.op,
        disk: 0,
    };
    (0..).zip(workload.take(count)).map(record).collect()
}

fn run(records: &[Record], points: &[Point], threads: usize) -> Vec<Simulated> {
    grid(&mut Gathered::new(records.iter().copied().map(Ok)), points, threads, |_| true)
        .expect("a good trace")
}

#[test]
fn a_grid_is_many_single_runs() {
    let records = records(5000, 20_000);
    let points: Vec<Point> = PolicyKind::all()
        .flat_map(|policy| [50, 500, 2000].map(|blocks| Point { policy, ..point("lru", blocks) }))
        .collect();
    let together = run(&records, &points, 2);
    assert_eq!(together.len(), points.len());
    for (result, point) in together.iter().zip(&points) {
        let mut alone = Simulation::new(*point).expect("workable");
        records.chunks(777).for_each(|chunk| alone.feed(chunk));
        assert_eq!(*result, alone.result());
        assert_eq!(result.stats.reads + result.stats.writes, 20_000);
    }
    assert_eq!(together, run(&records, &points, 1));
}

#[test]
fn a_miniature_is_close_to_the_real_size() {
    let records = records(100_000, 1_000_000);
    for policy in ["lru", "s3-fifo"] {
        let exact = point(policy, 10_000);
        let mini = Point { sample_rate: 0.1, ..exact };
        let results = run(&records, &[exact, mini], 2);
        let [exact, mini] = [0, 1].map(|i| results[i].stats.read_hit_ratio());
        assert!((exact - mini).abs() < 0.03, "{policy}: {exact:.3} in full, {mini:.3} in miniature");
        assert!(results[1].stats.reads < results[0].stats.reads / 3);
    }
}

#[test]
fn a_miniature_sees_only_the_parts_in_its_blocks() {
    let sample = Sample::new(0.5, 8192);
    let record = Record { at_ns: 5, offset: 4096, len: 100_000, op: Op::Read, disk: 0 };
    let parts: Vec<Record> = sample.parts(&record).collect();
    assert!(!parts.is_empty() && parts.len() < 13);
    for part in &parts {
        assert_eq!(part.offset / 8192, (part.offset + u64::from(part.len) - 1) / 8192);
        assert!(part.offset >= 4096 && part.offset + u64::from(part.len) <= 104_096);
    }
    let all: u64 = Sample::new(1.0, 8192).parts(&record).map(|part| u64::from(part.len)).sum();
    assert_eq!(all, 100_000);
}

#[test]
fn requests_beyond_the_largest_address_are_counted() {
    let mut list = records(100, 100);
    list.push(Record { offset: 1 << 44, ..list[0] });
    list.push(Record { offset: (1 << 63) - 1, ..list[0] });
    let results = run(&list, &[point("lru", 10)], 1);
    assert_eq!(results[0].out_of_reach, 2);
}

#[test]
fn errors_name_the_remedy() {
    let huge = Point { cache_bytes: 1 << 60, ..point("lru", 10) };
    assert!(Simulation::new(huge).err().expect("refused").to_string().contains("2^30"));
    assert!(Simulation::new(point("lru", 0)).err().expect("refused").to_string().contains("larger"));
    let odd = Point { block_bytes: 5000, ..point("lru", 10) };
    assert!(Simulation::new(odd).err().expect("refused").to_string().contains("power of two"));
    let broken = vec![Ok(records(10, 1)[0]), Err(anyhow::anyhow!("line 2 is broken"))];
    let error =
        grid(&mut Gathered::new(broken.into_iter()), &[point("lru", 10)], 1, |_| true).expect_err("broken");
    assert!(format!("{error:#}").contains("line 2"), "{error:#}");
}

#[test]
fn several_disks_are_refused() {
    let mut list = records(100, 10_000);
    list[9_000].disk = 3;
    let run = grid(&mut Gathered::new(list.into_iter().map(Ok)), &[point("lru", 10)], 1, |_| true);
    let error = run.expect_err("two disks").to_string();
    assert!(error.contains("0 and 3") && error.contains("--disk"), "{error}");
}

#[test]
fn a_run_can_be_stopped() {
    let records = records(1000, 200_000);
    let mut calls = 0;
    let results = grid(&mut Gathered::new(records.iter().copied().map(Ok)), &[point("lru", 10)], 1, |_| {
        calls += 1;
        calls < 2
    });
    let stats = results.expect("stopped, not failed")[0].stats;
    assert_eq!(stats.reads + stats.writes, 2 * 8192);
}

#[test]
fn a_budget_limits_flash_writes_and_keeps_popular_blocks() {
    // Ten days, with a request each second: half of the requests read 500 popular blocks, and half
    // read new blocks.
    let mut random = 1u64;
    let records: Vec<Record> = (0..10 * 86_400u64)
        .map(|second| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let popular = (random >> 33) % 500;
            let block = if second % 2 == 0 { popular } else { 1000 + second };
            Record { at_ns: second * 1_000_000_000, offset: block * 4096, len: 4096, op: Op::Read, disk: 0 }
        })
        .collect();
    let run = |flash_writes| {
        let admission = "always".parse().unwrap();
        let mut simulation =
            Simulation::new(Point { admission, flash_writes, ..point("lru", 1000) }).unwrap();
        simulation.feed(&records);
        simulation.result().stats
    };
    let (without, with) = (run(None), run(Some(1000 * 4096)));
    assert!(without.flash_write_bytes > 400_000 * 4096, "{without:?}");
    // The limit is the budget of eleven days, plus the extra budget that fills an empty cache.
    assert!(with.flash_write_bytes <= (11 * 1000 + 1000) * 4096, "{with:?}");
    assert!(with.flash_write_bytes > 5000 * 4096, "{with:?}");
    assert!(with.read_hits > without.read_hits * 9 / 10, "{with:?} {without:?}");
    assert!(with.budget_refused_bytes > 0);
}
