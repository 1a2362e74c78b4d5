//! The VMs of this host, and their attached disks, for completion scripts. Errors are ignored: a
//! script then completes nothing.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use super::proxmox;
use super::record::Records;

/// Maximum number of names. A shell cannot show more.
const NAMES_MAX: usize = 1000;
/// Maximum time for libvirt's reply, because the user's shell waits.
const LIBVIRT_SECONDS_MAX: &str = "2";

pub(crate) fn running() -> Vec<String> {
    let libvirt = domains().into_iter().map(|name| format!("libvirt:{name}"));
    let proxmox = proxmox::running().into_iter().map(|vmid| format!("pve:{vmid}"));
    let qmp = sockets(Path::new("/proc")).into_iter().map(|path| format!("qmp:{path}"));
    plain(libvirt.chain(proxmox).chain(qmp))
}

/// Returns the targets that have attached disks.
pub(crate) fn attached(records: &Path) -> Vec<String> {
    let records = Records::list(records).unwrap_or_default();
    plain(records.into_iter().map(|record| record.target))
}

/// Returns the devices of the attached disks of a VM.
pub(crate) fn attached_disks(records: &Path, target: &str) -> Vec<String> {
    let records = Records::list(records).unwrap_or_default();
    plain(records.into_iter().filter(|record| record.target == target).map(|record| record.label))
}

/// Returns the names that a shell does not change. bash expands the names, and a user of the host may
/// choose the names of processes and sockets.
fn plain(names: impl Iterator<Item = String>) -> Vec<String> {
    let is_plain = |name: &String| name.chars().all(|c| c.is_ascii_alphanumeric() || "._-:/@+,=".contains(c));
    let names: BTreeSet<String> = names.filter(is_plain).take(NAMES_MAX).collect();
    names.into_iter().collect()
}

/// Returns the names of the running domains of libvirt.
fn domains() -> Vec<String> {
    let virsh = ["virsh", "-q", "list", "--name"];
    let output = Command::new("timeout").arg(LIBVIRT_SECONDS_MAX).args(virsh).output();
    let names = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    names.lines().map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// Returns the paths of the QMP sockets in the command lines of running QEMUs (`-qmp unix:PATH`).
fn sockets(proc: &Path) -> Vec<String> {
    let processes = std::fs::read_dir(proc).into_iter().flatten().flatten();
    let command_lines = processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
    command_lines.flat_map(|line| sockets_of(&String::from_utf8_lossy(&line))).collect()
}

fn sockets_of(command_line: &str) -> Vec<String> {
    let words: Vec<&str> = command_line.split('\0').collect();
    let program = words[0].rsplit('/').next().unwrap_or_default();
    if !program.starts_with("qemu") {
        return Vec::new();
    }
    let options = words.windows(2).filter(|pair| matches!(pair[0], "-qmp" | "--qmp" | "-qmp-pretty"));
    let paths = options.filter_map(|pair| pair[1].strip_prefix("unix:")?.split(',').next());
    // The directory of a relative path may have changed since QEMU's start.
    paths.filter(|path| path.starts_with('/')).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qmp_sockets_are_those_of_running_qemus() {
        let dir = tempfile::tempdir().unwrap();
        for (pid, line) in [
            ("1", "/usr/bin/qemu-system-x86_64\0-qmp\0unix:/run/web.qmp,server=on,wait=off\0-m\x001G\0"),
            ("2", "qemu-system-aarch64\0-qmp\0tcp:127.0.0.1:4444\0"),
            ("3", "qemu-system-x86_64\0-qmp\0unix:relative.qmp,server=on\0"),
            ("4", "bash\0-qmp\0unix:/run/other.qmp\0"),
        ] {
            std::fs::create_dir(dir.path().join(pid)).unwrap();
            std::fs::write(dir.path().join(pid).join("cmdline"), line).unwrap();
        }
        std::fs::write(dir.path().join("uptime"), "1").unwrap();
        assert_eq!(sockets(dir.path()), ["/run/web.qmp"]);
        assert!(sockets(&dir.path().join("missing")).is_empty());
    }

    #[test]
    fn names_that_a_shell_would_expand_are_left_out() {
        let names = ["qmp:/run/b.qmp", "libvirt:web", "qmp:/tmp/$(reboot)", "libvirt:a b", "libvirt:web"];
        assert_eq!(plain(names.map(str::to_owned).into_iter()), ["libvirt:web", "qmp:/run/b.qmp"]);
    }
}
