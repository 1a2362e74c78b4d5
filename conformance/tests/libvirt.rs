//! `hob attach` and `hob detach` through libvirt's system daemon, and hob's libvirt hook in a migration.
//! Domains are of the type `qemu`. Each daemon has namespaces of its own, and does not touch the libvirt
//! of the host. The tests need root.

#[path = "libvirt/kills.rs"]
mod kills;

use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use conformance::guest::cores;
use conformance::hob::binary;
use conformance::libvirt::{domain, qcow2_disk, script_in_namespaces};
use conformance::process::Output;
use conformance::{Authority, Scratch, Tool};

/// Maximum time of a test on busy processors.
const TEST_MAX: Duration = Duration::from_secs(900);
/// Maximum pause of the VM in milliseconds, if nothing else uses the processors.
const PAUSE_MS_MAX: u64 = 100;
/// Maximum of the shortest pause if other programs use the processors, milliseconds. The host may
/// stall in some of the pauses.
const BUSY_PAUSE_MS_MAX: u64 = 2000;

/// Returns a call of a script of tests/libvirt in namespaces of its own. All its processes end with the
/// script.
#[track_caller]
fn script(scratch: &Scratch, namespaces: &[&str], script: &str, args: &[&str]) -> Tool {
    symlink(binary(), scratch.path("hob")).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libvirt").join(script);
    let path = format!("{}:{}", scratch.text(""), std::env::var("PATH").unwrap_or_default());
    script_in_namespaces(&script, namespaces, &["libvirtd", "virsh"])
        .arg(scratch.text(""))
        .args(args)
        .env("PATH", path)
}

/// Runs a script of tests/libvirt, which must succeed.
#[track_caller]
fn run(scratch: &Scratch, namespaces: &[&str], name: &str, args: &[&str]) -> Output {
    let output = script(scratch, namespaces, name, args).limit(TEST_MAX).output();
    assert!(output.success(), "{}", output.all());
    output
}

/// Returns the configuration of hob. The control API has its default address, in a mount of the
/// script's own.
fn config(scratch: &Scratch) -> String {
    format!("state_dir = {:?}\nlisten = [\"unix:{}\"]\n", scratch.path("state"), scratch.text("nbd.sock"))
}

#[test]
fn a_domain_is_attached_and_detached_and_its_definition_is_restored() {
    let _cores = cores();
    let scratch = Scratch::new();
    // QEMU is not root in this test.
    scratch.write_config(config(&scratch) + "socket_group = \"kvm\"\nsocket_mode = \"0660\"\n");
    let disk = qcow2_disk(&scratch.text("image.qcow2"));
    std::fs::write(scratch.path("domain.xml"), domain(&disk)).unwrap();
    let output = run(&scratch, &[], "attach.sh", &[]);
    let pauses: Vec<u64> = output
        .stderr
        .split("was paused for ")
        .skip(1)
        .map(|rest| rest.split(' ').next().and_then(|text| text.parse().ok()).expect("a time"))
        .collect();
    eprintln!("pauses in ms: {pauses:?}");
    assert_eq!(pauses.len(), 8, "five attachments and three detachments: {}", output.all());
    let (longest, shortest) = (pauses.iter().max(), pauses.iter().min());
    let is_quiet = std::env::var_os("HOB_QUIET").is_some();
    let (pause, limit) = if is_quiet { (longest, PAUSE_MS_MAX) } else { (shortest, BUSY_PAUSE_MS_MAX) };
    assert!(pause.is_some_and(|pause| *pause <= limit), "{pauses:?}");
}

/// Two hosts, `virsh migrate --live`, and dirty data in the cache. The guest's first write on the
/// destination takes the disk over.
#[test]
fn the_hook_moves_the_cache_when_virsh_migrates_a_domain() {
    let scratch = Scratch::new();
    let disk = "<disk type='network' device='disk'>
      <driver name='qemu' type='raw' cache='none' discard='unmap'/>
      <source protocol='nbd' name='web'>
        <host transport='unix' socket='/run/hob/nbd.sock'/>
        <reconnect delay='300'/>
      </source>
      <target dev='vda' bus='virtio'/>
    </disk>";
    std::fs::write(scratch.path("domain.xml"), domain(disk)).unwrap();
    let authority = Authority::new("hosts");
    for (name, address) in [("a", "10.0.0.1"), ("b", "10.0.0.2")] {
        let files = authority.host(scratch.dir(), &format!("host-{name}"), address);
        let copy = |from, to: &str| std::fs::copy(from, scratch.path(to)).unwrap();
        copy(files.ca, "ca.pem");
        copy(files.cert, &format!("{name}.pem"));
        copy(files.key, &format!("{name}.key"));
    }
    let hook = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/libvirt/qemu");
    run(&scratch, &["--net"], "migrate.sh", &[hook]);
}
