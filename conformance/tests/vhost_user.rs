//! A whole machine whose disk comes through vhost-user-blk: real drivers, real queues, a daemon that dies under them.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use conformance::data::noise_file;
use conformance::guest::{PART_BYTES, PART_STEP, SENTINEL, boot_vhost_user, start_rounds};
use conformance::scratch::wait_until;
use conformance::{MIB, Scratch, Serve, Tool};
use serde_json::{Value, json};

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
    let mut machine = start_rounds(&scratch, &scratch.text("vm.sock"), 24, &[]);
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

/// QEMU's own control.
struct Monitor(BufReader<UnixStream>);

impl Monitor {
    #[track_caller]
    fn connect(path: &Path) -> Monitor {
        wait_until("QEMU's monitor", MACHINE_MAX, || UnixStream::connect(path).is_ok());
        let stream = UnixStream::connect(path).expect("it was there just now");
        let mut monitor = Monitor(BufReader::new(stream));
        monitor.line();
        monitor.ask("qmp_capabilities", json!({}));
        monitor
    }

    #[track_caller]
    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("QEMU answers");
        serde_json::from_str(&line).expect("JSON")
    }

    #[track_caller]
    fn ask(&mut self, what: &str, arguments: Value) -> Value {
        let question = json!({ "execute": what, "arguments": arguments });
        writeln!(self.0.get_mut(), "{question}").expect("QEMU listens");
        loop {
            let answer = self.line();
            assert!(answer.get("error").is_none(), "{what}: {answer}");
            if let Some(value) = answer.get("return") {
                return value.clone();
            }
        }
    }
}

/// A machine goes from one daemon to another while its guest writes and verifies. QEMU does that only where changes to guest memory are
/// logged; that each change is, the tests of the log itself show, for the guest of this one might not notice.
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
    wait_until("the backing", MACHINE_MAX, || here.path("backing.sock").exists());
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
    let mut arriving = start_rounds(&there, &there.text("vm.sock"), 30, &arriving);
    let leaving = start_rounds(&here, &here.text("vm.sock"), 30, &["-qmp", &monitor_args(&here)]);
    wait_until("some rounds", MACHINE_MAX, || leaving.stdout().contains("GUEST-ROUND 3"));
    let mut monitor = Monitor::connect(&here.path("qmp.sock"));
    wait_until("the target", MACHINE_MAX, || there.path("migration.sock").exists());
    monitor.ask("migrate-set-parameters", json!({ "max-bandwidth": 24 << 20, "downtime-limit": 3000 }));
    monitor.ask("migrate", json!({ "uri": incoming }));
    wait_until("the migration", MACHINE_MAX, || {
        let state = monitor.ask("query-migrate", json!({}));
        assert_ne!(state["status"], "failed", "{state}\n{}", arriving.stderr());
        state["status"] == "completed"
    });
    monitor.ask("quit", json!({}));
    let output = arriving.finish(MACHINE_MAX);
    let console = output.all();
    assert!(console.contains(SENTINEL), "the guest is not content:\n{console}");
    for bad in ["GUEST-WRITE-FAILED", "GUEST-READ-", "GUEST-HAS-ERRORS", "I/O error"] {
        assert!(!console.contains(bad), "{bad}:\n{console}");
    }
    drop(leaving);
    source.stop();
    target.stop();
    drop(backing);
}
