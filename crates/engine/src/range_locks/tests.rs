//! Tests of range locks: hand-written cases, and a comparison with a simple model for random
//! operations. The model is a list of all locks, which is searched linearly.

use proptest::prelude::*;

use super::*;

fn range(first: u64, end: u64) -> Range {
    Range { disk: DiskId(1), first, end }
}

#[test]
fn misses_wait_for_each_other_and_reads_do_not() {
    let mut range_locks = RangeLocks::new(8);
    assert!(range_locks.acquire(0, range(0, 4), Kind::Fill, Kind::Fill));
    assert!(range_locks.acquire(1, range(2, 3), Kind::Read, Kind::Fill));
    assert!(!range_locks.acquire(2, range(3, 5), Kind::Fill, Kind::Fill));
    assert!(range_locks.acquire(3, range(4, 5), Kind::Read, Kind::Fill));
    let mut granted = vec![];
    range_locks.leave(0, |id| granted.push(id));
    assert_eq!(granted, [2]);
}

#[test]
fn a_read_does_not_overtake_a_waiting_write() {
    let mut range_locks = RangeLocks::new(8);
    assert!(range_locks.acquire(0, range(0, 1), Kind::Read, Kind::Fill));
    assert!(!range_locks.acquire(1, range(0, 1), Kind::Change, Kind::Change));
    assert!(!range_locks.acquire(2, range(0, 1), Kind::Read, Kind::Fill));
    let mut granted = vec![];
    range_locks.leave(0, |id| granted.push(id));
    assert_eq!(granted, [1]);
    range_locks.leave(1, |id| granted.push(id));
    assert_eq!(granted, [1, 2]);
}

#[test]
fn a_smaller_range_lets_others_continue() {
    let mut range_locks = RangeLocks::new(8);
    assert!(range_locks.acquire(0, range(2, 9), Kind::Fill, Kind::Fill));
    assert!(!range_locks.acquire(1, range(1, 3), Kind::Fill, Kind::Fill));
    assert!(!range_locks.acquire(2, range(5, 6), Kind::Fill, Kind::Fill));
    let conflicts: Vec<Range> = range_locks.conflicts(range(0, 4), Kind::Fill).collect();
    assert_eq!(conflicts.len(), 2);
    let mut granted = vec![];
    range_locks.narrow(0, range(3, 9), |id| granted.push(id));
    assert_eq!(granted, [1]);
    assert!(!range_locks.acquire(3, range(8, 9), Kind::Change, Kind::Change));
    range_locks.narrow(0, range(9, 9), |id| granted.push(id));
    assert_eq!(granted, [1, 2], "nothing is left, but changes wait");
    range_locks.leave(0, |id| granted.push(id));
    assert_eq!(granted, [1, 2, 3]);
}

#[test]
fn the_larger_part_beside_a_range_remains() {
    let part = |first, end| {
        let Range { first, end, .. } = range(10, 16).larger_part_beside(&range(first, end));
        (first, end)
    };
    assert_eq!((part(12, 13), part(14, 20), part(8, 11)), ((13, 16), (10, 14), (11, 16)));
    let Range { first, end, .. } = range(10, 16).larger_part_beside(&range(9, 16));
    assert_eq!(first, end);
}

#[test]
fn disks_do_not_meet() {
    let mut range_locks = RangeLocks::new(8);
    assert!(range_locks.acquire(0, range(0, 9), Kind::Change, Kind::Change));
    assert!(range_locks.acquire(1, Range { disk: DiskId(2), first: 0, end: 9 }, Kind::Change, Kind::Change));
    assert!(range_locks.is_busy(&range(8, 9)));
    assert!(!range_locks.is_busy(&range(9, 10)));
}

/// The rule of range locks: each lock waits for all earlier locks that overlap and conflict with
/// it.
#[derive(Default)]
struct Model(Vec<(u32, Range, Kind, Range)>);

impl Model {
    fn granted(&self, position: usize) -> bool {
        let (_, range, kind, fill) = self.0[position];
        let both_fill = |k: Kind| k == Kind::Fill && kind == Kind::Fill;
        let overlaps = |f: &Range| f.first < f.end && fill.first < fill.end && f.overlaps(&fill);
        !self.0[..position]
            .iter()
            .any(|(_, r, k, f)| k.conflicts(kind) && r.overlaps(&range) && (!both_fill(*k) || overlaps(f)))
    }
}

proptest! {
    #[test]
    fn behaves_like_the_rule(steps in prop::collection::vec(
        (0u32..4, 0u64..6000, prop_oneof![1u64..20, 1u64..9000], 0u32..3, any::<prop::sample::Index>()), 1..200)) {
        let mut range_locks = RangeLocks::new(32);
        let mut model = Model::default();
        let mut free: Vec<u32> = (0..32).collect();
        for (kind, first, len, disk, pick) in steps {
            let running: Vec<usize> = (0..model.0.len()).filter(|&i| model.granted(i)).collect();
            let before: Vec<u32> = running.iter().map(|&i| model.0[i].0).collect();
            let newly = |model: &Model| -> Vec<u32> {
                let now = (0..model.0.len()).filter(|&i| model.granted(i)).map(|i| model.0[i].0);
                let mut new: Vec<u32> = now.filter(|id| !before.contains(id)).collect();
                new.sort_unstable();
                new
            };
            let may_narrow = |i: &&usize| {
                let (_, range, kind, fill) = model.0[**i];
                let in_one_zone = range.first / ZONE_SECTORS == (range.end - 1) / ZONE_SECTORS;
                in_one_zone && kind == Kind::Fill && fill.first < fill.end
            };
            if kind == 3 && let Some(&position) = running.iter().find(may_narrow) {
                let (id, _, _, Range { first, end, disk }) = model.0[position];
                let to = Range { disk, first: first + pick.index((end - first) as usize + 1) as u64, end };
                model.0[position].3 = to;
                let mut granted = vec![];
                range_locks.narrow(id, to, |id| granted.push(id));
                granted.sort_unstable();
                prop_assert_eq!(granted, newly(&model));
            } else if free.is_empty() || (kind == 0 && !running.is_empty()) {
                let position = running[pick.index(running.len())];
                let (id, ..) = model.0.remove(position);
                let mut granted = vec![];
                range_locks.leave(id, |id| granted.push(id));
                granted.sort_unstable();
                prop_assert_eq!(granted, newly(&model));
                free.push(id);
            } else {
                let id = free.pop().unwrap();
                let kind = [Kind::Read, Kind::Fill, Kind::Change][kind as usize % 3];
                let range = Range { disk: DiskId(disk), first, end: first + len };
                let waiting = if kind == Kind::Read { Kind::Fill } else { kind };
                model.0.push((id, range, kind, range));
                let last = model.0.len() - 1;
                let expected = model.granted(last);
                if !expected {
                    model.0[last].2 = waiting;
                }
                prop_assert_eq!(range_locks.acquire(id, range, kind, waiting), expected);
            }
        }
    }
}
