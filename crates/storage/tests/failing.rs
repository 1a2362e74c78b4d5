//! Error injection for a pool's own tables, as in the tests of OCF. The tests run each operation
//! many times. In each run another write or sync of the operation fails, once or permanently. The
//! error must be one clear line. Owners must keep their segments, also after the pool was opened
//! again. No segment may be lost, and the same operation must succeed later.

use std::path::{Path, PathBuf};

use hob_engine::command::{DataSegment, Segment};
use hob_engine::units::DeviceId;
use hob_storage::failing::{Failing, fail};
use hob_storage::pool::{
    Admission, DeviceSpec, Overwrite, OwnerId, Pool, PoolError, RingOnFlash, device_bytes_for,
};

const MIB: u64 = 1 << 20;
const CACHE: OwnerId = OwnerId(0xCAFE);
const OTHER: OwnerId = OwnerId(0xBEEF);
const SEGMENTS: u64 = 8;

/// Maximum number of changes of files by one operation.
const CHANGES_MAX: u32 = 64;

struct Ground {
    dir: tempfile::TempDir,
    pool: Pool,
    data: Vec<DataSegment>,
    rings: Vec<RingOnFlash>,
    free: u64,
}

/// Creates a directory in a memory filesystem, if there is one, because the tests sync thousands of
/// times.
fn tempdir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn spec(path: PathBuf) -> DeviceSpec {
    DeviceSpec { path, size_bytes: Some(device_bytes_for(SEGMENTS * MIB, MIB)) }
}

impl Ground {
    /// A pool of three devices, of which the last is empty; a persistent cache with two rings, and
    /// a volatile cache.
    fn new() -> Ground {
        let dir = tempdir();
        let specs = ["a", "b"].map(|name| spec(dir.path().join(name)));
        let mut pool = Pool::create("test", &specs, MIB, Overwrite::Refuse).unwrap();
        pool.allocate_data(CACHE, 4, 0).unwrap();
        pool.allocate_ring(CACHE, 1, 2, 1, &[]).unwrap();
        pool.allocate_ring(CACHE, 2, 1, 2, &[]).unwrap();
        pool.allocate(OwnerId(1), 2, 0).unwrap();
        pool.add_device(&spec(dir.path().join("c")), Overwrite::Refuse).unwrap();
        let mut ground = Ground { dir, pool, data: vec![], rings: vec![], free: 0 };
        (ground.data, ground.rings) = (ground.pool.data_of(CACHE), ground.pool.rings_of(CACHE));
        ground.free = ground.pool.free_segments();
        ground
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn ring(&self) -> Vec<Segment> {
        self.rings[1].copies.concat()
    }

    fn data_places(&self) -> Vec<Segment> {
        self.data[1..3].iter().map(|segment| segment.place).collect()
    }

    /// Checks that the cache has all of its segments.
    fn check_cache(&self, pool: &Pool, what: &str) {
        let data = pool.data_of(CACHE);
        assert!(self.data.iter().all(|segment| data.contains(segment)), "{what}: {data:?}");
        let rings = pool.rings_of(CACHE);
        assert!(self.rings.iter().all(|ring| rings.contains(ring)), "{what}: {rings:?}");
    }
}

fn is_clear(error: &PoolError, dir: &Path) {
    let line = error.to_string();
    assert!(!line.contains('\n') && line.contains(&*dir.to_string_lossy()), "{line}");
}

type Operation = fn(&mut Ground) -> Result<(), PoolError>;

/// Calls `check` for each way in which an operation can fail, with the result of the operation.
fn sweep(operation: Operation, check: impl Fn(Ground, Result<(), PoolError>, &str)) {
    for how in [Failing::Once, Failing::FromThenOn] {
        for nth in 1.. {
            assert!(nth < CHANGES_MAX, "it never ends");
            let mut ground = Ground::new();
            let failure = fail(ground.dir.path(), nth, how);
            let result = operation(&mut ground);
            let struck = failure.has_struck();
            drop(failure);
            if let Err(error) = &result {
                is_clear(error, ground.dir.path());
            }
            if !struck {
                assert!(nth > 1, "nothing was changed");
                result.unwrap();
                break;
            }
            check(ground, result, &format!("{how:?} at {nth}"));
        }
    }
}

fn reopened(ground: Ground) -> (Ground, u64) {
    let Ground { dir, pool, data, rings, free } = ground;
    let volatile = pool.segments_of(OwnerId(1)).len() as u64;
    drop(pool);
    let paths = ["a", "b", "c"].map(|name| dir.path().join(name));
    let pool = Pool::open(&paths).unwrap();
    (Ground { dir, pool, data, rings, free }, volatile)
}

/// Checks a pool that was opened again: every segment is the cache's or free, except leftovers,
/// which can be released.
fn check_reopened(ground: Ground, what: &str) {
    let expected: Vec<Segment> = ground.data.iter().map(|segment| segment.place).collect();
    let expected = [expected, ground.rings.iter().flat_map(|ring| ring.copies.concat()).collect()].concat();
    let (mut ground, volatile) = reopened(ground);
    ground.check_cache(&ground.pool, what);
    for owner in [CACHE, OTHER] {
        let left = ground.pool.segments_of(owner).into_iter();
        let left: Vec<Segment> = left.filter(|segment| !expected.contains(segment)).collect();
        ground.pool.release(&left).unwrap();
    }
    for device in ground.pool.devices() {
        ground.pool.set_admission(device.id, Admission::In).unwrap();
    }
    assert_eq!(ground.pool.free_segments(), ground.free + volatile, "{what}");
    let more = ground.pool.allocate_data(OTHER, 2, 0).unwrap();
    assert!(more.iter().all(|segment| !expected.contains(&segment.place)), "{what}");
}

/// Checks an operation that takes segments: it succeeded, or nothing is changed and the same
/// operation succeeds later.
fn check_taking(operation: Operation, taken: u64, stays: bool) {
    sweep(operation, |mut ground, result, what| {
        assert!(result.is_err(), "{what}: nobody was told");
        assert_eq!(ground.pool.free_segments(), ground.free, "{what}");
        ground.check_cache(&ground.pool, what);
        operation(&mut ground).unwrap_or_else(|error| panic!("{what}, again: {error}"));
        assert_eq!(ground.pool.free_segments(), ground.free - taken, "{what}");
        let others = ground.pool.segments_of(OTHER);
        let (ground, volatile) = reopened(ground);
        assert_eq!(ground.pool.segments_of(OTHER), if stays { others } else { vec![] }, "{what}");
        assert_eq!(
            ground.pool.free_segments(),
            ground.free + volatile - if stays { taken } else { 0 },
            "{what}"
        );
    });
    sweep(operation, |ground, _, what| check_reopened(ground, what));
}

#[test]
fn taking_segments() {
    check_taking(|ground| ground.pool.allocate(OTHER, 6, 0).map(drop), 6, false);
    check_taking(|ground| ground.pool.allocate_data(OTHER, 6, 0).map(drop), 6, true);
    check_taking(|ground| ground.pool.allocate_ring(OTHER, 1, 2, 2, &[]).map(drop), 4, true);
    check_taking(|ground| ground.pool.allocate_swap(OTHER, 3, None, &[]).map(drop), 3, true);
}

/// A device that accepts no writes does not delay operations on other devices.
#[test]
fn a_failing_device_delays_no_other() {
    let mut ground = Ground::new();
    let sick = fail(&ground.path("a"), 1, Failing::FromThenOn);
    let on_it = ground.data.iter().find(|segment| segment.place.device == DeviceId(0)).unwrap().place;
    ground.pool.release(&[on_it]).unwrap_err();
    assert!(ground.pool.allocate_data(OTHER, 6, 0).is_err(), "some of it is on that device");
    let ring = ground.pool.allocate_ring(OTHER, 1, 1, 2, &[DeviceId(0)]).unwrap();
    assert!(ring.concat().iter().all(|segment| segment.device != DeviceId(0)));
    let again = ground.pool.allocate_ring(OTHER, 2, 1, 2, &[DeviceId(0), ring[0][0].device]).unwrap();
    assert!(again.concat().iter().all(|segment| ![DeviceId(0), ring[0][0].device].contains(&segment.device)));
    ground.pool.release(&ring.concat()).unwrap();
    assert!(sick.has_struck());
    drop(sick);
    let (ground, _) = reopened(ground);
    assert_eq!(ground.pool.rings_of(OTHER)[0].copies, again);
}

/// Allocates more segments for an existing cache. Segments that a failure leaves behind do not
/// become part of the cache.
#[test]
fn growing_a_cache_and_renewing_its_ring() {
    for operation in [(|ground| ground.pool.allocate_data(CACHE, 5, 0).map(drop)) as Operation, |ground| {
        ground.pool.allocate_ring(CACHE, 3, 2, 2, &[]).map(drop)
    }] {
        sweep(operation, |mut ground, result, what| {
            assert!(result.is_err(), "{what}: nobody was told");
            assert_eq!(ground.pool.free_segments(), ground.free, "{what}");
            assert_eq!(ground.pool.data_of(CACHE), ground.data, "{what}");
            assert_eq!(ground.pool.rings_of(CACHE), ground.rings, "{what}");
            operation(&mut ground).unwrap_or_else(|error| panic!("{what}, again: {error}"));
            let (data, rings) = (ground.pool.data_of(CACHE), ground.pool.rings_of(CACHE));
            let (ground, _) = reopened(ground);
            assert_eq!((ground.pool.data_of(CACHE), ground.pool.rings_of(CACHE)), (data, rings), "{what}");
        });
        sweep(operation, |ground, _, what| check_reopened(ground, what));
    }
}

#[test]
fn releasing_segments() {
    for (operation, gone) in [
        ((|ground| ground.pool.release(&ground.ring())) as Operation, (0, 2)),
        (|ground| ground.pool.release(&ground.data_places()), (2, 0)),
    ] {
        sweep(operation, |mut ground, result, what| {
            assert!(result.is_err(), "{what}: nobody was told");
            let freed = gone.0 + gone.1;
            assert_eq!(ground.pool.free_segments(), ground.free + freed, "{what}: they count as free");
            // The next write also writes that.
            let more = ground.pool.allocate_data(OTHER, 3, 0).unwrap();
            ground.pool.release(&more.iter().map(|segment| segment.place).collect::<Vec<_>>()).unwrap();
            let (data, rings) = (ground.data.len() - gone.0 as usize, if gone.1 > 0 { 1 } else { 2 });
            let (ground, volatile) = reopened(ground);
            assert_eq!(ground.pool.free_segments(), ground.free + freed + volatile, "{what}");
            let has = (ground.pool.data_of(CACHE).len(), ground.pool.rings_of(CACHE).len());
            assert_eq!(has, (data, rings), "{what}");
        });
        // Otherwise they still exist after the next start, and can be released then.
        sweep(operation, |ground, _, what| {
            let all = ground.pool.segments_of(CACHE);
            let (mut ground, _) = reopened(ground);
            let left: Vec<Segment> =
                ground.pool.segments_of(CACHE).into_iter().filter(|segment| !all.contains(segment)).collect();
            ground.pool.release(&left).unwrap();
            assert_eq!(ground.pool.segments_of(CACHE), all, "{what}");
        });
    }
}

#[test]
fn letting_a_device_have_segments_or_not() {
    let out: Operation = |ground| ground.pool.set_admission(DeviceId(0), Admission::Out);
    sweep(out, |mut ground, result, what| {
        assert!(result.is_err(), "{what}: nobody was told");
        assert_eq!(ground.pool.devices()[0].admission, Admission::Out, "{what}: as long as it is open");
        out(&mut ground).unwrap();
        let (ground, _) = reopened(ground);
        assert_eq!(ground.pool.devices()[0].admission, Admission::Out, "{what}");
        ground.check_cache(&ground.pool, what);
    });
    sweep(out, |ground, _, what| check_reopened(ground, what));
}

/// Adds a new device to a pool: a file that is created, or an existing file.
#[test]
fn taking_a_device_in() {
    for is_there in [false, true] {
        let operation: Operation = if is_there { add_there } else { add_new };
        sweep(operation, |mut ground, result, what| {
            // If a sibling device does not learn of it, at most one number is lost.
            if result.is_err() {
                assert_eq!(ground.pool.devices().len(), 3, "{what}");
                assert_eq!(ground.path("d").exists(), is_there, "{what}");
                match operation(&mut ground) {
                    // The existing content could not be erased either.
                    Err(PoolError::Foreign { .. }) if what.starts_with("From") && is_there => {
                        ground.pool.add_device(&spec(ground.path("d")), Overwrite::Force).unwrap();
                    }
                    other => other.unwrap_or_else(|error| panic!("{what}, again: {error}")),
                }
            }
            assert_eq!(ground.pool.free_segments(), ground.free + SEGMENTS, "{what}");
            let ids: Vec<DeviceId> = ground.pool.devices().iter().map(|device| device.id).collect();
            let Ground { dir, pool, data, rings, free } = ground;
            drop(pool);
            let pool = Pool::open(&["a", "b", "c", "d"].map(|name| dir.path().join(name))).unwrap();
            assert_eq!(pool.devices().iter().map(|device| device.id).collect::<Vec<_>>(), ids, "{what}");
            Ground { dir, pool, data, rings, free }.check_self(what);
        });
        sweep(operation, |ground, _, what| check_reopened(ground, what));
    }
}

fn add_new(ground: &mut Ground) -> Result<(), PoolError> {
    ground.pool.add_device(&spec(ground.path("d")), Overwrite::Refuse).map(drop)
}

fn add_there(ground: &mut Ground) -> Result<(), PoolError> {
    let spec = spec(ground.path("d"));
    if !spec.path.exists() {
        std::fs::File::create(&spec.path).unwrap().set_len(spec.size_bytes.unwrap()).unwrap();
    }
    ground.pool.add_device(&spec, Overwrite::Refuse).map(drop)
}

impl Ground {
    fn check_self(self, what: &str) {
        self.check_cache(&self.pool, what);
    }
}

#[test]
fn taking_a_device_out() {
    let remove: Operation = |ground| ground.pool.remove_device(DeviceId(2));
    sweep(remove, |ground, result, what| {
        assert!(result.is_ok(), "{what}: a sick device can be taken out");
        assert_eq!(ground.pool.free_segments(), ground.free - SEGMENTS, "{what}");
        let Ground { dir, pool, data, rings, free } = ground;
        drop(pool);
        let pool = Pool::open(&["a", "b"].map(|name| dir.path().join(name))).unwrap();
        let mut ground = Ground { dir, pool, data, rings, free };
        ground.check_cache(&ground.pool, what);
        // The remaining content belongs to no pool: the device can be added again, with force if
        // necessary.
        let spec = spec(ground.path("c"));
        match ground.pool.add_device(&spec, Overwrite::Refuse) {
            Err(PoolError::Foreign { .. }) => {
                ground.pool.add_device(&spec, Overwrite::Force).unwrap();
            }
            other => drop(other.unwrap()),
        }
        assert_eq!(ground.pool.devices().len(), 3, "{what}");
    });
}

/// A pool whose creation failed does not prevent the next attempt.
#[test]
fn making_a_pool() {
    for is_there in [false, true] {
        for how in [Failing::Once, Failing::FromThenOn] {
            for nth in 1.. {
                assert!(nth < CHANGES_MAX, "it never ends");
                let dir = tempdir();
                let specs = ["a", "b"].map(|name| spec(dir.path().join(name)));
                if is_there {
                    for spec in &specs {
                        let file = std::fs::File::create(&spec.path).unwrap();
                        file.set_len(spec.size_bytes.unwrap()).unwrap();
                    }
                }
                let failure = fail(dir.path(), nth, how);
                let made = Pool::create("test", &specs, MIB, Overwrite::Refuse);
                let struck = failure.has_struck();
                drop(failure);
                let what = format!("{is_there} {how:?} at {nth}");
                let Err(error) = made else {
                    // Recording a sibling device may fail.
                    if struck {
                        continue;
                    }
                    break;
                };
                is_clear(&error, dir.path());
                assert!(specs.iter().all(|spec| spec.path.exists() == is_there), "{what}");
                // The existing content may not have been erased either.
                let overwrite = match is_there && how == Failing::FromThenOn {
                    true => Overwrite::Force,
                    false => Overwrite::Refuse,
                };
                let again = Pool::create("test", &specs, MIB, overwrite);
                let pool = again.unwrap_or_else(|error| panic!("{what}, again: {error}"));
                assert_eq!(pool.free_segments(), 2 * SEGMENTS, "{what}");
            }
        }
    }
}

/// A pool whose tables cannot be written now can be opened later, and nothing of it is lost.
#[test]
fn opening_a_pool() {
    for how in [Failing::Once, Failing::FromThenOn] {
        for nth in 1.. {
            assert!(nth < CHANGES_MAX, "it never ends");
            let Ground { dir, pool, data, rings, free } = Ground::new();
            let volatile = pool.segments_of(OwnerId(1)).len() as u64;
            drop(pool);
            let paths = ["a", "b", "c"].map(|name| dir.path().join(name));
            let failure = fail(dir.path(), nth, how);
            let opened = Pool::open(&paths);
            let struck = failure.has_struck();
            drop(failure);
            let what = format!("{how:?} at {nth}");
            let pool = match opened {
                Ok(pool) => pool,
                Err(error) => {
                    is_clear(&error, dir.path());
                    Pool::open(&paths).unwrap()
                }
            };
            assert_eq!(pool.free_segments(), free + volatile, "{what}");
            Ground { dir, pool, data, rings, free }.check_self(&what);
            if !struck {
                break;
            }
        }
    }
}
