//! QEMU in usual setups: a guest over NBD that waits while the daemon restarts, and QEMU under its
//! own user.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use conformance::data::noise_file;
use conformance::guest::{COMPLAINTS, SENTINEL, start_rounds_nbd};
use conformance::scratch::wait_until;
use conformance::{MIB, Scratch, Serve, Tool};

const SIZE: u64 = 192 * MIB;

/// Maximum time of a guest.
const GUEST_MAX: Duration = Duration::from_secs(600);

/// A user and a group without any files.
const NOBODY: &str = "65534";

/// With `reconnect-delay`, as documented, a guest notices neither kill -9 nor a stop and start.
#[test]
fn a_guest_over_nbd_sees_no_error_when_the_daemon_is_restarted() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), SIZE, 1);
    let serve = Serve::disk(&scratch.text("disk.img"))
        .cached(&scratch.path("pool"), "64M", "4K")
        .arg("--mode", "write-back");
    let hob = serve.start(&scratch);
    let mut guest = start_rounds_nbd(&scratch, &hob.uri(), 9);
    let reached = |round: u32| {
        let line = format!("GUEST-ROUND {round}");
        wait_until(&line, GUEST_MAX, || guest.stdout().lines().any(|said| said.starts_with(&line)));
    };
    reached(2);
    hob.kill();
    let hob = serve.start(&scratch);
    reached(5);
    hob.stop();
    let hob = serve.start(&scratch);
    let console = guest.finish(GUEST_MAX).all();
    assert!(console.contains(SENTINEL), "the guest is not content:\n{console}");
    for bad in COMPLAINTS {
        assert!(!console.contains(bad), "{bad}:\n{console}");
    }
    hob.stop();
}

/// QEMU's own client under another user is refused by default, and admitted if the socket belongs
/// to this user or group.
#[test]
fn an_unprivileged_qemu_opens_a_socket_that_is_its_own() {
    let scratch = Scratch::new();
    std::fs::set_permissions(scratch.dir(), std::fs::Permissions::from_mode(0o755)).expect("be root");
    noise_file(&scratch.path("disk.img"), 8 * MIB, 1);
    let plain = Serve::disk(&scratch.text("disk.img"));
    let client = |uri: &str| {
        let user = [format!("--reuid={NOBODY}"), format!("--regid={NOBODY}"), "--clear-groups".to_owned()];
        Tool::new("setpriv").args(user).args([
            "qemu-io",
            "-f",
            "raw",
            "-c",
            "write -P 7 0 4k",
            "-c",
            "read -P 7 0 4k",
            uri,
        ])
    };
    let vhost = scratch.text("vm.sock");
    // A character device connects at once, and QEMU then waits for the monitor's client.
    let guest = || {
        let user = [format!("--reuid={NOBODY}"), format!("--regid={NOBODY}"), "--clear-groups".to_owned()];
        let qemu = "qemu-system-x86_64 -machine none -nodefaults -display none -S -monitor stdio";
        let chardev = format!("socket,id=disk,path={vhost}");
        Tool::new("setpriv").args(user).args(["sh", "-c", &format!("echo quit | {qemu} -chardev {chardev}")])
    };
    let hob = plain.clone().arg("--vhost-user", &vhost).arg("--socket-mode", "0600").start(&scratch);
    assert!(client(&hob.uri()).run_failing().all().contains("Permission denied"));
    assert!(guest().run_failing().all().contains("Permission denied"));
    hob.stop();
    for (option, value, mode) in [("--socket-owner", NOBODY, "0600"), ("--socket-group", NOBODY, "0660")] {
        let serve = plain.clone().arg("--vhost-user", &vhost).arg(option, value).arg("--socket-mode", mode);
        let hob = serve.start(&scratch);
        client(&hob.uri()).run();
        guest().run();
        hob.stop();
    }
}
