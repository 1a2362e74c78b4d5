//! Dirty bitmaps: hob keeps them over restarts, and they never lose a recorded change.

use hob_control::{Bitmap, BitmapAdd, BitmapMerge, BitmapRotate, BitmapState};
use hob_storage::failing::{self, Failing};

use super::recovery::{BLOCK, LAZY, crash, end, prepare, write};
use super::*;

const GRANULE: u64 = 64 << 10;

fn add(name: &str) -> BitmapAdd {
    BitmapAdd { name: name.into(), granularity: None }
}

async fn rotate(bench: &Bench, name: &str, frozen: &str) -> Result<()> {
    let rotate = BitmapRotate { frozen: frozen.into() };
    bench.services.exports.bitmap_rotate("vm".into(), name.into(), rotate).await.map(drop)
}

async fn found(bench: &Bench, name: &str) -> Bitmap {
    let all = bench.services.exports.bitmaps("vm".into()).await.unwrap().bitmaps;
    all.into_iter().find(|bitmap| bitmap.name == name).unwrap_or_else(|| panic!("no bitmap {name}"))
}

/// Returns a bitmap's state, its number of changed bytes, and whether the whole disk counts as
/// changed.
async fn state(bench: &Bench, name: &str) -> (BitmapState, u64, bool) {
    let bitmap = found(bench, name).await;
    (bitmap.state, bitmap.dirty.map_or(0, Size::bytes), bitmap.everything_because.is_some())
}

#[test]
fn bitmaps_survive_a_restart_and_everything_counts_as_changed_after_a_crash() {
    use BitmapState::{Frozen, Recording};
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        bench.services.exports.bitmap_add("vm".into(), add("b")).await.unwrap();
        let contexts = bench.services.exports.table().get("vm").unwrap().info.contexts;
        assert_eq!(contexts, ["qemu:dirty-bitmap:b"]);
        write(&bench, 0..1);
        rotate(&bench, "b", "b1").await.unwrap();
        write(&bench, 100..102);
        assert_eq!(state(&bench, "b1").await, (Frozen, GRANULE, false));
        let bench = end(bench, false, |_| {}).await;
        assert_eq!(state(&bench, "b").await, (Recording, GRANULE, false));
        assert_eq!(bench.services.exports.table().get("vm").unwrap().info.contexts.len(), 2);
        let bench = crash(bench).await;
        assert_eq!(state(&bench, "b").await, (Recording, 64 * MIB, true));
        assert_eq!(state(&bench, "b1").await, (Frozen, GRANULE, false), "no change can have escaped it");
        bench.services.exports.bitmap_clear("vm".into(), "b".into()).await.unwrap();
        let bench = end(bench, false, |_| {}).await;
        assert_eq!(state(&bench, "b").await, (Recording, 0, false));
        let into = BitmapMerge { into: "b".into() };
        bench.services.exports.bitmap_merge("vm".into(), "b1".into(), into).await.unwrap();
        assert_eq!(state(&bench, "b").await, (Recording, GRANULE, false));
        bench.services.disks.disk_remove("vm".into(), OnDirty::Discard).await.unwrap();
        assert!(!bench.dir.path().join("state/bitmaps/vm").exists());
    });
}

#[test]
fn a_damaged_bitmap_file_is_ignored() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        bench.services.exports.bitmap_add("vm".into(), add("b")).await.unwrap();
        let bench = end(bench, false, |dir| {
            let path = dir.join("state/bitmaps/vm/b");
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[100] ^= 1;
            std::fs::write(&path, bytes).unwrap();
        })
        .await;
        let bitmap = found(&bench, "b").await;
        assert_eq!(bitmap.dirty, Some(Size(64 * MIB)));
        assert!(bitmap.everything_because.unwrap().contains("damaged"));
    });
}

/// After acknowledged writes are discarded, the disk has its backing's content.
#[test]
fn discarded_data_is_changed_data() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        write(&bench, 0..10);
        bench.services.exports.bitmap_add("vm".into(), add("b")).await.unwrap();
        bench.services.disks.discard_dirty("vm".into()).await.unwrap();
        let bitmap = found(&bench, "b").await;
        assert_eq!(bitmap.dirty, Some(Size(64 * MIB)));
        assert!(bitmap.everything_because.unwrap().contains("discarded"));
        let bench = end(bench, false, |_| {}).await;
        assert_eq!(state(&bench, "b").await, (BitmapState::Recording, 64 * MIB, true));
    });
}

/// If any part of a rotation cannot be saved, every recorded change is in one of the two bitmaps.
#[test]
fn a_rotation_that_fails_loses_nothing() {
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        bench.services.exports.bitmap_add("vm".into(), add("b")).await.unwrap();
        write(&bench, 0..1);
        let mut struck = 0;
        for nth in 1.. {
            let failure = failing::fail(&bench.dir.path().join("state"), nth, Failing::Once);
            let rotated = rotate(&bench, "b", "b1").await;
            let is_over = !failure.has_struck();
            drop(failure);
            struck += u32::from(!is_over);
            let names: Vec<String> = {
                let all = bench.services.exports.bitmaps("vm".into()).await.unwrap().bitmaps;
                all.into_iter().map(|bitmap| bitmap.name).collect()
            };
            if names.len() == 1 {
                assert!(rotated.is_err());
                assert_eq!(state(&bench, "b").await.1, GRANULE, "the {nth}th change failed");
                continue;
            }
            assert_eq!((state(&bench, "b").await.1, state(&bench, "b1").await.1), (0, GRANULE));
            if is_over {
                rotated.unwrap();
                break;
            }
            let into = BitmapMerge { into: "b".into() };
            bench.services.exports.bitmap_merge("vm".into(), "b1".into(), into).await.unwrap();
        }
        assert!(struck >= 4, "only {struck} changes of files could fail");
    });
}

#[test]
fn invalid_values_are_refused() {
    run(async |bench| {
        let error = bench.services.exports.bitmap_add("vm".into(), add("b")).await.unwrap_err();
        assert!(error.problem.error.contains("no disk 'vm'"), "{error}");
        bench.disk("vm").await;
        let error = bench.services.exports.bitmap_add("vm".into(), add("b")).await.unwrap_err();
        assert!(error.problem.error.contains("saves no state"), "{error}");
    });
    run(async |bench| {
        let bench = prepare(bench, LAZY).await;
        for (granularity, name, what) in [
            (Some(Size(BLOCK - 1)), "b", "a power of two from 4K to 64M"),
            (Some(Size(128 * MIB)), "b", "a power of two from 4K to 64M"),
            (None, "../b", "cannot be a bitmap's name"),
        ] {
            let add = BitmapAdd { name: name.into(), granularity };
            let error = bench.services.exports.bitmap_add("vm".into(), add).await.unwrap_err();
            assert!(error.problem.error.contains(what), "{error}");
        }
        for n in 0..8 {
            bench.services.exports.bitmap_add("vm".into(), add(&format!("b{n}"))).await.unwrap();
        }
        let error = bench.services.exports.bitmap_add("vm".into(), add("b8")).await.unwrap_err();
        assert!(error.problem.error.contains("has 8 bitmaps"), "{error}");
        let error = rotate(&bench, "b0", "b8").await.unwrap_err();
        assert!(error.problem.error.contains("has 8 bitmaps"), "{error}");
        bench.services.exports.bitmap_remove("vm".into(), "b7".into()).await.unwrap();
        let error = rotate(&bench, "b0", "b1").await.unwrap_err();
        assert!(error.problem.error.contains("'b1' already"), "{error}");
        let into = BitmapMerge { into: "b0".into() };
        let error = bench.services.exports.bitmap_merge("vm".into(), "b0".into(), into).await.unwrap_err();
        assert!(error.problem.error.contains("with itself"), "{error}");
        rotate(&bench, "b0", "f").await.unwrap();
        let error = bench.services.exports.bitmap_clear("vm".into(), "f".into()).await.unwrap_err();
        assert!(error.problem.error.contains("is frozen"), "{error}");
    });
}
