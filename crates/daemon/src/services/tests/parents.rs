//! Disks that were created for clones: they are not offered to clients, and are removed with the
//! last clone. Clones of an image find the disk of their backing file. Reads of clones are tested
//! with the whole program (`conformance/tests/golden_images.rs` and
//! `conformance/tests/rbd/clones.rs`).

use std::process::Command;

use hob_control::{HealthProblem, ProblemKind};
use hob_engine::command::Access;

use super::*;
use crate::hardware::{Backing, BackingOptions};
use crate::services::disks::image_asked;
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
fn a_parents_disk_stays_for_a_clone_that_is_added_while_its_removal_waits() {
    run(async |bench| {
        let golden = DiskState {
            for_clones: true,
            ..DiskState::new("golden".into(), bench.image("golden.img", 8), true)
        };
        drop(bench.services.disks.enter(golden, None).unwrap());
        bench.services.disks.bring_online("golden").await;
        let set_busy = |busy| bench.services.registry.inner().disk_mut("golden").unwrap().busy = busy;
        set_busy(Some(crate::services::registry::SPREADING));
        let disks = bench.services.disks.clone();
        let removal = tokio::spawn(async move { disks.disk_remove("golden".into(), OnDirty::Drain).await });
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        drop(bench.services.disks.enter(clone_of_golden(&bench, "a"), None).unwrap());
        set_busy(None);
        let error = removal.await.unwrap().unwrap_err();
        assert!(error.problem.error.contains("the parent of these clones: a"), "{error}");
        assert_eq!(bench.services.observe.disk("golden").unwrap().state, DiskLife::Online);
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

/// Creates a qcow2 image in the bench's directory, above another file of this directory.
pub(super) fn qcow2_above(bench: &Bench, name: &str, format: &str, base: &str) -> String {
    let path = bench.path(name);
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2", "-F", format, "-b", &bench.path(base), &path]);
    assert!(command.status().expect("qemu-img is installed").success(), "{name}");
    path
}

/// Returns a request to add a disk that shares its parent's blocks.
fn clone_at(name: &str, backing: String) -> DiskAdd {
    DiskAdd { name: name.into(), backing, share_parent: true, ..DiskAdd::default() }
}

#[test]
fn clones_of_an_image_share_a_disk_until_the_image_changes() {
    run(async |bench| {
        let base = bench.image("base.img", 8);
        for name in ["a", "b"] {
            let backing = qcow2_above(&bench, &format!("{name}.qcow2"), "raw", "base.img");
            bench.services.disks.disk_add(clone_at(name, backing)).await.unwrap();
        }
        let disk = |name: &str| bench.services.observe.disk(name).unwrap();
        let golden = disk("base.img");
        assert_eq!((golden.state, golden.clones), (DiskLife::Online, vec!["a".to_owned(), "b".to_owned()]));
        let all = bench.services.observe.disks();
        let listed = all.iter().find(|disk| disk.name == "base.img").unwrap();
        assert_eq!(listed.clones, ["a", "b"]);
        assert_eq!((disk("a").parent, disk("b").parent), (Some("base.img".into()), Some("base.img".into())));
        bench.services.disks.check_parents().await;
        assert_eq!(disk("a").parent_reason, None, "it is unchanged");
        std::os::unix::fs::FileExt::write_all_at(
            &std::fs::OpenOptions::new().write(true).open(&base).unwrap(),
            &[7; 512],
            0,
        )
        .unwrap();
        bench.services.disks.check_parents().await;
        for name in ["a", "b"] {
            let clone = disk(name);
            assert_eq!((clone.state, clone.parent), (DiskLife::Online, None));
            assert!(clone.parent_reason.unwrap().contains("parent has changed"));
        }
        let problems = bench.services.observe.health().await.problems;
        let is_it = |it: &&HealthProblem| {
            it.kind == ProblemKind::FileMissing && it.subject == "base.img" && it.reason.contains("a, b")
        };
        assert_eq!(problems.iter().filter(is_it).count(), 1, "{problems:?}");
        // A clone that is opened now finds the file in a different state than the disk.
        let backing = qcow2_above(&bench, "c.qcow2", "raw", "base.img");
        bench.services.disks.disk_add(clone_at("c", backing)).await.unwrap();
        assert!(disk("c").parent_reason.unwrap().contains("parent has changed"));
    });
}

/// A shard requires a check of a parent after a pause. The daemon then compares the files at once,
/// and reports to the shard if they are unchanged.
#[test]
fn a_parent_that_has_changed_during_a_pause_is_not_shared_any_more() {
    run(async |bench| {
        let base = bench.image("base.img", 8);
        let backing = qcow2_above(&bench, "a.qcow2", "raw", "base.img");
        bench.services.disks.disk_add(clone_at("a", backing)).await.unwrap();
        let id = bench.services.registry.inner().disk("base.img").unwrap().id;
        let check = async |number| {
            bench.services.disks.clone().check_parent(id, number).await;
            // The shard handles calls one after the other.
            bench.services.observe.stats("a").await.unwrap();
            bench.shard.take_checked_parents()
        };
        assert_eq!(check(1).await, [(id, 1)]);
        let clone = || bench.services.observe.disk("a").unwrap();
        assert_eq!((clone().parent, clone().parent_reason), (Some("base.img".into()), None));
        std::fs::write(&base, vec![7; 8 << 20]).unwrap();
        assert!(check(2).await.is_empty(), "it is not unchanged");
        assert!(clone().parent_reason.unwrap().contains("parent has changed"));
    });
}

/// A renamed image is not shared any more, because another process would not find it.
#[test]
fn a_renamed_image_is_not_shared_any_more() {
    run(async |bench| {
        let base = bench.image("base.img", 8);
        let backing = qcow2_above(&bench, "a.qcow2", "raw", "base.img");
        bench.services.disks.disk_add(clone_at("a", backing)).await.unwrap();
        std::fs::rename(&base, bench.path("other.img")).unwrap();
        bench.services.disks.check_parents().await;
        let clone = bench.services.observe.disk("a").unwrap();
        assert_eq!((clone.state, clone.parent), (DiskLife::Online, None));
        assert!(clone.parent_reason.unwrap().contains("written, renamed or replaced"));
    });
}

/// If the parent's filesystem does not answer while a clone is opened, the parent's disk must stay.
/// Its removal would also remove its cache.
#[test]
fn a_clone_keeps_its_parents_disk_while_the_state_of_the_parent_is_unknown() {
    run(async |bench| {
        let base = bench.image("base.img", 8);
        let backing = qcow2_above(&bench, "a.qcow2", "raw", "base.img");
        bench.services.disks.disk_add(clone_at("a", backing)).await.unwrap();
        let wanted = || bench.services.registry.inner().disk("a").unwrap().wanted.clone();
        let named = || wanted().share_parent.unwrap().disk;
        assert_eq!(named().as_deref(), Some("base.img"));
        let share = async |backing: Backing| {
            let mut notes = Vec::new();
            bench.services.disks.share(&wanted(), backing, &mut notes).await.unwrap();
            notes.concat()
        };
        let again = qcow2_above(&bench, "again.qcow2", "raw", "base.img");
        let image = Some(image_asked(&again, None).unwrap());
        let state = DiskState { image, ..DiskState::new("again".into(), again.clone(), false) };
        let options = bench.services.disks.options_of(&state).await.unwrap().0;
        let options = BackingOptions { shares_parent: true, ..options };
        let clone = Backing::open(&again, Access::ReadWrite, &options).unwrap();
        std::fs::rename(&base, bench.path("away.img")).unwrap();
        let note = share(clone).await;
        assert!(note.contains("until it is opened again: the state of its parent is unknown"), "{note}");
        assert_eq!(named().as_deref(), Some("base.img"));
        let alone = bench.image("alone.img", 8);
        let alone = Backing::open(&alone, Access::ReadWrite, &BackingOptions::default()).unwrap();
        let note = share(alone).await;
        assert!(note.contains("it has no parent"), "{note}");
        assert_eq!(named(), None);
    });
}

/// A parent that guests of another disk may change is not shared, and gets no disk of its own.
#[test]
fn a_file_that_is_served_for_writing_is_no_parent() {
    run(async |bench| {
        bench.image("base.img", 8);
        let backing = qcow2_above(&bench, "a.qcow2", "raw", "base.img");
        let format = Some("raw".to_owned());
        let add =
            DiskAdd { name: "rw".into(), backing: bench.path("base.img"), format, ..DiskAdd::default() };
        bench.services.disks.disk_add(add).await.unwrap();
        bench.services.disks.disk_add(clone_at("a", backing)).await.unwrap();
        assert_eq!(bench.services.observe.disks().len(), 2, "no disk of the parent");
        let clone = bench.services.observe.disk("a").unwrap();
        assert!(clone.parent_reason.unwrap().contains("is served as disk rw"));
    });
}

/// In another format, the same file has other data. So a disk with another format is not the
/// parent's disk.
#[test]
fn a_disk_that_reads_the_parents_file_in_another_format_is_not_used() {
    run(async |bench| {
        bench.image("base.img", 8);
        let golden = qcow2_above(&bench, "golden", "raw", "base.img");
        // hob serves whole sectors of the file's bytes.
        let file = std::fs::File::options().write(true).open(&golden).unwrap();
        file.set_len(file.metadata().unwrap().len().next_multiple_of(512)).unwrap();
        let backing = qcow2_above(&bench, "a.qcow2", "qcow2", "golden");
        for (name, format) in [("bytes", "raw"), ("image", "qcow2")] {
            let format = Some(format.to_owned());
            let add = DiskAdd { name: name.into(), backing: golden.clone(), format, ..DiskAdd::default() };
            bench.services.disks.disk_add(DiskAdd { read_only: true, ..add }).await.unwrap();
        }
        bench.services.disks.disk_add(clone_at("a", backing)).await.unwrap();
        let disks = bench.services.observe.disks();
        assert_eq!(disks.len(), 3, "no further disk is created: {disks:?}");
        let parent = |name: &str| bench.services.observe.disk(name).unwrap().parent;
        assert_eq!(parent("a").as_deref(), Some("image"));
        bench.services.disks.disk_remove("image".into(), OnDirty::Drain).await.unwrap();
        assert_eq!(parent("a"), None);
        let backing = qcow2_above(&bench, "b.qcow2", "qcow2", "golden");
        bench.services.disks.disk_add(clone_at("b", backing)).await.unwrap();
        assert_eq!(parent("b").as_deref(), Some("golden"), "it is created");
        assert_eq!(parent("a"), parent("b"));
    });
}

#[test]
fn names_of_parents_disks_are_free_and_can_be_typed() {
    run(async |bench| {
        let name = |spec: &str| bench.services.registry.inner().parent_name(spec);
        assert_eq!(name("rbd:vms/golden@base:id=hob:conf=/etc/ceph.conf"), "vms-golden-base");
        assert_eq!(name("rbd:vms/team/a\\:b@c"), "vms-team-a-b-c");
        assert_eq!(name("/srv/golden images/windows 11.qcow2"), "windows-11.qcow2");
        assert!(name(&format!("rbd:{}/x@y", "p".repeat(300))).len() <= hob_control::NAME_CHARS_MAX);
        let taken = DiskState::new("vms-golden-base".into(), bench.image("x.img", 8), true);
        drop(bench.services.disks.enter(taken, None).unwrap());
        assert_eq!(name("rbd:vms/golden@base"), "vms-golden-base-2");
    });
}
