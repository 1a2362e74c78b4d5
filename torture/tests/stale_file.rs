//! hob on a file of a network filesystem that answers ESTALE. FUSE has no creation times, so hob
//! cannot know whether it would open the same file again, and the guest waits for an operator.
//! These tests need root and /dev/fuse.

use conformance::nbd_client::{CMD_READ, CMD_WRITE, EIO};
use conformance::scratch::wait_for;
use conformance::{MIB, Scratch};
use torture::files::Files;
use torture::medium::Medium;

/// Issue: "a file on NFS (ESTALE, EIO during a server restart)".
#[test]
fn requests_wait_while_a_handle_is_stale_and_a_restart_of_hob_ends_it() {
    let scratch = Scratch::new();
    let files = Files::mount(&scratch.path("mnt"), 1).expect("this test needs root and /dev/fuse");
    let file = files.add("disk.img", Medium::new(8 * MIB, 1));
    scratch.configure("");
    let hob = scratch.start_daemon();
    hob.ctl(&["disk", "add", "vm", "--backing", &scratch.text("mnt/disk.img")]);
    // The control socket, which `start_daemon` waits for, is there before the NBD socket.
    let mut client = scratch.connect_when_served("vm");
    client.write(0, &[1; 8192]).unwrap();
    client.flush().unwrap();

    file.expire_handles();
    client.send(0, CMD_READ, 0, 4096, &[]).unwrap();
    wait_for("a problem in health", || {
        let health = hob.try_ctl(&["health"]).all();
        health.contains("ESTALE") || health.contains("cannot open the file again")
    });
    file.admit();
    wait_for("the reason in health", || hob.try_ctl(&["health"]).all().contains("no creation times"));
    // The limit ends the wait.
    hob.ctl(&["disk", "set", "vm", "--backing-timeout", "1s"]);
    assert_eq!(client.receive().unwrap().error, EIO);
    assert_eq!(client.call(0, CMD_WRITE, 4096, 4096, &[2; 4096]).unwrap(), EIO);

    hob.kill();
    let hob = scratch.start_daemon();
    let mut client = scratch.connect_when_served("vm");
    assert_eq!(client.read(0, 8192).unwrap(), [1; 8192]);
    client.write(4096, &[3; 4096]).unwrap();
    client.flush().unwrap();
    hob.stop();
}
