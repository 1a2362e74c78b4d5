//! Zeroes and discards under write-back: which of them flash accepts.

use super::write_back::{VOLATILE, backing, flash};
use super::*;
use crate::io::{CopyEnd, Zeroing};

fn zeroes(durability: Durability) -> Op {
    Op::WriteZeroes(durability, Zeroing::MayUnmap)
}

/// Issue: "Zeroes … become journal entries": small ones are data.
#[test]
fn small_zeroes_complete_in_flash() {
    for zeroing in
        [Zeroing::MayUnmap, Zeroing::KeepAllocated, Zeroing::FastMayUnmap, Zeroing::FastKeepAllocated]
    {
        let mut bench = Bench::write_back();
        let id = bench.request(Op::WriteZeroes(Durability::Volatile, zeroing), 8 * KIB, 64 * KIB);
        let copy = bench.copies.pop().expect("zeroes in a buffer");
        assert_eq!((copy.from, copy.len), (CopyEnd::Zeroes, 64 << 10));
        let io = bench.next(flash(0), VOLATILE);
        let slice = io.slice.expect("payload");
        assert_eq!(copy.to, CopyEnd::Buffer { id: slice.id, offset: slice.offset }, "written from there");
        assert_eq!((io.len, bench.outcome(id)), (64 * KIB, Outcome::WriteBack));
        assert_eq!((bench.dirty(), bench.ios.len()), (16, 0));
        assert_eq!(bench.read_alone(8 * KIB, 64 * KIB), Outcome::Hit);
    }
}

/// Each of many requests uses a part of the buffer with zeroes, and returns it.
#[test]
fn zeroes_give_their_buffer_back() {
    let mut bench = Bench::write_back();
    for round in 0..40 {
        let first = bench.request(zeroes(Durability::Volatile), 0, 64 * KIB);
        let second = bench.request(zeroes(Durability::Volatile), 64 * KIB, 64 * KIB);
        bench.settle();
        assert_eq!(bench.outcome(first), Outcome::WriteBack, "round {round}");
        assert_eq!(bench.outcome(second), Outcome::WriteBack, "round {round}");
    }
}

#[test]
fn durable_zeroes_are_answered_when_they_are_committed() {
    let mut bench = Bench::write_back();
    let id = bench.request(zeroes(Durability::Durable), 0, 4 * KIB);
    bench.next(flash(0), VOLATILE);
    assert!(!bench.answered(id));
    bench.settle();
    assert_eq!(bench.outcome(id), Outcome::WriteBack);
}

#[test]
fn zeroes_that_flash_does_not_take_go_to_the_backing() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    let id = bench.request(zeroes(Durability::Volatile), 0, 8 * KIB);
    let mut changes = vec![];
    while let Some(io) = bench.ios.pop_front() {
        match (io.target, io.op) {
            (Target::Flash(DeviceId(0)), VOLATILE) => bench.fail(io),
            (target, op) => {
                changes.extend((target == backing()).then_some(op));
                bench.end(io);
            }
        }
    }
    assert_eq!(changes, [IoOp::WriteZeroes(Zeroing::MayUnmap), IoOp::Flush]);
    assert_eq!((bench.outcome(id), bench.dirty()), (Outcome::BypassZeroing, 0));
    let again = bench.request(zeroes(Durability::Volatile), 0, 8 * KIB);
    bench.settle();
    assert_eq!(bench.outcome(again), Outcome::WriteBack, "the buffer was given back");
}

/// The backing can deallocate long ranges, and a discard promises more than flash could keep.
#[test]
fn long_zeroes_parts_of_sectors_and_discards_go_to_the_backing() {
    for (op, offset, len) in [
        (zeroes(Durability::Volatile), 0, 64 * KIB + 4 * KIB),
        (zeroes(Durability::Volatile), 512, 4 * KIB),
        (Op::Discard(Durability::Volatile), 0, 4 * KIB),
    ] {
        let mut bench = Bench::write_back();
        let id = bench.request(op, offset, len);
        bench.settle();
        assert_eq!((bench.outcome(id), bench.dirty()), (Outcome::BypassZeroing, 0), "{op:?} {offset} {len}");
    }
}
