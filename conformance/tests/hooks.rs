//! The hook scripts of hypervisors: their calls of hob, and their reaction to errors of hob. The
//! tests call the scripts like libvirt and Proxmox VE, which are not installed. `hob` is a script
//! that records its arguments and returns configured states of disks.

use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use conformance::{Scratch, Tool};

/// A script that replaces hob. Tests do not write the program themselves: a process that another
/// thread starts at that moment may hold the file open for writing, and then the program cannot
/// run.
const FAKE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hooks/fake-hob.sh");

const CONFIG: &str = "PEERS='host-a:9443 host-b:9443 host-c:9443'\nSELF=host-b:9443\nBANDWIDTH=200M\n";

/// XML as libvirt writes it.
const XML: &str = "<domain type='kvm' id='3'>
  <name>web</name>
  <devices>
    <disk type='network' device='disk'>
      <driver name='qemu' type='raw' cache='none' discard='unmap'/>
      <source protocol='nbd' name='vm1' index='1'>
        <host transport='unix' socket='/run/hob/nbd.sock'/>
      </source>
      <backingStore type='network'>
        <format type='raw'/>
        <source protocol='nbd' name='base'>
          <host transport='unix' socket='/run/hob/nbd.sock'/>
        </source>
        <backingStore/>
      </backingStore>
      <target dev='vda' bus='virtio'/>
    </disk>
    <disk type='vhostuser' device='disk' snapshot='no'>
      <driver name='qemu' type='raw' queues='4'/>
      <source type='unix' path='/run/hob/data.sock'>
        <reconnect enabled='yes' timeout='1'/>
      </source>
      <target dev='vdb' bus='virtio'/>
    </disk>
    <disk type='network' device='disk'>
      <source protocol='nbd' name='theirs'>
        <host name='10.0.0.9' port='10809'/>
      </source>
    </disk>
    <disk type='vhostuser' device='disk'>
      <source type='unix' path='/run/spdk/other.sock'/>
    </disk>
    <disk type='file' device='disk'><source file='/srv/plain.img'/></disk>
  </devices>
</domain>
";

struct Stage {
    scratch: Scratch,
}

impl Stage {
    /// Creates a stage with these states of disks.
    fn new(states: &str) -> Stage {
        let scratch = Scratch::new();
        std::fs::create_dir(scratch.path("bin")).unwrap();
        symlink(FAKE, scratch.path("bin/hob")).unwrap();
        let stage = Stage { scratch };
        stage.set("states", states);
        stage.set("fails", "");
        stage.set("said", "");
        stage.set("disks", "");
        stage.set("hook.conf", &format!("{CONFIG}MARKS={}\n", stage.scratch.text("marks")));
        stage
    }

    fn set(&self, name: &str, text: &str) {
        std::fs::write(self.scratch.path(name), text).unwrap();
    }

    fn call(&self, script: &str, args: &[&str], env: &[(&str, &str)], input: &str) -> Output {
        let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", self.scratch.text("bin"));
        let mut child = Command::new(packaging(script))
            .args(args)
            .env_clear()
            .env("PATH", path)
            .env("BASE", self.scratch.dir())
            .env("HOB_HOOK_CONFIG", self.scratch.path("hook.conf"))
            .envs(env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the script runs");
        // A script may exit with success without reading its input.
        let _ = child.stdin.take().expect("a pipe").write_all(input.as_bytes());
        child.wait_with_output().expect("the script ends")
    }

    /// Runs the hook like libvirt. Returns whether the hook succeeded, and the commands that hob
    /// received.
    #[track_caller]
    fn libvirt(&self, operation: &[&str]) -> (bool, String) {
        self.set("said", "");
        let output = self.call("libvirt/qemu", &[&["web"], operation].concat(), &[], XML);
        assert!(output.stdout.is_empty(), "libvirt would take this for XML: {output:?}");
        (output.status.success(), self.said())
    }

    /// Runs the hook like Proxmox VE.
    fn proxmox(&self, phase: &str, env: &[(&str, &str)]) -> (bool, String) {
        self.set("said", "");
        let dir = self.scratch.text("pve");
        let output = self.call(
            "proxmox/hob-hook.sh",
            &["100", phase],
            &[&[("PVE_DIR", dir.as_str())], env].concat(),
            "",
        );
        (output.status.success(), self.said())
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.scratch.path("said")).unwrap()
    }
}

fn packaging(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging").join(path)
}

#[test]
fn libvirt_hook_requests_the_caches_of_an_incoming_guest() {
    let stage = Stage::new(
        "https://host-c:9443 vm1 online\nhttps://host-a:9443 vm1 away\nhttps://host-c:9443 data online\nhere vm1 away\n",
    );
    let asked = "https://host-c:9443: migrate vm1 --to host-b:9443 --cache copy --wait awaited --bandwidth 200M\n\
                 https://host-c:9443: migrate data --to host-b:9443 --cache copy --wait awaited --vhost-user /run/hob/data.sock --bandwidth 200M\n";
    assert_eq!(stage.libvirt(&["migrate", "begin", "-"]), (true, asked.into()));
    // The VM comes from another host, so this is no cold restart; the next start is one.
    stage.set("states", "here vm1 awaited\nhere data online\n");
    assert_eq!(stage.libvirt(&["prepare", "begin", "-"]), (true, String::new()));
    assert_eq!(
        stage.libvirt(&["prepare", "begin", "-"]),
        (true, "here: disk event data cold-restart\n".into())
    );
}

/// If the cache of one disk cannot migrate, the preparation for the other disk is cancelled, and
/// the VM stays on its host.
#[test]
fn libvirt_hook_refuses_a_guest_whose_caches_do_not_arrive() {
    let owned = "https://host-a:9443 vm1 online\nhttps://host-a:9443 data online\n";
    let stage = Stage::new(owned);
    let refused = "https://host-a:9443: migrate data --to host-b:9443 --cache copy --wait awaited --vhost-user /run/hob/data.sock --bandwidth 200M";
    stage.set("fails", refused);
    let (goes_on, said) = stage.libvirt(&["migrate", "begin", "-"]);
    assert!(
        !goes_on && said.ends_with(&format!("{refused}\nhttps://host-a:9443: migrate vm1 --cancel\n")),
        "{said}"
    );
    // No host has the disk; this host owns the disk already; no source is known.
    for (states, config) in [("", CONFIG), ("here vm1 online\n", CONFIG), (owned, "")] {
        let stage = Stage::new(states);
        stage.set("hook.conf", config);
        let (goes_on, said) = stage.libvirt(&["migrate", "begin", "-"]);
        assert!(!goes_on && said.is_empty(), "{states}: {said}");
    }
    // An administrator has started the migration by hand: the hook does nothing, and no source must
    // be known.
    let stage = Stage::new("here vm1 awaited\nhere data awaited\n");
    stage.set("hook.conf", &format!("MARKS={}\n", stage.scratch.text("marks")));
    assert_eq!(stage.libvirt(&["migrate", "begin", "-"]), (true, String::new()));
}

/// After `hob attach`, the XML of the running VM still has the image. On the destination, QEMU would not
/// see dirty data in the cache of the source.
#[test]
fn libvirt_hook_refuses_a_guest_whose_image_is_attached_on_its_host() {
    let stage = Stage::new("https://host-a:9443 vm1 online\nhttps://host-a:9443 data online\n");
    for (disk, is_refused) in [
        ("https://host-a:9443 web-vdc /srv/plain.img\n", true),
        ("https://host-c:9443 web-virtio-disk2 /srv/plain.img\n", true),
        ("https://host-a:9443 db-vdc /srv/plain.img\n", false),
        ("https://host-a:9443 web-vdc /srv/plain.img2\n", false),
        ("https://host-b:9443 web-vdc /srv/plain.img\n", false),
    ] {
        stage.set("disks", disk);
        let (goes_on, said) = stage.libvirt(&["migrate", "begin", "-"]);
        assert_eq!((goes_on, said.is_empty()), (!is_refused, is_refused), "{disk}: {said}");
    }
}

#[test]
fn libvirt_hook_reports_guest_events() {
    let stage = Stage::new("here vm1 online\nhere data online\n");
    let told = |event: &str| (true, format!("here: disk event vm1 {event}\nhere: disk event data {event}\n"));
    let nothing = (true, String::new());
    assert_eq!(stage.libvirt(&["prepare", "begin", "-"]), told("cold-restart"));
    for quiet in ["start", "started", "reconnect", "attach"] {
        assert_eq!(stage.libvirt(&[quiet, "begin", "-"]), nothing);
    }
    assert_eq!(stage.libvirt(&["stopped", "end", "-"]), nothing);
    for (reason, event) in
        [("saved", Some("suspend")), ("-", Some("suspend")), ("shutdown", None), ("migrated", None)]
    {
        let expected = event.map_or(nothing.clone(), told);
        assert_eq!(stage.libvirt(&["release", "end", reason]), expected, "{reason}");
    }
    assert_eq!(stage.libvirt(&["restore", "begin", "-"]), told("resume"));
    assert_eq!(stage.libvirt(&["prepare", "begin", "-"]), nothing);
    // A VM starts although hob does not answer. The hook prints a message and succeeds.
    stage.set("fails", "here: disk event vm1 cold-restart\n");
    assert_eq!(stage.libvirt(&["prepare", "begin", "-"]), told("cold-restart"));
}

/// After a migration, libvirt before 10.5 gives no reason for the end of the VM on the source. hob would
/// refuse the event of a disk that migrates.
#[test]
fn libvirt_hook_reports_no_event_of_a_disk_that_leaves() {
    let stage = Stage::new("here vm1 online leaving\nhere data online\n");
    let expected = (true, "here: disk event data suspend\n".to_owned());
    assert_eq!(stage.libvirt(&["release", "end", "-"]), expected);
}

/// If the VM did not arrive, no disk still waits for it. Disks that this host owns stay.
#[test]
fn libvirt_hook_releases_caches_of_a_guest_that_did_not_arrive() {
    let stage = Stage::new("here vm1 awaited\nhere data away\n");
    assert_eq!(stage.libvirt(&["release", "end", "failed"]), (true, "here: disk remove vm1\n".into()));
    let stage = Stage::new("here vm1 online\nhere data away\n");
    assert_eq!(stage.libvirt(&["release", "end", "migrated"]), (true, String::new()));
}

const ARGS: &str = "args: -drive file=nbd+unix:///vm1?socket=/run/hob/nbd.sock,if=none,id=hob0,format=raw -device virtio-blk-pci,drive=hob0 \
    -chardev socket,id=hob1,path=/run/hob/data.sock,reconnect=1 -device vhost-user-blk-pci,chardev=hob1\n";

#[test]
fn proxmox_hook_requests_the_caches_of_an_incoming_guest() {
    let stage = Stage::new("");
    stage.set(
        "hook.conf",
        "PEERS='pve1=10.0.0.1:9443 pve2=10.0.0.2:9443'\nSELF=pve2=10.0.0.2:9443\nCACHE=remote\n",
    );
    std::fs::create_dir_all(stage.scratch.path("pve/nodes/pve1/qemu-server")).unwrap();
    std::fs::create_dir_all(stage.scratch.path("pve/qemu-server")).unwrap();
    stage.set(
        "pve/nodes/pve1/qemu-server/100.conf",
        &format!("cores: 4\n{ARGS}\n[before]\nargs: nbd+unix:///old?socket=/run/hob/x\n"),
    );
    let asked = "https://10.0.0.1:9443: migrate vm1 --to 10.0.0.2:9443 --cache remote --wait awaited\n\
                 https://10.0.0.1:9443: migrate data --to 10.0.0.2:9443 --cache remote --wait awaited --vhost-user /run/hob/data.sock\n";
    let from = [("PVE_MIGRATED_FROM", "pve1")];
    assert_eq!(stage.proxmox("pre-start", &from), (true, asked.into()));
    // An unknown node, and a node without an address.
    assert_eq!(stage.proxmox("pre-start", &[("PVE_MIGRATED_FROM", "pve9")]), (false, String::new()));
    std::fs::create_dir_all(stage.scratch.path("pve/nodes/pve9/qemu-server")).unwrap();
    stage.set("pve/nodes/pve9/qemu-server/100.conf", ARGS);
    assert_eq!(stage.proxmox("pre-start", &[("PVE_MIGRATED_FROM", "pve9")]), (false, String::new()));
    stage.set("fails", "https://10.0.0.1:9443: migrate data --to 10.0.0.2:9443 --cache remote --wait awaited --vhost-user /run/hob/data.sock");
    let (goes_on, said) = stage.proxmox("pre-start", &from);
    assert!(!goes_on && said.ends_with("https://10.0.0.1:9443: migrate vm1 --cancel\n"), "{said}");
    // The VM did not arrive.
    stage.set("pve/qemu-server/100.conf", ARGS);
    stage.set("states", "here vm1 awaited\nhere data online\n");
    assert_eq!(stage.proxmox("post-stop", &[]), (true, "here: disk remove vm1\n".into()));
}

#[test]
fn proxmox_hook_reports_guest_events() {
    let stage = Stage::new("here vm1 online\nhere data online\n");
    std::fs::create_dir_all(stage.scratch.path("pve/qemu-server")).unwrap();
    let told = |event: &str| (true, format!("here: disk event vm1 {event}\nhere: disk event data {event}\n"));
    stage.set("pve/qemu-server/100.conf", ARGS);
    assert_eq!(stage.proxmox("pre-start", &[]), told("cold-restart"));
    for quiet in ["post-start", "pre-stop", "post-stop"] {
        assert_eq!(stage.proxmox(quiet, &[]), (true, String::new()), "{quiet}");
    }
    stage.set("pve/qemu-server/100.conf", &format!("{ARGS}lock: suspended\nvmstate: local:100/state\n"));
    assert_eq!(stage.proxmox("post-stop", &[]), told("suspend"));
    assert_eq!(stage.proxmox("pre-start", &[]), told("resume"));
}

#[test]
fn hook_scripts_pass_shellcheck() {
    for script in ["libvirt/qemu", "libvirt/hook.conf", "proxmox/hob-hook.sh"] {
        Tool::new("shellcheck").arg(packaging(script)).run();
    }
}

/// The storage plugin for Proxmox VE, with stubs of Proxmox VE's modules and of `hob`.
#[test]
fn the_storage_plugin_for_proxmox_ve_passes_its_own_tests() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/proxmox/test");
    let (stubs, test) = (directory.to_str().expect("a path"), directory.join("plugin.t"));
    let said = Tool::new("perl").args(["-T", "-I", stubs]).arg(&test).run();
    assert!(said.contains("\n1..") && !said.contains("not ok"), "{said}");
}
