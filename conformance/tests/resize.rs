//! Disks that grow while they are served: the effects for NBD clients and a guest's kernel, and the
//! state after a kill.

use std::fs::OpenOptions;
use std::time::Duration;

use conformance::data::{empty_file, noise_file};
use conformance::guest::{COMPLAINTS, SENTINEL, start_growing};
use conformance::nbd_client::Client;
use conformance::scratch::wait_until;
use conformance::{MIB, Scratch, Serve, Tool};

/// Maximum time of a VM.
const MACHINE_MAX: Duration = Duration::from_secs(600);

struct Stage {
    scratch: Scratch,
}

impl Stage {
    fn new(mib: u64) -> Stage {
        let scratch = Scratch::new();
        scratch.configure("");
        empty_file(&scratch.path("disk.img"), mib * MIB);
        Stage { scratch }
    }

    fn connect(&self) -> Client {
        self.scratch.connect_when_served("vm")
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///vm?socket={}", self.scratch.text("nbd.sock"))
    }

    /// Returns the size that a new client receives.
    fn size(&self) -> u64 {
        drop(self.connect());
        Tool::new("nbdinfo").args(["--size", &self.uri()]).run().trim().parse().expect("a number of bytes")
    }

    #[track_caller]
    fn qemu_io(&self, commands: &[&str]) {
        drop(self.connect());
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let output = Tool::new("qemu-io").args(["-f", "raw"]).args(commands).arg(self.uri()).run();
        assert!(!output.contains("failed") && !output.contains("error"), "{output}");
    }

    fn truncate(&self, mib: u64) {
        let file = OpenOptions::new().write(true).open(self.scratch.path("disk.img")).unwrap();
        file.set_len(mib * MIB).unwrap();
    }
}

/// Promises 1 and 2 during a change of size: in write-back, with a kill just after it, and a kill
/// between the growth of the backing and of the disk.
#[test]
fn a_disk_in_write_back_grows_and_is_that_large_after_a_kill() {
    let stage = Stage::new(64);
    let daemon = stage.scratch.start_daemon();
    daemon.ctl(&["pool", "create", "fast", &stage.scratch.text("flash"), "--size", "128M"]);
    daemon.ctl(&["disk", "add", "vm", "--backing", &stage.scratch.text("disk.img")]);
    let enable = ["cache", "enable", "vm", "--pool", "fast", "--size", "32M", "--mode", "write-back"];
    daemon.ctl(&[&enable[..], &["--dirty-age-max", "0"]].concat());
    stage.qemu_io(&["write -P 0x11 0 1M", "write -P 0x12 63M 1M", "flush"]);
    let mut old = stage.connect();
    let shown = daemon.ctl(&["disk", "resize", "vm", "--size", "96M"]);
    assert!(shown.contains("96.0 MiB") || shown.contains("96 MiB"), "{shown}");
    let beyond = old.read(64 * MIB, 4096);
    assert!(beyond.is_err(), "a client keeps the size that it was told");
    assert_eq!(old.read(0, 4096).expect("the rest goes on"), vec![0x11; 4096]);
    assert_eq!(stage.size(), 96 * MIB);
    stage.qemu_io(&[
        "read -P 0x11 0 1M",
        "read -P 0 64M 32M",
        "write -P 0x13 95M 1M",
        "write -P 0x14 63M 2M",
        "flush",
    ]);
    let stats = daemon.stats("vm");
    assert!(stats.number("dirty_bytes") > Some(0.0), "{}", stats.text());
    daemon.kill();
    let daemon = stage.scratch.start_daemon();
    assert_eq!(stage.size(), 96 * MIB);
    let all = ["read -P 0x11 0 1M", "read -P 0x14 63M 2M", "read -P 0x13 95M 1M", "read -P 0 65M 30M"];
    stage.qemu_io(&all);
    // The backing grows, and the daemon is killed before a command grows the disk.
    stage.truncate(128);
    daemon.kill();
    let daemon = stage.scratch.start_daemon();
    assert_eq!(stage.size(), 128 * MIB);
    stage.qemu_io(&all);
    stage.qemu_io(&["read -P 0 96M 32M", "write -P 0x15 127M 1M", "flush", "read -P 0x15 127M 1M"]);
    // All data reaches the correct place on the backing.
    daemon.ctl(&["drain", "vm"]);
    daemon.stop();
    let image = stage.scratch.read("disk.img");
    for (mib, byte) in [(0, 0x11), (63, 0x14), (64, 0x14), (95, 0x13), (96, 0), (127, 0x15)] {
        let part = &image[(mib * MIB) as usize..((mib + 1) * MIB) as usize];
        assert!(part.iter().all(|found| *found == byte), "MiB {mib} of the backing");
    }
}

/// The end of a disk is inside a 4 KiB sector, of which flash has a copy.
#[test]
fn data_after_a_disks_old_end_is_read_from_the_backing() {
    let stage = Stage::new(8);
    let odd = 8 * MIB + 1536;
    let disk = OpenOptions::new().write(true).open(stage.scratch.path("disk.img")).unwrap();
    disk.set_len(odd).unwrap();
    let daemon = stage.scratch.start_daemon();
    daemon.ctl(&["pool", "create", "fast", &stage.scratch.text("flash"), "--size", "64M"]);
    daemon.ctl(&["disk", "add", "vm", "--backing", &stage.scratch.text("disk.img")]);
    for mode in [&["--mode", "write-through"][..], &["--mode", "write-back"]] {
        let enable = ["cache", "enable", "vm", "--pool", "fast", "--size", "16M"];
        daemon.ctl(&[&enable[..], mode].concat());
        let end = stage.size();
        let first = end - end % 4096;
        let near = ["read -P 0", &first.to_string(), &(end - first).to_string()].join(" ");
        stage.qemu_io(&[&near, &near]);
        // Another program enlarges the backing and writes to the new part.
        let file = OpenOptions::new().write(true).open(stage.scratch.path("disk.img")).unwrap();
        file.set_len(end + 8192).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[0x77; 4096], end).unwrap();
        daemon.ctl(&["disk", "resize", "vm"]);
        let behind = ["read -P 0x77", &end.to_string(), "4096"].join(" ");
        stage.qemu_io(&[&near, &behind, &behind]);
        daemon.ctl(&["cache", "disable", "vm"]);
        // Writes zeroes again, for the next mode.
        stage.qemu_io(&[&["write -P 0", &end.to_string(), "4096"].join(" ")]);
    }
    daemon.stop();
}

#[test]
fn invalid_requests_are_refused_with_one_line() {
    let stage = Stage::new(16);
    let daemon = stage.scratch.start_daemon();
    daemon.ctl(&["disk", "add", "vm", "--backing", &stage.scratch.text("disk.img")]);
    for (args, line) in [
        (&["disk", "resize", "vm", "--size", "8M"][..], "vm cannot get smaller: it has 16777216 bytes"),
        (&["disk", "resize", "none"], "there is no disk 'none'"),
        (
            &["disk", "resize", "vm", "--size", "17000001"],
            "the size of a disk must be a multiple of 512 bytes, not 17000001",
        ),
    ] {
        let output = daemon.try_ctl(args);
        assert!(!output.success() && output.stderr.contains(line), "{args:?}: {}", output.all());
    }
    let output = daemon.try_ctl(&["disk", "resize", "vm", "--size", "0x10"]);
    assert!(!output.success(), "{}", output.all());
    stage.truncate(8);
    let output = daemon.try_ctl(&["disk", "resize", "vm"]);
    assert!(output.stderr.contains("its backing has 8M, and the disk has 16M"), "{}", output.all());
    stage.truncate(16);
    assert!(daemon.ctl(&["disk", "resize", "vm"]).contains("the disk already has 16M"));
    daemon.stop();
}

/// An NBD server that has grown reports the new size only to the next connection of hob.
#[test]
fn a_larger_nbd_export_needs_another_connection() {
    let stage = Stage::new(16);
    let mut backing = stage.scratch.serve_image("disk.img");
    let daemon = stage.scratch.start_daemon();
    daemon.ctl(&["disk", "add", "vm", "--backing", &stage.scratch.backing_uri()]);
    stage.truncate(32);
    let resize = || daemon.try_ctl(&["disk", "resize", "vm", "--size", "32M"]);
    let output = resize();
    let reason = "reports a new size only to new connections";
    assert!(!output.success() && output.stderr.contains(reason), "{}", output.all());
    backing.kill();
    let _backing = stage.scratch.serve_image("disk.img");
    wait_until("the new size", Duration::from_secs(120), || resize().success());
    assert_eq!(stage.size(), 32 * MIB);
    daemon.stop();
}

/// The kernel of a guest on vhost-user is notified automatically.
#[test]
fn a_guest_sees_its_disk_grow() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), 128 * MIB, 1);
    let hob = Serve::disk(&scratch.text("disk.img"))
        .cached(&scratch.path("pool"), "64M", "4K")
        .arg("--vhost-user", &scratch.text("vm.sock"))
        .start(&scratch);
    let mut machine = start_growing(&scratch, &scratch.text("vm.sock"));
    let reached = |line: &str| machine.stdout().lines().any(|said| said.trim_end() == line);
    wait_until("the guest", MACHINE_MAX, || reached("GUEST-ROUND 0 sectors=262144"));
    hob.ctl(&["disk", "resize", "disk", "--size", "192M"]);
    let console = machine.finish(MACHINE_MAX).all();
    assert!(console.contains("GUEST-ROUND 1 sectors=393216"), "the guest sees another size:\n{console}");
    assert!(console.contains(SENTINEL), "the guest is not content:\n{console}");
    for bad in COMPLAINTS {
        assert!(!console.contains(bad), "{bad}:\n{console}");
    }
    hob.stop();
    let image = scratch.read("disk.img");
    assert_eq!(image.len() as u64, 192 * MIB);
    let part = |at: u64| &image[at as usize..(at + MIB) as usize];
    assert!(part(MIB) == part(191 * MIB), "what the guest wrote to both ends");
}
