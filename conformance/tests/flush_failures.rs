//! A guest receives a report that acknowledged writes may be lost, even if hob ends between the
//! loss and the guest's next flush.

use std::time::Duration;

use conformance::data::noise_file;
use conformance::nbd_client::Client;
use conformance::process::Process;
use conformance::scratch::wait_for;
use conformance::store::nbdkit;
use conformance::{Daemon, MIB, Scratch};
use rustix::process::Signal;

const WAIT_MAX: Duration = Duration::from_secs(60);

struct Stage {
    scratch: Scratch,
}

impl Stage {
    fn new() -> Stage {
        let scratch = Scratch::new();
        noise_file(&scratch.path("disk.img"), 8 * MIB, 1);
        let config = format!("[[disk]]\nname = \"vm\"\nbacking = {:?}\n", scratch.backing_uri(),);
        scratch.configure(&config);
        Stage { scratch }
    }

    /// Starts a server that refuses all writes, so that hob cannot repeat the writes that were not
    /// flushed.
    fn refusing_nbdkit(&self) -> Process {
        let log = self.scratch.path("backing.log");
        let logged = format!("logfile={}", log.display());
        let _ = std::fs::remove_file(&log);
        let image = self.scratch.text("disk.img");
        let filters = ["--filter=log", "--filter=error", "file", image.as_str()];
        let errors = ["error-pwrite=EIO", "error-pwrite-rate=100%", logged.as_str()];
        let server = nbdkit(&self.scratch.path("backing.sock"), &[&filters[..], &errors].concat());
        let has_refused = || std::fs::read_to_string(&log).is_ok_and(|text| text.contains("error=EIO"));
        wait_for("a refused write", has_refused);
        server
    }

    fn connect(&self) -> Client {
        self.scratch.connect_when_served("vm")
    }

    /// Connects a guest that has an acknowledged write without a flush.
    #[track_caller]
    fn guest_with_write(&self) -> Client {
        let mut guest = self.connect();
        guest.flush().expect("nothing was lost");
        guest.write(MIB, &[7; 4096]).unwrap();
        guest
    }

    /// Checks that one flush of the next guest fails. `why` is the reason.
    #[track_caller]
    fn is_reported_once(&self, why: &str) {
        let mut guest = self.connect();
        assert!(guest.flush().is_err(), "{why}");
        guest.flush().expect("it was told");
        // Otherwise the next round would take this round's number in the state for its own.
        wait_for("the end of the debt", || self.owed() == 0);
    }

    /// Returns the number of guests in the saved state that have not received the report.
    fn owed(&self) -> u64 {
        let state = self.scratch.saved_state();
        state["disks"][0]["flush_failures_owed"].as_u64().unwrap_or(0)
    }
}

fn end(daemon: Daemon, kill: bool) {
    if kill {
        daemon.kill();
    } else {
        daemon.stop();
    }
}

#[test]
fn a_loss_is_reported_after_a_restart_and_after_kill_9() {
    let stage = Stage::new();
    let mut backing = stage.scratch.serve_image("disk.img");
    let mut daemon = stage.scratch.start_daemon();
    for kill in [false, true] {
        let guest = stage.guest_with_write();
        backing.kill();
        backing = stage.refusing_nbdkit();
        wait_for("the loss in the state", || stage.owed() == 1);
        backing.kill();
        backing = stage.scratch.serve_image("disk.img");
        end(daemon, kill);
        drop(guest);
        daemon = stage.scratch.start_daemon();
        stage.is_reported_once(&format!("the acknowledged write may be lost (kill: {kill})"));
    }
    daemon.stop();
}

#[test]
fn a_restart_of_the_backing_loses_nothing_and_is_no_error() {
    let stage = Stage::new();
    let mut backing = stage.scratch.serve_image("disk.img");
    let daemon = stage.scratch.start_daemon();
    let mut guest = stage.connect();
    // When hob opens a backing, the server may have changes that an earlier process did not flush,
    // so hob flushes it. A restart before the end of this flush is reported as a loss.
    guest.flush().unwrap();
    for round in 0..4 {
        guest.write(MIB, &[round; 4096]).unwrap();
        if round % 2 == 0 {
            backing.kill();
        } else {
            backing.signal(Signal::TERM);
            assert!(backing.wait(WAIT_MAX).is_some(), "hob disconnects from a server that shuts down");
        }
        // A crash of the server's host loses writes that were not flushed.
        noise_file(&stage.scratch.path("disk.img"), 8 * MIB, 1);
        backing = stage.scratch.serve_image("disk.img");
        guest.flush().expect("hob repeats the write");
        assert_eq!(guest.read(MIB, 4096).unwrap(), [round; 4096]);
        let image = stage.scratch.read("disk.img");
        assert_eq!(image[MIB as usize..][..4096], [round; 4096]);
    }
    wait_for("the end of the risk in the state", || stage.owed() == 0);
    daemon.stop();
}

#[test]
fn hob_ends_while_writes_wait_to_be_repeated() {
    let stage = Stage::new();
    let mut backing = stage.scratch.serve_image("disk.img");
    let mut daemon = stage.scratch.start_daemon();
    for kill in [false, true] {
        let guest = stage.guest_with_write();
        backing.kill();
        wait_for("the risk in the state", || stage.owed() == 1);
        end(daemon, kill);
        drop(guest);
        backing = stage.scratch.serve_image("disk.img");
        daemon = stage.scratch.start_daemon();
        stage.is_reported_once(&format!("only the former hob could repeat the write (kill: {kill})"));
    }
    daemon.stop();
}

/// Guests of a removed disk cannot receive the report, so the operator receives it.
#[test]
fn removing_a_disk_tells_the_operator_of_an_undelivered_report() {
    let stage = Stage::new();
    let mut backing = stage.scratch.serve_image("disk.img");
    let daemon = stage.scratch.start_daemon();
    let guest = stage.guest_with_write();
    backing.kill();
    let _backing = stage.refusing_nbdkit();
    wait_for("the loss in the state", || stage.owed() == 1);
    drop(guest);
    let removed = daemon.try_ctl(&["disk", "remove", "vm"]);
    assert!(removed.success(), "{}", removed.all());
    assert!(removed.all().contains("acknowledged writes may be lost"), "{}", removed.all());
    assert!(daemon.stop().stderr.contains("acknowledged writes may be lost"), "the log has it too");
}
