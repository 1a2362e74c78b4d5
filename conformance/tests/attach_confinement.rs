//! The rules by which AppArmor and SELinux let QEMU connect to hob. The compilers of both check the files of
//! the package. No kernel of the tests enforces the rules.

use std::fs;
use std::path::{Path, PathBuf};

use conformance::process::Output;
use conformance::{Scratch, Tool};

/// Path of the rules for AppArmor in the package, below `/etc/apparmor.d`.
const RULES: &str = "abstractions/libvirt-qemu.d/hob";

fn packaging(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging").join(file)
}

/// Compiles a profile that contains `line`. The directory `base` replaces `/etc/apparmor.d`. The output
/// has all rules of the profile.
#[track_caller]
fn compile(scratch: &Scratch, line: &str) -> Output {
    let profile = scratch.path("profile");
    fs::write(&profile, format!("profile libvirt-test {{\n  {line}\n}}\n")).expect("a file");
    let parser = Tool::new("apparmor_parser").args(["-Q", "-K", "--dump=rule-exprs", "--base"]);
    parser.arg(scratch.text("base")).arg(profile).output()
}

#[test]
fn apparmor_lets_qemu_open_the_sockets_of_disks() {
    let scratch = Scratch::new();
    let rules = scratch.path("base").join(RULES);
    fs::create_dir_all(rules.parent().expect("a directory")).expect("a directory");
    let text = fs::read_to_string(packaging("apparmor/libvirt-qemu")).expect("the rules");
    // Newer versions of libvirt include the directory, and older ones need this line.
    let old = "include if exists <abstractions/libvirt-qemu.d/hob>";
    assert!(text.contains(&format!("echo '{old}' >>")), "{text}");
    fs::write(&rules, &text).expect("a file");
    for line in ["include if exists <abstractions/libvirt-qemu.d>", old] {
        let output = compile(&scratch, line);
        assert!(output.success(), "{line}: {}", output.all());
        for rule in ["/run/hob/*.sock", "/run/hob/control.sock"] {
            assert!(output.all().contains(rule), "{line}: no {rule} in {}", output.all());
        }
        let denied = output.all().lines().any(|rule| rule.contains("control") && rule.contains("deny"));
        assert!(denied, "{line}: {}", output.all());
    }
    // The parser notices errors in the included file.
    fs::write(&rules, format!("{text}  bogus rule,\n")).expect("a file");
    assert!(!compile(&scratch, old).success());
    // After a purge of the package, the profiles of all domains still compile.
    fs::remove_file(&rules).expect("a file");
    let output = compile(&scratch, old);
    assert!(output.success() && !output.all().contains("/run/hob"), "{}", output.all());
}

/// Rules that earlier documentation told operators to copy to the path of the package's file.
const FORMER_RULES: &str = "\
# AppArmor rules for guests of libvirt with disks of hob: QEMU may open hob's NBD and vhost-user sockets in
# /run/hob, and not the control socket. The rules apply to all guests of libvirt on this host. Unix permissions
# of the sockets (socket_group, socket_mode in hob.toml) apply too.
#
# libvirt's file /etc/apparmor.d/abstractions/libvirt-qemu includes a file or directory for local rules. The last
# lines of libvirt's file show which of these two it includes:
#   local/abstractions/libvirt-qemu    append this file to /etc/apparmor.d/local/abstractions/libvirt-qemu
#   abstractions/libvirt-qemu.d        copy this file to /etc/apparmor.d/abstractions/libvirt-qemu.d/hob
# A VM that runs already gets the rules with: apparmor_parser -r /etc/apparmor.d/libvirt/libvirt-UUID
  /run/hob/*.sock rw,
  deny /run/hob/control.sock rw,
";

/// Otherwise dpkg would ask the operator which of the two files to use.
#[test]
fn the_package_replaces_an_unchanged_copy_of_the_former_rules() {
    let scratch = Scratch::new();
    let rules = scratch.path("etc/apparmor.d").join(RULES);
    fs::create_dir_all(rules.parent().expect("a directory")).expect("a directory");
    let changed = format!("{FORMER_RULES}  /run/other.sock rw,\n");
    for (text, is_kept) in [(FORMER_RULES, false), (changed.as_str(), true)] {
        for action in [&["install"][..], &["upgrade", "0.1.0"][..]] {
            fs::write(&rules, text).expect("a file");
            let preinst = Tool::new("sh").arg(packaging("debian/preinst")).args(action);
            preinst.env("DPKG_ROOT", scratch.text("")).run();
            assert_eq!(rules.exists(), is_kept, "{action:?} {text}");
        }
    }
}

#[test]
fn the_selinux_module_compiles() {
    let scratch = Scratch::new();
    let file = |name: &str| packaging("selinux").join(name);
    let (module, package) = (scratch.text("hob_qemu.mod"), scratch.text("hob_qemu.pp"));
    Tool::new("checkmodule").args(["-M", "-m", "-o", &module]).arg(file("hob_qemu.te")).run();
    let link = Tool::new("semodule_package").args(["-o", &package, "-m", &module, "-f"]);
    link.arg(file("hob_qemu.fc")).run();
    let built = fs::read(&package).expect("the package");
    // The package has the labels of the files as text.
    let labels = fs::read_to_string(file("hob_qemu.fc")).expect("the labels");
    let has = |text: &str| built.windows(text.len()).any(|bytes| bytes == text.as_bytes());
    assert!(has("hob_var_run_t") && labels.lines().all(has), "{labels}");
    // QEMU may not write to the control socket, which has another type than the sockets of disks.
    let rules = fs::read_to_string(file("hob_qemu.te")).expect("the rules");
    assert!(rules.contains("sock_file var_run_t \"control.sock\";"), "{rules}");
    let allowed: Vec<&str> = rules.lines().filter(|line| line.starts_with("allow")).collect();
    assert!(
        allowed.iter().all(|rule| !rule.contains("var_run_t:sock_file") || rule.contains("hob_")),
        "{rules}"
    );
    assert_eq!(allowed.len(), 3, "{rules}");
}
