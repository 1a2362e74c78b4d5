//! Changes: first the backing, then flash, and never old data.

use super::*;
use crate::io::Zeroing;

/// SYSTEMS §1: "Write-through: completed to the guest only when the backing disk has the data; the
/// copy in flash is written asynchronously."
#[test]
fn a_write_is_acknowledged_by_the_backing_and_copied_afterwards() {
    let mut bench = Bench::cached(16, 4 * KIB);
    let write = bench.write(0, 8 * KIB);
    let io = bench.only_io();
    assert_eq!((io.target, io.op), (Target::Backing(DISK), IoOp::Write(Durability::Volatile)));
    assert_eq!(bench.reply(write), None, "not before the backing has it");
    bench.end(io);
    assert_eq!(bench.outcome(write), Outcome::WriteCopied, "before flash has it");
    let copy = bench.only_io();
    assert!(is_flash(&copy) && copy.len == 8 * KIB);
    assert_eq!(bench.released, []);
    bench.end(copy);
    assert_eq!(bench.released.len(), 1);
    assert_eq!(bench.read_alone(0, 8 * KIB), Outcome::Hit);
}

/// Cached data of the range is invalid as soon as the write begins, whatever its result is.
#[test]
fn a_write_that_fails_leaves_nothing_in_flash() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 8 * KIB);
    let write = bench.write(0, 4 * KIB);
    let io = bench.only_io();
    bench.end_with(io, Err(IoError::NoSpace), &[]);
    let reply = bench.reply(write).unwrap();
    assert_eq!((reply.result, reply.outcome), (Err(IoError::NoSpace), Outcome::BackingError));
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
    assert_eq!(bench.read_alone(4 * KIB, 4 * KIB), Outcome::Hit);
}

/// Issue: "a write that overlaps a fill in flight wins".
#[test]
fn a_write_that_overlaps_a_fill_wins() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read(0, 8 * KIB);
    let fetch = bench.only_io();
    bench.end(fetch);
    let fill = bench.only_io();
    let write = bench.write(4 * KIB, 4 * KIB);
    assert_eq!(bench.ios.len(), 0, "the write waits for the fill");
    bench.end(fill);
    let io = bench.only_io();
    assert_eq!(io.target, Target::Backing(DISK));
    assert_eq!(bench.stats().sectors_valid, 1, "the overwritten sector is invalid from here on");
    let read = bench.read(4 * KIB, 4 * KIB);
    assert_eq!(bench.ios.len(), 0, "the read waits for the write");
    bench.end(io);
    assert_eq!(bench.outcome(write), Outcome::WriteCopied);
    bench.settle();
    assert_eq!(bench.outcome(read), Outcome::Hit);
}

/// Issue: "a read never sees a torn mixture": a read waits for an overlapping write, and a write
/// for an overlapping read.
#[test]
fn a_read_and_a_write_that_overlap_take_turns() {
    for cached in [true, false] {
        let mut bench = if cached { Bench::cached(16, 4 * KIB) } else { Bench::bare(Limits::default()) };
        bench.read(0, 8 * KIB);
        bench.write(4 * KIB, 8 * KIB);
        bench.read(8 * KIB, 8 * KIB);
        let mut order = vec![];
        while let Some(io) = bench.ios.pop_front() {
            assert!(bench.ios.iter().all(is_flash), "one at a time on the backing");
            if !is_flash(&io) {
                order.push((io.op, io.offset));
            }
            bench.end(io);
        }
        let write = IoOp::Write(Durability::Volatile);
        assert_eq!(order, [(IoOp::Read, 0), (write, 4 * KIB), (IoOp::Read, 8 * KIB)]);
    }
}

/// Sectors that a write covers in part become invalid; sectors that it covers completely are
/// copied.
#[test]
fn a_write_of_parts_of_sectors_invalidates_these() {
    let mut bench = Bench::cached(16, 16 * KIB);
    bench.read_alone(0, 16 * KIB);
    let write = bench.write(2 * KIB, 8 * KIB);
    let io = bench.only_io();
    assert_eq!((io.offset, io.len, io.slice.unwrap().offset), (2 * KIB, 8 * KIB, 2048));
    bench.end(io);
    let copy = bench.only_io();
    assert_eq!((copy.offset, copy.len, copy.slice.unwrap().offset), (4 * KIB, 4 * KIB, 4096));
    bench.end(copy);
    assert_eq!(bench.outcome(write), Outcome::WriteNotCopied, "not all of it");
    assert_eq!(bench.stats().sectors_valid, 2, "the whole one, and the one not written to");
    assert_eq!(bench.read_alone(4 * KIB, 4 * KIB), Outcome::Hit);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
    assert_eq!(bench.write_alone(512, 512), Outcome::WriteNotCopied);
    assert_eq!(bench.read_alone(0, 512), Outcome::MissFilled);
}

/// Issue: "FLUSH and FUA reach the backing's media before they are acknowledged".
#[test]
fn flush_and_fua_reach_the_backing_first() {
    let mut bench = Bench::cached(16, 4 * KIB);
    let flush = bench.request(Op::Flush, 0, 0);
    let io = bench.only_io();
    assert_eq!((io.target, io.op, io.len, io.slice), (Target::Backing(DISK), IoOp::Flush, 0, None));
    assert_eq!(bench.reply(flush), None);
    bench.end(io);
    assert_eq!(bench.outcome(flush), Outcome::BypassFlush);
    let write = bench.request(Op::Write(Durability::Durable), 0, 4 * KIB);
    let io = bench.only_io();
    assert_eq!(io.op, IoOp::Write(Durability::Durable));
    bench.end(io);
    assert_eq!(bench.outcome(write), Outcome::WriteCopied);
    bench.settle();
    for op in [Op::Discard(Durability::Durable), Op::WriteZeroes(Durability::Durable, Zeroing::MayUnmap)] {
        let id = bench.request(op, 0, 4 * KIB);
        let change = bench.only_io();
        bench.end(change);
        assert_eq!(bench.reply(id), None, "{op:?} is not durable yet");
        let flush = bench.only_io();
        assert_eq!(flush.op, IoOp::Flush);
        bench.end(flush);
        assert_eq!(bench.outcome(id), Outcome::BypassZeroing);
    }
}

/// A failed flush is an error of the backing.
#[test]
fn a_failed_flush_is_reported_to_the_guest() {
    let mut bench = Bench::cached(16, 4 * KIB);
    for error in [IoError::Failed, IoError::Unsupported] {
        let flush = bench.request(Op::Flush, 0, 0);
        let io = bench.only_io();
        bench.end_with(io, Err(error), &[]);
        let reply = bench.reply(flush).unwrap();
        assert_eq!((reply.result, reply.outcome), (Err(error), Outcome::BackingError));
    }
}

/// Issue: "Discard and write-zeroes invalidate or zero correctly".
#[test]
fn discard_and_zeroes_invalidate() {
    for op in
        [Op::Discard(Durability::Volatile), Op::WriteZeroes(Durability::Volatile, Zeroing::KeepAllocated)]
    {
        let mut bench = Bench::cached(16, 4 * KIB);
        bench.read_alone(0, 16 * KIB);
        let id = bench.request(op, 4 * KIB, 8 * KIB);
        let io = bench.only_io();
        assert_eq!((io.target, io.offset, io.len, io.slice), (Target::Backing(DISK), 4096, 8192, None));
        assert_eq!(bench.stats().sectors_valid, 2);
        bench.end(io);
        assert_eq!(bench.outcome(id), Outcome::BypassZeroing);
        assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
        assert_eq!(bench.read_alone(4 * KIB, 4 * KIB), Outcome::MissFilled);
        assert_eq!(bench.read_alone(12 * KIB, 4 * KIB), Outcome::Hit);
    }
}

/// NBD's FAST_ZERO: the reply that zeroing would not be fast is not an error of the backing.
#[test]
fn a_fast_zero_may_be_declined() {
    let mut bench = Bench::cached(16, 4 * KIB);
    let op = Op::WriteZeroes(Durability::Durable, Zeroing::FastMayUnmap);
    let id = bench.request(op, 0, 4 * KIB);
    let io = bench.only_io();
    assert_eq!(io.op, IoOp::WriteZeroes(Zeroing::FastMayUnmap));
    bench.end_with(io, Err(IoError::Unsupported), &[]);
    let reply = bench.reply(id).unwrap();
    assert_eq!((reply.result, reply.outcome), (Err(IoError::Unsupported), Outcome::BypassZeroing));
}
