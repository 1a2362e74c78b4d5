//! Health problems about hob.toml that end without a reload, and the saved copy of hob.toml.

use super::config::{CACHE, Filed, RETURNED, text};
use super::*;

/// At a reload, the recovery of a disk's cache may be in progress. hob changes the disk afterwards.
#[test]
fn a_reload_makes_a_change_when_another_operation_on_the_disk_has_ended() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, CACHE, "");
        let filed = Filed::start(bench, &first).await;
        let opening = filed.bench.services.registry.guard_disk("vm", "opened").unwrap();
        let changed = text(&filed.bench, "cache = { pool = \"p\", size = \"6M\" }", "");
        filed.reload(&changed).await;
        tokio::time::sleep(RETURNED).await;
        let pending = filed.pending().await;
        let why = "not applied: vm is being opened; hob tries again by itself when disk vm is available";
        assert!(pending.len() == 1 && pending[0].contains(why), "{pending:?}");
        drop(opening);
        tokio::time::sleep(RETURNED).await;
        assert_eq!((filed.pending().await, filed.diff().await), (Vec::new(), Vec::new()));
        assert_eq!(filed.bench.room("vm"), 6);
    });
}

#[test]
fn a_corrected_file_that_is_applied_is_no_longer_reported_as_refused() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, CACHE, "");
        let filed = Filed::start(bench, &first).await;
        filed.bench.services.registry.inner().config_refused = Some("unknown key foo".to_owned());
        let kinds = async || {
            let problems = filed.bench.services.observe.health().await.problems;
            problems.into_iter().map(|it| it.kind).collect::<Vec<_>>()
        };
        filed.write(&format!("{first}foo = 1\n"));
        filed.bench.services.hob_toml.apply(false).await.unwrap_err();
        assert_eq!(kinds().await, [hob_control::ProblemKind::ConfigRefused]);
        filed.write(&first);
        filed.apply(false).await;
        assert_eq!(kinds().await, []);
    });
}

#[test]
fn a_failed_reload_is_reported_until_hob_toml_is_applied() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, CACHE, "");
        let filed = Filed::start(bench, &first).await;
        let hob_toml = &filed.bench.services.hob_toml;
        let reasons = async || {
            let problems = filed.bench.services.observe.health().await.problems.into_iter();
            let refused = problems.filter(|it| it.kind == hob_control::ProblemKind::ConfigRefused);
            refused.map(|it| it.reason).collect::<Vec<_>>()
        };
        hob_toml.note_failed_reload("some requests were not answered within 8 s");
        let said = reasons().await;
        assert!(said.len() == 1 && said[0].contains("does not use the present hob.toml"), "{said:?}");
        assert!(said[0].contains("not answered within 8 s"), "{said:?}");
        filed.apply(false).await;
        assert_eq!(reasons().await, [""; 0]);
        filed.write(&format!("foo = 1\n{first}"));
        hob_toml.apply(false).await.unwrap_err();
        let said = reasons().await;
        assert!(said.len() == 1 && said[0].contains("unknown field `foo`"), "{said:?}");
        filed.write(&first);
        filed.apply(false).await;
        assert_eq!(reasons().await, [""; 0]);
        // Without a file, there is nothing to apply.
        let without = Bench::new();
        without.services.hob_toml.note_failed_reload("the new program does not start");
        assert_eq!(without.services.observe.health().await.problems, []);
    });
}

#[test]
fn a_start_with_an_invalid_file_uses_the_file_that_was_applied() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let bench = bench.with_state();
        let first = text(&bench, CACHE, "");
        let filed = Filed::start(bench, &first).await;
        let path = PathBuf::from(filed.bench.path("hob.toml"));
        let started = Config::load(&path).unwrap().to_keep().unwrap();
        let larger = first.replace("4M", "6M");
        filed.write(&larger);
        filed.apply(false).await;
        filed.write(&format!("{larger}[[disk]\n"));
        let accepted_size = || {
            let config = Config::load_accepted(&path, "unclosed table").unwrap();
            config.disks[0].cache.as_ref().unwrap().size
        };
        assert_eq!(accepted_size(), Some(Size(6 * MIB)));
        // The copy of the start may be written late.
        filed.bench.services.hob_toml.clone().keep_started(started).await;
        assert_eq!(accepted_size(), Some(Size(6 * MIB)));
        // A daemon cannot start with files that are missing.
        filed.write(&format!(
            "{}[[nbd]]\nlisten = \"tcp:127.0.0.1:1\"\ntls = {{ cert = \"/missing\", key = \"/missing\" }}\n",
            first.replace("4M", "8M")
        ));
        filed.apply(false).await;
        assert_eq!(filed.bench.room("vm"), 8);
        assert_eq!(accepted_size(), Some(Size(6 * MIB)));
    });
}

/// An operator who sets `force` expects that hob overwrites the pool's devices.
#[test]
fn force_of_a_pool_that_exists_is_reported_until_it_is_removed_from_the_file() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, CACHE, "");
        let filed = Filed::start(bench, &first).await;
        let forced = first.replace("segment_size", "force = true\nsegment_size");
        for _ in 0..2 {
            filed.reload(&forced).await;
            let pending = filed.pending().await;
            assert!(pending.len() == 1 && pending[0].contains("force has no effect"), "{pending:?}");
        }
        filed.reload(&first).await;
        assert_eq!((filed.pending().await, filed.diff().await), (Vec::new(), Vec::new()));
        // The creation of a pool uses `force`.
        let other = filed.bench.path("b");
        let more = format!(
            "[[pool]]\nname = \"q\"\ndevices = [\"{other}\"]\nsize = \"16M\"\nsegment_size = \"1M\"\nforce = true\n"
        );
        filed.write(&format!("{first}{more}"));
        filed.apply(false).await;
        assert_eq!((filed.pending().await, filed.diff().await), (Vec::new(), Vec::new()));
    });
}

/// Returns the reasons why devices are offline, as health reports them.
async fn offline(filed: &Filed) -> Vec<String> {
    let problems = filed.bench.services.observe.health().await.problems.into_iter();
    let offline = problems.filter(|it| it.kind == hob_control::ProblemKind::DeviceOffline);
    offline.map(|it| it.reason).collect()
}

/// If hob listed such a pool without space, hob.toml would not differ from the running daemon, and
/// the failure would be hidden.
#[test]
fn a_new_pool_that_cannot_be_created_is_a_failed_change() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, CACHE, "");
        let filed = Filed::start(bench, &first).await;
        let other = filed.bench.path("other");
        let with = |size: &str| {
            format!("{first}[[pool]]\nname = \"q\"\ndevices = [\"{other}\"]\nsize = \"{size}\"\n")
        };
        filed.write(&with("1K"));
        let applied = filed.apply(false).await;
        assert_eq!((applied.done.len(), applied.failed.len()), (0, 1), "{applied:?}");
        assert!(applied.failed[0].contains("at least 3 MiB are needed"), "{applied:?}");
        let pending = filed.pending().await;
        assert!(pending.len() == 1 && pending[0].contains("at least 3 MiB are needed"), "{pending:?}");
        assert!(!filed.bench.services.registry.inner().pools.contains_key("q"));
        filed.write(&with("64M"));
        let applied = filed.apply(false).await;
        assert_eq!((applied.done.len(), applied.failed.len()), (1, 0), "{applied:?}");
        assert_eq!((filed.pending().await, filed.diff().await), (Vec::new(), Vec::new()));
        assert!(filed.bench.services.registry.inner().pools["q"].is_whole());
    });
}

#[test]
fn a_pool_that_could_not_be_created_at_the_start_is_created_by_command() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, CACHE, "").replace("/a\"", "/flash/a\"");
        let filed = Filed::start(bench, &first).await;
        let why = offline(&filed).await;
        assert!(why.len() == 1 && why[0].contains("hob could not create the pool: "), "{why:?}");
        assert!(why[0].contains("'hob config apply' creates it"), "{why:?}");
        assert_eq!(filed.diff().await, [("pool p".to_owned(), hob_control::ConfigRemedy::Apply)]);
        let applied = filed.apply(false).await;
        assert_eq!((applied.done.len(), applied.failed.len()), (0, 1), "{applied:?}");
        assert_eq!(offline(&filed).await, why);
        std::fs::create_dir(filed.bench.path("flash")).unwrap();
        let applied = filed.apply(false).await;
        assert_eq!((applied.done.len(), applied.failed.len()), (1, 0), "{applied:?}");
        assert_eq!((offline(&filed).await, filed.diff().await), (Vec::new(), Vec::new()));
        assert_eq!(filed.bench.room("vm"), 4, "the disk gets its cache");
    });
}

/// After a correction of hob.toml, a restart creates the pool with the corrected size.
#[test]
fn a_pool_that_could_not_be_created_is_created_at_the_next_start() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let right = text(&bench, CACHE, "");
        let size = hob_storage::pool::device_bytes_for(16 * MIB, SEGMENT);
        let wrong = right.replace(&format!("size = {size}\n"), "size = \"1K\"\n");
        assert_ne!(right, wrong);
        let filed = Filed::start(bench, &wrong).await;
        let why = offline(&filed).await;
        assert!(why.len() == 1 && why[0].contains("at least 3 MiB are needed"), "{why:?}");
        let state = filed.bench.services.registry.inner().state();
        assert!(!state.pools[0].was_created(), "{state:?}");
        let Filed { bench, .. } = filed;
        let Bench { dir, services, shard } = bench;
        shard.stop();
        drop(services);
        let bench = Bench { dir, ..Bench::new() };
        let config = Config::parse(&right).unwrap();
        bench.services.startup.start(state, &config).await.unwrap();
        assert!(bench.services.registry.inner().pools["p"].is_whole());
        assert_eq!(bench.room("vm"), 4);
    });
}

/// Without a saved state, a missing device may have dirty data, which must not be discarded
/// silently.
#[test]
fn a_pool_that_could_not_be_created_is_created_without_its_device_only_with_yes() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let other = text(&bench, CACHE, "").replace("/a\"", "/b\"");
        let first = other.replace("/b\"", "/flash/a\"");
        let filed = Filed::start(bench, &first).await;
        filed.reload(&other).await;
        assert_eq!(filed.diff().await, [("pool p".to_owned(), hob_control::ConfigRemedy::ApplyWithYes)]);
        let pending = filed.pending().await;
        let parts = ["/flash/a, which hob could never open", "'hob config apply --yes' makes this change"];
        assert!(pending.len() == 1 && parts.iter().all(|part| pending[0].contains(part)), "{pending:?}");
        // A restart does not forget the missing device either.
        let state = filed.bench.services.registry.inner().state();
        let Filed { bench, .. } = filed;
        let Bench { dir, services, shard } = bench;
        shard.stop();
        drop(services);
        let bench = Bench { dir, ..Bench::new() };
        let config = Config::load(&PathBuf::from(bench.path("hob.toml"))).unwrap();
        bench.services.startup.start(state, &config).await.unwrap();
        {
            let inner = bench.services.registry.inner();
            let pool = &inner.pools["p"];
            assert!(pool.is_unseen && pool.devices.len() == 1 && !pool.was_opened(), "{pool:?}");
        }
        bench.services.hob_toml.set(Box::new(config));
        let applied = bench.services.hob_toml.apply(false).await.unwrap();
        assert_eq!((applied.done.len(), applied.failed.len(), applied.left.len()), (0, 0, 1), "{applied:?}");
        let applied = bench.services.hob_toml.apply(true).await.unwrap();
        assert_eq!((applied.done.len(), applied.failed.len()), (1, 0), "{applied:?}");
        assert!(bench.services.registry.inner().pools["p"].is_whole());
    });
}
