//! Changes of a disk's entry in hob.toml take effect while the disk is served: its vhost-user socket,
//! its datastore, and whether it is read-only.

use conformance::data::{Noise, assert_same};
use conformance::nbd_client::Client;
use conformance::process::Output;
use conformance::scratch::wait_for;
use conformance::vhost_driver::{Driver, Kind};
use conformance::{Daemon, MIB, Scratch};
use serde_json::Value;

const SIZE: u64 = 16 * MIB;

/// NBD transmission flag of a read-only export.
const READ_ONLY: u16 = 1 << 1;

/// A daemon with a disk `vm` that has a write-back cache.
struct Stage {
    daemon: Daemon,
    scratch: Scratch,
    image: Vec<u8>,
}

impl Stage {
    fn start() -> Stage {
        let scratch = Scratch::new();
        let image = scratch.noise("vm.img", SIZE, 5);
        write_config(&scratch, "");
        let daemon = scratch.start_daemon();
        daemon.ctl(&["disk", "list"]);
        Stage { daemon, scratch, image }
    }

    /// Writes hob.toml, with these further settings of the disk.
    fn configure(&self, settings: &str) {
        write_config(&self.scratch, settings);
    }

    fn connect(&self) -> Client {
        self.scratch.connect("vm")
    }

    /// Returns true if the backing lacks data of the disk.
    fn is_dirty(&self) -> bool {
        self.scratch.read("vm.img") != self.image
    }

    fn apply(&self) -> Output {
        self.daemon.try_ctl(&["config", "apply"])
    }

    #[track_caller]
    fn applied(&self) {
        let applied = self.apply();
        assert!(applied.success(), "{}", applied.all());
        let diff = self.daemon.try_ctl(&["config", "diff"]);
        assert!(diff.success(), "a difference remains: {}", diff.all());
    }

    #[track_caller]
    fn refused(&self, reason: &str) -> String {
        let refused = self.apply();
        let said = refused.all();
        assert!(!refused.success() && said.contains("not applied:") && said.contains(reason), "{said}");
        said
    }

    fn datastore(&self) -> Value {
        self.daemon.json(&["qos", "show", "vm"])["datastore"].clone()
    }
}

fn write_config(scratch: &Scratch, settings: &str) {
    let config = format!(
        "[[pool]]\nname = \"p\"\ndevices = [\"{}\"]\nsize = \"64M\"\nsegment_size = \"1M\"\n\
         [[disk]]\nname = \"vm\"\nbacking = \"{}\"\n{settings}\n\
         cache = {{ pool = \"p\", size = \"8M\", mode = \"write-back\", dirty_age_max = 0, dirty_start = 90, \
         dirty_full = 95 }}\n",
        scratch.text("pool"),
        scratch.text("vm.img"),
    );
    scratch.configure(&config);
}

#[test]
fn a_served_disk_follows_its_entry() {
    let mut stage = Stage::start();
    let (one, other) = (stage.scratch.path("one.sock"), stage.scratch.path("other.sock"));
    let data = Noise::new(6).bytes(MIB as usize);
    let mut client = stage.connect();
    client.write(MIB, &data).unwrap();
    client.flush().unwrap();
    stage.image[MIB as usize..2 * MIB as usize].copy_from_slice(&data);
    assert!(stage.is_dirty());

    // The client stays connected, so only the socket is created now, and the datastore stays.
    let socket = format!("vhost_user = \"{}\"", one.display());
    stage.configure(&format!("{socket}\ndatastore = \"array\""));
    let diff = stage.daemon.try_ctl(&["config", "diff"]);
    assert!(!diff.success(), "{}", diff.all());
    for key in ["disk vm: vhost_user", "disk vm: datastore"] {
        assert!(diff.stdout.contains(key), "{key}: {}", diff.all());
    }
    let said = stage.refused("1 client connected");
    assert!(said.contains("stop the guest") && said.contains("applied:     disk vm: vhost_user"), "{said}");
    assert_same(&client.read(MIB, MIB as u32).unwrap(), &data, MIB, "the data of a client that stays");
    drop(client);
    wait_for("the end of the client", || stage.apply().success());
    stage.applied();
    assert_eq!(stage.datastore(), "array");
    assert!(stage.is_dirty(), "the cache keeps its dirty data");
    let mut guest = Driver::connect(&one).unwrap();
    assert_eq!(guest.run(Kind::Read, MIB, 4096), Some(0));
    assert_same(&guest.data(0, 4096), &data[..4096], MIB, "the dirty data after the change");

    // A socket with a guest stays.
    let socket = format!("vhost_user = \"{}\"\ndatastore = \"array\"", other.display());
    stage.configure(&socket);
    stage.refused("a guest is connected to the vhost-user socket");
    assert_eq!(guest.run(Kind::Read, MIB, 4096), Some(0), "the guest is still served");
    assert!(!other.exists());
    drop(guest);
    wait_for("the end of the guest", || stage.apply().success());
    stage.applied();
    assert!(!one.exists() && other.exists());

    // The disk becomes read-only, and its dirty data is in the backing then.
    stage.configure(&format!("{socket}\nread_only = true"));
    stage.applied();
    assert_same(&stage.scratch.read("vm.img"), &stage.image, 0, "the drained image");
    let mut client = stage.connect();
    assert_eq!(client.flags() & READ_ONLY, READ_ONLY);
    assert!(client.write(0, &data[..4096]).is_err());
    assert_same(&client.read(0, SIZE as u32).unwrap(), &stage.image, 0, "the read-only disk");
    let mut guest = Driver::connect(&other).unwrap();
    let status = guest.run(Kind::Write, 0, 4096);
    assert!(status.is_some_and(|status| status != 0), "a write of a guest: {status:?}");
    drop((client, guest));

    // All settings of the disk are removed again.
    stage.configure("");
    wait_for("the end of the clients", || stage.apply().success());
    stage.applied();
    assert!(!other.exists());
    assert_ne!(stage.datastore(), "array");
    let mut client = stage.connect();
    client.write(0, &data[..4096]).unwrap();
    client.flush().unwrap();
    stage.image[..4096].copy_from_slice(&data[..4096]);
    assert_same(&client.read(0, SIZE as u32).unwrap(), &stage.image, 0, "the disk that can be written again");
    drop(client);
    stage.daemon.stop();
    let daemon = stage.scratch.start_daemon();
    let diff = daemon.try_ctl(&["config", "diff"]);
    assert!(diff.success(), "after a restart: {}", diff.all());
    daemon.stop();
}

/// A reload closes no disk that a client uses. Health reports the change until it is made.
#[test]
fn a_reload_reports_what_it_cannot_apply() {
    let mut stage = Stage::start();
    let mut client = stage.connect();
    client.read(0, 4096).unwrap();
    stage.configure("datastore = \"array\"");
    stage.daemon.upgrade();
    let health = || stage.daemon.try_ctl(&["health"]).all();
    wait_for("the report", || {
        let health = health();
        health.contains("config-pending") && health.contains("not applied: vm has 1 client connected")
    });
    assert_same(
        &client.read(MIB, 4096).unwrap(),
        &stage.image[MIB as usize..][..4096],
        MIB,
        "a client that stays",
    );
    assert_ne!(stage.datastore(), "array");
    drop(client);
    wait_for("the end of the client", || stage.apply().success());
    assert_eq!(stage.datastore(), "array");
    assert!(!health().contains("config-pending"), "{}", health());
    stage.daemon.stop();
}
