//! Disks that another host owns, or will own: the table of `ownership.rs`, and what a freeze waits
//! for.

use super::write_back::{backing, lazy, ring};
use super::*;
use crate::admission::Popularity;
use crate::command::{Copies, Enable, Mode, Role};
use crate::stats::CacheState;

const SECTOR: u64 = SECTOR_BYTES;

impl Bench {
    fn own(&mut self, role: Role) -> Result<Vec<Segment>, CommandError> {
        self.command(Command::Own(role))
    }

    /// Returns a disk in standby with a cache into which sectors 0 to 3 were pulled.
    fn standing_by() -> Bench {
        let mut bench = Bench::bare(Limits::default());
        bench.own(Role::Standby).expect("nothing has happened to it");
        bench.enable(16 * 4 * KIB, 4 * KIB);
        let pull = bench.request(Op::Pull, 0, 4 * SECTOR);
        bench.settle();
        assert_eq!(bench.reply(pull).unwrap().result, Ok(()));
        assert_eq!(bench.stats().sectors_valid, 4);
        bench
    }

    /// Returns a frozen disk with sectors 0 to 3 on flash.
    fn frozen() -> Bench {
        let mut bench = Bench::cached(16, 4 * KIB);
        bench.read(0, 4 * SECTOR);
        bench.settle();
        bench.own(Role::Frozen).expect("nothing is dirty");
        bench
    }

    fn result_of(&mut self, op: Op, offset: u64, len: u64) -> Option<Result<(), IoError>> {
        let id = self.request(op, offset, len);
        self.settle();
        self.reply(id).map(|reply| reply.result)
    }
}

#[test]
fn each_role_serves_requests_as_the_table_lists() {
    use IoError::{NotCached, ShuttingDown};
    let refused = Some(Err(ShuttingDown));
    let (served, waits) = (Some(Ok(())), None);
    // Sector 0 is on flash, and sector 9 is not.
    let cases = [
        (Op::Read, [served, served, waits, refused]),
        (WRITE, [served, waits, waits, refused]),
        (Op::Discard(Durability::Volatile), [served, waits, waits, refused]),
        (Op::Flush, [served, served, waits, refused]),
        (Op::DaemonFlush, [served, served, waits, refused]),
        (Op::Prefetch, [served, served, waits, refused]),
        (Op::Pull, [served, served, refused, refused]),
        (Op::Forget, [refused, served, refused, refused]),
        (Op::Settle, [refused, refused, served, refused]),
        (Op::ReadForPeer, [served, refused, served, Some(Err(NotCached))]),
    ];
    for (op, expected) in cases {
        let here = Bench::cached(16, 4 * KIB);
        let mut away = Bench::frozen();
        away.own(Role::Away).expect("frozen");
        let benches = [here, Bench::standing_by(), Bench::frozen(), away];
        for (mut bench, expected) in benches.into_iter().zip(expected) {
            let role = bench.engine.role(DISK);
            let len = if matches!(op, Op::Flush | Op::DaemonFlush | Op::Settle) { 0 } else { SECTOR };
            assert_eq!(
                bench.result_of(op, len / SECTOR * 9 * SECTOR, len),
                expected,
                "{op:?} of a disk {role:?}"
            );
            assert_eq!(bench.engine.in_flight(), u32::from(expected.is_none()));
        }
    }
}

#[test]
fn guests_in_standby_read_the_owners_data_and_cache_nothing() {
    let mut bench = Bench::standing_by();
    let read = bench.read(0, 4 * SECTOR);
    let io = bench.only_io();
    assert_eq!(io.target, backing(), "what was pulled may be old already");
    bench.end(io);
    assert_eq!(bench.outcome(read), Outcome::BypassStandby);
    bench.read_alone(8 * SECTOR, SECTOR);
    assert_eq!(bench.stats().sectors_valid, 4);
    bench.own(Role::Here).expect("handed over");
    assert_eq!(bench.read_alone(0, 4 * SECTOR), Outcome::Hit);
    let counted: u64 = bench.stats().outcomes.iter().map(|outcome| outcome.count).sum();
    assert_eq!(counted, 3, "what is pulled is nobody's request");
}

#[test]
fn a_change_in_standby_is_reported_once_and_served_after_the_hand_over() {
    let mut bench = Bench::standing_by();
    let first = bench.write(0, SECTOR);
    let second = bench.write(SECTOR, SECTOR);
    let waits = |event: &&Event| **event == Event::ChangeWaits(DISK);
    assert_eq!(bench.events.iter().filter(waits).count(), 1);
    assert!(bench.ios.is_empty());
    // Waiting requests have no locks, so sectors that the other host changed can be dropped.
    assert_eq!(bench.result_of(Op::Forget, 0, 2 * SECTOR), Some(Ok(())));
    assert_eq!(bench.stats().sectors_valid, 2);
    bench.own(Role::Here).expect("handed over");
    bench.settle();
    assert!([first, second].iter().all(|id| bench.reply(*id).unwrap().result == Ok(())));
}

/// Changes wait for the hand-over of their disk, and the hand-over waits for requests of the
/// daemon. So waiting changes leave request slots for the daemon and for other disks.
#[test]
fn waiting_changes_leave_capacity_for_others_and_for_the_daemon() {
    let limits = Limits { requests_max: 128, ..Limits::default() };
    let mut bench = Bench::bare(limits);
    bench.own(Role::Standby).expect("nothing has happened to it");
    bench.enable(16 * 4 * KIB, 4 * KIB);
    let discard = Op::Discard(Durability::Volatile);
    for _ in 0..64 {
        bench.request(discard, 0, SECTOR);
    }
    bench.try_request(discard, 0, SECTOR).expect_err("half of all wait");
    let reads: Vec<_> = (0..8).map(|_| bench.read(8 * SECTOR, SECTOR)).collect();
    while bench.engine.has_room(DISK) {
        bench.read(8 * SECTOR, SECTOR);
    }
    bench.try_request(Op::Read, 0, SECTOR).expect_err("the rest is the daemon's, and other disks'");
    for op in [Op::Forget, Op::Forget] {
        let id = bench.request(op, 0, SECTOR);
        assert_eq!(bench.reply(id).expect("it waits for nobody").result, Ok(()));
    }
    bench.settle();
    assert!(reads.iter().all(|id| bench.reply(*id).is_some()));
    bench.own(Role::Here).expect("handed over");
    bench.settle();
    assert_eq!(bench.engine.in_flight(), 0);
}

#[test]
fn a_range_is_removed_from_the_list_when_it_was_pulled() {
    let mut bench = Bench::standing_by();
    let pull = bench.request(Op::Pull, 8 * SECTOR, SECTOR);
    let read = bench.only_io();
    let forget = bench.request(Op::Forget, 0, 16 * SECTOR);
    assert!(bench.reply(forget).is_none());
    bench.end(read);
    assert!(bench.reply(pull).is_some() && bench.reply(forget).is_none(), "flash is being written");
    bench.settle();
    assert_eq!(bench.reply(forget).unwrap().result, Ok(()));
    assert_eq!(bench.stats().sectors_valid, 0);
}

#[test]
fn a_pull_comes_in_whatever_admission_thinks() {
    let mut bench = Bench::bare(Limits::default());
    bench.own(Role::Standby).unwrap();
    let third = Admission { popularity: Popularity::NthAccess(3), ..Admission::default() };
    let config = CacheConfig { admission: third, ..config(16 * 4 * KIB, 4 * KIB) };
    bench.change(CacheChange::enable_volatile(config, vec![segment(0, 0)])).unwrap();
    bench.request(Op::Pull, 0, 4 * SECTOR);
    bench.settle();
    assert_eq!(bench.stats().sectors_valid, 4);
}

#[test]
fn freezing_waits_only_for_guests_and_their_fills() {
    let mut bench = Bench::cached(16, 4 * KIB);
    let write = bench.write(0, SECTOR);
    let peer = bench.request(Op::ReadForPeer, 8 * SECTOR, SECTOR);
    let freeze = bench.start_command(Command::Own(Role::Frozen));
    let at = bench.ios.iter().position(|io| io.offset == 0).unwrap();
    let io = bench.ios.remove(at).unwrap();
    bench.end(io);
    assert!(bench.reply(write).is_some() && bench.result(freeze).is_none(), "flash gets its copy");
    let fill = bench.ios.iter().position(is_flash).unwrap();
    let fill = bench.ios.remove(fill).unwrap();
    bench.end(fill);
    assert_eq!(bench.result(freeze), Some(Ok(vec![])));
    assert!(bench.reply(peer).is_none());
    bench.settle();
    assert!(bench.reply(peer).is_some());
}

#[test]
fn a_thaw_ends_a_freeze_and_serves_waiting_requests() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.write(0, SECTOR);
    let freeze = bench.start_command(Command::Own(Role::Frozen));
    let waits = bench.read(4 * SECTOR, SECTOR);
    assert_eq!(bench.own(Role::Away), Err(CommandError::WrongRole), "a guest's write is in flight");
    bench.own(Role::Here).expect("thawed");
    assert_eq!(bench.result(freeze), Some(Err(CommandError::Stopped)));
    bench.settle();
    assert!(bench.reply(waits).is_some());
}

#[test]
fn waiting_requests_fail_when_the_disk_is_away_or_removed() {
    for removed in [false, true] {
        let mut bench = Bench::frozen();
        let waits = bench.write(0, SECTOR);
        match removed {
            true => _ = bench.start_command(Command::RemoveDisk),
            false => _ = bench.own(Role::Away),
        }
        assert_eq!(bench.reply(waits).unwrap().result, Err(IoError::ShuttingDown));
        assert_eq!(bench.engine.in_flight(), 0);
    }
}

#[test]
fn another_host_reads_only_flash_of_a_disk_that_is_away() {
    let mut bench = Bench::frozen();
    bench.own(Role::Away).unwrap();
    let hit = bench.request(Op::ReadForPeer, 0, 4 * SECTOR);
    let io = bench.only_io();
    assert!(is_flash(&io));
    bench.end(io);
    assert_eq!(bench.reply(hit).unwrap().result, Ok(()));
    // Damaged: this host must not read the backing to repair the sector.
    let rotten = bench.request(Op::ReadForPeer, 0, SECTOR);
    let io = bench.only_io();
    bench.end_with(io, Ok(()), &[SUM + 1]);
    assert_eq!(bench.reply(rotten).unwrap().result, Err(IoError::NotCached));
    assert!(bench.ios.is_empty());
}

#[test]
fn changes_are_recorded_while_a_migration_follows_them() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.write_alone(0, SECTOR);
    assert!(bench.engine.take_changed(DISK).is_none());
    bench.command(Command::Watch(true)).unwrap();
    bench.write(3 * SECTOR + 512, SECTOR);
    let changed = bench.engine.take_changed(DISK).expect("noted before it is done");
    assert_eq!(changed.ranges().collect::<Vec<_>>(), [(3, 5)]);
    bench.settle();
    assert!(bench.engine.take_changed(DISK).is_none());
    bench.request(Op::WriteZeroes(Durability::Volatile, crate::io::Zeroing::MayUnmap), 0, SECTOR);
    assert!(bench.engine.take_changed(DISK).is_some());
    bench.command(Command::Watch(false)).unwrap();
    bench.write(0, SECTOR);
    assert!(bench.engine.take_changed(DISK).is_none());
}

#[test]
fn the_hottest_blocks_are_listed_first_with_their_valid_sectors() {
    let mut bench = Bench::cached(16, 16 * KIB);
    for sector in [0, 5, 6, 8] {
        bench.read_alone(sector * SECTOR, SECTOR);
    }
    bench.read_alone(0, SECTOR);
    let blocks = bench.engine.hottest_blocks(DISK);
    assert_eq!(blocks, [0, 2, 1], "least recently used last");
    assert_eq!(bench.engine.valid_extents(DISK, &blocks), [(0, 1), (8, 9), (5, 7)]);
    assert_eq!(bench.engine.valid_extents(DISK, &[77]), []);
}

#[test]
fn a_disk_with_dirty_data_is_not_frozen() {
    let mut bench = Bench::write_back();
    assert_eq!(bench.own(Role::Frozen), Err(CommandError::Dirty), "the next write would be dirty");
    bench.write_alone(0, SECTOR);
    let tune = CacheChange::Tune(Mode::WriteThrough, lazy(), Copies::One);
    bench.change(tune).unwrap();
    assert_eq!(bench.own(Role::Frozen), Err(CommandError::Dirty));
    let drain = bench.start_change(CacheChange::Drain);
    bench.settle();
    bench.wait_ms(5_000);
    bench.settle();
    assert_eq!(bench.result(drain), Some(Ok(vec![])));
    bench.own(Role::Frozen).expect("nothing is dirty");
    assert_eq!(bench.stats().cache, CacheState::Active);
}

#[test]
fn dropped_sectors_are_recorded_in_the_journal() {
    let mut bench = Bench::bare(Limits::default());
    bench.own(Role::Standby).unwrap();
    let enable = Enable {
        config: config(MIB, 4 * KIB),
        segments: vec![DataSegment { place: segment(0, 0), ordinal: 0, seconds_only: false }],
        journal: Some(ring(1)),
        recovered: None,
    };
    bench.start_change(CacheChange::Enable(Box::new(enable)));
    bench.settle();
    bench.request(Op::Pull, 0, 4 * SECTOR);
    bench.settle();
    bench.wait_ms(2_000);
    bench.settle();
    assert_eq!(bench.result_of(Op::Forget, 0, 4 * SECTOR), Some(Ok(())));
    assert_eq!(bench.stats().sectors_valid, 0);
    bench.own(Role::Here).unwrap();
    let flush = bench.request(Op::Flush, 0, 0);
    assert!(bench.ios.iter().any(|io| io.op == IoOp::WriteJournal), "{:?}", bench.ios);
    bench.settle();
    assert!(bench.reply(flush).is_some());
}

#[test]
fn roles_follow_each_other_in_one_order() {
    let allowed = [
        (Role::Here, Role::Standby),
        (Role::Here, Role::Frozen),
        (Role::Standby, Role::Here),
        (Role::Frozen, Role::Here),
        (Role::Frozen, Role::Away),
        (Role::Away, Role::Here),
    ];
    let ways: [(&[Role], Role); 4] = [
        (&[], Role::Here),
        (&[Role::Standby], Role::Standby),
        (&[Role::Frozen], Role::Frozen),
        (&[Role::Frozen, Role::Away], Role::Away),
    ];
    for (way, from) in ways {
        for to in [Role::Here, Role::Standby, Role::Frozen, Role::Away] {
            let mut bench = Bench::bare(Limits::default());
            way.iter().for_each(|role| _ = bench.own(*role).expect("allowed"));
            let expected = allowed.contains(&(from, to));
            assert_eq!(bench.own(to).is_ok(), expected, "{from:?} to {to:?}");
        }
    }
    let mut bench = Bench::frozen();
    bench.own(Role::Away).unwrap();
    assert_eq!(bench.own(Role::Here), Err(CommandError::WrongRole), "its cache may be old");
}

#[test]
fn a_disk_whose_backing_was_taken_over_serves_nothing_at_once() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, SECTOR);
    let freeze = bench.start_command(Command::Own(Role::Frozen));
    assert!(bench.result(freeze).is_some());
    let waits = bench.read(0, SECTOR);
    bench.engine.revoke(bench.now, DISK);
    bench.drain();
    assert_eq!(bench.reply(waits).unwrap().result, Err(IoError::ShuttingDown));
    let hit = bench.read(0, SECTOR);
    assert_eq!(bench.reply(hit).unwrap().result, Err(IoError::ShuttingDown), "flash may be old");
    bench.command(Command::RemoveDisk).expect("nothing is in flight");
}
