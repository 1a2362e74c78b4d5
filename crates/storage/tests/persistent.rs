//! Tests of persistent caches' segments on real files: their numbers, journal rings, and a device
//! that was missing and returns.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use hob_engine::command::{DataSegment, Segment};
use hob_engine::units::DeviceId;
use hob_storage::pool::{Admission, DeviceSpec, Overwrite, OwnerId, Pool, PoolError, device_bytes_for};

const MIB: u64 = 1 << 20;
const CACHE: OwnerId = OwnerId(0xFEED);

fn spec(path: &Path, segments: u64) -> DeviceSpec {
    DeviceSpec { path: path.to_owned(), size_bytes: Some(device_bytes_for(segments * MIB, MIB)) }
}

fn create(paths: &[PathBuf], segments: u64) -> Pool {
    let specs: Vec<_> = paths.iter().map(|path| spec(path, segments)).collect();
    Pool::create("test", &specs, MIB, Overwrite::Refuse).unwrap()
}

fn paths<const N: usize>(dir: &Path) -> [PathBuf; N] {
    std::array::from_fn(|number| dir.join(number.to_string()))
}

fn ordinals(segments: &[DataSegment]) -> Vec<u32> {
    segments.iter().map(|segment| segment.ordinal).collect()
}

fn features(path: &Path) -> [u64; 2] {
    let file = File::open(path).unwrap();
    [0, MIB - 4096].map(|copy| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, copy + 0x70).unwrap();
        u64::from_le_bytes(bytes)
    })
}

#[test]
fn data_keeps_its_numbers_and_gaps_are_filled() {
    let dir = tempfile::tempdir().unwrap();
    let paths = paths::<2>(dir.path());
    let mut pool = create(&paths, 6);
    let data = pool.allocate_data(CACHE, 5, 0).unwrap();
    assert_eq!(ordinals(&data), [0, 1, 2, 3, 4]);
    pool.release(&[data[1].place, data[3].place]).unwrap();
    assert_eq!(ordinals(&pool.data_of(CACHE)), [0, 2, 4]);
    let more = pool.allocate_data(CACHE, 3, 0).unwrap();
    assert_eq!(ordinals(&more), [1, 3, 5]);
    pool.allocate(OwnerId(2), 1, 0).unwrap();
    pool.allocate_ring(OwnerId(3), 1, 1, 1, &[]).unwrap();
    assert_eq!(pool.owners(), [OwnerId(3), CACHE], "volatile owners are not named");
    let before = pool.data_of(CACHE);
    drop(pool);
    let pool = Pool::open(&paths).unwrap();
    assert_eq!(pool.data_of(CACHE), before);
    assert_eq!(pool.free_segments(), 12 - 6 - 1);
    assert_eq!(pool.owners(), [OwnerId(3), CACHE]);
}

#[test]
fn a_ring_is_on_a_device_with_allocation_off_only_if_it_may_be_anywhere() {
    let dir = tempfile::tempdir().unwrap();
    let mut pool = create(&paths::<2>(dir.path()), 4);
    pool.set_admission(DeviceId(1), Admission::Out).unwrap();
    let on = |ring: &[Vec<Segment>]| ring.iter().map(|copy| copy[0].device.0).collect::<Vec<_>>();
    assert!(matches!(pool.allocate_ring(CACHE, 1, 2, 1, &[]), Err(PoolError::TooFewDevices { .. })));
    assert_eq!(on(&pool.allocate_ring_anywhere(CACHE, 1, 1, 1, &[DeviceId(0)]).unwrap()), [0]);
    assert_eq!(on(&pool.allocate_ring_anywhere(CACHE, 2, 2, 1, &[]).unwrap()), [0, 1]);
    pool.set_admission(DeviceId(0), Admission::Out).unwrap();
    assert!(matches!(pool.allocate_ring(CACHE, 3, 1, 1, &[]), Err(PoolError::TooFewDevices { .. })));
    assert_eq!(pool.allocate_ring_anywhere(CACHE, 3, 1, 1, &[]).unwrap().len(), 1);
}

#[test]
fn copies_of_a_ring_are_on_different_devices() {
    let dir = tempfile::tempdir().unwrap();
    let paths = paths::<3>(dir.path());
    let mut pool = create(&paths, 4);
    let first = pool.allocate_ring(CACHE, 1, 2, 3, &[]).unwrap();
    let second = pool.allocate_ring(CACHE, 2, 1, 4, &[]).unwrap();
    for ring in [&first, &second] {
        for copy in ring {
            assert!(copy.iter().all(|segment| segment.device == copy[0].device));
        }
    }
    assert_ne!(first[0][0].device, first[1][0].device);
    assert_eq!((first[0].len(), second[0].len()), (3, 4));
    assert!(matches!(
        pool.allocate_ring(CACHE, 3, 2, 2, &[]),
        Err(PoolError::TooFewDevices { copies: 2, segments: 2, devices: 0 })
    ));
    let refused = pool.allocate_ring(CACHE, 3, 2, 2, &[]).unwrap_err().to_string();
    assert!(refused.contains("2 copies") && refused.contains("2 free segments"), "{refused}");
    assert!(
        matches!(pool.allocate_ring(CACHE, 2, 1, 1, &[]), Err(PoolError::Unworkable { .. })),
        "number in use"
    );
    for (copies, segments) in [(0, 1), (3, 1), (1, 0)] {
        let refused = pool.allocate_ring(CACHE, 9, copies, segments, &[]);
        assert!(matches!(refused, Err(PoolError::Unworkable { .. })));
    }
    drop(pool);
    let mut pool = Pool::open(&paths).unwrap();
    let rings = pool.rings_of(CACHE);
    assert_eq!(rings.iter().map(|ring| ring.number).collect::<Vec<_>>(), [2, 1], "the highest first");
    assert_eq!((&rings[0].copies, &rings[1].copies), (&second, &first));
    assert_eq!(pool.rings_of(OwnerId(1)), []);

    // A crash during an allocation leaves segments to which nothing was ever written.
    pool.release(&first[0][..1]).unwrap();
    assert_eq!(pool.rings_of(CACHE).len(), 1, "its beginning is missing");
    assert_eq!(pool.segments_of(CACHE).len(), 4 + 5, "what is left of it is found all the same");
    pool.release(&first[0][1..]).unwrap();
    assert_eq!(pool.rings_of(CACHE)[1].copies, [first[1].clone()], "one copy is enough");
    pool.release(&first[1][2..]).unwrap();
    pool.set_admission(second[0][0].device, Admission::Out).unwrap();
    drop(pool);
    // If a device is missing, its copies are missing too.
    let away = usize::from(second[0][0].device.0);
    let others: Vec<_> =
        paths.iter().enumerate().filter(|(at, _)| *at != away).map(|(_, path)| path.clone()).collect();
    let pool = Pool::open(&others).unwrap();
    assert_eq!(pool.rings_of(CACHE)[0].number, 1);
    assert_eq!(pool.rings_of(CACHE)[0].copies, [first[1][..2].to_vec()]);
}

#[test]
fn outdated_segments_are_older_than_the_ring_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let paths = paths::<2>(dir.path());
    let mut pool = create(&paths, 8);
    let old = pool.allocate_ring(CACHE, 1, 2, 1, &[]).unwrap().concat();
    let data = pool.allocate_data(CACHE, 4, 0).unwrap().into_iter().map(|segment| segment.place);
    let mut all: Vec<Segment> = old.into_iter().chain(data).collect();
    let new = pool.allocate_ring(CACHE, 2, 1, 1, &[]).unwrap().concat();
    all.sort_unstable();
    for device in [DeviceId(0), DeviceId(1)] {
        let expected: Vec<Segment> = all.iter().filter(|place| place.device == device).copied().collect();
        assert_eq!(expected.len(), 3);
        assert_eq!(pool.outdated_on(device, CACHE, 2, &new), Some(expected.clone()));
        assert_eq!(pool.outdated_on(device, CACHE, 2, &[&new[..], &expected[..]].concat()), Some(Vec::new()));
        assert_eq!(pool.outdated_on(device, CACHE, 1, &new), None, "it has data that is newer than ring 1");
        assert_eq!(pool.outdated_on(device, OwnerId(1), 2, &new), Some(Vec::new()));
    }
    assert_eq!(pool.outdated_on(new[0].device, CACHE, 2, &[]), None, "a newer ring is not outdated");
}

/// Required features of a pool with a journal ring: the journal, and incomplete sectors.
const RINGS: u64 = 1 | 4;

#[test]
fn every_device_says_that_there_are_journals_before_there_is_one() {
    let dir = tempfile::tempdir().unwrap();
    let paths = paths::<3>(dir.path());
    let mut pool = create(&paths[..2], 2);
    pool.allocate(OwnerId(1), 1, 0).unwrap();
    assert!(paths[..2].iter().all(|path| features(path) == [0, 0]), "volatile caches need nothing new");
    pool.allocate_ring(CACHE, 1, 1, 1, &[]).unwrap();
    for path in &paths[..2] {
        assert!(features(path).iter().any(|found| found & 1 == 1), "{path:?}");
    }
    let has_ring = |path: &&PathBuf| features(path).contains(&RINGS);
    assert_eq!(paths[..2].iter().filter(has_ring).count(), 1, "the device with the journal");
    pool.add_device(&spec(&paths[2], 2), Overwrite::Refuse).unwrap();
    assert_eq!(features(&paths[2]), [RINGS, RINGS], "a new device says so from the start");
    pool.release(&pool.segments_of(CACHE)).unwrap();
    drop(pool);
    let mut pool = Pool::open(&paths).unwrap();
    pool.set_admission(DeviceId(0), Admission::Out).unwrap();
    let [first, second] = features(&paths[0]);
    assert!(first == second && first & 1 == 1, "and it stays");
}

#[test]
fn features_of_later_versions_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [path] = paths::<1>(dir.path());
    create(std::slice::from_ref(&path), 2).allocate_data(CACHE, 1, 0).unwrap();
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    for offset in [0, MIB - 4096] {
        let mut page = vec![0; 4096];
        file.read_exact_at(&mut page, offset).unwrap();
        page[0x70] |= 8;
        page[0xC..0x10].fill(0);
        let crc = crc32c::crc32c(&page).to_le_bytes();
        page[0xC..0x10].copy_from_slice(&crc);
        file.write_all_at(&page, offset).unwrap();
    }
    let refused = Pool::open(std::slice::from_ref(&path)).unwrap_err();
    assert!(matches!(refused, PoolError::Newer { .. }));
    assert!(refused.to_string().contains("features 0x8"), "{refused}");
}

/// A device is missing, the cache continues without it and its segment numbers are used again, and
/// then the device returns.
#[test]
fn a_reused_segment_number_ignores_a_returned_device() {
    let dir = tempfile::tempdir().unwrap();
    let paths = paths::<2>(dir.path());
    let mut pool = create(&paths, 8);
    let old = pool.allocate_data(CACHE, 4, 0).unwrap();
    let kept = usize::from(pool.allocate_ring(CACHE, 1, 1, 1, &[]).unwrap()[0][0].device.0);
    drop(pool);
    let mut pool = Pool::open(&paths[kept..=kept]).unwrap();
    let stayed = pool.data_of(CACHE);
    assert_eq!(stayed.len(), 2);
    let new = pool.allocate_data(CACHE, 2, 0).unwrap();
    assert!(new.iter().all(|segment| !ordinals(&stayed).contains(&segment.ordinal)));
    assert_eq!(ordinals(&pool.data_of(CACHE)), [0, 1, 2, 3]);
    let now = pool.data_of(CACHE);
    let late = Pool::open(&paths[1 - kept..=1 - kept]).unwrap();
    pool.join(late).unwrap();
    assert_eq!(pool.data_of(CACHE), now);
    assert_eq!(pool.segments_of(CACHE).len(), 4 + 2 + 1, "the owner can still release it");
    assert!(old.iter().all(|segment| pool.segments_of(CACHE).contains(&segment.place)));
    assert_eq!(pool.devices().len(), 2);
    drop(pool);
    assert_eq!(Pool::open(&paths).unwrap().data_of(CACHE), now);
}

#[test]
fn only_devices_of_the_same_pool_join() {
    let dir = tempfile::tempdir().unwrap();
    let paths = paths::<3>(dir.path());
    drop(create(&paths[..2], 2));
    let other = create(&paths[2..], 2);
    let mut pool = Pool::open(&paths[..1]).unwrap();
    assert!(matches!(pool.join(other), Err(PoolError::OtherPool { .. })));
    pool.join(Pool::open(&paths[1..2]).unwrap()).unwrap();
    std::fs::copy(&paths[1], dir.path().join("copy")).unwrap();
    let copy = Pool::open(&[dir.path().join("copy")]).unwrap();
    assert!(matches!(pool.join(copy), Err(PoolError::Unworkable { .. })));
    assert_eq!(pool.free_segments(), 4);
}
