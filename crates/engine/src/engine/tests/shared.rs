//! Reads that the parent's disk served: their data is not promoted a second time.

use super::*;
use crate::qos::{Control, Resource};

const BLOCK: u64 = 16 * KIB;

impl Bench {
    /// Completes the only I/O in flight. Another disk served the sectors `shared` of this I/O.
    fn end_shared(&mut self, shared: &[(u64, u64)]) {
        let io = self.only_io();
        assert_eq!((io.target, io.op), (Target::Backing(DISK), IoOp::Read));
        assert_eq!(self.engine.promote_of(io.id), self.promote);
        self.engine.pass_on(self.now, io.id);
        self.now = self.now + 1000;
        self.engine.handle_shared(self.now, io.id, shared, &[]);
        self.drain();
    }
}

#[test]
fn data_cached_by_another_disk_is_not_promoted() {
    let mut bench = Bench::cached(8, BLOCK);
    for _ in 0..3 {
        let id = bench.read(0, 2 * BLOCK);
        bench.end_shared(&[(0, 3), (3, 8)]);
        assert_eq!(bench.outcome(id), Outcome::BypassShared);
        assert!(bench.ios.is_empty(), "{:?}", bench.ios);
        assert!(bench.released.contains(&BufferId(id.0 as u32)));
    }
    let stats = bench.stats();
    assert_eq!((stats.shared_read_bytes, stats.backing.ios, stats.backing.read_bytes), (6 * BLOCK, 0, 0));
    assert_eq!((stats.blocks_cached, stats.flash.ios), (0, 0));
    // After a write the block is the clone's own, and is promoted as usual.
    bench.write_alone(0, BLOCK);
    assert_eq!(bench.read_alone(0, BLOCK), Outcome::Hit);
    assert_eq!(bench.read_alone(BLOCK, BLOCK), Outcome::MissFilled);
}

#[test]
fn of_a_read_that_is_shared_in_part_the_rest_is_promoted() {
    let mut bench = Bench::cached(8, BLOCK);
    // Blocks 0 and 1, and half of block 2, of sectors 0 to 12.
    let id = bench.read(0, 3 * BLOCK);
    bench.end_shared(&[(0, 4), (10, 12)]);
    assert_eq!(bench.outcome(id), Outcome::MissFilled);
    let filled: u64 = bench.ios.iter().filter(|io| is_flash(io)).map(|io| io.len).sum();
    assert_eq!(filled, BLOCK + BLOCK / 2);
    bench.settle();
    assert_eq!(bench.engine.valid_extents(DISK, &[0, 1, 2]), [(4, 10)]);
    let stats = bench.stats();
    assert_eq!((stats.backing.ios, stats.backing.read_bytes), (1, BLOCK + BLOCK / 2));
    assert_eq!(bench.read_alone(BLOCK, BLOCK + BLOCK / 2), Outcome::Hit);
    // A retry with another result does not use the earlier result.
    assert_eq!(bench.read_alone(0, 3 * BLOCK), Outcome::PartialMiss);
    assert_eq!(bench.read_alone(0, 3 * BLOCK), Outcome::Hit);
}

#[test]
fn a_disk_without_a_cache_reports_which_disk_served_a_read() {
    let mut bench = Bench::bare(Limits::default());
    let id = bench.read(512, 1024);
    bench.end_shared(&[(0, 1)]);
    assert_eq!(bench.outcome(id), Outcome::BypassShared);
    assert_eq!(bench.read_alone(512, 1024), Outcome::CacheOff);
}

/// A backup of a clone does not promote data in its parent's cache either.
#[test]
fn a_read_without_promotion_promotes_nothing_in_the_parent() {
    let mut bench = Bench::cached(8, BLOCK);
    bench.promote = Promote::Never;
    let id = bench.read(0, BLOCK);
    bench.end_shared(&[(0, 4)]);
    assert_eq!(bench.outcome(id), Outcome::BypassNoPromote);
}

/// A read that the parent's disk serves does not count in the window of the datastore. The parent's
/// own I/O uses the same datastore, and would otherwise wait for this read.
#[test]
fn a_read_that_is_elsewhere_takes_no_room_in_its_datastore() {
    let mut bench = Bench::bare(Limits::default());
    let resource = Resource::Datastore(DatastoreId(0));
    bench.engine.control(bench.now, resource, Control::Depth(1));
    let (first, second) = (bench.read(0, BLOCK), bench.read(BLOCK, BLOCK));
    let passed = bench.only_io();
    bench.engine.pass_on(bench.now, passed.id);
    bench.drain();
    let own = bench.only_io();
    assert_eq!(own.offset, BLOCK);
    bench.end(own);
    assert!(bench.reply(second).is_some() && bench.reply(first).is_none());
    bench.engine.handle_shared(bench.now, passed.id, &[(0, 4)], &[]);
    bench.drain();
    assert!(bench.reply(first).is_some());
    assert_eq!(bench.engine.resource(resource).window.in_flight, 0);
    assert_eq!(bench.read_alone(0, BLOCK), Outcome::CacheOff, "there is room as before");
}

/// The memory tier of a clone has no copies of data that its parent's memory tier may have.
#[test]
fn memory_keeps_no_second_copy() {
    let mut bench = Bench::bare(Limits::default());
    let config = crate::command::MemoryConfig { bytes: MIB, page_bytes: 4096 };
    bench.command(Command::Memory(Some(config))).expect("memory");
    for _ in 0..2 {
        let id = bench.read(4 * MIB, BLOCK);
        bench.end_shared(&[(1024, 1028)]);
        assert_eq!(bench.outcome(id), Outcome::BypassShared);
    }
    assert_eq!(bench.stats().memory_held_bytes, 0);
}
