//! Domains of libvirt, and scripts that start daemons in namespaces of their own.

use std::path::Path;

use crate::Tool;

/// Returns a domain with this XML element as its disk.
#[must_use]
pub fn domain(disk: &str) -> String {
    format!(
        "<domain type='qemu'>
  <name>web</name>
  <memory unit='MiB'>64</memory>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='pc'>hvm</type></os>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    {disk}
  </devices>
</domain>
"
    )
}

/// Returns the XML element of the disk `vda` with the qcow2 image `image`.
#[must_use]
pub fn qcow2_disk(image: &str) -> String {
    format!(
        "<disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' cache='none' discard='unmap'/>
      <source file='{image}'/>
      <target dev='vda' bus='virtio'/>
    </disk>"
    )
}

/// Returns a call of a shell script in mount and PID namespaces of its own, and in the namespaces of
/// these further options of unshare. All its processes end with the script.
///
/// # Panics
/// Panics if one of these programs, which the script needs, is not installed.
#[must_use]
#[track_caller]
pub fn script_in_namespaces(script: &Path, namespaces: &[&str], programs: &[&str]) -> Tool {
    for program in programs {
        // Panics with the name of a program that is missing.
        drop(Tool::new(program));
    }
    Tool::new("unshare")
        .args(namespaces)
        .args(["--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh"])
        .arg(script)
}
