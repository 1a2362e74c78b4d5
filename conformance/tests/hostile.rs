//! Clients that break the protocol's rules or send very many requests. Each receives the protocol's
//! error or is disconnected, and a witness client on another connection is not affected.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use conformance::data::{assert_same, noise_file};
use conformance::nbd_client::{
    Address, CMD_BLOCK_STATUS, CMD_DISC, CMD_READ, CMD_TRIM, CMD_WRITE, Client, EINVAL, ENOSPC, option,
    option_reply, request,
};
use conformance::process::resident_kib;
use conformance::{Hob, MIB, Scratch, Serve};

const SIZE: u64 = 16 * MIB;

struct Stage {
    scratch: Scratch,
    hob: Hob,
    witness: Client,
    image: Vec<u8>,
}

impl Stage {
    #[track_caller]
    fn new() -> Self {
        Self::with_image(|path| noise_file(path, SIZE, 30))
    }

    #[track_caller]
    fn with_image(make: impl FnOnce(&Path)) -> Self {
        let scratch = Scratch::new();
        make(&scratch.path("disk.img"));
        let image = scratch.read("disk.img");
        let hob =
            Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "32M", "4K").start(&scratch);
        let witness = hob.connect();
        Self { scratch, hob, witness, image }
    }

    /// Checks that the witness still reads correct data on its first connection. The client fails
    /// after two minutes without an answer.
    #[track_caller]
    fn witness_is_well(&mut self, after: &str) {
        for at in [0, 5 * MIB + 512, SIZE - 4096] {
            let data = self.witness.read(at, 4096).unwrap_or_else(|e| panic!("witness after {after}: {e}"));
            assert_same(&data, &self.image[at as usize..at as usize + 4096], at, after);
        }
    }

    #[track_caller]
    fn end(mut self) {
        self.witness_is_well("everything");
        self.hob.stop();
        let image = self.scratch.read("disk.img");
        assert_same(&image, &self.image, 0, "the backing before and after");
    }
}

/// Reads until the server closes the connection; panics if it does not.
#[track_caller]
fn closed(mut stream: impl Read, what: &str) {
    let mut sink = [0; 4096];
    let mut said = 0;
    loop {
        match stream.read(&mut sink) {
            Ok(0) => return,
            Ok(n) => said += n,
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return,
            Err(e) => panic!("{what}: expected a closed connection, got {e}"),
        }
        assert!(said < 1 << 20, "{what}: the server talks on");
    }
}

/// Promise 5: invalid data in the negotiation.
#[test]
fn invalid_data_before_transmission_closes_the_connection() {
    let mut stage = Stage::new();
    let noise = conformance::data::Noise::new(8).bytes(4096);
    let mut huge = option(7, b"");
    huge[12..16].copy_from_slice(&u32::MAX.to_be_bytes());
    let unknown_flags = 0xffff_ffff_u32.to_be_bytes().to_vec();
    let with_flags = |bytes: &[u8]| [&3_u32.to_be_bytes()[..], bytes].concat();
    let table: [(&str, Vec<u8>); 5] = [
        ("client flags nobody knows", unknown_flags),
        ("noise in place of an option", with_flags(&noise)),
        ("an option of 4 GiB", with_flags(&[huge, noise.clone()].concat())),
        ("a wrong option magic", with_flags(&[&b"IHAVENOT"[..], &noise].concat())),
        ("a web browser", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()),
    ];
    for (what, bytes) in table {
        let mut stream = stage.hob.address().open().unwrap();
        // The server may close the connection before it has received everything.
        let _ = stream.write_all(&bytes);
        closed(stream, what);
        stage.witness_is_well(what);
    }
    stage.end();
}

/// Promise 5: well-formed but invalid options get an error, and the negotiation continues.
#[test]
fn wrong_options_get_an_error_and_the_negotiation_continues() {
    let mut stage = Stage::new();
    let name_too_long = [&4000_u32.to_be_bytes()[..], &[b'x'; 10], &[0, 0]].concat();
    let table: [(&str, u32, Vec<u8>); 5] = [
        ("an option nobody knows", 0x7777, vec![1, 2, 3]),
        ("GO without a name", 7, vec![]),
        ("GO with a name longer than the option", 7, name_too_long),
        ("GO for an export that is not there", 7, [&4_u32.to_be_bytes()[..], b"nope", &[0, 0]].concat()),
        ("LIST with data", 3, vec![0; 7]),
    ];
    let mut stream = stage.hob.address().open().unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&3_u32.to_be_bytes()).unwrap();
    for (what, number, data) in table {
        stream.write_all(&option(number, &data)).unwrap();
        let (kind, _) = option_reply(&mut *stream).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(kind & 0x8000_0000 != 0, "{what}: answered {kind:#x}");
        stage.witness_is_well(what);
    }
    // The same connection can still list exports and disconnect.
    stream.write_all(&option(3, b"")).unwrap();
    assert_eq!(option_reply(&mut *stream).unwrap().0, 2, "LIST names the export");
    assert_eq!(option_reply(&mut *stream).unwrap().0, 1, "LIST ends");
    stream.write_all(&option(2, b"")).unwrap();
    assert_eq!(option_reply(&mut *stream).unwrap().0, 1, "ABORT is acknowledged");
    stage.end();
}

#[test]
fn a_wrong_request_magic_closes_the_connection() {
    let mut stage = Stage::new();
    let mut client = stage.hob.connect();
    client.read(0, 512).unwrap();
    client.raw().write_all(&[0xaa; 28]).unwrap();
    closed(client.raw(), "wrong magic");
    stage.witness_is_well("wrong magic");
    stage.end();
}

/// A request: description, flags, command, offset, length, payload.
type Request<'a> = (&'a str, u16, u16, u64, u32, &'a [u8]);

/// Promise 5: invalid requests on one connection, each followed by a valid one.
#[test]
fn invalid_requests_get_an_error_and_the_connection_continues() {
    let mut stage = Stage::new();
    let mut client = stage.hob.connect();
    let one = vec![7; 4096];
    let table: [Request; 9] = [
        ("read behind the end", 0, CMD_READ, SIZE, 4096, &[]),
        ("read across the end", 0, CMD_READ, SIZE - 512, 4096, &[]),
        ("read at the end of numbers", 0, CMD_READ, u64::MAX - 511, 4096, &[]),
        ("write behind the end", 0, CMD_WRITE, SIZE, 4096, &one),
        ("write across the end", 0, CMD_WRITE, SIZE - 512, 4096, &one),
        ("write at the end of numbers", 0, CMD_WRITE, u64::MAX - 4095, 4096, &one),
        ("trim across the end", 0, CMD_TRIM, SIZE - 512, 1 << 20, &[]),
        ("an unknown command", 0, 4711, 0, 0, &[]),
        ("an unknown flag", 0x8000, CMD_READ, 0, 4096, &[]),
    ];
    for (what, flags, command, offset, length, payload) in table {
        let error =
            client.call(flags, command, offset, length, payload).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!([EINVAL, ENOSPC].contains(&error), "{what}: error {error}");
        let data = client.read(4096, 512).unwrap_or_else(|e| panic!("after {what}: {e}"));
        assert_same(&data, &stage.image[4096..4608], 4096, what);
        stage.witness_is_well(what);
    }
    stage.end();
}

/// Promise 5: a request above the maximum length is refused or the connection is closed, and no
/// memory is allocated for it.
#[test]
fn oversized_requests_take_no_memory() {
    let mut stage = Stage::new();
    let before = resident_kib(stage.hob.process.pid());
    for length in [(32 << 20) + 4096, 0x7fff_f000, u32::MAX] {
        for command in [CMD_READ, CMD_WRITE] {
            let mut client = stage.hob.connect();
            client.raw().write_all(&request(0, command, 1, 0, length)).unwrap();
            if command == CMD_WRITE {
                // The client sends a part of the payload and never the rest. The server may answer
                // with an error or close the connection.
                let _ = client.raw().write_all(&[9; 65536]);
                drop(client);
            } else {
                match client.receive() {
                    Ok(reply) => assert_ne!(reply.error, 0, "a read of {length} bytes"),
                    Err(e) => assert_ne!(e.kind(), std::io::ErrorKind::WouldBlock, "silence: {e}"),
                }
            }
            stage.witness_is_well("an oversized request");
        }
    }
    let after = resident_kib(stage.hob.process.pid());
    assert!(after < before + 128 * 1024, "memory grew from {before} to {after} KiB");
    stage.end();
}

#[test]
fn misaligned_requests_are_right_or_refused() {
    let mut stage = Stage::new();
    let mut client = stage.hob.connect();
    for (offset, length) in [(1_u64, 3_u32), (511, 2), (4095, 4098), (777, 77_777), (SIZE - 1, 1)] {
        let error = client.call(0, CMD_READ, offset, length, &[]).unwrap();
        if error == 0 {
            let mut data = vec![0; length as usize];
            client.take(&mut data).unwrap();
            let right = &stage.image[offset as usize..offset as usize + length as usize];
            assert_same(&data, right, offset, "a misaligned read");
        } else {
            assert_eq!(error, EINVAL, "{length} bytes at {offset}");
        }
    }
    stage.witness_is_well("misaligned requests");
    stage.end();
}

/// Promise 5: clients that stop in the middle of a message delay neither other clients nor the
/// reaction to SIGTERM.
#[test]
fn a_client_that_stops_in_mid_request_delays_no_other_client() {
    let mut stage = Stage::new();
    let mut silent = Vec::new();
    for n in 0..24 {
        match n % 4 {
            0 => silent.push(stage.hob.address().open().unwrap()),
            1 => {
                let mut stream = stage.hob.address().open().unwrap();
                stream.write_all(&[0, 0, 0, 3, b'I', b'H']).unwrap();
                silent.push(stream);
            }
            _ => {}
        }
    }
    let mut half: Vec<Client> = (0..12).map(|_| stage.hob.connect()).collect();
    for (n, client) in half.iter_mut().enumerate() {
        let head = request(0, CMD_WRITE, 1, 0, 65536);
        let piece = if n % 2 == 0 { head[..13].to_vec() } else { [&head[..], &[1; 4000]].concat() };
        client.raw().write_all(&piece).unwrap();
    }
    std::thread::sleep(Duration::from_millis(300));
    stage.witness_is_well("silence");
    stage.end();
}

/// Promise 5: eighty connections at once, all of which are served.
#[test]
fn eighty_connections_at_once() {
    let mut stage = Stage::new();
    let mut clients: Vec<Client> = (0..80).map(|_| stage.hob.connect()).collect();
    for round in 0..3_u64 {
        for (n, client) in clients.iter_mut().enumerate() {
            client.send(0, CMD_READ, (n as u64 + round) * 8192, 8192, &[]).unwrap();
        }
        for (n, client) in clients.iter_mut().enumerate() {
            assert_eq!(client.receive().unwrap().error, 0);
            let mut data = vec![0; 8192];
            client.take(&mut data).unwrap();
            let at = (n + round as usize) * 8192;
            assert_same(&data, &stage.image[at..at + 8192], at as u64, "one of eighty");
        }
    }
    stage.witness_is_well("eighty connections");
    stage.end();
}

/// Promise 5: two thousand requests in flight on one connection, each answered once.
#[test]
fn two_thousand_requests_in_flight() {
    const COUNT: u64 = 2048;
    let mut stage = Stage::new();
    let mut client = stage.hob.connect();
    let place = |cookie: u64| cookie * 7 % 4000 * 4096;
    let flood: Vec<u8> = (0..COUNT).flat_map(|c| request(0, CMD_READ, c, place(c), 4096)).collect();
    client.raw().write_all(&flood).unwrap();
    stage.witness_is_well("a flood");
    let mut seen = HashSet::new();
    for _ in 0..COUNT {
        let reply = client.receive().unwrap();
        assert_eq!(reply.error, 0);
        assert!(reply.cookie < COUNT && seen.insert(reply.cookie), "cookie {} again", reply.cookie);
        let mut data = vec![0; 4096];
        client.take(&mut data).unwrap();
        let at = place(reply.cookie);
        assert_same(&data, &stage.image[at as usize..at as usize + 4096], at, "one of two thousand");
    }
    stage.end();
}

/// Promise 5: a client that requests gigabytes and reads no reply costs a limited amount of memory.
#[test]
fn a_client_that_never_reads_replies_is_throttled() {
    let mut stage = Stage::new();
    let mut greedy: Vec<Client> = (0..4).map(|_| stage.hob.connect()).collect();
    for client in &mut greedy {
        // 1024 requests of 8 MiB each are 8 GiB of unread replies.
        let flood: Vec<u8> = (0..1024).flat_map(|c| request(0, CMD_READ, c, 0, 8 << 20)).collect();
        client.raw().write_all(&flood).unwrap();
    }
    std::thread::sleep(Duration::from_millis(1500));
    stage.witness_is_well("greed");
    let held = resident_kib(stage.hob.process.pid());
    assert!(held < 1024 * 1024, "the server holds {held} KiB for clients that do not read");
    drop(greedy);
    stage.end();
}

/// Connects a client that has negotiated block status queries.
fn asking(hob: &Hob) -> UnixStream {
    let Address::Unix(path) = hob.address() else { panic!("a Unix socket") };
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&3_u32.to_be_bytes()).unwrap();
    let counted = |text: &str| [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat();
    let context = [counted("disk"), 1_u32.to_be_bytes().to_vec(), counted("base:allocation")].concat();
    // Structured replies, the metadata context, GO.
    for (number, data) in [(8, vec![]), (10, context), (7, [counted("disk"), vec![0, 0]].concat())] {
        stream.write_all(&option(number, &data)).unwrap();
        loop {
            match option_reply(&mut stream).unwrap().0 {
                1 => break,
                kind => assert!(kind & 0x8000_0000 == 0, "option {number} answered {kind:#x}"),
            }
        }
    }
    stream
}

/// A client that sends the same request repeatedly.
struct Flood {
    sent: Arc<AtomicUsize>,
    thread: JoinHandle<()>,
}

impl Flood {
    const AT_ONCE: usize = 1024;

    fn start(mut stream: UnixStream, request: &[u8], count: usize) -> Flood {
        let (sent, chunk) = (Arc::new(AtomicUsize::new(0)), request.repeat(Flood::AT_ONCE));
        let counter = sent.clone();
        let thread = std::thread::spawn(move || {
            // The server may close the connection before it has received everything.
            while counter.load(Ordering::Relaxed) < count && stream.write_all(&chunk).is_ok() {
                counter.fetch_add(Flood::AT_ONCE, Ordering::Relaxed);
            }
        });
        Flood { sent, thread }
    }

    /// Waits until the server receives no more requests.
    #[track_caller]
    fn is_held_back(&self) {
        let mut before = usize::MAX;
        loop {
            let sent = self.sent.load(Ordering::Relaxed);
            assert!(
                !self.thread.is_finished(),
                "all {sent} requests were taken of a client that reads nothing"
            );
            if sent == before {
                return;
            }
            before = sent;
            std::thread::sleep(Duration::from_millis(500));
        }
    }
}

/// Promise 5: the limit also applies to replies of a few bytes each. A client that reads later
/// receives every reply.
#[test]
fn a_client_that_never_reads_small_replies_is_throttled() {
    const COUNT: usize = 1 << 20;
    let mut stage = Stage::new();
    let mut stream = asking(&stage.hob);
    let flood = Flood::start(stream.try_clone().unwrap(), &request(0, 4711, 1, 0, 0), COUNT);
    flood.is_held_back();
    stage.witness_is_well("a flood of nonsense");
    let mut answers = vec![0; 16 * Flood::AT_ONCE];
    for _ in 0..COUNT / Flood::AT_ONCE {
        stream.read_exact(&mut answers).unwrap();
        assert!(answers.chunks(16).all(|answer| answer[4..8] == EINVAL.to_be_bytes()));
    }
    flood.thread.join().unwrap();
    stage.end();
}

/// Promise 5: the limit also applies to replies that are much longer than their requests and take
/// long to find. A file with a hole in every second block has the longest replies.
#[test]
fn a_client_that_never_reads_block_status_is_throttled() {
    let mut stage = Stage::with_image(|path| {
        let file = std::fs::File::create(path).unwrap();
        file.set_len(SIZE).unwrap();
        (0..SIZE).step_by(8192).for_each(|at| file.write_all_at(&[7; 4096], at).unwrap());
    });
    let before = resident_kib(stage.hob.process.pid());
    let streams: Vec<_> = (0..4).map(|_| asking(&stage.hob)).collect();
    let question = request(0, CMD_BLOCK_STATUS, 1, 0, SIZE as u32);
    let start = |stream: &UnixStream| Flood::start(stream.try_clone().unwrap(), &question, 1 << 15);
    let floods: Vec<Flood> = streams.iter().map(start).collect();
    stage.witness_is_well("a flood of questions");
    floods.iter().for_each(Flood::is_held_back);
    // Requests that were received may be answered for a while, but not for ever.
    let mut held = before;
    loop {
        std::thread::sleep(Duration::from_millis(500));
        let now = resident_kib(stage.hob.process.pid());
        assert!(now < before + 64 * 1024, "memory grew from {before} to {now} KiB");
        if now <= held + 256 {
            break;
        }
        held = now;
    }
    stage.witness_is_well("questions that wait");
    for (stream, flood) in streams.into_iter().zip(floods) {
        stream.shutdown(std::net::Shutdown::Both).unwrap();
        flood.thread.join().unwrap();
    }
    stage.end();
}

#[test]
fn leaving_with_requests_in_flight_is_fine() {
    let mut stage = Stage::new();
    for n in 0..20 {
        let mut client = stage.hob.connect();
        let mut flood: Vec<u8> = (0..64).flat_map(|c| request(0, CMD_READ, c, c * 65536, 65536)).collect();
        if n % 2 == 0 {
            flood.extend(request(0, CMD_DISC, 99, 0, 0));
        }
        client.raw().write_all(&flood).unwrap();
        drop(client);
    }
    stage.witness_is_well("clients that left");
    stage.end();
}
