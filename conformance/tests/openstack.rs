//! The cache engine for OpenStack (`packaging/openstack`) with the published os-brick, a daemon and
//! loop devices. Nova is replaced by stubs.
//!
//! The test installs os-brick from PyPI into the target directory, once, and needs root and
//! /dev/fuse.

use std::path::{Path, PathBuf};
use std::time::Duration;

use conformance::hob::binary;
use conformance::{Scratch, Tool};

/// The version of os-brick that the engine was written for.
const OS_BRICK: &str = "os-brick==7.1.1";
/// Maximum time of the installation on a slow network.
const INSTALL_MAX: Duration = Duration::from_secs(300);
/// Maximum time of the tests in Python.
const TESTS_MAX: Duration = Duration::from_secs(600);

/// Returns a directory with os-brick and the packages that it needs.
///
/// # Panics
/// Panics if PyPI is unreachable, and no earlier run has installed os-brick.
#[track_caller]
fn os_brick() -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(OS_BRICK.replace("==", "-"));
    if directory.is_dir() {
        return directory;
    }
    let new = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory").keep();
    let quiet = ["--quiet", "--disable-pip-version-check", "--root-user-action=ignore"];
    let pip = Tool::new("python3").args(["-m", "pip", "install"]).args(quiet);
    let output = pip.arg("--target").arg(&new).arg(OS_BRICK).limit(INSTALL_MAX).output();
    assert!(output.success(), "cannot install {OS_BRICK} from PyPI: {}", output.all());
    std::fs::rename(&new, &directory).expect("the name is free");
    directory
}

#[test]
fn os_brick_caches_volumes_with_hob() {
    let scratch = Scratch::new();
    let control = format!("unix:{}", scratch.text("ctl.sock"));
    let pool =
        format!("[[pool]]\nname = \"flash\"\ndevices = [{:?}]\nsize = \"96M\"\n", scratch.path("flash"));
    scratch.configure(&pool);
    let settings = format!(
        "[hob]\npool = flash\ncontrol = {control}\ndirectory = {}\nprogram = {}\n",
        scratch.text(""),
        binary().display()
    );
    std::fs::write(scratch.path("os-brick.conf"), settings).unwrap();
    let daemon = scratch.start_daemon();
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/openstack");
    let path = [package.clone(), package.join("tests/stubs"), os_brick()];
    let output = Tool::new("python3")
        .args(["-W", "ignore", "-B", "-m", "unittest", "--verbose", "tests.test_engine", "tests.test_nova"])
        .env("PYTHONPATH", std::env::join_paths(path).expect("paths without colons"))
        .env("HOB_OS_BRICK_CONF", scratch.path("os-brick.conf"))
        .env("VOLUME", scratch.path("volume"))
        .limit(TESTS_MAX)
        .output();
    assert!(output.success() && output.stderr.contains("Ran 21 tests"), "{}", output.all());
    daemon.stop();
}
