//! Discards under write-back that are acknowledged before the backing has them.

use super::super::early_discard::DISCARDS_MAX;
use super::write_back::{VOLATILE, backing, flash, lazy};
use super::*;
use crate::command::Mode;

const DISCARD: Op = Op::Discard(Durability::Volatile);

impl Bench {
    /// Ends flash I/O until the oldest I/O is on the backing.
    fn until_the_backing(&mut self) {
        while self.ios.front().is_some_and(is_flash) {
            let io = self.ios.pop_front().expect("looked at");
            self.end(io);
        }
    }
}

/// Issue: `TRIM` of 4K or 64K under write-back took as long as the backing.
#[test]
fn a_discard_is_acknowledged_before_any_io() {
    let mut bench = Bench::write_back();
    let id = bench.request(DISCARD, 4 * KIB, 64 * KIB);
    assert_eq!(bench.reply(id).map(|reply| reply.result), Some(Ok(())));
    bench.until_the_backing();
    let io = bench.only_io();
    assert_eq!((io.target, io.op, io.offset, io.len), (backing(), IoOp::Discard, 4 * KIB, 64 * KIB));
    bench.end(io);
    bench.settle();
    assert_eq!(bench.replies.iter().filter(|reply| reply.id == id).count(), 1);
}

/// After a read has returned the range's content, the discard must not change this content. The
/// discard must not destroy a later write.
#[test]
fn later_reads_and_writes_of_the_range_wait_for_the_backing() {
    let mut bench = Bench::write_back();
    bench.request(DISCARD, 0, 8 * KIB);
    bench.until_the_backing();
    let discard = bench.only_io();
    let (write, read) = (bench.write(0, 4 * KIB), bench.read(4 * KIB, 4 * KIB));
    let other = bench.write(64 * KIB, 4 * KIB);
    bench.settle();
    assert!(!bench.answered(write) && !bench.answered(read) && bench.answered(other));
    bench.end(discard);
    bench.settle();
    assert_eq!((bench.outcome(write), bench.outcome(read)), (Outcome::WriteBack, Outcome::MissFilled));
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
}

#[test]
fn dirty_data_is_dropped_after_a_flush_of_the_backing() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 8 * KIB);
    let id = bench.request(DISCARD, 0, 8 * KIB);
    assert!(bench.answered(id));
    bench.until_the_backing();
    bench.next(backing(), IoOp::Discard);
    assert_eq!(bench.dirty(), 2);
    bench.next(backing(), IoOp::Flush);
    assert_eq!(bench.dirty(), 0);
    assert_eq!(bench.read_alone(0, 8 * KIB), Outcome::MissFilled);
}

/// A discard is a hint: without the backing's success, dirty data stays and is destaged.
#[test]
fn a_discard_that_the_backing_refuses_leaves_dirty_data_dirty() {
    for (refused, first) in [(IoOp::Discard, None), (IoOp::Flush, Some(IoOp::Discard))] {
        let mut bench = Bench::write_back();
        bench.write_alone(0, 8 * KIB);
        let id = bench.request(DISCARD, 0, 8 * KIB);
        bench.until_the_backing();
        first.into_iter().for_each(|op| _ = bench.next(backing(), op));
        let io = bench.ios.pop_front().expect("on the backing");
        assert_eq!((io.target, io.op), (backing(), refused));
        bench.fail(io);
        bench.settle();
        assert_eq!((bench.dirty(), bench.read_alone(0, 8 * KIB)), (2, Outcome::Hit));
        assert_eq!(bench.replies.iter().filter(|reply| reply.id == id).count(), 1);
        let drain = bench.start_change(CacheChange::Drain);
        for _ in 0..10 {
            bench.settle();
            bench.wait_ms(1_000);
        }
        assert_eq!((bench.result(drain), bench.dirty()), (Some(Ok(vec![])), 0));
    }
}

/// A guest's flush does not wait for an acknowledged discard in flight, because a crash may undo
/// the discard. If the backing has completed the discard, a later flush of the guest also flushes
/// the backing.
#[test]
fn a_flush_waits_for_discards_that_the_backing_has_done_only() {
    let mut bench = Bench::write_back();
    bench.flush();
    bench.request(DISCARD, 0, 4 * KIB);
    bench.until_the_backing();
    let discard = bench.only_io();
    let flush = bench.request(Op::Flush, 0, 0);
    bench.settle();
    assert_eq!(bench.outcome(flush), Outcome::FlushCommitted);
    bench.end(discard);
    let flush = bench.request(Op::Flush, 0, 0);
    bench.settle();
    assert_eq!(bench.outcome(flush), Outcome::BypassFlush);
}

/// After a loss of the backing, hob sends the changes in flight again, but not a discard that it
/// has acknowledged.
#[test]
fn a_discard_is_not_sent_again_after_a_loss() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.request(DISCARD, 0, 4 * KIB);
    bench.until_the_backing();
    let discard = bench.only_io();
    bench.engine.handle_loss(bench.now, DISK);
    bench.drain();
    bench.end(discard);
    bench.settle();
    assert_eq!((bench.dirty(), bench.read_alone(0, 4 * KIB)), (1, Outcome::Hit));
}

/// A drain waits for acknowledged discards, because another program may write the backing after the
/// drain.
#[test]
fn a_drain_waits_for_acknowledged_discards() {
    let mut bench = Bench::write_back();
    bench.request(DISCARD, 0, 4 * KIB);
    bench.until_the_backing();
    let discard = bench.only_io();
    let drain = bench.start_change(CacheChange::Drain);
    bench.settle();
    assert_eq!(bench.result(drain), None);
    bench.end(discard);
    bench.settle();
    assert_eq!(bench.result(drain), Some(Ok(vec![])));
}

#[test]
fn too_many_discards_wait_for_the_backing() {
    let mut bench = Bench::write_back();
    let each = |i: u32| u64::from(i) * 64 * KIB;
    let ids: Vec<_> = (0..DISCARDS_MAX + 2).map(|i| bench.request(DISCARD, each(i), 4 * KIB)).collect();
    let waiting = |bench: &Bench| ids.iter().filter(|id| !bench.answered(**id)).count();
    assert_eq!(waiting(&bench), 2);
    bench.settle();
    assert_eq!(waiting(&bench), 0);
    let id = bench.request(DISCARD, 0, 4 * KIB);
    assert!(bench.answered(id), "there is room again");
}

#[test]
fn durable_long_and_partial_discards_and_other_modes_wait() {
    let write_through = || Bench::persistent(4 * KIB, Mode::WriteThrough, lazy());
    let cases = [
        (Bench::write_back(), Op::Discard(Durability::Durable), 4 * KIB, 4 * KIB),
        (Bench::write_back(), DISCARD, 0, MIB + 4 * KIB),
        (write_through(), DISCARD, 0, 4 * KIB),
        (Bench::cached(16, 4 * KIB), DISCARD, 0, 4 * KIB),
    ];
    for (mut bench, op, offset, len) in cases {
        let id = bench.request(op, offset, len);
        assert!(!bench.answered(id), "{op:?} {offset} {len}");
        bench.settle();
        assert_eq!(bench.outcome(id), Outcome::BypassZeroing);
    }
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let id = bench.request(DISCARD, 512, 512);
    bench.next(flash(0), IoOp::Read);
    assert!(!bench.answered(id), "the rest of the sector has to reach the backing first");
    bench.next(backing(), VOLATILE);
    assert!(bench.answered(id));
}
