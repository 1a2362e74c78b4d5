//! Clones of one golden image that share the cached data of their backing file
//! (docs/decisions/0071). The images are made by qemu-img and read through qemu-nbd.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use conformance::data::{Noise, assert_same, noise_file};
use conformance::nbd_client::{Client, read_range};
use conformance::process::descendants;
use conformance::scratch::wait_for;
use conformance::{Daemon, MIB, Scratch, Tool};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Size of the golden image, bytes; the last third was never written.
const SIZE: u64 = 48 * MIB;
const WRITTEN: u64 = 32 * MIB;

/// Size of clones that are larger than their golden image, bytes.
const CLONE_SIZE: u64 = 56 * MIB;

const SHARING: &str = "share_parent = true\nparent_cache = \"64M\"\n\
    cache = { pool = \"fast\", size = \"24M\", block_size = \"4K\", mode = \"write-back\" }";

fn qemu_img(args: &[&str]) {
    Tool::new("qemu-img").args(args).run();
}

struct Stage {
    // Dropped in this order.
    daemon: Option<Daemon>,
    scratch: Scratch,
    clones: Vec<&'static str>,
    clone_format: &'static str,
    /// Path of the golden image. Its file name is also the name of its disk.
    base: String,
    base_name: String,
    /// Content of the golden image.
    golden: Vec<u8>,
}

impl Stage {
    /// Creates a golden image in one format, and clones of it in another.
    fn new(base_format: &str, clone_format: &'static str, clones: &[&'static str], size: &[&str]) -> Stage {
        let scratch = Scratch::new();
        let file = scratch.path("content");
        noise_file(&file, WRITTEN, 71);
        OpenOptions::new().write(true).open(&file).unwrap().set_len(SIZE).unwrap();
        let golden = std::fs::read(&file).unwrap();
        let base_name = format!("golden.{base_format}");
        let base = scratch.text(&base_name);
        qemu_img(&["convert", "-f", "raw", "-O", base_format, &scratch.text("content"), &base]);
        let stage =
            Stage { daemon: None, scratch, clones: clones.to_vec(), clone_format, base, base_name, golden };
        for clone in clones {
            let image = stage.image(clone);
            let create: [&str; 9] =
                ["create", "-q", "-f", clone_format, "-F", base_format, "-b", &stage.base, &image];
            qemu_img(&[&create[..], size].concat());
        }
        stage
    }

    fn image(&self, clone: &str) -> String {
        self.scratch.text(&format!("{clone}.{}", self.clone_format))
    }

    /// Starts a daemon with the clones, and waits until they share their parent.
    #[track_caller]
    fn start(&mut self) {
        self.start_with(SHARING);
        for clone in &self.clones {
            wait_for("the clone to share its parent", || {
                self.shown(clone)["parent"] == self.base_name.as_str()
            });
        }
    }

    /// Starts a daemon with the clones, each with `settings` in its part of hob.toml.
    #[track_caller]
    fn start_with(&mut self, settings: &str) {
        let scratch = &self.scratch;
        let mut config = format!(
            "[[pool]]\nname = \"fast\"\ndevices = [\"{}\"]\nsize = \"320M\"\nsegment_size = \"1M\"\n",
            scratch.text("fast")
        );
        for clone in &self.clones {
            let image = self.image(clone);
            config += &format!("[[disk]]\nname = \"{clone}\"\nbacking = \"{image}\"\n{settings}\n");
        }
        scratch.configure(&config);
        self.daemon = Some(scratch.start_daemon());
        for clone in &self.clones {
            wait_for("the clone to be online", || self.shown(clone)["state"] == "online");
        }
    }

    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("it was started")
    }

    #[track_caller]
    fn shown(&self, disk: &str) -> Value {
        self.daemon().disk(disk)
    }

    fn disks(&self) -> Vec<String> {
        self.daemon().disks()
    }

    #[track_caller]
    fn number(&self, disk: &str, name: &str) -> u64 {
        self.daemon().number(disk, name)
    }

    /// Returns the process id of the `qemu-nbd` of the golden image.
    #[track_caller]
    fn server_of_golden_image(&self) -> Pid {
        let found = self.servers(|command| {
            command.contains(&self.base)
                && !self.clones.iter().any(|clone| command.contains(&self.image(clone)))
        });
        assert_eq!(found.len(), 1, "the qemu-nbd of the golden image");
        found[0]
    }

    /// Returns the process ids of the `qemu-nbd` processes with a matching command line.
    fn servers(&self, is_wanted: impl Fn(&str) -> bool) -> Vec<Pid> {
        let command = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let all = descendants(self.daemon().process.pid()).into_iter();
        let found = all.filter(|pid| is_wanted(&command(*pid)));
        found.map(|pid| Pid::from_raw(pid as i32).expect("a process id")).collect()
    }

    /// Returns the number of bytes that all disks have read from the images.
    fn backing_bytes(&self) -> u64 {
        self.disks().iter().map(|disk| self.number(disk, "backing_read_bytes")).sum()
    }

    /// Returns the content of a clone, as QEMU reads it.
    fn content(&self, clone: &str) -> Vec<u8> {
        let raw = self.scratch.text("converted");
        qemu_img(&["convert", "-f", self.clone_format, "-O", "raw", &self.image(clone), &raw]);
        std::fs::read(raw).unwrap()
    }
}

/// Cold reads of a clone hit data that another clone has read. Changes of any kind to one clone are
/// never visible in another, also after the daemon was killed.
#[test]
fn desktops_share_the_blocks_of_their_golden_image_and_nothing_else() {
    let mut stage = Stage::new("qcow2", "qcow2", &["a", "b", "c"], &["56M"]);
    let image_before = std::fs::read(&stage.base).unwrap();
    stage.start();
    assert_eq!(stage.disks(), ["a", "b", "c", "golden.qcow2"]);
    assert_eq!(stage.shown("golden.qcow2")["clones"], serde_json::json!(["a", "b", "c"]));
    let offered = Client::connect(&stage.scratch.nbd(), "golden.qcow2");
    assert!(offered.is_err(), "the golden image is offered to clients");
    let [mut a, mut b, mut c] = ["a", "b", "c"].map(|clone| stage.scratch.connect(clone));
    assert_eq!(a.size(), CLONE_SIZE);

    let before = stage.backing_bytes();
    assert_same(&read_range(&mut a, 0..SIZE), &stage.golden, 0, "the first clone and the golden image");
    let cold = stage.backing_bytes() - before;
    for clone in [&mut b, &mut c] {
        assert_same(&read_range(clone, 0..SIZE), &stage.golden, 0, "a later clone and the golden image");
    }
    let warm = stage.backing_bytes() - before - cold;
    println!("{cold} bytes were read from the images for the first clone, {warm} for two more");
    assert!(cold >= WRITTEN && warm < 2 * MIB, "{cold} and {warm} bytes");
    for clone in ["a", "b", "c"] {
        assert_eq!(stage.number(clone, "sectors_valid"), 0, "{clone} has promoted what is shared");
        assert_eq!(stage.number(clone, "shared_read_bytes"), SIZE);
        assert!(stage.daemon().stats(clone).reason("bypass", "shared") > 40);
    }
    assert!(stage.daemon().stats("golden.qcow2").hits() > 80);
    let refused = stage.daemon().try_ctl(&["disk", "remove", "golden.qcow2"]);
    assert!(!refused.success() && refused.all().contains("a, b, c"), "{}", refused.all());
    // Past the end of the golden image there are zeroes, which are the clone's own.
    let tail = vec![0; (CLONE_SIZE - SIZE) as usize];
    assert_same(&read_range(&mut a, SIZE..CLONE_SIZE), &tail, SIZE, "the clone past its golden image");
    assert_eq!(stage.number("a", "shared_read_bytes"), SIZE);

    // Writes, discards and zeroes, over the ends of clusters and inside a sector.
    let golden = [stage.golden.clone(), tail].concat();
    let (mut of_a, mut of_b) = (golden.clone(), golden.clone());
    let mut dice = Noise::new(5);
    for at in [MIB, 4 * MIB - 4096, 13 * MIB + 512, 40 * MIB, 50 * MIB] {
        for (clone, model) in [(&mut a, &mut of_a), (&mut b, &mut of_b)] {
            let bytes = dice.bytes(12288);
            clone.write(at, &bytes).unwrap();
            model[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
    }
    a.write_zeroes(20 * MIB - 8192, 16384).unwrap();
    of_a[20 * MIB as usize - 8192..][..16384].fill(0);
    // Whole clusters: the golden image's data must never be visible again.
    a.write_zeroes(24 * MIB, 4 * MIB as u32).unwrap();
    of_a[24 * MIB as usize..28 * MIB as usize].fill(0);
    b.trim(8 * MIB, 4 * MIB as u32).unwrap();
    let check = |[a, b, c]: [&mut Client; 3], of_a: &[u8], when: &str| {
        assert_same(&read_range(a, 0..CLONE_SIZE), of_a, 0, &format!("{when}: the first clone"));
        for range in [0..8 * MIB, 12 * MIB..CLONE_SIZE] {
            let expected = &of_b[range.start as usize..range.end as usize];
            assert_same(
                &read_range(b, range.clone()),
                expected,
                range.start,
                &format!("{when}: the second clone"),
            );
        }
        assert_same(&read_range(c, 0..CLONE_SIZE), &golden, 0, &format!("{when}: the clone without changes"));
    };
    check([&mut a, &mut b, &mut c], &of_a, "at once");
    // After a trim, the backing decides the content, and the content does not change again.
    let trimmed = read_range(&mut b, 8 * MIB..12 * MIB);
    for (name, clone) in [("a", &mut a), ("b", &mut b)] {
        clone.flush().unwrap();
        stage.daemon().ctl(&["drain", name]);
    }
    check([&mut a, &mut b, &mut c], &of_a, "drained");
    // The clone is not drained: some data is only on flash.
    for at in [2 * MIB, 29 * MIB, 33 * MIB] {
        let bytes = dice.bytes(65536);
        a.write(at, &bytes).unwrap();
        of_a[at as usize..][..bytes.len()].copy_from_slice(&bytes);
    }
    a.flush().unwrap();
    check([&mut a, &mut b, &mut c], &of_a, "dirty");
    drop((a, b, c));

    // SIGKILL: the next daemon asks again which blocks are the clone's own.
    stage.daemon.take().expect("it runs").kill();
    stage.start();
    let [mut a, mut b, mut c] = ["a", "b", "c"].map(|clone| stage.scratch.connect(clone));
    check([&mut a, &mut b, &mut c], &of_a, "killed");
    assert_same(&read_range(&mut b, 8 * MIB..12 * MIB), &trimmed, 8 * MIB, "killed: what was trimmed");
    for clone in ["a", "b", "c"] {
        assert!(stage.number(clone, "shared_read_bytes") > 0, "{clone}");
    }
    drop((a, b, c));
    stage.daemon().ctl(&["disk", "remove", "a"]);
    stage.daemon().ctl(&["disk", "remove", "b"]);
    assert_eq!(stage.disks(), ["c", "golden.qcow2"]);
    stage.daemon().ctl(&["disk", "remove", "c"]);
    wait_for("the parent's disk to go", || stage.disks().is_empty());
    stage.daemon.take().expect("it runs").stop();
    assert_same(&stage.content("a"), &of_a, 0, "the first clone's image");
    let of_b = stage.content("b");
    assert_same(&of_b[8 * MIB as usize..][..4 * MIB as usize], &trimmed, 8 * MIB, "the second clone's image");
    assert_same(&stage.content("c"), &golden, 0, "the unchanged clone's image");
    assert!(std::fs::read(&stage.base).unwrap() == image_before, "the golden image was written");
}

/// Raw and VMDK images are golden images too. QEMU cannot write one while its clones are served.
#[test]
fn golden_images_of_other_formats_are_shared() {
    for (base_format, clone_format) in [("raw", "qcow2"), ("vmdk", "vmdk")] {
        let mut stage = Stage::new(base_format, clone_format, &["a", "b"], &[]);
        stage.start();
        let locked = Tool::new("qemu-io").args(["-f", base_format, "-c", "write 0 4k", &stage.base]);
        let locked = locked.run_failing();
        assert!(locked.all().contains("lock"), "{}", locked.all());
        let (mut a, mut b) = (stage.scratch.connect("a"), stage.scratch.connect("b"));
        let before = stage.backing_bytes();
        assert_same(&read_range(&mut a, 0..SIZE), &stage.golden, 0, "the first clone and the golden image");
        let cold = stage.backing_bytes() - before;
        assert_same(&read_range(&mut b, 0..SIZE), &stage.golden, 0, "the second clone and the golden image");
        let warm = stage.backing_bytes() - before - cold;
        assert!(cold >= WRITTEN && warm < MIB, "{base_format}: {cold} and {warm} bytes");
        let bytes = Noise::new(7).bytes(65536);
        a.write(3 * MIB - 512, &bytes).unwrap();
        a.flush().unwrap();
        assert!(a.read(3 * MIB - 512, 65536).unwrap() == bytes);
        let range = 2 * MIB..4 * MIB;
        let expected = &stage.golden[range.start as usize..range.end as usize];
        assert_same(&read_range(&mut b, range), expected, 2 * MIB, "the other clone");
        drop((a, b));
        stage.daemon.take().expect("it runs").stop();
    }
}

/// `qemu-nbd` does not lock the raw file below a qcow2 image against writers, so hob does. It also
/// holds the lock while the `qemu-nbd` of the golden image is restarted.
#[test]
fn a_raw_file_below_a_golden_image_is_locked() {
    let mut stage = Stage::new("qcow2", "qcow2", &["a"], &[]);
    let bottom = stage.scratch.text("bottom.raw");
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", &stage.base, &bottom]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &bottom, &stage.base]);
    stage.start();
    let write = || Tool::new("qemu-io").args(["-f", "raw", "-c", "write 0 4k", &bottom]);
    let refused = write().run_failing();
    assert!(refused.all().contains("lock"), "{}", refused.all());
    kill_process(stage.server_of_golden_image(), Signal::KILL).unwrap();
    let refused = write().run_failing();
    assert!(refused.all().contains("lock"), "{}", refused.all());
    // Another reader is not excluded.
    Tool::new("qemu-io").args(["-r", "-f", "raw", "-c", "read 0 4k", &bottom]).run();
    assert_same(&read_range(&mut stage.scratch.connect("a"), 0..SIZE), &stage.golden, 0, "the clone");
    stage.daemon.take().expect("it runs").stop();
    write().run();
}

/// Promise 2. A golden image must not change. If a program that takes no locks changes it, its
/// clones stop sharing it, and no daemon serves the outdated data.
#[test]
fn a_golden_image_that_changes_is_not_shared_any_more() {
    let mut stage = Stage::new("raw", "qcow2", &["a", "b"], &[]);
    stage.start();
    for clone in ["a", "b"] {
        assert_same(&read_range(&mut stage.scratch.connect(clone), 0..SIZE), &stage.golden, 0, clone);
    }
    let bytes = Noise::new(9).bytes(MIB as usize);
    let file = OpenOptions::new().write(true).open(&stage.base).unwrap();
    file.write_all_at(&bytes, 2 * MIB).unwrap();
    file.sync_all().unwrap();
    drop(file);
    stage.golden[2 * MIB as usize..3 * MIB as usize].copy_from_slice(&bytes);
    for clone in ["a", "b"] {
        let reason = || stage.shown(clone)["parent_reason"].as_str().unwrap_or_default().to_owned();
        wait_for("the clone to stop sharing", || reason().contains("has changed"));
        let before = stage.number(clone, "shared_read_bytes");
        assert_same(&read_range(&mut stage.scratch.connect(clone), 0..SIZE), &stage.golden, 0, clone);
        assert_eq!(stage.number(clone, "shared_read_bytes"), before);
    }
    assert!(stage.daemon().process.stderr().contains("a golden image must not change"), "it is logged");
    // The cache of the golden image still has the outdated data.
    for is_clean in [true, false] {
        let daemon = stage.daemon.take().expect("it runs");
        if is_clean {
            daemon.stop();
        } else {
            daemon.kill();
        }
        stage.start();
        for clone in ["a", "b"] {
            assert_same(&read_range(&mut stage.scratch.connect(clone), 0..SIZE), &stage.golden, 0, clone);
            assert!(stage.number(clone, "shared_read_bytes") > 0, "{clone}");
        }
    }
    stage.daemon.take().expect("it runs").stop();
}

/// Sends SIGSTOP. The signal takes effect with a delay; when this function returns, no thread of the
/// process runs.
#[track_caller]
fn stop(process: Pid) {
    kill_process(process, Signal::STOP).unwrap();
    let tasks = format!("/proc/{}/task", process.as_raw_nonzero());
    wait_for("the stop of every thread", || {
        std::fs::read_dir(&tasks).expect("a live process").flatten().all(|task| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
        })
    });
}

/// Promise 2. The daemon is stopped, its `qemu-nbd` processes end, and other programs change the golden
/// image and a clone. The daemon cannot see when that happened, and still serves no outdated data.
#[test]
fn changes_while_the_daemon_is_stopped_are_noticed() {
    let mut stage = Stage::new("raw", "qcow2", &["a", "b"], &[]);
    stage.start();
    let (mut a, mut b) = (stage.scratch.connect("a"), stage.scratch.connect("b"));
    b.write(8 * MIB, &Noise::new(3).bytes(65536)).unwrap();
    b.flush().unwrap();
    stage.daemon().ctl(&["drain", "b"]);
    for clone in [&mut a, &mut b] {
        read_range(clone, 0..WRITTEN);
    }
    let before = stage.number("a", "shared_read_bytes");
    read_range(&mut a, 0..WRITTEN);
    assert!(stage.number("a", "shared_read_bytes") > before, "the golden image is shared");

    let daemon = Pid::from_raw(stage.daemon().process.pid() as i32).expect("a process id");
    stop(daemon);
    let started = std::time::Instant::now();
    let servers = stage.servers(|command| command.contains("qemu-nbd"));
    assert_eq!(servers.len(), 2, "one for each clone");
    servers.into_iter().for_each(|server| kill_process(server, Signal::KILL).unwrap());
    let bytes = Noise::new(11).bytes(MIB as usize);
    let file = OpenOptions::new().write(true).open(&stage.base).unwrap();
    file.write_all_at(&bytes, 2 * MIB).unwrap();
    drop(file);
    let image = stage.image("b");
    Tool::new("qemu-io").args(["-f", "qcow2", "-c", "write -P 0xab 8M 64k", &image]).run();
    // Shorter pauses are not noticed.
    std::thread::sleep(Duration::from_secs(3).saturating_sub(started.elapsed()));
    kill_process(daemon, Signal::CONT).unwrap();

    assert_same(&read_range(&mut a, 2 * MIB..3 * MIB), &bytes, 2 * MIB, "the changed golden image");
    drop((a, b));
    wait_for("the changed image of the clone", || {
        let address = stage.scratch.nbd();
        let read = Client::connect(&address, "b").ok().and_then(|mut b| b.read(8 * MIB, 65536).ok());
        read.is_some_and(|bytes| bytes.iter().all(|byte| *byte == 0xab))
    });
    assert_same(
        &read_range(&mut stage.scratch.connect("b"), 2 * MIB..3 * MIB),
        &bytes,
        2 * MIB,
        "the other clone",
    );
    stage.daemon.take().expect("it runs").stop();
}

/// The parent's disk hangs, but the clones can still read their backing file themselves. They wait
/// some seconds for the parent's disk, and not longer. Cached data of the parent is still served.
#[test]
fn a_parents_disk_that_hangs_delays_its_clones_only_for_seconds() {
    let mut stage = Stage::new("qcow2", "qcow2", &["a"], &[]);
    stage.start();
    let mut clone = stage.scratch.connect("a");
    let check = |clone: &mut Client, at: u64| {
        let bytes = clone.read(at, 65536).unwrap_or_else(|error| panic!("a read at {at}: {error}"));
        assert_same(&bytes, &stage.golden[at as usize..][..65536], at, "the clone and the golden image");
    };
    check(&mut clone, 0);
    wait_for("the parent's disk to cache the data", || stage.number(&stage.base_name, "sectors_valid") >= 16);
    let pid = stage.server_of_golden_image();
    kill_process(pid, Signal::STOP).unwrap();
    let before = stage.number("a", "shared_read_bytes");
    for at in [8 * MIB, 12 * MIB] {
        check(&mut clone, at);
    }
    assert_eq!(stage.number("a", "shared_read_bytes"), before, "the clone has read the data itself");
    check(&mut clone, 0);
    assert_eq!(stage.number("a", "shared_read_bytes"), before + 65536, "a hit of the parent's disk");
    // The parent's disk answers the reads late, which changes nothing.
    kill_process(pid, Signal::CONT).unwrap();
    let mut at = 16 * MIB;
    wait_for("the parent's disk to serve its clone again", || {
        let before = stage.number("a", "shared_read_bytes");
        check(&mut clone, at);
        // The clone may have the data itself now.
        at += 65536;
        stage.number("a", "shared_read_bytes") > before
    });
    drop(clone);
    stage.daemon.take().expect("it runs").stop();
}

/// A disk that cannot share is served with the reason, and its health does not suffer.
#[test]
fn images_without_a_backing_file_are_served_with_the_reason() {
    let mut stage = Stage::new("qcow2", "qcow2", &[], &[]);
    stage.start();
    let output = stage.daemon().try_ctl(&[
        "disk",
        "add",
        "alone",
        "--backing",
        &stage.base,
        "--read-only",
        "--share-parent",
    ]);
    assert!(output.success() && output.all().contains("no parent"), "{}", output.all());
    assert!(stage.shown("alone")["parent_reason"].as_str().unwrap().contains("no parent"));
    assert_eq!(stage.scratch.connect("alone").read(0, 4096).unwrap(), stage.golden[..4096]);
    assert_eq!(stage.disks(), ["alone"]);
    // Right after its start, the disk's backing may be slow.
    let health = || stage.daemon().try_ctl(&["health"]).all();
    wait_for("health without the disk", || !health().contains("alone"));
    stage.daemon.take().expect("it runs").stop();
}

/// Costs of the first boots of ten desktops, with and without sharing.
#[test]
fn the_more_desktops_the_more_is_saved() {
    const DESKTOPS: [&str; 10] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];
    /// Bytes that each desktop reads.
    const BOOT: u64 = 16 * MIB;
    let mut stage = Stage::new("qcow2", "qcow2", &DESKTOPS, &[]);
    let own = "cache = { pool = \"fast\", size = \"20M\", block_size = \"16K\" }";
    let mut figures = Vec::new();
    for settings in [own.to_owned(), format!("share_parent = true\nparent_cache = \"24M\"\n{own}")] {
        stage.start_with(&settings);
        if figures.len() == 1 {
            for desktop in DESKTOPS {
                let is_shared = || stage.shown(desktop)["parent"] == stage.base_name.as_str();
                wait_for("the desktop to share its parent", is_shared);
            }
        }
        let before = stage.backing_bytes();
        for desktop in DESKTOPS {
            let expected = &stage.golden[..BOOT as usize];
            let mut client = stage.scratch.connect(desktop);
            assert_same(&read_range(&mut client, 0..BOOT), expected, 0, desktop);
            // This read waits for a fill. With too many fills in flight, hob starts no more fills.
            client.read(BOOT - 65536, 65536).unwrap();
        }
        let read = stage.backing_bytes() - before;
        // Fills end after the replies.
        let flash =
            || -> u64 { stage.disks().iter().map(|disk| 4096 * stage.number(disk, "sectors_valid")).sum() };
        let filled = if figures.is_empty() { 10 * BOOT } else { BOOT };
        wait_for("the end of the fills", || flash() >= filled / 10 * 9);
        let flash = flash();
        println!("{} disks: {read} bytes from the images, {flash} in flash", stage.disks().len());
        figures.push((read, flash));
        stage.daemon.take().expect("it runs").stop();
        std::fs::remove_dir_all(stage.scratch.path("state")).unwrap();
        std::fs::remove_file(stage.scratch.path("fast")).unwrap();
    }
    let [(own_read, own_flash), (read, flash)] = figures[..] else { unreachable!() };
    assert!(own_read >= 10 * BOOT && read < own_read / 5, "{figures:?}");
    assert!(own_flash >= 10 * BOOT * 9 / 10 && flash < own_flash / 5, "{figures:?}");
}
