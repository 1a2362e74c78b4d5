//! Extra fills: when they start, what they write, and what stops them.

use super::recovering::{Left, enable};
use super::write_back::{VOLATILE, backing, flash};
use super::*;
use crate::command::{Copies, Discard, Mode, Vacate};
use crate::granularity::Fill;
use crate::io::CopyEnd;
use crate::qos::{Control, Resource};

const SECTOR: u64 = SECTOR_BYTES;
const FUA: Op = Op::Write(Durability::Durable);

impl Bench {
    /// Returns a disk of 64 MiB with a volatile cache of 256 blocks of 4 KiB.
    fn filling(fill: Fill) -> Bench {
        Bench::filling_with(fill, Limits::default())
    }

    fn filling_with(fill: Fill, limits: Limits) -> Bench {
        let mut bench = Bench::bare(limits);
        bench.engine.lend(BufferId(1 << 20), 1 << 20);
        bench.enable(MIB, 4 * KIB);
        bench.change(CacheChange::Fill(fill)).expect("the disk has a cache");
        bench
    }

    /// Returns a disk with a write-back cache whose misses get extra sectors.
    fn filling_write_back() -> Bench {
        let mut bench = Bench::write_back();
        bench.change(CacheChange::Fill(Fill::Block)).expect("the disk has a cache");
        bench
    }

    /// Reads a sector that the cache lacks, and completes the read and its fill. Returns the extra
    /// reads.
    fn miss(&mut self, sector: u64) -> Vec<Io> {
        assert!(self.ios.is_empty());
        let read = self.read(sector * SECTOR, SECTOR);
        let own = self.ios.pop_front().expect("a read of the backing");
        assert_eq!(sectors(&[own]), [(sector, sector + 1)], "what the guest asked for is first");
        let extra: Vec<Io> = self.ios.drain(..).collect();
        assert!(extra.iter().all(|io| (io.target, io.op) == (backing(), IoOp::Read)));
        self.end(own);
        assert_eq!(self.outcome(read), Outcome::MissFilled);
        self.settle();
        extra
    }

    /// Reads sector 9, which the cache lacks. Returns the extra read of sectors 10 to 15.
    fn miss_9(&mut self) -> Io {
        let extra = self.miss(9);
        assert_eq!(sectors(&extra), [(8, 9), (10, 16)]);
        self.end(extra[0]);
        self.settle();
        extra[1]
    }

    fn has(&mut self, sector: u64) -> bool {
        !self.engine.valid_extents(DISK, &[sector]).is_empty()
    }
}

/// Returns the sectors of these I/Os of the backing.
fn sectors(ios: &[Io]) -> Vec<(u64, u64)> {
    ios.iter().map(|io| (io.offset / SECTOR, (io.offset + io.len) / SECTOR)).collect()
}

#[test]
fn a_miss_brings_its_neighbours() {
    let mut bench = Bench::filling(Fill::Block);
    let read = bench.read(9 * SECTOR, SECTOR);
    let ios: Vec<Io> = bench.ios.drain(..).collect();
    assert!(ios.iter().all(|io| io.target == backing()));
    assert_eq!(sectors(&ios), [(9, 10), (8, 9), (10, 16)], "what the guest asked for is first");
    bench.end(ios[0]);
    assert_eq!(bench.outcome(read), Outcome::MissFilled, "the reply waits for nothing else");
    bench.ios.extend(&ios[1..]);
    bench.settle();
    assert_eq!(bench.read_alone(8 * SECTOR, 8 * SECTOR), Outcome::Hit);
    let stats = bench.stats();
    assert_eq!((stats.extra_read_bytes, stats.extra_blocks_used), (7 * SECTOR, 7));
    assert_eq!(bench.read_alone(8 * SECTOR, 8 * SECTOR), Outcome::Hit);
    assert_eq!(bench.stats().extra_blocks_used, 7, "they are ordinary blocks now");
    bench.command(Command::ResetStats).expect("always possible");
    assert_eq!(bench.stats().extra_read_bytes, 0);
}

/// Reads of data that an extra read fetches wait neither for flash nor for I/O of their own.
#[test]
fn reads_of_data_on_its_way_share_it() {
    for persistent in [false, true] {
        let mut bench = if persistent { Bench::filling_write_back() } else { Bench::filling(Fill::Block) };
        let extra = bench.miss_9();
        let reads = [bench.read(12 * SECTOR, SECTOR), bench.read(14 * SECTOR + 512, SECTOR)];
        assert!(bench.ios.is_empty(), "the backing is not read twice");
        bench.copies.clear();
        bench.end(extra);
        assert!(reads.iter().all(|read| bench.outcome(*read) == Outcome::MissFilled));
        let slice = extra.slice.expect("a buffer");
        let mut copied: Vec<_> = bench.copies.iter().map(|copy| (copy.from, copy.len)).collect();
        copied.sort_unstable_by_key(|(_, len)| *len);
        let from = |sector: u32| CopyEnd::Buffer { id: slice.id, offset: slice.offset + sector * 4096 };
        assert_eq!(copied, [(from(2), 4096), (from(4), 8192)]);
        let fill = bench.only_io();
        assert_eq!((fill.target, fill.op, fill.len), (flash(0), VOLATILE, 6 * SECTOR), "one fill of all");
        bench.end(fill);
        assert_eq!(bench.read_alone(8 * SECTOR, 8 * SECTOR), Outcome::Hit);
        assert_eq!(bench.stats().extra_blocks_used, 7, "the reads were uses of their blocks");
    }
}

#[test]
fn a_read_that_waits_continues_alone_after_an_error() {
    for lost in [false, true] {
        let mut bench = Bench::filling(Fill::Block);
        let extra = bench.miss_9();
        let read = bench.read(12 * SECTOR, SECTOR);
        match lost {
            true => {
                bench.engine.handle_loss(bench.now, DISK);
                bench.end(extra);
            }
            false => bench.fail(extra),
        }
        assert!(bench.reply(read).is_none());
        assert_eq!(sectors(&bench.ios.iter().copied().collect::<Vec<_>>()), [(12, 13), (13, 16)]);
        bench.settle();
        assert!(bench.reply(read).is_some_and(|reply| reply.result.is_ok()));
    }
}

/// If the extra read hangs, a read of its data waits only for a limited time.
#[test]
fn a_read_waits_for_a_limited_time() {
    let mut bench = Bench::filling(Fill::Block);
    // The first read of the backing shows its latency, which is 1 µs.
    bench.read_alone(MIB, SECTOR);
    let started = bench.now;
    let extra = bench.miss_9();
    let read = bench.read(12 * SECTOR, SECTOR);
    assert!(bench.ios.is_empty());
    assert_eq!(bench.engine.poll_timeout(), Some(started + 1_002_000), "1 ms and two reads");
    bench.wait_ms(2);
    let own = bench.ios.pop_front().expect("a read of its own");
    assert_eq!(sectors(&[own]), [(12, 13)]);
    assert_eq!(bench.engine.poll_timeout(), None);
    bench.end(own);
    assert_eq!(bench.outcome(read), Outcome::MissFilled);
    bench.settle();
    let write = bench.write(10 * SECTOR, SECTOR);
    assert!(bench.ios.is_empty(), "the backing still reads the sector");
    bench.end(extra);
    bench.settle();
    assert!(bench.reply(write).is_some());
    assert_eq!(bench.read_alone(10 * SECTOR, SECTOR), Outcome::Hit);
    assert!(!bench.has(11), "the late data is not used");
    assert!(bench.has(12) && bench.has(13), "the fills of the second miss");
}

#[test]
fn a_late_read_is_used_if_nothing_waits_for_it() {
    let mut bench = Bench::filling(Fill::Block);
    let extra = bench.miss_9();
    assert_eq!(bench.engine.poll_timeout(), None);
    bench.wait_ms(5);
    bench.end(extra);
    bench.settle();
    assert!(bench.has(12));

    // A read that arrives late does not wait at all.
    let extra = bench.miss(16)[0];
    bench.wait_ms(5);
    let read = bench.read(20 * SECTOR, SECTOR);
    assert_eq!(sectors(&[bench.ios[0]]), [(20, 21)]);
    bench.settle();
    assert!(bench.reply(read).is_some());
    bench.end(extra);
    assert!(bench.ios.is_empty() && !bench.has(17));
}

/// A read that the extra read covers only in part does not wait, because it would have to read the
/// backing after the wait.
#[test]
fn a_read_of_other_sectors_too_does_not_wait() {
    let mut bench = Bench::filling(Fill::Block);
    let extra = bench.miss_9();
    bench.read(15 * SECTOR, 2 * SECTOR);
    let own = bench.ios.pop_front().expect("a read of its own");
    assert_eq!(sectors(&[own]), [(15, 17)]);
    bench.ios.clear();
    bench.end(extra);
    let fill = bench.only_io();
    assert_eq!((fill.target, fill.len), (flash(0), 5 * SECTOR), "sectors 10 to 14");
    bench.end(fill);
    assert!(bench.has(14) && !bench.has(15));
}

/// A read waits for extra data when a write to the same sector arrives. The read gets the older
/// data.
#[test]
fn a_write_behind_a_waiting_read_is_ordered_behind_it() {
    let mut bench = Bench::filling(Fill::Block);
    let extra = bench.miss_9();
    let read = bench.read(12 * SECTOR, SECTOR);
    let write = bench.write(12 * SECTOR, SECTOR);
    assert!(bench.ios.is_empty(), "both wait for the backing");
    bench.end(extra);
    assert_eq!(bench.outcome(read), Outcome::MissFilled);
    let ios: Vec<Io> = bench.ios.drain(..).collect();
    assert_eq!(ios.len(), 2, "{ios:?}");
    let (fill, own): (Vec<Io>, Vec<Io>) = ios.into_iter().partition(is_flash);
    assert_eq!((fill[0].len, sectors(&own)), (3 * SECTOR, vec![(12, 13)]), "13 to 15 are kept");
    bench.ios.extend(own);
    bench.settle();
    assert_eq!(bench.outcome(write), Outcome::WriteCopied);
    assert_eq!((bench.has(12), bench.has(11)), (true, false));
}

#[test]
fn sectors_that_are_cached_end_the_extra_ranges() {
    let mut bench = Bench::filling(Fill::Sectors);
    bench.read_alone(12 * SECTOR, SECTOR);
    assert_eq!(bench.stats().extra_read_bytes, 0);
    bench.change(CacheChange::Fill(Fill::Block)).expect("the disk has a cache");
    assert_eq!(sectors(&bench.miss(10)), [(8, 10), (11, 12)]);
}

/// The disk ends inside its last sector, which is not filled.
#[test]
fn nothing_is_read_beyond_the_end_of_the_disk() {
    let mut bench = Bench::with_disk(Limits::default(), 13 * SECTOR + 512, Access::ReadWrite);
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    bench.enable(MIB, 4 * KIB);
    bench.change(CacheChange::Fill(Fill::Block)).expect("the disk has a cache");
    assert_eq!(sectors(&bench.miss(11)), [(8, 11), (12, 13)]);
}

#[test]
fn larger_blocks_are_completed() {
    let mut bench = Bench::bare(Limits::default());
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    bench.enable(MIB, 64 * KIB);
    bench.change(CacheChange::Fill(Fill::Block)).expect("the disk has a cache");
    let extra = bench.miss(20);
    assert_eq!(sectors(&extra), [(16, 20), (21, 32)]);
    extra.into_iter().for_each(|io| bench.end(io));
    bench.settle();
    assert_eq!(bench.read_alone(16 * SECTOR, 16 * SECTOR), Outcome::Hit);
}

/// A guest's change waits for the extra read of the backing, but not for the fill. The older data
/// of the changed sectors is not used.
#[test]
fn a_change_that_arrives_meanwhile_wins() {
    let discard = Op::Discard(Durability::Volatile);
    for (op, remains) in [(WRITE, true), (FUA, true), (discard, false)] {
        for persistent in [false, true] {
            let mut bench =
                if persistent { Bench::filling_write_back() } else { Bench::filling(Fill::Block) };
            let extra = bench.miss_9();
            let change = bench.request(op, 12 * SECTOR, SECTOR);
            assert!(bench.ios.is_empty(), "{op:?} waits for the backing");
            bench.end(extra);
            let is_fill = |io: &Io| (io.target, io.op, io.len) == (flash(0), VOLATILE, 3 * SECTOR);
            let at = bench.ios.iter().position(is_fill).expect("sectors 13 to 15");
            let old = bench.ios.remove(at).expect("it is there");
            assert!(!bench.ios.is_empty(), "{op:?} does not wait for the fill");
            bench.settle();
            assert!(bench.reply(change).is_some_and(|reply| reply.result.is_ok()));
            bench.end_with(old, Ok(()), &[SUM - 1; 3]);
            bench.settle();
            assert_eq!((bench.has(12), bench.has(10)), (remains, false), "{op:?}");
            if remains {
                // Its checksum is the new one.
                assert_eq!(bench.read_alone(12 * SECTOR, SECTOR), Outcome::Hit);
            }
            let neighbour = bench.read(13 * SECTOR, SECTOR);
            let io = bench.only_io();
            bench.end_with(io, Ok(()), &[SUM - 1]);
            assert_eq!(bench.outcome(neighbour), Outcome::Hit);
        }
    }
}

#[test]
fn a_change_in_flight_ends_the_extra_range() {
    let mut bench = Bench::filling(Fill::Block);
    bench.write(12 * SECTOR, SECTOR);
    let write = bench.only_io();
    let extra = bench.miss(9);
    assert_eq!(sectors(&extra), [(8, 9), (10, 12)]);
    bench.ios.push_back(write);
    bench.ios.extend(extra);
    bench.settle();
    assert!(bench.has(11) && !bench.has(13));
}

#[test]
fn dirty_data_is_not_touched() {
    let mut bench = Bench::filling_write_back();
    bench.write_alone(12 * SECTOR, SECTOR);
    bench.flush();
    let extra = bench.miss(9);
    assert_eq!(sectors(&extra), [(8, 9), (10, 12)]);
    let mut written = 0;
    bench.ios.extend(extra);
    while let Some(io) = bench.ios.pop_front() {
        written += if io.op == VOLATILE { io.len } else { 0 };
        bench.end(io);
    }
    assert_eq!((written, bench.dirty()), (3 * SECTOR, 1));
    assert_eq!(bench.read_alone(8 * SECTOR, 5 * SECTOR), Outcome::Hit);
}

/// If a block has dirty data, only the sectors around this data are filled.
#[test]
fn dirty_data_in_the_same_block_is_not_touched() {
    let mut bench = Bench::persistent(64 * KIB, Mode::WriteBack, super::write_back::lazy());
    bench.change(CacheChange::Fill(Fill::Block)).expect("the disk has a cache");
    bench.write_alone(4 * SECTOR, SECTOR);
    bench.flush();
    let extra = bench.miss(8);
    assert_eq!(sectors(&extra), [(5, 8), (9, 16)]);
    extra.into_iter().for_each(|io| bench.end(io));
    bench.settle();
    assert_eq!(bench.engine.valid_extents(DISK, &[0]), [(4, 16)]);
    assert_eq!(bench.dirty(), 1);
}

#[test]
fn an_error_of_the_backing_or_of_flash_is_not_reported() {
    let mut bench = Bench::filling(Fill::Block);
    let (replies, events) = (bench.replies.len(), bench.events.len());
    let extra = bench.miss_9();
    bench.fail(extra);
    assert!(bench.ios.is_empty() && !bench.has(12));
    let extra = bench.miss(16);
    bench.end(extra[0]);
    let write = bench.only_io();
    bench.fail(write);
    assert!(!bench.has(17));
    assert_eq!((bench.replies.len(), bench.events.len()), (replies + 2, events));
    assert_eq!(bench.stats().extra_read_bytes, 16 * SECTOR);
    assert_eq!(bench.write_alone(12 * SECTOR, SECTOR), Outcome::WriteCopied, "nothing is locked");
}

/// The backing may have lost data since the extra read began, so the data of this read does not
/// become valid.
#[test]
fn data_that_the_backing_may_have_lost_does_not_become_valid() {
    for after_read in [false, true] {
        let mut bench = Bench::filling(Fill::Block);
        let extra = bench.miss_9();
        if after_read {
            bench.end(extra);
            let write = bench.only_io();
            bench.engine.handle_loss(bench.now, DISK);
            bench.end(write);
        } else {
            bench.engine.handle_loss(bench.now, DISK);
            bench.end(extra);
        }
        assert!(bench.ios.is_empty() && !bench.has(12));
    }
}

#[test]
fn a_volatile_cache_changes_while_the_backing_is_read() {
    let read_only = CacheChange::Tune(Mode::ReadOnlyCache, Default::default(), Copies::One);
    let changes = [CacheChange::Disable, read_only, CacheChange::Fill(Fill::Sectors)];
    for change in changes {
        let mut bench = Bench::filling(Fill::Block);
        let extra = bench.miss_9();
        bench.change(change.clone()).expect("nothing is in flight on flash");
        bench.end(extra);
        assert!(bench.ios.is_empty(), "{change:?}");
        let write = bench.write(12 * SECTOR, SECTOR);
        bench.settle();
        assert!(bench.reply(write).is_some());
    }
}

#[test]
fn drains_and_vacated_segments_get_no_extra_data() {
    for change in [CacheChange::Drain, CacheChange::Vacate(Vacate::Device(DeviceId(0)))] {
        let mut bench = Bench::filling_write_back();
        bench.write_alone(MIB, SECTOR);
        bench.flush();
        let extra = bench.miss_9();
        let command = bench.start_change(change.clone());
        assert_eq!(bench.result(command), None, "dirty data must be destaged first");
        let others: Vec<Io> = bench.ios.drain(..).collect();
        bench.end(extra);
        assert!(bench.ios.is_empty(), "{change:?}: {:?}", bench.ios);
        bench.ios.extend(others);
        let miss = bench.read(32 * SECTOR, SECTOR);
        bench.settle();
        assert!(bench.reply(miss).is_some() && !bench.has(33), "{change:?}");
    }
}

/// A structural change of a persistent cache and the removal of its disk wait for the extra fill.
#[test]
fn structural_changes_wait_for_the_job() {
    let ring = || Some(super::write_back::ring(2));
    let discard = Command::Cache(CacheChange::DiscardDirty(Discard::Told));
    for command in [Command::Cache(CacheChange::Clear(ring())), discard, Command::RemoveDisk] {
        let mut bench = Bench::filling_write_back();
        let extra = bench.miss_9();
        let id = bench.start_command(command.clone());
        assert!(bench.ios.is_empty() && bench.result(id).is_none(), "{command:?}");
        bench.end(extra);
        assert!(bench.ios.iter().all(|io| io.op != VOLATILE), "the data does not enter the cache");
        bench.settle();
        assert!(bench.result(id).is_some_and(|result| result.is_ok()), "{command:?}");
    }
}

#[test]
fn the_number_of_extra_fills_is_limited() {
    let mut bench = Bench::filling(Fill::Block);
    bench.engine.lend(BufferId(1 << 21), 1 << 20);
    let mut extra = vec![];
    for unit in 0..20 {
        extra.extend(bench.miss(16 * unit));
    }
    assert_eq!(extra.len(), 16);
    bench.ios.extend(extra);
    bench.settle();
    assert_eq!(bench.miss(1000).len(), 1);
}

#[test]
fn without_buffers_or_room_for_fills_there_are_no_extra_fills() {
    let mut bench = Bench::cached(256, 4 * KIB);
    bench.change(CacheChange::Fill(Fill::Block)).expect("the disk has a cache");
    assert!(bench.miss(9).is_empty(), "the engine has no buffer of its own");
    // The ordinary fill of one sector has ended when the extra fills start.
    let limits = Limits { fill_bytes_max: 4 * SECTOR, ..Limits::default() };
    let mut bench = Bench::filling_with(Fill::Block, limits);
    assert_eq!(sectors(&bench.miss(9)), [(8, 9)], "six sectors are too many");
}

/// Extra reads must not take I/Os of a throttled datastore from guests that wait.
#[test]
fn a_datastore_at_its_limit_gets_no_extra_reads() {
    let mut bench = Bench::filling(Fill::Block);
    bench.engine.control(bench.now, Resource::Datastore(DatastoreId(0)), Control::Depth(2));
    assert_eq!(sectors(&bench.miss(9)), [(8, 9)], "two I/Os at a time");
}

#[test]
fn only_guests_ordinary_misses_get_extra_data() {
    let mut bench = Bench::filling(Fill::Block);
    let prefetch = bench.request(Op::Prefetch, 9 * SECTOR, SECTOR);
    bench.settle();
    assert!(bench.reply(prefetch).is_some() && !bench.has(10));
    bench.promote = Promote::Never;
    assert_eq!(bench.read_alone(17 * SECTOR, SECTOR), Outcome::BypassNoPromote);
    bench.promote = Promote::Usual;
    bench
        .change(CacheChange::Replace(
            PolicyKind::default(),
            "always+not-sequential:16K".parse().expect("an admission"),
        ))
        .expect("the disk has a cache");
    bench.change(CacheChange::Fill(Fill::Sectors)).expect("the disk has a cache");
    (32..40).for_each(|sector| _ = bench.read_alone(sector * SECTOR, SECTOR));
    bench.change(CacheChange::Fill(Fill::Block)).expect("the disk has a cache");
    assert_eq!(bench.read_alone(40 * SECTOR, SECTOR), Outcome::MissSequential);
    assert_eq!(bench.stats().extra_read_bytes, 0);
}

/// The cache of the parent disk has these sectors. An extra fill puts these sectors neither into
/// the parent's cache nor into the clone's cache.
#[test]
fn data_of_a_parent_disk_is_not_promoted() {
    let mut bench = Bench::filling(Fill::Block);
    let extra = bench.miss_9();
    assert_eq!(bench.engine.promote_of(extra.id), Promote::Never);
    bench.engine.pass_on(bench.now, extra.id);
    bench.engine.handle_shared(bench.now, extra.id, &[(10, 12)], &[]);
    bench.drain();
    assert!(bench.ios.is_empty() && !bench.has(13));
}

#[test]
fn auto_stops_while_extra_data_is_not_used() {
    let mut bench = Bench::filling(Fill::Auto);
    let extra_of = |bench: &mut Bench, units: std::ops::Range<u64>| {
        let before = bench.stats().extra_read_bytes;
        for unit in units {
            bench.read_alone(16 * unit * SECTOR, SECTOR);
        }
        bench.stats().extra_read_bytes - before
    };
    let first = extra_of(&mut bench, 0..25);
    assert!(first >= 2 * 15 * SECTOR, "{first}");
    extra_of(&mut bench, 25..500);
    let last = extra_of(&mut bench, 500..1000);
    assert!(last < 500 * 15 * SECTOR / 8, "{last}");
    let mut always = Bench::filling(Fill::Block);
    assert_eq!(extra_of(&mut always, 500..1000), 500 * 15 * SECTOR);
}

#[test]
fn extra_data_is_ordinary_cached_data_after_a_restart() {
    let mut left = Left::default();
    let mut bench = Bench::bare(Limits::default());
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    bench.start_change(enable(1, Mode::WriteBack, None));
    left.settle(&mut bench);
    bench.change(CacheChange::Fill(Fill::Block)).expect("the disk has a cache");
    bench.read(9 * SECTOR, SECTOR);
    left.settle(&mut bench);
    bench.start_change(CacheChange::Close);
    left.settle(&mut bench);

    let (_, recovered) = left.recover();
    let mut bench = Bench::bare(Limits::default());
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    let command = bench.start_change(enable(2, Mode::WriteBack, Some(recovered)));
    bench.settle();
    assert_eq!(bench.result(command), Some(Ok(vec![])));
    assert_eq!(bench.read_alone(8 * SECTOR, 8 * SECTOR), Outcome::Hit);
    assert_eq!(bench.stats().extra_blocks_used, 0);
}
