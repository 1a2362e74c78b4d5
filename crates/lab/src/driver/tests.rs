//! Tests of the driver with a small server, written from the specification without code of
//! `hob_nbd`.

use std::io::{Read, Result as IoResult, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hob_nbd::uri::Address;

use super::*;
use crate::workload::{Workload, WorkloadConfig};

const DISK_BYTES: u64 = 1 << 20;

/// Behaviour of the server after the negotiation.
#[derive(Clone, Copy)]
struct Manners {
    /// Number of requests that the server collects before it answers them, last request first.
    hold: usize,
    /// Delay of each batch.
    delay: Duration,
    /// Number of requests that the server answers.
    answers_max: u64,
    /// True if the server disconnects after these answers. If false, the server stays connected and
    /// stops answering.
    hangs_up: bool,
    flags: u16,
}

const WILLING: Manners =
    Manners { hold: 1, delay: Duration::ZERO, answers_max: u64::MAX, hangs_up: false, flags: 1 };

/// Serves one connection with simple replies, without structured replies and metadata. Requests at
/// offset zero fail with EIO.
fn serve(mut client: impl Read + Write, manners: Manners) -> IoResult<()> {
    client.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    take::<4>(&mut client)?;
    loop {
        let header = take::<16>(&mut client)?;
        let (option, len) = (be32(&header[8..]), be32(&header[12..]));
        client.read_exact(&mut vec![0; len as usize])?;
        let mut answer = |kind: u32, data: &[u8]| {
            let mut bytes = 0x0003_e889_0455_65a9u64.to_be_bytes().to_vec();
            bytes.extend([option, kind, data.len() as u32].map(u32::to_be_bytes).concat());
            bytes.extend(data);
            client.write_all(&bytes)
        };
        if option != 7 {
            answer(0x8000_0001, b"")?;
            continue;
        }
        let mut info = vec![0, 0];
        info.extend(DISK_BYTES.to_be_bytes());
        info.extend(manners.flags.to_be_bytes());
        answer(3, &info)?;
        answer(1, b"")?;
        break;
    }
    let (mut answered, mut lot) = (0, Vec::new());
    loop {
        let header = take::<28>(&mut client)?;
        let (kind, len) = (header[7], be32(&header[24..]));
        match kind {
            2 => return Ok(()),
            1 => client.read_exact(&mut vec![0; len as usize])?,
            _ => {}
        }
        lot.push(header);
        if lot.len() < manners.hold {
            continue;
        }
        thread::sleep(manners.delay);
        for header in lot.drain(..).rev() {
            if answered == manners.answers_max {
                if manners.hangs_up {
                    return Ok(());
                }
                continue;
            }
            answered += 1;
            let fails = header[16..24] == [0; 8];
            let mut bytes = vec![0x67, 0x44, 0x66, 0x98, 0, 0, 0, if fails { 5 } else { 0 }];
            bytes.extend(&header[8..16]);
            if header[7] == 0 && !fails {
                bytes.resize(16 + be32(&header[24..]) as usize, 0xab);
            }
            client.write_all(&bytes)?;
        }
    }
}

fn take<const N: usize>(client: &mut impl Read) -> IoResult<[u8; N]> {
    let mut bytes = [0; N];
    client.read_exact(&mut bytes).map(|()| bytes)
}

fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().unwrap())
}

/// Runs the accesses with a server on a Unix socket.
fn against(
    manners: Manners,
    accesses: &[Access],
    depth: usize,
    stop: &AtomicBool,
    progress: impl FnMut(u64, u64),
) -> Result<Run> {
    static SOCKETS: AtomicU32 = AtomicU32::new(0);
    let number = SOCKETS.fetch_add(1, Ordering::Relaxed);
    let path: PathBuf = std::env::temp_dir().join(format!("hob-driver-{}-{number}.sock", std::process::id()));
    let listener = UnixListener::bind(&path)?;
    let target = NbdUri::new(Address::Unix { path: path.clone() }, "disk");
    let run = thread::scope(|scope| {
        scope.spawn(|| listener.accept().map(|(client, _)| serve(client, manners)));
        drive(&target, accesses, depth, stop, progress)
    });
    std::fs::remove_file(path)?;
    run
}

/// Runs requests with times. Returns the due time and the sending time of each request, and the
/// run's result.
fn timed(
    manners: Manners,
    requests: impl Iterator<Item = Result<Timed>> + Send,
    depth: usize,
    stop: &AtomicBool,
) -> (Vec<(u64, u64)>, Result<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let target = NbdUri::new(Address::Tcp { host: "127.0.0.1".to_owned(), port }, "");
    let mut times = Vec::new();
    let ended = thread::scope(|scope| {
        scope.spawn(|| listener.accept().map(|(client, _)| serve(client, manners)));
        let connection = Connection::open(&target).unwrap();
        connection.run(requests, depth, stop, |done| {
            assert_eq!(done.number, times.len() as u64);
            times.push((done.timed.due_ns, done.sent_ns));
        })
    });
    (times, ended)
}

fn due_at(due_ns: u64) -> Result<Timed> {
    Ok(Timed { due_ns, access: Access { offset: 4096, len: 4096, op: Op::Read } })
}

fn accesses(count: usize, read_permille: u16) -> Vec<Access> {
    let config = WorkloadConfig {
        footprint_bytes: DISK_BYTES - 4096,
        request_bytes: 4096,
        theta: 0.0,
        read_permille,
        seed: 6,
    };
    // Offset zero fails.
    Workload::new(&config)
        .take(count)
        .map(|access| Access { offset: access.offset + 4096, ..access })
        .collect()
}

static GO: AtomicBool = AtomicBool::new(false);

#[test]
fn every_access_is_answered_and_timed() {
    for (depth, read_permille) in [(1, 1000), (8, 1000), (32, 500), (64, 0)] {
        let mut seen = Vec::new();
        let list = accesses(640, read_permille);
        let run = against(WILLING, &list, depth, &GO, |done, total| seen.push((done, total))).unwrap();
        assert_eq!((run.samples.len(), run.errors, run.stopped), (640, 0, false), "depth {depth}");
        assert_eq!(seen, (1..=640).map(|done| (done, 640)).collect::<Vec<_>>());
        assert!(run.samples.is_sorted_by_key(|sample| sample.at_ns), "in the order of sending");
        let last = run.samples.iter().map(|sample| sample.at_ns + sample.latency_ns).max();
        assert_eq!(last, Some(run.elapsed_ns));
    }
}

#[test]
fn the_depth_is_reached_and_not_exceeded() {
    let manners = Manners { hold: 16, delay: Duration::from_millis(2), ..WILLING };
    let run = against(manners, &accesses(160, 700), 16, &GO, |_, _| {}).unwrap();
    let in_flight_at = |at: u64| {
        let lives = |sample: &&Sample| sample.at_ns <= at && at < sample.at_ns + sample.latency_ns;
        run.samples.iter().filter(lives).count()
    };
    let most = run.samples.iter().map(|sample| in_flight_at(sample.at_ns)).max();
    assert_eq!(most, Some(16));
    assert!(
        run.samples.iter().all(|sample| sample.latency_ns >= 2_000_000),
        "the server's time is in the latency"
    );
}

#[test]
fn tcp_works_as_well() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let target = NbdUri::new(Address::Tcp { host: "127.0.0.1".to_owned(), port }, "");
    let run = thread::scope(|scope| {
        scope.spawn(|| listener.accept().map(|(client, _)| serve(client, WILLING)));
        drive(&target, &accesses(200, 500), 4, &GO, |_, _| {})
    });
    assert_eq!(run.unwrap().samples.len(), 200);
}

#[test]
fn errors_of_the_server_are_counted_and_not_timed() {
    let mut list = accesses(50, 1000);
    list[7].offset = 0;
    list[30].offset = 0;
    let run = against(WILLING, &list, 4, &GO, |_, _| {}).unwrap();
    assert_eq!((run.samples.len(), run.errors, run.first_error), (48, 2, Some(ErrorCode::Io)));
    assert!(!run.stopped);
}

#[test]
fn a_stop_returns_the_results_so_far() {
    let stop = AtomicBool::new(false);
    let manners = Manners { delay: Duration::from_millis(1), ..WILLING };
    let run = against(manners, &accesses(100_000, 1000), 8, &stop, |done, _| {
        stop.store(done >= 20, Ordering::Relaxed);
    })
    .unwrap();
    assert!(run.stopped && (20..=200).contains(&run.samples.len()), "{}", run.samples.len());
}

#[test]
fn a_stop_does_not_wait_for_ever_for_a_server_that_fell_silent() {
    let stop = AtomicBool::new(false);
    let manners = Manners { answers_max: 10, ..WILLING };
    let run = against(manners, &accesses(100, 1000), 8, &stop, |done, _| {
        stop.store(done == 10, Ordering::Relaxed);
    })
    .unwrap();
    assert!(run.stopped);
    assert_eq!(run.samples.len(), 10);
}

#[test]
fn a_server_that_hangs_up_is_an_error_that_says_how_far_it_got() {
    let manners = Manners { answers_max: 10, hangs_up: true, ..WILLING };
    let error = against(manners, &accesses(100, 500), 4, &GO, |_, _| {}).unwrap_err();
    assert!(format!("{error:#}").contains("after 10 of 100 requests"), "{error:#}");
}

/// The server has accepted as many requests as the depth allows, so the sender waits for a reply
/// that never arrives.
#[test]
fn a_server_that_hangs_up_with_every_slot_in_flight_does_not_strand_the_sender() {
    let manners = Manners { hold: 4, answers_max: 8, hangs_up: true, ..WILLING };
    let error = against(manners, &accesses(100, 500), 4, &GO, |_, _| {}).unwrap_err();
    assert!(format!("{error:#}").contains("after 8 of 100 requests"), "{error:#}");
}

#[test]
fn a_request_beyond_the_export_is_refused_before_it_is_sent() {
    let bad = |access: Access, flags: u16| {
        let manners = Manners { flags, ..WILLING };
        format!("{:#}", against(manners, &[access], 1, &GO, |_, _| {}).unwrap_err())
    };
    let read = Access { offset: 0, len: 4096, op: Op::Read };
    assert!(bad(Access { offset: DISK_BYTES, ..read }, 1).contains("beyond"));
    assert!(bad(Access { offset: u64::MAX, ..read }, 1).contains("beyond"));
    assert!(bad(Access { len: 0, ..read }, 1).contains("length of 0"));
    assert!(bad(Access { op: Op::Write, ..read }, 3).contains("read-only"));
    let nowhere = NbdUri::new(Address::Unix { path: "/nowhere.sock".into() }, "");
    assert!(drive(&nowhere, &[read], 1, &GO, |_, _| {}).is_err());
    assert!(drive(&nowhere, &[read], 0, &GO, |_, _| {}).unwrap_err().to_string().contains("depth"));
}

const MS: u64 = 1_000_000;

#[test]
fn nothing_is_sent_before_it_is_due() {
    for depth in [1, 8] {
        let (times, ended) = timed(WILLING, (0..60).map(|i| due_at(i / 2 * 3 * MS)), depth, &GO);
        ended.unwrap();
        assert_eq!(times.len(), 60);
        assert!(times.iter().all(|(due_ns, sent_ns)| sent_ns >= due_ns), "{times:?}");
    }
}

#[test]
fn a_request_waits_for_a_place_and_is_late() {
    let slow = Manners { delay: Duration::from_millis(4), ..WILLING };
    let (times, ended) = timed(slow, (0..20).map(|i| due_at(i * MS)), 1, &GO);
    ended.unwrap();
    for (i, (due_ns, sent_ns)) in (0..).zip(&times) {
        assert_eq!(*due_ns, i * MS);
        assert!(
            *sent_ns >= i * 4 * MS,
            "request {i} was sent after {sent_ns} ns, before the answer to the last"
        );
    }
}

#[test]
fn neither_a_stop_nor_a_hang_up_waits_for_the_next_request() {
    let hour_ns = 3_600_000 * MS;
    let start = Instant::now();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_secs(2));
            stop.store(true, Ordering::Relaxed);
        });
        let (times, ended) = timed(WILLING, [due_at(0), due_at(hour_ns)].into_iter(), 4, &stop);
        assert_eq!((times.len(), ended.is_ok()), (1, true));
    });
    let leaving = Manners { answers_max: 1, hangs_up: true, ..WILLING };
    let requests = [due_at(0), due_at(0), due_at(hour_ns)];
    let (times, ended) = timed(leaving, requests.into_iter(), 4, &GO);
    assert_eq!((times.len(), ended.is_err()), (1, true));
    assert!(start.elapsed() < Duration::from_secs(600));
}

#[test]
fn an_error_in_the_list_ends_the_run_after_the_sent_requests() {
    let requests = (0..30).map(|i| if i == 20 { Err(anyhow::anyhow!("torn")) } else { due_at(0) });
    let (times, ended) = timed(WILLING, requests, 4, &GO);
    assert_eq!((times.len(), ended.unwrap_err().to_string()), (20, "torn".to_owned()));
}

/// Runs `talk` with a connection to a server.
fn with_client<T>(manners: Manners, silence_max: Duration, talk: impl FnOnce(&mut NbdClient) -> T) -> T {
    static SOCKETS: AtomicU32 = AtomicU32::new(0);
    let number = SOCKETS.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("hob-nbd-{}-{number}.sock", std::process::id()));
    // A killed process with the same number may have left it.
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let target = NbdUri::new(Address::Unix { path: path.clone() }, "disk");
    thread::scope(|scope| {
        scope.spawn(|| listener.accept().map(|(client, _)| serve(client, manners)));
        let mut nbd = NbdClient::open(Connection::open(&target).unwrap(), silence_max).unwrap();
        std::fs::remove_file(path).unwrap();
        let said = talk(&mut nbd);
        nbd.close();
        said
    })
}

#[test]
fn a_client_matches_answers_with_questions_in_any_order() {
    with_client(Manners { hold: 4, ..WILLING }, Duration::from_secs(60), |nbd| {
        assert_eq!(nbd.negotiated().size_bytes, DISK_BYTES);
        let read = nbd.send(ClientRequest::Read { offset: 4096, len: 300_000 }).unwrap();
        let write = nbd.send(ClientRequest::Write { offset: 512, data: &[7; 1024], fua: true }).unwrap();
        let flush = nbd.send(ClientRequest::Flush).unwrap();
        let fails = nbd.send(ClientRequest::WriteZeroes { offset: 0, len: 512, fua: false }).unwrap();
        assert_eq!(nbd.in_flight(), 4);
        let answers: Vec<ClientReply> = (0..4).map(|_| nbd.receive().unwrap()).collect();
        // This server answers the last request first, and treats a flush as a request at offset
        // zero.
        assert_eq!(
            answers.iter().map(|answer| answer.cookie).collect::<Vec<_>>(),
            [fails, flush, write, read]
        );
        assert_eq!(answers[0].error, Some(ErrorCode::Io));
        assert_eq!(answers[2].error, None);
        assert!(answers[3].data == vec![0xab; 300_000]);
        assert_eq!(nbd.in_flight(), 0);
    });
}

#[test]
fn a_client_tells_an_end_from_silence() {
    // The limit also applies to the handshake, which takes long on a busy host.
    let patience = Duration::from_secs(5);
    let closing = Manners { answers_max: 0, hangs_up: true, ..WILLING };
    let lost = with_client(closing, Duration::from_secs(60), |nbd| {
        nbd.send(ClientRequest::Flush).and_then(|_| nbd.receive()).unwrap_err()
    });
    assert!(matches!(lost, ConnectionError::Closed), "{lost}");
    let silent = Manners { answers_max: 0, ..WILLING };
    let lost = with_client(silent, patience, |nbd| {
        nbd.send(ClientRequest::Flush).and_then(|_| nbd.receive()).unwrap_err()
    });
    assert!(matches!(lost, ConnectionError::Silent(time) if time == patience), "{lost}");
}
