//! NBD exports of real servers (qemu-nbd and nbdkit must be installed), and of one that misbehaves.

mod common;

use std::time::{Duration, Instant};

use common::process::{await_socket, spawn};
use common::server::Server;
use common::{Rig, both_kinds, impatient, options, pattern};
use hob_engine::command::Access;
use hob_engine::io::{Durability, IoError, IoOp, Zeroing};
use hob_nbd::{Command as Nbd, CommandFlags, ExportInfo};
use hob_storage::backing::offline_writer::OfflineWriter;
use hob_storage::backing::{Backing, BackingOptions, Condition, OpenError, WAIT_FOREVER, WaitMax};
use hob_storage::ring::RingKind;

const WRITE: IoOp = IoOp::Write(Durability::Volatile);
const DURABLE: IoOp = IoOp::Write(Durability::Durable);
const MIB: u64 = 1 << 20;

#[test]
fn qemu_nbd_serves_all_there_is_to_do() {
    both_kinds(|kind| {
        let dir = tempfile::tempdir().unwrap();
        let (image, socket) = (dir.path().join("image"), dir.path().join("socket"));
        std::fs::File::create(&image).unwrap().set_len(8 * MIB).unwrap();
        let (image, socket_text) = (image.to_str().unwrap(), socket.to_str().unwrap());
        let arguments = [
            "--socket",
            socket_text,
            "--format=raw",
            "--persistent",
            "--shared=0",
            "--discard=unmap",
            "-x",
            "a b",
            image,
        ];
        let _server = spawn("qemu-nbd", &arguments);
        await_socket(&socket);
        let mut rig = Rig::open(kind, &format!("nbd+unix:///a%20b?socket={socket_text}"), Access::ReadWrite);
        assert!(rig.backing.info().can_discard);
        rig.exercise();
        rig.close();
    });
}

#[test]
fn nbdkit_serves_over_tcp_and_comes_back_after_kill() {
    // This process alone uses the address, so the port is free when the server starts again.
    let [.., high, low] = std::process::id().to_be_bytes();
    let (address, port) = (format!("127.82.{high}.{low}"), "10809");
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    std::fs::write(&image, vec![0; 8 << 20]).unwrap();
    let start = || spawn("nbdkit", &["-f", "-i", &address, "-p", port, "file", image.to_str().unwrap()]);
    let mut server = start();
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::net::TcpStream::connect(format!("{address}:{port}")).is_err() {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut rig = Rig::open(RingKind::IoUring, &format!("nbd://{address}:{port}"), Access::ReadWrite);
    rig.exercise();
    let data = pattern(MIB as usize, 3);
    rig.write(WRITE, 0, &data).unwrap();
    rig.run(IoOp::Flush, 0, 0).unwrap();
    server.0.kill().unwrap();
    server.0.wait().unwrap();
    let id = rig.start(IoOp::Read, 0, MIB, None);
    (0..5).for_each(|_| rig.turn());
    server = start();
    rig.wait(id).unwrap();
    assert!(rig.take(id, 0, MIB as usize) == data);
    rig.run(IoOp::Flush, 0, 0).unwrap();
    rig.close();
    drop(server);
}

#[test]
fn the_server_here_serves_all_there_is_to_do() {
    both_kinds(|kind| {
        for change in [
            (|_| {}) as fn(&mut ExportInfo),
            |export| export.can_fua = false,
            |export| export.can_trim = false,
            |export| export.can_write_zeroes = false,
            |export| export.can_flush = false,
            |export| export.block_size_max = 64 << 10,
            |export| export.block_size_min = 512,
        ] {
            let mut export = ExportInfo::new(8 * MIB);
            change(&mut export);
            export.can_fast_zero &= export.can_write_zeroes;
            let server = Server::start(export);
            let can_flush = server.script.lock().unwrap().export.can_flush;
            let mut rig = Rig::open(kind, &server.uri, Access::ReadWrite);
            assert_eq!(rig.backing.info().can_flush, can_flush);
            rig.exercise();
            rig.close();
        }
    });
}

#[test]
fn durable_writes_are_flushed_one_way_or_another() {
    let server = Server::start(ExportInfo::new(MIB));
    let mut rig = Rig::open(RingKind::IoUring, &server.uri, Access::ReadWrite);
    rig.write(DURABLE, 0, &[1; 4096]).unwrap();
    // The first flush covers the writes of earlier connections.
    let seen = server.script.lock().unwrap().seen.clone();
    assert_eq!(seen, [(Nbd::Flush, 0, 0, CommandFlags::NONE), (Nbd::Write, 0, 4096, CommandFlags::FUA)]);
    rig.close();
    let mut export = ExportInfo::new(MIB);
    export.can_fua = false;
    export.block_size_max = 8192;
    let server = Server::start(export);
    let mut rig = Rig::open(RingKind::IoUring, &server.uri, Access::ReadWrite);
    rig.write(DURABLE, 0, &[1; 20480]).unwrap();
    let seen: Vec<_> = server.script.lock().unwrap().seen.iter().map(|(command, ..)| *command).collect();
    assert_eq!(seen, [Nbd::Flush, Nbd::Write, Nbd::Write, Nbd::Write, Nbd::Flush]);
    rig.close();
}

/// A server that does not offer FUA may ignore the flag.
#[test]
fn a_durable_write_that_is_sent_again_to_a_server_without_fua_is_flushed() {
    let server = Server::start(ExportInfo::new(MIB));
    let mut rig = Rig::open(RingKind::IoUring, &server.uri, Access::ReadWrite);
    rig.run(IoOp::Flush, 0, 0).unwrap();
    server.set(|script| (script.answers_left, script.export.can_fua) = (Some(0), false));
    rig.write(DURABLE, 0, &[1; 4096]).unwrap();
    let mut seen = server.script.lock().unwrap().seen.clone();
    seen.retain(|(command, ..)| matches!(command, Nbd::Write | Nbd::Flush));
    let expected = [(Nbd::Write, 0, 4096, CommandFlags::NONE), (Nbd::Flush, 0, 0, CommandFlags::NONE)];
    assert_eq!(seen[seen.len() - 2..], expected);
    rig.close();
}

/// After a failed durable write, a successful flush proves nothing about earlier writes.
#[test]
fn a_durable_write_that_fails_reports_a_loss_of_what_was_not_flushed() {
    for can_fua in [true, false] {
        let mut export = ExportInfo::new(MIB);
        export.can_fua = can_fua;
        let server = Server::start(export);
        let set = |fails| {
            server.set(|script| if can_fua { script.sick = fails } else { script.flush_fails = fails });
        };
        let mut rig = Rig::open(RingKind::IoUring, &server.uri, Access::ReadWrite);
        rig.run(IoOp::Flush, 0, 0).unwrap();
        for is_flushed in [false, true] {
            rig.write(WRITE, 0, &[1; 4096]).unwrap();
            if is_flushed {
                rig.run(IoOp::Flush, 0, 0).unwrap();
            }
            set(true);
            assert_eq!(rig.write(DURABLE, 8192, &[1; 4096]), Err(IoError::Failed));
            // Without FUA the durable write itself was a change that is not flushed.
            assert_eq!(rig.backing.take_loss(), !is_flushed || !can_fua, "{can_fua} {is_flushed}");
            assert!(!rig.backing.take_loss(), "once");
            set(false);
            rig.run(IoOp::Flush, 0, 0).unwrap();
        }
        rig.close();
    }
}

#[test]
fn unanswered_requests_are_sent_again() {
    both_kinds(|kind| {
        let server = Server::start(ExportInfo::new(4 * MIB));
        let mut rig = Rig::open(kind, &server.uri, Access::ReadWrite);
        let data = pattern(4 << 20, 1);
        rig.write(WRITE, 0, &data).unwrap();
        rig.run(IoOp::Flush, 0, 0).unwrap();
        for round in 0..10usize {
            server.set(|script| script.answers_left = Some(round * 3));
            let ids: Vec<_> = (0..64u64).map(|n| rig.start(IoOp::Read, n * 65536, 65536, None)).collect();
            for (n, id) in ids.into_iter().enumerate() {
                rig.wait(id).unwrap();
                assert!(rig.take(id, 0, 65536) == data[n * 65536..][..65536]);
            }
        }
        assert_eq!(server.script.lock().unwrap().connections, 11);
        rig.run(IoOp::Flush, 0, 0).unwrap();
        rig.close();
    });
}

/// Breaks the connection while the server works on a read, and waits until the read is answered on
/// the next connection.
fn cut(rig: &mut Rig, server: &Server) {
    server.set(|script| script.answers_left = Some(0));
    let read = rig.start(IoOp::Read, 0, 4096, None);
    let reads = server.count(Nbd::Read);
    while server.count(Nbd::Read) == reads {
        rig.turn();
    }
    rig.wait(read).unwrap();
    rig.take(read, 0, 0);
}

#[test]
fn changes_that_a_server_loses_are_repeated() {
    both_kinds(|kind| {
        for can_fua in [true, false] {
            let mut export = ExportInfo::new(MIB);
            export.can_fua = can_fua;
            let server = Server::start(export);
            let mut rig = Rig::open(kind, &server.uri, Access::ReadWrite);
            rig.write(WRITE, 0, &pattern(MIB as usize, 1)).unwrap();
            rig.run(IoOp::Flush, 0, 0).unwrap();
            let flushed = server.script.lock().unwrap().data.clone();
            let lose = |rig: &mut Rig| {
                server.set(|script| script.data = flushed.clone());
                cut(rig, &server);
            };
            // Nothing is repeated if all is flushed.
            let writes = server.count(Nbd::Write);
            lose(&mut rig);
            assert_eq!(server.count(Nbd::Write), writes);
            // The newest content counts, also after a second loss.
            rig.write(WRITE, 0, &[2; 65536]).unwrap();
            rig.write(WRITE, 32768, &[3; 65536]).unwrap();
            rig.run(IoOp::WriteZeroes(Zeroing::MayUnmap), 4096, 8192).unwrap();
            if can_fua {
                rig.write(DURABLE, 40960, &[4; 4096]).unwrap();
            }
            let expected = server.script.lock().unwrap().data.clone();
            for _ in 0..2 {
                lose(&mut rig);
                assert!(server.script.lock().unwrap().data == expected);
            }
            rig.run(IoOp::Flush, 0, 0).unwrap();
            assert!(!rig.backing.take_loss());
            // A flush in flight waits for the repeated changes.
            rig.write(WRITE, 0, &[5; 4096]).unwrap();
            server.set(|script| script.answers_left = Some(0));
            let flush = rig.start(IoOp::Flush, 0, 0, None);
            let flushes = server.count(Nbd::Flush);
            while server.count(Nbd::Flush) == flushes {
                rig.turn();
            }
            rig.wait(flush).unwrap();
            let last = server.script.lock().unwrap().seen.iter().map(|seen| seen.0).collect::<Vec<_>>();
            assert_eq!(last[last.len() - 2..], [Nbd::Write, Nbd::Flush]);
            assert!(!rig.backing.take_loss());
            rig.close();
        }
    });
}

#[test]
fn changes_that_cannot_be_repeated_are_reported_as_lost() {
    let server = Server::start(ExportInfo::new(MIB));
    let mut rig = Rig::open(RingKind::IoUring, &server.uri, Access::ReadWrite);
    rig.run(IoOp::Flush, 0, 0).unwrap();
    (0..8).for_each(|n| rig.write(WRITE, n * 8192, &[1; 4096]).unwrap());
    server.set(|script| script.sick = true);
    let connections = server.script.lock().unwrap().connections;
    cut(&mut rig, &server);
    assert_eq!(server.script.lock().unwrap().connections, connections + 1, "refusals break nothing");
    assert!(rig.backing.take_loss(), "the server refuses the repeated writes");
    server.set(|script| script.sick = false);
    cut(&mut rig, &server);
    assert!(!rig.backing.take_loss(), "once");
    rig.run(IoOp::Flush, 0, 0).unwrap();
    rig.close();

    let mut export = ExportInfo::new(MIB);
    export.can_flush = false;
    let server = Server::start(export);
    let mut rig = Rig::open(RingKind::IoUring, &server.uri, Access::ReadWrite);
    for _ in 0..33 {
        rig.write(WRITE, 0, &[1; MIB as usize]).unwrap();
    }
    cut(&mut rig, &server);
    assert!(rig.backing.take_loss(), "too many changes to be kept");
    rig.close();
}

#[test]
fn many_changes_are_flushed_without_a_request() {
    let server = Server::start(ExportInfo::new(MIB));
    let mut rig = Rig::open(RingKind::IoUring, &server.uri, Access::ReadWrite);
    for _ in 0..64 {
        rig.write(WRITE, 0, &[1; MIB as usize]).unwrap();
    }
    assert!(server.count(Nbd::Flush) > 4);
    cut(&mut rig, &server);
    assert!(!rig.backing.take_loss());
    rig.close();
}

/// The server has lost data. It fails one of two flushes, and answers the other flush first.
#[test]
fn a_flush_succeeds_only_after_the_flushes_that_were_in_flight_with_it() {
    both_kinds(|kind| {
        let server = Server::start(ExportInfo::new(MIB));
        let mut rig = Rig::open(kind, &server.uri, Access::ReadWrite);
        rig.run(IoOp::Flush, 0, 0).unwrap();
        rig.write(WRITE, 0, &[1; 4096]).unwrap();
        server.set(|script| script.flush_answers = vec![(1, true), (0, false)]);
        let flushes = [rig.start(IoOp::Flush, 0, 0, None), rig.start(IoOp::Flush, 0, 0, None)];
        while rig.done.len() < 2 {
            rig.turn();
        }
        let expected = [(flushes[0], Err(IoError::Failed)), (flushes[1], Ok(()))];
        assert_eq!(rig.done, expected, "the failure comes first");
        rig.done.clear();
        rig.close();
    });
}

/// After connecting, hob flushes by itself. A guest's flush is in flight at the same time.
#[test]
fn a_flush_without_a_request_reports_a_loss_before_a_later_flush_succeeds() {
    both_kinds(|kind| {
        let server = Server::start(ExportInfo::new(MIB));
        server.set(|script| script.flush_answers = vec![(1, true), (0, false)]);
        let mut rig = Rig::open(kind, &server.uri, Access::ReadWrite);
        rig.run(IoOp::Flush, 0, 0).unwrap();
        assert!(rig.backing.take_loss(), "the first flush has failed");
        assert_eq!(server.count(Nbd::Flush), 2);
        rig.close();
    });
}

/// The connection is lost while one of two flushes is not answered: both are sent again.
#[test]
fn a_flush_that_waits_for_another_is_sent_again_after_a_lost_connection() {
    both_kinds(|kind| {
        let server = Server::start(ExportInfo::new(MIB));
        let mut rig = Rig::open(kind, &server.uri, Access::ReadWrite);
        rig.run(IoOp::Flush, 0, 0).unwrap();
        rig.write(WRITE, 0, &[1; 4096]).unwrap();
        let before = server.count(Nbd::Flush);
        // The server answers the read and the first flush. Then it closes the connection.
        server.set(|script| (script.flush_answers, script.answers_left) = (vec![(0, true)], Some(2)));
        // The flushes are queued while the read is being sent, so they are sent together.
        let read = rig.start(IoOp::Read, 0, 4096, None);
        let flushes = [rig.start(IoOp::Flush, 0, 0, None), rig.start(IoOp::Flush, 0, 0, None)];
        for io in [read, flushes[0], flushes[1]] {
            rig.wait(io).unwrap();
        }
        rig.take(read, 0, 0);
        assert_eq!(server.count(Nbd::Flush), before + 4);
        assert!(!rig.backing.take_loss(), "the write was repeated");
        rig.close();
    });
}

#[test]
fn patience_ends() {
    both_kinds(|kind| {
        let server = Server::start(ExportInfo::new(MIB));
        let mut rig = Rig::open_impatient(kind, &server.uri);
        // A server that is silent.
        server.set(|script| script.silent = true);
        let start = Instant::now();
        assert_eq!(rig.read(0, 4096), Err(IoError::Failed));
        assert!(start.elapsed() >= impatient().wait_max, "{:?}", start.elapsed());
        server.set(|script| script.silent = false);
        assert_eq!(read_at_last(&mut rig), vec![0; 4096]);
        // A server that is gone.
        server.set(|script| (script.refuse, script.answers_left) = (true, Some(0)));
        let ids: Vec<_> = (0..10).map(|n| rig.start(IoOp::Read, n * 4096, 4096, None)).collect();
        for id in ids {
            assert_eq!(rig.wait(id), Err(IoError::Failed));
            rig.take(id, 0, 0);
        }
        let condition = rig.backing.monitor().condition();
        assert!(matches!(condition, Condition::Reconnecting { waiting: 0, .. }), "{condition:?}");
        server.set(|script| (script.refuse, script.answers_left) = (false, None));
        assert_eq!(read_at_last(&mut rig), vec![0; 4096]);
        assert_eq!(rig.backing.monitor().condition(), Condition::Connected);
        rig.close();
    });
}

/// Reads the first sector of a server that answers again. On a busy host, the server may get no
/// processor for longer than a request waits.
fn read_at_last(rig: &mut Rig) -> Vec<u8> {
    loop {
        if let Ok(data) = rig.read(0, 4096) {
            return data;
        }
    }
}

#[test]
fn the_wait_for_a_backing_is_counted_once_per_outage() {
    // A busy host may delay any of the attempts.
    let is_short = |_| second_wait_of_an_outage() < Duration::from_secs(2);
    assert!((0..5).any(is_short), "a later request waits as long as the first one");
}

/// Returns how long a request waits after another one has waited for its limit of 3 s.
fn second_wait_of_an_outage() -> Duration {
    let server = Server::start(ExportInfo::new(MIB));
    let wait_max = Duration::from_secs(3);
    let options = BackingOptions { wait_max, ..options() };
    let backing = Backing::open(&server.uri, Access::ReadWrite, &options).unwrap();
    let mut rig = Rig::of(RingKind::IoUring, backing);
    server.set(|script| (script.refuse, script.answers_left) = (true, Some(0)));
    let start = Instant::now();
    assert_eq!(rig.write(WRITE, 0, &[1; 4096]), Err(IoError::Failed));
    assert!(start.elapsed() >= wait_max);
    let second = Instant::now();
    assert_eq!(rig.run(IoOp::Flush, 0, 0), Err(IoError::Failed));
    let waited = second.elapsed();
    // The next outage has a limit of its own.
    server.set(|script| (script.refuse, script.answers_left) = (false, None));
    read_at_last(&mut rig);
    server.set(|script| (script.refuse, script.answers_left) = (true, Some(0)));
    let start = Instant::now();
    assert_eq!(rig.read(0, 4096), Err(IoError::Failed));
    assert!(start.elapsed() >= wait_max);
    rig.close();
    waited
}

/// The limit on the wait of a request counts from the beginning of the outage.
#[test]
fn a_request_without_a_limit_waits_until_it_is_given_one() {
    // A busy host may delay any of the attempts.
    let is_in_time = |_| wait_with_a_later_limit() < Duration::from_secs(4);
    assert!((0..5).any(is_in_time), "the limit counts from its change");
}

/// Returns how long a request waits that is limited to 3 s when it has waited for 2 s.
fn wait_with_a_later_limit() -> Duration {
    let server = Server::start(ExportInfo::new(MIB));
    let options = BackingOptions { wait_max: WAIT_FOREVER, ..options() };
    let backing = Backing::open(&server.uri, Access::ReadWrite, &options).unwrap();
    let mut rig = Rig::of(RingKind::IoUring, backing);
    server.set(|script| (script.refuse, script.answers_left) = (true, Some(0)));
    let start = Instant::now();
    let waiting = rig.start(IoOp::Read, 0, 4096, None);
    while start.elapsed() < Duration::from_secs(2) {
        rig.turn();
    }
    assert!(rig.done.is_empty(), "{:?}", rig.done);
    let now = rig.now();
    rig.backing.set_wait_max(now, WaitMax::AtMost(Duration::from_secs(3)));
    assert_eq!(rig.wait(waiting), Err(IoError::Failed));
    let waited = start.elapsed();
    assert!(waited >= Duration::from_secs(3), "{waited:?}");
    rig.close();
    waited
}

#[test]
fn cancelled_changes_wait_until_the_disk_continues() {
    both_kinds(|kind| {
        let server = Server::start(ExportInfo::new(MIB));
        let mut rig = Rig::open(kind, &server.uri, Access::ReadWrite);
        let connections = || server.script.lock().unwrap().connections;
        let hold_back = |rig: &mut Rig| {
            let now = rig.now();
            rig.backing.suspend(&mut rig.ring, now);
        };
        // Nothing that could change anything is under way: the connection stays.
        rig.write(WRITE, 0, &pattern(4096, 1)).unwrap();
        rig.run(IoOp::Flush, 0, 0).unwrap();
        hold_back(&mut rig);
        assert_eq!(rig.read(0, 4096), Ok(pattern(4096, 1)));
        rig.backing.resume();
        assert_eq!(connections(), 1);
        server.set(|script| script.silent = true);
        let id = rig.start(WRITE, 4096, 4096, Some(&pattern(4096, 2)));
        while server.count(Nbd::Write) == 1 {
            rig.turn();
        }
        hold_back(&mut rig);
        server.set(|script| script.silent = false);
        let begin = Instant::now();
        // Long enough for several attempts to connect.
        while begin.elapsed() < Duration::from_millis(500) {
            rig.turn();
        }
        assert_eq!(connections(), 1, "it connects again");
        assert!(rig.done.is_empty(), "{:?}", rig.done);
        rig.backing.resume();
        rig.wait(id).unwrap();
        assert_eq!(connections(), 2);
        assert_eq!(rig.read(4096, 4096), Ok(pattern(4096, 2)));
        rig.close();
    });
}

/// Breaks the connection of an idle disk, and waits until the next server has read the repeated
/// changes. That server answers nothing.
fn repeat_to_a_silent_server(rig: &mut Rig, server: &Server) {
    server.set(|script| (script.refuse, script.answers_left) = (true, Some(0)));
    let read = rig.start(IoOp::Read, 0, 4096, None);
    while !matches!(rig.backing.monitor().condition(), Condition::Reconnecting { .. }) {
        rig.turn();
    }
    let now = rig.now();
    rig.backing.set_wait_max(now, WaitMax::Expired);
    assert_eq!(rig.wait(read), Err(IoError::Failed));
    rig.take(read, 0, 0);
    let writes = server.count(Nbd::Write);
    server.set(|script| (script.refuse, script.silent) = (false, true));
    while server.count(Nbd::Write) == writes {
        rig.turn();
    }
}

/// Repeated changes could overwrite data of the disk's next owner.
#[test]
fn repeated_changes_wait_until_the_disk_continues() {
    both_kinds(|kind| {
        let server = Server::start(ExportInfo::new(MIB));
        let mut rig = Rig::open(kind, &server.uri, Access::ReadWrite);
        rig.run(IoOp::Flush, 0, 0).unwrap();
        rig.write(WRITE, 0, &pattern(4096, 1)).unwrap();
        assert!(!rig.backing.may_change_later());
        repeat_to_a_silent_server(&mut rig, &server);
        assert!(rig.backing.may_change_later(), "the server may still execute the repeated write");
        let now = rig.now();
        rig.backing.suspend(&mut rig.ring, now);
        let condition = rig.backing.monitor().condition();
        assert!(matches!(condition, Condition::Reconnecting { .. }), "{condition:?}");
        server.set(|script| (script.silent, script.data) = (false, vec![0; MIB as usize]));
        let connections = server.script.lock().unwrap().connections;
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(300) {
            rig.turn();
        }
        assert_eq!(server.script.lock().unwrap().connections, connections);
        assert!(server.script.lock().unwrap().data[..4096].iter().all(|byte| *byte == 0));
        rig.backing.resume();
        assert_eq!(rig.read(0, 4096), Ok(pattern(4096, 1)));
        assert!(!rig.backing.take_loss());
        // A connection with repeated changes in flight is not closed like an idle one.
        repeat_to_a_silent_server(&mut rig, &server);
        rig.turn();
        rig.close();
        let has_ended = || {
            let script = server.script.lock().unwrap();
            script.ended >= script.connections
        };
        while !has_ended() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(server.script.lock().unwrap().disconnects, 0);
    });
}

#[test]
fn waiting_requests_of_a_lost_disk_fail_at_once() {
    both_kinds(|kind| {
        for connected in [true, false] {
            let server = Server::start(ExportInfo::new(MIB));
            let mut rig = Rig::open(kind, &server.uri, Access::ReadWrite);
            rig.run(IoOp::Flush, 0, 0).unwrap();
            server.set(|script| {
                script.silent = connected;
                script.refuse = !connected;
                script.answers_left = Some(0);
            });
            let id = rig.start(WRITE, 0, 4096, Some(&pattern(4096, 1)));
            while server.count(Nbd::Write) == 0 {
                rig.turn();
            }
            let begin = Instant::now();
            let now = rig.now();
            rig.backing.revoke(&mut rig.ring, now);
            assert_eq!(rig.wait(id), Err(IoError::ShuttingDown));
            assert!(begin.elapsed() < options().wait_max / 2, "{:?}", begin.elapsed());
            let writes = server.count(Nbd::Write);
            server.set(|script| (script.silent, script.refuse, script.answers_left) = (false, false, None));
            rig.backing.resume();
            (0..5).for_each(|_| rig.turn());
            assert_eq!(rig.write(WRITE, 0, &pattern(4096, 2)), Err(IoError::ShuttingDown));
            // An attempt to connect that was in progress may still succeed.
            let connections_max = if connected { 1 } else { 2 };
            assert!(server.script.lock().unwrap().connections <= connections_max, "it connects again");
            assert_eq!(server.count(Nbd::Write), writes);
            assert!(server.script.lock().unwrap().data[..4096].iter().all(|byte| *byte == 0));
            rig.close();
        }
    });
}

#[test]
fn an_exclusive_writer_waits_only_while_it_may_write() {
    let server = Server::start(ExportInfo::new(MIB));
    let patient = BackingOptions { wait_max: Duration::from_secs(60), ..options() };
    let backing = Backing::open(&server.uri, Access::ReadWrite, &patient).unwrap();
    server.set(|script| script.silent = true);
    let may_go_on = || server.count(Nbd::Write) == 0;
    let mut alone = OfflineWriter::new(backing, None, &may_go_on).unwrap();
    let begin = Instant::now();
    alone.write(0, &pattern(4096, 1)).unwrap();
    assert_eq!(alone.flush(), Err(IoError::ShuttingDown));
    assert_eq!(alone.write(0, &pattern(4096, 2)), Err(IoError::ShuttingDown));
    alone.close();
    assert!(begin.elapsed() < patient.wait_max / 2, "{:?}", begin.elapsed());
    // The flush is that of the opening.
    assert_eq!((server.count(Nbd::Write), server.count(Nbd::Flush)), (1, 1));
    assert_eq!(server.script.lock().unwrap().connections, 1);
}

#[test]
fn another_disk_is_refused() {
    let server = Server::start(ExportInfo::new(MIB));
    let mut rig = Rig::open(RingKind::IoUring, &server.uri, Access::ReadWrite);
    assert_eq!(rig.read(0, 4096), Ok(vec![0; 4096]));
    server.set(|script| {
        script.answers_left = Some(0);
        script.export.size_bytes = MIB / 2;
    });
    assert_eq!(rig.read(0, 4096), Err(IoError::Failed));
    server.set(|script| script.answers_left = None);
    assert_eq!(rig.read(0, 4096), Err(IoError::Failed));
    let condition = rig.backing.monitor().condition();
    assert!(
        matches!(&condition, Condition::Failed { error, .. } if error.contains("smaller disk")),
        "{condition:?}"
    );
    rig.close();
}

#[test]
fn an_export_that_comes_back_larger_has_grown() {
    let server = Server::start(ExportInfo::new(MIB));
    let mut rig = Rig::open(RingKind::IoUring, &server.uri, Access::ReadWrite);
    let (gauge, before) = (rig.backing.size_probe().unwrap(), rig.backing.info().clone());
    rig.write(WRITE, 0, &pattern(4096, 1)).unwrap();
    rig.run(IoOp::Flush, 0, 0).unwrap();
    server.set(|script| {
        script.answers_left = Some(0);
        script.export.size_bytes = 2 * MIB;
    });
    assert_eq!(rig.read(0, 4096).unwrap(), pattern(4096, 1));
    assert_eq!(gauge.size_bytes().unwrap(), 2 * MIB);
    assert_eq!(rig.backing.info().size_bytes, MIB, "nobody said that the disk is larger");
    rig.backing.grow(2 * MIB);
    let after = rig.backing.info().clone();
    assert!(after.identity_text.ends_with(", 2097152 bytes"), "{}", after.identity_text);
    assert_eq!(
        (after.identity_at(MIB), before.identity_at(2 * MIB)),
        (Some(before.identity), Some(after.identity))
    );
    // Now one of the first size is another disk.
    server.set(|script| {
        script.answers_left = Some(0);
        script.export.size_bytes = MIB;
    });
    assert_eq!(rig.read(0, 4096), Err(IoError::Failed));
    assert!(!gauge.is_file() && gauge.grow(4 * MIB).is_err());
    rig.close();
}

#[test]
fn garbage_costs_the_connection_not_the_data() {
    let server = Server::start(ExportInfo::new(MIB));
    let mut rig = Rig::open(RingKind::IoUring, &server.uri, Access::ReadWrite);
    rig.write(WRITE, 0, &pattern(8192, 1)).unwrap();
    rig.run(IoOp::Flush, 0, 0).unwrap();
    let wrong_cookie = hob_nbd::server::reply::simple_ok_header(0x0001_0000_0003);
    for garbage in [vec![0xFF; 4096], vec![0; 100], wrong_cookie.to_vec()] {
        let before = server.script.lock().unwrap().connections;
        server.set(|script| script.garbage = Some(garbage));
        assert_eq!(rig.read(0, 8192).unwrap(), pattern(8192, 1));
        assert_eq!(server.script.lock().unwrap().connections, before + 1);
    }
    rig.close();
}

#[test]
fn closing_ends_waiting_requests() {
    both_kinds(|kind| {
        for refuse in [false, true] {
            let server = Server::start(ExportInfo::new(MIB));
            let mut rig = Rig::open(kind, &server.uri, Access::ReadWrite);
            server.set(|script| {
                script.silent = !refuse;
                script.refuse = refuse;
                script.answers_left = Some(0);
            });
            let ids: Vec<_> = (0..5).map(|n| rig.start(IoOp::Read, n * 4096, 4096, None)).collect();
            (0..5).for_each(|_| rig.turn());
            rig.close();
            for id in ids {
                assert_eq!(rig.wait(id), Err(IoError::ShuttingDown));
                rig.take(id, 0, 0);
            }
            assert_eq!(rig.read(0, 4096), Err(IoError::ShuttingDown));
        }
    });
}

#[test]
fn unfit_exports_are_refused_with_advice() {
    let open = |uri: &str, access| Backing::open(uri, access, &options());
    assert!(matches!(open("nbds://host/disk", Access::ReadWrite), Err(OpenError::Spec { .. })));
    let missing = open("nbd+unix:///disk?socket=/nonexistent/socket", Access::ReadWrite);
    assert!(matches!(missing, Err(OpenError::Connect { .. })));
    let server = Server::start(ExportInfo { read_only: true, ..ExportInfo::new(MIB) });
    assert!(matches!(open(&server.uri, Access::ReadWrite), Err(OpenError::Unfit { .. })));
    let mut rig = Rig::open(RingKind::IoUring, &server.uri, Access::ReadOnly);
    assert_eq!(rig.write(WRITE, 0, &[0; 512]), Err(IoError::ReadOnly));
    rig.close();
    let wrong = server.uri.replace("/disk", "/disc");
    let error = open(&wrong, Access::ReadOnly).unwrap_err();
    assert!(matches!(error, OpenError::Connect { .. }) && error.to_string().contains("disc"), "{error}");
    let server = Server::start(ExportInfo::new(1000));
    assert!(matches!(open(&server.uri, Access::ReadWrite), Err(OpenError::Unfit { .. })));
    let server = Server::start(ExportInfo {
        block_size_min: 8192,
        block_size_preferred: 8192,
        ..ExportInfo::new(MIB)
    });
    assert!(matches!(open(&server.uri, Access::ReadWrite), Err(OpenError::Unfit { .. })));
}

#[test]
fn exports_are_known_again_by_address_name_and_size() {
    let server = Server::start(ExportInfo::new(MIB));
    let info = |uri: &str| Backing::open(uri, Access::ReadWrite, &options()).unwrap().info().clone();
    let first = info(&server.uri);
    assert!(
        first.identity_text.starts_with("NBD export nbd+unix:///disk?socket="),
        "{}",
        first.identity_text
    );
    assert!(first.identity_text.ends_with(", 1048576 bytes"), "{}", first.identity_text);
    assert_eq!((info(&server.uri).identity, first.changed), (first.identity, None));
    assert_ne!(info(&Server::start(ExportInfo::new(MIB)).uri).identity, first.identity);
    server.set(|script| script.export.size_bytes = 2 * MIB);
    assert_ne!(info(&server.uri).identity, first.identity);
}

#[test]
fn samples_are_read_over_the_connection_that_is_attached_later() {
    for change in [
        (|_| {}) as fn(&mut ExportInfo),
        |export| export.block_size_max = 4096,
        |export| export.block_size_min = 512,
    ] {
        let mut export = ExportInfo::new(MIB);
        change(&mut export);
        let server = Server::start(export);
        let content = pattern(MIB as usize, 6);
        server.set(|script| script.data.copy_from_slice(&content));
        let mut backing = Backing::open(&server.uri, Access::ReadWrite, &options()).unwrap();
        let mut bytes = vec![0; 300 << 10];
        for offset in [0, 4096, MIB - (300 << 10)] {
            backing.read_before_attach(offset, &mut bytes).unwrap();
            assert!(bytes == content[offset as usize..][..300 << 10]);
        }
        assert_eq!(backing.read_before_attach(MIB, &mut bytes[..4096]), Err(IoError::Invalid));
        if backing.info().block_bytes_min > 1 {
            assert_eq!(backing.read_before_attach(1, &mut bytes[..4096]), Err(IoError::Invalid));
        }
        let mut rig = Rig::of(RingKind::IoUring, backing);
        assert!(rig.read(8192, 4096).unwrap() == content[8192..12288]);
        assert_eq!(server.script.lock().unwrap().connections, 1);
        rig.close();
    }
}

#[test]
fn a_sample_survives_one_broken_connection_and_no_silence() {
    let server = Server::start(ExportInfo::new(MIB));
    let content = pattern(MIB as usize, 7);
    server.set(|script| script.data.copy_from_slice(&content));
    let patience = hob_storage::backing::BackingOptions { connect_max: Duration::from_secs(10), ..options() };
    let mut backing = Backing::open(&server.uri, Access::ReadWrite, &patience).unwrap();
    let mut bytes = vec![0; 4096];
    let wrong_cookie = hob_nbd::server::reply::simple_ok_header(0x0001_0000_0003);
    let faults: [&dyn Fn(); 3] = [
        &|| server.set(|script| script.answers_left = Some(0)),
        &|| server.set(|script| script.garbage = Some(vec![0xFF; 4096])),
        &|| server.set(|script| script.garbage = Some(wrong_cookie.to_vec())),
    ];
    for (number, fault) in faults.iter().enumerate() {
        fault();
        backing.read_before_attach(4096, &mut bytes).unwrap();
        assert!(bytes == content[4096..8192]);
        assert_eq!(server.script.lock().unwrap().connections, 2 + number);
    }
    server.set(|script| script.silent = true);
    assert_eq!(backing.read_before_attach(0, &mut bytes), Err(IoError::Failed));
    // A later attach replaces the connection on which the read failed.
    server.set(|script| script.silent = false);
    let mut rig = Rig::of(RingKind::IoUring, backing);
    assert!(rig.read(0, 8192).unwrap() == content[..8192]);
    rig.close();
    // A server whose export has another size is another server, and gets no second request.
    let mut backing = Backing::open(&server.uri, Access::ReadWrite, &patience).unwrap();
    server.set(|script| (script.answers_left, script.export.size_bytes) = (Some(0), 2 * MIB));
    assert_eq!(backing.read_before_attach(0, &mut bytes), Err(IoError::Failed));
}
