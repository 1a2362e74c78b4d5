//! NBD servers that shut down while requests are in flight (nbdkit must be installed).

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::process::{await_socket, spawn};
use common::server::Server;
use common::{Rig, both_kinds, options, pattern};
use hob_engine::command::Access;
use hob_engine::io::{Durability, IoOp};
use hob_nbd::ExportInfo;
use hob_storage::backing::{Backing, BackingOptions};
use hob_storage::ring::RingKind;

const DURABLE: IoOp = IoOp::Write(Durability::Durable);
const MIB: u64 = 1 << 20;

#[test]
fn a_server_that_shuts_down_is_disconnected_from_and_waited_for() {
    both_kinds(|kind| {
        let server = Server::start(ExportInfo::new(4 * MIB));
        let mut rig = Rig::open(kind, &server.uri, Access::ReadWrite);
        let data = pattern(4 << 20, 1);
        rig.write(DURABLE, 0, &data).unwrap();
        for round in 1..=5 {
            server.set(|script| script.shuts_down = true);
            let reads: Vec<_> = (0..64u64).map(|n| rig.start(IoOp::Read, n * 65536, 65536, None)).collect();
            let write = rig.start(DURABLE, 0, 4096, Some(&data[..4096]));
            for (n, id) in reads.into_iter().enumerate() {
                rig.wait(id).unwrap();
                assert!(rig.take(id, 0, 65536) == data[n * 65536..][..65536]);
            }
            rig.wait(write).unwrap();
            rig.take(write, 0, 0);
            // On a busy host, hob's question to an idle server is refused too.
            assert!(server.script.lock().unwrap().disconnects >= round);
        }
        let script = server.script.lock().unwrap();
        assert_eq!(script.connections, script.disconnects + 1);
        drop(script);
        rig.run(IoOp::Flush, 0, 0).unwrap();
        rig.close();
    });
}

/// Until the next server has the refused change, a kill of hob would lose this change.
#[test]
fn a_repeated_change_that_a_server_refuses_at_its_shutdown_stays_exposed() {
    both_kinds(|kind| {
        let server = Server::start(ExportInfo::new(MIB));
        let mut rig = Rig::open(kind, &server.uri, Access::ReadWrite);
        rig.run(IoOp::Flush, 0, 0).unwrap();
        let volatile = IoOp::Write(Durability::Volatile);
        (0..2).for_each(|n| rig.write(volatile, n * 8192, &pattern(4096, 1)).unwrap());
        assert_eq!(rig.backing.poll_exposure(), None);
        server.set(|script| (script.answers_left, script.shutdown_replies) = (Some(0), 1));
        let read = rig.start(IoOp::Read, 0, 4096, None);
        let mut reports = Vec::new();
        while rig.done.is_empty() {
            rig.turn();
            reports.extend(rig.backing.poll_exposure());
        }
        rig.wait(read).unwrap();
        assert_eq!(rig.take(read, 0, 4096), pattern(4096, 1));
        assert_eq!(reports, [true, false]);
        assert_eq!(server.script.lock().unwrap().connections, 3);
        assert!(!rig.backing.take_loss());
        rig.close();
    });
}

#[test]
fn nbdkit_can_exit_while_requests_wait_and_they_are_answered_by_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let (image, socket) = (dir.path().join("image"), dir.path().join("socket"));
    std::fs::write(&image, vec![0; 8 << 20]).unwrap();
    let start = || {
        let _ = std::fs::remove_file(&socket);
        let (image, socket) = (image.to_str().unwrap(), socket.to_str().unwrap());
        let delay = ["--filter=delay", "file", image, "delay-write=20ms"];
        let server = spawn("nbdkit", &[&["-f", "-U", socket][..], &delay].concat());
        await_socket(Path::new(socket));
        server
    };
    let mut server = start();
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let mut rig = Rig::open(RingKind::IoUring, &uri, Access::ReadWrite);
    for round in 0..3u32 {
        let data = pattern(64 << 10, round);
        let ids: Vec<_> = (0..16u64).map(|n| rig.start(DURABLE, n << 16, 64 << 10, Some(&data))).collect();
        (0..5).for_each(|_| rig.turn());
        let pid = rustix::process::Pid::from_child(&server.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        // The server exits only if its client disconnects.
        let late: Vec<_> = (16..32u64).map(|n| rig.start(DURABLE, n << 16, 64 << 10, Some(&data))).collect();
        while server.0.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "nbdkit does not exit");
            rig.turn();
        }
        server = start();
        for id in ids.into_iter().chain(late) {
            rig.wait(id).unwrap();
            rig.take(id, 0, 0);
        }
        rig.run(IoOp::Flush, 0, 0).unwrap();
        assert!(rig.read(31 << 16, 64 << 10).unwrap() == data);
    }
    rig.close();
}

/// The old server carries out its last write after seconds. If hob sent this write to the next
/// server too, the old server could overwrite newer data.
#[test]
fn a_write_in_flight_when_a_server_shuts_down_is_not_sent_to_the_next_server() {
    let dir = tempfile::tempdir().unwrap();
    let (images, socket) = (["old", "new"].map(|name| dir.path().join(name)), dir.path().join("socket"));
    // The commands of nbdkit's plugin `eval` end even if nbdkit is told to stop.
    let start = |image: &Path, seconds: u32| {
        let _ = std::fs::remove_file(&socket);
        std::fs::write(image, vec![0; 1 << 20]).unwrap();
        let (image, socket) = (image.to_str().unwrap(), socket.to_str().unwrap());
        let read = format!("pread=dd status=none if={image} iflag=skip_bytes,count_bytes skip=$4 count=$3");
        let write = format!(
            "pwrite=touch {image}.begun; sleep {seconds}; \
             dd status=none of={image} conv=notrunc oflag=seek_bytes seek=$4"
        );
        let rest = ["get_size=echo 1048576", "can_write=exit 0", "can_flush=exit 0", "flush=sync"];
        let server = spawn("nbdkit", &[&["-f", "-U", socket, "eval", &read, &write][..], &rest].concat());
        await_socket(Path::new(socket));
        server
    };
    let old = start(&images[0], 3);
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let options = BackingOptions { wait_max: Duration::from_secs(60), ..options() };
    let backing = Backing::open(&uri, Access::ReadWrite, &options).unwrap();
    let mut rig = Rig::of(RingKind::IoUring, backing);
    let data = pattern(4096, 1);
    let write = rig.start(DURABLE, 0, 4096, Some(&data));
    let deadline = Instant::now() + Duration::from_secs(60);
    while !dir.path().join("old.begun").exists() {
        assert!(Instant::now() < deadline, "the server gets no write");
        rig.turn();
    }
    let pid = rustix::process::Pid::from_child(&old.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let _new = start(&images[1], 0);
    // The old server refuses this read, so it is answered by the new one.
    let read = rig.start(IoOp::Read, 8192, 4096, None);
    rig.wait(read).unwrap();
    rig.take(read, 0, 4096);
    rig.wait(write).unwrap();
    rig.take(write, 0, 0);
    let written = |image: &Path| std::fs::read(image).unwrap()[..4096] == data;
    assert_eq!(images.map(|image| written(&image)), [true, false]);
    rig.close();
}
