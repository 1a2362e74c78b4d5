//! A disk on Ceph RBD moves between hosts with its cache: only the host that may write has the
//! image locked.

use conformance::data::noise_file;
use conformance::nbd_client::{Client, read_mibs};
use conformance::scratch::wait_for;
use conformance::{Authority, Cluster, MIB, Plan, TestHost};
use serde_json::Value;

const SIZE: u64 = 32 * MIB;
/// Starts a daemon that other hosts can reach, with a pool and without disks.
#[track_caller]
fn host(authority: &Authority) -> TestHost {
    let plan = Plan::new("host").reached_as(authority, "host").admits("host", "admin");
    plan.pool("size = \"64M\"\nsegment_size = \"1M\"").start()
}

/// Returns the clients that have locked the image.
#[track_caller]
fn lockers(cluster: &Cluster) -> Vec<String> {
    let locks = cluster.rbd(&["lock", "list", "--format", "json", "rbd/disk"]);
    let locks: Value = serde_json::from_str(&locks).expect("rbd speaks JSON");
    locks.as_array().into_iter().flatten().map(|lock| lock["locker"].to_string()).collect()
}

/// Dirty data is on the cluster before the other host writes. There is always one lock, and its
/// client changes with each move. The disk reads the latest writes on every host.
#[test]
fn a_disk_on_rbd_moves_with_its_cache_and_one_host_has_the_lock() {
    let cluster = Cluster::shared();
    let authority = Authority::new("hosts");
    let (a, b) = (host(&authority), host(&authority));
    let file = a.path("disk.img");
    noise_file(&file, SIZE, 71);
    cluster.import(&file, "disk");
    let mut expected = std::fs::read(&file).unwrap();
    a.ctl(&["disk", "add", "vm", "--backing", &cluster.spec("disk")]);
    a.tell("cache enable vm --pool fast --size 40M --block-size 4K --mode write-back");
    let mut client = a.connect("vm");
    read_mibs(&mut client, 0..SIZE);
    let mut write = |client: &mut Client, at: u64, byte: u8| {
        client.write(at, &[byte; 65536]).unwrap();
        client.flush().unwrap();
        expected[at as usize..][..65536].fill(byte);
    };
    write(&mut client, MIB, 1);
    let first = lockers(&cluster);
    assert_eq!(first.len(), 1);
    // In standby both hosts have the image open. Only the owner has the lock, and continues to
    // write.
    a.ctl(&["migrate", "vm", "--to", b.address(), "--wait", "warm"]);
    assert_eq!(b.state("vm"), "awaited");
    write(&mut client, 2 * MIB, 2);
    assert_eq!(lockers(&cluster), first);
    let mut there = b.connect("vm");
    assert_eq!(there.read(2 * MIB, 65536).unwrap(), [2; 65536], "it reads what the owner has");
    // The first write on this host takes the disk over.
    write(&mut there, 3 * MIB, 3);
    wait_for("the first host to have given it up", || a.state("vm") == "away");
    let second = lockers(&cluster);
    assert!(second.len() == 1 && second != first, "{first:?} and {second:?}");
    assert!(client.write(4 * MIB, &[9; 4096]).is_err(), "the first host takes no write any more");
    wait_for("the first host to need nothing more", || {
        let shown = a.try_ctl(&["migrate", "vm", "-o", "json"]);
        let shown: Value = serde_json::from_str(&shown.stdout).unwrap_or_default();
        shown["state"] == "over" || shown["state"] == "away"
    });
    // A host that waits for a disk has not changed the image.
    b.ctl(&["migrate", "vm", "--to", a.address(), "--switch", "ask", "--wait", "awaited"]);
    b.ctl(&["migrate", "vm", "--cancel"]);
    assert_eq!(lockers(&cluster), second);
    write(&mut there, 5 * MIB, 5);
    // The disk moves back by command.
    b.ctl(&["migrate", "vm", "--to", a.address(), "--switch", "ask", "--wait", "warm"]);
    b.ctl(&["migrate", "vm", "--finish", "--wait", "over"]);
    let mut client = a.connect("vm");
    write(&mut client, 6 * MIB, 6);
    let third = lockers(&cluster);
    assert!(third.len() == 1 && third != second, "{second:?} and {third:?}");
    a.ctl(&["drain", "vm"]);
    assert!(read_mibs(&mut client, 0..SIZE) == expected, "the disk is not what was written");
    drop((client, there));
    a.ctl(&["disk", "remove", "vm"]);
    assert!(cluster.export("disk") == expected, "nor is the image");
}
