//! Tests of crashes at a chosen moment, and of overwrites while a commit is in progress. Each test
//! recovers the cache and checks which data it has.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::write_back::{RING_DEVICE, VOLATILE, backing, flash, lazy, mirrored, ring};
use super::*;
use crate::command::{Copies, Enable, Mode};
use crate::journal::{PAGE_BYTES, Recovered, Replay, Ring, Survey, SurvivingMemory};

const RING_PAGES: u64 = 8 * MIB / PAGE_BYTES as u64;

/// Checksum of data that was written over the first data.
const NEWER: u32 = SUM + 1;

/// A bench whose journal pages are kept when they are written.
struct Crashing {
    bench: Bench,
    pages: BTreeMap<u64, Vec<u8>>,
}

impl Crashing {
    fn of(bench: Bench) -> Self {
        Crashing { bench, pages: BTreeMap::new() }
    }

    /// Completes an I/O. Data of flash has the checksum `sum`.
    fn end(&mut self, io: Io, sum: u32) {
        let bytes = self.bench.engine.journal_pages(io.id);
        for (at, page) in (io.offset..).step_by(PAGE_BYTES).zip(bytes.chunks(PAGE_BYTES)) {
            self.pages.insert(at / PAGE_BYTES as u64, page.to_vec());
        }
        let sums: Vec<u32> = right_sums(&io).iter().map(|_| sum).collect();
        self.bench.end_with(io, Ok(()), &sums);
    }

    fn settle(&mut self, sum: u32) {
        while let Some(io) = self.bench.ios.pop_front() {
            self.end(io, sum);
        }
    }

    fn write(&mut self, offset: u64, sum: u32) -> RequestId {
        let id = self.bench.write(offset, 4 * KIB);
        self.settle(sum);
        assert_eq!(self.bench.outcome(id), Outcome::WriteBack);
        id
    }

    fn flush(&mut self) {
        let id = self.bench.request(Op::Flush, 0, 0);
        self.settle(SUM);
        assert_eq!(self.bench.outcome(id), Outcome::FlushCommitted);
    }

    /// Recovers a cache with segments on devices 0 to `on_flash.len() - 1` after a power cut. Every
    /// sector of device N has the checksum `on_flash[N]`.
    fn recover(&self, number: u32, on_flash: &[u32]) -> Recovered {
        let mut survey = Survey::new([7; 16], number, 1, RING_PAGES);
        self.pages.iter().for_each(|(page, bytes)| survey.page(0, *page, bytes));
        let Ring::Whole(plan) = survey.finish() else { panic!("the ring is whole") };
        let reads: Vec<_> = plan.reads().collect();
        let present: Vec<_> = (0..on_flash.len() as u16).map(|i| (u32::from(i), DeviceId(i))).collect();
        let mut replay = Replay::new(plan, MIB, &present).expect("its segments");
        reads.iter().for_each(|(_, page)| replay.page(&self.pages[page]).expect("as it was"));
        let sums: Vec<_> =
            replay.to_prove().iter().map(|(segment, _)| Some(on_flash[*segment as usize])).collect();
        replay.finish(&sums)
    }
}

fn unscrubbed(mut bench: Bench) -> Bench {
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    bench.make_persistent(4 * KIB, Mode::WriteBack, lazy());
    bench
}

/// Returns a write-back cache with one copy and without scrubbing, which records checksums too.
fn single() -> Crashing {
    Crashing::of(unscrubbed(Bench::bare(Limits { scrub_frames_per_s: 0, ..Limits::default() })))
}

/// Returns a cache with two copies on devices 0 and 1.
fn doubled() -> Crashing {
    let mut it = Crashing::of(mirrored(Copies::TwoOfDirty));
    // The pages of the first ring were not kept.
    let renew = it.bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    it.settle(SUM);
    assert!(it.bench.result(renew).expect("done").is_ok());
    it
}

/// Returns a write-through cache of 16 blocks, without scrubbing.
fn write_through() -> Crashing {
    let mut bench = Bench::bare(Limits { scrub_frames_per_s: 0, ..Limits::default() });
    bench.make_persistent(64 * KIB, Mode::WriteThrough, lazy());
    let mut it = Crashing::of(bench);
    // The pages of the first ring were not kept.
    let renew = it.bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    it.settle(SUM);
    assert!(it.bench.result(renew).expect("done").is_ok());
    it
}

/// Opens a recovered cache of [`write_through`].
fn write_through_again(recovered: Recovered) -> Bench {
    let mut bench = Bench::bare(Limits::default());
    let enable = Enable {
        config: CacheConfig { mode: Mode::WriteThrough, destage: lazy(), ..config(MIB, 64 * KIB) },
        segments: vec![DataSegment { place: segment(0, 0), ordinal: 0, seconds_only: false }],
        journal: Some(ring(3)),
        recovered: Some(recovered),
    };
    let command = bench.start_change(CacheChange::Enable(Box::new(enable)));
    bench.settle();
    assert!(bench.result(command).expect("done").is_ok());
    bench
}

/// The journal has no data of the changed blocks, so recovery after a crash restores none. No copy
/// of the change enters the cache before the bypass mark is durable: the backing may still lose the
/// change.
#[test]
fn a_change_of_uncached_blocks_does_not_wait_for_a_hung_journal() {
    let mut it = write_through();
    // In the journal tail, recovery uses clean data only of blocks that it knows, so another page follows.
    for offset in [0, 32 * MIB] {
        it.bench.read(offset, 4 * KIB);
        it.settle(SUM);
        it.bench.wait_ms(2_000);
        it.settle(SUM);
    }
    let cached = it.bench.write(0, 4 * KIB);
    let uncached = it.bench.write(8 * MIB, 4 * KIB);
    let hung = it.bench.only_io();
    assert_eq!((hung.target, hung.op), (flash(RING_DEVICE), IoOp::WriteJournal));
    it.bench.wait_ms(6_000);
    assert!(it.bench.events.contains(&Event::Stalled(DeviceId(RING_DEVICE))));
    let change = it.bench.only_io();
    assert_eq!((change.target, change.offset), (backing(), 8 * MIB));
    it.end(change, SUM);
    assert_eq!(it.bench.outcome(uncached), Outcome::WriteNotCopied);
    let later = it.bench.write(16 * MIB, 4 * KIB);
    let change = it.bench.only_io();
    assert_eq!((change.target, change.offset), (backing(), 16 * MIB));
    it.end(change, SUM);
    assert!(it.bench.answered(later) && !it.bench.answered(cached));
    let read = it.bench.read(8 * MIB, 4 * KIB);
    let miss = it.bench.only_io();
    it.end(miss, SUM);
    assert_eq!(it.bench.outcome(read), Outcome::MissFlashBusy);
    assert_eq!(it.bench.ios.len(), 0, "nothing is filled");

    let mut after_crash = write_through_again(it.recover(2, &[SUM]));
    assert_eq!(after_crash.read_alone(0, 4 * KIB), Outcome::Hit, "the write of it did not go on");
    assert_eq!(after_crash.read_alone(8 * MIB, 4 * KIB), Outcome::MissFilled);

    it.end(hung, SUM);
    it.settle(SUM);
    assert!(it.bench.answered(cached));
    assert_eq!(it.bench.read_alone(8 * MIB, 4 * KIB), Outcome::MissFilled);
}

/// The cache has evicted a block, and the record of this eviction is not durable. Recovery after a
/// crash would restore the block, so a change of the block waits.
#[test]
fn a_change_of_a_block_that_a_crash_brings_back_waits_for_a_hung_journal() {
    let mut it = write_through();
    for at in 0..16 {
        it.bench.read(at * MIB, 4 * KIB);
        it.settle(SUM);
        it.bench.wait_ms(2_000);
        it.settle(SUM);
    }
    it.bench.read(16 * MIB, 4 * KIB);
    it.settle(SUM);
    assert_eq!(it.bench.stats().evictions.blocks, 1);
    let change = it.bench.write(0, 4 * KIB);
    let hung = it.bench.only_io();
    assert_eq!((hung.target, hung.op), (flash(RING_DEVICE), IoOp::WriteJournal));
    it.bench.wait_ms(6_000);
    assert!(it.bench.events.contains(&Event::Stalled(DeviceId(RING_DEVICE))));
    assert_eq!((it.bench.ios.len(), it.bench.answered(change)), (0, false));

    let mut after_crash = write_through_again(it.recover(2, &[SUM]));
    assert_eq!(after_crash.read_alone(0, 4 * KIB), Outcome::Hit, "its older data is back");

    it.end(hung, SUM);
    it.settle(SUM);
    assert!(it.bench.answered(change));
}

/// A sector is clean, and the commit that records this is in progress. The sector is dropped
/// meanwhile because flash has other data. The end of that commit does not release the sector,
/// because the durable journal still describes the dropped data.
#[test]
fn a_commit_releases_no_sector_that_a_later_record_describes() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    bench.start_change(CacheChange::Drain);
    bench.next(flash(0), IoOp::Read);
    bench.next(backing(), VOLATILE);
    bench.next(backing(), IoOp::Flush);
    assert_eq!(bench.dirty(), 0);
    let page = bench.only_io();
    assert_eq!((page.target, page.op), (flash(RING_DEVICE), IoOp::WriteJournal));
    let read = bench.read(0, 4 * KIB);
    let hit = bench.only_io();
    assert_eq!((hit.target, hit.op), (flash(0), IoOp::Read));
    bench.end_with(hit, Ok(()), &[SUM + 1]);
    let miss = bench.ios.pop_back().expect("the backing is read");
    assert_eq!((miss.target, miss.op), (backing(), IoOp::Read));
    bench.end(page);
    bench.next(flash(RING_DEVICE), IoOp::Flush);
    bench.end(miss);
    assert_eq!(bench.reply(read).expect("answered").result, Ok(()));
    let fills = |bench: &Bench| bench.ios.iter().any(|io| (io.target, io.op) == (flash(0), VOLATILE));
    assert!(!fills(&bench), "the record of the drop is not durable: {:?}", bench.ios);
    bench.wait_ms(2000);
    bench.settle();
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit, "the sector was released in the end");
}

/// The record of a write that was in flight when the journal died is in no page. So the reply to
/// this write waits for the new journal, which has the record.
#[test]
fn a_write_in_flight_when_the_journal_dies_is_answered_by_the_new_journal() {
    let mut it = single();
    it.write(0, SUM);
    let write = it.bench.write(64 * KIB, 4 * KIB);
    let on_its_way = it.bench.only_io();
    assert_eq!((on_its_way.target, on_its_way.op), (flash(0), VOLATILE));
    let flush = it.bench.request(Op::Flush, 0, 0);
    while let Some(io) = it.bench.ios.pop_front() {
        match io.target == flash(RING_DEVICE) {
            true => it.bench.fail(io),
            false => it.end(io, SUM),
        }
    }
    assert!(it.bench.events.contains(&Event::JournalLost(DISK)));
    it.end(on_its_way, NEWER);
    it.settle(SUM);
    assert!(!it.bench.answered(write), "no journal has its record");
    let renew = it.bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    it.pages.clear();
    while let Some(io) = it.bench.ios.pop_front() {
        assert!(!it.bench.answered(write), "before {io:?}");
        it.end(io, SUM);
    }
    assert!(it.bench.result(renew).expect("done").is_ok());
    assert_eq!((it.bench.outcome(write), it.bench.answered(flush)), (Outcome::WriteBack, true));
    let recovered = it.recover(2, &[SUM]);
    let dirty: Vec<_> = recovered.dirty().map(|dirty| (dirty.sector, dirty.place.sum)).collect();
    assert_eq!(dirty, [(0, Some(SUM)), (16, Some(NEWER))]);
}

/// A commit for which no request waits records the newest checksums of two copies too. A later
/// flush has nothing left to wait for. If the copies differ after a power cut, the one with the
/// flushed data is right, also if it is the second.
#[test]
fn each_commit_of_two_copies_records_the_newest_checksums() {
    let mut it = doubled();
    it.write(0, SUM);
    it.flush();
    it.write(0, NEWER);
    // This record is due after a second.
    it.write(64 * KIB, SUM);
    let mut pages = 0;
    for _ in 0..3 {
        it.bench.wait_ms(500);
        pages += it.bench.ios.iter().filter(|io| io.op == IoOp::WriteJournal).count();
        it.settle(SUM);
    }
    assert_eq!(pages, 1, "one commit");
    let flush = it.bench.request(Op::Flush, 0, 0);
    assert!(it.bench.answered(flush), "everything is durable");
    for (on_flash, expected) in [([SUM, NEWER], NEWER), ([NEWER, SUM], NEWER)] {
        let recovered = it.recover(2, &on_flash);
        let first = recovered.dirty().find(|dirty| dirty.sector == 0).expect("it is dirty");
        assert_eq!(first.place.sum, Some(expected), "flash has {on_flash:?}");
    }
}

/// A flush is not answered before the checksums of all overwrites before it are durable.
#[test]
fn a_flush_waits_for_the_checksums_of_overwrites() {
    let mut it = doubled();
    it.write(0, SUM);
    it.flush();
    it.write(0, NEWER);
    let flush = it.bench.request(Op::Flush, 0, 0);
    while let Some(io) = it.bench.ios.pop_front() {
        assert!(!it.bench.answered(flush), "before {io:?}");
        it.end(io, SUM);
    }
    assert!(it.bench.answered(flush));
    let recovered = it.recover(2, &[SUM, NEWER]);
    assert_eq!(recovered.dirty().next().expect("it is dirty").place.sum, Some(NEWER));
}

/// A range of dirty sectors is read from the second copies, although the backing does not answer.
#[test]
fn dirty_data_is_read_from_its_second_copy_without_the_backing() {
    let mut bench = mirrored(Copies::TwoOfDirty);
    bench.write_alone(0, 8 * KIB);
    for fails in [true, false] {
        let read = bench.read(0, 8 * KIB);
        let mut devices = vec![];
        while let Some(io) = bench.ios.pop_front() {
            devices.push(io.target);
            match io.target {
                Target::Backing(_) => bench.fail(io),
                Target::Flash(DeviceId(0)) if fails => bench.fail(io),
                Target::Flash(DeviceId(0)) => bench.end_with(io, Ok(()), &[SUM + 1; 2]),
                Target::Flash(_) => bench.end(io),
            }
        }
        assert_eq!(bench.reply(read).expect("answered").result, Ok(()), "{devices:?}");
        assert!(devices.contains(&flash(1)) && !devices.contains(&backing()), "{devices:?}");
    }
    assert_eq!((bench.dirty(), bench.stats().sectors_lost), (2, 0));
    // Of this range, the backing has a part.
    let read = bench.read(0, 12 * KIB);
    bench.next(backing(), IoOp::Read);
    bench.settle();
    assert_eq!(bench.reply(read).expect("answered").result, Ok(()));
}

/// A new journal ring has the checksums of sectors that were overwritten since the last commit.
#[test]
fn a_new_ring_records_the_checksums_of_overwritten_sectors() {
    let mut it = single();
    it.write(0, SUM);
    it.flush();
    it.write(0, NEWER);
    let renew = it.bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    it.pages.clear();
    it.settle(SUM);
    assert!(it.bench.result(renew).expect("done").is_ok());
    let recovered = it.recover(2, &[SUM]);
    let dirty: Vec<_> = recovered.dirty().map(|dirty| (dirty.sector, dirty.place.sum)).collect();
    assert_eq!(dirty, [(0, Some(NEWER))]);
}

/// After a failed flush and a kill, a sector without a recorded checksum may be readable and not
/// durable. A recovery writes such a sector again, even if it has only one copy, and the new ring
/// has its checksum.
#[test]
fn a_recovery_writes_sectors_without_a_checksum_again() {
    let mut it = single();
    it.write(0, SUM);
    it.write(64 * KIB, SUM);
    let renew = it.bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    it.settle(SUM);
    assert!(it.bench.result(renew).expect("done").is_ok());
    // The commit of this overwrite records that the checksum of sector 0 is unknown, and no other
    // record follows.
    it.write(0, NEWER);
    it.bench.wait_ms(2000);
    it.settle(SUM);
    let recovered = it.recover(2, &[NEWER]);
    let mut it = Crashing::of(Bench::bare(Limits::default()));
    it.bench.engine.lend(BufferId(1 << 20), 1 << 20);
    let enable = Enable {
        config: CacheConfig { mode: Mode::WriteBack, destage: lazy(), ..config(MIB, 4 * KIB) },
        segments: vec![DataSegment { place: segment(0, 0), ordinal: 0, seconds_only: false }],
        journal: Some(ring(3)),
        recovered: Some(recovered),
    };
    let command = it.bench.start_change(CacheChange::Enable(Box::new(enable)));
    let mut written = vec![];
    let mut has_pages = false;
    while let Some(io) = it.bench.ios.pop_front() {
        has_pages |= io.op == IoOp::WriteJournal;
        if (io.target, io.op) == (flash(0), VOLATILE) {
            assert!(!has_pages, "the data is written before the ring");
            written.push(io.offset);
        }
        it.end(io, NEWER);
    }
    assert!(it.bench.result(command).expect("done").is_ok());
    assert!(written.contains(&0), "{written:?}");
    let recovered = it.recover(3, &[NEWER]);
    let first = recovered.dirty().find(|dirty| dirty.sector == 0).expect("it is dirty");
    assert_eq!(first.place.sum, Some(NEWER));
}

/// The checksum of a sector that is being overwritten is not recorded, however long the write takes.
#[test]
fn a_sector_that_is_being_overwritten_is_not_quiet() {
    let mut it = single();
    it.write(0, SUM);
    it.flush();
    it.write(0, NEWER);
    it.bench.write(0, 4 * KIB);
    let slow = it.bench.only_io();
    assert_eq!((slow.target, slow.op), (flash(0), VOLATILE));
    for _ in 0..40 {
        it.bench.wait_ms(1000);
        it.settle(SUM);
    }
    let renewed = it.bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    assert_eq!(it.bench.result(renewed), None, "it waits for the write");
    let recovered = it.recover(1, &[NEWER + 1]);
    assert_eq!(recovered.dirty().map(|dirty| dirty.place.sum).collect::<Vec<_>>(), [None]);
}

/// A flush of flash may have failed before the process ended. Then the data of the journal tail can be
/// read, but the next power failure may lose it, although the new journal would record it as durable.
#[test]
fn data_that_only_the_journal_tail_describes_is_written_to_flash_again() {
    let mut it = single();
    // The pages of the first ring were not kept.
    let renew = it.bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    it.settle(SUM);
    assert!(it.bench.result(renew).expect("done").is_ok());
    it.write(0, SUM);
    it.flush();
    let recovered = it.recover(2, &[SUM]);
    assert_eq!(recovered.summary.sectors_dirty, 1);

    let mut bench = Bench::bare(Limits::default());
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    let enable = Enable {
        config: CacheConfig { mode: Mode::WriteBack, destage: lazy(), ..config(MIB, 4 * KIB) },
        segments: vec![DataSegment { place: segment(0, 0), ordinal: 0, seconds_only: false }],
        journal: Some(ring(3)),
        recovered: Some(recovered),
    };
    let command = bench.start_change(CacheChange::Enable(Box::new(enable)));
    let mut of_data = vec![];
    while let Some(io) = bench.ios.pop_front() {
        if io.target == flash(0) && io.len == 4 * KIB {
            of_data.push(io.op);
        }
        bench.end(io);
    }
    assert!(bench.result(command).expect("done").is_ok());
    assert_eq!(of_data, [IoOp::Read, VOLATILE]);
    assert_eq!(bench.dirty(), 1);
}

/// Memory that counts the entries of the crash log.
#[derive(Debug, Clone, Default)]
struct CountedEntries(Arc<AtomicU64>);

impl SurvivingMemory for CountedEntries {
    fn write(&mut self, _: usize, _: &[u8]) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Journal records that are in a written page need no room in the crash log.
#[test]
fn the_crash_log_has_room_for_records_after_the_journal_has_the_earlier_ones() {
    let mut bench = Bench::bare(Limits::default());
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    let entries = CountedEntries::default();
    assert!(bench.engine.keep_records(DISK, Box::new(entries.clone())));
    bench.make_persistent(4 * KIB, Mode::WriteBack, lazy());
    for _ in 0..200 {
        (0..64).for_each(|sector| _ = bench.write_alone(sector * 4 * KIB, 4 * KIB));
        bench.request(Op::Discard(Durability::Volatile), 0, 256 * KIB);
        bench.settle();
        bench.flush();
    }
    let before = entries.0.load(Ordering::Relaxed);
    assert!(before > 10_000, "more than the crash log has room for: {before}");
    let write = bench.write(512 * KIB, 4 * KIB);
    bench.next(flash(0), VOLATILE);
    assert!(bench.answered(write));
    assert!(entries.0.load(Ordering::Relaxed) > before, "the record of the write");
}

/// The crash log has no room for the end of an acknowledged discard. Then reads wait until a commit
/// has recorded the end: a guest that has read zeroes must not read the old data after a kill.
#[test]
fn reads_wait_for_the_end_of_a_discard_that_the_crash_log_cannot_record() {
    let mut bench = Bench::bare(Limits::default());
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    assert!(bench.engine.keep_records(DISK, Box::new(CountedEntries::default())));
    bench.make_persistent(4 * KIB, Mode::WriteBack, lazy());
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let mut pages = Vec::new();
    let mut end_all_but_pages = |bench: &mut Bench| {
        while let Some(io) = bench.ios.pop_front() {
            match io.op == IoOp::WriteJournal {
                true => pages.push(io),
                false => bench.end(io),
            }
        }
    };
    // While journal pages are being written, the crash log fills up with overwrites.
    let mut write = bench.write(64 * KIB, 64 * KIB);
    end_all_but_pages(&mut bench);
    for _ in 0..20_000 {
        if !bench.answered(write) {
            break;
        }
        write = bench.write(64 * KIB, 64 * KIB);
        end_all_but_pages(&mut bench);
    }
    assert!(!bench.answered(write), "the crash log is full");
    let discard = bench.request(Op::Discard(Durability::Volatile), 0, 4 * KIB);
    assert!(bench.answered(discard));
    let read = bench.read(0, 4 * KIB);
    end_all_but_pages(&mut bench);
    assert!(!bench.answered(read), "the read would see the end of the discard");
    for io in pages {
        bench.end(io);
    }
    bench.settle();
    assert!(bench.answered(read) && bench.answered(write));
    assert_eq!(bench.dirty(), 16, "the discarded sector is not dirty");
}
