//! Two hosts of a cluster, with a real etcd: A's dirty data has its second copy on B's flash, A is lost, and B adopts the disk
//! (docs/decisions/0023). The backing is somebody else's NBD server, which locks nothing.

use std::collections::HashSet;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use conformance::authority::{Authority, Files};
use conformance::data::Noise;
use conformance::nbd_client::{Address, Client};
use conformance::process::Process;
use conformance::scratch::{free_port, text, wait_until};
use conformance::{Daemon, Etcd, MIB, Scratch, Tool};
use serde_json::Value;

/// Size of the disk.
const DISK: u64 = 32 * MIB;

/// Unit of the tests' writes.
const PIECE: usize = 16 << 10;

/// Patience, where nothing is measured.
const SOON: Duration = Duration::from_secs(60);

const LEASE_SECONDS: u64 = 3;
const SETTLE_SECONDS: u64 = 1;

/// One of the hosts.
struct Side {
    name: &'static str,
    port: u16,
    config: PathBuf,
    control: PathBuf,
    nbd: PathBuf,
    daemon: Option<Daemon>,
}

impl Side {
    fn new(stage: &Scratch, etcd: &Etcd, authority: &Authority, who: &Files, name: &'static str) -> Side {
        let port = free_port();
        let server = authority.server(&stage.path(name));
        let path = |what: &str| stage.path(&format!("{name}.{what}"));
        let (config, control, nbd) = (path("toml"), path("ctl"), path("nbd"));
        let said = format!(
            "state_dir = {:?}\nlisten = [\"unix:{}\"]\n[control]\n\
             listen = [\"unix:{}\", \"tcp:127.0.0.1:{port}\"]\n\
             tls = {{ cert = {:?}, key = {:?}, client_ca = {:?} }}\n\
             [[control.client]]\ncertificate = \"cn:host\"\nrole = \"admin\"\n\
             [migrate]\ncert = {:?}\nkey = {:?}\nca = {:?}\n\
             [peers]\nlend = {:?}\nlend_max = \"128M\"\nwait_seconds = 1\n\
             [cluster]\netcd = {}\nhost = {name:?}\nlease_seconds = {LEASE_SECONDS}\nsettle_seconds = {SETTLE_SECONDS}\n\
             [[pool]]\nname = \"fast\"\ndevices = [{:?}]\nsize = \"64M\"\nsegment_size = \"1M\"\n\
             [[disk]]\nname = \"vm\"\nbacking = \"nbd+unix:///?socket={}\"\n",
            path("state"),
            text(&nbd),
            text(&control),
            server.cert,
            server.key,
            server.ca,
            who.cert,
            who.key,
            who.ca,
            path("lent"),
            etcd.endpoints(),
            path("pool"),
            stage.text("backing.sock"),
        );
        std::fs::write(&config, said).unwrap();
        let mut side = Side { name, port, config, control, nbd, daemon: None };
        side.start();
        side
    }

    #[track_caller]
    fn start(&mut self) {
        let _ = std::fs::remove_file(&self.control);
        let _ = std::fs::remove_file(&self.nbd);
        self.daemon = Some(Daemon::start(&self.config, &self.control));
    }

    /// What it said until then.
    fn kill(&mut self) -> String {
        let mut daemon = self.daemon.take().expect("it runs");
        daemon.process.kill();
        let said = daemon.process.stderr();
        eprintln!("--- {} was killed:\n{said}", self.name);
        said
    }

    fn ctl(&self, args: &[&str]) -> String {
        self.daemon.as_ref().expect("it runs").ctl(args)
    }

    fn json(&self, args: &[&str]) -> Value {
        let output = self.daemon.as_ref().expect("it runs").try_ctl(&[args, &["-o", "json"]].concat());
        if output.success() { serde_json::from_str(&output.stdout).expect("JSON") } else { Value::Null }
    }

    fn reason(&self) -> String {
        self.json(&["disk", "show", "vm"])["reason"].as_str().unwrap_or_default().to_owned()
    }

    fn is_serving(&self) -> bool {
        self.json(&["disk", "show", "vm"])["state"] == "online"
    }

    #[track_caller]
    fn wait_until_serving(&self) {
        wait_until("the disk to be served", SOON, || self.is_serving());
    }

    /// The disk, as the cluster knows it.
    fn title(&self) -> Value {
        self.json(&["cluster", "disks"])[0].clone()
    }

    #[track_caller]
    fn connect(&self) -> Client {
        Client::connect(&Address::Unix(self.nbd.clone()), "vm")
            .unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }
}

/// Both, and the disk with its data.
struct Stage {
    a: Side,
    b: Side,
    /// What a guest reads.
    data: Vec<u8>,
    /// What the backing had in the beginning.
    old: Vec<u8>,
    written: HashSet<usize>,
    noise: Noise,
    _server: Process,
    _authority: Authority,
    _etcd: Etcd,
    scratch: Scratch,
}

impl Stage {
    /// A has the disk with second copies of what is dirty at B, has acknowledged flushed writes, and destages nothing by itself.
    fn new() -> Stage {
        let scratch = Scratch::new();
        let mut noise = Noise::new(11);
        let old = noise.bytes(DISK as usize);
        std::fs::write(scratch.path("disk.img"), &old).unwrap();
        // Slow enough to be interrupted.
        let server = Tool::new("nbdkit")
            .args(["--foreground", "--unix", &scratch.text("backing.sock"), "--filter", "delay"])
            .args(["file", &scratch.text("disk.img"), "wdelay=150ms"])
            .start();
        wait_until("nbdkit's socket", SOON, || scratch.path("backing.sock").exists());
        let (etcd, authority) = (Etcd::start(1), Authority::new("hosts"));
        let who = authority.client(scratch.dir(), "host");
        let a = Side::new(&scratch, &etcd, &authority, &who, "a");
        a.wait_until_serving();
        let b = Side::new(&scratch, &etcd, &authority, &who, "b");
        a.ctl(&["pool", "add-device", "fast", "--peer", &format!("127.0.0.1:{}", b.port), "--size", "64M"]);
        let settings = "--pool fast --size 24M --block-size 16K --mode write-back --copies peer --dirty-start 90 \
                        --dirty-stop 90 --dirty-full 95 --dirty-age-max 0";
        a.ctl(&[&["cache", "enable", "vm"], &settings.split_whitespace().collect::<Vec<_>>()[..]].concat());
        let mut stage = Stage {
            a,
            b,
            data: old.clone(),
            old,
            written: HashSet::new(),
            noise,
            _server: server,
            _authority: authority,
            _etcd: etcd,
            scratch,
        };
        let mut guest = stage.a.connect();
        stage.write_some(&mut guest, 200);
        guest.flush().expect("a flush");
        wait_until("etcd to know of the second copy", SOON, || stage.a.title()["copy"] == "b");
        // Also what becomes dirty later.
        stage.write_some(&mut guest, 100);
        guest.flush().expect("a flush");
        let title = stage.a.title();
        assert_eq!((&title["copy"], &title["dirty"]), (&"b".into(), &true.into()), "{title}");
        assert!(stage.image() == stage.old, "it is in flash only");
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

    fn image(&self) -> Vec<u8> {
        std::fs::read(self.scratch.path("disk.img")).unwrap()
    }

    /// The file that B lends.
    fn lent(&self) -> PathBuf {
        let mut files =
            std::fs::read_dir(self.scratch.path("b.lent")).unwrap().map(|file| file.unwrap().path());
        files.find(|path| path.extension().is_some_and(|it| it == "dev")).expect("a file is lent")
    }
}

#[test]
fn a_host_that_is_lost_with_its_flash_loses_nothing_that_its_peer_has() {
    let mut stage = Stage::new();
    stage.a.kill();
    let killed = Instant::now();
    std::fs::remove_file(stage.scratch.path("a.pool")).unwrap();
    std::fs::remove_dir_all(stage.scratch.path("a.state")).unwrap();
    let mut reasons = HashSet::new();
    wait_until("b to serve the disk", SOON, || {
        reasons.insert(stage.b.reason());
        stage.b.is_serving()
    });
    println!(
        "{} KiB were adopted and served after {:?}",
        stage.written.len() * PIECE / 1024,
        killed.elapsed()
    );
    assert!(
        reasons.iter().any(|it| it.contains("brought to the backing") && it.contains('%')),
        "{reasons:?}"
    );
    assert!(stage.image() == stage.data, "the backing has everything");
    stage.read_all(&mut stage.b.connect());
    let title = stage.b.title();
    let seen = (&title["host"], &title["generation"], &title["dirty"], &title["state"], &title["copy"]);
    assert_eq!(seen, (&"b".into(), &2.into(), &false.into(), &"held".into(), &Value::Null), "{title}");
    // It is a disk like any other.
    let mut guest = stage.b.connect();
    stage.write_some(&mut guest, 20);
    guest.flush().expect("a flush");
    stage.read_all(&mut guest);
}

#[test]
fn a_host_that_comes_back_drops_what_was_adopted() {
    let mut stage = Stage::new();
    stage.a.kill();
    stage.b.wait_until_serving();
    let mut guest = stage.b.connect();
    stage.write_some(&mut guest, 100);
    guest.flush().expect("a flush");
    drop(guest);
    stage.a.start();
    wait_until("a to know who has it", SOON, || stage.a.reason().contains("b has it"));
    stage.b.ctl(&["disk", "remove", "vm"]);
    stage.a.wait_until_serving();
    stage.read_all(&mut stage.a.connect());
    stage.a.ctl(&["drain", "vm"]);
    assert!(stage.image() == stage.data, "nothing old was written");
    let said = stage.a.kill();
    assert!(said.contains("outdated and dropped"), "it says so");
}

#[test]
fn an_adopter_that_is_killed_in_the_middle_begins_anew() {
    let mut stage = Stage::new();
    stage.a.kill();
    wait_until("b to have begun", SOON, || stage.image() != stage.old);
    stage.b.kill();
    let image = stage.image();
    assert!(image != stage.data && image != stage.old, "it was in the middle");
    // Now the first owner's flash counts no more, though it is there.
    stage.a.start();
    wait_until("a to know who has its data", SOON, || stage.a.reason().contains("flash of b"));
    stage.b.start();
    stage.b.wait_until_serving();
    stage.read_all(&mut stage.b.connect());
    assert!(stage.image() == stage.data, "the backing has everything");
}

#[test]
fn a_copy_that_is_damaged_is_not_used_in_part() {
    let mut stage = Stage::new();
    stage.a.kill();
    // One sector of all.
    let at = *stage.written.iter().min().unwrap();
    let sector = &stage.data[at..at + 4096];
    let bytes = std::fs::read(stage.lent()).unwrap();
    let places: Vec<usize> =
        (0..bytes.len()).step_by(4096).filter(|it| &bytes[*it..*it + 4096] == sector).collect();
    assert!(!places.is_empty());
    let file = std::fs::OpenOptions::new().write(true).open(stage.lent()).unwrap();
    places.iter().for_each(|place| file.write_all_at(&[0x55; 512], *place as u64 + 1024).unwrap());
    file.sync_all().unwrap();
    wait_until("b to say so", SOON, || stage.b.reason().contains("cannot be used"));
    let reason = stage.b.reason();
    assert!(reason.contains("checksum") && reason.contains("--force"), "{reason}");
    assert!(stage.image() == stage.old && !stage.b.is_serving(), "the backing is as it was");
    // Its first owner has it all.
    stage.a.start();
    stage.a.wait_until_serving();
    stage.read_all(&mut stage.a.connect());
}
