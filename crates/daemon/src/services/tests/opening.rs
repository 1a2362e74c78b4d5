//! Opening disks: disks that cannot be opened completely, and settings that their shard gets.

use std::time::Duration;

use hob_control::BackingTimeoutChange;

use super::recovery::reason;
use super::*;
use crate::shard_api::ShardError;
use crate::state::DiskQosSpec;

/// A disk that cannot be prepared must leave its shard: otherwise the next opening would find the
/// backing in use.
#[test]
fn a_disk_that_could_not_be_prepared_is_taken_from_its_shard() {
    run(async |bench| {
        let qos = Some(DiskQosSpec { policy: None, own: Qos::default() });
        let state = DiskState { qos, ..DiskState::new("vm".into(), bench.image("vm.img", 8), false) };
        drop(bench.services.disks.enter(state, None).unwrap());
        bench.shard.set_refuses_qos(true);
        for _ in 0..2 {
            bench.services.disks.bring_online("vm").await;
            assert!(reason(&bench).contains(&ShardError::Busy.to_string()), "{}", reason(&bench));
        }
        assert!(bench.services.registry.inner().abandoned.is_empty());
        bench.shard.set_refuses_qos(false);
        bench.services.disks.bring_online("vm").await;
        assert_eq!(bench.services.observe.disk("vm").unwrap().state, DiskLife::Online);
    });
}

/// A shard keeps a disk after a failed opening. No other disk gets the id that the shard still
/// uses.
#[test]
fn a_disk_that_its_shard_keeps_after_a_failed_opening_blocks_no_other_disk() {
    run(async |bench| {
        let qos = Some(DiskQosSpec { policy: None, own: Qos::default() });
        let state = DiskState { qos, ..DiskState::new("vm".into(), bench.image("vm.img", 8), false) };
        drop(bench.services.disks.enter(state, None).unwrap());
        bench.shard.set_refuses_qos(true);
        bench.shard.set_keeps_disks(true);
        bench.services.disks.bring_online("vm").await;
        assert!(reason(&bench).contains(&ShardError::Busy.to_string()), "{}", reason(&bench));
        bench.shard.set_refuses_qos(false);
        bench.shard.set_keeps_disks(false);
        bench.services.disks.disk_remove("vm".into(), OnDirty::Drain).await.unwrap();
        bench.disk("other").await;
        assert_eq!(bench.services.observe.disk("other").unwrap().state, DiskLife::Online);
    });
}

#[test]
fn a_new_disk_without_its_file_that_its_shard_keeps_blocks_no_other_disk() {
    run(async |bench| {
        let (backing, fuse) = (bench.image("vm.img", 8), Some(bench.path("missing/vm")));
        let add = DiskAdd { name: "vm".into(), backing, fuse, ..DiskAdd::default() };
        bench.shard.set_keeps_disks(true);
        bench.services.disks.add(add).await.unwrap_err();
        assert!(bench.services.observe.disk("vm").is_err());
        bench.disk("other").await;
        assert_eq!(bench.services.observe.disk("other").unwrap().state, DiskLife::Online);
        bench.shard.set_keeps_disks(false);
        let is_kept = || !bench.services.registry.inner().abandoned.is_empty();
        for _ in 0..600 {
            if !is_kept() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(!is_kept());
    });
}

#[test]
fn a_disk_that_its_shard_keeps_after_a_failed_opening_is_opened_when_the_shard_has_removed_it() {
    run(async |bench| {
        let qos = Some(DiskQosSpec { policy: None, own: Qos::default() });
        let state = DiskState { qos, ..DiskState::new("vm".into(), bench.image("vm.img", 8), false) };
        drop(bench.services.disks.enter(state, None).unwrap());
        bench.shard.set_refuses_qos(true);
        bench.shard.set_keeps_disks(true);
        bench.services.disks.bring_online("vm").await;
        bench.shard.set_refuses_qos(false);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(!bench.services.registry.inner().abandoned.is_empty(), "the shard still has the disk");
        bench.shard.set_keeps_disks(false);
        let state = || bench.services.observe.disk("vm").unwrap().state;
        for _ in 0..600 {
            if state() == DiskLife::Online {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(state(), DiskLife::Online);
        assert!(bench.services.registry.inner().abandoned.is_empty());
    });
}

/// A failed opening may still read the journal. A second reading at the same time would need
/// another thread, and memory for another index.
#[test]
fn a_disk_is_not_opened_again_while_its_journal_is_read_for_a_failed_opening() {
    run(async |bench| {
        let state = DiskState::new("vm".into(), bench.image("vm.img", 8), false);
        drop(bench.services.disks.enter(state, None).unwrap());
        let reader = Arc::new(());
        bench.services.registry.inner().disk_mut("vm").unwrap().journal_reader = Arc::downgrade(&reader);
        let state = || bench.services.observe.disk("vm").unwrap().state;
        bench.services.disks.bring_online("vm").await;
        assert_eq!(state(), DiskLife::Offline);
        drop(reader);
        bench.services.disks.bring_online("vm").await;
        assert_eq!(state(), DiskLife::Online);
    });
}

/// The command that adds a disk ends, although the removal of the incomplete disk waits for its
/// backing.
#[test]
fn a_disk_without_its_socket_is_taken_from_its_shard_although_its_backing_does_not_answer() {
    run(async |bench| {
        let backing = bench.image("vm.img", 8);
        let vhost_user = Some(bench.path("missing/vm.sock"));
        let add = DiskAdd { name: "vm".into(), backing, vhost_user, ..DiskAdd::default() };
        bench.shard.set_holds_removals();
        let added = tokio::time::timeout(Duration::from_secs(600), bench.services.disks.add(add)).await;
        let error = added.expect("the backing is abandoned").unwrap_err();
        assert!(error.to_string().contains("cannot open the vhost-user socket"), "{error}");
        assert!(bench.services.observe.disk("vm").is_err());
        assert!(bench.services.registry.inner().abandoned.is_empty());
    });
}

/// The shard needs the stripe size, because it merges writes to whole stripes of the backing.
#[test]
fn the_shard_knows_the_stripe_size_of_a_disk() {
    run(async |bench| {
        let (backing, stripe) = (bench.image("vm.img", 8), Some(Size(192 << 10)));
        let add = DiskAdd { name: "vm".into(), backing, stripe, ..DiskAdd::default() };
        let odd = DiskAdd { stripe: Some(Size(6 << 10)), ..add.clone() };
        let refused = bench.services.disks.disk_add(odd).await.unwrap_err();
        assert!(refused.to_string().contains("must be a multiple of 4K"), "{refused}");
        bench.services.disks.disk_add(add).await.unwrap();
        let id = bench.services.registry.inner().disk("vm").unwrap().id;
        assert_eq!(bench.shard.stripe(id), Some(192 << 10));
        let set = async |bytes| {
            let patch = DiskPatch { stripe: Some(Size(bytes)), ..DiskPatch::default() };
            bench.services.disks.disk_patch("vm".into(), patch).await
        };
        let refused = set(32 << 20).await.unwrap_err();
        assert!(refused.to_string().contains("up to 16M"), "{refused}");
        set(256 << 10).await.unwrap();
        assert_eq!(bench.shard.stripe(id), Some(256 << 10));
        let disk = bench.services.observe.disk("vm").unwrap();
        let size = Some(Size(256 << 10));
        assert_eq!((disk.stripe, disk.stripe_in_effect), (size, size));
        set(0).await.unwrap();
        let disk = bench.services.observe.disk("vm").unwrap();
        assert_eq!(disk.stripe, None);
        let detected = disk.stripe_in_effect.map_or(0, |size| size.bytes());
        assert_eq!(bench.shard.stripe(id).map(u64::from), Some(detected));
    });
}

#[test]
fn a_backing_timeout_that_does_not_apply_to_the_backing_gets_a_note() {
    run(async |bench| {
        let timeout = "30s".parse().unwrap();
        let add = DiskAdd { name: "vm".into(), backing: bench.image("vm.img", 8), ..DiskAdd::default() };
        let added = bench.services.disks.disk_add(DiskAdd { backing_timeout: Some(timeout), ..add }).await;
        let is_about_timeout =
            |note: &String| note.starts_with("the backing timeout does not apply to files");
        let added = added.unwrap();
        assert!(added.notes.iter().any(is_about_timeout), "{:?}", added.notes);
        let reason = added.disk.unwrap().backing_timeout_reason;
        assert!(reason.is_some_and(|reason| reason.contains("ESTALE")));
        let set =
            async |patch: DiskPatch| bench.services.disks.disk_patch("vm".into(), patch).await.unwrap().notes;
        let stripe = DiskPatch { stripe: Some(Size(0)), ..DiskPatch::default() };
        assert!(!set(stripe).await.iter().any(is_about_timeout));
        let (limit, default) = (BackingTimeoutChange::Set(timeout), BackingTimeoutChange::Default);
        for (change, has_note) in [(limit, true), (default, false)] {
            let notes = set(DiskPatch { backing_timeout: Some(change), ..DiskPatch::default() }).await;
            assert_eq!(notes.iter().any(is_about_timeout), has_note, "{notes:?}");
        }
    });
}

/// The lock of a backing that hob itself serves is not that of "another process".
#[test]
fn a_backing_that_another_disk_has_open_is_refused_with_the_name_of_this_disk() {
    run(async |bench| {
        bench.disk("vm").await;
        let link = bench.path("link.img");
        std::os::unix::fs::symlink(bench.path("vm.img"), &link).unwrap();
        for backing in [bench.path("vm.img"), link] {
            let add = DiskAdd { name: "again".into(), backing, ..DiskAdd::default() };
            let error = bench.services.disks.disk_add(add).await.unwrap_err();
            let said = error.to_string();
            assert!(error.kind == ErrorKind::Conflict && said.contains("open for the disk vm"), "{said}");
            assert!(!said.contains("process"), "{said}");
        }
    });
}

#[test]
fn a_backing_with_too_long_a_name_is_refused_as_such() {
    run(async |bench| {
        let backing = format!("nbd://host/{}", "x".repeat(5000));
        let add = DiskAdd { name: "vm".into(), backing, ..DiskAdd::default() };
        let error = bench.services.disks.disk_add(add).await.unwrap_err().to_string();
        assert!(error.contains("has 5011 bytes") && error.contains("at most 4096"), "{error}");
    });
}
