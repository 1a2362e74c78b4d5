//! Errors that the simulation found, as single tests.

use super::write_back::{
    RING_DEVICE, VOLATILE, backing, flash, lazy, lose, mirrored, mirrored_with_ring, ring,
};
use super::*;
use crate::command::{Copies, Destage, Discard, Mode, NewRing};

/// After a change of the age limit, data that is already dirty keeps its age, although its epochs
/// were shorter or longer than new ones.
#[test]
fn a_longer_age_bound_applies_to_data_that_is_dirty_already() {
    let destage = |dirty_age_ms_max| Destage { dirty_age_ms_max, ..lazy() };
    for (before, after) in [(2, 30_000), (0, 30_000), (30_000, 1000)] {
        let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, destage(before));
        bench.wait_ms(20_000);
        bench.settle();
        let write = bench.write(0, 4 * KIB);
        bench.next(flash(0), VOLATILE);
        assert_eq!(bench.outcome(write), Outcome::WriteBack);
        bench.change(CacheChange::Tune(Mode::WriteBack, destage(after), Copies::One)).expect("at once");
        for _ in 0..=after / 500 {
            bench.wait_ms(500);
            bench.settle();
        }
        assert_eq!(bench.dirty(), 0, "{before} ms, then {after}");
    }
}

/// A guest's flush begins no new epoch if the write order is not kept.
#[test]
fn the_age_bound_holds_after_many_flushes_and_a_new_ring() {
    let aged = Destage { dirty_age_ms_max: 1000, ..lazy() };
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, aged);
    (0..1000).for_each(|_| bench.flush());
    bench.write_alone(0, 4 * KIB);
    let more = vec![DataSegment { place: segment(1, 0), ordinal: 1, seconds_only: false }];
    let grow = bench.start_change(CacheChange::Grow(more, Some(ring(2))));
    bench.settle();
    assert!(bench.result(grow).expect("done").is_ok());
    for _ in 0..4 {
        bench.wait_ms(500);
        bench.settle();
    }
    assert_eq!(bench.dirty(), 0);
}

/// After a drain, a crash makes no data dirty again: the journal records the data as clean before
/// the drain ends.
#[test]
fn a_drain_ends_when_the_journal_durably_knows() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let drain = bench.start_change(CacheChange::Drain);
    bench.next(flash(0), IoOp::Read);
    bench.next(backing(), VOLATILE);
    bench.next(backing(), IoOp::Flush);
    assert_eq!(bench.dirty(), 0);
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    assert_eq!(bench.result(drain), None);
    bench.next(flash(RING_DEVICE), IoOp::Flush);
    assert_eq!(bench.result(drain), Some(Ok(vec![])));
}

/// A second copy that a read makes of dirty data is dirty: when the first copy's device is removed,
/// the second copy is destaged.
#[test]
fn a_second_copy_that_a_read_made_of_dirty_data_is_dirty() {
    let mut bench = mirrored(Copies::One);
    bench.write_alone(0, 4 * KIB);
    let tune = CacheChange::Tune(Mode::WriteBack, lazy(), Copies::TwoOfAll);
    bench.change(tune).expect("at once");
    // The read has one more sector than flash has, so it is a partial miss and fills flash.
    let read = bench.read(0, 8 * KIB);
    bench.settle();
    assert_eq!(bench.outcome(read), Outcome::PartialMiss);
    lose(&mut bench, DeviceId(0));
    assert_eq!((bench.dirty(), bench.stats().sectors_lost), (1, 0), "device 1 has a copy");
    let drain = bench.start_change(CacheChange::Drain);
    let mut destaged = 0;
    while let Some(io) = bench.ios.pop_front() {
        destaged += u64::from(io.target == backing() && io.op == VOLATILE) * io.len;
        bench.end(io);
    }
    assert_eq!(bench.result(drain), Some(Ok(vec![])));
    assert_eq!(destaged, 4 * KIB);
}

/// Data that became clean while a new ring was written is recorded as clean only in that ring. The
/// change fails, so the cache with the old ring destages the data again.
#[test]
fn data_that_a_failed_change_made_clean_is_destaged_again() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    bench.start_change(CacheChange::Drain);
    bench.next(flash(0), IoOp::Read);
    let moved = bench.ios.pop_front().expect("it goes to the backing");
    let more = vec![DataSegment { place: segment(1, 0), ordinal: 1, seconds_only: false }];
    let grow = bench.start_change(CacheChange::Grow(more, Some(ring(2))));
    bench.end(moved);
    bench.next(backing(), IoOp::Flush);
    while let Some(io) = bench.ios.pop_front() {
        match io.op {
            IoOp::WriteJournal if bench.result(grow).is_none() => bench.fail(io),
            _ => bench.end(io),
        }
    }
    assert_eq!(bench.result(grow), Some(Err(CommandError::JournalFailed)));
    assert!(!bench.events.contains(&Event::JournalLost(DISK)), "the old ring is as it was");
    assert_eq!(bench.dirty(), 0, "the drain goes on");
}

/// A write that waits until older data is on the backing continues when the cache with this data is
/// discarded.
#[test]
fn a_write_that_waits_for_order_continues_when_the_cache_is_removed() {
    let ordered = Destage { ordered: true, ..lazy() };
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, ordered);
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let write = bench.write(64 * KIB, 512);
    assert!(!bench.answered(write));
    let discard = bench.start_change(CacheChange::DiscardDirty(Discard::Told));
    let disable = bench.start_change(CacheChange::Disable);
    bench.settle();
    assert_eq!(bench.result(discard), Some(Ok(vec![])));
    assert!(bench.result(disable).expect("done").is_ok());
    assert!(bench.answered(write));
}

/// Two copies are overwritten in place: the write of one copy fails, and the write to the backing
/// fails too. The failed copy is not used, although it has its old content.
#[test]
fn a_copy_that_was_not_overwritten_does_not_count() {
    let mut bench = mirrored(Copies::TwoOfDirty);
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let write = bench.write(0, 4 * KIB);
    while let Some(io) = bench.ios.pop_front() {
        match (io.target, io.op) {
            (Target::Flash(DeviceId(0)), VOLATILE) | (Target::Backing(_), VOLATILE) => bench.fail(io),
            (Target::Flash(_), VOLATILE) => bench.end_with(io, Ok(()), &[SUM + 1]),
            _ => bench.end(io),
        }
    }
    assert_eq!(bench.reply(write).expect("answered").result, Err(IoError::Failed));
    let read = bench.read(0, 4 * KIB);
    let mut last = None;
    while let Some(io) = bench.ios.pop_front() {
        last = Some(io.target);
        match io.target {
            Target::Flash(DeviceId(0)) => bench.end_with(io, Ok(()), &[SUM]),
            _ => bench.end_with(io, Ok(()), &[SUM + 1]),
        }
    }
    assert_eq!(bench.reply(read).expect("answered").result, Ok(()));
    assert_eq!((last, bench.stats().sectors_lost), (Some(flash(1)), 0));
}

/// A flush of one device failed, so only the other copies of dirty data are durable. A new journal
/// ring does not make the copies of that device durable: the dirty data is destaged at once, and no
/// other data becomes dirty until then.
#[test]
fn a_new_ring_does_not_make_the_copies_of_a_failed_flush_durable() {
    let mut bench = mirrored(Copies::TwoOfDirty);
    bench.write_alone(0, 8 * KIB);
    let flush = bench.request(Op::Flush, 0, 0);
    let mut fails = true;
    let mut settle = |bench: &mut Bench| {
        while let Some(io) = bench.ios.pop_front() {
            match (io.target, io.op) {
                (Target::Flash(DeviceId(0)), IoOp::Flush) if std::mem::take(&mut fails) => bench.fail(io),
                (Target::Backing(_), VOLATILE) => bench.fail(io),
                _ => bench.end(io),
            }
        }
    };
    settle(&mut bench);
    assert_eq!(bench.outcome(flush), Outcome::FlushCommitted, "device 1 has all of it");
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    settle(&mut bench);
    assert!(bench.result(renew).expect("done").is_ok());
    assert_eq!(bench.dirty(), 2, "the backing takes nothing");
    assert_ne!(bench.write_alone(64 * KIB, 4 * KIB), Outcome::WriteBack);
    for _ in 0..10 {
        bench.wait_ms(1000);
        bench.settle();
    }
    assert_eq!(bench.dirty(), 0, "destaged although nothing else requires it");
    assert_eq!(bench.write_alone(0, 4 * KIB), Outcome::WriteBack, "the device is used again");
}

/// The flushes of both devices with copies of dirty data fail. Neither copy is durable, so the
/// flush is not acknowledged until the data is on the backing.
#[test]
fn two_failed_flushes_leave_no_durable_copy() {
    for order in [[0, 1], [1, 0]] {
        let mut bench = mirrored(Copies::TwoOfDirty);
        bench.write_alone(0, 8 * KIB);
        let flush = bench.request(Op::Flush, 0, 0);
        bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
        let mut flushes: Vec<Io> = bench.ios.drain(..).collect();
        flushes.sort_by_key(|io| order.iter().position(|device| io.target == flash(*device)));
        assert!(flushes.len() == 3 && flushes.iter().all(|io| io.op == IoOp::Flush));
        for io in flushes {
            match io.target == flash(RING_DEVICE) {
                true => bench.end(io),
                false => bench.fail(io),
            }
        }
        bench.settle();
        assert!(bench.events.contains(&Event::JournalLost(DISK)), "first {}", order[0]);
        assert!(!bench.answered(flush));
        bench.record_loss();
        assert_eq!(bench.dirty(), 0, "it is on the backing");
        let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
        bench.settle();
        assert!(bench.result(renew).expect("done").is_ok());
        assert_eq!(bench.reply(flush).expect("answered").result, Ok(()));
    }
}

/// A flush of flash fails when a part of a write is on that device and the rest is in flight. No
/// data is dirty yet, but later flushes do not make that part durable.
#[test]
fn a_write_in_progress_during_a_failed_flush_is_not_durable() {
    let mut bench = Bench::write_back();
    // The second block is in the first frame, so the write has two parts.
    bench.read_alone(4 * KIB, 4 * KIB);
    let write = bench.write(0, 8 * KIB);
    bench.next(flash(0), VOLATILE);
    let rest = bench.only_io();
    assert_eq!((rest.target, rest.op, bench.dirty()), (flash(0), VOLATILE, 0));
    bench.request(Op::Discard(Durability::Volatile), MIB, 64 * KIB);
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    let flushes: Vec<Io> = bench.ios.drain(..).collect();
    assert!(flushes.len() == 2 && flushes.iter().all(|io| io.op == IoOp::Flush), "{flushes:?}");
    for io in flushes {
        match io.target == flash(0) {
            true => bench.fail(io),
            false => bench.end(io),
        }
    }
    bench.end(rest);
    bench.settle();
    assert!(bench.events.contains(&Event::JournalLost(DISK)) && !bench.answered(write));
    bench.record_loss();
    assert_eq!(bench.dirty(), 0, "it is on the backing");
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    bench.settle();
    assert!(bench.result(renew).expect("done").is_ok());
    assert_eq!(bench.reply(write).expect("answered").result, Ok(()));
}

/// A cache gets two copies of dirty data while a write of one copy is in flight. A failed flush of
/// the device with this copy loses the write.
#[test]
fn a_write_of_one_copy_remains_one_after_a_change_to_two() {
    let mut bench = mirrored(Copies::One);
    let write = bench.write(0, 8 * KIB);
    let io = bench.ios.pop_front().expect("the write to flash");
    let Target::Flash(device) = io.target else { panic!("{io:?}") };
    let tune = CacheChange::Tune(Mode::WriteBack, lazy(), Copies::TwoOfDirty);
    bench.change(tune).expect("at once");
    bench.engine.distrust_device(bench.now, DiskId(1), device);
    bench.end(io);
    bench.settle();
    assert!(bench.events.contains(&Event::JournalLost(DISK)) && !bench.answered(write));
}

/// A flush of one of two devices with copies fails during a write. The device stays excluded until
/// the write has ended and its data is on the backing, although no data was dirty when a later
/// flush of the device succeeded.
#[test]
fn a_copy_in_progress_during_a_failed_flush_is_not_durable() {
    let mut bench = mirrored(Copies::TwoOfDirty);
    let write = bench.write(0, 8 * KIB);
    bench.next(flash(0), VOLATILE);
    let other = bench.only_io();
    assert_eq!((other.target, other.op, bench.dirty()), (flash(1), VOLATILE, 0));
    for (fails, zone) in [(true, 1), (false, 2)] {
        bench.request(Op::Discard(Durability::Volatile), zone * 16 * MIB, 64 * KIB);
        let mut flushes = 0;
        while let Some(io) = bench.ios.pop_front() {
            let is_flush = (io.target, io.op) == (flash(0), IoOp::Flush);
            flushes += u32::from(is_flush);
            match is_flush && fails {
                true => bench.fail(io),
                false => bench.end(io),
            }
        }
        assert!(flushes > 0, "device 0 is flushed");
    }
    bench.end(other);
    bench.settle();
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
    for _ in 0..5 {
        bench.wait_ms(1000);
        bench.settle();
    }
    assert_eq!(bench.dirty(), 0, "destaged although nothing else requires it");
    assert_eq!(bench.write_alone(0, 4 * KIB), Outcome::WriteBack, "the device is used again");
}

/// A flush fails while a new journal ring is written, and then the new ring fails too. The old ring's
/// copy on the device that failed the flush is not used any more.
#[test]
fn a_flush_that_fails_during_a_failed_change_costs_the_old_ring_its_copy() {
    let mut two = ring(1);
    two.copies.push((0..8).map(|i| segment(0, 16 * MIB + i * MIB)).collect());
    let mut bench = mirrored_with_ring(Copies::TwoOfDirty, two);
    bench.write_alone(0, 8 * KIB);
    bench.flush();
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    let mut has_failed = false;
    while let Some(io) = bench.ios.pop_front() {
        match (io.target, io.op) {
            (Target::Flash(DeviceId(RING_DEVICE)), IoOp::WriteJournal) if bench.result(renew).is_none() => {
                if !std::mem::replace(&mut has_failed, true) {
                    bench.engine.distrust_device(bench.now, DISK, DeviceId(0));
                }
                bench.fail(io);
            }
            (Target::Backing(_), VOLATILE) => bench.fail(io),
            _ => bench.end(io),
        }
    }
    assert_eq!(bench.result(renew), Some(Err(CommandError::JournalFailed)));
    assert!(has_failed && bench.events.contains(&Event::JournalCopyLost(DISK)), "{:?}", bench.events);
    bench.request(Op::Discard(Durability::Volatile), 32 * MIB, 64 * KIB);
    let mut pages = Vec::new();
    while let Some(io) = bench.ios.pop_front() {
        pages.extend((io.op == IoOp::WriteJournal).then_some(io.target));
        bench.end(io);
    }
    assert!(!pages.is_empty() && pages.iter().all(|at| *at == flash(RING_DEVICE)), "{pages:?}");
}

/// Two disks have journal rings on one device. The flush that fails concerns only the rings, so the
/// dirty data of a disk whose ring is lost is kept by a new ring.
#[test]
fn a_failed_flush_of_a_lost_ring_costs_no_dirty_data() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    bench.write_alone(64 * KIB, 4 * KIB);
    bench.engine.distrust_device(bench.now, DISK, DeviceId(RING_DEVICE));
    bench.drain();
    assert!(bench.events.contains(&Event::JournalLost(DISK)));
    bench.engine.distrust_device(bench.now, DiskId(1), DeviceId(RING_DEVICE));
    bench.engine.distrust_device(bench.now, DiskId(1), DeviceId(7));
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    bench.refuse_backing_writes();
    assert_eq!(bench.result(renew).map(|it| it.map(drop)), Some(Ok(())));
    assert_eq!(bench.dirty(), 2);
}

/// The flushes of both devices fail while the two copies of a write are in flight. Neither copy may
/// be durable, so the write waits until its data is on the backing.
#[test]
fn two_failed_flushes_during_one_write_leave_no_durable_copy() {
    for has_ring_there in [false, true] {
        let mut bench = match has_ring_there {
            true => mirrored_with_rings(),
            false => mirrored(Copies::TwoOfDirty),
        };
        let write = bench.write(0, 8 * KIB);
        let ios: Vec<Io> = bench.ios.drain(..).collect();
        for device in [0, 1] {
            bench.engine.distrust_device(bench.now, DiskId(1), DeviceId(device));
        }
        ios.into_iter().for_each(|io| bench.end(io));
        bench.refuse_backing_writes();
        assert!(bench.events.contains(&Event::JournalLost(DISK)) && !bench.answered(write));
        let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
        assert_eq!(bench.result(renew).map(|it| it.map(drop)), Some(Err(CommandError::Dirty)));
        assert!(!bench.answered(write));
    }
}

/// Returns a cache on the devices 0 and 1 whose journal ring has its two copies there too.
fn mirrored_with_rings() -> Bench {
    let on = |device| (0..8).map(|i| segment(device, 16 * MIB + i * MIB)).collect();
    mirrored_with_ring(Copies::TwoOfDirty, NewRing { copies: vec![on(0), on(1)], ..ring(1) })
}

impl Bench {
    /// Runs all I/O to its end. The backing fails all writes.
    fn refuse_backing_writes(&mut self) {
        while let Some(io) = self.ios.pop_front() {
            match io.target == backing() && io.op != IoOp::Flush {
                true => self.fail(io),
                false => self.end(io),
            }
        }
    }
}

/// A flush of device 0 failed, and then device 1 with the other copies of dirty data leaves the
/// cache. The copies on device 0 may not be durable, so the data is destaged first.
#[test]
fn the_good_copy_does_not_leave_before_its_data_is_destaged() {
    let mut bench = mirrored(Copies::TwoOfDirty);
    bench.write_alone(0, 8 * KIB);
    bench.engine.distrust_device(bench.now, DiskId(1), DeviceId(0));
    bench.engine.give_up_device(DeviceId(1));
    bench.drain();
    let leave = bench.start_change(CacheChange::Leave(DeviceId(1), Vec::new(), Some(ring(2))));
    while let Some(io) = bench.ios.pop_front() {
        match io.target == backing() && io.op != IoOp::Flush || io.target == flash(1) {
            true => bench.fail(io),
            false => bench.end(io),
        }
    }
    assert_eq!(bench.result(leave).map(|it| it.map(drop)), Some(Err(CommandError::Dirty)));
}

/// One of two devices with copies fails the flush of a commit. The commit ends only when a page that
/// names the device is durable: without the name, recovery after a power failure would choose among
/// both copies.
#[test]
fn a_commit_with_a_failed_flush_waits_for_the_name_of_the_device() {
    let mut bench = mirrored(Copies::TwoOfDirty);
    let write = bench.request(Op::Write(Durability::Durable), 0, 4 * KIB);
    let mut pages = 0;
    while let Some(io) = bench.ios.pop_front() {
        let answered_early = bench.answered(write) && pages < 2;
        assert!(!answered_early, "after {pages} pages");
        match (io.target, io.op) {
            (Target::Flash(DeviceId(0)), IoOp::Flush) if pages == 1 => bench.fail(io),
            (Target::Flash(_), IoOp::WriteJournal) => {
                pages += 1;
                bench.end(io);
            }
            _ => bench.end(io),
        }
    }
    assert!(pages >= 2 && bench.answered(write));
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
}

/// The flush of a device fails for another cache during one of the commits of a close. The close
/// ends only when a durable page names the device.
#[test]
fn a_close_with_a_failed_flush_waits_for_the_name_of_the_device() {
    for failed in 1..=2 {
        let mut bench = mirrored(Copies::TwoOfDirty);
        bench.write_alone(0, 8 * KIB);
        let close = bench.start_change(CacheChange::Close);
        let (mut flushes, mut pages_after) = (0, 0);
        while let Some(io) = bench.ios.pop_front() {
            match (io.target, io.op) {
                (Target::Flash(DeviceId(RING_DEVICE)), IoOp::Flush) => {
                    flushes += 1;
                    if flushes == failed {
                        bench.engine.distrust_device(bench.now, DiskId(1), DeviceId(0));
                    }
                }
                (Target::Flash(_), IoOp::WriteJournal) => pages_after += u32::from(flushes >= failed),
                _ => {}
            }
            bench.end(io);
        }
        assert_eq!(bench.result(close).map(|it| it.map(drop)), Some(Ok(())));
        assert!(flushes > failed && pages_after > 0, "{flushes} flushes, {pages_after} pages");
    }
}

/// The only device of a new ring fails the flush of the ring's dump. The old ring is on another
/// device, and flash has no page that makes the new ring valid, so the old ring stays in use.
#[test]
fn a_failed_flush_of_the_dump_of_a_new_ring_does_not_cost_the_old_ring() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let other = (0..8).map(|i| segment(7, i * MIB)).collect();
    let renew = bench.start_change(CacheChange::Shrink(0, Some(NewRing { copies: vec![other], ..ring(2) })));
    while let Some(io) = bench.ios.pop_front() {
        match (io.target, io.op) {
            (Target::Flash(DeviceId(7)), IoOp::Flush) => bench.fail(io),
            _ => bench.end(io),
        }
    }
    assert_eq!(bench.result(renew).map(|it| it.map(drop)), Some(Err(CommandError::JournalFailed)));
    assert!(!bench.events.contains(&Event::JournalLost(DISK)), "{:?}", bench.events);
    assert_eq!(bench.write_alone(64 * KIB, 4 * KIB), Outcome::WriteBack);
}
