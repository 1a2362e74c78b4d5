//! Caches that belong to no disk after the state directory was lost or replaced by an older one: no
//! disk silently serves older data (docs/decisions/0064).

use hob_control::ProblemKind;
use hob_storage::failing::{self, Failing};

use super::recovery::{BLOCK, LAZY, crash, prepare, read, reason, sectors, write};
use super::*;

/// Returns a hob.toml with the pool and the disk of `prepare`, and another disk.
fn toml(bench: &Bench) -> String {
    let size = hob_storage::pool::device_bytes_for(8 * MIB, SEGMENT);
    bench.image("other.img", 64);
    format!(
        "state_dir = \"{0}/state\"\n[[pool]]\nname = \"p\"\ndevices = [\"{0}/a\", \"{0}/b\"]\nsize = {size}\n\
         segment_size = \"1M\"\n[[disk]]\nname = \"vm\"\nbacking = \"{0}/vm.img\"\n\
         cache = {{ pool = \"p\", size = \"4M\" }}\n\
         [[disk]]\nname = \"other\"\nbacking = \"{0}/other.img\"\n",
        bench.dir.path().display()
    )
}

/// Stops the daemon cleanly and starts it again with this hob.toml, with an action in between.
async fn again(bench: Bench, toml: &str, meanwhile: impl FnOnce(&Path)) -> Bench {
    bench.services.shutdown.close(Ending::Plain).await;
    let Bench { dir, services, shard } = bench;
    shard.stop();
    drop(services);
    meanwhile(dir.path());
    let (services, shard) = restart(&dir.path().join("state"), toml).await;
    Bench { dir, services, shard }
}

fn lose_state(dir: &Path) {
    std::fs::remove_dir_all(dir.join("state")).unwrap();
}

fn orphan(bench: &Bench) -> hob_control::Orphan {
    bench.services.observe.pool("p").unwrap().orphans.remove(0)
}

async fn orphan_problems(bench: &Bench) -> Vec<String> {
    let problems = bench.services.observe.health().await.problems.into_iter();
    problems.filter(|it| it.kind == ProblemKind::OrphanDirty).map(|it| it.reason).collect()
}

/// Returns a bench with 10 dirty blocks, and without the daemon's state.
async fn lost(bench: Bench) -> (Bench, String) {
    let bench = prepare(bench, LAZY).await;
    write(&bench, 0..10);
    let toml = toml(&bench);
    (again(bench, &toml, lose_state).await, toml)
}

#[test]
fn a_disk_whose_dirty_data_belongs_to_no_disk_stays_offline_until_it_adopts_it() {
    run(async |bench| {
        let (bench, toml) = lost(bench).await;
        let owner = orphan(&bench).owner;
        let why = reason(&bench);
        assert!(why.contains("40 KiB of dirty data of this backing"), "{why}");
        assert!(why.contains(&format!("'hob cache adopt vm {owner}'")), "{why}");
        assert_eq!(bench.services.observe.disk("other").unwrap().state, DiskLife::Online);
        assert_eq!((orphan(&bench).dirty, orphan(&bench).disk), (Some(Size(10 * BLOCK)), Some("vm".into())));
        let problems = orphan_problems(&bench).await;
        assert!(problems[0].contains("40 KiB") && problems[0].contains("hob cache adopt vm"), "{problems:?}");
        // Neither a retry nor another start changes this.
        bench.services.disks.bring_online("vm").await;
        let bench = again(bench, &toml, |_| ()).await;
        assert!(reason(&bench).contains("40 KiB of dirty data of this backing"));
        let adopt = |disk: &str, owner: &str| bench.services.disks.cache_adopt(disk.into(), owner.into());
        let missing = "80000000000000000000000000000001";
        assert_eq!(adopt("vm", missing).await.unwrap_err().kind, ErrorKind::NotFound);
        assert_eq!(adopt("other", &owner).await.unwrap_err().kind, ErrorKind::Conflict);
        let disk = adopt("vm", &owner).await.unwrap().disk.unwrap();
        assert_eq!((disk.state, disk.reason), (DiskLife::Online, None));
        assert_eq!(disk.cache.unwrap().mode, "write-back");
        assert_eq!(sectors(&bench).await.1, 10);
        assert_eq!(orphan_problems(&bench).await, Vec::<String>::new());
        let bench = crash(bench).await;
        assert_eq!(sectors(&bench).await.1, 10);
    });
}

#[test]
fn a_disk_comes_online_when_its_orphan_is_discarded() {
    run(async |bench| {
        let (bench, _) = lost(bench).await;
        let owner = orphan(&bench).owner;
        bench.services.disks.orphan_discard("p".into(), owner).await.unwrap();
        bench.services.disks.bring_online("vm").await;
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Online);
        assert_eq!(orphan_problems(&bench).await, Vec::<String>::new());
    });
}

#[test]
fn a_disk_is_added_with_its_orphan_or_not_at_all() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..10);
        let all = toml(&bench);
        let bench = again(bench, all.split("[[disk]]").next().unwrap(), lose_state).await;
        bench.services.pools.await_orphans(std::time::Duration::from_secs(10)).await;
        let owner = orphan(&bench).owner;
        let problems = orphan_problems(&bench).await;
        assert!(problems[0].contains(&format!("--adopt-cache {owner}")), "{problems:?}");
        let add = |name: &str, backing: &str, adopt_cache: Option<String>| {
            let add = DiskAdd {
                name: name.into(),
                backing: bench.path(backing),
                adopt_cache,
                ..DiskAdd::default()
            };
            bench.services.disks.disk_add(add)
        };
        add("other", "other.img", None).await.unwrap();
        let error = add("web", "vm.img", None).await.unwrap_err();
        assert!(error.to_string().contains("--adopt-cache"), "{error}");
        assert!(bench.services.observe.disk("web").is_err());
        let error = add("third", "other.img", Some(owner.clone())).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Conflict, "{error}");
        assert_eq!(orphan(&bench).dirty, Some(Size(10 * BLOCK)), "a wrong adoption changes nothing");
        add("vm", "vm.img", Some(owner)).await.unwrap();
        assert_eq!(sectors(&bench).await.1, 10);
    });
}

/// Clients may write to an adopted cache before the command that adds its disk has ended.
#[test]
fn the_state_names_a_cache_before_clients_of_a_new_disk_may_write_to_it() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        let mut cache = bench.services.registry.inner().disks["vm"].wanted.cache.clone().unwrap();
        let journal = crate::state::JournalSpec::new();
        let owner = journal.owner.to_string();
        cache.journal = Some(journal);
        let state =
            DiskState { cache: Some(cache), ..DiskState::new("new".into(), bench.path("new.img"), false) };
        let adding = crate::services::registry::ADDING;
        let _guard = bench.services.disks.enter(state, Some(adding)).unwrap().unwrap();
        let is_saved = || {
            let state = std::fs::read_to_string(bench.dir.path().join("state/state.json")).unwrap();
            state.contains(&owner)
        };
        bench.services.registry.save().await.unwrap();
        assert!(!is_saved(), "the disk may not come online at all");
        bench.services.disks.save_arriving("new").await.unwrap();
        assert!(is_saved());
        bench.services.disks.drop_arriving("new").await;
        assert!(!is_saved(), "the cache belongs to no disk, and has not ended either");
    });
}

/// A guest may connect to the socket at once, and write to a cache that the next daemon must know.
/// The test adds a disk repeatedly. Each time, another write of the state file and all later writes
/// fail.
#[test]
fn no_socket_of_a_new_disk_exists_before_the_state_names_its_cache() {
    const CHANGES_MAX: u32 = 40;
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        let mut cache = bench.services.registry.inner().disks["vm"].wanted.cache.clone().unwrap();
        for nth in 1..=CHANGES_MAX {
            let name = format!("disk{nth}");
            let journal = crate::state::JournalSpec::new();
            cache.journal = Some(journal);
            let sockets = bench.dir.path().join(format!("sockets{nth}"));
            std::fs::create_dir(&sockets).unwrap();
            // A new file in the directory changes this time, also if the file is removed later.
            let untouched = std::time::SystemTime::UNIX_EPOCH;
            std::fs::File::open(&sockets).unwrap().set_modified(untouched).unwrap();
            let state = DiskState {
                cache: Some(cache.clone()),
                vhost_user: Some(sockets.join("vm.sock").to_string_lossy().into_owned()),
                ..DiskState::new(name.clone(), bench.image(&format!("{name}.img"), 8), false)
            };
            let failure = failing::fail(&bench.dir.path().join("state"), nth, Failing::FromThenOn);
            let added = bench.services.disks.add_state(state).await;
            let has_struck = failure.has_struck();
            let saved = std::fs::read_to_string(bench.dir.path().join("state/state.json")).unwrap();
            let is_saved = saved.contains(&journal.owner.to_string());
            let had_socket = std::fs::metadata(&sockets).unwrap().modified().unwrap() != untouched;
            assert!(is_saved || !had_socket, "change {nth} of the state failed: {added:?}");
            if !has_struck {
                assert!(had_socket, "{added:?}");
                return;
            }
            drop(failure);
            // The disk may have been added before the failure.
            let _ = bench.services.disks.disk_remove(name, OnDirty::Drain).await;
        }
        panic!("a new disk changes the saved state more than {CHANGES_MAX} times");
    });
}

/// In the older state, for example from a backup, the cache has a different mode.
#[test]
fn a_state_that_is_older_than_flash_loses_no_dirty_data() {
    run(async |bench| {
        let bench = prepare(bench, r#"{"persistent":true}"#).await;
        read(&bench, 100..110);
        bench.services.registry.save().await.unwrap();
        let saved = bench.dir.path().join("state/state.json");
        let through = std::fs::read(&saved).unwrap();
        let patch = CachePatch { settings: settings(LAZY), ..CachePatch::default() };
        bench.services.pools.cache_patch("vm".into(), patch).await.unwrap();
        bench.resize("vm", 5).await.unwrap();
        write(&bench, 0..10);
        let bench = again(bench, "", |_| std::fs::write(&saved, &through).unwrap()).await;
        // The saved state says write-through, so the data is destaged, and not dropped.
        let stats = bench.services.observe.stats("vm").await.unwrap();
        assert_eq!(stats.dirty_bytes + stats.destaged_bytes, 10 * BLOCK);
    });
}

#[test]
fn a_missing_device_may_have_the_dirty_data_of_an_orphan() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        let toml = toml(&bench);
        let bench = again(bench, &toml, |dir| {
            lose_state(dir);
            take_away(dir, "b");
        })
        .await;
        assert!(
            reason(&bench).contains("may have dirty data of it on missing devices"),
            "{}",
            reason(&bench)
        );
        let problems = orphan_problems(&bench).await;
        assert!(problems[0].contains("on missing devices"), "{problems:?}");
        assert_eq!(bench.services.observe.disk("other").unwrap().state, DiskLife::Online);
        bench.bring_back("b");
        bench.services.pools.retry_devices("p").await;
        bench.services.disks.bring_online("vm").await;
        let disk = bench.services.observe.disk("vm").unwrap();
        assert_eq!((disk.state, disk.reason), (DiskLife::Online, None), "the whole orphan is clean");
        assert_eq!(orphan_problems(&bench).await, Vec::<String>::new());
    });
}

/// A device that is missing when hob starts without a saved state may have the whole cache of a
/// disk.
#[test]
fn a_new_disk_waits_for_devices_that_the_new_state_has_never_seen() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..10);
        let toml =
            toml(&bench).replace("size = \"4M\"", "size = \"4M\", mode = \"write-back\", copies = \"1\"");
        let (a, b) = (bench.path("a"), bench.path("b"));
        let bench = again(bench, &toml, |dir| {
            lose_state(dir);
            for device in [&a, &b] {
                std::fs::rename(device, format!("{device}.away")).unwrap();
                // A missing file would be created.
                std::fs::create_dir(device).unwrap();
            }
        })
        .await;
        assert!(
            reason(&bench).contains("since hob opened the pool without a saved state"),
            "{}",
            reason(&bench)
        );
        assert_eq!(bench.services.observe.disk("other").unwrap().state, DiskLife::Online);
        let bench = again(bench, &toml, |_| ()).await;
        assert!(
            reason(&bench).contains("since hob opened the pool without a saved state"),
            "{}",
            reason(&bench)
        );
        for device in [&a, &b] {
            std::fs::remove_dir(device).unwrap();
            std::fs::rename(format!("{device}.away"), device).unwrap();
        }
        bench.services.pools.retry_devices("p").await;
        bench.services.disks.bring_online("vm").await;
        assert!(reason(&bench).contains("40 KiB of dirty data of this backing"), "{}", reason(&bench));
    });
}
