//! Tests that replays have the latencies that were computed by hand, and that load increases
//! latencies.

use hob_engine::command;
use hob_engine::io::{Durability, Zeroing};
use hob_engine::policy::PolicyKind;

use super::*;
use crate::disk_model::{ArrayConfig, ArrayModel};
use crate::flash_model::{FlashConfig, FlashModel};
use crate::rng::scatter;
use crate::service::FixedModel;

const MIB: u64 = 1 << 20;
const WRITE: Op = Op::Write(Durability::Volatile);

fn fixed(read_ns: u64, write_ns: u64) -> FixedModel {
    FixedModel::new(read_ns, write_ns, usize::MAX)
}

fn cache(bytes: u64) -> Option<CacheSetup> {
    Some(CacheSetup::volatile(bytes, 4096, PolicyKind::from_name("lru").unwrap()))
}

fn ask(op: Op, offset: u64, len: u64) -> Ask {
    Ask { disk: 0, op, offset, len, tag: 0 }
}

/// Returns outcomes and latencies of requests, in order of their replies.
fn open(setup: Setup, requests: &[(u64, Ask)]) -> Vec<(Outcome, u64)> {
    let mut list = Vec::new();
    let mut replay = Replay::new(setup).unwrap();
    let run = replay.open(requests.to_vec(), |served| list.push((served.outcome, served.latency_ns)));
    assert_eq!(run.requests, requests.len() as u64);
    list
}

#[test]
fn latencies_are_those_worked_out_by_hand() {
    let setup = Setup::one_disk(MIB, cache(64 << 10), fixed(10, 30), fixed(1000, 2000));
    let requests = [
        (0, ask(Op::Read, 0, 4096)),
        // The cache fills the sectors of the first request until time 1030 and then answers the
        // second request as a hit.
        (1, ask(Op::Read, 0, 4096)),
        (5000, ask(WRITE, 8192, 4096)),
        (10_000, ask(Op::Read, 8192, 4096)),
        (11_000, ask(Op::Read, 8192, 8192)),
        (15_000, ask(Op::Read, 8192, 8192)),
        (20_000, ask(Op::Flush, 7, 7)),
        (21_000, ask(Op::Discard(Durability::Volatile), 8192, 4096)),
        (22_000, ask(Op::Read, 8192, 4096)),
        (25_000, ask(Op::WriteZeroes(Durability::Volatile, Zeroing::MayUnmap), 0, 4096)),
        (30_000, ask(Op::Read, 0, 512)),
        (32_000, ask(Op::Read, MIB - 4096, 8192)),
    ];
    let expected = [
        (Outcome::MissFilled, 1000),
        (Outcome::Hit, 1029 + 10),
        (Outcome::WriteCopied, 2000),
        (Outcome::Hit, 10),
        (Outcome::PartialMiss, 1000),
        (Outcome::Hit, 10),
        (Outcome::BypassFlush, 0),
        (Outcome::BypassZeroing, 0),
        (Outcome::MissFilled, 1000),
        (Outcome::BypassZeroing, 2000),
        (Outcome::MissFilled, 1000),
        (Outcome::Refused, 0),
    ];
    assert_eq!(open(setup, &requests), expected);
}

#[test]
fn without_a_cache_everything_costs_the_backings_time() {
    let setup = Setup::one_disk(MIB, None, fixed(10, 30), fixed(1000, 2000));
    let requests = [(0, ask(Op::Read, 0, 4096)), (5000, ask(Op::Read, 0, 4096)), (9000, ask(WRITE, 0, 4096))];
    let answers = open(setup, &requests);
    assert_eq!(
        answers,
        [(Outcome::CacheOff, 1000), (Outcome::CacheOff, 1000), (Outcome::WriteNotCopied, 2000)]
    );
}

/// Returns reads and a few writes over twice the size of the cache, one every microsecond.
fn mixed(count: u64) -> impl Iterator<Item = (u64, Ask)> {
    (0..count).map(|i| {
        let op = if scatter(i ^ 0xabc).is_multiple_of(5) { WRITE } else { Op::Read };
        (i * 1000, ask(op, scatter(i) % 512 * 4096, 4096 + scatter(i ^ 7) % 3 * 4096))
    })
}

fn mixed_setup() -> Setup {
    let array =
        ArrayModel::new(ArrayConfig { stripe_bytes: 64 << 10, ..ArrayConfig::raid5_of_four_7200(4 * MIB) });
    Setup::one_disk(4 * MIB, cache(MIB), FlashModel::new(FlashConfig::sata_ssd()), array)
}

#[test]
fn reported_counts_are_the_engines_counts() {
    let mut replay = Replay::new(mixed_setup()).unwrap();
    let mut counts = [0u64; Outcome::COUNT];
    let run = replay.open(mixed(20_000), |served| counts[served.outcome as usize] += 1);
    let stats = replay.stats(0).unwrap();
    assert_eq!(counts, std::array::from_fn(|i| stats.outcomes[i].count));
    assert_eq!(run.requests, stats.requests());
    assert!(counts[Outcome::Hit as usize] > 4000, "{counts:?}");
    assert!(stats.blocks == 256 && stats.evictions.blocks > 0);
    assert_eq!(replay.stats(1).map(|_| ()), None);
}

#[test]
fn the_same_requests_give_the_same_answers() {
    let run = || {
        let mut list = Vec::new();
        let mut replay = Replay::new(mixed_setup()).unwrap();
        let run = replay.open(mixed(10_000), |served| list.push(*served));
        (list, run)
    };
    assert_eq!(run(), run());
}

#[test]
fn an_overload_builds_a_queue_inside_or_outside_the_engine() {
    for requests_max in [4096, 4] {
        let mut setup = Setup::one_disk(MIB, None, fixed(10, 10), FixedModel::new(1000, 1000, 1));
        setup.limits.requests_max = requests_max;
        let mut replay = Replay::new(setup).unwrap();
        let mut latencies = Vec::new();
        let requests = (0..100).map(|i| (i * 500, ask(Op::Read, i % 7 * 4096, 4096)));
        let run = replay.open(requests, |served| latencies.push(served.latency_ns));
        assert!(latencies.iter().enumerate().all(|(i, &ns)| ns == 1000 + 500 * i as u64), "{latencies:?}");
        assert_eq!(run.waited > 0, requests_max == 4);
        assert!(run.in_flight_max <= requests_max);
        assert_eq!(run.ended, Instant(100_000));
    }
}

#[test]
fn times_that_go_back_count_as_their_predecessors() {
    let setup = Setup::one_disk(MIB, None, fixed(10, 10), fixed(1000, 1000));
    let mut at = Vec::new();
    let requests = [(500, ask(Op::Read, 0, 512)), (200, ask(Op::Read, 0, 512)), (900, ask(Op::Read, 0, 512))];
    Replay::new(setup).unwrap().open(requests, |served| at.push((served.at.0, served.latency_ns)));
    assert_eq!(at, [(500, 1000), (500, 1000), (900, 1000)]);
}

/// Runs a closed loop for a millisecond. Returns its run and the replies of each client.
fn closed(clients: u32, think_ns: u64, requests_max: u32) -> (Run, Vec<u64>) {
    let mut setup = Setup::one_disk(MIB, None, fixed(10, 10), fixed(1000, 1000));
    setup.limits.requests_max = requests_max;
    let mut answers = vec![0; clients as usize];
    let run = Replay::new(setup).unwrap().closed(
        clients,
        |now, client| (now.0 < 1_000_000).then(|| (think_ns, ask(Op::Read, u64::from(client) * 4096, 4096))),
        |served| answers[served.client as usize] += 1,
    );
    (run, answers)
}

#[test]
fn a_closed_loop_keeps_its_clients_busy_and_no_more() {
    let (run, answers) = closed(7, 0, 4096);
    assert_eq!((run.in_flight_max, run.requests, run.waited), (7, 7000, 0));
    assert!(answers.iter().all(|&answers| answers == 1000), "{answers:?}");
    // A request takes 1000 ns, after 3000 ns of think time.
    let (run, answers) = closed(7, 3000, 4096);
    assert_eq!(run.requests, 7 * 250);
    assert!(answers.iter().all(|&answers| answers == 250), "{answers:?}");
}

#[test]
fn clients_that_the_engine_has_no_room_for_take_turns() {
    // One disk may have five of eight requests.
    let (run, answers) = closed(10, 0, 8);
    assert_eq!(run.in_flight_max, 5);
    assert!(run.requests.abs_diff(5000) < 16 && run.waited > 4900, "{run:?}");
    assert!(answers.iter().all(|&answers| answers.abs_diff(500) < 4), "{answers:?}");
}

#[test]
fn runs_follow_each_other_with_a_warm_cache() {
    let setup = Setup::one_disk(MIB, cache(MIB), fixed(10, 30), fixed(1000, 2000));
    let mut replay = Replay::new(setup).unwrap();
    let all = || (0..256).map(|i| (i * 5000, ask(Op::Read, i * 4096, 4096)));
    let first = replay.open(all(), |served| assert_eq!(served.outcome, Outcome::MissFilled));
    replay.reset_stats();
    let second = replay.open(all(), |served| assert_eq!(served.outcome, Outcome::Hit));
    assert_eq!(second.began, first.ended);
    let stats = replay.stats(0).unwrap();
    assert_eq!((stats.reads, stats.read_hits), (256, 256));
}

#[test]
fn disks_have_caches_of_their_own_and_share_the_backing() {
    let array = || ArrayModel::new(ArrayConfig::raid5_of_four_7200(2 * MIB));
    let mut setup = Setup::one_disk(MIB, cache(MIB), fixed(10, 30), array());
    setup.disks.push(DiskSetup { size_bytes: MIB, backing_offset: MIB, cache: None });
    let mut outcomes = Vec::new();
    let requests = (0..4).map(|i| (i * 100_000_000, Ask { disk: i as u32 % 3, ..ask(Op::Read, 0, 4096) }));
    Replay::new(setup.clone()).unwrap().open(requests, |served| outcomes.push(served.outcome));
    assert_eq!(outcomes, [Outcome::MissFilled, Outcome::CacheOff, Outcome::Refused, Outcome::Hit]);
    setup.disks[1].backing_offset += 512;
    let error = Replay::new(setup).map(|_| ()).unwrap_err();
    assert_eq!(error.to_string(), "disk 1 reaches beyond its backing's end");
}

#[test]
fn set_ups_that_cannot_work_say_so() {
    let bad = |size, bytes, block_bytes| {
        let cache = CacheSetup::volatile(bytes, block_bytes, PolicyKind::default());
        Replay::new(Setup::one_disk(size, Some(cache), fixed(1, 1), fixed(1, 1))).map(|_| ()).unwrap_err().0
    };
    assert!(bad(MIB, 4095, 4096).contains("TooSmall"));
    assert!(bad(MIB, MIB, 5000).contains("Unworkable"));
    assert!(bad(MIB, MIB, 0).contains("TooSmall"));
    assert!(bad(1000, MIB, 4096).contains("multiple of 512"));
}

#[test]
fn a_flash_device_that_does_not_answer_is_bypassed_as_in_the_daemon() {
    let slow = fixed(1_500_000_000, 1_500_000_000);
    let setup = Setup::one_disk(MIB, cache(MIB), slow, fixed(1000, 2000));
    let requests: Vec<(u64, Ask)> =
        (0..40).map(|i| (i * 50_000_000, ask(Op::Read, i * 4096, 4096))).collect();
    let answers = open(setup, &requests);
    assert!(answers.contains(&(Outcome::BypassStalled, 1000)), "{answers:?}");
}

/// Returns a write-back cache with a journal, one copy and nothing to destage.
fn write_back(bytes: u64) -> CacheSetup {
    let CacheSetup { config, .. } = cache(bytes).unwrap();
    let destage = command::Destage { start_permille: 900, stop_permille: 900, ..command::Destage::default() };
    let destage = command::Destage { full_permille: 1000, dirty_age_ms_max: 0, ..destage };
    let config = command::CacheConfig { mode: command::Mode::WriteBack, destage, ..config };
    CacheSetup { bytes, config, journal: true }
}

#[test]
fn a_write_back_write_takes_the_flashs_time_and_a_durable_one_its_journals_too() {
    let setup = Setup::one_disk(MIB, Some(write_back(MIB)), fixed(10, 30), fixed(1000, 2000));
    let durable = Op::Write(Durability::Durable);
    let requests = [
        (0, ask(WRITE, 0, 4096)),
        (10_000, ask(Op::Read, 0, 4096)),
        // The latency is the time to write the data and then a journal page. A flush takes no time
        // here.
        (20_000, ask(durable, 8192, 4096)),
        (30_000, ask(WRITE, 16_384, 4096)),
        (40_000, ask(Op::Flush, 0, 0)),
        (50_000, ask(Op::Flush, 0, 0)),
    ];
    let expected = [
        (Outcome::WriteBack, 30),
        (Outcome::Hit, 10),
        (Outcome::WriteBack, 60),
        (Outcome::WriteBack, 30),
        (Outcome::FlushCommitted, 30),
        (Outcome::FlushCommitted, 0),
    ];
    assert_eq!(open(setup, &requests), expected);
}

#[test]
fn a_run_ends_with_its_requests_and_destaging_continues() {
    let mut setup = write_back(MIB);
    setup.config.destage.dirty_age_ms_max = 2000;
    let setup = Setup::one_disk(MIB, Some(setup), fixed(10, 30), fixed(1000, 2000));
    let mut replay = Replay::new(setup).unwrap();
    replay.watch(0, 50);
    let began = replay.now();
    let run = replay.open((0..100).map(|i| (i * 100, ask(WRITE, i * 4096, 4096))), |_| {});
    assert!(run.ended - began < 100_000, "{run:?}");
    let dirty: Vec<u64> = replay.samples().iter().map(|sample| sample.dirty_bytes / 4096).collect();
    assert_eq!(dirty, [50, 100]);
    assert_eq!(replay.stats(0).unwrap().sectors_dirty, 100);
    replay.pass(3_000_000_000);
    let stats = replay.stats(0).unwrap();
    assert_eq!((stats.sectors_dirty, stats.destaged_bytes, stats.backing.write_bytes), (0, 409_600, 409_600));
    assert!(replay.now() >= run.ended + 3_000_000_000);
}

#[test]
fn a_cache_can_be_changed_between_runs() {
    let mut replay =
        Replay::new(Setup::one_disk(MIB, Some(write_back(MIB)), fixed(10, 30), fixed(1000, 2000))).unwrap();
    replay.open((0..100).map(|i| (i * 100, ask(WRITE, i * 4096, 4096))), |_| {});
    assert_eq!(replay.change(0, CacheChange::Disable), Err(CommandError::Dirty));
    assert_eq!(replay.change(0, CacheChange::Drain), Ok(()));
    assert_eq!(replay.stats(0).unwrap().sectors_dirty, 0);
    assert_eq!(replay.change(0, CacheChange::Disable), Ok(()));
    assert_eq!(replay.change(3, CacheChange::Drain), Err(CommandError::NoSuchDisk));
}

#[test]
fn two_copies_cost_two_devices_time_and_need_two() {
    let mut doubled = write_back(MIB);
    doubled.config.copies = command::Copies::TwoOfDirty;
    let setup = Setup::one_disk(MIB, Some(doubled), FixedModel::new(10, 30, 1), fixed(1000, 2000));
    assert_eq!(setup.flash.len(), 2);
    let alone = Setup { flash: setup.flash[..1].to_vec(), ..setup.clone() };
    let error = Replay::new(alone).map(|_| ()).unwrap_err().to_string();
    assert_eq!(error, "disk 0: its cache needs 2 flash devices");
    let mut replay = Replay::new(setup).unwrap();
    let mut latencies = vec![];
    replay.open([(0, ask(WRITE, 0, 4096))], |served| latencies.push(served.latency_ns));
    assert_eq!((latencies, replay.stats(0).unwrap().sectors_valid), (vec![30], 2));
}
