//! Installs the Debian packages that tests and benchmarks need.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::shell;

/// A package, and the programs or path prefixes that show that it is installed.
struct Package {
    name: &'static str,
    shown_by: &'static [&'static str],
}

const PACKAGES: &[Package] = &[
    Package { name: "qemu-utils", shown_by: &["qemu-nbd", "qemu-img", "qemu-io"] },
    Package { name: "nbdkit", shown_by: &["nbdkit"] },
    Package { name: "libnbd-bin", shown_by: &["nbdinfo", "nbdcopy", "nbdfuse"] },
    Package { name: "fio", shown_by: &["fio"] },
    // hob's optional feature psk needs OpenSSL.
    Package { name: "libssl-dev", shown_by: &["/usr/include/openssl/ssl.h"] },
    // Tests of RBD images need a Ceph cluster and librbd, which the last package has.
    Package { name: "ceph-mon", shown_by: &["ceph-mon", "monmaptool", "osdmaptool"] },
    Package { name: "ceph-osd", shown_by: &["ceph-osd"] },
    Package { name: "ceph-common", shown_by: &["ceph", "rbd", "ceph-authtool"] },
    Package { name: "pkg-config", shown_by: &["pkg-config"] },
    Package { name: "curl", shown_by: &["curl"] },
    Package { name: "qemu-system-x86", shown_by: &["qemu-system-x86_64"] },
    // Only the kernel and its modules are used, in test guests.
    Package { name: "linux-image-cloud-amd64", shown_by: &["/boot/vmlinuz-*cloud*"] },
    Package { name: "busybox-static", shown_by: &["busybox"] },
    Package { name: "e2fsprogs", shown_by: &["mkfs.ext4", "mke2fs", "e2fsck"] },
    Package { name: "cpio", shown_by: &["cpio"] },
    // Only promtool is used.
    Package { name: "prometheus", shown_by: &["promtool"] },
    // The dashboard needs node to build, a browser for tests, and OpenSSL for certificates.
    Package { name: "nodejs", shown_by: &["node"] },
    Package { name: "npm", shown_by: &["npm"] },
    Package { name: "chromium", shown_by: &["chromium"] },
    Package { name: "openssl", shown_by: &["openssl"] },
    Package { name: "kmod", shown_by: &["modprobe"] },
    Package { name: "util-linux", shown_by: &["setpriv", "mkswap", "unshare", "nsenter", "prlimit"] },
    Package { name: "bsdutils", shown_by: &["script"] },
    Package { name: "mount", shown_by: &["mount", "umount", "losetup", "swapoff"] },
    // The benchmark `peers` builds dm-cache in a guest.
    Package { name: "dmsetup", shown_by: &["dmsetup"] },
    // Tests use perl as a process whose memory is paged out.
    Package { name: "perl-base", shown_by: &["perl"] },
    Package { name: "xfsprogs", shown_by: &["mkfs.xfs", "xfs_repair"] },
    // Tests use network namespaces and check hook scripts of hypervisors.
    Package { name: "iproute2", shown_by: &["ip"] },
    Package { name: "shellcheck", shown_by: &["shellcheck"] },
    Package { name: "qemu-system-common", shown_by: &["qemu-storage-daemon"] },
    // A test builds the container image without privileges, on a base of Debian packages.
    Package { name: "buildah", shown_by: &["buildah"] },
    Package { name: "mmdebstrap", shown_by: &["mmdebstrap"] },
    Package { name: "uidmap", shown_by: &["newuidmap"] },
    // Tests of clusters need etcd.
    Package { name: "etcd-server", shown_by: &["etcd"] },
    Package { name: "etcd-client", shown_by: &["etcdctl"] },
    // PostgreSQL's programs are in a directory per version.
    Package { name: "postgresql", shown_by: &["psql", "/usr/lib/postgresql/*"] },
    Package { name: "rocksdb-tools", shown_by: &["db_bench"] },
    // A test starts a libvirt daemon in namespaces of its own. The package also has the user of QEMU.
    Package { name: "libvirt-daemon-system", shown_by: &["libvirtd", "/etc/libvirt/qemu.conf"] },
    Package { name: "libvirt-clients", shown_by: &["virsh", "virt-xml-validate"] },
    // virt-xml-validate runs this program.
    Package { name: "libxml2-utils", shown_by: &["xmllint"] },
    // Compilers of the rules that let QEMU connect to hob.
    Package { name: "apparmor", shown_by: &["apparmor_parser"] },
    Package { name: "checkpolicy", shown_by: &["checkmodule"] },
    Package { name: "semodule-utils", shown_by: &["semodule_package"] },
    Package { name: "git", shown_by: &["git"] },
    // The test of OpenStack's os-brick uses this package to install os-brick with pip.
    Package { name: "python3-pip", shown_by: &["python3", "pip3"] },
];

/// Packages that builds need.
const FOR_BUILDS: [&str; 2] = ["libssl-dev", "pkg-config"];

/// Installs missing packages. If that is impossible, lists them and continues, because tests that
/// need them fail.
pub fn install() -> Result<()> {
    let missing = missing(PACKAGES.iter());
    if missing.is_empty() {
        println!("all programs that the tests need are installed");
        return Ok(());
    }
    install_these(&missing)
}

/// Like [`install`], but for the packages that builds need.
pub fn install_for_builds() -> Result<()> {
    let missing = missing(PACKAGES.iter().filter(|package| FOR_BUILDS.contains(&package.name)));
    if missing.is_empty() { Ok(()) } else { install_these(&missing) }
}

fn missing(packages: impl Iterator<Item = &'static Package>) -> Vec<&'static str> {
    packages.filter(|p| !p.shown_by.iter().all(|s| present(s))).map(|p| p.name).collect()
}

fn install_these(missing: &[&str]) -> Result<()> {
    println!("missing packages: {}", missing.join(" "));
    let prefix: &[&str] = if rustix::process::geteuid().is_root() {
        &[]
    } else if Command::new("sudo").args(["-n", "true"]).output().is_ok_and(|o| o.status.success()) {
        &["sudo", "-n"]
    } else {
        println!("this user is not root and cannot use sudo without a password; install the packages with");
        println!("    apt-get install --no-install-recommends {}", missing.join(" "));
        println!("until then, tests that need these packages fail");
        return Ok(());
    };
    if !present("apt-get") {
        bail!("this host has no apt-get; install the programs of {} in another way", missing.join(", "));
    }
    println!("installing the packages with apt-get");
    let apt = |args: &[&str]| {
        // `env` passes the variable through sudo.
        let words =
            [prefix, &["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-y"], args].concat();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        shell::run(&mut command)
    };
    apt(&["update"])?;
    apt(&[&["install", "--no-install-recommends"], missing].concat())
}

/// Returns true if the path has a program with this name, or if a file matches a path with `*` in
/// its last component.
pub fn present(what: &str) -> bool {
    let Some((dir, pattern)) = what.rsplit_once('/') else {
        let path = std::env::var("PATH").unwrap_or_default();
        return path
            .split(':')
            .chain(["/usr/sbin", "/sbin"])
            .any(|dir| !dir.is_empty() && Path::new(dir).join(what).is_file());
    };
    let parts: Vec<&str> = pattern.split('*').collect();
    let matches = |name: &str| name.starts_with(parts[0]) && parts.iter().all(|part| name.contains(part));
    fs::read_dir(dir).into_iter().flatten().flatten().any(|e| e.file_name().to_str().is_some_and(matches))
}
