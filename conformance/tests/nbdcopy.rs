//! `nbdcopy` (libnbd) in both directions: many connections, many requests in flight, equal files.

use conformance::data::{assert_same_file, empty_file, noise_file};
use conformance::{MIB, Scratch, Serve, Tool};

const SIZE: u64 = 96 * MIB;

#[track_caller]
fn copies_are_equal(cached: bool) {
    let scratch = Scratch::new();
    let (disk, source, copy) = (scratch.path("disk.img"), scratch.path("source"), scratch.path("copy"));
    empty_file(&disk, SIZE);
    noise_file(&source, SIZE, 4);
    let mut serve = Serve::disk(&scratch.text("disk.img"));
    if cached {
        serve = serve.cached(&scratch.path("pool"), "128M", "16K");
    }
    let hob = serve.start(&scratch);
    let nbdcopy = || Tool::new("nbdcopy").args(["--connections=4", "--requests=32"]);
    nbdcopy().args(["--flush", &scratch.text("source"), &hob.uri()]).run();
    assert_same_file(&source, &disk);
    // The first pass fills the cache, and the second is served from it.
    for _ in 0..2 {
        nbdcopy().args([&hob.uri(), &scratch.text("copy")]).run();
        assert_same_file(&source, &copy);
        std::fs::remove_file(&copy).unwrap();
    }
    hob.stop();
    assert_same_file(&source, &disk);
}

#[test]
fn without_a_cache() {
    copies_are_equal(false);
}

#[test]
fn through_a_cache() {
    copies_are_equal(true);
}

#[test]
fn holes_arrive_as_zeroes_over_old_data() {
    let scratch = Scratch::new();
    let (disk, source) = (scratch.path("disk.img"), scratch.path("source"));
    noise_file(&disk, 16 * MIB, 5);
    empty_file(&source, 16 * MIB);
    let hob =
        Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "64M", "4K").start(&scratch);
    Tool::new("nbdcopy").args([&hob.uri(), "null:"]).run();
    Tool::new("nbdcopy").args([&scratch.text("source"), &hob.uri()]).run();
    Tool::new("nbdcopy").args([&hob.uri(), &scratch.text("copy")]).run();
    assert_same_file(&source, &scratch.path("copy"));
    assert_same_file(&source, &disk);
}
