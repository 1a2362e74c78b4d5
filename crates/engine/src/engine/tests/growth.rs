//! Disks that grow while they are served: docs/decisions/0017.

use super::write_back::{backing, flash, ring};
use super::*;
use crate::command::{Bitmap, BitmapChange, MemoryConfig, Role};
use crate::granules::Granules;
use crate::stats::CacheState;

fn grow(size_bytes: u64) -> CacheChange {
    CacheChange::GrowDisk(size_bytes, None)
}

impl Bench {
    /// Sends a read, and completes all I/O. Returns the result of the read.
    fn result_of_read(&mut self, offset: u64, len: u64) -> Result<(), IoError> {
        let id = self.read(offset, len);
        self.settle();
        self.reply(id).expect("answered").result
    }
}

#[test]
fn a_disk_without_a_persistent_cache_grows_at_once() {
    for cached in [false, true] {
        let mut bench = if cached { Bench::cached(16, 4 * KIB) } else { Bench::bare(Limits::default()) };
        bench.read_alone(0, 4 * KIB);
        assert_eq!(bench.result_of_read(64 * MIB, 4 * KIB), Err(IoError::Invalid));
        // Requests in progress continue.
        let old = bench.read(MIB, 4 * KIB);
        assert_eq!(bench.change(grow(65 * MIB)), Ok(vec![]));
        let new = bench.read(65 * MIB - 4 * KIB, 4 * KIB);
        assert_eq!(bench.ios.len(), 2, "neither waits");
        bench.settle();
        assert_eq!(bench.reply(old).unwrap().result, Ok(()));
        assert_eq!(bench.reply(new).unwrap().result, Ok(()));
        assert_eq!(bench.result_of_read(65 * MIB, 512), Err(IoError::Invalid));
        if cached {
            assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit, "contents stay");
            assert_eq!(bench.read_alone(65 * MIB - 4 * KIB, 4 * KIB), Outcome::Hit);
        }
    }
}

#[test]
fn invalid_requests_are_refused() {
    let mut bench = Bench::bare(Limits::default());
    assert_eq!(bench.change(grow(64 * MIB - 4096)), Err(CommandError::Shrinks));
    assert_eq!(bench.change(grow(64 * MIB + 100)), Err(CommandError::Unworkable));
    assert_eq!(bench.change(grow(64 * MIB)), Ok(vec![]), "as it is");
    let with_ring = CacheChange::GrowDisk(65 * MIB, Some(ring(1)));
    assert_eq!(bench.change(with_ring), Err(CommandError::NoCache), "a ring for nothing");
    bench.command(Command::Watch(true)).unwrap();
    assert_eq!(bench.change(grow(65 * MIB)), Err(CommandError::WrongRole), "a peer reads it");
    bench.command(Command::Watch(false)).unwrap();
    bench.command(Command::Own(Role::Standby)).unwrap();
    assert_eq!(bench.change(grow(65 * MIB)), Err(CommandError::WrongRole));
    bench.command(Command::Own(Role::Here)).unwrap();
    bench.enable(64 * KIB, 4 * KIB);
    assert_eq!(bench.change(grow(1 << 45)), Err(CommandError::Unworkable), "2^33 blocks of 4 KiB");
    bench.change(CacheChange::Disable).unwrap();
    assert_eq!(bench.change(grow(1 << 45)), Ok(vec![]), "a disk has no blocks");
    let memory = MemoryConfig { bytes: 64 * KIB, page_bytes: 4096 };
    assert_eq!(bench.command(Command::Memory(Some(memory))), Err(CommandError::Unworkable));
}

/// Cached copies of the sector that contains the old end of the disk have zeroes after that end,
/// where the backing may have data. So hob drops these copies.
#[test]
fn a_sector_that_was_not_whole_is_forgotten() {
    let size = MIB + 512;
    let mut bench = Bench::with_disk(Limits::default(), size, Access::ReadWrite);
    bench.enable(64 * KIB, 4 * KIB);
    assert_eq!(bench.read_alone(MIB - 4 * KIB, 4 * KIB + 512), Outcome::MissFilled);
    assert_eq!(bench.read_alone(MIB, 512), Outcome::Hit);
    let slow = bench.read(0, 4 * KIB);
    let io = bench.only_io();
    let command = bench.start_change(grow(size + 512));
    assert_eq!(bench.result(command), None, "what goes on may put it there again");
    let held = bench.read(MIB, 512);
    assert_eq!((bench.ios.len(), bench.stats().cache), (0, CacheState::Changing));
    bench.end(io);
    // The fill of the first read ends, and then the disk grows.
    let fill = bench.ios.pop_front();
    fill.into_iter().for_each(|fill| bench.end(fill));
    assert_eq!(bench.result(command), Some(Ok(vec![])));
    bench.settle();
    assert!(bench.reply(slow).is_some());
    assert_eq!(bench.outcome(held), Outcome::MissFilled, "not from flash");
    assert_eq!(bench.read_alone(MIB - 4 * KIB, 4 * KIB), Outcome::Hit, "its neighbour stays");
    assert_eq!(bench.read_alone(MIB, 1024), Outcome::Hit);
}

#[test]
fn memory_forgets_it_too() {
    let size = MIB + 512;
    let mut bench = Bench::with_disk(Limits::default(), size, Access::ReadWrite);
    bench.command(Command::Memory(Some(MemoryConfig { bytes: 64 * KIB, page_bytes: 4096 }))).unwrap();
    bench.read_alone(MIB - 4 * KIB, 4 * KIB + 512);
    assert_eq!(bench.read_alone(MIB, 512), Outcome::HitMemory);
    assert_eq!(bench.change(grow(2 * MIB)), Ok(vec![]));
    assert_eq!(bench.read_alone(MIB, 512), Outcome::CacheOff);
    assert_eq!(bench.read_alone(MIB - 4 * KIB, 4 * KIB), Outcome::HitMemory);
}

#[test]
fn with_a_persistent_cache_it_is_larger_when_the_new_ring_is_durable() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 8 * KIB);
    bench.flush();
    let before = bench.stats();
    let command = bench.start_change(CacheChange::GrowDisk(128 * MIB, Some(ring(2))));
    let held = bench.read(0, 4 * KIB);
    assert_eq!((bench.reply(held), bench.result(command)), (None, None));
    assert_eq!(bench.result_of_read_now(64 * MIB), Some(Err(IoError::Invalid)), "not yet");
    bench.settle();
    let old_ring = ring(1).copies.concat();
    assert_eq!(bench.result(command), Some(Ok(old_ring)));
    assert_eq!(bench.outcome(held), Outcome::Hit);
    assert_eq!((bench.dirty(), bench.stats().sectors_valid), (2, before.sectors_valid), "contents stay");
    bench.write_alone(128 * MIB - 4 * KIB, 4 * KIB);
    assert_eq!(bench.read_alone(128 * MIB - 4 * KIB, 4 * KIB), Outcome::Hit, "what is new is cached");
    let drain = bench.start_change(CacheChange::Drain);
    bench.settle();
    assert_eq!((bench.result(drain), bench.dirty()), (Some(Ok(vec![])), 0));
}

impl Bench {
    /// Returns the result of a read that needs no I/O.
    fn result_of_read_now(&mut self, offset: u64) -> Option<Result<(), IoError>> {
        let id = self.read(offset, 4 * KIB);
        self.reply(id).map(|reply| reply.result)
    }
}

#[test]
fn a_ring_that_cannot_be_written_leaves_the_disk_as_it_was() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 8 * KIB);
    bench.flush();
    assert_eq!(bench.change(grow(128 * MIB)), Err(CommandError::NoJournal), "it effect no ring");
    let command = bench.start_change(CacheChange::GrowDisk(128 * MIB, Some(ring(2))));
    while let Some(io) = bench.ios.pop_front() {
        if io.target == flash(super::write_back::RING_DEVICE) { bench.fail(io) } else { bench.end(io) }
    }
    assert_eq!(bench.result(command), Some(Err(CommandError::JournalFailed)));
    assert_eq!(bench.result_of_read_now(64 * MIB), Some(Err(IoError::Invalid)));
    assert_eq!((bench.read_alone(0, 8 * KIB), bench.dirty()), (Outcome::Hit, 2));
}

#[test]
fn a_persistent_cache_forgets_the_old_end_in_both_copies() {
    use crate::command::{Copies, Enable, Mode};
    let size = MIB + 512;
    let mut bench = Bench::with_disk(Limits::default(), size, Access::ReadWrite);
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    let config = CacheConfig { mode: Mode::WriteThrough, copies: Copies::TwoOfAll, ..config(MIB, 4 * KIB) };
    let data = |device, ordinal| DataSegment { place: segment(device, 0), ordinal, seconds_only: false };
    let segments = vec![data(0, 0), data(1, 1)];
    let enable = Enable { config, segments, journal: Some(ring(1)), recovered: None };
    bench.start_change(CacheChange::Enable(Box::new(enable)));
    bench.settle();
    bench.read_alone(MIB - 4 * KIB, 4 * KIB + 512);
    assert_eq!(bench.read_alone(MIB, 512), Outcome::Hit);
    let valid = bench.stats().sectors_valid;
    let command = bench.start_change(CacheChange::GrowDisk(size + MIB, Some(ring(2))));
    bench.settle();
    assert!(matches!(bench.result(command), Some(Ok(_))));
    assert_eq!(bench.stats().sectors_valid, valid - 2, "the last sector, twice");
    let read = bench.read(MIB, 4 * KIB);
    bench.next(backing(), IoOp::Read);
    bench.settle();
    assert_eq!(bench.outcome(read), Outcome::MissFilled);
    assert_eq!(bench.read_alone(MIB - 4 * KIB, 4 * KIB), Outcome::Hit);
}

#[test]
fn new_parts_of_a_disk_count_as_changed_in_bitmaps() {
    let mut bench = Bench::bare(Limits::default());
    let granules = || Granules::new(64 * MIB, 64 * KIB).expect("workable");
    let made = Bitmap::recording("daily".to_owned(), granules());
    bench.command(Command::Bitmap(BitmapChange::Add(Box::new(made)))).unwrap();
    bench.write_alone(0, 4 * KIB);
    let (name, frozen) = ("daily".to_owned(), "monday".to_owned());
    bench.command(Command::Bitmap(BitmapChange::Rotate { name, frozen })).unwrap();
    bench.change(grow(65 * MIB)).unwrap();
    bench.write_alone(MIB, 4 * KIB);
    let has = |at: usize, offset| bench.engine.bitmaps(DISK)[at].granules.contains(offset);
    assert_eq!([0, MIB, 64 * MIB - 1, 64 * MIB].map(|offset| has(0, offset)), [false, true, false, true]);
    assert_eq!([0, MIB, 64 * MIB - 1, 64 * MIB].map(|offset| has(1, offset)), [true, false, false, true]);
    let late = Bitmap::recording("late".to_owned(), granules());
    let added = bench.command(Command::Bitmap(BitmapChange::Add(Box::new(late))));
    assert_eq!(added, Err(CommandError::Unworkable), "of the size before");
}
