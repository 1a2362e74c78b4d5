//! The quick start of docs/QUICKSTART_LIBVIRT.md as a new user follows it: from `apt install` of the Debian
//! package to a cached domain in under two minutes. The test runs the commands of the page.
//!
//! `cargo xtask deb --quick-start` builds the package and runs this test. Other commands do not run it,
//! because the package needs a build of its own. The test needs root. It installs the package in a mount
//! namespace, and does not change the host.

use std::fs;
use std::path::Path;
use std::time::Duration;

use conformance::Scratch;
use conformance::libvirt::{domain, qcow2_disk, script_in_namespaces};

/// Maximum time from the first command to the cached domain, seconds.
const CACHED_S_MAX: u64 = 120;
/// Maximum time of the test. The start of libvirt and of the domain, and the detachment, are not part of
/// [`CACHED_S_MAX`].
const TEST_MAX: Duration = Duration::from_secs(300);
/// The last command of the page that the test runs.
const LAST: &str = "hob detach libvirt:web";

/// Returns the commands of the page's first section up to [`LAST`]. The file `flash` replaces the block
/// device, as the page permits.
fn commands(page: &str, flash: &str) -> Vec<String> {
    let mut sections = page.split("\n## ");
    let section = sections.find(|section| section.starts_with("A running VM")).expect("the section");
    let lines: Vec<&str> = section.lines().filter_map(|line| line.strip_prefix("# ")).collect();
    let last = lines.iter().position(|line| *line == LAST).expect("the detachment");
    let flash = format!("{flash} --size 256M");
    let with_file = |line: &&str| line.replace("/dev/nvme0n1p4", &flash);
    lines[..=last].iter().map(with_file).collect()
}

#[test]
fn a_new_user_caches_a_domain_in_under_two_minutes() {
    let package = std::env::var("HOB_DEB");
    let package = package.expect("HOB_DEB names no package; use 'cargo xtask deb --quick-start'");
    assert!(Path::new(&package).is_file(), "there is no {package}");
    let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(sources.join("../docs/QUICKSTART_LIBVIRT.md")).expect("the page");
    let scratch = Scratch::new();
    let commands = commands(&page, &scratch.text("flash"));
    assert!(commands[0].starts_with("apt install "), "{commands:?}");
    assert!(commands.iter().any(|command| command == "hob attach libvirt:web"), "{commands:?}");

    fs::write(scratch.path("commands"), commands.join("\n") + "\n").expect("a file");
    fs::write(scratch.path("domain.xml"), domain(&qcow2_disk(&scratch.text("image.qcow2")))).expect("a file");
    let script = sources.join("tests/libvirt/quick_start.sh");
    let output = script_in_namespaces(&script, &[], &["apt-get", "libvirtd", "virsh", "qemu-img"])
        .arg(scratch.text(""))
        .arg(package)
        .limit(TEST_MAX)
        .output();
    assert!(output.success(), "{}", output.all());
    println!("{}", output.all());
    let cached =
        output.stdout.lines().find_map(|line| line.strip_prefix("cached after ")?.strip_suffix(" s"));
    let seconds: u64 = cached.and_then(|text| text.parse().ok()).expect("the time");
    assert!(seconds <= CACHED_S_MAX, "the domain was cached after {seconds} s: {}", output.all());
}
