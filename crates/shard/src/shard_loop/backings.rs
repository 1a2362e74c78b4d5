//! The backings of a shard's disks, and the earliest of their timeouts.
//!
//! The loop needs the earliest timeout twice in each turn. A shard may serve thousands of disks, of
//! which few have I/O in a turn. So the earliest timeout is kept for each [`BLOCK`] neighbouring
//! disks, and is computed again only if one of them may have changed: each mutable access counts as
//! a change. A backing's timeout depends on nothing else.

use std::ops::Range;

use hob_engine::units::{DiskId, Instant};
use hob_storage::backing::Backing;

/// Number of disks whose earliest timeout is kept together.
const BLOCK: usize = 32;

/// The backings of a shard, by disk.
#[derive(Default)]
pub(super) struct Backings {
    /// Backings, indexed by disk id.
    all: Vec<Option<Backing>>,
    timeouts: Timeouts,
}

impl Backings {
    pub(super) fn get(&self, disk: DiskId) -> Option<&Backing> {
        self.all.get(disk.0 as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, disk: DiskId) -> Option<&mut Backing> {
        let index = disk.0 as usize;
        self.timeouts.note_change(index);
        self.all.get_mut(index)?.as_mut()
    }

    pub(super) fn insert(&mut self, disk: DiskId, backing: Backing) {
        let index = disk.0 as usize;
        if self.all.len() <= index {
            self.all.resize_with(index + 1, || None);
        }
        self.all[index] = Some(backing);
        self.timeouts.note_change(index);
    }

    pub(super) fn remove(&mut self, disk: DiskId) {
        let index = disk.0 as usize;
        self.timeouts.note_change(index);
        if let Some(backing) = self.all.get_mut(index) {
            *backing = None;
        }
    }

    /// Returns the disks that have a backing, in ascending order.
    pub(super) fn disks(&self) -> impl Iterator<Item = DiskId> + '_ {
        let open = self.all.iter().enumerate().filter(|(_, backing)| backing.is_some());
        open.map(|(index, _)| DiskId(index as u32))
    }

    /// Returns the earliest time at which a backing has to handle a timeout.
    pub(super) fn poll_timeout(&mut self) -> Option<Instant> {
        let Backings { all, timeouts } = self;
        timeouts
            .earliest(all.len(), |range| all[range].iter().flatten().filter_map(Backing::poll_timeout).min())
    }

    /// Returns the disks whose backings have a timeout at `now` or earlier.
    pub(super) fn expired(&mut self, now: Instant) -> Vec<DiskId> {
        if self.poll_timeout().is_none_or(|at| at > now) {
            return Vec::new();
        }
        let is_expired =
            |disk: &DiskId| self.get(*disk).and_then(Backing::poll_timeout).is_some_and(|at| at <= now);
        self.disks().filter(is_expired).collect()
    }
}

/// The earliest timeout of each block of [`BLOCK`] disks.
#[derive(Debug, Default)]
struct Timeouts(Vec<Earliest>);

/// The earliest timeout of a block.
#[derive(Clone, Copy, Debug, Default)]
enum Earliest {
    /// A disk of the block may have changed.
    #[default]
    Unknown,
    Known(Option<Instant>),
}

impl Timeouts {
    /// Records that the timeout of this disk may have changed.
    fn note_change(&mut self, index: usize) {
        if let Some(block) = self.0.get_mut(index / BLOCK) {
            *block = Earliest::Unknown;
        }
    }

    /// Returns the earliest timeout of the disks with indexes below `len`. `of` returns the
    /// earliest timeout of a range of disks.
    fn earliest(&mut self, len: usize, of: impl Fn(Range<usize>) -> Option<Instant>) -> Option<Instant> {
        self.0.resize(len.div_ceil(BLOCK), Earliest::Unknown);
        let of_block = |(number, block): (usize, &mut Earliest)| match *block {
            Earliest::Known(at) => at,
            Earliest::Unknown => {
                let start = number * BLOCK;
                let at = of(start..len.min(start + BLOCK));
                *block = Earliest::Known(at);
                at
            }
        };
        self.0.iter_mut().enumerate().filter_map(of_block).min()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const DISKS: usize = 1000;

    #[test]
    fn only_disks_that_may_have_changed_are_asked_again() {
        let mut due = vec![None; DISKS];
        (due[40], due[999]) = (Some(Instant(7)), Some(Instant(5)));
        let asked = RefCell::new(Vec::new());
        let mut timeouts = Timeouts::default();
        let ask = |timeouts: &mut Timeouts, due: &[Option<Instant>]| {
            asked.borrow_mut().clear();
            let earliest = timeouts.earliest(due.len(), |range| {
                asked.borrow_mut().push(range.clone());
                due[range].iter().flatten().copied().min()
            });
            (earliest, asked.borrow().clone())
        };
        let (earliest, ranges) = ask(&mut timeouts, &due);
        assert_eq!((earliest, ranges.len()), (Some(Instant(5)), DISKS.div_ceil(BLOCK)));
        assert_eq!((ranges[1].clone(), ranges[31].clone()), (32..64, 992..DISKS));
        assert_eq!(ask(&mut timeouts, &due), (Some(Instant(5)), vec![]));
        due[999] = None;
        due[70] = Some(Instant(6));
        timeouts.note_change(999);
        timeouts.note_change(70);
        assert_eq!(ask(&mut timeouts, &due), (Some(Instant(6)), vec![64..96, 992..DISKS]));
        // A disk is added in a new block, and in the last block of the table.
        due.resize(1025, None);
        due[1024] = Some(Instant(1));
        timeouts.note_change(1000);
        timeouts.note_change(1024);
        assert_eq!(ask(&mut timeouts, &due), (Some(Instant(1)), vec![992..1024, 1024..1025]));
    }
}
