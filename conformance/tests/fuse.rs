//! Disks as files: calls of programs that open files, loop devices, and the start and end of the
//! daemon and of a disk.
//!
//! These tests mount filesystems, and so need root and /dev/fuse.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use conformance::data::{Noise, assert_same, assert_same_file, noise_file};
use conformance::scratch::wait_for;
use conformance::{Hob, Loop, MIB, Scratch, Serve, Tool, Unmount};

const SIZE: u64 = 64 * MIB;

const EPERM: i32 = 1;
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;
const ENOTCONN: i32 = 107;
const ECONNABORTED: i32 = 103;

/// Error codes of a read of a file that is no longer served.
const GONE: [i32; 2] = [ENOTCONN, ECONNABORTED];

/// A disk that is served as the file `vm.img`.
struct Stage {
    hob: Hob,
    // Dropped after the daemon and before the directory.
    _unmount: Unmount,
    scratch: Scratch,
}

impl Stage {
    fn of(size: u64, adapt: impl Fn(Serve) -> Serve) -> Stage {
        let scratch = Scratch::new();
        noise_file(&scratch.path("disk.img"), size, 7);
        let unmount = Unmount::at(&scratch.path("vm.img"));
        let serve = adapt(Serve::disk(&scratch.text("disk.img"))).arg("--fuse", &scratch.text("vm.img"));
        Stage { hob: serve.start(&scratch), _unmount: unmount, scratch }
    }

    fn cached() -> Stage {
        let scratch = Scratch::new();
        noise_file(&scratch.path("disk.img"), SIZE, 7);
        let unmount = Unmount::at(&scratch.path("vm.img"));
        Stage { hob: cached(&scratch).start(&scratch), _unmount: unmount, scratch }
    }

    fn open(&self) -> File {
        open(&self.scratch.path("vm.img"))
    }
}

fn cached(scratch: &Scratch) -> Serve {
    let serve = Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "32M", "4K");
    serve.arg("--fuse", &scratch.text("vm.img"))
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[track_caller]
fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().expect("an error of the system")
}

#[track_caller]
fn fio(file: &Path, engine: &[&str]) {
    Tool::new("fio")
        .args(["--name=verify", "--rw=randwrite", "--bsrange=512-1M", "--blockalign=512"])
        .arg(format!("--filename={}", file.display()))
        .arg(format!("--size={SIZE}"))
        .args(["--serialize_overlap=1", "--verify=crc32c", "--do_verify=1", "--verify_fatal=1"])
        .args(["--verify_backlog=64", "--verify_state_save=0", "--output-format=terse"])
        .args(engine)
        .limit(Duration::from_secs(600))
        .run();
}

#[test]
fn fio_verifies_with_every_kind_of_io() {
    for ring in ["io_uring", "threads"] {
        let stage = Stage::of(SIZE, |serve| serve.ring(ring));
        let file = stage.scratch.path("vm.img");
        fio(&file, &["--ioengine=libaio", "--direct=1", "--iodepth=32"]);
        fio(&file, &["--ioengine=psync", "--direct=0"]);
        stage.hob.stop();
    }
    let stage = Stage::cached();
    let file = stage.scratch.path("vm.img");
    fio(&file, &["--ioengine=io_uring", "--direct=1", "--iodepth=32"]);
    fio(&file, &["--ioengine=mmap"]);
    assert!(stage.hob.stats().hits() > 0, "{}", stage.hob.stats().text());
    stage.hob.stop();
}

/// The attributes of the file, and the calls that it refuses.
#[test]
fn the_file_is_the_disk_and_keeps_its_size() {
    let stage = Stage::of(SIZE - 512, |serve| serve);
    let path = stage.scratch.path("vm.img");
    let found = fs::metadata(&path).unwrap();
    assert!(found.is_file());
    assert_eq!((found.len(), found.mode() & 0o7777, found.uid()), (SIZE - 512, 0o600, 0));
    let image = stage.scratch.read("disk.img");
    assert_same(&fs::read(&path).unwrap(), &image, 0, "the whole file");
    let file = stage.open();
    assert_eq!(errno(file.set_len(SIZE)), EPERM);
    assert_eq!(errno(file.set_len(4096)), EPERM);
    assert_eq!(errno(OpenOptions::new().write(true).truncate(true).open(&path)), EPERM);
    assert_eq!(errno(file.write_at(b"x", SIZE)), ENOSPC);
    assert_eq!(file.read_at(&mut [0; 100], SIZE).unwrap(), 0, "beyond the end");
    // A write past the end is cut at the end.
    assert_eq!(file.write_at(&[7; 4096], SIZE - 1024).unwrap(), 512);
    assert_eq!(file.read_at(&mut [0; 4096], SIZE - 1024).unwrap(), 512);
    assert_eq!(fs::metadata(&path).unwrap().len(), SIZE - 512);
    // The owner and the mode can be changed, as libvirt does.
    Tool::new("chown").args(["1234:5678"]).arg(&path).run();
    Tool::new("chmod").arg("0640").arg(&path).run();
    let found = fs::metadata(&path).unwrap();
    assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777), (1234, 5678, 0o640));
    drop(file);
    stage.hob.stop();
    assert!(!path.exists(), "the file that was made for it goes with it");
}

/// Holes and zeroed ranges read as zeroes, on the backing too, exactly to the byte.
#[test]
fn ranges_are_zeroed_to_the_byte() {
    let stage = Stage::cached();
    let path = stage.scratch.path("vm.img");
    let mut image = stage.scratch.read("disk.img");
    for (mode, offset, len) in [
        ("--punch-hole", MIB, 3 * MIB),
        ("--zero-range", 8 * MIB + 4096, 40 * MIB),
        ("--punch-hole", 50 * MIB + 100, 5000),
        ("--zero-range", 60 * MIB + 1, 1),
    ] {
        let range = [format!("--offset={offset}"), format!("--length={len}")];
        Tool::new("fallocate").arg(mode).arg("--keep-size").args(&range).arg(&path).run();
        image[offset as usize..(offset + len) as usize].fill(0);
    }
    let plain = Tool::new("fallocate").args(["--length=4096"]).arg(&path).run_failing();
    assert!(plain.all().contains("not supported"), "{}", plain.all());
    assert_same(&fs::read(&path).unwrap(), &image, 0, "the file");
    stage.open().sync_all().unwrap();
    stage.hob.stop();
    let backing = stage.scratch.read("disk.img");
    assert_same(&backing, &image, 0, "the backing");
}

/// Promise 2 for two front ends: reads of a file return the writes over NBD, and vice versa.
#[test]
fn both_ways_to_a_disk_show_the_same() {
    let stage = Stage::cached();
    let file = stage.open();
    let mut client = stage.hob.connect();
    let mut random = Noise::new(3);
    for round in 0..200 {
        let offset = random.below(SIZE - 70_000);
        let len = 1 + random.below(66_000) as usize;
        let bytes = random.bytes(len);
        let mut read = vec![0; bytes.len()];
        if round % 2 == 0 {
            client.write(offset, &bytes).unwrap();
            file.read_exact_at(&mut read, offset).unwrap();
        } else {
            file.write_all_at(&bytes, offset).unwrap();
            read = client.read(offset, bytes.len() as u32).unwrap();
        }
        assert_same(&read, &bytes, offset, "the other way");
    }
    drop((file, client));
    stage.hob.stop();
}

/// Programs such as rsync copy a file again only if its times have changed.
#[test]
fn the_times_show_changes_by_any_client() {
    let stage = Stage::cached();
    let path = stage.scratch.path("vm.img");
    let times = || {
        // The kernel may return attributes that are up to 1 s old.
        std::thread::sleep(Duration::from_millis(1_200));
        let found = fs::metadata(&path).unwrap();
        assert_eq!(found.mtime(), found.ctime());
        found.mtime()
    };
    let first = times();
    let mut client = stage.hob.connect();
    client.read(0, 4096).unwrap();
    assert_eq!(times(), first, "reads change nothing");
    client.write(0, &[1; 4096]).unwrap();
    let second = times();
    assert!(second > first);
    stage.open().write_all_at(&[2; 4096], 4096).unwrap();
    let third = times();
    assert!(third > second);
    client.write_zeroes(0, 4096).unwrap();
    assert!(times() > third);
    // The kernel passes each change of the mode to hob, which replies with the times.
    let file = stage.open();
    for round in 0..100 {
        client.write(0, &[round; 4096]).unwrap();
        file.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
    }
    let last = file.metadata().unwrap().modified().unwrap();
    assert!(last <= std::time::SystemTime::now(), "the times are not in the future");
    drop((file, client));
    stage.hob.stop();
}

#[test]
fn a_disk_that_is_read_only_is_a_file_that_is() {
    let stage = Stage::of(SIZE, |serve| serve.flag("--read-only"));
    let path = stage.scratch.path("vm.img");
    assert_eq!(errno(OpenOptions::new().write(true).open(&path)), EROFS);
    assert_same_file(&path, &stage.scratch.path("disk.img"));
    stage.hob.stop();
}

/// ext4 and XFS on a loop device over the file, which uses direct I/O or the host's page cache.
#[test]
fn file_systems_live_on_loop_devices() {
    for (kind, make, direct) in [
        ("ext4", &["mkfs.ext4", "-q", "-F"][..], false),
        ("ext4", &["mkfs.ext4", "-q", "-F"], true),
        ("xfs", &["mkfs.xfs", "-q", "-f"], true),
    ] {
        // The minimum size of XFS.
        let stage = Stage::of(if kind == "xfs" { 320 * MIB } else { SIZE }, |serve| serve);
        let (backing, at) = (stage.scratch.path("disk.img"), stage.scratch.path("mnt"));
        let tree = stage.scratch.path("tree");
        make_tree(&tree);
        let device = Loop::on(&stage.scratch.path("vm.img"), direct);
        assert_eq!(device.column("DIO"), if direct { "1" } else { "0" });
        Tool::new(make[0]).args(&make[1..]).arg(device.device()).run();
        let mounted = device.mount(&at, "discard");
        Tool::new("cp").arg("-a").arg(&tree).arg(&at).run();
        fs::remove_dir_all(at.join("tree/dir3")).unwrap();
        Tool::new("fstrim").arg(&at).run();
        Tool::new("cp").arg("-a").arg(tree.join("dir3")).arg(at.join("tree")).run();
        mounted.unmount();
        drop(device);
        stage.hob.stop();
        // Without hob: the filesystem has no errors and all files.
        let device = Loop::on(&backing, false);
        let check: &[&str] = if kind == "xfs" { &["xfs_repair", "-n"] } else { &["e2fsck", "-f", "-n"] };
        Tool::new(check[0]).args(&check[1..]).arg(device.device()).run();
        let mounted = device.mount(&at, "ro");
        Tool::new("diff").arg("-r").arg(&tree).arg(at.join("tree")).run();
        mounted.unmount();
    }
}

/// Creates directories with files of many sizes.
fn make_tree(root: &Path) {
    let mut random = Noise::new(11);
    for dir in 0..6 {
        let dir = root.join(format!("dir{dir}"));
        fs::create_dir_all(&dir).unwrap();
        for file in 0..30 {
            let len = if file == 0 { 2_000_000 } else { random.below(60_000) as usize };
            fs::write(dir.join(format!("file{file}")), random.bytes(len)).unwrap();
        }
    }
}

/// The daemon is killed: a program with an open file gets an error and does not hang. The next
/// daemon cleans up.
#[test]
fn open_files_of_a_killed_daemon_fail_and_the_next_daemon_cleans_up() {
    let stage = Stage::cached();
    let path = stage.scratch.path("vm.img");
    let mut image = stage.scratch.read("disk.img");
    let file = stage.open();
    file.write_all_at(&[5; 8192], 4096).unwrap();
    image[4096..12288].fill(5);
    // Reads are in flight when the daemon is killed.
    let reader = std::thread::spawn({
        let file = stage.open();
        move || {
            let start = Instant::now();
            let mut bytes = vec![0; 1 << 20];
            loop {
                match file.read_at(&mut bytes, 0) {
                    Ok(_) => assert!(start.elapsed() < Duration::from_secs(60), "nobody was killed"),
                    Err(error) => return error.raw_os_error().unwrap(),
                }
            }
        }
    });
    std::thread::sleep(Duration::from_millis(200));
    let Stage { hob, _unmount, scratch } = stage;
    hob.kill();
    wait_for("the reads to end", || reader.is_finished());
    assert!(GONE.contains(&reader.join().unwrap()));
    assert!(GONE.contains(&errno(file.read_at(&mut [0; 512], 0))));
    assert_eq!(errno(fs::metadata(&path)), ENOTCONN);
    let hob = cached(&scratch).start(&scratch);
    assert_same(&fs::read(&path).unwrap(), &image, 0, "after the restart");
    // Files that were open before still return errors.
    assert!(GONE.contains(&errno(file.read_at(&mut [0; 512], 0))));
    drop(file);
    hob.stop();
    assert_eq!(fs::metadata(&path).unwrap().len(), 0, "nothing is mounted any more");
}

/// A disk with an open file is not removed. The end of the daemon waits for no program.
#[test]
fn open_files_keep_disks_and_not_daemons() {
    let scratch = Scratch::new();
    let _unmounts = ["a.img", "b.img"].map(|name| Unmount::at(&scratch.path(name)));
    noise_file(&scratch.path("disk.img"), SIZE, 7);
    noise_file(&scratch.path("other.img"), SIZE, 8);
    noise_file(&scratch.path("third.img"), MIB, 9);
    // An existing file is covered, and the disk's file has its owner and mode.
    let mut below = OpenOptions::new();
    below.write(true).create(true).mode(0o640).open(scratch.path("b.img")).unwrap();
    let config = format!(
        "state_dir = \"{}\"\n[control]\nlisten = [\"unix:{}\"]\n[[disk]]\nname = \"other\"\nbacking = \"{}\"\nfuse = \"{}\"\n",
        scratch.text("state"),
        scratch.text("ctl.sock"),
        scratch.text("other.img"),
        scratch.text("b.img"),
    );
    scratch.write_config(config);
    let start = || {
        let daemon = scratch.start_daemon();
        // The daemon's socket answers when its disks exist.
        daemon.ctl(&["disk", "list"]);
        daemon
    };
    let daemon = start();
    assert_eq!(fs::metadata(scratch.path("b.img")).unwrap().mode() & 0o7777, 0o640);
    assert_same_file(&scratch.path("b.img"), &scratch.path("other.img"));
    let (disk, a) = (scratch.text("disk.img"), scratch.text("a.img"));
    let shown = daemon.ctl(&["disk", "add", "vm", "--backing", &disk, "--fuse", &a]);
    assert!(shown.contains(&a), "{shown}");
    for (path, wrong) in [
        (a.clone(), "is the file of vm"),
        (scratch.text("none/x"), "No such file"),
        (scratch.text("state"), "not a regular file"),
        (scratch.text("third.img"), "backing"),
    ] {
        let backing = scratch.text("third.img");
        let add =
            daemon.try_ctl(&["disk", "add", "x", "--backing", &backing, "--fuse", &path, "--read-only"]);
        assert!(!add.success() && add.all().contains(wrong), "{path}: {}", add.all());
    }
    let file = open(Path::new(&a));
    let refused = daemon.try_ctl(&["disk", "remove", "vm"]);
    assert!(!refused.success() && refused.all().contains("in use"), "{}", refused.all());
    assert_eq!(file.read_at(&mut [0; 4096], 0).unwrap(), 4096, "it is still served");
    // Both files exist again after a restart; the open file returns errors.
    daemon.stop();
    assert!(GONE.contains(&errno(file.read_at(&mut [0; 512], 0))));
    assert!(!Path::new(&a).exists());
    assert_eq!(fs::metadata(scratch.path("b.img")).unwrap().len(), 0);
    drop(file);
    let daemon = start();
    assert_same_file(Path::new(&a), &scratch.path("disk.img"));
    daemon.ctl_when_unused(&["disk", "remove", "vm"]);
    assert!(!Path::new(&a).exists());
    daemon.stop();
}

/// Another program unmounts the file, so the path shows an empty file. hob reports that, and mounts
/// the file again by command.
#[test]
fn a_file_that_another_program_unmounts_is_reported() {
    let scratch = Scratch::new();
    let path = scratch.text("vm.img");
    let _unmount = Unmount::at(&scratch.path("vm.img"));
    noise_file(&scratch.path("disk.img"), MIB, 7);
    let backing = scratch.text("disk.img");
    scratch.configure(&format!("[[disk]]\nname = \"vm\"\nbacking = \"{backing}\"\nfuse = \"{path}\"\n"));
    let daemon = scratch.start_daemon();
    wait_for("the file", || fs::metadata(&path).is_ok_and(|found| found.len() == MIB));
    Tool::new("umount").arg(&path).run();
    let health = || daemon.try_ctl(&["health"]).all();
    wait_for("the report", || health().contains("another program has unmounted its file"));
    assert!(daemon.ctl(&["disk", "show", "vm"]).contains("has unmounted"));
    daemon.ctl(&["disk", "set", "vm", "--fuse", ""]);
    daemon.ctl(&["disk", "set", "vm", "--fuse", &path]);
    assert_same_file(Path::new(&path), &scratch.path("disk.img"));
    assert!(!health().contains("unmounted"), "{}", health());
    daemon.stop();
}

/// Another program renames the directory of the file, or mounts a file system over the file. hob
/// reports that until the change is undone.
#[test]
fn a_file_that_another_program_moves_or_covers_is_reported() {
    let scratch = Scratch::new();
    let [dir, moved] = ["dir", "moved"].map(|name| scratch.path(name));
    fs::create_dir(&dir).unwrap();
    let path = dir.join("vm.img");
    let _unmount = [Unmount::at(&path), Unmount::at(&moved.join("vm.img"))];
    noise_file(&scratch.path("disk.img"), MIB, 7);
    noise_file(&scratch.path("other"), 4096, 8);
    let (backing, fuse) = (scratch.text("disk.img"), path.display());
    scratch.configure(&format!("[[disk]]\nname = \"vm\"\nbacking = \"{backing}\"\nfuse = \"{fuse}\"\n"));
    let daemon = scratch.start_daemon();
    wait_for("the file", || fs::metadata(&path).is_ok_and(|found| found.len() == MIB));
    let health = || daemon.try_ctl(&["health"]).all();
    fs::rename(&dir, &moved).unwrap();
    let expected = format!("another program has moved its file {fuse} to {}", moved.join("vm.img").display());
    wait_for("the report of the move", || health().contains(&expected));
    assert_same_file(&moved.join("vm.img"), &scratch.path("disk.img"));
    fs::rename(&moved, &dir).unwrap();
    wait_for("the end of the report", || !health().contains("has moved"));
    Tool::new("mount").arg("--bind").arg(scratch.path("other")).arg(&path).run();
    let expected = format!("another program has mounted a file system over its file {fuse}");
    wait_for("the report of the mount", || health().contains(&expected));
    Tool::new("umount").arg(&path).run();
    wait_for("the end of the report", || !health().contains("has mounted"));
    assert_same_file(&path, &scratch.path("disk.img"));
    daemon.stop();
}

/// The file grows together with the disk, and programs with an open file can use the new part.
#[test]
fn a_file_grows_with_its_disk() {
    let stage = Stage::cached();
    let path = stage.scratch.path("vm.img");
    let (file, mapped) = (stage.open(), stage.open());
    let mut before = [0; 4096];
    file.read_exact_at(&mut before, SIZE - 4096).unwrap();
    assert_eq!(path.metadata().unwrap().len(), SIZE);
    assert_eq!(errno(file.write_at(&[7; 4096], SIZE)), ENOSPC);
    stage.hob.ctl(&["disk", "resize", "disk", "--size", "80M"]);
    for size in [path.metadata(), file.metadata(), mapped.metadata()].map(|found| found.unwrap().len()) {
        assert_eq!(size, 80 * MIB, "at once");
    }
    file.write_all_at(&[7; 8192], 80 * MIB - 8192).unwrap();
    let mut found = [0; 8192];
    mapped.read_exact_at(&mut found, 80 * MIB - 8192).unwrap();
    assert_eq!(found, [7; 8192]);
    assert_eq!(errno(file.write_at(&[7; 4096], 80 * MIB)), ENOSPC);
    assert_eq!(errno(file.set_len(SIZE)), EPERM, "programs change nothing");
    let after = fs::read(&path).unwrap();
    assert_eq!((after.len() as u64, &after[SIZE as usize - 4096..SIZE as usize]), (80 * MIB, &before[..]));
    drop((file, mapped));
    stage.hob.stop();
}
