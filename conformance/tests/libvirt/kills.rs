//! kill -9 of hob's commands and of hob's daemon after every step of `hob attach` and `hob detach`, for a
//! domain of libvirt whose guest writes and checks its disk all the time. The cache is write-back.
//!
//! `HOB_ROUNDS` is the number of rounds, 1 if absent. In every second round, the opposite command undoes
//! an interrupted plan. In the other rounds, the same command continues it.

use std::path::Path;
use std::time::Duration;

use conformance::guest::{COMMAND_LINE, COMPLAINTS, SENTINEL, cores, end_load, loaded_vm};
use conformance::load::{check_image, image};
use conformance::process::Process;
use conformance::scratch::{text, wait_until};
use conformance::{Scratch, Tool};

/// Number of blocks of the disk.
const BLOCKS: u64 = 32 << 20 >> 12;
/// Number of blocks of the disk's hot set.
const HOT_BLOCKS: u64 = 8 << 20 >> 12;
/// Maximum time of a round on two busy cores.
const ROUND_MAX: Duration = Duration::from_secs(1800);
/// Maximum time for the guest to check its disk, and for the script to end.
const END_MAX: Duration = Duration::from_secs(480);

/// Returns the XML of a domain with the load's guest, which has the image `file`.
fn domain(scratch: &Scratch, file: &str) -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_guest-load"));
    let boot = loaded_vm(scratch, program, HOT_BLOCKS);
    format!(
        "<domain type='qemu'>
  <name>web</name>
  <memory unit='MiB'>192</memory>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='pc'>hvm</type>
    <kernel>{}</kernel>
    <initrd>{}</initrd>
    <cmdline>{COMMAND_LINE}</cmdline>
  </os>
  <features><acpi/><apic/></features>
  <cpu mode='maximum'/>
  <on_reboot>destroy</on_reboot>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' cache='none' discard='unmap'/>
      <source file=\"{file}\"/>
      <target dev='vda' bus='virtio'/>
    </disk>
    <serial type='unix'>
      <source mode='bind' path='{}'/>
      <log file='{}' append='off'/>
    </serial>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
  </devices>
</domain>
",
        text(&boot.kernel),
        text(&boot.initramfs),
        scratch.text("console.sock"),
        scratch.text("console"),
    )
}

#[track_caller]
fn wait_for_script(script: &mut Process, what: &str, limit: Duration, is_done: impl Fn() -> bool) {
    wait_until(what, limit, || {
        let is_done = is_done();
        assert!(is_done || script.poll().is_none(), "the script ended: {}", script.stdout());
        is_done
    });
}

#[test]
fn hob_that_is_killed_at_any_step_of_a_domain_loses_nothing() {
    let _cores = cores();
    let scratch = Scratch::new();
    let rounds: u32 =
        std::env::var("HOB_ROUNDS").map_or(1, |rounds| rounds.parse().expect("HOB_ROUNDS is a number"));
    image(&scratch.path("disk.raw"), BLOCKS);
    // Each of these characters has a meaning for libvirt, virsh or QEMU.
    let (raw, file) = (scratch.text("disk.raw"), scratch.text("it's a disk, 1.qcow2"));
    Tool::new("qemu-img").args(["convert", "-f", "raw", "-O", "qcow2", &raw, &file]).run();
    std::fs::write(scratch.path("hob.toml"), super::config(&scratch)).unwrap();
    std::fs::write(scratch.path("domain.xml"), domain(&scratch, &file)).unwrap();
    let mut script = super::script(&scratch, &[], "kills.sh", &[&rounds.to_string()]).start();
    let exists = |name: &str| scratch.path(name).exists();
    wait_for_script(&mut script, "the rounds", ROUND_MAX * rounds, || exists("rounds-done"));

    let _console = end_load(&scratch);
    let said = || std::fs::read_to_string(scratch.path("console")).unwrap_or_default();
    let last = [SENTINEL, "GUEST-FAILED"];
    wait_for_script(&mut script, "the guest's verdict", END_MAX, || {
        last.iter().any(|last| said().contains(last))
    });
    let said = said();
    assert!(said.contains(SENTINEL), "the guest has errors:\n{said}");
    for bad in COMPLAINTS {
        assert!(!said.contains(bad), "{bad}:\n{said}");
    }
    std::fs::write(scratch.path("load-ended"), "").unwrap();
    let output = script.finish(END_MAX);
    assert!(output.success(), "{}", output.all());
    Tool::new("qemu-img").args(["check", "-f", "qcow2", &file]).run();
    Tool::new("qemu-img").args(["convert", "-f", "qcow2", "-O", "raw", &file, &raw]).run();
    check_image(&scratch.path("disk.raw"), &said);
}
