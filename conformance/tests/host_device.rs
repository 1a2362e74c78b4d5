//! A disk as a block device of its host. This host's kernel may have no NBD driver, so hob runs inside
//! a VM, whose kernel has one.

use conformance::data::empty_file;
use conformance::guest::{COMPLAINTS, SENTINEL, run_host_device};
use conformance::{MIB, Scratch};

/// Promise 1 for programs of the host: a file system on `/dev/hob/NAME` loses nothing and sees no I/O
/// error while hob is killed three times, replaced three times and restarted, and while the disk
/// grows. A device in use is not removed.
#[test]
fn a_block_device_survives_the_daemon() {
    let scratch = Scratch::new();
    empty_file(&scratch.path("backing.img"), 320 * MIB);
    empty_file(&scratch.path("pool.img"), 160 * MIB);
    let console = run_host_device(&scratch, &conformance::hob::binary());
    let complaints: Vec<_> = COMPLAINTS.iter().filter(|text| console.contains(*text)).collect();
    assert!(console.contains(SENTINEL) && complaints.is_empty(), "{complaints:?}:\n{console}");
    // Requests in flight at a kill wait for the kernel's timer of 5 s, on an emulated CPU that may
    // stall.
    for line in console.lines().filter(|line| line.contains("GUEST-STEP") && line.contains("took")) {
        let seconds = line.split(' ').rev().nth(1).and_then(|word| word.parse::<u32>().ok());
        assert!(seconds.is_some_and(|seconds| seconds <= 60), "{line}");
    }
}
