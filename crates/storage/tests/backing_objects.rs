//! Disks of objects in a directory as backings, with both I/O drivers.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::{Rig, both_kinds, options, pattern};
use hob_engine::command::Access;
use hob_engine::io::{Durability, IoError, IoOp, Zeroing};
use hob_storage::backing::{Backing, Format, OpenError, StatusExtent, objects};
use hob_storage::ring::RingKind;

const OBJECT: u64 = 64 << 10;

fn make(dir: &Path, bytes: u64) -> String {
    let spec = format!("objects+file://{}/disk", dir.display());
    objects::create(&spec, bytes, OBJECT, &options()).unwrap();
    spec
}

fn open(spec: &str, access: Access) -> Result<Backing, OpenError> {
    Backing::open(spec, access, &options())
}

#[test]
fn objects_do_all_there_is_to_do() {
    both_kinds(|kind| {
        let dir = tempfile::tempdir().unwrap();
        let spec = make(dir.path(), 8 << 20);
        assert_eq!(Backing::kind(&spec, Format::Raw).name, "objects");
        let mut rig = Rig::open(kind, &spec, Access::ReadWrite);
        rig.exercise();
        rig.close();
    });
}

#[test]
fn flushed_data_is_read_again_and_the_backing_is_recognized() {
    let dir = tempfile::tempdir().unwrap();
    let spec = make(dir.path(), (5 << 20) + 512);
    let data = pattern(300_000, 7);
    let mut rig = Rig::open(RingKind::Threads, &spec, Access::ReadWrite);
    let before = rig.backing.info().clone();
    assert!(before.changed.is_some() && rig.backing.change_mark() == before.changed);
    rig.write(IoOp::Write(Durability::Volatile), 70_001, &data).unwrap();
    assert_eq!(rig.backing.change_mark(), None, "it is not flushed");
    rig.run(IoOp::Flush, 0, 0).unwrap();
    let mark = rig.backing.change_mark();
    assert!(mark.is_some() && mark != before.changed);
    let mut side = vec![0; 1000];
    rig.backing.reader().unwrap().read(70_001, &mut side).unwrap();
    assert_eq!(side, data[..1000]);
    rig.close();

    let mut backing = open(&spec, Access::ReadWrite).unwrap();
    let info = backing.info().clone();
    assert_eq!((info.identity, info.changed), (before.identity, mark));
    let mut bytes = vec![0; 300_000];
    backing.read_before_attach(70_001, &mut bytes).unwrap();
    assert_eq!(bytes, data);
    let mut rig = Rig::of(RingKind::IoUring, backing);
    rig.run(IoOp::WriteZeroes(Zeroing::MayUnmap), 0, 5 << 20).unwrap();
    rig.run(IoOp::Flush, 0, 0).unwrap();
    let extents = rig.status(0, (5 << 20) + 512).unwrap();
    assert_eq!(extents, [StatusExtent { len: (5 << 20) + 512, hole: true, zero: true }]);
    rig.close();
    let shown = objects::show(&spec, &options()).unwrap();
    assert_eq!((shown.objects, shown.owner, shown.size_bytes), (Some(0), None, (5 << 20) + 512));
    assert_eq!(std::fs::read_dir(dir.path().join("disk/data")).unwrap().count(), 0, "nothing is left");
    assert_eq!(std::fs::read_dir(dir.path().join("disk/manifest")).unwrap().count(), 1);
}

#[test]
fn a_disk_has_one_writer_and_any_readers() {
    let dir = tempfile::tempdir().unwrap();
    let spec = make(dir.path(), 1 << 20);
    let writer = open(&spec, Access::ReadWrite).unwrap();
    let error = open(&spec, Access::ReadWrite).unwrap_err().to_string();
    assert!(error.contains("in use"), "{error}");
    let mut reader = Rig::of(RingKind::Threads, open(&spec, Access::ReadOnly).unwrap());
    assert!(reader.backing.info().read_only);
    assert_eq!(reader.read(0, 512).unwrap(), [0; 512]);
    assert_eq!(reader.run(IoOp::Discard, 0, OBJECT), Err(IoError::ReadOnly));
    reader.close();
    assert!(objects::show(&spec, &options()).unwrap().owner.is_some());
    // A disk that was never attached can be closed too.
    drop(writer);
    objects::await_closed();
    assert_eq!(objects::show(&spec, &options()).unwrap().owner, None);
    drop(open(&spec, Access::ReadWrite).unwrap());
}

#[test]
fn a_writer_that_loses_the_disk_is_notified() {
    let dir = tempfile::tempdir().unwrap();
    let spec = make(dir.path(), 1 << 20);
    let mut rig = Rig::of(RingKind::IoUring, open(&spec, Access::ReadWrite).unwrap());
    assert!(!rig.backing.is_lost());
    // The store assumes that this owner is on another host, which an operator declares dead.
    let there = objects::check_unlock(&spec, &options()).unwrap();
    assert!(there.owner.is_some() && !rig.backing.is_lost());
    assert_eq!(objects::check_unlock(&spec, &options()).unwrap(), there, "a check changes nothing");
    objects::unlock(&spec, &options()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !rig.backing.is_lost() {
        assert!(Instant::now() < deadline, "nobody tells");
        rig.turn();
    }
    assert_eq!(rig.write(IoOp::Write(Durability::Durable), 0, &[1; 512]), Err(IoError::Failed));
    rig.close();
    drop(open(&spec, Access::ReadWrite).unwrap());
}

#[test]
fn invalid_addresses_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path().display();
    let cases = [
        (format!("objects+file://{here}/none"), "none"),
        ("objects+file://relative".to_owned(), "absolute"),
        (format!("objects+file://{here}"), "hob objects create"),
    ];
    for (spec, word) in cases {
        let error = open(&spec, Access::ReadWrite).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    for (size, object) in
        [(0, OBJECT), (1000, OBJECT), (1 << 20, 3 << 16), (1 << 20, 512), (u64::MAX - 511, OBJECT)]
    {
        assert!(objects::create(&format!("objects+file://{here}/x"), size, object, &options()).is_err());
    }
    assert!(!dir.path().join("x").exists(), "nothing was made");
    let spec = make(dir.path(), 1 << 20);
    let again = objects::create(&spec, 1 << 20, OBJECT, &options()).unwrap_err().to_string();
    assert!(again.contains("already"), "{again}");
    for refused in [objects::check_unlock(&spec, &options()), objects::unlock(&spec, &options())] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("no host has the disk open"), "{error}");
    }
}

/// Tests a real server: `HOB_OBJECTS=s3://BUCKET/PREFIX?endpoint=…`, with keys in the environment.
/// The test creates a disk below that prefix.
#[test]
#[ignore = "it needs an object store, and HOB_OBJECTS to say where"]
fn a_bucket_does_all_there_is_to_do() {
    hob_clouds::install();
    let wanted = std::env::var("HOB_OBJECTS").expect("HOB_OBJECTS says where");
    let (place, rest) = wanted.split_once('?').unwrap_or((&wanted, ""));
    let spec = format!("{place}/hob-{}?{rest}", std::process::id());
    objects::create(&spec, 8 << 20, OBJECT, &options()).unwrap();
    let mut rig = Rig::open(RingKind::IoUring, &spec, Access::ReadWrite);
    rig.exercise();
    rig.run(IoOp::Flush, 0, 0).unwrap();
    assert!(open(&spec, Access::ReadWrite).unwrap_err().to_string().contains("in use"));
    objects::unlock(&spec, &options()).unwrap();
    assert_eq!(
        rig.write(IoOp::Write(Durability::Durable), 0, &[1; 512]),
        Err(IoError::Failed),
        "it is fenced"
    );
    let mut before = vec![0; 512];
    assert_eq!(rig.backing.reader().unwrap().read(0, &mut before), Err(IoError::Failed));
    rig.close();
    let mut rig = Rig::open(RingKind::Threads, &spec, Access::ReadWrite);
    rig.exercise();
    rig.close();
    assert_eq!(objects::show(&spec, &options()).unwrap().owner, None);
}
