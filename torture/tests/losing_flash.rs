//! Pool files whose file system fails writes or flushes, or loses data at a failed flush.
//!
//! These tests need root and /dev/fuse.

use std::sync::Arc;
use std::time::{Duration, Instant};

use conformance::data::empty_file;
use conformance::hob::Daemon;
use conformance::nbd_client::Client;
use conformance::scratch::wait_for;
use conformance::{MIB, Scratch};
use torture::behaviour::{Failing, Operation};
use torture::files::{File, Files};
use torture::medium::Medium;

const SIZE: u64 = 16 * MIB;
const POOL_BYTES: u64 = 64 * MIB;
/// Offset of the first segment in a pool file.
const DATA_OFFSET: u64 = 2 * MIB;
const BLOCK: usize = 4096;
/// Number of blocks that the guest writes.
const BLOCKS: u64 = 300;
/// Duration of a fault: longer than the test waits.
const FAULT: Duration = Duration::from_secs(360);

/// A daemon with a write-back cache on files of the test file system.
struct Stage {
    // Dropped before the files, and those before the directory.
    daemon: Option<Daemon>,
    flash: Vec<Arc<File>>,
    _files: Files,
    scratch: Scratch,
}

impl Stage {
    fn new(copies: &str, devices: usize) -> Stage {
        let scratch = Scratch::new();
        let files = Files::mount(&scratch.path("mnt"), 1).expect("this test needs root and /dev/fuse");
        let names: Vec<String> = (0..devices).map(|at| format!("flash{at}")).collect();
        let flash = names.iter().map(|name| files.add(name, Medium::new(POOL_BYTES, 1))).collect();
        let paths: Vec<_> = names.iter().map(|name| files.path(name)).collect();
        empty_file(&scratch.path("disk.img"), SIZE);
        let more = format!(
            "[[pool]]\nname = \"pool\"\ndevices = {paths:?}\nsegment_size = \"1M\"\n\
             [[disk]]\nname = \"vm\"\nbacking = {:?}\n\
             [disk.cache]\npool = \"pool\"\nsize = \"8M\"\nmode = \"write-back\"\ncopies = \"{copies}\"\n\
             dirty_start = 60\ndirty_age_max = 3600\n",
            scratch.path("disk.img"),
        );
        scratch.configure(&more);
        let mut stage = Stage { daemon: None, flash, _files: files, scratch };
        stage.start();
        // On a busy host the disk is served before it has its cache.
        let daemon = stage.daemon.as_ref().expect("it runs");
        wait_for("the cache", || {
            let shown = daemon.try_ctl(&["disk", "show", "vm", "-o", "json"]).stdout;
            let shown: serde_json::Value = serde_json::from_str(&shown).unwrap_or_default();
            shown["cache"]["state"] == "active"
        });
        stage
    }

    fn start(&mut self) {
        self.daemon = Some(self.scratch.start_daemon());
    }

    fn kill(&mut self) {
        self.daemon.take().expect("it runs").kill();
    }

    fn connect(&self) -> Client {
        self.scratch.connect_when_served("vm")
    }
}

fn write_all(client: &mut Client, byte: u8) {
    (0..BLOCKS).for_each(|at| client.write(at * BLOCK as u64, &[byte; BLOCK]).expect("a write"));
}

#[track_caller]
fn has_all(client: &mut Client, byte: u8) {
    for at in 0..BLOCKS {
        let data = client.read(at * BLOCK as u64, BLOCK as u32).expect("a read");
        assert!(data == [byte; BLOCK], "block {at}: {} instead of {byte}", data[0]);
    }
}

/// A failed flush of one device loses data, and the other device has a copy of this data.
#[test]
fn a_device_that_loses_data_at_a_flush_loses_nothing_that_has_two_copies() {
    for device in 0..2 {
        let mut stage = Stage::new("2", 2);
        let mut client = stage.connect();
        write_all(&mut client, 1);
        client.flush().expect("a flush");
        write_all(&mut client, 2);
        stage.flash[device].behaviour().lose_at_flush();
        client.flush().expect("the other device has everything");
        has_all(&mut client, 2);
        stage.kill();
        stage.start();
        has_all(&mut stage.connect(), 2);
    }
}

/// A device that refuses writes or flushes for a while keeps its present data, so nothing is lost,
/// and the guest sees no error.
#[test]
fn errors_of_a_pool_file_reach_no_guest() {
    for (operation, error) in [(Operation::Write, 5), (Operation::Write, 28), (Operation::Flush, 5)] {
        let mut stage = Stage::new("1", 1);
        let mut client = stage.connect();
        write_all(&mut client, 1);
        client.flush().expect("a flush");
        let until = Instant::now() + Duration::from_secs(2);
        stage.flash[0].behaviour().fail(Failing { operation, range: 0..POOL_BYTES, error, until });
        write_all(&mut client, 2);
        client.flush().unwrap_or_else(|failed| panic!("{operation:?} fails with {error}: {failed}"));
        has_all(&mut client, 2);
        stage.kill();
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        stage.start();
        has_all(&mut stage.connect(), 2);
    }
}

/// A journal that cannot be read may describe dirty data, so the disk stays offline until the journal
/// can be read.
#[test]
fn a_disk_waits_until_its_journal_can_be_read() {
    let mut stage = Stage::new("1", 1);
    let mut client = stage.connect();
    write_all(&mut client, 1);
    client.flush().expect("a flush");
    stage.kill();
    // The superblock and the segment table can be read.
    let (operation, range) = (Operation::Read, DATA_OFFSET..POOL_BYTES);
    let until = Instant::now() + FAULT;
    stage.flash[0].behaviour().fail(Failing { operation, range, error: 5, until });
    stage.start();
    let daemon = stage.daemon.as_ref().expect("it runs");
    wait_for("the disk to be refused", || {
        daemon.try_ctl(&["disk", "show", "vm"]).all().contains("cannot be read from")
    });
    assert!(Client::connect(&stage.scratch.nbd(), "vm").is_err());
    stage.flash[0].behaviour().heal();
    has_all(&mut stage.connect(), 1);
}

/// A killed process leaves data that is not durable on flash. hob flushes the device before it
/// recovers a cache, so that a power cut cannot undo data that hob has already used.
#[test]
fn flash_is_flushed_before_a_cache_is_recovered() {
    let mut stage = Stage::new("1", 1);
    let mut client = stage.connect();
    write_all(&mut client, 1);
    client.flush().expect("a flush");
    // hob also flushes by itself, so on a busy host nothing may be left to flush for a moment.
    wait_for("data that is not durable", || {
        write_all(&mut client, 2);
        stage.flash[0].medium().unflushed() > 0
    });
    stage.kill();
    // Without its backing, the disk is not opened, and nothing else flushes the device.
    let (disk, away) = (stage.scratch.path("disk.img"), stage.scratch.path("away"));
    std::fs::rename(&disk, &away).unwrap();
    stage.start();
    wait_for("a flush when the pool is opened", || stage.flash[0].medium().unflushed() == 0);
    std::fs::rename(&away, &disk).unwrap();
    has_all(&mut stage.connect(), 2);
}
