//! Block devices that have other numbers after a restart of the host, and loop devices over files of
//! other disks. The tests need root and loop devices.

use std::os::unix::fs::symlink;
use std::path::Path;

use conformance::data::empty_file;
use conformance::scratch::wait_for;
use conformance::{Daemon, Loop, MIB, Scratch, Tool};

fn point(link: &Path, device: &str) {
    let _ = std::fs::remove_file(link);
    symlink(device, link).expect("the name is free");
}

/// After a restart of the host, the kernel may give the number of a disk's device to the volume of
/// another VM. A test cannot choose these numbers, so this test changes the target of a link
/// instead.
#[test]
fn a_disk_is_not_served_from_another_device_than_before() {
    let scratch = Scratch::new();
    let [one, other] = ["one.img", "other.img"].map(|name| scratch.path(name));
    empty_file(&one, 16 * MIB);
    empty_file(&other, 16 * MIB);
    let (one, other) = (Loop::on(&one, false), Loop::on(&other, false));
    let link = scratch.path("volume");
    point(&link, one.device());
    let config = format!("[[disk]]\nname = \"d\"\nbacking = {link:?}\n");
    scratch.configure(&config);
    let start = || scratch.start_daemon();
    let shown = |daemon: &Daemon| daemon.ctl(&["disk", "show", "d", "-o", "json"]);
    let is_online = |daemon: &Daemon| shown(daemon).contains("\"online\"");

    let daemon = start();
    wait_for("the disk", || is_online(&daemon));
    daemon.kill();
    point(&link, other.device());
    let daemon = start();
    wait_for("the reason", || shown(&daemon).contains("another device than before"));
    let uri = format!("nbd+unix:///d?socket={}", scratch.text("nbd.sock"));
    let opened = Tool::new("qemu-img").args(["info", "-f", "raw", &uri]).output();
    assert!(!opened.success() && !is_online(&daemon), "{}", opened.all());
    // The links are right again.
    point(&link, one.device());
    wait_for("the disk", || is_online(&daemon));
    daemon.stop();
}

#[test]
fn a_file_and_a_loop_device_over_it_are_not_two_disks() {
    let scratch = Scratch::new();
    let file = scratch.text("file.img");
    empty_file(&scratch.path("file.img"), 16 * MIB);
    let over_it = Loop::on(&scratch.path("file.img"), false);
    scratch.configure("");
    let daemon = scratch.start_daemon();
    for [first, second] in [[file.as_str(), over_it.device()], [over_it.device(), file.as_str()]] {
        daemon.ctl(&["disk", "add", "first", "--backing", first]);
        let output = daemon.try_ctl(&["disk", "add", "second", "--backing", second]);
        assert!(!output.success() && output.all().contains("file.img is in use"), "{}", output.all());
        daemon.ctl(&["disk", "remove", "first"]);
    }
    daemon.stop();
}
