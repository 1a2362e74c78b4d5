//! Tests of the flash device model. Its I/Os per second, bandwidth and latencies match the ratings
//! of the modelled devices. I/O waits for the controller, dies, link and buffer as the
//! documentation of the model says.

use super::*;

const GIB: u64 = 1 << 30;

/// Runs a closed loop with `depth` I/Os in flight. Returns (I/Os per second, mean ns).
fn closed_loop(
    config: FlashConfig,
    depth: usize,
    mut next: impl FnMut(u64) -> (Access, u64, u64),
) -> (f64, f64) {
    let mut device = FlashModel::new(config);
    let mut under_way = BinaryHeap::new();
    let (mut now, mut waited, count) = (0, 0, 40_000);
    for i in 0..count {
        if under_way.len() == depth {
            let Reverse(done) = under_way.pop().unwrap();
            now = done;
        }
        let (op, offset, len) = next(i);
        let done = device.submit(now, op, offset, len);
        assert!(done > now, "nothing is instantaneous");
        waited += done - now;
        under_way.push(Reverse(done));
    }
    let end = under_way.into_iter().map(|Reverse(done)| done).max().unwrap();
    (count as f64 * 1e9 / end as f64, waited as f64 / count as f64)
}

fn place(i: u64) -> u64 {
    scatter(i) % (100 * GIB / 4096) * 4096
}

fn random(config: FlashConfig, op: Access, depth: usize) -> (f64, f64) {
    closed_loop(config, depth, |i| (op, place(i), 4096))
}

fn within(measured: f64, rating: f64, share: f64) -> bool {
    (measured / rating - 1.0).abs() <= share
}

#[test]
fn random_reads_at_the_rated_depth_meet_the_rating() {
    for (config, depth, rating) in
        [(FlashConfig::sata_ssd(), 32, 39_500.0), (FlashConfig::pcie_card(), 256, 750_000.0)]
    {
        let (iops, _) = random(config, Access::Read, depth);
        assert!(within(iops, rating, 0.02), "{iops:.0} for {rating}");
    }
}

#[test]
fn one_read_at_a_time_sees_the_latency_of_a_die() {
    let (_, sata) = random(FlashConfig::sata_ssd(), Access::Read, 1);
    assert!((85_000.0..=115_000.0).contains(&sata), "{sata:.0} ns");
    let (_, pcie) = random(FlashConfig::pcie_card(), Access::Read, 1);
    assert!((60_000.0..=90_000.0).contains(&pcie), "{pcie:.0} ns");
}

#[test]
fn the_card_needs_its_depth() {
    let iops = [1, 4, 16, 64, 256].map(|depth| random(FlashConfig::pcie_card(), Access::Read, depth).0);
    assert!(iops.is_sorted(), "{iops:?}");
    assert!(iops[2] < 250_000.0 && iops[3] < 700_000.0, "{iops:?}");
}

#[test]
fn random_writes_meet_the_sustained_rating_and_are_acknowledged_by_the_buffer() {
    let (iops, _) = random(FlashConfig::sata_ssd(), Access::Write, 32);
    assert!(within(iops, 23_000.0, 0.02), "{iops:.0}");
    let (iops, _) = random(FlashConfig::pcie_card(), Access::Write, 256);
    assert!(within(iops, 95_000.0, 0.02), "{iops:.0}");
    let (_, latency) = random(FlashConfig::sata_ssd(), Access::Write, 1);
    assert!(latency < 90_000.0, "{latency:.0} ns");
    let (_, latency) = random(FlashConfig::pcie_card(), Access::Write, 1);
    assert!(latency < 20_000.0, "{latency:.0} ns");
}

#[test]
fn large_transfers_run_at_the_rated_bytes_a_second() {
    let large = 256 << 10;
    for (config, op, rating) in [
        (FlashConfig::sata_ssd(), Access::Read, 270e6),
        (FlashConfig::sata_ssd(), Access::Write, 205e6),
        (FlashConfig::pcie_card(), Access::Read, 3.3e9),
        (FlashConfig::pcie_card(), Access::Write, 630e6),
    ] {
        let (rate, _) = closed_loop(config, 16, |i| (op, i * large, large));
        assert!(within(rate * large as f64, rating, 0.05), "{op:?}: {:.0} for {rating}", rate * large as f64);
    }
}

#[test]
fn a_full_buffer_makes_writers_wait_for_the_dies() {
    let slow =
        FlashConfig { program_page_ns: 5_000_000, write_buffer_bytes: 64 << 10, ..FlashConfig::sata_ssd() };
    let (iops, _) = random(slow, Access::Write, 8);
    assert!(within(iops, 10.0 / 0.005, 0.02), "ten dies of 5 ms: {iops:.0}");
}

#[test]
fn reads_wait_behind_programs() {
    let (_, alone) = random(FlashConfig::sata_ssd(), Access::Read, 1);
    let mut device = FlashModel::new(FlashConfig::sata_ssd());
    let mut waited = 0;
    for i in 0..10_000u64 {
        let now = i * 200_000;
        device.submit(now, Access::Write, place(i), 8192);
        waited += device.submit(now + 70_000, Access::Read, place(i + 77), 4096) - now - 70_000;
    }
    assert!(waited as f64 / 10_000.0 > alone * 1.1, "{waited} against {alone:.0}");
}

#[test]
fn more_than_the_depth_waits_outside() {
    let config = FlashConfig { queue_depth_max: 1, ..FlashConfig::pcie_card() };
    let (iops, _) = random(config, Access::Read, 64);
    let (alone, _) = random(FlashConfig::pcie_card(), Access::Read, 1);
    assert!(within(iops, alone, 0.01), "{iops:.0} against {alone:.0}");
}

#[test]
fn the_same_calls_give_the_same_times() {
    let run = || {
        let mut device = FlashModel::new(FlashConfig::sata_ssd());
        (0..5_000)
            .map(|i| {
                let op = [Access::Read, Access::Write, Access::Flush][(i % 3) as usize];
                device.submit(i * 20_000, op, place(i), 4096 + i % 9 * 4096)
            })
            .collect::<Vec<u64>>()
    };
    assert_eq!(run(), run());
}

/// Ratings of a current device: configuration, queue depth, random reads and writes per second,
/// bytes per second of sequential reads and writes.
const CURRENT: [(FlashConfig, usize, [f64; 4]); 3] = [
    (FlashConfig::sata_current(), 32, [94_000.0, 65_000.0, 560e6, 530e6]),
    (FlashConfig::nvme_pcie4(), 256, [900_000.0, 200_000.0, 6.5e9, 3.5e9]),
    (FlashConfig::nvme_pcie5(), 512, [3_300_000.0, 640_000.0, 14e9, 10e9]),
];

#[test]
fn current_devices_meet_their_ratings() {
    for (config, depth, [reads, writes, read_bytes, write_bytes]) in CURRENT {
        for (op, rating) in [(Access::Read, reads), (Access::Write, writes)] {
            let (iops, _) = random(config, op, depth);
            assert!(within(iops, rating, 0.03), "{op:?}: {iops:.0} for {rating}");
        }
        for (op, rating) in [(Access::Read, read_bytes), (Access::Write, write_bytes)] {
            let (iops, _) = closed_loop(config, 32, |i| (op, i * (128 << 10), 128 << 10));
            let rate = iops * 131_072.0;
            assert!(within(rate, rating, 0.05), "{op:?}: {rate:.0} bytes a second for {rating}");
        }
    }
}

#[test]
fn the_fastest_device_has_its_typical_latencies() {
    let (_, read) = random(FlashConfig::nvme_pcie5(), Access::Read, 1);
    assert!(within(read, 60_000.0, 0.05), "{read:.0} ns");
    let (_, write) = random(FlashConfig::nvme_pcie5(), Access::Write, 1);
    assert!(write <= 15_000.0, "{write:.0} ns");
}
