//! Additional exports of a disk.

use hob_control::Export;
use hob_engine::io::Promote;

use super::*;

fn backup(name: &str) -> Export {
    Export { name: name.into(), read_only: true, no_promote: true, ..Export::default() }
}

#[test]
fn a_further_export_is_the_same_disk_with_fewer_rights() {
    run(async |bench| {
        bench.disk("vm").await;
        let changed = bench.services.disks.export_add("vm".into(), backup("vm-backup")).await.unwrap();
        assert_eq!(changed.disk.unwrap().exports, [backup("vm-backup")]);
        let exports = bench.services.exports.table();
        let (own, further) = (exports.get("vm").unwrap(), exports.get("vm-backup").unwrap());
        assert_eq!((further.disk, further.of.as_str()), (own.disk, "vm"));
        assert_eq!((own.info.read_only, own.promote), (false, Promote::Usual));
        assert_eq!((further.info.read_only, further.promote), (true, Promote::Never));
        bench.services.disks.export_remove("vm".into(), "vm-backup".into()).await.unwrap();
        assert!(exports.get("vm-backup").is_none() && exports.get("vm").is_some());
    });
}

#[test]
fn exports_leave_with_their_disk_and_their_names_are_free_again() {
    run(async |bench| {
        bench.disk("vm").await;
        bench.services.disks.export_add("vm".into(), backup("b")).await.unwrap();
        bench.services.disks.disk_remove("vm".into(), OnDirty::Drain).await.unwrap();
        assert!(bench.services.exports.table().get("b").is_none());
        bench.disk("b").await;
    });
}

#[test]
fn names_are_told_apart() {
    run(async |bench| {
        bench.disk("vm").await;
        bench.disk("other").await;
        bench.services.disks.export_add("vm".into(), backup("b")).await.unwrap();
        for (disk, name, what) in [
            ("other", "b", "disk vm has an export 'b' already"),
            ("vm", "other", "there is a disk 'other' already"),
            ("vm", "vm", "there is a disk 'vm' already"),
            ("vm", "a b", "'a b' cannot be an export's name"),
            ("absent", "c", "absent"),
        ] {
            let error = bench.services.disks.export_add(disk.into(), backup(name)).await.unwrap_err();
            assert!(error.problem.error.contains(what), "{disk} {name}: {error}");
        }
        let backing = bench.image("b.img", 1);
        let add = DiskAdd { name: "b".into(), backing, read_only: false, ..DiskAdd::default() };
        let error = bench.services.disks.disk_add(add).await.unwrap_err();
        assert!(error.problem.error.contains("disk vm has an export 'b'"), "{error}");
        let error = bench.services.disks.export_remove("vm".into(), "vm".into()).await.unwrap_err();
        assert!(error.to_string().contains("hob disk remove"), "{error}");
        for n in 1..16 {
            bench.services.disks.export_add("vm".into(), backup(&format!("b{n}"))).await.unwrap();
        }
        let error = bench.services.disks.export_add("vm".into(), backup("b16")).await.unwrap_err();
        assert!(error.problem.error.contains("16 additional exports"), "{error}");
    });
}

/// Promise 2: clients of a disk always receive that disk, whatever hob.toml adds.
#[test]
fn what_hob_toml_brings_takes_no_name_that_a_command_gave() {
    run(async |bench| {
        let state = bench.dir.path().join("state");
        let bench = bench.with_state();
        bench.disk("x").await;
        bench.services.disks.export_add("x".into(), backup("b")).await.unwrap();
        let image = bench.image("other.img", 8);
        bench.shard.stop();
        drop(bench.services);
        let disk =
            |name: &str| format!("[[disk]]\nname = \"{name}\"\nbacking = \"{image}\"\nread_only = true\n");
        let export = |name: &str| format!("[[disk.export]]\nname = \"{name}\"\n");
        let toml =
            [disk("a"), export("x"), export("a-more"), disk("b"), disk("c"), export("c-more")].concat();
        let (services, _shard) = restart(&state, &toml).await;
        let of = |name: &str| services.exports.table().get(name).map(|export| export.of);
        let names = ["x", "b", "a", "a-more", "c", "c-more"];
        assert_eq!(names.map(of), ["x", "x", "a", "a", "c", "c"].map(|disk| Some(disk.to_owned())));
        assert!(services.observe.disk("b").is_err(), "there is an export of that name");
        // Clients also do not find another disk under a name that was not checked.
        services.exports.table().insert("x", services.exports.table().get("a").unwrap());
        assert_eq!(services.exports.table().get("x").unwrap().of, "x");
        // An export in such a saved state has its name again.
        let taken = DiskState {
            exports: vec![backup("x"), backup("d-more")],
            ..services.registry.inner().disks["a"].wanted.clone()
        };
        let kept = vec![
            DiskState { name: "d".into(), ..taken },
            services.registry.inner().disks["x"].wanted.clone(),
        ];
        let apart = super::super::startup::told_apart(kept, vec![]);
        let exports =
            |disk: &DiskState| disk.exports.iter().map(|export| export.name.clone()).collect::<Vec<_>>();
        assert_eq!(apart.iter().map(exports).collect::<Vec<_>>(), [["d-more"], ["b"]]);
    });
}

/// No file can be mounted in this test, so the addition of the export fails. The export then has no
/// socket either.
#[test]
fn an_export_with_a_socket_and_a_file_is_all_there_or_not_at_all() {
    run(async |bench| {
        bench.disk("vm").await;
        let (socket, nowhere) = (bench.path("b.sock"), bench.path("none/b.img"));
        let at = |path: &str| std::path::Path::new(path).exists();
        let with_socket = Export { vhost_user: Some(socket.clone()), ..backup("b") };
        let half = Export { fuse: Some(nowhere.clone()), ..with_socket.clone() };
        let error = bench.services.disks.export_add("vm".into(), half).await.unwrap_err();
        assert!(error.problem.error.contains("none"), "{error}");
        assert!(!at(&socket) && bench.services.exports.table().get("b").is_none());
        assert!(bench.services.observe.disk("vm").unwrap().exports.is_empty());
        assert_eq!(bench.services.observe.disk("vm").unwrap().fuse_reason, None);
        bench.services.disks.export_add("vm".into(), with_socket.clone()).await.unwrap();
        assert!(at(&socket));
        // The path of an export is not available for another export.
        let again = Export { name: "c".into(), ..with_socket.clone() };
        let error = bench.services.disks.export_add("vm".into(), again).await.unwrap_err();
        assert!(error.problem.error.contains("cannot open the vhost-user socket"), "{error}");
        assert!(at(&socket), "the second one took the first one's socket away");
        bench.services.disks.export_remove("vm".into(), "b".into()).await.unwrap();
        assert!(!at(&socket));
        bench.services.disks.export_add("vm".into(), with_socket).await.unwrap();
        bench.services.disks.disk_remove("vm".into(), OnDirty::Drain).await.unwrap();
        assert!(!at(&socket));
        for (path, what) in [("b.sock", "absolute"), ("", "absolute")] {
            bench.disk("other").await;
            let wrong = Export { vhost_user: Some(path.into()), ..backup("d") };
            let error = bench.services.disks.export_add("other".into(), wrong).await.unwrap_err();
            assert!(error.problem.error.contains(what), "{error}");
            let wrong = Export { fuse: Some(path.into()), ..backup("d") };
            let error = bench.services.disks.export_add("other".into(), wrong).await.unwrap_err();
            assert!(error.problem.error.contains(what), "{error}");
            bench.services.disks.disk_remove("other".into(), OnDirty::Drain).await.unwrap();
        }
    });
}

/// If an export's file cannot be mounted at a restart, hob serves the disk, shows the reason and
/// retries the mount.
#[test]
fn a_disk_says_which_of_its_files_is_not_there() {
    run(async |bench| {
        let backing = bench.image("vm.img", 8);
        let nowhere = bench.path("none/b.img");
        let export = Export { fuse: Some(nowhere), ..backup("b") };
        let wanted = DiskState { exports: vec![export], ..DiskState::new("vm".into(), backing, false) };
        drop(bench.services.disks.enter(wanted, None).unwrap());
        bench.services.disks.bring_online("vm").await;
        let disk = bench.services.observe.disk("vm").unwrap();
        assert_eq!(disk.state, DiskLife::Online);
        let reason = disk.fuse_reason.expect("a reason");
        assert!(reason.starts_with("export b: ") && reason.contains("none"), "{reason}");
        assert_eq!(bench.services.exports.without_file(), ["vm"]);
        bench.services.disks.export_remove("vm".into(), "b".into()).await.unwrap();
        assert!(bench.services.exports.without_file().is_empty());
        assert_eq!(bench.services.observe.disk("vm").unwrap().fuse_reason, None);
    });
}
