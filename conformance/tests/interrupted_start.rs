//! A hob that is stopped or killed while it starts loses nothing, leaves no sockets, and starts
//! again.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use conformance::data::{Noise, assert_same, noise_file};
use conformance::hob::{CRASH_LOG_DIR, binary};
use conformance::nbd_client::{Address, Client};
use conformance::process::Process;
use conformance::scratch::wait_for;
use conformance::{MIB, Scratch, Serve, Tool};
use rustix::process::Signal;

const DISK: u64 = 16 * MIB;

/// Times from the start of the process to the signal, in milliseconds.
const PAUSES: [u64; 16] = [0, 2, 4, 6, 8, 10, 13, 16, 20, 25, 30, 35, 40, 50, 60, 80];

/// Maximum time of a stop.
const STOP_MAX: Duration = Duration::from_secs(60);

/// Writes a configuration without pools and disks, which only the state file has.
fn configure(scratch: &Scratch) {
    noise_file(&scratch.path("disk.img"), DISK, 61);
    scratch.configure("");
}

/// Starts hob and sends the signal after the pause.
#[track_caller]
fn interrupt(command: &mut Command, pause_ms: u64, signal: Signal) {
    let mut process = Process::start("hob", command).unwrap();
    std::thread::sleep(Duration::from_millis(pause_ms));
    process.signal(signal);
    let output = process.finish(STOP_MAX);
    // Before the program has installed its handlers, the signal ends it.
    let is_early = output.stderr.is_empty() && output.status.is_some_and(|status| status.code().is_none());
    let is_stopped = is_early || signal == Signal::KILL || output.success();
    assert!(is_stopped, "after {pause_ms} ms: {:?}: {}", output.status, output.all());
}

#[track_caller]
fn expect_gone(path: &Path, pause_ms: u64) {
    assert!(!path.exists(), "{} is left after {pause_ms} ms", path.display());
}

#[test]
fn a_daemon_that_is_interrupted_at_its_start_keeps_its_disks_and_dirty_data() {
    for signal in [Signal::TERM, Signal::KILL] {
        let scratch = Scratch::new();
        configure(&scratch);
        let daemon = scratch.start_daemon();
        daemon.ctl(&["pool", "create", "fast", &scratch.text("flash"), "--size", "64M"]);
        daemon.ctl(&["disk", "add", "vm", "--backing", &scratch.text("disk.img")]);
        let enable = ["cache", "enable", "vm", "--pool", "fast", "--size", "16M", "--block-size", "4K"];
        daemon.ctl(&[&enable[..], &["--mode", "write-back", "--dirty-age-max", "0"]].concat());
        let data = Noise::new(62).bytes(MIB as usize);
        let socket = scratch.path("nbd.sock");
        let connect = || Client::connect(&Address::Unix(socket.clone()), "vm").unwrap();
        let mut client = connect();
        client.write(0, &data).unwrap();
        client.flush().unwrap();
        drop(client);
        daemon.stop();
        for pause_ms in PAUSES {
            let mut command = Command::new(binary());
            command.args(["daemon", "--config", &scratch.text("hob.toml")]);
            command.env(CRASH_LOG_DIR, scratch.dir());
            interrupt(&mut command, pause_ms, signal);
            if signal == Signal::TERM {
                expect_gone(&socket, pause_ms);
                expect_gone(&scratch.path("ctl.sock"), pause_ms);
            }
        }
        let daemon = scratch.start_daemon();
        assert!(daemon.ctl(&["disk", "show", "vm"]).contains("write-back"), "the cache is kept");
        assert_same(&connect().read(0, MIB as u32).unwrap(), &data, 0, "the disk and what was flushed");
        daemon.stop();
    }
}

#[test]
fn hob_serve_starts_again_after_it_was_killed_at_its_start() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), DISK, 63);
    let serve = Serve::disk(&scratch.text("disk.img"))
        .cached(&scratch.path("pool"), "16M", "4K")
        .arg("--mode", "write-back");
    let data = Noise::new(64).bytes(MIB as usize);
    let hob = serve.start(&scratch);
    hob.connect().write(0, &data).unwrap();
    hob.connect().flush().unwrap();
    hob.stop();
    for pause_ms in PAUSES {
        let mut process = serve.launch(&scratch);
        std::thread::sleep(Duration::from_millis(pause_ms));
        process.kill();
        let hob = serve.start(&scratch);
        let found = hob.connect().read(0, MIB as u32).unwrap();
        assert_same(&found, &data, 0, &format!("the disk and what was flushed, after {pause_ms} ms"));
        hob.stop();
    }
}

/// A starting `qemu-nbd` ignores SIGTERM, and would keep the image locked.
#[test]
fn an_image_is_served_after_a_daemon_was_killed_while_it_opened_it() {
    let scratch = Scratch::new();
    configure(&scratch);
    Tool::new("qemu-img").args(["create", "-q", "-f", "qcow2", &scratch.text("image.qcow2"), "64M"]).run();
    let daemon = scratch.start_daemon();
    daemon.ctl(&["disk", "add", "vm", "--backing", &scratch.text("image.qcow2")]);
    daemon.stop();
    for pause_ms in PAUSES {
        for signal in [Signal::TERM, Signal::KILL] {
            let mut command = Command::new(binary());
            command.args(["daemon", "--config", &scratch.text("hob.toml")]);
            command.env(CRASH_LOG_DIR, scratch.dir());
            interrupt(&mut command, pause_ms, signal);
            let daemon = scratch.start_daemon();
            wait_for("the image", || {
                daemon.ctl(&["disk", "show", "vm", "-o", "json"]).contains("\"online\"")
            });
            daemon.stop();
        }
    }
}
