//! The first pass over a disk misses, and the second is served from flash, as `hob stats` counts
//! them. Clearing the cache, switching it off and a restart make the cache cold again.

use conformance::data::{assert_same, noise_file};
use conformance::scratch::wait_for;
use conformance::{Hob, MIB, Scratch, Serve};

const SIZE: u64 = 16 * MIB;
const REQUEST: u64 = 65536;
const COUNT: u64 = SIZE / REQUEST;

fn stage(block: &str) -> (Scratch, Serve) {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), SIZE, 60);
    let serve = Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "32M", block);
    (scratch, serve)
}

/// Reads the whole disk once; returns the hits and misses this caused.
#[track_caller]
fn pass(scratch: &Scratch, hob: &Hob) -> (u64, u64) {
    let image = scratch.read("disk.img");
    let before = hob.stats();
    let mut client = hob.connect();
    for at in (0..SIZE).step_by(REQUEST as usize) {
        let data = client.read(at, REQUEST as u32).unwrap();
        assert_same(&data, &image[at as usize..(at + REQUEST) as usize], at, "the disk and its backing");
    }
    let after = hob.stats();
    (after.hits() - before.hits(), after.misses() - before.misses())
}

/// Reads until a pass has only hits. hob fills flash while it replies, and the fill may end after
/// the reply.
#[track_caller]
fn warm(scratch: &Scratch, hob: &Hob) {
    wait_for("a pass that consists of hits", || pass(scratch, hob) == (COUNT, 0));
}

/// Starts hob with blocks of `block`, and reads the disk until all reads are hits.
#[track_caller]
fn warm_stage(block: &str) -> (Scratch, Serve, Hob) {
    let (scratch, serve) = stage(block);
    let hob = serve.start(&scratch);
    warm(&scratch, &hob);
    (scratch, serve, hob)
}

#[test]
fn the_second_pass_is_served_from_flash() {
    for block in ["4K", "64K", "1M"] {
        let (scratch, serve) = stage(block);
        let hob = serve.start(&scratch);
        let (hits, misses) = pass(&scratch, &hob);
        assert_eq!((hits, misses), (0, COUNT), "first pass, blocks of {block}: {}", hob.stats().text());
        // A request for the same sectors waits for the end of their fill.
        let (hits, misses) = pass(&scratch, &hob);
        assert_eq!((hits, misses), (COUNT, 0), "second pass, blocks of {block}: {}", hob.stats().text());
        hob.stop();
    }
}

#[test]
fn clearing_makes_it_cold() {
    let (scratch, _, hob) = warm_stage("4K");
    hob.ctl(&["cache", "clear", "disk"]);
    assert_eq!(pass(&scratch, &hob).0, 0, "no hit after clearing");
    hob.stop();
}

#[test]
fn switched_off_it_counts_cache_off_and_on_again_it_is_cold() {
    let (scratch, _, hob) = warm_stage("4K");
    hob.ctl(&["cache", "disable", "disk"]);
    let before = hob.stats().class("cache-off");
    assert_eq!(pass(&scratch, &hob), (0, 0), "neither hit nor miss without a cache");
    assert_eq!(hob.stats().class("cache-off") - before, COUNT);
    hob.ctl(&["cache", "enable", "disk", "--pool", "default", "--size", "32M", "--block-size", "4K"]);
    assert_eq!(pass(&scratch, &hob), (0, COUNT), "cold when switched on");
    warm(&scratch, &hob);
    hob.stop();
}

#[test]
fn a_restart_makes_it_cold() {
    let (scratch, serve, hob) = warm_stage("4K");
    hob.stop();
    let hob = serve.start(&scratch);
    assert_eq!(pass(&scratch, &hob), (0, COUNT), "the cache is volatile");
    hob.stop();
}

/// Growing a cache keeps all data; shrinking keeps as much as fits. Sizes are multiples of the
/// pool's segment size.
#[test]
fn resizing_keeps_what_fits() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), SIZE, 60);
    let serve = Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "64M", "4K");
    let hob = serve.start(&scratch);
    hob.ctl(&["cache", "resize", "disk", "32M"]);
    warm(&scratch, &hob);
    hob.ctl(&["cache", "resize", "disk", "64M"]);
    assert_eq!(pass(&scratch, &hob), (COUNT, 0), "growing keeps everything");
    hob.ctl(&["cache", "resize", "disk", "16M"]);
    let room = hob.stats().number("numBlocks");
    assert_eq!(room, Some((16 * MIB / 4096) as f64));
    let before = hob.stats().number("numBlocksCurrentlyCached").unwrap();
    assert!(before > room.unwrap() / 2.0, "shrinking kept {before} blocks of what fits");
    // The kept data must be correct, and the cache must fill again up to its size.
    pass(&scratch, &hob);
    pass(&scratch, &hob);
    hob.stop();
}

#[test]
fn the_size_in_blocks_is_the_requested_size() {
    let (_scratch, _, hob) = warm_stage("8K");
    let stats = hob.stats();
    assert_eq!(stats.number("numBlocks"), Some((32 * MIB / 8192) as f64), "{}", stats.text());
    let cached = stats.number("numBlocksCurrentlyCached");
    assert_eq!(cached, Some((SIZE / 8192) as f64), "{}", stats.text());
    hob.stop();
}

#[test]
fn without_a_pool_nothing_is_cached_and_explain_says_why() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), SIZE, 61);
    let hob = Serve::disk(&scratch.text("disk.img")).start(&scratch);
    assert_eq!(pass(&scratch, &hob), (0, 0));
    assert!(!hob.ctl(&["explain", "disk"]).trim().is_empty());
    hob.stop();
}
