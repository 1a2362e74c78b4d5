//! Requests that wait because the journal was lost, and the events that end their waiting.

use super::write_back::{RING_DEVICE, backing, flash, lazy, ring};
use super::*;
use crate::command::{Discard, Enable, Mode, NewRing};
use crate::qos::{DiskQos, Entitlement};

/// Returns a cache whose journal was lost during a flush, without dirty data.
fn lost() -> (Bench, RequestId) {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    let flush = bench.request(Op::Flush, 0, 0);
    while let Some(io) = bench.ios.pop_front() {
        match io.target {
            target if target == flash(RING_DEVICE) => bench.fail(io),
            _ => bench.end(io),
        }
    }
    assert!(bench.events.contains(&Event::JournalLost(DISK)));
    assert_eq!(bench.dirty(), 1, "the ring may hold older, clean data of it");
    bench.record_loss();
    assert_eq!(bench.dirty(), 0, "it goes to the backing by itself");
    (bench, flush)
}

impl Bench {
    /// Sends the command which says that the daemon has recorded the loss of the journal.
    pub(super) fn record_loss(&mut self) {
        assert_eq!(self.change(CacheChange::LossRecorded(0)), Ok(vec![]));
        assert_eq!(self.ios.len(), 0, "this ring has a higher number");
        assert_eq!(self.change(CacheChange::LossRecorded(1)), Ok(vec![]));
        self.settle();
    }
}

/// Data that the lost ring durably records as dirty is destaged without a new journal, because
/// recovery finds this data after a crash.
#[test]
fn a_lost_journal_keeps_only_what_it_does_not_know() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    bench.flush();
    bench.write_alone(64 * KIB, 4 * KIB);
    bench.request(Op::Flush, 0, 0);
    while let Some(io) = bench.ios.pop_front() {
        match io.target {
            target if target == flash(RING_DEVICE) => bench.fail(io),
            _ => bench.end(io),
        }
    }
    bench.wait_ms(5_000);
    bench.settle();
    assert_eq!(bench.dirty(), 1, "that of which the ring has no record");
    bench.record_loss();
    assert_eq!(bench.dirty(), 0);
}

/// A journal page of one disk is being written when another disk's flush of the same device fails.
/// The page may be lost, although its write succeeds.
#[test]
fn a_flush_that_fails_during_another_disks_write_costs_its_journal_too() {
    let mut bench = Bench::write_back();
    let other = DiskId(1);
    bench.on_disk(
        other,
        Command::AddDisk(DiskConfig {
            size_bytes: 64 * MIB,
            access: Access::ReadWrite,
            datastore: DatastoreId(0),
        }),
    );
    let place = segment(0, MIB);
    let copies = vec![(8..16).map(|i| segment(RING_DEVICE, i * MIB)).collect()];
    let enable = Enable {
        config: CacheConfig { mode: Mode::WriteBack, destage: lazy(), ..config(MIB, 4 * KIB) },
        segments: vec![DataSegment { place, ordinal: 0, seconds_only: false }],
        journal: Some(NewRing { cache: [8; 16], copies, ..ring(1) }),
        recovered: None,
    };
    bench.on_disk(other, Command::Cache(CacheChange::Enable(Box::new(enable))));
    bench.settle();
    // The first disk's page is in flight, and all of its earlier writes are durable.
    bench.write_alone(0, 4 * KIB);
    bench.request(Op::Flush, 0, 0);
    let page = bench.only_io();
    assert_eq!((page.target, page.op), (flash(RING_DEVICE), IoOp::WriteJournal));
    bench.request_of(other, WRITE);
    bench.settle();
    bench.request_of(other, Op::Flush);
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    let at = bench.ios.iter().position(|io| io.target == flash(RING_DEVICE)).expect("just found");
    let flush = bench.ios.remove(at).expect("just found");
    bench.fail(flush);
    bench.end(page);
    assert!(bench.events.contains(&Event::JournalLost(other)));
    assert!(bench.events.contains(&Event::JournalLost(DISK)), "its page may be lost");
}

impl Bench {
    fn on_disk(&mut self, disk: DiskId, command: Command) {
        self.made += 1;
        self.engine.handle_command(self.now, CommandId(self.made), disk, command);
        self.drain();
    }

    fn request_of(&mut self, disk: DiskId, op: Op) {
        self.made += 1;
        let len = if op == Op::Flush { 0 } else { 4 * KIB };
        let buffer = op.has_buffer().then_some(BufferId(self.made as u32));
        let (id, promote, memory) = (RequestId(self.made), self.promote, self.memory);
        let request = Request { id, disk, op, offset: 0, len, buffer, promote, memory };
        self.engine.handle_request(self.now, request).expect("room for a request");
        self.drain();
    }
}

/// Sends requests of all kinds that must wait for a new journal, and checks that they wait and that
/// a read is still served.
fn await_journal(bench: &mut Bench) -> Vec<RequestId> {
    let ops = [(WRITE, 0), (WRITE, 64 * KIB), (Op::Write(Durability::Durable), 128 * KIB)];
    let mut waiting: Vec<RequestId> = ops.map(|(op, offset)| bench.request(op, offset, 4 * KIB)).into();
    waiting.push(bench.request(Op::Discard(Durability::Volatile), 256 * KIB, 4 * KIB));
    waiting.push(bench.request(Op::Flush, 0, 0));
    bench.settle();
    for id in &waiting {
        assert!(!bench.answered(*id), "{id}");
    }
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit, "reads go on");
    waiting
}

#[test]
fn changes_and_flushes_wait_for_another_journal() {
    let (mut bench, flush) = lost();
    let mut waiting = await_journal(&mut bench);
    waiting.push(flush);
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    bench.settle();
    assert!(bench.result(renew).expect("done").is_ok());
    for id in waiting {
        assert_eq!(bench.reply(id).expect("answered").result, Ok(()), "{id}");
    }
    assert_eq!(bench.write_alone(0, 4 * KIB), Outcome::WriteBack);
}

#[test]
fn or_until_the_cache_is_taken_away() {
    let (mut bench, flush) = lost();
    let mut waiting = await_journal(&mut bench);
    waiting.push(flush);
    let disable = bench.start_change(CacheChange::Disable);
    bench.settle();
    assert!(bench.result(disable).expect("done").is_ok());
    for id in waiting {
        assert_eq!(bench.reply(id).expect("answered").result, Ok(()), "{id}");
    }
}

/// A write that flash did not accept is on the backing and waits for its reply. If the backing may
/// have lost this write meanwhile, hob sends it to the backing again before the reply.
#[test]
fn what_the_backing_may_have_lost_meanwhile_is_written_again() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    let write = bench.write(64 * KIB, 4 * KIB);
    let to_flash = bench.only_io();
    let flush = bench.request(Op::Flush, 0, 0);
    while let Some(io) = bench.ios.pop_front() {
        match io.target {
            target if target == flash(RING_DEVICE) => bench.fail(io),
            _ => bench.end(io),
        }
    }
    bench.fail(to_flash);
    bench.settle();
    bench.record_loss();
    bench.engine.handle_loss(bench.now, DISK);
    let disable = bench.start_change(CacheChange::Disable);
    let mut written = vec![];
    while let Some(io) = bench.ios.pop_front() {
        written.extend((io.target == backing() && io.offset == 64 * KIB).then_some(io.op));
        assert!(!bench.answered(write), "not before the backing has it again");
        bench.end(io);
    }
    assert!(bench.result(disable).expect("done").is_ok());
    assert_eq!(written, [IoOp::Write(Durability::Volatile)]);
    assert_eq!(bench.reply(write).expect("answered").result, Ok(()));
    assert!(bench.answered(flush));
}

/// Waiting requests fail after half a minute, and later writes fail at once. Reads still work.
/// After a new journal ring was made, all other requests work too.
#[test]
fn or_until_nobody_came_for_half_a_minute() {
    let (mut bench, flush) = lost();
    let mut waiting = await_journal(&mut bench);
    waiting.push(flush);
    bench.wait_ms(29_000);
    assert!(!bench.answered(flush));
    bench.wait_ms(1_000);
    waiting.push(bench.write(0, 4 * KIB));
    for id in waiting {
        assert_eq!(bench.reply(id).expect("answered").result, Err(IoError::Failed), "{id}");
        assert_eq!(bench.outcome(id), Outcome::DirtyLost);
    }
    assert!(!bench.ios.iter().any(|io| io.target == backing()), "what the ring says stays true");
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    bench.settle();
    assert!(bench.result(renew).expect("done").is_ok());
    assert_eq!(bench.write_alone(0, 4 * KIB), Outcome::WriteBack);
}

/// The change to a new journal ring waits for requests in flight. A QoS limit may delay reads in
/// flight for long. So the limit is suspended. Otherwise the requests that wait for the new ring
/// would fail, although the ring could be made.
#[test]
fn reads_that_a_limit_keeps_waiting_do_not_keep_the_next_journal_waiting() {
    let (mut bench, flush) = lost();
    let one_a_second = Entitlement { limit: Some(1), ..Entitlement::default() };
    bench.command(Command::Qos(DiskQos { backing: one_a_second, flash: Entitlement::default() })).unwrap();
    let reads: Vec<RequestId> = (1..60).map(|i| bench.read(i * MIB, 4 * KIB)).collect();
    let mut waiting = await_journal(&mut bench);
    waiting.push(flush);
    assert_eq!(reads.iter().filter(|id| bench.answered(**id)).count(), 1, "one comes at once");
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    bench.settle();
    assert!(bench.result(renew).expect("nothing keeps it waiting").is_ok());
    for id in waiting.into_iter().chain(reads) {
        assert_eq!(bench.reply(id).expect("answered").result, Ok(()), "{id}");
    }
    let again: Vec<RequestId> = (1..3).map(|i| bench.read(i * MIB + 512 * KIB, 4 * KIB)).collect();
    bench.settle();
    assert!(!bench.answered(again[1]), "the limit holds again");
}

/// The engine keeps a disk that cannot be closed, and the disk's waiting requests.
#[test]
fn a_disk_is_not_removed_before() {
    let (mut bench, flush) = lost();
    let waiting = await_journal(&mut bench);
    let remove = bench.start_command(Command::RemoveDisk);
    assert_eq!(bench.result(remove), Some(Err(CommandError::JournalFailed)));
    assert!(!bench.answered(flush) && !bench.answered(waiting[0]));
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    bench.settle();
    assert!(bench.result(renew).expect("done").is_ok());
    assert_eq!(bench.reply(waiting[0]).expect("answered").result, Ok(()));
}

/// Returns a write-back cache with a device that does not answer and has a write in flight. If
/// `flushed` is true, the device has no other unflushed data.
fn hung(flushed: bool) -> (Bench, Io, RequestId) {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 8 * KIB);
    bench.flush();
    bench.write_alone(0, 4 * KIB);
    if flushed {
        bench.flush();
    }
    let write = bench.write(16 * KIB, 4 * KIB);
    let silent = bench.only_io();
    assert_eq!(silent.target, flash(0));
    bench.wait_ms(6_000);
    assert!(bench.events.contains(&Event::Stalled(DeviceId(0))));
    assert!(!bench.answered(write));
    (bench, silent, write)
}

/// Completes all I/O except the I/O of the device that does not answer.
fn settle_others(bench: &mut Bench, kept: &mut Vec<Io>) {
    while let Some(io) = bench.ios.pop_front() {
        if io.target == flash(0) { kept.push(io) } else { bench.end(io) }
    }
}

#[test]
fn a_silent_device_keeps_only_those_waiting_who_need_it() {
    let (mut bench, silent, write) = hung(true);
    let mut kept = vec![silent];
    let dirty = bench.read(0, 4 * KIB);
    let other = bench.read(1 << 20, 4 * KIB);
    let past = bench.write(2 << 20, 4 * KIB);
    let flush = bench.request(Op::Flush, 0, 0);
    let drain = bench.start_change(CacheChange::Drain);
    settle_others(&mut bench, &mut kept);
    assert_eq!(bench.outcome(other), Outcome::BypassStalled);
    assert_eq!(bench.outcome(past), Outcome::WriteNotCopied);
    assert_eq!(
        bench.reply(flush).expect("answered").result,
        Ok(()),
        "nothing was written there that is not durable"
    );
    assert!(!bench.answered(dirty) && bench.result(drain).is_none());
    assert_eq!(bench.stats().cache, crate::stats::CacheState::Stalled, "the engine can be asked");
    kept.into_iter().for_each(|io| bench.end(io));
    bench.settle();
    assert!(bench.events.contains(&Event::Resumed(DeviceId(0))));
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
    assert_eq!(bench.reply(dirty).expect("answered").result, Ok(()));
    assert_eq!(bench.result(drain), Some(Ok(vec![])));
    assert_eq!(bench.dirty(), 0);
}

/// A device that does not answer may lose its unflushed data. So flushes wait for the device.
#[test]
fn a_silent_device_with_unflushed_data_keeps_flushes_waiting() {
    let (mut bench, silent, _) = hung(false);
    let mut kept = vec![silent];
    let flush = bench.request(Op::Flush, 0, 0);
    let other = bench.read(1 << 20, 4 * KIB);
    settle_others(&mut bench, &mut kept);
    bench.wait_ms(60_000);
    settle_others(&mut bench, &mut kept);
    assert!(!bench.answered(flush));
    assert_eq!(bench.outcome(other), Outcome::BypassStalled);
    kept.into_iter().for_each(|io| bench.end(io));
    bench.settle();
    assert_eq!(bench.reply(flush).expect("answered").result, Ok(()));
}

/// The kernel fails the device's I/O: then the device counts as failed.
#[test]
fn a_silent_device_that_fails_in_the_end_costs_nothing() {
    let (mut bench, silent, write) = hung(false);
    bench.fail(silent);
    bench.settle();
    assert_eq!(bench.reply(write).expect("answered").result, Ok(()));
    assert_eq!(bench.outcome(write), Outcome::WriteCopied, "the backing has it");
}

/// A failed flush of flash is not retried: dirty data is written to the backing before another ring
/// may record it as durable.
#[test]
fn a_failed_flush_of_flash_is_not_tried_again() {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    let flush = bench.request(Op::Flush, 0, 0);
    bench.next(flash(RING_DEVICE), IoOp::WriteJournal);
    let io = bench.ios.pop_front().expect("the device of the data is flushed");
    assert_eq!((io.target, io.op), (flash(0), IoOp::Flush));
    bench.fail(io);
    assert!(bench.events.contains(&Event::JournalLost(DISK)));
    assert!(!bench.ios.iter().any(|io| (io.target, io.op) == (flash(0), IoOp::Flush)), "{:?}", bench.ios);
    let ring_flush =
        bench.ios.iter().position(|io| io.target == flash(RING_DEVICE)).expect("the other device");
    let io = bench.ios.remove(ring_flush).expect("just found");
    bench.end(io);
    assert!(!bench.answered(flush));
    bench.record_loss();
    assert_eq!(bench.dirty(), 0);
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    bench.settle();
    assert!(bench.result(renew).expect("done").is_ok());
    assert_eq!(bench.reply(flush).expect("answered").result, Ok(()));
}

/// After the journal is lost, a flush that another disk requested fails on the device with the dirty
/// data. A new journal ring must not record this data as durable.
#[test]
fn a_flush_of_another_disk_that_fails_after_the_journal_is_lost_counts() {
    for fails in [false, true] {
        let mut bench = Bench::write_back();
        bench.write_alone(0, 4 * KIB);
        bench.request(Op::Flush, 0, 0);
        while let Some(io) = bench.ios.pop_front() {
            match io.target == flash(RING_DEVICE) {
                true => bench.fail(io),
                false => bench.end(io),
            }
        }
        assert!(bench.events.contains(&Event::JournalLost(DISK)));
        if fails {
            bench.engine.distrust_device(bench.now, DiskId(1), DeviceId(0));
        }
        let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
        while let Some(io) = bench.ios.pop_front() {
            match io.target == backing() && io.op != IoOp::Flush {
                true => bench.fail(io),
                false => bench.end(io),
            }
        }
        let expected = if fails { Err(CommandError::Dirty) } else { Ok(()) };
        assert_eq!((bench.result(renew).map(|it| it.map(drop)), bench.dirty()), (Some(expected), 1));
    }
}

/// The lost journal ring still describes discarded data as dirty, so the daemon records the discard
/// first. The daemon may record the discard while the disk is being removed.
#[test]
fn a_discard_without_a_journal_waits_until_it_is_recorded() {
    for is_removed in [false, true] {
        let mut bench = Bench::write_back();
        bench.write_alone(0, 4 * KIB);
        bench.request(Op::Flush, 0, 0);
        while let Some(io) = bench.ios.pop_front() {
            match io.target {
                target if target == flash(RING_DEVICE) => bench.fail(io),
                _ => bench.end(io),
            }
        }
        assert!(bench.events.contains(&Event::JournalLost(DISK)));
        let discard = bench.start_change(CacheChange::DiscardDirty(Discard::Told));
        bench.settle();
        assert!(bench.events.contains(&Event::DiscardUnrecorded(DISK, 1)));
        if is_removed {
            bench.start_command(Command::RemoveDisk);
        }
        assert_eq!(bench.change(CacheChange::DiscardRecorded(0)), Ok(vec![]));
        assert_eq!((bench.result(discard), bench.dirty()), (None, 1), "this ring has a higher number");
        assert_eq!(bench.change(CacheChange::DiscardRecorded(1)), Ok(vec![]));
        bench.settle();
        assert_eq!((bench.result(discard), bench.dirty()), (Some(Ok(vec![])), 0));
    }
}

/// The failure of a flush that began before a change was acknowledged says nothing about the change.
#[test]
fn a_flush_that_began_before_a_late_reply_is_no_report_about_the_change() {
    let mut bench = Bench::write_back();
    let write = bench.write(0, 64 * KIB);
    while let Some(io) = bench.ios.pop_front() {
        if io.target == backing() { bench.end(io) } else { bench.fail(io) }
    }
    assert!(bench.events.contains(&Event::JournalLost(DISK)));
    assert_eq!(bench.change(CacheChange::LossRecorded(1)), Ok(vec![]));
    while let Some(io) = bench.ios.pop_front() {
        if io.target == backing() { bench.end(io) } else { bench.fail(io) }
    }
    let early = bench.request(Op::Flush, 0, 0);
    assert!(!bench.answered(write) && !bench.answered(early));
    bench.start_change(CacheChange::Disable);
    while let Some(io) = bench.ios.pop_front() {
        bench.fail(io);
    }
    assert!(bench.answered(write));
    assert!(bench.reply(early).expect("answered").result.is_err());
    let next = bench.request(Op::Flush, 0, 0);
    bench.settle();
    assert!(bench.reply(next).expect("answered").result.is_err(), "this one is the report");
    let last = bench.request(Op::Flush, 0, 0);
    bench.settle();
    assert_eq!(bench.reply(last).expect("answered").result, Ok(()));
}
