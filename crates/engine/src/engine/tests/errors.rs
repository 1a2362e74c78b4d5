//! Errors of single I/Os: the guest does not see errors of flash, and receives errors of the
//! backing.

use super::*;

/// Issue: "a failed flash read is served from the backing".
#[test]
fn a_failed_flash_read_is_served_from_the_backing_and_repaired() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    let read = bench.read(0, 4 * KIB);
    let io = bench.only_io();
    bench.fail(io);
    assert_eq!(bench.reply(read), None);
    let io = bench.only_io();
    assert_eq!(io.target, Target::Backing(DISK));
    bench.end(io);
    assert_eq!(bench.reply(read).map(|r| (r.result, r.outcome)), Some((Ok(()), Outcome::FlashFailed)));
    let repair = bench.only_io();
    assert!(is_flash(&repair) && repair.op != IoOp::Read);
    bench.end(repair);
    assert_eq!(bench.stats().flash.errors, 1);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
}

/// Issue: "a failed flash write drops the block": the data of the write is not valid.
#[test]
fn a_failed_flash_write_leaves_nothing_valid() {
    let mut bench = Bench::cached(16, 4 * KIB);
    let read = bench.read(0, 4 * KIB);
    let io = bench.only_io();
    bench.end(io);
    let fill = bench.only_io();
    bench.fail(fill);
    assert_eq!(bench.reply(read).unwrap().result, Ok(()));
    assert_eq!(bench.released.len(), 1);
    let stats = bench.stats();
    assert_eq!((stats.blocks_cached, stats.flash.errors), (0, 1));
    bench.write(MIB, 4 * KIB);
    let io = bench.only_io();
    bench.end(io);
    let copy = bench.only_io();
    bench.fail(copy);
    assert_eq!(bench.read_alone(MIB, 4 * KIB), Outcome::MissFilled);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
}

/// Issue: "Checksum (CRC-32C per 4 KiB sector) verified on every hit; a mismatch is a repaired miss
/// and is counted."
#[test]
fn a_wrong_checksum_is_a_repaired_miss() {
    let mut bench = Bench::cached(16, 16 * KIB);
    bench.read_alone(0, 16 * KIB);
    let read = bench.read(0, 16 * KIB);
    let io = bench.only_io();
    bench.end_with(io, Ok(()), &[SUM, SUM + 1, SUM, SUM + 2]);
    let io = bench.only_io();
    assert_eq!((io.target, io.offset, io.len), (Target::Backing(DISK), 0, 16 * KIB));
    bench.end(io);
    assert_eq!(bench.reply(read).map(|r| (r.result, r.outcome)), Some((Ok(()), Outcome::ChecksumMismatch)));
    let repaired: Vec<_> = bench.ios.iter().map(|io| (io.offset, io.slice.unwrap().offset)).collect();
    assert_eq!(repaired, [(4 * KIB, 4096), (12 * KIB, 12288)], "only the wrong sectors are written again");
    bench.settle();
    assert_eq!(bench.stats().checksum_mismatches, 2);
    assert_eq!(bench.stats().flash.errors, 0, "the device did what it was told");
    assert_eq!(bench.read_alone(0, 16 * KIB), Outcome::Hit);
}

/// One of several flash reads fails: the request waits for all of them before the backing may write
/// into its buffer.
#[test]
fn a_partly_failed_hit_waits_for_its_other_reads() {
    let mut bench = Bench::cached(4, 4 * KIB);
    bench.read_alone(8 * KIB, 4 * KIB);
    bench.read_alone(0, 8 * KIB);
    let read = bench.read(0, 12 * KIB);
    assert_eq!(bench.ios.len(), 2);
    let io = bench.ios.pop_front().unwrap();
    bench.fail(io);
    let other = bench.only_io();
    assert!(is_flash(&other));
    bench.end(other);
    let io = bench.only_io();
    assert_eq!(io.target, Target::Backing(DISK));
    bench.settle();
    bench.end(io);
    bench.settle();
    assert_eq!(bench.outcome(read), Outcome::FlashFailed);
}

/// Two hits find the same sector wrong: both repairs have the same content, and neither the later
/// check nor the later write damages the sector.
#[test]
fn two_hits_on_one_wrong_sector_are_both_repaired() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    let reads = [bench.read(0, 4 * KIB), bench.read(0, 4 * KIB)];
    let (first, second) = (bench.ios.pop_front().unwrap(), bench.ios.pop_front().unwrap());
    bench.end_with(first, Ok(()), &[SUM + 1]);
    bench.settle();
    bench.end_with(second, Ok(()), &[SUM + 1]);
    bench.settle();
    assert_eq!(reads.map(|id| bench.reply(id).unwrap().result), [Ok(()); 2]);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
}

/// Issue: "Backing errors go to the guest as EIO with the request, are counted, and poison nothing."
#[test]
fn a_failed_backing_read_is_reported_and_fills_nothing() {
    let mut bench = Bench::cached(16, 4 * KIB);
    let waiting = {
        let read = bench.read(0, 4 * KIB);
        let waiting = bench.read(0, 4 * KIB);
        let io = bench.only_io();
        bench.fail(io);
        let reply = bench.reply(read).unwrap();
        assert_eq!((reply.result, reply.outcome), (Err(IoError::Failed), Outcome::BackingError));
        waiting
    };
    assert_eq!(bench.released.len(), 1);
    let stats = bench.stats();
    assert_eq!((stats.blocks_cached, stats.backing.errors), (0, 1));
    assert_eq!(stats.outcomes[Outcome::BackingError as usize].count, 1);
    bench.settle();
    assert_eq!(bench.outcome(waiting), Outcome::MissFilled, "who waited tries for itself");
}

/// The repair of a failed hit may also fail: then the guest receives the backing's error.
#[test]
fn a_failed_hit_on_a_failing_backing_is_a_backing_error() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    let read = bench.read(0, 4 * KIB);
    let io = bench.only_io();
    bench.fail(io);
    let io = bench.only_io();
    bench.fail(io);
    assert_eq!(bench.outcome(read), Outcome::BackingError);
    assert_eq!(bench.stats().blocks_cached, 0);
}

/// docs/ARCHITECTURE.md, promise 4: hits are still served while the backing is dead.
#[test]
fn hits_do_not_need_the_backing() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    bench.read(MIB, 4 * KIB);
    bench.write(2 * MIB, 4 * KIB);
    bench.request(Op::Flush, 0, 0);
    let hung: Vec<_> = bench.ios.drain(..).collect();
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
    assert_eq!(hung.len(), 3);
}
