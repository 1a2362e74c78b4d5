//! Adjacent writes to the backing: docs/decisions/0007.

use super::*;
use crate::command::MemoryConfig;
use crate::io::CopyEnd;

/// Returns a disk with a cache of 64 blocks of 4 KiB, a memory tier, and `buffers` buffers of the
/// engine.
fn bench(buffers: u32) -> Bench {
    let mut bench = Bench::cached(64, 4 * KIB);
    (0..buffers).for_each(|i| bench.engine.lend(BufferId(u32::MAX - i), 1 << 20));
    let memory = MemoryConfig { bytes: MIB, page_bytes: 4096 };
    bench.command(Command::Memory(Some(memory))).expect("workable");
    bench
}

/// Returns the writes to the backing in flight: first byte and length.
fn on_their_way(bench: &Bench) -> Vec<(u64, u64)> {
    let is_write = |io: &&Io| matches!((io.target, io.op), (Target::Backing(_), IoOp::Write(_)));
    bench.ios.iter().filter(is_write).map(|io| (io.offset, io.len)).collect()
}

/// Completes the oldest write to the backing.
fn end_one(bench: &mut Bench) {
    let at =
        bench.ios.iter().position(|io| matches!(io.target, Target::Backing(_))).expect("one is in flight");
    let io = bench.ios.remove(at).expect("found");
    bench.end(io);
}

/// SYSTEMS §2: "DRAM cache … coalesces writes": writes that wait at the same time are sent as one
/// I/O, and are answered when it has ended.
#[test]
fn writes_behind_one_on_its_way_go_out_together() {
    let mut bench = bench(4);
    let writes: Vec<_> = (0..8).map(|i| bench.write(i * 4 * KIB, 4 * KIB)).collect();
    assert_eq!(on_their_way(&bench), [(0, 4 * KIB)], "the others wait behind the first");
    end_one(&mut bench);
    assert!(bench.reply(writes[0]).is_some() && bench.reply(writes[1]).is_none());
    assert_eq!(on_their_way(&bench), [(4 * KIB, 28 * KIB)]);
    let lens: u32 =
        bench.copies.iter().filter(|copy| matches!(copy.to, CopyEnd::Buffer { .. })).map(|c| c.len).sum();
    assert_eq!(u64::from(lens), 28 * KIB);
    let later = bench.write(32 * KIB, 4 * KIB);
    assert_eq!(on_their_way(&bench).len(), 1, "behind those that are behind");
    end_one(&mut bench);
    assert!(writes.iter().all(|write| bench.outcome(*write) == Outcome::WriteCopied));
    assert_eq!(on_their_way(&bench), [(32 * KIB, 4 * KIB)]);
    bench.settle();
    assert_eq!(bench.outcome(later), Outcome::WriteCopied);
    let stats = bench.stats();
    assert_eq!((stats.backing.ios, stats.writes, stats.writes_merged), (3, 9, 7));
    assert_eq!(bench.read_alone(0, 36 * KIB), Outcome::Hit, "flash has its copies");
}

#[test]
fn a_guest_that_writes_one_at_a_time_waits_for_nothing() {
    let mut bench = bench(4);
    for i in 0..8 {
        assert_eq!(bench.write_alone(i * 4 * KIB, 4 * KIB), Outcome::WriteCopied);
    }
    assert_eq!((bench.stats().backing.ios, bench.stats().writes_merged), (8, 0));
}

#[test]
fn others_go_their_own_way() {
    let mut bench = bench(4);
    bench.write(0, 4 * KIB);
    bench.write(12 * KIB, 4 * KIB);
    bench.request(Op::Write(Durability::Durable), 4 * KIB, 4 * KIB);
    bench.request(Op::Discard(Durability::Volatile), 16 * KIB, 4 * KIB);
    assert_eq!(on_their_way(&bench), [(0, 4 * KIB), (12 * KIB, 4 * KIB), (4 * KIB, 4 * KIB)]);
    assert_eq!(bench.ios.len(), 4, "gaps, FUA writes and discards do not wait");
    let mut bare = Bench::cached(64, 4 * KIB);
    bare.engine.lend(BufferId(u32::MAX), 1 << 20);
    bare.write(0, 4 * KIB);
    bare.write(4 * KIB, 4 * KIB);
    assert_eq!(on_their_way(&bare).len(), 2, "without memory nothing is merged");
}

/// Full stripes: no I/O crosses a multiple of 1 MiB.
#[test]
fn merged_writes_end_at_a_boundary() {
    let mut bench = bench(4);
    let start = MIB - 16 * KIB;
    (0..12).for_each(|i| _ = bench.write(start + i * 4 * KIB, 4 * KIB));
    end_one(&mut bench);
    assert_eq!(on_their_way(&bench), [(start + 4 * KIB, 12 * KIB), (MIB, 32 * KIB)]);
    bench.settle();
    assert_eq!(bench.released.len(), 12);
}

/// Completes the write to the backing that begins at `offset`.
fn end_at(bench: &mut Bench, offset: u64) {
    let is_it = |io: &Io| matches!(io.target, Target::Backing(_)) && io.offset == offset;
    let at = bench.ios.iter().position(is_it).expect("it is in flight");
    let io = bench.ios.remove(at).expect("found");
    bench.end(io);
}

/// RAID 5 of 3 + 1 disks with chunks of 64 KiB has stripes of 192 KiB.
#[test]
fn merged_writes_fill_whole_stripes_of_a_known_size() {
    const STRIPE: u64 = 192 * KIB;
    let mut bench = bench(4);
    bench.engine.set_stripe(DISK, STRIPE as u32);
    let start = 5 * STRIPE - 16 * KIB;
    let mut writes: Vec<_> = (0..4).map(|i| bench.write(start + i * 4 * KIB, 4 * KIB)).collect();
    writes.extend((0..13).map(|i| bench.write(5 * STRIPE + i * 32 * KIB, 32 * KIB)));
    end_one(&mut bench);
    let filled = [(start + 4 * KIB, 12 * KIB), (5 * STRIPE, 2 * STRIPE)];
    assert_eq!(on_their_way(&bench), filled, "the rest waits, because it does not fill a stripe");
    writes.push(bench.write(7 * STRIPE + 32 * KIB, 32 * KIB));
    end_at(&mut bench, start + 4 * KIB);
    assert_eq!(on_their_way(&bench).len(), 1, "the rest waits for the write before it");
    end_at(&mut bench, 5 * STRIPE);
    assert_eq!(on_their_way(&bench), [(7 * STRIPE, 64 * KIB)], "nothing else fills it");
    bench.settle();
    assert!(writes.iter().all(|write| bench.reply(*write).is_some_and(|reply| reply.result.is_ok())));
}

/// If a filled stripe cannot be written, the writes behind it are sent all the same.
#[test]
fn writes_behind_a_failed_stripe_do_not_wait_for_more() {
    let mut bench = bench(4);
    bench.engine.set_stripe(DISK, 64 << 10);
    let writes: Vec<_> = (0..3).map(|i| bench.write(i * 4 * KIB + 52 * KIB, 4 * KIB)).collect();
    let behind: Vec<_> = (0..2).map(|i| bench.write((64 + i * 4) * KIB, 4 * KIB)).collect();
    end_one(&mut bench);
    assert_eq!(on_their_way(&bench), [(56 * KIB, 8 * KIB)]);
    let at = bench.ios.iter().position(|io| io.offset == 56 * KIB && !is_flash(io)).expect("in flight");
    let merged = bench.ios.remove(at).expect("found");
    bench.fail(merged);
    assert_eq!(on_their_way(&bench).last(), Some(&(64 * KIB, 8 * KIB)));
    bench.settle();
    assert!(writes.iter().chain(&behind).all(|write| bench.outcome(*write) == Outcome::WriteCopied));
}

/// The last stripe of a disk may be incomplete.
#[test]
fn writes_to_the_end_of_the_disk_do_not_wait_for_more() {
    let (mut bench, stripe) = (bench(4), 192 * KIB);
    bench.engine.set_stripe(DISK, stripe as u32);
    let last = 64 * MIB / stripe * stripe;
    assert_eq!(64 * MIB - last, 64 * KIB);
    (0..3).for_each(|i| _ = bench.write(last - (12 - i * 4) * KIB, 4 * KIB));
    (0..2).for_each(|i| _ = bench.write(last + i * 32 * KIB, 32 * KIB));
    end_one(&mut bench);
    assert_eq!(on_their_way(&bench), [(last - 8 * KIB, 8 * KIB), (last, 64 * KIB)]);
    bench.settle();
    assert_eq!(bench.released.len(), 5);
}

#[test]
fn parts_of_sectors_at_both_ends_keep_their_place() {
    let mut bench = bench(4);
    bench.write(512, 7 * 512);
    bench.write(4 * KIB, 4 * KIB);
    bench.write(8 * KIB, 1024);
    end_one(&mut bench);
    let merged = bench.ios.iter().find(|io| matches!(io.target, Target::Backing(_))).expect("one");
    assert_eq!((merged.offset, merged.len, merged.slice.expect("a write").offset), (4 * KIB, 5 * KIB, 0));
    bench.settle();
    assert_eq!(bench.read_alone(4 * KIB, 4 * KIB), Outcome::Hit);
}

/// If a merged write fails, each of its writes is sent again separately, so that no write gets the
/// error of another. Later writes continue.
#[test]
fn if_a_merged_write_fails_each_goes_by_itself() {
    let mut bench = bench(4);
    let writes: Vec<_> = (0..3).map(|i| bench.write(i * 4 * KIB, 4 * KIB)).collect();
    end_one(&mut bench);
    let behind = bench.write(12 * KIB, 4 * KIB);
    let at = bench.ios.iter().position(|io| matches!(io.target, Target::Backing(_))).expect("the merged one");
    let merged = bench.ios.remove(at).expect("found");
    assert_eq!(merged.len, 8 * KIB);
    bench.fail(merged);
    assert_eq!(bench.reply(writes[1]), None);
    assert_eq!(on_their_way(&bench), [(4 * KIB, 4 * KIB), (8 * KIB, 4 * KIB), (12 * KIB, 4 * KIB)]);
    let bad = bench.ios.iter().position(|io| io.offset == 8 * KIB && !is_flash(io)).expect("in flight");
    let bad = bench.ios.remove(bad).expect("found");
    bench.fail(bad);
    bench.settle();
    assert_eq!(bench.outcome(writes[1]), Outcome::WriteCopied);
    assert_eq!(bench.outcome(writes[2]), Outcome::BackingError);
    assert_eq!(bench.outcome(behind), Outcome::WriteCopied);
    assert_eq!(bench.read_alone(8 * KIB, 4 * KIB), Outcome::MissFilled, "what failed is nowhere");
}

/// Without a free buffer the writes are sent at once and separately.
#[test]
fn without_buffers_nothing_is_merged_and_nothing_waits_for_long() {
    let mut bench = bench(0);
    let writes: Vec<_> = (0..4).map(|i| bench.write(i * 4 * KIB, 4 * KIB)).collect();
    end_one(&mut bench);
    assert_eq!(on_their_way(&bench).len(), 3);
    bench.settle();
    assert!(writes.iter().all(|write| bench.outcome(*write) == Outcome::WriteCopied));
}

/// Writes that bypass a persistent cache are merged too. A flush makes answered writes durable.
#[test]
fn writes_past_a_persistent_cache_are_merged() {
    use crate::command::{Destage, Mode};
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteThrough, Destage::default());
    (0..4).for_each(|i| bench.engine.lend(BufferId(u32::MAX - 10 - i), 1 << 20));
    bench.command(Command::Memory(Some(MemoryConfig { bytes: MIB, page_bytes: 4096 }))).expect("workable");
    // The bypass mark of the zone is durable.
    bench.write_alone(64 * KIB, 4 * KIB);
    let writes: Vec<_> = (0..4).map(|i| bench.write(i * 4 * KIB, 4 * KIB)).collect();
    end_one(&mut bench);
    assert_eq!(on_their_way(&bench), [(4 * KIB, 12 * KIB)]);
    bench.settle();
    assert!(writes.iter().all(|write| bench.reply(*write).is_some_and(|reply| reply.result.is_ok())));
    bench.flush();
    assert_eq!(bench.stats().writes_merged, 3);
}

/// A disk can lose its memory tier and be removed while writes wait to be merged.
#[test]
fn merging_is_in_nobodys_way() {
    let mut bench = bench(4);
    let writes: Vec<_> = (0..4).map(|i| bench.write(i * 4 * KIB, 4 * KIB)).collect();
    bench.command(Command::Memory(None)).expect("taken away");
    let removal = bench.start_command(Command::RemoveDisk);
    bench.settle();
    assert!(writes.iter().all(|write| bench.outcome(*write) == Outcome::WriteCopied));
    assert!(bench.result(removal).is_some_and(|result| result.is_ok()));
}
