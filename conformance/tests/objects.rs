//! Disks of objects for users: created, filled and read by other programs, opened by two writers,
//! and recovered.

use std::time::Duration;

use conformance::data::{assert_same_file, noise_file};
use conformance::hob::command;
use conformance::nbd_client::Client;
use conformance::scratch::wait_for;
use conformance::{MIB, Scratch, Serve, Tool};

fn made(scratch: &Scratch, size: &str, object_size: &str) -> String {
    let spec = format!("objects+file://{}", scratch.text("objects"));
    let made = command(&["objects", "create", &spec, "--size", size, "--object-size", object_size]);
    assert!(made.success(), "{}", made.all());
    spec
}

fn shown(spec: &str) -> serde_json::Value {
    let shown = command(&["objects", "show", spec, "-o", "json"]);
    assert!(shown.success(), "{}", shown.all());
    serde_json::from_str(&shown.stdout).unwrap()
}

/// qemu-img copies a sparse disk in and out. The disk occupies as much space as was written, and no
/// host has the disk open after hob has ended.
#[test]
fn a_copied_image_is_read_back_and_occupies_the_written_space() {
    let scratch = Scratch::new();
    let spec = made(&scratch, "64M", "1M");
    noise_file(&scratch.path("noise"), 5 * MIB + 12_288, 3);
    Tool::new("truncate").args(["-s", "64M", &scratch.text("noise")]).run();
    let hob = Serve::disk(&spec).start(&scratch);
    let convert = |from: &str, to: &str| {
        Tool::new("qemu-img").args(["convert", "-n", "-f", "raw", "-O", "raw", "-W", from, to]).run();
    };
    convert(&scratch.text("noise"), &hob.uri());
    assert!(shown(&spec)["owner"].as_str().unwrap().starts_with("process "));
    hob.stop();
    let after = shown(&spec);
    assert_eq!((after["owner"].as_str(), after["objects"].as_u64()), (None, Some(6)), "{after}");
    let hob = Serve::disk(&spec).flag("--read-only").start(&scratch);
    let map = Tool::new("qemu-img").args(["map", "--output=json", "-f", "raw", &hob.uri()]).run();
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let extents: Vec<_> = map.as_array().unwrap().iter().collect();
    assert_eq!(
        (extents[0]["data"].as_bool(), extents[0]["length"].as_u64()),
        (Some(true), Some(6 * MIB)),
        "{map}"
    );
    assert_eq!(
        (extents[1]["data"].as_bool(), extents[1]["zero"].as_bool()),
        (Some(false), Some(true)),
        "{map}"
    );
    Tool::new("truncate").args(["-s", "64M", &scratch.text("back")]).run();
    convert(&hob.uri(), &scratch.text("back"));
    assert_same_file(&scratch.path("noise"), &scratch.path("back"));
}

/// fio verifies its writes after kill -9.
#[test]
fn fio_verifies_objects_and_a_killed_server_finds_its_disk_again() {
    let scratch = Scratch::new();
    let spec = made(&scratch, "32M", "512K");
    let fio = |uri: &str, more: &[&str]| {
        let output = Tool::new("fio")
            .args(["--name=verify", "--ioengine=nbd", "--uri", uri, "--rw=randwrite", "--bsrange=4k-64k"])
            .args([
                "--size=32M",
                "--iodepth=16",
                "--serialize_overlap=1",
                "--verify=crc32c",
                "--verify_fatal=1",
            ])
            .args(["--randseed=7", "--allrandrepeat=0", "--output-format=terse"])
            .args(more)
            .limit(Duration::from_secs(300))
            .output();
        assert!(output.success() && !output.all().contains("verify:"), "fio: {}", output.all());
    };
    let hob = Serve::disk(&spec).start(&scratch);
    fio(&hob.uri(), &["--do_verify=1", "--end_fsync=1"]);
    hob.kill();
    assert!(shown(&spec)["owner"].is_string(), "it did not close it");
    let hob = Serve::disk(&spec).start(&scratch);
    fio(&hob.uri(), &["--verify_only=1"]);
    hob.stop();
}

/// Unflushed writes are only in hob's memory. If a kill of hob loses writes, a guest that
/// reconnects learns of the loss by one failed flush. If no write is lost, no flush fails.
#[test]
fn a_kill_is_reported_by_one_failed_flush() {
    let scratch = Scratch::new();
    let spec = made(&scratch, "8M", "64K");
    let killed = |write_back: bool, change: &mut dyn FnMut(&mut Client)| {
        let mut serve = Serve::disk(&spec);
        if write_back {
            serve = serve.cached(&scratch.path("pool"), "16M", "4K").arg("--mode", "write-back");
        }
        let hob = serve.start(&scratch);
        change(&mut hob.connect());
        hob.kill();
        serve.start(&scratch)
    };
    let flushes = |client: &mut Client| [client.flush().is_ok(), client.flush().is_ok()];

    let hob = killed(false, &mut |client| client.write(0, &[1; 4096]).unwrap());
    assert_eq!(flushes(&mut hob.connect()), [false, true], "the write is lost");
    assert_eq!(flushes(&mut hob.connect()), [true, true], "one guest wrote");
    assert_eq!(hob.connect().read(0, 4096).unwrap(), [0; 4096]);
    hob.stop();

    let hob = killed(false, &mut |client| {
        client.write(0, &[2; 4096]).unwrap();
        client.flush().unwrap();
        client.read(0, 4096).unwrap();
    });
    assert_eq!(flushes(&mut hob.connect()), [true, true], "nothing is lost");
    hob.stop();

    let hob = killed(true, &mut |client| client.write(0, &[3; 4096]).unwrap());
    assert_eq!(flushes(&mut hob.connect()), [true, true], "the write is in the cache");
    assert_eq!(hob.connect().read(0, 4096).unwrap(), [3; 4096]);
    hob.stop();

    // The second kill comes before a guest has received the report.
    killed(false, &mut |client| client.write(0, &[4; 4096]).unwrap()).kill();
    let hob = Serve::disk(&spec).start(&scratch);
    assert_eq!(flushes(&mut hob.connect()), [false, true], "the report survives the second kill");
    hob.stop();
}

/// hob refuses a second hob that opens the disk, and a command that takes the disk from a running
/// hob of this host.
#[test]
fn a_disk_of_objects_has_one_writer() {
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let spec = made(&scratch, "8M", "64K");
    let hob = Serve::disk(&spec).start(&scratch);
    let refused = Serve::disk(&spec).refused(&other);
    assert!(refused.all().contains("in use") && refused.all().contains("process"), "{}", refused.all());
    let unlocked = command(&["objects", "unlock", &spec]);
    assert!(!unlocked.success() && unlocked.all().contains("still runs"), "{}", unlocked.all());
    hob.kill();
    Serve::disk(&spec).start(&other).stop();
    let nothing = command(&["objects", "unlock", &spec]);
    assert!(!nothing.success() && nothing.all().contains("no host has the disk open"), "{}", nothing.all());
    let again = command(&["objects", "create", &spec, "--size", "8M"]);
    assert!(!again.success() && again.all().contains("already"), "{}", again.all());
}

/// hob takes a disk from a host that did not close it only with `--yes`, and says what is lost.
#[test]
fn an_unlock_says_what_is_lost_and_needs_yes() {
    let scratch = Scratch::new();
    let spec = made(&scratch, "8M", "64K");
    let hob = Serve::disk(&spec).start(&scratch);
    hob.connect().write(0, &[1; 4096]).unwrap();
    hob.kill();
    let unlock = |more: &[&str]| command(&[&["objects", "unlock", spec.as_str()][..], more].concat());
    let (asked, rehearsed) = (unlock(&[]), unlock(&["--dry-run"]));
    assert!(!asked.success() && asked.all().contains("pass --yes"), "{}", asked.all());
    assert!(rehearsed.success(), "{}", rehearsed.all());
    for said in [asked.all(), rehearsed.all()] {
        assert!(said.contains("unflushed writes of process"), "{said}");
    }
    assert!(shown(&spec)["owner"].is_string(), "nothing was changed");
    let unlocked = unlock(&["--yes"]);
    assert!(unlocked.success() && unlocked.all().contains("unlocked"), "{}", unlocked.all());
    assert!(shown(&spec)["owner"].is_null(), "{}", shown(&spec));
    Serve::disk(&spec).start(&scratch).stop();
}

/// Leftovers of an interrupted hob are deleted automatically.
#[test]
fn leftovers_of_a_killed_server_go() {
    let scratch = Scratch::new();
    let spec = made(&scratch, "8M", "64K");
    let data = scratch.path("objects/data");
    let hob = Serve::disk(&spec).start(&scratch);
    let mut client = hob.connect();
    client.write(0, &[1; 65536]).unwrap();
    client.flush().unwrap();
    // Whole objects are written to the store without a flush.
    client.write(65536, &[2; 4 * 65536]).unwrap();
    wait_for("the objects", || std::fs::read_dir(&data).unwrap().count() >= 5);
    hob.kill();
    std::fs::write(data.join("00000003.0000020000000099#1"), "half a file").unwrap();
    std::fs::write(data.join("notes.txt"), "not hob's").unwrap();
    let hob = Serve::disk(&spec).start(&scratch);
    assert_eq!(hob.connect().read(0, 131_072).unwrap(), [[1; 65536], [0; 65536]].concat());
    wait_for("the leftovers to go", || std::fs::read_dir(&data).unwrap().count() == 2);
    hob.stop();
}
