//! Shares, limits and reservations: set, shared and saved, and refused values.

use hob_control::{Arrival, CarryMode, DatastorePatch, DiskQos, QosPatch};

use super::config::{Filed, text};
use super::*;
use crate::services::registry::{DRAINING, MIGRATING, MOVING, OPENING, SHRINKING};

fn reserves(units: u32) -> QosPatch {
    QosPatch { reservation: Some(units), ..QosPatch::default() }
}

impl Bench {
    async fn disk_on(&self, name: &str, datastore: &str) {
        let backing = self.image(&format!("{name}.img"), 64);
        let datastore = Some(datastore.to_owned());
        self.services
            .disks
            .disk_add(DiskAdd { name: name.into(), backing, datastore, ..DiskAdd::default() })
            .await
            .unwrap();
    }

    async fn capacity(&self, datastore: &str, units: u32) -> Result<u32> {
        let patch = DatastorePatch { capacity: Some(units), ..DatastorePatch::default() };
        self.services.qos.datastore_set(datastore.into(), patch).await.map(|store| store.reserved)
    }

    async fn give(&self, disk: &str, patch: QosPatch) -> Result<Qos> {
        self.services.qos.set(disk.into(), patch).await.map(|disk| disk.qos)
    }
}

#[test]
fn rules_are_set_one_by_one_and_taken_back() {
    run(async |bench| {
        bench.disk("vm").await;
        assert_eq!(bench.services.qos.disk("vm").unwrap().qos, Qos::default());
        let patch = QosPatch {
            shares: Some("high".into()),
            limit: Some(500),
            bytes_limit: Some(Size(10 << 20)),
            ..QosPatch::default()
        };
        let qos = bench.give("vm", patch).await.unwrap();
        let wanted =
            Qos { shares: 2000, limit: Some(500), bytes_limit: Some(Size(10 << 20)), ..Qos::default() };
        assert_eq!(qos, wanted);
        let patch = QosPatch { limit: Some(0), shares: Some("750".into()), ..QosPatch::default() };
        let qos = bench.give("vm", patch).await.unwrap();
        assert_eq!(qos, Qos { shares: 750, limit: None, ..wanted });
        for (patch, what) in [
            (QosPatch { shares: Some("0".into()), ..QosPatch::default() }, "shares are low"),
            (QosPatch { shares: Some("highest".into()), ..QosPatch::default() }, "shares are low"),
            (
                QosPatch { limit: Some(5), reservation: Some(6), ..QosPatch::default() },
                "below the reservation",
            ),
            (QosPatch { limit: Some(u32::MAX), ..QosPatch::default() }, "more than"),
            (QosPatch { policy: Some("gold".into()), ..QosPatch::default() }, "no storage policy 'gold'"),
        ] {
            let error = bench.give("vm", patch.clone()).await.unwrap_err();
            assert!(error.problem.error.contains(what), "{patch:?}: {error}");
        }
        assert_eq!(bench.services.qos.disk("vm").unwrap().qos, qos, "nothing of that was taken");
    });
}

/// A drain may take hours, and a limit must apply at once.
#[test]
fn shares_and_limits_apply_while_another_change_of_the_disk_is_in_progress() {
    run(async |bench| {
        bench.disk("vm").await;
        let registry = &bench.services.registry;
        let limit = |units| QosPatch { limit: Some(units), ..QosPatch::default() };
        for (units, doing) in (1..).zip([DRAINING, SHRINKING, OPENING, "resized"]) {
            let guard = registry.guard_disk("vm", doing).unwrap();
            assert_eq!(bench.give("vm", limit(units)).await.unwrap().limit, Some(units), "{doing}");
            bench.shard.set_refuses_qos(true);
            bench.give("vm", limit(100)).await.expect_err("the shard gets the limit");
            bench.shard.set_refuses_qos(false);
            drop(guard);
        }
        for doing in [MIGRATING, MOVING] {
            let guard = registry.guard_disk("vm", doing).unwrap();
            let error = bench.give("vm", limit(100)).await.unwrap_err();
            assert!(error.to_string().contains(&format!("vm is being {doing}")), "{error}");
            drop(guard);
        }
        assert_eq!(bench.services.qos.disk("vm").unwrap().qos.limit, Some(4));
        // The file of the state is not written by two daemons.
        let guard = registry.guard_qos("vm").unwrap();
        let error = bench.services.shutdown.begin().unwrap_err();
        assert!(error.to_string().contains("vm is being given other shares"), "{error}");
        let error = bench.give("vm", limit(100)).await.unwrap_err();
        assert!(error.to_string().contains("vm is being given other shares"), "{error}");
        drop(guard);
        bench.services.shutdown.begin().unwrap();
        let error = bench.give("vm", limit(100)).await.unwrap_err();
        assert!(error.to_string().contains("hob is being upgraded"), "{error}");
        bench.services.shutdown.cancel();
    });
}

#[test]
fn changes_of_the_same_disks_shares_wait_for_each_other() {
    run(async |bench| {
        bench.disk("vm").await;
        let limit = |units| QosPatch { limit: Some(units), ..QosPatch::default() };
        let guard = bench.services.registry.guard_qos("vm").unwrap();
        let other = async {
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            drop(guard);
        };
        let (one, two, ()) = tokio::join!(bench.give("vm", limit(7)), bench.give("vm", limit(8)), other);
        assert_eq!((one.unwrap().limit.is_some(), two.unwrap().limit.is_some()), (true, true));
        let last = bench.services.qos.disk("vm").unwrap().qos.limit;
        assert!([Some(7), Some(8)].contains(&last), "{last:?}");
    });
}

/// Promise 5: the shares and reservations that another host sends for a disk are checked before a
/// shard gets them.
#[test]
fn a_disk_that_comes_is_due_what_one_here_can_be() {
    run(async |bench| {
        let arrival = |qos: Qos| Arrival {
            from: "host7".into(),
            backing: "/vm.img".into(),
            mode: CarryMode::Drop,
            qos: Some(qos),
            ..Arrival::default()
        };
        for wrong in [
            Qos { shares: 0, ..Qos::default() },
            Qos { limit: Some(0), ..Qos::default() },
            Qos { bytes_limit: Some(Size(0)), ..Qos::default() },
            Qos { flash_limit: Some(0), ..Qos::default() },
            Qos { reservation: u32::MAX, ..Qos::default() },
        ] {
            let error = bench.services.migrations.awaited_state("vm", &arrival(wrong)).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Invalid, "{wrong:?}: {error}");
        }
        let due = Qos { reservation: 5, limit: Some(7), ..Qos::default() };
        let state = bench.services.migrations.awaited_state("vm", &arrival(due)).unwrap();
        assert_eq!(state.qos.unwrap().own, due);
    });
}

#[test]
fn reservations_that_a_datastore_cannot_keep_are_refused_with_the_numbers() {
    run(async |bench| {
        bench.disk_on("one", "array").await;
        bench.disk_on("two", "array").await;
        bench.disk_on("else", "other").await;
        let first = bench.services.qos.set("one".into(), reserves(600)).await.unwrap();
        assert!(first.notes[0].contains("is unknown"), "{:?}", first.notes);
        assert_eq!(bench.capacity("array", 1000).await.unwrap(), 600);
        let error = bench.give("two", reserves(401)).await.unwrap_err();
        let said = &error.problem.error;
        assert!(said.contains("1001 units") && said.contains("1000") && said.contains("array"), "{said}");
        bench.give("two", reserves(400)).await.unwrap();
        bench.give("else", reserves(5000)).await.unwrap();
        let error = bench.capacity("array", 999).await.unwrap_err();
        assert!(error.problem.error.contains("reservations of 1000"), "{error}");
    });
}

/// If unused datastores stayed, a daemon would have no room for further datastores after enough
/// changes.
#[test]
fn a_datastore_that_no_disk_uses_any_more_is_removed() {
    run(async |bench| {
        let qos = &bench.services.qos;
        let names = async || -> Vec<String> {
            qos.datastores().await.unwrap().into_iter().map(|store| store.name).collect()
        };
        bench.disk_on("one", "array").await;
        bench.disk_on("two", "other").await;
        let first = qos.datastore_id("array", true).unwrap().0;
        let move_to = async |store: &str| {
            let patch = DiskPatch { datastore: Some(store.into()), ..DiskPatch::default() };
            bench.services.disks.disk_patch("one".into(), patch).await.unwrap();
        };
        move_to("next").await;
        assert_eq!(names().await, ["next", "other"]);
        // Settings are kept for the next disk.
        bench.capacity("next", 1000).await.unwrap();
        move_to("other").await;
        assert_eq!(names().await, ["next", "other"]);
        bench.capacity("next", 0).await.unwrap();
        // A disk that is being opened keeps its datastore.
        let (id, in_use) = qos.datastore_id("opening", false).unwrap();
        assert_eq!(id, first, "the ids are used again");
        qos.drop_unused_datastores();
        assert_eq!(names().await, ["opening", "other"]);
        drop(in_use);
        bench.services.disks.disk_remove("one".into(), OnDirty::Drain).await.unwrap();
        assert_eq!(names().await, ["other"], "another disk uses it");
    });
}

#[test]
fn shares_without_effect_are_reported_until_the_datastore_is_throttled() {
    run(async |bench| {
        bench.disk_on("one", "array").await;
        let shares = |name: &str| QosPatch { shares: Some(name.into()), ..QosPatch::default() };
        let has_note = |qos: &DiskQos| qos.notes.iter().any(|note| note.contains("have no effect yet"));
        let set = async |patch| bench.services.qos.set("one".into(), patch).await.unwrap();
        let off = set(shares("high")).await;
        assert!(has_note(&off) && off.notes[0].contains("set array --throttle auto"), "{:?}", off.notes);
        // Limits need no throttling, and normal shares are those of every disk.
        assert!(!has_note(&set(QosPatch { limit: Some(7), ..shares("normal") }).await));
        assert!(has_note(&set(reserves(5)).await));
        let throttle = DatastorePatch { control: Some("auto".into()), ..DatastorePatch::default() };
        bench.services.qos.datastore_set("array".into(), throttle).await.unwrap();
        assert!(!has_note(&set(shares("high")).await));
    });
}

#[test]
fn a_storage_policy_without_effect_is_reported_once_for_each_datastore() {
    run(async |bench| {
        for disk in ["one", "two"] {
            bench.disk_on(disk, "array").await;
        }
        let shares = |name: &str| QosPatch { shares: Some(name.into()), ..QosPatch::default() };
        let set = async |patch| bench.services.qos.policy_set("gold".into(), patch).await.unwrap().notes;
        assert!(set(shares("high")).await.is_empty(), "no disk follows the policy");
        let gold = QosPatch { policy: Some("gold".into()), ..QosPatch::default() };
        for disk in ["one", "two"] {
            bench.give(disk, gold.clone()).await.unwrap();
        }
        let notes = set(shares("low")).await;
        assert!(notes.len() == 1 && notes[0].contains("set array --throttle auto"), "{notes:?}");
        assert!(set(shares("normal")).await.is_empty());
        let throttle = DatastorePatch { control: Some("auto".into()), ..DatastorePatch::default() };
        bench.services.qos.datastore_set("array".into(), throttle).await.unwrap();
        assert!(set(shares("high")).await.is_empty());
    });
}

#[test]
fn an_applied_file_reports_shares_without_effect() {
    run(async |bench| {
        bench.image("vm.img", 64);
        let file = |bench: &Bench, shares: &str, more: &str| {
            text(bench, &format!("datastore = \"array\"\n{shares}"), more)
        };
        let first = file(&bench, "", "");
        let filed = Filed::start(bench, &first).await;
        filed.write(&file(&filed.bench, "qos = { shares = \"high\" }", ""));
        let applied = filed.apply(false).await;
        assert!(applied.notes.iter().any(|note| note.contains("set array --throttle auto")), "{applied:?}");
        // The throttling is applied before the shares.
        let throttled = "[[datastore]]\nname = \"array\"\nthrottle = \"auto\"";
        filed.write(&file(&filed.bench, "qos = { shares = \"low\" }", throttled));
        let applied = filed.apply(false).await;
        assert!(applied.done.len() == 2 && applied.notes.is_empty(), "{applied:?}");
    });
}

#[test]
fn disks_follow_their_storage_policy() {
    run(async |bench| {
        for disk in ["one", "two"] {
            bench.disk_on(disk, "array").await;
        }
        bench.capacity("array", 1000).await.unwrap();
        let policy = bench.services.qos.policy_set("gold".into(), reserves(300)).await.unwrap();
        assert!(policy.disks.is_empty());
        let gold = QosPatch { policy: Some("gold".into()), ..QosPatch::default() };
        for disk in ["one", "two"] {
            assert_eq!(bench.give(disk, gold.clone()).await.unwrap().reservation, 300);
        }
        // Both hosts have the disk, so both count.
        let error = bench.services.qos.policy_set("gold".into(), reserves(501)).await.unwrap_err();
        assert!(error.problem.error.contains("1002 units"), "{error}");
        let policy = bench.services.qos.policy_set("gold".into(), reserves(500)).await.unwrap();
        assert_eq!((policy.qos.reservation, policy.disks.len()), (500, 2));
        assert_eq!(bench.services.qos.disk("two").unwrap().qos.reservation, 500);
        let error = bench.give("one", reserves(1)).await.unwrap_err();
        assert!(error.problem.error.contains("storage policy gold"), "{error}");
        assert!(bench.services.qos.policy_remove("gold".into()).await.is_err());
        // When the policy is removed from a disk, the disk keeps the policy's current values.
        let alone = QosPatch { policy: Some(String::new()), ..QosPatch::default() };
        for disk in ["one", "two"] {
            assert_eq!(bench.give(disk, alone.clone()).await.unwrap().reservation, 500);
        }
        bench.services.qos.policy_remove("gold".into()).await.unwrap();
    });
}

#[test]
fn all_of_it_is_there_after_a_restart() {
    run(async |bench| {
        let state = bench.dir.path().join("state");
        let (store, _) = Store::open(&state).unwrap();
        let (services, shard) = super::services(store);
        let backing = bench.image("vm.img", 64);
        let add =
            DiskAdd { name: "vm".into(), backing, datastore: Some("array".into()), ..DiskAdd::default() };
        services.disks.disk_add(add).await.unwrap();
        services.qos.policy_set("gold".into(), reserves(300)).await.unwrap();
        let gold = QosPatch { policy: Some("gold".into()), ..QosPatch::default() };
        services.qos.set("vm".into(), gold).await.unwrap();
        let patch =
            DatastorePatch { control: Some("auto".into()), latency_ms: Some(12), capacity: Some(400) };
        let set = services.qos.datastore_set("array".into(), patch).await.unwrap();
        let (qos, policies) = (services.qos.disk("vm").unwrap(), services.qos.policies());
        shard.stop();
        drop(services);
        let (services, _shard) = restart(&state, "").await;
        assert_eq!(services.qos.disk("vm").unwrap(), qos);
        assert_eq!(services.qos.policies(), policies);
        assert_eq!(services.qos.datastore("array").await.unwrap(), set);
        let patch = DatastorePatch { control: Some("depth:0".into()), ..DatastorePatch::default() };
        assert!(services.qos.datastore_set("array".into(), patch).await.is_err());
    });
}

#[test]
fn the_configuration_says_what_nobody_has_said_otherwise() {
    run(async |bench| {
        let (state, image) = (bench.dir.path().join("state"), bench.image("vm.img", 64));
        let text = format!(
            "[[storage_policy]]\nname = \"gold\"\nqos = {{ shares = \"high\", reservation = 30 }}\n\
             [[datastore]]\nname = \"array\"\nthrottle = \"knee\"\ncapacity = 100\n\
             [[disk]]\nname = \"vm\"\nbacking = \"{image}\"\ndatastore = \"array\"\nqos = {{ policy = \"gold\" }}\n"
        );
        let (services, shard) = restart(&state, &text).await;
        let qos = services.qos.disk("vm").unwrap();
        assert_eq!((qos.policy.as_deref(), qos.qos.shares, qos.qos.reservation), (Some("gold"), 2000, 30));
        let store = services.qos.datastore("array").await.unwrap();
        assert_eq!((store.control.as_str(), store.capacity, store.reserved), ("knee", Some(100), 30));
        let error = services.qos.policy_set("gold".into(), reserves(101)).await.unwrap_err();
        assert!(error.problem.error.contains("has a configured capacity of 100"), "{error}");
        services.qos.policy_set("gold".into(), reserves(40)).await.unwrap();
        shard.stop();
        drop(services);
        let (services, _shard) = restart(&state, &text).await;
        assert_eq!(services.qos.disk("vm").unwrap().qos.reservation, 40, "what a command said stays");
    });
}
