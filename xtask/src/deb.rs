//! Prepares the files of the Debian package, builds the package with cargo-deb, and checks the
//! result, also with lintian. `--quick-start` also follows docs/QUICKSTART_LIBVIRT.md with the package.
//!
//! `[package.metadata.deb]` of hob's Cargo.toml lists the installed files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::suite::{self, FEATURES};
use crate::{packages, shell, third_party};

/// Options of the build.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Package a debug build for tests: faster to build, not for release
    #[arg(long)]
    debug: bool,
    /// Also follow the quick start for libvirt with the package, from its installation to a cached
    /// domain; needs root, and does not change the host
    #[arg(long)]
    quick_start: bool,
}

/// Files that the package must have.
const CONTENTS: [&str; 23] = [
    "./usr/bin/hob",
    "./etc/hob/hob.toml",
    "./usr/lib/systemd/system/hob.service",
    "./usr/lib/systemd/system/machine-.scope.d/hob.conf",
    "./usr/share/man/man1/hob.1.gz",
    "./usr/share/man/man1/hob-daemon.1.gz",
    "./usr/share/man/man5/hob.toml.5.gz",
    "./usr/share/bash-completion/completions/hob",
    "./usr/share/zsh/vendor-completions/_hob",
    "./usr/share/fish/vendor_completions.d/hob.fish",
    "./usr/share/doc/hob/copyright",
    "./usr/share/doc/hob/third-party-licences.txt.gz",
    "./usr/share/doc/hob/hob.cdx.json",
    "./usr/share/doc/hob/docs/INSTALL.md",
    "./usr/share/doc/hob/examples/openstack/hob_os_brick/engine.py",
    "./usr/share/doc/hob/examples/openstack/pyproject.toml",
    "./usr/share/doc/hob/examples/proxmox/HobPlugin.pm",
    "./usr/share/doc/hob/examples/proxmox/hob-hook.sh",
    "./etc/apparmor.d/abstractions/libvirt-qemu.d/hob",
    "./usr/share/doc/hob/examples/libvirt/hook.conf",
    "./usr/share/doc/hob/examples/prometheus/alerts.yml",
    "./usr/share/doc/hob/examples/selinux/hob_qemu.fc",
    "./usr/share/doc/hob/examples/selinux/hob_qemu.te",
];

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    // The build takes minutes, so a missing program is an error before it.
    require("lintian")?;
    let profile = if arguments.debug { "dev" } else { "release" };
    let mut build = shell::cargo(&["build", "--locked", "--profile", profile, "--package", "hob"]);
    shell::run(build.args(["--features", FEATURES]))?;
    shell::install_cargo_command("deb")?;
    let target = shell::target_dir()?;
    // cargo-deb packs files of a target directory, whatever built them.
    let stage = target.join("deb");
    let _ = fs::remove_dir_all(&stage);
    prepare(&target.join(if arguments.debug { "debug/hob" } else { "release/hob" }), &stage.join("release"))?;
    let mut deb = shell::cargo(&["deb", "--package", "hob", "--no-build", "--no-strip", "--locked"]);
    if arguments.debug {
        deb.arg("--fast");
    }
    deb.arg("--output").arg(target.join("debian")).env("CARGO_TARGET_DIR", &stage);
    let said = shell::output(&mut deb)?;
    let package = said.lines().last().context("cargo-deb did not print the path of the package")?;
    check(Path::new(package))?;
    if arguments.quick_start {
        let mut test = suite::cargo_test(&["--test", "attach_quick_start", "--", "--nocapture"]);
        shell::run_tests(test.env("HOB_DEB", Path::new(package).canonicalize()?))?;
    }
    println!("{package}");
    Ok(())
}

/// Returns an error if a program is not installed. The program's Debian package has the same name.
fn require(program: &str) -> Result<()> {
    if !packages::present(program) {
        bail!(
            "{program} is not installed, and cargo xtask deb checks the package with it; run 'apt-get install \
             --no-install-recommends {program}'"
        );
    }
    Ok(())
}

/// Strips the binary, and generates manual pages, completions, the changelog, and the lists of crates.
fn prepare(program: &Path, built: &Path) -> Result<()> {
    let dir = built.join("packaging");
    fs::create_dir_all(dir.join("completions"))?;
    let hob = built.join("hob");
    shell::run(Command::new("strip").arg("-o").arg(&hob).arg(program))?;
    shell::run(Command::new(&hob).args(["man", "--out"]).arg(dir.join("man")))?;
    fs::copy(shell::root().join("packaging/hob.toml.5"), dir.join("man/hob.toml.5"))?;
    compress(fs::read_dir(dir.join("man"))?.map(|page| Ok(page?.path())).collect::<Result<Vec<_>>>()?)?;
    for (shell_name, file) in [("bash", "hob.bash"), ("zsh", "_hob"), ("fish", "hob.fish")] {
        let script = shell::output(Command::new(&hob).args(["completions", shell_name]))?;
        fs::write(dir.join("completions").join(file), script)?;
    }
    let (licences, _) = third_party::write(&dir, FEATURES)?;
    compress(vec![licences])?;
    let changelog = dir.join("changelog.Debian");
    fs::write(&changelog, changelog_text(&hob)?)?;
    compress(vec![changelog])
}

fn compress(files: Vec<PathBuf>) -> Result<()> {
    shell::output(Command::new("gzip").args(["--best", "--no-name"]).args(files)).map(drop)
}

/// Returns a changelog in Debian's format. hob's own changelog is another file.
fn changelog_text(hob: &Path) -> Result<String> {
    let version = shell::output(Command::new(hob).arg("--version"))?;
    let version = version.trim().rsplit(' ').next().context("'hob --version' prints no version")?.to_owned();
    let when = Command::new("git").args(["log", "-1", "--format=%cD"]).current_dir(shell::root()).output();
    let when = when.ok().filter(|output| output.status.success());
    let when = when.map_or("Thu, 01 Jan 1970 00:00:00 +0000".into(), |output| {
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    });
    let metadata = metadata()?;
    let maintainer = metadata["maintainer"].as_str().context("the package has no maintainer")?;
    Ok(format!(
        "hob ({version}-1) unstable; urgency=medium\n\n  * /usr/share/doc/hob/CHANGELOG.md tells what is new.\n\n -- {maintainer}  {when}\n"
    ))
}

/// Returns the table `[package.metadata.deb]`.
fn metadata() -> Result<serde_json::Value> {
    let all = shell::metadata()?;
    let packages = all["packages"].as_array().context("cargo metadata lists no packages")?;
    let hob = packages
        .iter()
        .find(|package| package["name"] == "hob")
        .context("cargo metadata lists no package hob")?;
    Ok(hob["metadata"]["deb"].clone())
}

/// Lists the files of a package, unpacks the package, and runs its program.
fn check(package: &Path) -> Result<()> {
    let contents = shell::output(Command::new("dpkg-deb").arg("--contents").arg(package))?;
    let names: Vec<&str> = contents.lines().filter_map(|line| line.split(' ').next_back()).collect();
    for wanted in CONTENTS {
        if !names.contains(&wanted) {
            bail!("the package lacks {wanted}; it has\n{contents}");
        }
    }
    // Fails if cargo-deb has left out a script.
    for script in ["preinst", "postinst", "postrm"] {
        shell::output(Command::new("dpkg-deb").arg("--info").arg(package).arg(script))?;
    }
    let scratch = tempfile::tempdir()?;
    shell::run(Command::new("dpkg-deb").arg("--extract").arg(package).arg(scratch.path()))?;
    let hob = scratch.path().join("usr/bin/hob");
    shell::run(Command::new(&hob).arg("--version"))?;
    check_config(&hob, scratch.path())?;
    check_features(&hob)?;
    lint(package)
}

/// Checks the packaged hob.toml, with other directories for the state and the sockets: without
/// root, hob cannot create those of the package.
fn check_config(hob: &Path, scratch: &Path) -> Result<()> {
    let (packaged, config) = (scratch.join("etc/hob/hob.toml"), scratch.join("hob.toml"));
    let run = scratch.join("run").display().to_string();
    let text = fs::read_to_string(&packaged).context("cannot read the packaged hob.toml")?;
    fs::write(&config, format!("state_dir = {run:?}\n{}", text.replace("/run/hob", &run)))?;
    let control = format!("unix:{run}/control.sock");
    let mut command = Command::new(hob);
    command.args(["daemon", "--check", "--control", &control, "--config"]).arg(&config);
    shell::run(&mut command)
}

/// Checks that the packaged hob can open Ceph RBD images, cloud object stores, and NBD servers with
/// pre-shared keys. The error contains hob's message, which names a missing feature.
fn check_features(hob: &Path) -> Result<()> {
    for backing in ["rbd:none/none", "s3://none/none", "nbds://user@127.0.0.1:1/x?tls-psk-file=/none"] {
        // With the feature, hob may wait for a server that does not exist, so `timeout` ends hob.
        let output = Command::new("timeout")
            .arg("10")
            .arg(hob)
            .args(["serve", "--disk", backing, "--listen", "unix:/nonexistent/nbd.sock"])
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() || said.contains("built without") {
            bail!("the program in the package cannot open {backing}: {said}");
        }
    }
    Ok(())
}

/// Checks the package against Debian's policy.
fn lint(package: &Path) -> Result<()> {
    // As root, lintian only warns about that.
    shell::run(Command::new("lintian").args(["--fail-on", "error", "--allow-root"]).arg(package))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_an_error_that_says_how_to_install_it() {
        require("sh").unwrap();
        let error = require("no-such-linter").unwrap_err().to_string();
        assert!(error.contains("--no-install-recommends no-such-linter"), "{error}");
    }

    /// Checks that all files of the package exist or that [`prepare`] creates them.
    #[test]
    fn everything_that_the_package_is_made_of_is_there() {
        let metadata = metadata().unwrap();
        let here = shell::root().join("crates/hob");
        let mut missing = Vec::new();
        let assets = metadata["assets"].as_array().expect("assets");
        let lists = [&metadata["maintainer-scripts"], &metadata["license-file"][0]];
        let paths =
            assets.iter().map(|asset| &asset[0]).chain(lists).map(|path| path.as_str().expect("a path"));
        for path in paths.filter(|path| !path.starts_with("target/release/")) {
            let (dir, name) = path.rsplit_once('/').expect("a path");
            let fits = |found: &str| match name.split_once('*') {
                Some((begin, end)) => found.starts_with(begin) && found.ends_with(end),
                None => found == name,
            };
            let entries = fs::read_dir(here.join(dir)).into_iter().flatten().flatten();
            if !entries.into_iter().any(|entry| fits(&entry.file_name().to_string_lossy())) {
                missing.push(path);
            }
        }
        assert!(missing.is_empty(), "{missing:?}");
        for asset in assets.iter().filter_map(|asset| asset[0].as_str()) {
            let made = asset.strip_prefix("target/release/");
            assert!(made.is_none_or(|made| made == "hob" || made.starts_with("packaging/")), "{asset}");
        }
    }

    /// Checks that files and directories which pages copy from the package's examples are in the package.
    #[test]
    fn pages_copy_only_files_that_the_package_has() {
        let is_packed = |path: &str| {
            CONTENTS
                .iter()
                .filter_map(|file| file.strip_prefix(&format!(".{path}")))
                .any(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let mut missing = Vec::new();
        let mut count = 0;
        for page in crate::tidy::texts().iter().filter(|text| text.path.ends_with(".md")) {
            let words = page.text.split([' ', '\n', '`', ')']);
            for path in words.filter(|word| word.starts_with("/usr/share/doc/hob/examples/")) {
                count += 1;
                if !is_packed(path) {
                    missing.push(format!("{}: {path}", page.path));
                }
            }
        }
        assert!(count > 0 && missing.is_empty(), "{count} paths; not in CONTENTS: {missing:?}");
    }

    /// Checks that sed in the quick starts changes one line of hob.toml, above all tables.
    #[test]
    fn the_quick_starts_find_their_lines_in_hob_toml() {
        let config = fs::read_to_string(shell::root().join("packaging/hob.toml")).unwrap();
        let is_table = |line: &str| line.trim_start_matches(['#', ' ']).starts_with('[');
        let table = config.lines().position(is_table).expect("a table");
        for page in ["QUICKSTART_QEMU.md", "QUICKSTART_LIBVIRT.md"] {
            let text = fs::read_to_string(shell::root().join("docs").join(page)).unwrap();
            let sed =
                text.lines().find(|line| line.starts_with("# sed -i")).expect("the page changes hob.toml");
            let patterns: Vec<&str> =
                sed.split("s/^").skip(1).filter_map(|part| part.split('/').next()).collect();
            assert_eq!(patterns.len(), 2, "{page}: {sed}");
            for pattern in patterns {
                let lines: Vec<usize> = (0..)
                    .zip(config.lines())
                    .filter(|(_, line)| line.starts_with(pattern))
                    .map(|it| it.0)
                    .collect();
                assert!(
                    matches!(lines[..], [line] if line < table),
                    "{page}: '{pattern}' in lines {lines:?}"
                );
            }
        }
    }

    /// Checks that the unit, the container image and the package use the same paths.
    #[test]
    fn the_unit_and_the_image_start_what_the_package_installs() {
        let read = |name: &str| fs::read_to_string(shell::root().join("packaging").join(name)).unwrap();
        let unit = read("hob.service");
        assert!(unit.contains("ExecStart=/usr/bin/hob daemon --config /etc/hob/hob.toml\n"));
        assert!(unit.contains("ExecReload=/usr/bin/hob daemon --config /etc/hob/hob.toml --check\n"));
        let image = read("Containerfile");
        assert!(image.contains("COPY packaging/hob.toml /etc/hob/hob.toml"));
        assert!(image.contains("CMD [\"daemon\", \"--config\", \"/etc/hob/hob.toml\"]"));
        let rust = image.lines().find_map(|line| line.strip_prefix("FROM docker.io/library/rust:"));
        let manifest = fs::read_to_string(shell::root().join("Cargo.toml")).unwrap();
        let wanted = rust.and_then(|tag| tag.split('-').next()).expect("a version of Rust");
        assert!(
            manifest.contains(&format!("rust-version = \"{wanted}\"")),
            "the image builds with Rust {wanted}"
        );
        // Files that only the service would see must be in the drop-in.
        for hidden in [
            "ProtectSystem",
            "ProtectKernel",
            "ProtectControlGroups",
            "PrivateTmp",
            "ProtectHome",
            "PrivateDevices",
        ] {
            assert!(
                !unit.lines().any(|line| line.starts_with(hidden)),
                "{hidden} hides disks that are files"
            );
        }
    }

    /// Units that start or stop guests.
    const GUESTS: [&str; 12] = [
        "libvirtd.service",
        "virtqemud.service",
        "virtxend.service",
        "virtchd.service",
        "libvirt-guests.service",
        "pve-guests.service",
        "pve-ha-lrm.service",
        "pvedaemon.service",
        "qmeventd.service",
        "nova-compute.service",
        "openstack-nova-compute.service",
        "devstack@n-cpu.service",
    ];

    /// systemd reverses the order of "Before" at shutdown.
    #[test]
    fn the_service_starts_before_guests_and_stops_after_them() {
        let packaging = shell::root().join("packaging");
        let unit = fs::read_to_string(packaging.join("hob.service")).unwrap();
        let before: Vec<&str> = unit
            .lines()
            .filter_map(|line| line.strip_prefix("Before="))
            .flat_map(str::split_whitespace)
            .collect();
        assert_eq!(before, GUESTS);
        let scope = fs::read_to_string(packaging.join("machine-.scope.d/hob.conf")).unwrap();
        assert!(scope.contains("[Unit]\nAfter=hob.service\n"));
        // systemd accepts the unit without cycles, with all guest units enabled.
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("hob.service"), unit.replace("/usr/bin/hob", "/bin/true")).unwrap();
        for guests in GUESTS {
            let stub = "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n";
            fs::write(dir.path().join(guests), stub).unwrap();
        }
        let verify = Command::new("systemd-analyze")
            .args(["verify", "--man=no", "hob.service"])
            .args(GUESTS)
            .env("SYSTEMD_UNIT_PATH", format!("{}:", dir.path().display()))
            .output()
            .expect("systemd-analyze is there");
        let said = String::from_utf8_lossy(&verify.stderr);
        assert!(verify.status.success() && !said.contains("cycle"), "{said}");
    }
}
