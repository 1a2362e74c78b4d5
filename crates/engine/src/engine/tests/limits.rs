//! Limits: requests that are returned or refused, and the resources that slow flash may use.

use super::write_back::backing;
use super::*;
use crate::qos::{DiskQos, Entitlement};

/// If too many requests are in flight, the engine returns a further request to the front end.
#[test]
fn too_many_requests_are_handed_back() {
    let mut bench = Bench::bare(Limits { requests_max: 5, ..Limits::default() });
    let reads: Vec<_> = (0..3).map(|i| bench.read(i * 4096, 4 * KIB)).collect();
    let back = bench.try_request(Op::Read, 0, 512).unwrap_err();
    assert_eq!((back.offset, back.len), (0, 512));
    assert_eq!(bench.replies, []);
    bench.settle();
    assert!(reads.iter().all(|id| bench.reply(*id).is_some()));
    assert!(bench.try_request(Op::Read, 0, 512).is_ok());
}

/// Promise 5: no request makes the engine panic or count wrongly.
#[test]
fn requests_that_make_no_sense_are_refused() {
    let mut bench = Bench::cached(16, 4 * KIB);
    for (op, offset, len) in [
        (Op::Read, 64 * MIB, 512),
        (Op::Read, 64 * MIB - 512, 1024),
        (Op::Read, 0, 0),
        (WRITE, 0, 0),
        (Op::Flush, 0, 512),
        (Op::Read, u64::MAX, u64::MAX),
        (Op::Read, u64::MAX, 1),
        (WRITE, 1, u64::MAX),
        (WRITE, 2, u64::MAX - 1),
        (Op::Read, 0, (32 << 20) + 1),
        (Op::Discard(Durability::Volatile), 0, 33 << 20),
    ] {
        let id = bench.request(op, offset, len);
        let reply = bench.reply(id).expect("at once");
        assert_eq!((reply.result, reply.outcome), (Err(IoError::Invalid), Outcome::Refused));
    }
    assert_eq!(bench.ios.len(), 0);
    assert_eq!(bench.released.len(), 9, "buffers come back");
    let stats = bench.stats();
    assert_eq!(stats.outcomes[Outcome::Refused as usize].count, 11);
    assert_eq!((stats.reads, stats.writes, stats.read_bytes, stats.request_bytes_max), (0, 0, 0, 0));
    assert_eq!(bench.read_alone(0, 32 << 20), Outcome::MissNoBlock, "the longest is served");
}

#[test]
fn a_read_only_disk_takes_no_changes() {
    let mut bench = Bench::with_disk(Limits::default(), MIB, Access::ReadOnly);
    bench.enable(64 * KIB, 4 * KIB);
    let discard = Op::Discard(Durability::Volatile);
    for op in [WRITE, discard, Op::WriteZeroes(Durability::Durable, crate::io::Zeroing::MayUnmap)] {
        let id = bench.request(op, 0, 4 * KIB);
        assert_eq!(bench.reply(id).unwrap().result, Err(IoError::ReadOnly));
    }
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::MissFilled);
    let flush = bench.request(Op::Flush, 0, 0);
    bench.settle();
    assert_eq!(bench.reply(flush).unwrap().result, Ok(()));
}

/// Slow flash never delays guests: above `fill_bytes_max`, misses are served and not filled.
#[test]
fn fills_are_bounded_in_bytes() {
    let mut bench = Bench::bare(Limits { fill_bytes_max: 12 * KIB, ..Limits::default() });
    bench.enable(MIB, 4 * KIB);
    let reads: Vec<_> = (0..5).map(|i| bench.read(i * 8 * KIB, 4 * KIB)).collect();
    let fetches: Vec<_> = bench.ios.drain(..).collect();
    fetches.into_iter().for_each(|io| bench.end(io));
    let outcomes: Vec<_> = reads.iter().map(|id| bench.outcome(*id)).collect();
    let filled = [Outcome::MissFilled; 3].into_iter().chain([Outcome::MissFlashBusy; 2]);
    assert_eq!(outcomes, filled.collect::<Vec<_>>());
    assert_eq!(bench.released.len(), 2);
    let fill = bench.ios.pop_front().unwrap();
    bench.end(fill);
    let again = bench.read(MIB, 4 * KIB);
    let fetch = bench.ios.pop_back().unwrap();
    bench.end(fetch);
    assert_eq!(bench.outcome(again), Outcome::MissFilled, "one has ended");
}

/// Fills use at most half of the maximum number of requests.
#[test]
fn fills_are_bounded_in_number() {
    let mut bench = Bench::bare(Limits { requests_max: 8, ..Limits::default() });
    bench.enable(MIB, 4 * KIB);
    let mut hanging = vec![];
    for i in 0..20 {
        let read = bench.read(i * 8 * KIB, 4 * KIB);
        let fetch = bench.only_io();
        bench.end(fetch);
        let expected = if i < 4 { Outcome::MissFilled } else { Outcome::MissFlashBusy };
        assert_eq!(bench.outcome(read), expected, "request {i}");
        hanging.extend(bench.ios.drain(..));
    }
    assert_eq!((hanging.len(), bench.engine.in_flight()), (4, 4));
    hanging.into_iter().for_each(|io| bench.end(io));
    assert_eq!(bench.read_alone(MIB, 4 * KIB), Outcome::MissFilled);
}

/// Promise 4: requests that wait for a hung backing leave capacity for other disks.
#[test]
fn a_hung_disk_leaves_room_for_others() {
    let limits = Limits { requests_max: 64, ..Limits::default() };
    let mut bench = Bench::bare(limits);
    for disk in 1..4 {
        let config =
            DiskConfig { size_bytes: MIB, access: Access::ReadWrite, datastore: DatastoreId(disk as u16) };
        bench.engine.handle_command(
            bench.now,
            CommandId(u64::from(disk)),
            DiskId(disk),
            Command::AddDisk(config),
        );
    }
    let mut hung = 0;
    while bench.try_request(Op::Read, 0, 4 * KIB).is_ok() {
        hung += 1;
    }
    assert!((24..=40).contains(&hung), "{hung}");
    assert!(!bench.engine.has_room(DISK));
    bench.try_request(Op::DaemonFlush, 0, 0).expect("the daemon's request needs no guest's slot");
    for disk in 1..4 {
        let id = RequestId(1000 + u64::from(disk));
        let flush = Request {
            id,
            disk: DiskId(disk),
            op: Op::Flush,
            offset: 0,
            len: 0,
            buffer: None,
            promote: Promote::Usual,
            memory: PayloadMemory::Daemon,
        };
        assert!(bench.engine.has_room(DiskId(disk)));
        bench.engine.handle_request(bench.now, flush).expect("room for another disk");
    }
    bench.drain();
    bench.settle();
    assert!(bench.engine.has_room(DISK), "room comes back");
}

/// A flush that the daemon requests neither waits for a limit of the guest nor counts as a request of
/// the guest.
#[test]
fn a_flush_of_the_daemon_is_no_request_of_a_guest() {
    let mut bench = Bench::bare(Limits::default());
    let one_a_second = Entitlement { limit: Some(1), ..Entitlement::default() };
    bench.command(Command::Qos(DiskQos { backing: one_a_second, flash: Entitlement::default() })).unwrap();
    bench.read_alone(0, 4 * KIB);
    let waits = bench.read(MIB, 4 * KIB);
    assert!(bench.ios.is_empty(), "the limit is used up: {:?}", bench.ios);
    let flush = bench.request(Op::DaemonFlush, 0, 0);
    let io = bench.only_io();
    assert_eq!((io.target, io.op), (backing(), IoOp::Flush));
    bench.end(io);
    assert_eq!(bench.reply(flush).expect("answered").result, Ok(()));
    assert!(bench.reply(waits).is_none() && bench.ios.is_empty());
    assert_eq!(bench.stats().requests(), 1, "one read of the guest was answered");
}

/// Requests are answered in the order in which their I/O ends; ids of requests in flight are not
/// used again.
#[test]
fn completions_come_in_any_order() {
    let mut bench = Bench::cached(64, 4 * KIB);
    let reads: Vec<_> = (0..8).map(|i| bench.read(i * 8 * KIB, 4 * KIB)).collect();
    let mut ids: Vec<_> = bench.ios.iter().map(|io| io.id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 8);
    while let Some(io) = bench.ios.pop_back() {
        bench.end(io);
    }
    let first = bench.replies.first().map(|reply| reply.id);
    assert_eq!(first, reads.last().copied());
    assert_eq!(bench.replies.len(), 8);
}

/// The engine panics at once if its caller completes an I/O twice.
#[test]
#[should_panic(expected = "completed twice")]
fn an_io_completes_once() {
    let mut bench = Bench::bare(Limits::default());
    bench.read(0, 4 * KIB);
    let io = bench.only_io();
    bench.end(io);
    bench.end(io);
}

/// The caller chooses the unit in which limits of I/O are counted.
#[test]
fn the_unit_of_io_can_be_chosen() {
    for (qos_unit_bytes, units) in [(32 << 10, 2), (4 << 10, 16), (1 << 20, 1)] {
        let mut bench = Bench::bare(Limits { qos_unit_bytes, ..Limits::default() });
        bench.read_alone(0, 64 * KIB);
        assert_eq!(bench.stats().backing.units, units, "{qos_unit_bytes}");
    }
}
