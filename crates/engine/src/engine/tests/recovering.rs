//! Requests to a disk whose cache is being recovered: which of them are served, which wait, and
//! what the cache drops because of them.

use std::collections::BTreeMap;

use super::write_back::{RING_DEVICE, VOLATILE, backing, flash, lazy, ring};
use super::*;
use crate::command::{Enable, Expect, Mode};
use crate::journal::{PAGE_BYTES, Recovered, Replay, Ring, Survey};
use crate::regions::Regions;
use crate::stats::CacheState;

const RING_BYTES: u64 = 8 * MIB;

/// State that an earlier engine left: blocks 0 to 3 clean, and 4 and 5 dirty under write-back.
#[derive(Default)]
pub(super) struct Left {
    pages: BTreeMap<u64, Vec<u8>>,
}

impl Left {
    pub(super) fn by(mode: Mode) -> Left {
        let mut left = Left::default();
        let mut bench = Bench::bare(Limits::default());
        bench.engine.lend(BufferId(1 << 20), 1 << 20);
        bench.start_change(enable(1, mode, None));
        left.settle(&mut bench);
        bench.read(0, 16 * KIB);
        left.settle(&mut bench);
        bench.write(16 * KIB, 8 * KIB);
        bench.request(Op::Flush, 0, 0);
        left.settle(&mut bench);
        bench.start_change(CacheChange::Close);
        left.settle(&mut bench);
        left
    }

    /// Completes all I/O, and keeps the journal's data.
    pub(super) fn settle(&mut self, bench: &mut Bench) {
        while let Some(io) = bench.ios.pop_front() {
            for (at, page) in
                (io.offset..).step_by(PAGE_BYTES).zip(bench.engine.journal_pages(io.id).chunks(PAGE_BYTES))
            {
                self.pages.insert(at, page.to_vec());
            }
            bench.end(io);
        }
    }

    pub(super) fn recover(&self) -> (Regions, Recovered) {
        let mut survey = Survey::new([7; 16], 1, 1, RING_BYTES / PAGE_BYTES as u64);
        for (at, page) in &self.pages {
            survey.page(0, at / PAGE_BYTES as u64, page);
        }
        let Ring::Whole(plan) = survey.finish() else { panic!("the ring is whole") };
        let doubtful = plan.doubtful.clone();
        let reads: Vec<_> = plan.reads().collect();
        let mut replay = Replay::new(plan, MIB, &[(0, DeviceId(0))]).expect("one segment");
        for (_, number) in reads {
            replay.page(&self.pages[&(number * PAGE_BYTES as u64)]).expect("as it was");
        }
        assert!(replay.to_prove().is_empty(), "it was closed");
        (doubtful, replay.finish(&[]))
    }
}

pub(super) fn enable(number: u32, mode: Mode, recovered: Option<Recovered>) -> CacheChange {
    CacheChange::Enable(Box::new(Enable {
        config: CacheConfig { mode, destage: lazy(), ..config(MIB, 4 * KIB) },
        segments: vec![DataSegment { place: segment(0, 0), ordinal: 0, seconds_only: false }],
        journal: Some(ring(number)),
        recovered,
    }))
}

fn expect(doubtful: Regions, is_void: bool) -> CacheChange {
    CacheChange::Expect(Some(Box::new(Expect { doubtful, is_void })))
}

fn nothing() -> Regions {
    Regions::new(64 * MIB)
}

fn everything() -> Regions {
    let mut all = nothing();
    all.insert_all();
    all
}

/// Returns a disk whose cache is being recovered.
fn expecting(doubtful: Regions) -> Bench {
    let mut bench = Bench::bare(Limits::default());
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    bench.change(expect(doubtful, false)).expect("no cache yet");
    assert_eq!(bench.stats().cache, CacheState::Recovering);
    bench
}

fn waits_reported(bench: &Bench) -> usize {
    bench.events.iter().filter(|event| matches!(event, Event::ChangeWaits(DISK))).count()
}

#[test]
fn without_uncertain_regions_reads_and_flushes_pass_and_changes_are_reported() {
    let mut bench = expecting(nothing());
    assert_eq!(bench.read_alone(0, 8 * KIB), Outcome::BypassRecovering);
    let flush = bench.request(Op::Flush, 0, 0);
    bench.next(backing(), IoOp::Flush);
    assert_eq!(bench.outcome(flush), Outcome::BypassFlush);
    assert_eq!(waits_reported(&bench), 0);
    let changes = [bench.write(0, 4 * KIB), bench.request(Op::Discard(Durability::Volatile), MIB, MIB)];
    assert!(bench.ios.is_empty() && waits_reported(&bench) == 1);
    // The waiting requests delay later requests for the same data, and no other requests.
    let behind = bench.read(0, 4 * KIB);
    assert!(bench.ios.is_empty());
    assert_eq!(bench.read_alone(8 * KIB, 4 * KIB), Outcome::BypassRecovering);
    bench.change(expect(nothing(), true)).expect("nothing is in doubt");
    bench.settle();
    assert!(changes.into_iter().chain([behind]).all(|id| bench.answered(id)));
    let changed = bench.engine.changed_meanwhile(DISK).expect("it is expected");
    assert!(changed.contains(0) && changed.contains(MIB / 4096) && !changed.contains(2));
}

#[test]
fn reads_of_possibly_dirty_data_wait_and_others_are_served() {
    let (doubtful, recovered) = Left::by(Mode::WriteBack).recover();
    assert_eq!(
        (0..8).map(|sector| doubtful.contains(sector)).collect::<Vec<_>>(),
        [false, false, false, false, true, true, false, false]
    );
    let mut bench = expecting(everything());
    let reads = [bench.read(0, 4 * KIB), bench.read(16 * KIB, 4 * KIB)];
    let flush = bench.request(Op::Flush, 0, 0);
    let write = bench.write(MIB, 4 * KIB);
    assert!(bench.ios.is_empty(), "nothing is known");
    bench.change(expect(doubtful, false)).expect("more is known");
    bench.next(backing(), IoOp::Read);
    assert!(bench.answered(reads[0]) && bench.ios.is_empty());
    assert_eq!(waits_reported(&bench), 0, "there is something that must not be made void");
    let command = bench.start_change(enable(2, Mode::WriteBack, Some(recovered)));
    bench.settle();
    assert_eq!(bench.result(command), Some(Ok(vec![])));
    assert_eq!((bench.outcome(reads[1]), bench.outcome(write)), (Outcome::Hit, Outcome::WriteBack));
    assert!(bench.answered(flush) && bench.stats().cache == CacheState::Active);
    assert_eq!(bench.read_alone(0, 16 * KIB), Outcome::Hit, "it is warm");
}

/// Writing the new journal ring of a recovered cache may take seconds. Meanwhile clean data is
/// read.
#[test]
fn clean_data_is_read_while_the_ring_is_written() {
    let (_, recovered) = Left::by(Mode::WriteBack).recover();
    let mut bench = expecting(everything());
    let early = bench.read(0, 4 * KIB);
    let command = bench.start_change(enable(2, Mode::WriteBack, Some(recovered)));
    bench.next(backing(), IoOp::Flush);
    let page = bench.ios.pop_front().expect("its dump");
    assert_eq!((page.target, page.op), (flash(RING_DEVICE), IoOp::WriteJournal));
    let (clean, dirty) = (bench.read(4 * KIB, 12 * KIB), bench.read(12 * KIB, 8 * KIB));
    let write = bench.write(MIB, 4 * KIB);
    bench.next(backing(), IoOp::Read);
    assert_eq!(bench.outcome(clean), Outcome::BypassRecovering);
    assert!(
        bench.ios.is_empty() && !bench.answered(early) && !bench.answered(dirty) && !bench.answered(write)
    );
    bench.end(page);
    bench.settle();
    assert_eq!(bench.result(command), Some(Ok(vec![])));
    assert_eq!((bench.outcome(early), bench.outcome(dirty)), (Outcome::Hit, Outcome::Hit));
    assert!(bench.answered(write));
}

#[test]
fn a_recovered_cache_drops_sectors_changed_before_it_was_enabled() {
    let (doubtful, recovered) = Left::by(Mode::WriteThrough).recover();
    assert!(doubtful.is_empty());
    let mut bench = expecting(doubtful.clone());
    bench.change(expect(doubtful, true)).expect("nothing is in doubt");
    let write = bench.write(4 * KIB + 512, 512);
    let io = bench.only_io();
    assert_eq!((io.target, io.op), (backing(), VOLATILE));
    let command = bench.start_change(enable(2, Mode::WriteThrough, Some(recovered)));
    assert!(bench.ios.is_empty(), "the change ends first");
    bench.end(io);
    assert!(bench.answered(write));
    bench.settle();
    assert_eq!(bench.result(command), Some(Ok(vec![])));
    assert_eq!(bench.read_alone(4 * KIB, 4 * KIB), Outcome::MissFilled);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
    assert_eq!(bench.read_alone(8 * KIB, 16 * KIB), Outcome::Hit);
    assert!(bench.engine.changed_meanwhile(DISK).is_none());
}

/// The new ring cannot be written: the disk waits for another attempt, and still knows which
/// sectors have changed.
#[test]
fn a_cache_that_does_not_come_is_expected_on() {
    let left = Left::by(Mode::WriteThrough);
    let mut bench = expecting(nothing());
    bench.change(expect(nothing(), true)).expect("nothing is in doubt");
    bench.write_alone(0, 4 * KIB);
    let command = bench.start_change(enable(2, Mode::WriteThrough, Some(left.recover().1)));
    while let Some(io) = bench.ios.pop_front() {
        if io.op == IoOp::WriteJournal { bench.fail(io) } else { bench.end(io) }
    }
    assert_eq!(bench.result(command), Some(Err(CommandError::JournalFailed)));
    assert_eq!(bench.stats().cache, CacheState::Recovering);
    assert!(bench.engine.changed_meanwhile(DISK).is_some_and(|changed| changed.contains(0)));
    assert_eq!(bench.write_alone(8 * KIB, 4 * KIB), Outcome::WriteNotCopied);
    let command = bench.start_change(enable(3, Mode::WriteThrough, Some(left.recover().1)));
    bench.settle();
    assert_eq!(bench.result(command), Some(Ok(vec![])));
    assert_eq!(bench.read_alone(4 * KIB, 4 * KIB), Outcome::Hit);
    assert_eq!(bench.read_alone(8 * KIB, 4 * KIB), Outcome::MissFilled);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
}

#[test]
fn a_removed_disk_answers_its_waiting_requests() {
    let mut bench = expecting(everything());
    let waiting = [bench.read(0, 4 * KIB), bench.write(0, 4 * KIB), bench.request(Op::Flush, 0, 0)];
    let command = bench.start_command(Command::RemoveDisk);
    assert_eq!(bench.result(command), Some(Ok(vec![])));
    for id in waiting {
        let reply = bench.reply(id).expect("answered");
        assert_eq!((reply.result, reply.outcome), (Err(IoError::ShuttingDown), Outcome::Refused));
    }
}

#[test]
fn a_cache_that_is_not_expected_any_more_is_none() {
    let mut bench = expecting(everything());
    let write = bench.write(0, 4 * KIB);
    let volatile = CacheChange::enable_volatile(config(MIB, 4 * KIB), vec![segment(0, 0)]);
    assert_eq!(bench.change(volatile.clone()), Err(CommandError::CacheExists));
    assert_eq!(bench.change(expect(Regions::new(MIB), false)), Err(CommandError::Unworkable), "another size");
    assert_eq!(
        bench.change(expect(everything(), true)),
        Err(CommandError::Unworkable),
        "not void with dirty data"
    );
    bench.change(CacheChange::Expect(None)).expect("it may be");
    bench.settle();
    assert!(bench.answered(write));
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::CacheOff);
    bench.change(volatile).expect("nothing is expected");
    assert_eq!(bench.change(expect(nothing(), false)), Err(CommandError::CacheExists));
}

/// The disk's backing grew while hob did not serve it, or a crash happened between the growth and
/// the new ring: docs/decisions/0017.
#[test]
fn a_disk_is_recovered_larger_than_its_cache_knows_it() {
    let (doubtful, mut recovered) = Left::by(Mode::WriteBack).recover();
    let mut bench = Bench::with_disk(Limits::default(), 80 * MIB, Access::ReadWrite);
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    assert_eq!(bench.change(expect(doubtful.clone(), false)), Err(CommandError::Unworkable));
    bench.change(expect(doubtful.grown(80 * MIB), false)).expect("of this size");
    assert_eq!(bench.change(CacheChange::GrowDisk(96 * MIB, None)), Err(CommandError::Recovering));
    assert_eq!(bench.read_alone(79 * MIB, 4 * KIB), Outcome::BypassRecovering);
    let dirty = bench.read(16 * KIB, 4 * KIB);
    assert!(bench.ios.is_empty(), "it may be dirty still");
    recovered.grow(80 * MIB);
    let command = bench.start_change(enable(2, Mode::WriteBack, Some(recovered)));
    bench.settle();
    assert_eq!((bench.result(command), bench.outcome(dirty)), (Some(Ok(vec![])), Outcome::Hit));
    assert_eq!(bench.write_alone(80 * MIB - 4 * KIB, 4 * KIB), Outcome::WriteBack);
}
