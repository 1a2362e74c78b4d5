//! Pools on real files.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hob_engine::command::{DataSegment, Segment};
use hob_engine::units::DeviceId;
use hob_storage::pool::{
    Admission, DeviceSpec, Overwrite, OwnerId, Pool, PoolError, check_returned, device_bytes_for,
    is_disconnected,
};

const MIB: u64 = 1 << 20;

fn spec(path: &Path, segments: u64) -> DeviceSpec {
    DeviceSpec { path: path.to_owned(), size_bytes: Some(device_bytes_for(segments * MIB, MIB)) }
}

fn create(paths: &[(PathBuf, u64)]) -> Pool {
    let specs: Vec<_> = paths.iter().map(|(path, segments)| spec(path, *segments)).collect();
    Pool::create("test", &specs, MIB, Overwrite::Refuse).unwrap()
}

fn places(segments: &[DataSegment]) -> Vec<Segment> {
    segments.iter().map(|segment| segment.place).collect()
}

fn overwrite(path: &Path, offset: u64, bytes: &[u8]) {
    OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, offset).unwrap();
}

#[test]
fn segments_are_spread_kept_and_released() {
    let dir = tempfile::tempdir().unwrap();
    let paths = [(dir.path().join("a"), 4), (dir.path().join("b"), 4), (dir.path().join("c"), 2)];
    let mut pool = create(&paths);
    assert_eq!(pool.free_segments(), 10);
    let volatile = pool.allocate(OwnerId(1), 3, 0).unwrap();
    let devices: HashSet<_> = volatile.iter().map(|segment| segment.device).collect();
    assert_eq!(devices.len(), 3, "one from each device");
    let persistent = places(&pool.allocate_data(OwnerId(2), 6, 0).unwrap());
    let all: HashSet<_> = volatile.iter().chain(&persistent).collect();
    assert_eq!(all.len(), 9);
    assert!(matches!(pool.allocate(OwnerId(3), 2, 0), Err(PoolError::Full { wanted: 2, free: 1 })));
    assert!(persistent.iter().all(|segment| segment.offset.is_multiple_of(MIB)));
    // Thick: all blocks of the files are allocated.
    for (path, _) in &paths {
        use std::os::unix::fs::MetadataExt;
        let metadata = std::fs::metadata(path).unwrap();
        assert!(metadata.blocks() * 512 >= metadata.len());
    }
    drop(pool);

    let paths: Vec<_> = paths.iter().rev().map(|(path, _)| path.clone()).collect();
    let mut pool = Pool::open(&paths).unwrap();
    assert_eq!(pool.name(), "test");
    assert_eq!(pool.free_segments(), 4, "what was volatile is free");
    assert_eq!(pool.segments_of(OwnerId(1)), []);
    assert_eq!(pool.segments_of(OwnerId(2)), persistent);
    let more = pool.allocate_data(OwnerId(2), 1, 0).unwrap();
    assert_eq!(pool.segments_of(OwnerId(2)).last(), Some(&more[0].place));
    pool.release(&persistent).unwrap();
    drop(pool);
    assert_eq!(Pool::open(&paths).unwrap().free_segments(), 9);
}

#[test]
fn devices_come_and_go() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b, c) = (dir.path().join("a"), dir.path().join("b"), dir.path().join("c"));
    let mut pool = create(&[(a.clone(), 2)]);
    assert_eq!(pool.add_device(&spec(&b, 3), Overwrite::Refuse).unwrap(), DeviceId(1));
    pool.set_admission(DeviceId(0), Admission::Out).unwrap();
    assert_eq!(pool.free_segments(), 3);
    let segments = pool.allocate_data(OwnerId(1), 3, 0).unwrap();
    assert!(segments.iter().all(|segment| segment.place.device == DeviceId(1)));
    assert!(matches!(pool.remove_device(DeviceId(1)), Err(PoolError::DeviceBusy { segments: 3, .. })));
    pool.remove_device(DeviceId(0)).unwrap();
    assert!(matches!(pool.remove_device(DeviceId(0)), Err(PoolError::NoSuchDevice { .. })));
    // Ordinals are not used twice, even if the pool was reopened in between.
    drop(pool);
    assert!(matches!(Pool::open(std::slice::from_ref(&a)), Err(PoolError::NotAPool { .. })));
    let mut pool = Pool::open(std::slice::from_ref(&b)).unwrap();
    assert_eq!(pool.add_device(&spec(&c, 1), Overwrite::Refuse).unwrap(), DeviceId(2));
    assert_eq!(pool.add_device(&spec(&a, 1), Overwrite::Refuse).unwrap(), DeviceId(3), "it was wiped");
    let infos = pool.devices();
    assert_eq!(infos.len(), 3);
    assert_eq!((infos[0].id, infos[0].segments, infos[0].free_segments), (DeviceId(1), 3, 0));
    assert!(pool.file(DeviceId(1)).is_ok());
}

/// The caches continued without the device, so its content is outdated.
#[test]
fn a_returned_device_is_empty_and_has_a_new_id() {
    const LIMIT: Duration = Duration::from_secs(30);
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    for others in [true, false] {
        let [a, b] = [&a, &b].map(|path| path.with_extension(others.to_string()));
        let mut pool = create(&[(a.clone(), 4), (b.clone(), 4)]);
        pool.allocate_data(OwnerId(1), 6, 0).unwrap();
        let (pool_uuid, uuid) = (pool.uuid(), pool.devices()[0].uuid);
        let [former, sibling] = [0, 1].map(|id| pool.former_superblock(DeviceId(id)).unwrap());
        check_returned(&a, &former, LIMIT).unwrap();
        let busy = pool.add_returned(&a, &former);
        assert!(matches!(busy, Err(PoolError::InUse { .. })), "{busy:?}");
        let descriptor = || pool.file(DeviceId(0)).unwrap().here().unwrap().file;
        assert!(!is_disconnected(&a, descriptor(), LIMIT));
        assert!(is_disconnected(&a, tempfile::tempfile().unwrap().into(), LIMIT));
        let mut lost = pool.segments_of(OwnerId(1));
        lost.retain(|segment| segment.device == DeviceId(0));
        let needed = pool.close_failed(DeviceId(0), &lost[1..]);
        assert!(matches!(needed, Err(PoolError::DeviceBusy { segments: 1, .. })), "{needed:?}");
        assert_eq!(pool.close_failed(DeviceId(0), &lost).unwrap(), former);

        // Another device is at the path, or the device has another size.
        for (other, part) in [(&sibling, "another device"), (&former, "another size")] {
            let file = OpenOptions::new().write(true).open(&a).unwrap();
            let size = file.metadata().unwrap().len();
            if *other == former {
                file.set_len(size + MIB).unwrap();
            }
            let answer = check_returned(&a, other, LIMIT).unwrap_err();
            assert!(answer.contains(part), "{answer}");
            let error = pool.add_returned(&a, other).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
            file.set_len(size).unwrap();
        }
        let away = a.with_extension("away");
        std::fs::rename(&a, &away).unwrap();
        assert!(check_returned(&a, &former, LIMIT).unwrap_err().contains("No such file"));
        std::fs::write(&a, vec![0; 4 << 20]).unwrap();
        assert!(check_returned(&a, &former, LIMIT).unwrap_err().contains("no superblock"));
        std::fs::rename(&away, &a).unwrap();

        check_returned(&a, &former, LIMIT).unwrap();
        let mut pool = if others { pool } else { Pool::of_returned(&a, &former, 0).unwrap() };
        if others {
            assert_eq!(pool.add_returned(&a, &former).unwrap(), DeviceId(2));
        }
        let device = pool.devices().pop().unwrap();
        assert_eq!((device.id, device.segments, device.free_segments), (DeviceId(2), 4, 4));
        assert_ne!(device.uuid, uuid);
        assert_eq!((pool.uuid(), pool.name(), pool.device_ids()), (pool_uuid, "test", 3));
        assert_eq!(pool.segments_of(OwnerId(1)).len(), if others { 3 } else { 0 });
        let formatted = pool.former_superblock(DeviceId(2)).unwrap();
        pool.close_device(DeviceId(2)).unwrap();
        assert!(check_returned(&a, &former, LIMIT).unwrap_err().contains("another device"));
        // The device does not know the ids that the pool has given out in the meantime.
        let again = Pool::of_returned(&a, &formatted, 9).unwrap();
        assert_eq!((again.devices()[0].id, again.device_ids()), (DeviceId(9), 10));
    }
}

/// The device is on shared storage. Another host has opened the pool, which keeps the UUID.
#[test]
fn a_device_that_another_host_has_opened_is_not_formatted() {
    const LIMIT: Duration = Duration::from_secs(30);
    let dir = tempfile::tempdir().unwrap();
    let (a, copy) = (dir.path().join("a"), dir.path().join("copy"));
    let mut pool = create(&[(a.clone(), 4), (dir.path().join("b"), 4)]);
    std::fs::copy(&a, &copy).unwrap();
    pool.set_admission(DeviceId(0), Admission::Out).unwrap();
    let former = pool.close_failed(DeviceId(0), &[]).unwrap();
    let refused = |pool: &mut Pool| {
        let before = std::fs::read(&a).unwrap();
        let answer = check_returned(&a, &former, LIMIT).unwrap_err();
        assert!(answer.contains("another host may use it"), "{answer}");
        let error = pool.add_returned(&a, &former).unwrap_err().to_string();
        assert!(error.contains("another host may use it"), "{error}");
        assert!(std::fs::read(&a).unwrap() == before);
    };
    check_returned(&a, &former, LIMIT).unwrap();
    let kept = std::fs::read(&a).unwrap();
    let mut other = Pool::open(std::slice::from_ref(&a)).unwrap();
    other.set_admission(DeviceId(0), Admission::In).unwrap();
    drop(other);
    refused(&mut pool);
    // An older copy of the device, for example a snapshot.
    std::fs::rename(&copy, &a).unwrap();
    refused(&mut pool);
    std::fs::write(&a, kept).unwrap();
    assert_eq!(pool.add_returned(&a, &former).unwrap(), DeviceId(2));
}

#[test]
fn one_daemon_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let pool = create(&[(path.clone(), 2)]);
    let paths = [path.clone()];
    assert!(matches!(Pool::open(&paths), Err(PoolError::InUse { .. })));
    assert!(matches!(
        Pool::create("other", &[spec(&path, 2)], MIB, Overwrite::Force),
        Err(PoolError::InUse { .. })
    ));
    // A shard's descriptor keeps the lock.
    let shard = pool.file(DeviceId(0)).unwrap();
    drop(pool);
    assert!(matches!(Pool::open(&paths), Err(PoolError::InUse { .. })));
    drop(shard);
    assert!(Pool::open(&paths).is_ok());
}

#[test]
fn existing_data_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let cases: &[(&str, u64, &[u8])] = &[
        ("a qcow2 image", 0, b"QFI\xfb"),
        ("an XFS filesystem", 0, b"XFSB"),
        ("an ext2/3/4 filesystem", 1080, b"\x53\xef"),
        ("a btrfs filesystem", 65600, b"_BHRfS_M"),
        ("a GPT partition table", 512, b"EFI PART"),
        ("swap space", 4086, b"SWAPSPACE2"),
        ("an LVM volume", 512, b"LABELONE"),
        ("a LUKS volume", 0, b"LUKS\xba\xbe"),
        ("a partition table or boot sector", 510, b"\x55\xaa"),
        ("unknown data", 77, b"?"),
        ("unknown data at byte 5242880", 5 * MIB + 77, b"?"),
    ];
    for (number, (what, offset, magic)) in cases.iter().enumerate() {
        let path = dir.path().join(number.to_string());
        File::create(&path).unwrap().set_len(8 * MIB).unwrap();
        overwrite(&path, *offset, magic);
        let spec = DeviceSpec { path: path.clone(), size_bytes: None };
        match Pool::create("p", std::slice::from_ref(&spec), MIB, Overwrite::Refuse) {
            Err(PoolError::Foreign { what: found, .. }) => assert_eq!(&found, what),
            other => panic!("{what}: {other:?}"),
        }
        let mut bytes = vec![0; magic.len()];
        File::open(&path).unwrap().read_exact_at(&mut bytes, *offset).unwrap();
        assert_eq!(&bytes, magic, "still there");
        assert!(Pool::create("p", &[spec], MIB, Overwrite::Force).is_ok());
    }
    // A refused sparse file keeps its holes.
    let path = dir.path().join("sparse");
    File::create(&path).unwrap().set_len(64 * MIB).unwrap();
    overwrite(&path, 40 * MIB, b"?");
    assert!(Pool::create("p", &[spec(&path, 2)], MIB, Overwrite::Refuse).is_err());
    assert!(std::fs::metadata(&path).unwrap().blocks() * 512 < MIB, "the refused file was filled");
    // Another pool's device, and a real filesystem.
    let path = dir.path().join("pool");
    drop(create(&[(path.clone(), 2)]));
    let refused = Pool::create("p", &[spec(&path, 2)], MIB, Overwrite::Refuse);
    assert!(matches!(refused, Err(PoolError::Foreign { what, .. }) if what.contains("hob pool test")));
}

#[test]
fn pools_do_not_mix_and_sizes_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    drop(create(&[(a.clone(), 2)]));
    drop(create(&[(b.clone(), 2)]));
    assert!(matches!(Pool::open(&[a.clone(), b]), Err(PoolError::OtherPool { .. })));
    let small = DeviceSpec { path: dir.path().join("small"), size_bytes: Some(2 * MIB) };
    let refused = Pool::create("p", std::slice::from_ref(&small), MIB, Overwrite::Refuse);
    assert!(matches!(refused, Err(PoolError::TooSmall { .. })));
    assert!(!small.path.exists(), "what was made for nothing is gone");
    let huge = DeviceSpec { path: dir.path().join("huge"), size_bytes: Some(1 << 50) };
    let refused = Pool::create("p", std::slice::from_ref(&huge), MIB, Overwrite::Refuse);
    assert!(matches!(refused, Err(PoolError::NoSpace { .. } | PoolError::System { .. })), "{refused:?}");
    assert!(!huge.path.exists());
    let unsized_ = DeviceSpec { path: dir.path().join("unsized"), size_bytes: None };
    assert!(Pool::create("p", &[unsized_], MIB, Overwrite::Refuse).is_err());
    assert!(Pool::create("", &[spec(&a, 2)], MIB, Overwrite::Force).is_err());
    assert!(Pool::create("p", &[spec(&a, 2)], 3 * MIB, Overwrite::Force).is_err());
    assert!(Pool::create("p", &[], MIB, Overwrite::Force).is_err());
    assert!(Pool::open(&[]).is_err());
    // A device that shrank.
    OpenOptions::new().write(true).open(&a).unwrap().set_len(2 * MIB).unwrap();
    assert!(matches!(Pool::open(&[a]), Err(PoolError::TooSmall { .. })));
}

#[test]
fn one_torn_copy_of_anything_is_survived() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let segments = {
        let mut pool = create(&[(path.clone(), 200)]);
        places(&pool.allocate_data(OwnerId(1), 150, 0).unwrap())
    };
    let garbage = [0xA5u8; 4096];
    let pristine = std::fs::read(&path).unwrap();
    // Both superblocks, then both copies of both table pages (docs/FORMAT.md has the offsets). The
    // last write changed one copy of the table: damage to this copy may lose that write, but never
    // the table.
    const COPY: u64 = 64 << 10;
    let table = [MIB, MIB + 4096, MIB + COPY, MIB + COPY + 4096];
    for offset in [0, MIB - 4096].into_iter().chain(table) {
        std::fs::write(&path, &pristine).unwrap();
        overwrite(&path, offset, &garbage);
        let pool = Pool::open(std::slice::from_ref(&path)).unwrap();
        let found = pool.segments_of(OwnerId(1));
        assert!(found.iter().all(|segment| segments.contains(segment)));
        if offset < MIB {
            assert_eq!(found, segments);
        }
    }
    std::fs::write(&path, &pristine).unwrap();
    overwrite(&path, MIB, &garbage);
    overwrite(&path, MIB + COPY, &garbage);
    let refused = Pool::open(std::slice::from_ref(&path));
    assert!(matches!(refused, Err(PoolError::Damaged { .. })), "both copies of page 0: {refused:?}");
    std::fs::write(&path, &pristine).unwrap();
    overwrite(&path, 0x20, &garbage[..8]);
    overwrite(&path, MIB - 4096 + 0x20, &garbage[..8]);
    let refused = Pool::open(std::slice::from_ref(&path));
    assert!(matches!(refused, Err(PoolError::Damaged { .. })), "both superblocks: {refused:?}");
    assert!(Pool::create("again", &[spec(&path, 200)], MIB, Overwrite::Force).is_ok());
}
