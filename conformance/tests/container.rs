//! The recipe of the container image, built without privileges by buildah.
//!
//! The recipe's first stage compiles hob, and the tests do not run it: they put a debug binary in its
//! place. `HOB_FEATURES_BIN` names a binary with all optional features, as in a released image. Without
//! this variable, the image gets the binary under test, whose features are not checked. The test needs
//! root, and installs the base image from Debian packages.

use std::path::{Path, PathBuf};
use std::time::Duration;

use conformance::Scratch;
use conformance::hob::binary;
use conformance::libvirt::script_in_namespaces;

/// Maximum time of the test on busy processors and a slow network.
const TEST_MAX: Duration = Duration::from_secs(900);

#[test]
fn an_unprivileged_user_builds_the_container_image_and_its_daemon_is_healthy() {
    let scratch = Scratch::new();
    let binary_dir = scratch.path("binary/target/release");
    std::fs::create_dir_all(&binary_dir).unwrap();
    let with_features = std::env::var_os("HOB_FEATURES_BIN").map(PathBuf::from);
    std::fs::copy(with_features.clone().unwrap_or_else(binary), binary_dir.join("hob")).unwrap();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/container/host.sh");
    let output = script_in_namespaces(&script, &[], &["buildah", "mmdebstrap", "newuidmap"])
        .arg(scratch.text(""))
        .arg(sources)
        .arg(Path::new(env!("CARGO_TARGET_TMPDIR")).join("debian.tar"))
        .limit(TEST_MAX)
        .output();
    assert!(output.success(), "{}", output.all());
    for expected in [
        "hob [CMD /usr/bin/hob health]",
        "directory /var/lib/hob of hob:hob, mode 750",
        "directory /run/hob of hob:hob, mode 750",
        "no problems",
        "the daemon of the image has ended cleanly",
    ] {
        assert!(output.all().contains(expected), "no '{expected}' in: {}", output.all());
    }
    if with_features.is_some() {
        assert!(!output.all().contains("built without"), "a feature is missing: {}", output.all());
    }
}
