//! Guests overwrite dirty blocks while a transfer writes these blocks to the backing.

use super::write_back::{backing, lazy};
use super::*;
use crate::command::{Destage, Mode};

const PLAIN: IoOp = IoOp::Write(Durability::Volatile);

/// Returns a write-back cache that destages at once. Its only dirty sector is being written to the
/// backing.
fn destaging() -> (Bench, Io) {
    let eager = Destage { start_permille: 0, stop_permille: 0, ..lazy() };
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, eager);
    bench.write(0, 4 * KIB);
    let write = bench.until_backing(PLAIN);
    (bench, write)
}

#[test]
fn flash_takes_overwrites_while_the_backing_does_not_answer() {
    let (mut bench, hangs) = destaging();
    for _ in 0..3 {
        assert_eq!(bench.write_alone(0, 4 * KIB), Outcome::WriteBack);
        assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
        let flush = bench.request(Op::Flush, 0, 0);
        bench.settle();
        assert_eq!(bench.outcome(flush), Outcome::FlushCommitted);
        bench.wait_ms(5000);
        assert!(bench.ios.iter().all(|io| io.target != backing()), "one write of a sector at a time");
    }
    bench.end(hangs);
    assert_eq!(bench.dirty(), 1, "the backing has the first version");
    let again = bench.until_backing(PLAIN);
    assert_eq!((again.offset, again.len), (0, 4 * KIB));
    bench.end(again);
    let flush = bench.until_backing(IoOp::Flush);
    bench.end(flush);
    assert_eq!(bench.dirty(), 0);
}

#[test]
fn an_overwrite_of_a_transferred_neighbour_leaves_the_rest_clean() {
    let eager = Destage { start_permille: 0, stop_permille: 0, ..lazy() };
    let mut bench = Bench::persistent(16 * KIB, Mode::WriteBack, eager);
    bench.write(0, 16 * KIB);
    let write = bench.until_backing(PLAIN);
    assert_eq!(write.len, 16 * KIB);
    assert_eq!(bench.write_alone(4 * KIB, 4 * KIB), Outcome::WriteBack);
    bench.end(write);
    let again = bench.until_backing(PLAIN);
    assert_eq!((again.offset, again.len), (4 * KIB, 4 * KIB));
}

#[test]
fn a_change_of_the_backing_waits_for_the_transfer() {
    let (mut bench, hangs) = destaging();
    bench.request(Op::Discard(Durability::Volatile), 0, 4 * KIB);
    bench.settle();
    bench.wait_ms(5000);
    assert!(bench.ios.is_empty(), "{:?}", bench.ios);
    bench.end(hangs);
    let discard = bench.until_backing(IoOp::Discard);
    assert_eq!(discard.offset, 0);
}
