//! Clones of one golden image that share the cached data of their parent's snapshot
//! (docs/decisions/0020).

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use conformance::data::{Noise, assert_same, noise_file};
use conformance::nbd_client::{Client, read_range};
use conformance::scratch::wait_for;
use conformance::{Cluster, Daemon, MIB, Scratch};
use serde_json::Value;

/// Size of the golden image, bytes; the last third was never written.
const SIZE: u64 = 48 * MIB;
const WRITTEN: u64 = 32 * MIB;

struct Stage {
    // Dropped in this order.
    daemon: Option<Daemon>,
    scratch: Scratch,
    cluster: Cluster,
    golden: Vec<u8>,
}

impl Stage {
    /// Creates a golden image, its snapshot, and these clones of the snapshot.
    #[track_caller]
    fn new(clones: &[&str]) -> Stage {
        let (cluster, scratch) = (Cluster::shared(), Scratch::new());
        let file = scratch.path("golden.img");
        noise_file(&file, WRITTEN, 71);
        std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(SIZE).unwrap();
        cluster.import(&file, "golden");
        let golden = std::fs::read(&file).unwrap();
        cluster.rbd(&["snap", "create", "rbd/golden@base"]);
        for clone in clones {
            let image = format!("rbd/{clone}");
            cluster.rbd(&["clone", "--rbd-default-clone-format", "2", "rbd/golden@base", &image]);
        }
        // Later writes to the image do not affect the clones.
        cluster.rbd(&["bench", "--io-type", "write", "--io-size", "4K", "--io-total", "256K", "rbd/golden"]);
        Stage { daemon: None, scratch, cluster, golden }
    }

    /// Starts a daemon with these disks, each with `settings` in its part of hob.toml.
    #[track_caller]
    fn start(&mut self, clones: &[&str], settings: &str) {
        let scratch = &self.scratch;
        let mut config = String::new();
        for pool in ["fast", "other"] {
            config += &format!(
                "[[pool]]\nname = \"{pool}\"\ndevices = [\"{}\"]\nsize = \"256M\"\nsegment_size = \"1M\"\n",
                scratch.text(pool)
            );
        }
        for clone in clones {
            config += &format!(
                "[[disk]]\nname = \"{clone}\"\nbacking = \"{}\"\n{settings}\n",
                self.cluster.spec(clone)
            );
        }
        scratch.configure(&config);
        self.daemon = Some(scratch.start_daemon());
        for clone in clones {
            wait_for("the disk to be online", || self.shown(clone)["state"] == "online");
        }
    }

    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("it was started")
    }

    #[track_caller]
    fn shown(&self, disk: &str) -> Value {
        self.daemon().disk(disk)
    }

    /// Returns the default name of the parent's disk.
    fn parent(&self) -> String {
        format!("{}-golden-base", self.cluster.pool())
    }

    fn disks(&self) -> Vec<String> {
        self.daemon().disks()
    }

    #[track_caller]
    fn number(&self, disk: &str, name: &str) -> u64 {
        self.daemon().number(disk, name)
    }

    /// Returns the number of bytes that all disks have read from the cluster.
    #[track_caller]
    fn backing_bytes(&self) -> u64 {
        self.disks().iter().map(|disk| self.number(disk, "backing_read_bytes")).sum()
    }
}

const SHARING: &str = "share_parent = true\nparent_cache = \"64M\"\n\
    cache = { pool = \"fast\", size = \"24M\", block_size = \"4K\", mode = \"write-back\" }";

/// The second clone's cold reads hit data that the first clone has read. Writes of any kind to one
/// clone are never visible in another, even after restarts of the daemon.
#[test]
fn clones_share_their_parents_blocks_and_nothing_else() {
    let mut stage = Stage::new(&["a", "b"]);
    let parent_name = stage.parent();
    let parent = parent_name.as_str();
    stage.start(&["a", "b"], SHARING);
    for clone in ["a", "b"] {
        wait_for("the clone to share its parent", || stage.shown(clone)["parent"] == parent);
    }
    assert_eq!(stage.disks(), ["a", "b", parent]);
    assert_eq!(stage.shown(parent)["clones"], serde_json::json!(["a", "b"]));
    assert!(Client::connect(&stage.scratch.nbd(), parent).is_err(), "it is offered to clients");
    let (mut a, mut b) = (stage.scratch.connect("a"), stage.scratch.connect("b"));
    let before = stage.backing_bytes();
    assert_same(&read_range(&mut a, 0..SIZE), &stage.golden, 0, "the first clone and the golden image");
    let cold = stage.backing_bytes() - before;
    assert_same(&read_range(&mut b, 0..SIZE), &stage.golden, 0, "the second clone and the golden image");
    let warm = stage.backing_bytes() - before - cold;
    println!("the cluster was asked for {cold} bytes for the first clone, {warm} for the second");
    assert!(cold >= WRITTEN && warm < MIB, "{cold} and {warm} bytes");
    for clone in ["a", "b"] {
        assert_eq!(stage.number(clone, "sectors_valid"), 0, "{clone} has promoted what is shared");
        assert_eq!(stage.number(clone, "shared_read_bytes"), SIZE);
        assert!(stage.daemon().stats(clone).reason("bypass", "shared") > 40);
    }
    assert!(stage.daemon().stats(parent).hits() > 40);
    let refused = stage.daemon().try_ctl(&["disk", "remove", parent]);
    assert!(!refused.success() && refused.all().contains("a, b"), "{}", refused.all());

    // Writes, discards and zeroes, over objects' ends and inside a sector.
    let mut of_a = stage.golden.clone();
    let mut dice = Noise::new(5);
    for at in [MIB, 4 * MIB - 4096, 13 * MIB + 512, 40 * MIB] {
        let bytes = dice.bytes(12288);
        a.write(at, &bytes).unwrap();
        of_a[at as usize..][..bytes.len()].copy_from_slice(&bytes);
    }
    a.write_zeroes(20 * MIB - 8192, 16384).unwrap();
    of_a[20 * MIB as usize - 8192..][..16384].fill(0);
    // Whole objects: the parent's data must never be visible again.
    a.write_zeroes(24 * MIB, 4 * MIB as u32).unwrap();
    of_a[24 * MIB as usize..28 * MIB as usize].fill(0);
    b.trim(8 * MIB, 4 * MIB as u32).unwrap();
    let check = |a: &mut Client, b: &mut Client, of_a: &[u8], when: &str| {
        assert_same(
            &read_range(a, 0..SIZE),
            of_a,
            0,
            &format!("{when}: the first clone and what was written"),
        );
        assert_same(
            &read_range(b, 0..8 * MIB),
            &stage.golden[..8 * MIB as usize],
            0,
            &format!("{when}: the second"),
        );
        let rest = 12 * MIB..SIZE;
        let golden = &stage.golden[rest.start as usize..];
        assert_same(
            &read_range(b, rest),
            golden,
            12 * MIB,
            &format!("{when}: the second and the golden image"),
        );
    };
    check(&mut a, &mut b, &of_a, "at once");
    // After a trim, the backing decides the content, and the content does not change again.
    let trimmed = read_range(&mut b, 8 * MIB..12 * MIB);
    a.flush().unwrap();
    b.flush().unwrap();
    stage.daemon().ctl(&["drain", "a"]);
    check(&mut a, &mut b, &of_a, "drained");
    // The clone is not drained: some data is only on flash, and some is partly in the cluster.
    for at in [2 * MIB, 29 * MIB, 33 * MIB] {
        let bytes = dice.bytes(65536);
        a.write(at, &bytes).unwrap();
        of_a[at as usize..][..bytes.len()].copy_from_slice(&bytes);
    }
    a.flush().unwrap();
    check(&mut a, &mut b, &of_a, "dirty");

    // SIGKILL: the next daemon determines again which blocks are the clone's own.
    stage.daemon.take().expect("it runs").kill();
    let mut stage = stage;
    stage.start(&["a", "b"], SHARING);
    for clone in ["a", "b"] {
        wait_for("the clone to share its parent", || stage.shown(clone)["parent"] == parent);
    }
    let (mut a, mut b) = (stage.scratch.connect("a"), stage.scratch.connect("b"));
    let golden = stage.golden.clone();
    assert_same(&read_range(&mut a, 0..SIZE), &of_a, 0, "killed: the first clone and what was written");
    assert_same(&read_range(&mut b, 0..8 * MIB), &golden[..8 * MIB as usize], 0, "killed: the second");
    assert_same(&read_range(&mut b, 8 * MIB..12 * MIB), &trimmed, 8 * MIB, "killed: what was trimmed");
    assert!(stage.number("a", "shared_read_bytes") > 0);
    drop((a, b));
    stage.daemon().ctl(&["disk", "remove", "a"]);
    assert_eq!(stage.disks(), ["b", parent]);
    stage.daemon().ctl(&["disk", "remove", "b"]);
    wait_for("the parent's disk to go", || stage.disks().is_empty());
    stage.daemon.take().expect("it runs").stop();
    assert_same(&stage.cluster.export("a"), &of_a, 0, "the cluster's image and what was written");
    let of_b = stage.cluster.export("b");
    assert_same(&of_b[..8 * MIB as usize], &golden[..8 * MIB as usize], 0, "the second's image");
}

/// Empty objects of a clone hide the parent's objects. The object map of a snapshot does not list
/// empty objects, so it is not sufficient to rebuild the clone's own map.
#[test]
fn objects_that_a_clone_hid_before_it_had_an_object_map_stay_hidden() {
    let mut stage = Stage::new(&["a"]);
    let parent_name = stage.parent();
    let parent = parent_name.as_str();
    stage.cluster.rbd(&["feature", "disable", "rbd/a", "fast-diff", "object-map"]);
    let settings = "share_parent = true";
    stage.start(&["a"], settings);
    let mut a = stage.scratch.connect("a");
    a.write_zeroes(24 * MIB, 4 * MIB as u32).unwrap();
    a.flush().unwrap();
    drop(a);
    stage.daemon.take().expect("it runs").stop();
    stage.cluster.rbd(&["snap", "create", "rbd/a@s"]);
    stage.cluster.rbd(&["feature", "enable", "rbd/a", "object-map", "fast-diff"]);
    stage.cluster.rbd(&["object-map", "rebuild", "--no-progress", "rbd/a"]);
    let mut of_a = stage.golden.clone();
    of_a[24 * MIB as usize..28 * MIB as usize].fill(0);
    for is_mended in [false, true] {
        if is_mended {
            stage.cluster.rbd(&["object-map", "rebuild", "--no-progress", "rbd/a@s"]);
        }
        stage.start(&["a"], settings);
        if is_mended {
            wait_for("the parent's disk", || stage.shown("a")["parent"] == parent);
        } else {
            let reason = || stage.shown("a")["parent_reason"].to_string();
            wait_for("the reason", || reason().contains("rebuild IMAGE@s"));
        }
        assert_same(
            &read_range(&mut stage.scratch.connect("a"), 0..SIZE),
            &of_a,
            0,
            "the clone and what was zeroed",
        );
        stage.daemon.take().expect("it runs").stop();
    }
}

/// Writes to the first objects, reads everywhere, and checks each byte.
fn guest(mut client: Client, seed: u64, mut model: Vec<u8>, over: &AtomicBool) -> (Client, Vec<u8>, u64) {
    let mut dice = Noise::new(seed);
    let mut done = 0;
    while !over.load(Ordering::Relaxed) {
        let length = (1 + dice.below(64)) * 512;
        let kind = dice.below(16);
        // Written data is not shared any more.
        let within = if kind < 2 { 16 * MIB } else { SIZE };
        let offset = dice.below((within - length) / 512) * 512;
        let range = offset as usize..(offset + length) as usize;
        match kind {
            0 => {
                let bytes = dice.bytes(length as usize);
                client.write(offset, &bytes).expect("no write may fail");
                model[range].copy_from_slice(&bytes);
            }
            1 => {
                client.write_zeroes(offset, length as u32).expect("nor zeroing");
                model[range].fill(0);
            }
            _ => {
                let bytes = client.read(offset, length as u32).expect("nor reading");
                assert_same(&bytes, &model[range], offset, "the clone and its guest's memory of it");
            }
        }
        done += 1;
    }
    (client, model, done)
}

/// Promise 3 for the flash of the parent's disk. A clone that another client flattens meanwhile
/// does not use its parent any more, and reads are correct before, during and after.
#[test]
fn guests_of_clones_see_no_flash_errors_and_no_flattening() {
    let mut stage = Stage::new(&["a", "b"]);
    let parent_name = stage.parent();
    let parent = parent_name.as_str();
    let settings = "share_parent = true\ncache = { pool = \"fast\", size = \"16M\", block_size = \"4K\" }";
    stage.start(&["a", "b"], settings);
    wait_for("the parent's disk", || stage.disks().iter().any(|disk| disk == parent));
    // The configuration has no size: the parent's disk receives its cache by command, like any
    // disk.
    stage.daemon().tell(&format!("cache enable {parent} --pool other --size 40M --block-size 16K"));
    for clone in ["a", "b"] {
        wait_for("the clone to share its parent", || stage.shown(clone)["parent"] == parent);
    }
    let over = AtomicBool::new(false);
    let (mut a, of_a, mut b, of_b) = std::thread::scope(|scope| {
        let run = |name: &str, seed: u64| {
            let (mut client, golden, over) = (stage.scratch.connect(name), stage.golden.clone(), &over);
            read_range(&mut client, 0..SIZE);
            scope.spawn(move || guest(client, seed, golden, over))
        };
        let (a, b) = (run("a", 1), run("b", 2));
        std::thread::sleep(Duration::from_secs(2));
        // Noise in the parent's blocks, then no flash at all.
        let flash = std::fs::OpenOptions::new().write(true).open(stage.scratch.path("other")).unwrap();
        let length = flash.metadata().unwrap().len();
        let mut dice = Noise::new(3);
        for at in (MIB..length).step_by(MIB as usize) {
            std::os::unix::fs::FileExt::write_all_at(&flash, &dice.bytes(MIB as usize), at).unwrap();
        }
        std::thread::sleep(Duration::from_secs(2));
        stage.cluster.rbd(&["flatten", "--no-progress", "rbd/a"]);
        std::thread::sleep(Duration::from_secs(1));
        flash.set_len(length / 2).unwrap();
        std::thread::sleep(Duration::from_secs(2));
        over.store(true, Ordering::Relaxed);
        let ((a, of_a, done_a), (b, of_b, done_b)) = (a.join().unwrap(), b.join().unwrap());
        println!("{done_a} and {done_b} requests; parent: {}", stage.daemon().stats(parent).text());
        assert!(done_a > 200 && done_b > 200, "{done_a} and {done_b} requests");
        (a, of_a, b, of_b)
    });
    let sick = stage.daemon().stats(parent);
    assert!(sick.class("flash-error") > 0, "{}", sick.text());
    // Flattened: the clone uses nothing of its parent now.
    let before = stage.number("a", "shared_read_bytes");
    assert_same(&read_range(&mut a, 0..SIZE), &of_a, 0, "the flattened clone and its guest's memory");
    assert_eq!(stage.number("a", "shared_read_bytes"), before);
    let before = stage.number("b", "shared_read_bytes");
    assert_same(&read_range(&mut b, 0..SIZE), &of_b, 0, "the other clone and its guest's memory");
    assert!(stage.number("b", "shared_read_bytes") > before);
    drop((a, b));
    stage.daemon.take().expect("it runs").stop();
    assert_same(&stage.cluster.export("a"), &of_a, 0, "the flattened image");
    assert_same(&stage.cluster.export("b"), &of_b, 0, "the other image");
}

/// If a disk shares nothing, the reply to its creation has the reason, and the disk is served.
#[test]
fn clones_that_cannot_share_are_served_with_the_reason() {
    let mut stage = Stage::new(&["plain"]);
    stage.cluster.rbd(&["feature", "disable", "rbd/plain", "fast-diff"]);
    stage.start(&[], "");
    let add = |name: &str, image: &str, more: &[&str]| {
        let spec = stage.cluster.spec(image);
        let args = [&["disk", "add", name, "--backing", &spec][..], more].concat();
        stage.daemon().try_ctl(&args)
    };
    let output = add("plain", "plain", &["--share-parent"]);
    assert!(output.success() && output.all().contains("fast-diff"), "{}", output.all());
    let output = add("golden", "golden", &["--share-parent"]);
    assert!(output.success() && output.all().contains("no parent"), "{}", output.all());
    assert_eq!(stage.scratch.connect("plain").read(0, 4096).unwrap(), stage.golden[..4096]);
    assert!(stage.shown("plain")["parent_reason"].as_str().unwrap().contains("fast-diff"));
    assert_eq!(stage.disks(), ["golden", "plain"]);
    let refused = add("x", "plain", &["--parent-cache", "1G"]);
    assert!(!refused.success() && refused.all().contains("--share-parent"), "{}", refused.all());
    stage.daemon.take().expect("it runs").stop();
}

/// Costs of the cold starts of some VMs, with and without sharing.
#[test]
fn the_more_clones_the_more_is_saved() {
    const CLONES: [&str; 4] = ["a", "b", "c", "d"];
    /// Bytes in flash if each clone has its own data there.
    const OWN_FLASH_MIN: u64 = 4 * WRITTEN * 9 / 10;
    let mut stage = Stage::new(&CLONES);
    let own = "cache = { pool = \"fast\", size = \"40M\", block_size = \"16K\" }";
    let mut figures = Vec::new();
    for settings in [own.to_owned(), format!("share_parent = true\nparent_cache = \"48M\"\n{own}")] {
        stage.start(&CLONES, &settings);
        let (before, mut times) = (stage.backing_bytes(), Vec::new());
        for clone in CLONES {
            let mut client = stage.scratch.connect(clone);
            let begun = Instant::now();
            assert_same(
                &read_range(&mut client, 0..WRITTEN),
                &stage.golden[..WRITTEN as usize],
                0,
                "a clone and the golden image",
            );
            times.push(begun.elapsed());
        }
        let read = stage.backing_bytes() - before;
        // Fills end after the replies.
        let flash =
            || -> u64 { stage.disks().iter().map(|disk| 4096 * stage.number(disk, "sectors_valid")).sum() };
        if figures.is_empty() {
            wait_for("the end of the fills", || flash() >= OWN_FLASH_MIN);
        } else {
            std::thread::sleep(Duration::from_secs(1));
        }
        let flash = flash();
        println!("{} disks: {read} bytes from the cluster, {flash} in flash, {times:?}", stage.disks().len());
        figures.push((read, flash));
        stage.daemon.take().expect("it runs").stop();
        std::fs::remove_dir_all(stage.scratch.path("state")).unwrap();
        ["fast", "other"].iter().for_each(|pool| std::fs::remove_file(stage.scratch.path(pool)).unwrap());
    }
    let [(own_read, own_flash), (read, flash)] = figures[..] else { unreachable!() };
    assert!(own_read >= 4 * WRITTEN && read < own_read / 3, "{figures:?}");
    assert!(own_flash >= OWN_FLASH_MIN && flash < own_flash / 3, "{figures:?}");
}
