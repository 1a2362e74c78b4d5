//! Tests of fenced devices that return while the daemon runs.

use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use hob_control::DevicePatch;
use hob_storage::pool::{DeviceSpec, Overwrite, Pool};
use tokio::time::Instant;

use super::*;
use crate::services::pools::RETURN_EVERY;

const BLOCK: u64 = 4096;
/// Size of the cache in [`prepare`], MiB. One of two devices is too small for it.
const CACHE: u64 = 8;
/// Longest time for which [`hang`] keeps the pool's lock, in real time.
const HUNG_MAX: Duration = Duration::from_secs(60);

/// Creates a write-back cache `vm` with dirty data on these devices of 8 MiB each, or of 16 MiB if
/// there is one.
async fn prepare(bench: &Bench, devices: &[&str]) {
    bench.pool(devices, 16 / devices.len() as u64).await;
    bench.disk("vm").await;
    bench.cache_with("vm", CACHE, r#"{"mode":"write-back","dirty_age_max":0}"#).await.unwrap();
    let id = bench.services.registry.inner().disks["vm"].id;
    (0..50).for_each(|block| bench.shard.write(id, block * BLOCK, BLOCK).unwrap());
}

/// Returns the id of a device on the shards.
fn device_id(bench: &Bench, name: &str) -> DeviceId {
    let path = bench.dir.path().join(name);
    let inner = bench.services.registry.inner();
    let device = inner.pools["p"].devices.iter().find(|device| device.path == path);
    device.and_then(|device| device.ids).unwrap().on_shards
}

/// Returns the state of a device, and the reason for it.
fn shown(bench: &Bench, name: &str) -> (DeviceState, String) {
    let path = bench.path(name);
    let pool = bench.services.observe.pool("p").unwrap();
    let device = pool.devices.into_iter().find(|device| device.path == path).unwrap();
    (device.state, device.reason.unwrap_or_default())
}

fn is_online(bench: &Bench, name: &str) -> bool {
    shown(bench, name).0 == DeviceState::Online
}

#[track_caller]
fn assert_shown(bench: &Bench, name: &str, state: DeviceState, part: &str) {
    let (is, reason) = shown(bench, name);
    assert!(is == state && reason.contains(part), "{is:?}: {reason}");
}

/// Reports that a device was fenced.
fn fence(bench: &Bench, name: &str) {
    bench.services.events.handle(ShardEvent::Fenced { device: device_id(bench, name), errors: 16 });
}

/// Lets the daemon check its fenced devices for this time.
async fn pass(bench: &Bench, seconds: u64) {
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        bench.services.pools.look_at_fenced();
        tokio::time::sleep(RETURN_EVERY).await;
    }
}

/// Removes a device from the host. The shard fences it.
fn lose(bench: &Bench, name: &str) {
    bench.take_away(name);
    fence(bench, name);
}

/// Removes a device from the host for this time.
async fn lose_for(bench: &Bench, name: &str, seconds: u64) {
    lose(bench, name);
    pass(bench, seconds).await;
    bench.bring_back(name);
}

/// Lets the daemon check the device `a` for ten minutes. The device must stay fenced for a reason
/// that has `part`, and must keep its content.
async fn assert_not_formatted(bench: &Bench, part: &str) {
    let before = std::fs::read(bench.path("a")).unwrap();
    pass(bench, 600).await;
    assert_shown(bench, "a", DeviceState::Fenced, part);
    assert!(std::fs::read(bench.path("a")).unwrap() == before);
}

/// Keeps the pool's lock, as an operation does that waits for a device, until the sender is dropped.
/// The operation has a runtime of its own, so that virtual time continues.
fn hang(bench: &Bench) -> (Sender<()>, JoinHandle<()>) {
    let flash = bench.services.registry.inner().pools["p"].flash.clone();
    let (begin, has_begun) = channel();
    let (release, is_released) = channel::<()>();
    let hung = std::thread::spawn(move || {
        crate::background::run_in_real_time(async move {
            let wait = move |_: &mut Option<Pool>| {
                begin.send(()).unwrap();
                let _ = is_released.recv_timeout(HUNG_MAX);
                Ok(())
            };
            flash.with(wait).await.unwrap();
        });
    });
    has_begun.recv().unwrap();
    (release, hung)
}

/// Creates the cache of [`prepare`] on the devices `a` and `b`. Removes `a`, and lets it return
/// while the shards refuse it, so that the daemon closes it.
async fn closed_device(bench: &Bench) {
    prepare(bench, &["a", "b"]).await;
    lose_for(bench, "a", 60).await;
    bench.shard.set_refuses_devices(true);
    pass(bench, 100).await;
    assert_shown(bench, "a", DeviceState::Offline, "after it has answered for 120 s");
}

async fn health(bench: &Bench) -> Vec<(hob_control::ProblemKind, String)> {
    let problems = bench.services.observe.health().await.problems.into_iter();
    problems.map(|problem| (problem.kind, problem.reason)).collect()
}

#[test]
fn a_device_that_was_removed_returns_empty_and_the_cache_grows_again() {
    run(async |bench| {
        let bench = bench.with_state();
        prepare(&bench, &["a", "b"]).await;
        let (free, before) = (bench.free(), device_id(&bench, "a"));
        assert_eq!(bench.room("vm"), CACHE);
        lose(&bench, "a");
        pass(&bench, 120).await;
        assert_shown(&bench, "a", DeviceState::Fenced, "No such file or directory");
        assert_shown(&bench, "a", DeviceState::Fenced, "after it has answered for 60 s");
        assert!(bench.room("vm") < CACHE, "{}", bench.room("vm"));
        let problems = health(&bench).await;
        let kinds: Vec<_> = problems.iter().map(|(kind, _)| kind.name()).collect();
        assert_eq!(kinds, ["device-fenced", "cache-degraded"], "{problems:?}");
        assert!(problems[0].1.starts_with("fenced after 16 failed I/Os; the device "), "{problems:?}");

        bench.bring_back("a");
        pass(&bench, 40).await;
        assert_shown(&bench, "a", DeviceState::Fenced, "answers again");
        pass(&bench, 60).await;
        assert_eq!(shown(&bench, "a"), (DeviceState::Online, String::new()));
        assert_eq!((bench.room("vm"), bench.free()), (CACHE, free));
        assert_ne!(device_id(&bench, "a"), before);
        let problems = health(&bench).await;
        assert!(problems.is_empty(), "{problems:?}");
        let id = bench.services.registry.inner().disks["vm"].id;
        bench.shard.write(id, 2 << 20, BLOCK).unwrap();

        // The next return takes twice the time.
        lose_for(&bench, "a", 60).await;
        pass(&bench, 100).await;
        assert_shown(&bench, "a", DeviceState::Fenced, "after it has answered for 120 s");
        pass(&bench, 60).await;
        assert!(is_online(&bench, "a"));
    });
}

/// A volatile cache loses its segments on the device at once.
#[test]
fn segments_that_a_cache_lost_are_free_when_their_device_returns() {
    run(async |bench| {
        bench.pool(&["a", "b"], 4).await;
        bench.disk("vm").await;
        bench.cache("vm", 6).await.unwrap();
        let device = device_id(&bench, "a");
        let (disk, segments) = {
            let inner = bench.services.registry.inner();
            let disk = &inner.disks["vm"];
            let lost = disk.held.iter().filter(|segment| segment.device == device);
            (disk.id, lost.copied().collect::<Vec<_>>())
        };
        assert_eq!(segments.len(), 3);
        lose_for(&bench, "a", 20).await;
        // The cache has segments on the device until the shard has reported their loss.
        pass(&bench, 200).await;
        assert_shown(&bench, "a", DeviceState::Fenced, "the caches of these disks have data on it: vm");
        bench.services.events.handle(ShardEvent::Lost { disk, segments });
        assert_eq!(bench.room("vm"), 3);
        pass(&bench, 20).await;
        assert!(is_online(&bench, "a"), "{:?}", shown(&bench, "a"));
        assert_eq!((bench.room("vm"), bench.free()), (6, 2));
    });
}

/// The path leads to the device again, but the former descriptors do not.
#[test]
fn a_device_that_was_connected_again_before_the_fence_returns() {
    run(async |bench| {
        bench.pool(&["a", "b"], 4).await;
        // The fence must not write to the former file, as it could not write to such a device.
        let out = DevicePatch { admission: Admission::Out };
        bench.services.pools.device_set("p".into(), bench.path("a"), out).await.unwrap();
        std::fs::copy(bench.path("a"), bench.path("a.copy")).unwrap();
        bench.take_away("a");
        std::fs::rename(bench.path("a.copy"), bench.path("a")).unwrap();
        let former = std::fs::File::options().write(true).open(bench.path("a.away")).unwrap();
        former.set_len(0).unwrap();
        fence(&bench, "a");
        pass(&bench, 40).await;
        assert_shown(&bench, "a", DeviceState::Fenced, "answers again");
        pass(&bench, 60).await;
        assert!(is_online(&bench, "a"), "{:?}", shown(&bench, "a"));
        assert_eq!(bench.services.observe.pool("p").unwrap().size, Size(8 * MIB));
    });
}

/// The write of the superblock that follows a fence waits for the device.
#[test]
fn a_device_that_hangs_since_its_fence_is_away() {
    crate::background::run_in_real_time(async {
        let bench = Bench::new();
        bench.pool(&["a", "b"], 4).await;
        let (release, hung) = hang(&bench);
        lose(&bench, "a");
        let begun = Instant::now();
        while !shown(&bench, "a").1.contains("is not usable: hob does not know yet which superblock") {
            assert!(begun.elapsed() < HUNG_MAX / 2, "{:?}", shown(&bench, "a"));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(!hung.is_finished());
        drop(release);
        hung.join().unwrap();
    });
}

#[test]
fn a_device_is_checked_while_another_one_hangs() {
    run(async |bench| {
        bench.pool(&["a", "b"], 4).await;
        fence(&bench, "a");
        pass(&bench, 20).await;
        let (release, hung) = hang(&bench);
        pass(&bench, 20).await;
        assert_shown(&bench, "a", DeviceState::Fenced, "was not removed from the host since then");
        bench.take_away("a");
        pass(&bench, 20).await;
        assert_shown(&bench, "a", DeviceState::Fenced, "No such file or directory");
        bench.bring_back("a");
        assert!(!hung.is_finished());
        drop(release);
        hung.join().unwrap();
        pass(&bench, 100).await;
        assert!(is_online(&bench, "a"), "{:?}", shown(&bench, "a"));
    });
}

#[test]
fn a_device_that_answers_all_the_time_stays_fenced() {
    run(async |bench| {
        prepare(&bench, &["a", "b"]).await;
        fence(&bench, "a");
        pass(&bench, 1200).await;
        assert_shown(&bench, "a", DeviceState::Fenced, "was not removed from the host since then");
        let remedy = format!("'hob pool remove-device p {}'", bench.path("a"));
        assert_shown(&bench, "a", DeviceState::Fenced, &remedy);
        bench.services.pools.device_remove("p".into(), bench.path("a")).await.unwrap();
        pass(&bench, 600).await;
        assert_eq!(bench.services.observe.pool("p").unwrap().devices.len(), 1);
    });
}

/// A device whose reads fail for some time may have bad sectors. It is the same device all the time.
#[test]
fn a_device_whose_checks_fail_with_read_errors_is_not_formatted() {
    run(async |bench| {
        bench.pool(&["a", "b"], 4).await;
        bench.take_away("a");
        std::os::unix::fs::symlink(bench.path("a"), bench.path("a")).unwrap();
        fence(&bench, "a");
        pass(&bench, 60).await;
        assert_shown(&bench, "a", DeviceState::Fenced, "failed a check");
        assert_shown(&bench, "a", DeviceState::Fenced, "connect it again, or remove it from the pool");
        let problems = health(&bench).await;
        assert!(problems[0].0.name() == "device-fenced" && problems[0].1.contains("failed a check"));
        std::fs::remove_file(bench.path("a")).unwrap();
        bench.bring_back("a");
        for _ in 0..2 {
            assert_not_formatted(&bench, "was not removed from the host since then").await;
        }
        // The operator connects the device again.
        bench.take_away("a");
        pass(&bench, 20).await;
        bench.bring_back("a");
        pass(&bench, 100).await;
        assert!(is_online(&bench, "a"), "{:?}", shown(&bench, "a"));
    });
}

#[test]
fn another_device_at_the_path_is_not_formatted() {
    run(async |bench| {
        prepare(&bench, &["a", "b"]).await;
        lose(&bench, "a");
        std::fs::copy(bench.path("b"), bench.path("a")).unwrap();
        assert_not_formatted(&bench, "is another device than before").await;
        let bytes = std::fs::metadata(bench.path("a")).unwrap().len();
        std::fs::write(bench.path("a"), vec![0; bytes as usize]).unwrap();
        assert_not_formatted(&bench, "has no superblock of a hob pool any more").await;
        bench.bring_back("a");
        pass(&bench, 100).await;
        assert!(is_online(&bench, "a"));
    });
}

/// The device is on shared storage, and another host has created a pool of the same name on it.
#[test]
fn a_device_that_another_host_has_formatted_is_not_formatted() {
    run(async |bench| {
        prepare(&bench, &["a", "b"]).await;
        lose(&bench, "a");
        pass(&bench, 20).await;
        let path = bench.dir.path().join("other");
        std::fs::copy(bench.path("a.away"), &path).unwrap();
        let spec = DeviceSpec { path: path.clone(), size_bytes: None };
        drop(Pool::create("p", &[spec], SEGMENT, Overwrite::Force).unwrap());
        std::fs::rename(&path, bench.path("a")).unwrap();
        assert_not_formatted(&bench, "is another device than before").await;
        // Also after a failed attempt of the other host, which leaves no superblock.
        let file = std::fs::File::options().write(true).open(bench.path("a")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[0; MIB as usize], 0).unwrap();
        assert_not_formatted(&bench, "has no superblock of a hob pool any more").await;
    });
}

/// The device is on shared storage, and another host has opened the pool with its content.
#[test]
fn a_device_that_another_host_has_used_is_not_formatted() {
    run(async |bench| {
        prepare(&bench, &["a", "b"]).await;
        lose(&bench, "a");
        pass(&bench, 20).await;
        let path = bench.dir.path().join("other");
        std::fs::copy(bench.path("a.away"), &path).unwrap();
        let mut pool = Pool::open(std::slice::from_ref(&path)).unwrap();
        let id = pool.devices()[0].id;
        pool.set_admission(id, hob_storage::pool::Admission::In).unwrap();
        drop(pool);
        std::fs::rename(&path, bench.path("a")).unwrap();
        assert_not_formatted(&bench, "so another host may use it").await;
        bench.bring_back("a");
        pass(&bench, 100).await;
        assert!(is_online(&bench, "a"), "{:?}", shown(&bench, "a"));
    });
}

/// The only device of a pool has the only copy of dirty data, and the backing fails.
#[test]
fn a_device_with_dirty_data_returns_when_the_data_has_left_it() {
    run(async |bench| {
        prepare(&bench, &["a"]).await;
        let uuid = || bench.services.registry.inner().pools["p"].uuid.clone();
        let (before, sick) = (uuid(), device_id(&bench, "a"));
        bench.shard.set_backings_fail(true);
        lose_for(&bench, "a", 20).await;
        pass(&bench, 300).await;
        assert_shown(&bench, "a", DeviceState::Fenced, "the caches of these disks have data on it: vm");
        assert!(bench.services.observe.stats("vm").await.unwrap().dirty_bytes > 0);
        bench.shard.set_backings_fail(false);
        for _ in 0..60 {
            bench.services.pools.flee(sick).await;
            pass(&bench, 10).await;
            if is_online(&bench, "a") {
                break;
            }
        }
        assert!(is_online(&bench, "a"), "{:?}", shown(&bench, "a"));
        // The daemon repeats this every 5 s, because the disk may be busy when the device returns.
        bench.services.pools.top_up("p").await;
        assert_eq!((uuid(), bench.room("vm")), (before, CACHE));
    });
}

#[test]
fn a_device_that_cannot_be_used_yet_is_closed_and_its_content_is_not_used() {
    run(async |bench| {
        let bench = bench.with_state();
        closed_device(&bench).await;
        bench.shard.set_refuses_devices(false);
        assert!(!bench.services.pools.retry_devices("p").await);
        assert!(!is_online(&bench, "a"));
        pass(&bench, 150).await;
        assert!(is_online(&bench, "a"), "{:?}", shown(&bench, "a"));
        assert_eq!(bench.room("vm"), CACHE);
    });
}

/// The cache of an offline disk may need its journal on another device.
#[test]
fn the_removal_of_a_closed_device_keeps_the_journals_of_offline_disks() {
    run(async |bench| {
        closed_device(&bench).await;
        {
            let mut inner = bench.services.registry.inner();
            let disk = inner.disk_mut("vm").unwrap();
            disk.phase = DiskPhase::Offline("no such file".to_owned());
            disk.ring.clear();
        }
        bench.services.pools.device_remove("p".into(), bench.path("a")).await.unwrap();
        let inner = bench.services.registry.inner();
        assert!(!inner.disks["vm"].cache().unwrap().journal.unwrap().ended);
    });
}
