//! Disks that are served while their caches are being recovered.

use std::time::Duration;

use hob_engine::io::{Durability, IoError, Op};
use hob_engine::units::{DiskId, RequestId};

use super::config::Filed;
use super::recovery::{BLOCK, COMMITTED, LAZY, end, prepare, read, sectors, write};
use super::*;

const WRITE: Op = Op::Write(Durability::Durable);

/// Kills and restarts the daemon. The recovered cache is not used yet.
async fn crash_early(bench: Bench) -> Bench {
    let Bench { dir, services, shard } = bench;
    shard.stop();
    drop(services);
    let (services, shard) = restart_early(&dir.path().join("state"), "", true).await;
    Bench { dir, services, shard }
}

/// Allows the use of the recovered cache.
async fn let_come(bench: &Bench) {
    bench.shard.set_holds_recovered(false);
    settled(&bench.services).await;
}

fn disk_id(bench: &Bench) -> DiskId {
    bench.services.registry.inner().disks["vm"].id
}

fn begin(bench: &Bench, op: Op, block: u64) -> RequestId {
    let len = if op == Op::Flush { 0 } else { BLOCK };
    bench.shard.begin(disk_id(bench), op, block * BLOCK, len)
}

/// Processes the shard's reports for a while.
async fn tend(bench: &Bench) {
    for _ in 0..20 {
        bench.shard.take_events().into_iter().for_each(|event| bench.services.events.handle(event));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn cache(bench: &Bench) -> hob_control::Cache {
    let disk = bench.services.observe.disk("vm").unwrap();
    assert_eq!(disk.state, DiskLife::Online, "{disk:?}");
    disk.cache.unwrap()
}

async fn warm_read_cache(bench: Bench) -> Bench {
    let bench = prepare(bench, r#"{"persistent":true,"fill":"sectors"}"#).await;
    read(&bench, 0..500);
    tokio::time::sleep(COMMITTED).await;
    // The filled sectors are valid only after a later journal page records that they are durable.
    read(&bench, 600..601);
    tokio::time::sleep(COMMITTED).await;
    bench
}

#[test]
fn guests_do_not_wait_for_the_recovery_of_a_read_cache() {
    run(async |bench| {
        let bench = crash_early(warm_read_cache(bench).await).await;
        let shown = cache(&bench);
        assert_eq!(shown.state, CacheState::Recovering);
        assert!(shown.reason.unwrap().contains("is being recovered"), "it says how far it is");
        read(&bench, 0..10);
        assert_eq!(sectors(&bench).await.0, 0, "they were the backing's");
        let busy = bench.resize("vm", 5).await.unwrap_err();
        assert!(busy.to_string().contains("vm is being opened"), "{busy}");
        let_come(&bench).await;
        assert_eq!((cache(&bench).state, cache(&bench).reason), (CacheState::Active, None));
        assert_eq!(sectors(&bench).await, (500, 0));
    });
}

/// The old journal rings are invalidated before the first write, and the recovered cache does not
/// have the written sectors.
#[test]
fn writes_do_not_wait_for_a_read_cache_either() {
    run(async |bench| {
        let bench = crash_early(warm_read_cache(bench).await).await;
        let write = begin(&bench, WRITE, 7);
        assert_eq!(bench.shard.reply(write), None, "the rings vouch for what is there");
        tend(&bench).await;
        assert_eq!(bench.shard.reply(write), Some(Ok(())));
        let_come(&bench).await;
        assert_eq!(sectors(&bench).await, (499, 0));
        // After this time, the new ring of the cache is valid.
        tokio::time::sleep(COMMITTED).await;
        let bench = crash_early(bench).await;
        let_come(&bench).await;
        assert_eq!(sectors(&bench).await, (499, 0));
    });
}

/// Promise 2: after a write and a crash during the recovery, the cache is empty. Otherwise the old
/// ring would make the data from before the write valid.
#[test]
fn a_crash_before_the_cache_is_there_empties_it_if_there_was_a_write() {
    run(async |bench| {
        let bench = warm_read_cache(bench).await;
        let free = bench.free();
        // Without a write, the cache loses nothing, however often the daemon is restarted.
        let bench = crash_early(crash_early(bench).await).await;
        read(&bench, 0..10);
        let bench = crash_early(bench).await;
        let write = begin(&bench, WRITE, 7);
        tend(&bench).await;
        assert_eq!(bench.shard.reply(write), Some(Ok(())));
        let bench = crash_early(bench).await;
        let_come(&bench).await;
        assert_eq!(sectors(&bench).await, (0, 0));
        assert_eq!((bench.room("vm"), bench.free(), cache(&bench).state), (4, free, CacheState::Active));
    });
}

/// A write must not end the new journal, which may later describe dirty data: hob would then not
/// notice the loss of this journal.
#[test]
fn a_write_that_is_handled_after_the_recovery_does_not_end_the_new_journal() {
    run(async |bench| {
        let bench = crash_early(warm_read_cache(bench).await).await;
        let rings = bench.services.registry.inner().disks["vm"].recovering;
        assert!(rings.is_some());
        let_come(&bench).await;
        // The recovery has not quite ended.
        bench.services.registry.inner().disk_mut("vm").unwrap().recovering = rings;
        bench.services.disks.let_changes_pass(disk_id(&bench)).await;
        let journal = bench.services.registry.inner().disk("vm").unwrap().cache().unwrap().journal.unwrap();
        assert!(journal.written > 0 && !journal.ended, "{journal:?}");
    });
}

/// The daemon stops while it recovers a cache. The cache stays as it was.
#[test]
fn an_end_before_the_cache_is_there_leaves_it_as_it_was() {
    run(async |bench| {
        let bench = end(warm_read_cache(bench).await, false, |_| ()).await;
        tokio::time::sleep(COMMITTED).await;
        let bench = crash_early(bench).await;
        let waiting = begin(&bench, WRITE, 7);
        bench.services.shutdown.close(Ending::Plain).await;
        assert_eq!(bench.shard.reply(waiting), Some(Err(IoError::ShuttingDown)));
        let bench = crash_early(bench).await;
        let_come(&bench).await;
        assert_eq!(sectors(&bench).await, (501, 0));
    });
}

/// Reads of data that may be dirty wait, and writes wait; other reads do not.
#[test]
fn dirty_data_is_waited_for_and_nothing_else() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..300);
        read(&bench, 1000..1100);
        tokio::time::sleep(COMMITTED).await;
        let bench = crash_early(bench).await;
        assert_eq!(cache(&bench).state, CacheState::Recovering);
        read(&bench, 1000..1010);
        read(&bench, 5000..5010);
        let waiting = [begin(&bench, Op::Read, 299), begin(&bench, WRITE, 5000), begin(&bench, Op::Flush, 0)];
        tend(&bench).await;
        let replies = waiting.map(|id| bench.shard.reply(id));
        assert_eq!(replies, [None; 3]);
        // After a stop during the recovery, the cache is unchanged.
        bench.services.shutdown.close(Ending::Plain).await;
        let bench = crash_early(bench).await;
        let waiting = [begin(&bench, Op::Read, 299), begin(&bench, WRITE, 5000)];
        let_come(&bench).await;
        assert!(waiting.iter().all(|id| bench.shard.reply(*id) == Some(Ok(()))));
        assert_eq!(sectors(&bench).await.1, 301);
    });
}

/// The daemon compares hob.toml with the disk before the recovery has ended.
#[test]
fn a_size_that_changed_in_hob_toml_is_applied_after_the_recovery() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let bench = bench.with_state();
        let dir = bench.dir.path().display().to_string();
        let device_bytes = hob_storage::pool::device_bytes_for(16 * MIB, SEGMENT);
        let text = |size: &str| {
            format!(
                "state_dir = \"{dir}/state\"\n[[pool]]\nname = \"p\"\ndevices = [\"{dir}/a\"]\n\
                 size = {device_bytes}\nsegment_size = \"1M\"\n[[disk]]\nname = \"vm\"\n\
                 backing = \"{dir}/vm.img\"\ncache = {{ pool = \"p\", size = \"{size}\", persistent = true }}\n"
            )
        };
        let Filed { bench, .. } = Filed::start(bench, &text("4M")).await;
        read(&bench, 0..100);
        tokio::time::sleep(COMMITTED).await;
        let Bench { dir, services, shard } = bench;
        shard.stop();
        drop(services);
        let (services, shard) = restart_early(&dir.path().join("state"), &text("6M"), true).await;
        let bench = Bench { dir, services, shard };
        assert_eq!(cache(&bench).state, CacheState::Recovering);
        let health = bench.services.observe.health().await;
        assert!(format!("{health:?}").contains("vm is being opened; hob tries again"), "{health:?}");
        let_come(&bench).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        settled(&bench.services).await;
        let health = bench.services.observe.health().await;
        assert!(health.problems.is_empty() && bench.room("vm") == 6, "{health:?}");
    });
}
