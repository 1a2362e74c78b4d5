//! Writes that cover sectors in part: what is read, what is copied next to the guest's data, and
//! where it is written.

use super::write_back::{RING_DEVICE, VOLATILE, backing, flash, lazy, ring};
use super::*;
use crate::command::{Destage, MemoryConfig, Mode};
use crate::io::CopyEnd;

impl Bench {
    /// Returns the copies since the last call: first byte in the request's buffer, and length.
    pub(super) fn merged(&mut self) -> Vec<(u32, u32)> {
        let to = |copy: BufferCopy| match copy.to {
            CopyEnd::Buffer { offset, .. } => (offset, copy.len),
            other => panic!("a copy to {other:?}"),
        };
        self.copies.drain(..).map(to).collect()
    }

    /// Completes all I/O. Returns the sectors that flash and the backing read and wrote.
    fn moved(&mut self) -> Vec<(&'static str, u64)> {
        let mut moved = vec![];
        while let Some(io) = self.ios.pop_front() {
            let what = match (io.target, io.op) {
                (Target::Flash(_), IoOp::Read) => "flash read",
                (Target::Flash(_), IoOp::Write(_)) => "flash write",
                (Target::Backing(_), IoOp::Read) => "backing read",
                (Target::Backing(_), IoOp::Write(_)) => "backing write",
                _ => "",
            };
            if !what.is_empty() {
                moved.push((what, io.len));
            }
            self.end(io);
        }
        moved
    }

    /// Completes all I/O. Returns the bytes of each read of the backing.
    fn backing_reads(&mut self) -> Vec<u64> {
        let moved = self.moved().into_iter();
        moved.filter(|(what, _)| *what == "backing read").map(|(_, bytes)| bytes).collect()
    }

    /// Removes the only backing read of several sectors from the I/O in flight, and returns it.
    fn take_ahead(&mut self) -> Io {
        let is_ahead = |io: &Io| (io.target, io.op) == (backing(), IoOp::Read) && io.len > SECTOR_BYTES;
        let at = self.ios.iter().position(is_ahead).expect("sectors are read ahead");
        let ahead = self.ios.remove(at).expect("found");
        assert!(!self.ios.iter().any(is_ahead), "one read at a time");
        ahead
    }

    /// Writes parts of the first two sectors at `offset`. Returns the read-ahead of the sectors
    /// after these two.
    fn start_log(&mut self, offset: u64) -> Io {
        self.write_alone(offset, 512);
        let write = self.write(offset + 4 * KIB, 512);
        let ahead = self.take_ahead();
        self.settle();
        assert_eq!(self.outcome(write), Outcome::WriteBack, "it does not wait for the other sectors");
        ahead
    }
}

/// Issue: "If the sector is cached, read, merge and write a new frame."
#[test]
fn a_part_of_a_cached_sector_is_merged_in_flash() {
    for dirty in [false, true] {
        let mut bench = Bench::write_back();
        match dirty {
            true => bench.write_alone(0, 4 * KIB),
            false => bench.read_alone(0, 4 * KIB),
        };
        let write = bench.write(1024, 512);
        assert_eq!(bench.moved(), [("flash read", 4 * KIB), ("flash write", 4 * KIB)], "dirty: {dirty}");
        assert_eq!(bench.outcome(write), Outcome::WriteBack);
        assert_eq!(bench.merged(), [(0, 1024), (1536, 2560)], "what is before, and what is behind");
        assert_eq!(bench.dirty(), 1);
        assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
    }
}

/// A log of 512-byte writes reads the backing for its first two sectors. The following sectors are
/// read before the log reaches them, and a log that is written again reads nothing.
#[test]
fn a_log_reads_its_next_sectors_ahead() {
    let mut bench = Bench::write_back();
    bench.engine.limits.incomplete_sectors_max = 0;
    let mut edges = 0;
    let mut ahead = vec![];
    for _ in 0..2 {
        for at in 0..64 * 8 {
            let write = bench.write(at * 512, 512);
            for (what, bytes) in bench.moved() {
                match (what, bytes) {
                    ("backing read", SECTOR_BYTES) => edges += 1,
                    ("backing read", _) => ahead.push(bytes / SECTOR_BYTES),
                    _ => {}
                }
            }
            assert_eq!(bench.outcome(write), Outcome::WriteBack);
            bench.flush();
        }
    }
    assert_eq!((edges, bench.dirty()), (2, 64));
    assert_eq!(ahead, [32, 17, 17, 17], "at the sectors 1, 18, 35 and 52");
}

/// Some writes read nothing ahead: writes of whole sectors, writes without a dirty sector before
/// them, writes that end at the end of a sector, and writes of many sectors.
#[test]
fn only_runs_of_small_partial_writes_read_ahead() {
    let mut bench = Bench::write_back();
    bench.engine.limits.incomplete_sectors_max = 0;
    for (offset, len) in [
        (0, 8 * KIB),
        (8 * KIB, 4 * KIB),
        (64 * KIB, 512),
        (12 * KIB + 512, 4 * KIB - 512),
        (128 * KIB, 4 * KIB),
        (132 * KIB, 16 * KIB + 512),
    ] {
        bench.write(offset, len);
        let is_ahead = |(what, bytes): &(&str, u64)| *what == "backing read" && *bytes > SECTOR_BYTES;
        assert!(!bench.moved().iter().any(is_ahead), "{offset}, {len}");
    }
    bench.write(16 * KIB, 512);
    assert!(bench.moved().contains(&("backing read", 11 * SECTOR_BYTES)), "until the cached sector 16");
}

/// A write waits for the sectors that are being read ahead, because its own sector is one of them.
#[test]
fn a_log_that_is_faster_than_the_backing_reads_no_sectors_ahead_again() {
    let mut bench = Bench::write_back();
    bench.engine.limits.incomplete_sectors_max = 0;
    let ahead = bench.start_log(0);
    let write = bench.write(8 * KIB, 512);
    assert_eq!(bench.ios.len(), 0, "the write waits");
    bench.end(ahead);
    assert_eq!(bench.backing_reads(), [SECTOR_BYTES], "only its own sector");
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
    bench.write(12 * KIB, 512);
    assert!(bench.backing_reads().is_empty(), "the other sectors are in the cache");
}

/// While the backing hangs, only one read ahead is in flight: writes of whole sectors would wait
/// for all such reads.
#[test]
fn a_backing_that_hangs_gets_one_read_ahead() {
    let mut bench = Bench::write_back();
    bench.engine.limits.incomplete_sectors_max = 0;
    let ahead = bench.start_log(0);
    bench.wait_ms(60_000);
    bench.settle();
    for sector in 0..2 {
        bench.write(MIB + sector * 4 * KIB, 512);
        assert_eq!(bench.backing_reads(), [SECTOR_BYTES], "the backing answers other reads");
    }
    bench.end(ahead);
    bench.settle();
    bench.write(MIB + 8 * KIB, 512);
    assert_eq!(bench.backing_reads(), [SECTOR_BYTES, 32 * SECTOR_BYTES], "the guest's own sector first");
}

/// The cache of the parent disk has the sectors, so the cache of the clone does not get them.
#[test]
fn a_clone_does_not_read_its_parent_ahead_of_writes() {
    let mut bench = Bench::write_back();
    bench.engine.limits.incomplete_sectors_max = 0;
    for sector in 0..4 {
        let write = bench.write(sector * 4 * KIB, 512);
        while let Some(io) = bench.ios.pop_front() {
            if (io.target, io.op) != (backing(), IoOp::Read) {
                bench.end(io);
                continue;
            }
            assert_eq!(io.len, SECTOR_BYTES);
            bench.engine.handle_shared(bench.now, io.id, &[(sector, sector + 1)], &right_sums(&io));
            bench.drain();
        }
        assert_eq!(bench.outcome(write), Outcome::WriteBack);
    }
    bench.start_log(16 * KIB);
}

/// A log with small writes reads each sector once. Other writes in between drop the sector from the
/// buffer of recent sectors.
#[test]
fn a_sector_that_was_written_in_part_a_moment_ago_is_not_read() {
    let mut bench = Bench::write_back();
    bench.engine.limits.incomplete_sectors_max = 0;
    bench.engine.lend_for_edges(BufferId(3 << 20), 64 << 10);
    let write = |bench: &mut Bench, offset, len| {
        let write = bench.write(offset, len);
        let moved: Vec<_> = bench.moved().into_iter().map(|(what, _)| what).collect();
        assert_eq!(bench.outcome(write), Outcome::WriteBack);
        moved
    };
    assert_eq!(write(&mut bench, 0, 512), ["backing read", "flash write"]);
    bench.flush();
    assert_eq!(write(&mut bench, 512, 512), ["flash write"]);
    assert_eq!(write(&mut bench, 3584, 1024), ["backing read", "flash write"], "one edge is new");
    assert_eq!(write(&mut bench, 3584, 1024), ["flash write"]);
    assert_eq!(write(&mut bench, 0, 4 * KIB), ["flash write"]);
    assert_eq!(write(&mut bench, 512, 512), ["flash read", "flash write"], "all of it was written between");
    bench.request(Op::Discard(Durability::Volatile), 0, 4 * KIB);
    bench.settle();
    assert_eq!(write(&mut bench, 512, 512), ["backing read", "flash write"]);
}

/// A write that flash does not accept leaves no sector in the buffer that might be merged later.
#[test]
fn a_failed_write_of_a_part_leaves_no_sector_in_memory() {
    let mut bench = Bench::write_back();
    bench.engine.limits.incomplete_sectors_max = 0;
    bench.engine.lend_for_edges(BufferId(3 << 20), 64 << 10);
    bench.write_alone(0, 512);
    bench.write(512, 512);
    while bench.ios[0].op != VOLATILE {
        let io = bench.ios.pop_front().expect("looked at");
        bench.end(io);
    }
    let io = bench.only_io();
    assert_eq!((io.target, io.op), (flash(0), VOLATILE));
    bench.fail(io);
    let moved: Vec<_> = bench.moved().into_iter().map(|(what, _)| what).collect();
    assert_eq!(moved, ["backing write"]);
    bench.write(1024, 512);
    assert_eq!(bench.moved()[0].0, "backing read");
}

#[test]
fn both_edges_are_read_at_once() {
    let mut bench = Bench::write_back();
    bench.engine.limits.incomplete_sectors_max = 0;
    bench.read_alone(0, 4 * KIB);
    let write = bench.write(512, 8 * KIB);
    let edges: Vec<_> = bench.ios.iter().map(|io| (io.target, io.op, io.offset % MIB, io.len)).collect();
    assert_eq!(edges, [(flash(0), IoOp::Read, 0, 4 * KIB), (backing(), IoOp::Read, 8 * KIB, 4 * KIB)]);
    bench.settle();
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
    assert_eq!(bench.merged(), [(0, 512), (8 * KIB as u32 + 512, 3584)]);
    assert_eq!(bench.dirty(), 3);
}

#[test]
fn two_writes_into_one_sector_take_turns() {
    let mut bench = Bench::write_back();
    bench.engine.limits.incomplete_sectors_max = 0;
    let first = bench.write(0, 512);
    let second = bench.write(512, 512);
    let io = bench.only_io();
    assert_eq!((io.target, io.op), (backing(), IoOp::Read), "the second waits for the first");
    bench.end(io);
    bench.next(flash(0), VOLATILE);
    assert!(bench.answered(first) && !bench.answered(second));
    assert_eq!(bench.moved(), [("flash read", 4 * KIB), ("flash write", 4 * KIB)]);
    assert_eq!(bench.outcome(second), Outcome::WriteBack);
}

/// As for writes of whole sectors, the journal must first record that a dirty sector will be
/// overwritten. The rest of the sector is read once.
#[test]
fn committed_dirty_data_is_overwritten_after_a_commit() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let write = bench.request(Op::Write(Durability::Durable), 512, 512);
    bench.next(flash(0), IoOp::Read);
    bench.next(flash(9), IoOp::WriteJournal);
    bench.next(flash(9), IoOp::Flush);
    bench.next(flash(0), VOLATILE);
    assert!(!bench.answered(write), "FUA waits for the commit of the data");
    bench.settle();
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
    assert_eq!(bench.merged(), [(0, 512), (1024, 3072)]);
}

#[test]
fn a_clean_edge_that_flash_does_not_deliver_comes_from_the_backing() {
    for is_error in [true, false] {
        let mut bench = Bench::write_back();
        bench.read_alone(0, 4 * KIB);
        let write = bench.write(512, 512);
        let io = bench.only_io();
        match is_error {
            true => bench.fail(io),
            false => bench.end_with(io, Ok(()), &[SUM + 1]),
        }
        bench.next(backing(), IoOp::Read);
        bench.settle();
        assert_eq!((bench.outcome(write), bench.dirty()), (Outcome::WriteBack, 1));
        assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
    }
}

#[test]
fn a_dirty_edge_that_flash_lost_fails_the_write() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let write = bench.write(512, 512);
    while let Some(io) = bench.ios.pop_front() {
        match io.target {
            Target::Flash(DeviceId(0)) if io.op == IoOp::Read => bench.fail(io),
            Target::Flash(_) => bench.end(io),
            Target::Backing(_) => panic!("{io:?}: the backing has something older"),
        }
    }
    assert_eq!(bench.outcome(write), Outcome::DirtyLost);
    assert_eq!(bench.reply(write).expect("answered").result, Err(IoError::Failed));
}

/// If the backing cannot be read either, the write bypasses the cache.
#[test]
fn an_edge_that_cannot_be_read_sends_the_write_past_the_cache() {
    let mut bench = Bench::write_back();
    let write = bench.write(512, 512);
    let io = bench.only_io();
    bench.fail(io);
    let written = bench.moved();
    assert!(written.contains(&("backing write", 512)), "{written:?}");
    assert_eq!((bench.outcome(write), bench.dirty()), (Outcome::WriteNotCopied, 0));
}

/// If a write to flash fails, flash may have lost the old content of a dirty sector. The buffer has
/// the whole sector.
#[test]
fn writes_that_flash_refuses_go_to_the_backing_as_whole_sectors() {
    let mut bench = Bench::write_back();
    bench.engine.limits.incomplete_sectors_max = 0;
    bench.write_alone(0, 4 * KIB);
    let write = bench.write(1024, 4 * KIB);
    for _ in 0..2 {
        let io = bench.ios.pop_front().expect("two edges");
        assert_eq!(io.op, IoOp::Read);
        bench.end(io);
    }
    // The commit is first: the sector is dirty.
    let to_flash = loop {
        let io = bench.ios.pop_front().expect("a write to flash");
        if (io.target, io.op) == (flash(0), VOLATILE) {
            break io;
        }
        bench.end(io);
    };
    assert_eq!(to_flash.len, 8 * KIB);
    bench.fail(to_flash);
    let mut written = vec![];
    while let Some(io) = bench.ios.pop_front() {
        if io.target == backing() {
            written.push((io.op, io.offset, io.len));
        }
        bench.end(io);
    }
    assert_eq!(written, [(VOLATILE, 0, 8 * KIB), (IoOp::Flush, 0, 0)]);
    assert_eq!((bench.outcome(write), bench.dirty()), (Outcome::WriteNotCopied, 0));
}

/// A write that releases its range lock to wait merges its edges again, because other requests may
/// have changed these sectors meanwhile.
#[test]
fn edges_are_read_again_when_the_lock_was_given_up() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    let write = bench.write(512, 512);
    bench.next(flash(0), IoOp::Read);
    // The commit before the write fails: the write waits for another journal, and other writes
    // might overtake it.
    while let Some(io) = bench.ios.pop_front() {
        match io.target {
            target if target == flash(RING_DEVICE) => bench.fail(io),
            _ => bench.end(io),
        }
    }
    assert!(bench.events.contains(&Event::JournalLost(DISK)) && !bench.answered(write));
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    assert_eq!(bench.moved(), [("flash read", 4 * KIB), ("flash write", 4 * KIB)]);
    assert!(bench.result(renew).expect("done").is_ok());
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
}

/// The disk may grow, and the data after its old end was never read. So writes to its short last
/// sector bypass the cache.
#[test]
fn the_short_last_sector_of_a_disk_goes_past_the_cache() {
    let mut bench = Bench::with_disk(Limits::default(), 64 * KIB + 512, Access::ReadWrite);
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    bench.make_persistent(4 * KIB, Mode::WriteBack, lazy());
    bench.read_alone(64 * KIB, 512);
    let write = bench.write(64 * KIB, 512);
    let moved = bench.moved();
    assert!(moved.contains(&("backing write", 512)), "{moved:?}");
    assert_eq!((bench.outcome(write), bench.dirty()), (Outcome::WriteNotCopied, 0));
    assert_eq!(
        bench.write_alone(60 * KIB + 512, 512),
        Outcome::WriteBack,
        "the sector before it is a whole one"
    );
}

/// The first and last sector each need a buffer while the backing is read. A write without a buffer
/// waits for one.
#[test]
fn writes_that_find_no_buffer_wait() {
    let mut bench = Bench::write_back();
    bench.engine.limits.incomplete_sectors_max = 0;
    let writes: Vec<_> = (0..200).map(|at| bench.write(at * 4 * KIB + 512, 512)).collect();
    assert!(bench.ios.len() < 200, "not all at once");
    bench.settle();
    assert!(writes.iter().all(|write| bench.outcome(*write) == Outcome::WriteBack));
    assert_eq!(bench.dirty(), 200);
}

/// A full cache accepts no new block, and reads nothing for it.
#[test]
fn a_full_cache_reads_no_edge_of_the_backing() {
    let full = Destage { full_permille: 500, ..lazy() };
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteBack, full);
    (0..128).for_each(|block| assert_eq!(bench.write_alone(block * 4 * KIB, 4 * KIB), Outcome::WriteBack));
    let write = bench.write(128 * 4 * KIB + 512, 512);
    let moved = bench.moved();
    assert_eq!(moved, [("backing write", 512)]);
    assert_eq!(bench.outcome(write), Outcome::WriteNotCopied);
    assert_eq!(bench.write_alone(512, 512), Outcome::WriteBack, "a block that is in the cache stays there");
}

/// Issue: "Under write-through the same: today edges of unaligned writes are not cached, so reads
/// after writes miss."
#[test]
fn write_through_keeps_edges_that_are_cached() {
    for persistent in [false, true] {
        let mut bench = match persistent {
            true => Bench::persistent(4 * KIB, Mode::WriteThrough, lazy()),
            false => {
                let mut bench = Bench::cached(16, 4 * KIB);
                bench.engine.lend(BufferId(1 << 20), 1 << 20);
                bench
            }
        };
        bench.read_alone(0, 4 * KIB);
        let write = bench.write(512, 512);
        let expected = [("flash read", 4 * KIB), ("backing write", 512), ("flash write", 4 * KIB)];
        assert_eq!(bench.moved(), expected, "persistent: {persistent}");
        assert_eq!(bench.outcome(write), Outcome::WriteCopied);
        assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
        let elsewhere = bench.write(32 * KIB + 512, 512);
        assert_eq!(bench.moved(), [("backing write", 512)], "what is not cached is not read");
        assert_eq!(bench.outcome(elsewhere), Outcome::WriteNotCopied);
    }
}

#[test]
fn edges_are_not_read_for_a_mode_that_copies_no_writes() {
    let mut bench = Bench::persistent(4 * KIB, Mode::WriteAround, lazy());
    bench.read_alone(0, 4 * KIB);
    bench.write(512, 512);
    assert_eq!(bench.moved(), [("backing write", 512)]);
}

/// Under write-through, a sector that flash cannot read is dropped, and the write continues without
/// it.
#[test]
fn write_through_drops_an_edge_that_cannot_be_read() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    bench.read_alone(0, 4 * KIB);
    let write = bench.write(512, 512);
    let io = bench.only_io();
    bench.fail(io);
    assert_eq!(bench.moved(), [("backing write", 512)]);
    assert_eq!(bench.outcome(write), Outcome::WriteNotCopied);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
}

/// While a write-through write is in flight, the backing may have lost data: then the copy on flash
/// is not used, and the sector is read again.
#[test]
fn a_possible_loss_drops_merged_sectors() {
    let mut bench = Bench::cached(16, 4 * KIB);
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    bench.read_alone(0, 4 * KIB);
    let write = bench.write(512, 512);
    let edge = bench.only_io();
    bench.end(edge);
    let change = bench.only_io();
    bench.engine.handle_loss(bench.now, DISK);
    bench.end(change);
    assert_eq!(bench.moved(), [("backing write", 512)], "the sector is not known any more");
    assert_eq!(bench.outcome(write), Outcome::WriteNotCopied);
}

#[test]
fn memory_takes_over_merged_sectors() {
    let mut bench = Bench::write_back();
    let config = MemoryConfig { bytes: 16 * 4096, page_bytes: 4096 };
    bench.command(Command::Memory(Some(config))).expect("workable");
    bench.read_alone(0, 4 * KIB);
    bench.write_alone(512, 512);
    let read = bench.read(0, 4 * KIB);
    assert_eq!(bench.outcome(read), Outcome::HitMemory);
}
