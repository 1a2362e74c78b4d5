//! Shared caches: three disks divide a pool of two devices. The sizes follow the load, through an
//! upgrade, a kill and the removal of a device, and every read returns what was written.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use conformance::data::{Noise, noise_file};
use conformance::nbd_client::Client;
use conformance::scratch::wait_until;
use conformance::{Daemon, MIB, Scratch};
use rustix::process::Signal;
use serde_json::Value;

const DISK: u64 = 64 * MIB;
const BLOCK: u64 = 4096;
const DISKS: [&str; 3] = ["one", "two", "three"];

/// Maximum time until the sizes follow a load.
const FOLLOW_MAX: Duration = Duration::from_secs(180);

struct Stage {
    scratch: Scratch,
    daemon: Daemon,
    /// Content that each disk must have.
    contents: Vec<Arc<Mutex<Vec<u8>>>>,
}

/// A guest that reads and writes one part of a disk and checks what it reads.
struct Guest {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Stage {
    fn new() -> Stage {
        let scratch = Scratch::new();
        let mut config = format!(
            "[[pool]]\nname = \"flash\"\ndevices = [\"{}\", \"{}\"]\nsize = \"40M\"\nsegment_size = \"1M\"\n",
            scratch.text("a"),
            scratch.text("b"),
        );
        let settings = ["mode = \"write-back\"", "persistent = true", "min = \"4M\""];
        for (disk, setting) in DISKS.iter().zip(settings) {
            let image = format!("{disk}.img");
            noise_file(&scratch.path(&image), DISK, 40);
            config += &format!(
                "[[disk]]\nname = \"{disk}\"\nbacking = \"{}\"\ncache = {{ pool = \"flash\", {setting} }}\n",
                scratch.text(&image)
            );
        }
        scratch.configure(&config);
        let content = |disk| scratch.read(&format!("{disk}.img"));
        let contents = DISKS.iter().map(|disk| Arc::new(Mutex::new(content(disk)))).collect();
        let daemon = start(&scratch);
        Stage { scratch, daemon, contents }
    }

    /// Starts a guest of a disk that uses its first `mib` MiB.
    fn load(&self, disk: usize, mib: u64) -> Guest {
        let (address, content) = (self.scratch.nbd(), self.contents[disk].clone());
        let stop = Arc::new(AtomicBool::new(false));
        let ended = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut dice = Noise::new(disk as u64 + 1);
            let mut client = Client::connect(&address, DISKS[disk]).unwrap();
            let mut done = 0;
            while !ended.load(Ordering::Relaxed) {
                play(&mut client, &mut content.lock().unwrap(), &mut dice, mib);
                done += 1;
            }
            done
        });
        Guest { stop, thread }
    }

    fn shared(&self) -> Value {
        self.daemon.pool("flash")["shared"].clone()
    }

    /// Returns the size of a disk's cache in MiB.
    fn size(&self, disk: usize) -> u64 {
        let shared = self.shared();
        let caches = shared["caches"].as_array().unwrap();
        let cache = caches.iter().find(|cache| cache["disk"] == DISKS[disk]);
        cache.map_or(0, |cache| cache["size"].as_u64().unwrap() / MIB)
    }

    /// Waits until a disk's cache has this size at least.
    #[track_caller]
    fn until_large(&self, disk: usize, mib: u64) {
        let begun = Instant::now();
        wait_until(&format!("{mib} MiB for {}", DISKS[disk]), FOLLOW_MAX, || {
            std::thread::sleep(Duration::from_millis(100));
            self.size(disk) >= mib
        });
        eprintln!("{} has {} MiB after {:?}", DISKS[disk], self.size(disk), begun.elapsed());
    }
}

impl Guest {
    /// Ends the guest, which must have done something.
    #[track_caller]
    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        let done = self.thread.join().expect("the guest reads what was written");
        assert!(done > 100, "{done}");
    }
}

fn start(scratch: &Scratch) -> Daemon {
    let daemon = scratch.start_daemon();
    // The API answers when the NBD socket is there.
    daemon.ctl(&["disk", "list"]);
    daemon
}

/// Makes one request.
fn play(client: &mut Client, content: &mut [u8], dice: &mut Noise, mib: u64) {
    let at = dice.below(mib * MIB / BLOCK) * BLOCK;
    let expected = &mut content[at as usize..(at + BLOCK) as usize];
    if dice.below(8) == 0 {
        dice.fill(expected);
        client.write(at, expected).unwrap();
        return;
    }
    assert!(client.read(at, BLOCK as u32).unwrap() == expected, "wrong data at {at}");
}

#[test]
fn sizes_follow_the_load_and_no_byte_is_wrong() {
    let mut stage = Stage::new();
    let guest = stage.load(0, 40);
    stage.until_large(0, 40);
    assert!(stage.size(2) >= 4, "the minimum holds");
    guest.end();
    // Another disk gets busy, while the first one has dirty data.
    let guest = stage.load(1, 36);
    stage.until_large(1, 30);
    // hob may refuse the upgrade on a busy host. Until its end, hob refuses changes of the pool.
    let ends = |stage: &Stage| {
        let log = stage.daemon.process.stderr();
        log.matches("the control API is at").count() + log.matches("not upgraded").count()
    };
    let before = ends(&stage);
    stage.daemon.process.signal(Signal::HUP);
    wait_until("the end of the upgrade", FOLLOW_MAX, || ends(&stage) > before);
    stage.daemon.wait_for_disks();
    guest.end();
    let guest = stage.load(2, 40);
    std::thread::sleep(Duration::from_secs(3));
    // A device is removed while capacity moves between the caches.
    stage.daemon.ctl(&["pool", "remove-device", "flash", &stage.scratch.text("b")]);
    stage.until_large(2, 20);
    stage.daemon.ctl(&["pool", "add-device", "flash", &stage.scratch.text("b"), "--size", "40M", "--force"]);
    stage.until_large(2, 36);
    guest.end();
    assert!(stage.shared()["moved"].as_u64().unwrap() > 0);
    // A kill loses no flushed data.
    for disk in DISKS {
        stage.scratch.connect(disk).flush().unwrap();
    }
    stage.daemon.process.kill();
    stage.daemon = start(&stage.scratch);
    let guest = stage.load(0, 40);
    stage.until_large(0, 30);
    guest.end();
    let explained = stage.daemon.ctl(&["explain", "one"]);
    assert!(explained.contains("shares its pool"), "{explained}");
    for disk in DISKS {
        stage.daemon.ctl(&["drain", disk]);
    }
    stage.daemon.stop();
    for (disk, content) in DISKS.iter().zip(&stage.contents) {
        let file = std::fs::File::open(stage.scratch.path(&format!("{disk}.img"))).unwrap();
        let mut found = vec![0; DISK as usize];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found == *content.lock().unwrap(), "{disk} has other data than was written");
    }
}

/// All caches of a full pool write new journals at a start, with space for one at a time.
#[test]
fn disks_of_a_full_pool_are_served_after_an_upgrade_and_restarts() {
    let scratch = Scratch::new();
    let mut config = format!(
        "[[pool]]\nname = \"flash\"\ndevices = [\"{}\"]\nsize = \"40M\"\nsegment_size = \"1M\"\n",
        scratch.text("a"),
    );
    let disks = ["d0", "d1", "d2", "d3", "d4", "d5"];
    for disk in disks {
        noise_file(&scratch.path(disk), 16 * MIB, 41);
        config += &format!(
            "[[disk]]\nname = \"{disk}\"\nbacking = \"{}\"\nformat = \"raw\"\n\
             cache = {{ pool = \"flash\", mode = \"write-back\" }}\n",
            scratch.text(disk)
        );
    }
    scratch.configure(&config);
    let mut daemon = start(&scratch);
    let address = scratch.nbd();
    let connect = |disk: &&str| Client::connect(&address, disk).unwrap();
    let mut clients: Vec<Client> = disks.iter().map(connect).collect();
    let free = |daemon: &Daemon| {
        let pool = daemon.pool("flash");
        pool["free"].as_u64().unwrap() / MIB
    };
    let begun = Instant::now();
    wait_until("a full pool", FOLLOW_MAX, || {
        for client in &mut clients {
            (0..16).for_each(|at| drop(client.read(at * MIB, MIB as u32).unwrap()));
            client.write(0, &[7; 4096]).unwrap();
        }
        begun.elapsed() >= Duration::from_secs(8) && free(&daemon) < 6
    });
    daemon.process.signal(Signal::HUP);
    std::thread::sleep(Duration::from_secs(2));
    for client in &mut clients {
        client.read(0, 4096).expect("the client stays connected");
        client.flush().unwrap();
    }
    drop(clients);
    for how in [Signal::TERM, Signal::KILL, Signal::KILL] {
        for attempt in 1.. {
            daemon.process.signal(how);
            daemon.process.finish(Duration::from_secs(60));
            daemon = start(&scratch);
            let begun = Instant::now();
            let is_served = |disk: &&str| Client::connect(&address, disk).is_ok();
            wait_until("all disks", FOLLOW_MAX, || disks.iter().all(is_served));
            // A disk that is offline is tried again after 5 s. A busy host may take as long.
            if begun.elapsed() < Duration::from_secs(3) {
                break;
            }
            assert!(attempt < 5, "a disk is served only after {:?}", begun.elapsed());
        }
        for disk in &disks {
            let data = connect(disk).read(0, 4096).unwrap();
            assert!(data == [7; 4096], "{disk} after {how:?}: {}", daemon.ctl(&["disk", "list"]));
        }
    }
    daemon.stop();
}
