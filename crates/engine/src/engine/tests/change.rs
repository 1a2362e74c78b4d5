//! Commands: disks are added and removed, caches change under load, and refused commands return a
//! reason.

use super::*;
use crate::stats::CacheState;

/// SYSTEMS §1: "Caching can be switched on for a disk while its machine runs; the guest notices
/// nothing."
#[test]
fn caching_is_switched_on_and_off_under_requests() {
    let mut bench = Bench::bare(Limits::default());
    let before = bench.read(0, 4 * KIB);
    let write = bench.write(MIB, 4 * KIB);
    bench.enable(64 * KIB, 4 * KIB);
    bench.settle();
    assert_eq!(bench.outcome(before), Outcome::CacheOff);
    assert_eq!(bench.reply(write).unwrap().result, Ok(()));
    bench.read_alone(8 * KIB, 4 * KIB);
    assert_eq!(bench.read_alone(8 * KIB, 4 * KIB), Outcome::Hit);
    assert_eq!(bench.change(CacheChange::Disable), Ok(vec![segment(0, 0)]));
    assert_eq!(bench.read_alone(8 * KIB, 4 * KIB), Outcome::CacheOff);
    bench.enable(64 * KIB, 4 * KIB);
    assert_eq!(bench.read_alone(8 * KIB, 4 * KIB), Outcome::MissFilled, "a new cache is empty");
}

/// A write that was in flight when the cache was enabled leaves no old data in the cache.
#[test]
fn a_cache_enabled_during_a_write_never_has_the_old_data() {
    let mut bench = Bench::bare(Limits::default());
    bench.write(0, 4 * KIB);
    let write = bench.only_io();
    bench.enable(64 * KIB, 4 * KIB);
    let read = bench.read(0, 4 * KIB);
    assert_eq!(bench.ios.len(), 0, "the read waits");
    bench.end(write);
    bench.settle();
    assert_eq!(bench.outcome(read), Outcome::Hit, "of the write's copy");
}

/// A change waits for flash I/O in flight. Meanwhile requests use the backing, and the data that
/// they overwrite is invalid in the changed cache.
#[test]
fn a_change_waits_for_flash_io_and_requests_bypass_meanwhile() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 12 * KIB);
    let hit = bench.read(0, 4 * KIB);
    let io = bench.only_io();
    let grow =
        bench.start_change(CacheChange::Grow(DataSegment::without_order(vec![segment(0, 64 * KIB)]), None));
    assert_eq!(bench.result(grow), None);
    assert_eq!(bench.stats().cache, CacheState::Changing);
    assert_eq!(bench.read_alone(4 * KIB, 4 * KIB), Outcome::BypassChanging);
    assert_eq!(bench.write_alone(8 * KIB, 4 * KIB), Outcome::WriteNotCopied);
    bench.end(io);
    assert_eq!(bench.outcome(hit), Outcome::Hit);
    assert_eq!(bench.result(grow), Some(Ok(vec![])));
    assert_eq!(bench.stats().blocks, 32);
    assert_eq!(bench.read_alone(0, 8 * KIB), Outcome::Hit, "contents stay");
    assert_eq!(bench.read_alone(8 * KIB, 4 * KIB), Outcome::MissFilled, "overwritten meanwhile");
}

/// Issue: "resize it (contents kept where they fit)".
#[test]
fn shrinking_releases_the_emptiest_segments_and_keeps_the_rest() {
    let mut bench = Bench::bare(Limits::default());
    let segments: Vec<_> = (0..4).map(|i| segment(0, i * 16 * KIB)).collect();
    bench.change(CacheChange::enable_volatile(config(16 * KIB, 4 * KIB), segments)).unwrap();
    bench.read_alone(0, 64 * KIB);
    for offset in [16 * KIB, 20 * KIB, 52 * KIB] {
        bench.request(Op::Discard(Durability::Volatile), offset, 4 * KIB);
        bench.settle();
    }
    let released = bench.change(CacheChange::Shrink(2, None)).unwrap();
    assert_eq!(released, [segment(0, 16 * KIB), segment(0, 48 * KIB)]);
    assert_eq!(bench.stats().blocks, 8);
    assert_eq!(bench.read_alone(0, 16 * KIB), Outcome::Hit);
    assert_eq!(bench.read_alone(32 * KIB, 16 * KIB), Outcome::Hit);
    assert_eq!(bench.stats().blocks_cached, 8);
    assert_eq!(bench.read_alone(24 * KIB, 4 * KIB), Outcome::MissFilled);
    assert_eq!(bench.read_alone(MIB, 4 * KIB), Outcome::MissFilled, "eviction goes on");
}

/// The segments of a removed device are replaced; data on other devices is kept.
#[test]
fn leaving_a_device_keeps_data_on_other_devices() {
    let mut bench = Bench::bare(Limits::default());
    let segments = vec![segment(0, 0), segment(1, 0)];
    bench.change(CacheChange::enable_volatile(config(16 * KIB, 4 * KIB), segments)).unwrap();
    bench.read_alone(0, 32 * KIB);
    let released =
        bench.change(CacheChange::Leave(DeviceId(0), DataSegment::without_order(vec![segment(2, 0)]), None));
    assert_eq!(released, Ok(vec![segment(0, 0)]));
    assert_eq!(bench.stats().blocks, 8);
    assert_eq!(bench.read_alone(16 * KIB, 16 * KIB), Outcome::Hit);
    assert_eq!(bench.read_alone(0, 16 * KIB), Outcome::MissFilled);
    bench.read(0, 16 * KIB);
    assert!(bench.ios.iter().all(|io| io.target == Target::Flash(DeviceId(2))));
}

/// Issue: "change its block size" live. The new cache is empty.
#[test]
fn another_block_size_empties_the_cache() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 64 * KIB);
    assert_eq!(bench.change(CacheChange::Configure(config(64 * KIB, 16 * KIB), None)), Ok(vec![]));
    let stats = bench.stats();
    assert_eq!((stats.blocks, stats.blocks_cached), (4, 0));
    assert_eq!(bench.read_alone(0, 64 * KIB), Outcome::MissFilled);
    bench.change(CacheChange::Clear(None)).unwrap();
    assert_eq!(bench.read_alone(0, 64 * KIB), Outcome::MissFilled);
}

/// Changes run in the order of the commands.
#[test]
fn changes_queue_up() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    bench.read(0, 4 * KIB);
    let io = bench.only_io();
    let disable = bench.start_change(CacheChange::Disable);
    let clear = bench.start_change(CacheChange::Clear(None));
    let enable =
        bench.start_change(CacheChange::enable_volatile(config(64 * KIB, 4 * KIB), vec![segment(0, 0)]));
    bench.end(io);
    assert_eq!(bench.result(disable), Some(Ok(vec![segment(0, 0)])));
    assert_eq!(bench.result(clear), Some(Err(CommandError::NoCache)));
    assert_eq!(bench.result(enable), Some(Ok(vec![])));
}

/// A disk is removed when its last request was answered and its fill has ended; new requests are
/// refused.
#[test]
fn a_disk_is_removed_when_it_is_idle() {
    let mut bench = Bench::cached(16, 4 * KIB);
    let read = bench.read(0, 4 * KIB);
    let remove = bench.start_command(Command::RemoveDisk);
    let late = bench.read(0, 4 * KIB);
    assert_eq!(bench.reply(late).unwrap().result, Err(IoError::ShuttingDown));
    assert_eq!(bench.command(Command::RemoveDisk), Err(CommandError::Removing));
    assert_eq!(bench.command(Command::ResetStats), Err(CommandError::Removing));
    bench.settle();
    assert_eq!(bench.reply(read).unwrap().result, Ok(()));
    assert_eq!(bench.result(remove), Some(Ok(vec![segment(0, 0)])));
    assert!(bench.engine.stats(bench.now, DISK).is_none());
    let gone = bench.read(0, 4 * KIB);
    assert_eq!(bench.reply(gone).unwrap().result, Err(IoError::ShuttingDown));
    let again = Command::AddDisk(DiskConfig {
        size_bytes: MIB,
        access: Access::ReadWrite,
        datastore: DatastoreId(0),
    });
    assert_eq!(bench.command(again), Ok(vec![]));
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::CacheOff);
}

/// The removal of a disk ends the changes that wait for it.
#[test]
fn removal_overtakes_changes_that_wait() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    bench.read(0, 4 * KIB);
    let grow =
        bench.start_change(CacheChange::Grow(DataSegment::without_order(vec![segment(0, 64 * KIB)]), None));
    let remove = bench.start_command(Command::RemoveDisk);
    assert_eq!(bench.result(grow), Some(Err(CommandError::Removing)));
    bench.settle();
    assert_eq!(bench.result(remove), Some(Ok(vec![segment(0, 0)])));
}

#[test]
fn every_refused_command_says_why() {
    use CacheChange::*;
    let enable = CacheChange::enable_volatile;
    let without_order = DataSegment::without_order;
    use CommandError::*;
    let add = || {
        Command::AddDisk(DiskConfig { size_bytes: MIB, access: Access::ReadWrite, datastore: DatastoreId(0) })
    };
    let good = config(64 * KIB, 4 * KIB);
    let some = || vec![segment(0, 0)];
    let mut bench = Bench::bare(Limits::default());
    assert_eq!(bench.command(add()), Err(DiskExists));
    for change in [
        Disable,
        Grow(without_order(some()), None),
        Shrink(1, None),
        Leave(DeviceId(0), vec![], None),
        Configure(good, None),
        Clear(None),
    ] {
        assert_eq!(bench.change(change), Err(NoCache));
    }
    assert_eq!(bench.change(enable(good, vec![])), Err(TooSmall));
    let unworkable = [
        config(64 * KIB, 0),
        config(64 * KIB, 2 * KIB),
        config(64 * KIB, 12 * KIB),
        config(4 * MIB, 2 * MIB),
        config(64 * KIB, 128 * KIB),
        config(96 * KIB, 4 * KIB),
        config(0, 4 * KIB),
    ];
    for bad in unworkable {
        assert_eq!(bench.change(enable(bad, some())), Err(Unworkable), "{bad:?}");
    }
    assert_eq!(bench.change(enable(config(1 << 50, 4 * KIB), some())), Err(Unworkable), "too many blocks");
    bench.change(enable(good, some())).unwrap();
    assert_eq!(bench.change(enable(good, vec![segment(0, MIB)])), Err(CacheExists));
    assert_eq!(bench.change(Grow(vec![], None)), Err(TooSmall));
    assert_eq!(bench.change(Shrink(1, None)), Err(TooSmall));
    assert_eq!(bench.change(Leave(DeviceId(9), without_order(some()), None)), Err(NoCache));
    for bad in unworkable {
        assert_eq!(bench.change(Configure(bad, None)), Err(Unworkable), "{bad:?}");
    }
    assert_eq!(bench.change(Configure(config(128 * KIB, 4 * KIB), None)), Err(Unworkable), "other segments");
    assert_eq!(bench.stats().blocks, 16, "nothing was changed");
    assert_eq!(bench.command(Command::RemoveDisk), Ok(some()));
    for command in [Command::RemoveDisk, Command::ResetStats, Command::Cache(Clear(None))] {
        assert_eq!(bench.command(command), Err(NoSuchDisk));
    }
    let mut vast = Bench::with_disk(Limits::default(), (1 << 44) + 4 * KIB, Access::ReadWrite);
    assert_eq!(vast.change(enable(good, some())), Err(Unworkable), "more than 2³² blocks");
    assert_eq!(vast.change(enable(config(64 * KIB, 8 * KIB), some())), Ok(vec![]));
}
