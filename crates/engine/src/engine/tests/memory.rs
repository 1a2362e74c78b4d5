//! The memory tier above a cache: docs/decisions/0007.

use super::*;
use crate::command::{Destage, Discard, MemoryConfig, Mode};
use crate::io::{CopyEnd, Zeroing};

impl Bench {
    /// Adds `pages` pages of memory.
    fn with_memory(mut self, pages: u64, page_bytes: u32) -> Bench {
        let config = MemoryConfig { bytes: pages * u64::from(page_bytes), page_bytes };
        self.command(Command::Memory(Some(config))).expect("workable");
        self
    }

    /// Returns the bytes copied out of the memory tier and into it since the last call.
    fn copied(&mut self) -> (u64, u64) {
        let (mut out, mut into) = (0, 0);
        for BufferCopy { from, to, len } in self.copies.drain(..) {
            match (from, to) {
                (CopyEnd::Memory { .. }, CopyEnd::Buffer { .. }) => out += u64::from(len),
                (CopyEnd::Buffer { .. }, CopyEnd::Memory { .. }) => into += u64::from(len),
                other => panic!("a copy between {other:?}"),
            }
        }
        (out, into)
    }
}

/// SYSTEMS §2: "DRAM cache … serves reads" above flash; its hits are counted separately.
#[test]
fn a_second_read_is_served_from_memory_without_any_io() {
    let mut bench = Bench::cached(16, 4 * KIB).with_memory(16, 4096);
    assert_eq!(bench.read_alone(0, 8 * KIB), Outcome::MissFilled);
    assert_eq!(bench.copied(), (0, 8 * KIB), "what it returned is kept");
    let again = bench.read(4 * KIB + 512, 1024);
    assert_eq!(bench.outcome(again), Outcome::HitMemory);
    assert_eq!((bench.ios.len(), bench.copied()), (0, (4 * KIB, 0)), "whole sectors, and no I/O");
    assert_eq!(bench.released.len(), 2);
    let stats = bench.stats();
    assert_eq!((stats.reads, stats.read_hits, stats.memory_hits), (2, 0, 1));
    assert_eq!((stats.memory_bytes, stats.memory_held_bytes), (64 * KIB, 8 * KIB));
}

#[test]
fn copies_name_the_place_in_the_buffer() {
    let mut bench = Bench::cached(16, 4 * KIB).with_memory(16, 4096);
    bench.read_alone(4 * KIB, 4 * KIB);
    let kept = bench.copies.remove(0);
    bench.write_alone(512, 12 * KIB);
    let renewed = bench.copies.remove(0);
    assert_eq!(renewed.to, kept.to, "the same page");
    let CopyEnd::Buffer { offset, .. } = renewed.from else { panic!("{renewed:?}") };
    assert_eq!((offset, renewed.len), (4096, 4096), "the write's second sector");
    assert_eq!(bench.copies, [], "the write's edges, and what was not there, stay out");
}

/// Data that a write in flight replaces is not read from the memory tier. After the write, the
/// memory tier has the new data.
#[test]
fn a_write_updates_the_memory_tier_when_it_has_ended() {
    let mut bench = Bench::cached(16, 4 * KIB).with_memory(16, 4096);
    bench.read_alone(0, 8 * KIB);
    let write = bench.write(0, 4 * KIB);
    let read = bench.read(0, 4 * KIB);
    assert_eq!((bench.reply(write), bench.reply(read)), (None, None));
    let elsewhere = bench.read(4 * KIB, 4 * KIB);
    assert_eq!(bench.outcome(elsewhere), Outcome::HitMemory, "the other page is as it was");
    bench.settle();
    assert_eq!(bench.outcome(read), Outcome::HitMemory);
    let order: Vec<_> = bench.replies.iter().map(|reply| reply.id).collect();
    assert_eq!(order[1..], [elsewhere, write, read]);
}

#[test]
fn a_write_that_fails_leaves_nothing_in_memory() {
    let mut bench = Bench::cached(16, 4 * KIB).with_memory(16, 4096);
    bench.read_alone(0, 4 * KIB);
    bench.write(0, 4 * KIB);
    let io = bench.only_io();
    bench.fail(io);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
}

#[test]
fn discards_and_zeroes_leave_memory_too() {
    let changes =
        [Op::Discard(Durability::Volatile), Op::WriteZeroes(Durability::Volatile, Zeroing::MayUnmap)];
    for op in changes {
        let mut bench = Bench::cached(16, 4 * KIB).with_memory(16, 4096);
        bench.read_alone(0, 8 * KIB);
        bench.request(op, 512, 512);
        bench.settle();
        assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled, "{op:?}");
        assert_eq!(bench.read_alone(4 * KIB, 4 * KIB), Outcome::HitMemory);
    }
}

/// Promise 4: hits are served while flash or the backing does not answer.
#[test]
fn hits_need_neither_flash_nor_backing() {
    let limits = Limits { flash_stall_ms_max: 10, ..Limits::default() };
    let mut bench = Bench::bare(limits);
    bench.enable(64 * KIB, 4 * KIB);
    let mut bench = bench.with_memory(16, 4096);
    bench.read_alone(0, 8 * KIB);
    bench
        .command(Command::Memory(Some(MemoryConfig { bytes: 64 * KIB, page_bytes: 4096 })))
        .expect("emptied");
    bench.read_alone(0, 4 * KIB);
    let hung = bench.read(4 * KIB, 4 * KIB);
    bench.wait_ms(50);
    assert_eq!(bench.stats().cache, crate::stats::CacheState::Stalled);
    bench.read(32 * KIB, 4 * KIB);
    assert_eq!(bench.ios.len(), 2, "one for flash, one for the backing");
    assert_eq!(bench.read_alone_without_io(0, 4 * KIB), Outcome::HitMemory);
    assert_eq!(bench.reply(hung), None);
}

impl Bench {
    /// Returns the outcome of a read that needs no I/O, while other I/O is in flight.
    fn read_alone_without_io(&mut self, offset: u64, len: u64) -> Outcome {
        let before = self.ios.len();
        let id = self.read(offset, len);
        assert_eq!(self.ios.len(), before);
        self.outcome(id)
    }
}

#[test]
fn each_mode_decides_what_memory_caches() {
    // The mode, the outcome of the second read, and the outcome of a read after a write to the same
    // data.
    let table = [
        (Mode::WriteThrough, Outcome::HitMemory, Outcome::HitMemory),
        (Mode::WriteAround, Outcome::HitMemory, Outcome::MissFilled),
        (Mode::ReadOnlyCache, Outcome::BypassMode, Outcome::BypassMode),
        (Mode::PassThrough, Outcome::BypassMode, Outcome::BypassMode),
    ];
    for (mode, second, written) in table {
        let mut bench = Bench::cached(16, 4 * KIB).with_memory(16, 4096);
        let tune = CacheChange::Tune(mode, Destage::default(), Default::default());
        bench.change(tune).expect("volatile caches have these modes");
        bench.read_alone(0, 4 * KIB);
        assert_eq!(bench.read_alone(0, 4 * KIB), second, "{mode:?}");
        bench.write_alone(0, 4 * KIB);
        assert_eq!(bench.read_alone(0, 4 * KIB), written, "{mode:?}");
    }
}

/// A mode in which reads fill nothing still serves data that memory has. The mode pass-through does
/// not. After a change of the mode, memory has no outdated data.
#[test]
fn memory_is_current_after_a_change_of_mode() {
    let tune = |mode| CacheChange::Tune(mode, Destage::default(), Default::default());
    let mut bench = Bench::cached(16, 4 * KIB).with_memory(16, 4096);
    bench.read_alone(0, 8 * KIB);
    bench.change(tune(Mode::ReadOnlyCache)).expect("workable");
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::HitMemory);
    bench.change(tune(Mode::PassThrough)).expect("workable");
    bench.write_alone(0, 4 * KIB);
    assert_eq!(bench.read_alone(4 * KIB, 4 * KIB), Outcome::BypassMode);
    bench.change(tune(Mode::WriteThrough)).expect("workable");
    assert_ne!(bench.read_alone(0, 4 * KIB), Outcome::HitMemory);
    assert_eq!(bench.read_alone(4 * KIB, 4 * KIB), Outcome::HitMemory);
}

#[test]
fn clearing_the_cache_clears_memory_and_losing_a_device_does_not() {
    let mut bench = Bench::cached(16, 4 * KIB).with_memory(16, 4096);
    bench.read_alone(0, 4 * KIB);
    bench.change(CacheChange::Clear(None)).expect("a cache");
    assert_eq!(bench.stats().memory_held_bytes, 0);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
    bench.change(CacheChange::Leave(DeviceId(0), vec![], None)).expect("on that device");
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::HitMemory);
}

/// Like the DRAM of FAST Cache, memory also serves written data that flash has. Discarded dirty
/// data is not in memory either.
#[test]
fn memory_follows_dirty_data() {
    let mut bench = Bench::write_back().with_memory(16, 4096);
    bench.read_alone(0, 4 * KIB);
    assert_eq!(bench.write_alone(0, 4 * KIB), Outcome::WriteBack);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::HitMemory);
    let id = bench.start_change(CacheChange::DiscardDirty(Discard::Told));
    bench.settle();
    assert_eq!(bench.result(id), Some(Ok(vec![])));
    assert_ne!(bench.read_alone(0, 4 * KIB), Outcome::HitMemory);
}

#[test]
fn memory_comes_changes_and_goes_under_load() {
    let mut bench = Bench::cached(16, 4 * KIB);
    let in_flight = bench.read(0, 4 * KIB);
    let mut bench = bench.with_memory(16, 4096);
    bench.settle();
    assert_eq!(bench.outcome(in_flight), Outcome::MissFilled);
    assert_eq!(bench.copied(), (0, 4 * KIB), "it came in time");
    let mut bench = bench.with_memory(4, 4096);
    assert_eq!(bench.stats().memory_held_bytes, 0, "the new one is empty");
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
    let senseless = Some(MemoryConfig { bytes: 4 * KIB, page_bytes: 4096 });
    assert_eq!(bench.command(Command::Memory(senseless)), Err(CommandError::TooSmall));
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::HitMemory, "what it had stays");
    bench.command(Command::Memory(None)).expect("taken away");
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
    assert_eq!(bench.stats().memory_bytes, 0);
}

impl Bench {
    /// Adds `count` buffers of 1 MiB.
    fn with_buffers(mut self, count: u32) -> Bench {
        (0..count).for_each(|i| self.engine.lend(BufferId(u32::MAX - i), 1 << 20));
        self
    }

    /// Returns the I/O on the engine's own buffers.
    fn of_jobs(&self) -> Vec<Io> {
        let is_lent = |io: &&Io| io.slice.is_some_and(|slice| slice.id.0 >= 1 << 20);
        self.ios.iter().filter(is_lent).copied().collect()
    }

    fn take(&mut self, io: Io) -> Io {
        self.ios.retain(|other| other.id != io.id);
        io
    }
}

/// SYSTEMS §2: "DRAM cache … prefetches": a sequential reader finds its data in memory.
#[test]
fn a_sequential_reader_is_read_ahead_of() {
    let mut bench = Bench::cached(16, 4 * KIB).with_memory(4096, 4096).with_buffers(4);
    bench.read_alone(0, 16 * KIB);
    bench.read_alone(16 * KIB, 16 * KIB);
    let third = bench.read(32 * KIB, 16 * KIB);
    let [ahead] = bench.of_jobs()[..] else { panic!("{:?}", bench.ios) };
    assert_eq!((ahead.target, ahead.op), (Target::Backing(DISK), IoOp::Read));
    assert_eq!((ahead.offset, ahead.len), (48 * KIB, 64 * KIB), "four requests' length");
    bench.settle();
    assert_eq!(bench.outcome(third), Outcome::MissFilled);
    let outcomes: Vec<_> = (3..40).map(|i| bench.read_alone(i * 16 * KIB, 16 * KIB)).collect();
    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::HitPrefetched), "{outcomes:?}");
    let stats = bench.stats();
    assert_eq!(stats.backing.ios, 3 + 4, "three by the reader, then windows of 64, 128, 256 and 512 KiB");
    assert_eq!(stats.read_ahead_bytes, 960 * KIB);
}

#[test]
fn random_reads_are_not_read_ahead_of() {
    let mut bench = Bench::cached(16, 4 * KIB).with_memory(4096, 4096).with_buffers(4);
    for i in 0..200u64 {
        bench.read_alone(i * 7919 % 4000 * 2 * 4 * KIB, 4 * KIB);
    }
    assert_eq!(bench.stats().read_ahead_bytes, 0);
}

/// Reads and changes of data that is being read ahead wait for the read-ahead. Other requests do
/// not.
#[test]
fn requests_for_data_that_is_being_read_ahead_wait_for_it() {
    let mut bench = Bench::cached(16, 4 * KIB).with_memory(4096, 4096).with_buffers(4);
    for i in 0..2 {
        bench.read_alone(i * 16 * KIB, 16 * KIB);
    }
    let third = bench.read(32 * KIB, 16 * KIB);
    let ahead = bench.of_jobs()[0];
    let ahead = bench.take(ahead);
    bench.settle();
    assert!(bench.reply(third).is_some());
    let fourth = bench.read(48 * KIB, 16 * KIB);
    let write = bench.write(64 * KIB, 4 * KIB);
    assert_eq!(bench.ios.len(), 0, "both wait: {:?}", bench.ios);
    bench.end(ahead);
    assert_eq!(bench.outcome(fourth), Outcome::HitPrefetched);
    bench.settle();
    assert_eq!(bench.outcome(write), Outcome::WriteCopied);
    bench.copies.clear();
    assert_eq!(bench.read_alone(64 * KIB, 4 * KIB), Outcome::HitMemory, "of what was written");
}

/// Promise 4: data on flash is served without waiting.
#[test]
fn hits_do_not_wait_for_read_ahead() {
    let mut bench = Bench::cached(64, 4 * KIB).with_buffers(4);
    for i in 0..7 {
        bench.read_alone(i * 16 * KIB, 16 * KIB);
    }
    bench
        .command(Command::Memory(Some(MemoryConfig { bytes: 16 * MIB, page_bytes: 4096 })))
        .expect("workable");
    for i in 0..2 {
        assert_eq!(bench.read_alone(i * 16 * KIB, 16 * KIB), Outcome::Hit);
    }
    let third = bench.read(32 * KIB, 16 * KIB);
    let [ahead] = bench.of_jobs()[..] else { panic!("{:?}", bench.ios) };
    assert_eq!((ahead.target, ahead.len), (Target::Flash(DeviceId(0)), 64 * KIB), "flash has all of it");
    bench.take(ahead);
    bench.settle();
    assert_eq!(bench.outcome(third), Outcome::Hit);
    assert_eq!(bench.read_alone(48 * KIB, 16 * KIB), Outcome::Hit);
    // With a wrong checksum, none of the data is kept.
    bench.end_with(ahead, Ok(()), &[SUM + 1; 16]);
    assert_eq!(bench.read_alone(64 * KIB, 16 * KIB), Outcome::Hit, "and the guest's own read finds it right");
}

/// Read-ahead data of the backing is overwritten in memory by dirty data, which is read from flash.
#[test]
fn dirty_data_is_read_ahead_from_flash() {
    let mut bench = Bench::write_back().with_memory(4096, 4096);
    bench.write_alone(56 * KIB, 4 * KIB);
    for i in 0..2 {
        bench.read_alone(i * 16 * KIB, 16 * KIB);
    }
    bench.read(32 * KIB, 16 * KIB);
    let ahead = bench.of_jobs()[0];
    assert_eq!(ahead.target, Target::Backing(DISK));
    let ahead = bench.take(ahead);
    bench.copies.clear();
    bench.end(ahead);
    let overlay = bench.of_jobs()[0];
    let slice = overlay.slice.expect("a read");
    assert_eq!((overlay.target, slice.offset, slice.len), (Target::Flash(DeviceId(0)), 8192, 4096));
    assert_eq!(bench.copied(), (0, 0), "not before it is there");
    bench.settle();
    assert_eq!(bench.read_alone(48 * KIB, 16 * KIB), Outcome::HitPrefetched);
}

/// Promise 2: if a backing loses a change while the copy on flash is read, the disk has older data
/// from then on, and memory must not show the newer data.
#[test]
fn memory_keeps_nothing_of_a_hit_that_meets_a_loss() {
    let mut bench = Bench::cached(64, 4 * KIB);
    bench.write_alone(0, 4 * KIB);
    let mut bench = bench.with_memory(4096, 4096);
    let read = bench.read(0, 4 * KIB);
    let hit = bench.only_io();
    assert_eq!(hit.target, Target::Flash(DeviceId(0)));
    bench.engine.handle_loss(bench.now, DISK);
    bench.end(hit);
    assert_eq!(bench.outcome(read), Outcome::Hit, "as if it had ended before");
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
}

/// If a backing loses a change during read-ahead, memory keeps none of the data that was read
/// ahead.
#[test]
fn memory_keeps_nothing_that_was_read_ahead_during_a_loss() {
    let mut bench = Bench::cached(64, 4 * KIB).with_buffers(4);
    for i in 0..7 {
        bench.write_alone(i * 16 * KIB, 16 * KIB);
    }
    let mut bench = bench.with_memory(4096, 4096);
    for i in 0..2 {
        assert_eq!(bench.read_alone(i * 16 * KIB, 16 * KIB), Outcome::Hit);
    }
    bench.read(32 * KIB, 16 * KIB);
    let [ahead] = bench.of_jobs()[..] else { panic!("{:?}", bench.ios) };
    assert_eq!((ahead.target, ahead.len), (Target::Flash(DeviceId(0)), 64 * KIB), "flash has all of it");
    bench.take(ahead);
    bench.settle();
    bench.engine.handle_loss(bench.now, DISK);
    bench.end(ahead);
    assert_eq!(bench.stats().read_ahead_bytes, 0);
    assert_eq!(bench.read_alone(48 * KIB, 16 * KIB), Outcome::MissFilled);
}

/// If a run's read-ahead fails, or the pages that it read were evicted before use, less is read
/// ahead. Read-ahead ends at the disk's end.
#[test]
fn read_ahead_gives_way() {
    let mut bench = Bench::cached(16, 4 * KIB).with_memory(4096, 4096).with_buffers(4);
    for i in 0..2 {
        bench.read_alone(i * 16 * KIB, 16 * KIB);
    }
    bench.read(32 * KIB, 16 * KIB);
    let ahead = bench.of_jobs()[0];
    let ahead = bench.take(ahead);
    bench.settle();
    bench.fail(ahead);
    assert_eq!(bench.read_alone(48 * KIB, 16 * KIB), Outcome::MissFilled, "the guest has no error of it");
    let end = 64 * MIB;
    for i in 0..2 {
        bench.read_alone(end - (4 - i) * 16 * KIB, 16 * KIB);
    }
    bench.read(end - 32 * KIB, 16 * KIB);
    let [ahead] = bench.of_jobs()[..] else { panic!("{:?}", bench.ios) };
    assert_eq!((ahead.offset, ahead.len), (end - 16 * KIB, 16 * KIB));
    bench.settle();
    bench.read_alone(end - 16 * KIB, 16 * KIB);
    assert_eq!(bench.of_jobs(), [], "there is nothing behind it");
}

/// Half of the buffers are reserved for the destager.
#[test]
fn read_ahead_leaves_buffers_to_the_destager() {
    let mut bench = Bench::cached(16, 4 * KIB).with_memory(4096, 4096).with_buffers(4);
    for i in 0..3 {
        for run in 0..8 {
            bench.read(run * 4 * MIB + i * 256 * KIB, 256 * KIB);
        }
    }
    assert_eq!(bench.of_jobs().iter().map(|io| io.len).sum::<u64>(), 2 * MIB, "of four");
    let bench = Bench::cached(16, 4 * KIB).with_memory(4096, 4096);
    let mut bench = bench;
    for i in 0..9 {
        bench.read_alone(i * 16 * KIB, 16 * KIB);
    }
    assert_eq!(bench.stats().read_ahead_bytes, 0, "without buffers there is none");
}

/// A disk can be removed, and its memory taken away, during read-ahead.
#[test]
fn read_ahead_is_in_nobodys_way() {
    let mut bench = Bench::cached(16, 4 * KIB).with_memory(4096, 4096).with_buffers(4);
    for i in 0..2 {
        bench.read_alone(i * 16 * KIB, 16 * KIB);
    }
    bench.read(32 * KIB, 16 * KIB);
    let ahead = bench.of_jobs()[0];
    let ahead = bench.take(ahead);
    bench.settle();
    bench.command(Command::Memory(None)).expect("taken away");
    bench.copies.clear();
    let removal = bench.start_command(Command::RemoveDisk);
    assert_eq!(bench.result(removal), None);
    bench.end(ahead);
    assert!(bench.result(removal).is_some_and(|result| result.is_ok()));
    assert_eq!(bench.copied(), (0, 0));
}

#[test]
fn nothing_of_a_sequential_run_is_kept() {
    let mut bench = Bench::cached(64, 4 * KIB).with_memory(16, 4096);
    for i in 0..20 {
        bench.read_alone(i * 4 * KIB, 4 * KIB);
    }
    assert!(bench.stats().memory_held_bytes <= 8 * KIB, "{:?}", bench.stats().memory_held_bytes);
}

/// A read without promotion is served from the memory tier, and its data is not kept there.
#[test]
fn memory_keeps_nothing_for_a_read_that_promotes_nothing() {
    let mut bench = Bench::cached(16, 4 * KIB).with_memory(16, 4096);
    bench.read_alone(0, 4 * KIB);
    bench.copied();
    bench.promote = Promote::Never;
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::HitMemory);
    assert_eq!(bench.copied(), (4 * KIB, 0));
    for i in 1..40 {
        bench.read_alone(i * 4 * KIB, 4 * KIB);
    }
    assert_eq!(bench.copied(), (0, 0), "neither kept nor read ahead");
}
