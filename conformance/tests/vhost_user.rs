//! A whole VM whose disk is served through vhost-user-blk: real drivers, real queues, and a daemon
//! that is killed.

use std::time::Duration;

use conformance::data::noise_file;
use conformance::guest::{
    COMPLAINTS, PART_BYTES, PART_STEP, SENTINEL, boot_vhost_user, root_image, start_root, start_rounds,
};
use conformance::process::Process;
use conformance::qmp::Monitor;
use conformance::scratch::{is_listening, wait_until};
use conformance::{MIB, Scratch, Serve, Tool};

const SIZE: u64 = 192 * MIB;

/// Size of a boot disk, bytes: fio comes with 80 MiB of libraries.
const ROOT_SIZE: u64 = 256 * MIB;

/// Maximum time of a VM.
const MACHINE_MAX: Duration = Duration::from_secs(600);

fn serve(scratch: &Scratch) -> Serve {
    noise_file(&scratch.path("disk.img"), SIZE, 1);
    Serve::disk(&scratch.text("disk.img"))
        .cached(&scratch.path("pool"), "64M", "4K")
        .arg("--vhost-user", &scratch.text("vm.sock"))
}

#[track_caller]
fn content(console: &str) {
    assert!(console.contains(SENTINEL), "the guest is not content:\n{console}");
    for bad in COMPLAINTS {
        assert!(!console.contains(bad), "{bad}:\n{console}");
    }
}

/// Waits for the guest's message that a round has ended.
#[track_caller]
fn reached(machine: &Process, round: u32) {
    let line = format!("GUEST-ROUND {round}");
    let said = |line: &str| {
        machine.stdout().lines().any(|said| said == line || said.starts_with(&format!("{line} ")))
    };
    wait_until(&line, MACHINE_MAX, || said(&line));
}

/// Promise 2 for a guest.
#[test]
fn a_guest_keeps_its_files_on_a_disk_in_its_own_memory() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).start(&scratch);
    let console = boot_vhost_user(&scratch, &scratch.text("vm.sock"));
    assert!(console.contains(SENTINEL), "the guest is not content:\n{console}");
    hob.stop();
    assert!(!scratch.path("vm.sock").exists(), "the socket outlived the server");
}

/// The daemon is killed while requests are in flight, and restarted: the guest waits and sees no
/// error. The second time, the daemon stops normally.
#[test]
fn a_guest_sees_no_error_when_the_daemon_is_killed_and_started_again() {
    let scratch = Scratch::new();
    let serve = serve(&scratch);
    let hob = serve.start(&scratch);
    let mut machine = start_rounds(&scratch, &scratch.text("vm.sock"), 14, &[]);
    reached(&machine, 2);
    hob.kill();
    std::thread::sleep(Duration::from_secs(2));
    let hob = serve.start(&scratch);
    reached(&machine, 7);
    hob.stop();
    let hob = serve.start(&scratch);
    let output = machine.finish(MACHINE_MAX);
    let console = output.all();
    content(&console);
    let sees = "serial=disk sectors=393216 queues=2 block=512/4096 discard=1073741824 cache=write-back";
    assert!(console.contains(sees), "not {sees}:\n{console}");
    hob.stop();
    let disk = scratch.read("disk.img");
    for part in 0..4u64 {
        let from = (part * PART_STEP) as usize;
        let file = scratch.path("part");
        std::fs::write(&file, &disk[from..from + PART_BYTES as usize]).expect("write a part of the backing");
        let sum = Tool::new("sha256sum").arg(&file).run();
        let line = format!("GUEST-PART {part} {}", &sum[..64]);
        assert!(console.contains(&line), "the backing has no {line}:\n{console}");
    }
}

/// A VM boots from the disk and runs fio, which verifies, while the daemon is killed twice: once
/// under load, and once just after its restart. The filesystem has no errors at the end.
#[test]
fn a_guest_boots_from_the_disk_and_fio_verifies_while_the_daemon_is_killed() {
    let scratch = Scratch::new();
    root_image(&scratch, &scratch.path("disk.img"), ROOT_SIZE, 3);
    let serve = Serve::disk(&scratch.text("disk.img"))
        .cached(&scratch.path("pool"), "128M", "4K")
        .arg("--vhost-user", &scratch.text("vm.sock"));
    let mut hob = serve.start(&scratch);
    let mut machine = start_root(&scratch, &scratch.text("vm.sock"));
    for round in [0, 1] {
        reached(&machine, round);
        // During the next round.
        std::thread::sleep(Duration::from_secs(2));
        hob.kill();
        std::thread::sleep(Duration::from_secs(1));
        hob = serve.start(&scratch);
    }
    let console = machine.finish(MACHINE_MAX).all();
    content(&console);
    assert!(console.contains("GUEST-ROOT /dev/vda ext4"), "it runs from somewhere else:\n{console}");
    hob.stop();
    Tool::new("e2fsck").args(["-f", "-n", &scratch.text("disk.img")]).run();
}

/// A VM moves from one daemon to another while its guest writes and verifies. QEMU migrates the VM
/// only if changes to guest memory are logged. The tests of the log check that each change is
/// logged, because this guest might not notice a missing one.
#[test]
fn a_guest_migrates_live_from_one_daemon_to_another() {
    let (here, there) = (Scratch::new(), Scratch::new());
    noise_file(&here.path("disk.img"), SIZE, 1);
    let nbd = here.text("backing.sock");
    let backing = Tool::new("qemu-nbd")
        .args(["--persistent", "--shared=8", "--format=raw", "--cache=writeback", "--export-name=d"])
        .args(["--socket", &nbd, &here.text("disk.img")])
        .limit(MACHINE_MAX)
        .start();
    wait_until("the backing", MACHINE_MAX, || is_listening(&here.path("backing.sock")));
    let serve = |scratch: &Scratch| {
        Serve::disk(&format!("nbd+unix:///d?socket={nbd}"))
            .cached(&scratch.path("pool"), "64M", "4K")
            .arg("--vhost-user", &scratch.text("vm.sock"))
            .start(scratch)
    };
    let (source, target) = (serve(&here), serve(&there));
    let monitor_args = |scratch: &Scratch| format!("unix:{},server=on,wait=off", scratch.text("qmp.sock"));
    let incoming = format!("unix:{}", there.text("migration.sock"));
    let arriving = ["-qmp", &monitor_args(&there), "-incoming", &incoming];
    let mut arriving = start_rounds(&there, &there.text("vm.sock"), 26, &arriving);
    let leaving = start_rounds(&here, &here.text("vm.sock"), 26, &["-qmp", &monitor_args(&here)]);
    wait_until("some rounds", MACHINE_MAX, || leaving.stdout().contains("GUEST-ROUND 3"));
    let mut monitor = Monitor::connect(&here.path("qmp.sock"));
    wait_until("the target", MACHINE_MAX, || is_listening(&there.path("migration.sock")));
    monitor.migrate(&incoming, &arriving, MACHINE_MAX);
    monitor.quit();
    let output = arriving.finish(MACHINE_MAX);
    let console = output.all();
    content(&console);
    drop(leaving);
    source.stop();
    target.stop();
    drop(backing);
}
