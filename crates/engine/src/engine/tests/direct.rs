//! Reads into guest memory.

use super::*;
use crate::command::MemoryConfig;
use crate::vscsi::{Class, Metric};

impl Bench {
    fn direct_read(&mut self, offset: u64, len: u64) -> RequestId {
        self.memory = PayloadMemory::Guest;
        let id = self.read(offset, len);
        self.memory = PayloadMemory::Daemon;
        id
    }

    /// Sends a declined request again, as a front end does.
    fn ask_again(&mut self, id: RequestId, offset: u64, len: u64) -> Outcome {
        assert_eq!(self.declined.pop(), Some(id));
        assert_eq!(self.reply(id), None, "a read that is declined has no answer");
        self.memory = PayloadMemory::DaemonAfterGuest;
        let again = self.read(offset, len);
        self.memory = PayloadMemory::Daemon;
        self.settle();
        self.outcome(again)
    }
}

#[test]
fn a_hit_is_read_into_the_guests_memory() {
    let mut bench = Bench::cached(16, 8 * KIB);
    bench.read_alone(0, 16 * KIB);
    assert!(bench.engine.would_read_flash(DISK, 4 * KIB, 8 * KIB));
    let id = bench.direct_read(4 * KIB, 8 * KIB);
    let io = bench.only_io();
    assert!(is_flash(&io) && io.op == IoOp::Read && io.len == 8 * KIB);
    bench.end(io);
    assert_eq!((bench.outcome(id), bench.declined.len()), (Outcome::Hit, 0));
    assert_eq!(bench.released.last().map(|buffer| u64::from(buffer.0)), Some(id.0));
    assert_eq!((bench.stats().reads, bench.stats().read_hits), (2, 1));
}

#[test]
fn a_direct_read_that_is_no_longer_a_hit_is_declined_and_counted_once() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    let before = bench.stats();
    let write = bench.write(0, 512);
    let id = bench.direct_read(0, 4 * KIB);
    assert_eq!(bench.declined, [], "it waits for the write");
    bench.settle();
    assert!(bench.reply(write).is_some());
    assert_eq!(bench.ask_again(id, 0, 4 * KIB), Outcome::MissFilled);
    let stats = bench.stats();
    assert_eq!((stats.reads, stats.read_bytes), (before.reads + 1, before.read_bytes + 4 * KIB));
    let histograms = bench.engine.histograms(DISK).unwrap();
    let count = |metric| histograms.get(Class::Reads, metric).count();
    assert_eq!((count(Metric::Length), count(Metric::Latency)), (2, 2));
    assert_eq!(bench.engine.sizing(bench.now, DISK).unwrap().seen.reads, 2);
}

/// The guest may overwrite the data from flash, or unmap the memory: this affects no other client.
#[test]
fn a_guest_that_changes_its_memory_makes_no_flash_error() {
    for result in [Ok(()), Err(IoError::Failed)] {
        let limits = Limits { flash_errors_max: 1, ..Limits::default() };
        let mut bench = Bench::bare(limits);
        bench.enable(16 * 4 * KIB, 4 * KIB);
        bench.read_alone(0, 4 * KIB);
        let id = bench.direct_read(0, 4 * KIB);
        let io = bench.only_io();
        bench.end_with(io, result, &[SUM + 1]);
        assert_eq!(bench.ask_again(id, 0, 4 * KIB), Outcome::Hit, "the sector is still valid");
        let stats = bench.stats();
        assert_eq!((stats.checksum_mismatches, stats.flash.errors), (0, 0));
        assert_eq!((stats.reads, stats.read_hits), (2, 1));
        assert_eq!(bench.events.iter().filter(|event| matches!(event, Event::Fenced { .. })).count(), 0);
    }
}

#[test]
fn damaged_flash_data_is_detected_by_the_retry() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    let id = bench.direct_read(0, 4 * KIB);
    let io = bench.only_io();
    bench.end_with(io, Ok(()), &[SUM + 1]);
    assert_eq!(bench.declined.pop(), Some(id));
    bench.memory = PayloadMemory::DaemonAfterGuest;
    let again = bench.read(0, 4 * KIB);
    let io = bench.only_io();
    bench.end_with(io, Ok(()), &[SUM + 1]);
    bench.settle();
    assert_eq!(bench.outcome(again), Outcome::ChecksumMismatch);
    assert_eq!(bench.stats().checksum_mismatches, 1);
}

/// One of a read's two flash I/Os fails: the engine waits for the other before it declines the read
/// and returns the buffer.
#[test]
fn all_of_its_io_ends_before_a_read_is_declined() {
    let mut bench = Bench::bare(Limits::default());
    let segments = vec![segment(0, 0), segment(1, 0)];
    bench.change(CacheChange::enable_volatile(config(4 * KIB, 4 * KIB), segments)).unwrap();
    bench.read_alone(0, 8 * KIB);
    let id = bench.direct_read(0, 8 * KIB);
    assert_eq!(bench.ios.len(), 2);
    let (first, second) = (bench.ios.pop_front().unwrap(), bench.ios.pop_front().unwrap());
    bench.fail(first);
    assert!(bench.declined.is_empty() && bench.released.last().is_none_or(|id| id.0 as u64 != bench.made));
    bench.end(second);
    assert_eq!(bench.declined, [id]);
    assert_eq!(bench.released.last().map(|buffer| u64::from(buffer.0)), Some(id.0));
}

#[test]
fn the_look_up_says_no_where_flash_would_not_serve() {
    let mut bench = Bench::cached(16, 4 * KIB);
    let would = |bench: &Bench, offset, len| bench.engine.would_read_flash(DISK, offset, len);
    assert!(!would(&bench, 0, 4 * KIB), "nothing is cached");
    bench.read_alone(0, 8 * KIB);
    assert!(would(&bench, 0, 8 * KIB));
    assert!(!would(&bench, 0, 12 * KIB), "not all of it is cached");
    assert!(!would(&bench, 512, 4 * KIB) && !would(&bench, 0, 512), "not whole sectors");
    assert!(!would(&bench, 64 * MIB, 4 * KIB) && !would(&bench, u64::MAX - 4095, 4096), "outside the disk");
    assert!(!bench.engine.would_read_flash(DiskId(7), 0, 4096), "no such disk");
    bench.command(Command::Memory(Some(MemoryConfig { bytes: MIB, page_bytes: 4096 }))).unwrap();
    assert!(!would(&bench, 0, 8 * KIB), "memory wants to see it");
}

/// The memory tier is enabled after guest memory was offered for a read and before this read
/// starts. The data of the read is not copied into the memory tier.
#[test]
fn nothing_is_kept_of_a_guests_memory() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.read_alone(0, 4 * KIB);
    bench.command(Command::Memory(Some(MemoryConfig { bytes: MIB, page_bytes: 4096 }))).unwrap();
    let id = bench.direct_read(0, 4 * KIB);
    bench.settle();
    assert_eq!((bench.outcome(id), bench.copies.len()), (Outcome::Hit, 0));
    bench.read_alone(0, 4 * KIB);
    assert_eq!(bench.copies.len(), 1, "it is kept when the daemon's buffer has it");
    let id = bench.direct_read(0, 4 * KIB);
    assert_eq!(bench.ask_again(id, 0, 4 * KIB), Outcome::HitMemory);
}
