//! Two hosts, a real etcd, and disks that move between the hosts by command; evacuation and advice
//! (docs/CLUSTER.md, docs/decisions/0024). The backings are files that both hosts can read.

use std::path::PathBuf;
use std::time::Duration;

use conformance::data::{empty_file, repeated};
use conformance::nbd_client::{Client, read_mibs};
use conformance::scratch::{text, wait_for, wait_until};
use conformance::store::ONE_BY_ONE;
use conformance::{Authority, Etcd, MIB, Plan, Scratch, Store, TestHost};
use rustix::process::Signal;
use serde_json::Value;

const SIZE: u64 = 16 * MIB;
const BLOCK: u64 = 4096;
const THROUGH: &str = "mode = \"write-through\"";
const BACK: &str = "mode = \"write-back\"\ndirty_age_max = 0\ndirty_start = 60\ndirty_stop = 50";

/// Resources that all hosts share.
struct Shared {
    scratch: Scratch,
    etcd: Etcd,
    authority: Authority,
}

impl Shared {
    #[track_caller]
    fn new(disks: &[&str]) -> Shared {
        let shared =
            Shared { scratch: Scratch::new(), etcd: Etcd::start(1), authority: Authority::new("hosts") };
        disks.iter().for_each(|disk| empty_file(&shared.image(disk), SIZE));
        shared
    }

    fn image(&self, disk: &str) -> PathBuf {
        self.scratch.path(&format!("{disk}.img"))
    }

    fn block(&self, disk: &str, number: u64) -> Vec<u8> {
        let image = std::fs::read(self.image(disk)).unwrap();
        image[(number * BLOCK) as usize..((number + 1) * BLOCK) as usize].to_vec()
    }

    /// Starts a host with a pool of `pool_mib` MiB and these disks in its configuration, each with
    /// a cache of 8 MiB.
    #[track_caller]
    fn start(&self, name: &str, pool_mib: u64, disks: &[&str], cache: &str) -> TestHost {
        self.start_with_lease(5, name, pool_mib, disks, cache)
    }

    #[track_caller]
    fn start_with_lease(
        &self,
        lease: u32,
        name: &str,
        pool_mib: u64,
        disks: &[&str],
        cache: &str,
    ) -> TestHost {
        let mut plan = Plan::new(name)
            .reached_as(&self.authority, "host")
            .admits("host", "admin")
            .pool(&format!("size = \"{pool_mib}M\"\nsegment_size = \"1M\""));
        let address = format!("address = {:?}\nlease_seconds = {lease}\nsettle_seconds = 1", plan.address());
        plan = plan.joins(&self.etcd, &address);
        for disk in disks {
            let cache = format!("[disk.cache]\npool = \"fast\"\nsize = \"8M\"\n{cache}");
            plan = plan.disk(disk, &text(&self.image(disk)), &cache);
        }
        plan.start()
    }

    /// Starts an NBD server with the image of the disk `vm`, and two hosts with this disk in their
    /// configuration. The first host serves the disk. The server has no lock, so the second host
    /// can open the disk while the first host is stopped.
    #[track_caller]
    fn start_on_store(&self) -> (Store, [TestHost; 2]) {
        let image = text(&self.image("vm"));
        let arguments = [&ONE_BY_ONE[..], &["file", &image]].concat();
        let store = Store::start(&self.scratch.path("backing.sock"), &arguments);
        let hosts = ["host-a", "host-b"].map(|name| {
            let plan = Plan::new(name).reached_as(&self.authority, "host").admits("host", "admin");
            let lease = format!("address = {:?}\nlease_seconds = 5\nsettle_seconds = 1", plan.address());
            let cache = format!("[disk.cache]\npool = \"fast\"\nsize = \"8M\"\n{BACK}");
            let host = plan
                .pool("size = \"64M\"\nsegment_size = \"1M\"")
                .joins(&self.etcd, &lease)
                .disk("vm", &store.backing(""), &cache)
                .start();
            if name == "host-a" {
                host.wait_until_serving("vm");
            }
            host
        });
        (store, hosts)
    }
}

/// Returns the owner of a disk according to etcd.
#[track_caller]
fn owner(side: &TestHost, disk: &str) -> (String, String) {
    let disks = side.json(&["cluster", "disks"]);
    let found = disks.as_array().unwrap().iter().find(|one| one["name"] == disk).cloned().unwrap_or_default();
    (word(&found, "host"), word(&found, "state"))
}

/// Returns true if etcd has recorded that the host's flash may have dirty data of a disk.
#[track_caller]
fn is_marked(side: &TestHost, disk: &str) -> bool {
    let disks = side.json(&["cluster", "disks"]);
    let found = disks.as_array().unwrap().iter().find(|one| one["name"] == disk).cloned();
    found.unwrap()["dirty"].as_bool().unwrap()
}

fn mode(side: &TestHost, disk: &str) -> String {
    word(&side.disk(disk)["cache"], "mode")
}

fn filled(number: u64) -> Vec<u8> {
    repeated(&[number], BLOCK as usize)
}

fn word(shown: &Value, name: &str) -> String {
    shown[name].as_str().unwrap_or_default().to_owned()
}

/// A disk moves by a command at the other host, is drained on the way, and moves back. The other
/// host has the disk in its configuration in one case and not in the other.
#[test]
fn an_unused_disk_moves_to_another_host_and_back() {
    let shared = Shared::new(&["vm1"]);
    let mut a = shared.start("host-a", 64, &["vm1"], BACK);
    a.wait_until_serving("vm1");
    let b = shared.start("host-b", 64, &[], BACK);
    wait_for("host-b to be a member", || a.json(&["cluster", "hosts"]).as_array().unwrap().len() == 2);
    let mut client = a.connect("vm1");
    client.write(9 * BLOCK, &filled(41)).unwrap();
    client.flush().unwrap();
    assert_eq!(shared.block("vm1", 9), filled(0), "it is in flash only");
    drop(client);
    let free = a.json(&["pool", "list"])[0]["free"].as_u64();
    // An impossible move is refused at once.
    for (args, part) in [
        (&["cluster", "move", "vm1", "--to", "nobody"][..], "members are host-a, host-b"),
        (&["cluster", "move", "vm2", "--to", "host-b"], "no host of the cluster owns or owned"),
        (&["cluster", "move", "vm1", "--to", "host-a"], "host-a has vm1 already"),
        (&["cluster", "move", "vm1"], "is not being moved"),
        (&["cluster", "move", "vm1", "--cancel"], "is not being moved"),
        (&["cluster", "move", "vm1", "--to", "host-b", "--pool", "slow"], "slow"),
    ] {
        let refused = b.try_ctl(args);
        assert!(!refused.success() && refused.all().contains(part), "{args:?}: {}", refused.all());
    }
    assert!(a.serves("vm1"), "{}", a.disk("vm1"));
    let moved = b.json(&["cluster", "move", "vm1", "--to", "host-b"]);
    assert_eq!((word(&moved, "state"), word(&moved, "from")), ("done".into(), "host-a".into()), "{moved}");
    assert_eq!(shared.block("vm1", 9), filled(41), "it was drained first");
    assert!(b.serves("vm1") && !a.serves("vm1"));
    assert_eq!(owner(&b, "vm1"), ("host-b".into(), "held".into()));
    let cache = &b.disk("vm1")["cache"];
    assert_eq!(
        (&cache["mode"], &cache["pool"]),
        (&"write-back".into(), &"fast".into()),
        "as it was: {cache}"
    );
    assert!(a.json(&["pool", "list"])[0]["free"].as_u64() > free, "its flash is free again");
    let mut client = b.connect("vm1");
    assert_eq!(client.read(9 * BLOCK, BLOCK as u32).unwrap(), filled(41));
    client.write(9 * BLOCK, &filled(42)).unwrap();
    client.flush().unwrap();
    drop(client);
    // The disk moves back, by a command at its owner; the other host still has it in its
    // configuration.
    b.ctl(&["cluster", "move", "vm1", "--to", "host-a"]);
    assert!(a.serves("vm1") && !b.serves("vm1"));
    let mut client = a.connect("vm1");
    assert_eq!(client.read(9 * BLOCK, BLOCK as u32).unwrap(), filled(42));
    drop(client);
    // The remaining host takes the disk if no other host can have dirty data. A disk that was moved
    // away waits.
    a.ctl(&["cache", "disable", "vm1"]);
    a.stop();
    b.wait_until_serving("vm1");
    assert_eq!(b.connect("vm1").read(9 * BLOCK, BLOCK as u32).unwrap(), filled(42));
}

/// A disk with a client migrates: the other host has it in standby, and nothing more happens until
/// the VM moves. A third host may cancel the migration. A disk without a client moves at once with
/// `--cache`, together with its cache.
#[test]
fn a_disk_that_is_used_migrates_and_one_with_its_cache_is_warm() {
    let shared = Shared::new(&["vm1"]);
    let a = shared.start("host-a", 64, &["vm1"], BACK);
    a.wait_until_serving("vm1");
    // The host has the disk in its configuration, and waits for it.
    let b = shared.start("host-b", 64, &["vm1"], BACK);
    wait_for("host-b to wait", || b.reason("vm1").contains("host-a has it"));
    let mut client = a.connect("vm1");
    client.write(9 * BLOCK, &filled(41)).unwrap();
    for _ in 0..2 {
        read_mibs(&mut client, 0..SIZE / 2);
    }
    b.ctl(&["cluster", "move", "vm1", "--to", "host-b", "--no-wait"]);
    let note = || word(&b.json(&["cluster", "move", "vm1"]), "note");
    wait_for("it to wait for the VM", || note().contains("waits for the VM"));
    assert_eq!(b.disk("vm1")["state"], "awaited");
    assert_eq!(owner(&b, "vm1"), ("host-a".into(), "held".into()));
    let again = a.try_ctl(&["cluster", "move", "vm1", "--to", "host-b"]);
    assert!(!again.success() && again.all().contains("is already being moved to host-b"), "{}", again.all());
    b.ctl(&["cluster", "move", "vm1", "--cancel"]);
    wait_for("host-b to wait as before", || {
        b.disk("vm1")["state"] == "offline" && b.reason("vm1").contains("host-a has it")
    });
    client.write(9 * BLOCK, &filled(42)).unwrap();
    client.flush().unwrap();
    // The VM moves: its first write at the other host takes the disk over.
    wait_for("the migration to be over", || a.disk("vm1")["migration"].is_null());
    a.ctl(&["cluster", "move", "vm1", "--to", "host-b", "--no-wait"]);
    wait_for("it to wait for the VM", || note().contains("waits for the VM"));
    let mut there = b.connect("vm1");
    assert_eq!(there.read(9 * BLOCK, BLOCK as u32).unwrap(), filled(42));
    there.write(9 * BLOCK, &filled(43)).unwrap();
    wait_for("the order to be done", || word(&a.json(&["cluster", "move", "vm1"]), "state") == "done");
    assert_eq!(owner(&b, "vm1"), ("host-b".into(), "held".into()));
    read_mibs(&mut there, 0..SIZE / 4);
    assert!(b.daemon().stats("vm1").hits() >= 3, "what was copied is served");
    drop((client, there));
    wait_for("host-a to wait", || a.reason("vm1").contains("host-b has it"));
    // The disk has no client any more, and moves back with its cache.
    let moved = a.try_ctl(&["cluster", "move", "vm1", "--to", "host-a", "--cache", "copy"]);
    assert!(moved.success(), "{}", moved.all());
    let mut client = a.connect("vm1");
    assert_eq!(client.read(9 * BLOCK, BLOCK as u32).unwrap(), filled(43));
    let hits = a.daemon().stats("vm1").hits();
    read_mibs(&mut client, 0..SIZE / 4);
    assert!(a.daemon().stats("vm1").hits() >= hits + 3, "its cache has come along");
}

/// A migration drains the disk, which is then in write-through until the end. etcd records that
/// there is no dirty data, and records the opposite before the disk is in write-back again.
#[test]
fn a_disk_that_was_drained_to_migrate_is_marked_again_before_it_writes_back() {
    let mut shared = Shared::new(&["vm1"]);
    let a = shared.start_with_lease(60, "host-a", 64, &["vm1"], BACK);
    a.wait_until_serving("vm1");
    let b = shared.start("host-b", 64, &[], BACK);
    let mut client = a.connect("vm1");
    client.write(9 * BLOCK, &filled(41)).unwrap();
    assert!(is_marked(&b, "vm1"), "it is dirty");
    a.ctl(&["migrate", "vm1", "--to", b.address(), "--wait", "warm"]);
    assert_eq!(shared.block("vm1", 9), filled(41), "it was drained");
    wait_for("etcd to know", || !is_marked(&b, "vm1"));
    assert_eq!(owner(&b, "vm1"), ("host-a".into(), "held".into()));
    a.ctl(&["migrate", "vm1", "--cancel"]);
    wait_for("the cache to write back", || mode(&a, "vm1") == "write-back");
    assert!(is_marked(&b, "vm1"), "it wrote back before etcd knew");
    client.write(9 * BLOCK, &filled(42)).unwrap();
    client.flush().unwrap();
    assert_eq!(shared.block("vm1", 9), filled(41), "it writes back");
    // If etcd fails near the end of the migration, the disk stays in write-through.
    wait_for("the migration to be over", || a.disk("vm1")["migration"].is_null());
    a.ctl(&["migrate", "vm1", "--to", b.address(), "--wait", "warm"]);
    wait_for("etcd to know", || !is_marked(&b, "vm1"));
    shared.etcd.kill(0);
    a.ctl(&["migrate", "vm1", "--cancel", "--wait", "begun"]);
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(mode(&a, "vm1"), "write-through", "etcd does not know");
    client.write(9 * BLOCK, &filled(43)).unwrap();
    assert_eq!(shared.block("vm1", 9), filled(43), "it writes through");
    shared.etcd.restart(0);
    wait_for("the cache to write back", || mode(&a, "vm1") == "write-back");
    assert!(is_marked(&a, "vm1"), "it wrote back before etcd knew");
    wait_for("the migration to be over", || a.disk("vm1")["migration"].is_null());
    client.write(9 * BLOCK, &filled(44)).unwrap();
    client.flush().unwrap();
    assert_eq!(shared.block("vm1", 9), filled(43), "it writes back");
}

/// All dirty data is on the backing: a third host gets the disk, and no data is lost.
#[test]
fn a_host_lost_during_a_migration_loses_no_data() {
    let shared = Shared::new(&["vm1"]);
    let mut a = shared.start("host-a", 64, &["vm1"], BACK);
    a.wait_until_serving("vm1");
    let b = shared.start("host-b", 64, &[], BACK);
    let c = shared.start("host-c", 64, &["vm1"], BACK);
    let mut client = a.connect("vm1");
    client.write(9 * BLOCK, &filled(41)).unwrap();
    client.flush().unwrap();
    assert_eq!(shared.block("vm1", 9), filled(0), "it is in flash only");
    a.ctl(&["migrate", "vm1", "--to", b.address(), "--wait", "warm"]);
    client.write(10 * BLOCK, &filled(42)).unwrap();
    wait_for("etcd to know", || !is_marked(&b, "vm1"));
    a.kill();
    c.wait_until_serving("vm1");
    let mut client = c.connect("vm1");
    assert_eq!(client.read(9 * BLOCK, BLOCK as u32).unwrap(), filled(41));
    assert_eq!(client.read(10 * BLOCK, BLOCK as u32).unwrap(), filled(42));
    client.write(9 * BLOCK, &filled(43)).unwrap();
    // The host restarts and would continue its migration.
    a.start();
    wait_for("host-a to wait", || a.reason("vm1").contains("host-c has it"));
    assert_eq!(client.read(9 * BLOCK, BLOCK as u32).unwrap(), filled(43));
}

/// The host drained the disk and recorded the hand-over, but etcd has no record of either. So the
/// host reports both after its restart.
#[test]
fn a_killed_host_gives_a_migrated_disk_back_after_its_restart() {
    let mut shared = Shared::new(&["vm1"]);
    let mut a = shared.start_with_lease(40, "host-a", 64, &["vm1"], BACK);
    a.wait_until_serving("vm1");
    let b = shared.start_with_lease(40, "host-b", 64, &[], BACK);
    wait_for("host-b to be a member", || a.json(&["cluster", "hosts"]).as_array().unwrap().len() == 2);
    let mut client = a.connect("vm1");
    client.write(9 * BLOCK, &filled(41)).unwrap();
    client.flush().unwrap();
    shared.etcd.kill(0);
    a.ctl(&["migrate", "vm1", "--to", b.address(), "--wait", "warm"]);
    assert_eq!(shared.block("vm1", 9), filled(41), "it was drained");
    a.ctl(&["migrate", "vm1", "--finish", "--wait", "begun"]);
    let is_away = || word(&a.disk("vm1")["migration"], "state") == "handing-over";
    wait_for("it to be handed over", is_away);
    assert!(a.reason("vm1").contains("no host serves the disk until then"), "{}", a.reason("vm1"));
    a.kill();
    shared.etcd.restart(0);
    wait_for("etcd to answer", || b.try_ctl(&["cluster", "disks"]).success());
    assert!(is_marked(&b, "vm1") && !b.serves("vm1"), "etcd knows of nothing");
    a.start();
    wait_for("host-b to have it", || owner(&b, "vm1") == ("host-b".into(), "held".into()));
    assert_eq!(b.connect("vm1").read(9 * BLOCK, BLOCK as u32).unwrap(), filled(41));
    wait_for("the migration to be over", || a.state("vm1") == "away");
}

/// A host that was stopped past its lease and had no dirty data gets the disk back without a
/// decision of an operator, also after a restart.
#[test]
fn a_disk_moves_back_to_a_host_that_lost_its_lease_without_dirty_data() {
    let shared = Shared::new(&["vm"]);
    let (_store, [mut a, b]) = shared.start_on_store();
    let mut guest = a.connect("vm");
    guest.write(9 * BLOCK, &filled(41)).unwrap();
    guest.flush().unwrap();
    a.ctl(&["drain", "vm"]);
    assert_eq!(shared.block("vm", 9), filled(41));
    a.signal(Signal::STOP);
    wait_for("force", || b.try_ctl(&["cluster", "take", "vm", "--force", "--yes"]).success());
    a.signal(Signal::CONT);
    wait_for("host-a to know", || a.reason("vm").contains("host-b has it"));
    a.kill();
    a.start();
    wait_for("host-a to know again", || a.reason("vm").contains("host-b has it"));
    let mut client = b.connect("vm");
    client.write(10 * BLOCK, &filled(42)).unwrap();
    client.flush().unwrap();
    drop(client);
    b.ctl(&["cluster", "move", "vm", "--to", "host-a"]);
    assert!(a.serves("vm") && !b.serves("vm"));
    let mut client = a.connect("vm");
    for (block, number) in [(9, 41), (10, 42)] {
        assert_eq!(client.read(block * BLOCK, BLOCK as u32).unwrap(), filled(number));
    }
}

/// A host that was stopped past its lease keeps its dirty data when the disk is moved to it, because
/// only an operator may discard this data. The backing has no lock, so the next owner can open it.
#[test]
fn a_disk_does_not_move_to_a_host_with_dirty_data_of_a_lost_lease() {
    let shared = Shared::new(&["vm"]);
    let (_store, [mut a, b]) = shared.start_on_store();
    let mut guest = a.connect("vm");
    guest.write(9 * BLOCK, &filled(41)).unwrap();
    guest.flush().unwrap();
    a.signal(Signal::STOP);
    wait_for("force", || b.try_ctl(&["cluster", "take", "vm", "--force", "--yes"]).success());
    a.signal(Signal::CONT);
    wait_for("host-a to know", || a.reason("vm").contains("host-b has it"));
    let refused = || {
        let moved = b.try_ctl(&["cluster", "move", "vm", "--to", "host-a"]);
        assert!(!moved.success() && moved.all().contains("may have dirty data"), "{}", moved.all());
        assert!(b.serves("vm"));
    };
    refused();
    // The disk of a connected client migrates with its cache.
    let client = b.connect("vm");
    refused();
    let file = a.text("rescued");
    wait_for("the dirty data", || a.try_ctl(&["cache", "export-dirty", "vm", &file]).success());
    let rescued = std::fs::read(&file).unwrap();
    assert_eq!(rescued[(9 * BLOCK) as usize..(10 * BLOCK) as usize], filled(41));
    drop(client);
}

/// All disks move except the one in use. The plan is printed first, and the command can be
/// repeated.
#[test]
fn a_host_is_evacuated_and_disks_that_stay_are_listed() {
    let disks = ["vm1", "vm2", "vm3", "vm4"];
    let shared = Shared::new(&disks);
    let a = shared.start("host-a", 64, &disks, BACK);
    let b = shared.start("host-b", 64, &[], THROUGH);
    let c = shared.start("host-c", 64, &[], THROUGH);
    disks.iter().for_each(|disk| a.wait_until_serving(disk));
    let told = || a.json(&["cluster", "advise", "--leaving", "host-a"]);
    wait_for("all to have told of themselves", || {
        let advice = told();
        advice["hosts"].as_array().unwrap().len() == 3 && advice["moves"].as_array().unwrap().len() == 4
    });
    let mut guest = a.connect("vm2");
    guest.write(0, &filled(7)).unwrap();
    let uses =
        || told()["disks"].as_array().unwrap().iter().any(|disk| disk["name"] == "vm2" && disk["users"] == 1);
    wait_for("the guest to be known", uses);
    let plan = b.ctl(&["cluster", "evacuate", "host-a", "--dry-run"]);
    assert!(plan.contains("vm1") && plan.contains("host-"), "{plan}");
    assert!(plan.contains("vm2 stays: clients use it"), "{plan}");
    assert!(disks.iter().all(|disk| a.serves(disk)), "nothing has moved");
    let done = b.try_ctl(&["cluster", "evacuate", "host-a"]);
    assert!(!done.success() && done.all().contains("vm2 stays"), "{}", done.all());
    assert!(done.stdout.contains("vm1 is at host-") && !done.stdout.contains("vm2 is at"), "{}", done.all());
    let at = |disk: &str| [&a, &b, &c].iter().position(|side| side.serves(disk));
    assert_eq!(at("vm2"), Some(0));
    assert!(["vm1", "vm3", "vm4"].iter().all(|disk| at(disk).is_some_and(|at| at > 0)));
    // The command is repeated after the guest has disconnected: only this guest's disk is left.
    drop(guest);
    wait_for("the guest to be gone", || !uses());
    let done = a.json(&["cluster", "evacuate"]);
    assert_eq!(done["moved"].as_array().unwrap().len(), 1, "{done}");
    assert!(at("vm2").is_some_and(|at| at > 0));
    let owner = [&a, &b, &c][at("vm2").unwrap()];
    assert_eq!(owner.connect("vm2").read(0, BLOCK as u32).unwrap(), filled(7));
    assert!(a.ctl(&["cluster", "evacuate"]).contains("host-a has no disk"));
}

/// A disk that reads much on a host with little flash is advised to move to a host with free flash.
/// The predicted hit ratio is about the hit ratio after the move.
#[test]
fn advice_moves_a_starved_disk_to_flash_that_is_to_spare() {
    let shared = Shared::new(&["busy", "idle"]);
    let a = shared.start("host-a", 5, &[], THROUGH);
    let b = shared.start("host-b", 64, &["idle"], THROUGH);
    a.ctl(&["disk", "add", "busy", "--backing", &text(&shared.image("busy"))]);
    a.ctl(&["cache", "enable", "busy", "--pool", "fast", "--size", "2M", "--block-size", "4K"]);
    b.wait_until_serving("idle");
    let mut client = a.connect("busy");
    // A loop over 8 MiB: LRU has no hits with 2 MiB and only hits with 8 MiB.
    let advice = std::cell::RefCell::new(Value::Null);
    wait_until("a move to be advised", Duration::from_secs(180), || {
        (0..SIZE / 2).step_by(65536).for_each(|at| drop(client.read(at, 65536).unwrap()));
        advice.replace(b.json(&["cluster", "advise"]));
        // The first passes of the loop cannot hit. Each further pass reduces their weight.
        advice.borrow()["moves"][0]["hit_percent_then"].as_f64().is_some_and(|hits| hits > 50.0)
    });
    let advice = advice.into_inner();
    let one = &advice["moves"][0];
    assert_eq!(
        (&one["disk"], &one["from"], &one["to"]),
        (&"busy".into(), &"host-a".into(), &"host-b".into())
    );
    let expected = one["hit_percent_then"].as_f64().unwrap();
    assert!(one["hit_percent"].as_f64().unwrap() < 30.0, "{one}");
    let spare = |name: &str| {
        let hosts = advice["hosts"].as_array().unwrap();
        hosts.iter().find(|host| host["name"] == name).unwrap()["to_spare"].as_u64().unwrap()
    };
    assert!(spare("host-b") > spare("host-a") + 32 * MIB, "{advice}");
    let said = b.ctl(&["cluster", "advise"]);
    assert!(said.contains("hob cluster move busy --to host-b"), "{said}");
    println!("{said}");
    drop(client);
    b.ctl(&["cluster", "move", "busy", "--to", "host-b"]);
    b.ctl(&["cache", "resize", "busy", "12M"]);
    let mut client = b.connect("busy");
    let pass = |client: &mut Client| {
        (0..SIZE / 2).step_by(65536).for_each(|at| drop(client.read(at, 65536).unwrap()));
    };
    pass(&mut client);
    pass(&mut client);
    let before = b.daemon().stats("busy").hits();
    pass(&mut client);
    let hits = (b.daemon().stats("busy").hits() - before) as f64 / (SIZE as f64 / 2.0 / 65536.0) * 100.0;
    println!("expected {expected:.1} % hits after the move, and measured {hits:.1} %");
    assert!(hits > 90.0, "{hits}");
}
