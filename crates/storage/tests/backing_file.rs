//! Raw files as backings, with both kinds of ring.

mod common;

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Rig, both_kinds, impatient, options, pattern};
use hob_engine::command::Access;
use hob_engine::io::{Durability, IoError, IoOp, Zeroing};
use hob_engine::units::IoId;
use hob_storage::backing::{Backing, BackingOptions, ModelledOp, OpenError, ServiceTime, StatusExtent};
use hob_storage::ring::{Gate, RingKind};

fn image(dir: &Path, bytes: u64) -> PathBuf {
    let path = dir.join("disk.img");
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

#[test]
fn files_do_all_there_is_to_do() {
    both_kinds(|kind| {
        for (place, direct) in [("/tmp", true), ("/tmp", false), ("/dev/shm", true)] {
            let dir = tempfile::tempdir_in(place).unwrap();
            let path = image(dir.path(), 8 << 20);
            let options = hob_storage::backing::BackingOptions { direct, ..options() };
            let backing = Backing::open(path.to_str().unwrap(), Access::ReadWrite, &options).unwrap();
            let mut rig = Rig::of(kind, backing);
            rig.exercise();
            rig.close();
        }
    });
}

#[test]
fn unaligned_neighbours_do_not_disturb_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), 1 << 20);
    let mut rig = Rig::open(RingKind::IoUring, path.to_str().unwrap(), Access::ReadWrite);
    let mut model = vec![0; 1 << 20];
    let mut rng = 1u64;
    for round in 0..60 {
        // Each I/O of a round keeps to its own sectors, as the engine sees to it.
        let mut ids = Vec::new();
        for lane in 0..8usize {
            let mut roll = |n: u64| {
                rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (rng >> 33) % n
            };
            let base = lane * (128 << 10);
            let (offset, len) = (base + roll(60_000) as usize, 1 + roll(60_000) as usize);
            let data = pattern(len, round * 8 + lane as u32);
            model[offset..offset + len].copy_from_slice(&data);
            let op = IoOp::Write(Durability::Volatile);
            ids.push((rig.start(op, offset as u64, len as u64, Some(&data)), offset));
        }
        for (id, offset) in ids {
            rig.wait(id).unwrap();
            rig.take(id, offset as u64, 0);
        }
        rig.run(IoOp::Flush, 0, 0).unwrap();
        assert!(rig.read(0, 1 << 20).unwrap() == model, "round {round}");
    }
    rig.close();
    assert!(std::fs::read(path).unwrap() == model);
}

/// A gate that lets a given number of changes begin.
#[derive(Debug, Default)]
struct Counted {
    left: AtomicUsize,
    asked: AtomicUsize,
}

impl Gate for Counted {
    fn is_open(&self) -> bool {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let pass = |left: usize| left.checked_sub(1);
        self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, pass).is_ok()
    }
}

/// Returns a disk with a gate, whose 16 blocks contain only ones. A change of each block is in
/// flight.
fn behind_a_gate(
    kind: RingKind,
    options: &BackingOptions,
    op: IoOp,
    (offset, len): (u64, u64),
) -> (Rig, Arc<Counted>, PathBuf, Vec<IoId>) {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap().keep();
    let path = dir.join("disk.img");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let backing = Backing::open(path.to_str().unwrap(), Access::ReadWrite, options).unwrap();
    let mut rig = Rig::of(kind, backing);
    let gate = Arc::new(Counted::default());
    rig.backing.set_gate(&mut rig.ring, gate.clone());
    let data = vec![2; len as usize];
    let data = matches!(op, IoOp::Write(_)).then_some(&data[..]);
    let ids = (0..16u64).map(|block| rig.start(op, (block << 16) + offset, len, data)).collect();
    (rig, gate, path, ids)
}

/// Returns the number of blocks of the file that do not contain only ones.
fn changed_blocks(path: &Path) -> usize {
    std::fs::read(path).unwrap().chunks(1 << 16).filter(|block| block.iter().any(|byte| *byte != 1)).count()
}

const CHANGES: [(IoOp, (u64, u64)); 5] = [
    (IoOp::Write(Durability::Volatile), (0, 8192)),
    (IoOp::Write(Durability::Durable), (4096, 4096)),
    (IoOp::Write(Durability::Volatile), (4000, 500)),
    (IoOp::WriteZeroes(Zeroing::MayUnmap), (0, 4096)),
    (IoOp::Discard, (0, 4096)),
];

#[test]
fn changes_wait_until_the_gate_opens() {
    both_kinds(|kind| {
        for (op, range) in CHANGES {
            let (mut rig, gate, path, ids) = behind_a_gate(kind, &options(), op, range);
            while gate.asked.load(Ordering::SeqCst) < 100 {
                rig.turn();
            }
            assert!(rig.done.is_empty());
            assert_eq!(changed_blocks(&path), 0, "{op:?} {range:?}");
            gate.left.store(usize::MAX, Ordering::SeqCst);
            ids.into_iter().for_each(|id| rig.wait(id).unwrap());
            assert_eq!(changed_blocks(&path), 16, "{op:?} {range:?}");
            rig.close();
            std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
        }
    });
}

#[test]
fn each_change_asks_the_gate_just_before_it_begins() {
    both_kinds(|kind| {
        for (op, range) in CHANGES {
            let (mut rig, gate, path, ids) = behind_a_gate(kind, &options(), op, range);
            gate.left.store(5, Ordering::SeqCst);
            while gate.asked.load(Ordering::SeqCst) < 100 {
                rig.turn();
            }
            let changed = changed_blocks(&path);
            // With io_uring, an attempt that would wait asks too, and a thread asks again.
            let least = usize::from(kind == RingKind::Threads);
            assert!((least..=5).contains(&changed), "{op:?} {range:?}: {changed}");
            let now = rig.now();
            rig.backing.revoke(&mut rig.ring, now);
            let ended: Vec<_> = ids.into_iter().map(|id| rig.wait(id)).collect();
            assert!(ended.iter().filter(|result| result.is_ok()).count() <= changed);
            assert!(ended.contains(&Err(IoError::ShuttingDown)));
            assert_eq!(changed_blocks(&path), changed, "a change was made on a lost disk");
            rig.close();
            std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
        }
    });
}

#[test]
fn a_change_that_the_gate_stops_for_too_long_fails() {
    let (op, range) = CHANGES[0];
    let start = Instant::now();
    let (mut rig, _, path, ids) = behind_a_gate(RingKind::IoUring, &impatient(), op, range);
    for id in ids {
        assert_eq!(rig.wait(id), Err(IoError::Failed));
    }
    assert!(start.elapsed() > impatient().wait_max / 2);
    assert_eq!(changed_blocks(&path), 0);
    rig.close();
    std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
}

#[test]
fn holes_are_seen() {
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let path = image(dir.path(), 4 << 20);
    let mut rig = Rig::open(RingKind::IoUring, path.to_str().unwrap(), Access::ReadWrite);
    rig.write(IoOp::Write(Durability::Durable), 1 << 20, &[1; 1 << 20]).unwrap();
    let hole = |len| StatusExtent { len, hole: true, zero: true };
    let data = |len| StatusExtent { len, hole: false, zero: false };
    assert_eq!(rig.status(0, 4 << 20).unwrap(), [hole(1 << 20), data(1 << 20), hole(2 << 20)]);
    assert_eq!(rig.status((1 << 20) + 4096, 8192).unwrap(), [data(8192)]);
    rig.run(IoOp::Discard, 1 << 20, 1 << 20).unwrap();
    assert_eq!(rig.status(0, 4 << 20).unwrap(), [hole(4 << 20)]);
    rig.close();
}

#[test]
fn unfit_files_are_refused_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let open = |path: &Path| Backing::open(path.to_str().unwrap(), Access::ReadWrite, &options());
    let odd = image(dir.path(), 1000);
    let error = open(&odd).unwrap_err();
    assert!(matches!(error, OpenError::Unfit { .. }) && error.to_string().contains("truncate"), "{error}");
    File::create(&odd).unwrap();
    assert!(matches!(open(&odd), Err(OpenError::Unfit { .. })));
    assert!(matches!(open(dir.path()), Err(OpenError::Unfit { .. } | OpenError::System { .. })));
    assert!(matches!(open(&dir.path().join("missing")), Err(OpenError::System { .. })));
}

#[test]
fn one_writer_or_many_readers() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), 1 << 20);
    let open = |access| Backing::open(path.to_str().unwrap(), access, &options());
    let writer = open(Access::ReadWrite).unwrap();
    assert!(matches!(open(Access::ReadWrite), Err(OpenError::InUse { .. })));
    assert!(matches!(open(Access::ReadOnly), Err(OpenError::InUse { .. })));
    // The lock lasts as long as the ring has the file.
    let mut rig = Rig::of(RingKind::IoUring, writer);
    assert!(matches!(open(Access::ReadOnly), Err(OpenError::InUse { .. })));
    rig.close();
    drop(rig);
    let reader = open(Access::ReadOnly).unwrap();
    let _other = open(Access::ReadOnly).unwrap();
    assert!(matches!(open(Access::ReadWrite), Err(OpenError::InUse { .. })));
    let mut rig = Rig::of(RingKind::IoUring, reader);
    assert!(rig.backing.info().read_only);
    assert_eq!(rig.write(IoOp::Write(Durability::Volatile), 0, &[1; 512]), Err(IoError::ReadOnly));
    assert_eq!(rig.run(IoOp::Discard, 0, 512), Err(IoError::ReadOnly));
    assert_eq!(rig.read(0, 512), Ok(vec![0; 512]));
    rig.close();
}

#[test]
fn a_truncated_backing_is_an_error_not_zeroes() {
    both_kinds(|kind| {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        let path = image(dir.path(), 1 << 20);
        let mut rig = Rig::open(kind, path.to_str().unwrap(), Access::ReadWrite);
        OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
        assert_eq!(rig.read(0, 4096), Ok(vec![0; 4096]));
        assert_eq!(rig.read(0, 8192), Err(IoError::Failed));
        assert_eq!(rig.read(512 << 10, 4096), Err(IoError::Failed));
        rig.close();
    });
}

struct Slow;

impl ServiceTime for Slow {
    fn submit(&mut self, now_ns: u64, op: ModelledOp, _offset: u64, len: u64) -> u64 {
        assert_eq!((op, len), (ModelledOp::Read, 4096));
        now_ns + 30_000_000
    }
}

#[test]
fn a_modelled_backing_takes_its_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), 1 << 20);
    std::fs::write(&path, pattern(1 << 20, 5)).unwrap();
    let backing = Backing::open(path.to_str().unwrap(), Access::ReadWrite, &options()).unwrap();
    let mut rig = Rig::of(RingKind::IoUring, backing.modelled(Box::new(Slow)));
    let start = Instant::now();
    assert!(rig.read(4096, 4096).unwrap() == pattern(1 << 20, 5)[4096..8192]);
    assert!(start.elapsed() >= Duration::from_millis(30));
    let id = rig.start(IoOp::Read, 0, 4096, None);
    rig.close();
    rig.wait(id).unwrap();
}

#[test]
fn a_file_is_known_again_and_another_one_is_not_taken_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), 1 << 20);
    let info = |path: &Path| {
        Backing::open(path.to_str().unwrap(), Access::ReadWrite, &options()).unwrap().info().clone()
    };
    let first = info(&path);
    assert!(first.identity_text.starts_with("file with inode "), "{}", first.identity_text);
    assert!(first.identity_text.ends_with(", 1048576 bytes"));
    // Under another name it is the same; a copy under the same name is another.
    let moved = dir.path().join("moved");
    std::fs::rename(&path, &moved).unwrap();
    assert_eq!((info(&moved).identity, info(&moved).identity_text), (first.identity, first.identity_text));
    std::fs::copy(&moved, &path).unwrap();
    assert_ne!(info(&path).identity, first.identity);
    OpenOptions::new().write(true).open(&moved).unwrap().set_len(2 << 20).unwrap();
    assert_ne!(info(&moved).identity, first.identity, "another size");
}

#[test]
fn a_file_grows_while_it_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), 1 << 20);
    let mut rig = Rig::open(RingKind::Threads, path.to_str().unwrap(), Access::ReadWrite);
    let gauge = rig.backing.size_probe().unwrap();
    assert_eq!((gauge.size_bytes().unwrap(), gauge.is_file()), (1 << 20, true));
    gauge.grow(512 << 10).unwrap();
    assert_eq!(path.metadata().unwrap().len(), 1 << 20, "it does not shrink");
    gauge.grow(2 << 20).unwrap();
    assert_eq!((gauge.size_bytes().unwrap(), path.metadata().unwrap().len()), (2 << 20, 2 << 20));
    assert_eq!(rig.backing.info().size_bytes, 1 << 20, "nobody said that the disk is larger");
    let before = rig.backing.info().clone();
    rig.backing.grow(2 << 20);
    let after = rig.backing.info().clone();
    assert_eq!((after.identity_at(1 << 20), after.size_bytes), (Some(before.identity), 2 << 20));
    rig.write(IoOp::Write(Durability::Volatile), (2 << 20) - 4096, &pattern(4096, 9)).unwrap();
    assert_eq!(rig.read((2 << 20) - 4096, 4096).unwrap(), pattern(4096, 9));
    let status = rig.status(1 << 20, 1 << 20).unwrap();
    assert_eq!(status.iter().map(|extent| extent.len).sum::<u64>(), 1 << 20, "{status:?}");
    rig.close();
    drop(rig);
    assert!(gauge.size_bytes().is_err() && gauge.grow(4 << 20).is_err(), "the backing is gone");
    let opened = Backing::open(path.to_str().unwrap(), Access::ReadWrite, &options()).unwrap();
    assert_eq!(opened.info().identity, after.identity, "it is what it would be, opened with that size");
}

#[test]
fn a_change_behind_the_back_shows() {
    use std::os::unix::fs::FileExt;
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), 1 << 20);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    let mut rig = Rig::open(RingKind::Threads, path.to_str().unwrap(), Access::ReadWrite);
    let at_open = rig.backing.info().changed.unwrap();
    assert_eq!(at_open.size_bytes, 1 << 20);
    // Timestamps are as fine as the kernel's tick.
    std::thread::sleep(Duration::from_millis(20));
    rig.write(IoOp::Write(Durability::Volatile), 0, &[7; 4096]).unwrap();
    assert_eq!(rig.backing.change_mark(), None, "asking may block its shard");
    rig.close();
    let at_close = rig.backing.change_mark().unwrap();
    assert!(at_close.modified_ns > at_open.modified_ns, "its own writes count");
    drop(rig);
    let changed =
        || Backing::open(path.to_str().unwrap(), Access::ReadWrite, &options()).unwrap().info().changed;
    assert_eq!(changed(), Some(at_close), "nothing happened");
    std::thread::sleep(Duration::from_millis(20));
    file.write_all_at(b"!", 77).unwrap();
    assert_ne!(changed(), Some(at_close));
}

#[test]
fn samples_are_read_before_there_is_a_ring() {
    for place in ["/tmp", "/dev/shm"] {
        let dir = tempfile::tempdir_in(place).unwrap();
        let path = image(dir.path(), 1 << 20);
        let content = pattern(1 << 20, 4);
        std::fs::write(&path, &content).unwrap();
        let mut backing = Backing::open(path.to_str().unwrap(), Access::ReadWrite, &options()).unwrap();
        for (offset, len) in [(0, 4096), (8192, 4096), ((1 << 20) - 512, 512), (100, 33)] {
            let mut bytes = vec![0; len];
            backing.read_before_attach(offset as u64, &mut bytes).unwrap();
            assert!(bytes == content[offset..offset + len]);
        }
        for offset in [1 << 20, (1 << 20) - 4095, u64::MAX] {
            assert_eq!(backing.read_before_attach(offset, &mut [0; 4096]), Err(IoError::Invalid));
        }
        OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
        assert_eq!(backing.read_before_attach(8192, &mut [0; 4096]), Err(IoError::Failed));
        let reader = backing.reader().expect("a file can be read by many");
        let mut rig = Rig::of(RingKind::IoUring, backing);
        assert!(rig.read(0, 4096).unwrap() == content[..4096]);
        // While it is served too, and then it is what was written last.
        let (newer, mut bytes) = (pattern(4096, 5), vec![0; 4096]);
        reader.read(0, &mut bytes).unwrap();
        assert!(bytes == content[..4096]);
        rig.write(IoOp::Write(Durability::Volatile), 0, &newer).unwrap();
        reader.read(0, &mut bytes).unwrap();
        assert!(bytes == newer);
        rig.close();
    }
}

#[test]
fn changes_past_the_end_of_a_file_that_shrank_fail_and_do_not_extend_it() {
    both_kinds(|kind| {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        let path = image(dir.path(), 1 << 20);
        let mut rig = Rig::open(kind, path.to_str().unwrap(), Access::ReadWrite);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let size = || file.metadata().unwrap().len();
        let write = IoOp::Write(Durability::Volatile);
        rig.write(write, 512 << 10, &[1; 4096]).unwrap();
        file.set_len(8192).unwrap();
        for at in [4096, 8192, 512 << 10, (1 << 20) - 8192] {
            assert_eq!(rig.write(write, at, &[1; 8192]), Err(IoError::Failed), "{at}");
        }
        assert_eq!(rig.run(IoOp::WriteZeroes(Zeroing::MayUnmap), 4096, 8192), Err(IoError::Failed));
        assert_eq!(rig.run(IoOp::Discard, 8192, 4096), Err(IoError::Failed));
        rig.write(write, 0, &[2; 8192]).unwrap();
        assert_eq!(size(), 8192);
        file.set_len(1 << 20).unwrap();
        rig.write(write, 512 << 10, &[3; 4096]).unwrap();
        assert_eq!(size(), 1 << 20);
        rig.close();
    });
}

#[test]
fn qemu_and_hob_keep_each_other_from_writing_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), 1 << 20);
    let disk = path.to_str().unwrap();
    let open = |access| Backing::open(disk, access, &options());
    let qemu_io = |args: &[&str]| {
        let output = Command::new("qemu-io").args(args).output().expect("qemu-io is installed");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        (output.status.success(), said)
    };
    let write = ["-f", "raw", "-c", "write 0 4k", disk];
    for access in [Access::ReadWrite, Access::ReadOnly] {
        let held = open(access).unwrap();
        let (is_done, said) = qemu_io(&write);
        assert!(!is_done && said.contains("lock"), "{said}");
        // A migration lets go of the lock.
        held.lock().unwrap().release().unwrap();
        assert!(qemu_io(&write).0);
        held.lock().unwrap().take().unwrap();
        assert!(!qemu_io(&write).0);
    }
    assert!(qemu_io(&write).0);
    // hob cannot lock an image that QEMU has open. qemu-io has the image open until its standard
    // input ends.
    let mut qemu = Command::new("qemu-io");
    let mut qemu =
        qemu.args(["-f", "raw", disk]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    qemu.stdin.as_mut().unwrap().write_all(b"write 0 4k\n").unwrap();
    let (mut line, mut output) = (String::new(), BufReader::new(qemu.stdout.take().unwrap()));
    while !line.contains("wrote") {
        assert_ne!(output.read_line(&mut line).unwrap(), 0, "{line}");
    }
    let error = open(Access::ReadWrite).unwrap_err();
    assert!(matches!(error, OpenError::InUseByQemu { .. }), "{error}");
    drop(qemu.stdin.take());
    qemu.wait().unwrap();
    open(Access::ReadWrite).unwrap();
}
