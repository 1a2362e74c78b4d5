//! Zeroes and discards under write-back: which of them flash accepts.

use super::write_back::{VOLATILE, backing, flash, lazy};
use super::*;
use crate::command::Mode;
use crate::io::{CopyEnd, Zeroing};

fn zeroes(durability: Durability) -> Op {
    Op::WriteZeroes(durability, Zeroing::MayUnmap)
}

impl Bench {
    /// Completes the commits that an overwrite of dirty data needs. Returns the overwrite.
    fn merged_write(&mut self) -> Io {
        loop {
            let io = self.ios.pop_front().expect("some I/O");
            if (io.target, io.op) == (flash(0), VOLATILE) {
                return io;
            }
            assert_ne!(io.target, backing());
            self.end(io);
        }
    }
}

/// Issue: "Zeroes … become journal entries": hob writes small zero writes to flash as data.
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

/// Long zero writes are written from a buffer of 64 KiB.
#[test]
fn long_zeroes_complete_in_flash() {
    let mut bench = Bench::write_back();
    let id = bench.request(zeroes(Durability::Volatile), 4 * KIB, 220 * KIB);
    let copy = bench.copies.pop().expect("zeroes in a buffer");
    assert_eq!((copy.from, copy.len, bench.copies.len()), (CopyEnd::Zeroes, 64 << 10, 0));
    let lens: Vec<u64> = bench.ios.iter().map(|io| io.len / KIB).collect();
    assert_eq!(lens, [64, 64, 64, 28]);
    for io in &bench.ios {
        let slice = io.slice.expect("payload");
        assert_eq!((io.target, copy.to), (flash(0), CopyEnd::Buffer { id: slice.id, offset: slice.offset }));
    }
    let offsets: Vec<u64> = bench.ios.iter().map(|io| io.offset).collect();
    assert!(offsets.windows(2).all(|pair| pair[1] - pair[0] == 64 * KIB), "{offsets:?}");
    bench.settle();
    assert_eq!((bench.outcome(id), bench.dirty()), (Outcome::WriteBack, 55));
    assert_eq!(bench.read_alone(4 * KIB, 220 * KIB), Outcome::Hit);
}

/// Zeroes of parts of sectors are merged with the rest of the sectors.
#[test]
fn zeroes_of_parts_of_sectors_complete_in_flash() {
    let mut bench = Bench::write_back();
    bench.engine.limits.incomplete_sectors_max = 0;
    bench.write_alone(8 * KIB, 4 * KIB);
    bench.copies.clear();
    let id = bench.request(zeroes(Durability::Volatile), 4 * KIB + 512, 4 * KIB);
    let io = bench.next(backing(), IoOp::Read);
    assert_eq!((io.offset, io.len), (4 * KIB, 4 * KIB), "the first sector is not cached");
    bench.next(flash(0), IoOp::Read);
    let io = bench.merged_write();
    bench.end(io);
    // The two sectors are in frames that are not adjacent.
    bench.settle();
    let start = io.slice.expect("payload").offset;
    let copies: Vec<_> =
        bench.copies.iter().map(|copy| (copy.from == CopyEnd::Zeroes, copy.to, copy.len)).collect();
    let to =
        |offset: u64| CopyEnd::Buffer { id: io.slice.expect("payload").id, offset: start + offset as u32 };
    assert_eq!(copies, [(true, to(0), 8 << 10), (false, to(0), 512), (false, to(4 * KIB + 512), 3584)]);
    assert_eq!((bench.outcome(id), bench.dirty(), bench.ios.len()), (Outcome::WriteBack, 2, 0));
}

/// The rest of a dirty sector may be only in the request's buffer, so hob sends this rest to the
/// backing with the zeroes.
#[test]
fn merged_zeroes_that_flash_does_not_take_go_to_the_backing_as_data() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    let id = bench.request(zeroes(Durability::Volatile), 512, 512);
    bench.next(flash(0), IoOp::Read);
    let io = bench.merged_write();
    let slice = io.slice;
    bench.fail(io);
    let mut changes = vec![];
    while let Some(io) = bench.ios.pop_front() {
        changes.extend((io.target == backing()).then_some((io.op, io.len, io.slice)));
        bench.end(io);
    }
    assert_eq!(changes, [(VOLATILE, 4 * KIB, slice), (IoOp::Flush, 0, None)]);
    assert_eq!((bench.reply(id).expect("answered").result, bench.dirty()), (Ok(()), 0));
}

/// Without a free buffer, the partly covered dirty sector is destaged first.
#[test]
fn zeroes_without_a_buffer_go_to_the_backing() {
    let mut bench = Bench::bare(Limits::default());
    bench.engine.lend(BufferId(1 << 20), 4 << 10);
    bench.make_persistent(4 * KIB, Mode::WriteBack, lazy());
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let id = bench.request(zeroes(Durability::Volatile), 512, 512);
    let mut changes = vec![];
    while let Some(io) = bench.ios.pop_front() {
        changes.extend((io.target == backing()).then_some((io.op, io.len)));
        bench.end(io);
    }
    let zeroes = IoOp::WriteZeroes(Zeroing::MayUnmap);
    assert_eq!(changes, [(VOLATILE, 4 * KIB), (zeroes, 512), (IoOp::Flush, 0)]);
    assert_eq!((bench.outcome(id), bench.dirty()), (Outcome::BypassZeroing, 0));
}

/// The backing can deallocate very long ranges and discarded ones.
#[test]
fn very_long_zeroes_and_discards_go_to_the_backing() {
    for (op, offset, len) in [
        (zeroes(Durability::Volatile), 0, 8 * MIB + 4 * KIB),
        // More than a quarter of the cache.
        (zeroes(Durability::Volatile), 0, 260 * KIB),
        (zeroes(Durability::Volatile), 512, 64 * KIB + 512),
        (Op::Discard(Durability::Volatile), 0, 4 * KIB),
    ] {
        let mut bench = Bench::write_back();
        let id = bench.request(op, offset, len);
        bench.settle();
        assert_eq!((bench.outcome(id), bench.dirty()), (Outcome::BypassZeroing, 0), "{op:?} {offset} {len}");
    }
}
