//! Restarts when the pool has no space for the next journal ring of a recovered cache.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use hob_storage::pool::OwnerId;

use super::super::flash::{Owner, Wanted};
use super::recovery::{BLOCK, LAZY, crash, end, reason, sectors, write};
use super::*;

/// Allocates all free segments of the pool to a cache that no disk has.
async fn fill_pool(bench: &Bench) {
    let flash = bench.services.registry.inner().pool("p").unwrap().flash.clone();
    let all = Wanted { least: bench.free(), most: bench.free(), spare: 0 };
    let (_, devices) = flash.allocate(Owner::Persistent(OwnerId(7)), all).await.unwrap();
    bench.services.registry.refresh("p", &devices);
    assert_eq!(bench.free(), 0);
}

/// Prepares a disk with a write-back cache and 300 dirty blocks, in a pool without free space. The
/// backing has older data at these blocks.
async fn dirty_and_full(bench: Bench) -> Bench {
    let bench = bench.with_state();
    bench.pool(&["a"], 6).await;
    bench.disk("vm").await;
    let image = std::fs::File::options().write(true).open(bench.path("vm.img")).unwrap();
    image.write_all_at(&vec![1; (400 * BLOCK) as usize], 0).unwrap();
    bench.cache_with("vm", 4, LAZY).await.unwrap();
    write(&bench, 0..300);
    fill_pool(&bench).await;
    bench
}

/// Waits until the disk is online with a cache of `mib` MiB.
async fn await_cache(bench: &Bench, mib: u64) {
    for _ in 0..600 {
        let disk = bench.services.observe.disk("vm").unwrap();
        if disk.state == DiskLife::Online && bench.room("vm") == mib {
            return;
        }
        bench.services.disks.bring_online("vm").await;
        settled(&bench.services).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{:?}", bench.services.observe.disk("vm"));
}

impl Bench {
    /// Returns the number of segments of the disk's journal ring.
    fn ring(&self) -> u64 {
        self.services.registry.inner().disks["vm"].ring.len() as u64
    }
}

fn backing(bench: &Bench) -> Vec<u8> {
    std::fs::read(bench.path("vm.img")).unwrap()[..(400 * BLOCK) as usize].to_vec()
}

#[test]
fn dirty_data_without_space_for_a_journal_is_written_to_the_backing_before_service() {
    run(async |bench| {
        let bench = crash(dirty_and_full(bench).await).await;
        // The new cache leaves space for its next journal.
        await_cache(&bench, 3).await;
        assert_eq!(sectors(&bench).await, (0, 0), "the cache starts empty");
        let (written, untouched) = (300 * BLOCK as usize, 400 * BLOCK as usize);
        assert!(backing(&bench)[..written].iter().all(|byte| *byte == 0), "the guest's data");
        assert!(backing(&bench)[written..untouched].iter().all(|byte| *byte == 1));
        write(&bench, 350..360);
        let bench = crash(bench).await;
        await_cache(&bench, 3).await;
        assert_eq!(sectors(&bench).await.1, 10, "the second restart had space for a journal");
    });
}

#[test]
fn a_cache_without_dirty_data_and_without_space_for_a_journal_starts_empty() {
    run(async |bench| {
        let bench = dirty_and_full(bench).await;
        bench.services.pools.drain("vm".into()).await.unwrap();
        while sectors(&bench).await.1 > 0 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let bench = crash(bench).await;
        await_cache(&bench, 3).await;
        assert_eq!(sectors(&bench).await, (0, 0));
    });
}

#[test]
fn a_read_only_disk_without_space_for_a_journal_waits_for_the_operator() {
    run(async |bench| {
        let bench = dirty_and_full(bench).await;
        bench.services.registry.inner().disk_mut("vm").unwrap().wanted.read_only = true;
        bench.services.registry.save().await.unwrap();
        let bench = crash(bench).await;
        bench.services.disks.bring_online("vm").await;
        settled(&bench.services).await;
        assert!(reason(&bench).contains("no space for the journal of vm"), "{}", reason(&bench));
        assert!(backing(&bench).iter().all(|byte| *byte == 1), "nothing is written");
        let add = device_add(bench.path("b"), 2);
        bench.services.pools.device_add("p".into(), add, OnDirty::Drain).await.unwrap();
        await_cache(&bench, 4).await;
        assert_eq!(sectors(&bench).await.1, 300);
    });
}

/// The segments of a cache that is not recovered yet are in use, although its disk is offline.
#[test]
fn the_space_for_the_journal_of_an_offline_disk_stays_free() {
    run(async |bench| {
        let bench = bench.with_state();
        bench.pool(&["a"], 300).await;
        bench.disk("vm").await;
        bench.cache_with("vm", 280, LAZY).await.unwrap();
        write(&bench, 0..300);
        bench.disk("other").await;
        let most = bench.free() - bench.ring();
        assert!(bench.ring() > 1, "a ring of several segments");
        bench.take_away("vm.img");
        let bench = crash(bench).await;
        assert!(reason(&bench).contains("vm.img"), "{}", reason(&bench));
        bench.cache("other", most + 1).await.unwrap_err();
        bench.cache("other", most).await.unwrap();
        bench.bring_back("vm.img");
        await_cache(&bench, 280).await;
        assert_eq!(sectors(&bench).await.1, 300, "still dirty");
    });
}

/// hob must not write dirty data over newer data of another program.
#[test]
fn a_failed_attempt_to_use_a_closed_cache_keeps_the_recorded_state_of_its_backing() {
    run(async |bench| {
        let bench = dirty_and_full(bench).await;
        let bench = end(bench, false, |dir| {
            let image = std::fs::File::options().write(true).open(dir.join("vm.img")).unwrap();
            image.write_all_at(&[9; 4096], 1 << 20).unwrap();
            image.set_modified(std::time::SystemTime::now() + Duration::from_secs(10)).unwrap();
        })
        .await;
        for _ in 0..3 {
            assert!(reason(&bench).contains("its backing was changed"), "{}", reason(&bench));
            tokio::time::sleep(Duration::from_secs(10)).await;
            bench.services.disks.bring_online("vm").await;
            settled(&bench.services).await;
        }
        assert!(backing(&bench)[..4096].iter().all(|byte| *byte == 1), "nothing is written");
    });
}

#[test]
fn more_space_ends_a_drain_before_service_and_keeps_the_cache() {
    run(async |bench| {
        let bench = dirty_and_full(bench).await;
        bench.services.registry.inner().disk_mut("vm").unwrap().too_few_for_journal = Some(0);
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let is_stopped = || stop.load(std::sync::atomic::Ordering::Relaxed);
        bench.services.registry.inner().disk_mut("vm").unwrap().offline_drain = Some(stop.clone());
        bench.services.registry.inner().stop_needless_drains();
        assert!(!is_stopped());
        let add = device_add(bench.path("b"), 2);
        bench.services.pools.device_add("p".into(), add, OnDirty::Drain).await.unwrap();
        bench.services.registry.inner().stop_needless_drains();
        assert!(is_stopped());
    });
}
