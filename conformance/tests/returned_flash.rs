//! A device of a pool fails while hob uses it, and works again later: hob fences the device, and
//! uses it again by itself, but not its content.

use std::fs::OpenOptions;
use std::time::Duration;

use conformance::data::{Noise, assert_same};
use conformance::nbd_client::read_mibs;
use conformance::scratch::{wait_for, wait_until};
use conformance::{Daemon, MIB, Scratch};
use serde_json::Value;

const SIZE: u64 = 32 * MIB;
const DIRTY: u64 = 2 * MIB;
/// Size of the truncated file: it still has the superblocks, but no segment.
const TRUNCATED: u64 = 2 * MIB;
/// hob uses a device again that has answered for a minute.
const RETURN_MAX: Duration = Duration::from_secs(300);

/// Returns the device at `path`, as `hob pool show` reports it.
#[track_caller]
fn device(daemon: &Daemon, path: &str) -> Value {
    let pool = daemon.pool("fast");
    let devices = pool["devices"].as_array().expect("a list of devices");
    devices.iter().find(|device| device["path"] == path).expect("the device").clone()
}

/// Promise 3: the loss and the return of a device cause no guest error and lose no data, because
/// dirty data has two copies.
#[test]
fn a_pool_file_that_was_truncated_and_restored_is_used_again() {
    let scratch = Scratch::new();
    let mut model = scratch.noise("disk.img", SIZE, 3);
    scratch.configure("[limits]\nflash_errors_max = 4\n");
    let daemon = scratch.start_daemon();
    let (one, two) = (scratch.text("flash1"), scratch.text("flash2"));
    daemon.ctl(&["pool", "create", "fast", &one, &two, "--size", "16M", "--segment-size", "1M"]);
    daemon.ctl(&["disk", "add", "vm", "--backing", &scratch.text("disk.img")]);
    daemon.tell(
        "cache enable vm --pool fast --size 20M --mode write-back --copies 2-dirty --dirty-age-max 0 \
         --admission always",
    );
    let mut client = scratch.connect("vm");
    let bytes = Noise::new(5).bytes(DIRTY as usize);
    client.write(0, &bytes).unwrap();
    client.flush().unwrap();
    model[..DIRTY as usize].copy_from_slice(&bytes);
    let room = daemon.disk("vm")["cache"]["room"].clone();

    let file = OpenOptions::new().write(true).open(&one).unwrap();
    let size = file.metadata().unwrap().len();
    wait_for("the fence", || {
        file.set_len(TRUNCATED).unwrap();
        assert_same(&read_mibs(&mut client, 0..SIZE), &model, 0, "the disk and its content");
        device(&daemon, &one)["state"] == "fenced"
    });
    wait_for("the reason", || {
        device(&daemon, &one)["reason"].to_string().contains("has another size than before")
    });
    wait_for("a smaller cache", || daemon.disk("vm")["cache"]["room"] != room);

    file.set_len(size).unwrap();
    wait_until("the return of the device", RETURN_MAX, || device(&daemon, &one)["state"] == "online");
    wait_for("the cache to grow", || daemon.disk("vm")["cache"]["room"] == room);
    wait_for("health", || {
        let health = daemon.try_ctl(&["health"]).all();
        !health.contains("device-fenced") && !health.contains("cache-degraded")
    });
    let shown = device(&daemon, &one);
    assert!(shown["free"] != shown["size"], "{shown}");
    assert_same(&read_mibs(&mut client, 0..SIZE), &model, 0, "the disk and its content");
    let bytes = Noise::new(6).bytes(DIRTY as usize);
    client.write(DIRTY, &bytes).unwrap();
    client.flush().unwrap();
    model[DIRTY as usize..2 * DIRTY as usize].copy_from_slice(&bytes);
    assert_same(&read_mibs(&mut client, 0..SIZE), &model, 0, "the disk and its content");
    drop(client);
    daemon.stop();
}
