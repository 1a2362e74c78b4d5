//! `hob daemon`: many disks and pools, changed by command, and restored after restarts and kill -9.

use std::time::{Duration, Instant};

use conformance::data::{Noise, assert_same, empty_file};
use conformance::nbd_client::{CMD_READ, Client, EIO};
use conformance::scratch::wait_for;
use conformance::{Daemon, MIB, Scratch, Tool};

const SIZE: u64 = 16 * MIB;

/// A scratch directory with a configuration file and the images of three disks.
struct Stage {
    scratch: Scratch,
    images: Vec<Vec<u8>>,
}

impl Stage {
    fn new(more: &str) -> Self {
        let scratch = Scratch::new();
        scratch.configure(more);
        let images = (0..3).map(|n| scratch.noise(&format!("disk{n}.img"), SIZE, 80 + n)).collect();
        Self { scratch, images }
    }

    #[track_caller]
    fn connect(&self, disk: usize) -> Client {
        self.scratch.connect(&format!("vm{disk}"))
    }

    /// Creates a pool of two files and three disks, each with a different cache.
    #[track_caller]
    fn furnish(&self, daemon: &Daemon) {
        let (one, two) = (self.scratch.text("flash1"), self.scratch.text("flash2"));
        daemon.ctl(&["pool", "create", "fast", &one, &two, "--size", "64M", "--segment-size", "1M"]);
        for (n, (block, policy)) in [("4K", "s3-fifo"), ("16K", "lru"), ("64K", "fifo")].iter().enumerate() {
            let (disk, image) = (format!("vm{n}"), self.scratch.text(&format!("disk{n}.img")));
            daemon.ctl(&["disk", "add", &disk, "--backing", &image]);
            let options = ["--pool", "fast", "--size", "24M", "--block-size", block, "--policy", policy];
            daemon.ctl(&[&["cache", "enable", &disk], &options[..]].concat());
        }
    }

    /// Checks that every disk reads as its image, twice: from the backing and from flash.
    #[track_caller]
    fn reads_right(&self) {
        for (n, image) in self.images.iter().enumerate() {
            let mut client = self.connect(n);
            for _ in 0..2 {
                assert_same(&client.read(0, SIZE as u32).unwrap(), image, 0, &format!("vm{n} and its image"));
            }
        }
    }
}

/// Returns the daemon's disks and pools, without values that change by themselves.
#[track_caller]
fn furniture(daemon: &Daemon) -> (Vec<String>, Vec<String>) {
    let disks = daemon.json(&["disk", "list"]);
    let disks = disks.as_array().unwrap().iter().map(|d| {
        let cache = &d["cache"];
        format!(
            "{} {} {} {} {} {}",
            d["name"], d["backing"], cache["pool"], cache["size"], cache["block_size"], cache["policy"]
        )
    });
    let pools = daemon.json(&["pool", "list"]);
    let pools = pools.as_array().unwrap().iter().map(|p| {
        let devices: Vec<String> =
            p["devices"].as_array().unwrap().iter().map(|d| d["path"].to_string()).collect();
        format!("{} {devices:?}", p["name"])
    });
    (disks.collect(), pools.collect())
}

#[test]
fn changes_survive_a_restart_and_kill_9() {
    let stage = Stage::new("");
    let daemon = stage.scratch.start_daemon();
    stage.furnish(&daemon);
    daemon.ctl(&["cache", "resize", "vm0", "32M"]);
    daemon.ctl(&["cache", "set", "vm1", "--block-size", "8K"]);
    daemon.ctl(&["cache", "disable", "vm2"]);
    let before = furniture(&daemon);
    assert_eq!(before.0.len(), 3, "{before:?}");
    stage.reads_right();
    daemon.stop();
    let daemon = stage.scratch.start_daemon();
    assert_eq!(furniture(&daemon), before, "after SIGTERM");
    stage.reads_right();
    daemon.ctl(&["disk", "remove", "vm2"]);
    let before = furniture(&daemon);
    // The daemon is killed: the results of confirmed commands are on disk already.
    drop(daemon);
    let daemon = stage.scratch.start_daemon();
    assert_eq!(furniture(&daemon), before, "after kill -9");
    daemon.stop();
}

#[test]
fn disks_are_kept_apart() {
    let stage = Stage::new("");
    let daemon = stage.scratch.start_daemon();
    stage.furnish(&daemon);
    stage.reads_right();
    let data = Noise::new(90).bytes(MIB as usize);
    let mut client = stage.connect(1);
    client.write(MIB, &data).unwrap();
    assert_same(&client.read(MIB, MIB as u32).unwrap(), &data, MIB, "vm1 and what was written");
    for n in [0, 2] {
        let other = stage.connect(n).read(MIB, MIB as u32).unwrap();
        assert_same(&other, &stage.images[n][MIB as usize..2 * MIB as usize], MIB, "another disk");
    }
    let (reads, writes) = (daemon.stats("vm0"), daemon.stats("vm1"));
    assert_eq!((reads.number("writes"), writes.number("writes")), (Some(0.0), Some(1.0)));
    let list = Tool::new("nbdinfo").args(["--list", "--json", &stage.scratch.nbd().uri("")]).run();
    for name in ["vm0", "vm1", "vm2"] {
        assert!(list.contains(&format!("\"{name}\"")), "{list}");
    }
    daemon.stop();
}

/// A device is removed from a pool in use. Its blocks are moved or dropped, and no read is wrong.
#[test]
fn a_device_is_removed_from_a_pool_under_three_disks() {
    let stage = Stage::new("");
    let daemon = stage.scratch.start_daemon();
    stage.furnish(&daemon);
    stage.reads_right();
    daemon.ctl(&["pool", "remove-device", "fast", &stage.scratch.text("flash1")]);
    let pool = daemon.pool("fast");
    assert_eq!(pool["devices"].as_array().map(Vec::len), Some(1), "{pool}");
    stage.reads_right();
    daemon.ctl(&["pool", "add-device", "fast", &stage.scratch.text("flash3"), "--size", "64M"]);
    stage.reads_right();
    daemon.stop();
}

#[test]
fn a_device_of_another_pool_is_refused() {
    let stage = Stage::new("");
    let daemon = stage.scratch.start_daemon();
    stage.furnish(&daemon);
    daemon.stop();
    let before = stage.scratch.read("flash2");
    let other = Stage::new("");
    let daemon = other.scratch.start_daemon();
    let theirs = stage.scratch.text("flash2");
    let refused = daemon.try_ctl(&["pool", "create", "mine", &theirs]);
    assert!(!refused.success() && refused.stderr.contains("--force"), "{}", refused.all());
    assert_same(&std::fs::read(&theirs).unwrap(), &before, 0, "the refused device before and after");
    // The superblock has two copies. A filesystem or a pool is not treated as an empty file.
    empty_file(&other.scratch.path("ext4"), 32 * MIB);
    Tool::new("mkfs.ext4").args(["-q", "-F", &other.scratch.text("ext4")]).run();
    let refused = daemon.try_ctl(&["pool", "create", "mine", &other.scratch.text("ext4")]);
    assert!(!refused.success() && refused.stderr.contains("--force"), "{}", refused.all());
    daemon.ctl(&["pool", "create", "mine", &theirs, "--force"]);
    daemon.stop();
}

#[test]
fn the_configuration_furnishes_the_first_start() {
    let more = |scratch: &Scratch| {
        format!(
            "\n[[pool]]\nname = \"p\"\ndevices = [\"{}\"]\nsize = \"64M\"\n[[disk]]\nname = \"vm0\"\nbacking = \"{}\"\n\
             [disk.cache]\npool = \"p\"\nsize = \"16M\"\nblock_size = \"8K\"\npolicy = \"lru\"\n",
            scratch.text("flash"),
            scratch.text("disk0.img")
        )
    };
    let stage = Stage::new("");
    let path = stage.scratch.path("hob.toml");
    let config = std::fs::read_to_string(&path).unwrap() + &more(&stage.scratch);
    std::fs::write(&path, config).unwrap();
    let daemon = stage.scratch.start_daemon();
    let disk = daemon.disk("vm0");
    assert_eq!((&disk["cache"]["block_size"], &disk["cache"]["policy"]), (&8192.into(), &"lru".into()));
    let data = stage.connect(0).read(0, MIB as u32).unwrap();
    assert_same(&data, &stage.images[0][..MIB as usize], 0, "vm0 and its image");
    daemon.stop();
}

/// Promise 4: requests wait for an unavailable backing for the configured time and then fail with
/// EIO. Other disks and the API are not affected, and the disk is correct when its backing is back.
#[test]
fn a_dead_backing_costs_its_own_disk_an_error_after_the_bound() {
    let stage = Stage::new("[limits]\nbacking_wait_ms_max = 1500");
    let mut backing = stage.scratch.serve_image("disk0.img");
    let daemon = stage.scratch.start_daemon();
    daemon.ctl(&["disk", "add", "vm0", "--backing", &stage.scratch.backing_uri()]);
    daemon.ctl(&["disk", "add", "vm1", "--backing", &stage.scratch.text("disk1.img")]);
    let (mut dead, mut well) = (stage.connect(0), stage.connect(1));
    // If the server stalls for longer than the limit, a read fails.
    wait_for("a read", || dead.read(0, 4096).is_ok());
    backing.kill();
    let start = Instant::now();
    let cookie = dead.send(0, CMD_READ, MIB, 4096, &[]).unwrap();
    let reply = dead.receive().unwrap();
    assert_eq!((reply.cookie, reply.error), (cookie, EIO));
    assert!(start.elapsed() > Duration::from_millis(900), "gave up after {:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(55), "gave up after {:?}", start.elapsed());
    // A request waits until the backing is back. Another disk and the API are served meanwhile.
    daemon.ctl(&["disk", "set", "vm0", "--backing-timeout", "forever"]);
    dead.send(0, CMD_READ, MIB, 4096, &[]).unwrap();
    well.read(0, 4096).unwrap();
    daemon.ctl(&["disk", "list"]);
    let _backing = stage.scratch.serve_image("disk0.img");
    assert_eq!(dead.receive().unwrap().error, 0, "the disk is back");
    dead.take(&mut [0; 4096]).unwrap();
    let data = dead.read(0, SIZE as u32).unwrap();
    assert_same(&data, &stage.images[0], 0, "vm0 and its image");
    daemon.stop();
}

/// A vhost-user socket is created with its disk, survives restarts, and is removed with the disk. A
/// socket path in use is refused for another disk.
#[test]
fn a_disks_vhost_user_socket_survives_a_restart() {
    use conformance::vhost_driver::{Driver, Kind};
    let stage = Stage::new("");
    let daemon = stage.scratch.start_daemon();
    let (socket, image) = (stage.scratch.text("vm.sock"), stage.scratch.text("disk0.img"));
    daemon.ctl(&["disk", "add", "vm0", "--backing", &image, "--vhost-user", &socket]);
    assert!(daemon.ctl(&["disk", "show", "vm0"]).contains(&socket));
    let other = stage.scratch.text("disk1.img");
    let refused = daemon.try_ctl(&["disk", "add", "vm1", "--backing", &other, "--vhost-user", &socket]);
    assert!(!refused.success() && refused.all().contains(&socket), "{}", refused.all());
    daemon.ctl(&["disk", "add", "vm1", "--backing", &other]);
    drop(daemon);
    let daemon = stage.scratch.start_daemon();
    wait_for("the socket", || stage.scratch.path("vm.sock").exists());
    let connect = || Driver::connect(&stage.scratch.path("vm.sock"));
    wait_for("a connection", || connect().is_ok());
    let mut driver = connect().expect("the server takes a machine");
    assert_eq!(driver.run(Kind::Read, MIB, 4096), Some(0));
    assert_same(
        &driver.data(0, 4096),
        &stage.images[0][MIB as usize..MIB as usize + 4096],
        MIB,
        "vhost-user",
    );
    let refused = daemon.try_ctl(&["disk", "remove", "vm0"]);
    assert!(!refused.success() && refused.all().contains("--force"), "{}", refused.all());
    assert_eq!(driver.run(Kind::Read, MIB, 4096), Some(0), "it is still served");
    daemon.ctl(&["disk", "remove", "vm0", "--force"]);
    assert!(!stage.scratch.path("vm.sock").exists(), "the socket outlived its disk");
    daemon.stop();
}

/// A disk's own limit replaces the daemon's limit. With `forever`, requests wait until the backing
/// returns. A new limit also applies to waiting requests.
#[test]
fn a_disk_waits_for_its_backing_up_to_its_own_limit() {
    let stage = Stage::new("");
    let mut backing = stage.scratch.serve_image("disk0.img");
    let daemon = stage.scratch.start_daemon();
    let uri = stage.scratch.backing_uri();
    let set_timeout = |timeout: &str| daemon.ctl(&["disk", "set", "vm0", "--backing-timeout", timeout]);
    let refused = daemon.try_ctl(&["disk", "add", "vm0", "--backing", &uri, "--backing-timeout", "0s"]);
    assert!(!refused.success() && refused.all().contains("forever"), "{}", refused.all());
    daemon.ctl(&["disk", "add", "vm0", "--backing", &uri, "--backing-timeout", "2s"]);
    let mut guest = stage.connect(0);
    // If the server stalls for longer than the limit, a read fails.
    wait_for("a read", || guest.read(0, 4096).is_ok());
    backing.kill();
    let start = Instant::now();
    guest.send(0, CMD_READ, MIB, 4096, &[]).unwrap();
    assert_eq!(guest.receive().unwrap().error, EIO);
    // The daemon's own limit is longer than the client waits.
    assert!(start.elapsed() > Duration::from_millis(1900), "{:?}", start.elapsed());
    // The backing returns and fails again; without a limit, a request waits for longer than before.
    let mut backing = stage.scratch.serve_image("disk0.img");
    wait_for("the disk to be back", || guest.read(MIB, 4096).is_ok());
    backing.kill();
    set_timeout("forever");
    assert_eq!(daemon.disk("vm0")["backing_timeout"], "forever");
    guest.send(0, CMD_READ, 2 * MIB, 4096, &[]).unwrap();
    std::thread::sleep(Duration::from_secs(4));
    let mut backing = stage.scratch.serve_image("disk0.img");
    assert_eq!(guest.receive().unwrap().error, 0, "it waited for the backing");
    guest.take(&mut [0; 4096]).unwrap();
    // A command limits the time of a request that waits.
    backing.kill();
    guest.send(0, CMD_READ, 3 * MIB, 4096, &[]).unwrap();
    set_timeout("1s");
    assert_eq!(guest.receive().unwrap().error, EIO, "it would wait for ever");
    daemon.stop();
}
