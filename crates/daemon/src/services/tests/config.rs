//! Comparisons of hob.toml with the served disks.

use hob_control::{ConfigApplied, ConfigRemedy};

use super::recovery::{COMMITTED, read, sectors};
use super::*;

/// A daemon that was started with a hob.toml.
pub(super) struct Filed {
    pub(super) bench: Bench,
    file: std::path::PathBuf,
}

impl Filed {
    pub(super) async fn start(bench: Bench, text: &str) -> Filed {
        let file = bench.dir.path().join("hob.toml");
        std::fs::write(&file, text).unwrap();
        let config = Config::load(&file).unwrap();
        bench.services.startup.start(State::default(), &config).await.unwrap();
        bench.services.hob_toml.set(Box::new(config));
        Filed { bench, file }
    }

    pub(super) fn write(&self, text: &str) {
        std::fs::write(&self.file, text).unwrap();
    }

    pub(super) async fn diff(&self) -> Vec<(String, ConfigRemedy)> {
        let diff = self.bench.services.hob_toml.diff().await.unwrap();
        diff.differences.into_iter().map(|it| (it.what(), it.by)).collect()
    }

    pub(super) async fn apply(&self, yes: bool) -> ConfigApplied {
        self.bench.services.hob_toml.apply(yes).await.unwrap()
    }

    /// Writes this text to hob.toml, and applies the changed settings like a reload of the daemon.
    pub(super) async fn reload(&self, text: &str) {
        self.write(text);
        self.bench.services.hob_toml.apply_changed(&Config::parse(text).unwrap()).await;
    }

    /// Returns the changes of hob.toml that health reports as not in effect.
    pub(super) async fn pending(&self) -> Vec<String> {
        let problems = self.bench.services.observe.health().await.problems.into_iter();
        let pending = problems.filter(|it| it.kind == hob_control::ProblemKind::ConfigPending);
        pending.map(|it| it.reason).collect()
    }
}

pub(super) fn text(bench: &Bench, cache: &str, more: &str) -> String {
    let size = hob_storage::pool::device_bytes_for(16 * MIB, SEGMENT);
    format!(
        "state_dir = \"{0}/state\"\n{more}\n[[pool]]\nname = \"p\"\ndevices = [\"{0}/a\"]\nsize = {size}\nsegment_size = \"1M\"\n\
         [[disk]]\nname = \"vm\"\nbacking = \"{0}/vm.img\"\n{cache}\n",
        bench.dir.path().display()
    )
}

pub(super) const CACHE: &str = "cache = { pool = \"p\", size = \"4M\" }";

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
        assert!(filed.bench.services.observe.disk("new").is_err(), "it is removed when no client uses it");
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
        let applied = filed.apply(true).await;
        assert!(applied.left[0].contains("'hob disk remove vm'"), "{applied:?}");
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
        bench.services.pools.device_add("p".into(), add, OnDirty::Drain).await.unwrap();
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

#[test]
fn a_size_that_no_file_has_and_a_deleted_datastore_are_differences() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, CACHE, "[[datastore]]\nname = \"array\"\nthrottle = \"auto\"");
        let filed = Filed::start(bench, &first).await;
        assert_eq!(filed.diff().await, []);
        let size = hob_storage::pool::device_bytes_for(16 * MIB, SEGMENT);
        filed.write(&first.replace(&format!("size = {size}"), &format!("size = {}", 2 * size)));
        assert_eq!(filed.diff().await, [("pool p: size".to_owned(), ConfigRemedy::Command)]);
        let applied = filed.apply(true).await;
        assert!(applied.left[0].contains("hob pool remove-device p"), "{applied:?}");
        filed.write(&text(&filed.bench, CACHE, ""));
        assert_eq!(filed.diff().await, [("datastore array".to_owned(), ConfigRemedy::ApplyWithYes)]);
        filed.apply(true).await;
        assert_eq!(filed.diff().await, []);
    });
}

#[test]
fn a_deletion_in_the_file_is_a_problem_until_file_and_daemon_agree() {
    run(async |bench| {
        bench.image("vm.img", 64);
        bench.image("new.img", 64);
        let one = text(&bench, CACHE, "");
        let new = format!("[[disk]]\nname = \"new\"\nbacking = \"{}\"\n", bench.path("new.img"));
        let (a, b) = (bench.path("a"), bench.path("b"));
        let two = one.replace(&format!("[\"{a}\"]"), &format!("[\"{a}\", \"{b}\"]"));
        let filed = Filed::start(bench, &(two.clone() + &new)).await;
        let pending = async || filed.pending().await;
        let reload = async |text: &str| filed.reload(text).await;
        assert_eq!(pending().await, [""; 0]);
        // Another reload does not hide the pending change.
        for _ in 0..2 {
            reload(&two).await;
            let found = pending().await;
            assert!(found.len() == 1 && found[0].starts_with("disk new: "), "{found:?}");
            assert!(found[0].contains("hob config apply --yes"), "{found:?}");
        }
        filed.apply(true).await;
        assert_eq!(pending().await, [""; 0]);
        for _ in 0..2 {
            reload(&one).await;
            let found = pending().await;
            assert!(found.len() == 1 && found[0].starts_with("pool p: devices: "), "{found:?}");
        }
        // The file lists the device again.
        filed.write(&two);
        assert_eq!(filed.diff().await, []);
        assert_eq!(pending().await, [""; 0]);
        reload(&two).await;
        assert_eq!(pending().await, [""; 0]);
    });
}

const PERSISTENT: &str = "cache = { pool = \"p\", size = \"4M\", persistent = true }";

fn named(found: &[(&str, ConfigRemedy)]) -> Vec<(String, ConfigRemedy)> {
    found.iter().map(|(what, by)| ((*what).to_owned(), *by)).collect()
}

#[test]
fn socket_access_and_datastore_of_a_disk_follow_the_file() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, PERSISTENT, "");
        let filed = Filed::start(bench, &first).await;
        read(&filed.bench, 0..100);
        tokio::time::sleep(COMMITTED).await;
        let (one, other) = (filed.bench.path("one.sock"), filed.bench.path("other.sock"));
        let with = |socket: &str| {
            format!("{first}vhost_user = \"{socket}\"\nread_only = true\ndatastore = \"array\"\n")
        };
        filed.write(&with(&one));
        let expected = [
            ("disk vm: read_only", ConfigRemedy::Apply),
            ("disk vm: datastore", ConfigRemedy::Apply),
            ("disk vm: vhost_user", ConfigRemedy::Apply),
        ];
        assert_eq!(filed.diff().await, named(&expected));
        // With a client, the disk is not closed. The socket is created.
        filed.bench.shard.set_users(1);
        let applied = filed.apply(false).await;
        assert_eq!((applied.done.len(), applied.failed.len()), (1, 2), "{applied:?}");
        assert!(applied.failed.iter().all(|what| what.contains("vm has 1 client connected")), "{applied:?}");
        assert!(Path::new(&one).exists());
        assert!(!filed.bench.services.observe.disk("vm").unwrap().read_only);
        filed.bench.shard.set_users(0);
        let applied = filed.apply(false).await;
        assert_eq!((applied.done.len(), filed.diff().await), (2, Vec::new()), "{applied:?}");
        let disk = filed.bench.services.observe.disk("vm").unwrap();
        assert_eq!((disk.state, disk.read_only), (DiskLife::Online, true));
        let export = filed.bench.services.exports.table().get("vm").unwrap();
        assert!(export.info.read_only && Path::new(&one).exists());
        let qos = filed.bench.services.qos.disk("vm").unwrap();
        assert_eq!(qos.datastore.as_deref(), Some("array"));
        assert_eq!((sectors(&filed.bench).await, filed.bench.room("vm")), ((100, 0), 4), "it stays warm");
        filed.write(&with(&other));
        assert_eq!(filed.diff().await, named(&[("disk vm: vhost_user", ConfigRemedy::Apply)]));
        filed.apply(false).await;
        assert!(!Path::new(&one).exists() && Path::new(&other).exists());
        filed.write(&first);
        assert_eq!(filed.diff().await, named(&expected));
        let applied = filed.apply(false).await;
        assert_eq!((applied.done.len(), filed.diff().await), (3, Vec::new()), "{applied:?}");
        assert!(!Path::new(&other).exists());
        let export = filed.bench.services.exports.table().get("vm").unwrap();
        assert!(!export.info.read_only);
        assert_eq!((sectors(&filed.bench).await, filed.bench.room("vm")), ((100, 0), 4));
    });
}

#[test]
fn disks_swap_their_sockets() {
    run(async |bench| {
        let names = ["a", "b", "c"];
        names.iter().for_each(|name| _ = bench.image(&format!("{name}.img"), 8));
        let sockets = ["1.sock", "2.sock", "3.sock"].map(|name| bench.path(name));
        let text = |sockets: [&String; 3]| {
            let dir = bench.dir.path().display().to_string();
            let disk = |(name, socket): (&str, &String)| {
                format!(
                    "[[disk]]\nname = \"{name}\"\nbacking = \"{dir}/{name}.img\"\nvhost_user = \"{socket}\"\n"
                )
            };
            let disks: String = names.into_iter().zip(sockets).map(disk).collect();
            format!("state_dir = \"{dir}/state\"\n{disks}")
        };
        let [one, two, three] = &sockets;
        let texts =
            [[one, two, three], [two, one, three], [three, two, one], [two, one, three], [one, three, two]]
                .map(|sockets| (sockets, text(sockets)));
        let filed = Filed::start(bench, &texts[0].1).await;
        for (sockets, text) in &texts[1..] {
            filed.write(text);
            let changes = filed.diff().await.len();
            let applied = filed.apply(false).await;
            assert_eq!((applied.done.len(), filed.diff().await), (changes, Vec::new()), "{applied:?}");
            assert!(!format!("{applied:?}").contains("unless"), "what was done: {applied:?}");
            for (name, socket) in names.into_iter().zip(sockets) {
                let inner = filed.bench.services.registry.inner();
                assert_eq!(inner.disks[name].wanted.vhost_user.as_ref(), Some(*socket));
                assert!(Path::new(socket).exists());
            }
        }
    });
}

#[test]
fn exports_get_the_sockets_that_other_exports_give_up() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, CACHE, "");
        let [one, two] = ["1.sock", "2.sock"].map(|name| bench.path(name));
        let export = |name: &str, socket: &str| {
            format!("[[disk.export]]\nname = \"{name}\"\nvhost_user = \"{socket}\"\n")
        };
        let both = |a: &str, b: &str| format!("{first}{}{}", export("a", a), export("b", b));
        let filed = Filed::start(bench, &both(&one, &two)).await;
        filed.write(&both(&two, &one));
        // Without --yes, no export gives its socket up.
        let applied = filed.apply(false).await;
        assert_eq!((applied.left.len(), applied.failed.len()), (2, 0), "{applied:?}");
        let applied = filed.apply(true).await;
        assert_eq!((applied.done.len(), filed.diff().await), (2, Vec::new()), "{applied:?}");
        // A new export gets the socket of one that is removed.
        filed.write(&format!("{first}{}", export("c", &one)));
        let applied = filed.apply(true).await;
        assert_eq!((applied.done.len(), filed.diff().await), (3, Vec::new()), "{applied:?}");
        assert!(Path::new(&one).exists() && !Path::new(&two).exists());
    });
}

/// Disk b cannot get its new path, so it keeps the path that disk a should get. Disk c already has
/// the former path of disk a.
#[test]
fn a_disk_that_gets_no_path_in_an_exchange_is_reported() {
    run(async |bench| {
        ["a", "b", "c"].iter().for_each(|name| _ = bench.image(&format!("{name}.img"), 8));
        let sockets = bench.path("sockets");
        std::fs::create_dir(&sockets).unwrap();
        let away = bench.path("away");
        let (one, two) = (bench.path("1.sock"), bench.path("2.sock"));
        let three = format!("{sockets}/3.sock");
        let dir = bench.dir.path().display().to_string();
        let text = |of: [&String; 3]| {
            let disk = |(name, socket): (&str, &String)| {
                format!(
                    "[[disk]]\nname = \"{name}\"\nbacking = \"{dir}/{name}.img\"\nvhost_user = \"{socket}\"\n"
                )
            };
            let disks: String = ["a", "b", "c"].into_iter().zip(of).map(disk).collect();
            format!("state_dir = \"{dir}/state\"\n{disks}")
        };
        let filed = Filed::start(bench, &text([&one, &two, &three])).await;
        filed.write(&text([&two, &three, &one]));
        std::fs::rename(&sockets, &away).unwrap();
        let applied = filed.apply(false).await;
        assert_eq!((applied.done.len(), applied.failed.len()), (1, 2), "{applied:?}");
        let of_a = applied.failed.iter().find(|what| what.starts_with("disk a: "));
        assert!(of_a.is_some_and(|what| what.contains("the disk has no vhost_user now")), "{applied:?}");
    });
}

/// Dirty data could not be written to a backing that is opened read-only.
#[test]
fn a_disk_is_drained_before_it_becomes_read_only() {
    run(async |bench| {
        let bench = super::recovery::prepare(bench, super::recovery::LAZY).await;
        super::recovery::write(&bench, 0..20);
        let free = bench.free();
        assert_eq!(sectors(&bench).await.1, 20);
        let set = async |patch: DiskPatch| bench.services.disks.disk_patch("vm".into(), patch).await;
        // Another datastore needs no drain.
        let datastore = Some("array".to_owned());
        set(DiskPatch { datastore, ..DiskPatch::default() }).await.unwrap();
        assert_eq!((sectors(&bench).await.1, bench.free()), (20, free));
        set(DiskPatch { read_only: Some(true), ..DiskPatch::default() }).await.unwrap();
        assert_eq!((sectors(&bench).await.1, bench.free(), bench.room("vm")), (0, free, 4));
        set(DiskPatch { read_only: Some(false), ..DiskPatch::default() }).await.unwrap();
        let cache = bench.services.observe.disk("vm").unwrap().cache.unwrap();
        assert_eq!((cache.mode.as_str(), cache.mode_in_effect), ("write-back", None));
        super::recovery::write(&bench, 0..5);
        assert_eq!(sectors(&bench).await.1, 5);
    });
}

#[test]
fn a_volatile_cache_is_emptied_only_with_yes() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, CACHE, "");
        let filed = Filed::start(bench, &first).await;
        filed.write(&format!("{first}datastore = \"array\"\n"));
        assert_eq!(filed.diff().await, named(&[("disk vm: datastore", ConfigRemedy::ApplyWithYes)]));
        let applied = filed.apply(false).await;
        assert!(applied.done.is_empty() && applied.left[0].contains("--yes"), "{applied:?}");
        let free = filed.bench.free();
        let applied = filed.apply(true).await;
        assert_eq!((applied.done.len(), filed.diff().await), (1, Vec::new()), "{applied:?}");
        assert_eq!((filed.bench.room("vm"), filed.bench.free()), (4, free));
    });
}

#[test]
fn a_disk_that_cannot_be_opened_again_keeps_its_settings() {
    run(async |bench| {
        bench.disk("vm").await;
        let socket = bench.path("vm.sock");
        let patch = DiskPatch { vhost_user: Some(socket.clone()), ..DiskPatch::default() };
        bench.services.disks.disk_patch("vm".into(), patch).await.unwrap();
        bench.take_away("vm.img");
        let patch = DiskPatch { read_only: Some(true), ..DiskPatch::default() };
        let change = async || bench.services.disks.disk_patch("vm".into(), patch.clone()).await;
        let error = change().await.unwrap_err();
        assert!(error.to_string().contains("vm keeps its settings"), "{error}");
        let disk = bench.services.observe.disk("vm").unwrap();
        assert_eq!((disk.state, disk.read_only), (DiskLife::Offline, false));
        bench.bring_back("vm.img");
        bench.services.disks.bring_online("vm").await;
        change().await.unwrap();
        let disk = bench.services.observe.disk("vm").unwrap();
        assert_eq!((disk.state, disk.read_only), (DiskLife::Online, true));
        assert!(Path::new(&socket).exists());
    });
}

#[test]
fn a_disk_that_its_shard_keeps_goes_on_as_before() {
    run(async |bench| {
        bench.disk("vm").await;
        let patch = DiskPatch { datastore: Some("array".to_owned()), ..DiskPatch::default() };
        let change = async || bench.services.disks.disk_patch("vm".into(), patch.clone()).await;
        bench.shard.set_keeps_disks(true);
        change().await.unwrap_err();
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Online);
        let export = bench.services.exports.table().get("vm").unwrap();
        // A shard shortens the wait of a disk that is to leave it.
        assert_eq!(bench.shard.wait_max(export.disk), Some(BackingOptions::default().wait_max));
        bench.shard.set_keeps_disks(false);
        change().await.unwrap();
        let qos = bench.services.qos.disk("vm").unwrap();
        assert_eq!(qos.datastore.as_deref(), Some("array"));
    });
}

/// Two openings of a disk fail, after each of them has made a journal ring.
#[test]
fn a_disk_that_cannot_be_opened_completely_keeps_no_segments_of_the_attempt() {
    run(async |bench| {
        let bench = super::recovery::prepare(bench, super::recovery::LAZY).await;
        let (sockets, away) = (bench.path("sockets"), bench.path("away"));
        std::fs::create_dir(&sockets).unwrap();
        let set = async |patch: DiskPatch| bench.services.disks.disk_patch("vm".into(), patch).await;
        let socket = Some(format!("{sockets}/vm.sock"));
        set(DiskPatch { vhost_user: socket, ..DiskPatch::default() }).await.unwrap();
        super::recovery::write(&bench, 0..20);
        let free = bench.free();
        std::fs::rename(&sockets, &away).unwrap();
        let datastore = Some("array".to_owned());
        let error = set(DiskPatch { datastore, ..DiskPatch::default() }).await.unwrap_err();
        assert!(error.to_string().contains("vm keeps its settings"), "{error}");
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Offline);
        std::fs::rename(&away, &sockets).unwrap();
        bench.services.disks.bring_online("vm").await;
        settled(&bench.services).await;
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Online);
        assert_eq!((sectors(&bench).await.1, bench.room("vm"), bench.free()), (20, 4, free));
    });
}

/// A program that has the file of a disk open waits until the disk is served again.
#[test]
fn a_file_of_the_previous_daemon_stays_while_its_disk_is_offline() {
    run(async |bench| {
        let file = bench.path("vm-file");
        let state = DiskState::new("vm".into(), bench.path("nowhere/vm.img"), false);
        let state = DiskState { fuse: Some(file.clone()), ..state };
        drop(bench.services.disks.enter(state, None).unwrap());
        bench.services.disks.bring_online("vm").await;
        let left = crate::services::InheritedFile {
            path: file.clone().into(),
            device: std::fs::File::open("/dev/null").unwrap().into(),
            mount: crate::mount::Mount::left(file.clone().into(), false),
            attributes: hob_frontends::fuse::Attributes {
                size: 512,
                mode: 0o600,
                uid: 0,
                gid: 0,
                time_ns: 0,
            },
            read_only: false,
        };
        bench.services.exports.inherit_files([("vm".to_owned(), left)]);
        let removed = DiskPatch { fuse: Some(String::new()), ..DiskPatch::default() };
        let read_only = DiskPatch { read_only: Some(true), ..DiskPatch::default() };
        let set = async |patch: DiskPatch| bench.services.disks.disk_patch("vm".into(), patch).await;
        for patch in [&removed, &read_only] {
            let error = set(patch.clone()).await.unwrap_err();
            assert!(error.to_string().contains("programs that have its file"), "{error}");
        }
        assert_eq!(bench.services.observe.disk("vm").unwrap().fuse, Some(file));
        drop(bench.services.exports.leave_left_files());
        for patch in [&removed, &read_only] {
            set(patch.clone()).await.unwrap();
        }
        let disk = bench.services.observe.disk("vm").unwrap();
        assert_eq!((disk.fuse, disk.read_only), (None, true));
    });
}

/// The control API and new clients wait for the end of the start, so the start must not wait for
/// all changes of hob.toml.
#[test]
fn a_start_does_not_wait_for_all_changes_that_wait() {
    run(async |bench| {
        bench.image("vm.img", 64);
        bench.image("other.img", 64);
        let two = |bench: &Bench, size: &str| {
            let cache = format!("cache = {{ pool = \"p\", size = \"{size}\" }}");
            let other = bench.path("other.img");
            text(bench, &cache, "") + &format!("[[disk]]\nname = \"other\"\nbacking = \"{other}\"\n{cache}\n")
        };
        let first = two(&bench, "4M");
        let filed = Filed::start(bench, &first).await;
        let bench = &filed.bench;
        let changed = two(bench, "6M");
        filed.write(&changed);
        bench.shard.set_hangs(true);
        let begun = tokio::time::Instant::now();
        bench.services.hob_toml.apply_at_start(&Config::parse(&changed).unwrap()).await;
        assert!(begun.elapsed() < 2 * crate::shard_api::PATIENCE, "{:?}", begun.elapsed());
        let error = bench.services.hob_toml.apply(false).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Conflict);
        assert!(error.to_string().contains("being applied already"), "{error}");
        bench.shard.set_hangs(false);
        while bench.room("vm") != 6 || bench.room("other") != 6 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        while bench.services.hob_toml.apply(false).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        assert_eq!(filed.diff().await, []);
    });
}

/// Time after which a reload has made the changes that wait for guests.
pub(super) const RETURNED: std::time::Duration = std::time::Duration::from_secs(15);

/// At a reload, guests lose their connection to hob for a moment.
#[test]
fn a_reload_closes_no_disk_before_its_guests_have_returned() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, PERSISTENT, "");
        let filed = Filed::start(bench, &first).await;
        let changed = format!("{first}datastore = \"array\"\n");
        filed.reload(&changed).await;
        let pending = filed.pending().await;
        assert!(
            pending.len() == 1 && pending[0].contains("hob makes this change when guests"),
            "{pending:?}"
        );
        filed.bench.shard.set_users(1);
        // Another reload does not hide a change that was not made.
        for _ in 0..2 {
            tokio::time::sleep(RETURNED).await;
            let pending = filed.pending().await;
            assert!(
                pending.len() == 1 && pending[0].contains("not applied: vm has 1 client connected"),
                "{pending:?}"
            );
            filed.reload(&changed).await;
        }
        filed.bench.shard.set_users(0);
        tokio::time::sleep(RETURNED).await;
        assert_eq!((filed.pending().await, filed.diff().await), (Vec::new(), Vec::new()));
        let qos = filed.bench.services.qos.disk("vm").unwrap();
        assert_eq!(qos.datastore.as_deref(), Some("array"));
    });
}

/// The operator withdraws a waiting change of hob.toml before hob makes it.
#[test]
fn a_change_that_waits_for_guests_is_not_made_while_a_newer_file_is_applied() {
    run(async |bench| {
        bench.image("vm.img", 64);
        bench.image("other.img", 64);
        let text = |datastore: &str, size: &str| {
            let vm = text(&bench, &format!("{PERSISTENT}\n{datastore}"), "");
            let backing = bench.path("other.img");
            let cache = format!("cache = {{ pool = \"p\", size = \"{size}\" }}");
            format!("{vm}[[disk]]\nname = \"other\"\nbacking = \"{backing}\"\n{cache}\n")
        };
        let (first, last) = (text("", "4M"), text("", "6M"));
        let changed = text("datastore = \"array\"", "4M");
        let filed = Filed::start(bench, &first).await;
        filed.reload(&changed).await;
        assert_eq!(filed.pending().await.len(), 1);
        filed.write(&last);
        let seconds = |seconds| tokio::time::sleep(std::time::Duration::from_secs(seconds));
        seconds(5).await;
        filed.bench.shard.set_hangs(true);
        let shard_answers_again = async {
            seconds(7).await;
            filed.bench.shard.set_hangs(false);
        };
        let (applied, ()) = tokio::join!(filed.apply(false), shard_answers_again);
        assert_eq!((applied.done.len(), applied.failed.len()), (1, 0), "{applied:?}");
        tokio::time::sleep(RETURNED).await;
        assert_eq!((filed.pending().await, filed.diff().await), (Vec::new(), Vec::new()));
        assert_eq!(filed.bench.services.registry.inner().disks["vm"].wanted.datastore, None);
    });
}

/// The disk that has the socket releases it only when guests have had time to connect again.
#[test]
fn a_reload_gives_a_disk_the_socket_that_another_disk_gives_up() {
    run(async |bench| {
        ["a", "b"].iter().for_each(|name| _ = bench.image(&format!("{name}.img"), 8));
        let (one, two) = (bench.path("1.sock"), bench.path("2.sock"));
        let dir = bench.dir.path().display().to_string();
        let text = |of_a: &str, of_b: &str| {
            format!(
                "state_dir = \"{dir}/state\"\n[[disk]]\nname = \"a\"\nbacking = \"{dir}/a.img\"\n{of_a}\n\
                 [[disk]]\nname = \"b\"\nbacking = \"{dir}/b.img\"\nvhost_user = \"{of_b}\"\n"
            )
        };
        let filed = Filed::start(bench, &text("", &one)).await;
        filed.reload(&text(&format!("vhost_user = \"{one}\""), &two)).await;
        assert_eq!(filed.pending().await.len(), 2);
        tokio::time::sleep(RETURNED).await;
        assert_eq!((filed.pending().await, filed.diff().await), (Vec::new(), Vec::new()));
        assert!(Path::new(&one).exists() && Path::new(&two).exists());
    });
}

#[test]
fn a_change_in_progress_hides_no_other_change_that_was_not_made() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, PERSISTENT, "");
        let filed = Filed::start(bench, &first).await;
        filed.reload(&format!("{first}datastore = \"array\"\nshare_parent = true\n")).await;
        assert_eq!(filed.pending().await.len(), 2);
        filed.bench.shard.set_hangs(true);
        tokio::time::sleep(std::time::Duration::from_secs(12)).await;
        let pending = filed.pending().await;
        assert!(pending.iter().any(|it| it.contains("share_parent")), "{pending:?}");
        filed.bench.shard.set_hangs(false);
        tokio::time::sleep(RETURNED).await;
        let pending = filed.pending().await;
        assert!(pending.iter().any(|it| it.contains("share_parent")), "{pending:?}");
    });
}

/// A shard that does not answer may have clients, so its disks are not closed.
#[test]
fn a_disk_of_a_shard_that_does_not_answer_is_not_closed() {
    run(async |bench| {
        let backing = bench.image("vm.img", 64);
        let add = DiskAdd { name: "vm".into(), backing, read_only: true, ..DiskAdd::default() };
        bench.services.disks.disk_add(add).await.unwrap();
        bench.shard.set_users(1);
        bench.shard.set_hangs(true);
        let patch = DiskPatch { datastore: Some("array".to_owned()), ..DiskPatch::default() };
        bench.services.disks.disk_patch("vm".into(), patch).await.unwrap_err();
        tokio::time::sleep(2 * crate::shard_api::PATIENCE).await;
        bench.shard.set_hangs(false);
        settled(&bench.services).await;
        assert!(bench.services.exports.table().get("vm").is_some());
        assert_eq!(bench.services.registry.inner().disks["vm"].wanted.datastore, None);
    });
}

/// The operator runs `hob config apply` while a guest is connected, and reloads the daemon later.
#[test]
fn a_change_that_a_command_could_not_make_is_made_after_a_later_reload() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let first = text(&bench, PERSISTENT, "");
        let filed = Filed::start(bench, &first).await;
        let changed = format!("{first}datastore = \"array\"\n");
        filed.write(&changed);
        filed.bench.shard.set_users(1);
        let applied = filed.apply(false).await;
        assert!(applied.done.is_empty() && applied.failed.len() == 1, "{applied:?}");
        assert_eq!(filed.pending().await.len(), 1);
        filed.bench.shard.set_users(0);
        filed.reload(&changed).await;
        tokio::time::sleep(RETURNED).await;
        assert_eq!((filed.pending().await, filed.diff().await), (Vec::new(), Vec::new()));
    });
}

#[test]
fn a_reload_reports_a_change_that_only_commands_make_until_it_is_made() {
    run(async |bench| {
        bench.image("vm.img", 64);
        bench.image("other.img", 64);
        let first = text(&bench, CACHE, "");
        let filed = Filed::start(bench, &first).await;
        for _ in 0..2 {
            filed.reload(&first.replace("vm.img", "other.img")).await;
            let pending = filed.pending().await;
            assert!(pending.len() == 1 && pending[0].contains("'hob disk remove vm'"), "{pending:?}");
        }
        filed.reload(&first).await;
        assert_eq!(filed.pending().await, [""; 0]);
    });
}

#[test]
fn deleted_settings_and_changed_exports_are_differences() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let export = "[[disk.export]]\nname = \"b\"\nread_only = true\n";
        let first = text(&bench, CACHE, "");
        let more = format!("{first}backing_timeout = \"30s\"\nqos = {{ shares = \"high\" }}\n{export}");
        let filed = Filed::start(bench, &more).await;
        assert_eq!(filed.diff().await, []);
        filed.write(&more.replace("30s", "31s"));
        let notes = filed.apply(false).await.notes;
        assert!(
            notes.iter().any(|note| note.starts_with("disk vm: the backing timeout does not")),
            "{notes:?}"
        );
        filed.write(&format!("{first}{}", export.replace("true", "false")));
        let expected = [
            ("disk vm: backing_timeout", ConfigRemedy::Apply),
            ("disk vm: export", ConfigRemedy::ApplyWithYes),
            ("disk vm: qos", ConfigRemedy::Apply),
        ];
        assert_eq!(filed.diff().await, named(&expected));
        let applied = filed.apply(true).await;
        assert_eq!((applied.done.len(), filed.diff().await), (3, Vec::new()), "{applied:?}");
        let disk = filed.bench.services.observe.disk("vm").unwrap();
        assert!(disk.backing_timeout.is_none() && !disk.exports[0].read_only, "{disk:?}");
        assert_eq!(filed.bench.services.qos.disk("vm").unwrap().qos, Qos::default());
        // Commands change what the file never had.
        let qos = hob_control::QosPatch { shares: Some("low".into()), ..hob_control::QosPatch::default() };
        filed.bench.services.qos.set("vm".into(), qos).await.unwrap();
        assert_eq!(filed.diff().await, []);
    });
}
