//! Recovered caches without evidence that the backing is unchanged: clean sectors are compared
//! before they are served.

use super::recovering::{Left, enable};
use super::write_back::{backing, flash, ring};
use super::*;
use crate::command::Mode;

/// Returns a cache with clean blocks 0 to 3, which are unverified, and with dirty blocks 4 and 5.
fn recovered(verify_bytes_per_s: u64) -> Bench {
    let limits = Limits { verify_bytes_per_s, scrub_frames_per_s: 0, ..Limits::default() };
    let mut bench = Bench::bare(limits);
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    let (_, mut recovered) = Left::by(Mode::WriteBack).recover();
    recovered.distrust_clean();
    assert_eq!(recovered.sectors_unverified(), 4);
    let command = bench.start_change(enable(2, Mode::WriteBack, Some(recovered)));
    while let Some(at) = bench.ios.iter().position(|io| io.target != backing() || io.op != IoOp::Read) {
        let io = bench.ios.remove(at).expect("just found");
        bench.end(io);
    }
    assert_eq!(bench.result(command), Some(Ok(vec![])));
    // The comparison waits until the change of the cache has ended.
    bench.wait_ms(100);
    bench
}

/// Commits the journal.
fn commit(bench: &mut Bench) {
    bench.wait_ms(1100);
    bench.settle();
}

/// Returns the number of unverified, verified and stale sectors.
fn figures(bench: &Bench) -> (u64, u64, u64) {
    let stats = bench.stats();
    (stats.sectors_unverified, stats.sectors_verified, stats.sectors_stale)
}

/// Promise 2 of docs/ARCHITECTURE.md: hob never serves stale data from flash.
#[test]
fn unverified_sectors_are_read_from_the_backing_once() {
    let mut bench = recovered(0);
    assert!(!bench.engine.would_read_flash(DISK, 0, 4 * KIB), "nor into a guest's memory");
    let read = bench.read(0, 12 * KIB);
    let io = bench.only_io();
    assert_eq!((io.target, io.op), (backing(), IoOp::Read));
    assert!(bench.engine.wants_sums(io.id).is_some());
    bench.end_with(io, Ok(()), &[SUM; 3]);
    assert_eq!(bench.outcome(read), Outcome::BypassUnverified);
    assert!(bench.ios.is_empty(), "flash has it already");
    assert_eq!(figures(&bench), (1, 3, 0));
    assert_eq!(bench.read_alone(0, 12 * KIB), Outcome::Hit);
    // A partly verified sector is not verified.
    assert_eq!(bench.read_alone(8 * KIB, 8 * KIB), Outcome::BypassUnverified);
}

#[test]
fn a_sector_that_differs_is_dropped_and_filled_again() {
    let mut bench = recovered(0);
    let read = bench.read(0, 16 * KIB);
    let io = bench.only_io();
    bench.end_with(io, Ok(()), &[SUM, SUM + 1, SUM, SUM]);
    assert_eq!(bench.outcome(read), Outcome::BypassUnverified);
    let fill = bench.next(flash(0), IoOp::Write(Durability::Volatile));
    assert_eq!((fill.offset, fill.len), (4 * KIB, 4 * KIB));
    assert_eq!(bench.read_alone(0, 16 * KIB), Outcome::Hit);
    assert_eq!(figures(&bench), (1, 3, 1), "a crash could bring it back");
    commit(&mut bench);
    assert_eq!(figures(&bench), (0, 3, 1));
}

/// A read that fails, or whose checksums are unknown, verifies no sector.
#[test]
fn what_was_not_compared_stays_unverified() {
    let mut bench = recovered(0);
    bench.read(0, 4 * KIB);
    let io = bench.only_io();
    bench.fail(io);
    bench.read(0, 4 * KIB);
    let io = bench.only_io();
    bench.end_with(io, Ok(()), &[]);
    assert_eq!(figures(&bench), (4, 0, 0));
}

#[test]
fn dirty_data_is_served_and_a_write_needs_no_comparison() {
    let mut bench = recovered(0);
    assert_eq!(bench.read_alone(16 * KIB, 8 * KIB), Outcome::Hit);
    assert_eq!(bench.write_alone(0, 4 * KIB), Outcome::WriteBack);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
    assert_eq!(figures(&bench), (3, 0, 0));
    // If some sectors are dirty and some are unverified, the backing's data is compared before the
    // dirty data replaces it in the buffer.
    let read = bench.read(0, 8 * KIB);
    let io = bench.only_io();
    bench.end_with(io, Ok(()), &[SUM + 1, SUM]);
    bench.settle();
    assert_eq!((bench.outcome(read), figures(&bench)), (Outcome::BypassUnverified, (2, 1, 0)));
}

#[test]
fn the_rest_is_compared_in_the_background_in_one_read() {
    let mut bench = recovered(4 * MIB);
    let io = bench.only_io();
    assert_eq!((io.target, io.op, io.offset, io.len), (backing(), IoOp::Read, 0, 16 * KIB));
    // The backing hangs: verified data is served from flash.
    assert_eq!(bench.read_alone(16 * KIB, 4 * KIB), Outcome::Hit);
    bench.end_with(io, Ok(()), &[SUM, SUM, SUM, SUM + 1]);
    commit(&mut bench);
    assert_eq!(figures(&bench), (0, 3, 1));
    bench.wait_ms(5000);
    assert!(bench.ios.iter().all(|io| io.target != backing()), "there is no more to compare");
}

#[test]
fn an_error_of_the_backing_delays_the_comparison() {
    let mut bench = recovered(4 * MIB);
    let io = bench.only_io();
    bench.fail(io);
    bench.wait_ms(500);
    assert!(bench.ios.is_empty() && figures(&bench) == (4, 0, 0));
    bench.wait_ms(1000);
    let io = bench.only_io();
    // First the sectors after the failed sector, and then the failed sector.
    assert_eq!((io.offset, io.len), (4 * KIB, 12 * KIB));
    bench.end_with(io, Ok(()), &[SUM; 3]);
    bench.wait_ms(100);
    let io = bench.only_io();
    assert_eq!((io.offset, io.len), (0, 4 * KIB));
    bench.end_with(io, Ok(()), &[SUM]);
    assert_eq!(figures(&bench), (0, 4, 0));
}

/// The bandwidth limit applies to each disk, and is lower while guests wait for the backing.
#[test]
fn the_bandwidth_is_limited() {
    let mut bench = recovered(16 * KIB);
    let io = bench.only_io();
    bench.end_with(io, Ok(()), &[]);
    bench.wait_ms(900);
    assert!(bench.ios.is_empty(), "16 KiB take a second");
    bench.read(32 * MIB, 4 * KIB);
    let guest = bench.only_io();
    bench.wait_ms(200);
    let io = bench.only_io();
    assert_eq!((io.offset, io.len), (4 * KIB, 12 * KIB), "nothing was compared: the rest is first");
    bench.end_with(io, Ok(()), &[]);
    bench.wait_ms(2800);
    assert!(bench.ios.is_empty(), "a guest waits: they take three seconds instead of 0.75");
    bench.wait_ms(300);
    assert_eq!(bench.only_io().len, 8 * KIB);
    bench.end(guest);
}

/// Most of the compared sectors differ: the rest is dropped without a comparison, and is filled
/// again when it is read.
#[test]
fn what_most_likely_differs_is_dropped_without_a_comparison() {
    let mut bench = recovered(4 * MIB);
    let io = bench.only_io();
    bench.fail(io);
    bench.engine.presume_stale(DISK);
    bench.wait_ms(1100);
    assert!(bench.ios.iter().all(|io| io.target != backing()), "{:?}", bench.ios);
    commit(&mut bench);
    assert_eq!(figures(&bench), (0, 0, 0));
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
    assert_eq!(bench.read_alone(16 * KIB, 8 * KIB), Outcome::Hit, "dirty data stays");
}

/// A change makes a new ring while the record that a stale sector was dropped is not durable. Until
/// recovery would find the new ring, it would find the sector in the old one.
#[test]
fn a_dropped_sector_may_come_back_until_a_new_ring_is_valid() {
    let mut bench = recovered(4 * MIB);
    let io = bench.only_io();
    bench.fail(io);
    bench.engine.presume_stale(DISK);
    while figures(&bench).0 > 1 {
        bench.wait_ms(50);
    }
    // The sectors are dropped, and the next commit is not due yet.
    assert_eq!(figures(&bench), (1, 0, 0));
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(3))));
    while let Some(io) = bench.ios.pop_front() {
        assert_eq!(figures(&bench).0 > 0, bench.result(renew).is_none());
        bench.end(io);
    }
    assert!(bench.result(renew).is_some_and(|result| result.is_ok()));
    commit(&mut bench);
    assert_eq!(figures(&bench), (0, 0, 0));
}
