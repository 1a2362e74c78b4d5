//! A whole machine whose disk comes through vhost-user-blk: real drivers, real queues, a daemon that dies under them.

use std::time::Duration;

use conformance::data::noise_file;
use conformance::guest::{PART_BYTES, PART_STEP, SENTINEL, boot_vhost_user, start_rounds};
use conformance::scratch::wait_until;
use conformance::{MIB, Scratch, Serve, Tool};

const SIZE: u64 = 192 * MIB;

/// How long a machine may take.
const MACHINE_MAX: Duration = Duration::from_secs(240);

fn serve(scratch: &Scratch) -> Serve {
    noise_file(&scratch.path("disk.img"), SIZE, 1);
    Serve::disk(&scratch.text("disk.img"))
        .cached(&scratch.path("pool"), "64M", "4K")
        .arg("--vhost-user", &scratch.text("vm.sock"))
}

/// Promise 2, as a guest sees it.
#[test]
fn a_guest_keeps_its_files_on_a_disk_in_its_own_memory() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).start(&scratch);
    let console = boot_vhost_user(&scratch, &scratch.text("vm.sock"));
    assert!(console.contains(SENTINEL), "the guest is not content:\n{console}");
    hob.stop();
    assert!(!scratch.path("vm.sock").exists(), "the socket outlived the server");
}

/// Killed in the middle of requests, and started again: the guest waits, and hears of nothing. The second end is an orderly one.
#[test]
fn a_guest_sees_no_error_when_the_daemon_is_killed_and_started_again() {
    let scratch = Scratch::new();
    let serve = serve(&scratch);
    let hob = serve.start(&scratch);
    let mut machine = start_rounds(&scratch, &scratch.text("vm.sock"), 24);
    let reached = |machine: &conformance::process::Process, round: u32| {
        let line = format!("GUEST-ROUND {round}\r\n");
        wait_until(&line, MACHINE_MAX, || machine.stdout().contains(&line));
    };
    reached(&machine, 4);
    hob.kill();
    std::thread::sleep(Duration::from_secs(2));
    let hob = serve.start(&scratch);
    reached(&machine, 12);
    hob.stop();
    let hob = serve.start(&scratch);
    let output = machine.finish(MACHINE_MAX);
    let console = output.all();
    assert!(console.contains(SENTINEL), "the guest is not content:\n{console}");
    for bad in ["GUEST-WRITE-FAILED", "GUEST-READ-", "GUEST-HAS-ERRORS", "I/O error"] {
        assert!(!console.contains(bad), "{bad}:\n{console}");
    }
    let sees = "serial=disk sectors=393216 queues=2 block=512/4096 discard=1073741824 cache=write-back";
    assert!(console.contains(sees), "not {sees}:\n{console}");
    hob.stop();
    let disk = std::fs::read(scratch.path("disk.img")).expect("the backing is there");
    for part in 0..4u64 {
        let from = (part * PART_STEP) as usize;
        let file = scratch.path("part");
        std::fs::write(&file, &disk[from..from + PART_BYTES as usize]).expect("write a part of the backing");
        let sum = Tool::new("sha256sum").arg(&file).run();
        let line = format!("GUEST-PART {part} {}", &sum[..64]);
        assert!(console.contains(&line), "the backing has no {line}:\n{console}");
    }
}
