//! Incomplete sectors: dirty sectors of which flash has only the units that guests wrote.

use super::recovering::{Left, enable};
use super::write_back::{RING_DEVICE, VOLATILE, backing, flash, ring};
use super::*;
use crate::command::Mode;

/// Returns the I/O of the backing that is in flight, in order: operation, offset and length.
fn of_backing(bench: &Bench) -> Vec<(IoOp, u64, u64)> {
    let ios = bench.ios.iter().filter(|io| io.target == backing());
    ios.map(|io| (io.op, io.offset, io.len)).collect()
}

impl Bench {
    /// Completes all I/O. Returns the I/O of the backing.
    fn end_all(&mut self) -> Vec<(IoOp, u64, u64)> {
        let mut ended = Vec::new();
        while let Some(io) = self.ios.pop_front() {
            if io.target == backing() {
                ended.push((io.op, io.offset, io.len));
            }
            self.end(io);
        }
        ended
    }
}

/// Issue: "Every write reaches flash under write-back, whatever its size and alignment."
#[test]
fn flash_takes_parts_of_sectors_that_are_nowhere_else() {
    let mut bench = Bench::write_back();
    for (offset, len, dirty) in [(1024, 512, 1), (12 * KIB + 512, 8 * KIB, 4), (64 * KIB + 3584, 1024, 6)] {
        let write = bench.write(offset, len);
        assert_eq!(bench.end_all(), [], "{offset}");
        assert_eq!((bench.outcome(write), bench.dirty()), (Outcome::WriteBack, dirty));
    }
}

#[test]
fn a_sector_is_complete_when_all_of_its_units_were_written() {
    let mut bench = Bench::write_back();
    bench.write_alone(1024, 512);
    bench.write_alone(0, 1024);
    let write = bench.write(1536, 2560);
    assert_eq!(bench.end_all(), []);
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
}

/// A log of 512-byte writes never waits for the backing, because most of its sectors are read
/// ahead.
#[test]
fn a_log_does_not_wait_for_the_backing() {
    let mut bench = Bench::write_back();
    for at in 0..64 {
        bench.write(5 * 512 + at * 512, 512);
        let ended = bench.end_all();
        assert!(ended.iter().all(|(_, _, len)| *len > 4 * KIB), "{at}: {ended:?}");
        bench.flush();
    }
    assert_eq!(bench.read_alone(4 * KIB, 28 * KIB), Outcome::Hit);
}

/// A read copies the units from flash over the data of the backing, so it does not wait for the
/// destager.
#[test]
fn a_read_gets_the_units_from_flash_and_the_rest_from_the_backing() {
    let mut bench = Bench::write_back();
    bench.write_alone(1024, 512);
    bench.write_alone(3072, 1024);
    bench.copies.clear();
    let read = bench.read(0, 8 * KIB);
    let io = bench.only_io();
    assert_eq!((io.target, io.op, io.len), (backing(), IoOp::Read, 8 * KIB));
    bench.end(io);
    let io = bench.only_io();
    assert_eq!((io.target, io.op, io.len), (Target::Flash(DeviceId(0)), IoOp::Read, 4 * KIB));
    bench.end(io);
    bench.settle();
    assert_eq!(bench.merged(), [(1024, 512), (3072, 1024)]);
    assert_eq!(bench.outcome(read), Outcome::PartialMiss);
    assert_eq!((bench.dirty(), bench.read_alone(4 * KIB, 4 * KIB)), (1, Outcome::Hit));
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::PartialMiss, "it is still incomplete");
}

/// The backing has the rest of the sector. So the destager writes only the units, and drops the
/// sector from the cache.
#[test]
fn only_the_units_are_destaged() {
    let mut bench = Bench::write_back();
    bench.write_alone(1024, 512);
    bench.write_alone(3072, 1024);
    let drain = bench.start_change(CacheChange::Drain);
    let ended = bench.end_all();
    let write = IoOp::Write(Durability::Volatile);
    assert_eq!(ended, [(write, 1024, 512), (write, 3072, 1024), (IoOp::Flush, 0, 0)]);
    assert_eq!((bench.result(drain), bench.dirty()), (Some(Ok(vec![])), 0));
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
}

/// The other bytes of an incomplete sector on flash have no meaning, so the sector is not part of a
/// transfer of the sectors beside it.
#[test]
fn an_incomplete_sector_is_destaged_alone() {
    for incomplete in 0..3 {
        let mut bench = Bench::write_back();
        for at in 0..3 {
            let (start, len) = if at == incomplete { (1024, 512) } else { (0, 4 * KIB) };
            bench.write_alone(at * 4 * KIB + start, len);
        }
        bench.start_change(CacheChange::Drain);
        let ended = bench.end_all();
        let bytes: u64 = ended.iter().map(|(_, _, len)| len).sum();
        assert_eq!(bytes, 2 * 4 * KIB + 512, "{ended:?}");
        assert!(ended.contains(&(VOLATILE, incomplete * 4 * KIB + 1024, 512)), "{ended:?}");
    }
}

/// A write reads an incomplete sector from flash, and the sector leaves the cache meanwhile. The
/// units that flash had when the read began count, not the units in the index when the read ends.
#[test]
fn a_sector_that_is_destaged_while_a_write_reads_it_does_not_become_complete() {
    let mut bench = Bench::write_back();
    bench.write_alone(1024, 512);
    bench.flush();
    bench.start_change(CacheChange::Drain);
    let ends = |io: &Io| io.target == backing() && io.op == IoOp::Flush;
    while !bench.ios.iter().any(ends) {
        let io = bench.ios.pop_front().expect("it is destaged");
        bench.end(io);
    }
    bench.start_change(CacheChange::StopDrain);
    bench.write(2048, 512);
    let at = bench.ios.iter().position(|io| io.op == IoOp::Read).expect("the write reads flash");
    let read = bench.ios.remove(at).expect("found");
    bench.settle();
    assert_eq!(bench.dirty(), 0, "the sector is clean");
    bench.end(read);
    bench.settle();
    assert_eq!((bench.dirty(), bench.read_alone(0, 4 * KIB)), (1, Outcome::PartialMiss));
}

#[test]
fn a_change_that_bypasses_flash_destages_the_units_first() {
    let mut bench = Bench::write_back();
    bench.write_alone(1024, 512);
    bench.flush();
    let discard = bench.request(Op::Discard(Durability::Volatile), 0, 2048);
    let ended = bench.end_all();
    let write = IoOp::Write(Durability::Volatile);
    assert_eq!(ended[..2], [(write, 1024, 512), (IoOp::Discard, 0, 2048)]);
    bench.settle();
    assert!(bench.answered(discard) && bench.dirty() == 0);
}

#[test]
fn a_cache_has_a_limited_number_of_incomplete_sectors() {
    let mut bench = Bench::write_back();
    bench.engine.limits.incomplete_sectors_max = 3;
    bench.write_alone(512, 512);
    bench.write_alone(8 * KIB + 512, 512);
    let write = bench.write(16 * KIB + 512, 512);
    assert_eq!(of_backing(&bench), [(IoOp::Read, 16 * KIB, 4 * KIB)]);
    bench.settle();
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
    assert_eq!(bench.read_alone(16 * KIB, 4 * KIB), Outcome::Hit);
}

/// A sector that is already incomplete does not count again when a write adds units to it.
#[test]
fn units_are_added_although_the_cache_may_have_no_more_incomplete_sectors() {
    let mut bench = Bench::write_back();
    bench.write_alone(512, 512);
    bench.engine.limits.incomplete_sectors_max = 1;
    let write = bench.write(1024, 512);
    assert_eq!(bench.end_all(), []);
    assert_eq!((bench.outcome(write), bench.dirty()), (Outcome::WriteBack, 1));
}

/// After a failed write, flash may have the old or the new content of a sector. The earlier units
/// are the same in both, and reach the backing before the guest's bytes.
#[test]
fn a_failed_write_to_flash_keeps_the_units_that_were_there() {
    let mut bench = Bench::write_back();
    bench.write_alone(1024, 512);
    bench.flush();
    let write = bench.write(1536, 512);
    let is_write = |io: &Io| is_flash(io) && io.op == IoOp::Write(Durability::Volatile);
    let failing = loop {
        match bench.ios.pop_front().expect("flash is written") {
            io if is_write(&io) => break io,
            io => bench.end(io),
        }
    };
    bench.fail(failing);
    let mut to_backing = Vec::new();
    while let Some(io) = bench.ios.pop_front() {
        match (io.target == backing(), io.op) {
            (false, IoOp::Read) => bench.end_with(io, Ok(()), &[SUM + 1]),
            (is_backing, _) => {
                to_backing.extend(is_backing.then_some((io.offset, io.len)));
                bench.end(io);
            }
        }
    }
    assert_eq!(to_backing[..2], [(1024, 512), (1536, 512)]);
    assert!(bench.reply(write).expect("it is answered").result.is_ok() && bench.dirty() == 0);
}

/// A read finds wrong data in a sector. A later write is merged with the copy in memory, and fails. The
/// wrong data still counts as lost, and does not reach the backing.
#[test]
fn a_failed_write_to_flash_does_not_make_wrong_data_right() {
    let mut bench = Bench::write_back();
    bench.engine.lend_for_edges(BufferId(3 << 20), 64 << 10);
    bench.write_alone(1024, 512);
    bench.flush();
    bench.write_alone(1024, 1024);
    let is_read = |io: &Io| is_flash(io) && io.op == IoOp::Read;
    let read = bench.read(1024, 512);
    let mut to_backing = Vec::new();
    let mut run = |bench: &mut Bench, fails: bool| {
        while let Some(io) = bench.ios.pop_front() {
            match io {
                _ if is_read(&io) => bench.end_with(io, Ok(()), &[SUM + 1]),
                _ if fails && is_flash(&io) && io.op == VOLATILE => bench.fail(io),
                _ => {
                    to_backing.extend((io.target == backing()).then_some((io.op, io.offset, io.len)));
                    bench.end(io);
                }
            }
        }
    };
    run(&mut bench, false);
    assert_eq!(bench.outcome(read), Outcome::DirtyLost);
    bench.write(2048, 512);
    run(&mut bench, true);
    bench.start_change(CacheChange::Drain);
    run(&mut bench, false);
    assert!(to_backing.iter().all(|(op, offset, _)| *op != VOLATILE || *offset == 2048), "{to_backing:?}");
    assert_eq!(bench.dirty(), 1);
}

/// The journal cannot record a part of a unit, so a write of such a part reads the backing.
#[test]
fn writes_of_parts_of_units_read_the_backing() {
    let mut bench = Bench::write_back();
    bench.write(100, 512);
    assert_eq!(of_backing(&bench), [(IoOp::Read, 0, 4 * KIB)]);
    bench.settle();
    bench.write_alone(8 * KIB, 512);
    bench.flush();
    let write = bench.write(8 * KIB + 700, 100);
    let ended = bench.end_all();
    assert_eq!(ended[0], (IoOp::Write(Durability::Volatile), 8 * KIB, 512), "the unit is destaged first");
    bench.settle();
    assert!(bench.answered(write));
}

/// Two writes are in flight at once and overlap in a part of a unit. The units of the first write
/// reach the backing before the second write.
#[test]
fn a_write_of_parts_of_units_waits_for_the_units_that_it_overlaps() {
    let mut bench = Bench::write_back();
    let units = bench.write(1024, 512);
    let parts = bench.write(1200, 600);
    let ended = bench.end_all().into_iter().filter(|(op, ..)| *op == VOLATILE);
    assert_eq!(ended.collect::<Vec<_>>(), [(VOLATILE, 1024, 512), (VOLATILE, 1200, 600)]);
    assert_eq!(bench.outcome(units), Outcome::WriteBack);
    assert_eq!((bench.outcome(parts), bench.dirty()), (Outcome::WriteNotCopied, 0));
}

/// The first of two overlapping writes covers units partly, and the second writes whole units. The
/// sector is complete when the second write is merged.
#[test]
fn units_are_merged_with_a_write_of_parts_of_them() {
    let mut bench = Bench::write_back();
    let parts = bench.write(1200, 600);
    let units = bench.write(1024, 512);
    assert_eq!(bench.end_all(), [(IoOp::Read, 0, 4 * KIB)]);
    assert_eq!((bench.outcome(parts), bench.outcome(units)), (Outcome::WriteBack, Outcome::WriteBack));
    assert_eq!((bench.dirty(), bench.read_alone(0, 4 * KIB)), (1, Outcome::Hit));
}

/// The units that a write overlaps must not be destaged before a commit, and the journal is lost
/// during that commit. The write waits for the next journal, without further attempts before that.
#[test]
fn a_write_over_units_that_no_journal_has_waits_for_the_next_journal() {
    let mut bench = Bench::write_back();
    bench.write_alone(1024, 512);
    let write = bench.write(1200, 600);
    while let Some(io) = bench.ios.pop_front() {
        assert!(io.target != backing(), "{io:?}");
        match io.target == flash(RING_DEVICE) {
            true => bench.fail(io),
            false => bench.end(io),
        }
    }
    assert!(bench.events.contains(&Event::JournalLost(DISK)));
    bench.wait_ms(5_000);
    assert_eq!((bench.answered(write), bench.dirty(), bench.ios.len()), (false, 1, 0));
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    let ended = bench.end_all();
    assert!(bench.result(renew).expect("done").is_ok());
    let first = ended.iter().find(|(op, ..)| *op == VOLATILE);
    assert_eq!(first, Some(&(VOLATILE, 1024, 512)), "{ended:?}");
    assert_eq!(bench.reply(write).expect("answered").result, Ok(()));
}

/// A write to flash over an incomplete sector fails when the journal is lost already. The earlier units
/// reach the backing before the guest's bytes, and the reply waits for the next journal.
#[test]
fn a_failed_write_over_units_ends_although_the_journal_is_lost() {
    let mut bench = Bench::write_back();
    bench.write_alone(1024, 512);
    bench.flush();
    let write = bench.write(1536, 512);
    let is_write = |io: &Io| is_flash(io) && io.op == VOLATILE;
    let failing = loop {
        match bench.ios.pop_front().expect("flash is written") {
            io if is_write(&io) => break io,
            io => bench.end(io),
        }
    };
    bench.write_alone(64 * KIB, 4 * KIB);
    bench.request(Op::Flush, 0, 0);
    while let Some(io) = bench.ios.pop_front() {
        match io.target == flash(RING_DEVICE) {
            true => bench.fail(io),
            false => bench.end(io),
        }
    }
    assert!(bench.events.contains(&Event::JournalLost(DISK)));
    bench.fail(failing);
    let writes: Vec<_> = bench.end_all().into_iter().filter(|(op, ..)| *op == VOLATILE).collect();
    assert_eq!(writes[..2], [(VOLATILE, 1024, 512), (VOLATILE, 1536, 512)]);
    assert!(!bench.answered(write));
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    bench.settle();
    assert!(bench.result(renew).expect("done").is_ok());
    assert_eq!(bench.reply(write).expect("answered").result, Ok(()));
}

/// The journal records the units that flash has, also those that later writes added. After a
/// restart, a read of the sector uses these units and the backing.
#[test]
fn the_journal_has_the_units() {
    let mut bench = Bench::write_back();
    let mut left = Left::default();
    for offset in [1024, 2048, 16 * KIB + 3584] {
        bench.write(offset, 512);
        left.settle(&mut bench);
        bench.request(Op::Flush, 0, 0);
        left.settle(&mut bench);
    }
    bench.start_change(CacheChange::Close);
    left.settle(&mut bench);
    let (_, recovered) = left.recover();
    let units: Vec<(u64, u8)> = recovered.dirty().map(|dirty| (dirty.sector, dirty.units)).collect();
    assert_eq!(units, [(0, 0b1_0100), (4, 0b1000_0000)]);

    let mut bench = Bench::bare(Limits::default());
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    bench.start_change(enable(2, Mode::WriteBack, Some(recovered)));
    bench.settle();
    bench.copies.clear();
    assert_eq!(bench.read_alone(16 * KIB, 4 * KIB), Outcome::PartialMiss);
    assert_eq!(bench.merged(), [(3584, 512)]);
}
