//! hob on a file of a network filesystem that answers ESTALE. FUSE has no creation times, so hob cannot know whether it would
//! open the same file again: the guest waits for an operator. These tests need root and /dev/fuse.

use std::time::Duration;

use conformance::hob::Daemon;
use conformance::nbd_client::{Address, CMD_READ, CMD_WRITE, Client, EIO};
use conformance::scratch::wait_until;
use conformance::{MIB, Scratch};
use torture::files::Files;
use torture::medium::Medium;

/// Issue: "a file on NFS (ESTALE, EIO during a server restart)".
#[test]
fn requests_wait_while_a_handle_is_stale_and_a_restart_of_hob_ends_it() {
    let scratch = Scratch::new();
    let files = Files::mount(&scratch.path("mnt"), 1).expect("this test needs root and /dev/fuse");
    let file = files.add("disk.img", Medium::new(8 * MIB, 1));
    let config = format!(
        "state_dir = \"{}\"\nlisten = [\"unix:{}\"]\n[control]\nlisten = [\"unix:{}\"]\n",
        scratch.text("state"),
        scratch.text("nbd.sock"),
        scratch.text("ctl.sock"),
    );
    std::fs::write(scratch.path("hob.toml"), config).unwrap();
    let start = || Daemon::start(&scratch.path("hob.toml"), &scratch.path("ctl.sock"));
    // The control socket, which `start` waits for, is there before the NBD socket.
    let connect = || {
        let mut client = None;
        wait_until("the export", Duration::from_secs(60), || {
            client = Client::connect(&Address::Unix(scratch.path("nbd.sock")), "vm").ok();
            client.is_some()
        });
        client.expect("a connection")
    };
    let hob = start();
    hob.ctl(&["disk", "add", "vm", "--backing", &scratch.text("mnt/disk.img")]);
    let mut client = connect();
    client.write(0, &[1; 8192]).unwrap();
    client.flush().unwrap();

    file.expire_handles();
    client.send(0, CMD_READ, 0, 4096, &[]).unwrap();
    wait_until("a problem in health", Duration::from_secs(60), || {
        let health = hob.try_ctl(&["health"]).all();
        health.contains("ESTALE") || health.contains("cannot open it again")
    });
    file.admit();
    wait_until("the reason in health", Duration::from_secs(60), || {
        hob.try_ctl(&["health"]).all().contains("no creation times")
    });
    // The limit ends the wait.
    hob.ctl(&["disk", "set", "vm", "--backing-timeout", "1s"]);
    assert_eq!(client.receive().unwrap().error, EIO);
    assert_eq!(client.call(0, CMD_WRITE, 4096, 4096, &[2; 4096]).unwrap(), EIO);

    hob.kill();
    let hob = start();
    let mut client = connect();
    assert_eq!(client.read(0, 8192).unwrap(), [1; 8192]);
    client.write(4096, &[3; 4096]).unwrap();
    client.flush().unwrap();
    hob.stop();
}
