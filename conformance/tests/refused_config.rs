//! If hob.toml is invalid, a daemon starts with the last hob.toml that it accepted, and reports this
//! in health. A daemon that was never started before does not start.

use conformance::data::noise_file;
use conformance::hob::{binary, command};
use conformance::scratch::wait_for;
use conformance::{MIB, Scratch, Tool, Unmount};
use rustix::fs::{CWD, FileType, mknodat};
use rustix::process::Signal;

/// Invalid last lines of hob.toml, and the report in health for each. 192.0.2.1 belongs to no host
/// (RFC 5737).
const MISTAKES: [(&str, &str); 7] = [
    ("[[disk]\n", "unclosed"),
    ("shard_count = 3\n", "shard_count"),
    ("[limits]\nconnections_max = 0\n", "connections_max"),
    (
        "[[nbd]]\nlisten = \"tcp:127.0.0.1:1\"\ntls = { cert = \"/missing\", key = \"/missing\" }\n",
        "/missing",
    ),
    ("[[nbd]]\nlisten = \"tcp:192.0.2.1:45018\"\n", "cannot listen on tcp:192.0.2.1:45018"),
    ("[cluster]\netcd = [\"https://127.0.0.1:1\"]\nca = \"/missing.pem\"\n", "/missing.pem"),
    ("[peers]\nlend = \"/proc/lent\"\nlend_max = \"64M\"\n", "cannot lend flash in /proc/lent"),
];

/// The reports of mistakes that a comparison does not find: it does not use the files, addresses and
/// directories that hob.toml names.
const NOT_COMPARED: [&str; 4] =
    ["/missing", "cannot listen on tcp:192.0.2.1:45018", "/missing.pem", "cannot lend flash in /proc/lent"];

struct Stage {
    scratch: Scratch,
    good: String,
}

impl Stage {
    fn new() -> Stage {
        let scratch = Scratch::new();
        noise_file(&scratch.path("disk.img"), 4 * MIB, 1);
        let disk = format!("[[disk]]\nname = \"vm\"\nbacking = \"{}\"\n", scratch.text("disk.img"));
        let good = scratch.daemon_config() + &disk;
        Stage { scratch, good }
    }

    /// Writes hob.toml. Settings of the daemon precede its tables.
    fn configure(&self, mistake: &str) {
        let text = if mistake.starts_with('[') {
            format!("{}{mistake}", self.good)
        } else {
            format!("{mistake}{}", self.good)
        };
        self.scratch.write_config(text);
    }

    fn check(&self, mistake: &str, mentions: &str) {
        let checked = command(&["daemon", "--config", &self.scratch.text("hob.toml"), "--check"]);
        assert!(!checked.success() && checked.all().contains(mentions), "{mistake}: {}", checked.all());
    }

    fn serves(&self) {
        let mut guest = self.scratch.connect_when_served("vm");
        guest.read(0, 4096).expect("the disk is served");
    }
}

#[test]
fn a_daemon_that_worked_starts_again_when_its_hob_toml_is_refused() {
    let stage = Stage::new();
    stage.configure("");
    let kept = stage.scratch.path("state/hob.toml.accepted");
    let mut daemon = stage.scratch.start_daemon();
    wait_for("the copy of hob.toml", || kept.exists());
    for (mistake, mentions) in MISTAKES {
        stage.configure(mistake);
        stage.check(mistake, mentions);
        daemon.kill();
        daemon = stage.scratch.start_daemon();
        stage.serves();
        let health = daemon.try_ctl(&["health"]).all();
        assert!(health.contains("config-refused") && health.contains(mentions), "{mistake}: {health}");
        if NOT_COMPARED.contains(&mentions) {
            continue;
        }
        let refused = daemon.try_ctl(&["config", "diff"]);
        assert!(!refused.success() && refused.all().contains(mentions), "{mistake}: {}", refused.all());
    }
    let disk = format!("[[disk]]\nname = \"more\"\nbacking = \"{}\"\n", stage.scratch.text("more.img"));
    noise_file(&stage.scratch.path("more.img"), MIB, 2);
    stage.configure(&disk);
    daemon.kill();
    let daemon = stage.scratch.start_daemon();
    let health = daemon.try_ctl(&["health"]).all();
    assert!(!health.contains("config-refused"), "{health}");
    assert!(daemon.ctl(&["disk", "list"]).contains("more"), "the corrected file counts");
    wait_for("the copy of the corrected file", || {
        std::fs::read_to_string(&kept).is_ok_and(|text| text.contains("more.img"))
    });
    daemon.stop();
}

#[test]
fn a_failed_reload_is_in_health_until_a_reload_succeeds() {
    let stage = Stage::new();
    stage.configure("");
    let mut daemon = stage.scratch.start_daemon();
    stage.configure("shard_count = 3\n");
    daemon.process.signal(Signal::HUP);
    wait_for("the report", || {
        let health = daemon.try_ctl(&["health"]).all();
        health.contains("config-refused") && health.contains("shard_count")
    });
    stage.serves();
    stage.configure("");
    daemon.process.signal(Signal::HUP);
    // No command succeeds while the next program starts.
    wait_for("the end of the report", || {
        let health = daemon.try_ctl(&["health", "-o", "json"]).all();
        // On a busy host, a step of the reload may take longer than its limit.
        if health.contains("config-refused") && health.contains(" within ") {
            daemon.process.signal(Signal::HUP);
        }
        health.contains("\"status\"") && !health.contains("config-refused")
    });
    daemon.stop();
}

#[test]
fn a_daemon_that_never_started_is_refused_with_its_mistakes() {
    let stage = Stage::new();
    for (mistake, mentions) in MISTAKES {
        stage.configure(mistake);
        let refused = command(&["daemon", "--config", &stage.scratch.text("hob.toml")]);
        assert!(!refused.success() && refused.all().contains(mentions), "{mistake}: {}", refused.all());
    }
}

/// Reading a FIFO would wait for a writer forever.
#[test]
fn a_fifo_as_certificate_is_refused_by_the_check_and_by_a_start() {
    let stage = Stage::new();
    let (fifo, config) = (stage.scratch.path("fifo"), stage.scratch.text("hob.toml"));
    mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).expect("a FIFO");
    let fifo = fifo.display();
    stage.configure(&format!(
        "[[nbd]]\nlisten = \"tcp:127.0.0.1:1\"\ntls = {{ cert = \"{fifo}\", key = \"{fifo}\" }}\n"
    ));
    for more in [&["--check"][..], &[]] {
        let refused = command(&[&["daemon", "--config", config.as_str()][..], more].concat());
        let is_named = refused.stderr.contains("leads to a FIFO, not to a regular file");
        assert!(refused.status.is_some() && !refused.success() && is_named, "{more:?}: {}", refused.all());
    }
}

#[test]
fn a_fifo_as_configuration_is_refused_and_a_pipe_is_read() {
    let stage = Stage::new();
    stage.configure("");
    let (fifo, hob) = (stage.scratch.text("fifo"), binary().display().to_string());
    mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).expect("a FIFO");
    for more in [&["--check"][..], &[]] {
        let refused = command(&[&["daemon", "--config", fifo.as_str()][..], more].concat());
        let is_named = refused.stderr.contains("does not lead to a regular file");
        assert!(refused.status.is_some() && !refused.success() && is_named, "{more:?}: {}", refused.all());
    }
    let line = format!("cat {} | {hob} daemon --check --config /dev/stdin", stage.scratch.text("hob.toml"));
    let said = Tool::new("sh").args(["-c", line.as_str()]).run();
    assert!(said.contains("can start"), "{said}");
}

/// Mistakes that depend on the host. A daemon reports them after its start.
#[test]
fn a_check_compares_the_file_with_the_host() {
    let stage = Stage::new();
    let directory = stage.scratch.path("disk.img").parent().unwrap().to_owned();
    std::os::unix::fs::symlink(&directory, stage.scratch.path("link")).unwrap();
    noise_file(&stage.scratch.path("more.img"), MIB, 2);
    let disk =
        |backing: &str, more: &str| format!("[[disk]]\nname = \"more\"\nbacking = \"{backing}\"\n{more}");
    let pool = |more: &str| {
        let flash = stage.scratch.text("flash");
        format!("[[pool]]\nname = \"p\"\ndevices = [\"{flash}\"]\n{more}")
    };
    let (link, more) = (stage.scratch.text("link"), stage.scratch.text("more.img"));
    let cache = "cache = { pool = \"p\", size = \"2G\" }\n";
    for (mistake, mentions) in [
        (
            format!("[[nbd]]\nlisten = \"unix:{link}/ctl.sock\"\n"),
            "control.listen.0 and nbd.0.listen both use",
        ),
        (disk(&more, &format!("fuse = \"{link}/more.img\"\n")), "covers the backing of disk more"),
        (disk("ftp://x/y", ""), "does not know ftp://"),
        (disk("nbd+unix:///x", ""), "?socket="),
        (disk(&link, ""), "a directory"),
        (disk(&more, "format = \"qcow2\"\n"), "not a qcow2 image"),
        (pool(""), "set 'size'"),
        (pool("size = \"1K\"\n"), "is too small: at least 3 MiB"),
        (pool("size = \"1G\"\n") + &disk(&more, cache), "size = 2G is too large"),
    ] {
        stage.configure(&mistake);
        stage.check(&mistake, mentions);
    }
    stage.configure(&(pool("size = \"4G\"\n") + &disk(&more, cache)));
    let checked = command(&["daemon", "--config", &stage.scratch.text("hob.toml"), "--check"]);
    assert!(checked.success(), "{}", checked.all());
}

/// A daemon that could not save its state is found before it starts: one line with the path.
#[test]
fn a_check_reports_a_state_directory_that_cannot_be_written() {
    let stage = Stage::new();
    stage.configure("");
    let state = stage.scratch.path("state");
    let check = || command(&["daemon", "--config", &stage.scratch.text("hob.toml"), "--check"]);
    let refused = |why: &str| {
        let checked = check();
        assert!(!checked.success(), "{why}: {}", checked.all());
        let said = checked.stderr.trim();
        assert!(said.lines().count() == 1 && said.contains(&stage.scratch.text("state")), "{why}: {said}");
        assert!(said.contains(why), "{why}: {said}");
    };
    assert!(check().success(), "a directory that does not exist yet: {}", check().all());
    std::fs::write(&state, "").unwrap();
    refused("Not a directory");
    std::fs::remove_file(&state).unwrap();
    std::fs::create_dir(&state).unwrap();
    assert!(check().success(), "{}", check().all());
    assert_eq!(std::fs::read_dir(&state).unwrap().count(), 0, "the check leaves nothing");
    let _unmount = Unmount::at(&state);
    let mount = |options: &str| {
        Tool::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs", &stage.scratch.text("state")]).run();
    };
    mount("size=256k");
    assert!(check().success(), "{}", check().all());
    // 12 KiB stay free, less than a state may need.
    std::fs::write(state.join("other"), vec![1; 244 << 10]).unwrap();
    refused("No space left on device");
    mount("ro");
    refused("Read-only file system");
}
