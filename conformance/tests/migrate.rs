//! Two daemons on one host, one backing, and a disk that moves from one to the other with its cache.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use conformance::authority::{Authority, Files};
use conformance::data::Noise;
use conformance::nbd_client::{Address, Client};
use conformance::process::Output;
use conformance::scratch::{free_port, text, wait_until};
use conformance::{Daemon, MIB, Scratch};

/// Size of the disk.
const DISK: u64 = 32 * MIB;

/// Unit of the tests' reads and writes.
const PIECE: usize = 16 << 10;

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
    fn new(scratch: &Scratch, authority: &Authority, name: &'static str, who: &Files, role: &str) -> Host {
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
             [[control.client]]\ncertificate = \"cn:host\"\nrole = \"{role}\"\n\
             [migrate]\ncert = {:?}\nkey = {:?}\nca = {:?}\n\
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

    fn json(&self, args: &[&str]) -> Option<serde_json::Value> {
        let output = self.try_ctl(&[args, &["-o", "json"]].concat());
        output.success().then(|| serde_json::from_str(&output.stdout).expect("JSON"))
    }

    fn migration(&self) -> serde_json::Value {
        self.json(&["migrate", "vm"]).unwrap_or_default()
    }

    fn disk_state(&self) -> String {
        let shown = self.json(&["disk", "show", "vm"]).unwrap_or_default();
        shown["state"].as_str().unwrap_or("absent").to_owned()
    }
}

/// Both, and the disk with its data.
struct Stage {
    scratch: Scratch,
    a: Host,
    b: Host,
    /// What a guest has written.
    data: Vec<u8>,
    noise: Noise,
}

impl Stage {
    fn new(mode: &str, role: &str) -> Stage {
        let scratch = Scratch::new();
        let authority = Authority::new("hosts");
        let who = authority.client(scratch.dir(), "host");
        let a = Host::new(&scratch, &authority, "a", &who, "admin");
        let b = Host::new(&scratch, &authority, "b", &who, role);
        let mut noise = Noise::new(7);
        let data = noise.bytes(DISK as usize);
        std::fs::write(scratch.path("vm.raw"), &data).unwrap();
        a.ctl(&["disk", "add", "vm", "--backing", &scratch.text("vm.raw")]);
        a.ctl(&[
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
            mode,
        ]);
        Stage { scratch, a, b, data, noise }
    }

    fn write(&mut self, client: &mut Client, at: usize) {
        let bytes = self.noise.bytes(PIECE);
        client.write(at as u64, &bytes).expect("a write");
        self.data[at..at + PIECE].copy_from_slice(&bytes);
    }

    fn write_some(&mut self, client: &mut Client, count: usize, span: usize) {
        for _ in 0..count {
            let at = self.noise.below((span / PIECE) as u64) as usize * PIECE;
            self.write(client, at);
        }
    }

    #[track_caller]
    fn read(&self, client: &mut Client, at: usize) {
        let bytes = client.read(at as u64, PIECE as u32).expect("a read");
        assert!(bytes == self.data[at..at + PIECE], "other bytes at {at}");
    }

    #[track_caller]
    fn read_all(&self, client: &mut Client, span: usize) {
        for at in (0..span).step_by(PIECE) {
            self.read(client, at);
        }
    }

    fn migrate(&self, more: &[&str]) -> Output {
        self.a.try_ctl(&[&["migrate", "vm", "--to", &self.b.address()], more].concat())
    }

    #[track_caller]
    fn migrated(&self, more: &[&str]) -> serde_json::Value {
        let output = self.migrate(&[more, &["-o", "json"]].concat());
        assert!(output.success(), "{}", output.all());
        serde_json::from_str(&output.stdout).expect("JSON")
    }
}

/// Share of the reads that were hits, of what was warm before.
fn hit_ratio(host: &Host, work: impl FnOnce()) -> f64 {
    let (hits, misses) = counted(host);
    work();
    let (hits_after, misses_after) = counted(host);
    let (hits, misses) = (hits_after - hits, misses_after - misses);
    hits as f64 / (hits + misses).max(1) as f64
}

fn counted(host: &Host) -> (u64, u64) {
    let stats = host.daemon().stats("vm");
    (stats.hits(), stats.misses())
}

const WARM: usize = 8 << 20;

fn bytes(of: &serde_json::Value, field: &str) -> f64 {
    of[field].as_f64().unwrap_or_else(|| panic!("no {field} in {of}"))
}

/// A guest on A, a hand-over by its first write on B, and the hit ratio there.
fn move_with(mode: &str, cache: &str) -> (serde_json::Value, f64) {
    let mut stage = Stage::new(mode, "admin");
    let mut on_a = stage.a.connect();
    stage.write_some(&mut on_a, 100, WARM);
    stage.read_all(&mut on_a, WARM);
    stage.read_all(&mut on_a, WARM);
    let shown = stage.migrated(&["--cache", cache, "--wait", "warm"]);
    assert_eq!(shown["state"], "copying", "{shown}");
    assert_eq!(stage.b.disk_state(), "awaited");
    assert_eq!(stage.a.disk_state(), "online");
    // The guest goes on, and what it changes is changed there too.
    stage.write_some(&mut on_a, 20, WARM);
    let mut on_b = stage.b.connect();
    stage.read(&mut on_b, 0);
    stage.read(&mut on_b, WARM);
    drop(on_a);
    let began = Instant::now();
    stage.write(&mut on_b, 3 * PIECE);
    eprintln!("{cache}: the first write waited {:?}", began.elapsed());
    let ratio = hit_ratio(&stage.b, || stage.read_all(&mut on_b, WARM));
    stage.read_all(&mut on_b, DISK as usize);
    let over = stage.a.try_ctl(&["migrate", "vm", "--wait", "over", "-o", "json"]);
    assert!(over.success(), "{}", over.all());
    let over: serde_json::Value = serde_json::from_str(&over.stdout).unwrap();
    assert_eq!(over["state"], "over", "{over}");
    assert_eq!(stage.a.disk_state(), "away");
    wait_until("B has it", Duration::from_secs(10), || stage.b.disk_state() == "online");
    let cache_mode = stage.b.json(&["disk", "show", "vm"]).unwrap()["cache"]["mode"].clone();
    assert_eq!(cache_mode, mode);
    // A tombstone serves nobody and keeps nothing.
    let pool = stage.a.json(&["pool", "show", "fast"]).unwrap();
    assert_eq!(pool["free"], pool["size"], "{pool}");
    assert!(!stage.a.try_ctl(&["cache", "enable", "vm", "--pool", "fast", "--size", "8M"]).success());
    stage.b.ctl(&["drain", "vm"]);
    drop(on_b);
    assert!(std::fs::read(stage.scratch.path("vm.raw")).unwrap() == stage.data, "the backing has it all");
    eprintln!("{cache}: {over}\nB: {}\nhit ratio {ratio}", stage.b.migration());
    (over, ratio)
}

#[test]
fn a_disk_moves_and_leaves_its_cache() {
    let (over, ratio) = move_with("write-back", "drop");
    assert_eq!(bytes(&over, "pulled"), 0.0);
    assert!(ratio < 0.2, "{ratio}");
}

#[test]
fn a_copied_cache_serves_at_the_other_host() {
    let (over, ratio) = move_with("write-back", "copy");
    assert!(ratio >= 0.95, "{ratio}");
    let bound = 1.05 * bytes(&over, "valid") + bytes(&over, "resent") + 256.0 * 1024.0;
    assert!(bytes(&over, "sent") <= bound, "{over}");
}

#[test]
fn a_remote_cache_serves_from_the_host_that_had_the_disk() {
    let (over, _) = move_with("write-through", "remote");
    assert!(bytes(&over, "sent") > 0.0, "{over}");
}

#[test]
fn a_heat_map_brings_the_cache_from_the_backing() {
    let mut stage = Stage::new("write-through", "admin");
    let mut on_a = stage.a.connect();
    stage.write_some(&mut on_a, 10, WARM);
    stage.read_all(&mut on_a, WARM);
    stage.read_all(&mut on_a, WARM);
    drop(on_a);
    stage.migrated(&["--cache", "heat-map", "--wait", "warm"]);
    let over = stage.a.ctl(&["migrate", "vm", "--finish", "--wait", "over", "-o", "json"]);
    let over: serde_json::Value = serde_json::from_str(&over).unwrap();
    assert!(bytes(&over, "sent") < 64.0 * 1024.0, "{over}");
    wait_until("the cache is there", Duration::from_secs(20), || stage.b.migration()["state"] == "over");
    let mut on_b = stage.b.connect();
    let ratio = hit_ratio(&stage.b, || stage.read_all(&mut on_b, WARM));
    assert!(ratio > 0.95, "{ratio}");
}

#[test]
fn a_disk_comes_back_and_can_be_kept_and_taken_back() {
    let mut stage = Stage::new("write-back", "admin");
    let mut on_a = stage.a.connect();
    stage.write_some(&mut on_a, 50, WARM);
    drop(on_a);
    stage.migrated(&["--switch", "ask", "--wait", "warm"]);
    let kept = stage.a.ctl(&["migrate", "vm", "--cancel", "-o", "json"]);
    assert!(kept.contains("\"kept\""), "{kept}");
    wait_until("B gave it up", Duration::from_secs(10), || stage.b.disk_state() == "absent");
    let mode = stage.a.json(&["disk", "show", "vm"]).unwrap()["cache"]["mode"].clone();
    assert_eq!(mode, "write-back");
    stage.migrated(&["--wait", "warm"]);
    stage.a.ctl(&["migrate", "vm", "--finish", "--wait", "over"]);
    let mut on_b = stage.b.connect();
    stage.write_some(&mut on_b, 50, WARM);
    stage.read_all(&mut on_b, WARM);
    drop(on_b);
    // And back.
    let there = stage.a.address();
    stage.b.ctl(&["migrate", "vm", "--to", &there, "--wait", "warm"]);
    stage.b.ctl(&["migrate", "vm", "--finish", "--wait", "over"]);
    let mut on_a = stage.a.connect();
    stage.read_all(&mut on_a, DISK as usize);
    stage.write_some(&mut on_a, 20, WARM);
    drop(on_a);
    assert_eq!(stage.b.disk_state(), "away");
    // B takes it, as if A were gone for good.
    stage.a.kill();
    assert!(!stage.b.try_ctl(&["migrate", "vm", "--take-back"]).success());
    stage.b.ctl(&["migrate", "vm", "--take-back", "--force"]);
    wait_until("B has it", Duration::from_secs(20), || stage.b.disk_state() == "online");
}

#[test]
fn who_may_not_is_refused_in_one_line() {
    let stage = Stage::new("write-through", "read-only");
    let output = stage.migrate(&[]);
    assert!(!output.success() && output.stderr.contains("may only read"), "{}", output.all());
    assert_eq!(output.stderr.trim().lines().count(), 1, "{}", output.all());
    let other = Authority::new("others");
    let who = other.client(stage.scratch.dir(), "stranger");
    let c = Host::new(&stage.scratch, &other, "c", &who, "admin");
    let output = stage.a.try_ctl(&["migrate", "vm", "--to", &c.address()]);
    assert!(!output.success(), "{}", output.all());
    assert_eq!(output.stderr.trim().lines().count(), 1, "{}", output.all());
    assert_eq!(stage.a.disk_state(), "online");
    assert_eq!(c.disk_state(), "absent");
}

#[test]
fn whichever_host_is_killed_one_has_the_disk_and_all_of_it() {
    let rounds = std::env::var("HOB_MIGRATE_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(6);
    for round in 0..rounds {
        let mut stage = Stage::new("write-back", "admin");
        let mut noise = Noise::new(round);
        let mut on_a = stage.a.connect();
        stage.write_some(&mut on_a, 60, WARM);
        stage.read_all(&mut on_a, WARM);
        on_a.flush().expect("a flush");
        drop(on_a);
        let cache = ["copy", "drop", "remote", "heat-map"][noise.below(4) as usize];
        let output =
            stage.migrate(&["--cache", cache, "--switch", "ask", "--bandwidth", "16M", "--wait", "begun"]);
        assert!(output.success(), "{}", output.all());
        std::thread::sleep(Duration::from_millis(noise.below(700)));
        if noise.below(2) == 0 {
            let _ = stage.a.try_ctl(&["migrate", "vm", "--finish", "--wait", "begun"]);
            std::thread::sleep(Duration::from_millis(noise.below(150)));
        }
        let kills_a = noise.below(2) == 0;
        eprintln!("=== round {round}: {cache}, {} is killed", if kills_a { "a" } else { "b" });
        let victim = if kills_a { &mut stage.a } else { &mut stage.b };
        victim.kill();
        std::thread::sleep(Duration::from_millis(noise.below(500)));
        victim.start();
        // Whatever happened, it can be handed over to its end now.
        wait_until("it has come", Duration::from_secs(60), || {
            let _ = stage.a.try_ctl(&["migrate", "vm", "--finish", "--wait", "begun"]);
            let (a, b) = (stage.a.disk_state(), stage.b.disk_state());
            let is_kept = a == "online" && stage.a.migration()["state"] == "kept";
            (a == "away" && b == "online") || is_kept
        });
        let host = if stage.b.disk_state() == "online" { &stage.b } else { &stage.a };
        let mut client = host.connect();
        stage.read_all(&mut client, DISK as usize);
        stage.write_some(&mut client, 5, WARM);
    }
}
