//! A whole VM on the disk: it makes a filesystem, fills it, and reads all data back.

use conformance::data::{empty_file, noise_file};
use conformance::guest::{SENTINEL, boot};
use conformance::{MIB, Scratch, Serve};

const SIZE: u64 = 192 * MIB;

#[track_caller]
fn machine_is_content(serve: Serve, scratch: &Scratch) {
    let hob = serve.start(scratch);
    let console = boot(scratch, &hob.uri());
    assert!(console.contains(SENTINEL), "the guest is not content:\n{console}");
    hob.stop();
}

/// Promise 2 for a guest: reads return what was written, through the page cache and after remounts.
#[test]
fn a_guest_keeps_its_files_on_a_cached_disk() {
    let scratch = Scratch::new();
    let disk = scratch.path("disk.img");
    noise_file(&disk, SIZE, 1);
    let serve = Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "64M", "4K");
    machine_is_content(serve, &scratch);
}

#[test]
fn a_guest_keeps_its_files_with_large_cache_blocks_and_a_small_cache() {
    let scratch = Scratch::new();
    empty_file(&scratch.path("disk.img"), SIZE);
    let serve = Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "16M", "64K");
    machine_is_content(serve, &scratch);
}
