//! Range locks on sectors, granted in order of arrival.
//!
//! Each request locks its range of sectors. A lock waits for every *earlier* lock that overlaps and
//! conflicts with it, whether the earlier lock is granted or not. So there is no starvation and no
//! deadlock. Range locks ensure that requests which miss the same data fetch the data once, that a
//! fill never replaces the data of a later write, and that a read never sees half of a write.
//!
//! | | Read | Fill | Transfer | Change |
//! |---|---|---|---|---|
//! | Read (served from flash, or bypassing the cache) | – | – | – | waits |
//! | Fill (a read that will fill flash) | – | waits | waits | waits |
//! | Transfer (a destage that writes to the backing) | – | waits | waits | – |
//! | Change (write, discard, zeroes) | waits | waits | – | waits |
//!
//! A transfer begins as a Fill and becomes a Transfer when it has read flash. So a write to flash
//! does not wait for a slow backing. A change that goes to the backing must wait for the end of the
//! transfer, and the lock alone does not ensure that.
//!
//! Locks are found through zones of 1 MiB that are hashed to buckets. So adding or removing a lock
//! checks only nearby locks.

use crate::units::{DiskId, SECTOR_BYTES};

const ZONE_SECTORS: u64 = (1 << 20) / SECTOR_BYTES;
const NONE: u32 = u32::MAX;

/// Use of a locked range by the owner of the lock. The table above lists the conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Fill,
    Transfer,
    Change,
}

impl Kind {
    fn conflicts(self, other: Kind) -> bool {
        match (self, other) {
            (Kind::Transfer, Kind::Change) | (Kind::Change, Kind::Transfer) => false,
            (Kind::Change, _) | (_, Kind::Change) | (Kind::Fill, Kind::Fill) => true,
            (Kind::Read, _) | (_, Kind::Read) => false,
            (Kind::Transfer, _) | (_, Kind::Transfer) => true,
        }
    }
}

/// Sectors `first..end` of one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) disk: DiskId,
    pub(crate) first: u64,
    pub(crate) end: u64,
}

impl Range {
    #[inline]
    pub(crate) fn overlaps(&self, other: &Range) -> bool {
        self.first < other.end && other.first < self.end && self.disk == other.disk
    }

    /// Returns true if all sectors of another range are in this one.
    #[inline]
    pub(crate) fn contains(&self, other: &Range) -> bool {
        self.first <= other.first && other.end <= self.end && self.disk == other.disk
    }

    /// Returns the part of this range before or after another range, whichever is longer; the part
    /// may be empty.
    pub(crate) fn larger_part_beside(&self, other: &Range) -> Range {
        let before = Range { end: other.first.clamp(self.first, self.end), ..*self };
        let after = Range { first: other.end.clamp(self.first, self.end), ..*self };
        if before.end - before.first > after.end - after.first { before } else { after }
    }
}

#[derive(Clone, Copy, Debug)]
struct RangeLock {
    range: Range,
    kind: Kind,
    /// Part of the range in which a lock of the kind Fill conflicts with others of this kind.
    fill: Range,
    order: u64,
    /// Number of conflicts with earlier locks. A pair of locks counts once for each bucket that
    /// both are in.
    blockers: u32,
    links: u32,
}

impl RangeLock {
    fn new(range: Range, kind: Kind) -> RangeLock {
        RangeLock { range, kind, fill: range, order: 0, blockers: 0, links: NONE }
    }

    /// Returns true if the owner of the lock may use the cached data of any of these sectors.
    fn is_using(&self, range: &Range) -> bool {
        self.blockers == 0 && if self.kind == Kind::Fill { &self.fill } else { &self.range }.overlaps(range)
    }

    fn conflicts(&self, other: &RangeLock) -> bool {
        // A transfer was still a fill when other locks counted their conflicts with it, so it
        // counts as a fill here.
        let fills = |lock: &RangeLock| matches!(lock.kind, Kind::Fill | Kind::Transfer);
        self.kind.conflicts(other.kind)
            && self.range.overlaps(&other.range)
            && (!fills(self) || !fills(other) || self.fill.overlaps(&other.fill))
    }
}

/// An entry of a lock in one bucket.
#[derive(Clone, Copy, Debug)]
struct Link {
    lock: u32,
    bucket: u32,
    prev: u32,
    next: u32,
    /// Next link of the same lock, or the next free link.
    sibling: u32,
}

/// All range locks of one engine.
#[derive(Debug)]
pub(crate) struct RangeLocks {
    range_locks: Vec<RangeLock>,
    buckets: Vec<u32>,
    links: Vec<Link>,
    free: u32,
    order: u64,
}

impl RangeLocks {
    /// Allocates memory for locks numbered from 0 to `locks_max` − 1.
    pub(crate) fn new(locks_max: u32) -> Self {
        let empty = RangeLock::new(Range { disk: DiskId(0), first: 0, end: 0 }, Kind::Read);
        RangeLocks {
            range_locks: vec![empty; locks_max as usize],
            buckets: vec![NONE; (locks_max as usize).next_power_of_two()],
            links: Vec::with_capacity(2 * locks_max as usize),
            free: NONE,
            order: 0,
        }
    }

    /// Adds lock `id`. Returns true if the lock is granted immediately. Otherwise a later
    /// [`leave`](Self::leave) grants it. The lock has the kind `kind` if it has no conflict, and
    /// `waiting` otherwise.
    pub(crate) fn acquire(&mut self, id: u32, range: Range, kind: Kind, waiting: Kind) -> bool {
        debug_assert!(range.first < range.end && self.range_locks[id as usize].links == NONE);
        self.order += 1;
        let mut lock = RangeLock { order: self.order, ..RangeLock::new(range, kind) };
        if self.count_conflicts(&lock) > 0 {
            lock.kind = waiting;
            lock.blockers = self.count_conflicts(&lock);
        }
        self.range_locks[id as usize] = lock;
        for bucket in self.buckets_of(&range) {
            self.link(id, bucket);
        }
        self.range_locks[id as usize].blockers == 0
    }

    /// Returns the ranges for which a new lock of this kind would wait.
    pub(crate) fn conflicts(&self, range: Range, kind: Kind) -> impl Iterator<Item = Range> {
        let new = RangeLock::new(range, kind);
        self.buckets_of(&range)
            .flat_map(move |bucket| self.in_bucket(bucket).filter(move |lock| lock.conflicts(&new)))
            .map(|lock| if lock.kind == Kind::Fill { lock.fill } else { lock.range })
    }

    /// Reduces the range in which a granted lock of kind Fill conflicts with others of its kind,
    /// and reports each lock that becomes granted. Changes still wait for the whole range. The
    /// part may be empty.
    pub(crate) fn narrow(&mut self, id: u32, part: Range, granted: impl FnMut(u32)) {
        let before = self.range_locks[id as usize];
        assert!(before.kind == Kind::Fill && before.blockers == 0 && before.fill.contains(&part));
        // The empty range at sector 0 overlaps nothing.
        let nothing = Range { first: 0, end: 0, ..part };
        let fill = if part.first < part.end { part } else { nothing };
        self.weaken(id, RangeLock { fill, ..before }, granted);
    }

    /// Replaces a granted lock by one with fewer conflicts in the same range, and reports each lock
    /// that becomes granted.
    fn weaken(&mut self, id: u32, after: RangeLock, mut granted: impl FnMut(u32)) {
        let before = std::mem::replace(&mut self.range_locks[id as usize], after);
        let mut link = before.links;
        while link != NONE {
            let Link { bucket, sibling, .. } = self.links[link as usize];
            let mut at = self.buckets[bucket as usize];
            while at != NONE {
                let other = self.links[at as usize];
                let lock = &mut self.range_locks[other.lock as usize];
                if lock.order > before.order && lock.conflicts(&before) && !lock.conflicts(&after) {
                    lock.blockers -= 1;
                    if lock.blockers == 0 {
                        granted(other.lock);
                    }
                }
                at = other.next;
            }
            link = sibling;
        }
    }

    /// Returns true if lock `id` is of kind Read.
    pub(crate) fn only_reads(&self, id: u32) -> bool {
        self.range_locks[id as usize].kind == Kind::Read
    }

    /// Turns a granted lock of kind Fill into one of kind Transfer, and reports each change that
    /// becomes granted.
    pub(crate) fn permit_changes(&mut self, id: u32, granted: impl FnMut(u32)) {
        let before = self.range_locks[id as usize];
        assert!(before.kind == Kind::Fill && before.blockers == 0);
        self.weaken(id, RangeLock { kind: Kind::Transfer, ..before }, granted);
    }

    /// Removes lock `id` and reports each lock that becomes granted.
    pub(crate) fn leave(&mut self, id: u32, mut granted: impl FnMut(u32)) {
        let leaving = self.range_locks[id as usize];
        assert!(leaving.links != NONE && leaving.blockers == 0, "lock {id} leaves without being granted");
        let mut link = leaving.links;
        self.range_locks[id as usize].links = NONE;
        while link != NONE {
            let Link { bucket, sibling, .. } = self.links[link as usize];
            self.unlink(link);
            let mut at = self.buckets[bucket as usize];
            while at != NONE {
                let other = self.links[at as usize];
                let lock = &mut self.range_locks[other.lock as usize];
                if other.lock != id && lock.order > leaving.order && lock.conflicts(&leaving) {
                    lock.blockers -= 1;
                    if lock.blockers == 0 {
                        granted(other.lock);
                    }
                }
                at = other.next;
            }
            link = sibling;
        }
    }

    /// Returns true if the owner of a granted lock may use the cached data of any of these sectors.
    pub(crate) fn is_busy(&self, range: &Range) -> bool {
        self.buckets_of(range).any(|bucket| self.in_bucket(bucket).any(|lock| lock.is_using(range)))
    }

    /// Returns true if the owner of a granted lock other than `id` may use the cached data of any
    /// of these sectors.
    pub(crate) fn is_shared(&self, id: u32, range: &Range) -> bool {
        let order = self.range_locks[id as usize].order;
        self.buckets_of(range)
            .any(|bucket| self.in_bucket(bucket).any(|lock| lock.order != order && lock.is_using(range)))
    }

    fn count_conflicts(&self, lock: &RangeLock) -> u32 {
        let conflicts = |bucket| self.in_bucket(bucket).filter(|other| other.conflicts(lock)).count() as u32;
        self.buckets_of(&lock.range).map(conflicts).sum()
    }

    fn in_bucket(&self, bucket: u32) -> impl Iterator<Item = &RangeLock> {
        let mut at = self.buckets[bucket as usize];
        std::iter::from_fn(move || {
            (at != NONE).then(|| {
                let link = &self.links[at as usize];
                at = link.next;
                &self.range_locks[link.lock as usize]
            })
        })
    }

    fn buckets_of(&self, range: &Range) -> impl Iterator<Item = u32> + use<> {
        let (mask, disk) = (self.buckets.len() as u64 - 1, range.disk.0);
        (range.first / ZONE_SECTORS..=(range.end - 1) / ZONE_SECTORS).map(move |zone| {
            // Consecutive zones of one disk are in consecutive buckets, so one lock causes no
            // collisions.
            let scatter = (u64::from(disk) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
            (zone.wrapping_add(scatter) & mask) as u32
        })
    }

    fn link(&mut self, id: u32, bucket: u32) {
        let head = self.buckets[bucket as usize];
        let new =
            Link { lock: id, bucket, prev: NONE, next: head, sibling: self.range_locks[id as usize].links };
        let at = if self.free != NONE {
            let at = self.free;
            self.free = self.links[at as usize].sibling;
            self.links[at as usize] = new;
            at
        } else {
            self.links.push(new);
            self.links.len() as u32 - 1
        };
        if head != NONE {
            self.links[head as usize].prev = at;
        }
        self.buckets[bucket as usize] = at;
        self.range_locks[id as usize].links = at;
    }

    fn unlink(&mut self, at: u32) {
        let Link { bucket, prev, next, .. } = self.links[at as usize];
        if prev == NONE {
            self.buckets[bucket as usize] = next;
        } else {
            self.links[prev as usize].next = next;
        }
        if next != NONE {
            self.links[next as usize].prev = prev;
        }
        self.links[at as usize].sibling = self.free;
        self.free = at;
    }
}

#[cfg(test)]
mod tests;
