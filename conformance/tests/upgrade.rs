//! A daemon is upgraded to another program under load: clients notice at most a pause. The other
//! program is the same program here, or one that cannot start.
//!
//! These tests mount filesystems, and so need root and /dev/fuse.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use conformance::data::{Noise, assert_same, assert_same_file, noise_file};
use conformance::guest::{SENTINEL, start_rounds};
use conformance::hob::{binary, upgrade};
use conformance::nbd_client::{Address, Client, read_mibs, request};
use conformance::process::{Process, descendants};
use conformance::scratch::{free_port, is_listening, text, wait_until};
use conformance::{Authority, Daemon, Loop, MIB, Scratch, Serve, Tool, Unmount};
use rustix::process::Signal;

const SIZE: u64 = 96 * MIB;

/// Maximum time of an upgrade on a slow machine.
const UPGRADE_MAX: Duration = Duration::from_secs(180);

/// Maximum time of a guest.
const GUEST_MAX: Duration = Duration::from_secs(600);

const ERROR_INVALID: u32 = 22;

/// A daemon whose program can be replaced, with a disk `vm` that is also the file `vm.img`.
struct Stage {
    daemon: Daemon,
    /// The configuration at the start.
    config: String,
    // Dropped after the daemon and before the directory.
    _unmount: Unmount,
    scratch: Scratch,
}

impl Stage {
    fn new(settings: &str, more: &str) -> Stage {
        let scratch = Scratch::new();
        noise_file(&scratch.path("disk.img"), SIZE, 7);
        let unmount = Unmount::at(&scratch.path("vm.img"));
        let at = |name: &str| scratch.text(name);
        let config = format!(
            "{more}\n{}\
             [[pool]]\nname = \"p\"\ndevices = [\"{}\"]\nsize = \"256M\"\nsegment_size = \"1M\"\n\
             [[disk]]\nname = \"vm\"\nbacking = \"{}\"\nfuse = \"{}\"\n\
             cache = {{ pool = \"p\", size = \"48M\", {settings} }}\n",
            scratch.daemon_config(),
            at("pool"),
            at("disk.img"),
            at("vm.img"),
        );
        scratch.write_config(&config);
        install(&binary(), &scratch.path("hob"));
        let daemon =
            Daemon::start_program(&scratch.path("hob"), &scratch.path("hob.toml"), &scratch.path("ctl.sock"));
        // The daemon's socket answers when its disks exist.
        daemon.ctl(&["disk", "list"]);
        Stage { daemon, config, _unmount: unmount, scratch }
    }

    /// Starts a daemon whose disk has a persistent cache.
    fn persistent() -> Stage {
        Stage::new("persistent = true", "")
    }

    /// Writes a configuration that consists of the first one and these sections.
    fn configure(&self, sections: &str) {
        self.scratch.write_config(self.config.clone() + sections);
    }

    fn connect(&self) -> Client {
        self.scratch.connect("vm")
    }

    fn log(&self) -> String {
        self.daemon.process.stderr()
    }

    fn count(&self, what: &str) -> usize {
        self.log().matches(what).count()
    }

    /// Requests an upgrade and waits until the daemon is ready again.
    #[track_caller]
    fn upgrade(&mut self) {
        self.daemon.upgrade();
    }

    /// Requests an upgrade that must be refused for this reason. On a busy host, a step may take longer
    /// than its time limit, and then the upgrade is requested again.
    #[track_caller]
    fn refused(&mut self, reason: &str) {
        let mut before = self.count("not upgraded");
        self.daemon.process.signal(Signal::HUP);
        wait_until("the refusal", UPGRADE_MAX, || {
            let log = self.log();
            let refusals = log.matches("not upgraded").count();
            if refusals == before {
                return false;
            }
            let said = log.lines().rfind(|line| line.contains("not upgraded")).unwrap_or_default();
            if said.contains(reason) {
                return true;
            }
            assert!(said.contains(" within "), "{said}");
            before = refusals;
            self.daemon.process.signal(Signal::HUP);
            false
        });
    }

    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.daemon.process.pid())).unwrap().count()
    }
}

/// Installs a program like a package: copies the program beside the old program and renames it.
/// Tests do not write programs themselves: a process that another thread starts at that moment may
/// hold the file open for writing, and then the program cannot run.
fn install(from: &Path, to: &Path) {
    let new = to.with_extension("new");
    Tool::new("cp").arg(from).arg(&new).run();
    fs::rename(&new, to).unwrap();
}

fn fio(name: &str, seconds: u32, engine: &[String]) -> Process {
    Tool::new("fio")
        .args([format!("--name={name}"), format!("--runtime={seconds}")])
        .args(["--rw=randwrite", "--bsrange=512-64k", "--blockalign=512", "--iodepth=16", "--time_based"])
        .args(["--serialize_overlap=1", "--verify=crc32c", "--verify_fatal=1", "--verify_backlog=64"])
        .args(["--verify_state_save=0", "--output-format=terse"])
        .args(engine)
        .start()
}

#[track_caller]
fn ended_well(mut fio: Process) {
    let output = fio.finish(Duration::from_secs(300));
    assert!(output.success(), "{:?}: {}", output.status, output.all());
}

/// Runs three upgrades with fio over NBD, whose client does not reconnect, and with a filesystem on
/// a loop device over the disk's file.
fn nothing_is_noticed(settings: &str) {
    let mut stage = Stage::new(settings, "");
    let uri = stage.scratch.nbd().uri("vm");
    let half = format!("--size={}", SIZE / 3);
    let nbd = fio("nbd", 12, &["--ioengine=nbd".into(), format!("--uri={uri}"), half.clone()]);
    let file = stage.scratch.text("vm.img");
    let direct = ["--ioengine=libaio".into(), "--direct=1".into(), format!("--filename={file}"), half];
    let mut direct = direct.to_vec();
    direct.push(format!("--offset={}", SIZE / 3));
    let direct = fio("file", 12, &direct);
    let before = stage.daemon.process.pid();
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(1500));
        stage.upgrade();
    }
    ended_well(nbd);
    ended_well(direct);
    assert_eq!(stage.daemon.process.pid(), before);
    assert!(!stage.log().contains("connect again"), "{}", stage.log());
    // Both front ends and the backing have the same content at the end.
    let mut client = stage.connect();
    let seen = read_mibs(&mut client, 0..SIZE);
    assert_same(&fs::read(&file).unwrap(), &seen, 0, "the file");
    stage.upgrade();
    assert_same(&client.read(MIB, MIB as u32).unwrap(), &seen[MIB as usize..2 * MIB as usize], MIB, "NBD");
    assert_same(&fs::read(&file).unwrap(), &seen, 0, "the file");
    stage.daemon.ctl(&["drain", "vm"]);
    drop(client);
    let Stage { daemon, _unmount, scratch, .. } = stage;
    daemon.stop();
    assert_same(&scratch.read("disk.img"), &seen, 0, "the backing");
    for left in ["vm.img", "nbd.sock", "ctl.sock"] {
        assert!(!scratch.path(left).exists(), "{left} outlived the daemon");
    }
}

#[test]
fn clients_under_load_see_no_error_in_an_upgrade_with_a_persistent_cache() {
    nothing_is_noticed("mode = \"write-back\"");
}

#[test]
fn clients_under_load_see_no_error_in_an_upgrade_with_a_volatile_cache() {
    nothing_is_noticed("ram = \"8M\"");
}

/// A mounted filesystem stays usable, and open files remain valid.
#[test]
fn a_file_system_on_a_loop_device_stays_mounted() {
    let mut stage = Stage::persistent();
    let device = Loop::on(&stage.scratch.path("vm.img"), true);
    Tool::new("mkfs.ext4").args(["-q", "-F"]).arg(device.device()).run();
    let at = stage.scratch.path("mnt");
    let mounted = device.mount(&at, "discard");
    let written = at.join("written");
    let writer = fio(
        "inside",
        8,
        &[
            "--ioengine=psync".into(),
            "--fsync=16".into(),
            format!("--filename={}", written.display()),
            "--size=16m".into(),
        ],
    );
    let mut open = OpenOptions::new().write(true).create_new(true).open(at.join("log")).unwrap();
    for round in 0..3 {
        writeln!(open, "round {round}").unwrap();
        open.sync_all().unwrap();
        stage.upgrade();
        std::thread::sleep(Duration::from_millis(500));
    }
    ended_well(writer);
    drop(open);
    assert_eq!(fs::read_to_string(at.join("log")).unwrap(), "round 0\nround 1\nround 2\n");
    mounted.unmount();
    Tool::new("e2fsck").args(["-f", "-n", device.device()]).run();
    drop(device);
    stage.daemon.stop();
}

/// A guest on vhost-user-blk reconnects by itself.
#[test]
fn a_guest_reconnects_by_itself() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), 192 * MIB, 1);
    let mut hob = Serve::disk(&scratch.text("disk.img"))
        .cached(&scratch.path("pool"), "64M", "4K")
        .arg("--vhost-user", &scratch.text("vm.sock"))
        .start(&scratch);
    let machine = start_rounds(&scratch, &scratch.text("vm.sock"), 16, &[]);
    let reached = |round: u32| {
        let line = format!("GUEST-ROUND {round}\r\n");
        wait_until(&line, GUEST_MAX, || machine.stdout().contains(&line));
    };
    for round in [3, 7, 11] {
        reached(round);
        upgrade(&mut hob.process);
    }
    wait_until("the end", GUEST_MAX, || machine.stdout().contains(SENTINEL));
    let console = machine.stdout();
    for bad in ["GUEST-WRITE-FAILED", "GUEST-READ-", "GUEST-HAS-ERRORS", "I/O error"] {
        assert!(!console.contains(bad), "{bad}:\n{console}");
    }
    hob.stop();
}

/// After the new program has started in the daemon's process, an error would end the daemon.
#[test]
fn an_upgrade_is_refused_if_the_new_program_could_not_listen_or_join_its_cluster() {
    let mut stage = Stage::persistent();
    let mut client = stage.connect();
    let other_program = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp:{}", other_program.local_addr().unwrap());
    // 192.0.2.1 belongs to no host (RFC 5737).
    for address in [taken.as_str(), "tcp:192.0.2.1:45017", "unix:/proc/nbd.sock"] {
        stage.configure(&format!("[[nbd]]\nlisten = \"{address}\"\n"));
        stage.refused(&format!("cannot listen on {address}: "));
        client.read(0, 4096).unwrap();
    }
    let cluster = "[cluster]\netcd = [\"https://127.0.0.1:1\"]\nca = \"/missing.pem\"\n";
    stage.configure(cluster);
    stage.refused("/missing.pem");
    client.read(0, 4096).unwrap();
    stage.daemon.stop();
}

#[test]
fn a_listener_moves_to_another_address_of_its_port() {
    let mut stage = Stage::persistent();
    let mut client = stage.connect();
    let port = free_port();
    let listener = |host: &str| format!("[[nbd]]\nlisten = \"tcp:{host}:{port}\"\n");
    for host in ["127.0.0.1", "0.0.0.0", "127.0.0.1"] {
        stage.configure(&listener(host));
        stage.upgrade();
        client.read(0, 4096).unwrap();
        Client::connect(&Address::Tcp(port), "vm").unwrap().read(0, 4096).unwrap();
    }
    // A second listener cannot share the port.
    stage.configure(&["127.0.0.1", "0.0.0.0"].map(listener).concat());
    stage.refused(&format!("cannot listen on tcp:0.0.0.0:{port}: "));
    client.read(0, 4096).unwrap();
    stage.daemon.stop();
}

/// For example, another host has taken over a virtual address.
#[test]
fn a_listener_whose_address_the_host_has_lost_does_not_prevent_a_reload() {
    let mut stage = Stage::persistent();
    let mut client = stage.connect();
    // An address for documentation (RFC 5737).
    let ip = |verb: &str| Tool::new("ip").args(["addr", verb, "198.51.100.17/32", "dev", "lo"]).run();
    ip("replace");
    let listen = format!("tcp:198.51.100.17:{}", free_port());
    stage.configure(&format!("[[nbd]]\nlisten = \"{listen}\"\n"));
    stage.upgrade();
    ip("del");
    stage.upgrade();
    client.read(0, 4096).unwrap();
    stage.daemon.stop();
}

/// A client has sent a part of a request at the time of the upgrade. The daemon waits for the rest
/// for a limited time, and then disconnects only this client.
#[test]
fn an_upgrade_waits_for_a_partial_request_with_a_timeout() {
    assert!((0..5).any(|_| waits_for_a_partial_request()), "this test was always too late with its data");
}

/// Returns false if the host was too busy to send the rest of a request in time.
fn waits_for_a_partial_request() -> bool {
    let mut stage = Stage::persistent();
    let (mut quick, mut stuck, mut idle) = (stage.connect(), stage.connect(), stage.connect());
    let head = request(0, 1, 5, 4096, 8192);
    quick.raw().write_all(&[&head[..], &[1; 4000]].concat()).unwrap();
    stuck.raw().write_all(&[&head[..], &[2; 100]].concat()).unwrap();
    // A part of a header is passed to the next program.
    let read = request(0, 0, 6, 0, 512);
    idle.raw().write_all(&read[..11]).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let start = Instant::now();
    stage.daemon.process.signal(Signal::HUP);
    std::thread::sleep(Duration::from_millis(500));
    let rest = quick.raw().write_all(&[1; 8192 - 4000]);
    match rest.and_then(|()| quick.receive()) {
        Ok(reply) => assert_eq!(reply.error, 0),
        Err(error) => {
            assert!(start.elapsed() >= Duration::from_secs(2), "{error}");
            return false;
        }
    }
    let refusals = || stage.count("not upgraded");
    wait_until("the upgrade", UPGRADE_MAX, || stage.count("taking over ") == 1 || refusals() > 0);
    if refusals() > 0 {
        return false;
    }
    assert!(start.elapsed() >= Duration::from_secs(2), "the stuck one was given time");
    idle.raw().write_all(&read[11..]).unwrap();
    assert_eq!(idle.receive().unwrap().error, 0);
    let mut first = vec![0; 512];
    idle.take(&mut first).unwrap();
    assert_same(&first, &stage.scratch.read("disk.img")[..512], 0, "the first sector");
    assert_eq!(
        quick.read(4096, 8192).unwrap(),
        [1; 8192],
        "what was written counts, and what was not does not"
    );
    let mut end = [0];
    assert_eq!(stuck.raw().read(&mut end).unwrap_or(0), 0, "the stuck one is gone");
    // The negotiated options are still valid.
    assert_eq!(quick.call(0, 0, SIZE, 512, &[]).unwrap(), ERROR_INVALID);
    stage.daemon.stop();
    true
}

/// Connections that arrive between the end of one program and the start of the next wait for the
/// next program.
#[test]
fn no_client_is_refused_during_an_upgrade() {
    let mut stage = Stage::persistent();
    let (address, control) = (stage.scratch.nbd(), stage.scratch.path("ctl.sock"));
    let done = stage.scratch.path("done");
    let callers: Vec<_> = (0..2)
        .map(|which| {
            let (address, control, done) = (address.clone(), control.clone(), done.clone());
            std::thread::spawn(move || {
                let mut calls = 0;
                while !done.exists() {
                    if which == 0 {
                        let mut client = Client::connect(&address, "vm").expect("a place");
                        client.read(0, 4096).expect("a read");
                    } else {
                        UnixStream::connect(&control).expect("the control API listens");
                    }
                    calls += 1;
                }
                calls
            })
        })
        .collect();
    for _ in 0..3 {
        // A command might find the control socket's queue full of these connections.
        upgrade(&mut stage.daemon.process);
    }
    File::create(&done).unwrap();
    for caller in callers {
        assert!(caller.join().unwrap() > 0);
    }
    stage.daemon.stop();
}

/// No unwanted descriptor stays open, and no child process remains.
#[test]
fn descriptors_and_children_do_not_pile_up() {
    let mut stage = Stage::persistent();
    Tool::new("qemu-img").args(["create", "-f", "qcow2", &stage.scratch.text("q.qcow2"), "64M"]).run();
    stage.daemon.ctl(&["disk", "add", "q", "--backing", &stage.scratch.text("q.qcow2")]);
    let clients = [stage.connect(), stage.connect()];
    stage.upgrade();
    let count = |stage: &Stage| {
        // Descriptors that are opened and closed from time to time.
        let mut least = usize::MAX;
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(20));
            least = least.min(stage.descriptors());
        }
        (least, descendants(stage.daemon.process.pid()).len())
    };
    let is_served = |stage: &Stage| Client::connect(&stage.scratch.nbd(), "q").is_ok();
    wait_until("the qcow2 disk", UPGRADE_MAX, || is_served(&stage));
    let before = count(&stage);
    for _ in 0..5 {
        stage.upgrade();
    }
    wait_until("the qcow2 disk", UPGRADE_MAX, || is_served(&stage));
    // The qemu-nbd of the previous program may still be closing its image, also in the first count. If
    // each of the five upgrades left something, there would still be more than in that count.
    wait_until("no more descriptors and children than before", UPGRADE_MAX, || {
        let now = count(&stage);
        now.0 <= before.0 && now.1 <= before.1
    });
    drop(clients);
    stage.daemon.stop();
}

/// A program that cannot start, cannot take over or does not answer is refused, and clients do not
/// notice the attempt.
#[test]
fn a_program_that_cannot_take_over_is_refused_and_the_old_one_serves() {
    let mut stage = Stage::persistent();
    let program = stage.scratch.path("hob");
    let mut client = stage.connect();
    let file = File::open(stage.scratch.path("vm.img")).unwrap();
    let script = |text: &str| {
        let path = program.with_extension("script");
        // As in `install`.
        let write = "printf %s \"$0\" >\"$1\" && chmod 755 \"$1\"";
        Tool::new("sh").args(["-c", write, text]).arg(&path).run();
        fs::rename(&path, &program).unwrap();
    };
    let mut check = |stage: &mut Stage, wrong: &str| {
        stage.refused(wrong);
        assert_eq!(client.read(0, 4096).unwrap().len(), 4096);
        assert_eq!(file.read_at(&mut [0; 4096], 0).unwrap(), 4096);
        stage.daemon.ctl(&["disk", "list"]);
    };
    script("this is no program");
    check(&mut stage, "cannot be started");
    script("#!/bin/sh\necho hob: it misses a library >&2\nexit 1\n");
    check(&mut stage, "could not start: it misses a library");
    script("#!/bin/sh\necho can start, and takes over hand-overs of version 9\n");
    check(&mut stage, "restart the daemon instead");
    fs::remove_file(&program).unwrap();
    check(&mut stage, "cannot be started");
    install(&binary(), &program);
    stage.scratch.write_config(format!("nonsense = 1\n{}", stage.config));
    check(&mut stage, "could not start");
    stage.configure("");
    stage.upgrade();
    assert_eq!(stage.count("taking over "), 1, "{}", stage.log());
    stage.daemon.stop();
}

impl Stage {
    /// Adds a disk `far`, and returns its NBD server.
    fn add_far(&self) -> Process {
        noise_file(&self.scratch.path("other.img"), 16 * MIB, 3);
        let server = self.far_server();
        let uri = format!("nbd+unix:///d?socket={}", self.scratch.text("backing.sock"));
        self.daemon.ctl(&["disk", "add", "far", "--backing", &uri]);
        server
    }

    fn far_server(&self) -> Process {
        let socket = self.scratch.path("backing.sock");
        let server = Tool::new("qemu-nbd")
            .args(["--persistent", "--format=raw", "--export-name=d", "--socket", &text(&socket)])
            .arg(self.scratch.path("other.img"))
            .start();
        wait_until("the backing", UPGRADE_MAX, || is_listening(&socket));
        server
    }
}

/// The new program could not open a disk whose backing is unavailable, so the upgrade is refused, and
/// the requests that wait for the backing are kept.
#[test]
fn an_upgrade_is_refused_while_a_backing_is_unavailable() {
    let mut stage = Stage::persistent();
    let mut server = stage.add_far();
    let mut client = Client::connect(&stage.scratch.nbd(), "far").unwrap();
    server.kill();
    fs::remove_file(stage.scratch.path("backing.sock")).unwrap();
    client.raw().write_all(&request(0, 0, 1, 0, 4096)).unwrap();
    let mut near = stage.connect();
    std::thread::sleep(Duration::from_millis(300));
    stage.refused("disk far: its backing did not answer within");
    near.read(0, 4096).unwrap();
    let _server = stage.far_server();
    assert_eq!(client.receive().unwrap().error, 0);
    stage.daemon.stop();
}

/// A backing hangs, and its write-back cache serves the disk. The upgrade is refused before the cache
/// is closed, because the new program could not open the disk.
#[test]
fn an_upgrade_is_refused_while_a_cache_serves_a_disk_whose_backing_hangs() {
    let mut stage = Stage::persistent();
    let mut server = stage.add_far();
    let cache = ["cache", "enable", "far", "--pool", "p", "--size", "16M", "--mode", "write-back"];
    stage.daemon.ctl(&[&cache[..], &["--admission", "always", "--dirty-age-max", "0"]].concat());
    let mut client = Client::connect(&stage.scratch.nbd(), "far").unwrap();
    let mut noise = Noise::new(19);
    client.write(0, &noise.bytes(MIB as usize)).unwrap();
    client.flush().unwrap();
    server.signal(Signal::STOP);
    let data = noise.bytes(MIB as usize);
    client.write(0, &data).unwrap();
    client.flush().unwrap();
    stage.refused("disk far: its backing did not answer within");
    assert!(!stage.log().contains("closed without a flush of its backing"), "{}", stage.log());
    assert_same(&client.read(0, MIB as u32).unwrap(), &data, 0, "the cached data");
    let data = noise.bytes(MIB as usize);
    client.write(0, &data).unwrap();
    client.flush().unwrap();
    let health = stage.daemon.try_ctl(&["health"]).all();
    assert!(health.contains("did not answer within"), "{health}");
    server.signal(Signal::CONT);
    stage.upgrade();
    assert_same(&client.read(0, MIB as u32).unwrap(), &data, 0, "the data after the upgrade");
    stage.daemon.stop();
}

/// If the previous program's record is invalid, the daemon logs one line and starts normally.
#[test]
fn an_invalid_upgrade_record_is_ignored() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), MIB, 1);
    fs::write(scratch.path("noise"), "hob hand-over\r\n\0 and then something else").unwrap();
    let (nbd, noise) = (scratch.text("nbd.sock"), scratch.text("noise"));
    let serve = format!(
        "HOB_HAND_OVER=$$ exec {} serve --disk {} --listen unix:{nbd} --control unix:{} < {noise}",
        binary().display(),
        scratch.text("disk.img"),
        scratch.text("ctl.sock"),
    );
    let mut process = Process::start("hob serve", Command::new("sh").args(["-c", &serve])).unwrap();
    wait_until("the socket", UPGRADE_MAX, || PathBuf::from(&nbd).exists());
    Client::connect(&Address::Unix(nbd.clone().into()), "disk").unwrap().read(0, 4096).unwrap();
    let log = process.stderr();
    assert_eq!(log.matches("cannot take over the state").count(), 1, "{log}");
    process.signal(Signal::TERM);
    assert!(process.finish(UPGRADE_MAX).success());
}

/// TLS connections cannot be handed over: such clients are notified of the end and reconnect, to a
/// socket that stays open.
#[test]
fn tls_clients_reconnect_after_an_upgrade() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), 16 * MIB, 5);
    let authority = Authority::new("conformance");
    let (server, client) = (authority.server(scratch.dir()), authority.client(scratch.dir(), "host7"));
    let mut hob = Serve::disk(&scratch.text("disk.img"))
        .arg("--nbd-cert", &text(&server.cert))
        .arg("--nbd-key", &text(&server.key))
        .tcp()
        .start(&scratch);
    let Address::Tcp(port) = *hob.address() else { panic!("a TCP port") };
    let uri = format!("nbds://127.0.0.1:{port}/disk?tls-certificates={}", text(&client.dir));
    for _ in 0..2 {
        let mut reader = Tool::new("nbdcopy").args(["--requests=1", "--queue-size=1", &uri, "null:"]).start();
        upgrade(&mut hob.process);
        // The client may have finished before; otherwise it gets an error and does not hang.
        assert!(reader.wait(UPGRADE_MAX).is_some(), "a client inside TLS hangs");
        let size = Tool::new("nbdinfo").args(["--size", &uri]).run();
        assert_eq!(size.trim(), (16 * MIB).to_string());
    }
    hob.stop();
}

/// A stop is requested during an upgrade. The daemon ends as it would without the upgrade: its dirty
/// data is drained, and it leaves no sockets and no mounted file.
#[test]
fn a_stop_during_an_upgrade_ends_the_daemon_cleanly() {
    let settings = "mode = \"write-back\", dirty_age_max = 0, persistent = true";
    let data = Noise::new(11).bytes(MIB as usize);
    for pause in [0, 5, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100, 200] {
        let mut stage = Stage::new(settings, "drain_on_shutdown = true");
        let mut client = stage.connect();
        client.write(0, &data).unwrap();
        stage.daemon.process.signal(Signal::HUP);
        std::thread::sleep(Duration::from_millis(pause));
        stage.daemon.process.signal(Signal::TERM);
        let output = stage.daemon.process.finish(UPGRADE_MAX);
        assert!(output.success(), "after {pause} ms: {:?}: {}", output.status, output.stderr);
        for left in ["nbd.sock", "ctl.sock", "vm.img"] {
            assert!(!stage.scratch.path(left).exists(), "{left} after {pause} ms: {}", output.stderr);
        }
        let drained = &stage.scratch.read("disk.img")[..data.len()];
        assert_same(drained, &data, 0, &format!("the backing after {pause} ms, and what was written"));
    }
}

/// The configuration is read again, and decides the listening sockets.
#[test]
fn an_upgrade_follows_the_configuration() {
    let mut stage = Stage::persistent();
    let (old, new) = (stage.scratch.path("nbd.sock"), stage.scratch.path("other.sock"));
    let mut client = stage.connect();
    stage.scratch.write_config(stage.config.replace("/nbd.sock", "/other.sock"));
    stage.upgrade();
    wait_until("the old door to be shut", UPGRADE_MAX, || !old.exists());
    assert!(new.exists());
    client.read(0, 4096).unwrap();
    Client::connect(&Address::Unix(new), "vm").unwrap().read(0, 4096).unwrap();
    assert_same_file(&stage.scratch.path("vm.img"), &stage.scratch.path("disk.img"));
    stage.daemon.stop();
}
