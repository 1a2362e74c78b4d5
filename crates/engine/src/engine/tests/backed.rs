//! Failed flushes of the backing, and backings that restart: which guests receive an error, and
//! which data becomes dirty again.

use super::write_back::{backing, flash, lazy, mirrored, ring};
use super::*;
use crate::command::{Bitmap, BitmapChange, Copies, Destage, Discard, Mode};
use crate::granules::Granules;
use crate::units::SessionId;

impl Bench {
    fn flush_of(&mut self, session: u32) -> RequestId {
        self.made += 1;
        let id = RequestId(u64::from(session) << 32 | self.made);
        let request = Request {
            id,
            disk: DISK,
            op: Op::Flush,
            offset: 0,
            len: 0,
            buffer: None,
            promote: Promote::Usual,
            memory: PayloadMemory::Daemon,
        };
        self.engine.handle_request(self.now, request).expect("room for a request");
        self.drain();
        id
    }

    fn written_by(&mut self, session: u32) {
        self.session = session;
        self.write_alone(0, 4 * KIB);
    }

    fn flushed_by(&mut self, session: u32) -> Result<(), IoError> {
        let flush = self.flush_of(session);
        self.settle();
        self.reply(flush).expect("answered").result
    }

    /// Completes I/O successfully, in order, until an I/O on the backing has the operation `op`.
    /// Returns this I/O.
    pub(super) fn until_backing(&mut self, op: IoOp) -> Io {
        for _ in 0..100 {
            let Some(io) = self.ios.pop_front() else {
                self.wait_ms(100);
                continue;
            };
            if (io.target, io.op) == (backing(), op) {
                return io;
            }
            self.end(io);
        }
        panic!("no {op:?} of the backing");
    }
}

const PLAIN: IoOp = IoOp::Write(Durability::Volatile);

/// Returns a write-back cache that destages at once. Its only dirty sector was written to the
/// backing, and the flush of the backing for it is in flight.
fn destaged() -> (Bench, Io) {
    let eager = Destage { start_permille: 0, stop_permille: 0, ..lazy() };
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, eager);
    bench.write(0, 4 * KIB);
    let write = bench.until_backing(PLAIN);
    bench.end(write);
    let flush = bench.until_backing(IoOp::Flush);
    assert_eq!(bench.dirty(), 1);
    (bench, flush)
}

#[test]
fn what_a_failed_flush_covers_is_dirty_again_and_destaged_again() {
    let (mut bench, flush) = destaged();
    bench.fail(flush);
    assert_eq!(bench.dirty(), 1);
    let write = bench.until_backing(PLAIN);
    assert_eq!(write.offset, 0);
    bench.end(write);
    bench.settle();
    bench.wait_ms(2000);
    bench.settle();
    assert_eq!(bench.dirty(), 0);
    assert_eq!(bench.flushed_by(1), Ok(()), "flash had it all the time");
}

/// The backing reports a loss while a flush is in flight. The success of this flush makes no data
/// clean, because the flush may not cover the lost data.
#[test]
fn a_flush_that_meets_a_loss_makes_nothing_clean() {
    let (mut bench, flush) = destaged();
    bench.engine.handle_loss(bench.now, DISK);
    bench.end(flush);
    assert_eq!(bench.dirty(), 1);
    let write = bench.until_backing(PLAIN);
    bench.end(write);
    let flush = bench.until_backing(IoOp::Flush);
    bench.end(flush);
    assert_eq!(bench.dirty(), 0);
}

#[test]
fn a_transfer_that_meets_a_loss_is_repeated() {
    let eager = Destage { start_permille: 0, stop_permille: 0, ..lazy() };
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, eager);
    bench.write(0, 4 * KIB);
    let write = bench.until_backing(PLAIN);
    bench.engine.handle_loss(bench.now, DISK);
    bench.end(write);
    let again = bench.until_backing(PLAIN);
    assert_eq!(again.offset, 0);
}

/// Under write-back, a guest's flush needs only flash, even while destaged data waits for a flush
/// of the backing.
#[test]
fn a_guests_flush_does_not_wait_for_destaging() {
    let (mut bench, hangs) = destaged();
    bench.write_alone(64 * KIB, 4 * KIB);
    let flush = bench.flush_of(1);
    while let Some(io) = bench.ios.pop_front() {
        assert!(io.target != backing() || io.op != IoOp::Flush, "{io:?}");
        bench.end(io);
    }
    assert_eq!(bench.outcome(flush), Outcome::FlushCommitted);
    bench.end(hangs);
}

/// The daemon flushes a disk before it closes the disk and opens it again, which needs the backing.
#[test]
fn a_flush_of_the_daemon_flushes_the_backing_even_if_flash_has_all_data() {
    let mut bench = Bench::write_back();
    bench.flush();
    bench.write_alone(0, 4 * KIB);
    let flush = bench.flush_of(1);
    bench.settle();
    assert_eq!(bench.outcome(flush), Outcome::FlushCommitted);
    let flush = bench.request(Op::DaemonFlush, 0, 0);
    let io = bench.until_backing(IoOp::Flush);
    assert!(!bench.answered(flush));
    bench.end(io);
    assert_eq!(bench.reply(flush).expect("answered").result, Ok(()));
    assert_eq!(bench.dirty(), 1);
}

#[test]
fn a_change_that_bypassed_flash_needs_a_flush_of_the_backing() {
    let (mut bench, hangs) = destaged();
    bench.request(Op::Discard(Durability::Volatile), MIB, 4 * KIB);
    bench.settle();
    let flush = bench.flush_of(1);
    let own = bench.until_backing(IoOp::Flush);
    assert!(!bench.answered(flush));
    bench.end(own);
    assert!(!bench.answered(flush), "the destager's flush may still report a loss");
    bench.end(hangs);
    assert_eq!(bench.outcome(flush), Outcome::BypassFlush);
}

#[test]
fn every_session_is_told_of_a_failed_flush_once() {
    let mut bench = Bench::bare(Limits::default());
    assert_eq!(bench.flushed_by(1), Ok(()));
    bench.write_alone(0, 4 * KIB);
    let flush = bench.flush_of(1);
    let io = bench.only_io();
    bench.fail(io);
    assert_eq!(bench.reply(flush).expect("answered").result, Err(IoError::Failed));
    assert!(bench.events.contains(&Event::WritesInDoubt(DISK)));
    assert_eq!(bench.flushed_by(1), Ok(()), "it was told");
    assert!(bench.engine.owes_failure(DISK, SessionId(2)));
    assert_eq!(bench.flushed_by(2), Err(IoError::Failed));
    assert_eq!(bench.flushed_by(2), Ok(()));
    bench.engine.begin_session(DISK, SessionId(3));
    assert_eq!(bench.flushed_by(3), Ok(()), "it began after a guest was told");
}

#[test]
fn a_failure_that_no_guest_was_told_of_is_the_next_sessions() {
    let mut bench = Bench::bare(Limits::default());
    bench.write_alone(0, 4 * KIB);
    bench.engine.handle_loss(bench.now, DISK);
    assert_eq!(bench.flushed_by(SessionId::DAEMON_BIT), Err(IoError::Failed), "the daemon is no guest");
    bench.engine.begin_session(DISK, SessionId(1));
    assert_eq!(bench.flushed_by(1), Err(IoError::Failed));
    assert_eq!(bench.flushed_by(1), Ok(()));
}

/// If no acknowledged data was lost, no guest receives an error.
#[test]
fn a_loss_after_a_flush_is_not_told() {
    let mut bench = Bench::bare(Limits::default());
    bench.write_alone(0, 4 * KIB);
    assert_eq!(bench.flushed_by(1), Ok(()));
    bench.engine.handle_loss(bench.now, DISK);
    assert_eq!(bench.flushed_by(1), Ok(()));
}

/// Two flushes of one backing: the failed flush ran first, and its reply arrives last.
#[test]
fn a_flush_is_not_believed_before_an_overlapping_one_has_ended() {
    let mut bench = Bench::bare(Limits::default());
    bench.write_alone(0, 4 * KIB);
    let (one, other) = (bench.flush_of(1), bench.flush_of(2));
    let (first, second) = (bench.ios.pop_front().expect("one"), bench.ios.pop_front().expect("two"));
    bench.end(second);
    assert!(!bench.answered(other));
    let later = bench.flush_of(3);
    bench.fail(first);
    for flush in [one, other] {
        assert_eq!(bench.reply(flush).expect("answered").result, Err(IoError::Failed));
    }
    assert!(
        !bench.answered(later),
        "it began after the success that waited, so that one did not wait for it"
    );
    bench.settle();
    assert!(bench.answered(later));
}

/// A durable write may receive the error that reports the loss of another write.
#[test]
fn a_flush_waits_for_overlapping_durable_writes() {
    let mut bench = Bench::bare(Limits::default());
    let write = bench.request(Op::Write(Durability::Durable), 0, 4 * KIB);
    let flush = bench.flush_of(1);
    let (first, second) = (bench.ios.pop_front().expect("one"), bench.ios.pop_front().expect("two"));
    bench.end(second);
    assert!(!bench.answered(flush));
    bench.end(first);
    assert!(bench.answered(write) && bench.answered(flush));
}

/// Two flushes of one backing overlap: one receives the error, and the other reports success, which
/// hob does not trust.
#[test]
fn a_flush_beside_one_that_fails_is_not_believed() {
    let mut bench = Bench::bare(Limits::default());
    bench.write_alone(0, 4 * KIB);
    let (one, other) = (bench.flush_of(1), bench.flush_of(2));
    let (first, second) = (bench.ios.pop_front().expect("one"), bench.ios.pop_front().expect("two"));
    bench.fail(first);
    bench.end(second);
    for flush in [one, other] {
        assert_eq!(bench.reply(flush).expect("answered").result, Err(IoError::Failed));
    }
    assert_eq!(bench.flushed_by(1), Ok(()));
    assert_eq!(bench.flushed_by(2), Ok(()));
}

/// A change is acknowledged while a flush is in flight. The failure of that flush does not count as
/// a report about the change.
#[test]
fn a_flush_that_began_before_a_change_ended_does_not_report_its_loss() {
    let mut bench = Bench::bare(Limits::default());
    bench.write_alone(0, 4 * KIB);
    let early = bench.flush_of(1);
    let flush = bench.ios.pop_front().expect("the backing is flushed");
    bench.written_by(1);
    bench.fail(flush);
    assert_eq!(bench.reply(early).expect("answered").result, Err(IoError::Failed));
    assert_eq!(bench.flushed_by(1), Err(IoError::Failed), "the change may be lost");
    assert_eq!(bench.flushed_by(1), Ok(()));
}

/// A guest with two connections writes through one and flushes the other.
#[test]
fn a_flush_that_began_early_does_not_report_the_loss_of_another_sessions_change() {
    let mut bench = Bench::bare(Limits::default());
    bench.write_alone(0, 4 * KIB);
    let early = bench.flush_of(2);
    let flush = bench.ios.pop_front().expect("the backing is flushed");
    bench.written_by(1);
    bench.fail(flush);
    assert_eq!(bench.reply(early).expect("answered").result, Err(IoError::Failed));
    assert_eq!(bench.flushed_by(2), Err(IoError::Failed), "the change of session 1 may be lost");
    assert_eq!(bench.flushed_by(2), Ok(()));
}

#[test]
fn a_change_that_meets_a_loss_is_sent_again() {
    for op in [WRITE, Op::WriteZeroes(Durability::Volatile, crate::io::Zeroing::MayUnmap)] {
        let mut bench = Bench::cached(16, 4 * KIB);
        let change = bench.request(op, 0, 4 * KIB);
        let io = bench.only_io();
        bench.engine.handle_loss(bench.now, DISK);
        bench.end(io);
        assert!(!bench.answered(change));
        let again = bench.only_io();
        assert_eq!((again.op, again.offset, again.len), (io.op, io.offset, io.len));
        bench.end(again);
        assert_eq!(bench.reply(change).expect("answered").result, Ok(()));
    }
}

#[test]
fn a_change_that_meets_losses_again_and_again_fails() {
    let mut bench = Bench::bare(Limits::default());
    let write = bench.write(0, 4 * KIB);
    for _ in 0..=3 {
        assert!(!bench.answered(write));
        let io = bench.only_io();
        bench.engine.handle_loss(bench.now, DISK);
        bench.end(io);
    }
    assert_eq!(bench.reply(write).expect("answered").result, Err(IoError::Failed));
}

#[test]
fn a_durable_discard_that_meets_a_loss_is_done_again() {
    let mut bench = Bench::bare(Limits::default());
    let discard = bench.request(Op::Discard(Durability::Durable), 0, 4 * KIB);
    let change = bench.only_io();
    bench.end(change);
    let flush = bench.only_io();
    bench.engine.handle_loss(bench.now, DISK);
    bench.end(flush);
    let again = bench.only_io();
    assert_eq!(again.op, IoOp::Discard);
    bench.end(again);
    let flush = bench.only_io();
    assert_eq!(flush.op, IoOp::Flush);
    bench.end(flush);
    assert_eq!(bench.reply(discard).expect("answered").result, Ok(()));
}

/// The backing loses a destaged sector while a discard of a part of this sector is in flight. The
/// rest of the sector is destaged again.
#[test]
fn a_destaged_edge_that_is_lost_is_destaged_again() {
    let (mut bench, hangs) = destaged();
    let discard = bench.request(Op::Discard(Durability::Durable), 0, 512);
    let change = bench.until_backing(IoOp::Discard);
    assert_eq!(change.len, 512);
    bench.engine.handle_loss(bench.now, DISK);
    bench.end(change);
    let edge = bench.until_backing(PLAIN);
    assert_eq!(edge.len, 4 * KIB, "the whole sector first");
    bench.end(edge);
    let change = bench.until_backing(IoOp::Discard);
    assert_eq!(change.len, 512);
    bench.end(change);
    assert!(!bench.answered(discard), "the backing is flushed before flash forgets the sector");
    bench.end(hangs);
    bench.settle();
    assert_eq!(bench.reply(discard).expect("answered").result, Ok(()));
}

#[test]
fn clean_copies_of_changes_in_doubt_are_forgotten() {
    for persistent in [false, true] {
        let mut bench = match persistent {
            false => Bench::cached(16, 4 * KIB),
            true => Bench::persistent(4 * KIB, Mode::WriteThrough, lazy()),
        };
        bench.write_alone(0, 4 * KIB);
        bench.flush();
        bench.write_alone(64 * KIB, 4 * KIB);
        assert_eq!(bench.read_alone(64 * KIB, 4 * KIB), Outcome::Hit);
        bench.engine.handle_loss(bench.now, DISK);
        assert_eq!(
            bench.read_alone(64 * KIB, 4 * KIB),
            Outcome::MissFilled,
            "the backing says what is there"
        );
        assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit, "it was flushed");
    }
}

/// A loss affects more changes than the engine remembers individually. hob drops the cached copies
/// of these changes, and keeps cached data of other regions.
#[test]
fn many_changes_in_doubt_leave_the_rest_of_the_cache() {
    let mut bench = Bench::cached(4096, 4 * KIB);
    bench.write_alone(60 * MIB, 4 * KIB);
    bench.flush();
    for i in 0..1500 {
        bench.write_alone(i * 8 * KIB, 4 * KIB);
    }
    bench.engine.handle_loss(bench.now, DISK);
    for i in [0, 700, 1499] {
        assert_eq!(bench.read_alone(i * 8 * KIB, 4 * KIB), Outcome::MissFilled, "write {i}");
    }
    assert_eq!(bench.read_alone(60 * MIB, 4 * KIB), Outcome::Hit);
}

#[test]
fn a_fill_that_meets_a_loss_leaves_nothing_valid() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.write(0, 4 * KIB);
    let change = bench.only_io();
    bench.end(change);
    let fill = bench.only_io();
    assert!(is_flash(&fill));
    bench.engine.handle_loss(bench.now, DISK);
    bench.end(fill);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
}

#[test]
fn a_second_copy_that_meets_a_loss_is_not_valid() {
    let mut bench = mirrored(Copies::One);
    bench.change(CacheChange::Tune(Mode::WriteThrough, lazy(), Copies::One)).expect("at once");
    bench.write_alone(0, 4 * KIB);
    assert_eq!(bench.stats().sectors_valid, 1);
    bench.change(CacheChange::Tune(Mode::WriteThrough, lazy(), Copies::TwoOfAll)).expect("at once");
    let copy = loop {
        match bench.ios.pop_front() {
            Some(io) if (io.target, io.op) == (flash(1), PLAIN) => break io,
            Some(io) => bench.end(io),
            None => bench.wait_ms(100),
        }
        assert!(bench.now.0 < 60_000_000_000, "the missing copy is made");
    };
    bench.engine.handle_loss(bench.now, DISK);
    bench.end(copy);
    bench.settle();
    assert_eq!(bench.stats().sectors_valid, 0);
}

/// After dirty data is discarded, reads return the destaged data of the backing, which the backing
/// may still lose.
#[test]
fn a_clean_copy_of_what_a_discard_uncovered_is_forgotten_after_a_loss() {
    let (mut bench, flush) = destaged();
    let discard = bench.start_change(CacheChange::DiscardDirty(Discard::Told));
    bench.fail(flush);
    while let Some(io) = bench.ios.pop_front() {
        assert_ne!((io.target, io.op), (backing(), IoOp::Flush), "nothing becomes durable there");
        bench.end(io);
    }
    assert_eq!(bench.result(discard), Some(Ok(vec![])));
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
    bench.engine.handle_loss(bench.now, DISK);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
}

/// A change waits for a flush of the backing before it writes a new journal ring. Each failed flush
/// drops clean data, and these records do not become pages of the new ring: if they made the ring
/// valid, recovery would find it after the change has failed.
#[test]
fn a_change_that_waits_for_the_backing_writes_no_page_of_its_ring() {
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteThrough, lazy());
    // So many sectors are dropped that their records fill a page.
    bench.write_alone(0, 960 * KIB);
    let more = vec![DataSegment { place: segment(1, 0), ordinal: 1, seconds_only: false }];
    let grow = bench.start_change(CacheChange::Grow(more, Some(ring(2))));
    let mut flushes = 0;
    while bench.result(grow).is_none() {
        let io = bench.ios.pop_front().expect("the backing is flushed again");
        assert_eq!((io.target, io.op), (backing(), IoOp::Flush));
        flushes += 1;
        bench.wait_ms(10_000);
        bench.fail(io);
    }
    assert!(flushes > 2);
    bench.settle();
    assert_eq!(bench.result(grow), Some(Err(CommandError::BackingFailed)));
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled, "the old cache forgets it too");
}

/// The first flush of the backing before a change fails and drops clean data. The dump of the new
/// ring shows the cache without this data, so the ring has no records of the drops.
#[test]
fn a_new_ring_has_no_records_of_changes_before_its_dump() {
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteThrough, lazy());
    bench.write_alone(0, 960 * KIB);
    let more = vec![DataSegment { place: segment(1, 0), ordinal: 1, seconds_only: false }];
    let grow = bench.start_change(CacheChange::Grow(more, Some(ring(2))));
    let mut page_bytes = Vec::new();
    let mut flushes = 0;
    while let Some(io) = bench.ios.pop_front() {
        match (io.target == backing(), io.op) {
            (true, IoOp::Flush) => {
                flushes += 1;
                if flushes == 1 { bench.fail(io) } else { bench.end(io) }
            }
            (_, IoOp::WriteJournal) if bench.result(grow).is_none() => {
                page_bytes.push(io.len);
                bench.end(io);
            }
            _ => bench.end(io),
        }
    }
    assert!(bench.result(grow).is_some_and(|result| result.is_ok()) && flushes == 2);
    // One page dumps the frames, and one makes the ring valid.
    assert_eq!(page_bytes, [4 * KIB, 4 * KIB]);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
}

#[test]
fn a_bitmap_has_everything_after_a_loss() {
    let mut bench = Bench::bare(Limits::default());
    let granules = Granules::new(64 * MIB, 64 << 10).expect("sensible");
    let bitmap = Bitmap::recording("backup".into(), granules);
    bench.command(Command::Bitmap(BitmapChange::Add(Box::new(bitmap)))).expect("added");
    bench.write_alone(0, 4 * KIB);
    bench.engine.handle_loss(bench.now, DISK);
    assert_eq!(bench.engine.bitmaps(DISK)[0].granules.run(0, 64 * MIB), (64 * MIB, true));
}

/// While a flush of the backing is in flight, the number of destaged sectors is limited, whatever
/// its duration.
#[test]
fn a_flush_that_hangs_bounds_what_is_destaged() {
    let eager = Destage { start_permille: 0, stop_permille: 0, full_permille: 900, ..lazy() };
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, eager);
    let (mut hangs, mut destaged) = (None, 0);
    for round in 0..200u64 {
        bench.write(round * 4 * KIB, 4 * KIB);
        bench.request(Op::Flush, 0, 0);
        while let Some(io) = bench.ios.pop_front() {
            match (io.target, io.op) {
                (Target::Backing(_), IoOp::Flush) => hangs = Some(io),
                (Target::Backing(_), IoOp::Write(_)) => {
                    destaged += io.len / SECTOR_BYTES;
                    bench.end(io);
                }
                _ => bench.end(io),
            }
        }
    }
    // A sixteenth of the cache's 256 sectors in the flush, the same number waiting, and one more
    // transfer.
    assert!((16..=64).contains(&destaged), "{destaged}");
    bench.end(hangs.expect("the backing was flushed"));
    bench.settle();
    assert!(bench.dirty() < 100, "{}", bench.dirty());
    assert_eq!(bench.ios.iter().filter(|io| io.target == flash(0)).count(), 0);
}

/// A discard drops dirty data that guests believe to be durable. Each session that exists then gets
/// one failed flush. Later sessions never relied on the data.
#[test]
fn a_discard_of_dirty_data_is_told_to_every_session_there_is() {
    for (discard, told) in [(Discard::Told, Err(IoError::Failed)), (Discard::Silent, Ok(()))] {
        let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, lazy());
        bench.write_alone(0, 4 * KIB);
        assert_eq!(bench.flushed_by(1), Ok(()));
        let command = bench.start_change(CacheChange::DiscardDirty(discard));
        bench.settle();
        assert_eq!(bench.result(command), Some(Ok(vec![])));
        bench.engine.begin_session(DISK, SessionId(2));
        assert_eq!(bench.flushed_by(SessionId::DAEMON_BIT), Ok(()), "the daemon did it");
        assert_eq!(bench.flushed_by(1), told);
        assert_eq!((bench.flushed_by(1), bench.flushed_by(2)), (Ok(()), Ok(())));
    }
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, lazy());
    let command = bench.start_change(CacheChange::DiscardDirty(Discard::Told));
    bench.settle();
    assert_eq!(bench.result(command), Some(Ok(vec![])));
    assert_eq!(bench.flushed_by(1), Ok(()), "nothing was lost");
}

/// A guest that has not received the report of a loss receives it after it reconnects, even if its
/// disk was removed and added meanwhile.
#[test]
fn a_failure_follows_a_guest_that_connects_again() {
    let mut bench = Bench::bare(Limits::default());
    [1, 2].into_iter().for_each(|session| bench.engine.begin_session(DISK, SessionId(session)));
    [1, 2].into_iter().for_each(|session| bench.written_by(session));
    bench.engine.handle_loss(bench.now, DISK);
    assert_eq!(bench.flushed_by(1), Err(IoError::Failed));
    bench.engine.end_session(DISK, SessionId(1));
    bench.engine.end_session(DISK, SessionId(2));
    bench.engine.begin_session(DISK, SessionId(3));
    bench.engine.begin_session(DISK, SessionId(4));
    for session in [3, 4] {
        assert_eq!(bench.flushed_by(session), Err(IoError::Failed), "one of two was not told");
        assert_eq!(bench.flushed_by(session), Ok(()));
    }
    [3, 4].into_iter().for_each(|session| bench.written_by(session));
    bench.engine.handle_loss(bench.now, DISK);
    let removed = bench.start_command(Command::RemoveDisk);
    bench.settle();
    assert_eq!(bench.result(removed), Some(Ok(vec![])), "after a flush of the backing");
    assert!(bench.events.contains(&Event::FailuresOwed { disk: DISK, count: 2 }), "{:?}", bench.events);

    let mut bench = Bench::bare(Limits::default());
    bench.engine.owe_failures(DISK, 2);
    assert_eq!(bench.flushed_by(SessionId::DAEMON_BIT), Ok(()), "it is not the daemon's");
    [1, 2, 3].into_iter().for_each(|session| bench.engine.begin_session(DISK, SessionId(session)));
    // The first client connects and disconnects without a flush.
    bench.engine.end_session(DISK, SessionId(1));
    assert_eq!(bench.flushed_by(3), Err(IoError::Failed));
    assert_eq!(bench.flushed_by(3), Ok(()));
    assert_eq!(bench.flushed_by(2), Err(IoError::Failed));
    bench.engine.begin_session(DISK, SessionId(4));
    assert_eq!(bench.flushed_by(4), Ok(()));
}

/// After a restart the guests of a shared disk reconnect. One of these guests has not received the
/// report of a loss before the restart.
#[test]
fn each_session_that_may_be_the_untold_guests_is_told_once() {
    let mut bench = Bench::bare(Limits::default());
    bench.engine.owe_failures(DISK, 1);
    [1, 2].into_iter().for_each(|session| bench.engine.begin_session(DISK, SessionId(session)));
    for session in [1, 2] {
        assert_eq!(bench.flushed_by(session), Err(IoError::Failed));
        assert_eq!(bench.flushed_by(session), Ok(()));
    }
    bench.engine.begin_session(DISK, SessionId(3));
    assert_eq!(bench.flushed_by(3), Ok(()));
}

/// A guest receives one report for two failures: one from before a restart, and a new one.
#[test]
fn an_inherited_failure_and_a_new_one_are_told_together() {
    let mut bench = Bench::bare(Limits::default());
    bench.engine.owe_failures(DISK, 1);
    bench.engine.begin_session(DISK, SessionId(1));
    bench.written_by(1);
    bench.engine.handle_loss(bench.now, DISK);
    assert_eq!(bench.flushed_by(1), Err(IoError::Failed));
    assert_eq!(bench.events.last(), Some(&Event::FailuresOwed { disk: DISK, count: 0 }));
    bench.engine.begin_session(DISK, SessionId(2));
    assert_eq!(bench.flushed_by(2), Ok(()));
}

/// Clients that only read and flush connect and disconnect during an outage. The guest that wrote
/// receives the report, and no other guest afterwards.
#[test]
fn clients_that_changed_nothing_leave_no_failure_to_others() {
    let mut bench = Bench::bare(Limits::default());
    (1..=40).for_each(|session| bench.engine.begin_session(DISK, SessionId(session)));
    bench.written_by(1);
    bench.engine.handle_loss(bench.now, DISK);
    (2..=40).for_each(|session| bench.engine.end_session(DISK, SessionId(session)));
    assert_eq!(bench.flushed_by(1), Err(IoError::Failed));
    bench.engine.end_session(DISK, SessionId(1));
    bench.engine.begin_session(DISK, SessionId(41));
    assert_eq!(bench.flushed_by(41), Ok(()));
}

/// A guest that was disconnected at the time of the loss receives the report when it reconnects,
/// even if another guest was connected.
#[test]
fn a_guest_that_was_away_at_a_loss_is_told_when_it_connects_again() {
    let mut bench = Bench::bare(Limits::default());
    [1, 2].into_iter().for_each(|session| bench.engine.begin_session(DISK, SessionId(session)));
    [1, 2].into_iter().for_each(|session| bench.written_by(session));
    bench.engine.end_session(DISK, SessionId(1));
    bench.engine.handle_loss(bench.now, DISK);
    bench.engine.begin_session(DISK, SessionId(3));
    assert_eq!(bench.flushed_by(2), Err(IoError::Failed));
    assert_eq!((bench.flushed_by(3), bench.flushed_by(3)), (Err(IoError::Failed), Ok(())));
    // Data that was flushed before the guest disconnected is not lost.
    bench.engine.begin_session(DISK, SessionId(4));
    bench.written_by(4);
    assert_eq!(bench.flushed_by(4), Ok(()));
    bench.engine.end_session(DISK, SessionId(4));
    bench.written_by(2);
    bench.engine.handle_loss(bench.now, DISK);
    assert_eq!(bench.flushed_by(2), Err(IoError::Failed));
    bench.engine.begin_session(DISK, SessionId(5));
    assert_eq!(bench.flushed_by(5), Ok(()));
}

/// A guest gives up its connection and connects again, before hob learns that the first connection
/// has ended.
#[test]
fn a_guest_that_reconnects_before_its_old_session_ends_is_told() {
    let mut bench = Bench::bare(Limits::default());
    bench.engine.begin_session(DISK, SessionId(1));
    bench.written_by(1);
    bench.engine.handle_loss(bench.now, DISK);
    bench.engine.begin_session(DISK, SessionId(2));
    assert!(bench.engine.owes_failure(DISK, SessionId(2)));
    assert_eq!((bench.flushed_by(2), bench.flushed_by(2)), (Err(IoError::Failed), Ok(())));
    // The next connection of the guest flushes only after the old session has ended.
    bench.engine.begin_session(DISK, SessionId(3));
    bench.engine.end_session(DISK, SessionId(1));
    bench.written_by(3);
    assert_eq!((bench.flushed_by(3), bench.flushed_by(3)), (Err(IoError::Failed), Ok(())));
    assert_eq!(bench.flushed_by(2), Ok(()), "it was told before");
    bench.engine.begin_session(DISK, SessionId(4));
    assert_eq!(bench.flushed_by(4), Ok(()), "session 3 took over the report of session 1");
}

/// A guest disconnects while its flush is in flight, so it does not receive the reply to the flush.
#[test]
fn a_flush_of_a_disconnected_guest_is_no_report() {
    for reconnects_early in [true, false] {
        let mut bench = Bench::bare(Limits::default());
        bench.engine.begin_session(DISK, SessionId(1));
        bench.written_by(1);
        let flush = bench.flush_of(1);
        let io = bench.only_io();
        bench.engine.leave_session(DISK, SessionId(1));
        bench.fail(io);
        assert_eq!(bench.reply(flush).expect("answered").result, Err(IoError::Failed));
        if reconnects_early {
            bench.engine.begin_session(DISK, SessionId(2));
        }
        bench.engine.end_session(DISK, SessionId(1));
        if !reconnects_early {
            bench.engine.begin_session(DISK, SessionId(2));
        }
        bench.written_by(2);
        assert_eq!((bench.flushed_by(2), bench.flushed_by(2)), (Err(IoError::Failed), Ok(())));
        assert_eq!(bench.engine.failures_owed(DISK), 0);
    }
}

/// A session that begins while another session has not received its report gets a report too. The
/// other session and disconnected guests still receive their own reports.
#[test]
fn a_session_that_is_told_early_takes_no_report_from_others() {
    let mut bench = Bench::bare(Limits::default());
    bench.engine.begin_session(DISK, SessionId(1));
    bench.written_by(1);
    bench.engine.handle_loss(bench.now, DISK);
    bench.engine.begin_session(DISK, SessionId(2));
    assert_eq!(bench.flushed_by(2), Err(IoError::Failed));
    assert_eq!(bench.engine.failures_owed(DISK), 1, "session 1 was not told");
    bench.engine.end_session(DISK, SessionId(1));
    bench.engine.begin_session(DISK, SessionId(3));
    assert_eq!(bench.flushed_by(3), Err(IoError::Failed));
    assert_eq!(bench.engine.failures_owed(DISK), 0);
}

/// A guest has not received its report of a loss. A backup program connects before the guest
/// disconnects, and flushes afterwards. Its report does not replace the guest's report.
#[test]
fn a_session_that_only_reads_takes_no_report_from_a_guest_that_disconnects_later() {
    let mut bench = Bench::bare(Limits::default());
    bench.engine.begin_session(DISK, SessionId(1));
    bench.written_by(1);
    bench.engine.handle_loss(bench.now, DISK);
    bench.engine.begin_session(DISK, SessionId(2));
    bench.engine.end_session(DISK, SessionId(1));
    assert_eq!(bench.flushed_by(2), Err(IoError::Failed));
    bench.engine.begin_session(DISK, SessionId(3));
    assert_eq!((bench.flushed_by(3), bench.flushed_by(3)), (Err(IoError::Failed), Ok(())));
    assert_eq!(bench.engine.failures_owed(DISK), 0);
}
