//! Devices that fail repeatedly or do not answer: fences, stalls, and their effects for guests.

use super::*;
use crate::stats::CacheState;

fn limits() -> Limits {
    Limits { flash_errors_max: 3, flash_errors_forgive_ms: 100, flash_stall_ms_max: 50, ..Limits::default() }
}

/// Returns a cache of two segments on two devices, with 32 KiB of data.
fn on_two_devices() -> Bench {
    let mut bench = Bench::bare(limits());
    let segments = vec![segment(0, 0), segment(1, 0)];
    bench.change(CacheChange::enable_volatile(config(16 * KIB, 4 * KIB), segments)).unwrap();
    bench.read_alone(0, 32 * KIB);
    bench
}

/// Makes a hit's flash read fail, and completes the I/O that follows.
fn failing_hit(bench: &mut Bench, offset: u64) -> Outcome {
    let read = bench.read(offset, 4 * KIB);
    if bench.ios.front().is_some_and(is_flash) {
        let io = bench.ios.pop_front().unwrap();
        bench.fail(io);
    }
    bench.settle();
    bench.outcome(read)
}

/// Issue: "after repeated errors the device is fenced, its caches bypass".
#[test]
fn repeated_errors_fence_a_device_and_its_cache_bypasses() {
    let mut bench = Bench::bare(limits());
    bench.enable(16 * KIB, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    bench.events.clear();
    assert_eq!(failing_hit(&mut bench, 0), Outcome::FlashFailed);
    assert_eq!(failing_hit(&mut bench, 0), Outcome::FlashFailed);
    assert_eq!(bench.events, []);
    assert_eq!(failing_hit(&mut bench, 0), Outcome::FlashFailed);
    let lost = Event::Lost { disk: DISK, segments: vec![segment(0, 0)] };
    assert_eq!(bench.events, [Event::Fenced { device: DeviceId(0), errors: 3 }, lost]);
    assert_eq!(bench.stats().cache, CacheState::Fenced);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::BypassFenced);
    assert_eq!(bench.write_alone(0, 4 * KIB), Outcome::WriteNotCopied);
    // A cache on another device is used again.
    bench.change(CacheChange::enable_volatile(config(16 * KIB, 4 * KIB), vec![segment(1, 0)])).unwrap();
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
}

/// Promise 3: "Loss of a flash device: no guest error". The cache continues with the data on other
/// devices.
#[test]
fn a_cache_on_two_devices_keeps_the_half_that_works() {
    let mut bench = on_two_devices();
    bench.events.clear();
    (0..3).for_each(|_| assert_eq!(failing_hit(&mut bench, 16 * KIB), Outcome::FlashFailed));
    assert!(bench.events.contains(&Event::Lost { disk: DISK, segments: vec![segment(1, 0)] }));
    assert_eq!(bench.stats().blocks, 4);
    assert_eq!(bench.read_alone(4 * KIB, 12 * KIB), Outcome::Hit);
    assert_eq!(bench.read_alone(16 * KIB, 4 * KIB), Outcome::Hit, "repaired on the other device");
    assert_eq!(bench.read_alone(20 * KIB, 4 * KIB), Outcome::MissFilled);
    bench.read(0, 64 * KIB);
    assert!(bench.ios.iter().all(|io| io.target != Target::Flash(DeviceId(1))));
}

/// Errors at long intervals do not count together towards the limit.
#[test]
fn errors_are_forgiven_after_a_while() {
    let mut bench = Bench::bare(limits());
    bench.enable(16 * KIB, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    for _ in 0..10 {
        assert_eq!(failing_hit(&mut bench, 0), Outcome::FlashFailed);
        bench.wait_ms(101);
    }
    assert_eq!(bench.stats().cache, CacheState::Active);
}

/// The segments of a fenced device are released only when none of their I/O is in flight.
#[test]
fn a_fence_waits_for_flash_io_in_flight() {
    let mut bench = on_two_devices();
    bench.events.clear();
    bench.read(28 * KIB, 4 * KIB);
    let in_flight = bench.only_io();
    (0..3).for_each(|i| _ = failing_hit(&mut bench, (16 + 4 * i) * KIB));
    assert_eq!(bench.events, [Event::Fenced { device: DeviceId(1), errors: 3 }]);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::BypassChanging);
    bench.end(in_flight);
    assert_eq!(bench.events[1..], [Event::Lost { disk: DISK, segments: vec![segment(1, 0)] }]);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
}

/// A cache that is enabled on a fenced device loses this device at once.
#[test]
fn a_fenced_device_takes_no_new_cache() {
    let mut bench = Bench::bare(limits());
    bench.enable(16 * KIB, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    (0..3).for_each(|_| _ = failing_hit(&mut bench, 0));
    bench.events.clear();
    bench.enable(16 * KIB, 4 * KIB);
    assert_eq!(bench.events.last(), Some(&Event::Lost { disk: DISK, segments: vec![segment(0, 0)] }));
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::BypassFenced);
}

/// A device that does not answer is bypassed after a while, and used again when it answers.
#[test]
fn a_stalled_device_is_bypassed_until_it_answers() {
    let mut bench = Bench::bare(limits());
    bench.enable(16 * KIB, 4 * KIB);
    bench.read_alone(0, 8 * KIB);
    bench.events.clear();
    let stuck = bench.read(0, 4 * KIB);
    let io = bench.only_io();
    bench.wait_ms(49);
    assert_eq!(bench.events, []);
    bench.wait_ms(1);
    assert_eq!(bench.events, [Event::Stalled(DeviceId(0))]);
    assert_eq!(bench.engine.poll_timeout(), None, "nothing to wait for but the device");
    assert_eq!(bench.stats().cache, CacheState::Stalled);
    assert_eq!(bench.read_alone(4 * KIB, 4 * KIB), Outcome::BypassStalled);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::BypassStalled, "the same data, too");
    bench.end(io);
    assert_eq!(bench.outcome(stuck), Outcome::Hit);
    assert_eq!(bench.events[1..], [Event::Resumed(DeviceId(0))]);
    assert_eq!(bench.read_alone(4 * KIB, 4 * KIB), Outcome::Hit);
}

/// A device that often pauses for slightly longer than the limit is not reported each time. A hang
/// does not raise the limit.
#[test]
fn the_stall_limit_adapts_to_short_pauses_of_a_device() {
    let mut bench = Bench::bare(limits());
    bench.enable(16 * KIB, 4 * KIB);
    bench.read_alone(0, 8 * KIB);
    bench.events.clear();
    let pause = |bench: &mut Bench, ms| {
        bench.read(0, 4 * KIB);
        let io = bench.only_io();
        bench.wait_ms(ms);
        bench.end(io);
        std::mem::take(&mut bench.events).len() / 2
    };
    assert_eq!(pause(&mut bench, 60), 1, "the first pause longer than 50 ms is a stall");
    assert_eq!(pause(&mut bench, 110), 0, "twice the first pause is allowed now");
    assert_eq!(pause(&mut bench, 130), 1);
    assert_eq!(pause(&mut bench, 190), 0, "four times the limit is the most");
    assert_eq!(pause(&mut bench, 5_000), 1, "a hang is always reported");
    assert_eq!(pause(&mut bench, 201), 1, "and does not raise the limit further");
    bench.wait_ms(600_000);
    assert_eq!(pause(&mut bench, 60), 1, "after ten minutes without a pause the configured limit applies");
}

/// Later reads do not wait for a fill that hangs: they bypass it.
#[test]
fn reads_do_not_wait_for_a_fill_that_hangs() {
    let mut bench = Bench::bare(limits());
    bench.enable(16 * KIB, 4 * KIB);
    bench.read(0, 4 * KIB);
    let fetch = bench.only_io();
    bench.end(fetch);
    let hanging = bench.only_io();
    bench.wait_ms(50);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::BypassStalled);
    bench.end(hanging);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
}

/// Without I/O in flight the engine needs no timer.
#[test]
fn an_idle_engine_wants_no_timeout() {
    let mut bench = on_two_devices();
    assert_eq!(bench.engine.poll_timeout(), None);
    bench.read(0, 4 * KIB);
    assert_eq!(bench.engine.poll_timeout(), Some(bench.now + 50_000_000));
    bench.settle();
    assert_eq!(bench.engine.poll_timeout(), None);
}

/// A device that is removed by command is not fenced.
#[test]
fn leaving_the_last_device_by_command_is_no_fence() {
    let mut bench = Bench::cached(4, 4 * KIB);
    assert_eq!(
        bench.change(CacheChange::Leave(DeviceId(0), DataSegment::without_order(vec![]), None)),
        Ok(vec![segment(0, 0)])
    );
    assert_eq!(bench.stats().cache, CacheState::None);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::CacheOff);
}
