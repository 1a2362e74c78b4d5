//! Two daemons on one host: A's dirty data has its second copy on B's flash. Whichever goes, nothing is lost.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use conformance::authority::{Authority, Files};
use conformance::data::Noise;
use conformance::nbd_client::{Address, Client};
use conformance::process::Output;
use conformance::scratch::{free_port, text, wait_until};
use conformance::tool::Tool;
use conformance::{Daemon, MIB, Scratch};
use rustix::process::Signal;

/// Size of the disk.
const DISK: u64 = 32 * MIB;

/// Unit of the tests' writes.
const PIECE: usize = 16 << 10;

/// Patience, where nothing is measured.
const SOON: Duration = Duration::from_secs(60);

/// One of the hosts.
struct Host {
    name: &'static str,
    port: u16,
    config: PathBuf,
    control: PathBuf,
    nbd: PathBuf,
    daemon: Option<Daemon>,
}

impl Host {
    fn new(scratch: &Scratch, authority: &Authority, name: &'static str, who: &Files) -> Host {
        let port = free_port();
        let server = authority.server(&scratch.path(name));
        let (config, control, nbd) = (
            scratch.path(&format!("{name}.toml")),
            scratch.path(&format!("{name}.ctl")),
            scratch.path(&format!("{name}.nbd")),
        );
        let pool = scratch.path(&format!("{name}.pool"));
        let said = format!(
            "state_dir = {:?}\nlisten = [\"unix:{}\"]\n[control]\n\
             listen = [\"unix:{}\", \"tcp:127.0.0.1:{port}\"]\n\
             tls = {{ cert = {:?}, key = {:?}, client_ca = {:?} }}\n\
             [[control.client]]\ncertificate = \"cn:host\"\nrole = \"admin\"\n\
             [[control.client]]\ncertificate = \"cn:other\"\nrole = \"admin\"\n\
             [migrate]\ncert = {:?}\nkey = {:?}\nca = {:?}\n\
             [peers]\nlend = {:?}\nlend_max = \"128M\"\nname = {name:?}\nwait_seconds = 1\n\
             [[pool]]\nname = \"fast\"\ndevices = [{pool:?}]\nsize = \"64M\"\nsegment_size = \"1M\"\n",
            scratch.path(&format!("{name}.state")),
            text(&nbd),
            text(&control),
            server.cert,
            server.key,
            server.ca,
            who.cert,
            who.key,
            who.ca,
            scratch.path(&format!("{name}.lent")),
        );
        std::fs::write(&config, said).unwrap();
        let mut host = Host { name, port, config, control, nbd, daemon: None };
        host.start();
        host
    }

    fn start(&mut self) {
        let _ = std::fs::remove_file(&self.control);
        let _ = std::fs::remove_file(&self.nbd);
        self.daemon = Some(Daemon::start(&self.config, &self.control));
    }

    fn kill(&mut self) {
        let mut daemon = self.daemon.take().expect("it runs");
        daemon.process.kill();
        eprintln!("--- {} was killed:\n{}", self.name, daemon.process.stderr());
    }

    fn signal(&mut self, signal: Signal) {
        self.daemon.as_mut().expect("it runs").process.signal(signal);
    }

    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("it runs")
    }

    #[track_caller]
    fn ctl(&self, args: &[&str]) -> String {
        self.daemon().ctl(args)
    }

    fn try_ctl(&self, args: &[&str]) -> Output {
        self.daemon().try_ctl(args)
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    #[track_caller]
    fn connect(&self) -> Client {
        Client::connect(&Address::Unix(self.nbd.clone()), "vm")
            .unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    fn json(&self, args: &[&str]) -> serde_json::Value {
        let output = self.try_ctl(&[args, &["-o", "json"]].concat());
        if output.success() {
            serde_json::from_str(&output.stdout).expect("JSON")
        } else {
            serde_json::Value::Null
        }
    }

    /// What it has borrowed: the first of that.
    fn borrowed(&self) -> serde_json::Value {
        self.json(&["peer", "list"])["borrowed"][0].clone()
    }

    /// Are second copies of the disk made at a peer that is there?
    fn is_doubled(&self) -> bool {
        let borrowed = self.borrowed();
        borrowed["state"] == "online" && borrowed["disks"][0] == "vm"
    }

    fn dirty_bytes(&self) -> u64 {
        self.json(&["stats", "vm"])["dirty_bytes"].as_u64().unwrap_or(0)
    }
}

/// Both, and the disk with its data.
struct Stage {
    scratch: Scratch,
    a: Host,
    b: Host,
    /// What a guest has written.
    data: Vec<u8>,
    /// Where.
    written: HashSet<usize>,
    noise: Noise,
    authority: Authority,
}

impl Stage {
    /// A has a disk whose second copies are at B, and which destages nothing by itself.
    fn new() -> Stage {
        let scratch = Scratch::new();
        let authority = Authority::new("hosts");
        let who = authority.client(scratch.dir(), "host");
        let a = Host::new(&scratch, &authority, "a", &who);
        let b = Host::new(&scratch, &authority, "b", &who);
        let mut noise = Noise::new(7);
        let data = noise.bytes(DISK as usize);
        std::fs::write(scratch.path("vm.raw"), &data).unwrap();
        a.ctl(&["disk", "add", "vm", "--backing", &scratch.text("vm.raw")]);
        let stage = Stage { scratch, a, b, data, written: HashSet::new(), noise, authority };
        stage.a.ctl(&["pool", "add-device", "fast", "--peer", &stage.b.address(), "--size", "64M"]);
        let enabled = stage.a.ctl(&[
            "cache",
            "enable",
            "vm",
            "--pool",
            "fast",
            "--size",
            "24M",
            "--block-size",
            "16K",
            "--mode",
            "write-back",
            "--copies",
            "peer",
            "--dirty-start",
            "90",
            "--dirty-stop",
            "90",
            "--dirty-full",
            "95",
            "--dirty-age-max",
            "0",
        ]);
        eprintln!("{enabled}\n{}", stage.a.ctl(&["peer", "list"]));
        assert!(stage.a.is_doubled(), "{}", stage.a.borrowed());
        stage
    }

    fn write_some(&mut self, client: &mut Client, count: usize) {
        for _ in 0..count {
            let at = self.noise.below(DISK / 2 / PIECE as u64) as usize * PIECE;
            let bytes = self.noise.bytes(PIECE);
            client.write(at as u64, &bytes).expect("a write");
            self.data[at..at + PIECE].copy_from_slice(&bytes);
            self.written.insert(at);
        }
    }

    #[track_caller]
    fn read_all(&self, client: &mut Client) {
        for at in (0..DISK as usize).step_by(PIECE) {
            let bytes = client.read(at as u64, PIECE as u32).expect("a read");
            assert!(bytes == self.data[at..at + PIECE], "other bytes at {at}");
        }
    }

    /// The file that B lends.
    fn lent(&self) -> PathBuf {
        let path = self.b.json(&["peer", "list"])["lent"][0]["path"].as_str().map(PathBuf::from);
        path.unwrap_or_else(|| {
            let mut files =
                std::fs::read_dir(self.scratch.path("b.lent")).unwrap().map(|file| file.unwrap().path());
            files.find(|path| path.extension().is_some_and(|it| it == "dev")).expect("a file is lent")
        })
    }

    /// Sectors that the guest wrote and that are not in B's file.
    fn missing_at_b(&self) -> usize {
        let file = std::fs::read(self.lent()).unwrap();
        let there: HashSet<&[u8]> = file.chunks_exact(4096).collect();
        let sectors = self.written.iter().flat_map(|at| self.data[*at..at + PIECE].chunks_exact(4096));
        sectors.filter(|sector| !there.contains(sector)).count()
    }

    #[track_caller]
    fn check_backing(&self) {
        self.a.ctl(&["drain", "vm"]);
        wait_until("nothing is dirty", SOON, || self.a.dirty_bytes() == 0);
        assert!(std::fs::read(self.scratch.path("vm.raw")).unwrap() == self.data, "the backing has it all");
    }
}

/// What was flushed is at B; A's flash may go, and its data comes from there.
#[test]
fn what_was_flushed_is_at_the_peer_and_comes_back_from_there() {
    let mut stage = Stage::new();
    let mut guest = stage.a.connect();
    stage.write_some(&mut guest, 300);
    guest.flush().expect("a flush");
    assert_eq!(stage.missing_at_b(), 0);
    assert!(stage.a.dirty_bytes() > 2 * MIB, "{}", stage.a.dirty_bytes());
    assert!(std::fs::read(stage.scratch.path("vm.raw")).unwrap() != stage.data, "the backing lags");
    assert!(stage.missing_at_b() == 0 && stage.a.is_doubled());
    // A is killed, and its flash is gone when it is back.
    stage.a.kill();
    std::fs::remove_file(stage.scratch.path("a.pool")).unwrap();
    stage.a.start();
    wait_until("the disk is back", SOON, || stage.a.json(&["disk", "show", "vm"])["state"] == "online");
    let mut guest = stage.a.connect();
    stage.read_all(&mut guest);
    stage.check_backing();
}

/// The same while nothing is lost but both daemons, at once.
#[test]
fn both_daemons_may_end_at_once() {
    let mut stage = Stage::new();
    let mut guest = stage.a.connect();
    stage.write_some(&mut guest, 200);
    guest.flush().expect("a flush");
    stage.a.kill();
    stage.b.kill();
    stage.b.start();
    stage.a.start();
    wait_until("the disk is back", SOON, || stage.a.json(&["disk", "show", "vm"])["state"] == "online");
    let mut guest = stage.a.connect();
    stage.read_all(&mut guest);
    wait_until("second copies are made again", SOON, || stage.a.is_doubled());
    stage.write_some(&mut guest, 50);
    guest.flush().expect("a flush");
    assert_eq!(stage.missing_at_b(), 0);
    stage.check_backing();
}

/// B goes: A's guest waits for as long as A is patient, goes on, and says so; B comes back, and what is dirty is doubled again.
#[test]
fn a_lender_that_dies_is_given_up_and_taken_again() {
    let mut stage = Stage::new();
    let mut guest = stage.a.connect();
    stage.write_some(&mut guest, 100);
    guest.flush().expect("a flush");
    stage.b.kill();
    let began = Instant::now();
    stage.write_some(&mut guest, 1);
    guest.flush().expect("a flush without the peer");
    let waited = began.elapsed();
    eprintln!("the first write without the peer waited {waited:?}");
    assert!(waited < Duration::from_secs(10), "{waited:?}");
    stage.write_some(&mut guest, 50);
    guest.flush().expect("a flush without the peer");
    stage.read_all(&mut guest);
    let shown = stage.a.borrowed();
    assert_eq!(shown["state"], "fenced", "{shown}");
    assert!(shown["reason"].as_str().unwrap().contains("does not answer"), "{shown}");
    let health = stage.a.try_ctl(&["health"]).all();
    assert!(health.contains("does not answer"), "{health}");
    // A restarts without it: its own flash is enough.
    stage.a.kill();
    stage.a.start();
    wait_until("the disk is back", SOON, || stage.a.json(&["disk", "show", "vm"])["state"] == "online");
    let mut guest = stage.a.connect();
    stage.read_all(&mut guest);
    stage.b.start();
    wait_until("second copies are made again", SOON, || stage.a.is_doubled());
    stage.write_some(&mut guest, 50);
    guest.flush().expect("a flush with the peer again");
    stage.read_all(&mut guest);
    stage.check_backing();
}

/// B is stopped for longer than A is patient, and goes on as if nothing had been: A does not believe it any more.
#[test]
fn a_lender_that_was_paused_is_made_anew() {
    let mut stage = Stage::new();
    let mut guest = stage.a.connect();
    stage.write_some(&mut guest, 100);
    guest.flush().expect("a flush");
    stage.b.signal(Signal::STOP);
    stage.write_some(&mut guest, 50);
    guest.flush().expect("a flush without the peer");
    stage.b.signal(Signal::CONT);
    wait_until("second copies are made again", SOON, || stage.a.is_doubled());
    stage.write_some(&mut guest, 50);
    guest.flush().expect("a flush with the peer again");
    stage.read_all(&mut guest);
    stage.check_backing();
}

/// A short break of the link costs a pause, nothing else.
#[test]
fn a_short_pause_is_waited_for() {
    let mut stage = Stage::new();
    let mut guest = stage.a.connect();
    stage.write_some(&mut guest, 20);
    stage.b.signal(Signal::STOP);
    let b = stage.b.daemon().process.pid();
    let waker = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(400));
        let pid = rustix::process::Pid::from_raw(b as i32).expect("a process");
        rustix::process::kill_process(pid, Signal::CONT).expect("it is there");
    });
    let began = Instant::now();
    stage.write_some(&mut guest, 1);
    guest.flush().expect("a flush");
    assert!(began.elapsed() >= Duration::from_millis(300), "{:?}", began.elapsed());
    waker.join().unwrap();
    stage.write_some(&mut guest, 20);
    guest.flush().expect("a flush");
    assert!(stage.a.is_doubled(), "{}", stage.a.borrowed());
    assert_eq!(stage.missing_at_b(), 0);
    stage.read_all(&mut guest);
}

/// B's operator ends the loan, A goes on; A gives a loan back, and B has its room again.
#[test]
fn loans_end_from_both_sides() {
    let mut stage = Stage::new();
    let mut guest = stage.a.connect();
    stage.write_some(&mut guest, 50);
    guest.flush().expect("a flush");
    let borrower = stage.b.json(&["peer", "list"])["lent"][0]["borrower"].as_str().unwrap().to_owned();
    stage.b.ctl(&["peer", "end", &borrower]);
    stage.write_some(&mut guest, 50);
    guest.flush().expect("a flush without the peer");
    stage.read_all(&mut guest);
    // It gets no other one, however often it asks, before it may; then it has it by itself.
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(stage.a.borrowed()["state"], "fenced");
    assert_eq!(stage.b.json(&["peer", "list"])["lent"][0]["state"], "ended");
    stage.b.ctl(&["peer", "end", &borrower, "--forget"]);
    wait_until("second copies are made again", SOON, || stage.a.is_doubled());
    stage.write_some(&mut guest, 50);
    guest.flush().expect("a flush with the peer again");
    // Given back: the cache is told to do without first.
    let device = stage.a.borrowed()["path"].as_str().unwrap().to_owned();
    stage.a.ctl(&["cache", "set", "vm", "--copies", "1"]);
    stage.a.ctl(&["pool", "remove-device", "fast", &device]);
    assert_eq!(stage.b.json(&["peer", "list"])["lent"], serde_json::json!([]));
    stage.write_some(&mut guest, 50);
    stage.read_all(&mut guest);
    stage.check_backing();
}

/// Who may not, cannot; what cannot be, is refused in one line.
#[test]
fn what_cannot_be_is_refused() {
    let stage = Stage::new();
    let (a, b) = (&stage.a, &stage.b);
    let refused = |args: &[&str], part: &str| {
        let output = a.try_ctl(args);
        assert!(!output.success() && output.stderr.contains(part), "{args:?}: {}", output.all());
    };
    refused(&["pool", "add-device", "fast", "--peer", &b.address(), "--size", "64M"], "already");
    refused(&["pool", "add-device", "fast", "--peer", &b.address()], "--size");
    refused(&["cache", "set", "vm", "--mode", "write-through"], "write-back");
    // Somebody else's certificate.
    let other = stage.authority.client(stage.scratch.dir(), "other");
    let borrower = b.json(&["peer", "list"])["lent"][0]["borrower"].as_str().unwrap().to_owned();
    let url = format!("https://{}/v1/loans/{borrower}", b.address());
    let asked = Tool::new("curl")
        .args(["-s", "--cacert", &text(&other.ca), "--cert", &text(&other.cert), "--key", &text(&other.key)])
        .args([
            "-X",
            "POST",
            "-H",
            "content-type: application/json",
            "-d",
            r#"{"name":"x","size":"64M"}"#,
            &url,
        ])
        .output();
    let said = asked.all();
    assert!(said.contains("another certificate"), "{said}");
}
