//! Two hosts, a real etcd, and disks that go from one to the other because somebody said so; evacuation, and advice (docs/CLUSTER.md,
//! docs/decisions/0024). The backings are files that both hosts see.

use std::time::Duration;

use conformance::nbd_client::{Address, Client};
use conformance::process::Output;
use conformance::scratch::{free_port, wait_until};
use conformance::{Authority, Daemon, Etcd, MIB, Scratch};
use serde_json::Value;

const SIZE: u64 = 16 * MIB;
const BLOCK: u64 = 4096;
/// Looks happen once a second, on a busy machine.
const SOON: Duration = Duration::from_secs(40);

const THROUGH: &str = "mode = \"write-through\"";
const BACK: &str = "mode = \"write-back\"\ndirty_age_max = 0\ndirty_start = 60\ndirty_stop = 50";

/// What both hosts see.
struct Shared {
    scratch: Scratch,
    etcd: Etcd,
    authority: Authority,
}

impl Shared {
    #[track_caller]
    fn new(disks: &[&str]) -> Shared {
        let scratch = Scratch::new();
        for disk in disks {
            let file = std::fs::File::create(scratch.path(&format!("{disk}.img"))).unwrap();
            file.set_len(SIZE).unwrap();
        }
        Shared { scratch, etcd: Etcd::start(1), authority: Authority::new("hosts") }
    }

    fn block(&self, disk: &str, number: u64) -> Vec<u8> {
        let image = std::fs::read(self.scratch.path(&format!("{disk}.img"))).unwrap();
        image[(number * BLOCK) as usize..((number + 1) * BLOCK) as usize].to_vec()
    }
}

struct Side {
    scratch: Scratch,
    daemon: Option<Daemon>,
}

impl Side {
    /// A host with a pool of so many MiB, that is told of these disks, each with a cache of 8 MiB.
    #[track_caller]
    fn start(name: &str, shared: &Shared, pool_mib: u64, disks: &[&str], cache: &str) -> Side {
        let scratch = Scratch::new();
        let files = shared.authority.host(scratch.dir(), "host", "127.0.0.1");
        let port = free_port();
        let mut config = format!(
            "state_dir = {:?}\nlisten = [\"unix:{}\"]\n[control]\nlisten = [\"unix:{}\", \"tcp:127.0.0.1:{port}\"]\n\
             tls = {{ cert = {:?}, key = {:?}, client_ca = {:?} }}\n[[control.client]]\ncertificate = \"cn:host\"\nrole = \"admin\"\n\
             [cluster]\netcd = {}\nhost = \"{name}\"\naddress = \"127.0.0.1:{port}\"\nlease_seconds = 5\nsettle_seconds = 1\n\
             [[pool]]\nname = \"fast\"\ndevices = [{:?}]\nsize = \"{pool_mib}M\"\nsegment_size = \"1M\"\n",
            scratch.path("state"),
            scratch.text("nbd.sock"),
            scratch.text("ctl.sock"),
            files.cert,
            files.key,
            files.ca,
            shared.etcd.endpoints(),
            scratch.path("flash"),
        );
        for disk in disks {
            config.push_str(&format!(
                "[[disk]]\nname = \"{disk}\"\nbacking = {:?}\n[disk.cache]\npool = \"fast\"\nsize = \"8M\"\n{cache}\n",
                shared.scratch.path(&format!("{disk}.img")),
            ));
        }
        std::fs::write(scratch.path("hob.toml"), config).unwrap();
        let daemon = Daemon::start(&scratch.path("hob.toml"), &scratch.path("ctl.sock"));
        Side { scratch, daemon: Some(daemon) }
    }

    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("it runs")
    }

    #[track_caller]
    fn stop(&mut self) {
        self.daemon.take().expect("it runs").stop();
    }

    #[track_caller]
    fn ctl(&self, args: &[&str]) -> String {
        self.daemon().ctl(args)
    }

    fn try_ctl(&self, args: &[&str]) -> Output {
        self.daemon().try_ctl(args)
    }

    #[track_caller]
    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ctl(&[args, &["-o", "json"]].concat())).unwrap()
    }

    fn disk(&self, name: &str) -> Value {
        let list: Value = self.json(&["disk", "list"]);
        let found = list.as_array().unwrap().iter().find(|disk| disk["name"] == name);
        found.cloned().unwrap_or_default()
    }

    fn serves(&self, disk: &str) -> bool {
        self.disk(disk)["state"] == "online"
    }

    #[track_caller]
    fn wait_serving(&self, disk: &str) {
        wait_until(&format!("{disk} to be served here"), SOON, || self.serves(disk));
    }

    #[track_caller]
    fn connect(&self, disk: &str) -> Client {
        Client::connect(&Address::Unix(self.scratch.path("nbd.sock")), disk).expect("the disk is served")
    }

    /// Who has a disk, as etcd says.
    fn owner(&self, disk: &str) -> (String, String) {
        let disks = self.json(&["cluster", "disks"]);
        let found =
            disks.as_array().unwrap().iter().find(|one| one["name"] == disk).cloned().unwrap_or_default();
        let word = |name: &str| found[name].as_str().unwrap_or_default().to_owned();
        (word("host"), word("state"))
    }
}

fn filled(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(BLOCK as usize / 8)
}

fn word(shown: &Value, name: &str) -> String {
    shown[name].as_str().unwrap_or_default().to_owned()
}

/// Ordered at the host that does not have it, drained on the way, and back again; told and not told of it before.
#[test]
fn a_disk_that_nobody_uses_goes_where_it_is_sent_and_comes_back() {
    let shared = Shared::new(&["vm1"]);
    let a = Side::start("host-a", &shared, 64, &["vm1"], BACK);
    a.wait_serving("vm1");
    let b = Side::start("host-b", &shared, 64, &[], BACK);
    wait_until("host-b to be a member", SOON, || {
        a.json(&["cluster", "hosts"]).as_array().unwrap().len() == 2
    });
    let mut client = a.connect("vm1");
    client.write(9 * BLOCK, &filled(41)).unwrap();
    client.flush().unwrap();
    assert_eq!(shared.block("vm1", 9), filled(0), "it is in flash only");
    drop(client);
    let free = a.json(&["pool", "list"])[0]["free"].as_u64();
    // What cannot be is said at once.
    for (args, part) in [
        (&["cluster", "move", "vm1", "--to", "nobody"][..], "members are host-a, host-b"),
        (&["cluster", "move", "vm2", "--to", "host-b"], "no host of the cluster has or had"),
        (&["cluster", "move", "vm1", "--to", "host-a"], "host-a has vm1 already"),
        (&["cluster", "move", "vm1"], "not on its way"),
        (&["cluster", "move", "vm1", "--cancel"], "not on its way"),
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
    assert_eq!(b.owner("vm1"), ("host-b".into(), "held".into()));
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
    // Back, ordered at its owner; the other one still knows it.
    b.ctl(&["cluster", "move", "vm1", "--to", "host-a"]);
    assert!(a.serves("vm1") && !b.serves("vm1"));
    let mut client = a.connect("vm1");
    assert_eq!(client.read(9 * BLOCK, BLOCK as u32).unwrap(), filled(42));
    drop(client);
    // Whoever is left has it, if nothing can be dirty elsewhere: a disk that went away waits.
    a.ctl(&["cache", "disable", "vm1"]);
    let mut a = a;
    a.stop();
    b.wait_serving("vm1");
    assert_eq!(b.connect("vm1").read(9 * BLOCK, BLOCK as u32).unwrap(), filled(42));
}

/// With a client the disk migrates: the other host has it in standby, and nothing happens until the machine is there. A third
/// party may call it off. With `--cache` and no client it goes at once, with its cache.
#[test]
fn a_disk_that_is_used_migrates_and_one_with_its_cache_is_warm() {
    let shared = Shared::new(&["vm1"]);
    let a = Side::start("host-a", &shared, 64, &["vm1"], BACK);
    a.wait_serving("vm1");
    // It was told of the disk, and waits for it.
    let b = Side::start("host-b", &shared, 64, &["vm1"], BACK);
    wait_until("host-b to wait", SOON, || word(&b.disk("vm1"), "reason").contains("host-a has it"));
    let mut client = a.connect("vm1");
    client.write(9 * BLOCK, &filled(41)).unwrap();
    for _ in 0..2 {
        (0..SIZE / 2).step_by(MIB as usize).for_each(|at| drop(client.read(at, MIB as u32).unwrap()));
    }
    b.ctl(&["cluster", "move", "vm1", "--to", "host-b", "--no-wait"]);
    let note = || word(&b.json(&["cluster", "move", "vm1"]), "note");
    wait_until("it to wait for the machine", SOON, || note().contains("waits for the machine"));
    assert_eq!(b.disk("vm1")["state"], "awaited");
    assert_eq!(b.owner("vm1"), ("host-a".into(), "held".into()));
    let again = a.try_ctl(&["cluster", "move", "vm1", "--to", "host-b"]);
    assert!(!again.success() && again.all().contains("on its way to host-b already"), "{}", again.all());
    b.ctl(&["cluster", "move", "vm1", "--cancel"]);
    wait_until("host-b to wait as before", SOON, || {
        b.disk("vm1")["state"] == "offline" && word(&b.disk("vm1"), "reason").contains("host-a has it")
    });
    client.write(9 * BLOCK, &filled(42)).unwrap();
    client.flush().unwrap();
    // Now the machine goes along: its first write at the other host takes the disk over.
    wait_until("the migration to be over", SOON, || a.disk("vm1")["migration"].is_null());
    a.ctl(&["cluster", "move", "vm1", "--to", "host-b", "--no-wait"]);
    wait_until("it to wait for the machine", SOON, || note().contains("waits for the machine"));
    let mut there = b.connect("vm1");
    assert_eq!(there.read(9 * BLOCK, BLOCK as u32).unwrap(), filled(42));
    there.write(9 * BLOCK, &filled(43)).unwrap();
    wait_until("the order to be done", SOON, || {
        word(&a.json(&["cluster", "move", "vm1"]), "state") == "done"
    });
    assert_eq!(b.owner("vm1"), ("host-b".into(), "held".into()));
    (0..SIZE / 4).step_by(MIB as usize).for_each(|at| drop(there.read(at, MIB as u32).unwrap()));
    assert!(b.daemon().stats("vm1").hits() >= 3, "what was copied is served");
    drop((client, there));
    wait_until("host-a to wait", SOON, || word(&a.disk("vm1"), "reason").contains("host-b has it"));
    // Nobody uses it any more; its cache goes back with it.
    let moved = a.try_ctl(&["cluster", "move", "vm1", "--to", "host-a", "--cache", "copy"]);
    assert!(moved.success(), "{}", moved.all());
    let mut client = a.connect("vm1");
    assert_eq!(client.read(9 * BLOCK, BLOCK as u32).unwrap(), filled(43));
    let hits = a.daemon().stats("vm1").hits();
    (0..SIZE / 4).step_by(MIB as usize).for_each(|at| drop(client.read(at, MIB as u32).unwrap()));
    assert!(a.daemon().stats("vm1").hits() >= hits + 3, "its cache has come along");
}

/// Every disk goes but the one that is used; the plan is shown first, and giving the order again goes on.
#[test]
fn a_host_is_evacuated_and_what_stays_is_said() {
    let disks = ["vm1", "vm2", "vm3", "vm4"];
    let shared = Shared::new(&disks);
    let a = Side::start("host-a", &shared, 64, &disks, BACK);
    let b = Side::start("host-b", &shared, 64, &[], THROUGH);
    let c = Side::start("host-c", &shared, 64, &[], THROUGH);
    disks.iter().for_each(|disk| a.wait_serving(disk));
    let told = || a.json(&["cluster", "advise", "--leaving", "host-a"]);
    wait_until("all to have told of themselves", SOON, || {
        let advice = told();
        advice["hosts"].as_array().unwrap().len() == 3 && advice["moves"].as_array().unwrap().len() == 4
    });
    let mut guest = a.connect("vm2");
    guest.write(0, &filled(7)).unwrap();
    let uses =
        || told()["disks"].as_array().unwrap().iter().any(|disk| disk["name"] == "vm2" && disk["users"] == 1);
    wait_until("the guest to be known", SOON, uses);
    let plan = b.ctl(&["cluster", "evacuate", "host-a", "--dry-run"]);
    assert!(plan.contains("vm1") && plan.contains("host-"), "{plan}");
    assert!(plan.contains("vm2 stays: somebody uses it"), "{plan}");
    assert!(disks.iter().all(|disk| a.serves(disk)), "nothing has moved");
    let done = b.try_ctl(&["cluster", "evacuate", "host-a"]);
    assert!(!done.success() && done.all().contains("vm2 stays"), "{}", done.all());
    assert!(done.stdout.contains("vm1 is at host-") && !done.stdout.contains("vm2 is at"), "{}", done.all());
    let at = |disk: &str| [&a, &b, &c].iter().position(|side| side.serves(disk));
    assert_eq!(at("vm2"), Some(0));
    assert!(["vm1", "vm3", "vm4"].iter().all(|disk| at(disk).is_some_and(|at| at > 0)));
    // Again, when the guest has gone: only that one is left.
    drop(guest);
    wait_until("the guest to be gone", SOON, || !uses());
    let done = a.json(&["cluster", "evacuate"]);
    assert_eq!(done["moved"].as_array().unwrap().len(), 1, "{done}");
    assert!(at("vm2").is_some_and(|at| at > 0));
    let owner = [&a, &b, &c][at("vm2").unwrap()];
    assert_eq!(owner.connect("vm2").read(0, BLOCK as u32).unwrap(), filled(7));
    assert!(a.ctl(&["cluster", "evacuate"]).contains("host-a has no disk"));
}

/// A disk that reads much on a host with little flash is advised to go where flash is to spare, and what that brings is about what it brings.
#[test]
fn advice_moves_a_starved_disk_to_flash_that_is_to_spare() {
    let shared = Shared::new(&["busy", "idle"]);
    let a = Side::start("host-a", &shared, 5, &[], THROUGH);
    let b = Side::start("host-b", &shared, 64, &["idle"], THROUGH);
    a.ctl(&["disk", "add", "busy", "--backing", &shared.scratch.text("busy.img")]);
    a.ctl(&["cache", "enable", "busy", "--pool", "fast", "--size", "2M", "--block-size", "4K"]);
    b.wait_serving("idle");
    let mut client = a.connect("busy");
    // A loop over 8 MiB: LRU with 2 MiB hits nothing, with 8 all.
    let advice = std::cell::RefCell::new(Value::Null);
    wait_until("a move to be advised", Duration::from_secs(90), || {
        (0..SIZE / 2).step_by(65536).for_each(|at| drop(client.read(at, 65536).unwrap()));
        advice.replace(b.json(&["cluster", "advise"]));
        !advice.borrow()["moves"].as_array().unwrap().is_empty()
    });
    let advice = advice.into_inner();
    let one = &advice["moves"][0];
    assert_eq!(
        (&one["disk"], &one["from"], &one["to"]),
        (&"busy".into(), &"host-a".into(), &"host-b".into())
    );
    let expected = one["hit_percent_then"].as_f64().unwrap();
    assert!(expected > 50.0 && one["hit_percent"].as_f64().unwrap() < 30.0, "{one}");
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
