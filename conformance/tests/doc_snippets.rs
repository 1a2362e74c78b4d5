//! Runs the commands on the pages of docs/, in the order of each page, and checks their XML against
//! libvirt's schema.
//!
//! Paths of the host are replaced by files of the test, and sizes become smaller. [`PAGES`] has the
//! pages whose commands run, and [`NOT_RUN`] the commands that cannot run here, each with its reason.
//! A page with commands is in one of the tables, so that a new page cannot be forgotten.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use conformance::data::empty_file;
use conformance::hob::binary;
use conformance::{Daemon, MIB, Scratch, Tool};

/// Maximum time of a command on busy processors.
const COMMAND_MAX: Duration = Duration::from_secs(180);

/// Objects that exist before the commands of a page run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Before {
    /// A daemon.
    Daemon,
    /// A daemon with the pool `flash` of two devices.
    Pool,
    /// A daemon with the pool `flash` and disks without caches.
    Disks,
    /// A daemon with the pool `flash` and disks with caches.
    Caches,
}

/// Pages whose commands run. Each page has its own daemon.
const PAGES: [(&str, Before); 14] = [
    ("README.md", Before::Daemon),
    ("docs/API.md", Before::Caches),
    ("docs/BACKUP.md", Before::Caches),
    ("docs/LIFECYCLE.md", Before::Caches),
    ("docs/OBJECTS.md", Before::Pool),
    ("docs/QOS.md", Before::Disks),
    ("docs/QUICKSTART_LIBVIRT.md", Before::Daemon),
    ("docs/QUICKSTART_PROXMOX.md", Before::Daemon),
    ("docs/QUICKSTART_QEMU.md", Before::Daemon),
    ("docs/RESIZE.md", Before::Disks),
    ("docs/SECURITY.md", Before::Daemon),
    ("docs/SIZING.md", Before::Disks),
    ("docs/TROUBLESHOOTING.md", Before::Caches),
    ("docs/WRITE_BACK.md", Before::Caches),
];

/// Disks of [`Before::Disks`] and [`Before::Caches`].
const DISKS: [&str; 5] = ["web", "db", "scratch", "web1", "vm"];

/// Commands that do not run: page, first characters of the command, and reason. A page whose commands
/// all do not run has a row with the first characters "".
const NOT_RUN: &[(&str, &str, &str)] = &[
    ("README.md", "cargo", "builds hob; the step build does that"),
    ("README.md", "apt install", "installs the package; cargo xtask deb unpacks it and runs its program"),
    ("README.md", "echo", "writes /etc/hob/hob.toml; the test's daemon has this setting"),
    ("README.md", "hob daemon", "the test has a daemon"),
    ("README.md", "qemu-system-x86_64", "needs a VM; guest.rs starts one with these options"),
    ("docs/ATTACH.md", "", "needs VMs; attach.rs and libvirt.rs attach and detach them"),
    ("docs/CLUSTER.md", "", "needs several hosts and etcd; cluster.rs and cluster_moves.rs have them"),
    ("docs/COMPARISON.md", "", "benchmarks on traces that are not in the repository"),
    ("docs/CONTRIBUTING.md", "", "developers' commands; cargo xtask test is one of them"),
    ("docs/DASHBOARD.md", "", "runs until Ctrl-C; the dashboard's tests start it"),
    ("docs/DEVICE.md", "", "needs the kernel module nbd; host_device.rs runs the commands in a VM"),
    ("docs/FUSE.md", "", "needs loop devices; fuse.rs tests the files"),
    ("docs/GOLDEN_IMAGES.md", "", "needs an image of 40 GiB; golden_images.rs adds such clones"),
    ("docs/INSTALL.md", "", "needs systemd, podman and the package; cargo xtask deb checks the package"),
    ("docs/LAB.md", "", "needs minutes of computation; lab.rs runs the commands of the lab"),
    ("docs/MIGRATION.md", "", "needs two hosts; migrate.rs, live_migration.rs and libvirt.rs have them"),
    ("docs/OBJECTS.md", "export", "needs an account of a cloud"),
    (
        "docs/OBJECTS.md",
        "hob objects create s3:",
        "needs an account of a cloud; objects.rs has a local store",
    ),
    ("docs/OBJECTS.md", "hob disk add vm --backing s3:", "needs an account of a cloud"),
    ("docs/OBJECTS.md", "hob serve", "runs until SIGTERM; objects.rs serves such a disk"),
    ("docs/OPENSTACK.md", "", "needs Nova and Cinder; openstack.rs tests the engine against os-brick"),
    ("docs/PEER.md", "", "needs two hosts; peer.rs has them"),
    ("docs/QOS.md", "hob datastore set", "the datastore's name depends on the file system; qos.rs has one"),
    ("docs/QUICKSTART_LIBVIRT.md", "apt install", "cargo xtask deb checks the package"),
    ("docs/QUICKSTART_LIBVIRT.md", "sed", "changes /etc/hob/hob.toml; deb.rs checks that it has the lines"),
    ("docs/QUICKSTART_LIBVIRT.md", "systemctl", "needs systemd"),
    ("docs/QUICKSTART_LIBVIRT.md", "virsh shutdown", "needs a domain; libvirt.rs stops one"),
    ("docs/QUICKSTART_LIBVIRT.md", "hob attach libvirt", "needs a domain; libvirt.rs has one"),
    ("docs/QUICKSTART_LIBVIRT.md", "hob stats", "needs the attached disk"),
    ("docs/QUICKSTART_LIBVIRT.md", "hob explain", "needs the attached disk"),
    ("docs/QUICKSTART_LIBVIRT.md", "hob detach", "needs a domain; libvirt.rs has one"),
    ("docs/QUICKSTART_PROXMOX.md", "apt install", "cargo xtask deb checks the package"),
    ("docs/QUICKSTART_PROXMOX.md", "systemctl", "needs systemd"),
    ("docs/QUICKSTART_PROXMOX.md", "mkdir", "changes the host"),
    (
        "docs/QUICKSTART_PROXMOX.md",
        "cp ",
        "copies files of the installed package; deb.rs checks that it has them",
    ),
    ("docs/QUICKSTART_PROXMOX.md", "chmod", "follows the copy"),
    ("docs/QUICKSTART_PROXMOX.md", "qm ", "needs a node of Proxmox VE"),
    ("docs/QUICKSTART_PROXMOX.md", "hob disk add web --backing /dev/pve", "needs the kernel module nbd"),
    ("docs/QUICKSTART_QEMU.md", "apt install", "cargo xtask deb checks the package"),
    ("docs/QUICKSTART_QEMU.md", "sed", "changes /etc/hob/hob.toml; deb.rs checks that it has the lines"),
    ("docs/QUICKSTART_QEMU.md", "systemctl", "needs systemd"),
    ("docs/QUICKSTART_QEMU.md", "hob attach qmp", "needs a VM; attach.rs has one"),
    ("docs/QUICKSTART_QEMU.md", "hob detach", "needs a VM; attach.rs has one"),
    ("docs/QUICKSTART_QEMU.md", "hob stats web", "needs the attached disk, or a disk of hob.toml"),
    ("docs/QUICKSTART_QEMU.md", "hob explain web", "needs the attached disk, or a disk of hob.toml"),
    ("docs/QUICKSTART_QEMU.md", "hob serve", "runs until SIGTERM; guest.rs serves such a disk"),
    ("docs/QUICKSTART_QEMU.md", "qemu-system-x86_64", "needs a VM; guest.rs starts one with these options"),
    ("docs/QUICKSTART_QEMU.md", "hob daemon", "the test has a daemon"),
    ("docs/QUICKSTART_RBD.md", "", "needs Ceph; the step rbd has a cluster"),
    ("docs/RBD.md", "", "needs Ceph; the step rbd has a cluster"),
    ("docs/RESIZE.md", "lvextend", "needs LVM"),
    ("docs/RESIZE.md", "rbd", "needs Ceph"),
    ("docs/SECURITY.md", "hob disk list", "needs a daemon with TLS; control_tls.rs has one"),
    ("docs/SECURITY.md", "qemu-img", "needs an NBD listener with TLS; nbd_tls.rs and nbd_psk.rs have one"),
    ("docs/SECURITY.md", "# A directory", "needs an NBD listener with pre-shared keys; nbd_psk.rs has one"),
    ("docs/SECURITY.md", "hob disk add", "needs an NBD server with TLS; tls_backing.rs has one"),
    ("docs/SECURITY.md", "grep", "needs AppArmor's files of libvirt"),
    ("docs/SECURITY.md", "echo", "changes the host's AppArmor rules"),
    ("docs/SECURITY.md", "apparmor_parser", "needs AppArmor and a domain"),
    ("docs/SECURITY.md", "ps -Z", "needs SELinux"),
    ("docs/SECURITY.md", "checkmodule", "attach_confinement.rs runs the command"),
    ("docs/SECURITY.md", "semodule", "needs SELinux; attach_confinement.rs builds the module"),
    ("docs/SECURITY.md", "restorecon", "needs SELinux"),
    ("docs/SECURITY.md", "ausearch", "needs SELinux"),
    ("docs/SIMULATION.md", "", "developers' commands"),
    ("docs/SIZING.md", "hob lab", "needs a trace; lab.rs runs the commands of the lab"),
    ("docs/SIZING.md", "hob advise", "needs recent reads of the disk; advise.rs has them"),
    ("docs/SIZING.md", "hob pool create", "the page assumes the pool flash for its earlier commands"),
    ("docs/SWAP.md", "", "changes the host's swap; swap.rs tests it"),
    ("docs/TORTURE.md", "", "developers' commands"),
    ("docs/VHOST_USER.md", "", "needs VMs; vhost_user.rs has one"),
];

/// A command on a page.
#[derive(Debug)]
struct Snippet {
    line: usize,
    command: String,
}

/// Returns the commands of a page, in order. In a block of the kind `console`, commands begin with
/// a prompt, and other lines are output. A block of the kind `sh` is one script. In other blocks,
/// the lines that begin with a program are commands.
fn snippets(page: &str) -> Vec<Snippet> {
    let mut found: Vec<Snippet> = Vec::new();
    let mut kind: Option<&str> = None;
    // True if the next line belongs to the last command.
    let mut continues = false;
    for (line, text) in (1..).zip(page.lines().map(str::trim)) {
        if let Some(name) = text.strip_prefix("```") {
            kind = if kind.is_some() { None } else { Some(name) };
            continues = false;
            continue;
        }
        let (command, end) = match kind {
            Some("sh") => (Some(text), "\n"),
            Some(_) if continues => (Some(text), ""),
            Some("console") => (text.strip_prefix("$ ").or_else(|| text.strip_prefix("# ")), ""),
            Some("" | "text") => (Some(text).filter(|text| PROGRAMS.iter().any(|p| text.starts_with(p))), ""),
            _ => (None, ""),
        };
        let Some(command) = command else { continue };
        let is_script = kind == Some("sh");
        let part = if is_script { command } else { command.strip_suffix('\\').unwrap_or(command) };
        match found.last_mut().filter(|_| continues) {
            Some(last) => last.command.push_str(part),
            None => found.push(Snippet { line, command: part.to_owned() }),
        }
        found.last_mut().expect("a command").command.push_str(end);
        continues = is_script || command.ends_with('\\');
    }
    found
}

/// Programs in blocks without prompts.
const PROGRAMS: [&str; 6] = ["hob ", "cargo ", "curl ", "qemu-", "cloud-hypervisor ", "export "];

/// A daemon with what a page assumes, and the files that replace those of the host.
struct Stage {
    // Dropped before the directory.
    _daemon: Daemon,
    scratch: Scratch,
}

impl Stage {
    fn new(before: Before) -> Stage {
        let scratch = Scratch::new();
        scratch.configure("");
        for dir in ["srv", "srv/objects", "backup"] {
            std::fs::create_dir(scratch.path(dir)).unwrap();
        }
        let daemon = scratch.start_daemon();
        symlink(binary(), scratch.path("hob")).unwrap();
        let flash = [scratch.text("flash0"), scratch.text("flash1")];
        if before != Before::Daemon {
            daemon.ctl(&["pool", "create", "flash", &flash[0], &flash[1], "--size", "256M"]);
        }
        // Creates the images of pages that add disks themselves.
        empty_file(&scratch.path("flash"), 256 * MIB);
        empty_file(&scratch.path("srv/storage-web"), 32 * MIB);
        let qcow2 = ["create", "-q", "-f", "qcow2", &scratch.text("srv/db.qcow2"), "32M"];
        Tool::new("qemu-img").args(qcow2).run();
        if matches!(before, Before::Disks | Before::Caches) {
            for disk in DISKS {
                let image = scratch.path(&format!("srv/{disk}.img"));
                empty_file(&image, 32 * MIB);
                daemon.ctl(&["disk", "add", disk, "--backing", image.to_str().expect("a path")]);
                if before == Before::Caches {
                    daemon.ctl(&["cache", "enable", disk, "--pool", "flash", "--size", "16M"]);
                }
            }
        }
        Stage { _daemon: daemon, scratch }
    }

    /// Replaces paths and sizes of a page by those of the test.
    fn adapted(&self, command: &str) -> String {
        let here = |name: &str| self.scratch.text(name);
        let mut text = command.to_owned();
        for (there, name) in [
            ("/run/hob/nbd.sock", "nbd.sock"),
            ("/run/hob/control.sock", "ctl.sock"),
            ("/dev/nvme0n1p4", "flash"),
            ("/srv/", "srv/"),
            ("nbd://storage/web", "srv/storage-web"),
            ("/backup/", "backup/"),
        ] {
            text = text.replace(there, &here(name));
        }
        text = text.replace("explain DISK", "explain web");
        with_small_sizes(&text)
    }

    /// Runs a command in the directory of the page's files.
    fn run(&self, command: &str) -> conformance::process::Output {
        let path = format!("{}:{}", self.scratch.text(""), std::env::var("PATH").unwrap_or_default());
        let script = format!("cd '{}' && {}", self.scratch.text(""), self.adapted(command));
        let shell = Tool::new("sh").args(["-ec", &script]).env("PATH", path).limit(COMMAND_MAX);
        shell.env("HOB_CONTROL", format!("unix:{}", self.scratch.text("ctl.sock"))).output()
    }
}

/// Replaces sizes in gibibytes by sizes in mebibytes.
fn with_small_sizes(command: &str) -> String {
    let small = |word: &str| {
        let number = word.strip_suffix('G').filter(|number| number.bytes().all(|byte| byte.is_ascii_digit()));
        match number {
            Some(number) if !number.is_empty() => format!("{number}M"),
            _ => word.to_owned(),
        }
    };
    command.split(' ').map(small).collect::<Vec<_>>().join(" ")
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Returns the page's rows of [`NOT_RUN`].
fn not_run(page: &str) -> impl Iterator<Item = &'static str> {
    NOT_RUN.iter().filter(move |row| row.0 == page).map(|row| row.1)
}

#[test]
fn the_commands_of_the_pages_run() {
    let mut failed = Vec::new();
    let mut count = 0;
    for (page, before) in PAGES {
        let text = std::fs::read_to_string(root().join(page)).expect("a page");
        let stage = Stage::new(before);
        for Snippet { line, command } in snippets(&text) {
            if not_run(page).any(|begin| command.starts_with(begin)) {
                continue;
            }
            count += 1;
            let output = stage.run(&command);
            // `hob health` fails if the host has a problem, such as a pool on a slow file.
            if !output.success() && !command.starts_with("hob health") {
                failed.push(format!("{page}:{line}: {command}\n{}", output.all()));
            }
        }
    }
    assert!(failed.is_empty(), "commands of the pages fail:\n{}", failed.join("\n"));
    assert!(count >= 40, "only {count} commands run");
}

#[test]
fn each_page_with_commands_runs_or_has_a_reason() {
    let docs = std::fs::read_dir(root().join("docs")).expect("docs/").map(|entry| entry.expect("an entry"));
    let names = docs.map(|entry| format!("docs/{}", entry.file_name().to_string_lossy()));
    // The reference of the command line has no examples.
    let is_page = |name: &String| name.ends_with(".md") && name != "docs/cli.md";
    let pages: Vec<String> = names.chain(["README.md".to_owned()]).filter(is_page).collect();
    let mut missing = Vec::new();
    for page in &pages {
        let text = std::fs::read_to_string(root().join(page)).expect("a page");
        let is_run = PAGES.iter().any(|(name, _)| name == page);
        let is_excused = not_run(page).any(str::is_empty);
        if !snippets(&text).is_empty() && is_run == is_excused {
            missing.push(format!("{page} must be either in PAGES or, with the begin \"\", in NOT_RUN"));
        }
    }
    for (page, begin, _) in NOT_RUN {
        let text = std::fs::read_to_string(root().join(page)).unwrap_or_default();
        if !snippets(&text).iter().any(|snippet| snippet.command.starts_with(begin)) {
            missing.push(format!("{page} has no command '{begin}', so its row in NOT_RUN is stale"));
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

/// Elements that libvirt's schema requires in each domain.
const DOMAIN: &str = "<name>web</name>\n<memory unit='MiB'>64</memory>\n<os><type>hvm</type></os>\n";

/// Start of an example that is a domain.
const DOMAIN_TAG: &str = "<domain type='kvm'>\n";

/// Schema of libvirt in which the delay of `<reconnect>` is defined, from libvirt 9.2 on.
const SCHEMA: &str = "/usr/share/libvirt/schemas/storagecommon.rng";

/// Returns the XML blocks of a page, each with the number of its first line.
fn xml_blocks(page: &str) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut is_xml = false;
    for (line, text) in (1..).zip(page.lines()) {
        match text.strip_prefix("```") {
            Some("xml") => {
                is_xml = true;
                found.push((line + 1, String::new()));
            }
            Some(_) => is_xml = false,
            None if is_xml => {
                let (_, block) = found.last_mut().expect("a block has begun");
                block.push_str(text);
                block.push('\n');
            }
            None => {}
        }
    }
    found
}

/// Completes an example to a domain. An example without a domain has one or more elements, separated
/// by lines with `…`. Disks belong to the devices.
fn completed(example: &str) -> String {
    if example.contains(DOMAIN_TAG) {
        return example.replacen(DOMAIN_TAG, &format!("{DOMAIN_TAG}{DOMAIN}"), 1);
    }
    let parts = example.split("…\n");
    let (disks, others): (Vec<&str>, Vec<&str>) = parts.partition(|part| part.contains("<disk "));
    let (disks, others) = (disks.concat(), others.concat());
    format!("{DOMAIN_TAG}{DOMAIN}{others}<devices>\n{disks}</devices>\n</domain>\n")
}

#[test]
fn the_xml_of_pages_and_examples_is_valid_for_libvirt() {
    // virt-xml-validate is a script that runs xmllint.
    drop(Tool::new("xmllint"));
    let schema = std::fs::read_to_string(SCHEMA).expect("libvirt's schemas are installed");
    let has_delay = schema.contains("\"delay\"");
    let scratch = Scratch::new();
    let file = scratch.path("domain.xml");
    let check = |example: &str| {
        let mut xml = completed(example);
        if !has_delay {
            // Older versions of libvirt ignore the element.
            let is_known = |line: &&str| !line.trim_start().starts_with("<reconnect delay=");
            xml = xml.lines().filter(is_known).collect::<Vec<_>>().join("\n");
        }
        std::fs::write(&file, &xml).unwrap();
        let output = Tool::new("virt-xml-validate").arg(&file).arg("domain").output();
        if output.success() { Ok(()) } else { Err(format!("{}\n{xml}", output.all())) }
    };
    check("<disk type='file'><target dev='vda'/></disk>\n").unwrap();
    check("<disk type='tape'><target dev='vda'/></disk>\n").unwrap_err();

    let list = |dir: &str| {
        let entries = std::fs::read_dir(root().join(dir)).expect("a directory");
        let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
        names.map(|name| format!("{dir}/{name}")).collect::<Vec<_>>()
    };
    let mut examples: Vec<(String, String)> = Vec::new();
    for path in [list("docs"), list("packaging/examples"), vec!["README.md".to_owned()]].concat() {
        let read = || std::fs::read_to_string(root().join(&path)).expect("text");
        if path.ends_with(".md") {
            let blocks = xml_blocks(&read());
            examples.extend(blocks.into_iter().map(|(line, text)| (format!("{path}:{line}"), text)));
        } else if path.ends_with(".xml") {
            examples.push((path.clone(), read()));
        }
    }
    assert!(examples.len() >= 4, "only {} examples with XML", examples.len());
    let failed: Vec<String> =
        examples.iter().filter_map(|(name, text)| Some(format!("{name}: {}", check(text).err()?))).collect();
    assert!(failed.is_empty(), "XML that libvirt's schema refuses:\n{}", failed.join("\n"));
}

#[test]
fn commands_are_distinguished_from_output() {
    let page = "text\n```console\n# hob a \\\n    --b 8G\noutput\n$ hob c # why\n```\n```\nhob d\nnot a command\n```\n\
                ```sh\n# A script.\na=1\necho $a\n```\n";
    let found = snippets(page);
    let commands: Vec<&str> = found.iter().map(|snippet| snippet.command.as_str()).collect();
    assert_eq!(commands, ["hob a --b 8G", "hob c # why", "hob d", "# A script.\na=1\necho $a\n"]);
    assert_eq!(found[1].line, 6);
    assert_eq!(with_small_sizes("hob a --size 8G x16G --g G"), "hob a --size 8M x16G --g G");
}
