//! Persistent caches when the daemon stops, cleanly or not, and starts again.

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use hob_control::{PlannedPoolChange, ProblemKind};
use hob_storage::failing::{self, Failing};

use super::*;

pub(super) const BLOCK: u64 = 4096;

/// Settings of a cache that keeps dirty data until it is drained.
pub(super) const LAZY: &str =
    r#"{"mode":"write-back","dirty_age_max":0,"dirty_start":90,"dirty_stop":80,"dirty_full":100}"#;

/// Time after which the journal has the filled data.
pub(super) const COMMITTED: Duration = Duration::from_secs(5);

/// Prepares a bench whose daemon has a state directory, a pool `p` of devices `a` and `b`, and a
/// disk `vm`.
pub(super) async fn prepare(bench: Bench, json: &str) -> Bench {
    let bench = bench.with_state();
    bench.pool(&["a", "b"], 8).await;
    bench.disk("vm").await;
    bench.cache_with("vm", 4, json).await.unwrap();
    bench
}

/// Kills and restarts the daemon.
pub(super) async fn crash(bench: Bench) -> Bench {
    let Bench { dir, services, shard } = bench;
    shard.stop();
    drop(services);
    let (services, shard) = restart(&dir.path().join("state"), "").await;
    Bench { dir, services, shard }
}

/// Stops the daemon cleanly and starts it again, with an action in between.
pub(super) async fn end(bench: Bench, drain: bool, meanwhile: impl FnOnce(&Path)) -> Bench {
    bench.services.shutdown.close(if drain { Ending::Drain } else { Ending::Plain }).await;
    let Bench { dir, services, shard } = bench;
    shard.stop();
    drop(services);
    meanwhile(dir.path());
    let (services, shard) = restart(&dir.path().join("state"), "").await;
    Bench { dir, services, shard }
}

pub(super) fn write(bench: &Bench, blocks: std::ops::Range<u64>) {
    let id = bench.services.registry.inner().disks["vm"].id;
    blocks.for_each(|block| bench.shard.write(id, block * BLOCK, BLOCK).unwrap());
}

pub(super) fn read(bench: &Bench, blocks: std::ops::Range<u64>) {
    let id = bench.services.registry.inner().disks["vm"].id;
    blocks.for_each(|block| bench.shard.read(id, block * BLOCK, BLOCK).unwrap());
}

/// Returns the numbers of valid and of dirty sectors.
pub(super) async fn sectors(bench: &Bench) -> (u64, u64) {
    let stats = bench.services.observe.stats("vm").await.unwrap();
    (stats.sectors_valid, stats.dirty_bytes / BLOCK)
}

/// Returns the reason why the disk is offline.
pub(super) fn reason(bench: &Bench) -> String {
    let disk = bench.services.observe.disk("vm").unwrap();
    assert_eq!(disk.state, DiskLife::Offline, "{disk:?}");
    disk.reason.unwrap()
}

/// Writes to the backing without hob.
fn change_backing(dir: &Path) {
    let file = std::fs::File::options().write(true).open(dir.join("vm.img")).unwrap();
    file.write_all_at(&[7; 4096], 1 << 20).unwrap();
    let later = std::time::SystemTime::now() + Duration::from_secs(10);
    file.set_modified(later).unwrap();
}

/// Promise 1: under write-back, flushed writes survive a crash of the daemon.
#[test]
fn flushed_writes_survive_a_crash_of_the_daemon() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..300);
        read(&bench, 1000..1100);
        let free = bench.free();
        let bench = crash(bench).await;
        let (valid, dirty) = sectors(&bench).await;
        assert_eq!(dirty, 300);
        assert!(valid >= 300, "{valid}");
        assert_eq!((bench.room("vm"), bench.free()), (4, free));
        let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert_eq!(
            (cache.state, cache.reason, cache.mode.as_str()),
            (CacheState::Active, None, "write-back")
        );
        // Once more, without a change in between.
        let bench = crash(bench).await;
        assert_eq!((sectors(&bench).await.1, bench.free()), (300, free));
        bench.services.disks.disk_remove("vm".into(), OnDirty::Drain).await.unwrap();
        assert_eq!(bench.free(), 16);
    });
}

#[test]
fn a_clean_end_keeps_everything_warm_and_dirty_data_dirty() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..100);
        read(&bench, 1000..1100);
        let before = sectors(&bench).await;
        assert_eq!(before, (200, 100));
        tokio::time::sleep(COMMITTED).await;
        let bench = end(bench, false, |_| ()).await;
        assert_eq!(sectors(&bench).await, before);
        let bench = end(bench, true, |_| ()).await;
        assert_eq!(sectors(&bench).await, (200, 0), "drained at the end, because that was asked for");
    });
}

#[test]
fn a_persistent_read_cache_is_warm_after_an_end_and_after_a_crash() {
    run(async |bench| {
        let bench = prepare(bench, r#"{"persistent":true}"#).await;
        read(&bench, 0..500);
        assert_eq!(sectors(&bench).await, (500, 0));
        tokio::time::sleep(COMMITTED).await;
        let bench = end(bench, false, |_| ()).await;
        assert_eq!(sectors(&bench).await, (500, 0));
        tokio::time::sleep(COMMITTED).await;
        let bench = crash(bench).await;
        assert_eq!(sectors(&bench).await, (500, 0));
    });
}

/// Returns the number of bytes that were compared with the backing since the start of the daemon,
/// or that still must be compared.
async fn compared(bench: &Bench) -> u64 {
    let stats = bench.services.observe.stats("vm").await.unwrap();
    stats.unverified_bytes + stats.verified_bytes + stats.stale_bytes
}

/// Writes one sector without hob, and restores the modification time.
fn change_secretly(dir: &Path) {
    let file = std::fs::File::options().write(true).open(dir.join("vm.img")).unwrap();
    let before = file.metadata().unwrap().modified().unwrap();
    file.write_all_at(&[0; 512], 32 << 20).unwrap();
    file.set_modified(before).unwrap();
    assert_eq!(file.metadata().unwrap().modified().unwrap(), before);
}

/// Promise 2: stale flash is never served. The directory for temporary files must be on a
/// filesystem with reliable timestamps: ext4, XFS, Btrfs, F2FS.
#[test]
fn a_file_is_evidence_after_an_end_and_a_secret_change_is_none() {
    run(async |bench| {
        let bench = prepare(bench, r#"{"persistent":true}"#).await;
        read(&bench, 0..500);
        tokio::time::sleep(COMMITTED).await;
        let bench = end(bench, false, |_| ()).await;
        assert_eq!((sectors(&bench).await, compared(&bench).await), ((500, 0), 0));
        let bench = end(bench, false, change_secretly).await;
        assert_eq!((sectors(&bench).await, compared(&bench).await), ((500, 0), 500 * BLOCK));
        bench.services.pools.look_at_dirty();
        tokio::time::sleep(Duration::from_millis(1)).await;
        let left = bench.services.observe.stats("vm").await.unwrap().unverified_bytes;
        assert!(left > 0);
        let shown = bench.services.observe.disk("vm").unwrap().cache.unwrap().verification.unwrap();
        assert_eq!((shown.left, shown.total), (Size(left), Size(500 * BLOCK)));
    });
}

/// Lets the daemon check the backing until there is evidence: the timestamps of a changed file must
/// settle.
async fn heartbeat(bench: &Bench) {
    let recorded = || bench.services.registry.inner().disks["vm"].cache().unwrap().journal.unwrap().evidence;
    for _ in 0..6000 {
        bench.services.disks.record_evidence_now().await;
        if recorded().is_some() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("no evidence on this filesystem");
}

/// Evidence that a daemon recorded before it was killed is valid, unless something has changed
/// since.
#[test]
fn the_heartbeat_is_evidence_after_a_crash() {
    run(async |bench| {
        let bench = prepare(bench, r#"{"persistent":true}"#).await;
        read(&bench, 0..500);
        let bench = end(bench, false, |_| ()).await;
        tokio::time::sleep(COMMITTED).await;
        heartbeat(&bench).await;
        let bench = crash(bench).await;
        assert_eq!((sectors(&bench).await, compared(&bench).await), ((500, 0), 0));
        tokio::time::sleep(COMMITTED).await;
        heartbeat(&bench).await;
        change_secretly(bench.dir.path());
        let bench = crash(bench).await;
        assert_eq!((sectors(&bench).await, compared(&bench).await), ((500, 0), 500 * BLOCK));
    });
}

/// A program that ignores locks writes to a read-only file while its disk is served. The file's
/// state after that is no evidence for data that was cached before. This is part of promise 2:
/// stale flash is never served.
#[test]
fn a_read_only_file_that_changes_under_its_disk_is_no_evidence() {
    for is_clean in [false, true] {
        run(async |bench| {
            let bench = bench.with_state();
            bench.pool(&["a", "b"], 8).await;
            let backing = bench.image("vm.img", 64);
            let add = DiskAdd { name: "vm".into(), backing, read_only: true, ..DiskAdd::default() };
            bench.services.disks.disk_add(add).await.unwrap();
            bench.cache_with("vm", 4, r#"{"persistent":true}"#).await.unwrap();
            read(&bench, 0..500);
            tokio::time::sleep(COMMITTED).await;
            heartbeat(&bench).await;
            let bench = end(bench, false, |_| ()).await;
            assert_eq!((sectors(&bench).await, compared(&bench).await), ((500, 0), 0), "it is unchanged");
            tokio::time::sleep(COMMITTED).await;
            change_secretly(bench.dir.path());
            // The time of the change must settle.
            std::thread::sleep(Duration::from_millis(200));
            bench.services.disks.record_evidence_now().await;
            let bench = if is_clean { end(bench, false, |_| ()).await } else { crash(bench).await };
            let expected = ((500, 0), 500 * BLOCK);
            assert_eq!((sectors(&bench).await, compared(&bench).await), expected, "{is_clean}");
        });
    }
}

#[test]
fn an_operator_can_trust_or_compare_always() {
    run(async |bench| {
        let bench = prepare(bench, r#"{"persistent":true,"verify":"trust"}"#).await;
        read(&bench, 0..500);
        tokio::time::sleep(COMMITTED).await;
        let bench = end(bench, false, change_secretly).await;
        assert_eq!((sectors(&bench).await, compared(&bench).await), ((500, 0), 0));
        let patch = serde_json::from_str(r#"{"verify":"always"}"#).unwrap();
        let changed = bench.services.pools.cache_patch("vm".into(), patch).await.unwrap();
        assert_eq!(changed.disk.unwrap().cache.unwrap().verify, "always");
        assert_eq!(sectors(&bench).await, (500, 0), "it keeps what it holds");
        let bench = end(bench, false, |_| ()).await;
        assert_eq!((sectors(&bench).await, compared(&bench).await), ((500, 0), 500 * BLOCK));
    });
}

/// Promise 2: stale flash is never served.
#[test]
fn a_backing_that_was_changed_meanwhile_empties_a_clean_cache() {
    run(async |bench| {
        let bench = prepare(bench, r#"{"persistent":true}"#).await;
        read(&bench, 0..500);
        let free = bench.free();
        let bench = end(bench, false, change_backing).await;
        assert_eq!(sectors(&bench).await, (0, 0));
        assert_eq!((bench.room("vm"), bench.free()), (4, free));
    });
}

/// After a crash there is no timestamp to compare: a sample of the cached data is compared with the
/// backing.
#[test]
fn after_a_crash_a_sample_tells_a_backing_that_was_changed() {
    run(async |bench| {
        let bench = prepare(bench, r#"{"persistent":true}"#).await;
        read(&bench, 0..512);
        tokio::time::sleep(COMMITTED).await;
        let image = std::fs::File::options().write(true).open(bench.dir.path().join("vm.img")).unwrap();
        image.write_all_at(&vec![7; 2 << 20], 0).unwrap();
        let bench = crash(bench).await;
        assert_eq!(sectors(&bench).await, (0, 0));
    });
}

const MINUTE: Duration = Duration::from_secs(60);

/// Lets the daemon record that it serves its disks, kills it, and starts it again. Before the kill,
/// sets the time of the backing's last change to this moment plus `later`.
async fn crash_and_change(bench: Bench, later: Duration) -> Bench {
    bench.services.disks.record_served_disks_now().await;
    set_modified(bench.dir.path(), later);
    crash(bench).await
}

fn set_modified(dir: &Path, later: Duration) {
    let file = std::fs::File::options().write(true).open(dir.join("vm.img")).unwrap();
    file.set_modified(std::time::SystemTime::now() + later).unwrap();
}

async fn set_verify(bench: &Bench, verify: &str) {
    let patch = serde_json::from_value(serde_json::json!({ "verify": verify })).unwrap();
    bench.services.pools.cache_patch("vm".into(), patch).await.unwrap();
}

/// The backing was changed after hob was killed, for example because an operator restored a backup.
/// The directory for temporary files must be on a filesystem with reliable timestamps.
#[test]
fn a_backing_that_was_changed_after_a_crash_is_not_written_over_with_dirty_data() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 5..15);
        let bench = crash_and_change(bench, Duration::ZERO).await;
        let bench = crash_and_change(bench, MINUTE).await;
        assert_eq!(sectors(&bench).await.1, 10, "the last record may be lost");
        let bench = crash_and_change(bench, 10 * MINUTE).await;
        let refusal = "its backing was changed by another program at ";
        let why = reason(&bench);
        assert!(why.contains(refusal) && why.contains("40 KiB of its cache are dirty"), "{why}");
        for part in ["export-dirty vm FILE", "discard-dirty vm --yes", "hob cache set vm --verify trust"] {
            assert!(why.contains(part), "{why}");
        }
        // An attempt or another start changes nothing.
        bench.services.disks.bring_online("vm").await;
        assert!(reason(&bench).contains(refusal));
        let bench = crash(bench).await;
        assert!(reason(&bench).contains(refusal));
        let other = serde_json::from_str(r#"{"policy":"lru"}"#).unwrap();
        let error = bench.services.pools.cache_patch("vm".into(), other).await.unwrap_err();
        assert!(error.to_string().contains("vm is offline"), "{error}");
        set_verify(&bench, "trust").await;
        bench.services.disks.bring_online("vm").await;
        assert_eq!(sectors(&bench).await.1, 10);
        set_verify(&bench, "auto").await;
        let bench = crash(bench).await;
        assert_eq!(sectors(&bench).await.1, 10, "the change was accepted");
    });
}

#[test]
fn a_clean_cache_is_compared_if_its_backing_was_changed_after_a_crash() {
    run(async |bench| {
        let bench = prepare(bench, r#"{"persistent":true}"#).await;
        read(&bench, 0..500);
        let bench = end(bench, false, |_| ()).await;
        let bench = crash_and_change(bench, 10 * MINUTE).await;
        assert_eq!((sectors(&bench).await, compared(&bench).await), ((500, 0), 500 * BLOCK));
    });
}

/// hob wrote to the backing while the clock was wrong, and the clock was then set back.
#[test]
fn a_clock_that_was_set_back_is_no_change_by_another_program() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 5..15);
        set_modified(bench.dir.path(), 60 * MINUTE);
        bench.services.disks.record_served_disks_now().await;
        let bench = crash(bench).await;
        assert_eq!(sectors(&bench).await.1, 10);
    });
}

/// While a disk waits for its device, hob tries to open the disk, but does not serve it. So another
/// program has made the change.
#[test]
fn a_change_while_a_disk_waits_for_its_device_is_noticed() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..500);
        bench.services.disks.record_served_disks_now().await;
        bench.take_away("b");
        let bench = crash(bench).await;
        assert!(!reason(&bench).contains("by another program"), "{}", reason(&bench));
        bench.services.disks.bring_online("vm").await;
        bench.services.disks.record_served_disks_now().await;
        set_modified(bench.dir.path(), 10 * MINUTE);
        bench.bring_back("b");
        bench.services.pools.retry_devices("p").await;
        bench.services.disks.bring_online("vm").await;
        assert!(reason(&bench).contains("by another program"), "{}", reason(&bench));
    });
}

/// hob crashes again before it has recorded that it serves the disk, or it never records that.
#[test]
fn without_a_record_of_the_last_start_a_backing_counts_as_unknown() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 5..15);
        let bench = crash_and_change(bench, Duration::ZERO).await;
        set_modified(bench.dir.path(), 10 * MINUTE);
        let bench = crash(bench).await;
        assert_eq!(sectors(&bench).await.1, 10);
        bench.services.disks.record_served_disks_now().await;
        std::fs::remove_file(bench.dir.path().join("state/last-served")).unwrap();
        set_modified(bench.dir.path(), 30 * MINUTE);
        let bench = crash(bench).await;
        assert_eq!(sectors(&bench).await.1, 10);
    });
}

#[test]
fn a_backing_that_was_changed_meanwhile_is_not_written_over_with_dirty_data() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 5..15);
        write(&bench, 20..21);
        let bench = end(bench, false, change_backing).await;
        let why = reason(&bench);
        assert!(why.contains("its backing was changed") && why.contains("44 KiB"), "{why}");
        for part in ["hob cache discard-dirty vm", "hob cache export-dirty vm"] {
            assert!(why.contains(part), "{why}");
        }
        for dirty in [
            bench.services.disks.cache_disable("vm".into(), OnDirty::Drain).await,
            bench.services.disks.disk_remove("vm".into(), OnDirty::Drain).await,
        ] {
            let error = dirty.unwrap_err().to_string();
            assert!(error.contains("--discard-dirty") && error.contains("export-dirty vm"), "{error}");
        }
        // The daemon does not read the cache repeatedly, and the disk stays refused.
        bench.services.disks.bring_online("vm").await;
        assert!(reason(&bench).contains("its backing was changed"));
        let path = bench.path("rescue");
        let export = hob_control::ExportDirty { path: path.clone() };
        let map = format!("{path}.map");
        std::fs::write(&map, "another").unwrap();
        bench.services.disks.export_dirty("vm".into(), export.clone()).await.unwrap_err();
        assert!(!Path::new(&path).exists() && std::fs::read_to_string(&map).unwrap() == "another");
        std::fs::remove_file(&map).unwrap();
        let notes = bench.services.disks.export_dirty("vm".into(), export.clone()).await.unwrap().notes;
        assert!(notes[0].contains("44 KiB"), "{notes:?}");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 64 * MIB);
        for path in [path.clone(), format!("{path}.map")] {
            let mode =
                std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
            assert_eq!(mode & 0o777, 0o600, "{path}");
        }
        assert_eq!(
            std::fs::read_to_string(format!("{path}.map")).unwrap(),
            "data 20480 40960\ndata 81920 4096\n"
        );
        let error = bench.services.disks.export_dirty("vm".into(), export).await.unwrap_err();
        assert!(error.to_string().contains("exists"), "{error}");
        let changed = bench.services.disks.discard_dirty("vm".into()).await.unwrap();
        assert!(changed.notes[0].contains("is lost"), "{:?}", changed.notes);
        assert_eq!(changed.disk.unwrap().state, DiskLife::Online);
        assert_eq!((sectors(&bench).await, bench.room("vm")), ((0, 0), 4));
        assert!(bench.services.observe.pool("p").unwrap().orphans.is_empty());
    });
}

/// An export takes hours, and a lost journal needs a new ring within half a minute: other
/// operations on the pool do not wait for the export.
#[test]
fn an_export_does_not_keep_the_pool() {
    // One thread for all blocking calls: they run in the order of the requests.
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().max_blocking_threads(1).build().unwrap();
    runtime.block_on(async {
        let bench = prepare(Bench::new(), LAZY).await;
        write(&bench, 5..15);
        let bench = end(bench, false, change_backing).await;
        let path = bench.path("rescue");
        let (go, waits) = std::sync::mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || waits.recv());
        let export = hob_control::ExportDirty { path: path.clone() };
        let services = bench.services.clone();
        let export = tokio::spawn(async move { services.disks.export_dirty("vm".into(), export).await });
        while bench.services.registry.inner().disks["vm"].busy.is_none() {
            tokio::task::yield_now().await;
        }
        let flash = bench.services.registry.inner().pool("p").unwrap().flash.clone();
        let of = path.clone();
        let other = flash.read(move |_| Ok(Path::new(&of).exists()));
        let (was_written, ..) = tokio::join!(other, async { go.send(()) });
        assert!(!was_written.unwrap(), "the pool was kept until the file was there");
        assert!(export.await.unwrap().is_ok() && Path::new(&path).exists());
        busy.await.unwrap().unwrap();
    });
}

#[test]
fn another_backing_or_size_is_told_from_the_one_before() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..1);
        let swap = |dir: &Path, mib: u64| {
            std::fs::rename(dir.join("vm.img"), dir.join(format!("vm.{mib}"))).unwrap();
            let mut file = std::fs::File::create(dir.join("vm.img")).unwrap();
            file.write_all(b"another").unwrap();
            file.set_len(mib * MIB).unwrap();
        };
        let bench = end(bench, false, |dir| swap(dir, 64)).await;
        let why = reason(&bench);
        assert!(why.contains("its backing is not the same as before"), "{why}");
        let bench = end(bench, false, |dir| swap(dir, 32)).await;
        let why = reason(&bench);
        assert!(why.contains("33554432 bytes and had 67108864"), "{why}");
        // The right backing again: nothing was lost.
        let bench =
            end(bench, false, |dir| std::fs::rename(dir.join("vm.64"), dir.join("vm.img")).unwrap()).await;
        assert_eq!(sectors(&bench).await, (1, 1));
    });
}

#[test]
fn a_device_that_is_away_with_dirty_data_keeps_the_disk_offline() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..500);
        let bench = end(bench, false, |dir| take_away(dir, "b")).await;
        let why = reason(&bench);
        assert!(why.contains("/b of pool p is missing, and may have dirty data"), "{why}");
        let bench = end(bench, false, |dir| bring_back(dir, "b")).await;
        assert_eq!(sectors(&bench).await, (500, 500));
    });
}

#[test]
fn with_two_copies_a_device_may_be_away() {
    run(async |bench| {
        let bench = prepare(bench, r#"{"preset":"auto","dirty_age_max":0}"#).await;
        write(&bench, 0..100);
        assert_eq!(sectors(&bench).await.1, 100);
        let bench = end(bench, false, |dir| take_away(dir, "b")).await;
        let disk = bench.services.observe.disk("vm").unwrap();
        assert_eq!((disk.state, disk.reason), (DiskLife::Online, None));
        let reason = disk.cache.unwrap().reason.unwrap();
        assert!(reason.contains("dirty data has one copy"), "{reason}");
        // Data with only one copy is destaged, or is still dirty.
        let stats = bench.services.observe.stats("vm").await.unwrap();
        assert_eq!(stats.dirty_bytes + stats.destaged_bytes, 100 * BLOCK);
    });
}

#[test]
fn a_cache_of_no_disk_is_shown_and_discarded_by_name() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..10);
        let free = bench.free();
        let forget = |dir: &Path| {
            let path = dir.join("state/state.json");
            let mut state: serde_json::Value =
                serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            state["disks"] = serde_json::json!([]);
            std::fs::write(&path, serde_json::to_vec(&state).unwrap()).unwrap();
        };
        let bench = end(bench, false, forget).await;
        let orphans = bench.services.observe.pool("p").unwrap().orphans;
        assert_eq!((orphans.len(), orphans[0].size.bytes() / MIB), (1, 16 - free));
        let discard = |owner: &str| bench.services.disks.orphan_discard("p".into(), owner.into());
        let error = discard("00000000000000000000000000000001").await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::NotFound, "{error}");
        assert_eq!(discard("xyz").await.unwrap_err().kind, ErrorKind::Invalid);
        let change = PlannedPoolChange::DiscardOrphan { owner: orphans[0].owner.clone() };
        let preview = bench.services.disks.pool_preview("p", &change).await.unwrap();
        assert_eq!((preview.cached, preview.dirty_lost), (orphans[0].size, Size(10 * BLOCK)), "{preview:?}");
        assert!(preview.effects[1].contains("40 KiB of dirty data is lost"), "{preview:?}");
        let error = bench.services.disks.check_pool_discard("p", &change, false).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Conflict);
        assert!(error.to_string().contains("--yes"), "{error}");
        bench.services.disks.check_pool_discard("p", &change, true).await.unwrap();
        let pool = discard(&orphans[0].owner).await.unwrap().pool.unwrap();
        assert!(pool.orphans.is_empty());
        assert_eq!(bench.free(), 16);
    });
}

#[test]
fn a_served_disk_finds_its_persistent_cache_again() {
    run(async |bench| {
        let image = bench.image("vm.img", 16);
        let device = bench.path("pool");
        let serve = async |json: &str, force: bool| {
            let (services, shard) = services(Store::Memory);
            let disk =
                DiskAdd { name: "vm".into(), backing: image.clone(), read_only: false, ..DiskAdd::default() };
            let cache = CacheEnable { pool: "default".into(), settings: settings(json), ..cache_of(4) };
            let result = services.startup.start_serving(disk, Some((device.clone(), cache)), force).await;
            (services, shard, result)
        };
        for round in 0..3 {
            let (services, shard, result) = serve(LAZY, false).await;
            result.unwrap();
            let stats = services.observe.stats("vm").await.unwrap();
            assert_eq!(stats.dirty_bytes, round * 10 * BLOCK);
            let id = services.registry.inner().disks["vm"].id;
            (0..10).for_each(|block| shard.write(id, (round * 10 + block) * BLOCK, BLOCK).unwrap());
            if round == 1 {
                services.shutdown.close(Ending::Plain).await;
            }
            shard.stop();
            drop(services);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let (_, shard, result) = serve("{}", false).await;
        let error = result.unwrap_err().to_string();
        assert!(error.contains("has a persistent cache") && error.contains("--force"), "{error}");
        shard.stop();
        tokio::time::sleep(Duration::from_millis(10)).await;
        let (services, _shard, result) = serve("{}", true).await;
        result.unwrap();
        assert_eq!(services.observe.disk("vm").unwrap().cache.unwrap().room, Size(4 * MIB));
    });
}

/// Promise 5: hob refuses a hob.toml with an impossible segment size, but accepts a saved state
/// with one.
#[test]
fn a_pool_that_was_never_made_has_segments_of_some_size() {
    run(async |bench| {
        let state_dir = bench.dir.path().join("state");
        let (store, _) = Store::open(&state_dir).unwrap();
        let pool = crate::state::PoolState {
            name: "p".into(),
            devices: vec![bench.path("none").into()],
            segment_size: Size(0),
            ..Default::default()
        };
        store.save(&State { pools: vec![pool], ..State::default() }).unwrap();
        drop(store);
        let (services, shard) = restart(&state_dir, "").await;
        let bench = Bench { services, shard, ..bench };
        bench.disk("vm").await;
        let error = bench.cache("vm", 16).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Conflict, "{error}");
    });
}

#[test]
fn a_daemon_that_cannot_save_its_state_serves_what_was_saved_and_says_so() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        bench.disk("plain").await;
        write(&bench, 0..8);
        tokio::time::sleep(COMMITTED).await;
        let kinds = async |bench: &Bench| -> Vec<ProblemKind> {
            bench.services.observe.health().await.problems.iter().map(|problem| problem.kind).collect()
        };
        assert!(!kinds(&bench).await.contains(&ProblemKind::StateNotSaved));
        let full = failing::fail(&bench.dir.path().join("state"), 1, Failing::FromThenOn);
        let bench = crash(bench).await;
        assert!(full.has_struck());
        assert_eq!(bench.services.observe.disk("plain").unwrap().state, DiskLife::Online);
        assert!(kinds(&bench).await.contains(&ProblemKind::StateNotSaved));
        // The number of its next journal must be saved before the number is used.
        assert_ne!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Online);
        drop(full);
        bench.services.registry.save().await.unwrap();
        assert!(!kinds(&bench).await.contains(&ProblemKind::StateNotSaved));
        let bench = crash(bench).await;
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Online);
        read(&bench, 0..8);
    });
}

/// A missing device is not removed while a cache waits for it. Otherwise hob would read the journal
/// of the cache without the device.
#[test]
fn a_device_that_is_away_is_not_taken_out_while_a_disk_may_need_it() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..10);
        let device = bench.services.registry.inner().disks["vm"].ring[0].device;
        let path = bench.services.registry.inner().device_on_shards(device).unwrap().1.path.clone();
        let name = if path.ends_with("a") { "a" } else { "b" };
        let bench = end(bench, false, |dir| take_away(dir, name)).await;
        assert!(reason(&bench).contains("may have dirty data"), "{}", reason(&bench));
        let path = bench.path(name);
        let change = PlannedPoolChange::RemoveDevice { path: path.clone() };
        let error = bench.services.disks.check_pool_discard("p", &change, false).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Conflict);
        let said = error.to_string();
        assert!(said.contains("dirty data of its cache") && said.contains("--yes"), "{said}");
        bench.bring_back(name);
        bench.services.pools.retry_devices("p").await;
        bench.services.disks.bring_online("vm").await;
        assert_eq!(sectors(&bench).await.1, 10);
        bench.services.disks.check_pool_discard("p", &change, false).await.unwrap();
    });
}

/// A cache that is opened without a device does not keep space on the device.
#[test]
fn a_device_that_was_missing_has_its_space_again_and_can_be_removed() {
    for settings in [r#"{"persistent":true}"#, r#"{"mode":"write-back","copies":"2-dirty"}"#] {
        run(async |bench| {
            let bench = prepare(bench, settings).await;
            let free = bench.free();
            let bench = end(bench, false, |dir| take_away(dir, "b")).await;
            assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Online);
            let problems = bench.services.observe.health().await.problems;
            let missing = problems.iter().find(|problem| problem.kind == ProblemKind::DeviceOffline).unwrap();
            assert!(missing.reason.contains("hob pool remove-device p "), "{missing:?}");
            bench.bring_back("b");
            bench.services.pools.retry_devices("p").await;
            assert_eq!((bench.room("vm"), bench.free()), (4, free), "{settings}");
            bench.services.pools.device_remove("p".into(), bench.path("b")).await.unwrap();
            assert_eq!(bench.room("vm"), 4, "{settings}");
        });
    }
}

/// A cache that waits for its devices keeps its segments on them.
#[test]
fn a_cache_without_any_device_waits_for_its_devices() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..10);
        let bench = end(bench, false, |dir| ["a", "b"].iter().for_each(|name| take_away(dir, name))).await;
        let said = reason(&bench);
        assert!(said.contains("no device of pool p is there; restore"), "{said}");
        assert!(!said.contains("export-dirty") && !said.contains("restore the backing"), "{said}");
        for name in ["a", "b"] {
            bench.bring_back(name);
            bench.services.pools.retry_devices("p").await;
        }
        bench.services.disks.bring_online("vm").await;
        assert_eq!(sectors(&bench).await.1, 10);
    });
}

#[test]
fn a_disk_is_opened_as_soon_as_the_devices_of_its_cache_are_online_again() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..10);
        let bench = end(bench, false, |dir| ["a", "b"].iter().for_each(|name| take_away(dir, name))).await;
        assert!(reason(&bench).contains("which hob looks for every few seconds"), "{}", reason(&bench));
        ["a", "b"].iter().for_each(|name| bench.bring_back(name));
        bench.services.events.retry_pool("p").await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        settled(&bench.services).await;
        assert_eq!(sectors(&bench).await.1, 10);
    });
}
