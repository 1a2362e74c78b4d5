//! Write-back: what is written where, in which order, and what each request waits for.

use super::*;
use crate::command::{Copies, Destage, DestageOrder, Discard, Enable, Layout, Mode, NewRing};

pub(super) const RING_DEVICE: u16 = 9;
const FUA: Op = Op::Write(Durability::Durable);

pub(super) fn ring(number: u32) -> NewRing {
    let segments = (0..8).map(|i| segment(RING_DEVICE, i * MIB)).collect();
    NewRing { cache: [7; 16], number, identity: [0; 32], copies: vec![segments] }
}

pub(super) fn lazy() -> Destage {
    Destage { start_permille: 1000, stop_permille: 1000, dirty_age_ms_max: 0, ..Destage::default() }
}

impl Bench {
    /// Returns a disk of 64 MiB with a persistent cache of one segment of 1 MiB on device 0.
    pub(super) fn persistent(block_bytes: u64, mode: Mode, destage: Destage) -> Bench {
        let mut bench = Bench::bare(Limits::default());
        bench.engine.lend(BufferId(1 << 20), 1 << 20);
        bench.engine.lend(BufferId(2 << 20), 1 << 20);
        bench.make_persistent(block_bytes, mode, destage);
        bench
    }

    pub(super) fn make_persistent(&mut self, block_bytes: u64, mode: Mode, destage: Destage) {
        let config = CacheConfig { mode, destage, ..config(MIB, block_bytes) };
        let enable = Enable {
            config,
            segments: vec![DataSegment { place: segment(0, 0), ordinal: 0, seconds_only: false }],
            journal: Some(ring(1)),
            recovered: None,
        };
        let command = self.start_change(CacheChange::Enable(Box::new(enable)));
        assert_eq!(self.result(command), None, "the ring is written first");
        self.settle();
        assert_eq!(self.result(command), Some(Ok(vec![])));
    }

    pub(super) fn write_back() -> Bench {
        Bench::persistent(4 * KIB, Mode::WriteBack, lazy())
    }

    /// Completes the oldest I/O, which must have this target and operation.
    pub(super) fn next(&mut self, target: Target, op: IoOp) -> Io {
        let io = self.ios.pop_front().expect("some I/O");
        assert_eq!((io.target, io.op), (target, op), "{io:?}");
        self.end(io);
        io
    }

    /// Makes the written data durable.
    pub(super) fn flush(&mut self) {
        self.request(Op::Flush, 0, 0);
        self.settle();
    }

    pub(super) fn answered(&self, id: RequestId) -> bool {
        self.reply(id).is_some()
    }

    pub(super) fn dirty(&self) -> u64 {
        self.stats().sectors_dirty
    }
}

pub(super) fn flash(device: u16) -> Target {
    Target::Flash(DeviceId(device))
}

pub(super) fn backing() -> Target {
    Target::Backing(DISK)
}

pub(super) const VOLATILE: IoOp = IoOp::Write(Durability::Volatile);

/// SYSTEMS §2: "a write to a promoted page completes in flash".
#[test]
fn a_write_completes_in_flash() {
    let mut bench = Bench::write_back();
    let write = bench.write(8 * KIB, 8 * KIB);
    bench.next(flash(0), VOLATILE);
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
    assert_eq!(bench.ios.len(), 0, "the backing hears nothing of it");
    assert_eq!(bench.dirty(), 2);
    assert_eq!(bench.read_alone(8 * KIB, 8 * KIB), Outcome::Hit);
}

#[test]
fn a_flush_waits_for_the_journal_and_then_for_the_devices() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    let flush = bench.request(Op::Flush, 0, 0);
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    assert!(!bench.answered(flush));
    bench.next(flash(0), IoOp::Flush);
    assert!(!bench.answered(flush));
    bench.next(flash(RING_DEVICE), IoOp::Flush);
    assert_eq!(bench.outcome(flush), Outcome::FlushCommitted);
    let again = bench.request(Op::Flush, 0, 0);
    assert_eq!(bench.outcome(again), Outcome::FlushCommitted, "there is nothing to be made durable");
}

#[test]
fn a_durable_write_is_answered_when_it_is_committed() {
    let mut bench = Bench::write_back();
    let write = bench.request(FUA, 0, 4 * KIB);
    bench.next(flash(0), VOLATILE);
    assert!(!bench.answered(write));
    bench.settle();
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
}

#[test]
fn flushes_that_come_during_a_commit_share_the_next() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    let first = bench.request(Op::Flush, 0, 0);
    let write = bench.write(4 * KIB, 4 * KIB);
    let page = bench.ios.pop_front().expect("a page");
    bench.next(flash(0), VOLATILE);
    assert!(bench.answered(write));
    let later: Vec<_> = (0..3).map(|_| bench.request(Op::Flush, 0, 0)).collect();
    bench.end(page);
    bench.next(flash(0), IoOp::Flush);
    bench.next(flash(RING_DEVICE), IoOp::Flush);
    assert!(bench.answered(first));
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    bench.settle();
    assert!(later.iter().all(|flush| bench.answered(*flush)));
}

#[test]
fn pages_go_ahead_of_a_flush_that_is_to_be_expected() {
    let mut bench = Bench::write_back();
    for sector in [0, 1] {
        bench.write_alone(sector * 4 * KIB, 4 * KIB);
    }
    bench.flush();
    bench.write(8 * KIB, 4 * KIB);
    bench.next(flash(0), VOLATILE);
    assert_eq!(bench.ios.len(), 0, "one write, and two came before the last flush");
    bench.write(12 * KIB, 4 * KIB);
    bench.next(flash(0), VOLATILE);
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    // There are more writes before this flush than before the previous one. Pages are written
    // ahead only once per flush.
    bench.write(16 * KIB, 4 * KIB);
    bench.next(flash(0), VOLATILE);
    assert_eq!(bench.ios.len(), 0);
    let flush = bench.request(Op::Flush, 0, 0);
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    bench.next(flash(0), IoOp::Flush);
    bench.next(flash(RING_DEVICE), IoOp::Flush);
    assert_eq!(bench.outcome(flush), Outcome::FlushCommitted);
    // Three flushes before that one: now the engine waits only for the devices.
    for sector in 5..8 {
        bench.write(sector * 4 * KIB, 4 * KIB);
        bench.next(flash(0), VOLATILE);
    }
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    let flush = bench.request(Op::Flush, 0, 0);
    bench.next(flash(0), IoOp::Flush);
    bench.next(flash(RING_DEVICE), IoOp::Flush);
    assert_eq!(bench.outcome(flush), Outcome::FlushCommitted);
}

/// Data that the durable journal records as dirty is not overwritten before the journal records the
/// overwrite.
#[test]
fn rewriting_dirty_data_commits_first_and_once() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let again = bench.write(0, 4 * KIB);
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    bench.next(flash(RING_DEVICE), IoOp::Flush);
    bench.next(flash(0), VOLATILE);
    assert_eq!(bench.outcome(again), Outcome::WriteBack);
    let third = bench.write(0, 4 * KIB);
    bench.next(flash(0), VOLATILE);
    assert!(bench.answered(third));
    assert_eq!(bench.dirty(), 1);
}

#[test]
fn a_miss_combines_dirty_data_with_the_backings_data() {
    let mut bench = Bench::write_back();
    bench.write_alone(4 * KIB, 4 * KIB);
    let read = bench.read(0, 12 * KIB);
    let io = bench.next(backing(), IoOp::Read);
    assert_eq!((io.offset, io.len), (0, 12 * KIB));
    assert!(!bench.answered(read));
    let io = bench.next(flash(0), IoOp::Read);
    assert_eq!((io.len, io.slice.expect("payload").offset), (4 * KIB, 4 * KIB as u32));
    assert_eq!(bench.outcome(read), Outcome::PartialMiss);
    bench.settle();
    assert_eq!(bench.read_alone(0, 12 * KIB), Outcome::Hit);
}

#[test]
fn dirty_data_that_flash_lost_is_an_error_and_never_the_backings_data() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    let read = bench.read(0, 4 * KIB);
    for _ in 0..2 {
        while let Some(io) = bench.ios.pop_front() {
            match io.target {
                Target::Flash(_) => bench.end_with(io, Ok(()), &[SUM + 1]),
                Target::Backing(_) => bench.end(io),
            }
        }
    }
    assert_eq!(bench.reply(read).expect("answered").result, Err(IoError::Failed));
    assert_eq!(bench.outcome(read), Outcome::DirtyLost);
    assert!(bench.events.contains(&Event::DirtyLost { disk: DISK, sectors: 1 }));
    assert_eq!(bench.stats().sectors_lost, 1);
    bench.write_alone(0, 4 * KIB);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit, "written again, it is as any other");
    assert_eq!(bench.stats().sectors_lost, 0);
}

/// A read combines dirty data with data of the backing. Data that becomes clean during the read
/// need not be on flash any more.
#[test]
fn data_that_becomes_clean_during_a_read_is_read_from_the_backing_again() {
    let mut bench = Bench::write_back();
    bench.write_alone(4 * KIB, 4 * KIB);
    bench.flush();
    let drain = bench.start_change(CacheChange::Drain);
    bench.next(flash(0), IoOp::Read);
    bench.next(backing(), VOLATILE);
    let flush = bench.ios.pop_front().expect("the backing is flushed");
    assert_eq!((flush.target, flush.op), (backing(), IoOp::Flush));
    let read = bench.read(0, 12 * KIB);
    bench.next(backing(), IoOp::Read);
    let overlay = bench.ios.pop_front().expect("what is dirty");
    assert_eq!((overlay.target, overlay.op), (flash(0), IoOp::Read));
    bench.end(flush);
    bench.end_with(overlay, Ok(()), &[SUM + 1]);
    bench.settle();
    assert_eq!(bench.result(drain), Some(Ok(vec![])));
    assert_eq!(bench.reply(read).expect("answered").result, Ok(()));
    assert!(!bench.events.iter().any(|event| matches!(event, Event::DirtyLost { .. })));
}

/// SYSTEMS §3: "a full buffer sends writes straight to disk".
#[test]
fn a_full_cache_writes_through() {
    let full = Destage { full_permille: 500, ..lazy() };
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, full);
    for block in 0..128 {
        assert_eq!(bench.write_alone(block * 4 * KIB, 4 * KIB), Outcome::WriteBack);
    }
    assert_eq!(bench.dirty(), 128);
    let through = bench.write(128 * 4 * KIB, 4 * KIB);
    // First the journal must record that the backing is written there.
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    bench.settle();
    assert_eq!(bench.outcome(through), Outcome::WriteCopied);
    assert_eq!(bench.dirty(), 128);
    assert_eq!(bench.write_alone(0, 4 * KIB), Outcome::WriteBack, "a block that is in the cache stays there");
}

#[test]
fn a_drain_ends_with_everything_clean_and_kept() {
    let mut bench = Bench::write_back();
    for block in [3, 4, 5, 9] {
        bench.write_alone(block * 4 * KIB, 4 * KIB);
    }
    bench.flush();
    let drain = bench.start_change(CacheChange::Drain);
    let mut writes = vec![];
    while let Some(io) = bench.ios.pop_front() {
        if (io.target, io.op) == (backing(), VOLATILE) {
            writes.push((io.offset / (4 * KIB), io.len / (4 * KIB)));
        }
        assert_eq!(bench.result(drain), None);
        bench.end(io);
        if bench.result(drain).is_some() {
            break;
        }
    }
    assert_eq!(bench.result(drain), Some(Ok(vec![])));
    assert_eq!(writes, [(3, 3), (9, 1)], "in the order of the disk, neighbours together");
    assert_eq!((bench.dirty(), bench.stats().destaged_bytes), (0, 16 * KIB));
    bench.settle();
    assert_eq!(bench.read_alone(9 * 4 * KIB, 4 * KIB), Outcome::Hit);
}

#[test]
fn writes_during_a_drain_go_through() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let drain = bench.start_change(CacheChange::Drain);
    let held: Vec<Io> = bench.ios.drain(..).collect();
    let write = bench.write_alone(64 * KIB, 4 * KIB);
    assert_eq!(write, Outcome::WriteCopied);
    held.into_iter().for_each(|io| bench.end(io));
    bench.settle();
    assert_eq!(bench.result(drain), Some(Ok(vec![])));
    assert_eq!(bench.write_alone(64 * KIB, 4 * KIB), Outcome::WriteBack);
}

#[test]
fn a_stopped_drain_returns_an_error() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    let drain = bench.start_change(CacheChange::Drain);
    assert_eq!(bench.change(CacheChange::StopDrain), Ok(vec![]));
    assert_eq!(bench.result(drain), Some(Err(CommandError::Stopped)));
    bench.settle();
    assert_eq!(bench.write_alone(64 * KIB, 4 * KIB), Outcome::WriteBack);
}

/// If a guest writes a block after the block was destaged and before the backing is flushed, the
/// block stays dirty.
#[test]
fn a_write_during_destaging_is_not_forgotten() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let drain = bench.start_change(CacheChange::Drain);
    bench.next(flash(0), IoOp::Read);
    bench.next(backing(), VOLATILE);
    assert_eq!(bench.change(CacheChange::StopDrain), Ok(vec![]));
    assert_eq!(bench.result(drain), Some(Err(CommandError::Stopped)));
    let flush = bench.ios.pop_front().expect("the backing is flushed");
    assert_eq!(flush.op, IoOp::Flush);
    bench.write_alone(0, 4 * KIB);
    bench.end(flush);
    assert_eq!(bench.dirty(), 1);
}

#[test]
fn a_discard_over_dirty_data_reaches_the_backing_before_the_journal_forgets() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 8 * KIB);
    let discard = bench.request(Op::Discard(Durability::Volatile), 0, 8 * KIB);
    while bench.ios.front().is_some_and(|io| matches!(io.target, Target::Flash(_))) {
        let io = bench.ios.pop_front().expect("looked at");
        bench.end(io);
    }
    bench.next(backing(), IoOp::Discard);
    assert_eq!(bench.dirty(), 2);
    bench.next(backing(), IoOp::Flush);
    assert_eq!(bench.outcome(discard), Outcome::BypassZeroing);
    assert_eq!(bench.dirty(), 0);
    assert_eq!(bench.read_alone(0, 8 * KIB), Outcome::MissFilled);
}

#[test]
fn a_discard_of_part_of_a_dirty_sector_takes_the_rest_to_the_backing_first() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let discard = bench.request(Op::Discard(Durability::Volatile), 512, 512);
    bench.next(flash(0), IoOp::Read);
    let io = bench.next(backing(), VOLATILE);
    assert_eq!((io.offset, io.len), (0, 4 * KIB));
    bench.settle();
    assert_eq!(bench.outcome(discard), Outcome::BypassZeroing);
    assert_eq!(bench.dirty(), 0);
}

#[test]
fn changes_that_would_lose_dirty_data_are_refused() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    let config = config(MIB, 4 * KIB);
    for change in [
        CacheChange::Disable,
        CacheChange::Clear(Some(ring(2))),
        CacheChange::Configure(config, Some(ring(2))),
        CacheChange::Leave(DeviceId(0), vec![], Some(ring(2))),
    ] {
        let command = bench.start_change(change);
        bench.settle();
        assert_eq!(bench.result(command), Some(Err(CommandError::Dirty)));
    }
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
    let discard = bench.start_change(CacheChange::DiscardDirty(Discard::Told));
    bench.settle();
    assert_eq!(bench.result(discard), Some(Ok(vec![])));
    assert_eq!(bench.dirty(), 0);
    let disable = bench.start_change(CacheChange::Disable);
    bench.settle();
    let released = bench.result(disable).expect("done").expect("clean");
    assert_eq!(released.len(), 9, "data and ring");
}

#[test]
fn a_cache_with_dirty_data_grows() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 16 * KIB);
    let more = vec![DataSegment { place: segment(1, 0), ordinal: 1, seconds_only: false }];
    let grow = bench.start_change(CacheChange::Grow(more, Some(NewRing { number: 2, ..ring(2) })));
    let read = bench.read(0, 16 * KIB);
    assert!(!bench.answered(read), "it waits");
    bench.settle();
    assert_eq!(bench.result(grow).expect("done").expect("well").len(), 8, "the old ring");
    assert_eq!(bench.outcome(read), Outcome::Hit);
    assert_eq!((bench.dirty(), bench.stats().blocks), (4, 512));
}

#[test]
fn old_dirty_data_is_destaged_within_its_bound() {
    let aging = Destage { dirty_age_ms_max: 1000, ..lazy() };
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, aging);
    bench.write_alone(0, 4 * KIB);
    let born = bench.now;
    while bench.dirty() > 0 {
        bench.wait_ms(10);
        bench.settle();
        assert!(bench.now.0 - born.0 <= 1_000_000_000, "after {} ms", (bench.now.0 - born.0) / 1_000_000);
    }
}

/// SYSTEMS §2: "the page is written to disk when the LRU picks it".
#[test]
fn the_coldest_goes_first_if_that_is_the_order() {
    let coldest = Destage { order: DestageOrder::Coldest, start_permille: 10, stop_permille: 8, ..lazy() };
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, coldest);
    for block in [50, 30] {
        bench.write_alone(block * 4 * KIB, 4 * KIB);
    }
    bench.flush();
    bench.write(40 * 4 * KIB, 4 * KIB);
    bench.next(flash(0), VOLATILE);
    let io = bench.ios.pop_front().expect("1.1 % is dirty");
    assert_eq!((io.target, io.op, io.offset), (flash(0), IoOp::Read, 0), "block 50 came first");
}

/// SYSTEMS §3: 30 % of the flash is a write buffer, which data leaves when it was destaged.
#[test]
fn a_split_cache_frees_destaged_data() {
    let mut bench = Bench::bare(Limits::default());
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    let config = CacheConfig {
        mode: Mode::WriteBack,
        destage: lazy(),
        layout: Layout::Split { read_permille: 700 },
        ..config(MIB, 4 * KIB)
    };
    let segments = vec![DataSegment { place: segment(0, 0), ordinal: 0, seconds_only: false }];
    let enable = Enable { config, segments, journal: Some(ring(1)), recovered: None };
    bench.start_change(CacheChange::Enable(Box::new(enable)));
    bench.settle();
    let taken = (0..200).filter(|i| bench.write_alone(i * 4 * KIB, 4 * KIB) == Outcome::WriteBack).count();
    assert_eq!(taken, 77, "the write buffer is 30 % of 256 blocks");
    let drain = bench.start_change(CacheChange::Drain);
    bench.settle();
    assert_eq!(bench.result(drain), Some(Ok(vec![])));
    bench.wait_ms(1500);
    bench.settle();
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
    for block in 1000..1400 {
        bench.read_alone(block * 4 * KIB, 4 * KIB);
    }
    assert_eq!(bench.stats().blocks_cached, 179, "the read cache is 70 % of 256 blocks");
}

/// If the write order is kept, data written after a flush never reaches the backing before data
/// written before the flush.
#[test]
fn write_order_is_kept_at_flushes() {
    let ordered = Destage { ordered: true, dirty_age_ms_max: 1, ..lazy() };
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, ordered);
    bench.write_alone(40 * KIB, 4 * KIB);
    let kept: Vec<Io> = bench.ios.drain(..).collect();
    let flush = bench.request(Op::Flush, 0, 0);
    bench.settle();
    assert!(bench.answered(flush));
    let later = bench.write(0, 4 * KIB);
    bench.settle();
    assert_eq!(bench.outcome(later), Outcome::WriteBack);
    let again = bench.write(40 * KIB, 4 * KIB);
    assert!(!bench.answered(again), "its older data has to go first");
    kept.into_iter().for_each(|io| bench.end(io));
    bench.settle();
    assert!(bench.answered(again));
}

/// A file system may rely on a durable write, such as the end of a transaction in its journal, before
/// it sends later writes.
#[test]
fn write_order_is_kept_at_durable_writes() {
    let ordered = Destage { ordered: true, dirty_age_ms_max: 1, ..lazy() };
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, ordered);
    let durable = bench.request(Op::Write(Durability::Durable), 40 * KIB, 4 * KIB);
    while !bench.answered(durable) {
        let io = bench.ios.pop_front().expect("the write ends before it is destaged");
        bench.end(io);
    }
    let later = bench.write(0, 4 * KIB);
    let mut destaged = Vec::new();
    for _ in 0..20 {
        while let Some(io) = bench.ios.pop_front() {
            match (io.target, io.op) {
                (Target::Backing(_), IoOp::Write(_)) => destaged.push(io.offset),
                (Target::Backing(_), IoOp::Flush) => destaged.push(u64::MAX),
                _ => {}
            }
            bench.end(io);
        }
        bench.wait_ms(100);
    }
    assert_eq!(bench.outcome(later), Outcome::WriteBack);
    assert_eq!(destaged[..3], [40 * KIB, u64::MAX, 0], "the backing is flushed in between");
}

pub(super) fn mirrored(copies: Copies) -> Bench {
    mirrored_with_ring(copies, ring(1))
}

/// Returns a persistent cache with a segment on each of the devices 0 and 1.
pub(super) fn mirrored_with_ring(copies: Copies, ring: NewRing) -> Bench {
    let mut bench = Bench::bare(Limits::default());
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    let config = CacheConfig { mode: Mode::WriteBack, destage: lazy(), copies, ..config(MIB, 4 * KIB) };
    let at = |device, ordinal| DataSegment { place: segment(device, 0), ordinal, seconds_only: false };
    let enable = Enable { config, segments: vec![at(0, 0), at(1, 1)], journal: Some(ring), recovered: None };
    bench.start_change(CacheChange::Enable(Box::new(enable)));
    bench.settle();
    bench
}

/// Makes the device fail until it is fenced.
pub(super) fn lose(bench: &mut Bench, device: DeviceId) {
    for _ in 0..Limits::default().flash_errors_max {
        bench.write(512 * KIB, 4 * KIB);
        while let Some(io) = bench.ios.pop_front() {
            match io.target == Target::Flash(device) {
                true => bench.fail(io),
                false => bench.end(io),
            }
        }
    }
    assert!(bench.events.iter().any(|event| matches!(event, Event::Fenced { .. })));
}

/// SYSTEMS §2: "mirrored flash".
#[test]
fn dirty_data_is_written_to_two_devices_and_read_from_the_one_that_works() {
    let mut bench = mirrored(Copies::TwoOfDirty);
    let write = bench.write(0, 8 * KIB);
    let targets: Vec<_> = bench.ios.iter().map(|io| (io.target, io.len)).collect();
    assert_eq!(targets, [(flash(0), 8 * KIB), (flash(1), 8 * KIB)]);
    bench.next(flash(0), VOLATILE);
    assert!(!bench.answered(write), "both have to have it");
    bench.settle();
    assert_eq!((bench.outcome(write), bench.dirty()), (Outcome::WriteBack, 2));
    // Device 0 returns different data.
    let read = bench.read(0, 8 * KIB);
    while let Some(io) = bench.ios.pop_front() {
        match io.target {
            Target::Flash(DeviceId(0)) => bench.end_with(io, Ok(()), &[SUM + 1; 2]),
            _ => bench.end(io),
        }
    }
    assert_eq!(bench.reply(read).expect("answered").result, Ok(()));
    assert_eq!(bench.stats().sectors_lost, 0);
}

/// If a commit recorded only one of a sector's two copies, then after a crash the journal could
/// describe a copy that is damaged, and not the good copy.
#[test]
fn a_commit_knows_both_copies_of_a_sector_or_neither() {
    let mut bench = mirrored(Copies::TwoOfDirty);
    let write = bench.write(0, 4 * KIB);
    bench.next(flash(0), VOLATILE);
    let second = bench.ios.pop_front().expect("the other copy");
    let flush = bench.request(Op::Flush, 0, 0);
    assert!(bench.answered(flush), "there is nothing to be made durable");
    assert_eq!((bench.ios.len(), bench.dirty()), (0, 0));
    bench.end(second);
    assert_eq!((bench.outcome(write), bench.dirty()), (Outcome::WriteBack, 1));
}

/// A working device is removed from the cache only after its dirty data was destaged. The second
/// copy on another device has not been read yet and may be damaged.
#[test]
fn a_device_that_works_leaves_without_dirty_data() {
    let mut bench = mirrored(Copies::TwoOfDirty);
    bench.write_alone(0, 8 * KIB);
    let leave = |bench: &mut Bench| {
        let leave = bench.start_change(CacheChange::Leave(DeviceId(0), vec![], Some(ring(2))));
        bench.settle();
        bench.result(leave).expect("done")
    };
    assert_eq!(leave(&mut bench), Err(CommandError::Dirty));
    bench.start_change(CacheChange::Drain);
    bench.settle();
    assert!(leave(&mut bench).is_ok());
}

#[test]
fn a_lost_device_takes_nothing_of_which_there_is_another_copy() {
    let mut bench = mirrored(Copies::TwoOfDirty);
    bench.write_alone(0, 8 * KIB);
    lose(&mut bench, DeviceId(0));
    assert_eq!((bench.dirty(), bench.stats().sectors_lost), (2, 0));
    assert_eq!(bench.read_alone(0, 8 * KIB), Outcome::Hit);
}

#[test]
fn clean_data_has_no_second_copy_unless_configured() {
    for (copies, ios) in [(Copies::TwoOfDirty, 1), (Copies::TwoOfAll, 2)] {
        let mut bench = mirrored(copies);
        bench.read(0, 4 * KIB);
        bench.next(backing(), IoOp::Read);
        assert_eq!(bench.ios.len(), ios, "{copies:?}");
        bench.settle();
        // Dirty data becomes clean: its second copy is dropped or stays.
        bench.write_alone(64 * KIB, 4 * KIB);
        let drain = bench.start_change(CacheChange::Drain);
        bench.settle();
        assert_eq!(bench.result(drain), Some(Ok(vec![])));
        bench.wait_ms(2000);
        bench.settle();
        assert_eq!(bench.stats().blocks_cached, 2 * ios as u64, "{copies:?}");
    }
}

/// A device is lost and another device replaces it: hob makes the missing second copies again.
#[test]
fn missing_second_copies_are_made_again() {
    let mut bench = mirrored(Copies::TwoOfDirty);
    bench.write_alone(0, 16 * KIB);
    lose(&mut bench, DeviceId(0));
    let more = vec![DataSegment { place: segment(2, 0), ordinal: 2, seconds_only: false }];
    let leave = bench.start_change(CacheChange::Leave(DeviceId(0), more, Some(ring(2))));
    bench.settle();
    assert!(bench.result(leave).expect("done").is_ok());
    assert_eq!(bench.stats().second_copy_bytes, 16 * KIB);
    lose(&mut bench, DeviceId(1));
    assert_eq!((bench.dirty(), bench.stats().sectors_lost), (4, 0), "device 2 has all of it");
    assert_eq!(bench.read_alone(0, 16 * KIB), Outcome::Hit);
}

#[test]
fn scrubbing_finds_damaged_data_before_a_guest_reads_it() {
    let mut bench = Bench::write_back();
    bench.read_alone(64 * KIB, 4 * KIB);
    bench.write_alone(0, 4 * KIB);
    for _ in 0..20 {
        bench.wait_ms(1000);
        while let Some(io) = bench.ios.pop_front() {
            // The clean block is in the first frame.
            let wrong = (io.target, io.op, io.offset) == (flash(0), IoOp::Read, 0);
            match wrong {
                true => bench.end_with(io, Ok(()), &[SUM + 1]),
                false => bench.end(io),
            }
        }
    }
    let stats = bench.stats();
    assert_eq!((stats.checksum_mismatches, stats.blocks_cached, stats.sectors_dirty), (1, 1, 1));
    assert!(stats.scrubbed_bytes >= 8 * KIB);
    assert_eq!(bench.read_alone(64 * KIB, 4 * KIB), Outcome::MissFilled, "and is repaired");
}
