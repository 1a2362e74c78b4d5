//! A guest receives a report that acknowledged writes may be lost, even if hob ends between the
//! loss and the guest's next flush.

use std::time::Duration;

use conformance::data::noise_file;
use conformance::nbd_client::{Address, Client};
use conformance::process::Process;
use conformance::scratch::wait_until;
use conformance::{Daemon, MIB, Scratch, Tool};
use serde_json::Value;

const WAIT_MAX: Duration = Duration::from_secs(20);

struct Stage {
    scratch: Scratch,
}

impl Stage {
    fn new() -> Stage {
        let scratch = Scratch::new();
        noise_file(&scratch.path("disk.img"), 8 * MIB, 1);
        let config = format!(
            "{}[[disk]]\nname = \"vm\"\nbacking = \"nbd+unix:///?socket={}\"\n",
            scratch.daemon_config(),
            scratch.text("backing.sock"),
        );
        std::fs::write(scratch.path("hob.toml"), config).unwrap();
        Stage { scratch }
    }

    fn nbdkit(&self) -> Process {
        let socket = self.scratch.path("backing.sock");
        let _ = std::fs::remove_file(&socket);
        let image = self.scratch.text("disk.img");
        let server = Tool::new("nbdkit")
            .args(["--foreground", "--unix", &self.scratch.text("backing.sock"), "file", &image])
            .start();
        wait_until("nbdkit's socket", WAIT_MAX, || socket.exists());
        server
    }

    fn start(&self) -> Daemon {
        Daemon::start(&self.scratch.path("hob.toml"), &self.scratch.path("ctl.sock"))
    }

    fn connect(&self) -> Client {
        let address = Address::Unix(self.scratch.path("nbd.sock"));
        wait_until("the export", WAIT_MAX, || Client::connect(&address, "vm").is_ok());
        Client::connect(&address, "vm").expect("the export is there")
    }

    /// Returns the number of guests in the saved state that have not received the report.
    fn owed(&self) -> u64 {
        let text = std::fs::read_to_string(self.scratch.path("state/state.json")).expect("a saved state");
        let state: Value = serde_json::from_str(text.trim_end()).expect("JSON");
        state["disks"][0]["flush_failures_owed"].as_u64().unwrap_or(0)
    }
}

#[test]
fn a_loss_is_reported_after_a_restart_and_after_kill_9() {
    let stage = Stage::new();
    let mut backing = stage.nbdkit();
    let mut daemon = stage.start();
    for kill in [false, true] {
        let mut guest = stage.connect();
        guest.flush().expect("nothing was lost");
        guest.write(MIB, &[7; 4096]).unwrap();
        backing.kill();
        wait_until("the loss in the state", WAIT_MAX, || stage.owed() == 1);
        backing = stage.nbdkit();
        if kill {
            daemon.kill();
        } else {
            daemon.stop();
        }
        drop(guest);
        daemon = stage.start();
        let mut guest = stage.connect();
        assert!(
            guest.flush().is_err(),
            "the acknowledged write may be lost, and this is its guest (kill: {kill})"
        );
        guest.flush().expect("it was told");
        wait_until("the end of the debt", WAIT_MAX, || stage.owed() == 0);
    }
    daemon.stop();
}

/// A disk that is removed takes the report with it, so the operator is told.
#[test]
fn removing_a_disk_tells_the_operator_of_an_undelivered_report() {
    let stage = Stage::new();
    let mut backing = stage.nbdkit();
    let daemon = stage.start();
    let mut guest = stage.connect();
    guest.flush().expect("nothing was lost");
    guest.write(MIB, &[7; 4096]).unwrap();
    backing.kill();
    wait_until("the loss in the state", WAIT_MAX, || stage.owed() == 1);
    let _backing = stage.nbdkit();
    drop(guest);
    let removed = daemon.try_ctl(&["disk", "remove", "vm"]);
    assert!(removed.success(), "{}", removed.all());
    assert!(removed.all().contains("acknowledged writes may be lost"), "{}", removed.all());
    assert!(daemon.stop().stderr.contains("acknowledged writes may be lost"), "the log has it too");
}
