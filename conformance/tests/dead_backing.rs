//! The backing is a separate NBD server, which fails. Hits and the control API continue. All other
//! requests wait, and complete correctly when the server is back.

use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use conformance::data::{Noise, assert_same, assert_same_file, empty_file};
use conformance::hob::binary;
use conformance::nbd_client::Client;
use conformance::process::Process;
use conformance::scratch::wait_for;
use conformance::{Daemon, Hob, MIB, Scratch, Serve};
use rustix::process::Signal;

const SIZE: u64 = 32 * MIB;
const WARM: u64 = 4 * MIB;
/// Size of the write-back cache.
const CACHE: u64 = 16 * MIB;
/// A writer that makes no progress for this time waits for the backing.
const NO_PROGRESS: Duration = Duration::from_secs(3);

/// Maximum time of a stop whose backing does not answer. It usually takes 2 to 6 s.
const STOP_MAX: Duration = Duration::from_secs(20);

struct Stage {
    scratch: Scratch,
    backing: Process,
    hob: Hob,
    image: Vec<u8>,
}

impl Stage {
    /// Starts hob on nbdkit, with the first part of the disk in flash.
    #[track_caller]
    fn new() -> Self {
        let scratch = Scratch::new();
        let image = scratch.noise("disk.img", SIZE, 50);
        let backing = scratch.serve_image("disk.img");
        let hob =
            Serve::disk(&scratch.backing_uri()).cached(&scratch.path("pool"), "16M", "4K").start(&scratch);
        let mut client = hob.connect();
        // hob fills flash while it replies: read until a whole pass has only hits.
        wait_for("the first part to be cached", || {
            let before = hob.stats().hits();
            for at in (0..WARM).step_by(65536) {
                client.read(at, 65536).unwrap();
            }
            hob.stats().hits() - before >= WARM / 65536
        });
        Self { scratch, backing, hob, image }
    }

    #[track_caller]
    fn is_right(&self, data: &[u8], at: u64) {
        assert_same(data, &self.image[at as usize..at as usize + data.len()], at, "the disk and its backing");
    }
}

/// Promise 4: an unavailable backing stops neither hits nor the control API, and waiting requests
/// return correct data.
#[test]
fn hits_and_the_api_go_on_and_misses_wait() {
    let mut stage = Stage::new();
    let mut reader = stage.hob.connect();
    let mut waiting = stage.hob.connect();
    let mut writing = stage.hob.connect();
    stage.backing.kill();
    let (tell, told) = mpsc::channel();
    let data = Noise::new(51).bytes(MIB as usize);
    let written = data.clone();
    std::thread::scope(|scope| {
        let tell_write = tell.clone();
        scope.spawn(move || tell.send(("read", waiting.read(20 * MIB, MIB as u32))));
        scope.spawn(move || {
            let answer = writing.write(24 * MIB, &written).and_then(|()| writing.flush());
            tell_write.send(("write", answer.map(|()| Vec::new())))
        });
        // The backing is unavailable for two seconds.
        let start = Instant::now();
        let (mut hits, mut calls) = (Vec::new(), Vec::new());
        while start.elapsed() < Duration::from_secs(2) || hits.len() < 5 {
            let now = Instant::now();
            let hit = reader.read(MIB, 65536).expect("a hit");
            stage.is_right(&hit, MIB);
            hits.push(now.elapsed());
            let now = Instant::now();
            stage.hob.ctl(&["explain", "disk"]);
            stage.hob.ctl(&["disk", "list"]);
            calls.push(now.elapsed());
            std::thread::sleep(Duration::from_millis(50));
        }
        // The host of the test may stall, but not during every hit and every call.
        assert!(hits.iter().any(|took| *took < Duration::from_secs(1)), "hits took {hits:?}");
        assert!(calls.iter().any(|took| *took < Duration::from_secs(2)), "the control API took {calls:?}");
        assert!(told.try_recv().is_err(), "a request was answered without a backing");
        stage.backing = stage.scratch.serve_image("disk.img");
        for _ in 0..2 {
            let (what, answer) = told.recv_timeout(Duration::from_secs(90)).expect("what waited is answered");
            let answer = answer.unwrap_or_else(|e| panic!("the {what} that waited: {e}"));
            if what == "read" {
                stage.is_right(&answer, 20 * MIB);
            }
        }
    });
    stage.image[24 * MIB as usize..25 * MIB as usize].copy_from_slice(&data);
    let whole = reader.read(0, SIZE as u32).unwrap();
    stage.is_right(&whole, 0);
    stage.hob.stop();
    std::fs::write(stage.scratch.path("expected"), &stage.image).unwrap();
    assert_same_file(&stage.scratch.path("expected"), &stage.scratch.path("disk.img"));
}

/// A backing fails repeatedly while a client sends requests all the time: every reply is correct.
#[test]
fn a_backing_that_keeps_dying_corrupts_nothing() {
    let mut stage = Stage::new();
    let mut client = stage.hob.connect();
    let mut image = stage.image.clone();
    let (stop, stopped) = mpsc::channel::<()>();
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let counter = &done;
        let load = scope.spawn(move || {
            let mut dice = Noise::new(52);
            while stopped.try_recv().is_err() {
                let length = (1 + dice.below(64)) * 512;
                let at = dice.below((SIZE - length) / 512) * 512;
                let range = at as usize..(at + length) as usize;
                if dice.below(3) == 0 {
                    let data = dice.bytes(length as usize);
                    client.write(at, &data).expect("a write waits rather than fails");
                    image[range].copy_from_slice(&data);
                } else {
                    let data = client.read(at, length as u32).expect("a read waits rather than fails");
                    assert_same(&data, &image[range], at, "the disk and the client's memory");
                }
                counter.fetch_add(1, Ordering::Relaxed);
            }
            image
        });
        for _ in 0..4 {
            std::thread::sleep(Duration::from_millis(300));
            stage.backing.kill();
            std::thread::sleep(Duration::from_millis(200));
            stage.backing = stage.scratch.serve_image("disk.img");
        }
        let enough = done.load(Ordering::Relaxed) + 50;
        let start = Instant::now();
        while done.load(Ordering::Relaxed) < enough
            && !load.is_finished()
            && start.elapsed() < Duration::from_secs(90)
        {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = stop.send(());
        stage.image = load.join().expect("the client met an error or a wrong byte");
        let done = done.load(Ordering::Relaxed);
        println!("{done} requests across four deaths");
        assert!(done >= enough, "only {done} requests, and not {enough}");
    });
    let whole = stage.hob.connect().read(0, SIZE as u32).unwrap();
    stage.is_right(&whole, 0);
    stage.hob.stop();
}

#[test]
fn sigterm_ends_the_server_while_its_backing_is_dead() {
    let mut stage = Stage::new();
    stage.backing.kill();
    let mut client = stage.hob.connect();
    client.send(0, conformance::nbd_client::CMD_READ, 20 * MIB, 4096, &[]).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    stage.hob.stop();
}

/// Configures a disk on `backing.sock` with a write-back cache of [`CACHE`], which destages only
/// when it is nearly full.
fn configure_write_back(scratch: &Scratch) {
    let uri = scratch.backing_uri();
    let config = format!(
        "[[pool]]\nname = \"pool\"\ndevices = [{:?}]\nsize = \"64M\"\nsegment_size = \"1M\"\n\
         [[disk]]\nname = \"vm\"\nbacking = {uri:?}\n\
         [disk.cache]\npool = \"pool\"\nsize = {CACHE}\nmode = \"write-back\"\ndirty_age_max = 600\n\
         dirty_start = 90\ndirty_stop = 80\ndirty_full = 95\n",
        scratch.text("flash"),
    );
    scratch.configure(&config);
}

/// Starts a daemon, and waits until the disk `vm` has its write-back cache.
#[track_caller]
fn start_daemon(scratch: &Scratch) -> (Daemon, Client) {
    let _ = std::fs::remove_file(scratch.path("ctl.sock"));
    let daemon = scratch.start_daemon();
    let shown = || daemon.ctl(&["disk", "show", "vm", "-o", "json"]);
    wait_for("the cache", || shown().contains("\"active\""));
    (daemon, scratch.connect_when_served("vm"))
}

/// Promise 1: a stop leaves dirty data in the cache if the backing does not answer. The stop does
/// not wait for a backing that is dead or hangs, and the guest sees no error after the next start.
#[test]
fn a_stop_during_a_drain_takes_seconds_and_loses_nothing() {
    for is_dead in [true, false] {
        let scratch = Scratch::new();
        empty_file(&scratch.path("disk.img"), SIZE);
        let mut backing = scratch.serve_image("disk.img");
        configure_write_back(&scratch);
        let (daemon, mut guest) = start_daemon(&scratch);
        let data = Noise::new(53).bytes(MIB as usize);
        guest.write(0, &data).unwrap();
        guest.flush().unwrap();
        // The backing gets writes, and answers none.
        backing.signal(Signal::STOP);
        daemon.ctl(&["drain", "vm", "--no-wait"]);
        assert!(daemon.stats("vm").number("dirty_bytes").is_some_and(|bytes| bytes > 0.0));
        if is_dead {
            backing.kill();
        }
        let begun = Instant::now();
        let stopped = daemon.stop();
        assert!(begun.elapsed() < STOP_MAX, "it took {:?}: {}", begun.elapsed(), stopped.stderr);
        assert!(stopped.stderr.contains("closed without a flush of its backing"), "{}", stopped.stderr);
        let names = std::fs::read_dir(scratch.dir()).unwrap().map(|entry| entry.unwrap().file_name());
        let logs: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with("hob-")).collect();
        assert!(logs.is_empty(), "a closed cache has no crash log: {logs:?}");
        backing.kill();
        let backing = scratch.serve_image("disk.img");
        let (daemon, mut guest) = start_daemon(&scratch);
        guest.flush().expect("nothing is lost");
        assert_same(&guest.read(0, MIB as u32).unwrap(), &data, 0, "the disk and what was written");
        let health = daemon.try_ctl(&["health"]).all();
        assert!(!health.contains("crash log"), "{health}");
        drop(guest);
        daemon.stop();
        drop(backing);
    }
}

/// A daemon that SIGSTOP has stopped accepts connections and does not answer. A command that only
/// reads reports that after 12 s, and Ctrl-C ends a command that watches a drain.
#[test]
fn commands_end_while_the_daemon_is_stopped() {
    let scratch = Scratch::new();
    empty_file(&scratch.path("disk.img"), SIZE);
    let mut backing = scratch.serve_image("disk.img");
    configure_write_back(&scratch);
    let (mut daemon, mut guest) = start_daemon(&scratch);
    guest.write(0, &Noise::new(55).bytes(MIB as usize)).unwrap();
    backing.signal(Signal::STOP);
    let mut command = Command::new(binary());
    command.args(["drain", "vm", "--control", &format!("unix:{}", scratch.text("ctl.sock"))]);
    let mut drain = Process::start("hob drain", &mut command).unwrap();
    wait_for("the progress of the drain", || drain.stderr().contains(" left"));
    daemon.process.signal(Signal::STOP);
    // The command asks every 250 ms, and now waits for the answer.
    std::thread::sleep(Duration::from_secs(2));
    drain.signal(Signal::INT);
    let drained = drain.finish(Duration::from_secs(20));
    assert_eq!(drained.status.and_then(|status| status.code()), Some(130), "{}", drained.all());
    assert!(drained.stderr.contains("the drain of vm continues"), "{}", drained.stderr);
    let begun = Instant::now();
    let health = daemon.try_ctl(&["health"]);
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    assert_eq!(health.status.and_then(|status| status.code()), Some(1), "{}", health.all());
    let said = health.stderr.trim();
    assert!(said.contains("has not answered for 12 s; "), "{said}");
    assert!(said.contains("'systemctl status hob'") && !said.contains('\n'), "{said}");
    daemon.kill();
}

/// Promise 4 under write-back: a dead backing fills the cache with dirty data up to its limit. Then
/// writes wait without an error, hits continue, and everything ends when the backing returns.
#[test]
fn writes_beyond_the_dirty_limit_wait_until_the_backing_returns() {
    const BLOCK: u64 = 64 << 10;
    let scratch = Scratch::new();
    empty_file(&scratch.path("disk.img"), SIZE);
    let mut backing = scratch.serve_image("disk.img");
    configure_write_back(&scratch);
    let (daemon, mut guest) = start_daemon(&scratch);
    // More data than the cache can have. The order is not sequential.
    let blocks = 24 * MIB / BLOCK;
    let data = Noise::new(54).bytes((blocks * BLOCK) as usize);
    let at = |number: u64| number * 157 % blocks * BLOCK;
    let block = |number: u64| &data[at(number) as usize..][..BLOCK as usize];
    backing.kill();
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for number in 0..blocks {
                guest.write(at(number), block(number)).expect("a write waits rather than fails");
                done.store(number + 1, Ordering::Relaxed);
            }
            guest.flush().expect("a flush waits rather than fails");
        });
        let mut progress = (0, Instant::now());
        wait_for("a write that waits at the dirty limit", || {
            let now = done.load(Ordering::Relaxed);
            if now != progress.0 {
                progress = (now, Instant::now());
            }
            assert!(now * BLOCK <= CACHE, "{now} blocks are acknowledged without a backing");
            progress.1.elapsed() > NO_PROGRESS && daemon.number("vm", "dirty_bytes") >= CACHE / 2
        });
        let mut reader = scratch.connect("vm");
        for number in 0..20 {
            let hit = reader.read(at(number), BLOCK as u32).expect("a hit");
            assert_same(&hit, block(number), at(number), "the disk and what was written");
        }
        assert!(!writer.is_finished(), "the writes do not wait for the backing");
        assert_eq!(daemon.disk("vm")["backing_state"]["state"], "reconnecting");
        backing = scratch.serve_image("disk.img");
        writer.join().expect("no write fails");
    });
    assert_eq!(done.into_inner(), blocks);
    let whole = guest.read(0, data.len() as u32).unwrap();
    assert_same(&whole, &data, 0, "the disk and what was written");
    daemon.ctl(&["drain", "vm"]);
    drop(guest);
    daemon.stop();
    backing.kill();
    let image = scratch.read("disk.img");
    assert_same(&image[..data.len()], &data, 0, "the backing and what was written");
}
