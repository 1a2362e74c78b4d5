//! Disks that were created for clones: they are not offered to clients, and are removed with the
//! last clone. Sharing is tested on a cluster (`conformance/tests/rbd/clones.rs`), because files
//! have no parents.

use super::*;
use crate::state::ShareSpec;

/// Returns a clone whose parent's disk is `golden`, with a missing backing.
fn clone_of_golden(bench: &Bench, name: &str) -> DiskState {
    let share_parent = Some(ShareSpec { cache: None, disk: Some("golden".into()) });
    DiskState { share_parent, ..DiskState::new(name.into(), bench.path("nowhere/vm.img"), false) }
}

#[test]
fn a_parents_disk_is_offered_to_nobody_and_goes_with_the_last_clone() {
    run(async |bench| {
        let golden = DiskState {
            for_clones: true,
            ..DiskState::new("golden".into(), bench.image("golden.img", 8), true)
        };
        for state in [golden, clone_of_golden(&bench, "a"), clone_of_golden(&bench, "b")] {
            let name = state.name.clone();
            drop(bench.services.disks.enter(state, None).unwrap());
            bench.services.disks.bring_online(&name).await;
        }
        let disk = bench.services.observe.disk("golden").unwrap();
        assert_eq!((disk.state, disk.clones), (DiskLife::Online, vec!["a".to_owned(), "b".to_owned()]));
        assert!(bench.services.exports.table().get("golden").is_none());
        let error = bench.services.disks.disk_remove("golden".into(), OnDirty::Drain).await.unwrap_err();
        assert!(error.problem.error.contains("a, b"), "{error}");
        bench.services.disks.disk_remove("a".into(), OnDirty::Drain).await.unwrap();
        bench.services.disks.drop_idle_parents();
        assert!(bench.services.observe.disk("golden").is_ok());
        bench.services.disks.disk_remove("b".into(), OnDirty::Drain).await.unwrap();
        for _ in 0..100 {
            if bench.services.observe.disks().is_empty() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        panic!("it is still there: {:?}", bench.services.observe.disks());
    });
}

#[test]
fn what_has_no_parent_is_served_and_says_so() {
    run(async |bench| {
        let backing = bench.image("vm.img", 8);
        let add = DiskAdd { name: "vm".into(), backing, share_parent: true, ..DiskAdd::default() };
        let wrong = DiskAdd { share_parent: false, parent_cache: Some(Size(MIB)), ..add.clone() };
        let error = bench.services.disks.disk_add(wrong).await.unwrap_err();
        assert!(error.to_string().contains("share_parent"), "{error}");
        let changed = bench.services.disks.disk_add(add).await.unwrap();
        assert!(changed.notes[0].contains("it has no parent"), "{:?}", changed.notes);
        let disk = changed.disk.unwrap();
        assert_eq!((disk.state, disk.parent), (DiskLife::Online, None));
        assert!(disk.parent_reason.unwrap().contains("no parent"));
    });
}

#[test]
fn names_of_parents_disks_are_free_and_can_be_typed() {
    run(async |bench| {
        let name = |spec: &str| bench.services.registry.inner().parent_name(spec);
        assert_eq!(name("rbd:vms/golden@base:id=hob:conf=/etc/ceph.conf"), "vms-golden-base");
        assert_eq!(name("rbd:vms/team/a\\:b@c"), "vms-team-a-b-c");
        assert!(name(&format!("rbd:{}/x@y", "p".repeat(300))).len() <= hob_control::NAME_CHARS_MAX);
        let taken = DiskState::new("vms-golden-base".into(), bench.image("x.img", 8), true);
        drop(bench.services.disks.enter(taken, None).unwrap());
        assert_eq!(name("rbd:vms/golden@base"), "vms-golden-base-2");
    });
}
