//! The limit of open files: hob raises the soft limit, and refuses disks that the hard limit leaves
//! no room for.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use conformance::data::noise_file;
use conformance::hob::{Daemon, binary};
use conformance::nbd_client::Client;
use conformance::scratch::{text, wait_for};
use conformance::tool::find;
use conformance::{MIB, Scratch};
use rustix::process::Signal;

const WAIT_MAX: Duration = Duration::from_secs(60);

/// Starts the daemon with limits of open files, `SOFT:HARD`.
#[track_caller]
fn start(scratch: &Scratch, limits: &str) -> Daemon {
    let mut command = Command::new(find("prlimit"));
    command.arg(format!("--nofile={limits}")).arg(binary());
    command.args(["daemon", "--config", &text(&scratch.path("hob.toml"))]);
    Daemon::run(command, &scratch.path("ctl.sock"))
}

/// Returns the soft limit of open files of a process.
fn soft_limit(pid: u32) -> u64 {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).expect("a living process");
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).expect("a limit");
    line.split_whitespace().next().and_then(|soft| soft.parse().ok()).expect("a number")
}

#[track_caller]
fn reads(scratch: &Scratch, disk: &str) {
    scratch.connect_when_served(disk).read(0, 4096).expect("a read");
}

fn image(path: &Path) -> String {
    noise_file(path, MIB, 1);
    text(path)
}

#[test]
fn the_limit_of_open_files_is_raised() {
    let scratch = Scratch::new();
    scratch.configure("");
    let daemon = start(&scratch, "64:2048");
    assert_eq!(soft_limit(daemon.process.pid()), 2048);
    daemon.ctl(&["disk", "add", "vm", "--backing", &image(&scratch.path("vm.img"))]);
    // More clients than the soft limit connect, and all of them are served.
    let clients: Vec<Client> = (0..100).map(|_| scratch.connect("vm")).collect();
    for mut client in clients {
        client.read(0, 4096).expect("a read");
    }
    daemon.stop();
}

/// A disk that would use too many descriptors is refused with the numbers. The others are served.
#[test]
fn a_disk_beyond_the_limit_of_open_files_is_refused_and_the_others_are_served() {
    let scratch = Scratch::new();
    scratch.configure("");
    let daemon = start(&scratch, "200:200");
    let mut added = 0;
    let refused = loop {
        assert!(added < 200, "disks use descriptors");
        let name = format!("vm{added}");
        let backing = image(&scratch.path(&format!("{name}.img")));
        let output = daemon.try_ctl(&["disk", "add", &name, "--backing", &backing]);
        if !output.success() {
            break output;
        }
        added += 1;
    };
    assert!(added >= 2, "the limit leaves room for some disks");
    assert_eq!(refused.stderr.trim().lines().count(), 1, "{}", refused.all());
    assert!(refused.stderr.contains("of 200 files are open"), "{}", refused.all());
    assert!(refused.stderr.contains("LimitNOFILE"), "{}", refused.all());
    for disk in 0..added {
        reads(&scratch, &format!("vm{disk}"));
    }
    // With a higher limit, the disk is added.
    daemon.stop();
    let daemon = start(&scratch, "400:400");
    let name = format!("vm{added}");
    daemon.ctl(&["disk", "add", &name, "--backing", &scratch.text(&format!("{name}.img"))]);
    reads(&scratch, &name);
    daemon.stop();
}

/// Disks of hob.toml are opened together at the start. Disks beyond the limit are offline, and the
/// reason has the numbers. The other disks are served, and the control API answers.
#[test]
fn disks_of_hob_toml_beyond_the_limit_of_open_files_are_refused_at_the_start() {
    const DISKS: usize = 40;
    let scratch = Scratch::new();
    let mut config = String::new();
    for disk in 0..DISKS {
        let backing = image(&scratch.path(&format!("vm{disk}.img")));
        let _ = write!(config, "[[disk]]\nname = \"vm{disk}\"\nbacking = \"{backing}\"\n");
    }
    scratch.configure(&config);
    let daemon = start(&scratch, "120:120");
    let health = || daemon.try_ctl(&["health"]).all();
    wait_for("the disks that do not fit", || health().contains("of 120 files are open"));
    let listed = daemon.ctl(&["disk", "list"]);
    let online: Vec<_> = listed.lines().filter(|line| line.contains("online")).collect();
    assert!(!online.is_empty(), "{listed}");
    for line in online {
        reads(&scratch, line.split_whitespace().next().expect("a name"));
    }
    daemon.stop();
}

/// Clients cannot use the last descriptors: the control API answers, and an upgrade that could not
/// open all disks again is refused while everything is served.
#[test]
fn clients_leave_descriptors_for_the_daemon_and_an_upgrade_that_lacks_them_is_refused() {
    const LIMIT: usize = 200;
    let scratch = Scratch::new();
    let mut config = String::new();
    for disk in 0..4 {
        let backing = image(&scratch.path(&format!("vm{disk}.img")));
        let _ = write!(config, "[[disk]]\nname = \"vm{disk}\"\nbacking = \"{backing}\"\n");
    }
    scratch.configure(&config);
    let mut daemon = start(&scratch, &format!("{LIMIT}:{LIMIT}"));
    let address = scratch.nbd();
    wait_for("the listener", || scratch.path("nbd.sock").exists());
    let mut clients = Vec::new();
    let refused = loop {
        match Client::connect(&address, &format!("vm{}", clients.len() % 4)) {
            Ok(client) => clients.push(client),
            Err(error) => break error,
        }
    };
    assert!((50..LIMIT - 20).contains(&clients.len()), "{} clients, then {refused}", clients.len());
    let listed = daemon.try_ctl(&["disk", "list"]);
    assert!(listed.success() && listed.stdout.matches("online").count() == 4, "{}", listed.all());
    daemon.process.signal(Signal::HUP);
    wait_for("the refusal", || {
        daemon.process.stderr().contains("no descriptors for an upgrade with all clients")
    });
    for client in &mut clients {
        client.read(0, 4096).expect("the daemon continues");
    }
    // With fewer clients, the upgrade succeeds.
    clients.truncate(40);
    // hob refuses the upgrade as long as it has not closed the other clients' connections.
    let refusals = |log: &str| log.matches("no descriptors for an upgrade with all clients").count();
    let is_begun = |log: &str| log.contains("taking over");
    wait_for("the upgrade", || {
        let mut log = daemon.process.stderr();
        let (before, start) = (refusals(&log), Instant::now());
        daemon.process.signal(Signal::HUP);
        // A second signal before the refusal would start another upgrade after the first.
        while !is_begun(&log) && refusals(&log) == before && start.elapsed() < WAIT_MAX / 3 {
            std::thread::sleep(Duration::from_millis(20));
            log = daemon.process.stderr();
        }
        is_begun(&log)
    });
    for client in &mut clients {
        client.read(0, 4096).expect("the next program has the client");
    }
    // The next program waits only some seconds for its disks before it answers.
    wait_for("all disks", || daemon.ctl(&["disk", "list"]).matches("online").count() == 4);
    daemon.stop();
}
