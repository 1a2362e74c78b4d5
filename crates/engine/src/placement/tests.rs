//! Compares moves with the best of all placements, and tests cases without a move.

use super::share::{hull, share};
use super::{Bounds, Disk, Host, Placement, place};
use crate::sizing::{Curve, CurvePoint};

/// Unit of the sizes in the tests.
const UNIT: u64 = 1 << 20;

const ALL: Bounds = Bounds { moves_max: 100, gain_min: 0.0 };

/// Reproducible pseudorandom numbers (an LCG of Knuth's).
struct SimRng(u64);

impl SimRng {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

fn host(units: u64) -> Host {
    Host { flash_bytes: units * UNIT, load: 0.0, takes: true, empties: false }
}

/// Returns a disk whose miss ratio falls to these percentages at one unit, two units, …
fn disk(host: usize, reads: f64, percents: &[u64]) -> Disk {
    let rest = percents.iter().zip(1..).map(|(percent, blocks)| (blocks, *percent));
    let points = std::iter::once((0, 100)).chain(rest);
    let point = |(blocks, percent): (u64, u64)| CurvePoint { blocks, miss_ratio: percent as f64 / 100.0 };
    let curve = Curve::new(points.map(point).collect());
    Disk { host, reads, load: reads, curve, block_bytes: UNIT, moves: true }
}

/// Returns a random curve of up to six units: slow falls, steps and cliffs.
fn random_disk(rng: &mut SimRng, hosts: u64) -> Disk {
    let mut percent: u64 = 100;
    let is_cliff = rng.below(3) == 0;
    let percents: Vec<u64> = (0..1 + rng.below(6))
        .map(|_| {
            let fall = if is_cliff { [0, 0, 0, 60][rng.below(4) as usize] } else { rng.below(40) };
            percent = percent.saturating_sub(fall).max(5);
            percent
        })
        .collect();
    disk(rng.below(hosts) as usize, (1 + rng.below(1000)) as f64, &percents)
}

/// Returns the most hits of these disks with `units` of flash, in whole units.
fn best_share(units: u64, disks: &[&Disk]) -> f64 {
    let mut best = vec![0.0; units as usize + 1];
    for disk in disks {
        best = (0..best.len())
            .map(|all| {
                (0..=all).map(|own| best[all - own] + disk.hits(own as u64 * UNIT)).fold(0.0, f64::max)
            })
            .collect();
    }
    best[units as usize]
}

/// Returns the most hits of any placement.
fn best_of_all(hosts: &[Host], disks: &[Disk]) -> f64 {
    let mut best: f64 = 0.0;
    for mut code in 0..hosts.len().pow(disks.len() as u32) {
        let mut on = vec![Vec::new(); hosts.len()];
        for disk in disks {
            on[code % hosts.len()].push(disk);
            code /= hosts.len();
        }
        let hits = hosts.iter().zip(&on).map(|(host, on)| best_share(host.flash_bytes / UNIT, on)).sum();
        best = best.max(hits);
    }
    best
}

#[test]
fn flash_goes_where_it_brings_most() {
    let disks = [disk(0, 100.0, &[50, 40, 30]), disk(0, 10.0, &[10, 5, 0]), disk(0, 0.0, &[0])];
    let hulls: Vec<_> = disks.iter().map(hull).collect();
    let divided = share(4 * UNIT, &disks, &hulls, &[0, 1, 2]);
    assert_eq!(divided.sizes, [(0, 3 * UNIT), (1, UNIT), (2, 0)]);
    assert!((divided.hits - 79.0).abs() < 1e-9, "{divided:?}");
    assert!(divided.price > 0.0);
    assert_eq!(share(100 * UNIT, &disks, &hulls, &[0, 1, 2]).price, 0.0, "there is enough");
}

#[test]
fn a_cliff_that_does_not_fit_gets_nothing() {
    let disks = [disk(0, 100.0, &[100, 100, 0]), disk(0, 10.0, &[50, 0])];
    let hulls: Vec<_> = disks.iter().map(hull).collect();
    assert_eq!(share(2 * UNIT, &disks, &hulls, &[0, 1]).sizes, [(0, 0), (1, 2 * UNIT)]);
    assert_eq!(share(3 * UNIT, &disks, &hulls, &[0, 1]).sizes, [(0, 3 * UNIT), (1, 0)]);
}

#[test]
fn a_division_is_near_the_best() {
    let mut rng = SimRng(1);
    let (mut worst, mut sum) = (1.0f64, 0.0);
    for _ in 0..500 {
        let disks: Vec<Disk> = (0..4).map(|_| random_disk(&mut rng, 1)).collect();
        let units = 1 + rng.below(10);
        let hulls: Vec<_> = disks.iter().map(hull).collect();
        let found = share(units * UNIT, &disks, &hulls, &[0, 1, 2, 3]);
        assert!(found.sizes.iter().map(|(_, size)| size).sum::<u64>() <= units * UNIT);
        let best = best_share(units, &disks.iter().collect::<Vec<_>>());
        let part = if best == 0.0 { 1.0 } else { found.hits / best };
        (worst, sum) = (worst.min(part), sum + part);
    }
    println!("division: worst {worst:.3}, mean {:.4} of the best", sum / 500.0);
    assert!(worst > 0.9 && sum / 500.0 > 0.99, "worst {worst}, mean {}", sum / 500.0);
}

#[test]
fn placements_are_near_the_best() {
    let mut rng = SimRng(7);
    let (mut worst, mut sum, mut better) = (1.0f64, 0.0, 0);
    let count = 300;
    for _ in 0..count {
        let hosts: Vec<Host> = (0..3).map(|_| host(rng.below(8))).collect();
        let disks: Vec<Disk> = (0..5).map(|_| random_disk(&mut rng, 3)).collect();
        let found = place(&hosts, &disks, ALL);
        let hits = Placement::hits(&disks, &found.sizes);
        let before = Placement::hits(&disks, &found.sizes_here);
        assert!(hits >= before - 1e-6, "no placement is worse than none: {before} and {hits}");
        better += usize::from(hits > before * 1.01);
        for (number, host) in hosts.iter().enumerate() {
            let there = disks.iter().enumerate().filter(|(disk, _)| found.hosts[*disk] == number);
            let used: u64 = there.map(|(disk, _)| found.sizes[disk]).sum();
            assert!(used <= host.flash_bytes, "{found:?}");
        }
        let best = best_of_all(&hosts, &disks);
        let part = if best == 0.0 { 1.0 } else { hits / best };
        (worst, sum) = (worst.min(part), sum + part);
    }
    let mean = sum / f64::from(count);
    println!(
        "placement: worst {worst:.3}, mean {mean:.4} of the best; {better} of {count} are better than before"
    );
    assert!(better > 100, "the cases are such that moves help: {better}");
    assert!(mean > 0.99 && worst > 0.8, "worst {worst}, mean {mean}");
}

#[test]
fn a_crowded_host_gives_to_one_with_flash_to_spare() {
    let hosts = [host(2), host(8)];
    let disks = [disk(0, 100.0, &[60, 20, 10]), disk(0, 100.0, &[60, 20, 10]), disk(1, 50.0, &[0])];
    let found = place(&hosts, &disks, Bounds { moves_max: 8, gain_min: 0.01 });
    assert_eq!(found.moves.len(), 2, "{found:?}");
    assert!(found.moves.iter().all(|one| one.to == 1), "{found:?}");
    assert_eq!(found.hosts, [1, 1, 1]);
    // A small gain is not worth a move.
    let found = place(&hosts, &disks, Bounds { moves_max: 8, gain_min: 0.25 });
    assert_eq!(found.moves.len(), 1, "{found:?}");
    // Fixed disks cannot move, and disks cannot move to hosts that accept none.
    let fixed: Vec<Disk> = disks.iter().map(|disk| Disk { moves: false, ..disk.clone() }).collect();
    assert_eq!(place(&hosts, &fixed, ALL).moves, []);
    let closed = [hosts[0], Host { takes: false, ..hosts[1] }];
    assert_eq!(place(&closed, &disks, ALL).moves, []);
}

#[test]
fn a_host_that_is_to_be_empty_loses_every_disk_that_can_move() {
    let hosts = [Host { empties: true, ..host(8) }, host(4), Host { load: 5.0, ..host(4) }];
    let idle = |host| disk(host, 0.0, &[50]);
    let stuck = Disk { moves: false, ..disk(0, 10.0, &[0]) };
    let disks = [disk(0, 100.0, &[50, 0]), idle(0), stuck, idle(1), disk(0, 90.0, &[90, 90, 0])];
    let found = place(&hosts, &disks, Bounds { moves_max: 0, gain_min: 0.0 });
    let gone: Vec<usize> = found.moves.iter().map(|one| one.disk).collect();
    assert_eq!(gone, [0, 4, 1], "who reads most is placed first: {found:?}");
    assert_eq!(found.hosts[2], 0, "it cannot");
    assert!(found.moves.iter().all(|one| one.to != 0));
    assert_ne!(found.hosts[0], found.hosts[4], "there is no room for both caches on one: {found:?}");
    // An idle disk has no gain anywhere: the load decides.
    let idle_alone = [idle(0)];
    assert_eq!(place(&hosts, &idle_alone, ALL).hosts, [1]);
}

#[test]
fn nowhere_to_go_is_no_move() {
    let alone = [Host { empties: true, ..host(4) }];
    assert_eq!(place(&alone, &[disk(0, 1.0, &[0])], ALL).moves, []);
    assert_eq!(place(&[], &[], ALL).moves, []);
    assert_eq!(place(&[host(0), host(0)], &[disk(0, 1.0, &[0])], ALL).moves, []);
}

#[test]
fn many_hosts_and_disks_take_little_time() {
    let mut rng = SimRng(3);
    let hosts: Vec<Host> = (0..32).map(|_| host(rng.below(60))).collect();
    let disks: Vec<Disk> = (0..1000).map(|_| random_disk(&mut rng, 32)).collect();
    let found = place(&hosts, &disks, Bounds { moves_max: 16, gain_min: 0.0005 });
    assert!(!found.moves.is_empty());
    assert!(Placement::hits(&disks, &found.sizes) > Placement::hits(&disks, &found.sizes_here));
}
