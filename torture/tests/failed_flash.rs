//! A flash device refuses writes for a while, and works again after hob was stopped. Meanwhile the
//! cache has stopped using the device, so old dirty data on the device must not return.
//!
//! This test needs root and /dev/fuse.

use std::time::{Duration, Instant};

use conformance::data::empty_file;
use conformance::nbd_client::{CMD_WRITE, Client};
use conformance::scratch::wait_for;
use conformance::{MIB, Scratch};
use torture::behaviour::{Failing, Operation};
use torture::files::Files;
use torture::medium::Medium;

const SIZE: u64 = 16 * MIB;
const POOL_BYTES: u64 = 64 * MIB;
const BLOCK: usize = 4096;
/// Number of writes that are sent together.
const BURST: u64 = 64;
/// Duration of a fault: longer than the test waits.
const FAULT: Duration = Duration::from_secs(360);

fn write_all(client: &mut Client, byte: u8) {
    (0..SIZE).step_by(BLOCK).for_each(|at| client.write(at, &[byte; BLOCK]).expect("a write"));
}

#[test]
fn dirty_data_of_a_failed_device_does_not_return() {
    let scratch = Scratch::new();
    let files = Files::mount(&scratch.path("mnt"), 1).expect("this test needs root and /dev/fuse");
    let flash = files.add("flash", Medium::new(POOL_BYTES, 1));
    empty_file(&scratch.path("disk.img"), SIZE);
    let more = format!(
        "[[pool]]\nname = \"pool\"\ndevices = [{:?}]\nsegment_size = \"1M\"\n\
         [[disk]]\nname = \"vm\"\nbacking = {:?}\n\
         [disk.cache]\npool = \"pool\"\nsize = \"8M\"\nmode = \"write-back\"\ndirty_start = 60\ndirty_age_max = 3600\n",
        files.path("flash"),
        scratch.path("disk.img"),
    );
    scratch.configure(&more);

    let daemon = scratch.start_daemon();
    let mut client = scratch.connect_when_served("vm");
    (0..400).for_each(|block| client.write(block * BLOCK as u64, &[1; BLOCK]).expect("a write"));
    client.flush().expect("a flush");
    let until = Instant::now() + FAULT;
    let operation = Operation::Write;
    flash.behaviour().fail(Failing { operation, range: 0..POOL_BYTES, error: 5, until });
    // Many writes at a time fail before hob stops using the device.
    for block in 500..500 + BURST {
        client.send(0, CMD_WRITE, block * BLOCK as u64, BLOCK as u32, &[2; BLOCK]).expect("a request");
    }
    (0..BURST).for_each(|_| assert_eq!(client.receive().expect("a reply").error, 0));
    wait_for("the cache to leave the device", || {
        daemon.stats("vm").number("blocks").is_none_or(|blocks| blocks == 0.0)
    });
    write_all(&mut client, 4);
    client.flush().expect("a flush");
    daemon.stop();

    flash.behaviour().heal();
    let daemon = scratch.start_daemon();
    let mut client = scratch.connect_when_served("vm");
    for at in (0..SIZE).step_by(BLOCK) {
        let data = client.read(at, BLOCK as u32).expect("a read");
        assert!(data == [4; BLOCK], "block {}: {} instead of 4", at / BLOCK as u64, data[0]);
    }
    daemon.stop();
}
