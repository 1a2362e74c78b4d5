//! Further exports of a disk.

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
        let changed = bench.manager.export_add("vm".into(), backup("vm-backup")).await.unwrap();
        assert_eq!(changed.disk.unwrap().exports, [backup("vm-backup")]);
        let exports = &bench.manager.exports;
        let (own, further) = (exports.get("vm").unwrap(), exports.get("vm-backup").unwrap());
        assert_eq!((further.disk, further.of.as_str()), (own.disk, "vm"));
        assert_eq!((own.info.read_only, own.promote), (false, Promote::Usual));
        assert_eq!((further.info.read_only, further.promote), (true, Promote::Never));
        bench.manager.export_remove("vm".into(), "vm-backup".into()).await.unwrap();
        assert!(exports.get("vm-backup").is_none() && exports.get("vm").is_some());
    });
}

#[test]
fn exports_leave_with_their_disk_and_their_names_are_free_again() {
    run(async |bench| {
        bench.disk("vm").await;
        bench.manager.export_add("vm".into(), backup("b")).await.unwrap();
        bench.manager.disk_remove("vm".into(), OnDirty::Drain).await.unwrap();
        assert!(bench.manager.exports.get("b").is_none());
        bench.disk("b").await;
    });
}

#[test]
fn names_are_told_apart() {
    run(async |bench| {
        bench.disk("vm").await;
        bench.disk("other").await;
        bench.manager.export_add("vm".into(), backup("b")).await.unwrap();
        for (disk, name, what) in [
            ("other", "b", "disk vm has an export 'b' already"),
            ("vm", "other", "there is a disk 'other' already"),
            ("vm", "vm", "there is a disk 'vm' already"),
            ("vm", "a b", "'a b' cannot be an export's name"),
            ("absent", "c", "absent"),
        ] {
            let refusal = bench.manager.export_add(disk.into(), backup(name)).await.unwrap_err();
            assert!(refusal.problem.error.contains(what), "{disk} {name}: {refusal}");
        }
        let backing = bench.image("b.img", 1);
        let add = DiskAdd { name: "b".into(), backing, read_only: false, ..DiskAdd::default() };
        let refusal = bench.manager.disk_add(add).await.unwrap_err();
        assert!(refusal.problem.error.contains("disk vm has an export 'b'"), "{refusal}");
        let refusal = bench.manager.export_remove("vm".into(), "vm".into()).await.unwrap_err();
        assert!(refusal.to_string().contains("hob disk remove"), "{refusal}");
        for n in 1..16 {
            bench.manager.export_add("vm".into(), backup(&format!("b{n}"))).await.unwrap();
        }
        let refusal = bench.manager.export_add("vm".into(), backup("b16")).await.unwrap_err();
        assert!(refusal.problem.error.contains("16 further exports"), "{refusal}");
    });
}
