//! Comparisons of hob.toml with the served disks.

use hob_control::{ConfigApplied, ConfigRemedy};

use super::*;

/// A daemon that was started with a file.
struct Filed {
    bench: Bench,
    file: std::path::PathBuf,
}

impl Filed {
    async fn start(bench: Bench, text: &str) -> Filed {
        let file = bench.dir.path().join("hob.toml");
        std::fs::write(&file, text).unwrap();
        let config = Config::load(&file).unwrap();
        bench.services.startup.start(State::default(), &config).await.unwrap();
        bench.services.hob_toml.set(Box::new(config));
        Filed { bench, file }
    }

    fn write(&self, text: &str) {
        std::fs::write(&self.file, text).unwrap();
    }

    async fn diff(&self) -> Vec<(String, ConfigRemedy)> {
        let diff = self.bench.services.hob_toml.diff().await.unwrap();
        diff.differences.into_iter().map(|it| (it.what(), it.by)).collect()
    }

    async fn apply(&self, yes: bool) -> ConfigApplied {
        self.bench.services.hob_toml.apply(yes).await.unwrap()
    }
}

fn text(bench: &Bench, cache: &str, more: &str) -> String {
    let size = hob_storage::pool::device_bytes_for(16 * MIB, SEGMENT);
    format!(
        "state_dir = \"{0}/state\"\n{more}\n[[pool]]\nname = \"p\"\ndevices = [\"{0}/a\"]\nsize = {size}\nsegment_size = \"1M\"\n\
         [[disk]]\nname = \"vm\"\nbacking = \"{0}/vm.img\"\n{cache}\n",
        bench.dir.path().display()
    )
}

const CACHE: &str = "cache = { pool = \"p\", size = \"4M\" }";

#[test]
fn differences_are_listed_and_applied() {
    run(async |bench| {
        bench.image("vm.img", 64);
        bench.image("new.img", 64);
        let first = text(&bench, CACHE, "");
        let filed = Filed::start(bench, &first).await;
        assert_eq!(filed.diff().await, []);
        // By command.
        filed.bench.resize("vm", 8).await.unwrap();
        assert_eq!(filed.diff().await, [("disk vm: cache.size".to_owned(), ConfigRemedy::ApplyWithYes)]);
        let applied = filed.apply(false).await;
        assert!(applied.done.is_empty() && applied.left[0].contains("--yes"), "{applied:?}");
        assert_eq!(filed.bench.room("vm"), 8);
        assert_eq!(filed.apply(true).await.done.len(), 1);
        assert_eq!(filed.bench.room("vm"), 4);
        // By the file.
        let changed = text(
            &filed.bench,
            "cache = { pool = \"p\", size = \"6M\", dirty_full = 90, block_size = \"8K\" }\nqos = { shares = \"high\" }\n\
             [[disk.export]]\nname = \"vm-backup\"\nread_only = true",
            "[limits]\nflash_errors_max = 5\n[[storage_policy]]\nname = \"gold\"\nqos = { shares = \"high\" }",
        );
        let new =
            format!("[[disk]]\nname = \"new\"\nbacking = \"{}\"\n{CACHE}\n", filed.bench.path("new.img"));
        filed.write(&(changed + &new));
        let expected = [
            ("daemon: limits", ConfigRemedy::Reload),
            ("storage-policy gold", ConfigRemedy::Apply),
            ("disk vm: export", ConfigRemedy::Apply),
            ("disk vm: qos", ConfigRemedy::Apply),
            ("disk vm: cache.size", ConfigRemedy::Apply),
            ("disk vm: cache.block_size", ConfigRemedy::ApplyWithYes),
            ("disk vm: cache.dirty_full", ConfigRemedy::Apply),
            ("disk new", ConfigRemedy::Apply),
        ];
        assert_eq!(filed.diff().await, expected.map(|(what, by)| (what.to_owned(), by)));
        let applied = filed.apply(true).await;
        assert_eq!((applied.failed.as_slice(), applied.left.len()), (&[][..], 1), "{applied:?}");
        assert_eq!((filed.bench.room("vm"), filed.bench.room("new")), (6, 4));
        assert_eq!(filed.diff().await, [("daemon: limits".to_owned(), ConfigRemedy::Reload)]);
        // Entries that were removed from the file.
        filed.write(&first);
        let diff = filed.diff().await;
        assert!(diff.contains(&("disk new".to_owned(), ConfigRemedy::ApplyWithYes)), "{diff:?}");
        assert!(diff.contains(&("storage-policy gold".to_owned(), ConfigRemedy::ApplyWithYes)), "{diff:?}");
        filed.bench.shard.set_users(1);
        let applied = filed.apply(true).await;
        assert!(applied.failed.iter().any(|what| what.contains("new has 1 client connected")), "{applied:?}");
        filed.bench.shard.set_users(0);
        filed.apply(true).await;
        assert!(filed.bench.services.observe.disk("new").is_err(), "it is removed when nobody uses it");
    });
}

#[test]
fn disks_made_by_command_are_no_differences_and_a_broken_file_changes_nothing() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, CACHE, "");
        let filed = Filed::start(bench, &first).await;
        filed.bench.disk("mine").await;
        assert_eq!(filed.diff().await, []);
        filed.write(&first.replace("4M", "3.5"));
        let error = filed.bench.services.hob_toml.apply(true).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid);
        assert!(error.to_string().contains("hob.toml:11"), "{error}");
        filed.write(&first.replace("vm.img", "other.img"));
        assert_eq!(filed.diff().await, [("disk vm: backing".to_owned(), ConfigRemedy::Command)]);
        let without = Bench::new();
        let error = without.services.hob_toml.diff().await.unwrap_err();
        assert!(error.to_string().contains("hob serve"), "{error}");
    });
}

#[test]
fn a_cache_that_could_not_be_created_is_degraded_until_it_is_there() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let two = "cache = { pool = \"p\", size = \"4M\", mode = \"write-back\", copies = \"2-dirty\" }";
        let first = text(&bench, two, "");
        let config = Config::parse(&first).unwrap();
        bench.services.startup.start(State::default(), &config).await.unwrap();
        let health = bench.services.observe.health().await;
        assert_eq!(health.problems.len(), 1, "{health:?}");
        let problem = &health.problems[0];
        assert_eq!((problem.kind, problem.subject.as_str()), (hob_control::ProblemKind::CacheDegraded, "vm"));
        assert!(
            problem.reason.contains("could not be created: two copies need two flash devices"),
            "{problem:?}"
        );
        let size = Some(Size(hob_storage::pool::device_bytes_for(16 * MIB, SEGMENT)));
        let add = DeviceAdd { path: bench.path("b"), size, peer: None, force: false };
        bench.services.pools.device_add("p".into(), add).await.unwrap();
        bench.services.hob_toml.apply_changed(&config).await;
        assert!(bench.services.observe.health().await.problems.is_empty());
        assert_eq!(bench.room("vm"), 4);
    });
}

/// The file was changed while the daemon was stopped, or before a reload.
#[test]
fn a_reload_applies_what_was_changed_in_the_file_and_keeps_what_commands_changed() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, CACHE, "[[storage_policy]]\nname = \"gold\"\nqos = { shares = \"high\" }");
        let filed = Filed::start(bench, &first).await;
        filed.bench.resize("vm", 8).await.unwrap();
        let reload = async |text: &str| {
            filed.bench.services.hob_toml.apply_changed(&Config::parse(text).unwrap()).await
        };
        reload(&first).await;
        assert_eq!(filed.bench.room("vm"), 8, "the command has the last word while the file stays as it is");
        reload(&first.replace("4M", "10M")).await;
        assert_eq!(filed.bench.room("vm"), 10);
        // A smaller cache loses data: this is reported and not done.
        reload(&first.replace("4M", "2M")).await;
        assert_eq!(filed.bench.room("vm"), 10);
        assert!(filed.bench.services.hob_toml.definition("disk vm").unwrap().contains("2097152"));
    });
}
