//! vhost-user-blk without a guest: malicious drivers and VMMs, and drivers that lose their server.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use conformance::data::{Noise, noise_file};
use conformance::nbd_client::{CMD_WRITE, request};
use conformance::scratch::wait_for;
use conformance::vhost_driver::{
    AVAILABLE, DATA, DATA_BYTES, DESCRIPTORS, Driver, HEADERS, Kind, QUEUE, SLOTS, STATUS, Sealing, USED,
};
use conformance::{Hob, MIB, Scratch, Serve};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const SIZE: u64 = 16 * MIB;
const INDIRECT: u16 = 4;
const PATIENCE: Duration = Duration::from_secs(60);

fn serve(scratch: &Scratch) -> Serve {
    noise_file(&scratch.path("disk.img"), SIZE, 5);
    Serve::disk(&scratch.text("disk.img"))
        .cached(&scratch.path("pool"), "32M", "4K")
        .arg("--vhost-user", &scratch.text("vm.sock"))
}

fn connect(scratch: &Scratch) -> Driver {
    Driver::connect(&scratch.path("vm.sock")).expect("the server takes a machine")
}

/// Checks that the server runs, and serves all other clients.
#[track_caller]
fn is_unharmed(hob: &mut Hob, scratch: &Scratch, what: &str) {
    assert!(hob.process.poll().is_none(), "{what}: hob ended: {}", hob.process.stderr());
    let mut driver = connect(scratch);
    assert_eq!(driver.run(Kind::Read, 4096, 4096), Some(0), "{what}: {}", hob.process.stderr());
    let disk = scratch.read("disk.img");
    assert!(driver.data(0, 4096) == disk[4096..8192], "{what}: something else was read");
}

#[test]
fn data_written_through_one_front_end_is_read_through_the_other() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).start(&scratch);
    let mut driver = connect(&scratch);
    assert_eq!(driver.size_bytes().expect("a size"), SIZE);
    let mut nbd = hob.connect();
    for round in 0..3u64 {
        let (mine, yours) = (Noise::new(round).bytes(8192), Noise::new(!round).bytes(4096));
        driver.set_data(0, &mine);
        assert_eq!(driver.run(Kind::Write, 512 + round * MIB, 8192), Some(0));
        assert!(nbd.read(512 + round * MIB, 8192).expect("NBD reads") == mine);
        nbd.write(round * MIB, &yours).expect("NBD writes");
        assert_eq!(driver.run(Kind::Read, round * MIB, 4096), Some(0));
        assert!(driver.data(0, 4096) == yours, "round {round}");
        assert_eq!(driver.run(Kind::Flush, 0, 0), Some(0));
    }
    hob.stop();
}

/// Description, and the function that runs the case.
type Case = (&'static str, fn(&mut Driver));

/// Each case breaks its queue or is refused. The disk, other VMs and the server continue.
#[test]
fn malformed_chains_and_rings_affect_no_other_client() {
    let scratch = Scratch::new();
    let mut hob = serve(&scratch).start(&scratch);
    let cases: &[Case] = &[
        ("a loop", |d| {
            d.descriptor(DESCRIPTORS, 0, HEADERS, 16, 1, 1);
            d.descriptor(DESCRIPTORS, 1, DATA, 4096, 3, 0);
            d.offer(0);
        }),
        ("no status", |d| {
            d.descriptor(DESCRIPTORS, 0, HEADERS, 16, 0, 0);
            d.offer(0);
        }),
        ("addresses out of range", |d| {
            d.descriptor(DESCRIPTORS, 0, HEADERS, 16, 1, 1);
            d.descriptor(DESCRIPTORS, 1, u64::MAX - 4095, 4096, 3, 2);
            d.descriptor(DESCRIPTORS, 2, STATUS, 1, 2, 0);
            d.offer(0);
        }),
        ("a status out of range", |d| {
            d.descriptor(DESCRIPTORS, 0, HEADERS, 16, 1, 1);
            d.descriptor(DESCRIPTORS, 1, 1 << 40, 1, 2, 0);
            d.offer(0);
        }),
        ("huge lengths", |d| {
            d.descriptor(DESCRIPTORS, 0, HEADERS, 16, 1, 1);
            d.descriptor(DESCRIPTORS, 1, DATA, u32::MAX, 3, 2);
            d.descriptor(DESCRIPTORS, 2, STATUS, 1, 2, 0);
            d.offer(0);
        }),
        ("a table inside itself", |d| {
            d.descriptor(DESCRIPTORS, 0, DESCRIPTORS, 16, INDIRECT, 0);
            d.offer(0);
        }),
        ("a head outside the table", |d| d.offer(40_000)),
        ("an index far ahead", |d| (0..2000).for_each(|_| d.offer(0))),
        ("kicks without anything", |d| (0..1000).for_each(|_| d.kick_anyway())),
    ];
    for (what, act) in cases {
        let mut driver = connect(&scratch);
        assert_eq!(driver.run(Kind::Read, 0, 4096), Some(0), "{what}");
        act(&mut driver);
        driver.kick();
        driver.kick_anyway();
        std::thread::sleep(Duration::from_millis(50));
        drop(driver);
        is_unharmed(&mut hob, &scratch, what);
    }
    hob.stop();
}

/// Endless chains, each of which is answered at once.
#[test]
fn a_driver_with_endless_chains_stops_no_other_client() {
    let scratch = Scratch::new();
    let mut hob = serve(&scratch).start(&scratch);
    let driver = connect(&scratch);
    driver.descriptor(DESCRIPTORS, 0, STATUS, 1, 2, 0);
    driver.kick_anyway();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let used: u16 =
                    driver.memory().load(GuestAddress(USED + 2), Ordering::Acquire).expect("inside");
                let more = used.wrapping_add(QUEUE);
                driver.memory().store(more, GuestAddress(AVAILABLE + 2), Ordering::Release).expect("inside");
            }
        });
        let mut nbd = hob.connect();
        let read = (0..100u64).map(|at| nbd.read(at * 4096, 4096)).collect::<Result<Vec<_>, _>>();
        over.store(true, Ordering::Relaxed);
        let read = read.unwrap_or_else(|error| panic!("another client: {error}")).concat();
        let disk = scratch.read("disk.img");
        assert!(read == disk[..read.len()], "something else was read");
    });
    drop(driver);
    is_unharmed(&mut hob, &scratch, "chains without end");
    hob.stop();
}

/// The driver has notified the server of the chain, and does not notify it again when there is
/// space.
#[test]
fn a_chain_that_waits_for_room_is_carried_out_when_there_is_some() {
    assert!((0..5).any(|_| waits_for_room()), "this test was always too late with its data");
}

/// Returns false if the host was so busy that hob has disconnected clients that keep others
/// waiting.
fn waits_for_room() -> bool {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), 40 * MIB, 5);
    let hob =
        Serve::disk(&scratch.text("disk.img")).arg("--vhost-user", &scratch.text("vm.sock")).start(&scratch);
    let mut driver = connect(&scratch);
    assert_eq!(driver.run(Kind::Read, 0, 4096), Some(0));
    // Two clients take most of the disk's share, 40 MiB, and keep it. Some of the share must remain
    // after large requests, so the VM's request waits.
    let mut clients = [(hob.connect(), 32 * MIB as u32), (hob.connect(), 5 * MIB as u32)];
    let start = Instant::now();
    for (client, len) in &mut clients {
        client.raw().write_all(&request(0, CMD_WRITE, 1, 0, *len)).expect("a header is taken");
    }
    // Both requests are processed before later ones.
    let mut witness = hob.connect();
    witness.read(0, 4096).expect("small ones are served");
    driver.submit(0, Kind::Write, 36 * MIB, 2 * MIB as u32);
    driver.kick();
    let has_room = driver.wait(Duration::from_millis(300));
    let is_late = || start.elapsed() >= Duration::from_secs(4);
    assert!(!has_room || is_late(), "there was room; this shows nothing");
    for (client, len) in &mut clients {
        let sent = client.raw().write_all(&vec![7; *len as usize]);
        if let Err(error) = sent.and_then(|()| client.receive().map(drop)) {
            assert!(is_late(), "{error}");
            return false;
        }
    }
    assert!(driver.reap().is_some() || driver.wait(PATIENCE), "the machine's request was forgotten");
    hob.stop();
    !has_room
}

/// When the server can notify a driver again, it also notifies the driver of earlier replies,
/// because the previous notification may have been lost.
#[test]
fn a_driver_is_notified_of_replies_during_its_disconnection() {
    let scratch = Scratch::new();
    let serve = serve(&scratch);
    let mut hob = serve.start(&scratch);
    let mut driver = connect(&scratch);
    let unwatched = EventFd::new(EFD_NONBLOCK).expect("an eventfd");
    driver.be_told_by(Some(&unwatched)).expect("the server agrees");
    // The server does not acknowledge the message. It signals a new eventfd when it has changed to it.
    wait_for("the change to the other eventfd", || unwatched.read().is_ok());
    while driver.is_told(Duration::from_millis(50)) {}
    driver.submit(0, Kind::Read, 0, 4096);
    driver.kick();
    wait_for("an answer", || driver.reap().is_some());
    assert!(!driver.is_told(Duration::ZERO), "the other eventfd got the signal");
    driver.be_told_by(None).expect("the server agrees");
    assert!(driver.is_told(PATIENCE), "no signal for the requests that were answered meanwhile");
    // The same if the server ends after the reply and before the notification.
    hob.kill();
    hob = serve.start(&scratch);
    driver.reconnect(&scratch.path("vm.sock")).expect("the server takes it again");
    assert!(driver.is_told(PATIENCE), "no signal for the requests that the former daemon answered");
    drop(driver);
    hob.stop();
}

#[test]
fn invalid_messages_end_only_their_own_connection() {
    let scratch = Scratch::new();
    let mut hob = serve(&scratch).start(&scratch);
    let mut noise = Noise::new(11);
    for round in 0..50 {
        let mut socket = UnixStream::connect(scratch.path("vm.sock")).expect("somebody listens");
        let mut bytes = noise.bytes(16 + round * 40);
        if round % 2 == 0 {
            // A plausible header: a known message, version 1, a length.
            let (code, len) = (noise.below(44) as u32, (round * 40) as u32);
            bytes[..4].copy_from_slice(&code.to_le_bytes());
            bytes[4..8].copy_from_slice(&1u32.to_le_bytes());
            bytes[8..12].copy_from_slice(&len.to_le_bytes());
        }
        let _ = socket.write_all(&bytes);
    }
    is_unharmed(&mut hob, &scratch, "nonsense");
    hob.stop();
}

#[test]
fn truncated_guest_memory_does_not_crash_the_server() {
    let scratch = Scratch::new();
    let mut hob = serve(&scratch).start(&scratch);
    let mut driver = connect(&scratch);
    assert_eq!(driver.run(Kind::Read, 0, 4096), Some(0));
    let cut = driver.cut_memory(0);
    assert!(cut.is_err(), "the memory's file was cut off");
    assert_eq!(driver.run(Kind::Read, 0, 4096), Some(0));
    drop(driver);
    // Memory that cannot be sealed can be truncated. The test does not access the memory after
    // that.
    let driver = Driver::prepared(&scratch.path("vm.sock"), Sealing::Impossible).expect("an answer");
    let mut driver = driver.start().expect("the queue starts");
    assert_eq!(driver.run(Kind::Read, 0, 4096), Some(0));
    driver.submit(1, Kind::Write, 0, 4096);
    driver.cut_memory(0).expect("it can be cut off");
    driver.kick_anyway();
    std::thread::sleep(Duration::from_millis(300));
    drop(driver);
    is_unharmed(&mut hob, &scratch, "memory cut off");
    hob.stop();
}

#[test]
fn a_second_vhost_user_client_waits_for_the_first() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).start(&scratch);
    let mut first = connect(&scratch);
    let path = scratch.path("vm.sock");
    let second = std::thread::spawn(move || connect_and_read(&path));
    std::thread::sleep(Duration::from_millis(300));
    assert!(!second.is_finished(), "two machines at once");
    assert_eq!(first.run(Kind::Read, 0, 4096), Some(0));
    drop(first);
    assert_eq!(second.join().expect("the second one ends"), Some(0));
    hob.stop();
}

fn connect_and_read(path: &std::path::Path) -> Option<u8> {
    Driver::connect(path).expect("the server takes a machine").run(Kind::Read, 0, 4096)
}

/// The server is killed repeatedly with requests in all slots: each request is answered once, and
/// written data is on the disk.
#[test]
fn requests_in_flight_survive_the_end_of_the_server() {
    let scratch = Scratch::new();
    let serve = serve(&scratch);
    let mut hob = serve.start(&scratch);
    let mut driver = connect(&scratch);
    let mut noise = Noise::new(3);
    let mut expected = scratch.read("disk.img");
    for round in 0..24 {
        let mut answered = vec![false; usize::from(SLOTS)];
        for slot in 0..SLOTS {
            let data = noise.bytes(DATA_BYTES as usize);
            let at = u64::from(slot) * 2 * DATA_BYTES;
            if slot % 2 == 0 {
                expected[at as usize..at as usize + data.len()].copy_from_slice(&data);
            }
            driver.set_data(slot, &data);
            // Reads of unchanged data end before writes that began earlier.
            match slot % 2 {
                0 => driver.submit(slot, Kind::Write, at, DATA_BYTES as u32),
                _ => driver.submit(slot, Kind::Read, SIZE - 4096, 4096),
            }
        }
        driver.kick();
        // Some requests have ended by then.
        std::thread::sleep(Duration::from_micros(150 * round));
        match round % 2 {
            0 => hob.kill(),
            _ => drop(hob.stop()),
        }
        hob = serve.start(&scratch);
        driver.reconnect(&scratch.path("vm.sock")).expect("the server takes it again");
        while answered.contains(&false) {
            while let Some((slot, status)) = driver.reap() {
                assert_eq!(status, 0, "round {round}, slot {slot}");
                let before = std::mem::replace(&mut answered[usize::from(slot)], true);
                assert!(!before, "round {round}: slot {slot} was answered twice");
            }
            let done = !answered.contains(&false) || driver.wait(Duration::from_secs(60));
            assert!(done, "round {round}: {} without an answer", answered.iter().filter(|a| !**a).count());
        }
    }
    drop(driver);
    hob.stop();
    let disk = scratch.read("disk.img");
    assert!(disk == expected, "the backing holds something else");
}

/// In-flight memory for which the system has no page: huge pages without a reservation.
#[test]
fn missing_in_flight_memory_affects_no_other_client() {
    use rustix::fs::{MemfdFlags, SealFlags};
    let scratch = Scratch::new();
    let mut hob = serve(&scratch).start(&scratch);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let Ok(file) = rustix::fs::memfd_create("inflight", flags) else {
        return eprintln!("skipped: this kernel has no huge pages");
    };
    let file = File::from(file);
    file.set_len(2 * MIB).expect("huge pages that are not there yet");
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).expect("it can be sealed");
    let mut driver = Driver::prepared(&scratch.path("vm.sock"), Sealing::Possible).expect("an answer");
    let (inflight, _) = driver.inflight.take().expect("the server has such memory");
    driver.inflight = Some((VhostUserInflight { mmap_size: 2 * MIB, ..inflight }, file));
    // The server may serve the queue or not.
    let _ = driver.start().map(|mut driver| driver.run(Kind::Flush, 0, 0));
    is_unharmed(&mut hob, &scratch, "memory that is not there");
    hob.stop();
}

#[test]
fn features_that_were_not_offered_are_refused() {
    let scratch = Scratch::new();
    let mut hob = serve(&scratch).start(&scratch);
    let mut driver = Driver::prepared(&scratch.path("vm.sock"), Sealing::Possible).expect("an answer");
    use vhost::VhostBackend;
    // Packed rings and all other features.
    let _ = driver.frontend().set_features(u64::MAX);
    assert!(driver.frontend().get_queue_num().is_err(), "the connection goes on");
    drop(driver);
    is_unharmed(&mut hob, &scratch, "features");
    hob.stop();
}
