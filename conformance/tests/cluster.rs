//! Two hosts and a real etcd. Whatever fails, at most one host serves a disk at a time, and no
//! acknowledged write is lost (docs/CLUSTER.md, docs/decisions/0019). The backing is a separate NBD
//! server without locks or fencing.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use conformance::data::{empty_file, repeated};
use conformance::nbd_client::{CMD_TRIM, CMD_WRITE, CMD_WRITE_ZEROES, Client};
use conformance::process::Process;
use conformance::scratch::{free_port, text, wait_for};
use conformance::store::ONE_BY_ONE;
use conformance::{Authority, Etcd, Freezer, Host, MIB, Plan, Scratch, Store, TestHost, Tool};
use rustix::process::Signal;
use serde_json::Value;

/// A short lease, so that tests are short. With the shortest valid one of 3 s, stalls of the tests'
/// host end leases too often.
const LEASE: Duration = Duration::from_secs(5);
const SETTLE: Duration = Duration::from_secs(1);
const SIZE: u64 = 16 * MIB;
const BLOCK: u64 = 4096;

const THROUGH: &str = "mode = \"write-through\"";
const BACK: &str = "mode = \"write-back\"\ndirty_age_max = 0\ndirty_start = 60\ndirty_stop = 50";

/// Resources that all hosts share.
struct Shared {
    scratch: Scratch,
    store: Store,
}

impl Shared {
    #[track_caller]
    fn new() -> Self {
        let scratch = Scratch::new();
        empty_file(&scratch.path("disk.img"), SIZE);
        let image = scratch.text("disk.img");
        let args = [&ONE_BY_ONE[..], &["file", &image]].concat();
        let store = Store::start(&scratch.path("backing.sock"), &args);
        Self { scratch, store }
    }

    fn block(&self, number: u64) -> Vec<u8> {
        self.scratch.read("disk.img")[(number * BLOCK) as usize..][..BLOCK as usize].to_vec()
    }
}

/// Returns a host with flash and without a cluster.
fn lonely(name: &str) -> Plan {
    Plan::new(name).pool("size = \"64M\"")
}

/// Returns a host of the cluster.
fn member(name: &str, etcd: &Etcd) -> Plan {
    let (lease, settle) = (LEASE.as_secs(), SETTLE.as_secs());
    lonely(name).joins(
        etcd,
        &format!("address = \"10.0.0.1:9443\"\nlease_seconds = {lease}\nsettle_seconds = {settle}"),
    )
}

/// Returns a host of the cluster that has the disk and its cache in its configuration.
fn told(name: &str, etcd: &Etcd, backing: &str, cache: &str) -> Plan {
    let cache = format!("[disk.cache]\npool = \"fast\"\nsize = \"16M\"\n{cache}");
    member(name, etcd).disk("vm1", backing, &cache)
}

/// Starts two hosts with the same configuration, of which the first owns the disk, and an etcd with
/// this many members.
#[track_caller]
fn two_hosts(members: usize, cache: &str) -> (Etcd, Shared, TestHost, TestHost) {
    let (etcd, shared) = (Etcd::start(members), Shared::new());
    let start = |name| told(name, &etcd, &shared.store.backing(""), cache).start();
    let a = start("host-a");
    a.wait_until_serving("vm1");
    let b = start("host-b");
    (etcd, shared, a, b)
}

/// Returns a block that is filled with a number.
fn filled(number: u64) -> Vec<u8> {
    repeated(&[number], BLOCK as usize)
}

/// A guest that writes increasing numbers to one block, and remembers which writes were
/// acknowledged, and when.
struct Guest {
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    times: Arc<Mutex<Vec<(Instant, u64)>>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Guest {
    fn start(mut client: Client, block: u64, from: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let acknowledged = Arc::new(AtomicU64::new(0));
        let times = Arc::new(Mutex::new(Vec::new()));
        let (stopped, last, said) = (stop.clone(), acknowledged.clone(), times.clone());
        let thread = std::thread::spawn(move || {
            for number in from.. {
                if stopped.load(Ordering::SeqCst) || client.write(block * BLOCK, &filled(number)).is_err() {
                    return;
                }
                last.store(number, Ordering::SeqCst);
                said.lock().unwrap().push((Instant::now(), number));
                // Reads must also return current data.
                match client.read(block * BLOCK, BLOCK as u32) {
                    Ok(data) => assert_eq!(data, filled(number), "it reads what it wrote"),
                    Err(_) => return,
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        Self { stop, acknowledged, times, thread: Some(thread) }
    }

    fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    fn acknowledged_after(&self, moment: Instant) -> Vec<u64> {
        let times = self.times.lock().unwrap();
        times.iter().filter(|(at, _)| *at > moment).map(|(_, number)| *number).collect()
    }

    /// Waits until no request of the guest was acknowledged for two seconds.
    #[track_caller]
    fn wait_until_it_waits(&self) {
        let (mut last, mut since) = (self.acknowledged(), Instant::now());
        wait_for("the guest to wait", || {
            let now = self.acknowledged();
            if now != last {
                (last, since) = (now, Instant::now());
            }
            since.elapsed() > Duration::from_secs(2)
        });
    }

    /// Ends a guest whose host was stopped and continued at `woken`. The host may have been stopped
    /// between the check of its lease and the reply to a write that the next owner has `found`. The
    /// host may acknowledge no other write after `woken`.
    #[track_caller]
    fn end_after(self, woken: Instant, found: u64) {
        let late = self.acknowledged_after(woken);
        assert!(
            late.iter().all(|number| *number == found),
            "{late:?} acknowledged, the next owner has {found}"
        );
        self.end();
    }

    #[track_caller]
    fn end(mut self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().expect("the guest read what it wrote");
        self.acknowledged()
    }
}

/// Blocks that [`send_burst`] changes.
const BURST: Range<u64> = 64..192;

/// Number of blocks of the first write of [`send_burst`].
const LONG: u64 = 64;

/// Sends two requests for each block and does not wait for replies: writes of whole blocks and of
/// parts of blocks, write-zeroes and discards. The host then has requests of all kinds in flight in
/// every state, and requests that it has not read yet. The first write is longer than what the socket
/// to the backing holds. The requests are for the blocks of [`BURST`].
#[track_caller]
fn send_burst(client: &mut Client) {
    let data = filled(7);
    let long = data.repeat(LONG as usize);
    client.send(0, CMD_WRITE, BURST.start * BLOCK, long.len() as u32, &long).expect("hob reads it");
    let blocks = BURST.start + LONG..BURST.end;
    for turn in 0..2 {
        for block in blocks.clone() {
            let (command, within, payload) = match (block + turn) % 4 {
                0 => (CMD_WRITE, 0..BLOCK, &data[..]),
                1 => (CMD_WRITE, 512..1024, &data[..512]),
                2 => (CMD_WRITE_ZEROES, 0..BLOCK, &data[..0]),
                _ => (CMD_TRIM, 0..BLOCK, &data[..0]),
            };
            let len = (within.end - within.start) as u32;
            let sent = client.send(0, command, block * BLOCK + within.start, len, payload);
            sent.expect("room in the socket");
        }
    }
}

#[track_caller]
fn number_in(block: &[u8]) -> u64 {
    let words: Vec<u64> = block.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    let other = words.iter().position(|word| *word != words[0]);
    if let Some(at) = other {
        panic!("a block is of two writes: it has {} first, and {} at byte {}", words[0], words[at], at * 8);
    }
    words[0]
}

/// Returns the number that the next owner has in the block of a guest whose host was stopped. The
/// next owner has all acknowledged writes.
#[track_caller]
fn found_by_next_owner(guest: &Guest, client: &mut Client, block: u64) -> u64 {
    let found = number_in(&client.read(block * BLOCK, BLOCK as u32).unwrap());
    let acknowledged = guest.acknowledged();
    assert!(found == acknowledged || found == acknowledged + 1, "{found} and {acknowledged}");
    found
}

#[test]
fn one_host_serves_a_disk_and_the_other_takes_it_when_it_is_given_back() {
    let (_etcd, _shared, mut a, b) = two_hosts(1, THROUGH);
    wait_for("host-b to know who has it", || b.reason("vm1").contains("host-a has it"));
    assert!(Client::connect(&b.nbd(), "vm1").is_err(), "nobody is let in to a disk of another host");
    a.connect("vm1").write(0, &filled(7)).unwrap();
    // The outputs of hob for administrators.
    let status = a.json(&["cluster", "status"]);
    assert_eq!((&status["state"], &status["host"]), (&"member".into(), &"host-a".into()), "{status}");
    assert!(status["left_ms"].as_u64().unwrap() <= LEASE.as_millis() as u64, "{status}");
    let hosts = b.json(&["cluster", "hosts"]);
    let names: Vec<&str> =
        hosts.as_array().unwrap().iter().map(|host| host["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["host-a", "host-b"]);
    assert_eq!((&hosts[0]["disks"], &hosts[1]["disks"]), (&1.into(), &0.into()), "{hosts}");
    let disks = b.ctl(&["cluster", "disks"]);
    assert!(disks.contains("vm1") && disks.contains("held") && disks.contains("host-a"), "{disks}");
    let refused = b.try_ctl(&["cluster", "take", "vm1", "--force", "--yes"]);
    assert!(!refused.success() && refused.all().contains("host-a has it"), "{}", refused.all());
    // `--force` does not take a disk from an owner with a valid lease.
    std::thread::sleep(2 * LEASE);
    assert!(a.serves("vm1") && !b.serves("vm1"));
    let began = Instant::now();
    a.stop();
    b.wait_until_serving("vm1");
    println!("given back, and had after {:?}", began.elapsed());
    assert_eq!(b.connect("vm1").read(0, BLOCK as u32).unwrap(), filled(7));
    let disks = b.json(&["cluster", "disks"]);
    assert_eq!((&disks[0]["host"], &disks[0]["generation"]), (&"host-b".into(), &2.into()), "{disks}");
}

/// Starts two hosts with a long settle time. The first one owns the disk, and a write of the returned
/// guest waits for the backing, which is stopped.
#[track_caller]
fn hosts_with_a_hanging_write() -> (Etcd, Shared, TestHost, TestHost, Client) {
    let (etcd, mut shared) = (Etcd::start(1), Shared::new());
    let backing = shared.store.backing("");
    let start = |name| {
        let lease = LEASE.as_secs();
        let more = format!("address = \"10.0.0.1:9443\"\nlease_seconds = {lease}\nsettle_seconds = 600");
        let cache = format!("[disk.cache]\npool = \"fast\"\nsize = \"16M\"\n{THROUGH}");
        lonely(name).joins(&etcd, &more).disk("vm1", &backing, &cache).start()
    };
    let a = start("host-a");
    a.wait_until_serving("vm1");
    let b = start("host-b");
    wait_for("host-b to know who has it", || b.reason("vm1").contains("host-a has it"));
    let mut guest = a.connect("vm1");
    guest.write(0, &filled(7)).unwrap();
    guest.flush().unwrap();
    shared.store.signal(Signal::STOP);
    guest.send(0, CMD_WRITE, 0, BLOCK as u32, &filled(8)).unwrap();
    let socket = a.text("ctl.sock");
    wait_for("the write to be in flight", || {
        let load = Tool::new("curl").args(["-s", "--unix-socket", &socket, "http://hob/v1/load"]).run();
        let load: Value = serde_json::from_str(&load).unwrap_or_else(|e| panic!("{e}: {load}"));
        load[0]["in_flight"].as_u64() >= Some(1)
    });
    std::thread::sleep(Duration::from_secs(1));
    (etcd, shared, a, b, guest)
}

/// A stop does not wait for a write that the backing does not answer, and the backing may still
/// execute this write. So the disk is not given back, and the next owner waits as after a failure.
#[test]
fn a_host_that_stops_without_its_backing_is_replaced_only_after_the_settle_time() {
    let (_etcd, mut shared, mut a, b, _guest) = hosts_with_a_hanging_write();
    a.stop();
    shared.store.signal(Signal::CONT);
    // A disk that was given back would be taken within about a second.
    std::thread::sleep(Duration::from_secs(5));
    assert!(!b.serves("vm1"), "a late write could destroy data of host-b");
    // The former owner need not wait.
    a.start();
    a.wait_until_serving("vm1");
}

/// A disk is removed by force while its host continues. The next owner waits for the settle time,
/// because the backing may still execute a write of the former owner.
#[test]
fn a_disk_that_is_removed_without_its_backing_is_taken_only_after_the_settle_time() {
    let (_etcd, mut shared, a, b, _guest) = hosts_with_a_hanging_write();
    a.ctl(&["disk", "remove", "vm1", "--discard-dirty", "--force", "--yes"]);
    shared.store.signal(Signal::CONT);
    wait_for("host-a to release the disk", || {
        assert!(!b.serves("vm1"), "a late write could destroy data of host-b");
        !b.ctl(&["cluster", "disks"]).contains("held")
    });
    // A disk that was given back would be taken within about a second.
    std::thread::sleep(Duration::from_secs(5));
    assert!(!b.serves("vm1"), "a late write could destroy data of host-b");
}

#[test]
fn a_host_that_is_killed_is_replaced_and_nothing_acknowledged_is_lost() {
    let (_etcd, _shared, mut a, b) = two_hosts(1, THROUGH);
    let guest = Guest::start(a.connect("vm1"), 3, 1);
    wait_for("the guest to write", || guest.acknowledged() > 50);
    a.kill();
    let killed = Instant::now();
    b.wait_until_serving("vm1");
    println!("failed over after {:?}", killed.elapsed());
    assert!(killed.elapsed() > SETTLE, "not before its lease has ended, and settled");
    let acknowledged = guest.end();
    let mut client = b.connect("vm1");
    let found = number_in(&client.read(3 * BLOCK, BLOCK as u32).unwrap());
    assert!(found == acknowledged || found == acknowledged + 1, "{found} and {acknowledged}");
    client.write(3 * BLOCK, &filled(1 << 40)).unwrap();
    // The first host is back, and its flash has outdated data.
    a.start();
    wait_for("host-a to know who has it", || a.reason("vm1").contains("host-b has it"));
    drop((client, b));
    a.wait_until_serving("vm1");
    assert_eq!(number_in(&a.connect("vm1").read(3 * BLOCK, BLOCK as u32).unwrap()), 1 << 40);
}

#[test]
fn a_host_that_was_stopped_past_its_lease_acknowledges_nothing_when_it_wakes() {
    let (_etcd, mut shared, mut a, b) = two_hosts(1, THROUGH);
    let guest = Guest::start(a.connect("vm1"), 5, 1);
    wait_for("the guest to write", || guest.acknowledged() > 20);
    // The next owner overwrites all of these blocks, so none of the requests may take effect later. The
    // backing's server reads none of them before the host is stopped, so the socket to it is full.
    let mut burst = a.connect("vm1");
    shared.store.signal(Signal::STOP);
    send_burst(&mut burst);
    std::thread::sleep(Duration::from_millis(200));
    a.signal(Signal::STOP);
    shared.store.signal(Signal::CONT);
    b.wait_until_serving("vm1");
    let mut client = b.connect("vm1");
    let found = found_by_next_owner(&guest, &mut client, 5);
    BURST.chain([5]).for_each(|block| client.write(block * BLOCK, &filled(1 << 40)).unwrap());
    drop(client);
    let woken = Instant::now();
    a.signal(Signal::CONT);
    wait_for("host-a to know", || !a.serves("vm1"));
    std::thread::sleep(Duration::from_secs(1));
    guest.end_after(woken, found);
    for block in BURST.chain([5]) {
        assert_eq!(
            number_in(&shared.block(block)),
            1 << 40,
            "block {block}: a write of the old owner arrived"
        );
    }
    assert_eq!(number_in(&b.connect("vm1").read(5 * BLOCK, BLOCK as u32).unwrap()), 1 << 40);
    // The flash of the first host has older data, which must not be served.
    b.ctl(&["disk", "remove", "vm1"]);
    a.wait_until_serving("vm1");
    assert_eq!(number_in(&a.connect("vm1").read(5 * BLOCK, BLOCK as u32).unwrap()), 1 << 40);
}

/// The freezer stops every thread of the old owner at once, at any point of its writes. After the
/// takeover, none of the old owner's writes may reach the backing.
#[test]
fn a_host_that_was_frozen_past_its_lease_writes_nothing_to_the_backing_when_it_thaws() {
    let (_etcd, mut shared, a, b) = two_hosts(1, THROUGH);
    let freezer = Freezer::of(a.daemon().process.pid());
    let guests: Vec<Guest> = (0..4).map(|block| Guest::start(a.connect("vm1"), block, 1)).collect();
    let writes_on = || guests.iter().all(|guest| guest.acknowledged() > 20);
    wait_for("the guests to write", writes_on);
    // The next owner overwrites all of these blocks, so none of the requests may take effect later.
    let mut burst = a.connect("vm1");
    shared.store.signal(Signal::STOP);
    send_burst(&mut burst);
    std::thread::sleep(Duration::from_millis(200));
    freezer.freeze();
    shared.store.signal(Signal::CONT);
    b.wait_until_serving("vm1");
    let mut client = b.connect("vm1");
    let guests: Vec<_> = guests
        .into_iter()
        .zip(0..)
        .map(|(guest, block)| (found_by_next_owner(&guest, &mut client, block), guest))
        .collect();
    let all = || (0..guests.len() as u64).chain(BURST);
    all().for_each(|block| client.write(block * BLOCK, &filled(1 << 40)).unwrap());
    client.flush().unwrap();
    let woken = Instant::now();
    freezer.thaw();
    wait_for("host-a to know", || !a.serves("vm1"));
    std::thread::sleep(Duration::from_secs(2));
    for block in all() {
        assert_eq!(
            number_in(&shared.block(block)),
            1 << 40,
            "block {block}: a write of the old owner arrived"
        );
        assert_eq!(number_in(&client.read(block * BLOCK, BLOCK as u32).unwrap()), 1 << 40);
    }
    for (found, guest) in guests {
        guest.end_after(woken, found);
    }
}

#[test]
fn a_lost_hosts_dirty_data_delays_takeover_unless_it_is_forced() {
    let (_etcd, shared, mut a, mut b) = two_hosts(1, BACK);
    let mut client = a.connect("vm1");
    client.write(9 * BLOCK, &filled(41)).unwrap();
    client.flush().unwrap();
    assert_eq!(number_in(&shared.block(9)), 0, "it is in flash only");
    a.kill();
    wait_for("host-b to know why it cannot", || b.reason("vm1").contains("flash of host-a"));
    std::thread::sleep(2 * (LEASE + SETTLE));
    assert!(!b.serves("vm1") && b.reason("vm1").contains("--force"), "{}", b.reason("vm1"));
    let disks = b.json(&["cluster", "disks"]);
    assert_eq!((&disks[0]["state"], &disks[0]["dirty"]), (&"vanished".into(), &true.into()), "{disks}");
    // A restart of the host recovers its dirty data.
    a.start();
    a.wait_until_serving("vm1");
    assert_eq!(number_in(&a.connect("vm1").read(9 * BLOCK, BLOCK as u32).unwrap()), 41);
    a.kill();
    wait_for("host-b to look", || b.reason("vm1").contains("flash of host-a"));
    // By command, the administrator takes the disk without its dirty data.
    wait_for("force", || b.try_ctl(&["cluster", "take", "vm1", "--force", "--yes"]).success());
    assert!(b.daemon().process.stderr().contains("LOST"), "it is said loudly");
    let mut client = b.connect("vm1");
    assert_eq!(number_in(&client.read(9 * BLOCK, BLOCK as u32).unwrap()), 0);
    client.write(9 * BLOCK, &filled(43)).unwrap();
    client.flush().unwrap();
    // The first host's data never overwrites later data.
    a.start();
    wait_for("host-a to know", || a.reason("vm1").contains("host-b has it"));
    b.ctl(&["drain", "vm1"]);
    drop(client);
    b.ctl(&["cache", "disable", "vm1"]);
    b.stop();
    wait_for("host-a to refuse its old data", || a.reason("vm1").contains("owned the disk meanwhile"));
    assert!(a.reason("vm1").contains("discard-dirty"), "{}", a.reason("vm1"));
    assert_eq!(number_in(&shared.block(9)), 43);
    a.ctl(&["cache", "discard-dirty", "vm1", "--yes"]);
    a.wait_until_serving("vm1");
    assert_eq!(number_in(&a.connect("vm1").read(9 * BLOCK, BLOCK as u32).unwrap()), 43);
}

#[test]
fn guests_see_at_most_a_pause_when_etcd_members_change() {
    let (mut etcd, _shared, a, b) = two_hosts(3, THROUGH);
    let guest = Guest::start(a.connect("vm1"), 7, 1);
    for member in 0..3 {
        etcd.kill(member);
        std::thread::sleep(2 * LEASE);
        etcd.restart(member);
        etcd.pause(member);
        std::thread::sleep(2 * LEASE);
        etcd.resume(member);
        std::thread::sleep(Duration::from_secs(2));
    }
    let before = guest.acknowledged();
    wait_for("the guest to go on", || guest.acknowledged() > before + 20);
    assert!(a.serves("vm1") && !b.serves("vm1"), "{}", a.reason("vm1"));
    // Without etcd, nothing is acknowledged after the end of a lease, and nothing fails.
    (0..3).for_each(|member| etcd.pause(member));
    std::thread::sleep(LEASE + Duration::from_secs(1));
    guest.wait_until_it_waits();
    let held = guest.acknowledged();
    std::thread::sleep(2 * LEASE);
    assert_eq!(guest.acknowledged(), held, "it went on without a lease");
    assert_eq!(a.json(&["cluster", "status"])["state"], "suspended");
    (0..3).for_each(|member| etcd.resume(member));
    wait_for("the guest to go on", || guest.acknowledged() > held + 20 || b.serves("vm1"));
    // Either host may own the disk now, with all acknowledged writes.
    let last = guest.end();
    let host = if a.serves("vm1") { &a } else { &b };
    let found = number_in(&host.connect("vm1").read(7 * BLOCK, BLOCK as u32).unwrap());
    assert!(found == last || found == last + 1, "{found} and {last}");
}

/// Needs root, for the network namespaces.
#[test]
fn a_host_that_is_cut_off_from_etcd_stops_before_the_other_starts() {
    let [left, right] = Host::pair();
    let etcd = Etcd::start_on(&right);
    let shared = Shared::new();
    let a = told("host-a", &etcd, &shared.store.backing(""), THROUGH).start_inside(&left);
    a.wait_until_serving("vm1");
    let b = told("host-b", &etcd, &shared.store.backing(""), THROUGH).start_inside(&right);
    // Both hosts reach the backing all the time, so only etcd decides which host may write.
    let guest = Guest::start(a.connect("vm1"), 11, 1);
    wait_for("the guest to write", || guest.acknowledged() > 50);
    let cable = |state: &str| Tool::new("ip").args(["link", "set", "net0", state]).inside(&left).run();
    cable("down");
    let cut = Instant::now();
    b.wait_until_serving("vm1");
    let began = Instant::now();
    println!("failed over after {:?}", cut.elapsed());
    let acknowledged = guest.acknowledged();
    let found = number_in(&b.connect("vm1").read(11 * BLOCK, BLOCK as u32).unwrap());
    assert!(found == acknowledged || found == acknowledged + 1, "{found} and {acknowledged}");
    b.connect("vm1").write(11 * BLOCK, &filled(1 << 40)).unwrap();
    cable("up");
    wait_for("host-a to know", || !a.serves("vm1"));
    assert_eq!(guest.acknowledged_after(began), [0; 0]);
    let last = guest.times.lock().unwrap().last().map(|(at, _)| *at).unwrap();
    println!("the old owner's last answer came {:?} after the cut", last.saturating_duration_since(cut));
    guest.end();
    assert_eq!(number_in(&shared.block(11)), 1 << 40);
}

/// A backing with its own address, so that it can be cut off from the left host alone.
struct FarStore {
    scratch: Scratch,
    port: String,
    _server: Process,
}

impl FarStore {
    const ADDRESS: &str = "10.99.0.2";

    /// Starts the backing on the right host, with a route from the left host.
    #[track_caller]
    fn start([left, right]: [&Host; 2]) -> Self {
        let scratch = Scratch::new();
        empty_file(&scratch.path("disk.img"), SIZE);
        let address = format!("{}/32", Self::ADDRESS);
        Tool::new("ip").args(["addr", "add", &address, "dev", "net0"]).inside(right).run();
        Tool::new("ip").args(["route", "add", Self::ADDRESS, "dev", "net0"]).inside(left).run();
        let port = free_port().to_string();
        let _server = Tool::new("nbdkit")
            .args(["--foreground", "--ipaddr", Self::ADDRESS, "--port", &port])
            .args(ONE_BY_ONE)
            .args(["file", &scratch.text("disk.img")])
            .inside(right)
            .start();
        Self { scratch, port, _server }
    }

    fn uri(&self) -> String {
        format!("nbd://{}:{}", Self::ADDRESS, self.port)
    }

    fn block(&self, number: u64) -> Vec<u8> {
        self.scratch.read("disk.img")[(number * BLOCK) as usize..][..BLOCK as usize].to_vec()
    }
}

/// Drops all packets from a host to an address.
#[track_caller]
fn cut(host: &Host, address: &str) {
    Tool::new("ip").args(["route", "replace", "blackhole", &format!("{address}/32")]).inside(host).run();
}

/// Restores the route. The kernel continues with its queued data.
#[track_caller]
fn mend(host: &Host, address: &str) {
    Tool::new("ip").args(["route", "replace", &format!("{address}/32"), "dev", "net0"]).inside(host).run();
}

/// A time that is longer than a kernel's pause between two retransmissions, after a connection had
/// no reply for the duration of a fail-over.
const SENT_AGAIN: Duration = Duration::from_secs(20);

/// Needs root, for the network namespaces. When the host dies, a write is in flight to a backing
/// that is cut off. The host's kernel has the write, and would retransmit it for minutes.
#[test]
fn a_write_of_a_killed_host_does_not_arrive_after_the_next_one_has_begun() {
    let [left, right] = Host::pair();
    let etcd = Etcd::start_on(&right);
    let store = FarStore::start([&left, &right]);
    let mut a = told("host-a", &etcd, &store.uri(), THROUGH).start_inside(&left);
    a.wait_until_serving("vm1");
    let b = told("host-b", &etcd, &store.uri(), THROUGH).start_inside(&right);
    let guest = Guest::start(a.connect("vm1"), 15, 1);
    wait_for("the guest to write", || guest.acknowledged() > 50);
    cut(&left, FarStore::ADDRESS);
    // The kernel has one write, which has no reply.
    std::thread::sleep(Duration::from_secs(1));
    a.kill();
    b.wait_until_serving("vm1");
    let acknowledged = guest.end();
    let mut client = b.connect("vm1");
    assert!(number_in(&client.read(15 * BLOCK, BLOCK as u32).unwrap()) >= acknowledged);
    client.write(15 * BLOCK, &filled(1 << 40)).unwrap();
    mend(&left, FarStore::ADDRESS);
    std::thread::sleep(SENT_AGAIN);
    assert_eq!(number_in(&store.block(15)), 1 << 40, "a write of the old owner arrived");
}

/// Needs root, for the network namespaces. The host runs, but reaches neither etcd nor the backing.
/// Then it reaches the backing first.
#[test]
fn a_write_of_a_host_without_lease_does_not_arrive_after_the_next_one_has_begun() {
    let [left, right] = Host::pair();
    let etcd = Etcd::start_on(&right);
    let store = FarStore::start([&left, &right]);
    let a = told("host-a", &etcd, &store.uri(), THROUGH).start_inside(&left);
    a.wait_until_serving("vm1");
    let b = told("host-b", &etcd, &store.uri(), THROUGH).start_inside(&right);
    let guest = Guest::start(a.connect("vm1"), 17, 1);
    wait_for("the guest to write", || guest.acknowledged() > 50);
    cut(&left, FarStore::ADDRESS);
    cut(&left, right.address());
    b.wait_until_serving("vm1");
    let began = Instant::now();
    let acknowledged = guest.acknowledged();
    let mut client = b.connect("vm1");
    assert!(number_in(&client.read(17 * BLOCK, BLOCK as u32).unwrap()) >= acknowledged);
    client.write(17 * BLOCK, &filled(1 << 40)).unwrap();
    mend(&left, FarStore::ADDRESS);
    std::thread::sleep(SENT_AGAIN);
    assert_eq!(number_in(&store.block(17)), 1 << 40, "a write of the old owner arrived");
    mend(&left, right.address());
    wait_for("host-a to know", || !a.serves("vm1"));
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(number_in(&store.block(17)), 1 << 40, "a write of the old owner arrived");
    assert_eq!(guest.acknowledged_after(began), [0; 0], "it acknowledged what it must not");
    guest.end();
}

/// Needs root, for the network namespaces. The owner reaches etcd all the time, so it keeps the
/// disk, and no other host writes.
#[test]
fn a_host_without_its_backing_keeps_its_disk_and_continues_later() {
    let [left, right] = Host::pair();
    let etcd = Etcd::start_on(&right);
    let store = FarStore::start([&left, &right]);
    let a = told("host-a", &etcd, &store.uri(), THROUGH).start_inside(&left);
    a.wait_until_serving("vm1");
    let b = told("host-b", &etcd, &store.uri(), THROUGH).start_inside(&right);
    a.connect("vm1").write(2 * BLOCK, &filled(9)).unwrap();
    wait_for("a hit", || {
        assert_eq!(a.connect("vm1").read(2 * BLOCK, BLOCK as u32).unwrap(), filled(9));
        a.daemon().stats("vm1").hits() > 0
    });
    let guest = Guest::start(a.connect("vm1"), 13, 1);
    wait_for("the guest to write", || guest.acknowledged() > 50);
    cut(&left, FarStore::ADDRESS);
    // Requests that were in flight may still be answered.
    guest.wait_until_it_waits();
    let begin = Instant::now();
    std::thread::sleep(2 * (LEASE + SETTLE));
    assert_eq!(
        guest.acknowledged_after(begin),
        [0; 0],
        "a write through was acknowledged without the backing"
    );
    assert_eq!(a.connect("vm1").read(2 * BLOCK, BLOCK as u32).unwrap(), filled(9), "hits are served");
    assert!(a.serves("vm1") && !b.serves("vm1"), "{}", b.reason("vm1"));
    assert!(b.reason("vm1").contains("host-a has it"), "{}", b.reason("vm1"));
    mend(&left, FarStore::ADDRESS);
    wait_for("the guest to go on", || !guest.acknowledged_after(begin).is_empty());
    let acknowledged = guest.end();
    assert!(number_in(&store.block(13)) >= acknowledged);
}

/// The disk moves between hosts with its cache, and etcd always names its owner.
#[test]
fn a_disk_migrates_within_its_cluster_and_not_out_of_it() {
    let etcd = Etcd::start(1);
    let shared = Shared::new();
    let authority = Authority::new("hosts");
    let reached = |plan: Plan| plan.reached_as(&authority, "host").admits("host", "admin").start();
    let a = reached(told("host-a", &etcd, &shared.store.backing(""), BACK));
    a.wait_until_serving("vm1");
    let (b, c) = (reached(member("host-b", &etcd)), reached(lonely("host-c")));
    let mut client = a.connect("vm1");
    client.write(9 * BLOCK, &filled(41)).unwrap();
    client.flush().unwrap();
    let migrate = |to: &TestHost| a.try_ctl(&["migrate", "vm1", "--to", to.address(), "--wait", "warm"]);
    let refused = migrate(&c);
    assert!(!refused.success() && refused.all().contains("not in a cluster"), "{}", refused.all());
    assert!(a.serves("vm1"), "{}", a.reason("vm1"));
    let moved = migrate(&b);
    assert!(moved.success(), "{}", moved.all());
    assert_eq!(b.json(&["cluster", "disks"])[0]["host"], "host-a", "it is awaited, and not had");
    a.ctl(&["migrate", "vm1", "--finish", "--wait", "over"]);
    let disks = b.json(&["cluster", "disks"]);
    assert_eq!((&disks[0]["host"], &disks[0]["generation"]), (&"host-b".into(), &2.into()), "{disks}");
    assert_eq!(disks[0]["state"], "held");
    let mut client = b.connect("vm1");
    assert_eq!(number_in(&client.read(9 * BLOCK, BLOCK as u32).unwrap()), 41);
    // The disk is in write-back on that host, and etcd has recorded this before.
    wait_for("the cache to write back", || b.disk("vm1")["cache"]["mode"] == "write-back");
    assert_eq!(b.json(&["cluster", "disks"])[0]["dirty"], true);
    client.write(9 * BLOCK, &filled(42)).unwrap();
    client.flush().unwrap();
    assert_eq!(a.disk("vm1")["state"], "away");
    drop((client, c));
}

#[test]
fn invalid_commands_return_an_error() {
    let scratch = Scratch::new();
    let config = |text: &str| {
        let path = scratch.path("hob.toml");
        std::fs::write(&path, format!("state_dir = {:?}\n{text}", scratch.path("state"))).unwrap();
        path
    };
    let run =
        |path: &Path| conformance::hob::command(&["daemon", "--check", "--config", path.to_str().unwrap()]);
    for (text, part) in [
        ("[cluster]\netcd = [\"127.0.0.1:2379\"]", "http://host:port"),
        ("[cluster]\netcd = [\"https://127.0.0.1:2379\"]", "cluster.ca"),
        ("[cluster]\netcd = [\"http://127.0.0.1:2379\"]\nlease_seconds = 1", "lease_seconds"),
    ] {
        let said = run(&config(text));
        assert!(!said.success() && said.all().contains(part), "{}", said.all());
    }
    let lonely = conformance::Serve::disk(&{
        empty_file(&scratch.path("d.img"), MIB);
        scratch.text("d.img")
    })
    .start(&scratch);
    let said = lonely.try_ctl(&["cluster", "status"]);
    assert!(!said.success() && said.all().contains("not in a cluster"), "{}", said.all());
}

/// The number of requests of a host must not depend on the number of disks for which it waits.
/// Otherwise hundreds of hosts would overload etcd.
#[test]
fn a_host_that_waits_for_many_disks_sends_few_requests() {
    const DISKS: usize = 40;
    let (etcd, shared) = (Etcd::start(1), Shared::new());
    let mut first = told("node-a", &etcd, &shared.store.backing(""), "").start();
    first.wait_until_serving("vm1");
    let second = told("node-b", &etcd, &shared.store.backing(""), "").start();
    let disks: Vec<String> = (0..DISKS).map(|disk| format!("more-{disk}")).collect();
    for host in [&first, &second] {
        for disk in &disks {
            let image = shared.scratch.path(&format!("{disk}.img"));
            empty_file(&image, MIB);
            host.ctl(&["disk", "add", disk, "--backing", &text(&image)]);
        }
    }
    let is_settled = |disk: &Value| {
        let waits = disk["reason"].as_str().is_some_and(|why| why.contains("node-a has it"));
        waits || disk["state"] == "online"
    };
    wait_for("the other host to wait", || {
        second.json(&["disk", "list"]).as_array().unwrap().iter().all(is_settled)
    });
    std::thread::sleep(Duration::from_secs(4));
    let (before, start) = (etcd.reads(), Instant::now());
    std::thread::sleep(Duration::from_secs(10));
    let (asked, seconds) = (etcd.reads() - before, start.elapsed().as_secs() + 1);
    // Each of the two hosts reads one key for each renewal of its lease. If the waiting host also
    // read a key for each of the 40 disks once a second, the test would count more reads.
    assert!(asked < 15 * seconds, "{asked} reads in {seconds} s by two hosts, one waits for {DISKS} disks");
    let begin = Instant::now();
    first.stop();
    let online = || {
        let list = second.json(&["disk", "list"]);
        list.as_array().unwrap().iter().filter(|disk| disk["state"] == "online").count()
    };
    wait_for("all disks to be served by the other host", || online() == DISKS + 1);
    eprintln!("{} disks were given back and taken within {:?}", DISKS + 1, begin.elapsed());
}
