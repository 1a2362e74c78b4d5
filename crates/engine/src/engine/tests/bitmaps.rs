//! Dirty bitmaps: which changes are recorded, when, and the bitmaps at the removal of the disk.

use super::*;
use crate::command::{Bitmap, BitmapChange, Discard};
use crate::granules::Granules;
use crate::io::Zeroing;

const GRANULE: u64 = 64 * KIB;

fn empty(name: &str) -> BitmapChange {
    let granules = Granules::new(64 * MIB, GRANULE).expect("it can be");
    BitmapChange::Add(Box::new(Bitmap::recording(name.to_owned(), granules)))
}

fn named(name: &str) -> String {
    name.to_owned()
}

impl Bench {
    fn bitmap(&mut self, change: BitmapChange) -> Result<Vec<Segment>, CommandError> {
        self.command(Command::Bitmap(change))
    }

    fn rotate(&mut self, name: &str, frozen: &str) -> Result<Vec<Segment>, CommandError> {
        self.bitmap(BitmapChange::Rotate { name: named(name), frozen: named(frozen) })
    }

    fn merge(&mut self, from: &str, into: &str) -> Result<Vec<Segment>, CommandError> {
        self.bitmap(BitmapChange::Merge { from: named(from), into: named(into) })
    }

    /// Returns the numbers of the changed granules.
    fn noted(&self, name: &str) -> Vec<u64> {
        let found = self.engine.bitmaps(DISK).iter().find(|bitmap| bitmap.name == name).expect("it is there");
        (0..64 * MIB / GRANULE).filter(|granule| found.granules.contains(granule * GRANULE)).collect()
    }

    /// Removes the disk, and returns its bitmaps.
    fn remove(&mut self) -> Vec<Bitmap> {
        let command = self.start_command(Command::RemoveDisk);
        self.settle();
        assert_eq!(self.result(command).map(|result| result.is_ok()), Some(true));
        let handed = |event: &Event| match event {
            Event::Bitmaps { disk: DISK, bitmaps } => Some(bitmaps.clone()),
            _ => None,
        };
        self.events.iter().find_map(handed).unwrap_or_default()
    }
}

#[test]
fn every_kind_of_change_is_noted_and_nothing_else() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.write_alone(0, 4 * KIB);
    bench.bitmap(empty("b")).expect("room");
    assert_eq!(bench.noted("b"), [], "what was before is not its matter");
    bench.write_alone(GRANULE - 512, 1024);
    bench.request(Op::Discard(Durability::Volatile), 3 * GRANULE, 10);
    bench.request(Op::WriteZeroes(Durability::Durable, Zeroing::MayUnmap), 5 * GRANULE, GRANULE);
    bench.settle();
    bench.read_alone(8 * GRANULE, 4 * KIB);
    bench.request(Op::Flush, 0, 0);
    bench.request(Op::Prefetch, 9 * GRANULE, 4 * KIB);
    bench.settle();
    assert_eq!(bench.noted("b"), [0, 1, 3, 5]);
    let past = bench.write(64 * MIB, 512);
    assert_eq!(bench.reply(past).map(|reply| reply.result), Some(Err(IoError::Invalid)));
    assert_eq!(bench.noted("b"), [0, 1, 3, 5], "what is refused changes nothing");
}

#[test]
fn a_change_that_failed_may_have_been_done_in_part() {
    let mut bench = Bench::bare(Limits::default());
    bench.bitmap(empty("b")).expect("room");
    bench.write(0, 4 * KIB);
    let io = bench.only_io();
    assert_eq!(bench.noted("b"), [], "it is not answered yet");
    bench.fail(io);
    assert_eq!(bench.noted("b"), [0]);
}

/// A reader of the frozen bitmap may have read the content before a write in flight, so the next
/// bitmap has the write.
#[test]
fn a_change_in_flight_is_in_the_active_bitmap() {
    let mut bench = Bench::bare(Limits::default());
    bench.bitmap(empty("b")).expect("room");
    bench.write_alone(GRANULE, 512);
    bench.write(2 * GRANULE, 512);
    bench.rotate("b", "b1").expect("it records");
    assert_eq!((bench.noted("b1"), bench.noted("b")), (vec![1], vec![]));
    bench.settle();
    assert_eq!((bench.noted("b1"), bench.noted("b")), (vec![1], vec![2]));
    bench.merge("b1", "b").expect("both are there");
    assert_eq!(bench.noted("b"), [1, 2]);
    assert_eq!(bench.engine.bitmaps(DISK).len(), 1);
    bench.bitmap(BitmapChange::Clear(named("b"))).expect("it records");
    assert_eq!(bench.noted("b"), []);
}

#[test]
fn invalid_values_are_refused() {
    let mut bench = Bench::bare(Limits::default());
    assert_eq!(bench.bitmap(BitmapChange::Clear(named("b"))), Err(CommandError::NoSuchBitmap));
    bench.bitmap(empty("b")).expect("room");
    assert_eq!(bench.bitmap(empty("b")), Err(CommandError::BitmapExists));
    let other = Bitmap::recording(named("c"), Granules::new(MIB, GRANULE).expect("it can be"));
    assert_eq!(bench.bitmap(BitmapChange::Add(Box::new(other))), Err(CommandError::Unworkable));
    assert_eq!(bench.rotate("b", "b"), Err(CommandError::BitmapExists));
    bench.rotate("b", "b1").expect("it records");
    assert_eq!(bench.rotate("b", "b1"), Err(CommandError::BitmapExists));
    assert_eq!(bench.rotate("b1", "b2"), Err(CommandError::BitmapFrozen));
    assert_eq!(bench.merge("b", "b"), Err(CommandError::BitmapExists));
    assert_eq!(bench.merge("b", "b1"), Err(CommandError::BitmapFrozen));
    for change in [BitmapChange::Clear(named("b1")), BitmapChange::InsertAll(named("b1"))] {
        assert_eq!(bench.bitmap(change), Err(CommandError::BitmapFrozen));
    }
    bench.bitmap(BitmapChange::Remove(named("b1"))).expect("it is there");
    assert_eq!(bench.bitmap(BitmapChange::Remove(named("b1"))), Err(CommandError::NoSuchBitmap));
}

#[test]
fn the_final_bitmaps_have_every_acknowledged_change() {
    let mut bench = Bench::bare(Limits::default());
    bench.bitmap(empty("b")).expect("room");
    bench.write_alone(GRANULE, 512);
    bench.rotate("b", "b1").expect("it records");
    let write = bench.write(7 * GRANULE, 512);
    let removal = bench.start_command(Command::RemoveDisk);
    assert_eq!(bench.result(removal), None, "a write is under way");
    let io = bench.only_io();
    bench.end(io);
    assert!(bench.reply(write).is_some());
    let io = bench.only_io();
    assert_eq!(io.op, IoOp::Flush, "what can get lost would be read differently later");
    assert_eq!(bench.result(removal), None);
    bench.end(io);
    assert_eq!(bench.result(removal), Some(Ok(vec![])));
    let Some(Event::Bitmaps { bitmaps, .. }) = bench.events.iter().rev().nth(1) else {
        panic!("{:?}", bench.events)
    };
    let left: Vec<_> =
        bitmaps.iter().map(|b| (b.name.as_str(), b.is_recording, b.granules.bytes())).collect();
    assert_eq!(left, [("b", true, GRANULE), ("b1", false, GRANULE)]);
    assert!(bitmaps[0].granules.contains(7 * GRANULE) && bitmaps[1].granules.contains(GRANULE));
}

#[test]
fn where_the_backing_cannot_be_flushed_everything_counts_as_changed() {
    let mut bench = Bench::bare(Limits::default());
    bench.bitmap(empty("b")).expect("room");
    let removal = bench.start_command(Command::RemoveDisk);
    let io = bench.only_io();
    bench.fail(io);
    assert_eq!(bench.result(removal), Some(Ok(vec![])));
    let handed_out = bench.events.iter().find_map(|event| match event {
        Event::Bitmaps { bitmaps, .. } => Some(bitmaps),
        _ => None,
    });
    assert_eq!(handed_out.expect("before the disk is gone")[0].granules.bytes(), 64 * MIB);
}

/// After dirty data is discarded, the disk has the backing's content, which may be older than the
/// start of the bitmap.
#[test]
fn acknowledged_writes_that_are_given_up_are_changes() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.bitmap(empty("b")).expect("room");
    let discard = bench.start_change(CacheChange::DiscardDirty(Discard::Told));
    bench.settle();
    assert_eq!(bench.result(discard), Some(Ok(vec![])));
    assert!(bench.noted("b").contains(&0));
    let bitmaps = bench.remove();
    assert_eq!(bitmaps.len(), 1);
}

/// Another host may have changed everything while it owned the disk.
#[test]
fn a_disk_that_comes_back_from_another_host_is_changed_everywhere() {
    use crate::command::Role;
    let mut bench = Bench::bare(Limits::default());
    bench.bitmap(empty("b")).expect("room");
    bench.rotate("b", "b1").expect("it records");
    for role in [Role::Frozen, Role::Away, Role::Here] {
        assert_eq!(bench.noted("b"), []);
        bench.command(Command::Own(role)).expect("nothing is in flight");
    }
    assert_eq!((bench.noted("b").len() as u64, bench.noted("b1")), (64 * MIB / GRANULE, vec![]));
    bench.bitmap(BitmapChange::Clear(named("b"))).expect("it records");
    for role in [Role::Frozen, Role::Here] {
        bench.command(Command::Own(role)).expect("nothing is in flight");
    }
    assert_eq!(bench.noted("b"), [], "it was never handed over");
    for role in [Role::Frozen, Role::Away] {
        bench.command(Command::Own(role)).expect("nothing is in flight");
    }
    assert_eq!(bench.remove()[0].granules.bytes(), 64 * MIB);
}
