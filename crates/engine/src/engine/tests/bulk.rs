//! Bulk writes: which of them bypass the cache, and what happens if the backing fails them.

use super::write_back::{VOLATILE, backing, lazy};
use super::*;
use crate::command::{Destage, Mode};

const STEP: u64 = 64 * KIB;

impl Bench {
    /// Returns a cache of 1 MiB with 128 KiB of dirty data. The destager runs if this is more than
    /// `start_permille` of the cache. The destager's writes to the backing do not end.
    fn dirty_cache(start_permille: u16) -> Bench {
        let mut bench = Bench::bare(Limits { bulk_run_bytes_min: 2 * STEP, ..Limits::default() });
        bench.engine.lend(BufferId(1 << 20), 1 << 20);
        bench.engine.lend(BufferId(2 << 20), 1 << 20);
        let destage = Destage { start_permille, stop_permille: 0, ..lazy() };
        bench.make_persistent(4 * KIB, Mode::WriteBack, destage);
        let writes: Vec<_> = (0..16).map(|at| bench.write(32 * MIB + at * 16 * KIB, 8 * KIB)).collect();
        bench.end_flash();
        assert!(writes.iter().all(|write| bench.outcome(*write) == Outcome::WriteBack));
        bench
    }

    /// Completes I/O until only I/O of the backing is in flight.
    fn end_flash(&mut self) {
        while let Some(at) = self.ios.iter().position(|io| io.target != backing()) {
            let io = self.ios.remove(at).expect("just found");
            self.end(io);
        }
    }

    /// Writes part `number` of a run. Returns the I/O of this write on the backing, if the write
    /// does not go to flash.
    fn bulk(&mut self, number: u64) -> (RequestId, Option<Io>) {
        let write = self.write(number * STEP, STEP);
        self.end_flash();
        let at = self.ios.iter().position(|io| io.len == STEP && io.op == VOLATILE);
        let io = at.map(|at| self.ios.remove(at).expect("just found"));
        assert_eq!(io.is_none(), self.answered(write));
        (write, io)
    }
}

#[test]
fn a_long_run_goes_past_the_cache_while_too_much_is_dirty() {
    let mut bench = Bench::dirty_cache(60);
    assert_eq!(bench.bulk(0).1, None, "not yet long");
    let (write, io) = bench.bulk(1);
    bench.end(io.expect("on the backing"));
    assert_eq!(bench.outcome(write), Outcome::WriteCopied, "free frames take a copy");
    bench.end_flash();
    assert_eq!(bench.read_alone(STEP, STEP), Outcome::Hit);
    let mut calm = Bench::dirty_cache(500);
    (0..4).for_each(|number| assert_eq!(calm.bulk(number).1, None, "flash has room"));
}

#[test]
fn a_flush_of_the_daemon_begins_no_new_run() {
    let mut bench = Bench::dirty_cache(60);
    bench.bulk(0);
    bench.request(Op::DaemonFlush, 0, 0);
    bench.end_flash();
    assert!(bench.bulk(1).1.is_some(), "the guest's run is long");
}

#[test]
fn a_flush_after_a_bulk_write_waits_for_the_backing_and_begins_a_new_run() {
    let mut bench = Bench::dirty_cache(60);
    bench.bulk(0);
    let (_, io) = bench.bulk(1);
    bench.end(io.expect("on the backing"));
    let flush = bench.request(Op::Flush, 0, 0);
    bench.end_flash();
    assert!(!bench.answered(flush));
    let at = bench.ios.iter().position(|io| io.op == IoOp::Flush).expect("a flush of the backing");
    let io = bench.ios.remove(at).expect("just found");
    bench.end(io);
    assert!(bench.answered(flush));
    assert_eq!(bench.bulk(2).1, None, "the run is short again");
    assert!(bench.bulk(3).1.is_some());
}

#[test]
fn durable_and_dirty_writes_and_broken_runs_stay_in_flash() {
    let mut bench = Bench::dirty_cache(60);
    bench.bulk(0);
    let fua = bench.request(Op::Write(Durability::Durable), STEP, STEP);
    bench.end_flash();
    assert_eq!(bench.outcome(fua), Outcome::WriteBack);
    let mut again = Bench::dirty_cache(60);
    (0..2).for_each(|_| assert_eq!(again.bulk(0).1, None));
    assert_eq!(again.bulk(1).1.map(|io| io.target), Some(backing()));
    let mut dirty = Bench::dirty_cache(60);
    dirty.write(STEP + 4 * KIB, 4 * KIB);
    dirty.end_flash();
    dirty.bulk(0);
    assert_eq!(dirty.bulk(1).1, None, "one of its sectors is dirty");
}

/// While flash has space, the guest must not see an outage of the backing.
#[test]
fn a_bulk_write_that_the_backing_fails_is_written_to_flash() {
    let mut bench = Bench::dirty_cache(60);
    bench.bulk(0);
    let (write, io) = bench.bulk(1);
    bench.fail(io.expect("on the backing"));
    bench.end_flash();
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
    let flush = bench.request(Op::Flush, 0, 0);
    bench.end_flash();
    assert!(bench.answered(flush), "nothing of it is on the backing alone");
}

#[test]
fn no_bulk_write_follows_one_that_the_backing_does_not_answer() {
    let mut bench = Bench::dirty_cache(60);
    bench.bulk(0);
    let (_, unanswered) = bench.bulk(1);
    assert!(unanswered.is_some());
    assert!(bench.bulk(2).1.is_some(), "it has been silent for a moment only");
    bench.now = bench.now + 600_000_000;
    assert_eq!(bench.bulk(3).1, None);
    bench.end(unanswered.expect("checked"));
    assert!(bench.bulk(4).1.is_some(), "it answers again");
}

#[test]
fn a_pause_after_answered_bulk_writes_is_no_silence_of_the_backing() {
    let mut bench = Bench::dirty_cache(60);
    bench.bulk(0);
    let (_, io) = bench.bulk(1);
    bench.end(io.expect("on the backing"));
    bench.end_flash();
    bench.now = bench.now + 600_000_000;
    assert!(bench.bulk(2).1.is_some());
}
