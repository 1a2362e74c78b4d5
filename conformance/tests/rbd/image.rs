//! A disk on Ceph RBD: which host may write an image, and what happens on a host that loses it;
//! snapshots; allocation.

use std::time::{Duration, Instant};

use conformance::data::{Noise, assert_same, noise_file};
use conformance::nbd_client::{CMD_WRITE, Client, EPERM, read_mibs};
use conformance::scratch::{wait_for, wait_until};
use conformance::{Cluster, Daemon, MIB, Scratch, Serve, Tool};
use rustix::process::Signal;
use serde_json::Value;

const SIZE: u64 = 32 * MIB;

/// Maximum time until a disk serves nothing after the loss of its lock. hob checks the lock once a
/// second.
const FENCED_MAX: Duration = Duration::from_secs(60);

/// Maximum time until a disk is served again after another host had it; hob retries every few
/// seconds.
const BACK_MAX: Duration = Duration::from_secs(120);

/// Maximum time until another client can break the lock of a client that has died.
const DEAD_MAX: Duration = Duration::from_secs(180);

/// Creates an image `disk` of `SIZE` bytes of noise, and returns the noise.
#[track_caller]
fn image(cluster: &Cluster, scratch: &Scratch, seed: u64) -> Vec<u8> {
    let file = scratch.path("disk.img");
    noise_file(&file, SIZE, seed);
    cluster.import(&file, "disk");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    bytes
}

/// Starts a daemon with the disk `vm` on that image and a persistent cache in write-back.
#[track_caller]
fn daemon(cluster: &Cluster, scratch: &Scratch) -> Daemon {
    let config = format!(
        "[[pool]]\nname = \"fast\"\ndevices = [\"{}\"]\nsize = \"96M\"\nsegment_size = \"1M\"\n\
         [[disk]]\nname = \"vm\"\nbacking = \"{}\"\n\
         cache = {{ pool = \"fast\", size = \"40M\", block_size = \"4K\", mode = \"write-back\" }}\n",
        scratch.text("flash"),
        cluster.spec("disk"),
    );
    scratch.configure(&config);
    let daemon = scratch.start_daemon();
    wait_for("the NBD socket", || scratch.path("nbd.sock").exists());
    daemon
}

#[track_caller]
fn state(daemon: &Daemon) -> (String, String) {
    let shown = daemon.disk("vm");
    let word = |name: &str| shown[name].as_str().unwrap_or_default().to_owned();
    (word("state"), word("reason"))
}

#[track_caller]
fn wait_online(daemon: &Daemon, limit: Duration) {
    wait_until("the disk to be online", limit, || state(daemon).0 == "online");
}

/// Connects to the disk after it was opened again; while the image is lost, every read fails.
#[track_caller]
fn served_again(scratch: &Scratch) -> Client {
    let mut found = None;
    let address = scratch.nbd();
    wait_until("the disk to be back", BACK_MAX, || {
        found = Client::connect(&address, "vm").ok();
        found.as_mut().is_some_and(|client| client.read(0, 4096).is_ok())
    });
    found.expect("it has just read")
}

/// Returns the time until cached data is not served any more.
#[track_caller]
fn fenced(client: &mut Client) -> Duration {
    let begun = Instant::now();
    wait_until("reads of what is in flash to fail", FENCED_MAX, || client.read(MIB, 4096).is_err());
    begun.elapsed()
}

/// A disk has one writer: the client that broke the lock. The former writer then serves nothing,
/// not even cached data, and serves the other client's data when the other client has ended.
#[test]
fn an_image_has_one_writer_and_a_replaced_writer_is_fenced() {
    let (cluster, scratch, other) = (Cluster::shared(), Scratch::new(), Scratch::new());
    let before = image(&cluster, &scratch, 31);
    let mut daemon = daemon(&cluster, &scratch);
    wait_online(&daemon, BACK_MAX);
    let mut client = scratch.connect("vm");
    client.write(0, &[1; 65536]).unwrap();
    daemon.ctl(&["drain", "vm"]);
    assert_same(&read_mibs(&mut client, 0..SIZE)[65536..], &before[65536..], 65536, "the disk and the image");
    // A second client receives the name of the first, and changes nothing.
    let second = Serve::disk(&cluster.spec("disk"));
    let refused = second.refused(&other);
    assert!(refused.all().contains("in use"), "{}", refused.all());
    assert_eq!(client.read(0, 65536).unwrap(), [1; 65536]);
    assert_eq!(state(&daemon).0, "online");
    // The lock is broken, and no client takes it, so the disk is online again automatically.
    cluster.break_lock("disk");
    let fenced = fenced(&mut client);
    println!("fenced {fenced:?} after the lock was broken");
    let mut client = served_again(&scratch);
    assert_same(&read_mibs(&mut client, 0..SIZE)[65536..], &before[65536..], 65536, "the disk and the image");
    // Another client takes the lock while this client is paused and cannot notice.
    daemon.process.signal(Signal::STOP);
    cluster.break_lock("disk");
    let second = second.start(&other);
    let mut writer = second.connect();
    writer.write(MIB, &[2; 65536]).unwrap();
    daemon.process.signal(Signal::CONT);
    println!("fenced {:?} after it woke up", self::fenced(&mut client));
    let lost = |(state, reason): &(String, String)| state == "offline" && !reason.is_empty();
    wait_until("the disk to be offline", FENCED_MAX, || lost(&state(&daemon)));
    assert!(Client::connect(&scratch.nbd(), "vm").is_err(), "it is offered still");
    // The disk stays offline as long as the other client runs.
    std::thread::sleep(Duration::from_secs(6));
    assert!(lost(&state(&daemon)), "{:?}", state(&daemon));
    drop(writer);
    second.stop();
    let mut client = served_again(&scratch);
    assert_eq!(client.read(MIB, 65536).unwrap(), [2; 65536], "what the other wrote");
    assert_eq!(client.read(0, 65536).unwrap(), [1; 65536]);
    drop(client);
    daemon.stop();
}

/// Promise 1: acknowledged writes survive kill -9. The lock of the killed daemon is released when
/// the cluster has blocklisted it, and the new daemon waits for that.
#[test]
fn a_killed_daemon_gets_its_image_back_with_dirty_data() {
    let (cluster, scratch) = (Cluster::shared(), Scratch::new());
    let mut expected = image(&cluster, &scratch, 32);
    let first = daemon(&cluster, &scratch);
    wait_online(&first, BACK_MAX);
    let mut client = scratch.connect("vm");
    let mut dice = Noise::new(9);
    for _ in 0..200 {
        let at = dice.below(SIZE / 4096 - 4) * 4096;
        let bytes = dice.bytes(16384);
        client.write(at, &bytes).unwrap();
        expected[at as usize..][..bytes.len()].copy_from_slice(&bytes);
    }
    client.flush().unwrap();
    first.kill();
    let again = daemon(&cluster, &scratch);
    let begun = Instant::now();
    wait_online(&again, DEAD_MAX);
    println!("back {:?} after the next start", begun.elapsed());
    assert_same(
        &read_mibs(&mut scratch.connect("vm"), 0..SIZE),
        &expected,
        0,
        "the disk and what was written",
    );
    again.ctl(&["drain", "vm"]);
    again.stop();
    assert_same(&cluster.export("disk"), &expected, 0, "the image and what was written");
}

/// A snapshot has the content of the image at its creation. A snapshot is read-only, and hob
/// requires a read-only disk for it.
#[test]
fn snapshots_are_read_and_not_written() {
    let (cluster, scratch) = (Cluster::shared(), Scratch::new());
    let before = image(&cluster, &scratch, 33);
    cluster.rbd(&["snap", "create", "rbd/disk@monday"]);
    let hob = Serve::disk(&cluster.spec("disk")).start(&scratch);
    hob.connect().write(0, &[7; 4096]).unwrap();
    hob.stop();
    let spec = cluster.spec("disk@monday");
    let refused = Serve::disk(&spec).refused(&scratch);
    assert!(refused.all().contains("snapshots are read-only"), "{}", refused.all());
    let hob =
        Serve::disk(&spec).flag("--read-only").cached(&scratch.path("pool"), "40M", "4K").start(&scratch);
    let mut client = hob.connect();
    for _ in 0..2 {
        assert_same(&read_mibs(&mut client, 0..SIZE), &before, 0, "the snapshot and what the image was");
    }
    assert!(hob.stats().hits() > 0, "{}", hob.stats().text());
    assert_eq!(client.call(0, CMD_WRITE, 0, 4096, &[1; 4096]).unwrap(), EPERM);
    drop(client);
    // A snapshot is not locked: two hosts may read it while the image is written.
    let other = Scratch::new();
    let second = Serve::disk(&spec).flag("--read-only").start(&other);
    assert_eq!(second.connect().read(0, 4096).unwrap(), before[..4096]);
    second.stop();
    hob.stop();
    let absent = Serve::disk(&cluster.spec("disk@tuesday")).flag("--read-only").refused(&scratch);
    assert!(absent.all().contains("disk@tuesday"), "{}", absent.all());
}

/// Returns the extents that nbdinfo lists: first byte, length, and whether the extent is a hole.
#[track_caller]
fn map(uri: &str) -> Vec<(u64, u64, bool)> {
    let text = Tool::new("nbdinfo").args(["--map", "--json", uri]).run();
    let extents: Value = serde_json::from_str(&text).unwrap();
    let mut merged: Vec<(u64, u64, bool)> = Vec::new();
    for extent in extents.as_array().expect("a list") {
        let number = |name: &str| extent[name].as_u64().unwrap_or_else(|| panic!("no {name}: {extent}"));
        let (at, len, kind) = (number("offset"), number("length"), number("type"));
        assert!(kind == 0 || kind == 3, "a hole reads as zeroes: {extent}");
        match merged.last_mut() {
            Some(last) if last.2 == (kind == 3) => last.1 += len,
            _ => merged.push((at, len, kind == 3)),
        }
    }
    merged
}

/// A client that copies a disk learns which parts were never written, also for a clone whose parent
/// has data.
#[test]
fn data_that_was_never_written_is_a_hole() {
    let (cluster, scratch) = (Cluster::shared(), Scratch::new());
    cluster.rbd(&["create", "--size", "64M", "rbd/golden"]);
    let hob = Serve::disk(&cluster.spec("golden")).start(&scratch);
    assert_eq!(map(&hob.uri()), [(0, 64 * MIB, true)]);
    hob.connect().write(5 * MIB, &[1; 4096]).unwrap();
    // Objects have 4 MiB, and are reported as a whole.
    let golden = [(0, 4 * MIB, true), (4 * MIB, 4 * MIB, false), (8 * MIB, 56 * MIB, true)];
    assert_eq!(map(&hob.uri()), golden);
    hob.stop();
    cluster.rbd(&["snap", "create", "rbd/golden@base"]);
    cluster.rbd(&["clone", "--rbd-default-clone-format", "2", "rbd/golden@base", "rbd/clone"]);
    let hob = Serve::disk(&cluster.spec("clone")).start(&scratch);
    assert_eq!(map(&hob.uri()), golden);
    let mut client = hob.connect();
    client.write(20 * MIB, &[2; 4096]).unwrap();
    client.write(64 * MIB - 512, &[3; 512]).unwrap();
    assert_eq!(client.read(5 * MIB, 4096).unwrap(), [1; 4096], "its parent's");
    let clone = [
        (0, 4 * MIB, true),
        (4 * MIB, 4 * MIB, false),
        (8 * MIB, 12 * MIB, true),
        (20 * MIB, 4 * MIB, false),
        (24 * MIB, 36 * MIB, true),
        (60 * MIB, 4 * MIB, false),
    ];
    assert_eq!(map(&hob.uri()), clone);
    // A copy without the holes equals the disk.
    let copy = scratch.path("copy.img");
    std::fs::File::create(&copy).unwrap().set_len(64 * MIB).unwrap();
    Tool::new("nbdcopy").args([&hob.uri(), &scratch.text("copy.img")]).run();
    drop(client);
    hob.stop();
    assert_same(&std::fs::read(&copy).unwrap(), &cluster.export("clone"), 0, "the copy and the clone");
}

/// An image grows while its disk is served in write-back. The disk grows by command, and its cache
/// survives the change and a kill.
#[test]
fn an_image_that_grew_makes_its_disk_grow_when_that_is_asked_for() {
    let (cluster, scratch) = (Cluster::shared(), Scratch::new());
    image(&cluster, &scratch, 33);
    let first = daemon(&cluster, &scratch);
    wait_online(&first, BACK_MAX);
    let mut client = scratch.connect("vm");
    client.write(0, &[1; 65536]).unwrap();
    assert!(client.write(SIZE, &[2; 4096]).is_err(), "there is nothing yet");
    cluster.rbd(&["resize", "--no-progress", "--size", &format!("{}M", 2 * SIZE / MIB), "rbd/disk"]);
    first.ctl(&["disk", "resize", "vm"]);
    let mut client = scratch.connect("vm");
    client.write(2 * SIZE - 4096, &[3; 4096]).unwrap();
    assert_eq!(client.read(SIZE, 4096).unwrap(), [0; 4096], "what is new reads as zeroes");
    client.flush().unwrap();
    first.kill();
    let second = daemon(&cluster, &scratch);
    wait_online(&second, DEAD_MAX);
    let mut client = served_again(&scratch);
    assert_eq!(client.read(0, 65536).unwrap(), [1; 65536]);
    assert_eq!(client.read(2 * SIZE - 4096, 4096).unwrap(), [3; 4096]);
    second.ctl(&["drain", "vm"]);
    drop(client);
    second.stop();
    let bytes = cluster.export("disk");
    assert_eq!(
        (bytes.len() as u64, &bytes[..4], &bytes[bytes.len() - 4..]),
        (2 * SIZE, &[1; 4][..], &[3; 4][..])
    );
}
