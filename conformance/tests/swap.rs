//! Swap space of the host on a pool: with the real kernel, and pages of a real process.
//!
//! These tests turn swap on, and so need root and loop devices. Their areas have the highest
//! priority, so that the kernel uses them for the test's pages, and are too small to affect the
//! host.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use conformance::process::Process;
use conformance::scratch::{text, wait_for};
use conformance::{Daemon, Loop, MIB, Scratch, Serve, Tool, Unmount};
use serde_json::Value;

/// Maximum time of swapping.
const PATIENCE: Duration = Duration::from_secs(60);

/// Memory that the process swaps out, MiB.
const PAGED_MIB: u64 = 32;

/// Fills memory with a pattern, asks the kernel to swap it out (madvise, MADV_PAGEOUT) until most
/// of it is swapped out, and then creates the file `out`. When a file `first` or `all` appears,
/// compares half of the memory, or all of it, and creates `first-good` or `all-good`.
const PAGER: &str = r#"
use strict; my ($dir, $mib, $madvise) = @ARGV; my $len = $mib << 20;
sub say_ { open(my $f, '>', "$dir/$_[0]") or die; close $f }
{ use integer; *mul = sub { $_[0] * 0x9E3779B97F4A7C1 } }
sub page { return pack('q<', mul($_[0] + 1)) x 512 }
my $memory = "\0" x $len;
for my $n (0 .. $len / 4096 - 1) { substr($memory, $n * 4096, 4096) = page($n) }
my $at = unpack('J', pack('P', $memory)); my $start = ($at + 4095) & ~4095;
my $size = ($len - 4096) & ~4095;
for (1 .. 200) {
  syscall($madvise, $start, $size, 21) == 0 or die "madvise: $!";
  open(my $f, '<', "/proc/$$/status") or die; my ($kib) = map { /^VmSwap:\s+(\d+)/ ? $1 : () } <$f>; close $f;
  last if $kib >= $len / 1024 * 3 / 4; select(undef, undef, undef, 0.1);
}
say_('out');
sub wait_ { until (-e "$dir/$_[0]") { select(undef, undef, undef, 0.02) } }
sub compare { for my $n ($_[0] .. $_[1] - 1) { substr($memory, $n * 4096, 4096) eq page($n) or die "page $n differs" } }
my $pages = $len / 4096;
wait_('first'); compare(0, $pages / 2); say_('first-good');
wait_('all'); compare(0, $pages); say_('all-good');
"#;

/// A scratch directory with a configuration, and a directory on a real disk for the pool.
struct Stage {
    scratch: Scratch,
    // Dropped after the daemon.
    _off: Off,
    disk: tempfile::TempDir,
}

impl Stage {
    fn new() -> Self {
        let scratch = Scratch::new();
        scratch.configure("");
        let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory on a disk");
        Self { scratch, _off: Off(disk.path().to_owned()), disk }
    }

    fn pool_file(&self) -> PathBuf {
        self.disk.path().join("flash")
    }

    /// Starts a daemon with a pool of `mib` MiB.
    #[track_caller]
    fn with_pool(&self, mib: u64) -> Daemon {
        let daemon = self.scratch.start_daemon();
        let size = format!("{mib}M");
        let file = text(&self.pool_file());
        daemon.ctl(&["pool", "create", "fast", &file, "--size", &size, "--segment-size", "1M"]);
        daemon
    }
}

/// Ends all swapping to files below a directory, even if the test fails.
struct Off(PathBuf);

impl Drop for Off {
    fn drop(&mut self) {
        for device in loops_below(&self.0) {
            let _ = Tool::new("swapoff").arg(&device).limit(PATIENCE).output();
            let _ = Tool::new("losetup").args(["--detach", &device]).limit(PATIENCE).output();
        }
    }
}

/// Returns the loop devices over files below a directory.
fn loops_below(dir: &Path) -> Vec<String> {
    let device = |entry: fs::DirEntry| {
        let backing = fs::read_to_string(entry.path().join("loop/backing_file")).ok()?;
        Path::new(backing.trim_end())
            .starts_with(dir)
            .then(|| format!("/dev/{}", entry.file_name().display()))
    };
    fs::read_dir("/sys/block").unwrap().flatten().filter_map(device).collect()
}

fn of_loop(device: &str, what: &str) -> u64 {
    let path = format!("/sys/block/{}/loop/{what}", device.trim_start_matches("/dev/"));
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

/// Returns true if the kernel swaps to a device.
fn is_on(device: &str) -> bool {
    let table = fs::read_to_string("/proc/swaps").unwrap();
    table.lines().any(|line| line.split_whitespace().next() == Some(device))
}

#[track_caller]
fn areas(daemon: &Daemon) -> Vec<Value> {
    daemon.json(&["swap", "list"]).as_array().expect("a list").clone()
}

#[track_caller]
fn refused(daemon: &Daemon, args: &[&str], wrong: &str) {
    let output = daemon.try_ctl(args);
    let said = output.all();
    assert!(!output.success() && said.contains(wrong), "hob {args:?}: {said}");
    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
}

#[track_caller]
fn pager(dir: &Path) -> Process {
    let madvise = if cfg!(target_arch = "aarch64") { "233" } else { "28" };
    let mut command = Command::new("perl");
    command.args(["-e", PAGER, &text(dir), &PAGED_MIB.to_string(), madvise]);
    Process::start("perl", &mut command).unwrap_or_else(|e| panic!("start perl: {e}"))
}

#[track_caller]
fn wait_for_pager(pager: &mut Process, dir: &Path, file: &str) {
    wait_for(file, || {
        assert!(pager.poll().is_none_or(|status| status.success()), "{}", pager.stderr());
        dir.join(file).exists()
    });
}

#[test]
fn swapped_pages_survive_on_a_pool_without_the_daemon() {
    let stage = Stage::new();
    let daemon = stage.with_pool(100);
    daemon.ctl(&["swap", "create", "--size", "63M", "--priority", "32767"]);
    let area = &areas(&daemon)[0];
    assert_eq!((area["name"].as_str(), area["state"].as_str()), (Some("swap0"), Some("on")), "{area}");
    let device = area["loop_device"].as_str().unwrap().to_owned();
    assert!(is_on(&device));
    assert_eq!(loops_below(stage.disk.path()), std::slice::from_ref(&device));
    assert_eq!((of_loop(&device, "sizelimit"), of_loop(&device, "dio")), (63 * MIB, 1));
    assert!(of_loop(&device, "offset") >= 2 * MIB);

    let dir = stage.scratch.dir();
    let mut pager = pager(dir);
    wait_for_pager(&mut pager, dir, "out");
    let used = areas(&daemon)[0]["used"].as_u64().unwrap();
    assert!(used >= PAGED_MIB * MIB / 2, "{used} bytes are swapped out");
    refused(&daemon, &["swap", "remove", "swap0"], "hob swap off swap0");
    refused(&daemon, &["pool", "remove", "fast"], "has a swap area of the host: swap0");
    let file = text(&stage.pool_file());
    refused(&daemon, &["pool", "remove-device", "fast", &file], "has a swap area of the host: swap0");

    daemon.kill();
    assert!(is_on(&device), "swap needs no daemon");
    fs::write(dir.join("first"), "").unwrap();
    wait_for_pager(&mut pager, dir, "first-good");

    // Another daemon without the first daemon's state leaves the file unchanged.
    fs::rename(dir.join("state"), dir.join("state.away")).unwrap();
    let other = stage.scratch.start_daemon();
    refused(&other, &["pool", "create", "other", &file, "--force"], "is on /dev/loop");
    drop(other.stop());
    fs::remove_dir_all(dir.join("state")).unwrap();
    fs::rename(dir.join("state.away"), dir.join("state")).unwrap();

    let daemon = stage.scratch.start_daemon();
    let area = &areas(&daemon)[0];
    assert_eq!(
        (area["state"].as_str(), area["loop_device"].as_str()),
        (Some("on"), Some(&*device)),
        "{area}"
    );
    assert_eq!(loops_below(stage.disk.path()).len(), 1);
    let left = daemon.ctl(&["pool", "show", "fast"]);
    assert!(left.contains("SWAP OF THE HOST") && left.contains("35 MiB"), "{left}");

    daemon.ctl(&["swap", "off", "swap0"]);
    // Another test may use the number of the loop device now.
    wait_for("the loop device goes", || loops_below(stage.disk.path()).is_empty());
    fs::write(dir.join("all"), "").unwrap();
    wait_for_pager(&mut pager, dir, "all-good");
    assert!(pager.wait(PATIENCE).is_some_and(|status| status.success()), "{}", pager.stderr());

    daemon.ctl(&["swap", "remove", "swap0"]);
    assert!(areas(&daemon).is_empty());
    daemon.ctl(&["pool", "remove", "fast"]);
    drop(daemon.stop());
}

/// As after a restart of the host: areas that were on are turned on again, and others are not.
#[test]
fn active_swap_areas_are_turned_on_at_the_start() {
    let stage = Stage::new();
    let daemon = stage.with_pool(16);
    daemon.ctl(&["swap", "create", "a", "--size", "2M"]);
    daemon.ctl(&["swap", "create", "b", "--size", "2M", "--off"]);
    drop(daemon.stop());
    let before = loops_below(stage.disk.path());
    assert!(before.len() == 1 && is_on(&before[0]), "the end of the daemon is not the end of swap");
    // As the host does at shutdown.
    Tool::new("swapoff").arg(&before[0]).limit(PATIENCE).run();
    wait_for("the loop device goes", || loops_below(stage.disk.path()).is_empty());

    let daemon = stage.scratch.start_daemon();
    wait_for("it is on again", || areas(&daemon)[0]["state"] == "on");
    let states: Vec<Value> = areas(&daemon).iter().map(|area| area["state"].clone()).collect();
    assert_eq!(states, ["on", "off"]);
    daemon.ctl(&["swap", "off", "a"]);
    daemon.ctl(&["swap", "off", "b"]);
    drop(daemon.stop());
    let daemon = stage.scratch.start_daemon();
    assert!(areas(&daemon).iter().all(|area| area["state"] == "off"), "{:?}", areas(&daemon));
    drop(daemon.stop());
}

/// Unsafe areas on real filesystems.
#[test]
fn unsafe_swap_devices_are_refused() {
    let stage = Stage::new();
    let daemon = stage.with_pool(16);
    refused(&daemon, &["swap", "create", "--size", "15M"], "free in one piece");

    let memory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let file = text(&memory.path().join("flash"));
    daemon.ctl(&["pool", "create", "memory", &file, "--size", "16M", "--segment-size", "1M"]);
    refused(&daemon, &["swap", "create", "--size", "1M", "--pool", "memory"], "is in memory");
    refused(&daemon, &["swap", "create", "--size", "1M"], "choose one with --pool");

    // A disk that hob serves as a file, and a loop device over it: swapping to it would wait for a
    // program.
    let (scratch, served) = (Scratch::new(), Scratch::new());
    conformance::data::empty_file(&scratch.path("disk.img"), 32 * MIB);
    let unmount = Unmount::at(&served.path("vm.img"));
    let hob = Serve::disk(&scratch.text("disk.img")).arg("--fuse", &served.text("vm.img")).start(&scratch);
    let file = served.text("vm.img");
    daemon.ctl(&["pool", "create", "served", &file, "--segment-size", "1M"]);
    refused(&daemon, &["swap", "create", "--size", "1M", "--pool", "served"], "FUSE");
    daemon.ctl(&["pool", "remove", "served"]);
    {
        let over = Loop::on(&served.path("vm.img"), true);
        let device = over.device();
        daemon.ctl(&["pool", "create", "over", device, "--segment-size", "1M", "--force"]);
        refused(&daemon, &["swap", "create", "--size", "1M", "--pool", "over"], "FUSE");
        daemon.ctl(&["pool", "remove", "over"]);
    }
    drop(hob.stop());
    drop(unmount);

    // `hob serve` would forget its swap areas when it ends, so it refuses them.
    let serve =
        Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "8M", "4K").start(&scratch);
    let said = serve.try_ctl(&["swap", "create", "--size", "1M"]);
    assert!(!said.success() && said.all().contains("use 'hob daemon'"), "{}", said.all());
    drop(serve.stop());
    drop(daemon.stop());
}

/// If a file shares blocks with a copy, or has holes, hob repairs it before the kernel swaps to it.
#[test]
fn an_area_that_has_got_holes_is_not_swapped_to() {
    let stage = Stage::new();
    let daemon = stage.with_pool(16);
    daemon.ctl(&["swap", "create", "--size", "4M"]);
    let device = areas(&daemon)[0]["loop_device"].as_str().unwrap().to_owned();
    let offset = of_loop(&device, "offset");
    daemon.ctl(&["swap", "off", "swap0"]);
    let range = [format!("--offset={}", offset + MIB), format!("--length={MIB}")];
    Tool::new("fallocate").args(["--punch-hole"]).args(&range).arg(stage.pool_file()).run();
    refused(&daemon, &["swap", "on", "swap0"], "with holes where the area is");
    assert_eq!(areas(&daemon)[0]["state"], "off");
    assert!(loops_below(stage.disk.path()).is_empty());
    daemon.ctl(&["swap", "remove", "swap0"]);
    daemon.ctl(&["swap", "create", "--size", "4M"]);
    assert_eq!(areas(&daemon)[0]["state"], "on");
    daemon.ctl(&["swap", "off", "swap0"]);
    drop(daemon.stop());
}
