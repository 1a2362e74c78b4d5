//! Transfers, drains and changes end even with few buffers, failing flash, and a lost journal.

use super::write_back::{RING_DEVICE, VOLATILE, backing, flash, lazy, ring};
use super::*;
use crate::command::{Copies, Destage, Discard, Enable, Mode, NewRing};

/// A write needs the only buffer. The destager keeps no buffer while it waits for this write.
#[test]
fn a_transfer_that_waits_keeps_no_buffer() {
    let mut bench = Bench::bare(Limits::default());
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    enable(&mut bench, Mode::WriteBack).expect("it can be");
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    bench.write_alone(4 * KIB, 4 * KIB);
    let write = bench.write(4 * KIB + 512, 512);
    assert!(!bench.answered(write), "its dirty sector is to be committed, and then destaged");
    let drain = bench.start_change(CacheChange::Drain);
    bench.settle();
    assert!(bench.answered(write));
    assert_eq!(bench.result(drain), Some(Ok(vec![])));
}

#[test]
fn without_a_buffer_nothing_writes_back() {
    let mut bench = Bench::bare(Limits::default());
    assert_eq!(enable(&mut bench, Mode::WriteBack), Err(CommandError::Unworkable));
    enable(&mut bench, Mode::WriteThrough).expect("it needs none");
    let tune = CacheChange::Tune(Mode::WriteBack, lazy(), crate::command::Copies::One);
    assert_eq!(bench.change(tune), Err(CommandError::Unworkable));
}

/// Dirty sectors that flash cannot deliver prevent neither the destaging of their neighbours nor
/// the end of a drain.
#[test]
fn a_drain_ends_though_something_is_lost() {
    let mut bench = Bench::persistent(16 * KIB, Mode::WriteBack, lazy());
    bench.write_alone(0, 12 * KIB);
    bench.flush();
    let drain = bench.start_change(CacheChange::Drain);
    for _ in 0..10 {
        while let Some(io) = bench.ios.pop_front() {
            let sectors = (io.len / SECTOR_BYTES) as usize;
            let at = |i: usize| io.offset + i as u64 * SECTOR_BYTES;
            let sums: Vec<u32> = (0..sectors).map(|i| if at(i) == 4 * KIB { SUM + 1 } else { SUM }).collect();
            match (io.target, io.op) {
                (Target::Flash(DeviceId(0)), IoOp::Read) => bench.end_with(io, Ok(()), &sums),
                _ => bench.end(io),
            }
        }
        bench.wait_ms(200);
    }
    assert_eq!(bench.result(drain), Some(Err(CommandError::Lost)));
    assert_eq!((bench.dirty(), bench.stats().sectors_lost), (1, 1), "its neighbours are clean");
}

/// If the write order is kept, a write waits for older data, but not for data that is lost.
#[test]
fn nobody_waits_in_order_for_what_is_lost() {
    let ordered = Destage { ordered: true, ..lazy() };
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, ordered);
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let write = bench.write(64 * KIB, 512);
    assert!(!bench.answered(write));
    for _ in 0..10 {
        while let Some(io) = bench.ios.pop_front() {
            match (io.target, io.op) {
                (Target::Flash(DeviceId(0)), IoOp::Read) => bench.end_with(io, Ok(()), &[SUM + 1]),
                _ => bench.end(io),
            }
        }
        bench.wait_ms(200);
    }
    assert!(bench.answered(write));
}

/// Destaged data is flushed even while the destaging of other data fails repeatedly.
#[test]
fn between_failures_what_was_moved_is_flushed() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.write_alone(64 * KIB, 4 * KIB);
    bench.flush();
    bench.start_change(CacheChange::Drain);
    for _ in 0..10 {
        while let Some(io) = bench.ios.pop_front() {
            match (io.target, io.op, io.offset) {
                (Target::Backing(_), IoOp::Write(_), 65536) => bench.end_with(io, Err(IoError::Failed), &[]),
                _ => bench.end(io),
            }
        }
        bench.wait_ms(1000);
    }
    assert_eq!(bench.dirty(), 1);
}

/// A commit becomes due while the backing is flushed before a clean close of the cache. The close
/// waits for the end of this commit.
#[test]
fn a_clean_end_lets_a_commit_end_first() {
    let mut bench = Bench::write_back();
    bench.request(Op::Discard(Durability::Volatile), MIB, 4 * KIB);
    bench.settle();
    bench.write_alone(0, 4 * KIB);
    let close = bench.start_change(CacheChange::Close);
    let flush = bench.ios.pop_front().expect("the backing is flushed");
    assert_eq!((flush.target, flush.op), (backing(), IoOp::Flush));
    bench.wait_ms(1500);
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    bench.end(flush);
    bench.settle();
    assert_eq!(bench.result(close), Some(Ok(vec![])));
}

/// Fails all I/O on the backing and completes the rest successfully until no I/O is left. Returns
/// the number of flushes of the backing.
fn fail_backing(bench: &mut Bench) -> usize {
    let mut flushes = 0;
    for _ in 0..100 {
        let Some(io) = bench.ios.pop_front() else { return flushes };
        flushes += usize::from((io.target, io.op) == (backing(), IoOp::Flush));
        if io.target == backing() { bench.fail(io) } else { bench.end(io) }
    }
    panic!("there is no end to it");
}

/// Another host takes over the backing while a change is in flight. The disk can still be removed,
/// without I/O on the backing.
#[test]
fn a_lost_disk_can_be_removed() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.request(Op::Discard(Durability::Volatile), MIB, 4 * KIB);
    bench.engine.revoke(bench.now, DISK);
    let remove = bench.start_command(Command::RemoveDisk);
    assert_eq!(fail_backing(&mut bench), 0);
    assert_eq!(bench.result(remove), Some(Ok(vec![])));
}

/// Another host takes over the backing while a write waits for older data, because write order is
/// kept. The waiting write is refused.
#[test]
fn nobody_waits_in_order_for_a_lost_backing() {
    let ordered = Destage { ordered: true, ..lazy() };
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, ordered);
    bench.engine.limits.incomplete_sectors_max = 0;
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let write = bench.write(64 * KIB, 512);
    assert!(!bench.answered(write));
    bench.engine.revoke(bench.now, DISK);
    let remove = bench.start_command(Command::RemoveDisk);
    fail_backing(&mut bench);
    assert_eq!(bench.reply(write).expect("answered").result, Err(IoError::ShuttingDown));
    assert_eq!(bench.result(remove), Some(Ok(vec![])));
}

/// A write waits in order for data that may be destaged only after the loss of the journal was
/// recorded. A disk that is being removed accepts no such record, so the removal fails at once.
#[test]
fn a_removal_fails_if_a_write_waits_for_a_lost_journal() {
    let mut bench = Bench::write_back();
    bench.flush();
    bench.write_alone(0, 4 * KIB);
    let ordered = Destage { ordered: true, ..lazy() };
    assert_eq!(bench.change(CacheChange::Tune(Mode::WriteBack, ordered, Copies::One)), Ok(vec![]));
    let write = bench.write(0, 4 * KIB);
    let remove = bench.start_command(Command::RemoveDisk);
    while let Some(io) = bench.ios.pop_front() {
        if io.target == flash(RING_DEVICE) { bench.fail(io) } else { bench.end(io) }
    }
    assert_eq!(bench.result(remove), Some(Err(CommandError::JournalFailed)));
    bench.record_loss();
    assert_eq!(bench.dirty(), 0, "the older data is on the backing");
    bench.wait_ms(30_000);
    bench.settle();
    assert!(bench.answered(write), "no new journal was made, so the write fails");
}

/// A failing backing is flushed a few times, with pauses. Then the disk is removed, its dirty data
/// stays on flash, and no record says that its cache was closed.
#[test]
fn a_disk_whose_backing_fails_can_be_removed() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.request(Op::Discard(Durability::Volatile), MIB, 4 * KIB);
    let remove = bench.start_command(Command::RemoveDisk);
    for again in 0..4 {
        assert_eq!(fail_backing(&mut bench), 1, "after {again} pauses");
        assert_eq!(bench.result(remove), None);
        bench.wait_ms(99 << again);
        assert!(bench.ios.is_empty(), "it rests");
        bench.wait_ms(2 << again);
    }
    assert_eq!(fail_backing(&mut bench), 1);
    assert_eq!(bench.result(remove), Some(Ok(vec![])));
}

#[test]
fn a_ring_for_a_volatile_cache_comes_back() {
    let mut bench = Bench::cached(4, 64 * KIB);
    let more = DataSegment::without_order(vec![segment(1, 0)]);
    let mut released = bench.change(CacheChange::Grow(more, Some(ring(1)))).expect("there is room");
    released.sort_unstable();
    assert_eq!(released, ring(1).copies[0]);
}

/// If a discard fails on the backing, the dirty data in the range of the discard stays dirty and is
/// destaged.
#[test]
fn what_a_failed_discard_was_to_replace_is_destaged() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    bench.start_change(CacheChange::Drain);
    bench.next(flash(0), IoOp::Read);
    bench.next(backing(), VOLATILE);
    let flush = bench.ios.pop_front().expect("the backing is flushed");
    assert_eq!(bench.change(CacheChange::StopDrain), Ok(vec![]));
    let discard = bench.request(Op::Discard(Durability::Durable), 512, 512);
    while let Some(io) = bench.ios.pop_front() {
        match io.target {
            Target::Backing(_) => bench.end_with(io, Err(IoError::Failed), &[]),
            Target::Flash(_) => bench.end(io),
        }
    }
    bench.end(flush);
    assert_eq!((bench.outcome(discard), bench.dirty()), (Outcome::BackingError, 1));
    let drain = bench.start_change(CacheChange::Drain);
    (0..40).for_each(|_| {
        bench.wait_ms(500);
        bench.settle();
    });
    assert_eq!(bench.result(drain), Some(Ok(vec![])));
    assert_eq!(bench.dirty(), 0);
}

/// A cache with a lost journal and without dirty data is disabled. The daemon records that the
/// cache is gone.
#[test]
fn a_cache_with_a_dead_journal_can_be_taken_away_when_nothing_is_dirty() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.request(Op::Flush, 0, 0);
    while let Some(io) = bench.ios.pop_front() {
        match io.target {
            target if target == flash(RING_DEVICE) => bench.end_with(io, Err(IoError::Failed), &[]),
            _ => bench.end(io),
        }
    }
    assert!(bench.events.contains(&Event::JournalLost(DISK)));
    bench.record_loss();
    let disable = bench.start_change(CacheChange::Disable);
    bench.settle();
    let released = match bench.result(disable).expect("done") {
        Err(error) => {
            assert_eq!(error, CommandError::Dirty);
            bench.settle();
            assert_eq!(bench.dirty(), 0, "all of it goes to the backing");
            let again = bench.start_change(CacheChange::Disable);
            bench.settle();
            bench.result(again).expect("done").expect("nothing is dirty")
        }
        Ok(released) => released,
    };
    assert_eq!(released.len(), 9, "data and ring");
}

/// A hit still reads a sector that the scrubber found wrong: the next read does not repair the
/// sector during the hit.
#[test]
fn nothing_is_repaired_under_a_hit() {
    let mut bench = Bench::write_back();
    bench.read_alone(0, 4 * KIB);
    let hit = bench.read(0, 4 * KIB);
    let second = bench.read(0, 4 * KIB);
    let [slow, wrong] = [bench.ios.pop_front().expect("a hit"), bench.ios.pop_front().expect("another")];
    bench.end_with(wrong, Ok(()), &[SUM + 1]);
    bench.next(backing(), IoOp::Read);
    assert_eq!(bench.outcome(second), Outcome::ChecksumMismatch);
    assert!(!bench.ios.iter().any(|io| io.op == VOLATILE), "flash is being read there");
    bench.end(slow);
    assert_eq!(bench.outcome(hit), Outcome::Hit);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
    bench.settle();
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
}

fn enable(bench: &mut Bench, mode: Mode) -> Result<Vec<Segment>, CommandError> {
    let config = CacheConfig { mode, destage: lazy(), ..config(MIB, 4 * KIB) };
    let segments = vec![DataSegment { place: segment(0, 0), ordinal: 0, seconds_only: false }];
    let journal: Option<NewRing> = Some(ring(1));
    let enable = Enable { config, segments, journal, recovered: None };
    let command = bench.start_change(CacheChange::Enable(Box::new(enable)));
    bench.settle();
    bench.result(command).expect("done")
}

/// An operator discards dirty data while the backing is unavailable. No I/O is sent to the backing,
/// and the disk continues.
#[test]
fn dirty_data_is_discarded_without_the_backing() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.request(Op::Discard(Durability::Volatile), MIB, 4 * KIB);
    bench.settle();
    let read = bench.read(64 * KIB, 4 * KIB);
    let hangs = bench.ios.pop_front().expect("a miss");
    assert_eq!(hangs.target, backing());
    let discard = bench.start_change(CacheChange::DiscardDirty(Discard::Told));
    assert_eq!(fail_backing(&mut bench), 0);
    assert_eq!(bench.result(discard), None, "requests in flight come first");
    bench.fail(hangs);
    assert_eq!(bench.reply(read).expect("answered").result, Err(IoError::Failed));
    assert_eq!(fail_backing(&mut bench), 0);
    assert_eq!(bench.result(discard), Some(Ok(vec![])));
    assert_eq!(bench.dirty(), 0);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled, "the backing's");
}

/// The backing of a disk is lost or was abandoned: a cache without dirty data is disabled without
/// the backing.
#[test]
fn the_cache_of_a_lost_disk_is_taken_away_without_its_backing() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.request(Op::Discard(Durability::Volatile), MIB, 4 * KIB);
    bench.settle();
    bench.engine.revoke(bench.now, DISK);
    let discard = bench.start_change(CacheChange::DiscardDirty(Discard::Told));
    let disable = bench.start_change(CacheChange::Disable);
    assert_eq!(fail_backing(&mut bench), 0);
    let remove = bench.start_command(Command::RemoveDisk);
    assert_eq!(bench.result(discard), Some(Ok(vec![])));
    assert_eq!(bench.result(disable).expect("done").expect("clean").len(), 9, "data and ring");
    assert_eq!(bench.result(remove), Some(Ok(vec![])));
}

/// Storage still uses the memory of an abandoned destage: no other transfer gets this memory before
/// it is returned.
#[test]
fn memory_of_an_abandoned_transfer_is_not_used_again() {
    let mut bench = Bench::bare(Limits::default());
    bench.engine.lend(BufferId(1 << 20), 64 * KIB as u32);
    enable(&mut bench, Mode::WriteBack).expect("it can be");
    bench.write_alone(0, 64 * KIB);
    bench.flush();
    let drain = bench.start_change(CacheChange::Drain);
    let mut hung = Vec::new();
    while let Some(io) = bench.ios.pop_front() {
        match (io.target, io.op) {
            (Target::Backing(_), IoOp::Write(_)) => hung.push(io),
            _ => bench.end(io),
        }
    }
    assert!(!hung.is_empty());
    for io in &hung {
        bench.engine.handle_abandoned(bench.now, io.id);
    }
    bench.drain();
    bench.wait_ms(5000);
    assert!(!bench.ios.iter().any(|io| io.slice.is_some_and(|slice| slice.id == BufferId(1 << 20))));
    assert_eq!(bench.result(drain), None);
    for io in &hung {
        bench.engine.handle_returned(bench.now, io.slice.expect("a write has data"));
    }
    bench.drain();
    for _ in 0..20 {
        bench.wait_ms(500);
        bench.settle();
    }
    assert_eq!(bench.result(drain), Some(Ok(vec![])));
}

/// A cache without dirty data is disabled although the backing cannot be flushed: the flush is
/// tried once.
#[test]
fn a_clean_cache_is_disabled_though_the_backing_fails() {
    let mut bench = Bench::write_back();
    bench.request(Op::Discard(Durability::Volatile), MIB, 4 * KIB);
    bench.settle();
    let disable = bench.start_change(CacheChange::Disable);
    assert_eq!(bench.result(disable), None, "the flush comes first");
    assert_eq!(fail_backing(&mut bench), 1);
    assert_eq!(bench.result(disable).expect("done").expect("clean").len(), 9, "data and ring");
}
